//! Scrub: everything that is stored is read, judged, and repaired from what is good.
//!
//! A scrub goes through the chunks, and in each through its strips: the same range of every device
//! of the chunk at once. What is allocated there is taken from a version of the extent tree, and
//! the checksums from the same commit. The version's epoch keeps the space from being used for
//! anything else, so what is read under it is what the commit wrote, however busy the file system
//! is. Data without checksums is the exception, because it may be written in place. Its copies are
//! compared again with such writes kept out, before anything is said about them.
//!
//! | module | decision it hides |
//! |---|---|
//! | `report` | what a scrub says, and what it needs to go on later |
//! | `control` | how a scrub is slowed down, told to end, and watched |
//! | `content` | what is allocated in a strip, and what is known of it |
//! | `users` | which files use damaged data, in which subvolumes |
//! | `load` | how a strip is read |
//! | `judged` | what can be good or bad in a strip, and what is done with a place |
//! | `sources` | where good bytes come from |
//! | `mend` | which bytes are good, and what is written over bad ones |
//! | `rows` | what holds for parity |
//! | `supers` | what holds for superblocks, and when a device counts as up to date |
//! | `run` | in which order chunks are read, and on which threads |

pub(crate) mod content;
mod control;
mod judged;
mod load;
mod mend;
mod report;
mod rows;
mod run;
mod sources;
mod supers;
mod users;

pub use control::ScrubControl;
pub use report::{
    Damage, ScrubCounts, ScrubDamage, ScrubFile, ScrubOptions, ScrubState, ScrubStatus,
};
pub(crate) use run::run;
