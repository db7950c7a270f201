//! Subvolumes of a mount, for other processes: the ioctls of Linux's btrfs that fit FUSE, three of
//! Larder's own, and functions that send them.
//!
//! | request | number |
//! |---|---|
//! | make one | `BTRFS_IOC_SUBVOL_CREATE`, `_V2` |
//! | delete one | `BTRFS_IOC_SNAP_DESTROY`, `_V2` (by name or by id) |
//! | read-only | `BTRFS_IOC_SUBVOL_GETFLAGS`, `_SETFLAGS` |
//! | facts | `BTRFS_IOC_GET_SUBVOL_INFO`, `_GET_SUBVOL_ROOTREF`, `_INO_LOOKUP` |
//! | default | `BTRFS_IOC_DEFAULT_SUBVOL` |
//! | snapshot | `BTRFS_IOC_SNAP_CREATE_V2`, or [`IOC_SNAPSHOT`] |
//! | list | [`IOC_SUBVOLS`]; in: the least id wanted, out: JSON |
//! | what was written | [`IOC_FIND_NEW`]; in: transaction, inode, offset; out: JSON |
//!
//! [`IOC_SNAPSHOT`] takes the source's inode number instead of a descriptor. [`IOC_FIND_NEW`]
//! begins at its inode and offset.

use crate::control::{LARDER, READ, TEXT_LEN, WRITE, call, hex, ioc, open, write_back_pages};
use larder_fs::{NewExtent, SubvolInfo, Timestamp};
use serde_json::{Value, json};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of most arguments.
pub(crate) const ARGS: usize = 4096;
/// Offset of the name in `btrfs_ioctl_vol_args`.
pub(crate) const NAME: usize = 8;
/// Offset of the name in `btrfs_ioctl_vol_args_v2`.
pub(crate) const NAME_V2: usize = 56;
/// Flag of a read-only subvolume.
pub(crate) const RDONLY: u64 = 1 << 1;
/// The subvolume to delete is given by its id.
pub(crate) const BY_ID: u64 = 1 << 4;

pub(crate) const CREATE: u32 = ioc(WRITE, 0x94, 14, ARGS);
pub(crate) const CREATE_V2: u32 = ioc(WRITE, 0x94, 24, ARGS);
pub(crate) const SNAP_CREATE_V2: u32 = ioc(WRITE, 0x94, 23, ARGS);
pub(crate) const DESTROY: u32 = ioc(WRITE, 0x94, 15, ARGS);
pub(crate) const DESTROY_V2: u32 = ioc(WRITE, 0x94, 63, ARGS);
pub(crate) const GETFLAGS: u32 = ioc(READ, 0x94, 25, 8);
pub(crate) const SETFLAGS: u32 = ioc(WRITE, 0x94, 26, 8);
pub(crate) const DEFAULT: u32 = ioc(WRITE, 0x94, 19, 8);
pub(crate) const INFO: u32 = ioc(READ, 0x94, 60, 504);
pub(crate) const ROOTREF: u32 = ioc(READ | WRITE, 0x94, 61, ARGS);
pub(crate) const INO_LOOKUP: u32 = ioc(READ | WRITE, 0x94, 18, ARGS);
/// Subvolumes from an id on, as JSON.
pub const IOC_SUBVOLS: u32 = ioc(READ | WRITE, LARDER, 16, TEXT_LEN);
/// What was written to a subvolume since a transaction, as JSON.
pub const IOC_FIND_NEW: u32 = ioc(READ | WRITE, LARDER, 21, TEXT_LEN);
/// Make a snapshot.
pub const IOC_SNAPSHOT: u32 = ioc(WRITE, LARDER, 17, ARGS);

fn named(at: usize, name: &[u8]) -> io::Result<[u8; ARGS]> {
    if name.is_empty() || name.len() > 255 || name.contains(&b'/') || name.contains(&0) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a name"));
    }
    let mut args = [0; ARGS];
    args[at..at + name.len()].copy_from_slice(name);
    Ok(args)
}

/// The directory and the name of a path.
fn split(path: &Path) -> io::Result<(&Path, &[u8])> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.as_bytes();
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir, name))
}

/// Makes an empty subvolume at `path`.
///
/// # Errors
/// `Unsupported` if it is not on a Larder mount; what the engine says otherwise.
pub fn create(path: &Path) -> io::Result<()> {
    let (dir, name) = split(path)?;
    call(&open(dir)?, CREATE, &mut named(NAME, name)?)
}

/// Deletes the subvolume at `path`.
///
/// # Errors
/// As [`create`]; `PermissionDenied` where the caller could not remove a directory in its place.
pub fn delete(path: &Path) -> io::Result<()> {
    let (dir, name) = split(path)?;
    call(&open(dir)?, DESTROY, &mut named(NAME, name)?)
}

/// Makes a snapshot of the subvolume whose root `source` is at `path`.
///
/// # Errors
/// As [`create`]; `CrossesDevices` between mounts; `PermissionDenied` for somebody else's
/// subvolume.
pub fn snapshot(source: &Path, path: &Path, read_only: bool) -> io::Result<()> {
    let (dir, name) = split(path)?;
    let (source, target) = (source.metadata()?, dir.metadata()?);
    if source.dev() != target.dev() {
        return Err(io::Error::from_raw_os_error(libc::EXDEV));
    }
    let mut args = named(NAME_V2, name)?;
    args[..8].copy_from_slice(&source.ino().to_ne_bytes());
    args[16..24].copy_from_slice(&if read_only { RDONLY } else { 0 }.to_ne_bytes());
    let dir = open(dir)?;
    write_back_pages(&dir)?;
    call(&dir, IOC_SNAPSHOT, &mut args)
}

/// Is the subvolume of `path` read-only?
///
/// # Errors
/// `Unsupported` if it is not on a Larder mount; `InvalidInput` for anything but a subvolume's
/// root.
pub fn is_read_only(path: &Path) -> io::Result<bool> {
    let mut flags = [0; 8];
    call(&open(path)?, GETFLAGS, &mut flags)?;
    Ok(u64::from_ne_bytes(flags) & RDONLY != 0)
}

/// Makes a subvolume read-only or writable.
///
/// # Errors
/// As [`is_read_only`]; `PermissionDenied` for somebody else's subvolume; `ResourceBusy` for one
/// that was received.
pub fn set_read_only(path: &Path, read_only: bool) -> io::Result<()> {
    let flags = if read_only { RDONLY } else { 0u64 };
    let fd = open(path)?;
    if read_only {
        write_back_pages(&fd)?;
    }
    call(&fd, SETFLAGS, &mut flags.to_ne_bytes())
}

/// Makes the subvolume with this id the default one of the file system that `path` is on.
///
/// # Errors
/// `Unsupported`; `NotFound`; `PermissionDenied` for anybody but root and the mount's owner.
pub fn set_default(path: &Path, id: u64) -> io::Result<()> {
    call(&open(path)?, DEFAULT, &mut id.to_ne_bytes())
}

/// The id of the subvolume that `path` is in.
///
/// # Errors
/// `Unsupported` if it is not on a Larder mount.
pub fn id_of(path: &Path) -> io::Result<u64> {
    let mut args = [0; ARGS];
    args[8..16].copy_from_slice(&256u64.to_ne_bytes());
    call(&open(path)?, INO_LOOKUP, &mut args)?;
    let (id, _) = args.split_first_chunk::<8>().ok_or(io::ErrorKind::InvalidData)?;
    Ok(u64::from_ne_bytes(*id))
}

/// All subvolumes of the file system that `path` is on, as [`describe`] shows them, and the id of
/// the default one.
///
/// # Errors
/// `Unsupported` if it is not on a Larder mount.
pub fn list(path: &Path) -> io::Result<(Vec<Value>, u64)> {
    let fd = open(path)?;
    let (mut all, mut next) = (Vec::new(), Some(0u64));
    let mut default = 5;
    while let Some(first) = next {
        let mut buffer = vec![0; TEXT_LEN];
        buffer[..8].copy_from_slice(&first.to_ne_bytes());
        call(&fd, IOC_SUBVOLS, &mut buffer)?;
        let end = buffer.iter().position(|b| *b == 0).unwrap_or(TEXT_LEN);
        let page: Value = serde_json::from_slice(&buffer[..end])
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        all.extend(page["subvolumes"].as_array().into_iter().flatten().cloned());
        default = page["default"].as_u64().unwrap_or(default);
        next = page["next"].as_u64().filter(|n| *n > first);
    }
    Ok((all, default))
}

/// Calls `each` for the extents that were written to the subvolume of `path` in transaction `since`
/// or later, as [`describe_new`] shows them. Returns the transaction up to which the list is
/// complete.
///
/// # Errors
/// `Unsupported` if it is not on a Larder mount; `PermissionDenied` for anybody but root and the
/// mount's owner.
pub fn find_new(path: &Path, since: u64, each: &mut dyn FnMut(&Value)) -> io::Result<u64> {
    let fd = open(path)?;
    let mut from = [0u64; 2];
    let mut upto = None;
    loop {
        let mut buffer = vec![0; TEXT_LEN];
        for (n, word) in [since, from[0], from[1]].into_iter().enumerate() {
            buffer[8 * n..8 * n + 8].copy_from_slice(&word.to_ne_bytes());
        }
        call(&fd, IOC_FIND_NEW, &mut buffer)?;
        let end = buffer.iter().position(|b| *b == 0).unwrap_or(TEXT_LEN);
        let page: Value = serde_json::from_slice(&buffer[..end])
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        page["extents"].as_array().into_iter().flatten().for_each(&mut *each);
        let upto = *upto.get_or_insert(page["generation"].as_u64().unwrap_or_default());
        match [page["next"][0].as_u64(), page["next"][1].as_u64()] {
            [Some(ino), Some(offset)] if [ino, offset] > from => from = [ino, offset],
            _ => return Ok(upto),
        }
    }
}

/// An extent that was written to a file, as JSON.
#[must_use]
pub fn describe_new(e: &NewExtent, path: Option<&[u8]>) -> Value {
    json!({
        "inode": e.ino,
        "path": path.map(String::from_utf8_lossy),
        "offset": e.start,
        "length": e.len,
        "address": e.at.map(|at| at.0),
        "extent_offset": e.offset,
        "generation": e.generation.0,
        "inline": e.in_leaf,
        "reserved": e.reserved,
        "compressed": e.compressed,
    })
}

/// A subvolume as JSON.
#[must_use]
pub fn describe(s: &SubvolInfo, path: &[u8]) -> Value {
    let uuid = |u: [u8; 16]| (u != [0; 16]).then(|| hex(&u));
    let time = |t: Timestamp| (t != Timestamp::default()).then_some(t.sec);
    json!({
        "id": s.id.0,
        "path": String::from_utf8_lossy(path),
        "parent_id": s.parent.as_ref().map(|p| p.0.0),
        "read_only": s.read_only,
        "generation": s.generation.0,
        "last_change": s.ctransid.0,
        "created_in": s.otransid.0,
        "created": time(s.otime),
        "changed": time(s.ctime),
        "uuid": uuid(s.uuid),
        "parent_uuid": uuid(s.parent_uuid),
        "received_uuid": uuid(s.received_uuid),
        "sent_in": s.stransid.0,
        "received_in": s.rtransid.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_linux() {
        assert_eq!(
            [CREATE, CREATE_V2, DESTROY, DESTROY_V2],
            [0x5000_940e, 0x5000_9418, 0x5000_940f, 0x5000_943f]
        );
        assert_eq!(SNAP_CREATE_V2, 0x5000_9417);
        assert_eq!([GETFLAGS, SETFLAGS, DEFAULT], [0x8008_9419, 0x4008_941a, 0x4008_9413]);
        assert_eq!([INFO, ROOTREF, INO_LOOKUP], [0x81f8_943c, 0xd000_943d, 0xd000_9412]);
    }

    #[test]
    fn names_must_be_names() {
        for bad in [&b""[..], b"a/b", b"a\0b", &[b'x'; 256]] {
            assert_eq!(named(NAME, bad).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert_eq!(named(NAME, b"sub").unwrap()[8..12], *b"sub\0");
    }
}
