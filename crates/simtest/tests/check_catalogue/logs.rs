//! Log trees: what an `fsync` left for the next mount.

use crate::entry::{Entry, PENDING, missed, seen};
use crate::find::{self, FS};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::items::{BlockGroupFlags, FileExtent};
use larder_format::{Key, KeyType, Logical, ObjectId};
use larder_simtest::damage::{Copies, Damage, Items, Seal, raw};

const LOG: ObjectId = ObjectId::TREE_LOG;

/// Root of the log of the top-level subvolume, which is a leaf, and its items.
fn log(d: &Damage) -> Result<(Logical, Items)> {
    let at = d.log_root_of(FS)?;
    Ok((at, d.items_below(at)?))
}

/// Writes over bytes of the first item of a type in the log.
fn set(d: &mut Damage, kind: KeyType, at: usize, bytes: &[u8]) -> Result<()> {
    let (leaf, items) = log(d)?;
    let slot = items.iter().position(|(key, data)| {
        let hole =
            || matches!(FileExtent::parse(data), Ok(FileExtent::Stored(r)) if r.disk_bytenr.0 == 0);
        key.kind == kind && (kind != KeyType::EXTENT_DATA || !hole())
    });
    let slot = slot.with_context(|| format!("a {kind} in the log"))?;
    d.edit_node(leaf, |n| {
        let from = 101 + raw::item(n, slot).offset.get() as usize + at;
        n[from..from + bytes.len()].copy_from_slice(bytes);
    })
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("log-rotten", PENDING, &[Kind::LogDamaged], |d| {
        let (leaf, _) = log(d)?;
        d.edit_node_in(leaf, Copies::All, Seal::Leave, |n| n[300] ^= 1)
    }),
    seen("log-root-rotten", PENDING, &[Kind::LogDamaged], |d| {
        let root = d.root(LOG)?;
        d.edit_node_in(root, Copies::All, Seal::Leave, |n| n[300] ^= 1)
    }),
    seen("log-first-copy-rotten", PENDING, &[Kind::NodeChecksum], |d| {
        let (leaf, _) = log(d)?;
        d.edit_node_in(leaf, Copies::Only(0), Seal::Leave, |n| n[300] ^= 1)
    }),
    seen("log-of-another-transaction", PENDING, &[Kind::NodeGeneration], |d| {
        let root = d.root(LOG)?;
        d.edit_node(root, |n| {
            let generation = &mut raw::header(n).generation;
            generation.set(generation.get() - 1);
        })
    }),
    seen("log-root-item-generation", PENDING, &[Kind::LogDamaged], |d| {
        d.item(LOG, Key::new(LOG, KeyType::ROOT_ITEM, FS.0)).add_u64(160, -1)
    }),
    seen("log-level-in-the-superblock", PENDING, &[Kind::LogDamaged], |d| {
        d.edit_super(|s| s.log_root_level = 1)
    }),
    seen("log-keys-out-of-order", PENDING, &[Kind::LogDamaged], |d| {
        let (leaf, _) = log(d)?;
        d.edit_node(leaf, |n| {
            let (a, b) = (raw::item(n, 0).key, raw::item(n, 1).key);
            raw::item(n, 0).key = b;
            raw::item(n, 1).key = a;
        })
    }),
    missed("log-inode-of-no-type", PENDING, &[Kind::InodeInvalid], |d| {
        set(d, KeyType::INODE_ITEM, 52, &[0; 4])
    }),
    seen("log-file-extent-outside-of-chunks", PENDING, &[Kind::LogDamaged], |d| {
        let nowhere = find::unmapped(d);
        set(d, KeyType::EXTENT_DATA, 21, &nowhere.0.to_le_bytes())
    }),
    missed("log-file-extent-of-another-extent", PENDING, &[Kind::LogDamaged], |d| {
        let (_, record) = find::stored(d, "plant/plain")?;
        set(d, KeyType::EXTENT_DATA, 21, &(record.disk_bytenr.0 + 4096).to_le_bytes())
    }),
    seen("log-file-extent-without-checksums", PENDING, &[Kind::ChecksumMissing], |d| {
        let free = find::free_space(d, BlockGroupFlags::DATA, 1 << 20)?.plus(1 << 19);
        set(d, KeyType::EXTENT_DATA, 21, &free.0.to_le_bytes())
    }),
    missed("log-checksums-overlap", PENDING, &[Kind::LogDamaged], |d| {
        let (root, items) = log(d)?;
        let mut sums = items.into_iter().filter(|(key, _)| key.kind == KeyType::EXTENT_CSUM);
        let (key, data) = sums.find(|(_, data)| data.len() >= 8).context("checksums in the log")?;
        d.insert_below(root, Key { offset: key.offset + 4096, ..key }, &data[4..8])
    }),
    missed("log-data-of-other-bytes", PENDING, &[Kind::DataChecksum], |d| {
        let (_, items) = log(d)?;
        let sums = items.into_iter().find(|(key, _)| key.kind == KeyType::EXTENT_CSUM);
        let (key, _) = sums.context("checksums in the log")?;
        d.edit_data(Logical(key.offset), Copies::All, |data| data[7] ^= 1)
    }),
    missed("log-item-of-a-type-that-logs-lack", PENDING, &[Kind::LogDamaged], |d| {
        let (root, _) = log(d)?;
        d.insert_below(root, Key::new(500, KeyType::CHUNK_ITEM, 0), &[0; 10])
    }),
];
