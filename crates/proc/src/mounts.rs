//! The mount table.

use rustix::fs::{Dev, makedev};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Number of the file system, the same for all its mounts: what `stat` of its files shows. (On
    /// btrfs `stat` shows another one, for each subvolume its own.)
    pub device: Dev,
    /// Where it is mounted.
    pub point: PathBuf,
    /// `ext4`, `fuse.larder`, …
    pub kind: OsString,
    /// A device or a name.
    pub source: OsString,
    /// Options of the file system, each as it was given.
    pub options: Vec<OsString>,
}

/// The mounts that this thread sees, lower ones first.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read("/proc/thread-self/mountinfo")?))
}

/// The mounts that another process sees, lower ones first.
///
/// # Errors
/// If there is no such process, or it may not be looked into.
pub fn mounts_of(pid: u32) -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read(format!("/proc/{pid}/mountinfo"))?))
}

fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|b| *b == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<Mount> {
    // id parent major:minor root POINT options [fields…] - KIND SOURCE OPTIONS
    let mut words = line.split(|b| *b == b' ');
    let device = device(words.nth(2)?)?;
    let point = unescape(words.nth(1)?).into();
    let mut rest = words.skip_while(|word| *word != b"-").skip(1);
    let (kind, source) = (unescape(rest.next()?), unescape(rest.next()?));
    let options = rest.next().unwrap_or_default().split(|b| *b == b',').map(unescape).collect();
    Some(Mount { device, point, kind, source, options })
}

/// `major:minor`.
fn device(text: &[u8]) -> Option<Dev> {
    let (major, minor) = std::str::from_utf8(text).ok()?.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Undoes the table's escapes: blanks and some others are a backslash and three octal digits.
fn unescape(word: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|_| *first == b'\\');
        let code = digits.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        out.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    #[test]
    fn lines_are_parsed() {
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
            99 22 0:57 / /mnt/a\\040b\xff rw,noatime shared:1 master:2 - fuse.larder /a\\054b.img \
            rw,user_id=1000\n\nrubbish\n";
        let found = parse(table);
        assert_eq!(found.len(), 2, "a line that is no mount is left out");
        assert_eq!(found[0].device, makedev(8, 1));
        let second = &found[1];
        assert_eq!(second.point.as_os_str().as_bytes(), b"/mnt/a b\xff");
        assert_eq!((second.device, second.kind.to_str()), (makedev(0, 57), Some("fuse.larder")));
        assert_eq!(second.source, "/a,b.img");
        assert_eq!(second.options, ["rw", "user_id=1000"]);
    }

    #[test]
    fn only_whole_escapes_are_undone() {
        for (text, plain) in [("a\\134b\\x", "a\\b\\x"), ("\\", "\\"), ("\\11", "\\11")] {
            assert_eq!(unescape(text.as_bytes()), plain);
        }
    }

    #[test]
    fn devices_are_numbered_as_stat_does() {
        let proc = Path::new("/proc");
        let shown = mounts().unwrap().into_iter().rfind(|m| m.point == proc).unwrap();
        assert_eq!(shown.device, std::fs::metadata(proc).unwrap().dev());
        assert!(mounts_of(std::process::id()).unwrap().iter().any(|m| m.point == proc));
    }
}
