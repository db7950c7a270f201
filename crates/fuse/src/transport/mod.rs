//! How requests reach the server, and how replies reach the kernel.
//!
//! There are two ways: FUSE over io_uring (`uring`) with one thread pinned to each CPU, and, as the
//! fallback, reading `/dev/fuse` (`dev_fuse`). It matters *where* a request is served. On the CPU
//! of its caller a round trip costs 8–10 µs, on another CPU that is idle 40 µs and more. Hence a
//! queue's own thread answers whatever it can without waiting. Only requests that have to wait (for
//! a disk, a commit, space) go to the workers.
//!
//! This module holds what both share: the INIT exchange and the life of a session, and the threads
//! that all mounts of one process share (`SharedTransport`). Module `dispatch` answers one request.

mod cpus;
mod dev_fuse;
mod direct;
mod dispatch;
mod drain;
mod memory;
mod uring;

pub use direct::Direct;
use dispatch::{Dispatch, MAX_WORKERS, Permits, RawRequest};

use crate::errno::Errno;
use crate::handler::Handler;
use crate::helper::Mounted;
use crate::mount::Transport;
use crate::proto::init::{self, InitIn, InitOptions};
use crate::proto::{InHeader, InitFlags, Opcode, OutHeader};
use crate::stats::Stats;
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Space before the data of a write: head and fixed structure.
const HEAD_ROOM: usize = 4096;
/// Bytes of the buffer for one message.
pub(crate) const MESSAGE_SIZE: usize = init::MAX_WRITE as usize + HEAD_ROOM;

/// What was agreed with the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// io_uring is in use.
    pub uring: bool,
    /// Threads that serve requests. The reader of FORGETs beside io_uring is not counted.
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
        /// What it was called for.
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
    /// io_uring was demanded for a further mount, but the first one does not use it.
    #[error(
        "the first mount of this image was made without FUSE over io_uring, which cannot be had \
            deferred: \
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
/// `on_ready` is called once, when the kernel has our answer to INIT and requests are being served.
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
    SharedTransport::default().serve(handler, mounted, stats, on_ready)
}

/// What the mounts of one process share: the threads and rings of FUSE over io_uring.
///
/// They are made for the first mount or never: once it is served, the [sandbox](crate::sandbox) is
/// sealed and lets no ring be made.
#[derive(Debug)]
pub(crate) struct SharedTransport<H>(Mutex<SharedThreads<H>>);

#[derive(Debug)]
enum SharedThreads<H> {
    /// No mount has come yet.
    NotYet,
    /// The first mount does not use them, or could not have them.
    None,
    Some(Arc<uring::RingThreads<H>>),
}

impl<H> Default for SharedTransport<H> {
    fn default() -> Self {
        Self(Mutex::new(SharedThreads::NotYet))
    }
}

impl<H: Handler> SharedTransport<H> {
    /// As [`serve_handler`], for one of several mounts.
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
            // Otherwise programs would hang in a mount that no server answers. Once it was served,
            // it is gone already.
            let _ = mounted.helper().detach();
        }
        served
    }

    /// The threads for a mount, made if it is the first one and `uses` them. `None` if it does not,
    /// or if they were not made for the first one.
    fn threads(&self, uses: bool) -> io::Result<Option<Arc<uring::RingThreads<H>>>> {
        let mut threads = self.0.lock();
        if matches!(*threads, SharedThreads::NotYet) {
            *threads = SharedThreads::None;
            if uses {
                *threads = SharedThreads::Some(Arc::new(uring::RingThreads::start()?));
            }
        }
        Ok(match &*threads {
            SharedThreads::Some(there) if uses => Some(Arc::clone(there)),
            _ => None,
        })
    }
}

fn serve_session<H: Handler>(
    shared: &SharedTransport<H>,
    handler: Arc<H>,
    mounted: &Mounted,
    stats: Arc<Stats>,
    on_ready: impl FnOnce(Ready),
) -> Result<(), ServeError> {
    let options = InitOptions {
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
        && options.uring;
    if mounted.options.transport == Transport::Uring && !offers_uring {
        return Err(ServeError::NoUring);
    }
    let dispatch = Arc::new(Dispatch::new(handler, stats));
    let rings = prepare_queues(shared, mounted, &dispatch, offers_uring)?;
    let out = init::negotiate(&offer, InitOptions { uring: rings.is_some(), ..options });
    send(mounted.fuse_fd(), header.unique, Ok(out.as_bytes()))
        .map_err(io_error("answering INIT"))?;
    let ready = |threads: usize| {
        mounted.helper().raise_read_ahead();
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
                let forgets = Arc::new(dev_fuse::ForgetReader::open(mounted)?);
                on_ready(ready(rings.len()));
                dispatch.forget_source.get_or_init(|| Arc::clone(&forgets) as _);
                forgets.serve(&dispatch)
            })
        }
        None => dev_fuse::serve(mounted, &dispatch, |threads| on_ready(ready(threads))),
    };
    if served.is_err() {
        // Otherwise callers would hang for ever, and our own threads with them.
        let _ = mounted.helper().detach();
    }
    drop(rings);
    dispatch.finish();
    served
}

/// The queues of a mount for io_uring; `None` if it is served over `/dev/fuse`.
///
/// They must exist before io_uring is accepted. From then on the kernel holds every request back
/// until all queues are registered, and it cannot be undone.
fn prepare_queues<H: Handler>(
    shared: &SharedTransport<H>,
    mounted: &Mounted,
    dispatch: &Arc<Dispatch<H>>,
    offered: bool,
) -> Result<Option<uring::MountQueues<H>>, ServeError> {
    let demanded = mounted.options.transport == Transport::Uring;
    let prepared = shared
        .threads(offered)
        .and_then(|threads| threads.map(|threads| threads.prepare(mounted, dispatch)).transpose());
    match prepared {
        Ok(None) if demanded => Err(ServeError::NoThreads),
        Ok(queues) => Ok(queues),
        Err(source) if demanded => Err(ServeError::Io { what: "setting up io_uring", source }),
        Err(error) => {
            tracing::warn!(%error, "io_uring cannot be used, falling back to /dev/fuse");
            Ok(None)
        }
    }
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
    // Older kernels send less. What is missing is not offered.
    let mut offer = InitIn::new_zeroed();
    let len = body.len().min(size_of::<InitIn>());
    offer.as_mut_bytes()[..len].copy_from_slice(&body[..len]);
    Ok((header, offer))
}

/// Sends a reply through `/dev/fuse`. It is no error if the caller is gone by now.
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

/// The parts of a message from `/dev/fuse`.
fn parse(message: &[u8]) -> Option<RawRequest<'_>> {
    let (header, body) = InHeader::read_from_prefix(message).ok()?;
    let arg_len = Opcode::from_number(header.opcode).map_or(0, Opcode::arg_len).min(body.len());
    // Extensions (none is negotiated) stand at the end.
    let end = body.len().saturating_sub(usize::from(header.total_extlen) * 8).max(arg_len);
    Some(RawRequest { header, arg: &body[..arg_len], data: &body[arg_len..end] })
}

/// Sends an answer, and logs failures that matter.
pub(crate) fn respond(fd: impl AsFd, unique: u64, body: Result<&[u8], Errno>) {
    if let Err(error) = send(fd.as_fd(), unique, body) {
        tracing::warn!(%error, "a reply was not accepted");
        // The caller must not hang because its answer was malformed.
        let _ = send(fd.as_fd(), unique, Err(Errno::IO));
    }
}
