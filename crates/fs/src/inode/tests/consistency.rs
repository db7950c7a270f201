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
    let found = Found::of(items);
    assert_eq!(found.by_index, found.by_reference, "indices and references");
    let from_index: BTreeSet<_> =
        found.by_index.iter().map(|((d, _, n), i)| (*d, n.clone(), *i)).collect();
    assert_eq!(found.by_hash, from_index, "entries by hash and by index");
    let inodes = check_inodes(items, &found.by_index);
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
    for (dir, _, _) in found.by_index.keys() {
        assert!(inodes.contains(dir), "entries of missing directory {dir}");
    }
}

/// Names, from each of the three places that have them.
#[derive(Default)]
struct Found {
    by_index: Names,
    by_reference: Names,
    /// Directory, name, inode.
    by_hash: BTreeSet<(u64, Vec<u8>, u64)>,
}

impl Found {
    fn of(items: &BTreeMap<Key, Vec<u8>>) -> Self {
        let mut found = Self::default();
        for (key, data) in items {
            let id = key.objectid.0;
            match key.kind {
                KeyType::DIR_INDEX => found.index(items, key, data),
                KeyType::DIR_ITEM => found.entries(key, data),
                KeyType::INODE_REF if id == key.offset => {
                    assert_eq!(id, 256, "only the root is its own parent");
                }
                KeyType::INODE_REF => {
                    assert!(!data.is_empty(), "{key} is empty");
                    for r in InodeRefs::new(data).map(Result::unwrap) {
                        found.reference(key, (key.offset, r.index, r.name.to_vec()));
                    }
                }
                KeyType::INODE_EXTREF => {
                    assert!(!data.is_empty(), "{key} is empty");
                    for r in ExtRefs::new(data).map(Result::unwrap) {
                        found.reference(key, (r.parent.0, r.index, r.name.to_vec()));
                    }
                }
                _ => {}
            }
        }
        found
    }
    fn index(&mut self, items: &BTreeMap<Key, Vec<u8>>, key: &Key, data: &[u8]) {
        let id = key.objectid.0;
        let e = single_entry(data).unwrap();
        assert!(key.offset >= 2, "index {} of directory {id}", key.offset);
        let name = (id, key.offset, e.name.to_vec());
        // The root tree refers back to subvolumes.
        if e.location.kind == KeyType::ROOT_ITEM {
            assert_eq!(e.location.offset, u64::MAX, "location in {key}");
            self.by_reference.insert(name.clone(), SUBVOLUME + e.location.objectid.0);
        } else {
            assert_eq!(e.location, inode_key(e.location.objectid), "location in {key}");
        }
        self.by_index.insert(name, number(&e.location));
        let bucket = &items[&dir_item_key(ObjectId(id), e.name)];
        let mut twins = DirEntries::new(bucket).map(Result::unwrap).filter(|t| t.name == e.name);
        assert_eq!(twins.next(), Some(e), "entry of {key}");
        assert_eq!(twins.next(), None, "second entry of {key}");
    }
    fn entries(&mut self, key: &Key, data: &[u8]) {
        assert!(!data.is_empty(), "{key} is empty");
        for e in DirEntries::new(data).map(Result::unwrap) {
            assert_eq!(dir_item_key(key.objectid, e.name), *key);
            let entry = (key.objectid.0, e.name.to_vec(), number(&e.location));
            assert!(self.by_hash.insert(entry), "name twice in {key}");
        }
    }
    fn reference(&mut self, key: &Key, name: (u64, u64, Vec<u8>)) {
        let old = self.by_reference.insert(name, key.objectid.0);
        assert_eq!(old, None, "reference twice in {key}");
    }
}

/// Checks what inode items say about names. Returns the inodes that there are.
fn check_inodes(items: &BTreeMap<Key, Vec<u8>>, entries: &Names) -> BTreeSet<u64> {
    let mut sizes = BTreeMap::<u64, u64>::new();
    let mut links = BTreeMap::<u64, u32>::new();
    for ((dir, _, name), ino) in entries {
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
            let size = sizes.get(&ino).copied().unwrap_or_default();
            assert_eq!(item.size.get(), size, "size of directory {ino}");
            assert_eq!(item.nlink.get(), u32::from(named), "links of directory {ino}");
            assert!(names <= 1, "directory {ino} has {names} names");
        } else {
            assert_eq!(item.nlink.get(), names, "links of {ino}");
        }
        let announced = items.contains_key(&orphan_key(ObjectId(ino)));
        assert_eq!(announced, !named, "orphan item of {ino}");
    }
    inodes
}
