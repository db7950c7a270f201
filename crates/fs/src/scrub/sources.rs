//! Where good bytes come from: another copy, or the rest of a row with parity.
//!
//! Where a device was away, all that it should have is asked of the other devices of the row. So a
//! whole element is worked out at once, and kept for what follows in it. If that fails, or does not
//! give what was wanted, the little that is wanted is asked for alone: one bad sector elsewhere in
//! the row is in nobody's way then.

use super::content::SECTOR;
use super::judged::{Element, Judged, Unit};
use larder_format::{Logical, STRIPE_LEN};
use larder_volume::Place;
use std::collections::BTreeMap;

impl Judged<'_, '_> {
    /// Good bytes of something, from a copy that is not among these, or from the rest of its row.
    pub(super) fn good(&mut self, unit: Unit, place: &Place, bad: &[usize]) -> Option<Vec<u8>> {
        let (at, len) = self.range(unit);
        for stripe in place.stripes.clone().filter(|s| !bad.contains(s)) {
            let bytes = self.loaded.copies[stripe].get(place.offset..place.offset + len);
            if let Some(bytes) = bytes.filter(|bytes| self.is_good(unit, bytes)) {
                return Some(bytes.to_vec());
            }
        }
        let ways = place.stripes.len()..self.core.volume.copies(at).unwrap_or(0);
        if !self.loaded.strip.has_parity() {
            return None;
        }
        for way in ways.clone() {
            let bytes = self.part_of_element(at, len, way);
            if let Some(bytes) = bytes.filter(|bytes| self.is_good(unit, bytes)) {
                return Some(bytes);
            }
        }
        let mut alone = ways.filter_map(|way| self.by_row(at, len, way));
        alone.find(|bytes| self.is_good(unit, bytes))
    }

    /// A part of an element, which is worked out as a whole.
    fn part_of_element(&mut self, at: Logical, len: u64, way: usize) -> Option<Vec<u8>> {
        let into = (at.0 - self.loaded.strip.chunk().start.0) % STRIPE_LEN;
        let start = Logical(at.0 - into);
        let mut element = match self.element.take() {
            Some(element) if element.start == start => element,
            _ => Element { start, ways: BTreeMap::new() },
        };
        let bytes = element.ways.entry(way).or_insert_with(|| self.by_row(start, STRIPE_LEN, way));
        let range = into as usize..(into + len) as usize;
        let part = bytes.as_ref().map(|bytes| bytes[range].to_vec());
        self.element = Some(element);
        part
    }

    /// Reads in a way that asks the rest of a row.
    fn by_row(&self, at: Logical, len: u64, way: usize) -> Option<Vec<u8>> {
        let mut buf = vec![0; len as usize];
        self.own_row();
        let read = self.core.volume.read_way(at, &mut buf, way);
        read.ok().map(|()| buf)
    }

    /// A row is about to be read: one transfer for each of its columns.
    fn own_row(&self) {
        self.control.own_many(self.loaded.strip.columns() as u64);
    }

    /// A sector as the rest of its row says, as far as that can be believed.
    pub(super) fn by_parity(&self, at: Logical, place: &Place) -> Option<Vec<u8>> {
        if !self.loaded.strip.has_parity() {
            return None;
        }
        let volume = &self.core.volume;
        let mut buf = vec![0; SECTOR as usize];
        self.own_row();
        // The first way is the one with the devices that lack least.
        if volume.read(at, &mut buf, 0).is_ok() {
            return Some(buf);
        }
        let mut ways = place.stripes.len()..volume.copies(at).unwrap_or(0);
        ways.find_map(|way| self.by_row(at, SECTOR, way))
    }
}
