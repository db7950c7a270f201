//! Talking to a live mount from another process: the ioctls that a Larder mount answers on any of
//! its files and directories, and functions that send them.
//!
//! | request | number | payload |
//! |---|---|---|
//! | statistics | [`IOC_STATS`] | out: JSON text in 16,000 bytes, padded with zeros |
//! | begin to sync | [`IOC_START_SYNC`] | none; returns at once |
//! | space | [`IOC_DF`] | out: the same, about sizes and free space |
//! | sync | [`IOC_SYNC`] | none; returns when everything done before is durable |
//! | trim | `FITRIM` | `struct fstrim_range`; its length becomes the bytes discarded |
//! | device | [`IOC_DEVICE`] | in: which, from 0; out: JSON text as above |
//! | reset errors | [`IOC_RESET_DEVICE_ERRORS`] | none |
//! | label | `FS_IOC_GETFSLABEL`, `FS_IOC_SETFSLABEL` | 256 bytes, zero-terminated |
//!
//! Syncs and snapshots wait until the kernel has written its pages. If dozens wait already, they
//! fail with `EAGAIN`.
//!
//! `BTRFS_IOC_SYNC`, `_START_SYNC`, `_WAIT_SYNC`, `_FS_INFO` and the flag ioctls behind `lsattr`
//! and `chattr` are answered as Linux's btrfs does. The numbers are stable: a newer daemon answers
//! an older client.

use larder_fs::{TrimRange, Trimmed};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Bytes of a text answer.
pub(crate) const TEXT_LEN: usize = 16_000;
/// Bytes of a label with its terminator.
pub(crate) const LABEL_LEN: usize = 256;

const NONE: u32 = 0;
pub(crate) const WRITE: u32 = 1;
pub(crate) const READ: u32 = 2;
/// The type byte of Larder's own requests.
pub(crate) const LARDER: u8 = 0xe8;

/// Number of an ioctl, as Linux composes it.
pub(crate) const fn ioc(direction: u32, kind: u8, number: u8, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (kind as u32) << 8 | number as u32
}

/// An id as a UUID is written.
pub(crate) fn hex(id: &[u8; 16]) -> String {
    let mut out = String::with_capacity(36);
    for (i, byte) in id.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        out.push_str(&format!("{byte:02x}"));
    }
    out
}

/// Statistics as JSON.
pub const IOC_STATS: u32 = ioc(READ, LARDER, 1, TEXT_LEN);
/// Make everything durable.
pub const IOC_SYNC: u32 = ioc(NONE, LARDER, 2, 0);
/// Sizes and free space as JSON.
pub const IOC_DF: u32 = ioc(READ, LARDER, 3, TEXT_LEN);
/// Begin to make everything durable.
pub const IOC_START_SYNC: u32 = ioc(NONE, LARDER, 4, 0);
/// One device as JSON, and how many there are.
pub const IOC_DEVICE: u32 = ioc(READ | WRITE, LARDER, 40, TEXT_LEN);
/// Set the counts of errors of all devices to 0.
pub const IOC_RESET_DEVICE_ERRORS: u32 = ioc(NONE, LARDER, 41, 0);
/// Discard free space: `struct fstrim_range` of Linux, start, length and shortest run, 8 bytes
/// each.
pub const FITRIM: u32 = ioc(READ | WRITE, b'X', 121, 24);
pub(crate) const GET_LABEL: u32 = ioc(READ, 0x94, 49, LABEL_LEN);
pub(crate) const SET_LABEL: u32 = ioc(WRITE, 0x94, 50, LABEL_LEN);

/// Makes everything durable that was done on the mount of `path` before this call.
///
/// # Errors
/// `Unsupported` if `path` is not on a Larder mount; what the engine says otherwise.
pub fn sync(path: &Path) -> io::Result<()> {
    let fd = open(path)?;
    write_back_pages(&fd)?;
    call(&fd, IOC_SYNC, &mut [])
}

/// Begins to make durable what the daemon behind `path` has, and does not wait: for a caller that
/// is about to unmount. Pages that only the kernel has are not included.
///
/// # Errors
/// `Unsupported` if `path` is not on a Larder mount, or one of an older daemon.
pub fn start_sync(path: &Path) -> io::Result<()> {
    call(&open(path)?, IOC_START_SYNC, &mut [])
}

/// Statistics of the daemon behind `path`, as JSON.
///
/// # Errors
/// `Unsupported` if `path` is not on a Larder mount.
pub fn stats(path: &Path) -> io::Result<String> {
    text(path, IOC_STATS)
}

/// Sizes and free space of the file system behind `path`, as JSON.
///
/// # Errors
/// `Unsupported` if `path` is not on a Larder mount.
pub fn df(path: &Path) -> io::Result<String> {
    text(path, IOC_DF)
}

/// The devices of the file system behind `path`, each as JSON. One request would not have room for
/// all.
///
/// # Errors
/// `Unsupported` if `path` is not on a Larder mount, or one of an older daemon.
pub fn devices(path: &Path) -> io::Result<Vec<serde_json::Value>> {
    let fd = open(path)?;
    let mut all = Vec::new();
    loop {
        let mut buffer = vec![0; TEXT_LEN];
        buffer[..8].copy_from_slice(&(all.len() as u64).to_ne_bytes());
        call(&fd, IOC_DEVICE, &mut buffer)?;
        let end = buffer.iter().position(|b| *b == 0).unwrap_or(TEXT_LEN);
        let mut told: serde_json::Value = serde_json::from_slice(&buffer[..end])?;
        if told["device"].is_null() {
            return Ok(all);
        }
        all.push(told["device"].take());
    }
}

/// Sets the counts of errors of all devices to 0.
///
/// # Errors
/// `Unsupported` if `path` is not on a Larder mount; `PermissionDenied` for anybody but root and
/// the mount's owner.
pub fn reset_device_errors(path: &Path) -> io::Result<()> {
    call(&open(path)?, IOC_RESET_DEVICE_ERRORS, &mut [])
}

/// Does a Larder daemon serve `path`?
///
/// # Errors
/// `Unsupported` if not.
pub fn is_served(path: &Path) -> io::Result<()> {
    df(path).map(drop)
}

/// Discards the free space in `range` of the file system that `path` is on (a kernel file system
/// answers too).
///
/// # Errors
/// `Unsupported` if that file system or its device does not discard, `PermissionDenied` unless the
/// caller is root or the mount's owner, `InvalidInput` for a range without a whole sector.
pub fn trim(path: &Path, range: TrimRange) -> io::Result<Trimmed> {
    let mut words = [0; 24];
    for (word, value) in words.chunks_mut(8).zip([range.start, range.len, range.min_len]) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
    call(&open(path)?, FITRIM, &mut words)?;
    let word = |i: usize| u64::from_ne_bytes(*words[8 * i..].first_chunk().expect("8 bytes"));
    Ok(Trimmed { bytes: word(1), min_len: word(2) })
}

/// The label of the file system that `path` is on (a kernel btrfs answers too).
///
/// # Errors
/// `Unsupported` if that file system has no label.
pub fn label(path: &Path) -> io::Result<Vec<u8>> {
    let mut buffer = [0; LABEL_LEN];
    call(&open(path)?, GET_LABEL, &mut buffer)?;
    let end = buffer.iter().position(|b| *b == 0).unwrap_or(buffer.len());
    Ok(buffer[..end].to_vec())
}

/// Sets the label of the file system that `path` is on, up to 255 bytes without a zero.
///
/// # Errors
/// `InvalidInput` for a label that does not fit, `PermissionDenied` for anybody but root and the
/// mount's owner.
pub fn set_label(path: &Path, label: &[u8]) -> io::Result<()> {
    if label.len() >= LABEL_LEN || label.contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a label has up to 255 bytes, none of them zero",
        ));
    }
    let mut buffer = [0; LABEL_LEN];
    buffer[..label.len()].copy_from_slice(label);
    call(&open(path)?, SET_LABEL, &mut buffer)
}

/// Has the kernel write what only it has so far: pages that were changed through a mapping, and
/// delayed writes.
///
/// The requests are on their way when this returns; the daemon waits for them if it matters. On
/// file systems other than FUSE this does nothing.
pub(crate) fn write_back_pages(fd: &OwnedFd) -> io::Result<()> {
    /// `FUSE_SUPER_MAGIC` of Linux.
    const FUSE: rustix::fs::FsWord = 0x6573_5546;
    if rustix::fs::fstatfs(fd)?.f_type == FUSE {
        rustix::fs::syncfs(fd)?;
    }
    Ok(())
}

pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?)
}

fn text(path: &Path, request: u32) -> io::Result<String> {
    let mut buffer = vec![0; TEXT_LEN];
    call(&open(path)?, request, &mut buffer)?;
    buffer.truncate(buffer.iter().position(|b| *b == 0).unwrap_or(TEXT_LEN));
    String::from_utf8(buffer).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

pub(crate) fn call(fd: &impl AsRawFd, request: u32, buffer: &mut [u8]) -> io::Result<()> {
    let size = (request >> 16 & 0x3fff) as usize;
    assert_eq!(size, buffer.len(), "the number of an ioctl carries its size");
    let error = loop {
        // SAFETY: the kernel reads and writes at most `size` bytes of the buffer, which is as long.
        if unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, buffer.as_mut_ptr()) } == 0
        {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // As many requests as possible wait for a sync or a snapshot already. The daemon answers
        // them meanwhile; there is no event for that.
        if error.kind() != io::ErrorKind::WouldBlock {
            break error;
        }
        std::thread::yield_now();
    };
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) if request == FITRIM => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "its device does not take discards"))
        }
        Some(libc::ENOTTY | libc::ENOSYS | libc::EOPNOTSUPP) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "not on a Larder mount"))
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_linux() {
        // FS_IOC_GETFSLABEL and FS_IOC_SETFSLABEL of <linux/fs.h>.
        assert_eq!(GET_LABEL, 0x8100_9431);
        assert_eq!(SET_LABEL, 0x4100_9432);
        assert_eq!(IOC_STATS, 0xbe80_e801);
        assert_eq!(FITRIM, 0xc018_5879);
    }

    #[test]
    fn ids_are_written_as_uuids() {
        assert_eq!(hex(&[0xab; 16]), "abababab-abab-abab-abab-abababababab");
    }

    #[test]
    fn other_file_systems_are_recognised() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(sync(dir.path()).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert_eq!(stats(dir.path()).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert_eq!(
            set_label(dir.path(), &[b'x'; 256]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
}
