//! The mount helper: a small privileged process that does what a daemon in its
//! [sandbox](crate::sandbox) cannot do.
//!
//! It mounts, unmounts, raises the read-ahead, and finds the inode behind a descriptor of a client.
//! This module hides which process does it. A [`MountHelper`] is either this very process
//! ([`MountHelper::in_process`], outside of any sandbox) or another one ([`MountHelper::spawn`]),
//! and answers the same.
//!
//! What crosses the socket has a fixed form (module `wire`): seven requests, with two numbers at
//! most. No path and no option ever crosses: the command line of the helper says what to mount and
//! where. So if an attacker takes the daemon over, the attacker gains nothing but the daemon's own
//! mount.
//!
//! A further mount brings its own helper ([`MountHelper::spawn_for_daemon`],
//! [`MountHelper::from_socket`]). `docs/FUSE.md` has the reasons for this division, and says what
//! happens when one of the two processes dies.

mod mounted;
mod server;
mod wire;

pub use mounted::{Mounted, mount};
pub use server::{Ended, HelperConfig, serve_daemon};

use crate::mount::{MountError, MountOptions, Unmounter, backing};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use wire::{HelperReply, HelperRequest, Op};

/// Does for the daemon what it cannot do itself. Clones are the same helper.
#[derive(Clone, Debug)]
pub struct MountHelper(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    mountpoint: PathBuf,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    /// This process. The number of the mount's device is looked up on first use.
    InProcess(OnceLock<u64>),
    /// Another process.
    Remote(Mutex<RemoteHelper>),
}

#[derive(Debug)]
struct RemoteHelper {
    /// `None` after [`MountHelper::dismiss`].
    socket: Option<OwnedFd>,
    /// The process, if this one has started it. It is waited for at the end.
    child: Option<Child>,
}

/// Does this error of a [`MountHelper`] say that its process has ended?
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

impl MountHelper {
    /// This process does everything itself.
    #[must_use]
    pub fn in_process(mountpoint: &Path) -> Self {
        Self(Arc::new(Inner {
            mountpoint: mountpoint.to_owned(),
            backend: Backend::InProcess(OnceLock::new()),
        }))
    }

    /// Starts a helper for a mount on `mountpoint`: `command`, which has to call [`serve_daemon`]
    /// with its standard input.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn spawn(command: &mut Command, mountpoint: &Path) -> io::Result<Self> {
        let (socket, child) = Self::spawn_with_socket(command)?;
        Ok(Self::over(socket, Some(child), mountpoint))
    }

    /// Starts a helper for another process, which is to get the socket. Also returns the process
    /// id.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn).
    pub fn spawn_for_daemon(command: &mut Command) -> io::Result<(OwnedFd, u32)> {
        let (socket, child) = Self::spawn_with_socket(command)?;
        Ok((socket, child.id()))
    }

    /// The helper at the other end of this socket, which was started elsewhere for a mount on
    /// `mountpoint`.
    #[must_use]
    pub fn from_socket(socket: OwnedFd, mountpoint: &Path) -> Self {
        Self::over(socket, None, mountpoint)
    }

    fn over(socket: OwnedFd, child: Option<Child>, mountpoint: &Path) -> Self {
        let remote = RemoteHelper { socket: Some(socket), child };
        Self(Arc::new(Inner {
            mountpoint: mountpoint.to_owned(),
            backend: Backend::Remote(Mutex::new(remote)),
        }))
    }

    fn spawn_with_socket(command: &mut Command) -> io::Result<(OwnedFd, Child)> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child = command
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Otherwise it would keep the file system that it was started on from being unmounted.
            .current_dir("/")
            .spawn()?;
        Ok((ours, child))
    }

    /// Where the mount is, or will be.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.0.mountpoint
    }

    /// Makes the mount that a started helper was started for. `options` are those on its command
    /// line, which the server needs, too.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn mount(&self, options: MountOptions) -> Result<Mounted, MountError> {
        let failed = |e: io::Error| MountError::MountHelper(e.to_string());
        let Backend::Remote(remote) = &self.0.backend else {
            return Err(failed(io::Error::other("there is no other process that could mount")));
        };
        let (reply, fuse) = remote.lock().ask(Op::Mount, 0, 0).map_err(failed)?;
        if reply.status != 0 {
            return Err(MountError::MountHelper(reply.text().into_owned()));
        }
        let fuse = fuse.ok_or_else(|| failed(io::Error::other("no descriptor came")))?;
        Ok(Mounted {
            fuse,
            mountpoint: self.0.mountpoint.clone(),
            options,
            kernel_permissions: reply.flags & wire::KERNEL_PERMISSIONS != 0,
            fuseblk: reply.flags & wire::FUSEBLK != 0,
            enabled_uring: reply.flags & wire::ENABLED_URING != 0,
            helper: self.clone(),
        })
    }

    /// Unmounts; `EBUSY` while files are in use.
    ///
    /// # Errors
    /// Errors of umount(2) or fusermount3, or that the helper [is gone](is_gone).
    pub fn unmount(&self) -> io::Result<()> {
        match &self.0.backend {
            Backend::InProcess(_) => Unmounter::new(&self.0.mountpoint).unmount(),
            Backend::Remote(remote) => remote.lock().ask_number(Op::Unmount, 0, 0).map(drop),
        }
    }

    /// Takes the mount out of the tree now; it ends when no process uses it any more.
    ///
    /// # Errors
    /// As [`unmount`](Self::unmount).
    pub fn detach(&self) -> io::Result<()> {
        match &self.0.backend {
            Backend::InProcess(_) => Unmounter::new(&self.0.mountpoint).detach(),
            Backend::Remote(remote) => remote.lock().ask_number(Op::Detach, 0, 0).map(drop),
        }
    }

    /// The inode number (as `stat` shows it) behind descriptor `fd` of the process or thread `pid`,
    /// if that is open on this mount.
    ///
    /// For requests that name a descriptor of their caller; `pid` is the one in the request's head.
    /// The kernel is asked only for what it has cached, so no request comes back to the server
    /// meanwhile. This takes too long for a queue's thread, so call it on a worker. The number is
    /// one that the server has given out, so `Nodes::id` knows it.
    ///
    /// # Errors
    /// `EBADF` if there is no such descriptor, `EXDEV` if it leads elsewhere, `EACCES` or `EPERM`
    /// if the helper may not look into that process (it runs as the user that mounted), `EPIPE` if
    /// the helper is gone.
    pub fn resolve_fd(&self, pid: u32, fd: i32) -> io::Result<u64> {
        match &self.0.backend {
            Backend::InProcess(device) => {
                let device = match device.get() {
                    Some(device) => *device,
                    None => {
                        let found = backing::device(&self.0.mountpoint)
                            .ok_or(io::Error::from_raw_os_error(libc::ENODEV))?;
                        *device.get_or_init(|| found)
                    }
                };
                inode_of(pid, fd, device)
            }
            Backend::Remote(remote) => remote.lock().ask_number(Op::Resolve, pid, fd),
        }
    }

    /// Raises the read-ahead of the mount if that is permitted. To be called when requests are
    /// served.
    pub(crate) fn raise_read_ahead(&self) {
        match &self.0.backend {
            Backend::InProcess(_) => backing::raise_read_ahead(&self.0.mountpoint),
            Backend::Remote(remote) => {
                if let Err(error) = remote.lock().ask_number(Op::RaiseReadAhead, 0, 0) {
                    tracing::debug!(%error, "read-ahead stays as it is");
                }
            }
        }
    }

    /// The mount has ended, or the daemon, too. A helper process does its clean-up
    /// ([`serve_daemon`]) and ends, and this waits for its end. Without a helper process, this
    /// process calls `here`.
    pub fn dismiss(&self, end: Ended, here: impl FnOnce()) {
        let Backend::Remote(remote) = &self.0.backend else { return here() };
        let mut remote = remote.lock();
        let op = match end {
            Ended::Mount => Op::Leave,
            Ended::Daemon => Op::Dismiss,
        };
        if let Err(error) = remote.ask_number(op, 0, 0) {
            tracing::debug!(%error, "the helper was gone before");
        }
        remote.end();
    }
}

impl RemoteHelper {
    fn ask(&mut self, op: Op, pid: u32, fd: i32) -> io::Result<(HelperReply, Option<OwnedFd>)> {
        let gone = || {
            io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the process that mounts and unmounts is gone",
            )
        };
        let socket = self.socket.as_ref().ok_or_else(gone)?;
        let outcome = wire::send_request(socket, HelperRequest { op, pid, fd })
            .and_then(|()| wire::receive_reply(socket));
        match outcome {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(gone()),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) =>
            {
                Err(gone())
            }
            Err(e) => Err(e),
        }
    }

    fn ask_number(&mut self, op: Op, pid: u32, fd: i32) -> io::Result<u64> {
        let (reply, _) = self.ask(op, pid, fd)?;
        match reply.status {
            0 => Ok(reply.value),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Hangs up, which ends the helper, and waits for that.
    fn end(&mut self) {
        if let (Some(socket), None) = (&self.socket, &self.child) {
            // The helper keeps its end open until it ends.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            let _ = wire::receive_reply(socket);
        }
        self.socket = None;
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }
}

impl Drop for RemoteHelper {
    fn drop(&mut self) {
        self.end();
    }
}

/// The inode number behind a descriptor of a process, if that is on `device`.
fn inode_of(pid: u32, fd: i32, device: u64) -> io::Result<u64> {
    let errno = io::Error::from_raw_os_error;
    if pid == 0 || fd < 0 {
        return Err(errno(libc::EBADF));
    }
    // A cached number is good enough, because it never changes. The server must not be asked: it
    // waits for this process.
    let found =
        statx(CWD, format!("/proc/{pid}/fd/{fd}"), AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
    let found = found.map_err(|e| match e {
        rustix::io::Errno::NOENT => errno(libc::EBADF),
        e => e.into(),
    })?;
    if makedev(found.stx_dev_major, found.stx_dev_minor) == device {
        Ok(found.stx_ino)
    } else {
        Err(errno(libc::EXDEV))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn descriptors_of_one_device_are_resolved_and_of_no_other() {
        let file = tempfile::tempfile().unwrap();
        let meta = file.metadata().unwrap();
        let me = std::process::id();
        assert_eq!(inode_of(me, file.as_raw_fd(), meta.dev()).unwrap(), meta.ino());
        let why = |e: io::Result<u64>| e.unwrap_err().raw_os_error();
        assert_eq!(why(inode_of(me, file.as_raw_fd(), meta.dev() + 1)), Some(libc::EXDEV));
        assert_eq!(why(inode_of(me, 999_999, meta.dev())), Some(libc::EBADF));
        assert_eq!(why(inode_of(me, -1, meta.dev())), Some(libc::EBADF));
        assert_eq!(why(inode_of(0, 1, meta.dev())), Some(libc::EBADF));
        assert_eq!(why(inode_of(u32::MAX, 1, meta.dev())), Some(libc::EBADF));
    }

    #[test]
    fn a_helper_that_is_gone_is_noticed() {
        // `true` ends at once; it is no helper.
        let helper = MountHelper::spawn(&mut Command::new("true"), Path::new("/nowhere")).unwrap();
        assert!(is_gone(&helper.unmount().unwrap_err()));
        assert!(is_gone(&helper.resolve_fd(1, 1).unwrap_err()));
        assert!(matches!(helper.mount(MountOptions::default()), Err(MountError::MountHelper(_))));
        helper.dismiss(Ended::Daemon, || panic!("that is another process's to do"));
        assert!(is_gone(&helper.detach().unwrap_err()));
    }
}
