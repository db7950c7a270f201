//! Which sectors hold data, have checksums, need them.
//!
//! Four bits for each sector of the address space: *data* (the extent tree has a data extent here),
//! *sums* (the checksum tree has one), *need* (a file reads this sector and expects one), *spare*
//! (a preallocated range or a cache lies here). They come in any order from any thread, and at the
//! end each sector is judged alone. Pages of bits exist where something is set. A fifth, *never* (a
//! file without checksums lies here), is rare and has pages of its own.
//!
//! Preallocated space may be needed elsewhere: a snapshot keeps it as it was when it was just being
//! written. Files with checksums and files without never share data.
//!
//! Memory is bounded by a window: when there are too many pages, the upper half is given up, and
//! the address where it began is where the next pass over the image takes up. A file system with a
//! few TiB of data is done in one.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

const SECTOR: u64 = 4096;
const WORDS: usize = 64;
const PAGE: u64 = WORDS as u64 * 64 * SECTOR;
const SHARDS: usize = 64;

/// What is said of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fact {
    Data = 0,
    Sums = 1,
    Need = 2,
    Spare = 3,
    Never = 4,
}

#[derive(Debug)]
struct Bits {
    facts: [[u64; WORDS]; 4],
    never: Option<Box<[u64; WORDS]>>,
}

type Page = Box<Bits>;

impl Bits {
    fn empty() -> Page {
        Box::new(Self { facts: [[0; WORDS]; 4], never: None })
    }
    fn of(&mut self, fact: Fact) -> &mut [u64; WORDS] {
        match fact {
            Fact::Never => self.never.get_or_insert_with(|| Box::new([0; WORDS])),
            fact => &mut self.facts[fact as usize],
        }
    }
}

/// Something wrong with a range of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Flaw {
    /// Needed, and not there.
    Missing,
    /// There, and must not be.
    Unexpected,
    /// There, where nothing is allocated.
    WithoutData,
}

/// The facts of a window of the address space.
#[derive(Debug)]
pub(crate) struct Coverage {
    from: u64,
    /// First address behind the window.
    to: AtomicU64,
    shards: Vec<Mutex<HashMap<u64, Page>>>,
    pages: AtomicUsize,
    limit: usize,
    shrinking: Mutex<()>,
}

impl Coverage {
    /// From this address on, with at most so many pages of 2 KiB, each for 16 MiB of data.
    pub(crate) fn new(from: u64, limit: usize) -> Self {
        Self {
            from,
            to: AtomicU64::new(u64::MAX),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            pages: AtomicUsize::new(0),
            limit: limit.max(2),
            shrinking: Mutex::new(()),
        }
    }

    /// Notes a fact of a range; was it said of any part of the range before?
    pub(crate) fn add(&self, fact: Fact, at: u64, len: u64) -> bool {
        let end = at.saturating_add(len).min(self.to.load(Relaxed));
        let mut at = at.max(self.from);
        let mut twice = false;
        while at < end {
            let page = at / PAGE;
            let page_end = page.saturating_add(1).saturating_mul(PAGE);
            let until = end.min(page_end);
            let grown = {
                let mut shard = self.shards[(page % SHARDS as u64) as usize].lock();
                let before = shard.len();
                let bits = shard.entry(page).or_insert_with(Bits::empty);
                let (first, last) = (at % PAGE / SECTOR, (until - page * PAGE).div_ceil(SECTOR));
                twice |= set(bits.of(fact), first, last);
                shard.len() > before
            };
            if grown && self.pages.fetch_add(1, Relaxed) >= self.limit {
                self.shrink();
                if at >= self.to.load(Relaxed) {
                    return twice;
                }
            }
            at = until;
        }
        twice
    }

    fn shrink(&self) {
        let _one = self.shrinking.lock();
        if self.pages.load(Relaxed) < self.limit {
            return;
        }
        let mut numbers: Vec<u64> =
            self.shards.iter().flat_map(|s| s.lock().keys().copied().collect::<Vec<_>>()).collect();
        numbers.sort_unstable();
        let Some(middle) = numbers.get(numbers.len() / 2) else { return };
        self.to.fetch_min(middle * PAGE, Relaxed);
        let mut left = 0;
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.retain(|page, _| page < middle);
            left += shard.len();
        }
        self.pages.store(left, Relaxed);
    }

    /// Where the next window begins; `None` if this one was the last.
    pub(crate) fn next_window(&self) -> Option<u64> {
        let to = self.to.load(Relaxed);
        (to < u64::MAX).then_some(to)
    }

    /// Ranges (first byte, bytes) with a flaw, ascending; at most `limit` of each sort, and how
    /// many sectors of each sort.
    pub(crate) fn flaws(self, limit: usize) -> (Vec<(Flaw, u64, u64)>, [u64; 3]) {
        let to = self.to.load(Relaxed);
        let mut pages: Vec<(u64, Page)> =
            self.shards.into_iter().flat_map(Mutex::into_inner).collect();
        pages.sort_unstable_by_key(|(page, _)| *page);
        let mut found: [Vec<(u64, u64)>; 3] = [vec![], vec![], vec![]];
        let mut counts = [0; 3];
        for (page, bits) in pages.iter().filter(|(page, _)| page * PAGE < to) {
            for word in 0..WORDS {
                let [data, sums, need, spare] = bits.facts.map(|fact| fact[word]);
                let never = bits.never.as_ref().map_or(0, |fact| fact[word]);
                let flaws = [need & !sums, (spare & !need | never) & sums, sums & !data];
                for (sort, flaw) in flaws.into_iter().enumerate().filter(|(_, f)| *f != 0) {
                    counts[sort] += u64::from(flaw.count_ones());
                    let start = page * PAGE + word as u64 * 64 * SECTOR;
                    append(&mut found[sort], start, flaw, limit);
                }
            }
        }
        let sorts = [Flaw::Missing, Flaw::Unexpected, Flaw::WithoutData];
        let all = sorts.into_iter().zip(found);
        (
            all.flat_map(|(sort, ranges)| ranges.into_iter().map(move |(at, len)| (sort, at, len)))
                .collect(),
            counts,
        )
    }
}

/// Sets bits `first..last` of a page; was any set before?
fn set(bits: &mut [u64; WORDS], first: u64, last: u64) -> bool {
    let mut twice = false;
    let mut bit = first;
    while bit < last {
        let (word, from) = ((bit / 64) as usize, bit % 64);
        let n = (64 - from).min(last - bit);
        let mask = if n == 64 { u64::MAX } else { ((1 << n) - 1) << from };
        twice |= bits[word] & mask != 0;
        bits[word] |= mask;
        bit += n;
    }
    twice
}

fn append(ranges: &mut Vec<(u64, u64)>, start: u64, flaw: u64, limit: usize) {
    for bit in (0..64).filter(|bit| flaw >> bit & 1 == 1) {
        let at = start + bit * SECTOR;
        let full = ranges.len() >= limit;
        match ranges.last_mut() {
            Some((from, len)) if *from + *len == at => *len += SECTOR,
            _ if full => return,
            _ => ranges.push((at, SECTOR)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_judged_alone() {
        let c = Coverage::new(0, 1000);
        assert!(!c.add(Fact::Data, 0, 100 * SECTOR));
        assert!(!c.add(Fact::Sums, 10 * SECTOR, 80 * SECTOR));
        assert!(c.add(Fact::Sums, 89 * SECTOR, SECTOR), "twice");
        c.add(Fact::Need, 5 * SECTOR, 20 * SECTOR);
        c.add(Fact::Need, 15 * SECTOR, 20 * SECTOR);
        c.add(Fact::Spare, 30 * SECTOR, 10 * SECTOR);
        c.add(Fact::Never, 24 * SECTOR, SECTOR);
        c.add(Fact::Never, 95 * SECTOR, SECTOR);
        c.add(Fact::Sums, PAGE - SECTOR, 2 * SECTOR);
        assert_eq!(c.next_window(), None);
        let (flaws, counts) = c.flaws(10);
        assert_eq!(
            flaws,
            [
                (Flaw::Missing, 5 * SECTOR, 5 * SECTOR),
                (Flaw::Unexpected, 24 * SECTOR, SECTOR),
                (Flaw::Unexpected, 35 * SECTOR, 5 * SECTOR),
                (Flaw::WithoutData, PAGE - SECTOR, 2 * SECTOR),
            ]
        );
        assert_eq!(counts, [5, 6, 2]);
    }

    /// With windows nothing is found twice or missed.
    #[test]
    fn windows_cover_everything_once() {
        let mut from = 0;
        let mut found = Vec::new();
        let mut windows = 0;
        loop {
            let c = Coverage::new(from, 8);
            for n in (0..100u64).rev() {
                c.add(Fact::Need, n * PAGE / 2, SECTOR);
                c.add(Fact::Data, n * PAGE / 2, PAGE / 2);
            }
            let next = c.next_window();
            found.extend(c.flaws(1000).0.into_iter().map(|(_, at, _)| at));
            windows += 1;
            match next {
                Some(at) => {
                    assert!(at > from);
                    from = at;
                }
                None => break,
            }
        }
        assert!(windows > 3);
        assert_eq!(found, (0..100).map(|n| n * PAGE / 2).collect::<Vec<_>>());
    }
}
