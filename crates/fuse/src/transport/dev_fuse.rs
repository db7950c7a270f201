//! Requests read from `/dev/fuse`.
//!
//! One reader per CPU, each pinned, on a cloned descriptor of its own so that replies do not contend. A reader answers what it can
//! at once; a request that must wait moves to the workers together with its bytes.
//!
//! Beside io_uring one reader stays here, [`Silent`]: FORGET and INTERRUPT always come this way.

use super::{Dispatch, Loans, MESSAGE_SIZE, ServeError, cpus, io_error, parse, respond};
use crate::errno::Errno;
use crate::handler::{Failure, Handler, Patience};
use crate::mount::Mounted;
use crate::proto::{InHeader, init::MAX_WRITE};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Most readers, however many CPUs there are.
const MAX_READERS: usize = 16;
/// Requests up to this length are copied when they move to a worker; longer ones take their buffer along.
const COPY_LIMIT: usize = 16 << 10;
/// Most requests that wait for the kernel, with their bytes: as many as it lets be under way without anybody waiting.
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

/// What a reader answers with, and those who go on for it.
struct Shared<H> {
    fd: Arc<OwnedFd>,
    dispatch: Arc<Dispatch<H>>,
    buffers: Arc<Buffers>,
    loans: Arc<Loans>,
}

impl<H> Clone for Shared<H> {
    fn clone(&self) -> Self {
        Self {
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
    let mut threads = Vec::new();
    for i in 0..readers {
        let fd = match clone_fd(mounted.fuse_fd(), OFlags::empty()) {
            Some(fd) => Ok(fd),
            None => mounted.fuse_fd().try_clone_to_owned(),
        };
        let fd = Arc::new(fd.map_err(io_error("opening another reader"))?);
        let (dispatch, buffers, loans) = (Arc::clone(dispatch), Arc::clone(&buffers), Arc::clone(&loans));
        let shared = Shared { fd, dispatch, buffers, loans };
        let thread = std::thread::Builder::new().name(format!("larder-fuse-{i}")).spawn(move || {
            cpus::pin(i % cpu_count);
            read_loop(&shared)
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

/// The messages that io_uring does not carry, which have no reply: whoever wants to be behind all that are there reads them.
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
        /// The kernel puts what waits into one message, as many as fit (some 65,000), with interrupts before it.
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
            Ok(0) | Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => return Ok(Next::Gone),
            Ok(n) => n,
            Err(rustix::io::Errno::AGAIN) => return Ok(Next::Nothing),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT) => return Ok(Next::Done),
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else { return Ok(Next::Done) };
        dispatch.arrived(&header);
        match dispatch.silent(&message[..n], &header) {
            Some(forgotten) => dispatch.forget(&forgotten),
            // Whatever it is that comes this way, its caller must not hang.
            None => {
                let (fd, dispatch) = (Arc::clone(&self.fd), Arc::clone(dispatch));
                let (buffers, loans) = (Arc::clone(&self.buffers), Arc::clone(&self.loans));
                let shared = Shared { fd, dispatch, buffers, loans };
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

/// A descriptor of the same connection with a queue of its own for replies; `None` where that is refused.
fn clone_fd(fd: BorrowedFd<'_>, flags: OFlags) -> Option<OwnedFd> {
    /// `FUSE_DEV_IOC_CLONE`: _IOR(229, 0, u32).
    const CLONE: libc::Ioctl = 0x8004_e500u32 as libc::Ioctl;
    let new = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC | flags, Mode::empty()).ok()?;
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
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT | rustix::io::Errno::AGAIN) => continue,
            Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else { continue };
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
        match self.dispatch.answer(raw, out, Patience::Queue) {
            Ok(len) => respond(&*self.fd, unique, Ok(&out[..len])),
            Err(Failure::Errno(e)) => respond(&*self.fd, unique, Err(e)),
            Err(failure) => {
                let bytes = if n <= COPY_LIMIT {
                    message[..n].to_vec()
                } else {
                    std::mem::replace(message, self.buffers.take())
                };
                Moved { shared: self.clone(), bytes, len: n }.go_on(unique, failure);
            }
        }
    }
}

/// A request on its way between threads.
struct Moved<H> {
    shared: Shared<H>,
    bytes: Vec<u8>,
    len: usize,
}

impl<H: Handler> Moved<H> {
    /// Answers it where there is the patience that was missing.
    fn go_on(self, unique: u64, failure: Failure) {
        let dispatch = Arc::clone(&self.shared.dispatch);
        let Some((pool, patience)) = dispatch.elsewhere(failure, &self.shared.loans) else { return };
        pool.run(move || {
            let Shared { fd, dispatch, buffers, loans } = &self.shared;
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
            buffers.give(out);
            if self.bytes.len() == MESSAGE_SIZE {
                buffers.give(self.bytes);
            }
        });
    }
}
