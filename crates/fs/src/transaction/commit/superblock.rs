//! The superblock of a commit.

use super::Committer;
use crate::error::{Error, Place, Result};
use crate::space::groups::BlockGroup;
use crate::transaction::Superblocks;
use crate::tree::Tree;
use larder_format::Superblock;
use larder_format::features::{CompatRo, Incompat};
use larder_format::items::BlockGroupFlags;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::U64;

impl Committer<'_> {
    /// The superblocks of this transaction.
    pub(super) fn superblocks(&self) -> Result<Superblocks> {
        let chunks = self.ground.roots.chunk.version(self.ground.epochs.enter());
        let all = Superblocks::new(self.superblock()?, &chunks, self.ground.behind())?;
        Ok(all.with_new(self.new_devices()).with_target(self.target))
    }

    /// That of the device whose item it holds.
    fn superblock(&self) -> Result<Box<Superblock>> {
        let ground = self.ground;
        let mut sb = ground.superblock.lock().clone();
        let generation = U64::new(self.txn.generation.0);
        let followed_uuids = sb.uuid_tree_generation == sb.generation;
        sb.generation = generation;
        let root = ground.roots.root.root().ptr;
        sb.root = U64::new(root.at.0);
        sb.root_level = root.level;
        let chunk = ground.roots.chunk.root().ptr;
        sb.chunk_root = U64::new(chunk.at.0);
        sb.chunk_root_generation = U64::new(chunk.generation.0);
        sb.chunk_root_level = chunk.level;
        sb.log_root = U64::new(0);
        sb.log_root_level = 0;
        sb.set_log_number(0);
        sb.bytes_used = U64::new(ground.space.disk_used());
        // A v1 space cache would be out of date now. 0 never equals a generation, so Linux rebuilds
        // it.
        sb.cache_generation = U64::new(0);
        if ground.roots.free_space.is_none() {
            sb.compat_ro_flags =
                U64::new(sb.compat_ro_flags.get() & !CompatRo::FREE_SPACE_TREE_VALID.bits());
        }
        if followed_uuids {
            sb.uuid_tree_generation = generation;
        }
        let mut incompat = sb.incompat_flags.get() | self.txn.incompat.load(Ordering::Relaxed);
        if ground.nodesize() > 4096 {
            incompat |= Incompat::BIG_METADATA.bits();
        }
        sb.incompat_flags = U64::new(incompat & !self.features_of_removed().bits());
        if let Some(label) = self.txn.label.lock().take() {
            sb.label = [0; 256];
            sb.label[..label.len()].copy_from_slice(&label);
        }
        if ground.space.system_chunks_changed() {
            let bytes = ground.space.system_chunk_array(&self.removed, self.txn.generation)?;
            sb.set_sys_chunk_bytes(&bytes).map_err(|e| Error::corrupt(Place::default(), e.0))?;
        }
        self.fill_backup_root(&mut sb);
        Ok(sb)
    }

    /// Features that were needed by chunks which this commit takes out, and by no other.
    fn features_of_removed(&self) -> Incompat {
        let needs = |flags: BlockGroupFlags| {
            flags.profile().map_or(Incompat::empty(), |profile| profile.needs())
        };
        let removed = self.removed.iter().map(|(_, chunk)| needs(chunk.flags));
        let removed = removed.fold(Incompat::empty(), Incompat::union);
        if removed.is_empty() {
            return removed;
        }
        let is_left = |group: &BlockGroup| self.removed.iter().all(|(run, _)| *run != group.run());
        let groups = self.ground.space.groups.all();
        let left = groups.iter().filter(|group| is_left(group)).map(|group| needs(group.flags()));
        removed - left.fold(Incompat::empty(), Incompat::union)
    }

    /// Notes the roots in the next of the four backup slots.
    fn fill_backup_root(&self, sb: &mut Superblock) {
        let ground = self.ground;
        let before = sb.generation.get() - 1;
        let newest =
            sb.backup_roots.iter().position(|b| b.tree_root_gen.get() == before && before != 0);
        let slot = newest.map_or(0, |i| (i + 1) % 4);
        let roots = &ground.roots;
        let pair = |t: &Tree| {
            let p = t.root().ptr;
            (U64::new(p.at.0), U64::new(p.generation.0), p.level)
        };
        let fs = ground.above().top_level_item();
        let mut b = sb.backup_roots[slot];
        (b.tree_root, b.tree_root_gen, b.tree_root_level) = pair(&roots.root);
        (b.chunk_root, b.chunk_root_gen, b.chunk_root_level) = pair(&roots.chunk);
        (b.extent_root, b.extent_root_gen, b.extent_root_level) = pair(&roots.extent);
        (b.dev_root, b.dev_root_gen, b.dev_root_level) = pair(&roots.dev);
        (b.csum_root, b.csum_root_gen, b.csum_root_level) = pair(&roots.csum);
        if let Some(fs) = fs {
            (b.fs_root, b.fs_root_gen, b.fs_root_level) = (fs.bytenr, fs.generation, fs.level);
        }
        b.total_bytes = sb.total_bytes;
        b.bytes_used = sb.bytes_used;
        b.num_devices = sb.num_devices;
        sb.backup_roots[slot] = b;
    }
}
