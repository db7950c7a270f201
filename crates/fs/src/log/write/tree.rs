//! How logged items lie in nodes, and which of them are written again.
//!
//! A log tree lives for one transaction, has one editor, and is in memory as a whole. So it needs
//! none of the machinery of [`crate::tree`]. Its leaves are found by the smallest key that they may
//! hold. A leaf that was written and is edited again goes to another address, because the durable
//! superblock may lead to the old one. The levels above the leaves are small and made again for
//! each write. Only nodes that come out as they were are kept.

use super::blocks::Blocks;
use super::{NotLogged, Result};
use crate::engine::Core;
use crate::error::Error;
use crate::tree::{Pointer, image};
use larder_format::node::{ITEM_SIZE, NodeView, max_item_size, max_pointers};
use larder_format::{Generation, Key, Logical, ObjectId};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// A leaf's bytes, and the address at which they were written, unless they have changed since.
#[derive(Debug)]
struct Leaf {
    bytes: Box<[u8]>,
    written: Option<Logical>,
}

/// A node above the leaves as it was last written.
#[derive(Debug)]
struct Above {
    children: Vec<(Key, Logical)>,
    at: Logical,
}

/// A tree of logged items.
#[derive(Debug)]
pub(super) struct LogTree {
    leaves: BTreeMap<Key, Leaf>,
    /// The levels above the leaves, from the lowest upwards.
    above: Vec<Vec<Above>>,
    nodesize: u32,
}

/// A node that is to be written to the device.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) at: Logical,
    pub(super) bytes: Box<[u8]>,
    pub(super) is_root: bool,
}

impl LogTree {
    pub(super) fn new(nodesize: u32) -> Self {
        let mut tree = Self { leaves: BTreeMap::new(), above: Vec::new(), nodesize };
        tree.leaves.insert(Key::MIN, tree.empty());
        tree
    }
    fn empty(&self) -> Leaf {
        Leaf { bytes: vec![0; self.nodesize as usize].into(), written: None }
    }
    /// Has it no items?
    pub(super) fn is_empty(&self) -> bool {
        self.leaves.values().all(|leaf| NodeView(&leaf.bytes).nritems() == 0)
    }
    fn leaf(&self, key: &Key) -> NodeView<'_> {
        let (_, leaf) = self
            .leaves
            .range(..=*key)
            .next_back()
            .expect("the first leaf begins with the smallest key");
        NodeView(&leaf.bytes)
    }
    /// An item.
    pub(super) fn get(&self, key: &Key) -> Option<&[u8]> {
        let view = self.leaf(key);
        view.search(key).ok().and_then(|slot| view.data(slot))
    }
    /// All items in a range of keys, in order.
    pub(super) fn range(
        &self,
        keys: RangeInclusive<Key>,
    ) -> impl Iterator<Item = (Key, &[u8])> + use<'_> {
        let (from, to) = keys.into_inner();
        let first = self.leaves.range(..=from).next_back().map_or(Key::MIN, |(key, _)| *key);
        self.leaves.range(first..=to.max(first)).flat_map(move |(_, leaf)| {
            let view = NodeView(&leaf.bytes);
            let start = view.search(&from).unwrap_or_else(|slot| slot);
            (start..view.nritems()).map_while(move |slot| {
                Some((view.key(slot).filter(|key| *key <= to)?, view.data(slot)?))
            })
        })
    }
    /// The last item that is not above `key` and not below `from`.
    pub(super) fn at_or_before(&self, from: &Key, key: &Key) -> Option<(Key, &[u8])> {
        self.leaves
            .range(..=*key)
            .rev()
            .find_map(|(_, leaf)| {
                let view = NodeView(&leaf.bytes);
                let slot = match view.search(key) {
                    Ok(slot) => slot,
                    Err(slot) => slot.checked_sub(1)?,
                };
                Some((view.key(slot)?, view.data(slot)?))
            })
            .filter(|(key, _)| key >= from)
    }

    /// The bytes of the leaf for a key, for a change.
    fn leaf_mut<'a>(
        leaves: &'a mut BTreeMap<Key, Leaf>,
        key: &Key,
        blocks: &mut Blocks,
    ) -> &'a mut Box<[u8]> {
        let (_, leaf) = leaves
            .range_mut(..=*key)
            .next_back()
            .expect("the first leaf begins with the smallest key");
        if let Some(at) = leaf.written.take() {
            blocks.replace(at);
        }
        &mut leaf.bytes
    }
    /// Sets an item.
    ///
    /// # Errors
    /// The item is too long for a node.
    pub(super) fn put(&mut self, blocks: &mut Blocks, key: &Key, data: &[u8]) -> Result<()> {
        if data.len() > max_item_size(self.nodesize) {
            return Err(NotLogged::Fail(Error::TooBig));
        }
        if let Ok(slot) = self.leaf(key).search(key) {
            if self.leaf(key).data(slot) == Some(data) {
                return Ok(());
            }
            let bytes = Self::leaf_mut(&mut self.leaves, key, blocks);
            if NodeView(bytes).data(slot).is_some_and(|old| old.len() == data.len()) {
                image::leaf_data_mut(bytes, slot).copy_from_slice(data);
                return Ok(());
            }
            image::leaf_remove(bytes, slot, 1);
        }
        if self.insert(blocks, key, data) {
            return Ok(());
        }
        // Log items come mostly in rising order: at the end nothing has to be moved, and leaves
        // stay full.
        let bytes = Self::leaf_mut(&mut self.leaves, key, blocks);
        let count = NodeView(bytes).nritems();
        let slot = slot_for(bytes, key);
        self.split(blocks, key, if slot == count { count } else { count / 2 });
        if self.insert(blocks, key, data) {
            return Ok(());
        }
        // The item begins a leaf. What was behind it goes to one more leaf.
        let slot = slot_for(Self::leaf_mut(&mut self.leaves, key, blocks), key);
        self.split(blocks, key, slot);
        let mut own = self.empty();
        insert(&mut own.bytes, 0, key, data);
        self.leaves.insert(*key, own);
        self.drop_empty(blocks);
        Ok(())
    }
    /// Adds an item that the leaf for its key does not have. False if it has no room.
    fn insert(&mut self, blocks: &mut Blocks, key: &Key, data: &[u8]) -> bool {
        let bytes = Self::leaf_mut(&mut self.leaves, key, blocks);
        let fits = NodeView(bytes).leaf_free() >= data.len() + ITEM_SIZE;
        if fits {
            let slot = slot_for(bytes, key);
            insert(bytes, slot, key, data);
        }
        fits
    }
    /// Moves what the leaf for a key has from a slot on to a leaf of its own.
    fn split(&mut self, blocks: &mut Blocks, key: &Key, from: usize) {
        let mut tail = self.empty();
        let bytes = Self::leaf_mut(&mut self.leaves, key, blocks);
        image::leaf_move_tail(bytes, from, &mut tail.bytes);
        if let Some(first) = NodeView(&tail.bytes).key(0) {
            self.leaves.insert(first, tail);
        }
    }
    /// Removes all items in a range of keys.
    pub(super) fn remove(&mut self, blocks: &mut Blocks, keys: RangeInclusive<Key>) {
        let (from, to) = keys.into_inner();
        let first = self.leaves.range(..=from).next_back().map_or(Key::MIN, |(key, _)| *key);
        let mut emptied = false;
        for leaf in self.leaves.range_mut(first..=to.max(first)).map(|(_, leaf)| leaf) {
            let view = NodeView(&leaf.bytes);
            let start = view.search(&from).unwrap_or_else(|slot| slot);
            let end = view.search(&to).map_or_else(|slot| slot, |slot| slot + 1);
            if start < end {
                if let Some(at) = leaf.written.take() {
                    blocks.replace(at);
                }
                image::leaf_remove(&mut leaf.bytes, start, end - start);
                emptied |= NodeView(&leaf.bytes).nritems() == 0;
            }
        }
        if emptied {
            self.drop_empty(blocks);
        }
    }
    fn drop_empty(&mut self, blocks: &mut Blocks) {
        self.leaves.retain(|_, leaf| {
            let keep = NodeView(&leaf.bytes).nritems() > 0;
            if let Some(at) = leaf.written.filter(|_| !keep) {
                blocks.replace(at);
            }
            keep
        });
        match self.leaves.pop_first() {
            Some((_, leaf)) => self.leaves.insert(Key::MIN, leaf),
            None => self.leaves.insert(Key::MIN, self.empty()),
        };
    }

    /// Gives an address to all nodes that have changed and adds them to `out`. Returns where the
    /// root is.
    ///
    /// # Errors
    /// There is no space that the log may use.
    pub(super) fn write(
        &mut self,
        core: &Core,
        blocks: &mut Blocks,
        generation: Generation,
        out: &mut Vec<Outgoing>,
    ) -> Result<Pointer> {
        let single = self.leaves.len() == 1;
        let mut children = Vec::with_capacity(self.leaves.len());
        for leaf in self.leaves.values_mut() {
            let at = match leaf.written {
                Some(at) => at,
                None => {
                    let at = blocks.take(core, generation)?;
                    let count = NodeView(&leaf.bytes).header().nritems;
                    image::init(
                        &mut leaf.bytes,
                        core.store.format(),
                        at,
                        generation,
                        ObjectId::TREE_LOG,
                        0,
                    );
                    image::header_mut(&mut leaf.bytes).nritems = count;
                    out.push(Outgoing { at, bytes: leaf.bytes.clone(), is_root: single });
                    leaf.written = Some(at);
                    at
                }
            };
            children.push((NodeView(&leaf.bytes).key(0).unwrap_or(Key::MIN), at));
        }
        let mut level = 0;
        let mut before = std::mem::take(&mut self.above).into_iter();
        while children.len() > 1 {
            level += 1;
            let old = before.next().unwrap_or_default();
            let (nodes, upper) =
                self.write_above(core, blocks, (generation, level), children, old, out)?;
            self.above.push(nodes);
            children = upper;
        }
        before.flatten().for_each(|gone| blocks.replace(gone.at));
        let (_, at) = children[0];
        Ok(Pointer { at, generation, level, first_key: None })
    }
    /// One level: its nodes, and the pointers to them.
    #[allow(clippy::type_complexity)]
    fn write_above(
        &self,
        core: &Core,
        blocks: &mut Blocks,
        (generation, level): (Generation, u8),
        children: Vec<(Key, Logical)>,
        old: Vec<Above>,
        out: &mut Vec<Outgoing>,
    ) -> Result<(Vec<Above>, Vec<(Key, Logical)>)> {
        let room = max_pointers(self.nodesize);
        let is_root = children.len() <= room;
        let (mut nodes, mut upper) = (Vec::new(), Vec::new());
        let mut old = old.into_iter();
        for some in children.chunks(room) {
            let same = old.next();
            if let Some(same) = same.as_ref().filter(|node| node.children == some) {
                upper.push((some[0].0, same.at));
                nodes.push(Above { children: some.to_vec(), at: same.at });
                continue;
            }
            if let Some(gone) = same {
                blocks.replace(gone.at);
            }
            let at = blocks.take(core, generation)?;
            let mut bytes: Box<[u8]> = vec![0; self.nodesize as usize].into();
            image::init(&mut bytes, core.store.format(), at, generation, ObjectId::TREE_LOG, level);
            for (slot, (key, child)) in some.iter().enumerate() {
                image::node_insert(&mut bytes, slot, &image::pointer(*key, *child, generation));
            }
            out.push(Outgoing { at, bytes, is_root });
            upper.push((some[0].0, at));
            nodes.push(Above { children: some.to_vec(), at });
        }
        old.for_each(|gone| blocks.replace(gone.at));
        Ok((nodes, upper))
    }
}

/// Where a leaf has the item of a key, or would have it.
fn slot_for(bytes: &[u8], key: &Key) -> usize {
    NodeView(bytes).search(key).unwrap_or_else(|slot| slot)
}

fn insert(bytes: &mut [u8], slot: usize, key: &Key, data: &[u8]) {
    image::leaf_insert(bytes, slot, key, data.len());
    image::leaf_data_mut(bytes, slot).copy_from_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::KeyType;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Put(u64, usize),
        Remove(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        // Sizes up to what a node of 4 KiB holds.
        let size = prop_oneof![4 => 0usize..80, 1 => 0usize..3970];
        prop_oneof![
            6 => (0u64..120, size).prop_map(|(key, len)| Op::Put(key, len)),
            1 => (0u64..120, 0u64..40).prop_map(|(from, len)| Op::Remove(from, from + len)),
        ]
    }

    fn key(n: u64) -> Key {
        Key::new(ObjectId(256 + n / 10), KeyType(84), n)
    }

    proptest! {
        #[test]
        fn items_match_a_map(ops in prop::collection::vec(op(), 1..200)) {
            let mut blocks = Blocks::default();
            let mut tree = LogTree::new(4096);
            let mut map: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
            for (n, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Put(at, len) => {
                        let data = vec![n as u8; len];
                        tree.put(&mut blocks, &key(at), &data).expect("it fits");
                        map.insert(key(at), data);
                    }
                    Op::Remove(from, to) => {
                        tree.remove(&mut blocks, key(from)..=key(to));
                        map.retain(|k, _| *k < key(from) || *k > key(to));
                    }
                }
                let all: Vec<_> = tree.range(Key::MIN..=Key::MAX).collect();
                prop_assert!(all.iter().copied().eq(map.iter().map(|(k, d)| (*k, d.as_slice()))));
                for probe in [0, 17, 60, 119] {
                    prop_assert_eq!(tree.get(&key(probe)), map.get(&key(probe)).map(Vec::as_slice));
                    let below =
                        map.range(..=key(probe)).next_back().map(|(k, d)| (*k, d.as_slice()));
                    prop_assert_eq!(tree.at_or_before(&Key::MIN, &key(probe)), below);
                }
                let some = tree.range(key(30)..=key(70));
                let same = map.range(key(30)..=key(70)).map(|(k, d)| (*k, d.as_slice()));
                prop_assert!(some.eq(same));
                prop_assert!(tree.leaves.contains_key(&Key::MIN));
                for (first, leaf) in &tree.leaves {
                    prop_assert!(NodeView(&leaf.bytes).key(0).is_none_or(|k| k >= *first));
                }
            }
        }
    }
}
