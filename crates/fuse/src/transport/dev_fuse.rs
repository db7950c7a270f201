//! Requests read from `/dev/fuse`.
//!
//! There is one pinned reader per CPU, each on a cloned descriptor of its own, so that replies do
//! not contend. A reader answers what it can at once; a request that must wait moves to the workers
//! together with its bytes.
//!
//! Beside io_uring one reader stays here, [`ForgetReader`]: FORGET and INTERRUPT always come this
//! way.

use super::dispatch::ForgetSource;
use super::drain::{self, Drain, Fence, FenceSender, Participants, Then};
use super::{Dispatch, MESSAGE_SIZE, Permits, ServeError, cpus, io_error, parse, respond};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Handler};
use crate::helper::Mounted;
use crate::proto::{InHeader, init::MAX_BACKGROUND, init::MAX_WRITE};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Most readers, however many CPUs there are.
const MAX_READERS: usize = 16;
/// Requests up to this length are copied when they move to a worker. Longer ones take their buffer
/// along.
const COPY_LIMIT: usize = 16 << 10;
/// Most requests that wait for the kernel, each with its bytes: as many as it sends in the
/// background.
const MAX_KERNEL_WAITS: usize = 64;

/// Buffers that are not in use, each [`MESSAGE_SIZE`] long.
#[derive(Debug, Default)]
struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    fn take(&self) -> Vec<u8> {
        self.0.lock().pop().unwrap_or_else(|| vec![0; MESSAGE_SIZE])
    }
    fn give(&self, buffer: Vec<u8>) {
        let mut free = self.0.lock();
        if free.len() < MAX_READERS {
            free.push(buffer);
        }
    }
}

/// Stops every reader that has got a fence until all have one, so that no reader has a request that
/// is not counted yet: see [`drain`].
pub(super) struct ReaderBarrier {
    sender: FenceSender,
    readers: usize,
    state: Mutex<BarrierState>,
    /// A round has ended.
    over: Condvar,
}

#[derive(Default)]
struct BarrierState {
    /// Drains that still need a round, and those that take part in the current one.
    waiting: Vec<Arc<Drain>>,
    current: Vec<Arc<Drain>>,
    /// Fences that were sent for this round.
    fences: usize,
    /// Readers that have got one.
    arrived: usize,
    /// Rounds so far.
    round: u64,
    /// Transfers that are with workers, by their numbers.
    with_workers: BTreeSet<u64>,
    /// Transfers that may be background requests: with workers when the fences were sent, or seen
    /// since.
    background: usize,
    /// Drains that only wait for these transfers, which are with workers.
    finishing: Vec<(Arc<Drain>, BTreeSet<u64>)>,
    /// A reader has ended, because the mount is gone.
    gone: bool,
}

impl std::fmt::Debug for ReaderBarrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReaderBarrier").field("readers", &self.readers).finish_non_exhaustive()
    }
}

impl ReaderBarrier {
    fn new(sender: FenceSender, readers: usize) -> Self {
        Self { sender, readers, state: Mutex::default(), over: Condvar::new() }
    }

    /// Begins a round if a drain needs one. Returns the drains that have nothing left to wait for.
    fn begin_round(self: &Arc<Self>, state: &mut BarrierState) -> Vec<Arc<Drain>> {
        if state.gone {
            return self.end(state);
        }
        if state.fences > 0 || state.waiting.is_empty() {
            return Vec::new();
        }
        state.current = std::mem::take(&mut state.waiting);
        // Each reader may be answering one.
        state.background = state.with_workers.len() + self.readers;
        state.fences = self.readers;
        for _ in 0..self.readers {
            let this = Arc::clone(self);
            self.sender.send(Fence { drain: 0, queue: 0 }, None, move || this.fence_not_sent());
        }
        Vec::new()
    }

    /// A fence could not be sent, so there is nothing to wait for. Readers that have got one wait
    /// only for as many as there are.
    fn fence_not_sent(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let mut done = std::mem::take(&mut state.current);
        state.fences -= 1;
        if state.arrived == state.fences {
            done.extend(self.end_round(&mut state));
        }
        drop(state);
        done.iter().for_each(|drain| drain.queue_done());
    }

    /// Ends this round.
    fn end_round(self: &Arc<Self>, state: &mut BarrierState) -> Vec<Arc<Drain>> {
        (state.arrived, state.fences) = (0, 0);
        state.round += 1;
        self.over.notify_all();
        self.begin_round(state)
    }

    /// The mount is gone: there will be no more rounds. Returns all drains.
    fn end(&self, state: &mut BarrierState) -> Vec<Arc<Drain>> {
        state.gone = true;
        self.over.notify_all();
        state.end()
    }

    /// A transfer has arrived.
    fn count(&self, raw: &super::RawRequest<'_>) {
        if drain::may_be_background(raw.header.opcode, raw.arg) {
            self.state.lock().background += 1;
        }
    }

    /// A transfer goes to a worker.
    fn moved_to_worker(&self, unique: u64) {
        self.state.lock().with_workers.insert(unique);
    }

    /// A worker has answered it.
    fn answered_by_worker(&self, unique: u64) {
        let mut state = self.state.lock();
        state.with_workers.remove(&unique);
        let done: Vec<_> = state
            .finishing
            .extract_if(.., |(_, owed)| {
                owed.remove(&unique);
                owed.is_empty()
            })
            .collect();
        drop(state);
        done.iter().for_each(|(drain, _)| drain.queue_done());
    }

    /// This reader has got a fence. Returns when all readers that get one have it.
    fn wait_for_all(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.arrived += 1;
        if state.arrived < state.fences {
            let round = state.round;
            while state.round == round && !state.gone {
                self.over.wait(&mut state);
            }
            return;
        }
        let drains = std::mem::take(&mut state.current);
        let mut done = Vec::new();
        if state.background >= usize::from(MAX_BACKGROUND) {
            state.waiting.extend(drains);
        } else if state.with_workers.is_empty() {
            done = drains;
        } else {
            let owed = state.with_workers.clone();
            state.finishing.extend(drains.into_iter().map(|drain| (drain, owed.clone())));
        }
        done.extend(self.end_round(&mut state));
        drop(state);
        done.iter().for_each(|drain| drain.queue_done());
    }

    /// A reader has ended.
    fn leave(&self) {
        let done = self.end(&mut self.state.lock());
        done.iter().for_each(|drain| drain.queue_done());
    }
}

impl Participants for ReaderBarrier {
    fn drain(self: Arc<Self>, before: u64, then: Then) {
        let mut state = self.state.lock();
        state.waiting.push(Arc::new(Drain::new(before, 1, then)));
        let done = self.begin_round(&mut state);
        drop(state);
        done.iter().for_each(|drain| drain.queue_done());
    }
    fn finish(&self) {
        self.sender.finish();
    }
}

impl BarrierState {
    /// Takes all drains.
    fn end(&mut self) -> Vec<Arc<Drain>> {
        let mut all = std::mem::take(&mut self.waiting);
        all.append(&mut self.current);
        all.extend(std::mem::take(&mut self.finishing).into_iter().map(|(drain, _)| drain));
        all
    }
}

/// What a reader needs to answer, and the workers that go on for it.
struct ReaderContext<H> {
    /// `None` beside io_uring, whose queues count for themselves.
    barrier: Option<Arc<ReaderBarrier>>,
    fd: Arc<OwnedFd>,
    dispatch: Arc<Dispatch<H>>,
    buffers: Arc<Buffers>,
    kernel_waits: Arc<Permits>,
}

impl<H> Clone for ReaderContext<H> {
    fn clone(&self) -> Self {
        Self {
            barrier: self.barrier.clone(),
            fd: Arc::clone(&self.fd),
            dispatch: Arc::clone(&self.dispatch),
            buffers: Arc::clone(&self.buffers),
            kernel_waits: Arc::clone(&self.kernel_waits),
        }
    }
}

/// Serves everything until the mount is gone.
pub(super) fn serve<H: Handler>(
    mounted: &Mounted,
    dispatch: &Arc<Dispatch<H>>,
    on_ready: impl FnOnce(usize),
) -> Result<(), ServeError> {
    let cpu_count = cpus::online();
    let readers = cpu_count.clamp(2, MAX_READERS);
    let buffers = Arc::new(Buffers::default());
    let kernel_waits = Arc::new(Permits::new(MAX_KERNEL_WAITS));
    let fences = dispatch.fences(mounted).map_err(io_error("duplicating /dev/fuse"))?;
    let barrier = Arc::new(ReaderBarrier::new(fences, readers));
    dispatch.drains.get_or_init(|| Arc::clone(&barrier) as _);
    let mut threads = Vec::new();
    for i in 0..readers {
        let fd = match clone_fd(mounted.fuse_fd(), OFlags::empty()) {
            Some(fd) => Ok(fd),
            None => mounted.fuse_fd().try_clone_to_owned(),
        };
        let fd = Arc::new(fd.map_err(io_error("opening another reader"))?);
        let (dispatch, buffers, kernel_waits) =
            (Arc::clone(dispatch), Arc::clone(&buffers), Arc::clone(&kernel_waits));
        let reader = ReaderContext {
            barrier: Some(Arc::clone(&barrier)),
            fd,
            dispatch,
            buffers,
            kernel_waits,
        };
        let thread =
            std::thread::Builder::new().name(format!("larder-fuse-{i}")).spawn(move || {
                cpus::pin(i % cpu_count);
                let served = read_loop(&reader);
                reader.barrier.iter().for_each(|barrier| barrier.leave());
                served
            });
        threads.push(thread.map_err(io_error("starting a reader"))?);
    }
    on_ready(readers);
    let mut result = Ok(());
    for thread in threads {
        if let Ok(Err(e)) = thread.join() {
            result = Err(io_error("reading from /dev/fuse")(e));
        }
    }
    result
}

/// Reads the messages that io_uring does not carry and that have no reply. A thread that must come
/// after those that have arrived reads them, too.
#[derive(Debug)]
pub(super) struct ForgetReader {
    fd: Arc<OwnedFd>,
    /// A read never waits.
    at_once: bool,
    /// Its lock is held until what the message says has been done.
    message: Mutex<Vec<u8>>,
    buffers: Arc<Buffers>,
    kernel_waits: Arc<Permits>,
}

impl ForgetReader {
    pub(super) fn open(mounted: &Mounted) -> Result<Self, ServeError> {
        let own = clone_fd(mounted.fuse_fd(), OFlags::NONBLOCK);
        let at_once = own.is_some();
        // The descriptor of the ring must not become non-blocking.
        let fd = own.map_or_else(|| mounted.fuse_fd().try_clone_to_owned(), Ok);
        let fd = Arc::new(fd.map_err(io_error("duplicating /dev/fuse"))?);
        let (buffers, kernel_waits) = (Arc::<Buffers>::default(), Arc::new(Permits::new(0)));
        Ok(Self { fd, at_once, message: Mutex::new(buffers.take()), buffers, kernel_waits })
    }

    /// Reads until the mount is gone.
    pub(super) fn serve<H: Handler>(&self, dispatch: &Arc<Dispatch<H>>) -> Result<(), ServeError> {
        loop {
            let mut there = [PollFd::new(&*self.fd, PollFlags::IN)];
            // If this fails, the read reports it.
            let _ = rustix::event::poll(&mut there, None);
            match self.next(dispatch) {
                Ok(ReadOutcome::Done | ReadOutcome::Nothing) => {}
                Ok(ReadOutcome::Gone) => return Ok(()),
                Err(e) => return Err(io_error("reading from /dev/fuse")(e)),
            }
        }
    }

    fn next<H: Handler>(&self, dispatch: &Arc<Dispatch<H>>) -> io::Result<ReadOutcome> {
        let mut message = self.message.lock();
        let n = match rustix::io::read(&*self.fd, &mut message[..]) {
            Ok(0) | Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => {
                return Ok(ReadOutcome::Gone);
            }
            Ok(n) => n,
            Err(rustix::io::Errno::AGAIN) => return Ok(ReadOutcome::Nothing),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT) => {
                return Ok(ReadOutcome::Done);
            }
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else {
            return Ok(ReadOutcome::Done);
        };
        dispatch.arrived(&header);
        match dispatch.parse_forgets(&message[..n], &header) {
            Some(forgotten) => dispatch.forget(&forgotten),
            // An ordinary request: its caller must not hang.
            None => {
                let (fd, dispatch) = (Arc::clone(&self.fd), Arc::clone(dispatch));
                let (buffers, kernel_waits) =
                    (Arc::clone(&self.buffers), Arc::clone(&self.kernel_waits));
                let reader = ReaderContext { barrier: None, fd, dispatch, buffers, kernel_waits };
                reader.answer(&mut message, n, &mut vec![0; MAX_WRITE as usize]);
            }
        }
        Ok(ReadOutcome::Done)
    }
}

impl<H: Handler> ForgetSource<H> for ForgetReader {
    fn read_all(&self, dispatch: &Arc<Dispatch<H>>) {
        /// The kernel puts as many FORGETs as fit (some 65,000) into one message; interrupts come
        /// first.
        const MESSAGES: usize = 64;
        // Otherwise a read might wait for a message that never comes.
        let messages = if self.at_once { MESSAGES } else { 0 };
        for _ in 0..messages {
            if !matches!(self.next(dispatch), Ok(ReadOutcome::Done)) {
                return;
            }
        }
    }
}

/// Outcome of one read.
enum ReadOutcome {
    Done,
    Nothing,
    /// The mount is gone.
    Gone,
}

/// A descriptor of the same connection with its own queue for replies; `None` if that is refused.
pub(super) fn clone_fd(fd: BorrowedFd<'_>, flags: OFlags) -> Option<OwnedFd> {
    /// `FUSE_DEV_IOC_CLONE`: _IOR(229, 0, u32).
    const CLONE: libc::Ioctl = 0x8004_e500u32 as libc::Ioctl;
    let new = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC | flags, Mode::empty())
        .ok()?;
    let source = fd.as_raw_fd().cast_unsigned();
    // SAFETY: the ioctl reads one u32 from the pointer, which lives through the call.
    (unsafe { libc::ioctl(new.as_raw_fd(), CLONE, &raw const source) } == 0).then_some(new)
}

fn read_loop<H: Handler>(reader: &ReaderContext<H>) -> io::Result<()> {
    let mut message = reader.buffers.take();
    let mut out = vec![0; MAX_WRITE as usize];
    loop {
        let n = match rustix::io::read(&*reader.fd, &mut message[..]) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            // NOENT: the kernel took the request back before it was read.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT | rustix::io::Errno::AGAIN) => {
                continue;
            }
            Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else { continue };
        if let Some(barrier) = reader.barrier.as_ref().filter(|_| Fence::of(&header).is_some()) {
            barrier.wait_for_all();
            continue;
        }
        reader.dispatch.arrived(&header);
        if let Some(forgotten) = reader.dispatch.parse_forgets(&message[..n], &header) {
            reader.dispatch.forget_on_worker(&forgotten);
            continue;
        }
        reader.answer(&mut message, n, &mut out);
    }
}

impl<H: Handler> ReaderContext<H> {
    /// Answers the request in the first `n` bytes of the message, here or on another thread.
    fn answer(&self, message: &mut Vec<u8>, n: usize, out: &mut [u8]) {
        let Some(raw) = parse(&message[..n]) else { return };
        let unique = raw.header.unique;
        let barrier = self.barrier.as_ref().filter(|_| drain::is_transfer(raw.header.opcode));
        barrier.inspect(|barrier| barrier.count(&raw));
        match self.dispatch.answer(raw, out, ExecContext::Queue) {
            Ok(len) => respond(&*self.fd, unique, Ok(&out[..len])),
            Err(Failure::Errno(e)) => respond(&*self.fd, unique, Err(e)),
            Err(failure) => {
                barrier.inspect(|barrier| barrier.moved_to_worker(unique));
                let transfer = barrier.is_some();
                let bytes = if n <= COPY_LIMIT {
                    message[..n].to_vec()
                } else {
                    std::mem::replace(message, self.buffers.take())
                };
                MovedRequest { reader: self.clone(), bytes, len: n, transfer, drained: false }
                    .go_on(unique, failure);
            }
        }
    }
}

/// A request that moves between threads.
struct MovedRequest<H> {
    reader: ReaderContext<H>,
    bytes: Vec<u8>,
    len: usize,
    /// It carries contents of a file.
    transfer: bool,
    /// The requests that it comes after have been answered.
    drained: bool,
}

impl<H: Handler> MovedRequest<H> {
    /// Answers it on a thread that may wait for what it has to wait for.
    fn go_on(mut self, unique: u64, failure: Failure) {
        let dispatch = Arc::clone(&self.reader.dispatch);
        if !std::mem::replace(&mut self.drained, true)
            && parse(&self.bytes[..self.len]).is_some_and(|raw| dispatch.comes_after_writes(raw))
        {
            return dispatch.after_writes(unique, move || self.go_on(unique, failure));
        }
        let Some((pool, context)) = dispatch.pool_for(failure, &self.reader.kernel_waits) else {
            return;
        };
        pool.run(move || {
            let ReaderContext { barrier, fd, dispatch, buffers, kernel_waits } = &self.reader;
            if let Some(raw) = parse(&self.bytes[..self.len])
                && dispatch.defers_reply(&raw.header, context)
            {
                let fd = Arc::clone(fd);
                return dispatch.answer_deferred(raw, move |outcome| {
                    respond(&*fd, unique, outcome.map(|()| &[][..]));
                });
            }
            let mut out = buffers.take();
            let answer = match parse(&self.bytes[..self.len]) {
                Some(raw) => dispatch.answer(raw, &mut out[..MAX_WRITE as usize], context),
                None => Err(Errno::IO.into()),
            };
            kernel_waits.release_after(context);
            match answer {
                Ok(len) => respond(&**fd, unique, Ok(&out[..len])),
                Err(Failure::Errno(e)) => respond(&**fd, unique, Err(e)),
                Err(failure) => {
                    buffers.give(out);
                    return self.go_on(unique, failure);
                }
            }
            barrier
                .iter()
                .filter(|_| self.transfer)
                .for_each(|barrier| barrier.answered_by_worker(unique));
            buffers.give(out);
            if self.bytes.len() == MESSAGE_SIZE {
                buffers.give(self.bytes);
            }
        });
    }
}
