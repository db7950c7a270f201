//! Errors as people and scripts meet them: a sentence, perhaps a hint, and an exit code.
//!
//! Inside the crate errors are `anyhow`. Two things can be attached on the way up: a hint about
//! what to do next, and the fact that the command *could not run* at all (exit code 2) as opposed
//! to having tried and failed (1).

use crate::{interrupt, print};
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
        // The text is that of the error itself; its chain stays reachable for `downcast_ref`.
        Some(self.error.as_ref())
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
        self.map_err(|e| {
            anyhow::Error::new(Advised { error: e.into(), hint: None, could_not_run: true })
        })
    }
}

/// A usage error that clap cannot know of.
pub(crate) fn usage<T>(what: impl fmt::Display) -> anyhow::Result<T> {
    Err::<T, _>(anyhow::anyhow!("{what}")).could_not_run()
}

fn advice(error: &anyhow::Error) -> impl Iterator<Item = &Advised> {
    error.chain().filter_map(|e| e.downcast_ref::<Advised>())
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
        let part = without_numbers(&print::harmless(&e.to_string()));
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
    let said = advice(error).filter_map(|a| a.hint.clone());
    for hint in said.chain(about_space(error)) {
        out.push_str("\nhint: ");
        out.push_str(&print::harmless(&hint));
    }
    out
}

/// Takes the numbers of errors away: they are for programs.
pub(crate) fn without_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once(" (os error ") {
        out.push_str(before);
        let digits = behind.bytes().take_while(u8::is_ascii_digit).count();
        match behind[digits..].strip_prefix(')') {
            Some(after) => rest = after,
            None => {
                out.push_str(" (os error ");
                rest = behind;
            }
        }
    }
    out + rest
}

fn engine_error<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e larder_fs::Error> {
    let boxed = error.downcast_ref::<Box<larder_fs::Error>>();
    error.downcast_ref().or(boxed.map(Box::as_ref))
}

/// Is it, or does it come from, a file system of an image without room?
pub(crate) fn is_full(error: &anyhow::Error) -> bool {
    error.chain().filter_map(engine_error).any(|e| matches!(e, larder_fs::Error::NoSpace))
}

/// A hint where there is no room, which any command may meet. Either the file system of the image
/// is full, or the one that the image file lies on; a failed commit tells of the latter in words
/// only.
fn about_space(error: &anyhow::Error) -> Option<String> {
    let within = error.chain().filter_map(engine_error);
    let full_host = |text: &str| text.contains("No space left on device");
    // The error may be that of a daemon, which leaves it as text.
    let told = error
        .chain()
        .map(ToString::to_string)
        .any(|e| e.contains("a commit failed") && full_host(&e));
    let outside = told || within.map(ToString::to_string).any(|e| full_host(&e));
    if is_full(error) {
        return Some("`larder df` says what is full, and what helps".into());
    }
    let unwritten = "the file system that the image lies on is full: make room there and try \
        again; the image has what was last committed";
    outside.then(|| unwritten.to_owned())
}

/// Prints an error and returns its exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    // The reader of our output has closed it: nobody is there to be told, and nothing failed.
    if print::is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    print::say(&text(error));
    // A shell ends its script if the command ended by a signal.
    interrupt::end_as_asked(error);
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
        let e =
            e.hint("make it with `larder mkfs`").could_not_run().context("opening").unwrap_err();
        assert_eq!(code(&e), 2);
        assert_eq!(
            text(&e),
            "larder: opening: a.img: no such file\nhint: make it with `larder mkfs`"
        );
        assert_eq!(code(&usage::<()>("what?").unwrap_err()), 2);
    }

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_numbers_are_left_out() {
        let io = std::io::Error::from_raw_os_error(2);
        let e = anyhow::Error::new(io).context("a\u{1b}[31m\nb\\x (os error x)");
        let says = text(&Err::<(), _>(e).hint("look\rat it").unwrap_err());
        assert_eq!(
            says,
            "larder: a\\u{1b}[31m\\nb\\x (os error x): No such file or directory\nhint: look\\rat \
                it"
        );
    }

    #[test]
    fn a_full_disk_is_said_to_be_one() {
        let inside = anyhow::Error::new(larder_fs::Error::NoSpace).context("a.img:/x");
        assert!(
            text(&inside)
                .ends_with("no space left\nhint: `larder df` says what is full, and what helps")
        );
        let why = "a commit failed: a.img: write failed: No space left on device (os error 28)";
        let outside = text(&larder_fs::Error::ReadOnly(Some(why.into())).into());
        assert!(outside.contains("lies on is full") && !outside.contains("larder df"), "{outside}");
        let daemon = text(&anyhow!("mnt: unmounted, but changes may be lost: {why}"));
        assert!(daemon.contains("lies on is full") && !daemon.contains("os error"), "{daemon}");
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
