//! The facade's calls about subvolumes. Errors beyond those named are as in [`Filesystem`].

use crate::filesystem::Filesystem;
use crate::inode::subvolume::{self, Deletes};
use crate::tree::doing;
use crate::{
    Attr, FilePosition, Frozen, InodeId, NewExtent, NewInode, Received, Result, SubvolInfo,
};
use larder_format::{Generation, TreeId};

impl Filesystem {
    /// Makes an empty subvolume. `new` (a directory) describes its root directory.
    ///
    /// # Errors
    /// Those of making a directory.
    pub fn create_subvolume(&self, dir: InodeId, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
        let _doing = doing("create subvolume");
        subvolume::create(&self.core, dir, name, new)
    }
    /// Makes a snapshot of a subvolume. It has everything that was done in the subvolume before the
    /// call. Of what is done during the call it has the state of one moment. It is durable when the
    /// call returns. It does not contain subvolumes that are in the source.
    ///
    /// # Errors
    /// Those of making a directory; `NotFound` for the source; `DataLost` when data in it could not
    /// be written.
    pub fn snapshot(
        &self,
        source: TreeId,
        dir: InodeId,
        name: &[u8],
        read_only: bool,
    ) -> Result<TreeId> {
        let _doing = doing("snapshot");
        subvolume::snapshot(&self.core, source, dir, name, read_only)
    }
    /// Deletes a subvolume with everything in it. Its space is freed in the background
    /// ([`Filesystem::wait_for_drops`]).
    ///
    /// # Errors
    /// `Invalid` for anything but a subvolume; `NotEmpty` while other subvolumes are in it;
    /// `NotPermitted` for the default one; `Busy` for the root of a mount, and as long as there is
    /// a [`Frozen`] of it.
    pub fn delete_subvolume(&self, dir: InodeId, name: &[u8]) -> Result<TreeId> {
        let _doing = doing("delete subvolume");
        subvolume::delete(&self.core, dir, name, Deletes::Full)
    }
    /// Waits until deleted subvolumes take no more space, apart from what the next commit frees.
    ///
    /// # Errors
    /// `ReadOnly` when writing has ended; `Corrupt` when some deleted tree is damaged.
    pub fn wait_for_drops(&self) -> Result<()> {
        crate::api::may_wait()?;
        self.sync()?;
        if self.core.read_only.is_none() {
            self.core.drops.wait(&self.core, self.core.txns.published())?;
        }
        Ok(())
    }
    /// Facts about a subvolume.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn subvolume(&self, id: TreeId) -> Result<SubvolInfo> {
        self.core.subvol_info(id)
    }
    /// Facts about all subvolumes that are not deleted, by rising id. The top-level one is the
    /// first.
    ///
    /// # Errors
    /// See the module's text.
    pub fn subvolumes(&self) -> Result<Vec<SubvolInfo>> {
        self.core.all_subvols()
    }
    /// Path of a subvolume from the top-level one; empty for that one itself.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn subvolume_path(&self, id: TreeId) -> Result<Vec<u8>> {
        self.core.subvol_path(id)
    }
    /// Path of a directory within its subvolume, with a slash at the end; empty for the root
    /// directory.
    ///
    /// # Errors
    /// `NotFound` for a directory without a name.
    pub fn path_in_subvolume(&self, dir: InodeId) -> Result<Vec<u8>> {
        crate::inode::path_within(&self.core, dir.subvol, dir.ino)
    }
    /// Makes a subvolume read-only or writable. A received subvolume becomes writable only with
    /// `forget`, and is no longer known as received then.
    ///
    /// # Errors
    /// `NotFound`; `Busy` for a received one, and as long as there is a [`Frozen`] of it.
    pub fn set_subvolume_read_only(&self, id: TreeId, read_only: bool, forget: bool) -> Result<()> {
        let _doing = doing("set subvolume read-only");
        self.core.set_subvol_read_only(id, read_only, forget)
    }
    /// Notes from what a subvolume was received. Returns the transaction that notes it.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_subvolume_received(&self, id: TreeId, received: Received) -> Result<Generation> {
        let _doing = doing("set subvolume received");
        self.core.set_subvol_received(id, received)
    }
    /// Calls `each` for the file extents of a subvolume that were written in transaction `since` or
    /// later, by rising inode and offset from a position on, until it returns false. It does not
    /// see data that is only in memory: sync first.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn find_new(
        &self,
        from: FilePosition,
        since: Generation,
        each: &mut dyn FnMut(&NewExtent) -> bool,
    ) -> Result<()> {
        crate::subvolume::find_new::find_new(&self.core, from, since, each)
    }
    /// A read-only subvolume, to be read as a whole; see [`Frozen`]. Everything is made durable
    /// before, if the file system can be written to.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for a subvolume that can be written to; those of [`Self::sync`].
    pub fn frozen(&self, id: TreeId) -> Result<Frozen> {
        let frozen = Frozen::new(self.core.clone(), id)?;
        // Only now: what is written before it became read-only may still be in memory.
        if self.core.check_writable().is_ok() {
            self.sync()?;
        }
        frozen.with_facts()
    }
    /// A path to an inode within its subvolume, without a slash at either end. One of them, if the
    /// inode has several names.
    ///
    /// # Errors
    /// `NotFound` for an inode without a name.
    pub fn path_of(&self, id: InodeId) -> Result<Vec<u8>> {
        let mut path = crate::inode::path_within(&self.core, id.subvol, id.ino)?;
        path.pop();
        Ok(path)
    }
    /// The subvolume that is mounted if none is named.
    ///
    /// # Errors
    /// See the module's text.
    pub fn default_subvolume(&self) -> Result<TreeId> {
        self.core.default_subvol()
    }
    /// Makes a subvolume the one that is mounted if none is named.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_default_subvolume(&self, id: TreeId) -> Result<()> {
        self.core.set_default_subvol(id)
    }
}
