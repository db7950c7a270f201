//! Access to what each device stores, for a scrub.
//!
//! Other callers ask for an address, and take the best copy. A scrub asks for a place of a device,
//! and judges what it finds there. What it writes is what should have been there already, so no
//! parity changes with it.

use super::{Copies, Member, Volume, Worth, missing};
use crate::error::{VolumeError, VolumeResult};
use crate::map::Stripe;
use larder_format::Logical;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl Volume {
    /// Fills `buf` with what a place holds, on the medium and not in the machine's page cache.
    ///
    /// # Errors
    /// [`VolumeError::Io`], also for a device that is missing.
    pub fn read_place(&self, place: Stripe, buf: &mut [u8]) -> VolumeResult<()> {
        let len = buf.len() as u64;
        let Some(member) = self.member(place.device) else { return Err(missing(place, len)) };
        member.counters.reads.fetch_add(1, Relaxed);
        member.counters.read_bytes.fetch_add(len, Relaxed);
        member.device.read_medium(place.at, buf).map_err(|e| {
            member.counters.read_errors.fetch_add(1, Relaxed);
            member.error("read", place.at, len, e)
        })
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

    /// The ways to read the bytes at `at` that need no missing device, in groups: the more is to be
    /// expected of one, the earlier it comes.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`].
    pub fn ways_by_worth(&self, at: Logical) -> VolumeResult<Vec<Copies>> {
        let found = self.map.lookup(at, 1)?;
        let mut groups: BTreeMap<Worth, Copies> = BTreeMap::new();
        for way in 0..found.ways {
            groups.entry(self.worth(at, &found, way)).or_default().push(way);
        }
        groups.remove(&Worth::Missing);
        Ok(groups.into_values().collect())
    }

    /// So many transfers were asked of the devices since the volume was opened, flushes included.
    #[must_use]
    pub fn transfers(&self) -> u64 {
        let of = |m: &Arc<Member>| {
            let counters = [&m.counters.reads, &m.counters.writes, &m.counters.flushes];
            counters.iter().map(|c| c.load(Relaxed)).sum::<u64>()
        };
        self.members.all().iter().map(of).sum()
    }
}
