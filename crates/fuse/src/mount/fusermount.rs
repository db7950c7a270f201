//! Mounting as an ordinary user, through the setuid program `fusermount3`.
//!
//! That program opens `/dev/fuse`, mounts, and passes the descriptor over a socket whose number it
//! finds in `_FUSE_COMMFD`.

use super::{MountCall, MountError};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = "fusermount3";

/// Mounts and returns the descriptor.
pub(super) fn mount(request: &MountCall<'_>) -> Result<OwnedFd, MountError> {
    let broken = |e: rustix::io::Errno| MountError::Fusermount(io::Error::from(e).to_string());
    // Not close-on-exec: the program inherits its end.
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None)
            .map_err(broken)?;
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC).map_err(broken)?;
    let child = Command::new(PROGRAM)
        .arg("-o")
        .arg(request.fusermount_options())
        .arg("--")
        .arg(request.mountpoint)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(missing)?;
    drop(theirs);
    let fuse = receive(&ours);
    let output = child.wait_with_output().map_err(|e| MountError::Fusermount(e.to_string()))?;
    match fuse {
        Ok(Some(fd)) if output.status.success() => {
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(broken)?;
            Ok(fd)
        }
        _ => Err(refusal(&String::from_utf8_lossy(&output.stderr))),
    }
}

/// Unmounts what this user mounted.
pub(super) fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let mut command = Command::new(PROGRAM);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command
        .arg("--")
        .arg(mountpoint)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| io::Error::new(e.kind(), missing(e).to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let kind = if said.contains("busy") {
        io::ErrorKind::ResourceBusy
    } else {
        io::ErrorKind::PermissionDenied
    };
    Err(io::Error::new(kind, said))
}

fn missing(e: io::Error) -> MountError {
    if e.kind() == io::ErrorKind::NotFound {
        MountError::NoFusermount
    } else {
        MountError::Fusermount(e.to_string())
    }
}

fn refusal(said: &str) -> MountError {
    let said = said.trim();
    if said.contains("user_allow_other") {
        MountError::AllowOther
    } else if said.contains("/dev/fuse") && said.contains("ermission denied") {
        MountError::FuseNotPermitted
    } else {
        MountError::Fusermount(if said.is_empty() {
            "it gave no reason".into()
        } else {
            said.into()
        })
    }
}

/// The descriptor that the program passes; `None` if it hung up.
fn receive(socket: &OwnedFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::empty())
        {
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e),
            Ok(_) => break,
        }
    }
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_understood() {
        let said = "fusermount3: option allow_other only allowed if 'user_allow_other' is set in \
            /etc/fuse.conf\n";
        assert!(matches!(refusal(said), MountError::AllowOther));
        assert!(matches!(
            refusal("fusermount3: failed to open /dev/fuse: Permission denied"),
            MountError::FuseNotPermitted
        ));
        assert!(matches!(
            refusal("user has no write access to mountpoint"),
            MountError::Fusermount(_)
        ));
    }
}
