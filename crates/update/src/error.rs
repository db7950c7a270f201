//! What can go wrong with an update. Every message names the entry.

use larder_sources::TreePath;

/// Any error of a source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Result of an update.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an update ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The stream of entries ended with an error.
    #[error("{0}")]
    Source(BoxError),
    /// A file's contents could not be read.
    #[error("{}: {why}", shown(.path))]
    Contents {
        /// The file, by its path in the tree.
        path: TreePath,
        /// What its source said.
        why: BoxError,
    },
    /// The image could not be changed.
    #[error("{}: cannot {doing}: {why}", shown(.path))]
    Image {
        /// What was to be changed, by its path in the tree.
        path: TreePath,
        /// What was tried.
        doing: &'static str,
        /// What the engine said.
        #[source]
        why: Box<larder_fs::Error>,
    },
    /// A subvolume lies where the sources have something else.
    #[error(
        "{}: a subvolume lies here or below, and is not removed; delete it, or leave the entry out",
        shown(.path)
    )]
    Subvolume {
        /// Where it is.
        path: TreePath,
    },
    /// Entries came in another order than that of their paths.
    #[error("{}: the sources have it out of order, or without its directory", shown(.path))]
    Order {
        /// The entry.
        path: TreePath,
    },
    /// A temporary file failed, for which the text has the directory.
    #[error(transparent)]
    Temporary(#[from] std::io::Error),
    /// The caller wanted no more.
    #[error("interrupted")]
    Interrupted,
}

/// Puts the path and what was tried to an error of the engine.
pub(crate) trait At<T> {
    fn at(self, path: &TreePath, doing: &'static str) -> Result<T>;
}

impl<T> At<T> for larder_fs::Result<T> {
    fn at(self, path: &TreePath, doing: &'static str) -> Result<T> {
        self.map_err(|why| Error::Image { path: path.clone(), doing, why: why.into() })
    }
}

fn shown(path: &TreePath) -> String {
    if path.is_root() {
        "the top directory".into()
    } else {
        path.as_bytes().escape_ascii().to_string()
    }
}
