//! The moments that an image can be read at, and the trees at each.
//!
//! A commit leaves behind the root of the root tree. The superblock has the last one; four *backup
//! roots* have those before it, as long as nothing has overwritten them; and a scan finds whatever
//! else is left. A [`Point`] is one of these. [`Trees`] is what its root tree says: every tree's
//! root, and how subvolumes hang together.
//!
//! Hidden here besides: what happens when the newest root tree is lost. The backup before it is
//! whole, but a commit old; so the newest roots of the trees themselves are looked for, and taken
//! where they are certain to be roots.

use crate::error::{Error, Result};
use crate::reader::{Reader, Want};
use crate::salvage::{LiveSource, Salvage};
use crate::scan::{Found, Scan};
use crate::tree::{Gap, RootPointer, StandIn, Tree};
use larder_format::items::{InodeItem, RootFlags, RootItem, RootRef};
use larder_format::node::NodeView;
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::BTreeMap;
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
        let mut tops = Tops::new();
        for node in scan.of(ObjectId::ROOT_TREE) {
            top(&mut tops, node);
        }
        let found = tops.into_values().filter_map(|t| t.into_iter().max_by_key(|f| f.at));
        all.extend(found.map(|f| point(PointSource::Found, f.at, f.generation, f.level)));
    }
    // Of one commit, the first of the best source.
    all.sort_by_key(|p| (std::cmp::Reverse(p.generation), p.source as u8));
    all.dedup_by_key(|p| p.generation);
    all
}

/// The highest nodes of each generation. Usually there is one; but a root may have been written
/// more than once within its transaction, and each is then of the same generation.
type Tops<'a> = BTreeMap<Generation, Vec<&'a Found>>;

fn top<'a>(tops: &mut Tops<'a>, node: &'a Found) {
    let best = tops.entry(node.generation).or_default();
    let level = best.first().map_or(0, |b| b.level);
    if node.level > level {
        best.clear();
    }
    if node.level >= level {
        best.push(node);
    }
}

/// How late a root of a subvolume was written: the latest time of change in what is new in its
/// generation. What does not have times (other trees) is judged by the address, which grows within
/// a transaction unless the space is fragmented.
fn lateness(reader: &Reader<'_>, scan: &Scan, root: &Found) -> (i64, u32, u64) {
    let mut latest = (i64::MIN, 0);
    let mut todo = vec![*root];
    while let Some(node) = todo.pop() {
        let Some(bytes) = reader.found(&node) else { continue };
        let view = NodeView(&bytes);
        if node.level == 0 {
            let items = (0..view.nritems()).filter_map(|i| Some((view.key(i)?, view.data(i)?)));
            for (_, data) in items.filter(|(k, _)| k.kind == KeyType::INODE_ITEM) {
                if let Ok(i) = InodeItem::parse(data) {
                    latest = latest.max((i.ctime.sec.get(), i.ctime.nsec.get()));
                }
            }
        } else {
            let fresh = view.pointers().iter().filter(|p| p.generation.get() == root.generation.0);
            let found = fresh.filter_map(|p| {
                scan.at(Logical(p.blockptr.get())).iter().find(|f| {
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
        let gaps = root_tree.walk(reader, Key::MIN, Key::MAX, &mut |item| {
            match item.key.kind {
                KeyType::ROOT_ITEM => {
                    let tree = item.key.objectid;
                    match RootItem::parse(item.data) {
                        Ok(r) if r.refs.get() != 0 || !tree.is_subvolume() => {
                            items.insert(tree, r);
                        }
                        Ok(_) => {}
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
        // An extent tree that is older than the trees would call live nodes dead.
        let extents =
            trees.roots.get(&ObjectId::EXTENT_TREE).filter(|r| r.generation >= trees.upgraded);
        trees.live =
            extents.map(|r| Arc::new(LiveSource::new(Tree::plain(ObjectId::EXTENT_TREE, *r))));
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

    /// Takes newer roots than the root tree knows, where they are certain to be roots: every change
    /// of a tree makes a new root, so the highest node of a generation is one, unless the tree was
    /// higher before.
    fn upgrade(&mut self, reader: &Reader<'_>, scan: &Scan, newest: Generation) {
        for owner in scan.owners().filter(|o| o.is_subvolume() || is_global(*o)) {
            let known = self.roots.get(&owner).copied();
            let floor = known.and_then(|r| r.generation).unwrap_or_default();
            let mut tops = Tops::new();
            for node in scan.of(owner).filter(|f| f.generation > floor && f.generation <= newest) {
                top(&mut tops, node);
            }
            let Some((generation, all)) = tops.last_key_value() else { continue };
            // A tree that a whole root tree did not have was deleted before, unless it was made
            // since.
            let deleted =
                known.is_none() && self.gaps.is_empty() && *generation <= self.point.generation;
            if deleted || owner == ObjectId::EXTENT_TREE && all.len() > 1 {
                continue;
            }
            let late =
                |f: &&&Found| if all.len() > 1 { lateness(reader, scan, f) } else { (0, 0, 0) };
            let Some(best) = all.iter().max_by_key(late) else { continue };
            if known.is_some_and(|r| best.level < r.level) {
                continue;
            }
            let root =
                RootPointer { at: best.at, generation: Some(*generation), level: best.level };
            let was = known.map_or("its root item is lost".to_owned(), |_| {
                format!("its root item is of generation {floor}")
            });
            reader
                .observer()
                .note(&format!("tree {owner}: {was}; using the root of generation {generation}"));
            self.roots.insert(owner, root);
            self.upgraded = self.upgraded.max(Some(*generation));
            if owner.is_subvolume() && !self.subvolumes.contains_key(&owner) {
                let item = RootItem::default();
                self.subvolumes.insert(
                    owner,
                    Subvolume { generation: *generation, ..self.subvolume(owner, &item, None) },
                );
            }
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

fn is_global(id: TreeId) -> bool {
    [ObjectId::EXTENT_TREE, ObjectId::CSUM_TREE, ObjectId::BLOCK_GROUP_TREE].contains(&id)
}
