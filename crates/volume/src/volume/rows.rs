//! Writing where there is parity.
//!
//! A byte of parity covers those bytes of a full stripe that are equally far from the beginnings of
//! their elements. These are a **row**, and no row has to do with another. So what is written is
//! put together row by row: the pieces of a full stripe tell which rows are touched, and P and Q
//! are worked out for these. Data and parity then go to all devices at the same time.
//!
//! That is safe only where nothing durable lies in the same rows. A crash may leave data without
//! the parity that belongs to it, and a device that is then lost takes along its part of the row.
//! The space layer keeps the rule: what it hands out lies in rows that are free as a whole, and one
//! call writes all that comes to lie in a row ([`Volume::write_fresh`]). The rest of these rows
//! holds nothing and gets zeros, so nothing is read.
//!
//! A write that says nothing of its rows reads what else they hold ([`Volume::write_batch`]). Such
//! writes come one after the other.

use super::Volume;
use super::target::Written;
use super::write::{self, Transfer};
use crate::error::{VolumeError, VolumeResult};
use crate::map::{FullStripe, Stripe};
use crate::parity::{add, double};
use larder_format::{Logical, STRIPE_LEN};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::ops::Range;

/// Bytes of data whose parity is in memory at the same time.
const AT_ONCE: u64 = 8 << 20;

/// What the rest of a row holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// Nothing: it gets zeros.
    Zeros,
    /// Something: it is read, and stays.
    Read,
}

/// A part of a write that lies in one element.
#[derive(Clone, Debug)]
pub(super) struct Piece<'a> {
    pub(super) at: Logical,
    pub(super) len: u64,
    /// Which write it belongs to.
    pub(super) of: usize,
    pub(super) data: Cow<'a, [IoSlice<'a>]>,
}

/// What is written of a full stripe.
struct Batch<'a> {
    stripe: FullStripe,
    pieces: Vec<Piece<'a>>,
    /// The touched rows, as ranges of each element.
    rows: Vec<Rows>,
}

/// Rows that lie behind each other, and all that is written of them beside the pieces.
struct Rows {
    range: Range<u64>,
    /// Of each column, what no piece has.
    gaps: Vec<Gap>,
    /// P, or P and Q.
    parity: SmallVec<[Vec<u8>; 2]>,
}

struct Gap {
    column: u64,
    range: Range<u64>,
    /// What it holds; `None` for zeros.
    holds: Option<Vec<u8>>,
}

const LEN: usize = STRIPE_LEN as usize;
static ZEROS: [u8; LEN] = [0; LEN];

fn index(n: u64) -> usize {
    usize::try_from(n).expect("within an element")
}

impl Volume {
    /// Writes pieces with their parity, and returns the writes of which bytes are on no device that
    /// counts.
    pub(super) fn write_pieces(
        &self,
        to: &Written,
        pieces: Vec<Piece<'_>>,
        fill: Fill,
    ) -> Vec<(usize, VolumeError)> {
        let _alone = (fill == Fill::Read).then(|| self.rows_in_use.lock());
        let mut errors = Vec::new();
        let mut batches: Vec<Batch<'_>> = Vec::new();
        let mut bytes = 0;
        for (stripe, pieces) in self.by_stripe(pieces) {
            let first = pieces[0].of;
            match self.batch(stripe, pieces, fill) {
                Ok(batch) => batches.push(batch),
                Err(error) => errors.push((first, error)),
            }
            bytes += stripe.len();
            if bytes >= AT_ONCE {
                self.write_stripes(to, &std::mem::take(&mut batches), &mut errors);
                bytes = 0;
            }
        }
        self.write_stripes(to, &batches, &mut errors);
        errors
    }

    /// The pieces of each full stripe, by address.
    fn by_stripe<'a>(&self, pieces: Vec<Piece<'a>>) -> Vec<(FullStripe, Vec<Piece<'a>>)> {
        let mut stripes: BTreeMap<Logical, (FullStripe, Vec<Piece<'a>>)> = BTreeMap::new();
        for piece in pieces {
            let before = stripes.range_mut(..=piece.at).next_back().map(|(_, found)| found);
            match before.filter(|(stripe, _)| piece.at < stripe.end()) {
                Some((_, pieces)) => pieces.push(piece),
                None => {
                    let Some(stripe) = self.map.full_stripe(piece.at) else { continue };
                    stripes.insert(stripe.start, (stripe, vec![piece]));
                }
            }
        }
        stripes.into_values().collect()
    }

    /// Puts the rows of a full stripe together.
    fn batch<'a>(
        &self,
        stripe: FullStripe,
        mut pieces: Vec<Piece<'a>>,
        fill: Fill,
    ) -> VolumeResult<Batch<'a>> {
        pieces.sort_by_key(|piece| piece.at);
        let mut rows = Vec::new();
        for range in touched(stripe, &pieces) {
            let mut gaps = gaps(stripe, &pieces, &range);
            if fill == Fill::Read {
                for gap in &mut gaps {
                    let mut buf = vec![0; index(gap.range.end - gap.range.start)];
                    let at = stripe.start.plus(gap.column * STRIPE_LEN + gap.range.start);
                    self.read_some_way(at, &mut buf)?;
                    gap.holds = Some(buf);
                }
            }
            let second = self.map.row(stripe.start, 0).is_some_and(|row| row.parity.len() > 1);
            let parity = parity(stripe, &pieces, &range, &gaps, second);
            rows.push(Rows { range, gaps, parity });
        }
        Ok(Batch { stripe, pieces, rows })
    }

    /// Fills `buf` in the first way that works.
    fn read_some_way(&self, at: Logical, buf: &mut [u8]) -> VolumeResult<()> {
        let mut failed = None;
        for copy in 0..self.copies(at)? {
            match self.read_block(at, buf, copy) {
                Ok(()) => return Ok(()),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.unwrap_or(VolumeError::Unmapped { at, len: buf.len() as u64 }))
    }

    fn write_stripes(
        &self,
        to: &Written,
        batches: &[Batch<'_>],
        errors: &mut Vec<(usize, VolumeError)>,
    ) {
        let mut transfers = Vec::new();
        for batch in batches {
            let before = transfers.len();
            if let Err(error) = self.transfers_of(to, batch, &mut transfers) {
                transfers.truncate(before);
                errors.push((batch.pieces[0].of, error));
            }
        }
        if !transfers.is_empty() {
            errors.extend(self.transfer(to, &transfers));
        }
    }

    /// What each device gets of a full stripe. Those that have failed get nothing while parity
    /// stands in for them.
    fn transfers_of<'a>(
        &self,
        to: &Written,
        batch: &'a Batch<'_>,
        transfers: &mut Vec<Transfer<'a>>,
    ) -> VolumeResult<()> {
        let Some(row) = self.map.row(batch.stripe.start, 0) else { return Ok(()) };
        let takes_none = |s: &Stripe| to.gets_nothing(s.device);
        let gone = row.elements().filter(|s| takes_none(s)).count();
        let spares = gone <= row.parity.len();
        let mut push = |place: &Stripe, into: u64, of, data: Cow<'a, [IoSlice<'a>]>| {
            let stripe = Stripe { device: place.device, at: place.at.plus(into) };
            let transfer = Transfer { chunk: row.chunk, stripe, of, data };
            write::push(to, transfer, spares && takes_none(place), transfers)
        };
        for piece in &batch.pieces {
            let (column, range) = place_in(batch.stripe, piece);
            push(&row.columns[index(column)], range.start, piece.of, Cow::Borrowed(&*piece.data))?;
        }
        let first = batch.pieces[0].of;
        for rows in &batch.rows {
            for gap in rows.gaps.iter().filter(|gap| gap.holds.is_none()) {
                let zeros = IoSlice::new(&ZEROS[..index(gap.range.end - gap.range.start)]);
                let data = Cow::Owned(vec![zeros]);
                push(&row.columns[index(gap.column)], gap.range.start, first, data)?;
            }
            for (place, bytes) in row.parity.iter().zip(&rows.parity) {
                push(place, rows.range.start, first, Cow::Owned(vec![IoSlice::new(bytes)]))?;
            }
        }
        Ok(())
    }
}

/// The column of a piece, and what it takes of its element.
fn place_in(stripe: FullStripe, piece: &Piece<'_>) -> (u64, Range<u64>) {
    let into = piece.at.0 - stripe.start.0;
    let within = into % STRIPE_LEN;
    (into / STRIPE_LEN, within..within + piece.len)
}

/// The rows in which pieces lie, as ranges of an element that do not touch each other.
fn touched(stripe: FullStripe, pieces: &[Piece<'_>]) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = pieces.iter().map(|p| place_in(stripe, p).1).collect();
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// What no piece has of these rows. The pieces are in the order of addresses.
fn gaps(stripe: FullStripe, pieces: &[Piece<'_>], rows: &Range<u64>) -> Vec<Gap> {
    let mut gaps = Vec::new();
    for column in 0..stripe.columns {
        let mine = pieces.iter().map(|p| place_in(stripe, p)).filter(|(c, _)| *c == column);
        let mut from = rows.start;
        let ends = std::iter::once((column, rows.end..rows.end));
        for (_, range) in mine.chain(ends) {
            let to = range.start.min(rows.end);
            if from < to {
                gaps.push(Gap { column, range: from..to, holds: None });
            }
            from = from.max(range.end);
        }
    }
    gaps
}

/// The parity of rows.
fn parity(
    stripe: FullStripe,
    pieces: &[Piece<'_>],
    rows: &Range<u64>,
    gaps: &[Gap],
    second: bool,
) -> SmallVec<[Vec<u8>; 2]> {
    let len = index(rows.end - rows.start);
    let (mut p, mut q) = (vec![0; len], vec![0; if second { len } else { 0 }]);
    for column in (0..stripe.columns).rev() {
        double(&mut q);
        let mut put = |at: usize, bytes: &[u8]| {
            add(&mut p[at..], bytes);
            if second {
                add(&mut q[at..], bytes);
            }
            at + bytes.len()
        };
        for piece in pieces {
            let (of, range) = place_in(stripe, piece);
            if of == column && rows.contains(&range.start) {
                let at = index(range.start - rows.start);
                piece.data.iter().fold(at, |at, bytes| put(at, bytes));
            }
        }
        for gap in gaps.iter().filter(|gap| gap.column == column) {
            if let Some(holds) = &gap.holds {
                put(index(gap.range.start - rows.start), holds);
            }
        }
    }
    if second { SmallVec::from_iter([p, q]) } else { SmallVec::from_iter([p]) }
}
