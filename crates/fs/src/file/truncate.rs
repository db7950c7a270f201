//! Setting a file's size.
//!
//! Shrinking cuts delayed data and drops extents. The bytes of the last sector behind the new end
//! stay, as on Linux; growing makes them zero. (Zeros at once would be one more extent for every
//! cut, and in a file that is written in place they would be there before the new size is.) If
//! there are many extents, shrinking takes several transactions. Each cuts some extents off the end
//! and leaves a shorter, sound file. After a crash the length may be between the two, as on Linux.
//! The new size is not set at once with an ORPHAN item for the rest: Linux would not finish that.
//! `docs/FILE-DATA.md` has the reason.
//!
//! Growing changes the size alone, and otherwise only what Linux expects on the device: zeros
//! behind the old end, data in the leaf rewritten at its new length, and explicit holes on images
//! that have them.

use super::admission::{Rewrite, begin_with};
use super::delalloc;
use super::dirty::index;
use super::extents::{Content, ExtentCursor, MAX_FILE_SIZE, SECTOR, ceil, floor};
use super::replace::{MAX_ITEMS, New, RESERVE_ITEMS, cover, replace};
use crate::api::past_no_return;
use crate::engine::{Core, Inode, LockedExtents};
use crate::error::{Error, Place, Result};
use crate::transaction::Handle;
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, InlineExtent};
use larder_format::{FileOffset, KeyType, ObjectId};
use std::ops::Range;
use std::sync::Arc;

/// Sets the size of a file. The caller holds `op` exclusively, has checked that the file may be
/// changed, and sets the times.
///
/// Setting the size that the file already has drops what lies behind it. This ends a truncation
/// that a crash interrupted.
///
/// # Errors
/// `FileTooBig`, `NoSpace`, reading, corruption, `WouldBlock`.
pub(crate) fn truncate(core: &Core, inode: &Arc<Inode>, size: u64) -> Result<()> {
    if size > MAX_FILE_SIZE {
        return Err(Error::FileTooBig);
    }
    let old = inode.state.lock().size;
    if size > old { grow(core, inode, old..size) } else { shrink(core, inode, size) }
}

/// Is the whole file in its leaf, or in flight to it?
pub(super) fn is_inline(core: &Core, inode: &Inode) -> Result<bool> {
    if inode.data.inline_in_flight() {
        return Ok(true);
    }
    let version = inode.subvol.version(core);
    let first = ExtentCursor::new(&version, ObjectId(inode.id.ino), 0)?.next()?;
    Ok(first.is_some_and(|e| matches!(e.content, Content::Inline { .. })))
}

/// Bytes to be taken in again before the file may grow beyond `old`.
///
/// - A file in its leaf is rewritten whole, at its new length. So is a file that is going there
///   now, or will soon.
/// - A last sector that is not zero behind the end becomes zero there.
///
/// # Errors
/// Reading, corruption, `NoSpace`, `WouldBlock`.
pub(super) fn before_growing(core: &Core, inode: &Inode, old: u64) -> Result<Option<Rewrite>> {
    let may_become_inline =
        super::may_be_inline_somehow(core, old, inode.flags()) && !inode.data.is_clean();
    if old > 0 && old <= SECTOR && (may_become_inline || is_inline(core, inode)?) {
        let mut data = vec![0; index(old)];
        super::read::read_range(core, inode, 0, &mut data)?;
        // An extent that the file may have had before still has what was cut off.
        data.resize(index(ceil(old)), 0);
        return Rewrite::new(core, inode, 0, data).map(Some);
    }
    if old.is_multiple_of(SECTOR) || fault!(core.options.tuning, TailShows) {
        return Ok(None);
    }
    let mut tail = vec![0; index(ceil(old) - old)];
    super::read::read_range(core, inode, old, &mut tail)?;
    if tail.iter().all(|b| *b == 0) {
        return Ok(None);
    }
    tail.fill(0);
    Rewrite::new(core, inode, old, tail).map(Some)
}

fn grow(core: &Core, inode: &Arc<Inode>, added: Range<u64>) -> Result<()> {
    let again = before_growing(core, inode, added.start)?;
    grow_with(core, inode, added, again)
}

/// Sets the size, which adds these bytes. `again` is the answer of [`before_growing`].
///
/// # Errors
/// `NoSpace`, reading, corruption, `WouldBlock`; nothing has changed then.
pub(super) fn grow_with(
    core: &Core,
    inode: &Arc<Inode>,
    added: Range<u64>,
    mut again: Option<Rewrite>,
) -> Result<()> {
    let admitted = again.as_mut().map(|again| &mut again.admitted);
    let mut h = begin_with(core, inode, (RESERVE_ITEMS, false), admitted)?;
    let _waiting_is_allowed = past_no_return();
    {
        let _extents = inode.lock_extents();
        cover(&mut h, inode, added.end)?;
    }
    // Before the bytes are taken in: write-back must not believe that the file may still lie in its
    // leaf.
    let tail = again.as_ref().is_some_and(|again| again.end() > added.start);
    delalloc::grow(inode, &added, tail);
    if let Some(again) = again {
        again.take_in(core, inode, added.start);
    }
    h.mark_dirty(inode);
    Ok(())
}

/// What has to be done about the sector in which the file is going to end.
enum Tail {
    Nothing,
    /// The file leaves its leaf: zeros have to be written behind the end.
    Leave,
    /// The file stays in its leaf, with these bytes.
    Inline(Vec<u8>),
}

fn tail(core: &Core, inode: &Inode, size: u64) -> Result<Tail> {
    if size == 0 || size >= SECTOR {
        return Ok(Tail::Nothing);
    }
    let version = inode.subvol.version(core);
    let tree = version.tree();
    let Some(extent) = ExtentCursor::new(&version, ObjectId(inode.id.ino), 0)?.next()? else {
        return Ok(Tail::Nothing);
    };
    let Content::Inline { ram_bytes, compression } = extent.content else {
        return Ok(Tail::Nothing);
    };
    if ram_bytes <= size {
        return Ok(Tail::Nothing);
    }
    let mut data = match compression {
        Compression::None => extent.inline_data().to_vec(),
        _ => extent.unpack_inline(tree)?,
    };
    data.truncate(index(size));
    // Unpacked, the data may be too long for a leaf.
    let fits = InlineExtent {
        generation: larder_format::Generation(0),
        ram_bytes: size,
        compression: Compression::None,
        data: &data,
    };
    let room = larder_format::node::max_item_size(core.nodesize());
    Ok(if fits.encode().len() <= room { Tail::Inline(data) } else { Tail::Leave })
}

/// Cuts the file, from its end towards `size`, in as many steps as its extents need.
fn shrink(core: &Core, inode: &Arc<Inode>, size: u64) -> Result<()> {
    let mut begun = None;
    while !shrink_step(core, inode, size)? {
        begun.get_or_insert_with(past_no_return);
        core.step_done()?;
    }
    Ok(())
}

/// One step towards `size`, in one transaction. True if it was the last one.
fn shrink_step(core: &Core, inode: &Arc<Inode>, size: u64) -> Result<bool> {
    loop {
        inode.data.wait_completed(&(floor(size)..u64::MAX))?;
        let last = few_behind(core, inode, ceil(size))?;
        let mut zeros = match tail(core, inode, size)? {
            Tail::Leave if last => {
                let zeros = vec![0; index(ceil(size) - size)];
                Some(Rewrite::new(core, inode, size, zeros)?)
            }
            _ => None,
        };
        let admitted = zeros.as_mut().map(|zeros| &mut zeros.admitted);
        let mut h = begin_with(core, inode, (RESERVE_ITEMS + 2, true), admitted)?;
        let _waiting_is_allowed = past_no_return();
        // Nothing can complete while this is held, but data that was dirty may have completed
        // before.
        let extents = inode.lock_extents();
        if last != few_behind(core, inode, ceil(size))? {
            continue;
        }
        let (to, tail) = match last {
            true => (size, tail(core, inode, size)?),
            // The size itself may lie within one of these extents.
            false => (start_of_last(core, inode)?.max(ceil(size)), Tail::Nothing),
        };
        if matches!(tail, Tail::Leave) && zeros.is_none() {
            continue;
        }
        // Space that is reserved behind the end can go while the end stays.
        if last || to <= inode.state.lock().size {
            let Some(old) = delalloc::cut(core, inode, to) else { continue };
            // The zeros may be for a file that has left its leaf meanwhile. It needs none.
            if let (Tail::Leave, Some(zeros)) = (&tail, zeros) {
                zeros.take_in(core, inode, old.min(size));
            }
            h.mark_dirty(inode);
        }
        if let Tail::Inline(data) = &tail {
            let plain = New::Inline { data, ram_bytes: size, compression: Compression::None };
            replace(&mut h, inode, 0..SECTOR, plain, &mut false)?;
        }
        // The file may have ended in delayed bytes far behind its extents.
        cover(&mut h, inode, to)?;
        drop_behind(core, inode, ceil(to), (h, extents))?;
        return Ok(last);
    }
}

/// A transaction handle, and the extent lock that was taken with it in hand.
type Held<'a> = (Handle<'a>, LockedExtents<'a>);

/// Drops all extents behind `start`.
fn drop_behind<'a>(
    core: &'a Core,
    inode: &'a Arc<Inode>,
    start: u64,
    (mut h, mut extents): Held<'a>,
) -> Result<()> {
    let (mut at, end) = (start, MAX_FILE_SIZE + 1);
    while at < end {
        at = replace(&mut h, inode, at..end, New::Nothing, &mut false)?;
        if at < end && fault!(core.options.tuning, TruncateAtOnce) {
            drop((extents, h));
            core.step_done()?;
            h = core.begin_deleting(RESERVE_ITEMS + 2)?;
            extents = inode.lock_extents();
        }
    }
    drop(extents);
    Ok(())
}

/// Can one change drop all extents that end behind `start`?
fn few_behind(core: &Core, inode: &Inode, start: u64) -> Result<bool> {
    if fault!(core.options.tuning, TruncateAtOnce) {
        return Ok(true);
    }
    let version = inode.subvol.version(core);
    let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), start)?;
    for _ in 0..MAX_ITEMS {
        if cursor.next()?.is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where the last extents of a file begin, as many as one change can drop. The file has more than
/// that.
fn start_of_last(core: &Core, inode: &Inode) -> Result<u64> {
    let ino = ObjectId(inode.id.ino);
    let version = inode.subvol.version(core);
    let mut cursor = version.seek(&extent_data_key(ino, FileOffset(u64::MAX)))?;
    let mut start = u64::MAX;
    for _ in 0..MAX_ITEMS {
        match cursor.prev()? {
            Some(item) if item.key.objectid == ino && item.key.kind == KeyType::EXTENT_DATA => {
                start = item.key.offset;
            }
            _ => break,
        }
    }
    // Otherwise cutting there would make no progress.
    let sound = start.is_multiple_of(SECTOR) && start <= MAX_FILE_SIZE;
    let place = || Place::item(version.tree(), extent_data_key(ino, FileOffset(start)));
    sound
        .then_some(start)
        .ok_or_else(|| Error::corrupt(place(), "file extent begins within a sector"))
}
