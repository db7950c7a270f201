//! Files for ranges of the address space: whose data it is.
//!
//! Checksums know addresses only. When something is wrong with a range, the last pass over the
//! subvolumes finds the first file that uses it, so that the finding can name what a person can
//! restore or delete.

use larder_format::{Key, Logical, LogicalRange, TreeId};
use parking_lot::Mutex;

/// Ranges that are looked for.
#[derive(Debug)]
pub(crate) struct Owners {
    /// Ascending, not overlapping.
    ranges: Vec<LogicalRange>,
    found: Mutex<Vec<Option<(TreeId, Key)>>>,
}

impl Owners {
    /// For these ranges, in any order.
    pub(crate) fn new(ranges: impl IntoIterator<Item = LogicalRange>) -> Self {
        let mut sorted: Vec<LogicalRange> = ranges.into_iter().collect();
        sorted.sort_unstable();
        let mut merged: Vec<LogicalRange> = Vec::with_capacity(sorted.len());
        for range in sorted {
            match merged.last_mut() {
                Some(last) if range.start < last.end => last.end = range.end.max(last.end),
                _ => merged.push(range),
            }
        }
        let found = Mutex::new(vec![None; merged.len()]);
        Self { ranges: merged, found }
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
    /// A file uses this extent.
    pub(crate) fn visit(&self, extent: LogicalRange, tree: TreeId, key: Key) {
        let first = self.ranges.partition_point(|range| range.end <= extent.start);
        let hit = |range: &LogicalRange| range.start < extent.end;
        if !self.ranges.get(first).is_some_and(hit) {
            return;
        }
        let mut found = self.found.lock();
        for (n, _) in self.ranges.iter().enumerate().skip(first).take_while(|(_, r)| hit(r)) {
            // The smallest, whichever thread comes first: reports do not change from run to run.
            let new = Some((tree, key));
            if found[n].is_none() || new < found[n] {
                found[n] = new;
            }
        }
    }
    /// The file that uses an address.
    pub(crate) fn of(&self, at: Logical) -> Option<(TreeId, Key)> {
        let n = self.ranges.partition_point(|range| range.end <= at);
        self.ranges.get(n).filter(|range| range.start <= at)?;
        self.found.lock().get(n).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KeyType, ObjectId};

    #[test]
    fn the_file_of_a_range_is_found() {
        let range = |at, len| LogicalRange::new(Logical(at), len);
        let owners = Owners::new([range(100, 50), range(400, 10), range(140, 20)]);
        let key = |ino: u64| Key::new(ino, KeyType::EXTENT_DATA, 0);
        owners.visit(range(0, 100), ObjectId(5), key(1));
        owners.visit(range(159, 300), ObjectId(5), key(3));
        owners.visit(range(90, 20), ObjectId(5), key(2));
        let of = |at| owners.of(Logical(at));
        assert_eq!(of(120), Some((ObjectId(5), key(2))));
        assert_eq!(of(405), Some((ObjectId(5), key(3))));
        assert_eq!((of(99), of(160), of(500)), (None, None, None));
    }
}
