//! What refers to a block or to an extent, and which blocks trees share.
//!
//! A survey looks at the published extent tree and at the subvolumes as they are now. It goes
//! upwards: a reference names the tree in which the parent is found by key, or the parent itself.
//! A block that has one user, on a path of such blocks, is *private* to one tree, and moves when
//! the path to it is made writable. All others are *shared*: they have several users, or lie below
//! a block that has. Their content never changes, because every tree copies them before it edits
//! them.
//!
//! What a survey says may be out of date a moment later, but not in a way that does harm. In the
//! transaction in which it is made, sharing only becomes less. Whether a tree still goes through a
//! block is looked at again with the tree locked.

use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::space::{Run, extent_tree};
use crate::tree::{Epoch, Node, OnPath, Root, Version, child_pointer, child_slot};
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, ExtentFlags, ExtentItem, ExtentKind, ExtentRecord};
use larder_format::items::{ExtentRef, FileExtent, parse_keyed_refs};
use larder_format::{FileOffset, FormatError, Generation, Key, KeyType, Logical, ObjectId, TreeId};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// An extent as the extent tree has it.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) run: Run,
    pub(super) is_data: bool,
    /// Its users, in the order of the extent tree.
    pub(super) refs: Vec<ExtentRef>,
    /// How many references there are. Several may be the same.
    pub(super) count: u64,
    /// The transaction that made it.
    pub(super) made: Generation,
    /// These are some of its users, and others are dealt with in another batch.
    pub(super) is_part: bool,
}

impl Extent {
    /// The extent, or parts of it, each with so many users at most. Only the users of data can be
    /// divided: a block has one for each tree that shares it.
    ///
    /// A part has neighbours in a tree: so each leaf of it changes for one part, and not for all.
    pub(super) fn parts(mut self, most: usize) -> Vec<Self> {
        if !self.is_data || self.refs.len() <= most {
            return vec![self];
        }
        self.refs.sort_unstable_by_key(place_of);
        let part =
            |refs: &[ExtentRef]| Self { refs: refs.to_vec(), is_part: true, ..self.but_refs() };
        self.refs.chunks(most.max(1)).map(part).collect()
    }
    fn but_refs(&self) -> Self {
        Self { refs: Vec::new(), ..*self }
    }
}

/// To what a block belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// To one subvolume.
    Private(TreeId),
    /// To a tree that only the committer edits.
    Global(TreeId),
    /// To several subvolumes, or it lies below a block that does.
    Shared,
    /// To subvolumes that are being dropped.
    Dying,
}

/// What points to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Above {
    /// Another block.
    Block(Logical),
    /// A block that a subvolume has changed in this transaction, or its ROOT_ITEM.
    Tree(TreeId),
    /// Something in a tree that only the committer edits.
    Global(TreeId),
    /// A subvolume that is being dropped.
    Dying,
}

/// A block and what points to it.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) node: Arc<Node>,
    pub(super) count: u64,
    pub(super) above: Vec<Above>,
}

impl Block {
    /// Where it lies in a tree.
    pub(super) fn on_path(&self) -> OnPath {
        OnPath {
            key: self.node.first_key().unwrap_or_default(),
            level: self.node.level(),
            at: self.node.address(),
        }
    }
}

/// A file extent item that refers to an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct User {
    pub(super) tree: TreeId,
    pub(super) key: Key,
}

/// What refers to a data extent.
#[derive(Debug, Default)]
pub(super) struct Users {
    /// Items in leaves that are private to a subvolume.
    pub(super) items: Vec<User>,
    /// These leaves.
    pub(super) private: Vec<Logical>,
    /// Leaves that subvolumes share.
    pub(super) shared: Vec<Logical>,
    /// Is any of it data, and not space that is merely reserved?
    pub(super) has_data: bool,
    /// Space caches of the first version that have it, by their inodes in the root tree.
    pub(super) caches: Vec<ObjectId>,
    /// Another tree that has the extent, and that is no subvolume.
    pub(super) foreign: Option<TreeId>,
}

/// The items of a leaf that refer to data, by the address of the extent.
type ItemsByExtent = HashMap<Logical, SmallVec<[(Key, ExtentKind); 1]>>;

/// A subvolume, and its tree at one moment.
type Seen = (Arc<Subvolume>, Version);

/// See the module's text.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    core: &'a Core,
    epoch: Epoch,
    extents: Version,
    /// The transaction of the published extent tree.
    base: Generation,
    trees: HashMap<TreeId, Option<Seen>>,
    found: Found,
}

/// What a survey has found out.
#[derive(Debug, Default)]
struct Found {
    blocks: HashMap<Logical, Arc<Block>>,
    owners: HashMap<Logical, Owner>,
    leaves: HashMap<Logical, Arc<ItemsByExtent>>,
}

/// What is left of a survey that is over: what it has found out, and of what. It keeps no space
/// from being used.
#[derive(Debug)]
pub(super) struct Remembered {
    base: Generation,
    /// The roots of the subvolumes that it looked at. A root in memory that is known here does not
    /// change any more: an edit makes a new one.
    roots: HashMap<TreeId, Option<Root>>,
    found: Found,
}

impl<'a> Survey<'a> {
    pub(super) fn new(core: &'a Core) -> Self {
        let epoch = core.epochs.enter();
        let (base, root) = core.txns.with_view(|v| (v.base, v.extent_root.clone()));
        let (tree, store) = (ObjectId::EXTENT_TREE, core.store.clone());
        let extents = Version { tree, root, store, epoch: epoch.clone() };
        Self { core, epoch, extents, base, trees: HashMap::new(), found: Found::default() }
    }

    /// The transaction of the published extent tree.
    pub(super) fn base(&self) -> Generation {
        self.base
    }

    /// Ends it, and keeps what it has found out.
    pub(super) fn remember(self) -> Remembered {
        let root = |seen: Option<Seen>| seen.map(|(_, version)| version.root);
        let roots = self.trees.into_iter().map(|(id, seen)| (id, root(seen))).collect();
        Remembered { base: self.base, roots, found: self.found }
    }

    /// Takes over what an earlier survey has found out, if nothing that it looked at has changed
    /// since then. Says whether that is so.
    ///
    /// # Errors
    /// As [`Self::tree`].
    pub(super) fn recall(&mut self, earlier: Remembered) -> Result<bool> {
        if earlier.base != self.base {
            return Ok(false);
        }
        for (id, then) in earlier.roots {
            let now = self.tree(id)?.map(|(_, version)| &version.root);
            let is_same = match (&then, now) {
                (None, None) => true,
                (Some(then), Some(now)) => then.is(now),
                _ => false,
            };
            if !is_same {
                return Ok(false);
            }
        }
        self.found = earlier.found;
        Ok(true)
    }

    /// The first extents of a run, so many at most. There are fewer if they have very many users.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn list(&self, run: Run, most: usize) -> Result<Vec<Extent>> {
        let mut out: Vec<Extent> = Vec::new();
        let mut users = 0;
        let nodesize = self.core.nodesize();
        let first = Key::new(run.start, KeyType(0), 0);
        let last = Key::new(Logical(run.end().0 - 1), KeyType(u8::MAX), u64::MAX);
        self.extents.scan(&first, &last, |item| {
            if let Some((at, len)) = extent_tree::extent_of(&item.key, nodesize) {
                users += out.last().map_or(0, |extent| extent.refs.len());
                if out.len() == most || users > MOST_USERS {
                    return Ok(false);
                }
                let record =
                    ExtentItem::parse(item.key.kind, item.data()).map_err(bad(item.key))?;
                let refs = record.inline.iter().map(|r| r.0);
                let refs = refs.filter(|r| !matches!(r, ExtentRef::Owner { .. })).collect();
                let is_data = record.flags.contains(ExtentFlags::DATA);
                out.push(Extent {
                    run: Run::new(at, len),
                    is_data,
                    refs,
                    count: record.refs,
                    made: record.generation,
                    is_part: false,
                });
            } else if let Some(extent) = out.last_mut()
                && extent.run.start.0 == item.key.objectid.0
                && is_reference(item.key.kind)
            {
                let found = parse_keyed_refs(&item.key, item.data()).map_err(bad(item.key))?;
                extent.refs.extend(found.iter().map(|r| r.0));
            }
            Ok(true)
        })?;
        Ok(out)
    }

    /// Does the published extent tree have exactly this extent of data, made by that transaction?
    pub(super) fn has(&self, run: Run, made: Generation) -> bool {
        let key = Key::new(run.start, KeyType::EXTENT_ITEM, run.len);
        let Ok(Some(item)) = self.extents.get(&key) else { return false };
        let record = ExtentItem::parse(key.kind, item.data());
        record.is_ok_and(|r| r.flags.contains(ExtentFlags::DATA) && r.generation == made)
    }

    /// Extents that were listed before, as they are now: commits between have changed their users.
    /// An extent that is gone has none. Parts are left as they are.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn as_now(&self, list: &[Extent]) -> Result<Vec<Extent>> {
        let mut now = list.to_vec();
        let ends = (list.first(), list.last());
        let (Some(first), Some(last)) = ends else { return Ok(now) };
        if first.is_part {
            return Ok(now);
        }
        let run = Run::new(first.run.start, last.run.end().0 - first.run.start.0);
        let found = self.list(run, usize::MAX)?;
        let mut found: HashMap<Run, Extent> = found.into_iter().map(|e| (e.run, e)).collect();
        for extent in &mut now {
            *extent = match found.remove(&extent.run) {
                Some(found) if found.is_data == extent.is_data => found,
                _ => extent.but_refs(),
            };
        }
        Ok(now)
    }

    /// A subvolume that is not being dropped.
    pub(super) fn tree(&mut self, id: TreeId) -> Result<Option<&Seen>> {
        if !self.trees.contains_key(&id) {
            let found = match self.core.subvol(id) {
                Ok(subvol) => {
                    let version = subvol.tree.version(self.epoch.clone());
                    Some((subvol, version))
                }
                Err(Error::NotFound) => None,
                Err(e) => return Err(e),
            };
            self.trees.insert(id, found);
        }
        Ok(self.trees.get(&id).and_then(Option::as_ref))
    }

    /// A block, if the published extent tree has it.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn block(&mut self, at: Logical) -> Result<Option<Arc<Block>>> {
        if let Some(block) = self.found.blocks.get(&at) {
            return Ok(Some(block.clone()));
        }
        let one = Run::new(at, u64::from(self.core.nodesize()));
        let Some(extent) = self.list(one, 1)?.pop().filter(|e| e.run.start == at && !e.is_data)
        else {
            return Ok(None);
        };
        let node = self.core.store.at_address(at, Some(extent.made))?;
        let mut above = Vec::with_capacity(extent.refs.len());
        for reference in &extent.refs {
            above.push(match *reference {
                ExtentRef::SharedBlock { parent } => Above::Block(parent),
                ExtentRef::TreeBlock { root } => self.above_in(root, &node)?,
                _ => return Err(Error::corrupt(Place::block(at), "a block is used as data")),
            });
        }
        let block = Arc::new(Block { node, count: extent.count, above });
        self.found.blocks.insert(at, block.clone());
        Ok(Some(block))
    }

    /// What points to a block in a tree that refers to it.
    fn above_in(&mut self, root: TreeId, block: &Node) -> Result<Above> {
        if !root.is_subvolume() {
            return Ok(Above::Global(root));
        }
        let base = self.base;
        let Some((_, version)) = self.tree(root)? else { return Ok(Above::Dying) };
        let (level, at) = (block.level(), block.address());
        let key = block.first_key().unwrap_or_default();
        if version.level() <= level {
            let is_root = version.root.ptr.at == at;
            return Ok(if is_root { Above::Tree(root) } else { Above::Dying });
        }
        let mut node = version.root_node()?;
        while node.level() > level + 1 {
            let slot = child_slot(&node, &key);
            node = version.child(&node, slot)?;
        }
        let ptr = child_pointer(&node, child_slot(&node, &key));
        Ok(match () {
            // It has left the tree in this transaction.
            () if ptr.at != at => Above::Dying,
            () if node.generation() > base => Above::Tree(root),
            () => Above::Block(node.address()),
        })
    }

    /// To what a block belongs.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn owner(&mut self, at: Logical) -> Result<Owner> {
        if let Some(owner) = self.found.owners.get(&at) {
            return Ok(*owner);
        }
        let owner = match self.block(at)? {
            None => Owner::Dying,
            Some(block) if block.count > 1 => Owner::Shared,
            Some(block) => match block.above.first() {
                None | Some(Above::Dying) => Owner::Dying,
                Some(Above::Tree(tree)) => Owner::Private(*tree),
                Some(Above::Global(tree)) => Owner::Global(*tree),
                Some(Above::Block(parent)) => {
                    self.check_above(&block, *parent)?;
                    self.owner(*parent)?
                }
            },
        };
        self.found.owners.insert(at, owner);
        Ok(owner)
    }

    /// Levels rise on the way up, so that the way comes to an end in a damaged image, too.
    fn check_above(&mut self, block: &Block, parent: Logical) -> Result<()> {
        match self.block(parent)? {
            Some(above) if above.node.level() != block.node.level() + 1 => {
                let what = format!("block {parent} refers to it, and is not one level higher");
                Err(Error::corrupt(Place::block(block.node.address()), what))
            }
            _ => Ok(()),
        }
    }

    /// What refers to a data extent.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn users(&mut self, extent: &Extent) -> Result<Users> {
        let mut users = Users::default();
        for reference in &extent.refs {
            match *reference {
                ExtentRef::Data { root: ObjectId::ROOT_TREE, objectid, .. } => {
                    users.caches.push(objectid);
                }
                ExtentRef::Data { root, .. } if !root.is_subvolume() => {
                    users.foreign = Some(root);
                }
                ExtentRef::Data { root, objectid, offset } => {
                    self.users_in_file(extent, root, (objectid, offset), &mut users)?;
                }
                ExtentRef::SharedData { parent } => {
                    self.users_in_leaf(extent, parent, &mut users)?;
                }
                _ => {
                    let what = "data is used as a block";
                    return Err(Error::corrupt(Place::block(extent.run.start), what));
                }
            }
        }
        users.items.sort_unstable();
        users.items.dedup();
        users.shared.sort_unstable();
        users.shared.dedup();
        Ok(users)
    }

    /// Items of a file. Each refers to the extent as if its first byte lay at `base`.
    fn users_in_file(
        &mut self,
        extent: &Extent,
        root: TreeId,
        (ino, base): (ObjectId, FileOffset),
        users: &mut Users,
    ) -> Result<()> {
        let at_least = if base.0.cast_signed() < 0 { 0 } else { base.0 };
        let end = base.0.wrapping_add(extent.run.len.max(MOST_UNPACKED));
        let (first, last) = (extent_data_key(ino, FileOffset(at_least)), end);
        let mut found = Vec::new();
        let published = self.base;
        let Some((_, version)) = self.tree(root)? else { return Ok(()) };
        version.scan(&first, &extent_data_key(ino, FileOffset(last)), |item| {
            if let Some(record) = refers(item.data(), extent) {
                found.push((item.key, item.leaf_address(), item.leaf_generation(), record.kind));
            }
            Ok(true)
        })?;
        for (key, leaf, generation, kind) in found {
            users.has_data |= kind == ExtentKind::Regular;
            let owner =
                if generation > published { Owner::Private(root) } else { self.owner(leaf)? };
            match owner {
                Owner::Private(tree) => {
                    users.items.push(User { tree, key });
                    users.private.push(leaf);
                }
                Owner::Shared => users.shared.push(leaf),
                Owner::Global(_) | Owner::Dying => {}
            }
        }
        Ok(())
    }

    fn users_in_leaf(&mut self, extent: &Extent, leaf: Logical, users: &mut Users) -> Result<()> {
        let owner = self.owner(leaf)?;
        let Some(items) = self.items_by_extent(leaf)? else { return Ok(()) };
        for (key, kind) in items.get(&extent.run.start).into_iter().flatten() {
            users.has_data |= *kind == ExtentKind::Regular;
            match owner {
                Owner::Private(tree) => {
                    users.items.push(User { tree, key: *key });
                    users.private.push(leaf);
                }
                Owner::Shared => users.shared.push(leaf),
                Owner::Global(_) | Owner::Dying => {}
            }
        }
        Ok(())
    }

    /// The items of a leaf that refer to data.
    fn items_by_extent(&mut self, leaf: Logical) -> Result<Option<Arc<ItemsByExtent>>> {
        if let Some(items) = self.found.leaves.get(&leaf) {
            return Ok(Some(items.clone()));
        }
        let Some(block) = self.block(leaf)? else { return Ok(None) };
        let view = block.node.view();
        let mut items = ItemsByExtent::new();
        for slot in 0..view.nritems() {
            let key = view.key(slot).filter(|key| key.kind == KeyType::EXTENT_DATA);
            if let (Some(key), Some(record)) = (key, view.data(slot).and_then(stored)) {
                items.entry(record.disk_bytenr).or_default().push((key, record.kind));
            }
        }
        let items = Arc::new(items);
        self.found.leaves.insert(leaf, items.clone());
        Ok(Some(items))
    }

    /// Adds the blocks of which a tree needs its own copies to change the block at `at`: the block
    /// itself and those above it that are private. Blocks that the running transaction has made are
    /// not among them.
    pub(super) fn way_up(&mut self, at: Logical, to: &mut HashSet<Logical>) -> Result<()> {
        let mut next = Some(at);
        while let Some(at) = next.filter(|at| to.insert(*at)) {
            next = self.block(at)?.and_then(|block| match block.above[..] {
                [Above::Block(parent)] => Some(parent),
                _ => None,
            });
        }
        Ok(())
    }
}

/// Where a user is: in which tree and file, or in which leaf.
fn place_of(user: &ExtentRef) -> (TreeId, ObjectId, u64) {
    match *user {
        ExtentRef::Data { root, objectid, offset } => (root, objectid, offset.0),
        ExtentRef::SharedData { parent } => (ObjectId(0), ObjectId(0), parent.0),
        _ => (ObjectId(0), ObjectId(0), 0),
    }
}

/// A packed extent has at most so many bytes of a file.
const MOST_UNPACKED: u64 = 128 << 10;

/// Users of extents that are listed at once, apart from those of the last extent.
const MOST_USERS: usize = 100_000;

/// What a file extent item says, if it refers to this extent.
fn refers(data: &[u8], extent: &Extent) -> Option<ExtentRecord> {
    stored(data).filter(|record| record.disk_bytenr == extent.run.start)
}

/// How many blocks and extents a block refers to.
pub(super) fn references_of(node: &Node) -> usize {
    let view = node.view();
    if node.level() > 0 {
        return view.nritems();
    }
    let is_data = |slot: &usize| {
        view.key(*slot).is_some_and(|key| key.kind == KeyType::EXTENT_DATA)
            && view.data(*slot).is_some_and(|data| stored(data).is_some())
    };
    (0..view.nritems()).filter(is_data).count()
}

/// What a file extent item says, if it refers to an extent.
fn stored(data: &[u8]) -> Option<ExtentRecord> {
    match FileExtent::parse(data) {
        Ok(FileExtent::Stored(r)) if !r.is_hole() => {
            debug_assert!(r.compression == Compression::None || r.ram_bytes <= MOST_UNPACKED);
            Some(r)
        }
        _ => None,
    }
}

fn is_reference(kind: KeyType) -> bool {
    matches!(
        kind,
        KeyType::TREE_BLOCK_REF
            | KeyType::SHARED_BLOCK_REF
            | KeyType::EXTENT_DATA_REF
            | KeyType::SHARED_DATA_REF
    )
}

fn bad(key: Key) -> impl Fn(FormatError) -> Error {
    move |e| Error::corrupt(Place::item(ObjectId::EXTENT_TREE, key), e.0)
}
