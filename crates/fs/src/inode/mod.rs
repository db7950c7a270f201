//! Operations on inodes and on the names that lead to them.
//!
//! | module | decision it hides |
//! |---|---|
//! | `access` | how an operation gets at an inode |
//! | `attr`, `xattr` | which attributes can be set on an inode |
//! | `names` | how names lie in items |
//! | `dir` | how directories are searched and listed |
//! | `create`, `link`, `rename` | what making, linking, removing and renaming change |
//! | `orphan` | how inodes are deleted that have no name left |
//! | `subvolume`, `subvolume_moves` | entries of subvolumes: making and deleting; moving |
//!
//! An inode in memory and its locks belong to the engine ([`Inode`]).

mod access;
pub(crate) mod attr;
pub(crate) mod create;
pub(crate) mod dir;
pub(crate) mod link;
mod names;
pub(crate) mod orphan;
pub(crate) mod rename;
pub(crate) mod subvolume;
mod subvolume_moves;
#[cfg(test)]
mod tests;
pub(crate) mod xattr;

pub(crate) use subvolume::path_within;

use crate::engine::{Inode, PLACEHOLDER, draft, lock_all, to_file_type, to_kind};
