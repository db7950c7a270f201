//! The structure of trees: headers, pointers, keys, and where items lie in a leaf.

use crate::bases::BOTH;
use crate::entry::{Entry, Progs};
use crate::find::{self, CSUMS, FS};
use larder_check::Kind;
use larder_format::ObjectId;
use larder_format::node::{HEADER_SIZE, NodeView};
use larder_simtest::damage::{Copies, Seal, raw};

pub(crate) const ENTRIES: &[Entry] = &[
    Entry {
        name: "node-first-copy-rotten",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node_in(leaf, Copies::Only(0), Seal::Leave, |n| n[5000] ^= 1)
        },
    },
    Entry {
        name: "node-second-copy-rotten",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum],
        progs: Progs::Misses,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node_in(leaf, Copies::Only(1), Seal::Leave, |n| n[5000] ^= 1)
        },
    },
    Entry {
        name: "node-second-copy-of-another-time",
        bases: BOTH,
        kinds: &[Kind::NodeGeneration],
        progs: Progs::Misses,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node_in(leaf, Copies::Only(1), Seal::Fix, |n| {
                let header = raw::header(n);
                header.generation.set(header.generation.get() - 1);
            })
        },
    },
    Entry {
        name: "node-rotten",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n[5000] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-interior",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(FS)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[200] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-csum-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(CSUMS)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[3000] ^= 1)
        },
    },
    Entry {
        name: "node-never-written",
        bases: BOTH,
        kinds: &[Kind::NodeAddress],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n.fill(0))
        },
    },
    Entry {
        name: "node-of-another-file-system",
        bases: BOTH,
        kinds: &[Kind::NodeFsid],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).fsid[2] ^= 1)
        },
    },
    Entry {
        name: "node-of-another-address",
        bases: BOTH,
        kinds: &[Kind::NodeAddress],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).bytenr.set(leaf.0 + 16384))
        },
    },
    Entry {
        name: "node-level",
        bases: BOTH,
        kinds: &[Kind::NodeLevel],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).level = 1)
        },
    },
    Entry {
        name: "node-owner",
        bases: BOTH,
        kinds: &[Kind::NodeOwner],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).owner.set(7))
        },
    },
    Entry {
        name: "node-owner-of-a-root",
        bases: BOTH,
        kinds: &[Kind::NodeOwner],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(FS)?;
            d.edit_node(root, |n| raw::header(n).owner.set(999))
        },
    },
    Entry {
        name: "node-older-than-its-pointer",
        bases: BOTH,
        kinds: &[Kind::NodeGeneration],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| {
                let header = raw::header(n);
                header.generation.set(header.generation.get() - 1);
            })
        },
    },
    Entry {
        name: "node-not-written-flag",
        bases: BOTH,
        kinds: &[Kind::NodeFlags],
        progs: Progs::Misses,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).set_flags(0))
        },
    },
    Entry {
        name: "node-backref-revision",
        bases: BOTH,
        kinds: &[Kind::NodeFlags],
        progs: Progs::Misses,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).flags_and_rev.set(1))
        },
    },
    Entry {
        name: "node-chunk-tree-uuid",
        bases: BOTH,
        kinds: &[Kind::NodeChunkTreeUuid],
        progs: Progs::Misses,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).chunk_tree_uuid[0] ^= 1)
        },
    },
    Entry {
        name: "node-keys-out-of-order",
        bases: BOTH,
        kinds: &[Kind::NodeKeyOrder],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| {
                let (a, b) = (raw::item(n, 5).key, raw::item(n, 6).key);
                raw::item(n, 5).key = b;
                raw::item(n, 6).key = a;
            })
        },
    },
    Entry {
        name: "node-key-twice",
        bases: BOTH,
        kinds: &[Kind::NodeKeyOrder],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::item(n, 6).key = raw::item(n, 5).key)
        },
    },
    Entry {
        name: "node-pointer-keys-out-of-order",
        bases: BOTH,
        kinds: &[Kind::NodeKeyOrder],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            d.edit_node(parent, |n| {
                let (a, b) = (*raw::pointer(n, slot - 1), *raw::pointer(n, slot));
                *raw::pointer(n, slot - 1) = b;
                *raw::pointer(n, slot) = a;
            })
        },
    },
    Entry {
        name: "node-key-in-the-parent",
        bases: BOTH,
        kinds: &[Kind::NodeFirstKey],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            d.edit_node(parent, |n| {
                let key = &mut raw::pointer(n, slot).key;
                key.offset.set(key.offset.get() - 1);
            })
        },
    },
    Entry {
        name: "node-generation-in-the-parent",
        bases: BOTH,
        kinds: &[Kind::NodeGeneration],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            d.edit_node(parent, |n| {
                let generation = &mut raw::pointer(n, slot).generation;
                generation.set(generation.get() - 1);
            })
        },
    },
    Entry {
        name: "node-that-points-to-itself",
        bases: BOTH,
        kinds: &[Kind::NodeLevel],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            d.edit_node(parent, |n| raw::pointer(n, slot).blockptr.set(parent.0))
        },
    },
    Entry {
        name: "node-pointed-to-twice",
        bases: BOTH,
        kinds: &[Kind::NodeFirstKey],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            d.edit_node(parent, |n| {
                let sibling = *raw::pointer(n, slot - 1);
                let pointer = raw::pointer(n, slot);
                (pointer.blockptr, pointer.generation) = (sibling.blockptr, sibling.generation);
            })
        },
    },
    Entry {
        name: "node-pointer-unaligned",
        bases: BOTH,
        kinds: &[Kind::NodeLayout],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            d.edit_node(parent, |n| {
                let at = &mut raw::pointer(n, slot).blockptr;
                at.set(at.get() + 512);
            })
        },
    },
    Entry {
        name: "node-pointer-outside-of-chunks",
        bases: BOTH,
        kinds: &[Kind::NodeUnmapped],
        progs: Progs::Sees,
        plant: |d| {
            let (parent, slot) = find::parent_of(d, find::fs_leaf(d)?)?;
            let nowhere = find::unmapped(d);
            d.edit_node(parent, |n| raw::pointer(n, slot).blockptr.set(nowhere.0))
        },
    },
    Entry {
        name: "node-items-overlap",
        bases: BOTH,
        kinds: &[Kind::NodeLayout],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| {
                let offset = &mut raw::item(n, 5).offset;
                offset.set(offset.get() + 4);
            })
        },
    },
    Entry {
        name: "node-item-reaches-past-the-leaf",
        bases: BOTH,
        kinds: &[Kind::NodeLayout],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::item(n, 0).size.set(60_000))
        },
    },
    Entry {
        name: "node-more-items-than-fit",
        bases: BOTH,
        kinds: &[Kind::NodeLayout],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).nritems.set(10_000))
        },
    },
    Entry {
        name: "node-empty-leaf",
        bases: BOTH,
        kinds: &[Kind::NodeLayout],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            d.edit_node(leaf, |n| raw::header(n).nritems.set(0))
        },
    },
    Entry {
        name: "node-more-pointers-than-fit",
        bases: BOTH,
        kinds: &[Kind::NodeLayout],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(FS)?;
            d.edit_node(root, |n| raw::header(n).nritems.set(494))
        },
    },
    Entry {
        name: "node-copies-differ",
        bases: BOTH,
        kinds: &[Kind::NodeCopiesDiffer],
        progs: Progs::Misses,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            // The transaction in the first item, an entry of a directory.
            d.edit_node_in(leaf, Copies::Only(1), Seal::Fix, |n| {
                let at = HEADER_SIZE + raw::item(n, 0).offset.get() as usize;
                n[at + 17] ^= 1;
            })
        },
    },
    Entry {
        name: "node-with-a-key-of-its-neighbour",
        bases: BOTH,
        kinds: &[Kind::NodeKeyRange],
        progs: Progs::Sees,
        plant: |d| {
            let leaf = find::fs_leaf(d)?;
            let last = NodeView(&d.node(leaf)?).nritems() - 1;
            d.edit_node(leaf, |n| {
                let offset = &mut raw::item(n, last).key.offset;
                offset.set(offset.get() + 100_000);
            })
        },
    },
    Entry {
        name: "node-rotten-root-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::ROOT_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-chunk-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::CHUNK_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-extent-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::EXTENT_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-device-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::DEV_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-block-group-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::BLOCK_GROUP_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-free-space-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::FREE_SPACE_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-uuid-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::UUID_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
    Entry {
        name: "node-rotten-data-relocation-tree",
        bases: BOTH,
        kinds: &[Kind::NodeChecksum, Kind::SubtreeLost],
        progs: Progs::Sees,
        plant: |d| {
            let root = d.root(ObjectId::DATA_RELOC_TREE)?;
            d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[130] ^= 1)
        },
    },
];
