//! What Linux has left of a relocation that it did not finish.
//!
//! Linux copies the blocks of each tree into a *relocation tree*, and data into files of the data
//! relocation tree, before the trees themselves get the copies. After a crash both are still there.
//! A relocation tree is a snapshot as far as references go, so it is dropped as a deleted subvolume
//! is ([`crate::subvolume::drop`]). The files have no names and are announced as orphans, so they
//! are deleted as any other orphan. What the subvolumes have got already stays with them.
//!
//! The balance itself is not ended by that: its item stays in the root tree.

use crate::engine::{Core, Subvolume};
use crate::error::Result;
use crate::inode::orphan;
use crate::transaction::{find_root, root_pointer};
use crate::tree::{Tree, Version};
use larder_format::items::keys::orphan_key;
use larder_format::{Generation, Key, KeyType, ObjectId};
use std::sync::Arc;

/// Deletes the files of the data relocation tree. Afterwards that tree is no longer open, because a
/// relocation moves its blocks like those of any tree that is not.
///
/// # Errors
/// Reading or corruption; no space; the device.
pub(crate) fn clean(core: &Core) -> Result<()> {
    let id = ObjectId::DATA_RELOC_TREE;
    let roots = core.roots.root.version(core.epochs.enter());
    let Some((key, item)) = find_root(&roots, id)? else { return Ok(()) };
    let files = Version { tree: id, ..roots.at_root(root_pointer(&item)) };
    let first = files.at_or_after(&orphan_key(ObjectId(0)))?;
    let is_orphan = |key: Key| key.objectid == ObjectId::ORPHAN && key.kind == KeyType::ORPHAN_ITEM;
    if !first.is_some_and(|item| is_orphan(item.key)) {
        return Ok(());
    }
    drop((files, roots));
    let last_snapshot = Generation(item.last_snapshot.get()).min(core.published_hint());
    let (store, stats) = (core.store.clone(), core.tree_stats.clone());
    let tree = Tree::new(id, store, root_pointer(&item), last_snapshot, stats);
    let files = Arc::new(Subvolume::new(id, key.offset, tree, item));
    orphan::clean(core, &files)?;
    core.commit_now()
}
