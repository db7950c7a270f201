//! DIR_ITEM, DIR_INDEX and XATTR_ITEM: names seen from the directory, and extended attributes.
//!
//! All three share one layout: entries of a 30-byte header, the name and, for an attribute, its
//! value. A DIR_ITEM or XATTR_ITEM holds every entry whose name has the hash that is the key's
//! offset, so it may hold several; a DIR_INDEX holds exactly one. Hidden here: the layout and the
//! editing of such lists.
//!
//! A name is any 1 to 255 bytes as far as this module is concerned. A hostile image can hold `..`
//! or a `/`; a caller that turns names into paths of the host asks [`is_plain_name`] first.

use super::{exact, name_len, name_len_to_disk, prefix, take};
use crate::{DiskKey, FormatError, FormatResult, Generation, Key, KeyType, ObjectId};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Type of a directory entry, numbered as on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum FileType {
    /// Not on disk: for readers that could not find out.
    Unknown = 0,
    Regular = 1,
    Directory = 2,
    CharDevice = 3,
    BlockDevice = 4,
    Fifo = 5,
    Socket = 6,
    Symlink = 7,
    /// Entries of XATTR_ITEM.
    Xattr = 8,
}

impl FileType {
    /// From the entry's number.
    ///
    /// # Errors
    /// The number is not 1 to 8.
    pub fn from_disk(v: u8) -> FormatResult<Self> {
        Ok(match v {
            1 => Self::Regular,
            2 => Self::Directory,
            3 => Self::CharDevice,
            4 => Self::BlockDevice,
            5 => Self::Fifo,
            6 => Self::Socket,
            7 => Self::Symlink,
            8 => Self::Xattr,
            _ => {
                return Err(FormatError::new(format!(
                    "directory entry has type {v}, expected 1 to 8"
                )));
            }
        })
    }
    /// The entry's number.
    #[must_use]
    pub fn to_disk(self) -> u8 {
        self as u8
    }
}

/// What stands before the name.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
struct DirEntryHeader {
    location: DiskKey,
    transid: U64,
    data_len: U16,
    name_len: U16,
    kind: u8,
}
const _: () = assert!(size_of::<DirEntryHeader>() == 30);

/// Bytes of an entry before its name.
pub const ENTRY_HEADER_SIZE: usize = 30;

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntryRef<'a> {
    /// What the name stands for: `(inode, INODE_ITEM, 0)`, `(subvolume, ROOT_ITEM, -1)`, all zero
    /// for an attribute.
    pub location: Key,
    /// Transaction that made the entry.
    pub transid: Generation,
    /// Type of what the name stands for.
    pub kind: FileType,
    /// 1 to 255 bytes.
    pub name: &'a [u8],
    /// Value of an extended attribute; otherwise empty.
    pub data: &'a [u8],
}

impl<'a> DirEntryRef<'a> {
    /// The entry of a file or directory.
    #[must_use]
    pub fn inode(ino: ObjectId, transid: Generation, kind: FileType, name: &'a [u8]) -> Self {
        Self { location: Key::new(ino, KeyType::INODE_ITEM, 0), transid, kind, name, data: &[] }
    }
    /// The entry of a subvolume.
    #[must_use]
    pub fn subvolume(tree: ObjectId, transid: Generation, name: &'a [u8]) -> Self {
        let location = Key::new(tree, KeyType::ROOT_ITEM, u64::MAX);
        Self { location, transid, kind: FileType::Directory, name, data: &[] }
    }
    /// An extended attribute.
    #[must_use]
    pub fn xattr(transid: Generation, name: &'a [u8], data: &'a [u8]) -> Self {
        Self { location: Key::default(), transid, kind: FileType::Xattr, name, data }
    }
    /// Bytes that the entry takes.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        ENTRY_HEADER_SIZE + self.name.len() + self.data.len()
    }
    /// Appends the entry to an item's bytes.
    ///
    /// # Panics
    /// If the name has not 1 to 255 bytes, or the data more than 65535: callers refuse those where
    /// they come in.
    pub fn append_to(&self, item: &mut Vec<u8>) {
        let header = DirEntryHeader {
            location: self.location.into(),
            transid: U64::new(self.transid.0),
            data_len: u16::try_from(self.data.len()).expect("data of at most 65535 bytes").into(),
            name_len: name_len_to_disk(self.name).into(),
            kind: self.kind.to_disk(),
        };
        item.extend_from_slice(header.as_bytes());
        item.extend_from_slice(self.name);
        item.extend_from_slice(self.data);
    }
    /// An item with this entry alone.
    ///
    /// # Panics
    /// As [`Self::append_to`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut item = Vec::with_capacity(self.encoded_len());
        self.append_to(&mut item);
        item
    }
}

/// The entries of a DIR_ITEM, DIR_INDEX or XATTR_ITEM, in the order they were added. Ends after the
/// first error.
#[derive(Clone, Debug)]
pub struct DirEntries<'a>(&'a [u8]);

impl<'a> DirEntries<'a> {
    /// Over an item's bytes.
    #[must_use]
    pub fn new(item: &'a [u8]) -> Self {
        Self(item)
    }
    fn step(&self) -> FormatResult<(DirEntryRef<'a>, &'a [u8])> {
        let (header, rest) = prefix::<DirEntryHeader>(self.0, "directory entry")?;
        let kind = FileType::from_disk(header.kind)?;
        let data_len = header.data_len.get();
        if data_len != 0 && kind != FileType::Xattr {
            return Err(FormatError::new(format!(
                "directory entry of type {} has data_len {data_len}, expected 0",
                header.kind
            )));
        }
        let len = name_len(header.name_len.get(), "directory entry")?;
        let (name, rest) = take(rest, len, "name of a directory entry")?;
        let (data, rest) = take(rest, data_len.into(), "data of a directory entry")?;
        let (location, transid) = (header.location.into(), Generation(header.transid.get()));
        Ok((DirEntryRef { location, transid, kind, name, data }, rest))
    }
}

impl<'a> Iterator for DirEntries<'a> {
    type Item = FormatResult<DirEntryRef<'a>>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let step = self.step();
        self.0 = step.as_ref().map_or(&[], |(_, rest)| rest);
        Some(step.map(|(entry, _)| entry))
    }
}

/// The one entry of a DIR_INDEX item.
///
/// # Errors
/// It is malformed, or there is none, or more than one.
pub fn single_entry(item: &[u8]) -> FormatResult<DirEntryRef<'_>> {
    let mut entries = DirEntries::new(item);
    let first =
        entries.next().ok_or_else(|| FormatError::new("directory index item is empty"))??;
    if entries.next().is_some() {
        return Err(FormatError::new(format!(
            "directory index item has {} bytes, expected {} for its one entry",
            item.len(),
            first.encoded_len()
        )));
    }
    Ok(first)
}

/// Finds the entry with this name.
///
/// # Errors
/// An entry before it is malformed.
pub fn find_entry<'a>(item: &'a [u8], name: &[u8]) -> FormatResult<Option<DirEntryRef<'a>>> {
    for entry in DirEntries::new(item) {
        let entry = entry?;
        if entry.name == name {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

/// Takes the entry with this name out of an item; says whether it was there. An item that becomes
/// empty has to be deleted by the caller.
///
/// # Errors
/// An entry before it is malformed; the item is unchanged.
pub fn remove_entry(item: &mut Vec<u8>, name: &[u8]) -> FormatResult<bool> {
    let mut at = 0;
    for entry in DirEntries::new(item) {
        let entry = entry?;
        let len = entry.encoded_len();
        if entry.name == name {
            item.drain(at..at + len);
            return Ok(true);
        }
        at += len;
    }
    Ok(false)
}

/// Can this name stand in a directory of the host: not empty, not `.` or `..`, without `/` and NUL?
#[must_use]
pub fn is_plain_name(name: &[u8]) -> bool {
    !name.is_empty() && name != b"." && name != b".." && !name.iter().any(|b| matches!(b, b'/' | 0))
}

/// DIR_LOG_INDEX: the log is authoritative for the directory's indices from the key's offset to
/// `last`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DirLogIndex {
    /// Last index of the range, itself included.
    pub last: U64,
}
const _: () = assert!(size_of::<DirLogIndex>() == 8);

impl DirLogIndex {
    /// From the item's bytes.
    ///
    /// # Errors
    /// The size is not 8.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        exact(bytes, "directory log index")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_index_holds_exactly_one_entry() {
        let entry = DirEntryRef::inode(ObjectId(300), Generation(7), FileType::Regular, b"name");
        let mut item = entry.encode();
        assert_eq!(single_entry(&item), Ok(entry));
        assert!(single_entry(&[]).is_err());
        entry.append_to(&mut item);
        assert!(single_entry(&item).unwrap_err().0.contains("68 bytes, expected 34"));
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let item =
            DirEntryRef::inode(ObjectId(300), Generation(7), FileType::Regular, b"name").encode();
        let with = |at: usize, v: u8| {
            let mut bytes = item.clone();
            bytes[at] = v;
            DirEntries::new(&bytes).next().unwrap().unwrap_err().0
        };
        assert!(with(29, 9).contains("type 9"));
        assert!(with(29, 0).contains("type 0"));
        assert!(with(25, 3).contains("data_len 3"));
        assert!(with(27, 0).contains("name of 0 bytes"));
        assert!(with(28, 1).contains("name of 260 bytes"));
        assert!(with(27, 5).contains("reaches past the item"));
    }

    #[test]
    fn names_of_the_host() {
        assert!(is_plain_name(b"...") && is_plain_name(b"a\xff"));
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0"] {
            assert!(!is_plain_name(bad));
        }
    }
}
