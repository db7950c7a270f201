//! How large new chunks are and where on a device their stripes go.
//!
//! Sizes are policy, not format. They are those of Linux, so that an image that Larder fills looks
//! like any other. Everything here is arithmetic on what is taken; nothing is allocated.

use crate::space::SpaceKind;
use larder_format::items::Chunk;
use larder_format::{DEVICE_RESERVED, Logical, Physical, STRIPE_LEN};
use larder_volume::{MappedChunk, Stripe};
use smallvec::SmallVec;

/// Sizes that a tenth of the file system is rounded up to.
const STEP: u64 = 16 << 20;
/// Shortest stripe worth having.
pub(crate) const MIN_STRIPE: u64 = 1 << 20;

/// Bytes (logical) that a new chunk should have, on a file system of `total` bytes.
///
/// At most about a tenth of it (rounded up to 16 MiB: 112 MiB of 1 GiB). So small images do not run
/// out of device space with one half-empty chunk for each type.
#[must_use]
pub(crate) fn chunk_size_for(kind: SpaceKind, total: u64) -> u64 {
    let most = match kind {
        SpaceKind::Data => 1 << 30,
        SpaceKind::Metadata if total > 50 << 30 => 1 << 30,
        SpaceKind::Metadata => 256 << 20,
        SpaceKind::System => 32 << 20,
    };
    most.min((total / 10).next_multiple_of(STEP))
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

/// Where a new chunk goes: the length of each stripe and their places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkPlan {
    /// Bytes of each stripe; with one or two copies also of the chunk.
    pub(crate) len: u64,
    /// First byte of each copy.
    pub(crate) stripes: SmallVec<[Physical; 2]>,
}

/// Plans a chunk with `copies` copies on one device: as long as [`chunk_size_for`] says, or as the
/// holes allow. `None` when not even a short one fits.
#[must_use]
pub(crate) fn plan_chunk(
    kind: SpaceKind,
    copies: usize,
    total: u64,
    taken: &[(Physical, u64)],
    device_size: u64,
) -> Option<ChunkPlan> {
    let holes = device_holes(taken, device_size);
    let place = |len: u64| {
        let mut stripes = SmallVec::new();
        for (at, room) in &holes {
            let mut used = 0;
            while stripes.len() < copies && room - used >= len {
                stripes.push(at.plus(used));
                used += len;
            }
        }
        (stripes.len() == copies).then_some(ChunkPlan { len, stripes })
    };
    let want = chunk_size_for(kind, total);
    if let Some(plan) = place(want) {
        return Some(plan);
    }
    // Every answer to "how long at most" is a hole or an equal part of one.
    let most =
        holes.iter().flat_map(|h| (1..=copies as u64).map(|n| h.1 / n / STRIPE_LEN * STRIPE_LEN));
    let mut sizes: Vec<u64> = most.filter(|len| (MIN_STRIPE..want).contains(len)).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.into_iter().find_map(place)
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

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn sizes_are_those_of_linux() {
        assert_eq!(chunk_size_for(SpaceKind::Data, GIB), 112 * MIB);
        assert_eq!(chunk_size_for(SpaceKind::Metadata, GIB), 112 * MIB);
        assert_eq!(chunk_size_for(SpaceKind::Metadata, 8 * GIB), 256 * MIB);
        assert_eq!(chunk_size_for(SpaceKind::Metadata, 60 * GIB), GIB);
        assert_eq!(chunk_size_for(SpaceKind::Data, 1 << 45), GIB);
        assert_eq!(chunk_size_for(SpaceKind::System, GIB), 32 * MIB);
        assert_eq!(chunk_size_for(SpaceKind::System, 128 * MIB), 16 * MIB);
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
        let plan = plan_chunk(SpaceKind::Metadata, 2, size, &[], size).unwrap();
        assert_eq!(
            (plan.len, &plan.stripes[..]),
            (112 * MIB, &[Physical(MIB), Physical(113 * MIB)][..])
        );
        // Holes of 20 and 30 MiB: the copies fit with 20 each, one of them alone could have 30.
        let taken = [(Physical(21 * MIB), 100 * MIB), (Physical(151 * MIB), size)];
        let plan = plan_chunk(SpaceKind::Metadata, 2, size, &taken, size).unwrap();
        assert_eq!((plan.len, plan.stripes.len()), (20 * MIB, 2));
        let plan = plan_chunk(SpaceKind::Data, 1, size, &taken, size).unwrap();
        assert_eq!((plan.len, plan.stripes[0]), (30 * MIB, Physical(121 * MIB)));
        // One hole, two copies.
        let taken = [(Physical(MIB), 500 * MIB), (Physical(531 * MIB), size)];
        let plan = plan_chunk(SpaceKind::Metadata, 2, size, &taken, size).unwrap();
        assert_eq!((plan.len, plan.stripes[1].0 - plan.stripes[0].0), (15 * MIB, 15 * MIB));
        assert_eq!(
            plan_chunk(SpaceKind::Data, 1, size, &[(Physical(MIB + MIB / 2), size)], size),
            None
        );
    }
}
