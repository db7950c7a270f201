//! Nodes: the header, and views of leaves and interior nodes over their bytes.
//!
//! A node is `nodesize` bytes: a header of 101 bytes, then either item headers growing up and item
//! data growing down (leaf), or key pointers (interior node). The views here only look; edits
//! belong to the engine. A view is cheap and trusts nothing: accessors that could run out of the
//! block return `None` or an empty slice, and [`crate::node`]'s caller is expected to have run the
//! node checker once when the block came off the disk.

use crate::{Checksum, CsumType, DiskKey, Generation, Key, Logical, TreeId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a node header.
pub const HEADER_SIZE: usize = 101;
/// Size of a leaf's item header.
pub const ITEM_SIZE: usize = 25;
/// Size of an interior node's key pointer.
pub const POINTER_SIZE: usize = 33;

/// Header flag: the block has been submitted to the device at least once.
pub const FLAG_WRITTEN: u64 = 1;
/// Header flag: the block belongs to a relocation.
pub const FLAG_RELOC: u64 = 2;
/// `backref_rev` of every block since 2.6.31.
pub const BACKREF_REV: u8 = 1;

/// The header of every node.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Header {
    pub csum: Checksum,
    pub fsid: [u8; 16],
    pub bytenr: U64,
    /// 56 bits of flags; the top byte is `backref_rev`.
    pub flags_and_rev: U64,
    pub chunk_tree_uuid: [u8; 16],
    pub generation: U64,
    pub owner: U64,
    pub nritems: U32,
    pub level: u8,
}
const _: () = assert!(size_of::<Header>() == HEADER_SIZE);

impl Header {
    /// Flags without the backref revision.
    #[must_use]
    pub fn flags(&self) -> u64 {
        self.flags_and_rev.get() & ((1 << 56) - 1)
    }
    /// Sets the flags and the backref revision.
    pub fn set_flags(&mut self, flags: u64) {
        self.flags_and_rev = U64::new(flags | u64::from(BACKREF_REV) << 56);
    }
}

/// Header of an item in a leaf.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct ItemHeader {
    pub key: DiskKey,
    /// Where the data begins, counted from the end of the node header.
    pub offset: U32,
    pub size: U32,
}
const _: () = assert!(size_of::<ItemHeader>() == ITEM_SIZE);

/// Pointer of an interior node to a child.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)]
pub struct KeyPointer {
    pub key: DiskKey,
    pub blockptr: U64,
    pub generation: U64,
}
const _: () = assert!(size_of::<KeyPointer>() == POINTER_SIZE);

/// Read-only view of a node's bytes.
#[derive(Clone, Copy)]
pub struct NodeView<'a>(pub &'a [u8]);

impl std::fmt::Debug for NodeView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("bytenr", &self.bytenr())
            .field("generation", &self.generation())
            .field("owner", &self.owner())
            .field("level", &self.level())
            .field("nritems", &self.nritems())
            .finish_non_exhaustive()
    }
}

impl<'a> NodeView<'a> {
    /// The header.
    ///
    /// # Panics
    /// If the slice is shorter than a header: nodes are at least 4 KiB by construction.
    #[must_use]
    pub fn header(self) -> &'a Header {
        Header::ref_from_prefix(self.0).expect("a node is longer than its header").0
    }
    /// Own logical address.
    #[must_use]
    pub fn bytenr(self) -> Logical {
        Logical(self.header().bytenr.get())
    }
    /// Transaction that wrote the block.
    #[must_use]
    pub fn generation(self) -> Generation {
        Generation(self.header().generation.get())
    }
    /// Tree that made the block.
    #[must_use]
    pub fn owner(self) -> TreeId {
        crate::ObjectId(self.header().owner.get())
    }
    /// Height above the leaves.
    #[must_use]
    pub fn level(self) -> u8 {
        self.header().level
    }
    /// Number of items or pointers.
    #[must_use]
    pub fn nritems(self) -> usize {
        self.header().nritems.get() as usize
    }
    /// Header flags.
    #[must_use]
    pub fn flags(self) -> u64 {
        self.header().flags()
    }
    /// Item headers of a leaf, as many as fit the block.
    #[must_use]
    pub fn items(self) -> &'a [ItemHeader] {
        let body = &self.0[HEADER_SIZE..];
        let n = self.nritems().min(body.len() / ITEM_SIZE);
        <[ItemHeader]>::ref_from_bytes(&body[..n * ITEM_SIZE]).expect("a multiple of the item size")
    }
    /// Pointers of an interior node, as many as fit the block.
    #[must_use]
    pub fn pointers(self) -> &'a [KeyPointer] {
        let body = &self.0[HEADER_SIZE..];
        let n = self.nritems().min(body.len() / POINTER_SIZE);
        <[KeyPointer]>::ref_from_bytes(&body[..n * POINTER_SIZE])
            .expect("a multiple of the pointer size")
    }
    /// Key at a slot of a leaf or interior node.
    #[must_use]
    pub fn key(self, slot: usize) -> Option<Key> {
        if self.level() == 0 {
            self.items().get(slot).map(|i| i.key.into())
        } else {
            self.pointers().get(slot).map(|p| p.key.into())
        }
    }
    /// Data of a leaf item; `None` when slot or range lie outside.
    #[must_use]
    pub fn data(self, slot: usize) -> Option<&'a [u8]> {
        let item = self.items().get(slot)?;
        let start = HEADER_SIZE.checked_add(item.offset.get() as usize)?;
        self.0.get(start..start.checked_add(item.size.get() as usize)?)
    }
    /// First slot whose key is not less than `key`, and whether it is equal.
    pub fn search(self, key: &Key) -> Result<usize, usize> {
        if self.level() == 0 {
            self.items().binary_search_by(|i| Key::from(i.key).cmp(key))
        } else {
            self.pointers().binary_search_by(|p| Key::from(p.key).cmp(key))
        }
    }
    /// Does the stored checksum match the bytes?
    #[must_use]
    pub fn csum_matches(self, kind: CsumType) -> bool {
        let n = kind.size();
        kind.compute(&self.0[32..])[..n] == self.header().csum[..n]
    }
    /// Free bytes of a leaf (between the last item header and the lowest data).
    #[must_use]
    pub fn leaf_free(self) -> usize {
        let body = self.0.len() - HEADER_SIZE;
        let lowest = self.items().last().map_or(body, |i| i.offset.get() as usize);
        lowest.saturating_sub(self.nritems() * ITEM_SIZE)
    }
}

/// Bytes of a leaf that items and their headers share.
#[must_use]
pub fn leaf_capacity(nodesize: u32) -> usize {
    nodesize as usize - HEADER_SIZE
}
/// Most bytes that one item's data can have.
#[must_use]
pub fn max_item_size(nodesize: u32) -> usize {
    leaf_capacity(nodesize) - ITEM_SIZE
}
/// Most pointers of an interior node.
#[must_use]
pub fn max_pointers(nodesize: u32) -> usize {
    leaf_capacity(nodesize) / POINTER_SIZE
}
