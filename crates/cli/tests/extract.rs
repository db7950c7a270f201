//! `larder extract`: what comes out of an image is what Linux sees in it, whatever the form, and
//! nothing that an image holds leads out of the directory.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, mkfs_btrfs, need, populate, scratch, tree_compare,
};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An image of Larder with a small tree in it.
fn small(dir: &Path) -> PathBuf {
    let (image, tree) = (dir.join("small.img"), dir.join("tree"));
    std::fs::create_dir_all(tree.join("d/deep")).unwrap();
    for name in ["a", "d/b.txt", "d/deep/c.txt", "z"] {
        std::fs::write(tree.join(name), name).unwrap();
    }
    std::fs::hard_link(tree.join("a"), tree.join("d/also")).unwrap();
    symlink("../z", tree.join("d/link")).unwrap();
    let sparse = std::fs::File::create(tree.join("sparse")).unwrap();
    sparse.set_len(8 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[7; 5000], 4 << 20).unwrap();
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    larder(args!["cp", "-r", tree.join(""), inside(&image, "/")]).ok();
    larder(args!["subvolume", "create", inside(&image, "/sub")]).ok();
    larder(args!["cp", tree.join("z"), inside(&image, "/sub/inner")]).ok();
    image
}

fn tar(args: &[&str], dir: &Path) -> String {
    let run = Command::new("tar").args(args).current_dir(dir).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            out.push(path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned());
            if path.is_dir() && !path.is_symlink() {
                todo.push(path);
            }
        }
    }
    out.sort();
    out
}

#[test]
fn directories_and_tars_equal_what_linux_sees() {
    if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let (theirs, other) = (dir.path().join("theirs.img"), dir.path().join("other.img"));
    mkfs_btrfs(&theirs, 512 << 20, &["-q"]).unwrap();
    let mount = KernelMount::image(&theirs, "").unwrap();
    std::fs::create_dir(mount.join("top")).unwrap();
    populate(&mount.join("top"), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    // Results lie where every attribute can be.
    mkfs_btrfs(&other, 1 << 30, &["-q"]).unwrap();
    let out = KernelMount::image(&other, "").unwrap();
    larder(args!["extract", inside(&theirs, "/top"), out.join("dir")]).ok();
    let file = dir.path().join("top.tar");
    larder(args!["extract", inside(&theirs, "/top"), "--tar", &file]).ok();
    let theirs = KernelMount::image(&theirs, "ro").unwrap();
    assert_eq!(tree_compare(&theirs.join("top"), &out.join("dir")).unwrap(), []);

    std::fs::create_dir(out.join("tar")).unwrap();
    let all = ["--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "-xpf"];
    tar(&[&all[..], &[file.to_str().unwrap()]].concat(), &out.join("tar"));
    let differences = tree_compare(&theirs.join("top"), &out.join("tar")).unwrap();
    let unexpected: Vec<_> = differences
        .iter()
        .filter(|d| {
            // Tars hold no sockets, and GNU tar sets neither properties of btrfs nor attributes of
            // symbolic links; directories that lack a socket have a time of their own.
            !d.path.windows(6).any(|w| w == b"socket")
        })
        .collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    theirs.unmount_clean().unwrap();
    out.unmount_clean().unwrap();
}

#[test]
fn only_what_is_selected_comes_out() {
    let dir = scratch();
    let image = small(dir.path());
    let out = |name: &str| dir.path().join(name);
    larder(args!["extract", &image, out("1"), "d", "--exclude", "*.txt"]).ok();
    assert_eq!(names(&out("1")), ["d", "d/also", "d/deep", "d/link"]);
    larder(args!["extract", inside(&image, "/d"), out("2"), "--include", "/deep/*"]).ok();
    assert_eq!(names(&out("2")), ["deep", "deep/c.txt"]);
    let run = larder(args!["extract", &image, out("3"), "z", "nothing/here"]);
    run.fails(1, "has no nothing/here");
    assert_eq!(names(&out("3")), ["z"]);
    larder(args!["extract", inside(&image, "/d/b.txt"), out("4")]).ok();
    assert_eq!(names(&out("4")), ["b.txt"]);
    let run = larder(args!["extract", &image, out("5"), "sub", "--one-subvolume"]).ok();
    assert!(run.err.contains("sub"), "{}", run.err);
    assert_eq!(names(&out("5")), ["sub"]);
    let run = larder(args!["extract", "--json", &image, out("6")]).ok();
    assert_eq!(run.json()["subvolumes"][0], "sub");
    assert!(out("6").join("sub/inner").exists());
    larder(args!["extract", &image, out("7"), "../x"]).fails(2, "without ..");
    larder(args!["extract", &image, out("7"), "--include", "a["]).fails(2, "a[");
    larder(args!["extract", &image]).fails(2, "name a directory");
    assert!(!out("7").exists());
}

#[test]
fn what_exists_stays_without_force_and_links_are_not_followed() {
    let dir = scratch();
    let image = small(dir.path());
    let (out, victim) = (dir.path().join("out"), dir.path().join("victim"));
    std::fs::create_dir(&out).unwrap();
    std::fs::create_dir(&victim).unwrap();
    symlink(&victim, out.join("d")).unwrap();
    symlink(victim.join("new"), out.join("z")).unwrap();
    std::fs::write(out.join("a"), b"mine").unwrap();
    let run = larder(args!["extract", &image, &out]).fails(1, "not a directory");
    assert!(run.err.contains("--force replaces it"), "{}", run.err);
    assert_eq!(std::fs::read(out.join("a")).unwrap(), b"mine");
    larder(args!["extract", "--force", &image, &out]).fails(1, "not a directory");
    assert_eq!(std::fs::read(out.join("a")).unwrap(), b"a");
    assert_eq!(std::fs::read(out.join("z")).unwrap(), b"z");
    assert_eq!(names(&victim), Vec::<String>::new());
}

#[test]
fn a_tar_is_the_same_every_time_and_complete_or_absent() {
    let dir = scratch();
    let image = small(dir.path());
    let file = |name: &str| dir.path().join(name);
    larder(args!["extract", &image, "--tar", file("1.tar")]).ok();
    let direct = larder(args!["extract", &image, "--tar"]).ok();
    assert_eq!(direct.out, std::fs::read(file("1.tar")).unwrap());
    assert!(direct.out.len() < 64 << 10, "holes take no room: {}", direct.out.len());
    for (name, unpack) in [("2.tgz", "gzip"), ("2.tar.zst", "zstd"), ("2.tar.xz", "xz")] {
        larder(args!["extract", &image, "--tar", file(name)]).ok();
        let unpacked = Command::new(unpack).arg("-dc").arg(file(name)).output();
        assert!(unpacked.is_ok_and(|run| run.stdout == direct.out), "{name}");
    }
    let listed = tar(&["-tf", "1.tar"], dir.path());
    let expected = "./ a d/ d/also d/b.txt d/deep/ d/deep/c.txt d/link sparse sub/ sub/inner z";
    assert_eq!(listed.split_whitespace().collect::<Vec<_>>().join(" "), expected);
    larder(args!["extract", &image, "--tar", file("1.tar")]).fails(2, "exists");
    larder(args!["extract", "--force", &image, "--tar", file("1.tar")]).ok();
    // A link means what it leads to.
    symlink("1.tar", file("link.tar")).unwrap();
    std::fs::write(file("1.tar"), b"mine").unwrap();
    larder(args!["extract", &image, "--tar", file("link.tar")]).fails(2, "exists");
    assert_eq!(std::fs::read(file("1.tar")).unwrap(), b"mine");
    larder(args!["extract", "--force", &image, "--tar", file("link.tar")]).ok();
    assert_eq!(std::fs::read(file("1.tar")).unwrap(), direct.out);
    assert!(file("link.tar").is_symlink());
    symlink("nowhere", file("dangling.tar")).unwrap();
    larder(args!["extract", &image, "--tar", file("dangling.tar")]).fails(2, "exists");
    // The disk of the tar is full.
    larder(args!["extract", &image, "--tar", "/dev/full"]).fails(1, "/dev/full");
    larder(args!["extract", "--json", &image, "--tar"]).fails(2, "--json");
}

#[test]
fn a_container_image_has_the_tree_as_its_layer() {
    let dir = scratch();
    let image = small(dir.path());
    let layout = dir.path().join("layout");
    let named = |tag: &str| {
        let mut name = layout.clone().into_os_string();
        name.push(tag);
        name
    };
    let make = |tag: &str, more: &[&str]| {
        let mut all = args!["extract", "--json", &image, "--oci", named(tag)].to_vec();
        all.extend(more.iter().map(Into::into));
        larder(all)
    };
    let first = make(":v1", &["--platform", "linux/arm/v7"]).ok().json();
    make(":v1", &[]).fails(2, "already has an image");
    let again = make(":v1", &["--platform", "linux/arm/v7", "--force"]).ok().json();
    assert_eq!(first["digest"], again["digest"]);
    make("", &["--compress", "zstd"]).ok();
    make(":v2", &["--compress", "xz"]).fails(2, "xz");
    let index = std::fs::read(layout.join("index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let images = index["manifests"].as_array().unwrap();
    assert_eq!(images.len(), 2);
    assert_eq!(images[0]["platform"]["variant"], "v7");
    let blob = |of: &serde_json::Value| {
        layout.join("blobs").join(of["digest"].as_str().unwrap().replace(':', "/"))
    };
    let manifest = std::fs::read(blob(&images[0])).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let layer = blob(&manifest["layers"][0]);
    let out = dir.path().join("unpacked");
    std::fs::create_dir(&out).unwrap();
    tar(&["-xzf", layer.to_str().unwrap()], &out);
    let mut expected = names(&dir.path().join("tree"));
    expected.extend(["sub".to_owned(), "sub/inner".to_owned()]);
    expected.sort();
    assert_eq!(names(&out), expected);
    assert_eq!(std::fs::metadata(out.join("sparse")).unwrap().len(), 8 << 20);
}
