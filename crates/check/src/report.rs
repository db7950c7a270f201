//! What a check takes and gives: its options, its errors, its report.

use crate::dump::Dump;
use crate::finding::{Count, Finding, Kind, Severity};
use larder_volume::VolumeError;
use std::collections::BTreeMap;
use std::time::Duration;

/// How to check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Read all file data, too: compare every copy with its checksums, and unpack what is
    /// compressed.
    pub data: bool,
    /// Threads to work with; 0 for as many as there are processors.
    pub threads: usize,
    /// Findings to keep of each kind; more are counted.
    pub keep: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { data: false, threads: 0, keep: 100 }
    }
}

/// Why nothing could be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no btrfs.
    #[error("{device}: {what}")]
    NotBtrfs {
        /// The device.
        device: String,
        /// What is there instead.
        what: String,
    },
    /// It uses something that is not known here.
    #[error("cannot be checked: {0}")]
    Unsupported(String),
    /// The devices cannot be used together, or a profile is not supported.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The threads cannot be started.
    #[error("cannot start threads: {0}")]
    Threads(String),
}

/// What there was to check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tree nodes.
    pub nodes: u64,
    /// Extents, of data and nodes.
    pub extents: u64,
    /// Inodes; those that snapshots share are counted once.
    pub inodes: u64,
    /// Directory entries.
    pub names: u64,
    /// File extent items with data behind them.
    pub file_extents: u64,
    /// Bytes of file data that were compared with their checksums, over all copies.
    pub data_bytes: u64,
    /// Bytes read from the devices.
    pub bytes_read: u64,
    /// Time taken.
    pub elapsed: Duration,
}

/// The result of a check.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was found: errors first, follow-ups last; at most [`Options::keep`] of a kind, and as
    /// many follow-ups.
    pub findings: Vec<Finding>,
    /// How often each kind was found.
    pub counts: BTreeMap<Kind, Count>,
    /// What there was to check.
    pub stats: Stats,
    /// Set if the image is a metadata dump: then some things could not be judged.
    pub dump: Option<Dump>,
}

impl Report {
    /// Were there no errors? Warnings and notes say nothing against an image.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.errors() == 0
    }
    /// Number of errors, follow-ups included.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.count(Severity::Error)
    }
    /// Number of findings of a severity, follow-ups included.
    #[must_use]
    pub fn count(&self, severity: Severity) -> u64 {
        self.counts
            .iter()
            .filter(|(k, _)| k.severity() == severity)
            .map(|(_, c)| c.found + c.follow_ups)
            .sum()
    }
    /// Was this kind found, other than as a follow-up?
    #[must_use]
    pub fn found(&self, kind: Kind) -> bool {
        self.counts.get(&kind).is_some_and(|c| c.found > 0)
    }
}
