//! Free space where there is parity: what a full stripe holds back.
//!
//! A **row** is one sector of each element of a full stripe, all equally far from the beginnings of
//! their elements. One sector of parity covers a row. To write into a row in which something
//! durable lies would put that at risk: after a crash the parity may belong to neither the old nor
//! the new content, and a device that is lost then takes a sector along for good. So a sector is
//! handed out only where its whole row is free, and all that is written into a row until it is free
//! again belongs to one **write unit**, which becomes durable as a whole: the tree blocks of a
//! transaction, a step of a log, a batch of data.
//!
//! The rest of a row of which a unit took a part is **held back**. So is what Linux left free in
//! rows that are partly used. [`HeldBack`] keeps it in an index of its own, beside that of the
//! free space, which has whole rows only. Whether a row has become free is seen by a look at the
//! other elements of its stripe; there is nothing that grows with the number of rows.
//!
//! Tree blocks come one after the other. So the unit that takes one has **begun** the rows of it,
//! and gets what these hold back first.

use crate::space::Run;
use crate::space::free_index::FreeIndex;
use larder_format::{Generation, Logical, STRIPE_LEN};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Tree blocks that become durable together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Those of a transaction.
    Transaction(Generation),
    /// Those of a step of a log. Each has a number of its own.
    LogStep(u64),
}

/// Takers of tree blocks. Each has begun rows of its own.
pub(crate) const USERS: usize = 3;

/// How the full stripes of a group lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stripes {
    /// The first address of the group.
    pub(crate) start: Logical,
    /// Elements of data in each, at least 2: with one every sector is a row.
    pub(crate) columns: u64,
}

impl Stripes {
    /// Bytes of data of a full stripe.
    pub(crate) fn len(self) -> u64 {
        self.columns * STRIPE_LEN
    }

    /// The beginning of the full stripe that an address lies in.
    fn stripe_of(self, at: Logical) -> Logical {
        self.start.plus((at.0 - self.start.0) / self.len() * self.len())
    }

    /// The full stripes that `run` has as a whole.
    pub(crate) fn whole(self, run: Run) -> Option<Run> {
        let into = |at: Logical| at.0 - self.start.0;
        let (first, last) = (into(run.start).div_ceil(self.len()), into(run.end()) / self.len());
        let at = |stripe: u64| self.start.plus(stripe * self.len());
        Run::between(at(first), at(last))
    }

    /// The beginning of `run` up to the last border between full stripes in it. If there is none:
    /// up to the first border behind it, or up to `end`.
    pub(crate) fn up_to_a_border(self, run: Run, end: Logical) -> Run {
        let into = |at: Logical| at.0 - self.start.0;
        let last = self.start.plus(into(run.end()) / self.len() * self.len());
        let border = if last > run.start { last } else { last.plus(self.len()) };
        Run::new(
            run.start,
            if run.end() == end { run.len } else { border.min(end).0 - run.start.0 },
        )
    }

    /// All that lies in the rows of `run`, with `run` itself: full stripes first to last, and of
    /// those that `run` has in part the same range of each element.
    fn rows_of(self, run: Run) -> Vec<Rows> {
        let mut out = Vec::new();
        let mut at = run.start;
        while at < run.end() {
            let stripe = self.stripe_of(at);
            let whole = (run.end().0 - stripe.0) / self.len() * self.len();
            if at == stripe && whole > 0 {
                out.push(Rows::Stripes(Run::new(stripe, whole)));
                at = at.plus(whole);
                continue;
            }
            let end = run.end().min(stripe.plus(self.len()));
            for range in in_elements(at.0 - stripe.0..end.0 - stripe.0) {
                out.push(Rows::Part { stripe, range });
            }
            at = end;
        }
        out
    }

    /// The sectors of a range of each element of a stripe.
    fn columns_of(self, stripe: Logical, range: Range<u64>) -> impl Iterator<Item = Run> {
        (0..self.columns).map(move |column| {
            Run::new(stripe.plus(column * STRIPE_LEN + range.start), range.end - range.start)
        })
    }
}

/// Rows that lie behind each other.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rows {
    /// All rows of full stripes.
    Stripes(Run),
    /// Of each element of the stripe this range.
    Part { stripe: Logical, range: Range<u64> },
}

/// What a range of a full stripe takes of its elements, taken together.
fn in_elements(range: Range<u64>) -> SmallVec<[Range<u64>; 2]> {
    let (from, to) = (range.start % STRIPE_LEN, (range.end - 1) % STRIPE_LEN + 1);
    match (range.end - 1) / STRIPE_LEN - range.start / STRIPE_LEN {
        0 => smallvec![from..to],
        1 if to < from => smallvec![0..to, from..STRIPE_LEN],
        _ => smallvec![0..STRIPE_LEN],
    }
}

/// What a unit has begun: places for blocks in the rows of one that it took.
#[derive(Debug, Default)]
struct Begun {
    unit: Option<Unit>,
    places: Vec<Run>,
}

/// Free space of a group that lies in rows of which something is in use.
#[derive(Debug)]
pub(crate) struct HeldBack {
    stripes: Stripes,
    index: FreeIndex,
    begun: [Begun; USERS],
}

impl HeldBack {
    /// Moves out of `free` what lies in rows that are not free as a whole.
    pub(crate) fn separate(stripes: Stripes, free: &mut FreeIndex) -> Self {
        let mut this = Self { stripes, index: std::mem::take(free), begun: Default::default() };
        let runs: Vec<Run> = this.index.runs().collect();
        for run in runs {
            this.release(run, free);
        }
        this
    }

    /// Bytes that are held back.
    pub(crate) fn total(&self) -> u64 {
        self.index.total()
    }

    /// `run` was taken out of `free`: the rest of its rows is held back. Returns how many bytes
    /// that is.
    pub(crate) fn hold(&mut self, run: Run, free: &mut FreeIndex) -> u64 {
        let before = free.total();
        for rows in self.stripes.rows_of(run) {
            let Rows::Part { stripe, range } = rows else { continue };
            for column in self.stripes.columns_of(stripe, range) {
                let parts: SmallVec<[Run; 4]> = free.parts(column).collect();
                for part in parts {
                    free.remove_range(part);
                    self.index.insert(part);
                }
            }
        }
        before - free.total()
    }

    /// `run` is not in use any more. Where its rows are free as a whole they go to `free`, the rest
    /// of it is held back. Returns how many bytes have become free.
    pub(crate) fn give(&mut self, run: Run, free: &mut FreeIndex) -> u64 {
        self.index.insert(run);
        let before = free.total();
        self.release(run, free);
        free.total() - before
    }

    /// Moves rows of `run` to `free` that are held back as a whole.
    fn release(&mut self, run: Run, free: &mut FreeIndex) {
        for rows in self.stripes.rows_of(run) {
            match rows {
                Rows::Stripes(all) => self.move_out(all, free),
                Rows::Part { stripe, range } => {
                    for range in self.whole_rows(stripe, range) {
                        for column in self.stripes.columns_of(stripe, range) {
                            self.move_out(column, free);
                        }
                    }
                }
            }
        }
    }

    fn move_out(&mut self, run: Run, free: &mut FreeIndex) {
        let moved = self.index.remove_range(run);
        debug_assert_eq!(moved, run.len, "all of it was held back");
        free.insert(run);
        for begun in &mut self.begun {
            begun.places.retain(|place| !place.overlaps(run));
        }
    }

    /// The parts of a range in which every element of a stripe is held back.
    fn whole_rows(&self, stripe: Logical, range: Range<u64>) -> Vec<Range<u64>> {
        let mut rows = vec![range];
        for column in 0..self.stripes.columns {
            let base = stripe.plus(column * STRIPE_LEN);
            let in_column = |rows: &Range<u64>| {
                let part = Run::new(base.plus(rows.start), rows.end - rows.start);
                self.index.parts(part).map(move |p| p.start.0 - base.0..p.end().0 - base.0)
            };
            rows = rows.iter().flat_map(in_column).collect();
        }
        rows
    }

    /// Takes exactly `run`, which may be free or held back, and holds back the rest of its rows.
    /// `None` if not all of it is there; otherwise by how much `free` and what is held back have
    /// shrunk and grown.
    pub(crate) fn take_exact(&mut self, run: Run, free: &mut FreeIndex) -> Option<Change> {
        let there = free.parts(run).chain(self.index.parts(run)).map(|part| part.len).sum::<u64>();
        (there == run.len).then(|| {
            free.remove_range(run);
            let fewer = self.index.remove_range(run);
            let more = self.hold(run, free);
            Change { more, fewer }
        })
    }

    /// `unit` took `block`, and may have the rest of its rows.
    pub(crate) fn begin(&mut self, user: usize, unit: Unit, block: Run) {
        let stripe = self.stripes.stripe_of(block.start);
        let range = in_elements(block.start.0 - stripe.0..block.end().0 - stripe.0);
        let mut places: Vec<Run> = match &range[..] {
            // Within one element.
            [range] if range.end - range.start == block.len => {
                self.stripes.columns_of(stripe, range.clone()).collect()
            }
            _ => Vec::new(),
        };
        places.retain(|place| self.index.is_free(*place));
        places.reverse();
        self.begun[user] = Begun { unit: Some(unit), places };
    }

    /// The next place in the rows that `unit` has begun. It is not held back any more.
    pub(crate) fn take_begun(&mut self, user: usize, unit: Unit) -> Option<Run> {
        let begun = &mut self.begun[user];
        if begun.unit != Some(unit) {
            return None;
        }
        self.index.take(begun.places.pop()?)
    }

    /// What is held back, in address order.
    #[cfg(test)]
    pub(crate) fn held(&self) -> Vec<Run> {
        self.index.runs().collect()
    }
}

/// By how many more, and fewer, bytes are held back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) more: u64,
    pub(crate) fewer: u64,
}

#[cfg(test)]
mod tests;
