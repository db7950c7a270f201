//! What can go wrong with a build. Every message names what to look at.

use larder_sources::TreePath;
use larder_volume::VolumeError;
use std::io;
use std::path::PathBuf;

/// Any error of a source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Result of a build.
pub type Result<T> = std::result::Result<T, Error>;

/// Why no image was made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The stream of entries ended with an error.
    #[error("{0}")]
    Source(BoxError),
    /// A file's contents could not be read, or are not what its entry said.
    #[error("{}: {why}", shown(.path))]
    Contents {
        /// The file, by its path in the tree.
        path: Vec<u8>,
        /// What its source said.
        why: BoxError,
    },
    /// The entry cannot be in an image.
    #[error("{}: {what}", shown(.path))]
    Entry {
        /// Its path in the tree.
        path: Vec<u8>,
        /// What is wrong with it.
        what: String,
    },
    /// Options that do not go together, or an output that must not be overwritten.
    #[error("{0}")]
    Unsupported(String),
    /// The size that was asked for is too small.
    #[error(
        "an image of {size} bytes is too small for what it is to hold: it was full after {reached} \
         bytes of contents; give a larger size, or let it be found"
    )]
    TooSmall {
        /// Size that was asked for.
        size: u64,
        /// Bytes that had found a place.
        reached: u64,
    },
    /// The image could not be made or written.
    #[error("cannot {op} {}: {source}", path.display())]
    Output {
        /// What was tried.
        op: &'static str,
        /// The image.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The image is in use, or a device failed.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The scratch file failed.
    #[error("cannot {op} a scratch file in {}: {source}", directory.display())]
    Scratch {
        /// What was tried.
        op: &'static str,
        /// Where it lies.
        directory: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The caller wanted no more.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// An entry that cannot be in an image.
    pub(crate) fn entry(path: &TreePath, what: impl Into<String>) -> Self {
        Self::Entry { path: path.as_bytes().to_vec(), what: what.into() }
    }
}

impl From<larder_fs::Error> for Error {
    fn from(e: larder_fs::Error) -> Self {
        match e {
            larder_fs::Error::Volume(e) => Self::Volume(e),
            other => Self::Unsupported(other.to_string()),
        }
    }
}

fn shown(path: &[u8]) -> String {
    if path.is_empty() { "the top directory".into() } else { path.escape_ascii().to_string() }
}
