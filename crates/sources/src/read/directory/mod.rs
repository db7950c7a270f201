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

#[cfg(test)]
mod tests;

use super::Store;
use super::bytes::{Stamp, has_changed};
use crate::error::{Error, Result, shown};
use crate::overlay::{Collector, Moment, Node, read_name, write_name};
use crate::spill::{Records, Sorter};
use crate::{Attributes, Contents, Kind, LinkGroup, Locator, SourceNumber, Time, TreePath};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Memory for the names of one directory.
const NAMES: usize = 1 << 20;

/// Tells the collector what a directory holds.
pub(crate) fn read(collector: &mut Collector, root: &Path, source: SourceNumber) -> Result<()> {
    let options = collector.options();
    let several = Sorter::new(options.memory / 8, &options.temporary);
    let mut walk = Walk { collector, root, source, several, open: Vec::new() };
    walk.all()?;
    walk.names_of_several()
}

/// Opens a directory that is a source.
fn open_root(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(root, flags, Mode::empty())?)
}

struct Walk<'a> {
    collector: &'a mut Collector,
    root: &'a Path,
    source: SourceNumber,
    /// Files with several names, by device, inode, and when they were found.
    several: Sorter,
    /// The directories from the root down to the one that is walked.
    open: Vec<Level>,
}

struct Level {
    fd: OwnedFd,
    path: TreePath,
    names: Records,
}

impl Walk<'_> {
    fn all(&mut self) -> Result<()> {
        let fd = open_root(self.root).map_err(self.io(&TreePath::root()))?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| self.io(&TreePath::root())(e.into()))?;
        let attributes = self.attributes(&stat, self.root)?;
        let node = Node { attributes, kind: Kind::Directory, links: None };
        self.collector.put(&TreePath::root(), node)?;
        self.enter(fd, TreePath::root())?;
        while let Some(level) = self.open.last_mut() {
            match level.names.next() {
                None => {
                    self.open.pop();
                }
                Some(record) => {
                    let (name, _) = record?;
                    self.entry(&name)?;
                }
            }
        }
        Ok(())
    }

    fn io(&self, path: &TreePath) -> impl FnOnce(io::Error) -> Error + use<> {
        Error::io(shown(self.full(path).as_os_str().as_bytes()))
    }

    /// The path on this machine.
    fn full(&self, path: &TreePath) -> PathBuf {
        if path.is_root() {
            return self.root.to_owned();
        }
        self.root.join(OsStr::from_bytes(path.as_bytes()))
    }

    fn enter(&mut self, fd: OwnedFd, path: TreePath) -> Result<()> {
        let mut sorter = Sorter::new(NAMES, &self.collector.options().temporary);
        let list = Dir::read_from(&fd).map_err(|e| self.io(&path)(e.into()))?;
        for entry in list {
            let entry = entry.map_err(|e| self.io(&path)(e.into()))?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                sorter.push(name, b"")?;
            }
        }
        let names = sorter.finish()?.records()?;
        self.open.push(Level { fd, path, names });
        Ok(())
    }

    fn entry(&mut self, name: &[u8]) -> Result<()> {
        let level = self.open.last().expect("a directory is open");
        let mut path = level.path.clone();
        path.push(name);
        let stat = rustix::fs::statat(&level.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(|e| self.io(&path)(gone(e, self.root)))?;
        if self.collector.options().image == Some((stat.st_dev, stat.st_ino)) {
            self.collector.note(path.as_bytes(), "it is the image itself; left out");
            return Ok(());
        }
        let kind = self.kind(level.fd.as_fd(), name, &path, &stat)?;
        if self.collector.leaves_out(&path, &kind) {
            // It still takes the place of what earlier sources have. Nothing else of it is looked
            // at, as it may be left out because it cannot be read.
            let attributes = Attributes::default();
            return self.collector.put(&path, Node { attributes, kind, links: None });
        }
        let mut full = self.full(&path);
        if full.as_os_str().len() >= super::LONGEST_PATH {
            // Longer than Linux takes at once.
            let dir = level.fd.as_fd().as_raw_fd();
            full = Path::new("/proc/self/fd").join(dir.to_string()).join(OsStr::from_bytes(name));
        }
        let attributes = self.attributes(&stat, &full)?;
        let node = Node { attributes, kind, links: None };
        if node.is_directory() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(&level.fd, name, flags, Mode::empty());
            let fd = fd.map_err(|e| self.io(&path)(e.into()))?;
            self.collector.put(&path, node)?;
            return self.enter(fd, path);
        }
        if stat.st_nlink > 1 {
            return self.note_several(&path, &stat, node);
        }
        self.collector.put(&path, node)
    }

    fn kind(&self, dir: BorrowedFd<'_>, name: &[u8], path: &TreePath, stat: &Stat) -> Result<Kind> {
        use rustix::fs::FileType;
        let device = || {
            let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            (major, minor)
        };
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Kind::Directory,
            FileType::RegularFile => {
                let size = stat.st_size.cast_unsigned();
                let key = FileKey { stamp: stamp(stat), path: path.as_bytes() }.encode();
                let contents = (size > 0).then_some(Locator { source: self.source, key });
                Kind::File { size, contents }
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new());
                Kind::Symlink(target.map_err(|e| self.io(path)(e.into()))?.into_bytes())
            }
            FileType::CharacterDevice => {
                let (major, minor) = device();
                Kind::CharDevice { major, minor }
            }
            FileType::BlockDevice => {
                let (major, minor) = device();
                Kind::BlockDevice { major, minor }
            }
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            _ => {
                let what = "a file of a type that no image can have";
                return Err(Error::refused(
                    &self.root.display().to_string(),
                    path.as_bytes(),
                    what,
                ));
            }
        })
    }

    fn attributes(&self, stat: &Stat, full: &Path) -> Result<Attributes> {
        Ok(Attributes {
            uid: stat.st_uid,
            gid: stat.st_gid,
            permissions: stat.st_mode & 0o7777,
            modified: Time {
                seconds: stat.st_mtime,
                nanoseconds: u32::try_from(stat.st_mtime_nsec).expect("less than a second"),
            },
            xattrs: xattrs(full).map_err(Error::io(shown(full.as_os_str().as_bytes())))?,
            ..Attributes::default()
        })
    }

    /// Keeps a name of a file that has others, maybe outside of the tree.
    fn note_several(&mut self, path: &TreePath, stat: &Stat, node: Node) -> Result<()> {
        let at = self.collector.tick();
        let mut key = stat.st_dev.to_be_bytes().to_vec();
        key.extend(stat.st_ino.to_be_bytes());
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

/// A name that is gone when it is looked at.
fn gone(error: Errno, root: &Path) -> io::Error {
    match error {
        Errno::NOENT => has_changed(&root.display().to_string()),
        error => error.into(),
    }
}

fn stamp(stat: &Stat) -> Stamp {
    Stamp {
        inode: stat.st_ino,
        size: stat.st_size.cast_unsigned(),
        modified: (stat.st_mtime, stat.st_mtime_nsec.cast_signed()),
        changed: (stat.st_ctime, stat.st_ctime_nsec.cast_signed()),
    }
}

/// Extended attributes, sorted by name.
fn xattrs(path: &Path) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let names = match grown(|buf| rustix::fs::llistxattr(path, buf)) {
        Ok(names) => names,
        // Not every file system has them.
        Err(Errno::NOTSUP | Errno::NOSYS) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut xattrs = Vec::new();
    for name in names.split(|&b| b == 0).filter(|name| !name.is_empty()) {
        // What the file system makes up (NFS, overlayfs) cannot be set elsewhere.
        let is_kept = crate::rules::check_xattr_name(name).is_ok()
            && (!name.starts_with(b"system.") || name.starts_with(b"system.posix_acl_"));
        if !is_kept {
            continue;
        }
        match grown(|buf| rustix::fs::lgetxattr(path, OsStr::from_bytes(name), buf)) {
            Ok(value) => xattrs.push((name.to_vec(), value)),
            // Gone since, or listed to users that may not read it.
            Err(Errno::NODATA) => {}
            Err(e) => return Err(e.into()),
        }
    }
    xattrs.sort();
    Ok(xattrs)
}

/// Calls again with a larger buffer until all fits.
fn grown(get: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut buf = vec![0; 256];
    loop {
        match get(&mut buf) {
            Ok(len) => {
                buf.truncate(len);
                return Ok(buf);
            }
            Err(Errno::RANGE) if buf.len() < 1 << 20 => buf = vec![0; buf.len() * 8],
            Err(e) => return Err(e),
        }
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
    let file = File::open(root.join(path))?;
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
