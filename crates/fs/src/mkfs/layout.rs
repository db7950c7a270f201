//! Where the first chunks of a new file system lie.
//!
//! This module hides how mkfs.btrfs places them, which other tools and people know by sight. First
//! come three small groups on the first device, from 1 MiB on (system 4 MiB, metadata and data
//! 8 MiB, less on tiny devices). A profile other than single replaces its group by one that follows
//! behind, in a size that depends on all devices. The space of the groups that were replaced is
//! free.
//!
//! A chunk that needs fewer devices than there are takes those with the most room, as Linux does
//! for every later chunk; mkfs.btrfs takes the last ones that were named. Its stripes are in the
//! order of the devices.

use crate::{Error, Result};
use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{DEVICE_RESERVED, DeviceId, Logical, Physical, STRIPE_LEN};
use larder_volume::{MappedChunk, Stripe, Stripes};
use std::cmp::Reverse;

/// The first device's id. The others follow it.
pub(super) const FIRST_DEVICE: DeviceId = DeviceId(1);

/// Most devices of a new file system: so many have their items in trees of two levels.
const MOST_DEVICES: usize = 512;
/// Most stripes of a chunk: as many as an item in a leaf of 4 KiB has room for.
const MOST_STRIPES: u16 = 120;
/// Most stripes of the system chunk: the superblock has to hold it twice while it is replaced.
const MOST_SYSTEM_STRIPES: u16 = 26;

const DATA: BlockGroupFlags = BlockGroupFlags::DATA;
const SYSTEM: BlockGroupFlags = BlockGroupFlags::SYSTEM;
const METADATA: BlockGroupFlags = BlockGroupFlags::METADATA;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The first chunks.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) system: MappedChunk,
    pub(super) metadata: MappedChunk,
    /// `None` when data shares the metadata chunk.
    pub(super) data: Option<MappedChunk>,
}

impl Layout {
    /// Chunks in the order of their addresses.
    pub(super) fn chunks(&self) -> Vec<&MappedChunk> {
        let mut all: Vec<&MappedChunk> =
            [Some(&self.system), Some(&self.metadata), self.data.as_ref()]
                .into_iter()
                .flatten()
                .collect();
        all.sort_by_key(|c| c.start);
        all
    }

    /// Bytes of a device that they take.
    pub(super) fn device_bytes(&self, device: DeviceId) -> u64 {
        let on = |c: &MappedChunk| c.stripes.iter().filter(|s| s.device == device).count() as u64;
        self.chunks().iter().map(|c| on(c) * c.stripe_bytes()).sum()
    }
}

/// Smallest size, in bytes, that each device needs for the profiles to fit. mkfs.btrfs asks for the
/// same.
#[must_use]
pub fn minimum_size(metadata: Profile, data: Profile, mixed: bool) -> u64 {
    // What single takes, what each device gets of a stripe, and what DUP takes of one device.
    let of = |profile, single, stripe, dup| match profile {
        Profile::Single => single,
        Profile::Dup => dup,
        _ => stripe,
    };
    MIB * match mixed {
        true if metadata == Profile::Single => 16,
        // System and metadata together, behind the first groups.
        true => 13 + of(metadata, 0, 8 + 64, 16 + 128),
        false => 21 + of(metadata, 16, 8 + 32, 16 + 64) + of(data, 8, 64, 128),
    }
}

/// Lays the first chunks out on devices of these sizes.
///
/// # Errors
/// [`Error::Unsupported`] says how many devices, or which size, is enough.
pub(super) fn plan(sizes: &[u64], metadata: Profile, data: Profile, mixed: bool) -> Result<Layout> {
    enough_devices(sizes.len(), metadata, data)?;
    enough_space(sizes, metadata, data, mixed)?;
    let total = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
    let mut cursor = Cursor::new(sizes);
    let first = (8 * MIB).min(sizes[0] / 10) & !(STRIPE_LEN - 1);
    let both = if mixed { DATA | METADATA } else { METADATA };
    let large = Size { stripe: GIB, chunk: 10 * GIB, least: 64 * MIB };
    let metadata_most = if total > 50 * GIB { GIB } else { 256 * MIB };
    let small = Size { stripe: metadata_most, chunk: metadata_most, least: 32 * MIB };
    let of_system = Size { stripe: 8 * MIB, chunk: 16 * MIB, least: MIB };

    let mut system = cursor.take_first(SYSTEM, 4 * MIB);
    let mut meta = cursor.take_first(both, first);
    let mut own_data = (!mixed).then(|| cursor.take_first(DATA, first));
    if metadata != Profile::Single {
        system = cursor.take(SYSTEM, metadata, of_system)?;
        cursor.kept = match data {
            Profile::Single => 0,
            _ if mixed => 0,
            _ => stripes_on_each(data) * large.least,
        };
        meta = cursor.take(both, metadata, if mixed { large } else { small })?;
    }
    if let Some(chunk) = own_data.as_mut().filter(|_| data != Profile::Single) {
        cursor.kept = 0;
        *chunk = cursor.take(DATA, data, large)?;
    }
    Ok(Layout { system, metadata: meta, data: own_data })
}

fn enough_devices(there: usize, metadata: Profile, data: Profile) -> Result<()> {
    let refuse = |why: String| Err(Error::Unsupported(why));
    if there == 0 {
        return refuse("a file system needs a device".into());
    }
    if there > MOST_DEVICES {
        return refuse(format!(
            "{there} devices are too many: at most {MOST_DEVICES} are possible"
        ));
    }
    for (what, profile) in [("metadata", metadata), ("data", data)] {
        let least = profile.min_devices();
        if there < usize::from(least) {
            let (name, s) = (profile.name(), if there == 1 { "" } else { "s" });
            return refuse(format!(
                "{name} for {what} needs at least {least} devices, and {there} device{s} \
                    {} given",
                if there == 1 { "was" } else { "were" }
            ));
        }
    }
    Ok(())
}

fn enough_space(sizes: &[u64], metadata: Profile, data: Profile, mixed: bool) -> Result<()> {
    let least = minimum_size(metadata, data, mixed);
    let Some(small) = sizes.iter().position(|size| *size < least) else { return Ok(()) };
    let size = sizes[small];
    let subject = match sizes.len() {
        1 => format!("{size} bytes are"),
        _ => format!("device {}: {size} bytes are", small + 1),
    };
    Err(Error::Unsupported(format!(
        "{subject} too small for a usable file system with these profiles: at least {least} bytes \
            ({} MiB) are needed{}{}",
        least / MIB,
        if sizes.len() > 1 { " on each device" } else { "" },
        if mixed { "" } else { "; for small devices there are --mixed and -m single" },
    )))
}

/// How large a chunk becomes.
#[derive(Clone, Copy)]
struct Size {
    /// Longest stripe.
    stripe: u64,
    /// Most bytes of the chunk.
    chunk: u64,
    /// Shortest stripe, even if the rest says that it should be shorter.
    least: u64,
}

/// What is taken already.
struct Cursor<'a> {
    sizes: &'a [u64],
    total: u64,
    logical: u64,
    /// On each device.
    physical: Vec<u64>,
    /// What a chunk has to leave on each device for the next one.
    kept: u64,
}

impl<'a> Cursor<'a> {
    fn new(sizes: &'a [u64]) -> Self {
        let total = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
        let physical = vec![DEVICE_RESERVED; sizes.len()];
        Self { sizes, total, logical: DEVICE_RESERVED, physical, kept: 0 }
    }

    /// One of the small groups at the beginning of the first device.
    fn take_first(&mut self, kind: BlockGroupFlags, length: u64) -> MappedChunk {
        self.place(kind, Profile::Single, length, &[0])
    }

    fn take(&mut self, kind: BlockGroupFlags, profile: Profile, size: Size) -> Result<MappedChunk> {
        let most = if kind == SYSTEM { MOST_SYSTEM_STRIPES } else { MOST_STRIPES };
        let most = usize::from(profile.max_devices().min(most));
        let mut devices: Vec<usize> = (0..self.sizes.len()).collect();
        devices.sort_by_key(|device| Reverse(self.room(*device)));
        let count = devices.len().min(most);
        devices.truncate(count - count % usize::from(profile.sub_stripes()));
        devices.sort_unstable();
        let stripes = count_of_stripes(profile, &devices);
        let room = devices.iter().map(|device| self.room(*device)).min().unwrap_or(0);
        let room = room.saturating_sub(self.kept) / stripes_on_each(profile);
        let stripe = self.stripe_len(profile, stripes, size).min(room);
        let stripe = stripe & !(STRIPE_LEN - 1);
        if stripe < MIB {
            let name = profile.name();
            return Err(Error::Unsupported(format!("there is no room for a {name} chunk")));
        }
        let length = stripe * u64::from(profile.data_stripes(stripes));
        Ok(self.place(kind, profile, length, &devices))
    }

    /// The chunk has at most a tenth of all devices, copies and parity included.
    fn stripe_len(&self, profile: Profile, stripes: u16, size: Size) -> u64 {
        let most = size.chunk.min(self.total / 10);
        let fits = size.stripe * u64::from(profile.data_stripes(stripes)) <= most;
        let stripe = if fits { size.stripe } else { most / u64::from(stripes) };
        stripe.max(size.least) & !(STRIPE_LEN - 1)
    }

    fn room(&self, device: usize) -> u64 {
        self.sizes[device].saturating_sub(self.physical[device])
    }

    fn place(
        &mut self,
        kind: BlockGroupFlags,
        profile: Profile,
        length: u64,
        devices: &[usize],
    ) -> MappedChunk {
        let bytes = profile.stripe_bytes(length, count_of_stripes(profile, devices));
        let mut placed = Stripes::new();
        for device in devices {
            for _ in 0..stripes_on_each(profile) {
                let id = DeviceId(FIRST_DEVICE.0 + *device as u64);
                placed.push(Stripe { device: id, at: Physical(self.physical[*device]) });
                self.physical[*device] += bytes;
            }
        }
        let start = Logical(self.logical);
        self.logical += length;
        let kind = kind | profile.flag();
        MappedChunk { start, length, kind: kind.bits(), stripes: placed }
    }
}

/// Stripes of a chunk that lie on one device.
fn stripes_on_each(profile: Profile) -> u64 {
    if profile == Profile::Dup { 2 } else { 1 }
}

/// Stripes of a chunk on these devices.
fn count_of_stripes(profile: Profile, devices: &[usize]) -> u16 {
    let count = devices.len() as u64 * stripes_on_each(profile);
    u16::try_from(count).expect("as many devices as a chunk can have")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(size: u64, m: Profile, d: Profile, mixed: bool) -> Vec<(u64, u64, u64, Vec<u64>)> {
        let l = plan(&[size], m, d, mixed).unwrap();
        l.chunks()
            .iter()
            .map(|c| (c.start.0, c.length, c.kind, c.stripes.iter().map(|s| s.at.0).collect()))
            .collect()
    }

    /// The numbers were read from images of mkfs.btrfs 6.14.
    #[test]
    fn chunks_lie_where_mkfs_btrfs_puts_them() {
        use Profile::{Dup, Single};
        let data = (13_631_488, 8 * MIB, 1, vec![13_631_488]);
        let system = (22_020_096, 8 * MIB, 0x22, vec![22_020_096, 30_408_704]);
        let meta = |len: u64| (30_408_704, len, 0x24, vec![38_797_312, 38_797_312 + len]);
        assert_eq!(
            shape(300 * MIB, Dup, Single, false),
            [data.clone(), system.clone(), meta(32 * MIB)]
        );
        assert_eq!(
            shape(1 << 30, Dup, Single, false),
            [data.clone(), system.clone(), meta(53_673_984)]
        );
        assert_eq!(
            shape(8 << 30, Dup, Single, false),
            [data.clone(), system.clone(), meta(256 * MIB)]
        );
        assert_eq!(
            shape(100 << 30, Dup, Single, false),
            [data.clone(), system.clone(), meta(1 << 30)]
        );
        assert_eq!(
            shape(8 << 30, Dup, Dup, false),
            [
                system,
                meta(256 * MIB),
                (298_844_160, 429_457_408, 0x21, vec![575_668_224, 1_005_125_632])
            ]
        );
        let small_system = (MIB, 4 * MIB, 2, vec![MIB]);
        let small_meta = |kind| (5 * MIB, 8 * MIB, kind, vec![5 * MIB]);
        assert_eq!(
            shape(1 << 30, Single, Single, false),
            [small_system.clone(), small_meta(4), data]
        );
        assert_eq!(
            shape(1 << 30, Single, Dup, false),
            [
                small_system.clone(),
                small_meta(4),
                (22_020_096, 64 * MIB, 0x21, vec![22_020_096, 89_128_960])
            ]
        );
        assert_eq!(shape(80 * MIB, Single, Single, true), [small_system.clone(), small_meta(5)]);
        // A tenth of the device at most.
        assert_eq!(
            shape(45 * MIB, Single, Single, false),
            [
                small_system,
                (5 * MIB, 4_718_592, 4, vec![5 * MIB]),
                (9_961_472, 4_718_592, 1, vec![9_961_472])
            ]
        );
        assert_eq!(
            shape(16 * MIB, Single, Single, true)[1],
            (5 * MIB, 1_638_400, 5, vec![5 * MIB])
        );
        assert_eq!(
            shape(8 << 30, Dup, Dup, true),
            [
                (13_631_488, 8 * MIB, 0x22, vec![13_631_488, 22_020_096]),
                (22_020_096, 429_457_408, 0x25, vec![30_408_704, 459_866_112])
            ]
        );
    }

    #[test]
    fn a_chunk_goes_where_most_room_is() {
        let (raid1, sizes) = (Profile::Raid1, [3 * GIB, GIB, 2 * GIB]);
        let layout = plan(&sizes, raid1, raid1, false).unwrap();
        for chunk in layout.chunks() {
            assert_eq!(chunk.stripes.iter().map(|s| s.device.0).collect::<Vec<_>>(), [1, 3]);
        }
        assert_eq!(layout.device_bytes(DeviceId(2)), 0);
        let data = layout.data.as_ref().unwrap().length;
        assert_eq!(layout.device_bytes(DeviceId(1)), 8 * MIB + 256 * MIB + data);
        // A row of small devices is never longer than the smallest has room for.
        let sizes = [100 * GIB, 125 * MIB];
        let layout = plan(&sizes, Profile::Raid0, Profile::Raid0, false).unwrap();
        assert!(layout.device_bytes(DeviceId(2)) < 125 * MIB);
    }

    #[test]
    fn each_profile_fits_on_the_fewest_devices_of_the_smallest_size() {
        for m in Profile::ALL {
            for d in Profile::ALL {
                for mixed in [false, m == d] {
                    let devices = usize::from(m.min_devices().max(d.min_devices()));
                    let least = minimum_size(m, d, mixed);
                    let layout = plan(&vec![least; devices], m, d, mixed).unwrap();
                    for n in 1..=devices as u64 {
                        assert!(layout.device_bytes(DeviceId(n)) + DEVICE_RESERVED <= least);
                    }
                    let text = plan(&vec![least; devices - 1], m, d, mixed).unwrap_err();
                    assert!(text.to_string().contains("device"), "{text}");
                }
            }
        }
    }

    #[test]
    fn the_smallest_sizes_are_enough_and_one_byte_less_is_not() {
        for m in [Profile::Single, Profile::Dup] {
            for (d, mixed) in [(Profile::Single, false), (Profile::Dup, false), (m, true)] {
                let least = minimum_size(m, d, mixed);
                plan(&[least], m, d, mixed).unwrap();
                let text = plan(&[least - 1], m, d, mixed).unwrap_err().to_string();
                assert!(text.contains(&least.to_string()), "{text}");
            }
        }
    }
}
