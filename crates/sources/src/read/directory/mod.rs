//! A directory of this machine.
//!
//! It is walked in the order of [`TreePath`], whatever order the kernel gives. So the names of one
//! directory are sorted before they are used, on disk if need be: a directory may have millions.
//! Files with several names go through a sorter of their own, by device and inode. The first name
//! in the order of paths makes the group, so the inode numbers of the machine do not show.
//!
//! Only the time of the last change of contents is taken. The other times say when the directory
//! was copied or read last, and two copies of one tree are to give the same image.
//!
//! A file is opened when its contents are needed. If it is not the one that was listed, by inode,
//! size and times, reading fails and names it.
//!
//! `look` says what is behind a name, and `ahead` has threads that list directories before the walk
//! comes to them.

mod ahead;
mod look;
#[cfg(test)]
mod tests;

use super::Store;
use super::bytes::{Stamp, has_changed};
use crate::error::{Error, Result, shown};
use crate::overlay::{Collector, Moment, Node, read_name, write_name};
use crate::spill::Sorter;
use crate::{Contents, LinkGroup, SourceNumber, TreePath};
use ahead::{Ahead, Listing};
use look::{Looker, Seen};
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Tells the collector what a directory holds.
pub(crate) fn read(collector: &mut Collector, root: &Path, source: SourceNumber) -> Result<()> {
    let options = collector.options().clone();
    let (left_out, image) = (collector.left_out(), options.image);
    let looker = Looker { root, source, left_out, image };
    let several = Sorter::new(options.memory / 8, &options.temporary);
    ahead::with(&looker, &options, |ahead| {
        let mut walk = Walk { collector, looker: &looker, ahead, several, open: Vec::new() };
        walk.all()?;
        walk.names_of_several()
    })
}

/// Opens a directory that is a source.
fn open_root(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(root, flags, Mode::empty())?)
}

struct Walk<'a> {
    collector: &'a mut Collector,
    looker: &'a Looker<'a>,
    ahead: &'a Ahead<'a>,
    /// Files with several names, by device, inode, and when they were found.
    several: Sorter,
    /// The directories from the root down to the one that is walked.
    open: Vec<Level>,
}

struct Level {
    path: TreePath,
    listing: Listing,
}

impl Walk<'_> {
    fn all(&mut self) -> Result<()> {
        let root = TreePath::root();
        let fd = open_root(self.looker.root).map_err(self.looker.io(&root))?;
        self.collector.put(&root, self.looker.root(&fd)?)?;
        let listing = self.ahead.list(fd, &root)?;
        self.open.push(Level { path: root, listing });
        while let Some(level) = self.open.last_mut() {
            match level.listing.names.next() {
                None => {
                    self.open.pop();
                }
                Some(name) => {
                    let (name, seen) = name?;
                    self.entry(&name, seen)?;
                }
            }
        }
        Ok(())
    }

    /// Takes a name, and what is behind it if that was looked at.
    fn entry(&mut self, name: &[u8], seen: Option<Result<Seen>>) -> Result<()> {
        let level = self.open.last().expect("a directory is open");
        let mut path = level.path.clone();
        path.push(name);
        let fd = &level.listing.fd;
        let seen = seen.unwrap_or_else(|| self.looker.look(fd, &path))?;
        if seen.is_image {
            self.collector.note(path.as_bytes(), "it is the image itself; left out");
            return Ok(());
        }
        if seen.leads_on() {
            let listing = self.ahead.take(fd, &path)?;
            self.collector.put(&path, seen.node)?;
            self.open.push(Level { path, listing });
            return Ok(());
        }
        match seen.shared {
            Some(file) => self.note_several(&path, file, seen.node),
            // What is left out still takes the place of what earlier sources have.
            None => self.collector.put(&path, seen.node),
        }
    }

    /// Keeps a name of a file that has others, maybe outside of the tree.
    fn note_several(&mut self, path: &TreePath, file: (u64, u64), node: Node) -> Result<()> {
        let at = self.collector.tick();
        let (device, inode) = file;
        let mut key = device.to_be_bytes().to_vec();
        key.extend(inode.to_be_bytes());
        key.extend(at.0.to_be_bytes());
        Ok(self.several.push(&key, &write_name(path, &node))?)
    }

    /// Puts the names of each file. The first one decides about attributes and contents.
    fn names_of_several(self) -> Result<()> {
        let mut first: Option<(Vec<u8>, LinkGroup, Node)> = None;
        for record in self.several.finish()?.records()? {
            let (key, value) = record?;
            let (file, at) = key.split_at(16);
            let at = u64::from_be_bytes(at.try_into().expect("eight bytes"));
            let (path, node) = read_name(&value);
            if first.as_ref().is_none_or(|(of, ..)| of != file) {
                first = Some((file.to_vec(), LinkGroup(at), node));
            }
            let (_, group, node) = first.as_ref().expect("it was set");
            self.collector.put_name(&path, Moment(at), *group, node.clone())?;
        }
        Ok(())
    }
}

/// What a locator says of a file.
struct FileKey<'a> {
    stamp: Stamp,
    path: &'a [u8],
}

impl<'a> FileKey<'a> {
    const HEAD: usize = 6 * 8;

    fn encode(&self) -> Vec<u8> {
        let Stamp { inode, size, modified, changed } = self.stamp;
        let mut key = Vec::with_capacity(Self::HEAD + self.path.len());
        key.extend(inode.to_le_bytes());
        key.extend(size.to_le_bytes());
        for n in [modified.0, modified.1, changed.0, changed.1] {
            key.extend(n.to_le_bytes());
        }
        key.extend(self.path);
        key
    }

    fn decode(key: &'a [u8]) -> Option<Self> {
        let (head, path) = key.split_at_checked(Self::HEAD)?;
        let n = |at: usize| {
            i64::from_le_bytes(head[at * 8..at * 8 + 8].try_into().expect("eight bytes"))
        };
        let stamp = Stamp {
            inode: n(0).cast_unsigned(),
            size: n(1).cast_unsigned(),
            modified: (n(2), n(3)),
            changed: (n(4), n(5)),
        };
        Some(Self { stamp, path })
    }
}

/// The locator's key for one file, by its path from a directory.
pub(crate) fn key_of(root: &Path, path: &Path) -> io::Result<(u64, Vec<u8>)> {
    // A pipe must not stop us.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(root.join(path), flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let stamp = Stamp::of(&file)?;
    let key = FileKey { stamp, path: path.as_os_str().as_bytes() }.encode();
    Ok((stamp.size, key))
}

/// The contents of a directory's files.
#[derive(Debug)]
pub(crate) struct DirectoryStore {
    root: PathBuf,
    fd: OwnedFd,
    /// May the last component be a symbolic link?
    follow: bool,
}

impl DirectoryStore {
    pub(crate) fn new(root: &Path, follow: bool) -> Result<Self> {
        let fd = open_root(root).map_err(Error::io(shown(root.as_os_str().as_bytes())))?;
        Ok(Self { root: root.to_owned(), fd, follow })
    }
}

impl Store for DirectoryStore {
    fn open(&self, key: &[u8]) -> io::Result<Box<dyn Contents>> {
        let key =
            FileKey::decode(key).ok_or_else(|| io::Error::other("not a locator of a file"))?;
        let full = self.root.join(OsStr::from_bytes(key.path));
        let name = shown(full.as_os_str().as_bytes());
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{name}: {e}"));
        let file = open_below(self.fd.as_fd(), key.path, self.follow).map_err(named)?;
        key.stamp.check(&file, &name)?;
        Ok(Box::new(FileContents { name, file, stamp: key.stamp }))
    }
}

/// Opens a file below a directory, however long its path is.
fn open_below(dir: BorrowedFd<'_>, path: &[u8], follow: bool) -> io::Result<File> {
    const STEP: usize = 4000;
    let mut held: Option<OwnedFd> = None;
    let mut rest = path;
    while rest.len() > STEP {
        let end = rest[..STEP].iter().rposition(|&b| b == b'/');
        let end = end.ok_or(Errno::NAMETOOLONG)?;
        let from = held.as_ref().map_or(dir, AsFd::as_fd);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        held = Some(rustix::fs::openat(from, &rest[..end], flags, Mode::empty())?);
        rest = &rest[end + 1..];
    }
    let from = held.as_ref().map_or(dir, AsFd::as_fd);
    // What became a pipe since must not stop us.
    let mut flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if !follow {
        flags |= OFlags::NOFOLLOW;
    }
    Ok(rustix::fs::openat(from, rest, flags, Mode::empty())?.into())
}

/// A file of this machine.
#[derive(Debug)]
struct FileContents {
    name: String,
    file: File,
    stamp: Stamp,
}

impl FileContents {
    fn named(&self, error: impl Into<io::Error>) -> io::Error {
        let error = error.into();
        io::Error::new(error.kind(), format!("{}: {error}", self.name))
    }
}

impl Contents for FileContents {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        let mut parts = Vec::new();
        let mut at = 0;
        while at < self.stamp.size {
            let start = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(start) => start,
                // No more data.
                Err(Errno::NXIO) => break,
                // Not every file system knows holes.
                Err(Errno::INVAL) => {
                    let whole = 0..self.stamp.size;
                    return Ok(Vec::from([whole]));
                }
                Err(e) => return Err(self.named(e)),
            };
            let end = rustix::fs::seek(&self.file, SeekFrom::Hole(start));
            let end = end.map_err(|e| self.named(e))?.min(self.stamp.size);
            if start >= end {
                break;
            }
            parts.push(start..end);
            at = end;
        }
        self.stamp.check(&self.file, &self.name)?;
        Ok(parts)
    }

    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.file.read_exact_at(buf, offset) {
            Ok(()) => self.stamp.check(&self.file, &self.name),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(has_changed(&self.name)),
            Err(e) => Err(self.named(e)),
        }
    }
}
