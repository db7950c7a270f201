//! A handle: one operation's membership in the running transaction.
//!
//! A handle makes a [`Tree`] editable. It is also the only way for operations to note changes of
//! references, checksums and inode items. It reserves space before it joins, so a seal never waits
//! for an operation that waits for space. What its notes will cost at the commit stays reserved
//! when it leaves.

use crate::error::{Error, Result};
use crate::space::reserve::Reservation;
use crate::space::{Run, SpaceKind};
use crate::transaction::ground::{Ground, Owed};
use crate::transaction::sharing::KnownRefs;
use crate::transaction::{GlobalMove, SubvolumeTree, Txn};
use crate::tree::{BlockSource, EditStop, Editor, Need, Node, OnPath};
use larder_format::items::ExtentRef;
use larder_format::{Generation, Key, Logical, SECTOR_SIZE, TreeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Membership in the running transaction. Dropping it leaves.
#[derive(Debug)]
pub(crate) struct Handle<'a> {
    pub(crate) ground: &'a Ground,
    pub(crate) txn: Arc<Txn>,
    preallocated: Vec<Logical>,
    known: KnownRefs,
    /// Set for the committer's own handle, which did not join.
    inside_seal: bool,
    /// May it use the last reserve?
    deleting: bool,
    /// May it take what was not reserved? It may where it must not fail.
    overdraws: bool,
    reserved: Reservation,
    /// What has to be kept for the notes that it made.
    owed: Owed,
}

/// Bytes by which trees may grow for one change of an extent's references: an extent item, or a
/// reference of its own, and records of free space on both sides. All of it twice, because leaves
/// that were split are half empty.
const NOTE_GROWTH: u64 = 256;

/// What an operation costs that changes many items in few blocks, none of which grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlocksAndNotes {
    /// Blocks that it copies.
    pub(crate) blocks: u64,
    /// Trees in which another operation may make it copy a path once more.
    pub(crate) paths: u64,
    /// Notes that it leaves to the commit.
    pub(crate) notes: u64,
}

impl Ground {
    /// Joins the running transaction to change up to `items` items. Waits for space and for a seal
    /// in progress.
    pub(crate) fn begin(&self, items: u64) -> Result<Handle<'_>> {
        Handle::join(self, items, false)
    }
    /// Like `begin`, for an operation that knows what it is going to cost.
    pub(crate) fn begin_with_blocks(&self, cost: BlocksAndNotes) -> Result<Handle<'_>> {
        let blocks = cost.blocks + cost.paths * self.tallest();
        let more = blocks * u64::from(self.nodesize()) + cost.notes * NOTE_GROWTH;
        let (mut handle, kept) = Handle::join_keeping(self, 1, false, more)?;
        handle.reserved.merge(kept);
        Ok(handle)
    }
    /// Like `begin`, for operations that free space: they may use the last reserve.
    pub(crate) fn begin_deleting(&self, items: u64) -> Result<Handle<'_>> {
        Handle::join(self, items, true)
    }
}

impl<'a> Handle<'a> {
    /// Joins with space reserved for `items` item changes.
    pub(crate) fn join(ground: &'a Ground, items: u64, deleting: bool) -> Result<Self> {
        Ok(Self::join_keeping(ground, items, deleting, 0)?.0)
    }
    /// The same, and reserves `more` bytes for something else in the same step: a waiter for
    /// metadata must not hold any that another waits for.
    pub(crate) fn join_keeping(
        ground: &'a Ground,
        items: u64,
        deleting: bool,
        more: u64,
    ) -> Result<(Self, Reservation)> {
        ground.check_writable()?;
        ground.bound_dirty_nodes()?;
        let mut reserved = ground.reserve_items(items, deleting, more)?;
        let kept = reserved.split(more);
        let txn = ground.txns.join()?;
        let mut handle = Self::over(ground, txn, reserved, false);
        handle.deleting = deleting;
        Ok((handle, kept))
    }
    /// Joins to change an inode's attributes and no items. If the running transaction knows of the
    /// inode already, the cost of its item is kept already. Then nothing is reserved, however often
    /// the inode changes.
    pub(crate) fn join_for_item(ground: &'a Ground, noted_in: &AtomicU64) -> Result<Self> {
        if noted_in.load(Ordering::Relaxed) == 0 {
            return Self::join(ground, 1, false);
        }
        ground.check_writable()?;
        ground.bound_dirty_nodes()?;
        let txn = ground.txns.join()?;
        if noted_in.load(Ordering::Relaxed) == txn.generation.0 {
            // The item may be written ahead at any moment, and then be noted once more. That is
            // topped up.
            let reserved = ground.space.accounts.empty(SpaceKind::Metadata);
            return Ok(Self::with_preallocated(ground, txn, reserved, false, Vec::new()));
        }
        ground.txns.leave();
        Self::join(ground, 1, false)
    }
    /// As [`Self::join_for_item`], and reserves `more` bytes for something else in the same step.
    pub(crate) fn join_for_item_keeping(
        ground: &'a Ground,
        noted_in: &AtomicU64,
        more: u64,
    ) -> Result<(Self, Reservation)> {
        ground.check_writable()?;
        ground.bound_dirty_nodes()?;
        if noted_in.load(Ordering::Relaxed) != 0 {
            let mut reserved = ground.space.accounts.reserve_passing(more)?;
            let kept = reserved.split(more);
            let txn = ground.txns.join()?;
            if noted_in.load(Ordering::Relaxed) == txn.generation.0 {
                return Ok((
                    Self::with_preallocated(ground, txn, reserved, false, Vec::new()),
                    kept,
                ));
            }
            ground.txns.leave();
        }
        Self::join_keeping(ground, 1, false, more)
    }
    /// Joins with what was reserved earlier. It never waits for space.
    pub(crate) fn join_with(ground: &'a Ground, reserved: Reservation) -> Result<Self> {
        ground.check_writable()?;
        ground.bound_dirty_nodes()?;
        let txn = ground.txns.join()?;
        // Acknowledged data must not fail, so it may use up the commit's reserve.
        let mut handle = Self::over(ground, txn, reserved, false);
        handle.overdraws = true;
        Ok(handle)
    }
    /// The handle with which the committer writes delayed items while it seals.
    pub(crate) fn for_seal(ground: &'a Ground, txn: Arc<Txn>) -> Self {
        // What was kept for the notes pays for the items, too.
        let reserved =
            txn.take_reserved().unwrap_or_else(|| ground.space.accounts.empty(SpaceKind::Metadata));
        let mut handle = Self::over(ground, txn, reserved, true);
        handle.overdraws = true;
        handle
    }
    /// The handle under which a log is replayed, on a file system that may be read-only. It never
    /// waits, because nothing would come to help.
    pub(crate) fn for_replay(ground: &'a Ground) -> Result<Self> {
        let reserved = ground.space.accounts.empty(SpaceKind::Metadata);
        let mut handle = Self::over(ground, ground.txns.join()?, reserved, false);
        handle.overdraws = true;
        Ok(handle)
    }
    fn over(ground: &'a Ground, txn: Arc<Txn>, reserved: Reservation, inside_seal: bool) -> Self {
        let preallocated = ground.space.take_preallocated(txn.generation);
        Self::with_preallocated(ground, txn, reserved, inside_seal, preallocated)
    }
    fn with_preallocated(
        ground: &'a Ground,
        txn: Arc<Txn>,
        reserved: Reservation,
        inside_seal: bool,
        preallocated: Vec<Logical>,
    ) -> Self {
        Self {
            ground,
            txn,
            preallocated,
            known: KnownRefs::default(),
            inside_seal,
            deleting: false,
            overdraws: false,
            reserved,
            owed: Owed::default(),
        }
    }
    /// The transaction's number.
    pub(crate) fn generation(&self) -> Generation {
        self.txn.generation
    }
    /// Changes items of a subvolume's tree, all at once. See [`crate::tree::Tree::edit`].
    pub(crate) fn edit<R>(
        &mut self,
        subvol: &Arc<SubvolumeTree>,
        keys: &[Key],
        change: impl FnOnce(&mut Editor<'_>) -> Result<R>,
    ) -> Result<R> {
        self.edit_growing(subvol, keys, keys.len(), change)
    }
    /// Like [`Handle::edit`], where at most `growing` of the items are inserted or become longer.
    pub(crate) fn edit_growing<R>(
        &mut self,
        subvol: &Arc<SubvolumeTree>,
        keys: &[Key],
        growing: usize,
        change: impl FnOnce(&mut Editor<'_>) -> Result<R>,
    ) -> Result<R> {
        if subvol.is_dead() {
            return Err(Error::NotFound);
        }
        subvol.changes_in(self.txn.generation);
        self.touch_tree(subvol);
        subvol.tree.edit_growing(self, keys, growing, change)
    }
    /// Notes that the tree is edited. This comes before the edit, because an edit that fails
    /// half-way may have copied blocks already.
    fn touch_tree(&mut self, subvol: &Arc<SubvolumeTree>) {
        self.txn.touch();
        self.txn.subvols.lock().entry(subvol.id).or_insert_with(|| subvol.clone());
    }
    /// Changes an item of a subvolume's tree in a way that no reader of the file notices.
    pub(crate) fn edit_unnoticed<R>(
        &mut self,
        subvol: &Arc<SubvolumeTree>,
        key: &Key,
        change: impl FnOnce(&mut Editor<'_>) -> Result<R>,
    ) -> Result<R> {
        self.relocates(subvol)?;
        subvol.tree.edit_growing(self, &[*key], 0, change)
    }
    /// Moves a block of a subvolume's tree. See [`crate::tree::Tree::move_block`].
    pub(crate) fn move_block(
        &mut self,
        subvol: &Arc<SubvolumeTree>,
        block: &OnPath,
    ) -> Result<bool> {
        self.relocates(subvol)?;
        subvol.tree.move_block(self, block)
    }
    /// Replaces a block that others keep by a copy. See [`crate::tree::Tree::repoint`].
    pub(crate) fn repoint(
        &mut self,
        subvol: &Arc<SubvolumeTree>,
        old: &OnPath,
        new: Logical,
    ) -> Result<bool> {
        self.relocates(subvol)?;
        subvol.tree.repoint(self, old, new)
    }
    /// Leaves with the commit what only it can move.
    pub(crate) fn move_global(&mut self, what: GlobalMove) {
        self.noted();
        self.txn.global_moves.lock().push(what);
    }
    fn relocates(&mut self, subvol: &Arc<SubvolumeTree>) -> Result<()> {
        if subvol.is_dead() {
            return Err(Error::NotFound);
        }
        self.txn.relocated.store(true, Ordering::Release);
        self.touch_tree(subvol);
        Ok(())
    }
    /// A new data extent with its first reference.
    pub(crate) fn create_data(&mut self, extent: Run, user: ExtentRef) -> Result<()> {
        self.noted();
        let generation = self.txn.generation;
        self.txn.refs.lock().create_data(extent.start, extent.len, user, generation)
    }
    /// One more reference to a data extent.
    pub(crate) fn add_data_ref(&mut self, extent: Run, user: ExtentRef) -> Result<()> {
        self.noted();
        self.txn.refs.lock().add_data(extent.start, extent.len, user)
    }
    /// One reference less. If it was the last, the commit frees the extent.
    pub(crate) fn drop_data_ref(&mut self, extent: Run, user: ExtentRef) -> Result<()> {
        self.noted();
        self.txn.refs.lock().drop_data(extent.start, extent.len, user)
    }
    /// Notes checksums for the sectors from `at` on. Notes must not overlap, because the commit
    /// goes from the end of one to the next.
    pub(crate) fn add_csums(&mut self, at: Logical, sums: Vec<u8>) {
        if fault!(self.ground.options.tuning, NoCsums) || sums.is_empty() {
            return;
        }
        self.noted();
        self.owed.bytes += 2 * sums.len() as u64;
        self.txn.csums.lock().insert(at, sums);
    }
    /// Takes back the checksums of space that is given back unused. They may have been noted
    /// together with others.
    pub(crate) fn forget_csums(&mut self, run: Run) {
        let size = self.ground.csum.size();
        let bytes =
            |len: u64| usize::try_from(len / u64::from(SECTOR_SIZE)).expect("in memory") * size;
        let mut notes = self.txn.csums.lock();
        let noted = |at: Logical, sums: &Vec<u8>| {
            Run::new(at, (sums.len() / size) as u64 * u64::from(SECTOR_SIZE))
        };
        while let Some((at, all)) = notes
            .range(..run.end())
            .next_back()
            .map(|(at, sums)| (*at, noted(*at, sums)))
            .filter(|(_, all)| all.overlaps(run))
        {
            let mut sums = notes.remove(&at).expect("looked up");
            if all.end() > run.end() {
                notes.insert(run.end(), sums.split_off(bytes(run.end().0 - at.0)));
            }
            if at < run.start {
                sums.truncate(bytes(run.start.0 - at.0));
                notes.insert(at, sums);
            }
        }
    }
    /// New data extents, each with its first reference. Returns how many were recorded: all, or
    /// those before the first that cannot be.
    pub(crate) fn create_data_extents(
        &mut self,
        extents: impl Iterator<Item = (Run, ExtentRef)>,
    ) -> usize {
        let generation = self.txn.generation;
        let mut count = 0;
        {
            let mut refs = self.txn.refs.lock();
            for (extent, user) in extents {
                if refs.create_data(extent.start, extent.len, user, generation).is_err() {
                    break;
                }
                count += 1;
            }
        }
        self.txn.touch();
        self.owe(count);
        index(count)
    }
    /// Forgets extents that were just recorded. Nothing has seen them yet.
    pub(crate) fn forget_data_extents(&mut self, at: impl Iterator<Item = Logical>) {
        let mut refs = self.txn.refs.lock();
        at.for_each(|at| {
            let known = refs.forget_created(at);
            debug_assert!(known, "it was just recorded");
        });
    }
    /// Has it used up nearly all that it reserved?
    pub(crate) fn is_exhausted(&self) -> bool {
        let preallocated = self.preallocated.len() as u64 * u64::from(self.ground.nodesize());
        self.reserved.bytes() + preallocated < self.ground.item_cost(2)
    }
    /// Something for the root tree was noted, which will change this many of its items.
    pub(crate) fn noted_for_root_tree(&mut self, items: u64) {
        self.txn.touch();
        self.owe(2 * items);
    }
    /// The caller has noted changes of references itself.
    pub(crate) fn noted_refs(&mut self, notes: u64) {
        self.txn.touch();
        self.owe(notes);
    }
    /// Keeps space for item changes that the seal will make.
    pub(crate) fn keep_for_seal(&mut self, items: u64) {
        self.txn.touch();
        self.owed.bytes += self.ground.item_cost(items);
    }
    /// Keeps space for copies of the path to one item that the seal will write.
    pub(crate) fn keep_for_path(&mut self) {
        self.owed.bytes += self.ground.tallest().max(1) * u64::from(self.ground.nodesize());
    }
    /// An address for a new block.
    ///
    /// # Errors
    /// `NoSpace`, `WouldBlock`.
    pub(crate) fn take_block(&mut self) -> Result<Logical> {
        if self.available() == 0 {
            self.provide(&Need::Blocks(1))?;
        }
        Ok(self.take())
    }
    /// An incompat bit that the superblock must have from this transaction on.
    pub(crate) fn need_incompat(&mut self, bit: u64) {
        self.txn.incompat.fetch_or(bit, Ordering::Relaxed);
    }
    /// A change of an extent's references was noted for the commit.
    fn noted(&mut self) {
        self.txn.touch();
        self.owe(1);
    }
    fn owe(&mut self, notes: u64) {
        self.owed.notes += notes;
        self.owed.bytes += notes * NOTE_GROWTH;
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("counts what is in memory")
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Half an operation must not become durable. No seal comes before this handle has left.
            self.ground.txns.fail("an operation hit a broken invariant; see the log");
        }
        if self.owed != Owed::default() {
            let (owed, deleting) = (self.owed, self.deleting);
            self.ground.keep_for_notes(&self.txn, &mut self.reserved, owed, deleting);
        }
        let preallocated = std::mem::take(&mut self.preallocated);
        if !preallocated.is_empty() {
            self.ground.space.keep_preallocated(self.txn.generation, preallocated);
        }
        if self.inside_seal {
            let rest = self.reserved.split(u64::MAX);
            self.txn.keep(rest);
        } else {
            // Given back before the handle leaves, so that a caller that then waits for the commit
            // finds nothing reserved.
            self.reserved.shrink_to(0);
            self.ground.txns.leave();
        }
    }
}

impl BlockSource for Handle<'_> {
    fn generation(&self) -> Generation {
        self.txn.generation
    }
    fn published(&self) -> Generation {
        self.ground.published_hint()
    }
    fn available(&self) -> usize {
        self.preallocated.len()
    }
    fn take(&mut self) -> Logical {
        self.txn.blocks.fetch_add(1, Ordering::Relaxed);
        self.preallocated.pop().expect("the edit asked for addresses first")
    }
    fn untake(&mut self, at: Logical) {
        self.preallocated.push(at);
    }
    fn buffer(&mut self) -> Arc<[u8]> {
        self.ground.store.buffer()
    }
    fn created(&mut self, tree: TreeId, at: Logical, level: u8, first_key: Key) {
        self.owe(1);
        self.ground.note_created(&self.txn, tree, at, level, first_key);
    }
    fn copied(
        &mut self,
        tree: TreeId,
        old: &Node,
        new: Logical,
        maybe_shared: bool,
    ) -> Result<(), EditStop> {
        // The references of a shared block are passed on to what it points to.
        let children = if maybe_shared { old.view().nritems() as u64 / 2 } else { 0 };
        self.ground.note_copied(&self.txn, &self.known, tree, old, new, maybe_shared)?;
        self.owe(1 + children);
        Ok(())
    }
    fn snapshot(&mut self, snapshot: TreeId, root: &Node, new: Logical) -> Result<(), EditStop> {
        let children = self.ground.note_snapshot(&self.txn, snapshot, root, new)?;
        self.txn.blocks.fetch_add(1, Ordering::Relaxed);
        self.owe(1 + children);
        Ok(())
    }
    fn dropped(&mut self, tree: TreeId, at: Logical, level: u8) {
        self.owe(1);
        self.ground.note_dropped(&self.txn, tree, at, level);
    }
    fn half_done(&mut self, error: &Error) {
        // Half an operation must not become durable.
        self.ground.txns.fail(&format!("an operation failed half-way: {error}"));
    }
    fn provide(&mut self, need: &Need) -> Result<()> {
        match need {
            Need::Node(_) => unreachable!("the tree reads nodes itself"),
            Need::Refs(at, level) => self.ground.learn_refs(&mut self.known, *at, *level),
            Need::Notes => {
                self.ground.wait_for_notes(&self.txn);
                Ok(())
            }
            Need::Blocks(n) => self.provide_blocks(*n),
        }
    }
}

impl Handle<'_> {
    /// Gets addresses for new blocks until there are `wanted`.
    fn provide_blocks(&mut self, wanted: usize) -> Result<()> {
        let missing = wanted.saturating_sub(self.preallocated.len());
        let bytes = missing as u64 * u64::from(self.ground.nodesize());
        let lacking = bytes.saturating_sub(self.reserved.bytes());
        // Operations do not get the commit's own reserve, however much of it is free.
        if lacking > 0
            && !self.ground.top_up(&mut self.reserved, lacking, self.deleting)
            && !self.overdraws
        {
            return Err(Error::NoSpace);
        }
        let ground = self.ground;
        let of = self.txn.generation;
        let mut more =
            ground.space.allocate_blocks(&ground.txns, of, missing, &mut self.reserved)?;
        // Addresses are taken from the end, so this order keeps them rising.
        more.reverse();
        more.append(&mut self.preallocated);
        self.preallocated = more;
        Ok(())
    }
}
