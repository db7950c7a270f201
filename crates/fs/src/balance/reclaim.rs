//! Reclaim: chunks of data that have become nearly empty are freed in the background.
//!
//! It is off unless a percentage is given. Now and then the emptiest chunk of data is looked at. If
//! less than so much of it is used, and the others have room for that, it is relocated: one at a
//! time, as a balance would. What was relocated and freed nothing makes it rest longer each time.

use super::filters::Candidate;
use super::{groups, plan};
use crate::engine::Core;
use crate::engine::exclusive::ExclusiveOperation;
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Mutex};
use crate::relocate::{Relocated, relocate};
use crate::space::SpaceKind;
use larder_format::items::BlockGroupFlags;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest rest, in intervals.
const LONGEST: u32 = 128;

/// The thread that does it.
#[derive(Debug)]
pub(crate) struct Reclaim {
    told: Arc<Told>,
    thread: JoinHandle<()>,
}

/// Has it been told to end?
#[derive(Debug, Default)]
struct Told {
    end: Mutex<bool, lock::BalanceState>,
    changed: Condvar,
}

impl Told {
    fn is_ended(&self) -> bool {
        *self.end.lock()
    }
    /// Rests so long, or until told to end. Returns whether it was.
    fn rest(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut end = self.end.lock();
        while !*end {
            if self.changed.wait_until(&mut end, until).timed_out() {
                return *end;
            }
        }
        true
    }
}

impl Reclaim {
    /// Starts it for chunks of which less than `percent` is used. It looks every `interval`.
    ///
    /// # Errors
    /// There can be no thread.
    pub(crate) fn start(core: &Arc<Core>, percent: u8, interval: Duration) -> Result<Self> {
        let told = Arc::<Told>::default();
        let (core, its) = (Arc::clone(core), Arc::clone(&told));
        let thread = std::thread::Builder::new()
            .name("larder-reclaim".into())
            .spawn(move || run(&core, percent, interval, &its))
            .map_err(|e| Error::Unsupported(format!("cannot start a thread: {e}")))?;
        Ok(Self { told, thread })
    }

    /// Ends it. A chunk that is being relocated stays as far as it is.
    pub(crate) fn end(self) {
        *self.told.end.lock() = true;
        self.told.changed.notify_all();
        // If it panicked, the file system became read-only then.
        let _ = self.thread.join();
    }
}

fn run(core: &Core, percent: u8, interval: Duration, told: &Told) {
    let mut rest = 1;
    while !told.rest(interval * rest) {
        rest = match one(core, percent, told) {
            Ok(Some(true)) | Ok(None) => 1,
            Ok(Some(false)) => (rest * 2).min(LONGEST),
            // Something else has the slot, or it was told to end.
            Err(Error::Busy(_)) => 1,
            Err(e) => {
                tracing::info!("a chunk could not be reclaimed: {e}");
                (rest * 2).min(LONGEST)
            }
        };
    }
}

/// Relocates a chunk, if there is one that is worth it. Returns whether that has freed it.
fn one(core: &Core, percent: u8, told: &Told) -> Result<Option<bool>> {
    let chunks = of_data(core);
    let promised = core.space.accounts.figures(SpaceKind::Data).reserved;
    let Some(chunk) = worthwhile(&chunks, promised, percent) else { return Ok(None) };
    core.check_writable()?;
    let _claim = core.exclusive.claim(ExclusiveOperation::Balance)?;
    tracing::debug!(start = %chunk.start, used = chunk.used, "a chunk is reclaimed");
    let watch =
        &mut |_| if told.is_ended() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    match relocate(core, chunk.start, watch) {
        Ok(Relocated::Done) => Ok(Some(of_data(core).len() < chunks.len())),
        Ok(Relocated::Stopped) => Err(Error::Busy("it was told to end")),
        Err(Error::NotFound) => Ok(Some(true)),
        Err(e) => Err(e),
    }
}

fn of_data(core: &Core) -> Vec<Candidate> {
    let mut chunks = groups::all(core);
    chunks.retain(|c| c.flags.contains(BlockGroupFlags::DATA));
    chunks
}

/// The emptiest chunk, if it is to be relocated.
fn worthwhile(chunks: &[Candidate], promised: u64, percent: u8) -> Option<Candidate> {
    let emptiest = plan::emptiest(chunks, promised)?;
    // An empty one goes with the next commit.
    (emptiest.used > 0 && emptiest.percent() < u32::from(percent)).then(|| emptiest.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::Logical;

    #[test]
    fn only_what_is_nearly_empty_and_fits_elsewhere_is_reclaimed() {
        let chunk = |start, used| Candidate {
            start: Logical(start),
            len: 1000,
            used,
            flags: BlockGroupFlags::DATA,
            stripes: Vec::new(),
            stripe_len: 1000,
        };
        let found = |used: [u64; 3], promised, percent| {
            let chunks: Vec<_> = used.iter().zip(1..).map(|(used, n)| chunk(n, *used)).collect();
            worthwhile(&chunks, promised, percent).map(|c| c.start.0)
        };
        assert_eq!(found([500, 90, 600], 0, 10), Some(2));
        assert_eq!(found([500, 100, 600], 0, 10), None);
        assert_eq!(found([1000, 90, 1000], 0, 10), None);
        assert_eq!(found([500, 90, 600], 850, 10), None);
        assert_eq!(found([500, 0, 600], 0, 10), None);
    }
}
