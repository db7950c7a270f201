//! Block groups from their items, and their free space from what records it.
//!
//! The free-space tree is used where it is valid and agrees with the block group item. A group
//! where it does not agree, and every group of a file system without a free-space tree, is read
//! from the extent tree: both are derived from that.

use super::BlockGroup;
use crate::error::{Error, Place, Result};
use crate::space::free_index::FreeIndex;
use crate::space::{Run, extent_tree::extent_of, free_space_tree};
use crate::tree::TreeOps;
use larder_format::items::BlockGroupItem;
use larder_format::{Generation, Key, KeyType, Logical, ObjectId};
use larder_volume::MappedChunk;

/// Where the free space of the groups is recorded.
pub(crate) enum FreeSource<'a> {
    /// In a valid free-space tree.
    Tree(&'a mut dyn TreeOps),
    /// Nowhere (no free-space tree, a v1 cache, an invalid tree): the extent tree has to be read.
    Extents,
}

impl std::fmt::Debug for FreeSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tree(_) => "Tree",
            Self::Extents => "Extents",
        })
    }
}

/// A group that was read.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The group.
    pub(crate) group: BlockGroup,
    /// The free-space tree's record of it is wrong. It has to be rebuilt before it is edited, with
    /// [`scan_used`] and [`free_space_tree::new_group`].
    pub(crate) rebuild_free_space: bool,
}

/// Reads the block group of one chunk. `items` is the tree that has the block group items
/// (block-group tree or extent tree).
///
/// # Errors
/// `Corrupt` when the item is missing or does not fit the chunk, or when its `used` is not what the
/// extent tree holds.
pub(crate) fn load(
    chunk: &MappedChunk,
    items: &mut dyn TreeOps,
    items_tree: ObjectId,
    free: &mut FreeSource<'_>,
    extents: &mut dyn TreeOps,
    nodesize: u32,
) -> Result<Loaded> {
    let run = Run::new(chunk.start, chunk.length);
    let item = item_of(chunk, items, items_tree)?;
    let used = item.used.get();
    let recorded = match free {
        FreeSource::Tree(tree) => recorded_free(&mut **tree, run, used)?,
        FreeSource::Extents => None,
    };
    let rebuild_free_space = recorded.is_none() && matches!(free, FreeSource::Tree(_));
    let index = match recorded {
        Some(index) => index,
        None => {
            let index = unused(extents, nodesize, run)?;
            if index.total() != run.len - used {
                let held = run.len - index.total();
                let what = format!("used {used}, but the extent tree holds {held} bytes");
                return Err(Error::corrupt(Place::item(items_tree, item_key(run)), what));
            }
            index
        }
    };
    let excluded = chunk.superblock_ranges();
    // A group that is read was there before this mount, so it belongs to every transaction.
    let group = BlockGroup::new(run, item.kind(), Generation(0), used, index, &excluded);
    Ok(Loaded { group, rebuild_free_space })
}

fn item_key(group: Run) -> Key {
    Key::new(group.start, KeyType::BLOCK_GROUP_ITEM, group.len)
}

/// The block group item of a chunk.
fn item_of(
    chunk: &MappedChunk,
    items: &mut dyn TreeOps,
    items_tree: ObjectId,
) -> Result<BlockGroupItem> {
    let key = item_key(Run::new(chunk.start, chunk.length));
    let corrupt = |what: String| Error::corrupt(Place::item(items_tree, key), what);
    let data = items.get(&key)?.ok_or_else(|| corrupt("the chunk has no block group".into()))?;
    let item = *BlockGroupItem::parse(chunk.length, &data).map_err(|e| corrupt(e.0))?;
    let kind = item.kind();
    if kind.bits() != chunk.kind {
        return Err(corrupt(format!("type {kind:#x}, but its chunk has {:#x}", chunk.kind)));
    }
    Ok(item)
}

/// The free space of a group as the free-space tree records it, if that can be right.
fn recorded_free(tree: &mut dyn TreeOps, group: Run, used: u64) -> Result<Option<FreeIndex>> {
    let mut runs = FreeIndex::new();
    let loaded = free_space_tree::load(tree, group, &mut |r| {
        runs.insert(r);
        Ok(())
    });
    match loaded {
        Ok(()) if runs.total() == group.len - used => return Ok(Some(runs)),
        Ok(()) => {
            let (group, free) = (group.start, runs.total());
            tracing::warn!(%group, used, free, "free-space tree is wrong");
        }
        Err(e @ Error::Corrupt { .. }) => {
            tracing::warn!(group = %group.start, error = %e, "free-space tree is damaged");
        }
        Err(e) => return Err(e),
    }
    Ok(None)
}

/// What no extent takes of a group.
fn unused(extents: &mut dyn TreeOps, nodesize: u32, group: Run) -> Result<FreeIndex> {
    let mut index = FreeIndex::new();
    index.insert(group);
    for used in scan_used(extents, nodesize, group)? {
        index.remove_range(used);
    }
    Ok(index)
}

/// What extents of the extent tree take of a group: maximal runs, ascending.
///
/// # Errors
/// `Corrupt` when extents overlap or leave the group.
pub(crate) fn scan_used(extents: &mut dyn TreeOps, nodesize: u32, group: Run) -> Result<Vec<Run>> {
    let mut out: Vec<Run> = Vec::new();
    let mut from = Key::new(group.start, KeyType(0), 0);
    while let Some((key, _)) = extents.at_or_after(&from)? {
        if key.objectid.0 >= group.end().0 {
            break;
        }
        if let Some((start, len)) = extent_of(&key, nodesize) {
            let end =
                start.0.checked_add(len).map(Logical).filter(|e| len > 0 && *e <= group.end());
            let clear = out.last().is_none_or(|last| last.end() <= start);
            let Some(end) = end.filter(|_| clear) else {
                let what = "extent overlaps another or leaves its block group";
                return Err(Error::corrupt(Place::item(ObjectId::EXTENT_TREE, key), what));
            };
            match out.last_mut() {
                Some(last) if last.end() == start => last.len = end.0 - last.start.0,
                _ => out.push(Run::new(start, len)),
            }
        }
        let Some(next) = key.successor() else { break };
        from = next;
    }
    Ok(out)
}
