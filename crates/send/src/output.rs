//! Where commands go: written one after the other, and counted.

use crate::error::Result;
use larder_stream::{Command, Protocol, StreamWriter, WriteError};
use std::io::Write;

/// What a stream has so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Commands.
    pub commands: u64,
    /// Bytes of files in them, packed where they are.
    pub data: u64,
    /// Bytes of files that the receiver shares with what it has.
    pub cloned: u64,
    /// Inodes that differed.
    pub inodes: u64,
}

/// What takes commands, whatever it writes them to.
trait Sink {
    fn protocol(&self) -> Protocol;
    fn write(&mut self, command: &Command<'_>) -> Result<(), WriteError>;
}

impl<W: Write> Sink for StreamWriter<W> {
    fn protocol(&self) -> Protocol {
        self.protocol()
    }
    fn write(&mut self, command: &Command<'_>) -> Result<(), WriteError> {
        self.write(command)
    }
}

/// The stream that is being written, and the caller that watches.
pub(crate) struct Output<'a> {
    writer: &'a mut dyn Sink,
    watch: &'a mut dyn FnMut(&Summary),
    pub(crate) summary: Summary,
}

impl<'a> Output<'a> {
    pub(crate) fn new<W: Write>(
        writer: &'a mut StreamWriter<W>,
        watch: &'a mut dyn FnMut(&Summary),
    ) -> Self {
        Self { writer, watch, summary: Summary::default() }
    }

    pub(crate) fn protocol(&self) -> Protocol {
        self.writer.protocol()
    }

    pub(crate) fn write(&mut self, command: &Command<'_>) -> Result<()> {
        self.writer.write(command)?;
        self.summary.commands += 1;
        match command {
            Command::Write { data, .. } | Command::EncodedWrite { data, .. } => {
                self.summary.data += data.len() as u64;
            }
            Command::Clone { len, .. } => self.summary.cloned += len,
            _ => {}
        }
        (self.watch)(&self.summary);
        Ok(())
    }
}

impl std::fmt::Debug for Output<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("summary", &self.summary).finish_non_exhaustive()
    }
}
