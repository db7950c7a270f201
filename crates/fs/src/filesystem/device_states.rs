//! The devices of an open file system, one by one: what they hold, how they are, and what went
//! wrong on them.

use super::Filesystem;
use crate::api::StaleDevice;
use crate::error::Result;
use crate::space::AllocatedOnDevice;
use larder_format::DeviceId;
use serde::Serialize;
use uuid::Uuid;

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// It has everything.
    Current,
    /// It may lack something, and is read last until a scrub has brought it up to date.
    Behind,
    /// It has failed since the file system was opened, and is not written any more.
    Failed,
    /// It is not there.
    Missing,
}

/// Errors of a device over its life, as Linux counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct DeviceErrors {
    pub write_io_errs: u64,
    pub read_io_errs: u64,
    pub flush_io_errs: u64,
    pub corruption_errs: u64,
    pub generation_errs: u64,
}

impl DeviceErrors {
    /// Is any of them not 0?
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// A device of an open file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceFigures {
    /// Its number.
    pub id: u64,
    /// Its uuid.
    pub uuid: String,
    /// Its name; none for one that is missing.
    pub name: Option<String>,
    /// How it is.
    pub state: DeviceState,
    /// Bytes that the file system uses of it.
    pub size: u64,
    /// Bytes that chunks take of it.
    pub allocated: Vec<AllocatedOnDevice>,
    /// Bytes that no chunk takes.
    pub unallocated: u64,
    /// Errors; those of a missing device are not known.
    pub errors: DeviceErrors,
}

impl Filesystem {
    /// The devices, by number.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceFigures> {
        let volume = &self.core.volume;
        let (errors, behind, failed) = (volume.errors(), volume.behind(), volume.failed());
        let figures = |space: crate::space::DeviceUsage| {
            let name = volume.device(space.id).map(|device| device.name());
            let counts = errors.iter().find(|(id, _)| *id == space.id);
            let state = match space.id {
                _ if name.is_none() => DeviceState::Missing,
                id if failed.contains(&id) => DeviceState::Failed,
                id if behind.contains(&id) => DeviceState::Behind,
                _ => DeviceState::Current,
            };
            DeviceFigures {
                id: space.id.0,
                uuid: Uuid::from_bytes(space.uuid).to_string(),
                name,
                state,
                size: space.size,
                allocated: space.allocated,
                unallocated: space.unallocated,
                errors: counts.map_or_else(DeviceErrors::default, |(_, c)| DeviceErrors {
                    write_io_errs: c.writes,
                    read_io_errs: c.reads,
                    flush_io_errs: c.flushes,
                    corruption_errs: c.corruptions,
                    generation_errs: c.generations,
                }),
            }
        };
        self.core.space.devices().into_iter().map(figures).collect()
    }

    /// Sets the counts of errors of all devices to 0. Durable with the next commit.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub fn reset_device_errors(&self) -> Result<()> {
        self.core.check_writable()?;
        self.core.volume.reset_errors();
        self.core.touch()
    }

    /// Devices that are read last, because they may lack something that the others have: what a
    /// scrub has to look at first.
    #[must_use]
    pub fn devices_behind(&self) -> Vec<StaleDevice> {
        let behind = self.core.volume.behind();
        let known = self.core.stale_devices.iter();
        known.filter(|device| behind.contains(&device.id)).cloned().collect()
    }

    /// Everything that is stored on this device was compared with the others, and repaired where it
    /// differed. It counts as any other from now on, and after the next commit also when the file
    /// system is opened again.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub fn device_is_current(&self, id: DeviceId) -> Result<()> {
        self.core.is_current_again(id)
    }
}
