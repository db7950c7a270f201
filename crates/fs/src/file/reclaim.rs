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
        let moment = || (core.txns.published(), core.space.chunk_changes());
        let begun = moment();
        let before = core.space.accounts.unheld(kind);
        let accounts = &core.space.accounts;
        let enough =
            || accounts.fits(kind, bytes) || accounts.unheld(kind) >= before.saturating_add(bytes);
        core.space.hurry();
        core.space.give_back_preallocated();
        if enough() {
            return Ok(true);
        }
        let commit = || -> Result<()> {
            core.reclaims.commits.fetch_add(1, Ordering::Relaxed);
            core.commit_now()?;
            core.space.hurry();
            let pinned = |kind| core.space.accounts.figures(kind).pinned > 0;
            if !enough() && (pinned(SpaceKind::Data) || pinned(SpaceKind::Metadata)) {
                // There are still readers of what was freed.
                core.epochs.wait_for_oldest();
                core.space.hurry();
            }
            Ok(())
        };
        let stats = &core.reclaims;
        if kind == SpaceKind::Metadata {
            // A chunk for metadata is never given to data again while anything is left in it. So
            // none is made where promises are all that stands in the way and a commit ends them.
            let figures = accounts.figures(kind);
            let scarce = figures.used >= figures.total / 4 * 3;
            let promises = || core.txns.running().kept() + accounts.figures(kind).pinned;
            // One commit serves all waiters.
            if !scarce && promises() >= bytes.max(accounts.wanted(kind)) {
                commit()?;
                if enough() {
                    return Ok(true);
                }
            }
            // Delayed data has reserved many times what its items use. Writing it leaves notes; the
            // commit ends these.
            if !scarce {
                let files = bytes.div_ceil(core.item_cost(2)).max(FEWEST_FILES);
                if write_delayed(&core, Delayed { bytes: u64::MAX, runs: index(files) }, || {
                    commit()?;
                    Ok(enough())
                })? {
                    return Ok(true);
                }
            }
            if !scarce && promises() >= bytes {
                commit()?;
                if enough() {
                    return Ok(true);
                }
            }
        }
        // Makes a chunk, unless space has become free meanwhile.
        let chunk = || -> Result<ChunkOutcome> {
            let seen = core.space.seen(kind);
            if enough() {
                return Ok(ChunkOutcome::Granted);
            }
            let outcome = core.space.chunk_in_running(&core.txns, kind, seen)?;
            stats.chunks.fetch_add(u64::from(outcome == ChunkOutcome::Granted), Ordering::Relaxed);
            Ok(outcome)
        };
        let outcome = chunk()?;
        if outcome == ChunkOutcome::Granted {
            return Ok(true);
        }
        // Operations on metadata reserve many times what they use. When those under way have ended,
        // delayed data is written and a commit is done, nothing is left of that. Also, the first
        // commit shows which chunks are empty, its own transaction's included, and the second gives
        // them back.
        if outcome == ChunkOutcome::Promised || core.space.has_idle_chunks(kind) {
            let after_commits = || -> Result<bool> {
                for _ in 0..2 {
                    commit()?;
                    match chunk()? {
                        ChunkOutcome::Granted => return Ok(true),
                        ChunkOutcome::NoRoom if !core.space.has_idle_chunks(kind) => break,
                        _ => {}
                    }
                }
                Ok(false)
            };
            let files = Delayed { bytes: u64::MAX, runs: index(FEWEST_FILES) };
            let made = || -> Result<bool> {
                Ok(after_commits()? || write_delayed(&core, files, after_commits)?)
            };
            // A request for metadata stands in that line already.
            let made = if kind == SpaceKind::Data && !accounts.is_mixed() {
                accounts.alone(SpaceKind::Metadata, made)
            } else {
                made()
            };
            if made? {
                return Ok(true);
            }
        }
        // Delayed data may have reserved more than it needs.
        let least = Delayed { bytes: bytes.max(LEAST_BYTES), runs: usize::MAX };
        if write_delayed(&core, least, || Ok(enough()))? {
            return Ok(true);
        }
        // Pinned space, and what is reserved for all notes, wait for a commit.
        let pinned = core.space.accounts.figures(kind).pinned > 0;
        if core.txns.running().dirty.load(Ordering::Acquire) || pinned {
            commit()?;
            chunk()?;
            return Ok(true);
        }
        // A commit under way has not shown yet what it frees, and holds what was reserved for it.
        if let Some(generation) = core.txns.request() {
            core.txns.wait(generation)?;
            core.space.hurry();
            chunk()?;
            return Ok(true);
        }
        if moment() != begun {
            return Ok(true);
        }
        tracing::debug!(?kind, bytes, figures = ?accounts.figures(kind), "nothing is left to be \
            reclaimed");
        Ok(false)
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
