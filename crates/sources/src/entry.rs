//! One file, directory, link or device of what is built.

use crate::TreePath;
use std::io;
use std::ops::Range;

/// A name in the tree that is built, and what is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it is.
    pub path: TreePath,
    /// Owner, mode, times, extended attributes.
    pub attributes: Attributes,
    /// What it is.
    pub kind: Kind,
    /// Entries of one group are names of one inode. They have the same attributes and kind.
    /// `None`: it has no other name. Where other names were replaced or left out, it may turn out
    /// to be the only one of its group.
    pub links: Option<LinkGroup>,
}

/// Names one inode that has several names, within one tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkGroup(pub u64);

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Directory,
    /// A regular file: its size in bytes, and where its contents are. A size of 0 has no locator.
    File {
        size: u64,
        contents: Option<Locator>,
    },
    /// The target, as it was written.
    Symlink(Vec<u8>),
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
    Fifo,
    Socket,
}

/// Major and minor number of a device, if Linux can have them: 12 bits and 20 bits.
pub(crate) fn device_numbers((major, minor): (u64, u64)) -> Option<(u32, u32)> {
    let fits = major < 1 << 12 && minor < 1 << 20;
    fits.then_some((u32::try_from(major).ok()?, u32::try_from(minor).ok()?))
}

/// Everything of an inode but its type and contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits, `07777`.
    pub permissions: u32,
    /// Last change of the contents.
    pub modified: Time,
    /// Last access. `None`: the source does not know; `modified` stands for it.
    pub accessed: Option<Time>,
    /// Last change of the inode. `None`: `modified` stands for it.
    pub changed: Option<Time>,
    /// Creation. `None`: `modified` stands for it.
    pub created: Option<Time>,
    /// Extended attributes (also ACLs and capabilities in the kernel's form), sorted by name, each
    /// name once.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// btrfs inode flags that the source knows of (NODATASUM, NODATACOW, COMPRESS, …), as on disk.
    pub inode_flags: u64,
}

/// Seconds and nanoseconds since the epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub struct Time {
    pub seconds: i64,
    /// Below 1,000,000,000.
    pub nanoseconds: u32,
}

/// The place of a source in the list of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceNumber(pub u32);

/// Where the contents of a file are. Equal locators name equal contents, so files of different
/// layers that have one may share extents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Locator {
    /// Which source has them.
    pub source: SourceNumber,
    /// What the source wrote for itself: a path, an offset in an archive.
    pub key: Vec<u8>,
}

/// The contents of one file, opened. Different threads read different files at the same time.
pub trait Contents: Send {
    /// The parts that are not holes, in order: byte offsets within the file, each end at most its
    /// size. A part may read as zeros all the same.
    fn data(&mut self) -> io::Result<Vec<Range<u64>>>;

    /// Fills `buf` from byte `offset` of the file. An end of file within `buf` is an error: the
    /// source changed while it was read.
    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Names the place of the contents, if that is known without reading them. Within one image,
    /// files of one size whose places are equal have equal contents. Others may have them, too.
    ///
    /// # Errors
    /// What says where they lie cannot be read.
    fn place(&mut self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }
}
