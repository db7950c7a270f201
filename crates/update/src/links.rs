//! Which inode may be kept where names share one.
//!
//! An inode of the image with several names may be one that the sources split, and the other way
//! round. The first name of a group keeps the inode that the image has there, unless another group
//! has kept it already. A file that has one name in the sources and several in the image gets an
//! inode of its own: whatever the other names become, this one must not change with them.

//!
//! There may be millions of such inodes, so what is known of them goes to disk beyond a budget.

use crate::Result;
use larder_format::ObjectId;
use larder_fs::{Attr, InodeId};
use larder_sources::{LinkGroup, Table};
use std::path::Path;

/// Inodes of the image that entries with several names have.
#[derive(Debug)]
pub(crate) struct Links {
    /// The inode of each group. Empty: it will be made, in a dry run.
    groups: Table,
    /// Those of them that the image had before.
    kept: Table,
    /// How many names of an inode would be gone by now, in a dry run.
    gone: Table,
}

impl Links {
    /// Keeps about `memory` bytes in memory, and the rest in temporary files in `dir`.
    pub(crate) fn new(memory: usize, dir: &Path) -> Self {
        let table = |parts| Table::new(memory / parts, dir);
        Self { groups: table(2), kept: table(4), gone: table(4) }
    }

    /// The inode of the group if one of its names has come before; the inner value is `None` in a
    /// dry run.
    pub(crate) fn of(&mut self, group: Option<LinkGroup>) -> Result<Option<Option<InodeId>>> {
        let Some(LinkGroup(group)) = group else { return Ok(None) };
        Ok(self.groups.get(group.into())?.map(|value| read_id(&value)))
    }

    /// May an entry of this group be the inode that the image has in its place?
    pub(crate) fn may_keep(&mut self, now: &Attr, group: Option<LinkGroup>) -> Result<bool> {
        let is_last = now.nlink == self.gone(now.id)? + 1;
        Ok(is_last || (group.is_some() && self.kept.get(number(now.id))?.is_none()))
    }

    /// The first name of the group, if it has one, was this inode in the image.
    pub(crate) fn keep(&mut self, id: InodeId, group: Option<LinkGroup>) -> Result<()> {
        if group.is_some() {
            self.kept.insert(number(id), &[])?;
        }
        self.made(Some(id), group)
    }

    /// A name of this inode would be gone, if this were no dry run.
    pub(crate) fn would_lose(&mut self, id: InodeId) -> Result<()> {
        let gone = self.gone(id)? + 1;
        Ok(self.gone.insert(number(id), &gone.to_le_bytes())?)
    }

    /// The first name of the group, if it has one, was made.
    pub(crate) fn made(&mut self, id: Option<InodeId>, group: Option<LinkGroup>) -> Result<()> {
        let Some(LinkGroup(group)) = group else { return Ok(()) };
        let id = id.map(|id| number(id).to_le_bytes());
        Ok(self.groups.insert(group.into(), id.as_ref().map_or(&[][..], |id| id))?)
    }

    fn gone(&mut self, id: InodeId) -> Result<u32> {
        let gone = self.gone.get(number(id))?;
        Ok(gone.map_or(0, |n| u32::from_le_bytes(n[..].try_into().expect("a count"))))
    }
}

fn number(id: InodeId) -> u128 {
    u128::from(id.subvol.0) << 64 | u128::from(id.ino)
}

fn read_id(value: &[u8]) -> Option<InodeId> {
    let number = u128::from_le_bytes(value.try_into().ok()?);
    Some(InodeId { subvol: ObjectId((number >> 64) as u64), ino: number as u64 })
}
