//! Block groups: which of them an allocation comes from.
//!
//! A group's bytes are free, held back (`stripes`, where there is parity), allocated, pinned or
//! excluded (superblock copies), and that is asserted. An allocation takes from the free index and
//! at the same time turns reserved bytes into used ones, in the account of the group's kind. Freed
//! bytes are pinned. They come back when the superblock without them is durable.
//!
//! Data comes from where the last data came from, as long as that holds the whole request. Tree
//! blocks come from *clusters*: windows of a group from which addresses are handed out in rising
//! order, so that blocks that are allocated together are written in one go. The committer and the
//! running transaction have a cluster each. Otherwise their blocks, which are written at different
//! times, would alternate on the device.
//!
//! A superblock must reach everything it refers to. So the committer of transaction N takes blocks
//! only from groups that N's chunk tree has (`created_in <= N`), whatever the running transaction
//! has added meanwhile.
//!
//! Lock order: data hint or clusters, map of groups, group, account.

mod discard;
mod load;
mod read_only;

pub(crate) use load::{FreeSource, load, scan_used};

use crate::error::{Error, Place, Result};
use crate::lock::{self, Mutex, RwLock};
use crate::space::free_index::{Blocks, FreeIndex, Lengths};
use crate::space::reserve::{Figures, Overcommit, Reservation, Space};
use crate::space::stripes::{Change, HeldBack, Stripes, Unit};
use crate::space::targets::Targets;
use crate::space::{Run, SpaceKind};
use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{Generation, Logical, MAX_DATA_EXTENT, SECTOR_SIZE, STRIPE_LEN};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a cluster: as much as a commit writes with one request of a good size.
const CLUSTER: u64 = 1 << 20;

/// No block group of the kind has room: a new chunk is needed. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeedChunk(pub SpaceKind);

impl From<NeedChunk> for Error {
    fn from(_: NeedChunk) -> Self {
        Self::NoSpace
    }
}

/// Which thread allocates tree blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClusterUser {
    /// Operations of the running transaction.
    Running = 0,
    /// The committer.
    Committer = 1,
}

impl ClusterUser {
    /// Which rows that were begun are those of `unit`. A log has its own beside the cluster of the
    /// running transaction.
    fn of(self, unit: Unit) -> usize {
        match unit {
            Unit::Transaction(_) => self as usize,
            Unit::LogStep(_) => 2,
        }
    }
}

#[derive(Debug)]
struct GroupState {
    free: FreeIndex,
    /// What rows hold back, where there is parity.
    rows: Option<HeldBack>,
    allocated: u64,
    pinned: u64,
    /// Bytes that were taken out of the free index for the superblock copies.
    excluded: u64,
    disk_used: u64,
    read_only: bool,
    /// Because of devices that have failed (`read_only`).
    left: bool,
    /// Nothing is written in place, either.
    frozen: bool,
    removed: bool,
    /// Space was freed in it and not discarded.
    undiscarded: bool,
}

impl GroupState {
    fn held(&self) -> u64 {
        self.rows.as_ref().map_or(0, HeldBack::total)
    }
    /// `run` was taken out of the free index. Returns how many bytes are held back because of it.
    fn hold(&mut self, run: Run) -> u64 {
        self.rows.as_mut().map_or(0, |rows| rows.hold(run, &mut self.free))
    }
    /// `run` is not in use any more. Returns how many bytes have become free: with parity, these
    /// may be fewer, or more.
    fn release(&mut self, run: Run) -> u64 {
        match &mut self.rows {
            Some(rows) => rows.give(run, &mut self.free),
            None => {
                self.free.insert(run);
                run.len
            }
        }
    }
}

/// A block group in memory.
#[derive(Debug)]
pub(crate) struct BlockGroup {
    run: Run,
    flags: BlockGroupFlags,
    /// Where there is parity.
    stripes: Option<Stripes>,
    created_in: Generation,
    /// Does a part of it lie on a device that is never written?
    is_on_seed: bool,
    state: Mutex<GroupState, lock::Group>,
}

/// A group's figures at one moment, for statistics and for decisions about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) struct GroupUsage {
    pub(crate) run: Run,
    pub(crate) flags: BlockGroupFlags,
    pub(crate) free: u64,
    pub(crate) held: u64,
    pub(crate) allocated: u64,
    pub(crate) pinned: u64,
    pub(crate) disk_used: u64,
    pub(crate) read_only: bool,
}

impl BlockGroup {
    /// A group with these `free` stretches. `excluded` ranges are taken out of them for good.
    #[must_use]
    pub(crate) fn new(
        run: Run,
        flags: BlockGroupFlags,
        created_in: Generation,
        disk_used: u64,
        mut free: FreeIndex,
        excluded: &[(Logical, u64)],
    ) -> Self {
        let excluded =
            excluded.iter().map(|(at, len)| free.remove_range(Run::new(*at, *len))).sum();
        let allocated = run.len - free.total() - excluded;
        let state = GroupState {
            free,
            rows: None,
            allocated,
            pinned: 0,
            excluded,
            disk_used,
            read_only: false,
            left: false,
            frozen: false,
            removed: false,
            undiscarded: false,
        };
        Self { run, flags, stripes: None, created_in, is_on_seed: false, state: Mutex::new(state) }
    }
    /// The same group, in which parity covers elements of so many columns.
    #[must_use]
    pub(crate) fn with_columns(mut self, columns: u64) -> Self {
        // Alone in its row, a sector shares its parity with nothing.
        if columns > 1 {
            let stripes = Stripes { start: self.run.start, columns };
            self.stripes = Some(stripes);
            let mut s = self.state.lock();
            s.rows = Some(HeldBack::separate(stripes, &mut s.free));
        }
        self
    }
    /// Does it lie on a seed, where nothing moves?
    pub(crate) fn is_on_seed(&self) -> bool {
        self.is_on_seed
    }
    /// The same group, of which a part lies on a seed. It is closed and frozen for good, once it
    /// was closed.
    #[must_use]
    pub(crate) fn on_seed(self, is_on_seed: bool) -> Self {
        Self { is_on_seed, ..self }
    }
    /// A new, empty group.
    #[must_use]
    pub(crate) fn empty(
        run: Run,
        flags: BlockGroupFlags,
        created_in: Generation,
        excluded: &[(Logical, u64)],
    ) -> Self {
        let mut free = FreeIndex::new();
        free.insert(run);
        Self::new(run, flags, created_in, 0, free, excluded)
    }
    /// How its full stripes lie, where parity makes things that lie in one depend on each other.
    #[must_use]
    pub(crate) fn stripes(&self) -> Option<Stripes> {
        self.stripes
    }
    /// Its stretch of the logical space.
    #[must_use]
    pub(crate) fn run(&self) -> Run {
        self.run
    }
    /// Type and profile.
    #[must_use]
    pub(crate) fn flags(&self) -> BlockGroupFlags {
        self.flags
    }
    /// The transaction that added it.
    #[must_use]
    pub(crate) fn created_in(&self) -> Generation {
        self.created_in
    }
    /// The account that it belongs to.
    #[must_use]
    pub(crate) fn kind(&self) -> SpaceKind {
        if self.flags.contains(BlockGroupFlags::SYSTEM) {
            SpaceKind::System
        } else if self.flags.contains(BlockGroupFlags::DATA) {
            SpaceKind::Data
        } else {
            SpaceKind::Metadata
        }
    }
    fn serves(&self, kind: SpaceKind) -> bool {
        self.flags.contains(match kind {
            SpaceKind::Data => BlockGroupFlags::DATA,
            SpaceKind::Metadata => BlockGroupFlags::METADATA,
            SpaceKind::System => BlockGroupFlags::SYSTEM,
        })
    }
    /// Figures of this moment.
    #[must_use]
    pub(crate) fn usage(&self) -> GroupUsage {
        let s = self.state.lock();
        GroupUsage {
            run: self.run,
            flags: self.flags,
            free: s.free.total(),
            held: s.held(),
            allocated: s.allocated,
            pinned: s.pinned,
            disk_used: s.disk_used,
            read_only: s.read_only,
        }
    }
    /// `used` of the block group item: what is allocated according to the applied references. Only
    /// the committer changes it.
    #[must_use]
    pub(crate) fn disk_used(&self) -> u64 {
        self.state.lock().disk_used
    }
    /// An extent entered the extent tree (positive) or left it (negative). Returns the new `used`.
    ///
    /// # Errors
    /// `Corrupt` when it would be negative or more than the group has.
    pub(crate) fn apply_used(&self, delta: i64) -> Result<u64> {
        let mut s = self.state.lock();
        let used = s.disk_used.checked_add_signed(delta).filter(|n| *n <= self.run.len);
        s.disk_used = used.ok_or_else(|| {
            let what = format!("block group's used bytes do not add up: {} {delta:+}", s.disk_used);
            Error::corrupt(Place::block(self.run.start), what)
        })?;
        Ok(s.disk_used)
    }
    /// May nothing be allocated?
    pub(crate) fn is_read_only(&self) -> bool {
        self.state.lock().read_only
    }
    /// Forbids writing in place as well.
    pub(crate) fn freeze(&self) {
        self.state.lock().frozen = true;
    }
    /// May nothing be written in place?
    pub(crate) fn is_frozen(&self) -> bool {
        self.state.lock().frozen
    }
    /// Free runs as the allocator sees them.
    #[cfg(test)]
    pub(crate) fn free_runs(&self) -> Vec<Run> {
        self.state.lock().free.runs().collect()
    }

    /// The state, if the group may be allocated from.
    fn serving(
        &self,
        newest: Generation,
        from: &Reservation,
    ) -> Option<lock::Locked<'_, GroupState>> {
        if self.created_in > newest {
            return None;
        }
        let s = self.state.lock();
        if s.read_only || s.removed {
            return None;
        }
        assert!(
            self.serves(from.kind()),
            "{:?} reservation for a group of {:?}",
            from.kind(),
            self.flags
        );
        Some(s)
    }

    /// Takes space out, if the group may be allocated from.
    fn take(
        &self,
        newest: Generation,
        from: &mut Reservation,
        f: impl FnOnce(&mut FreeIndex) -> Option<Run>,
    ) -> Option<Run> {
        let mut s = self.serving(newest, from)?;
        let run = f(&mut s.free)?;
        let held = s.hold(run);
        s.allocated += run.len;
        from.consume(run.len, Change { more: held, fewer: 0 });
        Some(run)
    }
    /// Takes a block for a unit out: from rows that the unit has begun, or by `f`, which begins
    /// rows. Says whether it was `f`.
    fn take_block(
        &self,
        newest: Generation,
        (user, unit): (ClusterUser, Unit),
        from: &mut Reservation,
        f: impl FnOnce(&mut FreeIndex) -> Option<Run>,
    ) -> Option<(Run, bool)> {
        let mut s = self.serving(newest, from)?;
        let user = user.of(unit);
        if let Some(run) = s.rows.as_mut().and_then(|rows| rows.take_begun(user, unit)) {
            s.allocated += run.len;
            from.consume(run.len, Change { more: 0, fewer: run.len });
            return Some((run, false));
        }
        let run = f(&mut s.free)?;
        let held = s.hold(run);
        if let Some(rows) = &mut s.rows {
            rows.begin(user, unit, run);
        }
        s.allocated += run.len;
        from.consume(run.len, Change { more: held, fewer: 0 });
        Some((run, true))
    }
    /// Takes a piece for data out.
    fn take_data(
        &self,
        newest: Generation,
        from: &mut Reservation,
        wanted: Lengths,
        hint: Option<Logical>,
    ) -> Option<Run> {
        // What is longer than an element takes whole rows of full stripes, as far as it can.
        match self.stripes.filter(|_| wanted.most > STRIPE_LEN) {
            None => self.take(newest, from, |f| f.allocate(wanted, hint)),
            Some(s) => {
                self.take(newest, from, |f| f.allocate_aligned(wanted, hint, (s.start, s.len())))
            }
        }
    }
    fn check(&self, s: &GroupState) {
        let sum = s.free.total() + s.held() + s.allocated + s.pinned + s.excluded;
        assert_eq!(sum, self.run.len, "block group {} does not add up", self.run.start);
    }
}

/// What a run was before it became free.
enum Was<'a> {
    /// Allocated, from a reservation that may get it back.
    Allocated(Option<&'a mut Reservation>),
    Pinned {
        discarded: bool,
    },
}

/// The part of a window behind what was taken from it.
fn rest(window: Run, taken: Run) -> Option<Run> {
    Run::between(taken.end(), window.end())
}

/// All block groups of a file system, and allocation from them.
#[derive(Debug)]
pub(crate) struct Groups {
    space: Arc<Space>,
    nodesize: u32,
    groups: RwLock<BTreeMap<Logical, Arc<BlockGroup>>, lock::GroupMap>,
    /// Where the next data should go.
    data_hint: Mutex<Logical, lock::Hint>,
    /// Rest of the window of each user of tree blocks.
    clusters: Mutex<[Option<Run>; 2], lock::Hint>,
    /// The last published transaction: the committer may use groups up to the next one at most.
    published: AtomicU64,
    /// Steps of logs so far.
    log_steps: AtomicU64,
    targets: Targets,
}

impl Groups {
    /// No groups yet.
    #[must_use]
    pub(crate) fn new(space: Arc<Space>, nodesize: u32) -> Self {
        Self {
            space,
            nodesize,
            groups: RwLock::default(),
            data_hint: Mutex::new(Logical(0)),
            clusters: Mutex::default(),
            published: AtomicU64::new(0),
            log_steps: AtomicU64::new(0),
            targets: Targets::default(),
        }
    }
    /// A transaction was published. A commit after it may use the groups that it made.
    pub(crate) fn set_published(&self, generation: Generation) {
        self.published.store(generation.0, Ordering::Relaxed);
    }
    /// What chunks are converted to.
    pub(crate) fn targets(&self) -> &Targets {
        &self.targets
    }
    /// From now on space is looked for in groups with these profiles first.
    pub(crate) fn convert_to(&self, kind: SpaceKind, profile: Option<Profile>) {
        let mut hint = self.data_hint.lock();
        self.targets.set(kind, profile);
        *hint = Logical(0);
    }
    /// Is a stretch of `bytes` for `kind` free in a group that is not newer than `newest`, and that
    /// has the profile to which the kind is converted?
    pub(crate) fn target_has_room(&self, kind: SpaceKind, newest: Generation, bytes: u64) -> bool {
        self.all().iter().any(|g| {
            let has_room = || {
                let s = g.state.lock();
                !s.read_only && !s.removed && s.free.largest() >= bytes
            };
            g.serves(kind)
                && g.created_in <= newest
                && self.targets.is_met(kind, g.flags)
                && has_room()
        })
    }
    /// Free bytes for `kind` in groups with the profile to which it is converted.
    pub(crate) fn free_in_target(&self, kind: SpaceKind) -> u64 {
        let is_usable = |g: &Arc<BlockGroup>| g.serves(kind) && self.targets.is_met(kind, g.flags);
        let all = self.all().into_iter().filter(is_usable).map(|g| g.usage());
        all.filter(|usage| !usage.read_only).map(|usage| usage.free).sum()
    }
    /// The accounts.
    #[must_use]
    pub(crate) fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Adds a group; its space counts from now on.
    ///
    /// # Errors
    /// `Corrupt` when it overlaps another group, or holds data and metadata although they have
    /// accounts of their own.
    pub(crate) fn add(&self, group: BlockGroup) -> Result<Arc<BlockGroup>> {
        self.add_and(group, |kind, change| self.space.change(kind, change))
    }
    /// As [`Self::add`], for a group that takes device space, and so leaves `overcommit`.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(crate) fn add_new(
        &self,
        group: BlockGroup,
        overcommit: Overcommit,
    ) -> Result<Arc<BlockGroup>> {
        self.add_and(group, |kind, change| self.space.grow(kind, overcommit, change))
    }
    fn add_and(
        &self,
        group: BlockGroup,
        count: impl FnOnce(SpaceKind, &dyn Fn(&mut Figures)),
    ) -> Result<Arc<BlockGroup>> {
        // Such a group would be counted in one account and serve both.
        if !self.space.is_mixed()
            && group.serves(SpaceKind::Data)
            && group.serves(SpaceKind::Metadata)
        {
            let what = "block group of data and metadata on a file system without mixed groups";
            return Err(Error::corrupt(Place::block(group.run.start), what));
        }
        let group = Arc::new(group);
        if group.created_in.0 > 0 {
            // See `serving`: operations leave the older groups to the commit.
            self.clusters.lock()[ClusterUser::Running as usize] = None;
            if self.space.is_mixed() {
                *self.data_hint.lock() = group.run.start;
            }
        }
        let mut groups = self.groups.write();
        let before = groups.range(..group.run.end()).next_back();
        if before.is_some_and(|(_, g)| g.run.end() > group.run.start) {
            return Err(Error::corrupt(Place::block(group.run.start), "block groups overlap"));
        }
        let (used, unusable) = {
            let s = group.state.lock();
            group.check(&s);
            (s.allocated, s.excluded + s.held())
        };
        count(group.kind(), &|p| {
            p.total += group.run.len;
            p.used += used;
            p.unusable += unusable;
        });
        groups.insert(group.run.start, Arc::clone(&group));
        Ok(group)
    }

    /// The group that holds an address.
    #[must_use]
    pub(crate) fn find(&self, at: Logical) -> Option<Arc<BlockGroup>> {
        let groups = self.groups.read();
        let (_, group) = groups.range(..=at).next_back()?;
        (at < group.run.end()).then(|| Arc::clone(group))
    }
    /// The group that holds all of a run.
    ///
    /// # Errors
    /// `Corrupt` when there is none: something on disk refers to space outside of block groups.
    pub(crate) fn find_run(&self, run: Run) -> Result<Arc<BlockGroup>> {
        self.find(run.start).filter(|g| g.run.contains(run)).ok_or_else(|| {
            Error::corrupt(
                Place::block(run.start),
                format!("{} bytes are in no block group", run.len),
            )
        })
    }
    /// All groups in address order.
    #[must_use]
    pub(crate) fn all(&self) -> Vec<Arc<BlockGroup>> {
        self.groups.read().values().cloned().collect()
    }
    /// Sectors of the longest row that a kind may have, on so many devices: what a sector may hold
    /// back, with itself. 1 where there is no parity.
    pub(crate) fn widest_row(&self, kind: SpaceKind, devices: u64) -> u64 {
        // New chunks take all devices.
        let of_new = |parity: u16| match parity {
            0 => 1,
            parity => devices.saturating_sub(parity.into()),
        };
        let parity = |g: &BlockGroup| g.flags.profile().map_or(0, Profile::parity);
        let all = self.all().into_iter().filter(|g| g.serves(kind));
        all.filter(|g| parity(g) > 0)
            .map(|g| g.stripes.map_or(1, |s| s.columns).max(of_new(parity(&g))))
            .chain(self.targets.get(kind).map(|target| of_new(target.parity())))
            .max()
            .unwrap_or(1)
            .max(1)
    }
    /// A number for a step of a log.
    pub(crate) fn next_log_step(&self) -> Unit {
        Unit::LogStep(self.log_steps.fetch_add(1, Ordering::Relaxed))
    }
    /// Groups of a kind, in the order in which to look for space. Where chunks are converted, those
    /// come first that have the new profile. Else those come first that are not published: the
    /// commit that is under way must not use these, and what is free elsewhere may be all that it
    /// has.
    fn serving(&self, kind: SpaceKind) -> Vec<Arc<BlockGroup>> {
        let mut all: Vec<_> =
            self.groups.read().values().filter(|g| g.serves(kind)).cloned().collect();
        let published = self.published.load(Ordering::Relaxed);
        all.sort_by_key(|g| (!self.targets.is_met(kind, g.flags), g.created_in.0 <= published));
        all
    }

    /// Allocates a piece for data, in a group that is not newer than `newest`. Never more than a
    /// data extent can have.
    ///
    /// # Errors
    /// [`NeedChunk`] when no group has a piece that is long enough.
    pub(crate) fn allocate_data(
        &self,
        wanted: Lengths,
        newest: Generation,
        from: &mut Reservation,
    ) -> std::result::Result<Run, NeedChunk> {
        // Linux preallocates longer ones, and they move as they are.
        let longest = MAX_DATA_EXTENT.max(wanted.least);
        let wanted = Lengths { most: wanted.most.min(longest), ..wanted };
        let sectors = |len: u64| len.is_multiple_of(u64::from(SECTOR_SIZE));
        assert!(
            (1..=wanted.most).contains(&wanted.least)
                && sectors(wanted.most)
                && sectors(wanted.least)
        );
        let whole = Lengths::exactly(wanted.most);
        let mut hint = self.data_hint.lock();
        let is_met = |g: &Arc<BlockGroup>| self.targets.is_met(SpaceKind::Data, g.flags);
        let near = self.find(*hint).filter(|g| g.serves(SpaceKind::Data) && is_met(g));
        let got = near
            .and_then(|g| g.take_data(newest, from, whole, Some(*hint)))
            .or_else(|| {
                let longest = |g: &Arc<BlockGroup>| {
                    let s = g.state.lock();
                    if s.read_only || g.created_in > newest { 0 } else { s.free.largest() }
                };
                let (met, others): (Vec<_>, Vec<_>) =
                    self.serving(SpaceKind::Data).into_iter().partition(is_met);
                [met, others].iter().find_map(|groups| {
                    groups.iter().find_map(|g| g.take_data(newest, from, whole, None)).or_else(
                        || {
                            let best = groups.iter().max_by_key(|g| longest(g))?;
                            best.take_data(newest, from, wanted, None)
                        },
                    )
                })
            })
            .ok_or(NeedChunk(SpaceKind::Data))?;
        *hint = got.end();
        Ok(got)
    }

    /// Allocates `count` tree blocks, in rising order as far as possible, in groups that are not
    /// newer than `newest`.
    ///
    /// # Errors
    /// [`NeedChunk`] when there is no room for all of them; none is allocated then.
    pub(crate) fn allocate_blocks(
        &self,
        of: (ClusterUser, Unit),
        count: usize,
        newest: Generation,
        from: &mut Reservation,
    ) -> std::result::Result<Vec<Logical>, NeedChunk> {
        let mut out = Vec::with_capacity(count);
        while out.len() < count {
            match self.allocate_block(of, newest, from) {
                Ok(at) => out.push(at),
                Err(e) => {
                    out.into_iter().for_each(|at| self.give_back(self.block(at), Some(&mut *from)));
                    return Err(e);
                }
            }
        }
        Ok(out)
    }

    fn blocks(&self) -> Blocks {
        let size = u64::from(self.nodesize);
        Blocks { size, align: size }
    }
    fn block(&self, at: Logical) -> Run {
        Run::new(at, u64::from(self.nodesize))
    }

    /// Allocates one tree block of a unit, in a group that is not newer than `newest`.
    ///
    /// # Errors
    /// [`NeedChunk`].
    pub(crate) fn allocate_block(
        &self,
        of: (ClusterUser, Unit),
        newest: Generation,
        from: &mut Reservation,
    ) -> std::result::Result<Logical, NeedChunk> {
        let blocks = self.blocks();
        let mut clusters = self.clusters.lock();
        let (mine, other) = (of.0 as usize, 1 - of.0 as usize);
        // The window never goes back to space that was freed behind it: rising order is the point
        // of a cluster. With parity its group has what the unit has begun, so it stays to the last.
        let behind = |group: &BlockGroup, window: Run, got: Run| {
            rest(window, got).or(group.stripes.map(|_| window))
        };
        if let Some(window) = clusters[mine] {
            let is_met = |g: &Arc<BlockGroup>| {
                g.serves(SpaceKind::Metadata) && self.targets.is_met(SpaceKind::Metadata, g.flags)
            };
            let group = self.find(window.start).filter(is_met);
            let got = group
                .as_ref()
                .and_then(|g| g.take_block(newest, of, from, |f| f.allocate_in(window, blocks)));
            if let Some(((got, new), group)) = got.zip(group) {
                if new {
                    clusters[mine] = behind(&group, window, got);
                }
                return Ok(got.start);
            }
            clusters[mine] = None;
        }
        let groups = self.serving(SpaceKind::Metadata);
        // Looks for a window that is clear of the other user's, then for any window.
        for avoid in [clusters[other], None] {
            for group in &groups {
                let mut window = None;
                let got = group.take_block(newest, of, from, |f| {
                    window = f.window(CLUSTER, blocks, avoid);
                    f.allocate_in(window?, blocks)
                });
                if let Some((got, _)) = got {
                    clusters[mine] = window.and_then(|window| behind(group, window, got));
                    return Ok(got.start);
                }
            }
        }
        // Other writers may have left holes that are large enough but not aligned to blocks.
        let anywhere = Blocks { align: u64::from(SECTOR_SIZE), ..blocks };
        let got = groups
            .iter()
            .find_map(|g| g.take_block(newest, of, from, |f| f.allocate_in(g.run, anywhere)));
        got.map(|(r, _)| r.start).ok_or(NeedChunk(SpaceKind::Metadata))
    }

    /// Allocates one block for the chunk tree, which is written by the commit of `of`.
    ///
    /// # Errors
    /// [`NeedChunk`].
    pub(crate) fn allocate_system_block(
        &self,
        of: Generation,
        from: &mut Reservation,
    ) -> std::result::Result<Logical, NeedChunk> {
        let blocks = self.blocks();
        let unit = (ClusterUser::Committer, Unit::Transaction(of));
        let groups = self.serving(SpaceKind::System);
        let got = groups
            .iter()
            .find_map(|g| g.take_block(of, unit, from, |f| f.allocate_in(g.run, blocks)));
        got.map(|(r, _)| r.start).ok_or(NeedChunk(SpaceKind::System))
    }

    /// Allocates exactly this run, which is in use although nothing records that. Returns false if
    /// not all of it is free.
    ///
    /// # Errors
    /// `Corrupt` when it lies in no block group, or in one of another kind than `from`.
    pub(crate) fn take_exact(&self, run: Run, from: &mut Reservation) -> Result<bool> {
        let group = self.find_run(run)?;
        if !group.serves(from.kind()) {
            let what = format!(
                "{} bytes of {:?} lie in a block group for something else",
                run.len,
                from.kind()
            );
            return Err(Error::corrupt(Place::block(run.start), what));
        }
        let Some(mut s) = group.serving(Generation(u64::MAX), from) else { return Ok(false) };
        let GroupState { rows, free, .. } = &mut *s;
        let taken = match rows {
            Some(rows) => rows.take_exact(run, free),
            None => free.take(run).map(|_| Change::default()),
        };
        let Some(change) = taken else { return Ok(false) };
        s.allocated += run.len;
        from.consume(run.len, change);
        Ok(true)
    }

    /// Makes a run free that was in use.
    fn make_free(&self, run: Run, was: Was<'_>) {
        let group = self.find_run(run).expect("space of a known group");
        let mut s = group.state.lock();
        let free = s.release(run);
        let (used, pinned) = match was {
            Was::Allocated(to) => {
                s.allocated = s.allocated.checked_sub(run.len).expect("allocated space");
                // What rows hold back cannot be promised again.
                (run.len - to.map_or(0, |to| to.restore(run.len.min(free))), 0)
            }
            Was::Pinned { discarded } => {
                s.pinned = s.pinned.checked_sub(run.len).expect("pinned space");
                s.undiscarded |= !discarded;
                (0, run.len)
            }
        };
        group.check(&s);
        // What rows hold back is unusable, and all that is free in a group out of service.
        let usable = if s.read_only { 0 } else { free };
        self.space.change(group.kind(), |p| {
            p.used -= used;
            p.pinned -= pinned;
            p.unusable = p.unusable + run.len - usable;
        });
    }

    /// Frees allocated space that nothing ever referred to, at once. It goes into the reservation,
    /// if one is given.
    ///
    /// # Panics
    /// When the run was not allocated.
    pub(crate) fn give_back(&self, run: Run, to: Option<&mut Reservation>) {
        self.make_free(run, Was::Allocated(to));
    }

    /// Frees allocated space. It may be used again only after [`Self::unpin`].
    ///
    /// # Errors
    /// `Corrupt` when the run is in no block group or more is freed than is allocated.
    pub(crate) fn pin(&self, run: Run) -> Result<()> {
        let group = self.find_run(run)?;
        let mut s = group.state.lock();
        s.allocated = s.allocated.checked_sub(run.len).ok_or_else(|| {
            Error::corrupt(
                Place::block(run.start),
                "more is freed than the block group has allocated",
            )
        })?;
        s.pinned += run.len;
        self.space.change(group.kind(), |p| {
            p.used -= run.len;
            p.pinned += run.len;
        });
        Ok(())
    }

    /// Makes pinned space usable again: no durable superblock and no version reaches it any more.
    ///
    /// # Panics
    /// When the run was not pinned, or part of it is free.
    pub(crate) fn unpin(&self, run: Run) {
        self.unpinned(run, false);
    }
    fn unpinned(&self, run: Run, discarded: bool) {
        self.make_free(run, Was::Pinned { discarded });
    }

    /// Groups that are empty in memory and on disk. They are candidates for removal.
    #[must_use]
    pub(crate) fn empty_groups(&self) -> Vec<Arc<BlockGroup>> {
        let empty = |g: &GroupUsage| g.allocated == 0 && g.pinned == 0 && g.disk_used == 0;
        self.all().into_iter().filter(|g| empty(&g.usage())).collect()
    }

    /// Removes an empty group for good, unless its space was promised to an operation that could
    /// not have it elsewhere. Returns whether it was removed. Nothing sees the group out of service
    /// before that is decided.
    pub(crate) fn remove_unpromised(&self, group: &BlockGroup) -> bool {
        // The clusters are locked, too: a later group may lie at the same addresses and be for
        // something else.
        let mut clusters = self.clusters.lock();
        let mut groups = self.groups.write();
        let mut s = group.state.lock();
        let empty = s.allocated == 0 && s.pinned == 0 && s.disk_used == 0;
        if s.removed
            || !empty
            || !s.read_only && !self.space.try_withdraw(group.kind(), s.free.total())
        {
            return false;
        }
        s.read_only = true;
        s.removed = true;
        self.space.change(group.kind(), |p| {
            p.total -= group.run.len;
            p.unusable -= s.free.total() + s.excluded;
        });
        groups.remove(&group.run.start);
        for window in clusters.iter_mut() {
            *window = window.filter(|w| !w.overlaps(group.run));
        }
        true
    }
}

#[cfg(test)]
mod tests;
