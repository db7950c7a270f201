//! What logged data asks for: space, references and checksums.
//!
//! A logged extent names its data by address. If the extent tree knows the extent already, the file
//! gets one more reference to it. Otherwise the data was written after the last commit, and only
//! the log says that its space is in use. That space is taken before anything is allocated
//! ([`Claims`]). References and checksums are kept until all logs are known to be sound.

use super::source::damaged;
use crate::engine::Core;
use crate::error::{Place, Result};
use crate::file::SECTOR;
use crate::space::{Run, SpaceKind};
use crate::transaction::Handle;
use larder_format::items::ExtentRecord;
use larder_format::{Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::{BTreeMap, HashSet};

/// What happens to a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delta {
    Create,
    Add,
    Drop,
}

/// A change of an extent's references.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefChange {
    run: Run,
    ino: ObjectId,
    offset: u64,
    delta: Delta,
}

impl RefChange {
    pub(super) fn new(ino: ObjectId, start: u64, r: &ExtentRecord, delta: Delta) -> Self {
        let run = Run::new(r.disk_bytenr, r.disk_num_bytes);
        Self { run, ino, offset: start.wrapping_sub(r.offset), delta }
    }
    /// Notes the change.
    pub(super) fn note(&self, h: &mut Handle<'_>, subvol: TreeId) -> Result<()> {
        let (at, len, ino) = (self.run.start, self.run.len, self.ino.0);
        match self.delta {
            Delta::Create => h.create_data(at, len, subvol, ino, self.offset),
            Delta::Add => h.add_data_ref(at, len, subvol, ino, self.offset),
            Delta::Drop => h.drop_data_ref(at, len, subvol, ino, self.offset),
        }
    }
}

/// Checksums of logged data, by sector.
#[derive(Debug, Default)]
pub(super) struct Sums(pub(super) BTreeMap<Logical, Vec<u8>>);

impl Sums {
    /// Takes those of another log as well. For sectors that both have, they are the same.
    pub(super) fn take(&mut self, others: &mut Self) {
        self.0.append(&mut others.0);
    }
    /// Notes all of them, neighbours together.
    pub(super) fn note(self, h: &mut Handle<'_>) {
        const SECTORS: usize = 4096;
        let mut run: Option<(Logical, Vec<u8>, Logical, usize)> = None;
        for (at, sum) in self.0 {
            match &mut run {
                Some((_, sums, end, n)) if *end == at && *n < SECTORS => {
                    sums.extend_from_slice(&sum);
                    (*end, *n) = (at.plus(SECTOR), *n + 1);
                }
                _ => {
                    if let Some((start, sums, ..)) = run.replace((at, sum, at.plus(SECTOR), 1)) {
                        h.add_csums(start, sums);
                    }
                }
            }
        }
        if let Some((start, sums, ..)) = run {
            h.add_csums(start, sums);
        }
    }
}

/// Extents that only the log knew, and whose space is taken now.
#[derive(Debug, Default)]
pub(super) struct Claims(HashSet<Run>);

impl Claims {
    /// Makes sure that an extent's space belongs to it. True if the space was free before, so that
    /// the extent has to be recorded.
    pub(super) fn claim(&mut self, core: &Core, run: Run) -> Result<bool> {
        if self.0.contains(&run) {
            return Ok(false);
        }
        let key = Key::new(run.start, KeyType::EXTENT_ITEM, run.len);
        let extents = core.roots.extent.version(core.epochs.enter());
        if extents.get(&key)?.is_some() {
            return Ok(false);
        }
        let mut none = core.space.accounts.empty(SpaceKind::Data);
        if !core.space.groups.take_exact(run, &mut none)? {
            let what = format!("its extent of {} bytes is in use as something else", run.len);
            return Err(damaged(Place::block(run.start), what));
        }
        self.0.insert(run);
        Ok(true)
    }
}
