//! A file system in memory, as small as one can be: the ceiling of what a mount can reach.
//!
//! It answers the same requests over the same transports as the engine's server, and does next to
//! no work. So a benchmark can say how much of a mount's time is FUSE. The tests of the transports
//! use it, too; that is why it is here and not among the benchmarks. File contents are kept or, for
//! benchmarks larger than memory, thrown away. Reads then give zeros.
//!
//! Each inode has its own lock. A rename takes the file system's rename lock first, so two
//! directories can be locked in either order without deadlock.

use larder_format::ids::Generation;
use larder_fuse::errno::Errno;
use larder_fuse::handler::{ExecContext, Failure, Handler, Outcome, Reply, Request};
use larder_fuse::proto::{self, NodeId, Opcode, ROOT_NODE, fattr};
use larder_fuse::records::{Record, Records, attributes, entry, no_entry, settled, sized};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

const SHARDS: usize = 64;
/// Numbers of inodes are never used again.
const GENERATION: Generation = Generation(1);

#[derive(Default)]
struct Directory {
    by_name: HashMap<Vec<u8>, (u64, u64)>,
    by_position: BTreeMap<u64, (Vec<u8>, u64)>,
    last_position: u64,
}

impl Directory {
    fn insert(&mut self, name: &[u8], node: u64) {
        self.remove(name);
        self.last_position = self.last_position.max(2) + 1;
        self.by_name.insert(name.to_vec(), (self.last_position, node));
        self.by_position.insert(self.last_position, (name.to_vec(), node));
    }
    fn remove(&mut self, name: &[u8]) -> Option<u64> {
        let (position, node) = self.by_name.remove(name)?;
        self.by_position.remove(&position);
        Some(node)
    }
}

enum Body {
    File(Vec<u8>),
    Directory(Directory, u64),
    Symlink(Vec<u8>),
    Special,
}

struct Inode {
    attr: proto::Attr,
    body: Body,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    lookups: u64,
}

impl Inode {
    fn directory(&mut self) -> Result<&mut Directory, Errno> {
        match &mut self.body {
            Body::Directory(d, _) => Ok(d),
            _ => Err(Errno::NOTDIR),
        }
    }
    fn touch(&mut self) {
        let (sec, nsec) = now();
        (self.attr.mtime, self.attr.mtimensec) = (sec, nsec);
        (self.attr.ctime, self.attr.ctimensec) = (sec, nsec);
    }
    fn resize(&mut self, size: u64, keep: bool) {
        self.attr.size = size;
        self.attr.blocks = size.div_ceil(4096) * 8;
        if let (Body::File(data), true) = (&mut self.body, keep) {
            data.resize(usize::try_from(size).unwrap_or(usize::MAX), 0);
        }
    }
}

type Node = Arc<Mutex<Inode>>;

/// The file system.
pub struct MemServer {
    inodes: Vec<RwLock<HashMap<u64, Node>>>,
    next: AtomicU64,
    renames: Mutex<()>,
    keep: bool,
}

impl std::fmt::Debug for MemServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemServer").field("keep", &self.keep).finish_non_exhaustive()
    }
}

fn now() -> (u64, u32) {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or((0, 0), |d| (d.as_secs(), d.subsec_nanos()))
}

struct NewNode<'a> {
    mode: u32,
    rdev: u32,
    target: &'a [u8],
}

impl MemServer {
    /// An empty file system. `keep`: remember what is written into files.
    #[must_use]
    pub fn new(keep: bool) -> Self {
        let fs = Self {
            inodes: (0..SHARDS).map(|_| RwLock::default()).collect(),
            next: AtomicU64::new(ROOT_NODE.0),
            renames: Mutex::new(()),
            keep,
        };
        let owner = proto::InHeader {
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            ..proto::InHeader::default()
        };
        fs.make(&owner, NewNode { mode: libc::S_IFDIR | 0o755, rdev: 0, target: b"" }, ROOT_NODE.0);
        fs
    }

    fn shard(&self, node: u64) -> &RwLock<HashMap<u64, Node>> {
        &self.inodes[node as usize % SHARDS]
    }
    fn get(&self, node: u64) -> Result<Node, Errno> {
        self.shard(node).read().get(&node).cloned().ok_or(Errno::STALE)
    }
    fn drop_if_unused(&self, node: u64) {
        let mut shard = self.shard(node).write();
        if shard.get(&node).is_some_and(|n| {
            let n = n.lock();
            n.attr.nlink == 0 && n.lookups == 0
        }) {
            shard.remove(&node);
        }
    }

    fn make(&self, owner: &proto::InHeader, new: NewNode<'_>, parent: u64) -> (u64, Node) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sec, nsec) = now();
        let kind = new.mode & libc::S_IFMT;
        let attr = proto::Attr {
            ino: id,
            size: new.target.len() as u64,
            atime: sec,
            mtime: sec,
            ctime: sec,
            atimensec: nsec,
            mtimensec: nsec,
            ctimensec: nsec,
            mode: new.mode,
            nlink: 1 + u32::from(kind == libc::S_IFDIR),
            uid: owner.uid,
            gid: owner.gid,
            rdev: new.rdev,
            blksize: 4096,
            ..proto::Attr::default()
        };
        let body = match kind {
            libc::S_IFREG => Body::File(Vec::new()),
            libc::S_IFDIR => Body::Directory(Directory::default(), parent),
            libc::S_IFLNK => Body::Symlink(new.target.to_vec()),
            _ => Body::Special,
        };
        let node = Arc::new(Mutex::new(Inode { attr, body, xattrs: BTreeMap::new(), lookups: 0 }));
        self.shard(id).write().insert(id, Arc::clone(&node));
        (id, node)
    }

    fn reply_entry(reply: &mut Reply<'_>, id: u64, node: &Node) -> Outcome {
        let mut inode = node.lock();
        inode.lookups += 1;
        reply.value(&entry(NodeId(id), GENERATION, inode.attr))
    }

    fn lookup(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let name = request.name()?;
        let dir = self.get(request.header.nodeid)?;
        let found = {
            let mut dir = dir.lock();
            match (name, &mut dir.body) {
                (b".", _) => Some(request.header.nodeid),
                (b"..", Body::Directory(_, parent)) => Some(*parent),
                (_, Body::Directory(d, _)) => d.by_name.get(name).map(|(_, node)| *node),
                _ => return Err(Errno::NOTDIR.into()),
            }
        };
        match found {
            Some(id) => Self::reply_entry(reply, id, &self.get(id)?),
            None => reply.value(&no_entry()),
        }
    }

    fn create(
        &self,
        request: &Request<'_>,
        name: &[u8],
        new: NewNode<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let parent = request.header.nodeid;
        let dir = self.get(parent)?;
        let mut dir = dir.lock();
        if dir.directory()?.by_name.contains_key(name) {
            return Err(Errno::EXIST.into());
        }
        let is_dir = new.mode & libc::S_IFMT == libc::S_IFDIR;
        let (id, node) = self.make(&request.header, new, parent);
        dir.directory()?.insert(name, id);
        dir.attr.nlink += u32::from(is_dir);
        dir.touch();
        drop(dir);
        Self::reply_entry(reply, id, &node)
    }

    fn unlink(&self, request: &Request<'_>, wants_dir: bool) -> Outcome {
        let name = request.name()?;
        let dir = self.get(request.header.nodeid)?;
        let mut dir = dir.lock();
        let (_, id) = *dir.directory()?.by_name.get(name).ok_or(Errno::NOENT)?;
        let node = self.get(id)?;
        {
            let mut node = node.lock();
            match (&node.body, wants_dir) {
                (Body::Directory(d, _), true) if d.by_name.is_empty() => node.attr.nlink = 0,
                (Body::Directory(..), true) => return Err(Errno(libc::ENOTEMPTY).into()),
                (Body::Directory(..), false) => return Err(Errno(libc::EISDIR).into()),
                (_, true) => return Err(Errno::NOTDIR.into()),
                (_, false) => {
                    node.attr.nlink -= 1;
                    (node.attr.ctime, node.attr.ctimensec) = now();
                }
            }
        }
        dir.directory()?.remove(name);
        dir.attr.nlink -= u32::from(wants_dir);
        dir.touch();
        drop(dir);
        self.drop_if_unused(id);
        Ok(0)
    }

    fn rename(&self, request: &Request<'_>, to: u64, flags: u32) -> Outcome {
        if flags & !libc::RENAME_NOREPLACE != 0 {
            return Err(Errno::INVAL.into());
        }
        let (name, to_name) = request.two_names()?;
        let from = request.header.nodeid;
        let _one_at_a_time = self.renames.lock();
        let (from_dir, to_dir) = (self.get(from)?, self.get(to)?);
        let (_, id) = *from_dir.lock().directory()?.by_name.get(name).ok_or(Errno::NOENT)?;
        let replaced = to_dir.lock().directory()?.by_name.get(to_name).map(|(_, id)| *id);
        let node = self.get(id)?;
        let is_dir = matches!(node.lock().body, Body::Directory(..));
        if let Some(old) = replaced {
            if flags != 0 {
                return Err(Errno::EXIST.into());
            }
            if old == id {
                return Ok(0);
            }
            let old = self.get(old)?;
            let mut old = old.lock();
            match &old.body {
                Body::Directory(d, _) if is_dir && d.by_name.is_empty() => old.attr.nlink = 0,
                Body::Directory(..) if is_dir => return Err(Errno(libc::ENOTEMPTY).into()),
                Body::Directory(..) => return Err(Errno(libc::EISDIR).into()),
                _ if is_dir => return Err(Errno::NOTDIR.into()),
                _ => old.attr.nlink -= 1,
            }
        }
        {
            let mut dir = from_dir.lock();
            dir.directory()?.remove(name);
            dir.attr.nlink -= u32::from(is_dir);
            dir.touch();
        }
        {
            let mut dir = to_dir.lock();
            dir.directory()?.insert(to_name, id);
            dir.attr.nlink += u32::from(is_dir && replaced.is_none());
            dir.touch();
        }
        let mut node = node.lock();
        if let Body::Directory(_, parent) = &mut node.body {
            *parent = to;
        }
        drop(node);
        if let Some(old) = replaced {
            self.drop_if_unused(old);
        }
        Ok(0)
    }

    fn setattr(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let change: proto::SetattrIn = request.arg()?;
        let node = self.get(request.header.nodeid)?;
        let mut inode = node.lock();
        let has = |bit| change.valid & bit != 0;
        if has(fattr::SIZE) {
            inode.resize(change.size, self.keep);
            inode.touch();
        }
        let (sec, nsec) = now();
        let a = &mut inode.attr;
        if has(fattr::MODE) {
            a.mode = (a.mode & libc::S_IFMT) | (change.mode & 0o7777);
        }
        if has(fattr::UID) {
            a.uid = change.uid;
        }
        if has(fattr::GID) {
            a.gid = change.gid;
        }
        if has(fattr::ATIME) {
            (a.atime, a.atimensec) =
                if has(fattr::ATIME_NOW) { (sec, nsec) } else { (change.atime, change.atimensec) };
        }
        if has(fattr::MTIME) {
            (a.mtime, a.mtimensec) =
                if has(fattr::MTIME_NOW) { (sec, nsec) } else { (change.mtime, change.mtimensec) };
        }
        (a.ctime, a.ctimensec) =
            if has(fattr::CTIME) { (change.ctime, change.ctimensec) } else { (sec, nsec) };
        reply.value(&attributes(inode.attr))
    }

    fn read(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let read: proto::ReadIn = request.arg()?;
        let node = self.get(request.header.nodeid)?;
        let inode = node.lock();
        let len = inode.attr.size.saturating_sub(read.offset).min(u64::from(read.size)) as usize;
        let out = reply.buffer(len)?;
        match &inode.body {
            Body::File(data) if self.keep => {
                let start = usize::try_from(read.offset).map_err(|_| Errno::INVAL)?;
                out.copy_from_slice(data.get(start..start + len).unwrap_or_default());
            }
            Body::File(_) => out.fill(0),
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(len)
    }

    fn write(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let write: proto::WriteIn = request.arg()?;
        let data = request.data.get(..write.size as usize).ok_or(Errno::INVAL)?;
        let node = self.get(request.header.nodeid)?;
        let mut inode = node.lock();
        let end = write.offset.checked_add(u64::from(write.size)).ok_or(Errno(libc::EFBIG))?;
        if end > inode.attr.size {
            inode.resize(end, self.keep);
        }
        if let (Body::File(content), true) = (&mut inode.body, self.keep) {
            content[write.offset as usize..end as usize].copy_from_slice(data);
        }
        if write.write_flags & proto::WRITE_CACHE == 0 {
            inode.touch();
        }
        reply.value(&proto::WriteOut { size: write.size, padding: 0 })
    }

    fn readdir(&self, request: &Request<'_>, reply: &mut Reply<'_>, plus: bool) -> Outcome {
        let read: proto::ReadIn = request.arg()?;
        let node = self.get(request.header.nodeid)?;
        let mut dir = node.lock();
        let Body::Directory(_, parent) = dir.body else { return Err(Errno::NOTDIR.into()) };
        let mut records = Records::new(reply, read.size)?;
        // In a plus record an entry without a node id is a plain record.
        let blank = proto::EntryOut::default();
        for (next, name, ino) in [(1, &b"."[..], request.header.nodeid), (2, b"..", parent)] {
            let record = Record { ino, next, kind: libc::S_IFDIR >> 12, name };
            if read.offset < next && !records.push(plus.then_some(&blank), record) {
                return Ok(records.len());
            }
        }
        for (position, (name, id)) in dir.directory()?.by_position.range(read.offset.max(2) + 1..) {
            if !records.fits(name.len(), plus) {
                break;
            }
            let child = self.get(*id)?;
            let mut child = child.lock();
            child.lookups += u64::from(plus);
            let e = entry(NodeId(*id), GENERATION, child.attr);
            let kind = child.attr.mode >> 12;
            let record = Record { ino: *id, next: *position, kind, name };
            records.push(plus.then_some(&e), record);
        }
        Ok(records.len())
    }
}

impl MemServer {
    fn link(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let id = request.arg::<proto::LinkIn>()?.oldnodeid;
        let (inode, dir) = (self.get(id)?, self.get(request.header.nodeid)?);
        let name = request.name()?;
        let mut dir = dir.lock();
        if dir.directory()?.by_name.contains_key(name) {
            return Err(Errno::EXIST.into());
        }
        dir.directory()?.insert(name, id);
        dir.touch();
        inode.lock().attr.nlink += 1;
        Self::reply_entry(reply, id, &inode)
    }

    fn setxattr(&self, request: &Request<'_>) -> Outcome {
        let set: proto::SetxattrIn = request.arg()?;
        let (name, value) = request.name_and_rest()?;
        let value = value.get(..set.size as usize).ok_or(Errno::INVAL)?;
        let inode = self.get(request.header.nodeid)?;
        let mut inode = inode.lock();
        match (set.flags as i32, inode.xattrs.contains_key(name)) {
            (libc::XATTR_CREATE, true) => return Err(Errno::EXIST.into()),
            (libc::XATTR_REPLACE, false) => return Err(Errno::NODATA.into()),
            _ => inode.xattrs.insert(name.to_vec(), value.to_vec()),
        };
        Ok(0)
    }

    fn listxattr(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let get: proto::GetxattrIn = request.arg()?;
        let inode = self.get(request.header.nodeid)?;
        let list: Vec<u8> =
            inode.lock().xattrs.keys().flat_map(|k| k.iter().copied().chain([0])).collect();
        sized(reply, get.size, &list)
    }
}

/// As much room as any test needs.
fn statfs(reply: &mut Reply<'_>) -> Outcome {
    reply.value(&proto::StatfsOut {
        blocks: 1 << 30,
        bfree: 1 << 30,
        bavail: 1 << 30,
        files: 1 << 30,
        ffree: 1 << 30,
        bsize: 4096,
        namelen: 255,
        frsize: 4096,
        ..proto::StatfsOut::default()
    })
}

impl Handler for MemServer {
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, _: ExecContext) -> Outcome {
        if let Some(answer) = settled(request.opcode) {
            return answer;
        }
        let node = request.header.nodeid;
        match request.opcode {
            Opcode::Lookup => self.lookup(request, reply),
            Opcode::Getattr => reply.value(&attributes(self.get(node)?.lock().attr)),
            Opcode::Setattr => self.setattr(request, reply),
            Opcode::Readlink => match &self.get(node)?.lock().body {
                Body::Symlink(target) => reply.bytes(target),
                _ => Err(Errno::INVAL.into()),
            },
            Opcode::Symlink => {
                let (name, target) = request.two_names()?;
                let new = NewNode { mode: libc::S_IFLNK | 0o777, rdev: 0, target };
                self.create(request, name, new, reply)
            }
            Opcode::Mknod => {
                let new: proto::MknodIn = request.arg()?;
                let mode = new.mode & !(new.umask & 0o777);
                let new = NewNode { mode, rdev: new.rdev, target: b"" };
                self.create(request, request.name()?, new, reply)
            }
            Opcode::Mkdir => {
                let new: proto::MkdirIn = request.arg()?;
                let mode = libc::S_IFDIR | (new.mode & !(new.umask & 0o777) & 0o7777);
                self.create(request, request.name()?, NewNode { mode, rdev: 0, target: b"" }, reply)
            }
            Opcode::Unlink => self.unlink(request, false),
            Opcode::Rmdir => self.unlink(request, true),
            Opcode::Rename => self.rename(request, request.arg::<proto::RenameIn>()?.newdir, 0),
            Opcode::Rename2 => {
                let to: proto::Rename2In = request.arg()?;
                self.rename(request, to.newdir, to.flags)
            }
            Opcode::Link => self.link(request, reply),
            Opcode::Read => self.read(request, reply),
            Opcode::Write => self.write(request, reply),
            Opcode::Statfs => statfs(reply),
            Opcode::Fsync
            | Opcode::Fsyncdir
            | Opcode::Syncfs
            | Opcode::Destroy
            | Opcode::Access => Ok(0),
            Opcode::Readdir => self.readdir(request, reply, false),
            Opcode::Readdirplus => self.readdir(request, reply, true),
            Opcode::Setxattr => self.setxattr(request),
            Opcode::Getxattr => {
                let get: proto::GetxattrIn = request.arg()?;
                let inode = self.get(node)?;
                let inode = inode.lock();
                sized(reply, get.size, inode.xattrs.get(request.name()?).ok_or(Errno::NODATA)?)
            }
            Opcode::Listxattr => self.listxattr(request, reply),
            Opcode::Removexattr => {
                let inode = self.get(node)?;
                inode.lock().xattrs.remove(request.name()?).map(|_| 0).ok_or(Errno::NODATA.into())
            }
            _ => Err(Failure::Errno(Errno::NOSYS)),
        }
    }

    fn nodes_in_use(&self, most: usize) -> Vec<NodeId> {
        let mut found = Vec::new();
        for shard in &self.inodes {
            let shard = shard.read();
            let used = shard
                .iter()
                .filter(|(_, inode)| inode.lock().lookups > 0)
                .map(|(node, _)| NodeId(*node));
            found.extend(used.take(most - found.len()));
        }
        found
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        if node == ROOT_NODE {
            return;
        }
        if let Ok(inode) = self.get(node.0) {
            let mut inode = inode.lock();
            inode.lookups = inode.lookups.saturating_sub(lookups);
            if inode.lookups > 0 || inode.attr.nlink > 0 {
                return;
            }
        }
        self.drop_if_unused(node.0);
    }
}
