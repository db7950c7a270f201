//! The bytes on their way: not faster than they may, counted, and stopped by a signal.
//!
//! The side that sends writes into a [`Sink`]. Between threads of this process a pipe leads to the
//! side that receives ([`piped`]). When either side fails, the other one fails, too, and it is the
//! first error that people are told ([`first_of`]).

use crate::interrupt::Interrupt;
use crate::print;
use anyhow::{Context, anyhow};
use indicatif::ProgressBar;
use std::io::{self, BufWriter, ErrorKind, PipeReader, Write};
use std::time::{Duration, Instant};

/// Bytes that are written at once.
const BUFFER: usize = 256 << 10;

/// Writes a stream to where it is told to.
pub(super) type Sender<'a> = dyn FnMut(&mut dyn Write) -> anyhow::Result<()> + Send + 'a;

/// How fast bytes may go.
#[derive(Debug)]
struct Limit {
    per_second: u64,
    /// When the next byte may go.
    next: Option<Instant>,
}

impl Limit {
    /// How long to wait before so many bytes more. Time in which nothing came is not made up for.
    fn wait(&mut self, now: Instant, bytes: usize) -> Duration {
        let at = self.next.map_or(now, |next| next.max(now));
        #[allow(clippy::cast_precision_loss)]
        let takes = Duration::from_secs_f64(bytes as f64 / self.per_second as f64);
        self.next = Some(at + takes);
        at - now
    }

    /// Bytes that go together: those of a tenth of a second.
    fn portion(&self) -> usize {
        usize::try_from(self.per_second / 10).unwrap_or(usize::MAX).max(1)
    }
}

/// Takes the bytes of a stream.
#[derive(Debug)]
pub(super) struct Sink<W> {
    out: W,
    limit: Option<Limit>,
    interrupt: Interrupt,
    bar: ProgressBar,
}

impl<W: Write> Sink<W> {
    /// `rate` is in bytes for each second.
    pub(super) fn new(
        out: W,
        rate: Option<u64>,
        interrupt: &Interrupt,
        bar: &ProgressBar,
    ) -> BufWriter<Self> {
        let limit = rate.map(|per_second| Limit { per_second, next: None });
        let sink = Self { out, limit, interrupt: interrupt.clone(), bar: bar.clone() };
        BufWriter::with_capacity(BUFFER, sink)
    }

    /// Waits, but not after a signal.
    fn pause(&self, time: Duration) -> io::Result<()> {
        // Not the error of its kind: that would be tried again.
        self.interrupt.wait(time).map_err(|e| io::Error::other(e.to_string()))
    }
}

impl<W: Write> Write for Sink<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let most = self.limit.as_ref().map_or(usize::MAX, Limit::portion);
        let bytes = &bytes[..bytes.len().min(most)];
        let wait = self.limit.as_mut().map(|limit| limit.wait(Instant::now(), bytes.len()));
        self.pause(wait.unwrap_or_default())?;
        self.out.write_all(bytes)?;
        self.bar.inc(bytes.len() as u64);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Shows bytes and their rate on a terminal.
pub(super) fn bar(quiet: bool) -> ProgressBar {
    if quiet { ProgressBar::hidden() } else { print::progress_of_bytes() }
}

/// Sends on a thread of its own, into a pipe from which `receive` reads.
pub(super) fn piped<T>(
    send: &mut Sender<'_>,
    receive: impl FnOnce(PipeReader) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let (reader, mut writer) = io::pipe().context("making a pipe")?;
    std::thread::scope(|scope| {
        // The pipe ends with the thread: the reader sees the end.
        let sending = scope.spawn(move || send(&mut writer));
        let received = receive(reader);
        let sent = sending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        first_of(sent, received)
    })
}

/// Of the errors of two sides, the one that led to the other.
pub(super) fn first_of<T>(
    sent: anyhow::Result<()>,
    received: anyhow::Result<T>,
) -> anyhow::Result<T> {
    match (sent, received) {
        (Ok(()), received) => received,
        (Err(sent), Err(received)) if is_closed(&sent) => Err(received),
        (Err(sent), Ok(_)) if is_closed(&sent) => {
            Err(anyhow!("the receiver has ended before the stream did"))
        }
        (Err(sent), _) => Err(sent),
    }
}

/// Did sending fail because nobody reads any more?
fn is_closed(error: &anyhow::Error) -> bool {
    let written = |e: &larder_send::Error| match e {
        larder_send::Error::Write(larder_stream::WriteError::Io(e)) => {
            e.kind() == ErrorKind::BrokenPipe
        }
        _ => false,
    };
    let sent = error.chain().filter_map(|e| e.downcast_ref::<larder_send::Error>());
    print::is_closed_pipe(error) || sent.into_iter().any(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn bytes_go_as_fast_as_they_may() {
        let mut limit = Limit { per_second: 1000, next: None };
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(limit.portion(), 100);
        assert_eq!(limit.wait(at(0), 100), Duration::ZERO);
        assert_eq!(limit.wait(at(0), 100), Duration::from_millis(100));
        assert_eq!(limit.wait(at(150), 100), Duration::from_millis(50));
        // Nothing came for long.
        assert_eq!(limit.wait(at(9000), 100), Duration::ZERO);
        assert_eq!(limit.wait(at(9000), 1), Duration::from_millis(100));
        assert_eq!(Limit { per_second: 1, next: None }.portion(), 1);
    }

    fn read_all(mut reader: PipeReader) -> anyhow::Result<usize> {
        Ok(reader.read_to_end(&mut Vec::new())?)
    }

    #[test]
    fn the_error_that_came_first_is_told() {
        let bytes = vec![1; 1 << 20];
        let mut send = |out: &mut dyn Write| Ok(out.write_all(&bytes)?);
        assert_eq!(piped(&mut send, read_all).unwrap(), 1 << 20);
        let ended = piped(&mut send, |_| Err::<(), _>(anyhow!("no space")));
        assert_eq!(ended.unwrap_err().to_string(), "no space");
        let early = piped(&mut send, |_| Ok(()));
        assert!(early.unwrap_err().to_string().contains("before the stream did"));
        let mut fails = |out: &mut dyn Write| {
            out.write_all(b"x")?;
            Err(anyhow!("cannot read"))
        };
        let cut = piped(&mut fails, |reader| {
            assert_eq!(read_all(reader)?, 1);
            Err::<(), _>(anyhow!("cut off"))
        });
        assert_eq!(cut.unwrap_err().to_string(), "cannot read");
    }

    #[test]
    fn a_signal_ends_it() {
        let interrupt = Interrupt::default();
        let mut out = Vec::new();
        let mut sink = Sink::new(&mut out, Some(1), &interrupt, &ProgressBar::hidden());
        interrupt.ask(15);
        sink.write_all(b"a long stream").unwrap();
        assert_eq!(sink.flush().unwrap_err().to_string(), "interrupted");
        drop(sink);
        assert!(out.is_empty());
    }
}
