//! The moments that an image can be read at, and the trees at each.
//!
//! A commit leaves behind the root of the root tree. The superblock has the last one; four *backup
//! roots* have those before it, as long as nothing has overwritten them; and a scan finds whatever
//! else is left. A [`Point`] is one of these. [`Trees`] is what its root tree says: every tree's
//! root, and how subvolumes hang together.
//!
//! When the newest root tree is lost, the backup before it is whole, but a commit old. So the
//! newest roots of the trees themselves are looked for (`roots`).

use crate::error::{Error, Result};
use crate::reader::{Reader, Want};
use crate::roots::{NewRoot, Search, tops};
use crate::salvage::{LiveSource, Salvage};
use crate::scan::Scan;
use crate::tree::{Gap, RootPointer, StandIn, Tree};
use larder_format::items::{RootFlags, RootItem, RootRef};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Most ancestors of a snapshot whose leaves it may share.
const ANCESTORS: usize = 64;

/// Which moment to restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The last one that can be read.
    Newest,
    /// So many points before the last.
    Older(usize),
    /// The commit of this generation.
    Generation(Generation),
}

/// Where a point is known from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointSource {
    /// The superblock.
    Super,
    /// A backup root.
    Backup,
    /// A node that a scan found.
    Found,
    /// Nothing: only leaves are left.
    Nothing,
}

/// A root of the root tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Its commit.
    pub generation: Generation,
    /// Where it is known from.
    pub source: PointSource,
    /// Where it lies; unknown for [`PointSource::Nothing`].
    pub root: Option<RootPointer>,
}

/// A subvolume at a point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subvolume {
    /// Its tree.
    pub id: TreeId,
    /// Generation of its root.
    pub generation: Generation,
    /// The subvolume that it hangs in, where that is known.
    pub parent: Option<TreeId>,
    /// Its name there.
    pub name: Vec<u8>,
    /// The directory with that name.
    pub dir: u64,
    /// It was made as a snapshot of another.
    pub snapshot: bool,
    /// It is read-only.
    pub read_only: bool,
    uuid: [u8; 16],
    parent_uuid: [u8; 16],
    made: Generation,
}

/// The points that superblocks know of, newest first; with those that a scan finds if `scan`.
#[must_use]
pub fn points(reader: &Reader<'_>, scan: bool) -> Vec<Point> {
    let sb = reader.superblock();
    let point = |source, at, generation, level| Point {
        generation,
        source,
        root: Some(RootPointer { at, generation: Some(generation), level }),
    };
    let mut all = vec![point(PointSource::Super, sb.root(), sb.generation(), sb.root_level)];
    for sb in std::iter::once(sb).chain(reader.other_superblocks().iter().map(|b| &**b)) {
        let used = sb.backup_roots.iter().filter(|b| b.tree_root.get() != 0);
        all.extend(used.map(|b| {
            let (at, generation) = (Logical(b.tree_root.get()), Generation(b.tree_root_gen.get()));
            point(PointSource::Backup, at, generation, b.tree_root_level)
        }));
    }
    if let Some(scan) = scan.then(|| reader.scan()).flatten() {
        let found = tops(scan.of(ObjectId::ROOT_TREE))
            .into_values()
            .filter_map(|t| t.into_iter().max_by_key(|f| f.at));
        all.extend(found.map(|f| point(PointSource::Found, f.at, f.generation, f.level)));
    }
    // Of one commit, the first of the best source.
    all.sort_by_key(|p| (std::cmp::Reverse(p.generation), p.source as u8));
    all.dedup_by_key(|p| p.generation);
    all
}

/// Can the root of this point be read?
#[must_use]
pub fn is_readable(reader: &Reader<'_>, point: &Point) -> bool {
    point.root.is_some_and(|root| {
        let want = Want {
            tree: ObjectId::ROOT_TREE,
            at: root.at,
            level: Some(root.level),
            generation: root.generation,
            low: Key::MIN,
            high: Key::MAX,
            is_root: true,
            scan: false,
        };
        reader.node(&want).is_ok()
    })
}

/// Chooses a point.
///
/// # Errors
/// [`Error::NotFound`] if there is no such point.
pub fn choose(reader: &Reader<'_>, when: When) -> Result<Point> {
    let observer = reader.observer();
    let readable = |scan| {
        let mut all = points(reader, scan);
        all.retain(|p| is_readable(reader, p));
        all
    };
    let mut all = readable(false);
    match when {
        When::Newest => {
            if all.is_empty() {
                all = readable(true);
            }
            let newest = reader.superblock().generation();
            let Some(best) = all.first() else {
                observer
                    .note("no root of the root tree can be read; using the leaves that are left");
                return Ok(Point { generation: newest, source: PointSource::Nothing, root: None });
            };
            if best.generation != newest {
                observer.note(&format!(
                    "the root tree of generation {newest} cannot be read; using that of \
                        generation {}",
                    best.generation
                ));
            }
            Ok(*best)
        }
        When::Older(n) => {
            if all.len() <= n {
                all = readable(true);
            }
            all.get(n).copied().ok_or_else(|| {
                Error::NotFound(match all.len() {
                    1 => "only one point in time can be read; see --list".to_owned(),
                    n => format!("only {n} points in time can be read; see --list"),
                })
            })
        }
        When::Generation(g) => {
            if !all.iter().any(|p| p.generation == g) {
                all = readable(true);
            }
            let found = all.iter().find(|p| p.generation == g).copied();
            found.ok_or_else(|| {
                Error::NotFound(format!("generation {g} cannot be read any more; see --list"))
            })
        }
    }
}

/// The trees at a point.
#[derive(Debug)]
pub struct Trees {
    /// The point.
    pub point: Point,
    /// Subvolumes by id.
    pub subvolumes: BTreeMap<TreeId, Subvolume>,
    /// What of the root tree could not be read.
    pub gaps: Vec<Gap>,
    roots: BTreeMap<TreeId, RootPointer>,
    live: Option<Arc<LiveSource>>,
    salvage: bool,
    /// The newest root that the root tree did not know.
    upgraded: Option<Generation>,
    /// Subvolumes that are being deleted. Some of their nodes are still in use.
    deleted: BTreeSet<TreeId>,
}

impl Trees {
    /// Reads the root tree at a point. With `salvage`, what is missing is replaced by what a scan
    /// finds, in the root tree and in every tree that comes out of it; where the root tree is older
    /// than `newest`, or not whole, newer roots of its trees are looked for, too.
    #[must_use]
    pub fn open(reader: &Reader<'_>, point: Point, newest: Generation, salvage: bool) -> Self {
        let id = ObjectId::ROOT_TREE;
        let stand_in = salvage.then(|| -> Arc<dyn StandIn> {
            Arc::new(Salvage { tree: id, owners: vec![(id, point.generation)], live: None })
        });
        let root_tree = Tree::mended(id, point.root, stand_in);
        let mut items: BTreeMap<TreeId, RootItem> = BTreeMap::new();
        let mut hangs: BTreeMap<TreeId, (TreeId, u64, Vec<u8>)> = BTreeMap::new();
        let mut deleted = BTreeSet::new();
        let gaps = root_tree.walk(reader, Key::MIN, Key::MAX, &mut |item| {
            match item.key.kind {
                KeyType::ROOT_ITEM => {
                    let tree = item.key.objectid;
                    match RootItem::parse(item.data) {
                        Ok(r) if r.refs.get() != 0 || !tree.is_subvolume() => {
                            items.insert(tree, r);
                        }
                        Ok(_) => {
                            deleted.insert(tree);
                        }
                        Err(e) => reader.observer().note(&format!("root item of tree {tree}: {e}")),
                    }
                }
                KeyType::ROOT_BACKREF => {
                    if let Ok(r) = RootRef::parse(item.data) {
                        let parent = ObjectId(item.key.offset);
                        hangs.insert(item.key.objectid, (parent, r.dirid.0, r.name.to_vec()));
                    }
                }
                _ => {}
            }
            ControlFlow::Continue(())
        });
        let mut trees = Self {
            point,
            subvolumes: BTreeMap::new(),
            gaps,
            roots: BTreeMap::new(),
            live: None,
            salvage,
            upgraded: None,
            deleted,
        };
        for (id, item) in &items {
            let root = RootPointer {
                at: item.root(),
                generation: Some(item.root_generation()),
                level: item.level,
            };
            trees.roots.insert(*id, root);
            if !id.is_subvolume() {
                continue;
            }
            trees.subvolumes.insert(*id, trees.subvolume(*id, item, hangs.remove(id)));
        }
        let behind = point.root.is_none() || !trees.gaps.is_empty() || point.generation < newest;
        if salvage
            && behind
            && let Some(scan) = reader.scan()
        {
            trees.upgrade(reader, scan, newest);
        }
        if trees.live.is_none() {
            // An extent tree that is older than the trees would call live nodes dead.
            let extents = trees.roots.get(&ObjectId::EXTENT_TREE);
            let extents = extents.filter(|r| r.generation >= trees.upgraded);
            let live = |root| LiveSource::new(Tree::plain(ObjectId::EXTENT_TREE, root));
            trees.live = extents.map(|root| Arc::new(live(*root)));
        }
        trees
    }

    fn subvolume(
        &self,
        id: TreeId,
        item: &RootItem,
        hangs: Option<(TreeId, u64, Vec<u8>)>,
    ) -> Subvolume {
        let (parent, dir, name) = hangs.map_or((None, 0, Vec::new()), |(p, d, n)| (Some(p), d, n));
        Subvolume {
            id,
            generation: item.root_generation(),
            parent,
            name,
            dir,
            snapshot: item.parent_uuid != [0; 16],
            read_only: item.root_flags().contains(RootFlags::RDONLY),
            uuid: item.uuid,
            parent_uuid: item.parent_uuid,
            made: Generation(item.otransid.get()),
        }
    }

    /// Takes newer roots than the root tree knows.
    fn upgrade(&mut self, reader: &Reader<'_>, scan: &Scan, newest: Generation) {
        let extents = self.roots.get(&ObjectId::EXTENT_TREE).copied();
        let search = Search::new(reader, scan, newest, extents);
        for tree in search.trees() {
            if self.deleted.contains(&tree) {
                continue;
            }
            let known = self.roots.get(&tree).copied();
            let Some(found) = search.root(tree, known) else { continue };
            // A tree that a whole root tree did not have was deleted before, unless it was made
            // since.
            let is_old = found.generation <= self.point.generation;
            if known.is_none() && self.gaps.is_empty() && is_old {
                continue;
            }
            note_new_root(reader, tree, known, &found);
            self.roots.insert(tree, found.at);
            self.upgraded = self.upgraded.max(Some(found.generation));
            if tree.is_subvolume() && !self.subvolumes.contains_key(&tree) {
                let item = self.subvolume(tree, &RootItem::default(), None);
                let generation = found.generation;
                self.subvolumes.insert(tree, Subvolume { generation, ..item });
            }
        }
        self.forget_deleted(reader, &search);
        self.live = search.live();
    }

    /// Subvolumes that an older root tree has, and of which nothing is in use any more.
    fn forget_deleted(&mut self, reader: &Reader<'_>, search: &Search<'_, '_>) {
        let all = self.subvolumes.keys().copied();
        for tree in all.filter(|tree| search.is_gone(*tree)).collect::<Vec<_>>() {
            let generation = self.point.generation;
            let text = format!("tree {tree}: it was deleted after generation {generation}");
            reader.observer().note(&text);
            self.subvolumes.remove(&tree);
            self.roots.remove(&tree);
        }
    }

    /// A tree by its id; `None` if nothing knows of it.
    #[must_use]
    pub fn tree(&self, id: TreeId) -> Option<Tree> {
        if id == ObjectId::ROOT_TREE {
            return Some(self.with_root(id, self.point.root, self.point.generation));
        }
        let root = *self.roots.get(&id)?;
        Some(self.with_root(id, Some(root), root.generation.unwrap_or(self.point.generation)))
    }

    /// Ids of all trees with a root item.
    pub fn ids(&self) -> impl Iterator<Item = TreeId> + '_ {
        self.roots.keys().copied()
    }

    /// Where the root of a tree lies.
    #[must_use]
    pub fn root(&self, id: TreeId) -> Option<RootPointer> {
        self.roots.get(&id).copied()
    }

    fn with_root(&self, id: TreeId, root: Option<RootPointer>, newest: Generation) -> Tree {
        let stand_in = self.salvage.then(|| -> Arc<dyn StandIn> {
            let owners = self.owners_of_leaves(id, newest);
            Arc::new(Salvage { tree: id, owners, live: self.live.clone() })
        });
        Tree::mended(id, root, stand_in)
    }

    /// Trees whose leaves may be a tree's, and up to which generation: a snapshot shares leaves
    /// with the subvolume that it was made from, as they were then.
    fn owners_of_leaves(&self, id: TreeId, newest: Generation) -> Vec<(TreeId, Generation)> {
        let mut owners = vec![(id, newest)];
        let mut at = self.subvolumes.get(&id);
        while let Some(s) = at.filter(|s| s.snapshot && owners.len() < ANCESTORS) {
            let above =
                self.subvolumes.values().find(|p| p.uuid == s.parent_uuid && p.uuid != [0; 16]);
            let Some(p) = above.filter(|p| owners.iter().all(|(o, _)| *o != p.id)) else { break };
            owners.push((p.id, s.made.min(newest)));
            at = Some(p);
        }
        owners
    }
}

/// Says which root is used, and how certain it is.
fn note_new_root(reader: &Reader<'_>, tree: TreeId, known: Option<RootPointer>, found: &NewRoot) {
    let was = match known.and_then(|root| root.generation) {
        Some(generation) => format!("its root item is of generation {generation}"),
        None => "its root item is lost".to_owned(),
    };
    let generation = found.generation;
    let doubt = "; the extent tree cannot tell whether that was the last one of its commit";
    let doubt = if found.is_certain { "" } else { doubt };
    let text = format!("tree {tree}: {was}; using the root of generation {generation}{doubt}");
    reader.observer().note(&text);
}
