//! Whose data it is: files for ranges of the address space.
//!
//! Checksums know addresses only. When something is wrong with a range, the last pass over the
//! subvolumes finds the first file that uses it, so that the finding can name what a person can
//! restore or delete.

use larder_format::{Key, TreeId};
use parking_lot::Mutex;

/// Ranges that are looked for.
#[derive(Debug)]
pub(crate) struct Owners {
    /// Ascending, not overlapping: first byte, byte behind the last.
    ranges: Vec<(u64, u64)>,
    found: Mutex<Vec<Option<(TreeId, Key)>>>,
}

impl Owners {
    /// For these ranges (first byte, bytes), in any order.
    pub(crate) fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut sorted: Vec<(u64, u64)> =
            ranges.into_iter().map(|(at, len)| (at, at.saturating_add(len))).collect();
        sorted.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
        for (from, to) in sorted {
            match merged.last_mut() {
                Some((_, end)) if from < *end => *end = to.max(*end),
                _ => merged.push((from, to)),
            }
        }
        let found = Mutex::new(vec![None; merged.len()]);
        Self { ranges: merged, found }
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
    /// A file uses this extent.
    pub(crate) fn visit(&self, at: u64, len: u64, tree: TreeId, key: Key) {
        let end = at.saturating_add(len);
        let first = self.ranges.partition_point(|(_, to)| *to <= at);
        let hit = self.ranges.get(first).is_some_and(|(from, _)| *from < end);
        if !hit {
            return;
        }
        let mut found = self.found.lock();
        for (n, _) in
            self.ranges.iter().enumerate().skip(first).take_while(|(_, (from, _))| *from < end)
        {
            // Whichever thread comes first: the smallest, so that reports do not change from run to
            // run.
            let new = Some((tree, key));
            if found[n].is_none() || new < found[n] {
                found[n] = new;
            }
        }
    }
    /// The file that uses an address.
    pub(crate) fn of(&self, at: u64) -> Option<(TreeId, Key)> {
        let n = self.ranges.partition_point(|(_, to)| *to <= at);
        self.ranges.get(n).filter(|(from, _)| *from <= at)?;
        self.found.lock().get(n).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KeyType, ObjectId};

    #[test]
    fn the_file_of_a_range_is_found() {
        let owners = Owners::new([(100, 50), (400, 10), (140, 20)]);
        let key = |ino: u64| Key::new(ino, KeyType::EXTENT_DATA, 0);
        owners.visit(0, 100, ObjectId(5), key(1));
        owners.visit(159, 300, ObjectId(5), key(3));
        owners.visit(90, 20, ObjectId(5), key(2));
        assert_eq!(owners.of(120), Some((ObjectId(5), key(2))));
        assert_eq!(owners.of(405), Some((ObjectId(5), key(3))));
        assert_eq!((owners.of(99), owners.of(160), owners.of(500)), (None, None, None));
    }
}
