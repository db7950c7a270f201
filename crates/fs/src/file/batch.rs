//! A batch of write-back: runs in flight with their sectors made whole, and the handle under which
//! they enter their trees.
//!
//! [`super::writeback`] and [`super::nocow`] work on it. Nothing is written to a device here.

use super::compress::{Packed, Part};
use super::dirty::{Gaps, SECTOR_LEN, Taken, index};
use super::extents::{SECTOR, floor};
use super::join;
use super::replace::{Fresh, RESERVE_ITEMS};
use crate::engine::delalloc::Submission;
use crate::engine::file_data::RunInFlight;
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::space::reserve::Reservation;
use crate::space::{Run, SpaceKind};
use crate::transaction::Handle;
use larder_format::items::InodeFlags;
use smallvec::SmallVec;
use std::ops::Range;

/// Edits under one handle at most, because a seal waits for handles.
const EDITS_PER_HANDLE: usize = 64;

/// Where a stretch of whole sectors lies in memory.
#[derive(Debug)]
enum Source {
    /// In a segment of the run.
    Part(usize, Range<usize>),
    /// In the image's own buffer.
    Made(Range<usize>),
}

/// The sectors of a run in flight, made whole.
#[derive(Debug, Default)]
pub(super) struct Image {
    made: Vec<u8>,
    sources: SmallVec<[Source; 1]>,
}

impl Image {
    /// The sectors of a run: borrowed from its segments where these fill sectors, and assembled
    /// where they do not.
    ///
    /// # Errors
    /// Reading the rest of a sector failed.
    pub(super) fn new(core: &Core, inode: &Inode, run: &RunInFlight) -> Result<Self> {
        let taken = &run.taken;
        let mut image = Self::default();
        let (mut at, mut i) = (taken.start, 0);
        while at < taken.end {
            while taken.parts[i].0 + taken.parts[i].1.len() as u64 <= at {
                i += 1;
            }
            let (start, data) = &taken.parts[i];
            let whole_end = floor(start + data.len() as u64);
            if *start <= at && whole_end > at {
                image.sources.push(Source::Part(i, index(at - start)..index(whole_end - start)));
                at = whole_end;
            } else {
                image.make(core, inode, run, at)?;
                at += SECTOR;
            }
        }
        Ok(image)
    }
    /// Assembles the sector at `at`.
    fn make(&mut self, core: &Core, inode: &Inode, run: &RunInFlight, at: u64) -> Result<()> {
        let RunInFlight { taken, size, .. } = run;
        let size = *size;
        let from = self.made.len();
        self.made.resize(from + SECTOR_LEN, 0);
        let sector = &mut self.made[from..];
        let mut gaps = Gaps::new(at, SECTOR_LEN);
        taken.overlay(sector, &mut gaps);
        if gaps.left().iter().any(|gap| gap.start < size) {
            let mut below = vec![0; index((at + SECTOR).min(size) - at)];
            super::read::read_extents(core, inode, at, &mut below)?;
            for gap in gaps.left() {
                if gap.start < size {
                    let range = index(gap.start - at)..index(gap.end.min(size) - at);
                    sector[range.clone()].copy_from_slice(&below[range]);
                }
            }
        }
        match self.sources.last_mut() {
            Some(Source::Made(range)) if range.end == from => range.end = self.made.len(),
            _ => self.sources.push(Source::Made(from..self.made.len())),
        }
        Ok(())
    }
    /// The bytes of a range of the sectors, in order.
    pub(super) fn slices<'a>(&'a self, taken: &'a Taken, range: Range<u64>) -> Vec<&'a [u8]> {
        let mut out = Vec::with_capacity(self.sources.len());
        let mut at = 0;
        for source in &self.sources {
            let data = match source {
                Source::Part(i, r) => &taken.parts[*i].1[r.clone()],
                Source::Made(r) => &self.made[r.clone()],
            };
            let end = at + data.len() as u64;
            let (a, b) = (range.start.max(at), range.end.min(end));
            if a < b {
                out.push(&data[index(a - at)..index(b - at)]);
            }
            at = end;
        }
        out
    }
}

/// A part of a run's sectors that becomes one extent.
#[derive(Debug)]
pub(super) struct Piece {
    /// Where it is, in bytes from the run's first sector.
    pub(super) range: Range<u64>,
    /// What is stored instead of these bytes.
    pub(super) packed: Option<Packed>,
    pub(super) run: Run,
    pub(super) csums: Vec<u8>,
}

impl Piece {
    /// The bytes that are stored, in order.
    pub(super) fn slices<'a>(&'a self, image: &'a Image, taken: &'a Taken) -> Vec<&'a [u8]> {
        match &self.packed {
            Some(packed) => vec![&packed.data],
            None => image.slices(taken, self.range.clone()),
        }
    }
}

/// A run in flight and how far it has come in the steps of write-back.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) submission: Submission,
    pub(super) image: Image,
    /// Some of it may have been written in place. If all of it was, the run is complete.
    pub(super) in_place: bool,
    pub(super) completed: bool,
    /// What is to be stored, in order, as long as it has no space yet.
    pub(super) parts: Vec<Part>,
    pub(super) pieces: SmallVec<[Piece; 1]>,
    /// Pieces that the transaction owns already, counted from the first.
    pub(super) created: usize,
    pub(super) verified: bool,
    /// The run goes into the leaf.
    pub(super) inline: bool,
    /// The form in which it goes there.
    pub(super) leaf: Option<Packed>,
    /// Compression was tried, and the inode is to be marked: it is of no use.
    pub(super) incompressible: bool,
    pub(super) failed: Option<Error>,
}

impl Item {
    pub(super) fn new(core: &Core, submission: Submission) -> Self {
        let in_flight = &submission.in_flight;
        let verified =
            !submission.inode.state.lock().item.inode_flags().contains(InodeFlags::NODATASUM);
        let (image, failed) = match Image::new(core, &submission.inode, in_flight) {
            Ok(image) => (image, None),
            Err(e) => (Image::default(), Some(e)),
        };
        Self {
            submission,
            image,
            in_place: false,
            completed: false,
            parts: Vec::new(),
            pieces: SmallVec::new(),
            created: 0,
            verified,
            inline: false,
            leaf: None,
            incompressible: false,
            failed,
        }
    }
    pub(super) fn taken(&self) -> &Taken {
        &self.submission.in_flight.taken
    }
    /// Bytes of its sectors.
    pub(super) fn len(&self) -> u64 {
        self.taken().span()
    }
    /// Bytes of device space that it needs.
    pub(super) fn stored(&self) -> u64 {
        self.parts.iter().map(Part::stored).sum()
    }
    /// The bytes of a range of its sectors, in order.
    pub(super) fn slices(&self, range: Range<u64>) -> Vec<&[u8]> {
        self.image.slices(self.taken(), range)
    }
    /// Do its sectors get checksums?
    pub(super) fn is_verified(&self) -> bool {
        self.verified
    }
    /// Its extent, if the run is short, not compressed, and becomes one extent alone.
    pub(super) fn fresh(&self) -> Option<Fresh> {
        let [Piece { packed: None, run, .. }] = self.pieces.as_slice() else { return None };
        let special = self.completed || self.inline || self.in_place || self.incompressible;
        let short = run.len == self.len() && run.len < join::WORTH_IT;
        (short && !special && self.failed.is_none())
            .then(|| Fresh { start: self.taken().start, run: *run })
    }
    pub(super) fn fail(&mut self, e: Error) {
        self.failed.get_or_insert(e);
    }
}

/// A transaction handle that is renewed from time to time.
pub(super) struct Handles<'a> {
    pub(super) core: &'a Core,
    reserved: Option<Reservation>,
    handle: Option<Handle<'a>>,
    edits: usize,
}

impl<'a> Handles<'a> {
    pub(super) fn new(core: &'a Core, reserved: Option<Reservation>) -> Self {
        Self { core, reserved, handle: None, edits: 0 }
    }
    /// Leaves the transaction; the next edit joins again.
    pub(super) fn leave(&mut self) {
        self.handle = None;
    }
    /// The handle that [`Self::get`] gave last.
    pub(super) fn get_same(&mut self) -> &mut Handle<'a> {
        self.handle.as_mut().expect("`get` was called, and `leave` not since")
    }
    /// A handle with room for a change.
    ///
    /// # Errors
    /// No space for the change; writing has ended.
    pub(super) fn get(&mut self) -> Result<&mut Handle<'a>> {
        self.get_for(1)
    }
    /// A handle with room for a change that counts as so many edits.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn get_for(&mut self, edits: usize) -> Result<&mut Handle<'a>> {
        self.edits += edits;
        if self.edits > EDITS_PER_HANDLE || self.handle.as_ref().is_some_and(Handle::is_exhausted) {
            self.handle = None;
            self.edits = edits;
        }
        if self.handle.is_none() {
            let mut reserved = self
                .reserved
                .take()
                .unwrap_or_else(|| self.core.space.accounts.empty(SpaceKind::Metadata));
            // A write reserves for one run of one file. There may be many runs.
            if !self.core.top_up_for(&mut reserved, RESERVE_ITEMS) {
                // No handle and no lock is held here. If a commit does not help, the global reserve
                // pays.
                self.core.commit_now()?;
                self.core.top_up_for(&mut reserved, RESERVE_ITEMS);
            }
            self.handle = Some(Handle::join_with(self.core, reserved)?);
        }
        Ok(self.handle.as_mut().expect("just made"))
    }
}
