//! The root tree: which trees there are, where subvolumes hang, which are on their way out.
//!
//! The list of trees is loaded silently before the walk, for the walk needs it; what is wrong with
//! the root tree's nodes is reported when they are walked like all others. References between
//! subvolumes are few, and are followed one by one. The other way round, the sum over a subvolume's
//! entries of subvolumes must equal that over its references. That does not hold in a snapshot,
//! which keeps the entries of its source although nothing hangs there.
//!
//! A root item says that it is a snapshot's, if a kernel made it that knows uuids (3.6 and later).
//! Root items of older kernels lack the field, and a newer kernel that meets one fills it with
//! zeros. There, age tells: a snapshot kept the entries that its source had, and all of them are as
//! old as it is, or older ([`Origin`]).

use crate::finding::{Finding, Kind};
use crate::links::Totals;
use crate::source::{Edge, Source};
use crate::walk::{Dropped, find, scan};
use crate::world::{World, tree_name};
use larder_format::items::keys::{
    dir_index_key, dir_item_key, orphan_key, parse_uuid_item, uuid_key, uuid_of_key,
};
use larder_format::items::{DirEntries, RootFlags, RootItem, RootRef};
use larder_format::{CompatRo, Generation, Incompat, Key, KeyType, ObjectId, Superblock, TreeId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

/// A tree.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    pub(crate) edge: Edge,
    pub(crate) key: Key,
    pub(crate) item: RootItem,
}

impl Root {
    /// Is it a subvolume that is alive?
    pub(crate) fn is_live(&self) -> bool {
        self.item.refs.get() > 0
    }
    /// Where the deletion of a dead one has got to.
    pub(crate) fn dropped(&self) -> Option<Dropped> {
        let progress = Key::from(self.item.drop_progress);
        (!self.is_live() && progress != Key::MIN)
            .then_some(Dropped { before: progress, level: self.item.drop_level })
    }
}

/// How a subvolume came into being: which entries of other subvolumes may it have that do not hang
/// in it?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// As a snapshot: those that hung in its source.
    Snapshot,
    /// Empty: none.
    Made,
    /// Before kernels wrote it down: if it is a snapshot, those that were made up to this
    /// transaction.
    Before(Generation),
}

impl Root {
    fn origin(&self) -> Origin {
        let item = &self.item;
        if item.parent_uuid != [0; 16] {
            Origin::Snapshot
        } else if self.edge.tree == ObjectId::FS_TREE || item.otransid.get() != 0 {
            Origin::Made
        } else if self.key.offset != 0 {
            Origin::Before(Generation(self.key.offset))
        } else {
            // Not even the key says when, before 2.6.35; but no snapshot was taken of what is
            // younger than that.
            Origin::Before(Generation(item.last_snapshot.get()))
        }
    }
}

/// A record of where a subvolume hangs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hook {
    dirid: ObjectId,
    index: u64,
    name: Box<[u8]>,
}

/// What the root tree holds.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    pub(crate) trees: Vec<Root>,
    /// (parent, child) from the parent's side and from the child's.
    refs: BTreeMap<(TreeId, TreeId), Hook>,
    backrefs: BTreeMap<(TreeId, TreeId), Hook>,
    orphans: BTreeSet<u64>,
    default: Option<Vec<u8>>,
    pub(crate) has_balance: bool,
}

/// Loads the root tree.
pub(crate) fn load(sb: &Superblock, source: &Source<'_>) -> Roots {
    let mut roots = Roots::default();
    let default = dir_item_key(ObjectId::ROOT_TREE_DIR, b"default");
    scan(source, &Edge::root_tree(sb), Key::MIN, Key::MAX, &mut |key, data| {
        match key.kind {
            KeyType::ROOT_ITEM => match RootItem::parse(data) {
                Ok(item) => {
                    let mut edge =
                        Edge::root(key.objectid, item.root(), item.level, item.root_generation());
                    edge.last_snapshot = Generation(item.last_snapshot.get());
                    roots.trees.push(Root { edge, key, item });
                }
                Err(e) => {
                    let finding = Finding::new(Kind::RootItemInvalid, e.to_string());
                    source.findings.add(finding.tree(ObjectId::ROOT_TREE).key(key));
                }
            },
            KeyType::ROOT_REF | KeyType::ROOT_BACKREF => match RootRef::parse(data) {
                Ok(r) => {
                    let hook = Hook {
                        dirid: r.dirid,
                        index: r.sequence,
                        name: (&*source.name(r.name)).into(),
                    };
                    let other = ObjectId(key.offset);
                    if key.kind == KeyType::ROOT_REF {
                        roots.refs.insert((key.objectid, other), hook);
                    } else {
                        roots.backrefs.insert((other, key.objectid), hook);
                    }
                }
                Err(e) => {
                    let finding = Finding::new(Kind::RootItemInvalid, e.to_string());
                    source.findings.add(finding.tree(ObjectId::ROOT_TREE).key(key));
                }
            },
            KeyType::ORPHAN_ITEM if key.objectid == ObjectId::ORPHAN => {
                roots.orphans.insert(key.offset);
            }
            KeyType::TEMPORARY_ITEM if key.objectid == ObjectId::BALANCE => {
                roots.has_balance = true
            }
            _ if key == default => roots.default = Some(data.to_vec()),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    roots
}

impl Roots {
    /// The tree with this id.
    pub(crate) fn tree(&self, id: TreeId) -> Option<&Root> {
        self.trees.iter().find(|r| r.edge.tree == id)
    }
    pub(crate) fn edge(&self, id: TreeId) -> Option<Edge> {
        self.tree(id).map(|r| r.edge)
    }

    /// Checks what the root tree says.
    pub(crate) fn check(&self, world: &World<'_>) {
        let lost = world.lost.part_of(ObjectId::ROOT_TREE);
        self.check_needed(world, lost);
        let by_id: BTreeMap<TreeId, &Root> = self.trees.iter().map(|r| (r.edge.tree, r)).collect();
        let hanging: BTreeSet<TreeId> =
            self.refs.keys().chain(self.backrefs.keys()).map(|(_, child)| *child).collect();
        let mut seen = BTreeSet::new();
        for root in &self.trees {
            check_key(world, root, !seen.insert(root.edge.tree));
            check_item(world, root);
            if root.edge.tree.is_subvolume() {
                self.check_subvolume(world, root, &hanging, lost);
            }
        }
        self.check_refs(world, &by_id, lost);
        self.check_orphans(world, &by_id, lost);
        self.check_default(world, &by_id, lost);
        if self.has_balance || self.trees.iter().any(|r| r.edge.tree == ObjectId::TREE_RELOC) {
            world.add(Finding::new(
                Kind::RelocationInterrupted,
                "there is a record of a balance that goes on",
            ));
        }
    }

    fn check_needed(&self, world: &World<'_>, lost: bool) {
        let mut needed = vec![
            ObjectId::EXTENT_TREE,
            ObjectId::DEV_TREE,
            ObjectId::FS_TREE,
            ObjectId::CSUM_TREE,
            ObjectId::DATA_RELOC_TREE,
        ];
        let compat_ro = world.superblock.compat_ro();
        if compat_ro.contains(CompatRo::FREE_SPACE_TREE) {
            needed.push(ObjectId::FREE_SPACE_TREE);
        }
        if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) {
            needed.push(ObjectId::BLOCK_GROUP_TREE);
        }
        for tree in needed.into_iter().filter(|t| self.tree(*t).is_none()) {
            let finding =
                Finding::new(Kind::TreeMissing, format!("there is no {}", tree_name(tree)));
            world.add(finding.tree(tree).follow_up_if(lost));
        }
    }

    fn check_subvolume(
        &self,
        world: &World<'_>,
        root: &Root,
        hanging: &BTreeSet<TreeId>,
        lost: bool,
    ) {
        let id = root.edge.tree;
        let place =
            |kind, what: String| Finding::new(kind, what).tree(ObjectId::ROOT_TREE).key(root.key);
        if !root.is_live() {
            if self.orphans.contains(&id.0) {
                let what = format!("subvolume {id} is deleted, and being removed");
                world.add(place(Kind::SubvolumeBeingDropped, what));
            } else {
                let what = format!("subvolume {id} has refs 0 and no orphan item");
                world.add(place(Kind::DroppedRootWithoutOrphan, what).follow_up_if(lost));
            }
            return;
        }
        if id != ObjectId::FS_TREE && !hanging.contains(&id) {
            let what = format!("subvolume {id} hangs in no other subvolume");
            world.add(place(Kind::SubvolumeUnreachable, what).follow_up_if(lost));
        }
    }

    fn check_refs(&self, world: &World<'_>, by_id: &BTreeMap<TreeId, &Root>, lost: bool) {
        let pairs: BTreeSet<_> = self.refs.keys().chain(self.backrefs.keys()).copied().collect();
        for (parent, child) in pairs {
            let key = Key::new(parent, KeyType::ROOT_REF, child.0);
            let add = |kind, what: String| {
                let finding = Finding::new(kind, what).tree(ObjectId::ROOT_TREE).key(key);
                world.add(finding.follow_up_if(lost));
            };
            let hook = match (self.refs.get(&(parent, child)), self.backrefs.get(&(parent, child)))
            {
                (Some(a), Some(b)) => {
                    if a != b {
                        let what = format!(
                            "subvolume {parent} calls {child} \"{}\" (directory {}, index {}), it \
                                calls itself \"{}\" ({}, {})",
                            a.name.escape_ascii(),
                            a.dirid,
                            a.index,
                            b.name.escape_ascii(),
                            b.dirid,
                            b.index
                        );
                        add(Kind::RootRefDiffers, what);
                    }
                    a
                }
                (Some(a), None) => {
                    add(
                        Kind::RootBackrefMissing,
                        format!("subvolume {child} does not record its parent {parent}"),
                    );
                    a
                }
                (None, Some(b)) => {
                    add(
                        Kind::RootRefMissing,
                        format!("subvolume {parent} does not record its child {child}"),
                    );
                    b
                }
                (None, None) => continue,
            };
            if !by_id.get(&child).is_some_and(|r| r.is_live()) {
                add(
                    Kind::RootRefWithoutRoot,
                    format!("there is no subvolume {child}, but a reference from {parent}"),
                );
                continue;
            }
            match by_id.get(&parent) {
                Some(root) => check_entry(world, root, child, hook, &add),
                None => add(
                    Kind::RootRefWithoutRoot,
                    format!("subvolume {child} hangs in {parent}, which is not there"),
                ),
            }
        }
    }

    fn check_orphans(&self, world: &World<'_>, by_id: &BTreeMap<TreeId, &Root>, lost: bool) {
        for id in &self.orphans {
            let key = orphan_key(ObjectId(*id));
            let what = match by_id.get(&ObjectId(*id)) {
                Some(root) if root.is_live() => format!("tree {id} is to be removed, but is alive"),
                None if ObjectId(*id).is_subvolume() => {
                    format!("tree {id} is to be removed, but is not there")
                }
                _ => continue,
            };
            let finding =
                Finding::new(Kind::OrphanRootStale, what).tree(ObjectId::ROOT_TREE).key(key);
            world.add(finding.follow_up_if(lost));
        }
    }

    fn check_default(&self, world: &World<'_>, by_id: &BTreeMap<TreeId, &Root>, lost: bool) {
        let key = dir_item_key(ObjectId::ROOT_TREE_DIR, b"default");
        let add = |what: String| {
            let finding =
                Finding::new(Kind::DefaultSubvolume, what).tree(ObjectId::ROOT_TREE).key(key);
            world.add(finding.follow_up_if(lost));
        };
        let Some(data) = &self.default else {
            if world.has(Incompat::DEFAULT_SUBVOL) {
                add("a default subvolume was set, but there is no entry for it".into());
            }
            return;
        };
        match DirEntries::new(data).next() {
            Some(Ok(entry)) => {
                let id = entry.location.objectid;
                if !by_id.get(&id).is_some_and(|r| r.is_live() && id.is_subvolume()) {
                    add(format!("the default subvolume is {id}, which does not exist"));
                }
            }
            Some(Err(e)) => add(e.to_string()),
            None => add("the entry is empty".into()),
        }
    }

    /// Must the entries of subvolumes in a subvolume be compared with its references one by one? If
    /// so, those from this transaction on.
    pub(crate) fn doubtful_entries(
        &self,
        world: &World<'_>,
        root: &Root,
        totals: &Totals,
    ) -> Option<Generation> {
        let from = match root.origin() {
            Origin::Snapshot => return None,
            Origin::Made => Generation(0),
            Origin::Before(transid) => Generation(transid.0.saturating_add(1)),
        };
        let doubtful = !totals.broken
            && totals.newest_subvolume >= from.0
            && self.sum_of_refs(world, root.edge.tree) != totals.subvolumes;
        doubtful.then_some(from)
    }

    /// The references of a subvolume to those that hang in it.
    fn refs_of(&self, id: TreeId) -> impl Iterator<Item = (TreeId, &Hook)> {
        self.refs
            .range((id, ObjectId(0))..=(id, ObjectId(u64::MAX)))
            .map(|((_, child), hook)| (*child, hook))
    }

    /// What the sum over its entries of subvolumes must be.
    fn sum_of_refs(&self, world: &World<'_>, id: TreeId) -> u64 {
        self.refs_of(id).fold(0u64, |sum, (child, hook)| {
            let value = ("subvolume", hook.dirid, hook.index, &*hook.name, child);
            sum.wrapping_add(world.hashing.of(&value))
        })
    }

    /// Reports the entries of subvolumes that do not hang in this one, but for those that are
    /// older.
    pub(crate) fn report_stray_entries(&self, world: &World<'_>, root: &Root, from: Generation) {
        let id = root.edge.tree;
        let known: BTreeSet<(ObjectId, u64, TreeId)> =
            self.refs_of(id).map(|(child, hook)| (hook.dirid, hook.index, child)).collect();
        scan(&world.source, &root.edge, Key::MIN, Key::MAX, &mut |key, data| {
            if key.kind == KeyType::DIR_INDEX {
                for entry in DirEntries::new(data).map_while(Result::ok) {
                    let child = entry.location.objectid;
                    let is_subvolume = entry.location.kind == KeyType::ROOT_ITEM;
                    let hangs_here = known.contains(&(key.objectid, key.offset, child));
                    if is_subvolume && !hangs_here && entry.transid >= from {
                        let what = format!(
                            "entry \"{}\" names subvolume {child}, which does not hang there",
                            entry.name.escape_ascii()
                        );
                        world
                            .add(Finding::new(Kind::EntryWithoutSubvolume, what).tree(id).key(key));
                    }
                }
            }
            ControlFlow::Continue(())
        });
    }

    /// The uuid tree against the subvolumes, both ways.
    pub(crate) fn check_uuids(&self, world: &World<'_>, uuid_tree: &Edge) {
        let mut listed: BTreeSet<(KeyType, [u8; 16], TreeId)> = BTreeSet::new();
        let lost =
            world.lost.part_of(ObjectId::UUID_TREE) || world.lost.part_of(ObjectId::ROOT_TREE);
        let by_id: BTreeMap<TreeId, &Root> = self.trees.iter().map(|r| (r.edge.tree, r)).collect();
        scan(&world.source, uuid_tree, Key::MIN, Key::MAX, &mut |key, data| {
            if !matches!(key.kind, KeyType::UUID_SUBVOL | KeyType::UUID_RECEIVED_SUBVOL) {
                return ControlFlow::Continue(());
            }
            let uuid = uuid_of_key(&key);
            let place =
                |kind, what: String| Finding::new(kind, what).tree(ObjectId::UUID_TREE).key(key);
            match parse_uuid_item(data) {
                Err(e) => world.add(place(Kind::UuidItemInvalid, e.to_string())),
                Ok(ids) => {
                    for id in ids {
                        let own = by_id.get(&id).map(|r| own_uuid(r, key.kind));
                        if own != Some(uuid) {
                            let is = own.map_or_else(
                                || "does not exist".into(),
                                |u| format!("has {}", uuid::Uuid::from_bytes(u)),
                            );
                            let what = format!(
                                "{} is said to be subvolume {id}, which {is}",
                                uuid::Uuid::from_bytes(uuid)
                            );
                            world.add(place(Kind::UuidStale, what).follow_up_if(lost));
                        }
                        listed.insert((key.kind, uuid, id));
                    }
                }
            }
            ControlFlow::Continue(())
        });
        for root in self.trees.iter().filter(|r| r.edge.tree.is_subvolume() && r.is_live()) {
            for kind in [KeyType::UUID_SUBVOL, KeyType::UUID_RECEIVED_SUBVOL] {
                let uuid = own_uuid(root, kind);
                let id = root.edge.tree;
                if uuid != [0; 16] && !listed.contains(&(kind, uuid, id)) {
                    let what =
                        format!("{} of subvolume {id} is not there", uuid::Uuid::from_bytes(uuid));
                    let finding = Finding::new(Kind::UuidMissing, what).tree(ObjectId::UUID_TREE);
                    world.add(finding.key(uuid_key(&uuid, kind)).follow_up_if(lost));
                }
            }
        }
    }
}

/// Does the tree hold what a subvolume holds?
pub(crate) fn has_inodes(tree: TreeId) -> bool {
    tree.is_subvolume() || tree == ObjectId::DATA_RELOC_TREE
}

fn own_uuid(root: &Root, kind: KeyType) -> [u8; 16] {
    if kind == KeyType::UUID_SUBVOL { root.item.uuid } else { root.item.received_uuid }
}

/// Each tree has one root item. Only a snapshot's key says when it was made, and a relocation
/// tree's to which tree it belongs.
fn check_key(world: &World<'_>, root: &Root, again: bool) {
    let id = root.edge.tree;
    if id == ObjectId::TREE_RELOC {
        return;
    }
    let add = |what: String| {
        world
            .add(Finding::new(Kind::RootItemInvalid, what).tree(ObjectId::ROOT_TREE).key(root.key));
    };
    if again {
        add(format!("{} has another root item", tree_name(id)));
    }
    if root.key.offset != 0 && (!id.is_subvolume() || id == ObjectId::FS_TREE) {
        add(format!("the key's offset is {}, expected 0", root.key.offset));
    }
}

fn check_item(world: &World<'_>, root: &Root) {
    let add = |what: String| {
        world.add(Finding::new(Kind::RootItemWrong, what).tree(ObjectId::ROOT_TREE).key(root.key));
    };
    let newest = world.generation();
    let (item, id) = (&root.item, root.edge.tree);
    for (name, value) in [
        ("generation", item.generation.get()),
        ("last_snapshot", item.last_snapshot.get()),
        ("ctransid", item.ctransid.get()),
        ("otransid", item.otransid.get()),
    ] {
        if value > newest {
            add(format!("{name} is {value}, the superblock's generation {newest}"));
        }
    }
    if item.refs.get() > 1 {
        add(format!("refs is {}, expected 0 or 1", item.refs));
    }
    let dead = item.root_flags().contains(RootFlags::DEAD);
    if dead && root.is_live() && id.is_subvolume() {
        add("it is flagged as deleted, but has references".into());
    }
    let progress = Key::from(item.drop_progress);
    if id.is_subvolume() && root.is_live() && progress != Key::MIN {
        add(format!("it is alive, but drop_progress is {progress}: a deletion would begin there"));
    }
    if has_inodes(id) && item.root_dirid.get() != ObjectId::FIRST_FREE.0 {
        add(format!("root_dirid is {}, expected 256", item.root_dirid));
    }
}

/// The directory entry through which a subvolume is reached.
fn check_entry(
    world: &World<'_>,
    parent: &Root,
    child: TreeId,
    hook: &Hook,
    add: &dyn Fn(Kind, String),
) {
    let dir = hook.dirid;
    let source = &world.source;
    let leads = |data: Option<Vec<u8>>| {
        data.is_some_and(|data| {
            DirEntries::new(&data).map_while(Result::ok).any(|e| {
                *source.name(e.name) == *hook.name
                    && e.location.objectid == child
                    && e.location.kind == KeyType::ROOT_ITEM
            })
        })
    };
    let index = leads(find(source, &parent.edge, dir_index_key(dir, hook.index)));
    // Without its name the other one is not to be found.
    let item =
        source.names_hidden() || leads(find(source, &parent.edge, dir_item_key(dir, &hook.name)));
    if !index || !item {
        let which = match (index, item) {
            (false, false) => "neither listed nor found by name",
            (false, true) => "not listed",
            _ => "not found by name",
        };
        let what = format!(
            "subvolume {child} should be \"{}\" in directory {} of tree {}, and is {which} there",
            hook.name.escape_ascii(),
            hook.dirid,
            parent.edge.tree
        );
        add(Kind::RootRefWithoutEntry, what);
    }
}
