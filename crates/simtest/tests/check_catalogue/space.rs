//! The free-space tree, and checksums of data.

use crate::entry::{BOTH, Entry, HOLES, LINUX, MIXED, missed, seen, seen_with_data};
use crate::find::{self, CSUMS, FREE, FS, SECTOR};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::items::{BlockGroupFlags, FileExtent};
use larder_format::{Key, KeyType, Logical, ObjectId};
use larder_simtest::damage::{Copies, Damage};

/// A run of free space in a group without bitmaps.
fn free_extent(d: &Damage) -> Result<Key> {
    let at = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
    Ok(d.first(FREE, |key, _| key.objectid.0 == at.0 && key.kind == KeyType::FREE_SPACE_EXTENT)?.0)
}

/// The FREE_SPACE_INFO of the group that a run lies in.
fn info_of(d: &Damage, run: Key) -> Result<Key> {
    let items = d.items(FREE)?;
    let info = items.iter().rfind(|(key, _)| key.kind == KeyType::FREE_SPACE_INFO && *key < run);
    Ok(info.context("a free-space info")?.0)
}

/// A bitmap that has both free and used sectors.
fn bitmap(d: &Damage) -> Result<(Key, Vec<u8>)> {
    d.first(FREE, |key, data| {
        key.kind == KeyType::FREE_SPACE_BITMAP && data.contains(&0) && data.iter().any(|b| *b != 0)
    })
}

/// Address of a preallocated extent that nobody has written to.
fn preallocated(d: &Damage) -> Result<Logical> {
    let ino = find::ino(d, "prealloc/untouched")?;
    let (_, data) =
        d.first(FS, |key, _| key.objectid == ino && key.kind == KeyType::EXTENT_DATA)?;
    match FileExtent::parse(&data)? {
        FileExtent::Stored(record) => Ok(record.disk_bytenr),
        FileExtent::Inline(_) => anyhow::bail!("inline"),
    }
}

fn csum_key(at: Logical) -> Key {
    Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at.0)
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("free-space-below-the-groups-without-its-info", LINUX, &[Kind::FreeSpaceOverlap], |d| {
        let (key, _) = d.first(FREE, |_, _| true)?;
        d.item(FREE, key).delete()
    }),
    seen("free-space-run-missing", BOTH, &[Kind::FreeSpaceMissing], |d| {
        let run = free_extent(d)?;
        d.item(FREE, run).delete()
    }),
    seen("free-space-run-too-short", BOTH, &[Kind::FreeSpaceMissing], |d| {
        let run = free_extent(d)?;
        d.item(FREE, run).rekey(Key { offset: run.offset - 16384, ..run })
    }),
    seen("free-space-run-that-is-used", BOTH, &[Kind::FreeSpaceAllocated], |d| {
        let node = d.root(FS)?;
        d.insert(FREE, Key::new(node, KeyType::FREE_SPACE_EXTENT, 16384), &[])
    }),
    seen("free-space-run-that-begins-too-early", BOTH, &[Kind::FreeSpaceAllocated], |d| {
        let run = free_extent(d)?;
        let to =
            Key { objectid: ObjectId(run.objectid.0 - 16384), offset: run.offset + 16384, ..run };
        d.item(FREE, run).rekey(to)
    }),
    seen("free-space-run-beyond-its-group", BOTH, &[Kind::FreeSpaceOverlap], |d| {
        let nowhere = find::unmapped(d);
        d.insert(FREE, Key::new(nowhere, KeyType::FREE_SPACE_EXTENT, 16384), &[])
    }),
    seen("free-space-count", BOTH, &[Kind::FreeSpaceCount], |d| {
        let info = info_of(d, free_extent(d)?)?;
        d.item(FREE, info).edit(|data| data[0] ^= 4)
    }),
    seen("free-space-claims-bitmaps", BOTH, &[Kind::FreeSpaceForm], |d| {
        let info = info_of(d, free_extent(d)?)?;
        d.item(FREE, info).set_u32(4, 1)
    }),
    seen("free-space-denies-bitmaps", LINUX, &[Kind::FreeSpaceForm], |d| {
        let info = info_of(d, bitmap(d)?.0)?;
        d.item(FREE, info).set_u32(4, 0)
    }),
    missed("free-space-unknown-flag", BOTH, &[Kind::FreeSpaceItemInvalid], |d| {
        let info = info_of(d, free_extent(d)?)?;
        d.item(FREE, info).set_u32(4, 4)
    }),
    seen("free-space-info-missing", BOTH, &[Kind::FreeSpaceInfoMissing], |d| {
        let info = info_of(d, free_extent(d)?)?;
        d.item(FREE, info).delete()
    }),
    seen("free-space-info-of-another-length", BOTH, &[Kind::FreeSpaceInfoMissing], |d| {
        let info = info_of(d, free_extent(d)?)?;
        d.item(FREE, info).rekey(Key { offset: info.offset + 65536, ..info })
    }),
    seen("free-space-bit-of-used-space-set", LINUX, &[Kind::FreeSpaceAllocated], |d| {
        let (key, data) = bitmap(d)?;
        let at = data.iter().position(|b| *b == 0).context("a used byte")?;
        d.item(FREE, key).set_u8(at, 1)
    }),
    seen("free-space-bit-of-free-space-cleared", LINUX, &[Kind::FreeSpaceMissing], |d| {
        let (key, data) = bitmap(d)?;
        let at = data.iter().position(|b| *b != 0).context("a free byte")?;
        d.item(FREE, key).set_u8(at, 0)
    }),
    seen("free-space-bitmap-missing", LINUX, &[Kind::FreeSpaceMissing], |d| {
        let (key, _) = bitmap(d)?;
        d.item(FREE, key).delete()
    }),
    seen("free-space-run-split", BOTH, &[Kind::FreeSpaceForm], |d| {
        let run = free_extent(d)?;
        d.item(FREE, run).rekey(Key { offset: 16384, ..run })?;
        let rest = Key::new(run.objectid.0 + 16384, run.kind, run.offset - 16384);
        d.insert(FREE, rest, &[])?;
        let info = info_of(d, run)?;
        let count = u32::from_le_bytes(d.get(FREE, info)?[..4].try_into()?);
        d.item(FREE, info).set_u32(0, count + 1)
    }),
    seen("csum-missing", BOTH, &[Kind::ChecksumMissing], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::csum_of(d, record.disk_bytenr)?;
        d.item(CSUMS, key).delete()
    }),
    seen("csum-missing-for-the-last-sector", BOTH, &[Kind::ChecksumMissing], |d| {
        let (key, _) = d.items(CSUMS)?.pop().context("checksums")?;
        d.item(CSUMS, key).edit(|data| data.truncate(data.len() - 4))
    }),
    seen_with_data("csum-for-free-space", BOTH, &[Kind::ChecksumWithoutExtent], |d| {
        let at = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?;
        d.insert(CSUMS, csum_key(at.plus(512 << 10)), &[1; 16])
    }),
    seen("csum-for-preallocated-space", LINUX, &[Kind::ChecksumUnexpected], |d| {
        let at = preallocated(d)?;
        d.insert(CSUMS, csum_key(at), &[1; 16])
    }),
    seen_with_data("csum-outside-of-chunks", BOTH, &[Kind::ChecksumWithoutExtent], |d| {
        let nowhere = find::unmapped(d);
        d.insert(CSUMS, csum_key(nowhere), &[1; 16])
    }),
    seen("csum-items-overlap", BOTH, &[Kind::ChecksumOverlap], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::csum_of(d, record.disk_bytenr)?;
        let data = d.get(CSUMS, key)?;
        d.insert(CSUMS, Key { offset: key.offset + SECTOR, ..key }, &data[4..8])
    }),
    missed("csum-item-of-an-odd-size", BOTH, &[Kind::ChecksumItemInvalid], |d| {
        let (key, _) = d.items(CSUMS)?.pop().context("checksums")?;
        d.item(CSUMS, key).edit(|data| data.push(0))
    }),
    seen_with_data("csum-changed", BOTH, &[Kind::DataChecksum], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        let key = find::csum_of(d, record.disk_bytenr)?;
        let at = 4 * find::csum_index(key, record.disk_bytenr);
        d.item(CSUMS, key).edit(|data| data[at] ^= 1)
    }),
    seen_with_data("data-changed", BOTH, &[Kind::DataChecksum], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        d.edit_data(record.disk_bytenr.plus(8 * SECTOR), Copies::All, |b| b[77] ^= 1)
    }),
    seen_with_data("data-changed-in-a-compressed-extent", LINUX, &[Kind::DataChecksum], |d| {
        let (_, record) = find::stored(d, "compressed/zstd/one-extent")?;
        d.edit_data(record.disk_bytenr, Copies::All, |b| b[77] ^= 1)
    }),
    seen_with_data("data-first-copy-changed", MIXED, &[Kind::DataChecksum], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        d.edit_data(record.disk_bytenr, Copies::Only(0), |b| b[77] ^= 1)
    }),
    seen_with_data("data-second-copy-changed", MIXED, &[Kind::DataChecksum], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        d.edit_data(record.disk_bytenr, Copies::Only(1), |b| b[77] ^= 1)
    }),
    seen("free-space-runs-overlap", BOTH, &[Kind::FreeSpaceOverlap], |d| {
        let run = free_extent(d)?;
        d.insert(
            FREE,
            Key { objectid: ObjectId(run.objectid.0 + 16384), offset: 16384, ..run },
            &[],
        )
    }),
    missed("free-space-not-valid", HOLES, &[Kind::FreeSpaceNotValid], |d| {
        d.edit_super(|s| s.compat_ro_flags.set(s.compat_ro_flags.get() & !2))
    }),
    seen("free-space-of-no-group", BOTH, &[Kind::FreeSpaceOverlap], |d| {
        let nowhere = find::unmapped(d);
        d.insert(FREE, Key::new(nowhere, KeyType::FREE_SPACE_INFO, 1 << 20), &[0; 8])
    }),
    missed("free-space-left-by-mkfs", BOTH, &[Kind::FreeSpaceWithoutBlockGroup], |d| {
        d.insert(FREE, Key::new(512 << 10, KeyType::FREE_SPACE_INFO, 65536), &[0; 8])
    }),
];
