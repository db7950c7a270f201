//! A mount through which nothing may be changed, beside others through which changes are allowed.
//!
//! The kernel refuses system calls that would change something on a mount with `ro`. But it does
//! not know what an ioctl changes, and root can tell it to forget `ro` (`mount -i -o remount,rw`).
//! So such requests are refused here, too.

use super::Server;
use super::ioctl::{FSSETXATTR, SETFLAGS};
use crate::control::{FITRIM, IOC_RESET_DEVICE_ERRORS, SET_LABEL};
use crate::errno::Errno;
use crate::proto::Opcode;
use crate::sharing::{IOC_CLONE, IOC_DEDUPE};
use crate::subvolumes::{self as sub, IOC_SNAPSHOT, SNAP_CREATE_V2};

/// Requests that change something whatever is in them.
fn changes(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Setattr
            | Opcode::Symlink
            | Opcode::Mknod
            | Opcode::Mkdir
            | Opcode::Tmpfile
            | Opcode::Link
            | Opcode::Unlink
            | Opcode::Rmdir
            | Opcode::Rename
            | Opcode::Rename2
            | Opcode::Write
            | Opcode::CopyFileRange
            | Opcode::CopyFileRange64
            | Opcode::Fallocate
            | Opcode::Setxattr
            | Opcode::Removexattr
    )
}

/// Ioctls that change something.
fn changes_by(command: u32) -> bool {
    SETFLAGS.contains(&command)
        || matches!(
            command,
            FSSETXATTR
                | SET_LABEL
                | FITRIM
                | IOC_RESET_DEVICE_ERRORS
                | IOC_CLONE
                | IOC_DEDUPE
                | IOC_SNAPSHOT
                | SNAP_CREATE_V2
                | sub::CREATE
                | sub::CREATE_V2
                | sub::DESTROY
                | sub::DESTROY_V2
                | sub::SETFLAGS
                | sub::DEFAULT
                | sub::SET_RECEIVED
        )
}

impl Server {
    /// # Errors
    /// `EROFS` if the mount is read-only and this request changes something.
    pub(super) fn may_change_anything(&self, opcode: Opcode) -> Result<(), Errno> {
        if self.me.is_read_only() && changes(opcode) { Err(Errno(libc::EROFS)) } else { Ok(()) }
    }

    /// # Errors
    /// The same for an ioctl.
    pub(super) fn may_change_by(&self, command: u32) -> Result<(), Errno> {
        if self.me.is_read_only() && changes_by(command) { Err(Errno(libc::EROFS)) } else { Ok(()) }
    }
}
