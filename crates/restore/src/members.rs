//! Which of the devices that were given are used, and as what.
//!
//! Unlike a mount, restoring takes what it gets. A device that does not belong to the others, or
//! has no superblock that could be used, is left out with a note. The newest superblock is the one
//! to start from. What is on a device that was away for some time is found by its checksums not to
//! be what is asked for, as any other damage.

use crate::error::Result;
use crate::observer::Observer;
use crate::supers::{self, Chosen};
use larder_format::{DeviceId, Generation};
use larder_volume::Device;
use std::sync::Arc;

/// The devices, and the superblock to start from.
pub(crate) struct Members {
    pub(crate) chosen: Chosen,
    /// The device that it is from.
    pub(crate) first: Arc<dyn Device>,
    pub(crate) devices: Vec<(DeviceId, Arc<dyn Device>)>,
}

/// Chooses a superblock on each device (copy number `wanted`, or the best), and among them.
///
/// # Errors
/// No device has one that could be used: what is wrong with the first.
pub(crate) fn choose(
    devices: Vec<Arc<dyn Device>>,
    wanted: Option<usize>,
    observer: &dyn Observer,
) -> Result<Members> {
    let mut all: Vec<(Chosen, Arc<dyn Device>)> = Vec::new();
    let mut failure = None;
    for device in devices {
        match supers::choose(&*device, wanted, observer) {
            Ok(chosen) => all.push((chosen, device)),
            Err(e) => {
                if !all.is_empty() || failure.is_some() {
                    observer.note(&format!("{} is left out: {e}", device.name()));
                }
                failure.get_or_insert(e);
            }
        }
    }
    // One that was to take the place of another has not everything.
    let is_target =
        |(c, _): &(Chosen, Arc<dyn Device>)| c.superblock.device_id() == DeviceId::REPLACE_TARGET;
    if !all.iter().all(is_target) {
        all.retain(|one| !is_target(one));
    }
    let generation = |c: &Chosen| -> Generation { c.superblock.generation() };
    let newest = (0..all.len()).rev().max_by_key(|n| generation(&all[*n].0));
    let Some(newest) = newest else {
        return Err(failure
            .unwrap_or_else(|| crate::error::Error::NoSuperblock("no device was given".into())));
    };
    let (mut chosen, first) = all.swap_remove(newest);
    let mut members = vec![(chosen.superblock.device_id(), Arc::clone(&first))];
    for (other, device) in all {
        let (id, sb) = (other.superblock.device_id(), &other.superblock);
        if sb.fsid != chosen.superblock.fsid {
            observer.note(&format!("{} is left out: of another file system", device.name()));
        } else if members.iter().any(|(known, _)| *known == id) {
            observer.note(&format!("{} is left out: a second device {id}", device.name()));
        } else {
            members.push((id, device));
            chosen.others.push(other.superblock);
            chosen.others.extend(other.others);
        }
    }
    Ok(Members { chosen, first, devices: members })
}
