//! The offline checker: reads an image, compares everything in it with everything else, and says
//! what is wrong.
//!
//! It shares no code with the engine that it checks: this crate knows the format, how to read
//! devices and to unpack, nothing more, and its manifest keeps it so. It only reads.
//!
//! # How it works
//!
//! A file system says most things twice: an extent's references and the pointers that make them, a
//! directory's entries and the names that inodes record, allocated space and free space. A checker
//! has to compare the two sides of tens of millions of facts, in bounded memory and at the speed of
//! the disk. Here each node is read once, by any thread, in any order, and each fact adds a keyed
//! hash to the sum of its side (`sets`). Where the sums agree, so do the facts. Where they do not,
//! a second walk collects the facts about the few places in question, and they are compared one by
//! one (`refs`, `links`, `free_space`). A sound image costs one pass and some tens of MiB, whatever
//! its size; damage costs another pass or two.
//!
//! Facts about one object whose items span leaves — an inode, an extent — are put together by
//! joining what is known of neighbouring leaves (`run`, `walk`). A node that snapshots share is
//! looked at once, and what was learnt of it is joined into each of them.
//!
//! What cannot be read is reported, and what merely follows from its absence is marked as a
//! follow-up (`lost`).
//!
//! Counts of quota groups need to know which subvolumes reach an extent, which no sum tells: they
//! cost a pass of their own, where quotas are on (`quotas`).
//!
//! Of a metadata dump everything is checked that it has ([`Dump`]).
//!
//! # Not checked
//!
//! The contents of verity items, and what replaying a log would give.

mod chunks;
mod coverage;
mod data;
mod dump;
mod extents;
mod files;
pub mod finding;
mod free_space;
mod inode;
mod links;
mod log;
mod lost;
mod owners;
mod plain;
pub mod progress;
mod quotas;
mod refs;
mod roots;
mod run;
mod sets;
mod source;
mod space_cache;
mod stages;
mod sums;
mod supers;
mod tables;
mod unpack;
mod walk;
mod world;

pub use dump::Dump;
pub use finding::{Count, Finding, Kind, Severity};
pub use progress::{Phase, Progress, Watcher};

use larder_volume::{Device, VolumeError};
use std::collections::BTreeMap;
use std::sync::Arc;
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

/// Checks the file system on these devices, which are only read.
///
/// `watcher` is told of the progress now and then, from any thread.
///
/// # Errors
/// There is nothing to check, or nothing that is known how to. Damage is no error but in the
/// report, however bad.
pub fn check(
    devices: &[Arc<dyn Device>],
    options: &Options,
    watcher: Watcher<'_>,
) -> Result<Report, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads)
        .thread_name(|n| format!("larder-check-{n}"))
        // Walks recurse, and a thread that waits takes up other subtrees on top of its own.
        .stack_size(16 << 20)
        .build()
        .map_err(|e| Error::Threads(e.to_string()))?;
    pool.install(|| stages::run(devices, options, watcher))
}
