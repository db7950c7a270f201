//! Receiving into a directory of an image, through the engine.
//!
//! Hidden here: how a path becomes an inode. A walk looks each name up and enters nothing but
//! directories of the one subvolume, so no symbolic link and no border of a subvolume is crossed.
//! The directory that was used last is remembered, because commands come in runs that stay in one.
//! It is forgotten when a name above it changes.

use crate::destination::{
    BoxResult, Destination, Encoded, Entry, Existing, Node, Reserve, Sent, Shared, Times,
};
use crate::path::StreamPath;
use crate::record::ATTRIBUTE;
use larder_format::items::{InodeFlags, Timespec};
use larder_format::{Generation, ObjectId};
use larder_fs::{
    Attr, EncodedData, Error, Fallocate, FileKind, Filesystem, InodeId, NewInode, RenameMode,
    SetAttr, SetTime, SubvolInfo, Timestamp, XattrMode,
};
use std::ops::Range;

/// Flags of the property `btrfs.compression`.
const COMPRESSION: InodeFlags = InodeFlags::COMPRESS.union(InodeFlags::NOCOMPRESS);
/// Flags that what is made in a directory has as well.
const PASSED_ON: InodeFlags = COMPRESSION.union(InodeFlags::NODATACOW);

/// A path, and the inode that it leads to.
#[derive(Debug, Default)]
struct Known(Option<(Vec<u8>, InodeId)>);

impl Known {
    fn get(&self, path: StreamPath<'_>) -> Option<InodeId> {
        self.0.as_ref().filter(|(known, _)| known == path.bytes()).map(|(_, id)| *id)
    }
    fn set(&mut self, path: StreamPath<'_>, id: InodeId) {
        match &mut self.0 {
            Some((known, known_id)) => {
                known.clear();
                known.extend_from_slice(path.bytes());
                *known_id = id;
            }
            none => *none = Some((path.bytes().to_vec(), id)),
        }
    }
    /// What is at `path` changes.
    fn forget(&mut self, path: StreamPath<'_>) {
        if self.0.as_ref().is_some_and(|(known, _)| path.contains(known)) {
            self.0 = None;
        }
    }
}

/// A directory of an image.
#[derive(Debug)]
pub struct ImageDir<'a> {
    fs: &'a Filesystem,
    target: InodeId,
    owner: (u32, u32),
    /// The root of the subvolume that is being received.
    root: InodeId,
    dir: Known,
    entry: Known,
}

impl<'a> ImageDir<'a> {
    /// Receives into this directory. New inodes belong to this user and group first.
    #[must_use]
    pub fn new(fs: &'a Filesystem, target: InodeId, owner: (u32, u32)) -> Self {
        let (dir, entry) = (Known::default(), Known::default());
        Self { fs, target, owner, root: target, dir, entry }
    }

    /// The inode at a path below a subvolume's root.
    fn walk(&self, root: InodeId, path: StreamPath<'_>) -> BoxResult<InodeId> {
        let mut at = root;
        for name in path.names() {
            at = self.step(at, name)?;
        }
        Ok(at)
    }

    fn step(&self, dir: InodeId, name: &[u8]) -> BoxResult<InodeId> {
        let found = self.fs.lookup(dir, name)?.id;
        if found.subvol == dir.subvol { Ok(found) } else { Err(Error::CrossSubvolume.into()) }
    }

    /// The inode at a path of the subvolume that is being received.
    fn id(&mut self, path: StreamPath<'_>) -> BoxResult<InodeId> {
        if let Some(id) = self.entry.get(path) {
            return Ok(id);
        }
        let Some((dir, name)) = path.split() else { return Ok(self.root) };
        let dir = self.dir_id(dir)?;
        let id = self.step(dir, name)?;
        self.entry.set(path, id);
        Ok(id)
    }

    fn dir_id(&mut self, path: StreamPath<'_>) -> BoxResult<InodeId> {
        // The root is asked for between others: what is remembered of them stays.
        if path == StreamPath::ROOT {
            return Ok(self.root);
        }
        if let Some(id) = self.dir.get(path) {
            return Ok(id);
        }
        let id = self.walk(self.root, path)?;
        self.dir.set(path, id);
        Ok(id)
    }

    /// The directory of an entry, and its name.
    fn place<'p>(&mut self, path: StreamPath<'p>) -> BoxResult<(InodeId, &'p [u8])> {
        let (dir, name) = path.split().ok_or(Error::Invalid("the root has no name"))?;
        Ok((self.dir_id(dir)?, name))
    }

    /// Names at and below a path do not lead where they did.
    fn forget(&mut self, path: StreamPath<'_>) {
        self.dir.forget(path);
        self.entry.forget(path);
    }

    fn set(&mut self, path: StreamPath<'_>, changes: &SetAttr) -> BoxResult<()> {
        let id = self.id(path)?;
        self.fs.setattr(id, changes)?;
        Ok(())
    }

    /// Does what is made in a directory get flags from it?
    fn passes_on(&self, dir: InodeId) -> BoxResult<bool> {
        let flags = InodeFlags::from_bits_retain(self.fs.getattr(dir)?.flags);
        Ok(flags.intersects(PASSED_ON))
    }

    fn new_node<'n>(&self, node: &Node<'n>) -> NewInode<'n> {
        match *node {
            Node::File => self.new_inode(FileKind::Regular, 0o600),
            Node::Directory => self.new_inode(FileKind::Directory, 0o700),
            Node::Symlink { target } => {
                NewInode { target, ..self.new_inode(FileKind::Symlink, 0o777) }
            }
            Node::Fifo => self.new_inode(FileKind::Fifo, 0o600),
            Node::Socket => self.new_inode(FileKind::Socket, 0o600),
            Node::CharDevice { major, minor } => NewInode {
                rdev: device(major, minor),
                ..self.new_inode(FileKind::CharDevice, 0o600)
            },
            Node::BlockDevice { major, minor } => NewInode {
                rdev: device(major, minor),
                ..self.new_inode(FileKind::BlockDevice, 0o600)
            },
        }
    }

    fn new_inode<'n>(&self, kind: FileKind, perm: u32) -> NewInode<'n> {
        let (uid, gid) = self.owner;
        NewInode { kind, perm, uid, gid, rdev: 0, target: b"", xattrs: &[] }
    }

    fn describe(&self, attr: &Attr) -> BoxResult<Existing<InodeId>> {
        let info = self.fs.subvolume(attr.id.subvol)?;
        let record = match self.fs.getxattr(attr.id, ATTRIBUTE) {
            Ok(record) => Some(record),
            Err(Error::NoAttribute) => None,
            Err(e) => return Err(e.into()),
        };
        Ok(Existing {
            subvol: attr.id,
            read_only: info.read_only,
            received: received(&info),
            untouched_snapshot: info.parent_uuid != [0; 16] && info.ctransid <= info.otransid,
            record,
        })
    }
}

fn received(info: &SubvolInfo) -> Option<Sent> {
    let sent = Sent { uuid: info.received_uuid, ctransid: info.stransid };
    (info.received_uuid != [0; 16]).then_some(sent)
}

fn time(t: Timespec) -> Timestamp {
    Timestamp { sec: t.sec.get(), nsec: t.nsec.get() }
}

fn device(major: u32, minor: u32) -> u64 {
    u64::from(major) << 20 | u64::from(minor)
}

impl Destination for ImageDir<'_> {
    type Subvol = InodeId;

    fn look(&self, name: &[u8]) -> BoxResult<Option<Entry<InodeId>>> {
        let attr = match self.fs.lookup(self.target, name) {
            Ok(attr) => attr,
            Err(Error::NotFound) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let is_root = attr.id.ino == ObjectId::FIRST_FREE.0 && attr.kind == FileKind::Directory;
        Ok(Some(match is_root {
            true => Entry::Subvolume(self.describe(&attr)?),
            false => Entry::Other,
        }))
    }

    fn find(&self, sent: &Sent) -> BoxResult<Option<InodeId>> {
        let all = self.fs.subvolumes()?;
        let of = |rank: fn(&SubvolInfo, &Sent) -> bool| {
            all.iter().rev().find(|s| s.read_only && rank(s, sent))
        };
        let found = of(|s, sent| s.received_uuid == sent.uuid && s.stransid == sent.ctransid)
            .or_else(|| of(|s, sent| s.uuid == sent.uuid))
            .or_else(|| of(|s, sent| s.received_uuid == sent.uuid));
        Ok(found.map(|s| InodeId { subvol: s.id, ino: ObjectId::FIRST_FREE.0 }))
    }

    fn create(&mut self, name: &[u8], record: &[u8]) -> BoxResult<InodeId> {
        let xattrs = [(ATTRIBUTE.to_vec(), record.to_vec())];
        let new = NewInode { xattrs: &xattrs, ..self.new_inode(FileKind::Directory, 0o755) };
        Ok(self.fs.create_subvolume(self.target, name, &new)?.id)
    }

    fn snapshot(&mut self, of: &InodeId, name: &[u8], read_only: bool) -> BoxResult<InodeId> {
        let subvol = self.fs.snapshot(of.subvol, self.target, name, read_only)?;
        Ok(InodeId { subvol, ino: ObjectId::FIRST_FREE.0 })
    }

    fn delete(&mut self, name: &[u8]) -> BoxResult<()> {
        self.fs.delete_subvolume(self.target, name)?;
        Ok(())
    }

    fn enter(&mut self, subvol: &InodeId) -> BoxResult<()> {
        self.root = *subvol;
        self.dir = Known::default();
        self.entry = Known::default();
        Ok(())
    }

    fn sync(&mut self) -> BoxResult<()> {
        Ok(self.fs.sync()?)
    }

    fn set_record(&mut self, record: Option<&[u8]>) -> BoxResult<()> {
        let before = self.fs.getattr(self.root)?;
        match record {
            Some(value) => self.fs.setxattr(self.root, ATTRIBUTE, value, XattrMode::Set)?,
            None => self.fs.removexattr(self.root, ATTRIBUTE)?,
        }
        let times = SetAttr { ctime: Some(before.ctime), ..SetAttr::default() };
        self.fs.setattr(self.root, &times)?;
        Ok(())
    }

    fn set_received(&mut self, sent: &Sent) -> BoxResult<()> {
        // As Linux has it: the stream does not say when it was sent.
        let received = larder_fs::Received {
            uuid: sent.uuid,
            stransid: sent.ctransid,
            rtransid: Generation(0),
            stime: Timestamp::default(),
            rtime: Timestamp::now(),
        };
        self.fs.set_subvolume_received(self.root.subvol, received)?;
        Ok(())
    }

    fn set_read_only(&mut self) -> BoxResult<()> {
        Ok(self.fs.set_subvolume_read_only(self.root.subvol, true, false)?)
    }

    fn make(&mut self, path: StreamPath<'_>, node: &Node<'_>) -> BoxResult<()> {
        let (dir, name) = self.place(path)?;
        let made = self.fs.create(dir, name, &self.new_node(node))?;
        // The stream says how a file is compressed, and its directory here has no say in it.
        let flags = InodeFlags::from_bits_retain(made.flags);
        if flags.intersects(COMPRESSION) {
            let flags = Some((flags - COMPRESSION).bits());
            self.fs.setattr(made.id, &SetAttr { flags, ..SetAttr::default() })?;
        }
        self.entry.set(path, made.id);
        Ok(())
    }

    fn make_as(
        &mut self,
        path: StreamPath<'_>,
        node: &Node<'_>,
        name: StreamPath<'_>,
    ) -> BoxResult<bool> {
        let (first, (dir, last)) = (self.place(path)?, self.place(name)?);
        let is_free = matches!(self.fs.lookup(first.0, first.1), Err(Error::NotFound));
        if !is_free || self.passes_on(first.0)? || self.passes_on(dir)? {
            return Ok(false);
        }
        let made = self.fs.create(dir, last, &self.new_node(node))?;
        self.entry.set(name, made.id);
        Ok(true)
    }

    fn rename(&mut self, from: StreamPath<'_>, to: StreamPath<'_>) -> BoxResult<()> {
        let old = self.place(from)?;
        let moved = self.entry.get(from);
        let new = self.place(to)?;
        self.fs.rename(old.0, old.1, new.0, new.1, RenameMode::Replace)?;
        self.forget(from);
        self.forget(to);
        if let Some(id) = moved {
            self.entry.set(to, id);
        }
        Ok(())
    }

    fn link(&mut self, path: StreamPath<'_>, target: StreamPath<'_>) -> BoxResult<()> {
        let id = self.id(target)?;
        let (dir, name) = self.place(path)?;
        self.fs.link(id, dir, name)?;
        Ok(())
    }

    fn unlink(&mut self, path: StreamPath<'_>) -> BoxResult<()> {
        let (dir, name) = self.place(path)?;
        self.fs.unlink(dir, name)?;
        self.forget(path);
        Ok(())
    }

    fn rmdir(&mut self, path: StreamPath<'_>) -> BoxResult<()> {
        let (dir, name) = self.place(path)?;
        self.step(dir, name)?;
        self.fs.rmdir(dir, name)?;
        self.forget(path);
        Ok(())
    }

    fn set_xattr(&mut self, path: StreamPath<'_>, name: &[u8], value: &[u8]) -> BoxResult<()> {
        let id = self.id(path)?;
        Ok(self.fs.setxattr(id, name, value, XattrMode::Set)?)
    }

    fn remove_xattr(&mut self, path: StreamPath<'_>, name: &[u8]) -> BoxResult<()> {
        let id = self.id(path)?;
        Ok(self.fs.removexattr(id, name)?)
    }

    fn write(&mut self, path: StreamPath<'_>, offset: u64, data: &[u8]) -> BoxResult<()> {
        let id = self.id(path)?;
        Ok(self.fs.write(id, offset, data)?)
    }

    fn write_encoded(&mut self, path: StreamPath<'_>, data: &Encoded<'_>) -> BoxResult<bool> {
        let id = self.id(path)?;
        let extent = EncodedData {
            compression: data.compression,
            data: data.data,
            unpacked_len: data.unpacked_len,
            offset: data.unpacked_offset,
            len: data.file_len,
        };
        Ok(self.fs.write_encoded(id.at(data.offset), &extent)?)
    }

    fn share(
        &mut self,
        from: &Shared<'_, InodeId>,
        path: StreamPath<'_>,
        offset: u64,
    ) -> BoxResult<()> {
        let source = self.walk(*from.subvol, from.path)?;
        let (from_at, to_at) = (source.at(from.offset), self.id(path)?.at(offset));
        match self.fs.clone_range(from_at, to_at, from.len) {
            Ok(_) => Ok(()),
            // The flags of the two files differ here, or the sectors do: the bytes are the same.
            Err(Error::Invalid(_)) => self.copy(from_at, to_at, from.len),
            Err(e) => Err(e.into()),
        }
    }

    fn truncate(&mut self, path: StreamPath<'_>, size: u64) -> BoxResult<()> {
        self.set(path, &SetAttr { size: Some(size), ..SetAttr::default() })
    }

    fn chmod(&mut self, path: StreamPath<'_>, mode: u32) -> BoxResult<()> {
        self.set(path, &SetAttr { perm: Some(mode), ..SetAttr::default() })
    }

    fn chown(&mut self, path: StreamPath<'_>, uid: u32, gid: u32) -> BoxResult<()> {
        self.set(path, &SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() })
    }

    fn set_times(&mut self, path: StreamPath<'_>, times: &Times) -> BoxResult<()> {
        let changes = SetAttr {
            atime: Some(SetTime::To(time(times.accessed))),
            mtime: Some(SetTime::To(time(times.modified))),
            ctime: Some(time(times.changed)),
            ..SetAttr::default()
        };
        self.set(path, &changes)
    }

    fn reserve(&mut self, path: StreamPath<'_>, range: Range<u64>, how: Reserve) -> BoxResult<()> {
        let id = self.id(path)?;
        let how = match how {
            Reserve::Allocate { keep_size } => Fallocate::Allocate { keep_size },
            Reserve::Zero { keep_size } => Fallocate::Zero { keep_size },
            Reserve::Punch => Fallocate::Punch,
        };
        Ok(self.fs.fallocate(id.at(range.start), range.end - range.start, how)?)
    }
}

impl ImageDir<'_> {
    /// Copies bytes where they cannot be shared.
    fn copy(
        &self,
        mut from: larder_fs::FilePosition,
        mut to: larder_fs::FilePosition,
        len: u64,
    ) -> BoxResult<()> {
        let size = self.fs.getattr(from.id)?.size;
        if from.offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::Invalid("the source ends before the range").into());
        }
        let mut left = len;
        while left > 0 {
            let done = self.fs.copy_range(from, to, left)?;
            if done == 0 {
                return Err(Error::Invalid("the source ends before the range").into());
            }
            from.offset += done;
            to.offset += done;
            left -= done.min(left);
        }
        Ok(())
    }
}
