//! Mounts of the kernel's btrfs that leave nothing behind.
//!
//! Hidden here is where such a mount lives. A mount in the machine's own namespace survives a test
//! that is killed, is copied into every namespace that is made meanwhile (and then keeps the image
//! busy), and is visible to everybody. So the thread that mounts first moves into a *private mount
//! namespace*, and the mount exists only there. When the last process or thread of that namespace
//! is gone, even if it was killed, the kernel unmounts. The loop device, which has autoclear set,
//! detaches itself.
//!
//! The price: only the thread that mounted, and threads and processes that it starts
//! **afterwards**, see the mount. A thread pool that exists already does not. Therefore
//! [`KernelMount`] is not `Send`: code that walks a mount runs on the thread that made it, and what
//! is started from there.
//!
//! Kernel messages about the mount's device are collected, because that is where btrfs says what it
//! found: a mount that succeeds says little.

use super::loop_device::{LoopDevice, LoopOptions};
use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;
use std::cell::Cell;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::marker::PhantomData;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

thread_local! {
    static PRIVATE: Cell<bool> = const { Cell::new(false) };
}

/// Moves the calling thread into a mount namespace of its own, once. [`KernelMount`] does it by
/// itself; tests that mount otherwise (FUSE) call it first, so that their mounts, too, go with the
/// process.
///
/// # Errors
/// Without the right to do so (CAP_SYS_ADMIN).
pub fn enter_private_namespace() -> std::io::Result<()> {
    if PRIVATE.get() {
        return Ok(());
    }
    // SAFETY: NEWNS (and FS, which it implies) gives this thread its own working directory and
    // mount table; memory and file descriptors stay shared, so nothing that Rust relies on changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    PRIVATE.set(true);
    Ok(())
}

/// May this process mount? Tried on a thread that ends at once.
pub(super) fn may_mount() -> bool {
    std::thread::spawn(|| enter_private_namespace().is_ok()).join().unwrap_or(false)
}

/// The kernel refused a mount.
#[derive(Debug, thiserror::Error)]
#[error("the kernel refuses the mount: {errno}{}", lines_of(messages))]
pub struct KernelMountError {
    /// What `mount(2)` returned.
    #[source]
    pub errno: std::io::Error,
    /// What the kernel logged about it.
    pub messages: Vec<String>,
}

fn lines_of(messages: &[String]) -> String {
    messages.iter().map(|m| format!("\n  {m}")).collect()
}

/// A btrfs that the kernel has mounted, unmounted when dropped.
#[derive(Debug)]
pub struct KernelMount {
    /// Mount point; removed with `remove_dir`, which cannot take a mounted tree with it.
    dir: Option<PathBuf>,
    device: LoopDevice,
    /// The other devices of the file system.
    others: Vec<LoopDevice>,
    log: Option<File>,
    /// The mount exists in the namespace of the thread that made it.
    _not_send: PhantomData<*const ()>,
}

impl KernelMount {
    /// Mounts the image with comma-separated `options` (`""` for none; with `ro` the loop device is
    /// read-write all the same, because the kernel replays a log even then).
    ///
    /// # Errors
    /// [`KernelMountError`] with the kernel's messages where it refuses; others where no loop
    /// device is to be had.
    pub fn image(image: &Path, options: &str) -> Result<Self> {
        Self::device(LoopDevice::attach(image)?, options)
    }

    /// Mounts the image on a read-only loop device, so that nothing can be written whatever
    /// happens.
    ///
    /// # Errors
    /// As [`KernelMount::image`]; also for an image whose log would have to be replayed.
    pub fn image_read_only(image: &Path, options: &str) -> Result<Self> {
        let device =
            LoopDevice::attach_with(image, LoopOptions { read_only: true, direct_io: false })?;
        Self::device(device, &format!("ro,{options}"))
    }

    /// Mounts a loop device.
    ///
    /// # Errors
    /// As [`KernelMount::image`].
    pub fn device(device: LoopDevice, options: &str) -> Result<Self> {
        Self::devices(device, Vec::new(), options)
    }

    /// Mounts a file system that spans several loop devices. Complaints are those about the first.
    ///
    /// # Errors
    /// As [`KernelMount::image`].
    pub fn devices(device: LoopDevice, others: Vec<LoopDevice>, options: &str) -> Result<Self> {
        enter_private_namespace().context("cannot make a private mount namespace")?;
        let dir = tempfile::Builder::new()
            .prefix("larder-mnt-")
            .tempdir()
            .context("no mount point")?
            .keep();
        let mut log = open_log();
        let named = others.iter().map(|d| format!(",device={}", d.path().display()));
        let (flags, data) = split_options(&format!("{options}{}", named.collect::<String>()));
        let data = CString::new(data)?;
        let mounted = {
            // To forget is to take away what another mount has just made known.
            let _alone = lock_for_processes("larder-btrfs-devices.lock")?;
            forget(None);
            rustix::mount::mount(device.path(), &dir, c"btrfs", flags, data.as_c_str())
        };
        match mounted {
            Ok(()) => Ok(Self { dir: Some(dir), device, others, log, _not_send: PhantomData }),
            Err(errno) => {
                let _ = std::fs::remove_dir(&dir);
                let messages =
                    log.as_mut().map(|l| read_log(l, device.name(), 7)).unwrap_or_default();
                Err(KernelMountError { errno: errno.into(), messages }.into())
            }
        }
    }

    /// Root directory of the mount.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.as_deref().unwrap_or(Path::new(""))
    }

    /// A path below the mount's root.
    #[must_use]
    pub fn join(&self, below: impl AsRef<Path>) -> PathBuf {
        self.path().join(below)
    }

    /// The loop device under the mount.
    #[must_use]
    pub fn loop_device(&self) -> &LoopDevice {
        &self.device
    }

    /// What the kernel has logged about this device since the mount or since the last call:
    /// warnings and worse. Empty where the kernel log cannot be read.
    pub fn complaints(&mut self) -> Vec<String> {
        const WARNING: u8 = 4;
        let name = self.device.name().to_owned();
        self.log.as_mut().map(|l| read_log(l, &name, WARNING)).unwrap_or_default()
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// The kernel's sync fails.
    pub fn sync(&self) -> std::io::Result<()> {
        rustix::fs::syncfs(File::open(self.path())?)?;
        Ok(())
    }

    /// Unmounts and returns once the file system has let go of the device, with what the kernel
    /// complained about during the life of the mount.
    ///
    /// # Errors
    /// Something still uses the mount (it is detached all the same), or the device is still
    /// claimed.
    pub fn unmount(mut self) -> Result<Vec<String>> {
        let dir = self.dir.take().expect("mounted until now");
        let unmounted = unmount_when_idle(&dir);
        if unmounted.is_err() {
            let _ = rustix::mount::unmount(&dir, UnmountFlags::DETACH);
        }
        let _ = std::fs::remove_dir(&dir);
        unmounted.context("the kernel's mount cannot be unmounted")?;
        anyhow::ensure!(
            !self.device.is_claimed()?,
            "{} is still mounted elsewhere",
            self.device.name()
        );
        let complaints = self.complaints();
        self.forget_devices();
        Ok(complaints)
    }

    fn forget_devices(&self) {
        for device in std::iter::once(&self.device).chain(&self.others) {
            forget(Some(device.path()));
        }
    }

    /// Unmounts and demands that the kernel had nothing to complain about.
    ///
    /// # Errors
    /// As [`KernelMount::unmount`].
    ///
    /// # Panics
    /// The kernel logged a warning or an error about the device.
    pub fn unmount_clean(self) -> Result<()> {
        let complaints = self.unmount()?;
        assert!(complaints.is_empty(), "the kernel complained:\n  {}", complaints.join("\n  "));
        Ok(())
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        if let Some(dir) = &self.dir {
            // Lazily: whatever a failed test still holds open must not keep the mount alive by
            // name.
            let _ = rustix::mount::unmount(dir, UnmountFlags::DETACH);
            let _ = std::fs::remove_dir(dir);
            self.forget_devices();
        }
    }
}

/// Unmounts as soon as nobody uses the mount. A child that another thread is just starting holds
/// copies of all our open files until it has called `exec`, so "busy" may be over in a moment; it
/// is believed after ten seconds.
fn unmount_when_idle(dir: &Path) -> rustix::io::Result<()> {
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        match rustix::mount::unmount(dir, UnmountFlags::empty()) {
            Err(rustix::io::Errno::BUSY) if std::time::Instant::now() < patience => {
                std::thread::yield_now()
            }
            done => return done,
        }
    }
}

/// Splits mount options into the generic flags and what the file system gets.
fn split_options(options: &str) -> (MountFlags, String) {
    let mut flags = MountFlags::empty();
    let mut data = Vec::new();
    for option in options.split(',').filter(|o| !o.is_empty()) {
        match option {
            "ro" => flags |= MountFlags::RDONLY,
            "rw" => flags &= !MountFlags::RDONLY,
            "noatime" => flags |= MountFlags::NOATIME,
            "nodev" => flags |= MountFlags::NODEV,
            "nosuid" => flags |= MountFlags::NOSUID,
            "noexec" => flags |= MountFlags::NOEXEC,
            "sync" => flags |= MountFlags::SYNCHRONOUS,
            other => data.push(other),
        }
    }
    (flags, data.join(","))
}

/// Tells btrfs to forget a device, or all devices that are not mounted. It remembers them by the id
/// of their file system after a mount: the next image with the same id may come on another loop
/// device. A device that was missing in a mount has no name, and is forgotten with all others only.
fn forget(device: Option<&Path>) {
    const BTRFS_IOC_FORGET_DEV: libc::c_ulong = 0x5000_9405;
    #[repr(C)]
    struct Arguments {
        fd: i64,
        name: [u8; 4088],
    }
    let Ok(control) = File::options().read(true).write(true).open("/dev/btrfs-control") else {
        return;
    };
    let mut arguments = Arguments { fd: 0, name: [0; 4088] };
    let name = device.map_or(&[][..], |device| device.as_os_str().as_encoded_bytes());
    arguments.name[..name.len()].copy_from_slice(name);
    // SAFETY: the request reads one `struct btrfs_ioctl_vol_args` (4096 bytes), which is what it
    // gets. Failure is harmless: a device that is mounted elsewhere stays known.
    unsafe { libc::ioctl(control.as_raw_fd(), BTRFS_IOC_FORGET_DEV, &raw const arguments) };
}

/// Waits until no other thread or process holds the lock of that name.
///
/// # Errors
/// The file of the lock cannot be made.
pub(crate) fn lock_for_processes(name: &str) -> Result<File> {
    let path = std::env::temp_dir().join(name);
    let file = File::options().create(true).append(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// The kernel log from here on; `None` without permission.
fn open_log() -> Option<File> {
    let mut log =
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").ok()?;
    log.seek(SeekFrom::End(0)).ok()?;
    Some(log)
}

/// A warning about the mount option, not about the image.
const EXPECTED: &str = "space cache v1 is being deprecated";

/// Records about `device` that are at most `level` (4: warnings and worse, 7: everything).
fn read_log(log: &mut File, device: &str, level: u8) -> Vec<String> {
    let mut found = Vec::new();
    let mut record = [0u8; 8192];
    loop {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(n) => {
                let text = String::from_utf8_lossy(&record[..n]);
                let Some((head, message)) = text.split_once(';') else { continue };
                let priority: u32 =
                    head.split(',').next().and_then(|p| p.parse().ok()).unwrap_or(0);
                let message = message.lines().next().unwrap_or_default();
                let ours = message
                    .split_once("(device ")
                    .and_then(|(_, rest)| rest.strip_prefix(device))
                    .is_some_and(|rest| rest.starts_with([')', ' ', ':']));
                if ours && priority & 7 <= u32::from(level) && !message.contains(EXPECTED) {
                    found.push(message.to_owned());
                }
            }
            // Records were overwritten before they were read: go on with the oldest that is left.
            Err(e) if e.raw_os_error() == Some(libc::EPIPE) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    found
}
