//! Inode items that are written late: at the seal, or a little ahead of it.
//!
//! An operation changes an inode in memory and notes it with its transaction. However often the
//! inode changes, its item is written once. If very many are noted, most are written while
//! operations go on, so that the seal is short: all operations wait for it.

use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::hash::NumberMap;
use crate::lock::{self, Mutex};
use crate::space::SpaceKind;
use crate::space::reserve::Reservation;
use crate::transaction::{Gathered, Handle, Txn};
use larder_format::TreeId;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Inodes whose items are newer in memory than in the tree.
pub(crate) type ChangedInodes = NumberMap<(TreeId, u64), Arc<Inode>>;

/// The changed inodes of a transaction.
#[derive(Debug, Default)]
pub(crate) struct LateItems(pub(crate) Mutex<ChangedInodes, lock::LateItems>);

impl Gathered for LateItems {}

impl Core {
    /// Like `begin`, to change an inode's attributes and no items.
    pub(crate) fn begin_for_item(&self, inode: &Inode) -> Result<Handle<'_>> {
        Handle::join_for_item(self, &inode.noted_in)
    }
}

impl Handle<'_> {
    /// Notes that an inode's item has to be written at the seal.
    ///
    /// An inode that is noted is not noted again, unless its item was written meanwhile
    /// ([`write_items_ahead`]). Each side does its own part first, and after a fence looks for the
    /// part of the other. So either the writer of the item sees what the caller has changed, or the
    /// caller sees that the writer has begun.
    pub(crate) fn mark_dirty(&mut self, inode: &Arc<Inode>) {
        fence(Ordering::SeqCst);
        if inode.noted_in.load(Ordering::Relaxed) == self.txn.generation.0 {
            return;
        }
        self.txn.touch();
        let others = {
            let mut inodes = self.txn.gathered::<LateItems>().0.lock();
            inode.noted_in.store(self.txn.generation.0, Ordering::Relaxed);
            inodes.insert((inode.id.subvol, inode.id.ino), inode.clone())
        };
        if others.is_none() {
            self.txn.changed_inodes.fetch_add(1, Ordering::Relaxed);
        }
        if others.is_none() && inode.state.lock().item.generation.get() != self.txn.generation.0 {
            // Space for the path to the item. A new inode's item is in a leaf that this transaction
            // has copied already.
            self.keep_for_path();
        }
    }
}

/// With at least this many dirty inodes, items are written before the seal.
const MANY_INODES: usize = 1000;
/// How many items one handle writes then.
const AHEAD: usize = 64;

/// Writes inode items that operations left to the seal while operations go on, if there are many.
/// The seal, for which all operations wait, then has only those that have changed again.
///
/// It never waits for space or a seal, because the committer is the thread that such a wait would
/// be for. What it cannot write, the seal writes. Only the committer may call it: a seal in the
/// midst of it would not find the inodes that it has taken.
pub(crate) fn write_items_ahead(core: &Core) {
    let txn = core.txns.running();
    let many = core.options.tuning.seal_ahead.unwrap_or(MANY_INODES);
    for _ in 0..4 {
        let mut dirty = {
            let mut inodes = txn.gathered::<LateItems>().0.lock();
            if inodes.len() < many {
                return;
            }
            take_changed(&mut inodes)
        };
        let mut order: Vec<_> = dirty.keys().copied().collect();
        // Items of neighbours share leaves.
        order.sort_unstable();
        for some in order.chunks(AHEAD) {
            let handle = reserve_ahead(core, &txn, some.len() as u64)
                .map(|r| crate::api::no_wait(|| Handle::join_with(core, r)));
            let written = match handle {
                Some(Ok(mut handle)) => some.iter().try_for_each(|id| {
                    dirty[id].write_item_ahead(&mut handle)?;
                    dirty.remove(id);
                    Ok(())
                }),
                Some(Err(e)) => Err(e),
                None => Err(Error::NoSpace),
            };
            if let Err(e) = written {
                tracing::debug!("inode items are left to the seal: {e}");
                let mut inodes = txn.gathered::<LateItems>().0.lock();
                dirty.into_iter().for_each(|(id, inode)| {
                    inodes.entry(id).or_insert(inode);
                });
                return;
            }
        }
    }
}

/// Space to write `items` items: what was kept for them, and more if there is any.
fn reserve_ahead(core: &Core, txn: &Txn, items: u64) -> Option<Reservation> {
    let cost = core.copy_cost(items);
    let mut kept =
        txn.take_reserved().unwrap_or_else(|| core.space.accounts.empty(SpaceKind::Metadata));
    let mut mine = kept.split(cost);
    let lacking = cost - mine.bytes();
    match core.space.accounts.try_reserve(SpaceKind::Metadata, lacking) {
        Some(more) => mine.merge(more),
        None => kept.merge(mine.split(u64::MAX)),
    }
    txn.keep(kept);
    (mine.bytes() == cost).then_some(mine)
}

/// Takes the inodes whose items are to be written. From here on an operation that changes one notes
/// it again. Snapshots, for one, are made in the midst of the seal, and change the directories that
/// they appear in.
fn take_changed(inodes: &mut ChangedInodes) -> ChangedInodes {
    inodes.values().for_each(|i| i.noted_in.store(0, Ordering::Relaxed));
    let changed = std::mem::take(inodes);
    // Either the writer of the items sees a change, or the operation that makes it sees that they
    // were taken: see `Handle::mark_dirty`.
    fence(Ordering::SeqCst);
    changed
}

/// Writes the inode items that operations left to the seal.
pub(crate) fn flush_delayed_items(core: &Core, txn: &Arc<Txn>) -> Result<()> {
    let inodes = take_changed(&mut txn.gathered::<LateItems>().0.lock());
    let mut handle = Handle::for_seal(core, txn.clone());
    for inode in inodes.into_values() {
        inode.flush_item(&mut handle)?;
    }
    Ok(())
}
