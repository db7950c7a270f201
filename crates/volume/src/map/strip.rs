//! Chunks cut along their devices, for callers that read everything that is stored.
//!
//! A **strip** is the same range of every stripe of a chunk. What of the chunk lies in it is one
//! range of addresses, whatever the profile: a strip of a striped chunk is whole rows. So a caller
//! reads each device from front to back, and has the mirrors and the parity of what it read.

use super::layout::Layout;
use super::{MappedChunk, Stripe};
use larder_format::{Logical, STRIPE_LEN};
use std::ops::Range;

/// A range of every stripe of a chunk.
#[derive(Clone, Copy, Debug)]
pub struct Strip<'a> {
    chunk: &'a MappedChunk,
    layout: Layout,
    /// Where it begins in each stripe.
    from: u64,
    /// Its bytes in each stripe.
    len: u64,
}

/// Where the bytes of an address lie in a strip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The stripes that hold them as they are, by number.
    pub stripes: Range<usize>,
    /// How far from the beginning of the strip.
    pub offset: u64,
    /// So many bytes from there on lie behind each other, in all of these stripes.
    pub run: u64,
}

/// A row of a strip, of a chunk with parity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripRow {
    /// The stripe of each column.
    pub columns: Vec<usize>,
    /// The stripe of P, or those of P and Q.
    pub parity: Vec<usize>,
    /// Where it begins in the strip. It is as long as an element.
    pub offset: u64,
    /// The address of its first byte.
    pub start: Logical,
}

impl MappedChunk {
    /// The strip at about this range of the stripes. `None` behind their end.
    #[must_use]
    pub fn strip(&self, range: Range<u64>) -> Option<Strip<'_>> {
        let (layout, whole) = (self.layout(), self.stripe_bytes());
        let unit = if layout.unit().is_some() { STRIPE_LEN } else { super::SECTOR };
        let from = range.start - range.start % unit;
        let len = range.end.saturating_sub(from);
        let len = (len - len % unit).max(unit).min(whole.checked_sub(from)?);
        (len > 0).then_some(Strip { chunk: self, layout, from, len })
    }
}

impl<'a> Strip<'a> {
    /// Its bytes in each stripe.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: a strip without bytes is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the next one begins in each stripe.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.from + self.len
    }

    /// The chunk that it is of.
    #[must_use]
    pub fn chunk(&self) -> &'a MappedChunk {
        self.chunk
    }

    /// The addresses that lie in it.
    #[must_use]
    pub fn addresses(&self) -> Range<Logical> {
        let columns = if self.layout.unit().is_some() { self.layout.columns() as u64 } else { 1 };
        let start = self.chunk.start.plus(self.from * columns);
        start..start.plus(self.len * columns)
    }

    /// A place of a stripe, by its distance from the beginning of the strip.
    #[must_use]
    pub fn on_device(&self, stripe: usize, offset: u64) -> Stripe {
        let Stripe { device, at } = self.chunk.stripes[stripe];
        Stripe { device, at: at.plus(self.from + offset) }
    }

    /// Where an address lies that is in the strip.
    #[must_use]
    pub fn place(&self, at: Logical) -> Place {
        let into = at.0 - self.chunk.start.0;
        let spot = self.layout.spot(into);
        let offset = spot.offset - self.from;
        let run = self.layout.run(into).min(self.len - offset);
        Place { stripes: spot.first..spot.first + self.layout.mirrors(), offset, run }
    }

    /// The elements of a row with different data.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.layout.columns()
    }

    /// Is there parity?
    #[must_use]
    pub fn has_parity(&self) -> bool {
        self.layout.has_parity()
    }

    /// The rows of a strip with parity.
    pub fn rows(&self) -> impl Iterator<Item = StripRow> + '_ {
        let rows = if self.has_parity() { self.len / STRIPE_LEN } else { 0 };
        (0..rows).map(|n| {
            let row = self.from / STRIPE_LEN + n;
            let (columns, parity) = (self.layout.columns(), self.layout.parity());
            StripRow {
                columns: (0..columns).map(|c| self.layout.stripe_of(row, c)).collect(),
                parity: (0..parity).map(|p| self.layout.parity_stripe(row, p)).collect(),
                offset: n * STRIPE_LEN,
                start: self.chunk.start.plus(row * columns as u64 * STRIPE_LEN),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::items::Profile;
    use larder_format::{DeviceId, Physical};
    use proptest::prelude::*;

    fn chunks() -> impl Strategy<Value = MappedChunk> {
        (prop::sample::select(&Profile::ALL[..]), 2u16..7, 1u64..40).prop_filter_map(
            "stripes",
            |(profile, stripes, rows)| {
                let stripes = if profile == Profile::Single { 1 } else { stripes };
                let stripe = |n: u16| Stripe {
                    device: DeviceId(n.into()),
                    at: Physical(u64::from(n) << 30),
                };
                profile.fits_stripes(stripes).then(|| MappedChunk {
                    start: Logical(1 << 40),
                    length: rows * u64::from(profile.data_stripes(stripes)) * STRIPE_LEN,
                    kind: 1 | profile.flag().bits(),
                    stripes: (0..stripes).map(stripe).collect(),
                })
            },
        )
    }

    proptest! {
        /// Strips one after the other have every address of the chunk once, in the places that the
        /// map says.
        #[test]
        fn strips_tile_a_chunk(chunk in chunks(), len in 1u64..20) {
            let map = super::super::ChunkMap::new();
            map.insert(chunk.clone()).unwrap();
            let (mut at, mut next) = (chunk.start, 0);
            while let Some(strip) = chunk.strip(next..next + len * 40_000) {
                let range = strip.addresses();
                prop_assert_eq!(range.start, at);
                while at < range.end {
                    let place = strip.place(at);
                    let found = map.lookup(at, place.run).unwrap();
                    prop_assert!(place.run > 0 && found.len == place.run);
                    let here: Vec<Stripe> = place
                        .stripes
                        .clone()
                        .map(|n| strip.on_device(n, place.offset))
                        .collect();
                    prop_assert_eq!(&here[..], &found.stripes[..]);
                    at = at.plus(place.run);
                }
                for row in strip.rows() {
                    for (column, stripe) in row.columns.iter().enumerate() {
                        let at = row.start.plus(column as u64 * STRIPE_LEN);
                        let place = strip.place(at);
                        prop_assert_eq!((place.stripes.start, place.offset), (*stripe, row.offset));
                    }
                    prop_assert_eq!(row.columns.len() + row.parity.len(), chunk.stripes.len());
                }
                next = strip.end();
            }
            prop_assert_eq!(at, chunk.end());
        }
    }
}
