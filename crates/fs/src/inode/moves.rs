//! What all moves of names have in common, those of subvolumes included.

use super::allowed::check_takes_names;
use super::create::Nascent;
use super::draft::Draft;
use super::names::{self, Name, Target};
use super::{Inode, dir, to_file_type};
use crate::api::{FileKind, NewInode, RenameMode};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::transaction::Handle;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A directory and a name in it.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pub(super) dir: &'a Arc<Inode>,
    pub(super) name: &'a [u8],
}

impl Side<'_> {
    pub(super) fn at(&self) -> Name<'_> {
        Name { dir: self.dir.object(), name: self.name }
    }
    pub(super) fn find(&self, core: &Core) -> Result<Option<Target>> {
        dir::find(core, &self.dir.subvol, self.at())
    }
    pub(super) fn is_with(&self, other: &Self) -> bool {
        self.dir.id == other.dir.id
    }
    pub(super) fn shares_tree_with(&self, other: &Self) -> bool {
        self.dir.subvol.id == other.dir.subvol.id
    }
}

/// Fails if a directory would come to lie within itself. The caller holds `moving` if the
/// directories differ.
pub(super) fn check_no_loop(core: &Core, moved: &Inode, into: &Inode) -> Result<()> {
    if moved.is_dir() && dir::is_within(core, into, moved)? {
        return Err(Error::Invalid("a directory cannot be moved into itself"));
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

/// The whiteout that a move in this mode leaves in the directory.
pub(super) fn whiteout(mode: RenameMode, dir: &Inode) -> Result<Option<NewInode<'static>>> {
    let RenameMode::Whiteout { uid, gid } = mode else { return Ok(None) };
    check_takes_names(dir)?;
    let kind = FileKind::CharDevice;
    Ok(Some(NewInode { kind, perm: 0, uid, gid, rdev: 0, target: &[], xattrs: &[] }))
}

/// Drafts a whiteout under a name that has just gone. `index` is that of its entry.
pub(super) fn draft_whiteout<'a>(
    core: &Core,
    d: &mut Draft<'_>,
    side: Side<'_>,
    index: u64,
    new: &'a NewInode<'a>,
) -> Result<Nascent<'a>> {
    let whiteout = Nascent::new(core, side.dir, new, 1)?;
    whiteout.draft(d)?;
    names::add_first(d, side.at(), index, whiteout.object(), to_file_type(new.kind))?;
    Ok(whiteout)
}
