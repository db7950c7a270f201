//! The engine: what all parts of an open file system share that know files.
//!
//! [`Core`] contains the [`Ground`] and adds subvolumes, inodes, file data, logs, deleted trees and
//! front ends. The parts themselves live in their modules and extend `Core` there. What a seal or
//! a commit needs from them, it asks of `Core` ([`CommitSource`]); what they leave for a seal lies
//! in the transaction ([`Notes`]).

use crate::error::Result;
use crate::file::compress;
use crate::file::reclaim::ReclaimCounters;
use crate::hash::NumberMap;
use crate::inode::fronts::Fronts;
use crate::inode::late::{self, ChangedInodes};
use crate::lock;
use crate::log::TxnLog;
use crate::root::snapshot::{self, PendingSnapshot};
use crate::root::{Links, Subvolume, drop::Drops};
use crate::space::alloc::Pinned;
use crate::transaction::{CommitSource, Gathered, Ground, Txn};
use larder_format::items::RootItem;
use larder_format::{Generation, ObjectId, TreeId};
use parking_lot::{Mutex, RwLock};
use std::any::Any;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};

/// An open file system.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) ground: Ground,
    pub(crate) subvols: RwLock<NumberMap<TreeId, Arc<Subvolume>>>,
    pub(crate) data: crate::file::DataState,
    pub(crate) compression: Arc<compress::State>,
    pub(crate) reclaims: ReclaimCounters,
    pub(crate) log: crate::log::Counters,
    /// Was there a log, and is what it held in the trees?
    pub(crate) log_replayed: AtomicBool,
    /// Where subvolumes hang, as far as the published root tree does not say so yet.
    pub(crate) links: Links,
    /// Held while the shape of the tree of subvolumes changes.
    pub(crate) subvol_tree: lock::Mutex<(), lock::SubvolTree>,
    /// The next number for a subvolume; 0 until it was looked up.
    pub(crate) next_subvol: AtomicU64,
    /// Deleted subvolumes.
    pub(crate) drops: Drops,
    /// The default subvolume, if it was set.
    pub(crate) new_default: Mutex<Option<TreeId>>,
    pub(crate) fronts: Fronts,
}

impl Core {
    /// An engine on this ground, with nothing in memory yet.
    pub(crate) fn new(ground: Ground) -> Arc<Self> {
        Arc::new_cyclic(|this: &Weak<Self>| {
            ground.above.set(this.clone()).expect("a new ground has nothing above it");
            Self {
                ground,
                subvols: RwLock::default(),
                data: crate::file::DataState::default(),
                compression: Arc::default(),
                reclaims: ReclaimCounters::default(),
                log: crate::log::Counters::default(),
                log_replayed: AtomicBool::new(false),
                links: Links::default(),
                subvol_tree: lock::Mutex::default(),
                next_subvol: AtomicU64::new(0),
                drops: Drops::default(),
                new_default: Mutex::default(),
                fronts: Fronts::default(),
            }
        })
    }
}

impl Deref for Core {
    type Target = Ground;
    fn deref(&self) -> &Ground {
        &self.ground
    }
}

/// What operations leave with a transaction beyond what the ground knows.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// Inodes whose items are newer in memory than in the tree.
    pub(crate) inodes: Mutex<ChangedInodes>,
    /// Snapshots to be made at the seal.
    pub(crate) snapshots: Mutex<Vec<Arc<PendingSnapshot>>>,
    /// What was fsynced of it.
    pub(crate) log: TxnLog,
}

impl Gathered for Notes {}

impl Notes {
    /// Those of a new transaction.
    pub(crate) fn empty() -> Box<dyn Gathered> {
        Box::<Self>::default()
    }
}

impl Txn {
    /// What operations have left with it.
    pub(crate) fn gathered(&self) -> &Notes {
        let above: &dyn Any = &*self.above;
        above.downcast_ref().expect("transactions are made with `Notes::empty`")
    }
}

impl CommitSource for Core {
    fn before_seal(&self) {
        late::write_items_ahead(self);
    }
    fn seal(&self, txn: &Arc<Txn>) -> Result<()> {
        txn.gathered().log.close();
        if self.options.tuning.break_snapshot_before_items {
            snapshot::make_all(self, txn, |_, _| Ok(()))?;
            return late::flush_delayed_items(self, txn);
        }
        late::flush_delayed_items(self, txn)?;
        snapshot::make_all(self, txn, late::flush_delayed_items)
    }
    fn top_level_item(&self) -> Option<RootItem> {
        self.subvols.read().get(&ObjectId::FS_TREE).map(|s| *s.item.lock())
    }
    fn superblock_durable(&self, txn: &Txn) -> Result<Pinned> {
        txn.gathered().log.retire(self)
    }
    fn publishing(&self, generation: Generation) {
        self.links.forget(generation);
    }
}
