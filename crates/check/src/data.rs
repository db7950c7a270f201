//! File data against its checksums: every sector of every copy.

use crate::unpack::Unpacked;
use crate::world::Pass;
use larder_format::{Logical, SECTOR_SIZE};
use larder_volume::VolumeError;
use parking_lot::Mutex;
use std::sync::atomic::Ordering::Relaxed;

const SECTOR: usize = SECTOR_SIZE as usize;
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;
/// Most bad ranges that are remembered.
const RANGES: usize = 20_000;

/// A range of one copy that is bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bad {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) copy: usize,
    pub(crate) copies: usize,
    /// What the device said, if it could not be read.
    pub(crate) error: Option<String>,
}

/// What was found.
#[derive(Debug, Default)]
pub(crate) struct Data {
    pub(crate) bad: Mutex<Vec<Bad>>,
    pub(crate) unpacked: Unpacked,
}

impl Data {
    /// Compares the data from `at` on with the checksums of its sectors.
    pub(crate) fn verify(&self, pass: &Pass<'_>, at: u64, sums: &[&[u8]]) {
        let mut buffer = vec![0; PIECE.min(sums.len() * SECTOR)];
        for (n, sums) in sums.chunks(PIECE / SECTOR).enumerate() {
            let at = at.saturating_add((n * PIECE) as u64);
            let buffer = &mut buffer[..sums.len() * SECTOR];
            self.piece(pass, at, sums, buffer);
        }
    }

    fn piece(&self, pass: &Pass<'_>, at: u64, sums: &[&[u8]], buffer: &mut [u8]) {
        let world = pass.world;
        let volume = &world.source.volume;
        // What lies in no chunk is reported as checksums without an extent.
        let Ok(copies) = volume.copies(Logical(at)) else { return };
        for copy in 0..copies {
            world.meter.read(buffer.len() as u64);
            world.counts.data_bytes.fetch_add(buffer.len() as u64, Relaxed);
            let whole = volume.read(Logical(at), buffer, copy).is_ok();
            for (n, (sector, sum)) in buffer.chunks_exact_mut(SECTOR).zip(sums).enumerate() {
                let here = at + (n * SECTOR) as u64;
                if !whole && let Err(e) = volume.read(Logical(here), sector, copy) {
                    if matches!(e, VolumeError::Io { .. }) {
                        self.add(Bad {
                            at: here,
                            len: SECTOR as u64,
                            copy,
                            copies,
                            error: Some(e.to_string()),
                        });
                    }
                    continue;
                }
                if world.superblock.csum_type().compute(sector)[..sum.len()] != **sum {
                    self.add(Bad { at: here, len: SECTOR as u64, copy, copies, error: None });
                }
            }
        }
    }

    /// Was something in this range found to be bad?
    pub(crate) fn is_bad(&self, at: u64, len: u64) -> bool {
        self.bad
            .lock()
            .iter()
            .any(|b| b.at < at.saturating_add(len) && at < b.at.saturating_add(b.len))
    }

    fn add(&self, bad: Bad) {
        let mut all = self.bad.lock();
        if let Some(last) = all.last_mut()
            && last.at + last.len == bad.at
            && last.copy == bad.copy
            && last.error.is_none()
            && bad.error.is_none()
        {
            last.len += bad.len;
            return;
        }
        if all.len() < RANGES {
            all.push(bad);
        }
    }
}
