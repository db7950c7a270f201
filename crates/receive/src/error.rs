//! Why a stream could not be received, or a command could not be applied.

use larder_stream::StreamError;

/// An error of the place that receives.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Receiving ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The stream is wrong, or cannot be read.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A command could not be applied.
    #[error(transparent)]
    Command(#[from] Failure),
    /// The name of the subvolume to be received is taken.
    #[error("{name}: {why}")]
    Taken {
        /// The name, fit for a terminal.
        name: String,
        /// By what.
        why: Taken,
    },
    /// What was received could not be made durable.
    #[error("{name}: {step}: {source}")]
    Subvolume {
        /// The subvolume's name, fit for a terminal.
        name: String,
        /// What was being done.
        step: &'static str,
        /// Why it failed.
        source: BoxError,
    },
    /// The caller asked for the end.
    #[error("interrupted")]
    Interrupted,
}

/// What has the name of a subvolume that is to be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Taken {
    /// It was received in part before.
    #[error("it was received in part before")]
    Partly,
    /// It was received before, as a whole.
    #[error("it was received before")]
    Received,
    /// It is something else.
    #[error("it exists already, and was not received from this stream")]
    Foreign,
    /// It was received in part from another stream.
    #[error("it was received in part, but from another stream")]
    OtherStream,
}

/// A command that could not be applied.
#[derive(Debug, thiserror::Error)]
#[error("at byte {offset} of the stream: {command} {path}: {source}")]
pub struct Failure {
    /// Where the command begins.
    pub offset: u64,
    /// Its name.
    pub command: &'static str,
    /// The path that it names first, fit for a terminal.
    pub path: String,
    /// Why.
    pub source: BoxError,
}

/// Why a command is refused before it is tried.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// A path that would leave the subvolume, or cannot exist.
    #[error("`{0}` is no path below the subvolume")]
    Path(String),
    /// There is no subvolume for it.
    #[error("no `subvol` or `snapshot` stands before it")]
    NoSubvolume,
    /// The parent or a clone source is not there.
    #[error(
        "the subvolume {uuid} that it builds upon (transaction {ctransid}) is not here, or is not \
         read-only: receive that one first"
    )]
    NoSource {
        /// Its uuid.
        uuid: String,
        /// Its transaction when it was sent.
        ctransid: u64,
    },
    /// A value that makes no sense.
    #[error("{0}")]
    Value(&'static str),
    /// What is known of the protocol, but cannot be done.
    #[error("{0}")]
    NotSupported(String),
}

/// Bytes as a message can show them.
pub(crate) fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).escape_debug().to_string()
}

/// A uuid as people write it.
pub(crate) fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
