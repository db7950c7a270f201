//! What a transaction collects while it runs.

use crate::api::InodeId;
use crate::budget::Collected;
use crate::lock::{self, Mutex};
use crate::space::alloc::{ChunkNotes, NewGroup};
use crate::space::refs::DelayedRefs;
use crate::space::reserve::Reservation;
use crate::space::{DeviceChange, Run};
use crate::transaction::{RootNotes, SubvolumeTree};
use crate::tree::OnPath;
use larder_format::features::Incompat;
use larder_format::items::Profile;
use larder_format::{Generation, Logical, ObjectId, TreeId};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a room above gathers in a transaction. Nothing below looks into it.
pub(crate) trait Gathered: Any + Debug + Send + Sync {}

/// Something that only a commit can move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GlobalMove {
    /// A block of a tree.
    Block(TreeId, OnPath),
    /// The content of a file in the root tree: a space cache of the first version. It is out of
    /// date since the first commit, so it is removed.
    Cache(ObjectId),
}

/// One transaction.
#[derive(Debug)]
pub(crate) struct Txn {
    /// Its number.
    pub(crate) generation: Generation,
    /// Is there anything to commit?
    pub(crate) dirty: AtomicBool,
    /// Changes of extent references.
    pub(crate) refs: Mutex<DelayedRefs, lock::Refs>,
    /// Checksums of new data: address of the first sector → checksums of that and following
    /// sectors.
    pub(crate) csums: Mutex<BTreeMap<Logical, Vec<u8>>, lock::Csums>,
    /// Preallocated extents that have got data in place, and the inode of that data.
    pub(crate) filled: Mutex<BTreeMap<Logical, InodeId>, lock::Filled>,
    /// Subvolumes whose trees were edited.
    pub(crate) subvols: Mutex<BTreeMap<TreeId, Arc<SubvolumeTree>>, lock::Edited>,
    /// What the rooms above gather in this transaction.
    above: Vec<Box<dyn Gathered>>,
    /// What the commit is to do in the root tree.
    pub(crate) roots: Mutex<RootNotes, lock::RootNotes>,
    /// Block groups made in this transaction; their items are written by its commit.
    pub(crate) new_groups: Mutex<Vec<NewGroup>, lock::NewGroups>,
    /// Space kept for what the notes will cost at the commit.
    reserved: Mutex<Option<Reservation>, lock::Kept>,
    /// Notes so far.
    pub(crate) notes: AtomicU64,
    /// Bytes that are kept because the global reserve does not hold a copy of all global trees.
    pub(crate) kept_for_copies: AtomicU64,
    /// Dirty blocks so far, and changed inodes.
    pub(crate) blocks: AtomicU64,
    pub(crate) changed_inodes: AtomicU64,
    /// Blocks of a log that is not needed once this transaction is durable.
    pub(crate) freed_log: Mutex<Vec<Run>, lock::FreedLog>,
    /// How many directories have moved. What is below them has another path now.
    pub(crate) moves: AtomicU64,
    /// What the commit is to move in global trees.
    pub(crate) global_moves: Mutex<Vec<GlobalMove>, lock::GlobalMoves>,
    /// How the commit is to change the devices.
    pub(crate) device_changes: Mutex<Vec<DeviceChange>, lock::DeviceChanges>,
    /// Has a relocation changed where something of a subvolume lies?
    pub(crate) relocated: AtomicBool,
    /// New label for the superblock.
    pub(crate) label: Mutex<Option<Vec<u8>>, lock::Label>,
    /// Incompat bits to set.
    pub(crate) incompat: AtomicU64,
}

impl Txn {
    pub(crate) fn new(generation: Generation, above: Vec<Box<dyn Gathered>>) -> Self {
        Self {
            generation,
            dirty: AtomicBool::new(false),
            refs: Mutex::default(),
            csums: Mutex::default(),
            filled: Mutex::default(),
            subvols: Mutex::default(),
            above,
            roots: Mutex::default(),
            new_groups: Mutex::default(),
            reserved: Mutex::default(),
            notes: AtomicU64::new(0),
            kept_for_copies: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            changed_inodes: AtomicU64::new(0),
            freed_log: Mutex::default(),
            moves: AtomicU64::new(0),
            global_moves: Mutex::default(),
            device_changes: Mutex::default(),
            relocated: AtomicBool::new(false),
            label: Mutex::default(),
            incompat: AtomicU64::new(0),
        }
    }
    /// What one of the rooms above gathers in this transaction.
    pub(crate) fn gathered<T: Gathered>(&self) -> &T {
        let found = self.above.iter().find_map(|one| {
            let one: &dyn Any = &**one;
            one.downcast_ref()
        });
        found.expect("transactions are made with one for each room")
    }
    /// Keeps more space for the commit.
    pub(crate) fn keep(&self, more: Reservation) {
        let mut reserved = self.reserved.lock();
        match &mut *reserved {
            Some(kept) => kept.merge(more),
            none @ None => *none = Some(more),
        }
    }
    /// Bytes that are kept for the commit.
    pub(crate) fn kept(&self) -> u64 {
        self.reserved.lock().as_ref().map_or(0, Reservation::bytes)
    }
    /// Takes what was kept.
    pub(crate) fn take_reserved(&self) -> Option<Reservation> {
        self.reserved.lock().take()
    }
    /// About how much memory it takes.
    pub(crate) fn memory(&self, nodesize: u32) -> u64 {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let collected = Collected {
            nodes: get(&self.blocks),
            notes: get(&self.notes),
            inodes: get(&self.changed_inodes),
        };
        collected.memory(nodesize)
    }
    /// Notes that there is something to commit.
    pub(crate) fn touch(&self) {
        self.dirty.store(true, Ordering::Release);
    }
}

impl ChunkNotes for Txn {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn note_group(&self, group: NewGroup) {
        let feature = group.chunk.profile().map_or(Incompat::empty(), Profile::needs);
        self.incompat.fetch_or(feature.bits(), Ordering::Relaxed);
        self.new_groups.lock().push(group);
        self.touch();
    }
}
