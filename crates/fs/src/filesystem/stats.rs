//! Figures about an open file system, as `larder stats` shows them.

use crate::engine::Core;
use crate::engine::figures::count;
use crate::engine::fsyncs::LogStats;
use crate::engine::reclaims::ReclaimStats;
use crate::space::SpaceKind::{Data, Metadata};
use crate::tree::{IMAGE_COPIES, LongHolds};
use larder_volume::DeviceStats;
use serde::Serialize;

/// A counter of the device.
fn device(core: &Core, of: fn(&DeviceStats) -> u64) -> u64 {
    core.volume.stats().iter().map(|(_, stats)| of(stats)).sum()
}

figures! {
    /// Counters since the file system was opened; shown by `larder stats`.
    #[derive(Clone, Debug, Serialize)]
    #[allow(missing_docs)]
    pub struct Stats of core: &Core {
        /// Last published transaction.
        generation: u64 = core.txns.published().0,
        commits: u64 = count(&core.txns.stats.commits),
        /// Callers that had to wait until a transaction was published.
        commit_waits: u64 = count(&core.txns.stats.waits),
        /// Longest time that operations waited for a seal, and the sum of these times.
        seal_max_us: u64 = count(&core.txns.stats.seal_max_ns) / 1000,
        seal_total_us: u64 = count(&core.txns.stats.seal_ns) / 1000,
        /// Longest time from seal to publication, and the sum of these times.
        commit_max_us: u64 = count(&core.txns.stats.commit_max_ns) / 1000,
        commit_total_us: u64 = count(&core.txns.stats.commit_ns) / 1000,
        nodes_written: u64 = count(&core.txns.stats.nodes_written),
        tree_edits: u64 = count(&core.tree_stats.edits),
        /// Attempts to edit that first had to fetch something with the lock dropped.
        tree_retries: u64 = count(&core.tree_stats.retries),
        /// The longest time that an edit held a tree's lock, the sum of these times, and what is
        /// known about the long ones.
        tree_lock_max_us: u64 = core.tree_stats.holds.long().longest.us,
        tree_lock_total_us: u64 = core.tree_stats.holds.total_us(),
        tree_lock_holds: LongHolds = core.tree_stats.holds.long(),
        /// Nodes copied to a new address.
        node_copies: u64 = count(&core.tree_stats.cow),
        /// Nodes copied in memory because a version can see them.
        image_copies: u64 = count(&IMAGE_COPIES),
        cache_hits: u64 = count(&core.store.stats().hits),
        cache_reads: u64 = count(&core.store.stats().reads),
        cache_bytes: u64 = core.store.cached_bytes(),
        damaged_copies: u64 = count(&core.store.stats().bad_copies),
        device_reads: u64 = device(core, |s| s.reads),
        device_read_bytes: u64 = device(core, |s| s.read_bytes),
        device_writes: u64 = device(core, |s| s.writes),
        device_written_bytes: u64 = device(core, |s| s.written_bytes),
        device_flushes: u64 = device(core, |s| s.flushes),
        /// Do writes and long reads go past the machine's page cache?
        device_direct: bool = core.volume.devices().all(|(_, device)| device.is_direct()),
        device_discards: u64 = device(core, |s| s.discards),
        device_discarded_bytes: u64 = device(core, |s| s.discarded_bytes),
        /// Numbers of the devices that have failed, and of those that are behind the others.
        devices_failed: Vec<u64> = core.volume.failed().iter().map(|id| id.0).collect(),
        devices_behind: Vec<u64> = core.volume.behind().iter().map(|id| id.0).collect(),
        /// Numbers of the devices that were missing when the file system was opened.
        devices_missing: Vec<u64> = core.missing_devices().map(|d| d.id.0).collect(),
        /// Bytes written by callers that are not in extents yet.
        delayed_bytes: u64 = core.data.delayed_bytes(),
        /// Bytes that were compressed, and their length afterwards. Bytes that were tried and did
        /// not shrink, and bytes that did not look promising.
        compress_in_bytes: u64 = count(&core.compression.stats.raw),
        compress_out_bytes: u64 = count(&core.compression.stats.packed),
        compress_failed_bytes: u64 = count(&core.compression.stats.failed),
        compress_skipped_bytes: u64 = count(&core.compression.stats.skipped),
        /// Compressed bytes in memory that are in flight to the device.
        compress_held_bytes: u64 = count(&core.compression.stats.held),
        inodes_in_memory: u64 = core.subvols.read().values().map(|s| s.inodes.len() as u64).sum(),
        /// Parts of the cache size.
        memory: MemoryStats = MemoryStats::of(core),
        /// Bytes of data and metadata that running operations and the next commit have reserved,
        /// without the global reserve. 0 when nothing is left to commit.
        data_reserved: u64 = core.space.accounts.reserved_by_operations(Data),
        metadata_reserved: u64 = core.space.accounts.reserved_by_operations(Metadata),
        /// Bytes of data and metadata that were freed and wait for a commit or a reader.
        data_pinned: u64 = core.space.accounts.figures(Data).pinned,
        metadata_pinned: u64 = core.space.accounts.figures(Metadata).pinned,
        /// Bytes of metadata that were allocated beyond what was reserved, with what commits take
        /// from the global reserve.
        metadata_overdrawn: u64 = core.space.accounts.stats(Metadata).overdrawn,
        /// Requests that had to wait for space, and requests that were refused.
        space_waits: u64 = [Data, Metadata].map(|kind| core.space.accounts.stats(kind).tickets)
            .iter().sum(),
        space_refusals: u64 = [Data, Metadata].map(|kind| core.space.accounts.stats(kind).refused)
            .iter().sum(),
        reclaim: ReclaimStats = ReclaimStats::of(core),
        /// What `fsync` has done.
        log: LogStats = LogStats::of(&core.log),
        /// Deleted subvolumes that still take space, and the number of their blocks that were
        /// looked at.
        subvolumes_to_drop: u64 = core.drops.len() as u64,
        blocks_dropped: u64 = count(&core.drops.blocks),
        /// Why the file system is read-only, if it is.
        read_only: Option<String> = core.read_only.clone().or_else(|| core.txns.failure()),
    }
}

/// What needs memory, and how much it may use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct MemoryUse {
    pub held: u64,
    pub budget: u64,
}

figures! {
    /// The parts of the memory that the engine may use.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub struct MemoryStats of core: &Core {
        /// Delayed data.
        delayed_data: MemoryUse =
            MemoryUse { held: core.data.memory(), budget: core.budget().data },
        /// What writing it back needs in addition: the most so far.
        write_back: MemoryUse =
            MemoryUse { held: core.data.scratch.most(), budget: core.budget().scratch },
        /// Nodes that could be read again.
        clean_nodes: MemoryUse =
            MemoryUse { held: core.store.cached_bytes(), budget: core.budget().nodes },
        /// What the running transaction has changed: nodes, inodes, notes for the commit. A sealed
        /// transaction may use as much.
        transaction: MemoryUse = MemoryUse {
            held: core.txns.running().memory(core.nodesize()),
            budget: core.budget().transaction,
        },
    }
}
