//! How far a build is: entries, bytes, the rate, and the time that is left, on a terminal.

use crate::interrupt::Interrupt;
use crate::size;
use indicatif::{ProgressBar, ProgressStyle};
use larder_build::{Progress, Stage};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A progress line on standard error; nothing where that is no terminal.
#[derive(Debug)]
pub(super) struct Bar {
    bar: ProgressBar,
    bytes: AtomicU64,
    begun: Instant,
    interrupt: Interrupt,
}

impl Bar {
    pub(super) fn new(entries: u64, interrupt: Interrupt) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::new(entries)
        } else {
            ProgressBar::hidden()
        };
        let style = ProgressStyle::with_template(
            "{spinner} {pos} of {len} entries, {msg} ({elapsed}, {eta} left)",
        );
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, bytes: AtomicU64::new(0), begun: Instant::now(), interrupt }
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

impl Progress for Bar {
    fn stage(&self, stage: Stage) {
        match stage {
            Stage::Contents => {}
            Stage::Trees => self.bar.set_message("writing trees"),
            Stage::Sync => self.bar.set_message("waiting for the disk"),
        }
    }

    fn entries(&self, more: u64) {
        self.bar.inc(more);
    }

    fn bytes(&self, more: u64) {
        let bytes = self.bytes.fetch_add(more, Relaxed) + more;
        if !self.bar.is_hidden() {
            let rate = rate(bytes, self.begun.elapsed());
            self.bar.set_message(format!("{}, {}/s", size::human(bytes), size::human(rate)));
        }
    }

    fn cancelled(&self) -> bool {
        self.interrupt.is_asked()
    }
}

/// Bytes in a second.
pub(super) fn rate(bytes: u64, time: Duration) -> u64 {
    let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    bytes.saturating_mul(1000) / milliseconds
}
