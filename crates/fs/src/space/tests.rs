//! Space as Linux records it: extent items, free space, checksums and block groups of images that
//! the kernel wrote are understood, and written again to the same bytes.

#[path = "../../../format/tests/common/mod.rs"]
mod common;

use crate::error::{Error, Place, Result};
use crate::space::extent_tree::{ExtentFeatures, apply, extent_info, extent_of};
use crate::space::groups::{FreeSource, load, scan_used};
use crate::space::refs::{ExtentKind, RefHead};
use crate::space::{Run, csum_tree, free_space_tree};
use crate::tree::TreeOps;
use common::{Image, has, items, missing, mkfs, run};
use larder_format::items::{
    BlockGroupItem, Chunk, ExtentFlags, ExtentItem, ExtentRef, parse_keyed_refs,
};
use larder_format::{CompatRo, CsumType, Incompat, Key, KeyType, Logical, ObjectId, TreeId};
use larder_volume::{MappedChunk, Stripe};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tree as a map.
#[derive(Clone, Default, PartialEq, Eq)]
struct Map(BTreeMap<Key, Vec<u8>>, usize);

fn wrong(key: &Key, what: &str) -> Error {
    Error::corrupt(Place { key: Some(*key), ..Place::default() }, what)
}

impl TreeOps for Map {
    fn max_item_size(&self) -> usize {
        self.1
    }
    fn get(&mut self, key: &Key) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }
    fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.0.range(..=key).next_back().map(|(k, v)| (*k, v.clone())))
    }
    fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.0.range(key..).next().map(|(k, v)| (*k, v.clone())))
    }
    fn insert(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.0.insert(*key, data.to_vec()).map_or(Ok(()), |_| Err(wrong(key, "exists")))
    }
    fn update(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.0.insert(*key, data.to_vec()).map(|_| ()).ok_or_else(|| wrong(key, "missing"))
    }
    fn delete(&mut self, key: &Key) -> Result<()> {
        self.0.remove(key).map(|_| ()).ok_or_else(|| wrong(key, "missing"))
    }
}

fn oracle() -> bool {
    let root =
        fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    let kernel = fs::read_to_string("/proc/filesystems").is_ok_and(|s| s.contains("\tbtrfs"));
    let loops = Path::new("/dev/loop-control").exists();
    for (there, what) in [(root, "root"), (loops, "loop devices"), (kernel, "btrfs in the kernel")]
    {
        if !there {
            missing(what);
            return false;
        }
    }
    has("mkfs.btrfs") && has("btrfs")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of this test are text")
}

/// A loop mount, gone when dropped.
struct Mount(PathBuf);
impl Drop for Mount {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(&self.0).status();
        if !done.is_ok_and(|s| s.success()) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
}

/// Has the kernel fragment the free space and share data and nodes in every way.
fn populate(image: &Path, at: &Path) {
    fs::create_dir_all(at).unwrap();
    run(
        "mount",
        &["-t", "btrfs", "-o", "loop,commit=300,noatime,max_inline=0", text(image), text(at)],
    );
    let mount = Mount(at.to_path_buf());
    let source = at.join("source");
    run("btrfs", &["-q", "subvolume", "create", text(&source)]);
    let block: Vec<u8> = (0..4096u32).map(|n| ((n * n) >> 5) as u8).collect();
    for n in 0..400 {
        fs::write(source.join(n.to_string()), &block).unwrap();
    }
    run("btrfs", &["-q", "filesystem", "sync", text(at)]);
    for n in (0..400).step_by(2) {
        fs::remove_file(source.join(n.to_string())).unwrap();
    }
    fs::write(source.join("large"), block.repeat(600)).unwrap();
    for n in 0..160 {
        run(
            "cp",
            &[
                "--reflink=always",
                text(&source.join("large")),
                text(&source.join(format!("copy{n}"))),
            ],
        );
    }
    for n in 0..3 {
        run(
            "btrfs",
            &["-q", "subvolume", "snapshot", text(&source), text(&at.join(format!("snap{n}")))],
        );
        for k in (n * 100 + 1..n * 100 + 40).step_by(2) {
            fs::write(source.join(k.to_string()), &block).unwrap();
        }
        fs::remove_file(source.join(format!("copy{n}"))).unwrap();
    }
    run("btrfs", &["-q", "subvolume", "delete", "--commit-after", text(&at.join("snap1"))]);
    run("btrfs", &["-q", "subvolume", "sync", text(at)]);
    drop(mount);
}

struct Trees {
    maps: BTreeMap<TreeId, Map>,
    nodesize: u32,
    skinny: bool,
    csum: CsumType,
    has_free_space_tree: bool,
    group_tree: TreeId,
}

impl Trees {
    fn read(path: &Path) -> Self {
        let mut image = Image::open(path);
        let nodes = image.walk();
        let nodesize = image.sb.nodesize();
        let mut maps: BTreeMap<TreeId, Map> = BTreeMap::new();
        for (tree, key, data) in items(&nodes) {
            let map = maps.entry(tree).or_default();
            map.1 = larder_format::node::max_item_size(nodesize);
            // Leaves that snapshots share come up once: only trees that nothing shares are looked
            // at here.
            map.0.insert(key, data.to_vec());
        }
        let sb = &image.sb;
        let compat_ro = CompatRo::from_bits_retain(sb.compat_ro_flags.get());
        let own_tree = compat_ro.contains(CompatRo::BLOCK_GROUP_TREE);
        Self {
            maps,
            nodesize,
            skinny: Incompat::from_bits_retain(sb.incompat_flags.get())
                .contains(Incompat::SKINNY_METADATA),
            csum: sb.csum_type(),
            has_free_space_tree: compat_ro.contains(CompatRo::FREE_SPACE_TREE_VALID),
            group_tree: if own_tree { ObjectId::BLOCK_GROUP_TREE } else { ObjectId::EXTENT_TREE },
        }
    }
    fn tree(&self, id: TreeId) -> Map {
        self.maps.get(&id).cloned().unwrap_or_default()
    }
    fn chunks(&self) -> Vec<MappedChunk> {
        let chunks = self.tree(ObjectId::CHUNK_TREE).0.into_iter();
        chunks
            .filter(|(key, _)| key.kind == KeyType::CHUNK_ITEM)
            .map(|(key, data)| {
                let chunk = Chunk::parse(&data).unwrap();
                let stripes =
                    chunk.stripes.iter().map(|s| Stripe { device: s.devid, at: s.offset });
                MappedChunk {
                    start: Logical(key.offset),
                    length: chunk.length,
                    kind: chunk.flags.bits(),
                    stripes: stripes.collect(),
                }
            })
            .collect()
    }
}

/// Every extent of the tree with all its references, added one head each to an empty tree, gives
/// Linux's items.
fn rebuild_extents(trees: &Trees) {
    let linux = trees.tree(ObjectId::EXTENT_TREE);
    let features = ExtentFeatures { skinny: trees.skinny, nodesize: trees.nodesize };
    let mut mine = Map(BTreeMap::new(), linux.1);
    let (mut overflowing, mut full, mut all) = (0, 0, 0);
    // A sixteenth of a leaf.
    let limit = (trees.nodesize as usize - 101) / 16 - 25;
    for (key, data) in &linux.0 {
        let Some((at, num_bytes)) = extent_of(key, trees.nodesize) else { continue };
        let item = ExtentItem::parse(key.kind, data).unwrap();
        let kind = match (item.flags.contains(ExtentFlags::DATA), item.block) {
            (true, _) => ExtentKind::Data,
            (false, Some(info)) => ExtentKind::TreeBlock { level: info.level },
            (false, None) => ExtentKind::TreeBlock { level: u8::try_from(key.offset).unwrap() },
        };
        let mut refs = item.inline.clone();
        let keyed = linux
            .0
            .range(Key::new(at, KeyType(170), 0)..Key::new(at, KeyType::BLOCK_GROUP_ITEM, 0));
        for (k, d) in keyed.clone() {
            refs.extend(parse_keyed_refs(k, d).unwrap());
        }
        let mut head = RefHead::existing(num_bytes, kind);
        (head.created, head.generation) = (true, item.generation);
        head.first_key = item.block.map(|b| b.key.into());
        head.set_full_backref = item.flags.contains(ExtentFlags::FULL_BACKREF);
        refs.iter().for_each(|(r, n)| head.add(*r, i64::from(*n)));
        apply(&mut mine, features, at, &head).unwrap();
        let info = extent_info(&mut mine, at, num_bytes, kind, trees.skinny).unwrap().unwrap();
        assert_eq!((info.refs, info.full_backref), (item.refs, head.set_full_backref), "{key}");
        all += 1;
        full += usize::from(head.set_full_backref);
        if keyed.clone().next().is_none() {
            assert_eq!(mine.0[key], *data, "{key}");
        } else {
            // Which references are inline depends on when they came, and inline ones that went left
            // room. A new item is as full as Linux would have made it.
            overflowing += 1;
            let range = Key::new(at, KeyType(170), 0)..Key::new(at, KeyType::BLOCK_GROUP_ITEM, 0);
            let (inline, more) = (mine.0[key].len(), mine.0.range(range).count());
            assert!(
                inline >= data.len() && more <= keyed.count() && more > 0,
                "{key}: {inline} {more}"
            );
            assert!(inline <= limit && inline + 29 > limit, "{key}: {inline} bytes of {limit}");
        }
        // And away again, the references in another order.
        let mut head = RefHead::existing(num_bytes, kind);
        refs.iter().rev().for_each(|(r, n)| head.add(*r, -i64::from(*n)));
        let mut copy = Map(
            linux
                .0
                .range(Key::new(at, KeyType(0), 0)..)
                .take(200)
                .map(|(k, d)| (*k, d.clone()))
                .collect(),
            linux.1,
        );
        let before = copy.0.len();
        apply(&mut copy, features, at, &head).unwrap();
        let gone = refs
            .iter()
            .filter(|(r, _)| item.inline_count(r) == 0 && !matches!(r, ExtentRef::Owner { .. }));
        assert_eq!(copy.0.len(), before - 1 - gone.count(), "{key}");
    }
    assert!(all > 200 && overflowing > 0 && full > 0, "{all} extents, {overflowing} {full}");
}

fn check_free_space(trees: &Trees, group: Run, used: &[Run]) -> bool {
    let mut linux = trees.tree(ObjectId::FREE_SPACE_TREE);
    linux.0.retain(|k, _| group.start.0 <= k.objectid.0 && k.objectid.0 < group.end().0);
    let info = &linux.0[&Key::new(group.start, KeyType::FREE_SPACE_INFO, group.len)];
    let bitmaps = info[4] == 1;
    // Extents as a new group would have them, then as edits leave them.
    let mut mine = Map(BTreeMap::new(), linux.1);
    free_space_tree::new_group(&mut mine, group, used).unwrap();
    let same_form = mine.0.values().any(|v| v.len() == 8 && (v[4] == 1) == bitmaps);
    if same_form {
        assert!(mine == linux, "free space of {group:?}");
    }
    for run in used {
        free_space_tree::add(&mut linux, group, *run).unwrap();
    }
    let mut runs = Vec::new();
    free_space_tree::load(&mut linux, group, &mut |r| {
        runs.push(r);
        Ok(())
    })
    .unwrap();
    assert_eq!(runs, [group]);
    for run in used.iter().rev() {
        free_space_tree::remove(&mut linux, group, *run).unwrap();
    }
    free_space_tree::load(&mut linux, group, &mut |_| Ok(())).unwrap();
    bitmaps
}

fn check_csums(trees: &Trees) {
    let linux = trees.tree(ObjectId::CSUM_TREE);
    let mut mine = Map(BTreeMap::new(), linux.1);
    let mut sectors = 0;
    for (key, data) in &linux.0 {
        csum_tree::insert(&mut mine, trees.csum, Logical(key.offset), data).unwrap();
        let len = (data.len() / trees.csum.size()) as u64 * 4096;
        let mut at = 0;
        csum_tree::read(
            &mut mine,
            trees.csum,
            Run::new(Logical(key.offset), len),
            &mut |_, sum| {
                assert_eq!(sum.unwrap(), &data[at..at + trees.csum.size()]);
                at += trees.csum.size();
                sectors += 1;
            },
        )
        .unwrap();
    }
    assert!(sectors > 400, "{sectors} sectors with checksums");
    let largest = |m: &Map| m.0.values().map(Vec::len).max();
    assert!(largest(&mine) >= largest(&linux));
}

#[test]
fn what_the_kernel_wrote_is_understood_and_written_alike() {
    if !oracle() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    for args in [
        &["-O", "free-space-tree"][..],
        &["-O", "block-group-tree", "--csum", "xxhash", "-d", "dup"],
        &["-O", "^free-space-tree,^skinny-metadata", "-m", "single", "-n", "4096"],
        &["-O", "^skinny-metadata", "--csum", "sha256", "-n", "65536"],
        &["-M", "-n", "4096"],
    ] {
        mkfs(&path, args);
        populate(&path, &dir.path().join("mnt"));
        let trees = Trees::read(&path);
        rebuild_extents(&trees);
        check_csums(&trees);
        let mut extents = trees.tree(ObjectId::EXTENT_TREE);
        let mut free = trees.tree(ObjectId::FREE_SPACE_TREE);
        let mut groups = trees.tree(trees.group_tree);
        let mut bitmaps = 0;
        for chunk in trees.chunks() {
            let run = Run::new(chunk.start, chunk.length);
            let mut one = |source: &mut FreeSource<'_>| {
                let loaded = load(
                    &chunk,
                    &mut groups,
                    trees.group_tree,
                    source,
                    &mut extents,
                    trees.nodesize,
                )
                .unwrap();
                assert!(!loaded.rebuild_free_space, "{args:?} {run:?}");
                (loaded.group.usage(), loaded.group.free_runs())
            };
            let scanned = one(&mut FreeSource::Extents);
            if trees.has_free_space_tree {
                assert_eq!(one(&mut FreeSource::Tree(&mut free)), scanned, "{args:?}");
                let used = scan_used(&mut extents, trees.nodesize, run).unwrap();
                bitmaps += usize::from(check_free_space(&trees, run, &used));
            }
            let item = groups.0[&Key::new(run.start, KeyType::BLOCK_GROUP_ITEM, run.len)].clone();
            assert_eq!(
                BlockGroupItem::parse(run.len, &item).unwrap().used.get(),
                scanned.0.allocated
            );
        }
        assert_eq!(bitmaps > 0, trees.has_free_space_tree, "{args:?}");
        fs::remove_file(&path).unwrap();
    }
}
