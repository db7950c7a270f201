//! What each cell of each device holds.
//!
//! Cells are fixed in number; extents are added up as they are read and forgotten. So memory does
//! not depend on the size of a device, and a cell that covers gigabytes still knows how much of
//! each kind there is in it.

use crate::raw::Session;
use crate::raw::groups::{Group, read_groups};
use indicatif::ProgressBar;
use larder_format::items::{BlockGroupFlags, ExtentFlags, ExtentItem};
use larder_format::{DeviceId, Key, KeyType, Logical, ObjectId, Physical};
use larder_volume::{Device, Stripe, read_superblock};
use std::ops::{ControlFlow, Range};
use std::path::Path;

/// What bytes of a device are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data = 0,
    Metadata = 1,
    System = 2,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Data, Self::Metadata, Self::System];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Data => "Data",
            Self::Metadata => "Metadata",
            Self::System => "System",
        }
    }

    /// Of free space in a block group.
    pub(super) fn of_group(flags: BlockGroupFlags) -> Self {
        if flags.contains(BlockGroupFlags::SYSTEM) {
            Self::System
        } else if flags.contains(BlockGroupFlags::DATA) {
            Self::Data
        } else {
            Self::Metadata
        }
    }
}

/// One cell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Cell {
    /// Bytes in use, by [`Kind`].
    pub(super) used: [u64; 3],
    /// Bytes in block groups, by the kind that they are or would be.
    pub(super) allocated: [u64; 3],
    /// The block group that has most of the cell: its number, and how much that is.
    pub(super) group: Option<(u32, u64)>,
    /// Sum over bytes in use of their generation.
    age: u128,
    /// Oldest and newest generation in it.
    pub(super) generations: Option<(u64, u64)>,
}

impl Cell {
    pub(super) fn used(&self) -> u64 {
        self.used.iter().sum()
    }
    pub(super) fn allocated(&self) -> u64 {
        self.allocated.iter().sum()
    }
    /// Mean generation of what is in use.
    pub(super) fn mean_generation(&self) -> Option<u64> {
        let used = u128::from(self.used());
        self.generations?;
        self.age.checked_div(used).map(|g| u64::try_from(g).unwrap_or(u64::MAX))
    }
}

/// A file system.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) label: String,
    pub(super) generation: u64,
    pub(super) groups: Vec<Group>,
    /// The devices that are there, by number.
    pub(super) devices: Vec<Space>,
    /// Those that chunks lie on, and that are not there.
    pub(super) missing: Vec<DeviceId>,
}

/// A device, cell by cell.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) id: DeviceId,
    /// The last part of its path.
    pub(super) name: String,
    /// Bytes of the device.
    pub(super) size: u64,
    pub(super) cells: Vec<Cell>,
    /// Bytes on the device, by kind.
    pub(super) used: [u64; 3],
    pub(super) allocated: [u64; 3],
}

impl Whole {
    /// Reads block groups and extents.
    pub(super) fn read(s: &Session<'_>, count: u32, bar: &ProgressBar) -> Self {
        let sb = s.reader.superblock();
        let mut devices: Vec<Space> = s
            .reader
            .volume()
            .devices()
            .map(|(id, device)| Space::new(id, name_of(&*device), size_of(&*device), count))
            .collect();
        devices.sort_unstable_by_key(|space| space.id);
        let mut whole = Self {
            label: crate::print::name(sb.label()),
            generation: sb.generation().0,
            groups: read_groups(s),
            devices,
            missing: Vec::new(),
        };
        whole.chunks(s);
        bar.set_length(sb.bytes_used());
        if !whole.extents(s, bar) {
            whole.even(s);
        }
        whole
    }

    /// Adds all chunks.
    fn chunks(&mut self, s: &Session<'_>) {
        for chunk in s.reader.volume().map().chunks() {
            let group = self.groups.binary_search_by_key(&chunk.start, |g| g.start).ok();
            let group = group.and_then(|g| u32::try_from(g).ok());
            let kind = Kind::of_group(chunk.flags());
            for stripe in &chunk.stripes {
                match self.on(stripe.device) {
                    Some(space) => {
                        space.allocate(range(stripe.at, chunk.stripe_bytes()), kind, group)
                    }
                    None => self.missing.push(stripe.device),
                }
            }
        }
        self.missing.sort_unstable();
        self.missing.dedup();
    }

    fn on(&mut self, device: DeviceId) -> Option<&mut Space> {
        self.devices.iter_mut().find(|space| space.id == device)
    }

    /// Adds all extents; says whether they could be read.
    fn extents(&mut self, s: &Session<'_>, bar: &ProgressBar) -> bool {
        let Some(tree) = s.trees.tree(ObjectId::EXTENT_TREE) else {
            s.problems
                .add("there is no extent tree: block groups are drawn as evenly filled".into());
            return false;
        };
        let nodesize = u64::from(s.reader.superblock().nodesize());
        let (mut done, mut any) = (0u64, false);
        let gaps = tree.walk(s.reader, Key::MIN, Key::MAX, &mut |item| {
            let length = match item.key.kind {
                KeyType::EXTENT_ITEM => item.key.offset,
                KeyType::METADATA_ITEM => nodesize,
                _ => return ControlFlow::Continue(()),
            };
            if let Ok(e) = ExtentItem::parse(item.key.kind, item.data) {
                any = true;
                let data = e.flags.contains(ExtentFlags::DATA);
                self.extent(s, Logical(item.key.objectid.0), length, data, e.generation.0);
                done = done.saturating_add(length);
                bar.set_position(done);
            }
            ControlFlow::Continue(())
        });
        s.problems.gaps(gaps);
        any
    }

    /// Adds an extent wherever it lies. Parity counts as full as its row is.
    fn extent(&mut self, s: &Session<'_>, at: Logical, length: u64, data: bool, generation: u64) {
        let map = s.reader.volume().map();
        let (mut at, mut rest) = (at, length);
        while rest > 0 {
            let Some(chunk) = map.chunk_at(at) else { return };
            let kind = match Kind::of_group(chunk.flags()) {
                Kind::Data if !data => Kind::Metadata,
                kind => kind,
            };
            let end = chunk.end().0.min(at.0.saturating_add(rest));
            while at.0 < end {
                let Ok(found) = map.lookup(at, end - at.0) else { return };
                for stripe in &found.stripes {
                    self.fill(*stripe, found.len, kind, generation);
                }
                if let Some((columns, parity)) = map.row_places(at) {
                    for stripe in &parity {
                        self.fill(*stripe, found.len / columns.len() as u64, kind, generation);
                    }
                }
                (at, rest) = (at.plus(found.len), rest - found.len);
            }
        }
    }

    fn fill(&mut self, place: Stripe, len: u64, kind: Kind, generation: u64) {
        if let Some(space) = self.on(place.device) {
            space.fill(range(place.at, len), kind, Some(generation));
        }
    }

    /// Without extents: each block group as if what is used of it were spread over it.
    fn even(&mut self, s: &Session<'_>) {
        for g in self.groups.clone() {
            let Some(chunk) = s.reader.volume().map().chunk_at(g.start) else { continue };
            let kind = Kind::of_group(g.flags);
            let share = |n: u64| {
                let used = u128::from(n) * u128::from(g.used) / u128::from(g.length.max(1));
                u64::try_from(used).unwrap_or(n)
            };
            let bytes = chunk.stripe_bytes();
            for stripe in &chunk.stripes {
                let Some(space) = self.on(stripe.device) else { continue };
                space.each(range(stripe.at, bytes), |cell, n| {
                    cell.used[kind as usize] += share(n);
                });
                space.used[kind as usize] += share(bytes);
            }
        }
    }
}

/// Bytes of a device that the file system uses.
fn size_of(device: &dyn Device) -> u64 {
    let used = read_superblock(device).map(|sb| sb.dev_item.total_bytes.get());
    used.unwrap_or(u64::MAX).min(device.size()).max(1)
}

fn name_of(device: &dyn Device) -> String {
    let path = device.name();
    let name = Path::new(&path).file_name();
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

impl Space {
    fn new(id: DeviceId, name: String, size: u64, count: u32) -> Self {
        let cells = vec![Cell::default(); count as usize];
        Self { id, name, size, cells, used: [0; 3], allocated: [0; 3] }
    }

    /// First byte of a cell.
    pub(super) fn start(&self, cell: usize) -> u64 {
        let at = u128::from(self.size) * cell as u128 / self.cells.len() as u128;
        u64::try_from(at).unwrap_or(u64::MAX)
    }

    /// Calls `each` with every cell that a range touches, and the bytes of it that lie there.
    fn each(&mut self, range: Range<u64>, mut each: impl FnMut(&mut Cell, u64)) {
        let (from, end) = (range.start, range.end.min(self.size));
        if from >= end {
            return;
        }
        let cells = self.cells.len() as u128;
        let mut i = usize::try_from(u128::from(from) * cells / u128::from(self.size)).unwrap_or(0);
        // Rounding may have put us one too early.
        while self.start(i + 1) <= from {
            i += 1;
        }
        let mut at = from;
        while at < end && i < self.cells.len() {
            let next = self.start(i + 1).min(end);
            each(&mut self.cells[i], next - at);
            (at, i) = (next, i + 1);
        }
    }

    fn allocate(&mut self, range: Range<u64>, kind: Kind, group: Option<u32>) {
        let length = range.end - range.start;
        self.allocated[kind as usize] = self.allocated[kind as usize].saturating_add(length);
        self.each(range, |cell, n| {
            cell.allocated[kind as usize] += n;
            if let Some(g) = group
                && cell.group.is_none_or(|(_, most)| n > most)
            {
                cell.group = Some((g, n));
            }
        });
    }

    fn fill(&mut self, range: Range<u64>, kind: Kind, generation: Option<u64>) {
        let length = range.end - range.start;
        self.used[kind as usize] = self.used[kind as usize].saturating_add(length);
        self.each(range, |cell, n| {
            // A hostile image may claim the same bytes many times.
            cell.used[kind as usize] = cell.used[kind as usize].saturating_add(n);
            if let Some(g) = generation {
                cell.age = cell.age.saturating_add(u128::from(g) * u128::from(n));
                cell.generations =
                    Some(cell.generations.map_or((g, g), |(a, b)| (a.min(g), b.max(g))));
            }
        });
    }
}

/// The bytes from `start` on; a hostile image may give it any length.
fn range(start: Physical, length: u64) -> Range<u64> {
    start.0..start.0.saturating_add(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_shared_out_to_the_byte() {
        for (size, count) in
            [(1000, 16), (10 << 40, 16_384), (4096, 4096), (100, 1024), ((1 << 40) + 7, 4096)]
        {
            let mut space = Space::new(DeviceId(1), String::new(), size, count);
            assert_eq!((space.start(0), space.start(count as usize)), (0, size));
            space.allocate(0..size, Kind::Data, None);
            assert_eq!(space.cells.iter().map(Cell::allocated).sum::<u64>(), size);
            let (from, len) = (size / 3, size / 2);
            space.fill(from..from + len, Kind::Metadata, Some(7));
            space.fill(size - 1..1 << 50, Kind::System, Some(9));
            assert_eq!(space.cells.iter().map(|c| c.used[1]).sum::<u64>(), len);
            assert_eq!(space.cells.iter().map(|c| c.used[2]).sum::<u64>(), 1);
            for i in 0..count as usize {
                let n = space.start(i + 1) - space.start(i);
                assert!(space.cells[i].allocated() == n && space.cells[i].used[1] <= n);
            }
        }
    }

    #[test]
    fn a_cell_knows_how_old_it_is() {
        let mut space = Space::new(DeviceId(1), String::new(), 4096, 1);
        assert_eq!(space.cells[0].mean_generation(), None);
        space.fill(0..1000, Kind::Data, Some(10));
        space.fill(1000..4000, Kind::Data, Some(50));
        assert_eq!(
            (space.cells[0].mean_generation(), space.cells[0].generations),
            (Some(40), Some((10, 50)))
        );
    }
}
