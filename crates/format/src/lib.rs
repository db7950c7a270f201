//! The btrfs on-disk format as Rust types.
//!
//! Bytes in, types out, and back. Nothing here does I/O, reads a clock, takes a lock or keeps
//! state, so that everything in it can be tested with plain byte slices and fuzzed without a
//! device. Bytes are hostile until checked: every parser returns [`FormatError`] instead of
//! panicking, whatever it is fed.
//!
//! Facts come from the public format documentation and from images made by Linux; `docs/FORMAT.md`
//! says which from where.

pub mod acl;
pub mod check;
pub mod csum;
pub mod dev_item;
pub mod failed;
pub mod features;
pub mod history;
pub mod ids;
pub mod items;
pub mod key;
pub mod node;
pub mod superblock;

pub use csum::{Checksum, CsumType};
pub use dev_item::DevItem;
pub use features::{CompatRo, Incompat, SuperFlags};
pub use history::HistoryId;
pub use ids::*;
pub use key::{DiskKey, Key, KeyType};
pub use superblock::{BackupRoot, MetadataDump, Superblock, Support};

/// Bytes that are not what the format says they should be.
///
/// It names what is wrong; *where* (address, tree, slot) is known to the caller, who adds it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatError(pub String);

impl FormatError {
    /// A format error with the given description.
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// Result of parsing bytes.
pub type FormatResult<T> = Result<T, FormatError>;
