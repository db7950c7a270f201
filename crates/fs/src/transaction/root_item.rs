//! ROOT_ITEMs: finding and reading them.

use crate::error::{Error, Place, Result};
use crate::tree::{Item, Pointer, Version};
use larder_format::items::RootItem;
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, TreeId};

/// Parses the ROOT_ITEM that `item` holds.
pub(crate) fn parse_root_item(item: &Item) -> Result<RootItem> {
    parse_item(&item.key, item.data())
}

/// Parses a ROOT_ITEM.
pub(crate) fn parse_item(key: &Key, data: &[u8]) -> Result<RootItem> {
    RootItem::parse(data)
        .map_err(|e| Error::corrupt(Place::item(ObjectId::ROOT_TREE, *key), e.to_string()))
}

/// Where a ROOT_ITEM says that its tree's root is.
pub(crate) fn root_pointer(item: &RootItem) -> Pointer {
    Pointer {
        at: Logical(item.bytenr.get()),
        generation: Generation(item.generation.get()),
        level: item.level,
        first_key: None,
    }
}

/// Finds the ROOT_ITEM of a tree.
pub(crate) fn find_root(roots: &Version, id: TreeId) -> Result<Option<(Key, RootItem)>> {
    let Some(item) = roots.at_or_before(&Key::new(id, KeyType::ROOT_ITEM, u64::MAX))? else {
        return Ok(None);
    };
    if item.key.objectid != id || item.key.kind != KeyType::ROOT_ITEM {
        return Ok(None);
    }
    Ok(Some((item.key, parse_root_item(&item)?)))
}
