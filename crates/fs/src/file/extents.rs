//! Where a file's bytes are: its EXTENT_DATA items, checked, in order.
//!
//! Hidden here: the item that covers an offset may begin before it; holes may have items or none;
//! and all that can be wrong with the items of a damaged image. What [`ExtentCursor`] yields is
//! aligned, does not overflow and does not overlap.

pub(crate) use crate::base::sectors::{MAX_FILE_SIZE, SECTOR, ceil, floor};
use crate::error::{Error, Place, Result};
use crate::tree::{Cursor, Item, Version};
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, FileExtent};
use larder_format::{FileOffset, Key, KeyType, Logical, ObjectId, TreeId};

/// What an extent item says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Data in the leaf.
    Inline {
        /// Uncompressed bytes.
        ram_bytes: u64,
        /// How they are compressed.
        compression: Compression,
    },
    /// A window into an extent, or an explicit hole.
    Stored(ExtentRecord),
}

impl Content {
    /// Has it bytes that may be other than zero?
    pub(crate) fn is_data(&self) -> bool {
        match self {
            Self::Inline { .. } => true,
            Self::Stored(r) => !r.is_hole() && r.kind == ExtentKind::Regular,
        }
    }
}

/// An extent item of a file.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    /// First byte of the file that it covers.
    pub(crate) start: u64,
    /// First byte behind the extent, rounded up to a sector.
    pub(crate) end: u64,
    /// What it says.
    pub(crate) content: Content,
    item: Item,
}

impl Extent {
    pub(crate) fn parse(tree: TreeId, item: Item) -> Result<Self> {
        let corrupt = |what: &str| Error::corrupt(Place::item(tree, item.key), what);
        let parsed = FileExtent::parse(item.data()).map_err(|e| corrupt(&e.0))?;
        let start = item.key.offset;
        let (len, content) = match parsed {
            FileExtent::Inline(i) => {
                if start != 0 {
                    return Err(corrupt("inline extent is not at the start of its file"));
                }
                let content =
                    Content::Inline { ram_bytes: i.ram_bytes, compression: i.compression };
                (i.ram_bytes.checked_next_multiple_of(SECTOR), content)
            }
            FileExtent::Stored(r) => (Some(r.num_bytes), Content::Stored(r)),
        };
        let end =
            len.and_then(|len| start.checked_add(len)).filter(|end| *end <= MAX_FILE_SIZE + 1);
        let end = end.ok_or_else(|| corrupt("file extent leaves the range of files"))?;
        if !start.is_multiple_of(SECTOR) {
            return Err(corrupt("file extent does not begin at a sector"));
        }
        Ok(Self { start, end: end.max(SECTOR.min(start + SECTOR)), content, item })
    }
    /// Fails if the extent begins before the end of the one before it.
    pub(crate) fn follows(&self, tree: TreeId, end: u64) -> Result<()> {
        if self.start < end {
            let place = Place::item(tree, self.key());
            return Err(Error::corrupt(place, "file extent overlaps the one before it"));
        }
        Ok(())
    }
    /// What it says, unless the data is in the leaf.
    pub(crate) fn stored(&self) -> Option<&ExtentRecord> {
        match &self.content {
            Content::Stored(record) => Some(record),
            Content::Inline { .. } => None,
        }
    }
    /// The item's key.
    pub(crate) fn key(&self) -> Key {
        self.item.key
    }
    /// Address of the leaf that has the item.
    pub(crate) fn leaf(&self) -> Logical {
        self.item.leaf_address()
    }
    /// The item's bytes behind the head: data of an inline extent, as it lies in the leaf.
    pub(crate) fn inline_data(&self) -> &[u8] {
        match FileExtent::parse(self.item.data()) {
            Ok(FileExtent::Inline(i)) => i.data,
            _ => &[],
        }
    }
    /// The whole content of an inline extent, unpacked.
    ///
    /// # Errors
    /// `Corrupt` when it cannot be unpacked.
    pub(crate) fn unpack_inline(&self, tree: TreeId) -> Result<Vec<u8>> {
        let Content::Inline { ram_bytes, compression } = self.content else {
            return Ok(Vec::new());
        };
        // Bounded: compressed extents by the parser, others by the leaf.
        let mut out = vec![0; usize::try_from(ram_bytes).expect("bounded by the parser")];
        larder_codec::decompress(compression, self.inline_data(), &mut out)
            .map_err(|e| Error::corrupt(Place::item(tree, self.key()), e.0))?;
        Ok(out)
    }
}

/// Walks through the extents of a file.
#[derive(Debug)]
pub(crate) struct ExtentCursor {
    cursor: Cursor,
    tree: TreeId,
    ino: ObjectId,
    /// The last extent that ends at or before the start, if this file has one.
    before: Option<Extent>,
    /// The first extent, which is found already, until it is yielded.
    first: Option<Extent>,
    reached: u64,
}

impl ExtentCursor {
    /// A cursor whose first extent is the first that ends behind `start`.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn new(version: &Version, ino: ObjectId, start: u64) -> Result<Self> {
        let key = extent_data_key(ino, FileOffset(start));
        let mut cursor = version.seek(&key)?;
        let mut this_before = None;
        let mut first = None;
        let tree = version.tree();
        if let Some(item) = cursor.prev()? {
            if item.key.objectid == ino && item.key.kind == KeyType::EXTENT_DATA {
                let extent = Extent::parse(tree, item)?;
                if extent.end > start {
                    first = Some(extent);
                } else {
                    this_before = Some(extent);
                }
            }
            cursor.next()?;
        }
        let reached = this_before.as_ref().map_or(0, |e: &Extent| e.end);
        Ok(Self { cursor, tree, ino, before: this_before, first, reached })
    }
    /// The extent just before the start, if it ends at or before it.
    pub(crate) fn before(&self) -> Option<&Extent> {
        self.before.as_ref()
    }
    /// The next extent.
    ///
    /// # Errors
    /// Reading or corruption.
    pub(crate) fn next(&mut self) -> Result<Option<Extent>> {
        let extent = match self.first.take() {
            Some(extent) => extent,
            None => match self.cursor.next()? {
                Some(item)
                    if item.key.objectid == self.ino && item.key.kind == KeyType::EXTENT_DATA =>
                {
                    Extent::parse(self.tree, item)?
                }
                _ => return Ok(None),
            },
        };
        extent.follows(self.tree, self.reached)?;
        self.reached = extent.end;
        Ok(Some(extent))
    }
}
