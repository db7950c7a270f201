//! Image files and block devices as a [`Device`].
//!
//! Hides how the operating system is asked: positioned reads and writes (short and interrupted ones
//! are carried on with), `fdatasync` for a flush, hole punching or `BLKDISCARD` for a discard, and
//! the alignment that `O_DIRECT` wants. Opening takes a lock on the image, which lasts as long as
//! the device (`lock`).
//!
//! A flush makes the file's *size* durable only if it has changed since: an image's size changes
//! when it is made, and ordinary flushes do not pay for it. A write never makes a file longer:
//! writing past its end is an error, as on a disk.
//!
//! Whole blocks are written past the page cache where that can be done ([`Caching`]). Reads, and
//! what is no whole block (a label wiped with a few bytes, the tail of a file), go through a
//! second, buffered descriptor of the same file. The kernel keeps both coherent.

mod aligned;
#[cfg(target_os = "linux")]
mod batch;
mod direct;
#[cfg(unix)]
mod handover;
mod memory;
mod os;
#[cfg_attr(not(target_os = "linux"), path = "overlap/none.rs")]
pub(crate) mod overlap;
mod passing;

use crate::device::{Device, Write};
#[cfg(target_os = "linux")]
use crate::device::{Read, Work};
use crate::error::{VolumeError, VolumeResult};
use crate::lock::{self, ImageLock};
use aligned::is_aligned;
use direct::Direct;
use larder_format::{Physical, SECTOR_SIZE};
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use crate::lock::OpenMode;
#[cfg(unix)]
pub use handover::Handover;
pub use memory::TransferMemory;

/// Whether transfers go through the machine's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// Writes do not, where the file system that the image lies on can do that.
    #[default]
    Auto,
    /// None do; where that cannot be done, opening fails.
    Direct,
    /// All do.
    Buffered,
}

/// An image file or block device, opened and locked.
#[derive(Debug)]
pub struct FileDevice {
    path: PathBuf,
    /// For what goes through the page cache, and everything that is not a transfer.
    file: File,
    /// For what goes past it.
    direct: Option<Direct>,
    size: AtomicU64,
    read_only: bool,
    block_device: bool,
    /// The size is not known to be durable yet.
    size_changed: AtomicBool,
    /// Cleared when the host turns out not to support discarding.
    can_discard: AtomicBool,
    discard_granularity: u64,
    lock: Option<ImageLock>,
}

impl FileDevice {
    /// Opens an existing image file or block device, refusing one that is in use.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] when the image is in use; otherwise why it could not be opened:
    /// missing, a directory, no permission, no block device.
    pub fn open(path: impl AsRef<Path>, mode: OpenMode) -> VolumeResult<Self> {
        Self::open_cached(path, mode, Caching::Auto)
    }

    /// As [`FileDevice::open`], for a caller that insists on transfers through the page cache or
    /// past it.
    ///
    /// # Errors
    /// As [`FileDevice::open`]; with [`Caching::Direct`] also that there is no direct I/O where the
    /// image lies.
    pub fn open_cached(
        path: impl AsRef<Path>,
        mode: OpenMode,
        caching: Caching,
    ) -> VolumeResult<Self> {
        Self::open_inner(path.as_ref(), mode, caching, false)
    }

    /// Opens for reading even if another program is using the image. What is read may be in the
    /// middle of a change.
    ///
    /// # Errors
    /// As [`FileDevice::open`], without [`VolumeError::Busy`].
    pub fn open_despite_users(path: impl AsRef<Path>) -> VolumeResult<Self> {
        Self::open_inner(path.as_ref(), OpenMode::Read, Caching::Auto, true)
    }

    /// Makes a file of `size` bytes (sparse), or gives an existing regular file that size, and
    /// opens it for writing. Block devices keep their size.
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
        let device = Self::open_inner(path, OpenMode::Write, Caching::Auto, false)?;
        if !device.block_device && device.size() != size {
            device.set_size(size)?;
        }
        Ok(device)
    }

    /// Gives an image file another length. Bytes that it gains read as zeros.
    ///
    /// # Errors
    /// Read-only, a block device, or what the host's file system says.
    pub fn set_size(&self, size: u64) -> VolumeResult<()> {
        let fail = |e| io_error(&self.path, "resize", Physical(0), 0, e);
        if self.block_device || self.read_only {
            return Err(fail(io::Error::new(
                io::ErrorKind::Unsupported,
                "not a writable image file",
            )));
        }
        self.file.set_len(size).map_err(fail)?;
        self.size.store(size, Ordering::Release);
        self.size_changed.store(true, Ordering::Release);
        Ok(())
    }

    fn open_inner(
        path: &Path,
        mode: OpenMode,
        caching: Caching,
        despite_users: bool,
    ) -> VolumeResult<Self> {
        let fail = |op, e| io_error(path, op, Physical(0), 0, e);
        let meta = std::fs::metadata(path).map_err(|e| fail("open", e))?;
        let block_device = is_block_device(&meta);
        if meta.is_dir() {
            return Err(fail(
                "open",
                io::Error::new(io::ErrorKind::IsADirectory, "is a directory"),
            ));
        }
        if !meta.is_file() && !block_device {
            return Err(fail(
                "open",
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "neither a regular file nor a block device",
                ),
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
            io::Seek::seek(&mut file, io::SeekFrom::End(0))
                .map_err(|e| fail("look up the size", e))?
        } else {
            // Looked up anew: the lock is held only now.
            file.metadata().map_err(|e| fail("look up the size", e))?.len()
        };
        // Asked now: a process that confines itself cannot ask later.
        let granularity = os::discard_granularity(&file, block_device);
        let direct = match caching {
            Caching::Buffered => None,
            Caching::Auto => Direct::open(path, write, size, false)
                .inspect_err(|error| tracing::info!(%error, "no direct I/O for the image"))
                .ok(),
            Caching::Direct => Some(
                Direct::open(path, write, size, true)
                    .map_err(|e| fail("open for direct I/O", e))?,
            ),
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            direct,
            size: AtomicU64::new(size),
            read_only: !write,
            block_device,
            size_changed: AtomicBool::new(false),
            can_discard: AtomicBool::new(granularity != Some(0)),
            discard_granularity: granularity.unwrap_or(u64::from(SECTOR_SIZE)),
            lock,
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

    /// What writes whole blocks past the page cache, if there is such a thing.
    fn direct_for(&self, at: Physical, len: usize) -> Option<&Direct> {
        self.direct.as_ref().filter(|_| is_aligned(at.0, len))
    }

    /// Does the page cache hold most of what a batch reads? Then there is no faster way.
    #[cfg(target_os = "linux")]
    fn is_cached(&self, batch: &[Read<'_>]) -> bool {
        let cached = |r: &Read<'_>| os::cached_bytes(&self.file, r.at.0..r.at.0 + r.len());
        let all: u64 = batch.iter().map(Read::len).sum();
        batch.iter().filter_map(cached).sum::<u64>() > all / 2
    }

    /// Can a batch be written as a whole past the page cache?
    fn fits(&self, writes: &[Write<'_>]) -> bool {
        let fits = |w: &Write<'_>| {
            let len = w.data.iter().map(|d| d.len()).sum::<usize>();
            self.check_writable(w.at, len).is_ok() && is_aligned(w.at.0, len)
        };
        writes.iter().all(fits)
    }

    fn check_range(&self, at: Physical, len: usize, kind: io::ErrorKind) -> io::Result<()> {
        match at.0.checked_add(len as u64) {
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(io::Error::new(
                kind,
                format!("{len} bytes at {at} reach past the end of {} bytes", self.size()),
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
        self.size.load(Ordering::Acquire)
    }

    fn measure(&self) -> io::Result<u64> {
        let size = io::Seek::seek(&mut &self.file, io::SeekFrom::End(0))?;
        if self.size.swap(size, Ordering::AcqRel) != size {
            self.size_changed.store(true, Ordering::Release);
        }
        Ok(size)
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.check_range(at, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let Some(direct) = &self.direct else { return os::read_exact_at(&self.file, buf, at.0) };
        if direct.reads(at.0, buf.len()) {
            return direct.read(buf, at.0);
        }
        os::read_exact_at(&self.file, buf, at.0)?;
        direct.passing.drop_passed(&self.file);
        Ok(())
    }

    fn read_medium(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        let Some(direct) = self.direct_for(at, buf.len()) else { return self.read_at(at, buf) };
        self.check_range(at, buf.len(), io::ErrorKind::UnexpectedEof)?;
        direct.read(buf, at.0)
    }

    fn read_at_once(&self, at: Physical, buf: &mut [u8]) -> bool {
        // Where the page cache is bypassed every read waits.
        self.direct.as_ref().is_none_or(Direct::uses_cache)
            && self.check_range(at, buf.len(), io::ErrorKind::UnexpectedEof).is_ok()
            && os::read_cached_at(&self.file, buf, at.0)
    }

    fn passed(&self, at: Physical, len: u64) {
        if let Some(direct) = &self.direct
            && direct.uses_cache()
        {
            direct.passing.note(at.0..at.0.saturating_add(len));
        }
    }

    #[cfg(target_os = "linux")]
    fn file_for(&self, work: &Work<'_>) -> Option<&File> {
        let direct = self.direct.as_ref()?;
        let here = |r: &Read<'_>| r.at.0.checked_add(r.len()).is_some_and(|end| end <= self.size());
        let can = match work {
            Work::Read(reads) => {
                reads.iter().all(|read| here(read) && overlap::fits(read))
                    && !(direct.uses_cache() && self.is_cached(reads))
            }
            Work::Write(writes) => self.fits(writes),
            Work::Flush => !self.read_only && !self.size_changed.load(Ordering::Acquire),
        };
        can.then(|| direct.file())
    }

    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.write_vectored_at(at, &[IoSlice::new(data)])
    }

    fn write_vectored_at(&self, at: Physical, data: &[IoSlice<'_>]) -> io::Result<()> {
        let len = data.iter().map(|d| d.len()).sum::<usize>();
        self.check_writable(at, len)?;
        let Some(direct) = self.direct_for(at, len) else {
            return os::write_vectored_at(&self.file, data, at.0);
        };
        let writing = direct.begin_write(len as u64);
        if writing.past_cache {
            direct.write(data, at.0)
        } else {
            os::write_vectored_at(&self.file, data, at.0)
        }
    }

    fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        let one_by_one = || writes.iter().map(|w| self.write_vectored_at(w.at, w.data)).collect();
        let Some(direct) = self.direct.as_ref().filter(|_| self.fits(writes)) else {
            return one_by_one();
        };
        let writing = direct.begin_write(writes.iter().map(Write::len).sum());
        if writing.past_cache {
            return direct.write_batch(writes);
        }
        // By itself each of them is alone, too.
        drop(writing);
        one_by_one()
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
        match os::discard(&self.file, self.block_device, at.0..at.0 + len) {
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

    fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    fn discard_granularity(&self) -> u64 {
        self.discard_granularity
    }

    fn data_from(&self, at: Physical) -> Physical {
        if self.block_device || at.0 >= self.size() {
            return at;
        }
        os::data_from(&self.file, at.0).map_or(at, |found| Physical(found.unwrap_or(self.size())))
    }

    fn start_writeback(&self, at: Physical, len: u64) {
        if !self.read_only && self.direct.as_ref().is_none_or(Direct::uses_cache) {
            os::start_writeback(&self.file, at, len);
        }
    }
}

fn io_error(
    path: &Path,
    op: &'static str,
    at: Physical,
    len: u64,
    source: io::Error,
) -> VolumeError {
    VolumeError::Io { device: path.display().to_string(), op, at, len, source }
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
        let d = FileDevice::open(&path, OpenMode::Write).unwrap();
        d.write_at(Physical(32 << 20), &[1; 4096]).unwrap();
        // A file system without holes says that everything is data; none may say that data is a
        // hole.
        assert!(d.data_from(Physical(0)).0 <= 32 << 20);
        assert_eq!(d.data_from(Physical(32 << 20)), Physical(32 << 20));
        assert!((40 << 20..=64 << 20).contains(&d.data_from(Physical(40 << 20)).0));
        assert_eq!(d.data_from(Physical(64 << 20)), Physical(64 << 20));
        let mut back = [0; 4096];
        d.read_at(Physical(32 << 20), &mut back).unwrap();
        assert_eq!(back, [1; 4096]);
    }

    /// The host's file system may not know O_DIRECT (older tmpfs): then it cannot be insisted on.
    fn every_way(path: &Path) -> Vec<Caching> {
        let mut ways = vec![Caching::Buffered, Caching::Auto];
        if FileDevice::open_cached(path, OpenMode::Write, Caching::Direct).is_ok() {
            ways.push(Caching::Direct);
        }
        ways
    }

    #[test]
    fn what_is_written_is_read_at_every_alignment() {
        let (_dir, path) = image(8 << 20);
        for caching in every_way(&path) {
            let d = FileDevice::open_cached(&path, OpenMode::Write, caching).unwrap();
            assert!(caching == Caching::Auto || d.is_direct() == (caching == Caching::Direct));
            for (i, (at, len)) in
                [(0u64, 4096), (4096, 3 << 20), (65536, 100), (65537, 5000), (12288, 4097)]
                    .into_iter()
                    .enumerate()
            {
                let data = pattern(len + 1, i as u8 + 50 * caching as u8);
                d.write_at(Physical(at), &data[1..]).unwrap();
                let mut back = vec![0; len + 1];
                d.read_at(Physical(at), &mut back[1..]).unwrap();
                assert_eq!(back[1..], data[1..], "{caching:?}, at {at}, len {len}");
            }
            d.flush().unwrap();
        }
    }

    #[test]
    fn vectored_writes_join_their_buffers() {
        let (_dir, path) = image(4 << 20);
        for caching in every_way(&path) {
            let d = FileDevice::open_cached(&path, OpenMode::Write, caching).unwrap();
            // More buffers than one system call takes, empty ones among them, and more than a
            // bounce buffer holds.
            let parts: Vec<Vec<u8>> =
                (0..1500).map(|i| pattern([0, 4096, 512, 3584][i % 4], i as u8)).collect();
            let slices: Vec<IoSlice<'_>> = parts.iter().map(|p| IoSlice::new(p)).collect();
            let whole = parts.concat();
            assert!(whole.len() > aligned::BOUNCE);
            for at in [8192, 1000] {
                d.write_vectored_at(Physical(at), &slices).unwrap();
                let mut back = vec![0; whole.len()];
                d.read_at(Physical(at), &mut back).unwrap();
                assert!(back == whole, "{caching:?}, at {at}");
            }
        }
    }

    #[test]
    fn ends_and_modes_are_respected() {
        let (_dir, path) = image(10_000);
        let d = FileDevice::open(&path, OpenMode::Read).unwrap();
        assert_eq!(d.size(), 10_000);
        assert!(d.is_read_only());
        assert_eq!(
            d.write_at(Physical(0), b"x").unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
        let mut buf = [0; 100];
        assert_eq!(
            d.read_at(Physical(9_950), &mut buf).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert_eq!(
            d.read_at(Physical(u64::MAX), &mut buf).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        drop(d);
        let d = FileDevice::open(&path, OpenMode::Write).unwrap();
        assert_eq!(
            d.write_at(Physical(9_999), b"xy").unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        assert_eq!(
            std::fs::metadata(&path).unwrap().len(),
            10_000,
            "a write must not grow the image"
        );
        assert!(FileDevice::open(path.parent().unwrap(), OpenMode::Read).is_err());
        assert!(FileDevice::open("/dev/null", OpenMode::Read).is_err());
        assert!(FileDevice::open("/nonexistent/image", OpenMode::Read).is_err());
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

    #[test]
    fn a_batch_writes_all_that_can_be_written() {
        let (_dir, path) = image(32 << 20);
        for caching in every_way(&path) {
            let d = FileDevice::open_cached(&path, OpenMode::Write, caching).unwrap();
            // More and longer pieces than are on their way at once; one begins within a block; one
            // ends behind the file.
            let places = [
                (0u64, 5 << 20),
                (6 << 20, 4096),
                (7 << 20, 300 << 10),
                (8 << 20, 9 << 20),
                (18 << 20, 16384),
            ];
            for odd in [None, Some((20_000_123u64, 5000)), Some((32 << 20, 4096))] {
                let seed = 1 + caching as u8 + 3 * u8::from(odd.is_some());
                let data: Vec<(u64, Vec<Vec<u8>>)> = places
                    .into_iter()
                    .chain(odd)
                    .map(|(at, len)| {
                        (at, pattern(len, seed).chunks(100_000).map(<[u8]>::to_vec).collect())
                    })
                    .collect();
                let slices: Vec<(u64, Vec<IoSlice<'_>>)> = data
                    .iter()
                    .map(|(at, parts)| (*at, parts.iter().map(|p| IoSlice::new(p)).collect()))
                    .collect();
                let writes: Vec<Write<'_>> =
                    slices.iter().map(|(at, data)| Write { at: Physical(*at), data }).collect();
                let ended = d.write_batch(&writes);
                assert_eq!(ended.len(), writes.len());
                for ((at, parts), result) in data.iter().zip(ended) {
                    let whole = parts.concat();
                    if at + whole.len() as u64 > d.size() {
                        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
                        continue;
                    }
                    result.unwrap();
                    let mut back = vec![0; whole.len()];
                    d.read_at(Physical(*at), &mut back).unwrap();
                    assert!(back == whole, "{caching:?}, at {at}");
                }
            }
        }
    }

    /// What was read through the page cache is not what is read there after a direct write, and the
    /// other way round.
    #[test]
    fn both_ways_show_the_same() {
        let (_dir, path) = image(4 << 20);
        let d = FileDevice::open(&path, OpenMode::Write).unwrap();
        let mut short = vec![0; 4096];
        for round in 0..20u8 {
            d.write_at(Physical(1 << 20), &pattern(256 << 10, round)).unwrap();
            d.read_at(Physical((1 << 20) + 8192), &mut short).unwrap();
            assert_eq!(short, pattern(256 << 10, round)[8192..12288]);
            // Half a block, through the page cache.
            d.write_at(Physical((1 << 20) + 4096), &[round; 2048]).unwrap();
            let mut long = vec![0; 256 << 10];
            d.read_at(Physical(1 << 20), &mut long).unwrap();
            assert_eq!(long[4096..6144], [round; 2048]);
        }
    }

    /// What a reader has passed is read as before, also where it was written through the page cache
    /// and not flushed.
    #[test]
    fn what_was_passed_is_still_there() {
        let (_dir, path) = image(16 << 20);
        for caching in every_way(&path) {
            let d = FileDevice::open_cached(&path, OpenMode::Write, caching).unwrap();
            for round in 0..2u8 {
                for at in (0u64..16 << 20).step_by(16384) {
                    if round == 0 && at % (128 << 10) == 0 {
                        d.write_at(Physical(at + 100), &[at as u8 ^ 0x5a; 700]).unwrap();
                    }
                    let mut piece = vec![0; 16384];
                    d.read_at(Physical(at), &mut piece).unwrap();
                    d.passed(Physical(at), 16384);
                    if at % (128 << 10) == 0 {
                        assert_eq!(
                            piece[100..800],
                            [at as u8 ^ 0x5a; 700],
                            "{caching:?}, {at}, {round}"
                        );
                    }
                }
            }
        }
    }
}
