//! Trimming: telling the device of all free space, or of that in a range, on request.
//!
//! [`super::discard`] tells the device of space at the time when it is freed; a trim goes through
//! what is free now. This module hides which space that is: the space that `FITRIM` takes on Linux.
//! Addresses are logical. `docs/SPACE.md` ("Discard") has the rules for ranges.
//!
//! A free run is left out if less of it lies in the range than `min_len`, or less than the device
//! says that it discards at once. All copies count. Space that belongs to no chunk is trimmed once,
//! whatever the range is, and again only after a chunk has lain there.
//!
//! Space that is being discarded is pinned meanwhile, in pieces, so that no request finds the disk
//! full because of it.

use crate::error::{Error, Result};
use crate::space::Run;
use crate::space::alloc::Allocator;
use crate::space::free_index::Lengths;
use crate::space::groups::BlockGroup;
use larder_format::{Logical, SECTOR_SIZE};

/// Bytes that one discard takes at most. They cannot be allocated meanwhile.
const PIECE: u64 = 256 << 20;

/// Part of a file system to trim. All of it by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimRange {
    /// First logical address. A block group that begins before it is left out.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
    /// Shorter free runs are left out.
    pub min_len: u64,
}

impl Default for TrimRange {
    fn default() -> Self {
        Self { start: 0, len: u64::MAX, min_len: 0 }
    }
}

/// What a trim has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trimmed {
    /// Bytes that devices were told of, all copies counted.
    pub bytes: u64,
    /// Shortest run that was trimmed: what the caller asked for, or what the device discards at
    /// once.
    pub min_len: u64,
}

impl Allocator {
    /// Discards the free space that the module's essay describes.
    ///
    /// # Errors
    /// `NotSupported` where no device takes discards; `Invalid` for a range without a
    /// whole sector; `WouldBlock`; what the device said.
    pub(crate) fn trim(&self, range: TrimRange) -> Result<Trimmed> {
        crate::api::may_wait()?;
        let unsupported = || Error::NotSupported("the device does not take discards");
        if !self.volume.can_discard() {
            return Err(unsupported());
        }
        if range.len < u64::from(SECTOR_SIZE) || range.start == u64::MAX {
            return Err(Error::Invalid("a range without a whole sector"));
        }
        let wanted = Run::new(Logical(range.start), range.len.min(u64::MAX - range.start));
        let min_len = range.min_len.max(self.volume.discard_granularity());
        let mut bytes = 0;
        for group in self.groups.all() {
            let within = group.run().intersect(wanted);
            if let Some(within) = within.filter(|_| group.run().start >= wanted.start) {
                bytes += self.trim_group(&group, within, min_len)?;
            }
        }
        bytes += self.trim_unallocated()?;
        // Some devices say only when they are asked that they take none.
        if self.volume.can_discard() { Ok(Trimmed { bytes, min_len }) } else { Err(unsupported()) }
    }

    /// Discards the free runs of a group, as far as at least `min_len` bytes of them lie in
    /// `within`.
    fn trim_group(&self, group: &BlockGroup, within: Run, min_len: u64) -> Result<u64> {
        let groups = &self.groups;
        let piece = Lengths { most: PIECE, least: 1 };
        let behind = |at: Logical, range: Run| Run::new(at, range.end().0.saturating_sub(at.0));
        let (mut rest, mut done) = (within, 0);
        while let Some(run) = groups.next_free(group, rest, min_len) {
            let mut left = run;
            loop {
                // The caller that finds no space waits for this lock.
                let _busy = self.discards.busy();
                let Some(pinned) = groups.pin_free(group, left, piece) else { break };
                let outcome = match pinned.intersect(left) {
                    Some(part) => self.volume.discard(part.start, part.len),
                    None => Ok(0),
                };
                groups.discarded(pinned);
                done += outcome?;
                left = behind(pinned.end(), left);
            }
            rest = behind(run.end(), within);
        }
        Ok(done)
    }

    /// Discards the space of devices that no chunk takes and that they were not told of
    /// yet, piece by piece. No chunk is made meanwhile. Returns the bytes.
    fn trim_unallocated(&self) -> Result<u64> {
        let mut done = 0;
        loop {
            let mut device = self.device.lock();
            let Some((id, at, len)) = device.first_untold() else { return Ok(done) };
            let len = len.min(PIECE);
            done += self.volume.discard_on(id, at, len)?;
            device.was_told(id, at, len);
        }
    }
}
