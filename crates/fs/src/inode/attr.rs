//! Attributes: what `stat` shows, and changing it.
//!
//! Attributes live in the inode's state. Changing them edits no tree: the item is only marked, and
//! written at the seal. What flags forbid is in [`super::allowed`].

use super::allowed::{check_not_fixed, check_not_immutable};
use super::draft::prepare;
use super::{Inode, xattr};
use crate::api::{
    Attr, FileKind, SetAttr, SetTime, Timestamp, from_timespec, past_no_return, to_timespec,
};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::file;
use crate::transaction::Handle;
use larder_format::SECTOR_SIZE;
use larder_format::items::inode::{PERMISSIONS, S_IFMT};
use larder_format::items::{Compression, InodeFlags, InodeItem};
use std::sync::Arc;

/// Flags that a user may set and clear.
const USER_FLAGS: InodeFlags = InodeFlags::SYNC
    .union(InodeFlags::IMMUTABLE)
    .union(InodeFlags::APPEND)
    .union(InodeFlags::NODUMP)
    .union(InodeFlags::NOATIME)
    .union(InodeFlags::DIRSYNC)
    .union(COMPRESSION_FLAGS);
const COMPRESSION_FLAGS: InodeFlags = InodeFlags::COMPRESS.union(InodeFlags::NOCOMPRESS);
const NOCOW_FLAGS: InodeFlags = InodeFlags::NODATACOW.union(InodeFlags::NODATASUM);

/// Bytes as `st_blocks` counts them, in whole sectors.
fn whole_sectors(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(u64::from(SECTOR_SIZE)).unwrap_or(u64::MAX)
}

/// Attributes of an inode.
///
/// # Errors
/// `NotFound` once it is deleted.
pub(crate) fn get(inode: &Inode) -> Result<Attr> {
    let delayed = match inode.kind {
        FileKind::Regular => inode.data.delayed_bytes(),
        _ => 0,
    };
    let state = inode.state.lock();
    if state.deleted {
        return Err(Error::NotFound);
    }
    let item = &state.item;
    // Delayed data may replace what is there, so a file without holes does not grow by it.
    let stored = whole_sectors(item.nbytes.get());
    let bytes =
        stored.saturating_add(whole_sectors(delayed)).min(whole_sectors(state.size)).max(stored);
    Ok(Attr {
        id: inode.id,
        generation: item.created(),
        kind: inode.kind,
        perm: item.mode.get() & PERMISSIONS,
        nlink: item.nlink.get(),
        uid: item.uid.get(),
        gid: item.gid.get(),
        rdev: item.rdev.get(),
        size: state.size,
        bytes,
        atime: from_timespec(item.atime),
        mtime: from_timespec(item.mtime),
        ctime: from_timespec(item.ctime),
        otime: from_timespec(item.otime),
        flags: item.flags.get(),
    })
}

/// Checks whether the flags allow the changes.
fn check_allowed(inode: &Inode, changes: &SetAttr) -> Result<()> {
    let chosen_time = |t: Option<SetTime>| matches!(t, Some(SetTime::To(_)));
    let chosen = chosen_time(changes.atime) || chosen_time(changes.mtime);
    let fixed = changes.perm.is_some()
        || changes.uid.is_some()
        || changes.gid.is_some()
        || changes.size.is_some();
    if chosen || fixed {
        check_not_fixed(inode)
    } else if changes.atime.is_some() || changes.mtime.is_some() {
        check_not_immutable(inode)
    } else {
        Ok(())
    }
}

/// The flags that an inode has after the user asked for `wanted`.
///
/// # Errors
/// `Invalid` for flags that exclude each other; `NotSupported` for those that cannot be set.
fn new_flags(inode: &Inode, now: InodeFlags, size: u64, wanted: InodeFlags) -> Result<InodeFlags> {
    let settable = USER_FLAGS | NOCOW_FLAGS;
    if !(wanted & !settable & !now).is_empty() {
        return Err(Error::NotSupported("setting this flag"));
    }
    if wanted.contains(COMPRESSION_FLAGS) {
        return Err(Error::Invalid("both compression and no compression"));
    }
    let wants_nocow = wanted.contains(InodeFlags::NODATACOW);
    // As on Linux, neither flag can take the other's place in one step.
    let has = |flag| wanted.contains(flag) || now.contains(flag);
    let new = |flag| wanted.contains(flag) && !now.contains(flag);
    if (wanted.contains(InodeFlags::COMPRESS) && has(InodeFlags::NODATACOW))
        || (new(InodeFlags::NODATACOW) && has(InodeFlags::COMPRESS))
    {
        return Err(Error::Invalid("compression needs copy on write"));
    }
    let mut flags = (now & !USER_FLAGS) | (wanted & USER_FLAGS);
    match inode.kind {
        // A file that has data keeps the way in which the data was written.
        FileKind::Regular if size == 0 => flags.set(NOCOW_FLAGS, wants_nocow),
        FileKind::Directory => flags.set(InodeFlags::NODATACOW, wants_nocow),
        _ => {}
    }
    Ok(flags)
}

/// The flags that an inode has, and those that it gets.
#[derive(Clone, Copy)]
struct FlagChange {
    now: InodeFlags,
    new: InodeFlags,
}

impl FlagChange {
    /// # Errors
    /// As [`new_flags`].
    fn of(inode: &Inode, changes: &SetAttr) -> Result<Option<Self>> {
        let Some(bits) = changes.flags else { return Ok(None) };
        let (now, size) = {
            let state = inode.state.lock();
            (state.item.inode_flags(), state.size)
        };
        let wanted = InodeFlags::from_bits_retain(bits);
        let new = new_flags(inode, now, changes.size.unwrap_or(size), wanted)?;
        Ok(Some(Self { now, new }))
    }
    fn changes_compression(&self) -> bool {
        self.now & COMPRESSION_FLAGS != self.new & COMPRESSION_FLAGS
    }
}

/// Changes attributes, and returns the new ones.
///
/// # Errors
/// `NotPermitted` by the inode's flags; `Invalid`; the errors of truncating; no space; read-only.
pub(crate) fn set(core: &Core, inode: &Arc<Inode>, changes: &SetAttr) -> Result<Attr> {
    inode.check_changeable(core)?;
    let guard = inode.lock_op()?;
    inode.check_alive()?;
    check_allowed(inode, changes)?;
    let flags = FlagChange::of(inode, changes)?;
    if let Some(size) = changes.size {
        match inode.kind {
            FileKind::Regular => file::truncate(core, inode, size)?,
            FileKind::Directory => return Err(Error::IsDirectory),
            _ => return Err(Error::Invalid("only regular files have a size that can be set")),
        }
    }
    let _waiting_is_allowed = changes.size.is_some().then(past_no_return);
    let mut handle = match flags {
        Some(flags) if flags.changes_compression() => begin_with_property(core, inode, flags)?,
        _ => core.begin_for_item(inode)?,
    };
    let now = core.now();
    inode.change(&mut handle, |state| {
        apply(&mut state.item, changes, now);
        if let Some(flags) = flags {
            state.item.set_inode_flags(flags.new);
        }
    });
    drop(handle);
    drop(guard);
    get(inode)
}

/// Joins the transaction and lets the compression property follow the flags: `chattr +c` means the
/// mount's method, or the default; any other change of the compression flags means none. (Linux
/// sets the property again with any other flag, too, and forgets what was chosen. We leave it as it
/// is.)
fn begin_with_property<'a>(core: &'a Core, inode: &Inode, flags: FlagChange) -> Result<Handle<'a>> {
    let method = core.options.compress.map_or(Compression::Zlib, |c| c.packing.method());
    let value = flags.new.contains(InodeFlags::COMPRESS).then_some(method.name().as_bytes());
    let prepared = prepare(core, &inode.subvol, false, |d| xattr::put_property(d, inode, value))?;
    let mut handle = prepared.write()?.0;
    if value.is_some() {
        handle.need_incompat(file::property::incompat(method).bits());
    }
    Ok(handle)
}

/// Changes what the inode's item shows, apart from size and flags.
fn apply(item: &mut InodeItem, changes: &SetAttr, now: Timestamp) {
    if let Some(perm) = changes.perm {
        item.mode = ((item.mode.get() & S_IFMT) | (perm & PERMISSIONS)).into();
    }
    if let Some(uid) = changes.uid {
        item.uid = uid.into();
    }
    if let Some(gid) = changes.gid {
        item.gid = gid.into();
    }
    let time = |t: SetTime| match t {
        SetTime::Now => to_timespec(now),
        SetTime::To(t) => to_timespec(t),
    };
    if let Some(t) = changes.atime {
        item.atime = time(t);
    }
    if let Some(t) = changes.mtime {
        item.mtime = time(t);
    } else if changes.size.is_some() {
        item.mtime = to_timespec(now);
    }
    item.ctime = to_timespec(changes.ctime.unwrap_or(now));
}
