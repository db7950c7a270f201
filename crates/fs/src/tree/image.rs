//! Edits on the bytes of one node, and nothing else.
//!
//! A leaf keeps its items' data without gaps, in key order from the end backwards; every edit here
//! keeps that true, because Linux refuses leaves where it is not. Callers have made sure that there
//! is room.

use larder_format::node::{
    HEADER_SIZE, Header, ITEM_SIZE, ItemHeader, KeyPointer, NodeView, POINTER_SIZE, leaf_capacity,
    max_pointers,
};
use larder_format::{Generation, Key, Logical, TreeId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// What every block of a file system has in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeFormat {
    /// Bytes of a node.
    pub(crate) nodesize: u32,
    /// The fsid that node headers carry (`metadata_uuid` where that is set).
    pub(crate) fsid: [u8; 16],
    /// The same of the file systems upon which this one is built: blocks that have not changed
    /// since carry theirs.
    pub(crate) seeds: Vec<[u8; 16]>,
    /// UUID that mkfs drew for the chunk tree; the same in every node.
    pub(crate) chunk_tree_uuid: [u8; 16],
    /// Names may differ from those that the keys were made from, as in metadata dumps.
    pub(crate) names_hidden: bool,
}

impl NodeFormat {
    /// The fsid that a block with these bytes should carry: its own, if that is one of those that
    /// may be.
    pub(crate) fn fsid_of(&self, bytes: &[u8]) -> [u8; 16] {
        let is = NodeView(bytes).header().fsid;
        if self.seeds.contains(&is) { is } else { self.fsid }
    }
}

/// Writes the header of a node without items.
pub(crate) fn init(
    buf: &mut [u8],
    format: &NodeFormat,
    at: Logical,
    generation: Generation,
    owner: TreeId,
    level: u8,
) {
    let h = header_mut(buf);
    h.csum = [0; 32];
    h.fsid = format.fsid;
    h.bytenr = U64::new(at.0);
    h.set_flags(0);
    h.chunk_tree_uuid = format.chunk_tree_uuid;
    h.generation = U64::new(generation.0);
    h.owner = U64::new(owner.0);
    h.nritems = U32::new(0);
    h.level = level;
}

/// The header, for writing.
pub(crate) fn header_mut(buf: &mut [u8]) -> &mut Header {
    Header::mut_from_prefix(buf).expect("a node is longer than its header").0
}

fn set_nritems(buf: &mut [u8], n: usize) {
    header_mut(buf).nritems = U32::new(u32::try_from(n).expect("a node has fewer than 2^32 items"));
}

fn item_mut(buf: &mut [u8], slot: usize) -> &mut ItemHeader {
    let at = HEADER_SIZE + slot * ITEM_SIZE;
    ItemHeader::mut_from_bytes(&mut buf[at..at + ITEM_SIZE])
        .expect("the slice has an item header's size")
}

/// Where the data of the items from `slot` on ends, counted from the end of the header.
fn data_end(view: NodeView<'_>, slot: usize) -> usize {
    if slot == 0 {
        view.0.len() - HEADER_SIZE
    } else {
        view.items()[slot - 1].offset.get() as usize
    }
}

/// Adds an item before `slot`; its data is zero until the caller fills it.
///
/// # Panics
/// If the leaf has no room: callers split first.
pub(crate) fn leaf_insert(buf: &mut [u8], slot: usize, key: &Key, size: usize) {
    let view = NodeView(buf);
    let n = view.nritems();
    assert!(slot <= n, "slot {slot} of a leaf of {n}");
    assert!(
        view.leaf_free() >= size + ITEM_SIZE,
        "no room for {size} bytes in leaf {}",
        view.bytenr()
    );
    let end = data_end(view, slot);
    let lowest = data_end(view, n);
    // Data of the items behind moves down to make room above them.
    buf.copy_within(HEADER_SIZE + lowest..HEADER_SIZE + end, HEADER_SIZE + lowest - size);
    let headers = HEADER_SIZE + slot * ITEM_SIZE..HEADER_SIZE + n * ITEM_SIZE;
    buf.copy_within(headers.clone(), headers.start + ITEM_SIZE);
    let delta = u32::try_from(size).expect("an item is smaller than a node");
    for i in slot + 1..=n {
        let item = item_mut(buf, i);
        item.offset -= delta;
    }
    let offset = u32::try_from(end - size).expect("an offset within a node");
    *item_mut(buf, slot) =
        ItemHeader { key: (*key).into(), offset: U32::new(offset), size: U32::new(delta) };
    buf[HEADER_SIZE + end - size..HEADER_SIZE + end].fill(0);
    set_nritems(buf, n + 1);
}

/// Adds an item before `slot`. As [`leaf_insert`].
pub(crate) fn leaf_put(buf: &mut [u8], slot: usize, key: &Key, data: &[u8]) {
    leaf_insert(buf, slot, key, data.len());
    leaf_data_mut(buf, slot).copy_from_slice(data);
}

/// Removes `count` items from `slot` on.
pub(crate) fn leaf_remove(buf: &mut [u8], slot: usize, count: usize) {
    let view = NodeView(buf);
    let n = view.nritems();
    assert!(slot + count <= n, "items {slot}+{count} of a leaf of {n}");
    if count == 0 {
        return;
    }
    let end = data_end(view, slot);
    let start = data_end(view, slot + count);
    let lowest = data_end(view, n);
    let gap = end - start;
    buf.copy_within(HEADER_SIZE + lowest..HEADER_SIZE + start, HEADER_SIZE + lowest + gap);
    let tail = HEADER_SIZE + (slot + count) * ITEM_SIZE..HEADER_SIZE + n * ITEM_SIZE;
    buf.copy_within(tail, HEADER_SIZE + slot * ITEM_SIZE);
    let delta = u32::try_from(gap).expect("a gap within a node");
    for i in slot..n - count {
        item_mut(buf, i).offset += delta;
    }
    set_nritems(buf, n - count);
}

/// Changes the size of an item, keeping the beginning of its data; what is added is zero.
pub(crate) fn leaf_resize(buf: &mut [u8], slot: usize, size: usize) {
    let view = NodeView(buf);
    let old = view.items()[slot].size.get() as usize;
    if old == size {
        return;
    }
    let n = view.nritems();
    let end = data_end(view, slot);
    let lowest = data_end(view, n);
    let start = end - old;
    let new_start = end - size;
    if size > old {
        assert!(
            view.leaf_free() >= size - old,
            "no room to grow an item in leaf {}",
            view.bytenr()
        );
        // Everything from the lowest byte to the item's last kept byte moves down.
        buf.copy_within(
            HEADER_SIZE + lowest..HEADER_SIZE + end,
            HEADER_SIZE + lowest - (size - old),
        );
        buf[HEADER_SIZE + new_start + old..HEADER_SIZE + end].fill(0);
    } else {
        // The beginning is kept, so what lies below it and the kept part move up.
        buf.copy_within(
            HEADER_SIZE + lowest..HEADER_SIZE + start + size,
            HEADER_SIZE + lowest + (old - size),
        );
    }
    for i in slot..n {
        let item = item_mut(buf, i);
        let offset = item.offset.get() as usize + old - size;
        item.offset = U32::new(u32::try_from(offset).expect("an offset within a node"));
    }
    item_mut(buf, slot).size =
        U32::new(u32::try_from(size).expect("an item is smaller than a node"));
}

/// Data of an item, for writing.
pub(crate) fn leaf_data_mut(buf: &mut [u8], slot: usize) -> &mut [u8] {
    let item = NodeView(buf).items()[slot];
    let start = HEADER_SIZE + item.offset.get() as usize;
    &mut buf[start..start + item.size.get() as usize]
}

/// Sets the key of an item or pointer.
pub(crate) fn set_key(buf: &mut [u8], slot: usize, key: &Key) {
    if NodeView(buf).level() == 0 {
        item_mut(buf, slot).key = (*key).into();
    } else {
        pointer_mut(buf, slot).key = (*key).into();
    }
}

/// Moves the items from `from` on to the end of another leaf, whose keys are all smaller.
pub(crate) fn leaf_move_tail(source: &mut [u8], from: usize, target: &mut [u8]) {
    let n = NodeView(source).nritems();
    leaf_append(target, source, from, n - from);
    leaf_remove(source, from, n - from);
}

/// Appends `count` items of `source` from `from` on to `target`.
pub(crate) fn leaf_append(target: &mut [u8], source: &[u8], from: usize, count: usize) {
    let view = NodeView(source);
    for i in from..from + count {
        let item = &view.items()[i];
        let slot = NodeView(target).nritems();
        let data = view.data(i).expect("a checked leaf's data lies inside");
        leaf_put(target, slot, &item.key.into(), data);
    }
}

/// Bytes that items `from..to` occupy, headers included.
pub(crate) fn leaf_bytes(view: NodeView<'_>, from: usize, to: usize) -> usize {
    data_end(view, from) - data_end(view, to) + (to - from) * ITEM_SIZE
}

/// Room of an empty leaf.
pub(crate) fn leaf_room(view: NodeView<'_>) -> usize {
    leaf_capacity(u32::try_from(view.0.len()).expect("a node size"))
}

fn pointer_mut(buf: &mut [u8], slot: usize) -> &mut KeyPointer {
    let at = HEADER_SIZE + slot * POINTER_SIZE;
    KeyPointer::mut_from_bytes(&mut buf[at..at + POINTER_SIZE])
        .expect("the slice has a pointer's size")
}

/// A pointer's bytes.
pub(crate) fn pointer(key: Key, at: Logical, generation: Generation) -> KeyPointer {
    KeyPointer { key: key.into(), blockptr: U64::new(at.0), generation: U64::new(generation.0) }
}

/// Adds a pointer before `slot`.
///
/// # Panics
/// If the node is full: callers split first.
pub(crate) fn node_insert(buf: &mut [u8], slot: usize, ptr: &KeyPointer) {
    let n = NodeView(buf).nritems();
    let max = max_pointers(u32::try_from(buf.len()).expect("a node size"));
    assert!(slot <= n && n < max, "pointer {slot} of {n} (at most {max})");
    let tail = HEADER_SIZE + slot * POINTER_SIZE..HEADER_SIZE + n * POINTER_SIZE;
    buf.copy_within(tail.clone(), tail.start + POINTER_SIZE);
    set_nritems(buf, n + 1);
    *pointer_mut(buf, slot) = *ptr;
}

/// Replaces the block that a pointer leads to, keeping its key.
pub(crate) fn node_repoint(buf: &mut [u8], slot: usize, at: Logical, generation: Generation) {
    let p = pointer_mut(buf, slot);
    p.blockptr = U64::new(at.0);
    p.generation = U64::new(generation.0);
}

/// Removes `count` pointers from `slot` on.
pub(crate) fn node_remove(buf: &mut [u8], slot: usize, count: usize) {
    let n = NodeView(buf).nritems();
    assert!(slot + count <= n, "pointers {slot}+{count} of {n}");
    let tail = HEADER_SIZE + (slot + count) * POINTER_SIZE..HEADER_SIZE + n * POINTER_SIZE;
    buf.copy_within(tail, HEADER_SIZE + slot * POINTER_SIZE);
    set_nritems(buf, n - count);
}

/// Moves the pointers from `from` on to the end of another node.
pub(crate) fn node_move_tail(source: &mut [u8], from: usize, target: &mut [u8]) {
    let view = NodeView(source);
    let n = view.nritems();
    let base = NodeView(target).nritems();
    let bytes = view.pointers()[from..].as_bytes();
    let at = HEADER_SIZE + base * POINTER_SIZE;
    target[at..at + bytes.len()].copy_from_slice(bytes);
    set_nritems(target, base + n - from);
    set_nritems(source, from);
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::KeyType;
    use proptest::prelude::*;

    fn empty(level: u8) -> Vec<u8> {
        let mut buf = vec![0xaa; 4096];
        let f = NodeFormat {
            nodesize: 4096,
            fsid: [1; 16],
            seeds: Vec::new(),
            chunk_tree_uuid: [2; 16],
            names_hidden: false,
        };
        init(&mut buf, &f, Logical(65536), Generation(7), larder_format::ObjectId::FS_TREE, level);
        buf
    }
    fn key(i: u64) -> Key {
        Key::new(i, KeyType::INODE_ITEM, 0)
    }
    fn contents(buf: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let v = NodeView(buf);
        let mut end = buf.len() - HEADER_SIZE;
        for i in v.items() {
            assert_eq!((i.offset.get() + i.size.get()) as usize, end, "data without gaps");
            end = i.offset.get() as usize;
        }
        (0..v.nritems())
            .map(|i| (v.key(i).unwrap().objectid.0, v.data(i).unwrap().to_vec()))
            .collect()
    }

    proptest! {
        /// Any sequence of inserts, removals and resizes leaves the items that a list would have,
        /// without gaps.
        #[test]
        fn leaf_edits_match_a_list(
            ops in prop::collection::vec((0u8..4, any::<u16>(), 0usize..300), 1..80)
        ) {
            let mut buf = empty(0);
            let mut model: Vec<(u64, Vec<u8>)> = Vec::new();
            for (op, at, size) in ops {
                match op {
                    0 | 1 => {
                        if NodeView(&buf).leaf_free() < size + ITEM_SIZE { continue; }
                        let id = u64::from(at);
                        let Err(slot) = NodeView(&buf).search(&key(id)) else { continue };
                        leaf_insert(&mut buf, slot, &key(id), size);
                        let fill = u8::try_from(at % 251).unwrap();
                        leaf_data_mut(&mut buf, slot).fill(fill);
                        model.insert(slot, (id, vec![fill; size]));
                    }
                    2 if !model.is_empty() => {
                        let slot = usize::from(at) % model.len();
                        let count = (size % 3 + 1).min(model.len() - slot);
                        leaf_remove(&mut buf, slot, count);
                        model.drain(slot..slot + count);
                    }
                    3 if !model.is_empty() => {
                        let slot = usize::from(at) % model.len();
                        let old = model[slot].1.len();
                        if size > old && NodeView(&buf).leaf_free() < size - old { continue; }
                        leaf_resize(&mut buf, slot, size);
                        model[slot].1.resize(size, 0);
                    }
                    _ => {}
                }
                prop_assert_eq!(contents(&buf), model.clone());
            }
            let cut = model.len() / 2;
            let mut right = empty(0);
            leaf_move_tail(&mut buf, cut, &mut right);
            prop_assert_eq!(contents(&buf), model[..cut].to_vec());
            prop_assert_eq!(contents(&right), model[cut..].to_vec());
        }
    }

    #[test]
    fn node_edits_move_pointers() {
        let mut buf = empty(1);
        for i in [5u64, 1, 3] {
            let Err(slot) = NodeView(&buf).search(&key(i)) else { panic!("a new key") };
            node_insert(&mut buf, slot, &pointer(key(i), Logical(i * 4096), Generation(i)));
        }
        node_repoint(&mut buf, 1, Logical(77 * 4096), Generation(9));
        let mut right = empty(1);
        node_move_tail(&mut buf, 1, &mut right);
        node_remove(&mut right, 1, 1);
        let v = NodeView(&right);
        assert_eq!((NodeView(&buf).nritems(), v.nritems()), (1, 1));
        assert_eq!(v.key(0), Some(key(3)));
        assert_eq!(v.pointers()[0].blockptr.get(), 77 * 4096);
    }
}
