//! What can go wrong between a logical address and its bytes.

use crate::device::Device;
use larder_format::{DeviceId, Logical, Physical};
use std::io;

/// Result of the volume layer.
pub type VolumeResult<T> = Result<T, VolumeError>;

/// The bytes that an error is about; nothing if it is about none.
fn range(at: Physical, len: u64) -> String {
    if len == 0 { String::new() } else { format!(" of {len} bytes at {at}") }
}

/// Errors of the volume layer, with device and address.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A device failed.
    #[error("{device}: {op}{} failed: {source}", range(*at, *len))]
    Io {
        /// Name of the device.
        device: String,
        /// `read`, `write`, `flush`, …
        op: &'static str,
        /// Address on the device.
        at: Physical,
        /// Length in bytes.
        len: u64,
        /// What the device said.
        #[source]
        source: io::Error,
    },
    /// No chunk covers the address.
    #[error("logical address {at} (+{len}) is in no chunk")]
    Unmapped {
        /// The address.
        at: Logical,
        /// Length of the access.
        len: u64,
    },
    /// The device holds something that cannot be right.
    #[error("{device}: {what}")]
    Corrupt {
        /// Name of the device.
        device: String,
        /// What is wrong, where.
        what: String,
    },
    /// The file system uses something that Larder does not support.
    #[error("{device}: {what}")]
    Unsupported {
        /// Name of the device.
        device: String,
        /// The feature, and what can still be done.
        what: String,
    },
    /// Devices of the file system were not given.
    #[error("{device}: {what}")]
    Missing {
        /// Name of one that was given.
        device: String,
        /// Which are missing, and what cannot be read without them.
        what: String,
    },
    /// Two devices of the file system were both written without the other.
    #[error(
        "{device}: it is device {id}, and it and device {other} were both written without the other"
    )]
    Apart {
        /// Name of the one.
        device: String,
        /// Its number.
        id: DeviceId,
        /// The number of the other one.
        other: DeviceId,
    },
    /// The device is in use.
    #[error("{device} is in use: {by}")]
    Busy {
        /// Name of the device.
        device: String,
        /// What uses it, as far as can be told.
        by: String,
    },
}

impl VolumeError {
    /// A device, and another one that was written without it.
    pub fn apart(device: &dyn Device, id: DeviceId, other: DeviceId) -> Self {
        Self::Apart { device: device.name(), id, other }
    }

    /// A device that could not make durable what it was given.
    pub fn flush(device: &dyn Device, source: io::Error) -> Self {
        let (at, len) = (Physical(0), device.size());
        Self::Io { device: device.name(), op: "flush", at, len, source }
    }
}
