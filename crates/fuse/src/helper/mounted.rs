//! A mount that waits to be served, together with the helper that can end it.
//!
//! It is made in one of two ways: this process makes the mount ([`mount`]) and is its own helper,
//! or a helper process makes it on request ([`MountHelper::mount`]). A server sees no difference.

use super::MountHelper;
use crate::mount::{MountError, MountOptions, NewMount, make};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A mount that waits to be served.
#[derive(Debug)]
pub struct Mounted {
    pub(crate) fuse: OwnedFd,
    pub(crate) mountpoint: PathBuf,
    pub(crate) options: MountOptions,
    /// The kernel checks permissions.
    pub(crate) kernel_permissions: bool,
    /// Mounted as `fuseblk`: `umount` waits for DESTROY.
    pub fuseblk: bool,
    /// FUSE over io_uring was off and has been turned on, for the whole machine, until a user turns
    /// it off.
    pub enabled_uring: bool,
    pub(crate) helper: MountHelper,
}

impl Mounted {
    pub(crate) fn fuse_fd(&self) -> BorrowedFd<'_> {
        self.fuse.as_fd()
    }
    /// Where it is mounted.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }
    /// Can end the mount from another thread, and knows its clients' descriptors.
    #[must_use]
    pub fn helper(&self) -> &MountHelper {
        &self.helper
    }
}

/// Mounts `source` (a device or an image; it only names the mount unless it is a block device) on
/// `mountpoint`.
///
/// The kernel then waits for [`serve`](crate::serve): until that runs, a process that enters the
/// mount point hangs.
///
/// # Errors
/// See [`MountError`].
pub fn mount(
    source: &Path,
    mountpoint: &Path,
    options: MountOptions,
) -> Result<Mounted, MountError> {
    let NewMount { fuse, mountpoint, kernel_permissions, fuseblk, enabled_uring } =
        make(source, mountpoint, &options)?;
    let helper = MountHelper::in_process(&mountpoint);
    Ok(Mounted { fuse, mountpoint, options, kernel_permissions, fuseblk, enabled_uring, helper })
}
