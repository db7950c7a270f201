//! How far a change of devices is: as a line on the terminal, and as lines from a daemon.

use crate::print;
use indicatif::ProgressBar;
use larder_fs::Clearing;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};

/// A line of a daemon.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Line {
    total: u64,
    left: u64,
}

impl From<Clearing> for Line {
    fn from(how: Clearing) -> Self {
        Self { total: how.total, left: how.left }
    }
}

/// Shows bytes, rate and remaining time; on a terminal only.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// The beginning of a line.
    rest: Vec<u8>,
    /// The last line that was no progress.
    pub(super) last: Option<String>,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self { bar: print::progress_of_bytes(), rest: Vec::new(), last: None }
    }

    pub(crate) fn show(&mut self, how: Clearing) {
        self.bar.set_length(how.total);
        self.bar.set_position(how.total - how.left.min(how.total));
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Lines from a daemon.
impl Write for &mut Progress {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.rest.extend_from_slice(bytes);
        while let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            match serde_json::from_slice::<Line>(&line) {
                Ok(Line { total, left }) => self.show(Clearing { total, left }),
                Err(_) => self.last = Some(String::from_utf8_lossy(&line).trim_end().to_owned()),
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
