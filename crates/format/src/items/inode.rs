//! INODE_ITEM: what `stat` tells of a file, and its flags.
//!
//! Hidden here: the layout, the numbering of the flags (not that of `chattr`'s ioctl), Linux's
//! internal form of device numbers, and how file types stand in a mode.

use super::dir::FileType;
use super::exact;
use crate::{FormatError, FormatResult, Generation};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A point in time: seconds since 1970 (negative before), and nanoseconds.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Timespec {
    pub sec: I64,
    pub nsec: U32,
}
const _: () = assert!(size_of::<Timespec>() == 12);

impl Timespec {
    /// From seconds since 1970 and nanoseconds.
    #[must_use]
    pub fn new(sec: i64, nsec: u32) -> Self {
        Self { sec: I64::new(sec), nsec: U32::new(nsec) }
    }
}

/// INODE_ITEM, 160 bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct InodeItem {
    /// Transaction that created the inode; 0 only in logs.
    pub generation: U64,
    /// Transaction of the last change.
    pub transid: U64,
    /// File size in bytes; of a directory twice the sum of its name lengths.
    pub size: U64,
    /// Bytes that extents account for (`st_blocks` × 512).
    pub nbytes: U64,
    /// Unused, 0.
    pub block_group: U64,
    /// Links; always 1 for a directory, 0 for an orphan.
    pub nlink: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Type and permissions, as in `stat`.
    pub mode: U32,
    /// Device number of a device node: `(major << 20) | minor`.
    pub rdev: U64,
    /// [`InodeFlags`].
    pub flags: U64,
    /// Rises with every change.
    pub sequence: U64,
    /// Zero.
    pub reserved: [U64; 4],
    /// Last access.
    pub atime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
    /// Last change of the data.
    pub mtime: Timespec,
    /// Birth.
    pub otime: Timespec,
}
const _: () = assert!(size_of::<InodeItem>() == 160);
const _: () = assert!(std::mem::offset_of!(InodeItem, nlink) == 40);
const _: () = assert!(std::mem::offset_of!(InodeItem, mode) == 52);
const _: () = assert!(std::mem::offset_of!(InodeItem, sequence) == 72);

bitflags::bitflags! {
    /// Flags of an inode, numbered as on disk.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[allow(missing_docs)]
    pub struct InodeFlags: u64 {
        /// Data has no checksums.
        const NODATASUM = 1 << 0;
        /// Data may be written in place.
        const NODATACOW = 1 << 1;
        const READONLY = 1 << 2;
        const NOCOMPRESS = 1 << 3;
        /// Has, or once had, a preallocated extent.
        const PREALLOC = 1 << 4;
        const SYNC = 1 << 5;
        const IMMUTABLE = 1 << 6;
        const APPEND = 1 << 7;
        const NODUMP = 1 << 8;
        const NOATIME = 1 << 9;
        const DIRSYNC = 1 << 10;
        const COMPRESS = 1 << 11;
        /// Belongs in the inode embedded in a ROOT_ITEM.
        const ROOT_ITEM_INIT = 1 << 31;
        /// Contents are sealed by fs-verity.
        const VERITY = 1 << 32;
    }
}

impl InodeItem {
    /// From the item's bytes.
    ///
    /// # Errors
    /// The size is not 160.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        exact(bytes, "inode item")
    }
    /// Transaction that created the inode.
    #[must_use]
    pub fn created(&self) -> Generation {
        Generation(self.generation.get())
    }
    /// Known and unknown flags.
    #[must_use]
    pub fn inode_flags(&self) -> InodeFlags {
        InodeFlags::from_bits_retain(self.flags.get())
    }
    /// Sets the flags.
    pub fn set_inode_flags(&mut self, flags: InodeFlags) {
        self.flags = U64::new(flags.bits());
    }
    /// Type of the file.
    ///
    /// # Errors
    /// The mode has none of the seven types, or bits beyond type and permissions.
    pub fn file_type(&self) -> FormatResult<FileType> {
        mode_to_type(self.mode.get())
    }
    /// Is it a directory?
    #[must_use]
    pub fn is_dir(&self) -> bool {
        self.mode.get() & S_IFMT == S_IFDIR
    }
}

/// Mask of the type within a mode.
pub const S_IFMT: u32 = 0o170_000;
/// Type bits: socket.
pub const S_IFSOCK: u32 = 0o140_000;
/// Type bits: symbolic link.
pub const S_IFLNK: u32 = 0o120_000;
/// Type bits: regular file.
pub const S_IFREG: u32 = 0o100_000;
/// Type bits: block device.
pub const S_IFBLK: u32 = 0o060_000;
/// Type bits: directory.
pub const S_IFDIR: u32 = 0o040_000;
/// Type bits: character device.
pub const S_IFCHR: u32 = 0o020_000;
/// Type bits: fifo.
pub const S_IFIFO: u32 = 0o010_000;
/// Permission bits of a mode, set-id and sticky included.
pub const PERMISSIONS: u32 = 0o7777;

/// Type of the file that has this mode.
///
/// # Errors
/// The mode has none of the seven types, or bits beyond type and permissions.
pub fn mode_to_type(mode: u32) -> FormatResult<FileType> {
    if mode & !(S_IFMT | PERMISSIONS) != 0 {
        return Err(FormatError::new(format!(
            "mode {mode:#o} has bits beyond type and permissions"
        )));
    }
    Ok(match mode & S_IFMT {
        S_IFREG => FileType::Regular,
        S_IFDIR => FileType::Directory,
        S_IFCHR => FileType::CharDevice,
        S_IFBLK => FileType::BlockDevice,
        S_IFIFO => FileType::Fifo,
        S_IFSOCK => FileType::Socket,
        S_IFLNK => FileType::Symlink,
        _ => return Err(FormatError::new(format!("mode {mode:#o} has no known file type"))),
    })
}

/// Type bits of a mode; `None` for the two types that no inode has.
#[must_use]
pub fn type_to_mode(kind: FileType) -> Option<u32> {
    Some(match kind {
        FileType::Regular => S_IFREG,
        FileType::Directory => S_IFDIR,
        FileType::CharDevice => S_IFCHR,
        FileType::BlockDevice => S_IFBLK,
        FileType::Fifo => S_IFIFO,
        FileType::Socket => S_IFSOCK,
        FileType::Symlink => S_IFLNK,
        FileType::Unknown | FileType::Xattr => return None,
    })
}

/// Major and minor number of an `rdev`.
#[must_use]
#[allow(clippy::cast_possible_truncation)]
pub fn split_rdev(rdev: u64) -> (u32, u32) {
    let rdev = rdev as u32;
    (rdev >> 20, rdev & 0xf_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_types_are_inverse() {
        for v in 1..=7u8 {
            let kind = FileType::from_disk(v).unwrap();
            assert_eq!(mode_to_type(type_to_mode(kind).unwrap() | 0o4755), Ok(kind));
        }
        assert!(mode_to_type(0o644).is_err());
        assert!(mode_to_type(0o200_000 | S_IFREG).is_err());
        assert_eq!(type_to_mode(FileType::Xattr), None);
    }

    #[test]
    fn device_numbers_are_those_of_linux() {
        assert_eq!(split_rdev(271_651_184), (259, 70000));
    }

    #[test]
    fn only_160_bytes_are_an_inode() {
        assert!(InodeItem::parse(&[0; 159]).unwrap_err().0.contains("159 bytes, expected 160"));
        assert!(InodeItem::parse(&[0; 161]).is_err());
        let item =
            InodeItem { nlink: 3.into(), flags: 0x1_8000_0003.into(), ..InodeItem::default() };
        let back = InodeItem::parse(item.as_bytes()).unwrap();
        assert_eq!(back, &item);
        assert_eq!(
            back.inode_flags(),
            InodeFlags::NODATASUM
                | InodeFlags::NODATACOW
                | InodeFlags::ROOT_ITEM_INIT
                | InodeFlags::VERITY
        );
    }
}
