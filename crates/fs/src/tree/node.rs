//! A node in memory.
//!
//! Nodes are values behind `Arc`s. A caller that holds a root holds an unchanging tree: an edit
//! makes a new image of each node on its path that anybody else can see ([`Arc::make_mut`]) and
//! edits in place where nobody can. That test is exact here, because a dirty node hangs on its
//! parent's slot and nowhere else — the cache holds only clean ones, which are never edited but
//! first copied to a new address. Forgetting a count could therefore cost a copy, never a corrupted
//! version.
//!
//! An interior node carries, beside its bytes, the children that exist only in memory (`children`);
//! clean children are found through the cache.

use super::image::{self, NodeFormat};
use larder_format::node::{KeyPointer, NodeView};
use larder_format::{Generation, Key, Logical, TreeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of one node and, for an interior one, its dirty children.
pub(crate) struct Node {
    buf: Arc<[u8]>,
    /// As long as the node has pointers, or empty when no child is dirty.
    children: Vec<Option<Arc<Node>>>,
}

/// Images that were copied because a version could see them, since the process began.
pub(crate) static IMAGE_COPIES: AtomicU64 = AtomicU64::new(0);

impl Clone for Node {
    fn clone(&self) -> Self {
        IMAGE_COPIES.fetch_add(1, Ordering::Relaxed);
        Self { buf: self.buf.clone(), children: self.children.clone() }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.view().fmt(f)
    }
}

impl Node {
    /// A clean node from bytes that were checked.
    pub(crate) fn clean(buf: Arc<[u8]>) -> Self {
        Self { buf, children: Vec::new() }
    }

    /// An empty node of the running transaction in the given buffer.
    pub(crate) fn fresh(
        mut buf: Arc<[u8]>,
        format: &NodeFormat,
        at: Logical,
        generation: Generation,
        owner: TreeId,
        level: u8,
    ) -> Self {
        let bytes = Arc::get_mut(&mut buf).expect("a new buffer has one owner");
        image::init(bytes, format, at, generation, owner, level);
        Self { buf, children: Vec::new() }
    }

    /// A copy at another address, owned by `owner` in `generation`.
    pub(crate) fn copied_to(
        &self,
        mut buf: Arc<[u8]>,
        format: &NodeFormat,
        at: Logical,
        generation: Generation,
        owner: TreeId,
    ) -> Self {
        let view = self.view();
        let bytes = Arc::get_mut(&mut buf).expect("a new buffer has one owner");
        bytes.copy_from_slice(&self.buf);
        image::init(bytes, format, at, generation, owner, view.level());
        image::header_mut(bytes).nritems = view.header().nritems;
        Self { buf, children: self.children.clone() }
    }

    /// The bytes, for looking.
    #[must_use]
    pub(crate) fn view(&self) -> NodeView<'_> {
        NodeView(&self.buf)
    }
    /// The bytes as they are shared.
    pub(crate) fn bytes(&self) -> &Arc<[u8]> {
        &self.buf
    }
    /// The bytes, for an edit. Copies them if another image shares them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        Arc::make_mut(&mut self.buf)
    }
    /// Height above the leaves.
    #[must_use]
    pub(crate) fn level(&self) -> u8 {
        self.view().level()
    }
    /// Logical address.
    #[must_use]
    pub(crate) fn address(&self) -> Logical {
        self.view().bytenr()
    }
    /// Transaction that made the block.
    #[must_use]
    pub(crate) fn generation(&self) -> Generation {
        self.view().generation()
    }
    /// First key.
    #[must_use]
    pub(crate) fn first_key(&self) -> Option<Key> {
        self.view().key(0)
    }
    /// The child at a slot, if it hangs here in memory.
    pub(crate) fn child(&self, slot: usize) -> Option<&Arc<Node>> {
        self.children.get(slot).and_then(Option::as_ref)
    }
    /// The child at a slot, for an edit. There must be one.
    pub(crate) fn child_mut(&mut self, slot: usize) -> &mut Arc<Node> {
        self.children[slot].as_mut().expect("the child was made dirty before")
    }
    /// All children in memory.
    pub(crate) fn children(&self) -> &[Option<Arc<Node>>] {
        &self.children
    }
    /// Makes `children` as long as the pointers.
    fn spread(&mut self) {
        if self.children.is_empty() {
            self.children = vec![None; self.view().nritems()];
        }
    }
    /// Hangs a child on a slot and points to it.
    pub(crate) fn set_child(&mut self, slot: usize, child: Arc<Node>) {
        self.spread();
        let (at, generation) = (child.address(), child.generation());
        self.children[slot] = Some(child);
        image::node_repoint(self.bytes_mut(), slot, at, generation);
    }
    /// Points a slot to a block that does not hang here.
    pub(crate) fn repoint(&mut self, slot: usize, at: Logical, generation: Generation) {
        if let Some(child) = self.children.get_mut(slot) {
            *child = None;
        }
        image::node_repoint(self.bytes_mut(), slot, at, generation);
    }
    /// Adds a child before a slot.
    pub(crate) fn insert_child(&mut self, slot: usize, key: Key, child: Arc<Node>) {
        self.spread();
        let ptr = image::pointer(key, child.address(), child.generation());
        self.children.insert(slot, Some(child));
        image::node_insert(self.bytes_mut(), slot, &ptr);
    }
    /// Removes the child at a slot.
    pub(crate) fn remove_child(&mut self, slot: usize) -> Option<Arc<Node>> {
        self.spread();
        let child = self.children.remove(slot);
        image::node_remove(self.bytes_mut(), slot, 1);
        child
    }
    /// Moves the pointers from `from` on into an empty node.
    pub(crate) fn move_pointers(&mut self, from: usize, target: &mut Node) {
        self.spread();
        debug_assert!(target.view().nritems() == 0, "the target of a split is new");
        target.children = self.children.split_off(from);
        image::node_move_tail(self.bytes_mut(), from, target.bytes_mut());
    }
    /// Adds a pointer at the end, with its child if that is in memory.
    pub(crate) fn append_pointer(&mut self, ptr: &KeyPointer, child: Option<Arc<Node>>) {
        self.spread();
        self.children.push(child);
        let end = self.view().nritems();
        image::node_insert(self.bytes_mut(), end, ptr);
    }
    /// Forgets children that are clean by now: generation at most `published`.
    pub(crate) fn forget_clean(&mut self, published: Generation) {
        for c in &mut self.children {
            if c.as_ref().is_some_and(|c| c.generation() <= published) {
                *c = None;
            }
        }
    }
    /// The same bytes without the children: what the cache keeps after the node was written.
    pub(crate) fn stripped(self: &Arc<Self>) -> Arc<Self> {
        if self.children.is_empty() {
            self.clone()
        } else {
            Arc::new(Self::clean(self.buf.clone()))
        }
    }
}
