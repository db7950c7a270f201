//! Images as source and destination of copies.

use super::{Meta, Sink, Source, Xattrs, is_copied};
use crate::image::Image;
use larder_fs::{FileKind, InodeId, NewInode, Seek, SetAttr, SetTime, XattrMode};
use std::ops::Range;

/// The tree of an open image; a node is an inode.
#[derive(Debug)]
pub(crate) struct ImageTree<'a>(pub(crate) &'a Image);

impl Source for ImageTree<'_> {
    type Node = InodeId;
    type File = InodeId;

    fn meta(&self, id: &InodeId) -> anyhow::Result<Meta> {
        let a = self.0.fs.getattr(*id)?;
        let shared = a.kind != FileKind::Directory && a.nlink > 1;
        Ok(Meta {
            kind: a.kind,
            perm: a.perm,
            uid: a.uid,
            gid: a.gid,
            rdev: a.rdev,
            size: a.size,
            atime: a.atime,
            mtime: a.mtime,
            identity: shared.then_some((a.id.subvol.0, a.id.ino)),
            tree: a.id.subvol.0,
        })
    }

    fn xattrs(&self, id: &InodeId) -> anyhow::Result<Xattrs> {
        let mut xattrs = Xattrs::new();
        for name in self.0.fs.listxattr(*id)?.into_iter().filter(|n| is_copied(n)) {
            match self.0.fs.getxattr(*id, &name) {
                Ok(value) => xattrs.push((name, value)),
                // Stored where no such attribute can be: Linux lists it, too, and has no value for
                // it.
                Err(larder_fs::Error::NoAttribute) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(xattrs)
    }

    fn entries(&self, id: &InodeId) -> anyhow::Result<Vec<(Vec<u8>, InodeId)>> {
        self.0.entries(*id)
    }

    fn readlink(&self, id: &InodeId) -> anyhow::Result<Vec<u8>> {
        Ok(self.0.fs.readlink(*id)?)
    }

    fn open(&self, id: &InodeId) -> anyhow::Result<InodeId> {
        Ok(*id)
    }

    fn data(&self, id: &InodeId, within: Range<u64>) -> anyhow::Result<Option<Range<u64>>> {
        let Some(start) = self.0.fs.seek(*id, within.start, Seek::Data)? else { return Ok(None) };
        Ok(Some(start..self.0.fs.seek(*id, start, Seek::Hole)?.unwrap_or(within.end)))
    }

    fn read(&self, id: &InodeId, at: u64, buf: &mut [u8]) -> anyhow::Result<usize> {
        Ok(self.0.fs.read(*id, at, buf)?)
    }
}

impl Sink for ImageTree<'_> {
    type Node = InodeId;
    type File = InodeId;

    fn find(&self, dir: &InodeId, name: &[u8]) -> anyhow::Result<Option<(InodeId, FileKind)>> {
        match self.0.fs.lookup(*dir, name) {
            Ok(a) => Ok(Some((a.id, a.kind))),
            Err(larder_fs::Error::NotFound) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn unlink(&self, dir: &InodeId, name: &[u8]) -> anyhow::Result<()> {
        Ok(self.0.fs.unlink(*dir, name)?)
    }

    fn create(
        &self,
        dir: &InodeId,
        name: &[u8],
        meta: &Meta,
        target: &[u8],
    ) -> anyhow::Result<InodeId> {
        let new = NewInode {
            kind: meta.kind,
            perm: meta.perm,
            uid: meta.uid,
            gid: meta.gid,
            rdev: meta.rdev,
            target,
            xattrs: &[],
        };
        Ok(self.0.fs.create(*dir, name, &new)?.id)
    }

    fn link(&self, id: &InodeId, dir: &InodeId, name: &[u8]) -> anyhow::Result<()> {
        self.0.fs.link(*id, *dir, name)?;
        Ok(())
    }

    fn open(&self, id: &InodeId) -> anyhow::Result<InodeId> {
        Ok(*id)
    }

    fn write(&self, id: &InodeId, at: u64, data: &[u8]) -> anyhow::Result<()> {
        Ok(self.0.fs.write(*id, at, data)?)
    }

    fn set_size(&self, id: &InodeId, size: u64) -> anyhow::Result<()> {
        if self.0.fs.getattr(*id)?.size != size {
            self.0.fs.setattr(*id, &SetAttr { size: Some(size), ..SetAttr::default() })?;
        }
        Ok(())
    }

    fn finish(&self, id: &InodeId, meta: &Meta, xattrs: &Xattrs) -> anyhow::Result<()> {
        for (name, value) in xattrs {
            self.0.fs.setxattr(*id, name, value, XattrMode::Set)?;
        }
        // Everything once more: a directory may have existed before, with other attributes.
        let changes = SetAttr {
            perm: (meta.kind != FileKind::Symlink).then_some(meta.perm),
            uid: Some(meta.uid),
            gid: Some(meta.gid),
            atime: Some(SetTime::To(meta.atime)),
            mtime: Some(SetTime::To(meta.mtime)),
            ..SetAttr::default()
        };
        self.0.fs.setattr(*id, &changes)?;
        Ok(())
    }
}
