//! Inodes in memory, and the names that lead to them.
//!
//! An [`Inode`] exists once per (subvolume, number) as long as anything uses it. Two locks guard
//! it, and the difference matters. `op` serialises operations, and may be held while its holder
//! waits for space, devices or a transaction. `state` is held for instructions only and never
//! across such a wait, because the committer takes it while it seals.
//!
//! Lock order: the subvolume's lock for moving directories, then `op` of directories by inode
//! number, then `op` of other inodes by inode number ([`lock_all`] takes any set in that order),
//! then a transaction handle, then `state`, then tree locks.
//!
//! An operation on names changes entries, references, attributes and orphan items. The `op` locks
//! of the directories and inodes concerned guard all of that. So it can be worked out before a
//! transaction is joined ([`crate::engine::draft`]) and then only has to be written. Look-ups take
//! no `op`: one item of the tree answers them. The inode's item in the tree may be older than
//! `state.item`; the seal writes it ([`Inode::flush_item`]).

use crate::api::{FileKind, InodeId, Timestamp, may_wait, to_timespec};
use crate::engine::changes::{Changes, Logged};
use crate::engine::file_data::FileData;
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::lock::{self, Exclusive, Locked, Mutex, RwLock, Shared};
use crate::transaction::{Ground, Handle};
use larder_format::items::dir::find_entry;
use larder_format::items::keys::{inode_key, xattr_key};
use larder_format::items::{FileType, InodeFlags, InodeItem};
use larder_format::{Generation, NAME_MAX, ObjectId, TreeId};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// Number of the empty directory that stands where the source of a snapshot had a nested subvolume.
pub(crate) const PLACEHOLDER: u64 = 2;

/// An inode in memory.
#[derive(Debug)]
pub(crate) struct Inode {
    /// Its subvolume and number.
    pub(crate) id: InodeId,
    /// Its type, which never changes.
    pub(crate) kind: FileKind,
    /// Its subvolume.
    pub(crate) subvol: Arc<Subvolume>,
    /// Serialises operations: shared for reading data, exclusive for changes.
    pub(crate) op: RwLock<(), lock::Op>,
    /// What `stat` shows, and more. Held for instructions only.
    pub(crate) state: Mutex<InodeState, lock::InodeState>,
    /// Data that is not in extents yet.
    pub(crate) data: FileData,
    /// Has it been looked up since the table was last swept?
    pub(super) used: AtomicBool,
    /// Ranges of its extents that have changed since it was logged.
    pub(crate) changes: Mutex<Changes, lock::ChangedRanges>,
    /// The outcome of its last `fsync`. Held while it is being logged.
    pub(crate) logged: Mutex<Option<Logged>, lock::Logged>,
    /// The transaction of its last change before it came into memory. Which parts that transaction
    /// changed is not known here.
    pub(crate) since: Generation,
    /// The transaction that has noted that the item has to be written, see [`Handle::mark_dirty`].
    pub(crate) noted_in: AtomicU64,
    /// The last transaction in which an extent was shared so that a log of this inode has to look
    /// for overlapping checksums. An inode that got an extent always has to; one that gave an
    /// extent has to if the extent was of that very transaction. It is not kept when the inode
    /// leaves memory: an inode that is read again takes the transaction of its last change.
    pub(crate) last_reflink: AtomicU64,
    /// The last transaction whose log has its extents, or is about to have them. They stay as they
    /// are.
    extents_logged_in: AtomicU64,
    /// It has no extended attributes. That is known of an inode that was made without any, until it
    /// may have got one. (The kernel asks for an attribute before it writes to a file.)
    pub(crate) no_xattrs: AtomicBool,
}

/// The changing part of an inode.
#[derive(Debug)]
pub(crate) struct InodeState {
    /// The inode item as it is to be written, except the `size` of a regular file, see `size`.
    pub(crate) item: InodeItem,
    /// The size that everyone sees. The size on disk of a regular file is smaller while delayed
    /// data lies behind what is on the device.
    pub(crate) size: u64,
    /// Highest DIR_INDEX that was given out, once it has been looked up (directories).
    pub(crate) last_index: Option<u64>,
    /// Its value when the latest listing in pages began (directories).
    pub(crate) listed_to: Option<u64>,
    /// It was made without a name and never had one, so it may still get one.
    pub(crate) linkable: bool,
    /// The inode's items are gone. Nothing may be written any more.
    pub(crate) deleted: bool,
    /// Transaction of the last change of metadata, names or extents, and whether that change is
    /// still to be logged.
    pub(crate) last_change: Generation,
    pub(crate) unlogged: bool,
    /// Companions: inodes whose names have to be logged with this one, and the transaction for
    /// which that holds. Since this inode was last logged they left this directory for another, or
    /// exchanged names with this inode.
    pub(crate) companions: (Generation, Vec<ObjectId>),
}

impl InodeState {
    /// Notes a change of the directory's entries. `name_bytes` is by how much the sum of their name
    /// lengths grew or shrank.
    pub(crate) fn entries_changed(&mut self, name_bytes: i64, now: Timestamp) {
        // It counts twice, because each name stands in a DIR_ITEM and in a DIR_INDEX. A damaged
        // image may have a wrong sum.
        self.size = self.size.saturating_add_signed(2 * name_bytes);
        self.item.mtime = to_timespec(now);
        self.item.ctime = self.item.mtime;
    }
    /// Notes that a log of this inode needs the names of the other one, too.
    pub(crate) fn note_companion(&mut self, generation: Generation, ino: ObjectId) {
        if self.companions.0 != generation {
            self.companions = (generation, Vec::new());
        }
        if self.companions.1.last() != Some(&ino) {
            self.companions.1.push(ino);
        }
    }
    /// Notes that something of the inode has changed.
    pub(crate) fn changed_in(&mut self, generation: Generation) {
        self.last_change = generation;
        self.unlogged = true;
    }
    /// Changes the link count.
    pub(crate) fn links_changed(&mut self, by: i32, now: Timestamp) {
        let links = self.item.nlink.get().saturating_add_signed(by);
        self.item.nlink = links.into();
        self.item.ctime = to_timespec(now);
    }
}

/// A file's extent lock. While it is held, its items and the places of its data stand still.
#[derive(Debug)]
pub(crate) struct LockedExtents<'a> {
    // The file's own comes first, and is released first.
    _file: Locked<'a, ()>,
    _blocks: Shared<'a, ()>,
}

impl Inode {
    pub(crate) fn new(
        subvol: &Arc<Subvolume>,
        ino: u64,
        kind: FileKind,
        item: InodeItem,
        since: Generation,
    ) -> Self {
        let state = InodeState {
            size: item.size.get(),
            last_index: None,
            listed_to: None,
            linkable: false,
            deleted: false,
            last_change: Generation(item.transid.get()),
            unlogged: true,
            companions: (Generation(0), Vec::new()),
            item,
        };
        Self {
            id: InodeId { subvol: subvol.id, ino },
            kind,
            subvol: subvol.clone(),
            op: RwLock::ordered((), (kind != FileKind::Directory, subvol.id.0, ino)),
            state: Mutex::new(state),
            data: FileData::default(),
            used: AtomicBool::new(true),
            noted_in: AtomicU64::new(0),
            // Nothing more is known of it.
            last_reflink: AtomicU64::new(since.0),
            extents_logged_in: AtomicU64::new(since.0),
            no_xattrs: AtomicBool::new(false),
            changes: Mutex::default(),
            logged: Mutex::default(),
            since,
        }
    }
    /// Serialises changes of the extent items; see `file::replace`.
    pub(crate) fn lock_extents(&self) -> LockedExtents<'_> {
        let still = self.subvol.keep_blocks();
        LockedExtents { _file: self.data.lock_extents(), _blocks: still }
    }
    /// From here on the extents that this inode has made in the running transaction do not grow:
    /// the log of `generation` will have them. If one is growing right now, that has ended when
    /// this returns.
    pub(crate) fn keep_extents_for_log(&self, generation: Generation) {
        if self.extents_logged_in.fetch_max(generation.0, Ordering::AcqRel) < generation.0 {
            drop(self.data.lock_extents());
        }
    }
    /// May a log of the transaction have its extents? That can be its own log, or that of a file
    /// that shares or shared them. The caller holds the extent lock.
    pub(crate) fn has_logged_extents(&self, h: &Handle<'_>) -> bool {
        let tuning = &h.ground.options.tuning;
        let in_it = |last: &AtomicU64| last.load(Ordering::Acquire) >= h.generation().0;
        let logged = in_it(&self.extents_logged_in) && !fault!(tuning, LogExtentsGrow);
        logged || in_it(&self.last_reflink) && !fault!(tuning, LogSharedGrow)
    }
    /// Its number, as the first part of a key.
    pub(crate) fn object(&self) -> ObjectId {
        ObjectId(self.id.ino)
    }
    /// Is it a directory?
    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }
    /// Its flags.
    pub(crate) fn flags(&self) -> InodeFlags {
        self.state.lock().item.inode_flags()
    }
    /// Fails for anything but a directory.
    pub(crate) fn expect_dir(&self) -> Result<()> {
        if self.is_dir() { Ok(()) } else { Err(Error::NotDirectory) }
    }
    /// Fails where nothing may be changed: because of the file system, the subvolume, or a
    /// placeholder directory.
    pub(crate) fn check_changeable(&self, core: &Core) -> Result<()> {
        core.check_writable()?;
        self.subvol.check_writable()?;
        if self.id.ino == PLACEHOLDER {
            return Err(Error::NotPermitted(
                "the directory stands for a subvolume that is not in this snapshot",
            ));
        }
        Ok(())
    }
    /// Changes the state in a transaction, and notes that the item has to be written.
    pub(crate) fn change<R>(
        self: &Arc<Self>,
        h: &mut Handle<'_>,
        f: impl FnOnce(&mut InodeState) -> R,
    ) -> R {
        let generation = h.generation();
        let result = {
            let mut state = self.state.lock();
            let result = f(&mut state);
            state.item.transid = generation.0.into();
            state.item.sequence = state.item.sequence.get().wrapping_add(1).into();
            state.changed_in(generation);
            result
        };
        h.mark_dirty(self);
        result
    }
    /// Brings the item in the tree up to date. The committer calls this while it seals.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn flush_item(&self, h: &mut Handle<'_>) -> Result<()> {
        let Some(item) = self.item_for_disk(h.ground) else { return Ok(()) };
        let key = inode_key(self.object());
        h.edit_growing(&self.subvol, &[key], 0, |e| e.update(&key, item.as_bytes()))
    }
    /// The same before the seal, while operations go on. The item is right in the end because of a
    /// rule: an operation marks an inode dirty *after* its last change of anything that the item
    /// shows, the size on disk included.
    ///
    /// # Errors
    /// Reading, corruption, no space.
    pub(crate) fn write_item_ahead(&self, h: &mut Handle<'_>) -> Result<()> {
        let Some(item) = self.item_for_disk(h.ground) else { return Ok(()) };
        let key = inode_key(self.object());
        h.edit_growing(&self.subvol, &[key], 0, |e| match e.get(&key) {
            Some(_) => e.update(&key, item.as_bytes()),
            // It was deleted since we looked.
            None => Ok(()),
        })
    }
    /// The item as it is to be logged. `None` once the inode is deleted.
    pub(crate) fn item_for_log(&self, core: &Core) -> Option<InodeItem> {
        self.item_for_disk(core)
    }
    /// The item as it is to be written. `None` once the inode is deleted.
    fn item_for_disk(&self, ground: &Ground) -> Option<InodeItem> {
        let state = self.state.lock();
        if state.deleted || self.subvol.is_dead() {
            return None;
        }
        let mut item = state.item;
        item.size = match self.kind {
            FileKind::Regular if !fault!(ground.options.tuning, SizeBeforeData) => {
                self.data.disk_size(state.size).into()
            }
            _ => state.size.into(),
        };
        Some(item)
    }
    /// Value of an attribute, as it is stored.
    ///
    /// # Errors
    /// Reading; corruption.
    pub(crate) fn stored_xattr(&self, ground: &Ground, name: &[u8]) -> Result<Option<Vec<u8>>> {
        if name.is_empty() || name.len() > NAME_MAX || self.no_xattrs.load(Ordering::Acquire) {
            return Ok(None);
        }
        let key = xattr_key(self.object(), name);
        let Some(item) = self.subvol.get(ground, &key)? else { return Ok(None) };
        let entry = find_entry(item.data(), name)
            .map_err(|e| Error::corrupt(Place::item(self.subvol.id, key), e.0))?;
        Ok(entry.map(|e| e.data.to_vec()))
    }
    /// Takes `op` exclusively.
    ///
    /// # Errors
    /// `WouldBlock` where the thread may not wait and another holds it.
    pub(crate) fn lock_op(&self) -> Result<Exclusive<'_, ()>> {
        if let Some(guard) = self.op.try_write() {
            return Ok(guard);
        }
        may_wait()?;
        Ok(self.op.write())
    }
    /// Fails once the inode is deleted. For callers that hold `op`.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.state.lock().deleted { Err(Error::NotFound) } else { Ok(()) }
    }
}

/// Exclusive `op` locks of several inodes.
pub(crate) type OpGuards<'a> = SmallVec<[Exclusive<'a, ()>; 4]>;

/// Takes `op` of all these inodes exclusively, in the one order that all callers keep. An inode may
/// be named twice.
///
/// # Errors
/// `WouldBlock` where the thread may not wait and another holds one of them.
pub(crate) fn lock_all<'a>(inodes: &[&'a Inode]) -> Result<OpGuards<'a>> {
    let mut sorted: SmallVec<[&Inode; 4]> = SmallVec::from_slice(inodes);
    sorted.sort_by_key(|i| (!i.is_dir(), i.id));
    sorted.dedup_by_key(|i| i.id);
    sorted.into_iter().map(Inode::lock_op).collect()
}

/// Type of an inode, from the mode in its item.
pub(super) fn kind_of(tree: TreeId, ino: u64, item: &InodeItem) -> Result<FileKind> {
    let place = || Place::item(tree, inode_key(ObjectId(ino)));
    let kind = item.file_type().map_err(|e| Error::corrupt(place(), e.0))?;
    to_kind(kind).ok_or_else(|| Error::corrupt(place(), "inode has no type"))
}

/// Type of an inode from a directory entry's; `None` for the two types that no inode has.
pub(crate) fn to_kind(kind: FileType) -> Option<FileKind> {
    Some(match kind {
        FileType::Regular => FileKind::Regular,
        FileType::Directory => FileKind::Directory,
        FileType::CharDevice => FileKind::CharDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::Symlink => FileKind::Symlink,
        FileType::Unknown | FileType::Xattr => return None,
    })
}
/// Type for a directory entry.
pub(crate) fn to_file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::Regular,
        FileKind::Directory => FileType::Directory,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::Symlink => FileType::Symlink,
    }
}
