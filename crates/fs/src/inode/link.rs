//! Giving an inode one more name, and taking names away.
//!
//! An inode that loses its last name stays as long as it is held. The ORPHAN item that the same
//! edit adds says so on disk: after a crash the next opening of the file system deletes the inode
//! ([`super::orphan`]).

use super::allowed::{check_gives_names, check_not_fixed, check_takes_names};
use super::draft::prepare;
use super::names::{self, Name, Target, check_name, check_new_name, name_bytes};
use super::subvolume::{self, Deletes};
use super::{Inode, attr, dir, lock_all, orphan, to_file_type};
use crate::api::{Attr, InodeId};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use larder_format::items::keys::dir_item_key;
use larder_format::{KeyType, LINK_MAX};
use std::sync::Arc;

/// Gives an inode one more name.
///
/// # Errors
/// `Exists`; `NotFound` for a removed directory or an inode that has lost its names; `NotPermitted`
/// for a directory or by flags; `CrossSubvolume`; `TooManyLinks`; `Overflow`; no space; read-only.
pub(crate) fn link(core: &Core, id: InodeId, dir: InodeId, name: &[u8]) -> Result<Attr> {
    let inode = core.inode(id)?;
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    check_new_name(name)?;
    if id.subvol != dir.id.subvol {
        return Err(Error::CrossSubvolume);
    }
    if inode.is_dir() {
        return Err(Error::NotPermitted("a directory has one name"));
    }
    dir.check_changeable(core)?;
    let guards = lock_all(&[&dir, &inode])?;
    check_takes_names(&dir)?;
    check_not_fixed(&inode)?;
    let at = Name { dir: dir.object(), name };
    if dir::find(core, &dir.subvol, at)?.is_some() {
        return Err(Error::Exists);
    }
    let unnamed = check_takes_link(&inode)?;
    let index = dir::last_index(core, &dir)? + 1;
    let extrefs = names::extrefs(core);
    let prepared = prepare(core, &dir.subvol, false, |d| {
        if unnamed {
            names::remove_orphan(d, inode.object())?;
        }
        names::add(d, at, index, inode.object(), to_file_type(inode.kind), extrefs)
    })?;
    let (mut handle, ()) = prepared.write()?;
    let now = core.now();
    dir.change(&mut handle, |state| {
        state.last_index = Some(index);
        state.entries_changed(name_bytes(name), now);
    });
    inode.change(&mut handle, |state| {
        state.links_changed(1, now);
        state.linkable = false;
    });
    if unnamed {
        inode.subvol.inodes.unset_orphan(id.ino);
    }
    drop(handle);
    drop(guards);
    attr::get(&inode)
}

/// Fails if an inode cannot get one more name. Returns whether it has none at all. The caller holds
/// its `op`.
fn check_takes_link(inode: &Inode) -> Result<bool> {
    let state = inode.state.lock();
    match state.item.nlink.get() {
        _ if state.deleted => Err(Error::NotFound),
        0 if !state.linkable => Err(Error::NotFound),
        n if n >= LINK_MAX => Err(Error::TooManyLinks),
        n => Ok(n == 0),
    }
}

/// Removes a name of anything but a directory.
///
/// # Errors
/// `NotFound`; `IsDirectory`, also for a subvolume; `NotPermitted` by flags; no space; read-only.
pub(crate) fn unlink(core: &Core, dir: InodeId, name: &[u8]) -> Result<()> {
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    check_name(name)?;
    if name == b"." || name == b".." {
        return Err(Error::IsDirectory);
    }
    dir.check_changeable(core)?;
    let guard = dir.lock_op()?;
    let at = Name { dir: dir.object(), name };
    let inode = loop {
        let target = dir::find(core, &dir.subvol, at)?.ok_or(Error::NotFound)?;
        if target.location.kind == KeyType::ROOT_ITEM {
            return Err(Error::IsDirectory);
        }
        if let Some(inode) = named_inode(core, &dir, at, target)? {
            break inode;
        }
    };
    if inode.is_dir() {
        return Err(Error::IsDirectory);
    }
    // The directory first, then an inode that is no directory: that is the common order.
    let inode_guard = inode.lock_op()?;
    remove_name(core, &dir, name, &inode)?;
    drop((guard, inode_guard));
    delete_if_last(core, &inode);
    Ok(())
}

/// Removes an empty directory.
///
/// # Errors
/// `NotFound`; `NotDirectory`; `NotEmpty`; for a subvolume, in which `root` must not be, the errors
/// of [`subvolume::delete`]; `NotPermitted` by flags; no space; read-only.
pub(crate) fn rmdir(core: &Core, dir: InodeId, name: &[u8]) -> Result<()> {
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    check_name(name)?;
    match name {
        b"." => return Err(Error::Invalid("a directory cannot be removed by the name .")),
        b".." => return Err(Error::NotEmpty),
        _ => {}
    }
    dir.check_changeable(core)?;
    if remove_placeholder(core, &dir, name)? {
        return Ok(());
    }
    let at = Name { dir: dir.object(), name };
    if dir::find(core, &dir.subvol, at)?.is_some_and(|t| t.location.kind == KeyType::ROOT_ITEM) {
        return subvolume::delete(core, dir.id, name, Deletes::Empty).map(|_| ());
    }
    let inode = with_named(core, &dir, name, |inode| {
        // Permission is checked before anything that could tell the caller about the named inode.
        check_gives_names(&dir, inode)?;
        inode.expect_dir()?;
        if !dir::is_empty(&inode.subvol.version(core), inode)? {
            return Err(Error::NotEmpty);
        }
        remove_name(core, &dir, name, inode)
    })?;
    delete_if_last(core, &inode);
    Ok(())
}

/// Runs `f` with the inode to which a name leads, with the directory and the inode locked, and
/// returns the inode. For directories: they must not be locked before their order is known.
fn with_named(
    core: &Core,
    dir: &Arc<Inode>,
    name: &[u8],
    f: impl FnOnce(&Arc<Inode>) -> Result<()>,
) -> Result<Arc<Inode>> {
    let at = Name { dir: dir.object(), name };
    loop {
        let target = dir::find(core, &dir.subvol, at)?.ok_or(Error::NotFound)?;
        if target.location.kind == KeyType::ROOT_ITEM {
            // It has just come to be there.
            return Err(Error::NotEmpty);
        }
        let Some(inode) = named_inode(core, dir, at, target)? else { continue };
        let guards = lock_all(&[dir, &inode])?;
        // The name may lead to another inode since, because it was not locked.
        if dir::find(core, &dir.subvol, at)? == Some(target) {
            f(&inode)?;
            drop(guards);
            return Ok(inode);
        }
    }
}

/// The inode of the same subvolume to which an entry leads; `None` if the entry has gone meanwhile.
pub(super) fn named_inode(
    core: &Core,
    dir: &Inode,
    at: Name<'_>,
    target: Target,
) -> Result<Option<Arc<Inode>>> {
    match dir.subvol.inodes.get(core, &dir.subvol, target.location.objectid.0) {
        Ok(inode) => Ok(Some(inode)),
        Err(Error::NotFound) if dir::find(core, &dir.subvol, at)? == Some(target) => {
            let place = Place::item(dir.subvol.id, dir_item_key(at.dir, at.name));
            Err(Error::corrupt(
                place,
                format!("entry leads to missing inode {}", target.location.objectid),
            ))
        }
        Err(Error::NotFound) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Removes a name. If it was the last one, notes that the inode is to be deleted. The caller holds
/// both `op`s.
fn remove_name(core: &Core, dir: &Arc<Inode>, name: &[u8], inode: &Arc<Inode>) -> Result<()> {
    check_gives_names(dir, inode)?;
    let at = Name { dir: dir.object(), name };
    let last = loses_last_name(inode);
    let prepared = prepare(core, &dir.subvol, true, |d| {
        names::remove(d, at, inode.object())?;
        if last && !fault!(core.options.tuning, NoOrphans) {
            names::add_orphan(d, inode.object())?;
        }
        Ok(())
    })?;
    let (mut handle, ()) = prepared.write()?;
    let now = core.now();
    dir.change(&mut handle, |state| state.entries_changed(-name_bytes(name), now));
    inode.change(&mut handle, |state| state.links_changed(-1, now));
    if !last {
        dir.state.lock().note_companion(handle.generation(), inode.object());
    }
    if last {
        inode.subvol.inodes.set_orphan(inode);
    }
    Ok(())
}

/// Has the inode only one name left?
pub(super) fn loses_last_name(inode: &Inode) -> bool {
    inode.is_dir() || inode.state.lock().item.nlink.get() <= 1
}

/// Deletes an inode that has lost its last name, unless it is held.
pub(super) fn delete_if_last(core: &Core, inode: &Arc<Inode>) {
    if inode.state.lock().item.nlink.get() == 0 && !inode.subvol.inodes.is_held(inode.object()) {
        orphan::delete_unheld(core, inode);
    }
}

/// Removes the entry of a nested subvolume that is not in this snapshot. False if the name leads to
/// anything else.
fn remove_placeholder(core: &Core, dir: &Arc<Inode>, name: &[u8]) -> Result<bool> {
    let at = Name { dir: dir.object(), name };
    let is_one = || -> Result<bool> {
        let target = dir::find(core, &dir.subvol, at)?.ok_or(Error::NotFound)?;
        let child = target.location;
        Ok(child.kind == KeyType::ROOT_ITEM
            && !dir::is_linked(core, dir.subvol.id, child.objectid, at)?)
    };
    if !is_one()? {
        return Ok(false);
    }
    let _guard = dir.lock_op()?;
    if !is_one()? {
        return Ok(false);
    }
    check_not_fixed(dir)?;
    // There is no reference that has the index: nothing in this tree refers back.
    let index = dir::index_of(core, dir, name)?;
    let prepared = prepare(core, &dir.subvol, true, |d| names::remove_entry_at(d, at, index))?;
    let (mut handle, ()) = prepared.write()?;
    let now = core.now();
    dir.change(&mut handle, |state| state.entries_changed(-name_bytes(name), now));
    Ok(true)
}
