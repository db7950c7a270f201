//! The balance that is under way, as the file system remembers it.
//!
//! The item in the root tree is the only memory of it: it is there from the start of a balance to
//! its end, and nothing else says that one is paused. Linux reads the same item.

use super::filters::{BalanceWish, Convert, Filters, Span};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::tree::Version;
use larder_format::items::balance::{NumberOrRange, filter_bit, filter_profile};
use larder_format::items::{BalanceFilters, BalanceFlags, BalanceItem, FilterFlags, Profile};
use larder_format::{DeviceId, FormatResult, Logical, ObjectId, Physical};
use zerocopy::IntoBytes;

/// The balance that the root tree has.
///
/// # Errors
/// Reading; `Corrupt` for an item that makes no sense.
pub(crate) fn stored(roots: &Version) -> Result<Option<BalanceWish>> {
    let key = BalanceItem::key();
    let Some(item) = roots.get(&key)? else { return Ok(None) };
    let wish = BalanceItem::parse(item.data()).and_then(wish_of);
    wish.map(Some).map_err(|e| Error::corrupt(Place::item(ObjectId::ROOT_TREE, key), e.0))
}

/// The balance that the published root tree has.
///
/// # Errors
/// As [`stored`].
pub(super) fn published(core: &Core) -> Result<Option<BalanceWish>> {
    stored(&core.roots.root.version(core.epochs.enter()))
}

/// Writes the item, or takes it away, and commits that.
///
/// # Errors
/// No space; those of a commit.
pub(super) fn keep(core: &Core, wish: Option<&BalanceWish>) -> Result<()> {
    {
        // A balance ends on a full file system as well.
        let mut handle = if wish.is_some() { core.begin(2)? } else { core.begin_deleting(2)? };
        handle.noted_for_root_tree(1);
        let item = wish.map(|wish| Box::from(item_of(wish).as_bytes()));
        handle.txn.roots.lock().balance = Some(item);
    }
    core.commit()
}

fn wish_of(item: &BalanceItem) -> FormatResult<BalanceWish> {
    let which = item.which();
    let set =
        |flag, set: &BalanceFilters| which.contains(flag).then(|| filters_of(set)).transpose();
    Ok(BalanceWish {
        data: set(BalanceFlags::DATA, &item.data)?,
        metadata: set(BalanceFlags::METADATA, &item.metadata)?,
        system: set(BalanceFlags::SYSTEM, &item.system)?,
        force: which.contains(BalanceFlags::FORCE),
    })
}

fn item_of(wish: &BalanceWish) -> BalanceItem {
    let mut which = BalanceFlags::empty();
    which.set(BalanceFlags::DATA, wish.data.is_some());
    which.set(BalanceFlags::METADATA, wish.metadata.is_some());
    which.set(BalanceFlags::SYSTEM, wish.system.is_some());
    which.set(BalanceFlags::FORCE, wish.force);
    let set = |set: &Option<Filters>| set.as_ref().map(disk_filters).unwrap_or_default();
    let mut item = BalanceItem::default();
    item.flags = which.bits().into();
    (item.data, item.metadata) = (set(&wish.data), set(&wish.metadata));
    item.system = set(&wish.system);
    item
}

fn filters_of(disk: &BalanceFilters) -> FormatResult<Filters> {
    let which = disk.which();
    let has = |flag| which.contains(flag);
    let listed = |p: &Profile| disk.profiles.get() & filter_bit(*p) != 0;
    let convert = if has(FilterFlags::CONVERT) {
        let profile = filter_profile(disk.target.get())?;
        Some(Convert { profile, soft: has(FilterFlags::SOFT) })
    } else {
        None
    };
    Ok(Filters {
        profiles: has(FilterFlags::PROFILES)
            .then(|| Profile::ALL.into_iter().filter(listed).collect()),
        // With both flags Linux asks both filters. The number, read from a range, then excludes
        // only what is full, as the range does.
        usage: range(has(FilterFlags::USAGE_RANGE), disk.usage)
            .or(number(has(FilterFlags::USAGE), disk.usage)),
        device: has(FilterFlags::DEVID).then(|| DeviceId(disk.devid.get())),
        device_range: has(FilterFlags::DRANGE)
            .then(|| Span { from: Physical(disk.pstart.get()), to: Physical(disk.pend.get()) }),
        address_range: has(FilterFlags::VRANGE)
            .then(|| Span { from: Logical(disk.vstart.get()), to: Logical(disk.vend.get()) }),
        stripes: has(FilterFlags::STRIPES_RANGE)
            .then(|| Span { from: disk.stripes_min.get(), to: disk.stripes_max.get() }),
        convert,
        // With both flags Linux goes by the number.
        limit: number(has(FilterFlags::LIMIT), disk.limit)
            .or(range(has(FilterFlags::LIMIT_RANGE), disk.limit)),
    })
}

/// A word that is a number, if it counts: from 0 to there.
fn number(counts: bool, word: NumberOrRange) -> Option<Span<u32>> {
    let to = u32::try_from(word.number()).unwrap_or(u32::MAX);
    counts.then_some(Span { from: 0, to })
}

/// A word that is a range, if it counts.
fn range(counts: bool, word: NumberOrRange) -> Option<Span<u32>> {
    counts.then(|| Span { from: word.low.get(), to: word.high.get() })
}

fn disk_filters(set: &Filters) -> BalanceFilters {
    let mut disk = BalanceFilters::default();
    let mut which = FilterFlags::empty();
    if let Some(profiles) = &set.profiles {
        which |= FilterFlags::PROFILES;
        disk.profiles = profiles.iter().fold(0, |bits, p| bits | filter_bit(*p)).into();
    }
    let mut word = |span: Option<Span<u32>>, number, range| match span {
        Some(Span { from: 0, to }) => {
            which |= number;
            NumberOrRange::from(u64::from(to))
        }
        Some(Span { from, to }) => {
            which |= range;
            NumberOrRange { low: from.into(), high: to.into() }
        }
        None => NumberOrRange::default(),
    };
    disk.usage = word(set.usage, FilterFlags::USAGE, FilterFlags::USAGE_RANGE);
    disk.limit = word(set.limit, FilterFlags::LIMIT, FilterFlags::LIMIT_RANGE);
    if let Some(id) = set.device {
        which |= FilterFlags::DEVID;
        disk.devid = id.0.into();
    }
    if let Some(range) = set.device_range {
        which |= FilterFlags::DRANGE;
        (disk.pstart, disk.pend) = (range.from.0.into(), range.to.0.into());
    }
    if let Some(range) = set.address_range {
        which |= FilterFlags::VRANGE;
        (disk.vstart, disk.vend) = (range.from.0.into(), range.to.0.into());
    }
    if let Some(stripes) = set.stripes {
        which |= FilterFlags::STRIPES_RANGE;
        (disk.stripes_min, disk.stripes_max) = (stripes.from.into(), stripes.to.into());
    }
    if let Some(convert) = set.convert {
        which |= FilterFlags::CONVERT;
        which.set(FilterFlags::SOFT, convert.soft);
        disk.target = filter_bit(convert.profile).into();
    }
    disk.flags = which.bits().into();
    disk
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of the item that Linux 6.18 had for a paused balance, as far as they are not zero.
    /// It was started as `btrfs balance start -dusage=10..100,devid=1,vrange=0..99999999999
    /// -mlimit=7`. btrfs-progs gives the filters for metadata to system chunks as well.
    const OF_LINUX: [(usize, u64); 9] = [
        (0, 1 | 2 | 4),
        (16, 100 << 32 | 10),
        (24, 1),
        (56, 99_999_999_999),
        (72, 0x416),
        (208, 0x20),
        (216, 7),
        (344, 0x20),
        (352, 7),
    ];

    #[test]
    fn an_item_of_linux_is_understood() {
        let mut bytes = [0; 448];
        for (at, word) in OF_LINUX {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let wish = wish_of(BalanceItem::parse(&bytes).unwrap()).unwrap();
        let limit = || Some("limit=7".parse().unwrap());
        let data = "usage=10..100,devid=1,vrange=0..99999999999";
        assert_eq!(wish.data, Some(data.parse().unwrap()));
        assert_eq!((wish.metadata, wish.system), (limit(), limit()));
    }

    #[test]
    fn an_item_has_its_fields_where_linux_has_them() {
        let wish = BalanceWish {
            data: Some("usage=10..90,devid=1,vrange=0..99999999999".parse().unwrap()),
            metadata: Some("convert=dup,soft,limit=7".parse().unwrap()),
            system: None,
            force: true,
        };
        let item = item_of(&wish);
        let bytes = item.as_bytes();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), 1 | 4 | 8);
        // Data: usage, device, addresses, flags.
        assert_eq!((word(16), word(24)), (90 << 32 | 10, 1));
        assert_eq!((word(48), word(56)), (0, 99_999_999_999));
        assert_eq!(word(8 + 64), 0x400 | 4 | 0x10);
        // Metadata: target, flags, limit.
        assert_eq!((word(144 + 56), word(144 + 64), word(144 + 72)), (0x20, 0x320, 7));
        assert_eq!(wish_of(&item).unwrap(), wish);
    }

    #[test]
    fn both_flags_mean_what_they_mean_to_linux() {
        let mut disk = disk_filters(&"usage=10..50,limit=2..5".parse().unwrap());
        let both = disk.which() | FilterFlags::USAGE | FilterFlags::LIMIT;
        disk.flags = both.bits().into();
        let set = filters_of(&disk).unwrap();
        assert_eq!(set.usage, Some(Span { from: 10, to: 50 }));
        assert_eq!(set.limit, Some(Span { from: 0, to: u32::MAX }));
    }

    #[test]
    fn every_set_survives_its_item() {
        for text in [
            "",
            "profiles=single|dup",
            "usage=0",
            "usage=33",
            "devid=2,drange=5..6",
            "stripes=1..4",
            "limit=0",
            "limit=2..3",
            "convert=single",
            "convert=raid6,soft",
        ] {
            let set: Filters = text.parse().unwrap();
            assert_eq!(filters_of(&disk_filters(&set)).unwrap(), set, "{text}");
        }
    }
}
