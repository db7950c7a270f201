//! Sharing extents between files: cloning a range, and giving ranges with the same bytes the same
//! extents.
//!
//! What Linux allows for FICLONERANGE and FIDEDUPERANGE is allowed here ([`Span`]). Hidden here is
//! how an extent comes to be shared although a file may still write into it or let it grow:
//!
//! - `op` of both files is held (of the source for reading), and delayed data of both is written
//!   back first. From then on the source's items stand still.
//! - The item is read, and a first reference in the target's name is taken, under the *source's*
//!   extent lock. Then the item is put in with a reference of its own, under the target's. Then the
//!   first reference goes. The two locks are never held together; all steps are under one handle.
//! - A subvolume that is being deleted gives nothing away.
//!
//! Data in a leaf cannot be shared, and is copied. Long ranges take a transaction for every extent.
//! After a crash a first part of the range may be there, with the size that belongs to it, as on
//! Linux. `docs/FILE-DATA.md` says why this is enough and why it cannot deadlock.

use super::dirty::index;
use super::extents::{Content, ExtentCursor, MAX_FILE_SIZE, SECTOR, ceil, floor};
use super::position::Position;
use super::replace::{New, RESERVE_ITEMS, cover, replace};
use super::truncate::{before_growing, grow_with};
use super::{delalloc, nocow};
use crate::api::{Deduped, may_wait, to_timespec};
use crate::engine::{Core, Inode};
use crate::error::{Error, Place, Result};
use crate::lock::{Exclusive, Shared};
use crate::space::Run;
use crate::transaction::Handle;
use larder_format::items::keys::extent_data_key;
use larder_format::items::{ExtentKind, ExtentRecord, ExtentRef, InodeFlags};
use larder_format::{FileOffset, Generation};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that are compared at a time.
const COMPARE: u64 = 256 << 10;

/// The source has no such range.
const BEHIND: Error = Error::Invalid("the source ends before the range");

/// A range of one file, and the place in another file where its sectors go, or are already.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: u64,
    to: u64,
    /// In bytes. It ends at a sector's end, or where both files are going to end.
    len: u64,
}

/// What is done with a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// The target gets the source's content.
    Clone,
    /// The target has it already.
    Dedupe,
}

impl Span {
    /// A span, if it is allowed; `None` where there is nothing to do. The caller holds `op` of both
    /// files.
    ///
    /// # Errors
    /// `Invalid`, `FileTooBig`.
    fn new(from: Position<'_>, to: Position<'_>, len: u64, mode: Mode) -> Result<Option<Self>> {
        let (size, to_size) = sizes(from.inode, to.inode);
        let len = match len {
            0 if from.offset == size => return Ok(None),
            0 => size.checked_sub(from.offset).ok_or(BEHIND)?,
            len => len,
        };
        let (from_end, to_end) = (from.offset.checked_add(len), to.offset.checked_add(len));
        let (Some(from_end), Some(to_end)) = (from_end, to_end) else {
            return Err(Error::Invalid("the range ends behind the largest offset"));
        };
        if !from.offset.is_multiple_of(SECTOR) || !to.offset.is_multiple_of(SECTOR) {
            return Err(Error::Invalid("ranges begin at multiples of the sector size"));
        }
        if from_end > size {
            return Err(BEHIND);
        }
        if mode == Mode::Dedupe && to_end > to_size {
            return Err(Error::Invalid("the target ends before the range"));
        }
        if to_end > MAX_FILE_SIZE {
            return Err(Error::FileTooBig);
        }
        let at_end = from_end == size && to_end >= to_size;
        let len = match mode {
            _ if len.is_multiple_of(SECTOR) || at_end => len,
            Mode::Clone => {
                return Err(Error::Invalid(
                    "a part of a sector is shared only where both files end",
                ));
            }
            Mode::Dedupe => floor(len),
        };
        let span = Self { from: from.offset, to: to.offset, len };
        if len > 0 && from.is_in_file_of(to) && span.overlaps_itself() {
            return Err(Error::Invalid("the ranges overlap"));
        }
        Ok((len > 0).then_some(span))
    }
    /// Do the sectors of both places overlap, if they are in one file?
    fn overlaps_itself(self) -> bool {
        let sectors = ceil(self.len);
        self.from < self.to + sectors && self.to < self.from + sectors
    }
}

/// `op` of the source, for reading, unless it is the target; and of the target.
type Ops<'a> = (Option<Shared<'a, ()>>, Exclusive<'a, ()>);

/// The sizes of both, source first.
fn sizes(from: &Inode, to: &Inode) -> (u64, u64) {
    let size = from.state.lock().size;
    (size, to.state.lock().size)
}

/// Takes both locks in the order that all operations keep.
fn lock_both<'a>(from: &'a Inode, to: &'a Inode) -> Ops<'a> {
    if from.id == to.id {
        return (None, to.op.write());
    }
    if from.id < to.id {
        let first = from.op.read();
        return (Some(first), to.op.write());
    }
    let second = to.op.write();
    (Some(from.op.read()), second)
}

/// Checks what depends on the files alone. The caller holds `op` of both.
fn check_files(from: &Inode, to: &Inode, mode: Mode) -> Result<()> {
    from.check_alive()?;
    to.check_alive()?;
    let (have, get) = (from.flags(), to.flags());
    if get.contains(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("the file is immutable"));
    }
    if mode == Mode::Clone && get.contains(InodeFlags::APPEND) {
        return Err(Error::NotPermitted("the file can only be appended to"));
    }
    if (have ^ get).contains(InodeFlags::NODATASUM) {
        return Err(Error::Invalid("one of the files has checksums and the other has none"));
    }
    Ok(())
}

/// The part of a copy that can be shared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shareable {
    /// The bytes before it.
    pub(super) skip: u64,
    /// Its length.
    pub(super) len: u64,
}

/// The part of a copy of `len` bytes that can be shared. `None` where bytes are to be copied, also
/// where there are so few that they lie in a leaf.
pub(super) fn part(
    core: &Core,
    from: Position<'_>,
    to: Position<'_>,
    len: u64,
) -> Option<Shareable> {
    let with_and_without = (from.inode.flags() ^ to.inode.flags()).contains(InodeFlags::NODATASUM);
    if with_and_without || from.offset % SECTOR != to.offset % SECTOR || len < SECTOR {
        return None;
    }
    let (size, to_size) = sizes(from.inode, to.inode);
    if size <= super::max_inline(core) {
        return None;
    }
    let skip = ceil(from.offset) - from.offset;
    let (end, to_end) = (from.offset + len, to.offset + len);
    let stop = if end == size && to_end >= to_size { end } else { floor(end) };
    let shared = stop.checked_sub(from.offset + skip)?;
    // Less than that is not worth the references.
    (shared >= SECTOR).then_some(Shareable { skip, len: shared })
}

/// Writes delayed data of both files back. Lost data of the target is no reason not to put other
/// data there.
fn settle(core: &Core, from: &Arc<Inode>, to: &Arc<Inode>) -> Result<()> {
    if !fault!(core.options.tuning, CloneUnsettled) {
        super::fsync_data(core, from)?;
    }
    match super::fsync_data(core, to) {
        Ok(()) | Err(Error::DataLost) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Gives the target what the source has in a range, by sharing its extents. Returns the number of
/// bytes. `len` 0 means: up to the source's end.
///
/// # Errors
/// `Invalid` for offsets that are no multiples of a sector; for a range that does not end at a
/// multiple unless that is the end of both files; for a range that the source does not have, or
/// that overlaps its target; and between files with and without checksums. `IsDirectory`, `Invalid`
/// for other types; `FileTooBig`; `NotPermitted` by flags; `DataLost` for data that the source has
/// lost; `NoSpace`; reading, corruption, `WouldBlock`. A first part of the range may be done then.
pub(crate) fn clone_range(
    core: &Core,
    source: Position<'_>,
    target: Position<'_>,
    len: u64,
) -> Result<u64> {
    let (from, to) = (source.inode, target.inode);
    to.check_changeable(core)?;
    super::expect_regular(from)?;
    super::expect_regular(to)?;
    may_wait()?;
    let _ops = lock_both(from, to);
    check_files(from, to, Mode::Clone)?;
    let Some(span) = Span::new(source, target, len, Mode::Clone)? else { return Ok(0) };
    settle(core, from, to)?;
    let old = to.state.lock().size;
    if span.to > old {
        let again = before_growing(core, to, old)?;
        grow_with(core, to, old..span.to, again)?;
        settle(core, from, to)?;
    }
    {
        let mut h = core.begin(1)?;
        let now = to_timespec(core.now());
        to.change(&mut h, |state| {
            state.item.mtime = now;
            state.item.ctime = now;
        });
    }
    Sharing { core, from, to, span, mode: Mode::Clone }.run()?;
    Ok(span.len)
}

/// Gives the target the source's extents for a range in which both have the same bytes. A part of a
/// sector at its end is left alone, and is not compared either, unless both files end there.
///
/// # Errors
/// As [`clone_range`], but not for ranges that end within a sector; also `Invalid` where the range
/// is not within the target.
pub(crate) fn dedupe_range(
    core: &Core,
    source: Position<'_>,
    target: Position<'_>,
    len: u64,
) -> Result<Deduped> {
    let (from, to) = (source.inode, target.inode);
    // Not `check_changeable`: the content that a read-only subvolume shows does not change.
    core.check_writable()?;
    super::expect_regular(from)?;
    super::expect_regular(to)?;
    may_wait()?;
    let _ops = lock_both(from, to);
    if len == 0 {
        // Checked before anything else, as on Linux.
        let beyond = source.offset > from.state.lock().size;
        return if beyond { Err(BEHIND) } else { Ok(Deduped::Same { bytes: 0, shared: 0 }) };
    }
    check_files(from, to, Mode::Dedupe)?;
    let Some(span) = Span::new(source, target, len, Mode::Dedupe)? else {
        return Ok(Deduped::Same { bytes: len, shared: 0 });
    };
    settle(core, from, to)?;
    if !is_same(core, from, to, span)? {
        return Ok(Deduped::Differs);
    }
    let shared = Sharing { core, from, to, span, mode: Mode::Dedupe }.run()?;
    Ok(Deduped::Same { bytes: len, shared })
}

/// Do both files have the same bytes?
fn is_same(core: &Core, from: &Inode, to: &Inode, span: Span) -> Result<bool> {
    let most = index(span.len.min(COMPARE));
    let (mut here, mut there) = (vec![0; most], vec![0; most]);
    let mut done = 0;
    while done < span.len {
        let n = index((span.len - done).min(COMPARE));
        super::read::read_range(core, from, span.from + done, &mut here[..n])?;
        super::read::read_range(core, to, span.to + done, &mut there[..n])?;
        if here[..n] != there[..n] {
            return Ok(false);
        }
        done += n as u64;
    }
    Ok(true)
}

/// What the source has at one place.
#[derive(Debug)]
enum Piece {
    Hole,
    /// Data in the leaf.
    Inline,
    /// A window into an extent. It begins at that place.
    Window(ExtentRecord),
}

impl Piece {
    fn window(&self) -> Option<&ExtentRecord> {
        match self {
            Self::Window(record) => Some(record),
            Self::Hole | Self::Inline => None,
        }
    }
    /// What the target gets.
    fn content(&self) -> New<'static> {
        match self {
            Self::Window(r) => New::Extent {
                kind: r.kind,
                at: r.disk_bytenr,
                len: r.disk_num_bytes,
                ram_bytes: r.ram_bytes,
                compression: r.compression,
                offset: r.offset,
                create: false,
                born: Some(r.generation),
            },
            Self::Hole | Self::Inline => New::Hole,
        }
    }
}

/// What a file has at the beginning of a range, and where that ends, at the end of the range at the
/// latest.
fn piece(core: &Core, inode: &Inode, range: Range<u64>) -> Result<(Piece, u64)> {
    let Range { start: at, end } = range;
    let version = inode.subvol.version(core);
    let extent = ExtentCursor::new(&version, inode.object(), at)?.next()?;
    let Some(extent) = extent.filter(|e| e.start < end) else { return Ok((Piece::Hole, end)) };
    if extent.start > at {
        return Ok((Piece::Hole, extent.start));
    }
    let stop = extent.end.min(end);
    let piece = match extent.content {
        Content::Inline { .. } => Piece::Inline,
        Content::Stored(r) if r.is_hole() => Piece::Hole,
        Content::Stored(r) => Piece::Window(r.part(at - extent.start..stop - extent.start)),
    };
    Ok((piece, stop))
}

/// A span that is being shared.
struct Sharing<'a> {
    core: &'a Core,
    from: &'a Arc<Inode>,
    to: &'a Arc<Inode>,
    span: Span,
    mode: Mode,
}

impl Sharing<'_> {
    /// Shares the span. Returns the bytes of the target that were not in these extents before.
    fn run(&self) -> Result<u64> {
        let end = self.span.from + ceil(self.span.len);
        let (mut at, mut shared) = (self.span.from, 0);
        while at < end {
            let (piece, stop) = piece(self.core, self.from, at..end)?;
            if let Some(stop) = self.is_done(&piece, at..stop)? {
                at = stop;
                continue;
            }
            if matches!(piece, Piece::Inline) {
                self.copy(at..stop)?;
                at = stop;
                continue;
            }
            if let Piece::Window(r) = &piece
                && !self.is_recorded(at, r)?
            {
                // It has moved meanwhile, and its old place is free.
                continue;
            }
            let reached = self.step(at..end)?;
            shared += reached - at;
            at = reached;
            self.core.step_done()?;
        }
        Ok(shared)
    }

    /// The place in the target that belongs to a place in the source.
    fn target(&self, at: u64) -> u64 {
        self.span.to + (at - self.span.from)
    }
    /// The range of the target that belongs to a range of the source.
    fn target_range(&self, range: &Range<u64>) -> Range<u64> {
        self.target(range.start)..self.target(range.end)
    }

    /// Is there nothing to do for the source's piece in this range? If so: up to where?
    fn is_done(&self, piece: &Piece, range: Range<u64>) -> Result<Option<u64>> {
        if self.mode == Mode::Clone {
            return Ok(None);
        }
        let there = self.target_range(&range);
        let start = there.start;
        let (there, there_stop) = self::piece(self.core, self.to, there)?;
        let stop = range.start + (there_stop - start);
        let same = match (piece, there) {
            (Piece::Hole, Piece::Hole) | (Piece::Inline, _) => true,
            (Piece::Window(a), Piece::Window(b)) => {
                (a.disk_bytenr, a.disk_num_bytes, a.offset)
                    == (b.disk_bytenr, b.disk_num_bytes, b.offset)
            }
            _ => false,
        };
        Ok(same.then_some(stop))
    }

    /// Does the extent tree know the extent? One more reference to an extent that it does not know
    /// would fail only in the commit, and make all other changes fail with it. False where the
    /// source has another extent there by now.
    ///
    /// # Errors
    /// `Corrupt` where the source still has this one.
    fn is_recorded(&self, at: u64, r: &ExtentRecord) -> Result<bool> {
        if nocow::is_recorded(self.core, self.from, at, r)? {
            return Ok(true);
        }
        let (now, _) = piece(self.core, self.from, at..at + SECTOR)?;
        if now.window().is_none_or(|now| now.disk_bytenr != r.disk_bytenr) {
            return Ok(false);
        }
        let place =
            Place::item(self.from.id.subvol, extent_data_key(self.from.object(), FileOffset(at)));
        Err(Error::corrupt(
            place,
            format!("its extent {} is not in the extent tree", r.disk_bytenr),
        ))
    }

    /// Copies data that lies in the source's leaf.
    fn copy(&self, range: Range<u64>) -> Result<()> {
        let stop = range.end.min(self.span.from + self.span.len);
        let mut data = vec![0; index(stop - range.start)];
        super::read::read_range(self.core, self.from, range.start, &mut data)?;
        super::write_piece(self.core, self.to, self.target(range.start), &data)
    }

    /// Shares the piece at the beginning of the range, or a first part of it. Returns where that
    /// ends.
    fn step(&self, range: Range<u64>) -> Result<u64> {
        let Self { core, to, .. } = *self;
        let mut h = core.begin(RESERVE_ITEMS + 2)?;
        let (piece, range, guard) = self.take(&mut h, range)?;
        let there = self.target_range(&range);
        let start = there.start;
        let outcome = self.put(&mut h, there, piece.content());
        if let Some(guard) = guard {
            guard.release(&mut h)?;
        }
        if let Some(r) = piece.window() {
            self.mark(h.generation(), r.generation);
        }
        let reached = outcome?;
        if let (Some(r), true) =
            (piece.window(), fault!(core.options.tuning, CloneWithoutReference))
        {
            Guard::take(&mut h, to, start, r)?.release_twice(&mut h)?;
        }
        delalloc::rewritten(to, &(start..reached));
        if piece.window().is_some_and(|r| r.kind == ExtentKind::Prealloc) {
            self.note_preallocated(&mut h);
        }
        h.mark_dirty(to);
        Ok(self.span.from + (reached - self.span.to))
    }

    /// Takes what the source has at the beginning of the range: the piece, the part of the range
    /// that it covers, and a reference that keeps an extent as it is meanwhile.
    fn take(
        &self,
        h: &mut Handle<'_>,
        range: Range<u64>,
    ) -> Result<(Piece, Range<u64>, Option<Guard>)> {
        let _extents = self.from.lock_extents();
        if self.from.subvol.is_dead() {
            return Err(Error::NotFound);
        }
        let (piece, stop) = piece(self.core, self.from, range.clone())?;
        let start = self.target(range.start);
        let guard = piece.window().map(|r| Guard::take(h, self.to, start, r)).transpose()?;
        Ok((piece, range.start..stop, guard))
    }

    /// Puts the content into a range of the target, and lets the target grow as far as it goes.
    /// Returns where that is.
    fn put(&self, h: &mut Handle<'_>, range: Range<u64>, content: New<'_>) -> Result<u64> {
        let _extents = self.to.lock_extents();
        let reached = replace(h, self.to, range, content, &mut false)?;
        self.grow(h, reached)?;
        Ok(reached)
    }

    /// Notes that the target has preallocated extents. In files without this flag Linux does not
    /// look for such extents, and would show their holes as data.
    fn note_preallocated(&self, h: &mut Handle<'_>) {
        if !self.to.flags().contains(InodeFlags::PREALLOC) {
            self.to.change(h, |state| {
                let flags = state.item.inode_flags() | InodeFlags::PREALLOC;
                state.item.set_inode_flags(flags);
            });
        }
    }

    /// Lets the target reach as far as the work is done. The caller holds the extent lock.
    fn grow(&self, h: &mut Handle<'_>, reached: u64) -> Result<()> {
        let old = self.to.state.lock().size;
        let size = reached.min(self.span.to + self.span.len);
        if size > old {
            cover(h, self.to, size)?;
            delalloc::grow(self.to, &(old..size), false);
        }
        Ok(())
    }

    /// Notes which files a log of this transaction has to examine more closely.
    fn mark(&self, now: Generation, born: Generation) {
        self.to.last_reflink.fetch_max(now.0, Ordering::AcqRel);
        if born == now {
            self.from.last_reflink.fetch_max(now.0, Ordering::AcqRel);
        }
    }
}

/// A reference that the target has to an extent until it gets one of its own.
#[derive(Clone, Copy)]
struct Guard {
    extent: Run,
    user: ExtentRef,
}

impl Guard {
    fn take(h: &mut Handle<'_>, to: &Inode, start: u64, record: &ExtentRecord) -> Result<Self> {
        let extent = Run::new(record.disk_bytenr, record.disk_num_bytes);
        let user = ExtentRef::data(to.id.subvol, to.object(), FileOffset(start), record.offset);
        h.add_data_ref(extent, user)?;
        Ok(Self { extent, user })
    }
    /// Breaks the count, for tests that must notice it.
    fn release_twice(self, h: &mut Handle<'_>) -> Result<()> {
        self.release(h)?;
        self.release(h)
    }
    fn release(self, h: &mut Handle<'_>) -> Result<()> {
        h.drop_data_ref(self.extent, self.user)
    }
}
