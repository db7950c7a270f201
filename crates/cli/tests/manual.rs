//! The manual `docs/man/larder.8` is written by hand, so it could fall behind the command: it names
//! every command and every mount option that the help texts have, and formats without warnings.

mod common;

use common::larder;
use std::path::PathBuf;
use std::process::Command;

fn path() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/man/larder.8"))
}

fn page() -> String {
    std::fs::read_to_string(path()).expect("the manual")
}

/// First words of the entries of a help text's section, from the line after `begin` to an empty
/// line. An entry's further lines are indented more.
fn entries(help: &str, begin: &str) -> Vec<String> {
    let section = help.lines().skip_while(|line| !line.starts_with(begin)).skip(1);
    let section = section.take_while(|line| !line.is_empty());
    let entry = |line: &str| {
        let entry = line.strip_prefix("  ")?.split("  ").next()?;
        (!entry.is_empty() && !entry.starts_with(' ')).then(|| entry.to_owned())
    };
    section.filter_map(entry).collect()
}

#[test]
fn it_names_every_command() {
    let commands = entries(&larder(["--help"]).ok().text(), "Commands:");
    assert!(commands.len() > 15, "{commands:?}");
    let page = page();
    for command in commands.iter().filter(|command| *command != "help") {
        let entry = format!(".It Ic {command}");
        assert!(page.lines().any(|line| line == entry), "the manual has no `{entry}`");
        let below = entries(&larder([command, "--help"]).ok().text(), "Commands:");
        let words = page.lines().filter_map(|line| line.strip_prefix(".Cm "));
        let named: Vec<&str> = words.flat_map(|line| line.split([' ', ','])).collect();
        for name in below.iter().filter(|name| *name != "help") {
            assert!(named.contains(&&**name), "the manual does not name {command} {name}");
        }
    }
}

#[test]
fn it_names_every_mount_option() {
    let help = larder(["mount", "--help"]).ok().text();
    let entries = entries(&help, "Options for -o");
    // A sentence about what works as with every mount ends the list.
    let is_option = |entry: &&String| entry.split(", ").all(|option| !option.contains(' '));
    let options = entries.iter().filter(is_option).flat_map(|entry| entry.split(", "));
    let names: Vec<&str> = options.filter_map(|option| option.split(['=', '[']).next()).collect();
    assert!(names.len() > 25 && names.contains(&"nosandbox"), "{names:?}");
    let page = page();
    let listed = page.lines().filter_map(|line| line.strip_prefix(".It Cm "));
    let listed: Vec<&str> = listed.flat_map(|line| line.split([' ', ','])).collect();
    for name in names {
        assert!(listed.contains(&name), "the manual has no entry for the mount option {name}");
    }
}

#[test]
fn it_formats_without_warnings() {
    let checkers: [(&str, &[&str]); 2] =
        [("mandoc", &["-T", "lint", "-W", "warning"]), ("man", &["--warnings", "-l"])];
    let mut checked = false;
    for (program, args) in checkers {
        let run = Command::new(program).args(args).arg(path()).env("LC_ALL", "C.UTF-8").output();
        let Ok(run) = run else { continue };
        checked = true;
        let said = String::from_utf8_lossy(&run.stderr);
        // mandoc's verdict is its output; man's output is the page.
        let verdict = if program == "mandoc" { &*run.stdout } else { b"" };
        let found = verdict.is_empty() && said.is_empty() && run.status.success();
        assert!(found, "{program}: {said}{}", String::from_utf8_lossy(verdict));
    }
    if !checked {
        eprintln!("skipped: needs man or mandoc");
    }
}
