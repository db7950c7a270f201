//! Submitting delayed data: runs of dirty bytes become runs in flight.

use super::dirty::MOST_MADE;
use super::{RunInFlight, overlaps};
use crate::engine::{Core, Inode};
use crate::space::SpaceKind;
use crate::space::reserve::Reservation;
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
/// It goes on where it stopped the last time, and from the end of the file to its beginning. So
/// what is written at random places meanwhile has time to grow together until its turn comes, and
/// what one batch takes lies close together in the tree. Beginning at the start of the file each
/// time would only find there what came since.
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
pub(super) const AT_ONCE: usize = 4;

/// One way around a file, looking for dirty runs.
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
        let (mut inner, size, flags) = inode.data.lock_with_size(inode);
        let inner = &mut *inner;
        let counted = inner.dirty.counts();
        inner.dirty.settle();
        let before = inner.dirty.counts();
        core.data.count(&inode.data, counted, before);
        let stop = match self.stop {
            Some(stop) => {
                // What was written since may lie across this place.
                self.from = inner.dirty.boundary(self.from);
                stop
            }
            None => {
                self.from = inner.dirty.boundary(inner.stopped);
                self.around = self.from == 0;
                *self.stop.insert(self.from)
            }
        };
        let (mut bytes, first) = (0, self.runs);
        let over = loop {
            if self.span >= self.limits.bytes
                || self.made >= MOST_MADE
                || self.runs >= self.limits.runs
                || self.around && stop > 0 && self.from >= stop
            {
                break true;
            }
            if self.runs - first >= AT_ONCE {
                break false;
            }
            let busy = |a, b| overlaps(&inner.in_flight, a, b);
            let Some(taken) = inner.dirty.take(&mut self.from, self.limits.bytes - self.span, busy)
            else {
                if std::mem::replace(&mut self.around, true) {
                    break true;
                }
                self.from = 0;
                continue;
            };
            bytes += taken.bytes;
            self.span += taken.end - taken.start;
            self.made += taken.made;
            self.runs += 1;
            let inline = taken.start == 0
                && inner.dirty.is_empty()
                && crate::engine::inline::may_be_inline_somehow(core, size, flags);
            let need = taken.end - taken.start;
            let space = match &mut inner.space {
                Some(space) => space.split(need),
                None => core.space.accounts.empty(SpaceKind::Data),
            };
            let in_flight = inner.put_in_flight(RunInFlight { taken, size, inline });
            out.push(Submission {
                inode: inode.clone(),
                in_flight,
                space,
                items: inner.items.take(),
            });
        };
        core.data.change_segments(before.segments, inner.dirty.counts().segments);
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
}
