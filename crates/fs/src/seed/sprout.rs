//! A file system is built upon a seed.
//!
//! It is opened as if it existed: with the superblock of the seed, a new fsid, and a device that no
//! tree knows yet. Nothing is written before its first commit, which makes all of it true: the
//! item of the device, the notes in the items of the seeds, and the superblock of the device. No
//! block group of the seed may be written, so the commit needs chunks of its own before it begins.

use crate::api::OpenOptions;
use crate::devices::{item, usable};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, missing_devices};
use crate::space::{DeviceChange, SpaceKind};
use larder_format::features::Incompat;
use larder_format::{DevItem, DeviceId, Generation, HistoryId, SuperFlags};
use larder_volume::{Assembly, Device, Found, VolumeError};
use std::sync::Arc;
use uuid::Uuid;

/// Builds a file system upon the seed on these devices: with the device `new`, on which nothing is
/// wanted any more. It is durable on return.
///
/// # Errors
/// `Unsupported` for a file system that is no seed, and for a device that is too small or
/// read-only; those of [`Filesystem::open_devices`].
pub fn sprout(
    seed: Vec<Arc<dyn Device>>,
    new: Arc<dyn Device>,
    options: OpenOptions,
) -> Result<Arc<Filesystem>> {
    let seed = Assembly::of(seed)?;
    is_seed(&seed)?;
    let size = usable(&*new)?;
    let last = seed.devices.iter().map(|found| found.id.0).max().unwrap_or(0);
    let (uuid, fsid) = (Uuid::new_v4().into_bytes(), Uuid::new_v4().into_bytes());
    let item = item(DeviceId(last + 1), size, uuid, fsid);
    let mut changes = vec![DeviceChange::Add(item)];
    let note = |found: &Found| DeviceChange::Seed(found.id, found.generation);
    changes.extend(seed.devices.iter().map(note));
    let core = Core::open_new(built_upon(seed, new, item), options)?;
    for kind in [SpaceKind::Metadata, SpaceKind::System] {
        core.space.chunk_in_running(&core.txns, kind, core.space.seen(kind))?;
    }
    // Before a thread runs that could commit.
    let handle = core.begin_deleting(1)?;
    handle.txn.device_changes.lock().extend(changes);
    handle.txn.touch();
    drop(handle);
    let fs = Filesystem::on(core.clone())?;
    // The second one comes after what the first one has changed is taken into account.
    core.commit_now()?;
    core.commit_now()?;
    Ok(fs)
}

/// The devices of the seed and the new one, as a file system that goes on from the seed's trees.
fn built_upon(seed: Assembly, new: Arc<dyn Device>, item: DevItem) -> Assembly {
    let mut superblock = seed.superblock.clone();
    let own = Uuid::from_bytes(superblock.metadata_fsid());
    superblock.fsid = item.fsid;
    superblock.metadata_uuid = [0; 16];
    let features = superblock.incompat() & !Incompat::METADATA_UUID;
    superblock.set_incompat(features);
    let flags = superblock.super_flags() & !SuperFlags::SEEDING;
    superblock.set_super_flags(flags);
    superblock.dev_item = item;
    superblock.begin_history(HistoryId::default(), Generation(0));
    let generation = superblock.generation();
    let mut devices: Vec<Found> = seed.devices;
    for found in &mut devices {
        found.seed.get_or_insert(own);
    }
    devices.push(Found {
        id: DeviceId(item.devid.get()),
        uuid: Uuid::from_bytes(item.uuid),
        generation,
        written: generation,
        history: superblock.history(),
        is_stale: false,
        seed: None,
        device: new,
    });
    Assembly::new(superblock, devices)
}

/// Refuses what is no seed, or only a part of one.
fn is_seed(found: &Assembly) -> Result<()> {
    let device = found.first().device.name();
    if !found.superblock.super_flags().contains(SuperFlags::SEEDING) {
        let what = "it is no seed; `larder seed on` makes it one";
        return Err(Error::Unsupported(format!("{device}: {what}")));
    }
    let devices = found.devices.iter().map(|one| one.device.clone()).collect();
    match missing_devices(devices)?.first() {
        Some(missing) => {
            let what = format!("{missing} is missing");
            Err(VolumeError::Missing { device, what }.into())
        }
        None => Ok(()),
    }
}
