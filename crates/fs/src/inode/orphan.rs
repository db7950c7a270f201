//! Deleting inodes that have no name left.
//!
//! An inode is deleted when it has neither names nor holds. Most inodes have few items, and go with
//! all of them, extents included, in one edit. Of the others the data goes first, in as many
//! transactions as that takes, then the other items in batches, and last the inode item together
//! with the ORPHAN item that announced the deletion. What a crash leaves of that is still
//! announced, and is finished when the subvolume is used for the first time afterwards. An ORPHAN
//! item of an inode that has names announces a truncation instead; current implementations do not
//! make such items ([`file::truncate`]).

use super::draft::{prepare, write_changes};
use super::{Inode, names};
use crate::api::{FileKind, may_wait, past_no_return};
use crate::engine::fronts::FrontId;
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Result};
use crate::file::{self, LastRefs};
use crate::transaction::Handle;
use crate::tree::doing;
use larder_format::items::keys::{inode_key, orphan_key};
use larder_format::{Key, KeyType, ObjectId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Items that one transaction removes. Each may need room for a path.
const BATCH: usize = 16;

/// Deletes an inode if it has neither names nor holds. The caller does not learn of a failure: the
/// inode stays announced.
pub(super) fn delete_unheld(core: &Core, inode: &Arc<Inode>) {
    let _waiting_is_allowed = past_no_return();
    if let Err(e) = delete(core, inode) {
        tracing::warn!(
            "inode {} of subvolume {} was not deleted yet: {e}",
            inode.id.ino,
            inode.id.subvol
        );
    }
}

fn delete(core: &Core, inode: &Arc<Inode>) -> Result<()> {
    let _guard = inode.lock_op()?;
    if !is_to_go(inode) {
        return Ok(());
    }
    inode.subvol.look_up_highest_ino(core)?;
    // With `op` held no data becomes delayed. Data whose write-back is complete is among the items.
    let delayed = inode.data.delayed_bytes() > 0;
    // Once is enough: what is left then is not data, whatever a damaged image calls it.
    let mut truncated = inode.kind != FileKind::Regular;
    loop {
        let items = some_items(core, inode, truncated)?;
        let at_once = items.all && !delayed;
        if !truncated && (delayed || items.extents.is_some()) && !at_once {
            file::truncate(core, inode, 0)?;
            truncated = true;
            continue;
        }
        let handle = items.delete(core, inode)?;
        if items.all {
            inode.state.lock().deleted = true;
            inode.subvol.inodes.remove(inode.id.ino);
            drop(handle);
            return Ok(());
        }
    }
}

/// Has the inode neither names nor holds? The caller holds its `op`.
fn is_to_go(inode: &Inode) -> bool {
    let state = inode.state.lock();
    // The root of a subvolume stays, whatever a damaged image says about it.
    let root = inode.id.ino == inode.subvol.root_dir;
    let unnamed = !state.deleted && state.item.nlink.get() == 0;
    !root && unnamed && !inode.subvol.inodes.is_held(inode.object())
}

/// What an inode has besides its inode item.
struct Items {
    /// Some of the items.
    keys: Vec<Key>,
    /// Are these all of them?
    all: bool,
    /// What those items among them that are extents of its data refer to; `None` if there are none.
    extents: Option<LastRefs>,
}

impl Items {
    /// Deletes these items, and with the last of them the inode item together with the
    /// announcement.
    fn delete<'a>(&self, core: &'a Core, inode: &Arc<Inode>) -> Result<Handle<'a>> {
        let prepared = prepare(core, &inode.subvol, true, |d| {
            for key in &self.keys {
                d.delete_known(key);
            }
            if self.all {
                d.delete_known(&inode_key(inode.object()));
                names::remove_orphan(d, inode.object())?;
            }
            Ok(())
        })?;
        let Some(refs) = &self.extents else { return Ok(prepared.write()?.0) };
        let (mut handle, changes) = prepared.into_changes();
        refs.drop_with(&mut handle, inode, |h| write_changes(h, &inode.subvol, &changes))?;
        Ok(handle)
    }
}

/// Some items of an inode, without the inode item. `no_data`: none of them is data.
fn some_items(core: &Core, inode: &Inode, no_data: bool) -> Result<Items> {
    let first = Key::new(inode.object(), KeyType::INODE_ITEM, 1);
    let last = Key::new(inode.object(), KeyType(u8::MAX), u64::MAX);
    let mut found = Items { keys: Vec::new(), all: true, extents: None };
    let moves = inode.subvol.moves();
    inode.subvol.version(core).scan(&first, &last, |item| {
        found.all = found.keys.len() < BATCH;
        if found.all {
            found.keys.push(item.key);
            if item.key.kind == KeyType::EXTENT_DATA && !no_data {
                found
                    .extents
                    .get_or_insert_with(|| LastRefs::since(moves))
                    .add(inode.subvol.id, item)?;
            }
        }
        Ok(found.all)
    })?;
    Ok(found)
}

/// Deletes all inodes that exist only because of holds, and forgets the holds.
///
/// # Errors
/// None at present: what could not be deleted stays announced on disk.
pub(crate) fn delete_held(core: &Core) -> Result<()> {
    let subvols: Vec<_> = core.subvols.read().values().cloned().collect();
    for subvol in subvols {
        for inode in subvol.inodes.drop_holds() {
            delete_unheld(core, &inode);
        }
    }
    Ok(())
}

/// Deletes all inodes that exist only because of one front end's holds, and forgets these holds.
pub(crate) fn delete_held_by(core: &Core, front: FrontId) {
    let subvols: Vec<_> = core.subvols.read().values().cloned().collect();
    for subvol in subvols {
        for inode in subvol.inodes.drop_holds_of(front) {
            delete_unheld(core, &inode);
        }
    }
}

/// Cleans up in the subvolumes that are loaded. Others are cleaned up when they are used for the
/// first time.
///
/// # Errors
/// None at present, see [`Core::clean_once`].
pub(crate) fn clean_up_after_crash(core: &Core) -> Result<()> {
    let _doing = doing("clean-up after a crash");
    let subvols: Vec<_> = core.subvols.read().values().cloned().collect();
    for subvol in subvols {
        core.clean_once(&subvol)?;
    }
    Ok(())
}

impl Core {
    /// Finishes what a crash has left in a subvolume, when it is used for the first time. What
    /// cannot be finished is left as it is, with a warning, because it disturbs nothing.
    ///
    /// # Errors
    /// `WouldBlock`.
    pub(super) fn clean_once(&self, subvol: &Arc<Subvolume>) -> Result<()> {
        let table = &subvol.inodes;
        if table.clean.load(Ordering::Acquire)
            || self.check_writable().is_err()
            || subvol.check_writable().is_err()
        {
            return Ok(());
        }
        may_wait()?;
        let _cleaning = table.cleaning.lock();
        if table.clean.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Err(e) = clean(self, subvol) {
            tracing::warn!("cleaning up in subvolume {}: {e}", subvol.id);
        }
        table.clean.store(true, Ordering::Release);
        Ok(())
    }
}

/// Deals with all ORPHAN items of a subvolume that is not in use yet. What cannot be deleted is
/// left as it is, with a warning.
///
/// # Errors
/// Reading or corruption.
pub(crate) fn clean(core: &Core, subvol: &Arc<Subvolume>) -> Result<()> {
    let mut next = Some(orphan_key(ObjectId(0)));
    while let Some(from) = next {
        let Some(item) = subvol.version(core).at_or_after(&from)? else { break };
        if item.key.objectid != ObjectId::ORPHAN || item.key.kind != KeyType::ORPHAN_ITEM {
            break;
        }
        next = item.key.successor();
        let ino = item.key.offset;
        if let Err(e) = clean_one(core, subvol, ino) {
            tracing::warn!("inode {ino} of subvolume {} was not cleaned up: {e}", subvol.id);
        }
    }
    Ok(())
}

fn clean_one(core: &Core, subvol: &Arc<Subvolume>, ino: u64) -> Result<()> {
    let inode = match subvol.inodes.get(core, subvol, ino) {
        Ok(inode) => inode,
        Err(Error::NotFound) => return forget_orphan(core, subvol, ino),
        Err(e) => return Err(e),
    };
    let (links, size) = {
        let state = inode.state.lock();
        (state.item.nlink.get(), state.size)
    };
    if links == 0 {
        subvol.inodes.set_orphan(&inode);
        return delete(core, &inode);
    }
    let _guard = inode.lock_op()?;
    if inode.kind == FileKind::Regular {
        file::truncate(core, &inode, size)?;
    }
    forget_orphan(core, subvol, ino)
}

/// Removes an ORPHAN item that announces nothing any more.
fn forget_orphan(core: &Core, subvol: &Arc<Subvolume>, ino: u64) -> Result<()> {
    prepare(core, subvol, true, |d| names::remove_orphan(d, ObjectId(ino)))?.write()?;
    Ok(())
}
