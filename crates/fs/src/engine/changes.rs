//! What an inode remembers for the log: which ranges of its extents have changed since they were
//! last logged, and what its last `fsync` came to.

use crate::transaction::Txn;
use larder_format::Generation;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Weak;

/// At most this many ranges are kept apart. Beyond that they become one.
const MOST: usize = 512;

/// Changed ranges of a file, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// The transaction in which they changed.
    generation: Generation,
    /// First byte → end. No two ranges touch.
    ranges: BTreeMap<u64, u64>,
}

impl Changes {
    /// Notes that the range has changed in the transaction `generation`.
    pub(crate) fn add(&mut self, generation: Generation, range: Range<u64>) {
        if self.generation != generation {
            self.generation = generation;
            self.ranges.clear();
        }
        let Range { mut start, mut end } = range;
        while let Some((&from, &to)) = self.ranges.range(..=end).next_back()
            && to >= start
        {
            start = start.min(from);
            end = end.max(to);
            self.ranges.remove(&from);
        }
        self.ranges.insert(start, end);
        if self.ranges.len() > MOST {
            let first = self.ranges.first_key_value().map_or(0, |(from, _)| *from);
            let last = self.ranges.last_key_value().map_or(0, |(_, to)| *to);
            self.ranges = BTreeMap::from([(first, last)]);
        }
    }
    /// Takes out what has changed in the transaction `generation`.
    pub(crate) fn take(&mut self, generation: Generation) -> Vec<(u64, u64)> {
        let ranges = std::mem::take(&mut self.ranges);
        if self.generation == generation { ranges.into_iter().collect() } else { Vec::new() }
    }
}

/// What an inode remembers of its last `fsync`.
#[derive(Debug)]
pub(crate) struct Logged {
    /// The transaction whose log has it.
    pub(crate) generation: Generation,
    pub(crate) txn: Weak<Txn>,
    /// `None`: something was taken for that log and did not get into it. Only the commit has it.
    pub(crate) ticket: Option<u64>,
    /// How many directories had moved then.
    pub(crate) moves: u64,
    /// Its size in the log, in whole sectors. Of what lies behind, the log has only preallocated
    /// extents.
    pub(crate) size: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Generation = Generation(9);

    #[test]
    fn what_is_of_another_transaction_does_not_count() {
        let mut c = Changes::default();
        c.add(Generation(8), 0..4096);
        assert_eq!(c.take(NOW), []);
        c.add(NOW, 4096..8192);
        c.add(NOW, 0..4096);
        assert_eq!(c.take(NOW), [(0, 8192)]);
        assert_eq!(c.take(NOW), []);
    }

    proptest! {
        #[test]
        fn ranges_match_a_set(all in prop::collection::vec((0u64..60, 1u64..9), 0..40)) {
            let mut c = Changes::default();
            let mut set = std::collections::BTreeSet::new();
            for (start, len) in all {
                c.add(NOW, start..start + len);
                set.extend(start..start + len);
            }
            let ranges = c.take(NOW);
            prop_assert!(ranges.windows(2).all(|w| w[0].1 < w[1].0));
            let covered: std::collections::BTreeSet<_> =
                ranges.into_iter().flat_map(|(a, b)| a..b).collect();
            prop_assert_eq!(covered, set);
        }
    }
}
