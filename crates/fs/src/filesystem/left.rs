//! What the replacement of a device has left, when a file system is opened.
//!
//! One that is under way has an item in the device tree, and a target, which has to be there: what
//! is written from now on goes to it. Without it the file system is written only if missing devices
//! are allowed; the target then lacks what is written, and its copy begins anew. One that has only
//! just begun (`crate::replace`) needs no target: that may have failed in just this commit. Of one
//! that has ended a power cut may leave the superblock of the target, or that of the device that
//! was replaced. Neither of them counts.

use crate::error::Result;
use crate::transaction::Replacement;
use crate::tree::Version;
use larder_format::Physical;
use larder_format::items::ReplaceState;
use larder_volume::{Assembly, Found, Volume, VolumeError, read_superblock, superblock};

/// Devices that are set apart, until the trees can be read.
#[derive(Debug)]
pub(super) struct Left {
    devices: Vec<Found>,
    target: Option<Found>,
    superseded: Vec<Found>,
    /// Devices may be missing.
    degraded: bool,
}

impl Left {
    pub(super) fn of(found: &mut Assembly, degraded: bool) -> Self {
        Self {
            devices: found.devices.clone(),
            target: found.target.take(),
            superseded: std::mem::take(&mut found.superseded),
            degraded,
        }
    }

    /// The replacement that the device tree has. If the file system is going to be written, its
    /// target gets what is written.
    ///
    /// # Errors
    /// Reading; `Volume` where two devices are the same one, and where the target is missing or is
    /// too short.
    pub(super) fn replacement(
        self,
        devices: &Version,
        volume: &Volume,
        is_written: bool,
    ) -> Result<Replacement> {
        let replacement = Replacement::of(devices)?;
        let state = replacement.item().map_or(ReplaceState::Never, |item| item.state());
        self.may_be_superseded(state)?;
        if !is_written {
            return Ok(replacement);
        }
        match (replacement.under_way(), &self.target) {
            (Some(item), Some(target)) => {
                if target.is_stale {
                    tracing::warn!(
                        "{}: what was written lately did not reach it, so the replacement of \
                            device {} begins anew",
                        target.device.name(),
                        item.source()
                    );
                    replacement.set_cursor(Physical(0), Physical(0));
                }
                volume.set_target(item.source(), target.device.clone())?;
                replacement.found_target(*target.uuid.as_bytes());
            }
            (Some(item), None) if !self.degraded && !item.has_just_begun() => {
                let what = format!(
                    "device {} is being replaced, and the device that is to take its place is \
                        missing",
                    item.source()
                );
                return Err(VolumeError::Missing { device: self.name(), what }.into());
            }
            (None, Some(target)) => forget(target, state),
            (Some(item), None) => tracing::warn!(
                "the replacement of device {} rests: the device that is to take its place is \
                    missing",
                item.source()
            ),
            (None, None) => {}
        }
        Ok(replacement)
    }

    fn name(&self) -> String {
        self.devices.first().map_or_else(String::new, |found| found.device.name())
    }

    /// Of two devices that are the same the older one is left out, if a replacement has ended, or
    /// was given up because the older one failed as it took the place.
    fn may_be_superseded(&self, state: ReplaceState) -> Result<()> {
        let has_failed = |old: &Found| {
            let superblock = read_superblock(&*old.device);
            state == ReplaceState::Canceled && superblock.is_ok_and(|sb| sb.dev_item.arrives())
        };
        for old in &self.superseded {
            let newer = self.devices.iter().find(|found| found.id == old.id);
            match newer {
                Some(newer) if state != ReplaceState::Finished && !has_failed(old) => {
                    return Err(old.claims_to_be(newer).into());
                }
                _ => tracing::warn!(
                    "{}: another device has taken its place, so it is left out",
                    old.device.name()
                ),
            }
        }
        Ok(())
    }
}

/// A target without a replacement. One that was given up should have no superblock any more.
fn forget(target: &Found, state: ReplaceState) {
    let name = target.device.name();
    tracing::warn!("{name}: it was to take the place of a device, and is left out");
    if state == ReplaceState::Finished || target.device.is_read_only() {
        return;
    }
    if let Err(e) = superblock::erase_superblocks(&*target.device) {
        tracing::warn!("{name}: its superblock is still there: {e}");
    }
}
