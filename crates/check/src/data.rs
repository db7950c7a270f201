//! File data against its checksums: every sector of every copy.

use crate::sets::SectorSet;
use crate::source::Source;
use larder_format::{Logical, LogicalRange, SECTOR_SIZE};
use larder_volume::VolumeError;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SECTOR: usize = SECTOR_SIZE as usize;
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;
/// Most bad ranges that are remembered.
const RANGES: usize = 20_000;

/// A range of one copy that is bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bad {
    pub(crate) range: LogicalRange,
    pub(crate) copy: usize,
    pub(crate) copies: usize,
    /// What the device said, if it could not be read.
    pub(crate) error: Option<String>,
}

/// What was found.
#[derive(Debug)]
pub(crate) struct Data {
    bad: Mutex<Vec<Bad>>,
    /// Compressed extents that were unpacked.
    pub(crate) unpacked: SectorSet,
    /// Bytes that were compared, over all copies.
    compared: AtomicU64,
}

impl Data {
    pub(crate) fn new() -> Self {
        let (bad, compared) = (Mutex::default(), AtomicU64::new(0));
        Self { bad, unpacked: SectorSet::new(), compared }
    }

    /// Compares the data from `at` on with the checksums of its sectors.
    pub(crate) fn verify(&self, source: &Source<'_>, at: Logical, sums: &[&[u8]]) {
        let mut buffer = vec![0; PIECE.min(sums.len() * SECTOR)];
        let (mut at, mut sums) = (at, sums);
        while !sums.is_empty() {
            // What lies together has the same copies.
            let most = sums.len().min(PIECE / SECTOR);
            let found = source.volume.map().lookup(at, (most * SECTOR) as u64);
            let together = found.map_or(most, |found| {
                usize::try_from(found.len).map_or(most, |len| (len / SECTOR).clamp(1, most))
            });
            let (here, rest) = sums.split_at(together);
            self.piece(source, at, here, &mut buffer[..together * SECTOR]);
            (at, sums) = (at.plus((together * SECTOR) as u64), rest);
        }
    }

    fn piece(&self, source: &Source<'_>, at: Logical, sums: &[&[u8]], buffer: &mut [u8]) {
        let volume = &source.volume;
        // What lies in no chunk is reported as checksums without an extent.
        let Ok((mut stored, others)) = volume.copies_to_check(at) else { return };
        if stored.is_empty() {
            stored.extend(others.into_iter().take(1));
        }
        let copies = stored.len();
        for copy in stored {
            source.meter.read(buffer.len() as u64);
            self.compared.fetch_add(buffer.len() as u64, Relaxed);
            let whole = volume.read(at, buffer, copy).is_ok();
            for (n, (sector, sum)) in buffer.chunks_exact_mut(SECTOR).zip(sums).enumerate() {
                let here = at.plus((n * SECTOR) as u64);
                let range = LogicalRange::new(here, SECTOR as u64);
                if !whole && let Err(e) = volume.read(here, sector, copy) {
                    if matches!(e, VolumeError::Io { .. }) {
                        self.add(Bad { range, copy, copies, error: Some(e.to_string()) });
                    }
                    continue;
                }
                if source.csum_type().compute(sector)[..sum.len()] != **sum {
                    self.add(Bad { range, copy, copies, error: None });
                }
            }
        }
    }

    /// Was something in this range found to be bad?
    pub(crate) fn is_bad(&self, range: LogicalRange) -> bool {
        self.bad.lock().iter().any(|bad| bad.range.overlaps(range))
    }

    /// All ranges that were found to be bad; they are forgotten here.
    pub(crate) fn take_bad(&self) -> Vec<Bad> {
        std::mem::take(&mut *self.bad.lock())
    }

    pub(crate) fn compared(&self) -> u64 {
        self.compared.load(Relaxed)
    }

    fn add(&self, bad: Bad) {
        let mut all = self.bad.lock();
        if let Some(last) = all.last_mut()
            && last.range.end == bad.range.start
            && last.copy == bad.copy
            && last.error.is_none()
            && bad.error.is_none()
        {
            last.range.end = bad.range.end;
            return;
        }
        if all.len() < RANGES {
            all.push(bad);
        }
    }
}
