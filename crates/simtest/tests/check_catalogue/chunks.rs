//! Chunks, devices, device extents, block groups: four views of the same space.

use crate::entry::{BOTH, Entry, HOLES, MIXED, missed, seen};
use crate::find::{self, CHUNKS, DEVICES};
use larder_check::Kind;
use larder_format::items::{BlockGroupFlags, BlockGroupItem};
use larder_format::{Key, KeyType};
use zerocopy::IntoBytes;

pub(crate) const ENTRIES: &[Entry] = &[
    seen("chunk-missing", BOTH, &[Kind::BlockGroupWithoutChunk], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        d.item(CHUNKS, key).delete()
    }),
    seen("chunk-shorter-than-its-group", BOTH, &[Kind::BlockGroupDiffers], |d| {
        let last = d.chunks().iter().max_by_key(|c| c.start).expect("a chunk").start;
        let key = find::chunk_of(d, last)?;
        d.item(CHUNKS, key).add_u64(0, -(1 << 20))
    }),
    seen("chunk-of-another-type", BOTH, &[Kind::BlockGroupDiffers], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        d.item(CHUNKS, key).set_u64(24, BlockGroupFlags::METADATA.bits())
    }),
    seen(
        "chunk-stripe-elsewhere",
        BOTH,
        &[Kind::DeviceExtentMissing, Kind::DeviceExtentWithoutChunk],
        |d| {
            let (_, record) = find::stored(d, "plant/plain")?;
            let key = find::chunk_of(d, record.disk_bytenr)?;
            let behind = find::behind_dev_extents(d)?;
            d.item(CHUNKS, key).set_u64(56, behind)
        },
    ),
    seen("chunk-stripe-on-an-unknown-device", BOTH, &[Kind::DeviceMissing], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        d.item(CHUNKS, key).set_u64(48, 7)
    }),
    seen("chunk-stripe-with-another-device-uuid", BOTH, &[Kind::DeviceMissing], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        d.item(CHUNKS, key).set_u64(64, 0x1234_5678)
    }),
    seen("chunk-of-two-profiles", BOTH, &[Kind::ChunkInvalid], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        d.item(CHUNKS, key).set_u64(24, 0x31)
    }),
    seen("dev-extent-missing", BOTH, &[Kind::DeviceExtentMissing], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        d.item(DEVICES, key).delete()
    }),
    seen("dev-extent-surplus", BOTH, &[Kind::DeviceExtentWithoutChunk], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        let mut copy = d.get(DEVICES, key)?;
        copy[24..32].copy_from_slice(&(1u64 << 20).to_le_bytes());
        let at = find::behind_dev_extents(d)?;
        d.insert(DEVICES, Key { offset: at, ..key }, &copy)
    }),
    seen("dev-extent-beyond-the-device", BOTH, &[Kind::DeviceExtentWithoutChunk], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        let copy = d.get(DEVICES, key)?;
        d.insert(DEVICES, Key { offset: 1 << 30, ..key }, &copy)
    }),
    seen("dev-extent-shorter", BOTH, &[Kind::DeviceExtentDiffers], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        d.item(DEVICES, key).add_u64(24, -65536)
    }),
    seen("dev-extent-of-another-chunk", BOTH, &[Kind::DeviceExtentDiffers], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        d.item(DEVICES, key).add_u64(16, 65536)
    }),
    seen("dev-item-used", BOTH, &[Kind::DeviceBytesUsed], |d| {
        let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
        d.item(CHUNKS, key).add_u64(16, -(1 << 20))
    }),
    seen("dev-item-total", BOTH, &[Kind::SuperTotalBytes], |d| {
        let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
        d.item(CHUNKS, key).add_u64(8, 64 << 20)
    }),
    seen("dev-item-uuid", BOTH, &[Kind::SuperDeviceItem], |d| {
        let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
        d.item(CHUNKS, key).add_u64(66, 1)
    }),
    seen("dev-item-missing", BOTH, &[Kind::DeviceItemMissing], |d| {
        let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
        d.item(CHUNKS, key).delete()
    }),
    seen("group-missing", BOTH, &[Kind::ChunkWithoutBlockGroup], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::group_of(d, record.disk_bytenr)?;
        d.item(find::group_tree(d), key).delete()
    }),
    seen("group-missing-in-the-extent-tree", HOLES, &[Kind::ChunkWithoutBlockGroup], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::group_of(d, record.disk_bytenr)?;
        d.item(find::group_tree(d), key).delete()
    }),
    seen("group-without-chunk", BOTH, &[Kind::BlockGroupWithoutChunk], |d| {
        let key = Key::new(find::unmapped(d), KeyType::BLOCK_GROUP_ITEM, 1 << 20);
        let group = BlockGroupItem::new(0, BlockGroupFlags::DATA);
        d.insert(find::group_tree(d), key, group.as_bytes())
    }),
    seen("group-of-another-type", BOTH, &[Kind::BlockGroupDiffers], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::group_of(d, record.disk_bytenr)?;
        d.item(find::group_tree(d), key).set_u64(16, BlockGroupFlags::METADATA.bits())
    }),
    seen("group-of-another-type-mixed", MIXED, &[Kind::BlockGroupDiffers], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::group_of(d, record.disk_bytenr)?;
        d.item(find::group_tree(d), key).set_u64(16, 0x21)
    }),
    seen("group-shorter-than-its-chunk", BOTH, &[Kind::BlockGroupDiffers], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::group_of(d, record.disk_bytenr)?;
        d.item(find::group_tree(d), key).rekey(Key { offset: key.offset - 65536, ..key })
    }),
    seen("group-used-too-large", BOTH, &[Kind::BlockGroupUsed], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::group_of(d, record.disk_bytenr)?;
        d.item(find::group_tree(d), key).add_u64(0, 4096)
    }),
    seen("group-used-too-small", BOTH, &[Kind::BlockGroupUsed], |d| {
        let key = find::group_of(d, d.root(find::FS)?)?;
        d.item(find::group_tree(d), key).add_u64(0, -16384)
    }),
    seen("group-used-more-than-there-is", BOTH, &[Kind::BlockGroupInvalid], |d| {
        let key = find::group_of(d, d.root(find::FS)?)?;
        d.item(find::group_tree(d), key).set_u64(0, key.offset + 16384)
    }),
    seen("image-cut-off", BOTH, &[Kind::DeviceTruncated], |d| d.truncate(100 << 20)),
    seen("chunk-overlapping-another-on-the-device", BOTH, &[Kind::ChunkOverlap], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        let other = find::dev_extent_of(d, d.root(find::FS)?)?;
        d.item(CHUNKS, key).set_u64(56, other.offset)
    }),
    seen("chunk-beyond-the-device", BOTH, &[Kind::ChunkBeyondDevice], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        d.item(CHUNKS, key).set_u64(56, 255 << 20)
    }),
    seen("chunk-in-the-first-mebibyte", BOTH, &[Kind::ChunkInReservedSpace], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::chunk_of(d, record.disk_bytenr)?;
        let mut chunk = d.get(CHUNKS, key)?;
        chunk[..8].copy_from_slice(&(256u64 << 10).to_le_bytes());
        chunk[56..64].copy_from_slice(&(512u64 << 10).to_le_bytes());
        d.insert(CHUNKS, Key { offset: find::unmapped(d).0, ..key }, &chunk)
    }),
    seen("metadata-chunk-for-data", BOTH, &[Kind::NodeWrongBlockGroup], |d| {
        let key = find::chunk_of(d, d.root(find::FS)?)?;
        d.item(CHUNKS, key).set_u64(24, 0x21)
    }),
    seen("dev-item-of-another-file-system", BOTH, &[Kind::DeviceItemWrong], |d| {
        let (key, _) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
        d.item(CHUNKS, key).add_u64(82, 1)
    }),
    seen("dev-extents-overlap", BOTH, &[Kind::DeviceExtentOverlap], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        let mut copy = d.get(DEVICES, key)?;
        copy[24..32].copy_from_slice(&65536u64.to_le_bytes());
        d.insert(DEVICES, Key { offset: key.offset + 65536, ..key }, &copy)
    }),
    missed("dev-extent-of-another-chunk-tree", BOTH, &[Kind::DeviceExtentInvalid], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::dev_extent_of(d, record.disk_bytenr)?;
        d.item(DEVICES, key).set_u64(0, 5)
    }),
    missed("dev-stats-with-errors", BOTH, &[Kind::DeviceErrors], |d| {
        let (key, _) = d.first(DEVICES, |k, _| k.kind == KeyType::PERSISTENT_ITEM)?;
        d.item(DEVICES, key).set_u64(24, 3)
    }),
    seen("dev-item-of-a-second-device", BOTH, &[Kind::SuperNumDevices], |d| {
        let (key, data) = d.first(CHUNKS, |k, _| k.kind == KeyType::DEV_ITEM)?;
        let mut second = data;
        second[0] = 2;
        second[66] ^= 1;
        d.insert(CHUNKS, Key { offset: 2, ..key }, &second)
    }),
    missed("dev-stats-of-an-odd-size", BOTH, &[Kind::ItemInvalid], |d| {
        let (key, _) = d.first(DEVICES, |k, _| k.kind == KeyType::PERSISTENT_ITEM)?;
        d.item(DEVICES, key).edit(|data| data.truncate(13))
    }),
];
