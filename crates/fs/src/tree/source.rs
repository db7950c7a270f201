//! Where a tree's blocks come from: what an edit asks of space, and what it may lack.
//!
//! A tree knows nothing of space but [`BlockSource`]: addresses for new blocks, and a place to
//! report blocks that come and go. An edit holds the tree's lock, so it cannot wait. If it lacks
//! something it stops with an [`EditStop`]. The lock is then dropped, the source provides the
//! [`Need`], and the edit starts over.

use crate::error::{Error, Result};
use crate::tree::node::Node;
use crate::tree::store::Pointer;
use larder_format::{Generation, Key, Logical, TreeId};
use std::sync::Arc;

/// What an attempt to edit lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A clean node that is not in memory.
    Node(Pointer),
    /// The committed reference count of a block.
    Refs(Logical, u8),
    /// This many addresses for new blocks.
    Blocks(usize),
    /// The transaction's notes. Another thread has locked them for longer than a moment, so it has
    /// probably lost its processor.
    Notes,
}

/// Why an attempt stopped.
#[derive(Debug)]
pub(crate) enum EditStop {
    /// Something has to be fetched without the lock.
    Need(Need),
    /// It cannot be done.
    Fail(Error),
}
impl From<Error> for EditStop {
    fn from(e: Error) -> Self {
        Self::Fail(e)
    }
}
impl EditStop {
    /// What has to be fetched.
    ///
    /// # Errors
    /// The one with which the edit failed.
    pub(super) fn need(self) -> Result<Need> {
        match self {
            Self::Need(need) => Ok(need),
            Self::Fail(e) => Err(e),
        }
    }
}

/// What a tree needs of space: new addresses, and a place to report blocks that come and go.
///
/// The methods other than `provide` are called with a tree's lock held. They must not wait.
pub(crate) trait BlockSource {
    /// The transaction that edits.
    fn generation(&self) -> Generation;
    /// The last published transaction.
    fn published(&self) -> Generation;
    /// Addresses at hand.
    fn available(&self) -> usize;
    /// Takes an address. The caller has asked `available`, so there is one.
    fn take(&mut self) -> Logical;
    /// Gives an unused address back.
    fn untake(&mut self, at: Logical);
    /// A buffer for a node.
    fn buffer(&mut self) -> Arc<[u8]>;
    /// A new block of `tree`.
    fn created(&mut self, tree: TreeId, at: Logical, level: u8, first_key: Key);
    /// `tree` has copied `old` to `new` and no longer uses `old`. `maybe_shared`: another tree may
    /// use `old`, so its reference count has to be looked at.
    fn copied(
        &mut self,
        tree: TreeId,
        old: &Node,
        new: Logical,
        maybe_shared: bool,
    ) -> Result<(), EditStop>;
    /// `snapshot` is about to begin with the block `new`, a copy of `root`. `root` stays, so all
    /// that it points to has two users from now on.
    fn snapshot(&mut self, snapshot: TreeId, root: &Node, new: Logical) -> Result<(), EditStop>;
    /// `tree` no longer uses a block that it made in this transaction.
    fn dropped(&mut self, tree: TreeId, at: Logical, level: u8);
    /// An edit failed after it had made some of its changes. Those stay in the tree.
    fn half_done(&mut self, error: &Error);
    /// Fetches what was missing. Called without any lock; may wait.
    fn provide(&mut self, need: &Need) -> Result<()>;
}

/// Addresses that `growing` insertions or enlargements can need beyond the copies of their paths,
/// in a tree whose root has this level. A leaf becomes three, every level above splits, and a root
/// is added. An edit in which nothing grows may need one, for the root of a tree that becomes
/// empty.
pub(crate) fn blocks_for_splits(growing: usize, level: u8) -> usize {
    growing * (2 + usize::from(level)) + growing / 16 + if growing > 0 { 3 } else { 1 }
}
