//! What has to be logged together with an inode, so that its names come out right.
//!
//! Replaying takes names away. A new name takes the place of the inode that had it in the last
//! commit, and a range of deletion removes what the directory had there. An inode that loses a name
//! in this way has other names by now, or is gone. If it has others, they have to be in the log, or
//! the inode would be lost together with the name. Each of those names may take names from other
//! inodes. [`Names`] follows this to its end, over one version of the tree, so what the log says
//! was true at one moment.
//!
//! If only its names are logged, an inode *exists* in the log, with generation 0. Replaying then
//! leaves its item as the last commit has it. But its extended attributes become those of the log,
//! so those of the last commit are logged. With fsynced inodes and logged directories, all
//! directories above them are logged that are not where the last commit has them. Otherwise they
//! would not be found under their names, and two directories could end within each other.

use super::blocks::Blocks;
use super::diff::changed;
use super::tree::LogTree;
use super::{Cause, NotLogged, Result};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place};
use crate::file::ceil;
use crate::log::references::{Reference, references};
use crate::tree::Version;
use larder_format::items::dir::{find_entry, single_entry};
use larder_format::items::inode::{S_IFLNK, S_IFMT, S_IFREG};
use larder_format::items::keys::{dir_index_key, dir_item_key, extent_data_key, inode_key};
use larder_format::items::{DirLogIndex, InodeFlags, InodeItem};
use larder_format::{FileOffset, Key, KeyType, ObjectId};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::RangeInclusive;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Inodes whose names one batch follows at most.
const MOST: usize = 20_000;

/// The log of a subvolume as the leader has it in memory.
#[derive(Debug)]
pub(super) struct SubvolLog {
    pub(super) tree: LogTree,
    /// Names that logged inodes have got since the last commit, and the inodes that have them.
    claims: BTreeMap<(ObjectId, Vec<u8>), ObjectId>,
    /// Inodes whose content is logged, too.
    full: HashSet<ObjectId>,
    /// The log may have checksums of parts of a note: those of files that share extents.
    pub(super) parts: bool,
}

impl SubvolLog {
    pub(super) fn new(core: &Core) -> Self {
        let tree = LogTree::new(core.nodesize());
        Self { tree, claims: BTreeMap::new(), full: HashSet::new(), parts: false }
    }
}

/// All items of an inode of the kinds `first` to `last`.
pub(super) fn items_of(ino: ObjectId, first: KeyType, last: KeyType) -> RangeInclusive<Key> {
    Key::new(ino, first, 0)..=Key::new(ino, last, u64::MAX)
}

/// Follows names through one batch.
pub(super) struct Names<'a> {
    core: &'a Core,
    pub(super) subvol: &'a Subvolume,
    /// The tree as the last commit has it.
    pub(super) base: &'a Version,
    /// The tree as it is.
    pub(super) now: &'a Version,
    pub(super) log: &'a mut SubvolLog,
    pub(super) blocks: &'a mut Blocks,
    done: HashSet<ObjectId>,
    /// Inodes that were fsynced. They must be found under their names.
    asked: HashSet<ObjectId>,
    listed: HashSet<ObjectId>,
    queue: VecDeque<ObjectId>,
}

impl<'a> Names<'a> {
    pub(super) fn new(
        core: &'a Core,
        subvol: &'a Subvolume,
        base: &'a Version,
        now: &'a Version,
        log: &'a mut SubvolLog,
        blocks: &'a mut Blocks,
    ) -> Self {
        Self {
            core,
            subvol,
            base,
            now,
            log,
            blocks,
            done: HashSet::new(),
            asked: HashSet::new(),
            listed: HashSet::new(),
            queue: VecDeque::new(),
        }
    }

    /// Logs an inode that was fsynced as `item`, its names, and those of its companions. With
    /// `entries` the inode is a directory, and what has come and gone in it is logged, too. False
    /// if the inode has no name any more: the log has nothing of it then.
    pub(super) fn log(
        &mut self,
        ino: ObjectId,
        item: &InodeItem,
        entries: bool,
        companions: &[ObjectId],
    ) -> Result<bool> {
        self.log.full.insert(ino);
        self.put(&inode_key(ino), item.as_bytes())?;
        self.done.remove(&ino);
        self.queue.push_back(ino);
        self.queue.extend(companions);
        self.asked.insert(ino);
        if entries {
            self.entries(ino)?;
        }
        while let Some(next) = self.queue.pop_front() {
            self.follow(next)?;
            if self.done.len() > MOST {
                return Err(NotLogged::Commit(Cause::TooMuch));
            }
        }
        Ok(self.log.full.contains(&ino))
    }

    fn corrupt(&self, key: Key, e: impl std::fmt::Display) -> NotLogged {
        NotLogged::Fail(Error::corrupt(Place::item(self.subvol.id, key), e.to_string()))
    }
    fn put(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.log.tree.put(self.blocks, key, data)
    }
    fn remove(&mut self, keys: RangeInclusive<Key>) {
        self.log.tree.remove(self.blocks, keys);
    }
    /// Makes `items` the whole content of a range of keys.
    fn replace(&mut self, keys: RangeInclusive<Key>, items: &[(Key, Vec<u8>)]) -> Result<()> {
        let wanted = items.iter().map(|(key, data)| (*key, data.as_slice()));
        let same = self.log.tree.range(keys.clone()).eq(wanted);
        if !same {
            self.remove(keys);
            for (key, data) in items {
                self.put(key, data)?;
            }
        }
        Ok(())
    }
    fn item(&self, version: &Version, ino: ObjectId) -> Result<Option<InodeItem>> {
        let key = inode_key(ino);
        let Some(item) = version.get(&key)? else { return Ok(None) };
        InodeItem::parse(item.data()).map(|i| Some(*i)).map_err(|e| self.corrupt(key, e))
    }
    /// References and attributes of an inode, as a version has them.
    fn head(version: &Version, ino: ObjectId) -> Result<Vec<(Key, Vec<u8>)>> {
        let keys = items_of(ino, KeyType::INODE_REF, KeyType::XATTR_ITEM);
        let mut out = Vec::new();
        version.scan(keys.start(), keys.end(), |item| {
            out.push((item.key, item.data().to_vec()));
            Ok(true)
        })?;
        Ok(out)
    }
    fn names(&self, items: &[(Key, Vec<u8>)]) -> Result<Vec<Reference>> {
        let mut out = Vec::new();
        let refs = |key: &Key| matches!(key.kind, KeyType::INODE_REF | KeyType::INODE_EXTREF);
        for (key, data) in items.iter().filter(|(key, _)| refs(key)) {
            out.append(&mut references(*key, data).map_err(|e| self.corrupt(*key, e))?);
        }
        Ok(out)
    }

    /// Logs the names that one inode has, and notes the inodes that these names concern.
    fn follow(&mut self, ino: ObjectId) -> Result<()> {
        if ino == ObjectId(self.subvol.root_dir) {
            return self.follow_root(ino);
        }
        if !self.done.insert(ino) {
            return Ok(());
        }
        let base_head = Self::head(self.base, ino)?;
        let head = if self.now.get(&inode_key(ino))?.is_some() {
            Self::head(self.now, ino)?
        } else {
            Vec::new()
        };
        let (were, are) = (self.names(&base_head)?, self.names(&head)?);
        self.give_up_claims(ino, &are)?;
        if are.is_empty() {
            self.gone(ino)?;
        } else {
            self.queue_related(ino, &were, &are)?;
            let logged = self.log.tree.get(&inode_key(ino)).is_some();
            if !logged && are == were {
                return Ok(());
            }
            self.log_names(ino, &base_head, &head, &are)?;
            for name in are.iter().filter(|name| !were.contains(name)) {
                self.won(ino, name)?;
            }
        }
        for name in &were {
            // A name that the inode has again has another index in the directory. Linux would
            // remove the old entry when it comes to the new one, after the inode's item, and the
            // item would keep the time of replaying.
            if !are.contains(name) {
                self.lost(name)?;
            }
        }
        Ok(())
    }
    /// The root has no name that could change.
    fn follow_root(&mut self, ino: ObjectId) -> Result<()> {
        if self.log.tree.get(&inode_key(ino)).is_none() || !self.done.insert(ino) {
            return Ok(());
        }
        let (base_head, head) = (Self::head(self.base, ino)?, Self::head(self.now, ino)?);
        self.attributes(ino, &base_head, &head)
    }
    /// Queues the inodes that have to be logged because this one is.
    fn queue_related(
        &mut self,
        ino: ObjectId,
        were: &[Reference],
        are: &[Reference],
    ) -> Result<()> {
        let is_dir = self.item(self.now, ino)?.is_some_and(|item| item.is_dir());
        if is_dir || self.asked.contains(&ino) {
            // The way to inodes that were fsynced, and to directories that moved.
            self.queue.extend(are.iter().map(|name| name.dir));
        }
        if are != were
            && let Some(inode) = self.subvol.inodes.peek(ino.0)
        {
            let state = inode.state.lock();
            if state.companions.0 == self.now.root.ptr.generation {
                self.queue.extend(&state.companions.1);
            }
        }
        Ok(())
    }
    /// Brings an inode into the log, with the names and attributes that it has, and a link count
    /// that fits them.
    fn log_names(
        &mut self,
        ino: ObjectId,
        base_head: &[(Key, Vec<u8>)],
        head: &[(Key, Vec<u8>)],
        are: &[Reference],
    ) -> Result<()> {
        if !self.log.full.contains(&ino) {
            self.exists(ino)?;
        }
        let refs: Vec<_> =
            head.iter().filter(|(k, _)| k.kind != KeyType::XATTR_ITEM).cloned().collect();
        self.replace(items_of(ino, KeyType::INODE_REF, KeyType::INODE_EXTREF), &refs)?;
        self.attributes(ino, base_head, head)?;
        let Some(mut item) = self.logged_item(ino)? else { return Ok(()) };
        let links = if item.is_dir() { 1 } else { u32::try_from(are.len()).unwrap_or(u32::MAX) };
        if item.nlink.get() != links {
            item.nlink = links.into();
            self.put(&inode_key(ino), item.as_bytes())?;
        }
        Ok(())
    }
    fn logged_item(&self, ino: ObjectId) -> Result<Option<InodeItem>> {
        let key = inode_key(ino);
        let Some(data) = self.log.tree.get(&key) else { return Ok(None) };
        InodeItem::parse(data).map(|i| Some(*i)).map_err(|e| self.corrupt(key, e))
    }
    /// Logs the extended attributes of an inode, which had `base_head` in the last commit and has
    /// other ones now. They have to be those that belong to the item which replaying will leave.
    /// Otherwise the two together would show a state that never existed.
    fn attributes(
        &mut self,
        ino: ObjectId,
        base_head: &[(Key, Vec<u8>)],
        head: &[(Key, Vec<u8>)],
    ) -> Result<()> {
        let known = self.base.get(&inode_key(ino))?.is_some();
        let of = match (self.asked.contains(&ino), self.log.full.contains(&ino)) {
            (true, _) => head,
            // They are in the log since its `fsync`, and its item, too.
            (false, true) => return Ok(()),
            // Replaying leaves the item as it was.
            (false, false) if known => base_head,
            (false, false) => head,
        };
        let of: Vec<_> =
            of.iter().filter(|(k, _)| k.kind == KeyType::XATTR_ITEM).cloned().collect();
        self.replace(items_of(ino, KeyType::XATTR_ITEM, KeyType::XATTR_ITEM), &of)
    }

    /// Removes names that the inode got according to the log, and does not have any more.
    fn give_up_claims(&mut self, ino: ObjectId, are: &[Reference]) -> Result<()> {
        let keys = items_of(ino, KeyType::INODE_REF, KeyType::INODE_EXTREF);
        let logged: Vec<_> = self.log.tree.range(keys).map(|(k, d)| (k, d.to_vec())).collect();
        for name in self.names(&logged)? {
            if are.contains(&name) {
                continue;
            }
            self.queue_holder(&name)?;
            let claim = (name.dir, name.name);
            if self.log.claims.get(&claim) == Some(&ino) {
                self.log.claims.remove(&claim);
            }
            let key = dir_index_key(name.dir, name.index);
            if let Some(data) = self.log.tree.get(&key) {
                let entry = single_entry(data).map_err(|e| self.corrupt(key, e))?;
                if entry.name == claim.1 {
                    self.remove(key..=key);
                }
            }
        }
        Ok(())
    }

    /// An inode without names: the log keeps nothing of it, except what was removed from it.
    fn gone(&mut self, ino: ObjectId) -> Result<()> {
        self.log.full.remove(&ino);
        let was = self.item(self.base, ino)?;
        if was.is_some_and(|was| was.is_dir()) {
            // All that was in the directory has moved, or is gone as well.
            let keys = items_of(ino, KeyType::DIR_INDEX, KeyType::DIR_INDEX);
            let mut children = Vec::new();
            self.base.scan(keys.start(), keys.end(), |item| {
                children.push((item.key, item.data().to_vec()));
                Ok(children.len() <= MOST)
            })?;
            for (key, data) in children {
                let child = self.target(key, &data)?;
                self.queue.push_back(child);
            }
        }
        let is_ghost = self
            .log
            .tree
            .range(items_of(ino, KeyType::DIR_LOG_INDEX, KeyType::DIR_LOG_INDEX))
            .next()
            .is_some();
        if is_ghost {
            self.remove(items_of(ino, KeyType::INODE_REF, KeyType::XATTR_ITEM));
            self.remove(items_of(ino, KeyType::DIR_ITEM, KeyType(u8::MAX)));
            self.ghost(ino)
        } else {
            self.remove(items_of(ino, KeyType(0), KeyType(u8::MAX)));
            Ok(())
        }
    }
    /// Logs that a directory of the last commit existed. It is gone, but the log has to say what
    /// else was removed from it.
    fn ghost(&mut self, ino: ObjectId) -> Result<()> {
        let Some(mut item) = self.item(self.base, ino)? else { return Ok(()) };
        item.generation = U64::ZERO;
        self.put(&inode_key(ino), item.as_bytes())?;
        // Attributes that the log does not have would be removed.
        for (key, data) in
            Self::head(self.base, ino)?.iter().filter(|(k, _)| k.kind == KeyType::XATTR_ITEM)
        {
            self.put(key, data)?;
        }
        Ok(())
    }

    /// The item of an inode as it is now. The tree may not have all changes yet. Together with the
    /// extended attributes in the tree, the item in the tree would show a state that never existed.
    fn item_by_now(&self, ino: ObjectId) -> Result<Option<InodeItem>> {
        let Some(in_tree) = self.item(self.now, ino)? else { return Ok(None) };
        let in_memory =
            self.subvol.inodes.peek(ino.0).and_then(|inode| inode.item_for_log(self.core));
        Ok(Some(in_memory.unwrap_or(in_tree)))
    }

    /// Logs that an inode exists.
    fn exists(&mut self, ino: ObjectId) -> Result<()> {
        let key = inode_key(ino);
        let Some(mut item) = self.item_by_now(ino)? else { return Ok(()) };
        let kind = item.mode.get() & S_IFMT;
        let was = self.item(self.base, ino)?;
        if kind == S_IFLNK && was.is_none() {
            // A symlink never changes. All of it is logged, because otherwise it would be empty.
            self.put(&key, item.as_bytes())?;
            let at = extent_data_key(ino, FileOffset(0));
            if let Some(target) = self.now.get(&at)? {
                self.put(&at, target.data())?;
            }
            return Ok(());
        }
        item.generation = U64::ZERO;
        item.size = U64::ZERO;
        self.put(&key, item.as_bytes())?;
        if let Some(was) =
            was.filter(|was| kind == S_IFREG && was.inode_flags().contains(InodeFlags::PREALLOC))
        {
            // Replaying cuts a file behind its end. What was preallocated there comes back only
            // from the log.
            let from = extent_data_key(
                ino,
                FileOffset(ceil(was.size.get().min(crate::file::MAX_FILE_SIZE))),
            );
            let mut behind = Vec::new();
            self.base.scan(&from, &extent_data_key(ino, FileOffset(u64::MAX)), |item| {
                behind.push((item.key, item.data().to_vec()));
                Ok(true)
            })?;
            for (key, data) in behind {
                self.put(&key, &data)?;
            }
        }
        Ok(())
    }

    /// An inode has a name that it did not have in the last commit.
    fn won(&mut self, ino: ObjectId, name: &Reference) -> Result<()> {
        let dir = name.dir;
        let before = self.log.claims.insert((dir, name.name.clone()), ino);
        self.queue.extend(before.filter(|other| *other != ino));
        let known = self.base.get(&inode_key(dir))?.is_some();
        if !known {
            self.queue.push_back(dir);
            return Ok(());
        }
        if fault!(self.core.options.tuning, LogNoConflicts) {
            return Ok(());
        }
        let key = dir_item_key(dir, &name.name);
        if let Some(item) = self.base.get(&key)? {
            let entry = find_entry(item.data(), &name.name).map_err(|e| self.corrupt(key, e))?;
            if let Some(entry) = entry {
                let other = Self::inode_at(entry.location)?;
                self.queue.extend((other != ino).then_some(other));
            }
        }
        let key = dir_index_key(dir, name.index);
        if let Some(item) = self.base.get(&key)? {
            let other = self.target(key, item.data())?;
            self.queue.extend((other != ino).then_some(other));
        }
        Ok(())
    }

    /// An inode has lost a name. The inode that has the name now is concerned, because there may
    /// have been no moment at which the name was free.
    fn queue_holder(&mut self, name: &Reference) -> Result<()> {
        let key = dir_item_key(name.dir, &name.name);
        if let Some(item) = self.now.get(&key)? {
            let entry = find_entry(item.data(), &name.name).map_err(|e| self.corrupt(key, e))?;
            if let Some(entry) = entry {
                self.queue.push_back(Self::inode_at(entry.location)?);
            }
        }
        Ok(())
    }
    /// A name of the last commit is gone.
    fn lost(&mut self, name: &Reference) -> Result<()> {
        let dir = name.dir;
        let index = dir_index_key(dir, name.index);
        // A damaged directory may not have this index.
        if self.base.get(&index)?.is_none() || fault!(self.core.options.tuning, LogNoDeletions) {
            return Ok(());
        }
        let ranges = Key::new(dir, KeyType::DIR_LOG_INDEX, 0);
        let at = Key::new(dir, KeyType::DIR_LOG_INDEX, name.index);
        // An inode that has had the name since, according to the log, may have lost it as well.
        self.queue.extend(self.log.claims.get(&(dir, name.name.clone())));
        self.queue_holder(name)?;
        let covered = match self.log.tree.at_or_before(&ranges, &at) {
            Some((key, data)) => {
                DirLogIndex::parse(data).map_err(|e| self.corrupt(key, e))?.last.get() >= name.index
            }
            None => false,
        };
        if !covered {
            self.put(&at, DirLogIndex { last: U64::new(name.index) }.as_bytes())?;
        }
        if self.now.get(&inode_key(dir))?.is_some() {
            if self.log.tree.get(&inode_key(dir)).is_none() {
                // The directory is in the log now, so its names and attributes have to be, too.
                self.exists(dir)?;
                self.done.remove(&dir);
            }
            self.queue.push_back(dir);
            Ok(())
        } else {
            self.done.insert(dir);
            self.gone(dir)
        }
    }

    /// Logs what has come and gone in a directory, and the whole content of new directories in it.
    fn entries(&mut self, top: ObjectId) -> Result<()> {
        let mut ahead = vec![top];
        while let Some(dir) = ahead.pop() {
            if !self.listed.insert(dir) {
                continue;
            }
            self.queue.push_back(dir);
            let (logged, fresh) = self.entries_of(dir)?;
            for ino in logged {
                self.queue.push_back(ino);
            }
            for ino in fresh {
                let is_dir = self.item(self.now, ino)?.is_some_and(|item| item.is_dir());
                if is_dir && self.base.get(&inode_key(ino))?.is_none() {
                    ahead.push(ino);
                }
            }
            if self.queue.len() > MOST {
                return Err(NotLogged::Commit(Cause::TooMuch));
            }
        }
        Ok(())
    }
    /// One directory: returns all inodes that are concerned, and those that have come into it.
    fn entries_of(&mut self, dir: ObjectId) -> Result<(Vec<ObjectId>, Vec<ObjectId>)> {
        let keys = items_of(dir, KeyType::DIR_INDEX, KeyType::DIR_INDEX);
        let changes = changed(self.base, self.now, keys.start(), keys.end())?;
        let changes = changes.ok_or(NotLogged::Commit(Cause::TooMuch))?;
        let (mut concerned, mut fresh) = (Vec::new(), Vec::new());
        // A file that was logged by its own `fsync` may have gone since. The directory knows.
        let claims =
            self.log.claims.range((dir, Vec::new())..).take_while(|((at, _), _)| *at == dir);
        concerned.extend(claims.map(|(_, ino)| *ino));
        let stale: Vec<(Key, Vec<u8>)> =
            self.log.tree.range(keys).map(|(key, data)| (key, data.to_vec())).collect();
        let coming: HashSet<Key> =
            changes.iter().filter(|(_, _, is)| is.is_some()).map(|(key, ..)| *key).collect();
        for (key, data) in stale {
            concerned.push(self.target(key, &data)?);
            if !coming.contains(&key) {
                self.remove(key..=key);
            }
        }
        self.remove(items_of(dir, KeyType::DIR_LOG_INDEX, KeyType::DIR_LOG_INDEX));
        let mut range: Option<(u64, u64)> = None;
        for (key, was, is) in changes {
            if let Some(was) = was {
                concerned.push(self.target(key, &was)?);
                let index = key.offset;
                match &mut range {
                    Some((_, last)) if *last + 1 == index => *last = index,
                    _ => {
                        if let Some(done) = range.replace((index, index)) {
                            self.put_range(dir, done)?;
                        }
                    }
                }
            }
            if let Some(is) = is {
                let ino = self.target(key, &is)?;
                concerned.push(ino);
                fresh.push(ino);
                self.put(&key, &is)?;
            }
        }
        if let Some(done) = range {
            self.put_range(dir, done)?;
        }
        Ok((concerned, fresh))
    }
    fn put_range(&mut self, dir: ObjectId, (first, last): (u64, u64)) -> Result<()> {
        if fault!(self.core.options.tuning, LogNoDeletions) {
            return Ok(());
        }
        let key = Key::new(dir, KeyType::DIR_LOG_INDEX, first);
        self.put(&key, DirLogIndex { last: U64::new(last) }.as_bytes())
    }

    /// The inode that a DIR_INDEX leads to.
    fn target(&self, key: Key, data: &[u8]) -> Result<ObjectId> {
        let entry = single_entry(data).map_err(|e| self.corrupt(key, e))?;
        Self::inode_at(entry.location)
    }
    fn inode_at(location: Key) -> Result<ObjectId> {
        if location.kind == KeyType::INODE_ITEM {
            Ok(location.objectid)
        } else {
            Err(NotLogged::Commit(Cause::SubvolumeEntry))
        }
    }
}
