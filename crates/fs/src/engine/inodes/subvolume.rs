//! Subvolumes: trees of files, and how they are found.
//!
//! A [`Subvolume`] is loaded once and stays. It owns the changing [`Tree`], the table of its inodes
//! in memory, and the counter for new inode numbers (there is none on disk). Only the commit writes
//! its ROOT_ITEM. Operations note with their transaction how the ROOT_ITEM is to change, and where
//! subvolumes hang ([`crate::transaction::RootNotes`]). Entries in directories belong to
//! [`crate::inode`]; snapshots, dropping and settings belong to [`crate::subvolume`].

use super::table::InodeTable;
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::transaction::{SubvolumeTree, find_root, root_pointer};
use crate::tree::Tree;
use larder_format::items::{RootFlags, RootItem};
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A subvolume in memory.
#[derive(Debug)]
pub(crate) struct Subvolume {
    /// Its tree, as transactions know it.
    pub(crate) below: Arc<SubvolumeTree>,
    /// Is it read-only?
    pub(crate) read_only: AtomicBool,
    /// How many read it as a whole. As long as there is one, it stays read-only and is not deleted.
    /// Rises under [`Core::subvol_tree`] only.
    readers: AtomicU32,
    /// Inode number of its root directory.
    pub(crate) root_dir: u64,
    /// The next inode number to give out. 0 until it has been looked up.
    next_ino: AtomicU64,
    /// Its inodes in memory.
    pub(crate) inodes: InodeTable,
}

impl Deref for Subvolume {
    type Target = Arc<SubvolumeTree>;
    fn deref(&self) -> &Self::Target {
        &self.below
    }
}

impl Subvolume {
    /// A subvolume that is new, or whose ROOT_ITEM was read.
    pub(crate) fn new(id: TreeId, key_offset: u64, tree: Tree, item: RootItem) -> Self {
        Self {
            read_only: AtomicBool::new(item.root_flags().contains(RootFlags::RDONLY)),
            readers: AtomicU32::new(0),
            root_dir: match item.root_dirid.get() {
                0 => ObjectId::FIRST_FREE.0,
                dir => dir,
            },
            below: Arc::new(SubvolumeTree::new(id, key_offset, tree, item)),
            next_ino: AtomicU64::new(0),
            inodes: InodeTable::default(),
        }
    }
    /// A new inode number: one above the highest in use.
    ///
    /// # Errors
    /// Reading, or `NoSpace` when the numbers are used up.
    pub(crate) fn new_ino(&self, core: &Core) -> Result<u64> {
        self.look_up_highest_ino(core)?;
        let ino = self.next_ino.fetch_add(1, Ordering::Relaxed);
        if ino > ObjectId::LAST_FREE.0 { Err(Error::NoSpace) } else { Ok(ino) }
    }
    /// Makes sure that numbers of inodes that are in use are never given out again while the
    /// subvolume is in memory. It is called before an inode is deleted, because
    /// a log tells inodes from those of the last commit by their numbers.
    ///
    /// # Errors
    /// Reading.
    pub(crate) fn look_up_highest_ino(&self, core: &Core) -> Result<()> {
        if self.next_ino.load(Ordering::Relaxed) == 0 {
            let version = self.tree.version(core.epochs.enter());
            let last =
                version.at_or_before(&Key::new(ObjectId::LAST_FREE, KeyType(u8::MAX), u64::MAX))?;
            let highest = last.map_or(0, |i| i.key.objectid.0).max(ObjectId::FIRST_FREE.0);
            let _ = self.next_ino.compare_exchange(
                0,
                highest + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
        Ok(())
    }
    /// Fails while it is read as a whole. The caller holds [`Core::subvol_tree`].
    pub(crate) fn check_not_read_as_a_whole(&self) -> Result<()> {
        match self.readers.load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(Error::Busy("the subvolume is being sent or compared")),
        }
    }
    /// Fails where the subvolume may not be changed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_dead() {
            return Err(Error::NotFound);
        }
        if self.read_only.load(Ordering::Relaxed) { Err(Error::SubvolumeReadOnly) } else { Ok(()) }
    }
}

/// Keeps a subvolume read-only, and from being deleted, as long as it is read as a whole.
#[derive(Debug)]
pub(crate) struct WholeReader(Arc<Subvolume>);

impl WholeReader {
    /// Begins to read a subvolume.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it can be written to; reading; corruption.
    pub(crate) fn new(core: &Core, id: TreeId) -> Result<Self> {
        let _tree = core.subvol_tree.lock();
        let subvol = core.subvol(id)?;
        if !subvol.read_only.load(Ordering::Relaxed) {
            return Err(Error::Invalid("the subvolume is not read-only"));
        }
        subvol.readers.fetch_add(1, Ordering::AcqRel);
        Ok(Self(subvol))
    }
}

impl Deref for WholeReader {
    type Target = Subvolume;
    fn deref(&self) -> &Subvolume {
        &self.0
    }
}

impl Drop for WholeReader {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Core {
    /// The subvolume with this id. It is loaded if it is not in memory.
    ///
    /// # Errors
    /// `NotFound` when there is none, or it was deleted; reading; corruption.
    pub(crate) fn subvol(&self, id: TreeId) -> Result<Arc<Subvolume>> {
        if let Some(s) = self.subvols.read().get(&id) {
            return if s.is_dead() { Err(Error::NotFound) } else { Ok(s.clone()) };
        }
        if !id.is_subvolume() {
            return Err(Error::NotFound);
        }
        let roots = self.roots.root.version(self.epochs.enter());
        let (key, item) = find_root(&roots, id)?.ok_or(Error::NotFound)?;
        if item.refs.get() == 0 {
            return Err(Error::NotFound);
        }
        // In a damaged image it may lie in the future.
        let last_snapshot = Generation(item.last_snapshot.get()).min(self.published_hint());
        let ptr = root_pointer(&item);
        let tree = Tree::new(id, self.store.clone(), ptr, last_snapshot, self.tree_stats.clone());
        let subvol = Arc::new(Subvolume::new(id, key.offset, tree, item));
        Ok(self.subvols.write().entry(id).or_insert(subvol).clone())
    }
}
