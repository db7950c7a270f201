//! Makes an empty file system, in the shape that a current mkfs.btrfs gives it.
//!
//! This module hides everything that only a new file system needs: default profiles and sizes, the
//! first chunks (`layout`), the first trees (`build`), and wiping what another file system left
//! behind (`signatures` says what that was). The same options on devices of the same sizes give the
//! same bytes, apart from uuids and times. With a uuid and a time given they are *exactly* the
//! same, as reproducible image builds need it: the other uuids are derived from the given one.
//!
//! Until the first superblock is durable no device holds a file system: old superblocks are wiped
//! first, then blocks are written (`write`) and flushed, then the superblocks and their mirrors.
//! The first device gets its superblock last, so it never has one while another device has none.

mod build;
mod features;
mod items;
mod layout;
mod plan;
mod signatures;
mod write;

pub use features::Features;
pub use larder_format::items::Profile;
pub use layout::minimum_size;
pub use plan::{MkfsOptions, derived_uuid};
pub use signatures::recognise;

use crate::{Error, Result};
use build::Image;
use larder_format::dev_item::DevItem;
use larder_format::features::{CompatRo, Incompat, SuperFlags};
use larder_format::superblock::{BackupRoot, MAGIC, ROOT_DIR_OBJECTID, Superblock};
use larder_format::{CsumType, DeviceId, DiskKey, Generation, Key, KeyType, ObjectId};
use larder_volume::Device;
use plan::{GENERATION, Plan, PlannedDevice};
pub use write::wipe;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MkfsReport {
    /// Uuid of the file system.
    pub uuid: [u8; 16],
    /// Bytes of the devices that it uses.
    pub total_bytes: u64,
    /// Its devices, in the order in which they were given.
    pub devices: Vec<NewDevice>,
    /// Logical bytes in use by its trees.
    pub bytes_used: u64,
    /// Bytes of a tree node.
    pub nodesize: u32,
    /// Checksum.
    pub csum: CsumType,
    /// Profile of metadata.
    pub metadata: Profile,
    /// Profile of data.
    pub data: Profile,
    /// Features.
    pub features: Features,
}

/// A device of a new file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewDevice {
    /// Its number.
    pub id: DeviceId,
    /// Its own uuid.
    pub uuid: [u8; 16],
    /// Bytes of it that are used.
    pub bytes: u64,
}

/// Makes a file system on the whole of `device`.
///
/// # Errors
/// As [`mkfs_on`].
pub fn mkfs(device: &dyn Device, options: &MkfsOptions) -> Result<MkfsReport> {
    mkfs_on(&[device], options)
}

/// Makes a file system on the whole of all devices.
///
/// # Errors
/// [`Error::Unsupported`] for options that do not go together, too few devices, a device that is
/// too small, or one that already holds something (unless forced). Nothing has been changed then.
/// [`Error::Volume`] when a device fails.
pub fn mkfs_on(devices: &[&dyn Device], options: &MkfsOptions) -> Result<MkfsReport> {
    let sizes: Vec<u64> = devices.iter().map(|device| device.size()).collect();
    let plan = Plan::new(&sizes, options)?;
    let label = labelled(&options.label)?;
    for device in devices.iter().filter(|_| !options.force) {
        if let Some(found) = recognise(*device) {
            return Err(Error::Unsupported(format!("{} already holds {found}", device.name())));
        }
    }
    let image = build::build(&plan);
    write::write(devices, &plan, &image, options.discard, &|device| {
        superblock(&plan, &image, label.clone(), device)
    })?;
    let new = |d: &PlannedDevice| NewDevice { id: d.id, uuid: d.uuid, bytes: d.bytes };
    Ok(MkfsReport {
        uuid: plan.fsid,
        total_bytes: plan.total_bytes(),
        devices: plan.devices.iter().map(new).collect(),
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

/// Completes the superblock of a device.
fn superblock(
    plan: &Plan,
    image: &Image,
    mut sb: Box<Superblock>,
    device: &PlannedDevice,
) -> Box<Superblock> {
    let tree = |id: ObjectId| image.trees[&id];
    let (root, chunk_root) = (tree(ObjectId::ROOT_TREE), tree(ObjectId::CHUNK_TREE));
    sb.magic = MAGIC;
    sb.fsid = plan.fsid;
    sb.set_super_flags(SuperFlags::WRITTEN);
    sb.set_generation(GENERATION);
    sb.set_root(root.root, root.level);
    sb.set_chunk_root(chunk_root.root, chunk_root.level, GENERATION);
    sb.set_total_bytes(plan.total_bytes());
    sb.set_bytes_used(image.bytes_used);
    sb.root_dir_objectid.set(ROOT_DIR_OBJECTID);
    sb.num_devices.set(plan.devices.len() as u64);
    sb.sectorsize.set(larder_format::SECTOR_SIZE);
    sb.nodesize.set(plan.nodesize);
    sb.leafsize.set(plan.nodesize);
    sb.stripesize.set(larder_format::SECTOR_SIZE);
    sb.set_compat_ro(CompatRo::from_bits_retain(plan.features.compat_ro()));
    sb.set_incompat(incompat(plan));
    sb.set_csum_type(plan.csum);
    let own = items::dev_item(plan, device);
    sb.dev_item = DevItem::read_from_bytes(&own).expect("a device item");
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
    backup.total_bytes.set(plan.total_bytes());
    backup.bytes_used.set(image.bytes_used);
    backup.num_devices.set(plan.devices.len() as u64);
    backup.tree_root_level = root.level;
    backup.chunk_root_level = chunk_root.level;
    sb.backup_roots[0] = backup;
    sb
}

/// What a reader has to know: features, and profiles that came later than the others.
fn incompat(plan: &Plan) -> Incompat {
    let mut bits = Incompat::from_bits_retain(plan.features.incompat(plan.nodesize));
    for profile in [plan.metadata, plan.data] {
        bits |= profile.needs();
    }
    bits
}

#[cfg(test)]
mod tests;
