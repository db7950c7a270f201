//! Chunks, devices, device extents, block groups: four views of the same space.

use crate::bases::{BOTH, HOLES, MIXED};
use crate::entry::{Entry, Progs};
use crate::find::{self, CHUNKS, DEVICES};
use larder_check::Kind;
use larder_format::items::{BlockGroupFlags, BlockGroupItem};
use larder_format::{Key, KeyType};
use zerocopy::IntoBytes;

pub(crate) const ENTRIES: &[Entry] = &[
    Entry {
        name: "chunk-missing",
        bases: BOTH,
        kinds: &[Kind::BlockGroupWithoutChunk],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            d.item(CHUNKS, key).delete()
        },
    },
    Entry {
        name: "chunk-shorter-than-its-group",
        bases: BOTH,
        kinds: &[Kind::BlockGroupDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let last = d.chunks().iter().max_by_key(|c| c.start).expect("a chunk").start;
            let key = find::chunk_of(d, last)?;
            d.item(CHUNKS, key).add_u64(0, -(1 << 20))
        },
    },
    Entry {
        name: "chunk-of-another-type",
        bases: BOTH,
        kinds: &[Kind::BlockGroupDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            d.item(CHUNKS, key).set_u64(24, BlockGroupFlags::METADATA.bits())
        },
    },
    Entry {
        name: "chunk-stripe-elsewhere",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentMissing, Kind::DeviceExtentWithoutChunk],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            let behind = find::behind_dev_extents(d)?;
            d.item(CHUNKS, key).set_u64(56, behind)
        },
    },
    Entry {
        name: "chunk-stripe-on-an-unknown-device",
        bases: BOTH,
        kinds: &[Kind::DeviceMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            d.item(CHUNKS, key).set_u64(48, 7)
        },
    },
    Entry {
        name: "chunk-stripe-with-another-device-uuid",
        bases: BOTH,
        kinds: &[Kind::DeviceMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            d.item(CHUNKS, key).set_u64(64, 0x1234_5678)
        },
    },
    Entry {
        name: "chunk-of-two-profiles",
        bases: BOTH,
        kinds: &[Kind::ChunkInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            d.item(CHUNKS, key).set_u64(24, 0x31)
        },
    },
    Entry {
        name: "dev-extent-missing",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            d.item(DEVICES, key).delete()
        },
    },
    Entry {
        name: "dev-extent-surplus",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentWithoutChunk],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            let mut copy = d.get(DEVICES, key)?;
            copy[24..32].copy_from_slice(&(1u64 << 20).to_le_bytes());
            let at = find::behind_dev_extents(d)?;
            d.insert(DEVICES, Key { offset: at, ..key }, &copy)
        },
    },
    Entry {
        name: "dev-extent-beyond-the-device",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentWithoutChunk],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            let copy = d.get(DEVICES, key)?;
            d.insert(DEVICES, Key { offset: 1 << 30, ..key }, &copy)
        },
    },
    Entry {
        name: "dev-extent-shorter",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            d.item(DEVICES, key).add_u64(24, -65536)
        },
    },
    Entry {
        name: "dev-extent-of-another-chunk",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            d.item(DEVICES, key).add_u64(16, 65536)
        },
    },
    Entry {
        name: "dev-item-used",
        bases: BOTH,
        kinds: &[Kind::DeviceBytesUsed],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
            d.item(CHUNKS, key).add_u64(16, -(1 << 20))
        },
    },
    Entry {
        name: "dev-item-total",
        bases: BOTH,
        kinds: &[Kind::SuperTotalBytes],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
            d.item(CHUNKS, key).add_u64(8, 64 << 20)
        },
    },
    Entry {
        name: "dev-item-uuid",
        bases: BOTH,
        kinds: &[Kind::SuperDeviceItem],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
            d.item(CHUNKS, key).add_u64(66, 1)
        },
    },
    Entry {
        name: "dev-item-missing",
        bases: BOTH,
        kinds: &[Kind::DeviceItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
            d.item(CHUNKS, key).delete()
        },
    },
    Entry {
        name: "group-missing",
        bases: BOTH,
        kinds: &[Kind::ChunkWithoutBlockGroup],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::group_of(d, record.disk_bytenr)?;
            d.item(find::group_tree(d), key).delete()
        },
    },
    Entry {
        name: "group-missing-in-the-extent-tree",
        bases: HOLES,
        kinds: &[Kind::ChunkWithoutBlockGroup],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::group_of(d, record.disk_bytenr)?;
            d.item(find::group_tree(d), key).delete()
        },
    },
    Entry {
        name: "group-without-chunk",
        bases: BOTH,
        kinds: &[Kind::BlockGroupWithoutChunk],
        progs: Progs::Sees,
        plant: |d| {
            let key = Key::new(find::unmapped(d), KeyType::BLOCK_GROUP_ITEM, 1 << 20);
            let group = BlockGroupItem::new(0, BlockGroupFlags::DATA);
            d.insert(find::group_tree(d), key, group.as_bytes())
        },
    },
    Entry {
        name: "group-of-another-type",
        bases: BOTH,
        kinds: &[Kind::BlockGroupDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::group_of(d, record.disk_bytenr)?;
            d.item(find::group_tree(d), key).set_u64(16, BlockGroupFlags::METADATA.bits())
        },
    },
    Entry {
        name: "group-of-another-type-mixed",
        bases: MIXED,
        kinds: &[Kind::BlockGroupDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::group_of(d, record.disk_bytenr)?;
            d.item(find::group_tree(d), key).set_u64(16, 0x21)
        },
    },
    Entry {
        name: "group-shorter-than-its-chunk",
        bases: BOTH,
        kinds: &[Kind::BlockGroupDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::group_of(d, record.disk_bytenr)?;
            d.item(find::group_tree(d), key).rekey(Key { offset: key.offset - 65536, ..key })
        },
    },
    Entry {
        name: "group-used-too-large",
        bases: BOTH,
        kinds: &[Kind::BlockGroupUsed],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::group_of(d, record.disk_bytenr)?;
            d.item(find::group_tree(d), key).add_u64(0, 4096)
        },
    },
    Entry {
        name: "group-used-too-small",
        bases: BOTH,
        kinds: &[Kind::BlockGroupUsed],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::group_of(d, d.root(find::FS)?)?;
            d.item(find::group_tree(d), key).add_u64(0, -16384)
        },
    },
    Entry {
        name: "group-used-more-than-there-is",
        bases: BOTH,
        kinds: &[Kind::BlockGroupInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::group_of(d, d.root(find::FS)?)?;
            d.item(find::group_tree(d), key).set_u64(0, key.offset + 16384)
        },
    },
    Entry {
        name: "image-cut-off",
        bases: BOTH,
        kinds: &[Kind::DeviceTruncated],
        progs: Progs::Sees,
        plant: |d| d.truncate(100 << 20),
    },
    Entry {
        name: "chunk-overlapping-another-on-the-device",
        bases: BOTH,
        kinds: &[Kind::ChunkOverlap],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            let other = find::dev_extent_of(d, d.root(find::FS)?)?;
            d.item(CHUNKS, key).set_u64(56, other.offset)
        },
    },
    Entry {
        name: "chunk-beyond-the-device",
        bases: BOTH,
        kinds: &[Kind::ChunkBeyondDevice],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            d.item(CHUNKS, key).set_u64(56, 255 << 20)
        },
    },
    Entry {
        name: "chunk-in-the-first-mebibyte",
        bases: BOTH,
        kinds: &[Kind::ChunkInReservedSpace],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            let mut chunk = d.get(CHUNKS, key)?;
            chunk[..8].copy_from_slice(&(256u64 << 10).to_le_bytes());
            chunk[56..64].copy_from_slice(&(512u64 << 10).to_le_bytes());
            d.insert(CHUNKS, Key { offset: find::unmapped(d).0, ..key }, &chunk)
        },
    },
    Entry {
        name: "metadata-chunk-for-data",
        bases: BOTH,
        kinds: &[Kind::NodeWrongBlockGroup],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::chunk_of(d, d.root(find::FS)?)?;
            d.item(CHUNKS, key).set_u64(24, 0x21)
        },
    },
    Entry {
        name: "dev-item-of-another-file-system",
        bases: BOTH,
        kinds: &[Kind::DeviceItemWrong],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
            d.item(CHUNKS, key).add_u64(82, 1)
        },
    },
    Entry {
        name: "dev-extents-overlap",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentOverlap],
        progs: Progs::Sees,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            let mut copy = d.get(DEVICES, key)?;
            copy[24..32].copy_from_slice(&65536u64.to_le_bytes());
            d.insert(DEVICES, Key { offset: key.offset + 65536, ..key }, &copy)
        },
    },
    Entry {
        name: "dev-extent-of-another-chunk-tree",
        bases: BOTH,
        kinds: &[Kind::DeviceExtentInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::dev_extent_of(d, record.disk_bytenr)?;
            d.item(DEVICES, key).set_u64(0, 5)
        },
    },
    Entry {
        name: "dev-stats-with-errors",
        bases: BOTH,
        kinds: &[Kind::DeviceErrors],
        progs: Progs::Misses,
        plant: |d| {
            let (key, _) = d.first(DEVICES, |k, _| k.kind == KeyType::PERSISTENT_ITEM)?;
            d.item(DEVICES, key).set_u64(24, 3)
        },
    },
    Entry {
        name: "dev-item-of-a-second-device",
        bases: BOTH,
        kinds: &[Kind::SuperNumDevices],
        progs: Progs::Sees,
        plant: |d| {
            let (key, data) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
            let mut second = data;
            second[0] = 2;
            second[66] ^= 1;
            d.insert(CHUNKS, Key { offset: 2, ..key }, &second)
        },
    },
    Entry {
        name: "dev-stats-of-an-odd-size",
        bases: BOTH,
        kinds: &[Kind::ItemInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let (key, _) = d.first(DEVICES, |k, _| k.kind == KeyType::PERSISTENT_ITEM)?;
            d.item(DEVICES, key).edit(|data| data.truncate(13))
        },
    },
];
