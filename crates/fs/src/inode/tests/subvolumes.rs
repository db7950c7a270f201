//! Subvolumes: making, snapshotting, moving, deleting.

use super::*;
use crate::RenameMode;
use larder_format::TreeId;

fn dir() -> NewInode<'static> {
    new(FileKind::Directory)
}

fn read(w: &World, id: InodeId) -> Vec<u8> {
    let mut buf = vec![0; usize::try_from(w.attr(id).size).unwrap()];
    let n = w.fs.read(id, 0, &mut buf).unwrap();
    buf.truncate(n);
    buf
}

fn top(subvol: TreeId) -> InodeId {
    InodeId { subvol, ino: 256 }
}

#[test]
fn a_new_subvolume_is_there_at_once_and_after_a_crash() {
    let w = World::new();
    let made = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap();
    assert_eq!((made.id.subvol.0, made.id.ino, made.size), (256, 256, 0));
    assert_eq!(w.find(w.root(), "sub").unwrap().id, made.id);
    assert_eq!(w.find(made.id, "..").unwrap().id, w.root());
    let file = w.file(made.id, "file");
    w.fs.write(file, 0, b"hello").unwrap();
    let nested = w.fs.create_subvolume(made.id, b"nested", &dir()).unwrap();
    assert_err!(w.fs.create_subvolume(made.id, b"nested", &dir()), Error::Exists);
    assert_eq!(w.fs.subvolume_path(nested.id.subvol).unwrap(), b"sub/nested");
    let w = w.crash();
    let found = w.find(w.root(), "sub").unwrap();
    assert_eq!(read(&w, w.find(found.id, "file").unwrap().id), b"hello");
    let info = w.fs.subvolume(nested.id.subvol).unwrap();
    assert_eq!(info.parent, Some((made.id.subvol, 256, b"nested".to_vec())));
    assert_ne!(info.uuid, [0; 16]);
    assert_eq!((info.parent_uuid, info.received_uuid), ([0; 16], [0; 16]));
    assert_eq!(
        w.fs.subvolumes().unwrap().iter().map(|s| s.id.0).collect::<Vec<_>>(),
        [5, 256, 257]
    );
    let next = w.fs.create_subvolume(w.root(), b"next", &dir()).unwrap();
    assert_eq!(next.id.subvol.0, 258);
    w.check();
}

#[test]
fn a_snapshot_stays_as_it_was() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    for n in 0..300 {
        let f = w.file(sub, format!("file {n}"));
        w.fs.write(f, 0, format!("contents {n}").repeat(n * 3 + 1).as_bytes()).unwrap();
    }
    let snap = w.fs.snapshot(sub.subvol, w.root(), b"snap", false).unwrap();
    let frozen = w.fs.snapshot(sub.subvol, w.root(), b"frozen", true).unwrap();
    for n in 0..300 {
        let f = w.find(sub, format!("file {n}")).unwrap().id;
        match n % 3 {
            0 => w.fs.unlink(sub, format!("file {n}").as_bytes()).unwrap(),
            1 => w.fs.write(f, 2, b"XXX").unwrap(),
            _ => {}
        }
    }
    w.file(top(snap), "only here");
    assert_err!(w.fs.create(top(frozen), b"no", &new(FileKind::Regular)), Error::SubvolumeReadOnly);
    let (from, to) = (w.find(sub, "file 2").unwrap().id, w.find(top(frozen), "file 2").unwrap().id);
    for (offset, len) in [(0, 1), (1 << 30, 1), (0, 0)] {
        assert_err!(w.fs.copy_range(from.at(offset), to.at(0), len), Error::SubvolumeReadOnly);
    }
    let w = w.crash();
    for subvol in [snap, frozen] {
        for n in 0..300 {
            let f = w.find(top(subvol), format!("file {n}")).unwrap().id;
            assert_eq!(read(&w, f), format!("contents {n}").repeat(n * 3 + 1).as_bytes(), "{n}");
        }
    }
    assert_err!(w.find(sub, "only here"), Error::NotFound);
    assert_err!(w.find(top(frozen), "only here"), Error::NotFound);
    assert_err!(w.find(sub, "file 0"), Error::NotFound);
    let (source, copy) = (w.fs.subvolume(sub.subvol).unwrap(), w.fs.subvolume(snap).unwrap());
    assert_eq!(copy.parent_uuid, source.uuid);
    assert!(w.fs.subvolume(frozen).unwrap().read_only && !copy.read_only);
    w.check();
}

#[test]
fn a_snapshot_of_what_it_hangs_in_does_not_contain_itself() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    for n in 0..200 {
        w.file(d, format!("some file with a rather long name {n}"));
    }
    let one = w.fs.snapshot(w.root().subvol, w.root(), b"one", true).unwrap();
    let two = w.fs.snapshot(w.root().subvol, d, b"two", true).unwrap();
    assert_eq!(w.names(top(one)), [b"d"]);
    assert_eq!(w.names(top(two)), [b"d".to_vec(), b"one".to_vec()]);
    // The earlier snapshot is a placeholder in the later one.
    assert_eq!(w.find(top(two), "one").unwrap().id.ino, 2);
    w.check();
    let w = w.crash();
    assert_eq!(w.names(w.root()), [b"d".to_vec(), b"one".to_vec()]);
    assert_eq!(w.names(top(one)), [b"d"]);
}

#[test]
fn snapshots_at_the_same_time_share_a_commit_and_are_whole() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    for n in 0..500 {
        w.file(sub, format!("file with a name {n}"));
    }
    let dirs: Vec<InodeId> = (0..8).map(|n| w.dir(w.root(), format!("dir {n}"))).collect();
    std::thread::scope(|s| {
        for d in &dirs {
            let w = &w;
            s.spawn(move || {
                for n in 0..4 {
                    w.fs.snapshot(sub.subvol, *d, format!("s{n}").as_bytes(), n % 2 == 0).unwrap();
                }
            });
        }
        let w = &w;
        s.spawn(move || {
            // Pairs of names appear together in one directory edit or not at all.
            for n in 0..400 {
                w.fs.rename(
                    sub,
                    format!("file with a name {n}").as_bytes(),
                    sub,
                    format!("renamed {n}").as_bytes(),
                    RenameMode::Replace,
                )
                .unwrap();
            }
        });
    });
    let w = w.crash();
    for d in &dirs {
        for n in 0..4 {
            let snap = w.find(*d, format!("s{n}")).unwrap().id;
            assert_eq!(w.names(snap).len(), 500, "a name was seen twice or not at all");
        }
    }
    w.check();
}

#[test]
fn the_cost_of_a_snapshot_does_not_grow_with_the_subvolume() {
    let cost = |files: usize| {
        let w = World::new();
        let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
        for n in 0..files {
            w.file(sub, format!("file {n}"));
        }
        w.fs.sync().unwrap();
        let before = w.fs.stats();
        w.fs.snapshot(sub.subvol, w.root(), b"snap", true).unwrap();
        let after = w.fs.stats();
        assert_eq!(after.commits, before.commits + 1);
        after.nodes_written - before.nodes_written
    };
    let (few, many) = (cost(10), cost(20_000));
    assert!(many <= few + 8, "{few} nodes for 10 files, {many} for 20,000");
}

#[test]
fn a_deleted_subvolume_gives_its_space_back() {
    let w = World::new();
    w.fs.sync().unwrap();
    let used = w.fs.info().bytes_used;
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    for n in 0..2000 {
        let f = w.file(sub, format!("file with a longer name {n}"));
        if n % 10 == 0 {
            w.fs.write(f, 0, &vec![7; 20_000]).unwrap();
        }
    }
    let snap = w.fs.snapshot(sub.subvol, w.root(), b"snap", false).unwrap();
    for n in 0..2000 {
        if n % 7 == 0 {
            let f = w.find(top(snap), format!("file with a longer name {n}")).unwrap().id;
            w.fs.write(f, 0, &vec![9; 30_000]).unwrap();
        }
    }
    w.fs.sync().unwrap();
    // The original goes first: what the snapshot keeps of it must not depend on it any more.
    assert_eq!(w.fs.delete_subvolume(w.root(), b"sub").unwrap(), sub.subvol);
    assert_err!(w.find(w.root(), "sub"), Error::NotFound);
    assert_err!(w.fs.getattr(sub), Error::NotFound);
    w.fs.wait_for_drops().unwrap();
    let w = w.crash();
    assert_eq!(
        w.fs.subvolumes().unwrap().iter().map(|s| s.id).collect::<Vec<_>>(),
        [ObjectId(5), snap]
    );
    for n in 0..2000 {
        let f = w.find(top(snap), format!("file with a longer name {n}")).unwrap().id;
        let want = match n {
            n if n % 7 == 0 => vec![9; 30_000],
            n if n % 10 == 0 => vec![7; 20_000],
            _ => vec![],
        };
        assert_eq!(read(&w, f), want, "{n}");
    }
    w.fs.delete_subvolume(w.root(), b"snap").unwrap();
    w.fs.wait_for_drops().unwrap();
    w.fs.sync().unwrap();
    assert_eq!(w.fs.info().bytes_used, used);
    w.check();
}

#[test]
fn deletion_goes_on_after_a_crash() {
    let w = World::new();
    w.fs.sync().unwrap();
    let used = w.fs.info().bytes_used;
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    for n in 0..3000 {
        w.file(sub, format!("file with a longer name {n}"));
    }
    w.fs.delete_subvolume(w.root(), b"sub").unwrap();
    w.fs.sync().unwrap();
    let w = w.reopen();
    assert_err!(w.find(w.root(), "sub"), Error::NotFound);
    w.fs.wait_for_drops().unwrap();
    w.fs.sync().unwrap();
    assert_eq!(w.fs.info().bytes_used, used);
}

#[test]
fn some_subvolumes_are_not_deleted() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    let nested = w.fs.create_subvolume(sub, b"nested", &dir()).unwrap().id;
    w.dir(w.root(), "plain");
    assert_err!(w.fs.delete_subvolume(w.root(), b"sub"), Error::NotEmpty);
    assert_err!(w.fs.delete_subvolume(w.root(), b"plain"), Error::Invalid(_));
    assert_err!(w.fs.delete_subvolume(w.root(), b"none"), Error::NotFound);
    w.fs.set_default_subvolume(nested.subvol).unwrap();
    assert_eq!(w.fs.default_subvolume().unwrap(), nested.subvol);
    assert_err!(w.fs.delete_subvolume(sub, b"nested"), Error::NotPermitted(_));
    w.fs.set_default_subvolume(ObjectId(5)).unwrap();
    w.file(nested, "file");
    assert_err!(w.fs.rmdir(sub, b"nested"), Error::NotEmpty);
    w.fs.unlink(nested, b"file").unwrap();
    w.fs.rmdir(sub, b"nested").unwrap();
    w.fs.delete_subvolume(w.root(), b"sub").unwrap();
    w.check();
    assert_eq!(w.fs.subvolumes().unwrap().len(), 1);
}

#[test]
fn subvolumes_move() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    let other = w.fs.create_subvolume(w.root(), b"other", &dir()).unwrap().id;
    let d = w.dir(w.root(), "d");
    w.dir(d, "empty");
    let full = w.dir(d, "full");
    w.file(full, "file");
    let mv = |from, a: &str, to, b: &str| {
        w.fs.rename(from, a.as_bytes(), to, b.as_bytes(), RenameMode::Replace)
    };
    mv(w.root(), "sub", w.root(), "renamed").unwrap();
    mv(w.root(), "renamed", d, "sub").unwrap();
    assert_err!(mv(d, "sub", d, "full"), Error::NotEmpty);
    mv(d, "sub", d, "empty").unwrap();
    assert_err!(mv(d, "empty", w.root(), "other"), Error::NotEmpty);
    mv(d, "empty", other, "across").unwrap();
    assert_err!(mv(w.root(), "other", sub, "loop"), Error::Invalid(_));
    let swap = |from, a: &str, to, b: &str| {
        w.fs.rename(from, a.as_bytes(), to, b.as_bytes(), RenameMode::Exchange)
    };
    w.file(other, "inside");
    assert_err!(swap(w.root(), "other", other, "inside"), Error::Invalid(_));
    assert_err!(swap(w.root(), "other", sub, "nothing"), Error::Invalid(_));
    assert_eq!(w.find(other, "across").unwrap().id, sub);
    assert_eq!(w.fs.subvolume_path(sub.subvol).unwrap(), b"other/across");
    assert_eq!(w.find(sub, "..").unwrap().id, other);
    w.check();
    let w = w.crash();
    assert_eq!(w.find(other, "across").unwrap().id, sub);
    assert_eq!(w.find(sub, "..").unwrap().id, other);
    assert_eq!(w.names(d), [b"full"]);
}

#[test]
fn subvolumes_change_places() {
    let w = World::new();
    let a = w.fs.create_subvolume(w.root(), b"a", &dir()).unwrap().id;
    let b = w.fs.create_subvolume(w.root(), b"b", &dir()).unwrap().id;
    let c = w.fs.create_subvolume(b, b"c", &dir()).unwrap().id;
    let d = w.dir(w.root(), "d");
    let (full, file) = (w.dir(d, "full"), w.file(w.root(), "file"));
    w.file(full, "inside");
    w.fs.sync().unwrap();
    let swap = |from, a: &str, to, b: &str| {
        w.fs.rename(from, a.as_bytes(), to, b.as_bytes(), RenameMode::Exchange)
    };
    let root = w.root();
    // Both in one tree, and in two.
    swap(root, "a", root, "b").unwrap();
    assert_eq!([w.find(root, "a").unwrap().id, w.find(root, "b").unwrap().id], [b, a]);
    swap(root, "b", b, "c").unwrap();
    assert_eq!([w.find(root, "b").unwrap().id, w.find(b, "c").unwrap().id], [c, a]);
    assert_eq!(w.fs.subvolume_path(a.subvol).unwrap(), b"a/c");
    // With a file and with a directory that is not empty, in either order.
    swap(root, "b", root, "file").unwrap();
    swap(d, "full", root, "file").unwrap();
    assert_eq!([w.find(root, "b").unwrap().id, w.find(root, "file").unwrap().id], [file, full]);
    assert_eq!(w.find(d, "full").unwrap().id, c);
    swap(d, "full", d, "full").unwrap();
    // Names that lie in themselves, in another tree, or nowhere.
    for (from, one, to, other) in
        [(root, "d", d, "full"), (d, "full", root, "d"), (root, "a", b, "c"), (b, "c", root, "a")]
    {
        assert_err!(swap(from, one, to, other), Error::Invalid(_));
    }
    for (from, one, to, other) in
        [(b, "c", root, "b"), (root, "b", b, "c"), (root, "d", b, "c"), (b, "c", root, "d")]
    {
        assert_err!(swap(from, one, to, other), Error::CrossSubvolume);
    }
    assert_err!(swap(root, "a", root, "nothing"), Error::NotFound);
    assert_err!(swap(root, "nothing", root, "a"), Error::NotFound);
    // The entry of a subvolume that is not in this snapshot stays where it is.
    let made = w.fs.snapshot(b.subvol, root, b"snapshot", false).unwrap();
    let top = InodeId { subvol: made, ino: ObjectId::FIRST_FREE.0 };
    w.file(top, "beside");
    assert_err!(swap(top, "c", top, "beside"), Error::NotEmpty);
    assert_err!(swap(root, "a", top, "c"), Error::NotEmpty);
    w.check();
    let w = w.crash();
    assert_eq!([w.find(root, "a").unwrap().id, w.find(root, "b").unwrap().id], [b, file]);
    assert_eq!([w.find(b, "c").unwrap().id, w.find(d, "full").unwrap().id], [a, c]);
    assert_eq!(w.names(w.find(root, "file").unwrap().id), [b"inside"]);
    assert_eq!(w.find(c, "..").unwrap().id, d);
}

#[test]
fn subvolumes_leave_whiteouts() {
    let w = World::new();
    let root = w.root();
    let a = w.fs.create_subvolume(root, b"a", &dir()).unwrap().id;
    let b = w.fs.create_subvolume(root, b"b", &dir()).unwrap().id;
    w.dir(root, "empty");
    w.file(w.dir(root, "full"), "inside");
    w.file(root, "file");
    let mv = |from, a: &str, to, b: &str| {
        w.fs.rename(from, a.as_bytes(), to, b.as_bytes(), RenameMode::Whiteout { uid: 7, gid: 8 })
    };
    assert_err!(mv(root, "a", root, "full"), Error::NotEmpty);
    assert_err!(mv(root, "a", root, "b"), Error::NotEmpty);
    assert_err!(mv(root, "a", root, "file"), Error::NotDirectory);
    assert_err!(mv(root, "a", a, "loop"), Error::Invalid(_));
    mv(root, "a", root, "empty").unwrap();
    mv(root, "empty", b, "across").unwrap();
    for name in ["a", "empty"] {
        let left = w.find(root, name).unwrap();
        assert_eq!(
            (left.kind, left.rdev, left.perm, left.nlink),
            (FileKind::CharDevice, 0, 0, 1),
            "{name}"
        );
        assert_eq!((left.uid, left.gid), (7, 8));
    }
    w.check();
    let w = w.crash();
    assert_eq!(w.find(b, "across").unwrap().id, a);
    assert_eq!(w.find(root, "empty").unwrap().kind, FileKind::CharDevice);
    w.fs.unlink(root, b"a").unwrap();
    w.check();
}

#[test]
fn read_only_comes_and_goes() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    assert_err!(w.fs.create(sub, b"no", &new(FileKind::Regular)), Error::SubvolumeReadOnly);
    let w = w.crash();
    assert_err!(w.fs.create(sub, b"no", &new(FileKind::Regular)), Error::SubvolumeReadOnly);
    w.fs.set_subvolume_read_only(sub.subvol, false, false).unwrap();
    w.file(sub, "yes");
    let from = crate::Received { uuid: [3; 16], ..crate::Received::default() };
    w.fs.set_subvolume_received(sub.subvol, from).unwrap();
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    let w = w.crash();
    assert_eq!(w.fs.subvolume(sub.subvol).unwrap().received_uuid, [3; 16]);
    assert_err!(w.fs.set_subvolume_read_only(sub.subvol, false, false), Error::Busy(_));
    w.fs.set_subvolume_read_only(sub.subvol, false, true).unwrap();
    let w = w.crash();
    assert_eq!(w.fs.subvolume(sub.subvol).unwrap().received_uuid, [0; 16]);
    w.file(sub, "again");
}

#[test]
fn what_is_read_as_a_whole_is_not_deleted_and_not_changed() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    let file = w.file(sub, "file");
    w.fs.write(file, 0, b"before").unwrap();
    assert_err!(w.fs.frozen(sub.subvol), Error::Invalid(_));
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    let (first, second) = (w.fs.frozen(sub.subvol).unwrap(), w.fs.frozen(sub.subvol).unwrap());
    let text = |frozen: &crate::Frozen| {
        let mut buf = [0; 6];
        assert_eq!(frozen.read(ObjectId(file.ino), 0, &mut buf).unwrap(), 6);
        buf
    };
    let refuses = || {
        assert_err!(w.fs.set_subvolume_read_only(sub.subvol, false, false), Error::Busy(_));
        assert_err!(w.fs.delete_subvolume(w.root(), b"sub"), Error::Busy(_));
    };
    refuses();
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    drop(first);
    refuses();
    assert_eq!(&text(&second), b"before");
    drop(second);
    w.fs.set_subvolume_read_only(sub.subvol, false, false).unwrap();
    // What is still in memory when it becomes read-only again is seen.
    w.fs.write(file, 0, b"behind").unwrap();
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    let third = w.fs.frozen(sub.subvol).unwrap();
    assert_eq!(&text(&third), b"behind");
    assert!(!third.parts(ObjectId(file.ino), 0, 1).unwrap().is_empty());
    drop(third);
    w.fs.delete_subvolume(w.root(), b"sub").unwrap();
    w.check();
}

#[test]
fn a_deleted_file_that_is_closed_does_not_disturb_a_reader_of_the_whole() {
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    let (open, stays) = (w.file(sub, "open"), w.file(sub, "stays"));
    w.fs.hold(open);
    w.fs.unlink(sub, b"open").unwrap();
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    let frozen = w.fs.frozen(sub.subvol).unwrap();
    assert!(frozen.inode(ObjectId(open.ino)).unwrap().is_none(), "it has no name");
    w.fs.release(open, 1);
    w.fs.sync().unwrap();
    assert!(frozen.inode(ObjectId(open.ino)).unwrap().is_none());
    assert!(frozen.inode(ObjectId(stays.ino)).unwrap().is_some());
}

#[test]
fn a_reader_of_the_whole_ends_when_it_is_told_to() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let w = World::new();
    let sub = w.fs.create_subvolume(w.root(), b"sub", &dir()).unwrap().id;
    w.fs.set_subvolume_read_only(sub.subvol, true, false).unwrap();
    let told = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&told);
    let frozen = w.fs.frozen(sub.subvol).unwrap();
    let frozen = frozen.ending_when(move || end.load(Ordering::Relaxed));
    let mut comparison = crate::Comparison::new(None, &frozen);
    assert!(comparison.step().unwrap().is_some());
    told.store(true, Ordering::Relaxed);
    assert_err!(frozen.inode(ObjectId(256)), Error::Busy(_));
    let mut comparison = crate::Comparison::new(None, &frozen);
    assert_err!(comparison.step(), Error::Busy(_));
}
