//! Records sorted by a key of fixed size, in bounded memory.
//!
//! Records come in any order. Those with equal keys keep the order in which they came. As long as
//! they fit the budget they stay in memory; beyond it, sorted runs go to a scratch file and are
//! merged when they are read. They can be read more than once, which the extent tree needs.
//!
//! What comes is nearly sorted already (inode numbers rise), which the standard library's stable
//! sort makes use of.

use crate::error::Result;
use crate::spool::Scratch;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;

/// What records are sorted by.
pub(crate) trait SortKey: Copy + Ord {
    /// Bytes in a run.
    const SIZE: usize;
    /// Appends its bytes.
    fn put(&self, out: &mut Vec<u8>);
    /// From its bytes.
    fn get(bytes: &[u8]) -> Self;
}

/// An item of a subvolume, and records from which items are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct ItemKey {
    /// Place of the subvolume in the list of subvolumes.
    pub(crate) tree: u32,
    pub(crate) inode: u64,
    pub(crate) kind: u8,
    pub(crate) offset: u64,
}

impl SortKey for ItemKey {
    const SIZE: usize = 21;
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.tree.to_le_bytes());
        out.extend_from_slice(&self.inode.to_le_bytes());
        out.push(self.kind);
        out.extend_from_slice(&self.offset.to_le_bytes());
    }
    fn get(bytes: &[u8]) -> Self {
        Self {
            tree: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
            inode: word(&bytes[4..]),
            kind: bytes[12],
            offset: word(&bytes[13..]),
        }
    }
}

/// A reference to a data extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct RefKey {
    pub(crate) start: u64,
    /// Number of the subvolume.
    pub(crate) root: u64,
    pub(crate) inode: u64,
    pub(crate) offset: u64,
}

impl SortKey for RefKey {
    const SIZE: usize = 32;
    fn put(&self, out: &mut Vec<u8>) {
        for v in [self.start, self.root, self.inode, self.offset] {
            out.extend_from_slice(&v.to_le_bytes());
        }
    }
    fn get(bytes: &[u8]) -> Self {
        Self {
            start: word(bytes),
            root: word(&bytes[8..]),
            inode: word(&bytes[16..]),
            offset: word(&bytes[24..]),
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

#[derive(Clone, Copy, Debug)]
struct Slot<K> {
    key: K,
    at: u32,
    len: u32,
}

/// Takes records.
#[derive(Debug)]
pub(crate) struct Sorter<K> {
    index: Vec<Slot<K>>,
    values: Vec<u8>,
    budget: usize,
    runs: Vec<(u64, u64)>,
    end: u64,
    file: Option<File>,
    scratch: Scratch,
}

/// A run is written and read in pieces of this size.
const PIECE: usize = 256 << 10;

impl<K: SortKey> Sorter<K> {
    /// A sorter that keeps about `budget` bytes in memory.
    pub(crate) fn new(scratch: &Scratch, budget: usize) -> Self {
        // Places in `values` are 32 bits.
        let budget = budget.clamp(1 << 10, 3 << 30);
        let (index, values, runs) = (Vec::new(), Vec::new(), Vec::new());
        Self { index, values, budget, runs, end: 0, file: None, scratch: scratch.clone() }
    }

    /// Takes a record whose value is the pieces of `value`, one behind the other.
    pub(crate) fn push(&mut self, key: K, value: &[&[u8]]) -> Result<()> {
        let len = value.iter().map(|v| v.len()).sum::<usize>();
        let slots = self.index.len() * size_of::<Slot<K>>();
        if slots + self.values.len() + len > self.budget && !self.index.is_empty() {
            self.write_run()?;
        }
        let at = u32::try_from(self.values.len()).expect("within the budget");
        value.iter().for_each(|v| self.values.extend_from_slice(v));
        self.index.push(Slot { key, at, len: u32::try_from(len).expect("a small value") });
        Ok(())
    }

    fn write_run(&mut self) -> Result<()> {
        self.index.sort_by_key(|s| s.key);
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(self.scratch.file()?),
        };
        let start = self.end;
        let mut out = Vec::with_capacity(PIECE + 4096);
        for slot in &self.index {
            slot.key.put(&mut out);
            out.extend_from_slice(&slot.len.to_le_bytes());
            out.extend_from_slice(&self.values[slot.at as usize..][..slot.len as usize]);
            if out.len() >= PIECE {
                self.scratch.write(file, &out, self.end)?;
                self.end += out.len() as u64;
                out.clear();
            }
        }
        self.scratch.write(file, &out, self.end)?;
        self.end += out.len() as u64;
        self.runs.push((start, self.end));
        self.index.clear();
        self.values.clear();
        Ok(())
    }

    /// All records have come.
    pub(crate) fn finish(mut self) -> Sorted<K> {
        self.index.sort_by_key(|s| s.key);
        Sorted(self)
    }
}

/// Records in their order.
#[derive(Debug)]
pub(crate) struct Sorted<K>(Sorter<K>);

impl<K: SortKey> Sorted<K> {
    /// From the first record on.
    pub(crate) fn read(&self) -> Result<Reader<'_, K>> {
        let mut runs = Vec::new();
        for (at, end) in &self.0.runs {
            runs.push(Run { at: *at, end: *end, buffer: Vec::new(), pos: 0, value: 0..0 });
        }
        let mut reader =
            Reader { of: &self.0, runs, heap: BinaryHeap::new(), memory: 0, last: None };
        for n in 0..reader.runs.len() {
            reader.advance_run(n)?;
        }
        reader.advance_memory();
        Ok(reader)
    }
}

#[derive(Debug)]
struct Run {
    /// What is to be read next, and where the run ends.
    at: u64,
    end: u64,
    buffer: Vec<u8>,
    pos: usize,
    /// Value of the record that is in the heap, in `buffer`.
    value: std::ops::Range<usize>,
}

/// Reads records in order.
#[derive(Debug)]
pub(crate) struct Reader<'a, K> {
    of: &'a Sorter<K>,
    runs: Vec<Run>,
    /// The next record of each run; what is in memory comes last among equals, as number
    /// `runs.len()`.
    heap: BinaryHeap<Reverse<(K, usize)>>,
    memory: usize,
    /// The run that the last record came from.
    last: Option<usize>,
}

impl<K: SortKey> Reader<'_, K> {
    /// The next record.
    pub(crate) fn next(&mut self) -> Result<Option<(K, &[u8])>> {
        if let Some(n) = self.last.take() {
            if n < self.runs.len() {
                self.advance_run(n)?;
            } else {
                self.advance_memory();
            }
        }
        let Some(Reverse((key, n))) = self.heap.pop() else { return Ok(None) };
        self.last = Some(n);
        let value = match self.runs.get(n) {
            Some(run) => &run.buffer[run.value.clone()],
            None => {
                let slot = &self.of.index[self.memory - 1];
                &self.of.values[slot.at as usize..][..slot.len as usize]
            }
        };
        Ok(Some((key, value)))
    }

    /// Key of the record that [`Self::next`] gives.
    pub(crate) fn peek(&mut self) -> Result<Option<K>> {
        if let Some(n) = self.last.take() {
            if n < self.runs.len() {
                self.advance_run(n)?;
            } else {
                self.advance_memory();
            }
        }
        Ok(self.heap.peek().map(|Reverse((key, _))| *key))
    }

    fn advance_memory(&mut self) {
        if let Some(slot) = self.of.index.get(self.memory) {
            self.heap.push(Reverse((slot.key, self.runs.len())));
            self.memory += 1;
        }
    }

    fn advance_run(&mut self, n: usize) -> Result<()> {
        let head = K::SIZE + 4;
        if !self.fill(n, head)? {
            return Ok(());
        }
        let run = &self.runs[n];
        let key = K::get(&run.buffer[run.pos..]);
        let len = &run.buffer[run.pos + K::SIZE..][..4];
        let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
        self.fill(n, head + len)?;
        let run = &mut self.runs[n];
        run.value = run.pos + head..run.pos + head + len;
        run.pos += head + len;
        self.heap.push(Reverse((key, n)));
        Ok(())
    }

    /// Sees to it that `want` bytes of a run are in its buffer; false at its end.
    fn fill(&mut self, n: usize, want: usize) -> Result<bool> {
        let run = &mut self.runs[n];
        while run.buffer.len() - run.pos < want {
            if run.at == run.end {
                return Ok(false);
            }
            run.buffer.drain(..run.pos);
            run.pos = 0;
            let more = PIECE.min(usize::try_from(run.end - run.at).unwrap_or(PIECE));
            let old = run.buffer.len();
            run.buffer.resize(old + more, 0);
            let file = self.of.file.as_ref().expect("runs lie in a file");
            self.of.scratch.read(file, &mut run.buffer[old..], run.at)?;
            run.at += more as u64;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u16) -> ItemKey {
        ItemKey { tree: u32::from(n % 3), inode: u64::from(n / 7), kind: 1, offset: 9 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn records_come_in_order_and_equal_keys_as_they_came(
            numbers in prop::collection::vec((any::<u16>(), 0usize..90), 0..600),
            budget in 1usize..40_000,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut sorter = Sorter::new(&Scratch::new(dir.path()), budget);
            let mut want = Vec::new();
            for (i, (n, len)) in numbers.iter().enumerate() {
                let mut value = i.to_le_bytes().to_vec();
                value.resize(8 + len, 7);
                sorter.push(key(*n), &[&value[..4], &value[4..]]).unwrap();
                want.push((key(*n), value));
            }
            want.sort_by_key(|(k, _)| *k);
            let sorted = sorter.finish();
            for _ in 0..2 {
                let mut reader = sorted.read().unwrap();
                for (k, value) in &want {
                    prop_assert_eq!(reader.peek().unwrap(), Some(*k));
                    prop_assert_eq!(reader.next().unwrap(), Some((*k, &value[..])));
                }
                prop_assert_eq!(reader.next().unwrap(), None);
            }
        }
    }

    #[test]
    fn keys_survive_a_run() {
        let mut out = Vec::new();
        let item = ItemKey { tree: 7, inode: 1 << 40, kind: 84, offset: u64::MAX };
        item.put(&mut out);
        assert_eq!((out.len(), ItemKey::get(&out)), (ItemKey::SIZE, item));
        out.clear();
        let r = RefKey { start: 1 << 50, root: 5, inode: 300, offset: u64::MAX - 4095 };
        r.put(&mut out);
        assert_eq!((out.len(), RefKey::get(&out)), (RefKey::SIZE, r));
    }
}
