//! What one name is on disk, and how it comes and goes.
//!
//! A name of an inode is in three places: in the directory's DIR_ITEM (by hash, shared by names
//! with equal hashes), in its DIR_INDEX (by position), and in the inode's INODE_REF for that
//! directory, or, when that item is full, in an INODE_EXTREF. A subvolume's entry has no reference
//! here, because the root tree keeps it. Only this module knows all this; others add, remove and
//! find names.

use super::draft::Draft;
use crate::engine::Core;
use crate::error::{Error, Result};
use larder_format::features::Incompat;
use larder_format::items::dir::{ENTRY_HEADER_SIZE, find_entry, remove_entry, single_entry};
use larder_format::items::inode_ref::{REF_HEADER_SIZE, remove_extref, remove_ref};
use larder_format::items::keys::{
    dir_index_key, dir_item_key, inode_extref_key, inode_key, inode_ref_key, orphan_key,
};
use larder_format::items::{DirEntryRef, ExtRef, FileType, InodeRef};
use larder_format::{Key, NAME_MAX, ObjectId};

/// A name in a directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name<'a> {
    /// The directory's number.
    pub(super) dir: ObjectId,
    /// The name, 1 to 255 bytes.
    pub(super) name: &'a [u8],
}

/// What a directory entry leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// `(inode, INODE_ITEM, 0)` or `(subvolume, ROOT_ITEM, …)`.
    pub(super) location: Key,
    /// Its type.
    pub(super) kind: FileType,
}

/// Checks a name that an inode is to get.
pub(super) fn check_new_name(name: &[u8]) -> Result<()> {
    check_name(name)?;
    match name {
        b"" => Err(Error::NotFound),
        b"." | b".." => Err(Error::Exists),
        n if n.iter().any(|b| matches!(b, b'/' | 0)) => {
            Err(Error::Invalid("name with a slash or NUL"))
        }
        _ => Ok(()),
    }
}
/// Checks a name that is searched for.
pub(super) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX { Err(Error::NameTooLong) } else { Ok(()) }
}

/// Bytes of a name, as they are added to or taken from a directory's size.
pub(super) fn name_bytes(name: &[u8]) -> i64 {
    i64::try_from(name.len()).expect("a checked name")
}

/// What an entry leads to, as the draft has it.
pub(super) fn find(d: &mut Draft<'_>, at: Name<'_>) -> Result<Option<Target>> {
    let key = dir_item_key(at.dir, at.name);
    let Some(item) = d.get(&key)?.cloned() else { return Ok(None) };
    let entry = d.parsed(&key, find_entry(&item, at.name))?;
    Ok(entry.map(|e| Target { location: e.location, kind: e.kind }))
}

/// Adds an entry to a directory. Its index must be unused there.
///
/// # Errors
/// `Exists`; `Overflow` when the names with this hash fill an item.
pub(super) fn add_entry(d: &mut Draft<'_>, at: Name<'_>, index: u64, to: Target) -> Result<()> {
    let entry = DirEntryRef {
        location: to.location,
        transid: d.generation,
        kind: to.kind,
        name: at.name,
        data: &[],
    };
    let key = dir_item_key(at.dir, at.name);
    if find(d, at)?.is_some() {
        return Err(Error::Exists);
    }
    let max = d.max_item;
    match d.slot(&key)? {
        Some(item) if item.len() + entry.encoded_len() > max => return Err(Error::Overflow),
        Some(item) => entry.append_to(item),
        none @ None => *none = Some(entry.encode()),
    }
    d.insert_new(&dir_index_key(at.dir, index), entry.encode());
    Ok(())
}

/// Removes the entry at `index` from a directory.
pub(super) fn remove_entry_at(d: &mut Draft<'_>, at: Name<'_>, index: u64) -> Result<()> {
    let key = dir_item_key(at.dir, at.name);
    let mut item = d.get(&key)?.cloned().ok_or(Error::NotFound)?;
    if !d.parsed(&key, remove_entry(&mut item, at.name))? {
        return Err(Error::NotFound);
    }
    *d.slot(&key)? = (!item.is_empty()).then_some(item);
    let key = dir_index_key(at.dir, index);
    let Some(item) = d.get(&key)?.cloned() else {
        return Err(d.corrupt(&key, "directory entry has no index item"));
    };
    if d.parsed(&key, single_entry(&item))?.name != at.name {
        return Err(d.corrupt(&key, "index item of a directory entry has another name"));
    }
    *d.slot(&key)? = None;
    Ok(())
}

/// May names that have no room in the item for their directory have items of their own?
pub(super) fn extrefs(core: &Core) -> bool {
    let bits = core.superblock.lock().incompat_flags.get();
    Incompat::from_bits_retain(bits).contains(Incompat::EXTENDED_IREF)
}

/// Adds a name of an inode: entry and reference.
///
/// # Errors
/// As [`add_entry`]; `TooManyLinks` when no reference item can hold it.
pub(super) fn add(
    d: &mut Draft<'_>,
    at: Name<'_>,
    index: u64,
    ino: ObjectId,
    kind: FileType,
    extrefs: bool,
) -> Result<()> {
    add_entry(d, at, index, Target { location: inode_key(ino), kind })?;
    let entry = InodeRef { index, name: at.name };
    let max = d.max_item;
    match d.slot(&inode_ref_key(ino, at.dir))? {
        none @ None => {
            let mut item = Vec::with_capacity(entry.encoded_len());
            entry.append_to(&mut item);
            *none = Some(item);
            return Ok(());
        }
        Some(item) if item.len() + entry.encoded_len() <= max => {
            entry.append_to(item);
            return Ok(());
        }
        Some(_) if !extrefs => return Err(Error::TooManyLinks),
        Some(_) => {}
    }
    let entry = ExtRef { parent: at.dir, index, name: at.name };
    let item = d.slot(&inode_extref_key(ino, at.dir, at.name))?.get_or_insert_default();
    if item.len() + entry.encoded_len() > max {
        return Err(Error::TooManyLinks);
    }
    entry.append_to(item);
    Ok(())
}

/// Adds the first name of a new inode.
///
/// # Errors
/// As [`add_entry`].
pub(super) fn add_first(
    d: &mut Draft<'_>,
    at: Name<'_>,
    index: u64,
    ino: ObjectId,
    kind: FileType,
) -> Result<()> {
    add_entry(d, at, index, Target { location: inode_key(ino), kind })?;
    let mut item = Vec::with_capacity(REF_HEADER_SIZE + at.name.len());
    InodeRef { index, name: at.name }.append_to(&mut item);
    d.insert_new(&inode_ref_key(ino, at.dir), item);
    Ok(())
}

/// Removes a name of an inode: entry and reference.
pub(super) fn remove(d: &mut Draft<'_>, at: Name<'_>, ino: ObjectId) -> Result<()> {
    let index = remove_reference(d, at, ino)?;
    remove_entry_at(d, at, index)
}

/// Removes the reference for a name, and returns the index that the name had in the directory.
fn remove_reference(d: &mut Draft<'_>, at: Name<'_>, ino: ObjectId) -> Result<u64> {
    let key = inode_ref_key(ino, at.dir);
    if let Some(mut item) = d.get(&key)?.cloned()
        && let Some(index) = d.parsed(&key, remove_ref(&mut item, at.name))?
    {
        *d.slot(&key)? = (!item.is_empty()).then_some(item);
        return Ok(index);
    }
    let extref = inode_extref_key(ino, at.dir, at.name);
    if let Some(mut item) = d.get(&extref)?.cloned()
        && let Some(index) = d.parsed(&extref, remove_extref(&mut item, at.dir, at.name))?
    {
        *d.slot(&extref)? = (!item.is_empty()).then_some(item);
        return Ok(index);
    }
    Err(d.corrupt(
        &key,
        format!("inode has no reference for its name {:?}", String::from_utf8_lossy(at.name)),
    ))
}

/// Notes that an inode without a name is to be deleted.
pub(super) fn add_orphan(d: &mut Draft<'_>, ino: ObjectId) -> Result<()> {
    d.slot(&orphan_key(ino))?.get_or_insert_default();
    Ok(())
}
/// Removes that note, if it is there.
pub(super) fn remove_orphan(d: &mut Draft<'_>, ino: ObjectId) -> Result<()> {
    *d.slot(&orphan_key(ino))? = None;
    Ok(())
}

/// Most bytes of name and value that one extended attribute may have together.
pub(super) fn max_attribute(max_item: usize) -> usize {
    max_item.saturating_sub(ENTRY_HEADER_SIZE)
}
