//! The least that code needs to keep items in a tree: the seam between the logic of items and the
//! mechanics of trees.
//!
//! Code that knows how extent references, free space or checksums are laid out in items is written
//! against [`TreeOps`]. It can be tested on a `BTreeMap`; the committer passes real trees.

use crate::Result;
use larder_format::Key;

/// Keyed items, sorted by key. Keys are unique.
pub(crate) trait TreeOps {
    /// Most bytes that one item can have.
    fn max_item_size(&self) -> usize;
    /// Data of an item.
    fn get(&mut self, key: &Key) -> Result<Option<Vec<u8>>>;
    /// The item with the largest key that is not above `key`.
    fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>>;
    /// The item with the smallest key that is not below `key`.
    fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>>;
    /// Adds an item. It is an error (`Corrupt`) when the key is taken.
    fn insert(&mut self, key: &Key, data: &[u8]) -> Result<()>;
    /// Replaces the data of an item, of the same or another length. `Corrupt` when there is none.
    fn update(&mut self, key: &Key, data: &[u8]) -> Result<()>;
    /// Removes an item. `Corrupt` when there is none.
    fn delete(&mut self, key: &Key) -> Result<()>;
}

/// A tree for tests: a sorted map with the same limits.
#[cfg(test)]
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct MapTree(pub(crate) std::collections::BTreeMap<Key, Vec<u8>>);

#[cfg(test)]
impl TreeOps for MapTree {
    fn max_item_size(&self) -> usize {
        larder_format::node::max_item_size(16384)
    }
    fn get(&mut self, key: &Key) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }
    fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.0.range(..=key).next_back().map(|(k, v)| (*k, v.clone())))
    }
    fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.0.range(key..).next().map(|(k, v)| (*k, v.clone())))
    }
    fn insert(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        assert!(data.len() <= self.max_item_size());
        match self.0.insert(*key, data.to_vec()) {
            None => Ok(()),
            Some(_) => {
                Err(crate::Error::corrupt(crate::error::Place::default(), format!("{key} exists")))
            }
        }
    }
    fn update(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        assert!(data.len() <= self.max_item_size());
        match self.0.get_mut(key) {
            Some(v) => {
                data.clone_into(v);
                Ok(())
            }
            None => Err(crate::Error::corrupt(
                crate::error::Place::default(),
                format!("{key} is missing"),
            )),
        }
    }
    fn delete(&mut self, key: &Key) -> Result<()> {
        match self.0.remove(key) {
            Some(_) => Ok(()),
            None => Err(crate::Error::corrupt(
                crate::error::Place::default(),
                format!("{key} is missing"),
            )),
        }
    }
}
