//! How far receiving is: bytes of the stream and the rate on a terminal, and which subvolume.

use crate::interrupt::Interrupt;
use crate::print;
use indicatif::{ProgressBar, ProgressStyle};
use larder_receive::{Failure, Observer};
use std::io::IsTerminal;
use std::time::Duration;

/// Tells people, and ends when they ask for it.
#[derive(Debug)]
pub(super) struct Watcher {
    bar: ProgressBar,
    interrupt: Interrupt,
    /// Say which subvolume begins.
    names: bool,
    /// A subvolume has a part of what it is to have.
    partly: bool,
}

impl Watcher {
    pub(super) fn new(interrupt: Interrupt, quiet: bool, json: bool) -> Self {
        let bar = if std::io::stderr().is_terminal() && !quiet {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::hidden()
        };
        let style = ProgressStyle::with_template("{spinner} {bytes}, {bytes_per_sec} ({elapsed})");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, interrupt, names: !quiet && !json, partly: false }
    }

    /// Is there a subvolume that is half received?
    pub(super) fn left_a_part(&self) -> bool {
        self.partly
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Watcher {
    fn begins(&mut self, name: &[u8], resumed: bool) {
        self.partly = true;
        if self.names {
            let what = if resumed { "Going on with" } else { "Receiving" };
            self.bar.suspend(|| print::say(&format!("{what} {}", print::name(name))));
        }
    }

    fn completed(&mut self, _name: &[u8]) {
        self.partly = false;
    }

    fn at(&mut self, offset: u64) {
        self.bar.set_position(offset);
    }

    fn failed(&mut self, failure: &Failure) {
        let text = print::harmless(&failure.to_string());
        self.bar.suspend(|| print::say(&format!("larder: {text}")));
    }

    fn stop(&self) -> bool {
        self.interrupt.is_asked()
    }
}
