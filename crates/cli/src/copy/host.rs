//! The host's file system as source and destination of copies.

use super::{Meta, Sink, Source, Xattrs, is_copied};
use anyhow::Context;
use larder_fs::{FileKind, Timestamp};
use rustix::fs::{AtFlags, CWD, Mode, SeekFrom, Timespec, Timestamps, XattrFlags};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Host paths; a node is its path.
#[derive(Debug)]
pub(crate) struct HostTree;

fn named(dir: &Path, name: &[u8]) -> PathBuf {
    dir.join(OsStr::from_bytes(name))
}

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

impl Sink for HostTree {
    type Node = PathBuf;
    type File = File;

    fn find(&self, dir: &PathBuf, name: &[u8]) -> anyhow::Result<Option<(PathBuf, FileKind)>> {
        let path = named(dir, name);
        match fs::symlink_metadata(&path) {
            Ok(m) => Ok(Some((path, kind_of(&m)))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn unlink(&self, dir: &PathBuf, name: &[u8]) -> anyhow::Result<()> {
        Ok(fs::remove_file(named(dir, name))?)
    }

    fn create(
        &self,
        dir: &PathBuf,
        name: &[u8],
        meta: &Meta,
        target: &[u8],
    ) -> anyhow::Result<PathBuf> {
        let path = named(dir, name);
        let node = |kind| {
            let dev = rustix::fs::makedev(
                u32::try_from(meta.rdev >> 20).unwrap_or(u32::MAX),
                u32::try_from(meta.rdev & 0xf_ffff).unwrap_or(u32::MAX),
            );
            rustix::fs::mknodat(CWD, &path, kind, Mode::from_raw_mode(0o600), dev)
        };
        match meta.kind {
            FileKind::Directory => {
                // Closed to others until its permissions are set.
                fs::DirBuilder::new().create(&path)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
            }
            FileKind::Symlink => std::os::unix::fs::symlink(OsStr::from_bytes(target), &path)?,
            FileKind::Regular => {
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            }
            FileKind::CharDevice => node(rustix::fs::FileType::CharacterDevice)?,
            FileKind::BlockDevice => node(rustix::fs::FileType::BlockDevice)?,
            FileKind::Fifo => node(rustix::fs::FileType::Fifo)?,
            FileKind::Socket => node(rustix::fs::FileType::Socket)?,
        }
        Ok(path)
    }

    fn link(&self, path: &PathBuf, dir: &PathBuf, name: &[u8]) -> anyhow::Result<()> {
        Ok(fs::hard_link(path, named(dir, name))?)
    }

    fn open(&self, path: &PathBuf) -> anyhow::Result<File> {
        Ok(OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path)?)
    }

    fn write(&self, file: &File, at: u64, data: &[u8]) -> anyhow::Result<()> {
        Ok(file.write_all_at(data, at)?)
    }

    fn set_size(&self, file: &File, size: u64) -> anyhow::Result<()> {
        Ok(file.set_len(size)?)
    }

    fn finish(&self, path: &PathBuf, meta: &Meta, xattrs: &Xattrs) -> anyhow::Result<()> {
        let root = rustix::process::geteuid().is_root();
        // Ordinary users keep their own files; that is expected and not worth a word.
        match std::os::unix::fs::lchown(path, Some(meta.uid), Some(meta.gid)) {
            Err(e) if !root && e.kind() == std::io::ErrorKind::PermissionDenied => {}
            other => other.context("owner")?,
        }
        if meta.kind != FileKind::Symlink {
            // Set-id bits of another owner must not become set-id bits of ours.
            let mine = root || fs::symlink_metadata(path)?.uid() == meta.uid;
            let perm = if mine { meta.perm } else { meta.perm & 0o1777 };
            fs::set_permissions(path, fs::Permissions::from_mode(perm)).context("permissions")?;
        }
        for (name, value) in xattrs {
            match rustix::fs::lsetxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty()) {
                // Only user attributes are an ordinary user's to set, and btrfs properties btrfs's
                // to keep.
                Err(_) if !name.starts_with(b"user.") && !root || name.starts_with(b"btrfs.") => {}
                other => {
                    other.with_context(|| format!("attribute {}", crate::print::name(name)))?
                }
            }
        }
        let time = |t: Timestamp| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
        let times =
            Timestamps { last_access: time(meta.atime), last_modification: time(meta.mtime) };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).context("times")
    }
}
