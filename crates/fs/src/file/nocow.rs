//! Writing in place: when that is allowed, and how.
//!
//! Two kinds of files are written in place: files with preallocated extents, and files that are not
//! copied on write (NODATACOW). Write-back asks here first. What cannot be written in place is
//! copied like everything else.
//!
//! An extent may be written in place when nothing else can see it: no other reference, no snapshot
//! that is younger than it, and nothing else that had it in the last commit or since. There must be
//! no checksums for its place, and its block group must not be read-only or have parity: a row is
//! never written while anything lies in it. The check and the write
//! happen under one transaction handle and the file's extent lock. A snapshot waits for handles,
//! and a clone takes the extent lock of its source. So each of them comes before the check, or
//! after the write.
//!
//! Overwritten data of a NODATACOW file is old, new or torn after a crash. This is the one
//! exception to the rule that nothing is overwritten which a durable superblock reaches. A write
//! that will go in place needs no space ([`in_place`]). `docs/FILE-DATA.md` has the reasons.

use super::batch::{Handles, Item};
use super::delalloc::complete;
use super::extents::{Extent, ExtentCursor, ceil, floor};
use super::replace::{New, replace};
use super::sums::{View, csums_of};
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::space::groups::BlockGroup;
use crate::space::{Run, extent_tree};
use crate::transaction::Handle;
use crate::tree::Version;
use larder_format::items::{
    BlockGroupFlags, Compression, ExtentKind, ExtentRecord, ExtentRef, InodeFlags,
};
use larder_format::{FileOffset, Generation, ObjectId};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

/// Bytes written under one handle at most: a seal waits for them.
const PER_HANDLE: u64 = 4 << 20;

/// Does the file have extents that may be written in place?
pub(super) fn is_candidate(inode: &Inode) -> bool {
    inode.flags().intersects(InodeFlags::PREALLOC | InodeFlags::NODATACOW)
}

/// The window into a plain extent, if the extent may be written in place as far as its item tells.
fn window(extent: &Extent, flags: InodeFlags) -> Option<ExtentRecord> {
    let record = extent.stored()?;
    let allowed = record.kind == ExtentKind::Prealloc || flags.contains(InodeFlags::NODATACOW);
    let plain = !record.is_hole() && record.compression == Compression::None;
    (allowed && plain).then_some(*record)
}

/// Is the extent visible to nothing but this file? See the module's text. The answer stays true
/// while the caller holds a transaction handle and the file's extent lock.
fn is_ours(
    core: &Core,
    inode: &Inode,
    (start, r): (u64, &ExtentRecord),
    may_write: impl Fn(&BlockGroup) -> bool,
) -> Result<bool> {
    let whole = Run::new(r.disk_bytenr, r.disk_num_bytes);
    // In a damaged image the extent may lie in a block group of another kind.
    let holds =
        |g: &BlockGroup| g.run().contains(whole) && g.flags().contains(BlockGroupFlags::DATA);
    let refuses = |g: &BlockGroup| !holds(g) || g.stripes().is_some() || !may_write(g);
    if core.space.groups.find(r.disk_bytenr).is_none_or(|g| refuses(&g)) {
        return Ok(false);
    }
    if fault!(core.options.tuning, InPlaceShared) {
        return Ok(true);
    }
    let refs = known(core, inode, start, r)?;
    let shared_before = refs.shared_before && !fault!(core.options.tuning, InPlaceSharedBefore);
    Ok(refs.is_alone() && !shared_before && refs.born > inode.subvol.tree.last_snapshot())
}

/// What is known of an extent's references.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// How many there are.
    total: i128,
    /// This file's references among them that have the same origin, as far as they are easy to
    /// find.
    ours: i128,
    /// The transaction that made the extent.
    born: Generation,
    /// Something else refers to it in the last commit or the sealed transaction, or has got a
    /// reference in a transaction since that commit, even if that reference is gone by now.
    shared_before: bool,
}

impl Known {
    fn is_alone(&self) -> bool {
        self.ours > 0 && self.total == self.ours
    }
}

/// Does every reference to the extent belong to this file and have the same origin? And which
/// transaction made the extent? Snapshots do not count, because they share leaves.
pub(super) fn has_no_others(
    core: &Core,
    inode: &Inode,
    start: u64,
    r: &ExtentRecord,
) -> Result<(bool, Generation)> {
    let known = known(core, inode, start, r)?;
    Ok((known.is_alone(), known.born))
}

/// Does the extent tree, or a note, say that the extent is allocated? Only a damaged image has
/// files with extents that are recorded nowhere.
pub(super) fn is_recorded(
    core: &Core,
    inode: &Inode,
    start: u64,
    r: &ExtentRecord,
) -> Result<bool> {
    Ok(known(core, inode, start, r)?.total > 0)
}

/// Counts references: those of the published extent tree, and the notes since.
fn known(core: &Core, inode: &Inode, start: u64, r: &ExtentRecord) -> Result<Known> {
    let mine = ExtentRef::data(inode.id.subvol, inode.object(), FileOffset(start), r.offset);
    loop {
        let epoch = core.epochs.enter();
        let (base, extent_root) = core.txns.with_view(|v| (v.base, v.extent_root.clone()));
        let store = core.store.clone();
        let mut extents = Version { tree: ObjectId::EXTENT_TREE, root: extent_root, store, epoch };
        let found = extent_tree::inline_refs(&mut extents, r.disk_bytenr, r.disk_num_bytes, mine)?;
        let answer = core.txns.with_view(|v| {
            if v.base != base {
                return None;
            }
            let (mut total, mut ours, mut born, mut shared_before) = (0, 0, Generation(0), false);
            if let Some((info, count)) = found {
                (total, ours, born) = (i128::from(info.refs), i128::from(count), info.generation);
                shared_before = total != ours;
            }
            // In the order in which they become durable.
            let notes = [v.sealed.as_ref(), Some(&v.running)];
            for txn in notes.into_iter().flatten() {
                let refs = txn.refs.lock();
                let Some(head) = refs.get(r.disk_bytenr) else { continue };
                total += i128::from(head.total());
                ours += head.refs().filter(|n| n.0 == mine).map(|n| i128::from(n.1)).sum::<i128>();
                shared_before |= total != ours || head.was_given_to_others(mine);
                if head.created {
                    born = head.generation;
                }
            }
            Some(Known { total, ours, born, shared_before })
        });
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
}

/// The place of these sectors of an extent, if they may be written in place. `may_write` tells in
/// which block groups.
fn place(
    core: &Core,
    inode: &Inode,
    extent: &Extent,
    sectors: &Range<u64>,
    may_write: impl Fn(&BlockGroup) -> bool,
) -> Result<Option<Run>> {
    let Some(r) = window(extent, inode.flags()) else { return Ok(None) };
    if !is_ours(core, inode, (extent.start, &r), may_write)? {
        return Ok(None);
    }
    let skip = r.offset + (sectors.start - extent.start);
    let run = Run::new(r.disk_bytenr.plus(skip), sectors.end - sectors.start);
    Ok((!View::new(core).any(core, run)?).then_some(run))
}

/// Would all of `len` bytes at `start` be written in place if they were written back now? The
/// caller holds `op`.
///
/// # Errors
/// Reading or corruption.
pub(super) fn in_place(core: &Core, inode: &Inode, start: u64, len: usize) -> Result<bool> {
    if !is_candidate(inode) {
        return Ok(false);
    }
    let (mut at, end) = (floor(start), ceil(start + len as u64));
    let version = inode.subvol.version(core);
    let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), at)?;
    while at < end {
        let Some(extent) = cursor.next()?.filter(|e| e.start <= at) else { return Ok(false) };
        let stop = extent.end.min(end);
        // A group that is closed is going to be frozen. What was admitted before can still be
        // written in place, what comes now reserves space.
        if place(core, inode, &extent, &(at..stop), |g| !g.is_read_only())?.is_none() {
            return Ok(false);
        }
        at = stop;
    }
    Ok(true)
}

/// Writes those parts of a run in place that may be written so. Returns the ranges that are left,
/// as offsets into the run's sectors. If nothing is left the run is complete.
///
/// # Errors
/// `DataLost` when the device failed; reading, corruption.
pub(super) fn write_in_place(handles: &mut Handles<'_>, item: &Item) -> Result<Vec<Range<u64>>> {
    let inode = &item.submission.inode;
    let in_flight = &item.submission.in_flight;
    let (start, end) = (in_flight.taken.start, in_flight.taken.end);
    let mut left: Vec<Range<u64>> = Vec::new();
    let (mut at, mut written) = (start, 0);
    while at < end {
        if written >= PER_HANDLE {
            handles.leave();
            written = 0;
        }
        let core = handles.core;
        handles.get()?;
        let extents = inode.lock_extents();
        let (found, stop) = stretch(core, inode, at..end)?;
        let range = at - start..stop - start;
        match found {
            Some((extent, run)) => {
                write_run(handles, item, &extent, at..stop, run)?;
                // No item shows the change, but an `fsync` has to flush it.
                inode.state.lock().changed_in(handles.get_same().generation());
                written += run.len;
            }
            None => match left.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => left.push(range),
            },
        }
        at = stop;
        if at == end && left.is_empty() {
            let h = handles.get_same();
            // Under the handle: the seal that has the extent must see the size that the extent
            // allows.
            complete(core, inode, [in_flight], true);
            h.mark_dirty(inode);
        }
        drop(extents);
    }
    Ok(left)
}

/// What lies at the beginning of a range: an extent and the place in it, if that may be written in
/// place. Also where that ends.
fn stretch(core: &Core, inode: &Inode, range: Range<u64>) -> Result<(Option<(Extent, Run)>, u64)> {
    let Range { start: at, end } = range;
    let version = inode.subvol.version(core);
    let Some(extent) = ExtentCursor::new(&version, inode.object(), at)?.next()? else {
        return Ok((None, end));
    };
    drop(version);
    if extent.start > at {
        return Ok((None, extent.start.min(end)));
    }
    let stop = extent.end.min(end);
    let bounded = stop.min(at + PER_HANDLE);
    Ok(match place(core, inode, &extent, &(at..bounded), |g| !g.is_frozen())? {
        Some(run) => (Some((extent, run)), bounded),
        None => (None, stop),
    })
}

/// Writes these sectors of a run in flight to where they belong, and turns preallocated space into
/// data.
fn write_run(
    handles: &mut Handles<'_>,
    item: &Item,
    extent: &Extent,
    sectors: Range<u64>,
    run: Run,
) -> Result<()> {
    let core = handles.core;
    let begin = item.taken().start;
    let slices = item.slices(sectors.start - begin..sectors.end - begin);
    let io: Vec<IoSlice<'_>> = slices.iter().map(|s| IoSlice::new(s)).collect();
    let write = || {
        let _in_place = core.in_place.read();
        core.volume.write_vectored(run.start, &io).map_err(|e| {
            tracing::warn!("data could not be written: {e}");
            Error::DataLost
        })
    };
    let early = fault!(core.options.tuning, ExtentBeforeData);
    if !early {
        write()?;
        core.volume.start_writeback(run.start, run.len);
    }
    let record = extent.stored().expect("`window` has found a stored extent");
    if record.kind == ExtentKind::Prealloc {
        let h = handles.get_same();
        if item.is_verified() {
            h.txn.filled.lock().insert(record.disk_bytenr, item.submission.inode.id);
            h.add_csums(run.start, csums_of(core.csum, &slices, super::dirty::index(run.len)));
        }
        let filled = fill(h, &item.submission.inode, extent, record, sectors);
        if filled.is_err() {
            // The space stays preallocated, and must not have checksums.
            h.forget_csums(run);
        }
        filled?;
    }
    if early {
        write()?;
    }
    Ok(())
}

/// Turns these sectors of a preallocated extent into data.
fn fill(
    h: &mut Handle<'_>,
    inode: &Arc<Inode>,
    extent: &Extent,
    record: &ExtentRecord,
    sectors: Range<u64>,
) -> Result<()> {
    let mut from = sectors.start;
    while from < sectors.end {
        let new = New::Extent {
            kind: ExtentKind::Regular,
            at: record.disk_bytenr,
            len: record.disk_num_bytes,
            ram_bytes: record.ram_bytes,
            compression: Compression::None,
            offset: record.offset + (from - extent.start),
            create: false,
            born: None,
        };
        from = replace(h, inode, from..sectors.end, new, &mut false)?;
    }
    Ok(())
}
