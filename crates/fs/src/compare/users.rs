//! Which files use an extent.
//!
//! The references of an extent name its users: an inode and a place in it, or a leaf, whose items
//! say the same. The subvolume that a reference names is not always the one that is wanted, because
//! snapshots share leaves. But an inode has the same number in a snapshot as in its source. So a
//! user is only a hint, and the caller looks in the tree that it cares for whether the hint holds.
//!
//! Work is bounded: of the references only the first are looked at, however many there are. The
//! answer depends on the image alone. It is that of the last commit.

use super::frozen::Frozen;
use crate::error::{Error, Place, Result};
use crate::tree::{Node, Version};
use larder_format::items::{ExtentItem, ExtentRef, FileExtent, parse_keyed_refs};
use larder_format::{FormatError, Key, KeyType, Logical, ObjectId};
use std::sync::Arc;

/// A file that may use an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentUser {
    /// The inode, in some subvolume.
    pub ino: ObjectId,
    /// Where in the file the first byte of the extent would lie. Wraps below zero.
    pub base: u64,
}

impl Frozen {
    /// Files that may use the data extent at `at`, sorted, found in at most `limit` references.
    /// None if the extent has one reference only.
    ///
    /// # Errors
    /// Reading, corruption.
    pub fn extent_users(&self, at: Logical, len: u64, limit: usize) -> Result<Vec<ExtentUser>> {
        let extents = self.extent_tree();
        let key = Key::new(at, KeyType::EXTENT_ITEM, len);
        let Some(item) = extents.get(&key)? else { return Ok(Vec::new()) };
        let record = ExtentItem::parse(key.kind, item.data()).map_err(bad(key))?;
        if record.refs < 2 {
            return Ok(Vec::new());
        }
        let mut refs: Vec<ExtentRef> = record.inline.iter().map(|(r, _)| *r).collect();
        let behind = Key::new(at, KeyType::EXTENT_DATA_REF, 0);
        let last = Key::new(at, KeyType::SHARED_DATA_REF, u64::MAX);
        extents.scan(&behind, &last, |item| {
            if matches!(item.key.kind, KeyType::EXTENT_DATA_REF | KeyType::SHARED_DATA_REF) {
                let found = parse_keyed_refs(&item.key, item.data()).map_err(bad(item.key))?;
                refs.extend(found.iter().map(|(r, _)| *r));
            }
            Ok(refs.len() < limit)
        })?;
        refs.truncate(limit);
        let mut users = Vec::new();
        for found in refs {
            self.users_by(&found, at, limit, &mut users)?;
        }
        users.sort_unstable();
        users.dedup();
        users.truncate(limit);
        Ok(users)
    }

    fn extent_tree(&self) -> Version {
        let epoch = self.core.epochs.enter();
        let root = self.core.txns.with_view(|view| view.extent_root.clone());
        Version { tree: ObjectId::EXTENT_TREE, root, store: self.core.store.clone(), epoch }
    }

    fn users_by(
        &self,
        found: &ExtentRef,
        at: Logical,
        limit: usize,
        users: &mut Vec<ExtentUser>,
    ) -> Result<()> {
        match *found {
            ExtentRef::Data { objectid, offset, .. } => {
                users.push(ExtentUser { ino: objectid, base: offset.0 });
            }
            // The leaf may have been freed since the commit. Then there is nothing to learn.
            ExtentRef::SharedData { parent } => {
                if let Ok(leaf) = self.core.store.at_address(parent, None) {
                    users_in(&leaf, at, limit, users);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The users of an extent in a leaf.
pub(crate) fn users_in(leaf: &Arc<Node>, at: Logical, limit: usize, users: &mut Vec<ExtentUser>) {
    if leaf.level() > 0 {
        return;
    }
    let view = leaf.view();
    for slot in 0..view.nritems() {
        let Some(key) = view.key(slot).filter(|k| k.kind == KeyType::EXTENT_DATA) else {
            continue;
        };
        if let Some(Ok(FileExtent::Stored(r))) = view.data(slot).map(FileExtent::parse)
            && r.disk_bytenr == at
            && users.len() < 4 * limit
        {
            users.push(ExtentUser { ino: key.objectid, base: key.offset.wrapping_sub(r.offset) });
        }
    }
}

fn bad(key: Key) -> impl Fn(FormatError) -> Error {
    move |e| Error::corrupt(Place::item(ObjectId::EXTENT_TREE, key), e.0)
}
