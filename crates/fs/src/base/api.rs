//! The types that cross the border of the engine: inode ids, attributes, options.
//!
//! They are plain values in the engine's own words. Front ends translate them to theirs.

pub use crate::tuning::Tuning;
pub use larder_codec::{Packing, PackingError};
use larder_format::items::{Compression, Timespec};
use larder_format::{CsumType, DeviceId, Generation, Logical, ObjectId, TreeId};
use std::cell::Cell;
use std::fmt;

/// An inode of the file system: the subvolume it is in and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId {
    /// Subvolume (tree id).
    pub subvol: TreeId,
    /// Inode number in that subvolume. 2 stands for the empty directory that a snapshot shows
    /// where its source had a nested subvolume.
    pub ino: u64,
}

impl InodeId {
    /// A place in this file.
    #[must_use]
    pub fn at(self, offset: u64) -> FilePosition {
        FilePosition { id: self, offset }
    }
    /// Its number, as the first part of a key.
    #[must_use]
    pub fn object(self) -> ObjectId {
        ObjectId(self.ino)
    }
}

/// A place in a file; see [`InodeId::at`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FilePosition {
    /// The file.
    pub id: InodeId,
    /// Bytes from its beginning.
    pub offset: u64,
}

/// Type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum FileKind {
    Regular,
    Directory,
    Symlink,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
}

/// Seconds and nanoseconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[allow(missing_docs)]
pub struct Timestamp {
    pub sec: i64,
    pub nsec: u32,
}

impl Timestamp {
    /// The system clock.
    #[must_use]
    pub fn now() -> Self {
        let d = std::time::SystemTime::now();
        match d.duration_since(std::time::UNIX_EPOCH) {
            Ok(d) => Self { sec: d.as_secs().cast_signed(), nsec: d.subsec_nanos() },
            Err(e) => {
                let d = e.duration();
                let (mut sec, mut nsec) = (-d.as_secs().cast_signed(), d.subsec_nanos());
                if nsec > 0 {
                    sec -= 1;
                    nsec = 1_000_000_000 - nsec;
                }
                Self { sec, nsec }
            }
        }
    }
}

/// What `stat` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Attr {
    pub id: InodeId,
    /// Transaction that made the inode. It tells an inode from an earlier one of the same number.
    pub generation: Generation,
    pub kind: FileKind,
    /// Permission bits, `07777`.
    pub perm: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// Device number: (major << 20) | minor, the internal form of the format.
    pub rdev: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes allocated (`st_blocks * 512`), delayed data included.
    pub bytes: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    /// Creation.
    pub otime: Timestamp,
    /// btrfs inode flags as on disk.
    pub flags: u64,
}

/// Name and value of an extended attribute.
pub type Xattr = (Vec<u8>, Vec<u8>);

/// All attributes of an inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surveyed {
    /// What `stat` shows, and more.
    pub attr: Attr,
    /// Extended attributes that can be read, sorted by name.
    pub xattrs: Vec<Xattr>,
}

/// Changes for [`Filesystem::setattr`](crate::Filesystem). `None` leaves a field as it is. The
/// ctime always advances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SetAttr {
    pub perm: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    pub ctime: Option<Timestamp>,
    /// New inode flags (btrfs numbering), for `chattr`.
    pub flags: Option<u64>,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SetTime {
    Now,
    To(Timestamp),
}

/// A new inode, for calls that create one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewInode<'a> {
    /// Type.
    pub kind: FileKind,
    /// Permission bits, with the umask and the default ACL applied.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group, with set-gid inheritance applied.
    pub gid: u32,
    /// Device number, (major << 20) | minor; 0 otherwise.
    pub rdev: u64,
    /// Target of a symlink; empty otherwise.
    pub target: &'a [u8],
    /// Extended attributes that it has from the start (inherited ACLs): name, value.
    pub xattrs: &'a [(Vec<u8>, Vec<u8>)],
}

/// A directory entry as a listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Raw name.
    pub name: &'a [u8],
    /// The inode it leads to, also if that is the root of a subvolume.
    pub id: InodeId,
    /// Its type.
    pub kind: FileKind,
    /// Where to go on after this entry: the caller passes it to the next call. It stays valid while
    /// entries come and go.
    pub next: u64,
}

/// What rename does where the new name exists, and what it does besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// Replace (POSIX).
    Replace,
    /// Fail with `Exists` (RENAME_NOREPLACE).
    NoReplace,
    /// Swap the two (RENAME_EXCHANGE).
    Exchange,
    /// Leave a whiteout (character device 0:0) at the old name, owned by (uid, gid).
    Whiteout {
        /// Owner of the whiteout.
        uid: u32,
        /// Group of the whiteout.
        gid: u32,
    },
}

/// What setxattr does where the attribute exists or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrMode {
    /// Create or replace.
    Set,
    /// Fail if it exists.
    Create,
    /// Fail if it does not exist.
    Replace,
}

/// What `seek` looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// SEEK_DATA.
    Data,
    /// SEEK_HOLE.
    Hole,
}

/// Where an extent of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentPlace {
    /// In the leaf that has its item.
    Leaf,
    /// On the device.
    Device {
        /// Logical address of the extent.
        at: Logical,
        /// Its bytes there.
        len: u64,
        /// Where the file's part begins in the uncompressed extent.
        offset: u64,
        /// Does it hold data, rather than reserved space that reads as zeros?
        written: bool,
        /// Is it compressed?
        compressed: bool,
        /// Does anything else refer to it: another file, or a snapshot?
        shared: bool,
    },
}

/// An extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedExtent {
    /// First byte of the file that it covers.
    pub start: u64,
    /// Bytes of the file, rounded up to sectors.
    pub len: u64,
    /// Where they are.
    pub place: ExtentPlace,
}

/// An extent that was written to a file of a subvolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewExtent {
    /// The file's number in the subvolume.
    pub ino: u64,
    /// First byte of the file that it covers.
    pub start: u64,
    /// Bytes of the file.
    pub len: u64,
    /// Where the extent is. `None` for holes that have items, and for data in leaves.
    pub at: Option<Logical>,
    /// Where the file's part begins in the uncompressed extent.
    pub offset: u64,
    /// The transaction that wrote it.
    pub generation: Generation,
    /// Is the data in the leaf?
    pub in_leaf: bool,
    /// Is it reserved space, which reads as zeros?
    pub reserved: bool,
    /// Is it compressed?
    pub compressed: bool,
}

/// Data that is compressed already. It may be more than the file gets of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedData<'a> {
    /// How it is compressed.
    pub compression: Compression,
    /// It.
    pub data: &'a [u8],
    /// Bytes that it has unpacked.
    pub unpacked_len: u64,
    /// Where the file's bytes begin in these.
    pub offset: u64,
    /// The file's bytes.
    pub len: u64,
}

/// The outcome of an attempt to give two ranges the same extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deduped {
    /// They have the same bytes, and now the same extents where that is possible.
    Same {
        /// Bytes of the range.
        bytes: u64,
        /// Bytes that had extents of their own before, rounded up to sectors.
        shared: u64,
    },
    /// Their bytes differ. Nothing was changed.
    Differs,
}

/// What to do with a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Fallocate {
    /// Reserve space on the device where the range has none. The file grows to the end of the
    /// range, except with `keep_size`.
    Allocate { keep_size: bool },
    /// Make the range read as zeros, with space reserved for it. Sizes are as for `Allocate`.
    Zero { keep_size: bool },
    /// Make the range a hole (FALLOC_FL_PUNCH_HOLE). The size stays.
    Punch,
}

/// Which subvolume is the root of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SubvolChoice {
    /// The file system's default.
    #[default]
    Default,
    /// By tree id.
    Id(u64),
    /// By path from the top-level subvolume.
    Path(Vec<u8>),
}

/// How data is compressed where the inode does not say otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// Method and level.
    pub packing: Packing,
    /// Try to compress all data, also if it does not look promising, or its inode is marked as
    /// incompressible.
    pub force: bool,
}

/// How to open a file system.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Never write to the device.
    pub read_only: bool,
    /// With `read_only`: if an image has a log to replay, show the last commit instead of refusing
    /// to open it.
    pub no_log_replay: bool,
    /// With `read_only`: open metadata dumps, too. Names and attributes can be read. Data and
    /// targets of links are zeros.
    pub metadata_dump: bool,
    /// Open a file system of which devices are missing, if the others have everything.
    pub degraded: bool,
    /// Root of the mount.
    pub subvol: SubvolChoice,
    /// Bytes of memory for clean nodes, dirty nodes and dirty data together.
    pub cache_size: u64,
    /// Longest time after which changes are committed by themselves. `None`: only on request or by
    /// size.
    pub commit_interval: Option<std::time::Duration>,
    /// Compression of new data. `None`: only for inodes that have the property.
    pub compress: Option<Compress>,
    /// Tell the device which space was freed, when no durable superblock needs it any more.
    pub discard: bool,
    /// Longest file, in bytes, that is kept in its leaf. 0: none. It is always less than a sector.
    pub max_inline: u64,
    /// New files are overwritten in place where that is possible, and have no checksums
    /// (`nodatacow`).
    pub no_data_cow: bool,
    /// New files have no checksums (`nodatasum`).
    pub no_data_sum: bool,
    /// Chunks of data are freed in the background, of which less than so many percent are used. It
    /// is looked for them as often as changes are committed by themselves. `None`: never.
    pub reclaim: Option<u8>,
    /// Knobs for experiments and tests.
    pub tuning: Tuning,
}

/// Files that are longer are not in their leaf, by default and as on Linux.
const MAX_INLINE: u64 = 2048;

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            no_log_replay: false,
            metadata_dump: false,
            degraded: false,
            subvol: SubvolChoice::Default,
            cache_size: 256 << 20,
            commit_interval: Some(std::time::Duration::from_secs(5)),
            compress: None,
            discard: false,
            max_inline: MAX_INLINE,
            no_data_cow: false,
            no_data_sum: false,
            reclaim: None,
            tuning: Tuning::default(),
        }
    }
}

/// `statfs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// Bytes in all, as seen through the data profile.
    pub total: u64,
    /// Bytes free for data.
    pub free: u64,
    /// Bytes an ordinary user may still write.
    pub available: u64,
    /// Unit of allocation.
    pub block_size: u32,
    /// Identifies the file system and the subvolume.
    pub fsid: [u8; 16],
}

/// Facts about an open file system.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct FsInfo {
    pub fsid: [u8; 16],
    pub label: Vec<u8>,
    pub generation: Generation,
    pub nodesize: u32,
    pub sectorsize: u32,
    pub csum: CsumType,
    pub total_bytes: u64,
    pub bytes_used: u64,
    pub read_only: bool,
    /// There is a log that was not replayed, so the last commit is shown.
    pub has_unreplayed_log: bool,
    /// It is a metadata dump, which has no data.
    pub metadata_dump: bool,
    /// Devices that it is read without.
    pub missing_devices: Vec<MissingDevice>,
    /// Devices that are read only where the others do not suffice.
    pub stale_devices: Vec<StaleDevice>,
    /// Chunks of which a part cannot be read, because it was on devices that are missing.
    pub lost_chunks: Vec<LostChunk>,
}

/// A chunk that lacks more devices than its profile may lose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostChunk {
    /// Its first address.
    pub start: Logical,
    /// Its bytes.
    pub len: u64,
    /// Its profile.
    pub profile: &'static str,
    /// The devices that it lacks.
    pub devices: Vec<DeviceId>,
}

/// A device of a file system that was not there when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingDevice {
    /// Its number.
    pub id: DeviceId,
    /// Its uuid.
    pub uuid: [u8; 16],
    /// The file system to which it belongs ([`larder_format::Superblock::metadata_fsid`]), if it is
    /// a seed.
    pub seed: Option<[u8; 16]>,
}

impl fmt::Display for MissingDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({}", self.id, uuid::Uuid::from_bytes(self.uuid))?;
        match self.seed {
            Some(fsid) => write!(f, ", a seed: {})", uuid::Uuid::from_bytes(fsid)),
            None => f.write_str(")"),
        }
    }
}

/// A device that was away while others were written, or that a power cut has left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleDevice {
    /// Its number.
    pub id: DeviceId,
    /// Its name.
    pub name: String,
    /// The last commit that reached it.
    pub generation: Generation,
    /// The last commit of the file system.
    pub newest: Generation,
}

impl fmt::Display for StaleDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, name, generation, newest } = self;
        if generation == newest {
            return write!(f, "device {id} ({name}) lacks the last log of generation {newest}");
        }
        write!(f, "device {id} ({name}) is of generation {generation}, the others of {newest}")
    }
}

thread_local! {
    static NO_WAIT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` on a thread that must not wait. Engine calls inside return [`crate::Error::WouldBlock`]
/// instead of waiting for a device, a commit or space, and always before they have changed
/// anything.
pub fn no_wait<T>(f: impl FnOnce() -> T) -> T {
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            NO_WAIT.set(self.0);
        }
    }
    let _reset = Reset(NO_WAIT.replace(true));
    f()
}

/// To be called before each wait. An error means that the thread must not wait.
#[allow(dead_code)]
pub(crate) fn may_wait() -> crate::Result<()> {
    if NO_WAIT.get() { Err(crate::Error::WouldBlock) } else { Ok(()) }
}

/// From here on the operation has changed something, so it may wait again until the guard is
/// dropped.
#[allow(dead_code)]
pub(crate) fn past_no_return() -> impl Drop {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            NO_WAIT.set(self.0);
        }
    }
    Restore(NO_WAIT.replace(false))
}

/// Converts a time to the form of the format.
pub(crate) fn to_timespec(t: Timestamp) -> Timespec {
    Timespec::new(t.sec, t.nsec)
}
/// Converts a time from the form of the format.
pub(crate) fn from_timespec(t: Timespec) -> Timestamp {
    Timestamp { sec: t.sec.get(), nsec: t.nsec.get() }
}
