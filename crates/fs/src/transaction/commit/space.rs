//! What a commit does for space: the items of block groups, device extents and free space. They
//! follow from the references that were applied, and from the chunks that came and went.

use super::Committer;
use crate::error::{Error, Place, Result};
use crate::space::alloc::NewGroup;
use crate::space::{Run, free_space_tree, groups};
use crate::tree::{Tree, TreeOps};
use larder_format::items::{BlockGroupItem, Chunk, DevExtent};
use larder_format::{DevItem, Key, KeyType, ObjectId};
use std::collections::btree_map::Entry;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

impl<'a> Committer<'a> {
    /// A run that was applied is free or used from now on.
    pub(super) fn space_changed(&mut self, run: Run, free: bool) -> Result<()> {
        let group = self.ground.space.groups.find_run(run)?;
        let len = run.len.cast_signed();
        group.apply_used(if free { -len } else { len })?;
        self.dirty_groups.insert(group.run().start);
        if self.ground.roots.free_space.is_some()
            && !fault!(self.ground.options.tuning, StaleFreeSpace)
        {
            // The tree never had a block that the commit itself made and dropped again within one
            // round.
            match self.space_changes.entry(run.start) {
                Entry::Occupied(e) if *e.get() == (run.len, !free) => {
                    e.remove();
                }
                Entry::Occupied(mut e) => {
                    e.insert((run.len, free));
                }
                Entry::Vacant(e) => {
                    e.insert((run.len, free));
                }
            }
        }
        Ok(())
    }

    /// Writes into the free-space tree what became free or used, neighbours together.
    pub(super) fn write_free_space(&mut self) -> Result<()> {
        let ground = self.ground;
        let Some(tree) = &ground.roots.free_space else { return Ok(()) };
        let changes = std::mem::take(&mut self.space_changes);
        let mut changes = changes.into_iter().peekable();
        while let Some((start, (mut len, free))) = changes.next() {
            let group = ground.space.groups.find_run(Run::new(start, len))?.run();
            while let Some((_, (more, _))) = changes
                .next_if(|(s, (_, f))| *f == free && *s == start.plus(len) && *s < group.end())
            {
                len += more;
            }
            let run = Run::new(start, len);
            if free {
                free_space_tree::add(&mut self.ops(tree), group, run)?;
            } else {
                free_space_tree::remove(&mut self.ops(tree), group, run)?;
            }
        }
        Ok(())
    }

    /// Makes the free-space record of groups anew whose record was not what the extent tree says.
    /// This runs before anything else of this transaction is applied, so the extent tree is still
    /// that of the last commit.
    pub(super) fn rebuild_free_space(&mut self) -> Result<()> {
        let ground = self.ground;
        let Some(tree) = &ground.roots.free_space else { return Ok(()) };
        for run in ground.space.take_rebuilds() {
            let mut extents = ground.roots.extent.version(ground.epochs.enter());
            let used = groups::scan_used(&mut extents, ground.nodesize(), run)?;
            drop(extents);
            free_space_tree::delete_group(&mut self.ops(tree), run)?;
            free_space_tree::new_group(&mut self.ops(tree), run, &used)?;
        }
        Ok(())
    }

    /// The tree that has the items of block groups.
    fn group_tree(&self) -> &'a Tree {
        self.ground.roots.block_group.as_ref().unwrap_or(&self.ground.roots.extent)
    }

    /// Writes the items of block groups of which more or less is used than they say.
    pub(super) fn write_group_items(&mut self) -> Result<()> {
        let tree = self.group_tree();
        for start in std::mem::take(&mut self.dirty_groups) {
            let Some(group) = self.ground.space.groups.find(start) else { continue };
            let key = Key::new(start, KeyType::BLOCK_GROUP_ITEM, group.run().len);
            let item = BlockGroupItem::new(group.disk_used(), group.flags());
            self.ops(tree).update(&key, item.as_bytes())?;
        }
        Ok(())
    }

    /// Writes the items of block groups that were made in this transaction.
    pub(super) fn write_new_groups(&mut self) -> Result<()> {
        // Writing the items may make further groups.
        loop {
            let new = std::mem::take(&mut *self.txn.new_groups.lock());
            if new.is_empty() {
                return Ok(());
            }
            for group in new {
                self.write_new_group(&group)?;
            }
        }
    }

    fn write_new_group(&mut self, group: &NewGroup) -> Result<()> {
        let ground = self.ground;
        let run = group.run;
        let key = Key::new(ObjectId(256), KeyType::CHUNK_ITEM, run.start.0);
        self.ops(&ground.roots.chunk).insert(&key, &group.chunk.encode())?;
        let format = ground.store.format();
        for stripe in &group.chunk.stripes {
            let key = Key::new(ObjectId(stripe.devid.0), KeyType::DEV_EXTENT, stripe.offset.0);
            let item = DevExtent {
                chunk_tree: U64::new(ObjectId::CHUNK_TREE.0),
                chunk_objectid: U64::new(256),
                chunk_offset: U64::new(run.start.0),
                length: U64::new(group.chunk.stripe_bytes()),
                chunk_tree_uuid: format.chunk_tree_uuid,
            };
            self.ops(&ground.roots.dev).insert(&key, item.as_bytes())?;
        }
        let key = Key::new(run.start, KeyType::BLOCK_GROUP_ITEM, run.len);
        let item = BlockGroupItem::new(0, group.chunk.flags);
        self.ops(self.group_tree()).insert(&key, item.as_bytes())?;
        if let Some(tree) = &ground.roots.free_space {
            free_space_tree::new_group(&mut self.ops(tree), run, &[])?;
        }
        self.change_device_bytes(&group.chunk, true)
    }

    /// Gives back block groups in which nothing is left.
    pub(super) fn remove_empty_groups(&mut self) -> Result<()> {
        let ground = self.ground;
        for (run, chunk) in ground.space.take_empty_groups(self.txn.generation) {
            let key = Key::new(run.start, KeyType::BLOCK_GROUP_ITEM, run.len);
            self.ops(self.group_tree()).delete(&key)?;
            if let Some(tree) = &ground.roots.free_space {
                free_space_tree::delete_group(&mut self.ops(tree), run)?;
            }
            for stripe in &chunk.stripes {
                let key = Key::new(ObjectId(stripe.devid.0), KeyType::DEV_EXTENT, stripe.offset.0);
                self.ops(&ground.roots.dev).delete(&key)?;
            }
            let key = Key::new(ObjectId(256), KeyType::CHUNK_ITEM, run.start.0);
            self.ops(&ground.roots.chunk).delete(&key)?;
            self.change_device_bytes(&chunk, false)?;
            self.removed.push((run, chunk));
        }
        Ok(())
    }

    /// Changes `bytes_used` of the devices that a chunk takes space of, in the chunk tree and, for
    /// the device that it describes, in the superblock.
    fn change_device_bytes(&mut self, chunk: &Chunk, added: bool) -> Result<()> {
        let ground = self.ground;
        let tree = &ground.roots.chunk;
        for stripe in &chunk.stripes {
            let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, stripe.devid.0);
            let wrong = |what| Error::corrupt(Place::item(ObjectId::CHUNK_TREE, key), what);
            let found = self.ops(tree).get(&key)?;
            let item = found.and_then(|data| DevItem::read_from_bytes(&data).ok());
            let mut item = item.ok_or_else(|| wrong("the device of a chunk has no item"))?;
            let (used, len) = (item.bytes_used.get(), chunk.stripe_bytes());
            let used = if added { used.checked_add(len) } else { used.checked_sub(len) };
            let used = used.ok_or_else(|| wrong("more device space given back than was used"))?;
            item.bytes_used = U64::new(used);
            self.ops(tree).update(&key, item.as_bytes())?;
            let mut superblock = ground.superblock.lock();
            if superblock.device_id() == stripe.devid {
                superblock.dev_item = item;
            }
        }
        Ok(())
    }
}
