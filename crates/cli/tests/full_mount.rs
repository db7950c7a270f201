//! A mount that is filled, emptied and refilled from many threads, and what `larder df` and `larder
//! trim` say about it.

mod common;

use common::larder;
use larder_fs::TrimRange;
use larder_fuse::control;
use larder_simtest::fill::{Done, MountedDisk, Plan, run};
use larder_simtest::oracle::{Need, btrfs_check, enter_private_namespace, need, scratch};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A mounted image; unmounted when dropped.
struct Mounted {
    dir: tempfile::TempDir,
}

impl Mounted {
    fn new(options: &str) -> Option<Self> {
        if !need(&[Need::Fuse, Need::Root]) {
            return None;
        }
        enter_private_namespace().expect("a mount namespace");
        let mounted = Self { dir: scratch() };
        std::fs::create_dir(mounted.point()).expect("mkdir");
        larder(args!["mkfs", "--size", "256M", mounted.image()]).ok();
        larder(args!["mount", "-o", options, mounted.image(), mounted.point()]).ok();
        Some(mounted)
    }
    fn image(&self) -> PathBuf {
        self.dir.path().join("img")
    }
    fn point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = larder(args!["umount", self.point()]);
    }
}

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).expect("stat").blocks() * 512
}

#[test]
fn a_mount_is_filled_emptied_and_refilled() {
    let Some(m) = Mounted::new("commit=1") else { return };
    let disk = MountedDisk(m.point());
    let plan = Plan { threads: 16, time: Duration::from_secs(4), seed: 3, largest: 2 << 20 };
    let done = Done::default();
    let left = run(&disk, &plan, &done).unwrap_or_else(|e| panic!("{e}"));
    assert!(done.full.load(Ordering::Relaxed) >= 16, "the disk was not full: {done:?}");
    left.delete(&disk).expect("deleting works");
    larder(args!["sync", m.point()]).ok();
    let df = larder(args!["df", "--json", m.point()]).ok().json();
    let space = &df["space"];
    assert!(df["available"].as_u64() > Some(100 << 20), "space is there again: {df}");
    assert_eq!(
        (&space["data"]["reserved"], &space["metadata_full"]),
        (&0.into(), &false.into()),
        "{df}"
    );
    larder(args!["umount", m.point()]).ok();
    larder(args!["check", "--data", m.image()]).ok();
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(&m.image(), true).assert_clean("after it was full");
    }
}

#[test]
fn what_is_full_is_said_in_words() {
    let Some(m) = Mounted::new("commit=1") else { return };
    assert!(larder(args!["df", m.point()]).ok().text().contains("Not full"));
    let file = std::fs::File::create(m.point().join("all")).expect("create");
    let piece = vec![0xa5u8; 1 << 20];
    let refused = loop {
        if let Err(e) = std::io::Write::write_all(&mut &file, &piece) {
            break e;
        }
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull);
    drop(file);
    larder(args!["sync", m.point()]).ok();
    let text = larder(args!["df", m.point()]).ok().text();
    for says in ["Data is full", "Metadata (", "Unallocated", "What helps"] {
        assert!(text.contains(says), "{says:?} is not in {text}");
    }
    std::fs::remove_file(m.point().join("all")).expect("deleting works");
    larder(args!["sync", m.point()]).ok();
    assert!(larder(args!["df", m.point()]).ok().text().contains("Not full"));
}

/// What `larder df` says of a nearly full image, and what then really fits.
#[test]
fn what_is_said_to_be_available_can_be_written() {
    let Some(m) = Mounted::new("commit=1") else { return };
    let total = larder(args!["df", "--json", m.point()]).ok().json()["available"].as_u64().unwrap();
    let piece = vec![0xa5u8; 1 << 20];
    let most = std::fs::File::create(m.point().join("most")).expect("create");
    for _ in 0..(total / 100 * 93) >> 20 {
        std::io::Write::write_all(&mut &most, &piece).expect("there is room");
    }
    larder(args!["sync", m.point()]).ok();
    let said = larder(args!["df", m.point()]).ok().text();
    assert!(said.contains("Not full"), "{said}");
    let available =
        larder(args!["df", "--json", m.point()]).ok().json()["available"].as_u64().unwrap();
    let rest = std::fs::File::create(m.point().join("rest")).expect("create");
    let mut written = 0;
    while std::io::Write::write_all(&mut &rest, &piece).is_ok() {
        written += piece.len() as u64;
    }
    let apart = written.abs_diff(available);
    assert!(
        apart <= total / 50,
        "{available} bytes were said to be available, {written} were:\n{said}"
    );
    larder(args!["sync", m.point()]).ok();
    assert!(larder(args!["df", m.point()]).ok().text().contains("Data is full"));
}

#[test]
fn free_space_is_trimmed_on_mounts_and_images() {
    let Some(m) = Mounted::new("nodiscard") else { return };
    let file = m.point().join("file");
    std::fs::write(&file, vec![1u8; 30 << 20]).expect("write");
    larder(args!["sync", m.point()]).ok();
    std::fs::remove_file(&file).expect("remove");
    larder(args!["sync", m.point()]).ok();
    let before = allocated(&m.image());
    assert!(before > 30 << 20, "nodiscard keeps what was deleted: {before}");
    let told = larder(args!["trim", "--json", m.point()]).ok().json();
    assert!(told["discarded"].as_u64() > Some(200 << 20), "{told}");
    let after = allocated(&m.image());
    assert!(after < before - (29 << 20), "{before} bytes, {after} after the trim");
    // Bounds and refusals of FITRIM are those of Linux (`trim_and_linux.rs` compares them all).
    let range = |start, len| TrimRange { start, len, min_len: 0 };
    let trim = |start, len| control::trim(&m.point(), range(start, len));
    for (start, len) in [(u64::MAX, u64::MAX), (0, 0), (0, 4095)] {
        let refused = trim(start, len).expect_err("no whole sector");
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL), "{start}, {len}: {refused}");
    }
    // Addresses are logical, so none is behind the end; all that has none was told of just now.
    let behind = trim(1 << 50, u64::MAX).expect("an address");
    assert_eq!((behind.bytes, behind.min_len), (0, 4096));
    // fstrim(8) of util-linux does the same where it is there.
    if let Ok(done) = std::process::Command::new("fstrim").arg("-v").arg(m.point()).output() {
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success() && text.contains("trimmed"), "{done:?}");
    }
    larder(args!["trim", m.image()]).fails(2, "use");
    larder(args!["umount", m.point()]).ok();
    assert!(larder(args!["trim", m.image()]).ok().text().contains("discarded"));
    larder(args!["check", "--data", m.image()]).ok();
}
