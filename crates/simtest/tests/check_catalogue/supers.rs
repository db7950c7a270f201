//! Superblocks, their mirrors, and the array of system chunks.

use crate::entry::{BOTH, Entry, LINUX, missed, seen};
use crate::find::{self, ROOTS, UUIDS};
use larder_check::Kind;
use larder_format::items::BlockGroupFlags;
use larder_format::items::chunk::{encode_sys_array, parse_sys_array};
use larder_format::{Incompat, Key, Logical};

pub(crate) const ENTRIES: &[Entry] = &[
    seen("super-rotten", BOTH, &[Kind::SuperPrimary], |d| d.edit_super_bytes(0, |b| b[0x130] ^= 1)),
    seen("super-without-magic", BOTH, &[Kind::SuperPrimary], |d| {
        d.edit_super_bytes(0, |b| b[0x40..0x48].fill(0))
    }),
    missed("super-mirror-rotten", BOTH, &[Kind::SuperMirror], |d| {
        d.edit_super_bytes(1, |b| b[0x130] ^= 1)
    }),
    missed("super-mirror-without-magic", BOTH, &[Kind::SuperMirror], |d| {
        d.edit_super_bytes(1, |b| b.fill(0))
    }),
    missed("super-mirror-stale", BOTH, &[Kind::SuperMirrorGeneration], |d| {
        d.edit_super_copy(1, |s| s.generation.set(s.generation.get() - 1))
    }),
    missed("super-mirror-of-another-file-system", BOTH, &[Kind::SuperMirrorDiffers], |d| {
        d.edit_super_copy(1, |s| {
            s.fsid[0] ^= 1;
            s.dev_item.fsid = s.fsid;
        })
    }),
    missed("super-mirror-with-another-root", BOTH, &[Kind::SuperMirrorDiffers], |d| {
        d.edit_super_copy(1, |s| s.root.set(s.root.get() + 65536))
    }),
    seen("super-bytes-used-too-large", BOTH, &[Kind::SuperBytesUsed], |d| {
        d.edit_super(|s| s.bytes_used.set(s.bytes_used.get() + 4096))
    }),
    seen("super-total-bytes-too-large", BOTH, &[Kind::SuperTotalBytes], |d| {
        d.edit_super(|s| s.total_bytes.set(s.total_bytes.get() + (1 << 20)))
    }),
    seen("super-generation-too-new", BOTH, &[Kind::NodeGeneration], |d| {
        d.edit_super(|s| s.generation.set(s.generation.get() + 1))
    }),
    seen("super-root-level", BOTH, &[Kind::NodeLevel], |d| d.edit_super(|s| s.root_level += 1)),
    seen("super-root-at-another-node", BOTH, &[Kind::NodeOwner], |d| {
        let other = d.root(UUIDS)?;
        d.edit_super(|s| s.root.set(other.0))
    }),
    seen("super-root-in-free-space", BOTH, &[Kind::NodeAddress], |d| {
        let free = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
        d.edit_super(|s| s.root.set(free.0))
    }),
    seen("super-root-outside-of-chunks", BOTH, &[Kind::NodeUnmapped], |d| {
        let nowhere = find::unmapped(d);
        d.edit_super(|s| s.root.set(nowhere.0))
    }),
    seen("super-chunk-root-at-another-node", BOTH, &[Kind::NodeUnmapped], |d| {
        let other = d.root(ROOTS)?;
        d.edit_super(|s| s.chunk_root.set(other.0))
    }),
    seen("super-chunk-root-generation", BOTH, &[Kind::NodeGeneration], |d| {
        d.edit_super(|s| s.chunk_root_generation = s.generation)
    }),
    seen("super-chunk-root-level", BOTH, &[Kind::NodeLevel], |d| {
        d.edit_super(|s| s.chunk_root_level += 1)
    }),
    seen("super-dev-item-of-another-file-system", BOTH, &[Kind::SuperField], |d| {
        d.edit_super(|s| s.dev_item.fsid[0] ^= 1)
    }),
    missed("super-dev-item-total", BOTH, &[Kind::SuperDeviceItem], |d| {
        d.edit_super(|s| s.dev_item.total_bytes.set(s.dev_item.total_bytes.get() - (1 << 20)))
    }),
    missed("super-dev-item-used", BOTH, &[Kind::SuperDeviceItem], |d| {
        d.edit_super(|s| s.dev_item.bytes_used.set(s.dev_item.bytes_used.get() - (1 << 20)))
    }),
    seen("super-dev-item-uuid", BOTH, &[Kind::SuperDeviceItem], |d| {
        d.edit_super(|s| s.dev_item.uuid[3] ^= 1)
    }),
    seen("super-log-root-in-free-space", BOTH, &[Kind::NodeAddress], |d| {
        let free = find::free_space(d, BlockGroupFlags::METADATA, 1 << 20)?;
        d.edit_super(|s| s.log_root.set(free.0))
    }),
    seen("super-log-root-outside-of-chunks", BOTH, &[Kind::NodeUnmapped], |d| {
        let nowhere = find::unmapped(d);
        d.edit_super(|s| s.log_root.set(nowhere.0))
    }),
    seen("super-log-root-at-another-node", BOTH, &[Kind::LogDamaged], |d| {
        let other = find::fs_leaf(d)?;
        d.edit_super(|s| s.log_root.set(other.0))
    }),
    seen("super-sys-array-cut-off", BOTH, &[Kind::SuperSystemChunks], |d| {
        d.edit_super(|s| s.sys_chunk_array_size.set(s.sys_chunk_array_size.get() - 8))
    }),
    missed("super-sys-array-stripe-elsewhere", BOTH, &[Kind::SystemChunkDiffers], |d| {
        let mut chunks = parse_sys_array(d.superblock().sys_chunk_bytes())?;
        // The second copy: the first still leads to the chunk tree.
        chunks[0].1.stripes[1].offset.0 += 64 << 20;
        let bytes = encode_sys_array(chunks.iter().map(|(k, c)| (*k, c)))?;
        d.edit_super(|s| s.set_sys_chunk_bytes(&bytes).expect("no longer than before"))
    }),
    missed("super-sys-array-surplus", BOTH, &[Kind::SystemChunkDiffers], |d| {
        let mut chunks = parse_sys_array(d.superblock().sys_chunk_bytes())?;
        let (mut key, mut chunk) = chunks[0].clone();
        key.offset = find::unmapped(d).0;
        for (n, stripe) in chunk.stripes.iter_mut().enumerate() {
            stripe.offset.0 = (200 << 20) + (n as u64) * chunk.length;
        }
        chunks.push((key, chunk));
        let bytes = encode_sys_array(chunks.iter().map(|(k, c)| (*k, c)))?;
        d.edit_super(|s| s.set_sys_chunk_bytes(&bytes).expect("room for two"))
    }),
    missed("super-backup-root-of-this-commit-elsewhere", BOTH, &[Kind::SuperBackupRoot], |d| {
        let slot = d.superblock().current_backup_slot().unwrap_or(0);
        d.edit_super(|s| s.backup_roots[slot].tree_root.set(s.root.get() + 65536))
    }),
    seen("super-lacks-skinny-metadata", BOTH, &[Kind::SuperFeature], |d| {
        d.edit_super(|s| s.set_incompat(Incompat::from_bits_retain(s.incompat().bits() & !0x100)))
    }),
    missed("super-lacks-compress-zstd", LINUX, &[Kind::SuperFeature], |d| {
        d.edit_super(|s| s.set_incompat(Incompat::from_bits_retain(s.incompat().bits() & !0x10)))
    }),
    seen("super-root-unaligned", BOTH, &[Kind::SuperField], |d| {
        d.edit_super(|s| s.root = Logical(s.root.get() + 512).0.into())
    }),
    missed("super-marked-as-damaged", BOTH, &[Kind::SuperErrorFlag], |d| {
        d.edit_super(|s| s.flags.set(s.flags.get() | 4))
    }),
    seen("super-in-the-midst-of-a-conversion", BOTH, &[Kind::SuperInterrupted], |d| {
        d.edit_super(|s| s.flags.set(s.flags.get() | 1 << 38))
    }),
    seen("super-of-two-devices", BOTH, &[Kind::SuperNumDevices], |d| {
        d.edit_super(|s| s.num_devices.set(2))
    }),
    seen("super-sys-array-lacks-a-chunk", BOTH, &[Kind::SystemChunkMissing], |d| {
        let chunks = parse_sys_array(d.superblock().sys_chunk_bytes())?;
        let (key, mut chunk) = chunks[0].clone();
        let behind = find::behind_dev_extents(d)?;
        (chunk.length, chunk.stripes[0].offset.0) = (1 << 20, behind);
        chunk.stripes[1].offset.0 = behind + (1 << 20);
        d.insert(find::CHUNKS, Key { offset: find::unmapped(d).0, ..key }, &chunk.encode())
    }),
    missed("super-without-root-directory", BOTH, &[Kind::SuperField], |d| {
        d.edit_super(|s| s.root_dir_objectid.set(0))
    }),
];
