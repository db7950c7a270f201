//! How a file system lies on its devices: on one, or on four with a profile.
//!
//! With several devices each of them is a file of an equal share of the image. Data has the
//! profile, and metadata the one that is recommended beside it: metadata of RAID5 and RAID6 is
//! mirrored as often as the data survives losses.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Devices of a file system that is on several.
const SEVERAL: usize = 4;

/// On how many devices it lies, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Spread {
    /// On one device.
    #[default]
    One,
    /// Data on one device after the other, metadata mirrored.
    Single,
    /// Data in stripes.
    Raid0,
    /// Data mirrored on two devices.
    Raid1,
    /// Stripes of mirrors.
    Raid10,
    /// Stripes with one parity.
    Raid5,
    /// Stripes with two parities.
    Raid6,
}

impl Spread {
    /// How many devices it needs.
    pub(crate) fn devices(self) -> usize {
        if self == Self::One { 1 } else { SEVERAL }
    }
    /// The profile of the data, as mkfs calls it.
    pub(crate) fn data(self) -> &'static str {
        match self {
            Self::One | Self::Single => "single",
            Self::Raid0 => "raid0",
            Self::Raid1 => "raid1",
            Self::Raid10 => "raid10",
            Self::Raid5 => "raid5",
            Self::Raid6 => "raid6",
        }
    }
    /// Does everything stay readable without one of them?
    pub(crate) fn survives_loss(self) -> bool {
        !matches!(self, Self::One | Self::Single | Self::Raid0)
    }
    /// The profile of the metadata, if the number of devices decides it.
    pub(crate) fn metadata(self) -> Option<&'static str> {
        match self {
            Self::One => None,
            Self::Raid0 => Some("raid0"),
            Self::Single | Self::Raid1 | Self::Raid5 => Some("raid1"),
            Self::Raid10 => Some("raid10"),
            Self::Raid6 => Some("raid1c3"),
        }
    }
}
