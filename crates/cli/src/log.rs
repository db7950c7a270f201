//! Events of the layers below, as lines on standard error.
//!
//! People get warnings and errors as lines of the command, `larder: warning: …`. Of each kind only
//! the first few are shown: a full disk can lose a thousand files, and the command's own error says
//! what that means. With `-v`, or with `LARDER_LOG` set as `RUST_LOG` is elsewhere, all events of
//! the chosen level are shown, with their origin.

use crate::print;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// How many events of each kind are shown.
const SHOWN: u32 = 5;

/// Begins to show.
pub(crate) fn start(verbose: u8) {
    let asked = EnvFilter::try_from_env("LARDER_LOG").ok();
    if asked.is_none() && verbose == 0 {
        let plain = Plain::default().with_filter(LevelFilter::WARN);
        return tracing_subscriber::registry().with(plain).init();
    }
    let default = ["warn", "info", "debug", "trace"][usize::from(verbose.min(3))];
    tracing_subscriber::fmt()
        .with_env_filter(asked.unwrap_or_else(|| EnvFilter::new(default)))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .init();
}

/// Lines for people.
#[derive(Debug, Default)]
struct Plain {
    seen: Mutex<HashMap<Identifier, u32>>,
}

impl Plain {
    /// The line for an event, if it is to be shown.
    fn line(&self, event: &Event<'_>) -> Option<String> {
        let nth = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let n = seen.entry(event.metadata().callsite()).or_default();
            *n = n.saturating_add(1);
            *n
        };
        if nth > SHOWN + 1 {
            return None;
        }
        if nth == SHOWN + 1 {
            return Some("larder: warning: more like this are not shown (-v shows them)".into());
        }
        let mut words = Words::default();
        event.record(&mut words);
        let kind = if *event.metadata().level() == Level::ERROR { "error" } else { "warning" };
        Some(format!("larder: {kind}: {}", print::harmless(&words.0)))
    }
}

impl<S: Subscriber> Layer<S> for Plain {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if let Some(line) = self.line(event) {
            print::say(&line);
        }
    }
}

/// The message of an event, and its other fields behind it.
#[derive(Default)]
struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = match field.name() {
            "message" => {
                let rest = std::mem::take(&mut self.0);
                write!(self.0, "{value:?}{rest}")
            }
            name => write!(self.0, ", {name} {value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<String>>>, Arc<Plain>);

    impl<S: Subscriber> Layer<S> for Kept {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            self.0.lock().unwrap().extend(self.1.line(event));
        }
    }

    #[test]
    fn a_flood_is_cut_off_and_says_so() {
        let kept = Kept::default();
        let subscriber = tracing_subscriber::registry().with(kept.clone());
        tracing::subscriber::with_default(subscriber, || {
            for n in 0..100 {
                tracing::warn!(device = 1, "file {n} was\x1b[31m lost");
            }
            tracing::error!("and another");
        });
        let lines = kept.0.lock().unwrap().clone();
        assert_eq!(lines.len(), 7, "{lines:?}");
        assert_eq!(lines[0], "larder: warning: file 0 was\\u{1b}[31m lost, device 1");
        assert!(lines[5].contains("more like this are not shown"));
        assert_eq!(lines[6], "larder: error: and another");
    }
}
