//! Figures: what was done because space was short.

use std::sync::atomic::AtomicU64;

/// What the reclaimer has done, for statistics.
#[derive(Debug, Default)]
pub(crate) struct ReclaimCounters {
    /// Rounds of writing delayed data.
    pub(crate) writes: AtomicU64,
    /// Rounds are asked for runs of files, or for bytes. How many of each they were asked for, and
    /// how many they wrote.
    pub(crate) asked_runs: AtomicU64,
    /// See `asked_runs`.
    pub(crate) written_runs: AtomicU64,
    /// See `asked_runs`.
    pub(crate) asked_bytes: AtomicU64,
    /// See `asked_runs`.
    pub(crate) written_bytes: AtomicU64,
    /// Most bytes that a round wrote beyond what it was asked for.
    pub(crate) excess_bytes: AtomicU64,
    /// Waits for data that was in flight.
    pub(crate) settles: AtomicU64,
    /// Chunks made.
    pub(crate) chunks: AtomicU64,
    /// Commits.
    pub(crate) commits: AtomicU64,
}
