//! The fixed parts: the header of a stream, the header of a command, its checksum, the limits.

use larder_format::csum::crc32c_raw;

/// What a stream begins with.
pub(crate) const MAGIC: &[u8; 13] = b"btrfs-stream\0";
/// Bytes of a stream's header: the magic and a version of 32 bits.
pub(crate) const STREAM_HEADER: usize = MAGIC.len() + 4;
/// Bytes of a command's header: length of what follows, number, checksum.
pub(crate) const COMMAND_HEADER: usize = 10;

/// Most data that Linux puts into a `write` of protocol 1.
pub const MAX_DATA_V1: usize = 48 << 10;
/// Most data that Linux puts into a command of protocol 2: an extent that is compressed.
pub const MAX_DATA_V2: usize = 128 << 10;

/// Most bytes of one command of protocol 1, header included: what Linux takes.
const MAX_COMMAND_V1: usize = 64 << 10;
/// The same of protocol 2. Linux writes 144 KiB at most, or 192 KiB where pages have 64 KiB. More
/// is accepted, because the protocol has no limit; but memory has to be bounded.
const MAX_COMMAND_V2: usize = 1 << 20;

/// Which commands and attributes a stream has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Since Linux 3.6. Data lies there unpacked, 64 KiB at a time.
    V1,
    /// Since Linux 6.0. Compressed extents as they are, punched holes, times of creation.
    V2,
}

impl Protocol {
    /// From the number in a stream's header; nothing if it is not known here.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::V1),
            2 => Some(Self::V2),
            _ => None,
        }
    }

    /// The number in a stream's header.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
        }
    }

    /// Most bytes of a command behind its header.
    pub(crate) fn max_body(self) -> usize {
        match self {
            Self::V1 => MAX_COMMAND_V1 - COMMAND_HEADER,
            Self::V2 => MAX_COMMAND_V2 - COMMAND_HEADER,
        }
    }
}

/// The header of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandHeader {
    /// Bytes that follow.
    pub(crate) len: u32,
    /// Which command.
    pub(crate) number: u16,
    /// Checksum of header and body, taken while this field is zero.
    pub(crate) crc: u32,
}

impl CommandHeader {
    pub(crate) fn from_bytes(bytes: [u8; COMMAND_HEADER]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j] = bytes;
        Self {
            len: u32::from_le_bytes([a, b, c, d]),
            number: u16::from_le_bytes([e, f]),
            crc: u32::from_le_bytes([g, h, i, j]),
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; COMMAND_HEADER] {
        let mut bytes = [0; COMMAND_HEADER];
        bytes[..4].copy_from_slice(&self.len.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.number.to_le_bytes());
        bytes[6..].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }

    /// The checksum that a command of this header and `body` has to have.
    pub(crate) fn checksum(self, body: &[u8]) -> u32 {
        crc32c_raw(crc32c_raw(0, &Self { crc: 0, ..self }.to_bytes()), body)
    }
}
