//! Which file is written back next, and how much may be delayed at all.

use super::scratch::Scratch;
use crate::api::may_wait;
use crate::engine::file_data::FileData;
use crate::engine::file_data::dirty::{Buffers, Counts, Tick};
use crate::engine::{Core, Inode};
use crate::error::Result;
use crate::lock::{self, Condvar, Mutex, Wait};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Writes back the oldest dirty data that is older than a tick. Returns false when nothing could be
/// taken.
pub(crate) type WriteBack = fn(&Core, Tick) -> bool;

#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Files with dirty bytes, by the tick of the oldest.
    pub(super) queue: BTreeMap<Tick, Arc<Inode>>,
    /// Write-backs that are under way, by number, and the oldest tick that each may have taken.
    jobs: BTreeMap<u64, Tick>,
    next_job: u64,
    /// Counts what can make work possible: jobs that wrote something, and files that came into the
    /// queue.
    pub(super) progress: u64,
    /// Everything older than this tick is to be written.
    pub(super) flush_to: Tick,
    /// Callers that wait for budget.
    pub(super) waiting: u64,
    pub(super) stop: bool,
}

/// Data of all files that is not in extents yet.
#[derive(Debug)]
pub(crate) struct DataState {
    pub(super) write_back: WriteBack,
    pub(super) shared: Mutex<Shared, lock::Queue>,
    /// For callers: a write-back has ended.
    ended: Condvar,
    /// For the threads that write back: there may be work for the first one, or for the others.
    pub(super) work: Condvar,
    pub(super) more_work: Condvar,
    /// The first of these threads waits, or is about to. While it does not, a writer need not take
    /// the lock to wake it.
    pub(super) first_waits: AtomicBool,
    /// Bytes that are dirty or in flight, and bytes that are dirty.
    pub(super) delayed: AtomicU64,
    pub(super) dirty: AtomicU64,
    /// Memory that they take.
    pub(super) memory: AtomicU64,
    /// Segments that are dirty, and files in the queue.
    pub(super) segments: AtomicU64,
    pub(super) files: AtomicU64,
    clock: AtomicU64,
    pub(super) buffers: Buffers,
    /// The memory that write-back takes in addition.
    pub(crate) scratch: Scratch,
    pub(super) failures: AtomicU64,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>, lock::Threads>,
}

/// Most memory that delayed data may take.
pub(super) fn budget(core: &Core) -> u64 {
    core.budget().data
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
    /// Nothing is delayed yet. `write_back` will write what is, with the memory of `scratch`.
    pub(crate) fn new(write_back: WriteBack, scratch: Scratch) -> Self {
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
            scratch,
            failures: AtomicU64::new(0),
            threads: Mutex::default(),
        }
    }
    /// Bytes that wait for write-back.
    pub(crate) fn delayed_bytes(&self) -> u64 {
        self.delayed.load(Ordering::Acquire)
    }
    /// Memory that they take. It is more than their number where writes are small.
    pub(crate) fn memory(&self) -> u64 {
        self.memory.load(Ordering::Acquire)
    }
    /// How many runs have been lost so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }
    /// A new tick.
    pub(crate) fn tick(&self) -> Tick {
        Tick(self.clock.fetch_add(1, Ordering::AcqRel))
    }
    /// Accounts for a change of one file's dirty bytes. It is not called for bytes that are
    /// submitted, because they stay delayed.
    pub(super) fn count(&self, file: &FileData, before: Counts, now: Counts) {
        // The difference wraps around if there is less now.
        let more = now.bytes.wrapping_sub(before.bytes);
        file.delayed.fetch_add(more, Ordering::AcqRel);
        self.delayed.fetch_add(more, Ordering::AcqRel);
        self.dirty.fetch_add(more, Ordering::AcqRel);
        self.memory.fetch_add(now.memory.wrapping_sub(before.memory), Ordering::AcqRel);
        self.count_segments(before, now);
    }
    /// Accounts for a change of the number of one file's dirty segments.
    pub(super) fn count_segments(&self, before: Counts, now: Counts) {
        let more = now.segments.wrapping_sub(before.segments);
        self.segments.fetch_add(more, Ordering::AcqRel);
    }
    pub(super) fn enqueue(&self, age: Tick, inode: Arc<Inode>) {
        let mut shared = self.shared.lock();
        shared.progress += 1;
        let other = shared.queue.insert(age, inode);
        self.files.store(shared.queue.len() as u64, Ordering::Relaxed);
        // A tick belongs to one write, hence to one file, and no file is in the queue twice.
        assert!(other.is_none(), "two files have dirty data of one tick");
    }
    /// As [`Self::enqueue`], for a file that was just taken out and has more dirty bytes.
    pub(super) fn requeue(&self, age: Tick, inode: Arc<Inode>) {
        let mut shared = self.shared.lock();
        let other = shared.queue.insert(age, inode);
        self.files.store(shared.queue.len() as u64, Ordering::Relaxed);
        assert!(other.is_none(), "two files have dirty data of one tick");
    }
    /// Registers a job that is going to take dirty bytes as old as `age`.
    pub(crate) fn start_job<'a>(&self, core: &'a Core, age: Tick) -> Job<'a> {
        let mut shared = self.shared.lock();
        Self::job(core, &mut shared, age)
    }
    fn job<'a>(core: &'a Core, shared: &mut Shared, age: Tick) -> Job<'a> {
        let number = shared.next_job;
        shared.next_job += 1;
        shared.jobs.insert(number, age);
        Job { core, number, wrote: false }
    }
    /// Takes a file out of the queue: the one with the oldest dirty bytes, of those whose oldest
    /// tick lies in the range. Also returns that tick. The first call for a job registers it.
    pub(crate) fn pop<'a>(
        &self,
        core: &'a Core,
        ticks: Range<Tick>,
        job: &mut Option<Job<'a>>,
    ) -> Option<(Tick, Arc<Inode>)> {
        let mut shared = self.shared.lock();
        let (&age, _) = shared.queue.range(ticks).next()?;
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
            if (self.write_back)(core, Tick::NEVER) {
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
