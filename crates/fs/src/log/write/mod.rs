//! Writing the log: `fsync` without a commit.
//!
//! A log says, for the inodes that were fsynced, how a subvolume differs from the last commit.
//! Larder has both sides as versions: the tree as it was last sealed, and the tree as it is. So
//! what has to be logged is their *difference*, which is worked out when an `fsync` needs it.
//! Operations leave almost no history for the log, and never edit it.
//!
//! | module | decision it hides |
//! |---|---|
//! | `sync` | what an `fsync` has to wait for, and that no thread does |
//! | `contribute` | which changes of an inode are in which log, and which only a commit has |
//! | `collect` | what is logged of an inode's content, in the caller, in parallel |
//! | `names` | what has to be logged together with an inode, so that its names come out right |
//! | `above` | when what leads to a subvolume needs a commit |
//! | `diff` | how two versions of a tree are compared without looking at what they share |
//! | `tree` | how logged items lie in nodes, and which of them are written again |
//! | `blocks` | where those nodes lie |
//! | `content` | what the log of a transaction has, and how contributions come into it |
//! | `queue` | which callers wait for which ticket, and how they learn that it is settled |
//! | `older` | what benchmarks may switch back to what Linux once did |
//! | `batch` | how one leader writes the log for all callers, and when it is durable |
//!
//! The caller writes the inode's delayed data back, takes both versions, collects what the inode's
//! content needs, and joins the batch of its transaction. One of the callers is the *leader*. It
//! takes all contributions, works out the names, edits the log, writes the nodes, and makes them
//! durable with the last published superblock plus the log. `docs/LOG.md` describes this step by
//! step, and says when `fsync` has to commit ([`Cause`] counts the reasons).

mod above;
mod batch;
mod blocks;
mod collect;
mod content;
mod contribute;
mod diff;
mod names;
mod older;
mod queue;
mod sync;
mod tree;

pub(crate) use batch::TxnLog;
#[cfg(test)]
pub(crate) use batch::lead_after_giving_up;
pub(crate) use sync::sync;

use crate::engine::fsyncs::Cause;
use crate::error::Error;

/// Why something was not logged.
#[derive(Debug)]
pub(super) enum NotLogged {
    /// A commit can do it.
    Commit(Cause),
    /// The transaction is sealed: its commit is on its way.
    Sealed,
    /// It cannot be done at all.
    Fail(Error),
}

impl From<Error> for NotLogged {
    fn from(e: Error) -> Self {
        Self::Fail(e)
    }
}

type Result<T, E = NotLogged> = std::result::Result<T, E>;
