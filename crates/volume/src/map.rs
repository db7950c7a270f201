//! Chunks: which bytes of which device stand behind a logical address.
//!
//! The map hides profiles. Above it, an address has **places**, where its bytes are stored as they
//! are, and a number of **ways** to read it: from each of its places, and with parity also from the
//! rest of its row. How a profile spreads a chunk over its stripes is arithmetic (`layout`), which
//! the map turns into addresses.
//!
//! Chunks come off a disk: they are checked as they are added. No two may overlap, neither in the
//! logical space nor on a device — two chunks sharing a device range would let data overwrite
//! metadata long after the mount succeeded.
//!
//! Chunks are added and removed while the file system runs, and every transfer looks one up: the
//! map is behind a readers-writer lock that is held for the look-up alone, and a look-up copies the
//! few words that it found. It allocates nothing for up to two mirrors.

mod layout;
mod strip;

pub(crate) use layout::Way;
pub use strip::{Place, Strip, StripRow};

use crate::error::{VolumeError, VolumeResult};
use crate::parity::{By, Element};
use larder_format::items::chunk::{Chunk, MAX_CHUNK_LENGTH};
use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{DeviceId, Logical, Physical, SUPER_OFFSETS};
use layout::Layout;
use parking_lot::RwLock;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Sector size of the format: chunk borders lie on it.
const SECTOR: u64 = 4096;
/// Bytes at each superblock copy in which no extent may lie.
const SUPER_RESERVE: u64 = 65536;

/// Place of one copy on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Stripe {
    pub device: DeviceId,
    pub at: Physical,
}

/// Several places; of an address there is always at least one.
pub type Stripes = SmallVec<[Stripe; 2]>;

/// A chunk as the map wants it: a range of the logical space and where its stripes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedChunk {
    /// First logical address.
    pub start: Logical,
    /// Bytes, logical.
    pub length: u64,
    /// Type and profile bits as in the chunk item.
    pub kind: u64,
    /// Where each stripe begins. What it holds depends on the profile.
    pub stripes: Stripes,
}

impl MappedChunk {
    /// From a chunk item that lies at `start`.
    #[must_use]
    pub fn from_item(start: Logical, item: &Chunk) -> Self {
        let stripes =
            item.stripes.iter().map(|s| Stripe { device: s.devid, at: s.offset }).collect();
        Self { start, length: item.length, kind: item.flags.bits(), stripes }
    }

    /// First address behind the chunk.
    #[must_use]
    pub fn end(&self) -> Logical {
        self.start.plus(self.length)
    }

    /// Type and profile.
    #[must_use]
    pub fn flags(&self) -> BlockGroupFlags {
        BlockGroupFlags::from_bits_retain(self.kind)
    }

    /// The profile; that of a chunk that no map would take is *single*.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.flags().profile().unwrap_or(Profile::Single)
    }

    fn layout(&self) -> Layout {
        Layout::new(self.profile(), self.stripes.len(), self.length)
    }

    /// Elements of data that share their parity; 1 where nothing does.
    #[must_use]
    pub fn parity_columns(&self) -> u64 {
        let layout = self.layout();
        if layout.has_parity() { layout.columns() as u64 } else { 1 }
    }

    /// Bytes that each stripe takes on its device.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        let stripes = u16::try_from(self.stripes.len()).unwrap_or(u16::MAX);
        self.profile().stripe_bytes(self.length, stripes)
    }

    /// Bytes that the chunk takes on its devices.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.stripe_bytes().saturating_mul(self.stripes.len() as u64)
    }

    /// Ranges (address, bytes) inside the chunk that map to a superblock copy on some device:
    /// nothing may be allocated there, whatever the free-space tree says. With parity the whole row
    /// is left out. Ascending, not overlapping.
    #[must_use]
    pub fn superblock_ranges(&self) -> SmallVec<[(Logical, u64); 2]> {
        let (layout, bytes) = (self.layout(), self.stripe_bytes());
        let mut ranges: SmallVec<[(u64, u64); 4]> = SmallVec::new();
        for (n, stripe) in self.stripes.iter().enumerate() {
            for mirror in SUPER_OFFSETS {
                let reserve = mirror.0 & !(SUPER_RESERVE - 1);
                let from = reserve.max(stripe.at.0);
                let to = (reserve + SUPER_RESERVE).min(stripe.at.0.saturating_add(bytes));
                if from < to {
                    let touched = layout.touched(n, from - stripe.at.0..to - stripe.at.0);
                    ranges.extend(touched.into_iter().map(|r| (r.start, r.end)));
                }
            }
        }
        ranges.sort_unstable();
        let mut out: SmallVec<[(Logical, u64); 2]> = SmallVec::new();
        for (from, to) in ranges {
            let at = self.start.plus(from);
            match out.last_mut() {
                Some((last, len)) if at.0 <= last.0 + *len => {
                    *len = (*len).max(self.start.0 + to - last.0)
                }
                _ => out.push((at, to - from)),
            }
        }
        out
    }

    fn check(&self) -> VolumeResult<()> {
        let corrupt = |what: String| VolumeError::Corrupt {
            device: "chunk tree".into(),
            what: format!("chunk at {}: {what}", self.start),
        };
        let profile = self.flags().profile().map_err(|e| corrupt(e.0))?;
        let (name, stripes) = (profile.name(), self.stripes.len());
        if !u16::try_from(stripes).is_ok_and(|n| profile.fits_stripes(n)) {
            return Err(corrupt(format!("{stripes} stripes, which {name} does not allow")));
        }
        if self.length == 0 || self.length >= MAX_CHUNK_LENGTH {
            return Err(corrupt(format!("impossible length {}", self.length)));
        }
        if !self.start.0.is_multiple_of(SECTOR) || !self.length.is_multiple_of(SECTOR) {
            return Err(corrupt(format!("not aligned (length {})", self.length)));
        }
        if let Some(unit) = self.layout().unit().filter(|unit| !self.length.is_multiple_of(*unit)) {
            let length = self.length;
            let what = format!("length {length} is not a multiple of {unit}, a row of its {name}");
            return Err(corrupt(what));
        }
        if self.start.0.checked_add(self.length).is_none() {
            return Err(corrupt("reaches past the end of the logical space".into()));
        }
        let bytes = self.stripe_bytes();
        for s in &self.stripes {
            if !s.at.0.is_multiple_of(SECTOR) || s.at.0.checked_add(bytes).is_none() {
                return Err(corrupt(format!(
                    "stripe at impossible address {} on device {}",
                    s.at, s.device
                )));
            }
        }
        Ok(())
    }
}

/// What a look-up found: the places of a range, as far as it is contiguous in each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The first address of its chunk.
    pub chunk: Logical,
    /// Where the range begins, once for each mirror.
    pub stripes: Stripes,
    /// How many bytes from there on belong together: at most what was asked for, less at the end of
    /// a chunk, and of an element where the chunk is striped.
    pub len: u64,
    /// Number of ways to read it, of which those of `stripes` are the first.
    pub ways: usize,
}

impl Located {
    /// Is there parity for it?
    pub(crate) fn has_parity(&self) -> bool {
        self.ways > self.stripes.len()
    }
}

/// A full stripe of a chunk with parity: elements of different data, and what they have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FullStripe {
    /// Its first address.
    pub start: Logical,
    /// Elements of data, which lie behind each other from there on. Each has
    /// [`larder_format::STRIPE_LEN`] bytes.
    pub columns: u64,
}

impl FullStripe {
    /// Bytes of data.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.columns * larder_format::STRIPE_LEN
    }
    /// First address behind it.
    #[must_use]
    pub fn end(&self) -> Logical {
        self.start.plus(self.len())
    }
}

/// The row of an address in a chunk with parity: a place in each element, all equally far from its
/// beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The first address of its chunk.
    pub(crate) chunk: Logical,
    /// Each column, from the first on.
    pub(crate) columns: SmallVec<[Stripe; 8]>,
    /// P, or P and Q.
    pub(crate) parity: Stripes,
    /// The column of the address.
    pub(crate) column: usize,
    /// What the number of a way means here.
    pub(crate) way: Way,
}

impl Row {
    /// Where an element lies.
    pub(crate) fn place(&self, element: Element) -> Stripe {
        match element {
            Element::Column(n) => self.columns[n],
            Element::P => self.parity[0],
            Element::Q => self.parity[1],
        }
    }

    /// All elements.
    pub(crate) fn elements(&self) -> impl Iterator<Item = &Stripe> {
        self.columns.iter().chain(&self.parity)
    }

    /// What its way reads.
    pub(crate) fn needed(&self) -> impl Iterator<Item = &Stripe> {
        let (other, parity) = match self.way {
            Way::Direct(_) => (None, &self.parity[..0]),
            Way::Rebuilt(By::P) => (None, &self.parity[..1]),
            Way::Rebuilt(By::Q) => (None, &self.parity[1..]),
            Way::Rebuilt(By::Without(other)) => (Some(other), &self.parity[..]),
        };
        let (direct, column) = (matches!(self.way, Way::Direct(_)), self.column);
        let wanted = move |n: usize| (n == column) == direct && Some(n) != other;
        let columns = self.columns.iter().enumerate().filter(move |(n, _)| wanted(*n));
        columns.map(|(_, stripe)| stripe).chain(parity)
    }
}

#[derive(Debug)]
struct Placed {
    chunk: MappedChunk,
    layout: Layout,
}

#[derive(Debug, Default)]
struct Inner {
    /// By first address.
    chunks: BTreeMap<u64, Placed>,
    /// (device, first byte) -> (end, chunk): what the chunks take on the devices.
    taken: BTreeMap<(DeviceId, u64), (u64, Logical)>,
}

/// The chunks of a file system.
#[derive(Debug, Default)]
pub struct ChunkMap {
    inner: RwLock<Inner>,
}

impl ChunkMap {
    /// A map without chunks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a chunk. Adding one that is there already, with the same places, changes nothing: the
    /// system chunks are met twice, in the superblock and in the chunk tree.
    ///
    /// # Errors
    /// [`VolumeError::Corrupt`] when the chunk is impossible or overlaps another one.
    pub fn insert(&self, chunk: MappedChunk) -> VolumeResult<()> {
        chunk.check()?;
        let mut inner = self.inner.write();
        let corrupt = |what: String| VolumeError::Corrupt {
            device: "chunk tree".into(),
            what: format!("chunk at {} (+{}) {what}", chunk.start, chunk.length),
        };
        let before = inner.chunks.range(..chunk.start.0 + chunk.length).next_back();
        if let Some(other) = before.map(|(_, placed)| &placed.chunk)
            && other.end() > chunk.start
        {
            if *other == chunk {
                return Ok(());
            }
            return Err(corrupt(format!(
                "overlaps the chunk at {} (+{})",
                other.start, other.length
            )));
        }
        let mut added: SmallVec<[(DeviceId, u64); 2]> = SmallVec::new();
        let bytes = chunk.stripe_bytes();
        for s in &chunk.stripes {
            let end = s.at.0 + bytes;
            let other = inner.taken.range((s.device, 0)..(s.device, end)).next_back();
            if let Some((_, (_, other))) = other.filter(|(_, (other_end, _))| *other_end > s.at.0) {
                let message =
                    format!("shares space of device {} with the chunk at {other}", s.device);
                for a in added {
                    inner.taken.remove(&a);
                }
                return Err(corrupt(message));
            }
            inner.taken.insert((s.device, s.at.0), (end, chunk.start));
            added.push((s.device, s.at.0));
        }
        let layout = chunk.layout();
        inner.chunks.insert(chunk.start.0, Placed { chunk, layout });
        Ok(())
    }

    /// Removes the chunk that begins at `start`, and returns it.
    pub fn remove(&self, start: Logical) -> Option<MappedChunk> {
        let mut inner = self.inner.write();
        let chunk = inner.chunks.remove(&start.0)?.chunk;
        for s in &chunk.stripes {
            inner.taken.remove(&(s.device, s.at.0));
        }
        Some(chunk)
    }

    /// Finds the places of `at`, and how much of `len` bytes belongs together in them.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn lookup(&self, at: Logical, len: u64) -> VolumeResult<Located> {
        let inner = self.inner.read();
        let Placed { chunk, layout } = inner.find(at).ok_or(VolumeError::Unmapped { at, len })?;
        let into = at.0 - chunk.start.0;
        let spot = layout.spot(into);
        let stripes = chunk.stripes[spot.first..spot.first + layout.mirrors()]
            .iter()
            .map(|s| Stripe { device: s.device, at: s.at.plus(spot.offset) })
            .collect();
        let len = len.min(layout.run(into));
        Ok(Located { chunk: chunk.start, stripes, len, ways: layout.ways() })
    }

    /// The row of `at`, for reading it in a way of that number. `None` where there is no parity.
    pub(crate) fn row(&self, at: Logical, way: usize) -> Option<Row> {
        let inner = self.inner.read();
        let Placed { chunk, layout } = inner.find(at).filter(|p| p.layout.has_parity())?;
        let spot = layout.spot(at.0 - chunk.start.0);
        let place = |stripe: usize| {
            let Stripe { device, at } = chunk.stripes[stripe];
            Stripe { device, at: at.plus(spot.offset) }
        };
        let column = |c| place(layout.stripe_of(spot.row, c));
        let parity = |which| place(layout.parity_stripe(spot.row, which));
        Some(Row {
            chunk: chunk.start,
            columns: (0..layout.columns()).map(column).collect(),
            parity: (0..layout.parity()).map(parity).collect(),
            column: spot.column,
            way: layout.way(way, spot.column),
        })
    }

    /// The full stripe that `at` lies in. `None` where there is no parity.
    #[must_use]
    pub fn full_stripe(&self, at: Logical) -> Option<FullStripe> {
        let inner = self.inner.read();
        let Placed { chunk, layout } = inner.find(at).filter(|p| p.layout.has_parity())?;
        let columns = layout.columns() as u64;
        let len = columns * larder_format::STRIPE_LEN;
        let start = chunk.start.plus((at.0 - chunk.start.0) / len * len);
        Some(FullStripe { start, columns })
    }

    /// The places of the row of `at` in a chunk with parity: its columns, and P, or P and Q.
    pub fn row_places(&self, at: Logical) -> Option<(SmallVec<[Stripe; 8]>, Stripes)> {
        self.row(at, 0).map(|row| (row.columns, row.parity))
    }

    /// Number of ways to read the bytes at `at`.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn copies(&self, at: Logical) -> VolumeResult<usize> {
        self.of_layout(at, Layout::ways)
    }

    /// So many of the first ways to read the bytes at `at`, together, read everything that is
    /// stored for them: every mirror, or the bytes and their parity.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn stored(&self, at: Logical) -> VolumeResult<usize> {
        self.of_layout(at, Layout::stored)
    }

    fn of_layout(&self, at: Logical, what: impl Fn(Layout) -> usize) -> VolumeResult<usize> {
        let inner = self.inner.read();
        Ok(what(inner.find(at).ok_or(VolumeError::Unmapped { at, len: 0 })?.layout))
    }

    /// Is there an address in the chunk that begins at `start` which no way reads, when devices are
    /// missing?
    pub(crate) fn is_lost(&self, start: Logical, missing: &dyn Fn(DeviceId) -> bool) -> bool {
        let inner = self.inner.read();
        let Some(Placed { chunk, layout }) = inner.chunks.get(&start.0) else { return false };
        let is_gone = |stripe: usize| missing(chunk.stripes[stripe].device);
        (0..layout.rows().min(layout.period())).any(|row| {
            let (columns, parity) = (layout.columns(), layout.parity());
            let gone = |n: &usize| {
                let first = layout.stripe_of(row, *n);
                (first..first + layout.mirrors()).all(is_gone)
            };
            // Parity gives back as many columns as there are of it.
            (0..columns).any(|n| gone(&n)) && (0..columns + parity).filter(gone).count() > parity
        })
    }

    /// The chunk that a place of a device belongs to, by its first address.
    #[must_use]
    pub fn chunk_on(&self, place: Stripe) -> Option<Logical> {
        self.inner.read().chunk_on(place)
    }

    /// The address whose bytes lie in a place of a device. `None` for a place in no chunk, and for
    /// parity.
    #[must_use]
    pub fn logical(&self, place: Stripe) -> Option<Logical> {
        let inner = self.inner.read();
        let Placed { chunk, layout } = inner.chunks.get(&inner.chunk_on(place)?.0)?;
        let bytes = chunk.stripe_bytes();
        let holds = |s: &Stripe| {
            s.device == place.device && s.at <= place.at && place.at.0 - s.at.0 < bytes
        };
        let (n, stripe) = chunk.stripes.iter().enumerate().find(|(_, s)| holds(s))?;
        Some(chunk.start.plus(layout.logical(n, place.at.0 - stripe.at.0)?))
    }

    /// The chunk that covers `at`.
    #[must_use]
    pub fn chunk_at(&self, at: Logical) -> Option<MappedChunk> {
        self.inner.read().find(at).map(|placed| placed.chunk.clone())
    }

    /// All chunks, by address.
    #[must_use]
    pub fn chunks(&self) -> Vec<MappedChunk> {
        self.inner.read().chunks.values().map(|placed| placed.chunk.clone()).collect()
    }

    /// Number of chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.read().chunks.len()
    }

    /// Is there no chunk?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First address behind the last chunk, where the next one may begin.
    #[must_use]
    pub fn end(&self) -> Logical {
        self.inner.read().chunks.last_key_value().map_or(Logical(0), |(_, c)| c.chunk.end())
    }

    /// Ranges that chunks take on a device: (first byte, bytes, chunk), ascending.
    #[must_use]
    pub fn taken_on(&self, device: DeviceId) -> Vec<(Physical, u64, Logical)> {
        let inner = self.inner.read();
        inner
            .taken
            .range((device, 0)..=(device, u64::MAX))
            .map(|((_, at), (end, chunk))| (Physical(*at), end - at, *chunk))
            .collect()
    }
}

impl Inner {
    fn chunk_on(&self, place: Stripe) -> Option<Logical> {
        let before = self.taken.range((place.device, 0)..=(place.device, place.at.0)).next_back();
        before.filter(|(_, (end, _))| place.at.0 < *end).map(|(_, (_, chunk))| *chunk)
    }
    fn find(&self, at: Logical) -> Option<&Placed> {
        let (_, placed) = self.chunks.range(..=at.0).next_back()?;
        (at < placed.chunk.end()).then_some(placed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use smallvec::smallvec;

    const MIB: u64 = 1 << 20;
    const DUP: u64 = 0x20;

    fn single(start: Logical, length: u64, at: Physical) -> MappedChunk {
        let stripes = smallvec![Stripe { device: DeviceId(1), at }];
        MappedChunk { start, length, kind: 1, stripes }
    }
    fn dup(start: Logical, length: u64, copies: [Physical; 2]) -> MappedChunk {
        let stripes = copies.into_iter().map(|at| Stripe { device: DeviceId(1), at }).collect();
        MappedChunk { start, length, kind: 4 | DUP, stripes }
    }

    #[test]
    fn addresses_map_to_every_copy() {
        let map = ChunkMap::new();
        map.insert(single(Logical(16 * MIB), 8 * MIB, Physical(100 * MIB))).unwrap();
        map.insert(dup(Logical(24 * MIB), 8 * MIB, [Physical(200 * MIB), Physical(300 * MIB)]))
            .unwrap();
        let found = map.lookup(Logical(20 * MIB), 64 * MIB).unwrap();
        assert_eq!(found.len, 4 * MIB, "cut at the end of the chunk");
        assert_eq!(found.stripes[..], [Stripe { device: DeviceId(1), at: Physical(104 * MIB) }]);
        let found = map.lookup(Logical(24 * MIB + 4096), 4096).unwrap();
        assert_eq!(found.len, 4096);
        let at: Vec<u64> = found.stripes.iter().map(|s| s.at.0).collect();
        assert_eq!(at, [200 * MIB + 4096, 300 * MIB + 4096]);
        assert_eq!(
            (map.copies(Logical(20 * MIB)).unwrap(), map.copies(Logical(24 * MIB)).unwrap()),
            (1, 2)
        );
        for at in [0, 16 * MIB - 1, 32 * MIB, u64::MAX] {
            assert!(matches!(map.lookup(Logical(at), 1), Err(VolumeError::Unmapped { .. })));
        }
        assert_eq!(map.end(), Logical(32 * MIB));
        assert_eq!(map.taken_on(DeviceId(1)).len(), 3);
        assert_eq!(map.taken_on(DeviceId(2)).len(), 0);
        assert_eq!(map.remove(Logical(24 * MIB)).unwrap().device_bytes(), 16 * MIB);
        assert!(map.lookup(Logical(24 * MIB), 1).is_err());
        map.insert(dup(Logical(24 * MIB), 8 * MIB, [Physical(200 * MIB), Physical(300 * MIB)]))
            .unwrap();
    }

    #[test]
    fn impossible_chunks_are_refused() {
        let map = ChunkMap::new();
        map.insert(dup(Logical(16 * MIB), 8 * MIB, [Physical(100 * MIB), Physical(200 * MIB)]))
            .unwrap();
        map.insert(dup(Logical(16 * MIB), 8 * MIB, [Physical(100 * MIB), Physical(200 * MIB)]))
            .expect("the same again");
        let bad = [
            single(Logical(20 * MIB), 8 * MIB, Physical(300 * MIB)),
            single(Logical(12 * MIB), 8 * MIB, Physical(300 * MIB)),
            single(Logical(0), 64 * MIB, Physical(300 * MIB)),
            single(Logical(16 * MIB), 8 * MIB, Physical(100 * MIB)),
            single(Logical(32 * MIB), 8 * MIB, Physical(204 * MIB)),
            dup(Logical(32 * MIB), 8 * MIB, [Physical(300 * MIB), Physical(304 * MIB)]),
            dup(Logical(32 * MIB), 8 * MIB, [Physical(400 * MIB), Physical(96 * MIB)]),
            single(Logical(32 * MIB), 0, Physical(300 * MIB)),
            single(Logical(32 * MIB), 1 << 48, Physical(300 * MIB)),
            single(Logical(32 * MIB), 4095, Physical(300 * MIB)),
            single(Logical(32 * MIB + 1), 4096, Physical(300 * MIB)),
            single(Logical(u64::MAX - 4095), 8192, Physical(300 * MIB)),
            single(Logical(32 * MIB), 8192, Physical(u64::MAX - 4095)),
            MappedChunk { kind: 0, ..single(Logical(32 * MIB), MIB, Physical(300 * MIB)) },
            MappedChunk {
                kind: 1 | 1 << 40,
                ..single(Logical(32 * MIB), MIB, Physical(300 * MIB))
            },
            MappedChunk { kind: 1 | DUP, ..single(Logical(32 * MIB), MIB, Physical(300 * MIB)) },
            MappedChunk {
                kind: 1 | DUP | 0x10,
                ..single(Logical(32 * MIB), MIB, Physical(300 * MIB))
            },
            MappedChunk {
                stripes: smallvec![],
                ..single(Logical(32 * MIB), MIB, Physical(300 * MIB))
            },
        ];
        for chunk in bad {
            assert!(
                matches!(map.insert(chunk.clone()), Err(VolumeError::Corrupt { .. })),
                "{chunk:?}"
            );
        }
        assert_eq!(
            (map.len(), map.taken_on(DeviceId(1)).len()),
            (1, 2),
            "refused ones leave nothing behind"
        );
        map.insert(dup(Logical(32 * MIB), 8 * MIB, [Physical(300 * MIB), Physical(400 * MIB)]))
            .unwrap();
    }

    /// A chunk of a profile over devices 1 to `n`, of `rows` rows.
    fn striped(profile: Profile, n: u64, rows: usize) -> MappedChunk {
        let stripe = |id| Stripe { device: DeviceId(id), at: Physical(id * 16 * MIB) };
        let columns = u64::from(profile.data_stripes(n as u16));
        MappedChunk {
            start: Logical(16 * MIB),
            length: rows as u64 * columns * 65536,
            kind: (BlockGroupFlags::DATA | profile.flag()).bits(),
            stripes: (1..=n).map(stripe).collect(),
        }
    }

    #[test]
    fn striped_chunks_map_element_by_element() {
        let map = ChunkMap::new();
        map.insert(striped(Profile::Raid10, 4, 4)).unwrap();
        let at = Logical(16 * MIB + 3 * 65536 + 4096);
        let found = map.lookup(at, MIB).unwrap();
        assert_eq!((found.len, found.ways), (61440, 2));
        let places: Vec<(u64, u64)> = found.stripes.iter().map(|s| (s.device.0, s.at.0)).collect();
        assert_eq!(places, [(3, 48 * MIB + 69632), (4, 64 * MIB + 69632)]);
        assert!(found.stripes.iter().all(|s| map.logical(*s) == Some(at)));
        assert_eq!(map.row(at, 1), None);
        assert_eq!(map.taken_on(DeviceId(3)), [(Physical(48 * MIB), 4 * 65536, Logical(16 * MIB))]);
        assert_eq!(map.remove(Logical(16 * MIB)).unwrap().device_bytes(), 16 * 65536);

        map.insert(striped(Profile::Raid6, 5, 4)).unwrap();
        let found = map.lookup(at, MIB).unwrap();
        // Row 1, column 0.
        assert_eq!(
            found.stripes[..],
            [Stripe { device: DeviceId(2), at: Physical(32 * MIB + 69632) }]
        );
        assert_eq!((found.ways, map.stored(at).unwrap()), (5, 3));
        let row = map.row(at, 3).unwrap();
        let devices = |of: &[Stripe]| of.iter().map(|s| s.device.0).collect::<Vec<_>>();
        assert_eq!((devices(&row.columns), devices(&row.parity)), (vec![2, 3, 4], vec![5, 1]));
        assert_eq!((row.column, row.way), (0, Way::Rebuilt(By::Without(1))));
        assert_eq!(map.logical(row.columns[2]), Some(at.plus(2 * 65536)));
        assert_eq!(map.logical(row.parity[0]), None);
        assert_eq!(map.logical(Stripe { device: DeviceId(1), at: Physical(0) }), None);
    }

    #[test]
    fn striped_chunks_consist_of_whole_rows() {
        let good = striped(Profile::Raid5, 3, 2);
        let bad = MappedChunk { length: good.length - 65536, ..good.clone() };
        let error = ChunkMap::new().insert(bad).unwrap_err().to_string();
        assert!(error.contains("a row of its raid5"), "{error}");
        let bad = MappedChunk { stripes: good.stripes[..1].into(), ..good };
        let error = ChunkMap::new().insert(bad).unwrap_err().to_string();
        assert!(error.contains("1 stripes, which raid5 does not allow"), "{error}");
    }

    #[test]
    fn with_parity_a_superblock_takes_its_row() {
        let at = |at| Stripe { device: DeviceId(at), at: Physical(64 * MIB - at * 65536) };
        let chunk =
            MappedChunk { stripes: (1..=3).map(at).collect(), ..striped(Profile::Raid5, 3, 8) };
        // The copy at 64 MiB lies in row 1 of the first stripe, 2 of the second, 3 of the third.
        assert_eq!(chunk.superblock_ranges()[..], [(Logical(16 * MIB + 2 * 65536), 6 * 65536)]);
        let chunk = MappedChunk { kind: 1 | 8, length: 24 * 65536, ..chunk };
        let each = [3, 7, 11].map(|element| (Logical(16 * MIB + element * 65536), 65536));
        assert_eq!(chunk.superblock_ranges()[..], each);
    }

    #[test]
    fn superblock_copies_are_found_through_every_stripe() {
        assert!(
            single(Logical(16 * MIB), 8 * MIB, Physical(16 * MIB)).superblock_ranges().is_empty()
        );
        let c = single(Logical(16 * MIB), 128 * MIB, Physical(32 * MIB));
        assert_eq!(c.superblock_ranges()[..], [(Logical(48 * MIB), 65536)]);
        let c = dup(Logical(16 * MIB), 40 * MIB, [Physical(64 * MIB), Physical(30 * MIB)]);
        assert_eq!(
            c.superblock_ranges()[..],
            [(Logical(16 * MIB), 65536), (Logical(50 * MIB), 65536)]
        );
        let c = single(Logical(16 * MIB), 32768, Physical(64 * MIB + 49152));
        assert_eq!(c.superblock_ranges()[..], [(Logical(16 * MIB), 16384)]);
    }

    proptest! {
        /// Whatever is inserted and removed, the map equals a plain list without overlaps.
        #[test]
        fn behaves_like_a_list(
            ops in prop::collection::vec((0u64..32, 1u64..8, 0u64..64, any::<bool>()), 1..60),
        ) {
            let map = ChunkMap::new();
            let mut model: Vec<MappedChunk> = Vec::new();
            for (start, len, at, remove) in ops {
                let c = single(Logical(start * SECTOR), len * SECTOR, Physical(at * SECTOR));
                if remove {
                    let i = model.iter().position(|m| m.start == c.start);
                    prop_assert_eq!(map.remove(c.start), i.map(|i| model.remove(i)));
                    continue;
                }
                let clash = |m: &MappedChunk| {
                    let (a, b) = (m.stripes[0].at.0, c.stripes[0].at.0);
                    m.start < c.end() && c.start < m.end() || a < b + c.length && b < a + m.length
                };
                let same = model.contains(&c);
                let expect = same || !model.iter().any(clash);
                prop_assert_eq!(map.insert(c.clone()).is_ok(), expect);
                if expect && !same {
                    model.push(c);
                }
            }
            for sector in 0..48u64 {
                let at = Logical(sector * SECTOR);
                let want = model.iter().find(|m| m.start <= at && at < m.end());
                prop_assert_eq!(map.chunk_at(at), want.cloned());
            }
        }
    }
}
