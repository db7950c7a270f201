//! What can receive: an image through the engine, or a directory on a mount through system calls.
//!
//! The trait has what a stream asks for, by path, and what receiving needs besides: making
//! subvolumes, finding earlier ones by where they came from, and making changes durable. Calls take
//! effect in their order, also when the power fails. Data is durable when [`Destination::sync`]
//! returns.

use crate::error::BoxError;
use crate::path::StreamPath;
use larder_format::Generation;
use larder_format::items::{Compression, Timespec};
use std::ops::Range;

/// Result of a destination.
pub type BoxResult<T> = std::result::Result<T, BoxError>;

/// A subvolume as the side that sent it knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sent {
    /// Its uuid, or the one that it was received with itself.
    pub uuid: [u8; 16],
    /// Its transaction there.
    pub ctransid: Generation,
}

/// What has a name in the target directory.
#[derive(Clone, Debug)]
pub enum Entry<S> {
    /// A subvolume.
    Subvolume(Existing<S>),
    /// Anything else.
    Other,
}

/// A subvolume that exists.
#[derive(Clone, Debug)]
pub struct Existing<S> {
    /// The subvolume, as the destination knows it.
    pub subvol: S,
    /// Can it be changed?
    pub read_only: bool,
    /// What it was received as.
    pub received: Option<Sent>,
    /// Is it a snapshot in which nothing was changed since?
    pub untouched_snapshot: bool,
    /// The value of [`crate::record::ATTRIBUTE`].
    pub record: Option<Vec<u8>>,
}

/// A new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Node<'a> {
    File,
    Directory,
    Symlink { target: &'a [u8] },
    Fifo,
    Socket,
    CharDevice { major: u32, minor: u32 },
    BlockDevice { major: u32, minor: u32 },
}

/// Times of an inode. A destination leaves out what it cannot set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Times {
    pub accessed: Timespec,
    pub modified: Timespec,
    pub changed: Timespec,
    pub created: Option<Timespec>,
}

/// A range of a file that another one is to have as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared<'a, S> {
    /// The subvolume that has it.
    pub subvol: &'a S,
    /// The file there.
    pub path: StreamPath<'a>,
    /// Where it begins.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

/// Data as it lies on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// Where it goes in the file.
    pub offset: u64,
    /// Bytes of the file that it becomes.
    pub file_len: u64,
    /// Bytes that it has unpacked.
    pub unpacked_len: u64,
    /// Where the file's bytes begin in these.
    pub unpacked_offset: u64,
    /// How it is packed.
    pub compression: Compression,
    /// The packed bytes.
    pub data: &'a [u8],
}

/// What to do with a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// Take space for it; the file may grow by that.
    Allocate {
        /// The size stays.
        keep_size: bool,
    },
    /// Make a hole of it. The size stays.
    Punch,
    /// Make it zeros with space of their own.
    Zero {
        /// The size stays.
        keep_size: bool,
    },
}

/// A place that receives subvolumes.
#[allow(clippy::missing_errors_doc)]
pub trait Destination {
    /// A subvolume of it.
    type Subvol: Clone;

    /// What has this name in the target directory.
    fn look(&self, name: &[u8]) -> BoxResult<Option<Entry<Self::Subvol>>>;
    /// The read-only subvolume that has what was sent: received from it, or it itself.
    fn find(&self, sent: &Sent) -> BoxResult<Option<Self::Subvol>>;
    /// Makes an empty subvolume, with this record.
    fn create(&mut self, name: &[u8], record: &[u8]) -> BoxResult<Self::Subvol>;
    /// Makes a snapshot, which is durable.
    fn snapshot(
        &mut self,
        of: &Self::Subvol,
        name: &[u8],
        read_only: bool,
    ) -> BoxResult<Self::Subvol>;
    /// Deletes a subvolume of the target directory.
    fn delete(&mut self, name: &[u8]) -> BoxResult<()>;
    /// From now on paths are in this subvolume.
    fn enter(&mut self, subvol: &Self::Subvol) -> BoxResult<()>;
    /// Makes everything durable that was done.
    fn sync(&mut self) -> BoxResult<()>;
    /// Sets the record of the subvolume, or removes it. The times of the directory stay.
    fn set_record(&mut self, record: Option<&[u8]>) -> BoxResult<()>;
    /// Notes what the subvolume was received from.
    fn set_received(&mut self, sent: &Sent) -> BoxResult<()>;
    /// Makes the subvolume read-only.
    fn set_read_only(&mut self) -> BoxResult<()>;

    /// Makes an inode. It belongs to the caller until the stream says otherwise.
    fn make(&mut self, path: StreamPath<'_>, node: &Node<'_>) -> BoxResult<()>;
    /// Makes an inode as if it were made at `path` and then renamed to `name`, where nothing is
    /// yet. `false` or an error: nothing was done, and the caller does both.
    fn make_as(
        &mut self,
        _path: StreamPath<'_>,
        _node: &Node<'_>,
        _name: StreamPath<'_>,
    ) -> BoxResult<bool> {
        Ok(false)
    }
    /// Renames an entry, over what has the new name.
    fn rename(&mut self, from: StreamPath<'_>, to: StreamPath<'_>) -> BoxResult<()>;
    /// Makes a further name, `path`, of `target`.
    fn link(&mut self, path: StreamPath<'_>, target: StreamPath<'_>) -> BoxResult<()>;
    /// Removes a name of anything but a directory.
    fn unlink(&mut self, path: StreamPath<'_>) -> BoxResult<()>;
    /// Removes an empty directory.
    fn rmdir(&mut self, path: StreamPath<'_>) -> BoxResult<()>;
    /// Sets an extended attribute.
    fn set_xattr(&mut self, path: StreamPath<'_>, name: &[u8], value: &[u8]) -> BoxResult<()>;
    /// Removes an extended attribute.
    fn remove_xattr(&mut self, path: StreamPath<'_>, name: &[u8]) -> BoxResult<()>;
    /// Writes to a file.
    fn write(&mut self, path: StreamPath<'_>, offset: u64, data: &[u8]) -> BoxResult<()>;
    /// Writes data as it lies on a device. `false`: the destination cannot store it so, and has
    /// done nothing.
    fn write_encoded(&mut self, path: StreamPath<'_>, data: &Encoded<'_>) -> BoxResult<bool>;
    /// Gives a file a range of another one.
    fn share(
        &mut self,
        from: &Shared<'_, Self::Subvol>,
        path: StreamPath<'_>,
        offset: u64,
    ) -> BoxResult<()>;
    /// Sets a file's size.
    fn truncate(&mut self, path: StreamPath<'_>, size: u64) -> BoxResult<()>;
    /// Sets permissions.
    fn chmod(&mut self, path: StreamPath<'_>, mode: u32) -> BoxResult<()>;
    /// Sets the owner.
    fn chown(&mut self, path: StreamPath<'_>, uid: u32, gid: u32) -> BoxResult<()>;
    /// Sets times.
    fn set_times(&mut self, path: StreamPath<'_>, times: &Times) -> BoxResult<()>;
    /// Reserves or frees space of a file.
    fn reserve(&mut self, path: StreamPath<'_>, range: Range<u64>, how: Reserve) -> BoxResult<()>;
}
