//! Which chunks a balance could free, and what it would have to move for that.
//!
//! A chunk is freed when all that it holds finds room in others of its type. The emptiest cost
//! least, so they come first, and as many are taken as the rest has room for. That is a wish with
//! filters of Linux (`usage` and `limit`), so Linux can go on with it.

use super::filters::{BalanceWish, Candidate, Filters, Span};
use super::groups;
use crate::engine::Core;
use crate::space::SpaceKind;
use larder_format::items::BlockGroupFlags;
use serde::{Deserialize, Serialize};

/// Chunks of one type that a balance could free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeing {
    /// Chunks.
    pub chunks: u64,
    /// Bytes that would be moved.
    pub moves: u64,
    /// Bytes of devices that would be free of chunks.
    pub frees: u64,
    /// More than so many percent are used of none of them.
    #[serde(skip)]
    percent: u32,
}

impl Freeing {
    fn filters(self) -> Option<Filters> {
        let chunks = u32::try_from(self.chunks).unwrap_or(u32::MAX);
        (chunks > 0).then(|| Filters {
            usage: Some(Span { from: 0, to: (self.percent + 1).min(100) }),
            limit: Some(Span { from: 0, to: chunks }),
            ..Filters::default()
        })
    }
}

/// What a balance could free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalancePlan {
    /// Chunks of data, or of data and metadata where these share them.
    pub data: Freeing,
    /// Chunks of metadata.
    pub metadata: Freeing,
}

impl BalancePlan {
    /// Bytes of devices that would be free of chunks.
    #[must_use]
    pub fn frees(&self) -> u64 {
        self.data.frees + self.metadata.frees
    }

    /// The balance that does it. `None` if nothing can be freed.
    #[must_use]
    pub fn wish(&self, mixed: bool) -> Option<BalanceWish> {
        let data = self.data.filters();
        let metadata = if mixed { data.clone() } else { self.metadata.filters() };
        (data.is_some() || metadata.is_some()).then(|| BalanceWish {
            data,
            metadata,
            ..BalanceWish::default()
        })
    }
}

/// Plans for a file system as it is.
pub(crate) fn plan(core: &Core) -> BalancePlan {
    let all = groups::all(core);
    let promised = |kind| core.space.accounts.figures(kind).reserved;
    let of = |kind, is_of_kind: &dyn Fn(&Candidate) -> bool| {
        let chunks: Vec<Candidate> = all.iter().filter(|c| is_of_kind(c)).cloned().collect();
        freeing(chunks, promised(kind))
    };
    let has = |c: &Candidate, flag| c.flags.contains(flag);
    let is_metadata =
        |c: &Candidate| has(c, BlockGroupFlags::METADATA) && !has(c, BlockGroupFlags::DATA);
    BalancePlan {
        data: of(SpaceKind::Data, &|c| has(c, BlockGroupFlags::DATA)),
        metadata: of(SpaceKind::Metadata, &is_metadata),
    }
}

/// Of chunks of one type, the emptiest, if it can be freed while so many bytes stay promised.
pub(super) fn emptiest(chunks: &[Candidate], promised: u64) -> Option<&Candidate> {
    let can_be_freed = freeing(chunks.to_vec(), promised).chunks > 0;
    chunks.iter().min_by_key(|c| (c.percent(), c.start)).filter(|_| can_be_freed)
}

/// Of chunks of one type, the emptiest that can be freed while so many bytes stay promised.
fn freeing(mut chunks: Vec<Candidate>, promised: u64) -> Freeing {
    chunks.sort_by_key(|c| (c.percent(), c.start));
    let free = |c: &Candidate| c.len.saturating_sub(c.used);
    let mut room = chunks.iter().map(free).sum::<u64>().saturating_sub(promised);
    let mut best = Freeing::default();
    let mut sum = Freeing::default();
    // The last one has to stay.
    for chunk in chunks.iter().rev().skip(1).rev().take_while(|c| c.percent() < 100) {
        room = room.saturating_sub(free(chunk));
        sum.chunks += 1;
        sum.moves += chunk.used;
        sum.frees += chunk.device_bytes();
        sum.percent = chunk.percent();
        // What is moved does not fit without gaps.
        if sum.moves + sum.moves / 8 > room {
            break;
        }
        best = sum;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{DeviceId, Logical, Physical};
    use larder_volume::Stripe;

    fn chunks(used: &[u64]) -> Vec<Candidate> {
        let chunk = |(n, used): (usize, &u64)| Candidate {
            start: Logical(n as u64 * 1000),
            len: 1000,
            used: *used,
            flags: BlockGroupFlags::DATA,
            stripes: vec![Stripe { device: DeviceId(1), at: Physical(0) }; 2],
            stripe_len: 1000,
        };
        used.iter().enumerate().map(chunk).collect()
    }

    fn freed(used: &[u64], promised: u64) -> (u64, u64) {
        let freeing = freeing(chunks(used), promised);
        assert_eq!(freeing.frees, freeing.chunks * 2000);
        (freeing.chunks, freeing.moves)
    }

    #[test]
    fn the_emptiest_are_freed_as_far_as_the_rest_has_room() {
        assert_eq!(freed(&[400, 400], 0), (1, 400));
        assert_eq!(freed(&[600, 600], 0), (0, 0));
        assert_eq!(freed(&[700, 100, 700, 700], 0), (1, 100));
        assert_eq!(freed(&[300, 200, 100, 100], 0), (3, 400));
        // What is promised needs its place.
        assert_eq!(freed(&[400, 400], 500), (0, 0));
        assert_eq!(freed(&[0], 0), (0, 0));
        assert_eq!(freed(&[], 0), (0, 0));
        assert_eq!(freed(&[1000, 1000, 0], 0), (1, 0));
    }

    #[test]
    fn the_wish_takes_exactly_these() {
        for used in [vec![300, 200, 100, 100], vec![10, 10, 990], vec![1000, 999, 0, 5]] {
            let all = chunks(&used);
            let data = freeing(all.clone(), 0);
            let plan = BalancePlan { data, ..BalancePlan::default() };
            let chosen = plan.wish(false).unwrap().choose(&all);
            assert_eq!(chosen.len() as u64, data.chunks, "{used:?}");
            assert_eq!(chosen.iter().map(|c| c.used).sum::<u64>(), data.moves);
        }
        assert_eq!(BalancePlan::default().wish(true), None);
    }
}
