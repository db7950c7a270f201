//! FUSE over io_uring: one pinned thread per possible CPU, and on it one queue for each mount.
//!
//! The kernel puts a request into an entry of the queue of the CPU that its caller runs on. The
//! entry comes back with the answer and fetches the next request in the same submission. A queue's
//! ring is used by its own thread only. An entry whose request has to wait goes to a worker as a
//! whole. It comes back through the [`QueueInbox`], and an eventfd wakes the queue's thread to
//! commit it.
//!
//! Every queue must be registered before the kernel lets any request through, those of absent CPUs
//! included. Entries bound the requests that wait, so a queue registers more when few are left.
//!
//! The queues of all mounts on a CPU share its thread and its ring, since a daemon in its
//! [sandbox](crate::sandbox) can make no further rings. What belongs to one mount is a
//! [`MountQueue`]. It arrives through the [`ThreadInbox`], and leaves when the kernel has given all
//! of its entries back. `docs/FUSE.md` has the reasons.

mod inbox;
mod queue;
mod ring;

use super::{Dispatch, cpus, dev_fuse};
use crate::handler::Handler;
use crate::helper::Mounted;
use crate::priority;
use inbox::{MountInboxes, QueueInbox};
use parking_lot::Mutex;
use queue::{MountQueue, is_unmounted, place_of};
use ring::{CpuRing, WAKE};
use rustix::fs::OFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Entries of all queues of a mount together that keep a mebibyte of payload each.
const LARGE: usize = 48;
/// Bounds of such entries per queue.
const LARGE_PER_QUEUE: std::ops::RangeInclusive<usize> = 2..=24;
/// Most entries of all queues of a mount together, those included that are registered when they are
/// needed.
const ENTRIES: usize = super::MAX_WORKERS;

/// How many entries a queue has: first those that keep their memory, then all.
fn share(qid: usize, running: &[usize]) -> (usize, usize) {
    // A queue of an absent CPU has to exist, but no request comes from it.
    let share = |all: usize| if running.contains(&qid) { all / running.len() } else { 0 };
    let large = share(LARGE).clamp(*LARGE_PER_QUEUE.start(), *LARGE_PER_QUEUE.end());
    (large, share(ENTRIES).max(large))
}

/// A queue for a thread, and where to report whether the kernel accepted it.
type Arrival<H> = (MountQueue<H>, mpsc::SyncSender<io::Result<()>>);

/// New queues for a thread.
struct InboxState<H> {
    arrivals: Vec<Arrival<H>>,
    /// No further mounts come, or can come because the thread has ended.
    over: bool,
}

/// Where a thread gets new queues from.
struct ThreadInbox<H> {
    inbox: Mutex<InboxState<H>>,
    event: Arc<OwnedFd>,
}

impl<H> ThreadInbox<H> {
    fn new() -> io::Result<Self> {
        let event = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?);
        Ok(Self { inbox: Mutex::new(InboxState { arrivals: Vec::new(), over: false }), event })
    }
    fn send(&self, arrival: Arrival<H>) -> io::Result<()> {
        let mut inbox = self.inbox.lock();
        if inbox.over {
            return Err(io::Error::other("a queue's thread has ended"));
        }
        inbox.arrivals.push(arrival);
        drop(inbox);
        inbox::wake(&self.event);
        Ok(())
    }
    fn end(&self) {
        self.inbox.lock().over = true;
        inbox::wake(&self.event);
    }
}

/// The threads of all CPUs, each with its ring. Dropping them waits for their mounts.
pub(super) struct RingThreads<H>(Vec<ThreadHandle<H>>);

struct ThreadHandle<H> {
    thread_inbox: Arc<ThreadInbox<H>>,
    thread: Option<JoinHandle<()>>,
}

impl<H> std::fmt::Debug for RingThreads<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RingThreads").field(&self.0.len()).finish()
    }
}

impl<H: Handler> RingThreads<H> {
    /// Makes a ring and its thread for every possible CPU, without a mount yet.
    pub(super) fn start() -> io::Result<Self> {
        let count = cpus::possible();
        let running = cpus::running();
        let mut threads = Self(Vec::with_capacity(count));
        let mut started = Vec::with_capacity(count);
        for qid in 0..count {
            let (_, most) = share(qid, &running);
            let thread_inbox = Arc::new(ThreadInbox::new()?);
            let (ready, wait_ready) = mpsc::sync_channel(1);
            let own = Arc::clone(&thread_inbox);
            let id = u16::try_from(qid).map_err(io::Error::other)?;
            let thread = priority::spawn(format!("larder-ring-{qid}"), move || {
                cpus::pin(qid);
                // The ring belongs to the thread that makes it (SINGLE_ISSUER).
                match CpuRing::new(id, most, Arc::clone(&own.event)) {
                    Ok(ring) => {
                        let _ = ready.send(Ok(()));
                        RingThread {
                            ring,
                            thread_inbox: own,
                            queues: Vec::new(),
                            completed: Vec::new(),
                        }
                        .run();
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })?;
            threads.0.push(ThreadHandle { thread_inbox, thread: Some(thread) });
            started.push(wait_ready);
        }
        for ready in started {
            ready.recv().map_err(io::Error::other)??;
        }
        Ok(threads)
    }

    /// Makes the queues of a mount; nothing is registered yet.
    pub(super) fn prepare(
        self: &Arc<Self>,
        mounted: &Mounted,
        dispatch: &Arc<Dispatch<H>>,
    ) -> io::Result<MountQueues<H>> {
        let running = cpus::running();
        let (here, gone) = mpsc::sync_channel(0);
        let shares: Vec<_> = (0..self.0.len()).map(|qid| share(qid, &running)).collect();
        let inboxes = self.0.iter().zip(&shares).map(|(thread, (large, most))| {
            let event = Arc::clone(&thread.thread_inbox.event);
            Arc::new(QueueInbox::new(event, *large, *most))
        });
        let inboxes =
            Arc::new(MountInboxes { queues: inboxes.collect(), fences: dispatch.fences(mounted)? });
        let mut queues = Vec::with_capacity(self.0.len());
        for (qid, entries) in shares.into_iter().enumerate() {
            let own = dev_fuse::clone_fd(mounted.fuse_fd(), OFlags::empty());
            let fuse = own.map_or_else(|| mounted.fuse_fd().try_clone_to_owned(), Ok)?;
            let (dispatch, inboxes) = (Arc::clone(dispatch), Arc::clone(&inboxes));
            queues.push(MountQueue::new(entries, fuse, (inboxes, qid), dispatch, here.clone())?);
        }
        dispatch.drains.get_or_init(|| inboxes as _);
        Ok(MountQueues {
            threads: Arc::clone(self),
            queues: Mutex::new(queues),
            gone: Mutex::new(gone),
        })
    }
}

impl<H> Drop for RingThreads<H> {
    fn drop(&mut self) {
        for handle in &self.0 {
            handle.thread_inbox.end();
        }
        for handle in &mut self.0 {
            if let Some(thread) = handle.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// The queues of a mount. Dropping them waits for their end, which comes with that of the mount.
pub(super) struct MountQueues<H> {
    threads: Arc<RingThreads<H>>,
    /// Those that are not registered yet.
    queues: Mutex<Vec<MountQueue<H>>>,
    /// Hangs up when all queues are gone.
    gone: Mutex<mpsc::Receiver<()>>,
}

impl<H: Handler> MountQueues<H> {
    /// Number of queues.
    pub(super) fn len(&self) -> usize {
        self.threads.0.len()
    }

    /// Registers every queue. To be called after INIT was answered.
    pub(super) fn start(&self) -> io::Result<()> {
        let mut registered = Vec::with_capacity(self.len());
        for (queue, thread) in
            std::mem::take(&mut *self.queues.lock()).into_iter().zip(&self.threads.0)
        {
            let (report, reported) = mpsc::sync_channel(1);
            thread.thread_inbox.send((queue, report))?;
            registered.push(reported);
        }
        for reported in registered {
            reported.recv().map_err(io::Error::other)??;
        }
        Ok(())
    }
}

impl<H> Drop for MountQueues<H> {
    fn drop(&mut self) {
        self.queues.lock().clear();
        // Nothing is ever sent: this waits for the senders to go.
        let _ = self.gone.lock().recv();
    }
}

/// What a ring's thread works on.
struct RingThread<H> {
    /// Dropped first: entries belong to the kernel until the ring is gone.
    ring: CpuRing,
    thread_inbox: Arc<ThreadInbox<H>>,
    /// Queues of mounts, each at the place that its entries name.
    queues: Vec<Option<MountQueue<H>>>,
    /// Completions that came while entries were registered.
    completed: Vec<(u64, i32)>,
}

impl<H: Handler> RingThread<H> {
    /// Serves until no more mounts come and the last one is gone.
    fn run(mut self) {
        loop {
            // Completions that came while registering are served before the thread waits.
            let waits = self.completed.is_empty()
                && !self.queues.iter().flatten().any(MountQueue::has_long);
            if !self.ring.submit(usize::from(waits)) {
                return;
            }
            if let Err(error) = self.serve() {
                tracing::error!(queue = self.ring.id, %error, "io_uring submission failed");
                return;
            }
            if !self.send_fences() {
                return;
            }
            if self.thread_inbox.inbox.lock().over && self.queues.iter().all(Option::is_none) {
                return;
            }
        }
    }

    /// Serves what has come; of the long requests one for each mount.
    fn serve(&mut self) -> io::Result<()> {
        let mut completed = std::mem::take(&mut self.completed);
        self.ring.take_completed(&mut completed);
        for (user_data, result) in completed.drain(..) {
            self.done(user_data, result)?;
        }
        if self.completed.is_empty() {
            // Keeps its memory.
            self.completed = completed;
        }
        for place in &mut self.queues {
            let Some(queue) = place else { continue };
            queue.serve_long(&mut self.ring)?;
            if queue.is_over() {
                *place = None;
            }
        }
        Ok(())
    }

    fn done(&mut self, user_data: u64, result: i32) -> io::Result<()> {
        if user_data != WAKE {
            let (slot, index) = place_of(user_data);
            let queue = self.queues.get_mut(slot).and_then(Option::as_mut);
            return queue.map_or(Ok(()), |queue| queue.completed(&mut self.ring, index, result));
        }
        for queue in self.queues.iter_mut().flatten() {
            queue.read_inbox(&mut self.ring)?;
        }
        let arrivals = std::mem::take(&mut self.thread_inbox.inbox.lock().arrivals);
        for (queue, report) in arrivals {
            // The waiter may have given up.
            let _ = report.send(self.queue(queue));
        }
        self.ring.listen()
    }

    /// Begins to serve a mount.
    fn queue(&mut self, mut queue: MountQueue<H>) -> io::Result<()> {
        let slot = self.queues.iter().position(Option::is_none).unwrap_or(self.queues.len());
        queue.slot = slot;
        if slot == self.queues.len() {
            self.queues.push(None);
        }
        let queue = self.queues[slot].insert(queue);
        let registered = queue.register(&mut self.ring);
        if !self.ring.submit_all() {
            return Err(io::Error::other("io_uring failed"));
        }
        registered?;
        // A refused registration completes at once. Once every queue is there, so may a request
        // that was already waiting for the mount: it must not be lost.
        self.ring.take_completed(&mut self.completed);
        // The other queues serve already. If the mount was unmounted meanwhile, that is no refusal.
        let refused = self.completed.iter().find(|(user_data, result)| {
            *user_data != WAKE
                && place_of(*user_data).0 == slot
                && *result < 0
                && !is_unmounted(-result)
        });
        refused.map_or(Ok(()), |(_, result)| Err(io::Error::from_raw_os_error(-result)))
    }

    /// Goes on with the drains. False if the ring has failed.
    fn send_fences(&mut self) -> bool {
        let mut drained = self
            .queues
            .iter_mut()
            .flatten()
            .filter(|queue| queue.is_draining() && !queue.has_long());
        drained.all(|queue| queue.send_fences(&mut self.ring))
    }
}

impl<H> Drop for RingThread<H> {
    fn drop(&mut self) {
        let mut inbox = self.thread_inbox.inbox.lock();
        inbox.over = true;
        inbox.arrivals.clear();
    }
}
