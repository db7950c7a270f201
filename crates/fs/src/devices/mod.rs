//! Devices join and leave a file system that is in use, and become larger or smaller.
//!
//! A device holds chunks, so a change has two halves. First no new chunk comes to lie where there
//! will be no device any more, and the chunks that lie there are relocated (`clear`): on the whole
//! device if it leaves, behind its future end if it becomes smaller. Then the change itself is one
//! commit: the device's item, the count and the bytes in the superblocks.
//!
//! | module | decision it hides |
//! |---|---|
//! | `fit` | what has to be true of the devices that stay, and how small a device can be |
//! | `tight` | how long new chunks are while a device is made small |
//! | `clear` | in which order chunks leave a part of a device |
//! | `compact` | how chunks become no longer than what they hold |
//! | `join` | when a new device counts |
//! | `leave` | when a device does not count any more |
//! | `resize` | growing and shrinking |
//!
//! After a crash there is nothing to clean up and nothing to resume. What was relocated stays where
//! it is. A device that joins has its superblock before the others count it; one that leaves loses
//! its superblock when the others do not count it any more. In between, a crash leaves a device
//! that belongs to the file system no longer, or not yet, and the file system is whole without it.
//!
//! These operations exclude each other, and a balance (`engine::exclusive`).

mod clear;
mod compact;
mod fit;
mod join;
mod leave;
mod resize;
mod tight;

pub use clear::{Clearing, Outcome};
pub use fit::{Smallest, SmallestPart};
pub(crate) use fit::{bytes, smallest};
pub(crate) use join::{add, item, usable};
pub(crate) use leave::remove;
pub(crate) use resize::{resize, shrink};

use std::ops::ControlFlow;

/// Smallest device: the reserved first MiB, and room for a few short stripes.
pub const SMALLEST_DEVICE: u64 = larder_format::DEVICE_RESERVED + (4 << 20);

/// Is told now and then how far it is, and may end it.
pub(crate) type Watch<'a> = &'a mut dyn FnMut(Clearing) -> ControlFlow<()>;
