//! What a commit writes about devices: which of them are behind, and their errors.
//!
//! A device that was away is written again, its superblock too. What tells that it still lacks
//! something is a mark: the generation in its item, which is 0 for all other devices. The item in
//! the device's superblock has it from the start, that in the chunk tree from the first commit on.
//! Linux keeps the latter and does not use it. The mark goes when a scrub has brought the device up
//! to date.

use super::Committer;
use crate::error::Result;
use crate::tree::TreeOps as _;
use larder_format::items::DevStats;
use larder_format::{DevItem, Key, KeyType, ObjectId};
use larder_volume::ErrorCounts;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

impl Committer<'_> {
    /// Brings marks and counts up to date.
    pub(super) fn write_devices(&mut self) -> Result<()> {
        if self.ground.marks_changed.swap(false, Ordering::AcqRel) {
            self.write_marks()?;
        }
        let ground = self.ground;
        let changed = ground.volume.take_changed_errors();
        if !changed.is_empty() {
            // A device may have failed, and less can be promised then.
            ground.space.note_device_space();
        }
        for (id, counts) in changed {
            let key = Key::new(ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM, id.0);
            self.put(&ground.roots.dev, &key, kept(counts).as_bytes())?;
        }
        Ok(())
    }

    fn write_marks(&mut self) -> Result<()> {
        let ground = self.ground;
        let (tree, behind) = (&ground.roots.chunk, ground.behind());
        for (id, _) in ground.volume.devices() {
            let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, id.0);
            let found = self.ops(tree).get(&key)?;
            let Some(mut item) = found.and_then(|data| DevItem::read_from_bytes(&data).ok()) else {
                continue;
            };
            let since = behind.iter().find(|(other, _)| *other == id);
            let mark = match (since, item.generation.get()) {
                (None, _) => 0,
                (Some((_, since)), 0) => since.0.max(1),
                (Some(_), before) => before,
            };
            if item.generation.get() == mark {
                continue;
            }
            item.generation = U64::new(mark);
            self.ops(tree).update(&key, item.as_bytes())?;
            let mut superblock = ground.superblock.lock();
            if superblock.device_id() == id {
                superblock.dev_item = item;
            }
        }
        Ok(())
    }
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
