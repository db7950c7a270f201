//! Extended attributes.
//!
//! Attributes whose names have equal hashes share one XATTR_ITEM. Each is at most as long as an
//! item allows. Names that begin with `btrfs.` are properties with a meaning of their own. There is
//! one, `btrfs.compression`: its value is checked, and it changes together with the inode's
//! compression flags, as on Linux.
//!
//! Names that begin with `user.` belong to regular files and directories. Linux neither sets them
//! on anything else nor shows them there, whatever the disk has. Larder does the same, so that no
//! image can be made with attributes that Linux hides.

use super::Inode;
use super::allowed::check_not_fixed;
use super::draft::{Draft, prepare};
use super::names::max_attribute;
use crate::api::{FileKind, XattrMode, to_timespec};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::file::property::{COMPRESSION, Method};
use larder_format::features::Incompat;
use larder_format::items::dir::remove_entry;
use larder_format::items::keys::xattr_key;
use larder_format::items::{DirEntries, DirEntryRef, InodeFlags};
use larder_format::{Key, KeyType, NAME_MAX};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most bytes of a value, by the interface of Linux.
const VALUE_MAX: usize = 65536;

/// Value of an attribute.
///
/// # Errors
/// `NoAttribute`; reading; corruption.
pub(crate) fn get(core: &Core, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
    if !may_have(inode.kind, name) {
        return Err(Error::NoAttribute);
    }
    inode.stored_xattr(core, name)?.ok_or(Error::NoAttribute)
}

/// Does Linux show an attribute of this name on an inode of this kind?
pub(super) fn may_have(kind: FileKind, name: &[u8]) -> bool {
    matches!(kind, FileKind::Regular | FileKind::Directory) || !name.starts_with(b"user.")
}

/// # Errors
/// `NotPermitted` for a name that inodes of this kind do not have.
pub(super) fn check_may_have(kind: FileKind, name: &[u8]) -> Result<()> {
    if may_have(kind, name) {
        return Ok(());
    }
    Err(Error::NotPermitted("user attributes are for files and directories"))
}

/// Names of all attributes that are stored, also of those that [`get`] does not give, as on Linux.
///
/// # Errors
/// Reading; corruption.
pub(crate) fn list(core: &Core, inode: &Inode) -> Result<Vec<Vec<u8>>> {
    let key = |offset| Key::new(inode.object(), KeyType::XATTR_ITEM, offset);
    let mut names = Vec::new();
    if inode.no_xattrs.load(Ordering::Acquire) {
        return Ok(names);
    }
    inode.subvol.version(core).scan(&key(0), &key(u64::MAX), |item| {
        for entry in DirEntries::new(item.data()) {
            let entry =
                entry.map_err(|e| Error::corrupt(Place::item(inode.subvol.id, item.key), e.0))?;
            names.push(entry.name.to_vec());
        }
        Ok(true)
    })?;
    Ok(names)
}

/// Creates or replaces an attribute.
///
/// # Errors
/// `Exists`, `NoAttribute` by the mode; `NameTooLong`; `TooBig` beyond 64 KiB, `NoSpace` beyond
/// what an item holds; `Invalid` for a property's value; `NotPermitted` by the inode's kind or
/// flags; no space; read-only.
pub(crate) fn set(
    core: &Core,
    inode: &Arc<Inode>,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
) -> Result<()> {
    check_name(name)?;
    if value.len() > VALUE_MAX {
        return Err(Error::TooBig);
    }
    change(core, inode, name, Some(value), mode)
}

/// Removes an attribute.
///
/// # Errors
/// `NoAttribute`; `NotPermitted` by the inode's kind or flags; no space; read-only.
pub(crate) fn remove(core: &Core, inode: &Arc<Inode>, name: &[u8]) -> Result<()> {
    check_name(name)?;
    change(core, inode, name, None, XattrMode::Replace)
}

fn check_name(name: &[u8]) -> Result<()> {
    match name.len() {
        0 => Err(Error::Invalid("empty attribute name")),
        1..=NAME_MAX => Ok(()),
        _ => Err(Error::NameTooLong),
    }
}

fn change(
    core: &Core,
    inode: &Arc<Inode>,
    name: &[u8],
    value: Option<&[u8]>,
    mode: XattrMode,
) -> Result<()> {
    inode.check_changeable(core)?;
    check_may_have(inode.kind, name)?;
    let _guard = inode.lock_op()?;
    inode.check_alive()?;
    check_not_fixed(inode)?;
    let mut value = value;
    let mut mode = mode;
    let property = name.starts_with(b"btrfs.");
    let mut flags = None;
    let mut incompat = Incompat::empty();
    if property {
        // An empty value removes a property, whether it was set or not.
        if value == Some(&[]) {
            value = None;
            mode = XattrMode::Set;
        }
        let method = Method::of_property(inode, name, value)?;
        // An inode that has no data, and does not pass the property on to inodes with data, does
        // not keep it: Linux accepts the property there and forgets it.
        if !matches!(inode.kind, FileKind::Regular | FileKind::Directory) {
            return Ok(());
        }
        flags = Some(method.flags());
        incompat = method.incompat();
    }
    let prepared =
        prepare(core, &inode.subvol, value.is_none(), |d| put(d, inode, name, value, mode))?;
    let (mut handle, ()) = prepared.write()?;
    if !incompat.is_empty() {
        handle.need_incompat(incompat.bits());
    }
    let now = core.now();
    inode.change(&mut handle, |state| {
        state.item.ctime = to_timespec(now);
        if let Some(new) = flags {
            let kept = state.item.inode_flags() & !(InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS);
            state.item.set_inode_flags(kept | new);
        }
    });
    Ok(())
}

/// Sets an attribute of an inode, or removes it.
pub(super) fn put(
    d: &mut Draft<'_>,
    inode: &Inode,
    name: &[u8],
    value: Option<&[u8]>,
    mode: XattrMode,
) -> Result<()> {
    // Set before the attribute exists. If it never comes to exist, the only cost is one more
    // look-up.
    inode.no_xattrs.store(false, Ordering::Release);
    put_item(d, xattr_key(inode.object(), name), name, value, mode)
}

pub(super) fn put_item(
    d: &mut Draft<'_>,
    key: Key,
    name: &[u8],
    value: Option<&[u8]>,
    mode: XattrMode,
) -> Result<()> {
    // Checked before anything else, as on Linux: an attribute that is too long for an item is
    // refused whether it exists or not.
    if value.is_some_and(|value| name.len() + value.len() > max_attribute(d.max_item)) {
        return Err(Error::NoSpace);
    }
    let mut item = d.get(&key)?.cloned().unwrap_or_default();
    let existed = d.parsed(&key, remove_entry(&mut item, name))?;
    match (mode, existed) {
        (XattrMode::Create, true) => return Err(Error::Exists),
        (XattrMode::Replace, false) => return Err(Error::NoAttribute),
        _ => {}
    }
    if let Some(value) = value {
        let entry = DirEntryRef::xattr(d.generation, name, value);
        if item.len() + entry.encoded_len() > d.max_item {
            return Err(Error::NoSpace);
        }
        entry.append_to(&mut item);
    } else if !existed {
        return Ok(());
    }
    *d.slot(&key)? = (!item.is_empty()).then_some(item);
    Ok(())
}

/// Sets the property that chooses compression, or removes it, and leaves the flags alone.
pub(super) fn put_property(d: &mut Draft<'_>, inode: &Inode, value: Option<&[u8]>) -> Result<()> {
    put(d, inode, COMPRESSION, value, XattrMode::Set)
}

/// The compression property that a new inode in `dir` inherits.
pub(super) fn inherited_property(
    core: &Core,
    dir: &Inode,
    kind: FileKind,
) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
    if !matches!(kind, FileKind::Regular | FileKind::Directory)
        || !dir.flags().contains(InodeFlags::COMPRESS)
    {
        return Ok(None);
    }
    let method = dir.stored_xattr(core, COMPRESSION)?.and_then(|v| Method::parse(&v));
    Ok(match method {
        // Only the method: Linux does not pass levels on.
        Some(Method::Compress(packing)) => {
            Some((COMPRESSION.to_vec(), packing.method().name().as_bytes().to_vec()))
        }
        _ => None,
    })
}
