//! The commit: from a sealed transaction to a durable superblock.
//!
//! The global trees describe each other. Inserting an extent item copies blocks of the extent tree,
//! whose references go into the extent tree; block group items and free space change with every
//! block; root items change with every root. But a block is copied to a new address at most once in
//! a transaction, so the circle closes. The committer applies notes, then what that caused, then
//! what that caused, until a round changes nothing. Normally that takes two or three rounds.
//!
//! What it writes into block groups and the free-space tree comes from *applied* references alone.
//! The allocator's own map is ahead of them: it already lacks blocks of the next transaction.

mod devices;
mod moves;
mod roots;
mod source;
mod space;
mod superblock;

use crate::error::{Error, Result};
use crate::space::extent_tree::{self, Applied};
use crate::space::refs::{DelayedRefs, ExtentKind, RefHead};
use crate::space::reserve::Reservation;
use crate::space::{DeviceChange, Pinned, Run, SpaceKind, csum_tree};
use crate::transaction::{CommitSource, Ground, SubvolumeTree, Target, Txn, writeout};
use crate::tree::{Root, Tree, doing};
use larder_format::items::Chunk;
use larder_format::{DeviceId, Key, KeyType, Logical, ObjectId, Superblock, TreeId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Body of the committer's thread.
pub(crate) fn run(ground: &Ground) {
    while ground.txns.next_seal().is_some() {
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| commit_once(ground)));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(e)) => ground.txns.fail(&format!("a commit failed: {e}")),
            Err(_) => ground.txns.fail("a commit hit a broken invariant; see the log"),
        }
    }
}

/// Seals the running transaction and brings it to the device.
pub(crate) fn commit_once(ground: &Ground) -> Result<()> {
    let above = ground.above();
    let Sealed { txn, frozen, delayed } = seal(ground, &*above);
    let _doing = doing("commit");
    let begin = Instant::now();
    delayed?;
    let mut committer = Committer::new(ground, txn.clone());
    committer.fixpoint(&frozen)?;
    let superblocks = committer.superblocks()?;
    let mut roots: Vec<(TreeId, Root)> =
        frozen.iter().map(|f| (f.subvol.id, f.root.clone())).collect();
    roots.extend(ground.roots.all().map(|t| (t.id(), t.root())));
    roots.extend(committer.moved_trees.iter().map(|t| (t.id(), t.root())));
    let nodes = writeout::write_nodes(ground, txn.generation, &roots)?;
    // Writing may have ended meanwhile, with a reason not to trust what is in memory.
    if let Some(why) = ground.txns.failure() {
        return Err(Error::ReadOnly(Some(why)));
    }
    ground.write_superblocks(txn.generation, superblocks.clone())?;
    committer.freed.extend(above.superblock_durable(&txn)?);
    let stats = &ground.txns.stats;
    stats.nodes_written.fetch_add(nodes as u64, Ordering::Relaxed);
    committer.publish(&frozen, superblocks.common);
    let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    stats.commit_ns.fetch_add(ns, Ordering::Relaxed);
    stats.commit_max_ns.fetch_max(ns, Ordering::Relaxed);
    Ok(())
}

/// A transaction that was sealed.
struct Sealed {
    txn: Arc<Txn>,
    /// The subvolumes that it changed.
    frozen: Vec<Frozen>,
    /// What came of the items that were left to the seal. With an error the transaction must not be
    /// committed.
    delayed: Result<()>,
}

/// Seals the running transaction. The next one runs when this returns.
fn seal(ground: &Ground, above: &dyn CommitSource) -> Sealed {
    {
        let _doing = doing("items before the seal");
        above.before_seal();
    }
    let _doing = doing("seal");
    let (txn, since) = ground.txns.close_running();
    let delayed = above.seal(&txn);
    let untouched = std::mem::take(&mut txn.roots.lock().untouched);
    let mut frozen: Vec<Frozen> = txn
        .subvols
        .lock()
        .values()
        .map(|s| Frozen {
            changed: s.is_changed_in(txn.generation) && !untouched.contains(&s.id),
            subvol: s.clone(),
            root: s.tree.root(),
            growth: s.tree.take_growth(),
        })
        .collect();
    // A tree is as it was if all its edits failed before they began.
    frozen.retain(|f| f.root.ptr.generation == txn.generation);
    // The next transaction logs what differs from this.
    for f in &frozen {
        f.subvol.set_base(txn.generation.next(), f.root.clone());
    }
    ground.txns.sealed(since);
    Sealed { txn, frozen, delayed }
}

/// A subvolume as it was when the transaction was sealed.
struct Frozen {
    subvol: Arc<SubvolumeTree>,
    root: Root,
    /// Has anything in it changed? A snapshot that was taken does not count, and neither does a
    /// block that has moved.
    changed: bool,
    /// By how many blocks its tree has grown.
    growth: i64,
}

/// One commit.
struct Committer<'a> {
    ground: &'a Ground,
    txn: Arc<Txn>,
    preallocated: Vec<Logical>,
    system_preallocated: Vec<Logical>,
    reserve: Reservation,
    system_reserve: Reservation,
    /// References of the global trees' own blocks, not applied yet.
    pending: DelayedRefs,
    /// Space that this transaction frees.
    freed: Pinned,
    /// Changes for the free-space tree, by address: length, and whether it became free.
    space_changes: BTreeMap<Logical, (u64, bool)>,
    /// Groups whose item is older than their `disk_used`.
    dirty_groups: BTreeSet<Logical>,
    /// Block groups that this commit removes.
    removed: Vec<(Run, Chunk)>,
    /// Trees that nothing edits, of which blocks have moved.
    moved_trees: Vec<Tree>,
    /// The target of a replacement, as this commit says.
    target: Option<Target>,
    /// A device that a replacement leaves after all.
    returns: Option<DeviceId>,
    /// How this commit changes the devices.
    device_changes: Vec<DeviceChange>,
}

impl<'a> Committer<'a> {
    fn new(ground: &'a Ground, txn: Arc<Txn>) -> Self {
        let reserve =
            txn.take_reserved().unwrap_or_else(|| ground.space.accounts.empty(SpaceKind::Metadata));
        ground.space.kept_by_commit.store(reserve.bytes(), Ordering::Release);
        let freed = std::mem::take(&mut *txn.freed_log.lock());
        Self {
            ground,
            preallocated: Vec::new(),
            system_preallocated: Vec::new(),
            reserve,
            system_reserve: ground.space.accounts.empty(SpaceKind::System),
            pending: DelayedRefs::new(),
            freed,
            space_changes: BTreeMap::new(),
            dirty_groups: BTreeSet::new(),
            removed: Vec::new(),
            moved_trees: Vec::new(),
            target: None,
            returns: None,
            device_changes: Vec::new(),
            txn,
        }
    }

    /// Brings the global trees to a state that describes this transaction and the trees themselves.
    fn fixpoint(&mut self, frozen: &[Frozen]) -> Result<()> {
        let ground = self.ground;
        self.rebuild_free_space()?;
        self.add_devices()?;
        self.write_new_groups()?;
        self.remove_empty_groups()?;
        self.change_devices()?;
        self.write_devices()?;
        for f in frozen {
            self.write_subvolume_root(f)?;
        }
        self.apply_root_notes()?;
        // Every superblock has a root tree of its own generation.
        let any = Key::new(ObjectId::FS_TREE, KeyType::ROOT_ITEM, 0);
        ground.roots.root.edit(&mut self.ops(&ground.roots.root).source, &[any], |_| Ok(()))?;
        self.insert_csums()?;
        self.apply_notes()?;
        self.carry_out_moves()?;
        let mut rounds = 0;
        loop {
            while let Some((at, head)) = self.pending.pop_first() {
                self.apply(at, &head)?;
            }
            self.write_new_groups()?;
            self.write_free_space()?;
            self.write_group_items()?;
            if self.pending.is_empty()
                && self.space_changes.is_empty()
                && self.dirty_groups.is_empty()
                && !self.write_global_roots()?
                && self.pending.is_empty()
            {
                return Ok(());
            }
            rounds += 1;
            assert!(rounds < 1000, "the global trees do not come to rest");
        }
    }

    /// Brings the checksums that were noted into their tree.
    fn insert_csums(&mut self) -> Result<()> {
        let ground = self.ground;
        let mut next = Some(Logical(0));
        while let Some((at, sums)) = next.and_then(|from| adjacent_csums(ground, &self.txn, from)) {
            csum_tree::insert(&mut self.ops(&ground.roots.csum), ground.csum, at, &sums)?;
            next = at.0.checked_add((sums.len() / ground.csum.size()) as u64 * SECTOR).map(Logical);
        }
        Ok(())
    }

    /// Applies the references that were noted. The notes stay where they are: operations of the
    /// next transaction still count them.
    fn apply_notes(&mut self) -> Result<()> {
        let txn = self.txn.clone();
        let mut next = Some(Logical(0));
        while let Some((at, head)) = next.and_then(|from| txn.refs.lock().at_or_after(from)) {
            self.apply(at, &head)?;
            next = at.0.checked_add(1).map(Logical);
        }
        Ok(())
    }

    /// Applies the changes of one extent, and what follows from them for space and checksums.
    fn apply(&mut self, at: Logical, head: &RefHead) -> Result<()> {
        let ground = self.ground;
        let features = ground.extent_features();
        let applied = extent_tree::apply(&mut self.ops(&ground.roots.extent), features, at, head)?;
        let run = Run::new(at, head.num_bytes);
        match applied {
            Applied::Added => self.space_changed(run, false)?,
            Applied::Freed => self.space_changed(run, true)?,
            Applied::NeverUsed | Applied::Changed => {}
        }
        if matches!(applied, Applied::Freed | Applied::NeverUsed) {
            ground.space.groups.pin(run)?;
            self.freed.push(run);
            if head.kind == ExtentKind::Data {
                csum_tree::delete(&mut self.ops(&ground.roots.csum), ground.csum, run)?;
            }
        }
        if fault!(ground.options.tuning, DiscardEarly) && matches!(applied, Applied::Freed) {
            ground.volume.discard(run.start, run.len)?;
        }
        if fault!(ground.options.tuning, ReusePinned) && matches!(applied, Applied::Freed) {
            ground.space.groups.unpin(run);
            self.freed.pop();
        }
        Ok(())
    }

    /// Makes the transaction the published one.
    fn publish(mut self, frozen: &[Frozen], superblock: Box<Superblock>) {
        let ground = self.ground;
        let total = superblock.total_bytes();
        *ground.superblock.lock() = superblock;
        ground.store.set_super_generation(self.txn.generation);
        settle(ground, frozen);
        self.give_back_unused();
        // A thread that finds no space once this is published waits for what is being discarded.
        let discards = &ground.space.discards;
        let discarding = discards.are_on().then(|| discards.busy());
        if discarding.is_none() {
            ground.space.forget_removed(&self.removed);
        }
        // Behind the chunks that are gone: one of them may lie where a device has ended.
        if discarding.is_none() {
            ground.space.devices_changed(&self.device_changes, total);
        }
        if let Err(e) = ground.space.measure_global_trees(&ground.roots, &ground.epochs.enter()) {
            // The reserve stays as large as it was. The next commit will need the root and say what
            // is wrong.
            tracing::warn!("the size of the global trees is not known: {e}");
        }
        ground.space.groups.set_published(self.txn.generation);
        ground.set_published_hint(self.txn.generation);
        // The root tree has these links and is durable. They are forgotten before any waiter goes
        // on, because the next `fsync` would otherwise commit for them again.
        ground.above().publishing(self.txn.generation);
        let freed = std::mem::take(&mut self.freed);
        let roots = (ground.roots.extent.root(), ground.roots.csum.root());
        ground.txns.publish(self.txn.generation, roots, || ground.epochs.advance(freed));
        discards.release_expired();
        if discarding.is_some() {
            ground.space.forget_removed(&self.removed);
            ground.space.devices_changed(&self.device_changes, total);
            discards.discard_freed();
        }
    }

    /// Gives back the addresses and bytes that the commit did not need.
    fn give_back_unused(&mut self) {
        let ground = self.ground;
        let nodesize = u64::from(ground.nodesize());
        for at in self.preallocated.drain(..).chain(self.system_preallocated.drain(..)) {
            ground.space.groups.give_back(Run::new(at, nodesize), None);
        }
        self.reserve.shrink_to(0);
        ground.space.kept_by_commit.store(0, Ordering::Release);
    }
}

/// The nodes of the trees are on the device: what hangs in memory becomes clean.
fn settle(ground: &Ground, frozen: &[Frozen]) {
    for f in frozen {
        f.subvol.tree.settle(&f.root);
        f.subvol.settle_base(&f.root);
    }
    for tree in ground.roots.all() {
        tree.settle(&tree.root());
    }
}

/// Bytes of checksums that are put into their tree at once.
const CSUMS_AT_ONCE: usize = 64 << 10;
/// Bytes that one checksum is for.
const SECTOR: u64 = larder_format::SECTOR_SIZE as u64;

/// The first checksums that are noted for `from` or behind it, together with those that follow
/// without a gap: writing many small extents leaves a note for each, and the notes lie beside each
/// other.
fn adjacent_csums(ground: &Ground, txn: &Txn, from: Logical) -> Option<(Logical, Vec<u8>)> {
    let notes = txn.csums.lock();
    let mut found = notes.range(from..);
    let (at, first) = found.next()?;
    let end = |len: usize| at.plus((len / ground.csum.size()) as u64 * SECTOR);
    let mut sums = first.clone();
    while let Some((next, more)) = found.next().filter(|(next, _)| **next == end(sums.len()))
        && sums.len() < CSUMS_AT_ONCE
    {
        debug_assert!(next.0.is_multiple_of(SECTOR));
        sums.extend_from_slice(more);
    }
    Some((*at, sums))
}
