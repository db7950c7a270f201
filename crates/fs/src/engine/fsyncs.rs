//! Figures: what `fsync` has done, and why some calls had to be commits.

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
    /// Logging is switched off.
    Off,
}

impl Cause {
    const ALL: [Self; 9] = [
        Self::NewSubvolume,
        Self::SubvolumeEntry,
        Self::NewChunk,
        Self::NoSpace,
        Self::Feature,
        Self::Preallocated,
        Self::Forgotten,
        Self::TooMuch,
        Self::Off,
    ];
}

/// What `fsync` has done since the file system was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct LogStats {
    /// Calls; calls that found everything durable; calls that the log served.
    pub fsyncs: u64,
    pub fsyncs_with_nothing_to_do: u64,
    pub fsyncs_logged: u64,
    /// Calls that had to be commits, by cause: a subvolume that is not in the last commit, entries
    /// of subvolumes, chunks that are not in the last commit, no space, a feature that the
    /// superblock lacks, data that another file wrote into preallocated space, a directory that
    /// left memory, too much to log, the log switched off, and too late for the log of a
    /// transaction that was being sealed.
    pub commits_new_subvolume: u64,
    pub commits_subvolume_entry: u64,
    pub commits_new_chunk: u64,
    pub commits_no_space: u64,
    pub commits_feature: u64,
    pub commits_preallocated: u64,
    pub commits_forgotten: u64,
    pub commits_too_much: u64,
    pub commits_off: u64,
    pub commits_sealed: u64,
    /// Checksum items that came into logs; ranges of these that were searched for what other files
    /// had brought, as is done for files that share extents since the last commit; ranges in which
    /// there was something. Nothing is ever deleted or locked for that.
    pub csum_items: u64,
    pub csum_ranges_searched: u64,
    pub csum_ranges_present: u64,
    /// Batches; the most callers that one batch has served; superblocks and nodes written; flushes.
    pub batches: u64,
    pub largest_batch: u64,
    pub superblocks: u64,
    pub nodes: u64,
    pub flushes: u64,
}

/// The counters behind [`LogStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) fsyncs: AtomicU64,
    pub(crate) nothing: AtomicU64,
    pub(crate) logged: AtomicU64,
    pub(crate) causes: [AtomicU64; Cause::ALL.len()],
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
    /// What they say now.
    pub(crate) fn stats(&self) -> LogStats {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let cause = |cause: Cause| get(&self.causes[cause as usize]);
        LogStats {
            fsyncs: get(&self.fsyncs),
            fsyncs_with_nothing_to_do: get(&self.nothing),
            fsyncs_logged: get(&self.logged),
            commits_new_subvolume: cause(Cause::NewSubvolume),
            commits_subvolume_entry: cause(Cause::SubvolumeEntry),
            commits_new_chunk: cause(Cause::NewChunk),
            commits_no_space: cause(Cause::NoSpace),
            commits_feature: cause(Cause::Feature),
            commits_preallocated: cause(Cause::Preallocated),
            commits_forgotten: cause(Cause::Forgotten),
            commits_too_much: cause(Cause::TooMuch),
            commits_off: cause(Cause::Off),
            commits_sealed: get(&self.sealed),
            csum_items: get(&self.csum_items),
            csum_ranges_searched: get(&self.csums_searched),
            csum_ranges_present: get(&self.csums_present),
            batches: get(&self.batches),
            largest_batch: get(&self.largest),
            superblocks: get(&self.superblocks),
            nodes: get(&self.nodes),
            flushes: get(&self.flushes),
        }
    }
}
