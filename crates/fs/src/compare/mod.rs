//! What differs between two read-only subvolumes, for readers of whole trees.
//!
//! | module | decision it hides |
//! |---|---|
//! | `frozen` | how a subvolume that does not change is read by inode number, for as long as it takes |
//! | `walk` | how two trees are walked together, and what both share is left out |
//! | `users` | which files use an extent, as far as that is found with bounded work |
//!
//! A comparison may take hours, and its reader may be slow. So nothing here keeps a version of a
//! tree, which would pin space: each call takes a new one, and a comparison goes on from a key.
//! That is sound because the subvolume does not change: its reader keeps it read-only.

pub(crate) mod frozen;
pub(crate) mod users;
pub(crate) mod walk;

pub use frozen::{ExtentPart, Frozen, FrozenEntry, FrozenName, PartContent};
pub use users::ExtentUser;
pub use walk::{Comparison, ItemChange};
