//! Entries of subvolumes: making, snapshotting and deleting subvolumes. Moving is
//! `subvolume_moves`.
//!
//! A subvolume's entry is a directory entry without a reference in the inode. The root tree says
//! where the subvolume hangs, so every change here comes with a note for the commit
//! ([`crate::transaction::RootNotes`]) under the same handle. An operation that changes the tree of
//! subvolumes holds `Core::subvol_tree`. So a subvolume cannot be deleted while another one is made
//! in it, or be moved into itself.

use super::allowed::{check_not_fixed, check_takes_names};
use super::create::{Nascent, check_new};
use super::draft::{Draft, prepare, write_changes};
use super::names::{self, Name, Target, check_name, check_new_name, name_bytes};
use super::{Inode, attr, dir, lock_all};
use crate::api::{Attr, FileKind, InodeId, NewInode, Timestamp, may_wait};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::lock::Mutex;
use crate::subvolume::drop as drops;
use crate::subvolume::snapshot::{EntryChange, PendingSnapshot};
use crate::transaction::Link;
use crate::tree::{BlockSource, Tree};
use larder_format::items::keys::inode_ref_key;
use larder_format::items::{FileType, InodeFlags, InodeItem, InodeRef, RootItem};
use larder_format::node::{HEADER_SIZE, ITEM_SIZE, max_item_size};
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::{U32, U64};

/// The target of a subvolume's entry.
pub(super) fn target(id: TreeId) -> Target {
    Target { location: Key::new(id, KeyType::ROOT_ITEM, u64::MAX), kind: FileType::Directory }
}

/// A directory in which a name is to be made.
fn directory(core: &Core, dir: InodeId, name: &[u8]) -> Result<Arc<Inode>> {
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    check_new_name(name)?;
    dir.check_changeable(core)?;
    Ok(dir)
}

fn draft_entry(d: &mut Draft<'_>, at: Name<'_>, index: u64, id: TreeId) -> Result<()> {
    if names::find(d, at)?.is_some() {
        return Err(Error::Exists);
    }
    names::add_entry(d, at, index, target(id))
}

/// Makes an empty subvolume. Its root directory has the owner, permissions and attributes of `new`.
///
/// # Errors
/// As making a directory.
pub(crate) fn create(core: &Core, dir: InodeId, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
    may_wait()?;
    check_new(new)?;
    if new.kind != FileKind::Directory {
        return Err(Error::Invalid("the root of a subvolume is a directory"));
    }
    let _tree = core.subvol_tree.lock();
    let dir = directory(core, dir, name)?;
    let above = core.inode(InodeId { subvol: dir.subvol.id, ino: dir.subvol.root_dir })?;
    let id = core.new_subvol_id()?;
    let nascent = Nascent::root_of_subvolume(core, &above, new)?;
    let _guard = dir.lock_op()?;
    check_takes_names(&dir)?;
    let at = Name { dir: dir.object(), name };
    let index = dir::last_index(core, &dir)? + 1;
    let prepared = prepare(core, &dir.subvol, false, |d| draft_entry(d, at, index, id))?;
    let (mut h, changes) = prepared.into_changes();
    let generation = h.generation();
    let items = first_leaf(core, id, generation, &nascent)?;
    let block = h.take_block()?;
    // From here on only this can fail, and then nothing has been changed.
    if let Err(e) = write_changes(&mut h, &dir.subvol, &changes) {
        h.untake(block);
        return Err(e);
    }
    let tree =
        Tree::with_leaf(id, core.store.clone(), &mut h, block, &items, core.tree_stats.clone());
    let item = new_root_item(core, generation, nascent.time());
    let subvol = Arc::new(Subvolume::new(id, 0, tree, item));
    subvol.inodes.clean.store(true, Ordering::Release);
    subvol.changes_in(generation);
    h.txn.subvols.lock().insert(id, subvol.below.clone());
    core.subvols.write().insert(id, subvol);
    core.note_link(
        &mut h,
        id,
        Some(Link { parent: dir.subvol.id, dir: dir.object(), index, name: name.to_vec() }),
    );
    let now = nascent.time();
    dir.change(&mut h, |state| {
        state.last_index = Some(index);
        state.entries_changed(name_bytes(name), now);
    });
    drop(h);
    attr::get(&*core.inode(InodeId { subvol: id, ino: ObjectId::FIRST_FREE.0 })?)
}

/// The items of a new subvolume: those of its root directory, which must have room in one leaf.
fn first_leaf(
    core: &Core,
    id: TreeId,
    generation: Generation,
    nascent: &Nascent<'_>,
) -> Result<Vec<(Key, Vec<u8>)>> {
    let mut root = Draft::new(id, generation, max_item_size(core.nodesize()), &|_| Ok(None));
    nascent.draft(&mut root)?;
    let mut dots = Vec::new();
    InodeRef { index: 0, name: b".." }.append_to(&mut dots);
    root.insert_new(&inode_ref_key(ObjectId::FIRST_FREE, ObjectId::FIRST_FREE), dots);
    let items: Vec<(Key, Vec<u8>)> =
        root.into_changes().into_iter().filter_map(|(key, _, data)| Some((key, data?))).collect();
    let bytes: usize = items.iter().map(|(_, data)| data.len() + ITEM_SIZE).sum();
    if bytes > core.nodesize() as usize - HEADER_SIZE {
        return Err(Error::NoSpace);
    }
    Ok(items)
}

/// The ROOT_ITEM of a new subvolume, without its root.
fn new_root_item(core: &Core, generation: Generation, now: Timestamp) -> RootItem {
    let mut inode = InodeItem {
        generation: U64::new(1),
        size: U64::new(3),
        nbytes: U64::new(u64::from(core.nodesize())),
        nlink: U32::new(1),
        mode: U32::new(0o040_755),
        ..InodeItem::default()
    };
    inode.set_inode_flags(InodeFlags::ROOT_ITEM_INIT);
    let time = crate::api::to_timespec(now);
    RootItem {
        inode,
        root_dirid: U64::new(ObjectId::FIRST_FREE.0),
        refs: U32::new(1),
        uuid: core.new_uuid(),
        ctransid: U64::new(generation.0),
        otransid: U64::new(generation.0),
        ctime: time,
        otime: time,
        ..RootItem::default()
    }
}

/// Makes a snapshot of a subvolume. It has everything that was done in the subvolume before the
/// call. Of an operation that runs at the same time it has everything or nothing. It is durable
/// when the call returns.
///
/// # Errors
/// `NotFound`; the errors of making a directory; `DataLost` when data of the source could not be
/// written; `ReadOnly` after a failed commit.
pub(crate) fn snapshot(
    core: &Core,
    source: TreeId,
    dir: InodeId,
    name: &[u8],
    read_only: bool,
) -> Result<TreeId> {
    may_wait()?;
    let source = core.subvol(source)?;
    directory(core, dir, name)?;
    if !fault!(core.options.tuning, SnapshotWithoutData) {
        crate::file::flush_all(core)?;
    }
    let tree = core.subvol_tree.lock();
    let dir = directory(core, dir, name)?;
    let id = core.new_subvol_id()?;
    let guard = dir.lock_op()?;
    check_takes_names(&dir)?;
    let at = Name { dir: dir.object(), name };
    let index = dir::last_index(core, &dir)? + 1;
    let prepared = prepare(core, &dir.subvol, false, |d| draft_entry(d, at, index, id))?;
    let (mut h, changes) = prepared.into_changes();
    let pending = Arc::new(PendingSnapshot {
        source,
        id,
        uuid: core.new_uuid(),
        read_only,
        entry: EntryChange { dir: dir.clone(), changes, index, name_bytes: name_bytes(name) },
        link: Link { parent: dir.subvol.id, dir: dir.object(), index, name: name.to_vec() },
        now: core.now(),
        outcome: Mutex::default(),
    });
    let generation = core.note_snapshot_wanted(&mut h, pending.clone());
    drop(h);
    // Other callers may make snapshots in other directories for the same commit.
    drop(tree);
    core.txns.request();
    core.txns.wait_sealed(generation)?;
    drop(guard);
    core.txns.wait(generation)?;
    let outcome = pending.outcome.lock().take();
    outcome.expect("a published transaction has made its snapshots")?;
    Ok(id)
}

/// Which subvolumes a deletion may delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deletes {
    /// Those without files, as rmdir may.
    Empty,
    /// All.
    Full,
}

/// Deletes a subvolume: its entry goes now, its tree in the background.
///
/// # Errors
/// `NotFound`; `Invalid` for anything but a subvolume; `NotEmpty` while others hang in it;
/// `NotPermitted` for the default subvolume; `Busy` for one that is mounted or read as a whole; no
/// space; read-only.
pub(crate) fn delete(core: &Core, dir: InodeId, name: &[u8], which: Deletes) -> Result<TreeId> {
    may_wait()?;
    check_name(name)?;
    let _tree = core.subvol_tree.lock();
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    dir.check_changeable(core)?;
    let at = Name { dir: dir.object(), name };
    let target = dir::find(core, &dir.subvol, at)?.ok_or(Error::NotFound)?;
    let id = target.location.objectid;
    if target.location.kind != KeyType::ROOT_ITEM || !dir::is_linked(core, dir.subvol.id, id, at)? {
        return Err(Error::Invalid("not a subvolume"));
    }
    let child = core.subvol(id)?;
    if core.fronts.is_root(id) {
        return Err(Error::Busy("the subvolume is the root of a mount; unmount it first"));
    }
    child.check_not_read_as_a_whole()?;
    if core.default_subvol()? == id {
        return Err(Error::NotPermitted("it is the default subvolume; choose another one first"));
    }
    if core.has_nested(id)? {
        return Err(Error::NotEmpty);
    }
    // If it must be empty, no file may be made in it meanwhile. Otherwise such files are deleted
    // with it.
    let top = core.inode(InodeId { subvol: id, ino: child.root_dir })?;
    let involved: &[&Inode] = if which == Deletes::Empty { &[&dir, &top] } else { &[&dir] };
    let guards = lock_all(involved)?;
    if which == Deletes::Empty && !dir::is_empty(&child.version(core), &top)? {
        return Err(Error::NotEmpty);
    }
    check_not_fixed(&dir)?;
    // Entries of subvolumes change only under `subvol_tree`, so this one is still there.
    let index = core.link_of(id)?.ok_or(Error::NotFound)?.index;
    let prepared = prepare(core, &dir.subvol, true, |d| names::remove_entry_at(d, at, index))?;
    let (mut h, ()) = prepared.write()?;
    let now = core.now();
    dir.change(&mut h, |state| state.entries_changed(-name_bytes(name), now));
    core.note_link(&mut h, id, None);
    drops::kill(core, &mut h, &child);
    drop(h);
    drop(guards);
    Ok(id)
}

/// Path of a directory within its subvolume, with a slash at its end; empty for the root directory.
///
/// # Errors
/// `NotFound` for a directory without a name; reading; corruption.
pub(crate) fn path_within(core: &Core, subvol: TreeId, dir: u64) -> Result<Vec<u8>> {
    let subvol = core.subvol(subvol)?;
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut at = dir;
    while at != subvol.root_dir {
        let (parent, name) = dir::name_within(core, &subvol, at)?.ok_or(Error::NotFound)?;
        names.push(name);
        if names.len() > 100_000 {
            return Err(Error::NotFound);
        }
        at = parent;
    }
    Ok(names.iter().rev().flat_map(|n| n.iter().copied().chain([b'/'])).collect())
}

impl Core {
    /// Path of a subvolume from the top-level one: names with slashes between them; empty for the
    /// top level.
    ///
    /// # Errors
    /// `NotFound`; reading; corruption, also when subvolumes hang in a circle.
    pub(crate) fn subvol_path(&self, id: TreeId) -> Result<Vec<u8>> {
        let mut path: Vec<u8> = Vec::new();
        let mut at = self.subvol(id)?.id;
        let mut seen = std::collections::HashSet::new();
        while at != ObjectId::FS_TREE {
            if !seen.insert(at) {
                return Err(Error::corrupt(Place::tree(at), "subvolume hangs in itself"));
            }
            let link = self.link_of(at)?.ok_or(Error::NotFound)?;
            let within = path_within(self, link.parent, link.dir.0)?;
            let mut part = within;
            part.extend_from_slice(&link.name);
            if !path.is_empty() {
                part.push(b'/');
            }
            part.append(&mut path);
            path = part;
            at = link.parent;
        }
        Ok(path)
    }
}
