//! Is this image in use? And a lock by which the next program can tell that it is.
//!
//! Two writers on one file system destroy it, and the ways in which an image can be in use do not
//! know of each other. This module looks for all of them:
//!
//! - **another Larder**: a BSD lock on the open file, exclusive for writers and shared for readers.
//!   It belongs to the open file description, so it lasts exactly as long as the device is open,
//!   whatever kills the process;
//! - **the kernel on a block device**: it holds what it mounts exclusively (and so do
//!   device-mapper, md and swap), which an `O_EXCL` open finds out; the mount table then says
//!   where;
//! - **the kernel on an image file**: through a loop device whose backing file is the same inode.
//!   For a writer a bare loop device counts as a user, for whatever sits on it may write at any
//!   time; a reader is refused only if the loop device is itself in use.
//!
//! A BSD lock on a block device that the parent of this process holds is none of another program.
//! By the convention of block device locking (systemd's), a program locks a device, and then starts
//! the one that is to make a file system there.
//!
//! Looking is best effort by nature (another mount namespace may be hidden, another tool may come a
//! moment later); the lock is what is relied upon between Larders.

use crate::error::{VolumeError, VolumeResult};
use std::fs::File;
use std::path::Path;

/// What an image is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Only read. Others may read at the same time.
    Read,
    /// Read and write. No other program may use the image meanwhile.
    Write,
}

/// A lock on an open image. Given back when dropped.
///
/// It belongs to the open file, which a forked child shares: dropping it in either gives it up for
/// both. A program that goes into the background does so before it opens its image.
#[derive(Debug)]
pub(crate) struct ImageLock {
    /// None when it was left to the file's other users.
    file: Option<File>,
}

impl ImageLock {
    /// The open file keeps the lock as long as anything has it open.
    pub(crate) fn leave(mut self) {
        self.file = None;
    }
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        // Not left to closing: a child that another thread is just starting has a copy of the
        // descriptor until it executes its program, and would keep the lock a moment longer.
        if let Some(file) = &self.file {
            os::unlock(file);
        }
    }
}

/// Locks `file`, which was opened by `path`, and looks for other users.
///
/// # Errors
/// [`VolumeError::Busy`] names its user.
pub(crate) fn acquire(file: &File, path: &Path, mode: OpenMode) -> VolumeResult<ImageLock> {
    let own = file.try_clone().map_err(|source| VolumeError::Io {
        device: path.display().to_string(),
        op: "lock",
        at: larder_format::Physical(0),
        len: 0,
        source,
    })?;
    let busy = |by: String| VolumeError::Busy { device: path.display().to_string(), by };
    if let Some(by) = os::lock(&own, mode) {
        return Err(busy(by));
    }
    let user = os::kernel_user(&own, path, mode);
    let lock = ImageLock { file: Some(own) };
    match user {
        Some(by) => Err(busy(by)),
        None => Ok(lock),
    }
}

#[cfg(not(target_os = "linux"))]
mod os {
    use super::*;

    #[cfg(unix)]
    pub(super) fn lock(file: &File, mode: OpenMode) -> Option<String> {
        use rustix::fs::{FlockOperation, flock};
        let how = match mode {
            OpenMode::Read => FlockOperation::NonBlockingLockShared,
            OpenMode::Write => FlockOperation::NonBlockingLockExclusive,
        };
        matches!(flock(file, how), Err(rustix::io::Errno::WOULDBLOCK))
            .then(|| "another process has locked it".into())
    }
    #[cfg(unix)]
    pub(super) fn unlock(file: &File) {
        let _ = rustix::fs::flock(file, rustix::fs::FlockOperation::Unlock);
    }
    #[cfg(not(unix))]
    pub(super) fn lock(_: &File, _: OpenMode) -> Option<String> {
        None
    }
    #[cfg(not(unix))]
    pub(super) fn unlock(_: &File) {}
    pub(super) fn kernel_user(_: &File, _: &Path, _: OpenMode) -> Option<String> {
        None
    }
}

#[cfg(target_os = "linux")]
mod os {
    use super::*;
    use rustix::fs::{FlockOperation, flock, major, minor};
    use rustix::io::Errno;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
    use std::path::PathBuf;

    pub(super) fn lock(file: &File, mode: OpenMode) -> Option<String> {
        let how = match mode {
            OpenMode::Read => FlockOperation::NonBlockingLockShared,
            OpenMode::Write => FlockOperation::NonBlockingLockExclusive,
        };
        loop {
            match flock(file, how) {
                Ok(()) => return None,
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => {
                    let holder = lock_holder(file);
                    if holder.is_some_and(|pid| is_device(file) && is_parent(pid)) {
                        return None;
                    }
                    return Some(holder.map_or_else(
                        || "another process has locked it".into(),
                        |pid| format!("locked by {}", named(pid)),
                    ));
                }
                Err(e) => {
                    // A network file system without locks: better to work than to refuse.
                    tracing::warn!("cannot lock the image, other users will not be noticed: {e}");
                    return None;
                }
            }
        }
    }

    pub(super) fn unlock(file: &File) {
        // An error could only say that there is no lock, which is what was wanted.
        let _ = flock(file, FlockOperation::Unlock);
    }

    fn is_device(file: &File) -> bool {
        file.metadata().is_ok_and(|meta| meta.file_type().is_block_device())
    }

    fn is_parent(pid: u32) -> bool {
        std::os::unix::process::parent_id() == pid
    }

    fn named(pid: u32) -> String {
        // The kernel cuts names after 15 bytes, be it in the middle of a letter.
        match fs::read(format!("/proc/{pid}/comm")) {
            Ok(name) => format!("process {pid} ({})", String::from_utf8_lossy(&name).trim()),
            Err(_) => format!("process {pid}"),
        }
    }

    /// The process in `/proc/locks` that has a BSD lock on the inode.
    fn lock_holder(file: &File) -> Option<u32> {
        let meta = file.metadata().ok()?;
        let locks = fs::read_to_string("/proc/locks").ok()?;
        let inode = meta.ino().to_string();
        locks.lines().find_map(|line| {
            // "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; a waiting one has "->" after the
            // number. The device is that of the super block, which is not always that of stat, so
            // the inode alone has to do.
            let mut words = line.split_whitespace().skip(1);
            (words.next()? == "FLOCK").then_some(())?;
            let pid = words.nth(2)?.parse::<u32>().ok()?;
            (words.next()?.rsplit(':').next()? == inode).then_some(pid)
        })
    }

    pub(super) fn kernel_user(file: &File, path: &Path, mode: OpenMode) -> Option<String> {
        let meta = file.metadata().ok()?;
        if meta.file_type().is_block_device() {
            block_device_user(path, meta.rdev())
        } else {
            loop_user(&meta, mode)
        }
    }

    /// What uses the block device `rdev`, if anything does.
    fn block_device_user(path: &Path, rdev: u64) -> Option<String> {
        if let Some(at) = mounted_at(rdev) {
            return Some(format!("the kernel has it mounted on {}", at.display()));
        }
        // Closed at once: a kernel mount by FUSE (fuseblk) wants the device for itself a little
        // later.
        is_claimed(path).then(|| "the kernel or another program holds it exclusively".into())
    }

    /// Is the block device held exclusively (mounted, swap, device-mapper, md, a partition in use)?
    fn is_claimed(path: &Path) -> bool {
        let open = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
        matches!(open, Err(e) if e.raw_os_error() == Some(libc::EBUSY))
    }

    /// Where a block device is mounted, according to this process's mount table.
    fn mounted_at(rdev: u64) -> Option<PathBuf> {
        larder_proc::mounts().ok()?.into_iter().find_map(|mount| {
            let source = Path::new(&mount.source);
            // btrfs shows an anonymous device number, hence the look at the source.
            let same = mount.device == rdev
                || source.is_absolute()
                    && fs::metadata(source)
                        .is_ok_and(|m| m.file_type().is_block_device() && m.rdev() == rdev);
            same.then_some(mount.point)
        })
    }

    /// The loop device that has the file as its backing file, if that makes the file unusable.
    fn loop_user(meta: &fs::Metadata, mode: OpenMode) -> Option<String> {
        for entry in fs::read_dir("/sys/block").ok()?.flatten() {
            let name = entry.file_name();
            if !name.as_bytes().starts_with(b"loop") || !entry.path().join("loop").is_dir() {
                continue;
            }
            let device = Path::new("/dev").join(&name);
            if !backs(&entry.path(), &device, meta) {
                continue;
            }
            let parts =
                fs::read_dir(entry.path()).into_iter().flatten().flatten().map(|e| e.path());
            let mounted = std::iter::once(entry.path())
                .chain(parts.filter(|p| p.join("partition").exists()))
                .filter_map(|p| fs::read_to_string(p.join("dev")).ok())
                .filter_map(|d| {
                    let (major, minor) = d.trim().split_once(':')?;
                    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
                })
                .find_map(mounted_at);
            if let Some(at) = mounted {
                return Some(format!(
                    "the kernel has it mounted on {} through {}",
                    at.display(),
                    device.display()
                ));
            }
            if is_claimed(&device) {
                return Some(format!("the kernel uses it through {}", device.display()));
            }
            if mode == OpenMode::Write {
                return Some(format!(
                    "it is attached to {0} (losetup -d {0} detaches it)",
                    device.display()
                ));
            }
        }
        None
    }

    /// Is `meta`'s file the backing file of the loop device?
    fn backs(sys: &Path, device: &Path, meta: &fs::Metadata) -> bool {
        // The inode that the driver reports is certain, and known for deleted files too, but needs
        // permission.
        if let Ok(file) = File::open(device) {
            const LOOP_GET_STATUS64: rustix::ioctl::Opcode = 0x4c05;
            // `struct loop_info64` is 232 bytes; it begins with the device and the inode of the
            // backing file. SAFETY: LOOP_GET_STATUS64 fills 232 bytes, which is the size of the
            // buffer; any bytes are valid u64.
            let status = unsafe {
                let get = rustix::ioctl::Getter::<LOOP_GET_STATUS64, [u64; 29]>::new();
                rustix::ioctl::ioctl(&file, get)
            };
            if let Ok(status) = status {
                let (dev, ino) = (status[0], status[1]);
                // The kernel's packing of a device number: 12 bits of major between 8 and 12 (or
                // more) of minor.
                let (maj, min) = ((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xf_ff00));
                return ino == meta.ino()
                    && maj == u64::from(major(meta.dev()))
                    && min == u64::from(minor(meta.dev()));
            }
        }
        let Ok(mut backing) = fs::read(sys.join("loop/backing_file")) else { return false };
        while backing.last() == Some(&b'\n') {
            backing.pop();
        }
        let same = |p: &[u8]| {
            fs::metadata(Path::new(std::ffi::OsStr::from_bytes(p)))
                .is_ok_and(|m| m.dev() == meta.dev() && m.ino() == meta.ino())
        };
        same(&backing) || backing.strip_suffix(b" (deleted)").is_some_and(same)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::file::FileDevice;
    use std::process::Command;

    fn image() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("img");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        (dir, path)
    }

    #[test]
    fn one_writer_or_many_readers() {
        let (_dir, path) = image();
        let reader = FileDevice::open(&path, OpenMode::Read).unwrap();
        let second = FileDevice::open(&path, OpenMode::Read).unwrap();
        assert!(matches!(FileDevice::open(&path, OpenMode::Write), Err(VolumeError::Busy { .. })));
        drop((reader, second));
        let writer = FileDevice::open(&path, OpenMode::Write).unwrap();
        for mode in [OpenMode::Read, OpenMode::Write] {
            match FileDevice::open(&path, mode) {
                Err(VolumeError::Busy { by, .. }) => {
                    assert!(by.contains(&std::process::id().to_string()), "names the holder: {by}");
                }
                other => panic!("expected Busy, got {other:?}"),
            }
        }
        assert!(FileDevice::open_despite_users(&path).is_ok());
        drop(writer);
        FileDevice::open(&path, OpenMode::Write).unwrap();
    }

    struct Loop(String);
    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = Command::new("losetup").args(["-d", &self.0]).status();
        }
    }

    #[test]
    fn a_loop_device_is_a_user() {
        let (_dir, path) = image();
        let out = Command::new("losetup").args(["--find", "--show"]).arg(&path).output();
        let Some(out) = out.ok().filter(|o| o.status.success()) else {
            assert!(std::env::var_os("LARDER_REQUIRE_ORACLES").is_none(), "needs loop devices");
            eprintln!("skipped: needs loop devices");
            return;
        };
        let dev = Loop(String::from_utf8(out.stdout).unwrap().trim().to_owned());
        match FileDevice::open(&path, OpenMode::Write) {
            Err(VolumeError::Busy { by, .. }) => assert!(by.contains(&dev.0), "{by}"),
            other => panic!("expected Busy, got {other:?}"),
        }
        // A reader does not mind a loop device that is not in use.
        FileDevice::open(&path, OpenMode::Read).unwrap();
        // The loop device itself may be written, until it is claimed.
        let held = FileDevice::open(&dev.0, OpenMode::Write).unwrap();
        assert!(held.is_block_device());
        assert_eq!(crate::Device::size(&held), 1 << 20);
        drop(held);
        use std::os::unix::fs::OpenOptionsExt;
        let claim =
            std::fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&dev.0).unwrap();
        assert!(matches!(FileDevice::open(&dev.0, OpenMode::Read), Err(VolumeError::Busy { .. })));
        assert!(matches!(FileDevice::open(&path, OpenMode::Read), Err(VolumeError::Busy { .. })));
        drop(claim);
        std::fs::remove_file(&path).unwrap();
    }
}
