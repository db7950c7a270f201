//! What a seal and a commit need from the layer above, which knows files.
//!
//! The committer brings trees and space to the device and knows nothing else. It asks
//! [`CommitSource`] for the rest. The engine implements this trait and is set once, when the file
//! system is opened. What the engine gathers for a transaction lies in the transaction
//! ([`crate::transaction::Gathered`]).

use crate::error::Result;
use crate::space::Pinned;
use crate::transaction::Txn;
use larder_format::Generation;
use larder_format::items::RootItem;
use std::fmt::Debug;
use std::sync::Arc;

/// The layer above, as the committer sees it.
pub(crate) trait CommitSource: Debug + Send + Sync {
    /// The running transaction will be sealed soon. Does what can be done while operations go on.
    fn before_seal(&self);
    /// All operations have left `txn`. Brings into the subvolumes' trees what was left to the seal.
    ///
    /// # Errors
    /// Those after which the transaction must not be committed.
    fn seal(&self, txn: &Arc<Txn>) -> Result<()>;
    /// The ROOT_ITEM of the top-level subvolume, if that is in memory.
    fn top_level_item(&self) -> Option<RootItem>;
    /// The superblock of `txn` is durable. Returns the space that is no longer needed because of
    /// that.
    ///
    /// # Errors
    /// Broken accounts.
    fn superblock_durable(&self, txn: &Txn) -> Result<Pinned>;
    /// The transaction is about to be published. No thread that waits for it goes on before this
    /// returns.
    fn publishing(&self, generation: Generation);
}
