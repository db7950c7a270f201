//! What a commit writes about devices: which of them there are, which are behind, which are not
//! written any more, their errors, and which is being replaced.
//!
//! A device comes, goes or changes its size with a commit. The superblock counts it, and so do the
//! items of the chunk tree, so both are changed here. A device that comes has its superblock before
//! the others count it ([`super::super::barrier`]).
//!
//! A device that was away is written again, its superblock too. What tells that it still lacks
//! something is a mark ([`DevItem::mark`]). The item in the device's superblock has it from the
//! start, that in the chunk tree from the first commit on. Linux keeps the latter and does not use
//! it. The mark goes when a scrub has brought the device up to date.
//!
//! A device that is missing or has failed leaves the history of the others, which begin a new one
//! ([`larder_format::history`]).

use super::Committer;
use crate::error::{Error, Place, Result};
use crate::space::{DeviceChange, device_items};
use crate::tree::TreeOps as _;
use larder_format::items::{DevReplace, DevStats};
use larder_format::{DevItem, DeviceId, Generation, HistoryId, Key, KeyType, ObjectId};
use larder_volume::ErrorCounts;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::Ordering;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

impl Committer<'_> {
    /// Takes the changes of devices that were noted, and makes those that come first: chunks may
    /// lie on a device that comes.
    pub(super) fn add_devices(&mut self) -> Result<()> {
        let changes = std::mem::take(&mut *self.txn.device_changes.lock());
        for change in &changes {
            match change {
                DeviceChange::Add(item) => self.add_device(item)?,
                DeviceChange::Seed(id, generation) => self.note_seed(*id, *generation)?,
                DeviceChange::Remove(_) | DeviceChange::Resize(..) => {}
            }
        }
        self.device_changes.extend(changes);
        Ok(())
    }

    /// Makes the others. Chunks that were in their way are gone.
    pub(super) fn change_devices(&mut self) -> Result<()> {
        for change in self.device_changes.clone() {
            match change {
                DeviceChange::Add(_) | DeviceChange::Seed(..) => {}
                DeviceChange::Remove(id) => self.remove_device(id)?,
                DeviceChange::Resize(id, size) => self.resize_device(id, size)?,
            }
        }
        Ok(())
    }

    /// Devices that the file system gets with this commit, or gets back.
    pub(super) fn new_devices(&self) -> Vec<DeviceId> {
        let id = |change: &DeviceChange| match change {
            DeviceChange::Add(item) => Some(DeviceId(item.devid.get())),
            DeviceChange::Seed(..) | DeviceChange::Remove(_) | DeviceChange::Resize(..) => None,
        };
        self.device_changes.iter().filter_map(id).chain(self.returns).collect()
    }

    fn add_device(&mut self, item: &DevItem) -> Result<()> {
        let ground = self.ground;
        let key = device_key(DeviceId(item.devid.get()));
        self.ops(&ground.roots.chunk).insert(&key, item.as_bytes())?;
        let mut superblock = ground.superblock.lock();
        superblock.num_devices += 1;
        superblock.total_bytes += item.total_bytes;
        Ok(())
    }

    /// The item of a seed has the generation of its superblock, as Linux wants it.
    fn note_seed(&mut self, id: DeviceId, generation: Generation) -> Result<()> {
        let mut item = self.device_item(id)?;
        item.generation = U64::new(generation.0);
        self.ops(&self.ground.roots.chunk).update(&device_key(id), item.as_bytes())
    }

    fn remove_device(&mut self, id: DeviceId) -> Result<()> {
        let ground = self.ground;
        let tree = &ground.roots.chunk;
        let size = self.device_item(id)?.total_bytes;
        self.ops(tree).delete(&device_key(id))?;
        let counts = Key::new(ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM, id.0);
        if self.ops(&ground.roots.dev).get(&counts)?.is_some() {
            self.ops(&ground.roots.dev).delete(&counts)?;
        }
        // The superblock holds the item of some device, which must not be this one.
        let mut others = ground.volume.devices().filter(|(other, _)| *other != id);
        let other = others.next().map(|(other, _)| self.device_item(other)).transpose()?;
        let mut superblock = ground.superblock.lock();
        superblock.num_devices -= 1;
        superblock.total_bytes -= size;
        if let Some(other) = other.filter(|_| superblock.device_id() == id) {
            superblock.dev_item = other;
        }
        Ok(())
    }

    fn resize_device(&mut self, id: DeviceId, size: u64) -> Result<()> {
        let ground = self.ground;
        let mut item = self.device_item(id)?;
        let before = item.total_bytes;
        item.total_bytes = U64::new(size);
        self.ops(&ground.roots.chunk).update(&device_key(id), item.as_bytes())?;
        let mut superblock = ground.superblock.lock();
        superblock.total_bytes -= before;
        superblock.total_bytes += size;
        if superblock.device_id() == id {
            superblock.dev_item = item;
        }
        Ok(())
    }

    fn device_item(&mut self, id: DeviceId) -> Result<DevItem> {
        let key = device_key(id);
        let found = self.ops(&self.ground.roots.chunk).get(&key)?;
        let item = found.and_then(|data| DevItem::read_from_bytes(&data).ok());
        let place = || Place::item(ObjectId::CHUNK_TREE, key);
        item.ok_or_else(|| Error::corrupt(place(), "the device has no item"))
    }

    /// Brings items and counts up to date.
    pub(super) fn write_devices(&mut self) -> Result<()> {
        let ground = self.ground;
        let changed = ground.volume.take_changed_errors();
        // A device with new errors may have failed.
        if ground.items_changed.swap(false, Ordering::AcqRel) || !changed.is_empty() {
            self.write_items()?;
        }
        if !changed.is_empty() {
            // A device may have failed, and less can be promised then.
            ground.space.note_device_space();
        }
        let replacement = ground.replacement.for_commit();
        self.target = replacement.target;
        self.returns = replacement.returns;
        if let Some(item) = replacement.item() {
            self.put(&ground.roots.dev, &DevReplace::key(), item)?;
        }
        for (id, counts) in changed {
            let key = Key::new(ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM, id.0);
            self.put(&ground.roots.dev, &key, kept(counts).as_bytes())?;
        }
        Ok(())
    }

    fn write_items(&mut self) -> Result<()> {
        let ground = self.ground;
        let items = device_items(&ground.roots.chunk.version(ground.epochs.enter()))?;
        let (before, fsid) = {
            let superblock = ground.superblock.lock();
            (superblock.history(), superblock.metadata_fsid())
        };
        let is_written = |item: &DevItem| ground.volume.takes_writes(DeviceId(item.devid.get()));
        let mut own = items.iter().filter(|item| !item.is_seed_of(&fsid));
        let leaves = own.any(|item| !is_written(item) && item.left().is_none());
        if leaves && !fault!(ground.options.tuning, OneHistory) {
            let id = self.new_history();
            ground.superblock.lock().begin_history(id, self.txn.generation);
        }
        let behind = ground.behind();
        for item in items.into_iter().filter(|item| !item.is_seed_of(&fsid)) {
            let id = DeviceId(item.devid.get());
            let left = (!is_written(&item)).then(|| item.left().unwrap_or(before));
            let mut new = item.with_left(left);
            if ground.volume.device(id).is_some() {
                let since = behind.iter().find(|(other, _)| *other == id).map(|(_, since)| *since);
                // The first mark stays.
                new = new.with_mark(since.map(|since| item.mark(&fsid).unwrap_or(since)));
            }
            if new == item {
                continue;
            }
            self.ops(&ground.roots.chunk).update(&device_key(id), new.as_bytes())?;
            let mut superblock = ground.superblock.lock();
            if superblock.device_id() == id {
                superblock.dev_item = new;
            }
        }
        Ok(())
    }

    /// A number that nobody else chooses, not even the other half of a mirror in the simulation,
    /// which does the same at the same time.
    fn new_history(&self) -> HistoryId {
        let mut hasher = DefaultHasher::new();
        self.ground.new_uuid().hash(&mut hasher);
        self.ground.volume.devices().for_each(|(id, _)| id.hash(&mut hasher));
        HistoryId::from_random(hasher.finish().to_le_bytes())
    }
}

fn device_key(id: DeviceId) -> Key {
    Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, id.0)
}

/// Counts as the device tree has them.
fn kept(counts: ErrorCounts) -> DevStats {
    DevStats {
        write_errors: U64::new(counts.writes),
        read_errors: U64::new(counts.reads),
        flush_errors: U64::new(counts.flushes),
        corruption_errors: U64::new(counts.corruptions),
        generation_errors: U64::new(counts.generations),
    }
}
