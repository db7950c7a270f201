//! Which chunks a balance is for, and what they are to become: the filters of Linux.
//!
//! A set of filters is for data, for metadata or for system chunks. A chunk has to pass all filters
//! of the set for its type. How many are taken ([`Filters::limit`]) is counted last, of those that
//! have passed. Everything here is arithmetic on what is known of a chunk.

use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{DeviceId, Logical, Physical};
use larder_volume::Stripe;

/// What filters are about, of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Its first address.
    pub(crate) start: Logical,
    /// Its bytes.
    pub(crate) len: u64,
    /// How many of them are used.
    pub(crate) used: u64,
    /// Type and profile.
    pub(crate) flags: BlockGroupFlags,
    /// Where it lies on devices.
    pub(crate) stripes: Vec<Stripe>,
    /// Bytes of each stripe.
    pub(crate) stripe_len: u64,
}

impl Candidate {
    /// Its profile.
    pub(crate) fn profile(&self) -> Profile {
        self.flags.profile().unwrap_or(Profile::Single)
    }
    /// How much of it is used, in percent, rounded up.
    pub(crate) fn percent(&self) -> u32 {
        let percent = (u128::from(self.used) * 100).div_ceil(u128::from(self.len.max(1)));
        u32::try_from(percent).unwrap_or(100)
    }
    /// Bytes that it takes of all devices.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.stripe_len.saturating_mul(self.stripes.len() as u64)
    }
}

/// Numbers from one to another. Which ends belong to it depends on what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span<T> {
    /// The first.
    pub from: T,
    /// The last, or the one behind the last.
    pub to: T,
}

/// The profile that chunks are to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convert {
    /// The profile.
    pub profile: Profile,
    /// Chunks that have it already are left alone.
    pub soft: bool,
}

/// A set of filters. Those that are `None` let every chunk pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filters {
    /// Chunks of one of these profiles.
    pub profiles: Option<Vec<Profile>>,
    /// Chunks of which at least so many percent are used, and less than so many. As on Linux, a
    /// chunk that is full does not pass 100, and "less than 0" means empty.
    pub usage: Option<Span<u32>>,
    /// Chunks with a stripe on this device.
    pub device: Option<DeviceId>,
    /// Chunks that have a byte of that device in this range. It says nothing without `device`.
    pub device_range: Option<Span<Physical>>,
    /// Chunks that have an address in this range.
    pub address_range: Option<Span<Logical>>,
    /// Chunks with so many stripes, both ends included.
    pub stripes: Option<Span<u32>>,
    /// What they are to become.
    pub convert: Option<Convert>,
    /// So many chunks: none if there are fewer than the first number, and no more than the second.
    pub limit: Option<Span<u32>>,
}

impl Filters {
    /// Does the chunk pass all filters but the limit?
    pub(crate) fn pass(&self, chunk: &Candidate) -> bool {
        let by_profile =
            self.profiles.as_ref().is_none_or(|profiles| profiles.contains(&chunk.profile()));
        let by_stripes = self.stripes.is_none_or(|wanted| {
            let count = u32::try_from(chunk.stripes.len()).unwrap_or(u32::MAX);
            (wanted.from..=wanted.to).contains(&count)
        });
        by_profile
            && by_stripes
            && self.usage.is_none_or(|usage| is_used_so_much(usage, chunk))
            && self.device.is_none_or(|id| chunk.stripes.iter().any(|s| s.device == id))
            && self.passes_device_range(chunk)
            && self.address_range.is_none_or(|range| {
                chunk.start < range.to && range.from < chunk.start.plus(chunk.len)
            })
            && !self.is_done(chunk)
    }

    fn passes_device_range(&self, chunk: &Candidate) -> bool {
        let (Some(id), Some(range)) = (self.device, self.device_range) else { return true };
        let overlaps = |s: &&Stripe| {
            s.device == id && s.at < range.to && range.from < s.at.plus(chunk.stripe_len)
        };
        chunk.stripes.iter().find(overlaps).is_some()
    }

    /// Has it the wanted profile, so that it is to be left alone?
    fn is_done(&self, chunk: &Candidate) -> bool {
        self.convert.is_some_and(|to| to.soft && to.profile == chunk.profile())
    }

    /// Of chunks that have passed, those that are taken.
    pub(crate) fn limited(&self, mut chunks: Vec<Candidate>) -> Vec<Candidate> {
        if let Some(limit) = self.limit {
            let fewest = usize::try_from(limit.from).unwrap_or(usize::MAX);
            let most = usize::try_from(limit.to).unwrap_or(usize::MAX);
            chunks.truncate(if chunks.len() < fewest { 0 } else { most });
        }
        chunks
    }

    /// The same set for a balance that goes on after an interruption. What has been converted is
    /// left alone. What has been moved is nearly full now, and is left alone as well, unless the
    /// set says something about that.
    #[must_use]
    pub(crate) fn resumed(mut self) -> Self {
        match &mut self.convert {
            Some(convert) => convert.soft = true,
            None => {
                self.usage.get_or_insert(Span { from: 0, to: 90 });
            }
        }
        self
    }
}

fn is_used_so_much(usage: Span<u32>, chunk: &Candidate) -> bool {
    let bytes = |percent: u32| {
        u64::try_from(u128::from(chunk.len) * u128::from(percent) / 100).unwrap_or(u64::MAX)
    };
    let below = match usage.to {
        0 => 1,
        101.. => chunk.len,
        percent => bytes(percent),
    };
    bytes(usage.from) <= chunk.used && chunk.used < below
}

/// What a balance is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalanceWish {
    /// Chunks of data.
    pub data: Option<Filters>,
    /// Chunks of metadata.
    pub metadata: Option<Filters>,
    /// Chunks of the chunk tree.
    pub system: Option<Filters>,
    /// Less redundancy than before is agreed to.
    pub force: bool,
}

impl BalanceWish {
    /// The set for chunks like this. Those that hold data and metadata have the set for data.
    pub(crate) fn set_for(&self, flags: BlockGroupFlags) -> Option<&Filters> {
        if flags.contains(BlockGroupFlags::DATA) {
            self.data.as_ref()
        } else if flags.contains(BlockGroupFlags::SYSTEM) {
            self.system.as_ref()
        } else {
            self.metadata.as_ref()
        }
    }

    /// All sets.
    pub(crate) fn sets(&self) -> impl Iterator<Item = &Filters> {
        [&self.data, &self.metadata, &self.system].into_iter().flatten()
    }

    /// See [`Filters::resumed`].
    #[must_use]
    pub(crate) fn resumed(self) -> Self {
        Self {
            data: self.data.map(Filters::resumed),
            metadata: self.metadata.map(Filters::resumed),
            system: self.system.map(Filters::resumed),
            force: self.force,
        }
    }

    /// The chunks that are taken: emptiest first, because those cost least and free most.
    pub(crate) fn choose(&self, all: &[Candidate]) -> Vec<Candidate> {
        let types = [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM];
        let mut chosen: Vec<Candidate> = Vec::new();
        for kind in types {
            let Some(set) = self.set_for(kind) else { continue };
            let is_of_kind = |c: &&Candidate| {
                self.set_for(c.flags).is_some_and(|its| std::ptr::eq(its, set)) && set.pass(c)
            };
            let mut of_kind: Vec<Candidate> = all.iter().filter(is_of_kind).cloned().collect();
            of_kind.sort_by_key(|c| (c.percent(), c.start));
            chosen.extend(set.limited(of_kind));
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn chunk(used: u64) -> Candidate {
        let stripe = |id| Stripe { device: DeviceId(id), at: Physical(id * 1000 * MIB) };
        Candidate {
            start: Logical(500 * MIB),
            len: 100 * MIB,
            used,
            flags: BlockGroupFlags::DATA | BlockGroupFlags::RAID1,
            stripes: vec![stripe(1), stripe(2)],
            stripe_len: 100 * MIB,
        }
    }

    fn passes(filters: Filters, used: u64) -> bool {
        filters.pass(&chunk(used))
    }

    #[test]
    fn usage_counts_as_on_linux() {
        let usage = |from, to| Filters { usage: Some(Span { from, to }), ..Filters::default() };
        assert!(passes(usage(0, 50), 50 * MIB - 1));
        assert!(!passes(usage(0, 50), 50 * MIB));
        assert!(passes(usage(0, 0), 0));
        assert!(!passes(usage(0, 0), 4096));
        // A full chunk is not below 100 percent, nor below anything more.
        assert!(!passes(usage(0, 100), 100 * MIB));
        assert!(!passes(usage(0, 101), 100 * MIB));
        assert!(passes(usage(0, 101), 100 * MIB - 4096));
        assert!(passes(usage(50, 60), 50 * MIB));
        assert!(!passes(usage(50, 60), 50 * MIB - 1));
    }

    #[test]
    fn places_count_if_a_byte_lies_there() {
        let address = |from, to| Filters {
            address_range: Some(Span { from: Logical(from), to: Logical(to) }),
            ..Filters::default()
        };
        assert!(passes(address(0, 500 * MIB + 1), 0));
        assert!(!passes(address(0, 500 * MIB), 0));
        assert!(passes(address(600 * MIB - 1, u64::MAX), 0));
        assert!(!passes(address(600 * MIB, u64::MAX), 0));
        let device = |id: u64, from, to| Filters {
            device: Some(DeviceId(id)),
            device_range: Some(Span { from: Physical(from), to: Physical(to) }),
            ..Filters::default()
        };
        assert!(passes(device(2, 2100 * MIB - 1, u64::MAX), 0));
        assert!(!passes(device(2, 2100 * MIB, u64::MAX), 0));
        assert!(!passes(device(2, 0, 2000 * MIB), 0));
        assert!(!passes(device(3, 0, u64::MAX), 0));
        // Without a device the range says nothing.
        assert!(passes(Filters { device: None, ..device(2, 0, 1) }, 0));
        let stripes = |from, to| Filters { stripes: Some(Span { from, to }), ..Filters::default() };
        assert!(passes(stripes(2, 2), 0) && !passes(stripes(3, 9), 0) && !passes(stripes(0, 1), 0));
    }

    #[test]
    fn profiles_and_what_has_been_converted() {
        let of = |list: &[Profile]| Filters { profiles: Some(list.to_vec()), ..Filters::default() };
        assert!(passes(of(&[Profile::Dup, Profile::Raid1]), 0) && !passes(of(&[Profile::Dup]), 0));
        let to = |profile, soft| Filters {
            convert: Some(Convert { profile, soft }),
            ..Filters::default()
        };
        assert!(passes(to(Profile::Raid1, false), 0) && !passes(to(Profile::Raid1, true), 0));
        assert!(passes(to(Profile::Dup, true), 0));
        let resumed = to(Profile::Raid1, false).resumed();
        assert!(!passes(resumed.clone(), 0) && resumed.usage.is_none());
        let resumed = Filters::default().resumed();
        assert!(passes(resumed.clone(), 89 * MIB) && !passes(resumed, 95 * MIB));
    }

    #[test]
    fn a_limit_is_counted_last() {
        let all: Vec<Candidate> = [70, 10, 40, 30].map(|used| chunk(used * MIB)).to_vec();
        let wish = |limit: Option<Span<u32>>| {
            let usage = Some(Span { from: 0, to: 50 });
            let data = Some(Filters { usage, limit, ..Filters::default() });
            BalanceWish { data, ..BalanceWish::default() }
        };
        let used = |wish: BalanceWish| -> Vec<u64> {
            wish.choose(&all).iter().map(|c| c.used / MIB).collect()
        };
        assert_eq!(used(wish(None)), [10, 30, 40]);
        assert_eq!(used(wish(Some(Span { from: 0, to: 2 }))), [10, 30]);
        assert_eq!(used(wish(Some(Span { from: 3, to: 9 }))), [10, 30, 40]);
        assert_eq!(used(wish(Some(Span { from: 4, to: 9 }))), [] as [u64; 0]);
        // No set, no chunk.
        assert_eq!(used(BalanceWish::default()), [] as [u64; 0]);
    }

    #[test]
    fn chunks_for_both_are_taken_once() {
        let mut mixed = chunk(MIB);
        mixed.flags |= BlockGroupFlags::METADATA;
        let set = Some(Filters::default());
        let wish = BalanceWish { data: set.clone(), metadata: set, ..BalanceWish::default() };
        assert_eq!(wish.choose(&[mixed]).len(), 1);
    }
}
