//! Which balances are refused before anything happens.
//!
//! As on Linux: a profile needs its devices, chunks for data and metadata have one set of filters,
//! and metadata loses redundancy only by force. Here the same holds for data, unless the caller
//! wants what Linux does.

use super::filters::{BalanceWish, Candidate, Filters};
use crate::error::{Error, Result};
use larder_format::items::{BlockGroupFlags, Profile};

/// What may happen to data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataMay {
    /// It keeps its redundancy, unless the balance is forced.
    KeepRedundancy,
    /// It gets any profile, as on Linux.
    LoseRedundancy,
}

/// Checks a balance of a file system that has these chunks and so many devices for new ones.
///
/// # Errors
/// `Unsupported`, which says what is in the way and what to do.
pub(super) fn check(
    wish: &BalanceWish,
    chunks: &[Candidate],
    devices: usize,
    data: DataMay,
) -> Result<()> {
    if wish.sets().next().is_none() {
        return Err(Error::Invalid("a balance is for data, metadata or system chunks"));
    }
    let mixed = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    if chunks.iter().any(|c| c.flags.contains(mixed)) && wish.data != wish.metadata {
        return Err(Error::Unsupported(
            "data and metadata share their chunks here, so both need the same filters".into(),
        ));
    }
    let kinds = [
        ("data", BlockGroupFlags::DATA, &wish.data),
        ("metadata", BlockGroupFlags::METADATA, &wish.metadata),
        ("system", BlockGroupFlags::SYSTEM, &wish.system),
    ];
    for (name, flag, set) in kinds {
        let Some(to) = target(set) else { continue };
        enough_devices(to, devices)?;
        let of_kind = chunks.iter().filter(|c| c.flags.contains(flag));
        let best = of_kind.map(Candidate::profile).max_by_key(|p| safety(*p));
        let may_lose = flag == BlockGroupFlags::DATA && data == DataMay::LoseRedundancy;
        if let Some(best) = best
            && !wish.force
            && !may_lose
            && safety(to) < safety(best)
        {
            let (to, best) = (to.name(), best.name());
            return Err(Error::Unsupported(format!(
                "{name} is {best} and would be {to}, which survives less; --force converts it all \
                 the same"
            )));
        }
    }
    Ok(())
}

fn target(set: &Option<Filters>) -> Option<Profile> {
    set.as_ref()?.convert.map(|convert| convert.profile)
}

fn enough_devices(profile: Profile, devices: usize) -> Result<()> {
    let least = usize::from(profile.min_devices());
    if devices >= least {
        return Ok(());
    }
    let name = profile.name();
    let plural = if devices == 1 { "" } else { "s" };
    Err(Error::Unsupported(format!(
        "{name} needs {least} devices, and the file system has {devices} device{plural} to write to"
    )))
}

/// What a profile survives: devices that are lost, and bad sectors.
fn safety(profile: Profile) -> (u16, bool) {
    (profile.tolerated_losses(), profile.copies() > 1 || profile.parity() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::Logical;

    fn chunk(flags: BlockGroupFlags) -> Candidate {
        let (len, stripe_len) = (1 << 30, 1 << 30);
        Candidate { start: Logical(0), len, used: 0, flags, stripes: Vec::new(), stripe_len }
    }

    fn wish(data: &str, metadata: &str) -> BalanceWish {
        let set = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
        BalanceWish { data: set(data), metadata: set(metadata), ..BalanceWish::default() }
    }

    fn said(wish: &BalanceWish, devices: usize, data: DataMay) -> String {
        let chunks = [
            chunk(BlockGroupFlags::DATA | BlockGroupFlags::RAID1),
            chunk(BlockGroupFlags::METADATA | BlockGroupFlags::RAID1C3),
            chunk(BlockGroupFlags::METADATA),
        ];
        check(wish, &chunks, devices, data).map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn a_profile_needs_its_devices() {
        let keep = DataMay::KeepRedundancy;
        assert!(said(&wish("convert=raid1c4", ""), 3, keep).contains("raid1c4 needs 4 devices"));
        assert_eq!(said(&wish("convert=raid1c4", ""), 4, keep), "");
        assert!(said(&wish("convert=raid1", ""), 1, keep).contains("has 1 device to"));
        assert!(said(&BalanceWish::default(), 4, keep).contains("is for data"));
    }

    #[test]
    fn redundancy_is_lost_by_force_only() {
        let keep = DataMay::KeepRedundancy;
        assert!(said(&wish("convert=single", ""), 4, keep).contains("data is raid1"));
        assert!(said(&wish("convert=dup", ""), 4, keep).contains("--force"));
        assert_eq!(said(&wish("convert=single", ""), 4, DataMay::LoseRedundancy), "");
        assert_eq!(said(&wish("convert=raid5", ""), 4, keep), "");
        let metadata = wish("", "convert=raid1");
        assert!(said(&metadata, 4, DataMay::LoseRedundancy).contains("metadata is raid1c3"));
        assert_eq!(said(&BalanceWish { force: true, ..metadata }, 4, keep), "");
    }

    #[test]
    fn shared_chunks_have_one_set() {
        let both = [chunk(BlockGroupFlags::DATA | BlockGroupFlags::METADATA)];
        let check = |wish| check(&wish, &both, 1, DataMay::KeepRedundancy);
        assert!(check(wish("usage=5", "")).unwrap_err().to_string().contains("same filters"));
        check(wish("usage=5", "usage=5")).unwrap();
    }
}
