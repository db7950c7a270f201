//! Trees: sorted items in copy-on-write blocks.
//!
//! From the bottom: `image` edits the bytes of one node, `node` is a node in memory, `store` reads
//! and caches clean nodes, `version` is a tree that never changes and its cursors, `tree` is a tree
//! that does, `edit` changes its items. `holds` measures how long edits lock a tree. A tree sees
//! space only through `BlockSource`.

mod edit;
mod holds;
pub(crate) mod image;
mod node;
pub mod ops;
mod roots;
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
pub use ops::TreeOps;
pub(crate) use roots::Roots;
pub use store::{BlockReader, NodeStore, Pointer, StoreStats};
pub(crate) use tree::{BlockSource, EditStop, Need};
pub use tree::{Tree, TreeStats};
pub use version::{Cursor, Epoch, Item, Version};
pub(crate) use version::{Epochs, Root, child_pointer, child_slot};
