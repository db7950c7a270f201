//! Where good bytes come from.
//!
//! Bytes are read in one go, in the way that is preferred: from the source, or from another device
//! where the source is to be left alone. Then everything that has a checksum is judged. What does
//! not match is read in the other ways, until one does.

use super::plan::{What, address};
use crate::engine::Core;
use crate::scrub::content::{Block, Content, SECTOR, Sector};
use larder_format::node::NodeView;
use larder_format::{DeviceId, Logical, STRIPE_LEN};
use larder_volume::{Strip, StripRow, parity};
use std::ops::Range;

/// How much could not be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trouble {
    /// Sectors that the first way did not have, and another one had.
    pub(super) corrected: u64,
    /// Sectors that no way had.
    pub(super) unreadable: u64,
}

/// What a strip is copied with.
#[derive(Clone, Copy)]
pub(super) struct Gather<'a> {
    pub(super) core: &'a Core,
    pub(super) strip: Strip<'a>,
    pub(super) content: &'a Content,
    pub(super) source: DeviceId,
    /// Is the source read only where nothing else has its bytes? It is if it has failed or had been
    /// away: what it has may be old.
    pub(super) avoid: bool,
}

/// Something that is good or bad as a whole.
#[derive(Clone, Copy)]
enum Unit {
    /// A sector, by its number.
    Sector(usize),
    Block(Block),
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a strip lies in memory")
}

impl Gather<'_> {
    /// Fills `buf` with what a piece of the strip is to hold.
    pub(super) fn fill(&self, range: &Range<u64>, what: &What, buf: &mut [u8]) -> Trouble {
        match what {
            What::Data { at, .. } => self.data(*at, buf),
            What::Parity { row, which } => self.parity(range, row, *which, buf),
        }
    }

    /// Fills `buf` with what belongs to the addresses from `at` on, which lie in one element.
    fn data(&self, at: Logical, buf: &mut [u8]) -> Trouble {
        let ways = self.ways(at);
        let mut trouble = Trouble::default();
        let whole = ways.first().is_some_and(|way| self.read(at, buf, *way));
        let mut from = 0;
        while from < buf.len() {
            let here = at.plus(from as u64);
            let (unit, start, len) = self.unit(here);
            let skip = index(here.0 - start.0);
            let end = (from + len - skip).min(buf.len());
            let sectors = ((end - from) as u64).div_ceil(SECTOR);
            // A part of a block cannot be judged.
            let is_whole = skip == 0 && end - from == len;
            if !(whole && is_whole && self.is_good(unit, &buf[from..end])) {
                let found = self.unit_in_some_way(unit, start, len, &ways);
                match found {
                    Some((bytes, first)) => {
                        buf[from..end].copy_from_slice(&bytes[skip..skip + end - from]);
                        trouble.corrected += if first { 0 } else { sectors };
                    }
                    None => {
                        trouble.unreadable += sectors;
                        self.as_it_lies(here, &mut buf[from..end], &ways);
                    }
                }
            }
            from = end;
        }
        trouble
    }

    /// Nothing is good: what can be read is as good as anything else.
    fn as_it_lies(&self, at: Logical, buf: &mut [u8], ways: &[usize]) {
        if !ways.iter().any(|way| self.read(at, buf, *way)) {
            buf.fill(0);
        }
    }

    /// The ways to read what is at an address, the preferred one first.
    fn ways(&self, at: Logical) -> Vec<usize> {
        let (place, chunk) = (self.strip.place(at), self.strip.chunk());
        let is_source = |way: usize| {
            let stripe = place.stripes.clone().nth(way);
            stripe.is_some_and(|stripe| chunk.stripes[stripe].device == self.source)
        };
        let groups = self.core.volume.ways_by_worth(at).unwrap_or_default();
        let sorted = groups.into_iter().flat_map(|mut group| {
            group.sort_by_key(|way| (is_source(*way) == self.avoid, *way));
            group
        });
        sorted.collect()
    }

    fn read(&self, at: Logical, buf: &mut [u8], way: usize) -> bool {
        let place = self.strip.place(at);
        let volume = &self.core.volume;
        match place.stripes.clone().nth(way).filter(|_| place.run >= buf.len() as u64) {
            Some(stripe) => {
                volume.read_place(self.strip.on_device(stripe, place.offset), buf).is_ok()
            }
            None => volume.read_way(at, buf, way).is_ok(),
        }
    }

    /// What an address belongs to, where that begins, and its bytes.
    fn unit(&self, at: Logical) -> (Unit, Logical, usize) {
        let n = self.content.number(at);
        let nodesize = u64::from(self.core.nodesize());
        let blocks = &self.content.blocks;
        let before = blocks.partition_point(|block| block.at <= at);
        let block = before.checked_sub(1).map(|n| blocks[n]);
        match block.filter(|b| {
            self.content.sectors[n] == Sector::Block
                && at.0 - b.at.0 < nodesize
                && self.strip.place(b.at).run >= nodesize
        }) {
            Some(block) => (Unit::Block(block), block.at, index(nodesize)),
            None => (Unit::Sector(n), at, index(SECTOR)),
        }
    }

    fn is_good(&self, unit: Unit, bytes: &[u8]) -> bool {
        let core = self.core;
        match unit {
            Unit::Sector(n) if self.content.sectors[n] == Sector::Summed => {
                let sum = self.content.sum(n);
                core.csum.compute(bytes)[..sum.len()] == *sum
            }
            Unit::Sector(_) => true,
            Unit::Block(block) => {
                let view = NodeView(bytes);
                view.bytenr() == block.at
                    && view.generation() == block.generation
                    && view.header().fsid == core.store.format().fsid
                    && view.csum_matches(core.csum)
            }
        }
    }

    /// A unit, read until it is good. Also whether the first way had it.
    fn unit_in_some_way(
        &self,
        unit: Unit,
        at: Logical,
        len: usize,
        ways: &[usize],
    ) -> Option<(Vec<u8>, bool)> {
        let mut bytes = vec![0; len];
        let has = |way: &usize, bytes: &mut Vec<u8>| {
            self.read(at, bytes, *way) && self.is_good(unit, bytes)
        };
        let nth = ways.iter().position(|way| has(way, &mut bytes))?;
        Some((bytes, nth == 0))
    }

    /// Fills `buf` with parity. That of the source is taken as it is: whether it is right, only the
    /// columns could tell, and the next scrub asks them. Where it cannot be read, or is to be left
    /// alone, it is worked out from columns that are good.
    fn parity(&self, range: &Range<u64>, row: &StripRow, which: usize, buf: &mut [u8]) -> Trouble {
        let on_source = self.strip.on_device(row.parity[which], range.start);
        if !self.avoid && self.core.volume.read_place(on_source, buf).is_ok() {
            return Trouble::default();
        }
        let mut trouble = Trouble::default();
        let sector = (range.start % STRIPE_LEN) / SECTOR;
        let columns: Vec<Vec<u8>> = (0..row.columns.len())
            .map(|column| {
                let mut bytes = vec![0; buf.len()];
                let found = self.data(address(row, column, sector), &mut bytes);
                trouble.unreadable += found.unreadable;
                bytes
            })
            .collect();
        let columns: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
        match which {
            0 => parity::p_of(&columns, buf),
            _ => parity::q_of(&columns, buf),
        }
        trouble
    }
}
