//! Sets of inode numbers.
//!
//! Numbers are given out one after the other, so members lie close together. Each 64 numbers have
//! a word of bits, and take memory only if one of them is a member.

use larder_format::ObjectId;
use std::collections::BTreeMap;

/// A set of inode numbers, in order.
#[derive(Debug, Default)]
pub(crate) struct InodeSet(BTreeMap<u64, u64>);

impl InodeSet {
    /// Adds a number. Returns false if it was there.
    pub(crate) fn insert(&mut self, ino: ObjectId) -> bool {
        let word = self.0.entry(ino.0 / 64).or_default();
        let bit = 1 << (ino.0 % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    pub(crate) fn contains(&self, ino: ObjectId) -> bool {
        self.0.get(&(ino.0 / 64)).is_some_and(|word| word & (1 << (ino.0 % 64)) != 0)
    }

    /// All members by rising number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = ObjectId> {
        self.0.iter().flat_map(|(index, word)| {
            (0..64)
                .filter(move |bit| word & (1 << bit) != 0)
                .map(move |bit| ObjectId(index * 64 + bit))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_come_in_order_and_once() {
        let mut set = InodeSet::default();
        for ino in [700, 256, 319, 320, u64::MAX - 300] {
            assert!(set.insert(ObjectId(ino)));
            assert!(!set.insert(ObjectId(ino)));
        }
        let all: Vec<u64> = set.iter().map(|ino| ino.0).collect();
        assert_eq!(all, [256, 319, 320, 700, u64::MAX - 300]);
        assert!(!set.contains(ObjectId(257)));
    }
}
