//! What can go wrong. Every message says what to do next, where there is something to do.

/// Result of sending.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a stream ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A subvolume could not be read.
    #[error(transparent)]
    Read(#[from] larder_fs::Error),
    /// A command could not be written.
    #[error(transparent)]
    Write(#[from] larder_stream::WriteError),
    /// The parent is the subvolume itself.
    #[error("a subvolume cannot be its own parent; give an older snapshot")]
    OwnParent,
    /// The names of an inode lead to no root.
    #[error("directories of tree {tree} form a circle at inode {ino}; `larder check` says more")]
    Circle {
        /// The subvolume.
        tree: u64,
        /// A directory of the circle.
        ino: u64,
    },
    /// A name leads to an inode that has none.
    #[error("inode {ino} of tree {tree} is missing or has no name; `larder check` says more")]
    Nameless {
        /// The subvolume.
        tree: u64,
        /// The inode.
        ino: u64,
    },
}
