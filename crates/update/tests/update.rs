//! Trees are laid into an image, changed, and compared with what the sources say.

use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, Seek};
use larder_sources::{
    Attributes, Contents, Entry, Kind, LinkGroup, Locator, SourceNumber, Time, TreePath,
};
use larder_update::{BoxError, Compare, Error, Options, Summary, What, update};
use larder_volume::{FileDevice, OpenMode};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// A file of the sources: parts that are data, by offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Bytes {
    size: u64,
    parts: BTreeMap<u64, Vec<u8>>,
}

impl Bytes {
    fn of(bytes: &[u8]) -> Self {
        let parts = if bytes.is_empty() { BTreeMap::new() } else { [(0, bytes.to_vec())].into() };
        Self { size: bytes.len() as u64, parts }
    }

    fn whole(&self) -> Vec<u8> {
        let mut all = vec![0; self.size as usize];
        for (at, part) in &self.parts {
            all[*at as usize..][..part.len()].copy_from_slice(part);
        }
        all
    }
}

impl Contents for Bytes {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        Ok(self.parts.iter().map(|(at, part)| *at..*at + part.len() as u64).collect())
    }

    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let all = self.whole();
        let from = all.get(offset as usize..offset as usize + buf.len());
        buf.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// What an inode of the sources is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Is {
    Directory,
    File(Bytes),
    Symlink(Vec<u8>),
    Device(u32),
    Fifo,
}

/// A tree as sources have it: names of inodes.
#[derive(Clone, Debug, Default)]
struct Tree {
    names: BTreeMap<TreePath, usize>,
    inodes: Vec<(Is, Attributes)>,
}

fn path(text: &str) -> TreePath {
    TreePath::new(text.as_bytes()).unwrap()
}

fn attributes(permissions: u32, seconds: i64) -> Attributes {
    let modified = Time { seconds, nanoseconds: 5 };
    Attributes { permissions, modified, uid: 3, gid: 4, ..Attributes::default() }
}

impl Tree {
    fn new() -> Self {
        let mut tree = Self::default();
        tree.add("", Is::Directory, attributes(0o755, 1));
        tree
    }

    fn add(&mut self, at: &str, is: Is, attributes: Attributes) -> &mut Self {
        self.names.insert(path(at), self.inodes.len());
        self.inodes.push((is, attributes));
        self
    }

    fn file(&mut self, at: &str, bytes: &[u8], seconds: i64) -> &mut Self {
        self.add(at, Is::File(Bytes::of(bytes)), attributes(0o644, seconds))
    }

    fn link(&mut self, from: &str, to: &str) -> &mut Self {
        let inode = self.names[&path(from)];
        self.names.insert(path(to), inode);
        self
    }

    fn names_of(&self, inode: usize) -> usize {
        self.names.values().filter(|n| **n == inode).count()
    }

    fn entries(&self) -> Vec<Result<Entry, BoxError>> {
        let entry = |(path, inode): (&TreePath, &usize)| {
            let (is, attributes) = &self.inodes[*inode];
            let kind = match is {
                Is::Directory => Kind::Directory,
                Is::File(bytes) => {
                    let key = inode.to_le_bytes().to_vec();
                    let locator = Locator { source: SourceNumber(0), key };
                    let contents = (bytes.size > 0).then_some(locator);
                    Kind::File { size: bytes.size, contents }
                }
                Is::Symlink(target) => Kind::Symlink(target.clone()),
                Is::Device(minor) => Kind::CharDevice { major: 7, minor: *minor },
                Is::Fifo => Kind::Fifo,
            };
            let links = (self.names_of(*inode) > 1).then_some(LinkGroup(*inode as u64));
            Ok(Entry { path: path.clone(), attributes: attributes.clone(), kind, links })
        };
        self.names.iter().map(entry).collect()
    }

    fn open(&self, locator: &Locator) -> Result<Box<dyn Contents>, BoxError> {
        let inode = usize::from_le_bytes(locator.key.clone().try_into().unwrap());
        let Is::File(bytes) = &self.inodes[inode].0 else { return Err("no file".into()) };
        Ok(Box::new(bytes.clone()))
    }
}

/// An image in a temporary directory.
struct Image {
    dir: tempfile::TempDir,
    fs: Arc<Filesystem>,
}

impl Image {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let device = FileDevice::create(dir.path().join("image"), 256 << 20).unwrap();
        mkfs(&device, &MkfsOptions::default()).unwrap();
        drop(device);
        let fs = Self::opened(dir.path().join("image"));
        Self { dir, fs }
    }

    fn opened(path: PathBuf) -> Arc<Filesystem> {
        let device = Arc::new(FileDevice::open(&path, OpenMode::Write).unwrap());
        Filesystem::open(device, OpenOptions::default()).unwrap()
    }

    fn update(&self, tree: &Tree, options: Options) -> (Summary, Vec<(TreePath, What)>) {
        let mut told = Vec::new();
        let open = |locator: &Locator| tree.open(locator);
        let summary = update(&self.fs, self.fs.root(), tree.entries(), &open, options, &mut |c| {
            told.push((c.path.clone(), c.what));
            true
        });
        (summary.unwrap(), told)
    }

    fn become_like(&self, tree: &Tree) -> Vec<(TreePath, What)> {
        self.update(tree, Options::default()).1
    }

    /// Everything in the image, compared with the tree.
    fn assert_is(&self, tree: &Tree) {
        let mut names = BTreeMap::new();
        self.walk(self.fs.root(), &TreePath::root(), &mut names);
        let there: Vec<_> = names.keys().collect();
        assert_eq!(there, tree.names.keys().collect::<Vec<_>>());
        let mut inodes = BTreeMap::new();
        for (path, id) in &names {
            let inode = tree.names[path];
            assert_eq!(*inodes.entry(inode).or_insert(*id), *id, "{path:?} is one inode");
            self.assert_inode(path, *id, tree, inode);
        }
        let different: std::collections::BTreeSet<_> = inodes.values().collect();
        assert_eq!(different.len(), inodes.len(), "no inode has names of two");
    }

    fn walk(&self, dir: InodeId, at: &TreePath, names: &mut BTreeMap<TreePath, InodeId>) {
        names.insert(at.clone(), dir);
        let mut found = Vec::new();
        self.fs
            .readdir(dir, 0, &mut |e| {
                found.push((e.name.to_vec(), e.id, e.kind));
                true
            })
            .unwrap();
        for (name, id, kind) in found {
            if name == b"." || name == b".." || id.subvol != dir.subvol {
                continue;
            }
            let mut path = at.clone();
            path.push(&name);
            if kind == FileKind::Directory {
                self.walk(id, &path, names);
            } else {
                names.insert(path, id);
            }
        }
    }

    fn assert_inode(&self, path: &TreePath, id: InodeId, tree: &Tree, inode: usize) {
        let (is, wanted) = &tree.inodes[inode];
        let attr = self.fs.getattr(id).unwrap();
        let times = (attr.mtime.sec, attr.mtime.nsec);
        assert_eq!((attr.perm, attr.uid, attr.gid), (wanted.permissions, wanted.uid, wanted.gid));
        assert_eq!(times, (wanted.modified.seconds, wanted.modified.nanoseconds), "{path:?}");
        let xattrs = self.fs.listxattr(id).unwrap().into_iter();
        let xattrs: BTreeMap<_, _> =
            xattrs.map(|n| (n.clone(), self.fs.getxattr(id, &n).unwrap())).collect();
        assert_eq!(xattrs, wanted.xattrs.iter().cloned().collect());
        match is {
            Is::Directory => assert_eq!(attr.kind, FileKind::Directory),
            Is::Symlink(target) => assert_eq!(&self.fs.readlink(id).unwrap(), target),
            Is::Device(minor) => assert_eq!(attr.rdev, 7 << 20 | u64::from(*minor)),
            Is::Fifo => assert_eq!(attr.kind, FileKind::Fifo),
            Is::File(bytes) => {
                assert_eq!(attr.size, bytes.size, "{path:?}");
                assert_eq!(attr.nlink as usize, tree.names_of(inode));
                let mut now = vec![1; bytes.size as usize];
                assert_eq!(self.fs.read(id, 0, &mut now).unwrap(), now.len());
                assert!(now == bytes.whole(), "contents of {path:?}");
            }
        }
    }

    fn id(&self, at: &str) -> InodeId {
        let path = path(at);
        let mut id = self.fs.root();
        for name in path.components() {
            id = self.fs.lookup(id, name).unwrap().id;
        }
        id
    }

    /// Closes the file system and has it checked.
    fn end(self) {
        let Self { dir, fs } = self;
        fs.close().unwrap();
        drop(fs);
        let device = FileDevice::open(dir.path().join("image"), OpenMode::Read).unwrap();
        let options = larder_check::Options { data: true, ..Default::default() };
        let report = larder_check::check(&[Arc::new(device)], &options, &|_| ()).unwrap();
        assert!(report.is_clean(), "{report:?}");
    }
}

#[test]
fn only_what_differs_is_told_and_written() {
    let image = Image::new();
    let mut tree = Tree::new();
    let long = vec![1; 1 << 20];
    tree.file("long", &long, 10).file("same", b"same", 10).file("old", b"old", 10);
    tree.add("dir", Is::Directory, attributes(0o700, 3)).file("dir/in it", b"x", 10);
    tree.add("gone", Is::Directory, attributes(0o700, 3)).file("gone/too", b"x", 10);
    image.become_like(&tree);
    image.assert_is(&tree);
    assert!(image.update(&tree, Options::default()).0.is_unchanged());

    let mut next = Tree::new();
    let mut changed = long.clone();
    changed[300_000] = 2;
    next.file("long", &changed, 11).file("same", b"same", 10).file("new", b"new", 10);
    next.add("dir", Is::Directory, attributes(0o711, 3)).file("dir/in it", b"x", 10);
    let expected = [
        ("dir", What::Attributes),
        ("gone", What::Removed),
        ("long", What::Contents),
        ("new", What::Added),
        ("old", What::Removed),
    ]
    .map(|(p, what)| (path(p), what));
    let dry = Options { dry_run: true, ..Options::default() };
    assert_eq!(image.update(&next, dry).1, expected);
    image.assert_is(&tree);
    let (summary, told) = image.update(&next, Options::default());
    assert_eq!(told, expected);
    assert_eq!(summary.written, (64 << 10) + 3, "a block of the long file, and the new one");
    image.assert_is(&next);
    image.end();
}

#[test]
fn what_is_something_else_now_is_replaced() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.add("a", Is::Directory, attributes(0o700, 3)).file("a/b", b"x", 1);
    tree.file("c", b"c", 1).add("d", Is::Symlink(b"to c".to_vec()), attributes(0o777, 1));
    tree.add("e", Is::Device(3), attributes(0o600, 1)).add("f", Is::Fifo, attributes(0o600, 1));
    image.become_like(&tree);
    image.assert_is(&tree);
    let mut next = Tree::new();
    next.file("a", b"a", 1);
    next.add("c", Is::Directory, attributes(0o700, 3)).file("c/b", b"x", 1);
    next.add("d", Is::Symlink(b"to d".to_vec()), attributes(0o777, 1));
    next.add("e", Is::Device(4), attributes(0o600, 1)).file("f", b"", 1);
    let told = image.become_like(&next);
    let replaced = told.iter().filter(|(_, what)| *what == What::Replaced).count();
    assert_eq!((replaced, told.len()), (5, 6), "{told:?}");
    image.assert_is(&next);
    image.end();
}

#[test]
fn links_are_split_and_joined() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.file("a", b"one", 1).link("a", "b").file("c", b"two", 1).link("c", "d");
    image.become_like(&tree);
    image.assert_is(&tree);
    let mut next = Tree::new();
    next.file("a", b"one", 1).file("b", b"one", 1).file("c", b"two", 1).link("c", "e");
    image.become_like(&next);
    image.assert_is(&next);
    // What was one inode becomes a part of two groups.
    image.become_like(&tree);
    let mut crossed = Tree::new();
    crossed.file("a", b"one", 1).link("a", "c").file("b", b"two", 1).link("b", "d");
    image.become_like(&crossed);
    image.assert_is(&crossed);
    assert!(image.update(&crossed, Options::default()).0.is_unchanged());
    image.end();
}

#[test]
fn a_dry_run_counts_names_that_would_be_gone() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.file("a", b"one", 1).link("a", "z");
    tree.add("b", Is::Directory, attributes(0o700, 3)).file("b/c", b"two", 1).link("b/c", "y");
    image.become_like(&tree);
    // Both files keep their last name, and their inode with it.
    let mut next = Tree::new();
    next.add("a", Is::Directory, attributes(0o700, 3)).file("y", b"2", 2).file("z", b"1", 2);
    let told = image.update(&next, Options { dry_run: true, ..Options::default() }).1;
    let expected =
        [("a", What::Replaced), ("b", What::Removed), ("y", What::Contents), ("z", What::Contents)];
    assert_eq!(told, expected.map(|(p, what)| (path(p), what)));
    assert_eq!(told, image.become_like(&next));
    image.assert_is(&next);
    image.end();
}

#[test]
fn a_hole_of_the_source_becomes_one() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.file("f", &[7; 1 << 20], 1);
    image.become_like(&tree);
    let mut next = Tree::new();
    let parts = [(0, vec![7; 65536]), (1 << 20, vec![8; 4096])].into();
    let sparse = Bytes { size: 3 << 20, parts };
    next.add("f", Is::File(sparse), attributes(0o644, 2));
    image.become_like(&next);
    image.assert_is(&next);
    let id = image.id("f");
    assert_eq!(image.fs.seek(id, 0, Seek::Hole).unwrap(), Some(65536));
    assert_eq!(image.fs.seek(id, 65536, Seek::Data).unwrap(), Some(1 << 20));
    assert_eq!(image.fs.seek(id, (1 << 20) + 4096, Seek::Data).unwrap(), None);
    image.end();
}

#[test]
fn contents_are_compared_where_times_say_nothing() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.file("f", b"one", 1);
    image.become_like(&tree);
    let mut next = Tree::new();
    next.file("f", b"two", 1);
    assert!(image.update(&next, Options::default()).0.is_unchanged());
    let options = Options { compare: Compare::Contents, ..Options::default() };
    assert_eq!(image.update(&next, options.clone()).0.contents, 1);
    image.assert_is(&next);
    assert!(image.update(&next, options).0.is_unchanged());
    image.end();
}

#[test]
fn extended_attributes_and_their_removal() {
    let image = Image::new();
    let mut tree = Tree::new();
    let named = |pairs: &[(&str, &str)]| Attributes {
        xattrs: pairs.iter().map(|(n, v)| (n.as_bytes().into(), v.as_bytes().into())).collect(),
        ..attributes(0o644, 1)
    };
    let first = named(&[("user.a", "1"), ("user.b", "2")]);
    tree.add("f", Is::File(Bytes::of(b"f")), first);
    image.become_like(&tree);
    image.assert_is(&tree);
    let mut next = Tree::new();
    let second = named(&[("security.capability", "c"), ("user.b", "3")]);
    next.add("f", Is::File(Bytes::of(b"f")), second);
    assert_eq!(image.become_like(&next), [(path("f"), What::Attributes)]);
    image.assert_is(&next);
    image.end();
}

#[test]
fn subvolumes_stay_with_the_directories_that_lead_to_them() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.add("a", Is::Directory, attributes(0o700, 3)).file("a/x", b"x", 1).file("b", b"b", 1);
    image.become_like(&tree);
    let root = image.fs.root();
    image.fs.snapshot(root.subvol, image.id("a"), b"before", true).unwrap();
    let new = NewInode {
        kind: FileKind::Directory,
        perm: 0o755,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: b"",
        xattrs: &[],
    };
    image.fs.create_subvolume(root, b"sub", &new).unwrap();

    assert_eq!(image.become_like(&Tree::new()), [(path("b"), What::Removed)]);
    let before = image.id("a/before");
    assert_eq!(image.fs.lookup(before, b"b").unwrap().size, 1);
    assert!(image.fs.lookup(image.id("a"), b"x").is_err());
    image.id("sub");

    let mut file = Tree::new();
    file.file("a", b"in the way", 1);
    let open = |locator: &Locator| file.open(locator);
    let e = update(&image.fs, root, file.entries(), &open, Options::default(), &mut |_| true);
    assert!(matches!(e, Err(Error::Subvolume { .. })), "{e:?}");
    image.end();
}

#[test]
fn entries_out_of_order_and_interruptions_end_it() {
    let image = Image::new();
    let mut tree = Tree::new();
    tree.add("a", Is::Directory, attributes(0o700, 3)).file("a/x", b"x", 1).file("b", b"b", 1);
    let open = |locator: &Locator| tree.open(locator);
    let mut entries = tree.entries();
    entries.swap(1, 2);
    let root = image.fs.root();
    let e = update(&image.fs, root, entries, &open, Options::default(), &mut |_| true);
    assert!(matches!(e, Err(Error::Order { .. })), "{e:?}");
    let e = update(&image.fs, root, tree.entries(), &open, Options::default(), &mut |_| false);
    assert!(matches!(e, Err(Error::Interrupted)), "{e:?}");
    let broken: Vec<Result<Entry, BoxError>> = vec![Err("a broken archive".into())];
    let e = update(&image.fs, root, broken, &open, Options::default(), &mut |_| true);
    assert_eq!(e.unwrap_err().to_string(), "a broken archive");
    image.end();
}

/// Steps by which a random tree is made.
fn trees() -> impl Strategy<Value = Tree> {
    let name = prop::sample::select(vec!["a", "b", "b!", "c"]);
    let place = prop::collection::vec(name, 1..4);
    let what = (0..7_u8, 0..40_000_usize, 0..3_u8);
    prop::collection::vec((place, what), 0..20).prop_map(|steps| {
        let mut tree = Tree::new();
        for (place, (what, size, fill)) in steps {
            grow(&mut tree, &place, what, &vec![fill; size]);
        }
        tree
    })
}

fn grow(tree: &mut Tree, place: &[&str], what: u8, bytes: &[u8]) {
    for depth in 1..place.len() {
        let at = place[..depth].join("/");
        match tree.names.get(&path(&at)) {
            None => {
                tree.add(&at, Is::Directory, attributes(0o755, i64::from(what)));
            }
            Some(inode) if tree.inodes[*inode].0 == Is::Directory => {}
            Some(_) => return,
        }
    }
    let at = place.join("/");
    if tree.names.contains_key(&path(&at)) {
        return;
    }
    let seconds = bytes.len() as i64 * 3 + i64::from(bytes.first().copied().unwrap_or(0));
    match what {
        0 => tree.add(&at, Is::Directory, attributes(0o755, seconds)),
        1 => tree.add(&at, Is::Symlink(b"target".to_vec()), attributes(0o777, seconds)),
        2 => tree.add(&at, Is::Device(bytes.len() as u32 % 3), attributes(0o644, seconds)),
        3 | 4 => {
            let linked = tree.names.iter().find(|(_, inode)| {
                matches!(tree.inodes[**inode].0, Is::File(_)) && **inode % 2 == bytes.len() % 2
            });
            match linked.map(|(_, inode)| *inode) {
                Some(inode) => {
                    tree.names.insert(path(&at), inode);
                    tree
                }
                None => tree.file(&at, bytes, seconds),
            }
        }
        _ => tree.file(&at, bytes, seconds),
    };
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_tree_becomes_any_other(trees in prop::collection::vec(trees(), 1..4)) {
        let image = Image::new();
        for tree in &trees {
            // What is known of links goes to disk at once.
            let little = Options { memory: 0, ..Options::default() };
            let dry = Options { dry_run: true, ..little.clone() };
            let (would, told) = image.update(tree, dry);
            let (summary, done) = image.update(tree, little);
            prop_assert_eq!(told, done);
            prop_assert_eq!(Summary { written: summary.written, ..would }, summary);
            image.assert_is(tree);
            prop_assert!(image.update(tree, Options::default()).0.is_unchanged());
        }
        image.end();
    }
}
