//! Free space of one block group in memory: which run to hand out next.
//!
//! It keeps two orders of the same runs: by address, for merging and for locality, and by size. So
//! a request that does not fit near its hint finds the smallest run that holds it without a search.
//! A hint is followed over a bounded number of runs only: sequential writes gain more by that than
//! the tighter fit would be worth.
//!
//! Runs are never adjacent, because [`FreeIndex::insert`] merges them. The index does not know what
//! lies in the way of an allocation (superblock mirrors). Such ranges are removed from it once,
//! after loading.

use crate::space::Run;
use larder_format::Logical;
use std::collections::{BTreeMap, BTreeSet};

/// Runs behind a hint that are looked at before size decides.
const PROBES: usize = 32;

/// Sorted free runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeIndex {
    runs: BTreeMap<Logical, u64>,
    by_size: BTreeSet<(u64, Logical)>,
    total: u64,
}

/// How long a piece may be that is allocated at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    /// So many bytes, if there is a run that long.
    pub(crate) most: u64,
    /// Otherwise as many as there are in one piece, but no fewer than this.
    pub(crate) least: u64,
}

impl Lengths {
    /// This length and no other.
    #[must_use]
    pub(crate) fn exactly(len: u64) -> Self {
        Self { most: len, least: len }
    }
}

/// Tree blocks as the index sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Bytes of each.
    pub(crate) size: u64,
    /// What their addresses are multiples of.
    pub(crate) align: u64,
}

fn align_up(at: Logical, align: u64) -> Option<Logical> {
    at.0.checked_next_multiple_of(align).map(Logical)
}

impl FreeIndex {
    /// An index in which nothing is free.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Bytes that are free.
    #[must_use]
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Length of the largest run, 0 if there is none.
    #[must_use]
    pub(crate) fn largest(&self) -> u64 {
        self.by_size.last().map_or(0, |r| r.0)
    }

    /// The runs in address order.
    pub(crate) fn runs(&self) -> impl DoubleEndedIterator<Item = Run> + '_ {
        self.runs.iter().map(|(start, len)| Run::new(*start, *len))
    }

    /// The first run that ends behind `at`, without what it has before `at`.
    #[must_use]
    pub(crate) fn next_from(&self, at: Logical) -> Option<Run> {
        let run = self.from(at).next()?;
        let start = run.start.max(at);
        Some(Run::new(start, run.end().0 - start.0))
    }

    fn link(&mut self, run: Run) {
        self.runs.insert(run.start, run.len);
        self.by_size.insert((run.len, run.start));
        self.total += run.len;
    }
    fn unlink(&mut self, run: Run) {
        let known = self.runs.remove(&run.start) == Some(run.len)
            && self.by_size.remove(&(run.len, run.start));
        assert!(known, "{run:?} is not a free run");
        self.total -= run.len;
    }
    /// Takes `part` out of the run that holds it.
    fn carve(&mut self, run: Run, part: Run) {
        self.unlink(run);
        for (start, end) in [(run.start, part.start), (part.end(), run.end())] {
            if let Some(rest) = Run::between(start, end) {
                self.link(rest);
            }
        }
    }

    /// The last run that starts at or before `at`.
    fn before(&self, at: Logical) -> Option<Run> {
        self.runs.range(..=at).next_back().map(|(s, l)| Run::new(*s, *l))
    }
    /// Runs that end after `at`, in order.
    fn from(&self, at: Logical) -> impl Iterator<Item = Run> + '_ {
        let first = self.before(at).filter(|r| r.end() > at);
        let rest = self.runs.range((std::ops::Bound::Excluded(at), std::ops::Bound::Unbounded));
        first.into_iter().chain(rest.map(|(s, l)| Run::new(*s, *l)))
    }

    /// Adds a run. None of it may be free already: such space would have two owners.
    pub(crate) fn insert(&mut self, mut run: Run) {
        if run.len == 0 {
            return;
        }
        if let Some(before) = self.before(run.start) {
            assert!(before.end() <= run.start, "{run:?} is free already, in {before:?}");
            if before.end() == run.start {
                self.unlink(before);
                run = Run::new(before.start, before.len + run.len);
            }
        }
        let after = self.from(run.start).next();
        if let Some(after) = after {
            assert!(run.end() <= after.start, "{run:?} is free already, in {after:?}");
            if after.start == run.end() {
                self.unlink(after);
                run.len += after.len;
            }
        }
        self.link(run);
    }

    /// Takes out what is free of `range`. Returns how many bytes that was.
    pub(crate) fn remove_range(&mut self, range: Run) -> u64 {
        let hit: Vec<Run> = self.from(range.start).take_while(|r| r.start < range.end()).collect();
        let before = self.total;
        for run in hit {
            if let Some(part) = run.intersect(range) {
                self.carve(run, part);
            }
        }
        before - self.total
    }

    /// What is free of `range`, in address order.
    pub(crate) fn parts(&self, range: Run) -> impl Iterator<Item = Run> + '_ {
        let inside = self.from(range.start).take_while(move |r| r.start < range.end());
        inside.filter_map(move |r| r.intersect(range))
    }

    /// Is all of `range` free?
    #[must_use]
    pub(crate) fn is_free(&self, range: Run) -> bool {
        self.before(range.start).is_some_and(|r| r.contains(range))
    }

    /// Takes exactly `range` out, if all of it is free.
    pub(crate) fn take(&mut self, range: Run) -> Option<Run> {
        self.is_free(range).then(|| {
            self.remove_range(range);
            range
        })
    }

    /// Takes a piece out. If no run is as long as wanted, takes the longest one, if that is long
    /// enough.
    ///
    /// The order of attempts: right at `hint` or in the next runs behind it, the smallest run that
    /// is as long as wanted, the longest run.
    pub(crate) fn allocate(&mut self, wanted: Lengths, hint: Option<Logical>) -> Option<Run> {
        let Lengths { most: len, least } = wanted;
        assert!(0 < least && least <= len, "{least} to {len} bytes");
        let near = hint.and_then(|hint| {
            self.from(hint).take(PROBES).find_map(|run| {
                let start = run.start.max(hint);
                (run.end().0 - start.0 >= len).then_some((run, Run::new(start, len)))
            })
        });
        let (run, part) = near
            .or_else(|| {
                let &(size, start) = self.by_size.range((len, Logical(0))..).next()?;
                Some((Run::new(start, size), Run::new(start, len)))
            })
            .or_else(|| {
                let &(size, start) = self.by_size.last()?;
                (size >= least).then_some((Run::new(start, size), Run::new(start, size)))
            })?;
        self.carve(run, part);
        Some(part)
    }

    /// As [`Self::allocate`], but a piece that is as long as wanted begins at a multiple of `step`
    /// bytes from `base` on, if there is one.
    pub(crate) fn allocate_aligned(
        &mut self,
        wanted: Lengths,
        hint: Option<Logical>,
        (base, step): (Logical, u64),
    ) -> Option<Run> {
        let up = |at: Logical| {
            let into = at.0.saturating_sub(base.0).checked_next_multiple_of(step)?;
            base.0.checked_add(into).map(Logical)
        };
        let fits = |run: Run, from: Logical| {
            let part = Run::new(up(from)?, wanted.most);
            (part.end() <= run.end()).then_some((run, part))
        };
        let near = hint.and_then(|hint| {
            self.from(hint).take(PROBES).find_map(|run| fits(run, run.start.max(hint)))
        });
        let found = near.or_else(|| {
            let long = self.by_size.range((wanted.most, Logical(0))..).take(PROBES);
            let sure = self.by_size.range((wanted.most + step, Logical(0))..).take(1);
            let mut runs = long.chain(sure).map(|&(len, start)| Run::new(start, len));
            runs.find_map(|run| fits(run, run.start))
        });
        let Some((run, part)) = found else { return self.allocate(wanted, hint) };
        self.carve(run, part);
        Some(part)
    }

    /// Takes the first place in `window` for a block.
    pub(crate) fn allocate_in(&mut self, window: Run, blocks: Blocks) -> Option<Run> {
        let Blocks { size, align } = blocks;
        let found =
            self.from(window.start).take_while(|r| r.start < window.end()).find_map(|run| {
                let part = Run::new(align_up(run.start.max(window.start), align)?, size);
                (part.end() <= run.end() && part.end() <= window.end()).then_some((run, part))
            });
        let (run, part) = found?;
        self.carve(run, part);
        Some(part)
    }

    /// A stretch of at most `len` bytes, from which blocks can be handed out one after the other.
    /// It shares nothing with `avoid`. It comes from the smallest run that holds it all, else from
    /// the longest. It stays free.
    #[must_use]
    pub(crate) fn window(&self, len: u64, blocks: Blocks, avoid: Option<Run>) -> Option<Run> {
        let Blocks { size, align } = blocks;
        let parts = |(len, start): (u64, Logical)| {
            let run = Run::new(start, len);
            let Some(avoid) = avoid.filter(|a| a.overlaps(run)) else { return [Some(run), None] };
            [Run::between(run.start, avoid.start), Run::between(avoid.end(), run.end())]
        };
        let best = |need: u64, mut found: &mut dyn Iterator<Item = (u64, Logical)>| {
            let fits = |r: &Run| align_up(r.start, align).is_some_and(|s| s.plus(need) <= r.end());
            (&mut found).take(PROBES).flat_map(parts).flatten().find(fits)
        };
        best(len, &mut self.by_size.range((len, Logical(0))..).copied())
            .or_else(|| best(size, &mut self.by_size.iter().rev().copied()))
            .map(|r| Run::new(r.start, r.len.min(len.max(size) + align)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ops::Range;

    const BLOCKS: Blocks = Blocks { size: 16384, align: 16384 };

    fn run(bytes: Range<u64>) -> Run {
        Run::between(Logical(bytes.start), Logical(bytes.end)).expect("not empty")
    }

    #[test]
    fn hint_then_best_fit_then_longest() {
        let mut f = FreeIndex::new();
        for r in [run(0..100), run(200..210), run(300..350)] {
            f.insert(r);
        }
        assert_eq!((f.total(), f.largest()), (160, 100));
        assert_eq!(
            f.allocate(Lengths::exactly(10), Some(Logical(40))),
            Some(run(40..50)),
            "at the hint"
        );
        assert_eq!(
            f.allocate(Lengths::exactly(20), Some(Logical(250))),
            Some(run(300..320)),
            "behind the hint"
        );
        assert_eq!(
            f.allocate(Lengths::exactly(8), None),
            Some(run(200..208)),
            "smallest that holds it"
        );
        let long = Lengths { most: 1000, least: 45 };
        assert_eq!(f.allocate(long, None), Some(run(50..100)), "longest");
        assert_eq!(f.allocate(long, None), None);
        assert_eq!(f.runs().collect::<Vec<_>>(), [run(0..40), run(208..210), run(320..350)]);
        assert_eq!(f.remove_range(run(30..210)), 12);
        assert_eq!(f.total(), 60);
    }

    #[test]
    fn windows_keep_clear_of_each_other_and_blocks_rise() {
        let mut f = FreeIndex::new();
        f.insert(run(4096..(1 << 20) + 4096));
        let a = f.window(1 << 18, BLOCKS, None).unwrap();
        let b = f.window(1 << 18, BLOCKS, Some(a)).unwrap();
        assert!(!a.overlaps(b));
        let mut last = Logical(0);
        for _ in 0..16 {
            let got = f.allocate_in(a, BLOCKS).unwrap();
            assert!(got.start > last && got.start.0.is_multiple_of(16384) && a.contains(got));
            last = got.start;
        }
        assert_eq!(f.allocate_in(a, BLOCKS), None);
        // Only short runs: the window is one of them. If no run holds a block, there is no window.
        let mut f = FreeIndex::new();
        f.insert(run(4096..4096 + 16384));
        assert_eq!(f.window(1 << 18, BLOCKS, None), None);
        f.insert(run(16384 * 3..16384 * 4));
        assert_eq!(f.window(1 << 18, BLOCKS, None), Some(run(16384 * 3..16384 * 4)));
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn freeing_twice_breaks_an_invariant() {
        let mut f = FreeIndex::new();
        f.insert(run(0..100));
        f.insert(run(50..60));
    }

    proptest! {
        #[test]
        fn matches_a_vector_of_bits(
            ops in prop::collection::vec((0u8..4, 0usize..256, 1usize..40), 1..120)
        ) {
            let mut f = FreeIndex::new();
            let mut bits = [false; 256];
            for (op, at, len) in ops {
                let end = (at + len).min(256);
                let range = run(at as u64..end as u64);
                match op {
                    0 => {
                        if bits[at..end].iter().all(|b| !b) {
                            f.insert(range);
                            bits[at..end].fill(true);
                        }
                    }
                    1 => {
                        let had = bits[at..end].iter().filter(|b| **b).count();
                        prop_assert_eq!(f.remove_range(range), had as u64);
                        bits[at..end].fill(false);
                    }
                    _ => {
                        let longest = bits.split(|b| !b).map(<[bool]>::len).max().unwrap_or(0);
                        let min = 1 + len / 2;
                        let wanted = Lengths { most: len.max(min) as u64, least: min as u64 };
                        let got = f.allocate(wanted, (op == 2).then_some(range.start));
                        match got {
                            None => prop_assert!(longest < min),
                            Some(r) => {
                                let wanted = len.max(min);
                                prop_assert!([wanted, longest].contains(&(r.len as usize)));
                                let part = r.start.0 as usize..r.end().0 as usize;
                                prop_assert!(bits[part.clone()].iter().all(|b| *b));
                                bits[part].fill(false);
                            }
                        }
                    }
                }
                let mut want = Vec::new();
                let mut at = 0;
                for part in bits.split(|b| !b) {
                    if !part.is_empty() {
                        want.push(run(at..at + part.len() as u64));
                    }
                    at += part.len() as u64 + 1;
                }
                prop_assert_eq!(f.runs().collect::<Vec<_>>(), want.clone());
                prop_assert_eq!(f.total(), want.iter().map(|r| r.len).sum::<u64>());
                prop_assert_eq!(f.largest(), want.iter().map(|r| r.len).max().unwrap_or(0));
                prop_assert_eq!(f.by_size.len(), want.len());
                prop_assert!(want.iter().all(|r| f.is_free(*r)));
            }
        }
    }
}
