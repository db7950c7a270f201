//! File data in a log: is there room for it, and are its checksums there?
//!
//! A file extent in a log names an extent that the extent tree has, exactly, or one that is new:
//! then it lies in free space, which replaying will allocate, and brings its checksums along. Linux
//! refuses a log that allocates what is allocated, and what lacks checksums cannot be read after
//! the replay.

use super::damaged;
use crate::finding::{Finding, Kind};
use crate::source::Edge;
use crate::walk::scan;
use crate::world::Pass;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, InodeFlags};
use larder_format::{Key, KeyType, Logical, MAX_DATA_EXTENT, ObjectId, SECTOR_SIZE};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// Most file extents, ranges of checksums and inodes of one log that are looked at.
const FACTS: usize = 500_000;

/// What a log says of file data.
#[derive(Default)]
pub(super) struct LoggedData {
    extents: Vec<(Key, ExtentRecord)>,
    /// Ranges with checksums.
    sums: Vec<(u64, u64)>,
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
    pub(super) fn sums(&mut self, at: u64, sectors: u64) {
        self.cut |= self.sums.len() >= FACTS;
        if !self.cut {
            self.sums.push((at, at.saturating_add(sectors.saturating_mul(u64::from(SECTOR_SIZE)))));
        }
    }
    pub(super) fn extent(&mut self, key: Key, record: &ExtentRecord) {
        if self.extents.len() < FACTS {
            self.extents.push((key, *record));
        }
    }
}

fn range(r: &ExtentRecord) -> (u64, u64) {
    (r.disk_bytenr.0, r.disk_bytenr.0.saturating_add(r.disk_num_bytes))
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
        let n = ranges.partition_point(|other| other.from < r.disk_bytenr.0);
        ranges.get(n).is_none_or(|other| other.from != r.disk_bytenr.0 || known[n])
    };
    for (key, r) in data.extents.iter().filter(|(_, r)| !is_known(r)) {
        let flags = data.flags.get(&key.objectid.0);
        if r.kind != ExtentKind::Regular || flags.is_none_or(|f| f.contains(InodeFlags::NODATASUM))
        {
            continue;
        }
        let (from, to) = if r.compression == Compression::None {
            let from = r.disk_bytenr.0.saturating_add(r.offset);
            (from, from.saturating_add(r.num_bytes))
        } else {
            range(r)
        };
        if let Some(at) = first_uncovered(&data.sums, from, to) {
            let what = format!("data at {at}, new in the log, has no checksum in it");
            let finding =
                Finding::new(Kind::ChecksumMissing, what).tree(ObjectId::TREE_LOG).key(*key);
            pass.add(|| finding.address(Logical(at)).follow_up_if(part_lost));
        }
    }
}

/// An extent that file extents in the log refer to.
struct Range {
    from: u64,
    to: u64,
    /// The first that does.
    key: Key,
}

/// The extents that file extents, sorted by address, refer to: each once. Those that overlap the
/// one before are reported.
fn disjoint(pass: &Pass<'_>, extents: &[(Key, ExtentRecord)]) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    for (key, r) in extents {
        let (from, to) = range(r);
        match ranges.last() {
            Some(last) if (last.from, last.to) == (from, to) => {}
            Some(last) if last.to > from => {
                damaged(
                    pass,
                    *key,
                    format!("data at {from} overlaps that at {} in the log", last.from),
                );
            }
            _ => ranges.push(Range { from, to, key: *key }),
        }
    }
    ranges
}

/// Which of the ranges the extent tree has, and whether part of that could not be read. Those that
/// overlap something else in it are reported.
fn known_ranges(pass: &Pass<'_>, root: &Edge, ranges: &[Range]) -> (Vec<bool>, bool) {
    /// Overlaps that are looked at: extents of a sound tree overlap each range once.
    const OVERLAPS: usize = 4 * FACTS;
    let mut known = vec![false; ranges.len()];
    let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return (known, false) };
    let from = Key::new(first.from.saturating_sub(MAX_DATA_EXTENT), KeyType(0), 0);
    let to = Key::new(last.to, KeyType(u8::MAX), u64::MAX);
    let nodesize = u64::from(pass.world.source.nodesize());
    let mut overlaps = 0;
    let lost = scan(&pass.world.source, root, from, to, &mut |key, _| {
        let len = match key.kind {
            KeyType::EXTENT_ITEM => key.offset,
            KeyType::METADATA_ITEM => nodesize,
            _ => return ControlFlow::Continue(()),
        };
        let (at, end) = (key.objectid.0, key.objectid.0.saturating_add(len));
        let begin = ranges.partition_point(|r| r.to <= at);
        for (n, r) in ranges.iter().enumerate().skip(begin).take_while(|(_, r)| r.from < end) {
            overlaps += 1;
            if !known[n] && (r.from, r.to) != (at, end) {
                let bytes = r.to - r.from;
                damaged(
                    pass,
                    r.key,
                    format!("data at {} (+{bytes}) overlaps the extent at {at} (+{len})", r.from),
                );
            }
            known[n] = true;
        }
        if overlaps < OVERLAPS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    (known, lost || overlaps >= OVERLAPS)
}

/// First address of a range that none of the sorted ranges covers.
fn first_uncovered(ranges: &[(u64, u64)], from: u64, to: u64) -> Option<u64> {
    let begin = ranges.partition_point(|(_, end)| *end <= from);
    let mut at = from;
    for (start, end) in &ranges[begin..] {
        if at >= to || *start > at {
            break;
        }
        at = at.max(*end);
    }
    (at < to).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_between_checksums_are_found() {
        let sums = [(10, 20), (20, 30), (40, 50)];
        assert_eq!(first_uncovered(&sums, 10, 30), None);
        assert_eq!(first_uncovered(&sums, 12, 25), None);
        assert_eq!(first_uncovered(&sums, 25, 45), Some(30));
        assert_eq!(first_uncovered(&sums, 5, 15), Some(5));
        assert_eq!(first_uncovered(&sums, 45, 55), Some(50));
        assert_eq!(first_uncovered(&[], 45, 55), Some(45));
    }
}
