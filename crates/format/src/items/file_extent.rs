//! EXTENT_DATA: where a range of a file lies.
//!
//! Two shapes share a 21-byte head: data inline in the leaf, or a window into an extent on the
//! devices (regular or preallocated). Hidden here: the numbers of kinds and compressions, and the
//! rules that keep a window inside its extent. What comes out of [`FileExtent::parse`] can be
//! computed with: ends do not overflow, a window lies inside its extent, compressed lengths are
//! bounded.

use super::{aligned, exact, prefix};
use crate::{FormatError, FormatResult, Generation, Logical, MAX_COMPRESSED_EXTENT};
use std::ops::Range;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// How an extent's bytes are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Compression {
    #[default]
    None = 0,
    Zlib = 1,
    Lzo = 2,
    Zstd = 3,
}

impl Compression {
    /// From the extent's number.
    ///
    /// # Errors
    /// The number is not 0 to 3.
    pub fn from_disk(v: u8) -> FormatResult<Self> {
        Ok(match v {
            0 => Self::None,
            1 => Self::Zlib,
            2 => Self::Lzo,
            3 => Self::Zstd,
            _ => {
                return Err(FormatError::new(format!(
                    "file extent has compression {v}, expected 0 to 3"
                )));
            }
        })
    }
    /// The extent's number.
    #[must_use]
    pub fn to_disk(self) -> u8 {
        self as u8
    }
    /// Name as mount options and properties have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Lzo => "lzo",
            Self::Zstd => "zstd",
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    generation: U64,
    ram_bytes: U64,
    compression: u8,
    encryption: u8,
    other: U16,
    kind: u8,
}
const _: () = assert!(size_of::<Head>() == INLINE_HEADER_SIZE);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Window {
    disk_bytenr: U64,
    disk_num_bytes: U64,
    offset: U64,
    num_bytes: U64,
}
const _: () = assert!(size_of::<Window>() == 32);

/// Bytes before the data of an inline extent.
pub const INLINE_HEADER_SIZE: usize = 21;
/// Bytes of a regular or preallocated extent's item.
const STORED_SIZE: usize = 53;

/// Does a stored extent have data?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExtentKind {
    /// Written, or a hole.
    Regular = 1,
    /// Allocated, reads as zeros.
    Prealloc = 2,
}

/// A regular or preallocated extent item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtentRecord {
    /// Transaction that wrote the extent.
    pub generation: Generation,
    /// Uncompressed bytes of the whole extent.
    pub ram_bytes: u64,
    /// How the whole extent is compressed.
    pub compression: Compression,
    /// Written or preallocated.
    pub kind: ExtentKind,
    /// Where the extent lies; 0 is a hole.
    pub disk_bytenr: Logical,
    /// Bytes of the whole extent on the devices.
    pub disk_num_bytes: u64,
    /// Where the window begins in the extent, in uncompressed bytes.
    pub offset: u64,
    /// Bytes of the window, uncompressed: what the item covers of the file.
    pub num_bytes: u64,
}

/// An extent that lies in the leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineExtent<'a> {
    /// Transaction that wrote the extent.
    pub generation: Generation,
    /// Uncompressed bytes.
    pub ram_bytes: u64,
    /// How `data` is compressed.
    pub compression: Compression,
    /// The bytes as they lie in the leaf.
    pub data: &'a [u8],
}

/// An EXTENT_DATA item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FileExtent<'a> {
    Inline(InlineExtent<'a>),
    Stored(ExtentRecord),
}

impl<'a> FileExtent<'a> {
    /// From the item's bytes.
    ///
    /// # Errors
    /// Unknown numbers, a size that does not fit the kind, unaligned fields, or a window that
    /// leaves its extent.
    pub fn parse(bytes: &'a [u8]) -> FormatResult<Self> {
        let (head, rest) = prefix::<Head>(bytes, "file extent")?;
        let compression = Compression::from_disk(head.compression)?;
        if head.encryption != 0 || head.other.get() != 0 {
            return Err(FormatError::new(format!(
                "file extent has encryption {} and other encoding {}, expected 0",
                head.encryption, head.other
            )));
        }
        let (generation, ram_bytes) = (Generation(head.generation.get()), head.ram_bytes.get());
        if compression != Compression::None && ram_bytes > MAX_COMPRESSED_EXTENT {
            return Err(FormatError::new(format!(
                "compressed file extent has ram_bytes {ram_bytes}, expected at most \
                    {MAX_COMPRESSED_EXTENT}"
            )));
        }
        let kind = match head.kind {
            0 => {
                if compression == Compression::None && ram_bytes != rest.len() as u64 {
                    return Err(FormatError::new(format!(
                        "inline extent has ram_bytes {ram_bytes}, expected {} as it has data",
                        rest.len()
                    )));
                }
                return Ok(Self::Inline(InlineExtent {
                    generation,
                    ram_bytes,
                    compression,
                    data: rest,
                }));
            }
            1 => ExtentKind::Regular,
            2 => ExtentKind::Prealloc,
            v => {
                return Err(FormatError::new(format!("file extent has type {v}, expected 0 to 2")));
            }
        };
        let window: &Window = exact(rest, "second part of a file extent")?;
        let record = ExtentRecord {
            generation,
            ram_bytes,
            compression,
            kind,
            disk_bytenr: Logical(window.disk_bytenr.get()),
            disk_num_bytes: window.disk_num_bytes.get(),
            offset: window.offset.get(),
            num_bytes: window.num_bytes.get(),
        };
        record.check()?;
        Ok(Self::Stored(record))
    }
    /// The item's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Inline(inline) => inline.encode(),
            Self::Stored(record) => record.encode().to_vec(),
        }
    }
    /// Transaction that wrote the extent.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match self {
            Self::Inline(inline) => inline.generation,
            Self::Stored(record) => record.generation,
        }
    }
    /// Bytes of the file that the item covers: not rounded up for an inline extent.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Inline(inline) => inline.ram_bytes,
            Self::Stored(record) => record.num_bytes,
        }
    }
    /// Does the item cover nothing? Only an inline extent can.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl InlineExtent<'_> {
    /// The item's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = Head {
            generation: U64::new(self.generation.0),
            ram_bytes: U64::new(self.ram_bytes),
            compression: self.compression.to_disk(),
            encryption: 0,
            other: U16::ZERO,
            kind: 0,
        };
        [head.as_bytes(), self.data].concat()
    }
}

impl ExtentRecord {
    /// Is there no extent behind the window?
    #[must_use]
    pub fn is_hole(&self) -> bool {
        self.disk_bytenr.0 == 0
    }
    /// A hole of `num_bytes` as Linux writes it.
    #[must_use]
    pub fn hole(generation: Generation, num_bytes: u64) -> Self {
        Self {
            generation,
            ram_bytes: num_bytes,
            compression: Compression::None,
            kind: ExtentKind::Regular,
            disk_bytenr: Logical(0),
            disk_num_bytes: 0,
            offset: 0,
            num_bytes,
        }
    }
    /// The item's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; STORED_SIZE] {
        let head = Head {
            generation: U64::new(self.generation.0),
            ram_bytes: U64::new(self.ram_bytes),
            compression: self.compression.to_disk(),
            encryption: 0,
            other: U16::ZERO,
            kind: self.kind as u8,
        };
        let window = Window {
            disk_bytenr: U64::new(self.disk_bytenr.0),
            disk_num_bytes: U64::new(self.disk_num_bytes),
            offset: U64::new(self.offset),
            num_bytes: U64::new(self.num_bytes),
        };
        let mut out = [0; STORED_SIZE];
        out[..INLINE_HEADER_SIZE].copy_from_slice(head.as_bytes());
        out[INLINE_HEADER_SIZE..].copy_from_slice(window.as_bytes());
        out
    }
    /// A part of this extent, as bytes of its window: what an item that is split keeps.
    ///
    /// # Panics
    /// If the part is empty or reaches out of the window.
    #[must_use]
    pub fn part(&self, part: Range<u64>) -> Self {
        assert!(part.start < part.end && part.end <= self.num_bytes);
        let offset = if self.is_hole() { self.offset } else { self.offset + part.start };
        Self { offset, num_bytes: part.end - part.start, ..*self }
    }
    fn check(&self) -> FormatResult<()> {
        const WHAT: &str = "file extent";
        aligned(self.ram_bytes, WHAT, "ram_bytes")?;
        aligned(self.disk_bytenr.0, WHAT, "disk_bytenr")?;
        aligned(self.disk_num_bytes, WHAT, "disk_num_bytes")?;
        aligned(self.offset, WHAT, "offset")?;
        aligned(self.num_bytes, WHAT, "num_bytes")?;
        if self.num_bytes == 0 {
            return Err(FormatError::new("file extent has num_bytes 0, expected more"));
        }
        let window_end = self.offset.checked_add(self.num_bytes);
        let disk_end = self.disk_bytenr.0.checked_add(self.disk_num_bytes);
        let (Some(window_end), Some(_)) = (window_end, disk_end) else {
            return Err(FormatError::new(format!(
                "file extent at {}+{}, offset {}+{} overflows",
                self.disk_bytenr, self.disk_num_bytes, self.offset, self.num_bytes
            )));
        };
        if self.is_hole() {
            return Ok(());
        }
        // Old kernels left a wrong ram_bytes in uncompressed extents, where it means nothing.
        let whole = if self.compression == Compression::None {
            self.disk_num_bytes
        } else {
            self.ram_bytes
        };
        if window_end > whole {
            return Err(FormatError::new(format!(
                "file extent has offset {} and num_bytes {}, which leaves its extent of {whole} \
                    bytes",
                self.offset, self.num_bytes
            )));
        }
        Ok(())
    }
}
