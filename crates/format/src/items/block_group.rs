//! BLOCK_GROUP_ITEM, and the type bits that it shares with chunks.
//!
//! Hidden here: the numbering of types and profiles, and what a profile means: how many copies or
//! parity stripes a byte has, how many stripes a chunk, and how many devices may be lost. Other
//! code asks [`Profile`] and keeps no table of its own.

use super::exact;
use crate::features::Incompat;
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
    /// What this profile means.
    const fn traits(self) -> Traits {
        // In this order: copies, parity, sub_stripes, fewest and most stripes, fewest devices,
        // devices that may be lost.
        let (copies, parity, sub_stripes, stripes, min_devices, tolerated_losses) = match self {
            Self::Single => (1, 0, 1, (1, 1), 1, 0),
            Self::Dup => (2, 0, 1, (2, 2), 1, 0),
            Self::Raid0 => (1, 0, 1, (1, u16::MAX), 1, 0),
            Self::Raid1 => (2, 0, 1, (2, 2), 2, 1),
            Self::Raid1c3 => (3, 0, 1, (3, 3), 3, 2),
            Self::Raid1c4 => (4, 0, 1, (4, 4), 4, 3),
            Self::Raid10 => (2, 0, 2, (2, u16::MAX), 2, 1),
            Self::Raid5 => (1, 1, 1, (2, u16::MAX), 2, 1),
            Self::Raid6 => (1, 2, 1, (3, u16::MAX), 3, 2),
        };
        Traits { copies, parity, sub_stripes, stripes, min_devices, tolerated_losses }
    }
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
    /// The feature that readers of such chunks have to know. Profiles that are as old as btrfs need
    /// none.
    #[must_use]
    pub fn needs(self) -> Incompat {
        match self {
            Self::Raid5 | Self::Raid6 => Incompat::RAID56,
            Self::Raid1c3 | Self::Raid1c4 => Incompat::RAID1C34,
            _ => Incompat::empty(),
        }
    }
    /// Full copies of each byte; parity is not a copy.
    #[must_use]
    pub const fn copies(self) -> u32 {
        self.traits().copies as u32
    }
    /// Stripes of each row that hold parity: P, or P and Q.
    #[must_use]
    pub const fn parity(self) -> u16 {
        self.traits().parity
    }
    /// What the field `sub_stripes` of a chunk has to say. It means something for RAID10 only.
    #[must_use]
    pub const fn sub_stripes(self) -> u16 {
        self.traits().sub_stripes
    }
    /// Fewest devices on which a new chunk may be made.
    #[must_use]
    pub const fn min_devices(self) -> u16 {
        self.traits().min_devices
    }
    /// Most devices that a chunk can use. [`u16::MAX`]: as many as there are.
    #[must_use]
    pub const fn max_devices(self) -> u16 {
        match self {
            // Both copies lie on one device.
            Self::Dup => 1,
            _ => self.traits().stripes.1,
        }
    }
    /// Devices that may be lost, whichever they are, without losing a byte.
    #[must_use]
    pub const fn tolerated_losses(self) -> u16 {
        self.traits().tolerated_losses
    }
    /// Can a chunk of this profile have `n` stripes?
    #[must_use]
    pub fn fits_stripes(self, n: u16) -> bool {
        let Traits { sub_stripes, stripes: (least, most), .. } = self.traits();
        (least..=most).contains(&n) && n.is_multiple_of(sub_stripes)
    }
    /// Of `n` stripes, those whose contents differ from all others: so many times the length of a
    /// stripe is the length of the chunk. At least 1, whatever `n` is.
    #[must_use]
    pub const fn data_stripes(self, n: u16) -> u16 {
        let Traits { copies, parity, .. } = self.traits();
        let data = n.saturating_sub(parity) / copies;
        if data == 0 { 1 } else { data }
    }
    /// Bytes that each of `n` stripes of a chunk of `length` bytes takes on its device.
    #[must_use]
    pub const fn stripe_bytes(self, length: u64, n: u16) -> u64 {
        length / self.data_stripes(n) as u64
    }
}

/// What a profile means, in numbers.
struct Traits {
    copies: u16,
    parity: u16,
    sub_stripes: u16,
    /// Fewest and most stripes of a chunk.
    stripes: (u16, u16),
    min_devices: u16,
    tolerated_losses: u16,
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
    fn stripes_of_each_profile() {
        use Profile::{Dup, Raid0, Raid1, Raid1c3, Raid1c4, Raid5, Raid6, Raid10, Single};
        let fit = |p: Profile| (0..9).filter(|n| p.fits_stripes(*n)).collect::<Vec<_>>();
        let all = [Single, Dup, Raid1, Raid1c3, Raid1c4].map(fit);
        assert_eq!(all, [[1], [2], [2], [3], [4]]);
        assert_eq!(fit(Raid0), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(fit(Raid10), [2, 4, 6, 8]);
        assert_eq!(fit(Raid5), [2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(fit(Raid6), [3, 4, 5, 6, 7, 8]);
        let data = |p: Profile, n| p.data_stripes(n);
        assert_eq!([Single, Dup, Raid1, Raid1c3, Raid1c4].map(|p| data(p, fit(p)[0])), [1; 5]);
        assert_eq!([Raid0, Raid10, Raid5, Raid6].map(|p| data(p, 6)), [6, 3, 5, 4]);
        assert_eq!([Raid0, Raid10, Raid5, Raid6].map(|p| data(p, fit(p)[0])), [1; 4]);
        assert_eq!([Raid0, Raid10, Raid5, Raid6].map(|p| data(p, 0)), [1; 4]);
        assert_eq!(Raid6.stripe_bytes(12 << 16, 6), 3 << 16);
        for p in Profile::ALL {
            // As many stripes as the lost devices can have, and one that has the bytes.
            assert!(p.fits_stripes(p.tolerated_losses() + 1) || p == Dup, "{}", p.name());
            assert!(p.min_devices() > p.tolerated_losses(), "{}", p.name());
            assert!(p.max_devices() >= p.min_devices(), "{}", p.name());
        }
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
