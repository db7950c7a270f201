//! File data in a log: is there room for it, and are its checksums there?
//!
//! A file extent in a log names an extent that the extent tree has, exactly, or one that is new:
//! then it lies in free space, which replaying will allocate, and brings its checksums along. Linux
//! refuses a log that allocates what is allocated, and what lacks checksums cannot be read after
//! the replay.

use crate::finding::{Finding, Kind};
use crate::source::Edge;
use crate::walk::scan;
use crate::world::Pass;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, InodeFlags};
use larder_format::{Key, KeyType, Logical, LogicalRange, MAX_DATA_EXTENT, ObjectId};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// Most file extents, ranges of checksums and inodes of one log that are looked at.
const FACTS: usize = 500_000;

/// What a log says of file data.
#[derive(Default)]
pub(super) struct LoggedData {
    extents: Vec<(Key, ExtentRecord)>,
    /// Ranges with checksums.
    sums: Vec<LogicalRange>,
    flags: BTreeMap<u64, InodeFlags>,
    /// Was there more than is kept?
    cut: bool,
}

impl LoggedData {
    pub(super) fn inode(&mut self, ino: ObjectId, flags: InodeFlags) {
        if self.flags.len() < FACTS {
            self.flags.insert(ino.0, flags);
        }
    }
    pub(super) fn sums(&mut self, range: LogicalRange) {
        self.cut |= self.sums.len() >= FACTS;
        if !self.cut {
            self.sums.push(range);
        }
    }
    pub(super) fn extent(&mut self, key: Key, record: &ExtentRecord) {
        if self.extents.len() < FACTS {
            self.extents.push((key, *record));
        }
    }
}

fn range(r: &ExtentRecord) -> LogicalRange {
    LogicalRange::new(r.disk_bytenr, r.disk_num_bytes)
}

/// Reports something that is wrong with a log.
pub(super) fn damaged(pass: &Pass<'_>, key: Key, what: String) {
    pass.add(|| Finding::new(Kind::LogDamaged, what).tree(ObjectId::TREE_LOG).key(key));
}

/// Checks the data of one log. `part_lost`: some of it could not be read.
pub(super) fn check(
    pass: &Pass<'_>,
    extent_root: Option<&Edge>,
    mut data: LoggedData,
    part_lost: bool,
) {
    data.extents.sort_unstable_by_key(|(key, r)| (range(r), *key));
    data.sums.sort_unstable();
    let ranges = disjoint(pass, &data.extents);
    let Some(extent_root) = extent_root else { return };
    let (known, lost) = known_ranges(pass, extent_root, &ranges);
    if lost || data.cut {
        return;
    }
    let is_known = |r: &ExtentRecord| {
        let n = ranges.partition_point(|other| other.range.start < r.disk_bytenr);
        ranges.get(n).is_none_or(|other| other.range.start != r.disk_bytenr || known[n])
    };
    for (key, r) in data.extents.iter().filter(|(_, r)| !is_known(r)) {
        let flags = data.flags.get(&key.objectid.0);
        if r.kind != ExtentKind::Regular || flags.is_none_or(|f| f.contains(InodeFlags::NODATASUM))
        {
            continue;
        }
        let needed = if r.compression == Compression::None {
            LogicalRange::new(r.disk_bytenr.plus(r.offset), r.num_bytes)
        } else {
            range(r)
        };
        if let Some(at) = first_uncovered(&data.sums, needed) {
            let what = format!("data at {at}, new in the log, has no checksum in it");
            let finding =
                Finding::new(Kind::ChecksumMissing, what).tree(ObjectId::TREE_LOG).key(*key);
            pass.add(|| finding.address(at).follow_up_if(part_lost));
        }
    }
}

/// An extent that file extents in the log refer to.
struct Logged {
    range: LogicalRange,
    /// The first that does.
    key: Key,
}

/// The extents that file extents, sorted by address, refer to: each once. Those that overlap the
/// one before are reported.
fn disjoint(pass: &Pass<'_>, extents: &[(Key, ExtentRecord)]) -> Vec<Logged> {
    let mut ranges: Vec<Logged> = Vec::new();
    for (key, r) in extents {
        let range = range(r);
        match ranges.last().map(|last| last.range) {
            Some(last) if last == range => {}
            Some(last) if last.end > range.start => {
                let (at, other) = (range.start, last.start);
                damaged(pass, *key, format!("data at {at} overlaps that at {other} in the log"));
            }
            _ => ranges.push(Logged { range, key: *key }),
        }
    }
    ranges
}

/// Which of the ranges the extent tree has, and whether part of that could not be read. Those that
/// overlap something else in it are reported.
fn known_ranges(pass: &Pass<'_>, root: &Edge, ranges: &[Logged]) -> (Vec<bool>, bool) {
    /// Overlaps that are looked at: extents of a sound tree overlap each range once.
    const OVERLAPS: usize = 4 * FACTS;
    let mut known = vec![false; ranges.len()];
    let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return (known, false) };
    let from = Key::new(first.range.start.0.saturating_sub(MAX_DATA_EXTENT), KeyType(0), 0);
    let to = Key::new(last.range.end, KeyType(u8::MAX), u64::MAX);
    let nodesize = u64::from(pass.world.source.nodesize());
    let mut overlaps = 0;
    let lost = scan(&pass.world.source, root, from, to, &mut |key, _| {
        let len = match key.kind {
            KeyType::EXTENT_ITEM => key.offset,
            KeyType::METADATA_ITEM => nodesize,
            _ => return ControlFlow::Continue(()),
        };
        let extent = LogicalRange::new(Logical(key.objectid.0), len);
        let begin = ranges.partition_point(|r| r.range.end <= extent.start);
        let meets = |r: &Logged| r.range.start < extent.end;
        for (n, r) in ranges.iter().enumerate().skip(begin).take_while(|(_, r)| meets(r)) {
            overlaps += 1;
            if !known[n] && r.range != extent {
                let (from, bytes, at) = (r.range.start, r.range.len(), extent.start);
                let what =
                    format!("data at {from} (+{bytes}) overlaps the extent at {at} (+{len})");
                damaged(pass, r.key, what);
            }
            known[n] = true;
        }
        if overlaps < OVERLAPS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    (known, lost || overlaps >= OVERLAPS)
}

/// First address of a range that none of the sorted ranges covers.
fn first_uncovered(ranges: &[LogicalRange], wanted: LogicalRange) -> Option<Logical> {
    let begin = ranges.partition_point(|range| range.end <= wanted.start);
    let mut at = wanted.start;
    for range in &ranges[begin..] {
        if at >= wanted.end || range.start > at {
            break;
        }
        at = at.max(range.end);
    }
    (at < wanted.end).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    #[test]
    fn gaps_between_checksums_are_found() {
        let range = |r: Range<u64>| LogicalRange::between(Logical(r.start), Logical(r.end));
        let sums = [range(10..20), range(20..30), range(40..50)];
        let uncovered = |wanted| first_uncovered(&sums, range(wanted));
        assert_eq!(uncovered(10..30), None);
        assert_eq!(uncovered(12..25), None);
        assert_eq!(uncovered(25..45), Some(Logical(30)));
        assert_eq!(uncovered(5..15), Some(Logical(5)));
        assert_eq!(uncovered(45..55), Some(Logical(50)));
        assert_eq!(first_uncovered(&[], range(45..55)), Some(Logical(45)));
    }
}
