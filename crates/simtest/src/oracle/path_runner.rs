//! Runs operations on a directory through the system's own calls: what a program does on a mount,
//! Linux's or ours.

use super::dedupe::dedupe_range;
use crate::ops::{Alloc, Move, Op, Special, filled};
use crate::world::special_kind;
use anyhow::{Context, Result, ensure};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, IFlags, Mode, OFlags, RenameFlags, XattrFlags,
};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

fn subvolume(args: &[&OsStr]) -> Result<()> {
    super::btrfs(&[&["subvolume".as_ref()], args].concat()).map(drop)
}

/// Lets ranges share extents, and demands that all of them was the same, but for a part of a sector
/// at the end.
fn dedupe(from: &File, at: u64, len: u64, to: &File, to_at: u64) -> Result<()> {
    let same = dedupe_range(from, at, len, to, to_at).context("FIDEDUPERANGE")?;
    ensure!(same.is_some(), "FIDEDUPERANGE: the ranges differ");
    Ok(())
}

/// A directory, and the files that operations hold open.
#[derive(Debug)]
pub struct PathRunner {
    top: PathBuf,
    handles: HashMap<String, OwnedFd>,
}

impl PathRunner {
    /// Runs below `top`.
    #[must_use]
    pub fn new(top: &Path) -> Self {
        Self { top: top.to_owned(), handles: HashMap::new() }
    }

    fn path(&self, path: &str) -> Result<PathBuf> {
        match path.strip_prefix('@') {
            Some(handle) => {
                let fd = self.handles.get(handle).with_context(|| format!("no handle {handle}"))?;
                Ok(PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())))
            }
            None => Ok(self.top.join(path)),
        }
    }

    fn open(&self, path: &str, write: bool) -> Result<File> {
        Ok(OpenOptions::new().read(true).write(write).open(self.path(path)?)?)
    }

    /// Runs one operation.
    ///
    /// # Errors
    /// What the system says, with the operation.
    pub fn run(&mut self, op: &Op) -> Result<()> {
        self.run_one(op).with_context(|| op.to_string())
    }

    /// The number of the inode that an operation has just made; `None` where it makes none.
    ///
    /// # Errors
    /// It is not there.
    pub fn made(&self, op: &Op) -> Result<Option<u64>> {
        let (path, follow) = match op {
            Op::Create(p) | Op::Mkdir(p) | Op::Mknod(_, p) | Op::Symlink { path: p, .. } => {
                (p.clone(), false)
            }
            Op::Rename { from, mode: Move::Whiteout, .. } => (from.clone(), false),
            Op::Unnamed { handle } => (format!("@{handle}"), true),
            _ => return Ok(None),
        };
        let path = self.path(&path)?;
        let meta = if follow { std::fs::metadata(path)? } else { std::fs::symlink_metadata(path)? };
        Ok(Some(meta.ino()))
    }

    fn run_one(&mut self, op: &Op) -> Result<()> {
        match op {
            Op::Create(p) => drop(File::create_new(self.path(p)?)?),
            Op::Mkdir(p) => std::fs::create_dir(self.path(p)?)?,
            Op::Mknod(kind, p) => {
                // The same as the model's, whose numbers are the engine's.
                let rdev = special_kind(*kind).1;
                let (kind, dev) = match kind {
                    Special::Fifo => (FileType::Fifo, 0),
                    Special::Socket => (FileType::Socket, 0),
                    Special::Device => {
                        let (major, minor) = (rdev >> 20, rdev & 0xf_ffff);
                        (FileType::BlockDevice, rustix::fs::makedev(major as u32, minor as u32))
                    }
                };
                rustix::fs::mknodat(CWD, self.path(p)?, kind, Mode::from_raw_mode(0o644), dev)?;
            }
            Op::Symlink { target, path } => std::os::unix::fs::symlink(target, self.path(path)?)?,
            Op::Link { from, to } => {
                let flags =
                    if from.starts_with('@') { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                rustix::fs::linkat(CWD, self.path(from)?, CWD, self.path(to)?, flags)?;
            }
            Op::Unlink(p) => std::fs::remove_file(self.path(p)?)?,
            Op::Rmdir(p) => std::fs::remove_dir(self.path(p)?)?,
            Op::Rename { from, to, mode } => {
                let flags = match mode {
                    Move::Replace => RenameFlags::empty(),
                    Move::Exchange => RenameFlags::EXCHANGE,
                    Move::Whiteout => RenameFlags::WHITEOUT,
                };
                rustix::fs::renameat_with(CWD, self.path(from)?, CWD, self.path(to)?, flags)?;
            }
            Op::Write { path, range, fill } => {
                self.open(path, true)?.write_all_at(&filled(*fill, *range), range.from)?;
            }
            Op::Append { path, len, fill } => {
                let file = self.open(path, true)?;
                let from = file.metadata()?.len();
                file.write_all_at(
                    &filled(*fill, crate::ops::Bytes { from, to: from + len }),
                    from,
                )?;
            }
            Op::Truncate { path, size } => self.open(path, true)?.set_len(*size)?,
            Op::Allocate { path, how, range } => {
                let keep =
                    if how.grows() { FallocateFlags::empty() } else { FallocateFlags::KEEP_SIZE };
                let mode = match how {
                    Alloc::Reserve | Alloc::ReserveKeepSize => keep,
                    Alloc::Zero | Alloc::ZeroKeepSize => FallocateFlags::ZERO_RANGE | keep,
                    Alloc::Punch => FallocateFlags::PUNCH_HOLE | keep,
                };
                let len = range.to.saturating_sub(range.from);
                rustix::fs::fallocate(self.open(path, true)?, mode, range.from, len)?;
            }
            Op::NoCow(path) => {
                let file = self.open(path, false)?;
                let flags = rustix::fs::ioctl_getflags(&file)?;
                rustix::fs::ioctl_setflags(&file, flags | IFlags::NOCOW)?;
            }
            Op::SetXattr { path, name, value } => rustix::fs::lsetxattr(
                self.path(path)?,
                name.as_str(),
                value.as_bytes(),
                XattrFlags::empty(),
            )?,
            Op::RemoveXattr { path, name } => {
                rustix::fs::lremovexattr(self.path(path)?, name.as_str())?
            }
            Op::Chmod { path, perm } => {
                std::fs::set_permissions(self.path(path)?, std::fs::Permissions::from_mode(*perm))?;
            }
            Op::Copy { from, range, to, at } => {
                let (source, target) = (self.open(from, false)?, self.open(to, true)?);
                let (mut from, mut at) = (range.from, *at);
                while from < range.to {
                    let len = usize::try_from(range.to - from)?;
                    let n = rustix::fs::copy_file_range(
                        &source,
                        Some(&mut from),
                        &target,
                        Some(&mut at),
                        len,
                    )?;
                    if n == 0 {
                        break;
                    }
                }
            }
            Op::Dedupe { from, range, to, at } => {
                let (source, target) = (self.open(from, false)?, self.open(to, true)?);
                dedupe(&source, range.from, range.to.saturating_sub(range.from), &target, *at)?;
            }
            Op::Subvolume(p) => subvolume(&["create".as_ref(), self.path(p)?.as_os_str()])?,
            Op::Snapshot { from, to, read_only } => {
                let (from, to) = (self.path(from)?, self.path(to)?);
                let how: &[&OsStr] = if *read_only {
                    &["snapshot".as_ref(), "-r".as_ref()]
                } else {
                    &["snapshot".as_ref()]
                };
                subvolume(&[how, &[from.as_os_str(), to.as_os_str()]].concat())?;
            }
            Op::DeleteSubvolume(p) => subvolume(&["delete".as_ref(), self.path(p)?.as_os_str()])?,
            Op::DefaultSubvolume(p) => {
                subvolume(&["set-default".as_ref(), self.path(p)?.as_os_str()])?
            }
            Op::Fsync(p) => self.open(p, false)?.sync_all()?,
            Op::Fdatasync(p) => self.open(p, false)?.sync_data()?,
            Op::Sync => rustix::fs::syncfs(File::open(&self.top)?)?,
            Op::Open { path, handle } => {
                let fd = rustix::fs::open(
                    self.path(path)?,
                    OFlags::RDONLY | OFlags::CLOEXEC,
                    Mode::empty(),
                )?;
                self.handles.insert(handle.clone(), fd);
            }
            Op::Unnamed { handle } => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                let fd = rustix::fs::open(&self.top, flags, Mode::from_raw_mode(0o644))?;
                self.handles.insert(handle.clone(), fd);
            }
            Op::Close { handle } => {
                self.handles.remove(handle);
            }
        }
        Ok(())
    }
}
