//! The btrfs engine as a library: it makes, reads and writes btrfs file systems, on an image file
//! or a block device, in user space. What it writes Linux mounts, and what Linux writes it opens.
//!
//! # A first program
//!
//! ```
//! use larder_fs::mkfs::{MkfsOptions, mkfs};
//! use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
//! use larder_volume::{FileDevice, OpenMode};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let image = dir.path().join("pantry.img");
//! // An empty file system on a sparse image of 256 MiB.
//! mkfs(&FileDevice::create(&image, 256 << 20)?, &MkfsOptions::default())?;
//! let device = FileDevice::open(&image, OpenMode::Write)?;
//! let fs = Filesystem::open(Arc::new(device), OpenOptions::default())?;
//!
//! // A file, which is durable when `fsync` returns.
//! let (kind, perm, uid, gid) = (FileKind::Regular, 0o644, 1000, 1000);
//! let new = NewInode { kind, perm, uid, gid, rdev: 0, target: b"", xattrs: &[] };
//! let file = fs.create(fs.root(), b"jam", &new)?.id;
//! fs.write(file, 0, b"strawberry")?;
//! fs.fsync(file, false)?;
//!
//! // A read-only snapshot keeps the file as it is. Then the file changes.
//! fs.snapshot(fs.root().subvol, fs.root(), b"monday", true)?;
//! fs.write(file, 0, b"raspberry!")?;
//!
//! // The snapshot is a directory with the old file in it.
//! let monday = fs.lookup(fs.root(), b"monday")?.id;
//! let old = fs.lookup(monday, b"jam")?;
//! let mut buf = [0; 64];
//! let n = fs.read(old.id, 0, &mut buf)?;
//! assert_eq!(&buf[..n], b"strawberry");
//! fs.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What to know next
//!
//! - [`Filesystem`] is the one door. It knows inodes ([`InodeId`]) and raw names, not paths:
//!   [`Filesystem::lookup`] goes from a directory to one of its entries.
//! - Any number of threads may call it at the same time. A call waits for a device, a commit or
//!   space where it has to, but never under [`api::no_wait`].
//! - A write goes to memory. [`Filesystem::fsync`] makes one inode durable. [`Filesystem::sync`]
//!   and [`Filesystem::close`] make everything durable, and so does a commit every five seconds
//!   ([`OpenOptions::commit_interval`]). What these have made durable is there after a crash.
//! - An inode is deleted with its last name. A caller that needs it longer takes a hold
//!   ([`Filesystem::hold`]).
//! - An [`Error`] says what went wrong, and of damage also where. After a failed commit every
//!   change fails with [`Error::ReadOnly`], which has the reason.
//! - Any [`larder_volume::Device`] will do as a device. [`larder_volume::FileDevice`] locks its
//!   image, so that no two programs write it.
//!
//! `ARCHITECTURE.md` describes what is behind the door.

#[macro_use]
mod base;
mod balance;
mod compare;
mod devices;
#[macro_use]
mod engine;
mod file;
mod filesystem;
mod inode;
mod log;
pub mod mkfs;
mod relocate;
mod replace;
mod scrub;
mod seed;
mod space;
mod subvolume;
mod transaction;
mod tree;

#[doc(hidden)]
pub use base::watch;
pub use base::{api, error};
use base::{budget, completion, hash, lock, side_by_side, tuning};

pub use api::*;
pub use balance::{
    BalanceControl, BalancePlan, BalanceState, BalanceStatus, BalanceWish, Convert, DataMay,
    Filters, Freeing, Span,
};
#[cfg(feature = "faults")]
pub use base::tuning::faults::Fault;
pub use base::tuning::older;
pub use compare::{
    Comparison, ExtentPart, ExtentUser, Frozen, FrozenEntry, FrozenName, ItemChange, PartContent,
};
pub use completion::Completion;
pub use devices::{Clearing, Outcome, SMALLEST_DEVICE, Smallest, SmallestPart};
pub use engine::exclusive::{Exclusive, ExclusiveOperation};
pub use engine::fsyncs::LogStats;
pub use engine::reclaims::ReclaimStats;
pub use error::{Error, Result};
pub use filesystem::{
    DeviceErrors, DeviceFigures, DeviceState, Filesystem, MemoryStats, MemoryUse, Stats,
    former_devices, missing_devices,
};
pub use relocate::{GroupFacts, Relocated, Relocating};
pub use replace::{ReplaceControl, ReplaceOptions, ReplaceSource, ReplaceStatus, Replacing};
pub use scrub::{
    Damage, ScrubControl, ScrubCounts, ScrubDamage, ScrubFile, ScrubOptions, ScrubState,
    ScrubStatus,
};
pub use seed::{set_seed, sprout};
pub use space::{AllocatedOnDevice, KindUsage, SpaceUsage, TrimRange, Trimmed};
pub use subvolume::SubvolInfo;
pub use transaction::Received;
pub use tree::{Hold, LongHolds};
