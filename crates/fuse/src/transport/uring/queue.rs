//! One mount's queue on one CPU: its entries, and what becomes of the requests that they carry.
//!
//! An entry comes back with a request, is answered here or goes to a worker as a whole, and is
//! handed over again with the answer. All of this happens on the thread of the CPU, which the
//! queues of all mounts share ([`super`]); they share nothing else.

use super::super::drain::{self, Drain, Fence};
use super::super::memory::{self, RingEntry};
use super::super::{Dispatch, RawRequest};
use super::inbox::{MountInboxes, QueueInbox};
use super::ring::CpuRing;
use crate::handler::{ExecContext, Failure, Handler};
use crate::proto::{InHeader, Opcode, RingCommand};
use io_uring::opcode;
use io_uring::squeue::Entry128;
use io_uring::types::Fd;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use zerocopy::IntoBytes;

/// Submission commands of FUSE.
const CMD_REGISTER: u32 = 1;
const CMD_COMMIT_AND_FETCH: u32 = 2;
/// Writes of up to this many bytes are served in their turn.
const SHORT: usize = 128 << 10;
/// Payload that an entry other than a large one keeps in memory. With the large ones, that is 64
/// MiB in all.
const KEPT: usize = 64 << 10;

/// A drain that a queue takes part in.
struct QueueDrain {
    drain: Arc<Drain>,
    /// Fences that were sent.
    fences: u32,
    /// One of them has not come back yet.
    under_way: bool,
    /// No transfer that it waits for has arrived since that one was sent.
    clean: bool,
}

/// Does this error of an entry say that the mount is gone?
pub(super) fn is_unmounted(error: i32) -> bool {
    matches!(error, libc::ENOTCONN | libc::ECONNABORTED)
}

/// One mount's queue, used by its CPU's thread only.
pub(super) struct MountQueue<H> {
    /// The connection, opened as a file of its own, so that the queues of other CPUs do not contend
    /// for it.
    fuse: OwnedFd,
    /// Index among the mounts of the thread.
    pub(super) slot: usize,
    /// Entries that the kernel has; `None` while one is here or with a worker.
    with_kernel: Vec<Option<RingEntry>>,
    /// Entries that still can carry requests.
    live: usize,
    /// How many of `with_kernel` are `Some`.
    armed: usize,
    /// Entries up to this index keep their payload's memory.
    large: usize,
    /// Entries that are not registered yet.
    spare: Vec<RingEntry>,
    inbox: Arc<QueueInbox>,
    /// Those of all queues of the mount.
    inboxes: Arc<MountInboxes>,
    /// Requests that take long. All short ones go first, also those that come between two of these.
    long: VecDeque<(RingEntry, InHeader, usize)>,
    /// The drains that it takes part in.
    draining: Vec<QueueDrain>,
    /// Numbers of the transfers that are with workers.
    with_workers: BTreeSet<u64>,
    dispatch: Arc<Dispatch<H>>,
    /// Hangs up when the queue has ended.
    _here: mpsc::SyncSender<()>,
}

impl<H: Handler> MountQueue<H> {
    /// A queue of `large` entries that keep their memory, and `most` in all, with the inbox that
    /// has the number `own`. Nothing is registered yet.
    pub(super) fn new(
        (large, most): (usize, usize),
        fuse: OwnedFd,
        (inboxes, own): (Arc<MountInboxes>, usize),
        dispatch: Arc<Dispatch<H>>,
        here: mpsc::SyncSender<()>,
    ) -> io::Result<Self> {
        let mut first = memory::entries(most)?;
        let mut spare = first.split_off(large);
        // Taken from the end.
        spare.reverse();
        let mut with_kernel: Vec<Option<RingEntry>> = first.into_iter().map(Some).collect();
        with_kernel.resize_with(most, || None);
        Ok(Self {
            fuse,
            slot: 0,
            live: large,
            armed: large,
            large,
            spare,
            with_kernel,
            inbox: Arc::clone(&inboxes.queues[own]),
            inboxes,
            long: VecDeque::new(),
            draining: Vec::new(),
            with_workers: BTreeSet::new(),
            dispatch,
            _here: here,
        })
    }

    /// Hands the first entries to the kernel.
    pub(super) fn register(&mut self, ring: &mut CpuRing) -> io::Result<()> {
        let first: Vec<Entry128> =
            self.with_kernel.iter().flatten().map(|entry| self.command(ring.id, entry)).collect();
        first.into_iter().try_for_each(|submission| ring.push(submission))
    }

    /// Can no entry carry a request any more? Then the mount is gone.
    pub(super) fn is_over(&self) -> bool {
        self.live == 0
    }

    /// Are there long requests that wait for the short ones?
    pub(super) fn has_long(&self) -> bool {
        !self.long.is_empty()
    }

    /// Serves one of the long requests.
    pub(super) fn serve_long(&mut self, ring: &mut CpuRing) -> io::Result<()> {
        self.long
            .pop_front()
            .map_or(Ok(()), |(entry, header, len)| self.serve(ring, entry, header, len))
    }

    /// Is a drain waiting for fences of this queue?
    pub(super) fn is_draining(&self) -> bool {
        !self.draining.is_empty()
    }

    /// Handles what other threads have for this queue.
    pub(super) fn read_inbox(&mut self, ring: &mut CpuRing) -> io::Result<()> {
        for entry in self.inbox.take() {
            self.with_workers.remove(&entry.commit_id);
            self.give_to_kernel(ring, entry)?;
        }
        let news = self.inbox.take_news();
        let begun = news.begun.into_iter();
        self.draining.extend(begun.map(|drain| QueueDrain {
            drain,
            fences: 0,
            under_way: false,
            clean: false,
        }));
        for drain in news.fences {
            self.fence_came_out(drain);
        }
        for gone in self.draining.extract_if(.., |d| news.needless.contains(&d.drain.number)) {
            gone.drain.queue_done();
        }
        Ok(())
    }

    /// The kernel has given an entry back, with a request or an error.
    pub(super) fn completed(
        &mut self,
        ring: &mut CpuRing,
        index: usize,
        result: i32,
    ) -> io::Result<()> {
        let Some(mut entry) = self.with_kernel.get_mut(index).and_then(Option::take) else {
            return Ok(());
        };
        self.armed -= 1;
        match -result {
            0 => self.request_came(ring, entry),
            libc::EAGAIN | libc::EINTR => self.give_to_kernel(ring, entry),
            error => {
                // This entry is lost; the queue goes on with the others.
                if !is_unmounted(error) {
                    tracing::debug!(queue = ring.id, error, "a ring entry was given up");
                }
                entry.registering = false;
                self.live -= 1;
                Ok(())
            }
        }
    }

    /// Goes on with the drains, after all requests that have come out of the queue were seen. False
    /// if the ring has failed.
    pub(super) fn send_fences(&mut self, ring: &mut CpuRing) -> bool {
        // For every answer the kernel lets a further request into the queue. Behind a fence, these
        // would be missed.
        if !ring.submit_all() {
            return false;
        }
        for draining in &mut self.draining {
            let oldest_with_worker = self.with_workers.first().copied().unwrap_or(u64::MAX);
            if draining.under_way || oldest_with_worker < draining.drain.before {
                continue;
            }
            let fence = Fence { drain: draining.drain.number, queue: ring.id };
            (draining.under_way, draining.clean) = (true, true);
            draining.fences += 1;
            let inbox = Arc::clone(&self.inbox);
            let otherwise = move || inbox.needs_no_fence(fence.drain);
            self.inboxes.fences.send(fence, Some(ring.id.into()), otherwise);
        }
        true
    }

    /// A fence has come out of the kernel's queue.
    fn fence_came_out(&mut self, drain: u32) {
        let Some(at) = self.draining.iter().position(|d| d.drain.number == drain) else { return };
        let draining = &mut self.draining[at];
        draining.under_way = false;
        // The first fence proves nothing: see `docs/FUSE.md`.
        if draining.clean && draining.fences > 1 {
            self.draining.swap_remove(at).drain.queue_done();
        }
    }

    /// Gives the entry to the kernel, to register it or with an answer.
    fn give_to_kernel(&mut self, ring: &mut CpuRing, mut entry: RingEntry) -> io::Result<()> {
        if entry.index >= self.large {
            entry.forget_beyond(KEPT);
        }
        let submission = self.command(ring.id, &entry);
        let index = entry.index;
        self.with_kernel[index] = Some(entry);
        self.armed += 1;
        ring.push(submission)
    }

    /// Registers one more entry if few are left to the kernel.
    fn grow(&mut self, ring: &mut CpuRing) -> io::Result<()> {
        if self.armed > self.large / 2 {
            return Ok(());
        }
        let Some(entry) = self.spare.pop() else { return Ok(()) };
        self.live += 1;
        self.give_to_kernel(ring, entry)
    }

    /// A request has come out of the kernel's queue. It is served now, or after the short ones.
    fn request_came(&mut self, ring: &mut CpuRing, mut entry: RingEntry) -> io::Result<()> {
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
        self.serve(ring, entry, header, len)
    }

    fn serve(
        &mut self,
        ring: &mut CpuRing,
        mut entry: RingEntry,
        header: InHeader,
        len: usize,
    ) -> io::Result<()> {
        if let Some(fence) = Fence::of(&header) {
            if fence.queue == ring.id {
                self.fence_came_out(fence.drain);
            } else if let Some(other) = self.inboxes.queues.get(usize::from(fence.queue)) {
                other.fence_came_out(fence.drain);
            }
            // The kernel needs no answer, but it needs the entry.
            entry.answer(header.unique, Ok(0));
            return self.give_to_kernel(ring, entry);
        }
        self.dispatch.arrived(&header);
        let outcome = if header.opcode == Opcode::Write as u32 {
            answer_write(&self.dispatch, &mut entry, header, len, ExecContext::Queue)
        } else {
            ring.names.clear();
            ring.names.extend_from_slice(&entry.payload()[..len]);
            answer_other(&self.dispatch, &mut entry, header, &ring.names, ExecContext::Queue)
        };
        let outcome = match outcome {
            Ok(len) => Ok(len),
            Err(Failure::Errno(e)) => Err(e.0),
            Err(failure) => {
                if drain::is_transfer(header.opcode) {
                    self.with_workers.insert(header.unique);
                }
                let (dispatch, inbox) = (Arc::clone(&self.dispatch), Arc::clone(&self.inbox));
                let names = std::mem::take(&mut ring.names);
                MovedRequest { dispatch, inbox, entry, header, len, names, drained: false }
                    .go_on(failure);
                // A large request waits for memory: more of these would not help.
                return if len <= KEPT { self.grow(ring) } else { Ok(()) };
            }
        };
        entry.answer(header.unique, outcome);
        self.give_to_kernel(ring, entry)
    }

    /// The submission that hands an entry over.
    fn command(&self, queue: u16, entry: &RingEntry) -> Entry128 {
        let (cmd, addr, iovecs) = if entry.registering {
            (CMD_REGISTER, Some(entry.iovecs_address()), 2u32)
        } else {
            (CMD_COMMIT_AND_FETCH, None, 0)
        };
        let ring_command = RingCommand {
            flags: 0,
            commit_id: entry.commit_id,
            qid: queue,
            ..RingCommand::default()
        };
        let mut area = [0; 80];
        area[..size_of::<RingCommand>()].copy_from_slice(ring_command.as_bytes());
        let built = opcode::UringCmd80::new(Fd(self.fuse.as_raw_fd()), cmd)
            .cmd(area)
            .addr(addr)
            .build()
            .user_data(user_data(self.slot, entry.index));
        with_len(built, iovecs)
    }
}

/// Identifies an entry in its completions: the index of its mount among those of the thread, and
/// its own.
fn user_data(slot: usize, index: usize) -> u64 {
    (slot as u64) << 32 | index as u64
}

/// The reverse of [`user_data`].
pub(super) fn place_of(user_data: u64) -> (usize, usize) {
    ((user_data >> 32) as usize, user_data as u32 as usize)
}

/// A request that moves between threads, with its entry.
struct MovedRequest<H> {
    dispatch: Arc<Dispatch<H>>,
    inbox: Arc<QueueInbox>,
    entry: RingEntry,
    header: InHeader,
    len: usize,
    names: Vec<u8>,
    /// The requests that it comes after have been answered.
    drained: bool,
}

impl<H: Handler> MovedRequest<H> {
    /// Answers it on a thread that may wait for what it has to wait for.
    fn go_on(mut self, failure: Failure) {
        let here = Arc::clone(&self.dispatch);
        if !std::mem::replace(&mut self.drained, true) {
            let (arg, arg_len) = fixed_part(&self.entry, &self.header);
            let raw = RawRequest { header: self.header, arg: &arg[..arg_len], data: &[] };
            if here.comes_after_writes(raw) {
                if !self.inbox.held_back.acquire() {
                    self.entry.answer(self.header.unique, Err(libc::EAGAIN));
                    return self.inbox.give(self.entry);
                }
                return here.after_writes(self.header.unique, move || {
                    self.inbox.held_back.release();
                    self.go_on(failure);
                });
            }
        }
        let Some((pool, context)) = here.pool_for(failure, &self.inbox.kernel_waits) else {
            return;
        };
        pool.run(move || {
            if self.dispatch.defers_reply(&self.header, context) {
                return self.wait_without_a_thread();
            }
            let outcome = if self.header.opcode == Opcode::Write as u32 {
                answer_write(&self.dispatch, &mut self.entry, self.header, self.len, context)
            } else {
                answer_other(&self.dispatch, &mut self.entry, self.header, &self.names, context)
            };
            self.inbox.kernel_waits.release_after(context);
            let outcome = match outcome {
                Ok(len) => Ok(len),
                Err(Failure::Errno(e)) => Err(e.0),
                Err(failure) => return self.go_on(failure),
            };
            self.entry.answer(self.header.unique, outcome);
            self.inbox.give(self.entry);
        });
    }

    /// Leaves the entry to the code that will have the answer.
    fn wait_without_a_thread(self) {
        let Self { dispatch, inbox, mut entry, header, names, .. } = self;
        let (arg, arg_len) = fixed_part(&entry, &header);
        let raw = RawRequest { header, arg: &arg[..arg_len], data: &names };
        dispatch.answer_deferred(raw, move |outcome| {
            entry.answer(header.unique, outcome.map(|()| 0).map_err(|e| e.0));
            inbox.give(entry);
        });
    }
}

/// Answers a write. The data stays where it is, so the reply is made in another buffer.
fn answer_write<H: Handler>(
    dispatch: &Arc<Dispatch<H>>,
    entry: &mut RingEntry,
    header: InHeader,
    len: usize,
    context: ExecContext,
) -> Result<usize, Failure> {
    let mut out = [0; 64];
    let raw = RawRequest {
        header,
        arg: entry.arg(Opcode::Write.arg_len()),
        data: &entry.payload()[..len],
    };
    let n = dispatch.answer(raw, &mut out, context)?;
    entry.payload_mut()[..n].copy_from_slice(&out[..n]);
    Ok(n)
}

fn answer_other<H: Handler>(
    dispatch: &Arc<Dispatch<H>>,
    entry: &mut RingEntry,
    header: InHeader,
    names: &[u8],
    context: ExecContext,
) -> Result<usize, Failure> {
    let (arg, arg_len) = fixed_part(entry, &header);
    let raw = RawRequest { header, arg: &arg[..arg_len], data: names };
    dispatch.answer(raw, entry.payload_mut(), context)
}

/// A copy of a request's fixed structure, and its length.
fn fixed_part(entry: &RingEntry, header: &InHeader) -> ([u8; 128], usize) {
    let mut arg = [0; 128];
    let len = Opcode::from_number(header.opcode).map_or(0, Opcode::arg_len).min(arg.len());
    arg[..len].copy_from_slice(entry.arg(len));
    (arg, len)
}

/// Sets the `len` field, which the io_uring crate's builder for commands leaves out: REGISTER
/// passes the number of iovecs there.
fn with_len(submission: Entry128, len: u32) -> Entry128 {
    const LEN_AT: usize = 24;
    const _: () = assert!(size_of::<Entry128>() == 128);
    // SAFETY: Entry128 is the kernel's 128-byte submission (repr(C), no padding), any bytes of
    // which are valid.
    let mut bytes: [u8; 128] = unsafe { std::mem::transmute(submission) };
    bytes[LEN_AT..LEN_AT + 4].copy_from_slice(&len.to_ne_bytes());
    // SAFETY: as above.
    unsafe { std::mem::transmute(bytes) }
}

impl<H> Drop for MountQueue<H> {
    fn drop(&mut self) {
        let waiting = self.draining.drain(..).map(|d| d.drain);
        for drain in self.inbox.end().into_iter().chain(waiting) {
            drain.queue_done();
        }
    }
}
