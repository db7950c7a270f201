//! Switches that only tests and benchmarks reach.
//!
//! [`Tuning`] is a part of the options with which a file system is opened. It hides which other
//! behaviours the engine has besides its own. There are three kinds. Some make a test reproducible,
//! or make rare things frequent. Some take back one improvement of Larder, so that a benchmark
//! shows what it is worth: each is a strategy of [`older`]. Some make the engine do wrong, so that
//! a test shows that the mistake would be noticed. These faults are compiled into tests only, see
//! `fault!`.

#[cfg(feature = "faults")]
pub(crate) mod faults;
pub mod older;

use older::{LogCopies, LogEntry, LogStart, Reclaim};

/// Does a fault of this name happen? Takes the [`Tuning`] and the name, without its type.
///
/// A constant without the feature `faults`: what depends on it is checked by the compiler and is in
/// no program.
#[cfg(feature = "faults")]
macro_rules! fault {
    ($tuning:expr, $name:ident) => {
        $tuning.fault == Some($crate::tuning::faults::Fault::$name)
    };
}
#[cfg(not(feature = "faults"))]
macro_rules! fault {
    ($tuning:expr, $name:ident) => {{
        let _ = &$tuning;
        false
    }};
}

#[cfg(feature = "faults")]
pub(crate) use faults::deaf;

/// Without faults there is no such device.
#[cfg(not(feature = "faults"))]
pub(crate) fn deaf(
    device: std::sync::Arc<dyn larder_volume::Device>,
) -> std::sync::Arc<dyn larder_volume::Device> {
    device
}

/// Behaviour that tests and benchmarks choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    /// Make every `fsync` a commit.
    pub no_log: bool,
    /// Discard whatever is freed, metadata and single sectors too, as soon as it may be.
    pub discard_everything: bool,
    /// Changed inodes from which on the commit writes their items before it seals; `None`: the
    /// usual number.
    pub seal_ahead: Option<usize>,
    /// Written bytes that no flush covers yet, from which on the device is flushed early; `None`:
    /// the usual number.
    pub early_flush_bytes: Option<u64>,
    /// Commit after each step of an operation that takes several transactions: cutting, deleting or
    /// punching many extents.
    pub commit_steps: bool,
    /// Changes of references after which dropping a deleted subvolume commits and waits; `None`:
    /// the usual, and no wait.
    pub drop_step: Option<u64>,
    /// What is written back where space is short.
    pub reclaim: Reclaim,
    /// How an inode is read while it is logged.
    pub log_copies: LogCopies,
    /// When a log may be begun.
    pub log_start: LogStart,
    /// How the contribution of a caller of `fsync` gets into the log.
    pub log_entry: LogEntry,
    /// Clock for reproducible tests: nanoseconds that advance by one per look, instead of the
    /// system's.
    pub fake_clock: bool,
    /// What goes wrong.
    #[cfg(feature = "faults")]
    pub fault: Option<faults::Fault>,
}
