//! Write-back: from dirty bytes to extents.
//!
//! A batch is one large run of one file, or the runs of many small files. It goes through five
//! steps:
//!
//! 1. The sectors are made whole: edges are read where the file has other bytes there, and are zero
//!    behind its end.
//! 2. They are compressed if that is wanted and helps ([`super::compress`]).
//! 3. Space for all of them is allocated together, so that they lie behind each other.
//! 4. They are written, and their checksums are computed.
//! 5. Only then does each file's tree get its extent. Until it has it, readers are served from the
//!    run in flight.
//!
//! Nothing here takes `Inode.op`, because a writer that waits for space or budget may hold it.
//! Nothing waits for a reservation either: the write has reserved what is needed.

use super::batch::{Handles, Item, Piece};
use super::compress::{self, Part};
use super::delalloc::{self, Job, Limits, Submission, complete, memory_needed, submit};
use super::dirty::{Tick, index};
use super::extents::{ExtentCursor, SECTOR};
use super::join::join;
use super::nocow;
use super::property;
use super::replace::{
    Fresh, MAX_FRESH, MAX_ITEMS, New, RESERVE_ITEMS, cover, fill_holes, has_no_holes, replace,
};
use super::sums::csums_of;
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::space::free_index::Lengths;
use crate::space::reserve::Reservation;
use crate::space::{Run, SpaceKind};
use crate::transaction::Handle;
use crate::tree::doing;
use larder_format::items::{Compression, ExtentKind};
use larder_format::{CsumType, Logical, MAX_DATA_EXTENT, ObjectId};
use smallvec::SmallVec;
use std::io::IoSlice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Bytes that one batch takes of one file at most.
const BATCH: u64 = 32 << 20;
/// A batch that is smaller than this takes in more files.
const SMALL_BATCH: u64 = 1 << 20;
/// Runs in a batch at most.
const MAX_RUNS: usize = 512;

/// Writes the oldest dirty data back, if any is older than tick `before`. False when nothing could
/// be taken.
pub(crate) fn one_batch(core: &Core, before: Tick) -> bool {
    batch(core, before, Limits { bytes: BATCH, runs: MAX_RUNS }).runs > 0
}

/// As [`one_batch`], but no more than `most` and the rest of the last segment. Returns what was
/// written.
pub(super) fn batch(core: &Core, before: Tick, most: Limits) -> Limits {
    let mut job: Option<Job<'_>> = None;
    let mut submissions = Vec::new();
    let (mut bytes, mut from) = (0, Tick(0));
    let runs = most.runs.min(MAX_RUNS);
    while bytes < SMALL_BATCH.min(most.bytes) && submissions.len() < runs {
        let Some((age, inode)) = core.data.pop(core, from..before, &mut job) else { break };
        from = age.next();
        let most_of_it = compress::batch(core, &inode, BATCH).min(most.bytes - bytes);
        let limits = Limits { bytes: most_of_it, runs: runs - submissions.len() };
        bytes += submit(core, &inode, limits, true, &mut submissions);
    }
    let runs = submissions.len();
    if let Some(mut job) = job {
        job.wrote = runs > 0;
        if job.wrote {
            write(core, submissions);
        }
    }
    Limits { bytes, runs }
}

/// Writes back everything that the file with the oldest dirty data has. For
/// [`crate::older::Reclaim::WholeInodes`].
pub(super) fn whole_file(core: &Core) -> Limits {
    let mut job: Option<Job<'_>> = None;
    let mut done = Limits { bytes: 0, runs: 0 };
    let Some((_, inode)) = core.data.pop(core, Tick(0)..Tick::NEVER, &mut job) else { return done };
    let mut requeue = true;
    loop {
        let mut submissions = Vec::new();
        let limits = Limits { bytes: compress::batch(core, &inode, BATCH), runs: MAX_RUNS };
        let bytes = submit(core, &inode, limits, std::mem::take(&mut requeue), &mut submissions);
        if submissions.is_empty() {
            break;
        }
        done = Limits { bytes: done.bytes + bytes, runs: done.runs + submissions.len() };
        write(core, submissions);
    }
    if let Some(job) = &mut job {
        job.wrote = done.runs > 0;
    }
    done
}

/// Writes one file's data back that is older than the call, and waits for it.
///
/// # Errors
/// `DataLost` when data of the file could not be written, now or earlier, and was not rewritten
/// since; `WouldBlock`.
pub(super) fn flush_inode(core: &Core, inode: &Arc<Inode>) -> Result<()> {
    if !inode.data.is_clean() {
        crate::api::may_wait()?;
        let before = core.data.tick();
        loop {
            let mut submissions = Vec::new();
            let mut job = core.data.start_job(core, Tick(0));
            let limits = Limits { bytes: compress::batch(core, inode, BATCH), runs: MAX_RUNS };
            submit(core, inode, limits, false, &mut submissions);
            job.wrote = !submissions.is_empty();
            if job.wrote {
                write(core, submissions);
            }
            drop(job);
            // Data that could not be taken waits until its older version is complete.
            inode.data.wait_completed_before(before)?;
            if inode.data.oldest().is_none_or(|age| age >= before) {
                break;
            }
        }
        inode.data.wait_completed_before(before)?;
    }
    if inode.data.has_lost() { Err(Error::DataLost) } else { Ok(()) }
}

/// Prepares a run that was submitted for the steps.
fn begin(core: &Core, submission: Submission) -> Item {
    let mut item = Item::new(core, submission);
    // Such files never go back into the leaf, as on Linux.
    let stays = nocow::is_candidate(&item.submission.inode);
    if item.submission.in_flight.inline && item.failed.is_none() && !stays {
        // Preallocated extents may lie behind the end of even the smallest file.
        match only_first_sector(core, &item.submission.inode) {
            Ok(inline) => item.inline = inline,
            Err(e) => item.fail(e),
        }
    }
    item
}

/// Brings submitted runs to the device and into their trees. Failures are noted with the inode.
///
/// Every run is completed in any case, because others wait for that. A panic means a broken
/// invariant, so nothing is written any more after one.
fn write(core: &Core, submissions: Vec<Submission>) {
    // Weak, because the holder of the last reference uses the buffers again.
    let runs: Vec<_> =
        submissions.iter().map(|d| (d.inode.clone(), Arc::downgrade(&d.in_flight))).collect();
    let done = catch_unwind(AssertUnwindSafe(|| write_all(core, submissions)));
    if done.is_err() {
        core.txns.fail("writing data back hit a broken invariant; see the log");
        for (inode, in_flight) in runs {
            if let Some(in_flight) =
                in_flight.upgrade().filter(|in_flight| delalloc::is_in_flight(&inode, in_flight))
            {
                complete(core, &inode, [&in_flight], false);
            }
        }
    }
}

fn write_all(core: &Core, submissions: Vec<Submission>) {
    let _doing = doing("write-back");
    let _memory = core.data.scratch.take(memory_needed(core, &submissions));
    let mut items: Vec<Item> = submissions.into_iter().map(|d| begin(core, d)).collect();
    let mut reserved: Option<Reservation> = None;
    for item in &mut items {
        if let Some(more) = item.submission.items.take() {
            match &mut reserved {
                Some(r) => r.merge(more),
                none => *none = Some(more),
            }
        }
    }
    write_in_place(core, &mut items, &mut reserved);
    pack(core, &mut items);
    let runs = allocate(core, &mut items);
    if fault!(core.options.tuning, ExtentBeforeData) {
        compute_csums(core.csum, &mut items);
        insert_all(core, &mut items, reserved.take());
        write_runs(core, &mut items, &runs);
        return;
    }
    write_runs(core, &mut items, &runs);
    compute_csums(core.csum, &mut items);
    insert_all(core, &mut items, reserved);
    delalloc::reuse(core, items.into_iter().map(|item| item.submission.in_flight));
}

/// Writes in place what may be written so, before space is sought for the rest. The rest is not
/// compressed, as on Linux.
fn write_in_place(core: &Core, items: &mut [Item], reserved: &mut Option<Reservation>) {
    let mut handles: Option<Handles<'_>> = None;
    for item in items {
        if item.failed.is_some() || item.inline || !nocow::is_candidate(&item.submission.inode) {
            continue;
        }
        let handles = handles.get_or_insert_with(|| Handles::new(core, reserved.take()));
        item.in_place = true;
        match nocow::write_in_place(handles, item) {
            Ok(left) => {
                item.completed = left.is_empty();
                item.parts = left.into_iter().map(|range| Part { range, packed: None }).collect();
            }
            Err(e) => item.fail(e),
        }
    }
}

/// Decides in which form the runs are stored.
fn pack(core: &Core, items: &mut [Item]) {
    let mut jobs = Vec::new();
    // The number of jobs of each item, and whether they are for the leaf.
    let mut plan = Vec::with_capacity(items.len());
    for item in items.iter() {
        let choice = if item.failed.is_none() && !item.in_place {
            compress::choice(core, &item.submission.inode)
        } else {
            None
        };
        let slices = |range| item.image.slices(item.taken(), range);
        plan.push(match choice {
            Some(choice) if item.inline => {
                let bytes = slices(0..item.submission.in_flight.size);
                jobs.push(compress::inline_job(choice, bytes, index(super::max_inline(core))));
                1
            }
            Some(choice) => compress::jobs(choice, item.len(), slices, &mut jobs),
            None => 0,
        });
    }
    let done = compress::run(core, &jobs);
    drop(jobs);
    let mut done = done.into_iter();
    for (item, count) in items.iter_mut().zip(plan) {
        let mut mine = done.by_ref().take(count);
        if item.failed.is_some() || item.in_place {
            continue;
        }
        if item.inline {
            item.leaf = mine.next().and_then(compress::Done::into_packed);
            // Only the compressed form may be short enough.
            item.inline =
                item.leaf.is_some() || super::may_be_inline(core, item.submission.in_flight.size);
            if item.inline {
                continue;
            }
        }
        let assembled = compress::assemble(item.len(), mine);
        item.incompressible = assembled.is_evidence(item.submission.in_flight.size);
        item.parts = assembled.parts;
    }
}

/// Gets space for all runs, one behind the other. Space that was reserved and is not needed,
/// because something was written in place, goes to what the files still have to write: those writes
/// may have been admitted without space.
fn allocate(core: &Core, items: &mut [Item]) -> Vec<Run> {
    let none = || core.space.accounts.empty(SpaceKind::Data);
    let mut space = none();
    for item in items.iter_mut() {
        space.merge(std::mem::replace(&mut item.submission.space, none()));
    }
    let left = items.iter().map(Item::stored).sum();
    let mut places = Places { core, space, runs: Vec::new(), rest: None, left };
    for item in items.iter_mut() {
        places.assign(item);
    }
    if let Some(rest) = places.rest.take() {
        places.give_back(rest);
    }
    let Places { mut space, runs, .. } = places;
    for item in items.iter().filter(|i| i.in_place) {
        space = delalloc::give_space(&item.submission.inode, space);
    }
    runs
}

/// Space that is being assigned to a batch.
struct Places<'a> {
    core: &'a Core,
    space: Reservation,
    runs: Vec<Run>,
    /// The end of the last run of space, which is not assigned yet.
    rest: Option<Run>,
    /// Bytes that have no place yet.
    left: u64,
}

impl Places<'_> {
    /// Gives all parts of an item their places, or fails the item.
    fn assign(&mut self, item: &mut Item) {
        let mut parts = std::mem::take(&mut item.parts).into_iter();
        for part in parts.by_ref() {
            if let Err(e) = self.assign_part(part, &mut item.pieces) {
                item.fail(e);
                break;
            }
        }
        self.left -= parts.map(|part| part.stored()).sum::<u64>();
    }
    fn assign_part(&mut self, mut part: Part, pieces: &mut SmallVec<[Piece; 1]>) -> Result<()> {
        while !part.range.is_empty() {
            let want = part.stored();
            // Compressed data lies in one piece.
            let least = if part.packed.is_some() { want } else { SECTOR };
            let run = match self.take_run(least) {
                Ok(run) => run,
                // There is no piece as long as that. What was reserved is enough for smaller ones.
                Err(_) if part.packed.is_some() => {
                    part.packed = None;
                    self.left += part.stored() - want;
                    continue;
                }
                Err(e) => {
                    self.left -= want;
                    return Err(e);
                }
            };
            let mine = Run::new(run.start, run.len.min(want));
            if mine.len < run.len {
                self.rest = Some(Run::new(mine.end(), run.len - mine.len));
            }
            self.left -= mine.len;
            let packed = part.packed.take();
            let end = if packed.is_some() { part.range.end } else { part.range.start + mine.len };
            let range = part.range.start..end;
            part.range.start = end;
            pieces.push(Piece { range, packed, run: mine, csums: Vec::new() });
        }
        Ok(())
    }
    /// What is left of the last run, or a new one. It has at least so many bytes.
    fn take_run(&mut self, least: u64) -> Result<Run> {
        if let Some(rest) = self.rest.take() {
            if rest.len >= least {
                return Ok(rest);
            }
            self.give_back(rest);
        }
        let core = self.core;
        let wanted = Lengths { most: self.left.min(MAX_DATA_EXTENT), least };
        let run = core.space.allocate_data(&core.txns, wanted, &mut self.space)?;
        core.compression.forget(run);
        self.runs.push(run);
        Ok(run)
    }
    fn give_back(&mut self, rest: Run) {
        let last = self.runs.last_mut().expect("it is the end of a run");
        last.len -= rest.len;
        self.core.space.give_back(rest, Some(&mut self.space));
    }
}

/// Writes what lies in the runs of space, all of them together. Runs in flight fail if their space
/// could not be written.
fn write_runs(core: &Core, items: &mut [Item], runs: &[Run]) {
    let failed: Vec<Run> = {
        let writes: Vec<(Run, Logical, Vec<IoSlice<'_>>)> =
            runs.iter().filter_map(|run| write_of(items, *run)).collect();
        let batch: Vec<_> = writes.iter().map(|(_, first, slices)| (*first, &slices[..])).collect();
        let ended = core.write_fresh(&batch);
        let mut failed = Vec::new();
        for ((run, ..), result) in writes.iter().zip(ended) {
            match result {
                Ok(()) => core.volume.start_writeback(run.start, run.len),
                Err(e) => {
                    tracing::warn!("data could not be written: {e}");
                    failed.push(*run);
                }
            }
        }
        failed
    };
    for run in failed {
        for item in items.iter_mut().filter(|i| i.pieces.iter().any(|p| run.contains(p.run))) {
            item.fail(Error::DataLost);
        }
    }
    core.flushes.written();
}

/// The data that lies in a run of space, and where it begins.
fn write_of(items: &[Item], run: Run) -> Option<(Run, Logical, Vec<IoSlice<'_>>)> {
    let mut slices = Vec::new();
    let mut first = None;
    for item in items {
        for piece in item.pieces.iter().filter(|p| run.contains(p.run)) {
            first.get_or_insert(piece.run.start);
            let bytes = piece.slices(&item.image, item.taken());
            slices.extend(bytes.into_iter().map(IoSlice::new));
        }
    }
    Some((run, first?, slices))
}

fn compute_csums(csum: CsumType, items: &mut [Item]) {
    for item in items.iter_mut().filter(|i| i.verified && i.failed.is_none() && !i.inline) {
        let Item { submission, image, pieces, .. } = item;
        for piece in pieces {
            let slices = piece.slices(image, &submission.in_flight.taken);
            piece.csums = csums_of(csum, &slices, index(piece.run.len));
        }
    }
}

/// Enters all runs in flight into their trees, and completes them.
fn insert_all(core: &Core, items: &mut [Item], reserved: Option<Reservation>) {
    let mut handles = Handles::new(core, reserved);
    let mut done = 0;
    while done < items.len() {
        let together = insert_together(&mut handles, &items[done..]);
        if together > 0 {
            done += together;
            continue;
        }
        let item = &mut items[done];
        done += 1;
        if item.completed {
            continue;
        }
        let outcome = match item.failed.take() {
            Some(e) => Err(e),
            None if item.inline => insert_inline(&mut handles, item),
            None => insert_extents(&mut handles, item),
        };
        if let Err(e) = outcome {
            let id = item.submission.inode.id;
            // Data of a subvolume that was deleted meanwhile is not needed.
            let unwanted = item.submission.inode.subvol.is_dead();
            if !unwanted {
                tracing::warn!("data of inode {} in subvolume {} was lost: {e}", id.ino, id.subvol);
                if let Err(e) = cover_lost(&mut handles, item) {
                    tracing::warn!("the lost range of inode {} got no hole item: {e}", id.ino);
                }
            }
            complete(core, &item.submission.inode, [&item.submission.in_flight], unwanted);
            for piece in &item.pieces[item.created..] {
                core.space.give_back(piece.run, None);
            }
        }
    }
}

/// Data that could not be written is a hole from now on, and does not hold the file's size back any
/// more. Where holes have items, the hole gets one.
fn cover_lost(handles: &mut Handles<'_>, item: &Item) -> Result<()> {
    if has_no_holes(handles.core) {
        return Ok(());
    }
    let inode = &item.submission.inode;
    let h = handles.get()?;
    let _extents = inode.lock_extents();
    cover(h, inode, item.submission.in_flight.taken.end)
}

/// Enters the first of these runs together and completes them, where they are short pieces of one
/// file that become one extent each, in holes. Returns how many those were.
fn insert_together(handles: &mut Handles<'_>, items: &[Item]) -> usize {
    let Some(first) = items.first() else { return 0 };
    let inode = first.submission.inode.clone();
    let fresh: SmallVec<[Fresh; MAX_FRESH]> = items
        .iter()
        .take(MAX_FRESH)
        .map_while(|i| i.fresh().filter(|_| Arc::ptr_eq(&i.submission.inode, &inode)))
        .scan(0, |end, f| {
            // When it has come to the end of a file, write-back goes on from the file's beginning.
            let ascends = f.start >= *end;
            *end = f.start + f.run.len;
            ascends.then_some(f)
        })
        .collect();
    if fresh.len() < 2 {
        return 0;
    }
    let core = handles.core;
    let Ok(h) = handles.get_for(fresh.len()) else { return 0 };
    let extents = inode.lock_extents();
    let mut noted = 0;
    let count = fill_holes(h, &inode, &fresh, |h, count| {
        noted = count;
        note_csums(h, &items[..count]);
    });
    for item in &items[count..noted.max(count)] {
        h.forget_csums(item.pieces[0].run);
    }
    if count > 0 {
        // Under the handle, as below.
        complete(core, &inode, items[..count].iter().map(|i| &i.submission.in_flight), true);
        h.mark_dirty(&inode);
    }
    drop(extents);
    count
}

/// Notes the checksums of runs that are one piece each: in one note where they lie behind each
/// other.
fn note_csums(h: &mut Handle<'_>, items: &[Item]) {
    let mut together: Option<(Run, Vec<u8>)> = None;
    for piece in items.iter().map(|i| &i.pieces[0]).filter(|p| !p.csums.is_empty()) {
        match &mut together {
            Some((run, csums)) if run.end() == piece.run.start => {
                run.len += piece.run.len;
                csums.extend_from_slice(&piece.csums);
            }
            _ => {
                if let Some((run, csums)) = together.replace((piece.run, piece.csums.clone())) {
                    h.add_csums(run.start, csums);
                }
            }
        }
    }
    if let Some((run, csums)) = together {
        h.add_csums(run.start, csums);
    }
}

fn insert_extents(handles: &mut Handles<'_>, item: &mut Item) -> Result<()> {
    (0..item.pieces.len()).try_for_each(|i| insert_piece(handles, item, i))
}

/// Enters one piece of a run into the file's tree. With the last one the run is complete.
fn insert_piece(handles: &mut Handles<'_>, item: &mut Item, i: usize) -> Result<()> {
    let core = handles.core;
    let first_byte = item.taken().start;
    let is_last = i + 1 == item.pieces.len();
    let inode = &item.submission.inode;
    let piece = &mut item.pieces[i];
    let range = first_byte + piece.range.start..first_byte + piece.range.end;
    let compression = piece.packed.as_ref().map_or(Compression::None, |p| p.method);
    let run = piece.run;
    let mut csums = Some(std::mem::take(&mut piece.csums));
    let (mut at, mut create) = (range.start, true);
    while at < range.end {
        let h = handles.get()?;
        let extents = inode.lock_extents();
        // Readers that find the extent look for its checksums.
        if let Some(csums) = csums.take() {
            h.add_csums(run.start, csums);
        }
        let new = New::Extent {
            kind: ExtentKind::Regular,
            at: run.start,
            len: run.len,
            ram_bytes: range.end - range.start,
            compression,
            offset: at - range.start,
            create,
            born: None,
        };
        h.need_incompat(property::incompat(compression).bits());
        let mut created = false;
        let reached = replace(h, inode, at..range.end, new, &mut created);
        item.created = item.created.max(i + usize::from(created));
        if create && !created {
            // The space is given back, and must not have checksums.
            h.forget_csums(run);
        }
        create = false;
        at = reached?;
        if at == range.end {
            // Extents that cannot be joined stay as they are.
            if let Err(e) = join(h, inode, &range) {
                tracing::debug!("extents stay apart: {e}");
            }
            if is_last {
                complete_under(core, h, item);
            }
        }
        drop(extents);
    }
    Ok(())
}

/// Completes a run under the handle that its last extent was entered with: the seal that has the
/// extent must see the size that the extent allows.
fn complete_under(core: &Core, h: &mut Handle<'_>, item: &Item) {
    let inode = &item.submission.inode;
    if item.incompressible {
        compress::mark_incompressible(inode);
    }
    complete(core, inode, [&item.submission.in_flight], true);
    h.mark_dirty(inode);
}

fn insert_inline(handles: &mut Handles<'_>, item: &Item) -> Result<()> {
    let inode = &item.submission.inode;
    let in_flight = &item.submission.in_flight;
    let plain;
    let (data, compression) = match &item.leaf {
        Some(packed) => (&packed.data, packed.method),
        None => {
            plain = item.image.slices(item.taken(), 0..in_flight.size).concat();
            (&plain, Compression::None)
        }
    };
    let core = handles.core;
    let h = handles.get()?;
    h.need_incompat(property::incompat(compression).bits());
    let extents = inode.lock_extents();
    let mut created = false;
    let new = New::Inline { data, ram_bytes: in_flight.size, compression };
    replace(h, inode, 0..SECTOR, new, &mut created)?;
    complete(core, inode, [in_flight], true);
    h.mark_dirty(inode);
    drop(extents);
    Ok(())
}

/// Is the first sector the only one with an extent item?
///
/// # Errors
/// Reading or corruption.
fn only_first_sector(core: &Core, inode: &Inode) -> Result<bool> {
    let version = inode.subvol.version(core);
    Ok(ExtentCursor::new(&version, ObjectId(inode.id.ino), SECTOR)?.next()?.is_none())
}

const _: () = assert!(MAX_ITEMS as u64 >= RESERVE_ITEMS);
