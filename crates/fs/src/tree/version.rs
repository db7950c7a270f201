//! Versions: unchanging trees for readers, and the epochs that keep their blocks from being reused.
//!
//! A version is a root and an [`Epoch`]. While any clone of an epoch lives, space that was freed by
//! transactions published after it began stays pinned. So a version reads without locks, and what
//! it reads is never overwritten beneath it. Versions live for one operation, because a version
//! that lingers pins space.

use crate::error::{Error, Place, Result};
use crate::lock::{self, Condvar, Mutex, RwLock, Wait};
use crate::tree::node::Node;
use crate::tree::store::{NodeStore, Pointer};
use larder_format::node::max_pointers;
use larder_format::{Generation, Key, Logical, MAX_LEVEL, TreeId};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// A stretch of time between two published transactions. Holding it pins what they and later ones
/// free. Its holder may wait for locks, nodes and devices, but neither for space nor for a commit:
/// both may be waiting for its end.
#[derive(Debug, Clone)]
pub(crate) struct Epoch(#[allow(dead_code)] Arc<Stretch>);

/// What the clones of an epoch share. Its end wakes the threads that wait for it.
#[derive(Debug)]
struct Stretch(Arc<Ends>);

impl Drop for Stretch {
    fn drop(&mut self) {
        let _lock = self.0.lock.lock();
        self.0.one.notify_all();
    }
}

#[derive(Debug, Default)]
struct Ends {
    lock: Mutex<(), lock::EpochEnd>,
    one: Condvar,
}

/// The current epoch, and the space waiting for older ones to end.
#[derive(Debug)]
pub(crate) struct Epochs<T> {
    current: RwLock<Epoch, lock::CurrentEpoch>,
    waiting: Mutex<VecDeque<(Weak<Stretch>, T)>, lock::EpochQueue>,
    ends: Arc<Ends>,
}

impl<T> Epochs<T> {
    pub(crate) fn new() -> Self {
        let ends = Arc::new(Ends::default());
        let first = Epoch(Arc::new(Stretch(ends.clone())));
        Self { current: RwLock::new(first), waiting: Mutex::new(VecDeque::new()), ends }
    }
    /// Enters the current epoch.
    pub(crate) fn enter(&self) -> Epoch {
        self.current.read().clone()
    }
    /// A transaction was published that freed `pinned`: begins a new epoch.
    pub(crate) fn advance(&self, pinned: T) {
        // The new epoch is made with the lock held, so that epochs queue up in order. The old one
        // is dropped after the lock: see `wait_for_oldest`.
        let mut waiting = self.waiting.lock();
        let new = Epoch(Arc::new(Stretch(self.ends.clone())));
        let old = std::mem::replace(&mut *self.current.write(), new);
        waiting.push_back((Arc::downgrade(&old.0), pinned));
        drop(waiting);
        drop(old);
    }
    /// Waits for the end of the oldest version that keeps freed space from being used, if there is
    /// one. It lives for one operation at most, and that operation does not wait for the caller.
    pub(crate) fn wait_for_oldest(&self) {
        lock::before_waiting(Wait::Commit);
        let Some(oldest) = self.waiting.lock().front().map(|(w, _)| w.clone()) else { return };
        // An epoch ends wherever its last clone is dropped, so no other lock may be held around
        // this one.
        let mut lock = self.ends.lock.lock();
        while oldest.strong_count() > 0 {
            self.ends.one.wait(&mut lock);
        }
    }
    /// Takes out what no version can reach any more, oldest first.
    pub(crate) fn expired(&self) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let mut out = Vec::new();
        // Later epochs can only see what earlier ones still could see, so the queue ends in order.
        while waiting.front().is_some_and(|(w, _)| w.strong_count() == 0) {
            out.extend(waiting.pop_front().map(|(_, t)| t));
        }
        out
    }
}

/// The root of a tree: a pointer, and the node itself while it is dirty.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    pub(crate) ptr: Pointer,
    pub(crate) node: Option<Arc<Node>>,
}

impl Root {
    /// Is it the root of the same version of a tree?
    pub(crate) fn is(&self, other: &Self) -> bool {
        let same_node = match (&self.node, &other.node) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        same_node && self.ptr == other.ptr
    }
}

/// An item: its key, and the leaf that holds its data.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    /// Key.
    pub(crate) key: Key,
    leaf: Arc<Node>,
    slot: usize,
}

impl Item {
    pub(crate) fn at(leaf: &Arc<Node>, slot: usize) -> Option<Self> {
        Some(Self { key: leaf.view().key(slot)?, leaf: leaf.clone(), slot })
    }
    /// Data of the item.
    #[must_use]
    pub(crate) fn data(&self) -> &[u8] {
        self.leaf.view().data(self.slot).unwrap_or_default()
    }
    /// Address of the leaf.
    #[must_use]
    pub(crate) fn leaf_address(&self) -> Logical {
        self.leaf.address()
    }
    /// The transaction that made the leaf.
    pub(crate) fn leaf_generation(&self) -> Generation {
        self.leaf.generation()
    }
    /// All bytes of the leaf.
    pub(crate) fn copy_of_leaf(&self) -> Vec<u8> {
        self.leaf.view().0.to_vec()
    }
}

/// Pointer that an interior node keeps for a child.
pub(crate) fn child_pointer(node: &Node, slot: usize) -> Pointer {
    let p = &node.view().pointers()[slot];
    Pointer {
        at: Logical(p.blockptr.get()),
        generation: Generation(p.generation.get()),
        level: node.level() - 1,
        first_key: Some(p.key.into()),
    }
}

/// Slot of the child that can hold `key`.
pub(crate) fn child_slot(node: &Node, key: &Key) -> usize {
    match node.view().search(key) {
        Ok(i) => i,
        Err(i) => i.saturating_sub(1),
    }
}

/// An unchanging tree.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    pub(crate) tree: TreeId,
    pub(crate) root: Root,
    pub(crate) store: Arc<NodeStore>,
    /// Keeps freed space from being reused, as long as it lives.
    #[allow(dead_code)]
    pub(crate) epoch: Epoch,
}

impl Version {
    /// Another tree, at a root read from an item, in the same epoch. The caller sets the tree's id.
    pub(crate) fn at_root(&self, ptr: Pointer) -> Self {
        Self { root: Root { ptr, node: None }, ..self.clone() }
    }
    /// Which tree this is a version of.
    #[must_use]
    pub(crate) fn tree(&self) -> TreeId {
        self.tree
    }
    /// Height of the root.
    #[must_use]
    pub(crate) fn level(&self) -> u8 {
        self.root.ptr.level
    }
    /// How many blocks the tree has at most, from its root alone: exact up to level 1.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn blocks_at_most(&self) -> Result<u64> {
        let root = self.root_node()?;
        let Some(below) = root.level().checked_sub(1) else { return Ok(1) };
        let pointers = max_pointers(self.store.format().nodesize) as u64;
        let child =
            (0..below).fold(1u64, |blocks, _| blocks.saturating_mul(pointers).saturating_add(1));
        Ok((root.view().nritems() as u64).saturating_mul(child).saturating_add(1))
    }
    pub(crate) fn root_node(&self) -> Result<Arc<Node>> {
        match &self.root.node {
            Some(n) => Ok(n.clone()),
            None => self.store.get(&self.root.ptr, self.tree),
        }
    }
    pub(crate) fn child(&self, node: &Node, slot: usize) -> Result<Arc<Node>> {
        match node.child(slot) {
            Some(c) => Ok(c.clone()),
            None => self.store.get(&child_pointer(node, slot), self.tree),
        }
    }
    /// The item with exactly this key.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn get(&self, key: &Key) -> Result<Option<Item>> {
        let leaf = self.leaf(key)?;
        Ok(leaf.view().search(key).ok().and_then(|slot| Item::at(&leaf, slot)))
    }
    /// The leaf that holds `key`, or would hold it.
    fn leaf(&self, key: &Key) -> Result<Arc<Node>> {
        let mut node = self.root_node()?;
        let mut levels = 0;
        while node.level() > 0 {
            if levels >= MAX_LEVEL {
                return Err(Error::corrupt(
                    Place::tree(self.tree),
                    "tree higher than eight levels",
                ));
            }
            levels += 1;
            node = self.child(&node, child_slot(&node, key))?;
        }
        Ok(node)
    }
    /// Pointers to the blocks on the way to the leaf that holds `key`, or would hold it. The leaf's
    /// own pointer is among them, the root's is not.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn blocks_above(&self, key: &Key) -> Result<Vec<Pointer>> {
        let mut out = Vec::new();
        let mut node = self.root_node()?;
        while node.level() > 0 {
            if out.len() >= usize::from(MAX_LEVEL) {
                return Err(Error::corrupt(
                    Place::tree(self.tree),
                    "tree higher than eight levels",
                ));
            }
            let slot = child_slot(&node, key);
            out.push(child_pointer(&node, slot));
            node = self.child(&node, slot)?;
        }
        Ok(out)
    }
    /// Calls `each` for the items of all leaves that were written in transaction `since` or later,
    /// until it returns false. Begins with the leaf that holds `from`, or would hold it.
    ///
    /// # Errors
    /// Reading or corruption; those of `each`.
    pub(crate) fn scan_since(
        &self,
        since: Generation,
        from: &Key,
        mut each: impl FnMut(&Item) -> Result<bool>,
    ) -> Result<()> {
        if self.root.ptr.generation < since {
            return Ok(());
        }
        let begin = |node: &Node| match node.level() {
            0 => node.view().search(from).unwrap_or_else(|slot| slot),
            _ => child_slot(node, from),
        };
        let root = self.root_node()?;
        let mut path = vec![(begin(&root), root)];
        while let Some((slot, node)) = path.last_mut() {
            let (here, node) = (*slot, node.clone());
            *slot += 1;
            if here >= node.view().nritems() {
                path.pop();
            } else if node.level() == 0 {
                if let Some(item) = Item::at(&node, here)
                    && !each(&item)?
                {
                    return Ok(());
                }
            } else if child_pointer(&node, here).generation >= since {
                if path.len() >= usize::from(MAX_LEVEL) {
                    return Err(Error::corrupt(
                        Place::tree(self.tree),
                        "tree higher than eight levels",
                    ));
                }
                let child = self.child(&node, here)?;
                path.push((begin(&child), child));
            }
        }
        Ok(())
    }
    /// A cursor before the first item that is not below `key`.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn seek(&self, key: &Key) -> Result<Cursor> {
        let mut path = Vec::with_capacity(usize::from(self.level()) + 1);
        let mut node = self.root_node()?;
        while node.level() > 0 {
            if path.len() >= usize::from(MAX_LEVEL) {
                return Err(Error::corrupt(
                    Place::tree(self.tree),
                    "tree higher than eight levels",
                ));
            }
            let slot = child_slot(&node, key);
            let child = self.child(&node, slot)?;
            path.push((node, slot));
            node = child;
        }
        let slot = node.view().search(key).unwrap_or_else(|i| i);
        path.push((node, slot));
        Ok(Cursor { version: self.clone(), path })
    }
    /// The item with the largest key that is not above `key`.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn at_or_before(&self, key: &Key) -> Result<Option<Item>> {
        // Nearly always the item is in this leaf, and no path is needed.
        let leaf = self.leaf(key)?;
        match leaf.view().search(key) {
            Ok(slot) => return Ok(Item::at(&leaf, slot)),
            Err(slot) if slot > 0 => return Ok(Item::at(&leaf, slot - 1)),
            Err(_) => {}
        }
        let mut cursor = self.seek(key)?;
        match cursor.peek() {
            Some(item) if item.key == *key => Ok(Some(item)),
            _ => cursor.prev(),
        }
    }
    /// The item with the smallest key that is not below `key`.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn at_or_after(&self, key: &Key) -> Result<Option<Item>> {
        let leaf = self.leaf(key)?;
        let slot = leaf.view().search(key).unwrap_or_else(|slot| slot);
        match Item::at(&leaf, slot) {
            Some(item) => Ok(Some(item)),
            None => self.seek(key)?.next(),
        }
    }
    /// Calls `each` for all items from `from` to `to` (inclusive) until it returns false.
    ///
    /// # Errors
    /// Reading or corruption, or what `each` says.
    pub(crate) fn scan(
        &self,
        from: &Key,
        to: &Key,
        mut each: impl FnMut(&Item) -> Result<bool>,
    ) -> Result<()> {
        let mut cursor = self.seek(from)?;
        while let Some(item) = cursor.next()? {
            if item.key > *to || !each(&item)? {
                break;
            }
        }
        Ok(())
    }
}

/// Lets the logic of items look things up in a version. A version never changes, so the calls that
/// change something are refused.
impl crate::tree::TreeOps for Version {
    fn max_item_size(&self) -> usize {
        larder_format::node::max_item_size(self.store.format().nodesize)
    }
    fn get(&mut self, key: &Key) -> Result<Option<Vec<u8>>> {
        Ok(Self::get(self, key)?.map(|i| i.data().to_vec()))
    }
    fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(Self::at_or_before(self, key)?.map(|i| (i.key, i.data().to_vec())))
    }
    fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(Self::at_or_after(self, key)?.map(|i| (i.key, i.data().to_vec())))
    }
    fn insert(&mut self, _: &Key, _: &[u8]) -> Result<()> {
        Err(Error::NotSupported("a version does not change"))
    }
    fn update(&mut self, _: &Key, _: &[u8]) -> Result<()> {
        Err(Error::NotSupported("a version does not change"))
    }
    fn delete(&mut self, _: &Key) -> Result<()> {
        Err(Error::NotSupported("a version does not change"))
    }
}

/// A place between two items of a version.
#[derive(Debug, Clone)]
pub(crate) struct Cursor {
    version: Version,
    /// Root first. The leaf's slot is that of the next item; it may be one past the end.
    path: Vec<(Arc<Node>, usize)>,
}

impl Cursor {
    /// The next item within this leaf, without moving.
    #[must_use]
    pub(crate) fn peek(&self) -> Option<Item> {
        let (leaf, slot) = self.path.last()?;
        Item::at(leaf, *slot)
    }
    /// The next item; moves behind it.
    ///
    /// # Errors
    /// Reading or corruption.
    #[allow(clippy::should_implement_trait)]
    pub(crate) fn next(&mut self) -> Result<Option<Item>> {
        loop {
            let (leaf, slot) = self.path.last_mut().expect("a path has a leaf");
            if let Some(item) = Item::at(leaf, *slot) {
                *slot += 1;
                return Ok(Some(item));
            }
            if !self.step(true)? {
                return Ok(None);
            }
        }
    }
    /// The previous item; moves before it.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn prev(&mut self) -> Result<Option<Item>> {
        loop {
            let (leaf, slot) = self.path.last_mut().expect("a path has a leaf");
            if *slot > 0 {
                *slot -= 1;
                return Ok(Item::at(leaf, *slot));
            }
            if !self.step(false)? {
                return Ok(None);
            }
        }
    }
    /// Moves to the neighbouring leaf; false, and no move, when there is none.
    fn step(&mut self, forward: bool) -> Result<bool> {
        let leaf_depth = self.path.len() - 1;
        let turn = (0..leaf_depth).rev().find(|&d| {
            let (node, slot) = &self.path[d];
            if forward { slot + 1 < node.view().nritems() } else { *slot > 0 }
        });
        let Some(turn) = turn else { return Ok(false) };
        let mut path = self.path[..=turn].to_vec();
        if forward {
            path[turn].1 += 1;
        } else {
            path[turn].1 -= 1;
        }
        for _ in turn..leaf_depth {
            let (node, slot) = path.last().expect("not empty");
            let child = self.version.child(node, *slot)?;
            let n = child.view().nritems();
            // An interior slot names a child; the leaf's slot names the next item.
            let slot = match (forward, child.level()) {
                (true, _) => 0,
                (false, 0) => n,
                (false, _) => n.saturating_sub(1),
            };
            path.push((child, slot));
        }
        // Keys are checked within nodes and against their parents, but not between neighbours. If
        // they did not rise, a walk over blocks that a damaged tree uses many times would not end
        // in our lifetime.
        let (old, new) = (self.path[leaf_depth].0.view(), path[leaf_depth].0.view());
        let (before, after) = if forward { (old, new) } else { (new, old) };
        let last = before.nritems().checked_sub(1).and_then(|slot| before.key(slot));
        if let (Some(last), Some(first)) = (last, after.key(0))
            && last >= first
        {
            let place = Place {
                tree: Some(self.version.tree),
                address: Some(new.bytenr()),
                ..Place::default()
            };
            return Err(Error::corrupt(
                place,
                format!("keys of neighbouring leaves overlap: {last} and {first}"),
            ));
        }
        self.path = path;
        Ok(true)
    }
}
