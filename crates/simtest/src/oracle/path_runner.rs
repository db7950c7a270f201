//! Runs operations on a directory through the system's own calls: what a program does on a mount,
//! Linux's or ours.

use super::dedupe::dedupe_range;
use crate::ops::{Alloc, Bytes, Move, Op, Special, filled};
use crate::workload::random_ops;
use crate::world::{World, special_kind};
use anyhow::{Context, Result, ensure};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, IFlags, Mode, OFlags, RenameFlags, XattrFlags,
};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

fn subvolume(args: &[&OsStr]) -> Result<()> {
    super::btrfs(&[&["subvolume".as_ref()], args].concat()).map(drop)
}

/// Lets ranges share extents, and demands that all of them was the same, but for a part of a sector
/// at the end.
fn dedupe(from: &File, range: Bytes, to: &File, at: u64) -> Result<()> {
    let range = range.from..range.to.max(range.from);
    let same = dedupe_range(from, range, to, at).context("FIDEDUPERANGE")?;
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
        // A named pipe must not wait for its other end.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        Ok(options.read(true).write(write).custom_flags(flags).open(self.path(path)?)?)
    }

    /// Runs one operation.
    ///
    /// # Errors
    /// What the system says, with the operation.
    pub fn run(&mut self, op: &Op) -> Result<()> {
        self.run_one(op).with_context(|| op.to_string())
    }

    /// Changes at random what is in one subvolume, by operations that are wanted. What is refused
    /// changes nothing.
    pub fn walk(&mut self, seed: u64, steps: usize, wanted: impl Fn(&Op) -> bool) {
        let stays_within = |op: &Op| {
            !matches!(
                op,
                Op::Subvolume(_)
                    | Op::Snapshot { .. }
                    | Op::DeleteSubvolume(_)
                    | Op::DefaultSubvolume(_)
                    | Op::Sync
            )
        };
        let world = World::empty(0o755, 256);
        let ops = random_ops(seed, steps, "", &world);
        for op in ops.iter().filter(|op| stays_within(op) && wanted(op)) {
            let _ = self.run(op);
        }
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
            Op::Mknod(kind, p) => make_special(&self.path(p)?, *kind)?,
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
                file.write_all_at(&filled(*fill, Bytes { from, to: from + len }), from)?;
            }
            Op::Truncate { path, size } => self.open(path, true)?.set_len(*size)?,
            Op::Allocate { path, how, range } => {
                let len = range.to.saturating_sub(range.from);
                rustix::fs::fallocate(self.open(path, true)?, mode_of(*how), range.from, len)?;
            }
            Op::NoCow(path) => set_nocow(&self.open(path, false)?)?,
            Op::SetXattr { path, name, value } => {
                let (path, none) = (self.path(path)?, XattrFlags::empty());
                rustix::fs::lsetxattr(path, name.as_str(), value.as_bytes(), none)?;
            }
            Op::RemoveXattr { path, name } => {
                rustix::fs::lremovexattr(self.path(path)?, name.as_str())?
            }
            Op::Chmod { path, perm } => {
                std::fs::set_permissions(self.path(path)?, std::fs::Permissions::from_mode(*perm))?;
            }
            Op::Copy { from, range, to, at } => {
                copy(&self.open(from, false)?, *range, &self.open(to, true)?, *at)?;
            }
            Op::Dedupe { from, range, to, at } => {
                dedupe(&self.open(from, false)?, *range, &self.open(to, true)?, *at)?;
            }
            Op::Subvolume(p) => subvolume(&["create".as_ref(), self.path(p)?.as_os_str()])?,
            Op::Snapshot { from, to, read_only } => {
                snapshot(&self.path(from)?, &self.path(to)?, *read_only)?;
            }
            Op::DeleteSubvolume(p) => subvolume(&["delete".as_ref(), self.path(p)?.as_os_str()])?,
            Op::DefaultSubvolume(p) => {
                subvolume(&["set-default".as_ref(), self.path(p)?.as_os_str()])?
            }
            Op::Fsync(p) => self.open(p, false)?.sync_all()?,
            Op::Fdatasync(p) => self.open(p, false)?.sync_data()?,
            Op::Sync => rustix::fs::syncfs(File::open(&self.top)?)?,
            Op::Open { path, handle } => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let fd = rustix::fs::open(self.path(path)?, flags, Mode::empty())?;
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

fn make_special(path: &Path, kind: Special) -> Result<()> {
    // The same as the model's, whose numbers are the engine's.
    let rdev = special_kind(kind).1;
    let (kind, dev) = match kind {
        Special::Fifo => (FileType::Fifo, 0),
        Special::Socket => (FileType::Socket, 0),
        Special::Device => {
            let (major, minor) = (rdev >> 20, rdev & 0xf_ffff);
            (FileType::BlockDevice, rustix::fs::makedev(major as u32, minor as u32))
        }
    };
    Ok(rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o644), dev)?)
}

fn mode_of(how: Alloc) -> FallocateFlags {
    let keep = if how.grows() { FallocateFlags::empty() } else { FallocateFlags::KEEP_SIZE };
    match how {
        Alloc::Reserve | Alloc::ReserveKeepSize => keep,
        Alloc::Zero | Alloc::ZeroKeepSize => FallocateFlags::ZERO_RANGE | keep,
        Alloc::Punch => FallocateFlags::PUNCH_HOLE | keep,
    }
}

fn set_nocow(file: &File) -> Result<()> {
    let flags = rustix::fs::ioctl_getflags(file)?;
    Ok(rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW)?)
}

fn copy(source: &File, range: Bytes, target: &File, at: u64) -> Result<()> {
    let (mut from, mut at) = (range.from, at);
    while from < range.to {
        let len = usize::try_from(range.to - from)?;
        let (from, at) = (Some(&mut from), Some(&mut at));
        if rustix::fs::copy_file_range(source, from, target, at, len)? == 0 {
            break;
        }
    }
    Ok(())
}

fn snapshot(from: &Path, to: &Path, read_only: bool) -> Result<()> {
    let how: &[&OsStr] =
        if read_only { &["snapshot".as_ref(), "-r".as_ref()] } else { &["snapshot".as_ref()] };
    subvolume(&[how, &[from.as_os_str(), to.as_os_str()]].concat())
}
