//! Why nothing can be restored, or no more.

/// Why nothing can be restored at all.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no superblock to start from, or not the one asked for.
    #[error("{0}")]
    NoSuperblock(String),
    /// The device or its superblock is such that reading cannot even begin.
    #[error(transparent)]
    Volume(#[from] larder_volume::VolumeError),
    /// It is a metadata dump: there is no data that could be restored.
    #[error("this is a metadata dump without its data: there is nothing to restore")]
    MetadataDump,
    /// What was asked for is not there.
    #[error("{0}")]
    NotFound(String),
    /// The destination cannot be used, or stopped working.
    #[error("{path}: {source}")]
    Destination {
        /// Where.
        path: String,
        /// What the host said.
        #[source]
        source: std::io::Error,
    },
    /// The observer wanted it to end.
    #[error("stopped")]
    Stopped,
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
