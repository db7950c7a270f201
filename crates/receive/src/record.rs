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

/// What a stream has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The subvolume that it makes.
    pub sent: Sent,
    /// The parent, if it has only what differs.
    pub parent: Option<Sent>,
}

/// The record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What is being received.
    pub origin: Origin,
    /// How far it is, where that is known.
    pub position: Option<Position>,
}

impl Record {
    /// As the attribute has it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let words = |sent: Sent| format!("{} {}", crate::error::uuid(sent.uuid), sent.ctransid.0);
        let Origin { sent, parent } = self.origin;
        let parent = parent.map_or_else(|| "- -".to_owned(), words);
        let begin = format!("2 {} {parent}", words(sent));
        match self.position {
            Some(at) => format!("{begin} {} {:08x}", at.commands, at.digest).into_bytes(),
            None => begin.into_bytes(),
        }
    }

    /// From the attribute; nothing if it is none.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let words: Vec<&str> = std::str::from_utf8(bytes).ok()?.split(' ').collect();
        let (["2", uuid, ctransid, parent_uuid, parent_ctransid], position) =
            words.split_first_chunk()?
        else {
            return None;
        };
        let parent = match (*parent_uuid, *parent_ctransid) {
            ("-", "-") => None,
            (uuid, ctransid) => Some(parse_sent(uuid, ctransid)?),
        };
        let position = match position {
            [] => None,
            [commands, digest] => Some(Position {
                commands: commands.parse().ok()?,
                digest: u32::from_str_radix(digest, 16).ok()?,
            }),
            _ => return None,
        };
        Some(Self { origin: Origin { sent: parse_sent(uuid, ctransid)?, parent }, position })
    }
}

fn parse_sent(uuid: &str, ctransid: &str) -> Option<Sent> {
    Some(Sent { uuid: parse_uuid(uuid)?, ctransid: Generation(ctransid.parse().ok()?) })
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
        let parent = Sent { uuid: [7; 16], ctransid: Generation(3) };
        let some = Some(Position { commands: 12, digest: 0xfe });
        for parent in [None, Some(parent)] {
            for position in [None, some, Some(Position::default())] {
                let record = Record { origin: Origin { sent, parent }, position };
                assert_eq!(Record::parse(&record.encode()), Some(record));
            }
        }
        let uuid = crate::error::uuid(sent.uuid);
        let cut = format!("2 {uuid} 77 - - 12");
        let mixed = format!("2 {uuid} 77 - 7");
        let old = format!("1 {uuid} 77");
        for bad in ["", "3 x", "2 00 3 - -", &cut, &mixed, &old] {
            assert_eq!(Record::parse(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(Record::parse(b"2 \xff"), None);
    }
}
