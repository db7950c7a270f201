//! Devices come, go, and become larger or smaller.
//!
//! What is said here is about chunks only: where new ones may lie, and which are in the way. When a
//! change is durable is the business of the commit that makes it.

use super::Allocator;
use crate::space::SpaceKind;
use crate::space::chunks::MIN_STRIPE;
use crate::space::device::{DeviceChange, DeviceSpace};
use larder_format::items::BlockGroupFlags;
use larder_format::{DeviceId, Logical, Physical};
use std::sync::atomic::Ordering;

impl Allocator {
    /// Devices of the file system.
    pub(super) fn device_count(&self) -> u64 {
        self.devices.load(Ordering::Relaxed)
    }

    /// There are going to be so many devices. What is reserved from now on is enough for the rows
    /// of chunks that lie on all of them.
    pub(crate) fn expect_devices(&self, devices: u64) {
        self.accounts.set_data_charge(self.groups.widest_row(SpaceKind::Data, devices));
    }

    /// A commit has changed the devices, which have `total` bytes now.
    pub(crate) fn devices_changed(&self, changes: &[DeviceChange], total: u64) {
        if changes.is_empty() {
            return;
        }
        let mut device = self.device.lock();
        for change in changes {
            device.change(change);
            match change {
                DeviceChange::Add(item) => {
                    self.volume.set_closed(DeviceId(item.devid.get()), false);
                    self.devices.fetch_add(1, Ordering::Relaxed);
                }
                DeviceChange::Remove(_) => _ = self.devices.fetch_sub(1, Ordering::Relaxed),
                DeviceChange::Resize(..) | DeviceChange::Seed(..) => {}
            }
        }
        self.total_bytes.store(total, Ordering::Relaxed);
        self.plan_for(&device);
        drop(device);
        self.expect_devices(self.device_count());
        self.note_device_space();
    }

    /// No new chunk lies on a device from now on. False, and nothing has changed, if metadata was
    /// promised more than there would be room for.
    pub(crate) fn try_close_device(&self, id: DeviceId) -> bool {
        let close = |closed| move |_: &mut DeviceSpace| self.volume.set_closed(id, closed);
        self.try_narrow(close(true), close(false))
    }

    /// New chunks may lie on a device again.
    pub(crate) fn open_device(&self, id: DeviceId) {
        self.volume.set_closed(id, false);
        self.plan_for(&self.device.lock());
        self.note_device_space();
    }

    /// New chunks on a device end here at the latest. False as for [`Self::try_close_device`].
    pub(crate) fn try_limit_device(&self, id: DeviceId, limit: u64) -> bool {
        self.try_narrow(|d| d.set_limit(id, Some(limit)), |d| d.set_limit(id, None))
    }

    /// New chunks on a device may reach to its end, for a while. They are still no longer than
    /// those of the smaller device, unless their length is told.
    pub(crate) fn lift_limit(&self, id: DeviceId) {
        self.device.lock().set_limit(id, None);
    }

    /// New chunks for this kind have so many bytes, rounded up to whole stripes, where there is a
    /// hole for that. `None`: as many as is usual.
    pub(crate) fn limit_chunks(&self, kind: SpaceKind, most: Option<u64>) {
        let most = most.unwrap_or(u64::MAX);
        let is_both = self.accounts.is_mixed() && kind != SpaceKind::System;
        let both = [SpaceKind::Data, SpaceKind::Metadata];
        let kinds = if is_both { &both[..] } else { &[kind] };
        kinds.iter().for_each(|kind| self.longest[*kind as usize].store(most, Ordering::Relaxed));
    }

    /// An empty chunk of this type and profile is given back only if the others that are open have
    /// so many bytes.
    pub(crate) fn keep_open(&self, flags: BlockGroupFlags, bytes: u64) {
        self.kept_open.0.store(flags.bits(), Ordering::Relaxed);
        self.kept_open.1.store(bytes, Ordering::Relaxed);
    }

    /// Where the first stripe of a chunk on a device begins.
    pub(crate) fn first_stripe_on(&self, id: DeviceId, chunk: Logical) -> Option<Physical> {
        let device = self.device.lock();
        let stripes = device.chunk(chunk)?.stripes.iter().filter(|s| s.devid == id);
        stripes.map(|s| s.offset).min()
    }

    /// Where the last stripe of a chunk on a device begins.
    pub(crate) fn last_stripe_on(&self, id: DeviceId, chunk: Logical) -> Option<Physical> {
        let device = self.device.lock();
        let stripes = device.chunk(chunk)?.stripes.iter().filter(|s| s.devid == id);
        stripes.map(|s| s.offset).max()
    }

    /// New chunks on a device may reach to its end again.
    pub(crate) fn unlimit_device(&self, id: DeviceId) {
        let mut device = self.device.lock();
        device.set_limit(id, None);
        self.plan_for(&device);
        drop(device);
        self.note_device_space();
    }

    /// Chunks are as long as they should be in a file system of the devices that are open, as they
    /// are going to be.
    fn plan_for(&self, device: &DeviceSpace) {
        self.planned_bytes.store(device.size_for_chunks(), Ordering::Relaxed);
    }

    /// Makes room go, unless that was promised.
    fn try_narrow(
        &self,
        narrow: impl FnOnce(&mut DeviceSpace),
        undo: impl FnOnce(&mut DeviceSpace),
    ) -> bool {
        let mut device = self.device.lock();
        narrow(&mut device);
        let left = self.metadata_capacity(&device, None);
        let most = left.saturating_sub(MIN_STRIPE);
        let fits = self.accounts.take_device_space(most, self.overcommit(left));
        if !fits {
            undo(&mut device);
        }
        self.plan_for(&device);
        fits
    }

    /// The chunks that reach beyond a place of a device, the last on it first.
    pub(crate) fn chunks_beyond(&self, id: DeviceId, at: Physical) -> Vec<Logical> {
        self.device.lock().chunks_beyond(id, at)
    }
}
