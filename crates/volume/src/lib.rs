//! Devices, and the map from logical addresses to them.
//!
//! This crate hides where bytes lie. Above it there are only [`larder_format::Logical`] addresses;
//! below it are [`Device`]s: files, block devices, or the simulated ones of the tests. It knows
//! which copies of a block exist (DUP) and how to pick another one when the first is damaged, where
//! superblocks lie and in which order they are written. It knows nothing of trees.

pub mod device;
pub mod dump;
pub mod error;
pub mod file;
pub mod lock;
pub mod map;
pub mod superblock;
pub mod volume;

pub use device::Device;
pub use dump::unflattened;
pub use error::{VolumeError, VolumeResult};
pub use file::{Caching, FileDevice, OpenMode};
pub use lock::ImageLock;
pub use map::{ChunkMap, Located, MappedChunk, Stripe, Stripes};
pub use superblock::{SuperCopies, SuperCopy, read_all_superblocks, read_superblock};
pub use volume::{DeviceStats, Volume};
