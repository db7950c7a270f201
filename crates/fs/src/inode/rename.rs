//! Moving and exchanging names.
//!
//! A rename is one edit of up to a dozen items: two names are removed, two are added, an inode that
//! was replaced may be left without a name, a whiteout may be made. All inodes concerned are locked
//! in the common order, and then the names are looked up again. If two moves of directories to
//! other directories met, they could make a loop of two directories inside each other. So such
//! moves happen one after the other (`moving` in the table of inodes), and each checks the way up
//! first.

use super::allowed::{check_gives_names, check_takes_names};
use super::create::Nascent;
use super::draft::prepare;
use super::link::{delete_if_last, loses_last_name, named_inode};
use super::moves::{Side, check_no_loop, draft_whiteout, note_companion, note_move, whiteout};
use super::names::{self, Target, check_name, check_new_name, name_bytes};
use super::subvolume_moves::{self, hanging};
use super::{Inode, dir, lock_all, to_file_type};
use crate::api::{InodeId, RenameMode, Timestamp, may_wait};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Result};
use crate::lock::Locked;
use crate::transaction::Handle;
use larder_format::{KeyType, ObjectId};
use std::sync::Arc;

/// Renames; see [`RenameMode`]. If both names are of one inode, both stay.
///
/// # Errors
/// `NotFound`; `Exists` (NoReplace); `IsDirectory`, `NotDirectory`, `NotEmpty` by what is replaced;
/// `Invalid` for a directory into itself; `CrossSubvolume`; `NotPermitted` by flags; `NameTooLong`;
/// `Overflow`; no space; read-only.
pub(crate) fn rename(
    core: &Core,
    from: (InodeId, &[u8]),
    to: (InodeId, &[u8]),
    mode: RenameMode,
) -> Result<()> {
    let (from_dir, to_dir) = (core.inode(from.0)?, core.inode(to.0)?);
    from_dir.expect_dir()?;
    to_dir.expect_dir()?;
    check_name(from.1)?;
    check_name(to.1)?;
    if [from.1, to.1].iter().any(|n| matches!(*n, b"." | b"..")) {
        return Err(Error::Busy(". and .. cannot be renamed"));
    }
    check_new_name(to.1)?;
    let (from, to) = (Side { dir: &from_dir, name: from.1 }, Side { dir: &to_dir, name: to.1 });
    let across = !from.shares_tree_with(&to);
    let of_subvolume = hanging(core, from)?.is_some();
    if across && !of_subvolume {
        from.find(core)?.ok_or(Error::NotFound)?;
        return Err(Error::CrossSubvolume);
    }
    from_dir.check_changeable(core)?;
    to_dir.check_changeable(core)?;
    if mode == RenameMode::Exchange && (of_subvolume || hanging(core, to)?.is_some()) {
        if subvolume_moves::exchange(core, from, to)? {
            return Ok(());
        }
    } else if of_subvolume {
        return subvolume_moves::rename(core, from, to, mode);
    }
    if across {
        return Err(Error::CrossSubvolume);
    }
    while !rename_within(core, from, to, mode)? {}
    Ok(())
}

/// Renames within a subvolume. False, and nothing is done, if a name has changed meanwhile.
fn rename_within(core: &Core, from: Side<'_>, to: Side<'_>, mode: RenameMode) -> Result<bool> {
    let old = from.find(core)?.ok_or(Error::NotFound)?;
    let new = to.find(core)?;
    check_subvolumes(old, new)?;
    let Some(source) = named_inode(core, from.dir, from.at(), old)? else { return Ok(false) };
    let victim = new.map(|new| named_inode(core, to.dir, to.at(), new)).transpose()?;
    let victim = match victim {
        Some(None) => return Ok(false),
        Some(found) => found,
        None => None,
    };
    let directory_moves = source.is_dir() || victim.as_ref().is_some_and(|v| v.is_dir());
    let _moving = if directory_moves && !from.is_with(&to) {
        Some(lock_moving(&from.dir.subvol)?)
    } else {
        None
    };
    let mut involved: Vec<&Inode> = vec![from.dir, to.dir, &source];
    involved.extend(victim.as_deref());
    let guards = lock_all(&involved)?;
    // The names may lead to other inodes since, because they were not locked.
    if from.find(core)? != Some(old) || to.find(core)? != new {
        return Ok(false);
    }
    match (mode, &victim) {
        (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists),
        (RenameMode::Exchange, None) => return Err(Error::NotFound),
        (_, Some(victim)) if victim.id == source.id => return Ok(true),
        (RenameMode::Exchange, Some(victim)) => exchange(core, from, to, &source, victim)?,
        _ => {
            let last = victim.as_ref().is_some_and(|v| loses_last_name(v));
            let moved = Moved { core, from, to, source: &source, victim: victim.as_ref(), last };
            moved.check()?;
            moved.write(mode)?;
        }
    }
    drop(guards);
    if let Some(victim) = &victim {
        delete_if_last(core, victim);
    }
    Ok(true)
}

/// Lets the directories of a subvolume stand still.
fn lock_moving(subvol: &Subvolume) -> Result<Locked<'_, ()>> {
    let moving = &subvol.inodes.moving;
    if let Some(guard) = moving.try_lock() {
        return Ok(guard);
    }
    may_wait()?;
    Ok(moving.lock())
}

/// The entry of a subvolume that is not in this snapshot does not move, and no subvolume is
/// replaced.
fn check_subvolumes(old: Target, new: Option<Target>) -> Result<()> {
    let is_subvolume = |t: Target| t.location.kind == KeyType::ROOT_ITEM;
    if is_subvolume(old) {
        return Err(Error::NotEmpty);
    }
    match new {
        Some(new) if is_subvolume(new) && old.kind != larder_format::items::FileType::Directory => {
            Err(Error::IsDirectory)
        }
        Some(new) if is_subvolume(new) => Err(Error::NotEmpty),
        _ => Ok(()),
    }
}

fn exchange(
    core: &Core,
    from: Side<'_>,
    to: Side<'_>,
    a: &Arc<Inode>,
    b: &Arc<Inode>,
) -> Result<()> {
    check_gives_names(from.dir, a)?;
    check_gives_names(to.dir, b)?;
    check_takes_names(from.dir)?;
    check_takes_names(to.dir)?;
    check_no_loop(core, a, to.dir)?;
    check_no_loop(core, b, from.dir)?;
    let same_dir = from.dir.id == to.dir.id;
    let to_index = dir::last_index(core, to.dir)? + 1;
    let from_index = if same_dir { to_index + 1 } else { dir::last_index(core, from.dir)? + 1 };
    let extrefs = names::extrefs(core);
    let prepared = prepare(core, &from.dir.subvol, false, |d| {
        names::remove(d, from.at(), a.object())?;
        names::remove(d, to.at(), b.object())?;
        names::add(d, to.at(), to_index, a.object(), to_file_type(a.kind), extrefs)?;
        names::add(d, from.at(), from_index, b.object(), to_file_type(b.kind), extrefs)
    })?;
    let (mut handle, ()) = prepared.write()?;
    let now = core.now();
    let h = &mut handle;
    entries_changed(h, to.dir, 0, to_index, now);
    entries_changed(h, from.dir, 0, from_index, now);
    for inode in [a, b] {
        inode.change(h, |state| state.links_changed(0, now));
    }
    if !same_dir {
        note_companion(h, from.dir, a);
        note_companion(h, to.dir, b);
    }
    note_companion(h, a, b);
    note_companion(h, b, a);
    note_move(h, a);
    note_move(h, b);
    Ok(())
}

/// A name that is about to move, in place of another one where there is one. Everything is locked.
struct Moved<'a> {
    core: &'a Core,
    from: Side<'a>,
    to: Side<'a>,
    source: &'a Arc<Inode>,
    /// The inode that has the new name.
    victim: Option<&'a Arc<Inode>>,
    /// Is that its last name?
    last: bool,
}

/// Positions of entries in their directories.
#[derive(Clone, Copy)]
struct Indices {
    /// Of what has the old name; the highest in use if nothing has it.
    from: u64,
    to: u64,
}

impl Moved<'_> {
    fn check(&self) -> Result<()> {
        let Self { core, from, to, source, .. } = *self;
        check_gives_names(from.dir, source)?;
        check_takes_names(to.dir)?;
        if !from.is_with(&to) {
            check_no_loop(core, source, to.dir)?;
        }
        let Some(victim) = self.victim else { return Ok(()) };
        check_gives_names(to.dir, victim)?;
        match (source.is_dir(), victim.is_dir()) {
            (true, false) => Err(Error::NotDirectory),
            (false, true) => Err(Error::IsDirectory),
            (true, true) if !dir::is_empty(&victim.subvol.version(core), victim)? => {
                Err(Error::NotEmpty)
            }
            _ => Ok(()),
        }
    }

    fn write(&self, mode: RenameMode) -> Result<()> {
        let Self { core, from, to, source, victim, last } = *self;
        let new = whiteout(mode, from.dir)?;
        let indices = self.indices(new.is_some())?;
        let extrefs = names::extrefs(core);
        let prepared = prepare(core, &from.dir.subvol, false, |d| {
            names::remove(d, from.at(), source.object())?;
            if let Some(victim) = victim {
                names::remove(d, to.at(), victim.object())?;
                if last && !fault!(core.options.tuning, NoOrphans) {
                    names::add_orphan(d, victim.object())?;
                }
            }
            let kind = to_file_type(source.kind);
            names::add(d, to.at(), indices.to, source.object(), kind, extrefs)?;
            let Some(new) = &new else { return Ok(None) };
            draft_whiteout(core, d, from, indices.from, new).map(Some)
        })?;
        let whiteout = prepared.found.as_ref().map(Nascent::object);
        let mut handle = match &prepared.found {
            Some(_) => {
                Nascent::write(from.dir, prepared, |w| w.as_ref().expect("a whiteout was drafted"))?
                    .0
            }
            None => prepared.write()?.0,
        };
        self.changed(&mut handle, indices, whiteout);
        Ok(())
    }

    fn indices(&self, stays: bool) -> Result<Indices> {
        let Self { core, from, to, .. } = *self;
        let to_index = dir::last_index(core, to.dir)? + 1;
        let from_index = match (stays, from.is_with(&to)) {
            (false, _) => dir::last_index(core, from.dir)?,
            (true, true) => to_index + 1,
            (true, false) => dir::last_index(core, from.dir)? + 1,
        };
        Ok(Indices { from: from_index, to: to_index })
    }

    /// Changes the inodes in memory.
    fn changed(&self, h: &mut Handle<'_>, indices: Indices, whiteout: Option<ObjectId>) {
        let Self { core, from, to, source, victim, last } = *self;
        let now = core.now();
        let came = if victim.is_some() { 0 } else { name_bytes(to.name) };
        let gone = if whiteout.is_some() { 0 } else { name_bytes(from.name) };
        let same_dir = from.is_with(&to);
        entries_changed(h, to.dir, came, indices.to, now);
        let highest = if same_dir { indices.to.max(indices.from) } else { indices.from };
        entries_changed(h, from.dir, -gone, highest, now);
        source.change(h, |state| state.links_changed(0, now));
        if !same_dir {
            note_companion(h, from.dir, source);
        }
        if let Some(whiteout) = whiteout {
            source.state.lock().note_companion(h.generation(), whiteout);
        }
        note_move(h, source);
        let Some(victim) = victim else { return };
        victim.change(h, |state| state.links_changed(-1, now));
        if last {
            victim.subvol.inodes.set_orphan(victim);
        } else {
            note_companion(h, to.dir, victim);
            note_companion(h, victim, source);
        }
    }
}

fn entries_changed(
    h: &mut Handle<'_>,
    dir: &Arc<Inode>,
    name_bytes: i64,
    index: u64,
    now: Timestamp,
) {
    dir.change(h, |state| {
        state.last_index = state.last_index.max(Some(index));
        state.entries_changed(name_bytes, now);
    });
}
