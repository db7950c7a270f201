//! A file system opened through the engine's facade as a [`TreeSource`]: no mount, no FUSE.

use super::tree::{Facts, Kind, Time, TreeSource};
use anyhow::{Result, ensure};
use larder_fs::{FileKind, Filesystem, InodeId, Seek, Timestamp};
use std::collections::BTreeMap;

/// The tree that `Filesystem::root` is the top of.
#[derive(Clone, Copy, Debug)]
pub struct EngineTree<'a>(
    /// The open file system.
    pub &'a Filesystem,
);

fn time(t: Timestamp) -> Time {
    (t.sec, t.nsec)
}

impl TreeSource for EngineTree<'_> {
    type Id = InodeId;
    type File = InodeId;

    fn root(&self) -> Result<InodeId> {
        Ok(self.0.root())
    }

    fn children(&self, dir: &InodeId) -> Result<Vec<(Vec<u8>, InodeId)>> {
        // In portions, so that going on where the last one stopped is tried in every directory of
        // some size.
        const PORTION: usize = 500;
        let mut found = Vec::new();
        let mut from = 0;
        loop {
            let mut seen = 0;
            let mut stopped = false;
            let mut wrong_order = false;
            self.0.readdir(*dir, from, &mut |entry| {
                if entry.name != b"." && entry.name != b".." {
                    found.push((entry.name.to_vec(), entry.id));
                }
                wrong_order |= entry.next <= from;
                from = entry.next;
                seen += 1;
                stopped = seen == PORTION;
                !stopped
            })?;
            ensure!(!wrong_order, "directory positions do not rise");
            if !stopped {
                return Ok(found);
            }
        }
    }

    fn facts(&self, id: &InodeId) -> Result<Facts> {
        let a = self.0.getattr(*id)?;
        ensure!(a.id == *id, "asked for {id:?}, got {:?}", a.id);
        Ok(Facts {
            kind: match a.kind {
                FileKind::Regular => Kind::Regular,
                FileKind::Directory => Kind::Directory,
                FileKind::Symlink => Kind::Symlink,
                FileKind::CharDevice => Kind::CharDevice,
                FileKind::BlockDevice => Kind::BlockDevice,
                FileKind::Fifo => Kind::Fifo,
                FileKind::Socket => Kind::Socket,
            },
            perm: a.perm,
            nlink: a.nlink.into(),
            uid: a.uid,
            gid: a.gid,
            rdev: a.rdev,
            size: a.size,
            allocated: a.bytes,
            identity: (id.subvol.0, id.ino),
            atime: time(a.atime),
            mtime: time(a.mtime),
            ctime: time(a.ctime),
            btime: Some(time(a.otime)),
        })
    }

    fn readlink(&self, id: &InodeId) -> Result<Vec<u8>> {
        Ok(self.0.readlink(*id)?)
    }

    fn xattrs(&self, id: &InodeId) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let names = self.0.listxattr(*id)?;
        names.into_iter().map(|name| Ok((name.clone(), self.0.getxattr(*id, &name)?))).collect()
    }

    fn open(&self, id: &InodeId) -> Result<InodeId> {
        Ok(*id)
    }

    fn next_data(&self, file: &InodeId, offset: u64) -> Result<Option<(u64, u64)>> {
        let Some(start) = self.0.seek(*file, offset, Seek::Data)? else { return Ok(None) };
        let end = self.0.seek(*file, start, Seek::Hole)?;
        Ok(Some((start, end.unwrap_or(u64::MAX))))
    }

    fn read(&self, file: &InodeId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        Ok(self.0.read(*file, offset, buf)?)
    }
}
