//! Writing below a directory, with names that an enemy may have chosen.
//!
//! Every path is followed name by name from the directory that was opened at the start, and never
//! through a symbolic link: what an image calls `a/b` cannot lead out of the destination, even if
//! the image (or another program, meanwhile) made `a` a link. The names themselves were checked by
//! [`crate::names`].
//!
//! What belongs to root alone (owners, devices, some attributes) is tried and remembered when
//! refused; a file whose owner could not be set loses its set-id bits.

use crate::error::{Error, Result};
use larder_format::items::inode::split_rdev;
use larder_format::items::{FileType, InodeItem};
use rustix::fs::{
    AtFlags, FileType as HostType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// An extended attribute.
pub(crate) type Xattr = (Vec<u8>, Vec<u8>);

/// What the destination did not take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refused {
    pub(crate) owners: u64,
    pub(crate) xattrs: u64,
}

/// The destination directory.
#[derive(Debug)]
pub(crate) struct Dest {
    top: Rc<OwnedFd>,
    shown: String,
    force: bool,
    /// Where it was made, if it had not been there.
    made: Option<PathBuf>,
    /// The directory used last.
    last: Option<(Vec<u8>, Rc<OwnedFd>)>,
    pub(crate) refused: Refused,
}

const DIRECTORY: OFlags =
    OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::RDONLY);

fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

/// Directory and last name of a path.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (&[], path),
    }
}

impl Dest {
    /// Opens the destination, making it if need be.
    ///
    /// # Errors
    /// It cannot be made, is no directory, or is not empty without `force`.
    pub(crate) fn open(path: &Path, force: bool) -> Result<Self> {
        let fail =
            |source: io::Error| Error::Destination { path: path.display().to_string(), source };
        let made = match std::fs::create_dir(path) {
            Ok(()) => Some(path.to_owned()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => None,
            Err(e) => return Err(fail(e)),
        };
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
        let top = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        if !force && std::fs::read_dir(path).map_err(fail)?.next().is_some() {
            return Err(fail(io::Error::new(
                io::ErrorKind::DirectoryNotEmpty,
                "the destination is not empty",
            )));
        }
        let shown = path.display().to_string();
        Ok(Self { top: Rc::new(top), shown, force, made, last: None, refused: Refused::default() })
    }

    /// Nothing was written: removes the directory if it was made for this.
    pub(crate) fn take_back(&self) {
        if let Some(path) = &self.made {
            let _ = std::fs::remove_dir(path);
        }
    }

    /// An error of the destination as a whole.
    pub(crate) fn fatal(&self, path: &[u8], source: io::Error) -> Error {
        Error::Destination {
            path: format!("{}/{}", self.shown, String::from_utf8_lossy(path)),
            source,
        }
    }

    /// A directory below the destination, made with everything above it where it is not there.
    pub(crate) fn directory(&mut self, path: &[u8]) -> io::Result<Rc<OwnedFd>> {
        if let Some((known, fd)) = &self.last
            && known == path
        {
            return Ok(fd.clone());
        }
        let mut at = self.top.clone();
        for part in path.split(|b| *b == b'/').filter(|p| !p.is_empty()) {
            let open = || rustix::fs::openat(&*at, name(part), DIRECTORY, Mode::empty());
            let next = match open() {
                Err(Errno::NOENT) => {
                    match rustix::fs::mkdirat(&*at, name(part), Mode::RWXU) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(e) => return Err(e.into()),
                    }
                    open()?
                }
                other => other?,
            };
            at = Rc::new(next);
        }
        self.last = Some((path.to_vec(), at.clone()));
        Ok(at)
    }

    /// Makes a directory that nothing is known of but that it was there.
    pub(crate) fn empty(&mut self, path: &[u8]) -> io::Result<()> {
        let dir = self.directory(path)?;
        Ok(rustix::fs::fchmod(&*dir, Mode::from_raw_mode(0o755))?)
    }

    /// Runs something that makes an entry; with `force`, once more after removing what stands in
    /// its way.
    fn make<T>(
        &mut self,
        path: &[u8],
        mut how: impl FnMut(BorrowedFd<'_>, &OsStr) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        use std::os::fd::AsFd;
        let (dir, last) = split(path);
        let dir = self.directory(dir)?;
        match how(dir.as_fd(), name(last)) {
            Err(Errno::EXIST) if self.force => {
                rustix::fs::unlinkat(&*dir, name(last), AtFlags::empty())?;
                Ok(how(dir.as_fd(), name(last))?)
            }
            other => Ok(other?),
        }
    }

    /// Makes an empty file.
    pub(crate) fn file(&mut self, path: &[u8]) -> io::Result<File> {
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        self.make(path, |dir, name| rustix::fs::openat(dir, name, flags, mode)).map(File::from)
    }

    /// Makes a symbolic link, whose target is anything.
    pub(crate) fn symlink(&mut self, path: &[u8], target: &[u8]) -> io::Result<()> {
        self.make(path, |dir, name| rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name))
    }

    /// Makes another name for a file.
    pub(crate) fn link(&mut self, from: &[u8], to: &[u8]) -> io::Result<()> {
        let (dir, last) = split(from);
        let source = self.directory(dir)?;
        self.make(to, |dir, to| rustix::fs::linkat(&*source, name(last), dir, to, AtFlags::empty()))
    }

    /// Makes a fifo, socket or device.
    pub(crate) fn special(&mut self, path: &[u8], kind: FileType, rdev: u64) -> io::Result<()> {
        let host = match kind {
            FileType::Fifo => HostType::Fifo,
            FileType::Socket => HostType::Socket,
            FileType::CharDevice => HostType::CharacterDevice,
            FileType::BlockDevice => HostType::BlockDevice,
            _ => return Err(io::Error::from(io::ErrorKind::InvalidInput)),
        };
        let (major, minor) = split_rdev(rdev);
        let dev = rustix::fs::makedev(major, minor);
        self.make(path, |dir, name| {
            rustix::fs::mknodat(dir, name, host, Mode::RUSR | Mode::WUSR, dev)
        })
    }

    /// Removes a file again.
    pub(crate) fn remove(&mut self, path: &[u8]) -> io::Result<()> {
        let (dir, last) = split(path);
        let dir = self.directory(dir)?;
        Ok(rustix::fs::unlinkat(&*dir, name(last), AtFlags::empty())?)
    }

    /// Gives what lies at a path the attributes of an inode, times last.
    pub(crate) fn attributes(
        &mut self,
        path: &[u8],
        inode: &InodeItem,
        xattrs: &[Xattr],
    ) -> io::Result<()> {
        let (dir, last) = split(path);
        // The destination itself stands for the root directory.
        let (dir, last) = if last.is_empty() {
            (self.top.clone(), &b"."[..])
        } else {
            (self.directory(dir)?, last)
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&*dir, name(last), flags, Mode::empty())?;
        // Through this link operations reach the very inode that is open, whatever has become of
        // its name.
        let through = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let symlink = HostType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) == HostType::Symlink;
        let owned = set_owner(&fd, inode.uid.get(), inode.gid.get()).is_ok();
        if !owned {
            self.refused.owners += 1;
        }
        for (key, value) in xattrs {
            let own = key.starts_with(b"btrfs.");
            let set = rustix::fs::setxattr(&through, name(key), value, XattrFlags::empty());
            if set.is_err() && !own {
                self.refused.xattrs += 1;
            }
        }
        if !symlink {
            let keep = if owned { 0o7777 } else { 0o1777 };
            rustix::fs::chmod(&through, Mode::from_raw_mode(inode.mode.get() & keep))?;
        }
        let time = |t: larder_format::items::Timespec| Timespec {
            tv_sec: t.sec.get(),
            tv_nsec: i64::from(t.nsec.get().min(999_999_999)),
        };
        let times =
            Timestamps { last_access: time(inode.atime), last_modification: time(inode.mtime) };
        rustix::fs::utimensat(&*dir, name(last), &times, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }
}

fn set_owner(fd: &OwnedFd, uid: u32, gid: u32) -> std::result::Result<(), Errno> {
    // All ones mean "leave it" to the host.
    if uid == u32::MAX || gid == u32::MAX {
        return Err(Errno::INVAL);
    }
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::fs::chownat(fd, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use zerocopy::FromZeros;

    #[test]
    fn links_are_not_followed_out_of_the_destination() {
        let dir = tempfile::tempdir().unwrap();
        let (top, outside) = (dir.path().join("top"), dir.path().join("outside"));
        std::fs::create_dir(&outside).unwrap();
        let mut dest = Dest::open(&top, false).unwrap();
        dest.symlink(b"way", outside.as_os_str().as_bytes()).unwrap();
        assert!(dest.file(b"way/file").is_err());
        assert!(dest.directory(b"way/dir").is_err());
        symlink(outside.join("target"), top.join("there")).unwrap();
        assert!(dest.file(b"there").is_err());
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
        dest.file(b"a/b/c").unwrap();
        assert!(top.join("a/b/c").is_file());
        assert!(dest.file(b"a/b/c").is_err(), "nothing is overwritten");
        assert!(Dest::open(&top, false).is_err(), "it is not empty");
        let mut dest = Dest::open(&top, true).unwrap();
        dest.file(b"a/b/c").unwrap();
        dest.file(b"there").unwrap();
        assert!(!outside.join("target").exists() && top.join("there").is_file());
    }

    #[test]
    fn an_owner_that_means_leave_it_is_counted_as_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut dest = Dest::open(dir.path(), true).unwrap();
        dest.file(b"file").unwrap();
        let mut inode = InodeItem::new_zeroed();
        inode.uid = u32::MAX.into();
        dest.attributes(b"file", &inode, &[]).unwrap();
        assert_eq!(dest.refused.owners, 1);
    }
}
