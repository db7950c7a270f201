//! What is written back where space is short, as far as benchmarks choose.
//!
//! [`crate::tuning::older`] says what the values mean, and why they are there.

use super::dirty::Tick;
use super::{Delayed, writeback};
use crate::engine::Core;
use crate::tuning::older::Reclaim;

impl Reclaim {
    /// Writes some delayed data back, the oldest first, where `left` are still wanted. Returns what
    /// was written, which is nothing where there was nothing to take.
    pub(super) fn some(self, core: &Core, left: Delayed) -> Delayed {
        match self {
            Self::AsNeeded => writeback::batch(core, Tick::NEVER, left),
            Self::WholeInodes => writeback::whole_file(core),
        }
    }

    /// May more runs of files be written than were wanted?
    pub(crate) fn may_exceed(self) -> bool {
        self == Self::WholeInodes
    }
}
