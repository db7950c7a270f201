//! Reading what is left of an image: the trees without the engine, and out of them the files.
//!
//! The engine refuses what it cannot trust; this crate asks how much can still be believed. It
//! reads only, knows nothing of transactions, and never gives up at the first bad block. What it
//! hides, from the ground up:
//!
//! | module | decision |
//! |---|---|
//! | `observer` | how progress, notes and losses reach those who asked |
//! | `supers` | which superblock to start from |
//! | `scan` | finding nodes by their looks when nothing leads to them |
//! | `chunks` | where addresses lie, when the chunk tree does not say |
//! | [`reader`] | one node: every copy, then what the scan found; when a node is good enough |
//! | [`tree`] | all items of a key range, with what was found put where nodes are missing |
//! | `salvage` | which found leaves belong to a tree, and which are stale |
//! | [`points`] | the moments that can be restored, and the trees at each |
//! | `data` | bytes of extents, verified sector by sector, from whichever copy is right |
//! | `names` | paths from references in both directions |
//! | `dest` | writing names that an enemy may have chosen |
//! | `restore` | the order of it all |
//!
//! Metadata dumps can be read, too; of them nothing can be restored.
//!
//! Everything read is hostile: work is bounded by the size of the image, recursion by the height of
//! a tree, memory by the number of inodes and of nodes found (about 100 bytes each), never by what
//! a field says.

mod chunks;
mod data;
mod dest;
mod names;
mod observer;
pub mod points;
pub mod reader;
mod restore;
mod salvage;
mod scan;
mod supers;
pub mod tree;

pub use observer::{Entry, Loss, Observer, Quiet, Step};
pub use points::{Point, PointSource, Subvolume, Trees};
pub use reader::{NodeError, Options, Reader};
pub use restore::{Report, Request, Target, When, restore};
pub use tree::{RootPointer, Tree};

/// Why nothing can be restored at all.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no superblock to start from, or not the one asked for.
    #[error("{0}")]
    NoSuperblock(String),
    /// The device or its superblock is such that reading cannot even begin.
    #[error(transparent)]
    Volume(#[from] larder_volume::VolumeError),
    /// It is a metadata dump: there is no data that could be restored.
    #[error("this is a metadata dump without its data: there is nothing to restore")]
    MetadataDump,
    /// What was asked for is not there.
    #[error("{0}")]
    NotFound(String),
    /// The destination cannot be used, or stopped working.
    #[error("{path}: {source}")]
    Destination {
        /// Where.
        path: String,
        /// What the host said.
        #[source]
        source: std::io::Error,
    },
    /// The observer wanted it to end.
    #[error("stopped")]
    Stopped,
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
