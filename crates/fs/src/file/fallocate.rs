//! Reserving, zeroing and punching ranges of a file.
//!
//! Reserved space is a *preallocated* extent: it is allocated on the device, the file refers to it,
//! and it reads as zeros until data is written into it ([`super::nocow`]). Each call does to the
//! sectors what Linux was seen to do:
//!
//! - **Allocating** fills holes. What has an extent already, data or not, stays.
//! - **Punching** drops the sectors that lie wholly in the range. The parts of sectors at its edges
//!   get zeros, unless they are holes.
//! - **Zeroing** puts new preallocated extents in the place of whatever the range has. Only what is
//!   preallocated at its beginning stays. A sector at an edge that holds data gets zeros in the
//!   part that belongs to the range; any other is taken in whole.
//!
//! All three hold `op` and begin by writing delayed data back. With `op` held nothing new is
//! delayed, so the items say everything, but for zeros at the edges. Data space is reserved in full
//! before anything changes. Long ranges take a transaction for every extent: after a crash they may
//! be half done, as on Linux. The size grows in one step.

use super::admission::{Admitted, admit, begin_with};
use super::delalloc;
use super::dirty::index;
use super::extents::{ExtentCursor, MAX_FILE_SIZE, SECTOR, ceil, floor};
use super::replace::{New, RESERVE_ITEMS, replace};
use super::truncate::{before_growing, grow_with, is_inline};
use crate::api::{Fallocate, may_wait, to_timespec};
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::space::free_index::Lengths;
use crate::space::reserve::Reservation;
use crate::space::{Run, SpaceKind};
use larder_format::items::{Compression, ExtentKind, InodeFlags};
use larder_format::{MAX_DATA_EXTENT, ObjectId};
use smallvec::SmallVec;
use std::sync::Arc;

/// Changes how `len` bytes from `offset` on are kept. See the module's text.
///
/// # Errors
/// `Invalid` for an empty range; `FileTooBig`; `IsDirectory`, `Invalid` for other types;
/// `NotPermitted` by flags; `NoSpace`; reading, corruption, `WouldBlock`.
pub(crate) fn fallocate(
    core: &Core,
    inode: &Arc<Inode>,
    how: Fallocate,
    offset: u64,
    len: u64,
) -> Result<()> {
    inode.check_changeable(core)?;
    super::expect_regular(inode)?;
    if len == 0 {
        return Err(Error::Invalid("the range is empty"));
    }
    let end =
        offset.checked_add(len).filter(|end| *end <= MAX_FILE_SIZE).ok_or(Error::FileTooBig)?;
    may_wait()?;
    let _op = inode.lock_op()?;
    inode.check_alive()?;
    let flags = inode.flags();
    if flags.contains(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("the file is immutable"));
    }
    if flags.contains(InodeFlags::APPEND) && !matches!(how, Fallocate::Allocate { keep_size: true })
    {
        return Err(Error::NotPermitted("the file can only be appended to"));
    }
    match super::fsync_data(core, inode) {
        // Lost data stays lost, and the next sync reports it. That is no reason not to allocate.
        Ok(()) | Err(Error::DataLost) => {}
        Err(e) => return Err(e),
    }
    let range = (offset, end);
    match how {
        Fallocate::Allocate { keep_size } => allocate(core, inode, range, keep_size),
        Fallocate::Zero { keep_size } => zero(core, inode, range, keep_size),
        Fallocate::Punch => punch(core, inode, range),
    }
}

/// What a sector of the file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hole,
    Preallocated,
    Written,
}

/// What lies at a sector, and where that ends.
fn at(core: &Core, inode: &Inode, sector: u64) -> Result<(Kind, u64)> {
    let version = inode.subvol.version(core);
    let next = ExtentCursor::new(&version, ObjectId(inode.id.ino), sector)?.next()?;
    Ok(match next {
        None => (Kind::Hole, MAX_FILE_SIZE + 1),
        Some(extent) if extent.start > sector => (Kind::Hole, extent.start),
        Some(extent) => {
            let kind = match extent.stored() {
                Some(r) if r.is_hole() => Kind::Hole,
                Some(r) if r.kind == ExtentKind::Prealloc => Kind::Preallocated,
                _ => Kind::Written,
            };
            (kind, extent.end)
        }
    })
}

/// The first stretch without an extent of its own in `from..to`.
fn gap(core: &Core, inode: &Inode, from: u64, to: u64) -> Result<Option<(u64, u64)>> {
    let version = inode.subvol.version(core);
    let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), from)?;
    let mut start = from;
    while let Some(extent) = cursor.next()? {
        if extent.start >= to {
            break;
        }
        if extent.stored().is_some_and(larder_format::items::ExtentRecord::is_hole) {
            continue;
        }
        if extent.start > start {
            return Ok(Some((start, extent.start)));
        }
        start = extent.end;
    }
    Ok((start < to).then_some((start, to)))
}

/// Bytes without an extent of their own in `from..to`.
fn missing(core: &Core, inode: &Inode, from: u64, to: u64) -> Result<u64> {
    let (mut at, mut sum) = (from, 0);
    while at < to {
        let Some((start, end)) = gap(core, inode, at, to)? else { break };
        sum += end - start;
        at = end;
    }
    Ok(sum)
}

/// Data space for `bytes`, all of it.
fn reserve(core: &Core, bytes: u64) -> Result<Reservation> {
    // There is no need to search for more space than all devices have.
    if bytes > core.space.statfs().0 {
        return Err(Error::NoSpace);
    }
    core.space.accounts.reserve(SpaceKind::Data, bytes)
}

/// Puts preallocated extents into `from..to`, in the place of whatever is there.
fn preallocate(
    core: &Core,
    inode: &Arc<Inode>,
    (from, to): (u64, u64),
    space: &mut Reservation,
) -> Result<()> {
    let mut start = from;
    while start < to {
        let wanted = Lengths { most: (to - start).min(MAX_DATA_EXTENT), least: SECTOR };
        let run = core.space.allocate_data(&core.txns, wanted, space)?;
        insert(core, inode, start, run)?;
        start += run.len;
    }
    Ok(())
}

/// Puts an extent that was allocated into the file. If this fails before the extent belongs to the
/// file, its space becomes free again.
fn insert(core: &Core, inode: &Arc<Inode>, start: u64, run: Run) -> Result<()> {
    let end = start + run.len;
    let (mut at, mut owned) = (start, false);
    while at < end {
        let mut created = false;
        let outcome = core.begin(RESERVE_ITEMS).and_then(|mut h| {
            let extents = inode.data.lock_extents();
            let new = New::Extent {
                kind: ExtentKind::Prealloc,
                at: run.start,
                len: run.len,
                ram_bytes: run.len,
                compression: Compression::None,
                offset: at - start,
                create: !owned,
                born: None,
            };
            let reached = replace(&mut h, inode, (at, end), new, &mut created);
            drop(extents);
            if created {
                inode.change(&mut h, |state| {
                    let flags = state.item.inode_flags() | InodeFlags::PREALLOC;
                    state.item.set_inode_flags(flags);
                });
            }
            reached
        });
        owned |= created;
        match outcome {
            Ok(reached) => at = reached,
            Err(e) => {
                if !owned {
                    core.space.give_back(run, None);
                }
                return Err(e);
            }
        }
    }
    Ok(())
}

/// Bytes that are going to be written to a file whose other data is in extents.
struct Rewrite {
    at: u64,
    data: Vec<u8>,
    admitted: Admitted,
}

impl Rewrite {
    fn new(core: &Core, inode: &Inode, at: u64, data: Vec<u8>) -> Result<Self> {
        let admitted = admit(core, inode, at, data.len())?;
        Ok(Self { at, data, admitted })
    }
    fn zeros(core: &Core, inode: &Inode, (start, end): (u64, u64)) -> Result<Self> {
        Self::new(core, inode, start, vec![0; index(end - start)])
    }
}

/// Takes bytes in, and notes that the file was changed.
fn touch(
    core: &Core,
    inode: &Arc<Inode>,
    rewrites: impl IntoIterator<Item = Rewrite>,
) -> Result<()> {
    let mut rewrites: Vec<_> = rewrites.into_iter().collect();
    let mut h = begin_with(core, inode, (1, false), rewrites.first_mut().map(|r| &mut r.admitted))?;
    let now = to_timespec(core.now());
    let size = inode.change(&mut h, |state| {
        state.item.mtime = now;
        state.item.ctime = now;
        state.size
    });
    for rewrite in rewrites {
        delalloc::take_in(core, inode, rewrite.at, &rewrite.data, size, rewrite.admitted);
    }
    h.mark_dirty(inode);
    Ok(())
}

/// What has to be written before the file may have extents up to `to` and the size `size`. See
/// [`before_growing`].
fn before_extending(core: &Core, inode: &Inode, to: u64, size: u64) -> Result<Option<Rewrite>> {
    let old = inode.state.lock().size;
    let again =
        if size > old || (to > SECTOR && old > 0 && old <= SECTOR && is_inline(core, inode)?) {
            before_growing(core, inode, old)?
        } else {
            None
        };
    again.map(|(at, data)| Rewrite::new(core, inode, at, data)).transpose()
}

/// Sets the size, if it grows, and takes in what has to be written because of that.
fn extend(core: &Core, inode: &Arc<Inode>, size: u64, again: Option<Rewrite>) -> Result<()> {
    let old = inode.state.lock().size;
    if size > old {
        let again = again.map(|r| (r.at, r.data, r.admitted));
        grow_with(core, inode, (old, size), again)?;
        touch(core, inode, None)
    } else {
        touch(core, inode, again)
    }
}

fn allocate(
    core: &Core,
    inode: &Arc<Inode>,
    (offset, end): (u64, u64),
    keep_size: bool,
) -> Result<()> {
    let (from, to) = (floor(offset), ceil(end));
    let old = inode.state.lock().size;
    let size = if keep_size { old } else { old.max(end) };
    let mut space = reserve(core, missing(core, inode, from, to)?)?;
    let again = before_extending(core, inode, to, size)?;
    let mut at = from;
    while at < to {
        let Some(gap) = gap(core, inode, at, to)? else { break };
        preallocate(core, inode, gap, &mut space)?;
        at = gap.1;
    }
    extend(core, inode, size, again)
}

/// The parts of sectors at the edges of a range that are within the file and not in holes; and the
/// whole sectors between them.
type Parts = (SmallVec<[(u64, u64); 2]>, (u64, u64));

fn punch(core: &Core, inode: &Arc<Inode>, (offset, end): (u64, u64)) -> Result<()> {
    let (edges, whole) = parts(core, inode, (offset, end))?;
    let zeros = edges.into_iter().map(|edge| Rewrite::zeros(core, inode, edge));
    let zeros = zeros.collect::<Result<SmallVec<[Rewrite; 2]>>>()?;
    touch(core, inode, zeros)?;
    let mut at = whole.0;
    while at < whole.1 {
        let mut h = core.begin_deleting(RESERVE_ITEMS + 2)?;
        let extents = inode.data.lock_extents();
        at = replace(&mut h, inode, (at, whole.1), New::Hole, &mut false)?;
        drop((extents, h));
        core.step_done()?;
    }
    Ok(())
}

fn parts(core: &Core, inode: &Inode, (offset, end): (u64, u64)) -> Result<Parts> {
    let size = inode.state.lock().size;
    let whole = (ceil(offset), floor(end));
    let mut edges = SmallVec::new();
    let candidates = if whole.0 > whole.1 {
        [(offset, end), (end, end)]
    } else {
        [(offset, whole.0), (whole.1, end)]
    };
    for (start, end) in candidates {
        let end = end.min(size);
        if start < end && at(core, inode, floor(start))?.0 != Kind::Hole {
            edges.push((start, end));
        }
    }
    Ok((edges, whole))
}

fn zero(core: &Core, inode: &Arc<Inode>, (offset, end): (u64, u64), keep_size: bool) -> Result<()> {
    let old = inode.state.lock().size;
    let size = if keep_size { old } else { old.max(end) };
    let mut offset = offset;
    let (mut from, mut to) = (floor(offset), ceil(end));
    if let (Kind::Preallocated, reached) = at(core, inode, from)? {
        from = reached.min(to);
        offset = from;
    }
    let mut edges: SmallVec<[(u64, u64); 2]> = SmallVec::new();
    if to - from == SECTOR {
        match at(core, inode, from)?.0 {
            Kind::Preallocated => to = from,
            Kind::Written if end.min(to) - offset < SECTOR => {
                edges.push((offset, end));
                to = from;
            }
            _ => {}
        }
    } else if from < to {
        let (head, tail) = (floor(offset), floor(end));
        if head < offset {
            let kind = at(core, inode, head)?.0;
            if kind == Kind::Written {
                edges.push((offset, ceil(offset)));
            }
            if kind != Kind::Hole {
                from = ceil(offset);
            }
        }
        if tail < end {
            let kind = at(core, inode, tail)?.0;
            if kind == Kind::Written {
                edges.push((tail, end));
            }
            if kind != Kind::Hole {
                to = tail;
            }
        }
    }
    let mut space = reserve(core, to.saturating_sub(from))?;
    // The bytes taken in here must not come back over what is about to be replaced.
    let again = before_extending(core, inode, ceil(end), size)?;
    let again = again.filter(|r| !(from..to).contains(&floor(r.at)));
    let mut zeros: SmallVec<[Rewrite; 2]> = SmallVec::new();
    for (start, end) in edges {
        let end = end.min(old);
        if start < end {
            zeros.push(Rewrite::zeros(core, inode, (start, end))?);
        }
    }
    extend(core, inode, size, again)?;
    touch(core, inode, zeros)?;
    preallocate(core, inode, (from, to), &mut space)
}
