//! Reference counts: noting which tree uses which block, and what copying a shared block means.
//!
//! A block of a subvolume tree that is at most as old as the subvolume's last snapshot may be
//! shared. Its reference count says whether it is: the published extent tree plus the notes of the
//! sealed and the running transaction. The count must not change between looking and noting, so
//! both happen under the lock of the running notes. The committed part is fetched beforehand
//! ([`Ground::learn_refs`]) and is valid as long as no other transaction is published.

use crate::error::{Error, Place, Result};
use crate::space::extent_tree::{self, ExtentInfo};
use crate::space::refs::{DelayedRefs, ExtentKind, RefDelta};
use crate::transaction::manager::RefsView;
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

/// How often a lock is tried that is held for some instructions only. If that does not help, its
/// holder has lost its processor, and will get it back in milliseconds.
const TRIES: usize = 100;

/// Locks for a caller that holds a tree: while it waits, all others would wait for that tree.
pub(super) fn at_once<G>(lock: impl Fn() -> Option<G>) -> Result<G, EditStop> {
    for _ in 0..TRIES {
        if let Some(guard) = lock() {
            return Ok(guard);
        }
        std::hint::spin_loop();
    }
    Err(EditStop::Need(Need::Notes))
}

/// What came of the attempt to take a reference from a block.
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
    pub(crate) fn note_copied(
        &self,
        txn: &Txn,
        known: &KnownRefs,
        tree: TreeId,
        old: &Node,
        new: Logical,
        maybe_shared: bool,
    ) -> Result<(), EditStop> {
        let at = old.address();
        let level = old.level();
        let mine = ExtentRef::TreeBlock { root: tree };
        let first_key = old.first_key().unwrap_or_default();
        let nodesize = self.nodesize();
        let kind = ExtentKind::TreeBlock { level };
        // Nothing is noted unless all can be noted, so a failed copy leaves no trace.
        let check = |refs: &DelayedRefs| -> Result<()> {
            refs.check(at, u64::from(nodesize), kind)?;
            refs.check_new(new)
        };
        if !maybe_shared || fault!(self.options.tuning, IgnoreSharing) {
            let mut refs = at_once(|| txn.refs.try_lock())?;
            check(&refs)?;
            refs.create_tree_block(new, nodesize, level, tree, txn.generation, Some(first_key))?;
            refs.drop_tree_block(at, nodesize, level, mine)?;
            return Ok(());
        }
        self.txns.with_view_at_once(|view| {
            let Some((base, info)) = known.0.get(&at).copied().filter(|k| k.0 == view.base) else {
                return Err(EditStop::Need(Need::Refs(at, level)));
            };
            debug_assert!(base == view.base && view.running.generation == txn.generation);
            let sealed = match &view.sealed {
                Some(sealed) => at_once(|| sealed.refs.try_lock())?.delta(at),
                None => RefDelta::default(),
            };
            let mut refs = at_once(|| txn.refs.try_lock())?;
            let now = refs.delta(at);
            let count = i128::from(info.refs) + i128::from(now.total) + i128::from(sealed.total);
            let full = info.full_backref || now.set_full_backref || sealed.set_full_backref;
            if count < 1 {
                let what = format!("block in use has a reference count of {count}");
                let place = Place { tree: Some(tree), address: Some(at), ..Place::default() };
                return Err(Error::corrupt(place, what).into());
            }
            check(&refs)?;
            let below = children(old, nodesize, tree)?;
            for child in &below {
                refs.check(child.at, child.len, child.kind)?;
            }
            refs.create_tree_block(new, nodesize, level, tree, txn.generation, Some(first_key))?;
            let theirs_full = if level == 0 {
                ExtentRef::SharedData { parent: at }
            } else {
                ExtentRef::SharedBlock { parent: at }
            };
            let owner = old.view().owner();
            if count > 1 {
                if owner == tree && !full {
                    // The keyed references stand for the copy from now on. Those of the old block
                    // become shared ones.
                    for child in &below {
                        refs.change(child.at, child.len, child.kind, theirs_full, 1)?;
                    }
                    refs.set_full_backref(at, nodesize, level)?;
                } else {
                    for child in &below {
                        refs.change(child.at, child.len, child.kind, child.mine, 1)?;
                    }
                }
            } else if full {
                for child in &below {
                    refs.change(child.at, child.len, child.kind, child.mine, 1)?;
                    refs.change(child.at, child.len, child.kind, theirs_full, -1)?;
                }
            }
            refs.drop_tree_block(at, nodesize, level, mine)?;
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
        let below = children(root, nodesize, snapshot)?;
        let mut refs = txn.refs.lock();
        refs.check_new(new)?;
        for child in &below {
            refs.check(child.at, child.len, child.kind)?;
        }
        let first_key = Some(root.first_key().unwrap_or_default());
        refs.create_tree_block(new, nodesize, root.level(), snapshot, txn.generation, first_key)?;
        for child in &below {
            refs.change(child.at, child.len, child.kind, child.mine, 1)?;
        }
        Ok(below.len() as u64)
    }

    /// Takes a reference from a block on behalf of a tree that is being dropped. The last reference
    /// stays, because what is below the block must go first. `owned`: does the block say that it
    /// belongs to that tree? If it does, and others keep it, it must first be made independent of
    /// the tree ([`Ground::note_orphaned`]). With `suspect`, that is done even if the block itself
    /// is independent already, because what is below it may not be.
    pub(crate) fn note_released(
        &self,
        txn: &Txn,
        known: &KnownRefs,
        (at, level): (Logical, u8),
        reference: ExtentRef,
        owned: Option<bool>,
        suspect: bool,
    ) -> Result<Released, EditStop> {
        self.txns.with_view(|view| {
            let (count, full) = self.count(view, txn, known, at, level)?;
            if count == 1 {
                return Ok(Released::Last { full });
            }
            if (!full || suspect) && owned != Some(false) {
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
        let below = if block.level() == 0 { children(block, nodesize, tree)? } else { Vec::new() };
        let mut refs = txn.refs.lock();
        refs.check(at, u64::from(nodesize), ExtentKind::TreeBlock { level: block.level() })?;
        for child in &below {
            refs.check(child.at, child.len, child.kind)?;
        }
        for child in &below {
            let mine = if full { ExtentRef::SharedData { parent: at } } else { child.mine };
            refs.change(child.at, child.len, child.kind, mine, -1)?;
        }
        refs.drop_tree_block(at, nodesize, block.level(), reference)?;
        Ok(1 + below.len() as u64)
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
            let (_, full) = self.count(view, txn, known, at, level)?;
            if full {
                return Ok(0);
            }
            let below = children(block, nodesize, tree)?;
            let mut refs = txn.refs.lock();
            refs.check(at, u64::from(nodesize), ExtentKind::TreeBlock { level })?;
            for child in &below {
                refs.check(child.at, child.len, child.kind)?;
            }
            for child in &below {
                let theirs = if level == 0 {
                    ExtentRef::SharedData { parent: at }
                } else {
                    ExtentRef::SharedBlock { parent: at }
                };
                refs.change(child.at, child.len, child.kind, theirs, 1)?;
                refs.change(child.at, child.len, child.kind, child.mine, -1)?;
            }
            refs.set_full_backref(at, nodesize, level)?;
            Ok(1 + 2 * below.len() as u64)
        })
    }

    /// The reference count of a block as it is now, and whether the block itself refers to what is
    /// below.
    fn count(
        &self,
        view: &RefsView,
        txn: &Txn,
        known: &KnownRefs,
        at: Logical,
        level: u8,
    ) -> Result<(i128, bool), EditStop> {
        let Some((base, info)) = known.0.get(&at).copied().filter(|k| k.0 == view.base) else {
            return Err(EditStop::Need(Need::Refs(at, level)));
        };
        debug_assert!(base == view.base && view.running.generation == txn.generation);
        let now = txn.refs.lock().delta(at);
        let sealed = view.sealed.as_ref().map(|t| t.refs.lock().delta(at)).unwrap_or_default();
        let count = i128::from(info.refs) + i128::from(now.total) + i128::from(sealed.total);
        if count < 1 {
            let what = format!("block in use has a reference count of {count}");
            return Err(Error::corrupt(Place::block(at), what).into());
        }
        Ok((count, info.full_backref || now.set_full_backref || sealed.set_full_backref))
    }

    /// Has a block of a subvolume tree more than one user?
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn is_shared_block(&self, at: Logical, level: u8) -> Result<bool> {
        let mut known = KnownRefs::default();
        loop {
            match self.txns.with_view(|view| self.count(view, &view.running, &known, at, level)) {
                Ok((count, _)) => return Ok(count > 1),
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

/// What a block points to.
struct Child {
    at: Logical,
    len: u64,
    kind: ExtentKind,
    /// The keyed reference of the tree that the block is in.
    mine: ExtentRef,
}

/// Everything that a block of `tree` points to.
fn children(block: &Node, nodesize: u32, tree: TreeId) -> Result<Vec<Child>> {
    let view = block.view();
    if view.level() > 0 {
        let (kind, mine) = (
            ExtentKind::TreeBlock { level: view.level() - 1 },
            ExtentRef::TreeBlock { root: tree },
        );
        let child = |at| Child { at: Logical(at), len: u64::from(nodesize), kind, mine };
        return Ok(view.pointers().iter().map(|p| child(p.blockptr.get())).collect());
    }
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
            mine: ExtentRef::data(tree, key.objectid, FileOffset(key.offset), on_disk.offset),
        });
    }
    Ok(out)
}
