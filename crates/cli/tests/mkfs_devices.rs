//! New file systems on several devices before their judges: mkfs.btrfs puts the chunks in the same
//! places, `btrfs check` is content, and the kernel and Larder mount them, write, and leave them
//! clean.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{DeviceSet, Need, need, scratch};
use std::path::{Path, PathBuf};

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Image files of these sizes, with nothing in them.
fn empty(dir: &Path, sizes: &[u64]) -> Vec<PathBuf> {
    let file = |(n, mib): (usize, &u64)| {
        let path = dir.join(format!("device-{}", n + 1));
        std::fs::File::create(&path).unwrap().set_len(mib * MIB).unwrap();
        path
    };
    sizes.iter().enumerate().map(file).collect()
}

fn made(dir: &Path, sizes: &[u64], options: &[&str]) -> DeviceSet {
    let images = empty(dir, sizes);
    let all = [&["mkfs", "-O", "block-group-tree"], options].concat();
    larder(all.into_iter().map(PathBuf::from).chain(images.iter().cloned())).ok();
    DeviceSet::of(images)
}

fn chunks(image: &Path) -> serde_json::Value {
    larder(args!["inspect", "chunks", "--json", image]).ok().json()
}

#[test]
fn chunks_lie_where_mkfs_btrfs_puts_them() {
    if !need(&NEEDS) {
        return;
    }
    for (options, sizes) in [
        (&[][..], &[1024, 1024][..]),
        (&[], &[1024, 2048, 3072]),
        (&[], &[100 << 10, 200 << 10]),
        (&["-d", "raid0", "-m", "raid1"], &[1024, 1024]),
        (&["-d", "raid10", "-m", "raid1c3"], &[1024, 1024, 2048, 3072]),
        (&["-d", "raid5", "-m", "raid6"], &[1024, 1024, 2048, 3072]),
        (&["-d", "raid1c4", "-m", "raid1c4"], &[1024, 1024, 2048, 3072]),
        (&["-d", "dup", "-m", "dup"], &[1024, 2048]),
        (&["-d", "single", "-m", "single"], &[1024, 2048]),
        (&["-d", "raid0", "-m", "raid0"], &[100 << 10, 200 << 10, 300 << 10]),
        (&["-d", "raid0", "-m", "raid0"], &[1024; 8]),
        (&["-d", "raid10", "-m", "raid10"], &[1024; 8]),
        (&["-d", "raid1", "-m", "single"], &[1024, 8192]),
        (&["-d", "raid6", "-m", "raid1"], &[200, 210, 300, 400]),
        (&["-d", "raid6", "-m", "raid6"], &[125, 125, 125]),
        (&["-d", "single", "-m", "raid1"], &[69, 69]),
        (&["-M"], &[100, 100]),
        (&["-M", "-d", "raid1", "-m", "raid1"], &[86, 86]),
        (&["-M", "-d", "raid5", "-m", "raid5"], &[1024, 1024, 1024]),
        (&["-d", "raid0", "-m", "raid0"], &[2048]),
    ] {
        let (ours, theirs) = (scratch(), scratch());
        let bytes: Vec<u64> = sizes.iter().map(|mib| mib * MIB).collect();
        let ours = made(ours.path(), sizes, options).images()[0].clone();
        let set = DeviceSet::make(theirs.path(), &bytes, options).unwrap();
        assert_eq!(chunks(&ours), chunks(&set.images()[0]), "{options:?} on {sizes:?}");
    }
}

/// Larder and Linux find nothing wrong.
fn is_sound(set: &DeviceSet, name: &str) {
    let check =
        larder(args!["check", "--data"].into_iter().chain(set.images().iter().map(Into::into)));
    assert_eq!(check.code, 0, "{name}: {}{}", check.text(), check.err);
    let theirs = set.check().unwrap();
    assert!(theirs.is_clean(), "{name}: {theirs:?}");
}

#[test]
fn linux_and_larder_go_on_with_every_profile() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, sizes) in [
        ("single", "raid1", &[200, 300][..]),
        ("raid0", "dup", &[300, 250]),
        ("raid1", "raid1", &[240, 150, 200]),
        ("raid10", "raid1c3", &[150, 160, 170, 180]),
        ("raid1c4", "raid10", &[150, 150, 150, 150]),
        ("raid5", "raid1", &[150, 250, 200]),
        ("raid6", "raid6", &[150, 160, 170, 180]),
        ("single", "raid5", &[200, 200, 200]),
    ] {
        let name = format!("{data}/{metadata}");
        let dir = scratch();
        let set = made(dir.path(), sizes, &["-d", data, "-m", metadata]);
        is_sound(&set, &name);
        let mount = set.mount("").unwrap();
        std::fs::create_dir(mount.join("dir")).unwrap();
        std::fs::write(mount.join("dir/linux"), vec![7; 3_000_000]).unwrap();
        mount.sync().unwrap();
        mount.unmount_clean().unwrap();
        is_sound(&set, &name);
        let first = &set.images()[0];
        assert!(larder(args!["cat", inside(first, "/dir/linux")]).ok().out == vec![7; 3_000_000]);
        let file = dir.path().join("file");
        std::fs::write(&file, vec![8; 2_000_000]).unwrap();
        larder(args!["cp", &file, inside(first, "/dir/larder")]).ok();
        std::fs::remove_file(&file).unwrap();
        is_sound(&set, &name);
        let mount = set.mount("ro").unwrap();
        assert!(std::fs::read(mount.join("dir/larder")).unwrap() == vec![8; 2_000_000]);
        mount.unmount_clean().unwrap();
    }
}

#[test]
fn small_nodes_and_many_devices_need_more_than_a_leaf() {
    if !need(&NEEDS) {
        return;
    }
    for options in [&["-n", "4096"][..], &["-M", "-d", "raid0", "-m", "raid0"]] {
        let dir = scratch();
        let set = made(dir.path(), &[130; 40], options);
        is_sound(&set, &format!("{options:?}"));
    }
}

#[test]
fn the_same_uuid_and_time_give_the_same_bytes() {
    let (one, other) = (scratch(), scratch());
    let make = |dir: &Path| {
        let images = empty(dir, &[200, 250, 220]);
        let uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
        let options = args!["mkfs", "-U", uuid, "-d", "raid5", "--root-owner", "0:0", "-K"];
        let mut run = common::command();
        run.env("SOURCE_DATE_EPOCH", "1").args(options).args(&images);
        assert!(run.status().unwrap().success());
        images
    };
    for (one, other) in make(one.path()).iter().zip(make(other.path())) {
        assert!(std::fs::read(one).unwrap() == std::fs::read(other).unwrap());
    }
}

#[test]
fn the_answer_names_every_device() {
    let dir = scratch();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let run = larder(args!["mkfs", "--json", "--size", "200M", &a, &b]).ok().json();
    assert_eq!((&run["metadata"], &run["data"]), (&"raid1".into(), &"single".into()));
    assert_eq!(run["total_bytes"], 400 * MIB);
    let devices = run["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    assert_ne!(devices[0]["uuid"], devices[1]["uuid"]);
    assert_eq!((&devices[1]["id"], &devices[1]["bytes"]), (&2.into(), &(200 * MIB).into()));
    assert_eq!(devices[1]["path"], b.to_str().unwrap());
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    larder(args!["mkfs", "--size", "200M", path("used")]).ok();
    let before = std::fs::read(path("used")).unwrap();
    let refused = |code, says: &str, args: &[&str]| {
        let args = args.iter().map(|arg| match arg.strip_prefix('@') {
            Some(name) => path(name),
            None => arg.into(),
        });
        larder([PathBuf::from("mkfs"), "--size".into(), "200M".into()].into_iter().chain(args))
            .fails(code, says);
        let here = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(here, 1, "{says}: files are left behind");
    };
    refused(2, "used already holds a btrfs", &["@new", "@used"]);
    refused(2, "is given twice", &["-f", "@used", "@new", "@used"]);
    refused(2, "raid1c3 for data needs at least 3 devices, and 2", &["-d", "raid1c3", "@a", "@b"]);
    refused(2, "raid1 for metadata needs at least 2 devices, and 1 d", &["-m", "raid1", "@a"]);
    refused(2, "none of single, dup, raid0", &["-m", "raid7", "@a", "@b"]);
    refused(2, "mixed block groups need equal", &["-M", "-m", "raid1", "-d", "raid0", "@a", "@b"]);
    let small = ["--size", "100M", "-d", "raid1", "@a", "@b"];
    let args = small.iter().map(|arg| arg.strip_prefix('@').map_or(arg.into(), path));
    larder([PathBuf::from("mkfs")].into_iter().chain(args))
        .fails(2, "device 1: 104857600 bytes are too small");
    assert!(std::fs::read(path("used")).unwrap() == before);
    larder(args!["build", "--size", "1G", "-m", "raid1", path("new"), dir.path()])
        .fails(2, "its profiles are single and dup, not raid1");
}
