//! Setting a file's size.
//!
//! Shrinking cuts what is delayed, sees to it that the last sector is zero behind the new end, and drops extents — in
//! several transactions when there are many, announced by an ORPHAN item so that a crash in between is finished at the
//! next mount. Growing changes the size alone, but for what Linux expects on the device: zeros behind the old end,
//! whole-file data in the leaf rewritten at its new length, and explicit holes on images that have them.

use super::delalloc::{self, Admitted, admit};
use super::dirty::index;
use super::extents::{Content, ExtentCursor, MAX_FILE_SIZE, SECTOR, ceil, floor};
use super::replace::{New, RESERVE_ITEMS, cover, replace};
use crate::api::past_no_return;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::transaction::Handle;
use larder_format::ObjectId;
use larder_format::items::keys::orphan_key;
use larder_format::items::{Compression, InlineExtent};
use std::sync::Arc;

/// Sets the size of a file. The caller holds `op` exclusively and has checked that the file may be changed; times are
/// its business.
///
/// Setting the size that the file has drops what lies behind it, as the end of a truncation that a crash interrupted.
///
/// # Errors
/// `FileTooBig`, `NoSpace`, reading, corruption, `WouldBlock`.
pub(crate) fn truncate(core: &Core, inode: &Arc<Inode>, size: u64) -> Result<()> {
    if size > MAX_FILE_SIZE {
        return Err(Error::FileTooBig);
    }
    let old = inode.state.lock().size;
    if size > old { grow(core, inode, old, size) } else { shrink(core, inode, size) }
}

/// Is the whole file in its leaf, or on the way there?
pub(super) fn is_inline(core: &Core, inode: &Inode) -> Result<bool> {
    if inode.data.inline_in_flight() {
        return Ok(true);
    }
    let version = inode.subvol.version(core);
    let first = ExtentCursor::new(&version, ObjectId(inode.id.ino), 0)?.next()?;
    Ok(first.is_some_and(|e| matches!(e.content, Content::Inline { .. })))
}

/// Bytes to be taken in anew before the file may grow from `old` to beyond: where they begin, and what they are.
///
/// - A file in its leaf is rewritten whole, at its new length.
/// - A last sector that is not zero behind the end becomes so.
pub(super) fn before_growing(core: &Core, inode: &Inode, old: u64) -> Result<Option<(u64, Vec<u8>)>> {
    let may_become_inline = super::may_be_inline_somehow(core, old, inode.flags()) && !inode.data.is_clean();
    if old > 0 && old <= SECTOR && (may_become_inline || is_inline(core, inode)?) {
        let mut data = vec![0; index(old)];
        super::read::read_range(core, inode, 0, &mut data)?;
        return Ok(Some((0, data)));
    }
    if old.is_multiple_of(SECTOR) {
        return Ok(None);
    }
    let mut tail = vec![0; index(ceil(old) - old)];
    super::read::read_range(core, inode, old, &mut tail)?;
    if tail.iter().all(|b| *b == 0) {
        return Ok(None);
    }
    tail.fill(0);
    Ok(Some((old, tail)))
}

fn grow(core: &Core, inode: &Arc<Inode>, old: u64, size: u64) -> Result<()> {
    let again = match before_growing(core, inode, old)? {
        Some((at, data)) => {
            let admitted = admit(core, inode, at, data.len())?;
            Some((at, data, admitted))
        }
        None => None,
    };
    grow_with(core, inode, (old, size), again)
}

/// Sets the size from `old` to the larger `size`; `again` is what [`before_growing`] said, with what it may take.
///
/// # Errors
/// `NoSpace`, reading, corruption, `WouldBlock`; nothing has changed then.
pub(super) fn grow_with(
    core: &Core,
    inode: &Arc<Inode>,
    (old, size): (u64, u64),
    again: Option<(u64, Vec<u8>, Admitted)>,
) -> Result<()> {
    let mut h = core.begin(RESERVE_ITEMS)?;
    let _waiting_is_allowed = past_no_return();
    {
        let _extents = inode.data.lock_extents();
        cover(&mut h, inode, size)?;
    }
    // Before the bytes: write-back must not take the file for one that may still lie in its leaf.
    delalloc::grow(inode, old, size, again.as_ref().is_some_and(|(at, ..)| *at == old));
    if let Some((at, data, admitted)) = again {
        delalloc::take_in(core, inode, at, &data, old, admitted);
    }
    h.mark_dirty(inode);
    Ok(())
}

/// What has to be done about the sector in which the file is going to end.
enum Tail {
    Nothing,
    /// Zeros behind the end are to be written.
    Zero,
    /// The file stays in its leaf, with these bytes.
    Inline(Vec<u8>),
}

fn tail(core: &Core, inode: &Inode, size: u64) -> Result<Tail> {
    if size.is_multiple_of(SECTOR) {
        return Ok(Tail::Nothing);
    }
    let version = inode.subvol.version(core);
    let tree = version.tree();
    let extent = ExtentCursor::new(&version, ObjectId(inode.id.ino), floor(size))?.next()?;
    let Some(extent) = extent.filter(|e| e.start <= size) else { return Ok(Tail::Nothing) };
    let Content::Inline { ram_bytes, compression } = extent.content else {
        return Ok(if extent.content.is_data() { Tail::Zero } else { Tail::Nothing });
    };
    if ram_bytes <= size {
        return Ok(Tail::Nothing);
    }
    let mut data = match compression {
        Compression::None => extent.inline_data().to_vec(),
        _ => extent.unpack_inline(tree)?,
    };
    data.truncate(index(size));
    // Unpacked it may be too long for a leaf.
    let fits = InlineExtent {
        generation: larder_format::Generation(0),
        ram_bytes: size,
        compression: Compression::None,
        data: &data,
    };
    let room = larder_format::node::max_item_size(core.nodesize());
    Ok(if fits.encode().len() <= room { Tail::Inline(data) } else { Tail::Zero })
}

fn shrink(core: &Core, inode: &Arc<Inode>, size: u64) -> Result<()> {
    loop {
        inode.data.wait_landed(floor(size), u64::MAX)?;
        let zeros = vec![0; index(ceil(size) - size)];
        let admitted = match tail(core, inode, size)? {
            Tail::Zero => Some(admit(core, inode, size, zeros.len())?),
            _ => None,
        };
        let mut h = core.begin_deleting(RESERVE_ITEMS + 2)?;
        let _waiting_is_allowed = past_no_return();
        // Nothing can land while this is held; but what was dirty may have landed before.
        let extents = inode.data.lock_extents();
        let tail = tail(core, inode, size)?;
        if matches!(tail, Tail::Zero) && admitted.is_none() {
            continue;
        }
        let Some(old) = delalloc::cut(core, inode, size) else { continue };
        if let Some(admitted) = admitted {
            delalloc::take_in(core, inode, size, &zeros, old.min(size), admitted);
        }
        h.mark_dirty(inode);
        if let Tail::Inline(data) = &tail {
            let plain = New::Inline { data, ram_bytes: size, compression: Compression::None };
            replace(&mut h, inode, (0, SECTOR), plain, &mut false)?;
        }
        // The file may have ended in delayed bytes far behind its extents.
        cover(&mut h, inode, size)?;
        drop(extents);
        return drop_extents(core, inode, h, ceil(size));
    }
}

/// Drops all extents from `from` on, in as many transactions as that takes.
fn drop_extents(core: &Core, inode: &Arc<Inode>, first: Handle<'_>, from: u64) -> Result<()> {
    let end = MAX_FILE_SIZE + 1;
    let mut at = from;
    let mut handle = Some(first);
    let mut announced = None;
    while at < end {
        let mut h = match handle.take() {
            Some(h) => h,
            None => core.begin_deleting(RESERVE_ITEMS + 2)?,
        };
        {
            let _extents = inode.data.lock_extents();
            at = replace(&mut h, inode, (at, end), New::Nothing, &mut false)?;
        }
        if at < end && announced.is_none() {
            announced = Some(announce(&mut h, inode, true)?);
        } else if at == end && announced == Some(true) {
            announce(&mut h, inode, false)?;
        }
        drop(h);
        if at < end {
            core.step_done()?;
        }
    }
    Ok(())
}

/// Adds or removes the ORPHAN item. False when it was there already: then it announces something else, too, and stays.
fn announce(h: &mut Handle<'_>, inode: &Arc<Inode>, add: bool) -> Result<bool> {
    let key = orphan_key(ObjectId(inode.id.ino));
    h.edit(&inode.subvol, &[key], |e| match (e.get(&key).is_some(), add) {
        (false, true) => e.insert(&key, &[]).map(|()| true),
        (true, false) => e.delete(&key).map(|()| true),
        _ => Ok(false),
    })
}
