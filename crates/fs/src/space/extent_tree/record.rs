//! An extent item, taken apart: counts, flags and inline references, and back to bytes.
//!
//! Linux refuses items whose inline references are out of order, so a record keeps them sorted as they lie on
//! disk: by type ascending, within a type by descending sequence (the hash for data references, else the one
//! number that a reference has).

use crate::space::refs::ExtentRefKey;
use larder_format::csum::data_ref_hash;
use larder_format::{DiskKey, FormatError, FormatResult, Generation, Key, KeyType, Logical, ObjectId};
use std::cmp::Reverse;
use zerocopy::{FromBytes, IntoBytes};

/// Flag: file data.
pub(super) const DATA: u64 = 1;
/// Flag: a tree block.
pub(super) const TREE_BLOCK: u64 = 2;
/// Flag: the block's references are held by itself (its address), not by the tree that owns it.
pub(super) const FULL_BACKREF: u64 = 0x100;

/// Count, generation, flags.
const HEAD: usize = 24;
/// First key and level, in tree blocks that have an EXTENT_ITEM.
const BLOCK_INFO: usize = 18;

/// The type number of a reference on disk.
pub(super) fn type_of(key: ExtentRefKey) -> KeyType {
    match key {
        ExtentRefKey::TreeBlock { .. } => KeyType::TREE_BLOCK_REF,
        ExtentRefKey::Data { .. } => KeyType::EXTENT_DATA_REF,
        ExtentRefKey::SharedBlock { .. } => KeyType::SHARED_BLOCK_REF,
        ExtentRefKey::SharedData { .. } => KeyType::SHARED_DATA_REF,
    }
}
/// What references of a type are sorted by; the offset of the keyed form (before collisions).
pub(super) fn sequence_of(key: ExtentRefKey) -> u64 {
    match key {
        ExtentRefKey::TreeBlock { root } => root.0,
        ExtentRefKey::Data { root, objectid, offset } => data_ref_hash(root.0, objectid.0, offset),
        ExtentRefKey::SharedBlock { parent } | ExtentRefKey::SharedData { parent } => parent.0,
    }
}
/// Bytes of the inline form.
pub(super) fn inline_size(key: ExtentRefKey) -> usize {
    match key {
        ExtentRefKey::TreeBlock { .. } | ExtentRefKey::SharedBlock { .. } => 9,
        ExtentRefKey::Data { .. } => 29,
        ExtentRefKey::SharedData { .. } => 13,
    }
}
fn order(key: ExtentRefKey) -> (KeyType, Reverse<u64>) {
    (type_of(key), Reverse(sequence_of(key)))
}

/// An extent item or metadata item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// References in all, keyed ones included.
    pub(super) refs: u64,
    pub(super) generation: Generation,
    pub(super) flags: u64,
    /// First key and level, in the form of tree block items that has them.
    pub(super) block_info: Option<(Key, u8)>,
    /// Inline references with their counts (always 1 for blocks), in disk order.
    pub(super) inline: Vec<(ExtentRefKey, u32)>,
}

struct Reader<'a>(&'a [u8]);
impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> FormatResult<[u8; N]> {
        let (head, rest) =
            self.0.split_first_chunk::<N>().ok_or_else(|| FormatError::new("extent item ends early"))?;
        self.0 = rest;
        Ok(*head)
    }
    fn u64(&mut self) -> FormatResult<u64> {
        self.take().map(u64::from_le_bytes)
    }
    fn u32(&mut self) -> FormatResult<u32> {
        self.take().map(u32::from_le_bytes)
    }
}

impl Record {
    /// Takes an item apart. `kind` is the type in its key.
    pub(super) fn parse(kind: KeyType, data: &[u8]) -> FormatResult<Self> {
        let mut r = Reader(data);
        let (refs, generation, flags) = (r.u64()?, Generation(r.u64()?), r.u64()?);
        let is_data = match flags & (DATA | TREE_BLOCK) {
            DATA if kind == KeyType::EXTENT_ITEM && flags == DATA => true,
            TREE_BLOCK if flags & !FULL_BACKREF == TREE_BLOCK => false,
            _ => return Err(FormatError::new(format!("extent flags {flags:#x}"))),
        };
        let mut block_info = None;
        if !is_data && kind == KeyType::EXTENT_ITEM {
            let info = r.take::<BLOCK_INFO>()?;
            let key =
                DiskKey::read_from_bytes(&info[..17]).map_err(|_| FormatError::new("tree block info"))?;
            block_info = Some((Key::from(key), info[17]));
        }
        let mut inline = Vec::new();
        let mut sum = 0u64;
        while !r.0.is_empty() {
            let [kind] = r.take::<1>()?;
            let (key, count) = match KeyType(kind) {
                KeyType::TREE_BLOCK_REF => (ExtentRefKey::TreeBlock { root: ObjectId(r.u64()?) }, 1),
                KeyType::SHARED_BLOCK_REF => (ExtentRefKey::SharedBlock { parent: Logical(r.u64()?) }, 1),
                KeyType::EXTENT_DATA_REF => {
                    let (root, objectid, offset) = (ObjectId(r.u64()?), ObjectId(r.u64()?), r.u64()?);
                    (ExtentRefKey::Data { root, objectid, offset }, r.u32()?)
                }
                KeyType::SHARED_DATA_REF => {
                    (ExtentRefKey::SharedData { parent: Logical(r.u64()?) }, r.u32()?)
                }
                other => return Err(FormatError::new(format!("inline reference of type {other}"))),
            };
            if key.is_data() != is_data || count == 0 {
                return Err(FormatError::new(format!(
                    "inline reference {key:?} count {count}, flags {flags:#x}"
                )));
            }
            if inline.last().is_some_and(|(last, _)| order(*last) > order(key)) {
                return Err(FormatError::new("inline references out of order"));
            }
            sum += u64::from(count);
            inline.push((key, count));
        }
        if sum > refs {
            return Err(FormatError::new(format!("{sum} inline references, {refs} in all")));
        }
        Ok(Self { refs, generation, flags, block_info, inline })
    }

    /// Bytes of the item as it is.
    pub(super) fn size(&self) -> usize {
        let info = if self.block_info.is_some() { BLOCK_INFO } else { 0 };
        HEAD + info + self.inline.iter().map(|r| inline_size(r.0)).sum::<usize>()
    }

    /// The item as bytes.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.size());
        for v in [self.refs, self.generation.0, self.flags] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        if let Some((key, level)) = self.block_info {
            out.extend_from_slice(DiskKey::from(key).as_bytes());
            out.push(level);
        }
        for (key, count) in &self.inline {
            out.push(type_of(*key).0);
            match *key {
                ExtentRefKey::TreeBlock { root: ObjectId(n) }
                | ExtentRefKey::SharedBlock { parent: Logical(n) } => out.extend_from_slice(&n.to_le_bytes()),
                ExtentRefKey::SharedData { parent } => {
                    out.extend_from_slice(&parent.0.to_le_bytes());
                    out.extend_from_slice(&count.to_le_bytes());
                }
                ExtentRefKey::Data { .. } => out.extend_from_slice(&keyed_bytes(*key, *count)),
            }
        }
        out
    }

    /// References that are not inline.
    pub(super) fn keyed(&self) -> u64 {
        self.refs - self.inline.iter().map(|r| u64::from(r.1)).sum::<u64>()
    }

    /// Slot of an inline reference, or where it belongs.
    pub(super) fn find(&self, key: ExtentRefKey) -> Result<usize, usize> {
        let start = self.inline.partition_point(|r| order(r.0) < order(key));
        // Data references may share a hash.
        let same = self.inline[start..].iter().take_while(|r| order(r.0) == order(key));
        match same.enumerate().find(|(_, r)| r.0 == key) {
            Some((i, _)) => Ok(start + i),
            None => Err(start),
        }
    }
}

/// Data of the keyed form of a reference.
pub(super) fn keyed_bytes(key: ExtentRefKey, count: u32) -> Vec<u8> {
    let mut out = Vec::new();
    if let ExtentRefKey::Data { root, objectid, offset } = key {
        for v in [root.0, objectid.0, offset] {
            out.extend_from_slice(&v.to_le_bytes());
        }
    }
    if key.is_data() {
        out.extend_from_slice(&count.to_le_bytes());
    }
    out
}

/// A keyed reference from its item.
pub(super) fn parse_keyed(item: &Key, data: &[u8]) -> FormatResult<(ExtentRefKey, u32)> {
    let mut r = Reader(data);
    let parsed = match item.kind {
        KeyType::TREE_BLOCK_REF => (ExtentRefKey::TreeBlock { root: ObjectId(item.offset) }, 1),
        KeyType::SHARED_BLOCK_REF => (ExtentRefKey::SharedBlock { parent: Logical(item.offset) }, 1),
        KeyType::SHARED_DATA_REF => (ExtentRefKey::SharedData { parent: Logical(item.offset) }, r.u32()?),
        KeyType::EXTENT_DATA_REF => {
            let (root, objectid, offset) = (ObjectId(r.u64()?), ObjectId(r.u64()?), r.u64()?);
            (ExtentRefKey::Data { root, objectid, offset }, r.u32()?)
        }
        other => return Err(FormatError::new(format!("{other} is not a reference"))),
    };
    if !r.0.is_empty() || parsed.1 == 0 {
        return Err(FormatError::new("malformed reference item"));
    }
    Ok(parsed)
}
