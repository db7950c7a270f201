//! Which inode may be kept where names share one.
//!
//! An inode of the image with several names may be one that the sources split, and the other way
//! round. The first name of a group keeps the inode that the image has there, unless another group
//! has kept it already. A file that has one name in the sources and several in the image gets an
//! inode of its own: whatever the other names become, this one must not change with them.

use larder_fs::{Attr, InodeId};
use larder_sources::LinkGroup;
use std::collections::{HashMap, HashSet};

/// Inodes of the image that entries with several names have.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// The inode of each group. `None`: it will be made, in a dry run.
    groups: HashMap<LinkGroup, Option<InodeId>>,
    /// Those of them that the image had before.
    kept: HashSet<InodeId>,
    /// How many names of an inode would be gone by now, in a dry run.
    gone: HashMap<InodeId, u32>,
}

impl Links {
    /// The inode of the group if one of its names has come before; the inner value is `None` in a
    /// dry run.
    pub(crate) fn of(&self, group: Option<LinkGroup>) -> Option<Option<InodeId>> {
        self.groups.get(&group?).copied()
    }

    /// May an entry of this group be the inode that the image has in its place?
    pub(crate) fn may_keep(&self, now: &Attr, group: Option<LinkGroup>) -> bool {
        let gone = self.gone.get(&now.id).copied().unwrap_or(0);
        now.nlink == gone + 1 || (group.is_some() && !self.kept.contains(&now.id))
    }

    /// The first name of the group, if it has one, was this inode in the image.
    pub(crate) fn keep(&mut self, id: InodeId, group: Option<LinkGroup>) {
        if let Some(group) = group {
            self.kept.insert(id);
            self.groups.insert(group, Some(id));
        }
    }

    /// A name of this inode would be gone, if this were no dry run.
    pub(crate) fn would_lose(&mut self, id: InodeId) {
        *self.gone.entry(id).or_default() += 1;
    }

    /// The first name of the group, if it has one, was made.
    pub(crate) fn made(&mut self, id: Option<InodeId>, group: Option<LinkGroup>) {
        if let Some(group) = group {
            self.groups.insert(group, id);
        }
    }
}
