//! How a strip is read: what is allocated, from all of its devices at the same time.
//!
//! Devices are read from front to back in few long transfers, so short gaps are read as well. What
//! a device refuses is read again sector by sector, since one bad sector makes a long transfer
//! fail.

use super::content::{Content, SECTOR, Sector, View};
use super::control::ScrubControl;
use crate::engine::Core;
use crate::error::Result;
use larder_volume::Strip;
use std::collections::BTreeSet;
use std::ops::Range;
use std::thread;

/// Gaps up to this many sectors are read, too.
const GAP: usize = 16;

/// A strip that was read.
#[derive(Debug)]
pub(super) struct Loaded<'a> {
    pub(super) strip: Strip<'a>,
    pub(super) view: View,
    pub(super) content: Content,
    pub(super) copies: Vec<Copy>,
}

/// What a stripe holds.
#[derive(Debug, Default)]
pub(super) struct Copy {
    /// May its device be used?
    pub(super) is_here: bool,
    /// As long as the strip, where anything was read.
    pub(super) bytes: Vec<u8>,
    /// Sectors that could not be read.
    pub(super) unreadable: BTreeSet<usize>,
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a strip lies in memory")
}

impl Copy {
    /// Some of its bytes, unless they could not be read.
    pub(super) fn get(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let sectors = index(offset / SECTOR)..index((offset + len) / SECTOR);
        let readable = self.is_here && self.unreadable.range(sectors).next().is_none();
        readable.then(|| &self.bytes[index(offset)..index(offset + len)])
    }

    /// Takes what should be there.
    pub(super) fn set(&mut self, offset: u64, data: &[u8]) {
        self.bytes[index(offset)..][..data.len()].copy_from_slice(data);
        let end = offset + data.len() as u64;
        for n in offset / SECTOR..end / SECTOR {
            self.unreadable.remove(&index(n));
        }
    }
}

/// Reads a strip, into buffers of an earlier one. `None`: nothing is allocated there.
///
/// # Errors
/// Those of the extent tree and the checksum tree; `Busy` when the scrub has to end.
pub(super) fn load<'a>(
    core: &Core,
    control: &ScrubControl,
    strip: Strip<'a>,
    buffers: &mut Vec<Vec<u8>>,
) -> Result<Option<Loaded<'a>>> {
    control.wait_for_turn()?;
    let view = View::new(core);
    let content = Content::of(core, &view, &strip.addresses())?;
    if content.is_empty() {
        return Ok(None);
    }
    let wanted = wanted(&strip, &content);
    let bytes = |wanted: &Vec<bool>| SECTOR * wanted.iter().filter(|w| **w).count() as u64;
    control.spend(wanted.iter().map(bytes).sum());
    let stripes = strip.chunk().stripes.iter();
    let copies = stripes.map(|stripe| {
        let mut bytes = buffers.pop().unwrap_or_default();
        bytes.resize(index(strip.len()), 0);
        Copy { is_here: core.volume.is_usable(stripe.device), bytes, unreadable: BTreeSet::new() }
    });
    let mut loaded = Loaded { strip, view, content, copies: copies.collect() };
    read_all(core, control, &mut loaded, &wanted);
    Ok(Some(loaded))
}

/// Which sectors of each stripe are wanted. With parity, all of a row's sector.
fn wanted(strip: &Strip<'_>, content: &Content) -> Vec<Vec<bool>> {
    let sectors = index(strip.len() / SECTOR);
    let mut wanted = vec![vec![false; sectors]; strip.chunk().stripes.len()];
    for n in (0..content.sectors.len()).filter(|n| content.sectors[*n] != Sector::Free) {
        let place = strip.place(content.address(n));
        let all = 0..wanted.len();
        let stripes = if strip.has_parity() { all } else { place.stripes };
        stripes.for_each(|stripe| wanted[stripe][index(place.offset / SECTOR)] = true);
    }
    wanted
}

/// Ranges of sectors that are read together.
fn transfers(wanted: &[bool]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for n in (0..wanted.len()).filter(|n| wanted[*n]) {
        match ranges.last_mut() {
            Some(last) if n - last.end <= GAP => last.end = n + 1,
            _ => ranges.push(n..n + 1),
        }
    }
    ranges
}

fn read_all(core: &Core, control: &ScrubControl, loaded: &mut Loaded<'_>, wanted: &[Vec<bool>]) {
    let strip = loaded.strip;
    let copies = loaded.copies.iter_mut().enumerate();
    let mut jobs: Vec<_> = copies
        .filter_map(|(stripe, copy)| {
            let ranges = transfers(&wanted[stripe]);
            let reads = copy.is_here && !ranges.is_empty();
            reads.then_some(move || read(core, control, (strip, stripe), copy, &ranges))
        })
        .collect();
    // The last one is read on this thread.
    let mine = jobs.pop();
    thread::scope(|scope| {
        for job in jobs {
            scope.spawn(job);
        }
        if let Some(mut mine) = mine {
            mine();
        }
    });
}

fn read(
    core: &Core,
    control: &ScrubControl,
    (strip, stripe): (Strip<'_>, usize),
    copy: &mut Copy,
    ranges: &[Range<usize>],
) {
    for range in ranges {
        let (from, to) = (range.start as u64 * SECTOR, range.end as u64 * SECTOR);
        control.own();
        let buf = &mut copy.bytes[index(from)..index(to)];
        if core.volume.read_place(strip.on_device(stripe, from), buf).is_ok() {
            continue;
        }
        for n in range.clone() {
            let at = n as u64 * SECTOR;
            let buf = &mut copy.bytes[index(at)..index(at + SECTOR)];
            control.own();
            if core.volume.read_place(strip.on_device(stripe, at), buf).is_err() {
                copy.unreadable.insert(n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_gaps_are_read_and_long_ones_left_out() {
        let mut wanted = vec![false; 200];
        for n in [3, 4, 20, 60, 199] {
            wanted[n] = true;
        }
        assert_eq!(transfers(&wanted), [3..21, 60..61, 199..200]);
        assert!(transfers(&[false; 8]).is_empty());
    }
}
