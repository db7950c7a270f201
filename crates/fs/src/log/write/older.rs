//! How logging goes, as far as benchmarks choose.
//!
//! [`crate::tuning::older`] says what the values mean, and why they are there. This module does
//! what each of them asks for; `batch` and `content` only call it.

use super::Result;
use super::batch::TxnLog;
use super::collect::{Contribution, Pair};
use crate::engine::{Core, Inode};
use crate::transaction::Txn;
use crate::tuning::older::{LogCopies, LogEntry, LogStart};
use std::sync::Arc;

impl LogStart {
    /// Waits until something may be logged.
    ///
    /// # Errors
    /// `WouldBlock`; `ReadOnly` when writing has ended.
    pub(super) fn wait(self, core: &Core) -> crate::error::Result<()> {
        let sealed = match self {
            Self::AtOnce => None,
            Self::AfterCommit => core.txns.with_view(|v| v.sealed.as_ref().map(|t| t.generation)),
        };
        sealed.map_or(Ok(()), |sealed| core.txns.wait(sealed))
    }
}

impl LogCopies {
    /// Copies what an inode has in the tree of its subvolume.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn copy(self, inode: &Inode, txn: &Txn, versions: &Pair) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Locked => versions.copy_leaves_locked(inode, txn.generation),
        }
    }
}

impl LogEntry {
    /// Brings a contribution to the log of its transaction. Returns its ticket; `None` where the
    /// transaction is sealed or the log was given up.
    ///
    /// # Errors
    /// As for [`super::content::Content::take_in`].
    pub(super) fn bring(
        self,
        core: &Core,
        txn: &Arc<Txn>,
        contribution: Contribution,
    ) -> Result<Option<u64>> {
        match self {
            Self::Batched => Ok(TxnLog::of(txn).add(contribution)),
            Self::Alone => TxnLog::of(txn).add_alone(core, txn, contribution),
        }
    }

    /// Are checksums deleted from the log before others are put there that cannot overlap them?
    pub(super) fn deletes_sums_first(self) -> bool {
        self == Self::Alone
    }
}
