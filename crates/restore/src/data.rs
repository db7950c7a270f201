//! Bytes of extents: from whichever copy is right, sector by sector.
//!
//! A sector is right if its checksum says so. Where there is none, the first copy that can be read
//! is taken and the bytes count as unverified. A sector that no copy has right is given as the
//! first readable copy has it, or as zeros, and counted.

use crate::reader::Reader;
use crate::tree::Tree;
use larder_format::items::keys::csum_key;
use larder_format::items::{Compression, ExtentRecord};
use larder_format::{CsumType, Logical};
use std::ops::ControlFlow;

const SECTOR: usize = 4096;
/// Longest piece that is read at once.
pub(crate) const PIECE: u64 = 1 << 20;
/// A compressed extent takes no more than its uncompressed bytes, 128 KiB; anything beyond twice
/// that is a lie.
const MOST_COMPRESSED: u64 = 256 << 10;

/// How well a read went, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DataVerdict {
    /// The checksum of no copy matches.
    pub(crate) wrong: u64,
    /// No copy can be read.
    pub(crate) unreadable: u64,
    /// There is no checksum.
    pub(crate) unverified: u64,
}

impl DataVerdict {
    pub(crate) fn add(&mut self, other: Self) {
        self.wrong += other.wrong;
        self.unreadable += other.unreadable;
        self.unverified += other.unverified;
    }
    pub(crate) fn is_bad(&self) -> bool {
        self.wrong + self.unreadable > 0
    }
}

/// Reads extents and holds them against their checksums.
pub(crate) struct Data<'a, 'o> {
    reader: &'a Reader<'o>,
    csums: Option<Tree>,
    kind: CsumType,
    /// The checksum item used last: address and bytes.
    last: Option<(u64, Vec<u8>)>,
}

impl<'a, 'o> Data<'a, 'o> {
    /// With the checksums of a tree, if there is one.
    pub(crate) fn new(reader: &'a Reader<'o>, csums: Option<Tree>) -> Self {
        Self { reader, csums, kind: reader.superblock().csum_type(), last: None }
    }

    /// Stored checksum of a sector.
    fn csum(&mut self, at: u64) -> Option<&[u8]> {
        let size = self.kind.size();
        let covers = |start: u64, len: usize| {
            let i =
                usize::try_from(at.checked_sub(start)? / SECTOR as u64).ok()?.checked_mul(size)?;
            (i + size <= len).then_some(i)
        };
        let known = self.last.as_ref().and_then(|(start, bytes)| covers(*start, bytes.len()));
        if known.is_none() {
            // An item covers no more than a leaf has room for.
            let most = (self.reader.superblock().nodesize() as u64 / size as u64) * SECTOR as u64;
            let (low, high) = (csum_key(Logical(at.saturating_sub(most))), csum_key(Logical(at)));
            let mut found = None;
            self.csums.as_ref()?.walk_back(self.reader, low, high, &mut |item| {
                found = Some((item.key.offset, item.data.to_vec()));
                ControlFlow::Break(())
            });
            self.last = found;
        }
        let (start, bytes) = self.last.as_ref()?;
        let i = covers(*start, bytes.len())?;
        bytes.get(i..i + size)
    }

    /// Fills `buf`, whole sectors, from an address; `verify` against checksums.
    pub(crate) fn read(&mut self, at: Logical, buf: &mut [u8], verify: bool) -> DataVerdict {
        let mut verdict = DataVerdict::default();
        let volume = self.reader.volume();
        let copies = volume.copies(at).unwrap_or(0);
        let whole = copies > 0 && volume.read(at, buf, 0).is_ok();
        let kind = self.kind;
        for (i, sector) in buf.chunks_mut(SECTOR).enumerate() {
            let here = at.plus((i * SECTOR) as u64);
            let len = sector.len() as u64;
            let stored = if verify { self.csum(here.0).map(<[u8]>::to_vec) } else { None };
            let right = |bytes: &[u8]| {
                stored.as_ref().is_none_or(|s| kind.compute(bytes)[..kind.size()] == s[..])
            };
            let mut readable = whole || (copies > 0 && volume.read(here, sector, 0).is_ok());
            if !readable {
                sector.fill(0);
            }
            let mut good = readable && right(sector);
            for copy in 1..copies {
                if good {
                    break;
                }
                let mut other = vec![0; sector.len()];
                if volume.read(here, &mut other, copy).is_ok() {
                    good = right(&other);
                    if good || !readable {
                        sector.copy_from_slice(&other);
                    }
                    readable = true;
                }
            }
            match (good, readable) {
                (true, _) if stored.is_none() => verdict.unverified += len,
                (true, _) => {}
                (false, true) => verdict.wrong += len,
                (false, false) => verdict.unreadable += len,
            }
        }
        verdict
    }

    /// Unpacks a compressed extent and gives what its window covers of the file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn unpack(
        &mut self,
        record: &ExtentRecord,
        verify: bool,
    ) -> Result<(Vec<u8>, DataVerdict), String> {
        if record.compression == Compression::None || record.disk_num_bytes > MOST_COMPRESSED {
            return Err(format!("a compressed extent has {} bytes", record.disk_num_bytes));
        }
        let len = |n: u64| usize::try_from(n).map_err(|_| "an extent is too long".to_owned());
        let mut packed = vec![0; len(record.disk_num_bytes)?];
        let verdict = self.read(record.disk_bytenr, &mut packed, verify);
        let mut out = vec![0; len(record.ram_bytes)?];
        larder_codec::decompress(record.compression, &packed, &mut out).map_err(|e| {
            format!("{e}{}", if verdict.is_bad() { " (its bytes are damaged)" } else { "" })
        })?;
        let (from, to) =
            (len(record.offset)?, len(record.offset.saturating_add(record.num_bytes))?);
        let window = out.get(from..to).ok_or("a window leaves its extent")?.to_vec();
        Ok((window, verdict))
    }
}
