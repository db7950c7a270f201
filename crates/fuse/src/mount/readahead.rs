//! Read-ahead of a mount, and which device the mount is.
//!
//! INIT can only lower the kernel's 128 KiB. Reads of a megabyte keep a real device busy and cost the engine one look at the
//! extent map instead of eight; root may set that for the mount's own backing device entry in sysfs.

use crate::proto::init::MAX_WRITE;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Raises the read-ahead of the mount on `mountpoint`, where that is permitted.
pub(crate) fn raise(mountpoint: &Path) {
    let Ok(table) = std::fs::read_to_string("/proc/thread-self/mountinfo") else { return };
    let Some(device) = device_of(&table, mountpoint) else { return };
    let setting = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&setting, format!("{}", MAX_WRITE >> 10)) {
        tracing::debug!(%setting, %error, "read-ahead stays as it is");
    }
}

/// Number of the device that is mounted there, as `stat` of its files shows it; the last mount counts.
pub(crate) fn device(mountpoint: &Path) -> Option<u64> {
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").ok()?;
    number(device_of(&table, mountpoint)?)
}

fn number(device: &str) -> Option<u64> {
    let (major, minor) = device.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// `major:minor` of what is mounted there, the last mount counting.
fn device_of<'a>(mountinfo: &'a str, mountpoint: &Path) -> Option<&'a str> {
    mountinfo.lines().rev().find_map(|line| {
        let mut fields = line.split(' ');
        let device = fields.nth(2)?;
        let path = fields.nth(1)?;
        (unescape(path) == mountpoint.as_os_str().as_bytes()).then_some(device)
    })
}

/// The table writes blanks and backslashes as a backslash and three octal digits.
fn unescape(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let code = (*first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match code {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_of_a_place_is_found() {
        let table = "24 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                     30 24 0:40 / /mnt/a\\040b rw,noatime shared:1 - fuse.larder x rw\n\
                     31 24 0:41 / /mnt/a\\040b rw - fuse.larder y rw\n";
        assert_eq!(device_of(table, Path::new("/mnt/a b")), Some("0:41"));
        assert_eq!(device_of(table, Path::new("/")), Some("8:1"));
        assert_eq!(device_of(table, Path::new("/mnt")), None);
        assert_eq!(unescape("a\\134b\\x"), b"a\\b\\x");
        assert_eq!(number("8:1"), Some(rustix::fs::makedev(8, 1)));
        assert_eq!(number("8"), None);
    }

    #[test]
    fn devices_are_numbered_as_stat_does() {
        use std::os::unix::fs::MetadataExt;
        let proc = Path::new("/proc");
        assert_eq!(device(proc), Some(std::fs::metadata(proc).unwrap().dev()));
    }
}
