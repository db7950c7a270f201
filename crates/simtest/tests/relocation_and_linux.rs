//! Moving what is in block groups, in both directions: what Linux has moved is understood here, and
//! Linux goes on with what was moved here.

use larder_format::Logical;
use larder_fs::{BalanceControl, BalanceStatus, Error, Filesystem, OpenOptions, Relocated};
use larder_simtest::oracle::{
    Aspects, Fixture, ImageVariant, KernelMount, Manifest, Need, btrfs, btrfs_check, copy_image,
    dump_tree, kernel_images, kernel_verdict, mkfs_btrfs, need, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
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
    // The address behind all others is given again when the chunk there is gone.
    let last = all.iter().max();
    assert!(now.iter().all(|g| !all.contains(g) || Some(g) == last), "{all:?} {now:?}");
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
    variant.make(&image, 1 << 30).unwrap();
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
    let usage = btrfs(&["filesystem", "usage", "-b", &text(mount.path())]).unwrap();
    btrfs(&["balance", "start", "--full-balance", &text(mount.path())])
        .unwrap_or_else(|e| panic!("{}: {e}; before it:\n{usage}", variant.name));
    mount.unmount_clean().unwrap();
    btrfs_check(&image, true).assert_clean("after a balance by Linux");
    std::fs::remove_file(&image).unwrap();
}

/// Does the image have trees of a relocation, and files of the data relocation tree?
fn leftovers(image: &Path) -> (bool, bool) {
    let roots = dump_tree(image, &["-t", "root"]).unwrap();
    let files = dump_tree(image, &["-t", "data-reloc"]).unwrap();
    (roots.contains("TREE_RELOC ROOT_ITEM"), files.contains("ORPHAN ORPHAN_ITEM"))
}

/// Files of all sizes, and snapshots with changes between.
fn fill(top: &Path, compressed: bool) {
    let first = top.join("s0");
    btrfs(&["subvolume", "create", &text(&first)]).unwrap();
    if compressed {
        btrfs(&["property", "set", &text(&first), "compression", "zstd"]).unwrap();
    }
    // Most are in the leaves, so there is much to be moved of them.
    for n in 0..2000 {
        std::fs::write(first.join(format!("file-{n}")), vec![b'x'; 1000 + n % 900]).unwrap();
    }
    for n in 0..20u32 {
        let noise: Vec<u8> =
            (0..300_000u32).map(|i| (i.wrapping_mul(n + 77) >> (7 + n % 9)) as u8).collect();
        std::fs::write(first.join(format!("large-{n}")), noise).unwrap();
    }
    for n in 1..6 {
        btrfs(&["subvolume", "snapshot", &text(&first), &text(&top.join(format!("s{n}")))])
            .unwrap();
        for k in (n..2000).step_by(9) {
            std::fs::write(first.join(format!("file-{k}")), b"changed").unwrap();
        }
    }
}

/// The power fails in the midst of a balance by Linux, as often as copies of the image can be
/// made. Each time what Linux has left is cleaned up here, everything can move again, and Linux
/// goes on with its balance.
#[test]
fn what_linux_left_half_done_is_cleaned_up() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let outer = scratch.path().join("outer");
    mkfs_btrfs(&outer, 3 << 30, &["-q"]).unwrap();
    // One that clones files, so that a copy is what was there in one moment.
    let outer = KernelMount::image(&outer, "nodatasum").unwrap();
    let image = outer.join("image");
    let (mut trees, mut files) = (0, 0);
    for (compressed, options) in
        [(true, &["-n", "4096"][..]), (false, &["-n", "16384", "-O", "^free-space-tree"])]
    {
        mkfs_btrfs(&image, 512 << 20, options).unwrap();
        let mount = KernelMount::image(&image, "commit=1").unwrap();
        fill(mount.path(), compressed);
        mount.sync().unwrap();
        let mut chosen = Vec::new();
        // Linux may be too quick for a copy, so it begins again.
        let balances = ["-m", "-d", "--full-balance"].into_iter().cycle().take(30);
        for (n, what) in balances.enumerate() {
            if n >= 3 && trees > 0 && files > 0 {
                break;
            }
            let copies = copies_while(&image, &outer.join(format!("copy-{n}")), mount.path(), what);
            // Of each kind one is enough.
            let mut left = [1, 1];
            for copy in copies {
                let (has_trees, has_files) = leftovers(&copy);
                let of_its_kind = &mut left[usize::from(!has_trees)];
                if (has_trees || has_files) && *of_its_kind > 0 {
                    *of_its_kind -= 1;
                    trees += usize::from(has_trees);
                    files += usize::from(has_files);
                    chosen.push(copy);
                } else {
                    std::fs::remove_file(&copy).unwrap();
                }
            }
        }
        mount.unmount_clean().unwrap();
        std::fs::remove_file(&image).unwrap();
        // Linux does not mount them beside the image that they are copies of.
        for copy in chosen {
            goes_on(&copy);
            std::fs::remove_file(&copy).unwrap();
        }
    }
    println!("{trees} images with trees of a relocation, {files} with its files");
    assert!(trees > 0 && files > 0, "no copy was made while something was moved");
    outer.unmount_clean().unwrap();
}

/// Copies of an image, made while Linux balances it.
fn copies_while(image: &Path, name: &Path, mount: &Path, what: &str) -> Vec<PathBuf> {
    let mut balance = std::process::Command::new("btrfs")
        .args(["balance", "start", what])
        .arg(mount)
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut copies = Vec::new();
    while copies.len() < 80 && balance.try_wait().unwrap().is_none() {
        let copy = name.with_extension(copies.len().to_string());
        let (from, to) = (File::open(image).unwrap(), File::create_new(&copy).unwrap());
        rustix::fs::ioctl_ficlone(&to, &from).unwrap();
        copies.push(copy);
    }
    // It may have ended by itself.
    let _ = btrfs(&["balance".as_ref(), "cancel".as_ref(), mount.as_os_str()]);
    balance.wait().unwrap();
    copies
}

/// Opens what a crash of Linux has left.
fn goes_on(image: &Path) {
    // Linux ends its balance when it mounts the copy.
    let before = state(image);
    let fs = open(image);
    fs.wait_for_drops().unwrap();
    if fs.unfinished_balance().unwrap().is_some() {
        let control = BalanceControl::new();
        fs.resume_balance(&control).unwrap();
        assert_eq!(control.state().status, BalanceStatus::Finished);
    }
    fs.close().unwrap();
    drop(fs);
    assert_eq!(leftovers(image), (false, false), "{}", image.display());
    btrfs_check(image, true).assert_clean("cleaned up");
    let differences = before.differences(&state(image), Aspects::same_image());
    assert!(differences.is_empty(), "{differences:?}");
    relocate_all(image);
    btrfs_check(image, true).assert_clean("moved again");
    let differences = before.differences(&state(image), Aspects::same_image());
    assert!(differences.is_empty(), "{differences:?}");
}

/// Space that is preallocated, in pieces longer than Larder makes them; files that are written in
/// place, and partly written space; all of it beside each other in one group.
#[test]
fn space_that_linux_preallocated_moves() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let image = scratch.path().join("image");
    mkfs_btrfs(&image, 3 << 30, &["-q"]).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    let long = File::create(mount.join("long")).unwrap();
    let none = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&long, none, 0, 600 << 20).unwrap();
    long.write_all_at(&[7; 100_000], 300 << 20).unwrap();
    drop(long);
    let in_place = mount.join("in place");
    File::create(&in_place).unwrap();
    let flags = |file: &File| rustix::fs::ioctl_setflags(file, rustix::fs::IFlags::NOCOW).unwrap();
    flags(&File::open(&in_place).unwrap());
    std::fs::write(&in_place, vec![9; 3 << 20]).unwrap();
    std::fs::write(mount.join("small"), "inline").unwrap();
    mount.unmount_clean().unwrap();
    let dump = dump_tree(&image, &["-t", "extent"]).unwrap();
    assert!(dump.contains("EXTENT_ITEM 268435456"), "Linux makes longer ones:\n{dump}");
    let before = state(&image);
    relocate_all(&image);
    btrfs_check(&image, true).assert_clean("moved");
    let differences = before.differences(&state(&image), Aspects::same_image());
    assert!(differences.is_empty(), "{differences:?}");
}
