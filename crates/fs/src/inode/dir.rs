//! Finding names and listing directories.
//!
//! Looking a name up takes one DIR_ITEM. Listing goes by DIR_INDEX, whose offsets only grow: a
//! reader's position stays valid while entries come and go, and an entry that was there all the
//! time is shown exactly once. Each call lists one version of the tree. Positions 0 and 1 are `.`
//! and `..`; an entry at index *i* is position *i*.
//!
//! Borders between subvolumes are crossed here. An entry for a subvolume counts only if the root
//! tree has the same link. A snapshot copies the entries of nested subvolumes but not the
//! subvolumes, and shows an empty directory in their place ([`PLACEHOLDER`]).

use super::names::{Name, Target, check_name};
use super::{Inode, PLACEHOLDER, attr, to_kind};
use crate::api::{Attr, DirEntry, FileKind, InodeId};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::tree::{Item, Version};
use larder_format::items::dir::{find_entry, single_entry};
use larder_format::items::keys::{dir_index_key, dir_item_key, root_ref_key};
use larder_format::items::{InodeRefs, RootRef};
use larder_format::{FormatError, Key, KeyType, ObjectId, TreeId};
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// First index of an entry.
const FIRST_INDEX: u64 = 2;
/// Largest index that a position can stand for: front ends have 63 bits.
const LAST_INDEX: u64 = i64::MAX as u64 - 1;

fn corrupt(tree: TreeId, key: Key) -> impl FnOnce(FormatError) -> Error {
    move |e| Error::corrupt(Place::item(tree, key), e.0)
}

/// What an entry leads to.
///
/// # Errors
/// Reading or corruption.
pub(super) fn find(core: &Core, subvol: &Subvolume, at: Name<'_>) -> Result<Option<Target>> {
    let key = dir_item_key(at.dir, at.name);
    let Some(item) = subvol.get(core, &key)? else { return Ok(None) };
    let entry = find_entry(item.data(), at.name).map_err(corrupt(subvol.id, key))?;
    Ok(entry.map(|e| Target { location: e.location, kind: e.kind }))
}

/// The inode that an entry's location leads to, with the subvolume border crossed.
fn follow(core: &Core, subvol: &Subvolume, at: Name<'_>, location: Key) -> Result<InodeId> {
    match location.kind {
        KeyType::INODE_ITEM => Ok(InodeId { subvol: subvol.id, ino: location.objectid.0 }),
        KeyType::ROOT_ITEM if is_linked(core, subvol.id, location.objectid, at)? => {
            let child = core.subvol(location.objectid)?;
            Ok(InodeId { subvol: child.id, ino: child.root_dir })
        }
        KeyType::ROOT_ITEM => Ok(InodeId { subvol: subvol.id, ino: PLACEHOLDER }),
        _ => {
            let key = dir_item_key(at.dir, at.name);
            Err(Error::corrupt(Place::item(subvol.id, key), format!("entry leads to {location}")))
        }
    }
}

/// Does the subvolume `child` hang in `parent` under this name?
pub(super) fn is_linked(core: &Core, parent: TreeId, child: TreeId, at: Name<'_>) -> Result<bool> {
    if let Some(newer) = core.links.get(child) {
        return Ok(
            newer.is_some_and(|l| l.parent == parent && l.dir == at.dir && l.name == at.name)
        );
    }
    let key = root_ref_key(parent, child);
    let Some(item) = core.roots.root.get(&key, &core.epochs.enter())? else { return Ok(false) };
    let link = RootRef::parse(item.data()).map_err(corrupt(ObjectId::ROOT_TREE, key))?;
    Ok(link.dirid == at.dir && link.name == at.name)
}

/// The directory that a subvolume hangs in; `None` for the top-level one.
fn parent_of_subvol(core: &Core, child: TreeId) -> Result<Option<InodeId>> {
    Ok(core.link_of(child)?.map(|link| InodeId { subvol: link.parent, ino: link.dir.0 }))
}

/// The directory that holds a directory of the same subvolume, and its name there; `None` if it has
/// none.
pub(super) fn name_within(
    core: &Core,
    subvol: &Subvolume,
    ino: u64,
) -> Result<Option<(u64, Vec<u8>)>> {
    let first = Key::new(ObjectId(ino), KeyType::INODE_REF, 0);
    let Some(item) = subvol.version(core).at_or_after(&first)? else { return Ok(None) };
    if item.key.objectid != first.objectid || item.key.kind != KeyType::INODE_REF {
        return Ok(None);
    }
    let name =
        InodeRefs::new(item.data()).next().transpose().map_err(corrupt(subvol.id, item.key))?;
    Ok(name.map(|r| (item.key.offset, r.name.to_vec())))
}

/// The directory that holds a directory of the same subvolume; `None` for the subvolume's root and
/// for one without a name.
pub(super) fn parent_within(core: &Core, subvol: &Subvolume, ino: u64) -> Result<Option<u64>> {
    if ino == subvol.root_dir || ino == PLACEHOLDER {
        return Ok(None);
    }
    let first = Key::new(ObjectId(ino), KeyType::INODE_REF, 0);
    let Some(item) = subvol.version(core).at_or_after(&first)? else { return Ok(None) };
    if item.key.objectid != first.objectid || item.key.kind != KeyType::INODE_REF {
        return Ok(None);
    }
    Ok(InodeRefs::new(item.data()).next().is_some().then_some(item.key.offset))
}

/// Is `ancestor` this directory, or one above it in the same subvolume?
pub(super) fn is_within(core: &Core, dir: &Inode, ancestor: &Inode) -> Result<bool> {
    let subvol = &dir.subvol;
    let mut seen = HashSet::new();
    let mut at = Some(dir.id.ino);
    while let Some(ino) = at {
        if ino == ancestor.id.ino {
            return Ok(true);
        }
        if !seen.insert(ino) {
            let key = Key::new(ObjectId(ino), KeyType::INODE_REF, 0);
            return Err(Error::corrupt(Place::item(subvol.id, key), "directory is within itself"));
        }
        at = parent_within(core, subvol, ino)?;
    }
    Ok(false)
}

impl Core {
    /// The directory to which `..` leads from this one, unless that is the root of the mount.
    fn parent_id(&self, dir: InodeId) -> Result<InodeId> {
        let subvol = self.subvol(dir.subvol)?;
        if dir.ino == PLACEHOLDER {
            return Ok(InodeId { subvol: dir.subvol, ino: subvol.root_dir });
        }
        if dir.ino == subvol.root_dir {
            return Ok(parent_of_subvol(self, dir.subvol)?.unwrap_or(dir));
        }
        // A directory that was removed but is still held has no parent, and is its own.
        let parent = parent_within(self, &subvol, dir.ino)?;
        Ok(parent.map_or(dir, |ino| InodeId { subvol: dir.subvol, ino }))
    }
    /// The inode that a name in a directory leads to, with subvolume borders crossed. Loads no
    /// inode and takes no lock.
    ///
    /// # Errors
    /// `NotFound`, also when `dir` is no directory; `NameTooLong`; reading; corruption.
    pub(crate) fn lookup_id(&self, dir: InodeId, name: &[u8]) -> Result<InodeId> {
        match name {
            b"." => Ok(dir),
            b".." => self.parent_id(dir),
            _ => {
                check_name(name)?;
                let subvol = self.subvol(dir.subvol)?;
                let at = Name { dir: ObjectId(dir.ino), name };
                let target = find(self, &subvol, at)?.ok_or(Error::NotFound)?;
                follow(self, &subvol, at, target.location)
            }
        }
    }
}

/// Finds `name` in `dir`. `root` is its own parent.
pub(crate) fn lookup(core: &Core, root: InodeId, dir: InodeId, name: &[u8]) -> Result<Attr> {
    let inode = core.inode(dir)?;
    inode.expect_dir()?;
    let id = if name == b".." && dir == root { root } else { core.lookup_id(dir, name)? };
    let inode = if id == dir { inode } else { core.inode(id)? };
    attr::get(&inode)
}

/// Calls `each` for the entries from position `from` on until it returns false or the directory
/// ends.
pub(crate) fn readdir(
    core: &Core,
    root: InodeId,
    dir: InodeId,
    from: u64,
    each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
) -> Result<()> {
    list(core, root, dir, from..=LAST_INDEX, each)
}

/// As [`readdir`], but leaves out what was added since a listing of the directory was last begun
/// with this call.
pub(crate) fn readdir_page(
    core: &Core,
    root: InodeId,
    dir: InodeId,
    from: u64,
    each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
) -> Result<()> {
    let inode = core.inode(dir)?;
    inode.expect_dir()?;
    let mut end = inode.state.lock().listed_to;
    if from == 0 {
        let known = inode.state.lock().last_index;
        let index = match known {
            Some(index) => index,
            None => highest_index(core, &inode)?,
        };
        end = Some(index);
        inode.state.lock().listed_to = end;
    }
    list(core, root, dir, from..=end.unwrap_or(LAST_INDEX), each)
}

/// Calls `each` for the entries at these positions.
fn list(
    core: &Core,
    root: InodeId,
    dir: InodeId,
    positions: RangeInclusive<u64>,
    each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
) -> Result<()> {
    let (from, end) = positions.into_inner();
    let inode = core.inode(dir)?;
    inode.expect_dir()?;
    let dot =
        |name: &'static [u8], id, next| DirEntry { name, id, kind: FileKind::Directory, next };
    if from == 0 && !each(&dot(b".", dir, 1)) {
        return Ok(());
    }
    if from <= 1 {
        let parent = if dir == root { dir } else { core.parent_id(dir)? };
        if !each(&dot(b"..", parent, FIRST_INDEX)) {
            return Ok(());
        }
    }
    if dir.ino == PLACEHOLDER {
        return Ok(());
    }
    let version = inode.subvol.version(core);
    let first = dir_index_key(inode.object(), from.max(FIRST_INDEX));
    let last = dir_index_key(inode.object(), end.min(LAST_INDEX));
    if first > last {
        return Ok(());
    }
    version.scan(&first, &last, |item| {
        let entry = single_entry(item.data()).map_err(corrupt(dir.subvol, item.key))?;
        let at = Name { dir: inode.object(), name: entry.name };
        let id = follow(core, &inode.subvol, at, entry.location)?;
        let kind = to_kind(entry.kind).ok_or_else(|| {
            Error::corrupt(Place::item(dir.subvol, item.key), "directory entry is an attribute")
        })?;
        Ok(each(&DirEntry { name: entry.name, id, kind, next: item.key.offset + 1 }))
    })
}

/// Highest index that a directory has given out. The caller holds its `op`.
///
/// # Errors
/// Reading; `Overflow` when there is no higher one.
pub(super) fn last_index(core: &Core, dir: &Arc<Inode>) -> Result<u64> {
    if let Some(index) = dir.state.lock().last_index {
        return Ok(index);
    }
    let index = highest_index(core, dir)?;
    // At most two indices are given out at a time.
    if index > LAST_INDEX - 2 {
        return Err(Error::Overflow);
    }
    dir.state.lock().last_index = Some(index);
    Ok(index)
}

/// Highest index that is in use.
fn highest_index(core: &Core, dir: &Inode) -> Result<u64> {
    let item = dir.subvol.version(core).at_or_before(&dir_index_key(dir.object(), u64::MAX))?;
    Ok(match item {
        Some(item) if is_index_of(&item, dir) => item.key.offset.max(FIRST_INDEX - 1),
        _ => FIRST_INDEX - 1,
    })
}

/// Index of an entry, found by searching the directory. The caller holds its `op`.
///
/// # Errors
/// `Corrupt` when the name has none; reading.
pub(super) fn index_of(core: &Core, dir: &Inode, name: &[u8]) -> Result<u64> {
    let first = dir_index_key(dir.object(), 0);
    let mut found = None;
    dir.subvol.version(core).scan(&first, &dir_index_key(dir.object(), u64::MAX), |item| {
        let entry = single_entry(item.data()).map_err(corrupt(dir.subvol.id, item.key))?;
        if entry.name == name {
            found = Some(item.key.offset);
        }
        Ok(found.is_none())
    })?;
    found.ok_or_else(|| {
        Error::corrupt(Place::item(dir.subvol.id, first), "directory entry has no index item")
    })
}

fn is_index_of(item: &Item, dir: &Inode) -> bool {
    item.key.objectid == dir.object() && item.key.kind == KeyType::DIR_INDEX
}

/// Does the directory have any entry? The caller holds its `op`.
pub(super) fn is_empty(version: &Version, dir: &Inode) -> Result<bool> {
    for kind in [KeyType::DIR_ITEM, KeyType::DIR_INDEX] {
        let first = version.at_or_after(&Key::new(dir.object(), kind, 0))?;
        if first.is_some_and(|i| i.key.objectid == dir.object() && i.key.kind == kind) {
            return Ok(false);
        }
    }
    Ok(true)
}
