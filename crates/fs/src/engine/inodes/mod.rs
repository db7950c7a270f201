//! Inodes and subvolumes in memory.
//!
//! | module | decision it hides |
//! |---|---|
//! | `inode` | what is in memory of an inode, and its locks |
//! | `table` | which inodes of a subvolume are in memory, and which must stay |
//! | `subvolume` | how subvolumes are found and loaded |
//!
//! The three are one: an inode refers to its subvolume, a subvolume has the table of its inodes,
//! and the table keeps inodes.

mod inode;
mod subvolume;
mod table;

pub(crate) use inode::{Inode, LockedExtents, PLACEHOLDER, lock_all, to_file_type, to_kind};
pub(crate) use subvolume::{Subvolume, WholeReader};
