//! What is mounted where, from `/proc/thread-self/mountinfo`.
//!
//! The table is read, not the mount point: if its daemon is gone, a mount point gives only errors.

use anyhow::Context;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) point: PathBuf,
    /// Number of the file system, the same for all mounts of it.
    pub(crate) device: OsString,
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

/// The topmost mount on exactly this directory.
pub(crate) fn on(point: &Path) -> anyhow::Result<Option<Mount>> {
    let point = absolute(point)?;
    Ok(all()?.into_iter().rev().find(|m| m.point == point))
}

/// All mounts, lower ones first.
pub(crate) fn all() -> anyhow::Result<Vec<Mount>> {
    read("/proc/thread-self/mountinfo")
}

/// All mounts that another process sees.
pub(crate) fn of_process(pid: u32) -> anyhow::Result<Vec<Mount>> {
    read(&format!("/proc/{pid}/mountinfo"))
}

fn read(table: &str) -> anyhow::Result<Vec<Mount>> {
    let table = std::fs::read(table).context("reading the mount table")?;
    Ok(table.split(|b| *b == b'\n').filter_map(parse).collect())
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

fn parse(line: &[u8]) -> Option<Mount> {
    // id parent major:minor root POINT options [fields…] - KIND SOURCE SUPEROPTIONS
    let mut words = line.split(|b| *b == b' ');
    let device = words.nth(2)?;
    let point = words.nth(1)?;
    let mut rest = words.skip_while(|w| *w != b"-").skip(1);
    let (kind, source, options) = (rest.next()?, rest.next()?, rest.next().unwrap_or_default());
    let open_to_others = options.split(|b| *b == b',').any(|o| o == b"allow_other");
    let user = options
        .split(|b| *b == b',')
        .find_map(|o| o.strip_prefix(b"user_id="))
        .and_then(|v| std::str::from_utf8(v).ok()?.parse().ok());
    Some(Mount {
        point: PathBuf::from(unescape(point)),
        device: unescape(device),
        kind: unescape(kind),
        source: unescape(source),
        user,
        open_to_others,
    })
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

/// Undoes the octal escapes of the table.
fn unescape(word: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, tail)) = rest.split_first() {
        let octal =
            tail.get(..3).filter(|d| *first == b'\\' && d.iter().all(|b| matches!(b, b'0'..=b'7')));
        let code = octal.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        match code {
            Some(c) => {
                out.push(c);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out)
}

/// Text of an `OsStr` for messages.
pub(crate) fn show(s: &OsStr) -> String {
    String::from_utf8_lossy(s.as_bytes()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed() {
        let line = br"99 22 0:57 / /mnt/with\040space rw,nosuid,noatime shared:1 master:2 - fuse.larder /a\054b.img rw,user_id=1000,group_id=0";
        let m = parse(line).unwrap();
        assert_eq!(
            (m.point.as_path(), m.device.to_str()),
            (Path::new("/mnt/with space"), Some("0:57"))
        );
        assert_eq!(
            (m.kind.to_str(), m.source.to_str(), m.user),
            (Some("fuse.larder"), Some("/a,b.img"), Some(1000))
        );
        assert!(m.is_larder() && !m.open_to_others);
        let line =
            br"99 22 0:57 / /mnt rw - fuse.larder a rw,user_id=0,group_id=0,default_permissions,allow_other";
        assert!(parse(line).unwrap().open_to_others);
        assert_eq!(parse(b""), None);
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
