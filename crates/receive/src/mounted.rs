//! Receiving into a directory of a Larder mount, through system calls.
//!
//! Hidden here: how a path of the stream becomes a descriptor. Directories are opened beneath the
//! subvolume's root, and the kernel refuses symbolic links on the way, also those that appear
//! meanwhile. Everything else is done to a descriptor of the entry itself, or to a name in an open
//! directory. The directory and the file that were used last stay open.
//!
//! Subvolumes are made by the ioctls of the mount. Ranges are shared by `copy_file_range`, for
//! which the daemon shares extents where it can. Data that is packed is unpacked first, because
//! FUSE has no request that would take it. A time of change cannot be set.

use crate::destination::{
    BoxResult, Destination, Encoded, Entry, Existing, Node, Reserve, Sent, Shared, Times,
};
use crate::path::StreamPath;
use crate::record::ATTRIBUTE;
use larder_format::Generation;
use larder_format::items::Timespec;
use larder_fuse::{control, subvolumes};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, ResolveFlags, StatxFlags,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The attribute of `statx` that a mount's root has.
const MOUNT_ROOT: u64 = 0x2000;

const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// A directory of a Larder mount.
#[derive(Debug)]
pub struct MountedDir {
    target: Rc<OwnedFd>,
    /// The root of the subvolume that is being received.
    root: Rc<OwnedFd>,
    dir: Option<(Vec<u8>, Rc<OwnedFd>)>,
    file: Option<(Vec<u8>, File)>,
}

impl MountedDir {
    /// Receives into this directory.
    ///
    /// # Errors
    /// `Unsupported` if it is not on a Larder mount; it cannot be opened.
    pub fn open(dir: &Path) -> io::Result<Self> {
        control::is_served(dir)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let target = Rc::new(rustix::fs::openat(CWD, dir, flags, Mode::empty())?);
        Ok(Self { root: Rc::clone(&target), target, dir: None, file: None })
    }

    /// Opens what is at a path below a directory.
    fn beneath(root: &OwnedFd, path: StreamPath<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.bytes().is_empty() { b"." } else { path.bytes() };
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat2(root, OsStr::from_bytes(path), flags, Mode::empty(), BENEATH)?)
    }

    /// The entry at a path, to be named by its descriptor.
    fn entry(&self, path: StreamPath<'_>) -> io::Result<OwnedFd> {
        Self::beneath(&self.root, path, PLACE)
    }

    /// The directory of an entry, and its name.
    fn place<'p>(&mut self, path: StreamPath<'p>) -> io::Result<(Rc<OwnedFd>, &'p OsStr)> {
        let (dir, name) = path.split().ok_or(io::ErrorKind::InvalidInput)?;
        let known = self.dir.as_ref().filter(|(known, _)| known == dir.bytes());
        let fd = match known {
            Some((_, fd)) => Rc::clone(fd),
            None => {
                let fd = Self::beneath(&self.root, dir, PLACE | OFlags::DIRECTORY)?;
                let fd = Rc::new(fd);
                self.dir = Some((dir.bytes().to_vec(), Rc::clone(&fd)));
                fd
            }
        };
        Ok((fd, OsStr::from_bytes(name)))
    }

    /// The file at a path, open for writing.
    fn file(&mut self, path: StreamPath<'_>) -> io::Result<&File> {
        if self.file.as_ref().is_none_or(|(known, _)| known != path.bytes()) {
            let file = regular(&self.root, path, OFlags::WRONLY)?;
            self.file = Some((path.bytes().to_vec(), file));
        }
        Ok(&self.file.as_ref().expect("it is open").1)
    }

    /// Names at and below a path do not lead where they did.
    fn forget(&mut self, path: StreamPath<'_>) {
        self.dir.take_if(|(known, _)| path.contains(known));
        self.file.take_if(|(known, _)| path.contains(known));
    }

    /// A path to an entry of the target directory, for the ioctls.
    fn in_target(&self, name: &[u8]) -> PathBuf {
        itself(self.target.as_fd()).join(OsStr::from_bytes(name))
    }

    fn subvol(&self, name: &[u8]) -> io::Result<Rc<OwnedFd>> {
        let flags = PLACE | OFlags::DIRECTORY;
        let name = OsStr::from_bytes(name);
        Ok(Rc::new(rustix::fs::openat2(&self.target, name, flags, Mode::empty(), BENEATH)?))
    }

    /// What the daemon says of a subvolume.
    fn facts(&self, subvol: &OwnedFd) -> io::Result<Value> {
        let path = itself(subvol.as_fd());
        let id = subvolumes::id_of(&path)?;
        let found = subvolumes::list(&path)?.0.into_iter().find(|s| s["id"] == id);
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The root directory of the mount.
    fn mount_root(&self) -> io::Result<OwnedFd> {
        let mut at = rustix::fs::openat(&self.target, ".", PLACE, Mode::empty())?;
        loop {
            let facts = rustix::fs::statx(&at, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
            if facts.stx_attributes.bits() & MOUNT_ROOT != 0 {
                return Ok(at);
            }
            at = rustix::fs::openat(&at, "..", PLACE, Mode::empty())?;
        }
    }

    /// Opens a subvolume that the list has.
    fn reach(&self, all: &[Value], wanted: &Value) -> BoxResult<Rc<OwnedFd>> {
        let root = self.mount_root()?;
        let id = subvolumes::id_of(&itself(root.as_fd()))?;
        let path = |s: &Value| s["path"].as_str().unwrap_or_default().to_owned();
        let above = all.iter().find(|s| s["id"] == id).map(path).unwrap_or_default();
        let wanted = path(wanted);
        let below = match wanted.strip_prefix(&above) {
            Some(rest) if above.is_empty() || rest.is_empty() || rest.starts_with('/') => {
                rest.trim_start_matches('/')
            }
            _ => return Err(format!("the mount does not show /{wanted}, which is needed").into()),
        };
        let path = StreamPath::new(below.as_bytes())?;
        Ok(Rc::new(Self::beneath(&root, path, PLACE | OFlags::DIRECTORY)?))
    }
}

/// The name of an open entry for calls that take paths only.
fn itself(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Opens a regular file; anything else might block.
fn regular(root: &OwnedFd, path: StreamPath<'_>, flags: OFlags) -> io::Result<File> {
    let fd = MountedDir::beneath(root, path, flags | OFlags::NONBLOCK)?;
    match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
        FileType::RegularFile => Ok(File::from(fd)),
        _ => Err(io::Error::from_raw_os_error(Errno::INVAL.raw_os_error())),
    }
}

fn time(t: Timespec) -> rustix::fs::Timespec {
    rustix::fs::Timespec { tv_sec: t.sec.get(), tv_nsec: t.nsec.get().into() }
}

fn record(fd: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; 256];
    match rustix::fs::getxattr(itself(fd.as_fd()), OsStr::from_bytes(ATTRIBUTE), &mut value[..]) {
        Ok(len) => {
            value.truncate(len);
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn sent(facts: &Value) -> Option<Sent> {
    let uuid = crate::record::parse_uuid(facts["received_uuid"].as_str()?)?;
    Some(Sent { uuid, ctransid: Generation(facts["sent_in"].as_u64()?) })
}

impl Destination for MountedDir {
    type Subvol = Rc<OwnedFd>;

    fn look(&self, name: &[u8]) -> BoxResult<Option<Entry<Rc<OwnedFd>>>> {
        let place = OsStr::from_bytes(name);
        let stat = match rustix::fs::statat(&self.target, place, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !directory || subvolumes::is_read_only(&self.in_target(name)).is_err() {
            return Ok(Some(Entry::Other));
        }
        let subvol = self.subvol(name)?;
        let facts = self.facts(&subvol)?;
        let number = |key: &str| facts[key].as_u64().unwrap_or_default();
        Ok(Some(Entry::Subvolume(Existing {
            read_only: facts["read_only"] == true,
            received: sent(&facts),
            untouched_snapshot: !facts["parent_uuid"].is_null()
                && number("last_change") <= number("created_in"),
            record: record(&subvol)?,
            subvol,
        })))
    }

    fn find(&self, wanted: &Sent) -> BoxResult<Option<Rc<OwnedFd>>> {
        let (all, _) = subvolumes::list(&itself(self.target.as_fd()))?;
        let uuid = crate::error::uuid(wanted.uuid);
        let of = |rank: &dyn Fn(&Value) -> bool| {
            all.iter().rev().find(|s| s["read_only"] == true && rank(s))
        };
        let found = of(&|s| sent(s).as_ref() == Some(wanted))
            .or_else(|| of(&|s| s["uuid"] == uuid.as_str()))
            .or_else(|| of(&|s| s["received_uuid"] == uuid.as_str()));
        found.map(|s| self.reach(&all, s)).transpose()
    }

    fn create(&mut self, name: &[u8], record: &[u8]) -> BoxResult<Rc<OwnedFd>> {
        subvolumes::create(&self.in_target(name))?;
        let subvol = self.subvol(name)?;
        let attribute = OsStr::from_bytes(ATTRIBUTE);
        rustix::fs::setxattr(itself(subvol.as_fd()), attribute, record, XattrFlags::empty())?;
        Ok(subvol)
    }

    fn snapshot(
        &mut self,
        of: &Rc<OwnedFd>,
        name: &[u8],
        read_only: bool,
    ) -> BoxResult<Rc<OwnedFd>> {
        subvolumes::snapshot(&itself(of.as_fd()), &self.in_target(name), read_only)?;
        Ok(self.subvol(name)?)
    }

    fn delete(&mut self, name: &[u8]) -> BoxResult<()> {
        Ok(subvolumes::delete(&self.in_target(name))?)
    }

    fn enter(&mut self, subvol: &Rc<OwnedFd>) -> BoxResult<()> {
        self.root = Rc::clone(subvol);
        self.forget(StreamPath::ROOT);
        Ok(())
    }

    fn sync(&mut self) -> BoxResult<()> {
        self.file = None;
        Ok(control::sync(&itself(self.target.as_fd()))?)
    }

    fn set_record(&mut self, record: Option<&[u8]>) -> BoxResult<()> {
        let (at, name) = (itself(self.root.as_fd()), OsStr::from_bytes(ATTRIBUTE));
        match record {
            Some(value) => rustix::fs::setxattr(at, name, value, XattrFlags::empty())?,
            None => rustix::fs::removexattr(at, name)?,
        }
        Ok(())
    }

    fn set_received(&mut self, sent: &Sent) -> BoxResult<()> {
        let at = itself(self.root.as_fd());
        subvolumes::set_received(&at, sent.uuid, sent.ctransid)?;
        Ok(())
    }

    fn set_read_only(&mut self) -> BoxResult<()> {
        self.file = None;
        Ok(subvolumes::set_read_only(&itself(self.root.as_fd()), true)?)
    }

    fn make(&mut self, path: StreamPath<'_>, node: &Node<'_>) -> BoxResult<()> {
        let (dir, name) = self.place(path)?;
        let private = Mode::RUSR | Mode::WUSR;
        let special = |kind, (major, minor)| {
            rustix::fs::mknodat(&dir, name, kind, private, rustix::fs::makedev(major, minor))
        };
        match *node {
            Node::File => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                let made = rustix::fs::openat(&dir, name, flags, private)?;
                self.file = Some((path.bytes().to_vec(), File::from(made)));
            }
            Node::Directory => rustix::fs::mkdirat(&dir, name, Mode::RWXU)?,
            Node::Symlink { target } => {
                rustix::fs::symlinkat(OsStr::from_bytes(target), &dir, name)?;
            }
            Node::Fifo => special(FileType::Fifo, (0, 0))?,
            Node::Socket => special(FileType::Socket, (0, 0))?,
            Node::CharDevice { major, minor } => {
                special(FileType::CharacterDevice, (major, minor))?
            }
            Node::BlockDevice { major, minor } => special(FileType::BlockDevice, (major, minor))?,
        }
        Ok(())
    }

    fn rename(&mut self, from: StreamPath<'_>, to: StreamPath<'_>) -> BoxResult<()> {
        let old = self.place(from)?;
        let new = self.place(to)?;
        rustix::fs::renameat(&old.0, old.1, &new.0, new.1)?;
        let moved = self.file.take_if(|(known, _)| known == from.bytes());
        self.forget(from);
        self.forget(to);
        if let Some((_, file)) = moved {
            self.file = Some((to.bytes().to_vec(), file));
        }
        Ok(())
    }

    fn link(&mut self, path: StreamPath<'_>, target: StreamPath<'_>) -> BoxResult<()> {
        let old = self.place(target)?;
        let new = self.place(path)?;
        rustix::fs::linkat(&old.0, old.1, &new.0, new.1, AtFlags::empty())?;
        Ok(())
    }

    fn unlink(&mut self, path: StreamPath<'_>) -> BoxResult<()> {
        let (dir, name) = self.place(path)?;
        rustix::fs::unlinkat(&dir, name, AtFlags::empty())?;
        self.forget(path);
        Ok(())
    }

    fn rmdir(&mut self, path: StreamPath<'_>) -> BoxResult<()> {
        let (dir, name) = self.place(path)?;
        rustix::fs::unlinkat(&dir, name, AtFlags::REMOVEDIR)?;
        self.forget(path);
        Ok(())
    }

    fn set_xattr(&mut self, path: StreamPath<'_>, name: &[u8], value: &[u8]) -> BoxResult<()> {
        let (at, name) = (self.entry(path)?, OsStr::from_bytes(name));
        rustix::fs::setxattr(itself(at.as_fd()), name, value, XattrFlags::empty())?;
        Ok(())
    }

    fn remove_xattr(&mut self, path: StreamPath<'_>, name: &[u8]) -> BoxResult<()> {
        let at = self.entry(path)?;
        rustix::fs::removexattr(itself(at.as_fd()), OsStr::from_bytes(name))?;
        Ok(())
    }

    fn write(&mut self, path: StreamPath<'_>, offset: u64, data: &[u8]) -> BoxResult<()> {
        Ok(self.file(path)?.write_all_at(data, offset)?)
    }

    fn write_encoded(&mut self, _path: StreamPath<'_>, _data: &Encoded<'_>) -> BoxResult<bool> {
        Ok(false)
    }

    fn share(
        &mut self,
        from: &Shared<'_, Rc<OwnedFd>>,
        path: StreamPath<'_>,
        offset: u64,
    ) -> BoxResult<()> {
        let source = regular(from.subvol, from.path, OFlags::RDONLY)?;
        let to = self.file(path)?;
        let (mut from_at, mut to_at, mut left) = (from.offset, offset, from.len);
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(1 << 30);
            let done = rustix::fs::copy_file_range(
                &source,
                Some(&mut from_at),
                to,
                Some(&mut to_at),
                most,
            )?;
            if done == 0 {
                return Err("the source ends before the range".into());
            }
            left -= done as u64;
        }
        Ok(())
    }

    fn truncate(&mut self, path: StreamPath<'_>, size: u64) -> BoxResult<()> {
        Ok(self.file(path)?.set_len(size)?)
    }

    fn chmod(&mut self, path: StreamPath<'_>, mode: u32) -> BoxResult<()> {
        let at = self.entry(path)?;
        rustix::fs::chmod(itself(at.as_fd()), Mode::from_raw_mode(mode))?;
        Ok(())
    }

    fn chown(&mut self, path: StreamPath<'_>, uid: u32, gid: u32) -> BoxResult<()> {
        // The system understands all ones as "leave it".
        if uid == u32::MAX || gid == u32::MAX {
            return Err(format!("no file can have the owner {uid}:{gid}").into());
        }
        let at = self.entry(path)?;
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::chownat(&at, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
        Ok(())
    }

    fn set_times(&mut self, path: StreamPath<'_>, times: &Times) -> BoxResult<()> {
        // What is written later would set the time of the last change again.
        self.file.take_if(|(known, _)| known == path.bytes());
        let at = self.entry(path)?;
        let times = Timestamps {
            last_access: time(times.accessed),
            last_modification: time(times.modified),
        };
        rustix::fs::utimensat(&at, "", &times, AtFlags::EMPTY_PATH)?;
        Ok(())
    }

    fn reserve(&mut self, path: StreamPath<'_>, range: Range<u64>, how: Reserve) -> BoxResult<()> {
        let keep = |keep| if keep { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        let flags = match how {
            Reserve::Allocate { keep_size } => keep(keep_size),
            Reserve::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Reserve::Zero { keep_size } => FallocateFlags::ZERO_RANGE | keep(keep_size),
        };
        rustix::fs::fallocate(self.file(path)?, flags, range.start, range.end - range.start)?;
        Ok(())
    }
}
