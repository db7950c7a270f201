//! Chunks: which bytes of which device stand behind a logical address.
//!
//! The map hides profiles. Above it, an address has a number of copies and each copy lies
//! somewhere; that DUP puts both on one device, or which device a RAID profile would pick, is known
//! here only. Larder supports one device so far, thus the profiles *single* and *DUP*; the others
//! are refused by name when their chunk is added, so that nothing above ever meets half a profile.
//!
//! Chunks come off a disk: they are checked as they are added. No two may overlap, neither in the
//! logical space nor on a device — two chunks sharing a device range would let data overwrite
//! metadata long after the mount succeeded.
//!
//! Chunks are added and removed while the file system runs, and every transfer looks one up: the
//! map is behind a readers-writer lock that is held for the look-up alone, and a look-up copies the
//! few words that it found.

use crate::error::{VolumeError, VolumeResult};
use larder_format::items::chunk::{Chunk, MAX_CHUNK_LENGTH};
use larder_format::{DeviceId, Logical, Physical, SUPER_OFFSETS};
use parking_lot::RwLock;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Sector size of the format: chunk borders lie on it.
const SECTOR: u64 = 4096;
/// Bytes at each superblock copy in which no extent may lie.
const SUPER_RESERVE: u64 = 65536;

/// Type bits of a chunk that name a profile, with their names.
const PROFILES: [(u64, &str); 8] = [
    (0x8, "RAID0"),
    (0x10, "RAID1"),
    (0x20, "DUP"),
    (0x40, "RAID10"),
    (0x80, "RAID5"),
    (0x100, "RAID6"),
    (0x200, "RAID1C3"),
    (0x400, "RAID1C4"),
];
const KINDS: u64 = 7;
const DUP: u64 = 0x20;

/// Place of one copy on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Stripe {
    pub device: DeviceId,
    pub at: Physical,
}

/// Places of all copies of an address; there is always at least one.
pub type Stripes = SmallVec<[Stripe; 2]>;

/// A chunk as the map wants it: a range of the logical space and where its copies lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedChunk {
    /// First logical address.
    pub start: Logical,
    /// Bytes, logical.
    pub length: u64,
    /// Type and profile bits as in the chunk item.
    pub kind: u64,
    /// Where each copy begins.
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

    /// Bytes that the chunk takes on its devices.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.length.saturating_mul(self.stripes.len() as u64)
    }

    /// Ranges (address, bytes) inside the chunk that map to a superblock copy on some device:
    /// nothing may be allocated there, whatever the free-space tree says. Ascending, not
    /// overlapping.
    #[must_use]
    pub fn superblock_ranges(&self) -> SmallVec<[(Logical, u64); 2]> {
        let mut ranges: SmallVec<[(u64, u64); 4]> = SmallVec::new();
        for stripe in &self.stripes {
            for mirror in SUPER_OFFSETS {
                let reserve = mirror.0 & !(SUPER_RESERVE - 1);
                let from = reserve.max(stripe.at.0);
                let to = (reserve + SUPER_RESERVE).min(stripe.at.0.saturating_add(self.length));
                if from < to {
                    ranges.push((from - stripe.at.0, to - stripe.at.0));
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
        let known = PROFILES.iter().fold(KINDS, |bits, (b, _)| bits | b);
        if self.kind & !known != 0 || self.kind & KINDS == 0 {
            return Err(corrupt(format!("unknown type {:#x}", self.kind)));
        }
        let set: SmallVec<[&(u64, &str); 8]> =
            PROFILES.iter().filter(|(b, _)| self.kind & b != 0).collect();
        let copies = match set[..] {
            [] => 1,
            [(DUP, _)] => 2,
            [(_, name)] => {
                return Err(VolumeError::Unsupported {
                    device: "file system".into(),
                    what: format!("profile {name} is not supported yet (single and DUP are)"),
                });
            }
            _ => return Err(corrupt(format!("several profiles at once ({:#x})", self.kind))),
        };
        if self.stripes.len() != copies {
            return Err(corrupt(format!(
                "{} stripes where its profile has {copies}",
                self.stripes.len()
            )));
        }
        if self.length == 0 || self.length >= MAX_CHUNK_LENGTH {
            return Err(corrupt(format!("impossible length {}", self.length)));
        }
        if !self.start.0.is_multiple_of(SECTOR) || !self.length.is_multiple_of(SECTOR) {
            return Err(corrupt(format!("not aligned (length {})", self.length)));
        }
        if self.start.0.checked_add(self.length).is_none() {
            return Err(corrupt("reaches past the end of the logical space".into()));
        }
        for s in &self.stripes {
            if !s.at.0.is_multiple_of(SECTOR) || s.at.0.checked_add(self.length).is_none() {
                return Err(corrupt(format!(
                    "stripe at impossible address {} on device {}",
                    s.at, s.device
                )));
            }
        }
        Ok(())
    }
}

/// What a look-up found: the copies of a range, as far as it is contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Where the range begins, once per copy.
    pub stripes: Stripes,
    /// How many bytes from there on belong together: at most what was asked for, less at the end of
    /// a chunk.
    pub len: u64,
}

#[derive(Debug, Default)]
struct Inner {
    /// By first address.
    chunks: BTreeMap<u64, MappedChunk>,
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
    /// [`VolumeError::Unsupported`] for a profile that Larder does not have;
    /// [`VolumeError::Corrupt`] when the chunk is impossible or overlaps another one.
    pub fn insert(&self, chunk: MappedChunk) -> VolumeResult<()> {
        chunk.check()?;
        let mut inner = self.inner.write();
        let corrupt = |what: String| VolumeError::Corrupt {
            device: "chunk tree".into(),
            what: format!("chunk at {} (+{}) {what}", chunk.start, chunk.length),
        };
        if let Some((_, other)) = inner.chunks.range(..chunk.start.0 + chunk.length).next_back()
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
        for s in &chunk.stripes {
            let end = s.at.0 + chunk.length;
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
        inner.chunks.insert(chunk.start.0, chunk);
        Ok(())
    }

    /// Removes the chunk that begins at `start`, and returns it.
    pub fn remove(&self, start: Logical) -> Option<MappedChunk> {
        let mut inner = self.inner.write();
        let chunk = inner.chunks.remove(&start.0)?;
        for s in &chunk.stripes {
            inner.taken.remove(&(s.device, s.at.0));
        }
        Some(chunk)
    }

    /// Finds the copies of `at`, and how much of `len` bytes belongs to the same chunk.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn lookup(&self, at: Logical, len: u64) -> VolumeResult<Located> {
        let inner = self.inner.read();
        let chunk = inner.find(at).ok_or(VolumeError::Unmapped { at, len })?;
        let into = at.0 - chunk.start.0;
        let stripes = chunk
            .stripes
            .iter()
            .map(|s| Stripe { device: s.device, at: s.at.plus(into) })
            .collect();
        Ok(Located { stripes, len: len.min(chunk.length - into) })
    }

    /// Number of copies of the bytes at `at`.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn copies(&self, at: Logical) -> VolumeResult<usize> {
        let inner = self.inner.read();
        Ok(inner.find(at).ok_or(VolumeError::Unmapped { at, len: 0 })?.stripes.len())
    }

    /// The chunk that covers `at`.
    #[must_use]
    pub fn chunk_at(&self, at: Logical) -> Option<MappedChunk> {
        self.inner.read().find(at).cloned()
    }

    /// All chunks, by address.
    #[must_use]
    pub fn chunks(&self) -> Vec<MappedChunk> {
        self.inner.read().chunks.values().cloned().collect()
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
        self.inner.read().chunks.last_key_value().map_or(Logical(0), |(_, c)| c.end())
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
    fn find(&self, at: Logical) -> Option<&MappedChunk> {
        let (_, chunk) = self.chunks.range(..=at.0).next_back()?;
        (at < chunk.end()).then_some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use smallvec::smallvec;

    const MIB: u64 = 1 << 20;

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

    #[test]
    fn profiles_are_refused_by_name() {
        for (bit, name) in PROFILES.into_iter().filter(|(b, _)| *b != DUP) {
            match ChunkMap::new()
                .insert(MappedChunk { kind: 1 | bit, ..single(Logical(MIB), MIB, Physical(MIB)) })
            {
                Err(VolumeError::Unsupported { what, .. }) => {
                    assert!(what.contains(&format!("{name} ")), "{what}")
                }
                other => panic!("{name}: {other:?}"),
            }
        }
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
