//! The free-space tree: FREE_SPACE_INFO and the measures of its bitmaps.
//!
//! A block group's free space stands in keys alone (FREE_SPACE_EXTENT, no data) or in bitmaps
//! (FREE_SPACE_BITMAP): one bit per sector, lowest bit of the first byte first, set where free.
//! Its info item says which of the two.

use super::exact;
use crate::{FormatError, FormatResult, SECTOR_SIZE};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest bitmap in bytes.
pub const BITMAP_SIZE: usize = 256;
/// Bytes of space that the longest bitmap covers: 8 MiB.
pub const BITMAP_RANGE: u64 = BITMAP_SIZE as u64 * 8 * SECTOR_SIZE as u64;
/// Flag of [`FreeSpaceInfo`]: the group's space stands in bitmaps.
const USING_BITMAPS: u32 = 1;

/// FREE_SPACE_INFO, 8 bytes; start and length of the block group stand in its key.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct FreeSpaceInfo {
    /// Runs of free space, whichever form they stand in.
    pub extent_count: U32,
    /// 1 if the group's space stands in bitmaps, otherwise 0.
    pub flags: U32,
}
const _: () = assert!(size_of::<FreeSpaceInfo>() == 8);

impl FreeSpaceInfo {
    /// An info item.
    #[must_use]
    pub fn new(extent_count: u32, bitmaps: bool) -> Self {
        let flags = if bitmaps { USING_BITMAPS } else { 0 };
        Self { extent_count: U32::new(extent_count), flags: U32::new(flags) }
    }
    /// From the item's bytes.
    ///
    /// # Errors
    /// A size other than 8, or an unknown flag.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        let item: &Self = exact(bytes, "free space info")?;
        if item.flags.get() & !USING_BITMAPS != 0 {
            return Err(FormatError::new(format!(
                "free space info has flags {:#x}, expected 0 or 1",
                item.flags
            )));
        }
        Ok(item)
    }
    /// Does the group's space stand in bitmaps?
    #[must_use]
    pub fn uses_bitmaps(&self) -> bool {
        self.flags.get() & USING_BITMAPS != 0
    }
}

/// Checks the size of a FREE_SPACE_BITMAP item whose key says that it covers `length` bytes.
///
/// # Errors
/// The length is 0, unaligned or beyond [`BITMAP_RANGE`], or the item has not the bytes that it
/// needs.
pub fn check_bitmap(length: u64, bytes: &[u8]) -> FormatResult<()> {
    if length == 0 || length > BITMAP_RANGE || !length.is_multiple_of(u64::from(SECTOR_SIZE)) {
        return Err(FormatError::new(format!(
            "free space bitmap covers {length} bytes, expected sectors up to {BITMAP_RANGE}"
        )));
    }
    let want = bitmap_bytes(length);
    if bytes.len() as u64 != want {
        return Err(FormatError::new(format!(
            "free space bitmap of {length} bytes has {} bytes, expected {want}",
            bytes.len()
        )));
    }
    Ok(())
}

/// Bytes of a bitmap that covers `length` bytes.
#[must_use]
fn bitmap_bytes(length: u64) -> u64 {
    length.div_ceil(u64::from(SECTOR_SIZE)).div_ceil(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_cover_a_sector_per_bit() {
        assert_eq!(BITMAP_RANGE, 8 << 20);
        assert!(check_bitmap(8 << 20, &[0; 256]).is_ok());
        assert!(check_bitmap(9 * 4096, &[0; 2]).is_ok());
        assert!(check_bitmap(9 * 4096, &[0; 1]).unwrap_err().0.contains("expected 2"));
        for bad in [0, 100, (8 << 20) + 4096] {
            assert!(check_bitmap(bad, &[0; 256]).is_err());
        }
        assert!(
            FreeSpaceInfo::parse(FreeSpaceInfo::new(3, true).as_bytes()).unwrap().uses_bitmaps()
        );
        assert!(FreeSpaceInfo::parse(&[0, 0, 0, 0, 2, 0, 0, 0]).unwrap_err().0.contains("0x2"));
    }
}
