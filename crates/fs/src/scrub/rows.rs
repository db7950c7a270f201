//! What holds for parity: it is what the columns of its row give.
//!
//! A sector of a row counts only if something is allocated in one of its columns. Columns have been
//! judged before, so parity that differs is wrong, and is worked out anew. Two things forbid that:
//! a column that is still bad, and data without checksums, which may be what is wrong.

use super::content::{SECTOR, Sector};
use super::mend::Judged;
use super::report::Damage;
use crate::error::Result;
use larder_format::{Logical, STRIPE_LEN};
use larder_volume::{Place, StripRow, parity};
use rayon::prelude::*;

/// Parity that differs: its stripe, what it should be, and where.
struct Wrong {
    row: usize,
    /// 0 for P, 1 for Q.
    which: usize,
    /// Sector of the row.
    sector: u64,
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
        mend(judged, &rows[wrong.row], &wrong)?;
    }
    Ok(())
}

fn sectors() -> std::ops::Range<u64> {
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
    let mut wrong = Vec::new();
    for (which, stripe) in row.parity.iter().enumerate().filter(|(_, s)| copies[**s].is_here) {
        match which {
            0 => parity::p_of(&columns, &mut should),
            _ => parity::q_of(&columns, &mut should),
        }
        wrong.extend(used.iter().filter_map(|sector| {
            let at = (sector * SECTOR) as usize..((sector + 1) * SECTOR) as usize;
            let is = copies[*stripe].get(row.offset + sector * SECTOR, SECTOR);
            let differs = is.is_none_or(|is| *is != should[at]);
            differs.then_some(Wrong { row: n, which, sector: *sector })
        }));
    }
    wrong
}

/// Judges a sector of parity again, from what is read anew, and writes what it should be.
fn mend(judged: &mut Judged<'_, '_>, row: &StripRow, wrong: &Wrong) -> Result<()> {
    let offset = row.offset + wrong.sector * SECTOR;
    let place = Place { stripes: 0..0, offset, run: SECTOR };
    let stripe = row.parity[wrong.which];
    let kept_out = judged.core.in_place.write();
    let columns: Option<Vec<Vec<u8>>> = if judged.options.read_only {
        // What could be repaired is good in memory only.
        let held = row.columns.iter().map(|s| judged.loaded.copies[*s].get(offset, SECTOR));
        held.map(|bytes| bytes.map(<[u8]>::to_vec)).collect()
    } else {
        row.columns.iter().map(|s| judged.read_again(*s, &place, SECTOR)).collect()
    };
    let is = judged.read_again(stripe, &place, SECTOR);
    let lost = row.columns.iter().any(|s| judged.spoiled.contains(&(*s, offset / SECTOR)));
    let Some(columns) = columns.filter(|_| !lost) else {
        drop(kept_out);
        return unknown(judged, row, wrong, Damage::Parity);
    };
    let columns: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
    let mut should = vec![0; SECTOR as usize];
    match wrong.which {
        0 => parity::p_of(&columns, &mut should),
        _ => parity::q_of(&columns, &mut should),
    }
    if is.as_ref() == Some(&should) {
        return Ok(());
    }
    let kinds: Vec<Sector> = kinds(judged, row, wrong.sector).collect();
    let readable = is.is_some();
    let behind = judged.core.volume.behind().contains(&judged.device(stripe));
    if readable && !behind && kinds.contains(&Sector::Unsummed) {
        drop(kept_out);
        for column in (0..kinds.len()).filter(|c| kinds[*c] == Sector::Unsummed) {
            if judged.is_written(address(row, column, wrong.sector))? {
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
    if !judged.write(stripe, offset, &should) {
        judged.control.count(device, |c| c.uncorrectable += 1);
    }
    Ok(())
}

/// Nothing can be said about a sector of parity, or nothing done.
fn unknown(judged: &mut Judged<'_, '_>, row: &StripRow, wrong: &Wrong, what: Damage) -> Result<()> {
    let used = (0..row.columns.len()).find(|column| {
        let content = &judged.loaded.content;
        content.sectors[content.number(address(row, *column, wrong.sector))] != Sector::Free
    });
    judged.control.count(judged.device(row.parity[wrong.which]), |c| {
        c.parity_errors += 1;
        c.uncorrectable += 1;
    });
    // Where the columns are lost, they are listed already.
    match used.filter(|_| what == Damage::ParityDiffers) {
        Some(column) => {
            let at = address(row, column, wrong.sector);
            judged.report(what, at, SECTOR, row.parity[wrong.which])
        }
        None => Ok(()),
    }
}
