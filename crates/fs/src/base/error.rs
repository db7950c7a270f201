//! The one error type of the engine, with the context that a person needs.
//!
//! `errno` is not here: only the FUSE crate translates.

use larder_format::{DeviceId, Key, Logical, ObjectId};
use larder_volume::VolumeError;

/// Result of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the engine can answer instead of a result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Bytes on the device are not what they must be.
    #[error("corrupt file system: {place}: {what}")]
    Corrupt {
        /// Where: tree, address, key, as far as they are known.
        place: Place,
        /// What is wrong.
        what: String,
    },
    /// A device failed, or an address leads nowhere.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The file system cannot be opened this way.
    #[error("{0}")]
    Unsupported(String),
    /// The file system has turned read-only because of an earlier failure, or was opened so.
    #[error("file system is read-only{}", .0.as_deref().map(|w| format!(": \
        {w}")).unwrap_or_default())]
    ReadOnly(Option<String>),
    /// No such entry, inode, xattr or subvolume.
    #[error("no such file or directory")]
    NotFound,
    /// There is no such extended attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// The name is taken.
    #[error("file exists")]
    Exists,
    /// A directory was needed.
    #[error("not a directory")]
    NotDirectory,
    /// Anything but a directory was needed.
    #[error("is a directory")]
    IsDirectory,
    /// The directory has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// No space for data or metadata.
    #[error("no space left")]
    NoSpace,
    /// What is stored would not fit on the devices as they are to be.
    #[error("{0}")]
    DoesNotFit(String),
    /// Link count or hash bucket is full.
    #[error("too many links")]
    TooManyLinks,
    /// Name longer than 255 bytes.
    #[error("name too long")]
    NameTooLong,
    /// A value that the format cannot hold (bucket of colliding names full, …).
    #[error("value too large")]
    Overflow,
    /// xattr value larger than an item.
    #[error("attribute too large")]
    TooBig,
    /// File size beyond what the format or the interface can express.
    #[error("file too large")]
    FileTooBig,
    /// Bad argument.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// The operation would cross from one subvolume to another.
    #[error("crosses a subvolume border")]
    CrossSubvolume,
    /// Not permitted for this object, whatever the caller's rights (immutable flag, subvolume root,
    /// …).
    #[error("operation not permitted: {0}")]
    NotPermitted(&'static str),
    /// The subvolume is read-only.
    #[error("subvolume is read-only")]
    SubvolumeReadOnly,
    /// Not supported by this engine or not for this object.
    #[error("operation not supported: {0}")]
    NotSupported(&'static str),
    /// The object is in use in a way that forbids this.
    #[error("busy: {0}")]
    Busy(&'static str),
    /// What a block group holds does not move: it is changed again and again while it is moved, or
    /// something uses it that is not known.
    #[error(
        "block group {group} still holds {left} bytes that could not be moved; try again when \
        less is written, and let larder check look at the file system if that does not help"
    )]
    NotEmptied {
        /// The group.
        group: Logical,
        /// Bytes that it holds.
        left: u64,
    },
    /// An earlier write of this inode's data failed, and it has not been written again.
    #[error("an earlier write of this file's data failed")]
    DataLost,
    /// The call would have to wait, and the caller said that it must not (see
    /// [`crate::api::no_wait`]). Nothing has been changed. The caller may call again on a thread
    /// that may wait.
    #[error("would block")]
    WouldBlock,
}

/// Where something corrupt was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Tree, by id.
    pub tree: Option<ObjectId>,
    /// Logical address of the block.
    pub address: Option<Logical>,
    /// Key of the item.
    pub key: Option<Key>,
    /// Device.
    pub device: Option<DeviceId>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sep = "";
        if let Some(t) = self.tree {
            write!(f, "tree {t}")?;
            sep = ", ";
        }
        if let Some(a) = self.address {
            write!(f, "{sep}block {a}")?;
            sep = ", ";
        }
        if let Some(k) = self.key {
            write!(f, "{sep}item {k}")?;
            sep = ", ";
        }
        if let Some(d) = self.device {
            write!(f, "{sep}device {d}")?;
            sep = ", ";
        }
        if sep.is_empty() {
            write!(f, "superblock")?;
        }
        Ok(())
    }
}

impl Place {
    /// A place in a tree.
    #[must_use]
    pub fn tree(tree: ObjectId) -> Self {
        Self { tree: Some(tree), ..Self::default() }
    }
    /// A block.
    #[must_use]
    pub fn block(address: Logical) -> Self {
        Self { address: Some(address), ..Self::default() }
    }
    /// An item of a tree.
    #[must_use]
    pub fn item(tree: ObjectId, key: Key) -> Self {
        Self { tree: Some(tree), key: Some(key), ..Self::default() }
    }
}

impl Error {
    /// A corruption at a place.
    pub fn corrupt(place: Place, what: impl Into<String>) -> Self {
        Self::Corrupt { place, what: what.into() }
    }
}
