//! A device joins.
//!
//! Until the commit that counts it the device belongs to nothing: no chunk lies on it, and no
//! superblock but its own says that it exists. Its own is durable first, see
//! `transaction::barrier`, and so a device that does not work is refused. One that fails in just
//! the commit that counts it is behind from then on, like any other that fails.
//!
//! Rows of chunks with parity become longer with a device. So what is reserved has to be enough for
//! them before the first such chunk can be made.

use super::{SMALLEST_DEVICE, fit};
use crate::engine::Core;
use crate::engine::exclusive::ExclusiveOperation;
use crate::error::{Error, Result};
use crate::space::DeviceChange;
use larder_format::{DevItem, DeviceId, SECTOR_SIZE};
use larder_volume::{Device, superblock};
use std::sync::Arc;
use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

/// Adds a device, on which nothing is wanted any more. Returns its number.
///
/// # Errors
/// `Unsupported` for a device that is too small or read-only; `Busy` while another such operation
/// runs; `ReadOnly`; those of the device.
pub(crate) fn add(core: &Core, device: Arc<dyn Device>) -> Result<DeviceId> {
    core.check_writable()?;
    let _claim = core.exclusive.claim(ExclusiveOperation::DeviceAdd)?;
    let size = usable(&*device)?;
    let all = core.space.devices();
    let id = DeviceId(all.last().map_or(0, |d| d.id.0) + 1);
    let item = item(id, size, core.new_uuid(), fit::fsid_of_devices(core));
    // It may have left the file system without learning of it.
    superblock::erase_superblocks(&*device)?;
    let device = crate::watch::device(device);
    core.volume.add_device(id, device.clone())?;
    core.space.expect_devices(all.len() as u64 + 1);
    if let Err(e) = join(core, &*device, item) {
        core.space.expect_devices(all.len() as u64);
        core.volume.remove_device(id)?;
        // A commit that failed may have counted it.
        if core.check_writable().is_ok()
            && let Err(e) = superblock::erase_superblocks(&*device)
        {
            tracing::warn!(%id, "the superblock of a device that was refused is still there: {e}");
        }
        return Err(e);
    }
    tracing::info!(%id, size, "a device has joined");
    Ok(id)
}

/// Has a device counted that the volume has already.
fn join(core: &Core, device: &dyn Device, item: DevItem) -> Result<()> {
    crate::file::flush_all(core)?;
    core.commit_now()?;
    // That commit has flushed it.
    if !core.volume.takes_writes(DeviceId(item.devid.get())) {
        return Err(Error::Unsupported(format!("{}: it fails", device.name())));
    }
    core.introduce(device, &item)?;
    core.change_devices(DeviceChange::Add(item))
}

/// Bytes of the device that can be used.
///
/// # Errors
/// `Unsupported` for a device that is too small or read-only.
pub(crate) fn usable(device: &dyn Device) -> Result<u64> {
    let size = device.size() / u64::from(SECTOR_SIZE) * u64::from(SECTOR_SIZE);
    let name = device.name();
    if device.is_read_only() {
        return Err(Error::Unsupported(format!("{name}: it is read-only")));
    }
    if size < SMALLEST_DEVICE {
        let what = format!(
            "{name}: {size} bytes are too few for a device of a file system; at least {} are \
                needed",
            SMALLEST_DEVICE
        );
        return Err(Error::Unsupported(what));
    }
    Ok(size)
}

/// The item of a new device.
pub(crate) fn item(id: DeviceId, size: u64, uuid: [u8; 16], fsid: [u8; 16]) -> DevItem {
    let sector = U32::new(SECTOR_SIZE);
    DevItem {
        devid: U64::new(id.0),
        total_bytes: U64::new(size),
        io_align: sector,
        io_width: sector,
        sector_size: sector,
        uuid,
        fsid,
        ..DevItem::new_zeroed()
    }
}
