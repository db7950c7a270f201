//! What a seal and a commit need from the engine, brought together from the rooms that have it.

use crate::engine::Core;
use crate::engine::late::{self, LateItems};
use crate::error::Result;
use crate::log::TxnLog;
use crate::space::alloc::Pinned;
use crate::subvolume::snapshot::{self, Snapshots};
use crate::transaction::{CommitSource, Gathered, Txn};
use larder_format::items::RootItem;
use larder_format::{Generation, ObjectId};
use std::sync::Arc;

/// What operations leave with a transaction, for a new one.
pub(super) fn gathered() -> Vec<Box<dyn Gathered>> {
    vec![Box::<LateItems>::default(), Box::<Snapshots>::default(), Box::<TxnLog>::default()]
}

impl CommitSource for Core {
    fn before_seal(&self) {
        late::write_items_ahead(self);
    }
    fn seal(&self, txn: &Arc<Txn>) -> Result<()> {
        TxnLog::of(txn).close(self, txn);
        if fault!(self.options.tuning, SnapshotBeforeItems) {
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
        TxnLog::of(txn).retire(self)
    }
    fn publishing(&self, generation: Generation) {
        self.links.forget(generation);
    }
}
