//! Dependencies run one way: between the crates, and between the modules of a folder.
//!
//! The lists in [`crate::order`] are the rule; nothing is exempt from it. A module of a folder uses
//! only what stands above it in the folder's list, or no other module of it at all. What the
//! folder's own module (`lib.rs`, `mod.rs`) defines is common to all of them.
//!
//! Paths are read from the text: `crate::…`, `super::…`, and groups in braces. What a folder's own
//! module brings in from another (`use base::error`, `pub use ids::*`) belongs to that one. Tests
//! may use anything, since nobody depends on them: files named `tests`, and items under
//! `#[cfg(test)]`.

use crate::lexer;
use crate::order::{CRATES, FOR_TESTS, HOUSES};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A folder whose modules have a direction.
#[derive(Debug)]
pub(crate) struct House {
    /// From the top of the repository.
    pub(crate) folder: &'static str,
    pub(crate) rooms: Rooms,
}

/// Which modules of a folder may use which.
#[derive(Debug)]
pub(crate) enum Rooms {
    /// Each uses only those before it.
    Upwards(&'static [&'static str]),
    /// None uses another.
    Apart,
}

impl House {
    /// The path of the folder's own module in its crate.
    fn module(&self) -> Vec<String> {
        let inside = self.folder.split_once("/src").map_or("", |(_, inside)| inside);
        inside.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }

    fn listed(&self) -> &'static [&'static str] {
        match self.rooms {
            Rooms::Upwards(rooms) => rooms,
            Rooms::Apart => &[],
        }
    }

    /// What is wrong with a room; nothing if it is in its list, or if there is none.
    fn judge_room(&self, room: &str) -> Option<String> {
        match self.rooms {
            Rooms::Upwards(rooms) if !rooms.contains(&room) => Some(format!(
                "`{room}` is not in the list of {} in xtask/src/order.rs",
                self.folder
            )),
            _ => None,
        }
    }

    /// May `room` use `other`?
    fn allows(&self, room: &str, other: &str) -> bool {
        match self.rooms {
            Rooms::Upwards(rooms) => {
                let floor = |name| rooms.iter().position(|r| *r == name);
                floor(other) <= floor(room)
            }
            Rooms::Apart => room == other,
        }
    }
}

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
            findings.push(format!("{path}: the crate is not in xtask/src/order.rs"));
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
    let mut sources = Vec::new();
    for path in files {
        let module = module_of(path.strip_prefix(&folder).unwrap_or(&path));
        let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        let text = std::fs::read_to_string(&path).with_context(|| shown.clone())?;
        sources.push(Source { module, shown, code: code(&text) });
    }
    let beside = folder.with_extension("rs");
    if beside.exists() {
        let code = code(&std::fs::read_to_string(beside)?);
        sources.push(Source { module: Vec::new(), shown: String::new(), code });
    }
    let names = brought_in(&sources);
    let mut findings = Vec::new();
    for source in &sources {
        let Some(room) = source.module.first() else { continue };
        let shown = &source.shown;
        if let Some(wrong) = house.judge_room(room) {
            findings.push(format!("{shown}: {wrong}"));
            continue;
        }
        let own = house.module();
        let place = [own.as_slice(), source.module.as_slice()].concat();
        for (line, used) in uses(&source.code, &place) {
            let Some(name) = used.strip_prefix(own.as_slice()).and_then(|rest| rest.first()) else {
                continue;
            };
            let is_room = |name: &str| sources.iter().any(|s| s.is_of(name));
            // A function may be brought in under the name of a room.
            let other = names.get(name).filter(|_| !is_room(name)).unwrap_or(name);
            if is_room(other) && !house.allows(room, other) {
                findings.push(format!("{shown}:{line}: `{room}` must not use `{other}`"));
            }
        }
    }
    for gone in house.listed().iter().filter(|r| !sources.iter().any(|s| s.is_of(r))) {
        findings.push(format!(
            "xtask/src/order.rs: `{gone}` in the list of {} is not there",
            house.folder
        ));
    }
    Ok(findings)
}

/// A file of a house, without comments, literals and tests.
struct Source {
    /// Its module, from that of the folder on.
    module: Vec<String>,
    shown: String,
    code: String,
}

impl Source {
    fn is_of(&self, room: &str) -> bool {
        self.module.first().is_some_and(|first| first == room)
    }
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

/// Names that the folder's own module brings in, and from which room.
fn brought_in(sources: &[Source]) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    let rooms: Vec<&String> = sources.iter().filter_map(|s| s.module.first()).collect();
    for face in sources.iter().filter(|s| s.module.is_empty()) {
        for statement in face.code.split(';') {
            let Some(at) = statement.rfind("use ") else { continue };
            for path in leaves(&statement[at + "use ".len()..]) {
                let (Some(first), Some(last)) = (path.first(), path.last()) else { continue };
                if !rooms.contains(&first) || path.len() < 2 {
                    continue;
                }
                if last == "*" {
                    let room = sources.iter().filter(|s| s.module == [first.clone()]);
                    let all = room.flat_map(|s| defined(&s.code));
                    names.extend(all.map(|name| (name, first.clone())));
                } else {
                    names.insert(last.clone(), first.clone());
                }
            }
        }
    }
    names
}

/// The names that a file defines for others.
fn defined(code: &str) -> Vec<String> {
    const KINDS: [&str; 8] = ["struct", "enum", "trait", "type", "const", "static", "fn", "union"];
    let mut found = Vec::new();
    for line in code.lines().filter(|line| line.starts_with("pub")) {
        let mut words = line.split_whitespace();
        if words.any(|word| KINDS.contains(&word)) {
            let name = words.find(|word| *word != "fn").unwrap_or_default();
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            found.push(name[..end].to_owned());
        }
    }
    found
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

/// Paths within the crate that code uses, from the crate's top, with their lines. `place` is the
/// module that it stands in.
fn uses(text: &str, place: &[String]) -> Vec<(usize, Vec<String>)> {
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

/// The text with comments, literals and items under `#[cfg(test)]` made blank; lines stay.
fn code(text: &str) -> String {
    let text = lexer::code(text);
    let mut out = String::with_capacity(text.len());
    let mut skipping: Option<usize> = None;
    for line in text.lines() {
        let stripped = line.trim();
        let indent = line.len() - line.trim_start().len();
        if let Some(depth) = skipping {
            // The item ends where something closes as far to the left as it began, or with the
            // semicolon of a line that opens nothing.
            let ends = indent == depth
                && (stripped.starts_with('}')
                    || (stripped.ends_with([';', ',']) && !stripped.starts_with("#[")));
            if ends {
                skipping = None;
            }
        } else if stripped.starts_with("#[cfg(test)]") || stripped.starts_with("#[cfg(all(test") {
            let rest = stripped.split_once(']').map_or("", |(_, rest)| rest).trim();
            if rest.is_empty() {
                skipping = Some(indent);
            }
        } else {
            out.push_str(line);
        }
        out.push('\n');
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
        uses(&code(text), &place(path))
            .into_iter()
            .map(|(l, p)| format!("{l} {}", p.join("::")))
            .collect()
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

    /// What is found in a folder with these texts.
    fn house(rooms: Rooms, files: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let house = House { folder: "crates/a/src", rooms };
        for (path, text) in files {
            let path = root.path().join(house.folder).join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        check_house(root.path(), &house).unwrap()
    }

    #[test]
    fn only_one_direction_is_allowed() {
        let files = [
            (
                "lib.rs",
                "mod low;\nmod high;\npub use high::Thing;\nuse low::base;\npub use high::*;\n",
            ),
            ("low/mod.rs", "use crate::base;\nuse crate::Thing;\nuse crate::Other;\n"),
            ("low/deep.rs", "fn f() {\n    super::super::high::g()\n}\n"),
            ("low/tests.rs", "use crate::high;\n"),
            ("high.rs", "use crate::low::deep;\npub(crate) const fn Other() {}\n"),
        ];
        let breaches = |places: &[&str], from: &str, to: &str| -> Vec<String> {
            let line = |at| format!("crates/a/src/{at}: `{from}` must not use `{to}`");
            places.iter().map(line).collect()
        };
        let upward = breaches(&["low/deep.rs:2", "low/mod.rs:2", "low/mod.rs:3"], "low", "high");
        assert_eq!(house(Rooms::Upwards(&["low", "high"]), &files), upward);
        let downward = breaches(&["high.rs:1"], "high", "low");
        assert_eq!(house(Rooms::Upwards(&["high", "low"]), &files), downward);
        assert_eq!(house(Rooms::Apart, &files), [downward, upward].concat());
    }

    #[test]
    fn a_folder_knows_its_module() {
        let module = |folder| House { folder, rooms: Rooms::Apart }.module();
        assert_eq!(module("crates/fs/src"), Vec::<String>::new());
        assert_eq!(module("crates/cli/src/commands/map"), ["commands", "map"]);
    }

    #[test]
    fn the_list_and_the_folder_agree() {
        let files = [("lib.rs", "mod low;\n"), ("low.rs", ""), ("loose.rs", "")];
        let found = house(Rooms::Upwards(&["low", "gone"]), &files);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("crates/a/src/loose.rs: `loose` is not in the list"));
        assert!(found[1].ends_with("`gone` in the list of crates/a/src is not there"));
    }

    #[test]
    fn the_repository_keeps_the_rule() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(check(root).unwrap(), Vec::<String>::new());
    }
}
