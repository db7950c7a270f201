//! The first of several streams, to the byte.
//!
//! [`FirstStream`] reads no further than the end of the first stream, so another program can go on
//! from there. It knows no more of a stream than where its commands end. What it passes on is as
//! hostile as before.

use crate::command::Command;
use crate::wire::{COMMAND_HEADER, CommandHeader, STREAM_HEADER};
use std::io::{self, Read};

/// Ends behind the first command `end`.
#[derive(Debug)]
pub struct FirstStream<R> {
    inner: R,
    at: At,
    /// A header, as far as it was read and not given out.
    header: Vec<u8>,
}

/// What comes next.
#[derive(Clone, Copy, Debug)]
enum At {
    Begin,
    Header,
    /// So many bytes of a body.
    Body(usize),
    /// The body of the last command.
    LastBody(usize),
    End,
}

impl<R: Read> FirstStream<R> {
    /// The first stream of `inner`.
    pub fn new(inner: R) -> Self {
        Self { inner, at: At::Begin, header: Vec::new() }
    }

    /// Reads a header of so many bytes, or what there is of it.
    fn read_header(&mut self, bytes: usize) -> io::Result<()> {
        (&mut self.inner).take(bytes as u64).read_to_end(&mut self.header).map(drop)
    }

    /// Finds out what comes next. At most a header is read.
    fn look(&mut self) -> io::Result<()> {
        self.at = match self.at {
            At::Begin => {
                self.read_header(STREAM_HEADER)?;
                At::Header
            }
            At::Header | At::Body(0) => {
                self.read_header(COMMAND_HEADER)?;
                match self.header[..].try_into().map(CommandHeader::from_bytes) {
                    Err(_) => At::End,
                    Ok(CommandHeader { number, len, .. }) if number == Command::End {}.number() => {
                        At::LastBody(len as usize)
                    }
                    Ok(CommandHeader { len, .. }) => At::Body(len as usize),
                }
            }
            At::LastBody(0) => At::End,
            at => at,
        };
        Ok(())
    }
}

impl<R: Read> Read for FirstStream<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.header.is_empty() {
            self.look()?;
        }
        if !self.header.is_empty() {
            let n = self.header.len().min(buf.len());
            buf[..n].copy_from_slice(&self.header[..n]);
            self.header.drain(..n);
            return Ok(n);
        }
        let (At::Body(left) | At::LastBody(left)) = &mut self.at else { return Ok(0) };
        let most = buf.len().min(*left);
        let n = self.inner.read(&mut buf[..most])?;
        *left -= n;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Protocol, StreamReader, StreamWriter};

    fn stream(text: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::new(&mut bytes, Protocol::V1);
        for offset in 0..3 {
            let data = text.as_bytes();
            writer.write(&Command::Write { path: b"file", offset, data }).unwrap();
        }
        writer.write(&Command::End {}).unwrap();
        bytes
    }

    #[test]
    fn nothing_is_read_behind_the_first_stream() {
        let (one, two) = (stream("one"), stream("two"));
        let both = [one.clone(), two.clone()].concat();
        let mut input = &both[..];
        let mut commands = 0;
        let mut reader = StreamReader::new(FirstStream::new(&mut input));
        while reader.next_command().unwrap().is_some() {
            commands += 1;
        }
        assert_eq!(commands, 4);
        assert_eq!(input, two);
        let mut again = Vec::new();
        FirstStream::new(&mut input).read_to_end(&mut again).unwrap();
        assert!(again == two && input.is_empty());
    }

    #[test]
    fn a_part_of_a_stream_is_passed_on() {
        let whole = stream("text");
        for cut in 0..whole.len() {
            let mut out = Vec::new();
            FirstStream::new(&whole[..cut]).read_to_end(&mut out).unwrap();
            assert_eq!(out, whole[..cut]);
        }
    }
}
