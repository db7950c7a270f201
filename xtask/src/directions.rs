//! Dependencies run one way: between the crates, and between the rooms of `fs`.
//!
//! The two tables below are the rule. [`CRATES`] says what each crate may use; [`HOUSES`] lists the
//! modules of a folder from the ground up, and a module uses only what stands above it there.
//! `ARCHITECTURE.md` explains the same lists to people.
//!
//! Paths are read from the text: `crate::…`, `super::…`, and groups in braces. What a folder's own
//! module brings in from another (`use base::error`) belongs to that one. Tests may use anything,
//! since nobody depends on them: files named `tests`, and items under `#[cfg(test)]`.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What a crate may use of ours, but for its tests. Crates that are for tests only may use anything
/// and are used by tests only.
const CRATES: &[(&str, &[&str])] = &[
    ("format", &[]),
    ("volume", &["format"]),
    ("codec", &["format"]),
    ("restore", &["format", "volume", "codec"]),
    ("check", &["format", "volume", "codec"]),
    ("fs", &["format", "volume", "codec"]),
    ("fuse", &["format", "fs"]),
    ("sources", &["format", "volume", "codec", "fs"]),
    ("build", &["format", "volume", "codec", "fs", "sources"]),
    ("cli", &["format", "volume", "fs", "fuse", "check", "restore", "sources", "build"]),
];
const FOR_TESTS: &[&str] = &["simtest", "bench", "xtask"];

/// The modules of a folder, in order.
struct House {
    /// The folder, from the top of the repository.
    folder: &'static str,
    /// The path of its module in the crate.
    module: &'static [&'static str],
    /// From the ground up.
    rooms: &'static [&'static str],
    /// What does not keep the order yet: (from, to).
    exceptions: &'static [(&'static str, &'static str)],
}

const HOUSES: &[House] = &[
    House {
        folder: "crates/fs/src",
        module: &[],
        rooms: &[
            "base",
            "tree",
            "space",
            "transaction",
            "engine",
            "file",
            "log",
            "subvolume",
            "inode",
            "filesystem",
            "mkfs",
        ],
        exceptions: &[],
    },
    House {
        folder: "crates/fs/src/file",
        module: &["file"],
        rooms: &[
            "extents",
            "property",
            "compress",
            "sums",
            "read",
            "replace",
            "join",
            "batch",
            "nocow",
            "admission",
            "truncate",
            "clone",
            "fallocate",
            "map",
            "seek",
            "writeback",
            "older",
            "reclaim",
        ],
        exceptions: &[],
    },
    House {
        folder: "crates/fs/src/log",
        module: &["log"],
        rooms: &[
            "source",
            "overlay",
            "references",
            "logged_data",
            "inodes",
            "names",
            "extents",
            "subvolume",
            "replay",
            "write",
            "fsync",
        ],
        exceptions: &[],
    },
    House {
        folder: "crates/fs/src/log/write",
        module: &["log", "write"],
        rooms: &[
            "diff",
            "blocks",
            "tree",
            "collect",
            "names",
            "above",
            "content",
            "queue",
            "batch",
            "older",
            "contribute",
            "sync",
        ],
        exceptions: &[],
    },
];

/// One line per finding.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut findings = check_crates(root)?;
    for house in HOUSES {
        findings.extend(check_house(root, house)?);
    }
    Ok(findings)
}

/// Crates against [`CRATES`].
fn check_crates(root: &Path) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for entry in std::fs::read_dir(root.join("crates")).context("crates")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let path = format!("crates/{name}/Cargo.toml");
        let text = std::fs::read_to_string(root.join(&path)).with_context(|| path.clone())?;
        if FOR_TESTS.contains(&&*name) {
            continue;
        }
        let Some((_, allowed)) = CRATES.iter().find(|(of, _)| *of == name) else {
            findings.push(format!("{path}: the crate is not in xtask/src/directions.rs"));
            continue;
        };
        for (number, used) in dependencies(&text) {
            if !allowed.contains(&&*used) {
                findings.push(format!("{path}:{number}: `{name}` must not use `{used}`"));
            }
        }
    }
    findings.sort();
    Ok(findings)
}

/// The crates of ours that a manifest names as dependencies, with their lines; not those of tests.
fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut counts = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(manifest.lines()) {
        if let Some(section) = line.trim().strip_prefix('[') {
            let section = section.trim_end_matches(']');
            counts = section.ends_with("dependencies") && !section.ends_with("dev-dependencies");
        } else if counts && let Some(rest) = line.strip_prefix("larder-") {
            let end = rest.find(['.', ' ', '=']).unwrap_or(rest.len());
            found.push((number, rest[..end].to_owned()));
        }
    }
    found
}

/// The files of a folder against the order of its modules.
fn check_house(root: &Path, house: &House) -> Result<Vec<String>> {
    let folder = root.join(house.folder);
    let mut files = Vec::new();
    list(&folder, &mut files)?;
    files.sort();
    let mut names = BTreeMap::new();
    for face in ["lib.rs", "mod.rs"] {
        let path = folder.join(face);
        if path.exists() {
            names.extend(brought_in(&std::fs::read_to_string(&path)?, house));
        }
    }
    let mut findings = Vec::new();
    let mut excused = BTreeSet::new();
    for path in files {
        let inside = path.strip_prefix(&folder).unwrap_or(&path);
        let module = module_of(inside);
        let Some(room) = module.first() else { continue };
        let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        let Some(floor) = house.rooms.iter().position(|r| r == room) else {
            findings.push(format!("{shown}: `{room}` is not in xtask/src/directions.rs"));
            continue;
        };
        let text = std::fs::read_to_string(&path).with_context(|| shown.clone())?;
        let place: Vec<String> =
            house.module.iter().map(|m| (*m).to_owned()).chain(module.iter().cloned()).collect();
        for (line, used) in uses(&text, &place) {
            let Some(used) = within(&used, house) else { continue };
            let used = names.get(&used).unwrap_or(&used);
            let Some(other) = house.rooms.iter().position(|r| r == used) else { continue };
            if other <= floor {
                continue;
            }
            match house.exceptions.iter().find(|(from, to)| from == room && to == used) {
                Some(pair) => {
                    excused.insert(*pair);
                }
                None => findings.push(format!("{shown}:{line}: `{room}` must not use `{used}`")),
            }
        }
    }
    for (from, to) in house.exceptions.iter().filter(|pair| !excused.contains(pair)) {
        findings.push(format!(
            "xtask/src/directions.rs: the exception ({from}, {to}) of {} is needed no more",
            house.folder
        ));
    }
    Ok(findings)
}

fn list(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if entry.file_type()?.is_dir() {
            if name != "tests" {
                list(&entry.path(), found)?;
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(entry.path());
        }
    }
    Ok(())
}

/// The module that a file is: `a/mod.rs` and `a.rs` are `a`, `lib.rs` is the top.
fn module_of(inside: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        inside.with_extension("").iter().map(|p| p.to_string_lossy().into_owned()).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// The module of the house that a path leads to, or a name that its face brings in.
fn within(path: &[String], house: &House) -> Option<String> {
    let rest = path.strip_prefix_of(house.module)?;
    rest.first().cloned()
}

trait StripPrefix {
    fn strip_prefix_of(&self, prefix: &[&str]) -> Option<&[String]>;
}
impl StripPrefix for [String] {
    fn strip_prefix_of(&self, prefix: &[&str]) -> Option<&[String]> {
        let same = self.len() >= prefix.len() && self.iter().zip(prefix).all(|(a, b)| a == b);
        same.then(|| &self[prefix.len()..])
    }
}

/// Names that `lib.rs` or `mod.rs` brings in, and from which module.
fn brought_in(face: &str, house: &House) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    let text = code(face);
    for statement in text.split(';') {
        let Some(at) = statement.rfind("use ") else { continue };
        let tree = &statement[at + "use ".len()..];
        for path in leaves(tree) {
            let (Some(first), Some(last)) = (path.first(), path.last()) else { continue };
            if house.rooms.contains(&&**first) && path.len() > 1 {
                names.insert(last.clone(), first.clone());
            }
        }
    }
    names
}

/// Every path of a `use` tree; a name that is given with `as` comes last.
fn leaves(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let parts = path.split("::").chain([name]).map(str::trim);
        return vec![parts.filter(|p| !p.is_empty()).map(str::to_owned).collect()];
    };
    let prefix: Vec<String> = tree[..open]
        .split("::")
        .map(str::trim)
        .filter(|p| !p.is_empty())
        .map(str::to_owned)
        .collect();
    let close = tree.rfind('}').unwrap_or(tree.len());
    let mut found = Vec::new();
    for part in split_group(&tree[open + 1..close]) {
        for leaf in leaves(part) {
            found.push(prefix.iter().cloned().chain(leaf).collect());
        }
    }
    found
}

/// Splits what stands between braces at its own commas.
fn split_group(text: &str) -> Vec<&str> {
    let (mut depth, mut from) = (0, 0);
    let mut parts = Vec::new();
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[from..]);
    parts.into_iter().map(str::trim).filter(|p| !p.is_empty()).collect()
}

/// Paths within the crate that a file uses, from the crate's top, with their lines. `place` is the
/// file's own module.
fn uses(text: &str, place: &[String]) -> Vec<(usize, Vec<String>)> {
    let text = code(text);
    let mut found = Vec::new();
    for word in ["crate::", "super::"] {
        for (at, _) in text.match_indices(word) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let line = 1 + text[..at].matches('\n').count();
            let mut rest = &text[at + word.len()..];
            let mut base: Vec<String> = if word == "crate::" { Vec::new() } else { place.to_vec() };
            if word == "super::" {
                // Inline modules stand deeper than their file; those of ours are tests, which are
                // gone here.
                base.pop();
                while let Some(more) = rest.strip_prefix("super::") {
                    base.pop();
                    rest = more;
                }
            }
            for path in leaves(&rest[..end_of_tree(rest)]) {
                found.push((line, base.iter().cloned().chain(path).collect()));
            }
        }
    }
    found
}

/// Where the path or group that begins here ends.
fn end_of_tree(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' if depth > 0 || text[..at].ends_with("::") || at == 0 => depth += 1,
            '}' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ if depth > 0 || c.is_alphanumeric() || c == '_' || c == ':' || c == '*' => {}
            _ => return at,
        }
    }
    text.len()
}

/// The text with comments, strings and items under `#[cfg(test)]` made blank; lines stay.
fn code(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut skipping: Option<usize> = None;
    for line in text.lines() {
        let stripped = line.trim_start();
        let indent = line.len() - stripped.len();
        if let Some(depth) = skipping {
            // The item ends where something closes as far to the left as it began, or with the
            // semicolon of a line that opens nothing.
            let ends = indent == depth
                && (stripped.starts_with('}')
                    || (stripped.ends_with(';') && !stripped.starts_with("#["))
                    || (stripped.ends_with(',') && !stripped.starts_with("#[")));
            if ends {
                skipping = None;
            }
        } else if stripped.starts_with("#[cfg(test)]") || stripped.starts_with("#[cfg(all(test") {
            let rest = stripped.split_once(']').map_or("", |(_, rest)| rest).trim();
            if rest.is_empty() {
                skipping = Some(indent);
            }
        } else {
            out.push_str(&without_comment(line));
        }
        out.push('\n');
    }
    out
}

/// A line without its comment and without what stands in quotes.
fn without_comment(line: &str) -> String {
    let mut out = String::new();
    let mut quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => {
                chars.next();
            }
            '"' => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            _ if quoted => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str) -> Vec<String> {
        module_of(Path::new(path))
    }
    fn used(path: &str, text: &str) -> Vec<String> {
        uses(text, &place(path)).into_iter().map(|(l, p)| format!("{l} {}", p.join("::"))).collect()
    }

    #[test]
    fn files_are_modules() {
        assert_eq!(place("lib.rs"), Vec::<String>::new());
        assert_eq!(place("tree/mod.rs"), ["tree"]);
        assert_eq!(place("tree/node.rs"), ["tree", "node"]);
    }

    #[test]
    fn paths_are_found_wherever_they_stand() {
        assert_eq!(used("a.rs", "use crate::b::C;\n"), ["1 b::C"]);
        assert_eq!(used("a.rs", "\nfn f(x: &crate::b::C) {\n"), ["2 b::C"]);
        assert_eq!(used("a.rs", "use crate::{b::{C, D}, e};"), ["1 b::C", "1 b::D", "1 e"]);
        assert_eq!(used("a.rs", "use crate::b::{\n    C,\n    d,\n};"), ["1 b::C", "1 b::d"]);
        assert_eq!(used("a/b.rs", "use super::c;\nuse super::super::d::E;"), ["1 a::c", "2 d::E"]);
        assert_eq!(used("a.rs", "if x { crate::b::c(y) }"), ["1 b::c"]);
    }

    #[test]
    fn tests_and_text_are_no_dependency() {
        assert!(
            used("a.rs", "//! See [`crate::b`].\nlet x = \"crate::b\"; // crate::c\n").is_empty()
        );
        let text = "#[cfg(test)]\nmod tests {\n    use crate::b;\n}\nuse crate::c;\n";
        assert_eq!(used("a.rs", text), ["5 c"]);
        let text = "#[cfg(test)]\npub(crate) use crate::b;\nuse crate::c;\n";
        assert_eq!(used("a.rs", text), ["3 c"]);
        assert!(used("a.rs", "macro_rules! x { () => { $mycrate::b } }").is_empty());
    }

    #[test]
    fn manifests_name_crates_of_ours() {
        let text = "[dependencies]\nlarder-format.workspace = true\nserde = \"1\"\n\
            [dev-dependencies]\nlarder-simtest.workspace = true\n\
            [target.'cfg(unix)'.dependencies]\nlarder-volume = { path = \"\" }\n";
        assert_eq!(dependencies(text), [(2, "format".to_owned()), (7, "volume".to_owned())]);
    }

    /// A folder of two rooms, with these texts; what is found there.
    fn house(
        name: &str,
        files: &[(&str, &str)],
        exceptions: &'static [(&'static str, &'static str)],
    ) -> Vec<String> {
        let root = std::env::temp_dir().join(format!("directions-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join("src").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let house = House { folder: "src", module: &[], rooms: &["low", "high"], exceptions };
        let found = check_house(&root, &house).unwrap();
        std::fs::remove_dir_all(&root).unwrap();
        found
    }

    #[test]
    fn only_one_direction_is_allowed() {
        let files = [
            ("lib.rs", "mod low;\nmod high;\npub use high::Thing;\nuse low::base;\n"),
            ("low/mod.rs", "use crate::base;\nuse crate::Thing;\n"),
            ("low/deep.rs", "fn f() {\n    super::super::high::g()\n}\n"),
            ("low/tests.rs", "use crate::high;\n"),
            ("high.rs", "use crate::low::deep;\n"),
        ];
        let wrong = ["src/low/deep.rs:2", "src/low/mod.rs:2"];
        let wrong = wrong.map(|at| format!("{at}: `low` must not use `high`"));
        assert_eq!(house("wrong", &files, &[]), wrong);
        assert!(house("excused", &files, &[("low", "high")]).is_empty());
    }

    #[test]
    fn what_is_not_listed_and_what_is_needless_is_said() {
        let files = [("lib.rs", "mod low;\n"), ("low.rs", ""), ("loose.rs", "")];
        let found = house("needless", &files, &[("low", "high")]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("src/loose.rs: `loose` is not in"));
        assert!(found[1].contains("the exception (low, high) of src is needed no more"));
    }

    #[test]
    fn the_repository_keeps_the_rule() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(check(root).unwrap(), Vec::<String>::new());
    }
}
