//! Preallocated blocks: addresses for new blocks that operations took and did not need.
//!
//! The next operation gets them. This module hides how many are kept. When space is short, all of
//! them are given back.

use crate::lock::{self, Mutex};
use crate::space::Run;
use crate::space::alloc::Allocator;
use larder_format::Logical;

/// How many sets of preallocated blocks are kept, and how many addresses each has at most.
const SETS: usize = 4;
const SET_LEN: usize = 32;

/// The sets of addresses.
#[derive(Debug, Default)]
pub(crate) struct PreallocatedBlocks(Mutex<Vec<Vec<Logical>>, lock::Preallocated>);

impl Allocator {
    /// Addresses that an operation did not need, if there are any.
    pub(crate) fn take_preallocated(&self) -> Vec<Logical> {
        self.preallocated.0.lock().pop().unwrap_or_default()
    }
    /// Keeps addresses that an operation did not need for the next one. Only a few small sets are
    /// kept; the rest becomes free.
    pub(crate) fn keep_preallocated(&self, mut set: Vec<Logical>) {
        // Addresses are taken from the end, so the highest go back.
        let mut surplus = set.drain(..set.len().saturating_sub(SET_LEN)).collect::<Vec<_>>();
        let mut sets = self.preallocated.0.lock();
        if sets.len() < SETS && !set.is_empty() {
            sets.push(set);
        } else {
            surplus.append(&mut set);
        }
        drop(sets);
        self.give_addresses_back(surplus);
    }
    /// Gives all addresses back that operations did not need.
    pub(crate) fn give_back_preallocated(&self) {
        let sets = std::mem::take(&mut *self.preallocated.0.lock());
        sets.into_iter().for_each(|p| self.give_addresses_back(p));
    }
    fn give_addresses_back(&self, addresses: Vec<Logical>) {
        for at in addresses {
            self.groups.give_back(Run::new(at, u64::from(self.features.nodesize)), None);
        }
    }
}
