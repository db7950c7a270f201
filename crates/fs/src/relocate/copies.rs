//! Copies of data extents, made before the transaction in which files get them.
//!
//! Extents that are going to be copied lie behind each other on a *shelf*: one new place for many.
//! So the allocator is asked once, and devices get long reads and writes. Where there is parity, a
//! row of one shelf is written in one step, and nothing else comes into it.

use super::survey::Extent;
use crate::engine::Core;
use crate::error::Result;
use crate::file::moving::{Sums, copy_extents};
use crate::space::free_index::Lengths;
use crate::space::{Run, SpaceKind};
use crate::transaction::Handle;
use larder_format::{Generation, Logical};
use larder_volume::TransferMemory;
use std::collections::HashMap;

/// Bytes of a shelf, unless one extent is longer.
const SHELF: u64 = 16 << 20;

/// How a data extent moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// It is no data extent, or nothing that stays refers to it.
    Not,
    /// It has bytes.
    Copy,
    /// It is merely reserved.
    Reserve,
}

/// The copy of an extent that has more users than one batch moves. Some point to the copy already.
#[derive(Clone, Copy, Debug)]
pub(super) struct HalfMoved {
    /// Where the extent lies.
    pub(super) from: Logical,
    /// Where its copy lies.
    pub(super) copy: Run,
    /// The transaction that made the copy. Another extent at its place has another.
    pub(super) made: Generation,
}

/// New places of data extents.
#[derive(Debug, Default)]
pub(super) struct Copies {
    places: HashMap<Logical, Logical>,
    /// Space that was taken for them.
    taken: Vec<Run>,
    /// Each copy.
    copies: Vec<(Logical, Run)>,
    sums: Sums,
    /// By way of which they are copied.
    memory: TransferMemory,
}

impl Copies {
    /// Copies those extents of a list that are to be copied, each once. Of a list of parts all lie
    /// behind each other. The one that is half moved has its copy.
    ///
    /// # Errors
    /// No space; reading, `Corrupt` for bytes that match their checksum in no copy; the device.
    /// Nothing is taken then.
    pub(super) fn make(
        core: &Core,
        list: &[Extent],
        hows: &[How],
        half_moved: Option<&HalfMoved>,
    ) -> Result<Self> {
        let mut wanted: Vec<(Run, How)> =
            list.iter().map(|e| e.run).zip(hows.iter().copied()).collect();
        wanted.retain(|w| w.1 != How::Not && half_moved.is_none_or(|half| half.from != w.0.start));
        wanted.dedup_by_key(|w| w.0.start);
        let mut copies = Self::default();
        let mut rest = &wanted[..];
        while !rest.is_empty() {
            match copies.fill_shelf(core, rest) {
                Ok(copied) => rest = &rest[copied..],
                Err(e) => {
                    copies.give_back(core);
                    return Err(e);
                }
            }
        }
        copies.memory = TransferMemory::default();
        Ok(copies)
    }

    /// Copies the first extents of a list to one place. Returns how many fit there, at least one.
    fn fill_shelf(&mut self, core: &Core, wanted: &[(Run, How)]) -> Result<usize> {
        let (first, how) = wanted[0];
        let alike = || wanted.iter().take_while(|w| w.1 == how).map(|w| w.0);
        // Where data and metadata share groups, long pieces leave the commit short of space.
        let shelf = if core.space.accounts.is_mixed() { 0 } else { SHELF };
        let most = fitting(alike(), shelf.max(first.len)).1;
        let mut space = core.space.accounts.reserve(SpaceKind::Data, most)?;
        let lengths = Lengths { most, least: first.len };
        let run = core.space.allocate_data(&core.txns, lengths, &mut space)?;
        core.compression.forget(run);
        let (count, len) = fitting(alike(), run.len);
        let shelf = Run::new(run.start, len);
        if let Some(rest) = Run::between(shelf.end(), run.end()) {
            core.space.give_back(rest, Some(&mut space));
        }
        self.taken.push(shelf);
        let sources: Vec<Run> = alike().take(count).collect();
        if how == How::Copy {
            self.sums.extend(copy_extents(core, &sources, shelf, &mut self.memory)?);
        }
        let mut at = shelf.start;
        for source in sources {
            self.places.insert(source.start, at);
            self.copies.push((source.start, Run::new(at, source.len)));
            at = at.plus(source.len);
        }
        Ok(count)
    }

    /// Gives the space back, because no transaction will have the copies.
    pub(super) fn give_back(self, core: &Core) {
        self.taken.into_iter().for_each(|run| core.space.give_back(run, None));
    }

    /// Notes the copies in a transaction. A copy that nothing will refer to is freed by the commit.
    ///
    /// # Errors
    /// `Corrupt` when something on the device refers to space that is recorded as free.
    pub(super) fn note(&mut self, core: &Core, h: &mut Handle<'_>) -> Result<()> {
        for (_, copy) in &self.copies {
            core.note_data(&h.txn, *copy)?;
        }
        for (at, sums) in std::mem::take(&mut self.sums) {
            h.add_csums(at, sums);
        }
        h.noted_refs(self.copies.len() as u64);
        Ok(())
    }

    /// Users of an extent that is half moved get the copy that there is.
    pub(super) fn go_on_with(&mut self, half: &HalfMoved) {
        self.places.insert(half.from, half.copy.start);
    }

    /// Where extents lie now, by their old address.
    pub(super) fn places(&self) -> &HashMap<Logical, Logical> {
        &self.places
    }

    /// The copy of this extent, if it was made here.
    pub(super) fn copy_of(&self, from: Logical) -> Option<Run> {
        self.copies.iter().rev().find(|copy| copy.0 == from).map(|copy| copy.1)
    }
}

/// How many of these runs have so many bytes together at most, and how many bytes these have.
fn fitting(runs: impl Iterator<Item = Run>, bytes: u64) -> (usize, u64) {
    runs.scan(0, |total, run| {
        *total += run.len;
        Some(*total)
    })
    .take_while(|total| *total <= bytes)
    .enumerate()
    .last()
    .map_or((0, 0), |(n, total)| (n + 1, total))
}
