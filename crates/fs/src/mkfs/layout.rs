//! Where the first chunks of a new file system lie.
//!
//! This module hides how mkfs.btrfs places them, which other tools and people know by sight. First
//! come three small groups from 1 MiB on (system 4 MiB, metadata and data 8 MiB, less on tiny
//! devices). If a profile keeps two copies, other groups replace them: these follow behind, in a
//! size that depends on the device's. The space of the groups that were replaced is free.

use crate::{Error, Result};
use larder_format::items::BlockGroupFlags;
use larder_format::{DEVICE_RESERVED, DeviceId, Logical, Physical, STRIPE_LEN};
use larder_volume::{MappedChunk, Stripe, Stripes};

/// How many copies of data or metadata are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// One.
    Single,
    /// Two on the same device.
    Dup,
}

impl Profile {
    /// Name as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Dup => "dup",
        }
    }
}

/// The one device's id.
pub(super) const DEVICE: DeviceId = DeviceId(1);

const DATA: BlockGroupFlags = BlockGroupFlags::DATA;
const SYSTEM: BlockGroupFlags = BlockGroupFlags::SYSTEM;
const METADATA: BlockGroupFlags = BlockGroupFlags::METADATA;
const MIB: u64 = 1 << 20;

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

    /// Bytes of the device that they take.
    pub(super) fn device_bytes(&self) -> u64 {
        self.chunks().iter().map(|c| c.device_bytes()).sum()
    }
}

/// Smallest device, in bytes, that the profiles fit on. mkfs.btrfs asks for the same.
#[must_use]
pub fn minimum_size(metadata: Profile, data: Profile, mixed: bool) -> u64 {
    match (metadata, data, mixed) {
        (Profile::Single, _, true) => 16 * MIB,
        (Profile::Dup, _, true) => 157 * MIB,
        (Profile::Single, Profile::Single, false) => 45 * MIB,
        (Profile::Single, Profile::Dup, false) => 165 * MIB,
        (Profile::Dup, Profile::Single, false) => 109 * MIB,
        (Profile::Dup, Profile::Dup, false) => 229 * MIB,
    }
}

/// Lays the first chunks out on a device of `size` bytes.
///
/// # Errors
/// [`Error::Unsupported`] says which size is enough.
pub(super) fn plan(size: u64, metadata: Profile, data: Profile, mixed: bool) -> Result<Layout> {
    let least = minimum_size(metadata, data, mixed);
    if size < least {
        return Err(Error::Unsupported(format!(
            "{size} bytes are too small for a usable file system with these profiles: at least \
                {least} bytes ({} MiB) \
             are needed{}",
            least / MIB,
            if mixed { "" } else { "; for small devices there are --mixed and -m single" },
        )));
    }
    let mut cursor = Cursor { logical: DEVICE_RESERVED, physical: DEVICE_RESERVED };
    let share = |most: u64, least: u64| (size / 20).clamp(least, most) & !(STRIPE_LEN - 1);
    let large = 1 << 30;
    let metadata_size = share(if size > 50 << 30 { large } else { 256 * MIB }, 32 * MIB);
    let data_size = share(large, 64 * MIB);
    let first = (8 * MIB).min(size / 10) & !(STRIPE_LEN - 1);
    let both = if mixed { DATA | METADATA } else { METADATA };

    let mut system = cursor.take(SYSTEM, 4 * MIB, Profile::Single);
    let mut meta = cursor.take(both, first, Profile::Single);
    let mut own_data = (!mixed).then(|| cursor.take(DATA, first, Profile::Single));
    if metadata == Profile::Dup {
        system = cursor.take(SYSTEM, 8 * MIB, Profile::Dup);
        meta = cursor.take(both, if mixed { data_size } else { metadata_size }, Profile::Dup);
    }
    if let (Some(chunk), Profile::Dup) = (&mut own_data, data) {
        *chunk = cursor.take(DATA, data_size, Profile::Dup);
    }
    assert!(cursor.physical <= size, "the smallest size is larger than what is laid out");
    Ok(Layout { system, metadata: meta, data: own_data })
}

struct Cursor {
    logical: u64,
    physical: u64,
}

impl Cursor {
    fn take(&mut self, kind: BlockGroupFlags, length: u64, profile: Profile) -> MappedChunk {
        let (copies, bits) = match profile {
            Profile::Single => (1, BlockGroupFlags::empty()),
            Profile::Dup => (2, BlockGroupFlags::DUP),
        };
        let stripes: Stripes = (0..copies)
            .map(|i| Stripe { device: DEVICE, at: Physical(self.physical + i * length) })
            .collect();
        let chunk = MappedChunk {
            start: Logical(self.logical),
            length,
            kind: kind.bits() | bits.bits(),
            stripes,
        };
        self.logical += length;
        self.physical += length * copies;
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(size: u64, m: Profile, d: Profile, mixed: bool) -> Vec<(u64, u64, u64, Vec<u64>)> {
        let l = plan(size, m, d, mixed).unwrap();
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
    fn the_smallest_sizes_are_enough_and_one_byte_less_is_not() {
        for m in [Profile::Single, Profile::Dup] {
            for (d, mixed) in [(Profile::Single, false), (Profile::Dup, false), (m, true)] {
                let least = minimum_size(m, d, mixed);
                plan(least, m, d, mixed).unwrap();
                let text = plan(least - 1, m, d, mixed).unwrap_err().to_string();
                assert!(text.contains(&least.to_string()), "{text}");
            }
        }
    }
}
