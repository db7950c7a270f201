//! The porter: a small process beside a daemon in its [sandbox](crate::sandbox), which does the few
//! things that the daemon has given up.
//!
//! Mounting and unmounting need root or the setuid `fusermount3`; raising the read-ahead of the
//! mount writes to sysfs; the ioctl that makes a snapshot names its source by a descriptor of the
//! *caller*, which `/proc/PID/fd` shows to nobody in a sandbox. This module hides who does it: a
//! [`Porter`] is either this very process ([`Porter::here`], outside of any sandbox: tests, other
//! programs) or another one ([`Porter::start`]), and answers the same.
//!
//! The daemon starts the porter before anything else, as the same program with a socket for its
//! standard input. The daemon is who serves, whose process id is known and who gets the signals;
//! the porter ignores those that end a daemon, for it is needed last.
//!
//! What crosses the socket is of fixed form (module `wire`): seven requests, with two numbers at
//! most. No path and no option ever does — the porter was told on its command line what to mount
//! where, before the daemon had read any of the image — so that a daemon that was taken over can
//! mount what was to be mounted, once; unmount it; raise its read-ahead; say that it is done; and
//! learn the inode numbers of open files *of this mount*. A client of the mount is known by just
//! that: a process that has one of its files open. Of all others it learns that they are none.
//!
//! A further mount of what a daemon serves already has a porter of its own. The program that wants
//! the mount starts it, in its own mount namespace and with its own rights, and hands the daemon
//! the other end of its socket ([`Porter::lend`], [`Porter::at`]). It is told beforehand what to do
//! like any other, so that the daemon gains nothing by it but that mount.
//!
//! If the daemon dies, the porter sees the socket's end and goes. It leaves the dead mount where it
//! is: taking it away would let programs write into the directory beneath it without noticing. If
//! the porter dies, the daemon serves on; it can be unmounted from outside as ever, only a signal
//! cannot unmount any more ([`is_gone`]): then the daemon makes everything durable, says on
//! standard error what clears the mount, and ends. Staying until somebody else unmounts would be no
//! help to who asked it to end, and a second porter would be as mortal as the first.

mod attend;
mod wire;

pub use attend::{Duties, End, attend};

use crate::mount::{MountError, MountOptions, Mounted, Unmounter, backing};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use wire::{Op, Reply, Request};

/// Who does for the daemon what it cannot do itself. Clones are the same porter.
#[derive(Clone, Debug)]
pub struct Porter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    mountpoint: PathBuf,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// This process. The number of the mount's device is looked up when it is first needed.
    Here(OnceLock<u64>),
    /// Another process.
    Beside(Mutex<Beside>),
}

#[derive(Debug)]
struct Beside {
    /// `None` once it was sent home.
    socket: Option<OwnedFd>,
    /// Waited for at the end, where this process has started it.
    child: Option<Child>,
}

/// Does this error of a [`Porter`] say that its process is gone?
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

impl Porter {
    /// This process does everything itself.
    #[must_use]
    pub fn here(mountpoint: &Path) -> Self {
        Self(Arc::new(Inner { mountpoint: mountpoint.to_owned(), way: Way::Here(OnceLock::new()) }))
    }

    /// Starts a porter for a mount on `mountpoint`: `command`, which has to call [`attend`] with
    /// its standard input.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(command: &mut Command, mountpoint: &Path) -> io::Result<Self> {
        let (socket, child) = Self::begin(command)?;
        Ok(Self::beside(socket, Some(child), mountpoint))
    }

    /// Starts a porter for another process, which gets the socket. Its process id comes along.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn lend(command: &mut Command) -> io::Result<(OwnedFd, u32)> {
        let (socket, child) = Self::begin(command)?;
        Ok((socket, child.id()))
    }

    /// The porter at the other end of this socket, which was started elsewhere for a mount on
    /// `mountpoint`.
    #[must_use]
    pub fn at(socket: OwnedFd, mountpoint: &Path) -> Self {
        Self::beside(socket, None, mountpoint)
    }

    fn beside(socket: OwnedFd, child: Option<Child>, mountpoint: &Path) -> Self {
        let beside = Beside { socket: Some(socket), child };
        Self(Arc::new(Inner {
            mountpoint: mountpoint.to_owned(),
            way: Way::Beside(Mutex::new(beside)),
        }))
    }

    fn begin(command: &mut Command) -> io::Result<(OwnedFd, Child)> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child = command
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // It shall not keep from being unmounted what it was started on.
            .current_dir("/")
            .spawn()?;
        Ok((ours, child))
    }

    /// Where the mount is, or will be.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.0.mountpoint
    }

    /// Has a started porter make the mount that it was started for; `options` are those that it was
    /// told, which the server needs, too.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn mount(&self, options: MountOptions) -> Result<Mounted, MountError> {
        let failed = |e: io::Error| MountError::Porter(e.to_string());
        let Way::Beside(beside) = &self.0.way else {
            return Err(failed(io::Error::other("there is no other process that could mount")));
        };
        let (reply, fuse) = beside.lock().ask(Op::Mount, 0, 0).map_err(failed)?;
        if reply.status != 0 {
            return Err(MountError::Porter(reply.text().into_owned()));
        }
        let fuse = fuse.ok_or_else(|| failed(io::Error::other("no descriptor came")))?;
        Ok(Mounted {
            fuse,
            mountpoint: self.0.mountpoint.clone(),
            options,
            kernel_permissions: reply.flags & wire::KERNEL_PERMISSIONS != 0,
            fuseblk: reply.flags & wire::FUSEBLK != 0,
            enabled_uring: reply.flags & wire::ENABLED_URING != 0,
            porter: self.clone(),
        })
    }

    /// Unmounts; `EBUSY` while files are in use.
    ///
    /// # Errors
    /// What umount(2) or fusermount3 said, or that the porter [is gone](is_gone).
    pub fn unmount(&self) -> io::Result<()> {
        match &self.0.way {
            Way::Here(_) => Unmounter::new(&self.0.mountpoint).unmount(),
            Way::Beside(beside) => beside.lock().ask_number(Op::Unmount, 0, 0).map(drop),
        }
    }

    /// Takes the mount out of the tree now; it ends when nobody uses it any more.
    ///
    /// # Errors
    /// As [`unmount`](Self::unmount).
    pub fn detach(&self) -> io::Result<()> {
        match &self.0.way {
            Way::Here(_) => Unmounter::new(&self.0.mountpoint).detach(),
            Way::Beside(beside) => beside.lock().ask_number(Op::Detach, 0, 0).map(drop),
        }
    }

    /// The inode number (as `stat` shows it) behind descriptor `fd` of the process or thread `pid`,
    /// if that is open on this mount.
    ///
    /// For requests that name a descriptor of their caller; `pid` is the one in the request's head.
    /// Asks the kernel only for what it has cached: no request comes back to the server meanwhile.
    /// It may take a while for a queue's thread, so it is for workers. The number is what the
    /// server has given out, so `Nodes::id` knows it.
    ///
    /// # Errors
    /// `EBADF` if there is no such descriptor, `EXDEV` if it leads elsewhere, `EACCES` or `EPERM`
    /// if the porter may not look into that process (it runs as the user who mounted), `EPIPE` if
    /// the porter is gone.
    pub fn resolve_fd(&self, pid: u32, fd: i32) -> io::Result<u64> {
        match &self.0.way {
            Way::Here(device) => {
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
            Way::Beside(beside) => beside.lock().ask_number(Op::Resolve, pid, fd),
        }
    }

    /// Raises the read-ahead of the mount, where that is permitted. To be called when requests are
    /// served.
    pub(crate) fn raise_read_ahead(&self) {
        match &self.0.way {
            Way::Here(_) => backing::raise_read_ahead(&self.0.mountpoint),
            Way::Beside(beside) => {
                if let Err(error) = beside.lock().ask_number(Op::RaiseReadAhead, 0, 0) {
                    tracing::debug!(%error, "read-ahead stays as it is");
                }
            }
        }
    }

    /// The mount has ended, and with it the daemon's work or not. Another process does what it was
    /// told to do then ([`attend`]) and goes, which is waited for; this one does `here`.
    pub fn dismiss(&self, end: End, here: impl FnOnce()) {
        let Way::Beside(beside) = &self.0.way else { return here() };
        let mut beside = beside.lock();
        let op = match end {
            End::Mount => Op::Leave,
            End::Daemon => Op::Dismiss,
        };
        if let Err(error) = beside.ask_number(op, 0, 0) {
            tracing::debug!(%error, "the porter was gone before");
        }
        beside.end();
    }
}

impl Beside {
    fn ask(&mut self, op: Op, pid: u32, fd: i32) -> io::Result<(Reply, Option<OwnedFd>)> {
        let gone = || {
            io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the process that mounts and unmounts is gone",
            )
        };
        let socket = self.socket.as_ref().ok_or_else(gone)?;
        let outcome = wire::send_request(socket, Request { op, pid, fd })
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

    /// Hangs up, which ends the porter, and waits for that.
    fn end(&mut self) {
        if let (Some(socket), None) = (&self.socket, &self.child) {
            // Its process holds the other end to the last.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            let _ = wire::receive_reply(socket);
        }
        self.socket = None;
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }
}

impl Drop for Beside {
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
    // What is cached will do: the number never changes, and the server, who waits for us, must not
    // be asked.
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
    fn a_porter_that_is_gone_is_noticed() {
        // `true` ends at once; it cannot be a porter.
        let porter = Porter::start(&mut Command::new("true"), Path::new("/nowhere")).unwrap();
        assert!(is_gone(&porter.unmount().unwrap_err()));
        assert!(is_gone(&porter.resolve_fd(1, 1).unwrap_err()));
        assert!(matches!(porter.mount(MountOptions::default()), Err(MountError::Porter(_))));
        porter.dismiss(End::Daemon, || panic!("that is another process's to do"));
        assert!(is_gone(&porter.detach().unwrap_err()));
    }
}
