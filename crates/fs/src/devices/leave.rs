//! A device leaves.
//!
//! It is a member until the commit without it. That commit writes no superblock to it, so what it
//! has then is that of an older generation, until it is erased. A crash in between leaves a device
//! that the chunk tree does not have.

use super::clear::{Outcome, Part, clear};
use super::compact::compact;
use super::tight::Tight;
use super::{Watch, fit};
use crate::engine::Core;
use crate::engine::exclusive::ExclusiveOperation;
use crate::error::{Error, Result};
use crate::space::DeviceChange;
use larder_format::{DeviceId, Physical};
use larder_volume::superblock::erase_superblocks;

/// Moves everything away from a device. If the others have no room for more chunks, theirs are made
/// tight first.
fn clear_all<'a>(core: &'a Core, id: DeviceId, watch: Watch<'_>) -> Result<(Part<'a>, Outcome)> {
    let part = Part::close(core, id, Physical(0))?;
    match clear(&part, None, watch) {
        Err(Error::NoSpace) => {}
        cleared => return Ok((part, cleared?)),
    }
    drop(part);
    let tight = Tight::new(core);
    let outcome = compact(core, &tight, watch)?;
    let part = Part::close(core, id, Physical(0))?;
    if outcome == Outcome::Stopped {
        return Ok((part, outcome));
    }
    let outcome = clear(&part, Some(&tight), watch)?;
    Ok((part, outcome))
}

/// Moves everything away from a device, and takes it out of the file system. It may be missing.
///
/// # Errors
/// `Unsupported` if there is no such device, or if too few would be left; `DoesNotFit` if what it
/// holds does not fit on the others; `Busy` while another such operation runs; `ReadOnly`; those of
/// a relocation. The device is a member as before, then.
pub(crate) fn remove(core: &Core, id: DeviceId, watch: Watch<'_>) -> Result<Outcome> {
    core.check_writable()?;
    let _claim = core.exclusive.claim(ExclusiveOperation::DeviceRemove)?;
    fit::may_leave(core, id)?;
    let (_part, outcome) =
        clear_all(core, id, watch).map_err(|e| fit::named(e, || fit::does_not_fit(core, id)))?;
    if outcome == Outcome::Stopped {
        return Ok(Outcome::Stopped);
    }
    let device = core.volume.device(id);
    if let Some(device) =
        device.as_deref().filter(|_| fault!(core.options.tuning, DeviceErasedFirst))
    {
        erase_superblocks(device)?;
    }
    core.change_devices(DeviceChange::Remove(id))?;
    if device.is_some() {
        let is_seed = core.volume.is_seed(id);
        let device = core.volume.remove_device(id)?;
        // It is no member any more, whatever comes of this. A seed stays what it is.
        if !is_seed && let Err(e) = erase_superblocks(&*device) {
            tracing::warn!(%id, "the superblock of a device that was removed is still there: {e}");
        }
    }
    tracing::info!(%id, "a device has left");
    Ok(Outcome::Done)
}
