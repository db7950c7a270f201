//! Requests read from `/dev/fuse`.
//!
//! One reader per CPU, each pinned, on a cloned descriptor of its own so that replies do not contend. A reader answers what it can
//! at once; a request that must wait moves to the workers together with its bytes.
//!
//! Beside io_uring one reader stays here: FORGET and INTERRUPT always come this way.

use super::{Dispatch, Forget, Loans, MESSAGE_SIZE, ServeError, cpus, io_error, parse, respond};
use crate::errno::Errno;
use crate::handler::{Failure, Handler, Patience};
use crate::mount::Mounted;
use crate::proto::{InHeader, init::MAX_WRITE};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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
        let fd = Arc::new(clone_fd(mounted.fuse_fd()).map_err(io_error("opening another reader"))?);
        let (dispatch, buffers, loans) = (Arc::clone(dispatch), Arc::clone(&buffers), Arc::clone(&loans));
        let thread = std::thread::Builder::new().name(format!("larder-fuse-{i}")).spawn(move || {
            cpus::pin(i % cpu_count);
            read_loop(&fd, &dispatch, &buffers, &loans, Forget::Elsewhere)
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

/// Reads what io_uring does not carry, until the mount is gone.
pub(super) fn read_only_forgets<H: Handler>(
    mounted: &Mounted,
    dispatch: &Arc<Dispatch<H>>,
) -> Result<(), ServeError> {
    let fd = mounted.fuse_fd().try_clone_to_owned().map_err(io_error("duplicating /dev/fuse"))?;
    read_loop(&Arc::new(fd), dispatch, &Arc::default(), &Arc::new(Loans::new(0)), Forget::Here)
        .map_err(io_error("reading from /dev/fuse"))
}

/// A descriptor of the same connection with a queue of its own for replies; the same queue where that is refused.
fn clone_fd(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    /// `FUSE_DEV_IOC_CLONE`: _IOR(229, 0, u32).
    const CLONE: libc::Ioctl = 0x8004_e500u32 as libc::Ioctl;
    if let Ok(new) = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        let source = fd.as_raw_fd().cast_unsigned();
        // SAFETY: the ioctl reads one u32 from the pointer, which lives through the call.
        if unsafe { libc::ioctl(new.as_raw_fd(), CLONE, &raw const source) } == 0 {
            return Ok(new);
        }
    }
    fd.try_clone_to_owned()
}

fn read_loop<H: Handler>(
    fd: &Arc<OwnedFd>,
    dispatch: &Arc<Dispatch<H>>,
    buffers: &Arc<Buffers>,
    loans: &Arc<Loans>,
    forget: Forget,
) -> io::Result<()> {
    let mut message = buffers.take();
    let mut out = vec![0; MAX_WRITE as usize];
    loop {
        let n = match rustix::io::read(fd.as_fd(), &mut message[..]) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            // NOENT: the request was taken back before it was read.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT | rustix::io::Errno::AGAIN) => continue,
            Err(rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let Ok((header, _)) = InHeader::read_from_prefix(&message[..n]) else { continue };
        dispatch.arrived(&header);
        if dispatch.silent(&message[..n], &header, forget) {
            continue;
        }
        let Some(raw) = parse(&message[..n]) else { continue };
        match dispatch.answer(raw, &mut out, Patience::Queue) {
            Ok(len) => respond(fd, header.unique, Ok(&out[..len])),
            Err(Failure::Errno(e)) => respond(fd, header.unique, Err(e)),
            Err(failure) => {
                let bytes = if n <= COPY_LIMIT {
                    message[..n].to_vec()
                } else {
                    std::mem::replace(&mut message, buffers.take())
                };
                let (fd, dispatch, buffers) = (Arc::clone(fd), Arc::clone(dispatch), Arc::clone(buffers));
                let loans = Arc::clone(loans);
                Moved { fd, dispatch, buffers, loans, bytes, len: n }.go_on(header.unique, failure);
            }
        }
    }
}

/// A request on its way between threads.
struct Moved<H> {
    fd: Arc<OwnedFd>,
    dispatch: Arc<Dispatch<H>>,
    buffers: Arc<Buffers>,
    loans: Arc<Loans>,
    bytes: Vec<u8>,
    len: usize,
}

impl<H: Handler> Moved<H> {
    /// Answers it where there is the patience that was missing.
    fn go_on(self, unique: u64, failure: Failure) {
        let dispatch = Arc::clone(&self.dispatch);
        let Some((pool, patience)) = dispatch.elsewhere(failure, &self.loans) else { return };
        pool.run(move || {
            if let Some(raw) = parse(&self.bytes[..self.len])
                && self.dispatch.answers_later(&raw.header, patience)
            {
                let fd = Arc::clone(&self.fd);
                return self.dispatch.answer_later(raw, move |outcome| {
                    respond(&*fd, unique, outcome.map(|()| &[][..]));
                });
            }
            let mut out = self.buffers.take();
            let answer = match parse(&self.bytes[..self.len]) {
                Some(raw) => self.dispatch.answer(raw, &mut out[..MAX_WRITE as usize], patience),
                None => Err(Errno::IO.into()),
            };
            self.loans.give_back(patience);
            match answer {
                Ok(len) => respond(&*self.fd, unique, Ok(&out[..len])),
                Err(Failure::Errno(e)) => respond(&*self.fd, unique, Err(e)),
                Err(failure) => {
                    self.buffers.give(out);
                    return self.go_on(unique, failure);
                }
            }
            self.buffers.give(out);
            if self.bytes.len() == MESSAGE_SIZE {
                self.buffers.give(self.bytes);
            }
        });
    }
}
