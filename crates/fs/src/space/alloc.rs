//! Allocation: block groups, accounts and the device behind them, put together.
//!
//! [`Allocator`] hides when a new chunk is made, and what has to know of it then: the map of the
//! volume, the allocator's groups, the accounts of the reservations, and the transaction whose
//! commit writes its items. The commit of N must not use a group that was made in transaction N+1,
//! because its chunk tree does not have that group. So groups know their transaction.
//!
//! Two threads may both find no space, and each would then make a chunk. So chunks are counted. A
//! thread that looks for space remembers the count ([`Seen`]) and makes no chunk while there is one
//! that it has not seen. Otherwise chunks would be made that no thread needs. A device has room for
//! a few only, and such a chunk is not given back before the commit after the next.

mod changes;
mod convert;
mod failed;
mod lifecycle;
#[cfg(test)]
mod tests;

pub(crate) use convert::NewProfiles;

use crate::api::OpenOptions;
use crate::error::{Error, Result};
use crate::lock::{self, Mutex};
use crate::space::chunks::{ChunkPlan, Wanted, new_chunks, type_of};
use crate::space::device::DeviceSpace;
use crate::space::discard::Discards;
use crate::space::extent_tree::ExtentFeatures;
use crate::space::free_index::Lengths;
use crate::space::groups::{self, ClusterUser, FreeSource, Groups};
use crate::space::preallocated::PreallocatedBlocks;
use crate::space::reserve::{MAX_COPIES_IN_RESERVE, Overcommit, Reservation};
use crate::space::reserve::{Space as Accounts, global_reserve_size};
use crate::space::stripes::{USERS, Unit};
use crate::space::{DeviceUsage, Pinned, Run, SpaceKind};
use crate::tree::{Epoch, Epochs, Roots, TreeOps, Version};
use larder_format::features::Incompat;
use larder_format::items::{BlockGroupFlags, Chunk, Profile};
use larder_format::{Generation, Logical, ObjectId, Superblock};
use larder_volume::{MappedChunk, Volume};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A block group that a transaction has made. The commit writes its items.
#[derive(Debug, Clone)]
pub(crate) struct NewGroup {
    pub(crate) run: Run,
    pub(crate) chunk: Chunk,
}

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

/// The outcome of a request for a chunk.
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

/// The allocator of an open file system.
#[derive(Debug)]
pub(crate) struct Allocator {
    /// How extent items look on this image.
    pub(crate) features: ExtentFeatures,
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) groups: Arc<Groups>,
    pub(super) device: Mutex<DeviceSpace, lock::DeviceSpace>,
    /// Chunks made for data, for metadata and for the chunk tree, and chunks given back. Where data
    /// and metadata are mixed, the second counts both. They change with `device` locked.
    made: [AtomicU64; 3],
    given_back: AtomicU64,
    /// Bytes of all devices, as the superblock counts them.
    total_bytes: AtomicU64,
    /// The same of the devices on which chunks are made, as large as they are going to be.
    planned_bytes: AtomicU64,
    /// Bytes that new chunks for data, for metadata and for the chunk tree have at most.
    longest: [AtomicU64; 3],
    /// Chunks of this type and profile that are open have so many bytes at least before an empty
    /// one is given back.
    kept_open: (AtomicU64, AtomicU64),
    /// Devices of the file system.
    devices: AtomicU64,
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
    pub(super) volume: Arc<Volume>,
    epochs: Arc<Epochs<Pinned>>,
    /// The failures of devices for which chunks have been left ([`Volume::failures`]).
    failures: AtomicU64,
    /// Requests for chunks so far.
    #[cfg(test)]
    at_the_door: AtomicU64,
}

/// A stretch that is looked for, of so many bytes, in a group that is no newer.
#[derive(Clone, Copy)]
struct Room {
    least: u64,
    newest: Generation,
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
        let skinny = incompat.contains(Incompat::SKINNY_METADATA);
        let device = DeviceSpace::load(sb, roots, epoch, volume)?;
        let accounts = Accounts::new(incompat.contains(Incompat::MIXED_GROUPS));
        let groups = Arc::new(Groups::new(accounts.clone(), nodesize));
        let rebuild = load_groups(&groups, options, volume, roots, epoch, nodesize)?;
        let devices = sb.num_devices();
        let discards =
            Discards::new(options.clone(), volume.clone(), groups.clone(), epochs.clone());
        let this = Self {
            features: ExtentFeatures { skinny, nodesize },
            accounts,
            groups,
            device: Mutex::new(device),
            made: Default::default(),
            given_back: AtomicU64::new(0),
            total_bytes: AtomicU64::new(sb.total_bytes.get()),
            planned_bytes: AtomicU64::new(sb.total_bytes.get()),
            longest: [const { AtomicU64::new(u64::MAX) }; 3],
            kept_open: Default::default(),
            devices: AtomicU64::new(devices),
            system_changed: AtomicBool::new(false),
            global_trees: AtomicU64::new(0),
            kept_by_commit: AtomicU64::new(0),
            rebuild: Mutex::new(rebuild),
            discards,
            preallocated: PreallocatedBlocks::default(),
            volume: volume.clone(),
            epochs: epochs.clone(),
            failures: AtomicU64::new(0),
            #[cfg(test)]
            at_the_door: AtomicU64::new(0),
        };
        this.charge_for_rows();
        this.measure_global_trees(roots, epoch)?;
        this.note_device_space();
        Ok(this)
    }

    /// Bytes that a commit takes at most before what it frees can be used.
    fn one_commit(&self) -> u64 {
        // Each user of tree blocks leaves rows that it has begun and does not fill.
        let begun =
            USERS as u64 * (self.groups.widest_row(SpaceKind::Metadata, self.device_count()) - 1);
        let blocks = SLACK_BLOCKS + begun;
        self.global_trees() + blocks * u64::from(self.features.nodesize)
    }
    /// Makes the global reserve as large as commits now need it.
    fn size_global_reserve(&self) {
        let metadata = self.accounts.figures(SpaceKind::Metadata);
        self.accounts.set_global_reserve(global_reserve_size(self.one_commit(), &metadata));
    }
    /// Bytes of metadata without which commits would be short of space: the least that the global
    /// reserve may have.
    pub(crate) fn needed_by_commits(&self) -> u64 {
        2 * self.one_commit().min(MAX_COPIES_IN_RESERVE)
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

    /// The metadata that may be promised where chunks can still get so many bytes of it.
    fn overcommit(&self, capacity: u64) -> Overcommit {
        // A chunk needs whole stripes in one place, so a little is always lost, on each device.
        let devices = self.volume.devices_for_chunks() as u64;
        Overcommit(capacity.saturating_sub(devices * (4 << 20)) / 8 * 7)
    }
    /// Bytes that can still get into chunks of metadata, after `plan` is carried out.
    fn metadata_capacity(&self, device: &DeviceSpace, plan: Option<&ChunkPlan>) -> u64 {
        device.capacity(&self.wanted(SpaceKind::Metadata), plan)
    }
    /// Chunks have gone, or devices. Tells the accounts how much device space can still become
    /// metadata.
    pub(crate) fn note_device_space(&self) {
        self.size_global_reserve();
        let device = self.device.lock();
        self.accounts.set_overcommit(self.overcommit(self.metadata_capacity(&device, None)));
    }

    /// Type and profile that new chunks get.
    fn flags(&self, kind: SpaceKind) -> BlockGroupFlags {
        let target = self.groups.targets().get(kind);
        self.flags_as_of(kind, target, self.volume.devices_for_chunks())
    }
    /// Those that the chunks have which there are: new ones have others while devices are missing.
    fn flags_so_far(&self, kind: SpaceKind) -> BlockGroupFlags {
        self.flags_as_of(kind, None, 0)
    }
    fn flags_as_of(
        &self,
        kind: SpaceKind,
        target: Option<Profile>,
        devices: usize,
    ) -> BlockGroupFlags {
        let all = self.groups.all();
        let of_kind = all.iter().map(|g| g.flags()).filter(|f| f.contains(type_of(kind)));
        new_chunks(kind, of_kind, target, devices)
    }
    /// Copies of each byte, by the chunks that there are.
    pub(crate) fn copies(&self, kind: SpaceKind) -> u64 {
        u64::from(profile_of(self.flags_so_far(kind)).copies())
    }

    /// Where a chunk for `kind` would lie, if the devices have room for one.
    fn plan(&self, device: &DeviceSpace, kind: SpaceKind) -> Option<ChunkPlan> {
        device.plan(&self.wanted(kind))
    }
    fn wanted(&self, kind: SpaceKind) -> Wanted {
        self.wanted_as(kind, self.flags(kind))
    }
    fn wanted_as(&self, kind: SpaceKind, flags: BlockGroupFlags) -> Wanted {
        Wanted {
            kind,
            profile: profile_of(flags),
            total: self.planned_bytes.load(Ordering::Relaxed),
            most: Some(self.longest[kind as usize].load(Ordering::Relaxed))
                .filter(|most| *most < u64::MAX),
        }
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
    /// ask for another chunk.
    pub(crate) fn seen(&self, kind: SpaceKind) -> Seen {
        Seen(self.counter(kind).load(Ordering::Acquire))
    }
    /// How many chunks have come and gone.
    pub(crate) fn chunk_changes(&self) -> u64 {
        self.made.iter().chain([&self.given_back]).map(|n| n.load(Ordering::Acquire)).sum()
    }

    /// Keeps what the commit that is under way was promised, in groups that it may use. If `bytes`
    /// would come out of that, a chunk is made first, provided that the device has room for one.
    /// Without room, what is free now is not promised twice.
    fn spare_the_commit(&self, txns: &impl Running, bytes: u64) -> Result<()> {
        let seen = self.seen(SpaceKind::Metadata);
        let kept = self.kept_by_commit.load(Ordering::Acquire);
        let floor = self.accounts.global_reserve().1.saturating_add(kept);
        if self.accounts.figures(SpaceKind::Metadata).free() >= floor.saturating_add(bytes) {
            return Ok(());
        }
        self.chunk_in_running(txns, SpaceKind::Metadata, seen).map(drop)
    }

    /// Addresses for blocks of subvolume trees, which the commit of the running transaction `of`
    /// writes.
    pub(crate) fn allocate_blocks(
        &self,
        txns: &impl Running,
        of: Generation,
        count: usize,
        from: &mut Reservation,
    ) -> Result<Vec<Logical>> {
        self.spare_the_commit(txns, count as u64 * u64::from(self.features.nodesize))?;
        let room = Room { least: u64::from(self.features.nodesize), newest: Generation(u64::MAX) };
        self.prepare_target(SpaceKind::Metadata, room, |seen| {
            self.chunk_in_running(txns, SpaceKind::Metadata, seen)
        })?;
        let mut squeezed = false;
        loop {
            let seen = self.seen(SpaceKind::Metadata);
            match self.groups.allocate_blocks(
                (ClusterUser::Running, Unit::Transaction(of)),
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
                    self.discards.release_expired();
                    self.give_back_preallocated();
                }
                Err(need) => return Err(need.into()),
            }
        }
    }

    /// An address for a block of a global tree, in a group that the chunk tree of `txn` has.
    pub(crate) fn allocate_for_commit(
        &self,
        txn: &dyn ChunkNotes,
        system: bool,
        from: &mut Reservation,
    ) -> Result<Logical> {
        let kind = if system { SpaceKind::System } else { SpaceKind::Metadata };
        let room = Room { least: u64::from(self.features.nodesize), newest: txn.generation() };
        self.prepare_target(kind, room, |_| self.new_chunk(txn, kind, None))?;
        let mut squeezed = false;
        loop {
            let of = txn.generation();
            let got = if system {
                self.groups.allocate_system_block(of, from)
            } else {
                let unit = (ClusterUser::Committer, Unit::Transaction(of));
                self.groups.allocate_block(unit, of, from)
            };
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

    /// A piece of space for data, in whole sectors.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn allocate_data(
        &self,
        txns: &impl Running,
        wanted: Lengths,
        from: &mut Reservation,
    ) -> Result<Run> {
        if self.accounts.is_mixed() {
            self.spare_the_commit(txns, wanted.most)?;
        }
        let make_chunk = |seen| self.chunk_in_running(txns, SpaceKind::Data, seen);
        self.leave_failed_devices(make_chunk);
        let room = Room { least: wanted.least, newest: Generation(u64::MAX) };
        self.prepare_target(SpaceKind::Data, room, make_chunk)?;
        loop {
            let seen = self.seen(SpaceKind::Data);
            match self.groups.allocate_data(wanted, Generation(u64::MAX), from) {
                Ok(run) => return Ok(run),
                Err(_) if make_chunk(seen)? == ChunkOutcome::Granted => {}
                Err(need) => return Err(need.into()),
            }
        }
    }

    /// Gives back allocated data space that no extent refers to.
    pub(crate) fn give_back(&self, run: Run, to: Option<&mut Reservation>) {
        self.groups.give_back(run, to);
    }

    /// Addresses that operations of the transaction `of` did not need. Where there is parity, those
    /// of another transaction lie beside blocks of that, so they are given back.
    pub(crate) fn take_preallocated(&self, of: Generation) -> Vec<Logical> {
        let Some((made, set)) = self.preallocated.take() else { return Vec::new() };
        let shares_row =
            |at: &Logical| self.groups.find(*at).is_some_and(|g| g.stripes().is_some());
        if made == of || !set.iter().any(shares_row) {
            return set;
        }
        self.give_addresses_back(set);
        Vec::new()
    }
    /// Keeps addresses that an operation of `of` did not need for the next one, as far as there is
    /// room for them.
    pub(crate) fn keep_preallocated(&self, of: Generation, set: Vec<Logical>) {
        let is_closed = |at: &Logical| self.groups.find(*at).is_some_and(|g| g.is_read_only());
        let (closed, set): (Vec<_>, Vec<_>) = set.into_iter().partition(is_closed);
        self.give_addresses_back(closed);
        self.give_addresses_back(self.preallocated.keep(of, set));
    }
    /// Gives all addresses back that operations did not need.
    pub(crate) fn give_back_preallocated(&self) {
        self.give_addresses_back(self.preallocated.take_all());
    }
    fn give_addresses_back(&self, addresses: Vec<Logical>) {
        for at in addresses {
            self.groups.give_back(Run::new(at, u64::from(self.features.nodesize)), None);
        }
    }

    /// Space is short: see [`Discards::hurry`].
    pub(crate) fn hurry(&self) {
        self.discards.hurry();
    }

    /// Sum of `used` over all block groups.
    pub(crate) fn disk_used(&self) -> u64 {
        self.groups.all().iter().map(|g| g.disk_used()).sum()
    }

    /// Are two addresses in one block group?
    pub(crate) fn same_group(&self, a: Logical, b: Logical) -> bool {
        self.groups.find(a).is_some_and(|g| b < g.run().end() && b >= g.run().start)
    }

    /// Groups whose free-space record must be made anew.
    pub(crate) fn take_rebuilds(&self) -> Vec<Run> {
        std::mem::take(&mut self.rebuild.lock())
    }

    /// Bytes of all devices, and those that no chunk takes.
    pub(crate) fn device_bytes(&self) -> (u64, u64) {
        let device = self.device.lock();
        (device.size(), device.unallocated())
    }
    /// All devices, and what chunks take of them.
    pub(crate) fn devices(&self) -> Vec<DeviceUsage> {
        self.device.lock().usage()
    }
    /// Bytes that a new chunk for `kind` would have; 0 without room for one.
    pub(crate) fn next_chunk(&self, kind: SpaceKind) -> u64 {
        self.plan(&self.device.lock(), kind).map_or(0, |plan| plan.len)
    }
    /// Blocks that the first block of a step of a log may take along.
    pub(crate) fn blocks_in_row(&self) -> u64 {
        self.groups.widest_row(SpaceKind::Metadata, self.device_count())
    }
    /// Name of the profile that chunks for `kind` have.
    pub(crate) fn profile_name(&self, kind: SpaceKind) -> String {
        let profile = self.flags_so_far(kind).profile();
        profile.map_or_else(|_| "unknown".into(), |p| p.name().to_owned())
    }

    /// Size and free bytes of the file system as data sees them.
    pub(crate) fn statfs(&self) -> (u64, u64) {
        let copies = self.copies(SpaceKind::Data);
        let wanted = self.wanted(SpaceKind::Data);
        let unallocated = self.device.lock().capacity(&wanted, None);
        let data = self.accounts.figures(SpaceKind::Data);
        // What is delayed is charged for the worst case.
        let reserved = self.accounts.reserved_by_operations(SpaceKind::Data);
        let free = data.free().saturating_sub(reserved / self.accounts.charge(SpaceKind::Data));
        (self.total_bytes.load(Ordering::Relaxed) / copies, free + unallocated)
    }
}

fn profile_of(flags: BlockGroupFlags) -> Profile {
    flags.profile().unwrap_or(Profile::Single)
}

/// Reads the block groups of all chunks, and their free space. Returns those whose record in the
/// free-space tree is wrong.
fn load_groups(
    groups: &Groups,
    options: &OpenOptions,
    volume: &Volume,
    roots: &Roots,
    epoch: &Epoch,
    nodesize: u32,
) -> Result<Vec<Run>> {
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
        let id = items_tree.id();
        let loaded = groups::load(&chunk, &mut items, id, &mut source, &mut extents, nodesize)?;
        if loaded.rebuild_free_space {
            rebuild.push(loaded.group.run());
        }
        let is_on_seed = chunk.stripes.iter().any(|s| volume.is_seed(s.device));
        let group = loaded.group.with_columns(columns(options, &chunk)).on_seed(is_on_seed);
        let group = groups.add(group)?;
        if is_on_seed {
            groups.set_read_only(&group, true);
            group.freeze();
        }
    }
    Ok(rebuild)
}

/// Columns of a chunk that share their parity.
fn columns(options: &OpenOptions, chunk: &MappedChunk) -> u64 {
    if fault!(options.tuning, RowsShared) { 1 } else { chunk.parity_columns() }
}
