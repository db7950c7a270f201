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
use larder_proc::Mount;
use rustix::fs::{major, minor};
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
    let Some(mount) = mount_on(mountpoint) else { return };
    for (name, value) in values {
        let setting = format!("/sys/class/bdi/{}/{name}", backing_device(&mount));
        if let Err(error) = std::fs::write(&setting, value) {
            tracing::debug!(%setting, %error, "stays as it is");
        }
    }
}

/// Number of the device that is mounted there, as `stat` of its files shows it. The last mount
/// counts.
pub(crate) fn device(mountpoint: &Path) -> Option<u64> {
    mount_on(mountpoint).map(|mount| mount.device)
}

/// What is mounted there; the last mount counts.
fn mount_on(mountpoint: &Path) -> Option<Mount> {
    larder_proc::mounts().ok()?.into_iter().rfind(|mount| mount.point == mountpoint)
}

/// Its name in sysfs. A mount on a block device has its own one besides that of the device.
fn backing_device(mount: &Mount) -> String {
    let suffix = if mount.kind.as_bytes().starts_with(b"fuseblk") { "-fuseblk" } else { "" };
    format!("{}:{}{suffix}", major(mount.device), minor(mount.device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_on_a_device_has_a_backing_device_of_its_own() {
        let mount = |kind: &str| Mount {
            device: rustix::fs::makedev(7, 3),
            point: "/mnt".into(),
            kind: kind.into(),
            source: "x".into(),
            options: Vec::new(),
        };
        assert_eq!(backing_device(&mount("fuse.larder")), "7:3");
        assert_eq!(backing_device(&mount("fuseblk.larder")), "7:3-fuseblk");
    }

    #[test]
    fn devices_are_numbered_as_stat_does() {
        use std::os::unix::fs::MetadataExt;
        let proc = Path::new("/proc");
        assert_eq!(device(proc), Some(std::fs::metadata(proc).unwrap().dev()));
        assert_eq!(device(Path::new("/proc/1")), None);
    }
}
