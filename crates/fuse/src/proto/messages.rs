//! The fixed structures of requests and replies, field by field.

// The derive for layouts makes hidden types that the lint sees.
#![allow(missing_debug_implementations)]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident, $size:literal { $($field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name { $(pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

wire! {
    /// Head of every request.
    InHeader, 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        total_extlen: u16, padding: u16,
    }
    /// Head of every reply: `error` is 0 or a negative errno.
    OutHeader, 16 { len: u32, error: i32, unique: u64, }
    /// Attributes of an inode.
    Attr, 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32,
        rdev: u32, blksize: u32, flags: u32,
    }
    /// Reply to LOOKUP and to everything that makes a name.
    EntryOut, 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr,
    }
    /// Reply to GETATTR and SETATTR.
    AttrOut, 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr, }
    /// FORGET.
    ForgetIn, 8 { nlookup: u64, }
    /// Head of BATCH_FORGET; `count` of [`ForgetOne`] follow.
    BatchForgetIn, 8 { count: u32, dummy: u32, }
    /// One inode of BATCH_FORGET.
    ForgetOne, 16 { nodeid: u64, nlookup: u64, }
    /// GETATTR.
    GetattrIn, 16 { getattr_flags: u32, dummy: u32, fh: u64, }
    /// SETATTR; `valid` says which fields count (see [`fattr`]).
    SetattrIn, 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64,
        ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32,
        unused5: u32,
    }
    /// MKNOD; the name follows.
    MknodIn, 16 { mode: u32, rdev: u32, umask: u32, padding: u32, }
    /// MKDIR; the name follows.
    MkdirIn, 8 { mode: u32, umask: u32, }
    /// RENAME; old and new name follow.
    RenameIn, 8 { newdir: u64, }
    /// RENAME2; old and new name follow.
    Rename2In, 16 { newdir: u64, flags: u32, padding: u32, }
    /// LINK; the new name follows.
    LinkIn, 8 { oldnodeid: u64, }
    /// OPEN and OPENDIR.
    OpenIn, 8 { flags: u32, open_flags: u32, }
    /// Reply to OPEN, OPENDIR, and second half of TMPFILE's.
    OpenOut, 16 { fh: u64, open_flags: u32, backing_id: i32, }
    /// CREATE and TMPFILE; the name follows.
    CreateIn, 16 { flags: u32, mode: u32, umask: u32, open_flags: u32, }
    /// RELEASE and RELEASEDIR.
    ReleaseIn, 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    /// FLUSH.
    FlushIn, 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64, }
    /// READ, READDIR, READDIRPLUS.
    ReadIn, 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    }
    /// WRITE; the data follow.
    WriteIn, 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    }
    /// Reply to WRITE and COPY_FILE_RANGE.
    WriteOut, 8 { size: u32, padding: u32, }
    /// Reply to STATFS.
    StatfsOut, 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32,
        frsize: u32,
        padding: u32, spare: [u32; 6],
    }
    /// FSYNC and FSYNCDIR.
    FsyncIn, 16 { fh: u64, fsync_flags: u32, padding: u32, }
    /// SETXATTR in its extended form; name and value follow.
    SetxattrIn, 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32, }
    /// GETXATTR (the name follows) and LISTXATTR; `size` 0 asks for the length only.
    GetxattrIn, 8 { size: u32, padding: u32, }
    /// Length of an xattr or of the list.
    GetxattrOut, 8 { size: u32, padding: u32, }
    /// ACCESS.
    AccessIn, 8 { mask: u32, padding: u32, }
    /// INTERRUPT.
    InterruptIn, 8 { unique: u64, }
    /// IOCTL; `in_size` bytes follow.
    IoctlIn, 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32, }
    /// Head of the reply to IOCTL; up to `out_size` bytes follow.
    IoctlOut, 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32, }
    /// FALLOCATE.
    FallocateIn, 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, }
    /// LSEEK.
    LseekIn, 24 { fh: u64, offset: u64, whence: u32, padding: u32, }
    /// Reply to LSEEK.
    LseekOut, 8 { offset: u64, }
    /// Both forms of COPY_FILE_RANGE.
    CopyFileRangeIn, 56 {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    /// Reply to the 64-bit form.
    CopyFileRangeOut, 8 { bytes_copied: u64, }
    /// SYNCFS.
    SyncfsIn, 8 { padding: u64, }
    /// STATX.
    StatxIn, 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32, }
    /// A time in STATX.
    StatxTime, 16 { sec: i64, nsec: u32, reserved: i32, }
    /// Attributes in STATX.
    StatxAttr, 256 {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16,
        spare0: u16,
        ino: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: StatxTime, btime: StatxTime, ctime: StatxTime, mtime: StatxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    /// Reply to STATX.
    StatxOut, 288 {
        attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: StatxAttr,
    }
    /// Head of a directory record; the name follows, padded to eight bytes.
    Dirent, 24 { ino: u64, off: u64, namelen: u32, typ: u32, }
    /// Last part of a ring entry's header: `commit_id` names the request in the answer.
    RingEntryInOut, 32 {
        flags: u64, commit_id: u64, payload_size: u32, padding: u32, reserved: u64,
    }
    /// Command area of a submission for FUSE over io_uring.
    RingCommand, 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6], }
}

/// Bits of [`SetattrIn::valid`].
#[allow(missing_docs)]
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// [`WriteIn::write_flags`]: delayed write from the page cache, the caller is not its author.
pub const WRITE_CACHE: u32 = 1 << 0;
/// [`WriteIn::write_flags`]: clear set-user-id and set-group-id.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// [`FsyncIn::fsync_flags`]: data only.
pub(crate) const FSYNC_DATASYNC: u32 = 1 << 0;
/// [`SetxattrIn::setxattr_flags`]: the mode set with an access ACL loses set-group-id.
pub(crate) const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// [`OpenOut::open_flags`]: keep cached data at open.
pub(crate) const FOPEN_KEEP_CACHE: u32 = 1 << 1;
