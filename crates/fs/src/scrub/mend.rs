//! Which bytes are good, and what is written over bad ones.
//!
//! What does not match is read again before anything is said about it. What a missing device had is
//! only looked for elsewhere. Good bytes come from
//! another copy or, with parity, from the rest of the row, and count only if they match. Data
//! without checksums cannot be judged: where copies differ, the copy of a device that was never
//! away is taken, and if there is more than one opinion among those, nothing is written.

use super::content::{Block, SECTOR, Sector};
use super::control::ScrubControl;
use super::load::Loaded;
use super::report::{Damage, ScrubCounts, ScrubDamage, ScrubOptions};
use super::users::Uses;
use crate::engine::Core;
use crate::error::Result;
use larder_format::node::NodeView;
use larder_format::{DeviceId, Logical, STRIPE_LEN};
use larder_volume::{Place, Stripe};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;

/// Sectors that a thread judges in one go.
const STEP: usize = 64;

/// A strip that is being judged.
pub(super) struct Judged<'a, 'c> {
    pub(super) core: &'a Core,
    pub(super) control: &'a ScrubControl,
    pub(super) options: ScrubOptions,
    pub(super) loaded: &'a mut Loaded<'c>,
    /// Places that are still bad: stripe and sector.
    pub(super) spoiled: BTreeSet<(usize, u64)>,
    /// What uses the extent that was last asked about.
    uses: Option<Uses>,
}

/// Something that is good or bad as a whole.
#[derive(Clone, Copy, Debug)]
enum Unit {
    /// A sector with a checksum, by its number.
    Sector(usize),
    /// A sector without.
    Unsummed(usize),
    Block(Block),
}

/// Something of which a copy is bad, and the stripes of bad copies.
struct Suspect {
    unit: Unit,
    bad: Vec<usize>,
}

/// Judges all copies in a strip and repairs them. Parity comes afterwards.
///
/// # Errors
/// Reading trees.
pub(super) fn judge<'a, 'c>(
    core: &'a Core,
    control: &'a ScrubControl,
    options: ScrubOptions,
    loaded: &'a mut Loaded<'c>,
) -> Result<Judged<'a, 'c>> {
    let mut judged =
        Judged { core, control, options, loaded, spoiled: BTreeSet::new(), uses: None };
    judged.count();
    for suspect in judged.suspects() {
        match suspect.unit {
            Unit::Unsummed(n) => judged.mend_unsummed(n)?,
            unit => judged.mend(unit, suspect.bad)?,
        }
    }
    judged.look_for_missing()?;
    Ok(judged)
}

/// An element on a missing device: its address, and what the rest of its row says of it.
type Element = (Logical, Vec<u8>);

impl Judged<'_, '_> {
    pub(super) fn device(&self, stripe: usize) -> DeviceId {
        self.loaded.strip.chunk().stripes[stripe].device
    }

    fn at_device(&self, stripe: usize, offset: u64) -> Stripe {
        self.loaded.strip.on_device(stripe, offset)
    }

    /// Counts what was read.
    fn count(&self) {
        let (strip, content) = (self.loaded.strip, &self.loaded.content);
        let mut counts = vec![ScrubCounts::default(); self.loaded.copies.len()];
        for (n, sector) in content.sectors.iter().enumerate().filter(|s| *s.1 != Sector::Free) {
            for stripe in strip.place(content.address(n)).stripes {
                match sector {
                    Sector::Block => counts[stripe].tree_bytes += SECTOR,
                    Sector::Unsummed => {
                        counts[stripe].data_bytes += SECTOR;
                        counts[stripe].no_csum += 1;
                    }
                    _ => counts[stripe].data_bytes += SECTOR,
                }
            }
        }
        for block in &content.blocks {
            strip.place(block.at).stripes.for_each(|stripe| counts[stripe].tree_blocks += 1);
        }
        self.control.with(|state| {
            for (stripe, counts) in counts.into_iter().enumerate() {
                if self.loaded.copies[stripe].is_here {
                    *state.of(self.device(stripe)) += counts;
                }
            }
        });
    }

    fn suspects(&self) -> Vec<Suspect> {
        let behind = self.core.volume.behind();
        let content = &self.loaded.content;
        let sectors = (0..content.sectors.len()).into_par_iter().with_min_len(STEP);
        let sectors = sectors.filter_map(|n| match content.sectors[n] {
            Sector::Summed => self.suspect(Unit::Sector(n)),
            Sector::Unsummed => self.suspect_unsummed(n, &behind),
            Sector::Free | Sector::Block => None,
        });
        let blocks = content.blocks.par_iter().filter_map(|b| self.suspect(Unit::Block(*b)));
        let mut all: Vec<Suspect> = sectors.collect();
        all.extend(blocks.collect::<Vec<_>>());
        all
    }

    fn suspect(&self, unit: Unit) -> Option<Suspect> {
        let (at, len) = self.range(unit);
        let place = self.loaded.strip.place(at);
        if place.run < len {
            return Some(Suspect { unit, bad: Vec::new() }).filter(|_| !self.is_good_across(unit));
        }
        let is_bad = |stripe: &usize| {
            let copy = &self.loaded.copies[*stripe];
            let good = |bytes| self.is_good(unit, bytes);
            copy.is_here && !copy.get(place.offset..place.offset + len).is_some_and(good)
        };
        let bad: Vec<usize> = place.stripes.filter(is_bad).collect();
        (!bad.is_empty()).then_some(Suspect { unit, bad })
    }

    fn suspect_unsummed(&self, n: usize, behind: &[DeviceId]) -> Option<Suspect> {
        let place = self.loaded.strip.place(self.loaded.content.address(n));
        let mut first = None;
        let mut is_bad = |stripe: usize| {
            let copy = &self.loaded.copies[stripe];
            if !copy.is_here {
                return false;
            }
            let Some(bytes) = copy.get(place.offset..place.offset + SECTOR) else { return true };
            *first.get_or_insert(bytes) != bytes
                || self.loaded.strip.has_parity() && behind.contains(&self.device(stripe))
        };
        let bad: Vec<usize> = place.stripes.clone().filter(|s| is_bad(*s)).collect();
        (!bad.is_empty()).then_some(Suspect { unit: Unit::Unsummed(n), bad })
    }

    fn range(&self, unit: Unit) -> (Logical, u64) {
        match unit {
            Unit::Sector(n) | Unit::Unsummed(n) => (self.loaded.content.address(n), SECTOR),
            Unit::Block(block) => (block.at, u64::from(self.core.nodesize())),
        }
    }

    fn is_good(&self, unit: Unit, bytes: &[u8]) -> bool {
        match unit {
            Unit::Sector(n) => {
                let sum = self.loaded.content.sum(n);
                self.core.csum.compute(bytes)[..sum.len()] == *sum
            }
            Unit::Unsummed(_) => true,
            Unit::Block(block) => {
                let view = NodeView(bytes);
                view.bytenr() == block.at
                    && view.generation() == block.generation
                    && view.header().fsid == self.core.store.format().fsid_of(bytes)
                    && view.csum_matches(self.core.csum)
            }
        }
    }

    /// Lists what lay on missing devices and cannot be had in any other way.
    fn look_for_missing(&mut self) -> Result<()> {
        if self.loaded.copies.iter().all(|copy| copy.is_here) {
            return Ok(());
        }
        let mut element: Option<Element> = None;
        for unit in self.units_of_missing() {
            let (at, len) = self.range(unit);
            let place = self.loaded.strip.place(at);
            if self.is_good_in(&mut element, unit) || self.good(unit, &place, &[]).is_some() {
                continue;
            }
            let stripe = place.stripes.start;
            self.control.count(self.device(stripe), |c| {
                c.read_errors += 1;
                c.uncorrectable += 1;
            });
            self.report(Damage::Unreadable, at, len, stripe)?;
        }
        Ok(())
    }

    /// What can be judged and is stored on missing devices only, by address within each kind.
    fn units_of_missing(&self) -> Vec<Unit> {
        let content = &self.loaded.content;
        let sectors = (0..content.sectors.len()).filter(|n| content.sectors[*n] == Sector::Summed);
        let units =
            sectors.map(Unit::Sector).chain(content.blocks.iter().copied().map(Unit::Block));
        let is_missing = |unit: &Unit| {
            let (at, len) = self.range(*unit);
            let mut place = self.loaded.strip.place(at);
            place.run >= len && place.stripes.all(|stripe| !self.loaded.copies[stripe].is_here)
        };
        units.filter(is_missing).collect()
    }

    /// Is something good as the rest of its row says? A whole element is read at once.
    fn is_good_in(&self, element: &mut Option<Element>, unit: Unit) -> bool {
        let (at, len) = self.range(unit);
        let into = (at.0 - self.loaded.strip.chunk().start.0) % STRIPE_LEN;
        let start = Logical(at.0 - into);
        if element.as_ref().is_none_or(|(known, _)| *known != start) {
            *element = self.element(start);
        }
        let range = into as usize..(into + len) as usize;
        element.as_ref().is_some_and(|(_, bytes)| self.is_good(unit, &bytes[range]))
    }

    /// Works an element out in the first way that parity gives.
    fn element(&self, start: Logical) -> Option<Element> {
        let strip = self.loaded.strip;
        if !strip.has_parity() {
            return None;
        }
        let mut bytes = vec![0; STRIPE_LEN as usize];
        self.control.own();
        let first = strip.place(start).stripes.len();
        let read = self.core.volume.read_way(start, &mut bytes, first);
        read.ok().map(|()| (start, bytes))
    }

    /// Is a block good that lies in more than one element or strip, in any copy?
    fn is_good_across(&self, unit: Unit) -> bool {
        let (at, len) = self.range(unit);
        let mut buf = vec![0; len as usize];
        let copies = self.core.volume.copies(at).unwrap_or(1);
        (0..copies).any(|copy| {
            self.control.own();
            self.core.volume.read_block(at, &mut buf, copy).is_ok() && self.is_good(unit, &buf)
        })
    }

    /// Repairs copies of something that can be judged.
    fn mend(&mut self, unit: Unit, bad: Vec<usize>) -> Result<()> {
        let (at, len) = self.range(unit);
        let place = self.loaded.strip.place(at);
        if place.run < len {
            let device = self.device(place.stripes.start);
            self.control.count(device, |c| {
                c.verify_errors += 1;
                c.uncorrectable += 1;
            });
            return self.report(Damage::TreeBlock, at, len, place.stripes.start);
        }
        let mut still_bad = Vec::new();
        for stripe in bad {
            let again = self.read_again(stripe, &place, len);
            let readable = again.is_some();
            match again.filter(|bytes| self.is_good(unit, bytes)) {
                Some(bytes) => self.loaded.copies[stripe].set(place.offset, &bytes),
                None => {
                    still_bad.push((stripe, readable));
                    self.control.count(self.device(stripe), |c| match (readable, unit) {
                        (false, _) => c.read_errors += 1,
                        (true, Unit::Block(_)) => c.verify_errors += 1,
                        (true, _) => c.csum_errors += 1,
                    });
                }
            }
        }
        if still_bad.is_empty() {
            return Ok(());
        }
        let good = self.good(unit, &place, &still_bad);
        for (stripe, readable) in still_bad {
            match &good {
                Some(good) if self.write(stripe, place.offset, good) => {}
                _ => {
                    self.control.count(self.device(stripe), |c| c.uncorrectable += 1);
                    self.spoil(stripe, place.offset..place.offset + len);
                    let what = match unit {
                        _ if !readable => Damage::Unreadable,
                        Unit::Block(_) => Damage::TreeBlock,
                        _ => Damage::Data,
                    };
                    self.report(what, at, len, stripe)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn read_again(&self, stripe: usize, place: &Place, len: u64) -> Option<Vec<u8>> {
        let mut buf = vec![0; len as usize];
        self.control.own();
        let read = self.core.volume.read_place(self.at_device(stripe, place.offset), &mut buf);
        read.ok().map(|()| buf)
    }

    /// Good bytes, from another copy or from parity.
    fn good(&self, unit: Unit, place: &Place, bad: &[(usize, bool)]) -> Option<Vec<u8>> {
        let (at, len) = self.range(unit);
        let is_bad = |stripe: usize| bad.iter().any(|(b, _)| *b == stripe);
        for stripe in place.stripes.clone().filter(|s| !is_bad(*s)) {
            let bytes = self.loaded.copies[stripe].get(place.offset..place.offset + len);
            if let Some(bytes) = bytes.filter(|bytes| self.is_good(unit, bytes)) {
                return Some(bytes.to_vec());
            }
        }
        let mut buf = vec![0; len as usize];
        let ways = self.core.volume.copies(at).unwrap_or(0);
        (place.stripes.len()..ways).find_map(|way| {
            self.control.own();
            let read = self.core.volume.read_way(at, &mut buf, way).is_ok();
            (read && self.is_good(unit, &buf)).then(|| buf.clone())
        })
    }

    /// Writes good bytes over bad ones, unless the scrub only looks. Counts what it did. Returns
    /// whether the place is good now, or could be.
    pub(super) fn write(&mut self, stripe: usize, offset: u64, good: &[u8]) -> bool {
        if !self.options.read_only {
            self.control.own();
            let to = self.at_device(stripe, offset);
            if let Err(e) = self.core.volume.write_place(to, good) {
                tracing::warn!("scrub: {e}");
                return false;
            }
        }
        self.control.count(self.device(stripe), |c| c.corrected += 1);
        self.loaded.copies[stripe].set(offset, good);
        true
    }

    fn spoil(&mut self, stripe: usize, range: Range<u64>) {
        let sectors = range.start / SECTOR..range.end / SECTOR;
        self.spoiled.extend(sectors.map(|sector| (stripe, sector)));
    }

    /// Compares the copies of a sector that has no checksum, while nothing is written in place.
    fn mend_unsummed(&mut self, n: usize) -> Result<()> {
        let core = self.core;
        let at = self.loaded.content.address(n);
        let place = self.loaded.strip.place(at);
        let behind = core.volume.behind();
        let copy = |stripe: usize| &self.loaded.copies[stripe];
        let readable = |s: usize| {
            !copy(s).is_here || copy(s).get(place.offset..place.offset + SECTOR).is_some()
        };
        // Space that was only allocated holds anything.
        if behind.is_empty() && place.stripes.clone().all(readable) && !self.is_written(at)? {
            return Ok(());
        }
        let kept_out = core.in_place.write();
        let here = |stripe: &usize| self.loaded.copies[*stripe].is_here;
        let stripes: Vec<usize> = place.stripes.clone().filter(here).collect();
        let copies: Vec<(usize, Option<Vec<u8>>)> =
            stripes.iter().map(|s| (*s, self.read_again(*s, &place, SECTOR))).collect();
        for (stripe, copy) in &copies {
            match copy {
                None => self.control.count(self.device(*stripe), |c| c.read_errors += 1),
                Some(bytes) => self.loaded.copies[*stripe].set(place.offset, bytes),
            }
        }
        let believed: BTreeSet<&Vec<u8>> = copies
            .iter()
            .filter(|(stripe, _)| !behind.contains(&self.device(*stripe)))
            .filter_map(|(_, copy)| copy.as_ref())
            .collect();
        let right = match believed.len() {
            0 => self.by_parity(at, &place),
            1 => believed.first().map(|bytes| (*bytes).clone()),
            _ => None,
        };
        let differ = believed.len() > 1;
        for (stripe, copy) in &copies {
            let Some(right) = right.as_ref().filter(|right| copy.as_ref() != Some(right)) else {
                continue;
            };
            if copy.is_some() {
                self.control.count(self.device(*stripe), |c| c.differing += 1);
            }
            if !self.write(*stripe, place.offset, right) {
                self.control.count(self.device(*stripe), |c| c.uncorrectable += 1);
                self.spoil(*stripe, place.offset..place.offset + SECTOR);
            }
        }
        drop(kept_out);
        if right.is_some() {
            return Ok(());
        }
        let unreadable: Vec<usize> =
            copies.iter().filter(|(_, copy)| copy.is_none()).map(|(stripe, _)| *stripe).collect();
        for stripe in unreadable {
            self.control.count(self.device(stripe), |c| c.uncorrectable += 1);
            self.spoil(stripe, place.offset..place.offset + SECTOR);
            self.report(Damage::Unreadable, at, SECTOR, stripe)?;
        }
        if differ && self.is_written(at)? {
            self.control.count(self.device(place.stripes.start), |c| {
                c.differing += 1;
                c.uncorrectable += 1;
            });
            self.report(Damage::CopiesDiffer, at, SECTOR, place.stripes.start)?;
        }
        Ok(())
    }

    /// A sector as the rest of its row says, as far as that can be believed.
    fn by_parity(&self, at: Logical, place: &Place) -> Option<Vec<u8>> {
        if !self.loaded.strip.has_parity() {
            return None;
        }
        let mut buf = vec![0; SECTOR as usize];
        self.control.own();
        let volume = &self.core.volume;
        // The first way is the one with the devices that lack least.
        if volume.read(at, &mut buf, 0).is_ok() {
            return Some(buf);
        }
        let ways = volume.copies(at).unwrap_or(0);
        (place.stripes.len()..ways).find_map(|way| {
            self.control.own();
            volume.read_way(at, &mut buf, way).is_ok().then(|| buf.clone())
        })
    }

    /// Is there data, and not only space that a file has reserved?
    pub(super) fn is_written(&mut self, at: Logical) -> Result<bool> {
        Ok(self.uses(at)?.is_some_and(|uses| uses.is_written(at)))
    }

    fn uses(&mut self, at: Logical) -> Result<Option<&mut Uses>> {
        if !self.uses.as_ref().is_some_and(|uses| uses.has(at)) {
            self.uses = Uses::of(self.core, &self.loaded.view, at)?;
        }
        Ok(self.uses.as_mut())
    }

    /// Lists a place that stays bad.
    pub(super) fn report(
        &mut self,
        what: Damage,
        at: Logical,
        length: u64,
        stripe: usize,
    ) -> Result<()> {
        let core = self.core;
        let users = self.uses(at)?.map(|uses| uses.at(core, at)).unwrap_or_default();
        let place = self.loaded.strip.place(at);
        let on = self.at_device(stripe, place.offset);
        self.control.note(ScrubDamage {
            what,
            address: at.0,
            length,
            device: on.device.0,
            offset: on.at.0,
            extent: users.extent.map(|e| e.0),
            files: users.files,
            more_files: users.more,
            tree: users.tree,
        });
        Ok(())
    }
}
