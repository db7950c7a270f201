//! Several names of one inode, and losing them.

use super::{World, assert_err, colliding_names, new};
use crate::mkfs::MkfsOptions;
use crate::{Error, FileKind, NewInode};
use larder_format::KeyType;

fn extrefs(w: &World) -> usize {
    w.items().keys().filter(|k| k.kind == KeyType::INODE_EXTREF).count()
}

#[test]
fn a_thousand_names_of_one_file() {
    let w = World::new();
    let other = w.dir(w.root(), "other");
    let id = w.file(w.root(), "first");
    let name = |n: u32| format!("link{n:04}_xxxxxxxxxxxxxxxxxxxx");
    for n in 0..1000 {
        let dir = if n % 10 == 0 { other } else { w.root() };
        assert_eq!(w.fs.link(id, dir, name(n).as_bytes()).unwrap().nlink, n + 2);
    }
    // 29 bytes and 10 of header each: 416 beside "first" fit the root's item.
    assert_eq!(extrefs(&w), 900 - 416);
    w.check();
    let w = w.reopen();
    assert_eq!(w.attr(id).nlink, 1001);
    for n in (0..1000).rev() {
        let dir = if n % 10 == 0 { other } else { w.root() };
        assert_eq!(w.find(dir, name(n)).unwrap().id, id);
        if n % 3 != 0 {
            w.fs.unlink(dir, name(n).as_bytes()).unwrap();
        }
    }
    w.check();
    let w = w.reopen();
    assert_eq!(w.attr(id).nlink, 1 + 334);
    // Renaming removes references from both kinds of items and finds room for new ones.
    for n in (0..1000).filter(|n| n % 3 == 0) {
        let dir = if n % 10 == 0 { other } else { w.root() };
        let to = format!("renamed{n}");
        w.fs.rename(dir, name(n).as_bytes(), other, to.as_bytes(), crate::RenameMode::Replace)
            .unwrap();
    }
    w.fs.unlink(w.root(), b"first").unwrap();
    assert_eq!((w.attr(id).nlink, extrefs(&w)), (334, 0));
    w.check();
    for name in w.names(other) {
        w.fs.unlink(other, &name).unwrap();
    }
    assert_err!(w.fs.getattr(id), Error::NotFound);
    w.check();
    assert!(!w.items().keys().any(|k| k.objectid.0 == id.ino), "items of a deleted file");
}

#[test]
fn references_with_equal_hashes_share_an_item() {
    let w = World::new();
    let id = w.file(w.root(), "f");
    // 255-byte names fill the ordinary item after 61 of them.
    for n in 0..61 {
        w.fs.link(id, w.root(), format!("{n:0255}").as_bytes()).unwrap();
    }
    let names: Vec<_> = colliding_names(6).collect();
    for name in &names[..40] {
        w.fs.link(id, w.root(), name).unwrap();
    }
    assert!((1..40).contains(&extrefs(&w)), "{} items", extrefs(&w));
    w.check();
    for name in names[..40].iter().step_by(3) {
        w.fs.unlink(w.root(), name).unwrap();
    }
    w.check();
    assert_eq!(w.attr(id).nlink, 1 + 61 + 40 - 14);
}

#[test]
fn without_extrefs_links_end_where_the_item_does() {
    let mut features = crate::mkfs::Features::default();
    features.apply("^extref").unwrap();
    let w = World::with(&MkfsOptions { features, ..MkfsOptions::default() });
    let id = w.file(w.root(), "first");
    let mut made = 0;
    let error = loop {
        match w.fs.link(id, w.root(), format!("{made:0255}").as_bytes()) {
            Ok(_) => made += 1,
            Err(e) => break e,
        }
    };
    assert!(matches!(error, Error::TooManyLinks), "{error}");
    assert_eq!(made, (16258 - 15) / 265);
    w.check();
    // Another directory has an item of its own.
    let d = w.dir(w.root(), "d");
    w.fs.link(id, d, b"one more").unwrap();
    w.check();
}

#[test]
fn what_cannot_be_linked() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    let f = w.file(d, "f");
    assert_err!(w.fs.link(d, w.root(), b"e"), Error::NotPermitted(_));
    assert_err!(w.fs.link(f, d, b"f"), Error::Exists);
    assert_err!(w.fs.link(f, f, b"g"), Error::NotDirectory);
    w.fs.hold(f);
    w.fs.hold(d);
    w.fs.unlink(d, b"f").unwrap();
    assert_err!(w.fs.link(f, d, b"f"), Error::NotFound);
    w.fs.rmdir(w.root(), b"d").unwrap();
    let g = w.file(w.root(), "g");
    assert_err!(w.fs.link(g, d, b"g"), Error::NotFound);
    assert_err!(w.fs.create(d, b"g", &new(FileKind::Regular)), Error::NotFound);
    assert_err!(w.fs.rename(w.root(), b"g", d, b"g", crate::RenameMode::Replace), Error::NotFound);
    assert_eq!(w.attr(d).nlink, 0);
    w.check();
}

#[test]
fn removing_asks_for_the_right_kind() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    w.file(w.root(), "f");
    w.file(d, "inside");
    assert_err!(w.fs.unlink(w.root(), b"d"), Error::IsDirectory);
    assert_err!(w.fs.rmdir(w.root(), b"f"), Error::NotDirectory);
    assert_err!(w.fs.rmdir(w.root(), b"d"), Error::NotEmpty);
    assert_err!(w.fs.rmdir(w.root(), b"missing"), Error::NotFound);
    assert_err!(w.fs.unlink(w.root(), b"missing"), Error::NotFound);
    assert_err!(w.fs.rmdir(w.root(), b"."), Error::Invalid(_));
    assert_err!(w.fs.rmdir(d, b".."), Error::NotEmpty);
    assert_err!(w.fs.unlink(w.root(), b".."), Error::IsDirectory);
    let before = w.attr(w.root());
    w.fs.unlink(d, b"inside").unwrap();
    w.fs.rmdir(w.root(), b"d").unwrap();
    let after = w.attr(w.root());
    assert_eq!(after.size, before.size - 2);
    assert!(after.mtime > before.mtime && after.ctime > before.ctime);
    assert_err!(w.fs.getattr(d), Error::NotFound);
    w.check();
}

#[test]
fn times_of_links() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    let f = w.file(w.root(), "f");
    let before = w.attr(f);
    let linked = w.fs.link(f, d, b"g").unwrap();
    assert!(linked.ctime > before.ctime);
    assert_eq!(linked.mtime, before.mtime);
    assert!(w.attr(d).mtime > before.ctime);
    w.fs.unlink(w.root(), b"f").unwrap();
    assert!(w.attr(f).ctime > linked.ctime);
    assert_eq!(w.attr(f).nlink, 1);
}

#[test]
fn a_failed_creation_leaves_nothing() {
    let w = World::new();
    let before = w.items();
    let huge = vec![b'v'; 16000];
    let xattrs = [(b"user.v".to_vec(), huge), (b"user.w".to_vec(), vec![b'w'; 16300])];
    let n = NewInode { xattrs: &xattrs, ..new(FileKind::Regular) };
    assert_err!(w.fs.create(w.root(), b"f", &n), Error::NoSpace);
    assert_err!(w.find(w.root(), "f"), Error::NotFound);
    assert_eq!(w.items(), before);
    w.file(w.root(), "f");
    w.check();
}
