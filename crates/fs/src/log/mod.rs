//! The log: what was fsynced after the last commit.
//!
//! A log hangs on the superblock: a tree whose items lead to one tree for each subvolume that has
//! something logged. Its nodes, and the data that only it refers to, are in no extent tree and in
//! no block group's `used`. Their generation is that of the transaction to which the log belongs,
//! one above the superblock's.
//!
//! [`mod@replay`] brings a log into the trees when a file system is opened:
//!
//! | module | decision it hides |
//! |---|---|
//! | `source` | where a log's nodes are, and how it is read |
//! | `overlay` | how changes of a subvolume are kept until all of them are known |
//! | `references` | which names an item has that refers from an inode to its directories |
//! | `logged_data` | which space, references and checksums logged data asks for |
//! | `inodes` | what the steps work on, and what is known of each inode |
//! | `names` | how logged names, references and ranges of deletion become entries |
//! | `extents` | how logged extents and checksums become those of files |
//! | `subvolume` | the order of the steps, and what an inode becomes |
//!
//! Everything is worked out in memory first, over a version of each subvolume's tree. Nothing is
//! changed before all of it is known to be sound, so a damaged log leaves the image as it was. Then
//! it is written as one transaction, which also drops the log. After a crash before that
//! transaction's superblock, the old superblock still has the log, and it is replayed again. A
//! read-only file system keeps the transaction running and writes nothing.
//!
//! [`mod@write`] says how logs are written.

mod extents;
mod fsync;
mod inodes;
mod logged_data;
mod names;
mod overlay;
mod references;
mod replay;
mod source;
mod subvolume;
mod write;

pub(crate) use fsync::fsync;
pub(crate) use replay::replay;
pub(crate) use write::TxnLog;
#[cfg(test)]
pub(crate) use write::lead_after_giving_up;
