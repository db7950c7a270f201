//! What could not be read. What merely follows from its absence is told apart from other damage.

use crate::source::Edge;
use larder_format::{Key, KeyType, Logical, ObjectId, TreeId};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Most ranges that are remembered one by one; with more, everything counts as lost.
const RANGES: usize = 4096;

/// Key ranges of trees that could not be read.
#[derive(Debug, Default)]
pub(crate) struct Lost {
    ranges: Mutex<Vec<(TreeId, Key, Key)>>,
    too_many: AtomicBool,
    uses: AtomicBool,
}

impl Lost {
    /// The node that `edge` leads to cannot be read.
    pub(crate) fn add(&self, edge: &Edge) {
        let has_uses = edge.level > 0
            || edge.tree.holds_files()
            || edge.tree == ObjectId::ROOT_TREE
            || edge.tree == ObjectId::CHUNK_TREE;
        if has_uses {
            self.uses.store(true, Relaxed);
        }
        let range = (edge.tree, edge.first_key.unwrap_or(Key::MIN), edge.end.unwrap_or(Key::MAX));
        let mut ranges = self.ranges.lock();
        if ranges.len() < RANGES {
            ranges.push(range);
        } else {
            self.too_many.store(true, Relaxed);
        }
    }
    /// A tree as a whole cannot be walked, or not be trusted.
    pub(crate) fn add_tree(&self, tree: TreeId) {
        self.uses.store(true, Relaxed);
        self.ranges.lock().push((tree, Key::MIN, Key::MAX));
    }
    /// Was anything lost?
    pub(crate) fn anything(&self) -> bool {
        !self.ranges.lock().is_empty()
    }
    /// May there be uses of extents that were not seen?
    pub(crate) fn uses(&self) -> bool {
        self.uses.load(Relaxed)
    }
    /// Was part of this tree lost?
    pub(crate) fn part_of(&self, tree: TreeId) -> bool {
        self.too_many.load(Relaxed) || self.ranges.lock().iter().any(|(t, ..)| *t == tree)
    }
    /// May the extent tree have said something about this address that was not seen?
    pub(crate) fn extents_at(&self, at: Logical) -> bool {
        let first = Key::new(at, KeyType(0), 0);
        let last = Key::new(at, KeyType(u8::MAX), u64::MAX);
        self.too_many.load(Relaxed)
            || self.ranges.lock().iter().any(|(tree, from, to)| {
                *tree == ObjectId::EXTENT_TREE && *from <= last && first < *to
            })
    }
}
