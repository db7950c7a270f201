//! Waiting for what the kernel still has to write.
//!
//! A snapshot and a sync must have the pages that only the kernel has. A client calls `syncfs(2)`
//! before ([`crate::control::write_back_pages`]), but on a FUSE mount that returns when the WRITEs
//! are queued, not when they are answered. So such a request is held back by a [`Drain`] until the
//! writes before it have been answered ([`Handler::comes_after_writes`](crate::handler::Handler)).
//! No thread waits meanwhile, and newer requests are never waited for.
//!
//! The kernel's queues are first in, first out. A [`Fence`] is a message to ourselves that is put
//! in at the end: when it comes out, everything before it has come out, too. Behind that queue the
//! kernel keeps another one of background requests, which a fence does not pass. `docs/FUSE.md`
//! ("Fences") says what each transport does about that, and why it is enough.

use super::cpus;
use crate::proto::{InHeader, NodeId, Opcode, OutHeader, WRITE_CACHE, WriteIn};
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
pub(super) struct Fence {
    /// Number of the drain that it belongs to.
    pub(super) drain: u32,
    /// The queue that it was sent through.
    pub(super) queue: u16,
}

impl Fence {
    /// Set in fences. The numbers of requests count up from zero and do not reach it.
    const BIT: u64 = 1 << 62;

    /// As the number of a message. It is even, as those of requests are.
    fn unique(self) -> u64 {
        Self::BIT | u64::from(self.drain) << 17 | u64::from(self.queue) << 1
    }

    /// The fence in this message, if it is one.
    pub(super) fn of(header: &InHeader) -> Option<Self> {
        let ours = header.opcode == Opcode::NotifyReply as u32 && header.unique & Self::BIT != 0;
        ours.then_some(Self {
            drain: (header.unique >> 17) as u32,
            queue: (header.unique >> 1) as u16,
        })
    }

    /// Puts it into the queue: asks the kernel for no page at all of a file.
    fn send(self, fd: BorrowedFd<'_>, node: NodeId) -> Result<(), Errno> {
        let body =
            RetrieveOut { unique: self.unique(), node: node.0, offset: 0, size: 0, padding: 0 };
        let len = (size_of::<OutHeader>() + size_of::<RetrieveOut>()) as u32;
        let head = OutHeader { len, error: RETRIEVE, unique: 0 };
        rustix::io::writev(fd, &[IoSlice::new(head.as_bytes()), IoSlice::new(body.as_bytes())])
            .map(|_| ())
    }
}

/// The thread that sends fences.
///
/// No request waits for this thread. The kernel looks the file up. If the file is being deleted at
/// that moment, the look-up waits until the pages that are on their way have been written.
pub(super) struct FenceSender {
    thread: Workers,
    shared: Arc<SenderState>,
}

struct SenderState {
    fd: OwnedFd,
    /// Nodes of any kind that the kernel may know, up to a number of them.
    nodes: Box<dyn Fn(usize) -> Vec<NodeId> + Send + Sync>,
    /// The file that the last fence was sent with; 0 for none.
    last: AtomicU64,
}

impl fmt::Debug for FenceSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceSender").field("thread", &self.thread).finish_non_exhaustive()
    }
}

impl FenceSender {
    /// For the mount of this descriptor.
    pub(super) fn new(
        fd: OwnedFd,
        nodes: impl Fn(usize) -> Vec<NodeId> + Send + Sync + 'static,
    ) -> Self {
        let shared = SenderState { fd, nodes: Box::new(nodes), last: AtomicU64::new(0) };
        Self { thread: Workers::new("larder-fence", 1, usize::MAX), shared: Arc::new(shared) }
    }

    /// Sends a fence through the queue of a CPU, or through the only one. If that cannot be done,
    /// calls `otherwise`: the kernel has no file, and so no pages either, or the mount is gone.
    pub(super) fn send(
        &self,
        fence: Fence,
        cpu: Option<usize>,
        otherwise: impl FnOnce() + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        self.thread.run(move || {
            cpu.inspect(|cpu| cpus::pin(*cpu));
            if !shared.send(fence) {
                otherwise();
            }
        });
    }

    pub(super) fn finish(&self) {
        self.thread.finish();
    }
}

impl SenderState {
    fn send(&self, fence: Fence) -> bool {
        /// One of the first few is nearly always a file.
        const FEW: usize = 64;
        let last = self.last.load(Ordering::Relaxed);
        let once = (last != 0).then_some(NodeId(last));
        let nodes = [FEW, usize::MAX].into_iter().flat_map(|most| (self.nodes)(most));
        for node in once.into_iter().chain(nodes) {
            match fence.send(self.fd.as_fd(), node) {
                Ok(()) => {
                    self.last.store(node.0, Ordering::Relaxed);
                    return true;
                }
                // The kernel does not have this node any more, or it is not a file.
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

/// Does this request carry contents of a file? Such a request is a transfer.
pub(super) fn is_transfer(opcode: u32) -> bool {
    opcode == Opcode::Read as u32 || opcode == Opcode::Write as u32
}

/// May this transfer be a background request? A write is one if it comes from the page cache, or if
/// its caller does not wait for it.
pub(super) fn may_be_background(opcode: u32, arg: &[u8]) -> bool {
    match WriteIn::read_from_prefix(arg) {
        Ok((write, _)) if opcode == Opcode::Write as u32 => {
            write.write_flags & WRITE_CACHE != 0
                || write.flags & libc::O_DIRECT.cast_unsigned() != 0
        }
        _ => is_transfer(opcode),
    }
}

pub(super) type Then = Box<dyn FnOnce() + Send>;

/// The queues or readers of a mount that take part in a drain.
pub(super) trait Participants: Send + Sync {
    /// Calls `then` when none of them has a transfer left with a lower number than `before`.
    fn drain(self: Arc<Self>, before: u64, then: Then);
    /// Ends the thread that sends fences.
    fn finish(&self);
}

/// A request that is held back.
pub(super) struct Drain {
    pub(super) number: u32,
    /// It waits for transfers with a lower number than this.
    pub(super) before: u64,
    /// Queues that still have such transfers.
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
    /// Calls `then` when this many queues are [done](Self::queue_done).
    pub(super) fn new(before: u64, queues: usize, then: Then) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed) as u32;
        Self { number, before, left: AtomicUsize::new(queues), then: Mutex::new(Some(then)) }
    }

    /// One queue has no transfer left to wait for.
    pub(super) fn queue_done(&self) {
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
            let fence = Fence { drain, queue };
            assert_eq!(fence.unique() & 1, 0, "the kernel takes odd numbers for interrupts");
            let header = InHeader {
                opcode: Opcode::NotifyReply as u32,
                unique: fence.unique(),
                ..InHeader::default()
            };
            assert_eq!(Fence::of(&header), Some(fence));
            assert_eq!(Fence::of(&InHeader { opcode: Opcode::Write as u32, ..header }), None);
        }
    }

    #[test]
    fn the_last_queue_lets_go() {
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let drain = Drain::new(9, 3, Box::new(move || flag.store(true, Ordering::SeqCst)));
        drain.queue_done();
        drain.queue_done();
        assert!(!done.load(Ordering::SeqCst));
        drain.queue_done();
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
