//! Snapshots: made at the seal, when nothing moves.
//!
//! A caller writes delayed data back, works out the entry, leaves a [`PendingSnapshot`] with the
//! running transaction and asks for its commit. It keeps the directory locked until the seal, so
//! the entry stays possible. The seal waits until all operations have left and all inode items are
//! written. Then it copies the root ([`crate::tree::Tree::snapshot`]), and only then adds the
//! entry: a snapshot does not contain its own name. Entry, root item, links and the references
//! below the new root belong to one transaction, so a crash leaves all of them or nothing. The call
//! returns when they are durable.
//!
//! The seal may still edit a subvolume after its snapshot was taken. A block is copied first then,
//! also if it is of this very transaction: the tree knows which of its blocks are in no other tree.

use crate::api::{Timestamp, to_timespec};
use crate::engine::draft::{Changes, write_changes};
use crate::engine::{Core, Inode, Subvolume};
use crate::error::{Error, Result};
use crate::lock::{self, Mutex};
use crate::transaction::{Gathered, Handle, Link, Received, Txn};
use crate::tree::Tree;
use larder_format::items::{RootFlags, RootItem};
use larder_format::{Generation, TreeId};
use std::sync::Arc;
use zerocopy::little_endian::U64;

/// A snapshot that the seal is to make.
#[derive(Debug)]
pub(crate) struct PendingSnapshot {
    /// Its source.
    pub(crate) source: Arc<Subvolume>,
    /// Its number.
    pub(crate) id: TreeId,
    /// Its identity.
    pub(crate) uuid: [u8; 16],
    pub(crate) read_only: bool,
    /// Its entry.
    pub(crate) entry: EntryChange,
    /// Where it will hang.
    pub(crate) link: Link,
    /// The time when it was asked for.
    pub(crate) now: Timestamp,
    /// The result.
    pub(crate) outcome: Mutex<Option<Result<()>>, lock::SnapshotOutcome>,
}

/// A new entry that is to be written at the seal.
#[derive(Debug)]
pub(crate) struct EntryChange {
    pub(crate) dir: Arc<Inode>,
    pub(crate) changes: Changes,
    pub(crate) index: u64,
    pub(crate) name_bytes: i64,
}

impl EntryChange {
    /// Items that the entry changes.
    pub(crate) fn items(&self) -> u64 {
        self.changes.len() as u64
    }
    /// Writes the entry.
    ///
    /// # Errors
    /// Reading, corruption, no space.
    pub(crate) fn apply(&self, h: &mut Handle<'_>, now: Timestamp) -> Result<()> {
        write_changes(h, &self.dir.subvol, &self.changes)?;
        self.dir.change(h, |state| {
            state.last_index = state.last_index.max(Some(self.index));
            state.entries_changed(self.name_bytes, now);
        });
        Ok(())
    }
}

/// The snapshots that are to be made at a transaction's seal.
#[derive(Debug, Default)]
pub(crate) struct Snapshots(Mutex<Vec<Arc<PendingSnapshot>>, lock::Snapshots>);

impl Gathered for Snapshots {}

/// Makes all snapshots that were asked for. `flush` writes the inode items that changed in memory.
///
/// # Errors
/// Those after which the transaction must not be committed.
pub(crate) fn make_all(
    core: &Core,
    txn: &Arc<Txn>,
    flush: fn(&Core, &Arc<Txn>) -> Result<()>,
) -> Result<()> {
    let pending = std::mem::take(&mut *txn.gathered::<Snapshots>().0.lock());
    for snapshot in pending {
        let mut h = Handle::for_seal(core, txn.clone());
        let made = make(core, &mut h, &snapshot)?;
        if made.is_err() {
            core.forget_link(&h, snapshot.id);
        }
        *snapshot.outcome.lock() = Some(made);
        drop(h);
        flush(core, txn)?;
    }
    Ok(())
}

/// Makes one snapshot. The inner result is for the caller, and nothing has changed if it is an
/// error. The outer one is for the commit.
fn make(core: &Core, h: &mut Handle<'_>, p: &PendingSnapshot) -> Result<Result<()>> {
    let source = &p.source;
    if source.is_dead() {
        return Ok(Err(Error::NotFound));
    }
    let generation = h.generation();
    let edited = source.is_changed_in(generation);
    let before = source.tree.last_snapshot();
    let tree = match source.tree.snapshot(h, p.id) {
        Ok(tree) => tree,
        Err(e @ Error::NoSpace) => return Ok(Err(e)),
        Err(e) => return Err(e),
    };
    if fault!(core.options.tuning, SnapshotWithoutSharing) {
        source.tree.set_last_snapshot(before);
    }
    if !edited {
        h.txn.roots.lock().untouched.insert(source.id);
    }
    let item = root_item(core, p, &tree, edited, generation);
    let subvol = Arc::new(Subvolume::new(p.id, generation.0, tree, item));
    {
        let mut roots = h.txn.roots.lock();
        roots.untouched.insert(p.id);
    }
    let mut edited = h.txn.subvols.lock();
    edited.insert(source.id, source.below.clone());
    edited.insert(p.id, subvol.below.clone());
    drop(edited);
    core.subvols.write().insert(p.id, subvol);
    // If the entry is in the source itself, it changes the source after all.
    p.entry.apply(h, p.now)?;
    h.txn.roots.lock().untouched.remove(&p.link.parent);
    Ok(Ok(()))
}

/// The ROOT_ITEM of a snapshot that the transaction `now` makes. `edited`: the same transaction has
/// changed the source.
fn root_item(
    core: &Core,
    p: &PendingSnapshot,
    tree: &Tree,
    edited: bool,
    now: Generation,
) -> RootItem {
    let source = &p.source;
    let mut item = *source.item.lock();
    if edited {
        item.ctransid = U64::new(now.0);
        item.ctime = to_timespec(p.now);
    }
    item.last_snapshot = U64::new(tree.last_snapshot().0);
    let growth = source.tree.growth() * i64::from(core.nodesize());
    item.bytes_used = U64::new(item.bytes_used.get().saturating_add_signed(growth));
    let mut flags = item.root_flags();
    flags.set(RootFlags::RDONLY, p.read_only);
    item.set_root_flags(flags);
    item.parent_uuid = item.uuid;
    item.uuid = p.uuid;
    item.otransid = U64::new(now.0);
    item.otime = to_timespec(p.now);
    if !p.read_only {
        Received::default().apply(&mut item);
    }
    item
}

impl Core {
    /// Leaves a snapshot with the running transaction.
    pub(crate) fn note_snapshot_wanted(
        &self,
        h: &mut Handle<'_>,
        snapshot: Arc<PendingSnapshot>,
    ) -> Generation {
        self.note_link(h, snapshot.id, Some(snapshot.link.clone()));
        // The root twice, the entry, and the directory's inode. After the snapshot all of these are
        // copied again.
        h.keep_for_seal(snapshot.entry.items() + 4);
        h.txn.gathered::<Snapshots>().0.lock().push(snapshot);
        h.generation()
    }
}
