//! Rows against a plain array of sectors.

use super::*;
use crate::space::free_index::Lengths;
use proptest::prelude::*;

const SECTOR: u64 = 4096;
const START: Logical = Logical(1 << 20);
/// Sectors of an element.
const DEEP: usize = 16;

/// Each sector: is it in use?
struct Model {
    columns: usize,
    used: Vec<bool>,
}

impl Model {
    /// The sectors of the row of a sector.
    fn row(&self, sector: usize) -> impl Iterator<Item = usize> + use<> {
        let (stripe, columns) = (sector / DEEP / self.columns, self.columns);
        (0..columns).map(move |c| (stripe * columns + c) * DEEP + sector % DEEP)
    }
    fn is_free(&self, sector: usize) -> bool {
        self.row(sector).all(|s| !self.used[s])
    }
    fn agrees(&self, free: &FreeIndex, held: &HeldBack) -> Result<(), TestCaseError> {
        for sector in 0..self.used.len() {
            let at = place(sector, 1);
            prop_assert_eq!(free.is_free(at), self.is_free(sector), "sector {}", sector);
            let holds = !self.used[sector] && !self.is_free(sector);
            prop_assert_eq!(held.index.is_free(at), holds, "sector {}", sector);
        }
        Ok(())
    }
}

fn place(sector: usize, len: usize) -> Run {
    Run::new(START.plus(sector as u64 * SECTOR), len as u64 * SECTOR)
}
fn sectors(run: Run) -> Range<usize> {
    let sector = |at: Logical| ((at.0 - START.0) / SECTOR) as usize;
    sector(run.start)..sector(run.end())
}

#[test]
fn the_rest_of_a_row_waits_until_all_of_it_is_free() {
    let stripes = Stripes { start: START, columns: 3 };
    let mut free = FreeIndex::new();
    free.insert(Run::new(START, 2 * stripes.len()));
    let mut held = HeldBack::separate(stripes, &mut free);
    assert_eq!(held.total(), 0);
    // Across the end of the first element: three sectors of it, and two of the next.
    let run = free.take(place(13, 5)).unwrap();
    assert_eq!(held.hold(run, &mut free), 10 * SECTOR);
    assert_eq!(held.held(), [place(0, 2), place(29, 5), place(45, 3)]);
    assert_eq!(held.give(place(13, 3), &mut free), 9 * SECTOR);
    assert_eq!(held.held(), [place(0, 2), place(32, 2)]);
    assert_eq!(held.give(place(16, 2), &mut free), 6 * SECTOR);
    assert_eq!((held.total(), free.total()), (0, 2 * stripes.len()));
    // More than a full stripe.
    let run = free.take(place(40, 56)).unwrap();
    assert_eq!(held.hold(run, &mut free), 16 * SECTOR);
}

#[test]
fn blocks_of_a_unit_fill_the_rows_that_it_has_begun() {
    let stripes = Stripes { start: START, columns: 3 };
    let mut free = FreeIndex::new();
    free.insert(Run::new(START, stripes.len()));
    let mut held = HeldBack::separate(stripes, &mut free);
    let unit = Unit::Transaction(Generation(7));
    let block = free.take(place(4, 4)).unwrap();
    held.hold(block, &mut free);
    held.begin(0, unit, block);
    assert_eq!(held.take_begun(0, Unit::Transaction(Generation(8))), None);
    assert_eq!(held.take_begun(1, unit), None);
    assert_eq!(held.take_begun(0, unit), Some(place(20, 4)));
    // All of it comes back: the last place may belong to another by the time it is asked for.
    held.give(block, &mut free);
    held.give(place(20, 4), &mut free);
    assert_eq!(held.take_begun(0, unit), None);
    assert_eq!(free.total(), stripes.len());
}

proptest! {
    #[test]
    fn the_index_has_whole_rows(
        columns in 2usize..6,
        used in prop::collection::vec(0usize..400, 0..40),
        ops in prop::collection::vec((0u8..6, 0usize..1000, 1usize..130), 1..80),
    ) {
        let all = 5 * columns * DEEP;
        let mut model = Model { columns, used: vec![false; all] };
        let mut free = FreeIndex::new();
        free.insert(place(0, all));
        for sector in used {
            free.remove_range(place(sector % all, 1));
            model.used[sector % all] = true;
        }
        let stripes = Stripes { start: START, columns: columns as u64 };
        let mut held = HeldBack::separate(stripes, &mut free);
        model.agrees(&free, &held)?;
        let mut owned: Vec<Run> = Vec::new();
        for (op, n, len) in ops {
            match op {
                0 | 1 => {
                    let wanted = Lengths { most: len as u64 * SECTOR, least: SECTOR };
                    let hint = (op == 0).then(|| place(n % all, 1).start);
                    let step = (START, stripes.len());
                    let Some(run) = free.allocate_aligned(wanted, hint, step) else { continue };
                    prop_assert!(sectors(run).all(|s| model.is_free(s)));
                    let before = free.total();
                    prop_assert_eq!(held.hold(run, &mut free), before - free.total());
                    model.used[sectors(run)].fill(true);
                    owned.push(run);
                }
                2 => {
                    let run = place(n % all, len.min(all - n % all));
                    let there = model.used[sectors(run)].iter().all(|used| !used);
                    let before = (free.total(), held.total());
                    let change = held.take_exact(run, &mut free);
                    prop_assert_eq!(change.is_some(), there);
                    let Some(Change { more, fewer }) = change else { continue };
                    prop_assert_eq!(held.total(), before.1 + more - fewer);
                    prop_assert_eq!(free.total(), before.0 - more - (run.len - fewer));
                    model.used[sectors(run)].fill(true);
                    owned.push(run);
                }
                _ if !owned.is_empty() => {
                    // A part of what was taken together.
                    let mut run = owned.swap_remove(n % owned.len());
                    let first = (len % 3 == 0).then(|| Run::new(run.start, run.len / SECTOR / 2 * SECTOR));
                    if let Some(first) = first.filter(|first| first.len > 0) {
                        owned.push(first);
                        run = Run::between(first.end(), run.end()).unwrap();
                    }
                    let before = free.total();
                    prop_assert_eq!(held.give(run, &mut free), free.total() - before);
                    model.used[sectors(run)].fill(false);
                }
                _ => {}
            }
            model.agrees(&free, &held)?;
        }
    }
}
