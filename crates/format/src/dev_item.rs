//! The item that describes one device: in the chunk tree, and copied into the device's superblock.

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
    /// 0 in practice.
    pub generation: U64,
    /// 0 in practice.
    pub start_offset: U64,
    /// Unused.
    pub dev_group: U32,
    /// Unused.
    pub seek_speed: u8,
    /// Unused.
    pub bandwidth: u8,
    /// The device's own uuid.
    pub uuid: [u8; 16],
    /// Uuid of the file system, the metadata uuid where there is one.
    pub fsid: [u8; 16],
}
const _: () = assert!(size_of::<DevItem>() == 98);
