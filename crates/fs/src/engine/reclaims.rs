//! Figures: what was done because space was short.

use super::figures::count;
use crate::engine::Core;
use crate::space::SpaceKind::{Data, Metadata};
use serde::Serialize;
use std::sync::atomic::AtomicU64;

/// The counters behind [`ReclaimStats`].
#[derive(Debug, Default)]
pub(crate) struct ReclaimCounters {
    pub(crate) writes: AtomicU64,
    pub(crate) asked_runs: AtomicU64,
    pub(crate) written_runs: AtomicU64,
    pub(crate) asked_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) excess_bytes: AtomicU64,
    pub(crate) settles: AtomicU64,
    pub(crate) chunks: AtomicU64,
    pub(crate) commits: AtomicU64,
}

figures! {
    /// What was done because space was short.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
    #[allow(missing_docs)]
    pub struct ReclaimStats of core: &Core {
        /// Calls of the reclaimer.
        rounds: u64 = [Data, Metadata].map(|kind| core.space.accounts.stats(kind).reclaims)
            .iter().sum(),
        /// Rounds of writing delayed data; how much they were asked for, and how much they wrote.
        /// If data was short, this is counted in bytes. If metadata was short, it is counted in
        /// runs of files, because delayed data reserves metadata for each of its files.
        writes: u64 = count(&core.reclaims.writes),
        asked_bytes: u64 = count(&core.reclaims.asked_bytes),
        written_bytes: u64 = count(&core.reclaims.written_bytes),
        asked_runs: u64 = count(&core.reclaims.asked_runs),
        written_runs: u64 = count(&core.reclaims.written_runs),
        /// Most bytes that a round wrote beyond what it was asked for: less than one piece of a
        /// file.
        excess_bytes: u64 = count(&core.reclaims.excess_bytes),
        /// Waits for data that was in flight already.
        settles: u64 = count(&core.reclaims.settles),
        chunks: u64 = count(&core.reclaims.chunks),
        commits: u64 = count(&core.reclaims.commits),
    }
}
