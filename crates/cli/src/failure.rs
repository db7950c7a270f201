//! Errors as people and scripts meet them: a sentence, perhaps a hint, and an exit code.
//!
//! Inside the crate errors are `anyhow`. Two things can be attached on the way up: a hint about what to do next, and
//! the fact that the command *could not run* at all (exit code 2) as opposed to having tried and failed (1).

use std::fmt;
use std::process::ExitCode;

/// Tried and failed.
pub(crate) const FAILED: u8 = 1;
/// Wrong usage, or could not run.
pub(crate) const COULD_NOT_RUN: u8 = 2;

/// An error with what people should know besides.
#[derive(Debug)]
struct Advised {
    error: anyhow::Error,
    hint: Option<String>,
    could_not_run: bool,
}

impl fmt::Display for Advised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Advised {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Adds advice to an error.
pub(crate) trait Advise<T> {
    /// What to do about it, as an imperative sentence without its full stop.
    fn hint(self, hint: impl Into<String>) -> anyhow::Result<T>;
    /// Nothing was tried: exit code 2.
    fn could_not_run(self) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> Advise<T> for Result<T, E> {
    fn hint(self, hint: impl Into<String>) -> anyhow::Result<T> {
        self.map_err(|e| {
            let hint = Some(hint.into());
            anyhow::Error::new(Advised { error: e.into(), hint, could_not_run: false })
        })
    }
    fn could_not_run(self) -> anyhow::Result<T> {
        self.map_err(|e| anyhow::Error::new(Advised { error: e.into(), hint: None, could_not_run: true }))
    }
}

/// A usage error that clap cannot know of.
pub(crate) fn usage<T>(what: impl fmt::Display) -> anyhow::Result<T> {
    Err::<T, _>(anyhow::anyhow!("{what}")).could_not_run()
}

fn advice<'a>(error: &'a anyhow::Error) -> Box<dyn Iterator<Item = &'a Advised> + 'a> {
    Box::new(
        error
            .chain()
            .filter_map(|e| e.downcast_ref::<Advised>())
            .flat_map(|a| std::iter::once(a).chain(advice(&a.error))),
    )
}

/// Exit code that an error means.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    if advice(error).any(|a| a.could_not_run) { COULD_NOT_RUN } else { FAILED }
}

/// The error as lines for standard error: `larder: …`, then hints.
pub(crate) fn text(error: &anyhow::Error) -> String {
    let mut out = String::from("larder: ");
    let mut last = String::new();
    for e in error.chain() {
        let part = e.to_string();
        // Libraries like to repeat their source in their own text.
        if last.ends_with(&part) {
            continue;
        }
        if !last.is_empty() {
            out.push_str(": ");
        }
        out.push_str(&part);
        last = part;
    }
    for hint in advice(error).filter_map(|a| a.hint.as_ref()) {
        out.push_str("\nhint: ");
        out.push_str(hint);
    }
    out
}

/// Prints an error and returns its exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    // Whoever reads our output has gone: nobody is there to be told, and nothing failed.
    let broken_pipe = error
        .chain()
        .filter_map(|e| e.downcast_ref::<std::io::Error>())
        .any(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
    if broken_pipe {
        return ExitCode::SUCCESS;
    }
    eprintln!("{}", text(error));
    ExitCode::from(code(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn hints_and_codes_survive_more_context() {
        let e = Err::<(), _>(anyhow!("no such file")).context("a.img");
        assert_eq!(
            (code(e.as_ref().unwrap_err()), text(e.as_ref().unwrap_err())),
            (1, "larder: a.img: no such file".into())
        );
        let e = e.hint("make it with `larder mkfs`").could_not_run().context("opening").unwrap_err();
        assert_eq!(code(&e), 2);
        assert_eq!(text(&e), "larder: opening: a.img: no such file\nhint: make it with `larder mkfs`");
        assert_eq!(code(&usage::<()>("what?").unwrap_err()), 2);
    }

    #[test]
    fn repeated_sources_are_said_once() {
        let inner = std::io::Error::other("bad sector");
        let e = larder_volume::VolumeError::Io {
            device: "d".into(),
            op: "read",
            at: larder_format::Physical(0),
            len: 1,
            source: inner,
        };
        assert_eq!(text(&e.into()), "larder: d: read of 1 bytes at 0 failed: bad sector");
        let e = larder_volume::VolumeError::Io {
            device: "d".into(),
            op: "open",
            at: larder_format::Physical(0),
            len: 0,
            source: std::io::Error::other("no"),
        };
        assert_eq!(text(&e.into()), "larder: d: open failed: no");
    }
}
