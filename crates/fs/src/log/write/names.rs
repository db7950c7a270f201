//! What has to be logged along with an inode, so that its names come out right.
//!
//! Replaying a log takes names away: a new name takes the place of who had it in the last commit,
//! and a range of deletion takes what the directory had there. Whoever loses a name has others by
//! now, or is gone; if it has others, they have to be in the log, or the inode would be lost with
//! the name. Each of those may take names from yet others. [`Names`] follows that to its end, over
//! one version of the tree, so that what the log says was true at one moment.
//!
//! An inode that only its names are logged of *exists* in the log, with generation 0: replaying
//! leaves its item as the last commit has it. It makes extended attributes what the log has,
//! though; so of such inodes those of the last commit are logged.
//!
//! What was fsynced, and directories that are logged, take all directories above them along, as far
//! as those are not where the last commit has them: otherwise they would not be found under their
//! names, and two directories could end within each other.

use super::blocks::Blocks;
use super::diff::changed;
use super::tree::LogTree;
use super::{Cause, Result, Stop};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place};
use crate::file::ceil;
use crate::log::names::{Reference, references};
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

/// Inodes that one batch looks at for their names at most.
const MOST: usize = 20_000;

/// The log of a subvolume as its leader has it in memory.
#[derive(Debug)]
pub(super) struct SubvolLog {
    pub(super) tree: LogTree,
    /// Names that logged inodes have won since the last commit, and whose they are.
    claims: BTreeMap<(ObjectId, Vec<u8>), ObjectId>,
    /// Inodes whose content is logged, too.
    full: HashSet<ObjectId>,
    /// It may have checksums of parts of a note: those of files that share extents.
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
    /// Those that were fsynced: they must be found.
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

    /// Logs an inode as `item`, and its names; for a directory that was asked for, also what has
    /// come and gone in it, and where its companions are. False where the inode has no name any
    /// more: nothing of it is in the log then.
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
                return Err(Stop::Commit(Cause::TooMuch));
            }
        }
        Ok(self.log.full.contains(&ino))
    }

    fn corrupt(&self, key: Key, e: impl std::fmt::Display) -> Stop {
        Stop::Fail(Error::corrupt(Place::item(self.subvol.id, key), e.to_string()))
    }
    fn put(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.log.tree.put(self.blocks, key, data)
    }
    fn remove(&mut self, keys: RangeInclusive<Key>) {
        self.log.tree.remove(self.blocks, keys);
    }
    /// Makes `items` all that there is in a range of keys.
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
    /// References and attributes of an inode as they lie in a version.
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

    /// Logs the names that one inode has, and notes who is concerned by them.
    fn follow(&mut self, ino: ObjectId) -> Result<()> {
        if ino == ObjectId(self.subvol.root_dir) {
            // It has no name that could change.
            if self.log.tree.get(&inode_key(ino)).is_some() && self.done.insert(ino) {
                let (base_head, head) = (Self::head(self.base, ino)?, Self::head(self.now, ino)?);
                self.attributes(ino, &base_head, &head)?;
            }
            return Ok(());
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
            let is_dir = self.item(self.now, ino)?.is_some_and(|item| item.is_dir());
            if is_dir || self.asked.contains(&ino) {
                // The way to what was fsynced, and of directories that move.
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
            let logged = self.log.tree.get(&inode_key(ino)).is_some();
            if !logged && are == were {
                return Ok(());
            }
            if !self.log.full.contains(&ino) {
                self.exists(ino)?;
            }
            let refs: Vec<_> =
                head.iter().filter(|(k, _)| k.kind != KeyType::XATTR_ITEM).cloned().collect();
            self.replace(items_of(ino, KeyType::INODE_REF, KeyType::INODE_EXTREF), &refs)?;
            self.attributes(ino, &base_head, &head)?;
            if let Some(mut item) = self.logged_item(ino)? {
                let links =
                    if item.is_dir() { 1 } else { u32::try_from(are.len()).unwrap_or(u32::MAX) };
                if item.nlink.get() != links {
                    item.nlink = links.into();
                    self.put(&inode_key(ino), item.as_bytes())?;
                }
            }
            for name in are.iter().filter(|name| !were.contains(name)) {
                self.won(ino, name)?;
            }
        }
        for name in &were {
            // One that it has again stands elsewhere in the directory. Linux would take the old
            // entry away when it comes to the new one, after the inode's item, and leave the time
            // of replaying in it.
            if !are.contains(name) {
                self.lost(name)?;
            }
        }
        Ok(())
    }
    fn logged_item(&self, ino: ObjectId) -> Result<Option<InodeItem>> {
        let key = inode_key(ino);
        let Some(data) = self.log.tree.get(&key) else { return Ok(None) };
        InodeItem::parse(data).map(|i| Some(*i)).map_err(|e| self.corrupt(key, e))
    }
    /// Logs the extended attributes of an inode, given what it had in the last commit and has now:
    /// those that belong to the item that replaying will leave, or the two together would show a
    /// state that never was.
    fn attributes(
        &mut self,
        ino: ObjectId,
        base_head: &[(Key, Vec<u8>)],
        head: &[(Key, Vec<u8>)],
    ) -> Result<()> {
        let known = self.base.get(&inode_key(ino))?.is_some();
        let of = match (self.asked.contains(&ino), self.log.full.contains(&ino)) {
            (true, _) => head,
            // They are in the log since it was fsynced, and its item with them.
            (false, true) => return Ok(()),
            // Replaying leaves its item as it was.
            (false, false) if known => base_head,
            (false, false) => head,
        };
        let of: Vec<_> =
            of.iter().filter(|(k, _)| k.kind == KeyType::XATTR_ITEM).cloned().collect();
        self.replace(items_of(ino, KeyType::XATTR_ITEM, KeyType::XATTR_ITEM), &of)
    }

    /// Names that the log says an inode has won and that it has not any more.
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

    /// An inode without names: nothing of it stays in the log but what was removed from it.
    fn gone(&mut self, ino: ObjectId) -> Result<()> {
        self.log.full.remove(&ino);
        let was = self.item(self.base, ino)?;
        if was.is_some_and(|was| was.is_dir()) {
            // Whoever was in it has moved, or is gone as well.
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
    /// A directory of the last commit that is gone, and of which the log says what else has gone
    /// from it.
    fn ghost(&mut self, ino: ObjectId) -> Result<()> {
        let Some(mut item) = self.item(self.base, ino)? else { return Ok(()) };
        item.generation = U64::ZERO;
        self.put(&inode_key(ino), item.as_bytes())?;
        // Attributes that the log has not would be taken away.
        for (key, data) in
            Self::head(self.base, ino)?.iter().filter(|(k, _)| k.kind == KeyType::XATTR_ITEM)
        {
            self.put(key, data)?;
        }
        Ok(())
    }

    /// The item of an inode as it is by now: what an operation changed may not be in the tree yet.
    /// With the one there, and the extended attributes that are there, the log would show a state
    /// that never was.
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
            // A symlink never changes: all of it, or it would be empty.
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
            // Replaying cuts a file behind its end: what was reserved there comes back only from
            // the log.
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

    /// An inode has a name that it had not in the last commit.
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

    /// Somebody has lost a name: who has it by now is concerned. There may have been no moment at
    /// which nobody had it.
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
    /// A name of the last commit is no more.
    fn lost(&mut self, name: &Reference) -> Result<()> {
        let dir = name.dir;
        let index = dir_index_key(dir, name.index);
        // A damaged directory may not have it.
        if self.base.get(&index)?.is_none() || fault!(self.core.options.tuning, LogNoDeletions) {
            return Ok(());
        }
        let ranges = Key::new(dir, KeyType::DIR_LOG_INDEX, 0);
        let at = Key::new(dir, KeyType::DIR_LOG_INDEX, name.index);
        // Who has had the name since, as far as the log knows, and may have lost it as well.
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
                // Now that it is in the log, its names and attributes have to be, too.
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

    /// Logs what has come and gone in a directory, and all of directories that have come.
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
                return Err(Stop::Commit(Cause::TooMuch));
            }
        }
        Ok(())
    }
    /// One directory: all inodes that are concerned, and those that have come into it.
    fn entries_of(&mut self, dir: ObjectId) -> Result<(Vec<ObjectId>, Vec<ObjectId>)> {
        let keys = items_of(dir, KeyType::DIR_INDEX, KeyType::DIR_INDEX);
        let changes = changed(self.base, self.now, keys.start(), keys.end())?;
        let changes = changes.ok_or(Stop::Commit(Cause::TooMuch))?;
        let (mut concerned, mut fresh) = (Vec::new(), Vec::new());
        // A file that was logged for itself may have gone since: the directory knows.
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
            Err(Stop::Commit(Cause::SubvolumeEntry))
        }
    }
}
