//! Reading a stream: one command after the other, each with its checksum verified.
//!
//! Bytes are read many at a time, and commands are found among them where they lie. A [`Batch`]
//! takes all commands that have come, with the memory that they lie in, so that another thread can
//! have them without a copy. A [`Frame`] is one command. Reading and understanding are two steps,
//! so that a caller can skip commands cheaply; the checksum is verified in the first.
//!
//! What was read before an error is given out before the error is.

use crate::command::{Command, name_of};
use crate::error::{StreamError, Trouble};
use crate::wire::{COMMAND_HEADER, CommandHeader, MAGIC, Protocol, STREAM_HEADER};
use std::io::{ErrorKind, Read};
use std::ops::Range;

/// Bytes that are asked for at a time. More would not stay in a processor's own cache until the
/// checksums are verified.
const CHUNK: usize = 256 << 10;

/// One command, with the checksum that it should have.
#[derive(Clone, Copy, Debug)]
pub struct Frame<B = Vec<u8>> {
    head: Head,
    body: B,
}

/// What is known of a command without looking into it.
#[derive(Clone, Copy, Debug)]
struct Head {
    offset: u64,
    protocol: Protocol,
    number: u16,
    crc: u32,
}

impl Head {
    fn error(&self, trouble: Trouble) -> StreamError {
        StreamError::Command {
            offset: self.offset,
            number: self.number,
            name: name_of(self.number),
            trouble,
        }
    }
}

impl Default for Frame {
    fn default() -> Self {
        let head = Head { offset: 0, protocol: Protocol::V1, number: 0, crc: 0 };
        Self { head, body: Vec::new() }
    }
}

impl<B: AsRef<[u8]>> Frame<B> {
    /// Where in the stream it begins, counted from the first byte that the reader gave out.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.head.offset
    }

    /// Bytes that it takes in the stream.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (COMMAND_HEADER + self.body.as_ref().len()) as u64
    }

    /// Where in the stream it ends.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset() + self.bytes()
    }

    /// Its checksum.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        self.head.crc
    }

    /// The protocol of its stream.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.head.protocol
    }

    /// What it says.
    ///
    /// # Errors
    /// The command is unknown, or its attributes are not those that it has to have.
    pub fn command(&self) -> Result<Command<'_>, StreamError> {
        let Head { protocol, number, .. } = self.head;
        Command::parse(protocol, number, self.body.as_ref()).map_err(|t| self.head.error(t))
    }
}

/// Commands that were read together.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    /// Each with the place of its body.
    heads: Vec<(Head, Range<usize>)>,
}

impl Batch {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Are there none?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// One of them; nothing behind the last.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Frame<&[u8]>> {
        let (head, body) = self.heads.get(index)?;
        Some(Frame { head: *head, body: &self.bytes[body.clone()] })
    }
}

/// Reads streams that follow one another.
#[derive(Debug)]
pub struct StreamReader<R> {
    inner: R,
    /// What was read; the part that was not given out lies at `rest`.
    bytes: Vec<u8>,
    rest: Range<usize>,
    /// Where in the stream `rest` begins.
    offset: u64,
    /// `inner` has no more.
    ended: bool,
    /// The protocol of the stream that is being read; nothing between two streams.
    protocol: Option<Protocol>,
    /// What is wrong behind the commands that were given out last.
    failed: Option<StreamError>,
    /// Used by [`Self::next_command`].
    frame: Frame,
}

impl<R: Read> StreamReader<R> {
    /// Reads what `inner` has. It needs no buffer of its own.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            bytes: Vec::new(),
            rest: 0..0,
            offset: 0,
            ended: false,
            protocol: None,
            failed: None,
            frame: Frame::default(),
        }
    }

    /// Bytes given out so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next command; nothing when the last stream has ended.
    ///
    /// # Errors
    /// As [`Self::read`] and [`Frame::command`].
    pub fn next_command(&mut self) -> Result<Option<Command<'_>>, StreamError> {
        let mut frame = std::mem::take(&mut self.frame);
        let more = self.read(&mut frame);
        self.frame = frame;
        if more? { self.frame.command().map(Some) } else { Ok(None) }
    }

    /// Reads the next command into `frame`. Says `false` when the last stream has ended.
    ///
    /// # Errors
    /// No bytes can be read, a stream does not begin or end as it should, a command is longer than
    /// its protocol permits, or a checksum is wrong. Reading cannot go on after that.
    pub fn read(&mut self, frame: &mut Frame) -> Result<bool, StreamError> {
        let Some((head, body)) = self.next()? else { return Ok(false) };
        frame.head = head;
        frame.body.clear();
        frame.body.extend_from_slice(&self.bytes[body]);
        Ok(true)
    }

    /// Reads the next command, and those that came with it, into `batch`. Says `false` when the
    /// last stream has ended.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_batch(&mut self, batch: &mut Batch) -> Result<bool, StreamError> {
        batch.heads.clear();
        let Some(first) = self.next()? else { return Ok(false) };
        batch.heads.push(first);
        loop {
            match self.parse() {
                Ok(Parsed::Command(head, body)) => batch.heads.push((head, body)),
                Ok(Parsed::Header) => {}
                Ok(Parsed::Wants(_)) => break,
                Err(error) => {
                    self.failed = Some(error);
                    break;
                }
            }
        }
        std::mem::swap(&mut batch.bytes, &mut self.bytes);
        let rest = &batch.bytes[self.rest.clone()];
        if self.bytes.len() < rest.len() {
            self.bytes.resize(rest.len().max(CHUNK), 0);
        }
        self.bytes[..rest.len()].copy_from_slice(rest);
        self.rest = 0..rest.len();
        Ok(true)
    }

    /// The next command, and where its body lies.
    fn next(&mut self) -> Result<Option<(Head, Range<usize>)>, StreamError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        loop {
            match self.parse()? {
                Parsed::Command(head, body) => return Ok(Some((head, body))),
                Parsed::Header => {}
                Parsed::Wants(_) if self.ended => return self.at_the_end(),
                Parsed::Wants(bytes) => self.fill(bytes)?,
            }
        }
    }

    /// Takes a header or a command out of what was read.
    fn parse(&mut self) -> Result<Parsed, StreamError> {
        match self.protocol {
            Some(protocol) => self.parse_command(protocol),
            None => self.parse_stream_header(),
        }
    }

    fn parse_stream_header(&mut self) -> Result<Parsed, StreamError> {
        let offset = self.offset;
        let Some((header, _)) = self.bytes[self.rest.clone()].split_first_chunk::<STREAM_HEADER>()
        else {
            return Ok(Parsed::Wants(STREAM_HEADER));
        };
        let (magic, number) = header.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(StreamError::NotAStream { offset });
        }
        let number = u32::from_le_bytes(number.try_into().expect("the header ends with it"));
        let protocol = Protocol::from_number(number);
        self.protocol = Some(protocol.ok_or(StreamError::Protocol { offset, number })?);
        self.pass(STREAM_HEADER);
        Ok(Parsed::Header)
    }

    fn parse_command(&mut self, protocol: Protocol) -> Result<Parsed, StreamError> {
        let bytes = &self.bytes[self.rest.clone()];
        let Some((header, body)) = bytes.split_first_chunk::<COMMAND_HEADER>() else {
            return Ok(Parsed::Wants(COMMAND_HEADER));
        };
        let header = CommandHeader::from_bytes(*header);
        let head = Head { offset: self.offset, protocol, number: header.number, crc: header.crc };
        let limit = protocol.max_body();
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if len > limit {
            return Err(head.error(Trouble::TooLong { len: header.len.into(), limit }));
        }
        let Some(body) = body.get(..len) else {
            return Ok(Parsed::Wants(COMMAND_HEADER + len));
        };
        let is = header.checksum(body);
        if is != header.crc {
            return Err(head.error(Trouble::Checksum { said: header.crc, is }));
        }
        let at = self.rest.start + COMMAND_HEADER;
        self.pass(COMMAND_HEADER + len);
        self.protocol = (head.number != Command::End {}.number()).then_some(protocol);
        Ok(Parsed::Command(head, at..at + len))
    }

    /// Bytes were given out.
    fn pass(&mut self, bytes: usize) {
        self.rest.start += bytes;
        self.offset += bytes as u64;
    }

    /// There is nothing more to read, and no whole command or header is left.
    fn at_the_end<T>(&self) -> Result<Option<T>, StreamError> {
        let rest = &self.bytes[self.rest.clone()];
        let magic = rest.len().min(MAGIC.len());
        if self.protocol.is_none() && rest[..magic] != MAGIC[..magic] {
            return Err(StreamError::NotAStream { offset: self.offset });
        }
        match (self.protocol, rest.len() as u64) {
            (None, 0) if self.offset == 0 => Err(StreamError::Empty),
            (None, 0) => Ok(None),
            (_, left) => Err(StreamError::CutOff { offset: self.offset + left }),
        }
    }

    /// Reads once, with room for `bytes` that are not given out.
    fn fill(&mut self, bytes: usize) -> Result<(), StreamError> {
        let has = self.rest.len();
        if self.rest.start + bytes.max(CHUNK) > self.bytes.len() {
            self.bytes.copy_within(self.rest.clone(), 0);
            self.rest = 0..has;
        }
        if self.bytes.len() < bytes.max(CHUNK) {
            self.bytes.resize(bytes.max(CHUNK), 0);
        }
        loop {
            match self.inner.read(&mut self.bytes[self.rest.end..]) {
                Ok(0) => self.ended = true,
                Ok(n) => self.rest.end += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(source) => {
                    return Err(StreamError::Read { offset: self.offset + has as u64, source });
                }
            }
            return Ok(());
        }
    }
}

/// What begins where the next byte lies.
enum Parsed {
    /// A command, and the place of its body. Both were taken out.
    Command(Head, Range<usize>),
    /// The header of a stream, which was taken out.
    Header,
    /// Nothing that is whole: so many bytes have to be there.
    Wants(usize),
}
