//! Bytes that do not change: a file, or a part of one.
//!
//! An archive is read twice: once for its members, once for their contents. If the file changed in
//! between, an offset would mean something else. So [`Bytes`] remembers size and times of the file,
//! and each read compares them. A file that was unpacked to a temporary one cannot change.

use crate::Contents;
use crate::error::{Error, Result};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// What changes when a file is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) inode: u64,
    pub(crate) size: u64,
    pub(crate) modified: (i64, i64),
    pub(crate) changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        })
    }

    /// An error if the file is not as it was.
    pub(crate) fn check(&self, file: &File, name: &str) -> io::Result<()> {
        if Self::of(file)? == *self { Ok(()) } else { Err(has_changed(name)) }
    }
}

/// The error for a file that is not as it was.
pub(crate) fn has_changed(name: &str) -> io::Error {
    let what =
        format!("{name}: the file changed while it was read; build again when it is at rest");
    io::Error::other(what)
}

/// A part of a file that does not change.
#[derive(Clone, Debug)]
pub(crate) struct Bytes {
    name: Arc<str>,
    file: Arc<File>,
    range: Range<u64>,
    stamp: Option<Stamp>,
}

impl Bytes {
    /// A regular file.
    pub(crate) fn open(path: &Path, name: &str) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(name))?;
        Self::of_file(file, name)
    }

    /// An open regular file.
    pub(crate) fn of_file(file: File, name: &str) -> Result<Self> {
        let stamp = Stamp::of(&file).map_err(Error::io(name))?;
        let (file, range) = (Arc::new(file), 0..stamp.size);
        Ok(Self { name: name.into(), file, range, stamp: Some(stamp) })
    }

    /// A file of our own, which nobody else has.
    pub(crate) fn own(file: File, len: u64, name: &str) -> Self {
        Self { name: name.into(), file: Arc::new(file), range: 0..len, stamp: None }
    }

    /// A part of these bytes, with a name of its own.
    pub(crate) fn part(&self, range: Range<u64>, name: &str) -> Self {
        let start = self.range.start + range.start;
        let range = start..self.range.start + range.end;
        assert!(range.end <= self.range.end, "a part lies within the whole");
        Self { name: name.into(), range, ..self.clone() }
    }

    /// The same bytes under another name.
    pub(crate) fn named(&self, name: &str) -> Self {
        self.part(0..self.len(), name)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// What they are called in messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Fills `buf` from byte `at`.
    pub(crate) fn read_exact_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let left = self.len().checked_sub(at);
        if left.is_none_or(|left| left < buf.len() as u64) {
            let what = format!("{}: it ends before byte {}", self.name, at + buf.len() as u64);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        }
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", self.name));
        self.file.read_exact_at(buf, self.range.start + at).map_err(named)?;
        match &self.stamp {
            Some(stamp) => stamp.check(&self.file, &self.name),
            None => Ok(()),
        }
    }

    /// All of them, if there are at most `most`.
    pub(crate) fn read_all(&self, most: u64) -> Result<Vec<u8>> {
        if self.len() > most {
            let what = format!("{} bytes where at most {most} are expected", self.len());
            return Err(Error::damaged(&self.name, what));
        }
        let len = usize::try_from(self.len()).expect("it is at most `most`");
        let mut all = vec![0; len];
        self.read_exact_at(&mut all, 0).map_err(Error::io(self.name()))?;
        Ok(all)
    }

    /// Reads them from the first to the last.
    pub(crate) fn reader(&self) -> BytesReader {
        BytesReader { bytes: self.clone(), at: 0 }
    }
}

/// [`Bytes`] as a stream.
#[derive(Debug)]
pub(crate) struct BytesReader {
    bytes: Bytes,
    at: u64,
}

impl io::Read for BytesReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.bytes.len() - self.at;
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        self.bytes.read_exact_at(&mut buf[..len], self.at)?;
        self.at += len as u64;
        Ok(len)
    }
}

/// Data of a file that lies in an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Where it is in the file.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Where it is in the archive.
    pub(crate) at: u64,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// A file whose data lies in segments of an archive, by rising offset. Between them are holes.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) bytes: Bytes,
    pub(crate) size: u64,
    pub(crate) segments: Vec<Segment>,
}

impl Contents for Mapped {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        Ok(self.segments.iter().map(|segment| segment.start..segment.end()).collect())
    }

    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|&end| end <= self.size);
        let Some(end) = end else {
            let what = format!("{}: a file in it ends before that byte", self.bytes.name());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        };
        let mut at = offset;
        let first = self.segments.partition_point(|segment| segment.end() <= offset);
        let place = |at: u64| usize::try_from(at - offset).expect("it is within `buf`");
        for segment in self.segments[first..].iter().take_while(|s| s.start < end) {
            let from = segment.start.max(offset);
            let to = segment.end().min(end);
            buf[place(at)..place(from)].fill(0);
            let part = &mut buf[place(from)..place(to)];
            self.bytes.read_exact_at(part, segment.at + (from - segment.start))?;
            at = to;
        }
        buf[place(at)..].fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn holes_read_as_zeros() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let bytes = Bytes::own(file, 10, "test");
        let segments =
            vec![Segment { start: 2, len: 3, at: 4 }, Segment { start: 6, len: 2, at: 0 }];
        let mut mapped = Mapped { bytes, size: 10, segments };
        let whole = b"\0\x00456\x0001\0\0";
        for start in 0..10 {
            for end in start..=10 {
                let mut buf = vec![9; end - start];
                mapped.read_exact_at(&mut buf, start as u64).unwrap();
                assert_eq!(buf, whole[start..end]);
            }
        }
        assert_eq!(mapped.data().unwrap(), [2..5, 6..8]);
        assert!(mapped.read_exact_at(&mut [0; 2], 9).is_err());
    }

    #[test]
    fn a_change_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "before").unwrap();
        let bytes = Bytes::open(&path, "file").unwrap();
        bytes.read_exact_at(&mut [0; 6], 0).unwrap();
        std::fs::write(&path, "before, and more").unwrap();
        let error = bytes.read_exact_at(&mut [0; 6], 0).unwrap_err();
        assert!(error.to_string().contains("changed"), "{error}");
    }
}
