//! Submitting and completing delayed data: runs of dirty bytes become runs in flight, and these
//! end.

use super::queue::budget;
use super::scratch::PACKER;
use crate::base::sectors::SECTOR;
use crate::engine::file_data::dirty::{MOST_MADE, SECTOR_LEN, Taken, index};
use crate::engine::file_data::{Inner, RunInFlight, overlaps};
use crate::engine::{Core, Inode, compression, inline};
use crate::lock::Locked;
use crate::space::SpaceKind;
use crate::space::reserve::Reservation;
use larder_format::MAX_COMPRESSED_EXTENT;
use larder_format::items::InodeFlags;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A run of one file that has been submitted, with what was reserved for it.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) inode: Arc<Inode>,
    pub(crate) in_flight: Arc<RunInFlight>,
    pub(crate) space: Reservation,
    pub(crate) items: Option<Reservation>,
}

/// How much to take at once, or how much was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of sectors.
    pub(crate) bytes: u64,
    /// Runs in flight, each of one file.
    pub(crate) runs: usize,
}

/// Submits dirty runs of a file. Returns the bytes of their sectors. `requeue`: the caller has
/// taken the file out of the queue.
///
/// A batch continues where the last one stopped, and from the end of the file it goes on at its
/// beginning. So data that is written at random places meanwhile has time to grow together until
/// its turn comes, and what one batch takes lies close together in the tree. If each batch began at
/// the start of the file, it would find only what came there since.
///
/// Runs whose sectors are in flight stay: a newer version of a sector must not overtake the older
/// one.
///
/// A few runs are taken at a time, because a writer to the file waits for as long as its locks are
/// held.
pub(crate) fn submit(
    core: &Core,
    inode: &Arc<Inode>,
    limits: Limits,
    requeue: bool,
    out: &mut Vec<Submission>,
) -> u64 {
    let mut round = Round { limits, stop: None, from: 0, around: false, span: 0, made: 0, runs: 0 };
    while round.take_some(core, inode, requeue, out) {
        inode.data.let_writers_in();
    }
    round.span
}

/// How many runs are submitted or completed under one hold of a file's locks.
const AT_ONCE: usize = 4;

/// The inner lock of a file, with the inode's flags and a size that covers all that is delayed.
/// Writers make the size larger before their bytes come in, and it becomes smaller only under both
/// locks. So the state's lock is dropped at once, and a writer waits for one lock only.
fn lock_with_size(inode: &Inode) -> (Locked<'_, Inner>, u64, InodeFlags) {
    let (state, inner) = inode.data.lock_under(|| inode.state.lock());
    (inner, state.size, state.item.inode_flags())
}

/// One way around a file in search of dirty runs.
struct Round {
    limits: Limits,
    /// Where it began. `None` before that.
    stop: Option<u64>,
    /// Where it is now.
    from: u64,
    /// It has come to the end of the file and goes on from the beginning.
    around: bool,
    /// What is written, and what of that has to be made whole, in bytes of whole sectors.
    span: u64,
    made: u64,
    runs: usize,
}

impl Round {
    /// Takes the next few runs. Returns false when there are no more to take.
    fn take_some(
        &mut self,
        core: &Core,
        inode: &Arc<Inode>,
        requeue: bool,
        out: &mut Vec<Submission>,
    ) -> bool {
        let (mut inner, size, flags) = lock_with_size(inode);
        let inner = &mut *inner;
        let counted = inner.dirty.counts();
        inner.dirty.settle();
        let before = inner.dirty.counts();
        core.data.count(&inode.data, counted, before);
        self.find_place(inner);
        let (mut bytes, first) = (0, self.runs);
        let over = loop {
            if self.is_over() {
                break true;
            }
            if self.runs - first >= AT_ONCE {
                break false;
            }
            match self.next_run(inner) {
                ControlFlow::Continue(Some(taken)) => {
                    bytes += taken.bytes;
                    out.push(put_in_flight(core, inode, inner, taken, (size, flags)));
                }
                ControlFlow::Continue(None) => {}
                ControlFlow::Break(()) => break true,
            }
        };
        core.data.count_segments(before, inner.dirty.counts());
        inner.stopped = if inner.dirty.is_empty() { 0 } else { self.from };
        if inner.dirty.is_empty() {
            inner.space = None;
        }
        if over && requeue {
            inner.queued = inner.dirty.oldest();
            if let Some(age) = inner.queued {
                core.data.requeue(age, inode.clone());
            }
        }
        core.data.dirty.fetch_sub(bytes, Ordering::AcqRel);
        !over
    }
    /// Goes to where the last batch stopped, or stays where this one is. What was written since may
    /// lie across that place.
    fn find_place(&mut self, inner: &Inner) {
        if self.stop.is_some() {
            self.from = inner.dirty.boundary(self.from);
        } else {
            self.from = inner.dirty.boundary(inner.stopped);
            self.around = self.from == 0;
            self.stop = Some(self.from);
        }
    }
    /// Has it taken what it may, or come back to where it began?
    fn is_over(&self) -> bool {
        let began = self.stop.filter(|stop| *stop > 0 && self.around);
        self.span >= self.limits.bytes
            || self.made >= MOST_MADE
            || self.runs >= self.limits.runs
            || began.is_some_and(|stop| self.from >= stop)
    }
    /// Takes the next run out, or goes on from the beginning of the file. Breaks where nothing is
    /// left.
    fn next_run(&mut self, inner: &mut Inner) -> ControlFlow<(), Option<Taken>> {
        let busy = |range: &Range<u64>| overlaps(&inner.in_flight, range);
        let taken = inner.dirty.take(&mut self.from, self.limits.bytes - self.span, busy);
        if let Some(taken) = &taken {
            self.span += taken.span();
            self.made += taken.made;
            self.runs += 1;
        } else if std::mem::replace(&mut self.around, true) {
            return ControlFlow::Break(());
        } else {
            self.from = 0;
        }
        ControlFlow::Continue(taken)
    }
}

/// Submits a run that was taken out of a file of this size and with these flags.
fn put_in_flight(
    core: &Core,
    inode: &Arc<Inode>,
    inner: &mut Inner,
    taken: Taken,
    (size, flags): (u64, InodeFlags),
) -> Submission {
    let inline = taken.start == 0
        && inner.dirty.is_empty()
        && inline::may_be_inline_somehow(core, size, flags);
    let space = match &mut inner.space {
        Some(space) => space.split(taken.span()),
        None => core.space.accounts.empty(SpaceKind::Data),
    };
    let in_flight = inner.put_in_flight(RunInFlight { taken, size, inline });
    Submission { inode: inode.clone(), in_flight, space, items: inner.items.take() }
}

/// Memory that writing these to the device will need.
pub(crate) fn memory_needed(core: &Core, submissions: &[Submission]) -> u64 {
    let sum = core.csum.size() as u64;
    let (mut bytes, mut pieces) = (0, 0);
    for Submission { inode, in_flight, .. } in submissions {
        let span = in_flight.taken.span();
        bytes += in_flight.taken.made + span / SECTOR * sum;
        if compression::wanted(core, inode.flags()) {
            bytes += span;
            pieces += span.div_ceil(MAX_COMPRESSED_EXTENT);
        }
    }
    bytes + pieces.min(rayon::current_num_threads() as u64) * PACKER
}

/// Is this run still in flight?
pub(crate) fn is_in_flight(inode: &Inode, run: &Arc<RunInFlight>) -> bool {
    let inner = inode.data.inner.lock();
    inner.in_flight.get(&run.taken.start).is_some_and(|f| Arc::ptr_eq(f, run))
}

/// Completes runs of one file: they are in extents, or lost. If they are in extents, the caller
/// holds a transaction handle.
pub(crate) fn complete<'a>(
    core: &Core,
    inode: &Inode,
    runs: impl IntoIterator<Item = &'a Arc<RunInFlight>>,
    written: bool,
) {
    let mut runs = runs.into_iter().peekable();
    while runs.peek().is_some() {
        complete_some(core, inode, runs.by_ref().take(AT_ONCE), written);
        inode.data.let_writers_in();
    }
}

fn complete_some<'a>(
    core: &Core,
    inode: &Inode,
    runs: impl Iterator<Item = &'a Arc<RunInFlight>>,
    written: bool,
) {
    let file = &inode.data;
    let (mut count, mut bytes, mut memory) = (0, 0, 0);
    {
        let (mut inner, size, _) = lock_with_size(inode);
        for run in runs {
            let mine = inner.in_flight.remove(&run.taken.start);
            assert!(
                mine.is_some_and(|f| Arc::ptr_eq(&f, run)),
                "a run completes that was never submitted"
            );
            count += 1;
            bytes += run.taken.bytes;
            memory += run.taken.memory;
            if written && inner.lost.is_empty() {
                continue;
            }
            for (at, data) in &run.taken.parts {
                let range = *at..at + data.len() as u64;
                inner.forget_lost(&range);
                if !written && *at < size {
                    inner.lost.push(range);
                }
            }
        }
        if inner.in_flight.is_empty() {
            inner.in_flight = BTreeMap::new();
        }
        if written {
            inner.on_completion(size);
        }
        file.delayed.fetch_sub(bytes, Ordering::AcqRel);
        file.completed.notify_all();
    }
    core.data.delayed.fetch_sub(bytes, Ordering::AcqRel);
    core.data.memory.fetch_sub(memory, Ordering::AcqRel);
    if !written {
        core.data.failures.fetch_add(count, Ordering::AcqRel);
    }
}

/// Bytes that have completed are not needed any more, so their buffers are used again. As many are
/// kept as a sixteenth of what may be delayed.
pub(crate) fn reuse(core: &Core, runs: impl Iterator<Item = Arc<RunInFlight>>) {
    let most = index(budget(core) / 16) / SECTOR_LEN;
    let parts = runs.filter_map(Arc::into_inner).flat_map(|run| run.taken.parts);
    core.data.buffers.give_back(parts.map(|(_, buffer)| buffer), most);
}
