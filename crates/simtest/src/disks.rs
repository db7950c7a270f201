//! File systems on several disks, and what may happen to some of them.
//!
//! A [`Kind`] is a choice of profiles on disks of different sizes. A [`Mishap`] happens while the
//! power is off: a disk is lost, or it is there again as it was before everything, or it has
//! garbage in places. A [`Plan`] happens while the file system is in use: from some access on a
//! disk refuses reads, writes, flushes or everything, once or for ever. Both hurt no more disks
//! than the profiles can do without, so nothing that was promised may be missing.

use crate::device::{Access, AccessKind, Effect, Fault};
use crate::image::{Image, PAGE, Page, STRIDE};
use crate::runner::{Config, fresh_on};
use larder_format::SUPER_OFFSETS;
use larder_fs::mkfs::{MkfsOptions, Profile};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

const MIB: u64 = 1 << 20;

/// A file system on several disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Kind {
    pub data: Profile,
    pub metadata: Profile,
    pub disks: usize,
}

const fn kind(data: Profile, metadata: Profile, disks: usize) -> Kind {
    Kind { data, metadata, disks }
}

/// All kinds that are tried, those of the same profile for data and metadata first.
pub const KINDS: [Kind; 16] = [
    kind(Profile::Raid1, Profile::Raid1, 2),
    kind(Profile::Raid1c3, Profile::Raid1c3, 3),
    kind(Profile::Raid1c4, Profile::Raid1c4, 4),
    kind(Profile::Raid10, Profile::Raid10, 4),
    kind(Profile::Raid5, Profile::Raid5, 3),
    kind(Profile::Raid6, Profile::Raid6, 4),
    kind(Profile::Raid0, Profile::Raid0, 2),
    kind(Profile::Single, Profile::Single, 2),
    kind(Profile::Dup, Profile::Dup, 2),
    kind(Profile::Single, Profile::Raid1, 2),
    kind(Profile::Raid5, Profile::Raid1, 3),
    kind(Profile::Raid6, Profile::Raid1c3, 5),
    kind(Profile::Raid0, Profile::Raid1c3, 3),
    kind(Profile::Raid1, Profile::Raid10, 3),
    kind(Profile::Raid10, Profile::Raid1c3, 5),
    kind(Profile::Raid1c3, Profile::Raid1c4, 4),
];

impl Kind {
    /// Its name: data, metadata, disks.
    #[must_use]
    pub fn name(self) -> String {
        format!("{}-{}-{}", self.data.name(), self.metadata.name(), self.disks)
    }

    /// The kind of a name as [`Kind::name`] gives it, whether or not it is one of [`KINDS`].
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let mut words = name.split('-');
        let mut profile = || {
            let word = words.next()?;
            Profile::ALL.into_iter().find(|profile| profile.name() == word)
        };
        let (data, metadata) = (profile()?, profile()?);
        let disks = words.next()?.parse().ok()?;
        Some(Self { data, metadata, disks })
    }

    /// So many disks may be lost, whichever they are.
    #[must_use]
    pub fn tolerated(self) -> usize {
        self.data.tolerated_losses().min(self.metadata.tolerated_losses()).into()
    }

    /// The configuration on a fresh file system of this kind. A share of the states is judged with
    /// mishaps, too.
    ///
    /// # Errors
    /// What mkfs says.
    pub fn config(self, config: &Config, share: f64) -> Result<Config, larder_fs::Error> {
        let mishaps = Mishaps { tolerated: self.tolerated(), share };
        Ok(Config { base: self.fresh()?, mishaps, ..config.clone() })
    }

    /// A new file system of this kind, on disks of different sizes.
    ///
    /// # Errors
    /// What mkfs says.
    pub fn fresh(self) -> Result<Image, larder_fs::Error> {
        let sizes = (0..self.disks as u64).map(|n| (256 + 16 * n) * MIB).collect();
        let options = MkfsOptions {
            data: Some(self.data),
            metadata: Some(self.metadata),
            ..MkfsOptions::default()
        };
        fresh_on(sizes, &options)
    }
}

/// What happens to a disk while the power is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// It is not there any more.
    Lost,
    /// It holds what it held before everything: it was away.
    Old,
    /// Half of its pages hold garbage, but not its superblocks.
    Damaged,
}

/// How many states have mishaps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mishaps {
    /// Most disks that are hurt.
    pub tolerated: usize,
    /// Share of the states, between 0 and 1.
    pub share: f64,
}

impl Mishaps {
    /// Each mishap, with the disks that it befalls in a state.
    #[must_use]
    pub fn chosen(&self, state: u64, disks: usize) -> Vec<(Mishap, Vec<usize>)> {
        if self.tolerated == 0 {
            return Vec::new();
        }
        let mut rng = StdRng::seed_from_u64(state);
        let mut one = |mishap| {
            let mut all: Vec<usize> = (0..disks).collect();
            all.shuffle(&mut rng);
            all.truncate(rng.random_range(1..=self.tolerated));
            all.sort_unstable();
            (mishap, all)
        };
        [Mishap::Lost, Mishap::Old, Mishap::Damaged].map(&mut one).into()
    }
}

impl Mishap {
    /// The disks afterwards. `before`: what they held before everything.
    #[must_use]
    pub fn befall(self, image: &Image, disks: &[usize], before: &Image) -> Image {
        let mut image = image.clone();
        for disk in disks {
            match self {
                Self::Lost => image.lose(*disk),
                Self::Old => image.take_disk(*disk, before),
                Self::Damaged => damage(&mut image, *disk),
            }
        }
        image
    }
}

/// Fills every second page with garbage.
fn damage(image: &mut Image, disk: usize) {
    let is_super =
        |n: u64| SUPER_OFFSETS.iter().any(|at| (disk as u64 * STRIDE + at.0) / PAGE as u64 == n);
    for (n, page) in image.pages_of(disk) {
        if page.hash() % 2 == 0 && !is_super(n) {
            image.set_page(n, Page::new(page.bytes().map(|b| b ^ 0x5a)));
        }
    }
}

/// What a disk refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Refused {
    Everything,
    Reads,
    Writes,
    Flushes,
}

/// A disk that fails in the midst of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Which disk.
    pub disk: usize,
    /// What it refuses.
    pub refused: Refused,
    /// So many of these pass before.
    pub skip: u64,
    /// For ever, or once.
    pub forever: bool,
    /// What a write does that is refused.
    pub effect: Effect,
}

impl Plan {
    /// A plan for one of so many disks; `most` accesses pass before.
    #[must_use]
    pub fn random(rng: &mut StdRng, disks: usize, most: u64) -> Self {
        use Refused::{Everything, Flushes, Reads, Writes};
        let refused = *[Everything, Reads, Writes, Flushes].choose(rng).expect("not empty");
        let most = if refused == Flushes { most / 4 } else { most };
        Self {
            disk: rng.random_range(0..disks),
            refused,
            skip: rng.random_range(0..most.max(1)),
            forever: refused == Everything || rng.random_bool(0.5),
            effect: *[Effect::None, Effect::Half, Effect::All].choose(rng).expect("not empty"),
        }
    }

    /// The fault that the device has then.
    #[must_use]
    pub fn fault(self) -> Fault {
        let strikes = move |a: &Access| {
            a.disk() == self.disk
                && match self.refused {
                    Refused::Everything => true,
                    Refused::Reads => a.kind == AccessKind::Read,
                    Refused::Writes => a.is_write(),
                    Refused::Flushes => a.kind == AccessKind::Flush,
                }
        };
        let fault = Fault::nth(self.skip, strikes).with_effect(self.effect);
        if self.forever { fault.forever() } else { fault }
    }
}
