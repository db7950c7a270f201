//! No line is longer than [`WIDEST`] columns, in Rust and in Markdown.
//!
//! What cannot be broken is exempt: tables, code in a fence, the insides of raw literals, and the
//! targets of links.

use crate::lexer::{self, Kind};
use std::collections::HashSet;

pub(crate) const WIDEST: usize = 100;

/// Numbers of the lines of a Rust file that are too long, and their lengths.
pub(crate) fn too_long_in_rust(text: &str) -> Vec<(usize, usize)> {
    let lines = long_lines(text);
    if lines.is_empty() {
        return lines;
    }
    let raw = raw_lines(text);
    let all: Vec<&str> = text.lines().collect();
    let exempt = |number: usize| {
        let line = all[number - 1].trim_start();
        let doc = line.strip_prefix("//!").or_else(|| line.strip_prefix("///"));
        raw.contains(&number) || doc.is_some_and(|doc| doc.trim_start().starts_with('|'))
    };
    lines.into_iter().filter(|(number, _)| !exempt(*number)).collect()
}

/// The same for a document.
pub(crate) fn too_long_in_markdown(text: &str) -> Vec<(usize, usize)> {
    let mut fenced = false;
    let mut exempt = HashSet::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        let fence = line.starts_with("```") || line.starts_with("~~~");
        if fenced || fence || line.starts_with('|') {
            exempt.insert(number);
        }
        fenced ^= fence;
    }
    long_lines(text).into_iter().filter(|(number, _)| !exempt.contains(number)).collect()
}

fn long_lines(text: &str) -> Vec<(usize, usize)> {
    let lengths = text.lines().map(without_targets);
    (1..).zip(lengths).filter(|(_, length)| *length > WIDEST).collect()
}

/// Characters of a line without the targets of its links.
fn without_targets(line: &str) -> usize {
    let length = line.chars().count();
    if length <= WIDEST {
        return length;
    }
    let inline: usize = line
        .split("](")
        .skip(1)
        .map(|rest| rest.split(')').next().unwrap_or_default().chars().count())
        .sum();
    let bare: usize = line
        .split_whitespace()
        .filter(|word| word.starts_with("http://") || word.starts_with("https://"))
        .map(|word| word.chars().count())
        .sum();
    length - inline - bare
}

/// Lines that a raw literal has a part of.
fn raw_lines(text: &str) -> HashSet<usize> {
    let line_of = |at: usize| text[..at].matches('\n').count() + 1;
    let raw = lexer::parts(text).into_iter().filter(|p| p.kind == Kind::Raw);
    raw.flat_map(|p| line_of(p.at.start)..=line_of(p.at.end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_characters_not_bytes() {
        let most = "ä".repeat(WIDEST);
        assert!(too_long_in_rust(&format!("// ok\n{most}\n")).is_empty());
        assert_eq!(too_long_in_rust(&format!("// ok\n{most}x\n")), [(2, 101)]);
        assert_eq!(too_long_in_markdown(&format!("{most}x\n")), [(1, 101)]);
    }

    #[test]
    fn what_cannot_be_broken_is_exempt() {
        let long = "x".repeat(WIDEST);
        for text in [
            format!("//! | a | {long} |\n"),
            format!("let a = r#\"{long}\n{long}x\"#;\n"),
            format!("// [a]({long})\n"),
            format!("// https://{long}\n"),
        ] {
            assert!(too_long_in_rust(&text).is_empty(), "{text}");
        }
        for text in [
            format!("| a | {long} |\n"),
            format!("```sh\n{long} a\n```\n"),
            format!("[a]: https://{long}\n"),
        ] {
            assert!(too_long_in_markdown(&text).is_empty(), "{text}");
        }
        assert_eq!(too_long_in_rust(&format!("let a = \"{long}\";\n")).len(), 1);
        assert_eq!(too_long_in_markdown(&format!("```\n```\n{long} a\n")).len(), 1);
    }
}
