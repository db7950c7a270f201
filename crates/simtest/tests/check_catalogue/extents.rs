//! The extent tree: what is allocated, and the references to it.

use crate::entry::{BOTH, Entry, HOLES, LINUX, MIXED, OLD, PENDING, missed, seen};
use crate::find::{self, EXTENTS, FS};
use anyhow::{Context, Result, ensure};
use larder_check::Kind;
use larder_format::items::{BlockGroupFlags, ExtentFlags, ExtentItem, ExtentRef};
use larder_format::{FileOffset, Generation, Key, KeyType, Logical, ObjectId};
use larder_simtest::damage::Damage;

/// A data extent with one reference, as `refs` says.
fn data_extent(d: &Damage) -> ExtentItem {
    ExtentItem {
        refs: 1,
        generation: Generation(d.superblock().generation().0),
        flags: ExtentFlags::DATA,
        block: None,
        inline: vec![(ExtentRef::data(FS, ObjectId(300), FileOffset(0), 0), 1)],
    }
}

/// An extent item or node record with an inline reference of this type: its key, and where the
/// reference begins.
fn inline(d: &Damage, wanted: KeyType) -> Result<(Key, usize)> {
    for (key, data) in d.items(EXTENTS)? {
        if matches!(key.kind, KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM) {
            let item = ExtentItem::parse(key.kind, &data)?;
            let mut at = if item.block.is_some() { 42 } else { 24 };
            for (reference, _) in &item.inline {
                if reference.kind() == wanted {
                    return Ok((key, at));
                }
                at += reference.inline_len();
            }
        }
    }
    anyhow::bail!("no inline reference of type {wanted}")
}

/// An item of the extent tree with a reference of this type.
fn keyed(d: &Damage, kind: KeyType) -> Result<Key> {
    Ok(d.first(EXTENTS, |key, _| key.kind == kind)?.0)
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("extent-missing-data", BOTH, &[Kind::ExtentItemMissing], |d| {
        find::extent_item(d, "plant/plain")?.delete()
    }),
    seen("extent-missing-node", BOTH, &[Kind::ExtentItemMissing], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).delete()
    }),
    seen("extent-missing-node-old", OLD, &[Kind::ExtentItemMissing], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).delete()
    }),
    seen("extent-surplus-data", BOTH, &[Kind::ExtentUnused], |d| {
        let at = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?;
        let item = data_extent(d).encode();
        d.insert(EXTENTS, Key::new(at, KeyType::EXTENT_ITEM, 8192), &item)
    }),
    seen("extent-surplus-node", BOTH, &[Kind::ExtentUnused], |d| {
        let at = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
        let item = ExtentItem {
            flags: ExtentFlags::TREE_BLOCK,
            inline: vec![(ExtentRef::TreeBlock { root: FS }, 1)],
            ..data_extent(d)
        };
        d.insert(EXTENTS, Key::new(at, KeyType::METADATA_ITEM, 0), &item.encode())
    }),
    seen("extent-outside-of-groups", BOTH, &[Kind::ExtentOutsideBlockGroup], |d| {
        let item = data_extent(d).encode();
        d.insert(EXTENTS, Key::new(find::unmapped(d), KeyType::EXTENT_ITEM, 8192), &item)
    }),
    seen("extent-across-the-end-of-its-group", BOTH, &[Kind::ExtentOutsideBlockGroup], |d| {
        let last = d.chunks().iter().max_by_key(|c| c.start).context("a chunk")?;
        let at = Logical(last.end().0 - 4096);
        let item = data_extent(d).encode();
        d.insert(EXTENTS, Key::new(at, KeyType::EXTENT_ITEM, 8192), &item)
    }),
    seen("extent-overlapping-another", BOTH, &[Kind::ExtentOverlap], |d| {
        let key = find::extent(d, "plant/plain")?;
        let item = data_extent(d).encode();
        d.insert(EXTENTS, Key::new(key.objectid.0 + 4096, KeyType::EXTENT_ITEM, 4096), &item)
    }),
    seen("extent-longer-than-its-users-say", BOTH, &[Kind::ExtentLength], |d| {
        let key = find::extent(d, "plant/plain")?;
        d.item(EXTENTS, key).rekey(Key { offset: key.offset - 4096, ..key })
    }),
    seen("extent-refs-too-many", BOTH, &[Kind::ExtentRefCount], |d| {
        find::extent_item(d, "plant/plain")?.set_u64(0, 2)
    }),
    seen("extent-refs-too-many-for-a-node", BOTH, &[Kind::ExtentRefCount], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).set_u64(0, 2)
    }),
    missed("extent-of-a-node-of-another-transaction", BOTH, &[Kind::ExtentGeneration], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).add_u64(8, -1)
    }),
    seen("extent-refs-fewer-than-inline", BOTH, &[Kind::ExtentItemInvalid], |d| {
        find::extent_item(d, "plant/plain")?.set_u64(0, 0)
    }),
    seen("extent-refs-too-few-with-keyed-ones", LINUX, &[Kind::ExtentRefCount], |d| {
        find::extent_item(d, "plant/shared")?.add_u64(0, -1)
    }),
    seen("extent-without-refs", BOTH, &[Kind::ExtentRefMissing], |d| {
        find::extent_item(d, "plant/plain")?.edit(|data| data.truncate(24))
    }),
    seen("extent-ref-with-a-wrong-count", BOTH, &[Kind::ExtentRefUnused], |d| {
        let key = find::extent(d, "plant/plain")?;
        d.item(EXTENTS, key).edit(|data| {
            data[0] = 3;
            data[49] = 3;
        })
    }),
    seen(
        "extent-ref-of-another-tree",
        BOTH,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| find::extent_item(d, "plant/plain")?.set_u64(25, 1000),
    ),
    seen(
        "extent-ref-of-another-inode",
        BOTH,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| {
            let key = find::extent(d, "plant/plain")?;
            let other = find::ino(d, "plant/second")?;
            d.item(EXTENTS, key).set_u64(33, other.0)
        },
    ),
    seen(
        "extent-ref-of-another-offset",
        BOTH,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| find::extent_item(d, "plant/plain")?.set_u64(41, 4096),
    ),
    seen(
        "extent-ref-of-another-tree-to-a-node",
        BOTH,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u64(25, 1000)
        },
    ),
    seen(
        "extent-ref-of-another-tree-to-a-node-old",
        OLD,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u64(43, 1000)
        },
    ),
    seen("extent-record-of-another-level", BOTH, &[Kind::ExtentLevel], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).rekey(Key { offset: 1, ..key })
    }),
    seen("extent-record-of-another-level-old", OLD, &[Kind::ExtentLevel], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).set_u8(41, 1)
    }),
    seen("extent-node-with-full-backrefs", BOTH, &[Kind::ExtentRefMissing], |d| {
        let key = find::node_record(d, d.root(FS)?)?;
        d.item(EXTENTS, key).set_u64(16, 0x102)
    }),
    seen("extent-node-without-full-backrefs", LINUX, &[Kind::ExtentRefMissing], |d| {
        let (key, _) = d.first(EXTENTS, |key, data| {
            key.kind == KeyType::METADATA_ITEM && data[16..24] == 0x102u64.to_le_bytes()
        })?;
        d.item(EXTENTS, key).set_u64(16, 2)
    }),
    seen("extent-data-flag-on-a-node", BOTH, &[Kind::ExtentItemInvalid], |d| {
        let key = find::node_record(d, find::fs_leaf(d)?)?;
        d.item(EXTENTS, key).set_u64(16, 1)
    }),
    seen("extent-of-the-future", BOTH, &[Kind::ExtentItemInvalid], |d| {
        find::extent_item(d, "plant/plain")?.add_u64(8, 1000)
    }),
    seen(
        "extent-shared-node-ref-of-another-parent",
        MIXED,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| {
            let (key, at) = inline(d, KeyType::SHARED_BLOCK_REF)?;
            d.item(EXTENTS, key).add_u64(at + 1, 4096)
        },
    ),
    seen(
        "extent-shared-data-ref-of-another-parent",
        LINUX,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| {
            let (key, at) = inline(d, KeyType::SHARED_DATA_REF)?;
            d.item(EXTENTS, key).add_u64(at + 1, 16384)
        },
    ),
    seen("extent-snapshot-ref-missing", LINUX, &[Kind::ExtentRefMissing], |d| {
        let (key, data) = d.first(EXTENTS, |key, data| {
            let item = ExtentItem::parse(key.kind, data);
            key.kind == KeyType::METADATA_ITEM
                && item.is_ok_and(|i| {
                    i.inline.len() > 1
                        && i.inline.iter().all(|(r, _)| r.kind() == KeyType::TREE_BLOCK_REF)
                })
        })?;
        let mut item = ExtentItem::parse(key.kind, &data)?;
        item.inline.pop();
        d.item(EXTENTS, key).edit(|data| *data = item.encode())
    }),
    seen("extent-keyed-ref-missing", LINUX, &[Kind::ExtentRefMissing], |d| {
        let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
        d.item(EXTENTS, key).delete()
    }),
    seen("extent-keyed-ref-surplus", BOTH, &[Kind::ExtentRefUnused], |d| {
        let at = find::extent(d, "plant/plain")?.objectid.0;
        let reference = ExtentRef::data(FS, ObjectId(299), FileOffset(0), 0);
        d.insert(EXTENTS, reference.keyed(Logical(at)), &reference.encode_keyed(1))
    }),
    seen("extent-keyed-ref-with-a-wrong-count", LINUX, &[Kind::ExtentRefCount], |d| {
        let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
        d.item(EXTENTS, key).set_u32(24, 2)
    }),
    seen(
        "extent-keyed-ref-of-another-inode",
        LINUX,
        &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        |d| {
            let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
            d.item(EXTENTS, key).add_u64(8, 100_000)
        },
    ),
    missed("extent-keyed-ref-with-a-wrong-hash", LINUX, &[Kind::ExtentItemInvalid], |d| {
        let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
        d.item(EXTENTS, key).rekey(Key { offset: key.offset ^ 0x40_0000, ..key })
    }),
    seen("extent-keyed-ref-without-extent", BOTH, &[Kind::ExtentRefWithoutItem], |d| {
        let at = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?;
        let reference = ExtentRef::data(FS, ObjectId(299), FileOffset(0), 0);
        d.insert(EXTENTS, reference.keyed(at), &reference.encode_keyed(1))
    }),
    seen("extent-keyed-tree-ref-surplus", HOLES, &[Kind::ExtentRefUnused], |d| {
        let at = find::fs_leaf(d)?;
        let reference = ExtentRef::TreeBlock { root: ObjectId(300) };
        d.insert(EXTENTS, reference.keyed(at), &[])
    }),
    seen("extent-inline-refs-out-of-order", LINUX, &[Kind::ExtentItemInvalid], |d| {
        let key = find::extent(d, "plant/few")?;
        ensure!(d.get(EXTENTS, key)?.len() >= 82, "one inline reference");
        d.item(EXTENTS, key).edit(|data| {
            let (a, b) = (data[24..53].to_vec(), data[53..82].to_vec());
            data[24..53].copy_from_slice(&b);
            data[53..82].copy_from_slice(&a);
        })
    }),
    seen("extent-inline-ref-of-an-unknown-type", BOTH, &[Kind::ExtentItemInvalid], |d| {
        find::extent_item(d, "plant/plain")?.set_u8(24, 99)
    }),
    seen("extent-of-a-deleted-subvolume-missing", PENDING, &[Kind::ExtentItemMissing], |d| {
        let (tree, _) = crate::roots::deleted_subvolume(d)?;
        let (_, record) = find::stored_in(d, tree, "file")?;
        let key = Key::new(record.disk_bytenr, KeyType::EXTENT_ITEM, record.disk_num_bytes);
        d.item(EXTENTS, key).delete()
    }),
    seen("extent-of-data-among-metadata", BOTH, &[Kind::ExtentWrongBlockGroup], |d| {
        let at = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
        let item = data_extent(d).encode();
        d.insert(EXTENTS, Key::new(at, KeyType::EXTENT_ITEM, 8192), &item)
    }),
    seen("extent-on-a-superblock", BOTH, &[Kind::ExtentOnSuperblock], |d| {
        let ranges = d.chunks().iter().flat_map(larder_volume::MappedChunk::superblock_ranges);
        let (at, _) = ranges.into_iter().next().context("a chunk over a superblock")?;
        let item = ExtentItem {
            flags: ExtentFlags::TREE_BLOCK,
            inline: vec![(ExtentRef::TreeBlock { root: FS }, 1)],
            ..data_extent(d)
        };
        d.insert(EXTENTS, Key::new(at, KeyType::METADATA_ITEM, 0), &item.encode())
    }),
];
