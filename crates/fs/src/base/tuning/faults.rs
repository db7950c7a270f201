//! What the engine can be made to do wrong, for tests that must notice it.
//!
//! Only the feature `faults` compiles this module, and only tests turn that feature on. A place
//! that can go wrong asks `fault!(tuning, Name)`; without the feature the answer is a constant, and
//! the compiler leaves out what would have been done. A new fault is a name here, a place in the
//! engine that asks for it, and a test of `larder-simtest` that fails unless it is noticed:
//! `xtask tidy` looks for all three.

use super::Tuning;
use larder_format::Physical;
use larder_volume::Device;
use larder_volume::device::Write;
use std::io::{self, IoSlice};
use std::sync::Arc;

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
    /// Replace the pointer to a block that has moved, and keep the reference to the old place.
    RelocationKeepsOld,
    /// Write blocks that trees share at another place without the flag that says so.
    RelocationUnmarked,
    /// Move an extent for the users that it had before its copy was made.
    RelocationOldUsers,
    /// Go on with the copy of an extent that is half moved, although nobody may use it any more.
    RelocationTrustsCopy,
    /// Replace shared blocks while somebody changes extents whose places are in them.
    RelocationBesideEdits,
    /// Write down that a balance is under way when its first chunk has moved.
    BalanceNotedLate,
    /// Forget that a balance is under way before it is done.
    BalanceEndsEarly,
    /// Open a file system without the profiles to which a balance converts it.
    BalanceForgetsProfiles,
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
    /// Of several devices, write the superblock of the first one only.
    SuperOnOneDevice,
    /// Go by the superblock of the first device, however old it is.
    StaleSuperblock,
    /// Go on with a device that refuses a write, as if it had taken it.
    MirrorErrors,
    /// Begin no history when a device is lost.
    OneHistory,
    /// Report success although a metadata write failed.
    IgnoreWriteErrors,
    /// Begin to copy a device that is replaced before delayed data is written.
    ReplaceWithoutFlush,
    /// Write to the device that is replaced, and not to the target of the replacement.
    ReplaceUnmirrored,
    /// Leave a target of a replacement the superblock that it had before.
    ReplaceUnerased,
    /// Count a device that is added before it has a superblock.
    DeviceCountedFirst,
    /// Erase the superblock of a device that is removed before the commit without it.
    DeviceErasedFirst,
    /// Hand out what is free in rows with parity of which something is in use.
    RowsShared,
    /// Write no parity.
    NoParity,
    /// Go on although a superblock is on some devices only.
    SuperblockOnSome,
    /// Do not say in the superblocks which devices failed in their commit.
    FailedUnnamed,
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

/// The device, which never tells that it refused a write.
pub(crate) fn deaf(device: Arc<dyn Device>) -> Arc<dyn Device> {
    Arc::new(Deaf(device))
}

#[derive(Debug)]
struct Deaf(Arc<dyn Device>);

impl Device for Deaf {
    fn name(&self) -> String {
        self.0.name()
    }
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn is_read_only(&self) -> bool {
        self.0.is_read_only()
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        let _ = self.0.write_at(at, data);
        Ok(())
    }
    fn write_vectored_at(&self, at: Physical, data: &[IoSlice<'_>]) -> io::Result<()> {
        let _ = self.0.write_vectored_at(at, data);
        Ok(())
    }
    fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        self.0.write_batch(writes).into_iter().map(|_| Ok(())).collect()
    }
    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
    fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
        self.0.discard(at, len)
    }
}

impl From<Fault> for Tuning {
    fn from(fault: Fault) -> Self {
        Self { fault: Some(fault), ..Self::default() }
    }
}
