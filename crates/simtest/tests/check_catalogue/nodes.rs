//! The structure of trees: headers, pointers, keys, and where items lie in a leaf.

use crate::entry::{BOTH, Entry, missed, seen};
use crate::find::{self, CSUMS, FS};
use anyhow::Result;
use larder_check::Kind;
use larder_format::node::{HEADER_SIZE, Header, NodeView};
use larder_format::{ObjectId, TreeId};
use larder_simtest::damage::{Copies, Damage, Seal, raw};

/// Changes a leaf of the top-level subvolume.
fn edit_leaf(d: &mut Damage, change: impl FnOnce(&mut [u8])) -> Result<()> {
    let leaf = find::fs_leaf(d)?;
    d.edit_node(leaf, change)
}

/// Changes the node above that leaf, which points to it at a slot.
fn edit_parent(d: &mut Damage, change: impl FnOnce(&mut [u8], usize)) -> Result<()> {
    let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
    d.edit_node(parent, |node| change(node, slot))
}

/// Makes the root of a tree unreadable.
fn rot(d: &mut Damage, tree: TreeId) -> Result<()> {
    let root = d.root(tree)?;
    d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
}

fn older(header: &mut Header) {
    header.generation.set(header.generation.get() - 1);
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("node-first-copy-rotten", BOTH, &[Kind::NodeChecksum], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::Only(0), Seal::Leave, |n| n[5000] ^= 1)
    }),
    missed("node-second-copy-rotten", BOTH, &[Kind::NodeChecksum], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::Only(1), Seal::Leave, |n| n[5000] ^= 1)
    }),
    missed("node-second-copy-of-another-time", BOTH, &[Kind::NodeGeneration], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::Only(1), Seal::Fix, |n| older(raw::header(n)))
    }),
    seen("node-rotten", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n[5000] ^= 1)
    }),
    seen("node-rotten-interior", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| rot(d, FS)),
    seen("node-rotten-csum-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, CSUMS)
    }),
    seen("node-never-written", BOTH, &[Kind::NodeAddress], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n.fill(0))
    }),
    seen("node-of-another-file-system", BOTH, &[Kind::NodeFsid], |d| {
        edit_leaf(d, |n| raw::header(n).fsid[2] ^= 1)
    }),
    seen("node-of-another-address", BOTH, &[Kind::NodeAddress], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).bytenr.set(leaf.0 + 16384))
    }),
    seen("node-level", BOTH, &[Kind::NodeLevel], |d| edit_leaf(d, |n| raw::header(n).level = 1)),
    seen("node-owner", BOTH, &[Kind::NodeOwner], |d| edit_leaf(d, |n| raw::header(n).owner.set(7))),
    seen("node-owner-that-does-not-use-it", BOTH, &[Kind::NodeOwner], |d| {
        edit_leaf(d, |n| raw::header(n).owner.set(9999))
    }),
    seen("node-owner-of-a-root", BOTH, &[Kind::NodeOwner], |d| {
        let root = d.root(FS)?;
        d.edit_node(root, |n| raw::header(n).owner.set(999))
    }),
    seen("node-older-than-its-pointer", BOTH, &[Kind::NodeGeneration], |d| {
        edit_leaf(d, |n| older(raw::header(n)))
    }),
    missed("node-not-written-flag", BOTH, &[Kind::NodeFlags], |d| {
        edit_leaf(d, |n| raw::header(n).set_flags(0))
    }),
    missed("node-backref-revision", BOTH, &[Kind::NodeFlags], |d| {
        edit_leaf(d, |n| raw::header(n).flags_and_rev.set(1))
    }),
    missed("node-chunk-tree-uuid", BOTH, &[Kind::NodeChunkTreeUuid], |d| {
        edit_leaf(d, |n| raw::header(n).chunk_tree_uuid[0] ^= 1)
    }),
    seen("node-keys-out-of-order", BOTH, &[Kind::NodeKeyOrder], |d| {
        edit_leaf(d, |n| {
            let (a, b) = (raw::item(n, 5).key, raw::item(n, 6).key);
            raw::item(n, 5).key = b;
            raw::item(n, 6).key = a;
        })
    }),
    seen("node-key-twice", BOTH, &[Kind::NodeKeyOrder], |d| {
        edit_leaf(d, |n| raw::item(n, 6).key = raw::item(n, 5).key)
    }),
    seen("node-pointer-keys-out-of-order", BOTH, &[Kind::NodeKeyOrder], |d| {
        edit_parent(d, |n, slot| {
            let (a, b) = (*raw::pointer(n, slot - 1), *raw::pointer(n, slot));
            *raw::pointer(n, slot - 1) = b;
            *raw::pointer(n, slot) = a;
        })
    }),
    seen("node-key-in-the-parent", BOTH, &[Kind::NodeFirstKey], |d| {
        edit_parent(d, |n, slot| {
            let key = &mut raw::pointer(n, slot).key;
            key.offset.set(key.offset.get() - 1);
        })
    }),
    seen("node-generation-in-the-parent", BOTH, &[Kind::NodeGeneration], |d| {
        edit_parent(d, |n, slot| {
            let generation = &mut raw::pointer(n, slot).generation;
            generation.set(generation.get() - 1);
        })
    }),
    seen("node-that-points-to-itself", BOTH, &[Kind::NodeLevel], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| raw::pointer(n, slot).blockptr.set(parent.0))
    }),
    seen("node-pointed-to-twice", BOTH, &[Kind::NodeFirstKey], |d| {
        edit_parent(d, |n, slot| {
            let sibling = *raw::pointer(n, slot - 1);
            let pointer = raw::pointer(n, slot);
            (pointer.blockptr, pointer.generation) = (sibling.blockptr, sibling.generation);
        })
    }),
    seen("node-pointer-unaligned", BOTH, &[Kind::NodeLayout], |d| {
        edit_parent(d, |n, slot| {
            let at = &mut raw::pointer(n, slot).blockptr;
            at.set(at.get() + 512);
        })
    }),
    seen("node-pointer-outside-of-chunks", BOTH, &[Kind::NodeUnmapped], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        let nowhere = find::unmapped(d);
        d.edit_node(parent, |n| raw::pointer(n, slot).blockptr.set(nowhere.0))
    }),
    seen("node-items-overlap", BOTH, &[Kind::NodeLayout], |d| {
        edit_leaf(d, |n| {
            let offset = &mut raw::item(n, 5).offset;
            offset.set(offset.get() + 4);
        })
    }),
    seen("node-item-reaches-past-the-leaf", BOTH, &[Kind::NodeLayout], |d| {
        edit_leaf(d, |n| raw::item(n, 0).size.set(60_000))
    }),
    seen("node-more-items-than-fit", BOTH, &[Kind::NodeLayout], |d| {
        edit_leaf(d, |n| raw::header(n).nritems.set(10_000))
    }),
    seen("node-empty-leaf", BOTH, &[Kind::NodeLayout], |d| {
        edit_leaf(d, |n| raw::header(n).nritems.set(0))
    }),
    seen("node-more-pointers-than-fit", BOTH, &[Kind::NodeLayout], |d| {
        let root = d.root(FS)?;
        d.edit_node(root, |n| raw::header(n).nritems.set(494))
    }),
    missed("node-copies-differ", BOTH, &[Kind::NodeCopiesDiffer], |d| {
        let leaf = find::fs_leaf(d)?;
        // The transaction in the first item, an entry of a directory.
        d.edit_node_in(leaf, Copies::Only(1), Seal::Fix, |n| {
            let at = HEADER_SIZE + raw::item(n, 0).offset.get() as usize;
            n[at + 17] ^= 1;
        })
    }),
    seen("node-with-a-key-of-its-neighbour", BOTH, &[Kind::NodeKeyRange], |d| {
        let leaf = find::fs_leaf(d)?;
        let last = NodeView(&d.node(leaf)?).nritems() - 1;
        d.edit_node(leaf, |n| {
            let offset = &mut raw::item(n, last).key.offset;
            offset.set(offset.get() + 100_000);
        })
    }),
    seen("node-rotten-root-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::ROOT_TREE)
    }),
    seen("node-rotten-chunk-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::CHUNK_TREE)
    }),
    seen("node-rotten-extent-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::EXTENT_TREE)
    }),
    seen("node-rotten-device-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::DEV_TREE)
    }),
    seen("node-rotten-block-group-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::BLOCK_GROUP_TREE)
    }),
    seen("node-rotten-free-space-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::FREE_SPACE_TREE)
    }),
    seen("node-rotten-uuid-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::UUID_TREE)
    }),
    seen("node-rotten-data-relocation-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        rot(d, ObjectId::DATA_RELOC_TREE)
    }),
];
