//! `larder device add` and `remove`, `larder resize`, `larder shrink`, and what `btrfs` calls so:
//! on images, and on mounts by their daemon.

mod common;

use common::scene::Scene;
use common::{Run, larder};
use serde_json::Value;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

fn noise(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect()
}

/// As `btrfs`, with these words.
fn habit(words: &[&str]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.arg0("btrfs").args(words).output().unwrap().into()
}

fn devices(of: &Path) -> Vec<Value> {
    let value = larder(args!["device", "usage", "--json", of]).ok().json();
    value.as_array().unwrap().clone()
}

fn sizes(of: &Path) -> Vec<u64> {
    devices(of).iter().map(|d| d["size"].as_u64().unwrap()).collect()
}

fn is_sound(image: &Path) {
    larder(args!["check", "--data", image]).ok();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_mount_gets_a_device_and_loses_another() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let data = noise(20 << 20);
    fs::write(s.at("file"), &data).unwrap();
    let more: PathBuf = s.dir().join("more.img");
    let add = args!["device", "add", "--json", "--size", "400M", &more, s.point()];
    let value = larder(add).ok().json();
    assert_eq!((&value["device"], &value["size"]), (&2.into(), &(400 * MIB).into()));
    assert_eq!(devices(&s.point()).len(), 2);
    // The daemon has the lock.
    larder(args!["ls", &more]).fails(2, "in use");
    larder(args!["device", "add", &more, s.point()]).fails(2, "in use");

    let first = s.image();
    let said = larder(args!["device", "remove", &first, s.point()]).ok().text();
    assert!(said.contains("Device 1") && said.contains("is removed"), "{said}");
    assert!(fs::read(s.at("file")).unwrap() == data);
    assert_eq!(devices(&s.point())[0]["id"], 2);
    larder(args!["device", "remove", "2", s.point()]).fails(2, "only one");
    larder(args!["device", "remove", "missing", s.point()]).fails(2, "no device is missing");

    let resized = larder(args!["resize", "--json", "-50M", s.point()]).ok().json();
    assert_eq!(resized["size"], 350 * MIB);
    larder(args!["resize", "--image", "+150M", s.point()]).ok();
    assert_eq!(sizes(&s.point()), [500 * MIB]);
    assert_eq!(more.metadata().unwrap().len(), 500 * MIB);
    larder(args!["resize", "--image", "min", s.point()]).ok();
    let small = sizes(&s.point())[0];
    assert!(small < 300 * MIB, "{small}");
    assert_eq!(more.metadata().unwrap().len(), small);
    assert!(fs::read(s.at("file")).unwrap() == data);
    larder(args!["umount", s.point()]).ok();
    is_sound(&more);
    // The one that has left belongs to nothing.
    larder(args!["ls", &first]).fails(2, "not a btrfs file system");
}

/// What is built upon a seed that is mounted is another file system, and the mount stays as it is.
#[test]
fn a_file_system_is_built_upon_a_seed_that_is_mounted() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    fs::write(s.at("file"), noise(300_000)).unwrap();
    larder(args!["umount", s.point()]).ok();
    larder(args!["seed", "on", s.image()]).ok();
    s.mount();
    let new: PathBuf = s.dir().join("new.img");
    let said = larder(args!["device", "add", "--size", "400M", &new, s.point()]).ok().text();
    assert!(said.contains("built upon") && said.contains("still the seed"), "{said}");
    larder(args!["device", "add", &new, s.point()]).fails(2, "btrfs");
    assert_eq!(devices(&s.point()).len(), 1);
    fs::write(s.at("other"), b"x").unwrap_err();
    larder(args!["mkdir", Path::new(&format!("{}:/other", text(&new)))]).ok();
    assert_eq!(
        larder(args!["ls", Path::new(&format!("{}:/", text(&new)))]).ok().text(),
        "file\nother\n"
    );
    larder(args!["umount", s.point()]).ok();
    is_sound(&new);
    is_sound(&s.image());
}

#[test]
fn the_habit_changes_devices_of_a_mount() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    fs::write(s.at("file"), noise(3 << 20)).unwrap();
    let more: PathBuf = s.dir().join("more.img");
    fs::File::create(&more).unwrap().set_len(300 * MIB).unwrap();
    let place = s.point();
    let point = text(&place);
    habit(&["device", "add", "-f", text(&more), point]).ok();
    let said = habit(&["filesystem", "resize", "2:-20M", point]).ok().text();
    assert!(said.starts_with("Resize device id 2 ("), "{said}");
    assert_eq!(sizes(&s.point())[1], 280 * MIB);
    habit(&["filesystem", "resize", "2:max", point]).ok();
    habit(&["device", "delete", text(&more), point]).ok();
    assert_eq!(devices(&s.point()).len(), 1);
    habit(&["device", "remove", "7", point]).fails(1, "there is no device 7");
    habit(&["filesystem", "resize", "nonsense", point]).fails(1, "not a size");
    larder(args!["umount", s.point()]).ok();
    is_sound(&s.image());
}

#[test]
fn images_change_without_a_mount() {
    let Some(s) = Scene::new() else { return };
    let (image, more) = (s.image(), s.dir().join("more.img"));
    let before = image.metadata().unwrap().len();
    let file = s.dir().join("file");
    fs::write(&file, noise(30 << 20)).unwrap();
    larder(args!["cp", &file, format!("{}:/file", text(&image))]).ok();
    larder(args!["device", "add", "--size", "300M", &more, &image]).ok();
    assert_eq!(devices(&image).len(), 2);
    // What is there already is not overwritten.
    let full = s.dir().join("full.img");
    larder(args!["mkfs", "--size", "200M", &full]).ok();
    larder(args!["device", "add", &full, &image]).fails(2, "--force");
    larder(args!["device", "remove", "2", &image]).ok();
    assert_eq!(devices(&image).len(), 1);

    let told = larder(args!["resize", "--how-small", "--json", &image]).ok().json();
    let least = told["smallest"]["bytes"].as_u64().unwrap();
    assert!(least > 30 * MIB && least < before, "{told}");
    larder(args!["resize", "1M", &image]).fails(2, "needs about");
    larder(args!["resize", &format!("{}", before + MIB), &image]).fails(2, "cannot have");
    larder(args!["resize", "--image", "+64M", &image]).ok();
    assert_eq!(image.metadata().unwrap().len(), before + 64 * MIB);
    is_sound(&image);
    let said = larder(args!["shrink", &image]).ok().text();
    assert!(said.contains("before"), "{said}");
    let small = image.metadata().unwrap().len();
    assert!(small < least + 80 * MIB, "{small}, but {least} are needed");
    is_sound(&image);
    let back = s.dir().join("back");
    larder(args!["cp", format!("{}:/file", text(&image)), &back]).ok();
    assert!(fs::read(&back).unwrap() == fs::read(&file).unwrap());
    // Nothing is gained a second time.
    larder(args!["shrink", "--json", &image]).ok();
    assert!(image.metadata().unwrap().len() <= small);
    is_sound(&image);
}

#[test]
fn a_device_that_is_refused_is_left_as_it_is() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let (new, other, point) = (s.dir().join("new"), s.dir().join("other"), s.point());
    larder(args!["device", "add", &new, &point]).fails(2, "--size SIZE");
    larder(args!["device", "add", "--size", "64K", &new, &point]).fails(2, "too few");
    assert!(!new.exists());
    larder(args!["mkfs", "--size", "200M", &other]).ok();
    let size = other.metadata().unwrap().len();
    larder(args!["device", "add", "--size", "64M", &other, &point]).fails(2, "holds");
    assert_eq!(other.metadata().unwrap().len(), size);
    larder(args!["check", &other]).ok();
    larder(args!["device", "add", "--force", "--size", "64M", &other, &point]).ok();
    larder(args!["device", "add", "--size", "64M", &new, &point]).ok();
    assert_eq!(devices(&point).len(), 3);
    larder(args!["umount", &point]).ok();
    is_sound(&s.image());
}

/// A power cut can come between the commit that removes a device and the end of its superblocks.
#[test]
fn a_device_that_has_left_is_not_used_although_it_lies_beside_the_others() {
    let Some(s) = Scene::new() else { return };
    let (image, second, third) = (s.image(), s.dir().join("2.img"), s.dir().join("3.img"));
    for device in [&second, &third] {
        larder(args!["device", "add", "--size", "200M", device, &image]).ok();
    }
    let kept = s.dir().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::copy(&second, kept.join("2.img")).unwrap();
    larder(args!["device", "remove", "2", &image]).ok();
    fs::copy(kept.join("2.img"), &second).unwrap();
    let names: Vec<u64> = devices(&image).iter().map(|d| d["id"].as_u64().unwrap()).collect();
    assert_eq!(names, [1, 3]);
    is_sound(&image);
    let file = s.dir().join("file");
    fs::write(&file, noise(1 << 20)).unwrap();
    larder(args!["cp", &file, format!("{}:/file", text(&image))]).ok();
    larder(args!["ls", &second]).fails(2, "does not have any more");
    // What has left is free for something else.
    larder(args!["device", "add", "--force", &second, &image]).ok();
    assert_eq!(devices(&image).len(), 3);
    is_sound(&image);
}
