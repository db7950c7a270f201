//! Answering one request, whichever transport brought it.
//!
//! A [`Dispatch`] belongs to one mount. It calls the handler, keeps the counters, turns a panic
//! into `EIO`, and has the threads to which requests move that have to wait. It also knows the
//! look-ups that the kernel has given back and of which the handler does not know yet.

use super::drain;
use crate::deferred::DeferredReply;
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Handler, Reply, Request, Service};
use crate::helper::Mounted;
use crate::proto::{BatchForgetIn, ForgetIn, ForgetOne, InHeader, NodeId, Opcode};
use crate::stats::Stats;
use crate::workers::Workers;
use parking_lot::Mutex;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use zerocopy::FromBytes;

/// Most threads that wait at the same time.
pub(super) const MAX_WORKERS: usize = 256;
/// Most threads that wait for the kernel at the same time. There are at least as many as
/// [`Permits`]. So no request stands in line behind others that may be waiting for this very one.
const MAX_KERNEL_WAITERS: usize = 256;

/// A request as it lies in a transport's buffers.
#[derive(Clone, Copy)]
pub(crate) struct RawRequest<'a> {
    pub(crate) header: InHeader,
    pub(crate) arg: &'a [u8],
    pub(crate) data: &'a [u8],
}

/// Bounds how many requests of one kind of buffer wait at the same time.
///
/// A request that waits for the kernel keeps its buffer. The kernel may have locked a page and be
/// waiting for another request to fill it. A buffer must be left for that request.
#[derive(Debug)]
pub(crate) struct Permits(AtomicUsize);

impl Permits {
    pub(crate) fn new(most: usize) -> Self {
        Self(AtomicUsize::new(most))
    }
    /// Takes a permit. False if there is none left.
    pub(super) fn acquire(&self) -> bool {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok()
    }
    pub(super) fn release(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
    /// Releases the permit of an answer in this context, if it took one.
    pub(crate) fn release_after(&self, context: ExecContext) {
        if context == ExecContext::MayWaitForKernel {
            self.release();
        }
    }
}

/// What every transport needs to answer a request.
pub(crate) struct Dispatch<H> {
    handler: Arc<H>,
    pub(crate) stats: Arc<Stats>,
    workers: Workers,
    /// Threads for [`ExecContext::MayWaitForKernel`]. They wait until the kernel has got the
    /// answers of other requests, so no other request may ever have to wait for one of these
    /// threads.
    kernel_waiters: Workers,
    forgets: Mutex<Forgets>,
    /// Held by a thread that forgets and is no reader.
    forgetting: Mutex<()>,
    /// Set beside io_uring.
    pub(super) forget_source: OnceLock<Arc<dyn ForgetSource<H>>>,
    /// Set when requests come from a kernel.
    pub(super) drains: OnceLock<Arc<dyn drain::Participants>>,
}

/// Reads what the kernel gives back beside the queues.
pub(super) trait ForgetSource<H>: Send + Sync {
    /// Returns when the messages that had arrived have been handled. Later ones may still be there.
    fn read_all(&self, dispatch: &Arc<Dispatch<H>>);
}

/// An inode of which the kernel gives look-ups back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forgotten {
    node: NodeId,
    lookups: u64,
}

/// Look-ups that the kernel has given back and the handler does not know of yet.
#[derive(Debug, Default)]
struct Forgets {
    list: Vec<Forgotten>,
    /// A worker is telling the handler.
    under_way: bool,
}

impl<H> std::fmt::Debug for Dispatch<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatch").field("workers", &self.workers).finish_non_exhaustive()
    }
}

impl<H> Dispatch<H> {
    pub(super) fn new(handler: Arc<H>, stats: Arc<Stats>) -> Self {
        Self {
            handler,
            stats,
            workers: Workers::new("larder-worker", MAX_WORKERS, MAX_WORKERS),
            // The line has no bound, because the caller must not run such a job itself.
            kernel_waiters: Workers::new("larder-kwait", MAX_KERNEL_WAITERS, usize::MAX),
            forgets: Mutex::default(),
            forgetting: Mutex::default(),
            forget_source: OnceLock::new(),
            drains: OnceLock::new(),
        }
    }

    /// Where a request goes on that failed like this: the threads, and their context. `None`: it
    /// does not go on. [`ExecContext::MayWaitForKernel`] takes a permit, which has to be released.
    pub(crate) fn pool_for(
        &self,
        failure: Failure,
        kernel_waits: &Permits,
    ) -> Option<(&Workers, ExecContext)> {
        match failure {
            Failure::Errno(_) => None,
            Failure::Wait => Some((&self.workers, ExecContext::Worker)),
            Failure::WaitForKernel if kernel_waits.acquire() => {
                Some((&self.kernel_waiters, ExecContext::MayWaitForKernel))
            }
            Failure::WaitForKernel => Some((&self.workers, ExecContext::NotifyAfterReply)),
        }
    }

    /// Waits for everything that is under way.
    pub(super) fn finish(&self) {
        // Workers first: they may still give a request to a kernel waiter.
        self.workers.finish();
        self.kernel_waiters.finish();
        if let Some(participants) = self.drains.get() {
            participants.finish();
        }
    }
}

impl<H: Handler> Dispatch<H> {
    /// The sender of fences for this mount.
    pub(super) fn fences(&self, mounted: &Mounted) -> io::Result<drain::FenceSender> {
        let handler = Arc::clone(&self.handler);
        Ok(drain::FenceSender::new(mounted.fuse_fd().try_clone_to_owned()?, move |most| {
            handler.nodes_in_use(most)
        }))
    }

    /// Counts a request that has just arrived.
    pub(crate) fn arrived(&self, header: &InHeader) {
        self.stats.request(header.opcode);
    }

    /// Answers a request into `out`. Returns the bytes of the body, or why there is none: a request
    /// of a kind that is not served on a queue's thread has to wait there. A panic of the handler
    /// becomes EIO.
    pub(crate) fn answer(
        self: &Arc<Self>,
        raw: RawRequest<'_>,
        out: &mut [u8],
        context: ExecContext,
    ) -> Result<usize, Failure> {
        let Some(opcode) = Opcode::from_number(raw.header.opcode) else {
            return Err(Failure::Errno(Errno::NOSYS));
        };
        if context == ExecContext::Queue && self.handler.service(opcode) != Service::Queue {
            self.stats.deferral();
            return Err(Failure::Wait);
        }
        let request = Request { header: raw.header, opcode, arg: raw.arg, data: raw.data };
        if context != ExecContext::Queue && self.handler.comes_after_forgets(&request) {
            self.wait_for_forgets();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.handler.handle(&request, &mut Reply::new(out), context)
        }));
        let outcome = outcome.unwrap_or_else(|_| {
            self.stats.panic();
            tracing::error!(
                opcode = opcode.name(),
                node = raw.header.nodeid,
                "internal error while serving"
            );
            Err(Failure::Errno(Errno::IO))
        });
        match outcome {
            Ok(n) => {
                match opcode {
                    Opcode::Read => self.stats.read_bytes(n),
                    Opcode::Write => self.stats.written_bytes(raw.data.len()),
                    _ => {}
                }
                Ok(n)
            }
            Err(failure @ (Failure::Wait | Failure::WaitForKernel)) => {
                let final_word = matches!(
                    context,
                    ExecContext::MayWaitForKernel | ExecContext::NotifyAfterReply
                );
                if final_word || (failure, context) == (Failure::Wait, ExecContext::Worker) {
                    tracing::error!(
                        opcode = opcode.name(),
                        "a thread that waits was told to wait elsewhere"
                    );
                    self.stats.error();
                    return Err(Failure::Errno(Errno::IO));
                }
                self.stats.deferral();
                Err(failure)
            }
            Err(e) => {
                self.stats.error();
                Err(e)
            }
        }
    }

    /// Must this request come after all writes that were under way when it was sent?
    pub(super) fn comes_after_writes(&self, raw: RawRequest<'_>) -> bool {
        let opcode = Opcode::from_number(raw.header.opcode);
        opcode.is_some_and(|opcode| {
            let request = Request { header: raw.header, opcode, arg: raw.arg, data: raw.data };
            self.handler.comes_after_writes(&request)
        })
    }

    /// Calls `then` when no transfer with a lower number than `before` is left; on any thread, and
    /// at once if no transfer can be under way.
    pub(super) fn after_writes(&self, before: u64, then: impl FnOnce() + Send + 'static) {
        match self.drains.get() {
            Some(participants) => Arc::clone(participants).drain(before, Box::new(then)),
            None => then(),
        }
    }

    /// Is a request in this context answered through [`answer_deferred`](Self::answer_deferred)?
    pub(crate) fn defers_reply(&self, header: &InHeader, context: ExecContext) -> bool {
        let opcode = Opcode::from_number(header.opcode);
        context == ExecContext::Worker
            && opcode.is_some_and(|opcode| self.handler.service(opcode) == Service::Deferred)
    }

    /// Lets the handler answer a request through `send`, now or later.
    pub(crate) fn answer_deferred(
        &self,
        raw: RawRequest<'_>,
        send: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        let deferred = DeferredReply::new(&self.workers, &self.stats, send);
        let Some(opcode) = Opcode::from_number(raw.header.opcode) else {
            return deferred.answer(Err(Errno::NOSYS));
        };
        let request = Request { header: raw.header, opcode, arg: raw.arg, data: raw.data };
        // If the handler panics, the reply is dropped, which answers `EIO`.
        if catch_unwind(AssertUnwindSafe(|| self.handler.handle_deferred(&request, deferred)))
            .is_err()
        {
            self.stats.panic();
            tracing::error!(
                opcode = opcode.name(),
                node = raw.header.nodeid,
                "internal error while serving"
            );
        }
    }

    /// The inodes that a message without a reply forgets, possibly none. `None`: the message is an
    /// ordinary request.
    pub(crate) fn parse_forgets(
        &self,
        message: &[u8],
        header: &InHeader,
    ) -> Option<Vec<Forgotten>> {
        let body = message.get(size_of::<InHeader>()..).unwrap_or_default();
        let mut forgotten = Vec::new();
        match Opcode::from_number(header.opcode) {
            Some(Opcode::Forget) => {
                if let Ok((f, _)) = ForgetIn::read_from_prefix(body) {
                    forgotten.push(Forgotten { node: header.node(), lookups: f.nlookup });
                }
            }
            Some(Opcode::BatchForget) => {
                if let Ok((head, mut rest)) = BatchForgetIn::read_from_prefix(body) {
                    for _ in 0..head.count {
                        let Ok((one, tail)) = ForgetOne::read_from_prefix(rest) else { break };
                        let node = NodeId(one.nodeid);
                        forgotten.push(Forgotten { node, lookups: one.nlookup });
                        rest = tail;
                    }
                }
            }
            // Requests are short or can no longer be undone: none is stopped half-way.
            Some(Opcode::Interrupt) => {}
            _ => return None,
        }
        self.stats.forget(forgotten.len() as u64);
        Some(forgotten)
    }

    /// Returns when the handler knows of everything that the kernel has forgotten so far. Without
    /// io_uring, a message that a reader is just taking in may be missing.
    fn wait_for_forgets(self: &Arc<Self>) {
        if let Some(source) = self.forget_source.get() {
            source.read_all(self);
        }
        let _forgetting = self.forgetting.lock();
        let list = std::mem::take(&mut self.forgets.lock().list);
        self.forget(&list);
    }

    /// Passes these on to the handler. That takes a while when the last look-up of a deleted file
    /// goes, because the file's space is given back.
    pub(crate) fn forget(&self, list: &[Forgotten]) {
        for &Forgotten { node, lookups } in list {
            if lookups > 0
                && catch_unwind(AssertUnwindSafe(|| self.handler.forget(node, lookups))).is_err()
            {
                self.stats.panic();
                tracing::error!(node = node.0, "internal error while forgetting an inode");
            }
        }
    }

    /// Forgets on a worker.
    pub(super) fn forget_on_worker(self: &Arc<Self>, list: &[Forgotten]) {
        /// If more are due, the reader helps: it is faster than the worker.
        const MOST: usize = 16 << 10;
        if list.is_empty() {
            return;
        }
        let mut forgets = self.forgets.lock();
        if forgets.list.len() >= MOST {
            drop(forgets);
            return self.forget(list);
        }
        forgets.list.extend_from_slice(list);
        if std::mem::replace(&mut forgets.under_way, true) {
            return;
        }
        drop(forgets);
        let this = Arc::clone(self);
        self.workers.run(move || {
            loop {
                let _forgetting = this.forgetting.lock();
                let mut forgets = this.forgets.lock();
                let list = std::mem::take(&mut forgets.list);
                if list.is_empty() {
                    forgets.under_way = false;
                    return;
                }
                drop(forgets);
                this.forget(&list);
            }
        });
    }
}
