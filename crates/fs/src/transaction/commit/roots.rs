//! What a commit does in the root tree and the uuid tree. It writes where the roots of trees are,
//! and turns the notes of the transaction ([`crate::transaction::RootNotes`]) into items.
//!
//! A ROOT_ITEM that is written is compared with the one that is there. The uuid tree follows from
//! the difference, and so does the ORPHAN item that announces a tree to be dropped.

use super::{Committer, Frozen};
use crate::error::{Error, Place, Result};
use crate::transaction::{DeadTree, Link, Progress, find_root, parse_item};
use crate::tree::{Root, Tree, TreeOps};
use larder_format::csum::name_hash;
use larder_format::items::dir::{find_entry, remove_entry};
use larder_format::items::keys::{
    encode_uuid_item, orphan_key, parse_uuid_item, root_backref_key, root_ref_key, uuid_key,
};
use larder_format::items::{BalanceItem, DirEntryRef, FileType, RootItem};
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

impl Committer<'_> {
    /// Writes the ROOT_ITEM of a subvolume whose tree has changed.
    pub(super) fn write_subvolume_root(&mut self, frozen: &Frozen) -> Result<()> {
        let ground = self.ground;
        let Frozen { subvol, root, changed, growth } = frozen;
        let item = {
            let mut item = subvol.item.lock();
            point_to(&mut item, root, self.txn.generation);
            item.last_snapshot = U64::new(subvol.tree.last_snapshot().0);
            let growth = growth * i64::from(ground.nodesize());
            item.bytes_used = U64::new(item.bytes_used.get().saturating_add_signed(growth));
            if *changed {
                item.ctransid = U64::new(self.txn.generation.0);
                item.ctime = crate::api::to_timespec(ground.now());
            }
            self.txn.roots.lock().change(subvol.id, &mut item);
            *item
        };
        self.write_root_item(subvol.id, subvol.key_offset, &item)
    }

    /// Writes the ROOT_ITEMs of global trees whose roots moved. Returns true if any had moved.
    pub(super) fn write_global_roots(&mut self) -> Result<bool> {
        let ground = self.ground;
        let mut moved = false;
        for tree in ground.roots.with_items() {
            let root = tree.root();
            if root.ptr.generation != self.txn.generation {
                continue;
            }
            let version = ground.roots.root.version(ground.epochs.enter());
            let (key, mut item) = find_root(&version, tree.id())?.ok_or_else(|| {
                Error::corrupt(
                    Place::tree(ObjectId::ROOT_TREE),
                    format!("tree {} has no root item", tree.id()),
                )
            })?;
            drop(version);
            let before = (item.bytenr, item.level, item.generation, item.bytes_used);
            point_to(&mut item, &root, self.txn.generation);
            let growth = tree.take_growth() * i64::from(ground.nodesize());
            item.bytes_used = U64::new(item.bytes_used.get().saturating_add_signed(growth));
            if before == (item.bytenr, item.level, item.generation, item.bytes_used) {
                continue;
            }
            moved = true;
            let bytes = item.as_bytes().to_vec();
            self.ops(&ground.roots.root).update(&key, &bytes)?;
        }
        Ok(moved || !self.txn.new_groups.lock().is_empty())
    }

    /// Writes a subvolume's ROOT_ITEM, new or changed, and what follows from it.
    pub(super) fn write_root_item(
        &mut self,
        id: TreeId,
        key_offset: u64,
        item: &RootItem,
    ) -> Result<()> {
        let ground = self.ground;
        let key = Key::new(id, KeyType::ROOT_ITEM, key_offset);
        let old = self.ops(&ground.roots.root).get(&key)?;
        let before = old.as_deref().map(|data| parse_item(&key, data)).transpose()?;
        let mut ops = self.ops(&ground.roots.root);
        match &old {
            Some(_) => ops.update(&key, item.as_bytes())?,
            None => ops.insert(&key, item.as_bytes())?,
        }
        self.follow_uuids(id, before.as_ref(), Some(item))?;
        if item.refs.get() == 0 && before.is_none_or(|b| b.refs.get() > 0) {
            self.put(&ground.roots.root, &orphan_key(id), &[])?;
        }
        Ok(())
    }

    /// Does what operations have noted for the root tree.
    pub(super) fn apply_root_notes(&mut self) -> Result<()> {
        let txn = self.txn.clone();
        loop {
            let Some(subvol) = txn.roots.lock().first_change() else { break };
            let item = {
                let mut item = subvol.item.lock();
                txn.roots.lock().change(subvol.id, &mut item);
                *item
            };
            self.write_root_item(subvol.id, subvol.key_offset, &item)?;
        }
        let notes = std::mem::take(&mut *txn.roots.lock());
        for (child, link) in notes.links {
            self.write_link(child, link.as_ref())?;
        }
        for (tree, progress) in notes.drops {
            self.write_drop(tree, progress)?;
        }
        if let Some(id) = notes.default {
            self.write_default(id)?;
        }
        let (roots, key) = (&self.ground.roots.root, BalanceItem::key());
        match notes.balance {
            Some(Some(item)) => self.put(roots, &key, &item),
            Some(None) => self.take_away(roots, &key),
            None => Ok(()),
        }
    }

    pub(super) fn put(&mut self, tree: &Tree, key: &Key, data: &[u8]) -> Result<()> {
        let mut ops = self.ops(tree);
        if ops.get(key)?.is_some() { ops.update(key, data) } else { ops.insert(key, data) }
    }

    fn take_away(&mut self, tree: &Tree, key: &Key) -> Result<()> {
        let mut ops = self.ops(tree);
        if ops.get(key)?.is_some() { ops.delete(key) } else { Ok(()) }
    }

    /// Writes where a subvolume hangs, in both directions.
    fn write_link(&mut self, child: TreeId, link: Option<&Link>) -> Result<()> {
        let ground = self.ground;
        let roots = &ground.roots.root;
        let first = root_backref_key(child, ObjectId(0));
        while let Some((key, _)) = self.ops(roots).at_or_after(&first)? {
            if key.objectid != child || key.kind != KeyType::ROOT_BACKREF {
                break;
            }
            self.ops(roots).delete(&key)?;
            self.take_away(roots, &root_ref_key(ObjectId(key.offset), child))?;
        }
        if let Some(link) = link {
            let data = link.encode();
            self.put(roots, &root_ref_key(link.parent, child), &data)?;
            self.put(roots, &root_backref_key(child, link.parent), &data)?;
        }
        Ok(())
    }

    /// Records how far a tree has been dropped. Of a tree that is gone nothing is left.
    fn write_drop(&mut self, tree: DeadTree, progress: Progress) -> Result<()> {
        let ground = self.ground;
        let roots = &ground.roots.root;
        let found = self.ops(roots).at_or_before(&tree.last_key())?;
        let found = found.filter(|(key, _)| tree.is_at(key));
        match (progress, found) {
            (Progress::Done, found) => {
                if let Some((key, _)) = found {
                    self.ops(roots).delete(&key)?;
                }
                match tree {
                    DeadTree::Subvolume(id) => self.take_away(roots, &orphan_key(id)),
                    DeadTree::Relocation(_) => Ok(()),
                }
            }
            (Progress::At { key: next, level }, Some((key, data))) => {
                let mut item = parse_item(&key, &data)?;
                item.refs = 0.into();
                item.drop_progress = next.into();
                item.drop_level = level;
                self.ops(roots).update(&key, item.as_bytes())
            }
            (Progress::At { .. }, None) => Err(Error::corrupt(
                Place::tree(tree.id()),
                "the root item of a tree that is being dropped is gone",
            )),
        }
    }

    /// Records which subvolume is mounted where none is named.
    fn write_default(&mut self, id: TreeId) -> Result<()> {
        let ground = self.ground;
        let roots = &ground.roots.root;
        let found = self.ops(roots).at_or_before(&Key::new(id, KeyType::ROOT_ITEM, u64::MAX))?;
        let offset = match found {
            Some((key, _)) if key.objectid == id && key.kind == KeyType::ROOT_ITEM => key.offset,
            _ => {
                return Err(Error::corrupt(
                    Place::tree(id),
                    "the default subvolume has no root item",
                ));
            }
        };
        let name = b"default";
        let key = Key::new(ObjectId::ROOT_TREE_DIR, KeyType::DIR_ITEM, name_hash(name));
        let corrupt = |e: larder_format::FormatError| {
            Error::corrupt(Place::item(ObjectId::ROOT_TREE, key), e.0)
        };
        let mut data = self.ops(roots).get(&key)?.unwrap_or_default();
        let transid = match find_entry(&data, name).map_err(corrupt)? {
            Some(entry) => entry.transid,
            None => self.txn.generation,
        };
        remove_entry(&mut data, name).map_err(corrupt)?;
        let location = Key::new(id, KeyType::ROOT_ITEM, offset);
        DirEntryRef { location, transid, kind: FileType::Directory, name, data: &[] }
            .append_to(&mut data);
        self.put(roots, &key, &data)
    }

    /// Makes the uuid tree list a subvolume under the uuids that it has now.
    fn follow_uuids(
        &mut self,
        id: TreeId,
        before: Option<&RootItem>,
        now: Option<&RootItem>,
    ) -> Result<()> {
        let ground = self.ground;
        let Some(tree) = &ground.roots.uuid else { return Ok(()) };
        let of = |item: Option<&RootItem>, kind| {
            let item = item.filter(|i| i.refs.get() > 0)?;
            let uuid = if kind == KeyType::UUID_SUBVOL { item.uuid } else { item.received_uuid };
            (uuid != [0; 16]).then_some(uuid)
        };
        for kind in [KeyType::UUID_SUBVOL, KeyType::UUID_RECEIVED_SUBVOL] {
            let (old, new) = (of(before, kind), of(now, kind));
            if old == new {
                continue;
            }
            for (uuid, listed) in old.map(|u| (u, false)).into_iter().chain(new.map(|u| (u, true)))
            {
                let key = uuid_key(&uuid, kind);
                let mut ids = match self.ops(tree).get(&key)? {
                    Some(data) => parse_uuid_item(&data)
                        .map_err(|e| Error::corrupt(Place::item(ObjectId::UUID_TREE, key), e.0))?,
                    None => Vec::new(),
                };
                ids.retain(|i| *i != id);
                if listed {
                    ids.push(id);
                }
                if ids.is_empty() {
                    self.take_away(tree, &key)?;
                } else {
                    self.put(tree, &key, &encode_uuid_item(&ids))?;
                }
            }
        }
        Ok(())
    }
}

/// Makes a root item point to a root that this transaction wrote.
pub(super) fn point_to(item: &mut RootItem, root: &Root, generation: Generation) {
    item.bytenr = U64::new(root.ptr.at.0);
    item.level = root.ptr.level;
    item.set_generation(generation);
    // Callers only pass roots of this generation. A live root has one reference.
    debug_assert_eq!(root.ptr.generation, generation);
}
