//! What holds for parity: it is what the columns of its row give.
//!
//! A sector of a row counts only if something is allocated in one of its columns. Columns have been
//! judged before, so parity that differs is wrong, and is worked out anew. Two things forbid that:
//! a column that is still bad, and data without checksums, which may be what is wrong. Where there
//! is neither, sectors that follow each other are dealt with together.

use super::content::{SECTOR, Sector};
use super::judged::Judged;
use super::report::Damage;
use crate::error::Result;
use larder_format::{Logical, STRIPE_LEN};
use larder_volume::{StripRow, parity};
use rayon::prelude::*;
use std::ops::Range;

/// Parity that differs.
#[derive(Clone)]
struct Wrong {
    row: usize,
    /// 0 for P, 1 for Q.
    which: usize,
    /// Sectors of the row. In most places there is one.
    sectors: Range<u64>,
}

impl Wrong {
    fn one_by_one(&self) -> impl Iterator<Item = Self> + '_ {
        self.sectors.clone().map(|n| Self { sectors: n..n + 1, ..*self })
    }

    fn len(&self) -> u64 {
        (self.sectors.end - self.sectors.start) * SECTOR
    }
}

/// Judges the parity of a strip and repairs it.
///
/// # Errors
/// Reading trees.
pub(super) fn judge(judged: &mut Judged<'_, '_>) -> Result<()> {
    let rows: Vec<StripRow> = judged.loaded.strip.rows().collect();
    count(judged, &rows);
    let wrong: Vec<Wrong> =
        (0..rows.len()).into_par_iter().flat_map_iter(|n| wrong_in(judged, n, &rows[n])).collect();
    for wrong in wrong {
        let row = &rows[wrong.row];
        if wrong.sectors.end - wrong.sectors.start > 1 && mend_at_once(judged, row, &wrong) {
            continue;
        }
        for wrong in wrong.one_by_one() {
            mend(judged, row, &wrong)?;
        }
    }
    Ok(())
}

fn sectors() -> Range<u64> {
    0..STRIPE_LEN / SECTOR
}

/// The address of a column's sector.
fn address(row: &StripRow, column: usize, sector: u64) -> Logical {
    row.start.plus(column as u64 * STRIPE_LEN + sector * SECTOR)
}

/// What is allocated in the columns of a row's sector.
fn kinds<'a>(
    judged: &'a Judged<'_, '_>,
    row: &'a StripRow,
    sector: u64,
) -> impl Iterator<Item = Sector> + 'a {
    let content = &judged.loaded.content;
    let kind = move |column| content.sectors[content.number(address(row, column, sector))];
    (0..row.columns.len()).map(kind)
}

fn is_used(judged: &Judged<'_, '_>, row: &StripRow, sector: u64) -> bool {
    kinds(judged, row, sector).any(|kind| kind != Sector::Free)
}

fn count(judged: &Judged<'_, '_>, rows: &[StripRow]) {
    for row in rows {
        let used = sectors().filter(|sector| is_used(judged, row, *sector)).count() as u64;
        for stripe in row.parity.iter().filter(|s| judged.loaded.copies[**s].is_here) {
            judged.control.count(judged.device(*stripe), |c| c.parity_bytes += used * SECTOR);
        }
    }
}

/// The sectors of a row whose parity differs. None, where a device of the row is missing.
fn wrong_in(judged: &Judged<'_, '_>, n: usize, row: &StripRow) -> Vec<Wrong> {
    let used: Vec<u64> = sectors().filter(|sector| is_used(judged, row, *sector)).collect();
    let copies = &judged.loaded.copies;
    if used.is_empty() || row.columns.iter().any(|s| !copies[*s].is_here) {
        return Vec::new();
    }
    let range = row.offset as usize..(row.offset + STRIPE_LEN) as usize;
    let columns: Vec<&[u8]> =
        row.columns.iter().map(|s| &copies[*s].bytes[range.clone()]).collect();
    let mut should = vec![0; STRIPE_LEN as usize];
    let mut wrong: Vec<Wrong> = Vec::new();
    for (which, stripe) in row.parity.iter().enumerate().filter(|(_, s)| copies[**s].is_here) {
        work_out(which, &columns, &mut should);
        for sector in &used {
            let at = (sector * SECTOR) as usize..((sector + 1) * SECTOR) as usize;
            let is = copies[*stripe].get(row.offset + at.start as u64..row.offset + at.end as u64);
            if is.is_some_and(|is| *is == should[at]) {
                continue;
            }
            match wrong.last_mut().filter(|w| w.which == which && w.sectors.end == *sector) {
                Some(last) => last.sectors.end += 1,
                None => wrong.push(Wrong { row: n, which, sectors: *sector..sector + 1 }),
            }
        }
    }
    wrong
}

/// P or Q of these columns.
fn work_out(which: usize, columns: &[&[u8]], should: &mut [u8]) {
    match which {
        0 => parity::p_of(columns, should),
        _ => parity::q_of(columns, should),
    }
}

/// What is stored in the columns of a row, and in the parity that is wrong.
struct Stored {
    columns: Option<Vec<Vec<u8>>>,
    parity: Option<Vec<u8>>,
}

/// Reads a part of a row anew. Where data without checksums lies, the caller keeps out what writes
/// in place.
fn stored(judged: &Judged<'_, '_>, row: &StripRow, wrong: &Wrong) -> Stored {
    let (offset, len) = (row.offset + wrong.sectors.start * SECTOR, wrong.len());
    let column = |stripe: &usize| {
        if judged.options.read_only {
            // What could be repaired is good in memory only.
            let held = judged.loaded.copies[*stripe].get(offset..offset + len);
            return held.map(<[u8]>::to_vec);
        }
        judged.read_again(*stripe, offset..offset + len)
    };
    Stored {
        columns: row.columns.iter().map(column).collect(),
        parity: judged.read_again(row.parity[wrong.which], offset..offset + len),
    }
}

/// Judges sectors again that follow each other, if all of them can be read, no column is lost, and
/// all data has checksums. Says whether it did.
fn mend_at_once(judged: &mut Judged<'_, '_>, row: &StripRow, wrong: &Wrong) -> bool {
    let is_plain = |sector: u64| {
        let place = row.offset / SECTOR + sector;
        !row.columns.iter().any(|s| judged.spoiled.contains(&(*s, place)))
            && kinds(judged, row, sector).all(|kind| kind != Sector::Unsummed)
    };
    if !wrong.sectors.clone().all(is_plain) {
        return false;
    }
    let Stored { columns: Some(columns), parity: Some(is) } = stored(judged, row, wrong) else {
        return false;
    };
    let columns: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
    let mut should = vec![0; is.len()];
    work_out(wrong.which, &columns, &mut should);
    let pairs = is.chunks(SECTOR as usize).zip(should.chunks(SECTOR as usize));
    let differ = pairs.filter(|(is, should)| is != should).count() as u64;
    if differ == 0 {
        return true;
    }
    let stripe = row.parity[wrong.which];
    let device = judged.device(stripe);
    judged.control.count(device, |c| c.parity_errors += differ);
    let offset = row.offset + wrong.sectors.start * SECTOR;
    if !judged.write(stripe, offset, &should, differ) {
        judged.control.count(device, |c| c.uncorrectable += differ);
    }
    true
}

/// Judges a sector of parity again, from what is read anew, and writes what it should be.
fn mend(judged: &mut Judged<'_, '_>, row: &StripRow, wrong: &Wrong) -> Result<()> {
    let sector = wrong.sectors.start;
    let offset = row.offset + sector * SECTOR;
    let stripe = row.parity[wrong.which];
    let kept_out = judged.core.in_place.write();
    let Stored { columns, parity: is } = stored(judged, row, wrong);
    let lost = row.columns.iter().any(|s| judged.spoiled.contains(&(*s, offset / SECTOR)));
    let Some(columns) = columns.filter(|_| !lost) else {
        drop(kept_out);
        return unknown(judged, row, wrong, Damage::Parity);
    };
    let columns: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
    let mut should = vec![0; SECTOR as usize];
    work_out(wrong.which, &columns, &mut should);
    if is.as_ref() == Some(&should) {
        return Ok(());
    }
    let kinds: Vec<Sector> = kinds(judged, row, sector).collect();
    let readable = is.is_some();
    let behind = judged.core.volume.behind().contains(&judged.device(stripe));
    if readable && !behind && kinds.contains(&Sector::Unsummed) {
        drop(kept_out);
        for column in (0..kinds.len()).filter(|c| kinds[*c] == Sector::Unsummed) {
            if judged.is_written(address(row, column, sector))? {
                return unknown(judged, row, wrong, Damage::ParityDiffers);
            }
        }
        // Space that was only allocated has no parity to speak of.
        if kinds.iter().all(|k| matches!(k, Sector::Free | Sector::Unsummed)) {
            return Ok(());
        }
    }
    let device = judged.device(stripe);
    judged.control.count(device, |c| match readable {
        true => c.parity_errors += 1,
        false => c.read_errors += 1,
    });
    if !judged.write(stripe, offset, &should, 1) {
        judged.control.count(device, |c| c.uncorrectable += 1);
    }
    Ok(())
}

/// Nothing can be said about a sector of parity, or nothing done.
fn unknown(judged: &mut Judged<'_, '_>, row: &StripRow, wrong: &Wrong, what: Damage) -> Result<()> {
    let used = (0..row.columns.len()).find(|column| {
        let content = &judged.loaded.content;
        content.sectors[content.number(address(row, *column, wrong.sectors.start))] != Sector::Free
    });
    judged.control.count(judged.device(row.parity[wrong.which]), |c| {
        c.parity_errors += 1;
        c.uncorrectable += 1;
    });
    // Where the columns are lost, they are listed already.
    match used.filter(|_| what == Damage::ParityDiffers) {
        Some(column) => {
            let at = address(row, column, wrong.sectors.start);
            judged.report(what, at, SECTOR, row.parity[wrong.which])
        }
        None => Ok(()),
    }
}
