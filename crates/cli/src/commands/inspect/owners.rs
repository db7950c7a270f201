//! The users of an extent: back references, followed up through everything that shares them.
//!
//! A data extent's reference leads to a leaf (or to a tree and key, where the leaf is then looked
//! up). That leaf may be shared: its own references lead to the trees that point to it, or to the
//! nodes above it, and so on to the roots. Each tree that arrives at the leaf has the file. Where
//! the extent tree cannot be read, all subvolumes are searched.
//!
//! The search is bounded: a node above another has a higher level, each node is resolved once, and
//! no more than [`MOST_NODES`] are.

use crate::raw::Session;
use larder_format::items::{
    ExtentFlags, ExtentItem, ExtentRecord, ExtentRef, FileExtent, parse_keyed_refs,
};
use larder_format::node::NodeView;
use larder_format::{FileOffset, Key, KeyType, Logical, MAX_COMPRESSED_EXTENT, ObjectId, TreeId};
use larder_restore::Tree;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::rc::Rc;

/// Nodes that one search resolves at most.
const MOST_NODES: usize = 200_000;

/// An extent and its references.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) start: Logical,
    pub(super) length: u64,
    /// Level of a node; `None` for data.
    pub(super) level: Option<u8>,
    pub(super) item: ExtentItem,
    /// Inline and keyed.
    pub(super) refs: Vec<(ExtentRef, u32)>,
}

/// A file that uses an extent: subvolume, inode and file offset of the item, with what the item
/// says.
pub(super) type Users = BTreeMap<(TreeId, u64, u64), ExtentRecord>;

/// Looks for users.
pub(super) struct Owners<'a> {
    s: &'a Session<'a>,
    extents: Option<Tree>,
    known: HashMap<Logical, Rc<BTreeSet<TreeId>>>,
    /// Not everything was looked at.
    pub(super) cut: bool,
}

impl<'a> Owners<'a> {
    pub(super) fn new(s: &'a Session<'a>) -> Self {
        Self { s, extents: s.trees.tree(ObjectId::EXTENT_TREE), known: HashMap::new(), cut: false }
    }

    /// The extent that covers an address; an error where the extent tree cannot tell.
    pub(super) fn extent_at(&self, at: Logical) -> Result<Option<Extent>, String> {
        let tree = self.extents.as_ref().ok_or("there is no extent tree")?;
        let mut found = None;
        let high = Key::new(at, KeyType(u8::MAX), u64::MAX);
        let gaps = tree.walk_back(self.s.reader, Key::MIN, high, &mut |item| {
            if !matches!(item.key.kind, KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM) {
                return ControlFlow::Continue(());
            }
            found = Some((item.key, item.data.to_vec()));
            ControlFlow::Break(())
        });
        if let Some(gap) = gaps.into_iter().next() {
            return Err(gap.why);
        }
        let Some((key, data)) = found else { return Ok(None) };
        let item = ExtentItem::parse(key.kind, &data).map_err(|e| format!("extent {key}: {e}"))?;
        let skinny = key.kind == KeyType::METADATA_ITEM;
        let length = if skinny { self.s.reader.superblock().nodesize().into() } else { key.offset };
        let start = Logical(key.objectid.0);
        if at.0 - start.0 >= length {
            return Ok(None);
        }
        let level = match (item.flags.contains(ExtentFlags::TREE_BLOCK), &item.block) {
            (false, _) => None,
            (true, Some(info)) => Some(info.level),
            (true, None) => Some(u8::try_from(key.offset).unwrap_or(u8::MAX)),
        };
        let mut refs = item.inline.clone();
        let (low, high) = (
            Key::new(start, KeyType::TREE_BLOCK_REF, 0),
            Key::new(start, KeyType::SHARED_DATA_REF, u64::MAX),
        );
        let gaps = tree.walk(self.s.reader, low, high, &mut |item| {
            refs.extend(parse_keyed_refs(&item.key, item.data).unwrap_or_default());
            ControlFlow::Continue(())
        });
        self.s.problems.gaps(gaps);
        Ok(Some(Extent { start, length, level, item, refs }))
    }

    /// Trees in which this node can be reached from the root.
    pub(super) fn trees_of(&mut self, node: Logical) -> Rc<BTreeSet<TreeId>> {
        if let Some(known) = self.known.get(&node) {
            return known.clone();
        }
        // Stands for the answer while it is looked for: a circle adds nothing.
        self.known.insert(node, Rc::default());
        let mut trees = BTreeSet::new();
        if self.known.len() > MOST_NODES {
            self.cut = true;
        } else if let Ok(bytes) = self.s.reader.block(node)
            && let Ok(Some(extent)) = self.extent_at(node)
            && extent.start == node
        {
            let view = NodeView(&bytes);
            let (level, first) = (view.level(), view.key(0));
            for (r, _) in &extent.refs {
                match r {
                    ExtentRef::TreeBlock { root }
                        if self.s.trees.root(*root).is_some_and(|p| p.at == node) =>
                    {
                        trees.insert(*root);
                    }
                    ExtentRef::TreeBlock { root: ObjectId::ROOT_TREE | ObjectId::CHUNK_TREE } => {
                        let ExtentRef::TreeBlock { root } = r else { continue };
                        trees.insert(*root);
                    }
                    ExtentRef::TreeBlock { root } => {
                        if let Some(parent) =
                            first.and_then(|k| self.parent_in(*root, node, level, k))
                        {
                            trees.extend(self.trees_of(parent).iter().copied());
                        }
                    }
                    ExtentRef::SharedBlock { parent } if self.points_to(*parent, node, level) => {
                        trees.extend(self.trees_of(*parent).iter().copied());
                    }
                    _ => {}
                }
            }
        }
        let trees = Rc::new(trees);
        self.known.insert(node, trees.clone());
        trees
    }

    /// The node above this one in a tree, by its first key.
    fn parent_in(&self, tree: TreeId, node: Logical, level: u8, first: Key) -> Option<Logical> {
        let root = self.s.trees.root(tree)?;
        let (mut at, mut above) = (root.at, root.level.saturating_add(1));
        loop {
            let bytes = self.s.reader.block(at).ok()?;
            let view = NodeView(&bytes);
            // Levels fall, whatever the blocks say.
            if view.level() >= above || view.level() <= level {
                return None;
            }
            above = view.level();
            let slot = view.search(&first).map_or_else(|i| i.checked_sub(1), Some)?;
            let below = Logical(view.pointers().get(slot)?.blockptr.get());
            if above == level + 1 {
                return (below == node).then_some(at);
            }
            at = below;
        }
    }

    fn points_to(&self, parent: Logical, node: Logical, level: u8) -> bool {
        self.s.reader.block(parent).is_ok_and(|bytes| {
            let view = NodeView(&bytes);
            view.level() == level + 1 && view.pointers().iter().any(|p| p.blockptr.get() == node.0)
        })
    }

    /// Files that use a data extent.
    pub(super) fn users(&mut self, extent: &Extent) -> Users {
        let mut users = Users::new();
        for (r, count) in &extent.refs {
            match r {
                ExtentRef::Data { root, objectid, offset } => {
                    let ino = *objectid;
                    for (leaf, at, record) in self.by_key(extent, *root, ino, *offset, *count) {
                        self.add(&mut users, leaf, ino, at, record);
                    }
                }
                ExtentRef::SharedData { parent } => {
                    let Ok(bytes) = self.s.reader.block(*parent) else { continue };
                    let view = NodeView(&bytes);
                    for (i, item) in view.items().iter().enumerate().filter(|_| view.level() == 0) {
                        let key = Key::from(item.key);
                        if let Some(record) = uses(key, view.data(i), extent.start) {
                            self.add(&mut users, *parent, key.objectid, key.offset, record);
                        }
                    }
                }
                _ => {}
            }
        }
        users
    }

    fn add(
        &mut self,
        users: &mut Users,
        leaf: Logical,
        ino: ObjectId,
        at: u64,
        record: ExtentRecord,
    ) {
        for tree in self.trees_of(leaf).iter() {
            users.insert((*tree, ino.0, at), record);
        }
    }

    /// Items of an inode that make up one data reference, with their leaves.
    fn by_key(
        &self,
        extent: &Extent,
        tree: TreeId,
        ino: ObjectId,
        offset: FileOffset,
        count: u32,
    ) -> Vec<(Logical, u64, ExtentRecord)> {
        let mut out = Vec::new();
        let Some(tree) = self.s.trees.tree(tree) else { return out };
        // Items begin within the extent's length from where its first byte would lie, which may be
        // before the file.
        let most = extent.length.max(MAX_COMPRESSED_EXTENT);
        let low = if offset.0.cast_signed() < 0 { 0 } else { offset.0 };
        let high = offset.0.wrapping_add(most);
        let (low, high) =
            (Key::new(ino, KeyType::EXTENT_DATA, low), Key::new(ino, KeyType::EXTENT_DATA, high));
        let gaps = tree.walk(self.s.reader, low, high, &mut |item| {
            if let Some(record) = uses(item.key, Some(item.data), extent.start)
                && FileOffset(item.key.offset).wrapping_minus(record.offset) == offset
            {
                out.push((item.leaf, item.key.offset, record));
            }
            if out.len() < count as usize {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        self.s.problems.gaps(gaps);
        out
    }

    /// Files that use an address, found by looking at every file.
    pub(super) fn search(&self, at: Logical) -> (Option<(Logical, u64)>, Users) {
        let mut users = Users::new();
        let mut extent = None;
        for id in self.s.trees.subvolumes.keys() {
            let Some(tree) = self.s.trees.tree(*id) else { continue };
            let gaps = tree.walk(self.s.reader, Key::MIN, Key::MAX, &mut |item| {
                if item.key.kind == KeyType::EXTENT_DATA
                    && let Ok(FileExtent::Stored(r)) = FileExtent::parse(item.data)
                    && !r.is_hole()
                    && r.disk_bytenr <= at
                    && at.0 - r.disk_bytenr.0 < r.disk_num_bytes
                {
                    extent = Some((r.disk_bytenr, r.disk_num_bytes));
                    users.insert((*id, item.key.objectid.0, item.key.offset), r);
                }
                ControlFlow::Continue(())
            });
            self.s.problems.gaps(gaps);
        }
        (extent, users)
    }
}

fn uses(key: Key, data: Option<&[u8]>, start: Logical) -> Option<ExtentRecord> {
    if key.kind != KeyType::EXTENT_DATA {
        return None;
    }
    match FileExtent::parse(data?) {
        Ok(FileExtent::Stored(r)) if !r.is_hole() && r.disk_bytenr == start => Some(r),
        _ => None,
    }
}
