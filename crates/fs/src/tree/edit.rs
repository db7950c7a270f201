//! Changes to items, once the paths to them are writable.
//!
//! An [`Editor`] lives inside [`super::Tree::edit`]. Every node on the way to a prepared key is in
//! memory and owned by the running transaction, and enough addresses are at hand. So nothing here
//! waits, or fails for lack of anything.
//!
//! Leaves that became empty are removed, and keys in parents are raised, only at the end
//! ([`Editor::tidy`]). Until then each prepared key must still lead to the leaf that was prepared
//! for it.

use crate::error::{Error, Place, Result};
use crate::tree::balance::{self, Cut};
use crate::tree::image::{self, NodeFormat};
use crate::tree::node::Node;
use crate::tree::source::{BlockSource, blocks_for_splits};
use crate::tree::store::Pointer;
use crate::tree::version::{Root, child_slot};
use larder_format::node::{ITEM_SIZE, max_item_size, max_pointers};
use larder_format::{Key, TreeId};
use smallvec::SmallVec;
use std::sync::Arc;

/// New right neighbours that a split made, in key order.
type Split = SmallVec<[Arc<Node>; 2]>;

/// Changes items of one tree. See the module's text.
pub(crate) struct Editor<'a> {
    tree: TreeId,
    format: &'a NodeFormat,
    root: &'a mut Root,
    source: &'a mut dyn BlockSource,
    /// May the editor change nodes of this transaction that are not on a prepared path? It may not
    /// while a snapshot may share them.
    neighbours: bool,
    /// Blocks made, minus blocks dropped.
    pub(super) blocks: i64,
    /// Was anything changed?
    pub(super) changed: bool,
    /// Did a leaf lose anything? Only then is there something to tidy.
    pub(super) shrunk: bool,
}

impl<'a> Editor<'a> {
    pub(crate) fn new(
        tree: TreeId,
        format: &'a NodeFormat,
        root: &'a mut Root,
        source: &'a mut dyn BlockSource,
        neighbours: bool,
    ) -> Self {
        Self { tree, format, root, source, neighbours, blocks: 0, changed: false, shrunk: false }
    }

    fn leaf(&self, key: &Key) -> &Arc<Node> {
        let mut node = self.root.node.as_ref().expect("an edited tree's root is in memory");
        while node.level() > 0 {
            node = node.child(child_slot(node, key)).unwrap_or_else(|| {
                panic!("key {key} of tree {} was not named to the edit", self.tree);
            });
        }
        node
    }

    fn leaf_mut(&mut self, key: &Key) -> &mut Node {
        let mut node =
            Arc::make_mut(self.root.node.as_mut().expect("an edited tree's root is in memory"));
        while node.level() > 0 {
            let slot = child_slot(node, key);
            node = Arc::make_mut(node.child_mut(slot));
        }
        node
    }

    /// Are there enough addresses at hand to insert one more item, whatever that splits? An edit
    /// that inserts more items than it was prepared for asks before each.
    pub(crate) fn has_room(&self) -> bool {
        self.source.available() >= blocks_for_splits(1, self.root.ptr.level)
    }

    /// Data of an item.
    pub(crate) fn get(&self, key: &Key) -> Option<&[u8]> {
        let view = self.leaf(key).view();
        view.search(key).ok().and_then(|slot| view.data(slot))
    }

    /// Adds an item.
    ///
    /// # Errors
    /// `Corrupt` when the key is taken; `TooBig` when no leaf could hold it.
    pub(crate) fn insert(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        if data.len() > max_item_size(self.format.nodesize) {
            return Err(Error::TooBig);
        }
        let mut root = self.root.node.take().expect("an edited tree's root is in memory");
        match self.insert_below(&mut root, key, data) {
            None => {
                self.root.node = Some(root);
                return Err(Error::corrupt(Place::item(self.tree, *key), "item exists already"));
            }
            Some(split) if split.is_empty() => self.root.node = Some(root),
            Some(split) => self.grow(root, split),
        }
        self.changed = true;
        Ok(())
    }

    /// Replaces the data of an item.
    ///
    /// # Errors
    /// `Corrupt` when there is none; `TooBig` when no leaf could hold it.
    pub(crate) fn update(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        if data.len() > max_item_size(self.format.nodesize) {
            return Err(Error::TooBig);
        }
        let tree = self.tree;
        let leaf = self.leaf_mut(key);
        let view = leaf.view();
        let Ok(slot) = view.search(key) else {
            return Err(Error::corrupt(Place::item(tree, *key), "item is missing"));
        };
        let old = view.items()[slot].size.get() as usize;
        if data.len() > old && data.len() - old > view.leaf_free() {
            self.delete(key)?;
            return self.insert(key, data);
        }
        let bytes = leaf.bytes_mut();
        if data.len() != old {
            image::leaf_resize(bytes, slot, data.len());
        }
        image::leaf_data_mut(bytes, slot).copy_from_slice(data);
        self.changed = true;
        self.shrunk |= data.len() < old;
        Ok(())
    }

    /// Removes an item.
    ///
    /// # Errors
    /// `Corrupt` when there is none.
    pub(crate) fn delete(&mut self, key: &Key) -> Result<()> {
        if self.get(key).is_none() {
            return Err(Error::corrupt(Place::item(self.tree, *key), "item is missing"));
        }
        self.changed = true;
        self.shrunk = true;
        let root = self.root.node.as_mut().expect("an edited tree's root is in memory");
        delete_below(Arc::make_mut(root), key);
        Ok(())
    }

    /// Adds a root above `old` and its new neighbours.
    fn grow(&mut self, old: Arc<Node>, split: Split) {
        let level = old.level() + 1;
        let first = old.first_key().expect("a node that was split is not empty");
        let mut root = self.new_node(level, first);
        root.insert_child(0, first, old);
        for node in split {
            let key = node.first_key().expect("a node made by a split is not empty");
            let end = root.view().nritems();
            root.insert_child(end, key, node);
        }
        self.root.ptr =
            Pointer { at: root.address(), generation: root.generation(), level, first_key: None };
        self.root.node = Some(Arc::new(root));
    }

    fn new_node(&mut self, level: u8, first_key: Key) -> Node {
        let at = self.source.take();
        self.source.created(self.tree, at, level, first_key);
        self.blocks += 1;
        let buffer = self.source.buffer();
        Node::fresh(buffer, self.format, at, self.source.generation(), self.tree, level)
    }

    fn dropped(&mut self, node: &Arc<Node>) {
        self.blocks -= 1;
        self.source.dropped(self.tree, node.address(), node.level());
    }

    /// Inserts below a node. Returns the new right neighbours of the node. If the key is taken,
    /// returns `None` and changes nothing.
    fn insert_below(&mut self, node: &mut Arc<Node>, key: &Key, data: &[u8]) -> Option<Split> {
        let node = Arc::make_mut(node);
        if node.level() == 0 {
            return self.insert_in_leaf(node, key, data);
        }
        let slot = child_slot(node, key);
        if node.level() == 1 && !self.make_room(node, slot, key, data.len() + ITEM_SIZE) {
            return None;
        }
        let split = self.insert_below(node.child_mut(slot), key, data)?;
        if node.view().key(slot).is_some_and(|k| *key < k) {
            image::set_key(node.bytes_mut(), slot, key);
        }
        let mut right: Split = SmallVec::new();
        for (at, child) in (slot + 1..).zip(split) {
            let first = child.first_key().expect("a node made by a split is not empty");
            let left_len = node.view().nritems();
            // Once this node was split, later children belong to its right half.
            if let Some(r) = right.last_mut() {
                let r = Arc::make_mut(r);
                if at >= left_len {
                    r.insert_child(at - left_len, first, child);
                    continue;
                }
            }
            if left_len < max_pointers(self.format.nodesize) {
                node.insert_child(at, first, child);
                continue;
            }
            // Appending at the end is the common case of growing keys: leave the left half full.
            let cut = if at == left_len { left_len - 1 } else { left_len / 2 };
            let cut_key = node.view().key(cut).expect("a slot within the node");
            let mut new = self.new_node(node.level(), cut_key);
            node.move_pointers(cut, &mut new);
            if at <= cut && at != left_len {
                node.insert_child(at, first, child);
            } else {
                new.insert_child(at - cut, first, child);
            }
            right.push(Arc::new(new));
        }
        Some(right)
    }

    /// If the leaf at `slot` has no room for an item of `size` bytes, moves items to a neighbour
    /// that this transaction owns, where that makes room. A split would leave two halves, and
    /// threads that insert neighbouring keys in turn would only ever fill their leaves to half. If
    /// the key is taken, returns false and moves nothing.
    fn make_room(&self, parent: &mut Node, slot: usize, key: &Key, size: usize) -> bool {
        if !self.neighbours {
            return true;
        }
        let Some(leaf) = parent.child(slot) else { return true };
        let lacking = size.saturating_sub(leaf.view().leaf_free());
        if lacking == 0 {
            return true;
        }
        // If the key is taken, nothing moves: the caller would then look for it in the wrong leaf.
        let Err(at) = leaf.view().search(key) else { return false };
        let leaf = leaf.clone();
        let left = slot.checked_sub(1).map_or(0, |left| self.room_in(parent, left));
        if let Some(count) = balance::for_the_left(leaf.view(), at, lacking, left) {
            move_left(parent, slot, leaf, count);
            return true;
        }
        let right = self.room_in(parent, slot + 1);
        if let Some(from) = balance::for_the_right(leaf.view(), at, lacking, right) {
            move_right(parent, slot, leaf, from);
        }
        true
    }

    /// Free bytes of the leaf at `slot`, if there is one and this transaction owns it.
    fn room_in(&self, parent: &Node, slot: usize) -> usize {
        let ours = parent.child(slot).filter(|n| n.generation() == self.source.generation());
        ours.map_or(0, |n| n.view().leaf_free())
    }

    /// Inserts into a leaf, and cuts it where it has no room. Returns the leaf's new right
    /// neighbours, or `None` if the key is taken.
    fn insert_in_leaf(&mut self, leaf: &mut Node, key: &Key, data: &[u8]) -> Option<Split> {
        let view = leaf.view();
        let Err(slot) = view.search(key) else { return None };
        let size = data.len() + ITEM_SIZE;
        if view.leaf_free() >= size {
            image::leaf_put(leaf.bytes_mut(), slot, key, data);
            return Some(SmallVec::new());
        }
        let cut = balance::cut_for(view, slot, size);
        // The first item behind the cut gives the new leaf its key, unless the new item does.
        let behind = |at: usize| view.key(at).expect("a slot within the leaf");
        match cut {
            Cut::Two { at, new_left } => {
                let new_first = at == view.nritems() || !new_left && slot == at;
                let first = if new_first { *key } else { behind(at) };
                let mut right = self.new_node(0, first);
                image::leaf_move_tail(leaf.bytes_mut(), at, right.bytes_mut());
                if new_left {
                    image::leaf_put(leaf.bytes_mut(), slot, key, data);
                } else {
                    image::leaf_put(right.bytes_mut(), slot - at, key, data);
                }
                Some(SmallVec::from_iter([Arc::new(right)]))
            }
            Cut::Three => {
                let mut tail = self.new_node(0, behind(slot));
                image::leaf_move_tail(leaf.bytes_mut(), slot, tail.bytes_mut());
                let mut middle = self.new_node(0, *key);
                image::leaf_put(middle.bytes_mut(), 0, key, data);
                Some(SmallVec::from_iter([Arc::new(middle), Arc::new(tail)]))
            }
        }
    }

    /// Removes the leaf of `key` if it is empty, and joins it with a neighbour if both are small.
    /// The same is done for the nodes above, as far as it changes anything. Only nodes that this
    /// transaction owns are touched, so nothing has to be read or copied.
    pub(crate) fn tidy(&mut self, key: &Key) {
        let mut root = self.root.node.take().expect("an edited tree's root is in memory");
        self.tidy_below(Arc::make_mut(&mut root), key);
        loop {
            if root.level() == 0 {
                break;
            }
            match root.view().nritems() {
                0 => {
                    let leaf = self.new_node(0, *key);
                    self.dropped(&root);
                    root = Arc::new(leaf);
                }
                1 => {
                    // The only child becomes the root, if it is ours: a clean one might be shared.
                    let generation = self.source.generation();
                    let Some(child) =
                        root.child(0).filter(|c| c.generation() == generation).cloned()
                    else {
                        break;
                    };
                    self.dropped(&root);
                    root = child;
                }
                _ => break,
            }
        }
        self.root.ptr = Pointer {
            at: root.address(),
            generation: root.generation(),
            level: root.level(),
            first_key: None,
        };
        self.root.node = Some(root);
    }

    fn tidy_below(&mut self, node: &mut Node, key: &Key) {
        if node.level() == 0 || node.view().nritems() == 0 {
            return;
        }
        let slot = child_slot(node, key);
        let generation = self.source.generation();
        if node.child(slot).is_none_or(|c| c.generation() != generation) {
            return;
        }
        self.tidy_below(Arc::make_mut(node.child_mut(slot)), key);
        let child = node.child(slot).expect("just visited");
        if child.view().nritems() == 0 {
            self.dropped(child);
            node.remove_child(slot);
            return;
        }
        let small = fill(child) * 3 < capacity(child);
        refresh_key(node, slot);
        if small {
            for left in [slot, slot.wrapping_sub(1)] {
                if self.join(node, left, generation) {
                    break;
                }
            }
        }
    }

    /// Joins the children at `left` and `left + 1` if this transaction owns both and they fit into
    /// one node with room to spare.
    fn join(
        &mut self,
        node: &mut Node,
        left: usize,
        generation: larder_format::Generation,
    ) -> bool {
        let (Some(a), Some(b)) =
            (node.child(left), left.checked_add(1).and_then(|r| node.child(r)))
        else {
            return false;
        };
        let ours = a.generation() == generation && b.generation() == generation;
        if !ours || a.level() != b.level() || (fill(a) + fill(b)) * 4 > capacity(a) * 3 {
            return false;
        }
        let right = node.remove_child(left + 1).expect("just looked at");
        self.dropped(&right);
        let target = Arc::make_mut(node.child_mut(left));
        if right.level() == 0 {
            image::leaf_append(target.bytes_mut(), right.bytes(), 0, right.view().nritems());
        } else {
            let generation_of = right.view();
            for (slot, p) in generation_of.pointers().iter().enumerate() {
                target.append_pointer(p, right.child(slot).cloned());
            }
        }
        true
    }
}

/// Moves the first `count` items of the leaf at `slot` to the end of the leaf before it. `leaf` is
/// a clone of that leaf.
fn move_left(parent: &mut Node, slot: usize, leaf: Arc<Node>, count: usize) {
    let left = Arc::make_mut(parent.child_mut(slot - 1));
    image::leaf_append(left.bytes_mut(), leaf.bytes(), 0, count);
    // Without the clone the leaf is not copied for the change.
    drop(leaf);
    image::leaf_remove(Arc::make_mut(parent.child_mut(slot)).bytes_mut(), 0, count);
    refresh_key(parent, slot);
}

/// Moves the items of the leaf at `slot` from `from` on to the start of the leaf behind it. `leaf`
/// is a clone of that leaf.
fn move_right(parent: &mut Node, slot: usize, leaf: Arc<Node>, from: usize) {
    let moved = leaf.view().nritems() - from;
    let right = Arc::make_mut(parent.child_mut(slot + 1));
    let behind = right.bytes().to_vec();
    let count = right.view().nritems();
    image::leaf_remove(right.bytes_mut(), 0, count);
    image::leaf_append(right.bytes_mut(), leaf.bytes(), from, moved);
    image::leaf_append(right.bytes_mut(), &behind, 0, count);
    drop(leaf);
    image::leaf_remove(Arc::make_mut(parent.child_mut(slot)).bytes_mut(), from, moved);
    refresh_key(parent, slot + 1);
}

/// Bytes in use behind the header.
fn fill(node: &Node) -> usize {
    let view = node.view();
    if view.level() == 0 {
        image::leaf_bytes(view, 0, view.nritems())
    } else {
        view.nritems() * larder_format::node::POINTER_SIZE
    }
}

/// Bytes behind the header.
fn capacity(node: &Node) -> usize {
    image::leaf_room(node.view())
}

/// Makes the key that a parent keeps for a child equal the child's first key.
fn refresh_key(node: &mut Node, slot: usize) {
    let Some(first) = node.child(slot).and_then(|c| c.first_key()) else { return };
    if node.view().key(slot) != Some(first) {
        image::set_key(node.bytes_mut(), slot, &first);
    }
}

fn delete_below(node: &mut Node, key: &Key) {
    if node.level() == 0 {
        let slot = node.view().search(key).expect("looked up before");
        image::leaf_remove(node.bytes_mut(), slot, 1);
        return;
    }
    let slot = child_slot(node, key);
    delete_below(Arc::make_mut(node.child_mut(slot)), key);
}
