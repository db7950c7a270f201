//! Names, attributes and extended attributes as Linux has them: the engine shows what the kernel
//! shows of the kernel's images, and the kernel shows what the engine shows of the engine's.
//! Contents of files are not looked at here.

use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{
    Error, FileKind, Filesystem, InodeId, NewInode, OpenOptions, RenameMode, SetAttr, SetTime,
    Timestamp, XattrMode,
};
use larder_simtest::oracle::{
    EngineTree, Facts, Fixture, KernelMount, Kind, Need, StdTree, TreeSource, btrfs_check,
    colliding_names, kernel_images, kernel_verdict, need, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

/// What is compared of an entry.
#[derive(Debug, PartialEq)]
struct Shown {
    facts: Facts,
    target: Option<Vec<u8>>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}
type Tree = BTreeMap<Vec<u8>, Shown>;

fn walk<S: TreeSource>(source: &S, id: &S::Id, path: &[u8], out: &mut Tree) {
    let at = || path.escape_ascii().to_string();
    let mut facts = source.facts(id).unwrap_or_else(|e| panic!("/{}: {e:#}", at()));
    // The kernel gives each subvolume a device of its own; the number is the same.
    facts.identity.0 = 0;
    if facts.identity.1 == 2 {
        // The directory that a snapshot shows in the place of a subvolume is made up: its times
        // mean nothing.
        for t in [&mut facts.atime, &mut facts.mtime, &mut facts.ctime] {
            *t = (0, 0);
        }
        facts.btime = None;
    }
    let target = (facts.kind == Kind::Symlink).then(|| source.readlink(id).unwrap());
    let xattrs = source.xattrs(id).unwrap();
    if facts.kind == Kind::Directory {
        for (name, child) in source.children(id).unwrap_or_else(|e| panic!("/{}: {e:#}", at())) {
            walk(source, &child, &[path, b"/", &name].concat(), out);
        }
    }
    assert!(
        out.insert(path.to_vec(), Shown { facts, target, xattrs }).is_none(),
        "/{} twice",
        at()
    );
}

fn tree<S: TreeSource>(source: &S) -> Tree {
    let mut out = Tree::new();
    walk(source, &source.root().unwrap(), b"", &mut out);
    out
}

fn assert_same(what: &str, engine: &Tree, kernel: &Tree) {
    for (path, shown) in engine {
        assert_eq!(
            Some(shown),
            kernel.get(path),
            "{what}: /{}: engine and kernel",
            path.escape_ascii()
        );
    }
    let missing: Vec<_> = kernel.keys().filter(|k| !engine.contains_key(*k)).collect();
    assert!(missing.is_empty(), "{what}: the engine does not show {missing:?}");
}

fn open(image: &Path, read_only: bool) -> Arc<Filesystem> {
    let mode = if read_only { OpenMode::Read } else { OpenMode::Write };
    let device = FileDevice::open(image, mode).unwrap();
    Filesystem::open(
        Arc::new(device),
        OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() },
    )
    .unwrap()
}

#[test]
fn names_that_linux_made() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    for variant in kernel_images() {
        let image = dir.path().join(&variant.name);
        variant.make(&image, 256 << 20).unwrap();
        let mount = KernelMount::image(&image, &variant.mount).unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.unmount_clean().unwrap();
        let mount = KernelMount::image_read_only(&image, "noatime").unwrap();
        let kernel = tree(&StdTree::new(mount.path()));
        mount.unmount_clean().unwrap();
        let fs = open(&image, true);
        let engine = tree(&EngineTree(&fs));
        fs.close().unwrap();
        assert!(engine.len() > 1000, "{}: only {} entries", variant.name, engine.len());
        assert!(engine.values().any(|s| s.facts.identity.1 == 2), "no placeholder was met");
        assert_same(&variant.name, &engine, &kernel);
        std::fs::remove_file(&image).unwrap();
    }
}

/// Checks `..` of every directory below `dir`; returns the directories.
fn check_parents(fs: &Filesystem, dir: InodeId) -> Vec<InodeId> {
    let mut below = Vec::new();
    fs.readdir(dir, 2, &mut |e| {
        if e.kind == FileKind::Directory && e.id.ino != 2 {
            below.push(e.id);
        }
        true
    })
    .unwrap();
    let mut all = below.clone();
    for child in below {
        assert_eq!(fs.lookup(child, b"..").unwrap().id, dir);
        all.extend(check_parents(fs, child));
    }
    all
}

#[test]
fn borders_between_subvolumes() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    kernel_images()[0].make(&image, 256 << 20).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    let fs = open(&image, false);
    let dirs = check_parents(&fs, fs.root());
    let subvolumes: std::collections::BTreeSet<_> = dirs.iter().map(|d| d.subvol).collect();
    assert!(subvolumes.len() > 4, "{subvolumes:?}");
    let find = |path: &str| {
        let names = path.split('/').filter(|n| !n.is_empty());
        names.fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()).unwrap().id)
    };
    let (volumes, copy, frozen) = (find("volumes"), find("volumes/copy"), find("volumes/frozen"));
    assert_eq!(copy.ino, 256);
    let file = new(FileKind::Regular);
    // Subvolumes go only when they are empty, and move.
    assert!(matches!(fs.unlink(volumes, b"copy"), Err(Error::IsDirectory)));
    assert!(matches!(fs.rmdir(volumes, b"copy"), Err(Error::NotEmpty)));
    fs.rename(volumes, b"copy", volumes, b"x", RenameMode::Replace).unwrap();
    assert_eq!(find("volumes/x"), copy);
    fs.rename(volumes, b"x", volumes, b"copy", RenameMode::Replace).unwrap();
    let d = fs.create(volumes, b"d", &new(FileKind::Directory)).unwrap().id;
    assert!(matches!(
        fs.rename(volumes, b"d", volumes, b"copy", RenameMode::Replace),
        Err(Error::NotEmpty)
    ));
    let f = fs.create(d, b"f", &file).unwrap().id;
    assert!(matches!(
        fs.rename(d, b"f", volumes, b"copy", RenameMode::Replace),
        Err(Error::IsDirectory)
    ));
    assert!(matches!(
        fs.rename(d, b"f", copy, b"f", RenameMode::Replace),
        Err(Error::CrossSubvolume)
    ));
    assert!(matches!(fs.link(f, copy, b"f"), Err(Error::CrossSubvolume)));
    // What is read-only stays so.
    assert!(matches!(fs.create(frozen, b"x", &file), Err(Error::SubvolumeReadOnly)));
    assert!(matches!(fs.unlink(frozen, b"file1"), Err(Error::SubvolumeReadOnly)));
    assert!(matches!(fs.setattr(frozen, &SetAttr::default()), Err(Error::SubvolumeReadOnly)));
    // The directory that stands for a subvolume that the snapshot does not have: empty, and goes
    // like an empty directory.
    let mut placeholders = Vec::new();
    fs.readdir(copy, 2, &mut |e| {
        if e.id.ino == 2 {
            placeholders.push(e.name.to_vec());
        }
        true
    })
    .unwrap();
    let name = placeholders.first().expect("the fixture's snapshots lack a nested subvolume");
    let empty = fs.lookup(copy, name).unwrap();
    assert_eq!((empty.kind, empty.size, empty.id.subvol), (FileKind::Directory, 0, copy.subvol));
    assert!(matches!(fs.create(empty.id, b"x", &file), Err(Error::NotPermitted(_))));
    assert!(matches!(fs.lookup(empty.id, b"x"), Err(Error::NotFound)));
    assert!(matches!(fs.unlink(copy, name), Err(Error::IsDirectory)));
    assert!(matches!(fs.rename(copy, name, copy, b"x", RenameMode::Replace), Err(Error::NotEmpty)));
    let size = fs.getattr(copy).unwrap().size;
    fs.rmdir(copy, name).unwrap();
    assert!(matches!(fs.lookup(copy, name), Err(Error::NotFound)));
    assert_eq!(fs.getattr(copy).unwrap().size, size - 2 * name.len() as u64);
    fs.close().unwrap();
    kernel_verdict(&image).unwrap();
}

fn new(kind: FileKind) -> NewInode<'static> {
    let target: &[u8] = if kind == FileKind::Symlink { b"some/where" } else { b"" };
    NewInode { kind, perm: 0o4751, uid: 1234, gid: 70_000, rdev: 0, target, xattrs: &[] }
}

/// Names of every shape that the format has a form for.
fn make_names(fs: &Filesystem) {
    let root = fs.root();
    let create = |dir: InodeId, name: &[u8], kind| fs.create(dir, name, &new(kind)).unwrap().id;
    let long = create(root, &[b'n'; 255], FileKind::Directory);
    let strange: [&[u8]; 5] =
        [b"\xff\xfe", b"new\nline", b" ", b"...", "\u{e4}\u{1f980}".as_bytes()];
    for name in strange {
        create(long, name, FileKind::Regular);
    }
    let kinds = [
        FileKind::CharDevice,
        FileKind::BlockDevice,
        FileKind::Fifo,
        FileKind::Socket,
        FileKind::Symlink,
    ];
    for kind in kinds {
        let n = NewInode { rdev: (259 << 20) | 70_000, ..new(kind) };
        fs.create(root, format!("{kind:?}").as_bytes(), &n).unwrap();
    }
    let target = vec![b't'; 4095];
    fs.create(root, b"longest target", &NewInode { target: &target, ..new(FileKind::Symlink) })
        .unwrap();

    let hashes = create(root, b"hashes", FileKind::Directory);
    for name in colliding_names(6) {
        create(hashes, &name, FileKind::Regular);
    }
    for name in colliding_names(6).iter().step_by(3) {
        fs.unlink(hashes, name).unwrap();
    }
    let attributed = create(hashes, b"attributed", FileKind::Regular);
    for (n, name) in colliding_names(4).iter().enumerate() {
        fs.setxattr(
            attributed,
            &[b"user.", &name[..]].concat(),
            &vec![7; n * 100],
            XattrMode::Create,
        )
        .unwrap();
    }
    fs.setxattr(attributed, b"trusted.largest", &vec![1; 16228 - 15], XattrMode::Set).unwrap();
    fs.setxattr(hashes, b"btrfs.compression", b"zstd", XattrMode::Set).unwrap();
    create(hashes, b"inherits", FileKind::Regular);

    let links = create(root, b"links", FileKind::Directory);
    let file = create(links, b"first", FileKind::Regular);
    for n in 0..700 {
        fs.link(file, links, format!("link{n:0100}").as_bytes()).unwrap();
    }
    for n in (0..700).step_by(2) {
        fs.unlink(links, format!("link{n:0100}").as_bytes()).unwrap();
    }
    fs.rename(links, b"first", root, b"moved link", RenameMode::Replace).unwrap();

    let moves = create(root, b"moves", FileKind::Directory);
    for name in [b"a", b"b", b"c", b"d", b"e"] {
        let d = create(moves, name, FileKind::Directory);
        create(d, b"inside", FileKind::Regular);
    }
    let a = fs.lookup(moves, b"a").unwrap().id;
    fs.rename(moves, b"b", a, b"b", RenameMode::NoReplace).unwrap();
    fs.rename(moves, b"c", moves, b"d", RenameMode::Exchange).unwrap();
    fs.rename(moves, b"e", a, b"inside", RenameMode::Exchange).unwrap();
    fs.rename(a, b"b", moves, b"f", RenameMode::Whiteout { uid: 3, gid: 4 }).unwrap();

    let t = |sec, nsec| Some(SetTime::To(Timestamp { sec, nsec }));
    let old = SetAttr {
        mtime: t(-1, 999_999_999),
        atime: t(1 << 33, 1),
        perm: Some(0),
        ..SetAttr::default()
    };
    fs.setattr(attributed, &old).unwrap();
    let unnamed = fs.create_unnamed(root, &new(FileKind::Regular)).unwrap().id;
    fs.link(unnamed, root, b"named later").unwrap();
    let sized = create(root, b"sized", FileKind::Regular);
    fs.setattr(sized, &SetAttr { size: Some(1 << 40), ..SetAttr::default() }).unwrap();
}

#[test]
fn names_that_the_engine_made() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let variants = [
        ("default", MkfsOptions::default()),
        ("small nodes", MkfsOptions { nodesize: Some(8192), ..MkfsOptions::default() }),
    ];
    for (name, options) in variants {
        let image = dir.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
        mkfs(&FileDevice::open(&image, OpenMode::Write).unwrap(), &options).unwrap();
        let fs = open(&image, false);
        if options.nodesize.is_none() {
            make_names(&fs);
        } else {
            let d = fs.create(fs.root(), b"d", &new(FileKind::Directory)).unwrap().id;
            for n in 0..3000 {
                fs.create(d, format!("{n:0200}").as_bytes(), &new(FileKind::Regular)).unwrap();
            }
        }
        let engine = tree(&EngineTree(&fs));
        fs.close().unwrap();
        btrfs_check(&image, true).assert_clean(name);
        let mount = KernelMount::image_read_only(&image, "noatime").unwrap();
        let kernel = tree(&StdTree::new(mount.path()));
        mount.unmount_clean().unwrap();
        assert_same(name, &engine, &kernel);
        kernel_verdict(&image).unwrap();
    }
}

#[test]
fn what_a_crash_leaves_without_names_linux_cleans_up() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
    mkfs(&FileDevice::open(&image, OpenMode::Write).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = open(&image, false);
    for n in 0..20 {
        let name = format!("f{n}");
        let kind = if n % 2 == 0 { FileKind::Regular } else { FileKind::Directory };
        let id = fs.create(fs.root(), name.as_bytes(), &new(kind)).unwrap().id;
        fs.hold(id);
        if n % 2 == 0 {
            fs.unlink(fs.root(), name.as_bytes())
        } else {
            fs.rmdir(fs.root(), name.as_bytes())
        }
        .unwrap();
    }
    fs.create_unnamed(fs.root(), &new(FileKind::Regular)).unwrap();
    fs.sync().unwrap();
    drop(fs);
    btrfs_check(&image, true).assert_clean("with orphans");
    let mount = KernelMount::image(&image, "").unwrap();
    assert_eq!(std::fs::read_dir(mount.path()).unwrap().count(), 0);
    mount.sync().unwrap();
    mount.unmount_clean().unwrap();
    let dump = larder_simtest::oracle::dump_tree(&image, &["-t", "5"]).unwrap();
    assert!(!dump.contains("ORPHAN_ITEM"), "{dump}");
    kernel_verdict(&image).unwrap();
}
