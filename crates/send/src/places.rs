//! Where each inode hangs at the receiver while a stream is applied.
//!
//! The receiver begins with the names of the older subvolume and ends with those of the newer one.
//! Inodes get their final names one after the other, by rising number. A directory is **settled**
//! when it and all directories above it have their final names; from then on its path does not
//! change. The rules are:
//!
//! - Before a name is given in a directory, that directory is settled, from the root down. The
//!   newer tree has no circles, so this ends; and a settled directory never lies below one that is
//!   still to be moved, so no directory is moved into itself.
//! - If another inode still has the wanted name, it is **evicted**: renamed to a name of its own in
//!   the root directory, or unlinked at once if it is to be deleted. It gets its final name at its
//!   own turn. So exchanged names and circles need no case of their own, and a rename that is in
//!   no inode's way stays one rename.
//! - A directory that is to be deleted goes at the end, when all that was in it has gone.
//!
//! Nothing is remembered of an inode that has the same names on both sides. Its path follows from
//! the directories above it.

use crate::error::{Error, Result};
use crate::inherited::Inherited;
use crate::inodes::InodeSet;
use crate::output::Output;
use crate::pair::{MAX_DEPTH, Pair, join, kind_of, name_of_dir, path_in};
use larder_format::items::{FileType, InodeItem};
use larder_format::{Generation, ObjectId};
use larder_fs::{Frozen, FrozenName};
use larder_stream::Command;
use std::collections::{BTreeMap, HashMap};

/// Paths of directories that are kept before all are forgotten.
const KEPT_PATHS: usize = 1 << 12;
/// Entries of a directory that are looked at in one go.
const PAGE: usize = 1024;

/// A name that an inode of the older subvolume has lost before its turn.
#[derive(Debug)]
struct Evicted {
    name: FrozenName,
    /// The name in the root directory that it has instead. `None` if it was unlinked.
    instead: Option<Vec<u8>>,
}

/// Names at the receiver, as far as the stream has come.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    pair: &'a Pair<'a>,
    /// The inode whose turn it is: those below have their final names.
    turn: ObjectId,
    settled: InodeSet,
    /// Inodes other than directories that got their names before or after their turn.
    renamed: InodeSet,
    evicted: HashMap<(ObjectId, Generation), Vec<Evicted>>,
    /// Directories of the older subvolume that are to be deleted, with their generations.
    doomed: BTreeMap<ObjectId, Generation>,
    /// Directories whose times have changed because of a name in them.
    pub(crate) touched: InodeSet,
    pub(crate) inherited: Inherited<'a>,
    /// Paths of directories of the older (`false`) and the newer subvolume.
    paths: HashMap<(bool, ObjectId), Vec<u8>>,
    /// The inode that was deleted at this turn: its names are noted until the next one.
    deleted: Option<(ObjectId, Generation)>,
}

impl<'a> Places<'a> {
    pub(crate) fn new(pair: &'a Pair<'a>) -> Self {
        let mut settled = InodeSet::default();
        settled.insert(pair.root());
        Self {
            pair,
            turn: ObjectId(0),
            settled,
            renamed: InodeSet::default(),
            evicted: HashMap::new(),
            doomed: BTreeMap::new(),
            touched: InodeSet::default(),
            inherited: Inherited::new(pair),
            paths: HashMap::new(),
            deleted: None,
        }
    }

    /// It is the turn of the inodes with this number.
    pub(crate) fn begin(&mut self, ino: ObjectId) {
        self.turn = ino;
        if let Some(last) = self.deleted.take() {
            self.evicted.remove(&last);
        }
    }

    /// An inode that only the older subvolume has goes, now or at the end.
    pub(crate) fn delete(
        &mut self,
        out: &mut Output<'_>,
        ino: ObjectId,
        inode: &InodeItem,
    ) -> Result<()> {
        if inode.is_dir() {
            self.doomed.insert(ino, inode.created());
            return Ok(());
        }
        self.deleted = Some((ino, inode.created()));
        for name in self.old_names(ino)? {
            let Some(path) = self.path_now(ino, inode.created(), &name)? else { continue };
            out.write(&Command::Unlink { path: &path })?;
            self.touch_old(name.dir)?;
            self.note(ino, inode.created(), Evicted { name, instead: None });
        }
        Ok(())
    }

    /// An inode that only the newer subvolume has comes, under all its names.
    pub(crate) fn create(
        &mut self,
        out: &mut Output<'_>,
        ino: ObjectId,
        inode: &InodeItem,
    ) -> Result<()> {
        if inode.is_dir() {
            self.settle(out, ino)?;
            return self.settle_former_children(out, ino);
        }
        let names = self.new_names(ino)?;
        let mut first: Option<Vec<u8>> = None;
        for name in &names {
            self.make_room(out, name)?;
            let path = self.final_path(name)?;
            match &first {
                None => {
                    self.suspend(out, name.dir)?;
                    self.make(out, ino, inode, &path)?;
                    first = Some(path);
                }
                Some(target) => out.write(&Command::Link { path: &path, target })?,
            }
            self.touched.insert(name.dir);
        }
        Ok(())
    }

    fn make(
        &self,
        out: &mut Output<'_>,
        ino: ObjectId,
        inode: &InodeItem,
        path: &[u8],
    ) -> Result<()> {
        let (rdev, mode) = (encode_rdev(inode.rdev.get()), u64::from(inode.mode.get()));
        let number = Some(ino);
        let target;
        let command = match kind_of(inode)? {
            FileType::Directory => Command::Mkdir { path, ino: number },
            FileType::Symlink => {
                target = self.pair.new.target(ino)?;
                Command::Symlink { path, ino: number, target: &target }
            }
            FileType::CharDevice | FileType::BlockDevice => {
                Command::Mknod { path, ino: number, rdev, mode }
            }
            FileType::Fifo => {
                Command::Mkfifo { path, ino: number, rdev: Some(rdev), mode: Some(mode) }
            }
            FileType::Socket => {
                Command::Mksock { path, ino: number, rdev: Some(rdev), mode: Some(mode) }
            }
            _ => Command::Mkfile { path, ino: number },
        };
        out.write(&command)
    }

    /// Gives an inode that both subvolumes have its final names.
    pub(crate) fn rename(
        &mut self,
        out: &mut Output<'_>,
        ino: ObjectId,
        inode: &InodeItem,
    ) -> Result<()> {
        if inode.is_dir() {
            return self.settle(out, ino);
        }
        if self.renamed.contains(ino) {
            return Ok(());
        }
        let (old, new) = (self.old_names(ino)?, self.new_names(ino)?);
        let (mut kept, mut gone) = (Vec::new(), Vec::new());
        let mut replaced = false;
        for name in old {
            let stays = self.pair.is_same(name.dir)?;
            replaced |= !stays;
            if stays && new.binary_search(&name).is_ok() {
                kept.push(name)
            } else {
                gone.push(name)
            }
        }
        let come: Vec<FrozenName> =
            new.into_iter().filter(|n| kept.binary_search(n).is_err()).collect();
        for name in &come {
            self.make_room(out, name)?;
        }
        self.exchange(out, ino, inode.created(), &kept, gone, &come)?;
        // A directory was replaced by one of the same number, and will ask for this inode again.
        if replaced {
            self.renamed.insert(ino);
        }
        Ok(())
    }

    /// Turns the names that go into those that come. The places of both are ready.
    fn exchange(
        &mut self,
        out: &mut Output<'_>,
        ino: ObjectId,
        generation: Generation,
        kept: &[FrozenName],
        gone: Vec<FrozenName>,
        come: &[FrozenName],
    ) -> Result<()> {
        let mut come = come.iter();
        let mut spare: Option<Vec<u8>> = None;
        for name in gone {
            let Some(path) = self.path_now(ino, generation, &name)? else { continue };
            match come.next() {
                Some(new) => {
                    let to = self.final_path(new)?;
                    out.write(&Command::Rename { path: &path, to: &to })?;
                    self.touched.insert(new.dir);
                    spare = Some(to);
                }
                None => out.write(&Command::Unlink { path: &path })?,
            }
            self.touch_old(name.dir)?;
        }
        for new in come {
            let target = match (&spare, kept.first()) {
                (Some(path), _) => path.clone(),
                (None, Some(name)) => join(&self.dir_of_new(name.dir)?, &name.name),
                (None, None) => return Err(self.nameless(ino)),
            };
            let path = self.final_path(new)?;
            out.write(&Command::Link { path: &path, target: &target })?;
            self.touched.insert(new.dir);
        }
        self.evicted.remove(&(ino, generation));
        Ok(())
    }

    /// A path of an inode of the newer subvolume whose turn is now, or was.
    pub(crate) fn path(&mut self, out: &mut Output<'_>, ino: ObjectId) -> Result<Vec<u8>> {
        if ino == self.pair.root() {
            return Ok(Vec::new());
        }
        let names = self.new_names(ino)?;
        let name = names.first().ok_or_else(|| self.nameless(ino))?;
        if !self.settled.contains(name.dir)
            && !self.pair.is_same(name.dir)?
            && let Some(inode) = self.pair.new.inode(ino)?
        {
            // The directory is new and has the number of a former one, so that no comparison has
            // shown that the inode moves.
            self.rename(out, ino, &inode)?;
        }
        Ok(join(&self.dir_of_new(name.dir)?, &name.name))
    }

    /// The path of a directory of the newer subvolume, wherever it is now.
    pub(crate) fn dir_of_new(&mut self, dir: ObjectId) -> Result<Vec<u8>> {
        if self.pair.is_same(dir)? && !self.settled.contains(dir) {
            return self.dir_of_old(dir);
        }
        self.settled_path(dir)
    }

    /// Deletes the directories that only the older subvolume has: those below come first.
    pub(crate) fn delete_directories(&mut self, out: &mut Output<'_>) -> Result<()> {
        let doomed = std::mem::take(&mut self.doomed);
        let mut children: BTreeMap<ObjectId, u64> = BTreeMap::new();
        let parent = |dir: ObjectId| -> Result<ObjectId> {
            let old = self.pair.old.expect("only an older subvolume has what is deleted");
            Ok(name_of_dir(old, dir)?.dir)
        };
        for dir in doomed.keys() {
            *children.entry(parent(*dir)?).or_default() += 1;
        }
        let mut ready: Vec<ObjectId> =
            doomed.keys().rev().filter(|d| !children.contains_key(d)).copied().collect();
        while let Some(dir) = ready.pop() {
            let above = parent(dir)?;
            self.remove_directory(out, dir, doomed[&dir])?;
            let left = children.get_mut(&above).expect("it was counted");
            *left -= 1;
            if *left == 0 && doomed.contains_key(&above) {
                ready.push(above);
            }
        }
        Ok(())
    }

    fn remove_directory(
        &mut self,
        out: &mut Output<'_>,
        dir: ObjectId,
        generation: Generation,
    ) -> Result<()> {
        let name = self.old_dir_name(dir)?;
        if let Some(path) = self.path_now(dir, generation, &name)? {
            out.write(&Command::Rmdir { path: &path })?;
            self.touch_old(name.dir)?;
        }
        Ok(())
    }

    /// Settles a directory of the newer subvolume and all above it.
    fn settle(&mut self, out: &mut Output<'_>, dir: ObjectId) -> Result<()> {
        let mut chain = Vec::new();
        let mut at = dir;
        while !self.settled.contains(at) {
            if chain.len() >= MAX_DEPTH {
                return Err(Error::Circle { tree: self.pair.new.id().0, ino: at.0 });
            }
            let name = name_of_dir(self.pair.new, at)?;
            chain.push((at, name.clone()));
            at = name.dir;
        }
        while let Some((dir, name)) = chain.pop() {
            self.settle_one(out, dir, &name)?;
        }
        Ok(())
    }

    /// Gives a directory its final name, in a directory that is settled.
    fn settle_one(&mut self, out: &mut Output<'_>, dir: ObjectId, name: &FrozenName) -> Result<()> {
        if !self.pair.is_same(dir)? {
            self.vacate(out, name)?;
            self.suspend(out, name.dir)?;
            let path = self.final_path(name)?;
            out.write(&Command::Mkdir { path: &path, ino: Some(dir) })?;
            self.touched.insert(name.dir);
        } else {
            self.move_directory(out, dir, name)?;
        }
        self.settled.insert(dir);
        Ok(())
    }

    fn move_directory(
        &mut self,
        out: &mut Output<'_>,
        dir: ObjectId,
        name: &FrozenName,
    ) -> Result<()> {
        let old = self.old_dir_name(dir)?;
        let generation = self.pair.new.generation(dir)?.ok_or_else(|| self.nameless(dir))?;
        if old == *name && self.pair.is_same(name.dir)? {
            return Ok(());
        }
        self.vacate(out, name)?;
        let Some(from) = self.path_now(dir, generation, &old)? else {
            return Err(self.nameless(dir));
        };
        let to = self.final_path(name)?;
        out.write(&Command::Rename { path: &from, to: &to })?;
        self.paths.clear();
        self.evicted.remove(&(dir, generation));
        self.touched.insert(name.dir);
        self.touch_old(old.dir)
    }

    /// A directory was replaced by a new one of the same number. Inodes that were in the former one
    /// and are in the new one have references that are equal to the byte, so no comparison shows
    /// that they move.
    fn settle_former_children(&mut self, out: &mut Output<'_>, dir: ObjectId) -> Result<()> {
        let Some(old) = self.pair.old else { return Ok(()) };
        if !old.inode(dir)?.is_some_and(|inode| inode.is_dir()) {
            return Ok(());
        }
        let mut next = Some(0);
        while let Some(from) = next {
            let (entries, behind) = old.entries(dir, from, PAGE)?;
            for entry in entries {
                if !self.pair.is_same(entry.ino)? {
                    continue;
                }
                if let Some(inode) = self.pair.new.inode(entry.ino)? {
                    self.rename(out, entry.ino, &inode)?;
                }
            }
            next = behind;
        }
        Ok(())
    }

    /// Settles the directory of a name that is to be given, and evicts what has it.
    fn make_room(&mut self, out: &mut Output<'_>, name: &FrozenName) -> Result<()> {
        self.settle(out, name.dir)?;
        self.vacate(out, name)
    }

    /// Evicts the inode that still has a name which belongs to another one in the end.
    fn vacate(&mut self, out: &mut Output<'_>, name: &FrozenName) -> Result<()> {
        let Some(old) = self.pair.old else { return Ok(()) };
        if !self.pair.is_same(name.dir)? {
            return Ok(());
        }
        let Some(entry) = old.lookup(name.dir, &name.name)? else { return Ok(()) };
        let Some(inode) = old.inode(entry.ino)? else { return Ok(()) };
        if self.has_left(entry.ino, &inode)? {
            return Ok(());
        }
        let generation = inode.created();
        let Some(path) = self.path_now(entry.ino, generation, name)? else { return Ok(()) };
        if self.is_evicted(entry.ino, generation, name) {
            return Ok(());
        }
        let instead = if inode.is_dir() || self.pair.is_same(entry.ino)? {
            let orphan = self.orphan_name(entry.ino, generation)?;
            out.write(&Command::Rename { path: &path, to: &orphan })?;
            self.touched.insert(self.pair.root());
            Some(orphan)
        } else {
            out.write(&Command::Unlink { path: &path })?;
            None
        };
        self.touched.insert(name.dir);
        if inode.is_dir() {
            self.paths.clear();
        }
        self.note(entry.ino, generation, Evicted { name: name.clone(), instead });
        Ok(())
    }

    /// An inode is about to be made in a settled directory.
    fn suspend(&mut self, out: &mut Output<'_>, dir: ObjectId) -> Result<()> {
        if self.pair.old.is_none() {
            return Ok(());
        }
        let path = self.settled_path(dir)?;
        self.inherited.suspend(out, dir, &path)
    }

    /// Has an inode of the older subvolume got its final names already?
    fn has_left(&self, ino: ObjectId, inode: &InodeItem) -> Result<bool> {
        Ok(if inode.is_dir() {
            self.pair.is_same(ino)? && self.settled.contains(ino)
        } else {
            ino < self.turn || self.renamed.contains(ino)
        })
    }

    /// Where a name of the older subvolume is now; `None` if it is gone.
    fn path_now(
        &mut self,
        ino: ObjectId,
        generation: Generation,
        name: &FrozenName,
    ) -> Result<Option<Vec<u8>>> {
        if let Some(evicted) = self.find_evicted(ino, generation, name) {
            return Ok(evicted.instead.clone());
        }
        Ok(Some(join(&self.dir_of_old(name.dir)?, &name.name)))
    }

    fn find_evicted(
        &self,
        ino: ObjectId,
        generation: Generation,
        name: &FrozenName,
    ) -> Option<&Evicted> {
        self.evicted.get(&(ino, generation))?.iter().find(|e| e.name == *name)
    }

    fn is_evicted(&self, ino: ObjectId, generation: Generation, name: &FrozenName) -> bool {
        self.find_evicted(ino, generation, name).is_some()
    }

    fn note(&mut self, ino: ObjectId, generation: Generation, evicted: Evicted) {
        self.evicted.entry((ino, generation)).or_default().push(evicted);
    }

    /// The path of a directory of the older subvolume, wherever it is now.
    fn dir_of_old(&mut self, dir: ObjectId) -> Result<Vec<u8>> {
        let old = self.pair.old.ok_or_else(|| self.nameless(dir))?;
        let mut names = Vec::new();
        let mut at = dir;
        let mut path = loop {
            if names.len() >= MAX_DEPTH {
                return Err(Error::Circle { tree: old.id().0, ino: at.0 });
            }
            if let Some(path) = self.known_path(old, at)? {
                break path;
            }
            let name = name_of_dir(old, at)?;
            at = name.dir;
            names.push(name.name);
        };
        for name in names.iter().rev() {
            path = join(&path, name);
        }
        self.keep(false, dir, &path);
        Ok(path)
    }

    /// The path of a directory of the older subvolume, if it is known without the one above it.
    fn known_path(&mut self, old: &Frozen, dir: ObjectId) -> Result<Option<Vec<u8>>> {
        if self.pair.is_same(dir)? && self.settled.contains(dir) {
            return self.settled_path(dir).map(Some);
        }
        if let Some(path) = self.paths.get(&(false, dir)) {
            return Ok(Some(path.clone()));
        }
        if self.evicted.is_empty() {
            return Ok(None);
        }
        let generation = old.generation(dir)?.ok_or_else(|| self.nameless(dir))?;
        let moved = self.evicted.get(&(dir, generation)).and_then(|e| e.first());
        Ok(moved.and_then(|e| e.instead.clone()))
    }

    /// The path of a settled directory.
    fn settled_path(&mut self, dir: ObjectId) -> Result<Vec<u8>> {
        if let Some(path) = self.paths.get(&(true, dir)) {
            return Ok(path.clone());
        }
        let path = path_in(self.pair.new, dir)?;
        self.keep(true, dir, &path);
        Ok(path)
    }

    fn keep(&mut self, new: bool, dir: ObjectId, path: &[u8]) {
        if self.paths.len() >= KEPT_PATHS {
            self.paths.clear();
        }
        self.paths.insert((new, dir), path.to_vec());
    }

    fn final_path(&mut self, name: &FrozenName) -> Result<Vec<u8>> {
        Ok(join(&self.settled_path(name.dir)?, &name.name))
    }

    /// A name that no inode has in the root directory of either subvolume, nor of the receiver.
    fn orphan_name(&self, ino: ObjectId, generation: Generation) -> Result<Vec<u8>> {
        let own = self.evicted.get(&(ino, generation)).map_or(&[][..], |own| own);
        let root = self.pair.root();
        for index in own.len().. {
            let name = format!("o{}-{}-{index}", ino.0, generation.0).into_bytes();
            let old = self.pair.old.map(|old| old.lookup(root, &name)).transpose()?.flatten();
            let taken = old.is_some()
                || self.pair.new.lookup(root, &name)?.is_some()
                || own.iter().any(|e| e.instead.as_deref() == Some(&name[..]));
            if !taken {
                return Ok(name);
            }
        }
        unreachable!("a directory has fewer names than there are numbers")
    }

    /// A directory of the older subvolume has lost a name; if it stays, its times have to be set.
    fn touch_old(&mut self, dir: ObjectId) -> Result<()> {
        if self.pair.is_same(dir)? {
            self.touched.insert(dir);
        }
        Ok(())
    }

    fn old_names(&self, ino: ObjectId) -> Result<Vec<FrozenName>> {
        Ok(self.pair.old.map(|old| old.names(ino)).transpose()?.unwrap_or_default())
    }

    fn new_names(&self, ino: ObjectId) -> Result<Vec<FrozenName>> {
        Ok(self.pair.new.names(ino)?)
    }

    fn old_dir_name(&self, dir: ObjectId) -> Result<FrozenName> {
        let old = self.pair.old.ok_or_else(|| self.nameless(dir))?;
        name_of_dir(old, dir)
    }

    fn nameless(&self, ino: ObjectId) -> Error {
        Error::Nameless { tree: self.pair.new.id().0, ino: ino.0 }
    }
}

/// A device number as a stream has it: the minor number lies around the major one.
fn encode_rdev(rdev: u64) -> u64 {
    let (major, minor) = larder_format::items::inode::split_rdev(rdev);
    let (major, minor) = (u64::from(major), u64::from(minor));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
