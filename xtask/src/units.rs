//! No function takes two bare `u64` beside each other: a caller that swaps them compiles.
//!
//! An offset and a length belong into a range, a number of an inode and an offset into types of
//! their own. The functions that still take two are counted for each crate. [`ALLOWED`] has the
//! numbers, which only fall: a crate with more of them fails, and one with fewer has to lower its
//! number.

use crate::lexer;
use std::collections::BTreeMap;
use std::path::Path;

/// How many such functions a crate may have; all others none.
const ALLOWED: [(&str, usize); 9] = [
    ("crates/bench", 0),
    ("crates/check", 0),
    ("crates/cli", 0),
    ("crates/format", 0),
    ("crates/fs", 0),
    ("crates/fuse", 0),
    ("crates/restore", 0),
    ("crates/simtest", 0),
    ("crates/volume", 0),
];

/// Functions that take two bare `u64` beside each other.
#[derive(Debug, Default)]
pub(crate) struct Census(BTreeMap<String, Vec<String>>);

impl Census {
    /// Counts those of a file.
    pub(crate) fn add(&mut self, path: &Path, text: &str) {
        let found = offenders(text);
        if !found.is_empty() {
            let shown = path.display();
            let lines = found.iter().map(|(line, name)| format!("{shown}:{line}: {name}"));
            self.0.entry(crate_of(path)).or_default().extend(lines);
        }
    }

    /// One line for each function in a crate that has too many, and for each number to lower.
    pub(crate) fn findings(&self) -> Vec<String> {
        self.judge(&ALLOWED)
    }

    fn judge(&self, allowed: &[(&str, usize)]) -> Vec<String> {
        let mut findings = Vec::new();
        for (name, functions) in &self.0 {
            let most = allowed.iter().find(|(n, _)| n == name).map_or(0, |(_, most)| *most);
            if functions.len() > most {
                findings.extend(functions.iter().map(|f| {
                    format!(
                        "{f} takes two bare u64 beside each other ({} functions of {name} do, \
                         {most} may)",
                        functions.len()
                    )
                }));
            }
        }
        for (name, most) in allowed {
            let count = self.0.get(*name).map_or(0, Vec::len);
            if count < *most {
                findings.push(format!(
                    "xtask/src/units.rs: {count} functions of {name} take two bare u64 beside \
                     each other: lower its number in ALLOWED, which is {most}"
                ));
            }
        }
        findings
    }
}

/// `crates/fs` for everything below it.
fn crate_of(path: &Path) -> String {
    let mut parts = path.iter().map(|part| part.to_string_lossy());
    match (parts.next(), parts.next()) {
        (Some(first), Some(second)) if first == "crates" => format!("{first}/{second}"),
        (Some(first), _) => first.into_owned(),
        (None, _) => String::new(),
    }
}

/// Lines and names of the functions of a file that break the rule.
fn offenders(text: &str) -> Vec<(usize, String)> {
    let code = lexer::code(text);
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let name: String = code[at + 3..].chars().take_while(|c| is_word(*c)).collect();
        let begins = !code[..at].ends_with(is_word) && !name.is_empty();
        let Some(parameters) = begins.then(|| parameters(&code[at + 3..])).flatten() else {
            continue;
        };
        let bare: Vec<bool> = parameters.iter().map(|p| is_bare(p)).collect();
        if bare.windows(2).any(|pair| pair == [true, true]) {
            found.push((code[..at].matches('\n').count() + 1, name));
        }
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Is it `name: u64`?
fn is_bare(parameter: &str) -> bool {
    parameter.rsplit_once(':').is_some_and(|(name, kind)| {
        kind.trim() == "u64" && name.trim().trim_start_matches("mut ").chars().all(is_word)
    })
}

/// The parameters of the signature that begins here, behind `fn`.
fn parameters(signature: &str) -> Option<Vec<&str>> {
    let open = open_parenthesis(signature)?;
    let list = &signature[open + 1..];
    let (mut depth, mut start, mut out) = (0usize, 0, Vec::new());
    let mut before = ' ';
    for (at, c) in list.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            '>' if before == '-' || before == '=' => {}
            ')' if depth == 0 => {
                out.push(&list[start..at]);
                return Some(out);
            }
            ')' | ']' | '}' | '>' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                out.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        before = c;
    }
    None
}

/// Where the list of parameters begins: behind the name and its generics.
fn open_parenthesis(signature: &str) -> Option<usize> {
    let (mut depth, mut before) = (0usize, ' ');
    for (at, c) in signature.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if before != '-' => depth = depth.saturating_sub(1),
            '(' if depth == 0 => return Some(at),
            ';' | '{' if depth == 0 => return None,
            _ => {}
        }
        before = c;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        offenders(text).into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn two_beside_each_other_are_found() {
        assert_eq!(names("fn a(x: u64, y: u64) {}"), ["a"]);
        assert_eq!(names("pub(crate) fn b(&self, mut x: u64,\n    y: u64,\n) -> u64;"), ["b"]);
        assert_eq!(names("fn c<T: Fn(u64) -> u64>(f: T, x: u64, y: u64) {}"), ["c"]);
        assert_eq!(offenders("\n\nfn d(_: u64, _: u64) {}"), [(3, "d".to_owned())]);
    }

    #[test]
    fn others_are_not() {
        for text in [
            "fn a(x: u64, y: &str, z: u64) {}",
            "fn a(x: u64) -> u64 { b(|p: u64, q: u64| p) }",
            "fn a(x: Range<u64>, y: u64, f: impl Fn(u64, u64) -> u64) {}",
            "fn a(f: fn(u64, u64), x: u64) {}",
            "// fn a(x: u64, y: u64)\nconst A: &str = \"fn a(x: u64, y: u64)\";",
            "fn a((x, y): (u64, u64), z: u64) {}",
            "fn a(x: Option<u64>, y: u64) {}",
        ] {
            assert!(names(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn numbers_may_only_fall() {
        let mut census = Census::default();
        census.add(Path::new("crates/a/src/lib.rs"), "fn f(x: u64, y: u64) {}");
        census.add(Path::new("crates/a/tests/t.rs"), "fn g(x: u64, y: u64) {}");
        assert!(census.judge(&[("crates/a", 2)]).is_empty());
        let more = census.judge(&[("crates/a", 1)]);
        assert_eq!(more.len(), 2, "{more:?}");
        assert!(more[0].starts_with("crates/a/src/lib.rs:1: f takes two"), "{more:?}");
        assert_eq!(census.judge(&[]).len(), 2);
        let fewer = census.judge(&[("crates/a", 3), ("crates/b", 1)]);
        assert_eq!(fewer.len(), 2, "{fewer:?}");
        assert!(fewer[0].contains("lower its number in ALLOWED, which is 3"), "{fewer:?}");
        assert_eq!(crate_of(Path::new("xtask/src/main.rs")), "xtask");
    }
}
