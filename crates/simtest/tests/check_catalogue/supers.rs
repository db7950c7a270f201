//! Superblocks, their mirrors, and the array of system chunks.

use crate::bases::{BOTH, LINUX};
use crate::entry::{Entry, Progs};
use crate::find::{self, ROOTS, UUIDS};
use larder_check::Kind;
use larder_format::items::BlockGroupFlags;
use larder_format::items::chunk::{encode_sys_array, parse_sys_array};
use larder_format::{Incompat, Key, Logical};

pub(crate) const ENTRIES: &[Entry] = &[
    Entry {
        name: "super-rotten",
        bases: BOTH,
        kinds: &[Kind::SuperPrimary],
        progs: Progs::Sees,
        plant: |d| d.edit_super_bytes(0, |b| b[0x130] ^= 1),
    },
    Entry {
        name: "super-without-magic",
        bases: BOTH,
        kinds: &[Kind::SuperPrimary],
        progs: Progs::Sees,
        plant: |d| d.edit_super_bytes(0, |b| b[0x40..0x48].fill(0)),
    },
    Entry {
        name: "super-mirror-rotten",
        bases: BOTH,
        kinds: &[Kind::SuperMirror],
        progs: Progs::Misses,
        plant: |d| d.edit_super_bytes(1, |b| b[0x130] ^= 1),
    },
    Entry {
        name: "super-mirror-without-magic",
        bases: BOTH,
        kinds: &[Kind::SuperMirror],
        progs: Progs::Misses,
        plant: |d| d.edit_super_bytes(1, |b| b.fill(0)),
    },
    Entry {
        name: "super-mirror-stale",
        bases: BOTH,
        kinds: &[Kind::SuperMirrorGeneration],
        progs: Progs::Misses,
        plant: |d| d.edit_super_copy(1, |s| s.generation.set(s.generation.get() - 1)),
    },
    Entry {
        name: "super-mirror-of-another-file-system",
        bases: BOTH,
        kinds: &[Kind::SuperMirrorDiffers],
        progs: Progs::Misses,
        plant: |d| {
            d.edit_super_copy(1, |s| {
                s.fsid[0] ^= 1;
                s.dev_item.fsid = s.fsid;
            })
        },
    },
    Entry {
        name: "super-mirror-with-another-root",
        bases: BOTH,
        kinds: &[Kind::SuperMirrorDiffers],
        progs: Progs::Misses,
        plant: |d| d.edit_super_copy(1, |s| s.root.set(s.root.get() + 65536)),
    },
    Entry {
        name: "super-bytes-used-too-large",
        bases: BOTH,
        kinds: &[Kind::SuperBytesUsed],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.bytes_used.set(s.bytes_used.get() + 4096)),
    },
    Entry {
        name: "super-total-bytes-too-large",
        bases: BOTH,
        kinds: &[Kind::SuperTotalBytes],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.total_bytes.set(s.total_bytes.get() + (1 << 20))),
    },
    Entry {
        name: "super-generation-too-new",
        bases: BOTH,
        kinds: &[Kind::NodeGeneration],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.generation.set(s.generation.get() + 1)),
    },
    Entry {
        name: "super-root-level",
        bases: BOTH,
        kinds: &[Kind::NodeLevel],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.root_level += 1),
    },
    Entry {
        name: "super-root-at-another-node",
        bases: BOTH,
        kinds: &[Kind::NodeOwner],
        progs: Progs::Sees,
        plant: |d| {
            let other = d.root(UUIDS)?;
            d.edit_super(|s| s.root.set(other.0))
        },
    },
    Entry {
        name: "super-root-in-free-space",
        bases: BOTH,
        kinds: &[Kind::NodeAddress],
        progs: Progs::Sees,
        plant: |d| {
            let free = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
            d.edit_super(|s| s.root.set(free.0))
        },
    },
    Entry {
        name: "super-root-outside-of-chunks",
        bases: BOTH,
        kinds: &[Kind::NodeUnmapped],
        progs: Progs::Sees,
        plant: |d| {
            let nowhere = find::unmapped(d);
            d.edit_super(|s| s.root.set(nowhere.0))
        },
    },
    Entry {
        name: "super-chunk-root-at-another-node",
        bases: BOTH,
        kinds: &[Kind::NodeUnmapped],
        progs: Progs::Sees,
        plant: |d| {
            let other = d.root(ROOTS)?;
            d.edit_super(|s| s.chunk_root.set(other.0))
        },
    },
    Entry {
        name: "super-chunk-root-generation",
        bases: BOTH,
        kinds: &[Kind::NodeGeneration],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.chunk_root_generation = s.generation),
    },
    Entry {
        name: "super-chunk-root-level",
        bases: BOTH,
        kinds: &[Kind::NodeLevel],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.chunk_root_level += 1),
    },
    Entry {
        name: "super-dev-item-of-another-file-system",
        bases: BOTH,
        kinds: &[Kind::SuperField],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.dev_item.fsid[0] ^= 1),
    },
    Entry {
        name: "super-dev-item-total",
        bases: BOTH,
        kinds: &[Kind::SuperDeviceItem],
        progs: Progs::Misses,
        plant: |d| d.edit_super(|s| s.dev_item.total_bytes.set(s.dev_item.total_bytes.get() - (1 << 20))),
    },
    Entry {
        name: "super-dev-item-used",
        bases: BOTH,
        kinds: &[Kind::SuperDeviceItem],
        progs: Progs::Misses,
        plant: |d| d.edit_super(|s| s.dev_item.bytes_used.set(s.dev_item.bytes_used.get() - (1 << 20))),
    },
    Entry {
        name: "super-dev-item-uuid",
        bases: BOTH,
        kinds: &[Kind::SuperDeviceItem],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.dev_item.uuid[3] ^= 1),
    },
    Entry {
        name: "super-log-root-in-free-space",
        bases: BOTH,
        kinds: &[Kind::NodeAddress],
        progs: Progs::Sees,
        plant: |d| {
            let free = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
            d.edit_super(|s| s.log_root.set(free.0))
        },
    },
    Entry {
        name: "super-log-root-outside-of-chunks",
        bases: BOTH,
        kinds: &[Kind::NodeUnmapped],
        progs: Progs::Sees,
        plant: |d| {
            let nowhere = find::unmapped(d);
            d.edit_super(|s| s.log_root.set(nowhere.0))
        },
    },
    Entry {
        name: "super-log-root-at-another-node",
        bases: BOTH,
        kinds: &[Kind::LogDamaged],
        progs: Progs::Sees,
        plant: |d| {
            let other = find::fs_leaf(d)?;
            d.edit_super(|s| s.log_root.set(other.0))
        },
    },
    Entry {
        name: "super-sys-array-cut-off",
        bases: BOTH,
        kinds: &[Kind::SuperSystemChunks],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.sys_chunk_array_size.set(s.sys_chunk_array_size.get() - 8)),
    },
    Entry {
        name: "super-sys-array-stripe-elsewhere",
        bases: BOTH,
        kinds: &[Kind::SystemChunkDiffers],
        progs: Progs::Misses,
        plant: |d| {
            let mut chunks = parse_sys_array(d.superblock().sys_chunk_bytes())?;
            // The second copy: the first still leads to the chunk tree.
            chunks[0].1.stripes[1].offset.0 += 64 << 20;
            let bytes = encode_sys_array(chunks.iter().map(|(k, c)| (*k, c)))?;
            d.edit_super(|s| s.set_sys_chunk_bytes(&bytes).expect("no longer than before"))
        },
    },
    Entry {
        name: "super-sys-array-surplus",
        bases: BOTH,
        kinds: &[Kind::SystemChunkDiffers],
        progs: Progs::Misses,
        plant: |d| {
            let mut chunks = parse_sys_array(d.superblock().sys_chunk_bytes())?;
            let (mut key, mut chunk) = chunks[0].clone();
            key.offset = find::unmapped(d).0;
            for (n, stripe) in chunk.stripes.iter_mut().enumerate() {
                stripe.offset.0 = (200 << 20) + (n as u64) * chunk.length;
            }
            chunks.push((key, chunk));
            let bytes = encode_sys_array(chunks.iter().map(|(k, c)| (*k, c)))?;
            d.edit_super(|s| s.set_sys_chunk_bytes(&bytes).expect("room for two"))
        },
    },
    Entry {
        name: "super-backup-root-of-this-commit-elsewhere",
        bases: BOTH,
        kinds: &[Kind::SuperBackupRoot],
        progs: Progs::Misses,
        plant: |d| {
            let slot = d.superblock().current_backup_slot().unwrap_or(0);
            d.edit_super(|s| s.backup_roots[slot].tree_root.set(s.root.get() + 65536))
        },
    },
    Entry {
        name: "super-lacks-skinny-metadata",
        bases: BOTH,
        kinds: &[Kind::SuperFeature],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.set_incompat(Incompat::from_bits_retain(s.incompat().bits() & !0x100))),
    },
    Entry {
        name: "super-lacks-compress-zstd",
        bases: LINUX,
        kinds: &[Kind::SuperFeature],
        progs: Progs::Misses,
        plant: |d| d.edit_super(|s| s.set_incompat(Incompat::from_bits_retain(s.incompat().bits() & !0x10))),
    },
    Entry {
        name: "super-root-unaligned",
        bases: BOTH,
        kinds: &[Kind::SuperField],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.root = Logical(s.root.get() + 512).0.into()),
    },
    Entry {
        name: "super-marked-as-damaged",
        bases: BOTH,
        kinds: &[Kind::SuperErrorFlag],
        progs: Progs::Misses,
        plant: |d| d.edit_super(|s| s.flags.set(s.flags.get() | 4)),
    },
    Entry {
        name: "super-in-the-midst-of-a-conversion",
        bases: BOTH,
        kinds: &[Kind::SuperInterrupted],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.flags.set(s.flags.get() | 1 << 38)),
    },
    Entry {
        name: "super-of-two-devices",
        bases: BOTH,
        kinds: &[Kind::SuperNumDevices],
        progs: Progs::Sees,
        plant: |d| d.edit_super(|s| s.num_devices.set(2)),
    },
    Entry {
        name: "super-sys-array-lacks-a-chunk",
        bases: BOTH,
        kinds: &[Kind::SystemChunkMissing],
        progs: Progs::Sees,
        plant: |d| {
            let chunks = parse_sys_array(d.superblock().sys_chunk_bytes())?;
            let (key, mut chunk) = chunks[0].clone();
            let behind = find::behind_dev_extents(d)?;
            (chunk.length, chunk.stripes[0].offset.0) = (1 << 20, behind);
            chunk.stripes[1].offset.0 = behind + (1 << 20);
            d.insert(find::CHUNKS, Key { offset: find::unmapped(d).0, ..key }, &chunk.encode())
        },
    },
    Entry {
        name: "super-without-root-directory",
        bases: BOTH,
        kinds: &[Kind::SuperField],
        progs: Progs::Misses,
        plant: |d| d.edit_super(|s| s.root_dir_objectid.set(0)),
    },
];
