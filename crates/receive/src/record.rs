//! What a subvolume that is half received says of itself.
//!
//! The record is an extended attribute of the subvolume's root directory. It names the stream, so
//! that no other stream goes on here. It says how many commands the subvolume has, but only while
//! that is exact: the attribute is set when all data is durable, and put back to "unknown" before
//! the next command is applied. The file system orders these changes, so a power cut cannot show a
//! position that is wrong. A digest of the checksums of these commands makes sure that a stream
//! which is read again is the same.

use crate::destination::Sent;
use larder_format::Generation;

/// The attribute's name.
pub const ATTRIBUTE: &[u8] = b"user.larder.receive";

/// How far a subvolume is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Commands that it has, without the one that made it.
    pub commands: u64,
    /// Of the checksums of these.
    pub digest: u32,
}

/// The record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What is being received.
    pub sent: Sent,
    /// How far it is, where that is known.
    pub position: Option<Position>,
}

impl Record {
    /// As the attribute has it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let uuid = crate::error::uuid(self.sent.uuid);
        let begin = format!("1 {uuid} {}", self.sent.ctransid.0);
        match self.position {
            Some(at) => format!("{begin} {} {:08x}", at.commands, at.digest).into_bytes(),
            None => begin.into_bytes(),
        }
    }

    /// From the attribute; nothing if it is none.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        if words.next()? != "1" {
            return None;
        }
        let uuid = parse_uuid(words.next()?)?;
        let ctransid = Generation(words.next()?.parse().ok()?);
        let position = match words.next() {
            Some(commands) => Some(Position {
                commands: commands.parse().ok()?,
                digest: u32::from_str_radix(words.next()?, 16).ok()?,
            }),
            None => None,
        };
        Some(Self { sent: Sent { uuid, ctransid }, position })
    }
}

pub(crate) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let hex: Vec<u8> = text.bytes().filter(|b| *b != b'-').collect();
    let mut uuid = [0; 16];
    if hex.len() != 2 * uuid.len() {
        return None;
    }
    for (byte, pair) in uuid.iter_mut().zip(hex.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_there_and_back() {
        let sent = Sent { uuid: *b"0123456789abcdef", ctransid: Generation(77) };
        for position in
            [None, Some(Position { commands: 12, digest: 0xfe }), Some(Position::default())]
        {
            let record = Record { sent, position };
            assert_eq!(Record::parse(&record.encode()), Some(record));
        }
        for bad in [&b""[..], b"2 x", b"1 00 3", b"1 \xff"] {
            assert_eq!(Record::parse(bad), None);
        }
    }
}
