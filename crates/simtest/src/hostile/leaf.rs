//! A leaf taken apart into items and put together again.
//!
//! Hidden here is the layout, so that a mutator can change keys, sizes and contents of items and
//! still give a leaf that the node checker reads to the end.

use larder_format::Key;
use larder_format::node::{HEADER_SIZE, Header, ITEM_SIZE, ItemHeader, NodeView};
use zerocopy::{FromBytes, IntoBytes};

/// A leaf's items: keys and data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf(pub Vec<(Key, Vec<u8>)>);

impl Leaf {
    /// The items of a block; what cannot be read is left out.
    #[must_use]
    pub fn parse(block: &[u8]) -> Self {
        let node = NodeView(block);
        let item = |slot| Some((node.key(slot)?, node.data(slot)?.to_vec()));
        Self((0..node.nritems().min(block.len() / ITEM_SIZE)).filter_map(item).collect())
    }
    /// Writes the items into a block, whose header keeps everything but the number of items. Says
    /// whether there was room.
    pub fn store(&self, block: &mut [u8]) -> bool {
        let data: usize = self.0.iter().map(|(_, d)| d.len()).sum();
        if HEADER_SIZE + self.0.len() * ITEM_SIZE + data > block.len() {
            return false;
        }
        block[HEADER_SIZE..].fill(0);
        let mut end = block.len();
        for (slot, (key, data)) in self.0.iter().enumerate() {
            let start = end - data.len();
            block[start..end].copy_from_slice(data);
            let header = ItemHeader {
                key: (*key).into(),
                offset: ((start - HEADER_SIZE) as u32).into(),
                size: (data.len() as u32).into(),
            };
            let at = HEADER_SIZE + slot * ITEM_SIZE;
            block[at..at + ITEM_SIZE].copy_from_slice(header.as_bytes());
            end = start;
        }
        let (header, _) = Header::mut_from_prefix(block).expect("longer than a header");
        header.nritems.set(self.0.len() as u32);
        true
    }
    /// Puts the items in the order of their keys; of two with the same key the first stays.
    pub fn sort(&mut self) {
        self.0.sort_by_key(|(key, _)| *key);
        self.0.dedup_by_key(|(key, _)| *key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::seeds;

    #[test]
    fn leaves_are_put_together_as_they_were() {
        let survey = seeds::seed(0);
        for (i, _) in survey.blocks.iter().enumerate().filter(|(_, b)| b.level == 0) {
            let before = survey.bytes(i);
            let mut after = before.clone();
            let leaf = Leaf::parse(&before);
            assert!(leaf.store(&mut after));
            assert_eq!(Leaf::parse(&after), leaf);
            assert_eq!(NodeView(&after).items().as_bytes(), NodeView(&before).items().as_bytes());
        }
    }
}
