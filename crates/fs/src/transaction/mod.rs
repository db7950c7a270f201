//! Transactions: *running → sealed → written → published*, at most one sealed.
//!
//! Operations join the running transaction with a [`Handle`] and edit **subvolume trees only**.
//! What they mean for the global trees — extent references, data checksums, new chunks, inode items
//! — is noted in the transaction ([`running::Txn`]). A seal waits until no handle is left, writes
//! the noted inode items into the subvolume trees, takes their roots, and starts the next
//! transaction. From then on one thread, the committer, brings the global trees to their common
//! fixpoint ([`commit`]), makes all new nodes and then the superblocks durable, and publishes.
//! `docs/TRANSACTIONS.md` has each step.
//!
//! Operations see reference counts of the last published extent tree, plus the notes of the sealed
//! and of the running transaction ([`manager::RefsView`]). They never look at the committer's
//! half-edited extent tree.
//!
//! Invariants (numbers as in `ARCHITECTURE.md`): 1 a superblock is written only when all it reaches
//! is durable; 2 nothing reachable from the last durable superblock is overwritten; 4 superblocks
//! are written by one thread, in order; 8 an operation reserves before it joins, so nothing that a
//! seal waits for can wait for a commit; 9 a failed metadata write or flush ends writing for good.

mod above;
mod barrier;
pub(crate) mod commit;
pub(crate) mod early_flush;
mod ground;
pub(crate) mod handle;
pub(crate) mod manager;
mod replacement;
mod root_item;
mod root_notes;
pub(crate) mod running;
pub(crate) mod sharing;
mod subvolume_tree;
mod superblocks;
pub(crate) mod writeout;

pub(crate) use above::CommitSource;
pub(crate) use ground::{Ground, SuperblockWritten};
pub(crate) use handle::{BlocksAndNotes, Handle};
pub(crate) use manager::Transactions;
pub(crate) use replacement::{Replacement, Target};
pub(crate) use root_item::{find_root, parse_item, parse_root_item, root_pointer};
pub use root_notes::Received;
pub(crate) use root_notes::{DeadTree, Link, Progress, RootNotes};
pub(crate) use running::{Gathered, GlobalMove, Txn};
pub(crate) use subvolume_tree::SubvolumeTree;
pub(crate) use superblocks::Superblocks;
