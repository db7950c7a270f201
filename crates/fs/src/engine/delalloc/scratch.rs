//! Memory that write-back needs while it makes room: one pool, from which each batch takes its
//! share beforehand.
//!
//! Most of what is written leaves from where it lies. But sectors that were written only in part
//! are made whole in memory, compressed data is held in both forms, and packing itself takes
//! memory. Without a bound, every caller that helps to write back would add its own. So a batch
//! says beforehand what it will need ([`super::memory_needed`]). It waits while others hold so much
//! that the sum would exceed the pool's part of the cache size.
//!
//! **Progress.** A batch that is alone always passes, whatever it needs. The need of one batch is
//! bounded where batches are made up (`file_data::dirty::MOST_MADE`, `compress::batch`). A waiter
//! for the pool holds no transaction handle and no lock that write-back takes. A batch that has its
//! share waits for the device and for commits only. So it ends, and its share goes to the next
//! batch.

use crate::lock::{self, Condvar, Mutex, Wait};

/// A batch that needs no more than this never waits: checksums and edges of an ordinary batch.
const SMALL: u64 = 256 << 10;
/// Memory for packing one piece: the packer's tables at a high level, the piece in one stretch, and
/// the result.
pub(super) const PACKER: u64 = 2 << 20;

/// The pool, with what is held of it.
#[derive(Debug)]
pub(crate) struct Scratch {
    size: u64,
    held: Mutex<Held, lock::Scratch>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Held {
    now: u64,
    most: u64,
}

/// A part of the pool.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    pool: &'a Scratch,
    bytes: u64,
}

impl Scratch {
    /// A pool of `size` bytes, of which nothing is held.
    pub(crate) fn new(size: u64) -> Self {
        Self { size, held: Mutex::default(), freed: Condvar::new() }
    }
    /// Waits for `bytes` of the pool.
    pub(crate) fn take(&self, bytes: u64) -> Part<'_> {
        lock::before_waiting(Wait::Commit);
        let bytes = if bytes <= SMALL { 0 } else { bytes };
        if bytes > 0 {
            let mut held = self.held.lock();
            while held.now > 0 && held.now + bytes > self.size {
                self.freed.wait(&mut held);
            }
            held.now += bytes;
            held.most = held.most.max(held.now);
        }
        Part { pool: self, bytes }
    }
    /// Most bytes that were held at once so far.
    pub(crate) fn most(&self) -> u64 {
        self.held.lock().most
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.pool.held.lock().now -= self.bytes;
            self.pool.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn what_is_held_stays_within_the_pool_and_everybody_gets_there() {
        const SIZE: u64 = 8 << 20;
        let pool = Scratch::new(SIZE);
        let held = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for n in 0..8u64 {
                let (pool, held) = (&pool, &held);
                scope.spawn(move || {
                    for i in 0..200 {
                        let bytes = SMALL + 1 + (n * 977 + i * 31) % 37 * (512 << 10);
                        let part = pool.take(bytes);
                        let all = held.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        assert!(all <= SIZE || all == bytes, "{all} at once");
                        std::thread::yield_now();
                        held.fetch_sub(bytes, Ordering::SeqCst);
                        drop(part);
                    }
                });
            }
        });
        assert!(pool.most() > SIZE, "one that is larger than the pool passes alone");
        assert_eq!(pool.held.lock().now, 0);
    }

    #[test]
    fn small_needs_never_wait() {
        let pool = Scratch::new(1);
        let all = pool.take(1 << 40);
        drop(pool.take(SMALL));
        drop(all);
    }
}
