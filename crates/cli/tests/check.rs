//! `larder check` as people and scripts meet it: texts, JSON, exit codes.

mod common;

use common::larder;
use std::os::unix::fs::FileExt;

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

    // Both copies of the root tree's only node: nothing else is found then, and all the rest is a follow-up.
    let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    let chunks = larder(args!["inspect", "chunks", "--json", &image]).ok().json();
    let root = larder(args!["inspect", "tree", "--json", &image]).ok().json();
    let into = root[0]["bytenr"].as_u64().unwrap() - chunks[2]["logical"].as_u64().unwrap();
    let place = |copy: usize| chunks[2]["stripes"][copy]["offset"].as_u64().unwrap() + into;
    file.write_all_at(b"garbage", place(0) + 5000).unwrap();
    let run = larder(args!["check", &image]).fails(1, "1 error found");
    let text = run.text();
    assert!(text.contains("error: node-checksum: tree 1") && text.contains("copy 0 of 2"), "{text}");
    assert!(text.contains("What can be done: "), "{text}");
    file.write_all_at(b"garbage", place(1) + 5000).unwrap();
    let json = larder(args!["check", "--json", &image]).fails(1, "errors found").json();
    let lost = json["findings"].as_array().unwrap().iter().find(|f| f["kind"] == "subtree-lost").unwrap();
    assert_eq!((&lost["tree"], &lost["severity"]), (&1.into(), &"error".into()));
    assert!(lost["remedy"].is_string() && lost["meaning"].is_string());
    assert_eq!(json["clean"], false);
}

#[test]
fn an_image_in_use_is_not_checked_unless_forced() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    let writer = larder_volume::FileDevice::open(&image, larder_volume::OpenMode::Write, false).unwrap();
    larder(args!["check", &image]).fails(2, "in use");
    larder(args!["check", "--force", &image]).ok();
    drop(writer);
    larder(args!["check", "--threads", "0", &image]).fails(2, "threads");
}
