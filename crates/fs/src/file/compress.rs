//! Compressing data on its way to the device: whether, how, and the work itself.
//!
//! **Whether** is decided as Linux does, but for one thing. Linux marks an inode as incompressible
//! at the first piece that does not shrink. Here that takes evidence: nothing of a run shrank, and
//! what failed is half of the file or [`EVIDENCE`] bytes. `docs/FILE-DATA.md` has all the rules.
//!
//! **How**: a run is cut into pieces of 128 KiB, the most that the format allows. Each piece is
//! tried by itself, on all cores. A piece that does not become shorter by at least a sector is
//! stored as it is; neighbours that are stored so become one extent again.
//!
//! Everything here runs in write-back, with no lock held. Memory is bounded: a batch takes at most
//! [`BATCH`] bytes of a file that is to be compressed, and holds less than that in packed form.
//! Packers are kept from one batch to the next, at most one per core while they are in use, and
//! [`IDLE_PACKERS`] otherwise.

use super::dirty::SECTOR_LEN;
use super::property;
use crate::api::Compress;
use crate::engine::compression::{CompressionState, wanted};
use crate::engine::{Core, Inode};
use larder_codec::{Packing, promising};
use larder_format::MAX_COMPRESSED_EXTENT;
use larder_format::items::{Compression, InodeFlags};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that one batch takes at most of one file that is to be compressed.
const BATCH: u64 = 4 << 20;
/// So many bytes that did not shrink are evidence for the whole file, however long it is.
const EVIDENCE: u64 = 1 << 20;
/// Packers that are kept while none is needed.
const IDLE_PACKERS: usize = 4;

/// How an inode's data is to be compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompressionChoice {
    packing: Packing,
    /// Compress without asking whether the data looks promising.
    force: bool,
    /// The inode's property asks for it: a failure does not mark the inode.
    own: bool,
}

/// How the inode's data is to be compressed; `None` if it is not.
pub(super) fn choice(core: &Core, inode: &Inode) -> Option<CompressionChoice> {
    let flags = inode.flags();
    if !wanted(core, flags) {
        return None;
    }
    let mount = core.options.compress;
    let force = mount.is_some_and(|m| m.force);
    // A property that cannot be read now must not keep the data from being written.
    let own = if flags.contains(InodeFlags::COMPRESS) {
        property::packing(core, inode).unwrap_or_default()
    } else {
        None
    };
    let packing = match (own, mount) {
        // The mount's level is meant for its method, also where the inode's property chose that.
        (Some(own), Some(Compress { packing, .. })) if own == default_of(packing.method()) => {
            packing
        }
        (Some(own), _) => own,
        (None, Some(mount)) => mount.packing,
        (None, None) => Packing::default(),
    };
    Some(CompressionChoice { packing, force, own: own.is_some() })
}

fn default_of(method: Compression) -> Packing {
    Packing::new(method, None).unwrap_or_default()
}

/// Bytes to take of an inode in one batch; `usual` for one that is not compressed.
pub(super) fn batch(core: &Core, inode: &Inode, usual: u64) -> u64 {
    if wanted(core, inode.flags()) { usual.min(BATCH) } else { usual }
}

/// Bytes in their compressed form.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) method: Compression,
    /// For an extent: filled up to a sector's end. For a leaf: nothing follows the stream.
    pub(super) data: Vec<u8>,
    counted: Option<Arc<CompressionState>>,
}

impl Drop for Packed {
    fn drop(&mut self) {
        if let Some(state) = &self.counted {
            state.stats.held.fetch_sub(self.data.len() as u64, Ordering::Relaxed);
        }
    }
}

/// A part of a run that becomes one extent, or several where it is stored as it is.
#[derive(Debug)]
pub(super) struct Part {
    /// Where it is, in bytes from the run's first sector.
    pub(super) range: Range<u64>,
    /// What is stored instead of these bytes.
    pub(super) packed: Option<Packed>,
}

impl Part {
    /// Bytes of device space that it needs.
    pub(super) fn stored(&self) -> u64 {
        self.packed.as_ref().map_or(self.range.end - self.range.start, |p| p.data.len() as u64)
    }
}

/// A piece whose compression is to be tried.
#[derive(Debug)]
pub(super) struct Job<'a> {
    choice: CompressionChoice,
    range: Range<u64>,
    slices: Vec<&'a [u8]>,
    /// A longer result is of no use.
    limit: usize,
    inline: bool,
}

/// The result of a job.
#[derive(Debug)]
pub(super) struct Done {
    range: Range<u64>,
    packed: Option<Packed>,
    failed: bool,
}

/// The results of all jobs of a run.
#[derive(Debug)]
pub(super) struct Assembled {
    pub(super) parts: Vec<Part>,
    /// Bytes that did not shrink although that was tried.
    failed: u64,
}

impl Assembled {
    /// Is a file of `size` bytes to be marked as incompressible?
    pub(super) fn is_evidence(&self, size: u64) -> bool {
        let nothing_shrank = self.parts.iter().all(|p| p.packed.is_none());
        let much = self.failed >= EVIDENCE || 2 * self.failed >= size;
        self.failed > 0 && nothing_shrank && much
    }
}

/// Jobs for a run of `len` bytes, in whole sectors. `slices` gives its bytes.
pub(super) fn jobs<'a>(
    choice: CompressionChoice,
    len: u64,
    slices: impl Fn(Range<u64>) -> Vec<&'a [u8]>,
    out: &mut Vec<Job<'a>>,
) -> usize {
    let before = out.len();
    let mut at = 0;
    // A single sector cannot become shorter.
    while len - at > SECTOR_LEN as u64 {
        let range = at..len.min(at + MAX_COMPRESSED_EXTENT);
        at = range.end;
        let bytes = usize::try_from(range.end - range.start).expect("a piece");
        let slices = slices(range.clone());
        out.push(Job { choice, range, slices, limit: bytes - SECTOR_LEN, inline: false });
    }
    out.len() - before
}

/// The job for a file that may go into its leaf, which has room for `limit` bytes.
pub(super) fn inline_job(choice: CompressionChoice, slices: Vec<&[u8]>, limit: usize) -> Job<'_> {
    let len: usize = slices.iter().map(|s| s.len()).sum();
    Job { choice, range: 0..len as u64, slices, limit: limit.min(len - 1), inline: true }
}

/// Does all jobs, on all cores. The results are in the order of the jobs.
pub(super) fn run(core: &Core, jobs: &[Job<'_>]) -> Vec<Done> {
    match jobs {
        [job] => vec![job.run(&core.compression)],
        _ => jobs.par_iter().map(|job| job.run(&core.compression)).collect(),
    }
}

impl Job<'_> {
    fn run(&self, state: &Arc<CompressionState>) -> Done {
        let stats = &state.stats;
        let len = self.range.end - self.range.start;
        let data = match &self.slices[..] {
            [one] => Cow::Borrowed(*one),
            several => Cow::Owned(several.concat()),
        };
        let done = |packed, failed| Done { range: self.range.clone(), packed, failed };
        if !self.choice.force && !promising(&data) {
            stats.skipped.fetch_add(len, Ordering::Relaxed);
            return done(None, false);
        }
        let mut packer = state.packers.lock().pop().unwrap_or_default();
        let packed = packer.pack(self.choice.packing, &data, self.limit).map(|stream| {
            let room =
                if self.inline { stream.len() } else { stream.len().next_multiple_of(SECTOR_LEN) };
            let mut data = Vec::with_capacity(room);
            data.extend_from_slice(stream);
            data.resize(room, 0);
            stats.held.fetch_add(data.len() as u64, Ordering::Relaxed);
            Packed { method: self.choice.packing.method(), data, counted: Some(state.clone()) }
        });
        {
            let mut packers = state.packers.lock();
            if packers.len() < IDLE_PACKERS {
                packers.push(packer);
            }
        }
        match &packed {
            Some(p) => {
                stats.raw.fetch_add(len, Ordering::Relaxed);
                stats.packed.fetch_add(p.data.len() as u64, Ordering::Relaxed);
            }
            None => {
                stats.failed.fetch_add(len, Ordering::Relaxed);
            }
        }
        let failed = packed.is_none() && !self.inline && !self.choice.force && !self.choice.own;
        done(packed, failed)
    }
}

impl Done {
    /// What is stored instead of the bytes, if compression helped.
    pub(super) fn into_packed(self) -> Option<Packed> {
        self.packed
    }
}

/// Puts a run of `len` bytes together from the results of its jobs.
pub(super) fn assemble(len: u64, done: impl Iterator<Item = Done>) -> Assembled {
    let mut parts: Vec<Part> = Vec::new();
    let mut failed = 0;
    let plain = |parts: &mut Vec<Part>, range: Range<u64>| match parts.last_mut() {
        Some(Part { range: last, packed: None }) if last.end == range.start => last.end = range.end,
        _ if range.is_empty() => {}
        _ => parts.push(Part { range, packed: None }),
    };
    let mut at = 0;
    for d in done {
        plain(&mut parts, at..d.range.start);
        at = d.range.end;
        failed += if d.failed { d.range.end - d.range.start } else { 0 };
        match d.packed {
            Some(packed) => parts.push(Part { range: d.range, packed: Some(packed) }),
            None => plain(&mut parts, d.range),
        }
    }
    plain(&mut parts, at..len);
    Assembled { parts, failed }
}

/// Marks an inode whose data did not shrink. The caller notes that the item has to be written.
pub(super) fn mark_incompressible(inode: &Inode) {
    let mut state = inode.state.lock();
    let flags = state.item.inode_flags();
    // The property may have been set meanwhile.
    if !flags.contains(InodeFlags::COMPRESS) {
        state.item.set_inode_flags(flags | InodeFlags::NOCOMPRESS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(range: Range<u64>, stored: Option<usize>) -> Done {
        let packed =
            stored.map(|n| Packed { method: Compression::Zstd, data: vec![0; n], counted: None });
        Done { range, failed: packed.is_none(), packed }
    }

    #[test]
    fn what_is_stored_as_it_is_becomes_one() {
        let k = |n: u64| n << 10;
        let all = [
            done(0..k(128), None),
            done(k(128)..k(256), None),
            done(k(256)..k(384), Some(4096)),
            done(k(384)..k(512), None),
        ];
        let assembled = assemble(k(516), all.into_iter());
        let shown: Vec<_> = assembled.parts.iter().map(|p| (p.range.clone(), p.stored())).collect();
        assert_eq!(shown, [(0..k(256), k(256)), (k(256)..k(384), 4096), (k(384)..k(516), k(132))]);
        assert!(!assembled.is_evidence(k(516)), "something shrank");
        let assembled = assemble(k(4), std::iter::empty());
        assert_eq!(assembled.parts.len(), 1);
        assert!(!assembled.is_evidence(k(4)));
        let mark =
            |len: u64, size| assemble(len, [done(0..len, None)].into_iter()).is_evidence(size);
        assert!(mark(k(8), k(8)) && mark(k(8), k(16)) && mark(k(1024), u64::MAX));
        assert!(!mark(k(28), k(300 << 10)), "the end of a long file says little");
    }

    #[test]
    fn jobs_cover_all_but_a_last_sector() {
        let zeros = vec![0; 300 << 10];
        let choice = CompressionChoice { packing: Packing::default(), force: false, own: false };
        for (len, want) in
            [(4096, 0), (8192, 1), (128 << 10, 1), (132 << 10, 1), (136 << 10, 2), (300 << 10, 3)]
        {
            let mut out = Vec::new();
            let slices = |r: Range<u64>| vec![&zeros[r.start as usize..r.end as usize]];
            assert_eq!(jobs(choice, len, slices, &mut out), want, "{len}");
            assert!(out.iter().all(|j| j.range.end - j.range.start <= MAX_COMPRESSED_EXTENT));
        }
    }
}
