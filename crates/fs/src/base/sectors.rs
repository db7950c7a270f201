//! Sectors: the unit in which the bytes of files are counted on the device.

use larder_format::SECTOR_SIZE;

/// Bytes of a sector: extents begin and end at multiples of it.
pub(crate) const SECTOR: u64 = SECTOR_SIZE as u64;
/// No file is longer than this.
pub(crate) const MAX_FILE_SIZE: u64 = i64::MAX as u64;

/// The sector boundary at or before `at`.
pub(crate) fn floor(at: u64) -> u64 {
    at - at % SECTOR
}
/// The sector boundary at or after `at`. `at` is at most [`MAX_FILE_SIZE`], so this cannot
/// overflow.
pub(crate) fn ceil(at: u64) -> u64 {
    at.next_multiple_of(SECTOR)
}
