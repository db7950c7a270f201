//! A tree of files as the model sees it: names, inodes, contents, and what each operation does to
//! them.
//!
//! A [`World`] is a value. Nodes are shared between versions, so a history keeps one world per
//! operation and any two can be compared. The same type holds what was *found* on a disk
//! ([`crate::walk`]), which makes a comparison one of like with like.

mod sharing;

use crate::ops::{Alloc, Bytes, Move, Op, Special, filled};
use larder_fs::FileKind;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Number of an inode within the model: never used twice, unlike the file system's.
pub type Ino = u64;

/// The root directory.
pub const ROOT: Ino = 0;

const PAGE: u64 = 4096;

/// The bytes of a file, in pages; a page that is absent is a page of zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Bytes.
    pub size: u64,
    pages: BTreeMap<u64, Arc<[u8; PAGE as usize]>>,
}

impl Content {
    /// Page `n`, unless it is zero.
    #[must_use]
    pub fn page(&self, n: u64) -> Option<&[u8; PAGE as usize]> {
        self.pages.get(&n).map(|p| &**p)
    }
    /// Numbers of the pages that are not zero.
    pub(crate) fn page_numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.keys().copied()
    }
    fn change(&mut self, range: Range<u64>, mut with: impl FnMut(u64, &mut [u8])) {
        let (mut pos, end) = (range.start, range.end);
        while pos < end {
            let n = pos / PAGE;
            let until = end.min((n + 1) * PAGE);
            let mut page = self.pages.get(&n).map_or([0; PAGE as usize], |p| **p);
            with(pos, &mut page[(pos % PAGE) as usize..(until - n * PAGE) as usize]);
            if page.iter().all(|b| *b == 0) {
                self.pages.remove(&n);
            } else {
                self.pages.insert(n, Arc::new(page));
            }
            pos = until;
        }
    }
    /// Writes, growing the file where needed.
    pub fn write(&mut self, at: u64, data: &[u8]) {
        self.change(at..at + data.len() as u64, |pos, out| {
            let from = (pos - at) as usize;
            out.copy_from_slice(&data[from..from + out.len()]);
        });
        self.size = self.size.max(at + data.len() as u64);
    }
    /// Sets the size.
    pub fn truncate(&mut self, size: u64) {
        if size < self.size {
            self.pages.split_off(&size.div_ceil(PAGE));
            if !size.is_multiple_of(PAGE) && self.pages.contains_key(&(size / PAGE)) {
                self.change(size..size + PAGE - size % PAGE, |_, out| out.fill(0));
            }
        }
        self.size = size;
    }
    /// Makes a range zero, as far as it lies in the file.
    pub fn clear(&mut self, range: Bytes) {
        let to = range.to.min(self.size);
        if range.from < to {
            self.change(range.from..to, |_, out| out.fill(0));
        }
    }
    /// The bytes of a range, cut at the end of the file.
    #[must_use]
    pub fn read(&self, range: Bytes) -> Vec<u8> {
        let to = range.to.min(self.size).max(range.from);
        let mut out = vec![0; (to - range.from) as usize];
        for n in range.from / PAGE..to.div_ceil(PAGE) {
            if let Some(page) = self.page(n) {
                let from = range.from.max(n * PAGE);
                let until = to.min((n + 1) * PAGE);
                out[(from - range.from) as usize..(until - range.from) as usize].copy_from_slice(
                    &page[(from - n * PAGE) as usize..(until - n * PAGE) as usize],
                );
            }
        }
        out
    }
}

/// What an inode is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Body {
    Dir(BTreeMap<String, Ino>),
    File(Arc<Content>),
    Symlink(String),
    Special(FileKind, u64),
}

impl Body {
    /// Its type.
    #[must_use]
    pub fn kind(&self) -> FileKind {
        match self {
            Self::Dir(_) => FileKind::Directory,
            Self::File(_) => FileKind::Regular,
            Self::Symlink(_) => FileKind::Symlink,
            Self::Special(kind, _) => *kind,
        }
    }
}

/// Is an inode the root directory of a subvolume?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Top {
    #[default]
    No,
    Writable,
    ReadOnly,
}

/// An inode.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Node {
    pub body: Body,
    pub perm: u32,
    pub nlink: u32,
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Is its data overwritten in place?
    pub nocow: bool,
    /// Is it the root directory of a subvolume?
    pub top: Top,
    /// Is it the empty directory that a snapshot shows in the place of its source's subvolumes? All
    /// of a snapshot are one inode.
    pub placeholder: bool,
    /// The root directory of the subvolume that it is in.
    pub home: Ino,
    /// The file system's number for it, see [`crate::walk::real`]; 0 while unknown.
    pub real: u64,
}

impl Node {
    /// A new inode of the top-level subvolume, with one name.
    #[must_use]
    pub fn new(body: Body, perm: u32) -> Self {
        Self {
            body,
            perm,
            nlink: 1,
            xattrs: BTreeMap::new(),
            nocow: false,
            top: Top::No,
            placeholder: false,
            home: ROOT,
            real: 0,
        }
    }
}

/// Why an operation is not possible. The engine must give the same reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Refusal {
    NotFound,
    NoAttribute,
    Exists,
    NotDirectory,
    IsDirectory,
    NotEmpty,
    Invalid,
    NotPermitted,
    CrossSubvolume,
    /// The subvolume is read-only.
    ReadOnly,
    /// To be deduplicated, and not the same.
    Differs,
    /// Possible, but the model does not know what comes of it: workloads must not do it.
    NotModelled,
}

/// What an operation has touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Inodes whose names, attributes or content changed.
    pub inodes: Vec<Ino>,
    /// Directories whose entries changed.
    pub dirs: Vec<Ino>,
    /// The inode that was made, if one was.
    pub made: Option<Ino>,
}

impl Touched {
    /// Only an inode.
    fn inode(ino: Ino) -> Self {
        Self { inodes: vec![ino], ..Self::default() }
    }
}

/// A tree of files. See the module's text.
#[derive(Clone, Debug)]
pub struct World {
    nodes: BTreeMap<Ino, Arc<Node>>,
    handles: BTreeMap<String, Ino>,
    /// Inodes that never had a name.
    nameless: BTreeSet<Ino>,
    /// Root directory of the default subvolume.
    default: Ino,
    next: Ino,
}

/// Permission bits of new files, directories and the rest.
#[must_use]
pub(crate) fn new_perm(kind: FileKind) -> u32 {
    match kind {
        FileKind::Directory => 0o755,
        FileKind::Symlink => 0o777,
        _ => 0o644,
    }
}

/// Device number of a special file, in the engine's form.
#[must_use]
pub(crate) fn special_kind(special: Special) -> (FileKind, u64) {
    match special {
        Special::Fifo => (FileKind::Fifo, 0),
        Special::Socket => (FileKind::Socket, 0),
        Special::Device => (FileKind::BlockDevice, 259 << 20 | 70_000),
    }
}

impl World {
    /// A root directory with nothing in it.
    #[must_use]
    pub fn empty(perm: u32, real_root: u64) -> Self {
        let root = Node {
            top: Top::Writable,
            real: real_root,
            ..Node::new(Body::Dir(BTreeMap::new()), perm)
        };
        Self {
            nodes: BTreeMap::from([(ROOT, Arc::new(root))]),
            handles: BTreeMap::new(),
            nameless: BTreeSet::new(),
            default: ROOT,
            next: ROOT + 1,
        }
    }

    /// An inode.
    #[must_use]
    pub fn node(&self, ino: Ino) -> Option<&Arc<Node>> {
        self.nodes.get(&ino)
    }
    /// All inodes.
    pub fn nodes(&self) -> impl Iterator<Item = (Ino, &Arc<Node>)> {
        self.nodes.iter().map(|(i, n)| (*i, n))
    }
    /// The handles that are open, and on what.
    #[must_use]
    pub fn handles(&self) -> &BTreeMap<String, Ino> {
        &self.handles
    }
    /// Entries of a directory.
    ///
    /// # Panics
    /// If it is none.
    #[must_use]
    pub fn entries(&self, dir: Ino) -> &BTreeMap<String, Ino> {
        match &self.nodes[&dir].body {
            Body::Dir(entries) => entries,
            other => panic!("inode {dir} is no directory but {:?}", other.kind()),
        }
    }
    /// Adds an inode under a name: for worlds that are found, not made.
    pub fn insert(
        &mut self,
        dir: Ino,
        name: &str,
        ino: Option<Ino>,
        node: impl FnOnce() -> Node,
    ) -> Ino {
        let ino = ino.unwrap_or_else(|| {
            self.next += 1;
            self.nodes.insert(self.next - 1, Arc::new(node()));
            self.next - 1
        });
        self.dir_mut(dir).insert(name.to_owned(), ino);
        ino
    }
    /// Remembers the file system's number of an inode; of a subvolume's root directory, those of
    /// all in it.
    pub fn set_real(&mut self, ino: Ino, real: u64) {
        self.node_mut(ino).real = real;
        if self.nodes[&ino].top != Top::No {
            self.number_subvolume(ino, real);
        }
    }
    /// Changes an inode in place: for worlds that are found, not made.
    pub(crate) fn node_mut(&mut self, ino: Ino) -> &mut Node {
        Arc::make_mut(self.nodes.get_mut(&ino).expect("inode exists"))
    }
    fn dir_mut(&mut self, dir: Ino) -> &mut BTreeMap<String, Ino> {
        match &mut self.node_mut(dir).body {
            Body::Dir(entries) => entries,
            other => panic!("inode {dir} is no directory but {:?}", other.kind()),
        }
    }

    /// All names: path, directory, name, inode — parents before children.
    #[must_use]
    pub fn names(&self) -> Vec<(String, Ino, String, Ino)> {
        let mut out = Vec::new();
        let mut todo = vec![(String::new(), ROOT)];
        while let Some((path, dir)) = todo.pop() {
            for (name, ino) in self.entries(dir) {
                let full = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
                if matches!(self.nodes[ino].body, Body::Dir(_)) {
                    todo.push((full.clone(), *ino));
                }
                out.push((full, dir, name.clone(), *ino));
            }
        }
        out
    }

    /// The inode that a path leads to. Symlinks are not followed.
    ///
    /// # Errors
    /// Why there is none.
    pub fn resolve(&self, path: &str) -> Result<Ino, Refusal> {
        if let Some(handle) = path.strip_prefix('@') {
            return self.handles.get(handle).copied().ok_or(Refusal::NotFound);
        }
        let mut at = ROOT;
        for name in path.split('/').filter(|n| !n.is_empty()) {
            let Body::Dir(entries) = &self.nodes[&at].body else {
                return Err(Refusal::NotDirectory);
            };
            at = *entries.get(name).ok_or(Refusal::NotFound)?;
        }
        Ok(at)
    }

    /// The directory that a path's last component is in, and that component.
    fn parent<'p>(&self, path: &'p str) -> Result<(Ino, &'p str), Refusal> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.resolve(dir)?;
        match self.nodes[&dir].body {
            Body::Dir(_) if !name.is_empty() => Ok((dir, name)),
            Body::Dir(_) => Err(Refusal::Invalid),
            _ => Err(Refusal::NotDirectory),
        }
    }

    fn is_dir(&self, ino: Ino) -> bool {
        matches!(self.nodes[&ino].body, Body::Dir(_))
    }

    /// User attributes are for files and directories.
    fn may_have(&self, ino: Ino, name: &str) -> Result<(), Refusal> {
        match self.nodes[&ino].body {
            Body::Symlink(_) | Body::Special(..) if name.starts_with("user.") => {
                Err(Refusal::NotPermitted)
            }
            _ => Ok(()),
        }
    }

    fn file(&mut self, path: &str) -> Result<(Ino, &mut Content), Refusal> {
        let ino = self.resolve(path)?;
        match &mut self.node_mut(ino).body {
            Body::File(content) => Ok((ino, Arc::make_mut(content))),
            Body::Dir(_) => Err(Refusal::IsDirectory),
            _ => Err(Refusal::Invalid),
        }
    }

    fn make(&mut self, path: &str, body: Body) -> Result<Touched, Refusal> {
        let (dir, name) = self.parent(path)?;
        if self.entries(dir).contains_key(name) {
            return Err(Refusal::Exists);
        }
        let perm = new_perm(body.kind());
        let home = self.nodes[&dir].home;
        let ino = self.insert(dir, name, None, || Node { home, ..Node::new(body, perm) });
        Ok(Touched { inodes: vec![ino], dirs: vec![dir], made: Some(ino) })
    }

    /// Takes one name from an inode; without names and handles it goes.
    fn drop_name(&mut self, ino: Ino) {
        let node = self.node_mut(ino);
        node.nlink -= 1;
        self.collect(ino);
    }

    fn collect(&mut self, ino: Ino) {
        if self.nodes[&ino].nlink == 0 && !self.handles.values().any(|h| *h == ino) {
            self.nodes.remove(&ino);
        }
    }

    /// Is `inner` the same as `outer` or below it?
    fn is_below(&self, inner: Ino, outer: Ino) -> bool {
        inner == outer
            || self.is_dir(outer)
                && self.entries(outer).values().any(|e| self.is_dir(*e) && self.is_below(inner, *e))
    }

    fn rename(&mut self, from: &str, to: &str, mode: Move) -> Result<Touched, Refusal> {
        let ((from_dir, from_name), (to_dir, to_name)) = (self.parent(from)?, self.parent(to)?);
        let moved = *self.entries(from_dir).get(from_name).ok_or(Refusal::NotFound)?;
        let target = self.entries(to_dir).get(to_name).copied();
        if self.is_dir(moved) && self.is_below(to_dir, moved) {
            return Err(Refusal::Invalid);
        }
        self.check_border(from_dir, to_dir, (moved, target), mode)?;
        let mut touched = Touched { inodes: vec![moved], dirs: vec![from_dir, to_dir], made: None };
        if mode == Move::Exchange {
            let other = target.ok_or(Refusal::NotFound)?;
            if self.is_dir(other) && self.is_below(from_dir, other) {
                return Err(Refusal::Invalid);
            }
            touched.inodes.push(other);
            self.dir_mut(from_dir).insert(from_name.to_owned(), other);
            self.dir_mut(to_dir).insert(to_name.to_owned(), moved);
            return Ok(touched);
        }
        if let Some(old) = target {
            if old == moved {
                // POSIX: two names of one inode — nothing happens.
                return Ok(Touched::default());
            }
            match (self.is_dir(moved), self.is_dir(old)) {
                (true, false) => return Err(Refusal::NotDirectory),
                (false, true) => return Err(Refusal::IsDirectory),
                (true, true) if !self.entries(old).is_empty() => return Err(Refusal::NotEmpty),
                _ => {}
            }
            touched.inodes.push(old);
            self.drop_name(old);
        }
        self.dir_mut(from_dir).remove(from_name);
        self.dir_mut(to_dir).insert(to_name.to_owned(), moved);
        if mode == Move::Whiteout {
            let home = self.nodes[&from_dir].home;
            let body = Body::Special(FileKind::CharDevice, 0);
            let ino =
                self.insert(from_dir, from_name, None, || Node { home, ..Node::new(body, 0) });
            touched.inodes.push(ino);
            touched.made = Some(ino);
        }
        Ok(touched)
    }

    fn link(&mut self, from: &str, to: &str) -> Result<Touched, Refusal> {
        let ino = self.resolve(from)?;
        let (dir, name) = self.parent(to)?;
        if self.is_dir(ino) {
            return Err(Refusal::NotPermitted);
        }
        if self.nodes[&ino].home != self.nodes[&dir].home {
            return Err(Refusal::CrossSubvolume);
        }
        if self.entries(dir).contains_key(name) {
            return Err(Refusal::Exists);
        }
        // Only an inode that never had a name may get its first one.
        if self.nodes[&ino].nlink == 0 && !self.nameless.remove(&ino) {
            return Err(Refusal::NotFound);
        }
        self.node_mut(ino).nlink += 1;
        self.insert(dir, name, Some(ino), || unreachable!("the inode is given"));
        Ok(Touched { inodes: vec![ino], dirs: vec![dir], made: None })
    }

    fn unlink(&mut self, path: &str) -> Result<Touched, Refusal> {
        let (dir, name) = self.parent(path)?;
        let ino = *self.entries(dir).get(name).ok_or(Refusal::NotFound)?;
        if self.is_dir(ino) {
            return Err(Refusal::IsDirectory);
        }
        self.dir_mut(dir).remove(name);
        self.drop_name(ino);
        Ok(Touched { inodes: vec![ino], dirs: vec![dir], made: None })
    }

    fn remove_dir(&mut self, path: &str) -> Result<Touched, Refusal> {
        let (dir, name) = self.parent(path)?;
        let ino = *self.entries(dir).get(name).ok_or(Refusal::NotFound)?;
        if !self.is_dir(ino) {
            return Err(Refusal::NotDirectory);
        }
        if !self.entries(ino).is_empty() {
            return Err(Refusal::NotEmpty);
        }
        if self.nodes[&ino].top != Top::No {
            return self.delete_subvolume(path);
        }
        self.dir_mut(dir).remove(name);
        if !self.nodes[&ino].placeholder || !self.is_named(ino) {
            self.drop_name(ino);
        }
        Ok(Touched { inodes: vec![ino], dirs: vec![dir], made: None })
    }

    /// Changes what a file holds.
    fn change_file(
        &mut self,
        path: &str,
        change: impl FnOnce(&mut Content),
    ) -> Result<Touched, Refusal> {
        let (ino, content) = self.file(path)?;
        change(content);
        Ok(Touched::inode(ino))
    }

    /// Changes what an inode of any type says about itself.
    fn change_node(
        &mut self,
        path: &str,
        change: impl FnOnce(&mut Node),
    ) -> Result<Touched, Refusal> {
        let ino = self.resolve(path)?;
        change(self.node_mut(ino));
        Ok(Touched::inode(ino))
    }

    fn allocate(&mut self, path: &str, how: Alloc, range: Bytes) -> Result<Touched, Refusal> {
        let (ino, content) = self.file(path)?;
        if range.from >= range.to {
            return Err(Refusal::Invalid);
        }
        if how.clears() {
            content.clear(range);
        }
        if how.grows() {
            content.size = content.size.max(range.to);
        }
        Ok(Touched::inode(ino))
    }

    /// A file that has data keeps the way in which it was written: the flag is not set then.
    fn set_nocow(&mut self, path: &str) -> Result<Touched, Refusal> {
        let (ino, content) = self.file(path)?;
        let empty = content.size == 0;
        self.node_mut(ino).nocow |= empty;
        Ok(Touched::inode(ino))
    }

    fn set_xattr(&mut self, path: &str, name: &str, value: &str) -> Result<Touched, Refusal> {
        let ino = self.resolve(path)?;
        self.may_have(ino, name)?;
        self.node_mut(ino).xattrs.insert(name.to_owned(), value.as_bytes().to_vec());
        Ok(Touched::inode(ino))
    }

    fn remove_xattr(&mut self, path: &str, name: &str) -> Result<Touched, Refusal> {
        let ino = self.resolve(path)?;
        self.may_have(ino, name)?;
        if !self.nodes[&ino].xattrs.contains_key(name) {
            return Err(Refusal::NoAttribute);
        }
        self.node_mut(ino).xattrs.remove(name);
        Ok(Touched::inode(ino))
    }

    fn copy(&mut self, from: &str, range: Bytes, to: &str, at: u64) -> Result<Touched, Refusal> {
        let (source, content) = self.file(from)?;
        let data = content.read(range);
        let (ino, content) = self.file(to)?;
        let len = data.len() as u64;
        if ino == source && range.from < at + len && at < range.from + len {
            return Err(Refusal::Invalid);
        }
        if !data.is_empty() {
            content.write(at, &data);
        }
        Ok(Touched::inode(ino))
    }

    /// Makes a file without a name, which a handle holds.
    fn make_nameless(&mut self, handle: &str) -> Touched {
        let ino = self.next;
        self.next += 1;
        let node = Node { nlink: 0, ..Node::new(Body::File(Arc::default()), 0o644) };
        self.nodes.insert(ino, Arc::new(node));
        self.handles.insert(handle.to_owned(), ino);
        self.nameless.insert(ino);
        Touched { made: Some(ino), ..Touched::default() }
    }

    /// Does what the operation does. On refusal nothing has changed.
    ///
    /// # Errors
    /// Why it is not possible.
    pub fn apply(&mut self, op: &Op) -> Result<Touched, Refusal> {
        self.check_writable(op)?;
        self.check_placeholders(op)?;
        match op {
            Op::Create(path) => self.make(path, Body::File(Arc::default())),
            Op::Mkdir(path) => self.make(path, Body::Dir(BTreeMap::new())),
            Op::Mknod(special, path) => {
                let (kind, rdev) = special_kind(*special);
                self.make(path, Body::Special(kind, rdev))
            }
            Op::Symlink { target, path } => self.make(path, Body::Symlink(target.clone())),
            Op::Link { from, to } => self.link(from, to),
            Op::Unlink(path) => self.unlink(path),
            Op::Rmdir(path) => self.remove_dir(path),
            Op::Rename { from, to, mode } => self.rename(from, to, *mode),
            Op::Write { path, range, fill } => {
                self.change_file(path, |c| c.write(range.from, &filled(*fill, *range)))
            }
            Op::Append { path, len, fill } => self.change_file(path, |c| {
                let range = Bytes { from: c.size, to: c.size + len };
                c.write(range.from, &filled(*fill, range));
            }),
            Op::Truncate { path, size } => self.change_file(path, |c| c.truncate(*size)),
            Op::Allocate { path, how, range } => self.allocate(path, *how, *range),
            Op::NoCow(path) => self.set_nocow(path),
            Op::SetXattr { path, name, value } => self.set_xattr(path, name, value),
            Op::RemoveXattr { path, name } => self.remove_xattr(path, name),
            Op::Chmod { path, perm } => self.change_node(path, |n| n.perm = *perm),
            Op::Copy { from, range, to, at } => self.copy(from, *range, to, *at),
            Op::Dedupe { from, range, to, at } => self.dedupe(from, *range, to, *at),
            Op::Subvolume(path) => self.make_subvolume(path),
            Op::Snapshot { from, to, read_only } => self.snapshot(from, to, *read_only),
            Op::DeleteSubvolume(path) => self.delete_subvolume(path),
            Op::DefaultSubvolume(path) => self.set_default(path),
            Op::Fsync(path) | Op::Fdatasync(path) => self.resolve(path).map(|_| Touched::default()),
            Op::Sync => Ok(Touched::default()),
            Op::Open { path, handle } => {
                let ino = self.resolve(path)?;
                self.handles.insert(handle.clone(), ino);
                Ok(Touched::default())
            }
            Op::Unnamed { handle } => Ok(self.make_nameless(handle)),
            Op::Close { handle } => {
                let ino = self.handles.remove(handle).ok_or(Refusal::NotFound)?;
                self.collect(ino);
                Ok(Touched::default())
            }
        }
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
    fn names_links_and_renames() {
        let (w, r) = run("mk A; new A/f; ln A/f g; mv g A/h; mk B; mv B A/B; rm A/f; mv! A/h A/i");
        assert!(r.iter().all(Result::is_ok));
        let names: Vec<_> = w.names().into_iter().map(|n| n.0).collect();
        assert_eq!(names, ["A", "A/B", "A/h", "A/i"]);
        let i = w.resolve("A/i").unwrap();
        assert_eq!(w.node(i).unwrap().nlink, 1);
        assert_eq!(w.node(w.resolve("A/h").unwrap()).unwrap().body.kind(), FileKind::CharDevice);
    }

    #[test]
    fn refusals_are_those_of_posix() {
        let (_, r) =
            run("mk A; mk A/B; new f; sym f s; new f; mv A A/B/C; mv f A; mv A f; rmdir A; rm A; \
                rmdir f; ln A l; xa- f user.x; new f/g; rm nix; mv= f nix; xa s user.x=y; xa- s \
                user.x; xa- s trusted.x");
        let errors: Vec<_> = r.into_iter().skip(4).map(Result::unwrap_err).collect();
        use Refusal::*;
        assert_eq!(
            errors,
            [
                Exists,
                Invalid,
                IsDirectory,
                NotDirectory,
                NotEmpty,
                IsDirectory,
                NotDirectory,
                NotPermitted,
                NoAttribute,
                NotDirectory,
                NotFound,
                NotFound,
                NotPermitted,
                NotPermitted,
                NoAttribute
            ]
        );
    }

    #[test]
    fn contents_grow_shrink_and_leave_zeros() {
        let (w, _) =
            run("new f; f[0,8000)=a; trunc f 3000; trunc f 9000; f+100=b; copy f[8990,9050)>f@0");
        let Body::File(c) = &w.node(w.resolve("f").unwrap()).unwrap().body else { panic!() };
        assert_eq!(c.size, 9100);
        let bytes = c.read(Bytes { from: 0, to: u64::MAX });
        assert!(bytes[..10].iter().all(|b| *b == 0));
        assert_eq!(bytes[10..60], filled(b'b', Bytes { from: 9000, to: 9050 }));
        assert_eq!(bytes[60..3000], filled(b'a', Bytes { from: 60, to: 3000 }));
        assert!(bytes[3000..9000].iter().all(|b| *b == 0));
        assert!(c.read(Bytes { from: 9500, to: 9600 }).is_empty());
    }

    #[test]
    fn an_open_file_outlives_its_name() {
        let (w, r) = run("new f; open f h; rm f; @h[0,100)=a; tmp t; ln @t g");
        assert!(r.iter().all(Result::is_ok), "{r:?}");
        assert_eq!(w.nodes().count(), 3);
        let (_, r) = run("tmp t; ln @t f; ln f g; rm f; rm g; ln @t h");
        assert_eq!(
            r[5],
            Err(Refusal::NotFound),
            "an inode that lost its last name gets no new one"
        );
        let (w, _) = run("new f; open f h; rm f; close h");
        assert_eq!(w.nodes().count(), 1);
    }
}
