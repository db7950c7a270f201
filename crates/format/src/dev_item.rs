//! The item that describes one device: in the chunk tree, and copied into the device's superblock.

use crate::ids::Generation;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A device of the file system, 98 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DevItem {
    /// Id within the file system, from 1.
    pub devid: U64,
    /// Size of the device in bytes, as far as the file system uses it.
    pub total_bytes: U64,
    /// Sum of the lengths of its device extents.
    pub bytes_used: U64,
    /// Optimal alignment; 4096.
    pub io_align: U32,
    /// Optimal width; 4096.
    pub io_width: U32,
    /// Sector size; that of the file system.
    pub sector_size: U32,
    /// Kind of device; 0.
    pub kind: U64,
    /// 0 for most. A seed has that of its superblock, in the items of file systems that are built
    /// upon it; a device that is behind has a mark, see [`DevItem::mark`].
    pub generation: U64,
    /// 0 in practice; see [`DevItem::left`].
    pub start_offset: U64,
    /// Unused.
    pub dev_group: U32,
    /// Unused.
    pub seek_speed: u8,
    /// Unused; see [`DevItem::arrives`].
    pub bandwidth: u8,
    /// The device's own uuid.
    pub uuid: [u8; 16],
    /// Uuid of the file system, the metadata uuid where there is one.
    pub fsid: [u8; 16],
}
const _: () = assert!(size_of::<DevItem>() == 98);

impl DevItem {
    /// Is it a device of another file system, upon which the file system `fsid` is built?
    #[must_use]
    pub fn is_seed_of(&self, fsid: &[u8; 16]) -> bool {
        self.fsid != *fsid
    }

    /// The last commit that the device has as a whole, if it lacks something: Larder's **mark**, as
    /// the file system `fsid` notes it. Only devices that are written get one.
    #[must_use]
    pub fn mark(&self, fsid: &[u8; 16]) -> Option<Generation> {
        let since = self.generation.get().checked_sub(1).map(Generation);
        since.filter(|_| !self.is_seed_of(fsid))
    }

    /// Does it take the place of another device with the commit of its superblock? If both say that
    /// they are that device and have the same commit, it has failed, and the other one counts.
    /// Larder's; Linux keeps the field.
    #[must_use]
    pub fn arrives(&self) -> bool {
        self.bandwidth != 0
    }

    /// The same, taking the place of another device or not.
    #[must_use]
    pub fn with_arrival(self, arrives: bool) -> Self {
        Self { bandwidth: arrives.into(), ..self }
    }

    /// The same with a mark or without.
    #[must_use]
    pub fn with_mark(self, since: Option<Generation>) -> Self {
        Self { generation: U64::new(since.map_or(0, |since| since.0 + 1)), ..self }
    }
}
