//! The log of one subvolume: the order of the steps, and what an inode becomes.
//!
//! All logged inodes come first, so that everything that refers to them finds them. With each,
//! those attributes and entries are removed that the log says are gone. Then come the entries that
//! the inode has in the log, and then references, attributes and extents. Link counts are counted
//! at the end, from the references. An inode that lost its last one becomes an orphan.
//!
//! A logged inode of generation 0 only says that the inode exists, as the parent of something that
//! was fsynced. A logged inode without links was gone when it was logged, and everything that the
//! log has of it is passed over.

use super::inodes::{Known, Replay, range};
use super::logged_data::{Claims, RefChange, Sums};
use super::overlay::Overlay;
use super::source::damaged;
use crate::engine::{Core, Subvolume};
use crate::error::{Place, Result};
use crate::file::ceil;
use crate::tree::Version;
use larder_format::items::inode::S_IFMT;
use larder_format::items::keys::{inode_key, orphan_key};
use larder_format::items::{DirEntries, InodeItem};
use larder_format::{Key, KeyType, ObjectId};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// What the log of a subvolume changes.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) subvol: Arc<Subvolume>,
    /// What items become.
    pub(super) changes: BTreeMap<Key, Option<Vec<u8>>>,
    /// Changes of references of data extents.
    pub(super) refs: Vec<RefChange>,
    /// Checksums of logged data.
    pub(super) sums: Sums,
    /// Features that logged data uses.
    pub(super) incompat: u64,
}

/// Works out what the log of a subvolume changes. Nothing is changed yet, except that space is
/// taken in `claims`.
///
/// # Errors
/// Reading; `Corrupt` where the log, or the tree that it belongs to, is damaged.
pub(super) fn work_out(
    core: &Core,
    subvol: &Arc<Subvolume>,
    log: &Version,
    claims: &mut Claims,
) -> Result<Outcome> {
    let mut replay = Replay {
        core,
        subvol,
        log,
        tree: Overlay::new(subvol.version(core)),
        generation: core.txns.running().generation,
        inodes: BTreeMap::new(),
        ignored: HashSet::new(),
        renamed: BTreeSet::new(),
        claims,
        refs: Vec::new(),
        sums: Sums::default(),
        incompat: 0,
    };
    replay.run()?;
    Ok(Outcome {
        subvol: subvol.clone(),
        changes: replay.tree.into_changes(),
        refs: replay.refs,
        sums: replay.sums,
        incompat: replay.incompat,
    })
}

impl Replay<'_> {
    fn run(&mut self) -> Result<()> {
        let inodes = self.logged_inodes()?;
        for (ino, item) in &inodes {
            self.replay_inode(*ino, item)?;
        }
        for (ino, item) in &inodes {
            if item.is_dir() {
                self.replay_entries(*ino)?;
            }
        }
        let log = self.log;
        log.scan(&Key::MIN, &Key::MAX, |item| {
            self.replay_item(item.key, item.data())?;
            Ok(true)
        })?;
        self.count_links()?;
        for (ino, known) in std::mem::take(&mut self.inodes) {
            if let Some(known) = known.filter(|k| k.changed) {
                self.tree.set(inode_key(ObjectId(ino)), known.item.as_bytes().to_vec());
            }
        }
        Ok(())
    }

    /// The inodes that the log has, without those that had no links any more.
    fn logged_inodes(&mut self) -> Result<Vec<(ObjectId, InodeItem)>> {
        let mut found = Vec::new();
        let log = self.log;
        log.scan(&Key::MIN, &Key::MAX, |item| {
            if item.key.kind == KeyType::INODE_ITEM {
                let parsed =
                    InodeItem::parse(item.data()).map_err(|e| self.damaged(item.key, e))?;
                if parsed.nlink.get() == 0 {
                    self.ignored.insert(item.key.objectid.0);
                } else {
                    parsed.file_type().map_err(|e| self.damaged(item.key, e))?;
                    found.push((item.key.objectid, *parsed));
                }
            }
            Ok(true)
        })?;
        Ok(found)
    }

    fn replay_inode(&mut self, ino: ObjectId, logged: &InodeItem) -> Result<()> {
        self.renamed.insert(ino.0);
        if self.inode(ino)?.is_some() {
            self.remove_attributes(ino)?;
            if logged.is_dir() {
                self.remove_entries(ino)?;
            }
        }
        let generation = self.generation;
        let only_exists = logged.generation.get() == 0;
        let before = self.inode(ino)?.map(|k| k.item);
        let item = match before {
            Some(before) if before.mode.get() & S_IFMT != logged.mode.get() & S_IFMT => {
                return Err(
                    self.damaged(inode_key(ino), "the inode is of another type in the subvolume")
                );
            }
            Some(before) if only_exists => {
                let size = if logged.is_dir() || logged.size.get() == 0 || !is_file(logged) {
                    before.size
                } else {
                    logged.size
                };
                InodeItem { size, ..before }
            }
            Some(before) => {
                let size = if logged.is_dir() { before.size } else { logged.size };
                InodeItem { size, nbytes: before.nbytes, ..*logged }
            }
            None => InodeItem {
                generation: if only_exists { generation.0.into() } else { logged.generation },
                size: if logged.is_dir() { 0.into() } else { logged.size },
                nbytes: 0.into(),
                ..*logged
            },
        };
        let known = Known { item, changed: true, logged: !only_exists };
        self.inodes.insert(ino.0, Some(known));
        if is_file(logged) {
            let size = item.size.get();
            if size > crate::file::MAX_FILE_SIZE {
                return Err(self.damaged(inode_key(ino), format!("a file of {size} bytes")));
            }
            self.cut(ino, ceil(size)..u64::MAX)?;
        }
        Ok(())
    }

    /// Removes the attributes that the log does not have.
    fn remove_attributes(&mut self, ino: ObjectId) -> Result<()> {
        let (from, to) = range(ino, KeyType::XATTR_ITEM);
        let log = self.log;
        let subvol = self.subvol.id;
        self.tree.each(from, to, |tree, key, data| {
            let logged = log.get(&key)?;
            let mut logged_names = HashSet::new();
            if let Some(item) = &logged {
                for entry in DirEntries::new(item.data()) {
                    let place = Place::item(ObjectId::TREE_LOG, key);
                    logged_names.insert(entry.map_err(|e| damaged(place, e))?.name);
                }
            }
            let mut kept = Vec::new();
            for entry in DirEntries::new(&data) {
                let entry =
                    entry.map_err(|e| crate::Error::corrupt(Place::item(subvol, key), e.0))?;
                if logged_names.contains(entry.name) {
                    entry.append_to(&mut kept);
                }
            }
            if kept.len() != data.len() {
                tree.set_list(key, kept);
            }
            Ok(())
        })
    }

    fn replay_item(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let is_part = matches!(
            key.kind,
            KeyType::INODE_REF | KeyType::INODE_EXTREF | KeyType::XATTR_ITEM | KeyType::EXTENT_DATA
        );
        if !is_part || self.ignored.contains(&key.objectid.0) {
            return Ok(());
        }
        if self.inode(key.objectid)?.is_none() {
            return Err(self
                .damaged(key, "there is no such inode, neither in the log nor in the subvolume"));
        }
        match key.kind {
            KeyType::XATTR_ITEM => {
                for entry in DirEntries::new(data) {
                    entry.map_err(|e| self.damaged(key, e))?;
                }
                self.tree.set(key, data.to_vec());
                Ok(())
            }
            KeyType::EXTENT_DATA => self.replay_extent(key, data),
            _ => self.replay_references(key, data),
        }
    }

    /// Counts the names of all inodes whose names may have changed. An inode without names is an
    /// orphan. A directory takes the names in it with it.
    fn count_links(&mut self) -> Result<()> {
        while let Some(ino) = self.renamed.pop_first().map(ObjectId) {
            if ino.0 == self.subvol.root_dir {
                continue;
            }
            let Some(item) = self.inode(ino)?.map(|k| k.item) else { continue };
            let names = self.count_names(ino)?;
            if names == 0 {
                if item.is_dir() {
                    self.remove_all_entries(ino)?;
                }
                self.tree.set(orphan_key(ino), Vec::new());
            }
            let links = if item.is_dir() { names.min(1) } else { names };
            if item.nlink.get() != links {
                self.change(ino, |item| item.nlink = links.into())?;
            }
        }
        Ok(())
    }
}

fn is_file(item: &InodeItem) -> bool {
    item.mode.get() & S_IFMT == larder_format::items::inode::S_IFREG
}
