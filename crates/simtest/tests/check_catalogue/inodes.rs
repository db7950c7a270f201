//! Inodes, and the three places where each name stands.

use crate::bases::{BOTH, HOLES, LINUX, PENDING};
use crate::entry::{Entry, Progs};
use crate::find::{self, FS};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::csum::name_hash;
use larder_format::items::FileType;
use larder_format::items::dir::DirEntryRef;
use larder_format::items::inode_ref::{ExtRef, InodeRef};
use larder_format::items::keys::{dir_item_key, inode_extref_key, inode_key, orphan_key};
use larder_format::{Generation, Key, KeyType, ObjectId};
use larder_simtest::damage::Damage;

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

pub(crate) const ENTRIES: &[Entry] = &[
    Entry {
        name: "inode-links-too-many",
        bases: BOTH,
        kinds: &[Kind::InodeLinkCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).set_u32(NLINK, 2)
        },
    },
    Entry {
        name: "inode-links-too-few",
        bases: BOTH,
        kinds: &[Kind::InodeLinkCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/pair-a")?;
            d.item(FS, key).set_u32(NLINK, 2)
        },
    },
    Entry {
        name: "inode-without-links",
        bases: BOTH,
        kinds: &[Kind::InodeLinkCount],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).set_u32(NLINK, 0)
        },
    },
    Entry {
        name: "inode-directory-with-two-links",
        bases: BOTH,
        kinds: &[Kind::InodeInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/dir")?;
            d.item(FS, key).set_u32(NLINK, 2)
        },
    },
    Entry {
        name: "inode-written-in-place-with-checksums",
        bases: BOTH,
        kinds: &[Kind::InodeFlags],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).set_u64(FLAGS, 2)
        },
    },
    Entry {
        name: "inode-size-of-an-inline-file",
        bases: BOTH,
        kinds: &[Kind::InodeSize],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/inline")?;
            d.item(FS, key).set_u64(SIZE, 300)
        },
    },
    Entry {
        name: "inode-size-before-the-last-extent",
        bases: BOTH,
        kinds: &[Kind::FileExtentBeyondEnd],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/sparse")?;
            d.item(FS, key).set_u64(SIZE, 4096)
        },
    },
    Entry {
        name: "inode-size-beyond-the-last-extent",
        bases: HOLES,
        kinds: &[Kind::FileExtentHole],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).set_u64(SIZE, 1 << 20)
        },
    },
    Entry {
        name: "inode-size-of-a-symlink",
        bases: BOTH,
        kinds: &[Kind::InodeSize],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/symlink")?;
            d.item(FS, key).set_u64(SIZE, 5)
        },
    },
    Entry {
        name: "inode-bytes-too-many",
        bases: BOTH,
        kinds: &[Kind::InodeBytes],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).add_u64(NBYTES, 4096)
        },
    },
    Entry {
        name: "inode-bytes-of-an-inline-file",
        bases: BOTH,
        kinds: &[Kind::InodeBytes],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/inline")?;
            d.item(FS, key).set_u64(NBYTES, 4096)
        },
    },
    Entry {
        name: "inode-of-another-type",
        bases: BOTH,
        kinds: &[Kind::DirEntryType],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/fifo")?;
            d.item(FS, key).set_u32(MODE, 0o140_644)
        },
    },
    Entry {
        name: "inode-of-no-type",
        bases: BOTH,
        kinds: &[Kind::InodeInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/fifo")?;
            d.item(FS, key).set_u32(MODE, 0o644)
        },
    },
    Entry {
        name: "inode-unknown-flag",
        bases: BOTH,
        kinds: &[Kind::InodeInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).set_u64(FLAGS, 1 << 20)
        },
    },
    Entry {
        name: "inode-without-checksums-that-has-them",
        bases: BOTH,
        kinds: &[Kind::ChecksumUnexpected],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).set_u64(FLAGS, 1)
        },
    },
    Entry {
        name: "inode-with-checksums-that-lacks-them",
        bases: LINUX,
        kinds: &[Kind::ChecksumMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = d.first(FS, |key, data| {
                key.kind == KeyType::INODE_ITEM && data[FLAGS] & 1 == 1 && data[NBYTES + 2] != 0
            })?;
            d.item(FS, key).set_u64(FLAGS, 0)
        },
    },
    Entry {
        name: "inode-of-the-future",
        bases: BOTH,
        kinds: &[Kind::InodeInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).add_u64(GENERATION, 1000)
        },
    },
    Entry {
        name: "inode-of-the-next-transaction",
        bases: BOTH,
        kinds: &[Kind::InodeGeneration],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            let next = d.superblock().generation().0 + 1;
            d.item(FS, key).set_u64(GENERATION, next)
        },
    },
    Entry {
        name: "inode-changed-in-the-future",
        bases: BOTH,
        kinds: &[Kind::InodeInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).add_u64(TRANSID, 1000)
        },
    },
    Entry {
        name: "inode-item-missing",
        bases: BOTH,
        kinds: &[Kind::InodeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).delete()
        },
    },
    Entry {
        name: "inode-item-too-short",
        bases: BOTH,
        kinds: &[Kind::InodeInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let key = find::inode(d, "plant/plain")?;
            d.item(FS, key).edit(|data| data.truncate(100))
        },
    },
    Entry {
        name: "inode-nobody-names",
        bases: BOTH,
        kinds: &[Kind::OrphanItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let last = d.items(FS)?.into_iter().rfind(|(key, _)| key.kind == KeyType::INODE_ITEM);
            let (key, mut data) = last.context("an inode")?;
            data[NLINK] = 0;
            data[MODE..MODE + 4].copy_from_slice(&0o100_644u32.to_le_bytes());
            data[SIZE..SIZE + 16].fill(0);
            d.insert(FS, inode_key(ObjectId(key.objectid.0 + 10)), &data)
        },
    },
    Entry {
        name: "root-directory-missing",
        bases: BOTH,
        kinds: &[Kind::RootDirectory],
        progs: Progs::Sees,
        plant: |d| d.item(FS, inode_key(ObjectId(256))).delete(),
    },
    Entry {
        name: "root-directory-without-its-reference",
        bases: BOTH,
        kinds: &[Kind::RootDirectory],
        progs: Progs::Sees,
        plant: |d| d.item(FS, Key::new(256, KeyType::INODE_REF, 256)).delete(),
    },
    Entry {
        name: "directory-size",
        bases: BOTH,
        kinds: &[Kind::DirectorySize],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/dir")?;
            d.item(FS, key).add_u64(SIZE, 2)
        },
    },
    Entry {
        name: "directory-size-of-an-empty-one",
        bases: BOTH,
        kinds: &[Kind::DirectorySize],
        progs: Progs::Sees,
        plant: |d| {
            let key = find::inode(d, "plant/empty")?;
            d.item(FS, key).set_u64(SIZE, 12)
        },
    },
    Entry {
        name: "name-without-dir-item",
        bases: BOTH,
        kinds: &[Kind::DirItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).delete()
        },
    },
    Entry {
        name: "name-without-dir-index",
        bases: BOTH,
        kinds: &[Kind::DirIndexMissing],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.index).delete()
        },
    },
    Entry {
        name: "name-without-inode-ref",
        bases: BOTH,
        kinds: &[Kind::InodeRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.reference).delete()
        },
    },
    Entry {
        name: "name-in-dir-item-of-another-inode",
        bases: BOTH,
        kinds: &[Kind::DirEntryDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).set_u64(0, 1_000_000)
        },
    },
    Entry {
        name: "name-in-dir-index-of-another-inode",
        bases: BOTH,
        kinds: &[Kind::DirEntryDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            let other = find::ino(d, "plant/dir/two")?;
            d.item(FS, name.index).set_u64(0, other.0)
        },
    },
    Entry {
        name: "name-of-another-type-in-dir-item",
        bases: BOTH,
        kinds: &[Kind::DirEntryDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).set_u8(ENTRY_TYPE, 7)
        },
    },
    Entry {
        name: "name-of-another-type-in-dir-index",
        bases: BOTH,
        kinds: &[Kind::DirEntryType],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.index).set_u8(ENTRY_TYPE, 7)
        },
    },
    Entry {
        name: "name-with-a-wrong-hash",
        bases: BOTH,
        kinds: &[Kind::NameHash],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).rekey(Key { offset: name.item.offset ^ 0xff, ..name.item })
        },
    },
    Entry {
        name: "name-changed-in-dir-index",
        bases: BOTH,
        kinds: &[Kind::DirItemMissing, Kind::DirIndexMissing],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.index).set(30, b"eno")
        },
    },
    Entry {
        name: "name-changed-in-inode-ref",
        bases: BOTH,
        kinds: &[Kind::InodeRefMissing, Kind::InodeRefWithoutEntry],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.reference).set(10, b"eno")
        },
    },
    Entry {
        name: "name-with-another-index-in-inode-ref",
        bases: BOTH,
        kinds: &[Kind::InodeRefDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.reference).set_u64(0, 77)
        },
    },
    Entry {
        name: "name-with-another-dir-index",
        bases: BOTH,
        kinds: &[Kind::InodeRefDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.index).rekey(Key { offset: 77, ..name.index })
        },
    },
    Entry {
        name: "name-twice-in-dir-index",
        bases: BOTH,
        kinds: &[Kind::DirNameDuplicate],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            let data = d.get(FS, name.index)?;
            d.insert(FS, Key { offset: 77, ..name.index }, &data)
        },
    },
    Entry {
        name: "name-twice-in-dir-item",
        bases: BOTH,
        kinds: &[Kind::DirNameDuplicate],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).edit(|data| data.extend_from_within(..))
        },
    },
    Entry {
        name: "name-that-no-directory-has",
        bases: BOTH,
        kinds: &[Kind::InodeRefWithoutEntry],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.reference).edit(|data| InodeRef { index: 50, name: b"ghost" }.append_to(data))
        },
    },
    Entry {
        name: "name-in-a-file",
        bases: BOTH,
        kinds: &[Kind::ItemMisplaced],
        progs: Progs::Sees,
        plant: |d| {
            let file = find::ino(d, "plant/inline")?;
            let target = find::ino(d, "plant/plain")?;
            let generation = Generation(d.superblock().generation().0);
            let entry = DirEntryRef::inode(target, generation, FileType::Regular, b"inside");
            d.insert(FS, dir_item_key(file, b"inside"), &entry.encode())
        },
    },
    Entry {
        name: "name-with-a-reserved-index",
        bases: BOTH,
        kinds: &[Kind::DirIndexInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.index).rekey(Key { offset: 1, ..name.index })
        },
    },
    Entry {
        name: "name-longer-than-its-item",
        bases: BOTH,
        kinds: &[Kind::NameInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.index).set_u16(27, 200)
        },
    },
    Entry {
        name: "name-of-an-unknown-type",
        bases: BOTH,
        kinds: &[Kind::NameInvalid],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).set_u8(ENTRY_TYPE, 77)
        },
    },
    Entry {
        name: "extref-missing",
        bases: LINUX,
        kinds: &[Kind::InodeRefMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = extref(d)?;
            d.item(FS, key).delete()
        },
    },
    Entry {
        name: "extref-with-another-index",
        bases: LINUX,
        kinds: &[Kind::InodeRefDiffers],
        progs: Progs::Sees,
        plant: |d| {
            let (key, _) = extref(d)?;
            d.item(FS, key).add_u64(8, 100_000)
        },
    },
    Entry {
        name: "extref-with-a-wrong-hash",
        bases: LINUX,
        kinds: &[Kind::NameHash],
        progs: Progs::Misses,
        plant: |d| {
            find::where_it_fits(
                d,
                FS,
                |key, _| key.kind == KeyType::INODE_EXTREF,
                |d, key| d.item(FS, key).rekey(Key { offset: key.offset ^ 1, ..key }),
            )
        },
    },
    Entry {
        name: "extref-that-no-directory-has",
        bases: BOTH,
        kinds: &[Kind::InodeRefWithoutEntry],
        progs: Progs::Sees,
        plant: |d| {
            let (file, dir) = (find::ino(d, "plant/plain")?, find::ino(d, "plant/dir")?);
            let mut data = Vec::new();
            ExtRef { parent: dir, index: 90, name: b"ghost" }.append_to(&mut data);
            d.insert(FS, inode_extref_key(file, dir, b"ghost"), &data)
        },
    },
    Entry {
        name: "xattr-with-a-wrong-hash",
        bases: BOTH,
        kinds: &[Kind::NameHash],
        progs: Progs::Misses,
        plant: |d| {
            let ino = find::ino(d, "plant/attributes")?;
            let (key, _) = d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::XATTR_ITEM)?;
            d.item(FS, key).rekey(Key { offset: key.offset ^ 1, ..key })
        },
    },
    Entry {
        name: "xattr-twice",
        bases: BOTH,
        kinds: &[Kind::XattrDuplicate],
        progs: Progs::Misses,
        plant: |d| {
            let ino = find::ino(d, "plant/attributes")?;
            let (key, _) = d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::XATTR_ITEM)?;
            d.item(FS, key).edit(|data| data.extend_from_within(..))
        },
    },
    Entry {
        name: "xattr-longer-than-its-item",
        bases: BOTH,
        kinds: &[Kind::NameInvalid],
        progs: Progs::Misses,
        plant: |d| {
            let ino = find::ino(d, "plant/attributes")?;
            let (key, _) = d.first(FS, |k, _| k.objectid == ino && k.kind == KeyType::XATTR_ITEM)?;
            d.item(FS, key).set_u16(25, 500)
        },
    },
    Entry {
        name: "xattr-of-nobody",
        bases: BOTH,
        kinds: &[Kind::InodeMissing],
        progs: Progs::Sees,
        plant: |d| {
            let (last, _) = d.items(FS)?.pop().context("items")?;
            let entry = DirEntryRef::xattr(Generation(1), b"user.lost", b"value").encode();
            let key = Key::new(last.objectid.0 + 1000, KeyType::XATTR_ITEM, 0);
            let hash = name_hash(b"user.lost");
            d.insert(FS, Key { offset: hash, ..key }, &entry)
        },
    },
    Entry {
        name: "orphan-item-missing",
        bases: PENDING,
        kinds: &[Kind::OrphanItemMissing],
        progs: Progs::Sees,
        plant: |d| {
            let key = orphan(d)?;
            d.item(FS, key).delete()
        },
    },
    Entry {
        name: "orphan-item-for-nobody",
        bases: BOTH,
        kinds: &[Kind::OrphanItemStale],
        progs: Progs::Misses,
        plant: |d| d.insert(FS, orphan_key(ObjectId(1_000_000)), &[]),
    },
    Entry {
        name: "directory-with-two-names",
        bases: BOTH,
        kinds: &[Kind::DirLinks],
        progs: Progs::Sees,
        plant: |d| {
            let (child, dir) = (find::ino(d, "plant/empty")?, find::ino(d, "plant/dir")?);
            let generation = Generation(d.superblock().generation().0);
            let entry = DirEntryRef::inode(child, generation, FileType::Directory, b"again").encode();
            let mut reference = Vec::new();
            InodeRef { index: 60, name: b"again" }.append_to(&mut reference);
            d.insert(FS, dir_item_key(dir, b"again"), &entry)?;
            d.insert(FS, Key::new(dir, KeyType::DIR_INDEX, 60), &entry)?;
            d.insert(FS, Key::new(child, KeyType::INODE_REF, dir.0), &reference)?;
            d.item(FS, inode_key(dir)).add_u64(SIZE, 10)
        },
    },
    Entry {
        name: "name-of-no-inode",
        bases: BOTH,
        kinds: &[Kind::DirEntryWithoutInode, Kind::InodeRefWithoutEntry],
        progs: Progs::Sees,
        plant: |d| {
            let name = find::name(d, "plant/dir/one")?;
            d.item(FS, name.item).set_u64(0, 1_000_000)?;
            d.item(FS, name.index).set_u64(0, 1_000_000)
        },
    },
    Entry {
        name: "name-with-a-slash",
        bases: BOTH,
        kinds: &[Kind::NameInvalid],
        progs: Progs::Misses,
        plant: |d| rename(d, "plant/dir/one", b"a/b"),
    },
    Entry {
        name: "name-that-leads-upwards",
        bases: BOTH,
        kinds: &[Kind::NameInvalid],
        progs: Progs::Misses,
        plant: |d| rename(d, "plant/pair-a", b"../../"),
    },
];
