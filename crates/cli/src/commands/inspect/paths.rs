//! From inodes to paths and back, in one subvolume and through those it hangs in.

use crate::raw::Session;
use larder_format::items::dir::find_entry;
use larder_format::items::keys::dir_item_key;
use larder_format::items::{ExtRefs, InodeRefs};
use larder_format::{Key, KeyType, ObjectId, TreeId};
use std::collections::HashMap;
use std::ops::ControlFlow;

/// Deepest path; a longer chain is taken for a circle.
const DEEPEST: usize = 2048;
const TOP: u64 = 256;

/// Finds paths, and remembers those of directories.
pub(super) struct Paths<'a> {
    s: &'a Session<'a>,
    directories: HashMap<(TreeId, u64), Option<Vec<u8>>>,
    subvolumes: HashMap<TreeId, Vec<u8>>,
}

impl<'a> Paths<'a> {
    pub(super) fn new(s: &'a Session<'a>) -> Self {
        Self { s, directories: HashMap::new(), subvolumes: HashMap::new() }
    }

    /// Directories and names of an inode.
    fn names(&self, tree: TreeId, ino: u64, most: usize) -> Vec<(u64, Vec<u8>)> {
        let mut out = Vec::new();
        let Some(t) = self.s.trees.tree(tree) else { return out };
        let low = Key::new(ino, KeyType::INODE_REF, 0);
        let high = Key::new(ino, KeyType::INODE_EXTREF, u64::MAX);
        let gaps = t.walk(self.s.reader, low, high, &mut |item| {
            if item.key.kind == KeyType::INODE_REF {
                let refs = InodeRefs::new(item.data).map_while(Result::ok);
                out.extend(refs.map(|r| (item.key.offset, r.name.to_vec())));
            } else {
                let refs = ExtRefs::new(item.data).map_while(Result::ok);
                out.extend(refs.map(|r| (r.parent.0, r.name.to_vec())));
            }
            if out.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        self.s.problems.gaps(gaps);
        out.truncate(most);
        out
    }

    /// Path of a directory within its subvolume, with a slash in front, without one behind; the top
    /// is empty.
    fn directory(&mut self, tree: TreeId, dir: u64) -> Option<Vec<u8>> {
        let mut chain = Vec::new();
        let mut at = dir;
        let mut path = loop {
            if at == TOP {
                break Some(Vec::new());
            }
            if let Some(known) = self.directories.get(&(tree, at)) {
                break known.clone();
            }
            if chain.len() >= DEEPEST {
                break None;
            }
            match self.names(tree, at, 1).pop() {
                Some((up, name)) => {
                    chain.push((at, name));
                    at = up;
                }
                None => break None,
            }
        };
        for (ino, name) in chain.into_iter().rev() {
            if let Some(p) = &mut path {
                p.push(b'/');
                p.extend_from_slice(&name);
            }
            self.directories.insert((tree, ino), path.clone());
        }
        path
    }

    /// Where a subvolume hangs, from the top of the file system.
    fn subvolume(&mut self, tree: TreeId) -> Vec<u8> {
        let mut chain = Vec::new();
        let mut at = tree;
        let mut path = loop {
            if let Some(known) = self.subvolumes.get(&at) {
                break known.clone();
            }
            let Some(sub) = self.s.trees.subvolumes.get(&at).filter(|_| chain.len() < DEEPEST)
            else {
                break Vec::new();
            };
            let Some(up) = sub.parent else { break Vec::new() };
            chain.push((at, up, sub.dir, sub.name.clone()));
            at = up;
        };
        for (id, up, dir, name) in chain.into_iter().rev() {
            path.extend(self.directory(up, dir).unwrap_or_else(|| b"/?".to_vec()));
            path.push(b'/');
            path.extend_from_slice(&name);
            self.subvolumes.insert(id, path.clone());
        }
        path
    }

    /// Paths of an inode from the top of the file system, at most so many.
    pub(super) fn of(&mut self, tree: TreeId, ino: u64, most: usize) -> Vec<Vec<u8>> {
        let top = self.subvolume(tree);
        if ino == TOP {
            return vec![if top.is_empty() { b"/".to_vec() } else { top }];
        }
        let names = self.names(tree, ino, most);
        names
            .into_iter()
            .map(|(dir, name)| {
                let dir = self.directory(tree, dir).unwrap_or_else(|| b"/?".to_vec());
                [&top[..], &dir, b"/", &name].concat()
            })
            .collect()
    }
}

/// Follows a path from the top of a subvolume; symbolic links are not followed.
pub(super) fn resolve(
    s: &Session<'_>,
    start: TreeId,
    path: &[u8],
) -> anyhow::Result<(TreeId, u64)> {
    let (mut tree, mut ino) = (start, TOP);
    for name in path.split(|b| *b == b'/').filter(|n| !n.is_empty() && *n != b".") {
        let shown = String::from_utf8_lossy(path).into_owned();
        let t = s.trees.tree(tree).ok_or_else(|| anyhow::anyhow!("there is no tree {tree}"))?;
        let item = t.find(s.reader, dir_item_key(ObjectId(ino), name))?;
        let entry = item.as_deref().and_then(|d| find_entry(d, name).transpose()).transpose()?;
        let Some(entry) = entry else { anyhow::bail!("{shown}: no such file or directory") };
        (tree, ino) = match entry.location.kind {
            KeyType::ROOT_ITEM => (entry.location.objectid, TOP),
            _ => (tree, entry.location.objectid.0),
        };
    }
    Ok((tree, ino))
}

/// The subvolume that paths start in.
pub(super) fn default_subvolume(s: &Session<'_>) -> TreeId {
    let name = b"default";
    let root = s.trees.tree(ObjectId::ROOT_TREE);
    let item = root
        .and_then(|t| t.find(s.reader, dir_item_key(ObjectId::ROOT_TREE_DIR, name)).ok().flatten());
    let entry = item.as_deref().and_then(|d| find_entry(d, name).ok().flatten());
    entry.map_or(ObjectId::FS_TREE, |e| e.location.objectid)
}
