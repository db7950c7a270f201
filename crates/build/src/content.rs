//! What of a file's contents is stored, and how.
//!
//! Everything here is done by many threads at once and knows no addresses. A batch is a number of
//! small files, or a part of a large one. Its result is a buffer of whole sectors that can be
//! written as it is, the checksums of those sectors, and for each file the sectors that are its
//! own.
//!
//! The rules are those of Linux. A short file lies in the tree: up to the limit as it is, up to a
//! sector if it packs into the limit. Holes are left out, in whole sectors. Compressed data is cut
//! into pieces of 128 KiB; a piece that does not become a sector shorter is stored as it is.

use crate::error::{Error, Result};
use crate::input::OpenContents;
use crate::options::{Compress, Plan};
use crate::pipeline::Buffers;
use crate::report::{Progress, Tally};
use larder_codec::{Packer, promising};
use larder_format::items::{Compression, InodeItem};
use larder_format::{MAX_COMPRESSED_EXTENT, SECTOR_SIZE};
use larder_sources::{Contents, Locator};
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) const SECTOR: u64 = SECTOR_SIZE as u64;
const SECTOR_LEN: usize = SECTOR_SIZE as usize;
/// Bytes of a batch, about.
pub(crate) const BATCH: u64 = 1 << 20;
/// Files of a batch at most.
pub(crate) const BATCH_FILES: usize = 256;
/// Equal contents are looked for in pieces of this size.
const UNIT: u64 = MAX_COMPRESSED_EXTENT;

/// A file that has contents, or that has at least a size.
#[derive(Debug)]
pub(crate) struct File {
    /// Place of its subvolume in the list, and the subvolume's number.
    pub(crate) tree: u32,
    pub(crate) root: u64,
    pub(crate) inode: u64,
    pub(crate) item: InodeItem,
    pub(crate) size: u64,
    /// For messages.
    pub(crate) path: Vec<u8>,
    pub(crate) contents: Option<Locator>,
    pub(crate) compress: Option<Compress>,
    /// Its data has checksums. Without, it shares with no other file.
    pub(crate) sums: bool,
    pub(crate) tally: Tally,
    /// Names its contents, if others may have them, too.
    pub(crate) identity: Option<u128>,
}

impl File {
    /// An error of the source.
    pub(crate) fn failed(&self, why: impl Into<crate::BoxError>) -> Error {
        Error::Contents { path: self.path.clone(), why: why.into() }
    }
}

/// A file that more than one batch reads.
pub(crate) struct Opened(Mutex<Box<dyn Contents>>);

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opened")
    }
}

impl Opened {
    pub(crate) fn new(contents: Box<dyn Contents>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(contents)))
    }
}

/// What is to be read of a file.
#[derive(Debug)]
pub(crate) enum What {
    /// All.
    Whole,
    /// The contents are those of an earlier file with the same identity.
    Again,
    /// These sectors.
    Part { opened: Arc<Opened>, ranges: Vec<Range<u64>>, last: bool },
}

/// Work for one thread.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) files: Vec<(Arc<File>, What)>,
    /// Bytes that its buffer has to have.
    pub(crate) room: usize,
}

/// What is stored for a file.
#[derive(Debug)]
pub(crate) enum Stored {
    /// What an earlier file has.
    Again,
    /// In the tree.
    Inline { data: Vec<u8>, compression: Compression, length: u64 },
    /// In these units of the buffer; nothing if it is a hole.
    Units(Vec<Unit>),
}

/// Data that lies in one piece in the file and in the buffer.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// Place in the file.
    pub(crate) at: u64,
    /// Bytes of the file, in whole sectors.
    pub(crate) len: u64,
    /// Place in the buffer, in whole sectors.
    pub(crate) bytes: Range<usize>,
    pub(crate) compression: Compression,
    /// Of the bytes of the file, where equal contents are looked for.
    pub(crate) hash: Option<[u8; 32]>,
}

/// A file of a batch that was read.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) file: Arc<File>,
    pub(crate) stored: Result<Stored>,
    /// Nothing follows in later batches.
    pub(crate) last: bool,
}

/// The result of a batch.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) files: Vec<Read>,
    pub(crate) buffer: Vec<u8>,
    /// A checksum for each sector of the buffer that is in use.
    pub(crate) sums: Vec<u8>,
}

/// Does batches.
pub(crate) struct Worker<'a> {
    plan: &'a Plan,
    open: &'a OpenContents<'a>,
    buffers: &'a Buffers,
    progress: &'a dyn Progress,
    packer: Packer,
    raw: Vec<u8>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        open: &'a OpenContents<'a>,
        buffers: &'a Buffers,
        progress: &'a dyn Progress,
    ) -> Self {
        Self { plan, open, buffers, progress, packer: Packer::default(), raw: Vec::new() }
    }

    /// Does a batch.
    pub(crate) fn run(&mut self, batch: Batch) -> Done {
        let mut out = Out { buffer: self.buffers.take(batch.room), filled: 0 };
        let mut files = Vec::with_capacity(batch.files.len());
        for (file, what) in batch.files {
            let last = !matches!(&what, What::Part { last: false, .. });
            let stored = match what {
                What::Again => Ok(Stored::Again),
                What::Whole => self.whole(&file, &mut out),
                What::Part { opened, ranges, .. } => self.part(&file, &opened, &ranges, &mut out),
            };
            files.push(Read { file, stored, last });
        }
        let sums = self.sums(&out.buffer[..out.filled]);
        Done { files, buffer: out.buffer, sums }
    }

    fn sums(&self, bytes: &[u8]) -> Vec<u8> {
        let size = self.plan.csum.size();
        let mut sums = Vec::with_capacity(bytes.len() / SECTOR_LEN * size);
        for sector in bytes.chunks_exact(SECTOR_LEN) {
            sums.extend_from_slice(&self.plan.csum.compute(sector)[..size]);
        }
        sums
    }

    fn whole(&mut self, file: &File, out: &mut Out) -> Result<Stored> {
        let Some(locator) = &file.contents else { return Ok(Stored::Units(Vec::new())) };
        let mut contents = (self.open)(locator).map_err(|e| file.failed(e))?;
        let ranges = sectors(file, &mut *contents)?;
        if ranges.is_empty() {
            return Ok(Stored::Units(Vec::new()));
        }
        if let Some(inline) = self.inline(file, &mut *contents)? {
            return Ok(inline);
        }
        self.units(file, &mut *contents, &ranges, out)
    }

    fn part(
        &mut self,
        file: &File,
        opened: &Opened,
        ranges: &[Range<u64>],
        out: &mut Out,
    ) -> Result<Stored> {
        // A file of several batches is read by one thread at a time, and packed by many.
        let mut contents = Locked(opened);
        self.units(file, &mut contents, ranges, out)
    }

    /// The file in its leaf, if it belongs there.
    fn inline(&mut self, file: &File, contents: &mut dyn Contents) -> Result<Option<Stored>> {
        let limit = self.plan.max_inline;
        let Ok(len) = usize::try_from(file.size) else { return Ok(None) };
        let packs = file.compress.filter(|_| len > 1 && len <= SECTOR_LEN && limit > 0);
        if len > limit && packs.is_none() {
            return Ok(None);
        }
        let mut data = vec![0; len];
        self.read(file, contents, &mut data, 0)?;
        if let Some(compress) = packs
            && (compress.force || promising(&data))
            && let Some(packed) = self.packer.pack(compress.packing, &data, limit.min(len - 1))
        {
            let compression = compress.packing.method();
            return Ok(Some(Stored::Inline {
                data: packed.to_vec(),
                compression,
                length: file.size,
            }));
        }
        let compression = Compression::None;
        Ok((len <= limit).then_some(Stored::Inline { data, compression, length: file.size }))
    }

    fn units(
        &mut self,
        file: &File,
        contents: &mut dyn Contents,
        ranges: &[Range<u64>],
        out: &mut Out,
    ) -> Result<Stored> {
        let mut units = Vec::with_capacity(ranges.len());
        for range in ranges {
            match file.compress {
                Some(compress) => {
                    for at in (range.start..range.end).step_by(to_usize(UNIT)) {
                        let range = at..range.end.min(at + UNIT);
                        units.push(self.packed(file, compress, contents, range, out)?);
                    }
                }
                None => self.plain(file, contents, range.clone(), out, &mut units)?,
            }
        }
        Ok(Stored::Units(units))
    }

    /// Stores a range as it is.
    fn plain(
        &mut self,
        file: &File,
        contents: &mut dyn Contents,
        range: Range<u64>,
        out: &mut Out,
        units: &mut Vec<Unit>,
    ) -> Result<()> {
        let bytes = out.more(range.end - range.start);
        self.fill(file, contents, &mut out.buffer[bytes.clone()], range.start)?;
        if !self.shares(file) {
            let (at, len, compression) = (range.start, range.end - range.start, Compression::None);
            units.push(Unit { at, len, bytes, compression, hash: None });
            return Ok(());
        }
        for at in (range.start..range.end).step_by(to_usize(UNIT)) {
            let len = UNIT.min(range.end - at);
            let start = bytes.start + to_usize(at - range.start);
            let bytes = start..start + to_usize(len);
            let hash = Some(Sha256::digest(&out.buffer[bytes.clone()]).into());
            units.push(Unit { at, len, bytes, compression: Compression::None, hash });
        }
        Ok(())
    }

    /// Stores a piece compressed, or as it is where that does not help.
    fn packed(
        &mut self,
        file: &File,
        compress: Compress,
        contents: &mut dyn Contents,
        range: Range<u64>,
        out: &mut Out,
    ) -> Result<Unit> {
        let (at, len) = (range.start, range.end - range.start);
        let mut raw = std::mem::take(&mut self.raw);
        raw.resize(to_usize(len), 0);
        self.fill(file, contents, &mut raw, at)?;
        let hash = self.shares(file).then(|| Sha256::digest(&raw).into());
        let limit = raw.len() - SECTOR_LEN;
        let tries = limit > 0 && (compress.force || promising(&raw));
        let packed = if tries { self.packer.pack(compress.packing, &raw, limit) } else { None };
        let (data, compression) = match packed {
            Some(packed) => (packed, compress.packing.method()),
            None => (&raw[..], Compression::None),
        };
        let bytes = out.more(data.len() as u64);
        let (head, tail) = out.buffer[bytes.clone()].split_at_mut(data.len());
        head.copy_from_slice(data);
        tail.fill(0);
        self.raw = raw;
        Ok(Unit { at, len, bytes, compression, hash })
    }

    fn shares(&self, file: &File) -> bool {
        self.plan.dedupe && file.sums
    }

    /// Reads sectors of the file; zeros follow its end.
    fn fill(
        &mut self,
        file: &File,
        contents: &mut dyn Contents,
        out: &mut [u8],
        at: u64,
    ) -> Result<()> {
        let len = to_usize(file.size - at).min(out.len());
        out[len..].fill(0);
        self.read(file, contents, &mut out[..len], at)
    }

    fn read(
        &mut self,
        file: &File,
        contents: &mut dyn Contents,
        out: &mut [u8],
        at: u64,
    ) -> Result<()> {
        contents.read_exact_at(out, at).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => file.failed(format!(
                "the source changed while it was read: it ends before its {} bytes",
                file.size
            )),
            _ => file.failed(e),
        })?;
        self.progress.bytes(out.len() as u64);
        Ok(())
    }
}

/// Reads a file that is shared with other threads.
struct Locked<'a>(&'a Opened);

impl Contents for Locked<'_> {
    fn data(&mut self) -> std::io::Result<Vec<Range<u64>>> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).data()
    }
    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).read_exact_at(buf, offset)
    }
}

/// A buffer that is being filled.
struct Out {
    buffer: Vec<u8>,
    filled: usize,
}

impl Out {
    /// The next so many bytes, in whole sectors.
    fn more(&mut self, len: u64) -> Range<usize> {
        let len = to_usize(len).next_multiple_of(SECTOR_LEN);
        let range = self.filled..self.filled + len;
        self.filled += len;
        if self.buffer.len() < self.filled {
            self.buffer.resize(self.filled, 0);
        }
        range
    }
}

/// The sectors of a file that are not holes: in order, apart.
pub(crate) fn sectors(file: &File, contents: &mut dyn Contents) -> Result<Vec<Range<u64>>> {
    let parts = contents.data().map_err(|e| file.failed(e))?;
    let mut out: Vec<Range<u64>> = Vec::with_capacity(parts.len());
    let mut end = 0;
    for part in parts.into_iter().filter(|p| p.start < p.end) {
        if part.start < end || part.end > file.size {
            return Err(file.failed(format!(
                "the source changed while it was read: data at {}..{} of {} bytes",
                part.start, part.end, file.size
            )));
        }
        end = part.end;
        let part = part.start & !(SECTOR - 1)..part.end.next_multiple_of(SECTOR);
        match out.last_mut() {
            Some(last) if last.end >= part.start => last.end = part.end,
            _ => out.push(part),
        }
    }
    Ok(out)
}

/// Cuts sectors into parts of about a batch each.
pub(crate) fn parts(ranges: Vec<Range<u64>>) -> Vec<Vec<Range<u64>>> {
    let mut out: Vec<Vec<Range<u64>>> = Vec::new();
    let mut room = 0;
    for mut range in ranges {
        while range.start < range.end {
            if room == 0 {
                out.push(Vec::new());
                room = BATCH;
            }
            // A cut within a range leaves pieces of full size for compression.
            let n = room.min(range.end - range.start);
            let n = if n < range.end - range.start { (n & !(UNIT - 1)).max(UNIT) } else { n };
            let n = n.min(range.end - range.start);
            out.last_mut().expect("there is one").push(range.start..range.start + n);
            range.start += n;
            room = room.saturating_sub(n);
            if room < UNIT {
                room = 0;
            }
        }
    }
    out
}

pub(crate) fn to_usize(n: u64) -> usize {
    usize::try_from(n).expect("bytes in memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_ranges_in_pieces_that_compress_well() {
        let ranges =
            vec![0..4096, 8192..12288, 1 << 20..(5 << 20) + 4096, 1 << 30..(1 << 30) + UNIT];
        let parts = parts(ranges.clone());
        let mut joined: Vec<Range<u64>> = Vec::new();
        for part in &parts {
            let bytes: u64 = part.iter().map(|r| r.end - r.start).sum();
            assert!(bytes > 0 && bytes <= BATCH + UNIT, "{part:?}");
            for r in part {
                match joined.last_mut() {
                    Some(last) if last.end == r.start => {
                        assert!((r.start - (1 << 20)).is_multiple_of(UNIT), "{r:?}");
                        last.end = r.end;
                    }
                    _ => joined.push(r.clone()),
                }
            }
        }
        assert_eq!(joined, ranges);
    }
}
