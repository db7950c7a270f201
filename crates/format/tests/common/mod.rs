//! Help for the tests: images made by Linux's tools, and a reader that knows only this crate.

#![allow(dead_code)]

use larder_format::check::{Expect, check_chunk, check_node};
use larder_format::node::NodeView;
use larder_format::{
    DiskKey, Generation, Key, KeyType, Logical, ObjectId, Physical, SUPER_OFFSETS, Superblock,
    TreeId,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use zerocopy::FromBytes;

/// Is a program there? If not, says that the test is skipped, or fails where nothing may be
/// missing.
pub(crate) fn has(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !there {
        missing(program);
    }
    there
}

/// Something a test needs is not there: said, and logged where the test run collects that.
pub(crate) fn missing(what: &str) {
    let thread = std::thread::current();
    let line = format!("{}: skipped: needs {what}", thread.name().unwrap_or("?"));
    let required = std::env::var("LARDER_REQUIRE_ORACLES").is_ok_and(|v| !v.is_empty() && v != "0");
    assert!(!required, "{line}, and LARDER_REQUIRE_ORACLES is set");
    // Not a print macro: the harness swallows those of tests that pass.
    let _ = writeln!(std::io::stderr(), "{line}");
    if let Some(log) = std::env::var_os("LARDER_SKIP_LOG")
        && let Ok(mut file) = File::options().create(true).append(true).open(log)
    {
        let _ = writeln!(file, "{line}");
    }
}

/// Runs a program to its good end and returns what it printed.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let out =
        Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("tools print text")
}

/// Makes an empty 256 MiB file and `mkfs.btrfs` on it.
pub(crate) fn mkfs(path: &Path, args: &[&str]) {
    mkfs_sized(path, 256 << 20, args);
}

/// Makes an empty file and `mkfs.btrfs` on it.
pub(crate) fn mkfs_sized(path: &Path, size: u64, args: &[&str]) {
    File::create(path).unwrap().set_len(size).unwrap();
    let mut all = vec!["-q"];
    all.extend(args);
    all.push(path.to_str().unwrap());
    run("mkfs.btrfs", &all);
}

/// A chunk, by hand: where it starts, how long it is, where its copies are on the only device.
struct Mapped {
    length: u64,
    copies: Vec<u64>,
}

/// An image of one device.
pub(crate) struct Image {
    file: File,
    pub(crate) sb: Box<Superblock>,
    chunks: BTreeMap<u64, Mapped>,
}

/// Nodes of all trees by address, each with the tree it was found through first.
pub(crate) type Nodes = BTreeMap<u64, (TreeId, Vec<u8>)>;

impl Image {
    pub(crate) fn open(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let sb = Superblock::parse(&read_super(&file, SUPER_OFFSETS[0]), SUPER_OFFSETS[0]).unwrap();
        let mut image = Self { file, sb, chunks: BTreeMap::new() };
        let array = image.sb.sys_chunk_bytes().to_vec();
        let mut rest = &array[..];
        while !rest.is_empty() {
            let (key, tail) = DiskKey::read_from_prefix(rest).unwrap();
            let stripes = usize::from(u16::from_le_bytes([tail[44], tail[45]]));
            let (item, tail) = tail.split_at(48 + 32 * stripes);
            image.add_chunk(key.into(), item);
            rest = tail;
        }
        image
    }
    pub(crate) fn superblock_bytes(&self, at: Physical) -> Vec<u8> {
        read_super(&self.file, at)
    }
    fn add_chunk(&mut self, key: Key, item: &[u8]) {
        check_chunk(&key, item, self.sb.nodesize()).unwrap();
        let copies = item[48..].chunks(32).map(|s| le64(s, 8)).collect();
        self.chunks.insert(key.offset, Mapped { length: le64(item, 0), copies });
    }
    /// Bytes of a node, from each copy.
    pub(crate) fn node(&self, at: u64) -> Vec<Vec<u8>> {
        let (start, chunk) = self.chunks.range(..=at).next_back().expect("an address in a chunk");
        assert!(at - start < chunk.length, "address {at} lies in no chunk");
        let read = |physical: &u64| {
            let mut buf = vec![0; self.sb.nodesize() as usize];
            self.file.read_exact_at(&mut buf, physical + (at - start)).unwrap();
            buf
        };
        chunk.copies.iter().map(read).collect()
    }
    /// What a parent knows about a root.
    pub(crate) fn expect_root(&self, owner: TreeId, at: u64, level: u8, generation: u64) -> Expect {
        Expect {
            nodesize: self.sb.nodesize(),
            fsid: self.sb.metadata_fsid(),
            bytenr: Logical(at),
            level: Some(level),
            generation: Some(Generation(generation)),
            owner: Some(owner),
            is_root: true,
            first_key: None,
            csum: Some(self.sb.csum_type()),
            super_generation: self.sb.generation(),
            names_hidden: false,
        }
    }
    pub(crate) fn expect_chunk_root(&self) -> Expect {
        let sb = &self.sb;
        let (level, generation) = (sb.chunk_root_level, sb.chunk_root_generation().0);
        self.expect_root(ObjectId::CHUNK_TREE, sb.chunk_root().0, level, generation)
    }
    pub(crate) fn expect_root_tree(&self) -> Expect {
        let sb = &self.sb;
        self.expect_root(ObjectId::ROOT_TREE, sb.root().0, sb.root_level, sb.generation().0)
    }
    /// Checks every copy of every node of every tree, and returns them.
    pub(crate) fn walk(&mut self) -> Nodes {
        let mut nodes = Nodes::new();
        let mut chunks = Vec::new();
        self.walk_tree(&self.expect_chunk_root(), &mut nodes, &mut |key, data| {
            if key.kind == KeyType::CHUNK_ITEM {
                chunks.push((key, data.to_vec()));
            }
        });
        for (key, item) in chunks {
            self.add_chunk(key, &item);
        }
        let mut roots = Vec::new();
        self.walk_tree(&self.expect_root_tree(), &mut nodes, &mut |key, data| {
            if key.kind == KeyType::ROOT_ITEM {
                roots.push(self.expect_root(
                    key.objectid,
                    le64(data, 176),
                    data[238],
                    le64(data, 160),
                ));
            }
        });
        for root in roots {
            self.walk_tree(&root, &mut nodes, &mut |_, _| {});
        }
        nodes
    }
    /// Checks the log: the tree of log roots and the log tree of each subvolume. None of their
    /// nodes is among those of [`Image::walk`]; before that, only nodes in system chunks can be
    /// found.
    pub(crate) fn walk_log(&self) -> Nodes {
        let mut nodes = Nodes::new();
        let Some(at) = self.sb.log_root() else { return nodes };
        let generation = self.sb.generation().0 + 1;
        let roots = self.expect_root(ObjectId::TREE_LOG, at.0, self.sb.log_root_level, generation);
        let mut logs = Vec::new();
        self.walk_tree(&roots, &mut nodes, &mut |key, data| {
            assert_eq!((key.objectid, key.kind), (ObjectId::TREE_LOG, KeyType::ROOT_ITEM));
            logs.push(self.expect_root(
                ObjectId::TREE_LOG,
                le64(data, 176),
                data[238],
                le64(data, 160),
            ));
        });
        for log in logs {
            self.walk_tree(&log, &mut nodes, &mut |_, _| {});
        }
        nodes
    }
    fn walk_tree(&self, expect: &Expect, nodes: &mut Nodes, each: &mut impl FnMut(Key, &[u8])) {
        let owner = expect.owner.unwrap();
        let copies = self.node(expect.bytenr.0);
        for bytes in &copies {
            check_node(bytes, expect)
                .unwrap_or_else(|e| panic!("tree {owner}, block {}: {e}", expect.bytenr));
        }
        let node = NodeView(&copies[0]);
        for slot in 0..node.nritems() {
            if node.level() == 0 {
                each(node.key(slot).unwrap(), node.data(slot).unwrap());
                continue;
            }
            let pointer = &node.pointers()[slot];
            let child = Expect {
                bytenr: Logical(pointer.blockptr.get()),
                level: Some(node.level() - 1),
                generation: Some(Generation(pointer.generation.get())),
                is_root: false,
                first_key: Some(pointer.key.into()),
                ..expect.clone()
            };
            self.walk_tree(&child, nodes, each);
        }
        nodes.entry(expect.bytenr.0).or_insert_with(|| (owner, copies[0].clone()));
    }
}

/// Key and data of all leaf items.
pub(crate) fn items(nodes: &Nodes) -> impl Iterator<Item = (TreeId, Key, &[u8])> {
    nodes.values().filter(|(_, b)| NodeView(b).level() == 0).flat_map(|(tree, b)| {
        let node = NodeView(b);
        (0..node.nritems()).map(move |s| (*tree, node.key(s).unwrap(), node.data(s).unwrap()))
    })
}

pub(crate) fn le64(d: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(d[at..at + 8].try_into().unwrap())
}

/// Puts a node's checksum right.
pub(crate) fn reseal(bytes: &mut [u8], csum: larder_format::CsumType) {
    let sum = csum.compute(&bytes[32..]);
    bytes[..32].copy_from_slice(&sum);
}

fn read_super(file: &File, at: Physical) -> Vec<u8> {
    let mut buf = vec![0; larder_format::SUPER_SIZE];
    file.read_exact_at(&mut buf, at.0).unwrap();
    buf
}
