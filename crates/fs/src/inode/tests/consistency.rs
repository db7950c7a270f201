//! What has to agree between the items of a subvolume. Checked item by item without the tested
//! code.

use larder_format::items::dir::single_entry;
use larder_format::items::keys::{dir_index_key, dir_item_key, inode_key, orphan_key};
use larder_format::items::{DirEntries, ExtRefs, InodeItem, InodeRefs};
use larder_format::{Key, KeyType, ObjectId};
use std::collections::{BTreeMap, BTreeSet};

/// (directory, index, name) → inode.
type Names = BTreeMap<(u64, u64, Vec<u8>), u64>;

/// Added to the numbers of subvolumes, which are independent of those of inodes.
const SUBVOLUME: u64 = 1 << 62;

fn number(location: &Key) -> u64 {
    location.objectid.0 + if location.kind == KeyType::ROOT_ITEM { SUBVOLUME } else { 0 }
}

/// Checks that entries, indices and references are the same set, and that link counts, directory
/// sizes and orphan items follow from it.
pub(super) fn check(items: &BTreeMap<Key, Vec<u8>>) {
    let mut by_index = Names::new();
    let mut by_reference = Names::new();
    let mut by_hash = BTreeSet::new();
    for (key, data) in items {
        let id = key.objectid.0;
        match key.kind {
            KeyType::DIR_INDEX => {
                let e = single_entry(data).unwrap();
                assert!(key.offset >= 2, "index {} of directory {id}", key.offset);
                // The root tree refers back to subvolumes.
                if e.location.kind == KeyType::ROOT_ITEM {
                    assert_eq!(e.location.offset, u64::MAX, "location in {key}");
                    let entry = (id, key.offset, e.name.to_vec());
                    by_reference.insert(entry, SUBVOLUME + e.location.objectid.0);
                } else {
                    assert_eq!(e.location, inode_key(e.location.objectid), "location in {key}");
                }
                by_index.insert((id, key.offset, e.name.to_vec()), number(&e.location));
                let bucket = &items[&dir_item_key(ObjectId(id), e.name)];
                let mut twins =
                    DirEntries::new(bucket).map(Result::unwrap).filter(|t| t.name == e.name);
                assert_eq!(twins.next(), Some(e), "entry of {key}");
                assert_eq!(twins.next(), None, "second entry of {key}");
            }
            KeyType::DIR_ITEM => {
                assert!(!data.is_empty(), "{key} is empty");
                for e in DirEntries::new(data) {
                    let e = e.unwrap();
                    assert_eq!(dir_item_key(ObjectId(id), e.name), *key);
                    assert!(
                        by_hash.insert((id, e.name.to_vec(), number(&e.location))),
                        "name twice in {key}"
                    );
                }
            }
            KeyType::INODE_REF if id == key.offset => {
                assert_eq!(id, 256, "only the root is its own parent");
            }
            KeyType::INODE_REF => {
                assert!(!data.is_empty(), "{key} is empty");
                for r in InodeRefs::new(data) {
                    let r = r.unwrap();
                    let old = by_reference.insert((key.offset, r.index, r.name.to_vec()), id);
                    assert_eq!(old, None, "reference twice in {key}");
                }
            }
            KeyType::INODE_EXTREF => {
                assert!(!data.is_empty(), "{key} is empty");
                for r in ExtRefs::new(data) {
                    let r = r.unwrap();
                    let old = by_reference.insert((r.parent.0, r.index, r.name.to_vec()), id);
                    assert_eq!(old, None, "reference twice in {key}");
                }
            }
            _ => {}
        }
    }
    assert_eq!(by_index, by_reference, "indices and references");
    let from_index: BTreeSet<_> =
        by_index.iter().map(|((d, _, n), i)| (*d, n.clone(), *i)).collect();
    assert_eq!(by_hash, from_index, "entries by hash and by index");

    let mut sizes = BTreeMap::<u64, u64>::new();
    let mut links = BTreeMap::<u64, u32>::new();
    for ((dir, _, name), ino) in &by_index {
        *sizes.entry(*dir).or_default() += 2 * name.len() as u64;
        *links.entry(*ino).or_default() += 1;
    }
    let mut inodes = BTreeSet::new();
    for (key, data) in items.iter().filter(|(k, _)| k.kind == KeyType::INODE_ITEM) {
        let ino = key.objectid.0;
        inodes.insert(ino);
        let item = InodeItem::parse(data).unwrap();
        let names = links.get(&ino).copied().unwrap_or_default();
        let named = names > 0 || ino == 256;
        if item.is_dir() {
            assert_eq!(
                item.size.get(),
                sizes.get(&ino).copied().unwrap_or_default(),
                "size of directory {ino}"
            );
            assert_eq!(item.nlink.get(), u32::from(named), "links of directory {ino}");
            assert!(names <= 1, "directory {ino} has {names} names");
        } else {
            assert_eq!(item.nlink.get(), names, "links of {ino}");
        }
        let announced = items.contains_key(&orphan_key(ObjectId(ino)));
        assert_eq!(announced, !named, "orphan item of {ino}");
    }
    for key in items.keys() {
        let ino = key.objectid;
        if ino == ObjectId::ORPHAN {
            assert!(inodes.contains(&key.offset), "orphan item without inode: {key}");
        } else {
            assert!(inodes.contains(&ino.0), "item without inode: {key}");
        }
        if key.kind == KeyType::DIR_INDEX {
            assert_eq!(*key, dir_index_key(ino, key.offset));
        }
    }
    for (dir, _, _) in by_index.keys() {
        assert!(inodes.contains(dir), "entries of missing directory {dir}");
    }
}
