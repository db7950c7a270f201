//! Which attributes are compared, and in which order they are set.
//!
//! Owner, mode, time of the last change and extended attributes decide whether an entry is as the
//! sources say. The times of the last access and of the inode do not: reading a source changes the
//! first, and any change here changes the second. They are set together with the others.

use larder_fs::{Attr, Filesystem, InodeId, Result, SetAttr, SetTime, Timestamp, XattrMode};
use larder_sources::{Attributes, Time};

/// A time of the sources as the engine has it.
pub(crate) fn timestamp(time: Time) -> Timestamp {
    Timestamp { sec: time.seconds, nsec: time.nanoseconds }
}

/// Do owner, mode and extended attributes differ, or the time of the last change?
pub(crate) fn differ(fs: &Filesystem, now: &Attr, wanted: &Attributes) -> Result<bool> {
    let same = now.uid == wanted.uid
        && now.gid == wanted.gid
        && now.perm == wanted.permissions
        && now.mtime == timestamp(wanted.modified);
    Ok(!same || xattrs(fs, now.id)? != wanted.xattrs)
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
    let now = xattrs(fs, id)?;
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

/// Extended attributes, sorted by name. Properties of btrfs are the image's own: the sources do not
/// decide how a file is compressed, unless they have the property.
fn xattrs(fs: &Filesystem, id: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut all = Vec::new();
    for name in fs.listxattr(id)? {
        if !name.starts_with(b"btrfs.") {
            let value = fs.getxattr(id, &name)?;
            all.push((name, value));
        }
    }
    all.sort_unstable();
    Ok(all)
}
