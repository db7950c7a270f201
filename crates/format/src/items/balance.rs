//! The item of a balance that runs or is paused.
//!
//! It is (BALANCE, TEMPORARY_ITEM, 0) in the root tree: three sets of filters, for data, metadata
//! and system chunks, and flags that say which of them count. It stands there from the start of a
//! balance to its end, so that the next mount goes on with it. Hidden here:
//! the layout, where one word is a number or a range, by a flag. What the filters mean is not.

use super::block_group::Profile;
use super::exact;
use crate::{FormatError, FormatResult, Key, KeyType, ObjectId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Flags of the whole balance.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[allow(missing_docs)]
    pub struct BalanceFlags: u64 {
        const DATA = 1;
        const SYSTEM = 2;
        const METADATA = 4;
        /// Less redundancy was agreed to.
        const FORCE = 8;
        /// Linux sets it in memory while it goes on with a balance.
        const RESUME = 0x10;
    }
}

bitflags::bitflags! {
    /// Which fields of a set of filters count.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[allow(missing_docs)]
    pub struct FilterFlags: u64 {
        const PROFILES = 1;
        const USAGE = 2;
        const DEVID = 4;
        const DRANGE = 8;
        const VRANGE = 0x10;
        const LIMIT = 0x20;
        const LIMIT_RANGE = 0x40;
        const STRIPES_RANGE = 0x80;
        const CONVERT = 0x100;
        const SOFT = 0x200;
        const USAGE_RANGE = 0x400;
    }
}

/// The bit for the profile without a bit, single, in `profiles` and `target`.
const SINGLE: u64 = 1 << 48;

/// The bit of a profile in `profiles` and `target`.
#[must_use]
pub fn filter_bit(profile: Profile) -> u64 {
    match profile {
        Profile::Single => SINGLE,
        profile => profile.flag().bits(),
    }
}

/// The profile of a chunk that is made because of `target`.
///
/// # Errors
/// Not exactly one known bit.
pub fn filter_profile(bits: u64) -> FormatResult<Profile> {
    Profile::ALL.into_iter().find(|p| filter_bit(*p) == bits).ok_or_else(|| {
        FormatError::new(format!("balance has target {bits:#x}, expected one profile"))
    })
}

/// A number, or the two ends of a range, of 32 bits each.
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
pub struct NumberOrRange {
    /// The least, or the lower half of the number.
    pub low: U32,
    /// The most, or the upper half of the number.
    pub high: U32,
}

impl NumberOrRange {
    /// As a number.
    #[must_use]
    pub fn number(self) -> u64 {
        u64::from(self.low.get()) | u64::from(self.high.get()) << 32
    }
}

impl From<u64> for NumberOrRange {
    fn from(number: u64) -> Self {
        let bytes = number.to_le_bytes();
        let half =
            |at: usize| U32::from_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { low: half(0), high: half(4) }
    }
}

/// A set of filters, 136 bytes.
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
pub struct BalanceFilters {
    /// Bits of profiles ([`filter_bit`]).
    pub profiles: U64,
    /// Percent.
    pub usage: NumberOrRange,
    /// A device.
    pub devid: U64,
    /// From this byte of the device on.
    pub pstart: U64,
    /// Up to this byte.
    pub pend: U64,
    /// From this logical address on.
    pub vstart: U64,
    /// Up to this address.
    pub vend: U64,
    /// The bit of the profile that chunks are to get.
    pub target: U64,
    /// [`FilterFlags`].
    pub flags: U64,
    /// Chunks.
    pub limit: NumberOrRange,
    /// Fewest stripes of a chunk.
    pub stripes_min: U32,
    /// Most stripes of a chunk.
    pub stripes_max: U32,
    unused: [U64; 6],
}
const _: () = assert!(size_of::<BalanceFilters>() == 136);

impl BalanceFilters {
    /// Which fields count.
    #[must_use]
    pub fn which(&self) -> FilterFlags {
        FilterFlags::from_bits_retain(self.flags.get())
    }

    fn check(&self) -> FormatResult<()> {
        let which = self.which();
        if !FilterFlags::all().contains(which) {
            let bits = which.bits();
            return Err(FormatError::new(format!("balance has filters {bits:#x}, some unknown")));
        }
        let known = Profile::ALL.into_iter().fold(0, |bits, p| bits | filter_bit(p));
        if which.contains(FilterFlags::PROFILES) && self.profiles.get() & !known != 0 {
            let bits = self.profiles.get();
            return Err(FormatError::new(format!("balance has profiles {bits:#x}, some unknown")));
        }
        if which.contains(FilterFlags::CONVERT) {
            filter_profile(self.target.get())?;
        }
        Ok(())
    }
}

/// The item, 448 bytes.
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
pub struct BalanceItem {
    /// [`BalanceFlags`].
    pub flags: U64,
    /// Filters for data.
    pub data: BalanceFilters,
    /// Filters for metadata.
    pub metadata: BalanceFilters,
    /// Filters for system chunks.
    pub system: BalanceFilters,
    unused: [U64; 4],
}
const _: () = assert!(size_of::<BalanceItem>() == 448);

impl BalanceItem {
    /// Its key in the root tree.
    #[must_use]
    pub fn key() -> Key {
        Key::new(ObjectId::BALANCE, KeyType::TEMPORARY_ITEM, 0)
    }

    /// What is balanced, and how.
    #[must_use]
    pub fn which(&self) -> BalanceFlags {
        BalanceFlags::from_bits_retain(self.flags.get())
    }

    /// From the item's bytes.
    ///
    /// # Errors
    /// A wrong size; flags, filters or profiles that are not known, of a type that is balanced.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        let item: &Self = exact(bytes, "balance item")?;
        let which = item.which();
        if !BalanceFlags::all().contains(which) {
            let bits = which.bits();
            return Err(FormatError::new(format!("balance has flags {bits:#x}, some unknown")));
        }
        let sets = [
            (BalanceFlags::DATA, &item.data),
            (BalanceFlags::METADATA, &item.metadata),
            (BalanceFlags::SYSTEM, &item.system),
        ];
        sets.iter().filter(|(bit, _)| which.contains(*bit)).try_for_each(|(_, set)| set.check())?;
        Ok(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_a_number_or_a_range() {
        let word = NumberOrRange::from(7 << 32 | 9);
        assert_eq!((word.low.get(), word.high.get(), word.number()), (9, 7, 7 << 32 | 9));
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let mut item = BalanceItem { flags: 1.into(), ..BalanceItem::default() };
        assert_eq!(BalanceItem::parse(item.as_bytes()), Ok(&item));
        assert!(BalanceItem::parse(&item.as_bytes()[..440]).is_err());
        item.data.flags = 0x800.into();
        assert!(BalanceItem::parse(item.as_bytes()).unwrap_err().0.contains("filters 0x800"));
        // It is not metadata that is balanced.
        (item.metadata.flags, item.data.flags) = (0x800.into(), 0x100.into());
        assert!(BalanceItem::parse(item.as_bytes()).unwrap_err().0.contains("target 0x0"));
        item.data.target = filter_bit(Profile::Single).into();
        assert!(BalanceItem::parse(item.as_bytes()).is_ok());
        (item.data.flags, item.data.profiles) = (1.into(), 1.into());
        assert!(BalanceItem::parse(item.as_bytes()).unwrap_err().0.contains("profiles 0x1"));
        item.flags = 0x20.into();
        assert!(BalanceItem::parse(item.as_bytes()).unwrap_err().0.contains("flags 0x20"));
    }

    #[test]
    fn every_profile_has_a_bit() {
        for profile in Profile::ALL {
            assert_eq!(filter_profile(filter_bit(profile)), Ok(profile));
        }
        assert!(filter_profile(0).is_err());
        assert!(filter_profile(0x18).is_err());
    }
}
