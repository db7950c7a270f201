//! The ground: an open file system as it is below files.
//!
//! [`Ground`] joins volume, node store, epochs, space, transactions and superblock. It knows no
//! inode and no name. The engine ([`crate::engine::Core`]) contains it, and the rooms above are
//! built on the engine. A seal and a commit get what they need from there through [`CommitSource`].
//!
//! Here are the few services that join the parts: reserving, checking whether writing is still
//! allowed, asking for commits.

use crate::api::{LostChunk, MissingDevice, OpenOptions, StaleDevice, Timestamp};
use crate::budget::Budget;
use crate::completion::{self, Completion};
use crate::error::{Error, Result};
use crate::lock::{self, Mutex};
use crate::space::alloc::Allocator;
use crate::space::extent_tree::ExtentFeatures;
use crate::space::reserve::{MAX_COPIES_IN_RESERVE, Reservation};
use crate::space::{DeviceChange, Pinned};
use crate::transaction::early_flush::Flushes;
use crate::transaction::{
    CommitSource, Replacement, SubvolumeTree, Superblocks, Transactions, Txn,
};
use crate::tree::{Epochs, Item, NodeStore, Roots, TreeStats, Version};
use larder_format::{CsumType, DeviceId, Generation, Key, Logical, Superblock};
use larder_volume::{Volume, VolumeResult};
use std::hash::{Hash as _, Hasher as _};
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// What an open file system is made of, below files.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) options: Arc<OpenOptions>,
    pub(crate) volume: Arc<Volume>,
    pub(crate) store: Arc<NodeStore>,
    pub(crate) epochs: Arc<Epochs<Pinned>>,
    /// The superblock as last written. Only the committer changes it.
    pub(crate) superblock: Mutex<Box<Superblock>, lock::Superblock>,
    pub(crate) csum: CsumType,
    pub(crate) roots: Roots,
    pub(crate) space: Allocator,
    pub(crate) txns: Transactions,
    pub(crate) tree_stats: Arc<TreeStats>,
    /// Why the file system is read-only from the start, if it is.
    pub(crate) read_only: Option<String>,
    /// Devices that were missing when it was opened.
    pub(crate) missing_devices: Vec<MissingDevice>,
    /// Devices that were behind the others when it was opened.
    pub(crate) stale_devices: Vec<StaleDevice>,
    /// The marks of devices that are behind have to be written ([`super::commit`]).
    pub(crate) items_changed: AtomicBool,
    /// The replacement of a device.
    pub(crate) replacement: Replacement,
    /// Chunks of which a part cannot be read.
    pub(crate) lost_chunks: Vec<LostChunk>,
    pub(crate) fake_time: AtomicU64,
    pub(crate) published: AtomicU64,
    /// The last transaction of which nodes were written before its commit
    /// ([`super::writeout::write_shared`]).
    pub(crate) wrote_shared_in: AtomicU64,
    /// The superblock that a commit wrote last, without a log. Held while a superblock is written.
    pub(crate) superblock_written: Mutex<SuperblockWritten, lock::SuperblockOrder>,
    pub(crate) flushes: Flushes,
    /// Set once, when the file system is opened.
    pub(crate) above: OnceLock<Weak<dyn CommitSource>>,
}

/// The superblock that a commit has written, and the transaction of that commit. It is locked
/// while a superblock is written ([`super::barrier`]).
#[derive(Debug)]
pub(crate) struct SuperblockWritten {
    pub(crate) generation: Generation,
    pub(crate) superblocks: Superblocks,
    /// Logs that were attached to it.
    pub(crate) logs: u64,
}

/// What has to be kept for the commit because of notes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owed {
    /// Notes.
    pub(crate) notes: u64,
    /// Bytes by which trees may grow, or that the seal copies.
    pub(crate) bytes: u64,
}

impl SubvolumeTree {
    /// The tree as it is now.
    pub(crate) fn version(&self, ground: &Ground) -> Version {
        self.tree.version(ground.epochs.enter())
    }
    /// One item of the tree as it is now.
    pub(crate) fn get(&self, ground: &Ground, key: &Key) -> Result<Option<Item>> {
        self.tree.get(key, &ground.epochs.enter())
    }
}

impl Ground {
    /// Devices that are behind, and the commit since which each is.
    pub(crate) fn behind(&self) -> Vec<(DeviceId, Generation)> {
        let since = |id| self.stale_devices.iter().find(|s| s.id == id).map(|s| s.generation);
        let all = self.volume.behind().into_iter();
        all.map(|id| (id, since(id).unwrap_or(Generation(1)))).collect()
    }
    /// Devices that were missing when it was opened, and still are.
    pub(crate) fn missing_devices(&self) -> impl Iterator<Item = MissingDevice> {
        let known: Vec<DeviceId> = self.space.devices().iter().map(|d| d.id).collect();
        let still =
            move |d: &&MissingDevice| known.contains(&d.id) && self.volume.device(d.id).is_none();
        self.missing_devices.iter().filter(still).cloned()
    }
    /// Chunks of which a part could not be read when it was opened, as far as they still exist and
    /// the device has not been replaced.
    pub(crate) fn lost_chunks(&self) -> Vec<LostChunk> {
        let is_missing = |id: &DeviceId| self.volume.device(*id).is_none();
        let is_lost = |c: &&LostChunk| {
            self.volume.map().chunk_at(c.start).is_some() && c.devices.iter().any(is_missing)
        };
        self.lost_chunks.iter().filter(is_lost).cloned().collect()
    }
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
    /// A device has everything again. The next commit takes its mark away.
    pub(crate) fn is_current_again(&self, id: DeviceId) -> Result<()> {
        self.check_writable()?;
        self.volume.set_current(id);
        self.items_changed.store(true, Ordering::Release);
        self.touch()
    }
    /// Changes the devices, and makes that durable.
    ///
    /// What a commit has changed is taken into account behind its waiters, when chunks that are
    /// gone have been discarded. The next commit comes after that.
    pub(crate) fn change_devices(&self, change: DeviceChange) -> Result<()> {
        // A device may be what a full file system needs.
        let handle = self.begin_deleting(1)?;
        handle.txn.device_changes.lock().push(change);
        handle.txn.touch();
        drop(handle);
        self.commit_now()?;
        self.commit_now()
    }
    /// Makes the next commit take place, also if nothing else changes.
    pub(crate) fn touch(&self) -> Result<()> {
        self.begin(1)?.txn.touch();
        Ok(())
    }
    /// How memory is divided.
    pub(crate) fn budget(&self) -> Budget {
        Budget::of(self.options.cache_size)
    }
    /// Keeps the memory bounded that a transaction's changes take. From some size on it asks for a
    /// commit. From a larger size on operations wait until the transaction is sealed.
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
    /// Bytes of metadata that changing `items` items can cost if none of them grows: the copies of
    /// their paths. What is not used comes back when the handle is dropped.
    pub(crate) fn copy_cost(&self, items: u64) -> u64 {
        (items * self.tallest().max(1) + 4) * u64::from(self.nodesize())
    }
    /// Bytes of metadata that inserting or lengthening `items` items can cost: the copies of their
    /// paths, and splits.
    pub(crate) fn item_cost(&self, items: u64) -> u64 {
        self.copy_cost(items) + self.growth_cost(items)
    }
    /// What splits cost if `items` items grow.
    fn growth_cost(&self, items: u64) -> u64 {
        items * (self.tallest() + 2) * u64::from(self.nodesize())
    }
    /// Height of the highest tree so far.
    pub(super) fn tallest(&self) -> u64 {
        self.tree_stats.tallest.load(Ordering::Relaxed)
    }
    /// Reserves what `items` item changes can cost, and `more` bytes, for an operation that passes.
    pub(crate) fn reserve_items(
        &self,
        items: u64,
        deleting: bool,
        more: u64,
    ) -> Result<Reservation> {
        let accounts = &self.space.accounts;
        if deleting {
            // At most two items grow: an entry for what is left to do, and a counter.
            let cost = self.copy_cost(items) + self.growth_cost(items.min(2));
            accounts.reserve_for_deletion(cost + more)
        } else {
            accounts.reserve_passing(self.item_cost(items) + more)
        }
    }
    /// Writes what the allocator has handed out, all that comes to lie in a row in one call. A
    /// result for each.
    pub(crate) fn write_fresh(
        &self,
        writes: &[(Logical, &[IoSlice<'_>])],
    ) -> Vec<VolumeResult<()>> {
        if fault!(self.options.tuning, RowsShared) {
            return self.volume.write_batch(writes);
        }
        if fault!(self.options.tuning, NoParity) {
            return writes.iter().map(|write| self.write_without_parity(*write)).collect();
        }
        self.volume.write_fresh(writes)
    }
    /// For [`crate::tuning::faults::Fault::NoParity`].
    fn write_without_parity(&self, (at, data): (Logical, &[IoSlice<'_>])) -> VolumeResult<()> {
        let bytes: Vec<u8> = data.iter().flat_map(|part| part.iter().copied()).collect();
        let (mut at, mut rest) = (at, &bytes[..]);
        while !rest.is_empty() {
            let found = self.volume.map().lookup(at, rest.len() as u64)?;
            let (piece, more) = rest.split_at(usize::try_from(found.len).unwrap_or(usize::MAX));
            for stripe in &found.stripes {
                if let Some(device) = self.volume.device(stripe.device) {
                    let _ = device.write_at(stripe.at, piece);
                }
            }
            (at, rest) = (at.plus(found.len), more);
        }
        Ok(())
    }
    /// Adds to the reservation of an operation that has joined. It cannot wait any more, so it goes
    /// past the requests in line.
    pub(crate) fn top_up(&self, reserved: &mut Reservation, bytes: u64, deleting: bool) -> bool {
        let more = || self.space.accounts.reserve_inside(bytes, deleting);
        let got = more().or_else(|| {
            self.space.discards.release_expired();
            self.space.give_back_preallocated();
            more()
        });
        got.map(|more| reserved.merge(more)).is_some()
    }
    /// Fills a reservation up to what `items` item changes can cost, without waiting. Returns false
    /// if there is not enough space.
    pub(crate) fn top_up_for(&self, reserved: &mut Reservation, items: u64) -> bool {
        let lacking = self.item_cost(items).saturating_sub(reserved.bytes());
        lacking == 0 || self.top_up(reserved, lacking, false)
    }
    /// Keeps space, until the transaction is published, for what its commit will do with an
    /// operation's notes. The global reserve pays for the copies of the global trees' blocks. Only
    /// if these trees are so large that it cannot, something is kept for the copies, too: leaves of
    /// three trees for each note.
    pub(crate) fn keep_for_notes(
        &self,
        txn: &Txn,
        from: &mut Reservation,
        owed: Owed,
        deleting: bool,
    ) {
        let notes = txn.notes.fetch_add(owed.notes, Ordering::Relaxed) + owed.notes;
        let copies =
            notes.saturating_mul(3 * u64::from(self.nodesize())).min(self.space.global_trees());
        let beyond = copies.saturating_sub(MAX_COPIES_IN_RESERVE);
        let before = txn.kept_for_copies.fetch_max(beyond, Ordering::Relaxed);
        let bytes = owed.bytes + beyond.saturating_sub(before);
        let lacking = bytes.saturating_sub(from.bytes());
        if lacking > 0 && !self.top_up(from, lacking, deleting) {
            // The global reserve has to pay, so it should be filled again soon.
            self.txns.request();
        }
        txn.keep(from.split(bytes));
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
    /// The uuid of a new subvolume. It is random; with the fake clock it follows from the
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
    /// Makes everything durable that was changed before the call, and then completes `done`. The
    /// caller has written delayed data back before.
    pub(crate) fn when_committed(&self, done: Completion) {
        match self.txns.request() {
            Some(generation) if !fault!(self.options.tuning, FsyncDoesNotWait) => {
                self.txns.when_published(generation, done);
            }
            _ => done.complete(match self.txns.failure() {
                Some(why) => Err(Error::ReadOnly(Some(why))),
                None => Ok(()),
            }),
        }
    }
    /// Makes a transaction durable that is or was the running one, and then completes `done`.
    pub(crate) fn when_committed_up_to(&self, generation: Generation, done: Completion) {
        if fault!(self.options.tuning, FsyncDoesNotWait) {
            return done.complete(Ok(()));
        }
        self.txns.request_up_to(generation);
        self.txns.when_published(generation, done);
    }
    /// As [`when_committed`](Self::when_committed), and waits for it.
    pub(crate) fn commit(&self) -> Result<()> {
        completion::wait_for(|done| self.when_committed(done))
    }
    /// A long operation has left its transaction and is about to join another.
    pub(crate) fn step_done(&self) -> Result<()> {
        if self.options.tuning.commit_steps { self.commit_now() } else { Ok(()) }
    }
    /// Commits, whether or not anything was noted: pinned space waits for a publication.
    pub(crate) fn commit_now(&self) -> Result<()> {
        self.txns.running().touch();
        match self.txns.request() {
            Some(generation) => self.txns.wait(generation),
            None => Ok(()),
        }
    }
    /// The layer above, for a seal or a commit. That layer contains this one.
    pub(crate) fn above(&self) -> Arc<dyn CommitSource> {
        let above = self.above.get().and_then(Weak::upgrade);
        above.expect("a commit runs only while the layer above exists")
    }
}
