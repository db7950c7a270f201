//! Inodes, and the three places where each name stands.

use crate::entry::{BOTH, Entry, HOLES, LINUX, PENDING, missed, seen};
use crate::find::{self, FS};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::csum::name_hash;
use larder_format::items::FileType;
use larder_format::items::dir::DirEntryRef;
use larder_format::items::inode_ref::{ExtRef, InodeRef};
use larder_format::items::keys::{dir_item_key, inode_extref_key, inode_key, orphan_key};
use larder_format::{Generation, Key, KeyType, ObjectId};
use larder_simtest::damage::{Damage, ItemEdit};

const GENERATION: usize = 0;
const TRANSID: usize = 8;
const SIZE: usize = 16;
const NBYTES: usize = 24;
const NLINK: usize = 40;
const MODE: usize = 52;
const FLAGS: usize = 64;
/// Offset of the type in a directory entry.
const ENTRY_TYPE: usize = 29;

/// An unlinked inode that is marked for removal.
fn orphan(d: &Damage) -> Result<Key> {
    let (key, _) = d.first(FS, |key, _| key.kind == KeyType::ORPHAN_ITEM)?;
    Ok(key)
}

/// An INODE_EXTREF item.
fn extref(d: &Damage) -> Result<(Key, Vec<u8>)> {
    d.first(FS, |key, _| key.kind == KeyType::INODE_EXTREF)
}

/// Gives a name of one link, in all three places, another of the same length.
fn rename(d: &mut Damage, path: &str, to: &[u8]) -> Result<()> {
    let name = find::name(d, path)?;
    d.item(FS, name.reference).set(10, to)?;
    d.item(FS, name.index).set(30, to)?;
    d.item(FS, name.item).set(30, to)?;
    d.item(FS, name.item).rekey(Key { offset: name_hash(to), ..name.item })
}

/// One of the three items of the name `plant/dir/one`, to be changed.
fn one(d: &mut Damage, which: fn(find::Name) -> Key) -> Result<ItemEdit<'_>> {
    let key = which(find::name(d, "plant/dir/one")?);
    Ok(d.item(FS, key))
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("inode-links-too-many", BOTH, &[Kind::InodeLinkCount], |d| {
        find::inode_item(d, "plant/plain")?.set_u32(NLINK, 2)
    }),
    seen("inode-links-too-few", BOTH, &[Kind::InodeLinkCount], |d| {
        find::inode_item(d, "plant/pair-a")?.set_u32(NLINK, 2)
    }),
    seen("inode-without-links", BOTH, &[Kind::InodeLinkCount], |d| {
        find::inode_item(d, "plant/plain")?.set_u32(NLINK, 0)
    }),
    seen("inode-directory-with-two-links", BOTH, &[Kind::InodeInvalid], |d| {
        find::inode_item(d, "plant/dir")?.set_u32(NLINK, 2)
    }),
    missed("inode-written-in-place-with-checksums", BOTH, &[Kind::InodeFlags], |d| {
        find::inode_item(d, "plant/plain")?.set_u64(FLAGS, 2)
    }),
    missed("inode-size-of-an-inline-file", BOTH, &[Kind::InodeSize], |d| {
        find::inode_item(d, "plant/inline")?.set_u64(SIZE, 300)
    }),
    missed("inode-size-before-the-last-extent", BOTH, &[Kind::FileExtentBeyondEnd], |d| {
        find::inode_item(d, "plant/sparse")?.set_u64(SIZE, 4096)
    }),
    seen("inode-size-beyond-the-last-extent", HOLES, &[Kind::FileExtentHole], |d| {
        find::inode_item(d, "plant/plain")?.set_u64(SIZE, 1 << 20)
    }),
    missed("inode-size-of-a-symlink", BOTH, &[Kind::InodeSize], |d| {
        find::inode_item(d, "plant/symlink")?.set_u64(SIZE, 5)
    }),
    seen("inode-bytes-too-many", BOTH, &[Kind::InodeBytes], |d| {
        find::inode_item(d, "plant/plain")?.add_u64(NBYTES, 4096)
    }),
    seen("inode-bytes-of-an-inline-file", BOTH, &[Kind::InodeBytes], |d| {
        find::inode_item(d, "plant/inline")?.set_u64(NBYTES, 4096)
    }),
    seen("inode-of-another-type", BOTH, &[Kind::DirEntryType], |d| {
        find::inode_item(d, "plant/fifo")?.set_u32(MODE, 0o140_644)
    }),
    seen("inode-of-no-type", BOTH, &[Kind::InodeInvalid], |d| {
        find::inode_item(d, "plant/fifo")?.set_u32(MODE, 0o644)
    }),
    missed("inode-unknown-flag", BOTH, &[Kind::InodeInvalid], |d| {
        find::inode_item(d, "plant/plain")?.set_u64(FLAGS, 1 << 20)
    }),
    seen("inode-without-checksums-that-has-them", BOTH, &[Kind::ChecksumUnexpected], |d| {
        find::inode_item(d, "plant/plain")?.set_u64(FLAGS, 1)
    }),
    seen(
        "inode-without-checksums-that-shares-with-one-that-has-them",
        LINUX,
        &[Kind::ChecksumUnexpected],
        |d| find::inode_item(d, "plant/few-00")?.set_u64(FLAGS, 1),
    ),
    seen("inode-with-checksums-that-lacks-them", LINUX, &[Kind::ChecksumMissing], |d| {
        let (key, _) = d.first(FS, |key, data| {
            key.kind == KeyType::INODE_ITEM && data[FLAGS] & 1 == 1 && data[NBYTES + 2] != 0
        })?;
        d.item(FS, key).set_u64(FLAGS, 0)
    }),
    seen("inode-of-the-future", BOTH, &[Kind::InodeInvalid], |d| {
        find::inode_item(d, "plant/plain")?.add_u64(GENERATION, 1000)
    }),
    missed("inode-of-the-next-transaction", BOTH, &[Kind::InodeGeneration], |d| {
        let key = find::inode(d, "plant/plain")?;
        let next = d.superblock().generation().0 + 1;
        d.item(FS, key).set_u64(GENERATION, next)
    }),
    seen("inode-changed-in-the-future", BOTH, &[Kind::InodeInvalid], |d| {
        find::inode_item(d, "plant/plain")?.add_u64(TRANSID, 1000)
    }),
    seen("inode-item-missing", BOTH, &[Kind::InodeMissing], |d| {
        find::inode_item(d, "plant/plain")?.delete()
    }),
    missed("inode-item-too-short", BOTH, &[Kind::InodeInvalid], |d| {
        find::inode_item(d, "plant/plain")?.edit(|data| data.truncate(100))
    }),
    seen("inode-nobody-names", BOTH, &[Kind::OrphanItemMissing], |d| {
        let last = d.items(FS)?.into_iter().rfind(|(key, _)| key.kind == KeyType::INODE_ITEM);
        let (key, mut data) = last.context("an inode")?;
        data[NLINK] = 0;
        data[MODE..MODE + 4].copy_from_slice(&0o100_644u32.to_le_bytes());
        data[SIZE..SIZE + 16].fill(0);
        d.insert(FS, inode_key(ObjectId(key.objectid.0 + 10)), &data)
    }),
    seen("root-directory-missing", BOTH, &[Kind::RootDirectory], |d| {
        d.item(FS, inode_key(ObjectId(256))).delete()
    }),
    seen("root-directory-without-its-reference", BOTH, &[Kind::RootDirectory], |d| {
        d.item(FS, Key::new(256, KeyType::INODE_REF, 256)).delete()
    }),
    seen("root-directory-with-an-index", BOTH, &[Kind::RootDirectory], |d| {
        d.item(FS, Key::new(256, KeyType::INODE_REF, 256)).set_u64(0, 1)
    }),
    seen("root-directory-of-another-name", BOTH, &[Kind::RootDirectory], |d| {
        d.item(FS, Key::new(256, KeyType::INODE_REF, 256)).set(10, b"up")
    }),
    seen("directory-size", BOTH, &[Kind::DirectorySize], |d| {
        find::inode_item(d, "plant/dir")?.add_u64(SIZE, 2)
    }),
    seen("directory-size-of-an-empty-one", BOTH, &[Kind::DirectorySize], |d| {
        find::inode_item(d, "plant/empty")?.set_u64(SIZE, 12)
    }),
    seen("name-without-dir-item", BOTH, &[Kind::DirItemMissing], |d| {
        one(d, |name| name.item)?.delete()
    }),
    seen("name-without-dir-index", BOTH, &[Kind::DirIndexMissing], |d| {
        one(d, |name| name.index)?.delete()
    }),
    seen("name-without-inode-ref", BOTH, &[Kind::InodeRefMissing], |d| {
        one(d, |name| name.reference)?.delete()
    }),
    seen("name-in-dir-item-of-another-inode", BOTH, &[Kind::DirEntryDiffers], |d| {
        one(d, |name| name.item)?.set_u64(0, 1_000_000)
    }),
    seen("name-in-dir-index-of-another-inode", BOTH, &[Kind::DirEntryDiffers], |d| {
        let name = find::name(d, "plant/dir/one")?;
        let other = find::ino(d, "plant/dir/two")?;
        d.item(FS, name.index).set_u64(0, other.0)
    }),
    seen("name-of-another-type-in-dir-item", BOTH, &[Kind::DirEntryDiffers], |d| {
        one(d, |name| name.item)?.set_u8(ENTRY_TYPE, 7)
    }),
    seen("name-of-another-type-in-dir-index", BOTH, &[Kind::DirEntryType], |d| {
        one(d, |name| name.index)?.set_u8(ENTRY_TYPE, 7)
    }),
    seen("name-with-a-wrong-hash", BOTH, &[Kind::NameHash], |d| {
        let name = find::name(d, "plant/dir/one")?;
        d.item(FS, name.item).rekey(Key { offset: name.item.offset ^ 0xff, ..name.item })
    }),
    seen("name-changed-in-dir-index", BOTH, &[Kind::DirItemMissing, Kind::DirIndexMissing], |d| {
        one(d, |name| name.index)?.set(30, b"eno")
    }),
    seen(
        "name-changed-in-inode-ref",
        BOTH,
        &[Kind::InodeRefMissing, Kind::InodeRefWithoutEntry],
        |d| one(d, |name| name.reference)?.set(10, b"eno"),
    ),
    seen("name-with-another-index-in-inode-ref", BOTH, &[Kind::InodeRefDiffers], |d| {
        one(d, |name| name.reference)?.set_u64(0, 77)
    }),
    seen("name-with-another-dir-index", BOTH, &[Kind::InodeRefDiffers], |d| {
        let name = find::name(d, "plant/dir/one")?;
        d.item(FS, name.index).rekey(Key { offset: 77, ..name.index })
    }),
    seen("name-twice-in-dir-index", BOTH, &[Kind::DirNameDuplicate], |d| {
        let name = find::name(d, "plant/dir/one")?;
        let data = d.get(FS, name.index)?;
        d.insert(FS, Key { offset: 77, ..name.index }, &data)
    }),
    seen("name-twice-in-dir-item", BOTH, &[Kind::DirNameDuplicate], |d| {
        one(d, |name| name.item)?.edit(|data| data.extend_from_within(..))
    }),
    seen("name-that-no-directory-has", BOTH, &[Kind::InodeRefWithoutEntry], |d| {
        let name = find::name(d, "plant/dir/one")?;
        d.item(FS, name.reference)
            .edit(|data| InodeRef { index: 50, name: b"ghost" }.append_to(data))
    }),
    seen("name-in-a-file", BOTH, &[Kind::ItemMisplaced], |d| {
        let file = find::ino(d, "plant/inline")?;
        let target = find::ino(d, "plant/plain")?;
        let generation = Generation(d.superblock().generation().0);
        let entry = DirEntryRef::inode(target, generation, FileType::Regular, b"inside");
        d.insert(FS, dir_item_key(file, b"inside"), &entry.encode())
    }),
    seen("name-with-a-reserved-index", BOTH, &[Kind::DirIndexInvalid], |d| {
        let name = find::name(d, "plant/dir/one")?;
        d.item(FS, name.index).rekey(Key { offset: 1, ..name.index })
    }),
    seen("name-longer-than-its-item", BOTH, &[Kind::NameInvalid], |d| {
        one(d, |name| name.index)?.set_u16(27, 200)
    }),
    seen("name-of-an-unknown-type", BOTH, &[Kind::NameInvalid], |d| {
        one(d, |name| name.item)?.set_u8(ENTRY_TYPE, 77)
    }),
    seen("extref-missing", LINUX, &[Kind::InodeRefMissing], |d| {
        let (key, _) = extref(d)?;
        d.item(FS, key).delete()
    }),
    seen("extref-with-another-index", LINUX, &[Kind::InodeRefDiffers], |d| {
        let (key, _) = extref(d)?;
        d.item(FS, key).add_u64(8, 100_000)
    }),
    missed("extref-with-a-wrong-hash", LINUX, &[Kind::NameHash], |d| {
        find::where_it_fits(
            d,
            FS,
            |key, _| key.kind == KeyType::INODE_EXTREF,
            |d, key| d.item(FS, key).rekey(Key { offset: key.offset ^ 1, ..key }),
        )
    }),
    seen("extref-that-no-directory-has", BOTH, &[Kind::InodeRefWithoutEntry], |d| {
        let (file, dir) = (find::ino(d, "plant/plain")?, find::ino(d, "plant/dir")?);
        let mut data = Vec::new();
        ExtRef { parent: dir, index: 90, name: b"ghost" }.append_to(&mut data);
        d.insert(FS, inode_extref_key(file, dir, b"ghost"), &data)
    }),
    missed("xattr-with-a-wrong-hash", BOTH, &[Kind::NameHash], |d| {
        let ino = find::ino(d, "plant/attributes")?;
        let (key, _) = d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::XATTR_ITEM)?;
        d.item(FS, key).rekey(Key { offset: key.offset ^ 1, ..key })
    }),
    missed("xattr-twice", BOTH, &[Kind::XattrDuplicate], |d| {
        let ino = find::ino(d, "plant/attributes")?;
        let (key, _) = d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::XATTR_ITEM)?;
        d.item(FS, key).edit(|data| data.extend_from_within(..))
    }),
    missed("xattr-longer-than-its-item", BOTH, &[Kind::NameInvalid], |d| {
        let ino = find::ino(d, "plant/attributes")?;
        let (key, _) = d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::XATTR_ITEM)?;
        d.item(FS, key).set_u16(25, 500)
    }),
    seen("xattr-of-nobody", BOTH, &[Kind::InodeMissing], |d| {
        let (last, _) = d.items(FS)?.pop().context("items")?;
        let entry = DirEntryRef::xattr(Generation(1), b"user.lost", b"value").encode();
        let key = Key::new(last.objectid.0 + 1000, KeyType::XATTR_ITEM, 0);
        let hash = name_hash(b"user.lost");
        d.insert(FS, Key { offset: hash, ..key }, &entry)
    }),
    seen("orphan-item-missing", PENDING, &[Kind::OrphanItemMissing], |d| {
        let key = orphan(d)?;
        d.item(FS, key).delete()
    }),
    missed("orphan-item-for-nobody", BOTH, &[Kind::OrphanItemStale], |d| {
        d.insert(FS, orphan_key(ObjectId(1_000_000)), &[])
    }),
    seen("directory-with-two-names", BOTH, &[Kind::DirLinks], |d| {
        let (child, dir) = (find::ino(d, "plant/empty")?, find::ino(d, "plant/dir")?);
        let generation = Generation(d.superblock().generation().0);
        let entry = DirEntryRef::inode(child, generation, FileType::Directory, b"again").encode();
        let mut reference = Vec::new();
        InodeRef { index: 60, name: b"again" }.append_to(&mut reference);
        d.insert(FS, dir_item_key(dir, b"again"), &entry)?;
        d.insert(FS, Key::new(dir, KeyType::DIR_INDEX, 60), &entry)?;
        d.insert(FS, Key::new(child, KeyType::INODE_REF, dir.0), &reference)?;
        d.item(FS, inode_key(dir)).add_u64(SIZE, 10)
    }),
    seen(
        "name-of-no-inode",
        BOTH,
        &[Kind::DirEntryWithoutInode, Kind::InodeRefWithoutEntry],
        |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).set_u64(0, 1_000_000)?;
            d.item(FS, name.index).set_u64(0, 1_000_000)
        },
    ),
    missed("name-with-a-slash", BOTH, &[Kind::NameInvalid], |d| rename(d, "plant/dir/one", b"a/b")),
    missed("name-that-leads-upwards", BOTH, &[Kind::NameInvalid], |d| {
        rename(d, "plant/pair-a", b"../../")
    }),
];
