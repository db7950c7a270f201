//! Subvolumes as a whole.
//!
//! | module | decision it hides |
//! |---|---|
//! | `snapshot` | how snapshots are made at the seal |
//! | `drop` | how the trees of deleted subvolumes go, in the background |
//! | `settings` | what can be asked of a subvolume and set on it |
//! | `find_new` | which extents of it are newer than a transaction |
//!
//! A subvolume in memory, and where it hangs, are the engine's; its entries in directories are made
//! in [`crate::inode`].

pub(crate) mod drop;
pub(crate) mod find_new;
pub(crate) mod settings;
pub(crate) mod snapshot;

pub use settings::SubvolInfo;
