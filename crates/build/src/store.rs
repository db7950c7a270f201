//! Where contents go, and which files share them.
//!
//! One thread takes the results of the others in the order of the files and gives them places, one
//! behind the other. Neighbours in a file become one extent, up to 128 MiB. Nothing is written that
//! is there already: a file with the contents of an earlier one gets the same extents, and with
//! `dedupe` so does each piece of 128 KiB that is equal to an earlier one, by its SHA-256.
//!
//! What is remembered for sharing is bounded. When the bound is reached, nothing more is
//! remembered; what has been remembered is shared on.

use crate::content::{Done, File, Read, SECTOR, Stored, Unit, to_usize};
use crate::error::Result;
use crate::nodes::GENERATION;
use crate::options::Plan;
use crate::output::Sink;
use crate::report::{Compressed, Share, Shares};
use crate::sort::{ItemKey, RefKey, Sorted, Sorter};
use crate::space::Space;
use crate::spool::{Scratch, Spool};
use larder_format::items::InodeItem;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, FileExtent, InlineExtent};
use larder_format::{KeyType, Logical, MAX_DATA_EXTENT};
use std::collections::HashMap;
use std::ops::Range;
use zerocopy::IntoBytes;

/// With more references to one extent, Linux and Larder are slow to find them all. Then the
/// contents are stored once more.
const MOST_REFS: u32 = 10_000;

/// Checksums of data, in the order of addresses.
#[derive(Debug)]
pub(crate) struct Sums {
    size: u64,
    /// Ranges of addresses that have checksums.
    runs: Vec<Range<u64>>,
    bytes: Spool,
}

impl Sums {
    fn push(&mut self, at: u64, sums: &[u8]) -> Result<()> {
        self.bytes.append(sums)?;
        let end = at + sums.len() as u64 / self.size * SECTOR;
        match self.runs.last_mut() {
            Some(last) if last.end == at => last.end = end,
            _ => self.runs.push(at..end),
        }
        Ok(())
    }

    /// Calls `one` with each run of at most `most` checksums.
    pub(crate) fn each(
        &self,
        most: u64,
        mut one: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut buffer = Vec::new();
        let mut from = 0;
        for run in &self.runs {
            let mut at = run.start;
            while at < run.end {
                let n = most.min((run.end - at) / SECTOR);
                buffer.resize(to_usize(n * self.size), 0);
                self.bytes.read(from, &mut buffer)?;
                one(at, &buffer)?;
                from += n * self.size;
                at += n * SECTOR;
            }
        }
        Ok(())
    }
}

/// A part of a file, and the part of an extent that it is.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// Place and length in the file.
    at: u64,
    len: u64,
    extent: Extent,
    /// Where in the extent, unpacked.
    offset: u64,
    /// The extent's place in the list of those that can be shared.
    known: Option<usize>,
    /// Was it made for this file, and does it still grow?
    own: bool,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    start: u64,
    /// Bytes on the device.
    stored: u64,
    /// Bytes unpacked.
    length: u64,
    compression: Compression,
}

/// An extent that equal contents may share.
#[derive(Clone, Copy, Debug)]
struct Known {
    extent: Extent,
    refs: u32,
}

/// The file whose parts are coming.
#[derive(Debug, Default)]
struct Current {
    /// Bytes of extents.
    nbytes: u64,
    /// Where the last extent ends.
    end: u64,
    stored: u64,
    inline: u64,
    /// Its items, for files with the same identity.
    items: Vec<u8>,
    window: Option<Window>,
}

/// All that is known of contents when they have their places.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) space: Space,
    pub(crate) items: Sorted<ItemKey>,
    pub(crate) refs: Sorted<RefKey>,
    pub(crate) sums: Sums,
    pub(crate) shares: Shares,
    pub(crate) compressed: Compressed,
    pub(crate) shared: u64,
    /// Methods of compression that are in use.
    pub(crate) methods: Vec<Compression>,
}

/// Gives contents their places.
#[derive(Debug)]
pub(crate) struct Store<'a> {
    plan: &'a Plan,
    sink: &'a Sink,
    space: Space,
    items: Sorter<ItemKey>,
    refs: Sorter<RefKey>,
    sums: Sums,
    current: Current,
    /// Of the batch: places on the device, and parts of its buffer.
    writes: Vec<(u64, Range<usize>)>,
    /// Pieces by their hash: the extent, and where in it.
    pieces: HashMap<[u8; 32], (usize, u64)>,
    known: Vec<Known>,
    most_pieces: usize,
    /// Items of files by identity: a place in `lists`, and bytes.
    files: HashMap<u128, (u64, u32)>,
    lists: Spool,
    shares: Shares,
    compressed: Compressed,
    shared: u64,
    methods: Vec<Compression>,
}

impl<'a> Store<'a> {
    pub(crate) fn new(plan: &'a Plan, sink: &'a Sink, space: Space, scratch: &Scratch) -> Self {
        let share = plan.memory / 16;
        let size = plan.csum.size() as u64;
        Self {
            plan,
            sink,
            space,
            items: Sorter::new(scratch, share * 3),
            refs: Sorter::new(scratch, share * 2),
            sums: Sums { size, runs: Vec::new(), bytes: Spool::new(scratch, share) },
            current: Current::default(),
            writes: Vec::new(),
            pieces: HashMap::new(),
            known: Vec::new(),
            most_pieces: share * 2 / 128,
            files: HashMap::new(),
            lists: Spool::new(scratch, share),
            shares: Shares::default(),
            compressed: Compressed::default(),
            shared: 0,
            methods: Vec::new(),
        }
    }

    /// Takes the next batch, and gives its buffer back.
    pub(crate) fn take(&mut self, done: Done) -> Result<Vec<u8>> {
        for read in done.files {
            self.file(read, &done.sums)?;
        }
        for (at, bytes) in std::mem::take(&mut self.writes) {
            self.sink.write(at, &done.buffer[bytes])?;
        }
        for copy in self.space.second_copies() {
            self.sink.copy(copy.from, copy.to, copy.len)?;
        }
        Ok(done.buffer)
    }

    fn file(&mut self, read: Read, sums: &[u8]) -> Result<()> {
        let file = &*read.file;
        match read.stored? {
            Stored::Again => self.again(file)?,
            Stored::Inline { data, compression, length } => {
                let inline = InlineExtent {
                    generation: GENERATION,
                    ram_bytes: length,
                    compression,
                    data: &data,
                };
                self.inline(file, &inline)?;
            }
            Stored::Units(units) => {
                for unit in units {
                    self.unit(file, &unit, sums)?;
                }
            }
        }
        if read.last { self.end(file) } else { Ok(()) }
    }

    fn inline(&mut self, file: &File, inline: &InlineExtent<'_>) -> Result<()> {
        self.note_method(inline.compression);
        self.current.nbytes += inline.ram_bytes;
        self.current.end = inline.ram_bytes.next_multiple_of(SECTOR);
        self.current.inline += inline.data.len() as u64;
        self.item(file, 0, &inline.encode())
    }

    fn note_method(&mut self, method: Compression) {
        if !self.methods.contains(&method) {
            self.methods.push(method);
        }
    }

    fn unit(&mut self, file: &File, unit: &Unit, sums: &[u8]) -> Result<()> {
        if let Some(hash) = &unit.hash
            && self.share(file, unit, hash)?
        {
            return Ok(());
        }
        let packed = unit.compression != Compression::None;
        if packed {
            self.note_method(unit.compression);
            self.compressed.from += unit.len;
            self.compressed.to += unit.bytes.len() as u64;
        }
        let (mut at, mut bytes) = (unit.at, unit.bytes.clone());
        while !bytes.is_empty() {
            let place = self.space.take(self.plan.data_flags(), bytes.len() as u64, packed)?;
            let stored = place.end - place.start;
            let len = if packed { unit.len } else { stored };
            let extent =
                Extent { start: place.start, stored, length: len, compression: unit.compression };
            let offset = self.place(file, at, extent)?;
            let piece = bytes.start..bytes.start + to_usize(stored);
            self.note_write(place.start, piece.clone());
            if file.sums {
                let sector = to_usize(SECTOR);
                let size = self.plan.csum.size();
                let of = piece.start / sector * size..piece.end / sector * size;
                self.sums.push(place.start, &sums[of])?;
            }
            // What a mirror or the end of a chunk cuts in two is not looked for later.
            if let Some(hash) = unit.hash.filter(|_| len == unit.len) {
                self.remember(hash, offset);
            }
            self.current.stored += stored;
            at += len;
            bytes.start = piece.end;
        }
        Ok(())
    }

    fn note_write(&mut self, at: u64, bytes: Range<usize>) {
        let (place, _) = self.space.places(at);
        match self.writes.last_mut() {
            Some((start, last))
                if last.end == bytes.start && *start + last.len() as u64 == place =>
            {
                last.end = bytes.end;
            }
            _ => self.writes.push((place, bytes)),
        }
    }

    /// Gives a part of a file an extent of its own, or lets the last one grow. Tells where in the
    /// extent it is.
    fn place(&mut self, file: &File, at: u64, extent: Extent) -> Result<u64> {
        if let Some(window) = &mut self.current.window
            && window.own
            && extent.compression == Compression::None
            && window.extent.compression == Compression::None
            && window.at + window.len == at
            && window.extent.start + window.extent.stored == extent.start
            && window.extent.stored + extent.stored <= MAX_DATA_EXTENT
            && !self.space.begins_group(extent.start)
        {
            let offset = window.len;
            window.len += extent.length;
            window.extent.stored += extent.stored;
            window.extent.length += extent.length;
            if let Some(n) = window.known {
                self.known[n].extent = window.extent;
            }
            return Ok(offset);
        }
        self.close(file)?;
        let window = Window { at, len: extent.length, extent, offset: 0, known: None, own: true };
        self.current.window = Some(window);
        Ok(0)
    }

    /// Refers to contents that are there, if they are.
    fn share(&mut self, file: &File, unit: &Unit, hash: &[u8; 32]) -> Result<bool> {
        let Some(&(n, offset)) = self.pieces.get(hash) else { return Ok(false) };
        if self.known[n].refs >= MOST_REFS {
            return Ok(false);
        }
        self.shared += unit.len;
        if let Some(window) = &mut self.current.window
            && window.known == Some(n)
            && !window.own
            && window.at + window.len == unit.at
            && window.offset + window.len == offset
        {
            window.len += unit.len;
            return Ok(true);
        }
        // The extent may be the one that grows: it does not any more.
        self.close(file)?;
        self.known[n].refs += 1;
        let (at, len, extent) = (unit.at, unit.len, self.known[n].extent);
        self.current.window = Some(Window { at, len, extent, offset, known: Some(n), own: false });
        Ok(true)
    }

    /// The piece that was just placed can be shared. It is at `offset` of its extent.
    fn remember(&mut self, hash: [u8; 32], offset: u64) {
        let Some(window) = &mut self.current.window else { return };
        if self.pieces.len() >= self.most_pieces && !self.pieces.contains_key(&hash) {
            return;
        }
        let known = &mut self.known;
        let n = *window.known.get_or_insert_with(|| {
            known.push(Known { extent: window.extent, refs: 1 });
            known.len() - 1
        });
        self.pieces.insert(hash, (n, offset));
    }

    /// Writes the item of the part that grew so far.
    fn close(&mut self, file: &File) -> Result<()> {
        let Some(window) = self.current.window.take() else { return Ok(()) };
        let record = ExtentRecord {
            generation: GENERATION,
            ram_bytes: window.extent.length,
            compression: window.extent.compression,
            kind: ExtentKind::Regular,
            disk_bytenr: Logical(window.extent.start),
            disk_num_bytes: window.extent.stored,
            offset: window.offset,
            num_bytes: window.len,
        };
        self.record(file, window.at, &record)
    }

    /// Writes the item of a part of a file, and its reference.
    fn record(&mut self, file: &File, at: u64, record: &ExtentRecord) -> Result<()> {
        self.hole(file, at)?;
        self.current.nbytes += record.num_bytes;
        self.current.end = at + record.num_bytes;
        let (start, offset) = (record.disk_bytenr.0, at.wrapping_sub(record.offset));
        let key = RefKey { start, root: file.root, inode: file.inode, offset };
        self.refs.push(key, &record.disk_num_bytes.to_le_bytes())?;
        self.item(file, at, &record.encode())
    }

    /// Writes an item for the hole before `at`, where holes have items.
    fn hole(&mut self, file: &File, at: u64) -> Result<()> {
        let start = self.current.end;
        if self.plan.features.no_holes || start >= at {
            return Ok(());
        }
        self.push_item(file, start, &ExtentRecord::hole(GENERATION, at - start).encode())
    }

    fn item(&mut self, file: &File, at: u64, bytes: &[u8]) -> Result<()> {
        if file.identity.is_some() {
            let len = u32::try_from(bytes.len()).expect("within a leaf");
            self.current.items.extend_from_slice(&at.to_le_bytes());
            self.current.items.extend_from_slice(&len.to_le_bytes());
            self.current.items.extend_from_slice(bytes);
        }
        self.push_item(file, at, bytes)
    }

    fn push_item(&mut self, file: &File, offset: u64, bytes: &[u8]) -> Result<()> {
        let kind = KeyType::EXTENT_DATA.0;
        self.items.push(ItemKey { tree: file.tree, inode: file.inode, kind, offset }, bytes)
    }

    /// Gives a file the contents of the one that came before.
    fn again(&mut self, file: &File) -> Result<()> {
        let first = file.identity.and_then(|id| self.files.get(&id));
        let &(at, len) = first.expect("the first one is complete before the second comes");
        let mut list = vec![0; len as usize];
        self.lists.read(at, &mut list)?;
        let mut rest = &list[..];
        while let Some((head, tail)) = rest.split_at_checked(12) {
            let at = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
            let len = u32::from_le_bytes(head[8..].try_into().expect("four bytes")) as usize;
            let (bytes, tail) = tail.split_at(len);
            match FileExtent::parse(bytes).expect("written here") {
                FileExtent::Inline(inline) => self.inline(file, &inline)?,
                FileExtent::Stored(record) => {
                    self.shared += record.num_bytes;
                    self.record(file, at, &record)?;
                }
            }
            rest = tail;
        }
        Ok(())
    }

    /// The file is complete.
    fn end(&mut self, file: &File) -> Result<()> {
        self.close(file)?;
        if self.current.inline == 0 {
            self.hole(file, file.size.next_multiple_of(SECTOR))?;
        }
        let current = std::mem::take(&mut self.current);
        let item = InodeItem { nbytes: current.nbytes.into(), ..file.item };
        let (tree, inode, kind) = (file.tree, file.inode, KeyType::INODE_ITEM.0);
        self.items.push(ItemKey { tree, inode, kind, offset: 0 }, item.as_bytes())?;
        let (stored, inline) = (current.stored, current.inline);
        self.shares.add(file.tally, Share { files: 1, size: file.size, stored, inline });
        if let Some(id) = file.identity
            && !self.files.contains_key(&id)
        {
            let at = self.lists.append(&current.items)?;
            let len = u32::try_from(current.items.len())
                .map_err(|_| file.failed("it has too many extents"))?;
            self.files.insert(id, (at, len));
        }
        Ok(())
    }

    /// All contents have their places.
    pub(crate) fn finish(mut self) -> Result<Contents> {
        // `btrfs filesystem usage` divides by the size of all groups of a type.
        if !self.plan.features.mixed && self.space.groups().len() == 1 {
            self.space.empty(self.plan.data_flags())?;
        }
        Ok(Contents {
            space: self.space,
            items: self.items.finish()?,
            refs: self.refs.finish()?,
            sums: self.sums,
            shares: self.shares,
            compressed: self.compressed,
            shared: self.shared,
            methods: self.methods,
        })
    }
}
