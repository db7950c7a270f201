//! Rules about the text of the repository.
//!
//! - A Rust file has at most [`MOST_LINES`] lines and begins with a `//!` essay.
//! - No white space at line ends, no tabs outside of Makefiles, a newline at the end.
//! - No work left undone: no `todo!`, no ignored tests, no markers for later.
//! - The README names the two commands; documents hang together ([`crate::documents`]).
//! - Lines of Rust and Markdown end at a width ([`crate::width`]).
//! - Prose names its subjects ([`crate::prose`]).
//! - Functions take no two bare `u64` beside each other ([`crate::units`]).

use crate::units::Census;
use crate::{documents, prose, width};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

const MOST_LINES: usize = 900;

/// Leftovers. Spelled in two pieces, since this file is checked, too.
const LEFTOVERS: [(&str, &str); 7] = [
    ("todo", "!("),
    ("unimplemented", "!("),
    ("#[ign", "ore"),
    ("TO", "DO"),
    ("FIX", "ME"),
    ("XX", "X "),
    ("for", " now"),
];

/// One line per finding.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    list(root, &mut files)?;
    files.sort();
    let mut findings = Vec::new();
    let mut census = Census::default();
    for path in files {
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let shown = path.strip_prefix(root).unwrap_or(&path);
        findings.extend(check_file(shown, &text));
        match shown.extension().and_then(|e| e.to_str()) {
            Some("md") => findings.extend(documents::dead_links(root, shown, &text)),
            Some("rs") => census.add(shown, &text),
            _ => {}
        }
    }
    findings.extend(census.findings());
    findings.extend(documents::check(root)?);
    let readme = std::fs::read_to_string(root.join("README.md")).context("README.md")?;
    for command in ["make run", "make test"] {
        if !readme.contains(command) {
            findings.push(format!("README.md: does not name `{command}`"));
        }
    }
    Ok(findings)
}

/// Every file that is text of ours, without what is built or mounted.
fn list(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if !matches!(&*name, ".git" | "target" | "mnt" | ".state" | "corpus" | "artifacts") {
                list(&entry.path(), found)?;
            }
        } else if kind.is_file() {
            let extension =
                Path::new(&*name).extension().and_then(|e| e.to_str()).unwrap_or_default();
            let plain = matches!(extension, "rs" | "md" | "toml" | "sh" | "yml" | "yaml");
            if plain || matches!(&*name, "Makefile" | "run" | ".gitignore") {
                found.push(entry.path());
            }
        }
    }
    Ok(())
}

fn check_file(path: &Path, text: &str) -> Vec<String> {
    let shown = path.display();
    let mut findings = Vec::new();
    if path.extension().is_some_and(|e| e == "rs") {
        if !text.starts_with("//!") {
            findings.push(format!("{shown}:1: does not begin with a `//!` essay"));
        }
        let lines = text.lines().count();
        if lines > MOST_LINES {
            findings.push(format!("{shown}: {lines} lines, more than {MOST_LINES}"));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        findings.push(format!("{shown}: no newline at the end"));
    }
    findings.extend(long_lines(path, text));
    findings.extend(unclear_subjects(path, text));
    let makefile = path.file_name().is_some_and(|n| n == "Makefile");
    for (number, line) in (1..).zip(text.lines()) {
        if line.ends_with([' ', '\t', '\r']) {
            findings.push(format!("{shown}:{number}: white space at the end"));
        }
        if !makefile && line.contains('\t') {
            findings.push(format!("{shown}:{number}: tab"));
        }
        for (first, second) in LEFTOVERS {
            if let Some(at) = line.find(first)
                && line[at + first.len()..].starts_with(second)
            {
                findings.push(format!("{shown}:{number}: left undone: {first}{second}"));
            }
        }
    }
    findings
}

fn long_lines(path: &Path, text: &str) -> Vec<String> {
    let found = match path.extension().and_then(|e| e.to_str()) {
        Some("rs") => width::too_long_in_rust(text),
        Some("md") => width::too_long_in_markdown(text),
        _ => Vec::new(),
    };
    let shown = path.display();
    let widest = width::WIDEST;
    let line =
        |(number, length)| format!("{shown}:{number}: {length} columns, of at most {widest}");
    found.into_iter().map(line).collect()
}

fn unclear_subjects(path: &Path, text: &str) -> Vec<String> {
    let found = match path.extension().and_then(|e| e.to_str()) {
        Some("rs") => prose::in_rust(text),
        Some("md") => prose::in_markdown(text),
        _ => Vec::new(),
    };
    let shown = path.display();
    let line = |(number, words)| {
        format!("{shown}:{number}: {words:?}: name the subject (the caller, the waiter, …)")
    };
    found.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        check_file(Path::new(path), text)
    }

    #[test]
    fn a_tidy_file_has_no_findings() {
        assert!(found("a.rs", "//! Essay.\n\nfn main() {}\n").is_empty());
        assert!(found("Makefile", "all:\n\ttrue\n").is_empty());
    }

    #[test]
    fn each_rule_finds_its_breach_and_names_the_line() {
        assert_eq!(found("a.rs", "fn main() {}\n"), ["a.rs:1: does not begin with a `//!` essay"]);
        assert_eq!(found("a.md", "a \n"), ["a.md:1: white space at the end"]);
        assert_eq!(found("a.md", "ok\na\tb\n"), ["a.md:2: tab"]);
        assert_eq!(found("a.md", "a"), ["a.md: no newline at the end"]);
        let long = format!("//! Essay.\n{}", "\n".repeat(MOST_LINES));
        assert_eq!(found("a.rs", &long), ["a.rs: 901 lines, more than 900"]);
        let wide = format!("//! {}\n", "x".repeat(100));
        assert_eq!(found("a.rs", &wide), ["a.rs:1: 104 columns, of at most 100"]);
        assert_eq!(found("a.md", &wide), ["a.md:1: 104 columns, of at most 100"]);
        let unclear = format!("//! Given to {}ever comes.\n", "who");
        assert_eq!(found("a.rs", &unclear).len(), 1);
        for (first, second) in LEFTOVERS {
            let text = format!("//! Essay.\n// {first}{second}x\n");
            assert_eq!(found("a.rs", &text).len(), 1, "{first}{second}");
        }
    }
}
