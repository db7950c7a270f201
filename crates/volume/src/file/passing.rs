//! Data that passes through the page cache once.
//!
//! Short reads go through the page cache for the sake of its read-ahead: the files of a directory
//! mostly lie behind each other. Behind the reader the pages are of no use any more, because a
//! mount has the contents of the file in the page cache as well, and a command reads each file
//! once.
//!
//! So reads that lie behind each other are joined to runs, and what a run has passed is dropped.
//! Scattered reads make no runs: a drop costs a system call, and such a reader comes back sooner.
//! Pages that others use, or that are yet to be written, stay; the kernel sees to that.

use parking_lot::Mutex;
use std::fs::File;
use std::ops::Range;

/// Readers that are followed at the same time.
const RUNS: usize = 8;
/// Two reads belong together when no more than this lies between them.
const GAP: u64 = 256 << 10;
/// A run's pages are dropped in pieces of this length.
const PIECE: u64 = 4 << 20;
/// The kernel drops no page that reaches beyond the piece, and a large one may be that long.
const OVERLAP: u64 = 1 << 20;

/// Runs of reads, the one that was last in use last.
#[derive(Debug, Default)]
pub(super) struct Passing {
    runs: Mutex<Vec<Range<u64>>>,
}

impl Passing {
    /// `read` was read and will not be wanted again. What has been passed is left for
    /// [`Passing::drop_passed`].
    pub(super) fn note(&self, read: Range<u64>) {
        let mut runs = self.runs.lock();
        let follows =
            |run: &Range<u64>| run.start <= read.start && read.start <= run.end.saturating_add(GAP);
        let run = match runs.iter().rposition(follows) {
            Some(at) => {
                let run = runs.remove(at);
                run.start..run.end.max(read.end)
            }
            None => {
                if runs.len() == RUNS {
                    runs.remove(0);
                }
                read
            }
        };
        runs.push(run);
    }

    /// Takes out a piece that a run has passed.
    fn passed(&self) -> Option<Range<u64>> {
        let mut runs = self.runs.lock();
        let run = runs.iter_mut().find(|run| run.end - run.start >= PIECE)?;
        let piece = run.clone();
        run.start = run.end - OVERLAP;
        Some(piece)
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
        for at in (0..PIECE).step_by(64 << 10) {
            assert_eq!(passing.passed(), None, "at {at}");
            passing.note(at..at + 60 * KIB);
        }
        passing.note(PIECE..PIECE + 4 * KIB);
        assert_eq!(passing.passed(), Some(0..PIECE + 4 * KIB));
        assert_eq!(passing.passed(), None);
        // The next piece begins with what the kernel may have kept of this one.
        passing.note(PIECE + 8 * KIB..2 * PIECE);
        assert_eq!(passing.passed(), Some(PIECE + 4 * KIB - OVERLAP..2 * PIECE));
    }

    #[test]
    fn several_readers_are_followed_and_scattered_reads_forgotten() {
        let passing = Passing::default();
        for step in 0..=PIECE / (64 * KIB) {
            for reader in 0..RUNS as u64 {
                let at = reader * 100 * MIB + step * 64 * KIB;
                passing.note(at..at + 64 * KIB);
            }
        }
        assert_eq!((0..RUNS).filter_map(|_| passing.passed()).count(), RUNS);
        let scattered = Passing::default();
        for i in 0..1000 {
            scattered.note(i * 10 * MIB..i * 10 * MIB + 16 * KIB);
        }
        assert_eq!(scattered.passed(), None);
        assert_eq!(scattered.runs.lock().len(), RUNS);
    }

    /// A read before a run is another run: reading backwards drops nothing that is still to come.
    #[test]
    fn a_reader_that_goes_back_begins_anew() {
        let passing = Passing::default();
        passing.note(8 * MIB..9 * MIB);
        passing.note(4 * MIB..5 * MIB);
        passing.note(0..MIB);
        assert_eq!(passing.passed(), None);
        assert_eq!(passing.runs.lock().len(), 3);
    }
}
