//! `larder subvolume` in an image and on a mount.

mod common;

use common::{Run, command, inside, larder};
use larder_simtest::oracle::{
    KernelMount, Need, btrfs, btrfs_check, enter_private_namespace, need, scratch,
};
use std::path::Path;

#[track_caller]
fn paths(target: impl AsRef<std::ffi::OsStr>) -> Vec<String> {
    let json = larder(args!["subvolume", "list", "--json", target.as_ref()]).ok().json();
    json.as_array().unwrap().iter().map(|s| s["path"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn check(image: &Path) {
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean(&image.display().to_string());
    }
}

#[test]
fn subvolumes_in_an_image() {
    let dir = scratch();
    let img = dir.path().join("a.img");
    let at = |path: &str| inside(&img, path);
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["subvolume", "create", at("/home"), at("/srv")]).ok();
    larder(args!["subvolume", "create", at("/home")]).fails(1, "exists");
    larder(args!["mkdir", at("/home/me")]).ok();
    larder(args!["subvolume", "create", at("/home/nested")]).ok();
    larder(args!["subvolume", "snapshot", "-r", at("/home"), at("/monday")]).ok();
    larder(args!["subvolume", "snapshot", at("/home"), at("/srv")]).ok();
    assert_eq!(paths(&img), ["home", "srv", "home/nested", "monday", "srv/home"]);
    larder(args!["mkdir", at("/monday/no")]).fails(1, "read-only");
    assert_eq!(larder(args!["subvolume", "read-only", at("/monday")]).ok().text(), "on\n");
    assert_eq!(larder(args!["property", "get", at("/monday"), "ro"]).ok().text(), "ro=true\n");
    larder(args!["property", "set", at("/monday"), "ro", "maybe"]).fails(2, "true or false");
    larder(args!["property", "set", at("/monday"), "ro", "false"]).ok();
    larder(args!["mkdir", at("/monday/yes")]).ok();
    let show = larder(args!["subvolume", "show", at("/home")]).ok().text();
    assert!(show.contains("monday, srv/home") && show.contains("Subvolume ID     256"), "{show}");
    larder(args!["subvolume", "show", at("/home/me")]).fails(1, "not a subvolume");
    larder(args!["subvolume", "delete", at("/home")]).fails(1, "in it first");
    larder(args!["subvolume", "delete", at("/home/me")]).fails(1, "not a subvolume");
    larder(args!["subvolume", "set-default", at("/srv")]).ok();
    assert_eq!(larder(args!["subvolume", "get-default", &img]).ok().text(), "257 srv\n");
    assert_eq!(larder(args!["ls", &img]).ok().text(), "home\n");
    larder(args!["subvolume", "delete", at("/srv/home"), at("/home/nested"), at("/home")]).ok();
    larder(args!["subvolume", "delete", at("/srv")]).fails(1, "set-default");
    larder(args!["subvolume", "set-default", "--id", "5", &img]).ok();
    larder(args!["subvolume", "delete", at("/srv")]).ok();
    assert_eq!(paths(&img), ["monday"]);
    let list = larder(args!["subvolume", "list", &img]).ok().text();
    assert!(
        list.starts_with("ID 259 gen ") && list.ends_with("top level 5 path monday\n"),
        "{list}"
    );
    check(&img);
}

struct Unmount<'a>(&'a Path);
impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        // Nothing is mounted any more after a test that ended well.
        drop(command().arg("umount").arg(self.0).output());
    }
}

#[test]
fn subvolumes_on_a_mount() {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    enter_private_namespace().unwrap();
    let dir = scratch();
    let (img, mnt) = (dir.path().join("a.img"), dir.path().join("mnt"));
    std::fs::create_dir(&mnt).unwrap();
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["mount", &img, &mnt]).ok();
    let unmount = Unmount(&mnt);
    let at = |path: &str| mnt.join(path);
    // The kernel remembers that these are not there, and what the directory looks like.
    for name in ["home", "monday"] {
        assert!(at(name).metadata().is_err());
    }
    assert_eq!(std::fs::read_dir(&mnt).unwrap().count(), 0);
    larder(args!["subvolume", "create", at("home")]).ok();
    assert_eq!(std::fs::read_dir(&mnt).unwrap().count(), 1);
    for n in 0..100 {
        std::fs::write(at(&format!("home/{n}")), vec![n; 5000]).unwrap();
    }
    larder(args!["subvolume", "snapshot", at("nowhere"), at("monday")])
        .fails(2, "nowhere: No such file");
    larder(args!["subvolume", "snapshot", "-r", at("home"), at("monday")]).ok();
    std::fs::write(at("home/7"), b"changed").unwrap();
    for n in 0..100 {
        assert_eq!(std::fs::read(at(&format!("monday/{n}"))).unwrap(), vec![n; 5000]);
    }
    assert_eq!(
        std::fs::write(at("monday/7"), b"no").unwrap_err().raw_os_error(),
        Some(30),
        "a read-only snapshot"
    );
    larder(args!["subvolume", "create", at("home/nested")]).ok();
    larder(args!["subvolume", "delete", at("home")]).fails(1, "in it first");
    assert_eq!(paths(&mnt), ["home", "monday", "home/nested"]);
    std::fs::rename(at("home/nested"), at("moved")).unwrap();
    std::fs::remove_dir(at("moved")).unwrap();
    larder(args!["subvolume", "delete", "-c", at("home")]).ok();
    assert!(at("home").metadata().is_err(), "the kernel was told");
    assert_eq!(std::fs::read_dir(&mnt).unwrap().count(), 1);
    larder(args!["subvolume", "read-only", at("monday"), "off"]).ok();
    std::fs::write(at("monday/7"), b"yes").unwrap();
    larder(args!["subvolume", "set-default", at("monday")]).ok();
    assert_eq!(larder(args!["subvolume", "get-default", &mnt]).ok().text(), "257 monday\n");
    let show = larder(args!["subvolume", "show", at("monday")]).ok().text();
    assert!(show.contains("Subvolume ID     257"), "{show}");
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    check(&img);
    assert_eq!(larder(args!["cat", inside(&img, "/7")]).ok().text(), "yes");
}

#[test]
fn many_subvolumes_are_listed() {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    enter_private_namespace().unwrap();
    let dir = scratch();
    let (img, mnt) = (dir.path().join("a.img"), dir.path().join("mnt"));
    std::fs::create_dir(&mnt).unwrap();
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["mount", &img, &mnt]).ok();
    let unmount = Unmount(&mnt);
    let names: Vec<_> = (0..60).map(|n| mnt.join(format!("subvolume number {n}"))).collect();
    let run: Run = command().args(["subvolume", "create"]).args(&names).output().unwrap().into();
    run.ok();
    assert_eq!(paths(&mnt).len(), 60);
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    check(&img);
}

/// Inode, offset, length, generation.
fn as_text(all: &[serde_json::Value]) -> Vec<String> {
    all.iter()
        .map(|e| {
            format!(
                "{} {} {} {} {}",
                e["inode"],
                e["offset"],
                e["length"],
                e["generation"],
                e["path"].as_str().unwrap()
            )
        })
        .collect()
}

#[test]
fn what_was_written_is_found_as_by_linux() {
    if !need(&[Need::Fuse, Need::Root, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    enter_private_namespace().unwrap();
    let dir = scratch();
    let (img, mnt) = (dir.path().join("a.img"), dir.path().join("mnt"));
    std::fs::create_dir(&mnt).unwrap();
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["mount", &img, &mnt]).ok();
    let unmount = Unmount(&mnt);
    let at = |path: &str| mnt.join(path);
    larder(args!["subvolume", "create", at("sub")]).ok();
    std::fs::create_dir(at("sub/dir")).unwrap();
    for n in 0..300 {
        std::fs::write(at(&format!("sub/dir/a file with a name, number {n}")), vec![1; n * 100])
            .unwrap();
    }
    let list = |since: u64, path: &Path| -> (Vec<serde_json::Value>, u64) {
        let run = larder(args!["subvolume", "find-new", "--json", path, since.to_string()]).ok();
        let all = run.text().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let text = larder(args!["subvolume", "find-new", path, since.to_string()]).ok().text();
        let upto =
            text.lines().last().unwrap().strip_prefix("up to gen ").unwrap().parse().unwrap();
        (all, upto)
    };
    let (all, upto) = list(0, &at("sub"));
    assert_eq!(all.len(), 299, "all but the empty one");
    assert_eq!(list(upto + 1, &at("sub")).0.len(), 0);
    for n in (0..300).step_by(10) {
        std::fs::write(at(&format!("sub/dir/a file with a name, number {n}")), vec![2; 9000])
            .unwrap();
    }
    let (new, _) = list(upto + 1, &at("sub"));
    assert_eq!(new.len(), 30, "{new:?}");
    assert_eq!(new[0]["path"], "dir/a file with a name, number 0");
    larder(args!["subvolume", "find-new", at("sub/dir"), "0"]).fails(1, "");
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    let (here, _) = list(upto + 1, &inside(&img, "/sub"));
    assert_eq!(as_text(&here), as_text(&new));
    let kernel = KernelMount::image_read_only(&img, "").unwrap();
    let sub = kernel.join("sub");
    let text =
        btrfs(&["subvolume", "find-new", sub.to_str().unwrap(), &(upto + 1).to_string()]).unwrap();
    let theirs: Vec<String> = text
        .lines()
        .filter(|l| l.starts_with("inode"))
        .map(|l| {
            let w: Vec<&str> = l.split_whitespace().collect();
            let word =
                |name: &str, skip: usize| w[w.iter().position(|x| *x == name).unwrap() + skip];
            let path = l.split("NONE ").nth(1).unwrap();
            format!(
                "{} {} {} {} {path}",
                word("inode", 1),
                word("file", 2),
                word("len", 1),
                word("gen", 1)
            )
        })
        .collect();
    assert_eq!(as_text(&here), theirs);
    kernel.unmount_clean().unwrap();
}
