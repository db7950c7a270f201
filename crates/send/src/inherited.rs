//! What a new inode takes from its directory, and must not take at the receiver.
//!
//! A directory can have a default ACL and a compression for what is made in it. The inode has got
//! its own attributes at the source already, whatever its directory had then. So these attributes
//! of a directory are given at the end of a stream, when nothing is made any more. If the
//! receiver's directory has them from before, they are **suspended** before the first inode is made
//! in it.

use crate::error::Result;
use crate::inodes::InodeSet;
use crate::output::Output;
use crate::pair::Pair;
use larder_format::ObjectId;
use larder_stream::Command;

/// Attributes of a directory that what is made in it inherits.
const INHERITED: [&[u8]; 2] = [b"system.posix_acl_default", b"btrfs.compression"];

/// May what is made in a directory inherit this attribute?
pub(crate) fn is_inherited(name: &[u8]) -> bool {
    INHERITED.contains(&name)
}

/// Which directories get such attributes at the end.
#[derive(Debug)]
pub(crate) struct Inherited<'a> {
    pair: &'a Pair<'a>,
    /// Directories that were looked at because a name came into them.
    seen: InodeSet,
    suspended: InodeSet,
    /// Directories of the newer subvolume that have such attributes, or may have.
    late: InodeSet,
}

impl<'a> Inherited<'a> {
    pub(crate) fn new(pair: &'a Pair<'a>) -> Self {
        let (seen, suspended, late) = Default::default();
        Self { pair, seen, suspended, late }
    }

    /// An inode is about to be made in the directory at `path`.
    pub(crate) fn suspend(
        &mut self,
        out: &mut Output<'_>,
        dir: ObjectId,
        path: &[u8],
    ) -> Result<()> {
        let Some(old) = self.pair.old else { return Ok(()) };
        if !self.seen.insert(dir) || !self.pair.is_same(dir)? {
            return Ok(());
        }
        let attributes = old.xattrs(dir)?;
        let names: Vec<&[u8]> =
            attributes.iter().map(|(name, _)| &name[..]).filter(|n| is_inherited(n)).collect();
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            out.write(&Command::RemoveXattr { path, name })?;
        }
        self.suspended.insert(dir);
        self.late.insert(dir);
        Ok(())
    }

    /// Does the receiver's directory lack these attributes, although the older subvolume has them?
    pub(crate) fn is_suspended(&self, dir: ObjectId) -> bool {
        self.suspended.contains(dir)
    }

    /// A directory is to get such an attribute at the end.
    pub(crate) fn give_later(&mut self, dir: ObjectId) {
        self.late.insert(dir);
    }

    /// Directories that are to get their attributes now.
    pub(crate) fn late(&self) -> impl Iterator<Item = ObjectId> {
        self.late.iter()
    }
}
