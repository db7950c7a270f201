//! Where the space is: figures for people who want to know what is full.
//!
//! btrfs divides a device into chunks for data and chunks for metadata, and a chunk belongs to one
//! of them as long as anything is in it. So a file system can be full in two ways, and the one
//! number that `statfs` has room for hides which it is. This module collects the figures; front
//! ends find the words.

use crate::space::alloc::Allocator;
use crate::space::{Run, SpaceKind};
use serde::Serialize;

/// Space of one kind. Bytes are logical: those of one copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KindUsage {
    /// `single`, `DUP`.
    pub profile: String,
    /// Copies of each byte.
    pub copies: u64,
    /// Bytes in all chunks of the kind.
    pub total: u64,
    /// Allocated.
    pub used: u64,
    /// Freed, and usable when the next commit is durable and no reader from before is left.
    pub pinned: u64,
    /// Promised to operations that run, and to the next commit.
    pub reserved: u64,
    /// Kept for commits and deletions.
    pub kept: u64,
    /// Where nothing can be allocated: copies of the superblock.
    pub unusable: u64,
    /// Free, but in rows with parity in which something else is in use: nothing can be allocated
    /// there before that is gone as well.
    pub held: u64,
    /// What is left of `total`.
    pub available: u64,
    /// Number of chunks.
    pub chunks: u64,
    /// Chunks that are less than half used, and the bytes that are free in them. A balance could
    /// give these back to the device.
    pub sparse_chunks: u64,
    /// See `sparse_chunks`.
    pub sparse_free: u64,
    /// Bytes that a new chunk would have. 0 if the device has no room for one.
    pub next_chunk: u64,
}

/// Where the space of a file system is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SpaceUsage {
    /// Bytes of the device.
    pub device: u64,
    /// Bytes of the device that no chunk takes.
    pub unallocated: u64,
    /// Data and metadata share their chunks, so both figures are the same.
    pub mixed: bool,
    /// File data.
    pub data: KindUsage,
    /// Trees.
    pub metadata: KindUsage,
    /// The chunk tree.
    pub system: KindUsage,
    /// Bytes that callers have written and no extent holds yet.
    pub delayed: u64,
    /// Neither a file nor a directory can be made: metadata is full and cannot grow.
    pub metadata_full: bool,
}

impl Allocator {
    /// The figures, without what no extent holds yet. `new_file`: bytes of metadata that one more
    /// file may take.
    pub(crate) fn usage(&self, new_file: u64) -> SpaceUsage {
        let (device, unallocated) = self.device_bytes();
        SpaceUsage {
            device,
            unallocated,
            mixed: self.accounts.is_mixed(),
            data: self.kind_usage(SpaceKind::Data),
            metadata: self.kind_usage(SpaceKind::Metadata),
            system: self.kind_usage(SpaceKind::System),
            delayed: 0,
            metadata_full: self.metadata_is_full(new_file),
        }
    }

    fn kind_usage(&self, kind: SpaceKind) -> KindUsage {
        let accounts = &self.accounts;
        let figures = accounts.figures(kind);
        let mixed = accounts.is_mixed() && kind != SpaceKind::System;
        let kept =
            if kind == SpaceKind::Metadata || mixed { accounts.global_reserve().0 } else { 0 };
        let reserved = accounts.reserved_by_operations(kind);
        let mut usage = KindUsage {
            profile: self.profile_name(kind),
            copies: self.copies(kind),
            total: figures.total,
            used: figures.used,
            pinned: figures.pinned,
            reserved,
            kept,
            unusable: figures.unusable,
            held: 0,
            available: figures.free().saturating_sub(kept.saturating_add(reserved)),
            chunks: 0,
            sparse_chunks: 0,
            sparse_free: 0,
            next_chunk: self.next_chunk(kind),
        };
        for group in self.groups.all() {
            if group.kind() == kind || mixed && group.kind() != SpaceKind::System {
                let (Run { len, .. }, now) = (group.run(), group.usage());
                usage.chunks += 1;
                usage.held += now.held;
                if now.allocated < len / 2 {
                    usage.sparse_chunks += 1;
                    usage.sparse_free += now.free;
                }
            }
        }
        usage.unusable = usage.unusable.saturating_sub(usage.held);
        usage
    }

    /// Has metadata neither room for another file nor for another chunk? Pinned space counts as
    /// room, because a request that needs it gets it.
    pub(crate) fn metadata_is_full(&self, new_file: u64) -> bool {
        let accounts = &self.accounts;
        let figures = accounts.figures(SpaceKind::Metadata);
        let promised = accounts.global_reserve().0 + new_file;
        figures.free() + figures.pinned < promised && self.next_chunk(SpaceKind::Metadata) == 0
    }

    /// For `statfs`: bytes in all, free bytes, and bytes that may be written now.
    pub(crate) fn statfs_bytes(&self, new_file: u64) -> (u64, u64, u64) {
        let (total, free) = self.statfs();
        // As on Linux: nothing can be written to a file that cannot be made.
        (total, free, if self.metadata_is_full(new_file) { 0 } else { free })
    }
}
