//! Changes of a subvolume that are not in its tree yet.
//!
//! Replaying looks again and again at what it has changed before, because a name that one inode
//! gives up may become the next one's. An [`Overlay`] is the tree with the changes so far on top.
//! None of them is in the tree before all of them are.

use crate::error::Result;
use crate::tree::Version;
use larder_format::Key;
use std::collections::BTreeMap;

/// A subvolume's tree and changes to its items.
#[derive(Debug)]
pub(super) struct Overlay {
    pub(super) base: Version,
    changes: BTreeMap<Key, Option<Vec<u8>>>,
}

impl Overlay {
    pub(super) fn new(base: Version) -> Self {
        Self { base, changes: BTreeMap::new() }
    }
    /// An item.
    pub(super) fn get(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        match self.changes.get(key) {
            Some(now) => Ok(now.clone()),
            None => Ok(self.base.get(key)?.map(|item| item.data().to_vec())),
        }
    }
    /// Sets an item.
    pub(super) fn set(&mut self, key: Key, data: Vec<u8>) {
        self.changes.insert(key, Some(data));
    }
    /// Removes an item, if it is there.
    pub(super) fn remove(&mut self, key: Key) {
        self.changes.insert(key, None);
    }
    /// Sets an item, or removes it if it became empty.
    pub(super) fn set_list(&mut self, key: Key, data: Vec<u8>) {
        self.changes.insert(key, (!data.is_empty()).then_some(data));
    }
    /// The first item in `from..=to`.
    pub(super) fn first(&self, from: Key, to: Key) -> Result<Option<(Key, Vec<u8>)>> {
        let mine = self.changes.range(from..=to).find_map(|(k, now)| Some((*k, now.as_ref()?)));
        let mut next = Some(from);
        let base = loop {
            let Some(at) = next else { break None };
            let Some(item) = self.base.at_or_after(&at)?.filter(|i| i.key <= to) else {
                break None;
            };
            if !self.changes.contains_key(&item.key) {
                break Some(item);
            }
            next = item.key.successor();
        };
        Ok(match (mine, base) {
            (Some((key, _)), Some(item)) if item.key < key => {
                Some((item.key, item.data().to_vec()))
            }
            (Some((key, data)), _) => Some((key, data.clone())),
            (None, Some(item)) => Some((item.key, item.data().to_vec())),
            (None, None) => None,
        })
    }
    /// The last item in `from..=to`.
    pub(super) fn last(&self, from: Key, to: Key) -> Result<Option<(Key, Vec<u8>)>> {
        let mine =
            self.changes.range(from..=to).rev().find_map(|(k, now)| Some((*k, now.as_ref()?)));
        let mut next = Some(to);
        let base = loop {
            let Some(at) = next else { break None };
            let Some(item) = self.base.at_or_before(&at)?.filter(|i| i.key >= from) else {
                break None;
            };
            if !self.changes.contains_key(&item.key) {
                break Some(item);
            }
            next = item.key.predecessor();
        };
        Ok(match (mine, base) {
            (Some((key, _)), Some(item)) if item.key > key => {
                Some((item.key, item.data().to_vec()))
            }
            (Some((key, data)), _) => Some((key, data.clone())),
            (None, Some(item)) => Some((item.key, item.data().to_vec())),
            (None, None) => None,
        })
    }
    /// Calls `each` for the items in `from..=to` in order. `each` may change them.
    pub(super) fn each(
        &mut self,
        from: Key,
        to: Key,
        mut each: impl FnMut(&mut Self, Key, Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let mut next = Some(from);
        while let Some(at) = next {
            let Some((key, data)) = self.first(at, to)? else { break };
            next = key.successor();
            each(self, key, data)?;
        }
        Ok(())
    }
    /// The changes, in order.
    pub(super) fn into_changes(self) -> BTreeMap<Key, Option<Vec<u8>>> {
        self.changes
    }
}
