//! Chunks come and go.
//!
//! A chunk is made where space is short, if the device has room that was not promised to metadata.
//! It is given back by the commit that finds nothing left in it.

use super::{Allocator, ChunkNotes, ChunkOutcome, NewGroup, Running, Seen};
use crate::error::Result;
use crate::space::chunks::mapped;
use crate::space::device::DeviceSpace;
use crate::space::groups::BlockGroup;
use crate::space::reserve::Overcommit;
use crate::space::{Run, SpaceKind};
use larder_format::items::Chunk;
use larder_format::{Generation, Logical};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
        let mut device = self.device.lock();
        if seen.is_some_and(|seen| seen != self.seen(kind)) {
            return Ok(ChunkOutcome::Granted);
        }
        // Asked once: a device may fail meanwhile.
        let flags = self.flags(kind);
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

    /// Takes block groups in which nothing is left out of service, except the last of each kind and
    /// those of this transaction.
    pub(crate) fn take_empty_groups(&self, generation: Generation) -> Vec<(Run, Chunk)> {
        let mut out = Vec::new();
        let device = self.device.lock();
        for group in self.groups.empty_groups() {
            let kept = self
                .groups
                .all()
                .iter()
                .filter(|g| {
                    g.flags() == group.flags() && g.run() != group.run() && !g.usage().read_only
                })
                .count();
            if group.created_in() >= generation || kept == 0 {
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

    /// The superblock's array of system chunks; `removed` ones are left out.
    pub(crate) fn system_chunk_array(&self, removed: &[(Run, Chunk)]) -> Result<Vec<u8>> {
        let gone: Vec<Logical> = removed.iter().map(|(run, _)| run.start).collect();
        self.device.lock().system_array(&gone)
    }
}
