//! Subvolumes as a whole.
//!
//! | module | decision it hides |
//! |---|---|
//! | `snapshot` | how snapshots are made at the seal |
//! | `drop` | how the trees of deleted subvolumes are dropped, in the background |
//! | `settings` | what a subvolume can tell about itself, and what can be set |
//! | `find_new` | which extents of it are newer than a transaction |
//!
//! A subvolume in memory, and where it hangs, belong to the engine. Its entries in directories are
//! made in [`crate::inode`].

pub(crate) mod drop;
pub(crate) mod find_new;
pub(crate) mod settings;
pub(crate) mod snapshot;

pub use settings::SubvolInfo;
