//! What Linux once did otherwise, for benchmarks that measure the worth of each difference.
//!
//! Each type here is one choice. Its first value is what Larder does, its second what Linux once
//! did. The engine asks for a choice by a method of its type: those about logs are in
//! `log::write::older`, the one about space is in `file::older`. Nothing else depends on these
//! types. The option `tuning=` of a mount names the second values.

/// What is written back where space is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reclaim {
    /// As much as is needed, from whichever files have the oldest data.
    #[default]
    AsNeeded,
    /// All that a file has, file by file.
    WholeInodes,
}

/// How an inode is read while it is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogCopies {
    /// From a version of its tree, without a lock.
    #[default]
    None,
    /// The leaves that have its items are copied into new memory under the lock of the tree first.
    Locked,
}

/// When something may be logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogStart {
    /// At any time: only the superblock waits for a commit that is on its way.
    #[default]
    AtOnce,
    /// Once no commit is on its way: when its superblock is durable.
    AfterCommit,
}

/// How the contribution of a caller of `fsync` gets into the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogEntry {
    /// In batches: one caller edits the log for all that wait.
    #[default]
    Batched,
    /// Each caller edits the log itself, one at a time, and deletes the range of its checksums
    /// first, whether or not extents are shared.
    Alone,
}
