//! EXTENT_ITEM, METADATA_ITEM and the back references: the uses of an extent.
//!
//! An extent's references stand inline in its item as far as they fit and as items of their own
//! (*keyed*) beyond that. Hidden here: the layouts, which differ for each type and between inline
//! and keyed, and the order in which inline references have to stand. Above, a reference is an
//! [`ExtentRef`] with a count, wherever it stands.

use super::{aligned, exact, prefix};
use crate::csum::data_ref_hash;
use crate::{
    DiskKey, FileOffset, FormatError, FormatResult, Generation, Key, KeyType, Logical, ObjectId,
    TreeId,
};
use std::cmp::Reverse;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Flags of an extent item.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ExtentFlags: u64 {
        /// File data.
        const DATA = 1;
        /// A tree node.
        const TREE_BLOCK = 2;
        /// The node's children have references by parent instead of by tree.
        const FULL_BACKREF = 0x100;
    }
}

/// The start of an extent item.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
struct ExtentItemHeader {
    refs: U64,
    generation: U64,
    /// [`ExtentFlags`].
    flags: U64,
}
const _: () = assert!(size_of::<ExtentItemHeader>() == 24);

/// What an EXTENT_ITEM of a node says about it on file systems without skinny metadata.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct TreeBlockInfo {
    /// First key of the node.
    pub key: DiskKey,
    /// Level of the node.
    pub level: u8,
}
const _: () = assert!(size_of::<TreeBlockInfo>() == 18);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DiskDataRef {
    root: U64,
    objectid: U64,
    offset: U64,
    count: U32,
}
const _: () = assert!(size_of::<DiskDataRef>() == 28);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DiskSharedDataRef {
    parent: U64,
    count: U32,
}
const _: () = assert!(size_of::<DiskSharedDataRef>() == 12);

/// A reference to an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExtentRef {
    /// A node, by the tree that reaches it.
    TreeBlock {
        /// The tree.
        root: TreeId,
    },
    /// A node, by the node that points to it.
    SharedBlock {
        /// The pointing node.
        parent: Logical,
    },
    /// Data, by the file that uses it.
    Data {
        /// Subvolume that owns the leaf with the file extent item.
        root: TreeId,
        /// Inode.
        objectid: ObjectId,
        /// File offset at which the extent's first byte would lie; wraps below zero.
        offset: FileOffset,
    },
    /// Data, by the leaf with the file extent item.
    SharedData {
        /// The leaf.
        parent: Logical,
    },
    /// The subvolume that allocated the data (simple quotas). Not counted as a reference.
    Owner {
        /// The subvolume.
        root: TreeId,
    },
}

/// Order of inline references in an item: by type ascending, within a type by sequence descending.
pub type InlineOrder = (KeyType, Reverse<u64>);

impl ExtentRef {
    /// The reference of a file extent item: `at` is the item's key offset, `skipped` its offset
    /// field.
    #[must_use]
    pub fn data(root: TreeId, inode: ObjectId, at: FileOffset, skipped: u64) -> Self {
        Self::Data { root, objectid: inode, offset: at.wrapping_minus(skipped) }
    }
    /// Type number, the same inline and keyed.
    #[must_use]
    pub fn kind(&self) -> KeyType {
        match self {
            Self::TreeBlock { .. } => KeyType::TREE_BLOCK_REF,
            Self::SharedBlock { .. } => KeyType::SHARED_BLOCK_REF,
            Self::Data { .. } => KeyType::EXTENT_DATA_REF,
            Self::SharedData { .. } => KeyType::SHARED_DATA_REF,
            Self::Owner { .. } => KeyType::EXTENT_OWNER_REF,
        }
    }
    /// What references of one type are sorted by: the hash of a data reference, otherwise the root
    /// or parent.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        match *self {
            Self::TreeBlock { root } | Self::Owner { root } => root.0,
            Self::SharedBlock { parent } | Self::SharedData { parent } => parent.0,
            Self::Data { root, objectid, offset } => data_ref_hash(root, objectid, offset),
        }
    }
    /// Position among the inline references of an item.
    #[must_use]
    pub fn inline_order(&self) -> InlineOrder {
        (self.kind(), Reverse(self.sequence()))
    }
    /// Is it a reference to data?
    #[must_use]
    pub fn is_data(&self) -> bool {
        matches!(self, Self::Data { .. } | Self::SharedData { .. } | Self::Owner { .. })
    }
    /// Does the type carry a count? A node's reference counts one.
    #[must_use]
    pub fn has_count(&self) -> bool {
        matches!(self, Self::Data { .. } | Self::SharedData { .. })
    }
    /// Bytes of the inline form.
    #[must_use]
    pub fn inline_len(&self) -> usize {
        match self {
            Self::TreeBlock { .. } | Self::SharedBlock { .. } | Self::Owner { .. } => 9,
            Self::SharedData { .. } => 13,
            Self::Data { .. } => 29,
        }
    }
    /// Appends the inline form. `count` is not stored for references without one.
    fn append_inline(&self, count: u32, item: &mut Vec<u8>) {
        item.push(self.kind().0);
        match self {
            Self::TreeBlock { .. } | Self::SharedBlock { .. } | Self::Owner { .. } => {
                item.extend_from_slice(&self.sequence().to_le_bytes());
            }
            Self::SharedData { parent } => {
                item.extend_from_slice(&parent.0.to_le_bytes());
                item.extend_from_slice(&count.to_le_bytes());
            }
            Self::Data { .. } => item.extend_from_slice(&self.encode_keyed(count)),
        }
    }
    /// Key of the keyed form. For a data reference the first of its keys: when another reference's
    /// item with the same hash is there, it stands at the next free offset. [`Self::Owner`] has an
    /// inline form only.
    #[must_use]
    pub fn keyed(&self, bytenr: Logical) -> Key {
        Key::new(bytenr, self.kind(), self.sequence())
    }
    /// Data of the keyed form; empty for references without a count.
    #[must_use]
    pub fn encode_keyed(&self, count: u32) -> Vec<u8> {
        match *self {
            Self::TreeBlock { .. } | Self::SharedBlock { .. } | Self::Owner { .. } => Vec::new(),
            Self::SharedData { .. } => count.to_le_bytes().to_vec(),
            Self::Data { root, objectid, offset } => DiskDataRef {
                root: U64::new(root.0),
                objectid: U64::new(objectid.0),
                offset: U64::new(offset.0),
                count: U32::new(count),
            }
            .as_bytes()
            .to_vec(),
        }
    }
}

fn parent(value: u64, what: &str) -> FormatResult<Logical> {
    aligned(value, what, "parent")?;
    Ok(Logical(value))
}

fn counted(count: U32, what: &str) -> FormatResult<u32> {
    if count.get() == 0 {
        return Err(FormatError::new(format!("{what} has count 0, expected more")));
    }
    Ok(count.get())
}

fn data_ref(disk: &DiskDataRef) -> FormatResult<(ExtentRef, u32)> {
    const WHAT: &str = "extent data ref";
    aligned(disk.offset.get(), WHAT, "offset")?;
    let r = ExtentRef::Data {
        root: ObjectId(disk.root.get()),
        objectid: ObjectId(disk.objectid.get()),
        offset: FileOffset(disk.offset.get()),
    };
    Ok((r, counted(disk.count, WHAT)?))
}

/// Inline references with their counts, as they stand. Ends after the first error; does not check
/// the order.
struct InlineRefs<'a>(&'a [u8]);

impl<'a> InlineRefs<'a> {
    /// Over what follows the header (and the block info) of an extent item.
    fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }
    fn step(&self) -> FormatResult<((ExtentRef, u32), &'a [u8])> {
        let (&[kind], rest) = self.0.split_first_chunk::<1>().expect("the caller saw a byte");
        let kind = KeyType(kind);
        match kind {
            KeyType::EXTENT_DATA_REF => {
                let (disk, rest) = prefix::<DiskDataRef>(rest, "inline data ref")?;
                Ok((data_ref(disk)?, rest))
            }
            KeyType::SHARED_DATA_REF => {
                let (disk, rest) = prefix::<DiskSharedDataRef>(rest, "inline shared data ref")?;
                let parent = parent(disk.parent.get(), "inline shared data ref")?;
                let count = counted(disk.count, "inline shared data ref")?;
                Ok(((ExtentRef::SharedData { parent }, count), rest))
            }
            KeyType::TREE_BLOCK_REF | KeyType::SHARED_BLOCK_REF | KeyType::EXTENT_OWNER_REF => {
                let (value, rest) = prefix::<U64>(rest, "inline ref")?;
                let value = value.get();
                let r = match kind {
                    KeyType::TREE_BLOCK_REF => ExtentRef::TreeBlock { root: ObjectId(value) },
                    KeyType::EXTENT_OWNER_REF => ExtentRef::Owner { root: ObjectId(value) },
                    _ => {
                        ExtentRef::SharedBlock { parent: parent(value, "inline shared block ref")? }
                    }
                };
                Ok(((r, 1), rest))
            }
            _ => Err(FormatError::new(format!(
                "inline ref has type {}, expected 172, 176, 178, 182 or 184",
                kind.0
            ))),
        }
    }
}

impl Iterator for InlineRefs<'_> {
    type Item = FormatResult<(ExtentRef, u32)>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let step = self.step();
        self.0 = step.as_ref().map_or(&[], |(_, rest)| rest);
        Some(step.map(|(r, _)| r))
    }
}

/// An EXTENT_ITEM or METADATA_ITEM in memory: to be changed and encoded again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentItem {
    /// References, inline and keyed.
    pub refs: u64,
    /// Transaction that allocated the extent.
    pub generation: Generation,
    /// DATA or TREE_BLOCK, and FULL_BACKREF.
    pub flags: ExtentFlags,
    /// In an EXTENT_ITEM of a node; not in a METADATA_ITEM.
    pub block: Option<TreeBlockInfo>,
    /// Inline references with their counts.
    pub inline: Vec<(ExtentRef, u32)>,
}

impl ExtentItem {
    /// From the bytes of an item of type EXTENT_ITEM or METADATA_ITEM.
    ///
    /// # Errors
    /// Cut-off or unknown parts, inline references out of order or of the wrong sort, or more of
    /// them than `refs` says.
    pub fn parse(kind: KeyType, bytes: &[u8]) -> FormatResult<Self> {
        let (head, mut rest) = prefix::<ExtentItemHeader>(bytes, "extent item")?;
        let flags = ExtentFlags::from_bits_retain(head.flags.get());
        let sort = flags & (ExtentFlags::DATA | ExtentFlags::TREE_BLOCK);
        let is_data = sort == ExtentFlags::DATA;
        if (!is_data && sort != ExtentFlags::TREE_BLOCK)
            || !ExtentFlags::all().contains(flags)
            || (is_data && (flags != ExtentFlags::DATA || kind == KeyType::METADATA_ITEM))
        {
            return Err(FormatError::new(format!(
                "{kind} has flags {:#x}, expected 0x1 (data), or 0x2 or 0x102 (node)",
                flags.bits()
            )));
        }
        let mut block = None;
        if kind == KeyType::EXTENT_ITEM && !is_data {
            let (info, tail) = prefix::<TreeBlockInfo>(rest, "tree block info")?;
            if info.level >= crate::MAX_LEVEL {
                return Err(FormatError::new(format!(
                    "tree block info has level {}, expected at most 7",
                    info.level
                )));
            }
            block = Some(*info);
            rest = tail;
        }
        let refs = head.refs.get();
        let mut inline = Vec::new();
        let mut sum = 0u64;
        for entry in InlineRefs::new(rest) {
            let (r, count) = entry?;
            if r.is_data() != is_data {
                return Err(FormatError::new(format!(
                    "{r:?} stands in an extent item with flags {flags:?}"
                )));
            }
            if let Some((last, _)) = inline.last()
                && r.inline_order() < ExtentRef::inline_order(last)
            {
                return Err(FormatError::new(format!(
                    "inline ref {r:?} stands after {last:?}: wrong order"
                )));
            }
            if !matches!(r, ExtentRef::Owner { .. }) {
                sum += u64::from(count);
            }
            inline.push((r, count));
        }
        if sum > refs {
            return Err(FormatError::new(format!("extent item has refs {refs}, but {sum} inline")));
        }
        Ok(Self { refs, generation: Generation(head.generation.get()), flags, block, inline })
    }
    /// Bytes of the item.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        size_of::<ExtentItemHeader>()
            + self.block.map_or(0, |_| size_of::<TreeBlockInfo>())
            + self.inline.iter().map(|(r, _)| r.inline_len()).sum::<usize>()
    }
    /// The item's bytes, the inline references in their order.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_len());
        let head = ExtentItemHeader {
            refs: U64::new(self.refs),
            generation: U64::new(self.generation.0),
            flags: U64::new(self.flags.bits()),
        };
        out.extend_from_slice(head.as_bytes());
        if let Some(info) = &self.block {
            out.extend_from_slice(info.as_bytes());
        }
        let mut inline = self.inline.clone();
        inline.sort_by_key(|(r, _)| r.inline_order());
        for (r, count) in inline {
            r.append_inline(count, &mut out);
        }
        out
    }
    /// Count of an inline reference; 0 if it is not there.
    #[must_use]
    pub fn inline_count(&self, wanted: &ExtentRef) -> u32 {
        self.inline.iter().find(|(r, _)| r == wanted).map_or(0, |(_, count)| *count)
    }
}

/// References of an item of type 176, 178, 182 or 184 with their counts. Linux writes one per item.
///
/// # Errors
/// Another type, a wrong size, or unaligned addresses.
pub fn parse_keyed_refs(key: &Key, bytes: &[u8]) -> FormatResult<Vec<(ExtentRef, u32)>> {
    match key.kind {
        KeyType::TREE_BLOCK_REF | KeyType::SHARED_BLOCK_REF => {
            if !bytes.is_empty() {
                return Err(FormatError::new(format!(
                    "{} has {} bytes, expected 0",
                    key.kind,
                    bytes.len()
                )));
            }
            let r = if key.kind == KeyType::TREE_BLOCK_REF {
                ExtentRef::TreeBlock { root: ObjectId(key.offset) }
            } else {
                ExtentRef::SharedBlock { parent: parent(key.offset, "shared block ref")? }
            };
            Ok(vec![(r, 1)])
        }
        KeyType::SHARED_DATA_REF => {
            let count = counted(*exact::<U32>(bytes, "shared data ref")?, "shared data ref")?;
            Ok(vec![(
                ExtentRef::SharedData { parent: parent(key.offset, "shared data ref")? },
                count,
            )])
        }
        KeyType::EXTENT_DATA_REF => {
            let disk = <[DiskDataRef]>::ref_from_bytes(bytes).ok().filter(|d| !d.is_empty());
            let disk = disk.ok_or_else(|| {
                FormatError::new(format!(
                    "extent data ref has {} bytes, expected a multiple of 28",
                    bytes.len()
                ))
            })?;
            disk.iter().map(data_ref).collect()
        }
        kind => Err(FormatError::new(format!("{kind} is no keyed back reference"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_refs_are_written_in_order_and_read_only_so() {
        let refs = [256, 258, 257].map(|root| (ExtentRef::TreeBlock { root: ObjectId(root) }, 1));
        let mut item = ExtentItem {
            refs: 4,
            generation: Generation(9),
            flags: ExtentFlags::TREE_BLOCK | ExtentFlags::FULL_BACKREF,
            block: None,
            inline: refs.to_vec(),
        };
        item.inline.push((ExtentRef::SharedBlock { parent: Logical(4096) }, 1));
        let bytes = item.encode();
        assert_eq!(bytes.len(), item.encoded_len());
        let back = ExtentItem::parse(KeyType::METADATA_ITEM, &bytes).unwrap();
        let roots: Vec<u64> = back.inline.iter().map(|(r, _)| r.sequence()).collect();
        assert_eq!(roots, [258, 257, 256, 4096]);

        let mut swapped = bytes[..24].to_vec();
        swapped.extend_from_slice(&bytes[33..42]);
        swapped.extend_from_slice(&bytes[24..33]);
        let error = ExtentItem::parse(KeyType::METADATA_ITEM, &swapped).unwrap_err();
        assert!(error.0.contains("wrong order"), "{error}");

        item.refs = 3;
        let error = ExtentItem::parse(KeyType::METADATA_ITEM, &item.encode()).unwrap_err();
        assert!(error.0.contains("refs 3, but 4 inline"), "{error}");
        item.refs = 4;
        item.inline[0].0 = ExtentRef::SharedData { parent: Logical(4096) };
        assert!(ExtentItem::parse(KeyType::METADATA_ITEM, &item.encode()).is_err());
    }

    #[test]
    fn a_split_extent_keeps_one_data_ref() {
        let data = |at, skipped| {
            ExtentRef::data(ObjectId::FS_TREE, ObjectId(300), FileOffset(at), skipped)
        };
        let whole = data(8192, 0);
        assert_eq!(data(16384, 8192), whole);
        let below_zero = data(0, 4096);
        assert_eq!(
            below_zero,
            ExtentRef::Data {
                root: ObjectId::FS_TREE,
                objectid: ObjectId(300),
                offset: FileOffset(4096u64.wrapping_neg())
            }
        );
    }

    #[test]
    fn flags_must_name_one_sort() {
        for (kind, flags, ok) in [
            (KeyType::EXTENT_ITEM, 1u64, true),
            (KeyType::EXTENT_ITEM, 0, false),
            (KeyType::EXTENT_ITEM, 3, false),
            (KeyType::EXTENT_ITEM, 0x101, false),
            (KeyType::EXTENT_ITEM, 0x201, false),
            (KeyType::METADATA_ITEM, 1, false),
            (KeyType::METADATA_ITEM, 2, true),
            (KeyType::METADATA_ITEM, 0x102, true),
        ] {
            let head =
                ExtentItemHeader { refs: 0.into(), generation: 1.into(), flags: flags.into() };
            assert_eq!(ExtentItem::parse(kind, head.as_bytes()).is_ok(), ok, "{kind} {flags:#x}");
        }
    }
}
