//! Texts and exit codes of the command, used well, used badly, and used on files that are no
//! images.

mod common;

use common::{command, inside, larder};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

struct Scene {
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn image(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        larder(args!["mkfs", "--size", "128M", "--label", "scene", &path]).ok();
        path
    }
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let s = Scene::new();
    let image = s.image("a.img");
    larder(["frobnicate"]).fails(2, "unrecognized subcommand");
    larder(["mkfs"]).fails(2, "TARGET");
    larder(args!["mkfs", "--size", "12X", s.path("b")]).fails(2, "not a size");
    larder(args!["mkfs", "--csum", "md5", &image]).fails(2, "md5");
    larder(args!["mount", "-o", "ro,compress=best", &image, s.dir.path()])
        .fails(2, "compress=best");
    larder(args!["mount", "--cache-size", "1K", &image, s.dir.path()]).fails(2, "too small");
    larder(args!["ls", "--subvolid", "x", &image]).fails(2, "not the number");
    larder(args!["cp", s.path("x"), s.path("y")]).fails(2, "neither side");
    larder(args!["inspect", "everything", &image]).fails(2, "everything");
    larder(args!["umount", s.dir.path()]).fails(2, "not mounted");
    larder(args!["umount", "/"]).fails(2, "not a Larder mount");
    assert!(larder(["--help"]).ok().text().contains("Example"));
    assert!(larder(["--version"]).ok().text().starts_with("larder "));
}

#[test]
fn every_subcommand_helps_with_an_example() {
    for c in
        "mkfs mount umount sync stats ls cat cp rm mkdir label df trim inspect map restore check"
            .split(' ')
    {
        let text = larder([c, "--help"]).ok().text();
        assert!(text.contains("Example") && text.contains(&format!("larder {c}")), "{c}: {text}");
    }
}

#[test]
fn things_that_are_no_images_are_refused_by_every_command() {
    let s = Scene::new();
    let (text, empty, dir) = (s.path("text"), s.path("empty"), s.path("dir"));
    std::fs::write(&text, "not an image\n".repeat(20_000)).unwrap();
    std::fs::write(&empty, b"").unwrap();
    std::fs::create_dir(&dir).unwrap();
    let point = s.path("point");
    std::fs::create_dir(&point).unwrap();
    let cases = [
        (&text, "not a btrfs file system"),
        (&empty, "too few"),
        (&dir, "directory"),
        (&s.path("missing"), "No such file"),
    ];
    for (bad, why) in cases {
        larder(args!["ls", bad]).fails(2, why);
        larder(args!["cat", inside(bad, "/x")]).fails(2, why);
        larder(args!["rm", inside(bad, "/x")]).fails(2, why);
        larder(args!["mkdir", inside(bad, "/x")]).fails(2, why);
        larder(args!["inspect", "super", bad]).fails(2, why);
        larder(args!["inspect", "tree", bad]).fails(2, why);
        larder(args!["check", bad]).fails(2, why);
        larder(args!["mount", bad, &point]).fails(2, why);
        if bad != &dir {
            larder(args!["df", bad]).fails(2, why);
            larder(args!["label", bad, "new"]).fails(2, why);
        }
    }
    larder(args!["sync", &dir]).fails(2, "not on a Larder mount");
    larder(args!["stats", &dir]).fails(2, "not on a Larder mount");
}

#[test]
fn mkfs_makes_refuses_and_overwrites() {
    let s = Scene::new();
    let image = s.path("a.img");
    larder(args!["mkfs", &image]).fails(2, "--size");
    larder(args!["mkfs", "--size", "10M", &image]).fails(2, "too small");
    assert!(!image.exists(), "what was not there is not left behind");
    let made =
        larder(args!["mkfs", "--json", "--size", "8G", "--label", "pantry", &image]).ok().json();
    assert_eq!(made["total_bytes"], 8u64 << 30);
    assert_eq!(made["metadata"], "dup");
    let meta = std::fs::metadata(&image).unwrap();
    assert!(meta.len() == 8 << 30 && meta.blocks() * 512 <= 512 << 10, "{} blocks", meta.blocks());
    larder(args!["mkfs", &image]).fails(2, "already holds a btrfs file system labelled \"pantry\"");
    larder(args!["mkfs", "--size", "1G", &image]).fails(2, "--force");
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 8 << 30, "a refusal changes nothing");
    larder(args!["mkfs", "--force", "--size", "1G", &image]).ok();
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 1 << 30);
    larder(args!["mkfs", "-f", "-O", "raid56", &image]).fails(2, "raid56");
    // A default goes with what it needs, and a note says so; what was asked for is refused.
    for (without, missing) in [("^no-holes", "no-holes"), ("^free-space-tree", "free-space-tree")] {
        let both = format!("{without},block-group-tree");
        larder(args!["mkfs", "-f", "-O", both, &image]).fails(2, &format!("needs {missing}"));
        let made = larder(args!["mkfs", "-f", "--json", "-O", without, &image]).ok();
        let features = made.json()["features"].to_string();
        assert!(
            !features.contains(missing) && !features.contains("block-group-tree"),
            "{features}"
        );
        assert!(
            made.err.contains("note: ") && made.err.contains("block-group-tree"),
            "{:?}",
            made.err
        );
        let quiet =
            larder(args!["mkfs", "-f", "-O", format!("{without},^block-group-tree"), &image]).ok();
        assert_eq!(quiet.err, "");
    }
    larder(args!["mkfs", "-f", "--mixed", "-n", "16K", &image]).fails(2, "nodes of 4096");
    larder(args!["mkfs", "-f", "--mixed", "-m", "dup", "-d", "single", &image])
        .fails(2, "equal profiles");
    larder(args!["mkfs", "-f", "--mixed", &image]).ok();
    // An empty file or one of zeros needs no force, other file systems do.
    let other = s.path("b.img");
    std::fs::File::create(&other).unwrap().set_len(200 << 20).unwrap();
    larder(args!["mkfs", &other]).ok();
    let xfs = std::fs::File::create(s.path("x.img")).unwrap();
    xfs.set_len(200 << 20).unwrap();
    xfs.write_all_at(b"XFSB", 0).unwrap();
    larder(args!["mkfs", s.path("x.img")]).fails(2, "an xfs file system");
}

#[test]
fn images_can_be_reproduced() {
    let s = Scene::new();
    let make = |name: &str, date: &str| {
        let path = s.path(name);
        let uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
        let made = command()
            .args(args!["mkfs", "--size", "109M", "--uuid", uuid, &path])
            .env("SOURCE_DATE_EPOCH", date)
            .output();
        common::Run::from(made.unwrap()).ok();
        std::fs::read(path).unwrap()
    };
    let first = make("a", "1700000000");
    assert!(first == make("b", "1700000000"));
    assert!(first != make("c", "1700000001"));
    let bad = command()
        .args(args!["mkfs", "--size", "109M", s.path("d")])
        .env("SOURCE_DATE_EPOCH", "yesterday")
        .output();
    common::Run::from(bad.unwrap()).fails(2, "SOURCE_DATE_EPOCH");
}

#[test]
fn the_root_directory_has_the_owner_that_was_asked_for() {
    let s = Scene::new();
    let image = s.path("a.img");
    for wrong in ["7", "7:", "me:us", "4294967295:0"] {
        larder(args!["mkfs", "--size", "128M", "--root-owner", wrong, &image])
            .fails(2, "like 1000:1000");
    }
    larder(args!["mkfs", "--size", "128M", "--root-owner", "7:8", &image]).ok();
    let shown = larder(args!["inspect", "tree", "--tree", "fs", &image, "--json"]).ok().text();
    let shown: String = shown.split_whitespace().collect();
    assert!(shown.contains("\"uid\":7") && shown.contains("\"gid\":8"), "{shown}");
}

#[test]
fn an_image_in_use_is_refused() {
    let s = Scene::new();
    let image = s.image("a.img");
    let writer = larder_volume::FileDevice::open(&image, larder_volume::OpenMode::Write).unwrap();
    larder(args!["inspect", "super", &image]).fails(2, "in use");
    larder(args!["inspect", "super", "--force", &image]).ok();
    larder(args!["mkfs", "--force", &image]).fails(2, "in use");
    larder(args!["rm", inside(&image, "/x")]).fails(2, "in use");
    larder(args!["ls", &image]).fails(2, "--force");
    drop(writer);
    let reader = larder_volume::FileDevice::open(&image, larder_volume::OpenMode::Read).unwrap();
    larder(args!["inspect", "super", &image]).ok();
    larder(args!["label", &image, "x"]).fails(2, "in use");
    drop(reader);
}

#[test]
fn structures_can_be_looked_at() {
    let s = Scene::new();
    let image = s.image("a.img");
    let supers = larder(args!["inspect", "super", "--json", &image]).ok().json();
    let supers = supers.as_array().unwrap();
    assert_eq!(supers.len(), 2);
    assert_eq!(
        (&supers[0]["label"], &supers[1]["bytenr"]),
        (&"scene".into(), &(64u64 << 20).into())
    );
    let chunks = larder(args!["inspect", "chunks", "--json", &image]).ok().json();
    let kinds: Vec<&str> =
        chunks.as_array().unwrap().iter().map(|c| c["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["Data single", "System dup", "Metadata dup"]);
    let root = larder(args!["inspect", "tree", "--json", &image]).ok().json();
    assert_eq!(root[0]["owner"], 1);
    let bytenr = root[0]["bytenr"].as_u64().unwrap();
    for tree in
        "root extent chunk dev fs csum uuid free-space block-group data-reloc 5 -9".split(' ')
    {
        assert!(
            larder(args!["inspect", "tree", "--tree", tree, &image])
                .ok()
                .text()
                .starts_with("leaf ")
        );
    }
    larder(args!["inspect", "tree", "--tree", "300", &image]).fails(2, "no tree 300");
    let one = larder(args!["inspect", "tree", "--block", bytenr.to_string(), &image]).ok().text();
    assert!(one.starts_with(&format!("leaf {bytenr} ")));
}

#[test]
fn damage_is_said_and_what_is_left_is_shown() {
    let s = Scene::new();
    let image = s.image("a.img");
    let chunks = larder(args!["inspect", "chunks", "--json", &image]).ok().json();
    let metadata = &chunks[2];
    let root = larder(args!["inspect", "tree", "--json", &image]).ok().json();
    let into = root[0]["bytenr"].as_u64().unwrap() - metadata["logical"].as_u64().unwrap();
    let copy = |i: usize| metadata["stripes"][i]["offset"].as_u64().unwrap() + into;
    let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    // One copy damaged: the other one is read.
    file.write_all_at(b"garbage", copy(0) + 5000).unwrap();
    larder(args!["inspect", "tree", &image]).ok();
    // Both: said, exit code 1.
    file.write_all_at(b"garbage", copy(1) + 5000).unwrap();
    larder(args!["inspect", "tree", &image]).fails(1, "checksum");
    // The chunk tree does not hang on it.
    larder(args!["inspect", "chunks", &image]).ok();
    // A damaged first superblock: the mirror is mentioned, and shown.
    file.write_all_at(b"garbage", 65536 + 100).unwrap();
    larder(args!["inspect", "chunks", &image]).fails(1, "using superblock copy 1");
    let run = larder(args!["inspect", "super", "--json", &image]).fails(1, "1 of 2");
    assert!(run.json()[0]["error"].as_str().unwrap().contains("checksum"));
    // Cut short.
    file.set_len(50 << 20).unwrap();
    larder(args!["inspect", "super", &image]).fails(1, "1 of 1");
}

#[test]
fn what_is_installed_can_be_made() {
    let s = Scene::new();
    larder(args!["assets", s.dir.path()]).ok();
    let page = std::fs::read_to_string(s.path("man/larder-mount.1")).unwrap();
    assert!(page.contains("subvol") && page.contains("cache"), "{page}");
    for name in [
        "man/larder.1",
        "completions/larder.bash",
        "completions/_larder",
        "completions/larder.fish",
    ] {
        assert!(std::fs::metadata(s.path(name)).unwrap().len() > 100, "{name}");
    }
}
