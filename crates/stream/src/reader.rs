//! Reading a stream: one command after the other, each with its checksum verified.
//!
//! A [`Frame`] owns the bytes of one command. It can go to another thread, and be used again.
//! Reading and understanding are two steps, so that a caller can skip commands cheaply; the
//! checksum is verified in the first.

use crate::command::{Command, name_of};
use crate::error::{StreamError, Trouble};
use crate::wire::{COMMAND_HEADER, CommandHeader, MAGIC, Protocol, STREAM_HEADER};
use std::io::{ErrorKind, Read};

/// The bytes of one command, which have the checksum that they should have.
#[derive(Debug)]
pub struct Frame {
    offset: u64,
    protocol: Protocol,
    number: u16,
    body: Vec<u8>,
}

impl Default for Frame {
    fn default() -> Self {
        Self { offset: 0, protocol: Protocol::V1, number: 0, body: Vec::new() }
    }
}

impl Frame {
    /// Where in the stream it begins, counted from the first byte that the reader gave out.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes that it takes in the stream.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (COMMAND_HEADER + self.body.len()) as u64
    }

    /// The protocol of its stream.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// What it says.
    ///
    /// # Errors
    /// The command is unknown, or its attributes are not those that it has to have.
    pub fn command(&self) -> Result<Command<'_>, StreamError> {
        Command::parse(self.protocol, self.number, &self.body).map_err(|t| self.error(t))
    }

    fn error(&self, trouble: Trouble) -> StreamError {
        StreamError::Command {
            offset: self.offset,
            number: self.number,
            name: name_of(self.number),
            trouble,
        }
    }
}

/// Reads streams that follow one another.
///
/// It reads a few bytes at a time: give it a buffered reader.
#[derive(Debug)]
pub struct StreamReader<R> {
    inner: R,
    /// Bytes read so far.
    offset: u64,
    /// The protocol of the stream that is being read; nothing between two streams.
    protocol: Option<Protocol>,
    /// Used by [`Self::next_command`].
    frame: Frame,
}

impl<R: Read> StreamReader<R> {
    /// Reads what `inner` has.
    pub fn new(inner: R) -> Self {
        Self { inner, offset: 0, protocol: None, frame: Frame::default() }
    }

    /// Bytes read so far.
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
        let protocol = match self.protocol {
            Some(protocol) => protocol,
            None => match self.read_stream_header()? {
                Some(protocol) => protocol,
                None => return Ok(false),
            },
        };
        self.read_command(protocol, frame)?;
        self.protocol = (frame.number != Command::End {}.number()).then_some(protocol);
        Ok(true)
    }

    fn read_stream_header(&mut self) -> Result<Option<Protocol>, StreamError> {
        let offset = self.offset;
        let mut header = [0; STREAM_HEADER];
        let got = self.fill(&mut header)?;
        if got == 0 {
            return if offset == 0 { Err(StreamError::Empty) } else { Ok(None) };
        }
        let (magic, number) = header.split_at(MAGIC.len());
        if magic[..got.min(MAGIC.len())] != MAGIC[..got.min(MAGIC.len())] {
            return Err(StreamError::NotAStream { offset });
        }
        if got < STREAM_HEADER {
            return Err(StreamError::CutOff { offset: self.offset });
        }
        let number = u32::from_le_bytes(number.try_into().expect("the header ends with it"));
        let protocol = Protocol::from_number(number);
        self.protocol = protocol;
        protocol.ok_or(StreamError::Protocol { offset, number }).map(Some)
    }

    fn read_command(&mut self, protocol: Protocol, frame: &mut Frame) -> Result<(), StreamError> {
        frame.offset = self.offset;
        frame.protocol = protocol;
        let mut header = [0; COMMAND_HEADER];
        self.fill_whole(&mut header)?;
        let header = CommandHeader::from_bytes(header);
        frame.number = header.number;
        let limit = protocol.max_body();
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if len > limit {
            return Err(frame.error(Trouble::TooLong { len: header.len.into(), limit }));
        }
        frame.body.resize(len, 0);
        self.fill_whole(&mut frame.body)?;
        let is = header.checksum(&frame.body);
        if is != header.crc {
            return Err(frame.error(Trouble::Checksum { said: header.crc, is }));
        }
        Ok(())
    }

    fn fill_whole(&mut self, buf: &mut [u8]) -> Result<(), StreamError> {
        if self.fill(buf)? < buf.len() {
            return Err(StreamError::CutOff { offset: self.offset });
        }
        Ok(())
    }

    /// Reads until `buf` is full or the input ends, and says how much there was.
    fn fill(&mut self, buf: &mut [u8]) -> Result<usize, StreamError> {
        let mut done = 0;
        while done < buf.len() {
            match self.inner.read(&mut buf[done..]) {
                Ok(0) => break,
                Ok(n) => {
                    done += n;
                    self.offset += n as u64;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(StreamError::Read { offset: self.offset, source }),
            }
        }
        Ok(done)
    }
}
