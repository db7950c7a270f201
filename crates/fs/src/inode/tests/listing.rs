//! Directory listings.

use super::{World, assert_err, new};
use crate::{DirEntry, Error, FileKind, InodeId};
use std::collections::BTreeMap;

/// At most `most` entries from a position on: name, id, kind; and the position to go on from.
fn page(
    w: &World,
    dir: InodeId,
    from: u64,
    most: usize,
) -> (Vec<(Vec<u8>, InodeId, FileKind)>, u64) {
    let mut out = Vec::new();
    let mut next = from;
    w.fs.readdir(dir, from, &mut |e: &DirEntry<'_>| {
        if out.len() == most {
            return false;
        }
        assert!(e.next > next, "positions grow");
        next = e.next;
        out.push((e.name.to_vec(), e.id, e.kind));
        true
    })
    .unwrap();
    (out, next)
}

#[test]
fn dots_come_first_and_kinds_are_shown() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    let f = w.file(d, "f");
    let s = w.fs.create(d, b"s", &new(FileKind::Symlink)).unwrap().id;
    let (all, end) = page(&w, d, 0, 100);
    let dir = FileKind::Directory;
    let expected = vec![
        (b".".to_vec(), d, dir),
        (b"..".to_vec(), w.root(), dir),
        (b"f".to_vec(), f, FileKind::Regular),
        (b"s".to_vec(), s, FileKind::Symlink),
    ];
    assert_eq!(all, expected);
    assert_eq!(page(&w, d, end, 100), (vec![], end));
    for from in 0..4 {
        let mut at = 0;
        for _ in 0..from {
            at = page(&w, d, at, 1).1;
        }
        assert_eq!(page(&w, d, at, 100).0, expected[from..]);
    }
    let (root, _) = page(&w, w.root(), 0, 2);
    assert_eq!(root[1], (b"..".to_vec(), w.root(), dir));
    assert_eq!(w.find(w.root(), "..").unwrap().id, w.root());
    assert_eq!(w.find(d, "..").unwrap().id, w.root());
    assert_eq!(w.find(d, ".").unwrap().id, d);
    assert_err!(w.fs.readdir(f, 0, &mut |_| true), Error::NotDirectory);
    assert_eq!(page(&w, d, u64::MAX, 100).0, vec![]);
}

#[test]
fn what_stays_is_listed_once_while_entries_come_and_go() {
    let w = World::new();
    let name = |n: u64| format!("stays{n}");
    for n in 0..300 {
        w.file(w.root(), name(n));
        w.file(w.root(), format!("goes{n}"));
    }
    let mut seen = BTreeMap::new();
    let mut at = 0;
    let mut round = 0u64;
    loop {
        let (entries, next) = page(&w, w.root(), at, 7);
        if entries.is_empty() {
            break;
        }
        at = next;
        for (name, ..) in entries {
            *seen.entry(name).or_insert(0) += 1;
        }
        // Entries are removed before and behind the position, and added.
        for n in [round, 299 - round] {
            let _ = w.fs.unlink(w.root(), format!("goes{n}").as_bytes());
        }
        if round < 50 {
            w.file(w.root(), format!("comes{round}"));
        }
        round += 1;
    }
    for n in 0..300 {
        assert_eq!(seen.get(name(n).as_bytes()), Some(&1), "{}", name(n));
    }
    assert!(seen.values().all(|n| *n == 1));
    w.check();
}

#[test]
fn positions_are_not_given_out_again() {
    let w = World::new();
    w.file(w.root(), "a");
    let (_, end) = page(&w, w.root(), 0, 100);
    w.fs.unlink(w.root(), b"a").unwrap();
    let b = w.file(w.root(), "b");
    // A reader that has seen "a" must not take "b" for it.
    let (rest, _) = page(&w, w.root(), end, 100);
    assert_eq!(rest, vec![(b"b".to_vec(), b, FileKind::Regular)]);
    // Renaming moves an entry to the end.
    w.file(w.root(), "c");
    w.fs.rename(w.root(), b"b", w.root(), b"d", crate::RenameMode::Replace).unwrap();
    assert_eq!(w.names(w.root()), [b"c", b"d"]);
    w.check();
    let w = w.reopen();
    w.file(w.root(), "e");
    assert_eq!(w.names(w.root()), [b"c", b"d", b"e"]);
}

#[test]
fn who_renames_what_he_lists_comes_to_an_end() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    for n in 0..40 {
        w.file(d, format!("f{n}"));
    }
    rename_all(&w, d);
    // The highest position is known here. After opening it has to be looked up.
    rename_all(&w, d);
    rename_all(&w.reopen(), d);
}

fn rename_all(w: &World, d: InodeId) {
    let (mut at, mut seen) = (0, 0);
    loop {
        let mut names = Vec::new();
        w.fs.readdir_page(d, at, &mut |e| {
            at = e.next;
            names.push(e.name.to_vec());
            names.len() < 3
        })
        .unwrap();
        if names.is_empty() {
            break;
        }
        for name in names.iter().filter(|n| !n.starts_with(b".")) {
            seen += 1;
            let renamed = [b"r".as_slice(), name].concat();
            w.fs.rename(d, name, d, &renamed, crate::RenameMode::Replace).unwrap();
        }
    }
    assert_eq!(seen, 40);
    // A reader that begins again sees everything, and so does a reader that goes on from any
    // position without this limit.
    assert_eq!(page(w, d, 0, 100).0.len(), 42);
    assert_eq!(w.names(d).len(), 40);
}
