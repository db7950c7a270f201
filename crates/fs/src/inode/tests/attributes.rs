//! Attributes, flags and extended attributes.

use super::{World, assert_err, colliding_names, new};
use crate::{
    Error, FileKind, InodeId, NewInode, RenameMode, SetAttr, SetTime, Surveyed, Timestamp,
    XattrMode,
};
use XattrMode::{Create, Replace, Set};
use larder_format::Key;
use larder_format::items::InodeFlags;
use larder_format::items::keys::xattr_key;

fn flags(flags: InodeFlags) -> SetAttr {
    SetAttr { flags: Some(flags.bits()), ..SetAttr::default() }
}

#[test]
fn attributes_change_and_stay() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    let before = w.attr(f);
    let t = Timestamp { sec: -5, nsec: 999_999_999 };
    let changes = SetAttr {
        perm: Some(0o4711),
        uid: Some(1),
        gid: Some(2),
        atime: Some(SetTime::To(t)),
        mtime: Some(SetTime::Now),
        ..SetAttr::default()
    };
    let after = w.fs.setattr(f, &changes).unwrap();
    assert_eq!((after.perm, after.uid, after.gid, after.atime), (0o4711, 1, 2, t));
    assert!(after.mtime > before.mtime && after.ctime > before.ctime);
    assert_eq!((after.kind, after.otime, after.nlink), (before.kind, before.otime, 1));
    let touched = w.fs.setattr(f, &SetAttr::default()).unwrap();
    assert!(touched.ctime > after.ctime);
    assert_eq!(crate::Attr { ctime: after.ctime, ..touched }, after);
    w.check();
    let w = w.reopen();
    assert_eq!(w.attr(f).ctime, touched.ctime);
    assert_eq!(crate::Attr { ctime: after.ctime, ..w.attr(f) }, after);
    let chosen = w.fs.setattr(f, &SetAttr { ctime: Some(t), ..SetAttr::default() }).unwrap();
    assert_eq!(chosen.ctime, t);
    let size = SetAttr { size: Some(5), ..SetAttr::default() };
    let d = w.dir(w.root(), "d");
    assert_err!(w.fs.setattr(d, &size), Error::IsDirectory);
    let s = w.fs.create(d, b"s", &new(FileKind::Symlink)).unwrap().id;
    assert_err!(w.fs.setattr(s, &size), Error::Invalid(_));
    let grown = w.fs.setattr(f, &size).unwrap();
    assert_eq!((grown.size, grown.mtime), (5, grown.ctime));
}

#[test]
fn immutable_and_append_only() {
    let w = World::new();
    let d = w.dir(w.root(), "d");
    let f = w.file(d, "f");
    let full = w.dir(d, "full");
    w.file(full, "inside");
    let free = w.file(w.root(), "free");
    let perm = SetAttr { perm: Some(0), ..SetAttr::default() };
    let now = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    let then = SetAttr { mtime: Some(SetTime::To(Timestamp::default())), ..SetAttr::default() };
    for flag in [InodeFlags::IMMUTABLE, InodeFlags::APPEND] {
        w.fs.setattr(f, &flags(flag)).unwrap();
        assert_err!(w.fs.setattr(f, &perm), Error::NotPermitted(_));
        assert_err!(w.fs.setattr(f, &then), Error::NotPermitted(_));
        assert_eq!(w.fs.setattr(f, &now).is_ok(), flag == InodeFlags::APPEND);
        assert_err!(w.fs.unlink(d, b"f"), Error::NotPermitted(_));
        assert_err!(w.fs.link(f, d, b"g"), Error::NotPermitted(_));
        assert_err!(w.fs.rename(d, b"f", d, b"g", RenameMode::Replace), Error::NotPermitted(_));
        assert_err!(
            w.fs.rename(w.root(), b"free", d, b"f", RenameMode::Replace),
            Error::NotPermitted(_)
        );
        assert_err!(w.fs.setxattr(f, b"user.a", b"", Set), Error::NotPermitted(_));
        w.fs.setattr(f, &flags(InodeFlags::empty())).unwrap();

        w.fs.setattr(d, &flags(flag)).unwrap();
        assert_err!(w.fs.unlink(d, b"f"), Error::NotPermitted(_));
        assert_err!(w.fs.rename(d, b"f", d, b"g", RenameMode::Replace), Error::NotPermitted(_));
        // This comes before all other errors.
        assert_err!(w.fs.rmdir(d, b"full"), Error::NotPermitted(_));
        assert_err!(w.fs.rmdir(d, b"f"), Error::NotPermitted(_));
        // Names may be added to an append-only directory.
        let added = w.fs.create(d, format!("{flag:?}").as_bytes(), &new(FileKind::Regular));
        assert_eq!(added.is_ok(), flag == InodeFlags::APPEND);
        assert_eq!(
            w.fs.link(free, d, format!("l{flag:?}").as_bytes()).is_ok(),
            flag == InodeFlags::APPEND
        );
        w.fs.setattr(d, &flags(InodeFlags::empty())).unwrap();
    }
    w.fs.unlink(d, b"f").unwrap();
    w.check();
}

#[test]
fn flags_of_data() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    let d = w.dir(w.root(), "d");
    let nocow = InodeFlags::NODATACOW;
    let got = |id| InodeFlags::from_bits_retain(w.attr(id).flags);
    w.fs.setattr(f, &flags(nocow)).unwrap();
    assert_eq!(got(f), nocow | InodeFlags::NODATASUM);
    assert_err!(w.fs.setattr(f, &flags(nocow | InodeFlags::COMPRESS)), Error::Invalid(_));
    assert_err!(w.fs.setattr(f, &flags(InodeFlags::COMPRESS)), Error::Invalid(_));
    assert_err!(w.fs.setxattr(f, b"btrfs.compression", b"zstd", Set), Error::Invalid(_));
    w.fs.setattr(f, &flags(InodeFlags::empty())).unwrap();
    assert_eq!(got(f), InodeFlags::empty());
    assert_err!(
        w.fs.setattr(f, &flags(InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS)),
        Error::Invalid(_)
    );
    assert_err!(w.fs.setattr(f, &flags(InodeFlags::READONLY)), Error::NotSupported(_));
    w.fs.setattr(d, &flags(nocow)).unwrap();
    assert_eq!(got(d), nocow);
    let inside = w.file(d, "inside");
    assert_eq!(got(inside), nocow | InodeFlags::NODATASUM);
    w.fs.setattr(inside, &SetAttr { size: Some(1), ..SetAttr::default() }).unwrap();
    w.fs.setattr(inside, &flags(InodeFlags::NODUMP)).unwrap();
    assert_eq!(got(inside), nocow | InodeFlags::NODATASUM | InodeFlags::NODUMP);
}

#[test]
fn the_compression_property_and_the_flags_are_one() {
    let w = World::new();
    const P: &[u8] = b"btrfs.compression";
    let d = w.dir(w.root(), "d");
    let got = |id| InodeFlags::from_bits_retain(w.attr(id).flags);
    w.fs.setxattr(d, P, b"zstd", Set).unwrap();
    assert_eq!(got(d), InodeFlags::COMPRESS);
    w.fs.sync().unwrap();
    let incompat = w.fs.core.superblock.lock().incompat();
    assert!(incompat.contains(larder_format::features::Incompat::COMPRESS_ZSTD), "{incompat:?}");
    // Files and directories inherit both; a symlink has nothing to compress.
    let f = w.file(d, "f");
    let e = w.dir(d, "e");
    let s = w.fs.create(d, b"s", &new(FileKind::Symlink)).unwrap().id;
    for id in [f, e] {
        assert_eq!(
            (got(id), w.fs.getxattr(id, P).unwrap()),
            (InodeFlags::COMPRESS, b"zstd".to_vec())
        );
    }
    assert_err!(w.fs.getxattr(s, P), Error::NoAttribute);
    w.fs.setxattr(f, P, b"none", Replace).unwrap();
    assert_eq!(got(f), InodeFlags::NOCOMPRESS);
    w.fs.setattr(f, &flags(InodeFlags::COMPRESS)).unwrap();
    assert_eq!(w.fs.getxattr(f, P).unwrap(), b"zlib");
    w.fs.setattr(f, &flags(InodeFlags::NOCOMPRESS)).unwrap();
    assert_err!(w.fs.getxattr(f, P), Error::NoAttribute);
    w.fs.setxattr(e, P, b"", Set).unwrap();
    assert_eq!(got(e), InodeFlags::empty());
    assert_eq!(w.fs.listxattr(e).unwrap(), [b""; 0]);
    w.fs.setxattr(d, P, b"lzo", Replace).unwrap();
    w.fs.removexattr(d, P).unwrap();
    assert_eq!(got(d), InodeFlags::empty());
    for bad in [&b"gzip"[..], b"zst", b"9"] {
        assert_err!(w.fs.setxattr(f, P, bad, Set), Error::Invalid(_));
    }
    assert_err!(w.fs.setxattr(f, b"btrfs.other", b"1", Set), Error::Invalid(_));
    // Accepted and forgotten, as on Linux.
    w.fs.setxattr(s, P, b"zlib", Set).unwrap();
    assert_err!(w.fs.getxattr(s, P), Error::NoAttribute);
    // A level is kept where it was set. What is made there gets only the method.
    w.fs.setxattr(d, P, b"zstd:9", Set).unwrap();
    assert_eq!(w.fs.getxattr(d, P).unwrap(), b"zstd:9");
    let g = w.file(d, "g");
    assert_eq!(w.fs.getxattr(g, P).unwrap(), b"zstd");
    // Neither can take the other's place in one step.
    assert_err!(w.fs.setattr(d, &flags(InodeFlags::NODATACOW)), Error::Invalid(_));
    w.check();
}

#[test]
fn extended_attributes() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    assert_err!(w.fs.getxattr(f, b"user.a"), Error::NoAttribute);
    assert_err!(w.fs.removexattr(f, b"user.a"), Error::NoAttribute);
    assert_err!(w.fs.setxattr(f, b"user.a", b"1", Replace), Error::NoAttribute);
    let before = w.attr(f);
    w.fs.setxattr(f, b"user.a", b"1", Create).unwrap();
    assert!(w.attr(f).ctime > before.ctime);
    assert_eq!(w.attr(f).mtime, before.mtime);
    assert_err!(w.fs.setxattr(f, b"user.a", b"2", Create), Error::Exists);
    w.fs.setxattr(f, b"user.a", b"2", Replace).unwrap();
    w.fs.setxattr(f, b"user.a", b"", Set).unwrap();
    assert_eq!(w.fs.getxattr(f, b"user.a").unwrap(), b"");
    // Limits: what an item holds, and what the interface takes.
    let most = 16258 - 30 - 6;
    w.fs.setxattr(f, b"user.a", &vec![1; most], Set).unwrap();
    assert_eq!(w.fs.getxattr(f, b"user.a").unwrap().len(), most);
    assert_err!(w.fs.setxattr(f, b"user.a", &vec![1; most + 1], Set), Error::NoSpace);
    assert_err!(w.fs.setxattr(f, b"user.a", &vec![1; 65537], Set), Error::TooBig);
    assert_err!(w.fs.setxattr(f, &[b'n'; 256], b"", Set), Error::NameTooLong);
    assert_err!(w.fs.setxattr(f, b"", b"", Set), Error::Invalid(_));
    assert_err!(w.fs.getxattr(f, &[b'n'; 256]), Error::NoAttribute);
    w.fs.setxattr(f, &[b'n'; 255], b"long", Set).unwrap();
    let w = w.reopen();
    assert_eq!(w.fs.getxattr(f, b"user.a").unwrap().len(), most);
    w.fs.removexattr(f, b"user.a").unwrap();
    assert_eq!(w.fs.listxattr(f).unwrap(), [vec![b'n'; 255]]);
    w.check();
}

/// What a survey says of an inode, asked for in the other way.
fn asked_one_by_one(w: &World, id: InodeId) -> Surveyed {
    let attr = w.attr(id);
    let names = w.fs.listxattr(id).unwrap();
    let mut xattrs: Vec<_> =
        names.into_iter().map(|name| (name.clone(), w.fs.getxattr(id, &name).unwrap())).collect();
    xattrs.sort();
    Surveyed { attr, xattrs }
}

#[test]
fn a_survey_says_what_each_inode_says() {
    let w = World::new();
    let dir = w.dir(w.root(), "d");
    let ids: Vec<_> = (0..200).map(|n| w.file(dir, format!("{n}"))).collect();
    for (n, id) in ids.iter().enumerate() {
        for name in 0..n % 3 {
            let name = format!("user.{name}");
            w.fs.setxattr(*id, name.as_bytes(), &vec![7; n], Set).unwrap();
        }
    }
    // The names of this one stand between its item and its attributes.
    for n in 0..100 {
        w.fs.link(ids[2], w.root(), format!("{n:>200}").as_bytes()).unwrap();
    }
    let mut inos: Vec<u64> = ids.iter().rev().map(|id| id.ino).collect();
    inos.extend([dir.ino, w.root().ino, ids[5].ino]);
    let surveyed = |w: &World| w.fs.survey(w.root().subvol, &inos).unwrap();
    let each = |w: &World| -> Vec<_> {
        let id = |&ino: &u64| InodeId { ino, ..w.root() };
        inos.iter().map(|ino| asked_one_by_one(w, id(ino))).collect()
    };
    // From memory, from the tree, and from both.
    assert_eq!(surveyed(&w), each(&w));
    let w = w.reopen();
    let from_tree = surveyed(&w);
    assert_eq!(from_tree, each(&w));
    let w = w.reopen();
    w.fs.setattr(ids[7], &SetAttr { perm: Some(0o601), ..SetAttr::default() }).unwrap();
    w.fs.removexattr(ids[8], b"user.0").unwrap();
    let changed = surveyed(&w);
    assert_ne!(changed, from_tree);
    assert_eq!(changed, each(&w));
    w.fs.unlink(dir, b"9").unwrap();
    assert_err!(w.fs.survey(w.root().subvol, &[ids[1].ino, ids[9].ino]), Error::NotFound);
    assert_eq!(w.fs.survey(w.root().subvol, &[]).unwrap(), []);
}

/// The tree is not asked about inodes that were made without any.
#[test]
fn new_inodes_have_the_attributes_that_they_were_made_with() {
    let w = World::new();
    let names = |id| w.fs.listxattr(id).unwrap();
    let bare = w.file(w.root(), "bare");
    assert_err!(w.fs.getxattr(bare, b"user.a"), Error::NoAttribute);
    assert_eq!(names(bare), Vec::<Vec<u8>>::new());
    assert_err!(w.fs.setxattr(bare, b"user.a", b"1", Replace), Error::NoAttribute);
    assert_err!(w.fs.removexattr(bare, b"user.a"), Error::NoAttribute);
    w.fs.setxattr(bare, b"user.a", b"1", Create).unwrap();
    assert_eq!(
        (w.fs.getxattr(bare, b"user.a").unwrap(), names(bare)),
        (b"1".to_vec(), vec![b"user.a".to_vec()])
    );
    assert_err!(w.fs.setxattr(bare, b"user.a", b"2", Create), Error::Exists);
    w.fs.removexattr(bare, b"user.a").unwrap();
    assert_eq!(names(bare), Vec::<Vec<u8>>::new());

    let xattrs = [(b"user.born".to_vec(), b"with".to_vec())];
    let born = NewInode { xattrs: &xattrs, ..new(FileKind::Directory) };
    let dir = w.fs.create(w.root(), b"born", &born).unwrap().id;
    assert_eq!(w.fs.getxattr(dir, b"user.born").unwrap(), b"with");
    w.fs.setxattr(dir, b"btrfs.compression", b"zstd", Set).unwrap();
    let heir = w.file(dir, "heir");
    assert_eq!(names(heir), [b"btrfs.compression".to_vec()]);

    let compressed = flags(InodeFlags::COMPRESS);
    let plain = w.file(w.root(), "plain");
    w.fs.setattr(plain, &compressed).unwrap();
    assert_eq!(names(plain), [b"btrfs.compression".to_vec()], "what flags bring");
    let unnamed = w.fs.create_unnamed(w.root(), &new(FileKind::Regular)).unwrap().id;
    assert_err!(w.fs.getxattr(unnamed, b"user.a"), Error::NoAttribute);
    w.fs.setxattr(unnamed, b"user.a", b"1", Set).unwrap();
    assert_eq!(names(unnamed), [b"user.a".to_vec()]);
    w.check();
}

#[test]
fn user_attributes_are_for_files_and_directories() {
    let w = World::new();
    let kinds = [
        FileKind::Symlink,
        FileKind::Fifo,
        FileKind::Socket,
        FileKind::CharDevice,
        FileKind::BlockDevice,
    ];
    for (n, kind) in kinds.into_iter().enumerate() {
        let name = format!("n{n}");
        let user = [(b"user.a".to_vec(), b"1".to_vec())];
        let made =
            |xattrs| w.fs.create(w.root(), name.as_bytes(), &NewInode { xattrs, ..new(kind) });
        assert_err!(made(&user), Error::NotPermitted(_));
        let trusted = [(b"trusted.a".to_vec(), b"1".to_vec())];
        let id = made(&trusted).unwrap().id;
        for mode in [Set, Create, Replace] {
            assert_err!(w.fs.setxattr(id, b"user.a", b"1", mode), Error::NotPermitted(_));
        }
        assert_err!(w.fs.removexattr(id, b"user.a"), Error::NotPermitted(_));
        assert_err!(w.fs.getxattr(id, b"user.a"), Error::NoAttribute);
        w.fs.setxattr(id, b"security.a", b"2", Set).unwrap();
        assert_eq!(w.fs.getxattr(id, b"trusted.a").unwrap(), b"1");
        w.fs.removexattr(id, b"trusted.a").unwrap();
        assert_eq!(w.fs.listxattr(id).unwrap(), [b"security.a"]);
    }
    let d = w.dir(w.root(), "d");
    w.fs.setxattr(d, b"user.a", b"1", Set).unwrap();
    w.check();
}

#[test]
fn attributes_with_equal_hashes_share_an_item() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    let names: Vec<_> = colliding_names(4).map(|n| [b"user.", &n[..]].concat()).collect();
    for (n, name) in names.iter().enumerate() {
        w.fs.setxattr(f, name, format!("{n}").as_bytes(), Create).unwrap();
    }
    let is_one = |k: &&Key| **k == xattr_key(f.ino.into(), &names[0]);
    assert_eq!(w.items().keys().filter(is_one).count(), 1);
    let mut listed = w.fs.listxattr(f).unwrap();
    listed.sort();
    let mut sorted = names.clone();
    sorted.sort();
    assert_eq!(listed, sorted);
    // 16 entries of 63 bytes leave room for 15,250 bytes more, with the value of the first.
    assert_err!(w.fs.setxattr(f, &names[0], &[1; 16000], Set), Error::NoSpace);
    assert_eq!(w.fs.getxattr(f, &names[0]).unwrap(), b"0");
    for name in names.iter().step_by(2) {
        w.fs.removexattr(f, name).unwrap();
    }
    for (n, name) in names.iter().enumerate() {
        match w.fs.getxattr(f, name) {
            Ok(v) => assert_eq!((n % 2, v), (1, format!("{n}").into_bytes())),
            Err(e) => assert!(n % 2 == 0 && matches!(e, Error::NoAttribute), "{e}"),
        }
    }
    for name in names.iter().skip(1).step_by(2) {
        w.fs.removexattr(f, name).unwrap();
    }
    assert_eq!(w.items().keys().filter(is_one).count(), 0);
    w.check();
}

#[test]
fn what_is_written_over_counts_once() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    let bytes = || w.attr(f).bytes;
    w.fs.fallocate(f.at(4095), 2, crate::Fallocate::Allocate { keep_size: false }).unwrap();
    assert_eq!(bytes(), 8192);
    // Delayed data, and data into preallocated space.
    w.fs.write(f, 4095, b"xy").unwrap();
    assert_eq!(bytes(), 8192);
    w.fs.sync().unwrap();
    assert_eq!(bytes(), 8192);
    w.fs.write(f, 0, &[1; 8192]).unwrap();
    assert_eq!(bytes(), 8192);
    w.fs.write(f, 8192, b"x").unwrap();
    assert_eq!(bytes(), 12288, "what is new counts before it is on the device");
    w.fs.sync().unwrap();
    assert_eq!(bytes(), 12288);
}
