//! How the committer edits the global trees: where their blocks come from, and the trees as the
//! logic of items wants to see them.
//!
//! References of these trees' own blocks are noted in the committer, not in the transaction,
//! because they are applied in the same commit.

use super::Committer;
use crate::error::{Error, Result};
use crate::tree::{BlockSource, EditStop, Need, Node, Tree, TreeOps, Version};
use larder_format::items::ExtentRef;
use larder_format::{Generation, Key, Logical, ObjectId, TreeId};
use std::sync::Arc;

impl<'a> Committer<'a> {
    /// A global tree, to be edited by this commit.
    pub(super) fn ops<'c>(&'c mut self, tree: &'c Tree) -> Ops<'c, 'a> {
        let system = tree.id() == ObjectId::CHUNK_TREE;
        Ops { tree, source: Source { committer: self, system } }
    }
}

/// The committer as the source of blocks for one of the global trees.
pub(super) struct Source<'c, 'a> {
    committer: &'c mut Committer<'a>,
    system: bool,
}

impl Source<'_, '_> {
    /// Addresses at hand.
    fn preallocated(&mut self) -> &mut Vec<Logical> {
        let c = &mut *self.committer;
        if self.system { &mut c.system_preallocated } else { &mut c.preallocated }
    }
}

impl BlockSource for Source<'_, '_> {
    fn generation(&self) -> Generation {
        self.committer.txn.generation
    }
    fn published(&self) -> Generation {
        self.committer.ground.published_hint()
    }
    fn available(&self) -> usize {
        let c = &*self.committer;
        if self.system { c.system_preallocated.len() } else { c.preallocated.len() }
    }
    fn take(&mut self) -> Logical {
        self.preallocated().pop().expect("the edit asked for addresses first")
    }
    fn untake(&mut self, at: Logical) {
        self.preallocated().push(at);
    }
    fn buffer(&mut self) -> Arc<[u8]> {
        self.committer.ground.store.buffer()
    }
    fn created(&mut self, tree: TreeId, at: Logical, level: u8, first_key: Key) {
        let nodesize = self.committer.ground.nodesize();
        let generation = self.committer.txn.generation;
        let done = self.committer.pending.create_tree_block(
            at,
            nodesize,
            level,
            tree,
            generation,
            Some(first_key),
        );
        self.committer.ground.noted(done);
    }
    fn copied(
        &mut self,
        tree: TreeId,
        old: &Node,
        new: Logical,
        maybe_shared: bool,
    ) -> Result<(), EditStop> {
        debug_assert!(!maybe_shared, "global trees are never shared");
        self.created(tree, new, old.level(), old.first_key().unwrap_or_default());
        let nodesize = self.committer.ground.nodesize();
        let mine = ExtentRef::TreeBlock { root: tree };
        self.committer.pending.drop_tree_block(old.address(), nodesize, old.level(), mine)?;
        Ok(())
    }
    fn snapshot(&mut self, _: TreeId, _: &Node, _: Logical) -> Result<(), EditStop> {
        unreachable!("only subvolumes have snapshots")
    }
    fn dropped(&mut self, tree: TreeId, at: Logical, level: u8) {
        // This commit made the block, no item has it and nothing uses it, so it is taken again.
        // Deleting checksums makes and drops a leaf with every extent, and a full disk does not
        // have that many.
        if self.committer.pending.forget_created(at) {
            return self.untake(at);
        }
        let nodesize = self.committer.ground.nodesize();
        let mine = ExtentRef::TreeBlock { root: tree };
        let done = self.committer.pending.drop_tree_block(at, nodesize, level, mine);
        self.committer.ground.noted(done);
    }
    fn half_done(&mut self, _: &Error) {
        // The error ends the commit.
    }
    fn provide(&mut self, need: &Need) -> Result<()> {
        let Need::Blocks(wanted) = *need else {
            unreachable!("the tree reads nodes itself, and global trees are never shared")
        };
        let system = self.system;
        let c = &mut *self.committer;
        let (preallocated, from) = if system {
            (&mut c.system_preallocated, &mut c.system_reserve)
        } else {
            (&mut c.preallocated, &mut c.reserve)
        };
        let mut more = Vec::new();
        while preallocated.len() + more.len() < wanted {
            more.push(c.ground.space.allocate_for_commit(&*c.txn, system, from)?);
        }
        // Addresses are taken from the end, so this order keeps them rising.
        more.reverse();
        more.append(preallocated);
        *preallocated = more;
        Ok(())
    }
}

/// A global tree with the committer behind it, as the logic of items wants to see it.
pub(super) struct Ops<'c, 'a> {
    tree: &'c Tree,
    pub(super) source: Source<'c, 'a>,
}

impl Ops<'_, '_> {
    fn version(&self) -> Version {
        self.tree.version(self.source.committer.ground.epochs.enter())
    }
}

impl TreeOps for Ops<'_, '_> {
    fn max_item_size(&self) -> usize {
        larder_format::node::max_item_size(self.source.committer.ground.nodesize())
    }
    fn get(&mut self, key: &Key) -> Result<Option<Vec<u8>>> {
        Ok(self.version().get(key)?.map(|i| i.data().to_vec()))
    }
    fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.version().at_or_before(key)?.map(|i| (i.key, i.data().to_vec())))
    }
    fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.version().at_or_after(key)?.map(|i| (i.key, i.data().to_vec())))
    }
    fn insert(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.tree.edit(&mut self.source, &[*key], |e| e.insert(key, data))
    }
    fn update(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.tree.edit(&mut self.source, &[*key], |e| e.update(key, data))
    }
    fn delete(&mut self, key: &Key) -> Result<()> {
        self.tree.edit(&mut self.source, &[*key], |e| e.delete(key))
    }
}
