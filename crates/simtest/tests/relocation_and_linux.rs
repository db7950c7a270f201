//! Moving what is in block groups, in both directions: what Linux has moved is understood here, and
//! Linux goes on with what was moved here.

use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::oracle::{
    KernelMount, Need, btrfs, btrfs_check, dump_tree, mkfs_btrfs, need, scratch,
};
use larder_volume::{FileDevice, OpenMode};
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
