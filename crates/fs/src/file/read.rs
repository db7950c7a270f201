//! Reading: delayed bytes over extents, extents verified.
//!
//! Device reads go into the caller's buffer wherever whole sectors are wanted. Every sector of an
//! ordinary extent is compared with its checksum. If one copy fails, the others are tried, and a
//! good one is written over a bad one.
//!
//! The places of checksums ([`View`]) are taken before the file's tree is looked at. If the file
//! changes so quickly in between that a checksum is in none of these places, the read starts over
//! with a new view. The view's epoch also keeps extents from being reused while their bytes are
//! being read.

use super::dirty::{Gaps, SECTOR_LEN, index};
use super::extents::{Content, Extent, ExtentCursor, SECTOR, ceil, floor};
use super::sums::View;
use crate::api::may_wait;
use crate::engine::{Core, Inode};
use crate::error::{Error, Place, Result};
use crate::space::Run;
use crate::tree::Version;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, InodeFlags};
use larder_format::{Logical, ObjectId};
use larder_volume::ErrorKind;
use rayon::prelude::*;
use std::sync::atomic::Ordering;

/// Unaligned reads up to this size go through one buffer.
const BOUNCE: u64 = 64 << 10;
/// From this size on, sectors are verified on several threads.
const PARALLEL: usize = 256 << 10;
/// A read that must not wait is tried up to this size. Beyond it, a read that has to be repeated
/// would waste too much.
const AT_ONCE: usize = PARALLEL - 1;
/// A compressed extent is corrupt if it takes more of the device than this.
const MAX_COMPRESSED_ON_DISK: u64 = 256 << 10;
/// Views that are tried before a missing checksum is believed.
const ATTEMPTS: u32 = 16;

/// Why an attempt to read ended early.
enum ReadStop {
    /// A checksum is in none of the places that the view has.
    NoCsum(Logical),
    Fail(Error),
}
impl ReadStop {
    fn into_error(self) -> Error {
        match self {
            Self::Fail(e) => e,
            Self::NoCsum(at) => Error::corrupt(Place::block(at), "data has no checksum"),
        }
    }
}
impl<E: Into<Error>> From<E> for ReadStop {
    fn from(e: E) -> Self {
        Self::Fail(e.into())
    }
}

/// Reads what the file has at `offset`. The caller holds `op`, at least shared, and `offset +
/// buf.len()` lies within the file.
///
/// # Errors
/// `Corrupt`; a device error when no copy could be read; `WouldBlock`.
pub(super) fn read_range(core: &Core, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<()> {
    let mut gaps = Gaps::new(offset, buf.len());
    inode.data.overlay(buf, &mut gaps);
    for gap in gaps.left() {
        read_extents(core, inode, gap.start, gaps.slice(buf, gap))?;
    }
    Ok(())
}

/// Reads what the extents have at `offset`, without delayed data.
///
/// # Errors
/// As [`read_range`].
pub(super) fn read_extents(core: &Core, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<()> {
    with_reader(core, inode, |reader, version| {
        reader.read(version, ObjectId(inode.id.ino), offset, buf)
    })
}

/// Reads all of an extent as it lies on the device, packed or not. The caller knows that nothing
/// frees the extent meanwhile.
///
/// # Errors
/// As [`read_range`].
pub(crate) fn read_stored(core: &Core, inode: &Inode, record: &ExtentRecord) -> Result<Vec<u8>> {
    if record.disk_num_bytes > MAX_COMPRESSED_ON_DISK {
        let place = Place { address: Some(record.disk_bytenr), ..Place::default() };
        return Err(Error::corrupt(place, "compressed extent is too long"));
    }
    let mut packed = vec![0; index(record.disk_num_bytes)];
    with_reader(core, inode, |reader, _| reader.read_sectors(record.disk_bytenr, &mut packed))?;
    Ok(packed)
}

/// Reads a run of sectors, some of which may have no checksums. `sums` are those that there are, as
/// [`View::pieces`] gives them.
///
/// # Errors
/// As [`read_range`].
pub(super) fn read_moving(
    core: &Core,
    view: &View,
    run: Run,
    sums: &[(Logical, Vec<u8>)],
    buf: &mut [u8],
) -> Result<()> {
    let verified = Reader { core, view, verified: true };
    let plain = Reader { core, view, verified: false };
    let size = core.csum.size() as u64;
    let mut at = run.start;
    let part = |a: Logical, b: Logical| index(a.0 - run.start.0)..index(b.0 - run.start.0);
    for (start, sums) in sums {
        let end = start.plus(sums.len() as u64 / size * SECTOR);
        if at < *start {
            plain.read_sectors(at, &mut buf[part(at, *start)]).map_err(ReadStop::into_error)?;
        }
        verified.read_sectors(*start, &mut buf[part(*start, end)]).map_err(ReadStop::into_error)?;
        at = end;
    }
    if at < run.end() {
        plain.read_sectors(at, &mut buf[part(at, run.end())]).map_err(ReadStop::into_error)?;
    }
    Ok(())
}

/// Reads with one view after the other until no checksum is missing.
fn with_reader(
    core: &Core,
    inode: &Inode,
    mut read: impl FnMut(&Reader<'_>, &Version) -> Result<(), ReadStop>,
) -> Result<()> {
    let verified = !inode.state.lock().item.inode_flags().contains(InodeFlags::NODATASUM);
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let view = View::new(core);
        let version = inode.subvol.tree.version(view.epoch.clone());
        let reader = Reader { core, view: &view, verified };
        match read(&reader, &version) {
            Ok(()) => return Ok(()),
            Err(ReadStop::Fail(e)) => return Err(e),
            Err(ReadStop::NoCsum(at)) if last == Some((at, view.state)) => break,
            Err(ReadStop::NoCsum(at)) => last = Some((at, view.state)),
        }
    }
    let at = last.map_or(Logical(0), |(at, _)| at);
    let place = Place { tree: Some(inode.id.subvol), address: Some(at), ..Place::default() };
    Err(Error::corrupt(place, format!("data of inode {} has no checksum", inode.id.ino)))
}

struct Reader<'a> {
    core: &'a Core,
    view: &'a View,
    verified: bool,
}

impl Reader<'_> {
    fn read(
        &self,
        version: &Version,
        ino: ObjectId,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), ReadStop> {
        let end = offset + buf.len() as u64;
        let mut cursor = ExtentCursor::new(version, ino, offset)?;
        let mut at = offset;
        let part = |a: u64, b: u64| index(a - offset)..index(b - offset);
        while at < end {
            let extent = cursor.next()?.filter(|e| e.start < end);
            let hole_end = extent.as_ref().map_or(end, |e| e.start.max(at));
            buf[part(at, hole_end)].fill(0);
            at = hole_end;
            let Some(extent) = extent else { break };
            let stop = extent.end.min(end);
            if at < stop {
                self.read_one(version, &extent, at, &mut buf[part(at, stop)])?;
                at = stop;
            }
        }
        Ok(())
    }

    fn read_one(
        &self,
        version: &Version,
        extent: &Extent,
        at: u64,
        buf: &mut [u8],
    ) -> Result<(), ReadStop> {
        let record = match extent.content {
            Content::Stored(record) => record,
            Content::Inline { compression, .. } => {
                let unpacked;
                let data = if compression == Compression::None {
                    extent.inline_data()
                } else {
                    unpacked = extent.unpack_inline(version.tree())?;
                    &unpacked
                };
                let data = data.get(index(at)..).unwrap_or_default();
                let n = data.len().min(buf.len());
                buf[..n].copy_from_slice(&data[..n]);
                buf[n..].fill(0);
                return Ok(());
            }
        };
        if record.is_hole() || record.kind == ExtentKind::Prealloc {
            buf.fill(0);
            return Ok(());
        }
        let skip = record.offset + (at - extent.start);
        if record.compression == Compression::None {
            return self.read_plain(record.disk_bytenr, skip, buf);
        }
        if let Some(unpacked) = self.core.compression.kept(record.disk_bytenr)
            && let Some(part) = unpacked.get(index(skip)..).and_then(|rest| rest.get(..buf.len()))
        {
            buf.copy_from_slice(part);
            return Ok(());
        }
        if buf.len() as u64 == record.ram_bytes {
            return self.unpack(version, extent, &record, buf);
        }
        // Bounded by the parser.
        let mut out = vec![0; index(record.ram_bytes)];
        self.unpack(version, extent, &record, &mut out)?;
        buf.copy_from_slice(&out[index(skip)..][..buf.len()]);
        // A caller that wants a part now will probably want the rest soon.
        self.core.compression.keep(record.disk_bytenr, out.into());
        Ok(())
    }

    /// Reads bytes of an uncompressed extent, from `skip` on.
    fn read_plain(&self, extent: Logical, skip: u64, buf: &mut [u8]) -> Result<(), ReadStop> {
        let end = skip + buf.len() as u64;
        let (first, last) = (floor(skip), ceil(end));
        if skip == first && end == last {
            return self.read_sectors(extent.plus(skip), buf);
        }
        if last - first <= BOUNCE {
            let mut whole = vec![0; index(last - first)];
            self.read_sectors(extent.plus(first), &mut whole)?;
            buf.copy_from_slice(&whole[index(skip - first)..][..buf.len()]);
            return Ok(());
        }
        // One sector at each edge goes through a buffer, the middle directly to where it belongs.
        let (head, rest) = buf.split_at_mut(index(ceil(skip) - skip));
        let (middle, tail) = rest.split_at_mut(rest.len() - index(end - floor(end)));
        let mut sector = [0; SECTOR_LEN];
        if !head.is_empty() {
            self.read_sectors(extent.plus(first), &mut sector)?;
            head.copy_from_slice(&sector[index(skip - first)..]);
        }
        self.read_sectors(extent.plus(ceil(skip)), middle)?;
        if !tail.is_empty() {
            self.read_sectors(extent.plus(floor(end)), &mut sector)?;
            tail.copy_from_slice(&sector[..tail.len()]);
        }
        Ok(())
    }

    /// Fills `out` with all of a compressed extent.
    fn unpack(
        &self,
        version: &Version,
        extent: &Extent,
        record: &ExtentRecord,
        out: &mut [u8],
    ) -> Result<(), ReadStop> {
        let corrupt = |what: &str| {
            ReadStop::Fail(Error::corrupt(Place::item(version.tree(), extent.key()), what))
        };
        if record.disk_num_bytes > MAX_COMPRESSED_ON_DISK {
            return Err(corrupt("compressed extent is too long"));
        }
        let mut packed = vec![0; index(record.disk_num_bytes)];
        self.read_sectors(record.disk_bytenr, &mut packed)?;
        larder_codec::decompress(record.compression, &packed, out).map_err(|e| corrupt(e.0))
    }

    /// Reads whole sectors and verifies them.
    fn read_sectors(&self, at: Logical, buf: &mut [u8]) -> Result<(), ReadStop> {
        let patience = may_wait();
        if patience.is_ok() {
            crate::lock::before_waiting(crate::lock::Wait::Device);
        }
        let run = Run::new(at, buf.len() as u64);
        let sums = match self.verified {
            true => Some(self.view.all(self.core, run)?.ok_or(ReadStop::NoCsum(at))?),
            false => None,
        };
        if let Err(would_block) = patience {
            // Data in the host's memory need not go to another thread.
            let short = buf.len() <= AT_ONCE;
            let done = short
                && self.core.volume.read_at_once(at, buf)
                && self.all_match(buf, sums.as_deref());
            return if done { Ok(()) } else { Err(would_block.into()) };
        }
        if self.core.volume.read(at, buf, 0).is_ok() && self.all_match(buf, sums.as_deref()) {
            return Ok(());
        }
        let size = self.core.csum.size();
        for (i, sector) in buf.chunks_exact_mut(SECTOR_LEN).enumerate() {
            let sum = sums.as_ref().map(|s| &s[i * size..(i + 1) * size]);
            self.read_any_copy(at.plus(i as u64 * SECTOR), sector, sum)?;
        }
        Ok(())
    }

    fn matches(&self, sector: &[u8], sum: &[u8]) -> bool {
        self.core.csum.compute(sector)[..sum.len()] == *sum
    }

    fn all_match(&self, buf: &[u8], sums: Option<&[u8]>) -> bool {
        let Some(sums) = sums else { return true };
        let size = self.core.csum.size();
        let check = |(data, sums): (&[u8], &[u8])| {
            data.chunks_exact(SECTOR_LEN)
                .zip(sums.chunks_exact(size))
                .all(|(d, s)| self.matches(d, s))
        };
        if buf.len() < PARALLEL {
            return check((buf, sums));
        }
        const STEP: usize = 16;
        buf.par_chunks(STEP * SECTOR_LEN).zip(sums.par_chunks(STEP * size)).all(check)
    }

    /// Reads one sector from the first good copy, and writes it over the bad ones before.
    fn read_any_copy(
        &self,
        at: Logical,
        sector: &mut [u8],
        sum: Option<&[u8]>,
    ) -> Result<(), Error> {
        let core = self.core;
        let copies = match sum {
            Some(_) => core.volume.copies(at)?,
            None => core.volume.trusted_copies(at)?,
        };
        let mut bad = Vec::new();
        let mut failure = None;
        for copy in 0..copies {
            match core.volume.read(at, sector, copy) {
                Ok(()) if sum.is_none_or(|sum| self.matches(sector, sum)) => {
                    self.repair(at, sector, &bad);
                    return Ok(());
                }
                Ok(()) => {
                    core.volume.found_bad(at, copy, ErrorKind::Corruption);
                    bad.push(copy);
                }
                Err(e) => {
                    bad.push(copy);
                    failure.get_or_insert(e);
                }
            }
        }
        core.store.stats().bad_copies.fetch_add(bad.len() as u64, Ordering::Relaxed);
        Err(match failure {
            Some(e) => e.into(),
            None => {
                Error::corrupt(Place::block(at), "data does not match its checksum in any copy")
            }
        })
    }

    fn repair(&self, at: Logical, sector: &[u8], bad: &[usize]) {
        let core = self.core;
        for &copy in bad {
            core.store.stats().bad_copies.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(address = %at, copy, "damaged copy of a data sector; another copy is \
                good");
            if core.check_writable().is_ok()
                && let Err(e) = core.volume.write_one_copy(at, sector, copy)
            {
                tracing::warn!(address = %at, copy, error = %e, "repair failed");
            }
        }
    }
}
