//! Reference counts: noting which tree uses which block, and what copying a shared block means.
//!
//! A block of a subvolume tree that is at most as old as the subvolume's last snapshot may be
//! shared. Its reference count says whether it is: the published extent tree plus the notes of the
//! sealed and the running transaction. The count must not change between looking and noting, so
//! both happen under the lock of the running notes. The committed part is fetched beforehand
//! ([`Ground::learn_refs`]) and is valid as long as no other transaction is published.

use crate::error::{Error, Place, Result};
use crate::space::Run;
use crate::space::extent_tree::{self, ExtentInfo};
use crate::space::refs::{DelayedRefs, ExtentKind, RefDelta};
use crate::transaction::manager::{RefsView, at_once};
use crate::transaction::{Ground, Txn};
use crate::tree::{EditStop, Need, Node, Version};
use larder_format::items::{ExtentRef, FileExtent};
use larder_format::{FileOffset, Generation, Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::HashMap;

/// What the notes are added to if the extent tree has no item yet.
const NO_ITEM: ExtentInfo = ExtentInfo {
    refs: 0,
    full_backref: false,
    generation: Generation(0),
    num_bytes: 0,
    is_data: false,
};

/// Committed reference counts that were looked up, each with its generation.
#[derive(Debug, Default)]
pub(crate) struct KnownRefs(HashMap<Logical, (Generation, ExtentInfo)>);

impl KnownRefs {
    /// The committed count of a block, if it was looked up in the extent tree that is published.
    fn get(
        &self,
        at: Logical,
        level: u8,
        view: &RefsView,
        txn: &Txn,
    ) -> Result<ExtentInfo, EditStop> {
        let Some((_, info)) = self.0.get(&at).filter(|known| known.0 == view.base) else {
            return Err(EditStop::Need(Need::Refs(at, level)));
        };
        debug_assert!(view.running.generation == txn.generation);
        Ok(*info)
    }
}

/// How many users a block has now.
#[derive(Debug, Clone, Copy)]
struct Counted {
    count: i128,
    /// Does the block itself refer to what is below?
    full: bool,
}

impl Counted {
    /// Adds the notes of the running and of the sealed transaction to what is committed.
    fn of(committed: ExtentInfo, now: RefDelta, sealed: RefDelta, place: Place) -> Result<Self> {
        let count = i128::from(committed.refs) + i128::from(now.total) + i128::from(sealed.total);
        if count < 1 {
            let what = format!("block in use has a reference count of {count}");
            return Err(Error::corrupt(place, what));
        }
        let full = committed.full_backref || now.set_full_backref || sealed.set_full_backref;
        Ok(Self { count, full })
    }
}

/// The result of taking a reference from a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    /// The reference is gone; others keep the block.
    Shared,
    /// It is the last reference, and stays until what is below the block is gone. With `full`, the
    /// block itself refers to what is below.
    Last {
        /// The FULL_BACKREF flag.
        full: bool,
    },
    /// That depends on which tree owns the block.
    WhoOwns,
    /// Others keep the block, and it depends on the tree that is being dropped.
    Orphaned,
}

impl Ground {
    /// Notes a new block.
    pub(crate) fn note_created(
        &self,
        txn: &Txn,
        tree: TreeId,
        at: Logical,
        level: u8,
        first_key: Key,
    ) {
        let done = txn.refs.lock().create_tree_block(
            at,
            self.nodesize(),
            level,
            tree,
            txn.generation,
            Some(first_key),
        );
        self.noted(done);
    }
    /// Notes that a block made in this transaction is not used any more.
    pub(crate) fn note_dropped(&self, txn: &Txn, tree: TreeId, at: Logical, level: u8) {
        let key = ExtentRef::TreeBlock { root: tree };
        let done = txn.refs.lock().drop_tree_block(at, self.nodesize(), level, key);
        self.noted(done);
    }
    /// A note that cannot be right means that the image uses space that it records as free. The
    /// tree has changed already, so this transaction must not be committed.
    pub(crate) fn noted(&self, done: Result<()>) {
        if let Err(e) = done {
            self.txns.fail(&e.to_string());
        }
    }

    /// Notes that `tree` copied `old` to `new`. It never waits, because the caller holds the tree.
    /// Nothing is noted unless all can be noted, so a failed copy leaves no trace.
    pub(crate) fn note_copied(
        &self,
        txn: &Txn,
        known: &KnownRefs,
        tree: TreeId,
        old: &Node,
        new: Logical,
        maybe_shared: bool,
    ) -> Result<(), EditStop> {
        let copy = NewCopy { tree, old, new, nodesize: self.nodesize() };
        if !maybe_shared || fault!(self.options.tuning, IgnoreSharing) {
            let mut refs = at_once(|| txn.refs.try_lock())?;
            copy.check(&refs)?;
            copy.note(&mut refs, txn.generation)?;
            return Ok(());
        }
        let at = old.address();
        self.txns.with_view_at_once(|view| {
            let committed = known.get(at, old.level(), view, txn)?;
            let sealed = match &view.sealed {
                Some(sealed) => at_once(|| sealed.refs.try_lock())?.delta(at),
                None => RefDelta::default(),
            };
            let mut refs = at_once(|| txn.refs.try_lock())?;
            let place = Place { tree: Some(tree), address: Some(at), ..Place::default() };
            let counted = Counted::of(committed, refs.delta(at), sealed, place)?;
            copy.check(&refs)?;
            let below = Below::of(old, copy.nodesize, tree)?;
            below.check(&refs)?;
            copy.note(&mut refs, txn.generation)?;
            copy.pass_on(&mut refs, &below, counted)?;
            Ok(())
        })
    }

    /// Waits until the notes that [`Ground::note_copied`] lacked are unlocked. The caller holds no
    /// tree.
    pub(crate) fn wait_for_notes(&self, txn: &Txn) {
        drop(txn.refs.lock());
        self.txns.with_view(|view| view.sealed.as_ref().map(|sealed| drop(sealed.refs.lock())));
    }

    /// Notes that `snapshot` begins with `new`, a copy of `root`. What the copy points to has one
    /// more user.
    pub(crate) fn note_snapshot(
        &self,
        txn: &Txn,
        snapshot: TreeId,
        root: &Node,
        new: Logical,
    ) -> Result<u64> {
        let nodesize = self.nodesize();
        let below = Below::of(root, nodesize, snapshot)?;
        let mut refs = txn.refs.lock();
        refs.check_new(new)?;
        below.check(&refs)?;
        let first_key = Some(root.first_key().unwrap_or_default());
        refs.create_tree_block(new, nodesize, root.level(), snapshot, txn.generation, first_key)?;
        below.refer_as_tree(&mut refs, 1)?;
        Ok(below.len())
    }

    /// Takes a reference from a block on behalf of a tree that is being dropped. The last reference
    /// stays, because what is below the block must go first. `owned`: does the block say that it
    /// belongs to that tree? If it does, and others keep it, it must first be made independent of
    /// the tree ([`Ground::note_orphaned`]). An inner block may be independent already, but what is
    /// below it may not be.
    pub(crate) fn note_released(
        &self,
        txn: &Txn,
        known: &KnownRefs,
        (at, level): (Logical, u8),
        reference: ExtentRef,
        owned: Option<bool>,
    ) -> Result<Released, EditStop> {
        self.txns.with_view(|view| {
            let Counted { count, full } = self.count(view, txn, known, at, level)?;
            if count == 1 {
                return Ok(Released::Last { full });
            }
            if (!full || level > 0) && owned != Some(false) {
                return Ok(if owned.is_none() { Released::WhoOwns } else { Released::Orphaned });
            }
            txn.refs.lock().drop_tree_block(at, self.nodesize(), level, reference)?;
            Ok(Released::Shared)
        })
    }
    /// The same for a block whose last reference this is, and whose children have been let go: it
    /// becomes free. A leaf's data goes with it. Returns how much was noted.
    pub(crate) fn note_freed(
        &self,
        txn: &Txn,
        tree: TreeId,
        block: &Node,
        full: bool,
        reference: ExtentRef,
    ) -> Result<u64> {
        let (at, nodesize) = (block.address(), self.nodesize());
        let data = match block.level() {
            0 => Below::of(block, nodesize, tree)?,
            _ => Below::nothing(block),
        };
        let mut refs = txn.refs.lock();
        refs.check(at, u64::from(nodesize), ExtentKind::TreeBlock { level: block.level() })?;
        data.check(&refs)?;
        if full {
            data.refer_as_block(&mut refs, -1)?;
        } else {
            data.refer_as_tree(&mut refs, -1)?;
        }
        refs.drop_tree_block(at, nodesize, block.level(), reference)?;
        Ok(1 + data.len())
    }
    /// Makes a block that others keep independent of its owner, which is being dropped: from now on
    /// the block refers to what it points to, and the tree no longer does. Returns how much was
    /// noted.
    pub(crate) fn note_orphaned(
        &self,
        txn: &Txn,
        known: &KnownRefs,
        tree: TreeId,
        block: &Node,
    ) -> Result<u64, EditStop> {
        let (at, level, nodesize) = (block.address(), block.level(), self.nodesize());
        self.txns.with_view(|view| {
            if self.count(view, txn, known, at, level)?.full {
                return Ok(0);
            }
            let below = Below::of(block, nodesize, tree)?;
            let mut refs = txn.refs.lock();
            refs.check(at, u64::from(nodesize), ExtentKind::TreeBlock { level })?;
            below.check(&refs)?;
            below.refer_as_block(&mut refs, 1)?;
            below.refer_as_tree(&mut refs, -1)?;
            refs.set_full_backref(at, nodesize, level)?;
            Ok(1 + 2 * below.len())
        })
    }

    /// Notes a copy of a block that other trees keep, at another place. It refers itself to what it
    /// points to. So far nothing refers to it. Returns how much was noted.
    pub(crate) fn note_relocated(&self, txn: &Txn, copy: &Node) -> Result<u64> {
        let (at, nodesize, level) = (copy.address(), self.nodesize(), copy.level());
        let below = Below::of(copy, nodesize, copy.view().owner())?;
        let kind = ExtentKind::TreeBlock { level };
        let mut refs = txn.refs.lock();
        below.check(&refs)?;
        let first_key = Some(copy.first_key().unwrap_or_default());
        refs.created(at, u64::from(nodesize), kind, txn.generation, first_key)?;
        below.refer_as_block(&mut refs, 1)?;
        refs.set_full_backref(at, nodesize, level)?;
        Ok(1 + below.len())
    }
    /// Notes a new data extent to which nothing refers so far.
    pub(crate) fn note_data(&self, txn: &Txn, run: Run) -> Result<()> {
        let generation = txn.generation;
        txn.refs.lock().created(run.start, run.len, ExtentKind::Data, generation, None)
    }
    /// Notes that `tree` is going to point to a block.
    pub(crate) fn note_pointed_to(
        &self,
        txn: &Txn,
        tree: TreeId,
        (at, level): (Logical, u8),
    ) -> Result<()> {
        let kind = ExtentKind::TreeBlock { level };
        let by_tree = ExtentRef::TreeBlock { root: tree };
        txn.refs.lock().change(at, u64::from(self.nodesize()), kind, by_tree, 1)
    }

    /// The reference count of a block as it is now.
    fn count(
        &self,
        view: &RefsView,
        txn: &Txn,
        known: &KnownRefs,
        at: Logical,
        level: u8,
    ) -> Result<Counted, EditStop> {
        let committed = known.get(at, level, view, txn)?;
        let now = txn.refs.lock().delta(at);
        let sealed = view.sealed.as_ref().map(|t| t.refs.lock().delta(at)).unwrap_or_default();
        Ok(Counted::of(committed, now, sealed, Place::block(at))?)
    }

    /// Has a block of a subvolume tree more than one user?
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn is_shared_block(&self, at: Logical, level: u8) -> Result<bool> {
        let mut known = KnownRefs::default();
        loop {
            match self.txns.with_view(|view| self.count(view, &view.running, &known, at, level)) {
                Ok(now) => return Ok(now.count > 1),
                Err(EditStop::Need(Need::Refs(at, level))) => {
                    self.learn_refs(&mut known, at, level)?
                }
                Err(EditStop::Need(_)) => unreachable!("only reference counts are missing here"),
                Err(EditStop::Fail(e)) => return Err(e),
            }
        }
    }

    /// Fetches the committed reference count of a block.
    pub(crate) fn learn_refs(&self, known: &mut KnownRefs, at: Logical, level: u8) -> Result<()> {
        let epoch = self.epochs.enter();
        let (base, root) = self.txns.with_view(|v| (v.base, v.extent_root.clone()));
        let mut extents =
            Version { tree: ObjectId::EXTENT_TREE, root, store: self.store.clone(), epoch };
        let kind = ExtentKind::TreeBlock { level };
        let skinny = self.extent_features().skinny;
        let info =
            extent_tree::extent_info(&mut extents, at, u64::from(self.nodesize()), kind, skinny)?;
        // A block of a snapshot made since the last commit has no item yet. All its references are
        // in the notes.
        let info = info.unwrap_or(NO_ITEM);
        known.0.insert(at, (base, info));
        Ok(())
    }
}

/// A block that a tree has copied.
struct NewCopy<'a> {
    tree: TreeId,
    old: &'a Node,
    new: Logical,
    nodesize: u32,
}

impl NewCopy<'_> {
    /// Could it be noted?
    fn check(&self, refs: &DelayedRefs) -> Result<()> {
        let kind = ExtentKind::TreeBlock { level: self.old.level() };
        refs.check(self.old.address(), u64::from(self.nodesize), kind)?;
        refs.check_new(self.new)
    }
    /// The tree has the copy now, and no longer the old block.
    fn note(&self, refs: &mut DelayedRefs, generation: Generation) -> Result<()> {
        let Self { tree, old, new, nodesize } = *self;
        let first_key = Some(old.first_key().unwrap_or_default());
        refs.create_tree_block(new, nodesize, old.level(), tree, generation, first_key)?;
        let mine = ExtentRef::TreeBlock { root: tree };
        refs.drop_tree_block(old.address(), nodesize, old.level(), mine)
    }
    /// Notes what the copy means for what both blocks point to. `before` is how many users the old
    /// block had.
    fn pass_on(&self, refs: &mut DelayedRefs, below: &Below, before: Counted) -> Result<()> {
        let old = self.old;
        let stays = before.count > 1;
        if stays && !before.full && old.view().owner() == self.tree {
            // The keyed references stand for the copy from now on. Those of the old block become
            // shared ones.
            below.refer_as_block(refs, 1)?;
            refs.set_full_backref(old.address(), self.nodesize, old.level())
        } else if stays {
            below.refer_as_tree(refs, 1)
        } else if before.full {
            below.refer_as_tree(refs, 1)?;
            below.refer_as_block(refs, -1)
        } else {
            Ok(())
        }
    }
}

/// What a block points to.
struct Below {
    children: Vec<Child>,
    /// The reference to a child that the block itself has, once it has the FULL_BACKREF flag.
    by_block: ExtentRef,
}

struct Child {
    at: Logical,
    len: u64,
    kind: ExtentKind,
    /// The keyed reference of the tree that the block is in.
    by_tree: ExtentRef,
}

impl Below {
    fn nothing(block: &Node) -> Self {
        let parent = block.address();
        let by_block = if block.level() == 0 {
            ExtentRef::SharedData { parent }
        } else {
            ExtentRef::SharedBlock { parent }
        };
        Self { children: Vec::new(), by_block }
    }
    /// Everything that a block of `tree` points to.
    fn of(block: &Node, nodesize: u32, tree: TreeId) -> Result<Self> {
        let children = if block.level() == 0 {
            data_below(block, tree)?
        } else {
            blocks_below(block, nodesize, tree)
        };
        Ok(Self { children, ..Self::nothing(block) })
    }
    fn len(&self) -> u64 {
        self.children.len() as u64
    }
    /// Could changes of all of them be noted?
    fn check(&self, refs: &DelayedRefs) -> Result<()> {
        self.children.iter().try_for_each(|child| refs.check(child.at, child.len, child.kind))
    }
    /// The tree has so many more references to each.
    fn refer_as_tree(&self, refs: &mut DelayedRefs, delta: i64) -> Result<()> {
        self.children.iter().try_for_each(|c| refs.change(c.at, c.len, c.kind, c.by_tree, delta))
    }
    /// The block itself has so many more references to each.
    fn refer_as_block(&self, refs: &mut DelayedRefs, delta: i64) -> Result<()> {
        self.children
            .iter()
            .try_for_each(|c| refs.change(c.at, c.len, c.kind, self.by_block, delta))
    }
}

/// The blocks that an inner node points to.
fn blocks_below(block: &Node, nodesize: u32, tree: TreeId) -> Vec<Child> {
    let view = block.view();
    let kind = ExtentKind::TreeBlock { level: view.level() - 1 };
    let by_tree = ExtentRef::TreeBlock { root: tree };
    let child = |at| Child { at: Logical(at), len: u64::from(nodesize), kind, by_tree };
    view.pointers().iter().map(|p| child(p.blockptr.get())).collect()
}

/// The data extents that a leaf refers to.
fn data_below(leaf: &Node, tree: TreeId) -> Result<Vec<Child>> {
    let view = leaf.view();
    let mut out = Vec::new();
    for (slot, item) in view.items().iter().enumerate() {
        let key = Key::from(item.key);
        if key.kind != KeyType::EXTENT_DATA {
            continue;
        }
        let data = view.data(slot).unwrap_or_default();
        let extent = FileExtent::parse(data)
            .map_err(|e| Error::corrupt(Place::item(tree, key), e.to_string()))?;
        let FileExtent::Stored(on_disk) = extent else { continue };
        if on_disk.is_hole() {
            continue;
        }
        out.push(Child {
            at: on_disk.disk_bytenr,
            len: on_disk.disk_num_bytes,
            kind: ExtentKind::Data,
            by_tree: ExtentRef::data(tree, key.objectid, FileOffset(key.offset), on_disk.offset),
        });
    }
    Ok(out)
}
