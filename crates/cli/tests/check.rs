//! `larder check` as people and scripts meet it: texts, JSON, exit codes.

mod common;

use common::{command, inside, larder};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Writes over the first superblock.
fn destroy_first_super(image: &Path) {
    let file = std::fs::File::options().write(true).open(image).unwrap();
    file.write_all_at(&[0; 4096], 65536).unwrap();
}

#[test]
fn verdicts_are_exit_codes() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    let text = larder(args!["check", &image]).ok().text();
    assert!(text.starts_with("no errors: ") && text.contains(" nodes"), "{text}");
    let json = larder(args!["check", "--json", "--data", "--threads", "1", &image]).ok().json();
    assert_eq!((&json["clean"], &json["errors"]), (&true.into(), &0.into()));
    assert!(json["stats"]["nodes"].as_u64().unwrap() >= 10);

    // Both copies of the root tree's only node: nothing else is found then, and all the rest is a
    // follow-up.
    let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    let chunks = larder(args!["inspect", "chunks", "--json", &image]).ok().json();
    let root = larder(args!["inspect", "tree", "--json", &image]).ok().json();
    let into = root[0]["bytenr"].as_u64().unwrap() - chunks[2]["logical"].as_u64().unwrap();
    let place = |copy: usize| chunks[2]["stripes"][copy]["offset"].as_u64().unwrap() + into;
    file.write_all_at(b"garbage", place(0) + 5000).unwrap();
    let run = larder(args!["check", &image]).fails(1, "1 error found");
    let text = run.text();
    assert!(
        text.contains("error: node-checksum: tree 1") && text.contains("copy 0 of 2"),
        "{text}"
    );
    assert!(text.contains("What can be done: "), "{text}");
    file.write_all_at(b"garbage", place(1) + 5000).unwrap();
    let json = larder(args!["check", "--json", &image]).fails(1, "errors found").json();
    let lost =
        json["findings"].as_array().unwrap().iter().find(|f| f["kind"] == "subtree-lost").unwrap();
    assert_eq!((&lost["tree"], &lost["severity"]), (&1.into(), &"error".into()));
    assert!(lost["remedy"].is_string() && lost["meaning"].is_string());
    assert_eq!(json["clean"], false);
}

#[test]
fn an_image_in_use_is_not_checked_unless_forced() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    let writer = larder_volume::FileDevice::open(&image, larder_volume::OpenMode::Write).unwrap();
    larder(args!["check", &image]).fails(2, "in use");
    larder(args!["check", "--force", &image]).ok();
    drop(writer);
    larder(args!["check", "--threads", "0", &image]).fails(2, "threads");
}

#[test]
fn the_verdict_stands_even_if_nobody_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    let verdict = |args: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command()
            .args(args)
            .arg(&image)
            .stdout(writer)
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap()
            .code()
    };
    assert_eq!((verdict(&["check"]), verdict(&["check", "--json"])), (Some(0), Some(0)));
    destroy_first_super(&image);
    assert_eq!((verdict(&["check"]), verdict(&["check", "--json"])), (Some(1), Some(1)));
    // Nothing could be said at all.
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut run = command();
    let status =
        run.arg("check").arg(&image).stdout(full).stderr(std::process::Stdio::null()).status();
    assert_eq!(status.unwrap().code(), Some(2));
}

#[test]
fn advice_leads_to_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    let file = dir.path().join("file");
    std::fs::write(&file, vec![7; 100_000]).unwrap();
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    larder(args!["cp", &file, inside(&image, "/thesis")]).ok();
    let at = larder(args!["inspect", "inode", "--json", inside(&image, "/thesis")]).ok().json();
    let at = at["extents"][0]["stripes"][0]["offset"].as_u64().unwrap();
    std::fs::File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .write_all_at(b"bad", at + 5000)
        .unwrap();
    larder(args!["check", &image]).ok();
    let run = larder(args!["check", "--data", &image]).fails(1, "1 error found");
    assert!(run.text().contains("1 error, 0 warnings: "), "{}", run.text());
    assert!(run.text().contains("`larder inspect files-at IMAGE ADDRESS`"), "{}", run.text());
    let found = larder(args!["check", "--data", "--json", &image]).fails(1, "1 error found").json();
    let found = found["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|f| f["kind"] == "data-checksum")
        .unwrap();
    let address = found["address"].to_string();
    let files = larder(args!["inspect", "files-at", &image, &address]).ok().text();
    assert!(files.contains("/thesis"), "{files}");
    let (tree, number) = (found["tree"].to_string(), found["key"]["objectid"].to_string());
    let inode = larder(args!["inspect", "inode", "--subvolid", &tree, "--number", &number, &image])
        .ok()
        .text();
    assert!(inode.contains("name /thesis"), "{inode}");
}

#[test]
fn what_cannot_be_checked_is_said_with_what_helps() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    std::fs::write(&text, "not an image\n".repeat(20_000)).unwrap();
    let run = larder(args!["check", &text]).fails(2, "give the partition");
    assert_eq!(run.err.matches(&*text.to_string_lossy()).count(), 1, "{}", run.err);
    larder(args!["check", "/dev/null"]).fails(2, "give an image file or a block device");
    // A command that looks for lost data must not suggest a new file system.
    let run = larder(args!["check", dir.path().join("missing")]).fails(2, "No such file");
    assert!(!run.err.contains("mkfs"), "{}", run.err);
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    destroy_first_super(&image);
    larder(args!["check", &image]).fails(1, "1 error found");
    let run = larder(args!["ls", &image]).fails(2, "hint: `larder restore`");
    assert!(!run.err.contains("mkfs"), "{}", run.err);
}

#[test]
fn progress_is_for_terminals() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    assert_eq!(larder(args!["check", "--data", &image]).ok().err, "");
    // On a terminal of its own.
    let line =
        format!("'{}' check '{}' > /dev/null", env!("CARGO_BIN_EXE_larder"), image.display());
    let Ok(run) = std::process::Command::new("script").args(["-qec", &line, "/dev/null"]).output()
    else {
        eprintln!("skipped: needs script(1)");
        return;
    };
    let shown = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && shown.contains(" left"), "{shown:?}");
}
