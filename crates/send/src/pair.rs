//! The two subvolumes of a stream: which inodes both have.
//!
//! Numbers are used again, so a number alone does not say that an inode is the same. Both must have
//! been made in the same transaction as well, and be of the same type. Of two subvolumes that do
//! not come from each other that can be true by chance. So what nothing can change later is
//! compared, too: the target of a symbolic link, the number of a device.

use crate::error::{Error, Result};
use larder_format::ObjectId;
use larder_format::items::{FileType, InodeItem};
use larder_fs::{Frozen, FrozenName};
use std::cell::RefCell;
use std::collections::HashMap;

/// Answers that are kept before all are forgotten.
const KEPT: usize = 1 << 14;

/// What is sent, and what the receiver has.
#[derive(Debug)]
pub(crate) struct Pair<'a> {
    pub(crate) old: Option<&'a Frozen>,
    pub(crate) new: &'a Frozen,
    same: RefCell<HashMap<ObjectId, bool>>,
}

impl<'a> Pair<'a> {
    pub(crate) fn new(old: Option<&'a Frozen>, new: &'a Frozen) -> Self {
        Self { old, new, same: RefCell::default() }
    }

    pub(crate) fn root(&self) -> ObjectId {
        self.new.root_dir()
    }

    /// An inode of the older subvolume, if there is one.
    pub(crate) fn old_inode(&self, ino: ObjectId) -> Result<Option<InodeItem>> {
        Ok(self.old.map(|old| old.inode(ino)).transpose()?.flatten())
    }

    /// Is the inode with this number the same in both?
    pub(crate) fn is_same(&self, ino: ObjectId) -> Result<bool> {
        let Some(old) = self.old else { return Ok(ino == self.root()) };
        if ino == self.root() {
            return Ok(true);
        }
        if let Some(same) = self.same.borrow().get(&ino) {
            return Ok(*same);
        }
        let same = match (old.inode(ino)?, self.new.inode(ino)?) {
            (Some(a), Some(b)) => is_same(old, self.new, ino, &a, &b)?,
            _ => false,
        };
        let mut kept = self.same.borrow_mut();
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert(ino, same);
        Ok(same)
    }
}

fn is_same(
    old: &Frozen,
    new: &Frozen,
    ino: ObjectId,
    a: &InodeItem,
    b: &InodeItem,
) -> Result<bool> {
    let (kind, other) = (kind_of(a)?, kind_of(b)?);
    if a.created() != b.created() || kind != other || a.rdev != b.rdev {
        return Ok(false);
    }
    Ok(kind != FileType::Symlink || old.target(ino)? == new.target(ino)?)
}

/// The type of an inode.
pub(crate) fn kind_of(inode: &InodeItem) -> Result<FileType> {
    inode.file_type().map_err(|e| {
        Error::Read(larder_fs::Error::Corrupt {
            place: larder_fs::error::Place::default(),
            what: e.0,
        })
    })
}

/// The one name of a directory.
pub(crate) fn name_of_dir(tree: &Frozen, dir: ObjectId) -> Result<FrozenName> {
    tree.names(dir)?.into_iter().next().ok_or(Error::Nameless { tree: tree.id().0, ino: dir.0 })
}

/// A path with one more name.
pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    if !dir.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// The path of an inode in its own tree, by the first of its names.
pub(crate) fn path_in(tree: &Frozen, ino: ObjectId) -> Result<Vec<u8>> {
    let mut names = Vec::new();
    let mut at = ino;
    while at != tree.root_dir() {
        if names.len() >= MAX_DEPTH {
            return Err(Error::Circle { tree: tree.id().0, ino: at.0 });
        }
        let name = name_of_dir(tree, at)?;
        at = name.dir;
        names.push(name.name);
    }
    names.reverse();
    Ok(names.join(&b'/'))
}

/// Directories above each other. A path of a stream has less than 64 KiB, so a tree of more levels
/// cannot be sent anyway.
pub(crate) const MAX_DEPTH: usize = 1 << 15;
