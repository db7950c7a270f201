//! The tree of trees: root items, and where subvolumes hang.

use crate::bases::{BOTH, LINUX, PENDING};
use crate::entry::{Entry, Progs};
use crate::find::{self, CSUMS, FS, ROOTS, UUIDS};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::items::dir::DirEntries;
use larder_format::items::keys::{dir_item_key, orphan_key, root_backref_key, root_ref_key, uuid_key};
use larder_format::items::root::RootRef;
use larder_format::{Key, KeyType, ObjectId, TreeId};
use larder_simtest::damage::Damage;

const GENERATION: usize = 160;
const DIRID: usize = 168;
const BYTENR: usize = 176;
const LAST_SNAPSHOT: usize = 200;
const FLAGS: usize = 208;
const REFS: usize = 216;
const LEVEL: usize = 238;
const GENERATION_V2: usize = 239;

/// The subvolume at `volumes/NAME`.
fn subvolume(d: &Damage, name: &str) -> Result<TreeId> {
    let (key, _) = d
        .first(ROOTS, |key, data| {
            key.kind == KeyType::ROOT_BACKREF && RootRef::parse(data).is_ok_and(|r| r.name == name.as_bytes())
        })
        .context(name.to_owned())?;
    Ok(key.objectid)
}

/// The subvolume that is deleted and not yet dropped, and the key of its mark.
pub(crate) fn deleted_subvolume(d: &Damage) -> Result<(TreeId, Key)> {
    let (key, _) = d.first(ROOTS, |key, _| key.kind == KeyType::ORPHAN_ITEM)?;
    Ok((ObjectId(key.offset), key))
}

/// Keys of ROOT_ITEM, ROOT_REF and ROOT_BACKREF of a subvolume that hangs in the top-level one.
fn keys(d: &Damage, tree: TreeId) -> Result<(Key, Key, Key)> {
    Ok((d.root_item(tree)?.0, root_ref_key(FS, tree), root_backref_key(tree, FS)))
}

pub(crate) const ENTRIES: &[Entry] = &[
    Entry {
        name: "root-item-at-another-tree",
        bases: BOTH,
        kinds: &[Kind::NodeOwner],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(UUIDS)?;
            let other = d.root(find::DEVICES)?;
            d.item(ROOTS, key).set_u64(BYTENR, other.0)
        },
    },
    Entry {
        name: "root-item-outside-of-chunks",
        bases: BOTH,
        kinds: &[Kind::NodeUnmapped],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            let nowhere = find::unmapped(d);
            d.item(ROOTS, key).set_u64(BYTENR, nowhere.0)
        },
    },
    Entry {
        name: "root-item-unaligned",
        bases: BOTH,
        kinds: &[Kind::RootItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).add_u64(BYTENR, 1)
        },
    },
    Entry {
        name: "root-item-level",
        bases: BOTH,
        kinds: &[Kind::NodeLevel],
        progs: Progs::Sees,
        plant: |d| {
            let (key, root) = d.root_item(FS)?;
            d.item(ROOTS, key).set_u8(LEVEL, root.level + 1)
        },
    },
    Entry {
        name: "root-item-generation",
        bases: BOTH,
        kinds: &[Kind::NodeGeneration],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).add_u64(GENERATION, -1)
        },
    },
    Entry {
        name: "root-item-second-generation",
        bases: BOTH,
        kinds: &[Kind::UuidStale],
        progs: Progs::Misses,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).add_u64(GENERATION_V2, -1)
        },
    },
    Entry {
        name: "root-item-unknown-flag",
        bases: BOTH,
        kinds: &[Kind::RootItemInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).set_u64(FLAGS, 2)
        },
    },
    Entry {
        name: "root-item-last-snapshot-of-the-future",
        bases: BOTH,
        kinds: &[Kind::RootItemInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).add_u64(LAST_SNAPSHOT, 1000)
        },
    },
    Entry {
        name: "root-item-of-an-odd-size",
        bases: BOTH,
        kinds: &[Kind::RootItemInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).edit(|data| data.truncate(400))
        },
    },
    Entry {
        name: "root-item-top-directory",
        bases: BOTH,
        kinds: &[Kind::RootItemWrong],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).set_u64(DIRID, 300)
        },
    },
    Entry {
        name: "root-item-last-snapshot-too-early",
        bases: LINUX,
        kinds: &[Kind::RootItemWrong],
        progs: Progs::Misses,
        plant: |d| {
            let (key, ..) = keys(d, subvolume(d, "frozen")?)?;
            d.item(ROOTS, key).set_u64(LAST_SNAPSHOT, 0)
        },
    },
    Entry {
        name: "tree-missing-checksums",
        bases: BOTH,
        kinds: &[Kind::TreeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(CSUMS)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "tree-missing-extents",
        bases: BOTH,
        kinds: &[Kind::TreeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(ObjectId::EXTENT_TREE)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "tree-missing-data-relocation",
        bases: BOTH,
        kinds: &[Kind::TreeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(ObjectId::DATA_RELOC_TREE)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "tree-missing-free-space",
        bases: BOTH,
        kinds: &[Kind::TreeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(find::FREE)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "tree-missing-top-subvolume",
        bases: BOTH,
        kinds: &[Kind::TreeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.root_item(FS)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "subvolume-missing",
        bases: LINUX,
        kinds: &[Kind::RootRefWithoutRoot],
        progs: Progs::Sees,
        plant: |d| {
            let (key, ..) = keys(d, subvolume(d, "copy-of-copy")?)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "subvolume-without-root-ref",
        bases: LINUX,
        kinds: &[Kind::RootRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "subvolume-without-root-backref",
        bases: LINUX,
        kinds: &[Kind::RootBackrefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (_, _, key) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "subvolume-ref-of-another-directory",
        bases: LINUX,
        kinds: &[Kind::RootRefDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).add_u64(0, 1)
        },
    },
    Entry {
        name: "subvolume-ref-with-another-index",
        bases: LINUX,
        kinds: &[Kind::RootRefDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).add_u64(8, 100)
        },
    },
    Entry {
        name: "subvolume-backref-with-another-name",
        bases: LINUX,
        kinds: &[Kind::RootRefDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (_, _, key) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).set(18, b"ypoc")
        },
    },
    Entry {
        name: "subvolume-ref-longer-than-its-item",
        bases: LINUX,
        kinds: &[Kind::RootItemInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).set_u16(16, 100)
        },
    },
    Entry {
        name: "subvolume-without-dir-item",
        bases: LINUX,
        kinds: &[Kind::DirItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let dir = find::ino(d, "volumes")?;
            d.item(FS, dir_item_key(dir, b"copy")).delete()
        },
    },
    Entry {
        name: "subvolume-entry-of-no-subvolume",
        bases: LINUX,
        kinds: &[Kind::EntryWithoutSubvolume],
        progs: Progs::Sees,
        plant: |d| {
            let dir = find::ino(d, "volumes")?;
            let (key, _) = d.first(FS, |key, data| {
                key.objectid == dir
                    && key.kind == KeyType::DIR_INDEX
                    && DirEntries::new(data).next().is_some_and(|e| e.is_ok_and(|e| e.name == b"copy"))
            })?;
            d.item(FS, key).set_u64(0, 4000)
        },
    },
    Entry {
        name: "subvolume-dead-without-orphan",
        bases: LINUX,
        kinds: &[Kind::DroppedRootWithoutOrphan],
        progs: Progs::Sees,
        plant: |d| {
            let (key, ..) = keys(d, subvolume(d, "copy")?)?;
            d.item(ROOTS, key).set_u32(REFS, 0)
        },
    },
    Entry {
        name: "subvolume-being-dropped-without-orphan",
        bases: PENDING,
        kinds: &[Kind::DroppedRootWithoutOrphan],
        progs: Progs::Misses,
        plant: |d| {
            let (_, key) = deleted_subvolume(d)?;
            d.item(ROOTS, key).delete()
        },
    },
    Entry {
        name: "subvolume-being-dropped-alive-again",
        bases: PENDING,
        kinds: &[Kind::SubvolumeUnreachable],
        progs: Progs::Misses,
        plant: |d| {
            let (tree, _) = deleted_subvolume(d)?;
            let (key, _) = d.root_item(tree)?;
            d.item(ROOTS, key).set_u32(REFS, 1)
        },
    },
    Entry {
        name: "subvolume-orphan-for-nobody",
        bases: BOTH,
        kinds: &[Kind::OrphanRootStale],
        progs: Progs::Misses,
        plant: |d| d.insert(ROOTS, orphan_key(ObjectId(4000)), &[]),
    },
    Entry {
        name: "uuid-missing",
        bases: BOTH,
        kinds: &[Kind::UuidMissing],
        progs: Progs::Misses,
        plant: |d| {
            let (_, root) = d.root_item(FS)?;
            d.item(UUIDS, uuid_key(&root.uuid, KeyType::UUID_SUBVOL)).delete()
        },
    },
    Entry {
        name: "uuid-of-another-subvolume",
        bases: BOTH,
        kinds: &[Kind::UuidMissing, Kind::UuidStale],
        progs: Progs::Misses,
        plant: |d| {
            let (_, root) = d.root_item(FS)?;
            d.item(UUIDS, uuid_key(&root.uuid, KeyType::UUID_SUBVOL)).set_u64(0, 4000)
        },
    },
    Entry {
        name: "uuid-of-nobody",
        bases: BOTH,
        kinds: &[Kind::UuidStale],
        progs: Progs::Misses,
        plant: |d| d.insert(UUIDS, uuid_key(&[7; 16], KeyType::UUID_SUBVOL), &4000u64.to_le_bytes()),
    },
    Entry {
        name: "uuid-item-of-an-odd-size",
        bases: BOTH,
        kinds: &[Kind::UuidItemInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let (_, root) = d.root_item(FS)?;
            d.item(UUIDS, uuid_key(&root.uuid, KeyType::UUID_SUBVOL)).edit(|data| data.push(0))
        },
    },
    Entry {
        name: "default-subvolume-missing",
        bases: BOTH,
        kinds: &[Kind::DefaultSubvolume],
        progs: Progs::Misses,
        plant: |d| d.item(ROOTS, dir_item_key(ObjectId(6), b"default")).set_u64(0, 4000),
    },
    Entry {
        name: "subvolume-without-entry",
        bases: LINUX,
        kinds: &[Kind::RootRefWithoutEntry],
        progs: Progs::Sees,
        plant: |d| {
            let dir = find::ino(d, "volumes")?;
            let (index, _) = d.first(FS, |key, data| {
                key.objectid == dir
                    && key.kind == KeyType::DIR_INDEX
                    && DirEntries::new(data).next().is_some_and(|e| e.is_ok_and(|e| e.name == b"copy"))
            })?;
            d.item(FS, index).delete()?;
            d.item(FS, dir_item_key(dir, b"copy")).delete()
        },
    },
    Entry {
        name: "balance-interrupted",
        bases: BOTH,
        kinds: &[Kind::RelocationInterrupted],
        progs: Progs::Misses,
        plant: |d| d.insert(ROOTS, Key::new(ObjectId::BALANCE, KeyType::TEMPORARY_ITEM, 0), &[0; 448]),
    },
];
