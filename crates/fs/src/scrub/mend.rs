//! Which bytes are good, and what is written over bad ones.
//!
//! What does not match is read again before anything is said about it. What a missing device had is
//! only looked for elsewhere. Good bytes come from another copy or, with parity, from the rest of
//! the row (`sources`), and count only if they match. On a device that was away nearly everything
//! is bad, so what lies side by side is read again in one transfer, and repaired in one. Data
//! without checksums cannot be judged: where copies differ, the copy of a device that was never
//! away is taken. If there is more than one opinion among those, a device that was away gets one of
//! them, and nothing else is written.

use super::content::{SECTOR, Sector};
use super::control::ScrubControl;
use super::judged::{Judged, Unit};
use super::load::Loaded;
use super::report::{Damage, ScrubCounts, ScrubOptions};
use crate::engine::Core;
use crate::error::Result;
use larder_format::{DeviceId, Logical};
use larder_volume::Place;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Sectors that a thread judges in one go.
const STEP: usize = 64;

/// Something of which a copy is bad, and the stripes of bad copies.
struct Suspect {
    unit: Unit,
    bad: Vec<usize>,
}

/// A bad copy of something that can be judged.
#[derive(Clone, Copy, Debug)]
struct Bad {
    unit: Unit,
    /// Where it lies, and how far from the beginning of the strip.
    stripe: usize,
    offset: u64,
    len: u64,
    /// Can it be read at all?
    readable: bool,
}

impl Bad {
    fn end(&self) -> u64 {
        self.offset + self.len
    }
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
    let (spoiled, uses, element) = (BTreeSet::new(), None, None);
    let mut judged = Judged { core, control, options, loaded, spoiled, uses, element };
    judged.count();
    let (unsummed, others): (Vec<Suspect>, Vec<Suspect>) =
        judged.suspects().into_iter().partition(|s| matches!(s.unit, Unit::Unsummed(_)));
    judged.mend(others)?;
    for suspect in unsummed {
        if let Unit::Unsummed(n) = suspect.unit {
            judged.mend_unsummed(n)?;
        }
    }
    judged.look_for_missing()?;
    Ok(judged)
}

impl Judged<'_, '_> {
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

    /// Lists what lay on missing devices and cannot be had in any other way.
    fn look_for_missing(&mut self) -> Result<()> {
        if self.loaded.copies.iter().all(|copy| copy.is_here) {
            return Ok(());
        }
        for unit in self.units_of_missing() {
            let (at, len) = self.range(unit);
            let place = self.loaded.strip.place(at);
            if self.good(unit, &place, &[]).is_some() {
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

    /// Repairs copies of what can be judged.
    fn mend(&mut self, suspects: Vec<Suspect>) -> Result<()> {
        let mut bad = Vec::new();
        for Suspect { unit, bad: stripes } in suspects {
            let (at, len) = self.range(unit);
            let Place { offset, run, stripes: all } = self.loaded.strip.place(at);
            if run < len {
                self.report_block_across(at, len, all.start)?;
            } else {
                let one = |stripe| Bad { unit, stripe, offset, len, readable: true };
                bad.extend(stripes.into_iter().map(one));
            }
        }
        bad.sort_unstable_by_key(|bad| (bad.stripe, bad.offset));
        let bad = self.read_suspects_again(bad);
        for Bad { unit, stripe, readable, .. } in &bad {
            self.control.count(self.device(*stripe), |c| match (readable, unit) {
                (false, _) => c.read_errors += 1,
                (true, Unit::Block(_)) => c.verify_errors += 1,
                (true, _) => c.csum_errors += 1,
            });
        }
        let (repairs, lost) = self.repairs_of(&bad);
        let failed = self.carry_out(&repairs);
        for bad in lost.into_iter().chain(failed) {
            self.give_up(bad)?;
        }
        Ok(())
    }

    /// A block that lies in more than one element or strip is only looked at.
    fn report_block_across(&mut self, at: Logical, len: u64, stripe: usize) -> Result<()> {
        self.control.count(self.device(stripe), |c| {
            c.verify_errors += 1;
            c.uncorrectable += 1;
        });
        self.report(Damage::TreeBlock, at, len, stripe)
    }

    /// Reads suspects again, what lies side by side in one transfer. Returns those that are bad.
    fn read_suspects_again(&mut self, suspects: Vec<Bad>) -> Vec<Bad> {
        let mut bad = Vec::new();
        for run in suspects.chunk_by(lies_before) {
            let (first, end) = (run[0], run[run.len() - 1].end());
            let whole = self.read_again(first.stripe, first.offset..end);
            for suspect in run {
                let into = (suspect.offset - first.offset) as usize;
                let bytes = match &whole {
                    Some(bytes) => Some(bytes[into..into + suspect.len as usize].to_vec()),
                    None if run.len() > 1 => {
                        self.read_again(suspect.stripe, suspect.offset..suspect.end())
                    }
                    None => None,
                };
                let readable = bytes.is_some();
                match bytes.filter(|bytes| self.is_good(suspect.unit, bytes)) {
                    Some(bytes) => self.loaded.copies[suspect.stripe].set(suspect.offset, &bytes),
                    None => bad.push(Bad { readable, ..*suspect }),
                }
            }
        }
        bad
    }

    /// What is to be written over bad copies, and those for which nothing good is left.
    fn repairs_of(&mut self, all: &[Bad]) -> (Vec<(Bad, Vec<u8>)>, Vec<Bad>) {
        let places: BTreeSet<(usize, u64)> = all.iter().map(|b| (b.stripe, b.offset)).collect();
        let (mut repairs, mut lost) = (Vec::new(), Vec::new());
        for bad in all {
            let place = self.loaded.strip.place(self.range(bad.unit).0);
            let is_bad = |stripe: &usize| places.contains(&(*stripe, place.offset));
            let stripes: Vec<usize> = place.stripes.clone().filter(is_bad).collect();
            match self.good(bad.unit, &place, &stripes) {
                Some(good) => repairs.push((*bad, good)),
                None => lost.push(*bad),
            }
        }
        (repairs, lost)
    }

    /// Writes repairs, what lies side by side in one transfer. Returns those that failed.
    fn carry_out(&mut self, repairs: &[(Bad, Vec<u8>)]) -> Vec<Bad> {
        let mut failed = Vec::new();
        for run in repairs.chunk_by(|(a, _), (b, _)| lies_before(a, b)) {
            let first = run[0].0;
            let whole: Vec<u8> = run.iter().flat_map(|(_, good)| good).copied().collect();
            let all_written = self.put(first.stripe, first.offset, &whole);
            for (bad, good) in run {
                let alone = || run.len() > 1 && self.put(bad.stripe, bad.offset, good);
                if !all_written && !alone() {
                    failed.push(*bad);
                    continue;
                }
                self.control.count(self.device(bad.stripe), |c| c.corrected += 1);
                self.loaded.copies[bad.stripe].set(bad.offset, good);
            }
        }
        failed
    }

    /// Lists something that stays bad.
    fn give_up(&mut self, bad: Bad) -> Result<()> {
        self.control.count(self.device(bad.stripe), |c| c.uncorrectable += 1);
        self.spoil(bad.stripe, bad.offset..bad.end());
        let what = match bad.unit {
            _ if !bad.readable => Damage::Unreadable,
            Unit::Block(_) => Damage::TreeBlock,
            _ => Damage::Data,
        };
        let (at, len) = self.range(bad.unit);
        self.report(what, at, len, bad.stripe)
    }

    /// Compares the copies of a sector that has no checksum, while nothing is written in place.
    fn mend_unsummed(&mut self, n: usize) -> Result<()> {
        let core = self.core;
        let at = self.loaded.content.address(n);
        let place = self.loaded.strip.place(at);
        let copy = |stripe: usize| &self.loaded.copies[stripe];
        let readable = |s: usize| {
            !copy(s).is_here || copy(s).get(place.offset..place.offset + SECTOR).is_some()
        };
        // Space that was only allocated holds anything.
        if core.volume.behind().is_empty()
            && place.stripes.clone().all(readable)
            && !self.is_written(at)?
        {
            return Ok(());
        }
        let kept_out = core.in_place.write();
        let copies = self.copies_again(&place);
        let verdict = self.verdict(&copies, at, &place);
        for (stripe, right) in verdict.wrong {
            if copies[&stripe].is_some() {
                self.control.count(self.device(stripe), |c| c.differing += 1);
            }
            if !self.write(stripe, place.offset, &right, 1) {
                self.control.count(self.device(stripe), |c| c.uncorrectable += 1);
                self.spoil(stripe, place.offset..place.offset + SECTOR);
            }
        }
        drop(kept_out);
        for stripe in verdict.unreadable {
            self.control.count(self.device(stripe), |c| c.uncorrectable += 1);
            self.spoil(stripe, place.offset..place.offset + SECTOR);
            self.report(Damage::Unreadable, at, SECTOR, stripe)?;
        }
        if let Some(stripe) = verdict.doubtful
            && self.is_written(at)?
        {
            self.control.count(self.device(stripe), |c| {
                c.differing += 1;
                c.uncorrectable += 1;
            });
            self.report(Damage::CopiesDiffer, at, SECTOR, stripe)?;
        }
        Ok(())
    }

    /// Reads the copies of a sector, by stripe.
    fn copies_again(&mut self, place: &Place) -> Copies {
        let here = |stripe: &usize| self.loaded.copies[*stripe].is_here;
        let stripes: Vec<usize> = place.stripes.clone().filter(here).collect();
        let range = place.offset..place.offset + SECTOR;
        let copies: Copies =
            stripes.iter().map(|s| (*s, self.read_again(*s, range.clone()))).collect();
        for (stripe, copy) in &copies {
            match copy {
                None => self.control.count(self.device(*stripe), |c| c.read_errors += 1),
                Some(bytes) => self.loaded.copies[*stripe].set(place.offset, bytes),
            }
        }
        copies
    }

    /// What is to be done with the copies of a sector that has no checksum.
    fn verdict(&mut self, copies: &Copies, at: Logical, place: &Place) -> Verdict {
        let behind = self.core.volume.behind();
        let was_away =
            |stripe: usize| behind.contains(&self.loaded.strip.chunk().stripes[stripe].device);
        let believed = copies.iter().filter(|(stripe, _)| !was_away(**stripe));
        let believed: Vec<_> = believed.filter_map(|(s, c)| Some((*s, c.as_ref()?))).collect();
        let opinions: BTreeSet<&Vec<u8>> = believed.iter().map(|(_, bytes)| *bytes).collect();
        let differ = opinions.len() > 1;
        // One that was away becomes as good as one of the others.
        let may_be_judged = |stripe: usize| !differ || was_away(stripe);
        let judged: Vec<usize> = copies.keys().copied().filter(|s| may_be_judged(*s)).collect();
        let unreadable =
            copies.iter().filter(|(_, copy)| copy.is_none()).map(|(stripe, _)| *stripe);
        let doubtful = believed.first().map(|(stripe, _)| *stripe).filter(|_| differ);
        let right = match believed.first() {
            Some((_, bytes)) => Some((*bytes).clone()),
            None => self.by_parity(at, place),
        };
        let Some(right) = right else {
            return Verdict { wrong: Vec::new(), unreadable: unreadable.collect(), doubtful };
        };
        let is_wrong = |stripe: &usize| match &copies[stripe] {
            Some(bytes) => *bytes != right && !opinions.contains(bytes),
            None => true,
        };
        let unreadable = unreadable.filter(|stripe| !judged.contains(stripe)).collect();
        let wrong = judged.iter().filter(|s| is_wrong(s)).map(|s| (*s, right.clone())).collect();
        Verdict { wrong, unreadable, doubtful }
    }
}

/// The copies of a sector that can be read, and those that cannot, by stripe.
type Copies = BTreeMap<usize, Option<Vec<u8>>>;

/// What is to be done with the copies of a sector that has no checksum.
struct Verdict {
    /// Copies that are wrong, and what is right.
    wrong: Vec<(usize, Vec<u8>)>,
    /// Copies for which nothing is known.
    unreadable: Vec<usize>,
    /// The first of those that say different things, each of which may be right.
    doubtful: Option<usize>,
}

/// Lies the second right behind the first, on the same device?
fn lies_before(a: &Bad, b: &Bad) -> bool {
    a.stripe == b.stripe && a.end() == b.offset
}
