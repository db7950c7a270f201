//! The helper process: answers the daemon at the other end of its socket.

use super::inode_of;
use super::wire::{self, HelperReply, HelperRequest, Op};
use crate::mount::{MountOptions, Unmounter, backing, make};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// What a helper knows before it begins; requests cannot change it.
#[derive(Clone, Debug)]
pub struct HelperConfig {
    /// Image or device that is mounted; absolute.
    pub source: PathBuf,
    /// Where; absolute and without symbolic links.
    pub mountpoint: PathBuf,
    /// How.
    pub options: MountOptions,
}

/// What has ended when a helper is dismissed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The mount; the daemon goes on for other mounts.
    Mount,
    /// The daemon, too.
    Daemon,
}

/// Serves the daemon at the other end of `socket` until it is done or gone. If it says that it is
/// done, `tidy_up` runs before the answer.
///
/// # Errors
/// If the socket fails, or something else than a request arrives.
pub fn serve_daemon(
    socket: BorrowedFd<'_>,
    config: &HelperConfig,
    tidy_up: impl FnOnce(Ended),
) -> io::Result<()> {
    let mut helper = HelperServer { config, mounted: false, device: None };
    while let Some(request) = wire::receive_request(socket)? {
        let end = match request.op {
            Op::Dismiss => Some(Ended::Daemon),
            Op::Leave => Some(Ended::Mount),
            _ => None,
        };
        if let Some(end) = end {
            tidy_up(end);
            return wire::send_reply(socket, &HelperReply::default(), None);
        }
        let (reply, fuse) = helper.answer(request);
        // From here on the daemon alone has the descriptor: a copy in this process would keep the
        // mount from dying with the daemon.
        wire::send_reply(socket, &reply, fuse.as_ref().map(AsFd::as_fd))?;
    }
    Ok(())
}

struct HelperServer<'a> {
    config: &'a HelperConfig,
    /// The mount was made once; there is no second one.
    mounted: bool,
    /// The mount's device number, which its files have.
    device: Option<u64>,
}

impl HelperServer<'_> {
    fn answer(&mut self, request: HelperRequest) -> (HelperReply, Option<OwnedFd>) {
        let outcome = match request.op {
            Op::Mount => return self.mount(),
            Op::RaiseReadAhead => {
                backing::raise_read_ahead(&self.config.mountpoint);
                Ok(0)
            }
            Op::Unmount => self.unmounter().and_then(|u| u.unmount()).map(|()| 0),
            Op::Detach => self.unmounter().and_then(|u| u.detach()).map(|()| 0),
            Op::Resolve => {
                self.own_device().and_then(|device| inode_of(request.pid, request.fd, device))
            }
            // Answered by `serve_daemon`.
            Op::Dismiss | Op::Leave => Ok(0),
        };
        let reply = match outcome {
            Ok(value) => HelperReply { value, ..HelperReply::default() },
            Err(e) => HelperReply::error(errno_of(&e)),
        };
        (reply, None)
    }

    fn mount(&mut self) -> (HelperReply, Option<OwnedFd>) {
        if self.mounted {
            return (
                HelperReply { why: b"mounted already".to_vec(), ..HelperReply::error(libc::EBUSY) },
                None,
            );
        }
        let HelperConfig { source, mountpoint, options } = self.config;
        match make(source, mountpoint, options) {
            Ok(mounted) => {
                self.mounted = true;
                self.device = backing::device(mountpoint);
                let flags = [
                    (mounted.kernel_permissions, wire::KERNEL_PERMISSIONS),
                    (mounted.fuseblk, wire::FUSEBLK),
                    (mounted.enabled_uring, wire::ENABLED_URING),
                ];
                let flags = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
                (HelperReply { flags, ..HelperReply::default() }, Some(mounted.fuse))
            }
            Err(e) => (
                HelperReply { why: e.to_string().into_bytes(), ..HelperReply::error(libc::EIO) },
                None,
            ),
        }
    }

    fn own_device(&self) -> io::Result<u64> {
        self.device.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }

    /// For the mount that this process made, and only while no other mount covers it.
    fn unmounter(&self) -> io::Result<Unmounter> {
        let own = self.own_device()?;
        if backing::device(&self.config.mountpoint) == Some(own) {
            Ok(Unmounter::new(&self.config.mountpoint))
        } else {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        }
    }
}

/// Error numbers cross the socket. An error without one (what fusermount3 says) gets the nearest.
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

    /// What a helper answers that cannot mount.
    fn ask(requests: &[HelperRequest]) -> (Vec<HelperReply>, Option<Ended>) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let helper = std::thread::spawn(move || {
            let config = HelperConfig {
                source: "/nonexistent.img".into(),
                mountpoint: "/nonexistent".into(),
                options: MountOptions::default(),
            };
            let mut tidied = None;
            serve_daemon(theirs.as_fd(), &config, |end| tidied = Some(end)).unwrap();
            tidied
        });
        let replies = requests.iter().map(|r| {
            wire::send_request(&ours, *r).unwrap();
            wire::receive_reply(&ours).unwrap().unwrap().0
        });
        let replies = replies.collect();
        drop(ours);
        (replies, helper.join().unwrap())
    }

    #[test]
    fn without_a_mount_nothing_is_given_away() {
        let request = |op, pid, fd| HelperRequest { op, pid, fd };
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
        assert_eq!((tidied, &replies[0]), (Some(Ended::Daemon), &HelperReply::default()));
        let (_, tidied) = ask(&[request(Op::Leave, 0, 0)]);
        assert_eq!(tidied, Some(Ended::Mount));
    }
}
