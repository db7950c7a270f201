//! Operations on inodes and on the names that lead to them.
//!
//! | module | decision it hides |
//! |---|---|
//! | `names` | how names lie in items |
//! | `allowed` | what flags forbid |
//! | `xattr`, `attr` | which attributes can be set on an inode |
//! | `dir` | how directories are searched and listed |
//! | `orphan` | how inodes are deleted that have no name left |
//! | `access` | how an operation gets at an inode |
//! | `survey` | attributes of many inodes, without keeping them in memory |
//! | `create` | what a new inode needs |
//! | `subvolume` | entries of subvolumes: making, snapshotting and deleting |
//! | `link` | giving an inode one more name, and taking names away |
//! | `moves`, `subvolume_moves`, `rename` | moving and exchanging names; those of subvolumes |
//!
//! A module uses only what stands above it here.
//! An inode in memory and its locks belong to the engine ([`Inode`]).

mod access;
mod allowed;
pub(crate) mod attr;
pub(crate) mod create;
pub(crate) mod dir;
pub(crate) mod link;
mod moves;
mod names;
pub(crate) mod orphan;
pub(crate) mod rename;
pub(crate) mod subvolume;
mod subvolume_moves;
pub(crate) mod survey;
#[cfg(test)]
mod tests;
pub(crate) mod xattr;

pub(crate) use subvolume::path_within;

use crate::engine::{Inode, PLACEHOLDER, draft, lock_all, to_file_type, to_kind};
