//! How a strip is read: first what is known of it, then what is allocated, from all of its devices
//! at the same time.
//!
//! Devices are read from front to back in few long transfers, so short gaps are read as well. What
//! a device refuses is read again sector by sector, since one bad sector makes a long transfer
//! fail.

use super::content::{Content, SECTOR, Sector, View};
use super::control::ScrubControl;
use crate::engine::Core;
use crate::error::Result;
use larder_volume::{Strip, TransferMemory};
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
    /// As long as the strip. What was not read is anything.
    pub(super) bytes: TransferMemory,
    /// Sectors that could not be read.
    pub(super) unreadable: BTreeSet<usize>,
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a strip lies in memory")
}

impl Copy {
    /// Some of its bytes, unless they could not be read.
    pub(super) fn get(&self, range: Range<u64>) -> Option<&[u8]> {
        let sectors = index(range.start / SECTOR)..index(range.end / SECTOR);
        let readable = self.is_here && self.unreadable.range(sectors).next().is_none();
        readable.then(|| &self.bytes[index(range.start)..index(range.end)])
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

/// A strip of which it is known what it holds.
#[derive(Debug)]
pub(super) struct Known<'a> {
    strip: Strip<'a>,
    view: View,
    content: Content,
    /// Which sectors of each stripe are wanted.
    wanted: Vec<Vec<bool>>,
}

/// Finds out what a strip holds. `None`: nothing is allocated there.
///
/// # Errors
/// Those of the extent tree and the checksum tree; `Busy` when the scrub has to end.
pub(super) fn look<'a>(
    core: &Core,
    control: &ScrubControl,
    strip: Strip<'a>,
) -> Result<Option<Known<'a>>> {
    control.wait_for_turn()?;
    let view = View::new(core);
    let content = Content::of(core, &view, &strip.addresses())?;
    if content.is_empty() {
        return Ok(None);
    }
    let wanted = wanted(&strip, &content);
    let bytes = |wanted: &Vec<bool>| SECTOR * wanted.iter().filter(|w| **w).count() as u64;
    control.spend(wanted.iter().map(bytes).sum());
    Ok(Some(Known { strip, view, content, wanted }))
}

impl<'a> Known<'a> {
    /// Reads it, into buffers of earlier strips.
    pub(super) fn read(
        self,
        core: &Core,
        control: &ScrubControl,
        mut buffer: impl FnMut() -> Option<TransferMemory>,
    ) -> Loaded<'a> {
        let Self { strip, view, content, wanted } = self;
        let stripes = strip.chunk().stripes.iter();
        let copies = stripes.map(|stripe| {
            let mut bytes = buffer().unwrap_or_default();
            bytes.resize(index(strip.len()));
            Copy {
                is_here: core.volume.takes_writes(stripe.device),
                bytes,
                unreadable: BTreeSet::new(),
            }
        });
        let mut loaded = Loaded { strip, view, content, copies: copies.collect() };
        read_all(core, control, &mut loaded, &wanted);
        loaded
    }
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

/// A part of a stripe that is read by one thread.
struct Part<'a> {
    strip: Strip<'a>,
    stripe: usize,
    /// Its first sector in the strip.
    first: usize,
    bytes: &'a mut [u8],
    /// What of it is wanted.
    wanted: &'a [bool],
    unreadable: BTreeSet<usize>,
}

/// Reads all devices at the same time, and two parts of each: a device is quicker if it has the
/// next transfer before it is done with one.
fn read_all(core: &Core, control: &ScrubControl, loaded: &mut Loaded<'_>, wanted: &[Vec<bool>]) {
    let strip = loaded.strip;
    let mut parts = Vec::new();
    for (stripe, copy) in loaded.copies.iter_mut().enumerate().filter(|(_, copy)| copy.is_here) {
        let middle = wanted[stripe].len() / 2;
        let (front, back) = copy.bytes.split_at_mut(index(middle as u64 * SECTOR));
        let halves = wanted[stripe].split_at(middle);
        for (first, bytes, wanted) in [(0, front, halves.0), (middle, back, halves.1)] {
            if wanted.contains(&true) {
                let unreadable = BTreeSet::new();
                parts.push(Part { strip, stripe, first, bytes, wanted, unreadable });
            }
        }
    }
    thread::scope(|scope| {
        let Some((mine, others)) = parts.split_last_mut() else { return };
        for part in others {
            scope.spawn(|| part.read(core, control));
        }
        mine.read(core, control);
    });
    let bad: Vec<(usize, BTreeSet<usize>)> =
        parts.into_iter().map(|part| (part.stripe, part.unreadable)).collect();
    for (stripe, mut bad) in bad {
        loaded.copies[stripe].unreadable.append(&mut bad);
    }
}

impl Part<'_> {
    fn read(&mut self, core: &Core, control: &ScrubControl) {
        for range in transfers(self.wanted) {
            if self.transfer(core, control, range.clone()) {
                continue;
            }
            for n in range {
                if !self.transfer(core, control, n..n + 1) {
                    self.unreadable.insert(self.first + n);
                }
            }
        }
    }

    fn transfer(&mut self, core: &Core, control: &ScrubControl, sectors: Range<usize>) -> bool {
        let at = (self.first + sectors.start) as u64 * SECTOR;
        let bytes = index(sectors.start as u64 * SECTOR)..index(sectors.end as u64 * SECTOR);
        control.own();
        let place = self.strip.on_device(self.stripe, at);
        core.volume.read_place(place, &mut self.bytes[bytes]).is_ok()
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
