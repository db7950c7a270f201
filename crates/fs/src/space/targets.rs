//! The profiles to which a balance converts chunks.
//!
//! As long as there is one for a kind of space, new chunks get it, and space is allocated in chunks
//! that have it. Only if the devices have no room for another such chunk, others are used as well.

use crate::space::SpaceKind;
use larder_format::items::{BlockGroupFlags, Profile};
use std::sync::atomic::{AtomicUsize, Ordering};

/// For each kind of space the place of its profile in [`Profile::ALL`], plus 1; or 0.
#[derive(Debug, Default)]
pub(crate) struct Targets([AtomicUsize; 3]);

impl Targets {
    fn of(&self, kind: SpaceKind) -> &AtomicUsize {
        match kind {
            SpaceKind::Data => &self.0[0],
            SpaceKind::Metadata => &self.0[1],
            SpaceKind::System => &self.0[2],
        }
    }
    /// What chunks for `kind` are converted to.
    pub(crate) fn get(&self, kind: SpaceKind) -> Option<Profile> {
        let place = self.of(kind).load(Ordering::Acquire).checked_sub(1)?;
        Profile::ALL.get(place).copied()
    }
    /// Sets it.
    pub(crate) fn set(&self, kind: SpaceKind, profile: Option<Profile>) {
        let place = profile.and_then(|p| Profile::ALL.iter().position(|q| *q == p));
        self.of(kind).store(place.map_or(0, |place| place + 1), Ordering::Release);
    }
    /// Has a chunk like this the profile that chunks for `kind` are to have? All have where nothing
    /// is converted.
    pub(crate) fn is_met(&self, kind: SpaceKind, flags: BlockGroupFlags) -> bool {
        self.get(kind).is_none_or(|profile| flags.profile().is_ok_and(|p| p == profile))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_will_do_where_nothing_is_converted() {
        let (targets, data) = (Targets::default(), SpaceKind::Data);
        let single = BlockGroupFlags::DATA;
        assert!(targets.is_met(data, single) && targets.get(data).is_none());
        for profile in Profile::ALL {
            targets.set(data, Some(profile));
            assert_eq!(targets.get(data), Some(profile));
            assert!(targets.is_met(data, single | profile.flag()));
            assert_eq!(targets.is_met(data, single), profile == Profile::Single);
            assert!(targets.is_met(SpaceKind::Metadata, BlockGroupFlags::METADATA));
        }
        targets.set(data, None);
        assert!(targets.is_met(data, single));
    }
}
