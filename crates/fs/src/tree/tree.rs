//! A tree that changes: one root, short shared look-ups, and edits that never wait under the lock.
//!
//! An edit names the keys that it is going to touch. With the lock held it makes the path to each
//! of them writable — copied to a new address where the running transaction does not own it yet —
//! and only then runs the caller's changes. Something may be missing on the way: a node that is not
//! in memory, the reference count of a block that a snapshot may share, addresses for new blocks,
//! notes that another thread has locked. Then the attempt ends with a [`Need`]. The lock is
//! dropped, the [`BlockSource`] provides what was missing, and the attempt starts over. Making a
//! path writable changes nothing that anybody can see, so starting over is harmless. Once the
//! caller's changes run, nothing can be missing any more.
//!
//! All changes of one edit appear at once: a version has them all or none.

use crate::error::Result;
use crate::lock::{self, Exclusive, RwLock};
use crate::tree::edit::Editor;
use crate::tree::holds::{self, Begun, Holds};
use crate::tree::image;
use crate::tree::node::Node;
use crate::tree::source::{BlockSource, EditStop, Need, blocks_for_splits};
use crate::tree::store::{NodeStore, Pointer};
use crate::tree::version::{Epoch, Item, Root, Version, child_pointer, child_slot};
use larder_format::node::FLAG_RELOC;
use larder_format::{Generation, Key, Logical, MAX_LEVEL, TreeId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Counters of all trees together.
#[derive(Debug, Default)]
pub(crate) struct TreeStats {
    /// Edits.
    pub(crate) edits: AtomicU64,
    /// Attempts that lacked something.
    pub(crate) retries: AtomicU64,
    /// How long edits locked trees.
    pub(crate) holds: Holds,
    /// Blocks copied to a new address.
    pub(crate) cow: AtomicU64,
    /// Height of the highest tree so far: what an item costs at worst grows with it.
    pub(crate) tallest: AtomicU64,
}

/// A block, and how it is found in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OnPath {
    /// Its first key; the lowest key if it is an empty root.
    pub(crate) key: Key,
    /// Its height.
    pub(crate) level: u8,
    /// Its address.
    pub(crate) at: Logical,
}

/// Nodes that were fetched for an attempt, by address and transaction.
type Fetched = HashMap<(Logical, Generation), Arc<Node>>;

#[derive(Debug)]
pub(crate) struct TreeState {
    pub(crate) root: Root,
    /// Blocks up to this generation may be shared with a snapshot.
    pub(crate) last_snapshot: Generation,
    /// Blocks that were copied in the transaction of the last snapshot, but after it. No other tree
    /// has them.
    since: HashSet<Logical>,
}

impl TreeState {
    /// Was a snapshot taken in this transaction? Then a block of this transaction may belong to
    /// another tree, too.
    fn is_forced(&self, generation: Generation) -> bool {
        self.last_snapshot >= generation
    }
}

/// A tree that changes.
#[derive(Debug)]
pub(crate) struct Tree {
    id: TreeId,
    store: Arc<NodeStore>,
    state: RwLock<TreeState, lock::TreeRoot>,
    /// Blocks made, minus blocks dropped, since the count was last taken.
    blocks: AtomicI64,
    stats: Arc<TreeStats>,
}

impl Tree {
    /// A tree whose root lies at `root`.
    pub(crate) fn new(
        id: TreeId,
        store: Arc<NodeStore>,
        root: Pointer,
        last_snapshot: Generation,
        stats: Arc<TreeStats>,
    ) -> Self {
        let state = TreeState {
            root: Root { ptr: root, node: None },
            last_snapshot,
            since: HashSet::new(),
        };
        stats.tallest.fetch_max(u64::from(root.level.min(MAX_LEVEL)), Ordering::Relaxed);
        Self { id, store, state: RwLock::new(state), blocks: AtomicI64::new(0), stats }
    }
    /// A new tree that is one leaf with these items, in rising order of keys, at the address `at`.
    pub(crate) fn with_leaf(
        id: TreeId,
        store: Arc<NodeStore>,
        source: &mut dyn BlockSource,
        at: Logical,
        items: &[(Key, Vec<u8>)],
        stats: Arc<TreeStats>,
    ) -> Self {
        let generation = source.generation();
        let mut node = Node::fresh(source.buffer(), store.format(), at, generation, id, 0);
        for (slot, (key, data)) in items.iter().enumerate() {
            image::leaf_put(node.bytes_mut(), slot, key, data);
        }
        source.created(id, at, 0, node.first_key().unwrap_or_default());
        let ptr = Pointer { at, generation, level: 0, first_key: None };
        let root = Root { ptr, node: Some(Arc::new(node)) };
        let state = TreeState { root, last_snapshot: Generation(0), since: HashSet::new() };
        Self { id, store, state: RwLock::new(state), blocks: AtomicI64::new(1), stats }
    }
    /// Makes a snapshot: a tree whose root is a copy of this one's, and which shares everything
    /// below. This tree's root becomes one of the running transaction, as on Linux. From here on
    /// edits copy what the two share. The cost does not depend on the size of the tree.
    ///
    /// # Errors
    /// Reading, corruption, no space. Nothing that anybody can see has changed then.
    pub(crate) fn snapshot(&self, source: &mut dyn BlockSource, id: TreeId) -> Result<Self> {
        let mut held = Fetched::new();
        loop {
            let (mut state, begun) = self.lock();
            let stop = match self.try_snapshot(&mut state, source, id, &held) {
                Ok(root) => {
                    let last_snapshot = source.generation();
                    state.last_snapshot = last_snapshot;
                    state.since.clear();
                    self.unlock(state, begun);
                    let state = TreeState { root, last_snapshot, since: HashSet::new() };
                    return Ok(Self {
                        id,
                        store: self.store.clone(),
                        state: RwLock::new(state),
                        blocks: AtomicI64::new(0),
                        stats: self.stats.clone(),
                    });
                }
                Err(stop) => stop,
            };
            self.unlock(state, begun);
            self.fetch(&stop.need()?, source, &mut held)?;
        }
    }
    fn try_snapshot(
        &self,
        state: &mut TreeState,
        source: &mut dyn BlockSource,
        id: TreeId,
        held: &Fetched,
    ) -> Result<Root, EditStop> {
        if source.available() < 2 {
            return Err(EditStop::Need(Need::Blocks(2)));
        }
        self.open_root(state, source, held)?;
        let root = state.root.node.as_ref().expect("the root was just made dirty");
        let at = source.take();
        if let Err(stop) = source.snapshot(id, root, at) {
            source.untake(at);
            return Err(stop);
        }
        let generation = source.generation();
        let copy = root.copied_to(source.buffer(), self.store.format(), at, generation, id);
        let ptr = Pointer { at, generation, level: copy.level(), first_key: None };
        Ok(Root { ptr, node: Some(Arc::new(copy)) })
    }
    /// By how many blocks the tree has grown since the growth was last taken.
    pub(crate) fn growth(&self) -> i64 {
        self.blocks.load(Ordering::Relaxed)
    }
    /// Its id.
    #[must_use]
    pub(crate) fn id(&self) -> TreeId {
        self.id
    }
    /// The tree as it is now, as a version that never changes. The caller has entered the epoch
    /// before the call.
    pub(crate) fn version(&self, epoch: Epoch) -> Version {
        Version {
            tree: self.id,
            root: self.state.read().root.clone(),
            store: self.store.clone(),
            epoch,
        }
    }
    /// By how many blocks the tree has grown since this was last asked.
    pub(crate) fn take_growth(&self) -> i64 {
        self.blocks.swap(0, Ordering::Relaxed)
    }
    /// Where the root is.
    pub(crate) fn root(&self) -> Root {
        self.state.read().root.clone()
    }
    /// Does something with the lock held. For tests that break the engine.
    pub(crate) fn locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let _state = self.state.read();
        f()
    }
    /// Pretends that the last snapshot was taken then. For tests that break the engine.
    pub(crate) fn set_last_snapshot(&self, generation: Generation) {
        self.state.write().last_snapshot = generation;
    }
    /// Blocks up to this generation may be shared.
    pub(crate) fn last_snapshot(&self) -> Generation {
        self.state.read().last_snapshot
    }
    /// Replaces the root's image by its clean form, unless an edit has changed the tree since
    /// `frozen` was taken.
    pub(crate) fn settle(&self, frozen: &Root) {
        let (mut state, begun) = self.lock();
        if let (Some(now), Some(then)) = (&state.root.node, &frozen.node)
            && Arc::ptr_eq(now, then)
        {
            let clean = then.stripped();
            state.root.node = Some(clean);
        }
        self.unlock(state, begun);
    }

    /// Locks the tree for a change.
    fn lock(&self) -> (Exclusive<'_, TreeState>, Begun) {
        let state = self.state.try_write().unwrap_or_else(|| {
            let state = self.state.write();
            holds::waited();
            state
        });
        (state, holds::begin())
    }
    /// Gives the lock back, and counts how long it was held.
    fn unlock(&self, state: Exclusive<'_, TreeState>, begun: Begun) {
        let over = self.stats.holds.over(&begun);
        drop(state);
        self.stats.holds.note(self.id, &over);
    }
    /// Provides what an attempt lacked. Nothing is locked.
    fn fetch(&self, need: &Need, source: &mut dyn BlockSource, held: &mut Fetched) -> Result<()> {
        if let Need::Node(ptr) = need {
            let node = self.store.get(ptr, self.id)?;
            held.insert((ptr.at, ptr.generation), node);
            return Ok(());
        }
        source.provide(need)
    }

    /// Looks one item up under the shared lock. The caller has entered the epoch before the call.
    ///
    /// # Errors
    /// Reading or corruption; `WouldBlock` where the thread may not wait and a node is not in
    /// memory.
    pub(crate) fn get(&self, key: &Key, _epoch: &Epoch) -> Result<Option<Item>> {
        let mut held = Fetched::new();
        loop {
            let missing = {
                let state = self.state.read();
                match find(&state.root, key, |p| self.at_hand(p, &held)) {
                    Ok(leaf) => {
                        return Ok(leaf
                            .view()
                            .search(key)
                            .ok()
                            .and_then(|slot| Item::at(&leaf, slot)));
                    }
                    Err(p) => p,
                }
            };
            let node = self.store.get(&missing, self.id)?;
            held.insert((missing.at, missing.generation), node);
        }
    }

    /// Changes items. `keys` are all keys that `change` is going to look up, insert, update or
    /// delete. `change` runs once.
    ///
    /// # Errors
    /// What `change` returns (its changes up to there stay), or reading, corruption, no space —
    /// before any change.
    pub(crate) fn edit<R>(
        &self,
        source: &mut dyn BlockSource,
        keys: &[Key],
        change: impl FnOnce(&mut Editor<'_>) -> Result<R>,
    ) -> Result<R> {
        self.edit_growing(source, keys, keys.len(), change)
    }

    /// Like [`Tree::edit`], for an edit that inserts or lengthens at most `growing` of the items.
    /// The fewer they are, the fewer addresses have to be at hand. Deleting on a full file system
    /// depends on that.
    ///
    /// # Errors
    /// As [`Tree::edit`].
    pub(crate) fn edit_growing<R>(
        &self,
        source: &mut dyn BlockSource,
        keys: &[Key],
        growing: usize,
        change: impl FnOnce(&mut Editor<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut held = Fetched::new();
        self.stats.edits.fetch_add(1, Ordering::Relaxed);
        loop {
            let (mut state, begun) = self.lock();
            let stop = match self.prepare(&mut state, source, keys, growing, &held) {
                Ok(()) => {
                    let (result, changed) = self.change(&mut state, source, keys, change);
                    self.unlock(state, begun);
                    if let Err(e) = &result
                        && changed
                    {
                        source.half_done(e);
                    }
                    return result;
                }
                Err(stop) => stop,
            };
            self.unlock(state, begun);
            let need = stop.need()?;
            self.stats.retries.fetch_add(1, Ordering::Relaxed);
            self.fetch(&need, source, &mut held)?;
        }
    }

    /// Runs the caller's changes on paths that are writable. Returns what came of them, and whether
    /// they have changed anything.
    fn change<R>(
        &self,
        state: &mut TreeState,
        source: &mut dyn BlockSource,
        keys: &[Key],
        change: impl FnOnce(&mut Editor<'_>) -> Result<R>,
    ) -> (Result<R>, bool) {
        // After a snapshot, neighbours may belong to the snapshot, too. So nothing is tidied for
        // the rest of that transaction.
        let tidy = !state.is_forced(source.generation());
        let mut editor = Editor::new(self.id, self.store.format(), &mut state.root, source, tidy);
        let result = change(&mut editor);
        if tidy && editor.shrunk {
            keys.iter().for_each(|key| editor.tidy(key));
        }
        self.blocks.fetch_add(editor.blocks, Ordering::Relaxed);
        let changed = editor.changed;
        self.stats.tallest.fetch_max(u64::from(state.root.ptr.level), Ordering::Relaxed);
        (result, changed)
    }

    /// The node that a pointer means, from the nodes that were fetched for this attempt or from the
    /// cache.
    fn at_hand(&self, ptr: &Pointer, held: &Fetched) -> Option<Arc<Node>> {
        let held = held.get(&(ptr.at, ptr.generation)).filter(|node| ptr.means(node, self.id));
        held.cloned().or_else(|| self.store.peek(ptr, self.id))
    }

    /// Makes the paths to all keys writable.
    fn prepare(
        &self,
        state: &mut TreeState,
        source: &mut dyn BlockSource,
        keys: &[Key],
        growing: usize,
        held: &Fetched,
    ) -> Result<(), EditStop> {
        let level = state.root.ptr.level;
        let splits = blocks_for_splits(growing, level);
        // Usually enough for the copies, too, because most keys of an edit share most of their
        // paths.
        let usual = splits
            + if state.root.ptr.generation == source.generation() {
                0
            } else {
                usize::from(level) + 1
            };
        if source.available() < usual {
            return Err(EditStop::Need(Need::Blocks(usual)));
        }
        // Neighbouring keys share their leaf. Keys in this range are on the path that was opened
        // last.
        let mut open: Option<(Key, Option<Key>)> = None;
        for key in keys {
            if !open.is_some_and(|(from, to)| from <= *key && to.is_none_or(|to| *key < to)) {
                open = Some((*key, self.open_path(state, source, key, held)?));
            }
        }
        if source.available() < splits {
            return Err(EditStop::Need(Need::Blocks(splits)));
        }
        Ok(())
    }

    /// Makes the root writable.
    fn open_root(
        &self,
        state: &mut TreeState,
        source: &mut dyn BlockSource,
        held: &Fetched,
    ) -> Result<(), EditStop> {
        let generation = source.generation();
        // If a root of this generation is not in memory, the image is damaged: the roots that we
        // make are always in memory.
        if state.root.ptr.generation != generation || state.root.node.is_none() {
            let old = match &state.root.node {
                Some(n) => n.clone(),
                None => self
                    .at_hand(&state.root.ptr, held)
                    .ok_or(EditStop::Need(Need::Node(state.root.ptr)))?,
            };
            let new = self.copy(source, &old, false)?;
            state.root = Root {
                ptr: Pointer { at: new.address(), generation, ..state.root.ptr },
                node: Some(new),
            };
            state.since.clear();
        }
        Ok(())
    }

    /// Makes the path to a key writable. Returns the first key behind it that another leaf may
    /// hold, if there is one.
    fn open_path(
        &self,
        state: &mut TreeState,
        source: &mut dyn BlockSource,
        key: &Key,
        held: &Fetched,
    ) -> Result<Option<Key>, EditStop> {
        self.open_down_to(state, source, key, 0, held).map(|(_, end)| end)
    }

    /// Makes the path to a key writable, down to a level. Returns the node there, and the first key
    /// behind the given one that another node of this level may hold, if there is one.
    fn open_down_to<'s>(
        &self,
        state: &'s mut TreeState,
        source: &mut dyn BlockSource,
        key: &Key,
        level: u8,
        held: &Fetched,
    ) -> Result<(&'s mut Node, Option<Key>), EditStop> {
        let find = |ptr: &Pointer| self.at_hand(ptr, held).ok_or(EditStop::Need(Need::Node(*ptr)));
        let generation = source.generation();
        self.open_root(state, source, held)?;
        let forced = state.is_forced(generation);
        let TreeState { root, last_snapshot, since } = state;
        let mut node = Arc::make_mut(root.node.as_mut().expect("the root was just made dirty"));
        let mut end = None;
        while node.level() > level {
            let slot = child_slot(node, key);
            end = node.view().key(slot + 1).or(end);
            let ours = node.child(slot).is_some_and(|c| {
                c.generation() == generation && (!forced || since.contains(&c.address()))
            });
            if !ours {
                let ptr = child_pointer(node, slot);
                let old = match node.child(slot) {
                    Some(c) => c.clone(),
                    None => find(&ptr)?,
                };
                let shared = self.id.holds_files()
                    && (old.generation() <= *last_snapshot || old.view().flags() & FLAG_RELOC != 0);
                let new = self.copy(source, &old, shared)?;
                if forced {
                    since.insert(new.address());
                }
                node.set_child(slot, new);
            }
            node = Arc::make_mut(node.child_mut(slot));
        }
        Ok((node, end))
    }

    /// Copies the block at `old` to a new place, if the path to its first key still goes through
    /// it. Returns whether it does. Items stay as they are.
    ///
    /// # Errors
    /// Reading, corruption, no space.
    pub(crate) fn move_block(&self, source: &mut dyn BlockSource, old: &OnPath) -> Result<bool> {
        self.change_path(source, old, old.level, |_| ())
    }

    /// Makes the parent of the block at `old` point to the block at `new`, which has the same
    /// items, if it still points to the old one. Returns whether it did. The caller has noted what
    /// this means for the references of both blocks.
    ///
    /// # Errors
    /// Reading, corruption, no space. The pointer is as it was then.
    pub(crate) fn repoint(
        &self,
        source: &mut dyn BlockSource,
        old: &OnPath,
        new: Logical,
    ) -> Result<bool> {
        let generation = source.generation();
        self.change_path(source, old, old.level + 1, |parent| {
            parent.repoint(child_slot(parent, &old.key), new, generation);
        })
    }

    /// Makes the path to a block writable down to a level, and changes the node there, if the block
    /// is still on the path.
    fn change_path(
        &self,
        source: &mut dyn BlockSource,
        block: &OnPath,
        down_to: u8,
        change: impl FnOnce(&mut Node),
    ) -> Result<bool> {
        let mut held = Fetched::new();
        self.stats.edits.fetch_add(1, Ordering::Relaxed);
        loop {
            let (mut state, begun) = self.lock();
            let stop = match self.open_if_there(&mut state, source, block, down_to, &held) {
                Ok(found) => {
                    let there = found.is_some();
                    if let Some(node) = found {
                        change(node);
                    }
                    self.unlock(state, begun);
                    return Ok(there);
                }
                Err(stop) => stop,
            };
            self.unlock(state, begun);
            let need = stop.need()?;
            self.stats.retries.fetch_add(1, Ordering::Relaxed);
            self.fetch(&need, source, &mut held)?;
        }
    }

    fn open_if_there<'s>(
        &self,
        state: &'s mut TreeState,
        source: &mut dyn BlockSource,
        block: &OnPath,
        down_to: u8,
        held: &Fetched,
    ) -> Result<Option<&'s mut Node>, EditStop> {
        if self.address_on_path(state, block, held)? != Some(block.at)
            || down_to > state.root.ptr.level
        {
            return Ok(None);
        }
        let usual = usize::from(state.root.ptr.level - down_to) + 1;
        if source.available() < usual {
            return Err(EditStop::Need(Need::Blocks(usual)));
        }
        self.open_down_to(state, source, &block.key, down_to, held).map(|(node, _)| Some(node))
    }

    /// The address of the block at a level on the path to a key.
    fn address_on_path(
        &self,
        state: &TreeState,
        OnPath { key, level, .. }: &OnPath,
        held: &Fetched,
    ) -> Result<Option<Logical>, EditStop> {
        let find = |ptr: &Pointer| self.at_hand(ptr, held).ok_or(EditStop::Need(Need::Node(*ptr)));
        let root = &state.root;
        if root.ptr.level <= *level {
            return Ok((root.ptr.level == *level).then_some(root.ptr.at));
        }
        let mut node = match &root.node {
            Some(node) => node.clone(),
            None => find(&root.ptr)?,
        };
        loop {
            let slot = child_slot(&node, key);
            let ptr = child_pointer(&node, slot);
            if ptr.level == *level {
                return Ok(Some(ptr.at));
            }
            node = match node.child(slot) {
                Some(child) => child.clone(),
                None => find(&ptr)?,
            };
        }
    }

    /// Copies a block to a new address.
    fn copy(
        &self,
        source: &mut dyn BlockSource,
        old: &Arc<Node>,
        shared: bool,
    ) -> Result<Arc<Node>, EditStop> {
        if source.available() == 0 {
            return Err(EditStop::Need(Need::Blocks(usize::from(old.level()) + 1)));
        }
        let at = source.take();
        if let Err(stop) = source.copied(self.id, old, at, shared) {
            source.untake(at);
            return Err(stop);
        }
        self.stats.cow.fetch_add(1, Ordering::Relaxed);
        let buffer = source.buffer();
        let mut new = old.copied_to(buffer, self.store.format(), at, source.generation(), self.id);
        new.forget_clean(source.published());
        Ok(Arc::new(new))
    }
}

/// Walks to the leaf for `key` through the nodes that `find` has in memory. The error is the first
/// pointer to a node that it does not have.
fn find(
    root: &Root,
    key: &Key,
    find: impl Fn(&Pointer) -> Option<Arc<Node>>,
) -> std::result::Result<Arc<Node>, Pointer> {
    let mut node = match &root.node {
        Some(n) => n.clone(),
        None => find(&root.ptr).ok_or(root.ptr)?,
    };
    while node.level() > 0 {
        let slot = child_slot(&node, key);
        let child = match node.child(slot) {
            Some(c) => c.clone(),
            None => {
                let ptr = child_pointer(&node, slot);
                find(&ptr).ok_or(ptr)?
            }
        };
        node = child;
    }
    Ok(node)
}
