//! Hashing numbers of inodes and trees, which nearly every operation does several times.
//!
//! The numbers come from images, and the maker of an image must not be able to choose numbers that
//! collide. So each map has secrets of its own, drawn by the standard library. Otherwise as little
//! is done as spreads the numbers: a multiplication whose halves are folded.
//!
//! `foldhash` (0.2) serves less well. Its `fast` hasher takes 39 instructions for a look-up of a
//! pair of numbers; this one takes 44. But with every fifth seed it spreads badly numbers that lie
//! in equal steps, as inode numbers do: they fill less than three quarters of the places that
//! chance would fill, sometimes a quarter. Its `quality` hasher spreads as this one does, and takes
//! 45.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};

/// A map keyed by numbers.
pub(crate) type NumberMap<K, V> = std::collections::HashMap<K, V, Numbers>;

/// Makes the hashers of one map.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    seed: u64,
    factor: u64,
}

impl Default for Numbers {
    fn default() -> Self {
        let secret = RandomState::new();
        Self { seed: secret.hash_one(0u8), factor: secret.hash_one(1u8) | 1 }
    }
}

impl BuildHasher for Numbers {
    type Hasher = NumberHasher;
    fn build_hasher(&self) -> NumberHasher {
        NumberHasher { state: self.seed, factor: self.factor }
    }
}

/// Folds numbers together.
#[derive(Debug)]
pub(crate) struct NumberHasher {
    state: u64,
    factor: u64,
}

impl Hasher for NumberHasher {
    fn write_u64(&mut self, n: u64) {
        let product = u128::from(self.state ^ n) * u128::from(self.factor);
        self.state = (product as u64 ^ (product >> 64) as u64).rotate_left(23);
    }
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut n = [0; 8];
            n[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(n));
        }
        bytes.len().hash(self);
    }
    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
    fn finish(&self) -> u64 {
        let product = u128::from(self.state) * u128::from(self.factor);
        product as u64 ^ (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Numbers in a row, and numbers that differ in high bits only, fill the low and the high bits
    /// nearly as chance would. A table uses these bits.
    #[test]
    fn numbers_are_spread() {
        let numbers = Numbers::default();
        for step in [1u64, 2, 256, 1 << 20, 1 << 40, (1 << 52) + 1] {
            let hashes: Vec<u64> =
                (1..=4096u64).map(|i| numbers.hash_one((5u64, i.wrapping_mul(step)))).collect();
            assert_eq!(hashes.iter().collect::<HashSet<_>>().len(), hashes.len());
            let low = hashes.iter().map(|h| h % 4096).collect::<HashSet<_>>().len();
            let high = hashes.iter().map(|h| h >> 52).collect::<HashSet<_>>().len();
            // Chance fills 63 %.
            assert!(low > 2000 && high > 2000, "step {step}: {low}, {high}");
        }
        assert_ne!(
            numbers.hash_one(7u64),
            Numbers::default().hash_one(7u64),
            "each map has its own"
        );
    }
}
