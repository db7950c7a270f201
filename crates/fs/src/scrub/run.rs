//! In which order chunks are read, and on which threads.
//!
//! Chunks whose devices are different are read at the same time, so that every device is busy.
//! Within a chunk strips go through three hands, so that a device is idle between none of them: one
//! looks up what a strip holds, one reads it, one judges it. A chunk that comes while a scrub is
//! under way is new, and is left to the next scrub.

use super::control::ScrubControl;
use super::load::{Known, Loaded, look};
use super::report::{ScrubOptions, ScrubState};
use super::{mend, rows, supers};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Mutex};
use larder_format::DeviceId;
use larder_volume::{MappedChunk, Strip, TransferMemory};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Bytes of each stripe that are read at once.
const STRIP: u64 = 2 << 20;
/// The same while others use the devices.
const SHORT_STRIP: u64 = 256 << 10;
/// Most chunks that are read at the same time.
const MOST_WORKERS: usize = 16;
/// The state is offered for keeping this often.
const EACH: Duration = Duration::from_secs(2);

/// Strips that wait for the next hand at most.
const WAITING: usize = 1;

/// A strip, and whether others use the devices, who come first.
type Looked<'c> = (Known<'c>, bool);

/// Buffers of strips that were judged: into it, and out of it.
type Buffers = (Sender<TransferMemory>, Receiver<TransferMemory>);

/// What the workers share.
struct Job<'a> {
    core: &'a Core,
    options: ScrubOptions,
    control: &'a ScrubControl,
    each: &'a (dyn Fn(&ScrubState) + Sync),
    queue: Mutex<Queue, lock::ScrubQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    left: VecDeque<MappedChunk>,
    /// Devices that are being read.
    busy: Vec<DeviceId>,
    failed: Option<Error>,
    told: Option<Instant>,
}

/// Scrubs a file system.
///
/// # Errors
/// See [`crate::Filesystem::scrub`].
pub(crate) fn run(
    core: &Core,
    options: ScrubOptions,
    control: &ScrubControl,
    each: &(dyn Fn(&ScrubState) + Sync),
) -> Result<()> {
    let chunks = begin(core, options, control);
    let result = if !options.read_only && core.volume.is_read_only() {
        let why = "a device cannot be written, so a scrub can only look".to_owned();
        Err(Error::ReadOnly(Some(why)))
    } else {
        scrub(core, options, control, each, chunks)
    };
    control.ended(&result);
    each(&control.state());
    result
}

/// Transfers that read nodes.
fn nodes_read(core: &Core) -> u64 {
    core.store.stats().transfers.load(Ordering::Relaxed)
}

/// What there is to do. Says in the state what is known before.
fn begin(core: &Core, options: ScrubOptions, control: &ScrubControl) -> VecDeque<MappedChunk> {
    let mut chunks = core.volume.map().chunks();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let total = total(core, &chunks);
    let fsid = uuid::Uuid::from_bytes(core.superblock.lock().fsid).to_string();
    let behind = !core.volume.behind().is_empty();
    control.begin(|state| {
        if behind && state.started != 0 {
            // What was done may be from before a device was away.
            state.begin_anew();
        }
        if state.started == 0 {
            state.started = now;
        } else {
            state.resumed = Some(now);
        }
        (state.total, state.fsid, state.read_only) = (total, fsid, options.read_only);
        chunks.retain(|chunk| !state.chunks.contains(&chunk.start.0));
    });
    chunks.into()
}

/// Bytes on devices that are in use.
fn total(core: &Core, chunks: &[MappedChunk]) -> u64 {
    let used = |chunk: &MappedChunk| {
        let used = core.space.groups.find(chunk.start).map_or(0, |g| g.usage().disk_used);
        let bytes = u128::from(used) * u128::from(chunk.device_bytes());
        u64::try_from(bytes / u128::from(chunk.length.max(1))).unwrap_or(u64::MAX)
    };
    chunks.iter().map(used).sum()
}

fn scrub(
    core: &Core,
    options: ScrubOptions,
    control: &ScrubControl,
    each: &(dyn Fn(&ScrubState) + Sync),
    left: VecDeque<MappedChunk>,
) -> Result<()> {
    if !options.read_only && core.check_writable().is_ok() {
        // What was only in a log until now is looked at as well. A commit writes superblocks, so
        // they are judged before it.
        supers::judge_copies(core, control, options)?;
        core.commit()?;
    }
    control.forget_earlier_work(&core.volume, nodes_read(core));
    let workers = core.volume.devices().count().clamp(1, MOST_WORKERS);
    let queue = Mutex::new(Queue { left, ..Queue::default() });
    let job = Job { core, options, control, each, queue, changed: Condvar::new() };
    thread::scope(|scope| {
        for _ in 1..workers {
            let worker = thread::Builder::new().name("larder-scrub".into());
            // Without a thread the others do more.
            let _ = worker.spawn_scoped(scope, || job.work());
        }
        job.work();
    });
    if let Some(error) = job.queue.lock().failed.take() {
        return Err(error);
    }
    supers::judge(core, control, options)?;
    if !options.read_only {
        core.volume.flush()?;
    }
    Ok(())
}

impl Job<'_> {
    /// Scrubs chunks until none is left.
    fn work(&self) {
        let mut buffers = mpsc::channel();
        while let Some(chunk) = self.next() {
            let result = self.chunk(&chunk, &mut buffers);
            let mut queue = self.queue.lock();
            queue.busy.retain(|id| !chunk.stripes.iter().any(|s| s.device == *id));
            if let Err(error) = result {
                queue.failed.get_or_insert(error);
            }
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// The first chunk whose devices are idle. Waits while there is none.
    fn next(&self) -> Option<MappedChunk> {
        let mut queue = self.queue.lock();
        loop {
            if queue.failed.is_some() || queue.left.is_empty() {
                return None;
            }
            let is_idle =
                |c: &MappedChunk| c.stripes.iter().all(|s| !queue.busy.contains(&s.device));
            if let Some(chunk) =
                queue.left.iter().position(is_idle).and_then(|n| queue.left.remove(n))
            {
                queue.busy.extend(chunk.stripes.iter().map(|s| s.device));
                return Some(chunk);
            }
            self.changed.wait(&mut queue);
        }
    }

    /// Scrubs a chunk, from where an earlier run left it.
    fn chunk(&self, chunk: &MappedChunk, (spare, buffers): &mut Buffers) -> Result<()> {
        let start = chunk.start.0;
        let from = self.control.with(|state| state.positions.get(&start).copied().unwrap_or(0));
        thread::scope(|scope| {
            let (to_reader, looked) = mpsc::sync_channel(WAITING);
            let (to_judge, read) = mpsc::sync_channel(WAITING);
            let looks = scope.spawn(move || self.look(chunk, from, &to_reader));
            let reads = scope.spawn(move || self.read(&looked, &to_judge, buffers));
            // A hand that ends lets go of its channels, and so the others end.
            let judged = read.into_iter().try_for_each(|loaded| self.judge(loaded, start, spare));
            for hand in [looks, reads] {
                // A scrub that ends here has what was judged.
                hand.join().unwrap_or_else(|e| std::panic::resume_unwind(e))?;
            }
            judged
        })?;
        self.control.with(|state| {
            state.positions.remove(&start);
            state.chunks.insert(start);
        });
        Ok(())
    }

    /// Looks up what the strips hold, one after the other.
    fn look<'c>(
        &self,
        chunk: &'c MappedChunk,
        mut from: u64,
        to: &SyncSender<Looked<'c>>,
    ) -> Result<()> {
        loop {
            let nodes = nodes_read(self.core);
            let others_work = self.control.others_work(&self.core.volume, nodes);
            let len = if others_work { SHORT_STRIP } else { STRIP };
            // A chunk that is gone held nothing any more.
            let is_there = self.core.volume.map().chunk_at(chunk.start).as_ref() == Some(chunk);
            let Some(strip): Option<Strip<'c>> = chunk.strip(from..from + len).filter(|_| is_there)
            else {
                return Ok(());
            };
            from = strip.end();
            if let Some(known) = look(self.core, self.control, strip)?
                && to.send((known, others_work)).is_err()
            {
                return Ok(());
            }
        }
    }

    /// Reads strips.
    fn read<'c>(
        &self,
        looked: &Receiver<Looked<'c>>,
        to: &SyncSender<Loaded<'c>>,
        buffers: &Receiver<TransferMemory>,
    ) -> Result<()> {
        // How long the last piece took, if the devices have not been left to others since.
        let mut took = Duration::ZERO;
        for (known, others_work) in looked {
            if others_work {
                self.control.rest(std::mem::take(&mut took))?;
            }
            let begin = Instant::now();
            let loaded = known.read(self.core, self.control, || buffers.try_recv().ok());
            took = begin.elapsed();
            if to.send(loaded).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Judges a strip of the chunk that begins at `start`.
    fn judge(
        &self,
        mut loaded: Loaded<'_>,
        start: u64,
        spare: &Sender<TransferMemory>,
    ) -> Result<()> {
        let end = loaded.strip.end();
        mend::judge(self.core, self.control, self.options, &mut loaded)
            .and_then(|mut judged| rows::judge(&mut judged))?;
        for copy in loaded.copies {
            // The reader is there as long as the worker is.
            let _ = spare.send(copy.bytes);
        }
        self.control.with(|state| state.positions.insert(start, end));
        self.tell();
        Ok(())
    }

    /// Offers the state for keeping, now and then.
    fn tell(&self) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        let is_due = queue.told.is_none_or(|told| now >= told + EACH);
        if is_due {
            queue.told = Some(now);
        }
        drop(queue);
        if is_due {
            (self.each)(&self.control.state());
        }
    }
}
