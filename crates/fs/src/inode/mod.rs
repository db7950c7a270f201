//! Inodes in memory.
//!
//! An [`Inode`] exists once per (subvolume, number) as long as anybody uses it. Two locks guard it, and the difference
//! matters: `op` serialises operations and may be held while waiting for space, devices or a transaction; `state` is
//! held for instructions only and never across any of these, because the committer takes it while it seals.
//!
//! Lock order: `op` of directories (by inode number where there are two), then `op` of other inodes, then a transaction
//! handle, then `state`, then tree locks. The inode's item in the tree may be older than `state.item`; the seal writes
//! it (see [`crate::transaction::Handle::mark_dirty`]).

pub(crate) mod orphan;

use crate::api::{InodeId, Timestamp};
use crate::file::FileData;
use crate::root::Subvolume;
use larder_format::Generation;
use larder_format::items::{InodeItem, Timespec};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;

/// An inode in memory.
#[derive(Debug)]
pub(crate) struct Inode {
    /// Who it is.
    pub(crate) id: InodeId,
    /// Its subvolume.
    pub(crate) subvol: Arc<Subvolume>,
    /// Serialises operations: shared for reading data and look-ups, exclusive for changes.
    pub(crate) op: RwLock<()>,
    /// What `stat` shows and more; short holds only.
    pub(crate) state: Mutex<InodeState>,
    /// Data that is not in extents yet.
    pub(crate) data: FileData,
}

/// The changing part of an inode.
#[derive(Debug)]
pub(crate) struct InodeState {
    /// The inode item as it is to be written, but for `size` of a regular file, see `size`.
    pub(crate) item: InodeItem,
    /// Size as everybody sees it. What goes to disk for a regular file is smaller while delayed data lies beyond
    /// what is on the device.
    pub(crate) size: u64,
    /// Highest DIR_INDEX given out, once it was looked up (directories).
    pub(crate) last_index: Option<u64>,
    /// References from outside (look-ups of a front end).
    pub(crate) holds: u64,
    /// No name is left and the orphan item is in the tree.
    pub(crate) orphan: bool,
    /// The inode's items are gone: nothing may be written any more.
    pub(crate) deleted: bool,
    /// Transaction of the last change of metadata, names or extents.
    pub(crate) last_change: Generation,
}

/// The inodes of a subvolume that are in memory, by number.
#[derive(Debug, Default)]
pub(crate) struct InodeTable(pub(crate) Mutex<HashMap<u64, Arc<Inode>>>);

/// Converts a time to the form of the format.
pub(crate) fn to_timespec(t: Timestamp) -> Timespec {
    Timespec::new(t.sec, t.nsec)
}
/// Converts a time from the form of the format.
pub(crate) fn from_timespec(t: Timespec) -> Timestamp {
    Timestamp { sec: t.sec.get(), nsec: t.nsec.get() }
}

impl InodeTable {
    /// How many inodes are in memory.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }
}

impl Inode {
    /// Brings the item in the tree up to date. The committer calls it while it seals.
    pub(crate) fn flush_item(self: &Arc<Self>, _h: &mut crate::transaction::Handle<'_>) -> crate::Result<()> {
        Ok(())
    }
}

impl crate::core::Core {
    pub(crate) fn lookup_id(&self, _dir: InodeId, _name: &[u8]) -> crate::Result<InodeId> {
        Err(crate::Error::NotFound)
    }
}
