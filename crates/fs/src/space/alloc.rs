//! Allocation: block groups, accounts and the device behind them, put together.
//!
//! [`Allocator`] hides when a new chunk is made, and what has to know of it then: the map of the
//! volume, the allocator's groups, the accounts of the reservations, and the transaction whose
//! commit writes its items. The commit of N must not use a group that was made in transaction N+1,
//! because its chunk tree does not have that group. So groups know their transaction.
//!
//! A thread may find no space, and before it makes a chunk other threads look and find none either.
//! So chunks are counted. A thread that looks for space remembers the count ([`Seen`]) and makes no
//! chunk while there is one that it has not seen. Otherwise chunks that nobody needs would be made:
//! a device has room for a few only, and such a chunk is not given back before the commit after the
//! next.

use crate::api::OpenOptions;
use crate::error::{Error, Place, Result};
use crate::lock::{self, Mutex};
use crate::space::chunks::{ChunkPlan, MIN_STRIPE, device_gaps, device_holes, mapped, plan_chunk};
use crate::space::discard::Discards;
use crate::space::extent_tree::ExtentFeatures;
use crate::space::groups::{self, BlockGroup, ClusterUser, FreeSource, Groups};
use crate::space::preallocated::PreallocatedBlocks;
use crate::space::reserve::{Reservation, Space as Accounts, global_reserve_size};
use crate::space::trim::Told;
use crate::space::{Run, SpaceKind};
use crate::tree::{Epoch, Epochs, Roots, TreeOps, Version};
use larder_format::features::Incompat;
use larder_format::items::{BlockGroupFlags, Chunk, DevExtent, Stripe, encode_sys_array};
use larder_format::{DeviceId, Generation, Key, KeyType, Logical, ObjectId, Physical, Superblock};
use larder_volume::Volume;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A block group that a transaction has made. The commit writes its items.
#[derive(Debug, Clone)]
pub(crate) struct NewGroup {
    pub(crate) run: Run,
    pub(crate) chunk: Chunk,
}

/// Space freed by one transaction. It is given back when no version can reach it.
pub(crate) type Pinned = Vec<Run>;

/// A transaction, as far as chunks go. Its commit writes the items of the chunks that were made in
/// it.
pub(crate) trait ChunkNotes {
    /// Its number.
    fn generation(&self) -> Generation;
    /// A group was made in it.
    fn note_group(&self, group: NewGroup);
}

/// The running transaction.
pub(crate) trait Running {
    /// Calls `make` with the running transaction, which is not sealed meanwhile.
    ///
    /// # Errors
    /// `ReadOnly`; those of `make`.
    fn while_pinned(
        &self,
        make: &mut dyn FnMut(&dyn ChunkNotes) -> Result<ChunkOutcome>,
    ) -> Result<ChunkOutcome>;
}

/// Blocks that a commit may need beyond copies and beyond what grows by bytes: splits up to the
/// root of each global tree, and the preallocated blocks that it holds.
const SLACK_BLOCKS: u64 = 40;

/// How many chunks had been made when a caller looked for space. It asks for this *before* it
/// looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

/// What came of a request for a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkOutcome {
    /// There is a chunk that the caller has not seen, made by this call or by another thread. The
    /// caller has to look again.
    Granted,
    /// The device has room for a chunk, but that room was promised to metadata.
    Promised,
    /// The device has no room.
    NoRoom,
}

/// What chunks take of the device.
#[derive(Debug)]
struct DeviceSpace {
    id: DeviceId,
    uuid: [u8; 16],
    size: u64,
    /// First byte and length of every device extent.
    taken: BTreeMap<Physical, u64>,
    /// What the device was told of outside of them.
    told: Told,
    chunks: BTreeMap<Logical, Chunk>,
}

impl DeviceSpace {
    fn unallocated(&self) -> u64 {
        let usable = self.size.saturating_sub(larder_format::DEVICE_RESERVED);
        usable.saturating_sub(self.taken.values().sum())
    }
    /// Bytes that can still become chunks, after `plan` is carried out if there is one. Space
    /// between chunks that is too short for a stripe does not count.
    fn usable(&self, plan: Option<&ChunkPlan>) -> u64 {
        let mut taken: Vec<(Physical, u64)> = self.taken.iter().map(|(a, l)| (*a, *l)).collect();
        if let Some(plan) = plan {
            taken.extend(plan.stripes.iter().map(|at| (*at, plan.len)));
            taken.sort_unstable();
        }
        let holes = device_holes(&taken, self.size);
        holes.iter().map(|h| h.1).filter(|len| *len >= MIN_STRIPE).sum()
    }
    /// Every stripe must have a device extent of its own, and every device extent a stripe: the
    /// space for a new chunk is all that no device extent takes.
    fn check(&self) -> Result<()> {
        let wrong = |at: Physical, what: &str| {
            let key = Key::new(ObjectId(self.id.0), KeyType::DEV_EXTENT, at.0);
            Error::corrupt(Place::item(ObjectId::DEV_TREE, key), what)
        };
        let mut end = 0;
        for (at, len) in &self.taken {
            if at.0 < end {
                return Err(wrong(*at, "device extent overlaps the one before"));
            }
            end =
                at.0.checked_add(*len)
                    .filter(|end| *len > 0 && *end <= self.size)
                    .ok_or_else(|| wrong(*at, "device extent does not lie in the device"))?;
        }
        let mut stripes = 0;
        for chunk in self.chunks.values() {
            for stripe in chunk.stripes.iter().filter(|s| s.devid == self.id) {
                stripes += 1;
                if self.taken.get(&stripe.offset) != Some(&chunk.length) {
                    return Err(wrong(
                        stripe.offset,
                        "chunk's stripe has no device extent of its length",
                    ));
                }
            }
        }
        let first = self.taken.keys().next().copied().unwrap_or_default();
        if stripes == self.taken.len() {
            Ok(())
        } else {
            Err(wrong(first, "device extents and stripes do not pair up"))
        }
    }
}

/// The allocator of an open file system.
#[derive(Debug)]
pub(crate) struct Allocator {
    /// How extent items look on this image.
    pub(crate) features: ExtentFeatures,
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) groups: Groups,
    device: Mutex<DeviceSpace, lock::DeviceSpace>,
    /// Chunks made for data, for metadata and for the chunk tree, and chunks given back. Where data
    /// and metadata are mixed, the second counts both. They change with `device` locked.
    made: [AtomicU64; 3],
    given_back: AtomicU64,
    total_bytes: u64,
    system_changed: AtomicBool,
    /// Bytes of all trees that only commits edit: a commit may have to copy each of their blocks.
    global_trees: AtomicU64,
    /// Bytes that operations have kept for the commit that is under way.
    pub(crate) kept_by_commit: AtomicU64,
    /// Groups whose record in the free-space tree is wrong. The next commit makes it anew.
    rebuild: Mutex<Vec<Run>, lock::Rebuild>,
    pub(crate) discards: Discards,
    /// Addresses for new blocks that operations did not need.
    pub(crate) preallocated: PreallocatedBlocks,
    pub(super) options: Arc<OpenOptions>,
    pub(super) volume: Arc<Volume>,
    /// What keeps freed space from being used again.
    pub(super) epochs: Arc<Epochs<Pinned>>,
    /// Requests for chunks so far.
    #[cfg(test)]
    at_the_door: AtomicU64,
}

fn corrupt_key(tree: ObjectId, key: Key) -> impl Fn(larder_format::FormatError) -> Error {
    move |e| Error::corrupt(Place::item(tree, key), e.0)
}

impl Allocator {
    /// Reads chunks, device extents, block groups and free space.
    pub(crate) fn load(
        sb: &Superblock,
        options: &Arc<OpenOptions>,
        volume: &Arc<Volume>,
        roots: &Roots,
        epochs: &Arc<Epochs<Pinned>>,
    ) -> Result<Self> {
        let epoch = &epochs.enter();
        let incompat = Incompat::from_bits_retain(sb.incompat_flags.get());
        let nodesize = sb.nodesize.get();
        let features =
            ExtentFeatures { skinny: incompat.contains(Incompat::SKINNY_METADATA), nodesize };
        let id = DeviceId(sb.dev_item.devid.get());
        let mut device = DeviceSpace {
            id,
            uuid: sb.dev_item.uuid,
            size: sb.dev_item.total_bytes.get(),
            taken: BTreeMap::new(),
            told: Told::default(),
            chunks: BTreeMap::new(),
        };
        let all = |id: ObjectId, kind| (Key::new(id, kind, 0), Key::new(id, kind, u64::MAX));
        let (from, to) = all(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM);
        roots.chunk.version(epoch.clone()).scan(&from, &to, |item| {
            let chunk =
                Chunk::parse(item.data()).map_err(corrupt_key(ObjectId::CHUNK_TREE, item.key))?;
            device.chunks.insert(Logical(item.key.offset), chunk);
            Ok(true)
        })?;
        let (from, to) = all(ObjectId(id.0), KeyType::DEV_EXTENT);
        roots.dev.version(epoch.clone()).scan(&from, &to, |item| {
            let extent =
                DevExtent::parse(item.data()).map_err(corrupt_key(ObjectId::DEV_TREE, item.key))?;
            device.taken.insert(Physical(item.key.offset), extent.length.get());
            Ok(true)
        })?;
        device.check()?;
        let accounts = Accounts::new(incompat.contains(Incompat::MIXED_GROUPS));
        let groups = Groups::new(accounts.clone(), nodesize);
        let mut rebuild = Vec::new();
        let mut extents = roots.extent.version(epoch.clone());
        let items_tree = roots.block_group.as_ref().unwrap_or(&roots.extent);
        let mut items = items_tree.version(epoch.clone());
        let mut free: Option<Version> = roots.free_space.as_ref().map(|t| t.version(epoch.clone()));
        for chunk in volume.map().chunks() {
            let mut source = match &mut free {
                Some(tree) => FreeSource::Tree(tree as &mut dyn TreeOps),
                None => FreeSource::Extents,
            };
            let loaded = groups::load(
                &chunk,
                &mut items,
                items_tree.id(),
                &mut source,
                &mut extents,
                nodesize,
            )?;
            if loaded.rebuild_free_space {
                rebuild.push(loaded.group.run());
            }
            groups.add(loaded.group)?;
        }
        let this = Self {
            features,
            accounts,
            groups,
            device: Mutex::new(device),
            made: Default::default(),
            given_back: AtomicU64::new(0),
            total_bytes: sb.total_bytes.get(),
            system_changed: AtomicBool::new(false),
            global_trees: AtomicU64::new(0),
            kept_by_commit: AtomicU64::new(0),
            rebuild: Mutex::new(rebuild),
            discards: Discards::default(),
            preallocated: PreallocatedBlocks::default(),
            options: options.clone(),
            volume: volume.clone(),
            epochs: epochs.clone(),
            #[cfg(test)]
            at_the_door: AtomicU64::new(0),
        };
        this.measure_global_trees(roots, epoch)?;
        this.note_device_space();
        Ok(this)
    }

    /// Makes the global reserve as large as commits now need it.
    fn size_global_reserve(&self) {
        let metadata = self.accounts.figures(SpaceKind::Metadata);
        let commit = self.global_trees() + SLACK_BLOCKS * u64::from(self.features.nodesize);
        self.accounts.set_global_reserve(global_reserve_size(commit, metadata.total));
    }
    /// Measures the trees that only commits edit, and sizes the global reserve by them.
    ///
    /// # Errors
    /// Reading or corruption of a root.
    pub(crate) fn measure_global_trees(&self, roots: &Roots, epoch: &Epoch) -> Result<()> {
        let mut blocks = 0u64;
        for tree in roots.all().filter(|t| t.id() != ObjectId::CHUNK_TREE) {
            blocks = blocks.saturating_add(tree.version(epoch.clone()).blocks_at_most()?);
        }
        // The number of blocks is an upper bound, so it is limited to what there is.
        let bytes = blocks.saturating_mul(u64::from(self.features.nodesize));
        let used = self.accounts.figures(SpaceKind::Metadata).used;
        self.global_trees.store(bytes.min(used), Ordering::Relaxed);
        self.size_global_reserve();
        Ok(())
    }
    /// Bytes that a commit copies at most, if nothing grows.
    pub(crate) fn global_trees(&self) -> u64 {
        self.global_trees.load(Ordering::Relaxed)
    }

    /// Bytes of metadata for which device space of `usable` bytes is enough.
    fn overcommit(&self, usable: u64) -> u64 {
        // A chunk needs whole stripes in one place, so a little is always lost.
        (usable / self.copies(SpaceKind::Metadata)).saturating_sub(4 << 20) / 8 * 7
    }
    /// Chunks have gone. Tells the accounts how much device space can still become metadata.
    fn note_device_space(&self) {
        self.size_global_reserve();
        let device = self.device.lock();
        self.accounts.set_overcommit(self.overcommit(device.usable(None)));
    }

    /// Type and profile that new chunks get: those of the last group of the kind.
    fn flags(&self, kind: SpaceKind) -> BlockGroupFlags {
        let fallback = match kind {
            SpaceKind::Data => BlockGroupFlags::DATA,
            SpaceKind::Metadata => BlockGroupFlags::METADATA,
            SpaceKind::System => BlockGroupFlags::SYSTEM,
        };
        let all = self.groups.all();
        all.iter().rev().find(|g| g.flags().contains(fallback)).map_or(fallback, |g| g.flags())
    }
    pub(crate) fn copies(&self, kind: SpaceKind) -> u64 {
        self.flags(kind).profile().map_or(1, |p| u64::from(p.copies())).max(1)
    }

    /// Where a chunk for `kind` would lie, if the device has room for one.
    fn plan(&self, device: &DeviceSpace, kind: SpaceKind) -> Option<ChunkPlan> {
        let taken: Vec<(Physical, u64)> = device.taken.iter().map(|(a, l)| (*a, *l)).collect();
        let copies = usize::try_from(self.copies(kind)).unwrap_or(1);
        plan_chunk(kind, copies, self.total_bytes, &taken, device.size)
    }
    /// Which of the counters of chunks is for `kind`.
    fn counter(&self, kind: SpaceKind) -> &AtomicU64 {
        match kind {
            SpaceKind::Data => &self.made[usize::from(self.accounts.is_mixed())],
            SpaceKind::Metadata => &self.made[1],
            SpaceKind::System => &self.made[2],
        }
    }
    /// The chunks of this moment. The caller is going to look for space for `kind`, and may then
    /// want another chunk.
    pub(crate) fn seen(&self, kind: SpaceKind) -> Seen {
        Seen(self.counter(kind).load(Ordering::Acquire))
    }
    /// How many chunks have come and gone.
    pub(crate) fn chunk_changes(&self) -> u64 {
        self.made.iter().chain([&self.given_back]).map(|n| n.load(Ordering::Acquire)).sum()
    }

    /// Makes a chunk for `kind` in `txn`, unless there is one that the caller has not seen.
    fn new_chunk(
        &self,
        txn: &dyn ChunkNotes,
        kind: SpaceKind,
        seen: Option<Seen>,
    ) -> Result<ChunkOutcome> {
        let flags = self.flags(kind);
        #[cfg(test)]
        self.at_the_door.fetch_add(1, Ordering::AcqRel);
        // Held until the group is there. Otherwise another thread could see the device without the
        // space and the accounts without the group.
        let mut device = self.device.lock();
        if seen.is_some_and(|seen| seen != self.seen(kind)) {
            return Ok(ChunkOutcome::Granted);
        }
        let Some(plan) = self.plan(&device, kind) else { return Ok(ChunkOutcome::NoRoom) };
        let end = device.chunks.last_key_value().map_or(0, |(at, c)| at.0 + c.length);
        let start =
            end.checked_next_multiple_of(larder_format::STRIPE_LEN).map(|start| start.max(1 << 20));
        let Some(start) = start.filter(|start| start.checked_add(plan.len).is_some()).map(Logical)
        else {
            return Ok(ChunkOutcome::NoRoom);
        };
        let stripes = plan
            .stripes
            .iter()
            .map(|at| Stripe { devid: device.id, offset: *at, dev_uuid: device.uuid })
            .collect();
        let chunk = Chunk::new(plan.len, flags, stripes);
        let in_map = mapped(start, &chunk);
        let excluded = in_map.superblock_ranges();
        let left = device.usable(Some(&plan));
        let overcommit = self.overcommit(left);
        // What was promised to metadata must stay possible. (A chunk for metadata turns device
        // space into metadata further down.)
        let for_metadata = match kind {
            SpaceKind::Metadata => true,
            SpaceKind::Data => self.accounts.is_mixed(),
            SpaceKind::System => false,
        };
        if !for_metadata {
            let most = match kind {
                SpaceKind::Data => left.saturating_sub(1 << 20) / self.copies(SpaceKind::Metadata),
                _ => u64::MAX,
            };
            if !self.accounts.take_device_space(most, overcommit) {
                return Ok(ChunkOutcome::Promised);
            }
        }
        self.volume.add_chunk(in_map)?;
        for at in &plan.stripes {
            device.taken.insert(*at, plan.len);
            device.told.take(*at, plan.len);
        }
        device.chunks.insert(start, chunk.clone());
        let run = Run::new(start, plan.len);
        if kind == SpaceKind::System {
            self.system_changed.store(true, Ordering::Release);
        }
        tracing::debug!(?kind, %start, len = plan.len, "new chunk");
        txn.note_group(NewGroup { run, chunk });
        self.groups
            .add_new(BlockGroup::empty(run, flags, txn.generation(), &excluded), overcommit)?;
        self.counter(kind).fetch_add(1, Ordering::AcqRel);
        drop(device);
        self.size_global_reserve();
        Ok(ChunkOutcome::Granted)
    }

    /// Keeps what the commit that is under way was promised, in groups that it may use. If `bytes`
    /// would come out of that, a chunk is made first, if the device has room for one. Without room,
    /// what is free now is not promised twice.
    fn spare_the_commit(&self, txns: &impl Running, bytes: u64) -> Result<()> {
        let seen = self.seen(SpaceKind::Metadata);
        let kept = self.kept_by_commit.load(Ordering::Acquire);
        let floor = self.accounts.global_reserve().1.saturating_add(kept);
        if self.accounts.figures(SpaceKind::Metadata).free() >= floor.saturating_add(bytes) {
            return Ok(());
        }
        self.chunk_in_running(txns, SpaceKind::Metadata, seen).map(drop)
    }

    /// Addresses for blocks of subvolume trees.
    pub(crate) fn allocate_blocks(
        &self,
        txns: &impl Running,
        count: usize,
        from: &mut Reservation,
    ) -> Result<Vec<Logical>> {
        self.spare_the_commit(txns, count as u64 * u64::from(self.features.nodesize))?;
        let mut squeezed = false;
        loop {
            let seen = self.seen(SpaceKind::Metadata);
            match self.groups.allocate_blocks(
                ClusterUser::Running,
                count,
                Generation(u64::MAX),
                from,
            ) {
                Ok(blocks) => return Ok(blocks),
                Err(_)
                    if self.chunk_in_running(txns, SpaceKind::Metadata, seen)?
                        == ChunkOutcome::Granted => {}
                // What was promised must be somewhere.
                Err(_) if !squeezed => {
                    squeezed = true;
                    self.release_expired();
                    self.give_back_preallocated();
                }
                Err(need) => return Err(need.into()),
            }
        }
    }

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

    /// An address for a block of a global tree, in a group that the chunk tree of `txn` has.
    pub(crate) fn allocate_for_commit(
        &self,
        txn: &dyn ChunkNotes,
        system: bool,
        from: &mut Reservation,
    ) -> Result<Logical> {
        let mut squeezed = false;
        loop {
            let got = if system {
                self.groups.allocate_system_block(txn.generation(), from)
            } else {
                self.groups.allocate_block(ClusterUser::Committer, txn.generation(), from)
            };
            let kind = if system { SpaceKind::System } else { SpaceKind::Metadata };
            match got {
                Ok(at) => return Ok(at),
                // Chunks that others have made meanwhile are of no use: they belong to a
                // transaction that is too late for this commit.
                Err(_) if self.new_chunk(txn, kind, None)? == ChunkOutcome::Granted => {}
                Err(_) if !squeezed => {
                    squeezed = true;
                    self.epochs.wait_for_oldest();
                    self.hurry();
                    self.give_back_preallocated();
                }
                Err(_) => {
                    self.explain(kind, txn.generation(), from.bytes());
                    return Err(Error::NoSpace);
                }
            }
        }
    }

    /// Says in the log why a commit finds no space, which should not happen.
    fn explain(&self, kind: SpaceKind, committing: Generation, reserved: u64) {
        let figures = self.accounts.figures(kind);
        let global = self.accounts.global_reserve();
        let unallocated = self.device.lock().unallocated();
        tracing::error!(?kind, %committing, reserved, ?figures, ?global, unallocated, "a commit \
            finds no space");
        for group in self.groups.all().iter().filter(|g| g.kind() == kind) {
            let (at, made, usage) = (group.run().start, group.created_in(), group.usage());
            tracing::error!(%at, created_in = %made, ?usage, "block group");
        }
    }

    /// Space for data: `want` bytes in one piece, or else the longest piece of at least `min`
    /// bytes. Both are multiples of 4096.
    ///
    /// # Errors
    /// `NoSpace`.
    #[allow(dead_code)]
    pub(crate) fn allocate_data(
        &self,
        txns: &impl Running,
        want: u64,
        min: u64,
        from: &mut Reservation,
    ) -> Result<Run> {
        if self.accounts.is_mixed() {
            self.spare_the_commit(txns, want)?;
        }
        loop {
            let seen = self.seen(SpaceKind::Data);
            match self.groups.allocate_data(want, min, Generation(u64::MAX), from) {
                Ok(run) => return Ok(run),
                Err(_)
                    if self.chunk_in_running(txns, SpaceKind::Data, seen)?
                        == ChunkOutcome::Granted => {}
                Err(need) => return Err(need.into()),
            }
        }
    }

    /// Gives back allocated data space that no extent refers to.
    #[allow(dead_code)]
    pub(crate) fn give_back(&self, run: Run, to: Option<&mut Reservation>) {
        self.groups.give_back(run, to);
    }

    /// Sum of `used` over all block groups.
    pub(crate) fn disk_used(&self) -> u64 {
        self.groups.all().iter().map(|g| g.disk_used()).sum()
    }

    /// Are two addresses in one block group?
    pub(crate) fn same_group(&self, a: Logical, b: Logical) -> bool {
        self.groups.find(a).is_some_and(|g| b < g.run().end() && b >= g.run().start)
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
            let Some(chunk) = device.chunks.get(&group.run().start) else { continue };
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
        if self.is_discarding() {
            for stripe in removed
                .iter()
                .flat_map(|(_, chunk)| chunk.stripes.iter().map(|s| (s, chunk.length)))
            {
                self.discard_stripe(stripe.0.devid, stripe.0.offset, stripe.1);
            }
        }
        let mut device = self.device.lock();
        for (run, chunk) in removed {
            device.chunks.remove(&run.start);
            for stripe in &chunk.stripes {
                device.taken.remove(&stripe.offset);
            }
            self.volume.map().remove(run.start);
        }
        self.given_back.fetch_add(removed.len() as u64, Ordering::AcqRel);
        drop(device);
        self.note_device_space();
    }

    /// Discards the space of the device that no chunk takes and that the device was not told of
    /// yet, `most` bytes at a time. No chunk is made meanwhile. Returns the bytes.
    ///
    /// # Errors
    /// What the device said.
    pub(crate) fn trim_unallocated(&self, most: u64) -> Result<u64> {
        let mut done = 0;
        loop {
            let mut device = self.device.lock();
            let taken = device.taken.iter().map(|(at, len)| (*at, *len));
            let mut taken: Vec<(Physical, u64)> = taken.chain(device.told.stretches()).collect();
            taken.sort_unstable();
            let Some((at, len)) = device_gaps(&taken, device.size).first().copied() else {
                return Ok(done);
            };
            let len = len.min(most);
            done += self.volume.discard_on(device.id, at, len)?;
            device.told.add(at, len);
        }
    }

    /// Have system chunks come or gone since this was last asked?
    pub(crate) fn system_chunks_changed(&self) -> bool {
        self.system_changed.swap(false, Ordering::AcqRel)
    }

    /// The superblock's array of system chunks; `removed` ones are left out.
    pub(crate) fn system_chunk_array(&self, removed: &[(Run, Chunk)]) -> Result<Vec<u8>> {
        let device = self.device.lock();
        let system = device.chunks.iter().filter(|(at, c)| {
            c.flags.contains(BlockGroupFlags::SYSTEM)
                && !removed.iter().any(|(run, _)| run.start == **at)
        });
        let keyed = system
            .map(|(at, c)| (Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, at.0), c));
        encode_sys_array(keyed).map_err(|e| Error::corrupt(Place::default(), e.0))
    }

    /// Groups whose free-space record must be made anew.
    pub(crate) fn take_rebuilds(&self) -> Vec<Run> {
        std::mem::take(&mut self.rebuild.lock())
    }

    /// Bytes of the device, and those that no chunk takes.
    pub(crate) fn device_bytes(&self) -> (u64, u64) {
        let device = self.device.lock();
        (device.size, device.unallocated())
    }
    /// Bytes that a new chunk for `kind` would have; 0 without room for one.
    pub(crate) fn next_chunk(&self, kind: SpaceKind) -> u64 {
        self.plan(&self.device.lock(), kind).map_or(0, |plan| plan.len)
    }
    /// Name of the profile that chunks for `kind` have.
    pub(crate) fn profile_name(&self, kind: SpaceKind) -> String {
        self.flags(kind).profile().map_or_else(|_| "unknown".into(), |p| p.name().to_owned())
    }

    /// Size and free bytes of the file system as data sees them.
    pub(crate) fn statfs(&self) -> (u64, u64) {
        let copies = self.copies(SpaceKind::Data);
        let unallocated = self.device.lock().unallocated() / copies;
        let data = self.accounts.figures(SpaceKind::Data);
        let free =
            data.free().saturating_sub(self.accounts.reserved_by_operations(SpaceKind::Data));
        (self.total_bytes / copies, free + unallocated)
    }
}

#[cfg(test)]
mod tests;
