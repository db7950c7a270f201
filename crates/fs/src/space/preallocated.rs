//! Preallocated blocks: addresses for new blocks that operations took and did not need.
//!
//! The next operation gets them. This module hides how many are kept. When space is short, all of
//! them are given back. Each set knows the transaction in which it was taken.

use crate::lock::{self, Mutex};
use larder_format::{Generation, Logical};

/// How many sets of preallocated blocks are kept, and how many addresses each has at most.
const SETS: usize = 4;
const SET_LEN: usize = 32;

/// The sets of addresses.
#[derive(Debug, Default)]
pub(crate) struct PreallocatedBlocks(Mutex<Vec<(Generation, Vec<Logical>)>, lock::Preallocated>);

impl PreallocatedBlocks {
    /// Addresses that an operation did not need, and its transaction, if there are any.
    pub(super) fn take(&self) -> Option<(Generation, Vec<Logical>)> {
        self.0.lock().pop()
    }
    /// Keeps addresses that an operation of `of` did not need for the next one. Only a few small
    /// sets are kept; the rest is returned and becomes free.
    #[must_use]
    pub(super) fn keep(&self, of: Generation, mut set: Vec<Logical>) -> Vec<Logical> {
        // Addresses are taken from the end, so the highest go back.
        let mut surplus = set.drain(..set.len().saturating_sub(SET_LEN)).collect::<Vec<_>>();
        let mut sets = self.0.lock();
        if sets.len() < SETS && !set.is_empty() {
            sets.push((of, set));
        } else {
            surplus.append(&mut set);
        }
        surplus
    }
    /// Takes all addresses that operations did not need.
    pub(super) fn take_all(&self) -> Vec<Logical> {
        std::mem::take(&mut *self.0.lock()).into_iter().flat_map(|(_, set)| set).collect()
    }
}
