//! A tree of files, from whatever source: a mount by the kernel, a mount by Larder, or the engine
//! called directly. A comparison does not know which.
//!
//! Values are in the units of `stat`, device numbers in the format's internal form, so that two
//! sources can be compared field by field.

use anyhow::Result;
use std::collections::BTreeMap;

/// Type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Kind {
    Regular,
    Directory,
    Symlink,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
}

/// Type from the `S_IFMT` bits of a mode.
#[must_use]
pub(crate) fn decode_kind(mode: u32) -> Option<Kind> {
    Some(match mode & 0o170_000 {
        0o100_000 => Kind::Regular,
        0o040_000 => Kind::Directory,
        0o120_000 => Kind::Symlink,
        0o020_000 => Kind::CharDevice,
        0o060_000 => Kind::BlockDevice,
        0o010_000 => Kind::Fifo,
        0o140_000 => Kind::Socket,
        _ => return None,
    })
}

/// Seconds and nanoseconds since 1970; the seconds may be negative, the nanoseconds always count
/// forwards.
pub type Time = (i64, u32);

/// What `stat` tells about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Type.
    pub kind: Kind,
    /// Permission bits, `07777`.
    pub perm: u32,
    /// Number of names.
    pub nlink: u64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// `(major << 20) | minor` of a device node, 0 otherwise.
    pub rdev: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes allocated.
    pub allocated: u64,
    /// Which inode: (device or subvolume, number). Entries with the same pair are one file.
    pub identity: (u64, u64),
    /// Last access.
    pub atime: Time,
    /// Last change of the contents.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Creation, where the source knows it.
    pub btime: Option<Time>,
}

/// A source of a tree.
pub trait TreeSource {
    /// Names one entry for further calls.
    type Id: Clone;
    /// A regular file opened for reading.
    type File;

    /// The top directory.
    ///
    /// # Errors
    /// It cannot be reached.
    fn root(&self) -> Result<Self::Id>;
    /// Entries of a directory in any order, without `.` and `..`.
    ///
    /// # Errors
    /// It cannot be read.
    fn children(&self, dir: &Self::Id) -> Result<Vec<(Vec<u8>, Self::Id)>>;
    /// `stat`, not following symlinks.
    ///
    /// # Errors
    /// The inode cannot be read.
    fn facts(&self, id: &Self::Id) -> Result<Facts>;
    /// Target of a symlink.
    ///
    /// # Errors
    /// The inode cannot be read.
    fn readlink(&self, id: &Self::Id) -> Result<Vec<u8>>;
    /// Extended attributes, ACLs included.
    ///
    /// # Errors
    /// They cannot be read.
    fn xattrs(&self, id: &Self::Id) -> Result<BTreeMap<Vec<u8>, Vec<u8>>>;
    /// Opens a regular file.
    ///
    /// # Errors
    /// It cannot be opened.
    fn open(&self, id: &Self::Id) -> Result<Self::File>;
    /// First data at or after `offset`, and where that run of data ends; `None` where only a hole
    /// follows.
    ///
    /// # Errors
    /// The file cannot be read.
    fn next_data(&self, file: &Self::File, offset: u64) -> Result<Option<(u64, u64)>>;
    /// Reads at `offset`; 0 only at the end of the file.
    ///
    /// # Errors
    /// The data cannot be read.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> Result<usize>;
}
