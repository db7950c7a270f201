//! Random histories of a subvolume, told by snapshots.
//!
//! Trees are small and have few different names, so that everything gets in everything else's way:
//! names are exchanged and taken over, directories move below what was below them, trees are
//! deleted and made again under the same names, files have many names and lose the first. Some
//! names look like those that a stream gives to what has to make way. Contents are written, cut,
//! punched, reserved and cloned. Attributes come and go, among them those that are inherited and
//! those that the kernel takes away.
//!
//! Numbers of inodes are used again only if the file system is opened anew; the caller does that
//! between two calls.

use larder_format::TreeId;
use larder_fs::{
    Error, Fallocate, FileKind, Filesystem, InodeId, NewInode, RenameMode, SetAttr, XattrMode,
};

const SECTOR: u64 = 4096;
/// Directories above each other.
const DEPTH: usize = 6;

/// An entry of the tree.
#[derive(Clone, Debug)]
struct Entry {
    dir: InodeId,
    name: Vec<u8>,
    id: InodeId,
    kind: FileKind,
    depth: usize,
}

/// A subvolume that changes at random.
#[derive(Debug)]
pub struct Lineage {
    rng: fastrand::Rng,
    name: Vec<u8>,
}

impl Lineage {
    /// Makes an empty subvolume in the root directory.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn begin(fs: &Filesystem, name: &str, seed: u64) -> Result<Self, Error> {
        fs.create_subvolume(fs.root(), name.as_bytes(), &new(FileKind::Directory, b""))?;
        Ok(Self::of(name, seed))
    }

    /// Goes on with a subvolume of the root directory.
    #[must_use]
    pub fn of(name: &str, seed: u64) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed), name: name.as_bytes().to_vec() }
    }

    /// Makes `steps` changes.
    ///
    /// # Errors
    /// Those of the engine that no change may have.
    pub fn change(&mut self, fs: &Filesystem, steps: usize) -> Result<(), Error> {
        for _ in 0..steps {
            match self.step(fs) {
                Ok(())
                | Err(
                    Error::Exists
                    | Error::NotFound
                    | Error::NotEmpty
                    | Error::NotDirectory
                    | Error::IsDirectory
                    | Error::Invalid(_)
                    | Error::NoAttribute
                    | Error::NotPermitted(_)
                    | Error::NotSupported(_),
                ) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Makes a read-only snapshot beside the subvolume.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn snapshot(&self, fs: &Filesystem, name: &str) -> Result<TreeId, Error> {
        let top = self.top(fs)?;
        fs.snapshot(top.subvol, fs.root(), name.as_bytes(), true)?;
        Ok(fs.lookup(fs.root(), name.as_bytes())?.id.subvol)
    }

    fn top(&self, fs: &Filesystem) -> Result<InodeId, Error> {
        Ok(fs.lookup(fs.root(), &self.name)?.id)
    }

    fn step(&mut self, fs: &Filesystem) -> Result<(), Error> {
        let top = self.top(fs)?;
        let mut all = Vec::new();
        list(fs, top, 0, &mut all)?;
        match self.rng.u32(0..100) {
            0..=27 => self.create(fs, top, &all),
            28..=49 => self.rename(fs, top, &all),
            50..=57 => self.link(fs, top, &all),
            58..=67 => self.remove(fs, &all),
            68..=88 => self.contents(fs, &all),
            _ => self.attributes(fs, top, &all),
        }
    }

    fn one<'e>(&mut self, all: &'e [Entry], wanted: impl Fn(&Entry) -> bool) -> Option<&'e Entry> {
        let found: Vec<&Entry> = all.iter().filter(|e| wanted(e)).collect();
        (!found.is_empty()).then(|| found[self.rng.usize(..found.len())])
    }

    fn directory(&mut self, top: InodeId, all: &[Entry]) -> InodeId {
        if self.rng.u32(..4) == 0 {
            return top;
        }
        self.one(all, |e| e.kind == FileKind::Directory && e.depth < DEPTH).map_or(top, |e| e.id)
    }

    fn some_name(&mut self) -> Vec<u8> {
        match self.rng.u32(..24) {
            0 => format!("o{}-{}-0", self.rng.u32(257..270), self.rng.u32(6..20)).into_bytes(),
            1 => vec![b'l'; 200 + self.rng.usize(..55)],
            2 => b"\xff \n".to_vec(),
            n => vec![b'a' + (n % 7) as u8],
        }
    }

    fn create(&mut self, fs: &Filesystem, top: InodeId, all: &[Entry]) -> Result<(), Error> {
        let (dir, name) = (self.directory(top, all), self.some_name());
        let (kind, target): (_, &[u8]) = match self.rng.u32(..12) {
            0..=4 => (FileKind::Directory, b""),
            5 => (FileKind::Symlink, b"../some/where"),
            6 => (FileKind::Fifo, b""),
            7 => (FileKind::CharDevice, b""),
            _ => (FileKind::Regular, b""),
        };
        let rdev = if kind == FileKind::CharDevice { 5 << 20 | 300 } else { 0 };
        let new = NewInode { rdev, ..new(kind, target) };
        let id = fs.create(dir, &name, &new)?.id;
        if kind == FileKind::Regular && self.rng.bool() {
            self.write(fs, id)?;
        }
        Ok(())
    }

    fn rename(&mut self, fs: &Filesystem, top: InodeId, all: &[Entry]) -> Result<(), Error> {
        let Some(from) = self.one(all, |_| true).cloned() else { return Ok(()) };
        let (dir, name, mode) = if self.rng.bool() {
            let Some(to) = self.one(all, |_| true) else { return Ok(()) };
            let mode = if self.rng.bool() { RenameMode::Exchange } else { RenameMode::Replace };
            (to.dir, to.name.clone(), mode)
        } else {
            (self.directory(top, all), self.some_name(), RenameMode::Replace)
        };
        fs.rename(from.dir, &from.name, dir, &name, mode)
    }

    fn link(&mut self, fs: &Filesystem, top: InodeId, all: &[Entry]) -> Result<(), Error> {
        let (dir, name) = (self.directory(top, all), self.some_name());
        match self.one(all, |e| e.kind != FileKind::Directory) {
            Some(entry) => fs.link(entry.id, dir, &name).map(drop),
            None => Ok(()),
        }
    }

    /// Removes a name, or a directory with everything in it. Sometimes what is removed stays open
    /// until the next time.
    fn remove(&mut self, fs: &Filesystem, all: &[Entry]) -> Result<(), Error> {
        let Some(entry) = self.one(all, |_| true) else { return Ok(()) };
        if entry.kind == FileKind::Directory {
            let mut below = Vec::new();
            list(fs, entry.id, 0, &mut below)?;
            for e in below.iter().rev() {
                match e.kind {
                    FileKind::Directory => fs.rmdir(e.dir, &e.name)?,
                    _ => fs.unlink(e.dir, &e.name)?,
                }
            }
            return fs.rmdir(entry.dir, &entry.name);
        }
        if self.rng.u32(..6) == 0 {
            fs.hold(entry.id);
        }
        fs.unlink(entry.dir, &entry.name)
    }

    fn write(&mut self, fs: &Filesystem, id: InodeId) -> Result<(), Error> {
        let at = match self.rng.u32(..4) {
            0 => 0,
            1 => self.rng.u64(..100_000),
            _ => self.rng.u64(..24) * SECTOR,
        };
        let len = match self.rng.u32(..4) {
            0 => self.rng.usize(1..2000),
            1 => self.rng.usize(1..150_000),
            _ => self.rng.usize(1..12) * SECTOR as usize,
        };
        let byte = self.rng.u8(..);
        let packs = self.rng.bool();
        let data: Vec<u8> = (0..len).map(|_| if packs { byte } else { self.rng.u8(..) }).collect();
        fs.write(id, at, &data)
    }

    fn contents(&mut self, fs: &Filesystem, all: &[Entry]) -> Result<(), Error> {
        let regular = |e: &Entry| e.kind == FileKind::Regular;
        let Some(id) = self.one(all, regular).map(|e| e.id) else { return Ok(()) };
        let size = fs.getattr(id)?.size;
        let at = self.rng.u64(..24) * SECTOR;
        let len = self.rng.u64(1..12) * SECTOR;
        match self.rng.u32(..12) {
            0..=3 => self.write(fs, id),
            4 => fs.setattr(id, &SetAttr { size: Some(size / 2), ..SetAttr::default() }).map(drop),
            5 => {
                let size = Some(self.rng.u64(..200_000));
                fs.setattr(id, &SetAttr { size, ..SetAttr::default() }).map(drop)
            }
            6 => fs.fallocate(id.at(at), len, Fallocate::Punch),
            7 => {
                let keep_size = self.rng.bool();
                fs.fallocate(id.at(at), len, Fallocate::Allocate { keep_size })
            }
            8 => fs.fallocate(id.at(at), len, Fallocate::Zero { keep_size: true }),
            9 => {
                let Some(from) = self.one(all, regular).map(|e| e.id) else { return Ok(()) };
                fs.clone_range(from.at(0), id.at(at), 0).map(drop)
            }
            _ => {
                let Some(from) = self.one(all, regular).map(|e| e.id) else { return Ok(()) };
                let start = self.rng.u64(..8) * SECTOR;
                fs.clone_range(from.at(start), id.at(at), len).map(drop)
            }
        }
    }

    fn attributes(&mut self, fs: &Filesystem, top: InodeId, all: &[Entry]) -> Result<(), Error> {
        let entry = self.one(all, |_| true);
        let id = if self.rng.u32(..6) == 0 { top } else { entry.map_or(top, |e| e.id) };
        let kind = fs.getattr(id)?.kind;
        let some = |n: u32| Some(n);
        match self.rng.u32(..8) {
            0 if kind != FileKind::Symlink => {
                let perm = some([0o644, 0o4755, 0o2755, 0o1777][self.rng.usize(..4)]);
                if fs.getxattr(id, b"system.posix_acl_access").is_ok() {
                    // A mount changes both at once, and the engine leaves that to the mount.
                    return Ok(());
                }
                fs.setattr(id, &SetAttr { perm, ..SetAttr::default() }).map(drop)
            }
            1 => {
                let (uid, gid) = (some(self.rng.u32(..3)), some(self.rng.u32(..3)));
                fs.setattr(id, &SetAttr { uid, gid, ..SetAttr::default() }).map(drop)
            }
            2 if kind == FileKind::Regular => {
                let value = [&[1, 0, 0, 2, 0, 32][..], &[0; 14]].concat();
                fs.setxattr(id, b"security.capability", &value, XattrMode::Set)
            }
            3 if kind == FileKind::Directory => {
                fs.setxattr(id, b"system.posix_acl_default", &acl(), XattrMode::Set)
            }
            4 if kind == FileKind::Directory => fs.removexattr(id, b"system.posix_acl_default"),
            5 if matches!(kind, FileKind::Directory | FileKind::Regular) => {
                fs.setxattr(id, b"btrfs.compression", b"zstd", XattrMode::Set)
            }
            6 if kind == FileKind::Regular => fs.removexattr(id, b"security.capability"),
            7 => {
                let name = [b"trusted.a", b"trusted.b"][self.rng.usize(..2)];
                if self.rng.u32(..3) == 0 {
                    return fs.removexattr(id, name);
                }
                let value = vec![self.rng.u8(..); self.rng.usize(..400)];
                fs.setxattr(id, name, &value, XattrMode::Set)
            }
            _ => Ok(()),
        }
    }
}

/// A default ACL that names a user.
fn acl() -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    let entries =
        [(1u16, 7u16, u32::MAX), (2, 5, 7), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)];
    for (tag, perm, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(perm.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn new(kind: FileKind, target: &[u8]) -> NewInode<'_> {
    let perm = match kind {
        FileKind::Directory => 0o755,
        FileKind::Symlink => 0o777,
        _ => 0o644,
    };
    NewInode { kind, perm, uid: 0, gid: 0, rdev: 0, target, xattrs: &[] }
}

/// Everything below a directory, a directory before what is in it.
fn list(fs: &Filesystem, dir: InodeId, depth: usize, out: &mut Vec<Entry>) -> Result<(), Error> {
    let mut found = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." && entry.id.subvol == dir.subvol {
            found.push((entry.name.to_vec(), entry.id));
        }
        true
    })?;
    for (name, id) in found {
        let kind = fs.getattr(id)?.kind;
        out.push(Entry { dir, name, id, kind, depth });
        if kind == FileKind::Directory {
            list(fs, id, depth + 1, out)?;
        }
    }
    Ok(())
}
