//! Replacing a device: another one, the target, gets everything that it holds, and takes its place.
//!
//! The copy goes along the device from front to back, while the file system is in use. What makes
//! it right is the order of the first steps ([`run`]):
//!
//! 1. From here on every write and discard that goes to the source goes to the target as well.
//! 2. The item that says so is durable.
//! 3. All delayed data is written, operations with data on its way to an extent have arrived, and a
//!    commit follows. Writes that began before step 1 went to the source alone. Now all of them
//!    have ended, and what they wrote is in the published extent tree, or nothing refers to it.
//! 4. The copy. For each strip it takes a version of the extent tree that is at least that of
//!    step 3, and copies what is allocated there, *and no sector more*. While the version lives,
//!    its epoch keeps that space from being used for anything else: so nothing overwrites what is
//!    being copied, and nothing old is written over what is new. What is not allocated in the
//!    version was or will be written after step 1, and so is on the target already.
//! 5. A commit makes the target the device ([`crate::transaction::Replacement`]).
//!
//! Three kinds of places need more than that. **Data without checksums** may be written in place,
//! so it is read and written with such writes kept out (`Core::in_place`). **Parity** covers
//! sectors that are free, too: of a row in which something is in use every sector is copied.
//! Nothing is written into such a row, so these do not change either. **Superblocks** lie in no
//! extent, and the target has its own.
//!
//! Bytes come from the source if they match their checksums, or from other copies and parity;
//! where the source is to be avoided, or is missing, from the others first. Where nothing is good,
//! the target gets what the source has, or zeros, and that is counted.
//!
//! The cursor in the item says how far the copy is. A commit writes it, and its flush covers the
//! target. So it is true after a power cut as well, and so is that the target has all writes: a
//! target whose superblock is not of the last commit missed some, and the copy begins anew.
//! `docs/REPLACE.md` has the rules for those that use this.
//!
//! | module | decision it hides |
//! |---|---|
//! | `control` | how a replacement is told to end, and watched |
//! | `plan` | which sectors of a strip are copied, and what is known of them |
//! | `gather` | where good bytes come from |
//! | `copy` | in which order the device is copied, and what is kept out meanwhile |
//! | `run` | how a replacement begins, goes on and ends |

mod control;
mod copy;
mod gather;
mod plan;
mod run;

pub use control::{ReplaceControl, ReplaceStatus, Replacing};
pub use run::{ReplaceOptions, ReplaceSource};
pub(crate) use run::{cancel, resume, start, status};
