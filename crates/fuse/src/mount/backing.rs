//! Settings of a mount's backing device, and which device the mount is.
//!
//! Read-ahead: INIT can only lower the kernel's 128 KiB. With reads of a megabyte the engine looks
//! at the extent map once instead of eight times, and several of them at once keep a real device
//! busy. Root may raise the read-ahead in sysfs, for the mount's own backing device.
//!
//! Dirty pages: the kernel lets a FUSE mount have one hundredth of the pages that all file systems
//! together may delay, and enforces that strictly, because it cannot know whether the daemon will
//! take them. Scattered pages are then written one by one, before any neighbours are dirty: such a
//! cache merges nothing. With `-o writeback` root's mount therefore gets the share that every other
//! file system has.

use crate::proto::init::MAX_WRITE;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Reads of a sequential reader that are on their way at once.
const READS_AHEAD: u32 = 4;

/// Raises the read-ahead of the mount on `mountpoint` if that is permitted. To be called after
/// INIT, which sets it.
pub(crate) fn raise_read_ahead(mountpoint: &Path) {
    set(mountpoint, &[("read_ahead_kb", &format!("{}", READS_AHEAD * (MAX_WRITE >> 10)))]);
}

/// Lets the mount on `mountpoint` have as many dirty pages as any other, if that is permitted.
pub(crate) fn share_dirty_pages(mountpoint: &Path) {
    set(mountpoint, &[("strict_limit", "0"), ("max_ratio", "100")]);
}

fn set(mountpoint: &Path, values: &[(&str, &str)]) {
    let Ok(table) = std::fs::read_to_string("/proc/thread-self/mountinfo") else { return };
    let Some(entry) = entry_of(&table, mountpoint) else { return };
    for (name, value) in values {
        let setting = format!("/sys/class/bdi/{}/{name}", entry.backing_device());
        if let Err(error) = std::fs::write(&setting, value) {
            tracing::debug!(%setting, %error, "stays as it is");
        }
    }
}

/// Number of the device that is mounted there, as `stat` of its files shows it. The last mount
/// counts.
pub(crate) fn device(mountpoint: &Path) -> Option<u64> {
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").ok()?;
    number(entry_of(&table, mountpoint)?.device)
}

fn number(device: &str) -> Option<u64> {
    let (major, minor) = device.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// A line of the mount table.
#[derive(Debug, PartialEq, Eq)]
struct MountTableEntry<'a> {
    /// `major:minor`.
    device: &'a str,
    kind: &'a str,
}

impl MountTableEntry<'_> {
    /// Its name in sysfs. A mount on a block device has its own one besides that of the device.
    fn backing_device(&self) -> String {
        let suffix = if self.kind.starts_with("fuseblk") { "-fuseblk" } else { "" };
        format!("{}{suffix}", self.device)
    }
}

/// What is mounted there; the last mount counts.
fn entry_of<'a>(mountinfo: &'a str, mountpoint: &Path) -> Option<MountTableEntry<'a>> {
    mountinfo.lines().rev().find_map(|line| {
        let mut fields = line.split(' ');
        let device = fields.nth(2)?;
        let path = fields.nth(1)?;
        let kind = fields.skip_while(|field| *field != "-").nth(1)?;
        (unescape(path) == mountpoint.as_os_str().as_bytes())
            .then_some(MountTableEntry { device, kind })
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
                     31 24 0:41 / /mnt/a\\040b rw - fuse.larder y rw\n\
                     32 24 7:0 / /mnt/b rw,noatime shared:2 master:1 - fuseblk.larder /dev/loop0 \
                     rw\n";
        let found =
            |path: &str| entry_of(table, Path::new(path)).map(|e| (e.device, e.backing_device()));
        assert_eq!(found("/mnt/a b"), Some(("0:41", "0:41".to_owned())));
        assert_eq!(found("/"), Some(("8:1", "8:1".to_owned())));
        assert_eq!(found("/mnt/b"), Some(("7:0", "7:0-fuseblk".to_owned())));
        assert_eq!(found("/mnt"), None);
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
