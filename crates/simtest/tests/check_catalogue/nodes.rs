//! The structure of trees: headers, pointers, keys, and where items lie in a leaf.

use crate::entry::{BOTH, Entry, missed, seen};
use crate::find::{self, CSUMS, FS};
use larder_check::Kind;
use larder_format::ObjectId;
use larder_format::node::{HEADER_SIZE, NodeView};
use larder_simtest::damage::{Copies, Seal, raw};

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
        d.edit_node_in(leaf, Copies::Only(1), Seal::Fix, |n| {
            let header = raw::header(n);
            header.generation.set(header.generation.get() - 1);
        })
    }),
    seen("node-rotten", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n[5000] ^= 1)
    }),
    seen("node-rotten-interior", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(FS)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[200] ^= 1)
    }),
    seen("node-rotten-csum-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(CSUMS)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[3000] ^= 1)
    }),
    seen("node-never-written", BOTH, &[Kind::NodeAddress], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n.fill(0))
    }),
    seen("node-of-another-file-system", BOTH, &[Kind::NodeFsid], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).fsid[2] ^= 1)
    }),
    seen("node-of-another-address", BOTH, &[Kind::NodeAddress], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).bytenr.set(leaf.0 + 16384))
    }),
    seen("node-level", BOTH, &[Kind::NodeLevel], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).level = 1)
    }),
    seen("node-owner", BOTH, &[Kind::NodeOwner], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).owner.set(7))
    }),
    seen("node-owner-of-a-root", BOTH, &[Kind::NodeOwner], |d| {
        let root = d.root(FS)?;
        d.edit_node(root, |n| raw::header(n).owner.set(999))
    }),
    seen("node-older-than-its-pointer", BOTH, &[Kind::NodeGeneration], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| {
            let header = raw::header(n);
            header.generation.set(header.generation.get() - 1);
        })
    }),
    missed("node-not-written-flag", BOTH, &[Kind::NodeFlags], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).set_flags(0))
    }),
    missed("node-backref-revision", BOTH, &[Kind::NodeFlags], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).flags_and_rev.set(1))
    }),
    missed("node-chunk-tree-uuid", BOTH, &[Kind::NodeChunkTreeUuid], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).chunk_tree_uuid[0] ^= 1)
    }),
    seen("node-keys-out-of-order", BOTH, &[Kind::NodeKeyOrder], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| {
            let (a, b) = (raw::item(n, 5).key, raw::item(n, 6).key);
            raw::item(n, 5).key = b;
            raw::item(n, 6).key = a;
        })
    }),
    seen("node-key-twice", BOTH, &[Kind::NodeKeyOrder], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::item(n, 6).key = raw::item(n, 5).key)
    }),
    seen("node-pointer-keys-out-of-order", BOTH, &[Kind::NodeKeyOrder], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| {
            let (a, b) = (*raw::pointer(n, slot - 1), *raw::pointer(n, slot));
            *raw::pointer(n, slot - 1) = b;
            *raw::pointer(n, slot) = a;
        })
    }),
    seen("node-key-in-the-parent", BOTH, &[Kind::NodeFirstKey], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| {
            let key = &mut raw::pointer(n, slot).key;
            key.offset.set(key.offset.get() - 1);
        })
    }),
    seen("node-generation-in-the-parent", BOTH, &[Kind::NodeGeneration], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| {
            let generation = &mut raw::pointer(n, slot).generation;
            generation.set(generation.get() - 1);
        })
    }),
    seen("node-that-points-to-itself", BOTH, &[Kind::NodeLevel], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| raw::pointer(n, slot).blockptr.set(parent.0))
    }),
    seen("node-pointed-to-twice", BOTH, &[Kind::NodeFirstKey], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| {
            let sibling = *raw::pointer(n, slot - 1);
            let pointer = raw::pointer(n, slot);
            (pointer.blockptr, pointer.generation) = (sibling.blockptr, sibling.generation);
        })
    }),
    seen("node-pointer-unaligned", BOTH, &[Kind::NodeLayout], |d| {
        let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
        d.edit_node(parent, |n| {
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
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| {
            let offset = &mut raw::item(n, 5).offset;
            offset.set(offset.get() + 4);
        })
    }),
    seen("node-item-reaches-past-the-leaf", BOTH, &[Kind::NodeLayout], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::item(n, 0).size.set(60_000))
    }),
    seen("node-more-items-than-fit", BOTH, &[Kind::NodeLayout], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).nritems.set(10_000))
    }),
    seen("node-empty-leaf", BOTH, &[Kind::NodeLayout], |d| {
        let leaf = find::fs_leaf(d)?;
        d.edit_node(leaf, |n| raw::header(n).nritems.set(0))
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
        let root = d.root(ObjectId::ROOT_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-chunk-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::CHUNK_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-extent-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::EXTENT_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-device-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::DEV_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-block-group-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::BLOCK_GROUP_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-free-space-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::FREE_SPACE_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-uuid-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::UUID_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
    seen("node-rotten-data-relocation-tree", BOTH, &[Kind::NodeChecksum, Kind::SubtreeLost], |d| {
        let root = d.root(ObjectId::DATA_RELOC_TREE)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
    }),
];
