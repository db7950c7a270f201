//! The log: what was fsynced after the last commit.
//!
//! A log hangs on the superblock: a tree whose items lead to one tree for each subvolume that has
//! something logged. Its nodes, and the data that only it refers to, are in no extent tree and in
//! no block group's `used`; their generation is that of the transaction which the log belongs to,
//! one above the superblock's.
//!
//! [`replay`] brings a log into the trees when a file system is opened:
//!
//! | module | decision it hides |
//! |---|---|
//! | `source` | where a log's nodes are, and how it is read |
//! | `overlay` | how changes of a subvolume are kept until all of them are known |
//! | `names` | how logged names, references and ranges of deletion become entries |
//! | `extents` | how logged extents and checksums become those of files |
//! | `subvolume` | the order of the steps, and what an inode becomes |
//!
//! Everything is worked out in memory first, over a version of each subvolume's tree, and nothing
//! is changed before all of it is known to be sound: a damaged log leaves the image as it was. Then
//! it is written as one transaction, which also drops the log; a crash before its superblock finds
//! the old superblock with the log on it, and replays again. A read-only file system keeps that
//! transaction running and writes nothing.
//!
//! How logs are written is told in [`write`].

mod extents;
mod fsync;
mod names;
mod overlay;
mod replay;
mod source;
mod subvolume;
mod write;

pub(crate) use fsync::{fsync, fsync_then};
pub(crate) use replay::replay;
pub(crate) use write::TxnLog;
#[cfg(test)]
pub(crate) use write::lead_after_giving_up;
pub use write::{OnSynced, Synced, Unlogged};
use write::{sync, sync_then};
