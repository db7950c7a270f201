//! Which files the kernel may keep contents of.
//!
//! The kernel may fill its page cache with old contents while a direct write is under way, and does
//! not drop them again by itself. So it is notified before the write is answered. That takes a
//! thread that [may wait for the kernel](crate::handler::ExecContext), and costs several times as
//! much as the write. Hardly any file is both read through the page cache and written past it. So
//! the server notes which ones were read.
//!
//! The notes are a table of bits, by a hash of the node. A bit that is set for another file costs
//! time only. No bit is ever taken back, because the kernel does not say when it drops pages.
//! `docs/FUSE.md` has the whole reason, and the case that this does not see.

use crate::proto::NodeId;
use std::sync::atomic::{AtomicU64, Ordering};

const BITS: u32 = 19;

/// One bit for each of the files that share a hash: 64 KiB.
#[derive(Debug)]
pub(super) struct CachedFiles(Box<[AtomicU64]>);

impl Default for CachedFiles {
    fn default() -> Self {
        Self((0..1 << (BITS - 6)).map(|_| AtomicU64::new(0)).collect())
    }
}

impl CachedFiles {
    fn place(&self, node: NodeId) -> (&AtomicU64, u64) {
        // Fibonacci hashing: neighbours get different places, and all bits of a number count.
        let hash = node.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - BITS);
        (&self.0[(hash >> 6) as usize], 1 << (hash & 63))
    }

    /// The kernel will get contents of this file to keep. To be called before they are read, so
    /// that a later write finds the note.
    pub(super) fn reads(&self, node: NodeId) {
        let (word, bit) = self.place(node);
        if word.load(Ordering::SeqCst) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// May the kernel have contents of this file?
    pub(super) fn may_have(&self, node: NodeId) -> bool {
        let (word, bit) = self.place(node);
        word.load(Ordering::SeqCst) & bit != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_known_and_little_else() {
        let cached = CachedFiles::default();
        // The nodes of two subvolumes.
        let nodes = || (257..5257).chain((300 << 40 | 257)..(300 << 40 | 5257)).map(NodeId);
        assert!(!nodes().any(|n| cached.may_have(n)));
        nodes().for_each(|n| cached.reads(n));
        assert!(nodes().all(|n| cached.may_have(n)));
        let others = (10_000..110_000).filter(|n| cached.may_have(NodeId(*n))).count();
        assert!(others < 4_000, "{others} of 100,000 others");
    }
}
