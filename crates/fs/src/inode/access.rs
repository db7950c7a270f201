//! How operations get at inodes, and let go of them.
//!
//! What a crash has left in a subvolume is cleaned up before the first inode of it is given out,
//! and an inode without a name is deleted when its last hold goes. The table of inodes knows
//! nothing of either.

use crate::engine::fronts::FrontId;
use crate::engine::{Core, Inode};
use crate::error::Result;
use std::sync::Arc;

impl Core {
    /// The inode with this id, loaded if necessary.
    ///
    /// # Errors
    /// `NotFound`; reading; corruption.
    pub(crate) fn inode(&self, id: crate::InodeId) -> Result<Arc<Inode>> {
        let subvol = self.subvol(id.subvol)?;
        self.clean_once(&subvol)?;
        subvol.inodes.get(self, &subvol, id.ino)
    }
    /// Gives `n` holds back. With the last one, an inode that has no name is deleted. The call
    /// waits for that if necessary.
    pub(crate) fn release(&self, front: FrontId, id: crate::InodeId, n: u64) {
        let subvol = self.subvols.read().get(&id.subvol).cloned();
        if let Some(inode) = subvol.and_then(|s| s.inodes.release(front, id.object(), n)) {
            super::orphan::delete_unheld(self, &inode);
        }
    }
}
