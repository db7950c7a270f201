//! The facade: every call a front end can make.
//!
//! Calls take inode ids and raw names, are atomic towards each other, and may come from any number of threads.
//! Whoever may be asked again about an inode takes a *hold* on it (a FUSE look-up count); an inode without names is
//! deleted when its last hold goes.

use crate::lifecycle::Filesystem;
use crate::{Attr, DirEntry, Error, InodeId, NewInode, RenameMode, Result, Seek, SetAttr, XattrMode};

#[allow(clippy::unused_self, clippy::missing_errors_doc, unused_variables, missing_docs)]
impl Filesystem {
    /// Finds `name` in `dir`; also `.` and `..`. Subvolume borders are crossed silently.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<Attr> {
        Err(Error::NotSupported("lookup"))
    }
    pub fn getattr(&self, id: InodeId) -> Result<Attr> {
        Err(Error::NotSupported("getattr"))
    }
    pub fn setattr(&self, id: InodeId, changes: &SetAttr) -> Result<Attr> {
        Err(Error::NotSupported("setattr"))
    }
    /// Makes a file, directory, symlink or special file.
    pub fn create(&self, dir: InodeId, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
        Err(Error::NotSupported("create"))
    }
    /// Makes a regular file without a name (O_TMPFILE); `link` may give it one. The result is held once.
    pub fn create_unnamed(&self, dir: InodeId, new: &NewInode<'_>) -> Result<Attr> {
        Err(Error::NotSupported("create_unnamed"))
    }
    pub fn link(&self, id: InodeId, dir: InodeId, name: &[u8]) -> Result<Attr> {
        Err(Error::NotSupported("link"))
    }
    pub fn unlink(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        Err(Error::NotSupported("unlink"))
    }
    pub fn rmdir(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        Err(Error::NotSupported("rmdir"))
    }
    pub fn rename(
        &self,
        dir: InodeId,
        name: &[u8],
        to_dir: InodeId,
        to_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        Err(Error::NotSupported("rename"))
    }
    pub fn readlink(&self, id: InodeId) -> Result<Vec<u8>> {
        Err(Error::NotSupported("readlink"))
    }
    /// Calls `each` for entries after position `from` (0 at first) until it returns false or the directory ends.
    /// `.` and `..` come first.
    pub fn readdir(
        &self,
        dir: InodeId,
        from: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        Err(Error::NotSupported("readdir"))
    }
    /// Reads into `buf`; returns the number of bytes, less than asked for only at the end of the file.
    pub fn read(&self, id: InodeId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        Err(Error::NotSupported("read"))
    }
    /// Writes all of `data`, growing the file where needed.
    pub fn write(&self, id: InodeId, offset: u64, data: &[u8]) -> Result<()> {
        Err(Error::NotSupported("write"))
    }
    /// Copies a range (sharing extents where that is possible); returns the bytes copied, 0 at the source's end.
    pub fn copy_range(
        &self,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        Err(Error::NotSupported("copy_range"))
    }
    /// Next data or hole at or after `offset`; `Ok(None)` where there is none (ENXIO).
    pub fn seek(&self, id: InodeId, offset: u64, what: Seek) -> Result<Option<u64>> {
        Err(Error::NotSupported("seek"))
    }
    pub fn getxattr(&self, id: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        Err(Error::NotSupported("getxattr"))
    }
    pub fn setxattr(&self, id: InodeId, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        Err(Error::NotSupported("setxattr"))
    }
    pub fn removexattr(&self, id: InodeId, name: &[u8]) -> Result<()> {
        Err(Error::NotSupported("removexattr"))
    }
    /// Names of all extended attributes.
    pub fn listxattr(&self, id: InodeId) -> Result<Vec<Vec<u8>>> {
        Err(Error::NotSupported("listxattr"))
    }
    /// Makes one inode durable: data, metadata and names.
    pub fn fsync(&self, id: InodeId, data_only: bool) -> Result<()> {
        Err(Error::NotSupported("fsync"))
    }
    /// The caller keeps a reference to the inode (a FUSE look-up): it survives its last name.
    pub fn hold(&self, id: InodeId) {}
    /// Gives `n` holds back.
    pub fn release(&self, id: InodeId, n: u64) {}
}
