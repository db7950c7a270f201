//! A strip while it is judged: what can be good or bad in it, and what is done with a place.

use super::content::{Block, SECTOR};
use super::control::ScrubControl;
use super::load::Loaded;
use super::report::{Damage, ScrubDamage, ScrubOptions};
use super::users::Uses;
use crate::engine::Core;
use crate::error::Result;
use larder_format::node::NodeView;
use larder_format::{DeviceId, Logical};
use larder_volume::Stripe;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A strip that is being judged.
pub(super) struct Judged<'a, 'c> {
    pub(super) core: &'a Core,
    pub(super) control: &'a ScrubControl,
    pub(super) options: ScrubOptions,
    pub(super) loaded: &'a mut Loaded<'c>,
    /// Places that are still bad: stripe and sector.
    pub(super) spoiled: BTreeSet<(usize, u64)>,
    /// What uses the extent that was last asked about.
    pub(super) uses: Option<Uses>,
    /// What the rest of a row has last been asked for.
    pub(super) element: Option<Element>,
}

/// Something that is good or bad as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unit {
    /// A sector with a checksum, by its number.
    Sector(usize),
    /// A sector without.
    Unsummed(usize),
    Block(Block),
}

/// An element, as the rest of its row gives it.
#[derive(Debug)]
pub(super) struct Element {
    pub(super) start: Logical,
    /// What each way to work it out gave, if it gave anything.
    pub(super) ways: BTreeMap<usize, Option<Vec<u8>>>,
}

impl Judged<'_, '_> {
    pub(super) fn device(&self, stripe: usize) -> DeviceId {
        self.loaded.strip.chunk().stripes[stripe].device
    }

    pub(super) fn at_device(&self, stripe: usize, offset: u64) -> Stripe {
        self.loaded.strip.on_device(stripe, offset)
    }

    pub(super) fn range(&self, unit: Unit) -> (Logical, u64) {
        match unit {
            Unit::Sector(n) | Unit::Unsummed(n) => (self.loaded.content.address(n), SECTOR),
            Unit::Block(block) => (block.at, u64::from(self.core.nodesize())),
        }
    }

    pub(super) fn is_good(&self, unit: Unit, bytes: &[u8]) -> bool {
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

    /// Reads a part of a stripe from the device.
    pub(super) fn read_again(&self, stripe: usize, range: Range<u64>) -> Option<Vec<u8>> {
        let mut buf = vec![0; (range.end - range.start) as usize];
        self.control.own();
        let read = self.core.volume.read_place(self.at_device(stripe, range.start), &mut buf);
        read.ok().map(|()| buf)
    }

    /// Writes good bytes over bad ones, unless the scrub only looks. Returns whether the place is
    /// good now, or could be.
    pub(super) fn put(&self, stripe: usize, offset: u64, good: &[u8]) -> bool {
        if self.options.read_only {
            return true;
        }
        self.control.own();
        let written = self.core.volume.write_place(self.at_device(stripe, offset), good);
        written.inspect_err(|e| tracing::warn!("scrub: {e}")).is_ok()
    }

    /// The same for so many sectors. Counts what it did.
    pub(super) fn write(&mut self, stripe: usize, offset: u64, good: &[u8], sectors: u64) -> bool {
        let written = self.put(stripe, offset, good);
        if written {
            self.control.count(self.device(stripe), |c| c.corrected += sectors);
            self.loaded.copies[stripe].set(offset, good);
        }
        written
    }

    pub(super) fn spoil(&mut self, stripe: usize, range: Range<u64>) {
        let sectors = range.start / SECTOR..range.end / SECTOR;
        self.spoiled.extend(sectors.map(|sector| (stripe, sector)));
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
