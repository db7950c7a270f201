//! Space: what owns which bytes, what gets which bytes next, and how that is written down.
//!
//! These are the parts, from the ground up. Nothing here knows files or directories. Trees are seen
//! only through [`crate::tree::TreeOps`], so that each part is tested on a sorted map.
//!
//! | module | decision it hides |
//! |---|---|
//! | `kind`, `run` | what space is for; stretches of it |
//! | [`refs`] | how changes of extent references wait for the committer |
//! | [`extent_tree`] | how references lie in the extent tree |
//! | [`free_space_tree`] | how free space lies in its tree: extents, bitmaps, conversions |
//! | [`csum_tree`] | how data checksums are packed into items |
//! | [`free_index`] | how free space of a block group is searched in memory |
//! | [`stripes`] | which free space is held back because of parity |
//! | [`targets`] | to which profiles chunks are converted |
//! | [`chunks`] | how large chunks are and where they go |
//! | [`device`] | what chunks take of the device |
//! | [`reserve`] | which requests wait, and in which order, when space is short |
//! | [`groups`] | which block group an allocation comes from |
//! | [`preallocated`] | how many preallocated blocks are kept for the next operation |
//! | [`discard`] | when the device is told that freed space holds nothing |
//! | [`alloc`] | when a chunk is made, and what then must know of it |
//! | [`trim`] | which space the device is told of on request |
//! | [`usage`] | figures about space for people: what is full |
//!
//! Two views of the same space must not be confused. The *allocator's view* (free index) already
//! lacks the blocks of the running transaction. The *applied view* (`used`, the free-space tree)
//! changes only when the committer applies delayed references; it is what goes to disk.

pub(crate) mod alloc;
pub(crate) mod chunks;
pub(crate) mod csum_tree;
mod device;
pub(crate) mod discard;
pub(crate) mod extent_tree;
pub(crate) mod free_index;
pub(crate) mod free_space_tree;
pub(crate) mod groups;
mod kind;
pub(crate) mod preallocated;
pub(crate) mod refs;
pub(crate) mod reserve;
mod run;
pub(crate) mod stripes;
pub(crate) mod targets;
#[cfg(test)]
mod tests;
pub(crate) mod trim;
pub(crate) mod usage;

pub use device::AllocatedOnDevice;
pub(crate) use device::{DeviceChange, DeviceUsage, device_items};
pub(crate) use kind::SpaceKind;
pub(crate) use run::Pinned;
pub(crate) use run::{Run, RunJoiner};
pub use trim::{TrimRange, Trimmed};
pub use usage::{KindUsage, SpaceUsage};
