//! What the engine can be made to do wrong, for tests that must notice it.
//!
//! Only the feature `faults` compiles this module, and only tests turn that feature on. A place
//! that can go wrong asks `fault!(tuning, Name)`; without the feature the answer is a constant, and
//! the compiler leaves out what would have been done. A new fault is a name here, a place in the
//! engine that asks for it, and a test of `larder-simtest` that fails unless it is noticed:
//! `xtask tidy` looks for all three.

use super::Tuning;

/// Something that the engine does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Skip the flush between nodes and superblock.
    NoFlushBeforeSuper,
    /// Skip the flush after the superblock.
    NoFlushAfterSuper,
    /// Write the superblock before the nodes.
    SuperFirst,
    /// Hand freed space out again at once, instead of pinning it.
    ReusePinned,
    /// Insert a file extent before its data are on the device.
    ExtentBeforeData,
    /// Do not record data checksums.
    NoCsums,
    /// Return from fsync without waiting for the commit.
    FsyncDoesNotWait,
    /// Do not write freed/allocated space to the free-space tree.
    StaleFreeSpace,
    /// Ignore `last_snapshot`: treat every block as unshared.
    IgnoreSharing,
    /// Make a snapshot without noting that its blocks are shared now.
    SnapshotWithoutSharing,
    /// Make a snapshot without writing delayed data back first.
    SnapshotWithoutData,
    /// Make a snapshot before its source has what operations left to the seal.
    SnapshotBeforeItems,
    /// Do not note how far a deleted subvolume has been dropped.
    DropWithoutProgress,
    /// Note that a deleted subvolume has been dropped further than it is.
    DropProgressEarly,
    /// Share an extent without a reference for the file that gets it.
    CloneWithoutReference,
    /// Clone what the source has on the device, without what it has in memory.
    CloneUnsettled,
    /// Leave orphan items out when a linked-to-nothing inode stays open.
    NoOrphans,
    /// Skip the flushes that make a log durable.
    LogNoFlush,
    /// Do not log checksums.
    LogNoCsums,
    /// Do not log what has gone from a directory.
    LogNoDeletions,
    /// Do not log the inode that loses its name to the one that is logged.
    LogNoConflicts,
    /// Of checksums that were noted together, log only those that begin with an extent of the file.
    LogPartCsums,
    /// Log data that another file wrote into space that it had preallocated.
    LogPreallocated,
    /// Log only checksums that the transaction has noted.
    LogOlderCsums,
    /// Let extents grow that a log has.
    LogExtentsGrow,
    /// Let extents grow that another file has had a share of.
    LogSharedGrow,
    /// Log how a file has grown that was cut and logged before, but no hole behind its old end.
    LogNoHoles,
    /// Hang a log on the superblock that there is, although a commit has to write one first.
    LogEarlySuper,
    /// Write a log's nodes over those that the durable log has.
    LogOverwrites,
    /// Copy a node under a tree's lock while logging.
    LogCopiesLocked,
    /// Wait for the device under a tree's lock while logging.
    LogWaitsLocked,
    /// Write the primary superblock only, never its mirrors.
    NoSuperMirrors,
    /// Report success although a metadata write failed.
    IgnoreWriteErrors,
    /// Hand out what is free in rows with parity of which something is in use.
    RowsShared,
    /// Write no parity.
    NoParity,
    /// Discard freed space before the superblock that frees it is durable.
    DiscardEarly,
    /// Discard whole granules although something in them is in use.
    DiscardBeyond,
    /// Write in place what a snapshot shares.
    InPlaceShared,
    /// Write in place what no other file has now, although a crash can give it back to one.
    InPlaceSharedBefore,
    /// Set the new size of a file of many extents before they are gone.
    TruncateAtOnce,
    /// Let a file that grows show what its last sector had behind the end.
    TailShows,
    /// Let the size on the device cover bytes that are not in extents yet.
    SizeBeforeData,
}

impl From<Fault> for Tuning {
    fn from(fault: Fault) -> Self {
        Self { fault: Some(fault), ..Self::default() }
    }
}
