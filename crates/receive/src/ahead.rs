//! Reading ahead: a thread reads the stream and verifies checksums while commands are applied.
//!
//! Commands come in batches, in their order, and an error of the stream comes behind the commands
//! that stand before it. So applying sees what it would see if it read by itself. A few batches may
//! wait, which bounds memory. Each goes back to be filled again.
//!
//! The thread may be waiting for bytes when receiving ends early. It is not waited for: it ends
//! with the next bytes that it gets, or with the process.

use crate::error::Error;
use larder_stream::{Batch, Frame, StreamError, StreamReader};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Batches that may wait.
const WAITING: usize = 4;
/// How long the user's wish to end may go unnoticed while no command comes.
const LOOK_UP: Duration = Duration::from_millis(100);

/// What the thread has read: commands, or nothing at the stream's end.
type Next = Result<Option<Batch>, StreamError>;

/// The commands of a stream.
#[derive(Debug)]
pub(crate) struct Ahead {
    read: Receiver<Next>,
    used: Sender<Batch>,
    batches: VecDeque<Batch>,
    /// Commands of the first batch that were passed.
    passed: usize,
    /// What comes behind the batches.
    end: Option<Result<(), StreamError>>,
    bytes: u64,
}

impl Ahead {
    /// Begins to read.
    pub(crate) fn begin(input: impl Read + Send + 'static) -> Result<Self, Error> {
        let (to_read, read) = sync_channel(WAITING);
        let (used, to_use) = channel();
        let reader = StreamReader::new(input);
        thread::Builder::new()
            .name("larder-stream".into())
            .spawn(move || run(reader, &to_read, &to_use))
            .map_err(|source| StreamError::Read { offset: 0, source })?;
        Ok(Self { read, used, batches: VecDeque::new(), passed: 0, end: None, bytes: 0 })
    }

    /// Waits until a command is there. Says `false` when the last stream has ended.
    pub(crate) fn wait(&mut self, stop: impl Fn() -> bool) -> Result<bool, Error> {
        while self.get(0).is_none() {
            match self.end.take() {
                None => self.take_in(&stop)?,
                Some(Ok(())) => return Ok(false),
                Some(Err(error)) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Waits until the command behind the next one is there, if there is one.
    pub(crate) fn look_ahead(&mut self, stop: impl Fn() -> bool) -> Result<(), Error> {
        while self.get(1).is_none() && self.end.is_none() {
            self.take_in(&stop)?;
        }
        Ok(())
    }

    /// The next command (0), or the one behind it (1), if it is there.
    pub(crate) fn get(&self, index: usize) -> Option<Frame<&[u8]>> {
        let mut index = self.passed + index;
        for batch in &self.batches {
            match batch.get(index) {
                Some(frame) => return Some(frame),
                None => index -= batch.len(),
            }
        }
        None
    }

    /// The next command was applied.
    pub(crate) fn pass(&mut self) {
        let Some(frame) = self.get(0) else { return };
        self.bytes = frame.end();
        self.passed += 1;
        if self.batches.front().is_some_and(|batch| batch.len() == self.passed) {
            self.passed = 0;
            let batch = self.batches.pop_front().expect("it was there");
            // The thread may have read everything.
            let _ = self.used.send(batch);
        }
    }

    /// Bytes of the stream, up to the end of the last command that was passed.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Waits for what the thread reads next.
    fn take_in(&mut self, stop: &impl Fn() -> bool) -> Result<(), Error> {
        loop {
            match self.read.recv_timeout(LOOK_UP) {
                Ok(Ok(Some(batch))) => self.batches.push_back(batch),
                Ok(Ok(None)) => self.end = Some(Ok(())),
                Ok(Err(error)) => self.end = Some(Err(error)),
                Err(RecvTimeoutError::Timeout) if stop() => return Err(Error::Interrupted),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => {
                    let source = io::Error::other("the thread that reads it has ended");
                    self.end = Some(Err(StreamError::Read { offset: self.bytes, source }));
                }
            }
            return Ok(());
        }
    }
}

/// The thread. Ends when nobody takes what it reads.
fn run(mut reader: StreamReader<impl Read>, to_read: &SyncSender<Next>, to_use: &Receiver<Batch>) {
    loop {
        let mut batch = to_use.try_recv().unwrap_or_default();
        let read = reader.read_batch(&mut batch).map(|more| more.then_some(batch));
        let is_last = !matches!(read, Ok(Some(_)));
        if to_read.send(read).is_err() || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_stream::{Command, Protocol, StreamWriter};
    use std::io::Cursor;

    fn never() -> bool {
        false
    }

    /// A stream of so many commands, without its end.
    fn stream(commands: u64) -> Vec<u8> {
        let mut writer = StreamWriter::new(Vec::new(), Protocol::V1);
        let data = vec![7; 40_000];
        for offset in 0..commands {
            writer.write(&Command::Write { path: b"f", offset, data: &data }).unwrap();
        }
        writer.into_inner()
    }

    #[test]
    fn an_error_comes_behind_all_commands_before_it() {
        let commands = 200;
        let mut bytes = stream(commands);
        bytes.extend(*b"cut off");
        let len = bytes.len() as u64;
        let mut ahead = Ahead::begin(Cursor::new(bytes)).unwrap();
        let mut seen = 0;
        let error = loop {
            match ahead.wait(never) {
                Ok(more) => assert!(more, "the end"),
                Err(error) => break error,
            }
            ahead.look_ahead(never).unwrap();
            assert_eq!(ahead.get(1).is_some(), seen + 1 < commands);
            let frame = ahead.get(0).unwrap();
            let command = frame.command().unwrap();
            assert!(matches!(command, Command::Write { offset, .. } if offset == seen));
            seen += 1;
            ahead.pass();
        };
        assert_eq!(seen, commands);
        let Error::Stream(StreamError::CutOff { offset }) = error else { panic!("{error}") };
        assert_eq!(offset, len);
    }

    #[test]
    fn waiting_ends_when_the_user_wishes() {
        let (input, _open) = io::pipe().unwrap();
        let mut ahead = Ahead::begin(input).unwrap();
        assert!(matches!(ahead.wait(|| true), Err(Error::Interrupted)));
    }
}
