//! The free-space tree against the extent tree.
//!
//! Per block group its entries are counted, and their ranges go into the sum that says whether
//! allocated and free ranges tile the group ([`crate::extents`]). Only for a group that is not
//! tiled are both trees read side by side.

use crate::chunks::Chunk;
use crate::finding::{Finding, Kind};
use crate::source::Edge;
use crate::walk::scan;
use crate::world::World;
use larder_format::items::FreeSpaceInfo;
use larder_format::{Key, KeyType, Logical, LogicalRange, ObjectId, SECTOR_SIZE, TreeId};
use std::collections::BTreeSet;
use std::ops::ControlFlow;

const SECTOR: u64 = SECTOR_SIZE as u64;
/// Most ranges of a block group that are compared one by one.
const RANGES: usize = 2_000_000;

/// The group whose entries are being read.
struct Group {
    range: LogicalRange,
    key: Key,
    bitmaps: bool,
    count: u64,
    /// Runs so far, and where the last one ends.
    runs: u64,
    last: Logical,
}

struct Reader<'a> {
    world: &'a World<'a>,
    group: Option<Group>,
    seen: BTreeSet<Logical>,
    /// End of the last range without a block group, which is said once.
    strange_until: Logical,
}

/// Checks the free-space tree; its nodes have been judged already.
pub(crate) fn check(world: &World<'_>, root: &Edge, extent_root: Option<&Edge>) {
    let mut reader =
        Reader { world, group: None, seen: BTreeSet::new(), strange_until: Logical(0) };
    scan(&world.source, root, Key::MIN, Key::MAX, &mut |key, data| {
        reader.item(key, data);
        ControlFlow::Continue(())
    });
    reader.finish_group();
    let lost = world.lost.part_of(ObjectId::FREE_SPACE_TREE);
    for chunk in world.chunks.0.iter().filter(|c| !reader.seen.contains(&c.start)) {
        let what = format!("the block group at {} has no info item", chunk.start);
        let finding =
            Finding::new(Kind::FreeSpaceInfoMissing, what).tree(ObjectId::FREE_SPACE_TREE);
        world.add(finding.address(chunk.start).follow_up_if(lost));
    }
    let Some(extent_root) = extent_root else { return };
    for chunk in &world.chunks.0 {
        if reader.seen.contains(&chunk.start) && !chunk.is_tiled(&world.hashing) {
            look_closer(world, root, extent_root, chunk);
        }
    }
}

impl Reader<'_> {
    fn add(&self, kind: Kind, key: Key, what: String) {
        let at = Logical(key.objectid.0);
        self.world
            .add(Finding::new(kind, what).tree(ObjectId::FREE_SPACE_TREE).key(key).address(at));
    }

    /// What it means that no block group lies there: mkfs leaves entries of its first groups
    /// behind, below all others.
    fn stranger(&self, start: Logical) -> Kind {
        let below = self.world.chunks.0.first().is_some_and(|first| start < first.start);
        if below { Kind::FreeSpaceWithoutBlockGroup } else { Kind::FreeSpaceOverlap }
    }

    fn item(&mut self, key: Key, data: &[u8]) {
        let range = LogicalRange::new(Logical(key.objectid.0), key.offset);
        if key.kind == KeyType::FREE_SPACE_INFO {
            return self.info(key, range, data);
        }
        let is_bitmap = key.kind == KeyType::FREE_SPACE_BITMAP;
        if !is_bitmap && key.kind != KeyType::FREE_SPACE_EXTENT {
            return;
        }
        let Some(mut group) = self.group.take() else {
            if range.end <= self.strange_until {
                return;
            }
            let (start, len) = (range.start, key.offset);
            let what = format!("free space at {start} (+{len}) belongs to no block group");
            let known = self.world.chunks.find(start).is_some();
            let kind = if known { Kind::FreeSpaceInfoMissing } else { Kind::FreeSpaceOverlap };
            return self.add(kind, key, what);
        };
        if !group.range.covers(range) {
            let what = format!(
                "{} (+{}) lies outside of the block group at {}",
                range.start, key.offset, group.range.start
            );
            self.add(Kind::FreeSpaceOverlap, key, what);
        } else {
            if is_bitmap != group.bitmaps {
                let form = |bitmaps| if bitmaps { "bitmaps" } else { "extents" };
                let what = format!(
                    "the info item says {}, this is of {}",
                    form(group.bitmaps),
                    form(is_bitmap)
                );
                self.add(Kind::FreeSpaceForm, key, what);
            }
            if is_bitmap {
                for run in bitmap_runs(range, data) {
                    self.run(&mut group, key, run, true);
                }
            } else {
                self.run(&mut group, key, range, false);
            }
        }
        self.group = Some(group);
    }

    /// An info item: a group begins.
    fn info(&mut self, key: Key, range: LogicalRange, data: &[u8]) {
        self.finish_group();
        let chunk = self.world.chunks.starting_at(range.start);
        let Some(chunk) = chunk.filter(|c| c.end() == range.end) else {
            let what = format!("no block group lies at {} (+{})", range.start, key.offset);
            self.strange_until = range.end;
            return self.add(self.stranger(range.start), key, what);
        };
        self.seen.insert(chunk.start);
        let (count, bitmaps) = match FreeSpaceInfo::parse(data) {
            Ok(info) => (info.extent_count.get().into(), info.uses_bitmaps()),
            Err(e) => {
                self.add(Kind::FreeSpaceItemInvalid, key, e.to_string());
                (u64::MAX, false)
            }
        };
        self.group = Some(Group { range, key, bitmaps, count, runs: 0, last: Logical(0) });
    }

    /// A run of free space; `joins` what the bitmap before it ended with, if that ends here.
    fn run(&self, group: &mut Group, key: Key, run: LogicalRange, joins: bool) {
        let (from, to) = (run.start, run.end);
        if from < group.last {
            let what =
                format!("{from} to {to} is listed as free, and so is all up to {}", group.last);
            self.add(Kind::FreeSpaceOverlap, key, what);
        }
        // A run may be cut where one bitmap ends and the next begins; it counts once.
        let goes_on = from == group.last && from != group.range.start;
        if !(joins && goes_on) {
            group.runs += 1;
        }
        if goes_on && !joins {
            self.add(
                Kind::FreeSpaceForm,
                key,
                format!("one run of free space is two entries, cut at {from}"),
            );
        }
        group.last = group.last.max(to);
        if let Some(chunk) = self.world.chunks.starting_at(group.range.start) {
            chunk.tile(&self.world.hashing, run);
        }
    }

    fn finish_group(&mut self) {
        let Some(group) = self.group.take() else { return };
        if group.runs != group.count && group.count != u64::MAX {
            let what =
                format!("extent_count is {}, but there are {} runs", group.count, group.runs);
            let lost = self.world.lost.part_of(ObjectId::FREE_SPACE_TREE);
            let finding = Finding::new(Kind::FreeSpaceCount, what).tree(ObjectId::FREE_SPACE_TREE);
            let finding = finding.key(group.key).address(group.range.start);
            self.world.add(finding.follow_up_if(lost));
        }
    }
}

/// Runs of set bits in the bitmap of a range.
fn bitmap_runs(range: LogicalRange, data: &[u8]) -> Vec<LogicalRange> {
    let mut runs: Vec<LogicalRange> = Vec::new();
    let sectors = range.len() / SECTOR;
    for (n, byte) in data.iter().enumerate().filter(|(_, b)| **b != 0) {
        for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
            let sector = n as u64 * 8 + bit;
            if sector >= sectors {
                break;
            }
            let here = LogicalRange::new(range.start.plus(sector * SECTOR), SECTOR);
            match runs.last_mut() {
                Some(run) if run.end == here.start => run.end = here.end,
                _ => runs.push(here),
            }
        }
    }
    runs
}

/// Reads both trees for a block group that is not tiled.
fn look_closer(world: &World<'_>, root: &Edge, extent_root: &Edge, chunk: &Chunk) {
    let mut free = Vec::new();
    let lost = scan(&world.source, root, first_key(chunk), last_key(chunk), &mut |key, data| {
        let range = LogicalRange::new(Logical(key.objectid.0), key.offset);
        let range = range.intersection(chunk.range());
        match key.kind {
            KeyType::FREE_SPACE_EXTENT => free.push(range),
            KeyType::FREE_SPACE_BITMAP => free.extend(bitmap_runs(range, data)),
            _ => {}
        }
        if free.len() < RANGES { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    let listed = Listed {
        free,
        lost,
        tree: ObjectId::FREE_SPACE_TREE,
        allocated: Kind::FreeSpaceAllocated,
        missing: Kind::FreeSpaceMissing,
    };
    listed.compare(world, extent_root, chunk);
}

fn first_key(chunk: &Chunk) -> Key {
    Key::new(chunk.start, KeyType(0), 0)
}
fn last_key(chunk: &Chunk) -> Key {
    Key::new(chunk.end().0 - 1, KeyType(u8::MAX), u64::MAX)
}

/// What something lists as a block group's free space.
pub(crate) struct Listed {
    /// Ranges, ascending, none beyond the group's end.
    pub(crate) free: Vec<LogicalRange>,
    /// Part of the list could not be read.
    pub(crate) lost: bool,
    /// Where the list stands.
    pub(crate) tree: TreeId,
    /// Kinds of findings: a listed range is allocated; a range is in neither.
    pub(crate) allocated: Kind,
    pub(crate) missing: Kind,
}

impl Listed {
    /// Compares it with the extent tree, and reports each range in which they disagree.
    pub(crate) fn compare(mut self, world: &World<'_>, extent_root: &Edge, chunk: &Chunk) {
        let start = chunk.start;
        let nodesize = u64::from(world.source.nodesize());
        let mut allocated = Vec::new();
        let lost_extents =
            scan(&world.source, extent_root, first_key(chunk), last_key(chunk), &mut |key, _| {
                let len = match key.kind {
                    KeyType::EXTENT_ITEM => key.offset,
                    KeyType::METADATA_ITEM => nodesize,
                    _ => return ControlFlow::Continue(()),
                };
                let extent = LogicalRange::new(Logical(key.objectid.0), len);
                allocated.push(extent.intersection(chunk.range()));
                if allocated.len() < RANGES {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            });
        if allocated.len() >= RANGES || self.free.len() >= RANGES {
            let what = format!(
                "the block group at {start} is too fragmented to say where free space is wrong"
            );
            world.add(Finding::new(Kind::NotChecked, what).address(start));
        }
        for LogicalRange { start, end } in intersection(&allocated, &self.free) {
            let what = format!("{start} to {end} is listed as free, and is allocated");
            let finding = Finding::new(self.allocated, what).tree(self.tree);
            world.add(finding.address(start).follow_up_if(self.lost));
        }
        allocated.append(&mut self.free);
        for LogicalRange { start, end } in gaps(allocated, chunk.range()) {
            let what = format!("{start} to {end} is not allocated, and not listed as free");
            let finding = Finding::new(self.missing, what).tree(self.tree);
            world.add(finding.address(start).follow_up_if(lost_extents || self.lost));
        }
    }
}

/// What two ascending lists of ranges share.
fn intersection(a: &[LogicalRange], b: &[LogicalRange]) -> Vec<LogicalRange> {
    let (mut i, mut k) = (0, 0);
    let mut out: Vec<LogicalRange> = Vec::new();
    while let (Some(x), Some(y)) = (a.get(i), b.get(k)) {
        let shared = x.intersection(*y);
        if !shared.is_empty() {
            match out.last_mut() {
                Some(last) if last.end == shared.start => last.end = shared.end,
                _ => out.push(shared),
            }
        }
        if x.end <= y.end { i += 1 } else { k += 1 }
    }
    out
}

/// What no range covers of the whole.
fn gaps(mut ranges: Vec<LogicalRange>, whole: LogicalRange) -> Vec<LogicalRange> {
    ranges.sort_unstable();
    let mut out = Vec::new();
    let mut at = whole.start;
    for range in ranges {
        if range.start > at {
            out.push(LogicalRange::between(at, range.start));
        }
        at = at.max(range.end);
    }
    if at < whole.end {
        out.push(LogicalRange::between(at, whole.end));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn range(r: Range<u64>) -> LogicalRange {
        LogicalRange::between(Logical(r.start), Logical(r.end))
    }

    #[test]
    fn ranges_are_compared() {
        assert_eq!(
            intersection(&[range(0..10), range(20..30)], &[range(5..25), range(29..40)]),
            [range(5..10), range(20..25), range(29..30)]
        );
        assert_eq!(
            gaps(vec![range(10..20), range(0..5), range(15..30)], range(0..40)),
            [range(5..10), range(30..40)]
        );
    }

    #[test]
    fn runs_of_a_bitmap_join_and_end_with_their_range() {
        let at = |n: u64| (1 << 20) + n * SECTOR;
        let runs = bitmap_runs(range(at(0)..at(16)), &[0b1000_0011, 0b0000_0001]);
        assert_eq!(runs, [range(at(0)..at(2)), range(at(7)..at(9))]);
        let four = range(0..4 * SECTOR);
        assert_eq!(bitmap_runs(four, &[0xff]), [four], "bits behind the end say nothing");
    }
}
