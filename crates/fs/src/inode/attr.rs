//! Attributes: what `stat` shows, and changing it.
//!
//! Attributes live in the inode's state; changing them edits no tree, only marks the item to be
//! written at the seal. The flags that `chattr` sets are enforced here and by the operations on
//! names, as Linux does: an immutable inode changes in nothing, an append-only one neither in size
//! nor in ownership, permissions or chosen times, and its names stay.

use super::draft::prepare;
use super::{Inode, xattr};
use crate::api::{Attr, FileKind, SetAttr, SetTime, from_timespec, past_no_return, to_timespec};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::file;
use larder_format::SECTOR_SIZE;
use larder_format::items::inode::{PERMISSIONS, S_IFMT};
use larder_format::items::{Compression, InodeFlags};
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

/// Bytes as `st_blocks` counts them, which knows no parts of a sector.
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
    // Delayed data may take the place of what is there: a file without holes does not grow by it.
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

/// Fails for an immutable or append-only inode, whose attributes and names stay as they are.
pub(super) fn check_not_fixed(inode: &Inode) -> Result<()> {
    let flags = inode.flags();
    if flags.contains(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("it is immutable"));
    }
    if flags.contains(InodeFlags::APPEND) {
        return Err(Error::NotPermitted("it is append-only"));
    }
    Ok(())
}
/// Fails for an immutable inode.
pub(super) fn check_not_immutable(inode: &Inode) -> Result<()> {
    if inode.flags().contains(InodeFlags::IMMUTABLE) {
        Err(Error::NotPermitted("it is immutable"))
    } else {
        Ok(())
    }
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
    // As Linux has it, one does not follow the other in one step either.
    let has = |flag| wanted.contains(flag) || now.contains(flag);
    let new = |flag| wanted.contains(flag) && !now.contains(flag);
    if (wanted.contains(InodeFlags::COMPRESS) && has(InodeFlags::NODATACOW))
        || (new(InodeFlags::NODATACOW) && has(InodeFlags::COMPRESS))
    {
        return Err(Error::Invalid("compression needs copy on write"));
    }
    let mut flags = (now & !USER_FLAGS) | (wanted & USER_FLAGS);
    match inode.kind {
        // What has data keeps the way it was written.
        FileKind::Regular if size == 0 => flags.set(NOCOW_FLAGS, wants_nocow),
        FileKind::Directory => flags.set(InodeFlags::NODATACOW, wants_nocow),
        _ => {}
    }
    Ok(flags)
}

/// Changes attributes; the new ones.
///
/// # Errors
/// `NotPermitted` by the inode's flags; `Invalid`; what truncating says; no space; read-only.
pub(crate) fn set(core: &Core, inode: &Arc<Inode>, changes: &SetAttr) -> Result<Attr> {
    inode.check_changeable(core)?;
    let guard = inode.lock_op()?;
    inode.check_alive()?;
    check_allowed(inode, changes)?;
    let flags = match changes.flags {
        None => None,
        Some(bits) => {
            let (now, size) = {
                let state = inode.state.lock();
                (state.item.inode_flags(), state.size)
            };
            let new = new_flags(
                inode,
                now,
                changes.size.unwrap_or(size),
                InodeFlags::from_bits_retain(bits),
            )?;
            Some((now, new))
        }
    };
    if let Some(size) = changes.size {
        match inode.kind {
            FileKind::Regular => file::truncate(core, inode, size)?,
            FileKind::Directory => return Err(Error::IsDirectory),
            _ => return Err(Error::Invalid("only regular files have a size that can be set")),
        }
    }
    let truncated = changes.size.is_some();
    let _waiting_is_allowed = truncated.then(past_no_return);
    let compresses = |f: InodeFlags| f & COMPRESSION_FLAGS;
    let mut handle = match flags {
        // The property follows the flag: `chattr +c` means the mount's method, or the default,
        // anything else means none. (Linux sets it anew with any other flag, too, and forgets what
        // was chosen; we leave it as it is.)
        Some((now, new)) if compresses(now) != compresses(new) => {
            let method = core.options.compress.map_or(Compression::Zlib, |c| c.packing.method());
            let value = new.contains(InodeFlags::COMPRESS).then_some(method.name().as_bytes());
            let prepared =
                prepare(core, &inode.subvol, false, |d| xattr::put_property(d, inode, value))?;
            let mut handle = prepared.write()?.0;
            if value.is_some() {
                handle.need_incompat(file::property::incompat(method).bits());
            }
            handle
        }
        _ => core.begin_for_item(inode)?,
    };
    let now = core.now();
    inode.change(&mut handle, |state| {
        let item = &mut state.item;
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
        } else if truncated {
            item.mtime = to_timespec(now);
        }
        item.ctime = to_timespec(changes.ctime.unwrap_or(now));
        if let Some((_, new)) = flags {
            item.set_inode_flags(new);
        }
    });
    drop(handle);
    drop(guard);
    get(inode)
}
