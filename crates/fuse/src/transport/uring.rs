//! FUSE over io_uring: one queue and one pinned thread per possible CPU.
//!
//! The kernel puts a request into an entry of the queue of the CPU that its caller runs on; the entry comes back with the
//! answer and fetches the next request in the same submission. A queue's ring is used by its own thread only. That thread answers
//! what needs no waiting; an entry whose request has to wait goes to a worker as a whole — so nobody else can touch it — and
//! comes back through [`Returned`], whose eventfd wakes the queue's thread to commit it. Large writes are served one at a time,
//! after all short requests that are there: a lookup shall not wait for eight copies of a mebibyte that came before it.
//!
//! Every queue must be registered before the kernel lets any request through, those of absent CPUs included.
//!
//! An entry is taken until its request is answered, so that entries bound the requests that wait: with a hundred callers in
//! `fsync` the writes of others would stand still behind them. A queue therefore registers more when those that wait leave the
//! kernel few. A kernel cannot give entries back; so these keep little memory, whatever they have carried.

use super::drain::{self, Drain, Mark};
use super::memory::{self, Entry};
use super::{Dispatch, Drains, Loans, Raw, cpus, priority};
use crate::handler::{Failure, Handler, Patience};
use crate::mount::Mounted;
use crate::proto::{InHeader, Opcode, RingCommand};
use io_uring::register::Restriction;
use io_uring::squeue::{self, Entry128};
use io_uring::types::Fixed;
use io_uring::{IoUring, cqueue, opcode};
use parking_lot::Mutex;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

type Ring = IoUring<Entry128, cqueue::Entry>;

/// Submission commands of FUSE.
const CMD_REGISTER: u32 = 1;
const CMD_COMMIT_AND_FETCH: u32 = 2;
/// User data of the read that wakes a queue.
const WAKE: u64 = u64::MAX;
/// Entries of all queues together that keep a mebibyte of payload each.
const LARGE: usize = 48;
/// Of those, entries per queue.
const LARGE_PER_QUEUE: std::ops::RangeInclusive<usize> = 2..=24;
/// Entries of all queues together at most, those among them that are registered when they are needed.
const ENTRIES: usize = super::MAX_WORKERS;
/// Writes of up to so many bytes are served in their turn.
const SHORT: usize = 128 << 10;
/// Payload that the others keep in memory: 64 MiB in all, with that of the large ones.
const KEPT: usize = 64 << 10;

/// What other threads have for a queue's thread: entries that workers have finished, to be committed, and news of drains.
pub(super) struct Returned {
    entries: Mutex<Vec<Entry>>,
    news: Mutex<News>,
    event: OwnedFd,
    /// Entries that may be away until the kernel has got something through the others.
    loans: Loans,
    /// Entries that may be held back by a drain, whose marks come through the others.
    held_back: Loans,
}

#[derive(Default)]
struct News {
    begun: Vec<Arc<Drain>>,
    /// Numbers of drains whose mark came out of another queue, because that queue's thread was not on its CPU.
    marks: Vec<u32>,
    /// Numbers of drains whose mark could not be put in, because the kernel has no files or the mount is gone.
    needless: Vec<u32>,
    /// The thread has ended.
    over: bool,
}

impl std::fmt::Debug for Returned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Returned").finish_non_exhaustive()
    }
}

impl Returned {
    /// For a queue of so many entries that keep their memory, and at most so many in all.
    fn new(large: usize, most: usize) -> io::Result<Self> {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let (loans, held_back) = (Loans::new(large / 2), Loans::new((most / 4).max(1)));
        Ok(Self { entries: Mutex::default(), news: Mutex::default(), event, loans, held_back })
    }
    fn wake(&self) {
        // A full counter (the only error) means that the wake-up is already on its way.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
    fn give(&self, entry: Entry) {
        let mut entries = self.entries.lock();
        entries.push(entry);
        if entries.len() == 1 {
            self.wake();
        }
    }
    fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut self.entries.lock())
    }
    /// Has the queue take part in a drain.
    pub(super) fn drain(&self, drain: &Arc<Drain>) {
        let mut news = self.news.lock();
        if news.over {
            drop(news);
            return drain.through();
        }
        news.begun.push(Arc::clone(drain));
        drop(news);
        self.wake();
    }
    fn needs_no_mark(&self, drain: u32) {
        self.news.lock().needless.push(drain);
        self.wake();
    }
    fn mark_came_out(&self, drain: u32) {
        self.news.lock().marks.push(drain);
        self.wake();
    }
}

/// A drain that a queue takes part in.
struct Draining {
    drain: Arc<Drain>,
    /// Marks that were put in.
    marks: u32,
    /// One is on its way.
    under_way: bool,
    /// No transfer that is waited for has come since it was put in.
    clean: bool,
}

/// The rings of a session, ready to be registered. Dropping waits for their threads.
#[derive(Debug)]
pub(super) struct Rings {
    queues: Vec<Handle>,
}

#[derive(Debug)]
struct Handle {
    /// Go ahead and register; dropping it instead ends the thread.
    go: Option<mpsc::SyncSender<()>>,
    registered: mpsc::Receiver<io::Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Rings {
    /// Makes a ring and its thread for every possible CPU; nothing is registered yet.
    pub(super) fn prepare<H: Handler>(mounted: &Mounted, dispatch: &Arc<Dispatch<H>>) -> io::Result<Self> {
        let count = cpus::possible();
        let running = cpus::running();
        // A queue of an absent CPU has to be there, but nobody calls from it.
        let share = |all: usize, qid| if running.contains(&qid) { all / running.len() } else { 0 };
        let mut rings = Self { queues: Vec::with_capacity(count) };
        let mut mailboxes = Vec::with_capacity(count);
        for qid in 0..count {
            let large = share(LARGE, qid).clamp(*LARGE_PER_QUEUE.start(), *LARGE_PER_QUEUE.end());
            let most = share(ENTRIES, qid).max(large);
            let fd = mounted.fuse_fd().try_clone_to_owned()?;
            let (go, wait_go) = mpsc::sync_channel(1);
            let (ready, wait_ready) = mpsc::sync_channel(2);
            let returned = Arc::new(Returned::new(large, most)?);
            mailboxes.push(Arc::clone(&returned));
            let dispatch = Arc::clone(dispatch);
            let id = u16::try_from(qid).map_err(io::Error::other)?;
            let thread = priority::spawn(format!("larder-ring-{qid}"), move || {
                cpus::pin(qid);
                // The ring belongs to the thread that makes it (SINGLE_ISSUER).
                match Queue::new(id, large, most, &fd, returned, dispatch) {
                    Ok(mut queue) => {
                        let _ = ready.send(Ok(()));
                        if wait_go.recv().is_ok() {
                            let registered = queue.register();
                            let failed = registered.is_err();
                            let _ = ready.send(registered);
                            if !failed {
                                queue.run();
                            }
                        }
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })?;
            rings.queues.push(Handle { go: Some(go), registered: wait_ready, thread: Some(thread) });
        }
        for queue in &rings.queues {
            queue.registered.recv().map_err(io::Error::other)??;
        }
        let marker = dispatch.marker(mounted)?;
        dispatch.drains.get_or_init(|| Drains::Queues(mailboxes, marker));
        Ok(rings)
    }

    /// Number of queues.
    pub(super) fn len(&self) -> usize {
        self.queues.len()
    }

    /// Registers every queue. To be called after INIT was answered.
    pub(super) fn start(&self) -> io::Result<()> {
        for queue in &self.queues {
            if let Some(go) = &queue.go {
                go.send(()).map_err(io::Error::other)?;
            }
        }
        for queue in &self.queues {
            queue.registered.recv().map_err(io::Error::other)??;
        }
        Ok(())
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        for queue in &mut self.queues {
            queue.go = None;
        }
        for queue in &mut self.queues {
            if let Some(thread) = queue.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// Does this error of an entry say that the mount is gone?
fn is_unmounted(error: i32) -> bool {
    matches!(error, libc::ENOTCONN | libc::ECONNABORTED)
}

/// One queue, used by its own thread only.
struct Queue<H> {
    id: u16,
    ring: Ring,
    /// Entries that the kernel has; `None` while one is here or with a worker.
    with_kernel: Vec<Option<Entry>>,
    /// Entries that still can carry requests.
    live: usize,
    /// How many of `with_kernel` are there.
    armed: usize,
    /// Entries up to this index keep what they have carried in memory.
    large: usize,
    /// Entries that are not registered yet.
    spare: Vec<Entry>,
    returned: Arc<Returned>,
    /// Completions that came while the entries were registered.
    early: Vec<(u64, i32)>,
    /// Where the eventfd is read into.
    wake_buffer: Box<[u8; 8]>,
    /// A read of the eventfd is under way.
    listening: bool,
    /// Copy of the last request's names: the reply goes where they came in.
    names: Vec<u8>,
    /// Requests that take long. All others that are there go first, and those that have come meanwhile go before the next.
    long: VecDeque<(Entry, InHeader, usize)>,
    /// The drains that it takes part in.
    draining: Vec<Draining>,
    /// Numbers of the transfers that are with workers.
    away: BTreeSet<u64>,
    dispatch: Arc<Dispatch<H>>,
}

impl<H: Handler> Queue<H> {
    fn new(
        id: u16,
        large: usize,
        most: usize,
        fd: &OwnedFd,
        returned: Arc<Returned>,
        dispatch: Arc<Dispatch<H>>,
    ) -> io::Result<Self> {
        let slots = u32::try_from(most + 1).map_err(io::Error::other)?.next_power_of_two();
        let ring: Ring = IoUring::builder()
            .dontfork()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_submit_all()
            .setup_r_disabled()
            .build(slots)?;
        ring.submitter().register_files(&[fd.as_raw_fd(), returned.event.as_raw_fd()])?;
        // What a ring does passes no filter of system calls: it shall be able to do just what is done here.
        ring.submitter().register_restrictions(&mut [
            Restriction::sqe_op(opcode::UringCmd80::CODE),
            Restriction::sqe_op(opcode::Read::CODE),
            Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()),
        ])?;
        ring.submitter().register_enable_rings()?;
        let mut first = memory::entries(most)?;
        let mut spare = first.split_off(large);
        // The next one is the last.
        spare.reverse();
        let mut with_kernel: Vec<Option<Entry>> = first.into_iter().map(Some).collect();
        with_kernel.resize_with(most, || None);
        Ok(Self {
            id,
            ring,
            live: large,
            armed: large,
            large,
            spare,
            early: Vec::new(),
            with_kernel,
            returned,
            wake_buffer: Box::new([0; 8]),
            listening: false,
            names: Vec::new(),
            long: VecDeque::new(),
            draining: Vec::new(),
            away: BTreeSet::new(),
            dispatch,
        })
    }

    /// Hands all entries to the kernel.
    fn register(&mut self) -> io::Result<()> {
        let first: Vec<Entry128> =
            self.with_kernel.iter().flatten().map(|entry| command(self.id, entry)).collect();
        for submission in first {
            self.push(submission)?;
        }
        self.arm_wake()?;
        self.ring.submit()?;
        // A refused registration completes at once — and so may, once every queue is there, the request of somebody who
        // was already waiting for the mount: it must not be lost.
        self.early.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
        // The other queues serve already; somebody may even have unmounted, which is not a refusal.
        let refused = self
            .early
            .iter()
            .find(|(user_data, result)| *user_data != WAKE && *result < 0 && !is_unmounted(-result));
        refused.map_or(Ok(()), |(_, result)| Err(io::Error::from_raw_os_error(-result)))
    }

    fn push(&mut self, submission: Entry128) -> io::Result<()> {
        // SAFETY: what the submission points to — an entry's memory, the wake buffer — belongs to this queue and
        // outlives the ring (see `drop`); entries are not touched while the kernel has them.
        unsafe { self.ring.submission().push(&submission) }.map_err(io::Error::other)
    }

    fn arm_wake(&mut self) -> io::Result<()> {
        let read = opcode::Read::new(Fixed(1), self.wake_buffer.as_mut_ptr(), 8).build().user_data(WAKE);
        self.push(read.into())?;
        self.listening = true;
        Ok(())
    }

    /// Serves until the mount is gone.
    fn run(&mut self) {
        let mut completed = std::mem::take(&mut self.early);
        while self.live > 0 {
            // What came while registering is served before anything is waited for.
            if !self.submit(usize::from(completed.is_empty() && self.long.is_empty())) {
                return;
            }
            completed.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
            let mut done = completed.drain(..).try_for_each(|(user, result)| self.completed(user, result));
            if let Some((entry, header, len)) = self.long.pop_front() {
                done = done.and_then(|()| self.serve(entry, header, len));
            }
            if let Err(error) = done {
                tracing::error!(queue = self.id, %error, "io_uring submission failed");
                return;
            }
            if !self.draining.is_empty() && self.long.is_empty() && !self.put_marks() {
                return;
            }
        }
    }

    /// Submits, and waits until there are this many completions. False if the ring is of no use any more.
    fn submit(&mut self, completions: usize) -> bool {
        let submitted =
            if completions > 0 { self.ring.submit_and_wait(completions) } else { self.ring.submit() };
        match submitted {
            Ok(_) => true,
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => true,
            Err(error) => {
                tracing::error!(queue = self.id, %error, "io_uring failed");
                false
            }
        }
    }

    /// Goes on with the drains, when all that has come out of the queue has been seen. False as for `submit`.
    fn put_marks(&mut self) -> bool {
        // The kernel lets further requests into the queue for those that it has the answers of: behind a mark, they would
        // be missed.
        while !self.ring.submission().is_empty() {
            if !self.submit(0) {
                return false;
            }
        }
        for draining in &mut self.draining {
            let oldest_away = self.away.first().copied().unwrap_or(u64::MAX);
            if draining.under_way || oldest_away < draining.drain.before {
                continue;
            }
            let mark = Mark { drain: draining.drain.number, queue: self.id };
            (draining.under_way, draining.clean) = (true, true);
            draining.marks += 1;
            let returned = Arc::clone(&self.returned);
            let otherwise = move || returned.needs_no_mark(mark.drain);
            if let Some(Drains::Queues(_, marker)) = self.dispatch.drains.get() {
                marker.put(mark, Some(self.id.into()), otherwise);
            }
        }
        true
    }

    /// A mark has come out of the kernel's queue.
    fn mark_came_out(&mut self, drain: u32) {
        let Some(at) = self.draining.iter().position(|d| d.drain.number == drain) else { return };
        let draining = &mut self.draining[at];
        draining.under_way = false;
        // See the head of `drain` for why the first says nothing.
        if draining.clean && draining.marks > 1 {
            self.draining.swap_remove(at).drain.through();
        }
    }

    fn completed(&mut self, user_data: u64, result: i32) -> io::Result<()> {
        if user_data == WAKE {
            self.listening = false;
            for entry in self.returned.take() {
                self.away.remove(&entry.commit_id);
                self.hand_over(entry)?;
            }
            let news = std::mem::take(&mut *self.returned.news.lock());
            let begun = news.begun.into_iter();
            self.draining.extend(begun.map(|drain| Draining {
                drain,
                marks: 0,
                under_way: false,
                clean: false,
            }));
            for drain in news.marks {
                self.mark_came_out(drain);
            }
            for gone in self.draining.extract_if(.., |d| news.needless.contains(&d.drain.number)) {
                gone.drain.through();
            }
            return self.arm_wake();
        }
        let slot = usize::try_from(user_data).ok().and_then(|i| self.with_kernel.get_mut(i));
        let Some(mut entry) = slot.and_then(Option::take) else { return Ok(()) };
        self.armed -= 1;
        match -result {
            0 => self.came(entry),
            libc::EAGAIN | libc::EINTR => self.hand_over(entry),
            error => {
                // The entry is lost, which the others make up for.
                if !is_unmounted(error) {
                    tracing::debug!(queue = self.id, error, "a ring entry was given up");
                }
                entry.registering = false;
                self.live -= 1;
                Ok(())
            }
        }
    }

    /// Gives the entry to the kernel: to register it, or with an answer.
    fn hand_over(&mut self, mut entry: Entry) -> io::Result<()> {
        if entry.index >= self.large {
            entry.forget_beyond(KEPT);
        }
        let submission = command(self.id, &entry);
        let index = entry.index;
        self.with_kernel[index] = Some(entry);
        self.armed += 1;
        self.push(submission)
    }

    /// Registers one more entry if those that wait have left the kernel few.
    fn grow(&mut self) -> io::Result<()> {
        if self.armed > self.large / 2 {
            return Ok(());
        }
        let Some(entry) = self.spare.pop() else { return Ok(()) };
        self.live += 1;
        self.hand_over(entry)
    }

    /// A request has come out of the kernel's queue: it is served now, or after those that are short.
    fn came(&mut self, mut entry: Entry) -> io::Result<()> {
        let (header, len) = entry.fetched();
        if drain::is_transfer(header.opcode) {
            for draining in &mut self.draining {
                draining.clean &= header.unique >= draining.drain.before;
            }
        }
        if header.opcode == Opcode::Write as u32 && len > SHORT {
            self.long.push_back((entry, header, len));
            return Ok(());
        }
        self.serve(entry, header, len)
    }

    fn serve(&mut self, mut entry: Entry, header: InHeader, len: usize) -> io::Result<()> {
        if let Some(mark) = Mark::of(&header) {
            match &self.dispatch.drains.get() {
                Some(Drains::Queues(queues, _)) if mark.queue != self.id => {
                    queues.get(usize::from(mark.queue)).inspect(|q| q.mark_came_out(mark.drain));
                }
                _ => self.mark_came_out(mark.drain),
            }
            // The kernel wants no answer; but the entry.
            entry.answer(header.unique, Ok(0));
            return self.hand_over(entry);
        }
        self.dispatch.arrived(&header);
        let outcome = if header.opcode == Opcode::Write as u32 {
            answer_write(&self.dispatch, &mut entry, header, len, Patience::Queue)
        } else {
            self.names.clear();
            self.names.extend_from_slice(&entry.payload()[..len]);
            answer_other(&self.dispatch, &mut entry, header, &self.names, Patience::Queue)
        };
        let outcome = match outcome {
            Ok(len) => Ok(len),
            Err(Failure::Errno(e)) => Err(e.0),
            Err(failure) => {
                if drain::is_transfer(header.opcode) {
                    self.away.insert(header.unique);
                }
                let (dispatch, returned) = (Arc::clone(&self.dispatch), Arc::clone(&self.returned));
                let names = std::mem::take(&mut self.names);
                Moved { dispatch, returned, entry, header, len, names, drained: false }.go_on(failure);
                // What waits with much in hand waits for memory: no more of that.
                return if len <= KEPT { self.grow() } else { Ok(()) };
            }
        };
        entry.answer(header.unique, outcome);
        self.hand_over(entry)
    }
}

/// A request on its way between threads, with its entry.
struct Moved<H> {
    dispatch: Arc<Dispatch<H>>,
    returned: Arc<Returned>,
    entry: Entry,
    header: InHeader,
    len: usize,
    names: Vec<u8>,
    /// Those that it comes after have been answered.
    drained: bool,
}

impl<H: Handler> Moved<H> {
    /// Answers it where there is the patience that was missing.
    fn go_on(mut self, failure: Failure) {
        let here = Arc::clone(&self.dispatch);
        if !std::mem::replace(&mut self.drained, true) {
            let (arg, arg_len) = fixed_part(&self.entry, &self.header);
            let raw = Raw { header: self.header, arg: &arg[..arg_len], data: &[] };
            if here.comes_after_writes(raw) {
                if !self.returned.held_back.take() {
                    self.entry.answer(self.header.unique, Err(libc::EAGAIN));
                    return self.returned.give(self.entry);
                }
                return here.after_writes(self.header.unique, move || {
                    self.returned.held_back.give();
                    self.go_on(failure);
                });
            }
        }
        let Some((pool, patience)) = here.elsewhere(failure, &self.returned.loans) else { return };
        pool.run(move || {
            if self.dispatch.answers_later(&self.header, patience) {
                return self.wait_without_a_thread();
            }
            let outcome = if self.header.opcode == Opcode::Write as u32 {
                answer_write(&self.dispatch, &mut self.entry, self.header, self.len, patience)
            } else {
                answer_other(&self.dispatch, &mut self.entry, self.header, &self.names, patience)
            };
            self.returned.loans.give_back(patience);
            let outcome = match outcome {
                Ok(len) => Ok(len),
                Err(Failure::Errno(e)) => Err(e.0),
                Err(failure) => return self.go_on(failure),
            };
            self.entry.answer(self.header.unique, outcome);
            self.returned.give(self.entry);
        });
    }

    /// Leaves the entry to whoever will have the answer.
    fn wait_without_a_thread(self) {
        let Self { dispatch, returned, mut entry, header, names, .. } = self;
        let (arg, arg_len) = fixed_part(&entry, &header);
        let raw = Raw { header, arg: &arg[..arg_len], data: &names };
        dispatch.answer_later(raw, move |outcome| {
            entry.answer(header.unique, outcome.map(|()| 0).map_err(|e| e.0));
            returned.give(entry);
        });
    }
}

/// A write's data stays where it is; its reply is short and made elsewhere.
fn answer_write<H: Handler>(
    dispatch: &Arc<Dispatch<H>>,
    entry: &mut Entry,
    header: InHeader,
    len: usize,
    patience: Patience,
) -> Result<usize, Failure> {
    let mut out = [0; 64];
    let raw = Raw { header, arg: entry.arg(Opcode::Write.arg_len()), data: &entry.payload()[..len] };
    let n = dispatch.answer(raw, &mut out, patience)?;
    entry.payload_mut()[..n].copy_from_slice(&out[..n]);
    Ok(n)
}

fn answer_other<H: Handler>(
    dispatch: &Arc<Dispatch<H>>,
    entry: &mut Entry,
    header: InHeader,
    names: &[u8],
    patience: Patience,
) -> Result<usize, Failure> {
    let (arg, arg_len) = fixed_part(entry, &header);
    let raw = Raw { header, arg: &arg[..arg_len], data: names };
    dispatch.answer(raw, entry.payload_mut(), patience)
}

/// A copy of a request's fixed structure, and its length.
fn fixed_part(entry: &Entry, header: &InHeader) -> ([u8; 128], usize) {
    let mut arg = [0; 128];
    let len = Opcode::from_number(header.opcode).map_or(0, Opcode::arg_len).min(arg.len());
    arg[..len].copy_from_slice(entry.arg(len));
    (arg, len)
}

/// The submission that hands an entry over.
fn command(queue: u16, entry: &Entry) -> Entry128 {
    let (cmd, addr, iovecs) = if entry.registering {
        (CMD_REGISTER, Some(entry.iovecs_address()), 2u32)
    } else {
        (CMD_COMMIT_AND_FETCH, None, 0)
    };
    let ring_command =
        RingCommand { flags: 0, commit_id: entry.commit_id, qid: queue, ..RingCommand::default() };
    let mut area = [0; 80];
    area[..size_of::<RingCommand>()].copy_from_slice(ring_command.as_bytes());
    let built =
        opcode::UringCmd80::new(Fixed(0), cmd).cmd(area).addr(addr).build().user_data(entry.index as u64);
    with_len(built, iovecs)
}

/// Sets the `len` field, which the io_uring crate's builder for commands leaves out: REGISTER passes the number of iovecs there.
fn with_len(submission: Entry128, len: u32) -> Entry128 {
    const LEN_AT: usize = 24;
    const _: () = assert!(size_of::<Entry128>() == 128);
    // SAFETY: Entry128 is the kernel's 128-byte submission (repr(C), no padding), any bytes of which are valid.
    let mut bytes: [u8; 128] = unsafe { std::mem::transmute(submission) };
    bytes[LEN_AT..LEN_AT + 4].copy_from_slice(&len.to_ne_bytes());
    // SAFETY: as above.
    unsafe { std::mem::transmute(bytes) }
}

impl<H> Drop for Queue<H> {
    fn drop(&mut self) {
        let news = std::mem::replace(&mut *self.returned.news.lock(), News { over: true, ..News::default() });
        for drain in news.begun.into_iter().chain(self.draining.drain(..).map(|d| d.drain)) {
            drain.through();
        }
        // The kernel fills entries in this thread's own task work only, which ends here. The read of the eventfd must not
        // outlive its buffer: let it complete.
        let _ = rustix::io::write(&self.returned.event, &1u64.to_ne_bytes());
        while self.listening && self.ring.submit_and_wait(1).is_ok() {
            self.listening = !self.ring.completion().any(|c| c.user_data() == WAKE);
        }
    }
}
