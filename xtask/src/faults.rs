//! Each fault that a test can turn on has its place in the engine, and a test that turns it on.
//!
//! A fault without a place does nothing, and one without a test proves nothing. The compiler finds
//! neither, since the names are public.

use anyhow::{Context, Result};
use std::path::Path;

const NAMES: &str = "crates/fs/src/base/tuning/faults.rs";
const ENGINE: &str = "crates/fs/src";
const TESTS: &str = "crates/simtest/tests";

/// One line per finding.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let names = std::fs::read_to_string(root.join(NAMES)).context(NAMES)?;
    let (mut engine, mut tests) = (String::new(), String::new());
    read_all(&root.join(ENGINE), &mut engine)?;
    read_all(&root.join(TESTS), &mut tests)?;
    Ok(findings(&names, &engine, &tests))
}

/// Appends all Rust files of a folder.
fn read_all(folder: &Path, to: &mut String) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            read_all(&path, to)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            *to += &std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

fn findings(names: &str, engine: &str, tests: &str) -> Vec<String> {
    let happening: Vec<&str> = engine
        .split("fault!(")
        .skip(1)
        .filter_map(|rest| rest.split(')').next()?.rsplit(',').next().map(str::trim))
        .collect();
    let noticed: Vec<&str> = tests
        .split("Fault::")
        .skip(1)
        .filter_map(|rest| rest.split(|c| !is_word(c)).next())
        .collect();
    let mut findings = Vec::new();
    for (number, name) in variants(names) {
        if !happening.contains(&name) {
            findings.push(format!("{NAMES}:{number}: no `fault!` of {ENGINE} asks for {name}"));
        }
        if !noticed.contains(&name) {
            findings.push(format!("{NAMES}:{number}: no test in {TESTS} turns {name} on"));
        }
    }
    findings
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric()
}

/// The names of the enum, each with its line.
fn variants(names: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..)
        .zip(names.lines())
        .skip_while(|(_, line)| !line.starts_with("pub enum"))
        .skip(1)
        .take_while(|(_, line)| !line.starts_with('}'))
        .filter_map(|(number, line)| Some((number, line.trim().strip_suffix(',')?)))
        .filter(|(_, name)| name.chars().all(is_word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: &str = "//! One, Two,\npub enum Fault {\n    /// Of\n    /// one,\n    One,\n    \
        Two,\n    Three,\n}\n";

    #[test]
    fn each_fault_needs_a_place_and_a_test() {
        let engine = "if fault!(core.options.tuning, One) {} fault!(tuning, Two)";
        assert!(
            findings(&THREE.replace("    Three,\n", ""), engine, "Fault::One, Fault::Two)")
                .is_empty()
        );
        let found = findings(THREE, engine, "Fault::One; Fault::TwoOfThem, Fault::Three");
        let starts = |n: usize, text: &str| assert!(found[n].starts_with(text), "{}", found[n]);
        starts(0, "crates/fs/src/base/tuning/faults.rs:6: no test");
        starts(1, "crates/fs/src/base/tuning/faults.rs:7: no `fault!`");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn all_faults_are_found_and_have_both() {
        let root = crate::root().expect("the repository");
        let names = std::fs::read_to_string(root.join(NAMES)).expect(NAMES);
        assert!(variants(&names).count() > 30);
        assert_eq!(check(&root).expect("files"), Vec::<String>::new());
    }
}
