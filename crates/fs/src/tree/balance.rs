//! How items are divided between neighbouring leaves. This is arithmetic on what a leaf holds;
//! nothing is changed here.
//!
//! Two aims decide. Keys that grow at the end of a tree leave full leaves behind. Everywhere else
//! leaves get about the same room, so that the next item finds some on either side.

use crate::tree::image::{leaf_bytes, leaf_room};
use larder_format::node::NodeView;

/// How a full leaf is divided for one more item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// In two, before the item `at`.
    Two {
        /// The first item of the right half.
        at: usize,
        /// Does the new item belong to the left half?
        new_left: bool,
    },
    /// In three: the new item is so large that it gets a leaf of its own between two halves.
    Three,
}

/// Where to cut a leaf so that an item of `size` bytes at `slot` fits on one side, as evenly as
/// possible. At the end of the leaf, keys are probably growing, so the left leaf stays full.
pub(super) fn cut_for(leaf: NodeView<'_>, slot: usize, size: usize) -> Cut {
    let n = leaf.nritems();
    if slot == n {
        return Cut::Two { at: n, new_left: false };
    }
    let (room, total) = (leaf_room(leaf), leaf_bytes(leaf, 0, n));
    let skew = |at: usize, new_left: bool| {
        let on_its_side = if new_left { slot <= at } else { slot >= at };
        let left = leaf_bytes(leaf, 0, at) + if new_left { size } else { 0 };
        let right = total + size - left;
        let fits = on_its_side && (1..=room).contains(&left) && (1..=room).contains(&right);
        fits.then(|| left.abs_diff(right))
    };
    (0..=n)
        .flat_map(|at| [(at, true), (at, false)])
        .filter_map(|(at, new_left)| Some((skew(at, new_left)?, Cut::Two { at, new_left })))
        .min_by_key(|(skew, _)| *skew)
        .map_or(Cut::Three, |(_, cut)| cut)
}

/// How many of a leaf's first items go to its left neighbour, which has `room`, so that `lacking`
/// bytes become free before the item at `slot`. As many as fit: a tree that grows at its end leaves
/// full leaves behind.
pub(super) fn for_the_left(
    leaf: NodeView<'_>,
    slot: usize,
    lacking: usize,
    room: usize,
) -> Option<usize> {
    if room < lacking {
        return None;
    }
    let count = (0..=slot).rev().find(|n| leaf_bytes(leaf, 0, *n) <= room).unwrap_or(0);
    let helps = count > 0 && count < leaf.nritems() && leaf_bytes(leaf, 0, count) >= lacking;
    helps.then_some(count)
}

/// From which item on a leaf's items go to its right neighbour, which has `room`, so that `lacking`
/// bytes become free behind the item at `slot`. Both leaves get the same room, if that is enough.
pub(super) fn for_the_right(
    leaf: NodeView<'_>,
    slot: usize,
    lacking: usize,
    room: usize,
) -> Option<usize> {
    if room < lacking {
        return None;
    }
    let n = leaf.nritems();
    let wanted = lacking.max((room + lacking) / 2);
    (slot.max(1)..n)
        .rev()
        .filter(|from| (lacking..=room).contains(&leaf_bytes(leaf, *from, n)))
        .min_by_key(|from| leaf_bytes(leaf, *from, n).abs_diff(wanted))
}
