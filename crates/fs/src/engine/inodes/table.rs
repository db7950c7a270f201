//! The inodes of a subvolume that are in memory, and which of them must stay.
//!
//! An inode is loaded when a caller asks for it, and kept until memory is wanted: when the table
//! has grown, inodes that nothing else refers to are dropped. That is safe because everything that
//! still needs an inode refers to it: the running transaction while its item is dirty, the data
//! path while it has delayed data, the table itself while it has no name. Holds are only counted,
//! beside the inodes: a front end may hold millions, and a count does not need the inode.

use super::inode::kind_of;
use super::{Inode, PLACEHOLDER};
use crate::api::FileKind;
use crate::engine::fronts::{FrontId, Holds};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::hash::NumberMap;
use crate::lock::{self, Mutex};
use larder_format::items::keys::inode_key;
use larder_format::items::{InodeItem, inode::S_IFDIR};
use larder_format::{Generation, Key, ObjectId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// This many inodes stay in memory before the first sweep. Each takes some 600 bytes. Tests sweep
/// all the time.
const KEEP: usize = if cfg!(test) { 64 } else { 16 << 10 };

/// The inodes of a subvolume that are in memory, by number.
#[derive(Debug, Default)]
pub(crate) struct InodeTable {
    inner: Mutex<Inner, lock::Table>,
    /// Held while a directory moves to another directory. While a thread has this lock, the shape
    /// of the tree stands still.
    pub(crate) moving: Mutex<(), lock::Moving>,
    /// Held while what a crash left behind is being cleaned up.
    pub(crate) cleaning: Mutex<(), lock::Cleaning>,
    /// Has what a crash left behind been cleaned up?
    pub(crate) clean: AtomicBool,
}

#[derive(Debug, Default)]
struct Inner {
    inodes: NumberMap<u64, Arc<Inode>>,
    /// References from outside (look-ups of front ends).
    holds: Holds,
    /// Inodes without a name that wait until their last hold is given back.
    orphans: NumberMap<u64, Arc<Inode>>,
    /// How many inodes have left memory so far.
    evicted: u64,
    /// Size of the table at which it is swept.
    limit: usize,
}

impl InodeTable {
    /// The inode with this number. It is loaded if it is not in memory.
    ///
    /// # Errors
    /// `NotFound`; reading; corruption.
    pub(crate) fn get(&self, core: &Core, subvol: &Arc<Subvolume>, ino: u64) -> Result<Arc<Inode>> {
        loop {
            let evicted = {
                let inner = self.inner.lock();
                if let Some(inode) = inner.inodes.get(&ino) {
                    inode.used.store(true, Ordering::Relaxed);
                    return Ok(inode.clone());
                }
                inner.evicted
            };
            let inode = Arc::new(load(core, subvol, ino)?);
            let mut inner = self.inner.lock();
            // What was read may be old, if the inode was in memory, changed and left memory in the
            // meantime.
            if inner.evicted == evicted {
                return Ok(inner.insert(inode));
            }
        }
    }
    /// The inode with this number, if it is in memory.
    pub(crate) fn peek(&self, ino: u64) -> Option<Arc<Inode>> {
        self.inner.lock().inodes.get(&ino).cloned()
    }
    /// Enters an inode that is being made.
    pub(crate) fn enter(&self, inode: &Arc<Inode>) {
        self.inner.lock().insert(inode.clone());
    }
    /// Takes an inode out that is gone from the tree, or that was never made.
    pub(crate) fn remove(&self, ino: u64) {
        let mut inner = self.inner.lock();
        inner.inodes.remove(&ino);
        inner.orphans.remove(&ino);
        inner.evicted += 1;
    }
    /// Adds a hold of a front end.
    pub(crate) fn hold(&self, front: FrontId, ino: ObjectId) {
        self.inner.lock().holds.add(front, ino);
    }
    /// Takes `n` holds of a front end back. Returns the inode if it has no name and nothing holds
    /// it now.
    pub(crate) fn release(&self, front: FrontId, ino: ObjectId, n: u64) -> Option<Arc<Inode>> {
        let mut inner = self.inner.lock();
        let last = inner.holds.give_back(front, ino, n);
        last.then(|| inner.orphans.get(&ino.0).cloned()).flatten()
    }
    /// Up to `most` inodes that a front end holds.
    fn held(&self, front: FrontId, most: usize) -> Vec<ObjectId> {
        self.inner.lock().holds.of(front, most)
    }
    /// Does any front end hold it?
    pub(crate) fn is_held(&self, ino: ObjectId) -> bool {
        self.inner.lock().holds.has(ino)
    }
    /// Does this front end hold it?
    fn is_held_by(&self, front: FrontId, ino: ObjectId) -> bool {
        self.inner.lock().holds.has_of(front, ino)
    }
    /// Does another front end hold it?
    fn is_held_elsewhere(&self, front: FrontId, ino: ObjectId) -> bool {
        self.inner.lock().holds.has_elsewhere(front, ino)
    }
    /// Keeps an inode that has no name, until it is deleted or gets one.
    pub(crate) fn set_orphan(&self, inode: &Arc<Inode>) {
        self.inner.lock().orphans.insert(inode.id.ino, inode.clone());
    }
    /// The inode has a name again, or its first one.
    pub(crate) fn unset_orphan(&self, ino: u64) {
        self.inner.lock().orphans.remove(&ino);
    }
    /// Forgets all holds. Returns the inodes that only they kept.
    pub(crate) fn drop_holds(&self) -> Vec<Arc<Inode>> {
        let mut inner = self.inner.lock();
        inner.holds.clear();
        inner.orphans.values().cloned().collect()
    }
    /// Forgets the holds of one front end. Returns the inodes that only it kept.
    pub(crate) fn drop_holds_of(&self, front: FrontId) -> Vec<Arc<Inode>> {
        let mut inner = self.inner.lock();
        inner.holds.end(front);
        let kept = |ino: &u64| inner.holds.has(ObjectId(*ino));
        inner.orphans.iter().filter(|(ino, _)| !kept(ino)).map(|(_, inode)| inode.clone()).collect()
    }
    /// Forgets everything. Inodes refer to their subvolume, so this is what frees the memory of a
    /// closed file system.
    pub(crate) fn clear(&self) {
        let old = std::mem::take(&mut *self.inner.lock());
        drop(old);
    }
    /// How many inodes are in memory.
    pub(crate) fn len(&self) -> usize {
        self.inner.lock().inodes.len()
    }
}

impl Inner {
    fn insert(&mut self, inode: Arc<Inode>) -> Arc<Inode> {
        if self.inodes.len() >= self.limit.max(KEEP) {
            self.sweep();
        }
        self.inodes.entry(inode.id.ino).or_insert(inode).clone()
    }
    /// Drops inodes that nothing else refers to: those that were not looked up since the last
    /// sweep, and if that is not enough all of them.
    fn sweep(&mut self) {
        let before = self.inodes.len();
        self.inodes
            .retain(|_, i| Arc::strong_count(i) > 1 || i.used.swap(false, Ordering::Relaxed));
        if self.inodes.len() > before / 4 * 3 {
            self.inodes.retain(|_, i| Arc::strong_count(i) > 1);
        }
        self.evicted += (before - self.inodes.len()) as u64;
        // If most are in use, the next sweep waits until as many have come again, so that its cost
        // stays proportional.
        self.limit = (2 * self.inodes.len()).max(KEEP);
    }
}

/// Reads an inode.
fn load(core: &Core, subvol: &Arc<Subvolume>, ino: u64) -> Result<Inode> {
    if ino == PLACEHOLDER {
        return placeholder(core, subvol);
    }
    if !(ObjectId::FIRST_FREE.0..=ObjectId::LAST_FREE.0).contains(&ino) {
        return Err(Error::NotFound);
    }
    let key = inode_key(ObjectId(ino));
    let item = subvol.get(core, &key)?.ok_or(Error::NotFound)?;
    let (kind, item) = parse(subvol, &key, item.data())?;
    // Nothing of it has changed since then, or it would not have left memory.
    Ok(Inode::new(subvol, ino, kind, item, Generation(item.transid.get())))
}

fn parse(subvol: &Subvolume, key: &Key, data: &[u8]) -> Result<(FileKind, InodeItem)> {
    let corrupt = |what: String| Error::corrupt(Place::item(subvol.id, *key), what);
    let item = *InodeItem::parse(data).map_err(|e| corrupt(e.0))?;
    let kind = kind_of(subvol.id, key.objectid.0, &item)?;
    if i64::try_from(item.size.get()).is_err() {
        return Err(corrupt(format!("size {} is beyond what a file can have", item.size)));
    }
    Ok((kind, item))
}

/// The empty directory that stands where the source of a snapshot had a nested subvolume. It looks
/// like the subvolume's root.
fn placeholder(core: &Core, subvol: &Arc<Subvolume>) -> Result<Inode> {
    let key = inode_key(ObjectId(subvol.root_dir));
    let root = subvol.get(core, &key)?.ok_or(Error::NotFound)?;
    let (_, root) = parse(subvol, &key, root.data())?;
    let item = InodeItem {
        size: 0.into(),
        nbytes: 0.into(),
        nlink: 1.into(),
        mode: (S_IFDIR | 0o755).into(),
        flags: 0.into(),
        ..root
    };
    Ok(Inode::new(subvol, PLACEHOLDER, FileKind::Directory, item, Generation(0)))
}

impl Core {
    /// A front end holds the inode, so the inode survives its last name.
    pub(crate) fn hold(&self, front: FrontId, id: crate::InodeId) {
        // The subvolume of an id that was given out is in memory, because subvolumes stay.
        if let Some(subvol) = self.subvols.read().get(&id.subvol) {
            subvol.inodes.hold(front, id.object());
        }
    }
    /// Up to `most` inodes that a front end holds.
    pub(crate) fn held(&self, front: FrontId, most: usize) -> Vec<crate::InodeId> {
        let mut found = Vec::new();
        for (tree, subvol) in &*self.subvols.read() {
            let inodes = subvol.inodes.held(front, most - found.len());
            found
                .extend(inodes.into_iter().map(|ino| crate::InodeId { subvol: *tree, ino: ino.0 }));
        }
        found
    }
    /// Does a front end hold this inode?
    pub(crate) fn is_held_by(&self, front: FrontId, id: crate::InodeId) -> bool {
        self.subvols.read().get(&id.subvol).is_some_and(|s| s.inodes.is_held_by(front, id.object()))
    }
    /// Does another front end hold this inode?
    pub(crate) fn is_held_elsewhere(&self, front: FrontId, id: crate::InodeId) -> bool {
        self.subvols
            .read()
            .get(&id.subvol)
            .is_some_and(|s| s.inodes.is_held_elsewhere(front, id.object()))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // Inodes refer to their subvolume, and its table refers to them.
        for subvol in self.subvols.get_mut().values() {
            subvol.inodes.clear();
        }
    }
}
