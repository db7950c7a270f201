//! A subvolume of another image, read through the engine without a mount.
//!
//! It is walked in the order of paths, like a directory of the machine, and names of one inode are
//! brought together in the same way. All times and inode flags are taken. They are part of the
//! image, so they are the same for every build. Subvolumes that lie within become directories.

#[cfg(test)]
mod tests;

use super::Store;
use crate::error::{Error, Result, shown};
use crate::overlay::{Collector, Moment, Node, read_name, write_name};
use crate::spill::{Records, Sorter};
use crate::{Attributes, Contents, Kind, LinkGroup, Locator, SourceNumber, Time, TreePath};
use larder_format::ObjectId;
use larder_format::items::InodeFlags;
use larder_fs::{Attr, FileKind, Filesystem, InodeId, OpenOptions, Seek, SubvolChoice, Timestamp};
use larder_volume::{FileDevice, OpenMode};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Memory for the names of one directory.
const NAMES: usize = 1 << 20;
/// Memory for the nodes of the image.
const CACHE: u64 = 32 << 20;
/// Flags that a user may set; the others say how the inode is stored.
const KEPT: InodeFlags = InodeFlags::NODATASUM
    .union(InodeFlags::NODATACOW)
    .union(InodeFlags::NOCOMPRESS)
    .union(InodeFlags::SYNC)
    .union(InodeFlags::IMMUTABLE)
    .union(InodeFlags::APPEND)
    .union(InodeFlags::NODUMP)
    .union(InodeFlags::NOATIME)
    .union(InodeFlags::DIRSYNC)
    .union(InodeFlags::COMPRESS);

/// Where the superblock's magic is in an image.
const MAGIC_AT: usize = (64 << 10) + 64;
/// Bytes of a file from which [`is_image`] sees what it is.
pub(crate) const ENOUGH: usize = MAGIC_AT + 8;

/// Does a file that begins so hold a btrfs file system?
pub(crate) fn is_image(start: &[u8]) -> bool {
    start.get(MAGIC_AT..ENOUGH) == Some(b"_BHRfS_M")
}

/// An image that is open.
#[derive(Debug)]
pub(crate) struct ImageStore {
    name: Arc<str>,
    fs: Arc<Filesystem>,
}

impl ImageStore {
    /// Opens an image for reading, with a subvolume as root: by its path from the top level, or the
    /// default one.
    pub(crate) fn open(path: &Path, subvolume: Option<&[u8]>) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |e| Error::Image { path: name.clone(), error: Box::new(e) };
        let device = FileDevice::open(path, OpenMode::Read).map_err(|e| failed(e.into()))?;
        let options = OpenOptions {
            read_only: true,
            subvol: match subvolume {
                Some(path) => SubvolChoice::Path(path.to_vec()),
                None => SubvolChoice::Default,
            },
            cache_size: CACHE,
            commit_interval: None,
            ..OpenOptions::default()
        };
        let fs = Filesystem::open(Arc::new(device), options).map_err(failed)?;
        Ok(Self { name: name.into(), fs })
    }

    fn error(&self, path: &TreePath) -> impl FnOnce(larder_fs::Error) -> Error + use<> {
        let path = format!("{}: {}", self.name, shown(path.as_bytes()));
        move |error| Error::Image { path, error: Box::new(error) }
    }

    fn attributes(&self, attr: &Attr) -> larder_fs::Result<Attributes> {
        let mut xattrs = Vec::new();
        for name in self.fs.listxattr(attr.id)? {
            let value = self.fs.getxattr(attr.id, &name)?;
            xattrs.push((name, value));
        }
        xattrs.sort();
        Ok(Attributes {
            uid: attr.uid,
            gid: attr.gid,
            permissions: attr.perm & 0o7777,
            modified: time(attr.mtime),
            accessed: Some(time(attr.atime)),
            changed: Some(time(attr.ctime)),
            created: Some(time(attr.otime)),
            xattrs,
            inode_flags: attr.flags & KEPT.bits(),
        })
    }

    fn kind(&self, attr: &Attr, source: SourceNumber) -> larder_fs::Result<Kind> {
        let (major, minor) = ((attr.rdev >> 20) as u32, (attr.rdev & 0xf_ffff) as u32);
        Ok(match attr.kind {
            FileKind::Directory => Kind::Directory,
            FileKind::Regular => {
                let key = inode_key(attr.id);
                let contents = (attr.size > 0).then_some(Locator { source, key });
                Kind::File { size: attr.size, contents }
            }
            FileKind::Symlink => Kind::Symlink(self.fs.readlink(attr.id)?),
            FileKind::CharDevice => Kind::CharDevice { major, minor },
            FileKind::BlockDevice => Kind::BlockDevice { major, minor },
            FileKind::Fifo => Kind::Fifo,
            FileKind::Socket => Kind::Socket,
        })
    }

    fn node(&self, path: &TreePath, attr: &Attr, source: SourceNumber) -> Result<Node> {
        let attributes = self.attributes(attr).map_err(self.error(path))?;
        let kind = self.kind(attr, source).map_err(self.error(path))?;
        Ok(Node { attributes, kind, links: None })
    }
}

impl Store for ImageStore {
    fn open(&self, key: &[u8]) -> io::Result<Box<dyn Contents>> {
        let id = read_key(key).ok_or_else(|| io::Error::other("not a locator of an image"))?;
        let size = self.fs.getattr(id).map_err(|e| failed(&self.name, &e))?.size;
        Ok(Box::new(ImageFile { name: self.name.clone(), fs: self.fs.clone(), id, size }))
    }
}

/// An engine's error as one of reading.
fn failed(name: &str, error: &larder_fs::Error) -> io::Error {
    io::Error::other(format!("{name}: {error}"))
}

/// Subvolume and number, in an order that is the same for every run.
fn inode_key(id: InodeId) -> Vec<u8> {
    [id.subvol.0.to_be_bytes(), id.ino.to_be_bytes()].concat()
}

fn read_key(key: &[u8]) -> Option<InodeId> {
    let (subvol, ino) = key.split_at_checked(8)?;
    let subvol = u64::from_be_bytes(subvol.try_into().ok()?);
    let ino = u64::from_be_bytes(ino.try_into().ok()?);
    Some(InodeId { subvol: ObjectId(subvol), ino })
}

fn time(t: Timestamp) -> Time {
    Time { seconds: t.sec, nanoseconds: t.nsec.min(999_999_999) }
}

/// Tells the collector what an image holds.
pub(crate) fn read(
    collector: &mut Collector,
    store: &ImageStore,
    source: SourceNumber,
) -> Result<()> {
    let options = collector.options();
    let several = Sorter::new(options.memory / 8, &options.temporary);
    let mut walk = Walk { collector, store, source, several, open: Vec::new() };
    walk.all()?;
    walk.names_of_several()
}

struct Walk<'a> {
    collector: &'a mut Collector,
    store: &'a ImageStore,
    source: SourceNumber,
    several: Sorter,
    open: Vec<Level>,
}

struct Level {
    path: TreePath,
    names: Records,
}

impl Walk<'_> {
    fn all(&mut self) -> Result<()> {
        let root = TreePath::root();
        let attr = self.store.fs.getattr(self.store.fs.root()).map_err(self.store.error(&root))?;
        let node = self.store.node(&root, &attr, self.source)?;
        self.collector.put(&root, node)?;
        self.enter(attr.id, root)?;
        while let Some(level) = self.open.last_mut() {
            match level.names.next() {
                None => {
                    self.open.pop();
                }
                Some(record) => {
                    let (name, id) = record?;
                    self.entry(&name, read_key(&id).expect("a key was written"))?;
                }
            }
        }
        Ok(())
    }

    fn enter(&mut self, id: InodeId, path: TreePath) -> Result<()> {
        let mut sorter = Sorter::new(NAMES, &self.collector.options().temporary);
        let mut pushed = Ok(());
        let listed = self.store.fs.readdir(id, 0, &mut |entry| {
            if !matches!(entry.name, b"." | b"..") {
                pushed = sorter.push(entry.name, &inode_key(entry.id));
            }
            pushed.is_ok()
        });
        listed.map_err(self.store.error(&path))?;
        pushed?;
        self.open.push(Level { path, names: sorter.finish()?.records()? });
        Ok(())
    }

    fn entry(&mut self, name: &[u8], id: InodeId) -> Result<()> {
        let mut path = self.open.last().expect("a directory is open").path.clone();
        path.push(name);
        let attr = self.store.fs.getattr(id).map_err(self.store.error(&path))?;
        let node = self.store.node(&path, &attr, self.source)?;
        if node.is_directory() {
            self.collector.put(&path, node)?;
            return self.enter(id, path);
        }
        if attr.nlink > 1 {
            let at = self.collector.tick();
            let key = [&inode_key(id)[..], &at.0.to_be_bytes()].concat();
            return Ok(self.several.push(&key, &write_name(&path, &node))?);
        }
        self.collector.put(&path, node)
    }

    /// Puts the names of each inode that has several.
    fn names_of_several(self) -> Result<()> {
        let mut first: Option<(Vec<u8>, LinkGroup)> = None;
        for record in self.several.finish()?.records()? {
            let (key, value) = record?;
            let (inode, at) = key.split_at(16);
            let at = u64::from_be_bytes(at.try_into().expect("eight bytes"));
            let (path, node) = read_name(&value);
            if first.as_ref().is_none_or(|(of, _)| of != inode) {
                first = Some((inode.to_vec(), LinkGroup(at)));
            }
            let (_, group) = first.as_ref().expect("it was set");
            self.collector.put_name(&path, Moment(at), *group, node)?;
        }
        Ok(())
    }
}

/// A file of an image.
#[derive(Debug)]
struct ImageFile {
    name: Arc<str>,
    fs: Arc<Filesystem>,
    id: InodeId,
    size: u64,
}

impl Contents for ImageFile {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        let seek = |at: u64, what: Seek| {
            self.fs.seek(self.id, at, what).map_err(|e| failed(&self.name, &e))
        };
        let mut parts = Vec::new();
        let mut at = 0;
        while at < self.size {
            let Some(start) = seek(at, Seek::Data)? else { break };
            let end = seek(start, Seek::Hole)?.unwrap_or(self.size).min(self.size);
            if start >= end {
                break;
            }
            parts.push(start..end);
            at = end;
        }
        Ok(parts)
    }

    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let read = self.fs.read(self.id, at, &mut buf[done..]);
            match read.map_err(|e| failed(&self.name, &e))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }
}
