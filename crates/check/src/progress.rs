//! How far the check is.
//!
//! Work is measured in bytes read, for that is what it waits for: what there is to read is known
//! from the block groups before the long part begins. Callers get numbers and decide how to show
//! them; they are called from whichever thread finishes a piece of work, never more than about ten
//! times a second.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// What the check is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Superblocks, chunks, the list of trees.
    Opening,
    /// Extents and the references to them.
    Extents,
    /// Data checksums, and with [`crate::Options::data`] the data.
    Checksums,
    /// Subvolumes: inodes, names, file extents.
    Files,
    /// Comparing the sums, and looking closer where they disagree.
    Comparing,
}

impl Phase {
    /// A word for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Extents => "extents",
            Self::Checksums => "checksums",
            Self::Files => "files",
            Self::Comparing => "comparing",
        }
    }
    fn from_number(n: u64) -> Self {
        [Self::Opening, Self::Extents, Self::Checksums, Self::Files, Self::Comparing]
            [usize::try_from(n).unwrap_or(4).min(4)]
    }
}

/// A snapshot of the progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes read so far.
    pub done: u64,
    /// Bytes to read, as far as known: an estimate, never less than `done`.
    pub total: u64,
    /// Time since the beginning.
    pub elapsed: std::time::Duration,
}

/// Called with the progress now and then.
pub type Watcher<'a> = &'a (dyn Fn(&Progress) + Sync);

/// Counts what is read and tells the watcher.
pub(crate) struct Meter<'a> {
    watcher: Watcher<'a>,
    begun: Instant,
    phase: AtomicU64,
    pub(crate) bytes: AtomicU64,
    total: AtomicU64,
    /// Milliseconds since the beginning when the watcher was called last.
    told: AtomicU64,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(watcher: Watcher<'a>) -> Self {
        Self {
            watcher,
            begun: Instant::now(),
            phase: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            total: AtomicU64::new(0),
            told: AtomicU64::new(0),
        }
    }

    pub(crate) fn phase(&self, phase: Phase) {
        self.phase.store(phase as u64, Relaxed);
        self.tell();
    }

    /// There are so many more bytes to read than was known.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn read(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let told = self.told.load(Relaxed);
        if now >= told.saturating_add(100)
            && self.told.compare_exchange(told, now, Relaxed, Relaxed).is_ok()
        {
            self.tell();
        }
    }

    pub(crate) fn elapsed(&self) -> std::time::Duration {
        self.begun.elapsed()
    }

    fn tell(&self) {
        let done = self.bytes.load(Relaxed);
        (self.watcher)(&Progress {
            phase: Phase::from_number(self.phase.load(Relaxed)),
            done,
            total: self.total.load(Relaxed).max(done),
            elapsed: self.begun.elapsed(),
        });
    }
}
