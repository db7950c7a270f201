//! What a commit writes about devices: which of them are behind, and their errors.
//!
//! A device that was away is written again from the first commit on, its superblock too. So its
//! superblock soon looks like the others'. What tells that it still lacks something is a mark: the
//! generation in its item in the chunk tree, which is 0 for all other devices. Linux keeps the
//! field and does not use it. The mark goes when a scrub has brought the device up to date. The
//! superblock of a device that is behind and has no mark yet is left as it is.

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
        let (tree, behind) = (&ground.roots.chunk, ground.volume.behind());
        for (id, _) in ground.volume.devices() {
            let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, id.0);
            let found = self.ops(tree).get(&key)?;
            let Some(mut item) = found.and_then(|data| DevItem::read_from_bytes(&data).ok()) else {
                continue;
            };
            let stale = ground.stale_devices.iter().find(|s| s.id == id);
            let mark = match behind.contains(&id) {
                false => 0,
                true if item.generation.get() != 0 => item.generation.get(),
                true => stale.map_or(1, |s| s.generation.0.max(1)),
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
