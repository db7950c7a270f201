//! The members of a tar archive, one after the other, with all that is said of them.
//!
//! A member may take several headers: names that are too long for one, extended headers, blocks
//! with the map of a sparse file. Hidden here is how they become one [`Member`], and where its data
//! lies. Everything is checked against the archive's length and against bounds, as an archive may
//! state anything.
//!
//! Sparse files have four forms. GNU's old one has the map in the header and in blocks behind it.
//! Those of PAX have it in extended records (0.0 in pairs, 0.1 in one list) or before the data
//! (1.0).

use super::header::{BLOCK, Header, Piece, more_pieces, until_nul};
use super::pax::{self, Extended, Said};
use crate::error::{Error, Result, shown};
use crate::read::bytes::{Bytes, Segment};
use std::ops::Range;

/// Bytes of one extended header or name.
const MOST_EXTENDED: u64 = 16 << 20;
/// Pieces of one sparse file.
const MOST_PIECES: usize = 1 << 20;
/// Headers are read in steps of this size.
const WINDOW: usize = 8 << 10;

/// What is wrong with a map that cannot be read.
const WRONG_MAP: &str = "the map of a sparse file that is not valid";

/// A member of an archive.
#[derive(Debug)]
pub(crate) struct Member {
    /// Where its first header begins.
    pub(crate) begins: u64,
    pub(crate) header: Header,
    pub(crate) name: Vec<u8>,
    pub(crate) link_name: Vec<u8>,
    pub(crate) extended: Extended,
    /// Bytes of the file, holes included.
    pub(crate) size: u64,
    /// Where its data is.
    pub(crate) data: Vec<Segment>,
    pub(crate) is_sparse: bool,
}

/// Reads an archive.
#[derive(Debug)]
pub(crate) struct Members<'a> {
    bytes: &'a Bytes,
    at: u64,
    global: Extended,
    window: Vec<u8>,
    window_at: u64,
}

/// What headers before the member's own said.
#[derive(Default)]
struct Before {
    name: Option<Vec<u8>>,
    link_name: Option<Vec<u8>>,
    local: Vec<Said>,
}

impl<'a> Members<'a> {
    /// The members from the one that begins at `at`.
    pub(crate) fn from(bytes: &'a Bytes, at: u64) -> Self {
        let global = Extended::default();
        Self { bytes, at, global, window: Vec::new(), window_at: 0 }
    }

    /// The next member. `None` at the archive's end mark.
    pub(crate) fn next(&mut self) -> Result<Option<Member>> {
        let begins = self.at;
        let mut before = Before::default();
        loop {
            let Some(header) = self.header()? else {
                return if self.at == begins + BLOCK as u64 {
                    Ok(None)
                } else {
                    Err(self.damaged("it ends behind an extended header"))
                };
            };
            match header.kind() {
                b'L' => before.name = Some(self.long_name(&header)?),
                b'K' => before.link_name = Some(self.long_name(&header)?),
                b'x' | b'X' => before.local.extend(self.records(&header)?),
                b'g' => {
                    let said = self.records(&header)?;
                    let is_of_one = |k: &[u8]| k == b"size" || k.starts_with(b"GNU.sparse.");
                    if said.iter().any(|(keyword, _)| is_of_one(keyword)) {
                        return Err(self.damaged("a header for all members has the size of one"));
                    }
                    self.global.add_global(said);
                }
                // The label of a volume is no file.
                b'V' => self.skip(&header)?,
                _ => return self.member(begins, header, before).map(Some),
            }
        }
    }

    fn damaged(&self, what: impl Into<String>) -> Error {
        Error::damaged(self.bytes.name(), what)
    }

    /// A header. `None` for the block of zeros that ends an archive.
    fn header(&mut self) -> Result<Option<Header>> {
        let first = self.at == 0;
        if self.bytes.len() == 0 {
            return Err(self.damaged("it is empty, and not even an empty archive is"));
        }
        if self.at >= self.bytes.len() {
            return Err(self.damaged("it ends without an end mark, so it is cut off"));
        }
        let block = self.block()?;
        if block == [0; BLOCK] {
            return Ok(None);
        }
        let at = self.at - BLOCK as u64;
        let what = || match first {
            true => "not a tar archive".to_owned(),
            false => format!("no header at byte {at}, where one must be"),
        };
        Header::new(&block).map(Some).ok_or_else(|| self.damaged(what()))
    }

    fn block(&mut self) -> Result<[u8; BLOCK]> {
        if self.bytes.len() - self.at.min(self.bytes.len()) < BLOCK as u64 {
            return Err(self.damaged(format!("it is cut off at byte {}", self.bytes.len())));
        }
        let end = self.window_at + self.window.len() as u64;
        if self.at < self.window_at || self.at + BLOCK as u64 > end {
            let len = (self.bytes.len() - self.at).min(WINDOW as u64);
            self.window.resize(usize::try_from(len).expect("it is small"), 0);
            self.window_at = self.at;
            let read = self.bytes.read_exact_at(&mut self.window, self.at);
            read.map_err(Error::io(self.bytes.name()))?;
        }
        let from = usize::try_from(self.at - self.window_at).expect("it is in the window");
        self.at += BLOCK as u64;
        Ok(self.window[from..from + BLOCK].try_into().expect("a block"))
    }

    /// The end of `len` bytes that begin here. They are within the archive.
    fn end_of(&self, len: u64, name: &[u8]) -> Result<u64> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        end.ok_or_else(|| {
            let (name, has) = (shown(name), self.bytes.len());
            self.damaged(format!("it is cut off at byte {has}, within {name} of {len} bytes"))
        })
    }

    /// Goes on behind `len` bytes and what fills their last block.
    fn pass(&mut self, len: u64, name: &[u8]) -> Result<()> {
        let end = self.end_of(len, name)?;
        // What fills the last block may be missing if nothing follows; then the end mark is, too.
        self.at = end.next_multiple_of(BLOCK as u64);
        Ok(())
    }

    fn stored_size(&self, header: &Header) -> Result<u64> {
        let size = header.size().and_then(|size| u64::try_from(size).ok());
        size.ok_or_else(|| self.damaged(format!("{} has no valid size", shown(&header.name()))))
    }

    fn skip(&mut self, header: &Header) -> Result<()> {
        let size = self.stored_size(header)?;
        self.pass(size, &header.name())
    }

    /// The data of a header that says something of the next one.
    fn contents(&mut self, header: &Header) -> Result<Vec<u8>> {
        let size = self.stored_size(header)?;
        if size > MOST_EXTENDED {
            let what = format!("an extended header of {size} bytes, more than {MOST_EXTENDED}");
            return Err(self.damaged(what));
        }
        self.end_of(size, b"an extended header")?;
        let mut contents = vec![0; usize::try_from(size).expect("it is bounded")];
        let read = self.bytes.read_exact_at(&mut contents, self.at);
        read.map_err(Error::io(self.bytes.name()))?;
        self.pass(size, b"an extended header")?;
        Ok(contents)
    }

    fn long_name(&mut self, header: &Header) -> Result<Vec<u8>> {
        Ok(until_nul(&self.contents(header)?).to_vec())
    }

    fn records(&mut self, header: &Header) -> Result<Vec<Said>> {
        let at = self.at;
        let contents = self.contents(header)?;
        let said = pax::parse(&contents);
        said.ok_or_else(|| self.damaged(format!("the extended header at byte {at} is not valid")))
    }

    fn member(&mut self, begins: u64, header: Header, before: Before) -> Result<Member> {
        let extended = Extended { global: self.global.global.clone(), local: before.local };
        let name = match (extended.get(b"GNU.sparse.name"), extended.get(b"path")) {
            (Some(name), _) | (None, Some(name)) => name.to_vec(),
            (None, None) => before.name.unwrap_or_else(|| header.name()),
        };
        let link_name = match extended.get(b"linkpath") {
            Some(name) => name.to_vec(),
            None => before.link_name.unwrap_or_else(|| header.link_name().to_vec()),
        };
        let refused = |what: String| Error::refused(self.bytes.name(), &name, what);
        let mut stored = match extended.number(b"size").map_err(refused)? {
            Some(size) => size,
            None => self.stored_size(&header)?,
        };
        if header.kind() == b'1' {
            // A hard link states the size of the file, but has no data.
            stored = 0;
        }
        let mut member = Member {
            begins,
            header,
            name,
            link_name,
            extended,
            size: stored,
            data: Vec::new(),
            is_sparse: false,
        };
        let pieces = self.sparse(&mut member, &mut stored)?;
        let start = self.at;
        self.pass(stored, &member.name)?;
        member.data = match pieces {
            Some(pieces) => self.mapped(&member, &pieces, start..start + stored)?,
            None if stored == 0 => Vec::new(),
            None => vec![Segment { start: 0, len: stored, at: start }],
        };
        Ok(member)
    }

    /// The pieces of a sparse file. Sets its size, and takes a map before the data away from what
    /// is stored.
    fn sparse(&mut self, member: &mut Member, stored: &mut u64) -> Result<Option<Vec<Piece>>> {
        let name = member.name.clone();
        let source = self.bytes.name();
        let refused = |what: String| Error::refused(source, &name, what);
        let extended = &member.extended;
        let (major, minor) = (extended.get(b"GNU.sparse.major"), extended.get(b"GNU.sparse.minor"));
        let is_in_records = major.is_none_or(|major| major == b"0");
        let (pieces, size) = if member.header.kind() == b'S' {
            let (pieces, size) = self.map_in_headers(&member.header, &name)?;
            (Some(pieces), size)
        } else if !is_in_records {
            if major != Some(b"1") || minor.is_some_and(|minor| minor != b"0") {
                return Err(refused("a sparse file of an unknown form".to_owned()));
            }
            let size = sparse_size(extended).map_err(refused)?;
            let before = self.at;
            let pieces = self.map_before_data(self.end_of(*stored, &name)?)?;
            *stored = stored.saturating_sub(self.at - before);
            (pieces, size)
        } else {
            let pieces = match extended.get(b"GNU.sparse.map") {
                Some(list) => list_of_pieces(list),
                None if extended.get(b"GNU.sparse.size").is_some() => pairs(&extended.local),
                None => return Ok(None),
            };
            (pieces, sparse_size(extended).map_err(refused)?)
        };
        let pieces = pieces.ok_or_else(|| refused(WRONG_MAP.to_owned()))?;
        (member.size, member.is_sparse) = (size, true);
        Ok(Some(pieces))
    }

    /// The map of GNU's old form, and the size of the file.
    fn map_in_headers(&mut self, header: &Header, name: &[u8]) -> Result<(Vec<Piece>, u64)> {
        let source = self.bytes.name();
        let wrong = || Error::refused(source, name, WRONG_MAP);
        let (mut pieces, mut more, size) = header.sparse().ok_or_else(wrong)?;
        while more {
            let (further, again) = more_pieces(&self.block()?).ok_or_else(wrong)?;
            pieces.extend(further);
            more = again;
            if pieces.len() > MOST_PIECES {
                let what = format!("a sparse file of more than {MOST_PIECES} pieces");
                return Err(Error::refused(source, name, what));
            }
        }
        Ok((pieces, size))
    }

    /// The map of form 1.0: decimal numbers in lines, filled to the end of a block. The first is
    /// the number of pairs.
    fn map_before_data(&mut self, end: u64) -> Result<Option<Vec<Piece>>> {
        let mut numbers = Vec::new();
        let mut line = Vec::new();
        let mut wanted = 1;
        while self.at < end {
            let block = self.block()?;
            for &byte in &block {
                if numbers.len() == wanted {
                    break;
                }
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > 20 {
                        return Ok(None);
                    }
                    continue;
                }
                let Some(number) = decimal(&line) else { return Ok(None) };
                line.clear();
                if numbers.is_empty() {
                    let count = usize::try_from(number).ok().filter(|&n| n <= MOST_PIECES);
                    let Some(count) = count else { return Ok(None) };
                    wanted = 1 + 2 * count;
                }
                numbers.push(number);
            }
            if numbers.len() == wanted {
                let pairs = numbers[1..].chunks(2).map(|pair| (pair[0], pair[1])).collect();
                return Ok(Some(pairs));
            }
        }
        Ok(None)
    }

    /// The segments of a sparse file. Its pieces rise, lie within the file, and have all that is
    /// stored.
    fn mapped(
        &self,
        member: &Member,
        pieces: &[Piece],
        stored: Range<u64>,
    ) -> Result<Vec<Segment>> {
        let (start, stored) = (stored.start, stored.end - stored.start);
        let mut segments = Vec::new();
        let (mut end, mut used) = (0u64, 0u64);
        for &(piece, len) in pieces {
            let piece_end = piece.checked_add(len).filter(|&e| piece >= end && e <= member.size);
            let Some(piece_end) = piece_end.filter(|_| len <= stored - used) else {
                let what = "a sparse file whose pieces overlap, or are not within it";
                return Err(Error::refused(self.bytes.name(), &member.name, what));
            };
            if len > 0 {
                segments.push(Segment { start: piece, len, at: start + used });
            }
            (end, used) = (piece_end, used + len);
        }
        if used != stored {
            let what = format!("a sparse file with {stored} bytes, whose map has {used}");
            return Err(Error::refused(self.bytes.name(), &member.name, what));
        }
        Ok(segments)
    }
}

/// The size of a sparse file, which has had two names.
fn sparse_size(extended: &Extended) -> Result<u64, String> {
    let size = match extended.number(b"GNU.sparse.realsize")? {
        Some(size) => Some(size),
        None => extended.number(b"GNU.sparse.size")?,
    };
    size.ok_or_else(|| "a sparse file without a size".to_owned())
}

/// The map of form 0.1: offsets and lengths in one list.
fn list_of_pieces(list: &[u8]) -> Option<Vec<Piece>> {
    let numbers: Option<Vec<u64>> = list.split(|&b| b == b',').map(decimal).collect();
    let numbers = numbers.filter(|numbers| numbers.len() % 2 == 0)?;
    Some(numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect())
}

/// The map of form 0.0: an offset and a length, again and again.
fn pairs(said: &[Said]) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut offset = None;
    for (keyword, value) in said {
        match &keyword[..] {
            b"GNU.sparse.offset" if offset.is_none() => offset = Some(decimal(value)?),
            b"GNU.sparse.offset" => return None,
            b"GNU.sparse.numbytes" => pieces.push((offset.take()?, decimal(value)?)),
            _ => {}
        }
    }
    offset.is_none().then_some(pieces)
}

fn decimal(text: &[u8]) -> Option<u64> {
    let digits = text.iter().all(u8::is_ascii_digit);
    str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}
