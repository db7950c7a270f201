//! Writing the log: `fsync` without a commit.
//!
//! A log says how a subvolume differs, for the inodes that were fsynced, from what the last commit
//! left. Larder has both sides at hand as versions — the tree as it was sealed last, and the tree
//! as it is — so what has to be logged is their *difference*, looked up when somebody asks for it.
//! Operations leave next to no history behind for the log, and none ever edits it.
//!
//! | module | decision it hides |
//! |---|---|
//! | `collect` | what is logged of an inode's content, in the caller, in parallel |
//! | `names` | what has to be logged along with an inode, so that its names come out right |
//! | `above` | when what leads to a subvolume needs a commit |
//! | `diff` | how two versions of a tree are compared without looking at what they share |
//! | `tree` | how logged items lie in nodes, and which of them are written anew |
//! | `blocks` | where those nodes lie |
//! | `content` | what the log of a transaction has, and how contributions come into it |
//! | `queue` | who waits for which part of it, and who hears when that is settled |
//! | `older` | what benchmarks may switch back to what Linux once did |
//! | `batch` | who writes the log, for whom, and when it is durable |
//!
//! # One `fsync`
//!
//! The caller writes the inode's delayed data back, takes both versions, and collects what its
//! content needs. Then it joins the batch of its transaction and waits. One of those who wait is
//! the *leader*: it takes everything that has gathered, works out the names over one version of the
//! tree, edits the log, writes the nodes, and makes them durable with a superblock that is the last
//! published one plus the log. While it waits for the device, the next batch gathers, and its nodes
//! are written before the flush that makes this batch's superblock durable: one flush serves both.
//!
//! # Names
//!
//! A logged inode has all its references in the log, and a new name that the last commit gave to
//! somebody else takes it from them; so does a range of deletion in a directory. Whoever loses a
//! name this way must not be lost with it: it is logged, too, with the names that it has now (see
//! [`names`]).
//!
//! # What a log cannot say
//!
//! Subvolumes that the last commit does not have or has elsewhere, entries of subvolumes, data or
//! nodes in chunks that it does not have, features that its superblock lacks: then `fsync` commits,
//! and so does everybody until that commit ([`Cause`] counts them). A transaction that is sealed
//! takes no more batches: who comes too late waits for its commit.

mod above;
mod batch;
mod blocks;
mod collect;
mod content;
mod diff;
mod names;
mod older;
mod queue;
mod tree;

#[cfg(test)]
pub(crate) use batch::lead_after_giving_up;
pub use batch::{OnSynced, Synced, Unlogged};
pub(crate) use batch::{TxnLog, sync, sync_then};

use crate::engine::fsyncs::Cause;
use crate::error::Error;

/// Why something was not logged.
#[derive(Debug)]
pub(super) enum Stop {
    /// A commit can do it.
    Commit(Cause),
    /// The transaction is sealed: its commit is on its way.
    Sealed,
    /// It cannot be done.
    Fail(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Self::Fail(e)
    }
}

type Result<T, E = Stop> = std::result::Result<T, E>;
