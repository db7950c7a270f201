//! A file system becomes a seed, or an ordinary one again.
//!
//! The mark is a flag of the superblock, and nothing else changes. A file system that was built
//! upon the seed knows it by its generation, so the mark may be taken away and set again as long as
//! nothing was written in between.

use crate::error::{Error, Result};
use crate::filesystem::missing_devices;
use larder_format::SuperFlags;
use larder_volume::superblock::write_superblocks;
use larder_volume::{Assembly, Device, SuperCopies, VolumeError, read_superblock};
use std::sync::Arc;

/// Marks the file system on these devices as a seed, or takes the mark away. Durable on return.
/// Returns whether anything has changed.
///
/// # Errors
/// `Volume` for devices that do not belong together, that are missing, and what they say;
/// `Unsupported` for a log that waits to be replayed.
pub fn set_seed(devices: Vec<Arc<dyn Device>>, seed: bool) -> Result<bool> {
    let found = Assembly::of(devices)?;
    is_whole(&found)?;
    let flags = found.superblock.super_flags();
    if flags.contains(SuperFlags::SEEDING) == seed {
        return Ok(false);
    }
    if found.superblock.log_root().is_some() {
        let name = found.first().device.name();
        let what = "what was synced last is in its log only; mount it once and unmount it";
        return Err(Error::Unsupported(format!("{name}: {what}")));
    }
    for one in found.devices.iter().filter(|one| one.seed.is_none()) {
        let device = &*one.device;
        let mut superblock = read_superblock(device)?;
        let mut flags = superblock.super_flags();
        flags.set(SuperFlags::SEEDING, seed);
        superblock.set_super_flags(flags);
        write_superblocks(device, &superblock, SuperCopies::All)?;
        device.flush().map_err(|e| VolumeError::flush(device, e))?;
    }
    Ok(true)
}

/// Are all devices there, those of seeds aside, and is none behind?
fn is_whole(found: &Assembly) -> Result<()> {
    let device = found.first().device.name();
    let devices = found.devices.iter().map(|one| one.device.clone()).collect();
    let missing = missing_devices(devices)?.into_iter().find(|device| device.seed.is_none());
    if let Some(missing) = missing {
        let what = format!("{missing} is missing, and every device has to be marked");
        return Err(VolumeError::Missing { device, what }.into());
    }
    if let Some(stale) = found.stale().next() {
        let (id, name) = (stale.id, stale.device.name());
        let what = format!("device {id} ({name}) is behind the others; `larder scrub` mends it");
        return Err(Error::Unsupported(format!("{device}: {what}")));
    }
    Ok(())
}
