//! The extent tree: what is allocated, and who is said to use it.

use crate::bases::{BOTH, HOLES, LINUX, MIXED, OLD, PENDING};
use crate::entry::{Entry, Progs};
use crate::find::{self, EXTENTS, FS};
use anyhow::{Context, Result, ensure};
use larder_check::Kind;
use larder_format::items::{BlockGroupFlags, ExtentFlags, ExtentItem, ExtentRef};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId};
use larder_simtest::damage::Damage;

/// A data extent with one reference, as `refs` says.
fn data_extent(d: &Damage) -> ExtentItem {
    ExtentItem {
        refs: 1,
        generation: Generation(d.superblock().generation().0),
        flags: ExtentFlags::DATA,
        block: None,
        inline: vec![(ExtentRef::Data { root: FS, objectid: 300, offset: 0 }, 1)],
    }
}

/// An extent item or node record with an inline reference of this type: its key, and where the reference begins.
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
    Entry {
        name: "extent-missing-data",
        bases: BOTH,
        kinds: &[Kind::ExtentItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).delete()
        },
    },
    Entry {
        name: "extent-missing-node",
        bases: BOTH,
        kinds: &[Kind::ExtentItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).delete()
        },
    },
    Entry {
        name: "extent-missing-node-old",
        bases: OLD,
        kinds: &[Kind::ExtentItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).delete()
        },
    },
    Entry {
        name: "extent-surplus-data",
        bases: BOTH,
        kinds: &[Kind::ExtentUnused],
        progs: Progs::Sees,
        plant: |d| {
            let at = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?;
            let item = data_extent(d).encode();
            d.insert(EXTENTS, Key::new(at, KeyType::EXTENT_ITEM, 8192), &item)
        },
    },
    Entry {
        name: "extent-surplus-node",
        bases: BOTH,
        kinds: &[Kind::ExtentUnused],
        progs: Progs::Sees,
        plant: |d| {
            let at = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
            let item = ExtentItem {
                flags: ExtentFlags::TREE_BLOCK,
                inline: vec![(ExtentRef::TreeBlock { root: FS }, 1)],
                ..data_extent(d)
            };
            d.insert(EXTENTS, Key::new(at, KeyType::METADATA_ITEM, 0), &item.encode())
        },
    },
    Entry {
        name: "extent-outside-of-groups",
        bases: BOTH,
        kinds: &[Kind::ExtentOutsideBlockGroup],
        progs: Progs::Sees,
        plant: |d| {
            let item = data_extent(d).encode();
            d.insert(EXTENTS, Key::new(find::unmapped(d), KeyType::EXTENT_ITEM, 8192), &item)
        },
    },
    Entry {
        name: "extent-across-the-end-of-its-group",
        bases: BOTH,
        kinds: &[Kind::ExtentOutsideBlockGroup],
        progs: Progs::Sees,
        plant: |d| {
            let last = d.chunks().iter().max_by_key(|c| c.start).context("a chunk")?;
            let at = Logical(last.end().0 - 4096);
            let item = data_extent(d).encode();
            d.insert(EXTENTS, Key::new(at, KeyType::EXTENT_ITEM, 8192), &item)
        },
    },
    Entry {
        name: "extent-overlapping-another",
        bases: BOTH,
        kinds: &[Kind::ExtentOverlap],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            let item = data_extent(d).encode();
            d.insert(EXTENTS, Key::new(key.objectid.0 + 4096, KeyType::EXTENT_ITEM, 4096), &item)
        },
    },
    Entry {
        name: "extent-longer-than-its-users-say",
        bases: BOTH,
        kinds: &[Kind::ExtentLength],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).rekey(Key { offset: key.offset - 4096, ..key })
        },
    },
    Entry {
        name: "extent-refs-too-many",
        bases: BOTH,
        kinds: &[Kind::ExtentRefCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).set_u64(0, 2)
        },
    },
    Entry {
        name: "extent-refs-too-many-for-a-node",
        bases: BOTH,
        kinds: &[Kind::ExtentRefCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u64(0, 2)
        },
    },
    Entry {
        name: "extent-refs-fewer-than-inline",
        bases: BOTH,
        kinds: &[Kind::ExtentItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).set_u64(0, 0)
        },
    },
    Entry {
        name: "extent-refs-too-few-with-keyed-ones",
        bases: LINUX,
        kinds: &[Kind::ExtentRefCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/shared")?;
            d.item(EXTENTS, key).add_u64(0, -1)
        },
    },
    Entry {
        name: "extent-without-refs",
        bases: BOTH,
        kinds: &[Kind::ExtentRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).edit(|data| data.truncate(24))
        },
    },
    Entry {
        name: "extent-ref-with-a-wrong-count",
        bases: BOTH,
        kinds: &[Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).edit(|data| {
                data[0] = 3;
                data[49] = 3;
            })
        },
    },
    Entry {
        name: "extent-ref-of-another-tree",
        bases: BOTH,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).set_u64(25, 1000)
        },
    },
    Entry {
        name: "extent-ref-of-another-inode",
        bases: BOTH,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            let other = find::ino(d, "plant/second")?;
            d.item(EXTENTS, key).set_u64(33, other.0)
        },
    },
    Entry {
        name: "extent-ref-of-another-offset",
        bases: BOTH,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).set_u64(41, 4096)
        },
    },
    Entry {
        name: "extent-ref-of-another-tree-to-a-node",
        bases: BOTH,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u64(25, 1000)
        },
    },
    Entry {
        name: "extent-ref-of-another-tree-to-a-node-old",
        bases: OLD,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u64(43, 1000)
        },
    },
    Entry {
        name: "extent-record-of-another-level",
        bases: BOTH,
        kinds: &[Kind::ExtentLevel],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).rekey(Key { offset: 1, ..key })
        },
    },
    Entry {
        name: "extent-record-of-another-level-old",
        bases: OLD,
        kinds: &[Kind::ExtentLevel],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u8(41, 1)
        },
    },
    Entry {
        name: "extent-node-with-full-backrefs",
        bases: BOTH,
        kinds: &[Kind::ExtentRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, d.root(FS)?)?;
            d.item(EXTENTS, key).set_u64(16, 0x102)
        },
    },
    Entry {
        name: "extent-node-without-full-backrefs",
        bases: LINUX,
        kinds: &[Kind::ExtentRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(EXTENTS, |key, data| {
                key.kind == KeyType::METADATA_ITEM && data[16..24] == 0x102u64.to_le_bytes()
            })?;
            d.item(EXTENTS, key).set_u64(16, 2)
        },
    },
    Entry {
        name: "extent-data-flag-on-a-node",
        bases: BOTH,
        kinds: &[Kind::ExtentItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::node_record(d, find::fs_leaf(d)?)?;
            d.item(EXTENTS, key).set_u64(16, 1)
        },
    },
    Entry {
        name: "extent-of-the-future",
        bases: BOTH,
        kinds: &[Kind::ExtentItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).add_u64(8, 1000)
        },
    },
    Entry {
        name: "extent-shared-node-ref-of-another-parent",
        bases: MIXED,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let (key, at) = inline(d, KeyType::SHARED_BLOCK_REF)?;
            d.item(EXTENTS, key).add_u64(at + 1, 4096)
        },
    },
    Entry {
        name: "extent-shared-data-ref-of-another-parent",
        bases: LINUX,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let (key, at) = inline(d, KeyType::SHARED_DATA_REF)?;
            d.item(EXTENTS, key).add_u64(at + 1, 16384)
        },
    },
    Entry {
        name: "extent-snapshot-ref-missing",
        bases: LINUX,
        kinds: &[Kind::ExtentRefMissing],
        progs: Progs::Sees,
        plant: |d| {
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
        },
    },
    Entry {
        name: "extent-keyed-ref-missing",
        bases: LINUX,
        kinds: &[Kind::ExtentRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
            d.item(EXTENTS, key).delete()
        },
    },
    Entry {
        name: "extent-keyed-ref-surplus",
        bases: BOTH,
        kinds: &[Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let at = find::extent(d, "plant/plain")?.objectid.0;
            let reference = ExtentRef::Data { root: FS, objectid: 299, offset: 0 };
            d.insert(EXTENTS, reference.keyed(Logical(at)), &reference.encode_keyed(1))
        },
    },
    Entry {
        name: "extent-keyed-ref-with-a-wrong-count",
        bases: LINUX,
        kinds: &[Kind::ExtentRefCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
            d.item(EXTENTS, key).set_u32(24, 2)
        },
    },
    Entry {
        name: "extent-keyed-ref-of-another-inode",
        bases: LINUX,
        kinds: &[Kind::ExtentRefMissing, Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
            d.item(EXTENTS, key).add_u64(8, 100_000)
        },
    },
    Entry {
        name: "extent-keyed-ref-with-a-wrong-hash",
        bases: LINUX,
        kinds: &[Kind::ExtentItemInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let key = keyed(d, KeyType::EXTENT_DATA_REF)?;
            d.item(EXTENTS, key).rekey(Key { offset: key.offset ^ 0x40_0000, ..key })
        },
    },
    Entry {
        name: "extent-keyed-ref-without-extent",
        bases: BOTH,
        kinds: &[Kind::ExtentRefWithoutItem],
        progs: Progs::Sees,
        plant: |d| {
            let at = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?;
            let reference = ExtentRef::Data { root: FS, objectid: 299, offset: 0 };
            d.insert(EXTENTS, reference.keyed(at), &reference.encode_keyed(1))
        },
    },
    Entry {
        name: "extent-keyed-tree-ref-surplus",
        bases: HOLES,
        kinds: &[Kind::ExtentRefUnused],
        progs: Progs::Sees,
        plant: |d| {
            let at = find::fs_leaf(d)?;
            let reference = ExtentRef::TreeBlock { root: ObjectId(300) };
            d.insert(EXTENTS, reference.keyed(at), &[])
        },
    },
    Entry {
        name: "extent-inline-refs-out-of-order",
        bases: LINUX,
        kinds: &[Kind::ExtentItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/few")?;
            ensure!(d.get(EXTENTS, key)?.len() >= 82, "one inline reference");
            d.item(EXTENTS, key).edit(|data| {
                let (a, b) = (data[24..53].to_vec(), data[53..82].to_vec());
                data[24..53].copy_from_slice(&b);
                data[53..82].copy_from_slice(&a);
            })
        },
    },
    Entry {
        name: "extent-inline-ref-of-an-unknown-type",
        bases: BOTH,
        kinds: &[Kind::ExtentItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::extent(d, "plant/plain")?;
            d.item(EXTENTS, key).set_u8(24, 99)
        },
    },
    Entry {
        name: "extent-of-a-deleted-subvolume-missing",
        bases: PENDING,
        kinds: &[Kind::ExtentItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (tree, _) = crate::roots::deleted_subvolume(d)?;
            let (_, record) = find::stored_in(d, tree, "file")?;
            let key = Key::new(record.disk_bytenr, KeyType::EXTENT_ITEM, record.disk_num_bytes);
            d.item(EXTENTS, key).delete()
        },
    },
    Entry {
        name: "extent-of-data-among-metadata",
        bases: BOTH,
        kinds: &[Kind::ExtentWrongBlockGroup],
        progs: Progs::Sees,
        plant: |d| {
            let at = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
            let item = data_extent(d).encode();
            d.insert(EXTENTS, Key::new(at, KeyType::EXTENT_ITEM, 8192), &item)
        },
    },
    Entry {
        name: "extent-on-a-superblock",
        bases: BOTH,
        kinds: &[Kind::ExtentOnSuperblock],
        progs: Progs::Sees,
        plant: |d| {
            let ranges = d.chunks().iter().flat_map(larder_volume::MappedChunk::superblock_ranges);
            let (at, _) = ranges.into_iter().next().context("a chunk over a superblock")?;
            let item = ExtentItem {
                flags: ExtentFlags::TREE_BLOCK,
                inline: vec![(ExtentRef::TreeBlock { root: FS }, 1)],
                ..data_extent(d)
            };
            d.insert(EXTENTS, Key::new(at, KeyType::METADATA_ITEM, 0), &item.encode())
        },
    },
];
