//! Moves of data beside workloads: relocation, balances, conversions, devices that come, go, shrink
//! and are replaced, with a power cut at every moment.
//!
//! A [`Scene`] is a kind of file system, the disks that it is on, a spare one, and what moves. A
//! run makes such a file system, fills it, and has threads of writers work on it while a mover does
//! its part again and again (`mover`, `writers`). Writers wait for the mover's accesses to the
//! disks between their operations, so that these are spread over its steps. In a share of the runs
//! a disk fails meanwhile, as far as the profiles tolerate it.
//!
//! Of what the disks recorded, crash states are made as in every other simulation, and half of
//! those that are looked at are around commits, where steps end. Each is opened by the disks that a
//! person would name (`members`), goes on or is given up by its hash, and is used afterwards
//! (`judge`). Linux does the same with a share of them (`linux`).

mod judge;
mod linux;
mod members;
mod mover;
mod run;
mod writers;

pub use run::{Moves, run};

use crate::device::{DiscardEffect, SimDevice};
use crate::disks::{KINDS, Kind};
use crate::image::Image;
use larder_fs::mkfs::{MkfsOptions, Profile, mkfs_on};
use larder_fs::{Error, Timestamp};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// What moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moving {
    /// Each block group in turn.
    Relocate,
    /// All block groups, as one balance.
    Balance,
    /// All block groups, to other profiles and back.
    Convert,
    /// The spare disk joins, and another one leaves.
    Remove,
    /// A device becomes as small as it can be, and large again.
    Resize,
    /// The spare disk takes the place of another one.
    Replace,
    /// The same, where the other one is lost already.
    Missing,
    /// The same, where the target fails.
    BadTarget,
}

impl Moving {
    /// Each with its name.
    pub const ALL: [(Self, &'static str); 8] = [
        (Self::Relocate, "relocate"),
        (Self::Balance, "balance"),
        (Self::Convert, "convert"),
        (Self::Remove, "remove"),
        (Self::Resize, "resize"),
        (Self::Replace, "replace"),
        (Self::Missing, "missing"),
        (Self::BadTarget, "bad-target"),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(moving, _)| *moving == self).map_or("", |(_, name)| name)
    }

    fn needs_a_spare(self) -> bool {
        !matches!(self, Self::Relocate | Self::Balance | Self::Convert | Self::Resize)
    }
}

/// Kinds on one disk.
const ALONE: [Kind; 3] = [
    Kind { data: Profile::Single, metadata: Profile::Single, disks: 1 },
    Kind { data: Profile::Single, metadata: Profile::Dup, disks: 1 },
    Kind { data: Profile::Dup, metadata: Profile::Dup, disks: 1 },
];

/// A file system and what moves on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scene {
    /// What it is like at first.
    pub kind: Kind,
    /// What moves.
    pub moving: Moving,
    /// To which profiles of data and metadata it is converted.
    pub to: (Profile, Profile),
}

impl Scene {
    /// One of the scenes of these moves.
    ///
    /// # Panics
    /// There are no moves.
    #[must_use]
    pub fn choose(rng: &mut StdRng, moves: &[Moving], only: Option<Kind>) -> Self {
        let moving = *moves.choose(rng).expect("something moves");
        let all: Vec<Kind> = KINDS.into_iter().chain(ALONE).collect();
        let fits = |kind: &Kind| moving != Moving::Missing || kind.tolerated() > 0;
        let all: Vec<Kind> = all.into_iter().filter(fits).collect();
        let kind = only.unwrap_or_else(|| *all.choose(rng).expect("there are kinds"));
        let mut profile = || {
            let fits = |p: &Profile| usize::from(p.min_devices()) <= kind.disks;
            let able: Vec<Profile> = Profile::ALL.into_iter().filter(fits).collect();
            *able.choose(rng).expect("single fits everywhere")
        };
        Self { kind, moving, to: (profile(), profile()) }
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> String {
        let (data, metadata) = self.to;
        let to = match self.moving {
            Moving::Convert => format!(" to {}-{}", data.name(), metadata.name()),
            _ => String::new(),
        };
        format!("{} of {}{to}", self.moving.name(), self.kind.name())
    }

    /// So many disks may be lost at every moment.
    pub(crate) fn tolerated(&self) -> usize {
        let (data, metadata) = self.to;
        let after = data.tolerated_losses().min(metadata.tolerated_losses());
        match self.moving {
            Moving::Convert => self.kind.tolerated().min(after.into()),
            Moving::Missing => self.kind.tolerated() - 1,
            _ => self.kind.tolerated(),
        }
    }

    /// The new file system, and the spare disk behind its own.
    ///
    /// # Errors
    /// What mkfs says.
    pub(crate) fn fresh(&self) -> Result<Image, Error> {
        let disks = self.kind.disks;
        let mut sizes: Vec<u64> = (0..disks as u64).map(|n| (256 + 16 * n) * MIB).collect();
        if self.moving.needs_a_spare() {
            sizes.push(400 * MIB);
        }
        let device = SimDevice::new(Image::stack(sizes)).unrecorded();
        let device = Arc::new(device.with_discard(DiscardEffect::Ignore));
        let all = device.devices();
        let options = MkfsOptions {
            data: Some(self.kind.data),
            metadata: Some(self.kind.metadata),
            uuid: Some(*b"larder-simulator"),
            time: Some(Timestamp { sec: 1_700_000_000, nsec: 0 }),
            ..MkfsOptions::default()
        };
        mkfs_on(&all[..disks].iter().map(|disk| &**disk).collect::<Vec<_>>(), &options)?;
        let mut image = device.image();
        image.freeze();
        Ok(image)
    }

    /// A device of the file system.
    pub(crate) fn some_disk(&self, rng: &mut StdRng) -> usize {
        rng.random_range(0..self.kind.disks)
    }
}
