//! Which disks of a stack belong to the file system, as a person would say.
//!
//! What has no superblock belongs to nothing: a spare disk, the target of a replacement before its
//! first commit, a device that has left. One that has just left may still say that it belongs to
//! the file system; the refusal then names it, and the person leaves it out.

use crate::device::SimDevice;
use larder_fs::{Error, Filesystem, OpenOptions};
use larder_volume::{Device, read_superblock};
use std::sync::Arc;

/// A file system, and the devices that it was opened by.
pub(crate) type Opened = (Arc<Filesystem>, Vec<Arc<dyn Device>>);

/// How a refusal says that a device is not one of the file system any more.
const HAS_LEFT: &str = "does not have any more";

/// The disks with a superblock.
pub(crate) fn members(device: &Arc<SimDevice>) -> Vec<Arc<dyn Device>> {
    device.devices().into_iter().filter(|disk| read_superblock(&**disk).is_ok()).collect()
}

/// The disk of this number.
pub(crate) fn disk(device: &Arc<SimDevice>, number: usize) -> Option<Arc<dyn Device>> {
    device.devices().into_iter().find(|disk| number_of(&**disk) == Some(number))
}

/// The number of a disk.
pub(crate) fn number_of(disk: &dyn Device) -> Option<usize> {
    number_in(&disk.name())
}

/// The number in the name of a disk. One that is alone has none.
pub(crate) fn number_in(name: &str) -> Option<usize> {
    match name.rsplit_once('-') {
        Some((_, number)) => number.parse::<usize>().ok()?.checked_sub(1),
        None => Some(0),
    }
}

/// Opens the file system by its members.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn open(device: &Arc<SimDevice>, options: &OpenOptions) -> Result<Opened, Error> {
    let mut all = members(device);
    let degraded = options.degraded || device.image().sizes().contains(&0);
    let options = OpenOptions { degraded, ..options.clone() };
    loop {
        match Filesystem::open_devices(all.clone(), options.clone()) {
            Ok(fs) => return Ok((fs, all)),
            Err(e) => {
                let text = e.to_string();
                let before = all.len();
                let has_left = |disk: &Arc<dyn Device>| {
                    text.contains(HAS_LEFT) && text.starts_with(&format!("{}:", disk.name()))
                };
                all.retain(|disk| !has_left(disk));
                if all.len() == before {
                    return Err(e);
                }
            }
        }
    }
}
