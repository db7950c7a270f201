//! Delayed data: what a file has in memory, the budget that all files share, and which file is
//! written back next.
//!
//! A file with dirty bytes stands in the queue under the tick of its oldest write. That is the
//! order of write-back. Space was reserved when the bytes were written, so write-back cannot run
//! out of it. A writer that has to wait for the budget writes the oldest data back itself.
//!
//! Locks: `Inode.state`, then [`FileData`]'s inner mutex, then the queue's. Each is held for
//! instructions only (the extent lock: [`crate::file`]). A waiter for bytes in flight holds none of
//! them, and no handle.

use crate::api::may_wait;
use crate::engine::{Core, Inode};
use crate::error::Result;
use crate::lock::{self, Condvar, Locked, Mutex, Wait};
use crate::space::reserve::Reservation;
use dirty::{Buffers, Counts, Dirty, Gaps, MOST_RECENT, SECTOR_LEN, Taken, index};
use larder_format::items::inode::InodeFlags;
use scratch::Scratch;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

pub(crate) use submit::{Limits, Submission, submit};
pub(crate) use workers::start;

/// Writes back the oldest dirty data that is older than a tick. Returns false when nothing could be
/// taken.
pub(crate) type WriteBack = fn(&Core, u64) -> bool;

/// Space reserved for a write that is about to be taken in.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) space: Reservation,
    pub(crate) items: Option<Reservation>,
}

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
struct Inner {
    dirty: Dirty,
    /// What is in flight, by the first byte. No two of them touch one sector.
    in_flight: BTreeMap<u64, Arc<RunInFlight>>,
    /// The file is on the device up to here, apart from delayed overwrites. It has a meaning only
    /// while anything is delayed.
    on_disk: u64,
    /// How far the file will be on the device once all that is in flight has completed. What has
    /// been written since into ranges below does not hold the size back, or it would take away what
    /// a sync is about to promise.
    taken_to: u64,
    /// Ranges that setting the size has added, ascending.
    holes: SmallVec<[Added; 1]>,
    /// Space for the dirty bytes.
    space: Option<Reservation>,
    /// Space for the items that they will need.
    items: Option<Reservation>,
    /// Ranges that could not be written and have not been rewritten since.
    lost: SmallVec<[(u64, u64); 1]>,
    /// Its tick in the queue.
    queued: Option<u64>,
    /// Where the last batch of write-back stopped.
    stopped: u64,
}

/// Data of one file that is not in extents yet.
#[derive(Debug, Default)]
pub(crate) struct FileData {
    /// Bytes dirty or in flight.
    delayed: AtomicU64,
    inner: Mutex<Inner, lock::Delayed>,
    /// How many threads wait for the inner lock to write.
    writers: AtomicU32,
    /// A run in flight has ended.
    completed: Condvar,
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
    fn lock(&self) -> Locked<'_, Inner> {
        let mut inner = self.inner.lock();
        inner.dirty.sort_in();
        inner
    }
    /// The inner lock, for a writer. A thread of the transport that goes to sleep for it costs more
    /// than the time for which it is held. So write-back, which takes it many times in a row, lets
    /// writers in first.
    fn lock_to_write(&self) -> Locked<'_, Inner> {
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
    fn let_writers_in(&self) {
        const MOMENT: usize = 200;
        for _ in 0..MOMENT {
            if self.writers.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
    }
    /// The inner lock, with the inode's flags and a size that covers all that is delayed. Writers
    /// make the size larger before their bytes come in, and it becomes smaller only under both
    /// locks. So the state's lock is dropped at once, and a writer waits for one lock only. A
    /// thread that has the first lock does not sleep for the second either, unless that takes long.
    fn lock_with_size(&self, inode: &Inode) -> (Locked<'_, Inner>, u64, InodeFlags) {
        const TRIES: usize = 100;
        self.sort_in_gently();
        for _ in 0..TRIES {
            let state = inode.state.lock();
            if let Some(mut inner) = self.inner.try_lock() {
                inner.dirty.sort_in();
                return (inner, state.size, state.item.inode_flags());
            }
            drop(state);
            std::hint::spin_loop();
        }
        let state = inode.state.lock();
        let inner = self.lock();
        (inner, state.size, state.item.inode_flags())
    }
    /// Serialises changes of the extent items; see `file::replace`.
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
        let Some((from, to)) = gaps.bounds() else { return };
        for run in inner.in_flight_from(from).take_while(|f| f.taken.start < to) {
            run.taken.overlay(buf, gaps);
        }
    }
    /// The first stretch of delayed bytes that ends behind `from`.
    pub(crate) fn stretch(&self, from: u64) -> Option<(u64, u64)> {
        if self.is_clean() {
            return None;
        }
        let inner = self.lock();
        let in_flight = inner.in_flight_from(from).next();
        in_flight
            .map(|f| (f.taken.start, f.taken.end))
            .into_iter()
            .chain(inner.dirty.stretch(from))
            .min()
    }
    /// Waits until no bytes of sectors in `start..end` are in flight.
    ///
    /// # Errors
    /// `WouldBlock`.
    pub(crate) fn wait_completed(&self, start: u64, end: u64) -> Result<()> {
        self.wait_until(|inner| !inner.has_in_flight(start, end))
    }
    /// Waits until nothing is in flight that was written before the tick `age`.
    pub(crate) fn wait_completed_before(&self, age: u64) -> Result<()> {
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
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.lock().dirty.oldest()
    }
}

/// Does one of these touch the sectors of `start..end`?
fn overlaps(runs: &BTreeMap<u64, Arc<RunInFlight>>, start: u64, end: u64) -> bool {
    runs.range(..end).next_back().is_some_and(|(_, f)| f.taken.end > start)
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
    /// Are bytes of sectors in `start..end` in flight?
    fn has_in_flight(&self, start: u64, end: u64) -> bool {
        overlaps(&self.in_flight, start, end)
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
    /// Setting the size has made a file of `old` bytes one of `new` bytes. `tail`: zeros for the
    /// rest of the last sector are still to come.
    fn grown(&mut self, old: u64, new: u64, tail: bool) {
        let sector = crate::base::sectors::ceil(old);
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
    fn put_in_flight(&mut self, run: RunInFlight) -> Arc<RunInFlight> {
        self.taken_to = self.reach(run.size);
        let run = Arc::new(run);
        self.in_flight.insert(run.taken.start, run.clone());
        run
    }
    /// A run in flight has completed, so the file of `size` bytes may be further on the device.
    fn on_completion(&mut self, size: u64) {
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
    fn forget_lost(&mut self, start: u64, end: u64) {
        let cut = |&(a, b): &(u64, u64)| {
            [(a, b.min(start)), (a.max(end), b)]
                .into_iter()
                .filter(|(a, b)| a < b)
                .collect::<SmallVec<[_; 2]>>()
        };
        self.lost = self.lost.iter().flat_map(cut).collect();
    }
}

/// Makes the file end at `size`, and forgets dirty bytes behind it. Returns the size that it had.
/// While bytes of the sectors behind are in flight, returns `None` and changes nothing.
pub(crate) fn cut(core: &Core, inode: &Inode, size: u64) -> Option<u64> {
    let file = &inode.data;
    let mut state = inode.state.lock();
    let mut inner = file.lock();
    if inner.has_in_flight(crate::base::sectors::floor(size), u64::MAX) {
        return None;
    }
    let before = inner.dirty.counts();
    inner.dirty.cut(size, u64::MAX);
    inner.on_disk = inner.on_disk.min(size);
    inner.taken_to = inner.taken_to.min(size);
    inner.cut_holes(size);
    inner.forget_lost(size, u64::MAX);
    let wanted = inner.dirty.footprint();
    let back = inner.space.as_mut().map(|space| space.split(space.bytes().saturating_sub(wanted)));
    core.data.count(file, before, inner.dirty.counts());
    let old = std::mem::replace(&mut state.size, size);
    drop((inner, state));
    drop(back);
    Some(old)
}

/// Makes the file end at `new` instead of `old`, which was smaller. `tail`: zeros for the rest of
/// its last sector are about to be taken in.
pub(crate) fn grow(inode: &Inode, old: u64, new: u64, tail: bool) {
    let mut state = inode.state.lock();
    let mut inner = inode.data.lock();
    state.size = new;
    if inode.data.is_clean() {
        inner.on_disk = old;
        inner.taken_to = old;
        inner.holes.clear();
    }
    inner.grown(old, new, tail);
}

/// What lies in `start..end` is not lost any more: other content has replaced what could not be
/// written.
pub(crate) fn rewritten(inode: &Inode, start: u64, end: u64) {
    inode.data.inner.lock().forget_lost(start, end);
}

/// Gives a file space that others did not need, as far as it has less than its dirty bytes may
/// take: writes that were admitted without space may be written back before others. Returns what is
/// over.
pub(crate) fn give_space(inode: &Inode, mut space: Reservation) -> Reservation {
    let mut inner = inode.data.lock();
    let held = inner.space.as_ref().map_or(0, Reservation::bytes);
    let lacking = inner.dirty.footprint().saturating_sub(held);
    if lacking > 0 {
        let more = space.split(lacking);
        match &mut inner.space {
            Some(held) => held.merge(more),
            none => *none = Some(more),
        }
    }
    space
}

/// Takes bytes in. The caller holds the inode's `op` exclusively. So that the file's size on disk
/// stays right, it also holds a transaction handle, in which it has set the file's new size
/// already. `size` is the one before.
pub(crate) fn take_in(
    core: &Core,
    inode: &Arc<Inode>,
    start: u64,
    data: &[u8],
    size: u64,
    admitted: Admitted,
) {
    let file = &inode.data;
    let mut back = (None, None);
    {
        let mut inner = file.lock_to_write();
        // A run that completed since the size was set did not know of these bytes, so it may have
        // set these too high.
        inner.on_disk = if file.is_clean() { size } else { inner.on_disk.min(size) };
        inner.taken_to = if file.is_clean() { size } else { inner.taken_to.min(size) };
        inner.forget_holes();
        let age = core.data.tick();
        let before = inner.dirty.counts();
        inner.dirty.write(start, data, age, &core.data.buffers);
        core.data.count(file, before, inner.dirty.counts());
        let wanted = inner.dirty.footprint();
        let space = match inner.space.take() {
            Some(mut space) => {
                space.merge(admitted.space);
                space
            }
            None => admitted.space,
        };
        let space = inner.space.insert(space);
        let surplus = space.bytes().saturating_sub(wanted);
        back.0 = (surplus > 0).then(|| space.split(surplus));
        match &mut inner.items {
            Some(_) => back.1 = admitted.items,
            none => *none = admitted.items,
        }
        if inner.queued.is_none() {
            inner.queued = Some(age);
            core.data.enqueue(age, inode.clone());
        }
    }
    drop(back);
    core.data.wake_workers(core);
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
        complete_some(core, inode, runs.by_ref().take(submit::AT_ONCE), written);
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
        let (mut inner, size, _) = file.lock_with_size(inode);
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
                let end = at + data.len() as u64;
                inner.forget_lost(*at, end);
                if !written && *at < size {
                    inner.lost.push((*at, end));
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
    core.data.change_memory(memory, 0);
    if !written {
        core.data.failures.fetch_add(count, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Files with dirty bytes, by the tick of the oldest.
    queue: BTreeMap<u64, Arc<Inode>>,
    /// Write-backs that are under way, by number, and the oldest tick that each may have taken.
    jobs: BTreeMap<u64, u64>,
    next_job: u64,
    /// Counts what can make work possible: jobs that wrote something, and files that came into the
    /// queue.
    progress: u64,
    /// Everything older than this tick is to be written.
    flush_to: u64,
    /// Callers that wait for budget.
    waiting: u64,
    stop: bool,
}

/// Data of all files that is not in extents yet.
#[derive(Debug)]
pub(crate) struct DataState {
    write_back: WriteBack,
    shared: Mutex<Shared, lock::Queue>,
    /// For callers: a write-back has ended.
    ended: Condvar,
    /// For the threads that write back: there may be work for the first one, or for the others.
    work: Condvar,
    more_work: Condvar,
    /// The first of these threads waits, or is about to. While it does not, a writer need not take
    /// the lock to wake it.
    first_waits: AtomicBool,
    /// Bytes that are dirty or in flight, and bytes that are dirty.
    delayed: AtomicU64,
    dirty: AtomicU64,
    /// Memory that they take.
    memory: AtomicU64,
    /// Segments that are dirty, and files in the queue.
    segments: AtomicU64,
    files: AtomicU64,
    clock: AtomicU64,
    buffers: Buffers,
    /// The memory that write-back takes besides.
    pub(crate) scratch: Scratch,
    failures: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>, lock::Threads>,
}

/// Most memory that delayed data may take.
fn budget(core: &Core) -> u64 {
    core.budget().data
}

/// Bytes that have completed are not needed any more, so their buffers are used again. As many are
/// kept as a sixteenth of what may be delayed.
pub(crate) fn reuse(core: &Core, runs: impl Iterator<Item = Arc<RunInFlight>>) {
    let most = index(budget(core) / 16) / SECTOR_LEN;
    let parts = runs.filter_map(Arc::into_inner).flat_map(|run| run.taken.parts);
    core.data.buffers.give_back(parts.map(|(_, buffer)| buffer), most);
}

/// A write-back that is registered as under way.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    core: &'a Core,
    number: u64,
    /// It has written something.
    pub(crate) wrote: bool,
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        let data = &self.core.data;
        let mut shared = data.shared.lock();
        shared.jobs.remove(&self.number);
        shared.progress += u64::from(self.wrote);
        data.ended.notify_all();
        // Each `fsync` ends a job. Threads that would find nothing to do are not woken.
        data.wake(self.core, &shared);
    }
}

impl DataState {
    /// Nothing is delayed yet. `write_back` will write what is.
    pub(crate) fn new(write_back: WriteBack) -> Self {
        Self {
            write_back,
            shared: Mutex::default(),
            ended: Condvar::new(),
            work: Condvar::new(),
            more_work: Condvar::new(),
            first_waits: AtomicBool::new(false),
            delayed: AtomicU64::new(0),
            dirty: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            segments: AtomicU64::new(0),
            files: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            buffers: Buffers::default(),
            scratch: Scratch::default(),
            failures: AtomicU64::new(0),
            threads: Mutex::default(),
        }
    }
    /// Bytes that wait for write-back.
    pub(crate) fn delayed_bytes(&self) -> u64 {
        self.delayed.load(Ordering::Acquire)
    }
    /// Memory that they take, which is more where writes are small.
    pub(crate) fn memory(&self) -> u64 {
        self.memory.load(Ordering::Acquire)
    }
    /// How many runs have been lost so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }
    /// A new tick.
    pub(crate) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::AcqRel)
    }
    /// Accounts for a change of one file's dirty bytes. It is not called for bytes that are
    /// submitted, because they stay delayed.
    fn count(&self, file: &FileData, before: Counts, now: Counts) {
        // The difference wraps around if there is less now.
        let more = now.bytes.wrapping_sub(before.bytes);
        file.delayed.fetch_add(more, Ordering::AcqRel);
        self.delayed.fetch_add(more, Ordering::AcqRel);
        self.dirty.fetch_add(more, Ordering::AcqRel);
        self.change_memory(before.memory, now.memory);
        self.change_segments(before.segments, now.segments);
    }
    /// Accounts for a change of the memory that one file's dirty bytes take.
    fn change_memory(&self, before: u64, now: u64) {
        // The difference wraps around if there is less now.
        self.memory.fetch_add(now.wrapping_sub(before), Ordering::AcqRel);
    }
    /// Accounts for a change of the number of one file's dirty segments.
    fn change_segments(&self, before: u64, now: u64) {
        self.segments.fetch_add(now.wrapping_sub(before), Ordering::AcqRel);
    }
    fn enqueue(&self, age: u64, inode: Arc<Inode>) {
        let mut shared = self.shared.lock();
        shared.progress += 1;
        let other = shared.queue.insert(age, inode);
        self.files.store(shared.queue.len() as u64, Ordering::Relaxed);
        // A tick belongs to one write, hence to one file, and no file is in the queue twice.
        assert!(other.is_none(), "two files have dirty data of one tick");
    }
    /// As [`Self::enqueue`], for a file that was just taken out and has more dirty bytes.
    fn requeue(&self, age: u64, inode: Arc<Inode>) {
        let mut shared = self.shared.lock();
        let other = shared.queue.insert(age, inode);
        self.files.store(shared.queue.len() as u64, Ordering::Relaxed);
        assert!(other.is_none(), "two files have dirty data of one tick");
    }
    /// Registers a job that is going to take dirty bytes as old as `age`.
    pub(crate) fn start_job<'a>(&self, core: &'a Core, age: u64) -> Job<'a> {
        let mut shared = self.shared.lock();
        Self::job(core, &mut shared, age)
    }
    fn job<'a>(core: &'a Core, shared: &mut Shared, age: u64) -> Job<'a> {
        let number = shared.next_job;
        shared.next_job += 1;
        shared.jobs.insert(number, age);
        Job { core, number, wrote: false }
    }
    /// Takes a file out of the queue: the one with the oldest dirty bytes, of those whose oldest
    /// tick lies in `from..before`. Also returns that tick. The first call for a job registers it.
    pub(crate) fn pop<'a>(
        &self,
        core: &'a Core,
        (from, before): (u64, u64),
        job: &mut Option<Job<'a>>,
    ) -> Option<(u64, Arc<Inode>)> {
        let mut shared = self.shared.lock();
        let (&age, _) = shared.queue.range(from..before).next()?;
        let inode = shared.queue.remove(&age).expect("looked up");
        self.files.store(shared.queue.len() as u64, Ordering::Relaxed);
        if job.is_none() {
            *job = Some(Self::job(core, &mut shared, age));
        }
        Some((age, inode))
    }
    /// Waits, or writes back, until `len` more bytes may be delayed.
    pub(crate) fn wait_for_budget(&self, core: &Core, len: u64) -> Result<()> {
        lock::before_waiting(Wait::Commit);
        let fits = || {
            let delayed = self.delayed_bytes();
            delayed == 0 || self.memory() + len <= budget(core)
        };
        if fits() {
            return Ok(());
        }
        may_wait()?;
        loop {
            let progress = self.shared.lock().progress;
            if fits() {
                return Ok(());
            }
            if (self.write_back)(core, u64::MAX) {
                continue;
            }
            let mut shared = self.shared.lock();
            shared.waiting += 1;
            while shared.progress == progress && !shared.jobs.is_empty() && !fits() {
                self.ended.wait(&mut shared);
            }
            shared.waiting -= 1;
        }
    }
    /// Writes back everything that was written before this call. The workers help.
    pub(crate) fn flush(&self, core: &Core) {
        lock::before_waiting(Wait::Commit);
        let before = self.tick();
        {
            let mut shared = self.shared.lock();
            shared.flush_to = shared.flush_to.max(before);
            self.wake(core, &shared);
        }
        loop {
            let progress = self.shared.lock().progress;
            if (self.write_back)(core, before) {
                continue;
            }
            let mut shared = self.shared.lock();
            let pending = |s: &Shared| {
                s.jobs.values().any(|age| *age < before)
                    || s.queue.first_key_value().is_some_and(|(a, _)| *a < before)
            };
            if !pending(&shared) {
                return;
            }
            while shared.progress == progress && !shared.jobs.is_empty() {
                self.ended.wait(&mut shared);
            }
        }
    }
    /// Changes whenever a write-back ends that wrote something, or a file gets delayed data.
    pub(crate) fn progress(&self) -> u64 {
        self.shared.lock().progress
    }
    /// Waits for the write-backs that are under way. What they have reserved and do not need is
    /// known only when they end, above all for compressed data. Returns false when there are none.
    pub(crate) fn settle(&self) -> bool {
        lock::before_waiting(Wait::Commit);
        let mut shared = self.shared.lock();
        let next = shared.next_job;
        let any = !shared.jobs.is_empty();
        while shared.jobs.first_key_value().is_some_and(|(number, _)| *number < next) {
            self.ended.wait(&mut shared);
        }
        any
    }
    /// Ends the threads that write back. What is delayed stays delayed.
    pub(crate) fn stop(&self) {
        {
            let mut shared = self.shared.lock();
            shared.stop = true;
            self.work.notify_all();
            self.more_work.notify_all();
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // The threads catch their own panics.
            let _ = thread.join();
        }
    }
}

pub(crate) mod dirty;
pub(crate) mod scratch;
mod submit;
#[cfg(test)]
mod tests;
mod workers;
