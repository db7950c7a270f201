//! Which attributes are compared, and in which order they are set.
//!
//! Owner, mode, time of the last change and extended attributes decide whether an entry is as the
//! sources say. The times of the last access and of the inode do not: reading a source changes the
//! first, and any change here changes the second. They are set together with the others.

use crate::listing;
use larder_fs::{Filesystem, InodeId, Result, SetAttr, SetTime, Surveyed, Timestamp, XattrMode};
use larder_sources::{Attributes, Time};

/// A time of the sources as the engine has it.
pub(crate) fn timestamp(time: Time) -> Timestamp {
    Timestamp { sec: time.seconds, nsec: time.nanoseconds }
}

/// Do owner, mode and extended attributes differ, or the time of the last change?
pub(crate) fn differ(now: &Surveyed, wanted: &Attributes) -> bool {
    let Surveyed { attr, xattrs } = now;
    let same = attr.uid == wanted.uid
        && attr.gid == wanted.gid
        && attr.perm == wanted.permissions
        && attr.mtime == timestamp(wanted.modified);
    let xattrs = xattrs.iter().filter(|(name, _)| !is_own(name));
    !same || !xattrs.eq(&wanted.xattrs)
}

/// Sets all of them. The owner comes before the mode, because a change of owner takes bits of the
/// mode away.
pub(crate) fn set(fs: &Filesystem, id: InodeId, wanted: &Attributes) -> Result<()> {
    let owner = SetAttr { uid: Some(wanted.uid), gid: Some(wanted.gid), ..SetAttr::default() };
    fs.setattr(id, &owner)?;
    set_xattrs(fs, id, wanted)?;
    let modified = timestamp(wanted.modified);
    let last = SetAttr {
        perm: Some(wanted.permissions),
        mtime: Some(SetTime::To(modified)),
        atime: Some(SetTime::To(wanted.accessed.map_or(modified, timestamp))),
        ctime: wanted.changed.map(timestamp),
        ..SetAttr::default()
    };
    fs.setattr(id, &last)?;
    Ok(())
}

fn set_xattrs(fs: &Filesystem, id: InodeId, wanted: &Attributes) -> Result<()> {
    let mut now = listing::one(fs, id)?.xattrs;
    now.retain(|(name, _)| !is_own(name));
    for (name, _) in &now {
        if wanted.xattrs.binary_search_by(|(n, _)| n.cmp(name)).is_err() {
            fs.removexattr(id, name)?;
        }
    }
    for pair in &wanted.xattrs {
        if now.binary_search(pair).is_err() {
            fs.setxattr(id, &pair.0, &pair.1, XattrMode::Set)?;
        }
    }
    Ok(())
}

/// Properties of btrfs are the image's own: the sources do not decide how a file is compressed,
/// unless they have the property.
fn is_own(name: &[u8]) -> bool {
    name.starts_with(b"btrfs.")
}
