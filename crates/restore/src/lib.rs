//! Reading what is left of an image: the trees without the engine, and out of them the files.
//!
//! The engine refuses what it cannot trust; this crate asks how much can still be believed. It
//! reads only, knows nothing of transactions, and never gives up at the first bad block. A module
//! uses only those above it:
//!
//! | module | decision it hides |
//! |---|---|
//! | `error` | why nothing can be restored, or no more |
//! | `observer` | how progress, notes and losses reach the caller |
//! | `supers` | which superblock to start from |
//! | `members` | which of the devices are used |
//! | `scan` | finding nodes by their looks when nothing leads to them |
//! | `reader` | one node: every copy, then what the scan found; when a node is good enough |
//! | `tree` | all items of a key range, with what was found put where nodes are missing |
//! | `chunks` | where addresses lie, when the chunk tree does not say |
//! | `salvage` | which found leaves belong to a tree, and which are stale |
//! | `roots` | which found nodes are the newest roots of trees |
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
mod error;
mod members;
mod names;
mod observer;
pub mod points;
mod reader;
mod restore;
mod roots;
mod salvage;
mod scan;
mod supers;
mod tree;

pub use error::{Error, Result};
pub use observer::{Entry, Loss, Observer, Quiet, Step};
pub use points::{Point, PointSource, Subvolume, Trees, When};
pub use reader::{NodeError, Options, Reader};
pub use restore::{Report, Request, Target, restore};
pub use tree::{Gap, Item, RootPointer, Tree};
