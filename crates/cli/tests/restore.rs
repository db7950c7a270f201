//! `larder restore` as people use it. That everything comes back is tested in `larder-restore`.

mod common;

use common::{inside, larder};
use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::oracle::{scratch, tree_compare};
use larder_volume::{FileDevice, OpenMode};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn sample(dir: &Path) -> (PathBuf, PathBuf) {
    let (tree, image) = (dir.join("tree"), dir.join("a.img"));
    std::fs::create_dir_all(tree.join("deep/er")).unwrap();
    std::fs::write(tree.join("deep/er/file"), vec![5; 100_000]).unwrap();
    std::fs::write(tree.join("small"), b"small").unwrap();
    std::fs::hard_link(tree.join("small"), tree.join("deep/again")).unwrap();
    symlink("small", tree.join("link")).unwrap();
    larder(args!["mkfs", "--size", "256M", &image]).ok();
    larder(args!["cp", "-r", &tree, inside(&image, "/tree")]).ok();
    (tree, image)
}

fn destroy_first_super(image: &Path) {
    let file = std::fs::File::options().write(true).open(image).unwrap();
    file.write_all_at(&[0; 4096], 64 << 10).unwrap();
}

#[test]
fn a_sound_image_and_one_without_its_superblock() {
    let dir = scratch();
    let (tree, image) = sample(dir.path());
    for (name, broken) in [("sound", false), ("broken", true)] {
        if broken {
            destroy_first_super(&image);
            larder(args!["ls", &image]).fails(2, "not a btrfs");
        }
        let dest = dir.path().join(name);
        let run = larder(args!["restore", &image, &dest]).ok();
        assert_eq!(run.err.contains("superblock copy 1"), broken, "{}", run.err);
        assert!(run.err.contains("2 files (97.66KiB), 1 further names"), "{}", run.err);
        assert_eq!(tree_compare(&tree, &dest.join("tree")).unwrap(), []);
        larder(args!["restore", &image, &dest])
            .fails(2, "not empty")
            .fails(2, "--force writes into this one");
        larder(args!["restore", "--force", &image, &dest]).ok();
        assert_eq!(tree_compare(&tree, &dest.join("tree")).unwrap(), []);
    }
    larder(args!["restore", "--super", "0", "--dry-run", &image])
        .fails(2, "superblock copy 0 cannot be used");
    larder(args!["restore", "--super", "7", "--dry-run", &image]).fails(2, "at most three");
    let list = larder(args!["restore", "--list", "--json", &image]).ok().json();
    assert_eq!(list["points"][0]["source"], "superblock");
    assert_eq!(list["subvolumes"][0]["id"], 5);
    assert!(larder(args!["restore", "--list", &image]).ok().text().contains("points in time:"));
}

#[test]
fn a_part_of_it_now_and_earlier() {
    let dir = scratch();
    let (tree, image) = sample(dir.path());
    let generation =
        larder(args!["inspect", "super", "--json", &image]).ok().json()[0]["generation"].clone();
    // Without giving freed space back, which would take the earlier state with it.
    let device = FileDevice::open(&image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, discard: false, ..OpenOptions::default() };
    let fs = Filesystem::open(Arc::new(device), options).unwrap();
    let tree_dir = fs.lookup(fs.root(), b"tree").unwrap().id;
    fs.unlink(tree_dir, b"small").unwrap();
    fs.close().unwrap();
    drop(fs);
    let dest = dir.path().join("now");
    larder(args!["restore", "--path", "/tree/deep/", &image, &dest]).ok();
    // A link less than there was.
    let different = tree_compare(&tree.join("deep"), &dest.join("tree/deep")).unwrap();
    assert!(
        different.iter().all(|d| d.path == b"again" && d.what.contains("link")),
        "{different:?}"
    );
    assert!(!dest.join("tree/link").exists());
    let dest = dir.path().join("then");
    larder(args!["restore", "--generation", generation.to_string(), &image, &dest]).ok();
    assert_eq!(tree_compare(&tree, &dest.join("tree")).unwrap(), []);
    larder(args!["restore", "--path", "tree/nothing", "--dry-run", &image])
        .fails(2, "there is no /tree/nothing");
    larder(args!["restore", "--subvolid", "300", "--dry-run", &image]).fails(2, "no subvolume 300");
    larder(args!["restore", "--generation", "123456", "--dry-run", &image])
        .fails(2, "cannot be read any more");
    larder(args!["restore", &image]).fails(2, "DEST");
    let dry = larder(args!["restore", "--dry-run", "--json", &image]).ok().json();
    let paths: Vec<&str> =
        dry["entries"].as_array().unwrap().iter().map(|e| e["path"].as_str().unwrap()).collect();
    assert!(paths.contains(&"/tree/deep/er/file") && !paths.contains(&"/tree/small"), "{paths:?}");
    assert_eq!((&dry["losses"], &dry["files"]), (&0.into(), &2.into()));
}

#[test]
fn losses_are_listed_and_are_an_exit_code() {
    let dir = scratch();
    let (_, image) = sample(dir.path());
    let file = larder(args!["inspect", "inode", "--json", inside(&image, "/tree/deep/er/file")])
        .ok()
        .json();
    let at = file["extents"][0]["stripes"][0]["offset"].as_u64().unwrap();
    std::fs::File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .write_all_at(b"bad", at + 4096)
        .unwrap();
    let dest = dir.path().join("dest");
    let run = larder(args!["restore", &image, &dest])
        .fails(1, "lost: /tree/deep/er/file: 4096 bytes have a wrong checksum");
    assert!(run.err.contains("1 loss:"), "{}", run.err);
    assert_eq!(std::fs::metadata(dest.join("tree/deep/er/file")).unwrap().len(), 100_000);
    let run =
        larder(args!["restore", "--dry-run", "--skip-bad", "--json", &image]).fails(1, "1 loss:");
    assert_eq!(run.json()["lost"][0]["path"], "/tree/deep/er/file");
    assert_eq!(run.json()["files"], 1);
    let text = dir.path().join("text");
    std::fs::write(&text, "not an image\n".repeat(20_000)).unwrap();
    larder(args!["restore", "--dry-run", &text]).fails(2, "not a btrfs");
}
