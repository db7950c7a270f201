//! How the memory that the engine may use is divided.
//!
//! One number is given, the cache size. 13/32 of it are for delayed data, 1/32 for what write-back
//! takes meanwhile, and 8/32 for clean nodes. The running and the sealed transaction have 5/32 each
//! for what they have changed: dirty nodes, and the notes for the commit. Each part is bounded by
//! itself, so that none can starve another:
//!
//! - *delayed data*: a writer that has no room waits, and meanwhile writes back what is oldest;
//! - *write-back*: what a batch holds besides the bytes themselves (`delalloc::scratch`) is counted
//!   before it begins. It waits for other batches; alone it always goes on;
//! - *clean nodes*: the cache drops those that are used least;
//! - *transactions*: a transaction is committed when it has two thirds of its part, or 32 MiB. When
//!   its part is full, operations wait until it is sealed. At most one transaction is sealed, and
//!   the next is not sealed before that one is published.
//!
//! So there is always room to make room: an extent is written from where its bytes lie or from what
//! was counted, and nodes are written a megabyte at a time. Blocks of the global trees that one
//! commit changes are not bounded by this. They are few where extents are neighbours.

/// Smallest cache size that is accepted as meant. With less, parts would be smaller than what one
/// operation needs.
const LEAST: u64 = 8 << 20;

/// Memory that one note of a transaction takes: a change of an extent's references, and the header
/// of its checksums.
const NOTE: u64 = 192;
/// Memory of an inode that a transaction has changed.
const INODE: u64 = 768;

/// The parts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Delayed data.
    pub(crate) data: u64,
    /// What write-back holds besides delayed data.
    pub(crate) scratch: u64,
    /// When a transaction has changed this much, it is committed.
    pub(crate) nodes: u64,
    /// When a transaction has changed this much, operations wait.
    pub(crate) commit: u64,
    /// No more than this.
    pub(crate) transaction: u64,
}

impl Budget {
    pub(crate) fn of(cache_size: u64) -> Self {
        let all = cache_size.max(LEAST);
        Self {
            data: all / 32 * 13,
            scratch: all / 32,
            nodes: all / 4,
            commit: (all / 48 * 5).min(32 << 20),
            transaction: all / 32 * 5,
        }
    }
}

/// How much a transaction has collected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collected {
    /// Nodes that it has changed.
    pub(crate) nodes: u64,
    /// Notes for the commit.
    pub(crate) notes: u64,
    /// Inodes that it has changed.
    pub(crate) inodes: u64,
}

impl Collected {
    /// The memory that this takes.
    pub(crate) fn memory(&self, nodesize: u32) -> u64 {
        self.nodes * u64::from(nodesize) + self.notes * NOTE + self.inodes * INODE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_no_more_than_the_whole() {
        for size in [0, 1 << 20, 32 << 20, 256 << 20, 3 << 40] {
            let b = Budget::of(size);
            assert!(b.data + b.scratch + b.nodes + 2 * b.transaction <= size.max(LEAST));
            assert!(b.commit < b.transaction && b.data >= 2 << 20);
        }
    }
}
