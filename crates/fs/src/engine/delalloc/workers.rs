//! The threads that write delayed data back: how many they are, and when each has work.

use super::queue::{DataState, Shared, budget};
use crate::engine::Core;
use crate::engine::file_data::dirty::Tick;
use crate::error::{Error, Result};
use crate::space::SpaceKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// If segments have less than this on average, they are short.
const SHORT: u64 = 64 << 10;
/// Files with at least this much dirty data are large.
const LARGE: u64 = 4 << 20;

/// Which thread writes back.
///
/// As a rule one thread keeps up with the writers and is enough. A second one takes processor time
/// that the writers would otherwise have. It also wakes up on a processor to which a thread of the
/// transport is bound, and that thread then has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    First,
    /// Writes when the first falls behind, or when a caller waits.
    Helper,
}

impl Writer {
    /// How much files may have reserved for their items, for each byte of metadata that nothing
    /// holds.
    fn share_of_metadata(self) -> u64 {
        match self {
            Self::First => 1,
            Self::Helper => 3,
        }
    }
}

/// From how many dirty bytes on the threads write back.
#[derive(Clone, Copy)]
struct Thresholds {
    first: u64,
    budget: u64,
}

impl Thresholds {
    /// Those of a budget. The number is limited, however large the budget is: bytes that lie in
    /// memory for long have left the processor's caches, and copying them to the device takes ten
    /// times as long.
    fn of(budget: u64) -> Self {
        Self { first: (budget / 4).min(16 << 20), budget }
    }
    /// Those for small pieces of a few files, which become neighbours if they are given time.
    fn for_scattered(self) -> Self {
        Self { first: 2 * self.first, ..self }
    }
    fn of_thread(self, who: Writer) -> u64 {
        match who {
            Writer::First => self.first,
            Writer::Helper => (4 * self.first).min(self.budget / 2),
        }
    }
}

impl DataState {
    /// Is there so much dirty data that write-back should begin, although no caller waits?
    ///
    /// Small pieces of a few files become neighbours if they are given time, and a piece by itself
    /// costs as much as a large one. So for these files it begins with twice as much.
    ///
    /// It also begins when the files' reservations for items, which are many times what the items
    /// take, reach half of what metadata has. Beyond that, operations would wait for reclaim, which
    /// writes a few files at a time and commits.
    fn is_much(&self, core: &Core, shared: &Shared, who: Writer) -> bool {
        let (dirty, usual) = (self.dirty.load(Ordering::Acquire), Thresholds::of(budget(core)));
        if self.presses(core, who) {
            return true;
        }
        let per = |n: u64| dirty / n.max(1);
        let segments = self.segments.load(Ordering::Acquire);
        let scattered = per(segments) < SHORT && per(shared.queue.len() as u64) >= LARGE;
        let thresholds = if scattered { usual.for_scattered() } else { usual };
        dirty >= thresholds.of_thread(who)
    }
    /// Have files with delayed data reserved too large a part of the space for metadata: half of
    /// it, as far as the first thread is concerned?
    fn presses(&self, core: &Core, who: Writer) -> bool {
        let files = self.files.load(Ordering::Relaxed);
        let unheld = || core.space.accounts.unheld(SpaceKind::Metadata);
        files > 0 && files * core.item_cost(2) > who.share_of_metadata() * unheld()
    }
    pub(super) fn wake_workers(&self, core: &Core) {
        let (dirty, usual) = (self.dirty.load(Ordering::Acquire), Thresholds::of(budget(core)));
        let maybe = |who: Writer| dirty >= usual.of_thread(who) || self.presses(core, who);
        if !maybe(Writer::First) {
            return;
        }
        // Either that thread sees what was just counted, or this one sees that it waits.
        fence(Ordering::SeqCst);
        if self.first_waits.load(Ordering::Relaxed) || maybe(Writer::Helper) {
            self.wake(core, &self.shared.lock());
        }
    }
    /// Wakes the threads that have work.
    pub(super) fn wake(&self, core: &Core, shared: &Shared) {
        for (who, condition) in [(Writer::First, &self.work), (Writer::Helper, &self.more_work)] {
            if self.has_work(core, shared, who).is_some() {
                condition.notify_all();
            }
        }
    }
    /// Is there work for this thread? Returns the tick before which it should write.
    fn has_work(&self, core: &Core, shared: &Shared, who: Writer) -> Option<Tick> {
        let (oldest, _) = shared.queue.first_key_value()?;
        if shared.waiting > 0 || self.is_much(core, shared, who) {
            Some(Tick::NEVER)
        } else {
            (*oldest < shared.flush_to).then_some(shared.flush_to)
        }
    }
    /// Waits for work. Returns the tick before which the thread should write, or `None` if it
    /// should end.
    fn next_work(&self, core: &Core, who: Writer, seen: &mut u64) -> Option<Tick> {
        let mut shared = self.shared.lock();
        loop {
            if shared.stop {
                return None;
            }
            if who == Writer::First {
                self.first_waits.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
            }
            // After a batch that found nothing to take, only progress elsewhere can change that.
            if *seen != shared.progress
                && let Some(before) = self.has_work(core, &shared, who)
            {
                *seen = shared.progress;
                if who == Writer::First {
                    self.first_waits.store(false, Ordering::Relaxed);
                }
                return Some(before);
            }
            match who {
                Writer::First => self.work.wait(&mut shared),
                Writer::Helper => self.more_work.wait(&mut shared),
            }
        }
    }
    fn work(&self, core: &Core, who: Writer) {
        let mut seen = u64::MAX;
        while let Some(before) = self.next_work(core, who, &mut seen) {
            match catch_unwind(AssertUnwindSafe(|| (self.write_back)(core, before))) {
                Ok(true) => seen = u64::MAX,
                Ok(false) => {}
                Err(_) => core
                    .txns
                    .fail("choosing data to write back hit a broken invariant; see the log"),
            }
        }
    }
}

/// Starts the threads that write back.
///
/// # Errors
/// No thread can be started.
pub(crate) fn start(core: &Arc<Core>) -> Result<()> {
    let count = std::thread::available_parallelism().map_or(2, usize::from).clamp(1, 4);
    for n in 0..count {
        let who = if n == 0 { Writer::First } else { Writer::Helper };
        let core_for_thread = core.clone();
        let thread = std::thread::Builder::new()
            .name("larder-data".into())
            .spawn(move || core_for_thread.data.work(&core_for_thread, who))
            .map_err(|e| Error::Unsupported(format!("cannot start a thread: {e}")))?;
        core.data.threads.lock().push(thread);
    }
    Ok(())
}
