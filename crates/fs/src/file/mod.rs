//! File data: delayed writes, extents, checksums, compression.
//!
//! | module | decision it hides |
//! |---|---|
//! | `admission` | what a write has to have before its bytes may be delayed |
//! | `writeback`, `batch` | how delayed bytes become extents |
//! | `compress`, `property` | what is compressed on the way, and how; what its inode says of it |
//! | `extents` | how extents lie in items, and what can be wrong with them |
//! | `join` | how pieces of a stream become one extent |
//! | `replace` | how items, references and `nbytes` change when a range gets another content |
//! | `read` | where bytes come from, and how they are verified |
//! | `sums` | where the checksums of data are |
//! | `clone` | what sharing extents between files needs, and when it is allowed |
//! | `copy` | what a copy shares, and what it reads and writes |
//! | `position` | a place in a file |
//! | `fallocate` | what reserving, zeroing and punching do to which sectors |
//! | `encoded` | what data that is compressed already has to be, to become an extent as it is |
//! | `map` | which extents are shared, and with what |
//! | `moving` | how an extent and the items that refer to it move, unnoticed by readers |
//! | `nocow` | when bytes may be written in place, and how |
//! | `truncate` | what happens at a file's end when its size changes |
//! | `seek` | what counts as data |
//! | `older` | what benchmarks may switch back to what Linux once did |
//! | `reclaim` | what is done, and in which order, when space is short |
//!
//! A write goes into memory, with space reserved for it ([`delalloc`]). Write-back turns it into
//! extents later. This room makes two promises to the rest of the engine. An extent enters the tree
//! only when its data is on the device (a commit flushes it). The size in an inode's item never
//! covers bytes that are not in extents ([`FileData::disk_size`]). Longer reasons are in
//! `docs/FILE-DATA.md`.
//!
//! [`FileData::disk_size`]: crate::engine::file_data::FileData::disk_size

mod admission;
mod batch;
mod clone;
pub(crate) mod compress;
mod copy;
pub(crate) mod encoded;
pub(crate) mod extents;
mod fallocate;
mod join;
mod map;
pub(crate) mod moving;
mod nocow;
mod older;
mod position;
pub(crate) mod property;
pub(crate) mod read;
pub(crate) mod reclaim;
mod replace;
mod seek;
mod sums;
mod truncate;
mod writeback;

pub(crate) use clone::{clone_range, dedupe_range};
pub(crate) use copy::copy_range;
pub(crate) use extents::{MAX_FILE_SIZE, SECTOR, ceil, floor};
pub(crate) use fallocate::fallocate;
pub(crate) use map::map;
pub(crate) use position::Position;
pub(crate) use replace::{LastRefs, has_no_holes};
pub(crate) use seek::seek;
pub(crate) use sums::View as Sums;
pub(crate) use truncate::truncate;
pub(crate) use writeback::one_batch;

use crate::api::{FileKind, may_wait, past_no_return, to_timespec};
use crate::engine::delalloc::{self, Admitted, take_in};
use crate::engine::file_data::dirty;
use crate::engine::inline::{max_inline, may_be_inline, may_be_inline_somehow};
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::lock::Shared;
use crate::transaction::Handle;
use admission::{admit, begin_taking_in, begin_with};
use larder_format::items::InodeFlags;
use replace::{RESERVE_ITEMS, cover};
use std::sync::Arc;

/// A longer write is taken in by pieces of this length.
const WRITE_PIECE: usize = 4 << 20;

fn expect_regular(inode: &Inode) -> Result<()> {
    match inode.kind {
        FileKind::Regular => Ok(()),
        FileKind::Directory => Err(Error::IsDirectory),
        _ => Err(Error::Invalid("only regular files have data")),
    }
}

fn lock_shared(inode: &Inode) -> Result<Shared<'_, ()>> {
    if let Some(guard) = inode.op.try_read() {
        return Ok(guard);
    }
    may_wait()?;
    Ok(inode.op.read())
}

/// Reads into `buf`. Returns the number of bytes, which is less than asked for only at the end of
/// the file.
///
/// # Errors
/// `IsDirectory`, `Invalid` for other types; `Corrupt`; a device error when no copy could be read;
/// `WouldBlock`.
pub(crate) fn read(core: &Core, inode: &Arc<Inode>, offset: u64, buf: &mut [u8]) -> Result<usize> {
    expect_regular(inode)?;
    let _op = lock_shared(inode)?;
    let size = inode.state.lock().size;
    let n = dirty::index(size.saturating_sub(offset).min(buf.len() as u64));
    if n > 0 {
        read::read_range(core, inode, offset, &mut buf[..n])?;
    }
    Ok(n)
}

/// Writes all of `data`, growing the file where needed. Nothing was written when it fails, unless
/// `data` is longer than some MiB.
///
/// # Errors
/// `IsDirectory`, `Invalid` for other types; `FileTooBig`; `NotPermitted` by flags; `ReadOnly`;
/// `NoSpace`; `WouldBlock`.
pub(crate) fn write(core: &Core, inode: &Arc<Inode>, offset: u64, data: &[u8]) -> Result<()> {
    inode.check_changeable(core)?;
    expect_regular(inode)?;
    if data.is_empty() {
        return Ok(());
    }
    if offset.checked_add(data.len() as u64).is_none_or(|end| end > MAX_FILE_SIZE) {
        return Err(Error::FileTooBig);
    }
    let _op = inode.lock_op()?;
    inode.check_alive()?;
    {
        let state = inode.state.lock();
        let flags = state.item.inode_flags();
        if flags.contains(InodeFlags::IMMUTABLE) {
            return Err(Error::NotPermitted("the file is immutable"));
        }
        if flags.contains(InodeFlags::APPEND) && offset < state.size {
            return Err(Error::NotPermitted("the file can only be appended to"));
        }
    }
    let mut at = offset;
    let mut begun = None;
    for piece in data.chunks(WRITE_PIECE) {
        write_piece(core, inode, at, piece)?;
        begun.get_or_insert_with(past_no_return);
        at += piece.len() as u64;
    }
    Ok(())
}

fn write_piece(core: &Core, inode: &Arc<Inode>, at: u64, data: &[u8]) -> Result<()> {
    let size = inode.state.lock().size;
    // The write begins behind a gap, or it leaves alone a first sector that is the whole file.
    let again = if at > size || (at >= SECTOR && size <= SECTOR) {
        truncate::before_growing(core, inode, size)?
    } else {
        None
    };
    let mut admitted = admit(core, inode, at, data.len())?;
    let mut h = if at > size && !has_no_holes(core) {
        begin_behind_gap(core, inode, at, &mut admitted)?
    } else {
        begin_taking_in(core, inode, &mut admitted)?
    };
    let now = to_timespec(core.now());
    // The size comes first. Otherwise write-back could believe that the file ends, or lies in its
    // leaf, before the bytes that it takes.
    inode.change(&mut h, |state| {
        state.size = size.max(at + data.len() as u64);
        state.item.mtime = now;
        state.item.ctime = now;
    });
    if let Some(again) = again {
        again.take_in(core, inode, size);
    }
    take_in(core, inode, at, data, size, admitted);
    // Marked once more, because what is delayed by now holds the size on disk back.
    h.mark_dirty(inode);
    Ok(())
}

/// Joins the transaction to take in bytes that begin at `at`, behind the end of a file whose holes
/// have items. The gap gets its item at once, as on Linux: until the bytes are written a commit
/// shows a file that ends where they begin.
fn begin_behind_gap<'a>(
    core: &'a Core,
    inode: &Arc<Inode>,
    at: u64,
    admitted: &mut Admitted,
) -> Result<Handle<'a>> {
    may_wait()?;
    let mut h = begin_with(core, inode, (RESERVE_ITEMS, false), Some(admitted))?;
    let _extents = inode.lock_extents();
    cover(&mut h, inode, at)?;
    Ok(h)
}

/// Writes an inode's data back and waits for it, without a commit.
///
/// # Errors
/// `DataLost` while data of the file could not be written; `WouldBlock`.
pub(crate) fn fsync_data(core: &Core, inode: &Arc<Inode>) -> Result<()> {
    writeback::flush_inode(core, inode)
}

/// Writes all data back that was written before the call.
///
/// # Errors
/// `DataLost` when some of it could not be written; `WouldBlock`.
pub(crate) fn flush_all(core: &Core) -> Result<()> {
    if core.data.delayed_bytes() == 0 {
        return Ok(());
    }
    may_wait()?;
    let before = core.data.failures();
    core.data.flush(core);
    if core.data.failures() == before { Ok(()) } else { Err(Error::DataLost) }
}

/// How much delayed data to write, or how much was written: bytes, and runs of files.
pub(crate) use delalloc::Limits as Delayed;

/// Writes delayed data back, oldest first, until `wanted` bytes or runs are written, or nothing is
/// left to take. It writes at most the rest of one segment more than that. This turns what was
/// reserved for the data into what the data uses. It never waits for space. Returns what was
/// written.
pub(crate) fn reclaim(core: &Core, wanted: Delayed) -> Delayed {
    let mut done = Delayed { bytes: 0, runs: 0 };
    while done.bytes < wanted.bytes && done.runs < wanted.runs {
        let left = Delayed { bytes: wanted.bytes - done.bytes, runs: wanted.runs - done.runs };
        let some = core.options.tuning.reclaim.some(core, left);
        if some.runs == 0 {
            break;
        }
        done.bytes += some.bytes;
        done.runs += some.runs;
    }
    done
}
