//! Space: what owns which bytes, what gets which bytes next, and how that is written down.
//!
//! These are the parts, from the ground up. Nothing here knows files or directories. Trees are seen
//! only through [`crate::tree::TreeOps`], so that each part is tested on a sorted map.
//!
//! | module | decision it hides |
//! |---|---|
//! | [`refs`] | how changes of extent references wait for the committer |
//! | [`extent_tree`] | how references lie in the extent tree |
//! | [`free_space_tree`] | how free space lies in its tree: extents, bitmaps, conversions |
//! | [`csum_tree`] | how data checksums are packed into items |
//! | [`free_index`] | how free space of a block group is searched in memory |
//! | [`chunks`] | how large chunks are and where they go |
//! | [`reserve`] | which requests wait, and in which order, when space is short |
//! | [`groups`] | which block group an allocation comes from |
//! | `alloc` | when a chunk is made, and what then must know of it |
//! | `preallocated` | how many preallocated blocks are kept for the next operation |
//! | `discard`, `trim` | when the device is told that space holds nothing; which space that is |
//! | `usage` | figures about space for people: what is full |
//!
//! Two views of the same space must not be confused. The *allocator's view* (free index) already
//! lacks the blocks of the running transaction. The *applied view* (`used`, the free-space tree)
//! changes only when the committer applies delayed references; it is what goes to disk.

pub(crate) mod alloc;
pub mod chunks;
pub mod csum_tree;
pub(crate) mod discard;
pub mod extent_tree;
pub mod free_index;
pub mod free_space_tree;
pub mod groups;
pub(crate) mod preallocated;
pub mod refs;
pub mod reserve;
pub(crate) mod trim;
pub(crate) mod usage;

pub use trim::{TrimRange, Trimmed};
pub use usage::{KindUsage, SpaceUsage};

use larder_format::Logical;

/// What space is for. On an image with mixed groups data and metadata share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpaceKind {
    /// File data.
    Data,
    /// Tree blocks, the chunk tree's excepted.
    Metadata,
    /// The chunk tree.
    System,
}

/// A stretch of the logical address space. Never wraps: `start + len` fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// First byte.
    pub start: Logical,
    /// Bytes.
    pub len: u64,
}

impl Run {
    /// A run from its first byte and its length.
    #[must_use]
    pub fn new(start: Logical, len: u64) -> Self {
        debug_assert!(start.0.checked_add(len).is_some(), "run wraps");
        Self { start, len }
    }
    /// The first byte after it.
    #[must_use]
    pub fn end(self) -> Logical {
        self.start.plus(self.len)
    }
    /// Does it hold all of `other`?
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }
    /// Do the two share a byte?
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end() && self.len > 0 && other.len > 0
    }
    /// The part that lies in `other`, if any.
    #[must_use]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        (start < end).then(|| Self { start, len: end.0 - start.0 })
    }
}

/// Joins runs that come in address order into longer ones, as long as they touch and have the same
/// tag.
///
/// The committer frees and allocates thousands of neighbouring extents. The trees that are edited
/// by range (free space, checksums) should see one range. Tags keep apart what must not be joined:
/// another block group, the opposite change.
#[derive(Clone, Copy, Debug)]
pub struct RunJoiner<T> {
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
    pub fn push(&mut self, tag: T, run: Run) -> Option<(T, Run)> {
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
    pub fn finish(self) -> Option<(T, Run)> {
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
