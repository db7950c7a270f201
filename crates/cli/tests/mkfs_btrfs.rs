//! Larder called as `mkfs.btrfs`, beside the real one: the same command lines end the same way,
//! and what they make holds the same.

mod common;

use common::Run;
use larder_simtest::oracle::{
    KernelMount, LoopDevice, Need, btrfs, btrfs_check, need, scratch, tree_compare,
};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::process::Command;

/// Larder under the other name, in a directory.
fn ours(dir: &Path, line: &str) -> Run {
    let link = dir.join("mkfs.btrfs");
    if !link.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_larder"), &link).unwrap();
    }
    let mut c = Command::new(link);
    c.args(line.split_whitespace()).current_dir(dir).env_remove("SOURCE_DATE_EPOCH");
    c.output().unwrap().into()
}

fn theirs(dir: &Path, line: &str) -> Run {
    let mut c = Command::new("mkfs.btrfs");
    c.args(line.split_whitespace()).current_dir(dir).output().unwrap().into()
}

fn file(path: &Path, bytes: u64) {
    File::create(path).unwrap().set_len(bytes).unwrap();
}

/// A field of `Name:   value` in what mkfs.btrfs prints.
fn field<'a>(text: &'a str, name: &str) -> &'a str {
    let line = text.lines().find(|line| line.trim_start().starts_with(name));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).split_once(':').unwrap().1.trim()
}

#[test]
fn the_same_command_lines_end_the_same_way() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let dir = dir.path();
    std::fs::create_dir_all(dir.join("src/home")).unwrap();
    for line in [
        "-f x.img",
        "x.img",
        "-f -q -L name x.img",
        "-fM x.img",
        "-f -n 32k --csum xxhash x.img",
        "-f -m single -d single -K x.img",
        "-f -O ^no-holes,^free-space-tree x.img",
        "-f -O block-group-tree x.img",
        "-f -b 150m x.img",
        "-f -b 900m x.img",
        "-f -b 1x x.img",
        "-f -U 6ba7b810-9dad-11d1-80b4-00c04fd430c8 x.img",
        "-f -U none x.img",
        "-f -s 4096 x.img",
        "-f -n 3000 x.img",
        "-f -O nonsense x.img",
        "-f --csum nonsense x.img",
        "-f --shrink x.img",
        "-f --subvol a x.img",
        "-f --rootdir missing x.img",
        "-f --rootdir src --subvol missing x.img",
        "-f --rootdir src --subvol ro:home x.img",
        "-f --rootdir src --compress zstd:99 x.img",
        "-f --rootdir src --compress zlib:9 --shrink x.img",
        "-f --rootdir src --compress zstd:0 x.img",
        "-f --rootdir src --compress zstd: x.img",
        "-f --rootdir src --compress zlib:0 x.img",
        "-f --rootdir src --compress zlib:10 x.img",
        "-f --rootdir src --compress lzo:1 x.img",
        "-f --rootdir src --compress lzo:2 x.img",
        "-f --rootdir src --compress no:1 x.img",
        "-f --compress no x.img",
        "-f --rootdir src -u home -u home/ x.img",
        "-f --rootdir src -u home -u ro:home x.img",
        "-f --rootdir src -b 100m x.img",
        "-f --rootdir src -b 1m x.img",
        "-f --rootdir src -b 300m x.img",
        "-f --rootdir src -b 300m --shrink x.img",
        "-f -b 0 x.img",
        "-f -n 0 x.img",
        "-f -U 6ba7b8109dad11d180b400c04fd430c8 x.img",
        "-f --uuid= x.img",
        "-f missing/x.img",
        "-f -d raid1 x.img",
        "-f -m raid0 -d raid0 x.img",
        "-f -q x.img y.img",
        "-f -b 150m -m raid1c3 x.img y.img",
        "-f -m raid1 -d raid6 x.img y.img",
        "-f -d raid7 x.img y.img",
        "-f -r src x.img y.img",
        "",
        "--help",
        "--version",
        "--nonsense",
        "-O list-all",
    ] {
        file(&dir.join("x.img"), 200 << 20);
        file(&dir.join("y.img"), 300 << 20);
        if line == "x.img" {
            theirs(dir, "-q x.img").ok();
        }
        let expected = theirs(dir, line);
        file(&dir.join("x.img"), 200 << 20);
        file(&dir.join("y.img"), 300 << 20);
        if line == "x.img" {
            theirs(dir, "-q x.img").ok();
        }
        let run = ours(dir, line);
        assert_eq!(run.code, expected.code, "{line}: {}\n{}", run.err, expected.err);
        assert_eq!(run.code == 0, !run.err.contains("ERROR:"), "{line}: {}", run.err);
        if run.code == 0 && line.ends_with("x.img") {
            assert!(btrfs_check(&dir.join("x.img"), true).is_clean(), "{line}");
        }
    }
}

/// systemd-repart locks a device and then starts mkfs.btrfs.
#[test]
fn a_lock_of_the_parent_on_a_device_is_no_obstacle() {
    use std::os::fd::AsFd;
    if !need(&[Need::Root, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    file(&dir.path().join("x.img"), 200 << 20);
    let device = LoopDevice::attach(&dir.path().join("x.img")).unwrap();
    let held = File::open(device.path()).unwrap();
    rustix::fs::flock(held.as_fd(), rustix::fs::FlockOperation::LockExclusive).unwrap();
    ours(dir.path(), &format!("-q {}", device.path().display())).ok();
    // A lock of another process is one.
    let line = format!("exec ./mkfs.btrfs -f -q {} & wait $!", device.path().display());
    let run = Command::new("sh").args(["-c", &line]).current_dir(dir.path()).output().unwrap();
    Run::from(run).fails(1, "is in use");
}

#[test]
fn what_it_prints_has_the_shape_of_the_other() {
    if !need(&[Need::MkfsBtrfs]) {
        return;
    }
    let dir = scratch();
    let dir = dir.path();
    std::fs::create_dir_all(dir.join("src/home")).unwrap();
    for line in ["-f -L data x.img", "-f --rootdir src -u home --compress zstd x.img"] {
        file(&dir.join("x.img"), 200 << 20);
        let expected = theirs(dir, line).ok().text();
        file(&dir.join("x.img"), 200 << 20);
        let text = ours(dir, line).ok().text();
        assert!(text.starts_with("btrfs-progs v6.14"));
        for name in [
            "Label",
            "Node size",
            "Sector size",
            "Filesystem size",
            "SSD detected",
            "Zoned device",
            "Features",
            "Checksum",
            "Number of devices",
        ] {
            assert_eq!(field(&text, name), field(&expected, name), "{line}");
        }
        if line.contains("rootdir") {
            for name in ["Rootdir from", "Compress", "Subvolume", "Shrink"] {
                assert_eq!(field(&text, name), field(&expected, name), "{line}");
            }
        }
        assert_eq!(field(&text, "UUID").len(), 36);
        assert!(text.contains("   ID        SIZE  PATH\n    1   200.00MiB  x.img"), "{text}");
    }
    assert_eq!(ours(dir, "-f -q x.img").ok().text(), "");
}

/// Bytes of the file system, and of what it lies in.
fn sizes(path: &Path) -> (u64, u64) {
    let dump = btrfs(&["inspect-internal", "dump-super", path.to_str().unwrap()]).unwrap();
    let line = dump.lines().find(|line| line.starts_with("total_bytes")).unwrap();
    let total = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    (total, File::open(path).unwrap().seek(SeekFrom::End(0)).unwrap())
}

/// With a directory, a size is the least that the file system gets. A file is never cut by it.
#[test]
fn a_size_is_the_least_one_where_a_directory_is_given() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let dir = dir.path();
    let image = dir.join("x.img");
    std::fs::create_dir_all(dir.join("src")).unwrap();
    for (len, bytes) in [(100, 300), (200, 300), (400, 300), (0, 300)] {
        let line = format!("-q -f --rootdir src -b {bytes}m x.img");
        file(&image, len << 20);
        theirs(dir, &line).ok();
        let expected = sizes(&image);
        file(&image, len << 20);
        ours(dir, &line).ok();
        assert_eq!(sizes(&image), expected, "{line}, {len} MiB");
    }
    // What does not fit makes both larger.
    std::fs::write(dir.join("src/large"), vec![b'x'; 40 << 20]).unwrap();
    std::fs::remove_file(&image).unwrap();
    ours(dir, "-q -f --rootdir src -b 20m x.img").ok();
    assert!(sizes(&image).0 > 40 << 20);
    assert!(btrfs_check(&image, true).is_clean());
}

#[test]
fn a_shrunk_file_system_leaves_the_rest_of_a_device_alone() {
    if !need(&[Need::Root, Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let dir = dir.path();
    std::fs::create_dir_all(dir.join("src")).unwrap();
    std::fs::write(dir.join("src/a"), "a".repeat(100_000)).unwrap();
    file(&dir.join("x.img"), 200 << 20);
    let device = LoopDevice::attach(&dir.join("x.img")).unwrap();
    ours(dir, &format!("-q --rootdir src --shrink {}", device.path().display())).ok();
    let (total, len) = sizes(device.path());
    assert!(total < 32 << 20 && len == 200 << 20, "{total} of {len}");
    assert!(btrfs_check(device.path(), true).is_clean());
    let mount = KernelMount::device(device, "ro").unwrap();
    assert_eq!(tree_compare(&dir.join("src"), mount.path()).unwrap(), []);
    mount.unmount_clean().unwrap();
}

#[test]
fn a_directory_fills_the_file_system() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let dir = dir.path();
    let src = dir.join("src");
    std::fs::create_dir_all(src.join("home/me")).unwrap();
    std::fs::create_dir_all(src.join("db")).unwrap();
    for name in ["a", "home/b", "home/me/c", "db/data"] {
        std::fs::write(src.join(name), name.repeat(3000)).unwrap();
    }
    let image = dir.join("x.img");
    // A file that is too small grows, one that is large enough stays, one that is missing is made.
    for (size, after) in [(Some(4 << 20), None), (Some(512 << 20), Some(512 << 20)), (None, None)] {
        let _ = std::fs::remove_file(&image);
        if let Some(size) = size {
            file(&image, size);
        }
        ours(dir, "--rootdir src x.img").ok();
        let len = std::fs::metadata(&image).unwrap().len();
        assert!(after.is_none_or(|after| after == len) && len > 16 << 20, "{len}");
        let mount = KernelMount::image(&image, "ro").unwrap();
        assert_eq!(tree_compare(&src, mount.path()).unwrap(), []);
        mount.unmount_clean().unwrap();
    }
    let line =
        "-f --rootdir src -u ro:home -u default:db --inode-flags nodatacow:db --shrink x.img";
    ours(dir, line).ok();
    assert!(std::fs::metadata(&image).unwrap().len() < 64 << 20, "shrunk");
    assert!(btrfs_check(&image, true).is_clean());
    let mount = KernelMount::image(&image, "ro").unwrap();
    assert!(mount.join("data").exists(), "db is the default");
    let flags = Command::new("lsattr").arg(mount.join("data")).output();
    assert!(flags.is_ok_and(|run| String::from_utf8_lossy(&run.stdout).contains('C')));
    mount.unmount_clean().unwrap();
    let mount = KernelMount::image(&image, "subvolid=5").unwrap();
    assert_eq!(tree_compare(&src, mount.path()).unwrap(), []);
    assert!(std::fs::write(mount.join("home/x"), b"").is_err(), "home is read-only");
    mount.unmount_clean().unwrap();
}
