//! What differs between two subvolumes, one line for each inode or name.
//!
//! An inode is the same on both sides as it is for a stream. One that both have is renamed where
//! its names differ, and changed where its data, its attributes or its owner do. Times alone are
//! no change: a directory gets new ones with each name, and so would be in every list.
//!
//! Lines come by rising inode number, because that takes no memory, however much differs.

use crate::error::Result;
use crate::pair::{Pair, join, kind_of, path_in};
use larder_format::items::{FileType, InodeItem};
use larder_format::{KeyType, ObjectId};
use larder_fs::{Comparison, Frozen, FrozenName, ItemChange};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Sort {
    Added,
    Removed,
    Renamed,
    Changed,
}

/// What an inode has otherwise than before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Bytes of a file, or its size.
    pub data: bool,
    /// Permissions.
    pub mode: bool,
    /// User or group.
    pub owner: bool,
    /// Extended attributes.
    pub xattrs: bool,
    /// Flags, as `chattr` sets them.
    pub flags: bool,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What happened.
    pub sort: Sort,
    /// Path in the newer subvolume; in the older one of what was removed.
    pub path: Vec<u8>,
    /// Former path of what was renamed.
    pub from: Option<Vec<u8>>,
    /// Its type.
    pub kind: FileType,
    /// What changed.
    pub changes: Changes,
    /// Size before and after; 0 where it is not a file.
    pub sizes: (u64, u64),
}

/// Calls `each` for all differences.
///
/// # Errors
/// Reading, corruption; what `each` says.
pub fn diff<E: From<crate::Error>>(
    old: &Frozen,
    new: &Frozen,
    mut each: impl FnMut(Change) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let pair = Pair::new(Some(old), new);
    let mut comparison = Comparison::new(Some(old), new);
    let mut inode: Option<Inode> = None;
    while let Some(changes) = comparison.step().map_err(crate::Error::from)? {
        for change in &changes {
            let ino = change.key.objectid;
            if let Some(done) = inode.take_if(|inode| inode.ino != ino) {
                done.tell(&pair, &mut each)?;
            }
            inode.get_or_insert_with(|| Inode::new(ino)).note(change);
        }
    }
    inode.map_or(Ok(()), |inode| inode.tell(&pair, &mut each))
}

type Paths = Vec<Vec<u8>>;

/// What was found of an inode number.
struct Inode {
    ino: ObjectId,
    names: bool,
    xattrs: bool,
    data: bool,
}

impl Inode {
    fn new(ino: ObjectId) -> Self {
        Self { ino, names: false, xattrs: false, data: false }
    }

    fn note(&mut self, change: &ItemChange) {
        match change.key.kind {
            KeyType::INODE_REF | KeyType::INODE_EXTREF => self.names = true,
            KeyType::XATTR_ITEM => self.xattrs = true,
            KeyType::EXTENT_DATA => self.data = true,
            _ => {}
        }
    }

    fn tell<E: From<crate::Error>>(
        &self,
        pair: &Pair<'_>,
        each: &mut impl FnMut(Change) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        for change in self.changes(pair)? {
            each(change)?;
        }
        Ok(())
    }

    fn changes(&self, pair: &Pair<'_>) -> Result<Vec<Change>> {
        let old_tree = pair.old.expect("a comparison of two");
        let (old, new) = (pair.old_inode(self.ino)?, pair.new.inode(self.ino)?);
        let same = pair.is_same(self.ino)?;
        let mut out = Vec::new();
        if same && let (Some(old), Some(new)) = (old, new) {
            self.of_both(pair, &old, &new, &mut out)?;
            return Ok(out);
        }
        if let Some(old) = old {
            for path in paths(old_tree, self.ino)? {
                out.push(one(Sort::Removed, path, &old, (size_of(&old), 0))?);
            }
        }
        if let Some(new) = new {
            for path in paths(pair.new, self.ino)? {
                out.push(one(Sort::Added, path, &new, (0, size_of(&new)))?);
            }
        }
        Ok(out)
    }

    /// What differs in an inode that both have. A rename takes one name away and adds
    /// another.
    fn of_both(
        &self,
        pair: &Pair<'_>,
        old: &InodeItem,
        new: &InodeItem,
        out: &mut Vec<Change>,
    ) -> Result<()> {
        let sizes = (size_of(old), size_of(new));
        let changes = self.what(old, new);
        let mut renamed = false;
        if self.names {
            let (gone, come) = self.names(pair)?;
            let mut come = come.into_iter();
            for from in gone {
                let (sort, path, from) = match come.next() {
                    Some(to) => (Sort::Renamed, to, Some(from)),
                    None => (Sort::Removed, from, None),
                };
                let told =
                    if sort == Sort::Renamed && !renamed { changes } else { Changes::default() };
                renamed |= sort == Sort::Renamed;
                out.push(Change { from, changes: told, ..one(sort, path, new, sizes)? });
            }
            for path in come {
                out.push(one(Sort::Added, path, new, sizes)?);
            }
        }
        if !renamed && changes != Changes::default() {
            let path = path_in(pair.new, self.ino)?;
            out.push(Change { changes, ..one(Sort::Changed, path, new, sizes)? });
        }
        Ok(())
    }

    fn what(&self, old: &InodeItem, new: &InodeItem) -> Changes {
        Changes {
            data: self.data || size_of(old) != size_of(new),
            mode: old.mode != new.mode,
            owner: (old.uid, old.gid) != (new.uid, new.gid),
            xattrs: self.xattrs,
            flags: old.flags != new.flags,
        }
    }

    /// The paths of names that went, in the older tree, and of those that came, in the newer one.
    fn names(&self, pair: &Pair<'_>) -> Result<(Paths, Paths)> {
        let old_tree = pair.old.expect("a comparison of two");
        let (old, new) = (old_tree.names(self.ino)?, pair.new.names(self.ino)?);
        let only = |tree: &Frozen, of: &[FrozenName], not: &[FrozenName]| -> Result<Paths> {
            let names = of.iter().filter(|name| not.binary_search(name).is_err());
            names.map(|name| Ok(join(&path_in(tree, name.dir)?, &name.name))).collect()
        };
        Ok((only(old_tree, &old, &new)?, only(pair.new, &new, &old)?))
    }
}

fn size_of(inode: &InodeItem) -> u64 {
    if inode.is_dir() { 0 } else { inode.size.get() }
}

fn paths(tree: &Frozen, ino: ObjectId) -> Result<Paths> {
    let names = tree.names(ino)?;
    names.iter().map(|name| Ok(join(&path_in(tree, name.dir)?, &name.name))).collect()
}

fn one(sort: Sort, path: Vec<u8>, inode: &InodeItem, sizes: (u64, u64)) -> Result<Change> {
    let kind = kind_of(inode)?;
    Ok(Change { sort, path, from: None, kind, changes: Changes::default(), sizes })
}
