//! Images opened without a mount, and paths inside them.
//!
//! Hides how an image is opened for a command — with which lock, which subvolume, what is said about a log — and
//! how a path inside it becomes an inode, symbolic links included.

use crate::failure::Advise;
use crate::{mount_table, state};
use anyhow::{Context, anyhow};
use larder_fs::{Attr, Compress, FileKind, Filesystem, InodeId, OpenOptions, Packing, SubvolChoice};
use larder_volume::{Device, FileDevice, OpenMode, VolumeError};
use std::path::Path;
use std::sync::Arc;

/// Symbolic links followed in one path before giving up.
const MAX_LINKS: u32 = 40;

/// What a command wants to do with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Look only; with `force` even if somebody is using it.
    Read { force: bool },
    /// Change it.
    Write,
}

/// Opens the device behind an image, with the right advice when that fails.
pub(crate) fn open_device(path: &Path, access: Access) -> anyhow::Result<Arc<FileDevice>> {
    let device = match access {
        Access::Read { force: true } => FileDevice::open_despite_users(path),
        Access::Read { force: false } => when_free(path, || FileDevice::open(path, OpenMode::Read)),
        Access::Write => when_free(path, || FileDevice::open(path, OpenMode::Write)),
    };
    advise_open(device, access).map(Arc::new)
}

/// Opens an image, after the end of a daemon whose mount is gone already.
pub(crate) fn when_free<T>(path: &Path, open: impl Fn() -> Result<T, VolumeError>) -> Result<T, VolumeError> {
    loop {
        match open() {
            Err(VolumeError::Busy { .. }) if state::wait_for_the_end(path) => {}
            // It may have ended before it was looked for.
            Err(VolumeError::Busy { .. }) => return open(),
            result => return result,
        }
    }
}

/// Adds what helps when an image cannot be opened.
pub(crate) fn advise_open<T>(result: Result<T, VolumeError>, access: Access) -> anyhow::Result<T> {
    let denied;
    let hint = match &result {
        Ok(_) => None,
        Err(VolumeError::Busy { .. }) if access == Access::Write => {
            Some("unmount it first; one image has one user that writes")
        }
        Err(VolumeError::Busy { .. }) => {
            Some("unmount it first, or use --force to read it as it is, perhaps in the middle of a change")
        }
        Err(VolumeError::Io { source, device, .. }) => match source.kind() {
            std::io::ErrorKind::NotFound if access == Access::Write => {
                Some("`larder mkfs --size SIZE IMAGE` makes a new image")
            }
            std::io::ErrorKind::IsADirectory => Some("give an image file or a block device"),
            std::io::ErrorKind::PermissionDenied => {
                denied = mount_table::why_denied(Path::new(device));
                Some(denied.as_deref().unwrap_or("look at the file's owner and permissions"))
            }
            _ if source.to_string().contains("neither a regular file nor a block device") => {
                Some("give an image file or a block device")
            }
            _ => None,
        },
        Err(_) => None,
    };
    match hint {
        Some(h) => result.hint(h).could_not_run(),
        None => result.could_not_run(),
    }
}

/// An open image.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) fs: Arc<Filesystem>,
    name: String,
}

impl Image {
    /// Opens the image at `path`, with the given subvolume (the default one if `None`) as root.
    pub(crate) fn open(path: &Path, access: Access, subvolid: Option<u64>) -> anyhow::Result<Self> {
        Self::open_compressing(path, access, subvolid, None)
    }

    /// The same, and compresses what is written.
    pub(crate) fn open_compressing(
        path: &Path,
        access: Access,
        subvolid: Option<u64>,
        compress: Option<Packing>,
    ) -> anyhow::Result<Self> {
        let device = open_device(path, access)?;
        let name = path.display().to_string();
        let read_only = matches!(access, Access::Read { .. });
        let options = OpenOptions {
            read_only,
            no_log_replay: read_only,
            subvol: subvolid.map_or(SubvolChoice::Default, SubvolChoice::Id),
            // One command makes one commit, when it is done.
            commit_interval: None,
            compress: compress.map(|packing| Compress { packing, force: false }),
            discard: !device.is_block_device(),
            ..OpenOptions::default()
        };
        let fs = advise_filesystem(Filesystem::open(device as Arc<dyn Device>, options), &name)?;
        if fs.info().has_unreplayed_log {
            eprintln!(
                "larder: note: {name} was not unmounted cleanly and has a log; showing its last commit (a mount, \
                 also -o ro, shows what was fsynced after it, too)"
            );
        }
        Ok(Self { fs, name })
    }

    /// Commits what was changed and closes.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.fs.close().with_context(|| format!("{}: committing", self.name))
    }

    /// The inode at `path`; a symbolic link at its end is followed if `follow`.
    pub(crate) fn resolve(&self, path: &[u8], follow: bool) -> anyhow::Result<Attr> {
        self.walk(path, follow).map(|(_, attr)| attr).with_context(|| self.show(path))
    }

    /// The directory that `path` lies in, and its last name; the name itself need not exist.
    pub(crate) fn parent<'a>(&self, path: &'a [u8]) -> anyhow::Result<(InodeId, &'a [u8])> {
        let end = path.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        let trimmed = &path[..end];
        let split = trimmed.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
        let (dir, name) = trimmed.split_at(split);
        if matches!(name, b"" | b"." | b"..") {
            return Err(anyhow!("there is no name at the end of {}", self.show(path)));
        }
        let dir = self.resolve(dir, true)?;
        if dir.kind != FileKind::Directory {
            return Err(anyhow!("{}: the directory part is not a directory", self.show(path)));
        }
        Ok((dir.id, name))
    }

    /// Is `dir` the directory `above`, or somewhere below it?
    pub(crate) fn is_below(&self, dir: InodeId, above: InodeId) -> anyhow::Result<bool> {
        let (root, mut at) = (self.fs.root(), dir);
        loop {
            if at == above {
                return Ok(true);
            }
            let up = self.fs.lookup(at, b"..")?.id;
            if at == root || up == at {
                return Ok(false);
            }
            at = up;
        }
    }

    /// Does the last component exist? (An error of another kind counts as "no".)
    pub(crate) fn lookup(&self, path: &[u8], follow: bool) -> Option<Attr> {
        self.walk(path, follow).ok().map(|(_, attr)| attr)
    }

    /// `IMAGE:/path` for messages.
    pub(crate) fn show(&self, path: &[u8]) -> String {
        let path = String::from_utf8_lossy(path);
        format!("{}:/{}", self.name, path.trim_start_matches('/'))
    }

    fn walk(&self, path: &[u8], follow: bool) -> larder_fs::Result<(Vec<InodeId>, Attr)> {
        let root = self.fs.root();
        let mut trail = vec![root];
        let mut at = self.fs.getattr(root)?;
        let mut todo: Vec<Vec<u8>> = components(path);
        let mut links = 0;
        while let Some(name) = todo.pop() {
            if name == b".." {
                if trail.len() > 1 {
                    trail.pop();
                }
                at = self.fs.getattr(trail[trail.len() - 1])?;
                continue;
            }
            if at.kind != FileKind::Directory {
                return Err(larder_fs::Error::NotDirectory);
            }
            let found = self.fs.lookup(at.id, &name)?;
            if found.kind == FileKind::Symlink && (follow || !todo.is_empty()) {
                links += 1;
                if links > MAX_LINKS {
                    return Err(larder_fs::Error::Invalid("too many symbolic links"));
                }
                let target = self.fs.readlink(found.id)?;
                if target.first() == Some(&b'/') {
                    trail.truncate(1);
                    at = self.fs.getattr(root)?;
                }
                todo.extend(components(&target));
                continue;
            }
            if found.kind == FileKind::Directory {
                trail.push(found.id);
            }
            at = found;
        }
        Ok((trail, at))
    }
}

/// Adds what helps when a file system cannot be opened.
pub(crate) fn advise_filesystem<T>(result: larder_fs::Result<T>, name: &str) -> anyhow::Result<T> {
    let hint = match &result {
        Err(larder_fs::Error::Volume(VolumeError::Corrupt { what, .. })) if what.contains("mirror") => {
            Some("`larder restore` copies the files, starting from the mirror")
        }
        Err(larder_fs::Error::Volume(VolumeError::Corrupt { what, .. })) if what.contains("not a btrfs") => {
            Some("`larder mkfs` makes a btrfs file system; it overwrites what is there")
        }
        Err(e) if e.to_string().contains("the log cannot be replayed") => Some(
            "`larder inspect log` shows it; -o ro,nologreplay and `larder restore` read the last commit; as a last \
             resort, `larder rescue zero-log` drops it",
        ),
        Err(larder_fs::Error::Corrupt { .. }) => {
            Some("`larder check` says what is damaged; `larder restore` copies what can still be read")
        }
        Err(e) if e.to_string().contains("no subvolume") => {
            Some("`-o subvolid=5` (or --subvolid 5) is the top of the file system")
        }
        _ => None,
    };
    let result = result.map_err(|e| {
        let text = e.to_string();
        let e = anyhow::Error::new(e);
        if text.starts_with(name) { e } else { e.context(name.to_owned()) }
    });
    match hint {
        Some(h) => result.hint(h).could_not_run(),
        None => result.could_not_run(),
    }
}

/// Names of a path, the last first, without empty ones and dots.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|b| *b == b'/').rev().filter(|n| !matches!(*n, b"" | b".")).map(<[u8]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_fall_into_names() {
        assert_eq!(components(b"/a//b/./../c/"), [&b"c"[..], b"..", b"b", b"a"]);
        assert!(components(b"/").is_empty());
    }
}
