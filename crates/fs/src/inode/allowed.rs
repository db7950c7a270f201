//! What flags forbid, and whether a directory may take or give names.
//!
//! The flags that `chattr` sets are enforced here, as on Linux. An immutable inode cannot be
//! changed at all. Of an append-only one, the size, the owner, the permissions and the times cannot
//! be set, and its names stay.

use super::Inode;
use crate::error::{Error, Result};
use larder_format::items::InodeFlags;

/// Fails for an immutable or append-only inode, whose attributes and names stay as they are.
pub(super) fn check_not_fixed(inode: &Inode) -> Result<()> {
    let flags = inode.flags();
    if flags.contains(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("it is immutable"));
    }
    if flags.contains(InodeFlags::APPEND) {
        return Err(Error::NotPermitted("it is append-only"));
    }
    Ok(())
}

/// Fails for an immutable inode.
pub(super) fn check_not_immutable(inode: &Inode) -> Result<()> {
    if inode.flags().contains(InodeFlags::IMMUTABLE) {
        Err(Error::NotPermitted("it is immutable"))
    } else {
        Ok(())
    }
}

/// Fails if a directory cannot take a new name. The caller holds its `op`.
pub(super) fn check_takes_names(dir: &Inode) -> Result<()> {
    let state = dir.state.lock();
    if state.deleted || state.item.nlink.get() == 0 {
        return Err(Error::NotFound);
    }
    if state.item.inode_flags().contains(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("the directory is immutable"));
    }
    Ok(())
}

/// Fails if a name must stay because of flags, those of the directory or those of its inode. The
/// caller holds both `op`s.
pub(super) fn check_gives_names(dir: &Inode, inode: &Inode) -> Result<()> {
    check_not_fixed(dir)?;
    check_not_fixed(inode)
}
