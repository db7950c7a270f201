//! FUSE over io_uring: one pinned thread per possible CPU, and on it one queue for each mount.
//!
//! The kernel puts a request into an entry of the queue of the CPU that its caller runs on; the
//! entry comes back with the answer and fetches the next request in the same submission. A queue's
//! ring is used by its own thread only. That thread answers what needs no waiting; an entry whose
//! request has to wait goes to a worker as a whole — so nobody else can touch it — and comes back
//! through [`Returned`], whose eventfd wakes the queue's thread to commit it. Large writes are
//! served one at a time, after all short requests that are there: a lookup shall not wait for eight
//! copies of a mebibyte that came before it.
//!
//! Every queue must be registered before the kernel lets any request through, those of absent CPUs
//! included.
//!
//! An entry is taken until its request is answered, so that entries bound the requests that wait:
//! with a hundred callers in `fsync` the writes of others would stand still behind them. A queue
//! therefore registers more when those that wait leave the kernel few. A kernel cannot give entries
//! back; so these keep little memory, whatever they have carried.
//!
//! The queues of all mounts on a CPU share its thread and its ring. So a caller is answered by the
//! thread of its CPU, whichever mount it asks. And further mounts need no further rings, which a
//! daemon in its [sandbox](crate::sandbox) could not make. What belongs to one mount is a
//! [`MountQueue`]. It arrives by post when the mount is to be served, and leaves when the kernel
//! has given all of its entries back.

mod queue;
mod returned;
mod ring;

use super::{Dispatch, Drains, cpus, dev_fuse, priority};
use crate::handler::Handler;
use crate::mount::Mounted;
use parking_lot::Mutex;
use queue::{MountQueue, is_unmounted, place_of};
pub(super) use returned::Returned;
use ring::{CpuRing, WAKE};
use rustix::fs::OFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Entries of all queues of a mount together that keep a mebibyte of payload each.
const LARGE: usize = 48;
/// Of those, entries per queue.
const LARGE_PER_QUEUE: std::ops::RangeInclusive<usize> = 2..=24;
/// Entries of all queues of a mount together at most, those among them that are registered when
/// they are needed.
const ENTRIES: usize = super::MAX_WORKERS;

/// How many entries a queue has: those that keep their memory, and all.
fn share(qid: usize, running: &[usize]) -> (usize, usize) {
    // A queue of an absent CPU has to be there, but nobody calls from it.
    let share = |all: usize| if running.contains(&qid) { all / running.len() } else { 0 };
    let large = share(LARGE).clamp(*LARGE_PER_QUEUE.start(), *LARGE_PER_QUEUE.end());
    (large, share(ENTRIES).max(large))
}

/// A queue on its way to its thread, and where to say whether the kernel took it.
type Arrival<H> = (MountQueue<H>, mpsc::SyncSender<io::Result<()>>);

/// What a thread is to do besides serving.
struct Inbox<H> {
    arrivals: Vec<Arrival<H>>,
    /// No further mounts come. (Or can: the thread has ended.)
    over: bool,
}

/// The way to a thread.
struct Post<H> {
    inbox: Mutex<Inbox<H>>,
    event: Arc<OwnedFd>,
}

impl<H> Post<H> {
    fn new() -> io::Result<Self> {
        let event = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?);
        Ok(Self { inbox: Mutex::new(Inbox { arrivals: Vec::new(), over: false }), event })
    }
    fn send(&self, arrival: Arrival<H>) -> io::Result<()> {
        let mut inbox = self.inbox.lock();
        if inbox.over {
            return Err(io::Error::other("a queue's thread has ended"));
        }
        inbox.arrivals.push(arrival);
        drop(inbox);
        returned::wake(&self.event);
        Ok(())
    }
    fn end(&self) {
        self.inbox.lock().over = true;
        returned::wake(&self.event);
    }
}

/// The threads of all CPUs, each with its ring. Dropping them waits for their mounts.
pub(super) struct Threads<H>(Vec<Handle<H>>);

struct Handle<H> {
    post: Arc<Post<H>>,
    thread: Option<JoinHandle<()>>,
}

impl<H> std::fmt::Debug for Threads<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Threads").field(&self.0.len()).finish()
    }
}

impl<H: Handler> Threads<H> {
    /// Makes a ring and its thread for every possible CPU; they have no mount yet.
    pub(super) fn start() -> io::Result<Self> {
        let count = cpus::possible();
        let running = cpus::running();
        let mut threads = Self(Vec::with_capacity(count));
        let mut started = Vec::with_capacity(count);
        for qid in 0..count {
            let (_, most) = share(qid, &running);
            let post = Arc::new(Post::new()?);
            let (ready, wait_ready) = mpsc::sync_channel(1);
            let own = Arc::clone(&post);
            let id = u16::try_from(qid).map_err(io::Error::other)?;
            let thread = priority::spawn(format!("larder-ring-{qid}"), move || {
                cpus::pin(qid);
                // The ring belongs to the thread that makes it (SINGLE_ISSUER).
                match CpuRing::new(id, most, Arc::clone(&own.event)) {
                    Ok(ring) => {
                        let _ = ready.send(Ok(()));
                        Thread { ring, post: own, queues: Vec::new(), completed: Vec::new() }.run();
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })?;
            threads.0.push(Handle { post, thread: Some(thread) });
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
    ) -> io::Result<Rings<H>> {
        let running = cpus::running();
        let (here, gone) = mpsc::sync_channel(0);
        let mut mailboxes = Vec::with_capacity(self.0.len());
        let mut queues = Vec::with_capacity(self.0.len());
        for (qid, thread) in self.0.iter().enumerate() {
            let (large, most) = share(qid, &running);
            let own = dev_fuse::clone_fd(mounted.fuse_fd(), OFlags::empty());
            let fuse = own.map_or_else(|| mounted.fuse_fd().try_clone_to_owned(), Ok)?;
            let returned = Arc::new(Returned::new(Arc::clone(&thread.post.event), large, most));
            mailboxes.push(Arc::clone(&returned));
            queues.push(MountQueue::new(
                (large, most),
                fuse,
                returned,
                Arc::clone(dispatch),
                here.clone(),
            )?);
        }
        let marker = dispatch.marker(mounted)?;
        dispatch.drains.get_or_init(|| Drains::Queues(mailboxes, marker));
        Ok(Rings { threads: Arc::clone(self), queues: Mutex::new(queues), gone: Mutex::new(gone) })
    }
}

impl<H> Drop for Threads<H> {
    fn drop(&mut self) {
        for handle in &self.0 {
            handle.post.end();
        }
        for handle in &mut self.0 {
            if let Some(thread) = handle.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// The queues of a mount. Dropping them waits for their end, which is the mount's.
pub(super) struct Rings<H> {
    threads: Arc<Threads<H>>,
    /// Until they are registered.
    queues: Mutex<Vec<MountQueue<H>>>,
    /// Hangs up when all queues are gone.
    gone: Mutex<mpsc::Receiver<()>>,
}

impl<H: Handler> Rings<H> {
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
            let (say, said) = mpsc::sync_channel(1);
            thread.post.send((queue, say))?;
            registered.push(said);
        }
        for said in registered {
            said.recv().map_err(io::Error::other)??;
        }
        Ok(())
    }
}

impl<H> Drop for Rings<H> {
    fn drop(&mut self) {
        self.queues.lock().clear();
        // Nothing is ever sent.
        let _ = self.gone.lock().recv();
    }
}

/// A thread at work.
struct Thread<H> {
    /// Goes first: entries belong to the kernel until the ring is gone.
    ring: CpuRing,
    post: Arc<Post<H>>,
    /// Queues of mounts, each at the place that its entries name.
    queues: Vec<Option<MountQueue<H>>>,
    /// Completions that came while entries were registered.
    completed: Vec<(u64, i32)>,
}

impl<H: Handler> Thread<H> {
    /// Serves until no more mounts come and the last one is gone.
    fn run(mut self) {
        loop {
            // What came while registering is served before anything is waited for.
            let waits = self.completed.is_empty()
                && !self.queues.iter().flatten().any(MountQueue::has_long);
            if !self.ring.submit(usize::from(waits)) {
                return;
            }
            if let Err(error) = self.serve() {
                tracing::error!(queue = self.ring.id, %error, "io_uring submission failed");
                return;
            }
            if !self.put_marks() {
                return;
            }
            if self.post.inbox.lock().over && self.queues.iter().all(Option::is_none) {
                return;
            }
        }
    }

    /// Does what there is to do, of the long requests one for each mount.
    fn serve(&mut self) -> io::Result<()> {
        let mut completed = std::mem::take(&mut self.completed);
        self.ring.take_completed(&mut completed);
        for (user_data, result) in completed.drain(..) {
            self.done(user_data, result)?;
        }
        if self.completed.is_empty() {
            // Its memory.
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
            queue.look(&mut self.ring)?;
        }
        let arrivals = std::mem::take(&mut self.post.inbox.lock().arrivals);
        for (queue, say) in arrivals {
            // The waiter may have given up.
            let _ = say.send(self.queue(queue));
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
        // A refused registration completes at once — and so may, once every queue is there, the
        // request of somebody who was already waiting for the mount: it must not be lost.
        self.ring.take_completed(&mut self.completed);
        // The other queues serve already; somebody may even have unmounted, which is not a refusal.
        let refused = self.completed.iter().find(|(user_data, result)| {
            *user_data != WAKE
                && place_of(*user_data).0 == slot
                && *result < 0
                && !is_unmounted(-result)
        });
        refused.map_or(Ok(()), |(_, result)| Err(io::Error::from_raw_os_error(-result)))
    }

    /// Goes on with the drains. False if the ring is of no use any more.
    fn put_marks(&mut self) -> bool {
        let mut drained = self
            .queues
            .iter_mut()
            .flatten()
            .filter(|queue| queue.is_draining() && !queue.has_long());
        drained.all(|queue| queue.put_marks(&mut self.ring))
    }
}

impl<H> Drop for Thread<H> {
    fn drop(&mut self) {
        let mut inbox = self.post.inbox.lock();
        inbox.over = true;
        inbox.arrivals.clear();
    }
}
