//! The side that is backed up, on a mount: its daemon makes the snapshots and the streams.
//!
//! As in an image, snapshots lie in `.snapshots` beside the subvolume if nobody says otherwise. The
//! root of a mount has nothing beside it that is on the mount, so there they lie in it.
//!
//! An image is locked by the run that has it. On a mount the directory of snapshots is, so that a
//! run that takes longer than the time to the next one is not disturbed by that.

use super::held::{self, Entry};
use super::source::{PERMISSIONS, SNAPSHOTS, Source};
use crate::failure::Advise;
use crate::mounted::mounted;
use crate::on_mount::send::{How, Paths, send_streams};
use crate::print;
use anyhow::{Context, anyhow};
use larder_fuse::{control, subvolumes as on_mount};
use larder_receive::destination::Sent;
use larder_send::Options;
use larder_stream::Protocol;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A subvolume on a mount.
#[derive(Debug)]
pub(super) struct OnMount {
    subvol: PathBuf,
    /// The directory of snapshots.
    dir: PathBuf,
    /// It, locked, unless nothing is to be changed.
    lock: Option<OwnedFd>,
}

/// The name of a subvolume's snapshots, where none is given: that which it has in its image.
pub(super) fn own_name(path: &Path) -> anyhow::Result<Vec<u8>> {
    let facts = facts(path)?;
    let path = facts["path"].as_str().unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default();
    // Bytes that are no text have been lost on the way.
    match name.contains(char::REPLACEMENT_CHARACTER) {
        true => Err(anyhow!("{path} is not text")).hint("give the snapshots a name: --name"),
        false => Ok(if name.is_empty() { b"root".to_vec() } else { name.into() }),
    }
}

fn facts(path: &Path) -> anyhow::Result<Value> {
    let shown = print::path(path);
    let is_root = mounted(path, |path| match on_mount::is_read_only(path) {
        Err(e) if e.kind() == ErrorKind::InvalidInput => Ok(false),
        other => other.map(|_| true),
    })?;
    if !is_root {
        return Err(anyhow!("{shown} is not a subvolume"))
            .hint("`larder subvolume list` shows the subvolumes")
            .could_not_run();
    }
    let id = mounted(path, on_mount::id_of)?;
    let (all, _) = mounted(path, on_mount::list)?;
    let found = all.into_iter().find(|s| s["id"] == id);
    found.with_context(|| format!("{shown} has just been deleted"))
}

impl OnMount {
    pub(super) fn new(path: &Path, dir: Option<&Path>, dry_run: bool) -> anyhow::Result<Self> {
        let subvol = path.canonicalize().with_context(|| print::path(path)).could_not_run()?;
        let dir = match dir {
            Some(dir) => dir.to_path_buf(),
            None => above(&subvol)?.join(OsStr::from_bytes(SNAPSHOTS)),
        };
        mounted(&subvol, control::is_served)?;
        let lock = if dry_run { None } else { Some(made_and_locked(&dir)?) };
        Ok(Self { subvol, dir, lock })
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        self.dir.join(OsStr::from_bytes(name))
    }
}

/// The directory that a subvolume lies in, or itself if it is the root of a mount.
fn above(subvol: &Path) -> anyhow::Result<&Path> {
    let device = |path: &Path| Ok(path.metadata().with_context(|| print::path(path))?.dev());
    let device = |path: &Path| -> anyhow::Result<u64> { device(path) };
    match subvol.parent() {
        Some(above) if device(above)? == device(subvol)? => Ok(above),
        _ => Ok(subvol),
    }
}

/// Makes the directory of snapshots if it does not exist, and locks it.
fn made_and_locked(dir: &Path) -> anyhow::Result<OwnedFd> {
    let shown = print::path(dir);
    match DirBuilder::new().mode(PERMISSIONS).create(dir) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e).context(shown),
        _ => {}
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(dir, flags, Mode::empty()).with_context(|| shown.clone())?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(anyhow!("{shown}: another backup of it is running"))
            .hint("wait until that has ended, or end it: the next run goes on with what it began")
            .could_not_run(),
        other => other.map(|()| fd).context(shown),
    }
}

impl Source for OnMount {
    fn list(&self) -> anyhow::Result<Vec<Entry>> {
        if self.dir.symlink_metadata().is_ok() {
            held::on_a_mount(&self.dir)
        } else {
            Ok(Vec::new())
        }
    }

    fn snapshot(&self, name: &[u8]) -> anyhow::Result<Sent> {
        anyhow::ensure!(self.lock.is_some(), "a dry run makes no snapshot");
        let inherits = !facts(&self.subvol)?["received_uuid"].is_null();
        let path = self.path(name);
        mounted(&path, |path| on_mount::snapshot(&self.subvol, path, !inherits))?;
        if inherits {
            mounted(&path, |path| on_mount::set_read_only(path, true))?;
        }
        // The target must not know a snapshot that is lost here.
        mounted(&self.dir, control::sync)?;
        let found = self.list()?.into_iter().find(|entry| entry.name == name);
        Ok(found.with_context(|| format!("{} is gone", print::path(&path)))?.sent)
    }

    fn send(&self, name: &[u8], parent: Option<&[u8]>, out: &mut dyn Write) -> anyhow::Result<()> {
        let paths = Paths {
            subvolumes: vec![self.path(name)],
            parent: parent.map(|parent| self.path(parent)),
            clones: Vec::new(),
        };
        let options = Options { compressed_data: true, no_data: false };
        let how = How { protocol: Protocol::V2, options, joined: false };
        send_streams(&paths, how, out, &mut |_| {}).map(drop)
    }

    fn delete(&self, name: &[u8]) -> anyhow::Result<()> {
        mounted(&self.path(name), on_mount::delete)
    }

    fn nested(&self) -> anyhow::Result<Vec<String>> {
        let own = facts(&self.subvol)?["id"].clone();
        let (all, _) = mounted(&self.subvol, on_mount::list)?;
        let within = all.iter().filter(|s| s["parent_id"] == own && s["id"] != own);
        let paths = within.map(|s| s["path"].as_str().unwrap_or_default());
        let name = |path: &&str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let foreign = paths.filter(|path| !held::is_ours(name(path).as_bytes()));
        Ok(foreign.map(|path| print::name(path.as_bytes())).collect())
    }

    fn finish(&self) -> anyhow::Result<()> {
        mounted(&self.subvol, control::sync)
    }
}
