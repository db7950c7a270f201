//! Trees that contradict themselves: the error names the item, and nothing is changed.

use super::{World, assert_err, new};
use crate::{Error, FileKind, InodeId, RenameMode, SetAttr};
use larder_format::items::keys::{
    dir_index_key, dir_item_key, inode_key, inode_ref_key, orphan_key,
};
use larder_format::items::{DirEntryRef, FileType, InodeItem, InodeRef};
use larder_format::{Generation, Key, ObjectId};
use zerocopy::{FromBytes, IntoBytes};

impl World {
    /// Sets, replaces or deletes items without the engine's knowledge, and opens the result.
    fn damaged(self, changes: &[(Key, Option<Vec<u8>>)]) -> Self {
        {
            let core = &self.fs.core;
            let subvol = core.subvol(self.root().subvol).unwrap();
            let keys: Vec<Key> = changes.iter().map(|c| c.0).collect();
            let mut handle = core.begin(keys.len() as u64).unwrap();
            handle
                .edit(&subvol, &keys, |e| {
                    for (key, data) in changes {
                        if e.get(key).is_some() {
                            e.delete(key)?;
                        }
                        if let Some(data) = data {
                            e.insert(key, data)?;
                        }
                    }
                    Ok(())
                })
                .unwrap();
        }
        self.crash()
    }
}

const ROOT: ObjectId = ObjectId(256);

/// Every operation that removes the name `f` of the root fails with `Corrupt`, and the tree stays.
fn assert_stuck(w: &World) {
    w.fs.sync().unwrap();
    let before = w.items();
    let root = w.root();
    assert_err!(w.fs.unlink(root, b"f"), Error::Corrupt { .. });
    for mode in [RenameMode::Replace, RenameMode::Exchange, RenameMode::Whiteout { uid: 0, gid: 0 }]
    {
        assert_err!(w.fs.rename(root, b"f", root, b"g", mode), Error::Corrupt { .. });
        assert_err!(w.fs.rename(root, b"g", root, b"f", mode), Error::Corrupt { .. });
    }
    w.fs.sync().unwrap();
    assert_eq!(w.items(), before);
}

fn world() -> (World, InodeId) {
    let w = World::new();
    let f = w.file(w.root(), "f");
    w.file(w.root(), "g");
    (w, f)
}

#[test]
fn a_name_without_its_index() {
    let (w, f) = world();
    let w = w.damaged(&[(dir_index_key(ROOT, 2), None)]);
    assert_eq!(w.find(w.root(), "f").unwrap().id, f);
    assert_stuck(&w);
}

#[test]
fn a_name_whose_index_is_another_names() {
    let (w, f) = world();
    let other =
        DirEntryRef::inode(ObjectId(f.ino), Generation(1), FileType::Regular, b"other").encode();
    let w = w.damaged(&[(dir_index_key(ROOT, 2), Some(other))]);
    assert_stuck(&w);
}

#[test]
fn a_name_without_reference() {
    let (w, f) = world();
    let w = w.damaged(&[(inode_ref_key(ObjectId(f.ino), ROOT), None)]);
    assert_stuck(&w);
}

#[test]
fn a_name_of_an_inode_that_is_missing() {
    let (w, f) = world();
    let w = w.damaged(&[
        (inode_key(ObjectId(f.ino)), None),
        (inode_ref_key(ObjectId(f.ino), ROOT), None),
    ]);
    assert_err!(w.find(w.root(), "f"), Error::NotFound);
    assert_eq!(w.names(w.root()), [b"f", b"g"]);
    assert_stuck(&w);
}

#[test]
fn an_index_beyond_all_positions() {
    let (w, f) = world();
    let last = |index: u64| {
        let entry =
            DirEntryRef::inode(ObjectId(f.ino), Generation(1), FileType::Regular, b"last").encode();
        [(dir_index_key(ROOT, index), Some(entry))]
    };
    // Listing ends, and nothing can be added behind that index. The entry there can still be
    // removed.
    for index in [u64::MAX, i64::MAX as u64] {
        let w = world().0.damaged(&last(index));
        assert_eq!(w.names(w.root()), [b"f", b"g"]);
        assert_err!(w.fs.create(w.root(), b"x", &new(FileKind::Regular)), Error::Overflow);
        w.fs.unlink(w.root(), b"f").unwrap();
    }
    drop(w);
}

#[test]
fn directories_within_each_other() {
    let w = World::new();
    let a = w.dir(w.root(), "a");
    let b = w.dir(a, "b");
    w.dir(b, "c");
    w.dir(w.root(), "d");
    let mut up = Vec::new();
    InodeRef { index: 2, name: b"a" }.append_to(&mut up);
    let a_id = ObjectId(a.ino);
    let w = w.damaged(&[
        (inode_ref_key(a_id, ROOT), None),
        (inode_ref_key(a_id, ObjectId(b.ino)), Some(up)),
    ]);
    // Everything that follows the way up notices that it does not end.
    assert_err!(w.fs.rename(w.root(), b"d", b, b"e", RenameMode::Replace), Error::Corrupt { .. });
    assert_eq!(w.find(a, "..").unwrap().id, b);
}

#[test]
fn impossible_inodes() {
    for change in [
        (|i: &mut InodeItem| i.mode = 0o644.into()) as fn(&mut InodeItem),
        |i| i.mode = 0o1_100_644.into(),
        |i| i.size = u64::MAX.into(),
    ] {
        let (w, f) = world();
        w.fs.sync().unwrap();
        let key = inode_key(ObjectId(f.ino));
        let mut item = InodeItem::read_from_bytes(&w.items()[&key]).unwrap();
        change(&mut item);
        // The node checker refuses some of these when it writes. What it lets pass is refused when
        // the inode is used.
        let core = &w.fs.core;
        let subvol = core.subvol(f.subvol).unwrap();
        core.begin(1).unwrap().edit(&subvol, &[key], |e| e.update(&key, item.as_bytes())).unwrap();
        subvol.inodes.clear();
        assert_err!(w.fs.getattr(f), Error::Corrupt { .. });
        assert_err!(w.find(w.root(), "f"), Error::Corrupt { .. });
        assert_eq!(w.names(w.root()), [b"f", b"g"]);
    }
}

#[test]
fn orphan_items_that_announce_nothing() {
    let (w, f) = world();
    let none = Some(Vec::new());
    let w = w.damaged(&[
        (orphan_key(ROOT), none.clone()),
        (orphan_key(ObjectId(f.ino)), none.clone()),
        (orphan_key(ObjectId(5000)), none.clone()),
        (orphan_key(ObjectId(u64::MAX)), none),
    ]);
    // The root directory and a named file stay. ORPHAN items of nothing are removed.
    assert_eq!(w.attr(f).nlink, 1);
    assert_eq!(w.attr(w.root()).nlink, 1);
    assert_eq!(w.items().keys().filter(|k| k.objectid == ObjectId::ORPHAN).count(), 0);
    w.check();
}

#[test]
fn a_root_directory_without_links_is_not_deleted() {
    let (w, f) = world();
    w.fs.sync().unwrap();
    let key = inode_key(ROOT);
    let mut item = InodeItem::read_from_bytes(&w.items()[&key]).unwrap();
    item.nlink = 0.into();
    let w =
        w.damaged(&[(key, Some(item.as_bytes().to_vec())), (orphan_key(ROOT), Some(Vec::new()))]);
    assert_eq!(w.find(w.root(), "f").unwrap().id, f);
    assert_eq!(w.names(w.root()), [b"f", b"g"]);
}

#[test]
fn a_wrong_directory_size_hinders_nobody() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    w.fs.sync().unwrap();
    let key = inode_key(ObjectId(d.ino));
    for size in [0u64, 3, 1 << 40] {
        let mut item = InodeItem::read_from_bytes(&w.items()[&key]).unwrap();
        item.size = size.into();
        let core = &w.fs.core;
        let subvol = core.subvol(d.subvol).unwrap();
        core.begin(1).unwrap().edit(&subvol, &[key], |e| e.update(&key, item.as_bytes())).unwrap();
        w.file(d, "x");
        w.fs.setattr(d, &SetAttr::default()).unwrap();
        assert_err!(w.fs.rmdir(w.root(), b"d"), Error::NotEmpty);
        w.fs.unlink(d, b"x").unwrap();
    }
    w.fs.rmdir(w.root(), b"d").unwrap();
}

#[test]
fn an_entry_that_leads_nowhere() {
    let (w, _) = world();
    let entry = DirEntryRef {
        location: Key::default(),
        transid: Generation(1),
        kind: FileType::Regular,
        name: b"f",
        data: &[],
    };
    let key = dir_item_key(ROOT, b"f");
    let core = &w.fs.core;
    let subvol = core.subvol(w.root().subvol).unwrap();
    core.begin(1).unwrap().edit(&subvol, &[key], |e| e.update(&key, &entry.encode())).unwrap();
    assert_err!(w.find(w.root(), "f"), Error::Corrupt { .. });
    assert_err!(w.fs.unlink(w.root(), b"f"), Error::Corrupt { .. });
}
