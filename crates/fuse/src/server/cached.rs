//! Which files the kernel may keep contents of.
//!
//! Before a write with `O_DIRECT` the kernel drops its pages of the range; after one that it does
//! not wait for (io_uring, AIO) it does not do so again. Who reads the file through the page cache
//! meanwhile leaves the old contents there for everybody, until the pages go: a backup of a virtual
//! machine's disk would have them. Therefore the kernel is told to drop them before such a write is
//! answered. Telling waits for pages that other requests are filling, which takes another thread
//! ([`Patience::Kernel`](crate::handler::Patience::Kernel)) and costs several times as much as the
//! write — and hardly any file is both read through the page cache and written past it. So it is
//! noted which were read.
//!
//! Those other requests need buffers, too. Where half of them are taken by writes that wait in this
//! way, further writes are answered first and told of afterwards.
//!
//! The notes are a table of bits, by a hash of the node. A bit that is set for another file costs
//! time; none is ever taken back, because the kernel does not say when it drops pages. What this
//! does not see is a mapping of a file that was opened with `O_DIRECT`: requests for its pages look
//! like direct ones.

use std::sync::atomic::{AtomicU64, Ordering};

const BITS: u32 = 19;

/// One bit for each of the files that share a hash: 64 KiB.
#[derive(Debug)]
pub(super) struct Cached(Box<[AtomicU64]>);

impl Default for Cached {
    fn default() -> Self {
        Self((0..1 << (BITS - 6)).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Cached {
    fn place(&self, node: u64) -> (&AtomicU64, u64) {
        // Fibonacci hashing: neighbours get different places, and all bits of a number count.
        let hash = node.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - BITS);
        (&self.0[(hash >> 6) as usize], 1 << (hash & 63))
    }

    /// The kernel is about to be given contents of this file to keep. To be called before they are
    /// read: whoever replaces them later than that finds the note.
    pub(super) fn reads(&self, node: u64) {
        let (word, bit) = self.place(node);
        if word.load(Ordering::SeqCst) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// May the kernel have contents of this file?
    pub(super) fn may_have(&self, node: u64) -> bool {
        let (word, bit) = self.place(node);
        word.load(Ordering::SeqCst) & bit != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_known_and_little_else() {
        let cached = Cached::default();
        // The nodes of two subvolumes.
        let nodes = || (257..5257).chain((300 << 40 | 257)..(300 << 40 | 5257));
        assert!(!nodes().any(|n| cached.may_have(n)));
        nodes().for_each(|n| cached.reads(n));
        assert!(nodes().all(|n| cached.may_have(n)));
        let others = (10_000..110_000).filter(|n| cached.may_have(*n)).count();
        assert!(others < 4_000, "{others} of 100,000 others");
    }
}
