//! The quota tree: QGROUP_STATUS and QGROUP_INFO.
//!
//! A quota group's id stands in the key's offset: its level in the upper 16 bits, below that a
//! number; at level 0 the number is a subvolume's id. A pair of QGROUP_RELATION items without data,
//! one in each direction, says that a group belongs to another.

use super::exact;
use crate::FormatResult;
use std::fmt;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Flag of [`QgroupStatus`]: quotas are on.
pub const QUOTA_ON: u64 = 1;
/// Flag of [`QgroupStatus`]: everything is being counted anew.
pub const QUOTA_RESCAN: u64 = 2;
/// Flag of [`QgroupStatus`]: the counts are known to be wrong.
pub const QUOTA_INCONSISTENT: u64 = 4;

/// Id of a quota group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QgroupId(pub u64);

impl QgroupId {
    /// 0 for a subvolume's own group, higher for groups of groups.
    #[must_use]
    pub fn level(self) -> u16 {
        (self.0 >> 48) as u16
    }
    /// The number in its level: at level 0, that of the subvolume.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0 & ((1 << 48) - 1)
    }
}

impl fmt::Display for QgroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.level(), self.number())
    }
}

/// QGROUP_STATUS at (0, 240, 0): the 32 bytes that every version has; simple quotas add another 8.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct QgroupStatus {
    /// Of the tree's format: 1.
    pub version: U64,
    /// Transaction that wrote it last.
    pub generation: U64,
    /// [`QUOTA_ON`] and the others.
    pub flags: U64,
    /// Where counting anew has got to.
    pub rescan: U64,
}
const _: () = assert!(size_of::<QgroupStatus>() == 32);

impl QgroupStatus {
    /// From the item's bytes.
    ///
    /// # Errors
    /// Fewer than 32 bytes.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        Ok(super::prefix(bytes, "qgroup status")?.0)
    }
}

/// QGROUP_INFO at (0, 242, group), 40 bytes: counts of bytes of whole extents, tree nodes and data
/// alike.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct QgroupInfo {
    /// Transaction that changed it last.
    pub generation: U64,
    /// Extents that any subvolume of the group reaches.
    pub referenced: U64,
    /// Meant for the same before compression; Linux keeps it equal to `referenced`.
    pub referenced_compressed: U64,
    /// Extents that no subvolume outside of the group reaches.
    pub exclusive: U64,
    /// As `referenced_compressed`.
    pub exclusive_compressed: U64,
}
const _: () = assert!(size_of::<QgroupInfo>() == 40);

impl QgroupInfo {
    /// From the item's bytes.
    ///
    /// # Errors
    /// A size other than 40.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        exact(bytes, "qgroup info")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_a_level_and_a_number() {
        let id = QgroupId(3 << 48 | 257);
        assert_eq!((id.level(), id.number(), id.to_string().as_str()), (3, 257, "3/257"));
        assert_eq!(QgroupId(5).to_string(), "0/5");
    }

    #[test]
    fn sizes_are_checked() {
        assert!(QgroupInfo::parse(&[0; 39]).is_err());
        assert!(QgroupInfo::parse(&[0; 41]).is_err());
        assert!(QgroupStatus::parse(&[0; 31]).is_err());
        let mut bytes = [0; 40];
        bytes[16] = 5;
        assert_eq!(QgroupStatus::parse(&bytes).unwrap().flags.get(), QUOTA_ON | QUOTA_INCONSISTENT);
    }
}
