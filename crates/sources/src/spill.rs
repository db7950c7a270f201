//! Sorting more records than memory holds.
//!
//! A [`Sorter`] takes records, each a key and a value, in any order. [`Sorter::finish`] gives them
//! back in the order of their keys, compared as bytes. Records of equal keys stay in the order in
//! which they came. Hidden here is where the records are meanwhile. Up to a budget they are in
//! memory. Beyond it they go, sorted, to a temporary file that has no name, so nothing of it
//! outlives the process. Such a piece is a *run*, and the runs are merged while they are read.
//!
//! A [`Sorted`] never changes. It can be read any number of times, also by several threads.
//! Writing takes memory up to the budget, and reading takes less. The one exception is a single
//! record that is larger than the budget.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A key and its value.
pub type Record = (Vec<u8>, Vec<u8>);

/// Bytes before each record: the length of its key, and that of its value.
const HEAD: usize = 8;
/// What a record in memory costs beside its bytes: its head, and where it begins.
const OVERHEAD: usize = HEAD + size_of::<usize>();
/// More than this is never sorted at once, whatever the budget: it takes about a second, and
/// nothing can end it meanwhile.
const MOST_IN_MEMORY: usize = 256 << 20;
/// A run is read in pieces of about this size, if the budget allows.
const PIECE: usize = 64 << 10;
/// The least that a run is read in.
const SMALLEST_PIECE: usize = 4 << 10;
/// More runs are never merged at once.
const MOST_RUNS: usize = 512;

/// Takes records in any order.
#[derive(Debug)]
pub struct Sorter {
    budget: usize,
    dir: PathBuf,
    memory: Memory,
    runs: Option<Runs>,
    count: u64,
}

impl Sorter {
    /// A sorter that uses about `budget` bytes of memory, at most 256 MiB, and temporary files in
    /// `dir`.
    #[must_use]
    pub fn new(budget: usize, dir: &Path) -> Self {
        let (memory, runs, budget) = (Memory::default(), None, budget.min(MOST_IN_MEMORY));
        Self { budget, dir: dir.to_owned(), memory, runs, count: 0 }
    }

    /// Adds a record.
    ///
    /// # Errors
    /// The temporary file cannot be made or written. `InvalidInput` for a record of 4 GiB.
    pub fn push(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        if !self.memory.is_empty() && self.memory.cost_with(key, value) > self.budget {
            self.spill()?;
        }
        self.count += 1;
        self.memory.push(key, value, self.budget)
    }

    /// Records that have come.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// No more records come.
    ///
    /// # Errors
    /// The temporary file cannot be written or read.
    pub fn finish(mut self) -> io::Result<Sorted> {
        let count = self.count;
        if self.runs.is_none() {
            self.memory.sort();
            return Ok(Sorted { count, place: Place::Memory(Arc::new(self.memory)) });
        }
        if !self.memory.is_empty() {
            self.spill()?;
        }
        self.memory = Memory::default();
        let runs = self.runs.take().expect("there are runs");
        Ok(Sorted { count, place: Place::File(Arc::new(self.merge_down(runs)?)) })
    }

    /// Moves what is in memory to a run.
    fn spill(&mut self) -> io::Result<()> {
        let runs = match &mut self.runs {
            Some(runs) => runs,
            None => self.runs.insert(Runs::new(&self.dir)?),
        };
        self.memory.sort();
        let records = (0..self.memory.index.len()).map(|n| Ok(self.memory.bytes_of(n)));
        runs.append(records).map_err(|e| named(&self.dir, e))?;
        self.memory.clear();
        Ok(())
    }

    /// As many runs as can be read at once within the budget.
    fn fan_in(&self) -> usize {
        (self.budget / SMALLEST_PIECE).clamp(2, MOST_RUNS)
    }

    /// Merges runs to larger ones until they can be read at once.
    fn merge_down(&self, mut runs: Runs) -> io::Result<Runs> {
        let fan_in = self.fan_in();
        while runs.places.len() > fan_in {
            let mut merged = Runs::new(&self.dir)?;
            for places in runs.places.chunks(fan_in) {
                let records = Merge::new(&runs.file, places, self.piece(places.len()))?;
                let records = records.map(|r| r.map(|(key, value)| framed(&key, &value)));
                merged.append(records).map_err(|e| named(&self.dir, e))?;
            }
            runs = merged;
        }
        runs.piece = self.piece(runs.places.len());
        Ok(runs)
    }

    /// The size of pieces in which each of `runs` runs is read.
    fn piece(&self, runs: usize) -> usize {
        (self.budget / runs.max(1)).clamp(SMALLEST_PIECE, PIECE)
    }
}

/// Records in the order of their keys.
#[derive(Clone, Debug)]
pub struct Sorted {
    count: u64,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Memory(Arc<Memory>),
    File(Arc<Runs>),
}

impl Sorted {
    /// The records from the first.
    ///
    /// # Errors
    /// The temporary file cannot be read.
    pub fn records(&self) -> io::Result<Records> {
        Ok(Records(match &self.place {
            Place::Memory(memory) => From::Memory(Arc::clone(memory), 0),
            Place::File(runs) => From::File(Merge::new(&runs.file, &runs.places, runs.piece)?),
        }))
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// Records one after the other. After an error it ends.
#[derive(Debug)]
pub struct Records(From);

#[derive(Debug)]
enum From {
    Memory(Arc<Memory>, usize),
    File(Merge),
}

impl Iterator for Records {
    type Item = io::Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            From::Memory(memory, next) => {
                let (key, value) = memory.get(*next)?;
                *next += 1;
                Some(Ok((key.to_vec(), value.to_vec())))
            }
            From::File(merge) => merge.next(),
        }
    }
}

/// Records in memory: their bytes one after the other, and where each begins.
#[derive(Debug, Default)]
struct Memory {
    bytes: Vec<u8>,
    index: Vec<usize>,
}

impl Memory {
    fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    fn cost_with(&self, key: &[u8], value: &[u8]) -> usize {
        let index = self.index.len() * size_of::<usize>();
        self.bytes.len() + index + OVERHEAD + key.len() + value.len()
    }

    /// Adds a record. Grows by doubling, but not beyond `most` bytes unless it must.
    fn push(&mut self, key: &[u8], value: &[u8], most: usize) -> io::Result<()> {
        let head = head(key, value)?;
        let need = HEAD + key.len() + value.len();
        if self.bytes.capacity() - self.bytes.len() < need {
            let room = most.saturating_sub(self.bytes.len());
            self.bytes.reserve_exact(self.bytes.len().min(room).max(need));
        }
        self.index.push(self.bytes.len());
        self.bytes.extend_from_slice(&head);
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        Ok(())
    }

    fn get(&self, n: usize) -> Option<(&[u8], &[u8])> {
        let at = *self.index.get(n)?;
        Some(split(&self.bytes[at..]))
    }

    /// A record with its head.
    fn bytes_of(&self, n: usize) -> &[u8] {
        let at = self.index[n];
        let (key, value) = split(&self.bytes[at..]);
        &self.bytes[at..at + HEAD + key.len() + value.len()]
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        // Records that came earlier begin earlier.
        self.index.sort_unstable_by(|&a, &b| {
            split(&bytes[a..]).0.cmp(split(&bytes[b..]).0).then(a.cmp(&b))
        });
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.index.clear();
    }
}

/// Runs in a file without a name.
#[derive(Debug)]
struct Runs {
    file: Arc<File>,
    places: Vec<Range<u64>>,
    piece: usize,
}

impl Runs {
    fn new(dir: &Path) -> io::Result<Self> {
        let file = tempfile::tempfile_in(dir).map_err(|e| named(dir, e))?;
        Ok(Self { file: Arc::new(file), places: Vec::new(), piece: PIECE })
    }

    /// Adds a run. Its records come with their heads.
    fn append<T: AsRef<[u8]>>(
        &mut self,
        records: impl Iterator<Item = io::Result<T>>,
    ) -> io::Result<()> {
        let start = self.places.last().map_or(0, |place| place.end);
        let mut end = start;
        let mut out = BufWriter::with_capacity(PIECE, &*self.file);
        for record in records {
            let record = record?;
            out.write_all(record.as_ref())?;
            end += record.as_ref().len() as u64;
        }
        out.flush()?;
        self.places.push(start..end);
        Ok(())
    }
}

/// Several runs, read as one. Of equal keys the earlier run has the earlier records.
#[derive(Debug)]
struct Merge {
    runs: Vec<RunReader>,
    heads: BinaryHeap<Head>,
    failed: bool,
}

impl Merge {
    fn new(file: &Arc<File>, places: &[Range<u64>], piece: usize) -> io::Result<Self> {
        let mut merge = Self { runs: Vec::new(), heads: BinaryHeap::new(), failed: false };
        for (number, place) in places.iter().enumerate() {
            merge.runs.push(RunReader::new(file, place.clone(), piece));
            merge.refill(number)?;
        }
        Ok(merge)
    }

    /// Takes the next record of a run.
    fn refill(&mut self, run: usize) -> io::Result<()> {
        if let Some((key, value)) = self.runs[run].next_record()? {
            self.heads.push(Head { key, value, run });
        }
        Ok(())
    }
}

impl Iterator for Merge {
    type Item = io::Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let head = self.heads.pop()?;
        if let Err(e) = self.refill(head.run) {
            self.failed = true;
            return Some(Err(e));
        }
        Some(Ok((head.key, head.value)))
    }
}

/// The first record of a run that has not been given out. The least one is the greatest in the
/// order of the heap.
#[derive(Debug)]
struct Head {
    key: Vec<u8>,
    value: Vec<u8>,
    run: usize,
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> Ordering {
        (&other.key, other.run).cmp(&(&self.key, self.run))
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Head {}

/// Reads one run in pieces.
#[derive(Debug)]
struct RunReader {
    file: Arc<File>,
    /// What has not been read.
    rest: Range<u64>,
    piece: usize,
    /// What was read, from `used` on not given out.
    buffer: Vec<u8>,
    used: usize,
}

impl RunReader {
    fn new(file: &Arc<File>, rest: Range<u64>, piece: usize) -> Self {
        Self { file: Arc::clone(file), rest, piece, buffer: Vec::new(), used: 0 }
    }

    fn next_record(&mut self) -> io::Result<Option<Record>> {
        if self.rest.is_empty() && self.used == self.buffer.len() {
            return Ok(None);
        }
        self.have(HEAD)?;
        let (key, value) = lengths(&self.buffer[self.used..]);
        self.have(HEAD + key + value)?;
        let record = &self.buffer[self.used + HEAD..][..key + value];
        let (key, value) = (record[..key].to_vec(), record[key..].to_vec());
        self.used += HEAD + key.len() + value.len();
        Ok(Some((key, value)))
    }

    /// Reads until `bytes` bytes are there that were not given out.
    fn have(&mut self, bytes: usize) -> io::Result<()> {
        let there = self.buffer.len() - self.used;
        if there >= bytes {
            return Ok(());
        }
        self.buffer.drain(..self.used);
        self.used = 0;
        let left = self.rest.end - self.rest.start;
        let wanted = ((bytes - there).max(self.piece) as u64).min(left);
        if there as u64 + wanted < bytes as u64 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a run ends in a record"));
        }
        self.buffer.resize(there + usize::try_from(wanted).expect("it fits memory"), 0);
        self.file.read_exact_at(&mut self.buffer[there..], self.rest.start)?;
        self.rest.start += wanted;
        Ok(())
    }
}

fn head(key: &[u8], value: &[u8]) -> io::Result<[u8; HEAD]> {
    let length = |bytes: &[u8]| {
        u32::try_from(bytes.len())
            .map(u32::to_le_bytes)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a record of 4 GiB"))
    };
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&length(key)?);
    head[4..].copy_from_slice(&length(value)?);
    Ok(head)
}

/// The lengths of the key and the value of a record that begins with its head.
fn lengths(bytes: &[u8]) -> (usize, usize) {
    let length =
        |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    (length(0), length(4))
}

/// Key and value of the record that `bytes` begin with.
fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    let (key, value) = lengths(bytes);
    bytes[HEAD..HEAD + key + value].split_at(key)
}

/// A record with its head. It came through [`head`] before, so its lengths fit.
fn framed(key: &[u8], value: &[u8]) -> Vec<u8> {
    let head = head(key, value).expect("the record was taken before");
    [&head[..], key, value].concat()
}

/// Says in which directory a temporary file failed.
pub(crate) fn named(dir: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("a temporary file in {}: {error}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sorted(budget: usize, records: &[Record]) -> Vec<Record> {
        let dir = tempfile::tempdir().unwrap();
        let mut sorter = Sorter::new(budget, dir.path());
        for (key, value) in records {
            sorter.push(key, value).unwrap();
        }
        let sorted = sorter.finish().unwrap();
        assert_eq!(sorted.count(), records.len() as u64);
        let first: Vec<_> = sorted.records().unwrap().map(Result::unwrap).collect();
        let second: Vec<_> = sorted.records().unwrap().map(Result::unwrap).collect();
        assert_eq!(first, second);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a file has a name");
        first
    }

    proptest! {
        #[test]
        fn records_come_back_in_order(
            records in prop::collection::vec(
                (prop::collection::vec(0u8..4, 0..4), prop::collection::vec(any::<u8>(), 0..40)),
                0..300,
            ),
            budget in prop_oneof![Just(0usize), 1..2000usize, Just(1 << 20)],
        ) {
            let mut expected = records.clone();
            expected.sort_by(|a, b| a.0.cmp(&b.0));
            prop_assert_eq!(sorted(budget, &records), expected);
        }
    }

    #[test]
    fn runs_are_merged_more_than_once() {
        // A budget that allows two runs at once, and a hundred runs.
        let records: Vec<Record> = (0..1000u32)
            .map(|n| ((n * 7919 % 1000 / 4).to_be_bytes().to_vec(), n.to_le_bytes().to_vec()))
            .collect();
        let mut expected = records.clone();
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(sorted(300, &records), expected);
    }

    #[test]
    fn a_record_may_be_larger_than_the_budget() {
        let large = vec![7; 300_000];
        let records = [(b"b".to_vec(), large.clone()), (b"a".to_vec(), large.clone())];
        assert_eq!(
            sorted(1000, &records),
            [(b"a".to_vec(), large.clone()), (b"b".to_vec(), large)]
        );
    }

    #[test]
    fn a_million_records_take_little_memory() {
        let dir = tempfile::tempdir().unwrap();
        let budget = 1 << 20;
        let mut sorter = Sorter::new(budget, dir.path());
        for n in 0..1_000_000u32 {
            sorter.push(&n.wrapping_mul(2_654_435_761).to_be_bytes(), &n.to_le_bytes()).unwrap();
            assert!(sorter.memory.bytes.capacity() <= budget);
        }
        let sorted = sorter.finish().unwrap();
        let mut last = None;
        let mut count = 0;
        for record in sorted.records().unwrap() {
            let (key, value) = record.unwrap();
            let n = u32::from_le_bytes(value.try_into().unwrap());
            assert_eq!(key, n.wrapping_mul(2_654_435_761).to_be_bytes());
            assert!(last.is_none_or(|last| last < key));
            last = Some(key);
            count += 1;
        }
        assert_eq!(count, 1_000_000);
        let Place::File(runs) = &sorted.place else { panic!("nothing was spilled") };
        assert!(runs.places.len() * runs.piece <= budget);
    }

    #[test]
    fn an_error_names_the_directory() {
        let mut sorter = Sorter::new(0, Path::new("/nowhere/at all"));
        sorter.push(b"a", b"").unwrap();
        let error = sorter.push(b"b", b"").unwrap_err();
        assert!(error.to_string().contains("/nowhere/at all"), "{error}");
    }
}
