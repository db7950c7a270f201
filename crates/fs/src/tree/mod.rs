//! Trees: sorted items in copy-on-write blocks.
//!
//! From the bottom: `image` edits the bytes of one node, `node` is a node in memory, `store` reads
//! and caches clean nodes, `version` is a tree that never changes and its cursors. `source` is what
//! an edit asks of space, `edit` changes items, and `balance` decides how leaves are divided.
//! `tree` is a tree that changes, `roots` the trees of which a file system has one each. `holds`
//! measures how long edits lock a tree.

mod balance;
mod edit;
mod holds;
pub(crate) mod image;
mod node;
pub(crate) mod ops;
mod relocated;
mod roots;
mod source;
mod store;
#[cfg(test)]
mod tests;
#[allow(clippy::module_inception)]
mod tree;
mod version;

pub(crate) use edit::Editor;
pub(crate) use holds::doing;
pub use holds::{Hold, LongHolds};
pub(crate) use image::{NodeFormat, header_mut};
pub(crate) use node::{IMAGE_COPIES, Node};
pub(crate) use ops::TreeOps;
pub(crate) use relocated::{Places, relocated};
pub(crate) use roots::Roots;
pub(crate) use source::{BlockSource, EditStop, Need};
pub(crate) use store::{BlockReader, NodeStore, Pointer};
pub(crate) use tree::{OnPath, Tree, TreeStats};
pub(crate) use version::{Cursor, Epoch, Item, Version};
pub(crate) use version::{Epochs, Root, child_pointer, child_slot};
