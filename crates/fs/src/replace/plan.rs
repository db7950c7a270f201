//! Which sectors of a strip are copied, and what is known of them.
//!
//! A stripe of a chunk is looked at sector by sector. Sectors that lie behind each other on the
//! device, and whose addresses do so as well, are copied together. Where there is parity, those of
//! two elements are not, although the last column of a row and the first of the next may be such
//! neighbours: each row has its own ways to be read.

use crate::scrub::content::{Content, SECTOR, Sector};
use larder_format::{Logical, STRIPE_LEN};
use larder_volume::{Strip, StripRow};
use std::ops::Range;

/// Most bytes that are copied together.
const LONGEST: u64 = 1 << 20;
/// Most bytes during which no data is written in place.
const LONGEST_KEPT_OUT: u64 = 256 << 10;

/// What a sector of a stripe holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// Nothing that has to be copied.
    Nothing,
    /// What belongs to this address and does not change.
    Data(Logical),
    /// What belongs to this address and may be written in place.
    InPlace(Logical),
    /// Parity.
    Parity,
}

/// Sectors that are copied together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where they lie in the strip.
    pub(super) range: Range<u64>,
    pub(super) what: What,
}

/// See [`Piece`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The bytes from an address on.
    Data { at: Logical, in_place: bool },
    /// Parity number `which`: 0 for P, 1 for Q.
    Parity { row: StripRow, which: usize },
}

/// What is copied of a stripe, of what lies in a strip.
pub(super) fn pieces(strip: &Strip<'_>, stripe: usize, content: &Content) -> Vec<Piece> {
    let holds = holds(strip, stripe, content);
    let rows: Vec<StripRow> = strip.rows().filter(|row| row.parity.contains(&stripe)).collect();
    let mut pieces: Vec<Piece> = Vec::new();
    for (n, holds) in holds.iter().enumerate() {
        let from = n as u64 * SECTOR;
        let sector = from..from + SECTOR;
        let what = match holds {
            Holds::Nothing => continue,
            Holds::Data(at) => What::Data { at: *at, in_place: false },
            Holds::InPlace(at) => What::Data { at: *at, in_place: true },
            Holds::Parity => {
                let row = rows.iter().find(|row| row.offset == from - from % STRIPE_LEN);
                let Some(row) = row else { continue };
                let which = row.parity.iter().position(|p| *p == stripe).unwrap_or(0);
                What::Parity { row: row.clone(), which }
            }
        };
        let is_border = strip.has_parity() && from.is_multiple_of(STRIPE_LEN);
        match pieces.last_mut().filter(|_| !is_border) {
            Some(last) if last.goes_on_with(&sector, &what) => last.range.end = sector.end,
            _ => pieces.push(Piece { range: sector, what }),
        }
    }
    pieces
}

impl Piece {
    fn goes_on_with(&self, sector: &Range<u64>, next: &What) -> bool {
        let len = self.range.end - self.range.start;
        self.range.end == sector.start
            && match (&self.what, next) {
                (
                    What::Data { at, in_place },
                    What::Data { at: next_at, in_place: next_in_place },
                ) => {
                    let most = if *in_place { LONGEST_KEPT_OUT } else { LONGEST };
                    in_place == next_in_place && *next_at == at.plus(len) && len < most
                }
                (What::Parity { row, .. }, What::Parity { row: next_row, .. }) => row == next_row,
                _ => false,
            }
    }
}

fn index(sectors: u64) -> usize {
    usize::try_from(sectors).expect("a strip lies in memory")
}

/// What each sector of a stripe holds.
fn holds(strip: &Strip<'_>, stripe: usize, content: &Content) -> Vec<Holds> {
    let mut holds = vec![Holds::Nothing; index(strip.len() / SECTOR)];
    for n in 0..content.sectors.len() {
        let at = content.address(n);
        let here = match content.sectors[n] {
            Sector::Free => continue,
            Sector::Unsummed => Holds::InPlace(at),
            Sector::Summed | Sector::Block => Holds::Data(at),
        };
        let place = strip.place(at);
        if place.stripes.contains(&stripe) {
            holds[index(place.offset / SECTOR)] = here;
        }
    }
    for row in strip.rows() {
        let column = row.columns.iter().position(|c| *c == stripe);
        for sector in (0..STRIPE_LEN / SECTOR).filter(|s| is_used(&row, *s, content)) {
            let here = &mut holds[index(row.offset / SECTOR + sector)];
            match column {
                // Nothing writes into a row that is in use, not even in place.
                Some(column) => *here = Holds::Data(address(&row, column, sector)),
                None => *here = Holds::Parity,
            }
        }
    }
    holds
}

/// The address of a column's sector.
pub(super) fn address(row: &StripRow, column: usize, sector: u64) -> Logical {
    row.start.plus(column as u64 * STRIPE_LEN + sector * SECTOR)
}

/// Is something allocated in a sector of a row?
fn is_used(row: &StripRow, sector: u64, content: &Content) -> bool {
    let mut columns = 0..row.columns.len();
    columns.any(|c| content.sectors[content.number(address(row, c, sector))] != Sector::Free)
}
