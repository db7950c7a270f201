//! Devices come and go while the volume is in use.
//!
//! Which device has which place is known to transfers only (`members`), so a change is the business
//! of nobody else. What the layers above have to see to is the order: a device is here before a
//! chunk lies on it, and no chunk lies on it any more when it goes.

use super::Volume;
use super::members::{Leaving, Member};
use crate::device::Device;
use crate::error::{VolumeError, VolumeResult};
use crate::map::{MappedChunk, Stripe};
use larder_format::{DeviceId, Generation};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl Volume {
    /// Adds a device, closed for new chunks ([`Volume::set_closed`]). If chunks have stripes on it
    /// already, it was missing until now, and has nothing of what they hold: then it is behind
    /// ([`Volume::set_behind`]) from the start.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] when there is a device with that id; [`VolumeError::Corrupt`] for a
    /// device that is shorter than chunks on it.
    pub fn add_device(&self, id: DeviceId, device: Arc<dyn Device>) -> VolumeResult<()> {
        let has_chunks = self.is_long_enough(id, &*device)?;
        let member = Member::new(id, device);
        member.closed.store(true, Relaxed);
        if has_chunks {
            member.set_behind(Some(Generation(0)));
            self.uneven.store(true, Relaxed);
        }
        self.members.change(|members| {
            if let Some(other) = members.iter().find(|m| m.id == id) {
                let by = format!("device {id} of the file system is {}", other.device.name());
                return Err(VolumeError::Busy { device: member.device.name(), by });
            }
            members.push(member);
            members.sort_by_key(|m| m.id);
            Ok(())
        })
    }

    /// Says whether new chunks may lie on a device: not while it comes or goes.
    pub fn set_closed(&self, id: DeviceId, closed: bool) {
        if let Some(member) = self.member(id) {
            member.closed.store(closed, Relaxed);
        }
    }

    /// Takes a device out, and returns it when nothing uses it any more: waits for the transfers
    /// that are under way on it.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] for a device on which a chunk lies, and for the last one;
    /// [`VolumeError::Missing`] for one that is not there.
    pub fn remove_device(&self, id: DeviceId) -> VolumeResult<Arc<dyn Device>> {
        let on_it = |s: &Stripe| s.device == id;
        if let Some(chunk) = self.map.chunks().iter().find(|c| c.stripes.iter().any(on_it)) {
            let device = self.device(id).map_or_else(|| format!("device {id}"), |d| d.name());
            let by = format!("the chunk at {} lies on it", chunk.start);
            return Err(VolumeError::Busy { device, by });
        }
        let leaving = self.members.change(|members| {
            let at = members.iter().position(|m| m.id == id).ok_or_else(|| not_there(id))?;
            if members.len() == 1 {
                let by = "the file system has no other device".into();
                return Err(VolumeError::Busy { device: members[at].device.name(), by });
            }
            Ok(Leaving::new(members.remove(at)))
        })?;
        Ok(leaving.wait())
    }

    /// Is the device as long as the chunks on it say? Returns whether there are any.
    pub(super) fn is_long_enough(&self, id: DeviceId, device: &dyn Device) -> VolumeResult<bool> {
        let mut any = false;
        for chunk in self.map.chunks() {
            for stripe in chunk.stripes.iter().filter(|s| s.device == id) {
                any = true;
                reaches_no_further(&chunk, *stripe, device)?;
            }
        }
        Ok(any)
    }
}

/// Refuses a stripe that does not end on its device.
pub(super) fn reaches_no_further(
    chunk: &MappedChunk,
    stripe: Stripe,
    device: &dyn Device,
) -> VolumeResult<()> {
    let end = stripe.at.0.checked_add(chunk.stripe_bytes());
    if end.is_some_and(|end| end <= device.size()) {
        return Ok(());
    }
    Err(VolumeError::Corrupt {
        device: device.name(),
        what: format!(
            "chunk at {} (+{}) reaches past the end of the device ({} bytes); is the image \
                truncated?",
            chunk.start,
            chunk.length,
            device.size()
        ),
    })
}

fn not_there(id: DeviceId) -> VolumeError {
    let device = format!("device {id}");
    VolumeError::Missing { device, what: "no such device is there".into() }
}

#[cfg(test)]
mod tests;
