//! Paths, from references in both directions.
//!
//! A name stands three times in a tree: twice in its directory and once with its inode. Whichever
//! is left serves. A name that two inodes claim goes to the one that the directory names. What has
//! no place is put into [`LOST_AND_FOUND`], and so is what has a name that no host may be given, or
//! that is its own ancestor.

use crate::tree::Item;
use larder_format::items::dir::is_plain_name;
use larder_format::items::inode::mode_to_type;
use larder_format::items::{DirEntries, ExtRefs, FileType, InodeItem, InodeRefs};
use larder_format::{KeyType, ObjectId, TreeId};
use smallvec::SmallVec;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// Directory for what has no place.
pub(crate) const LOST_AND_FOUND: &[u8] = b"lost+found";
/// Inode of a subvolume's root directory.
pub(crate) const TOP: ObjectId = ObjectId::FIRST_FREE;
/// Deepest directory; a chain that is longer is taken for a circle.
const DEEPEST: usize = 2048;

type Name = Box<[u8]>;

/// What is known of an inode.
#[derive(Debug, Default)]
pub(crate) struct Inode {
    /// Its item was there.
    pub(crate) has_item: bool,
    /// Type, from its item or from a directory.
    pub(crate) kind: Option<FileType>,
    /// Links that its item counts.
    pub(crate) nlink: u32,
    /// Directory and name, the one that sorts first in front.
    pub(crate) names: SmallVec<[(ObjectId, Name); 1]>,
    /// As a directory: bytes of the names in it.
    pub(crate) name_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leads {
    Inode(ObjectId),
    Subvolume(TreeId),
}

#[derive(Clone, Copy, Debug)]
struct Claim {
    to: Leads,
    by_directory: bool,
}

/// Collects names while a tree is walked.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    inodes: HashMap<ObjectId, Inode>,
    claims: BTreeMap<(ObjectId, Name), Claim>,
    conflicts: u64,
}

/// All names of a subvolume.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) inodes: HashMap<ObjectId, Inode>,
    /// Subvolumes that hang here: directory, name, tree.
    pub(crate) mounts: Vec<(ObjectId, Vec<u8>, TreeId)>,
    /// Names that two inodes claimed.
    pub(crate) conflicts: u64,
}

impl Collector {
    /// Takes what an item says about names. Items that cannot be understood say nothing.
    pub(crate) fn item(&mut self, item: &Item<'_>) {
        let object = item.key.objectid;
        match item.key.kind {
            KeyType::INODE_ITEM => {
                if let Ok(i) = InodeItem::parse(item.data) {
                    let inode = self.inodes.entry(object).or_default();
                    inode.has_item = true;
                    inode.kind = mode_to_type(i.mode.get()).ok().or(inode.kind);
                    inode.nlink = i.nlink.get();
                }
            }
            KeyType::INODE_REF => {
                for r in InodeRefs::new(item.data).map_while(Result::ok) {
                    self.claim(ObjectId(item.key.offset), r.name, Leads::Inode(object), false);
                }
            }
            KeyType::INODE_EXTREF => {
                for r in ExtRefs::new(item.data).map_while(Result::ok) {
                    self.claim(r.parent, r.name, Leads::Inode(object), false);
                }
            }
            KeyType::DIR_ITEM | KeyType::DIR_INDEX => {
                for e in DirEntries::new(item.data).map_while(Result::ok) {
                    let to = e.location.objectid;
                    match e.location.kind {
                        KeyType::INODE_ITEM => {
                            let inode = self.inodes.entry(to).or_default();
                            inode.kind = inode.kind.or(Some(e.kind));
                            self.claim(object, e.name, Leads::Inode(to), true);
                        }
                        KeyType::ROOT_ITEM => {
                            self.claim(object, e.name, Leads::Subvolume(to), true)
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }

    fn claim(&mut self, dir: ObjectId, name: &[u8], to: Leads, by_directory: bool) {
        // The root directory refers to itself as `..`.
        if to == Leads::Inode(TOP) {
            return;
        }
        match self.claims.entry((dir, name.into())) {
            Entry::Vacant(v) => {
                v.insert(Claim { to, by_directory });
            }
            Entry::Occupied(mut o) => {
                let known = o.get_mut();
                if known.to == to {
                    known.by_directory |= by_directory;
                } else {
                    self.conflicts += 1;
                    if by_directory && !known.by_directory {
                        *known = Claim { to, by_directory };
                    }
                }
            }
        }
    }

    /// Number of inodes so far.
    pub(crate) fn len(&self) -> usize {
        self.inodes.len()
    }

    /// Sorts what was collected.
    pub(crate) fn finish(mut self) -> Names {
        let mut mounts = Vec::new();
        for ((dir, name), claim) in self.claims {
            if let Some(d) = self.inodes.get_mut(&dir) {
                d.name_bytes += name.len() as u64;
            }
            match claim.to {
                Leads::Inode(ino) => self.inodes.entry(ino).or_default().names.push((dir, name)),
                Leads::Subvolume(tree) => mounts.push((dir, name.into_vec(), tree)),
            }
        }
        Names { inodes: self.inodes, mounts, conflicts: self.conflicts }
    }
}

impl Names {
    /// Paths of an inode below its subvolume's root; the root's own is empty. Never none.
    pub(crate) fn paths(&self, ino: ObjectId) -> Vec<Vec<u8>> {
        if ino == TOP {
            return vec![Vec::new()];
        }
        let names = self.inodes.get(&ino).map_or(&[][..], |i| &i.names[..]);
        let mut out: Vec<Vec<u8>> =
            names.iter().filter_map(|(dir, name)| self.below(*dir, name, ino)).collect();
        if out.is_empty() {
            out.push(lost(ino));
        }
        out
    }

    /// Path of a name in a directory; `None` if it cannot stand in a directory of the host.
    fn below(&self, dir: ObjectId, name: &[u8], ino: ObjectId) -> Option<Vec<u8>> {
        if !is_plain_name(name) {
            return None;
        }
        let mut parts: Vec<&[u8]> = vec![name];
        let mut at = dir;
        let mut top = Vec::new();
        while at != TOP {
            let above = self.inodes.get(&at).and_then(|i| i.names.first());
            match above {
                Some((dir, name)) if is_plain_name(name) && at != ino => {
                    if parts.len() >= DEEPEST {
                        return None;
                    }
                    parts.push(name);
                    at = *dir;
                }
                _ if at == ino => return None,
                _ => {
                    top = lost(at);
                    break;
                }
            }
        }
        let mut path = top;
        for part in parts.into_iter().rev() {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(part);
        }
        Some(path)
    }

    /// Path of a directory, for what hangs in it.
    pub(crate) fn in_dir(&self, dir: ObjectId, name: &[u8]) -> Option<Vec<u8>> {
        self.below(dir, name, ObjectId(0))
    }
}

/// Where something without a place is put.
fn lost(ino: ObjectId) -> Vec<u8> {
    [LOST_AND_FOUND, b"/inode-", ino.0.to_string().as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[(u64, &[u8], u64)]) -> Names {
        let mut c = Collector::default();
        for (dir, name, ino) in list {
            let ino = ObjectId(*ino);
            c.inodes.entry(ino).or_default();
            c.claim(ObjectId(*dir), name, Leads::Inode(ino), true);
        }
        c.finish()
    }

    fn paths(n: &Names, ino: u64) -> Vec<String> {
        n.paths(ObjectId(ino)).into_iter().map(|p| String::from_utf8(p).unwrap()).collect()
    }

    #[test]
    fn names_become_paths() {
        let n =
            names(&[(256, b"a", 257), (257, b"b", 258), (258, b"c", 259), (256, b"again", 259)]);
        assert_eq!(paths(&n, 259), ["again", "a/b/c"]);
        assert_eq!(paths(&n, 256), [""]);
    }

    #[test]
    fn what_has_no_place_or_an_evil_name_is_kept_apart() {
        let n = names(&[
            (256, b"..", 300),
            (256, b"x/../../etc/passwd", 301),
            (300, b"child", 302),
            (999, b"stray", 303),
            (305, b"round", 304),
            (304, b"and round", 305),
            (306, b"self", 306),
        ]);
        assert_eq!(paths(&n, 300), ["lost+found/inode-300"]);
        assert_eq!(paths(&n, 301), ["lost+found/inode-301"]);
        assert_eq!(paths(&n, 302), ["lost+found/inode-300/child"]);
        assert_eq!(paths(&n, 303), ["lost+found/inode-999/stray"]);
        assert_eq!(paths(&n, 304), ["lost+found/inode-304"]);
        assert_eq!(paths(&n, 306), ["lost+found/inode-306"]);
        assert_eq!(paths(&n, 4711), ["lost+found/inode-4711"]);
    }

    #[test]
    fn a_directory_decides_who_owns_a_name() {
        let mut c = Collector::default();
        for (ino, by_directory) in [(300, false), (301, true), (302, false)] {
            c.claim(TOP, b"x", Leads::Inode(ObjectId(ino)), by_directory);
        }
        let n = c.finish();
        assert_eq!((paths(&n, 301), n.conflicts), (vec!["x".into()], 2));
        assert_eq!(paths(&n, 300), ["lost+found/inode-300"]);
    }
}
