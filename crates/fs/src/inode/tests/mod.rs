//! Names, attributes and inodes on a real engine over a device in memory.
#![allow(clippy::disallowed_types, reason = "locks of tests have no place in the order")]

mod ahead;
mod attributes;
mod checksums;
mod consistency;
mod cut;
mod damage;
mod fronts;
mod holds;
mod links;
mod listing;
mod logged;
mod model;
mod orphans;
mod renames;
mod stream;
mod subvolumes;

use crate::api::{Attr, FileKind, InodeId, NewInode, OpenOptions, Tuning};
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{Error, Filesystem, Result};
use larder_format::{Key, ObjectId, Physical};
use larder_volume::Device;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const PAGE: usize = 4096;

/// A sparse device in memory.
#[derive(Debug)]
struct Memory {
    size: u64,
    pages: Mutex<HashMap<u64, Box<[u8]>>>,
}

impl Memory {
    fn new(size: u64) -> Arc<Self> {
        Arc::new(Self { size, pages: Mutex::default() })
    }
    /// What a power cut would leave, if all completed writes were durable.
    fn copy(&self) -> Arc<Self> {
        Arc::new(Self { size: self.size, pages: Mutex::new(self.pages.lock().clone()) })
    }
    /// Splits a range into pieces of pages: page, offset in it, range of the buffer.
    fn pieces(
        at: Physical,
        len: usize,
    ) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let pos = at.0 + done as u64;
            let offset = usize::try_from(pos % PAGE as u64).unwrap();
            let n = (PAGE - offset).min(len - done);
            let piece = (pos / PAGE as u64, offset, done..done + n);
            done += n;
            (n > 0).then_some(piece)
        })
    }
}

impl Device for Memory {
    fn name(&self) -> String {
        "memory".into()
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> std::io::Result<()> {
        if at.0 + buf.len() as u64 > self.size {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let pages = self.pages.lock();
        for (page, offset, range) in Self::pieces(at, buf.len()) {
            let target = &mut buf[range];
            match pages.get(&page) {
                Some(p) => target.copy_from_slice(&p[offset..offset + target.len()]),
                None => target.fill(0),
            }
        }
        Ok(())
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> std::io::Result<()> {
        assert!(at.0 + data.len() as u64 <= self.size, "write beyond the end");
        let mut pages = self.pages.lock();
        for (page, offset, range) in Self::pieces(at, data.len()) {
            let source = &data[range];
            let p = pages.entry(page).or_insert_with(|| vec![0; PAGE].into());
            p[offset..offset + source.len()].copy_from_slice(source);
        }
        Ok(())
    }
    fn flush(&self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A file system in memory.
struct World {
    device: Arc<Memory>,
    fs: Arc<Filesystem>,
}

fn options() -> OpenOptions {
    OpenOptions {
        commit_interval: None,
        tuning: Tuning { fake_clock: true, ..Tuning::default() },
        ..OpenOptions::default()
    }
}

impl World {
    fn new() -> Self {
        Self::with(&MkfsOptions::default())
    }
    /// With changed settings of the engine.
    fn tuned(tuning: Tuning) -> Self {
        let device = Memory::new(256 << 20);
        mkfs(&*device, &MkfsOptions::default()).unwrap();
        let options = OpenOptions { tuning: Tuning { fake_clock: true, ..tuning }, ..options() };
        let fs = Filesystem::open(device.clone(), options).unwrap();
        Self { device, fs }
    }
    fn with(mkfs_options: &MkfsOptions) -> Self {
        let device = Memory::new(256 << 20);
        mkfs(&*device, mkfs_options).unwrap();
        let fs = Filesystem::open(device.clone(), options()).unwrap();
        Self { device, fs }
    }
    /// Closes and opens again.
    fn reopen(self) -> Self {
        self.fs.close().unwrap();
        let fs = Filesystem::open(self.device.clone(), options()).unwrap();
        Self { device: self.device, fs }
    }
    /// Commits, and opens what a power cut leaves then.
    fn crash(self) -> Self {
        self.fs.sync().unwrap();
        let device = self.device.copy();
        drop(self.fs);
        let fs = Filesystem::open(device.clone(), options()).unwrap();
        Self { device, fs }
    }
    fn root(&self) -> InodeId {
        self.fs.root()
    }
    fn file(&self, dir: InodeId, name: impl AsRef<[u8]>) -> InodeId {
        self.fs.create(dir, name.as_ref(), &new(FileKind::Regular)).unwrap().id
    }
    fn dir(&self, dir: InodeId, name: impl AsRef<[u8]>) -> InodeId {
        self.fs.create(dir, name.as_ref(), &new(FileKind::Directory)).unwrap().id
    }
    fn find(&self, dir: InodeId, name: impl AsRef<[u8]>) -> Result<Attr> {
        self.fs.lookup(dir, name.as_ref())
    }
    fn attr(&self, id: InodeId) -> Attr {
        self.fs.getattr(id).unwrap()
    }
    /// Names without `.` and `..`, in the order of the directory.
    fn names(&self, dir: InodeId) -> Vec<Vec<u8>> {
        let mut names = Vec::new();
        self.fs
            .readdir(dir, 2, &mut |e| {
                names.push(e.name.to_vec());
                true
            })
            .unwrap();
        names
    }
    /// Everything in the root's subvolume, as its tree has it. After a commit this is what the disk
    /// has.
    fn items(&self) -> BTreeMap<Key, Vec<u8>> {
        let core = &self.fs.core;
        let subvol = core.subvol(self.root().subvol).unwrap();
        let mut items = BTreeMap::new();
        subvol
            .version(core)
            .scan(&Key::MIN, &Key::MAX, |item| {
                items.insert(item.key, item.data().to_vec());
                Ok(true)
            })
            .unwrap();
        items
    }
    /// Commits, and checks that names, references, link counts, directory sizes and orphans agree
    /// in the tree.
    fn check(&self) {
        self.fs.sync().unwrap();
        let stats = self.fs.stats();
        assert_eq!(
            (stats.delayed_bytes, stats.memory.delayed_data.held),
            (0, 0),
            "delayed after a sync"
        );
        consistency::check(&self.items());
    }
}

/// A new inode with nothing special.
fn new(kind: FileKind) -> NewInode<'static> {
    let target: &[u8] = if kind == FileKind::Symlink { b"target" } else { b"" };
    NewInode { kind, perm: 0o644, uid: 1000, gid: 100, rdev: 0, target, xattrs: &[] }
}

/// `2^blocks` names of `7 * blocks` bytes that all have the same hash. The names are made of two
/// blocks, which change the hash in the same way, whatever comes before.
fn colliding_names(blocks: u32) -> impl Iterator<Item = Vec<u8>> {
    let pair: [&[u8]; 2] = [b"TTqGO4p", b"snNzDoq"];
    (0..1usize << blocks)
        .map(move |n| (0..blocks).flat_map(|b| pair[n >> b & 1].to_vec()).collect())
}

/// Asserts that the result is this error.
macro_rules! assert_err {
    ($result:expr, $($pattern:tt)+) => {
        match $result {
            Err($($pattern)+) => {}
            other => panic!("expected {}, got {other:?}", stringify!($($pattern)+)),
        }
    };
}
use assert_err;

#[test]
fn colliding_names_collide() {
    let hashes: std::collections::HashSet<_> =
        colliding_names(5).map(|n| larder_format::csum::name_hash(&n)).collect();
    assert_eq!(hashes.len(), 1);
    assert_eq!(colliding_names(5).collect::<std::collections::HashSet<_>>().len(), 32);
}

#[test]
fn what_was_made_is_found_now_and_after_reopening() {
    let mut w = World::new();
    let kinds = [
        FileKind::Regular,
        FileKind::Directory,
        FileKind::Symlink,
        FileKind::CharDevice,
        FileKind::BlockDevice,
        FileKind::Fifo,
        FileKind::Socket,
    ];
    let rdev = (259 << 20) | 70000;
    let mut made = Vec::new();
    for kind in kinds {
        let name = format!("{kind:?}");
        let xattrs = [(b"trusted.a".to_vec(), b"1".to_vec()), (b"trusted.b".to_vec(), vec![])];
        let n = NewInode { perm: 0o1755, rdev, xattrs: &xattrs, ..new(kind) };
        let attr = w.fs.create(w.root(), name.as_bytes(), &n).unwrap();
        assert_eq!(
            (attr.kind, attr.perm, attr.uid, attr.gid, attr.nlink),
            (kind, 0o1755, 1000, 100, 1)
        );
        let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        assert_eq!(attr.rdev, if is_device { rdev } else { 0 });
        assert_eq!(attr.size, if kind == FileKind::Symlink { 6 } else { 0 });
        assert_eq!(attr.otime, attr.mtime);
        made.push((name, attr));
    }
    let root = w.attr(w.root());
    for _ in 0..2 {
        assert_eq!(w.attr(w.root()), root);
        for (name, attr) in &made {
            assert_eq!(w.find(w.root(), name).unwrap(), *attr);
            assert_eq!(w.fs.getxattr(attr.id, b"trusted.a").unwrap(), b"1");
            assert_eq!(w.fs.getxattr(attr.id, b"trusted.b").unwrap(), b"");
        }
        let link = w.find(w.root(), "Symlink").unwrap();
        assert_eq!(w.fs.readlink(link.id).unwrap(), b"target");
        assert_eq!(root.size, 2 * made.iter().map(|(n, _)| n.len() as u64).sum::<u64>());
        assert_eq!(
            w.names(w.root()),
            made.iter().map(|(n, _)| n.as_bytes().to_vec()).collect::<Vec<_>>()
        );
        w.check();
        w = w.reopen();
    }
}

#[test]
fn names_have_limits() {
    let w = World::new();
    let long = vec![b'n'; 255];
    let id = w.file(w.root(), &long);
    assert_eq!(w.find(w.root(), &long).unwrap().id, id);
    let longer = vec![b'n'; 256];
    let file = new(FileKind::Regular);
    assert_err!(w.fs.create(w.root(), &longer, &file), Error::NameTooLong);
    assert_err!(w.find(w.root(), &longer), Error::NameTooLong);
    assert_err!(w.fs.link(id, w.root(), &longer), Error::NameTooLong);
    assert_err!(w.fs.unlink(w.root(), &longer), Error::NameTooLong);
    assert_err!(w.fs.create(w.root(), b"a/b", &file), Error::Invalid(_));
    assert_err!(w.fs.create(w.root(), b"", &file), Error::NotFound);
    assert_err!(w.fs.create(w.root(), b"..", &file), Error::Exists);
    assert_err!(w.fs.create(w.root(), &long, &file), Error::Exists);
    assert_err!(w.fs.create(id, b"x", &file), Error::NotDirectory);
    assert_err!(w.find(id, "x"), Error::NotDirectory);
    assert_err!(w.find(w.root(), "x"), Error::NotFound);
    let link = |target: &'static [u8]| NewInode { target, ..new(FileKind::Symlink) };
    static TARGET: [u8; 4096] = [b't'; 4096];
    assert_err!(w.fs.create(w.root(), b"s", &link(&TARGET)), Error::NameTooLong);
    assert_err!(w.fs.create(w.root(), b"s", &link(b"")), Error::Invalid(_));
    let s = w.fs.create(w.root(), b"s", &link(&TARGET[..4095])).unwrap();
    assert_eq!((s.size, s.bytes), (4095, 4096));
    assert_eq!(w.fs.readlink(s.id).unwrap(), &TARGET[..4095]);
    assert_err!(w.fs.readlink(id), Error::Invalid(_));
    w.check();
}

#[test]
fn small_nodes_hold_shorter_targets() {
    let w = World::with(&MkfsOptions { nodesize: Some(4096), ..MkfsOptions::default() });
    static TARGET: [u8; 4096] = [b't'; 4096];
    // A leaf has 4096 - 101 bytes, an item 25 of them, an inline extent 21 more.
    let link = |n: usize| NewInode { target: &TARGET[..n], ..new(FileKind::Symlink) };
    assert_err!(w.fs.create(w.root(), b"s", &link(3950)), Error::NameTooLong);
    let s = w.fs.create(w.root(), b"s", &link(3949)).unwrap();
    assert_eq!(w.fs.readlink(s.id).unwrap().len(), 3949);
    w.check();
}

#[test]
fn names_with_equal_hashes_live_side_by_side() {
    let w = World::new();
    let names: Vec<_> = colliding_names(5).collect();
    let ids: Vec<_> = names.iter().map(|n| w.file(w.root(), n)).collect();
    assert_err!(w.fs.create(w.root(), &names[3], &new(FileKind::Regular)), Error::Exists);
    for (name, id) in names.iter().zip(&ids) {
        assert_eq!(w.find(w.root(), name).unwrap().id, *id);
    }
    w.check();
    let w = w.reopen();
    for name in names.iter().step_by(2) {
        w.fs.unlink(w.root(), name).unwrap();
    }
    for (n, (name, id)) in names.iter().zip(&ids).enumerate() {
        match w.find(w.root(), name) {
            Ok(attr) => assert_eq!((n % 2, attr.id), (1, *id)),
            Err(e) => assert!(n % 2 == 0 && matches!(e, Error::NotFound), "{e}"),
        }
    }
    w.check();
}

#[test]
fn a_hash_can_be_full() {
    let w = World::new();
    // 36 names of 91 bytes and 30 of header each are well below an item of 16258 bytes, 134 are the
    // most.
    let mut names = colliding_names(13);
    for name in names.by_ref().take(134) {
        w.file(w.root(), &name);
    }
    let size = w.attr(w.root()).size;
    let one_more = names.next().unwrap();
    assert_err!(w.fs.create(w.root(), &one_more, &new(FileKind::Regular)), Error::Overflow);
    let other = w.file(w.root(), "other");
    assert_err!(w.fs.link(other, w.root(), &one_more), Error::Overflow);
    assert_err!(
        w.fs.rename(w.root(), b"other", w.root(), &one_more, crate::RenameMode::Replace),
        Error::Overflow
    );
    assert_eq!(w.attr(other).nlink, 1);
    assert_eq!(w.attr(w.root()).size, size + 10);
    w.check();
    // Replacing one of them needs no additional room.
    let full = colliding_names(13).next().unwrap();
    w.fs.rename(w.root(), b"other", w.root(), &full, crate::RenameMode::Replace).unwrap();
    assert_eq!(w.find(w.root(), &full).unwrap().id, other);
    w.check();
}
