//! What holds for superblocks, and when a device counts as up to date.
//!
//! Every copy on every device is intact, and of the last commit. The first copy may have a log
//! besides. Superblocks come last: with a superblock of the last commit a device that had been away
//! counts as one that was not, so everything else on it has to be right before.
//!
//! While a file system is written, a commit writes all copies anew, and takes the mark from a
//! device that was behind. Otherwise the copies that are bad are written, as the last commit wrote
//! them. A mark stays then.

use super::control::ScrubControl;
use super::report::ScrubOptions;
use crate::engine::Core;
use crate::error::Result;
use crate::transaction::SuperblockWritten;
use larder_format::{DeviceId, Physical, Superblock};
use larder_volume::superblock::{SuperCopies, read_all_superblocks, write_superblocks};
use larder_volume::{Device, VolumeError};
use std::sync::Arc;

/// Copies that are bad.
struct Bad {
    id: DeviceId,
    device: Arc<dyn Device>,
    places: Vec<Physical>,
}

/// Judges the superblocks of devices that were not away, and repairs them.
///
/// # Errors
/// Those of a commit.
pub(super) fn judge_copies(
    core: &Core,
    control: &ScrubControl,
    options: ScrubOptions,
) -> Result<()> {
    let bad = bad_copies(core, control, &core.volume.behind());
    if bad.is_empty() {
        return Ok(());
    }
    let is_good = options.read_only || repair(core, control, &bad)?;
    for Bad { id, places, .. } in &bad {
        control.count(*id, |c| {
            let count = places.len() as u64;
            c.super_errors += count;
            *(if is_good { &mut c.corrected } else { &mut c.uncorrectable }) += count;
        });
    }
    Ok(())
}

/// Judges the superblocks and repairs them. Devices on which all is right then are up to date.
///
/// # Errors
/// Those of a commit; those of the devices.
pub(super) fn judge(core: &Core, control: &ScrubControl, options: ScrubOptions) -> Result<()> {
    let behind = core.volume.behind();
    judge_copies(core, control, options)?;
    let all_is_right = |id: &DeviceId| {
        core.volume.takes_writes(*id) && control.with(|state| state.of(*id).uncorrectable) == 0
    };
    let done: Vec<DeviceId> =
        behind.into_iter().filter(all_is_right).filter(|_| !options.read_only).collect();
    if core.read_only.is_none() {
        unmark(core, &done)?;
        control.with(|state| state.brought_up_to_date.extend(done.iter().map(|id| id.0)));
        return Ok(());
    }
    for id in done {
        bring_up_to_date(core, control, id)?;
    }
    Ok(())
}

/// From the next commit on these devices count as any other.
fn unmark(core: &Core, devices: &[DeviceId]) -> Result<()> {
    if devices.is_empty() {
        return Ok(());
    }
    devices.iter().try_for_each(|id| core.is_current_again(*id))?;
    core.commit_now()
}

/// The copies that are bad, of all devices that were not away.
fn bad_copies(core: &Core, control: &ScrubControl, behind: &[DeviceId]) -> Vec<Bad> {
    let written = core.superblock_written.lock();
    let mut bad = Vec::new();
    for (id, device) in core.volume.devices() {
        if behind.contains(&id) || !core.volume.takes_writes(id) {
            continue;
        }
        let Some(should) = written.superblocks.without_mark(id) else { continue };
        let size = should.dev_item.total_bytes.get();
        control.own();
        let copies = read_all_superblocks(&*device);
        let places: Vec<Physical> = copies
            .into_iter()
            .filter(|copy| copy.at.0 + (larder_format::SUPER_SIZE as u64) < size)
            .filter(|copy| !copy.content.as_ref().is_ok_and(|is| is_right(is, &should)))
            .map(|copy| copy.at)
            .collect();
        if !places.is_empty() {
            bad.push(Bad { id, device: device.clone(), places });
        }
    }
    bad
}

fn is_right(is: &Superblock, should: &Superblock) -> bool {
    is.fsid == should.fsid
        && is.generation() == should.generation()
        && is.dev_item.devid == should.dev_item.devid
        && is.dev_item.uuid == should.dev_item.uuid
        && is.root == should.root
        && is.chunk_root == should.chunk_root
}

/// Writes bad copies anew. Returns whether they are good then.
fn repair(core: &Core, control: &ScrubControl, bad: &[Bad]) -> Result<bool> {
    if core.read_only.is_none() {
        core.commit_now()?;
        return Ok(bad_copies(core, control, &core.volume.behind()).is_empty());
    }
    let written = core.superblock_written.lock();
    let mut good = true;
    for Bad { id, device, places } in bad {
        for at in places {
            let Some(mut copy) = copy(&written, *id, *at) else { continue };
            control.own();
            if let Err(e) = device.write_at(*at, &copy.seal(*at)) {
                tracing::warn!("scrub: {}: superblock at {at}: {e}", device.name());
                good = false;
            }
        }
    }
    Ok(good)
}

/// A copy as it should be. Only the first one has a log. None for a device that is coming or going.
fn copy(written: &SuperblockWritten, id: DeviceId, at: Physical) -> Option<Box<Superblock>> {
    let mut superblock = written.superblocks.without_mark(id)?;
    if at != larder_format::SUPER_OFFSETS[0] {
        superblock.log_root.set(0);
        superblock.log_root_level = 0;
    }
    Some(superblock)
}

/// A device had been away, and everything else on it is right now: it gets superblocks of the last
/// commit. Only a commit could take a mark away.
fn bring_up_to_date(core: &Core, control: &ScrubControl, id: DeviceId) -> Result<()> {
    let Some(device) = core.volume.device(id) else { return Ok(()) };
    // What the superblock leads to has to be durable before.
    core.volume.flush()?;
    let written = core.superblock_written.lock();
    if written.superblocks.has_mark(id) {
        return Ok(());
    }
    let Some(superblock) = written.superblocks.without_mark(id) else { return Ok(()) };
    let Some(mirrors) = copy(&written, id, Physical(0)) else { return Ok(()) };
    write_superblocks(&*device, &mirrors, SuperCopies::All)?;
    write_superblocks(&*device, &superblock, SuperCopies::Primary)?;
    device.flush().map_err(|e| VolumeError::flush(&*device, e))?;
    control.with(|state| state.brought_up_to_date.push(id.0));
    Ok(())
}
