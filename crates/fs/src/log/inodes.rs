//! What is known while the log of a subvolume is replayed, above all of its inodes.
//!
//! [`Replay`] is what the steps of replaying work on: the log, the subvolume's tree with the
//! changes so far, and each inode that any step has looked at. An inode is read once, changed here,
//! and written to the tree at the end. The steps are in the modules that follow: names, extents,
//! and their order.

use super::logged_data::{Claims, RefChange, Sums};
use super::overlay::Overlay;
use super::source::damaged;
use crate::api::to_timespec;
use crate::engine::{Core, Subvolume};
use crate::error::{Place, Result};
use crate::tree::Version;
use larder_format::items::keys::inode_key;
use larder_format::items::{FileType, InodeItem};
use larder_format::{FormatError, Generation, Key, KeyType, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// An inode that replaying has looked at.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) item: InodeItem,
    pub(super) changed: bool,
    /// Does the log have its attributes?
    pub(super) logged: bool,
}

/// The replay of a subvolume's log, while it is worked out.
pub(super) struct Replay<'a> {
    pub(super) core: &'a Core,
    pub(super) subvol: &'a Arc<Subvolume>,
    pub(super) log: &'a Version,
    pub(super) tree: Overlay,
    pub(super) generation: Generation,
    /// Inodes looked at so far; `None` where there is none.
    pub(super) inodes: BTreeMap<u64, Option<Known>>,
    /// Inodes whose log is passed over.
    pub(super) ignored: HashSet<u64>,
    /// Inodes whose names may have changed.
    pub(super) renamed: BTreeSet<u64>,
    pub(super) claims: &'a mut Claims,
    pub(super) refs: Vec<RefChange>,
    pub(super) sums: Sums,
    pub(super) incompat: u64,
}

/// All items of an inode of one kind.
pub(super) fn range(ino: ObjectId, kind: KeyType) -> (Key, Key) {
    (Key::new(ino, kind, 0), Key::new(ino, kind, u64::MAX))
}

impl Replay<'_> {
    /// An item of the log that cannot be replayed.
    pub(super) fn damaged(&self, key: Key, what: impl std::fmt::Display) -> crate::Error {
        damaged(Place::item(ObjectId::TREE_LOG, key), what)
    }
    /// An item of the subvolume that makes replaying impossible.
    pub(super) fn corrupt(&self, key: Key, e: FormatError) -> crate::Error {
        let tree: TreeId = self.subvol.id;
        crate::Error::corrupt(Place::item(tree, key), e.0)
    }

    /// The inode with this number, if there is one.
    pub(super) fn inode(&mut self, ino: ObjectId) -> Result<Option<&mut Known>> {
        if !self.inodes.contains_key(&ino.0) {
            let key = inode_key(ino);
            let known = match self.tree.get(&key)? {
                Some(data) => {
                    let item = *InodeItem::parse(&data).map_err(|e| self.corrupt(key, e))?;
                    Some(Known { item, changed: false, logged: false })
                }
                None => None,
            };
            self.inodes.insert(ino.0, known);
        }
        Ok(self.inodes.get_mut(&ino.0).and_then(Option::as_mut))
    }

    /// Changes an inode that exists.
    pub(super) fn change(
        &mut self,
        ino: ObjectId,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        let generation = self.generation;
        if let Some(known) = self.inode(ino)? {
            known.changed = true;
            change(&mut known.item);
            known.item.transid = generation.0.into();
        }
        Ok(())
    }

    /// A directory lost a name. Its times change, unless the log has them.
    pub(super) fn touch_directory(&mut self, ino: ObjectId) -> Result<()> {
        let now = to_timespec(self.core.now());
        if let Some(known) = self.inode(ino)?.filter(|k| !k.logged) {
            known.changed = true;
            known.item.ctime = now;
            known.item.mtime = now;
        }
        Ok(())
    }

    /// An inode lost a name, so it has changed now. If the directory is newer than the inode, the
    /// inode's own item was replayed before, and this overwrites the time that the log has for it.
    /// Linux does the same.
    pub(super) fn touch(&mut self, ino: ObjectId) -> Result<()> {
        let now = to_timespec(self.core.now());
        if let Some(known) = self.inode(ino)? {
            known.changed = true;
            known.item.ctime = now;
        }
        Ok(())
    }

    /// The type of an inode that exists.
    pub(super) fn kind(&mut self, ino: ObjectId) -> Result<Option<FileType>> {
        let Some(known) = self.inode(ino)? else { return Ok(None) };
        let kind = known.item.file_type();
        kind.map(Some).map_err(|e| self.corrupt(inode_key(ino), e))
    }
}
