//! The seam between transports and servers: one request in, one reply out.
//!
//! A transport reads requests, hands each to a [`Handler`], and sends what it left in the
//! [`Reply`]. It decides on which thread that happens; the handler only says when it cannot finish
//! without waiting. So the same server runs over `/dev/fuse` and over io_uring, and the same
//! transports carry the engine's server and the benchmark's in-memory one.

use crate::errno::Errno;
use crate::later::Later;
use crate::proto::{InHeader, Opcode};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request: head, fixed structure, and what follows it (names, data).
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Head.
    pub header: InHeader,
    /// What is asked.
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
    /// Nothing was changed that may not be changed twice; call again on a thread that may wait.
    Wait,
    /// The same, on a thread that may wait for the kernel.
    WaitForKernel,
}

impl From<Errno> for Failure {
    fn from(e: Errno) -> Self {
        Self::Errno(e)
    }
}

/// Outcome of a request: the length of the reply in the buffer, or why there is none.
pub type Outcome = Result<usize, Failure>;

/// May the thread wait?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A queue's own thread: answer without waiting, or say [`Failure::Wait`].
    Queue,
    /// A worker: wait as long as it takes, but not for the kernel, which may be waiting for another
    /// request that no worker would be left for.
    Worker,
    /// A thread that other requests do not need: wait for whatever it is.
    Kernel,
    /// A worker, instead of such a thread, for as many requests wait for the kernel as may: what
    /// the kernel must be told, it is told after the answer.
    Afterwards,
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
    /// None; the type is that of a handler's outcome.
    pub fn empty(&mut self) -> Outcome {
        Ok(0)
    }
    /// A structure as the body.
    ///
    /// # Errors
    /// `EIO` if the buffer is too small, which no transport's is.
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
    pub fn value_and_bytes<T: IntoBytes + Immutable>(
        &mut self,
        value: &T,
        bytes: &[u8],
    ) -> Outcome {
        let head = self.value(value)?;
        self.out.get_mut(head..head + bytes.len()).ok_or(Errno::RANGE)?.copy_from_slice(bytes);
        Ok(head + bytes.len())
    }
    /// The first `len` bytes of the buffer, to be filled in place; the outcome is how many were.
    ///
    /// # Errors
    /// `EINVAL` if the buffer is smaller.
    pub fn buffer(&mut self, len: usize) -> Result<&mut [u8], Failure> {
        Ok(self.out.get_mut(..len).ok_or(Errno::INVAL)?)
    }
}

/// A file system at the level of requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers a request. Must not wait with [`Patience::Queue`]; may be called from any number of
    /// threads.
    ///
    /// # Errors
    /// An errno for the caller, or, where `patience` is not enough, [`Failure::Wait`] or
    /// [`Failure::WaitForKernel`].
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, patience: Patience) -> Outcome;

    /// Are requests of this kind, which waits and has no reply but an errno, answered by
    /// [`handle_later`](Self::handle_later) where a worker would wait?
    fn answers_later(&self, _: Opcode) -> bool {
        false
    }

    /// Answers a request through `later`, now or when there is an answer; called on a worker, and
    /// for kinds of which [`answers_later`](Self::answers_later) says so.
    fn handle_later(&self, _: &Request<'_>, later: Later) {
        later.answer(Err(Errno::NOSYS));
    }

    /// Must the handler know, for this request, of all look-ups that the kernel gave back before
    /// it? They come another way.
    fn comes_after_forgets(&self, _: &Request<'_>) -> bool {
        false
    }

    /// Must all contents of files have come that the kernel was sending before this request? Asked
    /// of requests that were told to [wait](Failure::Wait).
    fn comes_after_writes(&self, _: &Request<'_>) -> bool {
        false
    }

    /// Up to `most` nodes, of any kind, that the kernel has looked up and not given back; all of
    /// them if they are fewer.
    fn nodes_in_use(&self, _most: usize) -> Vec<u64> {
        Vec::new()
    }

    /// The kernel gives back `count` look-ups of an inode. Has no reply.
    fn forget(&self, node: u64, count: u64);
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
