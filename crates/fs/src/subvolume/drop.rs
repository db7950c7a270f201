//! Dropping the trees of deleted subvolumes, in the background and in bounded steps.
//!
//! A walk goes down from the root, left to right. A block that other trees use loses this tree's
//! reference and is left alone. A block that only this tree uses is emptied first and then freed.
//! The blocks themselves are not changed, so the ROOT_ITEM only has to say how far the walk has
//! come: the key of the next child, and the level of the node that points to it, as on Linux. Each
//! step notes its references and its position in one transaction. After a crash Linux or Larder
//! goes on from there.
//!
//! One thing is not as simple. A shared block whose header names *this* tree as owner, without
//! FULL_BACKREF, relies on the tree, because the references of what is below it are in the tree's
//! name. Such blocks, and those of this tree below them, are first made to refer to their children
//! themselves ([`crate::transaction::Ground::note_orphaned`]). A block that is not newer than the
//! snapshot as which the tree began cannot be its own, and need not be read. A shared block that
//! has the flag already is looked at, too: relocation gives the flag to the blocks that it copies,
//! and not to those below them that stay.
//!
//! A tree of Linux's relocation is dropped in the same way. All of its blocks that nothing else
//! uses refer to their children themselves, and none belongs to it, so nothing is made independent.
//! Until then it may say by `drop_progress` how far Linux had put its blocks to use. That has no
//! meaning here: a block that Linux has put to use is in the subvolume, and the tree has the old
//! one instead.
//!
//! Nothing else changes this tree: edits of a deleted subvolume are refused, and the walk begins
//! when the transaction that deleted it is published.

use crate::api::past_no_return;
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::transaction::sharing::{KnownRefs, Released};
use crate::transaction::{DeadTree, Handle, Progress, parse_root_item, root_pointer};
use crate::tree::{EditStop, Need, Node, Pointer, child_pointer, child_slot, doing};
use larder_format::items::{ExtentRef, RootItem};
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::FromZeros;

/// Notes that one step makes, up to one block's more. A seal waits for a step.
const STEP_NOTES: u64 = 2000;
/// Blocks that one step looks at.
const STEP_BLOCKS: u64 = 256;
/// Notes of a transaction from which on a step waits for its commit, because notes need memory.
const MANY_NOTES: u64 = 50_000;

/// The thread that drops trees.
pub(crate) fn run(core: &Core) {
    while let Some((tree, since)) = core.drops.next() {
        let done = core.txns.wait(since).and_then(|()| drop_tree(core, tree));
        if let Err(e) = &done {
            tracing::warn!("the {tree} is not dropped yet: {e}");
        }
        core.drops.done(tree, done.ok());
    }
}

/// Queues the subvolumes that were deleted earlier, by Larder or Linux, and not dropped completely,
/// and the trees of a relocation that Linux did not finish.
///
/// # Errors
/// Reading or corruption.
pub(crate) fn queue_earlier(core: &Core) -> Result<()> {
    let roots = core.roots.root.version(core.epochs.enter());
    let first = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, 0);
    let last = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, u64::MAX);
    let mut found = Vec::new();
    roots.scan(&first, &last, |item| {
        found.push(ObjectId(item.key.offset));
        Ok(true)
    })?;
    for id in found.into_iter().filter(|id| id.is_subvolume() && *id != ObjectId::FS_TREE) {
        core.drops.add(DeadTree::Subvolume(id), Generation(0));
    }
    let of = |offset| Key::new(ObjectId::TREE_RELOC, KeyType::ROOT_ITEM, offset);
    roots.scan(&of(0), &of(u64::MAX), |item| {
        core.drops.add(DeadTree::Relocation(ObjectId(item.key.offset)), Generation(0));
        Ok(true)
    })
}

/// Drops a tree. False if it was told to stop before the end.
fn drop_tree(core: &Core, tree: DeadTree) -> Result<bool> {
    let _waiting_is_allowed = past_no_return();
    let _doing = doing("drop subvolume");
    let found = {
        let roots = core.roots.root.version(core.epochs.enter());
        match roots.at_or_before(&tree.last_key())? {
            Some(item) if tree.is_at(&item.key) => Some((item.key.offset, parse_root_item(&item)?)),
            _ => None,
        }
    };
    let Some((born, mut item)) = found else {
        finish(core, &mut core.begin_deleting(1)?, tree);
        return Ok(true);
    };
    if item.refs.get() > 0 {
        match tree {
            DeadTree::Subvolume(id) => {
                tracing::warn!("subvolume {id} is announced as deleted, but it is not");
                return Ok(true);
            }
            DeadTree::Relocation(_) => item.drop_progress.zero(),
        }
    }
    let mut walk = Walk::new(core, tree, Generation(born), &item)?;
    while !walk.step(core)? {
        if core.drops.stopped() {
            return Ok(false);
        }
        let many = core.txns.running().notes.load(Ordering::Relaxed) > MANY_NOTES;
        if many || core.options.tuning.drop_step.is_some() {
            core.commit()?;
        }
    }
    Ok(true)
}

/// Notes that nothing is left of a tree.
fn finish(core: &Core, h: &mut Handle<'_>, tree: DeadTree) {
    h.noted_for_root_tree(2);
    h.txn.roots.lock().drops.insert(tree, Progress::Done);
    let subvol = core.subvols.write().remove(&tree.id());
    if let Some(subvol) = subvol {
        subvol.inodes.clear();
    }
}

/// A node on the way down that only this tree uses.
#[derive(Debug)]
struct Open {
    node: Arc<Node>,
    /// The next child.
    next: usize,
    /// Do its children have shared references, by the node's address?
    full: bool,
    /// The reference by which its parent refers to it.
    reference: ExtentRef,
}

impl Open {
    /// The reference by which a child of this node is referred to.
    fn reference_below(&self, tree: DeadTree) -> ExtentRef {
        match self.full {
            true => ExtentRef::SharedBlock { parent: self.node.address() },
            false => ExtentRef::TreeBlock { root: owner(tree, &self.node) },
        }
    }
}

/// The tree in whose name a block of a dead tree refers to what is below it, unless it refers
/// itself.
fn owner(tree: DeadTree, block: &Node) -> TreeId {
    match tree {
        DeadTree::Subvolume(id) => id,
        DeadTree::Relocation(_) => block.view().owner(),
    }
}

#[derive(Debug)]
struct Walk {
    dead: DeadTree,
    tree: TreeId,
    /// Only blocks of later transactions can be the tree's own.
    born: Generation,
    root: Pointer,
    started: bool,
    /// From the root down.
    open: Vec<Open>,
    /// Blocks of this tree that other trees keep and that are being made independent of it, each
    /// with its next child.
    orphaned: Vec<(Arc<Node>, usize)>,
    /// Was the last step to make the current block independent?
    independent: bool,
}

impl Walk {
    fn new(core: &Core, dead: DeadTree, born: Generation, item: &RootItem) -> Result<Self> {
        let root = root_pointer(item);
        let mut walk = Self {
            dead,
            tree: dead.id(),
            born,
            root,
            started: false,
            open: Vec::new(),
            orphaned: Vec::new(),
            independent: false,
        };
        let key: Key = item.drop_progress.into();
        if key != Key::MIN && root.level > 0 {
            walk.resume(core, &key, item.drop_level.max(1))?;
        }
        Ok(walk)
    }

    /// Goes back to the place that an earlier walk had reached.
    fn resume(&mut self, core: &Core, key: &Key, level: u8) -> Result<()> {
        let mut known = KnownRefs::default();
        let mut ptr = self.root;
        loop {
            let node = core.store.get(&ptr, self.tree)?;
            let reference = self.reference();
            let h = core.begin_deleting(1)?;
            let full = loop {
                let at = (ptr.at, ptr.level);
                match core.note_released(&h.txn, &known, at, reference, None) {
                    Ok(Released::Last { full }) => break full,
                    Ok(_) => {
                        let place = Place {
                            tree: Some(self.tree),
                            address: Some(ptr.at),
                            ..Place::default()
                        };
                        return Err(Error::corrupt(
                            place,
                            "a half-dropped tree shares a block on its way",
                        ));
                    }
                    Err(EditStop::Need(Need::Refs(at, level))) => {
                        core.learn_refs(&mut known, at, level)?
                    }
                    Err(EditStop::Need(_)) => {
                        unreachable!("only reference counts are missing here")
                    }
                    Err(EditStop::Fail(e)) => return Err(e),
                }
            };
            drop(h);
            let here = ptr.level <= level;
            let slot = if here {
                node.view().search(key).unwrap_or_else(|slot| slot)
            } else {
                child_slot(&node, key)
            };
            let next = if here { slot } else { slot + 1 };
            if !here {
                ptr = child_pointer(&node, slot);
            }
            self.open.push(Open { node, next, full, reference });
            if here {
                self.started = true;
                return Ok(());
            }
        }
    }

    /// Goes on for one step. True at the end.
    fn step(&mut self, core: &Core) -> Result<bool> {
        let _shared = core.shared_blocks.lock();
        let mut h = core.begin_deleting(1)?;
        let mut known = KnownRefs::default();
        let limit = core.options.tuning.drop_step.unwrap_or(STEP_NOTES);
        let (mut notes, mut blocks) = (0, 0);
        let outcome = loop {
            match self.advance(core, &h, &mut known) {
                Ok(Some(more)) => {
                    notes += more;
                    blocks += 1;
                    if notes >= limit || blocks >= STEP_BLOCKS {
                        break self.close_finished(core, &h).map(|more| {
                            notes += more;
                            self.is_done()
                        });
                    }
                }
                Ok(None) => break Ok(true),
                Err(e) => break Err(e),
            }
        };
        core.drops.blocks.fetch_add(blocks, Ordering::Relaxed);
        h.noted_refs(notes);
        // Whatever ended the step, its notes and its position belong together, so both are noted.
        match self.position() {
            _ if self.is_done() => finish(core, &mut h, self.dead),
            Some(mut progress) if !fault!(core.options.tuning, DropWithoutProgress) => {
                if fault!(core.options.tuning, DropProgressEarly) {
                    progress = self.position_ahead().unwrap_or(progress);
                }
                h.noted_for_root_tree(1);
                h.txn.roots.lock().drops.insert(self.dead, progress);
            }
            _ => {}
        }
        outcome
    }

    /// The reference by which the current block is referred to. Nothing points to the root of a
    /// tree of Linux's relocation but its ROOT_ITEM, and it counts as its own parent.
    fn reference(&self) -> ExtentRef {
        match (self.open.last(), self.dead) {
            (Some(open), dead) => open.reference_below(dead),
            (None, DeadTree::Subvolume(root)) => ExtentRef::TreeBlock { root },
            (None, DeadTree::Relocation(_)) => ExtentRef::SharedBlock { parent: self.root.at },
        }
    }

    fn is_done(&self) -> bool {
        self.started && self.open.is_empty() && self.orphaned.is_empty()
    }

    /// Where to go on after a crash.
    fn position(&self) -> Option<Progress> {
        let open = self.open.iter().rev().find(|o| o.next < o.node.view().nritems())?;
        Some(Progress::At { key: open.node.view().key(open.next)?, level: open.node.level() })
    }

    /// Where to go on if one more child were gone.
    fn position_ahead(&self) -> Option<Progress> {
        let open = self.open.iter().rev().find(|o| o.next + 1 < o.node.view().nritems())?;
        Some(Progress::At { key: open.node.view().key(open.next + 1)?, level: open.node.level() })
    }

    /// Frees nodes whose children are all gone. Afterwards the position is that of a child that is
    /// still there.
    fn close_finished(&mut self, core: &Core, h: &Handle<'_>) -> Result<u64> {
        let mut notes = 0;
        while let Some(open) = self.open.last()
            && open.next >= open.node.view().nritems()
        {
            let tree = owner(self.dead, &open.node);
            notes += core.note_freed(&h.txn, tree, &open.node, open.full, open.reference)?;
            self.open.pop();
        }
        Ok(notes)
    }

    /// Deals with one block. Returns how much was noted, or nothing at the end.
    fn advance(
        &mut self,
        core: &Core,
        h: &Handle<'_>,
        known: &mut KnownRefs,
    ) -> Result<Option<u64>> {
        if !self.orphaned.is_empty() {
            return self.advance_orphaned(core, h, known).map(Some);
        }
        let closed = self.close_finished(core, h)?;
        let ptr = match self.open.last() {
            Some(open) => child_pointer(&open.node, open.next),
            None if self.started => return Ok((closed > 0).then_some(closed)),
            None => self.root,
        };
        self.release(core, h, known, &ptr).map(|notes| Some(closed + notes))
    }

    /// Lets go of a block: of this tree's reference, if other trees use it, or of the block itself.
    /// Returns how much was noted.
    fn release(
        &mut self,
        core: &Core,
        h: &Handle<'_>,
        known: &mut KnownRefs,
        ptr: &Pointer,
    ) -> Result<u64> {
        let reference = self.reference();
        let block = (ptr.at, ptr.level);
        let mut node = None;
        // For an older block the answer is known without reading it.
        let is_others = matches!(self.dead, DeadTree::Relocation(_)) || ptr.generation <= self.born;
        let mut owned = (is_others || self.independent).then_some(false);
        loop {
            match core.note_released(&h.txn, known, block, reference, owned) {
                Ok(Released::Shared) => {
                    self.passed();
                    return Ok(1);
                }
                Ok(Released::Last { full }) => {
                    let node = match node {
                        Some(node) => node,
                        None => core.store.get(ptr, self.tree)?,
                    };
                    let mut notes = 0;
                    if ptr.level == 0 {
                        let tree = owner(self.dead, &node);
                        notes = core.note_freed(&h.txn, tree, &node, full, reference)?;
                    }
                    self.passed();
                    if ptr.level > 0 {
                        self.open.push(Open { node, next: 0, full, reference });
                    }
                    return Ok(notes);
                }
                Ok(Released::WhoOwns) => {
                    let block = core.store.get(ptr, self.tree)?;
                    owned = Some(block.view().owner() == self.tree);
                    node = Some(block);
                }
                Ok(Released::Orphaned) => {
                    let block = node.expect("it was read to find its owner");
                    return self.make_independent(core, h, known, block);
                }
                Err(stop) => self.provide(core, known, stop)?,
            }
        }
    }

    /// The current child is done.
    fn passed(&mut self) {
        self.independent = false;
        match self.open.last_mut() {
            Some(open) => open.next += 1,
            None => self.started = true,
        }
    }

    fn provide(&self, core: &Core, known: &mut KnownRefs, stop: EditStop) -> Result<()> {
        match stop {
            EditStop::Need(Need::Refs(at, level)) => core.learn_refs(known, at, level),
            EditStop::Need(_) => unreachable!("only reference counts are missing here"),
            EditStop::Fail(e) => Err(e),
        }
    }

    fn make_independent(
        &mut self,
        core: &Core,
        h: &Handle<'_>,
        known: &mut KnownRefs,
        block: Arc<Node>,
    ) -> Result<u64> {
        let notes = loop {
            match core.note_orphaned(&h.txn, known, self.tree, &block) {
                Ok(notes) => break notes,
                Err(stop) => self.provide(core, known, stop)?,
            }
        };
        if block.level() > 0 {
            self.orphaned.push((block, 0));
        }
        self.end_of_orphaned();
        Ok(notes)
    }

    fn end_of_orphaned(&mut self) {
        while let Some((block, next)) = self.orphaned.last()
            && *next >= block.view().nritems()
        {
            self.orphaned.pop();
        }
        // The block at which this began has the flag now, so the answer about it is final.
        self.independent = self.orphaned.is_empty();
    }

    fn advance_orphaned(
        &mut self,
        core: &Core,
        h: &Handle<'_>,
        known: &mut KnownRefs,
    ) -> Result<u64> {
        let (block, next) = self.orphaned.last_mut().expect("the list is not empty");
        let ptr = child_pointer(block, *next);
        let child = if ptr.generation > self.born {
            Some(core.store.get(&ptr, self.tree)?).filter(|c| c.view().owner() == self.tree)
        } else {
            None
        };
        *next += 1;
        match child {
            Some(child) => self.make_independent(core, h, known, child),
            None => {
                self.end_of_orphaned();
                Ok(0)
            }
        }
    }
}

/// Notes that a subvolume is deleted. Nothing in it changes from now on. It is dropped once that is
/// durable.
pub(crate) fn kill(core: &Core, h: &mut Handle<'_>, subvol: &Arc<Subvolume>) {
    h.noted_for_root_tree(4);
    subvol.set_dead();
    h.txn.roots.lock().root(subvol).deleted = true;
    core.drops.add(DeadTree::Subvolume(subvol.id), h.generation());
}
