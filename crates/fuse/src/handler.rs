//! The seam between transports and servers: one request in, one reply out.
//!
//! A transport reads requests, hands each to a [`Handler`], and sends what the handler left in the
//! [`Reply`]. The transport decides on which thread that happens; the handler only says when it
//! cannot finish without waiting. So the same server runs over `/dev/fuse` and over io_uring, and
//! the same transports carry the engine's server and the in-memory one of tests and benchmarks.

pub use crate::deferred::DeferredReply;
use crate::errno::{Errno, errno};
use crate::proto::{InHeader, NodeId, Opcode};
use larder_fs::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request: head, fixed structure, and what follows it (names, data).
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Head.
    pub header: InHeader,
    /// What is asked for.
    pub opcode: Opcode,
    /// The fixed structure, [`Opcode::arg_len`] bytes.
    pub arg: &'a [u8],
    /// Names and data.
    pub data: &'a [u8],
}

impl<'a> Request<'a> {
    /// The fixed structure.
    ///
    /// # Errors
    /// `EINVAL` if the message is shorter than its structure.
    pub fn arg<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, Errno> {
        T::read_from_prefix(self.arg).map(|(v, _)| v).map_err(|_| Errno::INVAL)
    }
    /// The name that follows.
    ///
    /// # Errors
    /// `EINVAL` if it is not terminated.
    pub fn name(&self) -> Result<&'a [u8], Errno> {
        self.name_and_rest().map(|(n, _)| n)
    }
    /// The name that follows, and what comes after it.
    ///
    /// # Errors
    /// `EINVAL` if it is not terminated.
    pub fn name_and_rest(&self) -> Result<(&'a [u8], &'a [u8]), Errno> {
        split_name(self.data)
    }
    /// The two names that follow.
    ///
    /// # Errors
    /// `EINVAL` if one is not terminated.
    pub fn two_names(&self) -> Result<(&'a [u8], &'a [u8]), Errno> {
        let (first, rest) = split_name(self.data)?;
        Ok((first, split_name(rest)?.0))
    }
}

fn split_name(data: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let end = data.iter().position(|b| *b == 0).ok_or(Errno::INVAL)?;
    Ok((&data[..end], &data[end + 1..]))
}

/// Why there is no reply with data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Answer with this errno.
    Errno(Errno),
    /// Nothing was changed that must not be changed twice. The transport calls again on a thread
    /// that may wait.
    Wait,
    /// The same, on a thread that may wait for the kernel.
    WaitForKernel,
}

impl From<Errno> for Failure {
    fn from(e: Errno) -> Self {
        Self::Errno(e)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if matches!(error, Error::WouldBlock) {
            return Self::Wait;
        }
        if is_damage(&error) {
            tracing::error!(%error, "request failed");
        }
        Self::Errno(errno(&error))
    }
}

/// Does this error belong in the log, too, besides the reply?
fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Corrupt { .. } | Error::Volume(_) | Error::DataLost)
}

/// Outcome of a request: the length of the reply in the buffer, or why there is none.
pub type Outcome = Result<usize, Failure>;

/// The execution context: what the calling thread may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecContext {
    /// A queue's own thread, which must not wait: answer, or return [`Failure::Wait`].
    Queue,
    /// A worker. It may wait as long as it takes, but not for the kernel: that may be waiting for
    /// another request, for which no worker would be left.
    Worker,
    /// A thread that no other request needs. It may wait for anything.
    MayWaitForKernel,
    /// A worker, used when no more requests may wait for the kernel. The kernel learns of the
    /// change after the reply.
    NotifyAfterReply,
}

/// Where requests of one kind are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// On the queue's thread, unless the handler says there that it would have to wait. Then on
    /// another thread.
    Queue,
    /// On a worker.
    Worker,
    /// A worker begins, and leaves a [`DeferredReply`] to whatever has the answer. The reply has no
    /// body.
    Deferred,
}

/// Where the reply's body goes.
#[derive(Debug)]
pub struct Reply<'a> {
    out: &'a mut [u8],
}

impl<'a> Reply<'a> {
    /// Around the transport's buffer.
    pub fn new(out: &'a mut [u8]) -> Self {
        Self { out }
    }
    /// Longest body.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.out.len()
    }
    /// A reply without a body.
    ///
    /// # Errors
    /// None; this is the type of a handler's outcome.
    pub fn empty(&mut self) -> Outcome {
        Ok(0)
    }
    /// A structure as the body.
    ///
    /// # Errors
    /// `ERANGE` if the buffer is too small, which no transport's is.
    pub fn value<T: IntoBytes + Immutable>(&mut self, value: &T) -> Outcome {
        self.bytes(value.as_bytes())
    }
    /// Bytes as the body.
    ///
    /// # Errors
    /// `ERANGE` if they do not fit.
    pub fn bytes(&mut self, bytes: &[u8]) -> Outcome {
        self.out.get_mut(..bytes.len()).ok_or(Errno::RANGE)?.copy_from_slice(bytes);
        Ok(bytes.len())
    }
    /// A structure, then bytes.
    ///
    /// # Errors
    /// `ERANGE` if they do not fit.
    pub(crate) fn value_and_bytes<T: IntoBytes + Immutable>(
        &mut self,
        value: &T,
        bytes: &[u8],
    ) -> Outcome {
        let head = self.value(value)?;
        self.out.get_mut(head..head + bytes.len()).ok_or(Errno::RANGE)?.copy_from_slice(bytes);
        Ok(head + bytes.len())
    }
    /// The first `len` bytes of the buffer, to be filled in place. The outcome is how many were
    /// filled.
    ///
    /// # Errors
    /// `EINVAL` if the buffer is smaller.
    pub fn buffer(&mut self, len: usize) -> Result<&mut [u8], Failure> {
        Ok(self.out.get_mut(..len).ok_or(Errno::INVAL)?)
    }
}

/// A file system at the level of requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers a request. Must not wait with [`ExecContext::Queue`]. May be called from any number
    /// of threads.
    ///
    /// # Errors
    /// An errno for the caller. Or [`Failure::Wait`] or [`Failure::WaitForKernel`], if the request
    /// has to wait for something that `context` does not allow.
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, context: ExecContext)
    -> Outcome;

    /// Where requests of this kind are served.
    fn service(&self, _: Opcode) -> Service {
        Service::Queue
    }

    /// Answers a request through `deferred`, now or when there is an answer; called on a worker,
    /// for the kinds that are [`Service::Deferred`].
    fn handle_deferred(&self, _: &Request<'_>, deferred: DeferredReply) {
        deferred.answer(Err(Errno::NOSYS));
    }

    /// Must the handler know of all look-ups that the kernel gave back before this request, before
    /// it answers the request? They arrive through another queue.
    fn comes_after_forgets(&self, _: &Request<'_>) -> bool {
        false
    }

    /// Must all writes that the kernel sent before this request have been answered before it? Asked
    /// about requests that have to [wait](Failure::Wait).
    fn comes_after_writes(&self, _: &Request<'_>) -> bool {
        false
    }

    /// Nodes of any kind that the kernel has looked up and not given back: all of them, but no more
    /// than `most`.
    fn nodes_in_use(&self, _most: usize) -> Vec<NodeId> {
        Vec::new()
    }

    /// The kernel gives back this many look-ups of an inode. Has no reply.
    fn forget(&self, node: NodeId, lookups: u64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{MknodIn, WriteOut};

    #[test]
    fn names_are_taken_apart() {
        let arg = MknodIn { mode: 0o100_644, rdev: 7, umask: 0o22, padding: 0 };
        let request = Request {
            header: InHeader::default(),
            opcode: Opcode::Mknod,
            arg: arg.as_bytes(),
            data: b"old\0new\0tail",
        };
        assert_eq!(request.arg::<MknodIn>().unwrap().rdev, 7);
        assert_eq!(request.name().unwrap(), b"old");
        assert_eq!(request.two_names().unwrap(), (&b"old"[..], &b"new"[..]));
        assert_eq!(request.name_and_rest().unwrap().1, b"new\0tail");
        let bad = Request { data: b"endless", arg: &arg.as_bytes()[..7], ..request };
        assert_eq!(bad.name(), Err(Errno::INVAL));
        assert_eq!(bad.arg::<MknodIn>().err(), Some(Errno::INVAL));
    }

    #[test]
    fn a_refusal_to_wait_is_no_error() {
        assert_eq!(Failure::from(Error::WouldBlock), Failure::Wait);
        assert_eq!(Failure::from(Error::NotFound), Failure::Errno(Errno::NOENT));
        assert!(is_damage(&Error::DataLost) && !is_damage(&Error::NotFound));
    }

    #[test]
    fn replies_never_overrun() {
        let mut buffer = [0; 10];
        let mut reply = Reply::new(&mut buffer);
        assert_eq!(reply.value(&WriteOut { size: 1, padding: 0 }), Ok(8));
        assert_eq!(reply.value_and_bytes(&WriteOut::default(), b"ab"), Ok(10));
        assert_eq!(
            reply.value_and_bytes(&WriteOut::default(), b"abc"),
            Err(Failure::Errno(Errno::RANGE))
        );
        assert!(reply.buffer(11).is_err());
    }
}
