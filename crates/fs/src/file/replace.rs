//! Replacing a range of a file in its tree: the one place that edits EXTENT_DATA items.
//!
//! Extents that reach into the range are trimmed or split. References, `nbytes` and the explicit
//! holes of images without NO_HOLES change with them. A [`Plan`] is worked out from a version and
//! then written in one edit. In between, the inode's extent lock keeps the items as the version has
//! them: every caller holds it, and nothing else edits these items. It is taken with a transaction
//! handle in hand, and its holder waits for nothing but the device.
//!
//! References are noted before the edit. Noting can fail, because two items of a damaged image may
//! contradict each other. An edit that was prepared cannot fail half way.

use super::extents::{Content, Extent, ExtentCursor, MAX_FILE_SIZE, SECTOR, ceil};
use crate::engine::Inode;
use crate::error::{Error, Place, Result};
use crate::space::Run;
use crate::transaction::{Ground, Handle};
use crate::tree::{Editor, Item};
use larder_format::features::Incompat;
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, ExtentRef, InlineExtent};
use larder_format::{FileOffset, Generation, Key, Logical, ObjectId, TreeId};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Items that one edit changes at most, apart from a few at the edges.
pub(super) const MAX_ITEMS: usize = 16;
/// Item changes to reserve for one replacement: for those items, and for what is written and split
/// at the edges.
pub(super) const RESERVE_ITEMS: u64 = 6;

/// What the range gets.
#[derive(Clone, Copy, Debug)]
pub(super) enum New<'a> {
    /// Nothing: the range becomes a hole at the end of the file.
    Nothing,
    /// A hole within the file.
    Hole,
    /// Data in the leaf.
    Inline {
        /// The bytes as they lie in the leaf.
        data: &'a [u8],
        /// Its bytes in the file.
        ram_bytes: u64,
        /// How it is compressed.
        compression: Compression,
    },
    /// A window into an extent of which the first `offset` bytes, uncompressed, lie before the
    /// range.
    Extent {
        /// Data, or reserved space that reads as zeros.
        kind: ExtentKind,
        /// Address of the extent.
        at: Logical,
        /// Its length on the device.
        len: u64,
        /// Its bytes in a file.
        ram_bytes: u64,
        /// How it is compressed.
        compression: Compression,
        /// Where the range begins in the extent.
        offset: u64,
        /// Must the extent still be recorded as allocated?
        create: bool,
        /// The transaction that wrote the extent's content; `None` for the running one.
        born: Option<Generation>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delta {
    Create,
    Add,
    Drop,
}

/// A change of an extent's references: address, length, the reference's offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RefChange {
    at: Logical,
    len: u64,
    offset: u64,
    delta: Delta,
}

/// Item changes that replace a range.
#[derive(Debug, Default)]
struct Plan {
    /// By key offset: whether the item exists, and what it becomes.
    items: BTreeMap<u64, (bool, Option<Vec<u8>>)>,
    refs: SmallVec<[RefChange; 4]>,
    nbytes: i128,
    /// How far the range was replaced.
    reached: u64,
    /// Where a hole before the range begins, if it gets its item only now.
    covered_from: Option<u64>,
}

/// The offset in a window's reference. It is the same for all windows that were one before.
fn ref_offset(start: u64, r: &ExtentRecord) -> u64 {
    start.wrapping_sub(r.offset)
}

/// The extent before a range, or behind it, if there is one.
type Neighbour<'a> = Option<&'a Extent>;

/// Does `b`, which follows `a` in the file, follow it in the same extent as well?
fn continues(a: &ExtentRecord, b: &ExtentRecord) -> bool {
    let what = |r: &ExtentRecord| (r.disk_bytenr, r.disk_num_bytes, r.kind, r.compression);
    !a.is_hole() && what(a) == what(b) && a.offset + a.num_bytes == b.offset
}

impl Plan {
    fn refer(&mut self, start: u64, r: &ExtentRecord, delta: Delta) {
        if !r.is_hole() {
            let offset = ref_offset(start, r);
            self.refs.push(RefChange { at: r.disk_bytenr, len: r.disk_num_bytes, offset, delta });
        }
    }
    /// Trims or removes what lies in the range. Stops at a boundary between items when there are
    /// too many. Returns the extent that follows the range, if it got as far as that.
    fn cut(
        &mut self,
        cursor: &mut ExtentCursor,
        tree: TreeId,
        range: &Range<u64>,
    ) -> Result<Option<Extent>> {
        self.reached = range.end;
        while let Some(extent) = cursor.next()? {
            if extent.start >= range.end {
                return Ok(Some(extent));
            }
            if self.items.len() >= MAX_ITEMS && extent.start > range.start {
                self.reached = extent.start;
                return Ok(None);
            }
            self.cut_one(&extent, tree, range)?;
        }
        Ok(None)
    }
    fn cut_one(&mut self, extent: &Extent, tree: TreeId, range: &Range<u64>) -> Result<()> {
        let Range { start, end } = *range;
        let r = match extent.content {
            Content::Stored(r) => r,
            Content::Inline { ram_bytes, .. } if start == 0 && extent.end <= end => {
                self.nbytes -= i128::from(ram_bytes);
                self.items.insert(0, (true, None));
                return Ok(());
            }
            Content::Inline { .. } => {
                let place = Place::item(tree, extent.key());
                return Err(Error::corrupt(place, "inline extent is longer than a sector"));
            }
        };
        let (left, right) = (extent.start < start, extent.end > end);
        if !r.is_hole() {
            let len = extent.end.min(end) - extent.start.max(start);
            self.nbytes -= i128::from(len);
        }
        let kept = left.then(|| r.part(0..start - extent.start).encode().to_vec());
        self.items.insert(extent.start, (true, kept));
        if right {
            let rest = r.part(end - extent.start..extent.end - extent.start);
            self.items.insert(end, (false, Some(rest.encode().to_vec())));
        }
        match (left, right) {
            (false, false) => self.refer(extent.start, &r, Delta::Drop),
            (true, true) => self.refer(extent.start, &r, Delta::Add),
            _ => {}
        }
        Ok(())
    }
    fn put(&mut self, start: u64, data: Vec<u8>) {
        self.items.entry(start).or_insert((false, None)).1 = Some(data);
    }
    /// Makes the items cover the file up to `start`, where an image wants holes to have items.
    fn fill_hole(&mut self, before: Option<&Extent>, start: u64, generation: Generation) {
        let from = before.map_or(0, |e| e.end);
        if from >= start {
            return;
        }
        self.covered_from = Some(from);
        match before.map(|e| (e.start, e.content)) {
            Some((at, Content::Stored(r))) if r.is_hole() => {
                self.items.insert(
                    at,
                    (true, Some(ExtentRecord::hole(generation, start - at).encode().to_vec())),
                );
            }
            _ => self.put(from, ExtentRecord::hole(generation, start - from).encode().to_vec()),
        }
    }
    /// Puts a window in. If the item before it, or the one behind it, is a part of the same extent
    /// that joins it without a gap, they become one.
    fn put_extent(
        &mut self,
        (before, after): (Neighbour<'_>, Neighbour<'_>),
        start: u64,
        new: &ExtentRecord,
        create: bool,
    ) {
        self.nbytes += i128::from(new.num_bytes);
        let mut new = *new;
        if let Some((next, r)) = after.and_then(|next| Some((next, next.stored()?)))
            && !create
            && next.start == start + new.num_bytes
            && continues(&new, r)
        {
            new.num_bytes += r.num_bytes;
            new.generation = new.generation.max(r.generation);
            self.items.insert(next.start, (true, None));
            self.refer(next.start, r, Delta::Drop);
        }
        if let Some((last, r)) = before.and_then(|last| Some((last, last.stored()?)))
            && !create
            && last.end == start
            && continues(r, &new)
        {
            let generation = new.generation.max(r.generation);
            let grown = ExtentRecord { generation, num_bytes: r.num_bytes + new.num_bytes, ..*r };
            self.items.insert(last.start, (true, Some(grown.encode().to_vec())));
            return;
        }
        self.refer(start, &new, if create { Delta::Create } else { Delta::Add });
        self.put(start, new.encode().to_vec());
    }
    /// Carries the plan out. The range is the part of the file that it changes.
    fn apply(self, h: &mut Handle<'_>, inode: &Arc<Inode>, range: Range<u64>) -> Result<()> {
        note_all(h, inode, &self.refs)?;
        if let Err(e) = self.edit(h, inode) {
            take_back(h, inode, &self.refs)?;
            return Err(e);
        }
        let generation = h.generation();
        // Noted behind the edit. The log takes this first and looks at the tree afterwards, so it
        // finds there what this says. A hole that got its item is a change as well: the last commit
        // may have nothing in its place.
        let start = self.covered_from.map_or(range.start, |from| from.min(range.start));
        inode.changes.lock().add(generation, start..range.end);
        {
            let mut state = inode.state.lock();
            // A damaged image may have a wrong value here.
            let nbytes =
                (i128::from(state.item.nbytes.get()) + self.nbytes).clamp(0, i128::from(u64::MAX));
            state.item.nbytes = u64::try_from(nbytes).expect("clamped").into();
            state.item.transid = generation.0.into();
            state.changed_in(generation);
        }
        h.mark_dirty(inode);
        Ok(())
    }
    /// Writes the items.
    fn edit(&self, h: &mut Handle<'_>, inode: &Inode) -> Result<()> {
        if self.items.is_empty() {
            return Ok(());
        }
        let key = |at: u64| extent_data_key(inode.object(), FileOffset(at));
        let keys: SmallVec<[Key; 4]> = self.items.keys().map(|at| key(*at)).collect();
        let growing = self.items.values().filter(|(_, now)| now.is_some()).count();
        h.edit_growing(&inode.subvol, &keys, growing, |e: &mut Editor<'_>| {
            for (at, (existed, _)) in &self.items {
                let found = e.get(&key(*at)).is_some();
                assert_eq!(found, *existed, "extent items changed although their lock is held");
            }
            for (at, (existed, now)) in &self.items {
                match now {
                    Some(data) if *existed => e.update(&key(*at), data)?,
                    Some(data) => e.insert(&key(*at), data)?,
                    None if *existed => e.delete(&key(*at))?,
                    None => {}
                }
            }
            Ok(())
        })
    }
}

/// Notes changes of references: all of them or none.
fn note_all(h: &mut Handle<'_>, inode: &Inode, changes: &[RefChange]) -> Result<()> {
    for (noted, change) in changes.iter().enumerate() {
        if let Err(e) = note(h, inode, change) {
            take_back(h, inode, &changes[..noted])?;
            return Err(e);
        }
    }
    Ok(())
}

/// Takes back what was noted. The commit frees an extent that was created and dropped again.
fn take_back(h: &mut Handle<'_>, inode: &Inode, noted: &[RefChange]) -> Result<()> {
    noted.iter().try_for_each(|change| {
        let delta = if change.delta == Delta::Drop { Delta::Add } else { Delta::Drop };
        note(h, inode, &RefChange { delta, ..*change })
    })
}

fn note(h: &mut Handle<'_>, inode: &Inode, c: &RefChange) -> Result<()> {
    let extent = Run::new(c.at, c.len);
    let user = ExtentRef::data(inode.id.subvol, inode.object(), FileOffset(c.offset), 0);
    match c.delta {
        Delta::Create => h.create_data(extent, user),
        Delta::Add => h.add_data_ref(extent, user),
        Delta::Drop => h.drop_data_ref(extent, user),
    }
}

/// The references to extents of a file that is deleted as a whole. They are gathered from its
/// items, and dropped together with the edit that deletes the items.
#[derive(Debug, Default)]
pub(crate) struct LastRefs {
    refs: SmallVec<[RefChange; 4]>,
    reached: u64,
    keys: SmallVec<[Key; 4]>,
    /// How often data of the subvolume had moved before the items were read.
    moves: u64,
}

impl LastRefs {
    /// Nothing so far. The items are read after data has moved so often.
    pub(crate) fn since(moves: u64) -> Self {
        Self { moves, ..Self::default() }
    }
    /// Takes what the next extent item of the file refers to.
    ///
    /// # Errors
    /// `Corrupt`, as [`ExtentCursor`] reports it.
    pub(crate) fn add(&mut self, tree: TreeId, item: &Item) -> Result<()> {
        let extent = Extent::parse(tree, item.clone())?;
        extent.follows(tree, self.reached)?;
        self.reached = extent.end;
        self.keys.push(item.key);
        if let Some(r) = extent.stored().filter(|r| !r.is_hole()) {
            let offset = ref_offset(extent.start, r);
            let (at, len) = (r.disk_bytenr, r.disk_num_bytes);
            self.refs.push(RefChange { at, len, offset, delta: Delta::Drop });
        }
        Ok(())
    }
    /// Notes that the references are gone and runs `edit`, which deletes the items. The file has no
    /// delayed data, and the caller makes sure that it gets none.
    ///
    /// # Errors
    /// The errors of `edit`; `Corrupt` where the file refers to an extent that it cannot have.
    /// Nothing is changed then.
    pub(crate) fn drop_with(
        &self,
        h: &mut Handle<'_>,
        inode: &Inode,
        edit: impl FnOnce(&mut Handle<'_>) -> Result<()>,
    ) -> Result<()> {
        let _extents = inode.lock_extents();
        let again;
        let refs = if inode.subvol.moves() == self.moves {
            &self.refs
        } else {
            again = self.read_again(h, inode)?;
            &again.refs
        };
        note_all(h, inode, refs)?;
        let done = edit(h);
        if done.is_err() {
            take_back(h, inode, refs)?;
        }
        done
    }
    /// The same items, as they are now.
    fn read_again(&self, h: &Handle<'_>, inode: &Inode) -> Result<Self> {
        let version = inode.subvol.version(h.ground);
        let mut now = Self::since(inode.subvol.moves());
        for key in &self.keys {
            if let Some(item) = version.get(key)? {
                now.add(inode.subvol.id, &item)?;
            }
        }
        Ok(now)
    }
}

/// An extent for a range of a file that has none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    /// Where the range begins.
    pub(super) start: u64,
    /// Where the extent lies. All of it belongs to the range.
    pub(super) run: Run,
}

impl Fresh {
    fn record(&self, generation: Generation) -> ExtentRecord {
        ExtentRecord {
            generation,
            ram_bytes: self.run.len,
            compression: Compression::None,
            kind: ExtentKind::Regular,
            disk_bytenr: self.run.start,
            disk_num_bytes: self.run.len,
            offset: 0,
            num_bytes: self.run.len,
        }
    }
}

/// Extents that one edit enters at most.
pub(super) const MAX_FRESH: usize = 64;
/// Insertions for which an edit of many is prepared: small items that lie side by side split few
/// leaves.
const PREPARED: usize = 4;
/// Extents between two ranges that are skipped one by one.
const SKIPPED: usize = 8;

/// Enters extents in ascending order, all in one edit, where the file has nothing and holes need no
/// items. This is what many small writes at random places become. Returns how many of the first
/// ones were entered. For the next one the caller uses [`replace`], which also tells what went
/// wrong. The caller holds the inode's extent lock. `noted` runs once, for the extents that are
/// about to be entered, before anything can see them.
pub(super) fn fill_holes(
    h: &mut Handle<'_>,
    inode: &Arc<Inode>,
    fresh: &[Fresh],
    noted: impl FnOnce(&mut Handle<'_>, usize),
) -> usize {
    if !has_no_holes(h.ground) {
        return 0;
    }
    let Ok(count) = count_in_holes(h.ground, inode, fresh) else { return 0 };
    let user = |at| ExtentRef::data(inode.id.subvol, inode.object(), FileOffset(at), 0);
    let count = h.create_data_extents(fresh[..count].iter().map(|f| (f.run, user(f.start))));
    let fresh = &fresh[..count];
    if fresh.is_empty() {
        return 0;
    }
    noted(h, count);
    let generation = h.generation();
    let keys: SmallVec<[Key; MAX_FRESH]> =
        fresh.iter().map(|f| extent_data_key(inode.object(), FileOffset(f.start))).collect();
    let entered = h.edit_growing(&inode.subvol, &keys, count.min(PREPARED), |e| {
        let mut entered = 0;
        for (key, f) in keys.iter().zip(fresh) {
            if !e.has_room() {
                break;
            }
            e.insert(key, &f.record(generation).encode())?;
            entered += 1;
        }
        Ok(entered)
    });
    // An edit that fails has changed nothing, unless it has ended writing.
    let entered = entered.unwrap_or(0);
    h.forget_data_extents(fresh[entered..].iter().map(|f| f.run.start));
    if entered > 0 {
        note_entered(inode, &fresh[..entered], generation);
    }
    entered
}

/// Notes with the inode that these extents have been entered.
fn note_entered(inode: &Inode, fresh: &[Fresh], generation: Generation) {
    let mut changes = inode.changes.lock();
    fresh.iter().for_each(|f| changes.add(generation, f.start..f.start + f.run.len));
    drop(changes);
    let bytes: u64 = fresh.iter().map(|f| f.run.len).sum();
    let mut state = inode.state.lock();
    state.item.nbytes = state.item.nbytes.get().saturating_add(bytes).into();
    state.item.transid = generation.0.into();
    state.changed_in(generation);
}

/// How many of the first ranges lie in holes.
fn count_in_holes(ground: &Ground, inode: &Inode, fresh: &[Fresh]) -> Result<usize> {
    let Some(first) = fresh.first() else { return Ok(0) };
    assert!(fresh.is_sorted_by(|a, b| a.start + a.run.len <= b.start), "ranges ascend");
    let version = inode.subvol.version(ground);
    let ino = ObjectId(inode.id.ino);
    let mut cursor = ExtentCursor::new(&version, ino, first.start)?;
    let mut next = cursor.next()?;
    for (count, f) in fresh.iter().enumerate() {
        let mut skipped = 0;
        while next.as_ref().is_some_and(|e| e.end <= f.start) {
            skipped += 1;
            if skipped > SKIPPED {
                cursor = ExtentCursor::new(&version, ino, f.start)?;
            }
            next = cursor.next()?;
        }
        if next.as_ref().is_some_and(|e| e.start < f.start + f.run.len) {
            return Ok(count);
        }
    }
    Ok(fresh.len())
}

/// Does this image have holes without items?
pub(crate) fn has_no_holes(ground: &Ground) -> bool {
    Incompat::from_bits_retain(ground.superblock.lock().incompat_flags.get())
        .contains(Incompat::NO_HOLES)
}

/// Replaces a range (sector-aligned) or a first part of it, as far as one edit reaches, and returns
/// where it stopped. The caller holds the inode's extent lock.
///
/// If `new` is an extent to be created, it belongs to the transaction as soon as it is recorded,
/// also if this function fails later. `*created` says whether it was recorded.
///
/// # Errors
/// Reading, corruption, no space; nothing is changed then.
pub(super) fn replace(
    h: &mut Handle<'_>,
    inode: &Arc<Inode>,
    range: Range<u64>,
    new: New<'_>,
    created: &mut bool,
) -> Result<u64> {
    assert!(
        range.start < range.end
            && range.start.is_multiple_of(SECTOR)
            && range.end.is_multiple_of(SECTOR),
        "{range:?}"
    );
    let moves = inode.subvol.moves();
    let version = inode.subvol.version(h.ground);
    let mut cursor = ExtentCursor::new(&version, inode.object(), range.start)?;
    let mut plan = Plan::default();
    let before = cursor.before().cloned();
    let after = plan.cut(&mut cursor, inode.id.subvol, &range)?;
    // What begins before the range ends the gap, too. It was found as the first extent, and
    // trimmed.
    let reaches_in = plan.items.first_key_value().is_some_and(|(at, _)| *at < range.start);
    let start = range.start;
    let replaced = Replaced {
        range,
        before: before.as_ref().filter(|_| !reaches_in),
        after: after.as_ref(),
        reaches_in,
        explicit: !has_no_holes(h.ground),
        generation: h.generation(),
    };
    replaced.put(&mut plan, inode, new, created);
    let reached = plan.reached;
    drop((cursor, before, version));
    if fault!(h.ground.options.tuning, RelocationBesideEdits) {
        let has_moved = |()| inode.subvol.moves() != moves;
        let _ = (0..100_000).map(|_| std::thread::yield_now()).find(|()| has_moved(()));
    }
    plan.apply(h, inode, start..reached)?;
    Ok(reached)
}

/// A range that has been cut out of a plan, and what is around it.
struct Replaced<'a> {
    range: Range<u64>,
    /// The extent that ends before the range. It is of no interest if another one reaches in.
    before: Neighbour<'a>,
    after: Neighbour<'a>,
    /// Does an extent begin before the range that was trimmed?
    reaches_in: bool,
    /// Do holes have items?
    explicit: bool,
    generation: Generation,
}

impl Replaced<'_> {
    /// Puts the new content in.
    fn put(&self, plan: &mut Plan, inode: &Inode, new: New<'_>, created: &mut bool) {
        let start = self.range.start;
        if !matches!(new, New::Nothing | New::Hole) && !self.reaches_in && self.explicit {
            plan.fill_hole(self.before, start, self.generation);
        }
        match new {
            New::Nothing => {}
            New::Hole => self.put_hole(plan, inode),
            New::Inline { data, ram_bytes, compression } => {
                let generation = self.generation;
                let item = InlineExtent { generation, ram_bytes, compression, data };
                plan.nbytes += i128::from(ram_bytes);
                plan.put(start, item.encode());
            }
            New::Extent { kind, at, len, ram_bytes, compression, offset, create, born } => {
                let record = ExtentRecord {
                    generation: born.unwrap_or(self.generation),
                    ram_bytes,
                    compression,
                    kind,
                    disk_bytenr: at,
                    disk_num_bytes: len,
                    offset,
                    num_bytes: plan.reached - start,
                };
                plan.put_extent((self.before, self.after), start, &record, create);
                *created |= create;
            }
        }
    }
    /// Where holes have items they have them up to the file's end, and up to what is preallocated
    /// behind it: the file may grow.
    fn put_hole(&self, plan: &mut Plan, inode: &Inode) {
        let Range { start, end } = self.range;
        let more = self.after.is_some() || plan.reached < end || plan.items.contains_key(&end);
        let file_end = ceil(inode.state.lock().size.min(MAX_FILE_SIZE));
        let hole_end = if more { plan.reached } else { plan.reached.min(file_end) };
        if !self.explicit || start >= hole_end {
            return;
        }
        if self.reaches_in {
            let hole = ExtentRecord::hole(self.generation, hole_end - start);
            plan.put(start, hole.encode().to_vec());
        } else {
            plan.fill_hole(self.before, hole_end, self.generation);
        }
    }
}

/// Makes the items cover the file up to `size` where an image wants holes to have items. The caller
/// holds the inode's extent lock.
///
/// # Errors
/// Reading, corruption, no space.
pub(super) fn cover(h: &mut Handle<'_>, inode: &Arc<Inode>, size: u64) -> Result<()> {
    if has_no_holes(h.ground) {
        return Ok(());
    }
    let end = ceil(size.min(MAX_FILE_SIZE));
    let version = inode.subvol.version(h.ground);
    let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), end)?;
    if cursor.next()?.is_some_and(|e| e.start < end) {
        return Ok(());
    }
    let before = cursor.before().cloned();
    let mut plan = Plan::default();
    let start = before.as_ref().map_or(0, |e| e.start.min(end));
    plan.fill_hole(before.as_ref(), end, h.generation());
    drop((cursor, before, version));
    plan.apply(h, inode, start..end)
}
