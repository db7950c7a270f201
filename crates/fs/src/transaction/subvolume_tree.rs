//! A subvolume as transactions know it: a changing tree and its ROOT_ITEM.
//!
//! The layer above knows what is in it and which of its inodes are in memory
//! ([`crate::engine::Subvolume`]).

use crate::lock::{self, Exclusive, Mutex, RwLock, Shared};
use crate::tree::{Root, Tree};
use larder_format::items::RootItem;
use larder_format::{Generation, TreeId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The tree of a subvolume.
#[derive(Debug)]
pub(crate) struct SubvolumeTree {
    /// Its tree id.
    pub(crate) id: TreeId,
    /// Offset of its ROOT_ITEM's key: 0, or the transaction that made the snapshot.
    pub(crate) key_offset: u64,
    /// Its items.
    pub(crate) tree: Tree,
    /// The tree as the last sealed transaction left it: its root, and the transaction that follows
    /// that one.
    base: Mutex<(Generation, Root), lock::SealedRoot>,
    /// Its ROOT_ITEM as last read or written.
    pub(crate) item: Mutex<RootItem, lock::SubvolItem>,
    /// The last transaction that has changed an item of it. Blocks may have moved since.
    changed_in: AtomicU64,
    /// Was it deleted? Then nothing in it changes any more.
    dead: AtomicBool,
    /// Held for writing while a block that it shares is replaced by a copy which says other places
    /// of data. Who changes extents of a file holds it for reading.
    repointing: RwLock<(), lock::Repointing>,
    /// How often a relocation has changed where data of it lies.
    moves: AtomicU64,
}

impl SubvolumeTree {
    /// A subvolume that is new, or whose ROOT_ITEM was read.
    pub(crate) fn new(id: TreeId, key_offset: u64, tree: Tree, item: RootItem) -> Self {
        let root = tree.root();
        Self {
            id,
            key_offset,
            base: Mutex::new((root.ptr.generation.next(), root)),
            tree,
            changed_in: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            item: Mutex::new(item),
            repointing: RwLock::new(()),
            moves: AtomicU64::new(0),
        }
    }
    /// While this is held, no shared block of it is replaced.
    pub(crate) fn keep_blocks(&self) -> Shared<'_, ()> {
        self.repointing.read()
    }
    /// While this is held, nobody changes extents of its files. Notes that some move.
    pub(crate) fn replace_blocks(&self) -> Exclusive<'_, ()> {
        let alone = self.repointing.write();
        self.note_move();
        alone
    }
    /// Notes that the place of data has changed. The caller holds the file's extent lock.
    pub(crate) fn note_move(&self) {
        self.moves.fetch_add(1, Ordering::AcqRel);
    }
    /// How often the place of data has changed. What was read since stays true while a file's
    /// extent lock is held under which this is still the same.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Acquire)
    }
    /// Was it deleted?
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
    pub(crate) fn set_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }
    /// Notes that this transaction changes items of it.
    pub(crate) fn changes_in(&self, generation: Generation) {
        self.changed_in.store(generation.0, Ordering::Release);
    }
    /// Has this transaction changed items of it?
    pub(crate) fn is_changed_in(&self, generation: Generation) -> bool {
        self.changed_in.load(Ordering::Acquire) == generation.0
    }
    /// Notes the tree's root at a seal.
    pub(crate) fn set_base(&self, before: Generation, root: Root) {
        *self.base.lock() = (before, root);
    }
    /// Lets go of a root that is on the device now.
    pub(crate) fn settle_base(&self, frozen: &Root) {
        let mut base = self.base.lock();
        if base.1.ptr == frozen.ptr {
            base.1.node = None;
        }
    }
    /// The root that the tree had before the transaction `generation`, which is the running one.
    /// `None` if it had none.
    pub(crate) fn base_before(&self, generation: Generation) -> Option<Root> {
        let base = self.base.lock();
        (base.0 <= generation).then(|| base.1.clone())
    }
}
