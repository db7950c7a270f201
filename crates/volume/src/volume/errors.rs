//! What went wrong on a device, over its life: the counts that Linux keeps, too.
//!
//! The counts of a device begin where its file system was opened with them, and go on from there.
//! Where they are kept is for the layers above; [`Errors::take_changed`] tells them when there is
//! something to keep. Failed requests are counted by the volume itself. That a copy is bad only the
//! layers above can tell: they know the checksums.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// A kind of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A write failed.
    Write,
    /// A read failed.
    Read,
    /// A flush failed.
    Flush,
    /// A checksum does not fit, or a tree block is not one.
    Corruption,
    /// A tree block is of another generation than its parent says.
    Generation,
}

/// Errors of a device over its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ErrorCounts {
    pub writes: u64,
    pub reads: u64,
    pub flushes: u64,
    pub corruptions: u64,
    pub generations: u64,
}

#[derive(Debug, Default)]
pub(super) struct Errors {
    counts: [AtomicU64; 5],
    changed: AtomicBool,
}

impl Errors {
    pub(super) fn count(&self, what: ErrorKind) {
        self.counts[what as usize].fetch_add(1, Relaxed);
        self.changed.store(true, Relaxed);
    }

    pub(super) fn now(&self) -> ErrorCounts {
        let [writes, reads, flushes, corruptions, generations] =
            self.counts.each_ref().map(|n| n.load(Relaxed));
        ErrorCounts { writes, reads, flushes, corruptions, generations }
    }

    /// The counts as they were kept. What was counted before comes on top.
    pub(super) fn go_on_from(&self, kept: ErrorCounts) {
        let ErrorCounts { writes, reads, flushes, corruptions, generations } = kept;
        for (n, kept) in self.counts.iter().zip([writes, reads, flushes, corruptions, generations])
        {
            n.fetch_add(kept, Relaxed);
        }
    }

    pub(super) fn reset(&self) {
        self.counts.iter().for_each(|n| n.store(0, Relaxed));
        self.changed.store(true, Relaxed);
    }

    pub(super) fn have_changed(&self) -> bool {
        self.changed.load(Relaxed)
    }

    /// The counts, if they have changed since this was last asked.
    pub(super) fn take_changed(&self) -> Option<ErrorCounts> {
        // In this order: what is counted in between is taken now, and once more.
        self.changed.swap(false, Relaxed).then(|| self.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_on_and_are_taken_once() {
        let errors = Errors::default();
        assert_eq!(errors.take_changed(), None);
        errors.count(ErrorKind::Flush);
        errors.go_on_from(ErrorCounts { flushes: 3, generations: 1, ..ErrorCounts::default() });
        let now = ErrorCounts { flushes: 4, generations: 1, ..ErrorCounts::default() };
        assert!(errors.have_changed());
        assert_eq!(errors.take_changed(), Some(now));
        assert_eq!((errors.take_changed(), errors.now()), (None, now));
        errors.reset();
        assert_eq!(errors.take_changed(), Some(ErrorCounts::default()));
    }
}
