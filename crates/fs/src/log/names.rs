//! How logged names, references and ranges of deletion become entries.
//!
//! A directory that was fsynced has its new entries in the log, and ranges of indices in which the
//! log has *all* of its entries: what else the subvolume has there was removed. A file has its
//! references in the log, and an entry follows from each. If something else has the name or the
//! index, that is an older state of the directory, and it is removed.
//!
//! Entries of subvolumes are never touched: an operation that changes one commits.

use super::inodes::{Replay, range};
use super::references::{Reference, references};
use crate::error::{Error, Place, Result};
use larder_format::items::dir::{find_entry, is_plain_name, remove_entry, single_entry};
use larder_format::items::inode_ref::{find_extref, find_ref, remove_extref, remove_ref};
use larder_format::items::keys::{
    dir_index_key, dir_item_key, inode_extref_key, inode_key, inode_ref_key,
};
use larder_format::items::{DirEntryRef, DirLogIndex, ExtRef, FileType, InodeRef};
use larder_format::{Key, KeyType, ObjectId};

fn name_bytes(name: &[u8]) -> i64 {
    i64::try_from(2 * name.len()).expect("names are short")
}

impl Replay<'_> {
    /// What a name leads to.
    fn target(&self, dir: ObjectId, name: &[u8]) -> Result<Option<Key>> {
        let key = dir_item_key(dir, name);
        let Some(item) = self.tree.get(&key)? else { return Ok(None) };
        let entry = find_entry(&item, name).map_err(|e| self.corrupt(key, e))?;
        Ok(entry.map(|e| e.location))
    }

    /// The name at an index of a directory, and what it leads to.
    fn at_index(&self, dir: ObjectId, index: u64) -> Result<Option<(Vec<u8>, Key)>> {
        let key = dir_index_key(dir, index);
        let Some(item) = self.tree.get(&key)? else { return Ok(None) };
        let entry = single_entry(&item).map_err(|e| self.corrupt(key, e))?;
        Ok(Some((entry.name.to_vec(), entry.location)))
    }

    /// The index of a name, from the reference of the inode to which it leads.
    fn index_of(&self, dir: ObjectId, name: &[u8], target: Key) -> Result<u64> {
        let key = inode_ref_key(target.objectid, dir);
        if let Some(item) = self.tree.get(&key)?
            && let Some(r) = find_ref(&item, name).map_err(|e| self.corrupt(key, e))?
        {
            return Ok(r.index);
        }
        let key = inode_extref_key(target.objectid, dir, name);
        if let Some(item) = self.tree.get(&key)?
            && let Some(r) = find_extref(&item, dir, name).map_err(|e| self.corrupt(key, e))?
        {
            return Ok(r.index);
        }
        // The reference may have been replaced already. Then the directory itself has the index.
        let (mut from, to) = range(dir, KeyType::DIR_INDEX);
        while let Some((key, data)) = self.tree.first(from, to)? {
            if single_entry(&data).map_err(|e| self.corrupt(key, e))?.name == name {
                return Ok(key.offset);
            }
            let Some(next) = key.successor() else { break };
            from = next;
        }
        let place = Place::item(self.subvol.id, dir_item_key(dir, name));
        Err(Error::corrupt(place, "directory entry has no index item"))
    }

    /// Adds an entry, if nothing is in its way.
    fn add_entry(&mut self, dir: ObjectId, name: &[u8], index: u64, ino: ObjectId) -> Result<()> {
        let Some(kind) = self.kind(ino)? else { return Ok(()) };
        let entry = DirEntryRef::inode(ino, self.generation, kind, name);
        let key = dir_item_key(dir, name);
        let mut item = self.tree.get(&key)?.unwrap_or_default();
        if item.len() + entry.encoded_len()
            > larder_format::node::max_item_size(self.core.nodesize())
        {
            return Err(Error::Overflow);
        }
        entry.append_to(&mut item);
        self.tree.set(key, item);
        self.tree.set(dir_index_key(dir, index), entry.encode());
        self.change(dir, |d| {
            d.size = d.size.get().saturating_add_signed(name_bytes(name)).into();
        })?;
        self.renamed.insert(ino.0);
        Ok(())
    }

    /// Removes an entry, but not the reference that belongs to it.
    fn remove_entry(&mut self, dir: ObjectId, name: &[u8], index: u64) -> Result<()> {
        let key = dir_item_key(dir, name);
        if let Some(mut item) = self.tree.get(&key)? {
            remove_entry(&mut item, name).map_err(|e| self.corrupt(key, e))?;
            self.tree.set_list(key, item);
        }
        self.tree.remove(dir_index_key(dir, index));
        self.change(dir, |d| {
            d.size = d.size.get().saturating_add_signed(-name_bytes(name)).into();
        })
    }

    /// Removes the reference for a name, in whichever item it is.
    fn remove_reference(&mut self, ino: ObjectId, dir: ObjectId, name: &[u8]) -> Result<()> {
        let key = inode_ref_key(ino, dir);
        if let Some(mut item) = self.tree.get(&key)?
            && remove_ref(&mut item, name).map_err(|e| self.corrupt(key, e))?.is_some()
        {
            self.tree.set_list(key, item);
        }
        let key = inode_extref_key(ino, dir, name);
        if let Some(mut item) = self.tree.get(&key)?
            && remove_extref(&mut item, dir, name).map_err(|e| self.corrupt(key, e))?.is_some()
        {
            self.tree.set_list(key, item);
        }
        Ok(())
    }

    /// Removes a name with its entry and its reference.
    fn unlink(&mut self, dir: ObjectId, name: &[u8], index: u64, target: Key) -> Result<()> {
        if target.kind != KeyType::INODE_ITEM {
            return Err(self.damaged(
                dir_index_key(dir, index),
                format!("its name or index is that of subvolume {}", target.objectid),
            ));
        }
        self.remove_entry(dir, name, index)?;
        self.remove_reference(target.objectid, dir, name)?;
        self.touch_directory(dir)?;
        self.touch(target.objectid)?;
        self.renamed.insert(target.objectid.0);
        Ok(())
    }

    /// Removes what is at an index under another name.
    fn free_index(&mut self, dir: ObjectId, index: u64, name: &[u8]) -> Result<()> {
        match self.at_index(dir, index)? {
            Some((other, target)) if other != name => self.unlink(dir, &other, index, target),
            _ => Ok(()),
        }
    }

    /// Removes the entries that the log says are gone.
    pub(super) fn remove_entries(&mut self, dir: ObjectId) -> Result<()> {
        let (from, to) = range(dir, KeyType::DIR_LOG_INDEX);
        let log = self.log;
        log.scan(&from, &to, |item| {
            let logged = DirLogIndex::parse(item.data()).map_err(|e| self.damaged(item.key, e))?;
            let mut next = Some(dir_index_key(dir, item.key.offset));
            let last = dir_index_key(dir, logged.last.get());
            while let Some((key, data)) = match next {
                Some(at) if at <= last => self.tree.first(at, last)?,
                _ => None,
            } {
                next = key.successor();
                let entry = single_entry(&data).map_err(|e| self.corrupt(key, e))?;
                let kept = match log.get(&key)? {
                    Some(item) => {
                        single_entry(item.data()).map_err(|e| self.damaged(key, e))?.name
                            == entry.name
                    }
                    None => entry.location.kind != KeyType::INODE_ITEM,
                };
                if !kept {
                    self.unlink(dir, entry.name, key.offset, entry.location)?;
                }
            }
            Ok(true)
        })
    }

    /// Removes all entries of a directory that has lost its name.
    pub(super) fn remove_all_entries(&mut self, dir: ObjectId) -> Result<()> {
        let (from, to) = range(dir, KeyType::DIR_INDEX);
        while let Some((key, data)) = self.tree.first(from, to)? {
            let entry = single_entry(&data).map_err(|e| self.corrupt(key, e))?;
            self.unlink(dir, entry.name, key.offset, entry.location)?;
        }
        Ok(())
    }

    /// Replays the entries that the log has of a directory.
    pub(super) fn replay_entries(&mut self, dir: ObjectId) -> Result<()> {
        let (from, to) = range(dir, KeyType::DIR_INDEX);
        let log = self.log;
        log.scan(&from, &to, |item| {
            let entry = single_entry(item.data()).map_err(|e| self.damaged(item.key, e))?;
            self.check_name(item.key, entry.name)?;
            if entry.location.kind == KeyType::INODE_ITEM {
                self.replay_entry(dir, entry.name, item.key.offset, entry.location.objectid)?;
            }
            Ok(true)
        })
    }

    fn replay_entry(
        &mut self,
        dir: ObjectId,
        name: &[u8],
        index: u64,
        ino: ObjectId,
    ) -> Result<()> {
        // The inode may be neither in the log nor in the subvolume: then it is a new file that was
        // not fsynced. Or its references are in the log: these say better which names it has.
        if self.inode(ino)?.is_none() || self.log_has_reference(ino, dir, name)? {
            return Ok(());
        }
        match self.target(dir, name)? {
            Some(target) if target == inode_key(ino) => return Ok(()),
            Some(target) => {
                let old = self.index_of(dir, name, target)?;
                self.unlink(dir, name, old, target)?;
            }
            None => {}
        }
        self.free_index(dir, index, name)?;
        self.add_entry(dir, name, index, ino)?;
        self.add_reference(ino, dir, name, index)
    }

    fn log_has_reference(&self, ino: ObjectId, dir: ObjectId, name: &[u8]) -> Result<bool> {
        let key = inode_ref_key(ino, dir);
        if let Some(item) = self.log.get(&key)?
            && find_ref(item.data(), name).map_err(|e| self.damaged(key, e))?.is_some()
        {
            return Ok(true);
        }
        let key = inode_extref_key(ino, dir, name);
        match self.log.get(&key)? {
            Some(item) => {
                Ok(find_extref(item.data(), dir, name).map_err(|e| self.damaged(key, e))?.is_some())
            }
            None => Ok(false),
        }
    }

    fn add_reference(
        &mut self,
        ino: ObjectId,
        dir: ObjectId,
        name: &[u8],
        index: u64,
    ) -> Result<()> {
        let max = larder_format::node::max_item_size(self.core.nodesize());
        let key = inode_ref_key(ino, dir);
        let mut item = self.tree.get(&key)?.unwrap_or_default();
        let entry = InodeRef { index, name };
        if item.len() + entry.encoded_len() <= max {
            entry.append_to(&mut item);
            self.tree.set(key, item);
            return Ok(());
        }
        let key = inode_extref_key(ino, dir, name);
        let mut item = self.tree.get(&key)?.unwrap_or_default();
        let entry = ExtRef { parent: dir, index, name };
        if item.len() + entry.encoded_len() > max {
            return Err(Error::TooManyLinks);
        }
        entry.append_to(&mut item);
        self.tree.set(key, item);
        Ok(())
    }

    fn check_name(&self, key: Key, name: &[u8]) -> Result<()> {
        if is_plain_name(name) {
            Ok(())
        } else {
            Err(self.damaged(key, format!("the name {:?}", String::from_utf8_lossy(name))))
        }
    }

    /// Replays the references that the log has of an inode, and adds the entries that follow from
    /// them. The item replaces the one in the subvolume: names that only the old item has are gone.
    pub(super) fn replay_references(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let ino = key.objectid;
        if ino.0 == self.subvol.root_dir {
            return Ok(());
        }
        let logged = references(key, data).map_err(|e| self.damaged(key, e))?;
        let before = if self.kind(ino)? == Some(FileType::Directory) {
            // A directory has one name, so it is this one.
            self.all_references(ino)?
        } else {
            match self.tree.get(&key)? {
                Some(item) => references(key, &item).map_err(|e| self.corrupt(key, e))?,
                None => Vec::new(),
            }
        };
        for old in before
            .iter()
            .filter(|old| !logged.iter().any(|l| (l.dir, &l.name) == (old.dir, &old.name)))
        {
            self.unlink(old.dir, &old.name, old.index, inode_key(ino))?;
        }
        for r in &logged {
            self.check_name(key, &r.name)?;
            // Not all parents are logged. A name whose parent is missing is passed over.
            if self.inode(r.dir)?.is_some_and(|dir| dir.item.is_dir()) {
                self.replay_reference(ino, r)?;
            }
        }
        self.renamed.insert(ino.0);
        Ok(())
    }

    fn replay_reference(&mut self, ino: ObjectId, r: &Reference) -> Result<()> {
        let target = self.target(r.dir, &r.name)?;
        let in_place = target == Some(inode_key(ino))
            && self.at_index(r.dir, r.index)? == Some((r.name.clone(), inode_key(ino)));
        if !in_place {
            if let Some(target) = target {
                let old = self.index_of(r.dir, &r.name, target)?;
                self.unlink(r.dir, &r.name, old, target)?;
            }
            self.free_index(r.dir, r.index, &r.name)?;
            self.add_entry(r.dir, &r.name, r.index, ino)?;
        }
        // The name may have been in an item of the other kind, or with another index.
        self.remove_reference(ino, r.dir, &r.name)?;
        self.add_reference(ino, r.dir, &r.name, r.index)
    }

    /// All names of an inode.
    fn all_references(&self, ino: ObjectId) -> Result<Vec<Reference>> {
        let (from, to) = (range(ino, KeyType::INODE_REF).0, range(ino, KeyType::INODE_EXTREF).1);
        let (mut from, mut all) = (Some(from), Vec::new());
        while let Some(at) = from {
            let Some((key, data)) = self.tree.first(at, to)? else { break };
            all.append(&mut references(key, &data).map_err(|e| self.corrupt(key, e))?);
            from = key.successor();
        }
        Ok(all)
    }

    /// How many names an inode has.
    pub(super) fn count_names(&self, ino: ObjectId) -> Result<u32> {
        Ok(u32::try_from(self.all_references(ino)?.len()).unwrap_or(u32::MAX))
    }
}
