//! Devices, and the map from logical addresses to them.
//!
//! This crate hides where bytes lie. Above it there are only [`larder_format::Logical`] addresses;
//! below it are [`Device`]s: files, block devices, or the simulated ones of the tests. It knows
//! which copies of a block exist and how to pick another one when the first is damaged, where
//! superblocks lie and in which order they are written. It knows nothing of trees. A module uses
//! only those above it:
//!
//! | module | decision it hides |
//! |---|---|
//! | `error` | what can go wrong between a logical address and its bytes |
//! | [`device`] | the contract of what keeps the bytes |
//! | `lock` | how it is found out that an image is in use, and made known |
//! | [`file`](mod@file) | how the operating system is asked for transfers |
//! | [`parity`] | how lost columns of a row are worked out from the others |
//! | `map` | which bytes of which device stand behind a logical address |
//! | [`superblock`] | which copies of the superblock exist, and which one counts |
//! | `assembly` | which devices belong together, and how far each is believed |
//! | `volume` | transfers to and from all copies |
//! | `dump` | that some metadata dumps have nodes elsewhere than chunks say |

mod assembly;
pub mod device;
mod dump;
mod error;
pub mod file;
mod lock;
mod map;
pub mod parity;
pub mod superblock;
mod volume;

pub use assembly::{Assembly, Found, meant};
pub use device::Device;
pub use dump::unflattened;
pub use error::{VolumeError, VolumeResult};
#[cfg(unix)]
pub use file::Handover;
pub use file::{Caching, FileDevice, OpenMode, TransferMemory};
pub use map::{
    ChunkMap, FullStripe, Located, MappedChunk, Place, Strip, StripRow, Stripe, Stripes,
};
pub use superblock::{SuperCopies, SuperCopy, read_all_superblocks, read_superblock};
pub use volume::{Copies, DeviceStats, ErrorCounts, ErrorKind, Volume};
