//! DEV_EXTENT and the device's error counters.
//!
//! A DEV_EXTENT is a chunk's stripe seen from the device; chunk tree and device tree must agree.
//! The counters are the item (0, PERSISTENT_ITEM, devid) of the device tree.

use super::{aligned, exact};
use crate::{FIRST_CHUNK_OBJECTID, FormatError, FormatResult, ObjectId};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// DEV_EXTENT, 48 bytes; device and physical address stand in its key.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DevExtent {
    /// 3, the chunk tree.
    pub chunk_tree: U64,
    /// 256.
    pub chunk_objectid: U64,
    /// Logical address of the chunk.
    pub chunk_offset: U64,
    /// Bytes on this device.
    pub length: U64,
    /// As in every node header.
    pub chunk_tree_uuid: [u8; 16],
}
const _: () = assert!(size_of::<DevExtent>() == 48);

impl DevExtent {
    /// From the item's bytes.
    ///
    /// # Errors
    /// A wrong size, another chunk tree, or an unaligned or empty range.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        const WHAT: &str = "device extent";
        let item: &Self = exact(bytes, WHAT)?;
        if item.chunk_tree.get() != ObjectId::CHUNK_TREE.0
            || item.chunk_objectid.get() != FIRST_CHUNK_OBJECTID
        {
            return Err(FormatError::new(format!(
                "device extent names chunk tree {} and object {}, expected 3 and 256",
                item.chunk_tree, item.chunk_objectid
            )));
        }
        aligned(item.chunk_offset.get(), WHAT, "chunk_offset")?;
        aligned(item.length.get(), WHAT, "length")?;
        if item.length.get() == 0 {
            return Err(FormatError::new("device extent has length 0, expected more"));
        }
        Ok(item)
    }
}

/// Errors seen on a device, counted over its life.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct DevStats {
    /// Failed writes.
    pub write_errors: U64,
    /// Failed reads.
    pub read_errors: U64,
    /// Failed flushes.
    pub flush_errors: U64,
    /// Wrong checksums.
    pub corruption_errors: U64,
    /// Wrong generations.
    pub generation_errors: U64,
}
const _: () = assert!(size_of::<DevStats>() == 40);

impl DevStats {
    /// From the item's bytes. Counters that a shorter item lacks are zero; what a longer one has
    /// beyond is not read.
    ///
    /// # Errors
    /// The size is no multiple of 8.
    pub fn parse(bytes: &[u8]) -> FormatResult<Self> {
        if !bytes.len().is_multiple_of(8) {
            return Err(FormatError::new(format!(
                "device statistics have {} bytes, expected a multiple of 8",
                bytes.len()
            )));
        }
        let mut out = Self::default();
        let n = bytes.len().min(size_of::<Self>());
        out.as_mut_bytes()[..n].copy_from_slice(&bytes[..n]);
        Ok(out)
    }
}
