//! The engine: a btrfs file system on a [`larder_volume::Device`], as a library.
//!
//! [`Filesystem`] is the one door. It is synchronous, `Send + Sync`, and knows inodes, not paths
//! and not FUSE. Everything behind it is private to the crate's modules.

#[macro_use]
mod base;
mod engine;
mod file;
pub mod filesystem;
mod inode;
mod log;
pub mod mkfs;
pub mod space;
mod subvolume;
mod transaction;
pub mod tree;

#[doc(hidden)]
pub use base::watch;
pub use base::{api, error};
use base::{budget, hash, lock, tuning};

pub use api::*;
#[cfg(feature = "faults")]
pub use base::tuning::faults::Fault;
pub use base::tuning::older;
pub use engine::fsyncs::LogStats;
pub use error::{Error, Result};
pub use filesystem::{Filesystem, MemoryStats, MemoryUse, ReclaimStats, Stats};
pub use log::{OnSynced, Synced, Unlogged};
pub use space::{KindUsage, SpaceUsage, TrimRange, Trimmed};
pub use subvolume::SubvolInfo;
pub use transaction::Received;
pub use tree::{Hold, LongHolds};
