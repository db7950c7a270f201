//! The tree of trees: root items, and where subvolumes hang.

use crate::entry::{BOTH, Entry, LINUX, PENDING, missed, seen};
use crate::find::{self, CSUMS, FS, ROOTS, UUIDS};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::items::dir::DirEntries;
use larder_format::items::keys::{
    dir_item_key, inode_key, orphan_key, root_backref_key, root_ref_key, uuid_key,
};
use larder_format::items::root::RootRef;
use larder_format::{Key, KeyType, ObjectId, TreeId};
use larder_simtest::damage::{Damage, ItemEdit};

const GENERATION: usize = 160;
const DIRID: usize = 168;
const BYTENR: usize = 176;
const LAST_SNAPSHOT: usize = 200;
const FLAGS: usize = 208;
const REFS: usize = 216;
const DROP_PROGRESS: usize = 220;
const LEVEL: usize = 238;
const GENERATION_V2: usize = 239;

/// The root item of a tree, to be changed.
fn root(d: &mut Damage, tree: TreeId) -> Result<ItemEdit<'_>> {
    let (key, _) = d.root_item(tree)?;
    Ok(d.item(ROOTS, key))
}

/// The subvolume at `volumes/NAME`.
fn subvolume(d: &Damage, name: &str) -> Result<TreeId> {
    let (key, _) = d
        .first(ROOTS, |key, data| {
            key.kind == KeyType::ROOT_BACKREF
                && RootRef::parse(data).is_ok_and(|r| r.name == name.as_bytes())
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
    seen("root-item-at-another-tree", BOTH, &[Kind::NodeOwner], |d| {
        let (key, _) = d.root_item(UUIDS)?;
        let other = d.root(find::DEVICES)?;
        d.item(ROOTS, key).set_u64(BYTENR, other.0)
    }),
    seen("root-item-outside-of-chunks", BOTH, &[Kind::NodeUnmapped], |d| {
        let (key, _) = d.root_item(FS)?;
        let nowhere = find::unmapped(d);
        d.item(ROOTS, key).set_u64(BYTENR, nowhere.0)
    }),
    seen("root-item-unaligned", BOTH, &[Kind::RootItemInvalid], |d| {
        root(d, FS)?.add_u64(BYTENR, 1)
    }),
    seen("root-item-level", BOTH, &[Kind::NodeLevel], |d| {
        let (key, root) = d.root_item(FS)?;
        d.item(ROOTS, key).set_u8(LEVEL, root.level + 1)
    }),
    seen("root-item-generation", BOTH, &[Kind::NodeGeneration], |d| {
        root(d, FS)?.add_u64(GENERATION, -1)
    }),
    missed("root-item-second-generation", BOTH, &[Kind::UuidStale], |d| {
        root(d, FS)?.add_u64(GENERATION_V2, -1)
    }),
    missed("root-item-unknown-flag", BOTH, &[Kind::RootItemInvalid], |d| {
        root(d, FS)?.set_u64(FLAGS, 2)
    }),
    missed("root-item-last-snapshot-of-the-future", BOTH, &[Kind::RootItemInvalid], |d| {
        root(d, FS)?.add_u64(LAST_SNAPSHOT, 1000)
    }),
    missed("root-item-of-an-odd-size", BOTH, &[Kind::RootItemInvalid], |d| {
        root(d, FS)?.edit(|data| data.truncate(400))
    }),
    seen("root-item-top-directory", BOTH, &[Kind::RootItemWrong], |d| {
        root(d, FS)?.set_u64(DIRID, 300)
    }),
    seen("root-item-top-directory-of-data-relocation", BOTH, &[Kind::RootItemWrong], |d| {
        root(d, ObjectId::DATA_RELOC_TREE)?.set_u64(DIRID, 300)
    }),
    seen("root-item-twice", BOTH, &[Kind::RootItemInvalid], |d| {
        let (key, _) = d.root_item(ObjectId::EXTENT_TREE)?;
        let data = d.get(ROOTS, key)?;
        d.insert(ROOTS, Key { offset: 4096, ..key }, &data)
    }),
    missed("root-item-alive-with-progress-of-a-deletion", BOTH, &[Kind::RootItemWrong], |d| {
        root(d, FS)?.set_u64(DROP_PROGRESS, 300)
    }),
    seen("root-tree-with-a-second-directory", BOTH, &[Kind::InodeInvalid], |d| {
        let data = d.get(ROOTS, inode_key(ObjectId::ROOT_TREE_DIR))?;
        d.insert(ROOTS, inode_key(ObjectId(4102)), &data)
    }),
    missed("root-item-last-snapshot-too-early", LINUX, &[Kind::RootItemWrong], |d| {
        let (key, ..) = keys(d, subvolume(d, "frozen")?)?;
        d.item(ROOTS, key).set_u64(LAST_SNAPSHOT, 0)
    }),
    seen("tree-missing-checksums", BOTH, &[Kind::TreeMissing], |d| root(d, CSUMS)?.delete()),
    seen("tree-missing-extents", BOTH, &[Kind::TreeMissing], |d| {
        root(d, ObjectId::EXTENT_TREE)?.delete()
    }),
    seen("tree-missing-data-relocation", BOTH, &[Kind::TreeMissing], |d| {
        root(d, ObjectId::DATA_RELOC_TREE)?.delete()
    }),
    seen("tree-missing-free-space", BOTH, &[Kind::TreeMissing], |d| root(d, find::FREE)?.delete()),
    seen("tree-missing-top-subvolume", BOTH, &[Kind::TreeMissing], |d| root(d, FS)?.delete()),
    seen("subvolume-missing", LINUX, &[Kind::RootRefWithoutRoot], |d| {
        let (key, ..) = keys(d, subvolume(d, "copy-of-copy")?)?;
        d.item(ROOTS, key).delete()
    }),
    seen("subvolume-without-root-ref", LINUX, &[Kind::RootRefMissing], |d| {
        let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).delete()
    }),
    seen("subvolume-without-root-backref", LINUX, &[Kind::RootBackrefMissing], |d| {
        let (_, _, key) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).delete()
    }),
    seen("subvolume-ref-of-another-directory", LINUX, &[Kind::RootRefDiffers], |d| {
        let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).add_u64(0, 1)
    }),
    seen("subvolume-ref-with-another-index", LINUX, &[Kind::RootRefDiffers], |d| {
        let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).add_u64(8, 100)
    }),
    seen("subvolume-backref-with-another-name", LINUX, &[Kind::RootRefDiffers], |d| {
        let (_, _, key) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).set(18, b"ypoc")
    }),
    seen("subvolume-ref-longer-than-its-item", LINUX, &[Kind::RootItemInvalid], |d| {
        let (_, key, _) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).set_u16(16, 100)
    }),
    seen("subvolume-without-dir-item", LINUX, &[Kind::DirItemMissing], |d| {
        let dir = find::ino(d, "volumes")?;
        d.item(FS, dir_item_key(dir, b"copy")).delete()
    }),
    seen("subvolume-entry-of-no-subvolume", LINUX, &[Kind::EntryWithoutSubvolume], |d| {
        let dir = find::ino(d, "volumes")?;
        let (key, _) = d.first(FS, |key, data| {
            key.objectid == dir
                && key.kind == KeyType::DIR_INDEX
                && DirEntries::new(data).next().is_some_and(|e| e.is_ok_and(|e| e.name == b"copy"))
        })?;
        d.item(FS, key).set_u64(0, 4000)
    }),
    seen("subvolume-dead-without-orphan", LINUX, &[Kind::DroppedRootWithoutOrphan], |d| {
        let (key, ..) = keys(d, subvolume(d, "copy")?)?;
        d.item(ROOTS, key).set_u32(REFS, 0)
    }),
    missed(
        "subvolume-being-dropped-without-orphan",
        PENDING,
        &[Kind::DroppedRootWithoutOrphan],
        |d| {
            let (_, key) = deleted_subvolume(d)?;
            d.item(ROOTS, key).delete()
        },
    ),
    missed("subvolume-being-dropped-alive-again", PENDING, &[Kind::SubvolumeUnreachable], |d| {
        let (tree, _) = deleted_subvolume(d)?;
        root(d, tree)?.set_u32(REFS, 1)
    }),
    missed("subvolume-orphan-for-nobody", BOTH, &[Kind::OrphanRootStale], |d| {
        d.insert(ROOTS, orphan_key(ObjectId(4000)), &[])
    }),
    missed("uuid-missing", BOTH, &[Kind::UuidMissing], |d| {
        let (_, root) = d.root_item(FS)?;
        d.item(UUIDS, uuid_key(&root.uuid, KeyType::UUID_SUBVOL)).delete()
    }),
    missed("uuid-of-another-subvolume", BOTH, &[Kind::UuidMissing, Kind::UuidStale], |d| {
        let (_, root) = d.root_item(FS)?;
        d.item(UUIDS, uuid_key(&root.uuid, KeyType::UUID_SUBVOL)).set_u64(0, 4000)
    }),
    missed("uuid-of-nobody", BOTH, &[Kind::UuidStale], |d| {
        d.insert(UUIDS, uuid_key(&[7; 16], KeyType::UUID_SUBVOL), &4000u64.to_le_bytes())
    }),
    missed("uuid-item-of-an-odd-size", BOTH, &[Kind::UuidItemInvalid], |d| {
        let (_, root) = d.root_item(FS)?;
        d.item(UUIDS, uuid_key(&root.uuid, KeyType::UUID_SUBVOL)).edit(|data| data.push(0))
    }),
    missed("default-subvolume-missing", BOTH, &[Kind::DefaultSubvolume], |d| {
        d.item(ROOTS, dir_item_key(ObjectId(6), b"default")).set_u64(0, 4000)
    }),
    seen("subvolume-without-entry", LINUX, &[Kind::RootRefWithoutEntry], |d| {
        let dir = find::ino(d, "volumes")?;
        let (index, _) = d.first(FS, |key, data| {
            key.objectid == dir
                && key.kind == KeyType::DIR_INDEX
                && DirEntries::new(data).next().is_some_and(|e| e.is_ok_and(|e| e.name == b"copy"))
        })?;
        d.item(FS, index).delete()?;
        d.item(FS, dir_item_key(dir, b"copy")).delete()
    }),
    missed("balance-interrupted", BOTH, &[Kind::RelocationInterrupted], |d| {
        d.insert(ROOTS, Key::new(ObjectId::BALANCE, KeyType::TEMPORARY_ITEM, 0), &[0; 448])
    }),
];
