//! Access to what each device stores, for a scrub.
//!
//! Other callers ask for an address, and take the best copy. A scrub asks for a place of a device,
//! and judges what it finds there. What it writes is what should have been there already, so no
//! parity changes with it.

use super::{Member, Volume, Worth};
use crate::error::{VolumeError, VolumeResult};
use crate::map::Stripe;
use larder_format::{DeviceId, Logical};
use std::sync::atomic::Ordering::Relaxed;

impl Volume {
    /// Fills `buf` with what a place holds.
    ///
    /// # Errors
    /// [`VolumeError::Io`], also for a device that is missing.
    pub fn read_place(&self, place: Stripe, buf: &mut [u8]) -> VolumeResult<()> {
        self.read_stripe(place, buf)?;
        self.passed(place, buf.len() as u64);
        Ok(())
    }

    /// Writes over what a place holds.
    ///
    /// # Errors
    /// [`VolumeError::Io`]; [`VolumeError::Corrupt`] for a device that is missing.
    pub fn write_place(&self, place: Stripe, data: &[u8]) -> VolumeResult<()> {
        self.write_stripe(place, data)
    }

    /// Fills `buf` in one of the ways in which the bytes at `at` can be read, which are numbered
    /// as the profile has them. The range lies in one element.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] for a way that does not exist; [`VolumeError::Io`].
    pub fn read_way(&self, at: Logical, buf: &mut [u8], way: usize) -> VolumeResult<()> {
        let len = buf.len() as u64;
        let found = self.map.lookup(at, len)?;
        if found.len < len || way >= found.ways {
            return Err(VolumeError::Unmapped { at, len });
        }
        self.read_piece(at, &found, buf, way)
    }

    /// Does the best way to read the bytes at `at` use devices only that are up to date?
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`].
    pub fn is_current(&self, at: Logical) -> VolumeResult<bool> {
        let found = self.map.lookup(at, 1)?;
        let best = (0..found.ways).map(|way| self.worth(at, &found, way)).min();
        Ok(best == Some(Worth::Current))
    }

    /// May a device of that number be read and written?
    #[must_use]
    pub fn is_usable(&self, id: DeviceId) -> bool {
        self.member(id).is_some_and(|member| !member.has_failed())
    }

    /// Devices that were away while others were written, and hold anything where no checksum says
    /// what is right.
    #[must_use]
    pub fn behind(&self) -> Vec<DeviceId> {
        self.members.iter().filter(|m| m.behind > 0).map(|m| m.id).collect()
    }

    /// So many transfers were asked of the devices since the volume was opened, flushes included.
    #[must_use]
    pub fn transfers(&self) -> u64 {
        let of = |m: &Member| {
            let counters = [&m.counters.reads, &m.counters.writes, &m.counters.flushes];
            counters.iter().map(|c| c.load(Relaxed)).sum::<u64>()
        };
        self.members.iter().map(of).sum()
    }
}
