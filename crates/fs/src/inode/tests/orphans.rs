//! Inodes without names: kept while held, deleted afterwards, cleaned up after a crash.

use super::{World, assert_err, new, options};
use crate::{Error, FileKind, Filesystem, NewInode, OpenOptions, SetAttr, XattrMode};
use larder_format::{Key, KeyType, ObjectId};

fn orphans(w: &World) -> Vec<u64> {
    let is_one = |k: &&Key| k.objectid == ObjectId::ORPHAN;
    w.items().keys().filter(is_one).map(|k| k.offset).collect()
}

#[test]
fn a_held_file_outlives_its_names() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    w.fs.setxattr(f, b"user.x", b"1", XattrMode::Set).unwrap();
    w.fs.hold(f);
    w.fs.hold(f);
    w.fs.unlink(w.root(), b"f").unwrap();
    assert_eq!(w.attr(f).nlink, 0);
    w.fs.setattr(f, &SetAttr { perm: Some(0o600), ..SetAttr::default() }).unwrap();
    w.fs.setxattr(f, b"user.y", b"2", XattrMode::Set).unwrap();
    assert_eq!(orphans(&w), [f.ino]);
    w.check();
    w.fs.release(f, 1);
    assert_eq!(w.attr(f).perm, 0o600);
    w.fs.release(f, 1);
    assert_err!(w.fs.getattr(f), Error::NotFound);
    assert_eq!(orphans(&w), [0; 0]);
    w.check();
    assert!(!w.items().keys().any(|k| k.objectid.0 == f.ino));
    // Giving back a hold that is gone, or more holds than were taken, does no harm.
    w.fs.release(f, 3);
}

#[test]
fn a_crash_leaves_nothing_behind() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    let s = w.fs.create(d, b"s", &new(FileKind::Symlink)).unwrap().id;
    let f = w.file(d, "f");
    for n in 0..50 {
        w.fs.setxattr(f, format!("user.{n}").as_bytes(), &[7; 700], XattrMode::Set).unwrap();
    }
    for id in [d, s, f] {
        w.fs.hold(id);
    }
    w.fs.unlink(d, b"s").unwrap();
    w.fs.unlink(d, b"f").unwrap();
    w.fs.rmdir(w.root(), b"d").unwrap();
    let t = w.fs.create_unnamed(w.root(), &new(FileKind::Regular)).unwrap().id;
    w.check();
    assert_eq!(orphans(&w).len(), 4);
    let w = w.crash();
    assert_eq!(orphans(&w), [0; 0]);
    for id in [d, s, f, t] {
        assert_err!(w.fs.getattr(id), Error::NotFound);
    }
    w.check();
    assert_eq!(w.items().keys().filter(|k| k.kind == KeyType::INODE_ITEM).count(), 1);
}

#[test]
fn reading_only_leaves_orphans_alone() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    w.fs.hold(f);
    w.fs.unlink(w.root(), b"f").unwrap();
    w.fs.sync().unwrap();
    let device = w.device.copy();
    let fs =
        Filesystem::open(device.clone(), OpenOptions { read_only: true, ..options() }).unwrap();
    assert_eq!(fs.getattr(f).unwrap().nlink, 0);
    fs.release(f, 1);
    assert_err!(fs.create(fs.root(), b"x", &new(FileKind::Regular)), Error::ReadOnly(_));
    assert_err!(fs.unlink(fs.root(), b"x"), Error::ReadOnly(_));
    assert_err!(fs.setattr(f, &SetAttr::default()), Error::ReadOnly(_));
    fs.close().unwrap();
}

#[test]
fn closing_deletes_what_only_holds_kept() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    w.fs.hold(f);
    w.fs.unlink(w.root(), b"f").unwrap();
    w.fs.close().unwrap();
    let fs =
        Filesystem::open(w.device.clone(), OpenOptions { read_only: true, ..options() }).unwrap();
    assert_err!(fs.getattr(f), Error::NotFound);
}

#[test]
fn a_file_made_without_a_name_gets_one() {
    let w = World::new();
    let n = NewInode { xattrs: &[(b"user.a".to_vec(), b"b".to_vec())], ..new(FileKind::Regular) };
    let t = w.fs.create_unnamed(w.root(), &n).unwrap();
    assert_eq!(t.nlink, 0);
    assert_eq!(orphans(&w), [t.id.ino]);
    w.check();
    assert_eq!(w.fs.link(t.id, w.root(), b"name").unwrap().nlink, 1);
    assert_eq!(orphans(&w), [0; 0]);
    w.check();
    w.fs.release(t.id, 1);
    assert_eq!(w.fs.getxattr(t.id, b"user.a").unwrap(), b"b");
    // Once it has had a name and lost it, it is an ordinary deleted file.
    w.fs.hold(t.id);
    w.fs.unlink(w.root(), b"name").unwrap();
    assert_err!(w.fs.link(t.id, w.root(), b"again"), Error::NotFound);
    w.fs.release(t.id, 1);
    assert_err!(w.fs.getattr(t.id), Error::NotFound);
    // One that never got a name goes with its last hold.
    let t = w.fs.create_unnamed(w.root(), &new(FileKind::Regular)).unwrap();
    w.fs.release(t.id, 1);
    assert_err!(w.fs.getattr(t.id), Error::NotFound);
    assert_err!(w.fs.create_unnamed(w.root(), &new(FileKind::Directory)), Error::Invalid(_));
    w.check();
}

#[test]
fn memory_does_not_grow_with_inodes_that_were_looked_at() {
    let w = World::new();
    const FILES: u32 = 4000;
    for n in 0..FILES {
        let id = w.file(w.root(), format!("{n}"));
        w.fs.hold(id);
        if n % 500 == 0 {
            w.fs.sync().unwrap();
        }
    }
    w.fs.sync().unwrap();
    for n in 0..FILES {
        w.find(w.root(), format!("{n}")).unwrap();
    }
    let kept = w.fs.stats().inodes_in_memory;
    assert!(kept < 200, "{kept} inodes in memory");
    // An inode that has left memory comes back as it was, with its changes.
    let id = w.find(w.root(), "7").unwrap().id;
    w.fs.setattr(id, &SetAttr { uid: Some(9), ..SetAttr::default() }).unwrap();
    for n in 0..FILES {
        w.find(w.root(), format!("{n}")).unwrap();
    }
    assert_eq!(w.find(w.root(), "7").unwrap().uid, 9);
    w.fs.unlink(w.root(), b"7").unwrap();
    assert_eq!(w.attr(id).nlink, 0);
    for n in 8..FILES {
        w.find(w.root(), format!("{n}")).unwrap();
    }
    w.fs.release(id, 1);
    assert_err!(w.fs.getattr(id), Error::NotFound);
    w.check();
}

#[test]
fn data_goes_with_its_file() {
    let w = World::new();
    w.fs.sync().unwrap();
    let used = |w: &World| {
        // The commit that removes something writes new blocks itself. The next one shows what is
        // left.
        for _ in 0..2 {
            w.fs.setattr(w.root(), &SetAttr::default()).unwrap();
            w.fs.sync().unwrap();
        }
        w.fs.info().bytes_used
    };
    let before = used(&w);
    let make = |name: &str| {
        let f = w.file(w.root(), name);
        for n in 0..40u64 {
            w.fs.write(f, n * 2 * 65536, &[u8::try_from(n).unwrap(); 65536]).unwrap();
            w.fs.fsync(f, false).unwrap();
        }
        w.fs.write(f, 1 << 30, b"delayed").unwrap();
        f
    };
    // Removed without holds, with holds, and left by a crash for the next opening.
    make("a");
    let b = make("b");
    let c = make("c");
    assert!(used(&w) > before + 3 * 40 * 65536);
    w.fs.unlink(w.root(), b"a").unwrap();
    w.fs.hold(b);
    w.fs.unlink(w.root(), b"b").unwrap();
    let mut buf = [0; 7];
    assert_eq!(w.fs.read(b, 1 << 30, &mut buf).unwrap(), 7);
    assert_eq!(&buf, b"delayed");
    w.fs.write(b, 5 << 30, b"still written").unwrap();
    w.fs.release(b, 1);
    w.fs.hold(c);
    w.fs.unlink(w.root(), b"c").unwrap();
    assert!(used(&w) >= before + 40 * 65536);
    let w = w.crash();
    assert_eq!(used(&w), before);
    for id in [b, c] {
        assert_err!(w.fs.getattr(id), Error::NotFound);
        assert_err!(w.fs.write(id, 0, b"x"), Error::NotFound);
    }
    w.check();
}

#[test]
fn many_threads_make_hold_and_remove() {
    let w = World::new();
    let shared = w.file(w.root(), "shared");
    std::thread::scope(|s| {
        for t in 0..4u8 {
            let w = &w;
            s.spawn(move || {
                let (fs, root) = (&w.fs, w.root());
                for n in 0..300u32 {
                    let name = format!("{t}-{n}").into_bytes();
                    let id = fs.create(root, &name, &new(FileKind::Regular)).unwrap().id;
                    fs.hold(id);
                    fs.write(id, 0, &[t; 3000]).unwrap();
                    fs.link(shared, root, &[&name[..], b"-link"].concat()).unwrap();
                    if n % 3 == 0 {
                        fs.unlink(root, &name).unwrap();
                    }
                    if n % 40 == 0 {
                        fs.sync().unwrap();
                    }
                    // Others come and go, so this one is removed from memory and read again.
                    for other in 0..20 {
                        let _ = fs.lookup(
                            root,
                            format!("{}-{}", (t + 1) % 4, n.saturating_sub(other)).as_bytes(),
                        );
                    }
                    let mut buf = [0; 3001];
                    assert_eq!(fs.read(id, 0, &mut buf).unwrap(), 3000);
                    assert_eq!(buf[..3000], [t; 3000]);
                    assert_eq!(fs.getattr(id).unwrap().nlink, u32::from(n % 3 != 0));
                    fs.release(id, 1);
                    assert_eq!(fs.getattr(id).is_ok(), n % 3 != 0);
                    if n % 2 == 0 {
                        fs.unlink(root, &[&name[..], b"-link"].concat()).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(w.attr(shared).nlink, 1 + 4 * 150);
    assert_eq!(w.names(w.root()).len(), 1 + 4 * 200 + 4 * 150);
    w.check();
}
