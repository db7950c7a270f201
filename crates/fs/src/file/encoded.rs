//! Writing data that is compressed already: it becomes an extent as it is.
//!
//! The bytes come from somebody else, so they are unpacked once before anything changes. A file
//! never refers to an extent that cannot be read. What the file does not show of the last sector
//! has to be zero, as it is in every extent that is written here.
//!
//! Not every range can have such an extent: files without checksums are not compressed, extents
//! begin and end at sectors, an extent lies in one piece on the device, and what does not save a
//! sector is stored plainly. Then nothing is done, and the caller writes the unpacked bytes.
//!
//! As in [`super::fallocate`], `op` is held and delayed data is written back first. The data is
//! written before its extent is entered, and the file grows under the same handle, so that a crash
//! shows both or neither.

use super::dirty::index;
use super::extents::{MAX_FILE_SIZE, SECTOR, ceil};
use super::position::Position;
use super::property;
use super::replace::{New, RESERVE_ITEMS, cover, replace};
use super::sums::csums_of;
use super::truncate::{before_growing, grow_with};
use crate::api::{EncodedData, may_wait, to_timespec};
use crate::engine::{Core, Inode, delalloc};
use crate::error::{Error, Result};
use crate::space::free_index::Lengths;
use crate::space::{Run, SpaceKind};
use crate::transaction::Handle;
use larder_format::items::{Compression, ExtentKind, InodeFlags};
use larder_format::{Logical, MAX_COMPRESSED_EXTENT};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

/// Extents are short and lie behind one another, so the device gets so many bytes of them at once.
const TOGETHER: u64 = 1 << 20;

/// Writes the data at a place. `false`: it cannot be stored as it is, and nothing was changed.
///
/// # Errors
/// `Invalid` for data that does not unpack to what it is said to be; `FileTooBig`; `IsDirectory`,
/// `Invalid` for other types; `NotPermitted` by flags; `NoSpace`, reading, corruption, a device's
/// error, `WouldBlock`.
pub(crate) fn write(core: &Core, to: Position<'_>, data: &EncodedData<'_>) -> Result<bool> {
    let Position { inode, offset } = to;
    inode.check_changeable(core)?;
    super::expect_regular(inode)?;
    let end = offset.checked_add(data.len).filter(|end| *end <= MAX_FILE_SIZE);
    let end = end.ok_or(Error::FileTooBig)?;
    check_lengths(data)?;
    may_wait()?;
    let _op = inode.lock_op()?;
    inode.check_alive()?;
    let flags = inode.flags();
    if flags.intersects(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
        return Err(Error::NotPermitted("the file is immutable, or can only be appended to"));
    }
    let old = inode.state.lock().size;
    let plain = flags.intersects(InodeFlags::NODATACOW | InodeFlags::NODATASUM);
    if plain || !fits(data, &(offset..end), old) || !is_sound(data)? {
        return Ok(false);
    }
    settle(core, inode)?;
    if offset > old {
        // What the file has so far has to be in extents, and end with zeros.
        let again = before_growing(core, inode, old)?;
        grow_with(core, inode, old..offset, again)?;
        settle(core, inode)?;
    }
    {
        let _storing = core.storing.read();
        let Some(run) = store(core, data)? else { return Ok(false) };
        Encoded { core, inode, offset, end, run, data }.enter()?;
    }
    core.step_done()?;
    Ok(true)
}

/// Do the lengths fit together?
fn check_lengths(data: &EncodedData<'_>) -> Result<()> {
    let within = data.offset.checked_add(data.len).is_some_and(|end| end <= data.unpacked_len);
    if data.len > 0 && within && data.unpacked_len <= MAX_COMPRESSED_EXTENT {
        return Ok(());
    }
    Err(Error::Invalid("the lengths of the packed data do not fit together"))
}

/// Can there be such an extent in a file of this size?
fn fits(data: &EncodedData<'_>, range: &Range<u64>, size: u64) -> bool {
    let whole = |at: u64| at.is_multiple_of(SECTOR);
    data.compression != Compression::None
        && whole(range.start)
        && whole(data.offset)
        && whole(data.unpacked_len)
        && (whole(range.end) || range.end >= size)
        && ceil(data.data.len() as u64) < data.unpacked_len
        && ceil(data.offset + data.len) <= data.unpacked_len
}

/// Does it unpack, with zeros in the part of the last sector that the file does not show?
fn is_sound(data: &EncodedData<'_>) -> Result<bool> {
    let mut unpacked = vec![0; index(data.unpacked_len)];
    larder_codec::decompress(data.compression, data.data, &mut unpacked)
        .map_err(|_| Error::Invalid("the packed data is damaged"))?;
    let end = data.offset + data.len;
    Ok(unpacked[index(end)..index(ceil(end))].iter().all(|b| *b == 0))
}

/// Writes delayed data back. Lost data is no reason not to put other data there.
fn settle(core: &Core, inode: &Arc<Inode>) -> Result<()> {
    match super::fsync_data(core, inode) {
        Ok(()) | Err(Error::DataLost) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Brings the data to the device. Nothing if there is no piece of space that is long enough.
fn store(core: &Core, data: &EncodedData<'_>) -> Result<Option<Run>> {
    let len = ceil(data.data.len() as u64);
    let mut space = core.space.accounts.reserve(SpaceKind::Data, len)?;
    let wanted = Lengths { most: len, least: len };
    let Ok(run) = core.space.allocate_data(&core.txns, wanted, &mut space) else {
        return Ok(None);
    };
    core.compression.forget(run);
    let padding = vec![0; index(len) - data.data.len()];
    let slices = [IoSlice::new(data.data), IoSlice::new(&padding)];
    for result in core.write_fresh(&[(run.start, &slices[..])]) {
        if let Err(e) = result {
            core.space.give_back(run, None);
            return Err(e.into());
        }
    }
    start_writeback(core, run);
    core.flushes.written();
    Ok(Some(run))
}

/// Lets the device begin with what was written, whenever a further mebibyte is whole. A call for
/// each extent would make a short write of each, and take longer than all the rest.
fn start_writeback(core: &Core, run: Run) {
    let (first, end) = (run.start.0 / TOGETHER, run.end().0 / TOGETHER);
    if first < end {
        core.volume.start_writeback(Logical(first * TOGETHER), (end - first) * TOGETHER);
    }
}

/// Data that lies on the device and is to become an extent of a file.
struct Encoded<'a> {
    core: &'a Core,
    inode: &'a Arc<Inode>,
    offset: u64,
    end: u64,
    run: Run,
    data: &'a EncodedData<'a>,
}

impl Encoded<'_> {
    /// Enters the extent. If this fails before the extent belongs to the file, its space becomes
    /// free again.
    fn enter(&self) -> Result<()> {
        let (mut at, mut owned) = (self.offset, false);
        while at < ceil(self.end) {
            let mut created = false;
            let outcome = self.step(at..ceil(self.end), !owned, &mut created);
            owned |= created;
            match outcome {
                Ok(reached) => at = reached,
                Err(e) => {
                    if !owned {
                        self.core.space.give_back(self.run, None);
                    }
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Replaces a first part of the range, and lets the file grow as far as that goes.
    fn step(&self, range: Range<u64>, create: bool, created: &mut bool) -> Result<u64> {
        let (core, inode) = (self.core, self.inode);
        let mut h = core.begin(RESERVE_ITEMS + 2)?;
        h.need_incompat(property::incompat(self.data.compression).bits());
        let start = range.start;
        let extents = inode.lock_extents();
        if create {
            // Readers that find the extent look for its checksums.
            h.add_csums(self.run.start, self.csums());
        }
        let new = New::Extent {
            kind: ExtentKind::Regular,
            at: self.run.start,
            len: self.run.len,
            ram_bytes: self.data.unpacked_len,
            compression: self.data.compression,
            offset: self.data.offset + (start - self.offset),
            create,
            born: None,
        };
        let outcome = replace(&mut h, inode, range, new, created);
        if create && !*created {
            // The space is given back, and must not have checksums.
            h.forget_csums(self.run);
        }
        let reached = outcome?;
        self.grow(&mut h, reached)?;
        drop(extents);
        delalloc::rewritten(inode, &(start..reached));
        let now = to_timespec(core.now());
        inode.change(&mut h, |state| {
            state.item.mtime = now;
            state.item.ctime = now;
        });
        h.mark_dirty(inode);
        Ok(reached)
    }

    /// Lets the file reach as far as the work is done. The caller holds the extent lock.
    fn grow(&self, h: &mut Handle<'_>, reached: u64) -> Result<()> {
        let old = self.inode.state.lock().size;
        let size = reached.min(self.end);
        if size > old {
            cover(h, self.inode, size)?;
            delalloc::grow(self.inode, &(old..size), false);
        }
        Ok(())
    }

    fn csums(&self) -> Vec<u8> {
        let mut stored = self.data.data.to_vec();
        stored.resize(index(self.run.len), 0);
        csums_of(self.core.csum, &[&stored], stored.len())
    }
}
