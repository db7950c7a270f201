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
use larder_format::{Key, KeyType, Logical, ObjectId, SECTOR_SIZE, TreeId};
use std::collections::BTreeSet;
use std::ops::ControlFlow;

const SECTOR: u64 = SECTOR_SIZE as u64;
/// Most ranges of a block group that are compared one by one.
const RANGES: usize = 2_000_000;

/// The group whose entries are being read.
struct Group {
    start: u64,
    end: u64,
    key: Key,
    bitmaps: bool,
    count: u64,
    /// Runs so far, and where the last one ends.
    runs: u64,
    last: u64,
}

struct Reader<'a> {
    world: &'a World<'a>,
    group: Option<Group>,
    seen: BTreeSet<u64>,
    /// End of the last range without a block group, which is said once.
    strange_until: u64,
}

/// Checks the free-space tree; its nodes have been judged already.
pub(crate) fn check(world: &World<'_>, root: &Edge, extent_root: Option<&Edge>) {
    let mut reader = Reader { world, group: None, seen: BTreeSet::new(), strange_until: 0 };
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
        world.add(finding.address(Logical(chunk.start)).follow_up_if(lost));
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
    fn stranger(&self, start: u64) -> Kind {
        let below = self.world.chunks.0.first().is_some_and(|first| start < first.start);
        if below { Kind::FreeSpaceWithoutBlockGroup } else { Kind::FreeSpaceOverlap }
    }

    fn item(&mut self, key: Key, data: &[u8]) {
        let (start, end) = (key.objectid.0, key.objectid.0.saturating_add(key.offset));
        if key.kind == KeyType::FREE_SPACE_INFO {
            self.finish_group();
            let chunk = self.world.chunks.starting_at(start);
            let Some(chunk) = chunk.filter(|c| c.end() == end) else {
                let what = format!("no block group lies at {start} (+{})", key.offset);
                self.strange_until = end;
                return self.add(self.stranger(start), key, what);
            };
            self.seen.insert(chunk.start);
            let (count, bitmaps) = match FreeSpaceInfo::parse(data) {
                Ok(info) => (info.extent_count.get().into(), info.uses_bitmaps()),
                Err(e) => {
                    self.add(Kind::FreeSpaceItemInvalid, key, e.to_string());
                    (u64::MAX, false)
                }
            };
            self.group = Some(Group { start, end, key, bitmaps, count, runs: 0, last: 0 });
            return;
        }
        let is_bitmap = key.kind == KeyType::FREE_SPACE_BITMAP;
        if !is_bitmap && key.kind != KeyType::FREE_SPACE_EXTENT {
            return;
        }
        let Some(mut group) = self.group.take() else {
            if end <= self.strange_until {
                return;
            }
            let what = format!("free space at {start} (+{}) belongs to no block group", key.offset);
            let known = self.world.chunks.find(start).is_some();
            let kind = if known { Kind::FreeSpaceInfoMissing } else { Kind::FreeSpaceOverlap };
            return self.add(kind, key, what);
        };
        if start < group.start || end > group.end {
            let what = format!(
                "{start} (+{}) lies outside of the block group at {}",
                key.offset, group.start
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
                for (from, to) in bitmap_runs(start, end, data) {
                    self.run(&mut group, key, from, to, true);
                }
            } else {
                self.run(&mut group, key, start, end, false);
            }
        }
        self.group = Some(group);
    }

    fn run(&self, group: &mut Group, key: Key, from: u64, to: u64, joins: bool) {
        if from < group.last {
            let what =
                format!("{from} to {to} is listed as free, and so is all up to {}", group.last);
            self.add(Kind::FreeSpaceOverlap, key, what);
        }
        // A run may be cut where one bitmap ends and the next begins; it counts once.
        let goes_on = from == group.last && from != group.start;
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
        if let Some(chunk) = self.world.chunks.starting_at(group.start) {
            chunk.tile(&self.world.hashing, from, to);
        }
    }

    fn finish_group(&mut self) {
        let Some(group) = self.group.take() else { return };
        if group.runs != group.count && group.count != u64::MAX {
            let what =
                format!("extent_count is {}, but there are {} runs", group.count, group.runs);
            let lost = self.world.lost.part_of(ObjectId::FREE_SPACE_TREE);
            let finding = Finding::new(Kind::FreeSpaceCount, what).tree(ObjectId::FREE_SPACE_TREE);
            self.world.add(finding.key(group.key).address(Logical(group.start)).follow_up_if(lost));
        }
    }
}

/// Runs of set bits.
fn bitmap_runs(start: u64, end: u64, data: &[u8]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let sectors = (end - start) / SECTOR;
    for (n, byte) in data.iter().enumerate().filter(|(_, b)| **b != 0) {
        for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
            let sector = n as u64 * 8 + bit;
            if sector >= sectors {
                break;
            }
            let at = start + sector * SECTOR;
            match runs.last_mut() {
                Some((_, to)) if *to == at => *to += SECTOR,
                _ => runs.push((at, at + SECTOR)),
            }
        }
    }
    runs
}

/// Reads both trees for a block group that is not tiled.
fn look_closer(world: &World<'_>, root: &Edge, extent_root: &Edge, chunk: &Chunk) {
    let (start, end) = (chunk.start, chunk.end());
    let mut free = Vec::new();
    let lost = scan(&world.source, root, first_key(start), last_key(end), &mut |key, data| {
        let (at, len) = (key.objectid.0, key.offset);
        match key.kind {
            KeyType::FREE_SPACE_EXTENT => free.push((at, at.saturating_add(len).min(end))),
            KeyType::FREE_SPACE_BITMAP => {
                free.extend(bitmap_runs(at, at.saturating_add(len).min(end), data))
            }
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

fn first_key(start: u64) -> Key {
    Key::new(start, KeyType(0), 0)
}
fn last_key(end: u64) -> Key {
    Key::new(end - 1, KeyType(u8::MAX), u64::MAX)
}

/// What something lists as a block group's free space.
pub(crate) struct Listed {
    /// Ranges (from, to), ascending, none beyond the group's end.
    pub(crate) free: Vec<(u64, u64)>,
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
        let (start, end) = (chunk.start, chunk.end());
        let nodesize = u64::from(world.source.nodesize());
        let mut allocated = Vec::new();
        let lost_extents =
            scan(&world.source, extent_root, first_key(start), last_key(end), &mut |key, _| {
                let len = match key.kind {
                    KeyType::EXTENT_ITEM => key.offset,
                    KeyType::METADATA_ITEM => nodesize,
                    _ => return ControlFlow::Continue(()),
                };
                allocated.push((key.objectid.0, key.objectid.0.saturating_add(len).min(end)));
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
            world.add(Finding::new(Kind::NotChecked, what).address(Logical(start)));
        }
        for (at, to) in intersection(&allocated, &self.free) {
            let what = format!("{at} to {to} is listed as free, and is allocated");
            let finding = Finding::new(self.allocated, what).tree(self.tree);
            world.add(finding.address(Logical(at)).follow_up_if(self.lost));
        }
        allocated.append(&mut self.free);
        for (at, to) in gaps(allocated, start, end) {
            let what = format!("{at} to {to} is not allocated, and not listed as free");
            let finding = Finding::new(self.missing, what).tree(self.tree);
            world.add(finding.address(Logical(at)).follow_up_if(lost_extents || self.lost));
        }
    }
}

/// What two ascending lists of ranges share.
fn intersection(a: &[(u64, u64)], b: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut i, mut k) = (0, 0);
    let mut out: Vec<(u64, u64)> = Vec::new();
    while let (Some(x), Some(y)) = (a.get(i), b.get(k)) {
        let (from, to) = (x.0.max(y.0), x.1.min(y.1));
        if from < to {
            match out.last_mut() {
                Some((_, end)) if *end == from => *end = to,
                _ => out.push((from, to)),
            }
        }
        if x.1 <= y.1 { i += 1 } else { k += 1 }
    }
    out
}

/// What no range covers.
fn gaps(mut ranges: Vec<(u64, u64)>, start: u64, end: u64) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut out = Vec::new();
    let mut at = start;
    for (from, to) in ranges {
        if from > at {
            out.push((at, from));
        }
        at = at.max(to);
    }
    if at < end {
        out.push((at, end));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_compared() {
        assert_eq!(
            intersection(&[(0, 10), (20, 30)], &[(5, 25), (29, 40)]),
            [(5, 10), (20, 25), (29, 30)]
        );
        assert_eq!(gaps(vec![(10, 20), (0, 5), (15, 30)], 0, 40), [(5, 10), (30, 40)]);
        let runs = bitmap_runs(1 << 20, (1 << 20) + 16 * SECTOR, &[0b1000_0011, 0b0000_0001]);
        let at = |n: u64| (1 << 20) + n * SECTOR;
        assert_eq!(runs, [(at(0), at(2)), (at(7), at(9))]);
        assert_eq!(
            bitmap_runs(0, 4 * SECTOR, &[0xff]),
            [(0, 4 * SECTOR)],
            "bits behind the end say nothing"
        );
    }
}
