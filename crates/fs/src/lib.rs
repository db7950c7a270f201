//! The engine: a btrfs file system on a [`larder_volume::Device`], as a library.
//!
//! [`Filesystem`] is the one door. It is synchronous, `Send + Sync`, and knows inodes, not paths
//! and not FUSE. Everything behind it is private to the crate's modules.

#[macro_use]
mod tuning;

mod ahead;
mod alloc;
pub mod api;
mod budget;
mod core;
mod discard;
pub mod error;
mod file;
pub mod filesystem;
mod fronts;
mod hash;
mod inode;
mod lifecycle;
mod lock;
mod log;
pub mod mkfs;
mod open;
mod reclaim;
mod root;
pub mod space;
mod subvolumes;
mod transaction;
pub mod tree;
mod trim;
mod usage;
#[doc(hidden)]
pub mod watch;

pub use api::*;
pub use error::{Error, Result};
pub use lifecycle::{Filesystem, MemoryStats, MemoryUse, ReclaimStats, Stats};
pub use log::{LogStats, OnSynced, Synced, Unlogged};
pub use root::{Received, SubvolInfo};
pub use trim::{TrimRange, Trimmed};
#[cfg(feature = "faults")]
pub use tuning::faults::Fault;
pub use tuning::older;
pub use usage::{KindUsage, SpaceUsage};
