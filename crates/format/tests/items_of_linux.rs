//! Items that Linux wrote: every item of every leaf parses, and encodes to the bytes it came from.
//!
//! `mkfs.btrfs` and the kernel make images with files of every shape; the reader below, which
//! shares nothing with the engine, walks all trees, the log trees of an image copied in
//! mid-transaction included. A list of things that must have been seen keeps the test from passing
//! on an image that holds less than it should.

mod common;
mod reencode;

use common::{has, missing, mkfs, run};
use larder_format::csum::{data_ref_hash, extref_hash, name_hash};
use larder_format::items::{
    Chunk, Compression, DirEntries, ExtRefs, ExtentFlags, ExtentItem, ExtentKind, ExtentRef,
    FileExtent, RootItem, parse_keyed_refs, parse_sys_array,
};
use larder_format::node::NodeView;
use larder_format::{Key, KeyType, Logical};
use reencode::reencode;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Is everything here that the test needs?
fn oracle() -> bool {
    let root =
        fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    let kernel = fs::read_to_string("/proc/filesystems").is_ok_and(|s| s.contains("\tbtrfs"));
    for (there, what) in [
        (root, "root"),
        (Path::new("/dev/loop-control").exists(), "loop devices"),
        (kernel, "btrfs in the kernel"),
    ] {
        if !there {
            missing(what);
            return false;
        }
    }
    has("mkfs.btrfs") && has("btrfs") && has("setfattr")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of this test are text")
}

/// A loop mount, gone when dropped.
struct Mount(PathBuf);
impl Mount {
    fn new(image: &Path, at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        run("mount", &["-t", "btrfs", "-o", "loop,commit=300,noatime", text(image), text(at)]);
        Self(at.to_path_buf())
    }
}
impl Drop for Mount {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(&self.0).status();
        if !done.is_ok_and(|s| s.success()) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
}

/// Bytes that no compressor shrinks.
fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    bytes
}

/// Files of every shape that the format knows.
fn populate(dir: &Path, snapshots: usize) {
    fs::write(dir.join("empty"), b"").unwrap();
    fs::write(dir.join("inline"), b"a few bytes").unwrap();
    fs::write(dir.join("regular"), noise(300_000)).unwrap();
    fs::create_dir_all(dir.join("a/b/c")).unwrap();
    std::os::unix::fs::symlink("where/it/points", dir.join("symlink")).unwrap();
    run("mkfifo", &[text(&dir.join("fifo"))]);
    run("mknod", &[text(&dir.join("device")), "c", "259", "70000"]);

    let sparse = File::create(dir.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 1 << 30).unwrap();

    let prealloc = dir.join("prealloc");
    run("fallocate", &["-l", "1048576", text(&prealloc)]);
    File::options().write(true).open(&prealloc).unwrap().write_all_at(&noise(8192), 65536).unwrap();

    for kind in ["zlib", "lzo", "zstd"] {
        for (size, len) in [("small", 1500), ("large", 400_000)] {
            let path = dir.join(format!("{kind}-{size}"));
            fs::write(&path, b"").unwrap();
            run("setfattr", &["-n", "btrfs.compression", "-v", kind, text(&path)]);
            File::options().append(true).open(&path).unwrap().write_all(&vec![b'x'; len]).unwrap();
        }
    }

    for n in 0..20 {
        run(
            "setfattr",
            &["-n", &format!("user.{n}"), "-v", &"v".repeat(n * 20 + 1), text(&dir.join("empty"))],
        );
    }
    // Two names with one hash: entries of a directory, and attributes, that share an item.
    for name in ["TTqGO4p", "snNzDoq"] {
        assert_eq!(name_hash(name.as_bytes()), 3_469_153_913);
        fs::write(dir.join(name), name).unwrap();
        run("setfattr", &["-n", &format!("user.{name}"), "-v", name, text(&dir.join("regular"))]);
    }
    // More names than the largest item holds, then names for a second item.
    let links = dir.join("links");
    fs::create_dir(&links).unwrap();
    fs::write(links.join("first"), b"linked").unwrap();
    for n in 0..150 {
        fs::hard_link(links.join("first"), links.join(format!("{n:0>200}"))).unwrap();
    }
    // Extents that are freed every other one leave the free space in pieces.
    let pieces = dir.join("pieces");
    fs::create_dir(&pieces).unwrap();
    for n in 0..1200 {
        fs::write(pieces.join(n.to_string()), noise(4096)).unwrap();
    }
    run("sync", &["-f", text(dir)]);
    for n in (0..1200).step_by(2) {
        fs::remove_file(pieces.join(n.to_string())).unwrap();
    }
    run("sync", &["-f", text(dir)]);

    shared(dir, snapshots);
}

/// Snapshots, of which the source changes afterwards: shared nodes and data, in numbers that an
/// extent's item has no room for.
fn shared(dir: &Path, snapshots: usize) {
    let source = dir.join("subvolume");
    run("btrfs", &["-q", "subvolume", "create", text(&source)]);
    fs::write(source.join("second"), noise(10_000)).unwrap();
    for n in 0..200 {
        fs::write(source.join(format!("file{n}")), noise(5000)).unwrap();
    }
    for n in 0..400 {
        let to = source.join(format!("clone{n}"));
        run("cp", &["--reflink=always", text(&dir.join("regular")), text(&to)]);
    }
    for n in 0..1500 {
        fs::write(source.join(format!("{n:0>100}")), b"").unwrap();
    }
    run("btrfs", &["-q", "subvolume", "snapshot", text(&source), text(&dir.join("snapshot"))]);
    run("btrfs", &["-q", "subvolume", "snapshot", "-r", text(&source), text(&dir.join("fixed"))]);
    for n in 0..snapshots {
        run(
            "btrfs",
            &["-q", "subvolume", "snapshot", text(&source), text(&dir.join(format!("more{n}")))],
        );
    }
    for n in 0..200 {
        fs::write(source.join(format!("file{n}")), b"changed").unwrap();
    }
    for n in 0..400 {
        fs::set_permissions(source.join(format!("clone{n}")), fs::Permissions::from_mode(0o600))
            .unwrap();
    }
    fs::write(dir.join("snapshot/second"), b"changed").unwrap();
    run("sync", &["-f", text(dir)]);
}

/// The image as it lies, read with plain arithmetic.
struct Image {
    bytes: File,
    nodesize: usize,
    chunks: BTreeMap<u64, Chunk>,
}

impl Image {
    fn read(&self, at: Logical) -> Vec<u8> {
        let (start, chunk) = self.chunks.range(..=at.0).next_back().expect("an address of a chunk");
        assert!(at.0 + self.nodesize as u64 <= start + chunk.length, "{at} lies in no chunk");
        let mut out = vec![0; self.nodesize];
        self.bytes.read_exact_at(&mut out, chunk.stripes[0].offset.0 + (at.0 - start)).unwrap();
        out
    }

    /// Calls `f` with each item of a tree.
    fn walk(&self, root: Logical, f: &mut impl FnMut(Key, &[u8])) {
        let block = self.read(root);
        let node = NodeView(&block);
        assert_eq!(node.bytenr(), root);
        if node.level() > 0 {
            for p in node.pointers() {
                self.walk(Logical(p.blockptr.get()), f);
            }
            return;
        }
        for slot in 0..node.nritems() {
            f(node.key(slot).expect("a key"), node.data(slot).expect("data within the leaf"));
        }
    }
}

/// What the items of an image were found to be.
#[derive(Default)]
struct Seen {
    items: usize,
    what: BTreeSet<String>,
}

impl Seen {
    fn item(&mut self, key: Key, data: &[u8]) {
        self.items += 1;
        let Some(back) = reencode(&key, data) else {
            assert!(key.kind == KeyType::EXTENT_CSUM, "{key} has no parser");
            return;
        };
        let back = back.unwrap_or_else(|e| panic!("{key}: {e}"));
        assert!(back == data, "{key} encodes to\n{back:?}, but is\n{data:?}");
        self.what.insert(key.kind.to_string());
        self.details(key, data);
    }

    /// Parts of an item that its key speaks of, and shapes worth having seen.
    fn details(&mut self, key: Key, data: &[u8]) {
        match key.kind {
            KeyType::DIR_ITEM | KeyType::XATTR_ITEM => {
                for e in DirEntries::new(data).map(Result::unwrap) {
                    assert_eq!(name_hash(e.name), key.offset);
                    assert_eq!(
                        e.kind == larder_format::items::FileType::Xattr,
                        key.kind == KeyType::XATTR_ITEM
                    );
                }
                if DirEntries::new(data).count() > 1 {
                    self.what.insert(format!("colliding {}", key.kind));
                }
            }
            KeyType::INODE_EXTREF => {
                for e in ExtRefs::new(data).map(Result::unwrap) {
                    assert_eq!(extref_hash(e.parent, e.name), key.offset);
                }
            }
            KeyType::EXTENT_DATA => match FileExtent::parse(data).unwrap() {
                FileExtent::Inline(e) => {
                    self.what.insert(format!("inline {}", e.compression.name()));
                }
                FileExtent::Stored(e) if e.is_hole() => drop(self.what.insert("hole".into())),
                FileExtent::Stored(e) => {
                    self.what.insert(format!("{:?} {}", e.kind, e.compression.name()));
                    if e.kind == ExtentKind::Regular
                        && e.offset > 0
                        && e.compression == Compression::None
                    {
                        self.what.insert("window inside an extent".into());
                    }
                }
            },
            KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                let item = ExtentItem::parse(key.kind, data).unwrap();
                if item.flags.contains(ExtentFlags::FULL_BACKREF) {
                    self.what.insert("full backref".into());
                }
                if item.block.is_some() {
                    self.what.insert("tree block info".into());
                }
                if item.inline.len() > 1 {
                    self.what.insert(format!("several inline refs of {}", item.inline[0].0.kind()));
                }
                for (r, _) in &item.inline {
                    self.what.insert(format!("inline {}", r.kind()));
                }
            }
            KeyType::EXTENT_DATA_REF => {
                for (r, _) in parse_keyed_refs(&key, data).unwrap() {
                    let ExtentRef::Data { root, objectid, offset } = r else {
                        panic!("{key} is {r:?}")
                    };
                    assert_eq!(data_ref_hash(root, objectid, offset), key.offset);
                }
            }
            _ => {}
        }
    }
}

/// Parses everything in an image.
fn check_image(path: &Path) -> Seen {
    let bytes = File::open(path).unwrap();
    let mut sb = vec![0; 4096];
    bytes.read_exact_at(&mut sb, 65536).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(sb[at..at + 4].try_into().unwrap()) as usize;
    let address = |at: usize| Logical(u64::from_le_bytes(sb[at..at + 8].try_into().unwrap()));

    let array = &sb[0x32b..0x32b + u32_at(0xa0)];
    let system = parse_sys_array(array).unwrap();
    let again =
        larder_format::items::encode_sys_array(system.iter().map(|(k, c)| (*k, c))).unwrap();
    assert_eq!(again, array);
    let chunks = system.into_iter().map(|(k, c)| (k.offset, c)).collect();
    let mut image = Image { bytes, nodesize: u32_at(0x94), chunks };

    let mut seen = Seen::default();
    let mut chunks = image.chunks.clone();
    image.walk(address(0x58), &mut |key, data| {
        seen.item(key, data);
        if key.kind == KeyType::CHUNK_ITEM {
            let chunk = Chunk::parse(data).unwrap();
            chunk.check_at(Logical(key.offset)).unwrap();
            chunks.insert(key.offset, chunk);
        }
    });
    image.chunks = chunks;

    let mut roots = Vec::new();
    let mut tops = vec![address(0x50)];
    let log = address(0x60);
    if log.0 != 0 {
        seen.what.insert("log".into());
        tops.push(log);
    }
    for top in tops {
        image.walk(top, &mut |key, data| {
            seen.item(key, data);
            if key.kind == KeyType::ROOT_ITEM {
                roots.push(RootItem::parse(data).unwrap());
            }
        });
    }
    for root in roots {
        image.walk(root.root(), &mut |key, data| seen.item(key, data));
    }
    seen
}

fn require(seen: &Seen, wanted: &[&str]) {
    let missing: Vec<_> = wanted.iter().filter(|w| !seen.what.contains(**w)).collect();
    assert!(missing.is_empty(), "the image lacks {missing:?}, it has {:?}", seen.what);
}

const COMMON: [&str; 40] = [
    "INODE_ITEM",
    "INODE_REF",
    "INODE_EXTREF",
    "XATTR_ITEM",
    "colliding XATTR_ITEM",
    "DIR_ITEM",
    "colliding DIR_ITEM",
    "DIR_INDEX",
    "ORPHAN_ITEM",
    "EXTENT_DATA",
    "inline none",
    "inline zlib",
    "inline lzo",
    "inline zstd",
    "Regular none",
    "Regular zlib",
    "Regular lzo",
    "Regular zstd",
    "Prealloc none",
    "window inside an extent",
    "hole",
    "ROOT_ITEM",
    "ROOT_REF",
    "ROOT_BACKREF",
    "EXTENT_ITEM",
    "EXTENT_DATA_REF",
    "SHARED_DATA_REF",
    "inline EXTENT_DATA_REF",
    "inline SHARED_DATA_REF",
    "inline TREE_BLOCK_REF",
    "several inline refs of EXTENT_DATA_REF",
    "several inline refs of TREE_BLOCK_REF",
    "full backref",
    "BLOCK_GROUP_ITEM",
    "DEV_EXTENT",
    "CHUNK_ITEM",
    "PERSISTENT_ITEM",
    "UUID_SUBVOL",
    "log",
    "DIR_LOG_INDEX",
];

fn make_and_check(features: &str, options: &[&str], snapshots: usize, wanted: &[&str]) {
    if !oracle() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let image = work.path().join("image");
    mkfs(&image, &[&["-O", features], options].concat());
    require(&check_image(&image), &["ROOT_ITEM", "CHUNK_ITEM", "DEV_EXTENT"]);

    let mount = Mount::new(&image, &work.path().join("mnt"));
    populate(&mount.0, snapshots);
    // A file that is open but has no name, committed so; then a log.
    let nameless = File::create(mount.0.join("nameless")).unwrap();
    fs::remove_file(mount.0.join("nameless")).unwrap();
    run("sync", &["-f", text(&mount.0)]);
    let dir = mount.0.join("a");
    fs::remove_dir(dir.join("b/c")).unwrap();
    let mut logged = File::create(dir.join("logged")).unwrap();
    logged.write_all(&noise(9000)).unwrap();
    logged.write_all_at(b"far", 1 << 20).unwrap();
    logged.sync_all().unwrap();
    File::open(dir.join("b")).unwrap().sync_all().unwrap();
    let copy = work.path().join("copy");
    fs::copy(&image, &copy).unwrap();
    drop((nameless, logged, mount));

    let seen = check_image(&copy);
    println!("{} items: {:?}", seen.items, seen.what);
    assert!(seen.items > 5000, "only {} items", seen.items);
    require(&seen, &COMMON);
    require(&seen, wanted);
    check_image(&image);
}

#[test]
fn items_of_a_current_image() {
    make_and_check(
        "extref,skinny-metadata,no-holes,free-space-tree,block-group-tree",
        &[],
        0,
        &["METADATA_ITEM", "FREE_SPACE_INFO", "FREE_SPACE_EXTENT", "FREE_SPACE_BITMAP"],
    );
}

#[test]
fn items_of_an_old_image() {
    make_and_check(
        "extref,^skinny-metadata,^no-holes,^free-space-tree,^block-group-tree",
        &["--nodesize", "4096"],
        130,
        &["tree block info", "inline SHARED_BLOCK_REF", "TREE_BLOCK_REF"],
    );
}
