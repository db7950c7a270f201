//! `larder device replace` and `btrfs replace`: of images, and of mounts by their daemon.

mod common;

use common::scene::Scene;
use common::{Run, larder};
use rustix::process::{Signal, kill_process};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of this length.
fn target(s: &Scene, name: &str, size: u64) -> PathBuf {
    let path = s.dir().join(name);
    fs::File::create(&path).unwrap().set_len(size).unwrap();
    path
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    bytes
}

/// As `btrfs`, with these words.
fn habit(words: &[&Path]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.arg0("btrfs").arg("replace").args(words).output().unwrap().into()
}

fn is_whole(image: &Path, data: &[u8]) {
    assert!(larder(args!["cat", common::inside(image, "/long")]).ok().out == data);
    larder(args!["check", "--data", image]).ok();
    let text = larder(args!["scrub", "-r", image]).ok().text();
    assert!(text.contains("No errors"), "{text}");
}

#[test]
fn the_device_of_a_mount_is_replaced() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(20 << 20);
    fs::write(s.at("long"), &data).unwrap();
    let (new, point) = (target(&s, "new", 300 << 20), s.point());
    let text = larder(args!["device", "replace", "--status", &point]).ok().text();
    assert!(text.contains("No device was replaced yet"), "{text}");
    larder(args!["device", "replace", "--cancel", &point]).fails(2, "no device is being replaced");
    larder(args!["device", "replace", "7", &new, &point]).fails(2, "is no device of the file");
    let small = target(&s, "small", 64 << 20);
    let said = larder(args!["device", "replace", "1", &small, &point]);
    said.fails(1, "a target is at least as large");
    let held = target(&s, "held", 300 << 20);
    larder(args!["mkfs", "--force", &held]).ok();
    larder(args!["device", "replace", "1", &held, &point]).fails(2, "already holds");
    let text = larder(args!["device", "replace", "1", &new, &point]).ok().text();
    assert!(text.contains("The device was replaced"), "{text}");
    let status = larder(args!["device", "replace", "--status", "--json", &point]).ok().json();
    assert_eq!(status["status"], "finished");
    fs::write(s.at("later"), b"later").unwrap();
    larder(args!["umount", &point]).ok();
    is_whole(&new, &data);
    assert_eq!(larder(args!["cat", common::inside(&new, "/later")]).ok().out, b"later");
    larder(args!["ls", s.image()]).fails(2, "not a btrfs file system");
}

/// A file that is made for a replacement goes if it does not take the place.
#[test]
fn a_file_for_the_new_device_is_made() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(1 << 20);
    fs::write(s.at("long"), &data).unwrap();
    let (new, point) = (s.dir().join("new"), s.point());
    let said = larder(args!["device", "replace", "1", &new, &point]);
    said.fails(2, "give --size SIZE to make a new image file");
    let said = larder(args!["device", "replace", "--size", "64M", "1", &new, &point]);
    said.fails(1, "a target is at least as large");
    assert!(!new.exists(), "what was made for nothing is left");
    larder(args!["device", "replace", "--size", "300M", "1", &new, &point]).ok();
    assert_eq!(new.metadata().unwrap().len(), 300 << 20);
    larder(args!["umount", &point]).ok();
    is_whole(&new, &data);
    let newer = s.dir().join("newer");
    larder(args!["device", "replace", "--size", "300M", "1", &newer, &new]).ok();
    is_whole(&newer, &data);
}

/// The old device may be gone for good, and it is the name that the mount was made with.
#[test]
fn a_mount_is_found_when_its_only_device_was_replaced_and_taken_away() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(1 << 20);
    fs::write(s.at("long"), &data).unwrap();
    let (new, point) = (target(&s, "new", 300 << 20), s.point());
    larder(args!["device", "replace", "1", &new, &point]).ok();
    fs::remove_file(s.image()).unwrap();
    larder(args!["balance", "status", &point]).ok();
    larder(args!["scrub", "start", "--wait", &point]).ok();
    let other = s.dir().join("other");
    fs::create_dir(&other).unwrap();
    larder(args!["mount", &new, &other]).ok();
    assert!(fs::read(other.join("long")).unwrap() == data);
    fs::write(other.join("later"), b"later").unwrap();
    assert_eq!(fs::read(s.at("later")).unwrap(), b"later");
    larder(args!["balance", "status", &other]).ok();
    larder(args!["umount", &other]).ok();
    larder(args!["umount", &point]).ok();
    is_whole(&new, &data);
}

#[test]
fn a_replacement_is_suspended_by_the_end_of_a_mount_and_goes_on_with_the_next() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(30 << 20);
    fs::write(s.at("long"), &data).unwrap();
    let (new, point) = (target(&s, "new", 200 << 20), s.point());
    larder(args!["device", "replace", "--background", "1", &new, &point]).ok();
    larder(args!["umount", &point]).ok();
    // It may have been quicker than the end of the mount.
    let both = PathBuf::from(format!("{},{}", s.image().display(), new.display()));
    if larder(args!["ls", s.image()]).code == 0 {
        let status = larder(args!["device", "replace", "--status", "--json", &both]).ok().json();
        assert_eq!(status["status"], "suspended");
        larder(args!["mount", s.image(), &point]).fails(2, "device 1 is being replaced");
        larder(args!["mount", s.image(), &new, &point]).ok();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let status = larder(args!["device", "replace", "--status", "--json", &point]);
            if status.ok().json()["status"] == "finished" {
                break;
            }
            assert!(std::time::Instant::now() < end);
        }
        larder(args!["umount", &point]).ok();
    }
    is_whole(&new, &data);
}

#[test]
fn a_killed_daemon_leaves_a_replacement_that_goes_on_or_is_given_up() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(30 << 20);
    fs::write(s.at("long"), &data).unwrap();
    larder(args!["sync", s.point()]).ok();
    let (new, point) = (target(&s, "new", 200 << 20), s.point());
    larder(args!["device", "replace", "--background", "1", &new, &point]).ok();
    let daemon = s.daemon();
    kill_process(daemon, Signal::KILL).unwrap();
    common::scene::wait_for_end(daemon);
    larder(args!["umount", &point]);
    let copies = [s.dir().join("copy"), s.dir().join("copy-of-new")];
    fs::copy(s.image(), &copies[0]).unwrap();
    fs::copy(&new, &copies[1]).unwrap();
    let both = PathBuf::from(format!("{},{}", s.image().display(), new.display()));
    if larder(args!["device", "replace", "--resume", &both]).code == 0 {
        is_whole(&new, &data);
        let both = PathBuf::from(format!("{},{}", copies[0].display(), copies[1].display()));
        larder(args!["device", "replace", "--cancel", &both]).ok();
        is_whole(&copies[0], &data);
    }
}

#[test]
fn an_image_is_given_another_device_without_a_mount() {
    let Some(s) = Scene::new() else { return };
    let images = ["a", "b"].map(|name| s.dir().join(name));
    larder(args!["mkfs", "--size", "256M", "-d", "raid1", &images[0], &images[1]]).ok();
    let data = noise(5 << 20);
    let file = s.dir().join("file");
    fs::write(&file, &data).unwrap();
    larder(args!["cp", &file, common::inside(&images[0], "/long")]).ok();
    let new = target(&s, "new", 256 << 20);
    let done = larder(args!["device", "replace", "--json", &images[1], &new, &images[0]]);
    assert_eq!(done.ok().json()["status"], "finished");
    is_whole(&new, &data);
    // The other one is lost.
    fs::remove_file(&images[0]).unwrap();
    let another = target(&s, "another", 256 << 20);
    larder(args!["device", "replace", "1", &another, &new]).fails(2, "missing");
    larder(args!["device", "replace", "--degraded", "missing", &another, &new]).ok();
    larder(args!["device", "replace", "missing", &new, &another]).fails(2, "no device of the file");
    is_whole(&another, &data);
}

#[test]
fn the_habits_of_btrfs_hold() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(3 << 20);
    fs::write(s.at("long"), &data).unwrap();
    let (new, point) = (target(&s, "new", 200 << 20), s.point());
    let word = Path::new;
    assert_eq!(habit(&[word("status"), word("-1"), &point]).ok().text(), "Never started\n");
    habit(&[word("cancel"), &point]).fails(2, "not started");
    habit(&[word("start"), word("-B"), word("1"), &new, &point]).ok();
    let text = habit(&[word("status"), &point]).ok().text();
    assert!(text.contains("finished on") && text.contains("0 write errs, 0 uncorr."), "{text}");
    larder(args!["umount", &point]).ok();
    is_whole(&new, &data);
}
