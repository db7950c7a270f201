//! Work that a daemon does at length for programs that ask for it, in the words that travel to it.
//!
//! There are four kinds of it: scrubs, balances, replacements of a device, other changes of
//! devices. A request names the file system that is meant, says what is to be done, and may bring
//! the files of a device, or one in which something is kept. How far the work is comes back as
//! JSON, by a [conduit](crate::conduit).

use crate::device_orders::Order;
use larder_volume::{FileDevice, Handover};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// What is to be done, and with which file system.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobRequest {
    /// Another image may have come to lie where that of a mount was.
    pub(crate) fsid: String,
    /// The process that serves the mount, if the requester knows it.
    pub(crate) daemon: Option<u32>,
    pub(crate) job: Job,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Job {
    /// How far a scrub is, is kept in the file that comes along.
    Scrub(ScrubOrder),
    Balance(BalanceOrder),
    /// The target of the replacement comes along.
    Replace(ReplaceOrder),
    /// The device that is to be added comes along.
    Devices {
        order: Order,
        device: Option<Handed>,
    },
}

impl Job {
    /// What only some users may do.
    pub(crate) fn what(&self) -> &'static str {
        match self {
            Self::Scrub(_) => "scrub it",
            Self::Balance(_) => "balance it",
            Self::Replace(_) => "replace its devices",
            Self::Devices { .. } => "change its devices",
        }
    }
}

/// What is to be done with a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ScrubOrder {
    /// Begin.
    Start { read_only: bool, limit: u64 },
    /// Go on from what the file has.
    Resume { limit: Option<u64> },
    /// Say how far it is.
    Status,
    /// End it.
    Cancel,
    /// Change the limit.
    Limit { limit: u64 },
}

/// What is to be done with a balance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BalanceOrder {
    /// Begin. Sets of filters are written as [`larder_fs::Filters`] writes them.
    Start {
        data: Option<String>,
        metadata: Option<String>,
        system: Option<String>,
        force: bool,
        /// Data may lose redundancy, as on Linux.
        as_linux: bool,
    },
    /// Go on with one that is paused.
    Resume,
    /// Say how far it is.
    Status,
    /// Say what a balance could free.
    Plan,
    /// End it so that it can go on later.
    Pause,
    /// End it for good.
    Cancel,
}

/// What is to be done with the replacement of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReplaceOrder {
    /// Begin.
    Start { source: u64, avoid: bool, target: Handed },
    /// Go on with the one that is suspended.
    Resume,
    /// Say how far it is.
    Status,
    /// End it, so that it can go on later.
    Suspend,
    /// Give it up.
    Cancel,
}

/// What is to be known of a device that comes along, see [`Handover`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Handed {
    path: PathBuf,
    size: u64,
    is_block_device: bool,
    discard_granularity: Option<u64>,
}

impl Handed {
    /// What is to be known, with a path that any process understands, and the descriptors.
    pub(crate) fn of(device: FileDevice) -> (Self, Vec<OwnedFd>) {
        let Handover { path, size, is_block_device, discard_granularity, files } =
            device.hand_over();
        let path = path.canonicalize().unwrap_or(path);
        (Self { path, size, is_block_device, discard_granularity }, files)
    }

    /// The device. `None`: it did not come along.
    pub(crate) fn device(&self, files: Vec<OwnedFd>) -> Option<FileDevice> {
        let Self { path, size, is_block_device, discard_granularity } = self.clone();
        FileDevice::take_over(Handover { path, size, is_block_device, discard_granularity, files })
    }
}
