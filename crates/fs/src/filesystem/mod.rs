//! The facade: every call that a front end can make about inodes, names and data.
//!
//! Calls take inode ids and raw names. They are atomic towards each other, and may come from any
//! number of threads. A front end that may be asked again about an inode takes a *hold* on it (a
//! FUSE look-up count). An inode without names is deleted when its last hold goes. Opening, syncing
//! and closing are in `lifecycle`.

mod balances;
mod commit_source;
mod device_changes;
mod device_states;
mod devices;
mod left;
mod lifecycle;
mod open;
mod replacement;
mod stats;
mod subvolumes;

pub use device_states::{DeviceErrors, DeviceFigures, DeviceState};
pub use lifecycle::Filesystem;
pub use open::{former_devices, missing_devices};
pub use stats::{MemoryStats, MemoryUse, Stats};

use crate::completion::{self, Completion};
use crate::file::{self, Position};
use crate::inode::{attr, create, dir, link, rename, survey, xattr};
use crate::log;
use crate::relocate;
use crate::tree::doing;
use crate::{
    Attr, Deduped, DirEntry, EncodedData, Fallocate, FilePosition, GroupFacts, InodeId,
    MappedExtent, NewInode, Relocated, Relocating, RenameMode, Result, Seek, SetAttr, Surveyed,
    XattrMode,
};
use larder_format::{Logical, TreeId};
use std::ops::ControlFlow;

impl Filesystem {
    /// Finds `name` in `dir`; also `.` and `..`. Crosses the borders of subvolumes without notice.
    /// The root of the mount is its own parent.
    ///
    /// # Errors
    /// `NotDirectory`, `NameTooLong`.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<Attr> {
        dir::lookup(&self.core, self.root(), dir, name)
    }
    /// Attributes of an inode.
    ///
    /// # Errors
    /// See the module's text.
    pub fn getattr(&self, id: InodeId) -> Result<Attr> {
        attr::get(&*self.core.inode(id)?)
    }
    /// Attributes, also extended ones, of inodes of one subvolume, in the order of `inos`. Takes
    /// less time and memory than asking for each, where most are asked for once only.
    ///
    /// # Errors
    /// See the module's text.
    pub fn survey(&self, subvol: TreeId, inos: &[u64]) -> Result<Vec<Surveyed>> {
        survey::survey(&self.core, subvol, inos)
    }
    /// Changes attributes; returns the new ones. A size is set first, then the others.
    ///
    /// # Errors
    /// `NotPermitted` for an immutable or append-only inode; `IsDirectory`, `Invalid`, `FileTooBig`
    /// for a size; `Invalid`, `NotSupported` for flags.
    pub fn setattr(&self, id: InodeId, changes: &SetAttr) -> Result<Attr> {
        let _doing = doing("set attributes");
        attr::set(&self.core, &self.core.inode(id)?, changes)
    }
    /// Makes a file, directory, symlink or special file.
    ///
    /// # Errors
    /// `Exists`, `NotDirectory`, `NameTooLong` (a symlink's target too), `NotPermitted` for an
    /// immutable directory, `Overflow` when the directory cannot take another name with this hash,
    /// `Invalid` for an impossible name.
    pub fn create(&self, dir: InodeId, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
        let _doing = doing("create");
        create::create(&self.core, dir, name, new)
    }
    /// Makes a regular file without a name (O_TMPFILE); `link` may give it one. The file has one
    /// hold.
    ///
    /// # Errors
    /// `NotDirectory`; `Invalid` for another type.
    pub fn create_unnamed(&self, dir: InodeId, new: &NewInode<'_>) -> Result<Attr> {
        let _doing = doing("create unnamed");
        create::create_unnamed(&self.core, self.front, dir, new)
    }
    /// Gives an inode one more name.
    ///
    /// # Errors
    /// `Exists`, `NotDirectory`, `NameTooLong`, `CrossSubvolume`, `TooManyLinks`, `Overflow`;
    /// `NotPermitted` for a directory or by flags; `NotFound` for an inode that has lost its last
    /// name.
    pub fn link(&self, id: InodeId, dir: InodeId, name: &[u8]) -> Result<Attr> {
        let _doing = doing("link");
        link::link(&self.core, id, dir, name)
    }
    /// Removes a name of anything but a directory.
    ///
    /// # Errors
    /// `IsDirectory`, `NotDirectory`; `NotPermitted` by flags.
    pub fn unlink(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        let _doing = doing("unlink");
        link::unlink(&self.core, dir, name)
    }
    /// Removes an empty directory, or an empty subvolume.
    ///
    /// # Errors
    /// `NotDirectory`, `NotEmpty`; those of [`Filesystem::delete_subvolume`]; `NotPermitted` by
    /// flags.
    pub fn rmdir(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        let _doing = doing("rmdir");
        link::rmdir(&self.core, dir, name)
    }
    /// Renames, also across directories; see [`RenameMode`]. If both names are of one inode, both
    /// stay.
    ///
    /// # Errors
    /// `Exists` (NoReplace); `IsDirectory`, `NotDirectory`, `NotEmpty` by what would be replaced;
    /// `Invalid` for a directory into itself; `CrossSubvolume`; `NotPermitted` by flags;
    /// `NameTooLong`, `Overflow`.
    pub fn rename(
        &self,
        dir: InodeId,
        name: &[u8],
        to_dir: InodeId,
        to_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let _doing = doing("rename");
        rename::rename(&self.core, (dir, name), (to_dir, to_name), mode)
    }
    /// Target of a symlink.
    ///
    /// # Errors
    /// `Invalid` for anything else.
    pub fn readlink(&self, id: InodeId) -> Result<Vec<u8>> {
        create::readlink(&self.core, &*self.core.inode(id)?)
    }
    /// Calls `each` for entries from position `from` on (0 at first, then an entry's `next`) until
    /// it returns false or the directory ends. `.` and `..` come first. One call shows the
    /// directory at one moment. An entry that stays is shown once, whatever comes and goes between
    /// calls.
    ///
    /// # Errors
    /// `NotDirectory`.
    pub fn readdir(
        &self,
        dir: InodeId,
        from: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        dir::readdir(&self.core, self.root(), dir, from, each)
    }
    /// As [`Filesystem::readdir`], but leaves out what was added since a listing of this directory
    /// was last begun with this call (from 0). So a caller that renames every entry that it finds
    /// comes to an end.
    ///
    /// # Errors
    /// `NotDirectory`.
    pub fn readdir_page(
        &self,
        dir: InodeId,
        from: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        dir::readdir_page(&self.core, self.root(), dir, from, each)
    }
    /// Reads into `buf`. Returns the number of bytes, which is less than asked for only at the end
    /// of the file.
    ///
    /// # Errors
    /// `IsDirectory`; `Invalid` for other types.
    pub fn read(&self, id: InodeId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        file::read(&self.core, &self.core.inode(id)?, offset, buf)
    }
    /// Writes all of `data`, growing the file where needed.
    ///
    /// # Errors
    /// `IsDirectory`, `Invalid`, `FileTooBig`; `NotPermitted` by flags.
    pub fn write(&self, id: InodeId, offset: u64, data: &[u8]) -> Result<()> {
        let _doing = doing("write");
        file::write(&self.core, &self.core.inode(id)?, offset, data)
    }
    /// Reserves, zeroes or punches `len` bytes of a file; see [`Fallocate`].
    ///
    /// # Errors
    /// `Invalid` for an empty range; `IsDirectory`, `Invalid` for other types; `FileTooBig`;
    /// `NotPermitted` by flags.
    pub fn fallocate(&self, from: FilePosition, len: u64, how: Fallocate) -> Result<()> {
        let _doing = doing("fallocate");
        let inode = self.core.inode(from.id)?;
        file::fallocate(&self.core, Position { inode: &inode, offset: from.offset }, len, how)
    }
    /// Writes data that is compressed already, as an extent that has it as it is. `false`: that is
    /// not possible here (the range does not begin or end at a sector, the file has no checksums,
    /// nothing is saved). Nothing has changed then, and the caller may write the unpacked bytes.
    ///
    /// # Errors
    /// `Invalid` for data that does not unpack to what it is said to be; those of writing.
    pub fn write_encoded(&self, to: FilePosition, data: &EncodedData<'_>) -> Result<bool> {
        let _doing = doing("write encoded");
        let inode = self.core.inode(to.id)?;
        file::encoded::write(&self.core, Position { inode: &inode, offset: to.offset }, data)
    }
    /// Copies `len` bytes, and shares extents where that is possible. Returns the bytes that were
    /// copied: 0 at the source's end.
    ///
    /// # Errors
    /// Those of reading and writing.
    pub fn copy_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<u64> {
        let _doing = doing("copy range");
        self.with_both(from, to, |from, to| file::copy_range(&self.core, from, to, len))
    }
    /// Gives a file the content that another file (or itself, elsewhere) has in a range, by sharing
    /// extents (FICLONERANGE). Returns the number of bytes. `len` 0 means: up to the source's end.
    /// After an error a first part may be done.
    ///
    /// # Errors
    /// `Invalid` for offsets that are no multiples of a sector; for a range that does not end at a
    /// multiple unless that is the end of both files; for a range that the source does not have, or
    /// that overlaps its target; and between files with and without checksums. `IsDirectory`,
    /// `Invalid` for other types; `FileTooBig`; `NotPermitted` by flags; `DataLost` while data of
    /// the source could not be written.
    pub fn clone_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<u64> {
        let _doing = doing("clone");
        self.with_both(from, to, |from, to| file::clone_range(&self.core, from, to, len))
    }
    /// Gives a file another file's extents for a range in which both have the same bytes
    /// (FIDEDUPERANGE). The bytes are compared while nothing can write to them. A part of a sector
    /// at the range's end is left alone, and not compared either, unless both files end there.
    /// Neither content nor times change, so the target may be in a read-only subvolume.
    ///
    /// # Errors
    /// Those of [`Filesystem::clone_range`]; also `Invalid` where the range is not within the
    /// target.
    pub fn dedupe_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<Deduped> {
        let _doing = doing("dedupe");
        self.with_both(from, to, |from, to| file::dedupe_range(&self.core, from, to, len))
    }
    /// Runs `f` with the places in two files.
    fn with_both<T>(
        &self,
        from: FilePosition,
        to: FilePosition,
        f: impl FnOnce(Position<'_>, Position<'_>) -> Result<T>,
    ) -> Result<T> {
        let inodes = (self.core.inode(from.id)?, self.core.inode(to.id)?);
        f(
            Position { inode: &inodes.0, offset: from.offset },
            Position { inode: &inodes.1, offset: to.offset },
        )
    }
    /// Calls `each` for the extents of a file that end behind `from`, by rising offset, without
    /// holes, until it returns false. Data that is only in memory gets its extents first, if the
    /// file system is writable.
    ///
    /// # Errors
    /// `IsDirectory`; `Invalid` for other types.
    pub fn map_extents(
        &self,
        id: InodeId,
        from: u64,
        each: &mut dyn FnMut(&MappedExtent) -> bool,
    ) -> Result<()> {
        file::map(&self.core, &self.core.inode(id)?, from, each)
    }
    /// Next data or hole at or after `offset`; `Ok(None)` where there is none (ENXIO).
    ///
    /// # Errors
    /// `Invalid` for anything but a regular file.
    pub fn seek(&self, id: InodeId, offset: u64, what: Seek) -> Result<Option<u64>> {
        file::seek(&self.core, &self.core.inode(id)?, offset, what)
    }
    /// Value of an extended attribute.
    ///
    /// # Errors
    /// `NoAttribute`; also for `user.` on anything but files and directories, as on Linux.
    pub fn getxattr(&self, id: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        xattr::get(&self.core, &*self.core.inode(id)?, name)
    }
    /// Creates or replaces an extended attribute. `btrfs.compression` also sets the inode's
    /// compression flags.
    ///
    /// # Errors
    /// `Exists`, `NoAttribute` by the mode; `NameTooLong`; `TooBig` beyond 64 KiB, `NoSpace` beyond
    /// what an item holds; `Invalid` for a property that does not exist or cannot have this value;
    /// `NotPermitted` by flags, and for `user.` on anything but files and directories.
    pub fn setxattr(&self, id: InodeId, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        let _doing = doing("set xattr");
        xattr::set(&self.core, &self.core.inode(id)?, name, value, mode)
    }
    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `NoAttribute`; `NotPermitted` by flags.
    pub fn removexattr(&self, id: InodeId, name: &[u8]) -> Result<()> {
        let _doing = doing("remove xattr");
        xattr::remove(&self.core, &self.core.inode(id)?, name)
    }
    /// Names of all extended attributes.
    ///
    /// # Errors
    /// See the module's text.
    pub fn listxattr(&self, id: InodeId) -> Result<Vec<Vec<u8>>> {
        xattr::list(&self.core, &*self.core.inode(id)?)
    }
    /// All block groups, by rising address.
    #[must_use]
    pub fn block_groups(&self) -> Vec<GroupFacts> {
        relocate::groups(&self.core)
    }
    /// Moves everything in the block group at `group` elsewhere, while the file system is in use.
    /// `watch` is called from time to time, and may end the relocation. What has moved until then
    /// stays where it is.
    ///
    /// # Errors
    /// `NotFound` for an address in no block group; `NoSpace` when there is no other place for what
    /// it holds; `Busy` while another relocation runs; those of [`Filesystem::sync`].
    pub fn relocate(
        &self,
        group: Logical,
        watch: &mut dyn FnMut(Relocating) -> ControlFlow<()>,
    ) -> Result<Relocated> {
        crate::api::may_wait()?;
        relocate::relocate(&self.core, group, watch)
    }
    /// Makes one inode durable: data, metadata and names.
    ///
    /// # Errors
    /// `DataLost` while data of this inode could not be written.
    pub fn fsync(&self, id: InodeId, data_only: bool) -> Result<()> {
        let _doing = doing("fsync");
        completion::wait_for(|done| self.fsync_then(id, data_only, done))
    }
    /// As [`fsync`](Self::fsync), and `done` gets the result, on this thread or on another. The
    /// call waits for the inode's data to be written. If no other thread is writing the log, this
    /// thread writes it, also for callers that come meanwhile.
    pub fn fsync_then(&self, id: InodeId, _data_only: bool, done: Completion) {
        let _doing = doing("fsync");
        match self.core.inode(id) {
            Ok(inode) => log::fsync(&self.core, &inode, done),
            Err(e) => done.complete(Err(e)),
        }
    }
    /// The caller keeps a reference to the inode (a FUSE look-up). The inode outlives its last
    /// name.
    pub fn hold(&self, id: InodeId) {
        self.core.hold(self.front, id);
    }
    /// Gives `n` holds back. With the last one an inode without names is deleted before the call
    /// returns.
    pub fn release(&self, id: InodeId, n: u64) {
        let _doing = doing("release");
        self.core.release(self.front, id, n);
    }

    /// Up to `most` inodes, of any kind, that look-ups of this front end hold. All of them if there
    /// are fewer.
    #[must_use]
    pub fn held(&self, most: usize) -> Vec<InodeId> {
        self.core.held(self.front, most)
    }
    /// May this front end know the inode? It does if it holds the inode, or if the inode is its
    /// root.
    #[must_use]
    pub fn knows(&self, id: InodeId) -> bool {
        id == self.root() || self.core.is_held_by(self.front, id)
    }
    /// May another front end of this engine know the inode?
    #[must_use]
    pub fn is_known_elsewhere(&self, id: InodeId) -> bool {
        self.core.is_held_elsewhere(self.front, id)
            || self.core.fronts.is_root_elsewhere(self.front, id)
    }
}
