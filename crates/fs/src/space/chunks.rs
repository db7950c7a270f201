//! How large new chunks are, and on which devices and where their stripes go.
//!
//! Sizes and the choice of devices are policy, not format. They are those of Linux, so that file
//! systems that Larder fills look like any other: the devices with the most room in one place come
//! first, a striped chunk takes all that have room, and its stripes are as long as the last of them
//! allows. There is one exception: a mirrored chunk is shorter where it would leave more on one
//! device than the others have room to mirror. Everything here is arithmetic on what is taken;
//! nothing is allocated.
//!
//! [`capacity`] answers another question: how many bytes can still get into chunks like one, if
//! they are made one after the other? Promises to metadata and the free space that people see
//! depend on it, so it never says more than there is.

use crate::space::SpaceKind;
use larder_format::items::{BlockGroupFlags, Chunk, Profile};
use larder_format::{DEVICE_RESERVED, DeviceId, Logical, Physical, STRIPE_LEN};
use larder_volume::{MappedChunk, Stripe};
use smallvec::SmallVec;
use std::cmp::Reverse;

/// Sizes that a tenth of the file system is rounded up to.
const STEP: u64 = 16 << 20;
/// Shortest stripe worth having.
pub(crate) const MIN_STRIPE: u64 = 1 << 20;
/// A stripe that could be as long is not made shorter for the sake of what is left.
const SHORTENED: u64 = 16 << 20;
/// Longest stripe.
const MAX_STRIPE: u64 = 1 << 30;
/// Most stripes of a chunk: as many as an item in a leaf of 4 KiB has room for.
const MAX_STRIPES: u16 = 120;
/// The superblock has room for the chunks of the chunk tree with so many stripes, while one is
/// exchanged for another.
const MAX_SYSTEM_STRIPES: u16 = 26;

/// Chunks that are counted one by one to find out how many there is room for.
const COUNTED_CHUNKS: usize = 1024;

/// What a new chunk should be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) kind: SpaceKind,
    pub(crate) profile: Profile,
    /// Bytes of all devices of the file system.
    pub(crate) total: u64,
    /// Bytes that it has, but for what its stripes are rounded up by. `None`: as many as is usual.
    pub(crate) most: Option<u64>,
}

impl Wanted {
    /// Most bytes of the chunk, and of each of its stripes.
    fn limits(&self) -> (u64, u64) {
        let most = match self.kind {
            SpaceKind::Data => 10 << 30,
            SpaceKind::Metadata if self.total > 50 << 30 => 1 << 30,
            SpaceKind::Metadata => 256 << 20,
            SpaceKind::System => 32 << 20,
        };
        (most, most.min(MAX_STRIPE))
    }

    /// Bytes that each stripe of a chunk with so many of them should have.
    ///
    /// The chunk has at most about a tenth of the file system, so small ones do not run out of
    /// device space with one half-empty chunk for each type. The part of a stripe is rounded up to
    /// 16 MiB: 112 MiB of a file system of 1 GiB. A chunk whose length is told needs no such rule.
    fn stripe_len(&self, stripes: u16) -> u64 {
        let (chunk, stripe) = self.limits();
        let columns = u64::from(self.profile.data_stripes(stripes));
        stripe.min(match self.most {
            None => (chunk.min(self.total / 10) / columns).next_multiple_of(STEP),
            Some(most) => {
                most.div_ceil(columns).max(1).div_ceil(MIN_STRIPE).saturating_mul(MIN_STRIPE)
            }
        })
    }

    /// So many devices are used of `there`, of which each has room. `None`: too few.
    fn devices_of(&self, there: usize) -> Option<u16> {
        let most = if self.kind == SpaceKind::System { MAX_SYSTEM_STRIPES } else { MAX_STRIPES };
        let most = self.profile.max_devices().min(most);
        let n = u16::try_from(there).unwrap_or(u16::MAX).min(most);
        let n = n - n % self.profile.sub_stripes();
        (n >= self.profile.min_devices()).then_some(n)
    }
}

/// Type and profile of new chunks for `kind`, where there are chunks like `those` and so many
/// devices can be used.
///
/// A conversion says which profile, `target`. Else, of the profiles that there are, the one that
/// survives most counts, as for Linux. If too few
/// devices are left for it, Linux makes single chunks. Here, new chunks have as many copies as
/// can be had.
#[must_use]
pub(crate) fn new_chunks(
    kind: SpaceKind,
    those: impl Iterator<Item = BlockGroupFlags>,
    target: Option<Profile>,
    devices: usize,
) -> BlockGroupFlags {
    let profile_of = |flags: BlockGroupFlags| flags.profile().unwrap_or(Profile::Single);
    let best = those.max_by_key(|f| rank(profile_of(*f))).unwrap_or(type_of(kind));
    let types = best & BlockGroupFlags::TYPES;
    let mut profile = target.unwrap_or_else(|| profile_of(best));
    while devices > 0 && usize::from(profile.min_devices()) > devices {
        profile = with_fewer_devices(profile, types == BlockGroupFlags::DATA);
    }
    types | profile.flag()
}

/// The type bit of a kind.
#[must_use]
pub(crate) fn type_of(kind: SpaceKind) -> BlockGroupFlags {
    match kind {
        SpaceKind::Data => BlockGroupFlags::DATA,
        SpaceKind::Metadata => BlockGroupFlags::METADATA,
        SpaceKind::System => BlockGroupFlags::SYSTEM,
    }
}

/// The order in which Linux prefers profiles.
fn rank(profile: Profile) -> usize {
    use Profile::{Dup, Raid0, Raid1, Raid1c3, Raid1c4, Raid5, Raid6, Raid10, Single};
    let order = [Single, Raid0, Dup, Raid1, Raid10, Raid5, Raid1c3, Raid6, Raid1c4];
    order.iter().position(|p| *p == profile).unwrap_or(0)
}

/// The next best profile for new chunks.
fn with_fewer_devices(profile: Profile, only_data: bool) -> Profile {
    match profile {
        Profile::Raid1c4 => Profile::Raid1c3,
        Profile::Raid1c3 | Profile::Raid6 => Profile::Raid1,
        _ if only_data => Profile::Single,
        // A bad sector must not cost a tree.
        _ => Profile::Dup,
    }
}

/// Stripes of a chunk that lie on one device.
fn stripes_on_each(profile: Profile) -> usize {
    if profile == Profile::Dup { 2 } else { 1 }
}

/// What chunks can have of a device.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    pub(crate) device: DeviceId,
    /// Unused stretches, as (first byte, bytes).
    pub(crate) holes: Vec<(Physical, u64)>,
}

impl Room {
    /// Bytes in stretches that are long enough for a stripe.
    fn bytes(&self) -> u64 {
        self.holes.iter().map(|h| h.1).filter(|len| *len >= MIN_STRIPE).sum()
    }

    /// Places for `count` stripes of `len` bytes.
    fn places(&self, len: u64, count: usize) -> Option<SmallVec<[Physical; 2]>> {
        let mut places = SmallVec::new();
        for (at, room) in &self.holes {
            let mut used = 0;
            while places.len() < count && room - used >= len {
                places.push(at.plus(used));
                used += len;
            }
        }
        (places.len() == count).then_some(places)
    }

    /// The longest that `count` stripes can be, up to `most` bytes. 0 if that is too short.
    fn longest(&self, count: usize, most: u64) -> u64 {
        // The answer is `most`, or a hole, or an equal part of one.
        let parts = |hole: u64| {
            (1..=count as u64).map(move |n| (hole / n).min(most) / STRIPE_LEN * STRIPE_LEN)
        };
        let lengths = self.holes.iter().flat_map(|hole| parts(hole.1));
        let mut lengths: Vec<u64> = lengths.filter(|len| *len >= MIN_STRIPE).collect();
        lengths.sort_unstable_by_key(|len| Reverse(*len));
        lengths.into_iter().find(|len| self.places(*len, count).is_some()).unwrap_or(0)
    }
}

/// Unused stretches of a device of `size` bytes, as (first byte, bytes): whole stripe units, none
/// in the reserved first MiB. `taken` is what chunks take, ascending.
#[must_use]
pub(crate) fn device_holes(taken: &[(Physical, u64)], size: u64) -> Vec<(Physical, u64)> {
    let whole_stripes = |(at, len): (Physical, u64)| {
        let from = at.0.next_multiple_of(STRIPE_LEN);
        let len = at.plus(len).0.saturating_sub(from) / STRIPE_LEN * STRIPE_LEN;
        (len > 0).then_some((Physical(from), len))
    };
    device_gaps(taken, size).into_iter().filter_map(whole_stripes).collect()
}

/// What lies between device extents, to the byte.
#[must_use]
pub(crate) fn device_gaps(taken: &[(Physical, u64)], size: u64) -> Vec<(Physical, u64)> {
    let mut gaps = Vec::new();
    let mut at = DEVICE_RESERVED;
    for (start, len) in taken.iter().copied().chain([(Physical(size), 0)]) {
        let to = start.0.min(size);
        if at < to {
            gaps.push((Physical(at), to - at));
        }
        at = at.max(start.0.saturating_add(len));
    }
    gaps
}

/// Where a new chunk goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkPlan {
    /// Bytes of the chunk.
    pub(crate) len: u64,
    /// Bytes of each stripe.
    pub(crate) stripe_len: u64,
    /// Where each stripe begins.
    pub(crate) stripes: SmallVec<[Stripe; 2]>,
}

/// Plans a chunk: as long as [`Wanted`] says, or as the holes allow. `None` when too few devices
/// have room for even a short stripe.
#[must_use]
pub(crate) fn plan_chunk(wanted: &Wanted, rooms: &[Room]) -> Option<ChunkPlan> {
    let each = stripes_on_each(wanted.profile);
    let most = wanted.limits().1;
    let mut usable: Vec<(&Room, u64)> = rooms
        .iter()
        .map(|room| (room, room.longest(each, most)))
        .filter(|(_, longest)| *longest > 0)
        .collect();
    usable.sort_by_key(|(room, longest)| (Reverse(*longest), Reverse(room.bytes()), room.device));
    let devices = usize::from(wanted.devices_of(usable.len())?);
    let chosen = &usable[..devices];
    let count = u16::try_from(devices * each).ok()?;
    let stripe_len = wanted.stripe_len(count).min(chosen.last()?.1);
    let stripe_len = without_loss(wanted.profile, stripe_len, &usable, devices);
    let mut stripes = SmallVec::new();
    for (room, _) in chosen {
        let places = room.places(stripe_len, each)?;
        stripes.extend(places.into_iter().map(|at| Stripe { device: room.device, at }));
    }
    let len = stripe_len * u64::from(wanted.profile.data_stripes(count));
    Some(ChunkPlan { len, stripe_len, stripes })
}

/// How long the stripes of a mirrored chunk on the first `chosen` devices can be, up to `most`, so
/// that all of the room that is left can still be mirrored. If a chunk takes too much from the
/// others, the largest of the devices that it does not lie on has room that nothing can use.
fn without_loss(profile: Profile, most: u64, usable: &[(&Room, u64)], chosen: usize) -> u64 {
    if !matches!(profile, Profile::Raid1 | Profile::Raid1c3 | Profile::Raid1c4) {
        return most;
    }
    let room = |(n, (room, _)): (usize, &(&Room, u64)), len: u64| {
        room.bytes().saturating_sub(if n < chosen { len } else { 0 })
    };
    let in_all = |len: u64| {
        let left = usable.iter().enumerate().map(|device| room(device, len)).collect();
        divided(profile, left) + len
    };
    let all = in_all(0);
    if in_all(most) >= all {
        return most;
    }
    // What is lost grows with the length.
    let (mut fits, mut too_long) = (MIN_STRIPE / STRIPE_LEN, most / STRIPE_LEN);
    while too_long > fits + 1 {
        let between = fits.midpoint(too_long);
        let keeps_all = in_all(between * STRIPE_LEN) >= all;
        *(if keeps_all { &mut fits } else { &mut too_long }) = between;
    }
    // Short chunks cost more than a little room.
    (fits * STRIPE_LEN).max(most.min(SHORTENED))
}

/// Bytes that can still get into chunks like this, on these devices.
#[must_use]
pub(crate) fn capacity(wanted: &Wanted, rooms: &[Room]) -> u64 {
    let mut rooms = rooms.to_vec();
    let mut sum = 0u64;
    // Chunks of several devices leave ends of different lengths, so they are counted one by one.
    // What is left behind many chunks is large beside a single one.
    let is_exact = matches!(wanted.profile, Profile::Single | Profile::Dup);
    for _ in 0..if is_exact { 0 } else { COUNTED_CHUNKS } {
        let Some(plan) = plan_chunk(wanted, &rooms) else { return sum };
        sum = sum.saturating_add(plan.len);
        for stripe in &plan.stripes {
            take(&mut rooms, *stripe, plan.stripe_len);
        }
    }
    sum.saturating_add(divided(wanted.profile, rooms.iter().map(Room::bytes).collect()))
}

/// A stripe takes its place.
fn take(rooms: &mut [Room], stripe: Stripe, len: u64) {
    let Some(room) = rooms.iter_mut().find(|r| r.device == stripe.device) else { return };
    let inside = |h: &(Physical, u64)| h.0 <= stripe.at && stripe.at < h.0.plus(h.1);
    let Some(place) = room.holes.iter().position(inside) else { return };
    let (start, bytes) = room.holes.remove(place);
    let (before, behind) = (stripe.at.0 - start.0, stripe.at.plus(len));
    let rest = (behind, (bytes - before).saturating_sub(len));
    let parts = [(start, before), rest].into_iter().filter(|part| part.1 > 0);
    room.holes.splice(place..place, parts);
}

/// Bytes of data that get into chunks of a profile on devices with so many free bytes.
#[must_use]
pub(crate) fn divided(profile: Profile, mut free: Vec<u64>) -> u64 {
    free.retain(|bytes| *bytes > 0);
    free.sort_unstable();
    match profile {
        Profile::Single => free.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes)),
        Profile::Dup => free.iter().fold(0, |sum, bytes| sum.saturating_add(bytes / 2)),
        Profile::Raid1 | Profile::Raid1c3 | Profile::Raid1c4 => {
            mirrored(u64::from(profile.copies()), &free)
        }
        _ => striped(profile, &free),
    }
}

/// Each byte lies on `copies` devices, whichever have room. `free` is ascending.
fn mirrored(copies: u64, free: &[u64]) -> u64 {
    // A device holds each byte once, so of the largest no more counts than there is of the whole.
    let mut rest = free.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
    let mut left = copies;
    for largest in free.iter().rev() {
        if left == 0 {
            return 0;
        }
        let whole = rest / left;
        if *largest <= whole {
            return whole;
        }
        // This device has a copy of everything.
        rest = rest.saturating_sub(*largest);
        left -= 1;
    }
    0
}

/// Each chunk lies on all devices that have room. `free` is ascending.
fn striped(profile: Profile, free: &[u64]) -> u64 {
    let (mut sum, mut below) = (0u64, 0);
    for (i, bytes) in free.iter().enumerate() {
        let there = u16::try_from(free.len() - i).unwrap_or(u16::MAX).min(MAX_STRIPES);
        let stripes = there - there % profile.sub_stripes();
        if stripes < profile.min_devices() {
            break;
        }
        let layer = (bytes - below).saturating_mul(profile.data_stripes(stripes).into());
        sum = layer.saturating_add(sum);
        below = *bytes;
    }
    sum
}

/// A chunk as the map wants it.
pub(crate) fn mapped(start: Logical, chunk: &Chunk) -> MappedChunk {
    MappedChunk {
        start,
        length: chunk.length,
        kind: chunk.flags.bits(),
        stripes: chunk.stripes.iter().map(|s| Stripe { device: s.devid, at: s.offset }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn wanted(kind: SpaceKind, profile: Profile, total: u64) -> Wanted {
        Wanted { kind, profile, total, most: None }
    }

    /// Devices 1, 2, … with one hole each.
    fn rooms(bytes: &[u64]) -> Vec<Room> {
        let room = |(i, bytes): (usize, &u64)| Room {
            device: DeviceId(i as u64 + 1),
            holes: vec![(Physical(MIB), *bytes)],
        };
        bytes.iter().enumerate().map(room).collect()
    }

    fn one_device(taken: &[(Physical, u64)], size: u64) -> [Room; 1] {
        [Room { device: DeviceId(1), holes: device_holes(taken, size) }]
    }

    fn devices(plan: &ChunkPlan) -> Vec<u64> {
        plan.stripes.iter().map(|s| s.device.0).collect()
    }

    #[test]
    fn sizes_are_those_of_linux() {
        let one = |kind, total| wanted(kind, Profile::Single, total).stripe_len(1);
        assert_eq!(one(SpaceKind::Data, GIB), 112 * MIB);
        assert_eq!(one(SpaceKind::Metadata, GIB), 112 * MIB);
        assert_eq!(one(SpaceKind::Metadata, 8 * GIB), 256 * MIB);
        assert_eq!(one(SpaceKind::Metadata, 60 * GIB), GIB);
        assert_eq!(one(SpaceKind::Data, 1 << 45), GIB);
        assert_eq!(one(SpaceKind::System, GIB), 32 * MIB);
        assert_eq!(one(SpaceKind::System, 128 * MIB), 16 * MIB);
    }

    #[test]
    fn a_chunk_has_as_much_as_is_wanted() {
        let of = |profile, stripes, most| {
            Wanted { most: Some(most), ..wanted(SpaceKind::Data, profile, GIB) }.stripe_len(stripes)
        };
        assert_eq!(of(Profile::Single, 1, 61 * MIB + 1), 62 * MIB);
        assert_eq!(of(Profile::Single, 1, 0), MIB);
        assert_eq!(of(Profile::Single, 1, GIB), GIB);
        assert_eq!(of(Profile::Single, 1, 2 * GIB), GIB);
        assert_eq!(of(Profile::Raid0, 4, 61 * MIB), 16 * MIB);
    }

    #[test]
    fn holes_skip_the_first_mib_and_lie_on_stripes() {
        let taken = [(Physical(2 * MIB + 4096), 4096), (Physical(8 * MIB), MIB)];
        assert_eq!(
            device_holes(&taken, 10 * MIB + 4096),
            [
                (Physical(MIB), MIB),
                (Physical(2 * MIB + 65536), 6 * MIB - 65536),
                (Physical(9 * MIB), MIB)
            ]
        );
        assert_eq!(
            device_holes(&[(Physical(u64::MAX), u64::MAX)], 2 * MIB),
            [(Physical(MIB), MIB)]
        );
        assert_eq!(device_holes(&[], 4096), []);
    }

    #[test]
    fn plans_shrink_to_what_is_there() {
        let size = GIB;
        let dup = wanted(SpaceKind::Metadata, Profile::Dup, size);
        let single = wanted(SpaceKind::Data, Profile::Single, size);
        let at = |plan: &ChunkPlan| plan.stripes.iter().map(|s| s.at).collect::<Vec<_>>();
        let plan = plan_chunk(&dup, &one_device(&[], size)).unwrap();
        assert_eq!((plan.len, plan.stripe_len), (112 * MIB, 112 * MIB));
        assert_eq!(at(&plan), [Physical(MIB), Physical(113 * MIB)]);
        // Holes of 20 and 30 MiB: the copies fit with 20 each, one of them alone could have 30.
        let taken = [(Physical(21 * MIB), 100 * MIB), (Physical(151 * MIB), size)];
        let plan = plan_chunk(&dup, &one_device(&taken, size)).unwrap();
        assert_eq!((plan.len, plan.stripes.len()), (20 * MIB, 2));
        let plan = plan_chunk(&single, &one_device(&taken, size)).unwrap();
        assert_eq!((plan.len, at(&plan)), (30 * MIB, vec![Physical(121 * MIB)]));
        // One hole, two copies.
        let taken = [(Physical(MIB), 500 * MIB), (Physical(531 * MIB), size)];
        let plan = plan_chunk(&dup, &one_device(&taken, size)).unwrap();
        assert_eq!((plan.len, at(&plan)[1].0 - at(&plan)[0].0), (15 * MIB, 15 * MIB));
        let taken = [(Physical(MIB + MIB / 2), size)];
        assert_eq!(plan_chunk(&single, &one_device(&taken, size)), None);
    }

    #[test]
    fn the_roomiest_devices_come_first() {
        let plan = |profile, kind, free: &[u64]| {
            plan_chunk(&wanted(kind, profile, free.iter().sum()), &rooms(free))
        };
        let raid1 =
            plan(Profile::Raid1, SpaceKind::Metadata, &[3 * GIB, 9 * GIB, 5 * GIB]).unwrap();
        assert_eq!((devices(&raid1), raid1.len), (vec![2, 3], 256 * MIB));
        let raid0 = plan(Profile::Raid0, SpaceKind::Data, &[8 * GIB, 100 * MIB, 8 * GIB]).unwrap();
        // As long as the shortest: all that have room take part.
        assert_eq!((devices(&raid0), raid0.stripe_len), (vec![1, 3, 2], 100 * MIB));
        assert_eq!(raid0.len, 300 * MIB);
        let raid10 = plan(Profile::Raid10, SpaceKind::Data, &[40 * GIB; 5]).unwrap();
        assert_eq!((devices(&raid10), raid10.len), (vec![1, 2, 3, 4], 2 * GIB));
        let raid6 = plan(Profile::Raid6, SpaceKind::Data, &[40 * GIB; 5]).unwrap();
        assert_eq!((raid6.stripes.len(), raid6.stripe_len, raid6.len), (5, GIB, 3 * GIB));
        assert_eq!(plan(Profile::Raid1c3, SpaceKind::Data, &[GIB, GIB]), None);
        assert_eq!(plan(Profile::Raid1, SpaceKind::Data, &[GIB, MIB / 2]), None);
        assert_eq!(plan(Profile::Raid6, SpaceKind::System, &[GIB; 64]).unwrap().stripes.len(), 26);
        assert_eq!(plan(Profile::Raid5, SpaceKind::Data, &[GIB; 200]).unwrap().stripes.len(), 120);
    }

    #[test]
    fn new_chunks_do_without_devices() {
        use Profile::{Dup, Raid0, Raid1, Raid1c3, Raid1c4, Raid5, Raid6, Raid10, Single};
        let of = |kind, there: &[Profile], devices| {
            let types = type_of(kind);
            let flags = new_chunks(kind, there.iter().map(|p| types | p.flag()), None, devices);
            assert!(flags.contains(types));
            flags.profile().unwrap()
        };
        let (data, metadata) = (SpaceKind::Data, SpaceKind::Metadata);
        assert_eq!(of(data, &[Raid1], 2), Raid1);
        assert_eq!(of(data, &[Raid1], 1), Single);
        assert_eq!(of(metadata, &[Raid1], 1), Dup);
        assert_eq!(of(SpaceKind::System, &[Raid10], 1), Dup);
        // Those that were made meanwhile do not count once the device is back.
        assert_eq!(of(data, &[Raid1, Single], 2), Raid1);
        assert_eq!(of(metadata, &[Raid1, Dup], 3), Raid1);
        assert_eq!(of(data, &[Raid1c4], 3), Raid1c3);
        assert_eq!(of(data, &[Raid1c3], 2), Raid1);
        assert_eq!(of(metadata, &[Raid6], 3), Raid6);
        assert_eq!(of(metadata, &[Raid6], 2), Raid1);
        assert_eq!(of(data, &[Raid5], 1), Single);
        assert_eq!(of(data, &[Raid0], 1), Raid0);
        assert_eq!(of(data, &[], 1), Single);
        assert_eq!(of(data, &[Raid1], 0), Raid1);
        let mixed = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
        let both = || std::iter::once(mixed | BlockGroupFlags::RAID1);
        let flags = new_chunks(data, both(), None, 1);
        assert_eq!(flags, mixed | BlockGroupFlags::DUP);
        let flags = new_chunks(data, both(), Some(Raid0), 1);
        assert_eq!(flags, mixed | BlockGroupFlags::RAID0);
        // A conversion cannot make devices.
        let flags = new_chunks(data, both(), Some(Raid1c3), 2);
        assert_eq!(flags, mixed | BlockGroupFlags::RAID1);
    }

    #[test]
    fn capacities_by_hand() {
        let of = |profile, free: &[u64]| divided(profile, in_mib(free)) / MIB;
        assert_eq!(of(Profile::Single, &[10, 20, 30]), 60);
        assert_eq!(of(Profile::Dup, &[10, 20]), 15);
        assert_eq!(of(Profile::Raid1, &[10, 20, 30]), 30);
        assert_eq!(of(Profile::Raid1, &[10, 20, 70]), 30);
        assert_eq!(of(Profile::Raid1, &[70]), 0);
        assert_eq!(of(Profile::Raid1c3, &[10, 20, 30]), 10);
        assert_eq!(of(Profile::Raid1c4, &[10, 10, 10, 10, 40]), 13);
        assert_eq!(of(Profile::Raid0, &[10, 20, 30]), 60);
        assert_eq!(of(Profile::Raid10, &[10, 20, 30, 40]), 20 + 10 + 10);
        assert_eq!(of(Profile::Raid5, &[10, 20, 30]), 20 + 10);
        assert_eq!(of(Profile::Raid6, &[10, 20, 30, 40]), 20 + 10);
    }

    /// Chunks of 160 MiB would leave 137 MiB of the first device without a partner.
    #[test]
    fn mirrors_leave_nothing_without_a_partner() {
        let free = in_mib(&[499, 341, 341]);
        let wanted = wanted(SpaceKind::Data, Profile::Raid1, 1500 * MIB);
        let mut rooms = rooms(&free);
        assert_eq!(capacity(&wanted, &rooms) / MIB, 590);
        let mut made = Vec::new();
        while let Some(plan) = plan_chunk(&wanted, &rooms) {
            plan.stripes.iter().for_each(|s| take(&mut rooms, *s, plan.stripe_len));
            made.push(plan.len / MIB);
        }
        assert_eq!(made[..2], [160, 160], "as long as on Linux while that costs nothing");
        assert!(made.iter().sum::<u64>() >= 588 && made.len() <= 6, "{made:?}");
    }

    fn in_mib(sizes: &[u64]) -> Vec<u64> {
        sizes.iter().map(|n| n * MIB).collect()
    }

    proptest! {
        /// One chunk after the other: each is what its profile wants, in space that was free, and
        /// together they hold what was foretold, but for a little that is left in ends.
        #[test]
        fn chunks_fill_the_devices(
            sizes in prop::collection::vec(4u64..600, 1..7),
            profile in prop::sample::select(&Profile::ALL[..]),
        ) {
            let mut rooms = rooms(&in_mib(&sizes));
            let total = sizes.iter().sum::<u64>() * MIB;
            let wanted = wanted(SpaceKind::Data, profile, total);
            let foretold = capacity(&wanted, &rooms);
            let mut made = 0;
            while let Some(plan) = plan_chunk(&wanted, &rooms) {
                let stripes = u16::try_from(plan.stripes.len()).unwrap();
                prop_assert!(profile.fits_stripes(stripes));
                prop_assert_eq!(profile.stripe_bytes(plan.len, stripes), plan.stripe_len);
                let on: BTreeSet<_> = plan.stripes.iter().map(|s| s.device).collect();
                prop_assert_eq!(on.len() * stripes_on_each(profile), plan.stripes.len());
                for stripe in &plan.stripes {
                    take(&mut rooms, *stripe, plan.stripe_len);
                }
                made += plan.len;
            }
            // Nothing is left that a mirror could have, but for what shorter chunks would cost.
            let mirrors = matches!(profile, Profile::Raid1 | Profile::Raid1c3 | Profile::Raid1c4);
            let best = divided(profile, in_mib(&sizes));
            prop_assert!(!mirrors || made + 16 * MIB >= best, "{made} of {best}");
            // An end that is too short for two stripes counts, where a device has both.
            let ends = if profile == Profile::Dup { sizes.len() as u64 * MIB } else { 0 };
            prop_assert!(made + ends >= foretold, "{made} of {foretold}");
        }
    }
}
