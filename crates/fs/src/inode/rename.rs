//! Moving and exchanging names.
//!
//! A rename is one edit of up to a dozen items: two names are removed, two are added, an inode that
//! was replaced may be left without a name, a whiteout may be made. All inodes concerned are locked
//! in the common order, and then the names are looked up again. If two moves of directories to
//! other directories met, they could make a loop of two directories inside each other. So such
//! moves happen one after the other (`moving` in the table of inodes), and each checks the way up
//! first.

use super::create::{Nascent, check_takes_names, name_bytes};
use super::draft::prepare;
use super::link::{check_gives_names, delete_if_last, loses_last_name, named_inode};
use super::names::{self, Target, check_name, check_new_name};
use super::subvolume_moves::{self, Side, hanging};
use super::{Inode, dir, lock_all, to_file_type};
use crate::api::{FileKind, InodeId, NewInode, RenameMode, Timestamp, may_wait};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::transaction::Handle;
use larder_format::KeyType;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
    let across = from.0.subvol != to.0.subvol;
    let (from, to) = (Side { dir: &from_dir, name: from.1 }, Side { dir: &to_dir, name: to.1 });
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
    loop {
        let old = from.find(core)?.ok_or(Error::NotFound)?;
        let new = to.find(core)?;
        check_subvolumes(old, new)?;
        let Some(source) = named_inode(core, &from_dir, from.at(), old)? else { continue };
        let victim = match new {
            None => None,
            Some(new) => match named_inode(core, &to_dir, to.at(), new)? {
                None => continue,
                found => found,
            },
        };
        let directory_moves = source.is_dir() || victim.as_ref().is_some_and(|v| v.is_dir());
        let _moving = if directory_moves && from_dir.id != to_dir.id {
            let moving = &from_dir.subvol.inodes.moving;
            Some(match moving.try_lock() {
                Some(guard) => guard,
                None => {
                    may_wait()?;
                    moving.lock()
                }
            })
        } else {
            None
        };
        let mut involved = vec![&*from_dir, &*to_dir, &*source];
        involved.extend(victim.as_deref());
        let guards = lock_all(&involved)?;
        // The names may lead to other inodes since, because they were not locked.
        if from.find(core)? != Some(old) || to.find(core)? != new {
            continue;
        }
        match (mode, &victim) {
            (RenameMode::NoReplace, Some(_)) => return Err(Error::Exists),
            (RenameMode::Exchange, None) => return Err(Error::NotFound),
            (_, Some(victim)) if victim.id == source.id => return Ok(()),
            (RenameMode::Exchange, Some(victim)) => exchange(core, from, to, &source, victim)?,
            _ => replace(core, from, to, &source, victim.as_ref(), mode)?,
        }
        drop(guards);
        if let Some(victim) = &victim {
            delete_if_last(core, victim);
        }
        return Ok(());
    }
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

/// Fails if a directory would come to lie within itself. The caller holds `moving` if the
/// directories differ.
pub(super) fn check_no_loop(core: &Core, moved: &Inode, into: &Inode) -> Result<()> {
    if moved.is_dir() && dir::is_within(core, &into.subvol, into.id.ino, moved.id.ino)? {
        return Err(Error::Invalid("a directory cannot be moved into itself"));
    }
    Ok(())
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

fn replace(
    core: &Core,
    from: Side<'_>,
    to: Side<'_>,
    source: &Arc<Inode>,
    victim: Option<&Arc<Inode>>,
    mode: RenameMode,
) -> Result<()> {
    check_gives_names(from.dir, source)?;
    check_takes_names(to.dir)?;
    if from.dir.id != to.dir.id {
        check_no_loop(core, source, to.dir)?;
    }
    if let Some(victim) = victim {
        check_gives_names(to.dir, victim)?;
        match (source.is_dir(), victim.is_dir()) {
            (true, false) => return Err(Error::NotDirectory),
            (false, true) => return Err(Error::IsDirectory),
            (true, true) if !dir::is_empty(&victim.subvol.version(core), victim)? => {
                return Err(Error::NotEmpty);
            }
            _ => {}
        }
    }
    let new = match mode {
        RenameMode::Whiteout { uid, gid } => {
            check_takes_names(from.dir)?;
            let kind = FileKind::CharDevice;
            Some(NewInode { kind, perm: 0, uid, gid, rdev: 0, target: &[], xattrs: &[] })
        }
        _ => None,
    };
    let same_dir = from.dir.id == to.dir.id;
    let to_index = dir::last_index(core, to.dir)? + 1;
    let from_index = match (&new, same_dir) {
        (None, _) => dir::last_index(core, from.dir)?,
        (Some(_), true) => to_index + 1,
        (Some(_), false) => dir::last_index(core, from.dir)? + 1,
    };
    let extrefs = names::extrefs(core);
    let last = victim.is_some_and(|v| loses_last_name(v));
    let prepared = prepare(core, &from.dir.subvol, false, |d| {
        names::remove(d, from.at(), source.object())?;
        if let Some(victim) = victim {
            names::remove(d, to.at(), victim.object())?;
            if last && !fault!(core.options.tuning, NoOrphans) {
                names::add_orphan(d, victim.object())?;
            }
        }
        names::add(d, to.at(), to_index, source.object(), to_file_type(source.kind), extrefs)?;
        let Some(new) = &new else { return Ok(None) };
        let whiteout = Nascent::new(core, from.dir, new, 1)?;
        whiteout.draft(d)?;
        names::add_first(d, from.at(), from_index, whiteout.object(), to_file_type(new.kind))?;
        Ok(Some(whiteout))
    })?;
    let whiteout = prepared.found.as_ref().map(Nascent::object);
    let mut handle = match &prepared.found {
        Some(_) => {
            Nascent::write(from.dir, prepared, |w| w.as_ref().expect("a whiteout was drafted"))?.0
        }
        None => prepared.write()?.0,
    };
    let now = core.now();
    let h = &mut handle;
    let gone = name_bytes(from.name);
    let came = name_bytes(to.name);
    entries_changed(h, to.dir, if victim.is_some() { 0 } else { came }, to_index, now);
    let stays = new.is_some();
    entries_changed(
        h,
        from.dir,
        if stays { 0 } else { -gone },
        if same_dir { to_index.max(from_index) } else { from_index },
        now,
    );
    source.change(h, |state| state.links_changed(0, now));
    if !same_dir {
        note_companion(h, from.dir, source);
    }
    if let Some(whiteout) = whiteout {
        source.state.lock().note_companion(h.generation(), whiteout);
    }
    note_move(h, source);
    if let Some(victim) = victim {
        victim.change(h, |state| state.links_changed(-1, now));
        if !last {
            note_companion(h, to.dir, victim);
            note_companion(h, victim, source);
        }
        if last {
            victim.subvol.inodes.set_orphan(victim);
        }
    }
    Ok(())
}

/// An `fsync` of a directory must not lose what has moved to another one. An `fsync` of an inode
/// must log the inode that now has the name which it lost.
pub(super) fn note_companion(h: &Handle<'_>, inode: &Inode, companion: &Inode) {
    inode.state.lock().note_companion(h.generation(), companion.object());
}

/// If a directory moves, the way to everything below it changes.
pub(super) fn note_move(h: &Handle<'_>, inode: &Inode) {
    if inode.is_dir() {
        h.txn.moves.fetch_add(1, Ordering::Relaxed);
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
