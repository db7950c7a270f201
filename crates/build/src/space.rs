//! Where chunks lie, and which address comes next.
//!
//! Space is given out from front to back: first a small system chunk for the chunk tree, then data,
//! then metadata. A chunk is opened as long as it may become, and closed at the length that it
//! needs. So nothing has to be known of the contents beforehand, and chunks fit what they hold.
//!
//! The second copy of a chunk with two (DUP) begins behind the first. Its place is known when the
//! chunk is closed, and its bytes are copied then. The second copy must not cover a superblock's
//! mirror: addresses were given out by the first copy, which knows nothing of that mirror. Where it
//! would, it begins behind the mirror, and the space before the mirror is left to later chunks.

use crate::error::{Error, Result};
use larder_format::items::BlockGroupFlags;
use larder_format::{DEVICE_RESERVED, Physical, STRIPE_LEN, SUPER_OFFSETS};
use std::ops::Range;

/// Longest data chunk, as Linux makes them.
const LONGEST: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A block group and its chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Logical address.
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) flags: BlockGroupFlags,
    /// Where its copies lie on the device.
    pub(crate) stripes: Vec<u64>,
    /// What is allocated: logical, in order, apart.
    pub(crate) used: Vec<Range<u64>>,
}

impl Group {
    /// Allocated bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used.iter().map(|r| r.end - r.start).sum()
    }

    /// Ranges that are not allocated.
    pub(crate) fn free(&self) -> Vec<Range<u64>> {
        let mut out = Vec::new();
        let mut at = self.start;
        for r in &self.used {
            if r.start > at {
                out.push(at..r.start);
            }
            at = r.end;
        }
        if at < self.start + self.length {
            out.push(at..self.start + self.length);
        }
        out
    }

    fn note(&mut self, range: Range<u64>) {
        match self.used.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.used.push(range),
        }
    }

    /// Bytes from the start to the last that is allocated.
    fn reach(&self) -> u64 {
        self.used.last().map_or(0, |r| r.end - self.start)
    }

    fn copies(&self) -> u64 {
        copies(self.flags)
    }
}

fn copies(flags: BlockGroupFlags) -> u64 {
    flags.profile().map_or(1, |profile| profile.copies().into())
}

/// Bytes that have to be written once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SecondCopy {
    pub(crate) from: Physical,
    pub(crate) to: Physical,
    pub(crate) len: u64,
}

/// How chunks are closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    /// Lengths are a multiple of this.
    pub(crate) unit: u64,
    /// Length of the system chunk.
    pub(crate) system: u64,
    /// Room to work in that the last metadata chunk has, beside a share of what is used.
    pub(crate) room: u64,
    /// The share: one part in so many of what is used.
    pub(crate) share: u64,
    /// Length of a group with nothing in it.
    pub(crate) empty: u64,
}

impl Fit {
    /// Sizes at which the image can be worked with. Linux reserves space by the number of nodes
    /// that a change may touch, so they grow with the nodes. About 370 nodes are its reserve for
    /// the worst case. Where changes do not find room beside it, Linux makes a chunk for metadata
    /// before all else, and that may take the space that new data was to have.
    pub(crate) fn roomy(nodesize: u32) -> Self {
        let nodes = |n: u64| n * u64::from(nodesize);
        let room = nodes(1024).max(8 * MIB);
        Self { unit: MIB, system: 8 * MIB, room, share: 4, empty: 8 * MIB }
    }

    /// The least with which Linux mounts it for writing. It can change nothing before the image has
    /// grown: it reserves far more than it needs.
    pub(crate) fn tight(nodesize: u32) -> Self {
        let room = (64 * u64::from(nodesize)).max(MIB);
        Self { unit: STRIPE_LEN, system: room, room, share: 16, empty: STRIPE_LEN }
    }

    fn rounded(self, len: u64) -> u64 {
        len.next_multiple_of(self.unit)
    }
}

/// The chunks, and what of them is allocated.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    /// In the order of addresses; the first is the system group. The last may be open.
    groups: Vec<Group>,
    /// Next address in the system group.
    system: u64,
    open: bool,
    /// Next address in the open group.
    at: u64,
    /// Where the next chunk lies.
    logical: u64,
    physical: u64,
    /// Bytes of the device, where they are given.
    limit: Option<u64>,
    fit: Fit,
    copies: Vec<SecondCopy>,
}

impl Space {
    /// Space on a device of `limit` bytes, or of any size.
    pub(crate) fn new(limit: Option<u64>, fit: Fit, system: BlockGroupFlags) -> Result<Self> {
        let mut space = Self {
            groups: Vec::new(),
            system: 0,
            open: false,
            at: 0,
            logical: DEVICE_RESERVED,
            physical: DEVICE_RESERVED,
            limit: limit.map(|l| l & !4095),
            fit,
            copies: Vec::new(),
        };
        // One copy has half the length, as mkfs.btrfs has it.
        let length = if copies(system) == 1 { fit.system.min(4 * MIB) } else { fit.system };
        if limit.is_some_and(|l| DEVICE_RESERVED + length * copies(system) > l) {
            return Err(space.full());
        }
        let stripes = (0..copies(system)).map(|n| space.physical + n * length).collect::<Vec<_>>();
        space.physical += length * copies(system);
        space.system = space.logical;
        space.groups.push(Group {
            start: space.logical,
            length,
            flags: system,
            stripes,
            used: Vec::new(),
        });
        space.logical += length;
        Ok(space)
    }

    /// Up to `want` bytes in one piece from a group of this type. With `whole` all of them.
    pub(crate) fn take(
        &mut self,
        flags: BlockGroupFlags,
        want: u64,
        whole: bool,
    ) -> Result<Range<u64>> {
        loop {
            if !self.open || self.groups.last().is_none_or(|g| g.flags != flags) {
                self.close(false)?;
                self.open(flags, want)?;
            }
            let group = self.groups.last_mut().expect("one is open");
            let end = group.start + group.length;
            let hole = mirror_at_or_behind(group, self.at);
            if let Some(hole) = &hole
                && hole.start <= self.at
            {
                self.at = hole.end.min(end);
                continue;
            }
            let stop = hole.map_or(end, |h| h.start.min(end));
            let room = stop - self.at;
            if room == 0 || (whole && room < want) {
                if stop == end {
                    self.close(false)?;
                } else {
                    self.at = stop;
                }
                continue;
            }
            let range = self.at..self.at + room.min(want);
            group.note(range.clone());
            self.at = range.end;
            return Ok(range);
        }
    }

    /// A node of the chunk tree.
    pub(crate) fn take_system(&mut self, nodesize: u64) -> Result<u64> {
        let group = &mut self.groups[0];
        let at = self.system;
        if at + nodesize > group.start + group.length {
            return Err(Error::Unsupported(
                "more chunks than one chunk tree of this size holds".into(),
            ));
        }
        group.note(at..at + nodesize);
        self.system += nodesize;
        Ok(at)
    }

    fn open(&mut self, flags: BlockGroupFlags, want: u64) -> Result<()> {
        let room = self.limit.map_or(u64::MAX, |l| l.saturating_sub(self.physical)) / copies(flags);
        let length = LONGEST.min(room) & !(STRIPE_LEN - 1);
        if length < want.min(STRIPE_LEN) {
            return Err(self.full());
        }
        let stripes = vec![self.physical];
        let start = self.logical;
        self.groups.push(Group { start, length, flags, stripes, used: Vec::new() });
        (self.open, self.at) = (true, start);
        Ok(())
    }

    /// Closes the open group at the length that it needs; the last one of metadata with room to
    /// work in.
    pub(crate) fn close(&mut self, last: bool) -> Result<()> {
        if !self.open {
            return Ok(());
        }
        let fit = self.fit;
        let group = self.groups.last().expect("one is open");
        let mut length = fit.rounded(group.reach());
        if last {
            let room = fit.room.max(group.used_bytes() / fit.share);
            length = fit.rounded(group.reach() + room);
        }
        self.settle(length)
    }

    /// Makes an empty group, for tools that expect at least one of each type.
    pub(crate) fn empty(&mut self, flags: BlockGroupFlags) -> Result<()> {
        self.close(false)?;
        self.open(flags, STRIPE_LEN)?;
        self.settle(self.fit.empty)
    }

    /// Closes the open group at this length if there is room, or at what it needs.
    fn settle(&mut self, length: u64) -> Result<()> {
        self.open = false;
        let (fit, end) = (self.fit, self.physical);
        let group = self.groups.last_mut().expect("one is open");
        let (reach, copies) = (group.reach(), group.copies());
        let limit = self.limit.unwrap_or(u64::MAX);
        let least = reach.next_multiple_of(STRIPE_LEN).max(STRIPE_LEN);
        let rounded = fit.rounded(reach).max(least);
        let mut second = end;
        for length in [length.min(group.length), rounded.min(group.length), least] {
            group.length = length;
            second = if copies == 2 { behind_mirrors(Physical(end + length), length) } else { end };
            if second.saturating_add(length) <= limit {
                break;
            }
        }
        if copies == 2 {
            group.stripes.push(second);
            self.copies.push(SecondCopy { from: Physical(end), to: Physical(second), len: reach });
        }
        second += group.length;
        if second > limit {
            return Err(self.full());
        }
        self.physical = second;
        self.logical = self.groups.last().map_or(0, |g| g.start + g.length);
        // Addresses of nodes are multiples of the largest node size.
        self.logical = self.logical.next_multiple_of(STRIPE_LEN);
        Ok(())
    }

    fn full(&self) -> Error {
        let reached = self
            .groups
            .iter()
            .filter(|g| g.flags.contains(BlockGroupFlags::DATA))
            .map(Group::used_bytes)
            .sum();
        Error::TooSmall { size: self.limit.unwrap_or(0), reached }
    }

    /// All groups.
    pub(crate) fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Second copies that have become known since the last call.
    pub(crate) fn second_copies(&mut self) -> Vec<SecondCopy> {
        std::mem::take(&mut self.copies)
    }

    /// Places of the bytes at a logical address: one in a group that is open, all in one that is
    /// closed.
    ///
    /// # Panics
    /// If they are not allocated.
    pub(crate) fn places(&self, at: u64) -> (u64, Option<u64>) {
        let n = self.groups.partition_point(|g| g.start <= at) - 1;
        let group = &self.groups[n];
        assert!(at < group.start + group.length, "an address that was given out");
        let open = self.open && n + 1 == self.groups.len();
        let second = if open { None } else { group.stripes.get(1) };
        let off = at - group.start;
        (group.stripes[0] + off, second.map(|s| s + off))
    }

    /// Does the last group begin here?
    pub(crate) fn begins_group(&self, at: u64) -> bool {
        self.groups.last().is_some_and(|g| g.start == at)
    }

    /// Where the last chunk ends on the device.
    pub(crate) fn end(&self) -> u64 {
        self.physical
    }

    /// Bytes of the device in chunks.
    #[cfg(test)]
    pub(crate) fn device_bytes(&self) -> u64 {
        self.groups.iter().map(|g| g.length * g.copies()).sum()
    }

    /// Allocated bytes of all groups.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.groups.iter().map(Group::used_bytes).sum()
    }
}

/// The first range of a group's first copy, at `at` or behind, that a superblock's mirror lies in.
fn mirror_at_or_behind(group: &Group, at: u64) -> Option<Range<u64>> {
    let first = group.stripes[0];
    SUPER_OFFSETS
        .iter()
        .map(|m| m.0 & !(STRIPE_LEN - 1))
        .filter(|m| *m >= first && *m < first + group.length)
        .map(|m| m - first + group.start)
        .find(|m| m + STRIPE_LEN > at)
        .map(|m| m..m + STRIPE_LEN)
}

/// The first place from `at` on where `length` bytes cover no superblock.
fn behind_mirrors(at: Physical, length: u64) -> u64 {
    let mut at = at.0;
    for mirror in SUPER_OFFSETS {
        let mirror = mirror.0 & !(STRIPE_LEN - 1);
        if mirror + STRIPE_LEN > at && mirror < at + length {
            at = mirror + STRIPE_LEN;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: BlockGroupFlags = BlockGroupFlags::DATA;
    const META: BlockGroupFlags = BlockGroupFlags::METADATA.union(BlockGroupFlags::DUP);
    const SYSTEM: BlockGroupFlags = BlockGroupFlags::SYSTEM.union(BlockGroupFlags::DUP);

    /// What must hold of any layout.
    fn assert_sound(space: &Space) {
        let mut device: Vec<Range<u64>> = Vec::new();
        let mut logical = 0;
        for g in space.groups() {
            assert!(g.start >= logical && g.start.is_multiple_of(STRIPE_LEN));
            assert!(g.length > 0 && g.length.is_multiple_of(STRIPE_LEN));
            logical = g.start + g.length;
            assert_eq!(g.stripes.len() as u64, g.copies());
            let mut at = g.start;
            for r in &g.used {
                assert!(r.start >= at && r.end > r.start && r.end <= logical, "{g:?}");
                at = r.end + 1;
            }
            let free: u64 = g.free().iter().map(|r| r.end - r.start).sum();
            assert_eq!(free + g.used_bytes(), g.length);
            for s in &g.stripes {
                assert!(s.is_multiple_of(STRIPE_LEN));
                device.push(*s..s + g.length);
                for mirror in SUPER_OFFSETS {
                    let (m, end) = (mirror.0, mirror.0 + STRIPE_LEN);
                    let touches = g.used.iter().any(|r| {
                        let r = r.start - g.start + s..r.end - g.start + s;
                        r.start < end && m < r.end
                    });
                    assert!(!touches, "{g:?} uses the mirror at {m}");
                }
            }
        }
        device.sort_by_key(|r| r.start);
        assert!(device[0].start >= DEVICE_RESERVED);
        assert!(device.windows(2).all(|w| w[0].end <= w[1].start), "{device:?}");
        assert!(device.last().unwrap().end <= space.end());
    }

    #[test]
    fn mirrors_are_left_out_and_chunks_fit() {
        for data in [0, 5 * MIB, 40 * MIB, 60 * MIB, 130 * MIB, 2500 * MIB] {
            for meta in [1, 900, 3000] {
                for fit in [Fit::roomy(16384), Fit::tight(16384)] {
                    let mut space = Space::new(None, fit, SYSTEM).unwrap();
                    let mut left = data;
                    while left > 0 {
                        let r = space.take(DATA, left, false).unwrap();
                        left -= r.end - r.start;
                    }
                    if data == 0 {
                        space.empty(DATA).unwrap();
                    }
                    for _ in 0..meta {
                        let r = space.take(META, 16384, true).unwrap();
                        assert!(r.end - r.start == 16384 && r.start.is_multiple_of(16384));
                    }
                    space.take_system(16384).unwrap();
                    space.close(true).unwrap();
                    assert_sound(&space);
                    let slack = space.device_bytes() - data - (meta * 2 + 2) * 16384;
                    let room = 2 * fit.room / MIB + 2;
                    let most = if fit.unit == MIB { 16 + room + 8 + 8 } else { 2 + 4 };
                    assert!(slack <= most * MIB + meta * 16384 / 2 * 2, "{data} {meta}: {slack}");
                    let first = space.places(space.groups()[0].start);
                    assert_eq!(first, (DEVICE_RESERVED, Some(space.groups()[0].stripes[1])));
                }
            }
        }
    }

    #[test]
    fn whole_pieces_do_not_straddle_a_mirror_or_a_chunk() {
        let mut space = Space::new(None, Fit::tight(16384), BlockGroupFlags::SYSTEM).unwrap();
        let mut total = 0;
        while total < 3 << 30 {
            let r = space.take(DATA, 100 << 10, true).unwrap();
            assert_eq!(r.end - r.start, 100 << 10);
            total += 100 << 10;
        }
        space.close(false).unwrap();
        assert_sound(&space);
    }

    #[test]
    fn a_device_that_is_too_small_is_full() {
        for mib in [2, 12, 40, 64, 65, 70, 100] {
            let fill = || -> Result<Space> {
                let mut space = Space::new(Some(mib * MIB), Fit::roomy(16384), SYSTEM)?;
                loop {
                    let r = match space.used_bytes() {
                        0 if mib % 2 == 0 => {
                            space.empty(DATA).and_then(|()| space.take(DATA, MIB, false))
                        }
                        _ => space.take(DATA, MIB, false),
                    };
                    if r.is_err() || space.used_bytes() >= mib * MIB / 2 {
                        r?;
                        break;
                    }
                }
                for _ in 0..10 {
                    space.take(META, 16384, true)?;
                }
                space.close(true)?;
                Ok(space)
            };
            match fill() {
                Ok(space) => {
                    assert_sound(&space);
                    assert!(space.end() <= mib * MIB, "{mib}");
                }
                Err(e) => assert!(matches!(e, Error::TooSmall { .. }) && mib < 64, "{mib}: {e}"),
            }
        }
    }
}
