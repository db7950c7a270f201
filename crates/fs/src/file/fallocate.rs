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

use super::admission::{Rewrite, begin_with};
use super::dirty::index;
use super::extents::{ExtentCursor, MAX_FILE_SIZE, SECTOR, ceil, floor};
use super::position::Position;
use super::replace::{New, RESERVE_ITEMS, replace};
use super::truncate::{before_growing, grow_with, is_inline};
use crate::api::{Fallocate, may_wait, to_timespec};
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::space::free_index::Lengths;
use crate::space::reserve::Reservation;
use crate::space::{Run, SpaceKind};
use larder_format::MAX_DATA_EXTENT;
use larder_format::items::{Compression, ExtentKind, InodeFlags};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// Changes how `len` bytes from a place on are kept. See the module's text.
///
/// # Errors
/// `Invalid` for an empty range; `FileTooBig`; `IsDirectory`, `Invalid` for other types;
/// `NotPermitted` by flags; `NoSpace`; reading, corruption, `WouldBlock`.
pub(crate) fn fallocate(core: &Core, from: Position<'_>, len: u64, how: Fallocate) -> Result<()> {
    let Position { inode, offset } = from;
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
    let range = offset..end;
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
    let next = ExtentCursor::new(&version, inode.object(), sector)?.next()?;
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

/// The first stretch without an extent of its own in the range.
fn gap(core: &Core, inode: &Inode, range: &Range<u64>) -> Result<Option<Range<u64>>> {
    if range.is_empty() {
        return Ok(None);
    }
    let version = inode.subvol.version(core);
    let mut cursor = ExtentCursor::new(&version, inode.object(), range.start)?;
    let mut start = range.start;
    while let Some(extent) = cursor.next()? {
        if extent.start >= range.end {
            break;
        }
        if extent.stored().is_some_and(larder_format::items::ExtentRecord::is_hole) {
            continue;
        }
        if extent.start > start {
            return Ok(Some(start..extent.start));
        }
        start = extent.end;
    }
    Ok((start < range.end).then_some(start..range.end))
}

/// Bytes without an extent of their own in the range.
fn missing(core: &Core, inode: &Inode, range: &Range<u64>) -> Result<u64> {
    let (mut left, mut sum) = (range.clone(), 0);
    while let Some(gap) = gap(core, inode, &left)? {
        sum += gap.end - gap.start;
        left.start = gap.end;
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

/// Puts preallocated extents into the range, in the place of whatever is there.
fn preallocate(
    core: &Core,
    inode: &Arc<Inode>,
    range: Range<u64>,
    space: &mut Reservation,
) -> Result<()> {
    let mut start = range.start;
    while start < range.end {
        let wanted = Lengths { most: (range.end - start).min(MAX_DATA_EXTENT), least: SECTOR };
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
            let extents = inode.lock_extents();
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
            let reached = replace(&mut h, inode, at..end, new, &mut created);
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

/// Zeros for a range of a file whose other data is in extents.
fn zeros(core: &Core, inode: &Inode, range: Range<u64>) -> Result<Rewrite> {
    Rewrite::new(core, inode, range.start, vec![0; index(range.end - range.start)])
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
        rewrite.take_in(core, inode, size);
    }
    h.mark_dirty(inode);
    Ok(())
}

/// How far a file is to reach.
struct Reach {
    /// The end of its extents.
    extents: u64,
    size: u64,
}

/// What has to be written before the file may reach so far. See [`before_growing`].
fn before_extending(core: &Core, inode: &Inode, to: &Reach) -> Result<Option<Rewrite>> {
    let old = inode.state.lock().size;
    let may_leave_leaf = to.extents > SECTOR && old > 0 && old <= SECTOR;
    if to.size > old || (may_leave_leaf && is_inline(core, inode)?) {
        before_growing(core, inode, old)
    } else {
        Ok(None)
    }
}

/// Sets the size, if it grows, and takes in what has to be written because of that.
fn extend(core: &Core, inode: &Arc<Inode>, size: u64, again: Option<Rewrite>) -> Result<()> {
    let old = inode.state.lock().size;
    if size > old {
        grow_with(core, inode, old..size, again)?;
        touch(core, inode, None)
    } else {
        touch(core, inode, again)
    }
}

/// The size that the file has afterwards.
fn new_size(inode: &Inode, range: &Range<u64>, keep_size: bool) -> u64 {
    let old = inode.state.lock().size;
    if keep_size { old } else { old.max(range.end) }
}

fn allocate(core: &Core, inode: &Arc<Inode>, range: Range<u64>, keep_size: bool) -> Result<()> {
    let mut sectors = floor(range.start)..ceil(range.end);
    let size = new_size(inode, &range, keep_size);
    let mut space = reserve(core, missing(core, inode, &sectors)?)?;
    let again = before_extending(core, inode, &Reach { extents: sectors.end, size })?;
    while let Some(gap) = gap(core, inode, &sectors)? {
        sectors.start = gap.end;
        preallocate(core, inode, gap, &mut space)?;
    }
    extend(core, inode, size, again)
}

/// Parts of sectors at the edges of a range.
type Edges = SmallVec<[Range<u64>; 2]>;

fn punch(core: &Core, inode: &Arc<Inode>, range: Range<u64>) -> Result<()> {
    let whole = ceil(range.start)..floor(range.end);
    let edges = edges_to_punch(core, inode, &range, &whole)?;
    let zeros = edges.into_iter().map(|edge| zeros(core, inode, edge));
    let zeros = zeros.collect::<Result<SmallVec<[Rewrite; 2]>>>()?;
    touch(core, inode, zeros)?;
    let mut at = whole.start;
    while at < whole.end {
        let mut h = core.begin_deleting(RESERVE_ITEMS + 2)?;
        let extents = inode.lock_extents();
        at = replace(&mut h, inode, at..whole.end, New::Hole, &mut false)?;
        drop((extents, h));
        core.step_done()?;
    }
    Ok(())
}

/// The parts of sectors at the edges of a range that are within the file and not in holes. `whole`
/// are the whole sectors between them.
fn edges_to_punch(
    core: &Core,
    inode: &Inode,
    range: &Range<u64>,
    whole: &Range<u64>,
) -> Result<Edges> {
    let size = inode.state.lock().size;
    let candidates = if whole.start > whole.end {
        [range.clone(), range.end..range.end]
    } else {
        [range.start..whole.start, whole.end..range.end]
    };
    let mut edges = Edges::new();
    for edge in candidates {
        let edge = edge.start..edge.end.min(size);
        if !edge.is_empty() && at(core, inode, floor(edge.start))?.0 != Kind::Hole {
            edges.push(edge);
        }
    }
    Ok(edges)
}

fn zero(core: &Core, inode: &Arc<Inode>, range: Range<u64>, keep_size: bool) -> Result<()> {
    let old = inode.state.lock().size;
    let size = new_size(inode, &range, keep_size);
    let (sectors, edges) = parts_to_zero(core, inode, &range)?;
    let mut space = reserve(core, sectors.end.saturating_sub(sectors.start))?;
    // The bytes taken in here must not come back over what is about to be replaced.
    let again = before_extending(core, inode, &Reach { extents: ceil(range.end), size })?;
    let again = again.filter(|r| !sectors.contains(&floor(r.at)));
    let within = edges.into_iter().map(|edge| edge.start..edge.end.min(old));
    let zeros = within
        .filter(|edge| !edge.is_empty())
        .map(|edge| zeros(core, inode, edge))
        .collect::<Result<SmallVec<[Rewrite; 2]>>>()?;
    extend(core, inode, size, again)?;
    touch(core, inode, zeros)?;
    preallocate(core, inode, sectors, &mut space)
}

/// What zeroing does to a range: the sectors that get preallocated extents, and the parts of
/// sectors at the edges that get zeros.
fn parts_to_zero(core: &Core, inode: &Inode, range: &Range<u64>) -> Result<(Range<u64>, Edges)> {
    let Range { mut start, end } = *range;
    let mut sectors = floor(start)..ceil(end);
    if let (Kind::Preallocated, reached) = at(core, inode, sectors.start)? {
        sectors.start = reached.min(sectors.end);
        start = sectors.start;
    }
    let mut edges = Edges::new();
    if sectors.end - sectors.start == SECTOR {
        match at(core, inode, sectors.start)?.0 {
            Kind::Preallocated => sectors.end = sectors.start,
            Kind::Written if end.min(sectors.end) - start < SECTOR => {
                edges.push(start..end);
                sectors.end = sectors.start;
            }
            _ => {}
        }
    } else if !sectors.is_empty() {
        let (head, tail) = (floor(start), floor(end));
        if head < start {
            let kind = at(core, inode, head)?.0;
            if kind == Kind::Written {
                edges.push(start..ceil(start));
            }
            if kind != Kind::Hole {
                sectors.start = ceil(start);
            }
        }
        if tail < end {
            let kind = at(core, inode, tail)?.0;
            if kind == Kind::Written {
                edges.push(tail..end);
            }
            if kind != Kind::Hole {
                sectors.end = tail;
            }
        }
    }
    Ok((sectors, edges))
}
