//! Every item of a range of keys, in order, with what was found put where nodes are missing.
//!
//! A walk goes down from a root. Where a node cannot be had, nodes that a scan found take its place
//! ([`StandIn`]), and the range is remembered as a [`Gap`], with how well it was filled. Users see
//! items, not nodes; whether an item comes from where it should is a flag of the item.
//!
//! The range of keys of a child is cut by its neighbours', and a node with keys outside its range
//! is not believed: therefore no node is visited twice, whatever pointers say.

use crate::reader::{Bytes, NodeError, Reader, Want};
use crate::scan::Found;
use larder_format::node::NodeView;
use larder_format::{Generation, Key, Logical, TreeId};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

/// Where the root of a tree lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootPointer {
    /// Address.
    pub at: Logical,
    /// Generation, where it is known.
    pub generation: Option<Generation>,
    /// Level.
    pub level: u8,
}

/// A tree to be read.
#[derive(Debug)]
pub struct Tree {
    /// Its id.
    pub id: TreeId,
    /// Its root, where it is known.
    pub root: Option<RootPointer>,
    /// Finds what stands in for missing nodes; without it nothing does.
    stand_in: Option<Arc<dyn StandIn>>,
    /// What it found, by range.
    fillings: Mutex<BTreeMap<(Key, Key), Arc<Filling>>>,
}

/// Finds what stands in for missing nodes of a tree.
pub(crate) trait StandIn: Send + Sync + fmt::Debug {
    /// What there is of it.
    fn fill(&self, reader: &Reader<'_>, missing: &Missing) -> Filling;
}

/// A node that cannot be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Missing {
    pub(crate) at: Logical,
    /// Its level, where that is known.
    pub(crate) level: Option<u8>,
    pub(crate) low: Key,
    pub(crate) high: Key,
    /// What lies below it is not newer.
    pub(crate) newest: Generation,
}

/// A found node, and which of the keys below it count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) node: Found,
    pub(crate) low: Key,
    pub(crate) high: Key,
    pub(crate) stale: bool,
}

/// What was found for a missing range.
#[derive(Debug, Default)]
pub(crate) struct Filling {
    pub(crate) pieces: Vec<Piece>,
    /// It is known that nothing is missing.
    pub(crate) complete: bool,
}

/// A range of keys that could not be read the ordinary way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// First key that may be missing.
    pub low: Key,
    /// Last key that may be missing.
    pub high: Key,
    /// The node that could not be read.
    pub at: Logical,
    /// Its level, where that is known.
    pub level: Option<u8>,
    /// Why.
    pub why: String,
    /// Nodes that were found for it.
    pub salvaged: usize,
    /// Some of them are older than what is missing.
    pub stale: bool,
    /// It is known that these are all.
    pub complete: bool,
}

/// An item on its way.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// The leaf that it lies in.
    pub leaf: Logical,
    /// Generation of the leaf.
    pub generation: Generation,
    /// Its key.
    pub key: Key,
    /// Its bytes.
    pub data: &'a [u8],
    /// It comes from a leaf that is not in use any more, for lack of a better one.
    pub stale: bool,
}

/// Direction of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Forward,
    Backward,
}

impl Tree {
    /// A tree of which nothing but the root is known: nothing stands in for missing nodes.
    #[must_use]
    pub fn plain(id: TreeId, root: RootPointer) -> Self {
        Self { id, root: Some(root), stand_in: None, fillings: Mutex::default() }
    }

    /// A tree whose missing nodes are replaced by what `stand_in` finds, if there is one.
    pub(crate) fn mended(
        id: TreeId,
        root: Option<RootPointer>,
        stand_in: Option<Arc<dyn StandIn>>,
    ) -> Self {
        Self { id, root, stand_in, fillings: Mutex::default() }
    }

    /// Calls `each` with the items from `low` to `high`, both included, until it says to stop.
    /// Returns what could not be read on the way.
    pub fn walk(
        &self,
        reader: &Reader<'_>,
        low: Key,
        high: Key,
        each: &mut dyn FnMut(Item<'_>) -> ControlFlow<()>,
    ) -> Vec<Gap> {
        self.run(reader, low, high, Order::Forward, each)
    }

    /// As [`Self::walk`], from the last item to the first.
    pub fn walk_back(
        &self,
        reader: &Reader<'_>,
        low: Key,
        high: Key,
        each: &mut dyn FnMut(Item<'_>) -> ControlFlow<()>,
    ) -> Vec<Gap> {
        self.run(reader, low, high, Order::Backward, each)
    }

    fn run(
        &self,
        reader: &Reader<'_>,
        low: Key,
        high: Key,
        order: Order,
        each: &mut dyn FnMut(Item<'_>) -> ControlFlow<()>,
    ) -> Vec<Gap> {
        let mut walker = Walker { reader, tree: self, low, high, order, each, gaps: Vec::new() };
        let _ = match self.root {
            Some(root) => {
                let want = Want {
                    tree: self.id,
                    at: root.at,
                    level: Some(root.level),
                    generation: root.generation,
                    low: Key::MIN,
                    high: Key::MAX,
                    is_root: true,
                    scan: self.can_salvage(),
                };
                walker.below(&want)
            }
            None => {
                let newest = reader.superblock().generation();
                let missing =
                    Missing { at: Logical(0), level: None, low: Key::MIN, high: Key::MAX, newest };
                walker.fill(&missing, NodeError(format!("the root of tree {} is unknown", self.id)))
            }
        };
        walker.gaps
    }

    /// The item with exactly this key.
    ///
    /// # Errors
    /// A node on the way cannot be read, and nothing that was found has the item.
    pub fn find(&self, reader: &Reader<'_>, key: Key) -> Result<Option<Vec<u8>>, NodeError> {
        let mut found = None;
        let gaps = self.walk(reader, key, key, &mut |item| {
            found = Some(item.data.to_vec());
            ControlFlow::Break(())
        });
        match (found, gaps.into_iter().find(|g| !g.complete)) {
            (Some(data), _) => Ok(Some(data)),
            (None, Some(gap)) => Err(NodeError(gap.why)),
            (None, None) => Ok(None),
        }
    }

    /// Calls `each` with every node, parents before their children, and returns what could not be
    /// read.
    pub fn nodes(
        &self,
        reader: &Reader<'_>,
        each: &mut dyn FnMut(NodeView<'_>) -> ControlFlow<()>,
    ) -> Vec<Gap> {
        let mut gaps = Vec::new();
        let Some(root) = self.root else { return gaps };
        let mut todo = vec![Want {
            tree: self.id,
            at: root.at,
            level: Some(root.level),
            generation: root.generation,
            low: Key::MIN,
            high: Key::MAX,
            is_root: true,
            scan: self.can_salvage(),
        }];
        while let Some(want) = todo.pop() {
            let bytes = match reader.node(&want) {
                Ok(b) => b,
                Err(e) => {
                    let (low, high, at) = (want.low, want.high, want.at);
                    let level = want.level;
                    gaps.push(Gap {
                        low,
                        high,
                        at,
                        level,
                        why: e.0,
                        salvaged: 0,
                        stale: false,
                        complete: false,
                    });
                    continue;
                }
            };
            let view = NodeView(&bytes);
            if each(view).is_break() {
                break;
            }
            let below: Vec<Want> = children(&want, view).collect();
            todo.extend(below.into_iter().rev());
        }
        gaps
    }

    fn can_salvage(&self) -> bool {
        self.stand_in.is_some()
    }

    fn filling(&self, reader: &Reader<'_>, missing: &Missing) -> Arc<Filling> {
        let Some(stand_in) = &self.stand_in else { return Arc::default() };
        let mut known = self.fillings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(f) = known.get(&(missing.low, missing.high)) {
            return f.clone();
        }
        let filling = Arc::new(stand_in.fill(reader, missing));
        known.insert((missing.low, missing.high), filling.clone());
        filling
    }
}

/// Children of an interior node, each with the range of keys that is its own.
fn children<'a>(want: &'a Want, view: NodeView<'a>) -> impl Iterator<Item = Want> + use<'a> {
    let pointers = if view.level() == 0 { &[][..] } else { view.pointers() };
    pointers.iter().enumerate().map(move |(i, p)| {
        let next = pointers.get(i + 1).and_then(|p| Key::from(p.key).predecessor());
        Want {
            tree: want.tree,
            at: Logical(p.blockptr.get()),
            level: Some(view.level() - 1),
            generation: Some(Generation(p.generation.get())),
            low: p.key.into(),
            high: next.unwrap_or(want.high),
            is_root: false,
            scan: want.scan,
        }
    })
}

struct Walker<'a, 'o> {
    reader: &'a Reader<'o>,
    tree: &'a Tree,
    low: Key,
    high: Key,
    order: Order,
    each: &'a mut dyn FnMut(Item<'_>) -> ControlFlow<()>,
    gaps: Vec<Gap>,
}

impl Walker<'_, '_> {
    /// Depth is bounded: a child's level is its parent's less one.
    fn below(&mut self, want: &Want) -> ControlFlow<()> {
        let bytes = match self.reader.node(want) {
            Ok(b) => b,
            Err(e) => {
                let newest = want.generation.unwrap_or(self.reader.superblock().generation());
                let Want { at, level, low, high, .. } = *want;
                return self.fill(&Missing { at, level, low, high, newest }, e);
            }
        };
        let view = NodeView(&bytes);
        if view.level() == 0 {
            return self.leaf(&bytes, Key::MIN, Key::MAX, false);
        }
        let mut below: Vec<Want> =
            children(want, view).filter(|w| w.low <= self.high && w.high >= self.low).collect();
        if self.order == Order::Backward {
            below.reverse();
        }
        below.iter().try_for_each(|w| self.below(w))
    }

    /// Items of a leaf, as far as they lie between `low` and `high`, too.
    fn leaf(&mut self, bytes: &Bytes, low: Key, high: Key, stale: bool) -> ControlFlow<()> {
        let view = NodeView(bytes);
        let (low, high) = (low.max(self.low), high.min(self.high));
        let from = view.search(&low).unwrap_or_else(|i| i);
        let to = view.search(&high).map_or_else(|i| i, |i| i + 1);
        let mut one = |i: usize| {
            let (Some(key), Some(data)) = (view.key(i), view.data(i)) else {
                return ControlFlow::Continue(());
            };
            (self.each)(Item {
                leaf: view.bytenr(),
                generation: view.generation(),
                key,
                data,
                stale,
            })
        };
        match self.order {
            Order::Forward => (from..to).try_for_each(&mut one),
            Order::Backward => (from..to).rev().try_for_each(&mut one),
        }
    }

    fn fill(&mut self, missing: &Missing, error: NodeError) -> ControlFlow<()> {
        let filling = self.tree.filling(self.reader, missing);
        let (salvaged, complete) = (filling.pieces.len(), filling.complete);
        let Missing { low, high, at, level, .. } = *missing;
        let stale = filling.pieces.iter().any(|p| p.stale);
        self.gaps.push(Gap { low, high, at, level, why: error.0, salvaged, stale, complete });
        let mut pieces: Vec<&Piece> =
            filling.pieces.iter().filter(|p| p.low <= self.high && p.high >= self.low).collect();
        if self.order == Order::Backward {
            pieces.reverse();
        }
        for piece in pieces {
            if piece.node.level > 0 {
                // Levels fall on the way down here, too.
                self.below(&Want {
                    tree: self.tree.id,
                    at: piece.node.at,
                    level: Some(piece.node.level),
                    generation: Some(piece.node.generation),
                    low: piece.low,
                    high: piece.high,
                    is_root: false,
                    scan: true,
                })?;
            } else if let Some(bytes) = self.reader.found(&piece.node) {
                self.leaf(&bytes, piece.low, piece.high, piece.stale)?;
            }
        }
        ControlFlow::Continue(())
    }
}
