//! How requests reach the server and replies the kernel.
//!
//! Two ways: FUSE over io_uring (`uring`) with one thread pinned to each CPU, and reading
//! `/dev/fuse` (`dev_fuse`) as the fallback. What counts is *where* a request is served: on the CPU
//! of its caller a round trip costs 8–10 µs, on another, idle one 40 µs and more. Hence a queue's
//! own thread answers whatever it can without waiting, and only what has to wait (a disk, a commit,
//! space) goes to the workers.
//!
//! This module holds what both share: the INIT exchange, answering one request, and the life of a
//! session; and what the mounts of one process share, a `Host`.

mod cpus;
mod dev_fuse;
mod direct;
mod drain;
mod memory;
pub(crate) mod priority;
mod uring;

pub use direct::Direct;

use crate::errno::Errno;
use crate::handler::{Failure, Handler, Patience, Reply, Request};
use crate::later::Later;
use crate::mount::Mounted;
use crate::proto::init::{self, InitIn, Wishes};
use crate::proto::{BatchForgetIn, ForgetIn, ForgetOne, InHeader, InitFlags, Opcode, OutHeader};
use crate::stats::Stats;
use crate::workers::Workers;
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Space before the data of a write: head and fixed structure.
const HEAD_ROOM: usize = 4096;
/// Bytes of the buffer for one message.
pub(crate) const MESSAGE_SIZE: usize = init::MAX_WRITE as usize + HEAD_ROOM;
/// Most threads that wait at the same time.
const MAX_WORKERS: usize = 256;
/// Most threads that wait for the kernel at the same time. There are at least as many as [`Loans`],
/// so that no request stands in line behind others that may be waiting for just this one.
const MAX_KERNEL_WAITERS: usize = 256;

/// Which transport to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// io_uring where the kernel offers it, else `/dev/fuse`.
    #[default]
    Auto,
    /// Only `/dev/fuse`.
    DevFuse,
    /// io_uring, or fail.
    Uring,
}

/// What was agreed with the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// io_uring is in use.
    pub uring: bool,
    /// Threads that serve requests (the one for FORGET beside io_uring not counted).
    pub threads: usize,
    /// Minor version of the protocol that both sides speak.
    pub minor: u32,
    /// Writes may be delayed by the kernel.
    pub writeback: bool,
}

/// Why a session could not be started or ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// During what.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The kernel's FUSE is older than what this crate speaks.
    #[error(
        "the kernel speaks FUSE {major}.{minor}; {}.{} (Linux 5.17) or newer is needed",
        crate::proto::MAJOR,
        crate::proto::OLDEST_MINOR
    )]
    TooOld {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },
    /// io_uring was demanded and the kernel does not offer it.
    #[error(
        "the kernel does not offer FUSE over io_uring (see \
            /sys/module/fuse/parameters/enable_uring)"
    )]
    NoUring,
    /// io_uring was demanded for a further mount, and the first one does without.
    #[error(
        "the first mount of this image was made without FUSE over io_uring, which cannot be had \
            later: \
         unmount it first, or leave out transport=uring"
    )]
    NoThreads,
    /// The mount went away before it was used.
    #[error("unmounted before the first request")]
    Unmounted,
}

pub(crate) fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> ServeError {
    move |source| ServeError::Io { what, source }
}

/// Serves a mount until it is unmounted.
///
/// `on_ready` is called once, when the kernel and we have agreed and requests are being served.
///
/// # Errors
/// If the session cannot be set up. Once requests are served it ends with the mount, which is no
/// error.
pub fn serve_handler<H: Handler>(
    handler: Arc<H>,
    mounted: Mounted,
    stats: Arc<Stats>,
    on_ready: impl FnOnce(Ready),
) -> Result<(), ServeError> {
    Host::default().serve(handler, mounted, stats, on_ready)
}

/// What the mounts of one process share: the threads and rings of FUSE over io_uring.
///
/// They are made for the first mount or never: when that is served, the [sandbox](crate::sandbox)
/// is sealed and lets no ring be made.
#[derive(Debug)]
pub(crate) struct Host<H>(Mutex<Threads<H>>);

#[derive(Debug)]
enum Threads<H> {
    /// No mount has come yet.
    NotYet,
    /// The first one did without, or had to.
    None,
    Some(Arc<uring::Threads<H>>),
}

impl<H> Default for Host<H> {
    fn default() -> Self {
        Self(Mutex::new(Threads::NotYet))
    }
}

impl<H: Handler> Host<H> {
    /// As [`serve_handler`], beside others.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn serve(
        &self,
        handler: Arc<H>,
        mounted: Mounted,
        stats: Arc<Stats>,
        on_ready: impl FnOnce(Ready),
    ) -> Result<(), ServeError> {
        let served = serve_session(self, handler, &mounted, stats, on_ready);
        if served.is_err() {
            // What could not be served shall not be left for others to hang in; it is gone already
            // where it once was served.
            let _ = mounted.porter().detach();
        }
        served
    }

    /// The threads, which this mount may use or, if it is the first, do without. `None`: there are
    /// none to be had.
    fn threads(&self, uses: bool) -> io::Result<Option<Arc<uring::Threads<H>>>> {
        let mut threads = self.0.lock();
        if matches!(*threads, Threads::NotYet) {
            *threads = Threads::None;
            if uses {
                *threads = Threads::Some(Arc::new(uring::Threads::start()?));
            }
        }
        Ok(match &*threads {
            Threads::Some(there) if uses => Some(Arc::clone(there)),
            _ => None,
        })
    }
}

fn serve_session<H: Handler>(
    host: &Host<H>,
    handler: Arc<H>,
    mounted: &Mounted,
    stats: Arc<Stats>,
    on_ready: impl FnOnce(Ready),
) -> Result<(), ServeError> {
    let wishes = Wishes {
        writeback: mounted.options.writeback,
        kernel_permissions: mounted.kernel_permissions,
        uring: mounted.options.transport != Transport::DevFuse,
    };
    let (header, offer) = read_init(mounted.fuse_fd())?;
    if offer.major != crate::proto::MAJOR || offer.minor < crate::proto::OLDEST_MINOR {
        return Err(ServeError::TooOld { major: offer.major, minor: offer.minor });
    }
    let offers_uring = InitFlags::from_words(offer.flags, offer.flags2)
        .has(InitFlags::OVER_IO_URING)
        && wishes.uring;
    if mounted.options.transport == Transport::Uring && !offers_uring {
        return Err(ServeError::NoUring);
    }
    let dispatch = Arc::new(Dispatch::new(handler, stats));
    // The rings must exist before io_uring is accepted: from then on the kernel holds every request
    // back until all queues are registered, and there is no way back.
    let prepared = host
        .threads(offers_uring)
        .and_then(|threads| threads.map(|threads| threads.prepare(mounted, &dispatch)).transpose());
    let rings = match prepared {
        Ok(None) if mounted.options.transport == Transport::Uring => {
            return Err(ServeError::NoThreads);
        }
        Ok(rings) => rings,
        Err(source) if mounted.options.transport == Transport::Uring => {
            return Err(ServeError::Io { what: "setting up io_uring", source });
        }
        Err(error) => {
            tracing::warn!(%error, "io_uring cannot be used, falling back to /dev/fuse");
            None
        }
    };
    let out = init::negotiate(&offer, Wishes { uring: rings.is_some(), ..wishes });
    send(mounted.fuse_fd(), header.unique, Ok(out.as_bytes()))
        .map_err(io_error("answering INIT"))?;
    let ready = |threads: usize| {
        mounted.porter().raise_read_ahead();
        Ready {
            uring: rings.is_some(),
            threads,
            minor: out.minor,
            writeback: InitFlags::from_words(out.flags, out.flags2).has(InitFlags::WRITEBACK_CACHE),
        }
    };
    let served = match &rings {
        Some(rings) => {
            rings.start().map_err(io_error("registering io_uring queues")).and_then(|()| {
                let silent = dev_fuse::Silent::open(mounted)?;
                on_ready(ready(rings.len()));
                dispatch.silent.get_or_init(|| silent).serve(&dispatch)
            })
        }
        None => dev_fuse::serve(mounted, &dispatch, |threads| on_ready(ready(threads))),
    };
    if served.is_err() {
        // Callers would hang for ever, and our own threads with them: take the mount away.
        let _ = mounted.porter().detach();
    }
    drop(rings);
    dispatch.finish();
    served
}

fn read_init(fd: BorrowedFd<'_>) -> Result<(InHeader, InitIn), ServeError> {
    let mut buffer = vec![0; MESSAGE_SIZE];
    let n = loop {
        match rustix::io::read(fd, &mut buffer) {
            Ok(n) => break n,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NOENT | rustix::io::Errno::AGAIN) => {}
            Err(rustix::io::Errno::NODEV) => return Err(ServeError::Unmounted),
            Err(e) => return Err(io_error("reading from /dev/fuse")(e.into())),
        }
    };
    let message = buffer.get(..n).unwrap_or_default();
    let unexpected =
        || io_error("reading INIT")(io::Error::other("an unexpected message came first"));
    let (header, body) = InHeader::read_from_prefix(message).map_err(|_| unexpected())?;
    if header.opcode != Opcode::Init as u32 {
        return Err(unexpected());
    }
    // Older kernels send less; what is missing counts as not offered.
    let mut offer = InitIn::new_zeroed();
    let len = body.len().min(size_of::<InitIn>());
    offer.as_mut_bytes()[..len].copy_from_slice(&body[..len]);
    Ok((header, offer))
}

/// Sends a reply through `/dev/fuse`. That the caller is gone by now is no error.
fn send(fd: BorrowedFd<'_>, unique: u64, body: Result<&[u8], Errno>) -> io::Result<()> {
    let (error, body) = match body {
        Ok(body) => (0, body),
        Err(e) => (-e.0, &[][..]),
    };
    let head = OutHeader { len: (size_of::<OutHeader>() + body.len()) as u32, error, unique };
    let parts = [io::IoSlice::new(head.as_bytes()), io::IoSlice::new(body)];
    loop {
        return match rustix::io::writev(fd, &parts) {
            Ok(_) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV) => Ok(()),
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => Err(e.into()),
        };
    }
}

/// A request as it lies in a transport's buffers.
#[derive(Clone, Copy)]
pub(crate) struct Raw<'a> {
    pub(crate) header: InHeader,
    pub(crate) arg: &'a [u8],
    pub(crate) data: &'a [u8],
}

/// How many requests of one kind of buffer may wait for the kernel at the same time.
///
/// It may be waiting for a request for which no buffer would be left otherwise: for a page that it
/// has locked until a read has filled it.
#[derive(Debug)]
pub(crate) struct Loans(AtomicUsize);

impl Loans {
    pub(crate) fn new(most: usize) -> Self {
        Self(AtomicUsize::new(most))
    }
    fn take(&self) -> bool {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok()
    }
    fn give(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
    /// After an answer with this patience.
    pub(crate) fn give_back(&self, patience: Patience) {
        if patience == Patience::Kernel {
            self.give();
        }
    }
}

/// What every transport needs to answer a request.
pub(crate) struct Dispatch<H> {
    handler: Arc<H>,
    pub(crate) stats: Arc<Stats>,
    workers: Workers,
    /// Threads for [`Patience::Kernel`]. They wait until the kernel has what other requests bring
    /// it, so none of those may ever have to wait for one of these threads.
    kernel_waiters: Workers,
    forgets: Mutex<Forgets>,
    /// Held by who forgets elsewhere than a reader.
    forgetting: Mutex<()>,
    /// Beside io_uring.
    silent: OnceLock<dev_fuse::Silent>,
    /// Where requests come from.
    drains: OnceLock<Drains>,
}

/// Who takes part in a [`drain`].
enum Drains {
    Queues(Vec<Arc<uring::Returned>>, drain::Marker),
    Readers(Arc<dev_fuse::Meeting>),
}

/// Look-ups that the kernel has given back and the handler does not know of yet.
#[derive(Debug, Default)]
struct Forgets {
    list: Vec<(u64, u64)>,
    /// A worker is on it.
    under_way: bool,
}

impl<H> std::fmt::Debug for Dispatch<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatch").field("workers", &self.workers).finish_non_exhaustive()
    }
}

impl<H> Dispatch<H> {
    fn new(handler: Arc<H>, stats: Arc<Stats>) -> Self {
        Self {
            handler,
            stats,
            workers: Workers::new(MAX_WORKERS, MAX_WORKERS),
            // The thread that brings a job must not do it.
            kernel_waiters: Workers::new(MAX_KERNEL_WAITERS, usize::MAX),
            forgets: Mutex::default(),
            forgetting: Mutex::default(),
            silent: OnceLock::new(),
            drains: OnceLock::new(),
        }
    }

    /// Where requests go on that were refused with this: the threads, and the patience that they
    /// have. `None`: nowhere. [`Patience::Kernel`] is a loan, to be given back.
    pub(crate) fn elsewhere(
        &self,
        failure: Failure,
        loans: &Loans,
    ) -> Option<(&Workers, Patience)> {
        match failure {
            Failure::Errno(_) => None,
            Failure::Wait => Some((&self.workers, Patience::Worker)),
            Failure::WaitForKernel if loans.take() => {
                Some((&self.kernel_waiters, Patience::Kernel))
            }
            Failure::WaitForKernel => Some((&self.workers, Patience::Afterwards)),
        }
    }

    /// Waits for everything that is under way.
    fn finish(&self) {
        // Workers first: they may still hand over.
        self.workers.finish();
        self.kernel_waiters.finish();
        match self.drains.get() {
            Some(Drains::Queues(_, marker)) => marker.finish(),
            Some(Drains::Readers(meeting)) => meeting.finish(),
            None => {}
        }
    }
}

impl<H: Handler> Dispatch<H> {
    /// Who puts marks in for this mount.
    fn marker(&self, mounted: &Mounted) -> io::Result<drain::Marker> {
        let handler = Arc::clone(&self.handler);
        Ok(drain::Marker::new(mounted.fuse_fd().try_clone_to_owned()?, move |most| {
            handler.nodes_in_use(most)
        }))
    }

    /// Counts a request that has just arrived.
    pub(crate) fn arrived(&self, header: &InHeader) {
        self.stats.request(header.opcode);
    }

    /// Answers a request into `out`: bytes of the body, or why there is none. A handler that panics
    /// answers EIO.
    pub(crate) fn answer(
        self: &Arc<Self>,
        raw: Raw<'_>,
        out: &mut [u8],
        patience: Patience,
    ) -> Result<usize, Failure> {
        let Some(opcode) = Opcode::from_number(raw.header.opcode) else {
            return Err(Failure::Errno(Errno::NOSYS));
        };
        let request = Request { header: raw.header, opcode, arg: raw.arg, data: raw.data };
        if patience != Patience::Queue && self.handler.comes_after_forgets(&request) {
            self.settle();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.handler.handle(&request, &mut Reply::new(out), patience)
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
                let final_word = matches!(patience, Patience::Kernel | Patience::Afterwards);
                if final_word || (failure, patience) == (Failure::Wait, Patience::Worker) {
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
    fn comes_after_writes(&self, raw: Raw<'_>) -> bool {
        let opcode = Opcode::from_number(raw.header.opcode);
        opcode.is_some_and(|opcode| {
            let request = Request { header: raw.header, opcode, arg: raw.arg, data: raw.data };
            self.handler.comes_after_writes(&request)
        })
    }

    /// Calls `then` when no transfer older than the request with the number `before` is left; on
    /// any thread of ours, at once where none can be under way.
    fn after_writes(&self, before: u64, then: impl FnOnce() + Send + 'static) {
        match self.drains.get() {
            Some(Drains::Queues(queues, _)) => {
                let drain = Arc::new(drain::Drain::new(before, queues.len(), then));
                queues.iter().for_each(|queue| queue.drain(&drain));
            }
            Some(Drains::Readers(meeting)) => {
                meeting.drain(Arc::new(drain::Drain::new(before, 1, then)))
            }
            None => then(),
        }
    }

    /// Is a request answered through [`answer_later`](Self::answer_later), once it is where there
    /// is this patience?
    pub(crate) fn answers_later(&self, header: &InHeader, patience: Patience) -> bool {
        let opcode = Opcode::from_number(header.opcode);
        patience == Patience::Worker
            && opcode.is_some_and(|opcode| self.handler.answers_later(opcode))
    }

    /// Has a request answered through `send`, now or later.
    pub(crate) fn answer_later(
        &self,
        raw: Raw<'_>,
        send: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        let later = Later::new(&self.workers, &self.stats, send);
        let Some(opcode) = Opcode::from_number(raw.header.opcode) else {
            return later.answer(Err(Errno::NOSYS));
        };
        let request = Request { header: raw.header, opcode, arg: raw.arg, data: raw.data };
        // One that is dropped on the way out answers by itself.
        if catch_unwind(AssertUnwindSafe(|| self.handler.handle_later(&request, later))).is_err() {
            self.stats.panic();
            tracing::error!(
                opcode = opcode.name(),
                node = raw.header.nodeid,
                "internal error while serving"
            );
        }
    }

    /// What a message forgets that has no reply: it may be nothing. `None`: it is an ordinary
    /// request.
    pub(crate) fn silent(&self, message: &[u8], header: &InHeader) -> Option<Vec<(u64, u64)>> {
        let body = message.get(size_of::<InHeader>()..).unwrap_or_default();
        let mut forgotten = Vec::new();
        match Opcode::from_number(header.opcode) {
            Some(Opcode::Forget) => {
                if let Ok((f, _)) = ForgetIn::read_from_prefix(body) {
                    forgotten.push((header.nodeid, f.nlookup));
                }
            }
            Some(Opcode::BatchForget) => {
                if let Ok((head, mut rest)) = BatchForgetIn::read_from_prefix(body) {
                    for _ in 0..head.count {
                        let Ok((one, tail)) = ForgetOne::read_from_prefix(rest) else { break };
                        forgotten.push((one.nodeid, one.nlookup));
                        rest = tail;
                    }
                }
            }
            // Requests are short or already decided; nothing is to be gained from stopping one
            // half-way.
            Some(Opcode::Interrupt) => {}
            _ => return None,
        }
        self.stats.forget(forgotten.len() as u64);
        Some(forgotten)
    }

    /// Waits until the handler knows of what the kernel has forgotten so far. (Without io_uring but
    /// for what a reader is just about to take in.)
    fn settle(self: &Arc<Self>) {
        if let Some(silent) = self.silent.get() {
            silent.settle(self);
        }
        let _forgetting = self.forgetting.lock();
        let list = std::mem::take(&mut self.forgets.lock().list);
        self.forget(&list);
    }

    /// The last look-up of a deleted file gives its space back, which takes a while.
    pub(crate) fn forget(&self, list: &[(u64, u64)]) {
        for &(node, count) in list {
            if count > 0
                && catch_unwind(AssertUnwindSafe(|| self.handler.forget(node, count))).is_err()
            {
                self.stats.panic();
                tracing::error!(node, "internal error while forgetting an inode");
            }
        }
    }

    /// Forgets on a worker.
    fn forget_elsewhere(self: &Arc<Self>, list: &[(u64, u64)]) {
        /// More than this and the reader, which is faster than the worker, helps.
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

/// Takes a message from `/dev/fuse` apart.
fn parse(message: &[u8]) -> Option<Raw<'_>> {
    let (header, body) = InHeader::read_from_prefix(message).ok()?;
    let arg_len = Opcode::from_number(header.opcode).map_or(0, Opcode::arg_len).min(body.len());
    // Extensions (none is negotiated) stand at the end.
    let end = body.len().saturating_sub(usize::from(header.total_extlen) * 8).max(arg_len);
    Some(Raw { header, arg: &body[..arg_len], data: &body[arg_len..end] })
}

/// Sends an answer, and says in the log if that fails in a way that matters.
pub(crate) fn respond(fd: impl AsFd, unique: u64, body: Result<&[u8], Errno>) {
    if let Err(error) = send(fd.as_fd(), unique, body) {
        tracing::warn!(%error, "a reply was not accepted");
        // The caller must not hang because its answer was malformed.
        let _ = send(fd.as_fd(), unique, Err(Errno::IO));
    }
}
