//! Moving blocks that trees share: each is copied once, however many trees have it.
//!
//! Sharing is a graph without cycles. The root of a tree is its own; somewhere below, paths meet in
//! shared blocks. A [`Region`] has the shared blocks that are to move, and all shared blocks above
//! them. Its *tops* are those to which a private block of some tree points.
//!
//! 1. Each block of the region is copied, children first. The copies point to each other, and are
//!    written at once. Each refers itself to what it points to (FULL_BACKREF).
//! 2. In each tree, the pointer to a top is replaced by one to its copy, if it is still there.
//! 3. The tree lets go of the old top. The last one frees it, and what only it had below it.
//!
//! All of that is one transaction, in which no snapshot is made. Nothing of it has to be undone
//! after a crash. A pointer that is not replaced, because the tree has changed meanwhile, leaves
//! both blocks where they are, and a later pass finds what is left.
//!
//! A block that stays, and that belongs to a tree which no longer goes through it, must not rely on
//! that tree. So it is made to refer to its children itself, as when a tree is dropped. The tree
//! that owns a top lets go of it last, which nearly always makes that unnecessary.

use super::survey::{Above, Block, Owner, Survey, references_of};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Result};
use crate::space::Run;
use crate::transaction::Handle;
use crate::transaction::sharing::{KnownRefs, Released};
use crate::transaction::writeout;
use crate::tree::{EditStop, Need, Node, Places, child_pointer, relocated};
use larder_format::items::ExtentRef;
use larder_format::node::FLAG_RELOC;
use larder_format::{Generation, Key, Logical, TreeId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Region {
    blocks: HashMap<Logical, Arc<Block>>,
    /// Pointers to replace: the tree and the top.
    swaps: Vec<(TreeId, Logical)>,
    /// Private blocks that have these pointers.
    parents: HashSet<Logical>,
    /// To how many blocks and extents its blocks refer.
    references: usize,
}

impl Region {
    /// Adds a shared block and all shared blocks above it.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn add(&mut self, survey: &mut Survey<'_>, at: Logical) -> Result<()> {
        let mut todo = vec![at];
        while let Some(at) = todo.pop() {
            if self.blocks.contains_key(&at) {
                continue;
            }
            let Some(block) = survey.block(at)? else { continue };
            for above in &block.above {
                match *above {
                    Above::Tree(tree) => self.swaps.push((tree, at)),
                    Above::Block(parent) => match survey.owner(parent)? {
                        Owner::Private(tree) => {
                            self.swaps.push((tree, at));
                            self.parents.insert(parent);
                        }
                        Owner::Shared => todo.push(parent),
                        Owner::Global(_) | Owner::Dying => {}
                    },
                    Above::Global(_) | Above::Dying => {}
                }
            }
            self.references += references_of(&block.node);
            self.blocks.insert(at, block);
        }
        Ok(())
    }

    /// How many blocks there are.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Adds the trees in which pointers are to be replaced, and the blocks of which they need
    /// copies of their own for that.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn ways_up(
        &self,
        survey: &mut Survey<'_>,
        trees: &mut HashSet<TreeId>,
        blocks: &mut HashSet<Logical>,
    ) -> Result<()> {
        trees.extend(self.swaps.iter().map(|(tree, _)| *tree));
        self.parents.iter().try_for_each(|parent| survey.way_up(*parent, blocks))
    }

    /// About how many notes it takes.
    pub(super) fn notes(&self) -> usize {
        2 * (self.references + self.blocks.len()) + 4 * self.swaps.len()
    }

    /// Leaves out what no tree will reach: a tree that is being dropped keeps its blocks.
    fn keep_reachable(&mut self) {
        let mut reached = HashSet::new();
        let mut todo: Vec<Logical> = self.swaps.iter().map(|s| s.1).collect();
        while let Some(at) = todo.pop() {
            let Some(block) = self.blocks.get(&at).filter(|_| reached.insert(at)) else { continue };
            if block.node.level() > 0 {
                let pointers = block.node.view().pointers();
                todo.extend(pointers.iter().map(|p| Logical(p.blockptr.get())));
            }
        }
        self.blocks.retain(|at, _| reached.contains(at));
    }

    /// Carries it out. `data` says where data extents lie now. Returns how many pointers were
    /// replaced.
    ///
    /// # Errors
    /// Reading, corruption, no space; the device. What was done up to there is consistent.
    pub(super) fn carry_out(
        mut self,
        core: &Core,
        h: &mut Handle<'_>,
        data: HashMap<Logical, Logical>,
    ) -> Result<usize> {
        self.keep_reachable();
        if self.blocks.is_empty() {
            return Ok(0);
        }
        let copies = self.copy(core, h, data)?;
        let mut work = Work { core, known: KnownRefs::default(), region: &self.blocks, notes: 0 };
        let (replaced, refused) = match work.change_all(h, &self.swaps, &copies) {
            Ok(done) => done,
            Err(e) => {
                // Half of it must not become durable.
                core.txns.fail(&format!("a relocation failed half-way: {e}"));
                return Err(e);
            }
        };
        h.noted_refs(work.notes);
        refused.map_or(Ok(replaced), Err)
    }

    /// Writes the copies. Returns them by the address of what they are copies of.
    fn copy(
        &self,
        core: &Core,
        h: &mut Handle<'_>,
        data: HashMap<Logical, Logical>,
    ) -> Result<HashMap<Logical, Node>> {
        let mut taken = Vec::with_capacity(self.blocks.len());
        let copied = self.copy_to(core, h, data, &mut taken);
        if copied.is_err() {
            let nodesize = u64::from(core.nodesize());
            taken.iter().for_each(|at| core.space.give_back(Run::new(*at, nodesize), None));
        }
        copied
    }

    fn copy_to(
        &self,
        core: &Core,
        h: &mut Handle<'_>,
        data: HashMap<Logical, Logical>,
        taken: &mut Vec<Logical>,
    ) -> Result<HashMap<Logical, Node>> {
        // Children first, and in the order of keys, so that neighbours become neighbours.
        let mut order: Vec<(u8, Option<Key>, Logical)> = Vec::with_capacity(self.blocks.len());
        order.extend(self.blocks.iter().map(|(at, b)| (b.node.level(), b.node.first_key(), *at)));
        order.sort_unstable();
        let mut places = Places { blocks: HashMap::new(), data };
        let mut copies = Vec::with_capacity(order.len());
        let unmarked = fault!(core.options.tuning, RelocationUnmarked);
        let flag = if unmarked { 0 } else { FLAG_RELOC };
        for (_, _, old) in order {
            let at = h.take_block()?;
            taken.push(at);
            let (buffer, generation) = (core.store.buffer(), h.generation());
            let (node, fsid) = (&self.blocks[&old].node, core.store.format().fsid);
            let copy = relocated(node, buffer, fsid, at, generation, &places, flag)?;
            places.blocks.insert(old, at);
            copies.push((old, copy));
        }
        copies.sort_by_key(|(_, copy)| copy.address());
        let (old, nodes): (Vec<_>, Vec<_>) = copies.into_iter().unzip();
        writeout::write_shared(core, h.generation(), &nodes)?;
        Ok(old.into_iter().zip(nodes).collect())
    }
}

/// What replacing pointers has at hand.
struct Work<'a> {
    core: &'a Core,
    known: KnownRefs,
    region: &'a HashMap<Logical, Arc<Block>>,
    notes: u64,
}

impl Work<'_> {
    /// Notes the copies, and replaces the pointers. Returns how many were replaced, and why it went
    /// no further.
    fn change_all(
        &mut self,
        h: &mut Handle<'_>,
        swaps: &[(TreeId, Logical)],
        copies: &HashMap<Logical, Node>,
    ) -> Result<(usize, Option<Error>)> {
        // Children first: a copy is created before anything refers to it.
        let mut created: Vec<&Node> = copies.values().collect();
        created.sort_unstable_by_key(|copy| (copy.level(), copy.address()));
        for copy in created {
            self.notes += self.core.note_relocated(&h.txn, copy)?;
        }
        let owns = |tree: TreeId, top| self.region[&top].node.view().owner() == tree;
        let mut swaps: Vec<_> = swaps.iter().map(|(t, top)| (owns(*t, *top), *t, *top)).collect();
        swaps.sort_unstable();
        swaps.dedup();
        // All at first: a copy that one tree does not take must not lose its last reference while
        // others still will take it.
        for (_, tree, top) in &swaps {
            let copy = &copies[top];
            self.core.note_pointed_to(&h.txn, *tree, (copy.address(), copy.level()))?;
            self.notes += 1;
        }
        let (mut replaced, mut refused) = (0, None);
        for (_, tree, top) in swaps {
            let (copy, level) = (copies[&top].address(), copies[&top].level());
            let done = match refused {
                None => self.replace(h, tree, top, copy),
                Some(_) => Ok(false),
            };
            let reference = ExtentRef::TreeBlock { root: tree };
            match done {
                Ok(true) if fault!(self.core.options.tuning, RelocationKeepsOld) => replaced += 1,
                Ok(true) => {
                    replaced += 1;
                    self.let_go(h, (top, level, None), reference, tree, true)?;
                }
                Ok(false) => self.let_go(h, (copy, level, None), reference, tree, false)?,
                Err(e) => {
                    refused = Some(e);
                    self.let_go(h, (copy, level, None), reference, tree, false)?;
                }
            }
        }
        Ok((replaced, refused))
    }

    fn replace(
        &self,
        h: &mut Handle<'_>,
        tree: TreeId,
        top: Logical,
        copy: Logical,
    ) -> Result<bool> {
        let subvol: Arc<Subvolume> = match self.core.subvol(tree) {
            Ok(subvol) => subvol,
            Err(Error::NotFound) => return Ok(false),
            Err(e) => return Err(e),
        };
        // Who changes extents of a file takes the places of its data from a leaf. They must not
        // change before it is done.
        let beside = fault!(self.core.options.tuning, RelocationBesideEdits);
        let alone = (!beside).then(|| subvol.replace_blocks());
        let done = h.repoint(&subvol, &self.region[&top].on_path(), copy);
        if alone.is_none() {
            subvol.note_move();
        }
        match done {
            // It was deleted in this moment.
            Err(Error::NotFound) => Ok(false),
            done => done,
        }
    }

    /// Takes a reference away from a block. With the last one the block is freed, and lets go of
    /// what it points to. The block is given by its address, its level, and the transaction that
    /// wrote it if that is known. `left`: `tree` went through the block, and no longer does.
    fn let_go(
        &mut self,
        h: &Handle<'_>,
        (at, level, written): (Logical, u8, Option<Generation>),
        reference: ExtentRef,
        tree: TreeId,
        left: bool,
    ) -> Result<()> {
        let old = self.region.get(&at).filter(|_| left).map(|b| b.node.clone());
        let mut owned = Some(old.as_ref().is_some_and(|n| n.view().owner() == tree));
        loop {
            self.notes += 1;
            let core = self.core;
            match core.note_released(&h.txn, &self.known, (at, level), reference, owned) {
                Ok(Released::Shared) => return Ok(()),
                Ok(Released::Last { full }) => {
                    let node = match old {
                        Some(node) => node,
                        None => core.store.at_address(at, written)?,
                    };
                    self.free(h, &node, full, reference, tree, left)?;
                    return Ok(());
                }
                Ok(Released::Orphaned) => {
                    let node = old.clone().expect("only blocks of the region are owned");
                    self.make_independent(h, &node, tree)?;
                    owned = Some(false);
                }
                Ok(Released::WhoOwns) => unreachable!("the caller says what the tree owns"),
                Err(stop) => self.provide(stop)?,
            }
        }
    }

    fn free(
        &mut self,
        h: &Handle<'_>,
        node: &Node,
        full: bool,
        reference: ExtentRef,
        tree: TreeId,
        left: bool,
    ) -> Result<()> {
        let below = match full {
            true => ExtentRef::SharedBlock { parent: node.address() },
            false => ExtentRef::TreeBlock { root: tree },
        };
        if node.level() > 0 {
            for slot in 0..node.view().nritems() {
                let ptr = child_pointer(node, slot);
                let block = (ptr.at, ptr.level, Some(ptr.generation));
                self.let_go(h, block, below, tree, left)?;
            }
        }
        self.notes += self.core.note_freed(&h.txn, tree, node, full, reference)?;
        Ok(())
    }

    /// Makes a block refer to its children itself, and so the blocks of the region below it that
    /// belong to the same tree.
    fn make_independent(&mut self, h: &Handle<'_>, node: &Node, tree: TreeId) -> Result<()> {
        self.notes += loop {
            match self.core.note_orphaned(&h.txn, &self.known, tree, node) {
                Ok(notes) => break notes,
                Err(stop) => self.provide(stop)?,
            }
        };
        if node.level() == 0 {
            return Ok(());
        }
        for pointer in node.view().pointers() {
            let child = self.region.get(&Logical(pointer.blockptr.get()));
            if let Some(child) = child.filter(|c| c.node.view().owner() == tree) {
                let child = child.node.clone();
                self.make_independent(h, &child, tree)?;
            }
        }
        Ok(())
    }

    fn provide(&mut self, stop: EditStop) -> Result<()> {
        match stop {
            EditStop::Need(Need::Refs(at, level)) => {
                self.core.learn_refs(&mut self.known, at, level)
            }
            EditStop::Need(_) => unreachable!("only reference counts are missing here"),
            EditStop::Fail(e) => Err(e),
        }
    }
}
