//! Makes an empty file system, in the shape that a current mkfs.btrfs gives it.
//!
//! This module hides everything that only a new file system needs: default profiles and sizes, the
//! first chunks (`layout`), the first trees (`build`), and wiping what another file system left
//! behind (`signatures` says what that was). The same options on a device of the same size give the
//! same bytes, apart from uuids and times. With a uuid and a time given they are *exactly* the
//! same, as reproducible image builds need it: the other uuids are derived from the given one.
//!
//! Until the first superblock is durable the device holds no file system: old superblocks are wiped
//! first, then blocks are written and flushed, then the superblock and its mirrors.

mod build;
mod features;
mod items;
mod layout;
mod plan;
mod signatures;

pub use features::Features;
pub use layout::{Profile, minimum_size};
pub use plan::{MkfsOptions, derived_uuid};
pub use signatures::recognise;

use crate::{Error, Result};
use build::Image;
use larder_format::dev_item::DevItem;
use larder_format::features::{CompatRo, Incompat, SuperFlags};
use larder_format::superblock::{BackupRoot, MAGIC, ROOT_DIR_OBJECTID, Superblock};
use larder_format::{CsumType, DiskKey, Generation, Key, KeyType, ObjectId, Physical};
use larder_volume::superblock::{SuperCopies, write_superblocks};
use larder_volume::{ChunkMap, Device, VolumeError, VolumeResult};
use plan::{GENERATION, Plan};
use std::ops::Range;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MkfsReport {
    /// Uuid of the file system.
    pub uuid: [u8; 16],
    /// Bytes of the device that it uses.
    pub total_bytes: u64,
    /// Logical bytes in use by its trees.
    pub bytes_used: u64,
    /// Bytes of a tree node.
    pub nodesize: u32,
    /// Checksum.
    pub csum: CsumType,
    /// Copies of metadata.
    pub metadata: Profile,
    /// Copies of data.
    pub data: Profile,
    /// Features.
    pub features: Features,
}

/// Makes a file system on the whole of `device`.
///
/// # Errors
/// [`Error::Unsupported`] for options that do not go together, a device that is too small, or one
/// that already holds something (unless forced). Nothing has been changed then. [`Error::Volume`]
/// when the device fails.
pub fn mkfs(device: &dyn Device, options: &MkfsOptions) -> Result<MkfsReport> {
    let plan = Plan::new(device.size(), options)?;
    let label = labelled(&options.label)?;
    if !options.force
        && let Some(found) = recognise(device)
    {
        return Err(Error::Unsupported(format!("{} already holds {found}", device.name())));
    }
    let image = build::build(&plan);
    wipe(device, options.discard)?;
    write_blocks(device, &plan, &image)?;
    flush(device)?;
    write_superblocks(device, &superblock(&plan, &image, label), SuperCopies::All)?;
    flush(device)?;
    Ok(MkfsReport {
        uuid: plan.fsid,
        total_bytes: plan.total_bytes,
        bytes_used: image.bytes_used,
        nodesize: plan.nodesize,
        csum: plan.csum,
        metadata: plan.metadata,
        data: plan.data,
        features: plan.features,
    })
}

/// A superblock that has only a label.
fn labelled(label: &[u8]) -> Result<Box<Superblock>> {
    let mut sb = Superblock::new_box_zeroed().expect("memory for one superblock");
    sb.set_label(label).map_err(|e| Error::Unsupported(e.to_string()))?;
    Ok(sb)
}

/// Room that other formats use at both ends of a device.
const ENDS: u64 = 2 << 20;
/// Unit in which old bytes are searched and overwritten.
const WIPE_BLOCK: u64 = 4096;

/// Wipes what was on the device. It writes nothing where there is nothing, so a sparse file stays
/// sparse.
///
/// # Errors
/// [`Error::Volume`] when the device fails.
pub fn wipe(device: &dyn Device, discard: bool) -> Result<()> {
    let size = device.size();
    if discard && let Err(e) = device.discard(Physical(0), size) {
        tracing::debug!("discarding {} failed, going on: {e}", device.name());
    }
    zero(device, Physical(0)..Physical(ENDS.min(size)))?;
    for at in larder_volume::superblock::copies_within(size) {
        zero(device, at..at.plus(WIPE_BLOCK))?;
    }
    zero(device, Physical(size.saturating_sub(ENDS))..Physical(size))?;
    flush(device)
}

/// Writes zeros over what is not zero.
fn zero(device: &dyn Device, range: Range<Physical>) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let len = WIPE_BLOCK.min(range.end.0 - at.0);
        let block = &mut [0; WIPE_BLOCK as usize][..usize::try_from(len).expect("one block")];
        device.read_at(at, block).map_err(|e| io_error(device, "read", at, len, e))?;
        if block.iter().any(|b| *b != 0) {
            block.fill(0);
            device.write_at(at, block).map_err(|e| io_error(device, "write", at, len, e))?;
        }
        at = at.plus(len);
    }
    Ok(())
}

fn write_blocks(device: &dyn Device, plan: &Plan, image: &Image) -> VolumeResult<()> {
    let map = ChunkMap::new();
    for chunk in plan.layout.chunks() {
        map.insert(chunk.clone())?;
    }
    for (at, block) in &image.blocks {
        for stripe in map.lookup(*at, block.len() as u64)?.stripes {
            device
                .write_at(stripe.at, block)
                .map_err(|e| io_error(device, "write", stripe.at, block.len() as u64, e))?;
        }
    }
    Ok(())
}

fn flush(device: &dyn Device) -> Result<()> {
    Ok(device.flush().map_err(|e| io_error(device, "flush", Physical(0), device.size(), e))?)
}

fn io_error(
    device: &dyn Device,
    op: &'static str,
    at: Physical,
    len: u64,
    source: std::io::Error,
) -> VolumeError {
    VolumeError::Io { device: device.name(), op, at, len, source }
}

/// Completes the superblock.
fn superblock(plan: &Plan, image: &Image, mut sb: Box<Superblock>) -> Box<Superblock> {
    let tree = |id: ObjectId| image.trees[&id];
    let (root, chunk_root) = (tree(ObjectId::ROOT_TREE), tree(ObjectId::CHUNK_TREE));
    sb.magic = MAGIC;
    sb.fsid = plan.fsid;
    sb.set_super_flags(SuperFlags::WRITTEN);
    sb.set_generation(GENERATION);
    sb.set_root(root.root, root.level);
    sb.set_chunk_root(chunk_root.root, chunk_root.level, GENERATION);
    sb.set_total_bytes(plan.total_bytes);
    sb.set_bytes_used(image.bytes_used);
    sb.root_dir_objectid.set(ROOT_DIR_OBJECTID);
    sb.num_devices.set(1);
    sb.sectorsize.set(larder_format::SECTOR_SIZE);
    sb.nodesize.set(plan.nodesize);
    sb.leafsize.set(plan.nodesize);
    sb.stripesize.set(larder_format::SECTOR_SIZE);
    sb.set_compat_ro(CompatRo::from_bits_retain(plan.features.compat_ro()));
    sb.set_incompat(Incompat::from_bits_retain(plan.features.incompat(plan.nodesize)));
    sb.set_csum_type(plan.csum);
    sb.dev_item = DevItem::read_from_bytes(&items::dev_item(plan)).expect("a device item");
    // With a free-space tree there is no older cache. Without one, a generation that never comes
    // says the same.
    sb.set_cache_generation(Generation(if plan.features.free_space_tree { 0 } else { u64::MAX }));
    let key = Key::new(256, KeyType::CHUNK_ITEM, plan.layout.system.start.0);
    let system = [DiskKey::from(key).as_bytes(), &items::chunk(plan, &plan.layout.system)].concat();
    sb.set_sys_chunk_bytes(&system).expect("one chunk fits");
    let pair = |id: ObjectId| (U64::new(tree(id).root.0), U64::new(GENERATION.0));
    let mut backup = BackupRoot::new_zeroed();
    (backup.tree_root, backup.tree_root_gen) = pair(ObjectId::ROOT_TREE);
    (backup.chunk_root, backup.chunk_root_gen) = pair(ObjectId::CHUNK_TREE);
    (backup.extent_root, backup.extent_root_gen) = pair(ObjectId::EXTENT_TREE);
    (backup.fs_root, backup.fs_root_gen) = pair(ObjectId::FS_TREE);
    (backup.dev_root, backup.dev_root_gen) = pair(ObjectId::DEV_TREE);
    (backup.csum_root, backup.csum_root_gen) = pair(ObjectId::CSUM_TREE);
    backup.total_bytes.set(plan.total_bytes);
    backup.bytes_used.set(image.bytes_used);
    backup.num_devices.set(1);
    backup.tree_root_level = root.level;
    backup.chunk_root_level = chunk_root.level;
    sb.backup_roots[0] = backup;
    sb
}

#[cfg(test)]
mod tests;
