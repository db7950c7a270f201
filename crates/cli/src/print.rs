//! Output that several commands share: lines, JSON, raw names, times, progress.
//!
//! A closed pipe or a full disk is no reason to panic: text that cannot be written to standard
//! output is an error, and text that cannot be written to standard error is lost. Characters that a
//! terminal would obey are shown as escapes.

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Prints a value as indented JSON on standard output.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).context("making JSON")?;
    line(&text)
}

/// Prints one line on standard output; unlike `println!`, a closed pipe is an error and no panic.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout().lock(), "{text}").context(STDOUT)
}

/// The context of errors of standard output.
pub(crate) const STDOUT: &str = "standard output";

/// Prints one line for people on standard error: a note, a warning, an error. If nobody can read
/// it, that is no reason to fail.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// The same, but a reader that stops early is no error.
pub(crate) fn unless_closed(printed: anyhow::Result<()>) -> anyhow::Result<()> {
    printed.or_else(|e| if is_closed_pipe(&e) { Ok(()) } else { Err(e) })
}

/// Did it fail because nobody reads any more?
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>());
    io.map(std::io::Error::kind).any(|kind| kind == std::io::ErrorKind::BrokenPipe)
}

/// `1 error`, `2 errors`.
pub(crate) fn number(n: u64, of: &str) -> String {
    format!("{n} {of}{}", if n == 1 { "" } else { "s" })
}

/// `1 entry`, `2 entries`.
pub(crate) fn entries(n: u64) -> String {
    format!("{n} {}", if n == 1 { "entry" } else { "entries" })
}

/// A uuid in its usual form.
pub(crate) fn uuid(bytes: [u8; 16]) -> String {
    uuid::Uuid::from_bytes(bytes).to_string()
}

/// A name as it can be shown. Control characters become escapes because a terminal would obey them,
/// characters that change the direction of writing because the name would look like another, and
/// bytes that are not UTF-8 because they cannot be shown.
pub(crate) fn name(raw: &[u8]) -> String {
    let mut out = String::with_capacity(raw.len());
    for chunk in raw.utf8_chunks() {
        for c in chunk.valid().chars() {
            if is_harmful(c) || c == '\\' {
                out.extend(c.escape_default());
            } else {
                out.push(c);
            }
        }
        for b in chunk.invalid() {
            let _ = write!(out, "\\x{b:02x}");
        }
    }
    out
}

/// Text that may contain names without escapes, such as an error of a library or of another
/// process. As [`name`], but a backslash stays.
pub(crate) fn harmless(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_harmful(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// A path of the host as it can be shown.
pub(crate) fn path(path: &Path) -> String {
    name(path.as_os_str().as_bytes())
}

/// Would a terminal obey it, or show it in another place?
fn is_harmful(c: char) -> bool {
    c.is_control() || turns(c)
}

/// Does it change the direction of what stands around it? All of Unicode's `Bidi_Control`, and the
/// separators of lines and paragraphs.
fn turns(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `2026-11-21 15:28:22` in UTC.
pub(crate) fn time(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    // Civil date from days since 1970, by 400-year eras that begin on 1 March.
    let z = i128::from(days) + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + i128::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// A progress line of entries on a terminal, and nothing elsewhere.
pub(crate) fn progress() -> ProgressBar {
    progress_as("{spinner} {pos} entries, {msg} ({elapsed})")
}

/// A progress line of bytes and their rate on a terminal, and nothing elsewhere.
pub(crate) fn progress_of_bytes() -> ProgressBar {
    progress_as("{spinner} {bytes}, {bytes_per_sec} ({elapsed})")
}

/// A line on a terminal that shows bytes, rate and remaining time of work whose end is known.
pub(crate) fn progress_to_the_end() -> ProgressBar {
    progress_as("{spinner} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left  {msg}")
}

fn progress_as(template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template);
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_talk_to_the_terminal() {
        assert_eq!(name("grüße".as_bytes()), "grüße");
        assert_eq!(name("שלום".as_bytes()), "שלום");
        assert_eq!(name("exe.\u{202e}txt".as_bytes()), "exe.\\u{202e}txt");
        assert_eq!(name(b"a\x1b[2Jb\nc\\d\xff"), "a\\u{1b}[2Jb\\nc\\\\d\\xff");
        assert_eq!(harmless("a\x1b[2J\\n\n\u{202e}ü"), "a\\u{1b}[2J\\n\\n\\u{202e}ü");
    }

    #[test]
    fn times_are_dates() {
        assert_eq!(time(0), "1970-01-01 00:00:00");
        assert_eq!(time(1_795_274_902), "2026-11-21 15:28:22");
        assert_eq!(time(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(time(-1), "1969-12-31 23:59:59");
        let _ = (time(i64::MIN), time(i64::MAX));
    }
}
