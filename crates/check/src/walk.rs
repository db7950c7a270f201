//! Walking trees: every node once, in parallel, and what is learnt of each joined in key order.
//!
//! The decision hidden here is how facts that span leaves are put together without walking in order
//! and without walking a shared node twice. A visitor turns a leaf into a *piece*; pieces of
//! neighbours are joined, in order, into the piece of their parent, and so on up to the root.
//! Joining is associative, so subtrees are walked by any thread in any order. The piece of a node
//! that snapshots share is remembered: the work is in the number of different nodes, not in the
//! number of paths to them. Interior nodes are always remembered, leaves only while there is room;
//! a forgotten one is read again, silently.
//!
//! Hostile trees end, too: levels fall on the way down, an interior node is descended into once,
//! and trees that share nothing turn back at any node that was seen before.

use crate::sets::SectorSet;
use crate::source::{Edge, Facts, Node, Source};
use larder_format::Key;
use larder_format::node::NodeView;
use parking_lot::Mutex;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What a walk does with what it meets.
pub(crate) trait Visit: Sync {
    /// What is known of a range of leaves.
    type Piece: Send + Clone;
    /// May nodes be reached on several ways?
    const SHARED: bool;

    /// Nothing.
    fn empty(&self) -> Self::Piece;
    /// A range that could not be read, or is to be passed over.
    fn lost(&self, edge: &Edge) -> Self::Piece;
    /// A leaf. `fresh`: for the first time, so report and count what is in it.
    fn leaf(&self, edge: &Edge, node: &Node, fresh: bool) -> Self::Piece;
    /// The piece of two neighbours. `fresh`: they were not joined before.
    fn join(&self, edge: &Edge, left: Self::Piece, right: Self::Piece, fresh: bool) -> Self::Piece;
    /// An interior node, met for the first time, points to a child.
    fn child(&self, parent: NodeView<'_>, edge: &Edge);
    /// A node is met for the first time.
    fn met(&self, _edge: &Edge, _node: NodeView<'_>) {}
    /// May other trees reach this leaf, too?
    fn worth_keeping(&self, _leaf: NodeView<'_>) -> bool {
        false
    }
}

/// Where an interrupted deletion has got to: what lies before the key is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropped {
    pub(crate) before: Key,
    pub(crate) level: u8,
}

impl Dropped {
    /// The first slot of an interior node that something is left of.
    pub(crate) fn first_left(&self, view: NodeView<'_>) -> usize {
        match view.search(&self.before) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        }
    }
}

/// Most leaves whose pieces are remembered.
const LEAVES_KEPT: usize = 100_000;

#[derive(Debug)]
struct Known<P> {
    facts: Facts,
    piece: P,
}

/// Pieces of nodes that may be met again.
#[derive(Debug)]
pub(crate) struct Memory<P> {
    nodes: Mutex<HashMap<u64, Known<P>>>,
    leaves: AtomicUsize,
}

impl<P> Memory<P> {
    pub(crate) fn new() -> Self {
        Self { nodes: Mutex::default(), leaves: AtomicUsize::new(0) }
    }
}

/// A walk over trees with one visitor.
pub(crate) struct Walk<'a, V: Visit> {
    pub(crate) source: &'a Source<'a>,
    /// Nodes that this pass over the image has seen.
    pub(crate) seen: &'a SectorSet,
    pub(crate) memory: &'a Memory<V::Piece>,
    pub(crate) visitor: &'a V,
    /// Report what is wrong with nodes: only the first pass does.
    pub(crate) report: bool,
}

impl<V: Visit> Walk<'_, V> {
    /// Walks a tree.
    pub(crate) fn tree(&self, root: &Edge, dropped: Option<Dropped>) -> V::Piece {
        self.node(root, dropped)
    }

    fn node(&self, edge: &Edge, dropped: Option<Dropped>) -> V::Piece {
        // Addresses that lead nowhere are not worth remembering, and there may be any number of
        // them.
        let fresh = self.source.volume.copies(edge.at).is_err() || self.seen.insert(edge.at.0);
        if !fresh {
            if !V::SHARED {
                // A second tree at the root of another, or a node that contains itself: say whose
                // it is.
                if self.report {
                    self.source.read_again(edge);
                }
                return self.visitor.lost(edge);
            }
            if let Some(known) = self.memory.nodes.lock().get(&edge.at.0) {
                let (facts, piece) = (known.facts, known.piece.clone());
                if self.report {
                    self.source.check_edge(edge, &facts);
                }
                return piece;
            }
        }
        let node = if self.report {
            self.source.read(edge, fresh)
        } else {
            self.source.read_quietly(edge)
        };
        let Some(node) = node else {
            return self.visitor.lost(edge);
        };
        let view = node.view();
        if fresh {
            self.visitor.met(edge, view);
        }
        let piece = if view.level() == 0 {
            self.visitor.leaf(edge, &node, fresh)
        } else {
            self.children(edge, view, dropped, fresh)
        };
        self.remember(edge, view, &piece, dropped);
        piece
    }

    fn children(
        &self,
        edge: &Edge,
        view: NodeView<'_>,
        dropped: Option<Dropped>,
        fresh: bool,
    ) -> V::Piece {
        let n = view.pointers().len();
        // The way that the deletion has taken: left of it nothing is left.
        let way = dropped.filter(|d| view.level() >= d.level);
        let first = way.map_or(0, |d| d.first_left(view));
        let pieces: Vec<V::Piece> = (first..n)
            .into_par_iter()
            .filter_map(|slot| {
                let child = edge.child(view, slot)?;
                if fresh {
                    self.visitor.child(view, &child);
                }
                let goes_on = way.filter(|d| slot == first && view.level() > d.level);
                Some(self.node(&child, goes_on))
            })
            .collect();
        let start = if first > 0 { self.visitor.lost(edge) } else { self.visitor.empty() };
        pieces.into_iter().fold(start, |left, right| self.visitor.join(edge, left, right, fresh))
    }

    fn remember(
        &self,
        edge: &Edge,
        view: NodeView<'_>,
        piece: &V::Piece,
        dropped: Option<Dropped>,
    ) {
        if !V::SHARED || dropped.is_some() {
            return;
        }
        let keep = view.level() > 0
            || self.visitor.worth_keeping(view) && self.leaves_kept() < LEAVES_KEPT;
        if keep {
            if view.level() == 0 {
                self.memory.leaves.fetch_add(1, Relaxed);
            }
            let known = Known { facts: Facts::of(view), piece: piece.clone() };
            self.memory.nodes.lock().insert(edge.at.0, known);
        }
    }

    fn leaves_kept(&self) -> usize {
        self.memory.leaves.load(Relaxed)
    }
}

/// Calls `each` for the items of a tree whose keys lie in `from..=to`, in order, from nodes that
/// were judged before. Passes over what cannot be read; returns whether anything was passed over.
pub(crate) fn scan(
    source: &Source<'_>,
    root: &Edge,
    from: Key,
    to: Key,
    each: &mut dyn FnMut(Key, &[u8]) -> ControlFlow<()>,
) -> bool {
    let mut scan = Scan { source, from, to, each, lost: false, seen: HashSet::new() };
    let _ = scan.node(root);
    scan.lost
}

struct Scan<'a> {
    source: &'a Source<'a>,
    from: Key,
    to: Key,
    each: &'a mut dyn FnMut(Key, &[u8]) -> ControlFlow<()>,
    lost: bool,
    /// Interior nodes: a tree that leads to one of them twice is damaged, and could keep us busy
    /// for ever.
    seen: HashSet<u64>,
}

impl Scan<'_> {
    fn node(&mut self, edge: &Edge) -> ControlFlow<()> {
        if edge.level > 0 && !self.seen.insert(edge.at.0) {
            return ControlFlow::Continue(());
        }
        let Some(node) = self.source.read_quietly(edge) else {
            self.lost = true;
            return ControlFlow::Continue(());
        };
        let view = node.view();
        if view.level() == 0 {
            let first = view.search(&self.from).unwrap_or_else(|slot| slot);
            for slot in first..view.items().len() {
                let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
                if key > self.to {
                    return ControlFlow::Break(());
                }
                (self.each)(key, data)?;
            }
            return ControlFlow::Continue(());
        }
        let first = match view.search(&self.from) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        };
        for slot in first..view.pointers().len() {
            if view.key(slot).is_some_and(|key| key > self.to) {
                return ControlFlow::Break(());
            }
            if let Some(child) = edge.child(view, slot) {
                self.node(&child)?;
            }
        }
        ControlFlow::Continue(())
    }
}

/// One item of a tree.
pub(crate) fn find(source: &Source<'_>, root: &Edge, key: Key) -> Option<Vec<u8>> {
    let mut found = None;
    scan(source, root, key, key, &mut |_, data| {
        found = Some(data.to_vec());
        ControlFlow::Break(())
    });
    found
}
