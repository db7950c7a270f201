//! The target of a replacement: a device that gets all that another one gets, its **source**.
//!
//! It lies beside the members and is none of them. Nothing is read from it, and no chunk knows of
//! it. Everything that is written to a place of the source, or discarded there, goes to the same
//! place of the target, even where the source is missing or has failed. Flushes cover it, and it
//! has superblocks. Nothing is lost with a target: if it refuses something it has failed, and gets
//! nothing any more.
//!
//! A write that began before there was a target goes to the source alone. Those that replace a
//! device have to see to that.

use super::Volume;
use super::members::{Leaving, Member, Snapshot};
use crate::device::Device;
use crate::error::{VolumeError, VolumeResult};
use larder_format::{DeviceId, Physical};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A target, and the device whose writes it gets.
#[derive(Clone, Debug)]
pub(super) struct Target {
    source: DeviceId,
    member: Arc<Member>,
}

impl Volume {
    /// From now on a device gets what `source` gets, which may be missing.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] when there is a target already; [`VolumeError::Corrupt`] for one that
    /// is shorter than the chunks on its source.
    pub fn set_target(&self, source: DeviceId, device: Arc<dyn Device>) -> VolumeResult<()> {
        self.is_long_enough(source, &*device)?;
        let mut target = self.target.write();
        if let Some(other) = &*target {
            let by = format!("{} takes the place of a device", other.member.device.name());
            return Err(VolumeError::Busy { device: device.name(), by });
        }
        *target = Some(Target { source, member: Member::new(DeviceId::REPLACE_TARGET, device) });
        Ok(())
    }

    /// The device that is going to take the place of another one.
    #[must_use]
    pub fn target(&self) -> Option<Arc<dyn Device>> {
        self.target.read().as_ref().map(|target| target.member.device.clone())
    }

    /// Is there a target, and has it refused nothing?
    #[must_use]
    pub fn target_takes_writes(&self) -> bool {
        self.target.read().as_ref().is_some_and(|target| !target.member.has_failed())
    }

    /// The target has refused something that was written to it by its own name.
    pub fn target_has_failed(&self, why: &VolumeError) {
        if let Some(target) = &*self.target.read() {
            self.mark_failed(&target.member, why);
        }
    }

    /// There is no target any more. Returns its device when nothing uses it.
    pub fn drop_target(&self) -> Option<Arc<dyn Device>> {
        let target = self.target.write().take()?;
        Some(Leaving::new(target.member).wait())
    }

    /// The target becomes what its source was. Returns the old device, if it was there, when
    /// nothing uses it.
    ///
    /// # Errors
    /// [`VolumeError::Missing`] when there is no target.
    pub fn promote_target(&self) -> VolumeResult<Option<Arc<dyn Device>>> {
        let target = self.target.read().clone().ok_or_else(|| VolumeError::Missing {
            device: "file system".into(),
            what: "no device is to take the place of another one".into(),
        })?;
        let member = Member::promoted(&target.member, target.source);
        let old = self.members.change(|members| {
            match members.iter_mut().find(|m| m.id == target.source) {
                Some(place) => Some(Leaving::new(std::mem::replace(place, member))),
                None => {
                    members.push(member);
                    members.sort_by_key(|m| m.id);
                    None
                }
            }
        });
        // In this order: a transfer that sees no target sees the new member.
        self.target.write().take();
        drop(target);
        Ok(old.map(Leaving::wait))
    }

    /// The devices that are written. A write asks once, and goes by that to its end, whatever
    /// becomes of the members meanwhile. So it never reaches the target of a later replacement, and
    /// never misses the device that its target has become.
    pub(super) fn written(&self) -> Written {
        // In this order, see `promote_target`.
        let target = self.target.read().clone();
        Written { members: self.members.all(), target }
    }

    /// What is written to a place of the source goes to the target as well.
    pub(super) fn write_mirror(&self, mirror: &Member, at: Physical, data: &[u8]) {
        mirror.counters.writes.fetch_add(1, Relaxed);
        mirror.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        if let Err(e) = mirror.device.write_at(at, data) {
            let error = mirror.error("write", at, data.len() as u64, e);
            self.mark_failed(mirror, &error);
        }
    }
}

/// The devices that are written, at one moment.
#[derive(Clone, Debug)]
pub(super) struct Written {
    members: Snapshot,
    target: Option<Target>,
}

impl Written {
    /// The members and the target.
    pub(super) fn all(&self) -> impl Iterator<Item = &Member> {
        let target = self.target.as_ref().map(|target| &*target.member);
        self.members.iter().map(|member| &**member).chain(target)
    }

    /// A member by its id.
    pub(super) fn member(&self, id: DeviceId) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id).map(|member| &**member)
    }

    /// Does a device get nothing, since it is not there or has failed?
    pub(super) fn gets_nothing(&self, id: DeviceId) -> bool {
        self.member(id).is_none_or(|member| !member.takes_writes())
    }

    /// The target, if it is to have what a place holds.
    pub(super) fn mirror(&self, of: DeviceId) -> Option<&Member> {
        let target = self.target.as_ref().filter(|target| target.source == of)?;
        (!target.member.has_failed()).then_some(&*target.member)
    }
}

impl Member {
    /// What is discarded of the source is discarded of the target as well. That it cannot discard
    /// costs nothing.
    pub(super) fn discard_too(&self, range: &Range<Physical>) {
        if let Err(e) = self.device.discard(range.start, range.end.0 - range.start.0) {
            tracing::debug!("{}: discard: {e}", self.device.name());
        }
    }
}
