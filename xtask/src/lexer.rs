//! Rust source cut into code, comments and literals.
//!
//! Hidden here is how each of them ends. Rules of text look at the parts they concern. It is no
//! parser: it knows nothing of the code beyond that.

use std::ops::Range;

/// What a part of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Code,
    /// `// …` up to the end of the line, or `/* … */`.
    Comment,
    /// `"…"` with escapes, of text or bytes.
    Literal,
    /// `r"…"` or `r#"…"#`, of text or bytes.
    Raw,
}

/// A part, as bytes of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    pub(crate) at: Range<usize>,
}

/// All parts of a file, in order and without gaps.
pub(crate) fn parts(text: &str) -> Vec<Part> {
    let bytes = text.as_bytes();
    let mut parts: Vec<Part> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (kind, end) = one(bytes, at);
        match parts.last_mut() {
            Some(last) if kind == Kind::Code && last.kind == Kind::Code => last.at.end = end,
            _ => parts.push(Part { kind, at: at..end }),
        }
        at = end;
    }
    parts
}

/// The code alone: everything else is replaced by blanks, so that places stay the same.
pub(crate) fn code(text: &str) -> String {
    let mut out = text.as_bytes().to_vec();
    for part in parts(text).into_iter().filter(|p| p.kind != Kind::Code) {
        out[part.at].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
    }
    String::from_utf8(out).unwrap_or_default()
}

/// What begins at `at`, and where it ends.
fn one(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    let after_word = at > 0 && is_word(bytes[at - 1]);
    match rest {
        [b'/', b'/', ..] => (Kind::Comment, at + up_to(rest, 0, |r| r[0] == b'\n')),
        [b'/', b'*', ..] => (Kind::Comment, at + block_comment(rest)),
        [b'"', ..] => (Kind::Literal, at + literal(rest)),
        [b'r', b'"' | b'#', ..] | [b'b', b'r', b'"' | b'#', ..] if !after_word => {
            raw(rest).map_or((Kind::Code, at + 1), |end| (Kind::Raw, at + end))
        }
        // A quotation mark that is a character, not the beginning of text.
        [b'\'', b'"', b'\'', ..] => (Kind::Code, at + 3),
        [b'\'', b'\\', _, b'\'', ..] => (Kind::Code, at + 4),
        _ => (Kind::Code, at + 1),
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// The first place from `from` on where `holds`; the end if there is none.
fn up_to(bytes: &[u8], from: usize, holds: impl Fn(&[u8]) -> bool) -> usize {
    (from..bytes.len()).find(|i| holds(&bytes[*i..])).unwrap_or(bytes.len())
}

/// Length of `/* … */`, which may have others inside.
fn block_comment(bytes: &[u8]) -> usize {
    let (mut depth, mut at) = (0u32, 0);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if bytes[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    at
}

/// Length of `"…"`.
fn literal(bytes: &[u8]) -> usize {
    let mut at = 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Length of `r#"…"#`; `None` for something else, such as `r#type`.
fn raw(bytes: &[u8]) -> Option<usize> {
    let marks = up_to(bytes, 0, |r| r[0] == b'#' || r[0] == b'"');
    let open = up_to(bytes, marks, |r| r[0] != b'#');
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let end = [b"\"", &bytes[marks..open]].concat();
    Some((up_to(bytes, open + 1, |r| r.starts_with(&end)) + end.len()).min(bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Vec<(Kind, &str)> {
        let parts = parts(text);
        assert_eq!(parts.iter().map(|p| p.at.len()).sum::<usize>(), text.len());
        parts.into_iter().map(|p| (p.kind, &text[p.at])).collect()
    }

    #[test]
    fn each_part_ends_where_it_does() {
        use Kind::{Code, Comment, Literal, Raw};
        assert_eq!(
            cut("a // b \"c\"\nd \"e // \\\" f\" /* g /* h */ i */j"),
            [
                (Code, "a "),
                (Comment, "// b \"c\""),
                (Code, "\nd "),
                (Literal, "\"e // \\\" f\""),
                (Code, " "),
                (Comment, "/* g /* h */ i */"),
                (Code, "j"),
            ]
        );
        assert_eq!(
            cut("br#\"a\"b\"#; r\"\\\"; r#type; var\"x\""),
            [
                (Raw, "br#\"a\"b\"#"),
                (Code, "; "),
                (Raw, "r\"\\\""),
                (Code, "; r#type; var"),
                (Literal, "\"x\""),
            ]
        );
        assert_eq!(cut("'\"' '\\\"' 'a"), [(Code, "'\"' '\\\"' 'a")]);
    }

    #[test]
    fn what_does_not_end_ends_with_the_file() {
        for text in ["\"a", "\"a\\", "r#\"a\"", "/* a", "// a", "'"] {
            assert_eq!(cut(text).len(), 1, "{text}");
        }
    }

    #[test]
    fn code_keeps_its_place() {
        assert_eq!(code("a(\"b\nc\") // d\ne"), "a(  \n  )     \ne");
    }
}
