//! The table of ranks: all locks of the engine, from the outermost to the innermost.
//!
//! A thread takes locks downwards in this table. Its three parts say what a holder may wait for, a
//! condition included ([`Wait`]); a lock itself may be waited for in any part.
//!
//! - **Commit**: anything, a commit, a seal, space and the work of other threads included. The
//!   threads that are waited for never need these locks. `LogWork` says why it is an exception.
//! - **Device**: the device, but not a commit. The committer takes these locks itself, or waits for
//!   their holders.
//! - **Nothing**: they are held for instructions only.
//!
//! A new lock gets a row: below all locks that may be held where it is taken, above all that are
//! taken while it is held, and in the strictest part that does. Locks that are never held together
//! may share a row. Locks of one row that are held together have an order of their own
//! ([`super::RwLock::ordered`]).

use super::Wait;

/// A place in the order of locks.
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub(crate) trait Rank {
    /// Its row in the table.
    const ROW: Row;
    /// For the message.
    const NAME: &'static str;
    /// The longest wait that a holder may begin.
    const HOLDER_MAY: Wait;
}

macro_rules! ranks {
    ($($wait:ident {$(
        $(#[$doc:meta])* $name:ident = $shown:literal;
    )*})*) => {
        /// The rows, in order.
        #[cfg_attr(not(debug_assertions), allow(dead_code))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Row { $($($name,)*)* }
        $($(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy)]
            pub(crate) enum $name {}
            impl Rank for $name {
                const ROW: Row = Row::$name;
                const NAME: &'static str = $shown;
                const HOLDER_MAY: Wait = Wait::$wait;
            }
        )*)*
        /// What holders may wait for, row by row.
        const HOLDERS_MAY: &[Wait] = &[$($(<$name as Rank>::HOLDER_MAY,)*)*];
    };
}

ranks! {
Commit {
    /// A block group is being relocated. One at a time.
    Relocation = "a relocation";
    /// Subvolumes come, go and move.
    SubvolTree = "the tree of subvolumes";
    /// What a crash left behind in a subvolume is being cleaned up.
    Cleaning = "a subvolume's clean-up";
    /// Directories of a subvolume stand still.
    Moving = "moving directories";
    /// Operations on an inode: directories by number, then others by number.
    Op = "an inode's operations";
    /// The outcome of an inode's last `fsync`, while the next one collects. A second caller waits
    /// for what the first one has collected; nothing else takes it.
    Logged = "an inode's last fsync";
    /// Data is stored whose extent is entered later, by the same operation. A replacement waits for
    /// such operations; commits and reclaim do not need it.
    Storing = "data on its way to its extent";
    /// The leader's step: nodes, flush, superblock. The leader waits for the commit *before* the
    /// log's transaction. The committer takes it for its own transaction only, when it has
    /// published the one before.
    LogWork = "a log's step";
    /// A step of a walk that drops a tree, or a batch of a relocation: each counts on references
    /// that the other changes.
    SharedBlocks = "the blocks that trees share";
}
Device {
    /// The trees of a transaction's log in memory.
    LogContent = "a log's content";
    /// Superblocks are written in order: held across the flushes around them.
    SuperblockOrder = "the order of superblocks";
    /// The device discards. A thread that is short of space waits for that.
    Discarding = "a discard";
    /// Membership in the running transaction. It is no lock, but a seal waits for its end.
    Joined = "a transaction handle";
    /// Blocks that subvolumes share are replaced by copies which say other places of data.
    Repointing = "extents of a subvolume that move";
    /// Extent items of a file.
    Extents = "a file's extent lock";
    /// Data is written over. A scrub compares copies of such data while nothing is.
    InPlace = "writing in place";
    /// What chunks take of the device. Held while unallocated space is discarded, so that no chunk
    /// is made there.
    DeviceSpace = "the map of the device";
    /// Space that no version can reach is given back. Where tests discard all of it, that waits
    /// for the device.
    Releasing = "the release of freed space";
}
Nothing {
    /// Attributes of an inode.
    InodeState = "an inode's state";
    /// Ranges of an inode that its next `fsync` logs.
    ChangedRanges = "an inode's changed ranges";
    /// Delayed bytes of a file.
    Delayed = "a file's delayed data";
    /// Free buffers of one sector.
    SectorBuffers = "the buffers of sectors";
    /// Files that wait for write-back, and write-backs that are under way.
    Queue = "the write-back queue";
    /// Memory that write-back takes besides.
    Scratch = "the memory of write-back";
    /// Subvolumes in memory.
    Subvols = "the table of subvolumes";
    /// Inodes in memory.
    Table = "a table of inodes";
    /// Where subvolumes hang, as far as the published root tree does not say so.
    Links = "the links of subvolumes";
    /// Front ends.
    Fronts = "the front ends";
    /// The default subvolume, if it was set.
    DefaultSubvol = "the default subvolume";
    /// Inodes whose items the seal writes.
    LateItems = "the inodes of a seal";
    /// Snapshots that the seal makes.
    Snapshots = "the snapshots of a seal";
    /// What came of one of them.
    SnapshotOutcome = "a snapshot's outcome";
    /// A subvolume's ROOT_ITEM.
    SubvolItem = "a subvolume's root item";
    /// Subvolumes that a transaction has edited.
    Edited = "the edited subvolumes";
    /// A tree's root.
    TreeRoot = "a tree";
    /// A subvolume's tree as it was last sealed.
    SealedRoot = "a sealed tree";
    /// What reference counts are computed from.
    View = "the view of references";
    /// A transaction's notes on extent references.
    Refs = "the notes on references";
    /// Its notes on checksums.
    Csums = "the notes on checksums";
    /// Its notes on preallocated extents that have got data.
    Filled = "the notes on filled extents";
    /// Its notes for the root tree.
    RootNotes = "the notes for the root tree";
    /// Its notes on what its commit is to move in global trees.
    GlobalMoves = "the notes on what is to move";
    /// Its notes on how its commit is to change the devices.
    DeviceChanges = "the notes on devices";
    /// Block groups that were made in it.
    NewGroups = "the new block groups";
    /// Space that is kept for its commit.
    Kept = "the space of a commit";
    /// Blocks of a log that it replaces.
    FreedLog = "the blocks of a former log";
    /// A new label.
    Label = "the label";
    /// Contributions to a log, tickets, and the callers that wait for them.
    LogQueue = "a log's queue";
    /// Deleted subvolumes that are to be dropped.
    Drops = "the subvolumes to drop";
    /// The superblock as last written.
    Superblock = "the superblock";
    /// Early flushes: wanted, begun, ended.
    EarlyFlush = "the early flushes";
    /// The state machine of transactions.
    Transactions = "the state of transactions";
    /// Freed space that waits for the end of epochs.
    EpochQueue = "the queue of epochs";
    /// The current epoch.
    CurrentEpoch = "the current epoch";
    /// Block groups whose free-space record has to be made anew.
    Rebuild = "the records to rebuild";
    /// Freed data that is to be discarded.
    DiscardQueue = "the queue of discards";
    /// Addresses for blocks that operations took and did not need.
    Preallocated = "the preallocated blocks";
    /// Where the next allocation comes from: one for data, one for tree blocks.
    Hint = "an allocation hint";
    /// The map of block groups.
    GroupMap = "the map of block groups";
    /// A block group.
    Group = "a block group";
    /// An account: bytes that are there, used, pinned, reserved; requests in line.
    Account = "an account of space";
    /// A request in that line.
    Ticket = "a request for space";
    /// What a parked caller of a completion learns. It is locked in the middle of a commit or of a
    /// step of a log.
    Parked = "a parked caller";
    /// The chunks that a scrub has yet to read.
    ScrubQueue = "the queue of a scrub";
    /// How far a scrub is.
    ScrubState = "the state of a scrub";
    /// How far the replacement of a device is.
    ReplaceState = "the state of a replacement";
    /// Memory of pieces that were copied.
    ReplaceMemory = "the memory of a replacement";
    /// What commits write of it.
    Replacement = "the replacement of a device";
    /// How far a balance is.
    BalanceState = "the state of a balance";
    /// Which of the operations runs that exclude each other.
    ExclusiveSlot = "the slot of exclusive operations";
    /// The threads of an engine.
    Threads = "the threads";
    /// Packers that nothing uses at the moment.
    Packers = "the packers";
    /// Extents that were unpacked lately.
    Unpacked = "the unpacked extents";
    /// The longest holds of trees.
    LongHolds = "the statistics of holds";
    /// An epoch ends. That is where its last clone is dropped, whatever is held there.
    EpochEnd = "the end of an epoch";
}
}

/// Down the table, holders may wait for less and less. Suppose that a lower row allowed more. A
/// thread could then wait for its lock, and so for what the holder waits for, while it has a higher
/// lock that forbids exactly that wait.
const _: () = {
    let mut row = 1;
    while row < HOLDERS_MAY.len() {
        assert!(HOLDERS_MAY[row - 1] as u8 >= HOLDERS_MAY[row] as u8);
        row += 1;
    }
};
