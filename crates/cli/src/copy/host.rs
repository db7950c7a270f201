//! The host's file system as source of copies.

use super::{Meta, Source, Xattrs, is_copied};
use larder_fs::{FileKind, Timestamp};
use rustix::fs::SeekFrom;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// Host paths; a node is its path.
#[derive(Debug)]
pub(crate) struct HostTree;

fn kind_of(meta: &fs::Metadata) -> FileKind {
    let t = meta.file_type();
    if t.is_dir() {
        FileKind::Directory
    } else if t.is_symlink() {
        FileKind::Symlink
    } else if t.is_char_device() {
        FileKind::CharDevice
    } else if t.is_block_device() {
        FileKind::BlockDevice
    } else if t.is_fifo() {
        FileKind::Fifo
    } else if t.is_socket() {
        FileKind::Socket
    } else {
        FileKind::Regular
    }
}

fn stamp(sec: i64, nsec: i64) -> Timestamp {
    Timestamp { sec, nsec: u32::try_from(nsec).unwrap_or(0) }
}

impl Source for HostTree {
    type Node = PathBuf;
    type File = File;

    fn meta(&self, path: &PathBuf) -> anyhow::Result<Meta> {
        let m = fs::symlink_metadata(path)?;
        let rdev = m.rdev();
        let shared = !m.is_dir() && m.nlink() > 1;
        Ok(Meta {
            kind: kind_of(&m),
            perm: m.mode() & 0o7777,
            uid: m.uid(),
            gid: m.gid(),
            rdev: u64::from(rustix::fs::major(rdev)) << 20 | u64::from(rustix::fs::minor(rdev)),
            size: m.size(),
            atime: stamp(m.atime(), m.atime_nsec()),
            mtime: stamp(m.mtime(), m.mtime_nsec()),
            identity: shared.then(|| (m.dev(), m.ino())),
            tree: m.dev(),
        })
    }

    fn xattrs(&self, path: &PathBuf) -> anyhow::Result<Xattrs> {
        let mut names = Vec::with_capacity(65536);
        match rustix::fs::llistxattr(path, rustix::buffer::spare_capacity(&mut names)) {
            Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Vec::new()),
            other => other?,
        };
        let mut out = Vec::new();
        for name in names.split(|b| *b == 0).filter(|n| is_copied(n)) {
            let mut value = Vec::with_capacity(65536);
            match rustix::fs::lgetxattr(
                path,
                OsStr::from_bytes(name),
                rustix::buffer::spare_capacity(&mut value),
            ) {
                // Gone meanwhile, or not for us to see.
                Err(
                    rustix::io::Errno::NODATA | rustix::io::Errno::PERM | rustix::io::Errno::ACCESS,
                ) => {
                    continue;
                }
                other => other?,
            };
            out.push((name.to_vec(), value));
        }
        Ok(out)
    }

    fn entries(&self, path: &PathBuf) -> anyhow::Result<Vec<(Vec<u8>, PathBuf)>> {
        let mut out = Vec::new();
        for e in fs::read_dir(path)? {
            let e = e?;
            out.push((e.file_name().into_vec(), e.path()));
        }
        out.sort();
        Ok(out)
    }

    fn readlink(&self, path: &PathBuf) -> anyhow::Result<Vec<u8>> {
        Ok(fs::read_link(path)?.into_os_string().into_vec())
    }

    fn open(&self, path: &PathBuf) -> anyhow::Result<File> {
        Ok(OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?)
    }

    fn data(&self, file: &File, within: Range<u64>) -> anyhow::Result<Option<Range<u64>>> {
        let start = match rustix::fs::seek(file, SeekFrom::Data(within.start)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            // A file system that does not know holes has none.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
                return Ok(Some(within));
            }
            Err(e) => return Err(e.into()),
        };
        Ok(Some(start..rustix::fs::seek(file, SeekFrom::Hole(start))?))
    }

    fn read(&self, file: &File, at: u64, buf: &mut [u8]) -> anyhow::Result<usize> {
        loop {
            match file.read_at(buf, at) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => return Ok(other?),
            }
        }
    }
}
