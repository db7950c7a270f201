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

use larder_format::{Logical, LogicalRange};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
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
    from: Logical,
    /// First address behind the window.
    to: AtomicU64,
    shards: Vec<Mutex<HashMap<u64, Page>>>,
    pages: AtomicUsize,
    limit: usize,
    shrinking: Mutex<()>,
}

impl Coverage {
    /// From this address on, with at most so many pages of 2 KiB, each for 16 MiB of data.
    pub(crate) fn new(from: Logical, limit: usize) -> Self {
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
    pub(crate) fn add(&self, fact: Fact, range: LogicalRange) -> bool {
        let end = range.end.0.min(self.to.load(Relaxed));
        let mut at = range.start.max(self.from).0;
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
                twice |= set(bits.of(fact), first..last);
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
    pub(crate) fn next_window(&self) -> Option<Logical> {
        let to = self.to.load(Relaxed);
        (to < u64::MAX).then_some(Logical(to))
    }

    /// Ranges with a flaw, ascending; at most `limit` of each sort, and how many sectors of each
    /// sort.
    pub(crate) fn flaws(self, limit: usize) -> (Vec<(Flaw, LogicalRange)>, [u64; 3]) {
        let to = self.to.load(Relaxed);
        let mut pages: Vec<(u64, Page)> =
            self.shards.into_iter().flat_map(Mutex::into_inner).collect();
        pages.sort_unstable_by_key(|(page, _)| *page);
        let mut found: [Vec<LogicalRange>; 3] = [vec![], vec![], vec![]];
        let mut counts = [0; 3];
        for (page, bits) in pages.iter().filter(|(page, _)| page * PAGE < to) {
            for word in 0..WORDS {
                let [data, sums, need, spare] = bits.facts.map(|fact| fact[word]);
                let never = bits.never.as_ref().map_or(0, |fact| fact[word]);
                let flaws = [need & !sums, (spare & !need | never) & sums, sums & !data];
                for (sort, flaw) in flaws.into_iter().enumerate().filter(|(_, f)| *f != 0) {
                    counts[sort] += u64::from(flaw.count_ones());
                    let start = page * PAGE + word as u64 * 64 * SECTOR;
                    append(&mut found[sort], Logical(start), flaw, limit);
                }
            }
        }
        let sorts = [Flaw::Missing, Flaw::Unexpected, Flaw::WithoutData];
        let all = sorts.into_iter().zip(found);
        let all = all.flat_map(|(sort, ranges)| ranges.into_iter().map(move |r| (sort, r)));
        (all.collect(), counts)
    }
}

/// Sets some bits of a page; was any set before?
fn set(bits: &mut [u64; WORDS], range: Range<u64>) -> bool {
    let mut twice = false;
    let mut bit = range.start;
    while bit < range.end {
        let (word, from) = ((bit / 64) as usize, bit % 64);
        let n = (64 - from).min(range.end - bit);
        let mask = if n == 64 { u64::MAX } else { ((1 << n) - 1) << from };
        twice |= bits[word] & mask != 0;
        bits[word] |= mask;
        bit += n;
    }
    twice
}

/// Adds the sectors of a word of bits, which begins at `start`.
fn append(ranges: &mut Vec<LogicalRange>, start: Logical, flaw: u64, limit: usize) {
    for bit in (0..64).filter(|bit| flaw >> bit & 1 == 1) {
        let sector = LogicalRange::new(start.plus(bit * SECTOR), SECTOR);
        let full = ranges.len() >= limit;
        match ranges.last_mut() {
            Some(last) if last.end == sector.start => last.end = sector.end,
            _ if full => return,
            _ => ranges.push(sector),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By numbers of sectors.
    fn sectors(range: Range<u64>) -> LogicalRange {
        LogicalRange::between(Logical(range.start * SECTOR), Logical(range.end * SECTOR))
    }

    #[test]
    fn sectors_are_judged_alone() {
        const LAST: u64 = PAGE / SECTOR - 1;
        let c = Coverage::new(Logical(0), 1000);
        assert!(!c.add(Fact::Data, sectors(0..100)));
        assert!(!c.add(Fact::Sums, sectors(10..90)));
        assert!(c.add(Fact::Sums, sectors(89..90)), "twice");
        c.add(Fact::Need, sectors(5..25));
        c.add(Fact::Need, sectors(15..35));
        c.add(Fact::Spare, sectors(30..40));
        c.add(Fact::Never, sectors(24..25));
        c.add(Fact::Never, sectors(95..96));
        c.add(Fact::Sums, sectors(LAST..LAST + 2));
        assert_eq!(c.next_window(), None);
        let (flaws, counts) = c.flaws(10);
        assert_eq!(
            flaws,
            [
                (Flaw::Missing, sectors(5..10)),
                (Flaw::Unexpected, sectors(24..25)),
                (Flaw::Unexpected, sectors(35..40)),
                (Flaw::WithoutData, sectors(LAST..LAST + 2)),
            ]
        );
        assert_eq!(counts, [5, 6, 2]);
    }

    /// With windows nothing is found twice or missed.
    #[test]
    fn windows_cover_everything_once() {
        let mut from = Logical(0);
        let mut found = Vec::new();
        let mut windows = 0;
        loop {
            let c = Coverage::new(from, 8);
            for n in (0..100u64).rev() {
                let at = Logical(n * PAGE / 2);
                c.add(Fact::Need, LogicalRange::new(at, SECTOR));
                c.add(Fact::Data, LogicalRange::new(at, PAGE / 2));
            }
            let next = c.next_window();
            found.extend(c.flaws(1000).0.into_iter().map(|(_, range)| range.start.0));
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
