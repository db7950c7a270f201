//! Where subvolumes hang, as far as the published root tree does not say so yet.
//!
//! Operations note it with their transaction ([`crate::transaction::RootNotes`]). Until the
//! transaction is published, look-ups find it here first.

use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::lock::{self, RwLock};
use crate::transaction::{Handle, Link};
use larder_format::items::RootRef;
use larder_format::items::keys::root_backref_key;
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet};

/// Links of subvolumes that are newer than the published root tree.
#[derive(Debug, Default)]
pub(crate) struct Links(RwLock<BTreeMap<TreeId, (Generation, Option<Link>)>, lock::Links>);

impl Links {
    /// Where a subvolume hangs, if the published root tree does not say so yet.
    pub(crate) fn get(&self, child: TreeId) -> Option<Option<Link>> {
        self.0.read().get(&child).map(|(_, link)| link.clone())
    }
    /// Is everything as the published root tree has it?
    pub(crate) fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }
    /// Forgets what is in the root tree, now that this transaction is published.
    pub(crate) fn forget(&self, published: Generation) {
        self.0.write().retain(|_, (generation, _)| *generation > published);
    }
}

impl Core {
    /// Notes where a subvolume hangs from now on. The commit will write that.
    pub(crate) fn note_link(&self, h: &mut Handle<'_>, child: TreeId, link: Option<Link>) {
        h.noted_for_root_tree(4);
        h.txn.roots.lock().links.insert(child, link.clone());
        self.links.0.write().insert(child, (h.generation(), link));
    }
    /// Takes back a link that was noted for something new that was not made after all.
    pub(crate) fn forget_link(&self, h: &Handle<'_>, child: TreeId) {
        h.txn.roots.lock().links.remove(&child);
        self.links.0.write().remove(&child);
    }
    /// Where a subvolume hangs. `None` for the top-level one, and for one that is deleted.
    ///
    /// # Errors
    /// Reading, corruption.
    pub(crate) fn link_of(&self, child: TreeId) -> Result<Option<Link>> {
        if let Some(link) = self.links.get(child) {
            return Ok(link);
        }
        let roots = self.roots.root.version(self.epochs.enter());
        let Some(item) = roots.at_or_after(&root_backref_key(child, ObjectId(0)))? else {
            return Ok(None);
        };
        if item.key.objectid != child || item.key.kind != KeyType::ROOT_BACKREF {
            return Ok(None);
        }
        let link = RootRef::parse(item.data())
            .map_err(|e| Error::corrupt(Place::item(ObjectId::ROOT_TREE, item.key), e.0))?;
        Ok(Some(Link {
            parent: ObjectId(item.key.offset),
            dir: link.dirid,
            index: link.sequence,
            name: link.name.to_vec(),
        }))
    }
    /// Does any subvolume hang in this one?
    ///
    /// # Errors
    /// Reading, corruption.
    pub(crate) fn has_nested(&self, parent: TreeId) -> Result<bool> {
        // Newer links are looked at first. Otherwise a link that a commit moves from there to the
        // root tree meanwhile could be missed.
        let newer: BTreeSet<TreeId> = {
            let newer = self.links.0.read();
            if newer.values().any(|(_, link)| link.as_ref().is_some_and(|l| l.parent == parent)) {
                return Ok(true);
            }
            newer.keys().copied().collect()
        };
        let first = Key::new(parent, KeyType::ROOT_REF, 0);
        let last = Key::new(parent, KeyType::ROOT_REF, u64::MAX);
        let mut found = false;
        self.roots.root.version(self.epochs.enter()).scan(&first, &last, |item| {
            found = !newer.contains(&ObjectId(item.key.offset));
            Ok(!found)
        })?;
        Ok(found)
    }
    /// A number for a new subvolume.
    ///
    /// # Errors
    /// Reading; `NoSpace` when the numbers are used up.
    pub(crate) fn new_subvol_id(&self) -> Result<TreeId> {
        use std::sync::atomic::Ordering::Relaxed;
        if self.next_subvol.load(Relaxed) == 0 {
            let roots = self.roots.root.version(self.epochs.enter());
            let last =
                roots.at_or_before(&Key::new(ObjectId::LAST_FREE, KeyType(u8::MAX), u64::MAX))?;
            let highest = last.map_or(0, |i| i.key.objectid.0).max(ObjectId::FIRST_FREE.0 - 1);
            let _ = self.next_subvol.compare_exchange(0, highest + 1, Relaxed, Relaxed);
        }
        let id = self.next_subvol.fetch_add(1, Relaxed);
        if id > ObjectId::LAST_FREE.0 { Err(Error::NoSpace) } else { Ok(ObjectId(id)) }
    }
}
