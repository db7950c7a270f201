//! Bytes that are written once from front to back, and read later: in memory as long as they are
//! few, in a scratch file otherwise.

use crate::error::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where scratch files are made. They have no name, so nothing of them stays.
#[derive(Clone, Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.0
    }

    /// A new scratch file.
    pub(crate) fn file(&self) -> Result<File> {
        tempfile::tempfile_in(&self.0).map_err(|e| self.error("make", e))
    }

    pub(crate) fn write(&self, file: &File, data: &[u8], at: u64) -> Result<()> {
        file.write_all_at(data, at).map_err(|e| self.error("write", e))
    }

    pub(crate) fn read(&self, file: &File, data: &mut [u8], at: u64) -> Result<()> {
        file.read_exact_at(data, at).map_err(|e| self.error("read", e))
    }

    /// An error of a scratch file.
    pub(crate) fn error(&self, op: &'static str, source: io::Error) -> Error {
        Error::Scratch { op, directory: self.0.clone(), source }
    }
}

/// Bytes, one behind the other.
#[derive(Debug)]
pub(crate) struct Spool {
    scratch: Scratch,
    /// The last bytes.
    tail: Vec<u8>,
    /// The bytes before `tail`: their number, and the file that has them.
    written: u64,
    file: Option<File>,
    limit: usize,
}

impl Spool {
    /// A spool that keeps up to `limit` bytes in memory.
    pub(crate) fn new(scratch: &Scratch, limit: usize) -> Self {
        Self { scratch: scratch.clone(), tail: Vec::new(), written: 0, file: None, limit }
    }

    /// Bytes in it.
    pub(crate) fn len(&self) -> u64 {
        self.written + self.tail.len() as u64
    }

    /// Appends `data`, and tells where it begins.
    pub(crate) fn append(&mut self, data: &[u8]) -> Result<u64> {
        if self.tail.len() + data.len() > self.limit && !self.tail.is_empty() {
            let file = match &self.file {
                Some(file) => file,
                None => self.file.insert(self.scratch.file()?),
            };
            self.scratch.write(file, &self.tail, self.written)?;
            self.written += self.tail.len() as u64;
            self.tail.clear();
        }
        let at = self.len();
        self.tail.extend_from_slice(data);
        Ok(at)
    }

    /// Fills `out` with the bytes from `at` on.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let in_file =
            usize::try_from(self.written.saturating_sub(at)).unwrap_or(usize::MAX).min(out.len());
        let (first, second) = out.split_at_mut(in_file);
        if !first.is_empty() {
            let file = self.file.as_ref().expect("what was written lies in a file");
            self.scratch.read(file, first, at)?;
        }
        if !second.is_empty() {
            let from = usize::try_from(at + first.len() as u64 - self.written).expect("in memory");
            second.copy_from_slice(&self.tail[from..from + second.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_from_memory_and_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for limit in [1, 10, 1000] {
            let mut spool = Spool::new(&Scratch::new(dir.path()), limit);
            let mut all = Vec::new();
            for n in 0..40u8 {
                let piece = vec![n; usize::from(n % 7)];
                assert_eq!(spool.append(&piece).unwrap(), all.len() as u64);
                all.extend(piece);
            }
            assert_eq!(spool.len(), all.len() as u64);
            for at in 0..all.len() {
                let mut out = vec![0xff; (all.len() - at).min(23)];
                spool.read(at as u64, &mut out).unwrap();
                assert_eq!(out, all[at..at + out.len()], "limit {limit}, from {at}");
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
