//! How the memory that the engine may use is divided.
//!
//! One number is given, the cache size. Thirteen thirty-seconds of it are for delayed data, one for
//! what writing it back takes meanwhile, a quarter is for clean nodes, and five thirty-seconds each
//! are for what the running and the sealed transaction have changed: dirty nodes, and the notes for
//! the commit. Each part is bounded by itself, so that none can starve another:
//!
//! - *delayed data*: who wants to write more waits, and writes back what is oldest meanwhile;
//! - *writing back*: what a batch holds beside the bytes themselves — sectors made whole,
//!   compressed pieces — is counted before it begins, and it waits for others that have it; alone
//!   it always goes on;
//! - *clean nodes*: the cache lets go of those that are used least;
//! - *transactions*: from two thirds of its part on, and from 32 MiB on, a transaction is
//!   committed; when its part is full operations wait until it is sealed. There is at most one
//!   sealed transaction, and the next is not sealed before that one is published.
//!
//! So there is always room to make room: an extent is written from where its bytes lie or from what
//! was counted, nodes leave a megabyte at a time. Blocks of the global trees that one commit
//! changes are not bounded by this; they are few where extents lie beside each other.

/// Least cache size that is not taken for a mistake: below, parts would be smaller than what one
/// operation needs.
const LEAST: u64 = 8 << 20;

/// Memory that one note of a transaction takes: a change of an extent's references, its checksums'
/// head.
const NOTE: u64 = 192;
/// Memory of an inode that a transaction has changed.
const INODE: u64 = 768;

/// The parts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Delayed data.
    pub(crate) data: u64,
    /// What writing back holds beside them.
    pub(crate) scratch: u64,
    /// Clean nodes.
    pub(crate) nodes: u64,
    /// What one transaction has changed: commit from here on.
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

/// Memory of what a transaction has collected.
pub(crate) fn transaction_memory(nodes: u64, nodesize: u32, notes: u64, inodes: u64) -> u64 {
    nodes * u64::from(nodesize) + notes * NOTE + inodes * INODE
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
