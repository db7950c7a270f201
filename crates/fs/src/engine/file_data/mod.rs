//! What one file has in memory and not on the device: dirty bytes, bytes in flight, and how far the
//! file is on the device without them.
//!
//! [`FileData`] is the part of an inode that guards this. It knows neither the inode nor the other
//! files; [`super::delalloc`] brings them together. The size that may be written to an inode's item
//! must not cover bytes that are not on the device yet: they *hold it back*. Holes that setting the
//! size has added do not.

pub(crate) mod dirty;
#[cfg(test)]
mod tests;

use crate::api::may_wait;
use crate::base::sectors::{ceil, floor};
use crate::error::Result;
use crate::lock::{self, Condvar, Locked, Mutex, Wait};
use crate::space::reserve::Reservation;
use dirty::{Dirty, Gaps, MOST_RECENT, Taken, Tick};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A run in flight: segments of a file that are being written to the device.
#[derive(Debug)]
pub(crate) struct RunInFlight {
    pub(crate) taken: Taken,
    /// Size of the file when they were taken. In their last sector, bytes from there on are zero.
    pub(crate) size: u64,
    /// They are all that the file has, and may go into the leaf.
    pub(crate) inline: bool,
}

/// Bytes that setting the size has added to a file. After a crash, the file has the size that was
/// set or one from before, and none in between.
#[derive(Clone, Copy, Debug)]
struct Added {
    /// The size before.
    from: u64,
    /// Where the hole begins that needs nothing on the device: what is written into it does not
    /// hold the size back. It is behind `from` if the rest of a sector has to become zero first.
    /// What is delayed in between holds the size back to `from`.
    hole: u64,
    /// The size that was set, or the size to which the file has been cut since.
    end: u64,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) dirty: Dirty,
    /// What is in flight, by the first byte. No two of them touch one sector.
    pub(super) in_flight: BTreeMap<u64, Arc<RunInFlight>>,
    /// The file is on the device up to here, apart from delayed overwrites. It has a meaning only
    /// while anything is delayed.
    on_disk: u64,
    /// How far the file will be on the device once all that is in flight has completed. Bytes below
    /// that which have been written since do not hold the size back. Otherwise they would take away
    /// what a sync is about to promise.
    taken_to: u64,
    /// Ranges that setting the size has added, ascending.
    holes: SmallVec<[Added; 1]>,
    /// Space for the dirty bytes.
    pub(super) space: Option<Reservation>,
    /// Space for the items that they will need.
    pub(super) items: Option<Reservation>,
    /// Ranges that could not be written and have not been rewritten since.
    pub(super) lost: SmallVec<[Range<u64>; 1]>,
    /// Its tick in the queue.
    pub(super) queued: Option<Tick>,
    /// Where the last batch of write-back stopped.
    pub(super) stopped: u64,
}

/// Data of one file that is not in extents yet.
#[derive(Debug, Default)]
pub(crate) struct FileData {
    /// Bytes dirty or in flight.
    pub(super) delayed: AtomicU64,
    pub(super) inner: Mutex<Inner, lock::Delayed>,
    /// How many threads wait for the inner lock to write.
    writers: AtomicU32,
    /// A run in flight has ended.
    pub(super) completed: Condvar,
    extents: Mutex<(), lock::Extents>,
}

impl FileData {
    /// Bytes written by callers that are not in extents yet.
    pub(crate) fn delayed_bytes(&self) -> u64 {
        self.delayed.load(Ordering::Acquire)
    }
    /// Is everything in extents?
    pub(crate) fn is_clean(&self) -> bool {
        self.delayed_bytes() == 0
    }
    /// The size that may be written to the inode's item when the file has `size` bytes. It must not
    /// cover what is not on the device yet.
    pub(crate) fn disk_size(&self, size: u64) -> u64 {
        if self.is_clean() { size } else { self.lock().disk_size(size) }
    }
    /// The inner lock, with all dirty blocks in their places. It is for callers that look at what
    /// is dirty, and not only at what is in flight or lost.
    pub(super) fn lock(&self) -> Locked<'_, Inner> {
        let mut inner = self.inner.lock();
        inner.dirty.sort_in();
        inner
    }
    /// The inner lock, for a writer. A thread of the transport that goes to sleep for it costs more
    /// than the time for which it is held. So write-back, which takes it many times in a row, lets
    /// writers in first.
    pub(super) fn lock_to_write(&self) -> Locked<'_, Inner> {
        self.inner.try_lock().unwrap_or_else(|| {
            self.writers.fetch_add(1, Ordering::Relaxed);
            let inner = self.inner.lock();
            self.writers.fetch_sub(1, Ordering::Relaxed);
            inner
        })
    }
    /// Brings the blocks that have come until now to their places, a few at a time. A thousand
    /// under one lock would take a third of a millisecond, and writers would go to sleep for that.
    fn sort_in_gently(&self) {
        const AT_ONCE: usize = 8;
        for _ in 0..MOST_RECENT / AT_ONCE {
            if !self.inner.lock().dirty.sort_in_some(AT_ONCE) {
                break;
            }
            self.let_writers_in();
        }
    }
    /// Gives writers a moment to get the lock, if any wait for it.
    pub(super) fn let_writers_in(&self) {
        const MOMENT: usize = 200;
        for _ in 0..MOMENT {
            if self.writers.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
    }
    /// The inner lock, taken behind another one, which `first` takes. A thread that has the first
    /// lock does not sleep for the second, unless that takes long.
    pub(super) fn lock_under<G>(&self, first: impl Fn() -> G) -> (G, Locked<'_, Inner>) {
        const TRIES: usize = 100;
        self.sort_in_gently();
        for _ in 0..TRIES {
            let guard = first();
            if let Some(mut inner) = self.inner.try_lock() {
                inner.dirty.sort_in();
                return (guard, inner);
            }
            drop(guard);
            std::hint::spin_loop();
        }
        let guard = first();
        (guard, self.lock())
    }
    /// The file's own part of [`crate::engine::Inode::lock_extents`].
    pub(crate) fn lock_extents(&self) -> Locked<'_, ()> {
        self.extents.lock()
    }
    /// Is there data of this file that could not be written?
    pub(crate) fn has_lost(&self) -> bool {
        !self.inner.lock().lost.is_empty()
    }
    /// Copies delayed bytes into the buffer's gaps.
    pub(crate) fn overlay(&self, buf: &mut [u8], gaps: &mut Gaps) {
        if self.is_clean() || gaps.left().is_empty() {
            return;
        }
        let inner = self.lock();
        inner.dirty.overlay(buf, gaps);
        let Some(all) = gaps.bounds() else { return };
        for run in inner.in_flight_from(all.start).take_while(|f| f.taken.start < all.end) {
            run.taken.overlay(buf, gaps);
        }
    }
    /// The first stretch of delayed bytes that ends behind `from`.
    pub(crate) fn stretch(&self, from: u64) -> Option<Range<u64>> {
        if self.is_clean() {
            return None;
        }
        let inner = self.lock();
        let in_flight = inner.in_flight_from(from).next();
        in_flight
            .map(|f| f.taken.start..f.taken.end)
            .into_iter()
            .chain(inner.dirty.stretch(from))
            .min_by_key(|stretch| (stretch.start, stretch.end))
    }
    /// Waits until no bytes of sectors in the range are in flight.
    ///
    /// # Errors
    /// `WouldBlock`.
    pub(crate) fn wait_completed(&self, range: &Range<u64>) -> Result<()> {
        self.wait_until(|inner| !inner.has_in_flight(range))
    }
    /// Waits until nothing is in flight that was written before the tick `age`.
    pub(crate) fn wait_completed_before(&self, age: Tick) -> Result<()> {
        self.wait_until(|inner| !inner.in_flight.values().any(|f| f.taken.age < age))
    }
    fn wait_until(&self, done: impl Fn(&Inner) -> bool) -> Result<()> {
        lock::before_waiting(Wait::Commit);
        if self.is_clean() {
            return Ok(());
        }
        let mut inner = self.inner.lock();
        while !done(&inner) {
            may_wait()?;
            self.completed.wait(&mut inner);
        }
        Ok(())
    }
    /// Is a whole file in flight to a leaf?
    pub(crate) fn inline_in_flight(&self) -> bool {
        !self.is_clean() && self.inner.lock().in_flight.values().any(|f| f.inline)
    }
    /// Tick of the oldest write that is dirty.
    pub(crate) fn oldest(&self) -> Option<Tick> {
        self.lock().dirty.oldest()
    }
}

/// Does one of these touch the sectors of the range?
pub(super) fn overlaps(runs: &BTreeMap<u64, Arc<RunInFlight>>, range: &Range<u64>) -> bool {
    runs.range(..range.end).next_back().is_some_and(|(_, f)| f.taken.end > range.start)
}

impl Inner {
    fn disk_size(&self, size: u64) -> u64 {
        let first =
            |at| [self.first_dirty(at), self.first_in_flight(at)].into_iter().flatten().min();
        self.holding(self.on_disk, first).unwrap_or(size)
    }
    /// The first dirty byte at or behind `at`.
    fn first_dirty(&self, at: u64) -> Option<u64> {
        self.dirty.first_from(at)
    }
    /// The first byte in flight at or behind `at`.
    fn first_in_flight(&self, at: u64) -> Option<u64> {
        self.in_flight_from(at).find_map(|f| f.taken.first_from(at))
    }
    /// What is in flight and ends behind `at`, ascending.
    fn in_flight_from(&self, at: u64) -> impl Iterator<Item = &Arc<RunInFlight>> {
        let first = self.in_flight.range(..=at).next_back().map_or(at, |(start, _)| *start);
        self.in_flight.range(first..).map(|(_, f)| f).filter(move |f| f.taken.end > at)
    }
    /// Are bytes of sectors in the range in flight?
    fn has_in_flight(&self, range: &Range<u64>) -> bool {
        overlaps(&self.in_flight, range)
    }
    /// The first byte at or behind `from` that holds the size back. `first` finds the bytes to look
    /// at.
    fn holding(&self, from: u64, first: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut at = from;
        loop {
            at = first(at)?;
            match self.holes.iter().find(|h| (h.from..h.end).contains(&at)) {
                Some(h) if at < h.hole => return Some(h.from.max(from)),
                Some(h) => at = h.end,
                None => return Some(at),
            }
        }
    }
    /// How far the file of `size` bytes will be on the device once all that is in flight has
    /// completed.
    fn reach(&self, size: u64) -> u64 {
        self.holding(self.on_disk.max(self.taken_to), |at| self.first_dirty(at)).unwrap_or(size)
    }
    /// Bytes are about to be taken in. Before that the file had `size` bytes, and was `clean` or
    /// not. A run may have completed since the size was set, without knowing of these bytes. Then
    /// it has set too high what this sets.
    pub(super) fn begin_taking_in(&mut self, size: u64, clean: bool) {
        self.on_disk = if clean { size } else { self.on_disk.min(size) };
        self.taken_to = if clean { size } else { self.taken_to.min(size) };
        self.forget_holes();
    }
    /// Makes the file end at `size`, and forgets what is dirty or lost behind it. While bytes of
    /// the sectors behind are in flight, returns false and changes nothing.
    pub(super) fn cut(&mut self, size: u64) -> bool {
        if self.has_in_flight(&(floor(size)..u64::MAX)) {
            return false;
        }
        self.dirty.cut(size..u64::MAX);
        self.on_disk = self.on_disk.min(size);
        self.taken_to = self.taken_to.min(size);
        self.cut_holes(size);
        self.forget_lost(&(size..u64::MAX));
        true
    }
    /// Setting the size has added these bytes to the file, which was `clean` or not. `tail`: zeros
    /// for the rest of what was the last sector are still to come.
    pub(super) fn grow(&mut self, added: &Range<u64>, tail: bool, clean: bool) {
        let (old, new) = (added.start, added.end);
        if clean {
            self.on_disk = old;
            self.taken_to = old;
            self.holes.clear();
        }
        let sector = ceil(old);
        let delayed =
            [self.first_dirty(old), self.first_in_flight(old)].into_iter().flatten().min();
        // While zeros for the last sector are delayed, the size must not cover it.
        let start = if tail || delayed.is_some_and(|at| at < sector) { sector } else { old };
        match self.holes.last_mut() {
            Some(last) if last.end == start => last.end = new,
            _ => self.holes.push(Added { from: old, hole: start.min(new), end: new }),
        }
        self.taken_to = self.reach(new);
    }
    /// Submits bytes that were taken out of the dirty ones.
    pub(super) fn put_in_flight(&mut self, run: RunInFlight) -> Arc<RunInFlight> {
        self.taken_to = self.reach(run.size);
        let run = Arc::new(run);
        self.in_flight.insert(run.taken.start, run.clone());
        run
    }
    /// A run in flight has completed, so the file of `size` bytes may be further on the device.
    pub(super) fn on_completion(&mut self, size: u64) {
        let in_flight = self.holding(self.on_disk, |at| self.first_in_flight(at));
        let completed = in_flight.map_or(self.taken_to, |at| at.min(self.taken_to)).min(size);
        self.on_disk = self.on_disk.max(completed);
        self.forget_holes();
    }
    /// Forgets holes that do not matter any more.
    fn forget_holes(&mut self) {
        let on_disk = self.on_disk;
        self.holes.retain(|h| h.end > on_disk);
    }
    /// The file ends at `size`.
    fn cut_holes(&mut self, size: u64) {
        self.holes.retain(|h| {
            h.end = size.min(h.end);
            h.hole = h.hole.min(h.end);
            h.from < h.end
        });
    }
    pub(super) fn forget_lost(&mut self, range: &Range<u64>) {
        let cut = |lost: &Range<u64>| {
            [lost.start..lost.end.min(range.start), lost.start.max(range.end)..lost.end]
                .into_iter()
                .filter(|rest| !rest.is_empty())
                .collect::<SmallVec<[_; 2]>>()
        };
        self.lost = self.lost.iter().flat_map(cut).collect();
    }
}
