//! Devices that join, leave and change their size, as the facade has it.

use super::Filesystem;
use crate::devices::{self, Clearing, Outcome, Smallest};
use crate::error::Result;
use larder_format::DeviceId;
use larder_volume::Device;
use std::ops::ControlFlow;
use std::sync::Arc;

impl Filesystem {
    /// Adds a device while the file system is in use, and returns its number. The caller has seen
    /// to it that nothing on the device is wanted, and has wiped it ([`crate::mkfs::wipe`]).
    ///
    /// # Errors
    /// `Unsupported` for a device that is read-only or smaller than [`crate::SMALLEST_DEVICE`];
    /// `Busy` while another operation on devices or a balance runs; those of
    /// [`Filesystem::sync`].
    pub fn add_device(&self, device: Arc<dyn Device>) -> Result<DeviceId> {
        crate::api::may_wait()?;
        devices::add(&self.core, device)
    }

    /// Moves everything away from a device, and takes it out of the file system. A device that is
    /// missing can be taken out as well. `watch` is called from time to time, and may end it; what
    /// has moved until then stays where it is.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or when too few are left for a profile;
    /// `DoesNotFit` when the others have no room; `Busy` as for adding one; those of
    /// [`Filesystem::relocate`].
    pub fn remove_device(
        &self,
        id: DeviceId,
        watch: &mut dyn FnMut(Clearing) -> ControlFlow<()>,
    ) -> Result<Outcome> {
        crate::api::may_wait()?;
        devices::remove(&self.core, id, watch)
    }

    /// Gives a device another size, in bytes. What lies behind a smaller size is moved first.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or when it is missing; `DoesNotFit` when the
    /// device has fewer bytes, or when what it holds needs more; `Busy` as for adding one; those of
    /// [`Filesystem::relocate`].
    pub fn resize_device(
        &self,
        id: DeviceId,
        size: u64,
        watch: &mut dyn FnMut(Clearing) -> ControlFlow<()>,
    ) -> Result<Outcome> {
        crate::api::may_wait()?;
        devices::resize(&self.core, id, size, watch)
    }

    /// Bytes that a device has, looked up anew. The file system may use fewer.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or when it is missing; those of the device.
    pub fn device_bytes(&self, id: DeviceId) -> Result<u64> {
        devices::bytes(&self.core, id)
    }

    /// Makes a device as small as it can be. Returns its size in bytes.
    ///
    /// # Errors
    /// As [`Filesystem::resize_device`].
    pub fn shrink_device(
        &self,
        id: DeviceId,
        watch: &mut dyn FnMut(Clearing) -> ControlFlow<()>,
    ) -> Result<(u64, Outcome)> {
        crate::api::may_wait()?;
        devices::shrink(&self.core, id, watch)
    }

    /// How small a device can be, by what is stored now, and what decides that.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device.
    pub fn smallest_size(&self, id: DeviceId) -> Result<Smallest> {
        devices::smallest(&self.core, id)
    }
}
