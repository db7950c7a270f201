//! Chunks come and go.
//!
//! A chunk is made where space is short, if the device has room that was not promised to metadata.
//! It is given back by the commit that finds nothing left in it.

use super::{Allocator, ChunkNotes, ChunkOutcome, NewGroup, Running, Seen};
use crate::error::Result;
use crate::lock::Locked;
use crate::space::chunks::mapped;
use crate::space::device::DeviceSpace;
use crate::space::groups::BlockGroup;
use crate::space::reserve::Overcommit;
use crate::space::{Run, SpaceKind};
use larder_format::items::{BlockGroupFlags, Chunk};
use larder_format::{Generation, Logical};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks of the chunk tree that a commit may write: it has few leaves, and is at most two levels
/// higher than these.
const CHUNK_TREE_BLOCKS: u64 = 32;

impl Allocator {
    /// A new chunk whose items the running transaction will write, unless there is one that the
    /// caller has not seen.
    ///
    /// # Errors
    /// `ReadOnly`; broken accounts.
    pub(crate) fn chunk_in_running(
        &self,
        txns: &impl Running,
        kind: SpaceKind,
        seen: Seen,
    ) -> Result<ChunkOutcome> {
        txns.while_pinned(&mut |txn| self.new_chunk(txn, kind, Some(seen)))
    }

    /// Makes a chunk for `kind` in `txn`, unless there is one that the caller has not seen.
    pub(super) fn new_chunk(
        &self,
        txn: &dyn ChunkNotes,
        kind: SpaceKind,
        seen: Option<Seen>,
    ) -> Result<ChunkOutcome> {
        #[cfg(test)]
        self.at_the_door.fetch_add(1, Ordering::AcqRel);
        // Held until the group is there. Otherwise another thread could see the device without the
        // space and the accounts without the group.
        let device = self.device.lock();
        if seen.is_some_and(|seen| seen != self.seen(kind)) {
            return Ok(ChunkOutcome::Granted);
        }
        // Asked once: a device may fail meanwhile.
        let flags = self.flags(kind);
        self.make_chunk(txn, device, kind, flags)
    }

    /// One more chunk of the type and profile of a group. Space for a chunk with less on it, and
    /// the last of its kind, is given back only if there is another one.
    ///
    /// # Errors
    /// `ReadOnly`; broken accounts.
    pub(crate) fn make_chunk_like(
        &self,
        txns: &impl Running,
        group: &BlockGroup,
    ) -> Result<ChunkOutcome> {
        txns.while_pinned(&mut |txn| {
            self.make_chunk(txn, self.device.lock(), group.kind(), group.flags())
        })
    }

    fn make_chunk(
        &self,
        txn: &dyn ChunkNotes,
        mut device: Locked<'_, DeviceSpace>,
        kind: SpaceKind,
        flags: BlockGroupFlags,
    ) -> Result<ChunkOutcome> {
        let wanted = self.wanted_as(kind, flags);
        let Some(plan) = device.plan(&wanted) else { return Ok(ChunkOutcome::NoRoom) };
        let Some(start) = device.address_for(&plan) else { return Ok(ChunkOutcome::NoRoom) };
        let left = self.metadata_capacity(&device, Some(&plan));
        let overcommit = self.overcommit(left);
        if !self.leaves_what_was_promised(kind, left, overcommit) {
            return Ok(ChunkOutcome::Promised);
        }
        let run = Run::new(start, plan.len);
        let new = NewGroup { run, chunk: device.chunk_of(&plan, flags) };
        self.add_chunk(txn, &mut device, new, overcommit)?;
        if kind == SpaceKind::System {
            self.system_changed.store(true, Ordering::Release);
        }
        tracing::debug!(?kind, %start, len = plan.len, "new chunk");
        self.counter(kind).fetch_add(1, Ordering::AcqRel);
        drop(device);
        self.size_global_reserve();
        Ok(ChunkOutcome::Granted)
    }

    /// What was promised to metadata must stay possible. Is it, if a chunk for `kind` leaves room
    /// for `left` bytes of it? Then no more than `overcommit` is promised from now on.
    fn leaves_what_was_promised(&self, kind: SpaceKind, left: u64, overcommit: Overcommit) -> bool {
        let most = match kind {
            // A chunk for metadata turns device space into metadata.
            SpaceKind::Metadata => return true,
            SpaceKind::Data if self.accounts.is_mixed() => return true,
            SpaceKind::Data => left.saturating_sub(1 << 20),
            SpaceKind::System => u64::MAX,
        };
        self.accounts.take_device_space(most, overcommit)
    }

    /// Makes a chunk known to the map, the device's extents, the transaction, the groups and the
    /// accounts.
    fn add_chunk(
        &self,
        txn: &dyn ChunkNotes,
        device: &mut DeviceSpace,
        new: NewGroup,
        overcommit: Overcommit,
    ) -> Result<()> {
        let (run, flags) = (new.run, new.chunk.flags);
        let in_map = mapped(run.start, &new.chunk);
        let excluded = in_map.superblock_ranges();
        let columns = super::columns(self.discards.options(), &in_map);
        self.volume.add_chunk(in_map)?;
        device.add(run.start, new.chunk.clone());
        txn.note_group(new);
        let group =
            BlockGroup::empty(run, flags, txn.generation(), &excluded).with_columns(columns);
        self.groups.add_new(group, overcommit).map(drop)
    }

    /// Would the commit of the transaction `newest`, which can use no chunks of later ones, find
    /// what it needs without this group? The device space that is free now may go to a chunk that
    /// is of no use to it. Metadata has promises. For the chunk tree there are none, and any commit
    /// may change it.
    pub(crate) fn commit_can_do_without(&self, group: &BlockGroup, newest: Generation) -> bool {
        let flags = group.flags();
        let (of, needed) = if flags.contains(BlockGroupFlags::METADATA) {
            (BlockGroupFlags::METADATA, self.accounts.figures(SpaceKind::Metadata).reserved)
        } else if flags.contains(BlockGroupFlags::SYSTEM) {
            (BlockGroupFlags::SYSTEM, CHUNK_TREE_BLOCKS * u64::from(self.features.nodesize))
        } else {
            return true;
        };
        let all = self.groups.all();
        let others = all.iter().filter(|g| g.flags().contains(of) && g.run() != group.run());
        let usable = others.filter(|g| !g.is_read_only() && g.created_in() <= newest);
        usable.map(|g| g.usage().free).sum::<u64>() >= needed
    }

    /// Takes block groups in which nothing is left out of service, except the last of each kind and
    /// those of this transaction.
    pub(crate) fn take_empty_groups(&self, generation: Generation) -> Vec<(Run, Chunk)> {
        let mut out = Vec::new();
        let device = self.device.lock();
        for group in self.groups.empty_groups() {
            let all = self.groups.all();
            let stays = |g: &&Arc<BlockGroup>| {
                self.takes_the_place_of(g, &group) && g.run() != group.run() && !g.usage().read_only
            };
            let kept = all.iter().filter(stays).count();
            if group.created_in() >= generation || kept == 0 || self.is_kept_open(&group) {
                continue;
            }
            let Some(chunk) = device.chunk(group.run().start) else { continue };
            // An operation that was promised its space may come for it at any moment, and there may
            // be no other space.
            if self.groups.remove_unpromised(&group) {
                if group.kind() == SpaceKind::System {
                    self.system_changed.store(true, Ordering::Release);
                }
                out.push((group.run(), chunk.clone()));
            }
        }
        out
    }

    /// Are chunks like this one too short without it? See [`Self::keep_open`].
    fn is_kept_open(&self, group: &BlockGroup) -> bool {
        let least = self.kept_open.1.load(Ordering::Relaxed);
        if least == 0 || self.kept_open.0.load(Ordering::Relaxed) != group.flags().bits() {
            return false;
        }
        let all = self.groups.all();
        let others = all.iter().filter(|g| g.flags() == group.flags() && g.run() != group.run());
        others.filter(|g| !g.is_read_only()).map(|g| g.run().len).sum::<u64>() < least
    }

    /// Is `other` a group like this one, or what its kind is converted to?
    fn takes_the_place_of(&self, other: &BlockGroup, group: &BlockGroup) -> bool {
        let converted = self.groups.targets().get(group.kind()).is_some()
            && self.groups.targets().is_met(group.kind(), other.flags());
        let same_type = other.kind() == group.kind();
        other.flags() == group.flags() || same_type && converted
    }

    /// Is there an empty chunk for something else than `kind` that the next commits would give
    /// back, once what is promised in it has come to its end?
    pub(crate) fn has_idle_chunks(&self, kind: SpaceKind) -> bool {
        let all = self.groups.all();
        let account = |kind| match kind {
            SpaceKind::Data if self.accounts.is_mixed() => SpaceKind::Metadata,
            kind => kind,
        };
        all.iter().any(|group| {
            let now = group.usage();
            let theirs = account(group.kind());
            if theirs == account(kind)
                || theirs == SpaceKind::System
                || now.allocated > 0
                || now.read_only
            {
                return false;
            }
            let keep =
                if theirs == SpaceKind::Metadata { self.accounts.global_reserve().0 } else { 0 };
            let rest = self.accounts.figures(theirs).free().checked_sub(now.free);
            let another =
                |g: &&Arc<BlockGroup>| g.flags() == group.flags() && g.run() != group.run();
            rest.is_some_and(|rest| rest >= keep) && all.iter().any(|g| another(&g))
        })
    }

    /// The removed groups are gone from the durable superblock: their device space may be used
    /// again.
    pub(crate) fn forget_removed(&self, removed: &[(Run, Chunk)]) {
        if removed.is_empty() {
            return;
        }
        for (_, chunk) in removed {
            for stripe in &chunk.stripes {
                self.discards.discard_stripe(stripe.devid, stripe.offset, chunk.stripe_bytes());
            }
        }
        let mut device = self.device.lock();
        for (run, chunk) in removed {
            device.remove(run.start, chunk);
            self.volume.map().remove(run.start);
        }
        self.given_back.fetch_add(removed.len() as u64, Ordering::AcqRel);
        drop(device);
        self.note_device_space();
    }

    /// Have system chunks come or gone since this was last asked?
    pub(crate) fn system_chunks_changed(&self) -> bool {
        self.system_changed.swap(false, Ordering::AcqRel)
    }

    /// The superblock's array of system chunks for a commit. `removed` ones are left out, and those
    /// that a later transaction has made: the trees of the commit do not know them.
    pub(crate) fn system_chunk_array(
        &self,
        removed: &[(Run, Chunk)],
        generation: Generation,
    ) -> Result<Vec<u8>> {
        let device = self.device.lock();
        let mut gone: Vec<Logical> = removed.iter().map(|(run, _)| run.start).collect();
        let all = self.groups.all();
        let is_later =
            |g: &&Arc<BlockGroup>| g.kind() == SpaceKind::System && g.created_in() > generation;
        let later: Vec<Logical> = all.iter().filter(is_later).map(|g| g.run().start).collect();
        if !later.is_empty() {
            self.system_changed.store(true, Ordering::Release);
        }
        gone.extend(later);
        device.system_array(&gone)
    }
}
