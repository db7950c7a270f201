//! Where the checksums of data are.
//!
//! They are in three places: the notes of the running transaction, the notes of the sealed one, and
//! the last published checksum tree (never the one that the committer is editing). A [`View`] takes
//! all three at one moment, and within an epoch.

use super::dirty::{SECTOR_LEN, index};
use super::extents::SECTOR;
use crate::engine::Core;
use crate::error::Result;
use crate::space::{Run, csum_tree};
use crate::transaction::Txn;
use crate::tree::{Epoch, Version};
use larder_format::{CsumType, Generation, Logical, ObjectId};
use rayon::prelude::*;
use std::sync::Arc;

/// The places of checksums, all of one moment.
#[derive(Debug)]
pub(crate) struct View {
    pub(super) epoch: Epoch,
    /// Of the published tree, and of the running transaction.
    pub(super) state: (Generation, Generation),
    tree: Version,
    notes: [Option<Arc<Txn>>; 2],
}

impl View {
    /// A view of all checksums.
    pub(super) fn new(core: &Core) -> Self {
        let epoch = core.epochs.enter();
        core.txns.with_view(|v| Self {
            tree: Version {
                tree: ObjectId::CSUM_TREE,
                root: v.csum_root.clone(),
                store: core.store.clone(),
                epoch: epoch.clone(),
            },
            notes: [Some(v.running.clone()), v.sealed.clone()],
            state: (v.base, v.running.generation),
            epoch,
        })
    }
    /// The checksums that existed when the running transaction began; `None` if `txn` is not that.
    pub(crate) fn before(core: &Core, txn: &Txn) -> Option<Self> {
        let mut view = Self::new(core);
        view.notes[0] = None;
        (view.state.1 == txn.generation).then_some(view)
    }
    /// The checksums of a run of sectors, in order, and which of them exist.
    fn find(&self, core: &Core, run: Run) -> Result<(Vec<u8>, Vec<bool>)> {
        let size = core.csum.size();
        let count = index(run.len / SECTOR);
        let mut sums = vec![0; count * size];
        let mut known = vec![false; count];
        for txn in self.notes.iter().flatten() {
            noted(txn, run, size, &mut sums, &mut known);
        }
        if known.iter().any(|k| !k) {
            csum_tree::read(&mut self.tree.clone(), core.csum, run, &mut |at, sum| {
                let i = index((at.0 - run.start.0) / SECTOR);
                if let Some(sum) = sum
                    && !known[i]
                {
                    sums[i * size..(i + 1) * size].copy_from_slice(sum);
                    known[i] = true;
                }
            })?;
        }
        Ok((sums, known))
    }
    /// The checksums of a run of sectors, in order; `None` when one of them is in none of the
    /// places.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn all(&self, core: &Core, run: Run) -> Result<Option<Vec<u8>>> {
        let (sums, known) = self.find(core, run)?;
        Ok(known.iter().all(|k| *k).then_some(sums))
    }
    /// The existing checksums of a run of sectors. Sectors that lie side by side are one piece.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn pieces(&self, core: &Core, run: Run) -> Result<Vec<(Logical, Vec<u8>)>> {
        let (sums, known) = self.find(core, run)?;
        let sectors = sums.chunks_exact(core.csum.size()).zip(&known);
        let mut pieces: Vec<(Logical, Vec<u8>)> = Vec::new();
        let mut goes_on = false;
        let mut at = run.start;
        for (sum, known) in sectors {
            match pieces.last_mut() {
                Some((_, piece)) if *known && goes_on => piece.extend_from_slice(sum),
                _ if *known => pieces.push((at, sum.to_vec())),
                _ => {}
            }
            goes_on = *known;
            at = at.plus(SECTOR);
        }
        Ok(pieces)
    }
    /// Does any sector of the run have a checksum?
    ///
    /// # Errors
    /// Reading or corruption.
    pub(super) fn any(&self, core: &Core, run: Run) -> Result<bool> {
        let size = core.csum.size();
        let noted = self.notes.iter().flatten().any(|txn| {
            let sums = txn.csums.lock();
            let last = sums.range(..run.end()).next_back();
            last.is_some_and(|(at, s)| at.plus((s.len() / size) as u64 * SECTOR) > run.start)
        });
        let mut any = noted;
        if !noted {
            csum_tree::read(&mut self.tree.clone(), core.csum, run, &mut |_, sum| {
                any |= sum.is_some()
            })?;
        }
        Ok(any)
    }
}

/// Takes the checksums that a transaction has noted for a run of sectors.
fn noted(txn: &Txn, run: Run, size: usize, sums: &mut [u8], known: &mut [bool]) {
    let notes = txn.csums.lock();
    let first = notes.range(..=run.start).next_back().map_or(run.start, |(at, _)| *at);
    for (at, noted) in notes.range(first..run.end()) {
        let noted_run = Run::new(*at, (noted.len() / size) as u64 * SECTOR);
        let Some(part) = noted_run.intersect(run) else { continue };
        let from = index((part.start.0 - at.0) / SECTOR);
        let to = index((part.start.0 - run.start.0) / SECTOR);
        let n = index(part.len / SECTOR);
        for i in 0..n {
            if !known[to + i] {
                known[to + i] = true;
                sums[(to + i) * size..(to + i + 1) * size]
                    .copy_from_slice(&noted[(from + i) * size..(from + i + 1) * size]);
            }
        }
    }
}

/// Checksums of more than this are computed on several threads.
const PARALLEL: usize = 512 << 10;

/// Checksums of whole sectors.
pub(super) fn csums_of(csum: CsumType, slices: &[&[u8]], len: usize) -> Vec<u8> {
    let size = csum.size();
    let of = |data: &[u8], out: &mut Vec<u8>| {
        for sector in data.chunks_exact(SECTOR_LEN) {
            out.extend_from_slice(&csum.compute(sector)[..size]);
        }
    };
    if len < PARALLEL {
        let mut out = Vec::with_capacity(len / SECTOR_LEN * size);
        slices.iter().for_each(|s| of(s, &mut out));
        return out;
    }
    let chunks: Vec<&[u8]> = slices.iter().flat_map(|s| s.chunks(PARALLEL / 4)).collect();
    let sums: Vec<Vec<u8>> = chunks
        .par_iter()
        .map(|data| {
            let mut out = Vec::with_capacity(data.len() / SECTOR_LEN * size);
            of(data, &mut out);
            out
        })
        .collect();
    sums.concat()
}
