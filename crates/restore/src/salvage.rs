//! Which found nodes stand in for a missing part of a tree.
//!
//! A copy-on-write tree leaves older versions of its leaves behind, so there are usually several
//! for the same keys, and those of a range that was emptied since. Three things tell them apart,
//! the best that is there being used:
//!
//! - the extent tree, where it can be read, lists every node in use with its generation: exact
//!   ([`Live`]);
//! - interior nodes that were found: a leaf below the newest of them that it does not point to,
//!   though it is not older than the leaf, is not in use;
//! - generations: of two leaves that begin with the same key the newer one has replaced the other,
//!   and where leaves overlap the newer one is right.
//!
//! In use does not mean in use *by this tree*: a snapshot keeps leaves that its source has
//! replaced, and they name the source as their owner. References tell: a node's children are
//! referred to by its tree, or by the node itself.
//!
//! Only when the extent tree says that leaves are missing are those no longer in use put into what
//! remains, marked as stale: a file as it was is better than none.

use crate::reader::Reader;
use crate::scan::{Found, Scan};
use crate::tree::{Filling, Missing, Piece, RootPointer, StandIn, Tree};
use larder_format::items::{ExtentItem, ExtentRef};
use larder_format::node::NodeView;
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, TreeId};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

/// What stands in for missing nodes of one tree.
#[derive(Debug)]
pub(crate) struct Salvage {
    pub(crate) tree: TreeId,
    /// Trees whose leaves may stand in for missing ones, and up to which generation.
    pub(crate) owners: Vec<(TreeId, Generation)>,
    /// Which nodes are in use, if that is known.
    pub(crate) live: Option<Arc<LiveSource>>,
}

/// The extent tree, read when it is first needed.
#[derive(Debug)]
pub(crate) struct LiveSource {
    extents: Tree,
    live: OnceLock<Option<Live>>,
}

impl LiveSource {
    pub(crate) fn new(extents: Tree) -> Self {
        Self { extents, live: OnceLock::new() }
    }

    /// The root of a tree by what is in use: the highest node that the tree itself refers to. None
    /// if the extent tree cannot be read as a whole, or has nothing of that tree.
    pub(crate) fn root(&self, reader: &Reader<'_>, tree: TreeId) -> Option<RootPointer> {
        self.get(reader)?.roots.get(&tree).copied().flatten()
    }

    /// Is it certain that nothing of a tree is in use?
    pub(crate) fn lacks(&self, reader: &Reader<'_>, tree: TreeId) -> bool {
        self.get(reader).is_some_and(|live| !live.roots.contains_key(&tree))
    }

    /// Trees that have something in use.
    pub(crate) fn trees(&self, reader: &Reader<'_>) -> Vec<TreeId> {
        self.get(reader).map_or_else(Vec::new, |live| live.roots.keys().copied().collect())
    }

    /// Does the extent tree say of its own root that it is in use? One that was written before its
    /// commit, and then once more, does not: what lies below it went on changing.
    pub(crate) fn knows_itself(&self, reader: &Reader<'_>) -> bool {
        self.extents.root.is_some() && self.root(reader, self.extents.id) == self.extents.root
    }

    fn get(&self, reader: &Reader<'_>) -> Option<&Live> {
        self.live
            .get_or_init(|| {
                let mut live = Live::read(reader, &self.extents)?;
                live.compare(reader.scan()?);
                Some(live)
            })
            .as_ref()
    }
}

/// What the extent tree says of a node in use.
#[derive(Debug)]
struct InUse {
    generation: Generation,
    level: u8,
    /// Trees that have a reference of their own: the parent is a node that belongs to the tree.
    trees: SmallVec<[TreeId; 2]>,
    /// Nodes that have a reference: they are shared with snapshots.
    parents: SmallVec<[Logical; 1]>,
}

/// Every node in use, by the extent tree.
#[derive(Debug, Default)]
struct Live {
    nodes: BTreeMap<Logical, InUse>,
    /// Each tree, and its root where that is certain.
    roots: BTreeMap<TreeId, Option<RootPointer>>,
    /// Of what is in use and was not found: trees and levels, and parents.
    lost: BTreeSet<(TreeId, u8)>,
    lost_below: BTreeSet<Logical>,
}

impl Live {
    /// Reads the extent tree; `None` if any of it cannot be read, for half the truth would pass
    /// live nodes for dead.
    fn read(reader: &Reader<'_>, extents: &Tree) -> Option<Self> {
        let mut live = Self::default();
        let mut whole = true;
        let gaps = extents.walk(reader, Key::MIN, Key::MAX, &mut |item| {
            let understood = match item.key.kind {
                KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => live.extent(item.key, item.data),
                KeyType::TREE_BLOCK_REF | KeyType::SHARED_BLOCK_REF => live.keyed(item.key),
                _ => true,
            };
            whole &= understood;
            if understood { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        live.find_roots();
        (gaps.is_empty() && whole && !live.nodes.is_empty()).then_some(live)
    }

    /// A tree has one root; where several nodes are the highest, none of them is known to be it.
    fn find_roots(&mut self) {
        let mut highest: BTreeMap<TreeId, (RootPointer, usize)> = BTreeMap::new();
        for (at, node) in &self.nodes {
            let (generation, level) = (Some(node.generation), node.level);
            let this = RootPointer { at: *at, generation, level };
            for tree in &node.trees {
                let (best, many) = highest.entry(*tree).or_insert((this, 0));
                if level > best.level {
                    (*best, *many) = (this, 0);
                }
                *many += usize::from(level == best.level);
            }
        }
        let roots =
            highest.into_iter().map(|(tree, (root, many))| (tree, (many == 1).then_some(root)));
        self.roots = roots.collect();
    }

    fn extent(&mut self, key: Key, data: &[u8]) -> bool {
        let Ok(extent) = ExtentItem::parse(key.kind, data) else { return false };
        let level = match (key.kind, extent.block) {
            (KeyType::METADATA_ITEM, _) => u8::try_from(key.offset).unwrap_or(u8::MAX),
            (_, Some(info)) => info.level,
            // File data.
            _ => return true,
        };
        let mut node = InUse {
            generation: extent.generation,
            level,
            trees: SmallVec::new(),
            parents: SmallVec::new(),
        };
        for (r, _) in &extent.inline {
            match r {
                ExtentRef::TreeBlock { root } => node.trees.push(*root),
                ExtentRef::SharedBlock { parent } => node.parents.push(*parent),
                _ => {}
            }
        }
        self.nodes.insert(Logical(key.objectid.0), node);
        true
    }

    fn keyed(&mut self, key: Key) -> bool {
        let Some(node) = self.nodes.get_mut(&Logical(key.objectid.0)) else { return false };
        if key.kind == KeyType::TREE_BLOCK_REF {
            node.trees.push(ObjectId(key.offset));
        } else {
            node.parents.push(Logical(key.offset));
        }
        true
    }

    fn get(&self, found: &Found) -> Option<&InUse> {
        self.nodes.get(&found.at).filter(|n| n.generation == found.generation)
    }

    /// Remembers which nodes in use were not found.
    fn compare(&mut self, scan: &Scan) {
        for (at, node) in &self.nodes {
            if scan.at(*at).iter().any(|f| f.generation == node.generation) {
                continue;
            }
            self.lost.extend(node.trees.iter().map(|t| (*t, node.level)));
            self.lost_below.extend(&node.parents);
        }
    }

    /// Is any child of the missing node, or of another node of the tree, in use and was not found?
    fn lacks(&self, missing: &Missing, tree: TreeId, level: u8) -> bool {
        self.lost.contains(&(tree, level)) || self.lost_below.contains(&missing.at)
    }
}

impl StandIn for Salvage {
    fn fill(&self, reader: &Reader<'_>, missing: &Missing) -> Filling {
        let Some(scan) = reader.scan() else { return Filling::default() };
        let mut cover = Cover::new(missing.low, missing.high);
        let live = self.live.as_ref().and_then(|l| l.get(reader));
        let mut complete = false;
        if let (Some(live), Some(level)) = (live, missing.level.and_then(|l| l.checked_sub(1))) {
            self.add_children(reader, scan, live, missing, level, &mut cover);
            complete = !live.lacks(missing, self.tree, level);
        }
        if !complete {
            self.add_leaves(reader, scan, live, missing, &mut cover);
        }
        Filling { pieces: cover.pieces(), complete }
    }
}

impl Salvage {
    /// Takes the very children of the missing node, whatever their level; then those that may be.
    fn add_children(
        &self,
        reader: &Reader<'_>,
        scan: &Scan,
        live: &Live,
        missing: &Missing,
        level: u8,
        cover: &mut Cover,
    ) {
        let children = self.candidates(scan, missing, level);
        let mine = |f: &&Found| {
            live.get(f)
                .is_some_and(|n| n.trees.contains(&self.tree) || n.parents.contains(&missing.at))
        };
        let perhaps = |f: &&Found| {
            f.owner != self.tree
                && live.get(f).is_some_and(|n| {
                    n.trees.iter().any(|t| self.owners.iter().any(|(o, _)| o == t))
                })
        };
        for child in children.iter().filter(mine).chain(children.iter().filter(perhaps)) {
            cover.add(child, last_below(reader, scan, child), false);
        }
    }

    /// Takes leaves, where it is not known that the children were all.
    fn add_leaves(
        &self,
        reader: &Reader<'_>,
        scan: &Scan,
        live: Option<&Live>,
        missing: &Missing,
        cover: &mut Cover,
    ) {
        let leaves = self.candidates(scan, missing, 0);
        let below = missing.level != Some(0);
        match live {
            Some(live) => {
                let mine =
                    |f: &&Found| below && live.get(f).is_some_and(|n| n.trees.contains(&self.tree));
                for leaf in leaves.iter().filter(mine) {
                    cover.add(leaf, leaf.last, false);
                }
                for leaf in leaves.iter().filter(|f| !mine(f)) {
                    cover.add(leaf, leaf.last, true);
                }
            }
            None => {
                let authorities = Authorities::new(reader, &self.candidates(scan, missing, 1));
                let mut begun = BTreeSet::new();
                for leaf in leaves.iter().filter(|f| !below || authorities.allow(f)) {
                    if begun.insert(leaf.first) {
                        // What stands in for a leaf that is gone is an older one.
                        cover.add(leaf, leaf.last, !below);
                    }
                }
            }
        }
    }

    /// Found nodes of a level that may lie below the missing node, newest first.
    fn candidates(&self, scan: &Scan, missing: &Missing, level: u8) -> Vec<Found> {
        let mut all: Vec<Found> = Vec::new();
        for (owner, most) in &self.owners {
            let fresh = |f: &&Found| f.generation <= missing.newest.min(*most);
            all.extend(scan.between(*owner, level, missing.low, missing.high).filter(fresh));
        }
        // Of one generation the one written last lies behind the others, as a rule.
        all.sort_by_key(|f| std::cmp::Reverse((f.generation, f.at)));
        all
    }
}

/// The last key below a node, as far as the way there was found.
fn last_below(reader: &Reader<'_>, scan: &Scan, node: &Found) -> Key {
    let mut at = *node;
    while at.level > 0 {
        let Some(bytes) = reader.found(&at) else { break };
        let Some(last) = NodeView(&bytes).pointers().last().copied() else { break };
        let child = scan.at(Logical(last.blockptr.get())).iter().find(|f| {
            f.generation.0 == last.generation.get()
                && f.level + 1 == at.level
                && f.first >= last.key.into()
        });
        match child {
            Some(c) => at = *c,
            None => break,
        }
    }
    at.last
}

/// Ranges that are taken, by first key.
struct Cover {
    low: Key,
    high: Key,
    taken: BTreeMap<Key, Piece>,
}

impl Cover {
    fn new(low: Key, high: Key) -> Self {
        Self { low, high, taken: BTreeMap::new() }
    }

    /// Takes what is free of a node's range.
    fn add(&mut self, leaf: &Found, last: Key, stale: bool) {
        let (mut from, end) = (leaf.first.max(self.low), last.min(self.high));
        // Where something taken covers the beginning, begin behind it.
        if let Some((_, p)) = self.taken.range(..=from).next_back()
            && p.high >= from
        {
            match p.high.successor() {
                Some(k) => from = k,
                None => return,
            }
        }
        let mut free = Vec::new();
        while from <= end {
            let next = self.taken.range(from..=end).next().map(|(k, p)| (*k, p.high));
            let Some((begin, until)) = next else {
                free.push((from, end));
                break;
            };
            if begin > from {
                free.push((from, begin.predecessor().unwrap_or(from)));
            }
            match until.successor() {
                Some(k) => from = k,
                None => break,
            }
        }
        for (low, high) in free {
            self.taken.insert(low, Piece { node: *leaf, low, high, stale });
        }
    }

    fn pieces(self) -> Vec<Piece> {
        self.taken.into_values().collect()
    }
}

/// Last key pointed to, generation, and the leaves pointed to.
type Above = (Key, Generation, BTreeSet<(Logical, Generation)>);

/// Interior nodes just above leaves, the newest for each key.
struct Authorities {
    /// By first key.
    nodes: BTreeMap<Key, Above>,
}

impl Authorities {
    /// From interior nodes, newest first.
    fn new(reader: &Reader<'_>, found: &[Found]) -> Self {
        let mut nodes: BTreeMap<Key, Above> = BTreeMap::new();
        for f in found {
            let covered =
                nodes.range(..=f.last).next_back().is_some_and(|(_, (last, ..))| *last >= f.first);
            if covered {
                continue;
            }
            if let Some(bytes) = reader.found(f) {
                let pointers = NodeView(&bytes).pointers();
                let leaves = pointers
                    .iter()
                    .map(|p| (Logical(p.blockptr.get()), Generation(p.generation.get())));
                nodes.insert(f.first, (f.last, f.generation, leaves.collect()));
            }
        }
        Self { nodes }
    }

    /// Nothing newer says that this leaf is not in use.
    fn allow(&self, leaf: &Found) -> bool {
        let above = self.nodes.range(..=leaf.first).next_back().map(|(_, n)| n);
        let above = above
            .filter(|(last, generation, _)| *last >= leaf.first && *generation >= leaf.generation);
        above.is_none_or(|(_, _, leaves)| leaves.contains(&(leaf.at, leaf.generation)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::DeviceId;
    use larder_format::Physical;
    use larder_volume::Stripe;
    use std::ops::RangeInclusive;

    fn key(n: u64) -> Key {
        Key::new(n, KeyType::INODE_ITEM, 0)
    }

    fn leaf(generation: u64, inodes: RangeInclusive<u64>) -> Found {
        Found {
            place: Stripe { device: DeviceId(1), at: Physical(0) },
            at: Logical(generation << 20 | inodes.start()),
            generation: Generation(generation),
            owner: ObjectId::FS_TREE,
            first: key(*inodes.start()),
            last: key(*inodes.end()),
            level: 0,
        }
    }

    #[test]
    fn newer_leaves_leave_to_older_ones_what_they_do_not_cover() {
        let mut cover = Cover::new(key(5), key(90));
        for l in [leaf(9, 20..=30), leaf(8, 25..=50), leaf(7, 1..=100), leaf(6, 22..=24)] {
            cover.add(&l, l.last, false);
        }
        let got: Vec<(u64, u64, u64)> = cover
            .pieces()
            .iter()
            .map(|p| (p.node.generation.0, p.low.objectid.0, p.high.objectid.0))
            .collect();
        // A piece's end is the key before the next one's begin.
        assert_eq!(got.iter().map(|g| g.0).collect::<Vec<_>>(), [7, 9, 8, 7]);
        assert_eq!((got[0].1, got[1].1, got[1].2, got[2].2, got[3].2), (5, 20, 30, 50, 90));
    }
}
