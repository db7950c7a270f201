//! Sets of addresses, and sums that stand in for sets.
//!
//! The decision hidden here is how the checker compares millions of facts in bounded memory. It
//! does not collect them: each fact adds a keyed hash to a sum on the one side and subtracts it on
//! the other. A [`Ledger`] has a sum for each of about a million groups, so that when some are not
//! zero, a second walk collects the facts of those groups only. The hashes are keyed anew for every
//! run, so that no image can be crafted whose errors cancel out; by chance a wrong group sums to
//! zero once in 2^64. For that they have to withstand an attacker, as the standard library's do and
//! faster ones do not.
//!
//! [`SectorSet`] is a bitmap over the address space in pages that exist where something is set, so
//! sharded that threads can fill it side by side.

use larder_format::{Logical, ObjectId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Keyed hashing.
#[derive(Debug, Default, Clone)]
pub(crate) struct Hashing(RandomState);

impl Hashing {
    pub(crate) fn of(&self, value: &impl Hash) -> u64 {
        self.0.hash_one(value)
    }
    /// A factor: odd, so that multiplying by it loses nothing.
    pub(crate) fn factor(&self, value: &impl Hash) -> u64 {
        self.of(value) | 1
    }
}

/// Sums of hashes by group. Zero: nothing, or everything cancels out.
#[derive(Debug)]
pub(crate) struct Ledger {
    sums: Box<[AtomicU64]>,
}

const LEDGER_BITS: u32 = 20;

/// What facts are grouped by: an address, an inode, the hash of a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group(pub(crate) u64);

impl Group {
    fn slot(self) -> usize {
        (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - LEDGER_BITS)) as usize
    }
}
impl From<Logical> for Group {
    fn from(at: Logical) -> Self {
        Self(at.0)
    }
}
impl From<ObjectId> for Group {
    fn from(id: ObjectId) -> Self {
        Self(id.0)
    }
}

impl Ledger {
    pub(crate) fn new() -> Self {
        Self { sums: (0..1usize << LEDGER_BITS).map(|_| AtomicU64::new(0)).collect() }
    }
    /// Adds (or, negated, subtracts) a value to a group's sum; sums wrap.
    pub(crate) fn add(&self, group: impl Into<Group>, value: u64) {
        self.sums[group.into().slot()].fetch_add(value, Relaxed);
    }
    pub(crate) fn subtract(&self, group: impl Into<Group>, value: u64) {
        self.add(group, value.wrapping_neg());
    }
    /// The groups whose sums are not zero; `None` if all are.
    pub(crate) fn uneven(&self) -> Option<Uneven> {
        let slots: Vec<bool> = self.sums.iter().map(|s| s.load(Relaxed) != 0).collect();
        slots.contains(&true).then_some(Uneven { slots })
    }
}

/// Groups that need a closer look, and a few that share a slot with them.
#[derive(Debug)]
pub(crate) struct Uneven {
    slots: Vec<bool>,
}

impl Uneven {
    pub(crate) fn contains(&self, group: impl Into<Group>) -> bool {
        self.slots[group.into().slot()]
    }
    /// Forgets all but the first few; were there more?
    pub(crate) fn limit(&mut self, most: usize) -> bool {
        let mut left = most;
        let mut cut = false;
        for slot in self.slots.iter_mut().filter(|s| **s) {
            if left == 0 {
                *slot = false;
                cut = true;
            } else {
                left -= 1;
            }
        }
        cut
    }
}

/// Bytes that one page of a set covers.
const SECTOR: u64 = 4096;
const PAGE_WORDS: usize = 64;
const PAGE_BYTES: u64 = PAGE_WORDS as u64 * 64 * SECTOR;
const SHARDS: usize = 64;

type Page = Box<[u64; PAGE_WORDS]>;

/// A set of sectors.
#[derive(Debug)]
pub(crate) struct SectorSet {
    shards: Vec<Mutex<HashMap<u64, Page>>>,
}

impl SectorSet {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
    fn place(at: u64) -> (u64, usize, u64) {
        let sector = at % PAGE_BYTES / SECTOR;
        (at / PAGE_BYTES, (sector / 64) as usize, 1 << (sector % 64))
    }
    /// Adds the sector at `at`; was it new?
    pub(crate) fn insert(&self, at: u64) -> bool {
        let (page, word, bit) = Self::place(at);
        let mut shard = self.shards[(page % SHARDS as u64) as usize].lock();
        let words = shard.entry(page).or_insert_with(|| Box::new([0; PAGE_WORDS]));
        let new = words[word] & bit == 0;
        words[word] |= bit;
        new
    }
    pub(crate) fn contains(&self, at: u64) -> bool {
        let (page, word, bit) = Self::place(at);
        let shard = self.shards[(page % SHARDS as u64) as usize].lock();
        shard.get(&page).is_some_and(|words| words[word] & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledgers_are_even_when_both_sides_said_the_same() {
        let hashing = Hashing::default();
        let ledger = Ledger::new();
        for n in 0..100_000u64 {
            ledger.add(Group(n % 1000), hashing.of(&n));
        }
        assert!(ledger.uneven().is_some());
        for n in (0..100_000u64).rev() {
            ledger.subtract(Group(n % 1000), hashing.of(&n));
        }
        assert!(ledger.uneven().is_none());
        ledger.add(Group(77), hashing.of(&"left"));
        let uneven = ledger.uneven().unwrap();
        assert!(uneven.contains(Group(77)));
        assert!((0..1000).filter(|n| uneven.contains(Group(*n))).count() < 10);
    }

    #[test]
    fn sets_hold_what_was_put_in() {
        let set = SectorSet::new();
        let places =
            [0, 4096, 4096 * 63, 4096 * 64, PAGE_BYTES, PAGE_BYTES - 4096, u64::MAX - 4095];
        for at in places {
            assert!(!set.contains(at));
            assert!(set.insert(at) && !set.insert(at));
        }
        assert!(places.iter().all(|at| set.contains(*at)) && !set.contains(8192));
    }
}
