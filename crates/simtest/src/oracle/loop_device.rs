//! Loop devices that detach themselves.
//!
//! The decision hidden here: the device is configured with autoclear in the same call that attaches
//! it, and this process holds it open. So there is no moment at which a killed test could leave a
//! device behind; the kernel detaches it when the last user — this struct or a mount — is gone.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const FLAG_READ_ONLY: u32 = 1;
const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;

/// `struct loop_info64` of the kernel's interface.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of the kernel's interface.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

/// How to attach a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoopOptions {
    /// The device refuses writes.
    pub read_only: bool,
    /// The backing file is read and written past the page cache.
    pub direct_io: bool,
}

/// A file attached as a block device, detached when this and every mount of it are gone.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    held: Option<File>,
}

impl LoopDevice {
    /// Attaches `image` read-write.
    ///
    /// # Errors
    /// No permission, no such file, or no loop device to be had.
    pub fn attach(image: &Path) -> Result<Self> {
        Self::attach_with(image, LoopOptions::default())
    }

    /// Attaches `image` as `options` say.
    ///
    /// # Errors
    /// No permission, no such file, or no loop device to be had.
    pub fn attach_with(image: &Path, options: LoopOptions) -> Result<Self> {
        let backing = File::options()
            .read(true)
            .write(!options.read_only)
            .open(image)
            .with_context(|| format!("cannot open {}", image.display()))?;
        let control = File::options()
            .read(true)
            .write(true)
            .open("/dev/loop-control")
            .context("cannot open /dev/loop-control")?;
        let mut flags = FLAG_AUTOCLEAR;
        if options.read_only {
            flags |= FLAG_READ_ONLY;
        }
        if options.direct_io {
            flags |= FLAG_DIRECT_IO;
        }
        let mut file_name = [0; 64];
        let shown = image.as_os_str().as_encoded_bytes();
        let shown = &shown[..shown.len().min(63)];
        file_name[..shown.len()].copy_from_slice(shown);
        let config = LoopConfig {
            fd: backing.as_raw_fd().cast_unsigned(),
            block_size: 0,
            info: LoopInfo {
                device: 0,
                inode: 0,
                rdevice: 0,
                offset: 0,
                size_limit: 0,
                number: 0,
                encrypt_type: 0,
                encrypt_key_size: 0,
                flags,
                file_name,
                crypt_name: [0; 64],
                encrypt_key: [0; 32],
                init: [0; 2],
            },
            reserved: [0; 8],
        };
        // Another process can take the device between the two calls; then there is another one.
        for _ in 0..1000 {
            // SAFETY: the request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(std::io::Error::last_os_error()).context("no free loop device");
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let held = open_node(&path, number.cast_unsigned(), options.read_only)?;
            // SAFETY: the request reads one `struct loop_config`, whose layout is asserted above.
            let done = unsafe { libc::ioctl(held.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
            if done == 0 {
                return Ok(Self { path, held: Some(held) });
            }
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error)
                    .with_context(|| format!("cannot attach {} to {path:?}", image.display()));
            }
        }
        bail!("every free loop device was taken by somebody else first")
    }

    /// The block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its name as kernel messages use it: `loop3`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
    }

    /// The file behind it, as the kernel calls it.
    fn backing(&self) -> Option<String> {
        std::fs::read_to_string(format!("/sys/block/{}/loop/backing_file", self.name())).ok()
    }

    /// Is the device held exclusively, by a mounted file system?
    ///
    /// # Errors
    /// The device cannot be opened for another reason.
    pub fn is_claimed(&self) -> std::io::Result<bool> {
        match File::options().read(true).custom_flags(libc::O_EXCL).open(&self.path) {
            Ok(_) => Ok(false),
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(true),
            Err(e) => Err(e),
        }
    }
}

impl Drop for LoopDevice {
    /// The last one to close the device detaches it. A process that is being started has copies of
    /// all descriptors until it executes its program; for so long nothing is closed.
    fn drop(&mut self) {
        let backing = self.backing();
        {
            let _none_starts = STARTING.write().unwrap_or_else(PoisonError::into_inner);
            self.held = None;
        }
        // A program that looks at all devices of the machine may have it open just now. The next
        // user of the file must not find it in use.
        let patience = Instant::now() + PATIENCE;
        while backing.is_some()
            && self.backing() == backing
            && Instant::now() < patience
            && !std::thread::panicking()
        {
            std::thread::yield_now();
        }
    }
}

/// How long a device that has been given up may stay attached.
const PATIENCE: Duration = Duration::from_secs(10);

/// Held shared while a process is started.
static STARTING: RwLock<()> = RwLock::new(());

/// Runs a program to its end, as `Command::output` does, so that loop devices which are given up
/// meanwhile are free at once.
///
/// # Errors
/// It cannot be started, or its output not be read.
pub(super) fn output(command: &mut Command) -> std::io::Result<Output> {
    let child = {
        let _starting = STARTING.read().unwrap_or_else(PoisonError::into_inner);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?
    };
    child.wait_with_output()
}

/// Opens a loop device's node, making it where no udev or devtmpfs does.
fn open_node(path: &Path, number: u32, read_only: bool) -> Result<File> {
    const LOOP_MAJOR: u32 = 7;
    if !path.exists() {
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            path,
            rustix::fs::FileType::BlockDevice,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            rustix::fs::makedev(LOOP_MAJOR, number),
        );
        if let Err(e) = made
            && e != rustix::io::Errno::EXIST
        {
            return Err(e).with_context(|| format!("cannot make {}", path.display()));
        }
    }
    File::options()
        .read(true)
        .write(!read_only)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}
