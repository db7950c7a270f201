//! `larder balance` and `btrfs balance`: of images, and of mounts by their daemon.

mod common;

use common::scene::Scene;
use common::{Run, larder};
use serde_json::Value;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// An image with room for several chunks, mounted.
fn scene() -> Option<Scene> {
    let s = Scene::new()?;
    larder(args!["mkfs", "--force", "--size", "1G", s.image()]).ok();
    s.mount();
    Some(s)
}

/// Chunks that are nearly empty.
fn thin_out(s: &Scene) {
    for n in 0..60u32 {
        let noise: Vec<u8> =
            (0..6 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761 + n) >> 9) as u8).collect();
        fs::write(s.at(&format!("file {n}")), noise).unwrap();
    }
    larder(args!["sync", s.point()]).ok();
    for n in (0..60).filter(|n| n % 6 > 0) {
        fs::remove_file(s.at(&format!("file {n}"))).unwrap();
    }
    larder(args!["sync", s.point()]).ok();
}

/// As `btrfs`, with these words and the mount.
fn habit(s: &Scene, words: &str) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.arg0("btrfs").arg("balance").args(words.split_whitespace()).arg(s.point());
    command.output().unwrap().into()
}

fn status(s: &Scene) -> Value {
    larder(args!["balance", "status", "--json", s.point()]).ok().json()
}

fn unallocated(s: &Scene) -> u64 {
    let value = larder(args!["df", "--json", s.point()]).ok().json();
    value["space"]["unallocated"].as_u64().unwrap()
}

#[test]
fn what_it_says_becomes_free_on_a_mount() {
    let Some(s) = scene() else { return };
    let nothing = larder(args!["balance", s.point()]).ok().text();
    assert!(nothing.contains("Nothing would become free"), "{nothing}");
    thin_out(&s);
    let kept = fs::read(s.at("file 6")).unwrap();
    let text = larder(args!["df", s.point()]).ok().text();
    assert!(text.contains("A balance would free"), "{text}");
    let plan = larder(args!["balance", "--dry-run", "--json", s.point()]).ok().json();
    let (frees, before) = (plan["frees"].as_u64().unwrap(), unallocated(&s));
    assert!(frees > 0, "{plan}");
    let text = larder(args!["balance", s.point()]).ok().text();
    assert!(text.contains("Frees ") && text.contains("is complete"), "{text}");
    assert!(unallocated(&s) >= before + frees, "{} {before} {frees}", unallocated(&s));
    assert!(fs::read(s.at("file 6")).unwrap() == kept);
    assert_eq!(status(&s)["state"]["status"], "finished");
    assert_eq!(status(&s)["unfinished"], Value::Null);
    larder(args!["umount", s.point()]).ok();
    larder(args!["check", "--data", s.image()]).ok();
}

#[test]
fn chunks_are_converted_by_force_where_that_loses_redundancy() {
    let Some(s) = scene() else { return };
    thin_out(&s);
    let start = |words: &[&str]| {
        let words = ["balance", "start"].iter().chain(words);
        larder(words.map(std::ffi::OsString::from).chain([s.point().into()]))
    };
    start(&["-d", "convert=raid1"]).fails(2, "raid1 needs 2 devices");
    start(&["-m", "convert=single"]).fails(2, "--force");
    start(&["-d", "use=3"]).fails(2, "is not a filter");
    start(&[]).fails(2, "--full-balance");
    start(&["-s", "all"]).fails(2, "--force");
    let state = start(&["-d", "convert=dup", "--json"]).ok().json();
    assert_eq!((&state["status"], &state["left"]), (&"finished".into(), &0.into()));
    let value = larder(args!["df", "--json", s.point()]).ok().json();
    assert_eq!(value["space"]["data"]["profile"], "dup");
    start(&["-d", "convert=single"]).fails(2, "--force");
    habit(&s, "start -dconvert=single").ok();
    let text = habit(&s, "start -dusage=100").ok().text();
    assert!(text.contains("Done, had to relocate"), "{text}");
    larder(args!["umount", s.point()]).ok();
    larder(args!["check", "--data", s.image()]).ok();
}

#[test]
fn a_balance_is_paused_and_goes_on() {
    let Some(s) = scene() else { return };
    thin_out(&s);
    habit(&s, "pause").fails(2, "Not running");
    habit(&s, "cancel").fails(2, "Not in progress");
    habit(&s, "resume").fails(2, "Not in progress");
    for order in ["pause", "resume", "cancel"] {
        let text = larder(args!["balance", order, s.point()]).ok().text();
        assert!(text.contains("No balance"), "{order}: {text}");
    }
    // It may be complete before it is paused: then there is nothing left to show.
    for _ in 0..20 {
        larder(args!["balance", "start", "--full-balance", "--background", s.point()]).ok();
        larder(args!["balance", "pause", s.point()]).ok();
        if status(&s)["unfinished"].is_object() {
            break;
        }
    }
    assert_eq!(status(&s)["state"]["status"], "paused");
    let paused = habit(&s, "status").fails(1, "").text();
    assert!(paused.contains("is paused") && paused.contains("chunks balanced"), "{paused}");
    larder(args!["balance", "start", "-d", "all", s.point()]).fails(2, "paused");
    larder(args!["umount", s.point()]).ok();

    // On the image it is still there, and a mount can leave it.
    let text = larder(args!["balance", "status", s.image()]).ok().text();
    assert!(text.contains("A balance is paused"), "{text}");
    larder(args!["mount", "-o", "skip_balance", s.image(), s.point()]).ok();
    assert!(status(&s)["unfinished"].is_object());
    larder(args!["umount", s.point()]).ok();

    // Another one goes on with it.
    s.mount();
    let state = loop {
        let told = status(&s);
        if told["state"]["status"] == "finished" {
            break told["state"].clone();
        }
        assert_ne!(told["state"]["status"], "failed", "{told}");
    };
    assert_eq!(state["left"], 0, "{state}");
    larder(args!["umount", s.point()]).ok();
    larder(args!["check", "--data", s.image()]).ok();
}

#[test]
fn an_image_is_balanced_without_a_mount() {
    let Some(s) = scene() else { return };
    thin_out(&s);
    larder(args!["umount", s.point()]).ok();
    let text = larder(args!["balance", s.image()]).ok().text();
    assert!(text.contains("Frees ") && text.contains("is complete"), "{text}");
    let again = larder(args!["balance", s.image()]).ok().text();
    assert!(again.contains("Nothing would become free"), "{again}");
    larder(args!["check", "--data", s.image()]).ok();
}
