//! What an entry of the catalogue is.

use crate::bases::Base;
use anyhow::Result;
use larder_check::Kind;
use larder_simtest::damage::Damage;

/// Where the same damage can be planted on an image of Larder and on one of Linux.
pub(crate) const BOTH: &[Base] = &[Base::Larder, Base::Linux];
pub(crate) const LINUX: &[Base] = &[Base::Linux];
pub(crate) const HOLES: &[Base] = &[Base::Holes];
pub(crate) const OLD: &[Base] = &[Base::Old];
pub(crate) const MIXED: &[Base] = &[Base::Mixed];
pub(crate) const PENDING: &[Base] = &[Base::Pending];
pub(crate) const QUOTAS: &[Base] = &[Base::Quotas];
pub(crate) const CACHES: &[Base] = &[Base::Caches];

/// What `btrfs check` (6.14) says to a planted damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progs {
    /// It complains.
    Sees,
    /// It complains with `--check-data-csum` only.
    SeesWithData,
    /// It says something, and ends as if nothing were wrong.
    Mentions,
    /// It finds nothing.
    Misses,
}

/// One kind of damage.
pub(crate) struct Entry {
    /// Unique in the catalogue.
    pub name: &'static str,
    /// The images that it is planted on, each for itself.
    pub bases: &'static [Base],
    /// Kinds of findings that the checker must report, all of them; it may report more.
    pub kinds: &'static [Kind],
    /// What Linux's checker does.
    pub progs: Progs,
    /// Does it.
    pub plant: Plant,
}

type Plant = fn(&mut Damage) -> Result<()>;

/// Damage that `btrfs check` complains about.
pub(crate) const fn seen(
    name: &'static str,
    bases: &'static [Base],
    kinds: &'static [Kind],
    plant: Plant,
) -> Entry {
    Entry { name, bases, kinds, progs: Progs::Sees, plant }
}

/// Damage that `btrfs check` complains about with `--check-data-csum` only.
pub(crate) const fn seen_with_data(
    name: &'static str,
    bases: &'static [Base],
    kinds: &'static [Kind],
    plant: Plant,
) -> Entry {
    Entry { name, bases, kinds, progs: Progs::SeesWithData, plant }
}

/// Something that `btrfs check` mentions, though it is no error: Linux sees it, and does without.
pub(crate) const fn mentioned(
    name: &'static str,
    bases: &'static [Base],
    kinds: &'static [Kind],
    plant: Plant,
) -> Entry {
    Entry { name, bases, kinds, progs: Progs::Mentions, plant }
}

/// Damage in which `btrfs check` finds nothing.
pub(crate) const fn missed(
    name: &'static str,
    bases: &'static [Base],
    kinds: &'static [Kind],
    plant: Plant,
) -> Entry {
    Entry { name, bases, kinds, progs: Progs::Misses, plant }
}
