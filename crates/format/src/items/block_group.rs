//! BLOCK_GROUP_ITEM, and the type bits that it shares with chunks.
//!
//! Hidden here: the numbering of types and profiles, and what a profile means for the number of
//! stripes and copies.

use super::exact;
use crate::{FIRST_CHUNK_OBJECTID, FormatError, FormatResult};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Type and profile bits of block groups and chunks.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[allow(missing_docs)]
    pub struct BlockGroupFlags: u64 {
        const DATA = 1;
        const SYSTEM = 2;
        const METADATA = 4;
        const RAID0 = 8;
        const RAID1 = 0x10;
        const DUP = 0x20;
        const RAID10 = 0x40;
        const RAID5 = 0x80;
        const RAID6 = 0x100;
        const RAID1C3 = 0x200;
        const RAID1C4 = 0x400;
    }
}

/// Where the copies of a byte lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Profile {
    Single,
    Dup,
    Raid0,
    Raid1,
    Raid1c3,
    Raid1c4,
    Raid10,
    Raid5,
    Raid6,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 9] = [
        Self::Single,
        Self::Dup,
        Self::Raid0,
        Self::Raid1,
        Self::Raid1c3,
        Self::Raid1c4,
        Self::Raid10,
        Self::Raid5,
        Self::Raid6,
    ];
    /// Name as mkfs and `btrfs` have it, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Dup => "dup",
            Self::Raid0 => "raid0",
            Self::Raid1 => "raid1",
            Self::Raid1c3 => "raid1c3",
            Self::Raid1c4 => "raid1c4",
            Self::Raid10 => "raid10",
            Self::Raid5 => "raid5",
            Self::Raid6 => "raid6",
        }
    }
    /// The profile's bit; none for single.
    #[must_use]
    pub fn flag(self) -> BlockGroupFlags {
        match self {
            Self::Single => BlockGroupFlags::empty(),
            Self::Dup => BlockGroupFlags::DUP,
            Self::Raid0 => BlockGroupFlags::RAID0,
            Self::Raid1 => BlockGroupFlags::RAID1,
            Self::Raid1c3 => BlockGroupFlags::RAID1C3,
            Self::Raid1c4 => BlockGroupFlags::RAID1C4,
            Self::Raid10 => BlockGroupFlags::RAID10,
            Self::Raid5 => BlockGroupFlags::RAID5,
            Self::Raid6 => BlockGroupFlags::RAID6,
        }
    }
    /// Full copies of each byte; parity is not a copy.
    #[must_use]
    pub fn copies(self) -> u32 {
        match self {
            Self::Single | Self::Raid0 | Self::Raid5 | Self::Raid6 => 1,
            Self::Dup | Self::Raid1 | Self::Raid10 => 2,
            Self::Raid1c3 => 3,
            Self::Raid1c4 => 4,
        }
    }
    /// Can a chunk of this profile have `n` stripes?
    #[must_use]
    pub fn fits_stripes(self, n: u16) -> bool {
        match self {
            Self::Single => n == 1,
            Self::Dup | Self::Raid1 => n == 2,
            Self::Raid1c3 => n == 3,
            Self::Raid1c4 => n == 4,
            Self::Raid0 => n >= 1,
            Self::Raid10 => n >= 2 && n.is_multiple_of(2),
            Self::Raid5 => n >= 2,
            Self::Raid6 => n >= 3,
        }
    }
}

impl BlockGroupFlags {
    /// The type bits.
    pub const TYPES: Self = Self::DATA.union(Self::SYSTEM).union(Self::METADATA);

    /// Checks type and profile bits and gives the profile.
    ///
    /// # Errors
    /// An unknown bit, more than one profile, or a type other than data, metadata, system, or data
    /// and metadata.
    pub fn profile(self) -> FormatResult<Profile> {
        let fail =
            |why| Err(FormatError::new(format!("block group type {:#x} {why}", self.bits())));
        if !Self::all().contains(self) {
            return fail("has unknown bits");
        }
        let kind = self & Self::TYPES;
        if ![Self::DATA, Self::SYSTEM, Self::METADATA, Self::DATA | Self::METADATA].contains(&kind)
        {
            return fail("is none of data, metadata, system, data and metadata");
        }
        let bits = self - Self::TYPES;
        match Profile::ALL.into_iter().find(|p| p.flag() == bits) {
            Some(profile) => Ok(profile),
            None => fail("has more than one profile"),
        }
    }
    /// Name of the type part: `Data`, `Metadata`, `System` or `Data+Metadata`.
    #[must_use]
    pub fn type_name(self) -> &'static str {
        if self.contains(Self::DATA | Self::METADATA) {
            "Data+Metadata"
        } else if self.contains(Self::DATA) {
            "Data"
        } else if self.contains(Self::METADATA) {
            "Metadata"
        } else if self.contains(Self::SYSTEM) {
            "System"
        } else {
            "Unknown"
        }
    }
}

/// BLOCK_GROUP_ITEM, 24 bytes; start and length stand in its key.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct BlockGroupItem {
    /// Allocated bytes, logical.
    pub used: U64,
    /// Always 256.
    pub chunk_objectid: U64,
    /// [`BlockGroupFlags`].
    pub flags: U64,
}
const _: () = assert!(size_of::<BlockGroupItem>() == 24);

impl BlockGroupItem {
    /// An item.
    #[must_use]
    pub fn new(used: u64, flags: BlockGroupFlags) -> Self {
        Self {
            used: U64::new(used),
            chunk_objectid: U64::new(FIRST_CHUNK_OBJECTID),
            flags: U64::new(flags.bits()),
        }
    }
    /// From the bytes of the item whose key says `length`.
    ///
    /// # Errors
    /// A wrong size, length 0, more used than there is, another chunk tree, or impossible flags.
    pub fn parse(length: u64, bytes: &[u8]) -> FormatResult<&Self> {
        let item: &Self = exact(bytes, "block group item")?;
        if length == 0 {
            return Err(FormatError::new("block group has length 0, expected more"));
        }
        if item.used.get() > length {
            return Err(FormatError::new(format!(
                "block group has used {}, expected at most its length {length}",
                item.used
            )));
        }
        if item.chunk_objectid.get() != FIRST_CHUNK_OBJECTID {
            return Err(FormatError::new(format!(
                "block group has chunk_objectid {}, expected 256",
                item.chunk_objectid
            )));
        }
        item.kind().profile()?;
        Ok(item)
    }
    /// Type and profile bits.
    #[must_use]
    pub fn kind(&self) -> BlockGroupFlags {
        BlockGroupFlags::from_bits_retain(self.flags.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_and_profiles() {
        for p in Profile::ALL {
            assert_eq!((BlockGroupFlags::METADATA | p.flag()).profile(), Ok(p));
        }
        for bad in [0, 3, 6, 7, 0x20, 0x31, 0x801, 1 << 48 | 1] {
            assert!(BlockGroupFlags::from_bits_retain(bad).profile().is_err(), "{bad:#x}");
        }
        assert_eq!(
            (BlockGroupFlags::DATA | BlockGroupFlags::METADATA).type_name(),
            "Data+Metadata"
        );
    }

    #[test]
    fn used_stays_within_the_length() {
        let item = BlockGroupItem::new(8192, BlockGroupFlags::DATA);
        assert_eq!(BlockGroupItem::parse(8192, item.as_bytes()), Ok(&item));
        assert!(BlockGroupItem::parse(4096, item.as_bytes()).unwrap_err().0.contains("used 8192"));
        assert!(BlockGroupItem::parse(0, item.as_bytes()).is_err());
        let other = BlockGroupItem { chunk_objectid: 257.into(), ..item };
        assert!(BlockGroupItem::parse(8192, other.as_bytes()).unwrap_err().0.contains("257"));
    }
}
