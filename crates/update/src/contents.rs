//! Which bytes of a file are written.
//!
//! Both sides are read block by block, and a run of blocks that differ is written at once. Where
//! the source has a hole, the image gets one if it has data there. A file that is new has nothing
//! to be compared with, and is written as it comes.

use larder_fs::{Fallocate, Filesystem, InodeId, Seek, SetAttr};
use larder_sources::Contents;
use std::io;
use std::ops::Range;

/// Bytes that are read at once from either side. A compressed extent covers a part of it.
const PIECE: u64 = 1 << 20;
/// Runs that are written consist of these, apart from the end of the file. They are large enough to
/// be worth an extent of their own.
const BLOCK: usize = 64 << 10;

/// What failed: the source, or the image.
#[derive(Debug)]
pub(crate) enum Failed {
    Source(io::Error),
    Image(larder_fs::Error),
}

impl From<larder_fs::Error> for Failed {
    fn from(e: larder_fs::Error) -> Self {
        Self::Image(e)
    }
}

impl From<io::Error> for Failed {
    fn from(e: io::Error) -> Self {
        Self::Source(e)
    }
}

/// A file of the image that becomes like its source.
pub(crate) struct File<'a> {
    pub(crate) fs: &'a Filesystem,
    pub(crate) id: InodeId,
    /// Bytes that it has now.
    pub(crate) size: u64,
}

impl File<'_> {
    /// Makes it equal to `source`, which has `size` bytes. Returns the number of bytes that were
    /// written.
    pub(crate) fn become_like(&self, source: &mut dyn Contents, size: u64) -> Result<u64, Failed> {
        let mut written = 0;
        let mut at = 0;
        for part in source.data()? {
            self.punch(at..part.start)?;
            written += self.copy(source, part.clone())?;
            at = part.end;
        }
        self.punch(at..size)?;
        if self.fs.getattr(self.id)?.size != size {
            self.fs.setattr(self.id, &SetAttr { size: Some(size), ..SetAttr::default() })?;
        }
        Ok(written)
    }

    /// Does it have the bytes that `source` has? Sizes are equal.
    pub(crate) fn is_like(&self, source: &mut dyn Contents) -> Result<bool, Failed> {
        let mut at = 0;
        for part in source.data()? {
            if self.data_in(at..part.start)?.is_some() {
                return Ok(false);
            }
            for piece in pieces(part.clone()) {
                let (wanted, now) = self.both(source, piece)?;
                if wanted != now {
                    return Ok(false);
                }
            }
            at = part.end;
        }
        Ok(self.data_in(at..self.size)?.is_none())
    }

    /// Copies what differs in `part`.
    fn copy(&self, source: &mut dyn Contents, part: Range<u64>) -> Result<u64, Failed> {
        let mut written = 0;
        for piece in pieces(part) {
            let (wanted, now) = self.both(source, piece.clone())?;
            for run in runs(&wanted, &now) {
                let bytes = &wanted[run.clone()];
                self.fs.write(self.id, piece.start + run.start as u64, bytes)?;
                written += bytes.len() as u64;
            }
        }
        Ok(written)
    }

    /// `piece` of the source, and as much of it as the image has.
    fn both(
        &self,
        source: &mut dyn Contents,
        piece: Range<u64>,
    ) -> Result<(Vec<u8>, Vec<u8>), Failed> {
        let mut wanted = vec![0; (piece.end - piece.start) as usize];
        source.read_exact_at(&mut wanted, piece.start)?;
        let has = self.size.saturating_sub(piece.start).min(piece.end - piece.start);
        let mut now = vec![0; has as usize];
        if has > 0 {
            let n = self.fs.read(self.id, piece.start, &mut now)?;
            now.truncate(n);
        }
        Ok((wanted, now))
    }

    /// Makes a hole of `range`, as far as the file has data there.
    fn punch(&self, range: Range<u64>) -> Result<(), Failed> {
        let mut at = range.start;
        while let Some(data) = self.data_in(at..range.end)? {
            let from = self.id.at(data.start);
            self.fs.fallocate(from, data.end - data.start, Fallocate::Punch)?;
            at = data.end;
        }
        Ok(())
    }

    /// The first part of `range` that is not a hole.
    fn data_in(&self, range: Range<u64>) -> Result<Option<Range<u64>>, Failed> {
        let end = range.end.min(self.size);
        if range.start >= end {
            return Ok(None);
        }
        let Some(start) = self.fs.seek(self.id, range.start, Seek::Data)? else { return Ok(None) };
        if start >= end {
            return Ok(None);
        }
        let hole = self.fs.seek(self.id, start, Seek::Hole)?.unwrap_or(end);
        Ok(Some(start..hole.min(end)))
    }
}

/// `range` in pieces that end at multiples of [`PIECE`].
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let start = at;
        at = (start / PIECE + 1) * PIECE;
        at = at.min(range.end);
        (start < range.end).then_some(start..at)
    })
}

/// Runs of blocks of `wanted` that `now`, which may be shorter, does not have.
fn runs(wanted: &[u8], now: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for start in (0..wanted.len()).step_by(BLOCK) {
        let end = (start + BLOCK).min(wanted.len());
        if now.get(start..end) == Some(&wanted[start..end]) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_what_differs() {
        let wanted = vec![7; 5 * BLOCK + 3];
        let mut now = wanted.clone();
        assert!(runs(&wanted, &now).is_empty());
        now[BLOCK] = 0;
        now[3 * BLOCK - 1] = 0;
        let changed = BLOCK..3 * BLOCK;
        assert_eq!(runs(&wanted, &now), std::slice::from_ref(&changed));
        now.truncate(5 * BLOCK);
        assert_eq!(runs(&wanted, &now), [BLOCK..3 * BLOCK, 5 * BLOCK..5 * BLOCK + 3]);
        assert_eq!(runs(&wanted, &[]), std::slice::from_ref(&(0..wanted.len())));
    }

    #[test]
    fn pieces_end_at_multiples() {
        let all: Vec<_> = pieces(5..2 * PIECE + 1).collect();
        assert_eq!(all, [5..PIECE, PIECE..2 * PIECE, 2 * PIECE..2 * PIECE + 1]);
        assert_eq!(pieces(3..3).count(), 0);
    }
}
