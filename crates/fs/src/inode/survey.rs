//! Attributes of many inodes at once.
//!
//! A caller that compares a whole tree asks for each inode once. Loading all of them would fill
//! memory with what is never asked for again. So an inode that is not in memory is read from its
//! items and not kept. Inodes are read in the order of their numbers, which is that of the tree, so
//! neighbours come from one leaf.
//!
//! What is in memory may be newer than the tree, so it comes from there. An inode that leaves
//! memory meanwhile may have changed after the tree was looked at. Then all are asked for one by
//! one, as any other caller does.

use super::xattr::{self, may_have};
use super::{Inode, PLACEHOLDER, attr};
use crate::api::{Attr, InodeId, Surveyed, Xattr};
use crate::engine::{Core, Subvolume};
use crate::error::{Error, Place, Result};
use crate::tree::{Item, Version};
use larder_format::items::DirEntries;
use larder_format::items::keys::inode_key;
use larder_format::{Key, KeyType, ObjectId, TreeId};
use std::sync::Arc;

/// Attributes of inodes of one subvolume, in the order of `inos`.
///
/// # Errors
/// `NotFound`; reading; corruption.
pub(crate) fn survey(core: &Core, subvol: TreeId, inos: &[u64]) -> Result<Vec<Surveyed>> {
    let Some(&first) = inos.first() else { return Ok(Vec::new()) };
    // What a crash has left is cleaned up before the first inode is given out.
    core.inode(InodeId { subvol, ino: first })?;
    let subvol = core.subvol(subvol)?;
    let evicted = subvol.inodes.evicted();
    let surveyed = in_order(core, &subvol, inos)?;
    if subvol.inodes.evicted() == evicted {
        return Ok(surveyed);
    }
    inos.iter()
        .map(|&ino| loaded(core, &*core.inode(InodeId { subvol: subvol.id, ino })?))
        .collect()
}

fn in_order(core: &Core, subvol: &Arc<Subvolume>, inos: &[u64]) -> Result<Vec<Surveyed>> {
    let version = subvol.version(core);
    let mut order: Vec<usize> = (0..inos.len()).collect();
    order.sort_unstable_by_key(|&at| inos[at]);
    let mut surveyed: Vec<Option<Surveyed>> = Vec::new();
    surveyed.resize_with(inos.len(), || None);
    for at in order {
        surveyed[at] = Some(match subvol.inodes.peek(inos[at]) {
            Some(inode) => loaded(core, &inode)?,
            None => stored(core, subvol, &version, inos[at])?,
        });
    }
    Ok(surveyed.into_iter().map(|one| one.expect("each was looked at")).collect())
}

/// Of an inode in memory.
fn loaded(core: &Core, inode: &Inode) -> Result<Surveyed> {
    let attr = attr::get(inode)?;
    let mut xattrs = Vec::new();
    for name in xattr::list(core, inode)? {
        if may_have(attr.kind, &name) {
            let value = xattr::get(core, inode, &name)?;
            xattrs.push((name, value));
        }
    }
    xattrs.sort_unstable();
    Ok(Surveyed { attr, xattrs })
}

/// Of an inode that is not in memory. What it is made of stands in one place of the tree.
fn stored(core: &Core, subvol: &Arc<Subvolume>, version: &Version, ino: u64) -> Result<Surveyed> {
    if ino == PLACEHOLDER {
        return loaded(core, &*core.inode(InodeId { subvol: subvol.id, ino })?);
    }
    let key = inode_key(ObjectId(ino));
    let mut cursor = version.seek(&key)?;
    let item = cursor.next()?.filter(|item| item.key == key).ok_or(Error::NotFound)?;
    let attr = attr::get(&Inode::of_item(subvol, &key, item.data())?)?;
    let xattr_key = |offset| Key::new(ObjectId(ino), KeyType::XATTR_ITEM, offset);
    if attr.nlink > 1 {
        // Many names may stand between.
        cursor = version.seek(&xattr_key(0))?;
    }
    let mut xattrs = Vec::new();
    while let Some(item) = cursor.next()?.filter(|item| item.key <= xattr_key(u64::MAX)) {
        if item.key.kind == KeyType::XATTR_ITEM {
            add_xattrs(&mut xattrs, &attr, &item)?;
        }
    }
    xattrs.sort_unstable();
    Ok(Surveyed { attr, xattrs })
}

fn add_xattrs(xattrs: &mut Vec<Xattr>, attr: &Attr, item: &Item) -> Result<()> {
    for entry in DirEntries::new(item.data()) {
        let place = || Place::item(attr.id.subvol, item.key);
        let entry = entry.map_err(|e| Error::corrupt(place(), e.0))?;
        if may_have(attr.kind, entry.name) {
            xattrs.push((entry.name.to_vec(), entry.data.to_vec()));
        }
    }
    Ok(())
}
