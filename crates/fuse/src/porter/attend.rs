//! The porter's side.

use super::inode_of;
use super::wire::{self, Op, Reply, Request};
use crate::mount::{MountOptions, Unmounter, backing, mount};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// What a porter is told before it begins; requests cannot change it.
#[derive(Clone, Debug)]
pub struct Duties {
    /// Image or device that is mounted; absolute.
    pub source: PathBuf,
    /// Where; absolute and without symbolic links.
    pub mountpoint: PathBuf,
    /// How.
    pub options: MountOptions,
}

/// What has ended when a porter is sent home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The mount; the daemon goes on for others.
    Mount,
    /// The daemon, too.
    Daemon,
}

/// Serves the daemon at the other end of `socket` until it says that it is done — then `tidy_up`
/// runs before the answer — or is gone.
///
/// # Errors
/// If the socket fails, or something else than a request arrives.
pub fn attend(
    socket: BorrowedFd<'_>,
    duties: &Duties,
    tidy_up: impl FnOnce(End),
) -> io::Result<()> {
    let mut porter = Attendant { duties, mounted: false, device: None };
    while let Some(request) = wire::receive_request(socket)? {
        let end = match request.op {
            Op::Dismiss => Some(End::Daemon),
            Op::Leave => Some(End::Mount),
            _ => None,
        };
        if let Some(end) = end {
            tidy_up(end);
            return wire::send_reply(socket, &Reply::default(), None);
        }
        let (reply, fuse) = porter.answer(request);
        // Sent, the descriptor is the daemon's alone: a copy here would keep the mount from dying
        // with it.
        wire::send_reply(socket, &reply, fuse.as_ref().map(AsFd::as_fd))?;
    }
    Ok(())
}

struct Attendant<'a> {
    duties: &'a Duties,
    /// There was a mount; there is no second one.
    mounted: bool,
    /// Its number, by which its files are known.
    device: Option<u64>,
}

impl Attendant<'_> {
    fn answer(&mut self, request: Request) -> (Reply, Option<OwnedFd>) {
        let outcome = match request.op {
            Op::Mount => return self.mount(),
            Op::RaiseReadAhead => {
                backing::raise_read_ahead(&self.duties.mountpoint);
                Ok(0)
            }
            Op::Unmount => self.unmounter().and_then(|u| u.unmount()).map(|()| 0),
            Op::Detach => self.unmounter().and_then(|u| u.detach()).map(|()| 0),
            Op::Resolve => {
                self.own_device().and_then(|device| inode_of(request.pid, request.fd, device))
            }
            // Answered by `attend`.
            Op::Dismiss | Op::Leave => Ok(0),
        };
        let reply = match outcome {
            Ok(value) => Reply { value, ..Reply::default() },
            Err(e) => Reply::error(errno_of(&e)),
        };
        (reply, None)
    }

    fn mount(&mut self) -> (Reply, Option<OwnedFd>) {
        if self.mounted {
            return (Reply { why: b"mounted already".to_vec(), ..Reply::error(libc::EBUSY) }, None);
        }
        let Duties { source, mountpoint, options } = self.duties;
        match mount(source, mountpoint, options.clone()) {
            Ok(mounted) => {
                self.mounted = true;
                self.device = backing::device(mountpoint);
                let flags = [
                    (mounted.kernel_permissions, wire::KERNEL_PERMISSIONS),
                    (mounted.fuseblk, wire::FUSEBLK),
                    (mounted.enabled_uring, wire::ENABLED_URING),
                ];
                let flags = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
                (Reply { flags, ..Reply::default() }, Some(mounted.fuse))
            }
            Err(e) => (Reply { why: e.to_string().into_bytes(), ..Reply::error(libc::EIO) }, None),
        }
    }

    fn own_device(&self) -> io::Result<u64> {
        self.device.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }

    /// For the mount that we made, and only while it is what lies uppermost there.
    fn unmounter(&self) -> io::Result<Unmounter> {
        let own = self.own_device()?;
        if backing::device(&self.duties.mountpoint) == Some(own) {
            Ok(Unmounter::new(&self.duties.mountpoint))
        } else {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        }
    }
}

/// Error numbers cross the socket; what has none (what fusermount3 says) gets the nearest.
fn errno_of(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(match e.kind() {
        io::ErrorKind::ResourceBusy => libc::EBUSY,
        io::ErrorKind::PermissionDenied => libc::EPERM,
        io::ErrorKind::NotFound => libc::ENOENT,
        _ => libc::EIO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// What a porter answers that cannot mount.
    fn ask(requests: &[Request]) -> (Vec<Reply>, Option<End>) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let porter = std::thread::spawn(move || {
            let duties = Duties {
                source: "/nonexistent.img".into(),
                mountpoint: "/nonexistent".into(),
                options: MountOptions::default(),
            };
            let mut tidied = None;
            attend(theirs.as_fd(), &duties, |end| tidied = Some(end)).unwrap();
            tidied
        });
        let replies = requests.iter().map(|r| {
            wire::send_request(&ours, *r).unwrap();
            wire::receive_reply(&ours).unwrap().unwrap().0
        });
        let replies = replies.collect();
        drop(ours);
        (replies, porter.join().unwrap())
    }

    #[test]
    fn without_a_mount_nothing_is_given_away() {
        let request = |op, pid, fd| Request { op, pid, fd };
        let me = std::process::id();
        let (replies, tidied) = ask(&[
            request(Op::Resolve, me, 0),
            request(Op::Unmount, 0, 0),
            request(Op::Detach, 0, 0),
            request(Op::Mount, 0, 0),
        ]);
        assert_eq!(replies[..3].iter().map(|r| r.status).collect::<Vec<_>>(), [libc::ENODEV; 3]);
        assert!(
            replies[3].status != 0 && replies[3].text().contains("/nonexistent"),
            "{:?}",
            replies[3]
        );
        assert_eq!(tidied, None, "a daemon that just vanished leaves its traces");
        let (replies, tidied) = ask(&[request(Op::Dismiss, 0, 0)]);
        assert_eq!((tidied, &replies[0]), (Some(End::Daemon), &Reply::default()));
        let (_, tidied) = ask(&[request(Op::Leave, 0, 0)]);
        assert_eq!(tidied, Some(End::Mount));
    }
}
