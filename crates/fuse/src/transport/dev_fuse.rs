//! Requests read from `/dev/fuse`.
//!
//! One reader per CPU, each pinned, on a cloned descriptor of its own so that replies do not
//! contend. A reader answers what it can at once; a request that must wait moves to the workers
//! together with its bytes.
//!
//! Beside io_uring one reader stays here, [`Silent`]: FORGET and INTERRUPT always come this way.

use super::drain::{self, Drain, Mark, Marker};
use super::{Dispatch, Drains, Loans, MESSAGE_SIZE, ServeError, cpus, io_error, parse, respond};
use crate::errno::Errno;
use crate::handler::{Failure, Handler, Patience};
use crate::mount::Mounted;
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
/// Requests up to this length are copied when they move to a worker; longer ones take their buffer
/// along.
const COPY_LIMIT: usize = 16 << 10;
/// Most requests that wait for the kernel, with their bytes: as many as it lets be under way
/// without anybody waiting.
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

/// Where all readers come together, so that none has anything in hand that nobody knows of: see
/// [`drain`].
pub(super) struct Meeting {
    marker: Marker,
    readers: usize,
    state: Mutex<State>,
    /// A round is over.
    over: Condvar,
}

#[derive(Default)]
struct State {
    /// Drains that still need a round, and those that take part in the one that is on.
    waiting: Vec<Arc<Drain>>,
    meeting: Vec<Arc<Drain>>,
    /// Marks that were put in for this round.
    marks: usize,
    /// Readers that have got one of them.
    here: usize,
    /// Rounds so far.
    round: u64,
    /// Transfers that are with workers, by their numbers.
    away: BTreeSet<u64>,
    /// Transfers that may have been background ones: with workers when the marks were put in, or
    /// seen since.
    background: usize,
    /// Drains that only wait for these.
    leaving: Vec<(Arc<Drain>, BTreeSet<u64>)>,
    /// A reader has ended, because the mount is gone.
    gone: bool,
}

impl std::fmt::Debug for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meeting").field("readers", &self.readers).finish_non_exhaustive()
    }
}

impl Meeting {
    fn new(marker: Marker, readers: usize) -> Self {
        Self { marker, readers, state: Mutex::default(), over: Condvar::new() }
    }

    /// Begins a drain.
    pub(super) fn drain(self: &Arc<Self>, drain: Arc<Drain>) {
        let mut state = self.state.lock();
        state.waiting.push(drain);
        let through = self.call(&mut state);
        drop(state);
        through.iter().for_each(|drain| drain.through());
    }

    /// Calls the readers together if somebody needs it. Returns the drains that have nothing to
    /// wait for any more.
    fn call(self: &Arc<Self>, state: &mut State) -> Vec<Arc<Drain>> {
        if state.gone {
            return self.end(state);
        }
        if state.marks > 0 || state.waiting.is_empty() {
            return Vec::new();
        }
        state.meeting = std::mem::take(&mut state.waiting);
        // A reader may be answering one.
        state.background = state.away.len() + self.readers;
        state.marks = self.readers;
        for _ in 0..self.readers {
            let this = Arc::clone(self);
            self.marker.put(Mark { drain: 0, queue: 0 }, None, move || this.not_put());
        }
        Vec::new()
    }

    /// A mark could not be put in: nothing is to be waited for. Who has got one already waits for
    /// no more of them than there are.
    fn not_put(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let mut through = std::mem::take(&mut state.meeting);
        state.marks -= 1;
        if state.here == state.marks {
            through.extend(self.begin_again(&mut state));
        }
        drop(state);
        through.iter().for_each(|drain| drain.through());
    }

    /// This round is over.
    fn begin_again(self: &Arc<Self>, state: &mut State) -> Vec<Arc<Drain>> {
        (state.here, state.marks) = (0, 0);
        state.round += 1;
        self.over.notify_all();
        self.call(state)
    }

    /// The mount is gone: there will be no more meetings. Returns all drains.
    fn end(&self, state: &mut State) -> Vec<Arc<Drain>> {
        state.gone = true;
        self.over.notify_all();
        state.end()
    }

    /// A transfer has arrived.
    fn arrived(&self, raw: &super::Raw<'_>) {
        if drain::may_be_background(raw.header.opcode, raw.arg) {
            self.state.lock().background += 1;
        }
    }

    /// A worker takes a transfer.
    fn leaves(&self, unique: u64) {
        self.state.lock().away.insert(unique);
    }

    /// It is answered.
    fn returns(&self, unique: u64) {
        let mut state = self.state.lock();
        state.away.remove(&unique);
        let through: Vec<_> = state
            .leaving
            .extract_if(.., |(_, owed)| {
                owed.remove(&unique);
                owed.is_empty()
            })
            .collect();
        drop(state);
        through.iter().for_each(|(drain, _)| drain.through());
    }

    /// This reader has got a mark. Returns when all have that get one.
    fn meet(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.here += 1;
        if state.here < state.marks {
            let round = state.round;
            while state.round == round && !state.gone {
                self.over.wait(&mut state);
            }
            return;
        }
        let met = std::mem::take(&mut state.meeting);
        let mut through = Vec::new();
        if state.background >= usize::from(MAX_BACKGROUND) {
            state.waiting.extend(met);
        } else if state.away.is_empty() {
            through = met;
        } else {
            let owed = state.away.clone();
            state.leaving.extend(met.into_iter().map(|drain| (drain, owed.clone())));
        }
        through.extend(self.begin_again(&mut state));
        drop(state);
        through.iter().for_each(|drain| drain.through());
    }

    /// The threads but the readers' own have nothing more to do.
    pub(super) fn finish(&self) {
        self.marker.finish();
    }

    /// A reader has ended.
    fn leave(&self) {
        let through = self.end(&mut self.state.lock());
        through.iter().for_each(|drain| drain.through());
    }
}

impl State {
    /// All drains.
    fn end(&mut self) -> Vec<Arc<Drain>> {
        let mut all = std::mem::take(&mut self.waiting);
        all.append(&mut self.meeting);
        all.extend(std::mem::take(&mut self.leaving).into_iter().map(|(drain, _)| drain));
        all
    }
}

/// What a reader answers with, and those who go on for it.
struct Shared<H> {
    /// `None` beside io_uring, which knows for itself.
    meeting: Option<Arc<Meeting>>,
    fd: Arc<OwnedFd>,
    dispatch: Arc<Dispatch<H>>,
    buffers: Arc<Buffers>,
    loans: Arc<Loans>,
}

impl<H> Clone for Shared<H> {
    fn clone(&self) -> Self {
        Self {
            meeting: self.meeting.clone(),
            fd: Arc::clone(&self.fd),
            dispatch: Arc::clone(&self.dispatch),
            buffers: Arc::clone(&self.buffers),
            loans: Arc::clone(&self.loans),
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
    let loans = Arc::new(Loans::new(MAX_KERNEL_WAITS));
    let marker = dispatch.marker(mounted).map_err(io_error("duplicating /dev/fuse"))?;
    let meeting = Arc::new(Meeting::new(marker, readers));
    dispatch.drains.get_or_init(|| Drains::Readers(Arc::clone(&meeting)));
    let mut threads = Vec::new();
    for i in 0..readers {
        let fd = match clone_fd(mounted.fuse_fd(), OFlags::empty()) {
            Some(fd) => Ok(fd),
            None => mounted.fuse_fd().try_clone_to_owned(),
        };
        let fd = Arc::new(fd.map_err(io_error("opening another reader"))?);
        let (dispatch, buffers, loans) =
            (Arc::clone(dispatch), Arc::clone(&buffers), Arc::clone(&loans));
        let shared = Shared { meeting: Some(Arc::clone(&meeting)), fd, dispatch, buffers, loans };
        let thread =
            std::thread::Builder::new().name(format!("larder-fuse-{i}")).spawn(move || {
                cpus::pin(i % cpu_count);
                let served = read_loop(&shared);
                shared.meeting.iter().for_each(|meeting| meeting.leave());
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

/// The messages that io_uring does not carry, which have no reply: whoever wants to be behind all
/// that are there reads them.
#[derive(Debug)]
pub(super) struct Silent {
    fd: Arc<OwnedFd>,
    /// Reading never waits.
    at_once: bool,
    /// Held by the reader until it has done what the message says.
    message: Mutex<Vec<u8>>,
    buffers: Arc<Buffers>,
    loans: Arc<Loans>,
}

impl Silent {
    pub(super) fn open(mounted: &Mounted) -> Result<Self, ServeError> {
        let own = clone_fd(mounted.fuse_fd(), OFlags::NONBLOCK);
        let at_once = own.is_some();
        // The ring's descriptor must stay as it is.
        let fd = own.map_or_else(|| mounted.fuse_fd().try_clone_to_owned(), Ok);
        let fd = Arc::new(fd.map_err(io_error("duplicating /dev/fuse"))?);
        let (buffers, loans) = (Arc::<Buffers>::default(), Arc::new(Loans::new(0)));
        Ok(Self { fd, at_once, message: Mutex::new(buffers.take()), buffers, loans })
    }

    /// Reads until the mount is gone.
    pub(super) fn serve<H: Handler>(&self, dispatch: &Arc<Dispatch<H>>) -> Result<(), ServeError> {
        loop {
            let mut there = [PollFd::new(&*self.fd, PollFlags::IN)];
            // That it fails is for the read to say.
            let _ = rustix::event::poll(&mut there, None);
            match self.next(dispatch) {
                Ok(Next::Done | Next::Nothing) => {}
                Ok(Next::Gone) => return Ok(()),
                Err(e) => return Err(io_error("reading from /dev/fuse")(e)),
            }
        }
    }

    /// Returns when what was there has been done. What comes meanwhile may still be there.
    pub(super) fn settle<H: Handler>(&self, dispatch: &Arc<Dispatch<H>>) {
        /// The kernel puts what waits into one message, as many as fit (some 65,000), with
        /// interrupts before it.
        const MESSAGES: usize = 64;
        // Else a read, the reader's too, may wait for what never comes.
        let messages = if self.at_once { MESSAGES } else { 0 };
        for _ in 0..messages {
            if !matches!(self.next(dispatch), Ok(Next::Done)) {
                return;
            }
        }
    }

    fn next<H: Handler>(&self, dispatch: &Arc<Dispatch<H>>) -> io::Result<Next> {
        let mut message = self.message.lock();
        let n = match rustix::io::read(&*self.fd, &mut message[..]) {
            Ok(0) | Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => {
                return Ok(Next::Gone);
            }
            Ok(n) => n,
            Err(rustix::io::Errno::AGAIN) => return Ok(Next::Nothing),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT) => return Ok(Next::Done),
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else {
            return Ok(Next::Done);
        };
        dispatch.arrived(&header);
        match dispatch.silent(&message[..n], &header) {
            Some(forgotten) => dispatch.forget(&forgotten),
            // Whatever it is that comes this way, its caller must not hang.
            None => {
                let (fd, dispatch) = (Arc::clone(&self.fd), Arc::clone(dispatch));
                let (buffers, loans) = (Arc::clone(&self.buffers), Arc::clone(&self.loans));
                let shared = Shared { meeting: None, fd, dispatch, buffers, loans };
                shared.answer(&mut message, n, &mut vec![0; MAX_WRITE as usize]);
            }
        }
        Ok(Next::Done)
    }
}

/// What became of a look for a message.
enum Next {
    Done,
    Nothing,
    /// With the mount.
    Gone,
}

/// A descriptor of the same connection with a queue of its own for replies; `None` where that is
/// refused.
pub(super) fn clone_fd(fd: BorrowedFd<'_>, flags: OFlags) -> Option<OwnedFd> {
    /// `FUSE_DEV_IOC_CLONE`: _IOR(229, 0, u32).
    const CLONE: libc::Ioctl = 0x8004_e500u32 as libc::Ioctl;
    let new = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC | flags, Mode::empty())
        .ok()?;
    let source = fd.as_raw_fd().cast_unsigned();
    // SAFETY: the ioctl reads one u32 from the pointer, which lives through the call.
    (unsafe { libc::ioctl(new.as_raw_fd(), CLONE, &raw const source) } == 0).then_some(new)
}

fn read_loop<H: Handler>(shared: &Shared<H>) -> io::Result<()> {
    let mut message = shared.buffers.take();
    let mut out = vec![0; MAX_WRITE as usize];
    loop {
        let n = match rustix::io::read(&*shared.fd, &mut message[..]) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            // NOENT: the request was taken back before it was read.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT | rustix::io::Errno::AGAIN) => {
                continue;
            }
            Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else { continue };
        if let Some(meeting) = shared.meeting.as_ref().filter(|_| Mark::of(&header).is_some()) {
            meeting.meet();
            continue;
        }
        shared.dispatch.arrived(&header);
        if let Some(forgotten) = shared.dispatch.silent(&message[..n], &header) {
            shared.dispatch.forget_elsewhere(&forgotten);
            continue;
        }
        shared.answer(&mut message, n, &mut out);
    }
}

impl<H: Handler> Shared<H> {
    /// Answers the request in the first `n` bytes of the message, here or elsewhere.
    fn answer(&self, message: &mut Vec<u8>, n: usize, out: &mut [u8]) {
        let Some(raw) = parse(&message[..n]) else { return };
        let unique = raw.header.unique;
        let meeting = self.meeting.as_ref().filter(|_| drain::is_transfer(raw.header.opcode));
        meeting.inspect(|meeting| meeting.arrived(&raw));
        match self.dispatch.answer(raw, out, Patience::Queue) {
            Ok(len) => respond(&*self.fd, unique, Ok(&out[..len])),
            Err(Failure::Errno(e)) => respond(&*self.fd, unique, Err(e)),
            Err(failure) => {
                meeting.inspect(|meeting| meeting.leaves(unique));
                let transfer = meeting.is_some();
                let bytes = if n <= COPY_LIMIT {
                    message[..n].to_vec()
                } else {
                    std::mem::replace(message, self.buffers.take())
                };
                Moved { shared: self.clone(), bytes, len: n, transfer, drained: false }
                    .go_on(unique, failure);
            }
        }
    }
}

/// A request on its way between threads.
struct Moved<H> {
    shared: Shared<H>,
    bytes: Vec<u8>,
    len: usize,
    /// It carries contents of a file.
    transfer: bool,
    /// Those that it comes after have been answered.
    drained: bool,
}

impl<H: Handler> Moved<H> {
    /// Answers it where there is the patience that was missing.
    fn go_on(mut self, unique: u64, failure: Failure) {
        let dispatch = Arc::clone(&self.shared.dispatch);
        if !std::mem::replace(&mut self.drained, true)
            && parse(&self.bytes[..self.len]).is_some_and(|raw| dispatch.comes_after_writes(raw))
        {
            return dispatch.after_writes(unique, move || self.go_on(unique, failure));
        }
        let Some((pool, patience)) = dispatch.elsewhere(failure, &self.shared.loans) else {
            return;
        };
        pool.run(move || {
            let Shared { meeting, fd, dispatch, buffers, loans } = &self.shared;
            if let Some(raw) = parse(&self.bytes[..self.len])
                && dispatch.answers_later(&raw.header, patience)
            {
                let fd = Arc::clone(fd);
                return dispatch.answer_later(raw, move |outcome| {
                    respond(&*fd, unique, outcome.map(|()| &[][..]));
                });
            }
            let mut out = buffers.take();
            let answer = match parse(&self.bytes[..self.len]) {
                Some(raw) => dispatch.answer(raw, &mut out[..MAX_WRITE as usize], patience),
                None => Err(Errno::IO.into()),
            };
            loans.give_back(patience);
            match answer {
                Ok(len) => respond(&**fd, unique, Ok(&out[..len])),
                Err(Failure::Errno(e)) => respond(&**fd, unique, Err(e)),
                Err(failure) => {
                    buffers.give(out);
                    return self.go_on(unique, failure);
                }
            }
            meeting.iter().filter(|_| self.transfer).for_each(|meeting| meeting.returns(unique));
            buffers.give(out);
            if self.bytes.len() == MESSAGE_SIZE {
                buffers.give(self.bytes);
            }
        });
    }
}
