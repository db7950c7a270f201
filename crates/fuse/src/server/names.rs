//! The name space: LOOKUP, everything that makes or removes a name, and RENAME.

use super::changes::{Announcement, Change};
use super::{Server, kind_of, valid};
use crate::acl::{self, inherit};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Outcome, Reply, Request};
use crate::perm;
use crate::proto::{self, EntryOut, NodeId, OpenOut};
use crate::records::no_entry;
use larder_format::acl::DEFAULT;
use larder_fs::{Attr, Error, FileKind, InodeId, NewInode, RenameMode};
use zerocopy::IntoBytes;

/// `RENAME_*` of renameat2.
const NOREPLACE: u32 = 1;
const EXCHANGE: u32 = 2;
const WHITEOUT: u32 = 4;

/// What a request wants to make.
pub(super) struct Wanted<'a> {
    kind: FileKind,
    perm: u32,
    umask: u32,
    rdev: u64,
    target: &'a [u8],
}

impl Wanted<'_> {
    fn of(kind: FileKind, perm: u32, umask: u32) -> Self {
        Self { kind, perm, umask, rdev: 0, target: b"" }
    }
    pub(super) fn directory(perm: u32, umask: u32) -> Self {
        Self::of(FileKind::Directory, perm, umask)
    }
}

impl Server {
    pub(super) fn lookup(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let name = valid(request.name()?)?;
        // "." looks an inode up by its number (file handles); it need not be a directory.
        let found = match name {
            b"." => self.fs.getattr(dir),
            b".." if dir == self.fs.root() => self.fs.getattr(dir),
            _ => {
                self.check(request, dir, perm::EXECUTE)?;
                self.fs.lookup(dir, name)
            }
        };
        match found {
            Ok(attr) => self.entry(dir, attr, reply),
            Err(Error::NotFound) => {
                reply.value(&EntryOut { entry_valid: self.time_of(dir), ..no_entry() })
            }
            Err(e) => Err(e.into()),
        }
    }

    pub(super) fn symlink(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let (name, target) = request.two_names()?;
        let wanted = Wanted { target, ..Wanted::of(FileKind::Symlink, 0o777, 0) };
        self.create(dir, request, name, &wanted, reply, context)
    }

    pub(super) fn mknod(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let asked: proto::MknodIn = request.arg()?;
        let kind = kind_of(asked.mode)?;
        let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        let rdev = if device { proto::decode_rdev(asked.rdev) } else { 0 };
        let wanted = Wanted { rdev, ..Wanted::of(kind, asked.mode, asked.umask) };
        self.create(dir, request, request.name()?, &wanted, reply, context)
    }

    pub(super) fn mkdir(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let asked: proto::MkdirIn = request.arg()?;
        let wanted = Wanted::directory(asked.mode & 0o1777, asked.umask);
        self.create(dir, request, request.name()?, &wanted, reply, context)
    }

    fn create(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        name: &[u8],
        wanted: &Wanted<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let name = valid(name)?;
        let announcement = self.begin_name_change(context, &[dir])?;
        self.check(request, dir, perm::WRITE | perm::EXECUTE)?;
        let attr =
            self.with_new(dir, request, wanted, |new| Ok(self.fs.create(dir, name, new)?))?;
        self.made(announcement, dir, name, attr, reply)
    }

    /// Answers with an inode that has just got a name, and announces the name.
    fn made(
        &self,
        announcement: Announcement<'_>,
        dir: InodeId,
        name: &[u8],
        attr: Attr,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let id = attr.id;
        // The name exists, so the request must not start over. That is why the attributes are not
        // read again.
        self.fs.hold(id);
        let answer = reply.value(&self.entry_of(dir, &attr));
        announcement.publish(|| vec![Change::Name(dir, name.to_vec()), Change::Attributes(id)]);
        answer
    }

    pub(super) fn tmpfile(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let asked: proto::CreateIn = request.arg()?;
        self.check(request, dir, perm::WRITE | perm::EXECUTE)?;
        let wanted = Wanted::of(FileKind::Regular, asked.mode, asked.umask);
        // The new inode comes with a hold, which counts as the look-up of this reply.
        let attr =
            self.with_new(dir, request, &wanted, |new| Ok(self.fs.create_unnamed(dir, new)?))?;
        let opened = OpenOut { open_flags: proto::FOPEN_KEEP_CACHE, ..OpenOut::default() };
        reply.value_and_bytes(&self.entry_of(dir, &attr), opened.as_bytes())
    }

    /// Calls `make` with owner, group, mode and ACLs of a new inode, as its directory decides.
    pub(super) fn with_new<T>(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        wanted: &Wanted<'_>,
        make: impl FnOnce(&NewInode<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let parent = self.fs.getattr(dir)?;
        if parent.nlink == 0 {
            return Err(Errno::NOENT.into());
        }
        let is_dir = wanted.kind == FileKind::Directory;
        let mut made = if wanted.kind == FileKind::Symlink {
            acl::Inherited { perm: wanted.perm, xattrs: Vec::new() }
        } else {
            let default = self.xattr_if_any(dir, DEFAULT)?;
            inherit(default.as_deref(), wanted.perm & 0o7777, wanted.umask, is_dir)?
        };
        // In a directory with set-group-id, a new inode gets its group, and a new directory the bit
        // as well.
        let mut gid = request.header.gid;
        if parent.perm & libc::S_ISGID != 0 {
            gid = parent.gid;
            if is_dir {
                made.perm |= libc::S_ISGID;
            }
        }
        make(&NewInode {
            kind: wanted.kind,
            perm: made.perm,
            uid: request.header.uid,
            gid,
            rdev: wanted.rdev,
            target: wanted.target,
            xattrs: &made.xattrs,
        })
    }

    pub(super) fn link(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let name = valid(request.name()?)?;
        let id = self
            .me
            .nodes
            .id(NodeId(request.arg::<proto::LinkIn>()?.oldnodeid))
            .ok_or(Errno::STALE)?;
        let announcement = self.begin_name_change(context, &[dir, id])?;
        self.check(request, dir, perm::WRITE | perm::EXECUTE)?;
        let attr = self.fs.link(id, dir, name)?;
        self.made(announcement, dir, name, attr, reply)
    }

    pub(super) fn unlink(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        directory: bool,
        context: ExecContext,
    ) -> Outcome {
        let name = valid(request.name()?)?;
        let victim = self.named(dir, name)?;
        let announcement = self.begin_name_change(context, &[dir, victim.unwrap_or(dir)])?;
        self.may_remove(request, dir, name)?;
        if directory {
            self.fs.rmdir(dir, name)?;
        } else {
            self.fs.unlink(dir, name)?;
        }
        announcement.publish(|| {
            let victim = victim.map(Change::Attributes);
            [Change::Name(dir, name.to_vec())].into_iter().chain(victim).collect()
        });
        Ok(0)
    }

    fn may_remove(&self, request: &Request<'_>, dir: InodeId, name: &[u8]) -> Result<(), Failure> {
        let Some(caller) = self.checked(request) else { return Ok(()) };
        self.check(request, dir, perm::WRITE | perm::EXECUTE)?;
        let (parent, victim) = (self.fs.getattr(dir)?, self.fs.lookup(dir, name)?);
        if perm::may_remove(caller, &parent, &victim) { Ok(()) } else { Err(Errno::PERM.into()) }
    }

    pub(super) fn rename(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        to: NodeId,
        flags: u32,
        context: ExecContext,
    ) -> Outcome {
        let (name, to_name) = request.two_names()?;
        let (name, to_name) = (valid(name)?, valid(to_name)?);
        let to = self.me.nodes.id(to).ok_or(Errno::STALE)?;
        let mode = match flags {
            0 => RenameMode::Replace,
            NOREPLACE => RenameMode::NoReplace,
            EXCHANGE => RenameMode::Exchange,
            // With NOREPLACE the kernel has made sure that the new name is free.
            WHITEOUT | 5 => {
                RenameMode::Whiteout { uid: request.header.uid, gid: request.header.gid }
            }
            _ => return Err(Errno::INVAL.into()),
        };
        let moved = [self.named(dir, name)?, self.named(to, to_name)?];
        let touched = [dir, to, moved[0].unwrap_or(dir), moved[1].unwrap_or(to)];
        let announcement = self.begin_name_change(context, &touched)?;
        if self.checked(request).is_some() {
            self.may_remove(request, dir, name)?;
            match self.may_remove(request, to, to_name) {
                Err(Failure::Errno(Errno::NOENT)) => {
                    self.check(request, to, perm::WRITE | perm::EXECUTE)?
                }
                other => other?,
            }
        }
        self.fs.rename(dir, name, to, to_name, mode)?;
        announcement.publish(|| {
            let names = [Change::Name(dir, name.to_vec()), Change::Name(to, to_name.to_vec())];
            names.into_iter().chain(moved.into_iter().flatten().map(Change::Attributes)).collect()
        });
        Ok(0)
    }
}
