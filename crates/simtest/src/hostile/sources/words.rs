//! Words of the command line that say what a source is, and what is done with its entries.
//!
//! Nobody but the caller can make them. Yet scripts pass on what they got, so a word may be
//! refused, and must not do harm. What is taken has to mean what it says.

use super::stream::said;
use crate::hostile::tools::ask;
use larder_sources::{Kind, Pattern, Rule, Sort, SourceSpec, TreePath, parse_owner, parse_time};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Linux takes an argument of up to so many bytes.
const LONGEST: usize = 128 << 10;

/// Reads a word in each language that there is. The first byte says how often it is repeated, and
/// what follows a newline is a path.
pub fn words(input: &[u8]) {
    let (&times, rest) = input.split_first().unwrap_or((&0, &[]));
    let (word, path) = match rest.iter().position(|&b| b == b'\n') {
        Some(at) => (&rest[..at], &rest[at + 1..]),
        None => (rest, &b""[..]),
    };
    let word = word.repeat(1 << (times % 14));
    let word = &word[..word.len().min(LONGEST)];
    ask("words", 0, || {
        source(word);
        if let Ok(text) = str::from_utf8(word) {
            rules(text, path);
        }
    });
}

fn source(word: &[u8]) {
    if word.contains(&0) {
        return;
    }
    match SourceSpec::parse(OsStr::from_bytes(word)) {
        Ok(spec) => {
            let shown = spec.to_string();
            assert!(!shown.chars().any(char::is_control), "hostile: {shown:?}");
        }
        Err(error) => said(&error),
    }
    // A colon within a name has a backslash; one at a name's end would take the colon behind it.
    if word.is_empty() || word.ends_with(b"\\") || word == b"-" {
        return;
    }
    let escaped: Vec<u8> = word
        .iter()
        .flat_map(|b| if *b == b':' { b"\\:" } else { std::slice::from_ref(b) })
        .copied()
        .collect();
    let given = [b"mtree:", &escaped[..], b":/a//b/"].concat();
    let spec = SourceSpec::parse(OsStr::from_bytes(&given)).expect("a file and its place");
    let file = Path::new(OsStr::from_bytes(word));
    assert_eq!(spec.sort, Sort::Mtree(file.to_owned()), "hostile: another file");
    assert_eq!(spec.place.as_bytes(), b"a/b", "hostile: another place");
}

fn rules(text: &str, path: &[u8]) {
    let path = TreePath::new(path).unwrap_or_default();
    let error = |error: larder_sources::Error| said(&error);
    for kind in [Kind::Directory, Kind::Fifo] {
        let _ = Pattern::new(text).map(|pattern| pattern.matches(&path, &kind)).map_err(error);
    }
    let is_plain = !text.contains(|c: char| "*?[]{}\\".contains(c));
    if let Some(same) = TreePath::new(text.as_bytes())
        && is_plain
        && !same.is_root()
        && same.as_bytes() == text.as_bytes()
        && text.len() <= Pattern::LONGEST
    {
        let pattern = Pattern::new(text).expect("a path is a pattern");
        assert!(pattern.matches(&same, &Kind::Fifo), "hostile: {text:?} is not itself");
    }
    let _ = Rule::chmod(text).map_err(error);
    let _ = Rule::chown(text).map_err(error);
    let _ = Rule::xattr(text).map_err(error);
    let _ = parse_owner(text).map_err(error);
    if let Ok(time) = parse_time(text) {
        assert!(time.nanoseconds < 1_000_000_000, "hostile: {time:?}");
    }
}
