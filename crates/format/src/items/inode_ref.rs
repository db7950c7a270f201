//! INODE_REF and INODE_EXTREF: the names of an inode, seen from the inode.
//!
//! Both items are lists without a count: entries tile the item. An INODE_REF item holds all names
//! that one directory has for the inode; an INODE_EXTREF item the names whose hash with their
//! directory is the key's offset, of whatever directory. Hidden here: the tiling, and how an entry
//! is added or taken out.

use super::{name_len, name_len_to_disk, prefix, take};
use crate::{FormatResult, ObjectId};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RefHeader {
    index: U64,
    name_len: U16,
}
const _: () = assert!(size_of::<RefHeader>() == 10);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ExtRefHeader {
    parent: U64,
    index: U64,
    name_len: U16,
}
const _: () = assert!(size_of::<ExtRefHeader>() == 18);

/// Bytes of an INODE_REF entry before its name.
pub const REF_HEADER_SIZE: usize = 10;
/// Bytes of an INODE_EXTREF entry before its name.
const EXTREF_HEADER_SIZE: usize = 18;

/// One entry of an INODE_REF item; its directory is the offset of the item's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeRef<'a> {
    /// Offset of the DIR_INDEX key of the same name.
    pub index: u64,
    /// The name, 1 to 255 bytes.
    pub name: &'a [u8],
}

/// One entry of an INODE_EXTREF item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtRef<'a> {
    /// The directory.
    pub parent: ObjectId,
    /// Offset of the DIR_INDEX key of the same name.
    pub index: u64,
    /// The name, 1 to 255 bytes.
    pub name: &'a [u8],
}

impl InodeRef<'_> {
    /// Bytes that the entry takes.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        REF_HEADER_SIZE + self.name.len()
    }
    /// Appends the entry to an item's bytes.
    ///
    /// # Panics
    /// If the name has not 1 to 255 bytes.
    pub fn append_to(&self, item: &mut Vec<u8>) {
        let header =
            RefHeader { index: U64::new(self.index), name_len: name_len_to_disk(self.name).into() };
        item.extend_from_slice(header.as_bytes());
        item.extend_from_slice(self.name);
    }
}

impl ExtRef<'_> {
    /// Bytes that the entry takes.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        EXTREF_HEADER_SIZE + self.name.len()
    }
    /// Appends the entry to an item's bytes.
    ///
    /// # Panics
    /// If the name has not 1 to 255 bytes.
    pub fn append_to(&self, item: &mut Vec<u8>) {
        let header = ExtRefHeader {
            parent: U64::new(self.parent.0),
            index: U64::new(self.index),
            name_len: name_len_to_disk(self.name).into(),
        };
        item.extend_from_slice(header.as_bytes());
        item.extend_from_slice(self.name);
    }
}

/// The entries of an INODE_REF item, in the order they were added. Ends after the first error.
#[derive(Clone, Debug)]
pub struct InodeRefs<'a>(&'a [u8]);

impl<'a> InodeRefs<'a> {
    /// Over an item's bytes.
    #[must_use]
    pub fn new(item: &'a [u8]) -> Self {
        Self(item)
    }
    fn step(&self) -> FormatResult<(InodeRef<'a>, &'a [u8])> {
        let (header, rest) = prefix::<RefHeader>(self.0, "inode ref")?;
        let (name, rest) =
            take(rest, name_len(header.name_len.get(), "inode ref")?, "name of an inode ref")?;
        Ok((InodeRef { index: header.index.get(), name }, rest))
    }
}

impl<'a> Iterator for InodeRefs<'a> {
    type Item = FormatResult<InodeRef<'a>>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let step = self.step();
        self.0 = step.as_ref().map_or(&[], |(_, rest)| rest);
        Some(step.map(|(entry, _)| entry))
    }
}

/// The entries of an INODE_EXTREF item, in the order they were added. Ends after the first error.
#[derive(Clone, Debug)]
pub struct ExtRefs<'a>(&'a [u8]);

impl<'a> ExtRefs<'a> {
    /// Over an item's bytes.
    #[must_use]
    pub fn new(item: &'a [u8]) -> Self {
        Self(item)
    }
    fn step(&self) -> FormatResult<(ExtRef<'a>, &'a [u8])> {
        let (header, rest) = prefix::<ExtRefHeader>(self.0, "inode extref")?;
        let len = name_len(header.name_len.get(), "inode extref")?;
        let (name, rest) = take(rest, len, "name of an inode extref")?;
        let entry =
            ExtRef { parent: ObjectId(header.parent.get()), index: header.index.get(), name };
        Ok((entry, rest))
    }
}

impl<'a> Iterator for ExtRefs<'a> {
    type Item = FormatResult<ExtRef<'a>>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let step = self.step();
        self.0 = step.as_ref().map_or(&[], |(_, rest)| rest);
        Some(step.map(|(entry, _)| entry))
    }
}

/// Finds the entry with this name in an INODE_REF item.
///
/// # Errors
/// An entry before it is malformed.
pub fn find_ref<'a>(item: &'a [u8], name: &[u8]) -> FormatResult<Option<InodeRef<'a>>> {
    for entry in InodeRefs::new(item) {
        let entry = entry?;
        if entry.name == name {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

/// Finds the entry with this directory and name in an INODE_EXTREF item.
///
/// # Errors
/// An entry before it is malformed.
pub fn find_extref<'a>(
    item: &'a [u8],
    parent: ObjectId,
    name: &[u8],
) -> FormatResult<Option<ExtRef<'a>>> {
    for entry in ExtRefs::new(item) {
        let entry = entry?;
        if entry.parent == parent && entry.name == name {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

/// Takes the entry with this name out of an INODE_REF item and returns its index; `None` if it is
/// not there. An item that becomes empty has to be deleted by the caller.
///
/// # Errors
/// An entry before it is malformed; the item is unchanged.
pub fn remove_ref(item: &mut Vec<u8>, name: &[u8]) -> FormatResult<Option<u64>> {
    let mut at = 0;
    for entry in InodeRefs::new(item) {
        let entry = entry?;
        let (index, len) = (entry.index, entry.encoded_len());
        if entry.name == name {
            item.drain(at..at + len);
            return Ok(Some(index));
        }
        at += len;
    }
    Ok(None)
}

/// Takes the entry with this directory and name out of an INODE_EXTREF item and returns its index;
/// `None` if it is not there. An item that becomes empty has to be deleted by the caller.
///
/// # Errors
/// An entry before it is malformed; the item is unchanged.
pub fn remove_extref(
    item: &mut Vec<u8>,
    parent: ObjectId,
    name: &[u8],
) -> FormatResult<Option<u64>> {
    let mut at = 0;
    for entry in ExtRefs::new(item) {
        let entry = entry?;
        let (index, len) = (entry.index, entry.encoded_len());
        if entry.parent == parent && entry.name == name {
            item.drain(at..at + len);
            return Ok(Some(index));
        }
        at += len;
    }
    Ok(None)
}
