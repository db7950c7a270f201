//! What is mounted where, from `/proc/thread-self/mountinfo`.
//!
//! The table is read, not the mount point: if its daemon is gone, a mount point gives only errors.

use anyhow::Context;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) point: PathBuf,
    /// Number of the file system, the same for all mounts of it.
    pub(crate) device: u64,
    /// `fuse.larder`, …
    pub(crate) kind: OsString,
    pub(crate) source: OsString,
    /// User who made a FUSE mount.
    pub(crate) user: Option<u32>,
    /// Others may enter a FUSE mount, too.
    pub(crate) open_to_others: bool,
}

impl Mount {
    /// Made by `larder mount`?
    pub(crate) fn is_larder(&self) -> bool {
        self.kind == "fuse.larder" || self.kind == "fuseblk.larder"
    }
}

impl From<larder_proc::Mount> for Mount {
    fn from(mount: larder_proc::Mount) -> Self {
        let larder_proc::Mount { device, point, kind, source, options } = mount;
        let open_to_others = options.iter().any(|option| option == "allow_other");
        let user = options.iter().find_map(|o| o.to_str()?.strip_prefix("user_id=")?.parse().ok());
        Self { point, device, kind, source, user, open_to_others }
    }
}

/// The topmost mount on exactly this directory.
pub(crate) fn on(point: &Path) -> anyhow::Result<Option<Mount>> {
    let point = absolute(point)?;
    Ok(all()?.into_iter().rev().find(|m| m.point == point))
}

/// All mounts, lower ones first.
pub(crate) fn all() -> anyhow::Result<Vec<Mount>> {
    let table = larder_proc::mounts().context("reading the mount table")?;
    Ok(table.into_iter().map(Mount::from).collect())
}

/// All mounts that another process sees.
pub(crate) fn of_process(pid: u32) -> anyhow::Result<Vec<Mount>> {
    let table = larder_proc::mounts_of(pid).context("reading the mount table")?;
    Ok(table.into_iter().map(Mount::from).collect())
}

/// The path without symbolic links and dots. Its last part is not touched: it may be the mount of a
/// dead daemon.
pub(crate) fn absolute(point: &Path) -> anyhow::Result<PathBuf> {
    if let Ok(path) = std::fs::canonicalize(point) {
        return Ok(path);
    }
    let whole = std::path::absolute(point).with_context(|| point.display().to_string())?;
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else { return Ok(whole) };
    let parent = std::fs::canonicalize(parent).with_context(|| point.display().to_string())?;
    Ok(parent.join(name))
}

/// Why a path into another user's Larder mount is refused: the kernel lets nobody else in, not even
/// root.
pub(crate) fn why_denied(path: &Path) -> Option<String> {
    let path = std::path::absolute(path).ok()?;
    // The path stays as it is written: inside such a mount it cannot be resolved.
    let mounts = all().ok()?.into_iter().filter(|m| path.starts_with(&m.point));
    let mount = mounts.max_by_key(|m| m.point.as_os_str().len())?;
    let owner = mount.user.filter(|u| *u != rustix::process::getuid().as_raw())?;
    (mount.is_larder() && !mount.open_to_others).then(|| {
        format!(
            "only user {owner}, who mounted it, may enter {}; -o allow_other lets others in",
            mount.point.display()
        )
    })
}

/// Text of an `OsStr` for messages.
pub(crate) fn show(s: &OsStr) -> String {
    String::from_utf8_lossy(s.as_bytes()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_larder_are_known_by_their_options() {
        let mount = |kind: &str, options: &[&str]| {
            Mount::from(larder_proc::Mount {
                device: 1,
                point: "/mnt".into(),
                kind: kind.into(),
                source: "a.img".into(),
                options: options.iter().map(OsString::from).collect(),
            })
        };
        let closed = mount("fuse.larder", &["rw", "user_id=1000", "group_id=0"]);
        assert!(closed.is_larder() && !closed.open_to_others);
        assert_eq!(closed.user, Some(1000));
        let open = mount("ext4", &["rw", "allow_other"]);
        assert!(!open.is_larder() && open.open_to_others);
        assert_eq!(open.user, None);
        assert!(!all().unwrap().is_empty());
        assert!(!on(Path::new("/")).unwrap().unwrap().is_larder());
    }

    #[test]
    fn paths_are_made_absolute_even_if_the_last_part_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let real = std::fs::canonicalize(dir.path()).unwrap();
        assert_eq!(absolute(&dir.path().join("./x")).unwrap(), real.join("x"));
        assert_eq!(absolute(dir.path()).unwrap(), real);
        assert!(absolute(&dir.path().join("no/x")).is_err());
    }
}
