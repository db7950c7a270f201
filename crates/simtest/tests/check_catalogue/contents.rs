//! File extents: what covers which bytes of a file.

use crate::entry::{BOTH, Entry, HOLES, LINUX, OLD, missed, seen};
use crate::find::{self, CSUMS, FS};
use anyhow::Result;
use larder_check::Kind;
use larder_format::items::BlockGroupFlags;
use larder_format::{Key, KeyType};
use larder_simtest::damage::{Copies, Damage, ItemEdit};

const GENERATION: usize = 0;
const RAM_BYTES: usize = 8;
const COMPRESSION: usize = 16;
const ENCRYPTION: usize = 17;
const TYPE: usize = 20;
const DISK_BYTENR: usize = 21;
const DISK_NUM_BYTES: usize = 29;
const OFFSET: usize = 37;
const NUM_BYTES: usize = 45;

/// Key of the first extent of a file that stands in the tree.
fn inline(d: &Damage, path: &str) -> Result<Key> {
    let ino = find::ino(d, path)?;
    Ok(d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::EXTENT_DATA)?.0)
}

/// The item of that extent, to be changed.
fn inline_item<'a>(d: &'a mut Damage, path: &str) -> Result<ItemEdit<'a>> {
    let key = inline(d, path)?;
    Ok(d.item(FS, key))
}

/// The item that stands for the hole in `plant/sparse`.
fn hole(d: &Damage) -> Result<Key> {
    let ino = find::ino(d, "plant/sparse")?;
    let is_hole = |data: &[u8]| data[TYPE] == 1 && data[DISK_BYTENR..DISK_NUM_BYTES] == [0; 8];
    Ok(d.first(FS, |k, data| k.objectid == ino && k.kind == KeyType::EXTENT_DATA && is_hole(data))?
        .0)
}

/// Packs the first extent of a file wrongly: its first bytes are others, and the checksum is
/// theirs.
fn repack(d: &mut Damage, path: &str, bytes: &[u8]) -> Result<()> {
    let (_, record) = find::stored(d, path)?;
    let csum = d.superblock().csum_type();
    let key = find::csum_of(d, record.disk_bytenr)?;
    let mut sum = [0; 32];
    d.edit_data(record.disk_bytenr, Copies::All, |sector| {
        sector[..bytes.len()].copy_from_slice(bytes);
        sum = csum.compute(sector);
    })?;
    let size = csum.size();
    d.item(CSUMS, key).set(size * find::csum_index(key, record.disk_bytenr), &sum[..size])
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("file-extents-overlap", BOTH, &[Kind::FileExtentOverlap], |d| {
        let (key, record) = find::stored(d, "plant/plain")?;
        d.insert(FS, Key { offset: 8192, ..key }, &record.encode())
    }),
    seen("file-extent-longer-than-its-window", BOTH, &[Kind::FileExtentInvalid], |d| {
        find::stored_item(d, "plant/plain")?.add_u64(NUM_BYTES, 4096)
    }),
    seen("file-extent-window-behind-the-extent", BOTH, &[Kind::FileExtentInvalid], |d| {
        find::stored_item(d, "plant/plain")?.set_u64(OFFSET, 1 << 20)
    }),
    seen("file-extent-gap", HOLES, &[Kind::FileExtentHole], |d| {
        let key = hole(d)?;
        d.item(FS, key).delete()
    }),
    seen("file-extent-gap-old", OLD, &[Kind::FileExtentHole], |d| {
        let key = hole(d)?;
        d.item(FS, key).delete()
    }),
    seen("file-extent-missing", BOTH, &[Kind::InodeBytes, Kind::ExtentUnused], |d| {
        find::stored_item(d, "plant/plain")?.delete()
    }),
    seen("file-extent-elsewhere", BOTH, &[Kind::ExtentItemMissing, Kind::ExtentUnused], |d| {
        let (key, _) = find::stored(d, "plant/plain")?;
        let free = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?;
        d.item(FS, key).set_u64(DISK_BYTENR, free.0)
    }),
    seen("file-extent-of-another-file", BOTH, &[Kind::ExtentRefMissing, Kind::ExtentUnused], |d| {
        let (key, _) = find::stored(d, "plant/plain")?;
        let (_, other) = find::stored(d, "plant/second")?;
        d.item(FS, key).set_u64(DISK_BYTENR, other.disk_bytenr.0)
    }),
    seen("file-extent-outside-of-chunks", BOTH, &[Kind::FileExtentUnmapped], |d| {
        let (key, _) = find::stored(d, "plant/plain")?;
        let nowhere = find::unmapped(d);
        d.item(FS, key).set_u64(DISK_BYTENR, nowhere.0)
    }),
    seen("file-extent-within-an-extent", BOTH, &[Kind::ExtentItemMissing], |d| {
        find::stored_item(d, "plant/plain")?.add_u64(DISK_BYTENR, 4096)
    }),
    seen("file-extent-in-metadata", BOTH, &[Kind::ExtentType], |d| {
        let (key, _) = find::stored(d, "plant/plain")?;
        let node = d.root(FS)?;
        d.item(FS, key).set_u64(DISK_BYTENR, node.0)
    }),
    seen("file-extent-disk-length", BOTH, &[Kind::ExtentLength], |d| {
        find::stored_item(d, "plant/plain")?.add_u64(DISK_NUM_BYTES, 4096)
    }),
    missed("file-extent-ram-bytes", BOTH, &[Kind::FileExtentRamBytes], |d| {
        find::stored_item(d, "plant/plain")?.add_u64(RAM_BYTES, 4096)
    }),
    seen("file-extent-unaligned", BOTH, &[Kind::FileExtentInvalid], |d| {
        find::stored_item(d, "plant/plain")?.add_u64(NUM_BYTES, -1)
    }),
    missed("file-extent-unknown-compression", BOTH, &[Kind::FileExtentInvalid], |d| {
        find::stored_item(d, "plant/plain")?.set_u8(COMPRESSION, 7)
    }),
    missed("file-extent-compression-without-the-feature", BOTH, &[Kind::SuperFeature], |d| {
        let (key, _) = find::stored(d, "plant/plain")?;
        d.item(FS, key).set_u8(COMPRESSION, 2)?;
        d.edit_super(|s| s.incompat_flags.set(s.incompat_flags.get() & !8))
    }),
    missed("file-extent-encrypted", BOTH, &[Kind::FileExtentInvalid], |d| {
        find::stored_item(d, "plant/plain")?.set_u8(ENCRYPTION, 1)
    }),
    seen("file-extent-unknown-type", BOTH, &[Kind::FileExtentInvalid], |d| {
        find::stored_item(d, "plant/plain")?.set_u8(TYPE, 9)
    }),
    seen("file-extent-written-marked-as-preallocated", BOTH, &[Kind::ChecksumUnexpected], |d| {
        find::stored_item(d, "plant/plain")?.set_u8(TYPE, 2)
    }),
    seen("file-extent-preallocated-marked-as-written", LINUX, &[Kind::ChecksumMissing], |d| {
        find::stored_item(d, "prealloc/untouched")?.set_u8(TYPE, 1)
    }),
    seen("file-extent-preallocated-and-compressed", LINUX, &[Kind::FileExtentCompression], |d| {
        find::stored_item(d, "compressed/zstd/one-extent")?.set_u8(TYPE, 2)
    }),
    missed("file-extent-of-the-next-transaction", BOTH, &[Kind::FileExtentGeneration], |d| {
        let (key, _) = find::stored(d, "plant/plain")?;
        let next = d.superblock().generation().0 + 1;
        d.item(FS, key).set_u64(GENERATION, next)
    }),
    seen("file-extent-of-a-directory", BOTH, &[Kind::FileExtentMisplaced], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let dir = find::ino(d, "plant/empty")?;
        d.insert(FS, Key::new(dir, KeyType::EXTENT_DATA, 0), &record.encode())
    }),
    missed("file-extent-of-a-fifo", BOTH, &[Kind::FileExtentMisplaced], |d| {
        let data = d.get(FS, inline(d, "plant/dir/one")?)?;
        let fifo = find::ino(d, "plant/fifo")?;
        d.insert(FS, Key::new(fifo, KeyType::EXTENT_DATA, 0), &data)
    }),
    seen("file-extent-of-nobody", BOTH, &[Kind::InodeMissing], |d| {
        let data = d.get(FS, inline(d, "plant/inline")?)?;
        let last = d.items(FS)?.pop().expect("items").0.objectid;
        d.insert(FS, Key::new(last.0 + 1000, KeyType::EXTENT_DATA, 0), &data)
    }),
    seen("inline-extent-longer-than-its-item", BOTH, &[Kind::FileExtentInvalid], |d| {
        inline_item(d, "plant/inline")?.set_u64(RAM_BYTES, 900)
    }),
    seen("inline-extent-longer-than-a-sector", LINUX, &[Kind::FileExtentInline], |d| {
        find::where_it_fits(
            d,
            FS,
            |key, data| {
                key.kind == KeyType::EXTENT_DATA
                    && data[COMPRESSION] == 0
                    && data[TYPE] == 0
                    && (100..3000).contains(&data.len())
            },
            |d, key| {
                d.item(FS, key).edit(|data| {
                    data.resize(21 + 5000, 7);
                    data[RAM_BYTES..RAM_BYTES + 8].copy_from_slice(&5000u64.to_le_bytes());
                })
            },
        )
    }),
    missed("inline-extent-not-at-the-start", BOTH, &[Kind::FileExtentInvalid], |d| {
        let key = inline(d, "plant/inline")?;
        d.item(FS, key).rekey(Key { offset: 4096, ..key })
    }),
    seen("symlink-without-target", BOTH, &[Kind::InodeSize], |d| {
        inline_item(d, "plant/symlink")?.delete()
    }),
    missed(
        "file-extent-compressed-without-copy-on-write",
        LINUX,
        &[Kind::FileExtentCompression],
        |d| find::inode_item(d, "compressed/zstd/one-extent")?.set_u64(64, 2),
    ),
    missed("data-packed-wrongly-zlib", LINUX, &[Kind::DataUnpack], |d| {
        repack(d, "compressed/zlib/one-extent", &[0xff; 8])
    }),
    missed("data-packed-wrongly-lzo", LINUX, &[Kind::DataUnpack], |d| {
        repack(d, "compressed/lzo/one-extent", &[0xff; 8])
    }),
    missed("data-packed-wrongly-zstd", LINUX, &[Kind::DataUnpack], |d| {
        repack(d, "compressed/zstd/one-extent", &[0xff; 8])
    }),
    missed("inline-extent-packed-wrongly", LINUX, &[Kind::DataUnpack], |d| {
        let key = inline(d, "compressed/zlib/inline")?;
        d.item(FS, key).set(DISK_BYTENR, &[0xff; 16])
    }),
];
