//! The fixed structures in a node's bytes, to be written over.
//!
//! Views for edits that no item editor would make: a header that lies, pointers that lead astray,
//! offsets that overlap. Slots that the block has no room for are a mistake of the caller.

use larder_format::node::{HEADER_SIZE, Header, ITEM_SIZE, ItemHeader, KeyPointer, POINTER_SIZE};
use zerocopy::FromBytes;

/// The header.
///
/// # Panics
/// If the bytes are fewer than a header.
pub fn header(node: &mut [u8]) -> &mut Header {
    Header::mut_from_prefix(node).expect("a node is longer than its header").0
}

/// The header of the item at `slot` of a leaf.
///
/// # Panics
/// If the node has no room for such a slot.
pub fn item(leaf: &mut [u8], slot: usize) -> &mut ItemHeader {
    let at = HEADER_SIZE + slot * ITEM_SIZE;
    ItemHeader::mut_from_prefix(&mut leaf[at..]).expect("a slot of the leaf").0
}

/// The pointer at `slot` of an interior node.
///
/// # Panics
/// If the node has no room for such a slot.
pub fn pointer(node: &mut [u8], slot: usize) -> &mut KeyPointer {
    let at = HEADER_SIZE + slot * POINTER_SIZE;
    KeyPointer::mut_from_prefix(&mut node[at..]).expect("a slot of the node").0
}
