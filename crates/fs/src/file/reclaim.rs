//! Reclaim: what is done when space is short, cheapest step first.
//!
//! It runs on the thread with the oldest ticket ([`crate::space::reserve`]). `docs/SPACE.md` lists
//! the steps, and the places that may hold space for a moment.
//!
//! Delayed data is written by amount, oldest first, because a small request must not write hundreds
//! of MiB that would have grown into larger extents. If a round does not yield enough, data that is
//! in flight is waited for (compressed data shows only at its end how little it needs), and the
//! next round writes twice as much. Before any request is refused, everything has been written.
//!
//! "Nothing is left" must not be true for a moment only: other threads commit, and make and give
//! back chunks, all the time. So a chunk is asked for again after each step, and if anything was
//! published, made or given back since the round began, there is another one.

use crate::engine::Core;
use crate::engine::reclaims::ReclaimCounters;
use crate::error::Result;
use crate::file::Delayed;
use crate::space::SpaceKind;
use crate::space::alloc::ChunkOutcome;
use crate::space::reserve::Reclaim;
use larder_format::Generation;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Makes space when it is short.
pub(crate) struct Reclaimer(Weak<Core>);

impl Reclaimer {
    pub(crate) fn new(core: &Arc<Core>) -> Self {
        Self(Arc::downgrade(core))
    }
}

impl Reclaim for Reclaimer {
    fn reclaim(&self, kind: SpaceKind, bytes: u64) -> Result<bool> {
        let Some(core) = self.0.upgrade() else { return Ok(false) };
        if core.txns.failure().is_some() {
            return core.check_writable().map(|()| false);
        }
        let begun = Moment::now(&core);
        let unheld = core.space.accounts.unheld(kind);
        Round { core: &core, kind, bytes, begun, unheld }.run()
    }
}

/// What other threads may have done: what was published, and how often chunks were made or given
/// back.
#[derive(PartialEq, Eq)]
struct Moment(Generation, u64);

impl Moment {
    fn now(core: &Core) -> Self {
        Self(core.txns.published(), core.space.chunk_changes())
    }
}

/// A round of steps, until so many bytes can be reserved.
struct Round<'a> {
    core: &'a Core,
    kind: SpaceKind,
    bytes: u64,
    begun: Moment,
    /// Bytes that no operation held when it began.
    unheld: u64,
}

impl Round<'_> {
    /// False if nothing is left that could be done.
    fn run(&self) -> Result<bool> {
        self.core.space.hurry();
        self.core.space.give_back_preallocated();
        if self.is_enough() || self.kind == SpaceKind::Metadata && self.end_promises()? {
            return Ok(true);
        }
        let outcome = self.make_chunk()?;
        if outcome == ChunkOutcome::Granted {
            return Ok(true);
        }
        let room = outcome == ChunkOutcome::Promised || self.core.space.has_idle_chunks(self.kind);
        if room && self.free_chunks()? {
            return Ok(true);
        }
        // Delayed data may have reserved more than it needs.
        let least = Delayed { bytes: self.bytes.max(LEAST_BYTES), runs: usize::MAX };
        if write_delayed(self.core, least, || Ok(self.is_enough()))? || self.wait_for_commit()? {
            return Ok(true);
        }
        if Moment::now(self.core) != self.begun {
            return Ok(true);
        }
        let figures = self.core.space.accounts.figures(self.kind);
        tracing::debug!(kind = ?self.kind, bytes = self.bytes, ?figures, "nothing is left to be \
            reclaimed");
        Ok(false)
    }

    fn is_enough(&self) -> bool {
        let accounts = &self.core.space.accounts;
        accounts.fits(self.kind, self.bytes)
            || accounts.unheld(self.kind) >= self.unheld.saturating_add(self.bytes)
    }

    /// Commits, and waits for readers of what that frees where it is needed.
    fn commit(&self) -> Result<()> {
        let core = self.core;
        core.reclaims.commits.fetch_add(1, Ordering::Relaxed);
        core.commit_now()?;
        core.space.hurry();
        let pinned = |kind| core.space.accounts.figures(kind).pinned > 0;
        if !self.is_enough() && (pinned(SpaceKind::Data) || pinned(SpaceKind::Metadata)) {
            core.epochs.wait_for_oldest();
            core.space.hurry();
        }
        Ok(())
    }
    fn commit_is_enough(&self) -> Result<bool> {
        self.commit()?;
        Ok(self.is_enough())
    }

    /// Makes a chunk, unless space has become free meanwhile.
    fn make_chunk(&self) -> Result<ChunkOutcome> {
        let core = self.core;
        let seen = core.space.seen(self.kind);
        if self.is_enough() {
            return Ok(ChunkOutcome::Granted);
        }
        let outcome = core.space.chunk_in_running(&core.txns, self.kind, seen)?;
        let made = u64::from(outcome == ChunkOutcome::Granted);
        core.reclaims.chunks.fetch_add(made, Ordering::Relaxed);
        Ok(outcome)
    }

    /// Ends promises of metadata, if they are all that stands in the way, without a chunk: a chunk
    /// for metadata is never given to data again while anything is left in it.
    fn end_promises(&self) -> Result<bool> {
        let core = self.core;
        let figures = core.space.accounts.figures(self.kind);
        let scarce = figures.used >= figures.total / 4 * 3;
        if scarce {
            return Ok(false);
        }
        let promises =
            || core.txns.running().kept() + core.space.accounts.figures(self.kind).pinned;
        // One commit serves all waiters.
        let wanted = self.bytes.max(core.space.accounts.wanted(self.kind));
        if promises() >= wanted && self.commit_is_enough()? {
            return Ok(true);
        }
        // Delayed data has reserved many times what its items use. Writing it leaves notes; the
        // commit ends these.
        let files = self.bytes.div_ceil(core.item_cost(2)).max(FEWEST_FILES);
        let files = Delayed { bytes: u64::MAX, runs: index(files) };
        if write_delayed(core, files, || self.commit_is_enough())? {
            return Ok(true);
        }
        Ok(promises() >= self.bytes && self.commit_is_enough()?)
    }

    /// Has a chunk made of what commits free. Operations on metadata reserve many times what they
    /// use. Once those under way have ended, delayed data is written, and a commit is done, these
    /// reservations are gone.
    fn free_chunks(&self) -> Result<bool> {
        let files = Delayed { bytes: u64::MAX, runs: index(FEWEST_FILES) };
        let made = || -> Result<bool> {
            Ok(self.chunk_after_commits()?
                || write_delayed(self.core, files, || self.chunk_after_commits())?)
        };
        let accounts = &self.core.space.accounts;
        // A request for metadata stands in that line already.
        if self.kind == SpaceKind::Data && !accounts.is_mixed() {
            accounts.alone(SpaceKind::Metadata, made)
        } else {
            made()
        }
    }

    /// The first commit shows which chunks are empty, its own transaction's included, and the
    /// second gives them back.
    fn chunk_after_commits(&self) -> Result<bool> {
        for _ in 0..2 {
            self.commit()?;
            match self.make_chunk()? {
                ChunkOutcome::Granted => return Ok(true),
                ChunkOutcome::NoRoom if !self.core.space.has_idle_chunks(self.kind) => break,
                _ => {}
            }
        }
        Ok(false)
    }

    /// Pinned space, and what is reserved for all notes, wait for a commit. False if there is
    /// nothing to commit.
    fn wait_for_commit(&self) -> Result<bool> {
        let core = self.core;
        let pinned = core.space.accounts.figures(self.kind).pinned > 0;
        if core.txns.running().dirty.load(Ordering::Acquire) || pinned {
            self.commit()?;
        } else if let Some(generation) = core.txns.request() {
            // A commit under way has not shown yet what it frees, and holds what was reserved for
            // it.
            core.txns.wait(generation)?;
            core.space.hurry();
        } else {
            return Ok(false);
        }
        self.make_chunk()?;
        Ok(true)
    }
}

/// Runs of files whose reservations for items are worth a commit.
const FEWEST_FILES: u64 = 64;
/// Bytes of delayed data that are written at least where data is short.
const LEAST_BYTES: u64 = 1 << 20;
/// Rounds of writing delayed data. Each writes twice as much as the one before: everything, in the
/// end.
const ROUNDS: u32 = 24;

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Writes delayed data, oldest first, until `enough`. The first round writes no more than is
/// wanted, each further one twice as much as before. After each round, data in flight is waited
/// for. True if it is enough, false if nothing is delayed any more.
fn write_delayed(core: &Core, wanted: Delayed, enough: impl Fn() -> Result<bool>) -> Result<bool> {
    let stats = &core.reclaims;
    let mut wanted = wanted;
    for _ in 0..ROUNDS {
        let progress = core.data.progress();
        let done = crate::file::reclaim(core, wanted);
        stats.note(wanted, done);
        debug_assert!(done.runs <= wanted.runs || core.options.tuning.reclaim.may_exceed());
        if done.runs > 0 && enough()? {
            return Ok(true);
        }
        let settled = core.data.settle();
        if settled {
            stats.settles.fetch_add(1, Ordering::Relaxed);
            if enough()? {
                return Ok(true);
            }
        }
        // Data that could not be taken may have been in flight until a moment ago.
        if done.runs == 0 && !settled && core.data.progress() == progress {
            break;
        }
        wanted.bytes = wanted.bytes.saturating_mul(2);
        wanted.runs = wanted.runs.saturating_mul(2);
    }
    Ok(false)
}

impl ReclaimCounters {
    fn note(&self, asked: Delayed, done: Delayed) {
        let add = |counter: &AtomicU64, n: u64| counter.fetch_add(n, Ordering::Relaxed);
        add(&self.writes, 1);
        if asked.runs < usize::MAX {
            add(&self.asked_runs, asked.runs as u64);
            add(&self.written_runs, done.runs as u64);
        }
        if asked.bytes < u64::MAX {
            add(&self.asked_bytes, asked.bytes);
            add(&self.written_bytes, done.bytes);
            self.excess_bytes.fetch_max(done.bytes.saturating_sub(asked.bytes), Ordering::Relaxed);
        }
    }
}
