//! Newtypes for the units of the format, and the object ids it reserves.
//!
//! Two bare `u64` beside each other in a signature are how addresses and lengths, or logical and
//! physical addresses, get swapped; every unit has a type of its own instead.

use std::fmt;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident, $fmt:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "(", $fmt, ")"), self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $fmt, self.0)
            }
        }
        impl From<$name> for u64 {
            fn from(v: $name) -> u64 { v.0 }
        }
    };
}

unit!(
    /// Address in the logical space that chunks map to devices, in bytes.
    Logical, "{}"
);
unit!(
    /// Address on one device, in bytes.
    Physical, "{}"
);
unit!(
    /// Offset into a file, in bytes.
    FileOffset, "{}"
);
unit!(
    /// Transaction number.
    Generation, "{}"
);
unit!(
    /// Id of a device within a file system.
    DeviceId, "{}"
);

impl DeviceId {
    /// What a device has as its id that is to take the place of another one, until it has all that
    /// the other one has. Ids of devices begin at 1.
    pub const REPLACE_TARGET: Self = Self(0);
}

impl Logical {
    /// The address `bytes` further on. Wraps never: saturates, and a saturated address maps
    /// nowhere.
    #[must_use]
    pub fn plus(self, bytes: u64) -> Self {
        Self(self.0.saturating_add(bytes))
    }
}
impl Physical {
    /// The address `bytes` further on (saturating).
    #[must_use]
    pub fn plus(self, bytes: u64) -> Self {
        Self(self.0.saturating_add(bytes))
    }
}
impl FileOffset {
    /// The offset `bytes` before this one; wraps below zero, as offsets of data references do.
    #[must_use]
    pub fn wrapping_minus(self, bytes: u64) -> Self {
        Self(self.0.wrapping_sub(bytes))
    }
}
impl Generation {
    /// The transaction after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A range of logical addresses: from `start` up to `end`, which is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogicalRange {
    /// First address.
    pub start: Logical,
    /// First address behind the range.
    pub end: Logical,
}

impl LogicalRange {
    /// The `len` bytes from `start` on; ends where the address space does.
    #[must_use]
    pub fn new(start: Logical, len: u64) -> Self {
        Self { start, end: start.plus(len) }
    }
    /// From one address up to another.
    #[must_use]
    pub fn between(start: Logical, end: Logical) -> Self {
        Self { start, end }
    }
    /// Bytes.
    #[must_use]
    pub fn len(self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }
    /// Nothing at all?
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }
    /// Is there an address that lies in both?
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
    /// Does all of `other` lie in it?
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }
    /// What lies in both; empty if nothing does.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self { start: self.start.max(other.start), end: self.end.min(other.end) }
    }
}

/// First field of a key: an inode number, a tree id, an address, or one of the reserved numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ObjectId(pub u64);

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
impl fmt::Display for ObjectId {
    /// Reserved negative ids print as negative numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > u64::MAX - 256 {
            write!(f, "{}", self.0.cast_signed())
        } else {
            write!(f, "{}", self.0)
        }
    }
}

/// A tree is named by the object id of its root item.
pub type TreeId = ObjectId;

#[allow(missing_docs)]
impl ObjectId {
    pub const ROOT_TREE: Self = Self(1);
    pub const EXTENT_TREE: Self = Self(2);
    pub const CHUNK_TREE: Self = Self(3);
    pub const DEV_TREE: Self = Self(4);
    /// The top-level subvolume.
    pub const FS_TREE: Self = Self(5);
    pub const ROOT_TREE_DIR: Self = Self(6);
    pub const CSUM_TREE: Self = Self(7);
    pub const QUOTA_TREE: Self = Self(8);
    pub const UUID_TREE: Self = Self(9);
    pub const FREE_SPACE_TREE: Self = Self(10);
    pub const BLOCK_GROUP_TREE: Self = Self(11);
    pub const DEV_STATS: Self = Self(0);
    pub const DEV_ITEMS: Self = Self(1);
    pub const BALANCE: Self = Self(4u64.wrapping_neg());
    pub const ORPHAN: Self = Self(5u64.wrapping_neg());
    pub const TREE_LOG: Self = Self(6u64.wrapping_neg());
    pub const TREE_RELOC: Self = Self(8u64.wrapping_neg());
    pub const DATA_RELOC_TREE: Self = Self(9u64.wrapping_neg());
    pub const EXTENT_CSUM: Self = Self(10u64.wrapping_neg());
    pub const FREE_SPACE: Self = Self(11u64.wrapping_neg());
    pub const FREE_INO: Self = Self(12u64.wrapping_neg());
    pub const FIRST_CHUNK_TREE: Self = Self(256);
    pub const FIRST_FREE: Self = Self(256);
    pub const LAST_FREE: Self = Self(256u64.wrapping_neg());

    /// Is this the id of a tree that holds files: the top-level subvolume or one made later?
    #[must_use]
    pub fn is_subvolume(self) -> bool {
        self == Self::FS_TREE || (self >= Self::FIRST_FREE && self <= Self::LAST_FREE)
    }
    /// Is this tree made of subvolume-like leaves (subvolumes, relocation trees, the data reloc
    /// tree)?
    #[must_use]
    pub fn holds_files(self) -> bool {
        self.is_subvolume() || self == Self::DATA_RELOC_TREE || self == Self::TREE_RELOC
    }
}

/// Bytes in a sector, the unit of data checksums. Larder supports this one size.
pub const SECTOR_SIZE: u32 = 4096;
/// Length of a stripe on every RAID profile, and the granule of device space.
pub const STRIPE_LEN: u64 = 65536;
/// Bytes at the start of a device that are never allocated.
pub const DEVICE_RESERVED: u64 = 1 << 20;
/// Levels of a tree: 0 (leaf) up to 7.
pub const MAX_LEVEL: u8 = 8;
/// Offsets of the superblock and its mirrors on each device, as far as it reaches.
pub const SUPER_OFFSETS: [Physical; 3] =
    [Physical(64 << 10), Physical(64 << 20), Physical(256 << 30)];
/// Size of a superblock in bytes.
pub const SUPER_SIZE: usize = 4096;
/// Longest name of a directory entry or extended attribute, in bytes.
pub const NAME_MAX: usize = 255;
/// Most links of one inode.
pub const LINK_MAX: u32 = 65535;
/// Longest data extent in bytes (preallocated ones included).
pub const MAX_DATA_EXTENT: u64 = 128 << 20;
/// Longest compressed extent, in uncompressed bytes.
pub const MAX_COMPRESSED_EXTENT: u64 = 128 << 10;
/// `chunk_objectid` of a block group item, and the object id of all chunk items.
pub(crate) const FIRST_CHUNK_OBJECTID: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn range(r: Range<u64>) -> LogicalRange {
        LogicalRange::between(Logical(r.start), Logical(r.end))
    }

    #[test]
    fn a_range_is_without_its_end() {
        let r = LogicalRange::new(Logical(10), 10);
        assert_eq!((r, r.len(), r.is_empty()), (range(10..20), 10, false));
        assert!(r.overlaps(range(19..30)) && r.overlaps(range(0..11)));
        assert!(!r.overlaps(range(20..30)) && !r.overlaps(range(0..10)));
        assert!(r.covers(r) && r.covers(range(12..13)));
        assert!(!r.covers(range(9..20)) && !r.covers(range(10..21)));
        assert_eq!(r.intersection(range(15..40)), range(15..20));
        assert!(r.intersection(range(20..40)).is_empty());
        assert_eq!(r.intersection(range(30..40)).len(), 0);
        let last = LogicalRange::new(Logical(u64::MAX - 1), 10);
        assert_eq!((last.end, last.len()), (Logical(u64::MAX), 1), "nothing wraps");
    }
}
