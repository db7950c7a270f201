//! How the bytes of a chunk lie on its stripes.
//!
//! A chunk without striping (single, DUP, RAID1 and its like) is one element as long as the chunk,
//! and every stripe holds it. A striped chunk is cut into **elements** of 64 KiB. Elements of
//! different data side by side are a **row**, and each has a **column** in it. A row takes the same
//! 64 KiB of every stripe:
//!
//! | profile | the element of row `r` and column `c`, of `n` stripes |
//! |---|---|
//! | RAID0 | stripe `c` |
//! | RAID10 | stripes `2c` and `2c + 1` |
//! | RAID5, RAID6 | stripe `(c + r) mod n`; P follows the last column, and Q follows P |
//!
//! Everything here is arithmetic on offsets from the beginning of the chunk and of its stripes. The
//! map turns them into addresses.

use crate::parity::By;
use larder_format::STRIPE_LEN;
use larder_format::items::Profile;
use std::ops::Range;

/// The shape of a chunk. All numbers are small; they are `u64` because they meet offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of the chunk.
    length: u64,
    /// Stripes.
    stripes: u64,
    /// Columns of a row.
    columns: u64,
    /// Stripes that hold each element.
    mirrors: u64,
    /// Elements of parity in a row.
    parity: u64,
}

/// Where a byte of a chunk lies: on which stripes, and how far from their beginnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    /// The first of the stripes; the others follow it.
    pub(super) first: usize,
    /// Bytes from the beginning of each.
    pub(super) offset: u64,
    pub(super) row: u64,
    pub(super) column: usize,
}

/// A way to get at a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As it is stored, in the mirror of this number.
    Direct(usize),
    /// From the rest of its row.
    Rebuilt(By),
}

impl Layout {
    /// The layout of a chunk with so many stripes, which its profile allows.
    pub(super) fn new(profile: Profile, stripes: usize, length: u64) -> Self {
        let stripes = u16::try_from(stripes).unwrap_or(u16::MAX);
        Self {
            length,
            stripes: stripes.into(),
            columns: profile.data_stripes(stripes).into(),
            mirrors: profile.copies().into(),
            parity: profile.parity().into(),
        }
    }

    fn is_striped(self) -> bool {
        self.columns > 1 || self.parity > 0
    }

    /// The length of a chunk of this layout is a multiple of so many bytes.
    pub(super) fn unit(self) -> Option<u64> {
        self.is_striped().then_some(self.columns * STRIPE_LEN)
    }

    /// Is there parity?
    pub(crate) fn has_parity(self) -> bool {
        self.parity > 0
    }

    /// Rows of the chunk; a chunk without striping is one.
    pub(super) fn rows(self) -> u64 {
        if self.is_striped() { self.length / self.columns / STRIPE_LEN } else { 1 }
    }

    /// So many rows until the stripes of a column are the same again.
    pub(super) fn period(self) -> u64 {
        if self.parity > 0 { self.stripes } else { 1 }
    }

    /// Columns of a row.
    pub(super) fn columns(self) -> usize {
        as_index(self.columns)
    }

    /// Mirrors of each element.
    pub(super) fn mirrors(self) -> usize {
        as_index(self.mirrors)
    }

    /// Number of ways to read a byte.
    pub(super) fn ways(self) -> usize {
        let rebuilt = match self.parity {
            0 => 0,
            1 => 1,
            // By P, by Q, and by both without any one of the other columns.
            _ => 1 + self.columns,
        };
        as_index(self.mirrors + rebuilt)
    }

    /// So many of the first ways, together, read everything that is stored of a byte and its
    /// parity.
    pub(super) fn stored(self) -> usize {
        as_index(self.mirrors + self.parity)
    }

    /// The way of a number below [`Layout::ways`], for a byte in a column.
    pub(super) fn way(self, number: usize, column: usize) -> Way {
        match number.checked_sub(self.mirrors()) {
            None => Way::Direct(number),
            Some(0) => Way::Rebuilt(By::P),
            Some(1) => Way::Rebuilt(By::Q),
            Some(n) if n - 2 < column => Way::Rebuilt(By::Without(n - 2)),
            Some(n) => Way::Rebuilt(By::Without(n - 1)),
        }
    }

    /// Where the byte at an offset of the chunk lies.
    pub(super) fn spot(self, into: u64) -> Spot {
        if !self.is_striped() {
            return Spot { first: 0, offset: into, row: 0, column: 0 };
        }
        let (element, within) = (into / STRIPE_LEN, into % STRIPE_LEN);
        let (row, column) = (element / self.columns, as_index(element % self.columns));
        let first = self.stripe_of(row, column);
        Spot { first, offset: row * STRIPE_LEN + within, row, column }
    }

    /// Bytes from an offset on that lie behind each other: to the end of the element.
    pub(super) fn run(self, into: u64) -> u64 {
        if self.is_striped() { STRIPE_LEN - into % STRIPE_LEN } else { self.length - into }
    }

    /// The first stripe that holds a column of a row. Parity counts as further columns.
    pub(super) fn stripe_of(self, row: u64, column: usize) -> usize {
        let column = column as u64;
        let stripe = if self.parity > 0 {
            (column + row % self.stripes) % self.stripes
        } else {
            column * self.mirrors
        };
        as_index(stripe)
    }

    /// The stripe of P (0) or Q (1) of a row.
    pub(super) fn parity_stripe(self, row: u64, which: usize) -> usize {
        self.stripe_of(row, self.columns() + which)
    }

    /// Number of parity elements in a row.
    pub(super) fn parity(self) -> usize {
        as_index(self.parity)
    }

    /// What a stripe holds at an offset from its beginning, as an offset of the chunk. `None` where
    /// that is parity.
    pub(super) fn logical(self, stripe: usize, offset: u64) -> Option<u64> {
        if !self.is_striped() {
            return Some(offset);
        }
        let (row, within) = (offset / STRIPE_LEN, offset % STRIPE_LEN);
        let stripe = stripe as u64;
        let column = if self.parity > 0 {
            (stripe + self.stripes - row % self.stripes) % self.stripes
        } else {
            stripe / self.mirrors
        };
        let element = row * self.columns + column;
        (column < self.columns).then_some(element * STRIPE_LEN + within)
    }

    /// What may not be used of the chunk so that a range of a stripe is free, as ranges of the
    /// chunk. A row with parity is left out as a whole, since its parity covers all of it.
    pub(super) fn touched(self, stripe: usize, range: Range<u64>) -> Vec<Range<u64>> {
        if !self.is_striped() {
            return vec![range];
        }
        let rows = range.start / STRIPE_LEN..range.end.div_ceil(STRIPE_LEN);
        let in_row = |row: u64| {
            let whole = row * STRIPE_LEN..(row + 1) * STRIPE_LEN;
            if self.parity > 0 {
                let (from, to) = (row * self.columns, (row + 1) * self.columns);
                return from * STRIPE_LEN..to * STRIPE_LEN;
            }
            let from = range.start.max(whole.start);
            let len = range.end.min(whole.end) - from;
            let at = self.logical(stripe, from).unwrap_or_default();
            at..at + len
        };
        rows.map(in_row).collect()
    }
}

/// Numbers of stripes, of which a chunk has at most 65,535.
fn as_index(n: u64) -> usize {
    usize::try_from(n).expect("a number of stripes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const K64: u64 = STRIPE_LEN;

    fn layouts() -> impl Strategy<Value = (Profile, Layout)> {
        let numbers = |p: Profile| (1..9u16).filter(move |n| p.fits_stripes(*n)).collect();
        prop::sample::select(&Profile::ALL[..]).prop_flat_map(move |p| {
            let numbers: Vec<u16> = numbers(p);
            let layout = (prop::sample::select(numbers), 1u64..12).prop_map(move |(n, rows)| {
                Layout::new(p, n.into(), rows * u64::from(p.data_stripes(n)) * K64)
            });
            (Just(p), layout)
        })
    }

    #[test]
    fn each_profile_by_hand() {
        let at = |p, n, element: u64| {
            let spot = Layout::new(p, n, 1 << 30).spot(element * K64 + 5);
            (spot.first, spot.offset)
        };
        assert_eq!(at(Profile::Dup, 2, 9), (0, 9 * K64 + 5));
        assert_eq!(at(Profile::Raid0, 3, 7), (1, 2 * K64 + 5));
        assert_eq!(at(Profile::Raid10, 4, 3), (2, K64 + 5));
        assert_eq!(at(Profile::Raid10, 2, 3), (0, 3 * K64 + 5));
        // Row 1 of four stripes, three columns: shifted by one.
        assert_eq!(at(Profile::Raid5, 4, 3), (1, K64 + 5));
        assert_eq!(at(Profile::Raid5, 4, 5), (3, K64 + 5));
        let raid5 = Layout::new(Profile::Raid5, 4, 1 << 30);
        assert_eq!([0, 1, 2, 4].map(|row| raid5.parity_stripe(row, 0)), [3, 0, 1, 3]);
        let raid6 = Layout::new(Profile::Raid6, 4, 1 << 30);
        assert_eq!([0, 1, 2].map(|row| raid6.parity_stripe(row, 0)), [2, 3, 0]);
        assert_eq!([0, 1, 2].map(|row| raid6.parity_stripe(row, 1)), [3, 0, 1]);
        assert_eq!(raid6.spot(3 * K64).first, 2);
        assert_eq!((raid5.ways(), raid6.ways()), (2, 4));
        assert_eq!((raid5.stored(), raid6.stored()), (2, 3));
    }

    #[test]
    fn a_superblock_takes_its_element_or_its_row() {
        let touched = |p, n, s, range| -> Vec<(u64, u64)> {
            let ranges = Layout::new(p, n, 1 << 30).touched(s, range);
            ranges.into_iter().map(|r| (r.start, r.end)).collect()
        };
        let (from, to) = (2 * K64, 3 * K64);
        assert_eq!(touched(Profile::Raid1, 2, 1, from..to), [(from, to)]);
        assert_eq!(touched(Profile::Raid0, 3, 1, from..to), [(7 * K64, 8 * K64)]);
        assert_eq!(touched(Profile::Raid10, 4, 3, from..to), [(5 * K64, 6 * K64)]);
        assert_eq!(touched(Profile::Raid5, 3, 0, from..to), [(4 * K64, 6 * K64)]);
        let part = touched(Profile::Raid0, 2, 0, K64 / 2..K64 + K64 / 2);
        assert_eq!(part, [(K64 / 2, K64), (2 * K64, 2 * K64 + K64 / 2)]);
    }

    #[test]
    fn ways_of_raid6_leave_out_each_other_column() {
        let layout = Layout::new(Profile::Raid6, 6, 1 << 30);
        for column in 0..4 {
            let ways: Vec<Way> = (0..layout.ways()).map(|n| layout.way(n, column)).collect();
            assert_eq!(ways[..3], [Way::Direct(0), Way::Rebuilt(By::P), Way::Rebuilt(By::Q)]);
            let without = |c| Way::Rebuilt(By::Without(c));
            let others: Vec<Way> = (0..4).filter(|c| *c != column).map(without).collect();
            assert_eq!(ways[3..], others);
        }
    }

    proptest! {
        /// Every byte of the chunk lies in places of its own, the places of one byte are on
        /// different stripes, and with parity they fill the stripes.
        #[test]
        fn stripes_are_tiled((profile, layout) in layouts()) {
            let (length, columns) = (layout.length, layout.columns);
            let rows = length / columns / K64;
            let mut taken = BTreeSet::new();
            for element in 0..length / K64 {
                let spot = layout.spot(element * K64);
                prop_assert_eq!(spot.row * columns + spot.column as u64,
                    if layout.is_striped() { element } else { 0 });
                for mirror in 0..layout.mirrors() {
                    let stripe = spot.first + mirror;
                    prop_assert!((stripe as u64) < layout.stripes);
                    prop_assert!(taken.insert((stripe, spot.offset)));
                    prop_assert_eq!(layout.logical(stripe, spot.offset), Some(element * K64));
                }
            }
            for row in 0..if layout.has_parity() { rows } else { 0 } {
                for which in 0..layout.parity() {
                    let place = (layout.parity_stripe(row, which), row * K64);
                    prop_assert!(taken.insert(place));
                    prop_assert_eq!(layout.logical(place.0, place.1), None);
                }
            }
            prop_assert_eq!(taken.len() as u64, rows * layout.stripes);
            let bytes = profile.stripe_bytes(length, layout.stripes as u16);
            prop_assert!(taken.iter().all(|(_, offset)| *offset < bytes));
        }

        /// A run ends with its element or the chunk, and its bytes lie behind each other.
        #[test]
        fn runs_are_contiguous((_, layout) in layouts(), into in 0u64..(1 << 20)) {
            let into = into % layout.length;
            let run = layout.run(into);
            prop_assert!(run >= 1 && into + run <= layout.length);
            let (first, last) = (layout.spot(into), layout.spot(into + run - 1));
            prop_assert_eq!((first.first, first.offset + run - 1), (last.first, last.offset));
        }
    }
}
