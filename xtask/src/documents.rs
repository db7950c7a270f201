//! Documents hang together: links lead somewhere, each document is reachable, and the tables of
//! crates have all of them.
//!
//! A document that no other one links to is read by nobody, and is soon wrong.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Where readers begin.
const ENTRIES: [&str; 2] = ["README.md", "ARCHITECTURE.md"];
/// The folder whose files they must be able to reach.
const FOLDER: &str = "docs";

/// One line per finding.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut findings = unreachable(root)?;
    findings.extend(missing_crates(root)?);
    Ok(findings)
}

/// Links of a document to files that do not exist.
pub(crate) fn dead_links(root: &Path, document: &Path, text: &str) -> Vec<String> {
    let dead = links(text).filter(|(_, target)| !root.join(resolved(document, target)).exists());
    let shown = document.display();
    dead.map(|(number, target)| format!("{shown}:{number}: link to {target}, which does not exist"))
        .collect()
}

/// The relative links of a text, with their lines.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).flat_map(|(number, line)| {
        let targets = line.split("](").skip(1);
        let targets = targets.filter_map(|rest| rest.split([')', '#', ' ']).next());
        targets
            .filter(|t| !t.is_empty() && !t.contains("://") && !t.starts_with("mailto:"))
            .map(move |target| (number, target))
    })
}

/// What a link of a document leads to, from the top of the repository.
fn resolved(document: &Path, target: &str) -> PathBuf {
    let mut path = PathBuf::new();
    let folder = document.parent().unwrap_or(Path::new(""));
    for part in folder.join(target).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

/// Files of the folder that no chain of links leads to.
fn unreachable(root: &Path) -> Result<Vec<String>> {
    let mut reached: BTreeSet<PathBuf> = BTreeSet::new();
    let mut to_read: Vec<PathBuf> = ENTRIES.iter().map(PathBuf::from).collect();
    while let Some(document) = to_read.pop() {
        if !reached.insert(document.clone()) || document.extension().is_none_or(|e| e != "md") {
            continue;
        }
        // A link to a file that does not exist is a finding of its own.
        let text = std::fs::read_to_string(root.join(&document)).unwrap_or_default();
        to_read.extend(links(&text).map(|(_, target)| resolved(&document, target)));
    }
    let mut files = Vec::new();
    list(&root.join(FOLDER), &mut files)?;
    files.sort();
    let inside = files.iter().filter_map(|path| path.strip_prefix(root).ok());
    let lost = inside.filter(|path| !reached.contains(*path));
    let entries = ENTRIES.join(" or ");
    Ok(lost.map(|path| format!("{}: no link from {entries} leads here", path.display())).collect())
}

fn list(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, found)?;
        } else {
            found.push(path);
        }
    }
    Ok(())
}

/// Crates that a table does not name, and how it would name them.
fn missing_crates(root: &Path) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for entry in std::fs::read_dir(root.join("crates")).context("crates")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        for (document, row) in [
            ("CONTRIBUTING.md", format!("| `crates/{name}` |")),
            ("ARCHITECTURE.md", format!("| `{name}` |")),
        ] {
            let text = std::fs::read_to_string(root.join(document)).context(document)?;
            if !text.contains(&row) {
                findings.push(format!("{document}: no row begins with {row}"));
            }
        }
    }
    findings.sort();
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_must_lead_somewhere() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = "[a](Cargo.toml) [b](https://example.org/x) [c](#part) \
            [d](Cargo.toml#x)\n[e](no/such/file)\n";
        let findings = dead_links(dir, Path::new("x.md"), text);
        assert_eq!(findings, ["x.md:2: link to no/such/file, which does not exist"]);
        assert!(dead_links(dir, Path::new("src/x.md"), "[a](../Cargo.toml)\n").is_empty());
    }

    #[test]
    fn documents_and_crates_must_be_named() {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("README.md", "[a](docs/a.md)"),
            ("ARCHITECTURE.md", "| `one` | x |\n"),
            ("CONTRIBUTING.md", "| `crates/two` | x |\n"),
            ("docs/a.md", "![b](b.svg) [top](../README.md)"),
            ("docs/b.svg", ""),
            ("docs/lost.md", "[a](a.md)"),
            ("crates/one/Cargo.toml", ""),
            ("crates/two/Cargo.toml", ""),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(
            check(root.path()).unwrap(),
            [
                "docs/lost.md: no link from README.md or ARCHITECTURE.md leads here",
                "ARCHITECTURE.md: no row begins with | `two` |",
                "CONTRIBUTING.md: no row begins with | `crates/one` |",
            ]
        );
    }
}
