//! Subvolumes, snapshots and deduplication in the model.
//!
//! Each inode knows the root directory of its subvolume. A snapshot copies inodes, not contents,
//! and gives the copies numbers of their own. Their numbers in the file system are known as soon as
//! that of the snapshot's root directory is. Where its source has a subvolume, a snapshot shows an
//! empty directory, in which nothing can be made and which can only be removed. Not modelled are
//! other operations on such a directory, files that are open in a subvolume which is deleted, and
//! exchanges of subvolumes.

use super::{Body, Ino, Node, ROOT, Refusal, Top, Touched, World, new_perm};
use crate::ops::{Bytes, Move, Op};
use crate::walk::PLACEHOLDER;
use larder_fs::FileKind;
use std::collections::BTreeMap;
use std::sync::Arc;

const SECTOR: u64 = 4096;

/// Bits of a number that [`crate::walk::real`] gives that say which inode of its subvolume it is.
const NUMBER: u64 = (1 << 40) - 1;

impl World {
    /// Root directory of the default subvolume.
    #[must_use]
    pub fn default_subvolume(&self) -> Ino {
        self.default
    }
    /// Says which it is: for worlds that are found, not made.
    pub fn set_default_subvolume(&mut self, top: Ino) {
        self.default = top;
    }
    /// All inodes of a subvolume, its root directory included.
    pub(crate) fn inodes_of(&self, top: Ino) -> impl Iterator<Item = Ino> + '_ {
        self.nodes().filter(move |(_, n)| n.home == top).map(|(i, _)| i)
    }
    /// Are there other subvolumes in this one?
    #[must_use]
    pub fn has_nested(&self, top: Ino) -> bool {
        let dirs = self.nodes().filter(|(_, n)| n.home == top && matches!(n.body, Body::Dir(_)));
        dirs.into_iter().any(|(i, _)| self.entries(i).values().any(|e| self.nodes[e].home != top))
    }

    /// Does what the operation changes lie in a subvolume that may be changed?
    pub(super) fn check_writable(&self, op: &Op) -> Result<(), Refusal> {
        let parent = |path: &String| self.parent(path).map(|(dir, _)| dir);
        let changed = match op {
            Op::Create(p)
            | Op::Mkdir(p)
            | Op::Mknod(_, p)
            | Op::Symlink { path: p, .. }
            | Op::Unlink(p)
            | Op::Rmdir(p)
            | Op::Subvolume(p)
            | Op::DeleteSubvolume(p)
            | Op::Snapshot { to: p, .. } => [parent(p), Err(Refusal::NotFound)],
            Op::Link { from, to } => [self.resolve(from), parent(to)],
            Op::Rename { from, to, .. } => [parent(from), parent(to)],
            Op::Write { path: p, .. }
            | Op::Append { path: p, .. }
            | Op::Truncate { path: p, .. }
            | Op::Allocate { path: p, .. }
            | Op::NoCow(p)
            | Op::SetXattr { path: p, .. }
            | Op::RemoveXattr { path: p, .. }
            | Op::Chmod { path: p, .. }
            | Op::Copy { to: p, .. } => [self.resolve(p), Err(Refusal::NotFound)],
            Op::Dedupe { .. }
            | Op::DefaultSubvolume(_)
            | Op::Fsync(_)
            | Op::Fdatasync(_)
            | Op::Sync
            | Op::Open { .. }
            | Op::Unnamed { .. }
            | Op::Close { .. } => return Ok(()),
        };
        let read_only = |ino: &Ino| self.nodes[&self.nodes[ino].home].top == Top::ReadOnly;
        if changed.iter().flatten().any(read_only) { Err(Refusal::ReadOnly) } else { Ok(()) }
    }

    /// May `moved` go from one directory to another, in the place of `target`, as far as subvolumes
    /// go?
    pub(super) fn check_border(
        &self,
        from_dir: Ino,
        to_dir: Ino,
        (moved, target): (Ino, Option<Ino>),
        mode: Move,
    ) -> Result<(), Refusal> {
        let is_top = |ino: Ino| self.nodes[&ino].top != Top::No;
        let tops = is_top(moved) || target.is_some_and(is_top);
        if tops && mode != Move::Replace {
            return Err(Refusal::NotModelled);
        }
        if target.is_some_and(|t| is_top(t) && t != moved) {
            return Err(Refusal::NotEmpty);
        }
        if !is_top(moved) && self.nodes[&from_dir].home != self.nodes[&to_dir].home {
            return Err(Refusal::CrossSubvolume);
        }
        Ok(())
    }

    pub(super) fn make_subvolume(&mut self, path: &str) -> Result<Touched, Refusal> {
        let touched = self.make(path, Body::Dir(BTreeMap::new()))?;
        let top = touched.made.expect("just made");
        let node = self.node_mut(top);
        node.top = Top::Writable;
        node.home = top;
        Ok(touched)
    }

    /// The root directory of the subvolume that a path leads to.
    fn top(&self, path: &str) -> Result<Ino, Refusal> {
        let ino = self.resolve(path)?;
        if self.nodes[&ino].top == Top::No { Err(Refusal::Invalid) } else { Ok(ino) }
    }

    pub(super) fn snapshot(
        &mut self,
        from: &str,
        to: &str,
        read_only: bool,
    ) -> Result<Touched, Refusal> {
        let source = self.top(from)?;
        let (dir, name) = self.parent(to)?;
        if self.entries(dir).contains_key(name) {
            return Err(Refusal::Exists);
        }
        // What has no name is not there.
        let named = |i: &Ino| *i == source || self.nodes[i].nlink > 0;
        let old: Vec<Ino> = self.inodes_of(source).filter(named).collect();
        let new: BTreeMap<Ino, Ino> = old.iter().copied().zip(self.next..).collect();
        self.next += old.len() as u64;
        let top = new[&source];
        // Its source may have one already, if that is a snapshot itself.
        let there = old.iter().find(|i| self.nodes[i].placeholder).map(|i| new[i]);
        let placeholder = there.unwrap_or(self.next);
        let mut nested = false;
        for (ino, copy) in &new {
            let mut node = (*self.nodes[ino]).clone();
            node.home = top;
            if let Body::Dir(entries) = &mut node.body {
                for entry in entries.values_mut() {
                    nested |= !new.contains_key(entry);
                    *entry = new.get(entry).copied().unwrap_or(placeholder);
                }
            }
            self.nodes.insert(*copy, Arc::new(node));
        }
        if nested && there.is_none() {
            self.next += 1;
            let empty = Node::new(Body::Dir(BTreeMap::new()), new_perm(FileKind::Directory));
            let node = Node { placeholder: true, home: top, real: PLACEHOLDER, ..empty };
            self.nodes.insert(placeholder, Arc::new(node));
        }
        self.node_mut(top).top = if read_only { Top::ReadOnly } else { Top::Writable };
        self.node_mut(top).nlink = 1;
        self.dir_mut(dir).insert(name.to_owned(), top);
        Ok(Touched { inodes: self.inodes_of(top).collect(), dirs: vec![dir], made: Some(top) })
    }

    /// Is an inode in any directory?
    pub(super) fn is_named(&self, ino: Ino) -> bool {
        let mut entries = self.nodes.values().filter_map(|n| match &n.body {
            Body::Dir(entries) => Some(entries),
            _ => None,
        });
        entries.any(|e| e.values().any(|i| *i == ino))
    }

    /// Is a placeholder asked for more than it is there for?
    pub(super) fn check_placeholders(&self, op: &Op) -> Result<(), Refusal> {
        let is_one = |ino: Result<Ino, Refusal>| ino.is_ok_and(|i| self.nodes[&i].placeholder);
        let named = |path: &String| is_one(self.resolve(path));
        let in_one = |path: &String| is_one(self.parent(path).map(|(dir, _)| dir));
        let (unknown, refused) = match op {
            Op::Create(p)
            | Op::Mkdir(p)
            | Op::Mknod(_, p)
            | Op::Symlink { path: p, .. }
            | Op::Subvolume(p) => (false, in_one(p)),
            Op::Link { to, .. } => (false, in_one(to)),
            Op::Snapshot { from, to, .. } => (named(from), in_one(to)),
            Op::Rename { from, to, .. } => (named(from) || named(to), in_one(to)),
            Op::SetXattr { path, .. }
            | Op::RemoveXattr { path, .. }
            | Op::Chmod { path, .. }
            | Op::Open { path, .. }
            | Op::Fsync(path)
            | Op::Fdatasync(path)
            | Op::NoCow(path)
            | Op::DeleteSubvolume(path)
            | Op::DefaultSubvolume(path) => (named(path), false),
            _ => (false, false),
        };
        match (unknown, refused) {
            (true, _) => Err(Refusal::NotModelled),
            (false, true) => Err(Refusal::NotPermitted),
            (false, false) => Ok(()),
        }
    }

    /// Gives all inodes of a subvolume the file system's numbers, by that of its root directory.
    pub(super) fn number_subvolume(&mut self, top: Ino, real: u64) {
        let inodes: Vec<Ino> = self.inodes_of(top).filter(|i| *i != top).collect();
        for ino in inodes {
            let node = self.node_mut(ino);
            node.real = node.real & NUMBER | real & !NUMBER;
        }
    }

    pub(super) fn delete_subvolume(&mut self, path: &str) -> Result<Touched, Refusal> {
        let top = self.top(path)?;
        let (dir, name) = self.parent(path)?;
        if self.has_nested(top) {
            return Err(Refusal::NotEmpty);
        }
        if self.default == top {
            return Err(Refusal::NotPermitted);
        }
        if self.handles.values().any(|h| self.nodes[h].home == top) {
            return Err(Refusal::NotModelled);
        }
        self.dir_mut(dir).remove(name);
        self.nodes.retain(|_, n| n.home != top);
        Ok(Touched { inodes: vec![top], dirs: vec![dir], made: None })
    }

    pub(super) fn set_default(&mut self, path: &str) -> Result<Touched, Refusal> {
        self.default = if path.is_empty() { ROOT } else { self.top(path)? };
        Ok(Touched::default())
    }

    /// Nobody sees anything of it, but whether it was possible.
    pub(super) fn dedupe(
        &mut self,
        from: &str,
        range: Bytes,
        to: &str,
        at: u64,
    ) -> Result<Touched, Refusal> {
        let (source, a) = self.file(from)?;
        let a = a.clone();
        let (ino, b) = self.file(to)?;
        let len = range.to.checked_sub(range.from).ok_or(Refusal::Invalid)?;
        let sized = range.to <= a.size && (len == 0 || at + len <= b.size);
        let aligned = len == 0 || range.from.is_multiple_of(SECTOR) && at.is_multiple_of(SECTOR);
        if !sized || !aligned {
            return Err(Refusal::Invalid);
        }
        let both_end = range.to == a.size && at + len >= b.size;
        let shared = if both_end { len } else { len / SECTOR * SECTOR };
        let same = a.read(Bytes { from: range.from, to: range.from + shared })
            == b.read(Bytes { from: at, to: at + shared });
        if len > 0 && self.nodes[&source].nocow != self.nodes[&ino].nocow {
            return Err(Refusal::Invalid);
        }
        let reach = shared.next_multiple_of(SECTOR);
        if ino == source && shared > 0 && range.from < at + reach && at < range.from + reach {
            return Err(Refusal::Invalid);
        }
        if same { Ok(Touched::default()) } else { Err(Refusal::Differs) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::parse;

    fn run(text: &str) -> (World, Vec<Result<Touched, Refusal>>) {
        let mut world = World::empty(0o755, 256);
        let results = parse(text).unwrap()[0].iter().map(|op| world.apply(op)).collect();
        (world, results)
    }

    #[test]
    fn a_snapshot_is_a_copy_with_numbers_of_its_own() {
        let (mut w, r) =
            run("sub S; new S/f; S/f[0,5000)=a; ln S/f S/g; mk S/d; snap S>T; S/f+9=b; rm T/g");
        assert!(r.iter().all(Result::is_ok), "{r:?}");
        let node = |w: &World, path: &str| w.node(w.resolve(path).unwrap()).unwrap().clone();
        assert_eq!((node(&w, "T/f").nlink, node(&w, "S/f").nlink), (1, 2));
        assert_ne!(node(&w, "T/f").body, node(&w, "S/f").body);
        let (f, t) = (w.resolve("T/f").unwrap(), w.resolve("T").unwrap());
        w.node_mut(f).real = 257 ^ 300 << 40;
        w.set_real(t, 256 ^ 301 << 40);
        assert_eq!(w.node(f).unwrap().real, 257 ^ 301 << 40);
    }

    #[test]
    fn a_snapshot_shows_an_empty_directory_where_its_source_has_subvolumes() {
        use Refusal::*;
        let (w, r) = run(
            "sub S; mk S/d; sub S/d/one; new S/d/one/f; sub S/two; snap S>T; new T/two/x; rmdir \
             T/two; mode T/d/one 700; snap T>U; rmdir U/d/one; rmdir U/d; rm T/d/one; sub- T; rm \
             S/d/one/f",
        );
        let errors: Vec<_> = r.into_iter().map(Result::err).collect();
        assert_eq!(errors[..6], [None, None, None, None, None, None]);
        let wanted = [
            Some(NotPermitted),
            None,
            Some(NotModelled),
            None,
            None,
            None,
            Some(IsDirectory),
            None,
            None,
        ];
        assert_eq!(errors[6..], wanted);
        let names: Vec<_> = w.names().into_iter().map(|n| n.0).collect();
        assert_eq!(names, ["S", "U", "S/d", "S/two", "S/d/one"]);
        assert!(
            !w.nodes().any(|(_, n)| n.placeholder),
            "the last name was removed, or the subvolume"
        );
    }

    #[test]
    fn borders_and_read_only_subvolumes_refuse() {
        use Refusal::*;
        let (_, r) = run(
            "sub S; new S/f; new g; snap= S>R; sub S/in; mv S/f f; ln g S/g; new R/x; R/f+9=a; rm \
             R/f; snap S>T; sub- S; default R; sub- R; mv S/in R/in; mv R S; rm S; snap g>h; mv \
             S/in in",
        );
        let errors: Vec<_> = r.iter().map(|r| r.clone().err()).collect();
        assert_eq!(errors[..5], [None, None, None, None, None]);
        let refused = [CrossSubvolume, CrossSubvolume, ReadOnly, ReadOnly, ReadOnly].map(Some);
        assert_eq!(errors[5..10], refused);
        assert_eq!(errors[10..12], [None, Some(NotEmpty)]);
        assert_eq!(
            errors[12..],
            [
                None,
                Some(NotPermitted),
                Some(ReadOnly),
                Some(NotEmpty),
                Some(IsDirectory),
                Some(Invalid),
                None
            ]
        );
    }

    #[test]
    fn what_is_the_same_can_be_deduplicated() {
        use Refusal::*;
        let (_, r) = run(
            "new f; new g; f[0,9000)=a; g[0,9000)=a; dedupe f[0,9000)>g@0; dedupe f[4K,8K)>g@0; \
             dedupe f[0,5000)>g@0; g[8K,8200)=b; dedupe f[0,9000)>g@0; dedupe f[0,8200)>g@0; \
             dedupe f[0,4000)>g@1; dedupe f[0,4K)>f@0; dedupe f[0,12K)>g@0",
        );
        let errors: Vec<_> = r.into_iter().skip(4).map(Result::err).collect();
        let wanted = [
            None,
            Some(Differs),
            None,
            None,
            Some(Differs),
            None,
            Some(Invalid),
            Some(Invalid),
            Some(Invalid),
        ];
        assert_eq!(errors, wanted);
    }
}
