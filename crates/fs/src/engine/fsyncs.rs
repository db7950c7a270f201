//! Figures: what `fsync` has done, and why some calls had to be commits.

use super::figures::count;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why an `fsync` has to be a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The subvolume is not in the last commit.
    NewSubvolume,
    /// It concerns an entry of a subvolume, or the path to the subvolume.
    SubvolumeEntry,
    /// Data or nodes would lie in a chunk that the last commit does not have.
    NewChunk,
    /// There is no space for the log's nodes.
    NoSpace,
    /// The superblock lacks a feature that the data uses.
    Feature,
    /// The inode has data in space that another file, as far as the log knows it, has only
    /// preallocated.
    Preallocated,
    /// The inode left memory since it was changed, so what else it concerns is not known.
    Forgotten,
    /// The log would be larger than the commit.
    TooMuch,
    /// Something has been moved in this transaction.
    Relocation,
    /// Logging is switched off.
    Off,
}

/// How many causes there are.
const CAUSES: usize = Cause::Off as usize + 1;

figures! {
    /// What `fsync` has done since the file system was opened.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
    #[allow(missing_docs)]
    pub struct LogStats of c: &Counters {
        /// Calls; calls that found everything durable; calls that the log served.
        fsyncs: u64 = count(&c.fsyncs),
        fsyncs_with_nothing_to_do: u64 = count(&c.nothing),
        fsyncs_logged: u64 = count(&c.logged),
        /// Calls that had to be commits, by cause: a subvolume that is not in the last commit,
        /// entries of subvolumes, chunks that are not in the last commit, no space, a feature that
        /// the superblock lacks, data that another file wrote into preallocated space, a directory
        /// that left memory, too much to log, a relocation in the same transaction, the log
        /// switched off, and too late for the log of a transaction that was being sealed.
        commits_new_subvolume: u64 = c.of(Cause::NewSubvolume),
        commits_subvolume_entry: u64 = c.of(Cause::SubvolumeEntry),
        commits_new_chunk: u64 = c.of(Cause::NewChunk),
        commits_no_space: u64 = c.of(Cause::NoSpace),
        commits_feature: u64 = c.of(Cause::Feature),
        commits_preallocated: u64 = c.of(Cause::Preallocated),
        commits_forgotten: u64 = c.of(Cause::Forgotten),
        commits_too_much: u64 = c.of(Cause::TooMuch),
        commits_relocation: u64 = c.of(Cause::Relocation),
        commits_off: u64 = c.of(Cause::Off),
        commits_sealed: u64 = count(&c.sealed),
        /// Checksum items that came into logs; ranges of these that were searched for what other
        /// files had brought, as is done for files that share extents since the last commit; ranges
        /// in which there was something. Nothing is ever deleted or locked for that.
        csum_items: u64 = count(&c.csum_items),
        csum_ranges_searched: u64 = count(&c.csums_searched),
        csum_ranges_present: u64 = count(&c.csums_present),
        /// Batches; the most callers that one batch has served; superblocks and nodes written;
        /// flushes.
        batches: u64 = count(&c.batches),
        largest_batch: u64 = count(&c.largest),
        superblocks: u64 = count(&c.superblocks),
        nodes: u64 = count(&c.nodes),
        flushes: u64 = count(&c.flushes),
    }
}

/// The counters behind [`LogStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) fsyncs: AtomicU64,
    pub(crate) nothing: AtomicU64,
    pub(crate) logged: AtomicU64,
    pub(crate) causes: [AtomicU64; CAUSES],
    pub(crate) sealed: AtomicU64,
    pub(crate) csum_items: AtomicU64,
    pub(crate) csums_searched: AtomicU64,
    pub(crate) csums_present: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) largest: AtomicU64,
    pub(crate) superblocks: AtomicU64,
    pub(crate) nodes: AtomicU64,
    pub(crate) flushes: AtomicU64,
}

impl Counters {
    pub(crate) fn caused(&self, cause: Cause) {
        self.causes[cause as usize].fetch_add(1, Ordering::Relaxed);
    }
    fn of(&self, cause: Cause) -> u64 {
        count(&self.causes[cause as usize])
    }
}
