//! A directory of the host as destination of copies, which nothing written through it can leave.
//!
//! A node is a path below that directory. The directories on the way are opened one after the
//! other, and none of them may be a symbolic link. So it does not matter what an image has put
//! there, or what a program puts there meanwhile. Attributes are set through a descriptor of the
//! entry itself, by its name in `/proc/self/fd`.
//!
//! A copy goes from each directory to its neighbours. The directories that lead to the last one
//! therefore stay open.

use super::{Meta, Sink, Xattrs};
use anyhow::Context;
use larder_fs::{FileKind, Timestamp};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

/// The directory.
#[derive(Debug)]
pub(crate) struct Beneath {
    root: Rc<OwnedFd>,
    /// The directories that lead to the last one that was used, with their names.
    way: RefCell<Vec<(Vec<u8>, Rc<OwnedFd>)>>,
}

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Beneath {
    /// Opens a directory, to which symbolic links may lead.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let root = rustix::fs::openat(CWD, dir, DIRECTORY - OFlags::NOFOLLOW, Mode::empty())?;
        Ok(Self { root: Rc::new(root), way: RefCell::new(Vec::new()) })
    }

    /// The directory at a path.
    fn directory(&self, path: &[u8]) -> io::Result<Rc<OwnedFd>> {
        let mut way = self.way.borrow_mut();
        let names = || path.split(|b| *b == b'/').filter(|name| !name.is_empty());
        let common = way.iter().zip(names()).take_while(|((open, _), name)| open == name).count();
        way.truncate(common);
        for name in names().skip(common) {
            let above = way.last().map_or(&self.root, |(_, fd)| fd);
            let fd = rustix::fs::openat(above, name, DIRECTORY, Mode::empty())?;
            way.push((name.to_vec(), Rc::new(fd)));
        }
        Ok(Rc::clone(way.last().map_or(&self.root, |(_, fd)| fd)))
    }

    /// The directory that an entry is in, and its name there. The directory of all is `.` in
    /// itself.
    fn place<'a>(&self, node: &'a [u8]) -> io::Result<(Rc<OwnedFd>, &'a [u8])> {
        match node.iter().rposition(|b| *b == b'/') {
            Some(slash) => Ok((self.directory(&node[..slash])?, &node[slash + 1..])),
            None if node.is_empty() => Ok((Rc::clone(&self.root), b".")),
            None => Ok((Rc::clone(&self.root), node)),
        }
    }

    fn make(&self, dir: &OwnedFd, name: &[u8], meta: &Meta, target: &[u8]) -> io::Result<()> {
        let private = Mode::from_raw_mode(0o600);
        let node = |kind| {
            let part = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
            let dev = rustix::fs::makedev(part(meta.rdev >> 20), part(meta.rdev & 0xf_ffff));
            Ok(rustix::fs::mknodat(dir, name, kind, private, dev)?)
        };
        match meta.kind {
            FileKind::Directory => {
                // Closed to others until its permissions are set, and open to us whatever the
                // umask is.
                rustix::fs::mkdirat(dir, name, Mode::RWXU)?;
                let made = rustix::fs::openat(dir, name, DIRECTORY, Mode::empty())?;
                Ok(rustix::fs::chmod(itself(made.as_fd()), Mode::RWXU)?)
            }
            FileKind::Regular => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                Ok(rustix::fs::openat(dir, name, flags, private).map(drop)?)
            }
            FileKind::Symlink => Ok(rustix::fs::symlinkat(OsStr::from_bytes(target), dir, name)?),
            FileKind::CharDevice => node(FileType::CharacterDevice),
            FileKind::BlockDevice => node(FileType::BlockDevice),
            FileKind::Fifo => node(FileType::Fifo),
            FileKind::Socket => node(FileType::Socket),
        }
    }
}

/// The name of an open entry for calls that take paths only.
fn itself(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn below(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

impl Sink for Beneath {
    type Node = Vec<u8>;
    type File = File;

    fn find(&self, dir: &Vec<u8>, name: &[u8]) -> anyhow::Result<Option<(Vec<u8>, FileKind)>> {
        let stat = rustix::fs::statat(&*self.directory(dir)?, name, AtFlags::SYMLINK_NOFOLLOW);
        let kind = match stat.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(e) => return Err(io::Error::from(e).into()),
            Ok(FileType::Directory) => FileKind::Directory,
            Ok(FileType::Symlink) => FileKind::Symlink,
            Ok(FileType::CharacterDevice) => FileKind::CharDevice,
            Ok(FileType::BlockDevice) => FileKind::BlockDevice,
            Ok(FileType::Fifo) => FileKind::Fifo,
            Ok(FileType::Socket) => FileKind::Socket,
            Ok(_) => FileKind::Regular,
        };
        Ok(Some((below(dir, name), kind)))
    }

    fn unlink(&self, dir: &Vec<u8>, name: &[u8]) -> anyhow::Result<()> {
        let done = rustix::fs::unlinkat(&*self.directory(dir)?, name, AtFlags::empty());
        Ok(done.map_err(io::Error::from)?)
    }

    fn create(
        &self,
        dir: &Vec<u8>,
        name: &[u8],
        meta: &Meta,
        target: &[u8],
    ) -> anyhow::Result<Vec<u8>> {
        self.make(&*self.directory(dir)?, name, meta, target)?;
        Ok(below(dir, name))
    }

    fn link(&self, node: &Vec<u8>, dir: &Vec<u8>, name: &[u8]) -> anyhow::Result<()> {
        let (from, old) = self.place(node)?;
        let to = self.directory(dir)?;
        let done = rustix::fs::linkat(&*from, old, &*to, name, AtFlags::empty());
        Ok(done.map_err(io::Error::from)?)
    }

    fn open(&self, node: &Vec<u8>) -> anyhow::Result<File> {
        let (dir, name) = self.place(node)?;
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&*dir, name, flags, Mode::empty());
        Ok(file.map_err(io::Error::from)?.into())
    }

    fn write(&self, file: &File, at: u64, data: &[u8]) -> anyhow::Result<()> {
        Ok(file.write_all_at(data, at)?)
    }

    fn set_size(&self, file: &File, size: u64) -> anyhow::Result<()> {
        Ok(file.set_len(size)?)
    }

    fn finish(&self, node: &Vec<u8>, meta: &Meta, xattrs: &Xattrs) -> anyhow::Result<()> {
        let (dir, name) = self.place(node)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry =
            rustix::fs::openat(&*dir, name, flags, Mode::empty()).map_err(io::Error::from)?;
        let root = rustix::process::geteuid().is_root();
        set_owner(&entry, meta, root).context("owner")?;
        if meta.kind != FileKind::Symlink {
            set_permissions(&entry, meta, root).context("permissions")?;
        }
        for (name, value) in xattrs {
            let path = itself(entry.as_fd());
            match rustix::fs::setxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty()) {
                // Only user attributes are an ordinary user's to set, and btrfs properties btrfs's
                // to keep.
                Err(_) if !name.starts_with(b"user.") && !root || name.starts_with(b"btrfs.") => {}
                other => {
                    other.with_context(|| format!("attribute {}", crate::print::name(name)))?
                }
            }
        }
        let time = |t: Timestamp| Timespec { tv_sec: t.sec, tv_nsec: t.nsec.into() };
        let times =
            Timestamps { last_access: time(meta.atime), last_modification: time(meta.mtime) };
        let done = rustix::fs::utimensat(&*dir, name, &times, AtFlags::SYMLINK_NOFOLLOW);
        done.map_err(io::Error::from).context("times")
    }
}

fn set_owner(entry: &OwnedFd, meta: &Meta, root: bool) -> io::Result<()> {
    // The system understands all ones as "leave it".
    if meta.uid == u32::MAX || meta.gid == u32::MAX {
        if !root {
            return Ok(());
        }
        let reason = format!("no file can have the owner {}:{}", meta.uid, meta.gid);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
    match rustix::fs::chownat(entry, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH) {
        // Ordinary users keep their own files; that is expected and not worth a word.
        Err(rustix::io::Errno::PERM) if !root => Ok(()),
        other => Ok(other?),
    }
}

fn set_permissions(entry: &OwnedFd, meta: &Meta, root: bool) -> io::Result<()> {
    // Set-id bits of another owner must not become set-id bits of ours.
    let mine = root || rustix::fs::fstat(entry)?.st_uid == meta.uid;
    let perm = if mine { meta.perm } else { meta.perm & 0o1777 };
    Ok(rustix::fs::chmod(itself(entry.as_fd()), Mode::from_raw_mode(perm))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn meta(kind: FileKind) -> Meta {
        let now = Timestamp::default();
        Meta {
            kind,
            perm: 0o755,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            size: 0,
            atime: now,
            mtime: now,
            identity: None,
            tree: 0,
        }
    }

    /// A directory that was made is exchanged for a link before something is put into it.
    #[test]
    fn a_directory_that_becomes_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (to, victim) = (dir.path().join("to"), dir.path().join("victim"));
        std::fs::create_dir(&to).unwrap();
        std::fs::create_dir(&victim).unwrap();
        let sink = Beneath::open(&to).unwrap();
        let (kind, none) = (meta(FileKind::Directory), Xattrs::new());
        let made = sink.create(&Vec::new(), b"d", &kind, b"").unwrap();
        std::fs::remove_dir(to.join("d")).unwrap();
        symlink(&victim, to.join("d")).unwrap();
        let file = meta(FileKind::Regular);
        let refused = sink.create(&made, b"f", &file, b"").unwrap_err();
        let kind = refused.downcast_ref::<io::Error>().map(io::Error::kind);
        assert_eq!(kind, Some(io::ErrorKind::NotADirectory), "{refused}");
        assert!(sink.find(&made, b"f").is_err() && sink.unlink(&made, b"f").is_err());
        // Attributes are those of the link itself.
        sink.finish(&made, &Meta { perm: 0o700, ..meta(FileKind::Symlink) }, &none).unwrap();
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
        // The directory of all may be behind a link.
        symlink(&to, dir.path().join("link")).unwrap();
        Beneath::open(&dir.path().join("link")).unwrap();
    }

    #[test]
    fn many_directories_need_few_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let sink = Beneath::open(dir.path()).unwrap();
        let kind = meta(FileKind::Directory);
        for i in 0..3000 {
            let name = format!("d{i}").into_bytes();
            let made = sink.create(&Vec::new(), &name, &kind, b"").unwrap();
            sink.create(&made, b"f", &meta(FileKind::Regular), b"").unwrap();
        }
        assert_eq!(sink.way.borrow().len(), 1);
        sink.link(&b"d0/f".to_vec(), &b"d1".to_vec(), b"g").unwrap();
        assert!(dir.path().join("d1/g").exists());
    }

    #[test]
    fn an_owner_that_means_leave_it_is_an_error_for_root() {
        let dir = tempfile::tempdir().unwrap();
        let entry = OwnedFd::from(File::open(dir.path()).unwrap());
        let nobody = Meta { uid: u32::MAX, ..meta(FileKind::Directory) };
        set_owner(&entry, &nobody, false).unwrap();
        let refused = set_owner(&entry, &nobody, true).unwrap_err();
        assert!(refused.to_string().contains("4294967295"), "{refused}");
    }
}
