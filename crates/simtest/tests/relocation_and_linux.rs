//! Moving what is in block groups, in both directions: what Linux has moved is understood here, and
//! Linux goes on with what was moved here.

use larder_format::Logical;
use larder_fs::{Error, Filesystem, OpenOptions, Relocated};
use larder_simtest::oracle::{
    Aspects, Fixture, ImageVariant, KernelMount, Manifest, Need, btrfs, btrfs_check, copy_image,
    dump_tree, kernel_images, kernel_verdict, mkfs_btrfs, need, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

fn open(image: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Addresses of the block groups of a kind.
fn groups(image: &Path, kind: &str) -> Vec<u64> {
    let dump = dump_tree(image, &["-t", "chunk"]).unwrap();
    let mut out = Vec::new();
    let mut at = 0;
    for line in dump.lines() {
        if let Some(key) = line.split("CHUNK_ITEM ").nth(1) {
            at = key.split(')').next().unwrap().parse().unwrap();
        }
        if line.contains(&format!("type {kind}")) {
            out.push(at);
        }
    }
    out
}

/// Linux moves the inner blocks of a tree that two snapshots share, and not the leaves. The copies
/// refer to their children by their own address, the leaves still refer by the tree that they were
/// made in. When that tree is deleted, something has to go below the copies.
#[test]
fn what_linux_moved_outlives_the_tree_that_made_it() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let image = scratch.path().join("image");
    mkfs_btrfs(&image, 1 << 30, &["-n", "4096", "-m", "single"]).unwrap();
    let mount = KernelMount::image(&image, "max_inline=2048").unwrap();
    let path = |name: &str| text(&mount.join(name));
    btrfs(&["subvolume", "create", &path("source")]).unwrap();
    // More than the first group of metadata holds.
    for n in 0..6000 {
        // Most are in the leaves, some are extents that the leaves refer to.
        let len = if n % 3 == 0 { 5000 } else { 1900 };
        std::fs::write(mount.join(format!("source/file {n}")), vec![n as u8; len]).unwrap();
        if n % 500 == 0 {
            mount.sync().unwrap();
        }
    }
    btrfs(&["filesystem", "sync", &text(mount.path())]).unwrap();
    btrfs(&["subvolume", "snapshot", &path("source"), &path("kept")]).unwrap();
    mount.sync().unwrap();
    let all = groups(&image, "METADATA");
    assert!(all.len() > 1, "{all:?}");
    let last = all[all.len() - 1];
    btrfs(&["balance", "start", &format!("-mvrange={last}..{}", last + 1), &text(mount.path())])
        .unwrap();
    mount.unmount_clean().unwrap();
    let dump = dump_tree(&image, &["-t", "extent"]).unwrap();
    assert!(dump.contains("shared block backref"), "the source's inner blocks are shared");
    assert!(dump.contains("data backref root 256"), "some leaves stay as they were");

    let fs = open(&image);
    fs.delete_subvolume(fs.root(), b"source").unwrap();
    fs.wait_for_drops().unwrap();
    fs.close().unwrap();
    btrfs_check(&image, true).assert_clean("without the source");
    let dump = dump_tree(&image, &["-t", "extent"]).unwrap();
    assert!(!dump.contains("backref root 256"), "a reference of a tree that is gone");

    let mount = KernelMount::image(&image, "").unwrap();
    btrfs(&["balance", "start", "--full-balance", &text(mount.path())]).unwrap();
    assert_eq!(std::fs::read_dir(mount.join("kept")).unwrap().count(), 6000);
    mount.unmount_clean().unwrap();
    btrfs_check(&image, true).assert_clean("after Linux moved everything again");
}

fn groups_of_all_kinds(image: &Path) -> Vec<u64> {
    ["DATA", "METADATA", "SYSTEM"].iter().flat_map(|kind| groups(image, kind)).collect()
}

/// Moves what is in each block group that the image has now.
fn relocate_all(image: &Path) {
    let all = groups_of_all_kinds(image);
    let fs = open(image);
    for group in &all {
        let mut calls = 0;
        let done = fs.relocate(Logical(*group), &mut |_| {
            calls += 1;
            ControlFlow::Continue(())
        });
        match done {
            // It was empty, and a commit has taken it out meanwhile.
            Err(Error::NotFound) => assert_eq!(calls, 0),
            done => assert_eq!(done.unwrap_or_else(|e| panic!("{group}: {e}")), Relocated::Done),
        }
    }
    fs.close().unwrap();
    let now = groups_of_all_kinds(image);
    assert!(now.iter().all(|g| !all.contains(g)), "{all:?} {now:?}");
}

/// What Linux reads, checks and can change.
fn state(image: &Path) -> Manifest {
    let copy = image.with_extension("copy");
    copy_image(image, &copy).unwrap();
    let state = kernel_verdict(&copy).unwrap();
    std::fs::remove_file(copy).unwrap();
    state
}

#[test]
fn every_group_moves_and_linux_goes_on() {
    if !need(&NEEDS) {
        return;
    }
    // One for each way in which space and holes are written down. `LARDER_SCALE` takes all.
    let (scratch, mut variants) = (scratch(), kernel_images());
    let mut seen = BTreeSet::new();
    if std::env::var_os("LARDER_SCALE").is_none() {
        variants.retain(|v| {
            let traits = ["-v1", "-nocache", "-mixed", "-64k", "-single"];
            traits.iter().any(|t| v.name.contains(t) && seen.insert(*t))
        });
    }
    std::thread::scope(|threads| {
        for some in variants.chunks(variants.len().div_ceil(2)) {
            threads.spawn(|| some.iter().for_each(|variant| moves(variant, scratch.path())));
        }
    });
}

fn moves(variant: &ImageVariant, scratch: &Path) {
    let image = scratch.join(&variant.name);
    variant.make(&image, 512 << 20).unwrap();
    let mount = KernelMount::image(&image, &variant.mount).unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    let before = state(&image);
    relocate_all(&image);
    let differences = before.differences(&state(&image), Aspects::same_image());
    assert!(differences.is_empty(), "{}: {differences:?}", variant.name);
    let mount = KernelMount::image(&image, "").unwrap();
    std::fs::write(mount.join("by Linux"), vec![7; 100_000]).unwrap();
    mount.sync().unwrap();
    btrfs(&["balance", "start", "--full-balance", &text(mount.path())]).unwrap();
    mount.unmount_clean().unwrap();
    btrfs_check(&image, true).assert_clean("after a balance by Linux");
    std::fs::remove_file(&image).unwrap();
}
