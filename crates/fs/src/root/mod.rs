//! Subvolumes: trees of files, and how they are found.
//!
//! A [`Subvolume`] is loaded once and stays: it owns the changing [`Tree`], the table of its inodes
//! in memory and the counter for new inode numbers (there is none on disk). Its ROOT_ITEM is
//! written by the commit alone: what operations want changed there, and where subvolumes hang, they
//! leave with their transaction ([`notes`]). Snapshots are made at the seal ([`snapshot`]), deleted
//! subvolumes go in the background ([`drop`]); [`settings`] is what can be asked of and set on a
//! subvolume. The entries in directories are the business of [`crate::inode`].

pub(crate) mod drop;
pub(crate) mod find_new;
pub(crate) mod notes;
pub(crate) mod settings;
pub(crate) mod snapshot;

pub(crate) use drop::Progress;
pub(crate) use notes::{Link, Links, RootNotes};
pub use settings::{Received, SubvolInfo};

use crate::core::Core;
use crate::error::{Error, Place, Result};
use crate::inode::InodeTable;
use crate::tree::{Item, Pointer, Root, Tree, Version};
use larder_format::items::{RootFlags, RootItem};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, TreeId};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A subvolume in memory.
#[derive(Debug)]
pub(crate) struct Subvolume {
    /// Its tree id.
    pub(crate) id: TreeId,
    /// Offset of its ROOT_ITEM's key: 0, or the transaction that made the snapshot.
    pub(crate) key_offset: u64,
    /// Its items.
    pub(crate) tree: Tree,
    /// The tree as the last sealed transaction left it: the first transaction that has this before
    /// it, and the root.
    base: Mutex<(Generation, Root)>,
    /// Its ROOT_ITEM as last read or written.
    pub(crate) item: Mutex<RootItem>,
    /// Is it read-only?
    pub(crate) read_only: AtomicBool,
    /// Was it deleted? Nothing in it changes any more.
    dead: AtomicBool,
    /// Inode number of its root directory.
    pub(crate) root_dir: u64,
    /// The next inode number to give out; 0 until it was looked up.
    next_ino: AtomicU64,
    /// Its inodes in memory.
    pub(crate) inodes: InodeTable,
}

impl Subvolume {
    /// A subvolume that is made, or whose ROOT_ITEM was read.
    pub(crate) fn new(id: TreeId, key_offset: u64, tree: Tree, item: RootItem) -> Self {
        let root = tree.root();
        Self {
            id,
            key_offset,
            base: Mutex::new((root.ptr.generation.next(), root)),
            tree,
            read_only: AtomicBool::new(item.root_flags().contains(RootFlags::RDONLY)),
            dead: AtomicBool::new(false),
            root_dir: match item.root_dirid.get() {
                0 => ObjectId::FIRST_FREE.0,
                dir => dir,
            },
            item: Mutex::new(item),
            next_ino: AtomicU64::new(0),
            inodes: InodeTable::default(),
        }
    }
    /// Was it deleted?
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
    fn set_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }
    /// Notes the tree's root at a seal.
    pub(crate) fn set_base(&self, before: Generation, root: Root) {
        *self.base.lock() = (before, root);
    }
    /// Lets go of nodes that are on the device by now.
    pub(crate) fn settle_base(&self, frozen: &Root) {
        let mut base = self.base.lock();
        if base.1.ptr == frozen.ptr {
            base.1.node = None;
        }
    }
    /// The root that the tree had before the transaction `generation`, which is the running one;
    /// `None` where it had none.
    pub(crate) fn base_before(&self, generation: Generation) -> Option<Root> {
        let base = self.base.lock();
        (base.0 <= generation).then(|| base.1.clone())
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
    /// Sees to it that numbers of inodes which are in use are never given out again while the
    /// subvolume is in memory. To be called before one is deleted: a log tells inodes by their
    /// numbers from those of the last commit.
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
    /// Fails where the subvolume may not be changed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_dead() {
            return Err(Error::NotFound);
        }
        if self.read_only.load(Ordering::Relaxed) { Err(Error::SubvolumeReadOnly) } else { Ok(()) }
    }
    /// The tree as it is now.
    pub(crate) fn version(&self, core: &Core) -> Version {
        self.tree.version(core.epochs.enter())
    }
    /// One item of the tree as it is now.
    pub(crate) fn get(&self, core: &Core, key: &Key) -> Result<Option<Item>> {
        self.tree.get(key, &core.epochs.enter())
    }
}

/// Parses the ROOT_ITEM that `item` holds.
pub(crate) fn parse_root_item(item: &Item) -> Result<RootItem> {
    parse_item(&item.key, item.data())
}

/// Parses a ROOT_ITEM.
pub(crate) fn parse_item(key: &Key, data: &[u8]) -> Result<RootItem> {
    RootItem::parse(data)
        .map_err(|e| Error::corrupt(Place::item(ObjectId::ROOT_TREE, *key), e.to_string()))
}

/// Where a ROOT_ITEM says that its tree's root is.
pub(crate) fn root_pointer(item: &RootItem) -> Pointer {
    Pointer {
        at: Logical(item.bytenr.get()),
        generation: Generation(item.generation.get()),
        level: item.level,
        first_key: None,
    }
}

/// Finds the ROOT_ITEM of a tree.
pub(crate) fn find_root(roots: &Version, id: TreeId) -> Result<Option<(Key, RootItem)>> {
    let Some(item) = roots.at_or_before(&Key::new(id, KeyType::ROOT_ITEM, u64::MAX))? else {
        return Ok(None);
    };
    if item.key.objectid != id || item.key.kind != KeyType::ROOT_ITEM {
        return Ok(None);
    }
    Ok(Some((item.key, parse_root_item(&item)?)))
}

impl Core {
    /// The subvolume with this id, loaded if need be.
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
        // A damaged image's may lie in the future.
        let last_snapshot = Generation(item.last_snapshot.get()).min(self.published_hint());
        let ptr = root_pointer(&item);
        let tree = Tree::new(id, self.store.clone(), ptr, last_snapshot, self.tree_stats.clone());
        let subvol = Arc::new(Subvolume::new(id, key.offset, tree, item));
        Ok(self.subvols.write().entry(id).or_insert(subvol).clone())
    }
}
