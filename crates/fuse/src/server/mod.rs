//! The server: requests of the kernel, answered by the engine.
//!
//! There is one file per group of operations. Every answer is made of as few engine calls as
//! possible. On a queue's thread at most one of them changes something: there the engine refuses to
//! wait *before* it changes anything, and the whole request starts again on a worker. Requests that
//! change several things, or always wait, go to a worker directly ([`Server::service`]).
//!
//! A server answers one mount; all mounts of the same file system are its
//! [group](crate::mount_group).
//!
//! Files have no handles here. What keeps an unlinked file alive is the kernel's look-up count,
//! which is passed on to the engine as holds.

mod attr;
mod cached;
mod changes;
mod data;
mod dirs;
mod ioctl;
mod names;
mod read_only;
mod report;
mod sharing;
mod subvolume;
mod xattr;

use cached::CachedFiles;

use crate::acl;
use crate::deferred::DeferredReply;
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Handler, Outcome, Reply, Request, Service};
use crate::helper::{MountHelper, Mounted};
use crate::mount::MountOptions;
use crate::mount_group::{self, Member};
use crate::perm::{self, Caller};
use crate::proto::{self, NodeId, Opcode};
use crate::records::{self, settled};
use crate::stats::Stats;
use crate::transport::{Ready, ServeError};
use larder_format::acl::{ACCESS, Acl};
use larder_fs::{Attr, Completion, Error, FileKind, Filesystem, InodeId};
use std::path::Path;
use std::sync::Arc;

/// Longest name of a directory entry.
const NAME_MAX: usize = 255;

/// All mounts of one file system that this server answers.
pub type MountGroup = mount_group::MountGroup<Server>;

/// How a session ended.
#[derive(Debug)]
pub struct Served {
    /// The file system was closed because the kernel waited for it (`fuseblk`), with this result.
    /// `None`: closing it is left to the caller.
    pub closed: Option<larder_fs::Result<()>>,
}

/// Serves a mount of `fs` until it is unmounted.
///
/// `on_ready` is called once requests are being answered. After the return only the caller uses
/// `fs`, and closes it, unless that was done already.
///
/// # Errors
/// If the session cannot be set up; `fs` is then untouched.
pub fn serve(
    fs: Arc<Filesystem>,
    mounted: Mounted,
    stats: Arc<Stats>,
    on_ready: impl FnOnce(Ready),
) -> Result<Served, ServeError> {
    let group = Arc::<MountGroup>::default();
    let joined = group.join(fs, mounted.mountpoint(), &mounted.options);
    let member = joined.expect("nobody has closed it, and nobody else is there");
    serve_member(&group, &member, mounted, stats, on_ready)?;
    Ok(Served { closed: group.take_closed() })
}

/// Serves a mount of a file system that may have others, until it is unmounted. Then the caller has
/// to make it [leave](MountGroup::leave).
///
/// # Errors
/// As [`serve`].
pub fn serve_member(
    group: &Arc<MountGroup>,
    member: &Arc<Member>,
    mounted: Mounted,
    stats: Arc<Stats>,
    on_ready: impl FnOnce(Ready),
) -> Result<(), ServeError> {
    let server =
        Server::joined(Arc::clone(group), Arc::clone(member), &mounted, Arc::clone(&stats));
    let served = group.transport.serve(Arc::new(server), mounted, stats, on_ready);
    member.notify.finish();
    served
}

/// The engine behind a mount.
#[derive(Debug)]
pub struct Server {
    fs: Arc<Filesystem>,
    me: Arc<Member>,
    group: Arc<MountGroup>,
    /// Permissions are checked here, not by the kernel.
    checks: bool,
    stats: Arc<Stats>,
    /// Files that the kernel may keep contents of.
    cached: CachedFiles,
    /// Looks up descriptors of clients.
    helper: Option<MountHelper>,
}

impl Handler for Server {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        if let Some(answer) = settled(request.opcode) {
            return answer;
        }
        match context {
            ExecContext::Queue => larder_fs::no_wait(|| self.answer(request, reply, context)),
            _ => self.answer(request, reply, context),
        }
    }

    /// Some requests always wait, or change several things and so must not start over half-way.
    fn service(&self, opcode: Opcode) -> Service {
        match opcode {
            Opcode::Fsync | Opcode::Fsyncdir => Service::Deferred,
            Opcode::Syncfs
            | Opcode::Destroy
            | Opcode::Ioctl
            | Opcode::CopyFileRange
            | Opcode::CopyFileRange64 => Service::Worker,
            _ => Service::Queue,
        }
    }

    fn handle_deferred(&self, request: &Request<'_>, deferred: DeferredReply) {
        let id = self.me.nodes.id(request.header.node()).ok_or(Errno::STALE);
        match request.arg::<proto::FsyncIn>().and_then(|how| Ok((how, id?))) {
            Ok((how, id)) => self.fsync(id, how, request.opcode, deferred),
            Err(e) => deferred.answer(Err(e)),
        }
    }

    /// A sync gives back the space of files that were deleted before it and are not in use.
    fn comes_after_forgets(&self, request: &Request<'_>) -> bool {
        match request.opcode {
            Opcode::Syncfs => true,
            Opcode::Ioctl => {
                request.arg::<proto::IoctlIn>().is_ok_and(|asked| ioctl::syncs(asked.cmd))
            }
            _ => false,
        }
    }

    /// A sync or a snapshot has everything that a program changed through a mapping before it, and
    /// what the kernel delayed.
    fn comes_after_writes(&self, request: &Request<'_>) -> bool {
        let asked = || request.arg::<proto::IoctlIn>();
        request.opcode == Opcode::Ioctl
            && asked().is_ok_and(|asked| ioctl::syncs(asked.cmd) || subvolume::keeps(asked.cmd))
    }

    fn nodes_in_use(&self, most: usize) -> Vec<NodeId> {
        self.fs.held(most).into_iter().map(|id| self.me.nodes.node(id)).collect()
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        if let Some(id) = self.me.nodes.id(node) {
            self.fs.release(id, lookups);
        }
    }
}

impl Server {
    /// Answers with `fs`. `checks`: this server checks permissions, not the kernel.
    #[must_use]
    pub fn new(fs: Arc<Filesystem>, checks: bool, stats: Arc<Stats>) -> Self {
        let group = Arc::<MountGroup>::default();
        let joined = group.join(fs, Path::new("/"), &MountOptions::default());
        let me = joined.expect("nobody has closed it, and nobody else is there");
        Self::one_of(group, me, checks, stats)
    }

    fn one_of(group: Arc<MountGroup>, me: Arc<Member>, checks: bool, stats: Arc<Stats>) -> Self {
        let (fs, cached) = (Arc::clone(&me.fs), CachedFiles::default());
        Self { fs, me, group, checks, stats, cached, helper: None }
    }

    /// Answers with `fs` for this mount, whose kernel it notifies of changes.
    #[must_use]
    pub fn of(fs: Arc<Filesystem>, mounted: &Mounted, stats: Arc<Stats>) -> Self {
        let alone = Self::new(fs, !mounted.kernel_permissions, stats);
        alone.connected(mounted)
    }

    /// Answers for one of several mounts.
    fn joined(
        group: Arc<MountGroup>,
        me: Arc<Member>,
        mounted: &Mounted,
        stats: Arc<Stats>,
    ) -> Self {
        Self::one_of(group, me, !mounted.kernel_permissions, stats).connected(mounted)
    }

    fn connected(self, mounted: &Mounted) -> Self {
        if let Ok(fd) = mounted.fuse_fd().try_clone_to_owned() {
            self.me.notify.connect(fd);
        }
        Self { helper: Some(mounted.helper.clone()), ..self }
    }

    fn answer(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        self.may_change_anything(request.opcode)?;
        let id = self.me.nodes.id(request.header.node());
        let here = || id.ok_or(Failure::Errno(Errno::STALE));
        match request.opcode {
            Opcode::Lookup => self.lookup(here()?, request, reply),
            Opcode::Getattr => self.getattr(here()?, reply),
            Opcode::Setattr => self.setattr(here()?, request, reply, context),
            Opcode::Statx => self.statx(here()?, reply),
            Opcode::Access => self.access(here()?, request),
            Opcode::Readlink => reply.bytes(&self.fs.readlink(here()?)?),
            Opcode::Symlink => self.symlink(here()?, request, reply, context),
            Opcode::Mknod => self.mknod(here()?, request, reply, context),
            Opcode::Mkdir => self.mkdir(here()?, request, reply, context),
            Opcode::Tmpfile => self.tmpfile(here()?, request, reply),
            Opcode::Link => self.link(here()?, request, reply, context),
            Opcode::Unlink => self.unlink(here()?, request, false, context),
            Opcode::Rmdir => self.unlink(here()?, request, true, context),
            Opcode::Rename => {
                let to = NodeId(request.arg::<proto::RenameIn>()?.newdir);
                self.rename(here()?, request, to, 0, context)
            }
            Opcode::Rename2 => {
                let to: proto::Rename2In = request.arg()?;
                self.rename(here()?, request, NodeId(to.newdir), to.flags, context)
            }
            Opcode::Read => self.read(here()?, request, reply),
            Opcode::Write => self.write(here()?, request, reply, context),
            Opcode::Lseek => self.lseek(here()?, request, reply),
            Opcode::CopyFileRange | Opcode::CopyFileRange64 => {
                self.copy(here()?, request, reply, context)
            }
            Opcode::Fallocate => self.fallocate(here()?, request, context),
            Opcode::Syncfs => {
                self.fs.sync()?;
                Ok(0)
            }
            Opcode::Destroy => self.destroy(),
            Opcode::Statfs => self.statfs(reply),
            Opcode::Readdir => self.readdir(here()?, request, reply),
            Opcode::Readdirplus => self.readdirplus(here()?, request, reply),
            Opcode::Setxattr => self.setxattr(here()?, request, context),
            Opcode::Getxattr => self.getxattr(here()?, request, reply),
            Opcode::Listxattr => self.listxattr(here()?, request, reply),
            Opcode::Removexattr => self.removexattr(here()?, request, context),
            Opcode::Ioctl => self.ioctl(here()?, request, reply, context),
            _ => Err(Errno::NOSYS.into()),
        }
    }

    /// Makes an inode durable. The engine answers when it is.
    fn fsync(&self, id: InodeId, how: proto::FsyncIn, opcode: Opcode, deferred: DeferredReply) {
        let (fs, data_only) = (Arc::clone(&self.fs), how.fsync_flags & proto::FSYNC_DATASYNC != 0);
        let begin = move |deferred: DeferredReply| {
            let done = Completion::new(move |synced| deferred.answer(synced.map_err(number)));
            fs.fsync_then(id, data_only, done);
        };
        // The kernel keeps a directory locked meanwhile, so that one waits for no announcements.
        // And names are announced before their change is answered.
        if opcode == Opcode::Fsync && self.is_shared(id) {
            return self.after_announcements(move || deferred.on_worker(begin));
        }
        begin(deferred);
    }

    /// The kernel waits for this reply before umount returns: everything becomes durable now.
    fn destroy(&self) -> Outcome {
        if !self.group.is_last() {
            if let Err(error) = self.fs.sync() {
                tracing::error!(%error, "syncing the file system failed");
            }
            return Ok(0);
        }
        let mut closed = self.group.closed.lock();
        if closed.is_none() {
            let result = self.fs.close();
            if let Err(error) = &result {
                tracing::error!(%error, "closing the file system failed");
            }
            *closed = Some(result);
        }
        Ok(0)
    }

    fn statfs(&self, reply: &mut Reply<'_>) -> Outcome {
        let s = self.fs.statfs()?;
        let unit = u64::from(s.block_size.max(1));
        reply.value(&proto::StatfsOut {
            blocks: s.total / unit,
            bfree: s.free / unit,
            bavail: s.available / unit,
            // Inodes are made as needed, so there is no number. Linux's btrfs says the same.
            files: 0,
            ffree: 0,
            bsize: s.block_size,
            namelen: NAME_MAX as u32,
            frsize: s.block_size,
            ..proto::StatfsOut::default()
        })
    }

    /// Answers with an entry of a directory. The kernel holds the inode from then on.
    fn entry(&self, dir: InodeId, attr: Attr, reply: &mut Reply<'_>) -> Outcome {
        let attr = self.hold(attr)?;
        reply.value(&self.entry_of(dir, &attr))
    }

    fn entry_of(&self, dir: InodeId, attr: &Attr) -> proto::EntryOut {
        proto::EntryOut {
            entry_valid: self.time_of(dir),
            attr_valid: self.time_of(attr.id),
            ..records::entry(self.me.nodes.node(attr.id), attr.generation, self.wire(attr))
        }
    }

    /// Answers with attributes.
    fn attributes(&self, attr: &Attr, reply: &mut Reply<'_>) -> Outcome {
        let attr_valid = self.time_of(attr.id);
        reply.value(&proto::AttrOut { attr_valid, ..records::attributes(self.wire(attr)) })
    }

    /// Attributes in the protocol's form.
    fn wire(&self, a: &Attr) -> proto::Attr {
        proto::Attr {
            ino: self.me.nodes.ino(a.id),
            size: a.size,
            blocks: a.bytes.div_ceil(512),
            atime: a.atime.sec.cast_unsigned(),
            mtime: a.mtime.sec.cast_unsigned(),
            ctime: a.ctime.sec.cast_unsigned(),
            atimensec: a.atime.nsec,
            mtimensec: a.mtime.nsec,
            ctimensec: a.ctime.nsec,
            mode: mode(a),
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            rdev: proto::encode_rdev(a.rdev),
            blksize: 4096,
            flags: 0,
        }
    }

    /// The caller, if this server has to check permissions for it.
    fn checked(&self, request: &Request<'_>) -> Option<Caller> {
        let caller = Caller::from(&request.header);
        (self.checks && !caller.is_root()).then_some(caller)
    }

    /// Checks permissions if this server has to.
    fn check(&self, request: &Request<'_>, id: InodeId, want: u8) -> Result<(), Failure> {
        let Some(caller) = self.checked(request) else { return Ok(()) };
        let attr = self.fs.getattr(id)?;
        let acl = self.access_acl(id)?;
        if perm::allows(caller, &attr, acl.as_ref(), want) {
            Ok(())
        } else {
            Err(Errno::ACCES.into())
        }
    }

    /// The inode's access list, if it has one.
    fn access_acl(&self, id: InodeId) -> Result<Option<Acl>, Failure> {
        Ok(match self.xattr_if_any(id, ACCESS)? {
            Some(bytes) => Some(acl::parse(&bytes)?),
            None => None,
        })
    }

    fn xattr_if_any(&self, id: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>, Failure> {
        match self.fs.getxattr(id, name) {
            Ok(value) => Ok(Some(value)),
            Err(Error::NoAttribute) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// The errno for an error on a thread that may wait.
fn number(error: Error) -> Errno {
    match Failure::from(error) {
        Failure::Errno(e) => e,
        Failure::Wait | Failure::WaitForKernel => Errno::IO,
    }
}

/// Type and permission bits as one.
fn mode(a: &Attr) -> u32 {
    kind_bits(a.kind) | (a.perm & 0o7777)
}

fn kind_bits(kind: FileKind) -> u32 {
    match kind {
        FileKind::Regular => libc::S_IFREG,
        FileKind::Directory => libc::S_IFDIR,
        FileKind::Symlink => libc::S_IFLNK,
        FileKind::CharDevice => libc::S_IFCHR,
        FileKind::BlockDevice => libc::S_IFBLK,
        FileKind::Fifo => libc::S_IFIFO,
        FileKind::Socket => libc::S_IFSOCK,
    }
}

fn kind_of(mode: u32) -> Result<FileKind, Errno> {
    Ok(match mode & libc::S_IFMT {
        0 | libc::S_IFREG => FileKind::Regular,
        libc::S_IFCHR => FileKind::CharDevice,
        libc::S_IFBLK => FileKind::BlockDevice,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        _ => return Err(Errno::INVAL),
    })
}

/// A name that may stand in a directory.
fn valid(name: &[u8]) -> Result<&[u8], Errno> {
    match name.len() {
        0 => Err(Errno::NOENT),
        n if n > NAME_MAX => Err(Errno(libc::ENAMETOOLONG)),
        _ => Ok(name),
    }
}
