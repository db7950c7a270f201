//! In which order chunks are read, and on which threads.
//!
//! Chunks whose devices are different are read at the same time, so that every device is busy.
//! Within a chunk the next strip is read while one is judged. A chunk that comes while a scrub is
//! under way is new, and is left to the next scrub.

use super::control::ScrubControl;
use super::load::{Buffer, Loaded, load};
use super::report::{ScrubOptions, ScrubState};
use super::{mend, rows, supers};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Mutex};
use larder_format::DeviceId;
use larder_volume::{MappedChunk, Strip};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
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

/// What a worker reads with.
#[derive(Default)]
struct Reader {
    /// Those of strips that were judged.
    buffers: Vec<Buffer>,
    /// How long the last piece took, if the devices have not been left to others since.
    took: Duration,
}

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
    control.forget_earlier_work(&core.volume, nodes_read(core));
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
        let mut reader = Reader::default();
        while let Some(chunk) = self.next() {
            let result = self.chunk(&chunk, &mut reader);
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
    fn chunk(&self, chunk: &MappedChunk, reader: &mut Reader) -> Result<()> {
        let start = chunk.start.0;
        let from = self.control.with(|state| state.positions.get(&start).copied().unwrap_or(0));
        let mut read = self.read_from(chunk, from, reader)?;
        while let Some((mut loaded, next)) = read {
            let (judged, ahead) = thread::scope(|scope| {
                let ahead = scope.spawn(|| self.read_from(chunk, next, reader));
                let judged = mend::judge(self.core, self.control, self.options, &mut loaded)
                    .and_then(|mut judged| rows::judge(&mut judged));
                (judged, ahead.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
            });
            judged?;
            reader.buffers.extend(loaded.copies.into_iter().map(|copy| copy.bytes));
            self.control.with(|state| state.positions.insert(start, next));
            self.tell();
            // A scrub that ends here has what was judged.
            read = ahead?;
        }
        self.control.with(|state| {
            state.positions.remove(&start);
            state.chunks.insert(start);
        });
        Ok(())
    }

    /// Reads the next strip with anything in it. Also where the one behind it begins.
    fn read_from<'c>(
        &self,
        chunk: &'c MappedChunk,
        from: u64,
        reader: &mut Reader,
    ) -> Result<Option<(Loaded<'c>, u64)>> {
        let mut from = from;
        loop {
            let nodes = nodes_read(self.core);
            let others_work = self.control.others_work(&self.core.volume, nodes);
            if others_work {
                self.control.rest(std::mem::take(&mut reader.took))?;
            }
            let len = if others_work { SHORT_STRIP } else { STRIP };
            // A chunk that is gone held nothing any more.
            let is_there = self.core.volume.map().chunk_at(chunk.start).as_ref() == Some(chunk);
            let Some(strip): Option<Strip<'c>> = chunk.strip(from..from + len).filter(|_| is_there)
            else {
                return Ok(None);
            };
            from = strip.end();
            let begin = Instant::now();
            let loaded = load(self.core, self.control, strip, &mut reader.buffers)?;
            reader.took = begin.elapsed();
            if let Some(loaded) = loaded {
                return Ok(Some((loaded, from)));
            }
        }
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
