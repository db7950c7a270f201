//! Several front ends of one engine: each has its own root and holds, and one leaves before the
//! others.

use super::{World, assert_err, new};
use crate::{Error, FileKind, SubvolChoice};

#[test]
fn a_file_lives_until_the_last_front_end_lets_go() {
    let w = World::new();
    let other = w.fs.another(&SubvolChoice::Id(5)).unwrap();
    let f = w.file(w.root(), "f");
    w.fs.hold(f);
    assert!(!other.knows(f) && w.fs.knows(f) && other.is_known_elsewhere(f));
    other.hold(f);
    assert!(other.knows(f) && w.fs.is_known_elsewhere(f));
    w.fs.unlink(w.root(), b"f").unwrap();
    w.fs.release(f, 1);
    assert_eq!(other.getattr(f).unwrap().nlink, 0, "the other one keeps it");
    let unnamed = other.create_unnamed(other.root(), &new(FileKind::Regular)).unwrap().id;
    let mine = w.fs.create_unnamed(w.root(), &new(FileKind::Regular)).unwrap().id;
    other.leave();
    assert_err!(w.fs.getattr(f), Error::NotFound);
    assert_err!(w.fs.getattr(unnamed), Error::NotFound);
    assert_eq!(w.attr(mine).nlink, 0, "what others hold stays");
    other.leave();
    // A new front end with the number of an old one has none of its holds.
    let third = w.fs.another(&SubvolChoice::Id(5)).unwrap();
    assert_eq!(third.held(usize::MAX), []);
    third.leave();
    w.fs.release(mine, 1);
    w.check();
}

#[test]
fn each_front_end_has_its_root() {
    let w = World::new();
    let sub =
        |dir, name: &[u8]| w.fs.create_subvolume(dir, name, &new(FileKind::Directory)).unwrap().id;
    let a = sub(w.root(), b"a");
    let b = sub(w.root(), b"b");
    let inner = sub(a, b"inner");
    let see = |path: &[u8]| w.fs.another(&SubvolChoice::Path(path.to_vec())).unwrap();
    let [in_a, in_b, in_inner] = [&b"/a"[..], b"b", b"a/inner/"].map(see);
    assert_eq!([in_a.root(), in_b.root(), in_inner.root()], [a, b, inner]);
    assert_eq!(in_a.lookup(a, b"..").unwrap().id, a);
    assert_eq!(w.fs.lookup(a, b"..").unwrap().id, w.root());
    assert_err!(w.fs.another(&SubvolChoice::Path(b"c".to_vec())), Error::Unsupported(_));
    // Both reach the same inodes, from above and from the same place.
    assert!(in_a.overlaps(&in_inner).unwrap() && in_inner.overlaps(&in_a).unwrap());
    assert!(w.fs.overlaps(&in_b).unwrap() && in_b.overlaps(&see(b"b")).unwrap());
    assert!(!in_a.overlaps(&in_b).unwrap() && !in_b.overlaps(&in_inner).unwrap());
    assert!(
        in_a.is_known_elsewhere(w.root())
            && w.fs.is_known_elsewhere(a)
            && !in_a.is_known_elsewhere(a)
    );
    // No front end's root can be deleted.
    assert_err!(in_a.delete_subvolume(a, b"inner"), Error::Busy(_));
    assert_err!(w.fs.rmdir(a, b"inner"), Error::Busy(_));
    in_inner.leave();
    in_a.delete_subvolume(a, b"inner").unwrap();
    // A front end that is dropped does not end the others.
    drop((in_a, in_b, in_inner));
    w.file(w.root(), "f");
    w.fs.sync().unwrap();
    w.check();
}
