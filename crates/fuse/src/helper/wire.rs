//! What crosses the socket between a daemon and its mount helper.
//!
//! Messages keep their boundaries (`SOCK_SEQPACKET`). A request is 12 bytes: an operation, a
//! process id, a descriptor. A reply is 16 bytes: an error number or 0, flags, a number. If a mount
//! failed, the reason follows as text. Numbers are in the machine's own order, because both ends
//! are the same program. The reply to a mount carries the descriptor of `/dev/fuse`.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::borrow::Cow;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What a daemon may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Make the mount.
    Mount = 1,
    /// Raise its read-ahead.
    RaiseReadAhead,
    /// Unmount.
    Unmount,
    /// Unmount lazily.
    Detach,
    /// Which inode of the mount does this process have open as this descriptor?
    Resolve,
    /// Everything has ended: tidy up and exit.
    Dismiss,
    /// The same, but the daemon goes on for other mounts.
    Leave,
}

impl Op {
    fn from_number(number: u32) -> Option<Self> {
        use Op::*;
        let all = [Mount, RaiseReadAhead, Unmount, Detach, Resolve, Dismiss, Leave];
        all.into_iter().find(|op| *op as u32 == number)
    }
}

/// Flags of the reply to a mount.
pub(super) const KERNEL_PERMISSIONS: u32 = 1;
pub(super) const FUSEBLK: u32 = 2;
pub(super) const ENABLED_URING: u32 = 4;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HelperRequest {
    pub(super) op: Op,
    pub(super) pid: u32,
    pub(super) fd: i32,
}

const REQUEST_LEN: usize = 12;
const REPLY_LEN: usize = 16;
const TEXT_LEN: usize = 1024;

/// A reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HelperReply {
    /// 0, or an error number.
    pub(super) status: i32,
    pub(super) flags: u32,
    pub(super) value: u64,
    /// Why a mount failed.
    pub(super) why: Vec<u8>,
}

impl HelperReply {
    pub(super) fn error(errno: i32) -> Self {
        Self { status: errno, ..Self::default() }
    }
    pub(super) fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.why)
    }
}

/// The bytes at an offset.
fn part<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

impl HelperRequest {
    fn to_bytes(self) -> [u8; REQUEST_LEN] {
        let mut out = [0; REQUEST_LEN];
        out[..4].copy_from_slice(&(self.op as u32).to_ne_bytes());
        out[4..8].copy_from_slice(&self.pid.to_ne_bytes());
        out[8..].copy_from_slice(&self.fd.to_ne_bytes());
        out
    }
    /// `None` if these bytes are no request.
    fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != REQUEST_LEN {
            return None;
        }
        Some(Self {
            op: Op::from_number(u32::from_ne_bytes(part(bytes, 0)?))?,
            pid: u32::from_ne_bytes(part(bytes, 4)?),
            fd: i32::from_ne_bytes(part(bytes, 8)?),
        })
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message of the wrong form")
}

pub(super) fn send_request(socket: &OwnedFd, request: HelperRequest) -> io::Result<()> {
    send(socket.as_fd(), &[IoSlice::new(&request.to_bytes())], None)
}

/// `None`: the daemon is gone.
pub(super) fn receive_request(socket: BorrowedFd<'_>) -> io::Result<Option<HelperRequest>> {
    let mut bytes = [0; REQUEST_LEN + 1];
    match receive(socket, &mut bytes)? {
        (0, _) => Ok(None),
        (n, _) => HelperRequest::parse(&bytes[..n]).map(Some).ok_or_else(malformed),
    }
}

pub(super) fn send_reply(
    socket: BorrowedFd<'_>,
    reply: &HelperReply,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut head = [0; REPLY_LEN];
    head[..4].copy_from_slice(&reply.status.to_ne_bytes());
    head[4..8].copy_from_slice(&reply.flags.to_ne_bytes());
    head[8..].copy_from_slice(&reply.value.to_ne_bytes());
    let text = &reply.why[..reply.why.len().min(TEXT_LEN)];
    send(socket, &[IoSlice::new(&head), IoSlice::new(text)], fd)
}

/// `None`: the helper is gone.
pub(super) fn receive_reply(
    socket: &OwnedFd,
) -> io::Result<Option<(HelperReply, Option<OwnedFd>)>> {
    let mut bytes = [0; REPLY_LEN + TEXT_LEN];
    let (n, fd) = receive(socket.as_fd(), &mut bytes)?;
    if n == 0 {
        return Ok(None);
    }
    let bytes = &bytes[..n];
    let reply = || {
        Some(HelperReply {
            status: i32::from_ne_bytes(part(bytes, 0)?),
            flags: u32::from_ne_bytes(part(bytes, 4)?),
            value: u64::from_ne_bytes(part(bytes, 8)?),
            why: bytes.get(REPLY_LEN..)?.to_vec(),
        })
    };
    reply().map(|reply| Some((reply, fd))).ok_or_else(malformed)
}

fn send(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(fits, "the buffer was made for one descriptor");
    }
    loop {
        match sendmsg(socket, parts, &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Length of the message, 0 at the end; and the descriptor that came along.
fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(bytes)];
        match recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    };
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((received.bytes, fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (a, b) = pair();
        let request = HelperRequest { op: Op::Resolve, pid: 4711, fd: -3 };
        send_request(&a, request).unwrap();
        assert_eq!(receive_request(b.as_fd()).unwrap(), Some(request));
        let reply =
            HelperReply { status: 2, flags: 5, value: u64::MAX - 1, why: b"because".to_vec() };
        let file = tempfile::tempfile().unwrap();
        send_reply(b.as_fd(), &reply, Some(file.as_fd())).unwrap();
        let (got, fd) = receive_reply(&a).unwrap().unwrap();
        assert_eq!((got, fd.is_some()), (reply, true));
        // A text that is too long is cut.
        let long = HelperReply { why: vec![b'x'; 5000], ..HelperReply::default() };
        send_reply(b.as_fd(), &long, None).unwrap();
        let (got, fd) = receive_reply(&a).unwrap().unwrap();
        assert_eq!((got.why.len(), fd.is_some()), (TEXT_LEN, false));
        drop(b);
        assert!(receive_reply(&a).unwrap().is_none());
        assert_eq!(send_request(&a, request).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn other_forms_are_refused() {
        let good = HelperRequest { op: Op::Mount, pid: 0, fd: 0 }.to_bytes();
        assert!(HelperRequest::parse(&good).is_some());
        assert_eq!(HelperRequest::parse(&good[..11]), None);
        assert_eq!(HelperRequest::parse(&[&good[..], &[0]].concat()), None);
        for number in [0u32, 8, u32::MAX] {
            let mut bad = good;
            bad[..4].copy_from_slice(&number.to_ne_bytes());
            assert_eq!(HelperRequest::parse(&bad), None, "{number}");
        }
        let (a, b) = pair();
        rustix::net::send(&a, &[1; 13], SendFlags::NOSIGNAL).unwrap();
        assert_eq!(receive_request(b.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        rustix::net::send(&b, &[1; 15], SendFlags::NOSIGNAL).unwrap();
        assert_eq!(receive_reply(&a).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
