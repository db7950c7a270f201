//! Blocks that many trees share, written again at another place.
//!
//! Such a block keeps its owner and its items. It gets the flag RELOC: it is as new as the running
//! transaction, and yet shared, which a tree could not tell from its generation. Only what it
//! points to may lie elsewhere now.

use crate::error::{Error, Place, Result};
use crate::tree::image;
use crate::tree::node::Node;
use larder_format::items::{ExtentRecord, FileExtent};
use larder_format::node::{FLAG_WRITTEN, HEADER_SIZE};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId};
use std::collections::HashMap;
use std::sync::Arc;
use zerocopy::little_endian::U64;

/// Where blocks and data extents lie that have moved.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Blocks, by their old address.
    pub(crate) blocks: HashMap<Logical, Logical>,
    /// Data extents, by their old address.
    pub(crate) data: HashMap<Logical, Logical>,
}

/// The copy of a block for the address `at`, in a buffer of its size. It points to the new places,
/// and has `flag`.
///
/// # Errors
/// `Corrupt` for a file extent item that cannot be read.
pub(crate) fn relocated(
    old: &Node,
    mut buf: Arc<[u8]>,
    fsid: [u8; 16],
    at: Logical,
    generation: Generation,
    places: &Places,
    flag: u64,
) -> Result<Node> {
    let bytes = Arc::get_mut(&mut buf).expect("a new buffer has one owner");
    bytes.copy_from_slice(old.bytes());
    let header = image::header_mut(bytes);
    header.csum = [0; 32];
    header.fsid = fsid;
    header.bytenr = U64::new(at.0);
    header.generation = U64::new(generation.0);
    header.set_flags(old.view().flags() & !FLAG_WRITTEN | flag);
    if old.level() > 0 {
        for (slot, pointer) in old.view().pointers().iter().enumerate() {
            if let Some(new) = places.blocks.get(&Logical(pointer.blockptr.get())) {
                image::node_repoint(bytes, slot, *new, generation);
            }
        }
    } else if !places.data.is_empty() {
        repoint_data(old, bytes, places)?;
    }
    Ok(Node::clean(buf))
}

/// Makes the file extent items of a leaf point to the new places of their extents.
fn repoint_data(old: &Node, bytes: &mut [u8], places: &Places) -> Result<()> {
    let view = old.view();
    for (slot, item) in view.items().iter().enumerate() {
        let key = Key::from(item.key);
        if key.kind != KeyType::EXTENT_DATA {
            continue;
        }
        let tree: ObjectId = view.owner();
        let extent = FileExtent::parse(view.data(slot).unwrap_or_default())
            .map_err(|e| Error::corrupt(Place::item(tree, key), e.to_string()))?;
        let FileExtent::Stored(record) = extent else { continue };
        let Some(new) = places.data.get(&record.disk_bytenr).filter(|_| !record.is_hole()) else {
            continue;
        };
        let moved = ExtentRecord { disk_bytenr: *new, ..record }.encode();
        let start = HEADER_SIZE + item.offset.get() as usize;
        bytes[start..start + moved.len()].copy_from_slice(&moved);
    }
    Ok(())
}
