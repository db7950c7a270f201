//! Images as sources, made by the engine.

use crate::{Entry, Kind, Options, SourceSpec, Sources, Time};
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{
    FileKind, Filesystem, NewInode, OpenOptions, SetAttr, SetTime, Timestamp, XattrMode,
};
use larder_volume::{FileDevice, OpenMode};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

/// An image with a bit of everything, and a subvolume.
fn make(image: &Path) {
    mkfs(&FileDevice::create(image, 128 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let fs = Filesystem::open(Arc::new(device), OpenOptions::default()).unwrap();
    let new =
        |kind, perm| NewInode { kind, perm, uid: 7, gid: 8, rdev: 0, target: b"", xattrs: &[] };
    let root = fs.root();
    let directory = new(FileKind::Directory, 0o750);
    let dir = fs.create(root, b"dir", &directory).unwrap().id;
    let file = fs.create(dir, b"file", &new(FileKind::Regular, 0o4755)).unwrap().id;
    fs.write(file, 0, b"text").unwrap();
    fs.write(file, 1 << 20, b"behind a hole").unwrap();
    fs.setxattr(file, b"user.a", b"b", XattrMode::Set).unwrap();
    let mtime = Some(SetTime::To(Timestamp { sec: -3, nsec: 4 }));
    fs.setattr(file, &SetAttr { mtime, flags: Some(1 << 8), ..SetAttr::default() }).unwrap();
    fs.link(file, root, b"a link").unwrap();
    let target = NewInode { target: b"dir/file", ..new(FileKind::Symlink, 0o777) };
    fs.create(root, b"symlink", &target).unwrap();
    let device = NewInode { rdev: (5 << 20) | 70_000, ..new(FileKind::CharDevice, 0o600) };
    fs.create(root, b"device", &device).unwrap();
    fs.create(root, b"empty", &new(FileKind::Regular, 0o644)).unwrap();
    let sub = fs.create_subvolume(dir, b"sub", &directory).unwrap().id;
    fs.create(sub, b"inside", &new(FileKind::Fifo, 0o644)).unwrap();
    fs.close().unwrap();
}

fn gather(prefix: &str, image: &Path, rest: &str) -> crate::Result<Sources> {
    let mut given = OsString::from(prefix);
    given.push(image);
    given.push(rest);
    Sources::gather(&[SourceSpec::parse(&given)?], &Options::default())
}

fn tree(sources: &Sources) -> BTreeMap<String, Entry> {
    let named = |entry: Entry| (String::from_utf8(entry.path.as_bytes().to_vec()).unwrap(), entry);
    sources.entries().unwrap().map(|entry| named(entry.unwrap())).collect()
}

#[test]
fn a_subvolume_is_read_with_all_it_has() {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("test.img");
    make(&image);
    // Without a prefix the file tells what it is.
    let sources = gather("", &image, "").unwrap();
    let entries = tree(&sources);
    let names: Vec<_> = entries.keys().map(String::as_str).collect();
    let all = [
        "",
        "a link",
        "device",
        "dir",
        "dir/file",
        "dir/sub",
        "dir/sub/inside",
        "empty",
        "symlink",
    ];
    assert_eq!(names, all);
    let file = &entries["dir/file"];
    let attributes = &file.attributes;
    assert_eq!((attributes.uid, attributes.gid, attributes.permissions), (7, 8, 0o4755));
    assert_eq!(attributes.modified, Time { seconds: -3, nanoseconds: 4 });
    assert_eq!(attributes.inode_flags, 1 << 8);
    assert!(attributes.created.is_some() && attributes.changed.is_some());
    assert_eq!(attributes.xattrs, [(b"user.a".to_vec(), b"b".to_vec())]);
    let link = &entries["a link"];
    assert!(link.links.is_some());
    assert_eq!((link.links, &link.kind, &link.attributes), (file.links, &file.kind, attributes));
    assert_eq!(entries["symlink"].kind, Kind::Symlink(b"dir/file".to_vec()));
    assert_eq!(entries["device"].kind, Kind::CharDevice { major: 5, minor: 70_000 });
    assert_eq!(entries["empty"].kind, Kind::File { size: 0, contents: None });
    let Kind::File { size, contents: Some(at) } = &file.kind else { panic!("no contents") };
    let mut contents = sources.open(at).unwrap();
    assert!(contents.data().unwrap().iter().map(|part| part.end - part.start).sum::<u64>() < 9000);
    let mut data = vec![1; *size as usize];
    contents.read_exact_at(&mut data, 0).unwrap();
    assert_eq!((&data[..5], &data[1 << 20..]), (&b"text\0"[..], &b"behind a hole"[..]));
    assert!(contents.read_exact_at(&mut [0; 2], size - 1).is_err());
}

#[test]
fn a_subvolume_is_chosen_and_placed() {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("test.img");
    make(&image);
    let names = |rest: &str| {
        let sources = gather("image:", &image, rest).unwrap();
        tree(&sources).into_keys().collect::<Vec<_>>()
    };
    assert_eq!(names(":dir/sub"), ["", "inside"]);
    assert_eq!(names(":/dir/sub:/x/y"), ["", "x", "x/y", "x/y/inside"]);
    assert_eq!(names("::/x").len(), 10);
    let error = gather("image:", &image, ":nothing").unwrap_err().to_string();
    assert!(error.contains("test.img"), "{error}");
}
