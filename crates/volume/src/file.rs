//! Image files and block devices as a [`Device`].
//!
//! Hides how the operating system is asked: positioned reads and writes (short transfers and
//! interrupted calls are carried on with), `fdatasync` for a flush, hole punching or `BLKDISCARD`
//! for a discard, and the alignment that `O_DIRECT` wants. Whoever holds a [`FileDevice`] holds the
//! right to use the image too: opening looks for other users first and takes a lock that lasts as
//! long as the device ([`crate::lock`]).
//!
//! A flush makes the file's *size* durable only where the size changed since it was last durable;
//! an image's size changes when it is made and never afterwards, so that ordinary flushes do not
//! pay for it. Files are never grown by a write: an image is as long as it was when it was opened,
//! and writing past that is an error, as on a disk.
//!
//! With direct I/O, transfers whose place and length are whole blocks go past the page cache,
//! through an aligned bounce buffer where the caller's memory is not aligned; the few others (a
//! label wiped with a few bytes, the odd tail of a file) go through a second, buffered descriptor
//! of the same file, which the kernel keeps coherent with the first.

use crate::device::Device;
use crate::error::{VolumeError, VolumeResult};
use crate::lock::{self, ImageLock};
use larder_format::{Physical, SECTOR_SIZE};
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// What the device will be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Only read. Others may read at the same time.
    Read,
    /// Read and write. Nobody else may use the image meanwhile.
    Write,
}

/// Alignment that direct transfers are given: address, length and memory.
const DIRECT_ALIGN: usize = 4096;
/// Largest piece that is moved through the bounce buffer at once.
const BOUNCE: usize = 1 << 20;
/// Most buffers that one vectored system call takes.
#[cfg(target_os = "linux")]
const IOV_MAX: usize = 1024;

/// An image file or block device, opened and locked.
#[derive(Debug)]
pub struct FileDevice {
    path: PathBuf,
    /// For aligned transfers; `O_DIRECT` if that was asked for.
    file: File,
    /// For unaligned transfers when `file` is direct.
    buffered: Option<File>,
    size: u64,
    read_only: bool,
    block_device: bool,
    /// The size is not known to be durable yet.
    size_changed: AtomicBool,
    /// Cleared when the host turns out not to support discarding.
    can_discard: AtomicBool,
    discard_granularity: u64,
    _lock: Option<ImageLock>,
}

impl FileDevice {
    /// Opens an existing image file or block device, refusing one that is in use.
    ///
    /// `direct` asks for transfers that bypass the page cache; where the host's file system cannot do that
    /// (or the platform has none), opening fails with the reason rather than silently caching.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] when somebody else uses the image (see [`crate::lock`]); otherwise why it could not be
    /// opened: missing, a directory, no permission, no block device.
    pub fn open(path: impl AsRef<Path>, mode: OpenMode, direct: bool) -> VolumeResult<Self> {
        Self::open_inner(path.as_ref(), mode, direct, false)
    }

    /// Opens for reading even if somebody else is using the image. What is read may be in the middle of a change.
    ///
    /// # Errors
    /// As [`FileDevice::open`], without [`VolumeError::Busy`].
    pub fn open_despite_users(path: impl AsRef<Path>, direct: bool) -> VolumeResult<Self> {
        Self::open_inner(path.as_ref(), OpenMode::Read, direct, true)
    }

    /// Makes a file of `size` bytes (sparse), or gives an existing regular file that size, and opens it for writing.
    /// Block devices keep their size.
    ///
    /// # Errors
    /// As [`FileDevice::open`]. An existing file that is in use is not touched.
    pub fn create(path: impl AsRef<Path>, size: u64) -> VolumeResult<Self> {
        let path = path.as_ref();
        if !path.exists() {
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(path)
                .map_err(|e| io_error(path, "create", Physical(0), 0, e))?;
        }
        let mut device = Self::open_inner(path, OpenMode::Write, false, false)?;
        if !device.block_device && device.size != size {
            device.set_size(size)?;
        }
        Ok(device)
    }

    /// Gives an image file another length. Bytes that it gains read as zeros.
    ///
    /// # Errors
    /// Read-only, a block device, or what the host's file system says.
    pub fn set_size(&mut self, size: u64) -> VolumeResult<()> {
        let fail = |e| io_error(&self.path, "resize", Physical(0), 0, e);
        if self.block_device || self.read_only {
            return Err(fail(io::Error::new(io::ErrorKind::Unsupported, "not a writable image file")));
        }
        self.file.set_len(size).map_err(fail)?;
        self.size = size;
        self.size_changed.store(true, Ordering::Release);
        Ok(())
    }

    fn open_inner(path: &Path, mode: OpenMode, direct: bool, despite_users: bool) -> VolumeResult<Self> {
        let fail = |op, e| io_error(path, op, Physical(0), 0, e);
        let meta = std::fs::metadata(path).map_err(|e| fail("open", e))?;
        let block_device = is_block_device(&meta);
        if meta.is_dir() {
            return Err(fail("open", io::Error::new(io::ErrorKind::IsADirectory, "is a directory")));
        }
        if !meta.is_file() && !block_device {
            return Err(fail(
                "open",
                io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a block device"),
            ));
        }
        let write = mode == OpenMode::Write;
        let mut file = OpenOptions::new()
            .read(true)
            .write(write)
            .open(path)
            .map_err(|e| fail(if write { "open for writing" } else { "open" }, e))?;
        let lock = if despite_users { None } else { Some(lock::acquire(&file, path, mode)?) };
        let size = if block_device {
            // The end of a block device is its size, without a platform's own ioctl.
            io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(|e| fail("look up the size", e))?
        } else {
            // Looked up anew: the lock is held only now.
            file.metadata().map_err(|e| fail("look up the size", e))?.len()
        };
        // Asked now: a process that confines itself cannot ask later.
        let granularity = os::discard_granularity(&file, block_device);
        let (file, buffered) = if direct {
            let d = open_direct(path, write).map_err(|e| fail("open for direct I/O", e))?;
            (d, Some(file))
        } else {
            (file, None)
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            buffered,
            size,
            read_only: !write,
            block_device,
            size_changed: AtomicBool::new(false),
            can_discard: AtomicBool::new(granularity != Some(0)),
            discard_granularity: granularity.unwrap_or(u64::from(SECTOR_SIZE)),
            _lock: lock,
        })
    }

    /// Path that it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A block device (not an image file)?
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Do transfers bypass the page cache?
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.buffered.is_some()
    }

    fn check_range(&self, at: Physical, len: usize, kind: io::ErrorKind) -> io::Result<()> {
        match at.0.checked_add(len as u64) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(io::Error::new(
                kind,
                format!("{len} bytes at {at} reach past the end of {} bytes", self.size),
            )),
        }
    }

    fn check_writable(&self, at: Physical, len: usize) -> io::Result<()> {
        if self.read_only {
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "opened read-only"));
        }
        self.check_range(at, len, io::ErrorKind::StorageFull)
    }
}

impl Device for FileDevice {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.check_range(at, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let Some(buffered) = &self.buffered else { return os::read_exact_at(&self.file, buf, at.0) };
        if !aligned(at.0, buf.len()) {
            return os::read_exact_at(buffered, buf, at.0);
        }
        if is_aligned_memory(buf) {
            return os::read_exact_at(&self.file, buf, at.0);
        }
        with_bounce(buf.len().min(BOUNCE), |bounce| {
            let mut at = at.0;
            for piece in buf.chunks_mut(bounce.len()) {
                let bounce = &mut bounce[..piece.len()];
                os::read_exact_at(&self.file, bounce, at)?;
                piece.copy_from_slice(bounce);
                at += piece.len() as u64;
            }
            Ok(())
        })
    }

    fn read_at_once(&self, at: Physical, buf: &mut [u8]) -> bool {
        // Where the page cache is bypassed every read waits.
        self.buffered.is_none()
            && self.check_range(at, buf.len(), io::ErrorKind::UnexpectedEof).is_ok()
            && os::read_cached_at(&self.file, buf, at.0)
    }

    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.check_writable(at, data.len())?;
        let Some(buffered) = &self.buffered else { return os::write_all_at(&self.file, data, at.0) };
        if !aligned(at.0, data.len()) {
            return os::write_all_at(buffered, data, at.0);
        }
        if is_aligned_memory(data) {
            return os::write_all_at(&self.file, data, at.0);
        }
        with_bounce(data.len().min(BOUNCE), |bounce| {
            let mut at = at.0;
            for piece in data.chunks(bounce.len()) {
                let bounce = &mut bounce[..piece.len()];
                bounce.copy_from_slice(piece);
                os::write_all_at(&self.file, bounce, at)?;
                at += piece.len() as u64;
            }
            Ok(())
        })
    }

    fn write_vectored_at(&self, at: Physical, data: &[IoSlice<'_>]) -> io::Result<()> {
        let len = data.iter().map(|d| d.len()).sum::<usize>();
        self.check_writable(at, len)?;
        let Some(buffered) = &self.buffered else { return os::write_vectored_at(&self.file, data, at.0) };
        if !aligned(at.0, len) {
            return os::write_vectored_at(buffered, data, at.0);
        }
        if data.iter().all(|d| d.len().is_multiple_of(DIRECT_ALIGN) && is_aligned_memory(d)) {
            return os::write_vectored_at(&self.file, data, at.0);
        }
        // Gathered into one buffer: one large transfer beats several small ones.
        with_bounce(len.min(BOUNCE), |bounce| {
            let (mut at, mut filled) = (at.0, 0);
            for mut d in data.iter().map(|d| &d[..]) {
                while !d.is_empty() {
                    let n = d.len().min(bounce.len() - filled);
                    bounce[filled..filled + n].copy_from_slice(&d[..n]);
                    (filled, d) = (filled + n, &d[n..]);
                    if filled == bounce.len() {
                        os::write_all_at(&self.file, bounce, at)?;
                        (at, filled) = (at + filled as u64, 0);
                    }
                }
            }
            os::write_all_at(&self.file, &bounce[..filled], at)
        })
    }

    fn flush(&self) -> io::Result<()> {
        if self.read_only {
            return Ok(());
        }
        if self.size_changed.load(Ordering::Acquire) {
            self.file.sync_all()?;
            self.size_changed.store(false, Ordering::Release);
            return Ok(());
        }
        self.file.sync_data()
    }

    fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
        if len == 0 || !self.can_discard.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.check_writable(at, usize::try_from(len).unwrap_or(usize::MAX))?;
        match os::discard(&self.file, self.block_device, at.0, len) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                self.can_discard.store(false, Ordering::Relaxed);
                Ok(())
            }
            other => other,
        }
    }

    fn can_discard(&self) -> bool {
        !self.read_only && self.can_discard.load(Ordering::Relaxed)
    }

    fn discard_granularity(&self) -> u64 {
        self.discard_granularity
    }

    fn data_from(&self, at: Physical) -> Physical {
        if self.block_device || at.0 >= self.size {
            return at;
        }
        os::data_from(&self.file, at.0).map_or(at, |found| Physical(found.unwrap_or(self.size)))
    }

    fn start_writeback(&self, at: Physical, len: u64) {
        if self.buffered.is_none() && !self.read_only {
            os::start_writeback(&self.file, at.0, len);
        }
    }
}

fn io_error(path: &Path, op: &'static str, at: Physical, len: u64, source: io::Error) -> VolumeError {
    VolumeError::Io { device: path.display().to_string(), op, at, len, source }
}

fn aligned(at: u64, len: usize) -> bool {
    at.is_multiple_of(DIRECT_ALIGN as u64) && len.is_multiple_of(DIRECT_ALIGN)
}

fn is_aligned_memory(buf: &[u8]) -> bool {
    buf.as_ptr().addr().is_multiple_of(DIRECT_ALIGN)
}

/// Lends an aligned buffer of `len` bytes (a multiple of the alignment, at most [`BOUNCE`]) that belongs to the thread.
fn with_bounce<T>(len: usize, f: impl FnOnce(&mut [u8]) -> io::Result<T>) -> io::Result<T> {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    debug_assert!(len <= BOUNCE && len.is_multiple_of(DIRECT_ALIGN));
    if len == 0 {
        return f(&mut []);
    }
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len + DIRECT_ALIGN {
            *buffer = vec![0; len + DIRECT_ALIGN];
        }
        let start = buffer.as_ptr().addr().next_multiple_of(DIRECT_ALIGN) - buffer.as_ptr().addr();
        f(&mut buffer[start..start + len])
    })
}

#[cfg(unix)]
fn is_block_device(meta: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    meta.file_type().is_block_device()
}
#[cfg(not(unix))]
fn is_block_device(_: &std::fs::Metadata) -> bool {
    false
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path, write: bool) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().read(true).write(write).custom_flags(libc::O_DIRECT).open(path)
}
#[cfg(not(target_os = "linux"))]
fn open_direct(_: &Path, _: bool) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "direct I/O is not supported on this platform"))
}

/// The calls that differ between operating systems.
mod os {
    use std::fs::File;
    use std::io::{self, IoSlice};

    #[cfg(unix)]
    pub(super) fn read_exact_at(file: &File, buf: &mut [u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(file, buf, at)
    }
    #[cfg(unix)]
    pub(super) fn write_all_at(file: &File, data: &[u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(file, data, at)
    }

    #[cfg(windows)]
    pub(super) fn read_exact_at(file: &File, mut buf: &mut [u8], mut at: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(file, buf, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (at, buf) = (at + n as u64, &mut buf[n..]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
    #[cfg(windows)]
    pub(super) fn write_all_at(file: &File, mut data: &[u8], mut at: u64) -> io::Result<()> {
        while !data.is_empty() {
            match std::os::windows::fs::FileExt::seek_write(file, data, at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => (at, data) = (at + n as u64, &data[n..]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Reads what is in the page cache. False where some of it is not, or the file system cannot say.
    #[cfg(target_os = "linux")]
    pub(super) fn read_cached_at(file: &File, buf: &mut [u8], at: u64) -> bool {
        let len = buf.len();
        let mut slices = [io::IoSliceMut::new(buf)];
        rustix::io::preadv2(file, &mut slices, at, rustix::io::ReadWriteFlags::NOWAIT).is_ok_and(|n| n == len)
    }
    #[cfg(not(target_os = "linux"))]
    pub(super) fn read_cached_at(_: &File, _: &mut [u8], _: u64) -> bool {
        false
    }

    #[cfg(target_os = "linux")]
    pub(super) fn write_vectored_at(file: &File, data: &[IoSlice<'_>], mut at: u64) -> io::Result<()> {
        for group in data.chunks(super::IOV_MAX) {
            let mut slices = group.to_vec();
            let mut rest = &mut slices[..];
            // Drops leading empty buffers, so that a result of 0 means what it says.
            IoSlice::advance_slices(&mut rest, 0);
            while !rest.is_empty() {
                match rustix::io::pwritev(file, rest, at) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => {
                        at += n as u64;
                        IoSlice::advance_slices(&mut rest, n);
                    }
                    Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        Ok(())
    }
    #[cfg(not(target_os = "linux"))]
    pub(super) fn write_vectored_at(file: &File, data: &[IoSlice<'_>], mut at: u64) -> io::Result<()> {
        for d in data {
            write_all_at(file, d, at)?;
            at += d.len() as u64;
        }
        Ok(())
    }

    #[cfg(target_os = "linux")]
    pub(super) fn discard(file: &File, block_device: bool, at: u64, len: u64) -> io::Result<()> {
        if !block_device {
            use rustix::fs::FallocateFlags;
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            return Ok(rustix::fs::fallocate(file, how, at, len)?);
        }
        const BLOCK: u64 = super::DIRECT_ALIGN as u64;
        const BLKDISCARD: rustix::ioctl::Opcode = 0x1277;
        // It takes whole blocks only.
        let (from, to) = (at.next_multiple_of(BLOCK), (at + len) / BLOCK * BLOCK);
        if from >= to {
            return Ok(());
        }
        // SAFETY: BLKDISCARD reads two u64, start and length in bytes, from the pointer that it is given, and keeps nothing.
        unsafe {
            let arg = rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([from, to - from]);
            Ok(rustix::ioctl::ioctl(file, arg)?)
        }
    }
    #[cfg(not(target_os = "linux"))]
    pub(super) fn discard(_: &File, _: bool, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Bytes below which a discard of this file gives nothing back: blocks of its file system, or what the kernel says of
    /// a block device, 0 where that takes no discards. `None`: not known.
    #[cfg(target_os = "linux")]
    pub(super) fn discard_granularity(file: &File, block_device: bool) -> Option<u64> {
        use std::os::unix::fs::MetadataExt;
        if !block_device {
            return u64::try_from(rustix::fs::fstatfs(file).ok()?.f_bsize).ok().filter(|n| *n > 0);
        }
        let number = file.metadata().ok()?.rdev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let at = format!("/sys/dev/block/{major}:{minor}");
        // A partition has its device's queue.
        let queues = ["queue", "../queue"].map(|queue| format!("{at}/{queue}/discard_granularity"));
        let text = queues.iter().find_map(|path| std::fs::read_to_string(path).ok())?;
        text.trim().parse().ok()
    }
    #[cfg(not(target_os = "linux"))]
    pub(super) fn discard_granularity(_: &File, _: bool) -> Option<u64> {
        None
    }

    /// Where data begins from `at` on; `None` in it if there is none any more. Moves the file's position, which nothing
    /// else here uses.
    #[cfg(target_os = "linux")]
    pub(super) fn data_from(file: &File, at: u64) -> Option<Option<u64>> {
        match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
            Ok(found) => Some(Some(found)),
            Err(rustix::io::Errno::NXIO) => Some(None),
            Err(_) => None,
        }
    }
    #[cfg(not(target_os = "linux"))]
    pub(super) fn data_from(_: &File, _: u64) -> Option<Option<u64>> {
        None
    }

    #[cfg(target_os = "linux")]
    pub(super) fn start_writeback(file: &File, at: u64, len: u64) {
        use std::os::fd::AsRawFd;
        let (Ok(at), Ok(len)) = (i64::try_from(at), i64::try_from(len)) else { return };
        // Advisory: an error here says nothing that the flush would not say again.
        // SAFETY: plain system call on a descriptor that `file` keeps open; no memory is passed.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE);
        }
    }
    #[cfg(not(target_os = "linux"))]
    pub(super) fn start_writeback(_: &File, _: u64, _: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(size: u64) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("img");
        File::create(&path).unwrap().set_len(size).unwrap();
        (dir, path)
    }

    fn pattern(n: usize, salt: u8) -> Vec<u8> {
        (0..n).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ salt).collect()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn holes_are_passed_over() {
        let (_dir, path) = image(64 << 20);
        let d = FileDevice::open(&path, OpenMode::Write, false).unwrap();
        d.write_at(Physical(32 << 20), &[1; 4096]).unwrap();
        // A file system without holes says that everything is data; none may say that data is a hole.
        assert!(d.data_from(Physical(0)).0 <= 32 << 20);
        assert_eq!(d.data_from(Physical(32 << 20)), Physical(32 << 20));
        assert!((40 << 20..=64 << 20).contains(&d.data_from(Physical(40 << 20)).0));
        assert_eq!(d.data_from(Physical(64 << 20)), Physical(64 << 20));
        let mut back = [0; 4096];
        d.read_at(Physical(32 << 20), &mut back).unwrap();
        assert_eq!(back, [1; 4096]);
    }

    /// The host's file system may not know O_DIRECT (older tmpfs): then only the buffered half is tested.
    fn both_ways(path: &Path) -> Vec<bool> {
        if open_direct(path, true).is_ok() { vec![false, true] } else { vec![false] }
    }

    #[test]
    fn what_is_written_is_read_at_every_alignment() {
        let (_dir, path) = image(8 << 20);
        for direct in both_ways(&path) {
            let d = FileDevice::open(&path, OpenMode::Write, direct).unwrap();
            assert_eq!(d.is_direct(), direct);
            for (i, (at, len)) in [(0u64, 4096), (4096, 3 << 20), (65536, 100), (65537, 5000), (12288, 4097)]
                .into_iter()
                .enumerate()
            {
                let data = pattern(len + 1, i as u8 + u8::from(direct) * 100);
                d.write_at(Physical(at), &data[1..]).unwrap();
                let mut back = vec![0; len + 1];
                d.read_at(Physical(at), &mut back[1..]).unwrap();
                assert_eq!(back[1..], data[1..], "direct {direct}, at {at}, len {len}");
            }
            d.flush().unwrap();
        }
    }

    #[test]
    fn vectored_writes_join_their_buffers() {
        let (_dir, path) = image(4 << 20);
        for direct in both_ways(&path) {
            let d = FileDevice::open(&path, OpenMode::Write, direct).unwrap();
            // More buffers than one system call takes, empty ones among them, and more than a bounce buffer holds.
            let parts: Vec<Vec<u8>> =
                (0..1500).map(|i| pattern([0, 4096, 512, 3584][i % 4], i as u8)).collect();
            let slices: Vec<IoSlice<'_>> = parts.iter().map(|p| IoSlice::new(p)).collect();
            let whole = parts.concat();
            assert!(whole.len() > BOUNCE);
            for at in [8192, 1000] {
                d.write_vectored_at(Physical(at), &slices).unwrap();
                let mut back = vec![0; whole.len()];
                d.read_at(Physical(at), &mut back).unwrap();
                assert!(back == whole, "direct {direct}, at {at}");
            }
        }
    }

    #[test]
    fn ends_and_modes_are_respected() {
        let (_dir, path) = image(10_000);
        let d = FileDevice::open(&path, OpenMode::Read, false).unwrap();
        assert_eq!(d.size(), 10_000);
        assert!(d.is_read_only());
        assert_eq!(d.write_at(Physical(0), b"x").unwrap_err().kind(), io::ErrorKind::ReadOnlyFilesystem);
        let mut buf = [0; 100];
        assert_eq!(d.read_at(Physical(9_950), &mut buf).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(d.read_at(Physical(u64::MAX), &mut buf).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        drop(d);
        let d = FileDevice::open(&path, OpenMode::Write, false).unwrap();
        assert_eq!(d.write_at(Physical(9_999), b"xy").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 10_000, "a write must not grow the image");
        assert!(FileDevice::open(path.parent().unwrap(), OpenMode::Read, false).is_err());
        assert!(FileDevice::open("/dev/null", OpenMode::Read, false).is_err());
        assert!(FileDevice::open("/nonexistent/image", OpenMode::Read, false).is_err());
    }

    #[test]
    fn create_gives_the_size_and_discard_the_space_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new");
        let d = FileDevice::create(&path, 1 << 20).unwrap();
        d.write_at(Physical(0), &pattern(1 << 20, 1)).unwrap();
        d.flush().unwrap();
        d.discard(Physical(65536), 128 << 10).unwrap();
        let mut back = vec![1; 128 << 10];
        d.read_at(Physical(65536), &mut back).unwrap();
        if d.can_discard.load(Ordering::Relaxed) {
            assert!(back.iter().all(|b| *b == 0));
        }
        d.start_writeback(Physical(0), 65536);
        drop(d);
        let d = FileDevice::create(&path, 2 << 20).unwrap();
        assert_eq!(d.size(), 2 << 20);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    }
}
