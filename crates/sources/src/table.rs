//! Values by number, more than memory holds.
//!
//! A [`Table`] answers what was noted last under a number. Up to a budget it is a hash map. Beyond
//! it, what the map has goes to a *run*: sorted, in a temporary file without a name. In memory stay
//! the first number of each block of a run, and the block that was read last. A question reads at
//! most one block of each run, from the newest run to the oldest one. So that there are few of
//! them, runs are merged to one before there are too many.
//!
//! Numbers that are asked for in an order near that in which they were noted are found in blocks
//! that are in memory. Trees of links are such: the names of a copy come in the order of the first
//! names.

use crate::spill::named;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of a block, if no single value is larger.
const BLOCK: usize = 8 << 10;
/// So many runs become one.
const MOST_RUNS: usize = 8;
/// Bytes before a value in a run: its number and its length.
const HEAD: usize = 16 + 4;
/// What a value costs in the map beside its bytes: its place in a map that has just grown, and what
/// the allocator adds.
const OVERHEAD: usize = 112;

/// Notes values by number.
#[derive(Debug)]
pub struct Table {
    budget: usize,
    dir: PathBuf,
    memory: HashMap<u128, Box<[u8]>>,
    /// Bytes that the map takes, about.
    used: usize,
    /// From the oldest to the newest.
    runs: Vec<Run>,
}

impl Table {
    /// A table that uses about `budget` bytes of memory, and temporary files in `dir`.
    #[must_use]
    pub fn new(budget: usize, dir: &Path) -> Self {
        let (memory, runs) = (HashMap::new(), Vec::new());
        Self { budget, dir: dir.to_owned(), memory, used: 0, runs }
    }

    /// Notes the value of a number. What was noted before is forgotten.
    ///
    /// # Errors
    /// The temporary file cannot be made, written or read. `InvalidInput` for a value of 4 GiB.
    pub fn insert(&mut self, number: u128, value: &[u8]) -> io::Result<()> {
        if u32::try_from(value.len()).is_err() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a value of 4 GiB"));
        }
        if self.used + OVERHEAD + value.len() > self.budget && !self.memory.is_empty() {
            self.spill().map_err(|e| named(&self.dir, e))?;
        }
        self.used += OVERHEAD + value.len();
        if let Some(before) = self.memory.insert(number, value.into()) {
            self.used -= OVERHEAD + before.len();
        }
        Ok(())
    }

    /// The value of a number.
    ///
    /// # Errors
    /// The temporary file cannot be read.
    pub fn get(&mut self, number: u128) -> io::Result<Option<Vec<u8>>> {
        if let Some(value) = self.memory.get(&number) {
            return Ok(Some(value.to_vec()));
        }
        for run in self.runs.iter_mut().rev() {
            if let Some(value) = run.get(number).map_err(|e| named(&self.dir, e))? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.memory = HashMap::new();
        self.used = 0;
        self.runs.clear();
    }

    /// Moves what is in memory to a run.
    fn spill(&mut self) -> io::Result<()> {
        let mut sorted: Vec<_> = self.memory.drain().collect();
        self.used = 0;
        sorted.sort_unstable_by_key(|(number, _)| *number);
        let mut run = NewRun::new(&self.dir)?;
        for (number, value) in sorted {
            run.push(number, &value)?;
        }
        self.runs.push(run.finish()?);
        if self.runs.len() > MOST_RUNS {
            let merged = merge(&self.runs, &self.dir)?;
            self.runs = Vec::from([merged]);
        }
        Ok(())
    }
}

/// One run of several. Of equal numbers, the newest run has the value that counts.
fn merge(runs: &[Run], dir: &Path) -> io::Result<Run> {
    let mut readers: Vec<_> = runs.iter().map(RunReader::new).collect();
    let mut merged = NewRun::new(dir)?;
    loop {
        let mut least: Option<(u128, &[u8])> = None;
        for reader in readers.iter_mut().rev() {
            if let Some((number, value)) = reader.peek()?
                && least.is_none_or(|(l, _)| number < l)
            {
                least = Some((number, value));
            }
        }
        let Some((number, value)) = least else { return merged.finish() };
        merged.push(number, value)?;
        readers.iter_mut().for_each(|reader| reader.pass(number));
    }
}

/// Values in the order of their numbers, in a file without a name.
#[derive(Debug)]
struct Run {
    file: File,
    /// The first number of each block, and where the block begins.
    blocks: Vec<(u128, u64)>,
    end: u64,
    /// The block that was read last.
    last_read: Option<(usize, Vec<u8>)>,
}

impl Run {
    fn get(&mut self, number: u128) -> io::Result<Option<Vec<u8>>> {
        let next = self.blocks.partition_point(|(first, _)| *first <= number);
        let Some(block) = next.checked_sub(1) else { return Ok(None) };
        if self.last_read.as_ref().is_none_or(|(read, _)| *read != block) {
            self.last_read = Some((block, self.read(block)?));
        }
        let (_, bytes) = self.last_read.as_ref().expect("it was read");
        let mut rest = &bytes[..];
        while let Some((at, value, after)) = split(rest) {
            if at >= number {
                return Ok((at == number).then(|| value.to_vec()));
            }
            rest = after;
        }
        Ok(None)
    }

    fn read(&self, block: usize) -> io::Result<Vec<u8>> {
        let (_, start) = self.blocks[block];
        let end = self.blocks.get(block + 1).map_or(self.end, |(_, at)| *at);
        let mut bytes = vec![0; usize::try_from(end - start).expect("a block was in memory")];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes)
    }
}

/// A run that is being written.
struct NewRun {
    run: Run,
    /// The block at its end, and the first number in it.
    block: Vec<u8>,
    first: u128,
}

impl NewRun {
    fn new(dir: &Path) -> io::Result<Self> {
        let (file, blocks) = (tempfile::tempfile_in(dir)?, Vec::new());
        let run = Run { file, blocks, end: 0, last_read: None };
        Ok(Self { run, block: Vec::with_capacity(BLOCK), first: 0 })
    }

    fn push(&mut self, number: u128, value: &[u8]) -> io::Result<()> {
        if self.block.len() + HEAD + value.len() > BLOCK {
            self.write()?;
        }
        if self.block.is_empty() {
            self.first = number;
        }
        let len = u32::try_from(value.len()).expect("it was noted before");
        self.block.extend_from_slice(&number.to_le_bytes());
        self.block.extend_from_slice(&len.to_le_bytes());
        self.block.extend_from_slice(value);
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        if !self.block.is_empty() {
            self.run.file.write_all_at(&self.block, self.run.end)?;
            self.run.blocks.push((self.first, self.run.end));
            self.run.end += self.block.len() as u64;
            self.block.clear();
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<Run> {
        self.write()?;
        Ok(self.run)
    }
}

/// Reads a run from its first value on.
struct RunReader<'a> {
    run: &'a Run,
    next_block: usize,
    bytes: Vec<u8>,
    used: usize,
}

impl<'a> RunReader<'a> {
    fn new(run: &'a Run) -> Self {
        Self { run, next_block: 0, bytes: Vec::new(), used: 0 }
    }

    /// The next value and its number.
    fn peek(&mut self) -> io::Result<Option<(u128, &[u8])>> {
        if self.used == self.bytes.len() {
            if self.next_block == self.run.blocks.len() {
                return Ok(None);
            }
            self.bytes = self.run.read(self.next_block)?;
            (self.next_block, self.used) = (self.next_block + 1, 0);
        }
        Ok(split(&self.bytes[self.used..]).map(|(number, value, _)| (number, value)))
    }

    /// Goes on behind a number that is the next one or lies before that.
    fn pass(&mut self, passed: u128) {
        if let Some((number, value, _)) = split(&self.bytes[self.used..])
            && number == passed
        {
            self.used += HEAD + value.len();
        }
    }
}

/// The first value of a block, its number before it, and what follows. `None` at the block's end.
fn split(bytes: &[u8]) -> Option<(u128, &[u8], &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let (value, rest) = rest.split_at(u32::from_le_bytes(*len) as usize);
    Some((u128::from_le_bytes(*number), value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_last_value_counts(
            steps in prop::collection::vec(
                (0u128..60, prop::collection::vec(any::<u8>(), 0..30), any::<bool>()),
                0..500,
            ),
            budget in prop_oneof![Just(0usize), 1..4000usize, Just(1 << 20)],
        ) {
            let dir = tempfile::tempdir().unwrap();
            let (mut table, mut model) = (Table::new(budget, dir.path()), HashMap::new());
            for (number, value, asks) in steps {
                // Near and far numbers.
                let number = if number < 30 { number } else { u128::MAX - number };
                if asks {
                    prop_assert_eq!(table.get(number).unwrap(), model.get(&number).cloned());
                } else {
                    table.insert(number, &value).unwrap();
                    model.insert(number, value);
                }
                prop_assert!(table.runs.len() <= MOST_RUNS);
            }
            for number in (0..30).chain(u128::MAX - 60..=u128::MAX - 30) {
                prop_assert_eq!(table.get(number).unwrap(), model.get(&number).cloned());
            }
            prop_assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a name");
        }
    }

    #[test]
    fn many_values_take_little_memory() {
        const COUNT: u128 = 300_000;
        let dir = tempfile::tempdir().unwrap();
        let budget = 1 << 20;
        let mut table = Table::new(budget, dir.path());
        let number = |n: u128| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % COUNT.pow(3);
        for n in 0..COUNT {
            assert_eq!(table.get(number(n)).unwrap(), None);
            table.insert(number(n), &n.to_le_bytes()).unwrap();
            assert!(table.used <= budget);
        }
        let blocks: usize = table.runs.iter().map(|run| run.blocks.capacity()).sum();
        assert!(blocks * size_of::<(u128, u64)>() < budget / 8, "{blocks} blocks");
        for n in (0..COUNT).step_by(7) {
            assert_eq!(table.get(number(n)).unwrap().unwrap(), n.to_le_bytes());
        }
        table.clear();
        assert_eq!(table.get(number(0)).unwrap(), None);
    }

    #[test]
    fn a_value_may_be_larger_than_a_block() {
        let dir = tempfile::tempdir().unwrap();
        let mut table = Table::new(0, dir.path());
        for n in 0..20u8 {
            table.insert(n.into(), &vec![n; usize::from(n) * 5000]).unwrap();
        }
        for n in 0..20u8 {
            assert_eq!(table.get(n.into()).unwrap().unwrap(), vec![n; usize::from(n) * 5000]);
        }
    }

    #[test]
    fn an_error_names_the_directory() {
        let mut table = Table::new(0, Path::new("/nowhere/at all"));
        table.insert(1, b"").unwrap();
        let error = table.insert(2, b"").unwrap_err();
        assert!(error.to_string().contains("/nowhere/at all"), "{error}");
    }
}
