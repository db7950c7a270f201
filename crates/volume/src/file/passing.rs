//! Data that passes through the page cache once.
//!
//! Reads go through the page cache for the sake of its read-ahead: it asks the device for megabytes
//! at a time, and the files of a directory mostly lie behind each other. Behind the reader the
//! pages are of no use any more, because a mount has the contents of the file in the page cache as
//! well, and a command reads each file once.
//!
//! So reads that lie near each other are joined to runs, and what a run has passed is dropped. A
//! mount reads several pieces of a file at once and in any order, so the last [`BEHIND`] bytes of a
//! run stay. Scattered reads drop nothing: such a reader comes back. Pages that others use, or that
//! are yet to be written, stay; the kernel sees to that.

use parking_lot::Mutex;
use std::fs::File;
use std::ops::Range;

/// Readers that are followed at the same time.
const RUNS: usize = 8;
/// Two reads belong together when no more than this lies between them.
const GAP: u64 = 4 << 20;
/// Bytes at a run's end that stay: pieces of them may still be asked for.
const BEHIND: u64 = 8 << 20;
/// A run's pages are dropped when so many lie before those.
const PIECE: u64 = 8 << 20;
/// The kernel drops no page that reaches beyond the piece, and a large one may be that long. So the
/// next piece begins that far inside of the one before.
const OVERLAP: u64 = 2 << 20;

/// A stretch in which reads lie near each other.
#[derive(Clone, Debug)]
struct Run {
    range: Range<u64>,
    /// Bytes that were read since the last piece.
    read: u64,
}

impl Run {
    /// Does a read belong to it?
    fn takes(&self, read: &Range<u64>) -> bool {
        let near = self.range.start.saturating_sub(GAP)..=self.range.end.saturating_add(GAP);
        near.contains(&read.start)
    }
    /// Has most of it been read? Otherwise its reader jumps about.
    fn is_dense(&self) -> bool {
        self.read >= (self.range.end - self.range.start) / 2
    }
}

/// Runs of reads, the one that was last in use last.
#[derive(Debug, Default)]
pub(super) struct Passing {
    runs: Mutex<Vec<Run>>,
}

impl Passing {
    /// `read` was read and will not be wanted again. What has been passed is left for
    /// [`Passing::drop_passed`].
    pub(super) fn note(&self, read: Range<u64>) {
        let len = read.end - read.start;
        let mut runs = self.runs.lock();
        let run = match runs.iter().rposition(|run| run.takes(&read)) {
            Some(at) => {
                let Run { range, read: before } = runs.remove(at);
                let range = range.start.min(read.start)..range.end.max(read.end);
                Run { range, read: before + len }
            }
            None => {
                if runs.len() == RUNS {
                    runs.remove(0);
                }
                Run { range: read, read: len }
            }
        };
        runs.push(run);
    }

    /// Takes out a piece that a run has passed.
    fn passed(&self) -> Option<Range<u64>> {
        let mut runs = self.runs.lock();
        for run in runs.iter_mut().filter(|run| run.range.end - run.range.start >= PIECE + BEHIND) {
            let end = run.range.end - BEHIND;
            let piece = run.is_dense().then_some(run.range.start..end);
            run.range.start = end - OVERLAP;
            run.read = run.range.end - run.range.start;
            if piece.is_some() {
                return piece;
            }
        }
        None
    }

    /// Drops from the page cache of `file` what has been passed. It may start the write-back of
    /// pages, and is not for a thread that must not wait.
    pub(super) fn drop_passed(&self, file: &File) {
        while let Some(piece) = self.passed() {
            super::os::drop_cached(file, piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn what_lies_behind_a_reader_is_passed_once() {
        let passing = Passing::default();
        for at in (0..PIECE + BEHIND).step_by(64 << 10) {
            assert_eq!(passing.passed(), None, "at {at}");
            passing.note(at..at + 64 * KIB);
        }
        assert_eq!(passing.passed(), Some(0..PIECE));
        assert_eq!(passing.passed(), None);
        // The next piece begins with what the kernel may have kept of this one.
        passing.note(PIECE + BEHIND..2 * PIECE + BEHIND);
        assert_eq!(passing.passed(), Some(PIECE - OVERLAP..2 * PIECE));
    }

    /// A mount reads several pieces at once: the last ones may come first.
    #[test]
    fn the_order_of_neighbours_does_not_matter() {
        let passing = Passing::default();
        for group in (0..PIECE + BEHIND).step_by(4 << 20) {
            for piece in [2, 0, 3, 1] {
                let at = group + piece * MIB;
                passing.note(at..at + MIB);
            }
        }
        assert_eq!(passing.passed(), Some(0..PIECE));
    }

    #[test]
    fn several_readers_are_followed_and_scattered_reads_forgotten() {
        let passing = Passing::default();
        for step in 0..(PIECE + BEHIND) / (64 * KIB) {
            for reader in 0..RUNS as u64 {
                let at = reader * 100 * MIB + step * 64 * KIB;
                passing.note(at..at + 64 * KIB);
            }
        }
        assert_eq!((0..RUNS).filter_map(|_| passing.passed()).count(), RUNS);
        let scattered = Passing::default();
        for i in 0..1000 {
            scattered.note(i * 10 * MIB..i * 10 * MIB + 16 * KIB);
            assert_eq!(scattered.passed(), None);
        }
        assert_eq!(scattered.runs.lock().len(), RUNS);
    }

    /// Reads that jump about in one place are no stream: what they leave is wanted again.
    #[test]
    fn a_reader_that_jumps_about_drops_nothing() {
        let passing = Passing::default();
        for i in 0..10_000u64 {
            let at = i * 7919 % 4096 * 16 * KIB;
            passing.note(at..at + 4 * KIB);
            assert!(i > 2000 || passing.passed().is_none(), "read {i}");
        }
    }
}
