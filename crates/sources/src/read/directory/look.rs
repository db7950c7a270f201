//! What is behind one name of a directory.
//!
//! Any number of threads may look at the same time. What is left out is not looked at any further
//! than to know its type, as it may be left out because it cannot be read.

use super::FileKey;
use crate::error::{Error, Result, shown};
use crate::overlay::{LeftOut, Node};
use crate::read::LONGEST_PATH;
use crate::read::bytes::{Stamp, has_changed};
use crate::{Attributes, Kind, Locator, SourceNumber, Time, TreePath};
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Looks at what a source has.
#[derive(Debug)]
pub(super) struct Looker<'a> {
    pub(super) root: &'a Path,
    pub(super) source: SourceNumber,
    pub(super) left_out: LeftOut,
    /// Device and inode of the image that is being made.
    pub(super) image: Option<(u64, u64)>,
}

/// What is behind a name.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) node: Node,
    /// It is left out, so its attributes are not known.
    pub(super) is_left_out: bool,
    /// It is the image that is being made.
    pub(super) is_image: bool,
    /// Device and inode, if the file has other names.
    pub(super) shared: Option<(u64, u64)>,
}

impl Seen {
    /// Bytes of what has no fixed length.
    pub(super) fn cost(&self) -> usize {
        let xattrs =
            self.node.attributes.xattrs.iter().map(|(name, value)| name.len() + value.len());
        let kind = match &self.node.kind {
            Kind::File { contents: Some(at), .. } => at.key.len(),
            Kind::Symlink(target) => target.len(),
            _ => 0,
        };
        xattrs.sum::<usize>() + kind
    }

    /// Is there something below it?
    pub(super) fn leads_on(&self) -> bool {
        self.node.is_directory() && !self.is_left_out
    }
}

impl Looker<'_> {
    pub(super) fn io(&self, path: &TreePath) -> impl FnOnce(io::Error) -> Error + use<> {
        Error::io(shown(self.full(path).as_os_str().as_bytes()))
    }

    /// The path on this machine.
    fn full(&self, path: &TreePath) -> PathBuf {
        if path.is_root() {
            return self.root.to_owned();
        }
        self.root.join(OsStr::from_bytes(path.as_bytes()))
    }

    /// The directory that is the source.
    pub(super) fn root(&self, fd: &OwnedFd) -> Result<Node> {
        let stat = rustix::fs::fstat(fd).map_err(|e| self.io(&TreePath::root())(e.into()))?;
        let attributes = self.attributes(&stat, self.root)?;
        Ok(Node { attributes, kind: Kind::Directory, links: None })
    }

    /// Opens the directory `path`, which is in `parent`.
    pub(super) fn open(&self, parent: &OwnedFd, path: &TreePath) -> Result<OwnedFd> {
        let (_, name) = path.split().expect("the root is in nothing");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent, name, flags, Mode::empty());
        fd.map_err(|e| self.io(path)(e.into()))
    }

    /// Looks at `path`, which is in `dir`.
    pub(super) fn look(&self, dir: &OwnedFd, path: &TreePath) -> Result<Seen> {
        let (_, name) = path.split().expect("the root is in nothing");
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(|e| self.io(path)(gone(e, self.root)))?;
        let kind = self.kind(dir.as_fd(), name, path, &stat)?;
        let is_image = self.image == Some((stat.st_dev, stat.st_ino));
        if self.left_out.has(path, &kind) {
            let attributes = Attributes::default();
            let node = Node { attributes, kind, links: None };
            return Ok(Seen { node, is_left_out: true, is_image, shared: None });
        }
        let mut full = self.full(path);
        if full.as_os_str().len() >= LONGEST_PATH {
            // Longer than Linux takes at once.
            let dir = dir.as_raw_fd().to_string();
            full = Path::new("/proc/self/fd").join(dir).join(OsStr::from_bytes(name));
        }
        let node = Node { attributes: self.attributes(&stat, &full)?, kind, links: None };
        let has_others = !node.is_directory() && stat.st_nlink > 1;
        let shared = has_others.then_some((stat.st_dev, stat.st_ino));
        Ok(Seen { node, is_left_out: false, is_image, shared })
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
            xattrs: xattrs(full).map_err(|e| Error::io(shown(full.as_os_str().as_bytes()))(e))?,
            ..Attributes::default()
        })
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

/// Calls again with a larger buffer until all fits. Most files have no attributes, and then nothing
/// is allocated.
fn grown(get: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut small = [0; 256];
    match get(&mut small) {
        Ok(len) => return Ok(small[..len].to_vec()),
        Err(Errno::RANGE) => {}
        Err(e) => return Err(e),
    }
    let mut buf = vec![0; small.len() * 8];
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
