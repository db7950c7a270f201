//! Getting a `/dev/fuse` descriptor with a mount behind it, and getting rid of the mount.
//!
//! Root mounts with mount(2): type `fuse.larder`, or `fuseblk.larder` when the source is a block
//! device. Only with `fuseblk` do `sync`, `syncfs` and `umount` reach the daemon and wait for it.
//! Ordinary users go through the setuid program `fusermount3` (module `fusermount`). A daemon in a
//! [sandbox](crate::sandbox) has its [`MountHelper`](crate::MountHelper) do both. An error says
//! what is missing on the machine, and what to do about it.

pub(crate) mod backing;
mod fusermount;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Whether the kernel offers FUSE over io_uring; root may change it.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";

/// Which transport to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// io_uring if the kernel offers it, else `/dev/fuse`.
    #[default]
    Auto,
    /// Only `/dev/fuse`.
    DevFuse,
    /// io_uring, or fail.
    Uring,
}

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// First column of `/proc/mounts`; the source's name if empty.
    pub fsname: String,
    /// Second half of the type, as in `fuse.larder`.
    pub subtype: String,
    /// Users other than the one that mounts may enter; the kernel then checks permissions and ACLs.
    pub allow_other: bool,
    /// Nothing may be changed.
    pub read_only: bool,
    /// Ignore set-user-id bits. Always so for ordinary users.
    pub nosuid: bool,
    /// Ignore device nodes. Always so for ordinary users.
    pub nodev: bool,
    /// Refuse to run programs.
    pub noexec: bool,
    /// Update directories at once (`sync` of mount(8)).
    pub dirsync: bool,
    /// Write files at once (`sync` of mount(8)).
    pub synchronous: bool,
    /// The kernel may delay writes in its page cache: for root's mounts as many as for other file
    /// systems, otherwise few.
    pub writeback: bool,
    /// Which transport to use.
    pub transport: Transport,
    /// Does the kernel check permissions? `None`: it does, except where only root can enter.
    pub default_permissions: Option<bool>,
    /// As root, mount a block device as `fuseblk`.
    pub fuseblk: bool,
    /// As root, turn on FUSE over io_uring if it is off.
    pub enable_uring: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            fsname: String::new(),
            subtype: "larder".into(),
            allow_other: false,
            read_only: false,
            nosuid: false,
            nodev: false,
            noexec: false,
            dirsync: false,
            synchronous: false,
            writeback: false,
            transport: Transport::Auto,
            default_permissions: None,
            fuseblk: true,
            enable_uring: true,
        }
    }
}

/// Why there is no mount. Each message ends with what helps.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MountError {
    #[error(
        "/dev/fuse is missing: load the module (`modprobe fuse`), or run where FUSE is available"
    )]
    NoFuse,
    #[error(
        "no permission for /dev/fuse: ordinary users need it readable and writable (`chmod 0666 \
            /dev/fuse` as root)"
    )]
    FuseNotPermitted,
    #[error("opening /dev/fuse: {0}")]
    OpenFuse(#[source] io::Error),
    #[error("fusermount3 is missing: install the package `fuse3`, or mount as root")]
    NoFusermount,
    #[error(
        "allow_other is not permitted to ordinary users here: put the line `user_allow_other` \
            into /etc/fuse.conf, or mount as root"
    )]
    AllowOther,
    #[error("fusermount3 refused: {0}")]
    Fusermount(String),
    /// What the mount helper says.
    #[error("{0}")]
    MountHelper(String),
    #[error("{path}: {source}")]
    Mountpoint {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{0} is not a directory: a mount needs one")]
    NotDirectory(PathBuf),
    #[error("{0} is the mount of a daemon that is gone: clear it with `larder umount {0}` first")]
    DeadMount(PathBuf),
    #[error("mounting on {path}: {source}")]
    Mount {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A mount that was just made.
#[derive(Debug)]
pub(crate) struct NewMount {
    pub(crate) fuse: OwnedFd,
    pub(crate) mountpoint: PathBuf,
    pub(crate) kernel_permissions: bool,
    pub(crate) fuseblk: bool,
    pub(crate) enabled_uring: bool,
}

/// Ends a mount by its place, whichever process made it: for `larder umount`. A server asks its
/// [`MountHelper`](crate::MountHelper).
#[derive(Clone, Debug)]
pub struct Unmounter {
    mountpoint: PathBuf,
}

impl Unmounter {
    /// For the mount on `mountpoint`, whichever process made it.
    #[must_use]
    pub fn new(mountpoint: &Path) -> Self {
        Self { mountpoint: mountpoint.to_owned() }
    }

    /// Unmounts; `EBUSY` while files are in use.
    ///
    /// # Errors
    /// Errors of umount(2) or fusermount3.
    pub fn unmount(&self) -> io::Result<()> {
        self.run(UnmountFlags::NOFOLLOW, false)
    }

    /// Takes the mount out of the tree now; it ends when no process uses it any more. Also clears
    /// the mount of a daemon that is gone.
    ///
    /// # Errors
    /// Errors of umount(2) or fusermount3.
    pub fn detach(&self) -> io::Result<()> {
        self.run(UnmountFlags::NOFOLLOW | UnmountFlags::DETACH, true)
    }

    /// As [`Unmounter::detach`], for a killed daemon that cannot end because it waits for a lock
    /// that a request to itself holds. The kernel first answers all requests with an error.
    ///
    /// # Errors
    /// Errors of umount(2) or fusermount3.
    pub fn abort(&self) -> io::Result<()> {
        if let Some(minor) = backing::device(&self.mountpoint).map(rustix::fs::minor) {
            // The owner of the mount may do this as well as root, if there is such a file.
            let _ = std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1");
        }
        self.run(UnmountFlags::NOFOLLOW | UnmountFlags::DETACH | UnmountFlags::FORCE, true)
    }

    fn run(&self, flags: UnmountFlags, lazy: bool) -> io::Result<()> {
        match rustix::mount::unmount(&self.mountpoint, flags) {
            Err(rustix::io::Errno::PERM) => fusermount::unmount(&self.mountpoint, lazy),
            other => other.map_err(Into::into),
        }
    }
}

/// Is `path` the mount of a FUSE daemon that is gone? (Everything that is not cached fails with
/// ENOTCONN.)
#[must_use]
pub fn is_dead(path: &Path) -> bool {
    use rustix::io::Errno;
    // Attributes may still be cached, but this is always asked. In the moment after the daemon's
    // death there are other errors for it.
    matches!(rustix::fs::statfs(path), Err(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED))
}

/// Makes a mount of `source`, which only names it unless it is a block device.
pub(crate) fn make(
    source: &Path,
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<NewMount, MountError> {
    if is_dead(mountpoint) {
        return Err(MountError::DeadMount(mountpoint.to_owned()));
    }
    let failed = |source| MountError::Mountpoint { path: mountpoint.to_owned(), source };
    let mountpoint = std::fs::canonicalize(mountpoint).map_err(failed)?;
    let metadata = std::fs::metadata(&mountpoint).map_err(failed)?;
    if !metadata.is_dir() {
        return Err(MountError::NotDirectory(mountpoint));
    }
    let root = rustix::process::geteuid().is_root();
    // Without OPEN requests there is no moment at which the daemon could refuse to open a file. So
    // the kernel has to check if anybody but root can enter. Root alone needs no checks, which
    // saves a request for each.
    let kernel_permissions = options.default_permissions.unwrap_or(options.allow_other || !root);
    let enabled_uring =
        root && options.enable_uring && options.transport != Transport::DevFuse && enable_uring();
    let fsname = if options.fsname.is_empty() {
        source.as_os_str().to_owned()
    } else {
        OsString::from(&options.fsname)
    };
    let request = MountCall { fsname, kernel_permissions, options, mountpoint: &mountpoint };
    let block_device =
        std::fs::metadata(source).is_ok_and(|m| m.file_type().is_block_device()) && options.fuseblk;
    let fuse = open_fuse()?;
    let (fuse, fuseblk) =
        match request.as_root(&fuse, block_device.then_some(source), metadata.mode()) {
            Ok(()) => {
                if options.writeback {
                    backing::share_dirty_pages(&mountpoint);
                }
                (fuse, block_device)
            }
            Err(rustix::io::Errno::PERM) => (fusermount::mount(&request)?, false),
            Err(e) => return Err(MountError::Mount { path: mountpoint, source: e.into() }),
        };
    Ok(NewMount { fuse, mountpoint, kernel_permissions, fuseblk, enabled_uring })
}

/// Turns FUSE over io_uring on. True if it was off and is on now.
fn enable_uring() -> bool {
    std::fs::read_to_string(ENABLE_URING).is_ok_and(|v| v.trim() == "N")
        && std::fs::write(ENABLE_URING, "Y").is_ok()
}

fn open_fuse() -> Result<OwnedFd, MountError> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(
        |e| match e {
            rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO => {
                MountError::NoFuse
            }
            rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => MountError::FuseNotPermitted,
            e => MountError::OpenFuse(e.into()),
        },
    )
}

/// What is to be mounted, where and how.
struct MountCall<'a> {
    fsname: OsString,
    kernel_permissions: bool,
    options: &'a MountOptions,
    mountpoint: &'a Path,
}

impl MountCall<'_> {
    fn as_root(
        &self,
        fuse: &OwnedFd,
        device: Option<&Path>,
        root_mode: u32,
    ) -> Result<(), rustix::io::Errno> {
        let (kind, name) = match device {
            Some(path) => ("fuseblk", path.as_os_str()),
            None => ("fuse", self.fsname.as_os_str()),
        };
        let mut data = format!(
            "fd={},rootmode={:o},user_id={},group_id={}",
            fuse.as_raw_fd(),
            root_mode & libc::S_IFMT,
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw()
        );
        if self.options.allow_other {
            data.push_str(",allow_other");
        }
        if self.kernel_permissions {
            data.push_str(",default_permissions");
        }
        if device.is_some() {
            data.push_str(",blksize=4096");
        }
        let kind = format!("{kind}.{}", self.options.subtype);
        let data = CString::new(data).map_err(|_| rustix::io::Errno::INVAL)?;
        rustix::mount::mount(
            name,
            self.mountpoint,
            kind.as_str(),
            self.flags(),
            Some(data.as_c_str()),
        )
    }

    fn flags(&self) -> MountFlags {
        let o = self.options;
        let mut flags = MountFlags::NOATIME;
        for (set, flag) in [
            (o.read_only, MountFlags::RDONLY),
            (o.nosuid, MountFlags::NOSUID),
            (o.nodev, MountFlags::NODEV),
            (o.noexec, MountFlags::NOEXEC),
            (o.dirsync, MountFlags::DIRSYNC),
            (o.synchronous, MountFlags::SYNCHRONOUS),
        ] {
            if set {
                flags |= flag;
            }
        }
        flags
    }

    /// The same as options of fusermount3.
    fn fusermount_options(&self) -> OsString {
        let o = self.options;
        let mut text = OsString::from("fsname=");
        // A comma separates options, a backslash quotes.
        let mut quoted = Vec::new();
        for b in self.fsname.as_bytes() {
            if matches!(b, b',' | b'\\') {
                quoted.push(b'\\');
            }
            quoted.push(*b);
        }
        text.push(std::ffi::OsStr::from_bytes(&quoted));
        text.push(format!(
            ",subtype={},noatime,{}",
            o.subtype,
            if o.read_only { "ro" } else { "rw" }
        ));
        for (set, word) in [
            (o.allow_other, ",allow_other"),
            (self.kernel_permissions, ",default_permissions"),
            (o.noexec, ",noexec"),
            (o.dirsync, ",dirsync"),
            (o.synchronous, ",sync"),
        ] {
            if set {
                text.push(word);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helper_options_quote_names() {
        let options = MountOptions { allow_other: true, noexec: true, ..MountOptions::default() };
        let request = MountCall {
            fsname: "a,b\\c.img".into(),
            kernel_permissions: true,
            options: &options,
            mountpoint: Path::new("/nowhere"),
        };
        assert_eq!(
            request.fusermount_options(),
            "fsname=a\\,b\\\\c.img,subtype=larder,noatime,rw,allow_other,default_permissions,noexec"
        );
        assert!(request.flags().contains(MountFlags::NOATIME | MountFlags::NOEXEC));
        assert!(!request.flags().contains(MountFlags::RDONLY));
    }

    #[test]
    fn what_is_wrong_with_a_mount_point_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, b"").unwrap();
        assert!(matches!(
            make(Path::new("x"), &file, &MountOptions::default()),
            Err(MountError::NotDirectory(p)) if p.ends_with("file")
        ));
        assert!(matches!(
            make(Path::new("x"), &dir.path().join("absent"), &MountOptions::default()),
            Err(MountError::Mountpoint { .. })
        ));
        assert!(!is_dead(dir.path()));
    }
}
