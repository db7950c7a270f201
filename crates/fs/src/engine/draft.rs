//! Item changes that are worked out before a transaction is joined.
//!
//! An operation on names touches up to a dozen items, and several of these may be the same one
//! (names with equal hashes, several links in one directory). A [`Draft`] is a small overlay over
//! the subvolume's tree. The operation reads and changes items in it one after another, and
//! whatever is wrong — a full bucket, a missing entry — shows before anything has changed. Then all
//! of it is written in one edit, so a version has the whole operation or nothing of it. The `op`
//! locks keep the tree from changing in between. The edit still checks, before it writes the first
//! item, that each is as the draft found it, present or absent.

use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::transaction::Handle;
use crate::tree::{BlockSource, Editor};
use larder_format::node::max_item_size;
use larder_format::{FormatResult, Generation, Key, TreeId};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
struct Change {
    existed: bool,
    touched: bool,
    now: Option<Vec<u8>>,
}

/// Each change: key, whether the item exists already, new content if any.
pub(crate) type Changes = SmallVec<[(Key, bool, Option<Vec<u8>>); 8]>;

/// Where a draft reads what it has not changed.
pub(crate) type Source<'a> = &'a dyn Fn(&Key) -> Result<Option<Vec<u8>>>;

/// Changes of items of one subvolume's tree.
pub(crate) struct Draft<'a> {
    tree: TreeId,
    /// Transaction that the changes are for: goes into the items.
    pub(crate) generation: Generation,
    /// Most bytes that an item may have.
    pub(crate) max_item: usize,
    source: Source<'a>,
    changes: BTreeMap<Key, Change>,
}

impl<'a> Draft<'a> {
    pub(crate) fn new(
        tree: TreeId,
        generation: Generation,
        max_item: usize,
        source: Source<'a>,
    ) -> Self {
        Self { tree, generation, max_item, source, changes: BTreeMap::new() }
    }
    /// A corruption of this tree's item.
    pub(crate) fn corrupt(&self, key: &Key, what: impl Into<String>) -> Error {
        Error::corrupt(Place::item(self.tree, *key), what)
    }
    /// Returns what was parsed from an item of this tree, or the corruption.
    pub(crate) fn parsed<T>(&self, key: &Key, parsed: FormatResult<T>) -> Result<T> {
        parsed.map_err(|e| self.corrupt(key, e.0))
    }
    fn change(&mut self, key: &Key) -> Result<&mut Change> {
        match self.changes.entry(*key) {
            std::collections::btree_map::Entry::Occupied(e) => Ok(e.into_mut()),
            std::collections::btree_map::Entry::Vacant(e) => {
                let now = (self.source)(key)?;
                Ok(e.insert(Change { existed: now.is_some(), touched: false, now }))
            }
        }
    }
    /// The item as it is after the changes so far.
    pub(crate) fn get(&mut self, key: &Key) -> Result<Option<&Vec<u8>>> {
        Ok(self.change(key)?.now.as_ref())
    }
    /// The item, so that the caller can change, set or remove it.
    pub(crate) fn slot(&mut self, key: &Key) -> Result<&mut Option<Vec<u8>>> {
        let change = self.change(key)?;
        change.touched = true;
        Ok(&mut change.now)
    }
    /// A new item that is known not to exist: nothing is read.
    pub(crate) fn insert_new(&mut self, key: &Key, data: Vec<u8>) {
        let old =
            self.changes.insert(*key, Change { existed: false, touched: true, now: Some(data) });
        debug_assert!(old.is_none(), "{key} was not new to the draft");
    }
    /// Removes an item that is known to exist: nothing is read.
    pub(crate) fn delete_known(&mut self, key: &Key) {
        self.changes.insert(*key, Change { existed: true, touched: true, now: None });
    }
    /// The changes.
    pub(crate) fn into_changes(self) -> Changes {
        let real = |c: &Change| c.touched && (c.existed || c.now.is_some());
        self.changes
            .into_iter()
            .filter(|(_, c)| real(c))
            .map(|(k, c)| (k, c.existed, c.now))
            .collect()
    }
}

/// A finished draft and the handle under which it is to be written.
pub(crate) struct Prepared<'c, T> {
    pub(crate) handle: Handle<'c>,
    /// What `plan` returned.
    pub(crate) found: T,
    subvol: Arc<Subvolume>,
    changes: Changes,
}

/// Works the changes out, and joins the running transaction for them. Nothing has changed yet.
///
/// # Errors
/// What `plan` says; no space; `WouldBlock`.
pub(crate) fn prepare<'c, T>(
    core: &'c Core,
    subvol: &Arc<Subvolume>,
    deleting: bool,
    mut plan: impl FnMut(&mut Draft<'_>) -> Result<T>,
) -> Result<Prepared<'c, T>> {
    core.check_writable()?;
    let source = |key: &Key| Ok(subvol.get(core, key)?.map(|item| item.data().to_vec()));
    loop {
        // The items name the transaction that writes them. Until it is joined, that can still
        // become another one.
        let generation = core.txns.running().generation;
        let mut draft = Draft::new(subvol.id, generation, max_item_size(core.nodesize()), &source);
        let found = plan(&mut draft)?;
        let changes = draft.into_changes();
        let items = changes.len() as u64 + 1;
        let handle = if deleting { core.begin_deleting(items)? } else { core.begin(items)? };
        if handle.generation() == generation {
            return Ok(Prepared { handle, found, subvol: subvol.clone(), changes });
        }
    }
}

impl<'c, T> Prepared<'c, T> {
    /// Writes all changes in one edit.
    ///
    /// # Errors
    /// Reading, no space, `WouldBlock`, or `Corrupt` when an item is not as it was found; nothing
    /// is changed then.
    pub(crate) fn write(mut self) -> Result<(Handle<'c>, T)> {
        write_changes(&mut self.handle, &self.subvol, &self.changes)?;
        Ok((self.handle, self.found))
    }
    /// The handle, and the changes for the caller to write under it.
    pub(crate) fn into_changes(self) -> (Handle<'c>, Changes) {
        (self.handle, self.changes)
    }
}

/// Finished drafts for two trees, and the handle under which they are to be written.
pub(crate) struct PreparedTwo<'c, T> {
    handle: Handle<'c>,
    /// What `plan` returned.
    pub(crate) found: T,
    parts: [(Arc<Subvolume>, Changes); 2],
}

/// The same as [`prepare`] for an operation on two trees.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn prepare_two<'c, T>(
    core: &'c Core,
    subvols: [&Arc<Subvolume>; 2],
    mut plan: impl FnMut(&mut Draft<'_>, &mut Draft<'_>) -> Result<T>,
) -> Result<PreparedTwo<'c, T>> {
    core.check_writable()?;
    let reads = subvols
        .map(|subvol| move |key: &Key| Ok(subvol.get(core, key)?.map(|item| item.data().to_vec())));
    loop {
        let generation = core.txns.running().generation;
        let draft = |i: usize| {
            Draft::new(subvols[i].id, generation, max_item_size(core.nodesize()), &reads[i])
        };
        let (mut first, mut second) = (draft(0), draft(1));
        let found = plan(&mut first, &mut second)?;
        let changes = [first.into_changes(), second.into_changes()];
        let items = changes.iter().map(|c| c.len() as u64 + 1).sum();
        let handle = core.begin(items)?;
        if handle.generation() == generation {
            let [a, b] = changes;
            let parts = [(subvols[0].clone(), a), (subvols[1].clone(), b)];
            return Ok(PreparedTwo { handle, found, parts });
        }
    }
}

impl<'c, T> PreparedTwo<'c, T> {
    pub(crate) fn generation(&self) -> Generation {
        self.handle.generation()
    }
    /// Writes all changes, those of each tree in one edit.
    ///
    /// # Errors
    /// As [`Prepared::write`]. After an error in the second tree nothing becomes durable any more.
    pub(crate) fn write(mut self) -> Result<Handle<'c>> {
        let [(here, first), (there, second)] = &self.parts;
        write_changes(&mut self.handle, here, first)?;
        if let Err(e) = write_changes(&mut self.handle, there, second) {
            self.handle.half_done(&e);
            return Err(e);
        }
        Ok(self.handle)
    }
}

/// Writes changes that were worked out earlier, in one edit.
///
/// # Errors
/// As [`Prepared::write`].
pub(crate) fn write_changes(
    h: &mut Handle<'_>,
    subvol: &Arc<Subvolume>,
    changes: &Changes,
) -> Result<()> {
    let keys: SmallVec<[Key; 8]> = changes.iter().map(|c| c.0).collect();
    let growing = changes.iter().filter(|(_, _, now)| now.is_some()).count();
    h.edit_growing(subvol, &keys, growing, |e| apply(e, subvol.id, changes))
}

fn apply(e: &mut Editor<'_>, tree: TreeId, changes: &[(Key, bool, Option<Vec<u8>>)]) -> Result<()> {
    for (key, existed, _) in changes {
        if e.get(key).is_some() != *existed {
            let what = if *existed { "item is missing" } else { "item exists already" };
            return Err(Error::corrupt(Place::item(tree, *key), what));
        }
    }
    for (key, existed, now) in changes {
        match now {
            Some(data) if *existed => e.update(key, data)?,
            Some(data) => e.insert(key, data)?,
            None => e.delete(key)?,
        }
    }
    Ok(())
}
