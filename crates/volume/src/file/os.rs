//! The calls that differ between operating systems.

use larder_format::Physical;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;

/// Most buffers that one vectored system call takes.
#[cfg(target_os = "linux")]
const IOV_MAX: usize = 1024;

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
    rustix::io::preadv2(file, &mut slices, at, rustix::io::ReadWriteFlags::NOWAIT)
        .is_ok_and(|n| n == len)
}
#[cfg(not(target_os = "linux"))]
pub(super) fn read_cached_at(_: &File, _: &mut [u8], _: u64) -> bool {
    false
}

/// How many bytes of a range lie in the page cache. `None` where the kernel cannot say.
#[cfg(target_os = "linux")]
pub(super) fn cached_bytes(file: &File, range: Range<u64>) -> Option<u64> {
    use std::os::fd::AsRawFd;
    /// Its number on every architecture but Alpha; `libc` does not have it on all of them.
    const CACHESTAT: libc::c_long = 451;
    let range = [range.start, range.end - range.start];
    // Pages that are cached, dirty, being written, evicted, recently evicted.
    let mut found = [0u64; 5];
    // SAFETY: cachestat reads two u64 from the first pointer and writes five to the second, and
    // keeps neither.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0u32)
    };
    (result == 0).then(|| found[0].saturating_mul(rustix::param::page_size() as u64))
}

/// Drops clean pages of this range that are not in use from the page cache.
#[cfg(target_os = "linux")]
pub(super) fn drop_cached(file: &File, range: Range<u64>) {
    let Some(len) = range.end.checked_sub(range.start).and_then(std::num::NonZeroU64::new) else {
        return;
    };
    // Advisory: what cannot be dropped stays.
    let _ = rustix::fs::fadvise(file, range.start, Some(len), rustix::fs::Advice::DontNeed);
}
#[cfg(not(target_os = "linux"))]
pub(super) fn drop_cached(_: &File, _: Range<u64>) {}

#[cfg(target_os = "linux")]
pub(super) fn write_vectored_at(file: &File, data: &[IoSlice<'_>], mut at: u64) -> io::Result<()> {
    for group in data.chunks(IOV_MAX) {
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
pub(super) fn discard(file: &File, block_device: bool, range: Range<u64>) -> io::Result<()> {
    if !block_device {
        use rustix::fs::FallocateFlags;
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        return Ok(rustix::fs::fallocate(file, how, range.start, range.end - range.start)?);
    }
    const BLOCK: u64 = super::aligned::ALIGN as u64;
    const BLKDISCARD: rustix::ioctl::Opcode = 0x1277;
    // It takes whole blocks only.
    let (from, to) = (range.start.next_multiple_of(BLOCK), range.end / BLOCK * BLOCK);
    if from >= to {
        return Ok(());
    }
    // SAFETY: BLKDISCARD reads two u64, start and length in bytes, from the pointer that it is
    // given, and keeps nothing.
    unsafe {
        let arg = rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([from, to - from]);
        Ok(rustix::ioctl::ioctl(file, arg)?)
    }
}
#[cfg(not(target_os = "linux"))]
pub(super) fn discard(_: &File, _: bool, _: Range<u64>) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Bytes below which a discard of this file gives nothing back: blocks of its file system, or what
/// the kernel says of a block device, 0 where that takes no discards. `None`: not known.
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

/// Where data begins from `at` on; `None` in it if there is none any more. Moves the file's
/// position, which nothing else here uses.
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
pub(super) fn start_writeback(file: &File, at: Physical, len: u64) {
    use std::os::fd::AsRawFd;
    let (Ok(at), Ok(len)) = (i64::try_from(at.0), i64::try_from(len)) else { return };
    // Advisory: an error here says nothing that the flush would not say again.
    // SAFETY: plain system call on a descriptor that `file` keeps open; no memory is passed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE);
    }
}
#[cfg(not(target_os = "linux"))]
pub(super) fn start_writeback(_: &File, _: Physical, _: u64) {}
