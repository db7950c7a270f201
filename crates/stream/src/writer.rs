//! Writing a stream: headers, lengths and checksums come by themselves.

use crate::command::Command;
use crate::error::Trouble;
use crate::wire::{COMMAND_HEADER, CommandHeader, MAGIC, Protocol};
use std::io::{self, Write};

/// A command could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The output does not take it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A stream cannot say it.
    #[error("a stream cannot have this `{command}`: {trouble}")]
    Unsayable {
        /// Which command.
        command: &'static str,
        /// Why.
        trouble: Trouble,
    },
}

/// Writes streams that follow one another.
///
/// A header is written in front of the first command, and of each that follows an `end`.
#[derive(Debug)]
pub struct StreamWriter<W> {
    inner: W,
    protocol: Protocol,
    /// A header was written, and no `end` since.
    begun: bool,
    /// Streams are joined: an `end` is left out.
    joined: bool,
    /// A command as bytes.
    bytes: Vec<u8>,
}

impl<W: Write> StreamWriter<W> {
    /// Writes streams of this protocol to `inner`.
    pub fn new(inner: W, protocol: Protocol) -> Self {
        Self { inner, protocol, begun: false, joined: false, bytes: Vec::new() }
    }

    /// Makes one stream of all that follow: with one header, and with one `end`, which
    /// [`end_joined`](Self::end_joined) writes.
    pub fn join_streams(&mut self) {
        self.joined = true;
    }

    /// Writes the `end` of joined streams, if there are any.
    ///
    /// # Errors
    /// The output's.
    pub fn end_joined(&mut self) -> Result<(), WriteError> {
        if !std::mem::take(&mut self.joined) || !self.begun {
            return Ok(());
        }
        self.write(&Command::End {})
    }

    /// The protocol of its streams.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Writes a command.
    ///
    /// # Errors
    /// The protocol does not have the command, or the command is longer than it permits: nothing
    /// was written then. Or the output does not take it.
    pub fn write(&mut self, command: &Command<'_>) -> Result<(), WriteError> {
        if self.joined && matches!(command, Command::End {}) {
            return Ok(());
        }
        self.bytes.clear();
        if !self.begun {
            self.bytes.extend_from_slice(MAGIC);
            self.bytes.extend_from_slice(&self.protocol.number().to_le_bytes());
        }
        self.encode(command)
            .map_err(|trouble| WriteError::Unsayable { command: command.name(), trouble })?;
        self.inner.write_all(&self.bytes)?;
        self.begun = !matches!(command, Command::End {});
        Ok(())
    }

    fn encode(&mut self, command: &Command<'_>) -> Result<(), Trouble> {
        if command.since() > self.protocol {
            return Err(Trouble::UnknownCommand(self.protocol));
        }
        let at = self.bytes.len();
        self.bytes.extend([0; COMMAND_HEADER]);
        command.encode(self.protocol, &mut self.bytes)?;
        let (head, body) = self.bytes[at..].split_at_mut(COMMAND_HEADER);
        let limit = self.protocol.max_body();
        if body.len() > limit {
            return Err(Trouble::TooLong { len: body.len() as u64, limit });
        }
        let len = u32::try_from(body.len()).expect("within the limit");
        let mut header = CommandHeader { len, number: command.number(), crc: 0 };
        header.crc = header.checksum(body);
        head.copy_from_slice(&header.to_bytes());
        Ok(())
    }

    /// Gives the output back. What it buffers is not flushed.
    pub fn into_inner(self) -> W {
        self.inner
    }

    /// Flushes the output.
    ///
    /// # Errors
    /// The output's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
