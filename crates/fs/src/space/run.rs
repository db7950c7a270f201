//! Stretches of the logical address space, in which this room counts: an address and a length.

use larder_format::Logical;

/// A stretch of the logical address space. Never wraps: `start + len` fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Run {
    /// First byte.
    pub(crate) start: Logical,
    /// Bytes.
    pub(crate) len: u64,
}

impl Run {
    /// A run from its first byte and its length.
    #[must_use]
    pub(crate) fn new(start: Logical, len: u64) -> Self {
        debug_assert!(start.0.checked_add(len).is_some(), "run wraps");
        Self { start, len }
    }
    /// What lies between two addresses, if anything does.
    #[must_use]
    pub(crate) fn between(start: Logical, end: Logical) -> Option<Self> {
        (start < end).then(|| Self { start, len: end.0 - start.0 })
    }
    /// The first byte after it.
    #[must_use]
    pub(crate) fn end(self) -> Logical {
        self.start.plus(self.len)
    }
    /// Does it hold all of `other`?
    #[must_use]
    pub(crate) fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }
    /// Do the two share a byte?
    #[must_use]
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end() && self.len > 0 && other.len > 0
    }
    /// The part that lies in `other`, if any.
    #[must_use]
    pub(crate) fn intersect(self, other: Self) -> Option<Self> {
        Self::between(self.start.max(other.start), self.end().min(other.end()))
    }
}

/// Space freed by one transaction. It is given back when no version can reach it.
pub(crate) type Pinned = Vec<Run>;

/// Joins runs that come in address order into longer ones, as long as they touch and have the same
/// tag.
///
/// The committer frees and allocates thousands of neighbouring extents. The trees that are edited
/// by range (free space, checksums) should see one range. Tags keep apart what must not be joined:
/// another block group, the opposite change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunJoiner<T> {
    pending: Option<(T, Run)>,
}

impl<T> Default for RunJoiner<T> {
    fn default() -> Self {
        Self { pending: None }
    }
}

impl<T: PartialEq> RunJoiner<T> {
    /// Takes a run; returns the one before if it is complete.
    #[must_use]
    pub(crate) fn push(&mut self, tag: T, run: Run) -> Option<(T, Run)> {
        match &mut self.pending {
            Some((t, p)) if *t == tag && p.end() == run.start => {
                p.len += run.len;
                None
            }
            pending => pending.replace((tag, run)),
        }
    }
    /// The last run.
    #[must_use]
    pub(crate) fn finish(self) -> Option<(T, Run)> {
        self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_while_they_touch_and_agree() {
        let run = |start, len| Run::new(Logical(start), len);
        let mut joiner = RunJoiner::default();
        let mut out = Vec::new();
        for (tag, r) in
            [(1, run(0, 4)), (1, run(4, 4)), (2, run(8, 4)), (2, run(13, 1)), (2, run(14, 6))]
        {
            out.extend(joiner.push(tag, r));
        }
        out.extend(joiner.finish());
        assert_eq!(out, [(1, run(0, 8)), (2, run(8, 4)), (2, run(13, 7))]);
        assert_eq!(RunJoiner::<u8>::default().finish(), None);
    }
}
