//! The newest roots of trees, where no root tree tells them.
//!
//! Where the newest root tree is lost, an older one has the roots of its own time. The newest are
//! looked for in two ways.
//!
//! The **extent tree** knows the address of every node in use, and which tree refers to it. The
//! highest node that a tree refers to is its root, and need not be readable: what lies below it is
//! found by [`crate::salvage`]. The root of the extent tree itself must be found first. It is one
//! of the newest commit, as every commit changes that tree, and it says of itself that it is in
//! use.
//!
//! Without the extent tree, **generations** are left: every change of a tree makes a new root, so
//! the highest node of the newest generation is one, unless the tree was higher before. It may have
//! been written before its commit, and then once more, while what lies below it went on changing.
//! So nothing says for certain that it was the last, and the caller is told.

use crate::reader::Reader;
use crate::salvage::LiveSource;
use crate::scan::{Found, Scan};
use crate::tree::{RootPointer, Tree};
use larder_format::items::InodeItem;
use larder_format::node::NodeView;
use larder_format::{Generation, KeyType, Logical, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The highest nodes of each generation. Usually there is one; but a root may have been written
/// more than once within its transaction, and each is then of the same generation.
pub(crate) type Tops<'a> = BTreeMap<Generation, Vec<&'a Found>>;

/// Those of these nodes.
pub(crate) fn tops<'a>(nodes: impl Iterator<Item = &'a Found>) -> Tops<'a> {
    let mut tops = Tops::new();
    for node in nodes {
        let best = tops.entry(node.generation).or_default();
        let level = best.first().map_or(0, |b| b.level);
        if node.level > level {
            best.clear();
        }
        if node.level >= level {
            best.push(node);
        }
    }
    tops
}

/// A search for the roots of one commit.
#[derive(Debug)]
pub(crate) struct Search<'a, 'o> {
    reader: &'a Reader<'o>,
    scan: &'a Scan,
    newest: Generation,
    live: Option<Arc<LiveSource>>,
}

/// A root that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRoot {
    pub(crate) at: RootPointer,
    pub(crate) generation: Generation,
    /// The extent tree says so.
    pub(crate) is_certain: bool,
}

impl<'a, 'o> Search<'a, 'o> {
    /// A search for the roots that the commit `newest` had. `extents` is the root of the extent
    /// tree, as far as it is known.
    pub(crate) fn new(
        reader: &'a Reader<'o>,
        scan: &'a Scan,
        newest: Generation,
        extents: Option<RootPointer>,
    ) -> Self {
        let mut this = Self { reader, scan, newest, live: None };
        this.live = this.extent_tree(extents);
        this
    }

    /// What is in use, if that could be told.
    pub(crate) fn live(&self) -> Option<Arc<LiveSource>> {
        self.live.clone()
    }

    /// Trees that there may be, of those that are worth restoring.
    pub(crate) fn trees(&self) -> BTreeSet<TreeId> {
        let in_use = self.live.iter().flat_map(|live| live.trees(self.reader));
        let all = self.scan.owners().chain(in_use);
        all.filter(|tree| tree.is_subvolume() || is_global(*tree)).collect()
    }

    /// Is it certain that nothing of a tree is in use?
    pub(crate) fn is_gone(&self, tree: TreeId) -> bool {
        self.live.as_ref().is_some_and(|live| live.lacks(self.reader, tree))
    }

    /// The root of a tree, if a newer one is found than is known.
    pub(crate) fn root(&self, tree: TreeId, known: Option<RootPointer>) -> Option<NewRoot> {
        let floor = known.and_then(|root| root.generation).unwrap_or_default();
        let in_use = self.live.as_ref().and_then(|live| live.root(self.reader, tree));
        match in_use.and_then(|at| Some((at, at.generation?))) {
            Some((at, generation)) => {
                let is_new = generation > floor;
                is_new.then_some(NewRoot { at, generation, is_certain: true })
            }
            None if self.is_gone(tree) => None,
            None => self.latest(tree, known, floor),
        }
    }

    /// The only root of the extent tree that is of the newest commit and knows itself.
    fn extent_tree(&self, known: Option<RootPointer>) -> Option<Arc<LiveSource>> {
        let newest = Some(self.newest);
        let candidates: Vec<RootPointer> = match known.filter(|root| root.generation == newest) {
            Some(root) => vec![root],
            None => {
                let mut all = tops(self.scan.of(ObjectId::EXTENT_TREE));
                let all = all.remove(&self.newest).unwrap_or_default();
                let root = |f: &Found| RootPointer { at: f.at, generation: newest, level: f.level };
                all.into_iter().map(root).collect()
            }
        };
        let source = |root| Arc::new(LiveSource::new(Tree::plain(ObjectId::EXTENT_TREE, root)));
        let live = candidates.into_iter().map(source);
        let mut live = live.filter(|live| live.knows_itself(self.reader));
        live.next().filter(|_| live.next().is_none())
    }

    /// The root that was written last, by the looks of it.
    fn latest(
        &self,
        tree: TreeId,
        known: Option<RootPointer>,
        floor: Generation,
    ) -> Option<NewRoot> {
        let newer =
            self.scan.of(tree).filter(|f| f.generation > floor && f.generation <= self.newest);
        let (generation, all) = tops(newer).pop_last()?;
        if tree == ObjectId::EXTENT_TREE && all.len() > 1 {
            return None;
        }
        let late = |f: &&&Found| if all.len() > 1 { self.lateness(f) } else { (0, 0, 0) };
        let best = all.iter().max_by_key(late)?;
        let at = RootPointer { at: best.at, generation: Some(generation), level: best.level };
        let is_root = known.is_none_or(|root| best.level >= root.level);
        is_root.then_some(NewRoot { at, generation, is_certain: false })
    }

    /// How late a root of a subvolume was written: the latest time of change in what is new in its
    /// generation. What does not have times (other trees) is judged by the address, which grows
    /// within a transaction unless the space is fragmented.
    fn lateness(&self, root: &Found) -> (i64, u32, u64) {
        let mut latest = (i64::MIN, 0);
        let mut todo = vec![*root];
        while let Some(node) = todo.pop() {
            let Some(bytes) = self.reader.found(&node) else { continue };
            let view = NodeView(&bytes);
            if node.level == 0 {
                let items = (0..view.nritems()).filter_map(|i| Some((view.key(i)?, view.data(i)?)));
                for (_, data) in items.filter(|(k, _)| k.kind == KeyType::INODE_ITEM) {
                    if let Ok(i) = InodeItem::parse(data) {
                        latest = latest.max((i.ctime.sec.get(), i.ctime.nsec.get()));
                    }
                }
            } else {
                let is_fresh = |generation: u64| generation == root.generation.0;
                let fresh = view.pointers().iter().filter(|p| is_fresh(p.generation.get()));
                let found = fresh.filter_map(|p| {
                    self.scan.at(Logical(p.blockptr.get())).iter().find(|f| {
                        f.generation == root.generation
                            && f.level + 1 == node.level
                            && f.first == p.key.into()
                    })
                });
                todo.extend(found);
            }
        }
        (latest.0, latest.1, root.at.0)
    }
}

fn is_global(id: TreeId) -> bool {
    [ObjectId::EXTENT_TREE, ObjectId::CSUM_TREE, ObjectId::BLOCK_GROUP_TREE].contains(&id)
}
