//! Extents that lie behind each other, in the file and on the device, become one.
//!
//! Write-back takes a file in pieces, because it must not hold more in memory than the budget
//! allows. So a stream of data would become as many extents as there were pieces. But an extent
//! that the running transaction has made is in no tree on the device yet, and can still grow, up to
//! the largest extent that the format allows.
//!
//! Nothing else may refer to either of the two extents; the notes of the transaction say whether
//! anything does. Also, no log may have them. Another file may come to share an extent that has
//! grown, and a log with both the old and the new extent would have two extents in one place. The
//! pieces may complete in any order: each joins what is before it and what is behind it.

use super::extents::{Content, Extent, ExtentCursor};
use crate::engine::Inode;
use crate::error::Result;
use crate::space::refs::DelayedRefs;
use crate::transaction::{Ground, Handle};
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, ExtentRef};
use larder_format::{FileOffset, Generation, Logical, MAX_DATA_EXTENT, ObjectId};
use std::ops::Range;
use std::sync::Arc;

/// Shorter pieces are not examined: they come from small or scattered writes, and looking has a
/// cost.
pub(super) const WORTH_IT: u64 = 256 << 10;

/// A whole extent of the running transaction, and its place in the file.
#[derive(Clone, Copy, Debug)]
struct Whole {
    start: u64,
    record: ExtentRecord,
}

impl Whole {
    fn of(extent: &Extent, generation: Generation) -> Option<Self> {
        let Content::Stored(r) = extent.content else { return None };
        let plain =
            r.kind == ExtentKind::Regular && r.compression == Compression::None && !r.is_hole();
        let whole = r.offset == 0 && r.num_bytes == r.disk_num_bytes && r.ram_bytes == r.num_bytes;
        (plain && whole && r.generation == generation)
            .then_some(Self { start: extent.start, record: r })
    }
    fn at(&self) -> Logical {
        self.record.disk_bytenr
    }
    fn len(&self) -> u64 {
        self.record.num_bytes
    }
    /// The one reference that it is allowed to have.
    fn reference(&self, inode: &Inode) -> ExtentRef {
        ExtentRef::data(inode.id.subvol, inode.object(), FileOffset(self.start), 0)
    }
    fn joined(&self, next: &Self) -> Self {
        let len = self.len() + next.len();
        let record =
            ExtentRecord { ram_bytes: len, disk_num_bytes: len, num_bytes: len, ..self.record };
        Self { start: self.start, record }
    }
    /// Does `next` follow directly behind this one, in the file and on the device?
    fn goes_on(&self, next: &Self, ground: &Ground) -> bool {
        self.start + self.len() == next.start
            && self.at().plus(self.len()) == next.at()
            && self.len() + next.len() <= MAX_DATA_EXTENT
            && ground.space.same_group(self.at(), next.at())
    }
}

/// Joins the extent that was just entered for a range of the file with its neighbours where that is
/// possible. The caller holds the inode's extent lock.
///
/// # Errors
/// Reading, corruption, no space; nothing is changed then.
pub(super) fn join(h: &mut Handle<'_>, inode: &Arc<Inode>, range: &Range<u64>) -> Result<()> {
    if range.end - range.start < WORTH_IT || inode.has_logged_extents(h) {
        return Ok(());
    }
    let version = inode.subvol.version(h.ground);
    let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), range.start)?;
    let generation = h.generation();
    let whole = |e: &Extent| Whole::of(e, generation);
    let before = cursor.before().and_then(whole);
    let Some(mut this) = cursor.next()?.as_ref().and_then(whole).filter(|e| e.start == range.start)
    else {
        return Ok(());
    };
    let after = cursor.next()?.as_ref().and_then(whole);
    drop((cursor, version));
    if let Some(before) = before
        && before.goes_on(&this, h.ground)
        && join_two(h, inode, &before, &this)?
    {
        this = before.joined(&this);
    }
    if let Some(after) = after
        && this.goes_on(&after, h.ground)
    {
        join_two(h, inode, &this, &after)?;
    }
    Ok(())
}

/// Makes two neighbours one; false if one of them has another reference.
fn join_two(h: &mut Handle<'_>, inode: &Arc<Inode>, left: &Whole, right: &Whole) -> Result<bool> {
    let key = |e: &Whole| extent_data_key(ObjectId(inode.id.ino), FileOffset(e.start));
    let sides = |e: &Whole| (e.at(), e.len(), e.reference(inode));
    let change = |f: &dyn Fn(&mut DelayedRefs) -> bool| f(&mut h.txn.refs.lock());
    let forget = fault!(h.ground.options.tuning, LogSharedGrow);
    if !change(&|refs| refs.join_created(sides(left), sides(right), forget)) {
        return Ok(false);
    }
    let record = left.joined(right).record.encode();
    let done = h.edit_growing(&inode.subvol, &[key(left), key(right)], 0, |e| {
        e.update(&key(left), &record)?;
        e.delete(&key(right))
    });
    if done.is_err() {
        let generation = h.generation();
        h.txn.refs.lock().split_created(sides(left), sides(right), generation);
    }
    if done.is_ok() {
        inode.changes.lock().add(h.generation(), left.start..right.start + right.len());
        inode.state.lock().changed_in(h.generation());
    }
    done.map(|()| true)
}
