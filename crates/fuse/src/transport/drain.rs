//! Waiting for what the kernel still has to write.
//!
//! A program changes a file through a mapping, or with `-o writeback` by writing to it, and for a
//! while only the kernel has the new pages. A snapshot and a sync are to have them. `syncfs(2)`
//! makes the kernel write them all, and whoever asks for either calls it first
//! ([`crate::control::hand_over`]) — but on a FUSE mount it returns when the requests are *queued*,
//! not when they are answered: WRITEs by the hundred may still be on their way when the request
//! that follows is here. So requests for which it matters
//! ([`Handler::comes_after_writes`](crate::handler::Handler::comes_after_writes)) are held back by
//! a [`Drain`] until those before them have been answered. No thread waits meanwhile.
//!
//! The kernel's queues are first in, first out, so that something put in behind says when
//! everything before it has come out. There is one thing that we can put in: the answer to
//! `FUSE_NOTIFY_RETRIEVE`, which is a message without a reply that carries a number of ours
//! ([`Mark`]); for no page of any regular file that the kernel knows ([`Marker`]). It is put where
//! its sender runs — with io_uring into the queue of that CPU.
//!
//! Behind that queue the kernel keeps a second one, of *background* requests (writes of pages,
//! reading ahead, direct requests that nobody waits for), and lets only so many of them into the
//! first at a time. A mark does not pass through the second, so one mark is not enough. What both
//! transports go by:
//!
//! - **io_uring.** A queue whose second one has something has at least one background request under
//!   way, and an older one, because they leave it in their order. Requests are numbered as they are
//!   queued, by one counter. So: give back all that is answered; when no transfer older than the
//!   request that waits is with a worker, put in a mark; if no older transfer arrives before the
//!   mark does, none is left. The first mark proves nothing, because the kernel may pass it on
//!   while it hands out an older request another way, which it does before that thread's next
//!   system call returns.
//! - **`/dev/fuse`.** Here requests are numbered only when they leave the second queue, of which
//!   there is one. But that has something only while
//!   [`MAX_BACKGROUND`](crate::proto::init::MAX_BACKGROUND) requests are under way. A reader may
//!   have a request that nobody else knows of: it is still being copied. So there are as many marks
//!   as readers, and a reader that has got one stays until all have. If fewer transfers than that
//!   limit were seen since the marks were put in, or were with workers at the time, nothing was in
//!   the second queue; and what is with workers now is all that is left to wait for.
//!
//! New requests are never waited for, so that a busy mount cannot hold a snapshot back for ever.
//! What stays behind: pages of a file that is being truncated at this very moment, whose writes the
//! kernel holds back elsewhere.

use super::cpus;
use crate::proto::{InHeader, Opcode, OutHeader, WRITE_CACHE, WriteIn};
use crate::workers::Workers;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::fmt;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// `FUSE_NOTIFY_RETRIEVE`.
const RETRIEVE: i32 = 5;

/// Body of a `FUSE_NOTIFY_RETRIEVE`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct RetrieveOut {
    unique: u64,
    node: u64,
    offset: u64,
    size: u32,
    padding: u32,
}

/// A message to ourselves through a queue of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Of which drain.
    pub(super) drain: u32,
    /// Through which queue it was sent.
    pub(super) queue: u16,
}

impl Mark {
    /// Tells marks from requests, whose numbers count up from zero.
    const BIT: u64 = 1 << 62;

    /// As the number of a message; even, as those of requests are.
    fn unique(self) -> u64 {
        Self::BIT | u64::from(self.drain) << 17 | u64::from(self.queue) << 1
    }

    /// The mark that this message is, if it is one.
    pub(super) fn of(header: &InHeader) -> Option<Self> {
        let ours = header.opcode == Opcode::NotifyReply as u32 && header.unique & Self::BIT != 0;
        ours.then_some(Self {
            drain: (header.unique >> 17) as u32,
            queue: (header.unique >> 1) as u16,
        })
    }

    /// Puts it into the queue, as the answer to a question for no page at all of a file.
    fn put(self, fd: BorrowedFd<'_>, node: u64) -> Result<(), Errno> {
        let body = RetrieveOut { unique: self.unique(), node, offset: 0, size: 0, padding: 0 };
        let len = (size_of::<OutHeader>() + size_of::<RetrieveOut>()) as u32;
        let head = OutHeader { len, error: RETRIEVE, unique: 0 };
        rustix::io::writev(fd, &[IoSlice::new(head.as_bytes()), IoSlice::new(body.as_bytes())])
            .map(|_| ())
    }
}

/// The thread that puts marks in.
///
/// Not one of those that requests wait for: the kernel looks the file up for it, and where that
/// file is just being deleted it waits until the pages that are on their way have been written.
pub(super) struct Marker {
    thread: Workers,
    shared: Arc<Shared>,
}

struct Shared {
    fd: OwnedFd,
    /// Up to so many nodes that the kernel may know, of any kind.
    nodes: Box<dyn Fn(usize) -> Vec<u64> + Send + Sync>,
    /// A file that the last mark was put in with.
    last: AtomicU64,
}

impl fmt::Debug for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Marker").field("thread", &self.thread).finish_non_exhaustive()
    }
}

impl Marker {
    /// For the mount of this descriptor.
    pub(super) fn new(
        fd: OwnedFd,
        nodes: impl Fn(usize) -> Vec<u64> + Send + Sync + 'static,
    ) -> Self {
        let shared = Shared { fd, nodes: Box::new(nodes), last: AtomicU64::new(0) };
        Self { thread: Workers::new(1, usize::MAX), shared: Arc::new(shared) }
    }

    /// Puts a mark into the queue of a CPU, or into the only one. Calls `otherwise` if that cannot
    /// be done: where the kernel has no file that it could ask for pages of, and so no pages
    /// either, or where the mount is gone.
    pub(super) fn put(
        &self,
        mark: Mark,
        cpu: Option<usize>,
        otherwise: impl FnOnce() + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        self.thread.run(move || {
            cpu.inspect(|cpu| cpus::pin(*cpu));
            if !shared.put(mark) {
                otherwise();
            }
        });
    }

    pub(super) fn finish(&self) {
        self.thread.finish();
    }
}

impl Shared {
    fn put(&self, mark: Mark) -> bool {
        /// Most often one of the first few is a file.
        const FEW: usize = 64;
        let last = self.last.load(Ordering::Relaxed);
        let once = (last != 0).then_some(last);
        let nodes = [FEW, usize::MAX].into_iter().flat_map(|most| (self.nodes)(most));
        for node in once.into_iter().chain(nodes) {
            match mark.put(self.fd.as_fd(), node) {
                Ok(()) => {
                    self.last.store(node, Ordering::Relaxed);
                    return true;
                }
                // The kernel does not have this one any more, or it is not a file.
                Err(Errno::NOENT | Errno::INVAL) => {}
                Err(Errno::NODEV | Errno::NOTCONN | Errno::CONNABORTED) => return false,
                Err(error) => {
                    tracing::warn!(%error, "what only the kernel has may be missing in a sync or \
                        a snapshot");
                    return false;
                }
            }
        }
        false
    }
}

/// Does this request carry contents of a file?
pub(super) fn is_transfer(opcode: u32) -> bool {
    opcode == Opcode::Read as u32 || opcode == Opcode::Write as u32
}

/// May this transfer be a background request? A write is one if it comes from the page cache, or if
/// its caller may have gone on.
pub(super) fn may_be_background(opcode: u32, arg: &[u8]) -> bool {
    match WriteIn::read_from_prefix(arg) {
        Ok((write, _)) if opcode == Opcode::Write as u32 => {
            write.write_flags & WRITE_CACHE != 0
                || write.flags & libc::O_DIRECT.cast_unsigned() != 0
        }
        _ => is_transfer(opcode),
    }
}

type Then = Box<dyn FnOnce() + Send>;

/// A request that is held back.
pub(super) struct Drain {
    pub(super) number: u32,
    /// Transfers with a lower number than this are waited for.
    pub(super) before: u64,
    /// Queues that are not through yet.
    left: AtomicUsize,
    then: Mutex<Option<Then>>,
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain")
            .field("number", &self.number)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl Drain {
    /// Calls `then` when this many queues are [through](Self::through).
    pub(super) fn new(before: u64, queues: usize, then: impl FnOnce() + Send + 'static) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed) as u32;
        Self {
            number,
            before,
            left: AtomicUsize::new(queues),
            then: Mutex::new(Some(Box::new(then))),
        }
    }

    /// One queue has nothing more that is to be waited for.
    pub(super) fn through(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(then) = self.then.lock().take()
        {
            then();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn marks_come_back_as_they_were() {
        for (drain, queue) in [(0, 0), (7, 3), (u32::MAX, u16::MAX)] {
            let mark = Mark { drain, queue };
            assert_eq!(mark.unique() & 1, 0, "the kernel takes odd numbers for interrupts");
            let header = InHeader {
                opcode: Opcode::NotifyReply as u32,
                unique: mark.unique(),
                ..InHeader::default()
            };
            assert_eq!(Mark::of(&header), Some(mark));
            assert_eq!(Mark::of(&InHeader { opcode: Opcode::Write as u32, ..header }), None);
        }
    }

    #[test]
    fn the_last_queue_lets_go() {
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let drain = Drain::new(9, 3, move || flag.store(true, Ordering::SeqCst));
        drain.through();
        drain.through();
        assert!(!done.load(Ordering::SeqCst));
        drain.through();
        assert!(done.load(Ordering::SeqCst));
    }

    #[test]
    fn writes_that_somebody_waits_for_are_not_in_the_background() {
        let write = |write_flags, flags| WriteIn { write_flags, flags, ..WriteIn::default() };
        let background = |w: WriteIn| may_be_background(Opcode::Write as u32, w.as_bytes());
        assert!(!background(write(0, 0)));
        assert!(background(write(WRITE_CACHE, 0)));
        assert!(background(write(0, libc::O_DIRECT.cast_unsigned())));
        assert!(may_be_background(Opcode::Read as u32, &[0; 40]));
        assert!(!may_be_background(Opcode::Lookup as u32, &[]));
    }
}
