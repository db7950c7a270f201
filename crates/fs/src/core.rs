//! What all parts of an open file system share.
//!
//! [`Core`] owns the layers from the bottom up — volume, node store, roots, space, transactions,
//! subvolumes — and the few services that join them: entering an epoch, reserving, filling purses,
//! checking whether writing is still allowed. The parts themselves live in their modules and extend
//! `Core` there.

use crate::alloc::Allocator;
use crate::api::{OpenOptions, Timestamp};
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::hash::NumberMap;
use crate::root::Subvolume;
use crate::space::Run;
use crate::space::extent_tree::ExtentFeatures;
use crate::space::reserve::Reservation;
use crate::transaction::{Handle, Transactions, Txn};
use crate::tree::{Epochs, NodeStore, Tree, TreeStats};
use larder_format::{CsumType, Generation, Logical, Superblock, TreeId};
use larder_volume::Volume;
use parking_lot::{Mutex, RwLock};
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The global trees. Only the committer edits them.
#[derive(Debug)]
pub(crate) struct Roots {
    pub(crate) root: Tree,
    pub(crate) chunk: Tree,
    pub(crate) extent: Tree,
    pub(crate) dev: Tree,
    pub(crate) csum: Tree,
    pub(crate) uuid: Option<Tree>,
    pub(crate) free_space: Option<Tree>,
    pub(crate) block_group: Option<Tree>,
}

impl Roots {
    /// All global trees.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tree> {
        [&self.root, &self.chunk].into_iter().chain(self.with_items())
    }
    /// All trees that have a ROOT_ITEM.
    pub(crate) fn with_items(&self) -> impl Iterator<Item = &Tree> {
        [
            Some(&self.extent),
            Some(&self.dev),
            Some(&self.csum),
            self.uuid.as_ref(),
            self.free_space.as_ref(),
            self.block_group.as_ref(),
        ]
        .into_iter()
        .flatten()
    }
}

/// Bytes of copies of global trees' blocks that the global reserve pays in one commit.
pub(crate) const MAX_COPIES_IN_RESERVE: u64 = 256 << 20;

/// Sets of unneeded addresses that are kept, and addresses in each.
const PURSES: usize = 4;
const PURSE: usize = 32;

/// A commit's superblock, and the commit's transaction.
#[derive(Debug)]
pub(crate) struct SuperblockWritten {
    pub(crate) generation: Generation,
    pub(crate) superblock: Box<Superblock>,
}

/// Space freed by one transaction, to be given back when no version can reach it.
pub(crate) type Pinned = Vec<crate::space::Run>;

/// An open file system.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: OpenOptions,
    pub(crate) volume: Arc<Volume>,
    pub(crate) store: Arc<NodeStore>,
    pub(crate) epochs: Epochs<Pinned>,
    /// The superblock as last written; the committer's alone to change.
    pub(crate) superblock: Mutex<Box<Superblock>>,
    pub(crate) csum: CsumType,
    pub(crate) roots: Roots,
    pub(crate) space: Allocator,
    pub(crate) txns: Transactions,
    pub(crate) tree_stats: Arc<TreeStats>,
    pub(crate) subvols: RwLock<NumberMap<TreeId, Arc<Subvolume>>>,
    /// Addresses for new blocks that operations did not need.
    pub(crate) purses: Mutex<Vec<Vec<Logical>>>,
    /// Why the file system is read-only from the start, if it is.
    pub(crate) read_only: Option<String>,
    pub(crate) fake_time: AtomicU64,
    pub(crate) data: crate::file::DataState,
    pub(crate) compression: Arc<crate::file::compress::State>,
    pub(crate) published: AtomicU64,
    /// The superblock that was written last by a commit, without a log. Held while one is written.
    pub(crate) superblock_written: Mutex<SuperblockWritten>,
    pub(crate) log: crate::log::Counters,
    /// Was there a log, and is what it held in the trees?
    pub(crate) log_replayed: AtomicBool,
    /// Where subvolumes hang, as far as the published root tree does not say so yet.
    pub(crate) links: crate::root::Links,
    /// Held while the shape of the tree of subvolumes changes.
    pub(crate) subvol_tree: crate::lock::Mutex<(), crate::lock::SubvolTree>,
    /// The next number for a subvolume; 0 until it was looked up.
    pub(crate) next_subvol: AtomicU64,
    /// Deleted subvolumes.
    pub(crate) drops: crate::root::drop::Drops,
    /// The default subvolume, if it was set.
    pub(crate) new_default: Mutex<Option<TreeId>>,
    pub(crate) flushes: crate::ahead::Flushes,
    pub(crate) fronts: crate::fronts::Fronts,
}

impl Core {
    /// Bytes of a node.
    pub(crate) fn nodesize(&self) -> u32 {
        self.store.format().nodesize
    }
    /// How extent items look on this image.
    pub(crate) fn extent_features(&self) -> ExtentFeatures {
        self.space.features
    }
    /// The last published transaction, perhaps a moment old.
    pub(crate) fn published_hint(&self) -> Generation {
        Generation(self.published.load(Ordering::Relaxed))
    }
    pub(crate) fn set_published_hint(&self, generation: Generation) {
        self.published.store(generation.0, Ordering::Relaxed);
    }
    /// Fails when nothing may be written.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match &self.read_only {
            Some(why) => Err(Error::ReadOnly(Some(why.clone()))),
            None => match self.txns.failure() {
                Some(why) => Err(Error::ReadOnly(Some(why))),
                None => Ok(()),
            },
        }
    }
    /// Joins the running transaction to change up to `items` items. Waits for space and for a seal
    /// in progress.
    pub(crate) fn begin(&self, items: u64) -> Result<Handle<'_>> {
        Handle::join(self, items, false)
    }
    /// Like `begin`, to change an inode's attributes and no items.
    pub(crate) fn begin_for_item(&self, inode: &crate::inode::Inode) -> Result<Handle<'_>> {
        Handle::join_for_item(self, inode)
    }
    /// Like `begin`, for operations that free space: they may use the last reserve.
    pub(crate) fn begin_deleting(&self, items: u64) -> Result<Handle<'_>> {
        Handle::join(self, items, true)
    }
    /// How memory is divided.
    pub(crate) fn budget(&self) -> Budget {
        Budget::of(self.options.cache_size)
    }
    /// Keeps the memory of what a transaction has changed bounded: from some size on a commit is
    /// asked for, later on operations wait until that commit has sealed what there is.
    pub(crate) fn bound_dirty_nodes(&self) -> Result<()> {
        let running = self.txns.running();
        let (bytes, budget) = (running.memory(self.nodesize()), self.budget());
        if bytes <= budget.commit {
            return Ok(());
        }
        self.txns.request();
        if bytes <= budget.transaction {
            return Ok(());
        }
        crate::api::may_wait()?;
        self.txns.wait_sealed(running.generation)
    }
    /// Bytes of metadata that changing `items` items can cost: the copies of their paths, and
    /// splits for as many of them as grow. What is over comes back when the handle goes.
    pub(crate) fn item_cost(&self, items: u64, growing: u64) -> u64 {
        let level = self.tree_stats.tallest.load(Ordering::Relaxed);
        let copies = items * level.max(1) + 1;
        (copies + growing * (level + 2) + 3) * u64::from(self.nodesize())
    }
    /// Reserves what `items` item changes can cost and `more` bytes, for an operation that passes.
    pub(crate) fn reserve_items(
        &self,
        items: u64,
        deleting: bool,
        more: u64,
    ) -> Result<Reservation> {
        let accounts = &self.space.accounts;
        if deleting {
            // An entry for what is left to do and a counter that becomes longer: no more grows.
            accounts.reserve_for_deletion(self.item_cost(items, items.min(2)) + more)
        } else {
            accounts.reserve_passing(self.item_cost(items, items) + more)
        }
    }
    /// Adds to the reservation of an operation that has joined: it cannot wait any more, so it goes
    /// past those who do.
    pub(crate) fn top_up(&self, reserved: &mut Reservation, bytes: u64, deleting: bool) -> bool {
        let more = || self.space.accounts.reserve_inside(bytes, deleting);
        let got = more().or_else(|| {
            self.release_expired();
            self.empty_purses();
            more()
        });
        got.map(|more| reserved.merge(more)).is_some()
    }
    /// Adds what `items` item changes can cost, up to where there is that much, without waiting.
    /// False when it is not there.
    pub(crate) fn top_up_for(&self, reserved: &mut Reservation, items: u64) -> bool {
        let lacking = self.item_cost(items, items).saturating_sub(reserved.bytes());
        lacking == 0 || self.top_up(reserved, lacking, false)
    }
    /// Keeps space, until the transaction is published, for what its commit will do with an
    /// operation's notes: `bytes` by which trees may grow, or that the seal copies. That the global
    /// trees' blocks are copied is what the global reserve is for; only where they are so large
    /// that it does not hold them all is something kept for that, too: leaves of three trees for
    /// each note.
    pub(crate) fn keep_for_notes(
        &self,
        txn: &Txn,
        from: &mut Reservation,
        notes: u64,
        bytes: u64,
        deleting: bool,
    ) {
        let notes = txn.notes.fetch_add(notes, Ordering::Relaxed) + notes;
        let copies =
            notes.saturating_mul(3 * u64::from(self.nodesize())).min(self.space.global_trees());
        let beyond = copies.saturating_sub(MAX_COPIES_IN_RESERVE);
        let before = txn.kept_for_copies.fetch_max(beyond, Ordering::Relaxed);
        let owed = bytes + beyond.saturating_sub(before);
        let lacking = owed.saturating_sub(from.bytes());
        if lacking > 0 && !self.top_up(from, lacking, deleting) {
            // The global reserve has to pay. The sooner it is filled again, the better.
            self.txns.request();
        }
        txn.keep(from.split(owed));
    }
    /// Keeps addresses that an operation did not need for the next one; only a few small sets, the
    /// rest is free again.
    pub(crate) fn keep_purse(&self, mut purse: Vec<Logical>) {
        // Addresses are taken from the end, so the highest go back.
        let mut surplus = purse.drain(..purse.len().saturating_sub(PURSE)).collect::<Vec<_>>();
        let mut purses = self.purses.lock();
        if purses.len() < PURSES && !purse.is_empty() {
            purses.push(purse);
        } else {
            surplus.append(&mut purse);
        }
        drop(purses);
        self.give_addresses_back(surplus);
    }
    /// Gives addresses back that operations did not need.
    pub(crate) fn empty_purses(&self) {
        let purses = std::mem::take(&mut *self.purses.lock());
        purses.into_iter().for_each(|p| self.give_addresses_back(p));
    }
    fn give_addresses_back(&self, addresses: Vec<Logical>) {
        for at in addresses {
            self.space.groups.give_back(Run::new(at, u64::from(self.nodesize())), None);
        }
    }
    /// The time for new timestamps.
    pub(crate) fn now(&self) -> Timestamp {
        if self.options.tuning.fake_clock {
            let n = self.fake_time.fetch_add(1, Ordering::Relaxed);
            return Timestamp {
                sec: 1_700_000_000 + (n / 1_000_000_000).cast_signed(),
                nsec: u32::try_from(n % 1_000_000_000).unwrap_or(0),
            };
        }
        Timestamp::now()
    }
    /// The uuid of a new subvolume: a random one; with the fake clock one that follows from the
    /// transaction and the time.
    pub(crate) fn new_uuid(&self) -> [u8; 16] {
        if !self.options.tuning.fake_clock {
            return *uuid::Uuid::new_v4().as_bytes();
        }
        let (generation, now) = (self.txns.running().generation.0, self.now());
        let half = |which: u8| {
            let mut hasher = std::hash::DefaultHasher::new();
            (generation, now, which).hash(&mut hasher);
            hasher.finish().to_le_bytes()
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&half(0));
        bytes[8..].copy_from_slice(&half(1));
        *uuid::Builder::from_random_bytes(bytes).as_uuid().as_bytes()
    }
    /// Makes everything durable that was changed before the call. Delayed data must have been
    /// written before.
    pub(crate) fn commit(&self) -> Result<()> {
        match self.txns.request() {
            Some(generation) if !fault!(self.options.tuning, FsyncDoesNotWait) => {
                self.txns.wait(generation)
            }
            _ => match self.txns.failure() {
                Some(why) => Err(Error::ReadOnly(Some(why))),
                None => Ok(()),
            },
        }
    }
    /// Makes a transaction durable that is running or was.
    pub(crate) fn commit_of(&self, generation: Generation) -> Result<()> {
        if fault!(self.options.tuning, FsyncDoesNotWait) {
            return Ok(());
        }
        self.txns.request_up_to(generation);
        self.txns.wait(generation)
    }
    /// A long operation has left its transaction and is about to join another.
    pub(crate) fn step_done(&self) -> Result<()> {
        if self.options.tuning.commit_steps { self.commit_now() } else { Ok(()) }
    }
    /// Commits, whether anything was noted or not: pinned space waits for a publication.
    pub(crate) fn commit_now(&self) -> Result<()> {
        self.txns.running().touch();
        match self.txns.request() {
            Some(generation) => self.txns.wait(generation),
            None => Ok(()),
        }
    }
}
