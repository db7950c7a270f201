//! Trees against a sorted map.
#![allow(clippy::disallowed_types, reason = "locks of tests have no place in the order")]

use super::*;
use crate::error::Result;
use larder_format::node::max_item_size;
use larder_format::{CsumType, Generation, Key, KeyType, Logical, ObjectId, TreeId};
use larder_volume::VolumeResult;
use parking_lot::Mutex;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const NODESIZE: u32 = 4096;

/// Blocks in memory.
#[derive(Debug, Default)]
struct Blocks(Mutex<HashMap<Logical, Vec<u8>>>);
impl BlockReader for Blocks {
    fn copies(&self, _: Logical) -> usize {
        1
    }
    fn read(&self, at: Logical, buf: &mut [u8], _: usize) -> VolumeResult<()> {
        buf.copy_from_slice(&self.0.lock()[&at]);
        Ok(())
    }
    fn repair(&self, _: Logical, _: &[u8], _: usize) -> VolumeResult<()> {
        unreachable!("nothing is damaged here")
    }
}

/// Hands out rising addresses and keeps count of what lives.
#[derive(Debug)]
struct Source {
    generation: Generation,
    next: u64,
    preallocated: Vec<Logical>,
    live: BTreeMap<Logical, u8>,
}
impl BlockSource for Source {
    fn generation(&self) -> Generation {
        self.generation
    }
    fn published(&self) -> Generation {
        Generation(self.generation.0 - 1)
    }
    fn available(&self) -> usize {
        self.preallocated.len()
    }
    fn take(&mut self) -> Logical {
        self.preallocated.pop().unwrap()
    }
    fn untake(&mut self, at: Logical) {
        self.preallocated.push(at);
    }
    fn buffer(&mut self) -> Arc<[u8]> {
        vec![0u8; NODESIZE as usize].into()
    }
    fn created(&mut self, _: TreeId, at: Logical, level: u8, _: Key) {
        assert!(self.live.insert(at, level).is_none());
    }
    fn copied(
        &mut self,
        _: TreeId,
        old: &Node,
        new: Logical,
        _: bool,
    ) -> std::result::Result<(), EditStop> {
        assert_eq!(self.live.remove(&old.address()), Some(old.level()));
        assert!(self.live.insert(new, old.level()).is_none());
        Ok(())
    }
    fn snapshot(
        &mut self,
        _: TreeId,
        root: &Node,
        new: Logical,
    ) -> std::result::Result<(), EditStop> {
        assert!(self.live.insert(new, root.level()).is_none());
        Ok(())
    }
    fn dropped(&mut self, _: TreeId, at: Logical, level: u8) {
        assert_eq!(self.live.remove(&at), Some(level));
    }
    fn half_done(&mut self, error: &crate::Error) {
        panic!("{error}");
    }
    fn provide(&mut self, need: &Need) -> Result<()> {
        let Need::Blocks(n) = need else { panic!("only blocks are ever missing here") };
        while self.preallocated.len() < *n {
            self.next += u64::from(NODESIZE);
            self.preallocated.push(Logical(self.next));
        }
        Ok(())
    }
}

struct Fixture {
    tree: Tree,
    source: Source,
    blocks: Arc<Blocks>,
    store: Arc<NodeStore>,
    epochs: Epochs<()>,
    model: BTreeMap<Key, Vec<u8>>,
}

fn fixture() -> Fixture {
    let format = NodeFormat {
        nodesize: NODESIZE,
        fsid: [3; 16],
        seeds: Vec::new(),
        chunk_tree_uuid: [4; 16],
        names_hidden: false,
    };
    let blocks = Arc::new(Blocks::default());
    let mut first = vec![0u8; NODESIZE as usize];
    let at = Logical(1 << 20);
    image::init(&mut first, &format, at, Generation(1), ObjectId::UUID_TREE, 0);
    image::header_mut(&mut first).set_flags(1);
    let sum = CsumType::Crc32c.compute(&first[32..]);
    first[..32].copy_from_slice(&sum);
    blocks.0.lock().insert(at, first);
    let store = Arc::new(NodeStore::new(
        blocks.clone(),
        format,
        CsumType::Crc32c,
        Generation(1),
        64 << 10,
        false,
    ));
    let root = Pointer { at, generation: Generation(1), level: 0, first_key: None };
    let tree = Tree::new(ObjectId::UUID_TREE, store.clone(), root, Generation(0), Arc::default());
    let source = Source {
        generation: Generation(2),
        next: 2 << 20,
        preallocated: Vec::new(),
        live: BTreeMap::from([(at, 0)]),
    };
    Fixture { tree, source, blocks, store, epochs: Epochs::new(), model: BTreeMap::new() }
}

/// Writes all dirty nodes out and starts the next transaction.
fn commit(f: &mut Fixture) {
    fn write(blocks: &Blocks, store: &NodeStore, node: &Arc<Node>, generation: Generation) {
        for c in node.children().iter().flatten() {
            if c.generation() == generation {
                write(blocks, store, c, generation);
            }
        }
        let mut bytes = node.bytes().to_vec();
        image::header_mut(&mut bytes).set_flags(1);
        let sum = CsumType::Crc32c.compute(&bytes[32..]);
        bytes[..32].copy_from_slice(&sum);
        blocks.0.lock().insert(node.address(), bytes);
        store.put(node.clone());
    }
    let root = f.tree.root();
    if let Some(node) = root.node.as_ref().filter(|n| n.generation() == f.source.generation) {
        write(&f.blocks, &f.store, node, f.source.generation);
    }
    f.store.set_super_generation(f.source.generation);
    f.source.generation = f.source.generation.next();
    f.tree.settle(&root);
}

/// Keys of a kind whose items the node checker has no rules for.
fn key(i: u16) -> Key {
    Key::new(1, KeyType::UUID_SUBVOL, u64::from(i) * 4096)
}

fn verify(version: &Version, model: &BTreeMap<Key, Vec<u8>>) {
    let mut cursor = version.seek(&Key::MIN).unwrap();
    let mut forward = Vec::new();
    while let Some(item) = cursor.next().unwrap() {
        forward.push((item.key, item.data().to_vec()));
    }
    let expected: Vec<_> = model.iter().map(|(k, v)| (*k, v.clone())).collect();
    assert_eq!(forward, expected);
    let mut backward = Vec::new();
    while let Some(item) = cursor.prev().unwrap() {
        backward.push((item.key, item.data().to_vec()));
    }
    backward.reverse();
    assert_eq!(backward, expected);
}

#[derive(Debug, Clone)]
enum Op {
    Insert(u16, usize),
    Update(u16, usize),
    Delete(u16),
    DeleteRun(u16, u16),
    Several(Vec<u16>),
    Commit,
    Remember,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let max = max_item_size(NODESIZE);
    let size = prop_oneof![4 => 0usize..200, 1 => 0usize..=max];
    let k = prop_oneof![0u16..60, 0u16..2000];
    let op = prop_oneof![
        6 => (k.clone(), size.clone()).prop_map(|(k, s)| Op::Insert(k, s)),
        2 => (k.clone(), size).prop_map(|(k, s)| Op::Update(k, s)),
        3 => k.clone().prop_map(Op::Delete),
        1 => (k.clone(), 1u16..400).prop_map(|(k, n)| Op::DeleteRun(k, n)),
        1 => prop::collection::vec(k, 1..6).prop_map(Op::Several),
        1 => Just(Op::Commit),
        1 => Just(Op::Remember),
    ];
    prop::collection::vec(op, 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// Random edits leave what a map would have; versions taken on the way keep what they saw;
    /// every block that was made is reachable or was dropped.
    #[test]
    fn edits_match_a_map(ops in ops()) {
        let mut f = fixture();
        let mut remembered = Vec::new();
        for op in ops {
            match op {
                Op::Insert(k, s) => {
                    let k = key(k);
                    let data = vec![u8::try_from(s % 251).unwrap(); s];
                    let exists = f.model.contains_key(&k);
                    let done = f.tree.edit(&mut f.source, &[k], |e| e.insert(&k, &data));
                    prop_assert_eq!(done.is_ok(), !exists);
                    f.model.entry(k).or_insert(data);
                }
                Op::Update(k, s) => {
                    let k = key(k);
                    let data = vec![7u8; s];
                    let done = f.tree.edit(&mut f.source, &[k], |e| e.update(&k, &data));
                    prop_assert_eq!(done.is_ok(), f.model.contains_key(&k));
                    if let Some(v) = f.model.get_mut(&k) { *v = data; }
                }
                Op::Delete(k) => {
                    let k = key(k);
                    let done = f.tree.edit_growing(&mut f.source, &[k], 0, |e| e.delete(&k));
                    prop_assert_eq!(done.is_ok(), f.model.remove(&k).is_some());
                }
                Op::DeleteRun(k, n) => {
                    let range = key(k)..key(k.saturating_add(n));
                    let keys: Vec<Key> = f.model.range(range).map(|(k, _)| *k).collect();
                    for k in keys {
                        f.tree.edit_growing(&mut f.source, &[k], 0, |e| e.delete(&k)).unwrap();
                        f.model.remove(&k);
                    }
                }
                Op::Several(ks) => {
                    let keys: Vec<Key> = ks.iter().map(|k| key(*k)).collect();
                    let model = &mut f.model;
                    f.tree.edit(&mut f.source, &keys, |e| {
                        for k in &keys {
                            if e.get(k).is_some() {
                                e.delete(k)?;
                                model.remove(k);
                            } else {
                                e.insert(k, b"several")?;
                                model.insert(*k, b"several".to_vec());
                            }
                        }
                        Ok(())
                    }).unwrap();
                }
                Op::Commit => commit(&mut f),
                Op::Remember => {
                    let epoch = f.epochs.enter();
                    remembered.push((f.tree.version(epoch), f.model.clone()));
                }
            }
            // Each edit has to ask for all that it may need. Addresses that another edit left over
            // must not hide that it did not ask.
            f.source.preallocated.clear();
        }
        let now = f.tree.version(f.epochs.enter());
        verify(&now, &f.model);
        for (version, model) in &remembered {
            verify(version, model);
        }
        for (k, v) in &f.model {
            let found = f.tree.get(k, &f.epochs.enter()).unwrap().unwrap();
            prop_assert_eq!(found.data(), &v[..]);
        }
        prop_assert_eq!(reachable(&now), f.source.live.clone());
    }
}

/// Keys that grow, but not quite in order, as when several threads make files. The leaves must not
/// stay half full.
#[test]
fn leaves_are_packed_when_neighbours_come_in_turn() {
    for distance in [1u16, 3, 8, 40] {
        let mut f = fixture();
        let count = 2000;
        let mut bytes = 0;
        let mut insert = |i: u16| {
            let data = [u8::try_from(i % 251).unwrap(); 150];
            bytes += data.len() + larder_format::node::ITEM_SIZE;
            let k = key(i);
            f.tree.edit(&mut f.source, &[k], |e| e.insert(&k, &data)).unwrap();
        };
        // Each group of keys is taken from both ends in turn.
        for first in (0..count).step_by(usize::from(distance)) {
            let group: Vec<u16> = (first..(first + distance).min(count)).collect();
            for i in 0..group.len() {
                insert(if i % 2 == 0 { group[group.len() - 1 - i / 2] } else { group[i / 2] });
            }
        }
        let leaves = f.source.live.values().filter(|level| **level == 0).count();
        let fill =
            bytes as f64 / (leaves * (NODESIZE as usize - larder_format::node::HEADER_SIZE)) as f64;
        println!("distance {distance}: {leaves} leaves, {:.0} % full", fill * 100.0);
        assert!(
            fill > 0.85,
            "keys at distance {distance} leave {leaves} leaves {:.0} % full",
            fill * 100.0
        );
    }
}

fn reachable(version: &Version) -> BTreeMap<Logical, u8> {
    fn walk(v: &Version, node: &Arc<Node>, out: &mut BTreeMap<Logical, u8>) {
        out.insert(node.address(), node.level());
        if node.level() == 0 {
            return;
        }
        for slot in 0..node.view().nritems() {
            let child = match node.child(slot) {
                Some(c) => c.clone(),
                None => v.store.get(&super::version::child_pointer(node, slot), v.tree).unwrap(),
            };
            assert_eq!(
                child.first_key(),
                node.view().key(slot),
                "a parent's key is its child's first key"
            );
            walk(v, &child, out);
        }
    }
    let mut out = BTreeMap::new();
    let root = match &version.root.node {
        Some(n) => n.clone(),
        None => version.store.get(&version.root.ptr, version.tree).unwrap(),
    };
    walk(version, &root, &mut out);
    out
}

/// A block as it lies on the device.
fn put_raw(f: &Fixture, at: u64, level: u8, fill: impl FnOnce(&mut [u8])) -> Logical {
    let mut bytes = vec![0u8; NODESIZE as usize];
    image::init(
        &mut bytes,
        f.store.format(),
        Logical(at),
        Generation(1),
        ObjectId::UUID_TREE,
        level,
    );
    image::header_mut(&mut bytes).set_flags(1);
    fill(&mut bytes);
    let sum = CsumType::Crc32c.compute(&bytes[32..]);
    bytes[..32].copy_from_slice(&sum);
    f.blocks.0.lock().insert(Logical(at), bytes);
    Logical(at)
}

/// Seven levels of twenty nodes each. Every node points to all nodes of the level below whose first
/// keys are not smaller than its own. Each node is sound by itself. A walk that believes them
/// visits millions of leaves, backwards again and again.
#[test]
fn a_walk_over_blocks_used_many_times_ends() {
    let f = fixture();
    let mut below: Vec<Logical> = (0..20u16)
        .map(|n| {
            put_raw(&f, (2 << 20) + u64::from(n) * 4096, 0, |bytes| {
                for (slot, i) in (n..20).enumerate() {
                    image::leaf_insert(bytes, slot, &key(i), 0);
                }
            })
        })
        .collect();
    for level in 1..8u8 {
        let at = (2 << 20) + u64::from(level) * (1 << 20);
        below = (0..20u16)
            .map(|n| {
                put_raw(&f, at + u64::from(n) * 4096, level, |bytes| {
                    for (slot, i) in (n..20).enumerate() {
                        let ptr = image::pointer(key(i), below[usize::from(i)], Generation(1));
                        image::node_insert(bytes, slot, &ptr);
                    }
                })
            })
            .collect();
    }
    let root = Pointer { at: below[0], generation: Generation(1), level: 7, first_key: None };
    let tree = Tree::new(ObjectId::UUID_TREE, f.store.clone(), root, Generation(0), Arc::default());
    let version = tree.version(f.epochs.enter());
    assert!(version.get(&key(7)).unwrap().is_some());
    let mut seen = 0;
    let end = version.scan(&Key::MIN, &Key::MAX, |_| {
        seen += 1;
        Ok(true)
    });
    let error = end.expect_err("the tree is damaged").to_string();
    assert!(error.contains("neighbouring leaves overlap"), "{error}");
    assert_eq!(seen, 20);
    let mut cursor = version.seek(&key(19)).unwrap();
    while let Ok(Some(_)) = cursor.prev() {
        seen += 1;
    }
    assert!(seen < 100, "{seen}");
}

#[test]
fn epochs_release_in_order() {
    let epochs: Epochs<u32> = Epochs::new();
    let first = epochs.enter();
    epochs.advance(1);
    let second = epochs.enter();
    epochs.advance(2);
    epochs.advance(3);
    assert!(epochs.expired().is_empty());
    drop(second);
    assert!(epochs.expired().is_empty(), "an older version can still reach what was freed later");
    drop(first);
    assert_eq!(epochs.expired(), [1, 2, 3]);
}

#[test]
fn the_oldest_version_can_be_waited_for() {
    let epochs: Epochs<u32> = Epochs::new();
    epochs.wait_for_oldest();
    let first = epochs.enter();
    epochs.advance(1);
    let second = epochs.enter();
    epochs.advance(2);
    let (started, waits) = std::sync::mpsc::channel();
    std::thread::scope(|s| {
        let waiter = s.spawn(|| {
            started.send(()).unwrap();
            epochs.wait_for_oldest();
            epochs.expired()
        });
        waits.recv().unwrap();
        assert!(!waiter.is_finished() && epochs.expired().is_empty());
        drop(first);
        assert_eq!(waiter.join().unwrap(), [1], "the second still lives");
    });
    drop(second);
    epochs.wait_for_oldest();
    assert_eq!(epochs.expired(), [2]);
}
