//! The bytes of a file: which differ, and by which commands they get to the receiver.
//!
//! Both files are walked part by part. A part of which both have the same place in the same extent
//! is left out. Of the others, zeros become holes; what the receiver has elsewhere is cloned; a
//! packed extent goes as it is where protocol and caller want that; the rest is read and written.
//! Neighbours that are written or zeroed are joined before.
//!
//! The older file counts as zeros behind its end. Space that is only reserved counts as zeros: a
//! stream has no word for it.

use crate::clones::{Clones, Wanted};
use crate::error::Result;
use crate::output::Output;
use crate::pair::Pair;
use crate::places::Places;
use larder_format::ObjectId;
use larder_format::items::{Compression, ExtentKind, ExtentRecord};
use larder_fs::{ExtentPart, Frozen, PartContent};
use larder_stream::{Command, MAX_DATA_V1, MAX_DATA_V2, Protocol};
use std::collections::VecDeque;
use std::ops::Range;

/// Parts that are read from a tree in one go.
const PAGE: usize = 128;
/// Bytes that are read from a file in one go: a multiple of what a command has.
const READ: usize = 1 << 20;
/// FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE.
const PUNCH: u32 = 3;
const SECTOR: u64 = larder_format::SECTOR_SIZE as u64;
static ZEROS: [u8; MAX_DATA_V1] = [0; MAX_DATA_V1];

/// How data is sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct How {
    /// Packed extents go as they are.
    pub(crate) packed: bool,
    /// Only say which ranges differ.
    pub(crate) no_data: bool,
}

/// A file of the newer subvolume while its contents are sent.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) ino: ObjectId,
    pub(crate) path: Vec<u8>,
    /// Its size in the older subvolume; `None` for a new file.
    pub(crate) old_size: Option<u64>,
    pub(crate) size: u64,
    /// Its size at the receiver at this moment.
    reached: u64,
    pub(crate) wrote: bool,
    /// The range that is to be written or zeroed next.
    pending: Option<(Action, Range<u64>)>,
}

/// What happens to a range whose neighbours it may be joined with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Write,
    Zero,
}

impl File {
    pub(crate) fn new(ino: ObjectId, path: Vec<u8>, old_size: Option<u64>, size: u64) -> Self {
        let reached = old_size.unwrap_or(0);
        Self { ino, path, old_size, size, reached, wrote: false, pending: None }
    }

    /// Where the bytes begin that the older file did not have, whatever its extents say. `None` if
    /// there are none.
    pub(crate) fn grows_from(&self) -> Option<u64> {
        let old = self.old_size.unwrap_or(0);
        (self.size > old).then_some(old - old % SECTOR)
    }
}

/// What contents are sent with.
pub(crate) struct Sending<'a, 'b, 'c> {
    pub(crate) pair: &'a Pair<'a>,
    pub(crate) places: &'b mut Places<'a>,
    pub(crate) clones: &'b mut Clones<'a>,
    pub(crate) out: &'b mut Output<'c>,
    pub(crate) how: How,
}

impl Sending<'_, '_, '_> {
    /// Makes a file shorter, before anything else: what is cloned may end at the end of the file
    /// only if the receiver's file does not go on there.
    pub(crate) fn shorten(&mut self, file: &mut File) -> Result<()> {
        if file.reached > file.size { self.truncate(file, file.size) } else { Ok(()) }
    }

    fn truncate(&mut self, file: &mut File, size: u64) -> Result<()> {
        self.out.write(&Command::Truncate { path: &file.path, size })?;
        file.reached = size;
        file.wrote = true;
        Ok(())
    }

    /// Sends what differs in a range. Ranges come in order.
    pub(crate) fn range(&mut self, file: &mut File, range: Range<u64>) -> Result<()> {
        let end = range.end.min(file.size);
        let mut new = Parts::new(self.pair.new, file.ino);
        let before = file.old_size.and_then(|size| Some((self.pair.old?, size)));
        let mut old = before.map(|(tree, size)| (Parts::new(tree, file.ino), size));
        // What differs, as far as it has one part: the older file may have many for it.
        let mut differs: Option<(Option<ExtentPart>, Range<u64>)> = None;
        let mut at = range.start;
        while at < end {
            let (part, mut stop) = new.at(at..end)?;
            let mut was = None;
            if let Some((parts, size)) = &mut old
                && at < size.next_multiple_of(SECTOR)
            {
                (was, stop) = parts.at(at..stop.min(size.next_multiple_of(SECTOR)))?;
            }
            let equal = is_equal(part.as_ref(), was.as_ref(), at);
            match &mut differs {
                Some((one, until)) if !equal && *one == part => until.end = stop,
                _ => {
                    if let Some((part, range)) = differs.take() {
                        self.piece(file, part.as_ref(), range)?;
                    }
                    differs = (!equal).then_some((part, at..stop));
                }
            }
            if equal && was.is_some() {
                self.behind_old_end(file, at..stop)?;
            }
            at = stop;
        }
        match differs {
            Some((part, range)) => self.piece(file, part.as_ref(), range),
            None => Ok(()),
        }
    }

    /// Both have the same extent at the older file's end. The receiver has zeros from there to the
    /// end of the sector, whatever the extent has.
    fn behind_old_end(&mut self, file: &mut File, range: Range<u64>) -> Result<()> {
        let old_size = file.old_size.unwrap_or(0);
        self.join(file, Action::Write, range.start.max(old_size)..range.end)
    }

    /// Everything was sent: the last range, and the size.
    pub(crate) fn finish(&mut self, file: &mut File) -> Result<()> {
        self.flush(file)?;
        if file.reached != file.size { self.truncate(file, file.size) } else { Ok(()) }
    }

    fn piece(
        &mut self,
        file: &mut File,
        part: Option<&ExtentPart>,
        range: Range<u64>,
    ) -> Result<()> {
        let Some(part) = part.filter(|part| has_data(part)) else {
            // A new file, or one that has grown, has zeros there anyway.
            let zeros = range.start..range.end.min(file.old_size.unwrap_or(0));
            return self.join(file, Action::Zero, zeros);
        };
        if self.how.no_data {
            return self.join(file, Action::Write, range);
        }
        match &part.content {
            PartContent::Inline { len, compression, data } => {
                let whole = range.start == 0 && range.end >= *len;
                if self.how.packed && *compression != Compression::None && whole {
                    self.flush(file)?;
                    let window = Window { range: 0..range.end.min(*len), of: *len, skip: 0 };
                    return self.packed(file, *compression, data, &window);
                }
                self.join(file, Action::Write, range)
            }
            PartContent::Stored(record) => self.stored(file, part, record, range),
        }
    }

    fn stored(
        &mut self,
        file: &mut File,
        part: &ExtentPart,
        record: &ExtentRecord,
        range: Range<u64>,
    ) -> Result<()> {
        let base = part.start.wrapping_sub(record.offset);
        let mut at = range.start;
        while at < range.end {
            let wanted = Wanted { ino: file.ino, at, len: range.end - at, size: file.size };
            let skip = at.wrapping_sub(base);
            let Some(found) = self.clones.find(record, skip, wanted)? else { break };
            // What is pending may be what is cloned from.
            self.flush(file)?;
            let from = self.clones.path(self.places, self.out, &found)?;
            file.path = self.places.path(self.out, file.ino)?;
            self.clones.write(self.out, &file.path, at, &found, &from)?;
            at += found.len;
            self.came(file, at);
        }
        if at < range.end {
            self.read_or_pack(file, record, base, at..range.end)?;
        }
        self.clones.sent(record, file.ino, base);
        Ok(())
    }

    fn read_or_pack(
        &mut self,
        file: &mut File,
        record: &ExtentRecord,
        base: u64,
        range: Range<u64>,
    ) -> Result<()> {
        let packed = record.disk_num_bytes;
        let worth = packed <= MAX_DATA_V2 as u64
            && range.end - range.start > packed
            && range.start.is_multiple_of(SECTOR);
        if !self.how.packed || record.compression == Compression::None || !worth {
            return self.join(file, Action::Write, range);
        }
        self.flush(file)?;
        let data = self.pair.new.read_packed(file.ino, record)?;
        let skip = range.start.wrapping_sub(base);
        self.packed(file, record.compression, &data, &Window { range, of: record.ram_bytes, skip })
    }

    fn packed(
        &mut self,
        file: &mut File,
        compression: Compression,
        data: &[u8],
        window: &Window,
    ) -> Result<()> {
        let Window { range, of, skip } = window;
        self.out.write(&Command::EncodedWrite {
            path: &file.path,
            offset: range.start,
            unencoded_file_len: range.end - range.start,
            unencoded_len: *of,
            unencoded_offset: *skip,
            compression: Some(number_of(compression)),
            encryption: Some(0),
            data,
        })?;
        self.came(file, range.end);
        Ok(())
    }

    fn came(&self, file: &mut File, end: u64) {
        file.reached = file.reached.max(end);
        file.wrote = true;
    }

    /// Joins a range with the one before it, or does what is pending first.
    fn join(&mut self, file: &mut File, action: Action, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        match &mut file.pending {
            Some((pending, before)) if *pending == action && before.end == range.start => {
                before.end = range.end;
            }
            _ => {
                self.flush(file)?;
                file.pending = Some((action, range));
            }
        }
        Ok(())
    }

    fn flush(&mut self, file: &mut File) -> Result<()> {
        match file.pending.take() {
            None => Ok(()),
            Some((_, range)) if self.how.no_data => {
                let (offset, size) = (range.start, range.end - range.start);
                file.wrote = true;
                self.out.write(&Command::UpdateExtent { path: &file.path, offset, size })
            }
            Some((Action::Write, range)) => self.write(file, range),
            Some((Action::Zero, range)) => self.zero(file, range),
        }
    }

    fn write(&mut self, file: &mut File, range: Range<u64>) -> Result<()> {
        let most = match self.out.protocol() {
            Protocol::V1 => MAX_DATA_V1,
            Protocol::V2 => MAX_DATA_V2,
        };
        let room = usize::try_from(range.end - range.start).unwrap_or(READ).min(READ / most * most);
        let mut buf = vec![0; room];
        let mut at = range.start;
        while at < range.end {
            let len = usize::try_from(range.end - at).unwrap_or(room).min(room);
            let read = self.pair.new.read(file.ino, at, &mut buf[..len])?;
            buf[read..len].fill(0);
            for data in buf[..len].chunks(most) {
                self.out.write(&Command::Write { path: &file.path, offset: at, data })?;
                at += data.len() as u64;
            }
        }
        self.came(file, range.end);
        Ok(())
    }

    fn zero(&mut self, file: &mut File, range: Range<u64>) -> Result<()> {
        if self.out.protocol() >= Protocol::V2 {
            let (offset, size) = (range.start, range.end - range.start);
            file.wrote = true;
            let path = &file.path;
            return self.out.write(&Command::Fallocate { path, mode: PUNCH, offset, size });
        }
        if range.end >= file.reached {
            // Nothing of the file is behind it: it becomes shorter, and long enough at the end.
            return self.truncate(file, range.start);
        }
        let mut at = range.start;
        while at < range.end {
            let len = usize::try_from(range.end - at).unwrap_or(ZEROS.len()).min(ZEROS.len());
            self.out.write(&Command::Write {
                path: &file.path,
                offset: at,
                data: &ZEROS[..len],
            })?;
            at += len as u64;
        }
        file.wrote = true;
        Ok(())
    }
}

/// Which part of a packed extent a file has.
struct Window {
    /// In the file.
    range: Range<u64>,
    /// Bytes of the whole extent, unpacked.
    of: u64,
    /// Where the part begins in it.
    skip: u64,
}

/// The number that a stream has for a compression. LZO's depends on the size of a sector.
fn number_of(compression: Compression) -> u32 {
    match compression {
        Compression::None => 0,
        Compression::Zlib => 1,
        Compression::Zstd => 2,
        Compression::Lzo => 3,
    }
}

fn has_data(part: &ExtentPart) -> bool {
    match &part.content {
        PartContent::Inline { .. } => true,
        PartContent::Stored(record) => record.kind == ExtentKind::Regular,
    }
}

/// Do both have the same bytes from `at` on, as far as that can be told without reading them?
fn is_equal(new: Option<&ExtentPart>, old: Option<&ExtentPart>, at: u64) -> bool {
    let (new, old) = (new.filter(|p| has_data(p)), old.filter(|p| has_data(p)));
    match (new, old) {
        (None, None) => true,
        (Some(a), Some(b)) => match (&a.content, &b.content) {
            (PartContent::Stored(r), PartContent::Stored(s)) => {
                r.disk_bytenr == s.disk_bytenr
                    && r.disk_num_bytes == s.disk_num_bytes
                    && at - a.start + r.offset == at - b.start + s.offset
            }
            (a, b) => a == b,
        },
        _ => false,
    }
}

/// The parts of a file, in order.
struct Parts<'a> {
    tree: &'a Frozen,
    ino: ObjectId,
    page: VecDeque<ExtentPart>,
    /// Up to here the page has everything. `None` before the first page.
    known: Option<u64>,
}

impl<'a> Parts<'a> {
    fn new(tree: &'a Frozen, ino: ObjectId) -> Self {
        Self { tree, ino, page: VecDeque::new(), known: None }
    }

    /// What is at the start of a range, and up to where in it. Calls come in order.
    fn at(&mut self, range: Range<u64>) -> Result<(Option<ExtentPart>, u64)> {
        let Range { start: at, end } = range;
        while self.page.front().is_some_and(|part| part.end <= at) {
            self.page.pop_front();
        }
        if self.page.is_empty() && self.known.is_none_or(|known| at >= known) {
            let page = self.tree.parts(self.ino, at, PAGE)?;
            let last = page.last().filter(|_| page.len() == PAGE).map(|part| part.end);
            self.known = Some(last.unwrap_or(u64::MAX));
            self.page = page.into();
        }
        let known = self.known.unwrap_or(u64::MAX);
        Ok(match self.page.front() {
            Some(part) if part.start <= at => (Some(part.clone()), part.end.min(end)),
            Some(part) => (None, part.start.min(end)),
            None => (None, known.min(end)),
        })
    }
}
