//! The keys that records are sorted by, and sorters that know them.
//!
//! [`larder_sources::spill`] sorts by bytes, in bounded memory. Here are the two kinds of keys, as
//! bytes that sort as they do: big-endian. Records with equal keys keep the order in which they
//! came. They can be read more than once, which the extent tree needs.

use crate::error::Result;
use crate::spool::Scratch;
use larder_sources::spill;
use std::iter::Peekable;
use std::marker::PhantomData;

/// What records are sorted by.
pub(crate) trait SortKey: Copy + Ord {
    /// Its bytes, which sort as it does.
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
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.tree.to_be_bytes());
        out.extend_from_slice(&self.inode.to_be_bytes());
        out.push(self.kind);
        out.extend_from_slice(&self.offset.to_be_bytes());
    }
    fn get(bytes: &[u8]) -> Self {
        Self {
            tree: u32::from_be_bytes(bytes[..4].try_into().expect("four bytes")),
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
    fn put(&self, out: &mut Vec<u8>) {
        for v in [self.start, self.root, self.inode, self.offset] {
            out.extend_from_slice(&v.to_be_bytes());
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
    u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// Takes records.
#[derive(Debug)]
pub(crate) struct Sorter<K> {
    records: spill::Sorter,
    scratch: Scratch,
    key: Vec<u8>,
    of: PhantomData<K>,
}

impl<K: SortKey> Sorter<K> {
    /// A sorter that keeps about `budget` bytes in memory.
    pub(crate) fn new(scratch: &Scratch, budget: usize) -> Self {
        let records = spill::Sorter::new(budget, scratch.directory());
        Self { records, scratch: scratch.clone(), key: Vec::new(), of: PhantomData }
    }

    /// Takes a record.
    pub(crate) fn push(&mut self, key: K, value: &[u8]) -> Result<()> {
        self.key.clear();
        key.put(&mut self.key);
        self.records.push(&self.key, value).map_err(|e| self.scratch.error("write", e))
    }

    /// All records have come.
    pub(crate) fn finish(self) -> Result<Sorted<K>> {
        let records = self.records.finish().map_err(|e| self.scratch.error("write", e))?;
        Ok(Sorted { records, scratch: self.scratch, of: PhantomData })
    }
}

/// Records in their order.
#[derive(Debug)]
pub(crate) struct Sorted<K> {
    records: spill::Sorted,
    scratch: Scratch,
    of: PhantomData<K>,
}

impl<K: SortKey> Sorted<K> {
    /// From the first record on.
    pub(crate) fn read(&self) -> Result<Reader<'_, K>> {
        let records = self.records.records().map_err(|e| self.scratch.error("read", e))?;
        Ok(Reader { records: records.peekable(), scratch: &self.scratch, of: PhantomData })
    }
}

/// Reads records in order.
#[derive(Debug)]
pub(crate) struct Reader<'a, K> {
    records: Peekable<spill::Records>,
    scratch: &'a Scratch,
    of: PhantomData<K>,
}

impl<K: SortKey> Reader<'_, K> {
    /// The next record.
    pub(crate) fn next(&mut self) -> Result<Option<(K, Vec<u8>)>> {
        let record = self.records.next().transpose().map_err(|e| self.scratch.error("read", e))?;
        Ok(record.map(|(key, value)| (K::get(&key), value)))
    }

    /// Key of the record that [`Self::next`] gives.
    pub(crate) fn peek(&mut self) -> Result<Option<K>> {
        match self.records.peek() {
            None => Ok(None),
            Some(Ok((key, _))) => Ok(Some(K::get(key))),
            // The error itself comes out.
            Some(Err(_)) => self.next().map(|_| None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_sort_as_keys_do(a: [u64; 4], b: [u64; 4], near in any::<bool>()) {
            let b = if near { [a[0], b[1] % 3, b[2], b[3]] } else { b };
            let item = |v: [u64; 4]| ItemKey {
                tree: v[0] as u32,
                inode: v[1],
                kind: v[2] as u8,
                offset: v[3],
            };
            let [start, root, inode, offset] = a;
            let first = RefKey { start, root, inode, offset };
            let [start, root, inode, offset] = b;
            let second = RefKey { start, root, inode, offset };
            same_order(item(a), item(b));
            same_order(first, second);
        }
    }

    fn same_order<K: SortKey + std::fmt::Debug>(a: K, b: K) {
        let bytes = |k: K| {
            let mut out = Vec::new();
            k.put(&mut out);
            out
        };
        assert_eq!(bytes(a).cmp(&bytes(b)), a.cmp(&b));
        assert_eq!((K::get(&bytes(a)), K::get(&bytes(b))), (a, b));
    }
}
