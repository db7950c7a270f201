//! Moving entries of subvolumes: renames, exchanges and whiteouts, within a tree and between trees.
//!
//! A subvolume's entry has no reference in an inode; a note for the commit says where it hangs. So
//! it may go to another tree, which no inode can, and change places with another subvolume's entry
//! there. With a file or a directory it can change places only within one tree. Linux is no example
//! for an entry whose subvolume does not hang there, in a snapshot: an exchange aborts its
//! transaction. Here such an entry is a directory that is not empty.
//!
//! Callers of these functions hold no locks. `Core::subvol_tree` is taken first. Under it no entry
//! of a subvolume changes, and no subvolume comes to hang in itself. An `fsync` that a move
//! concerns commits; the log finds that out from the entries that it meets ([`crate::log`]).

use super::allowed::{check_gives_names, check_not_fixed, check_takes_names};
use super::create::Nascent;
use super::draft::{Draft, prepare, prepare_two};
use super::moves::{Side, check_no_loop, draft_whiteout, note_companion, note_move, whiteout};
use super::names::{self, Name, Target, name_bytes};
use super::subvolume::target;
use super::{Inode, dir, link, lock_all, to_file_type};
use crate::api::{RenameMode, may_wait};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::transaction::{Handle, Link};
use larder_format::{KeyType, ObjectId, TreeId};
use std::sync::Arc;

/// The link of a subvolume that hangs under this name, at `index`.
fn link_at(side: Side<'_>, index: u64) -> Link {
    let (parent, dir) = (side.dir.subvol.id, side.dir.object());
    Link { parent, dir, index, name: side.name.to_vec() }
}

/// The subvolume that hangs under a name; `None` if the name leads to anything else.
pub(super) fn hanging(core: &Core, side: Side<'_>) -> Result<Option<TreeId>> {
    let Some(Target { location, .. }) = side.find(core)? else { return Ok(None) };
    let is = location.kind == KeyType::ROOT_ITEM
        && dir::is_linked(core, side.dir.subvol.id, location.objectid, side.at())?;
    Ok(is.then_some(location.objectid))
}

/// Moves the entry of a subvolume, also to another subvolume. Leaves a whiteout if the mode asks
/// for it.
///
/// # Errors
/// `NotEmpty`, `NotDirectory` by what would be replaced; `Exists` (NoReplace); `Invalid` for a
/// subvolume into itself; `NotPermitted` by flags; `Overflow`; no space; read-only.
pub(super) fn rename(core: &Core, from: Side<'_>, to: Side<'_>, mode: RenameMode) -> Result<()> {
    may_wait()?;
    let _tree = core.subvol_tree.lock();
    loop {
        let id = hanging(core, from)?.ok_or(Error::NotFound)?;
        let (old, new) = (from.find(core)?, to.find(core)?);
        let victim = match new {
            None => None,
            Some(_) if new == old && from.is_with(&to) => return Ok(()),
            Some(_) if mode == RenameMode::NoReplace => return Err(Error::Exists),
            Some(new) if new.location.kind == KeyType::ROOT_ITEM => return Err(Error::NotEmpty),
            Some(new) => match link::named_inode(core, to.dir, to.at(), new)? {
                None => continue,
                Some(victim) => Some(victim),
            },
        };
        check_not_into_itself(core, id, to.dir)?;
        let mut involved: Vec<&Inode> = vec![from.dir, to.dir];
        involved.extend(victim.as_deref());
        let guards = lock_all(&involved)?;
        if from.find(core)? != old || to.find(core)? != new {
            continue;
        }
        check_not_fixed(from.dir)?;
        check_takes_names(to.dir)?;
        if let Some(victim) = &victim {
            victim.expect_dir()?;
            check_gives_names(to.dir, victim)?;
            if !dir::is_empty(&victim.subvol.version(core), victim)? {
                return Err(Error::NotEmpty);
            }
        }
        Moved { core, from, to, victim: victim.as_ref(), id }.write(mode)?;
        drop(guards);
        if let Some(victim) = &victim {
            link::delete_if_last(core, victim);
        }
        return Ok(());
    }
}

/// A subvolume must not come to hang in itself. The caller holds `subvol_tree`.
fn check_not_into_itself(core: &Core, id: TreeId, to: &Inode) -> Result<()> {
    let mut at = to.id.subvol;
    let mut steps = 0u32;
    while at != ObjectId::FS_TREE {
        if at == id || steps > 10_000 {
            return Err(Error::Invalid("a subvolume cannot be moved into itself"));
        }
        steps += 1;
        let Some(link) = core.link_of(at)? else { return Ok(()) };
        at = link.parent;
    }
    Ok(())
}

/// A subvolume's entry that is about to move, with everything locked and checked.
struct Moved<'a> {
    core: &'a Core,
    from: Side<'a>,
    to: Side<'a>,
    victim: Option<&'a Arc<Inode>>,
    id: TreeId,
}

impl Moved<'_> {
    fn write(&self, mode: RenameMode) -> Result<()> {
        let Self { core, from, to, victim, id } = *self;
        let new = whiteout(mode, from.dir)?;
        let index = core.link_of(id)?.ok_or(Error::NotFound)?.index;
        let to_index = dir::last_index(core, to.dir)? + 1;
        let from_index =
            if from.is_with(&to) { to_index } else { dir::last_index(core, from.dir)? } + 1;
        let keep_note = !fault!(core.options.tuning, NoOrphans);
        let leave = |d: &mut Draft<'_>| {
            names::remove_entry_at(d, from.at(), index)?;
            let Some(new) = &new else { return Ok(None) };
            draft_whiteout(core, d, from, from_index, new).map(Some)
        };
        let come = |d: &mut Draft<'_>| {
            if let Some(victim) = victim {
                names::remove(d, to.at(), victim.object())?;
                if keep_note {
                    names::add_orphan(d, victim.object())?;
                }
            }
            names::add_entry(d, to.at(), to_index, target(id))
        };
        let mut h = if from.shares_tree_with(&to) {
            let both = |d: &mut Draft<'_>| leave(d).and_then(|whiteout| come(d).map(|()| whiteout));
            let prepared = prepare(core, &to.dir.subvol, false, both)?;
            let entered =
                prepared.found.as_ref().map(|w| w.enter(from.dir, prepared.handle.generation()));
            Nascent::kept_if(entered, prepared.write())?.0
        } else {
            let trees = [&from.dir.subvol, &to.dir.subvol];
            let prepared = prepare_two(core, trees, |a, b| come(b).and_then(|()| leave(a)))?;
            let entered = prepared.found.as_ref().map(|w| w.enter(from.dir, prepared.generation()));
            Nascent::kept_if(entered, prepared.write())?
        };
        self.changed(&mut h, to_index, new.is_some().then_some(from_index));
        core.note_link(&mut h, id, Some(link_at(to, to_index)));
        Ok(())
    }

    /// Changes the directories, and what was replaced, in memory. `stays`: the index of what has
    /// the old name now, if anything has it.
    fn changed(&self, h: &mut Handle<'_>, to_index: u64, stays: Option<u64>) {
        let Self { core, from, to, victim, .. } = *self;
        let now = core.now();
        let (gone, came) = (name_bytes(from.name), name_bytes(to.name));
        to.dir.change(h, |state| {
            state.last_index = state.last_index.max(Some(to_index));
            state.entries_changed(if victim.is_some() { 0 } else { came }, now);
        });
        from.dir.change(h, |state| {
            state.last_index = state.last_index.max(stays);
            state.entries_changed(if stays.is_some() { 0 } else { -gone }, now);
        });
        if let Some(victim) = victim {
            victim.change(h, |state| state.links_changed(-1, now));
            victim.subvol.inodes.set_orphan(victim);
        }
    }
}

/// What a name leads to that is to be exchanged.
enum Thing {
    /// A subvolume, and the index of its entry.
    Subvolume {
        id: TreeId,
        index: u64,
    },
    Inode(Arc<Inode>),
}

impl Thing {
    /// What the name leads to; `None` if that is just changing.
    fn at(core: &Core, side: Side<'_>, found: Target) -> Result<Option<Self>> {
        if let Some(id) = hanging(core, side)? {
            let index = core.link_of(id)?.ok_or(Error::NotFound)?.index;
            return Ok(Some(Self::Subvolume { id, index }));
        }
        if found.location.kind == KeyType::ROOT_ITEM {
            return Err(Error::NotEmpty);
        }
        Ok(link::named_inode(core, side.dir, side.at(), found)?.map(Self::Inode))
    }
    fn inode(&self) -> Option<&Arc<Inode>> {
        match self {
            Self::Inode(inode) => Some(inode),
            Self::Subvolume { .. } => None,
        }
    }
    /// May it leave its directory for another one? The caller holds the locks of both directories
    /// and of the thing itself.
    fn check(&self, core: &Core, from: Side<'_>, to: Side<'_>) -> Result<()> {
        match self {
            Self::Subvolume { .. } => check_not_fixed(from.dir),
            Self::Inode(inode) => {
                check_gives_names(from.dir, inode)?;
                check_no_loop(core, inode, to.dir)
            }
        }
    }
    fn leave(&self, d: &mut Draft<'_>, at: Name<'_>) -> Result<()> {
        match self {
            Self::Subvolume { index, .. } => names::remove_entry_at(d, at, *index),
            Self::Inode(inode) => names::remove(d, at, inode.object()),
        }
    }
    fn come(&self, d: &mut Draft<'_>, at: Name<'_>, index: u64, extrefs: bool) -> Result<()> {
        match self {
            Self::Subvolume { id, .. } => names::add_entry(d, at, index, target(*id)),
            Self::Inode(inode) => {
                names::add(d, at, index, inode.object(), to_file_type(inode.kind), extrefs)
            }
        }
    }
    /// Notes that it has moved from one place to the other, where its entry is at `index`.
    fn changed(&self, core: &Core, h: &mut Handle<'_>, from: Side<'_>, to: Side<'_>, index: u64) {
        match self {
            Self::Subvolume { id, .. } => {
                core.note_link(h, *id, Some(link_at(to, index)));
            }
            Self::Inode(inode) => {
                inode.change(h, |state| state.links_changed(0, core.now()));
                if !from.is_with(&to) {
                    note_companion(h, from.dir, inode);
                }
                note_move(h, inode);
            }
        }
    }
}

/// Exchanges two names, of which at least one is a subvolume's. False, and nothing is done, if
/// neither is one any more.
///
/// # Errors
/// `NotFound`; `CrossSubvolume` for anything but subvolumes in two trees; `Invalid` where something
/// would come to lie in itself; `NotEmpty` for a subvolume that is not in this snapshot;
/// `NotPermitted` by flags; `Overflow`; no space; read-only.
pub(super) fn exchange(core: &Core, from: Side<'_>, to: Side<'_>) -> Result<bool> {
    may_wait()?;
    let _tree = core.subvol_tree.lock();
    loop {
        for (a, b) in [(from, to), (to, from)] {
            if let Some(id) = hanging(core, a)? {
                check_not_into_itself(core, id, b.dir)?;
            }
        }
        let old = from.find(core)?.ok_or(Error::NotFound)?;
        let new = to.find(core)?.ok_or(Error::NotFound)?;
        let Some(a) = Thing::at(core, from, old)? else { continue };
        let Some(b) = Thing::at(core, to, new)? else { continue };
        let inode = match (a.inode(), b.inode()) {
            (Some(_), Some(_)) => return Ok(false),
            (None, None) if from.is_with(&to) && from.name == to.name => return Ok(true),
            (None, None) => None,
            (one, other) => one.or(other),
        };
        if inode.is_some() && !from.shares_tree_with(&to) {
            return Err(Error::CrossSubvolume);
        }
        // As for any directory that goes to another one. What may have to wait has been done
        // before.
        let moves = inode.is_some_and(|inode| inode.is_dir()) && !from.is_with(&to);
        let _moving = moves.then(|| from.dir.subvol.inodes.moving.lock());
        let mut involved: Vec<&Inode> = vec![from.dir, to.dir];
        involved.extend(inode.map(|inode| &**inode));
        let guards = lock_all(&involved)?;
        if from.find(core)? != Some(old) || to.find(core)? != Some(new) {
            continue;
        }
        a.check(core, from, to)?;
        b.check(core, to, from)?;
        check_takes_names(from.dir)?;
        check_takes_names(to.dir)?;
        Exchanged { core, from, to, a: &a, b: &b }.write()?;
        drop(guards);
        return Ok(true);
    }
}

/// Two things that are to change places. Everything is locked and checked.
struct Exchanged<'a> {
    core: &'a Core,
    from: Side<'a>,
    to: Side<'a>,
    a: &'a Thing,
    b: &'a Thing,
}

impl Exchanged<'_> {
    fn write(&self) -> Result<()> {
        let Self { core, from, to, a, b } = *self;
        let to_index = dir::last_index(core, to.dir)? + 1;
        let from_index =
            if from.is_with(&to) { to_index } else { dir::last_index(core, from.dir)? } + 1;
        let extrefs = names::extrefs(core);
        let mut h = if from.shares_tree_with(&to) {
            let prepared = prepare(core, &from.dir.subvol, false, |d| {
                a.leave(d, from.at())?;
                b.leave(d, to.at())?;
                a.come(d, to.at(), to_index, extrefs)?;
                b.come(d, from.at(), from_index, extrefs)
            })?;
            prepared.write()?.0
        } else {
            let trees = [&from.dir.subvol, &to.dir.subvol];
            let prepared = prepare_two(core, trees, |here, there| {
                a.leave(here, from.at())?;
                b.leave(there, to.at())?;
                a.come(there, to.at(), to_index, extrefs)?;
                b.come(here, from.at(), from_index, extrefs)
            })?;
            prepared.write()?
        };
        let now = core.now();
        for (dir, index) in [(to.dir, to_index), (from.dir, from_index)] {
            dir.change(&mut h, |state| {
                state.last_index = state.last_index.max(Some(index));
                state.entries_changed(0, now);
            });
        }
        a.changed(core, &mut h, from, to, to_index);
        b.changed(core, &mut h, to, from, from_index);
        Ok(())
    }
}
