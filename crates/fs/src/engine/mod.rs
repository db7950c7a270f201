//! The engine: what all parts of an open file system that know files have in common.
//!
//! [`Core`] contains the [`Ground`] and adds what is in memory of files: subvolumes, inodes,
//! delayed data, deleted trees, front ends. The rooms above work on it and extend `Core` there.
//! None of them is named here.
//!
//! | module | decision it hides |
//! |---|---|
//! | `figures`, `fsyncs`, `reclaims` | how figures are gathered; those of the log and of reclaim |
//! | `exclusive` | which of the long operations on chunks and devices runs |
//! | `drops` | which deleted subvolumes wait to be dropped |
//! | `fronts` | front ends of one engine, each with its own root and holds |
//! | `changes` | what an inode remembers for the log |
//! | `compression`, `inline` | what compressing shares; which files may be in their leaf |
//! | `file_data/` | what one file has in memory but not on the device |
//! | `inodes/` | what is in memory of an inode and of a subvolume, their locks; which inodes stay |
//! | `links` | where subvolumes hang |
//! | `draft` | how changes of items are worked out before a transaction is joined |
//! | `late` | when inode items are written that operations have changed in memory |
//! | `delalloc/` | which file is written back next, and what all files may have in memory |
//!
//! A module uses only what stands above it here.

#[macro_use]
pub(crate) mod figures;

pub(crate) mod changes;
pub(crate) mod compression;
pub(crate) mod delalloc;
pub(crate) mod draft;
pub(crate) mod drops;
pub(crate) mod exclusive;
pub(crate) mod file_data;
pub(crate) mod fronts;
pub(crate) mod fsyncs;
pub(crate) mod inline;
mod inodes;
pub(crate) mod late;
mod links;
pub(crate) mod reclaims;

pub(crate) use inodes::{
    Inode, LockedExtents, PLACEHOLDER, Subvolume, WholeReader, lock_all, to_file_type, to_kind,
};
pub(crate) use links::Links;

use crate::engine::drops::Drops;
use crate::engine::fronts::Fronts;
use crate::engine::reclaims::ReclaimCounters;
use crate::hash::NumberMap;
use crate::lock::{self, Mutex, RwLock};
use crate::transaction::Ground;
use larder_format::TreeId;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// An open file system.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) ground: Ground,
    pub(crate) subvols: RwLock<NumberMap<TreeId, Arc<Subvolume>>, lock::Subvols>,
    pub(crate) data: delalloc::DataState,
    pub(crate) compression: Arc<compression::CompressionState>,
    pub(crate) reclaims: ReclaimCounters,
    pub(crate) log: fsyncs::Counters,
    /// Was there a log, and is what it held in the trees now?
    pub(crate) log_replayed: AtomicBool,
    /// Where subvolumes hang, as far as the published root tree does not say so yet.
    pub(crate) links: Links,
    /// Held while the shape of the tree of subvolumes changes.
    pub(crate) subvol_tree: Mutex<(), lock::SubvolTree>,
    /// Which long operation on chunks or devices runs.
    pub(crate) exclusive: exclusive::Slot,
    /// Held while a block group is relocated.
    pub(crate) relocation: Mutex<(), lock::Relocation>,
    /// Held during each step of dropping a tree, and during each batch of a relocation.
    pub(crate) shared_blocks: Mutex<(), lock::SharedBlocks>,
    /// The next number for a subvolume. 0 until it has been looked up.
    pub(crate) next_subvol: AtomicU64,
    /// Deleted subvolumes.
    pub(crate) drops: Drops,
    /// The default subvolume, if it has been set.
    pub(crate) new_default: Mutex<Option<TreeId>, lock::DefaultSubvol>,
    pub(crate) fronts: Fronts,
    /// Held, shared, by operations that store data which no transaction and no list of delayed data
    /// knows of, until its extent has been entered.
    pub(crate) storing: RwLock<(), lock::Storing>,
    /// Held, shared, while data is written over.
    pub(crate) in_place: RwLock<(), lock::InPlace>,
}

impl Core {
    /// An engine on this ground, with nothing in memory yet. `write_back` is what writes delayed
    /// data.
    pub(crate) fn new(ground: Ground, write_back: delalloc::WriteBack) -> Self {
        let scratch = delalloc::scratch::Scratch::new(ground.budget().scratch);
        Self {
            ground,
            subvols: RwLock::default(),
            data: delalloc::DataState::new(write_back, scratch),
            compression: Arc::default(),
            reclaims: ReclaimCounters::default(),
            log: fsyncs::Counters::default(),
            log_replayed: AtomicBool::new(false),
            links: Links::default(),
            subvol_tree: Mutex::default(),
            exclusive: exclusive::Slot::default(),
            relocation: Mutex::default(),
            shared_blocks: Mutex::default(),
            next_subvol: AtomicU64::new(0),
            drops: Drops::default(),
            new_default: Mutex::default(),
            fronts: Fronts::default(),
            storing: RwLock::default(),
            in_place: RwLock::default(),
        }
    }
}

impl Deref for Core {
    type Target = Ground;
    fn deref(&self) -> &Ground {
        &self.ground
    }
}
