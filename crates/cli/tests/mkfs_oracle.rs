//! New images before their judges: mkfs.btrfs makes the same ones, `btrfs check` is content, and
//! the kernel mounts them, writes, syncs, unmounts, and leaves them clean.

mod common;

use common::larder;
use larder_simtest::oracle::{
    KernelMount, Need, btrfs, btrfs_check, dump_tree, mkfs_btrfs, need, scratch,
};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// One test at a time: a program that another test starts holds all open files of this process for
/// a moment, and a mount with an open file cannot be unmounted.
static ALONE: Mutex<()> = Mutex::new(());

const MIB: u64 = 1 << 20;
const UUID: &str = "11111111-2222-3333-4444-555555555555";

/// Options that larder and mkfs.btrfs understand alike, and a size.
fn variants() -> Vec<(Vec<&'static str>, u64)> {
    let bgt = "block-group-tree";
    vec![
        (vec!["-O", bgt], 300 * MIB),
        (vec!["-O", "^block-group-tree"], 1024 * MIB),
        (vec!["-O", "^block-group-tree,^free-space-tree"], 300 * MIB),
        (vec!["-O", "^no-holes"], 300 * MIB),
        (vec!["-O", "^free-space-tree"], 300 * MIB),
        (vec!["-O", "^block-group-tree,^no-holes"], 300 * MIB),
        (vec!["-O", "^block-group-tree,^free-space-tree,^no-holes,^extref"], 300 * MIB),
        (vec!["-O", bgt, "-m", "single"], 100 * MIB),
        (vec!["-O", bgt, "-m", "single"], 45 * MIB),
        (vec!["-O", bgt, "-m", "single", "-d", "dup"], 300 * MIB),
        (vec!["-O", bgt, "-d", "dup"], 300 * MIB),
        (vec!["-O", bgt, "-n", "4096"], 300 * MIB),
        (vec!["-O", bgt, "-n", "65536"], 300 * MIB),
        (vec!["-O", bgt, "--mixed"], 64 * MIB),
        (vec!["-O", bgt, "--mixed", "-m", "dup", "-d", "dup"], 1024 * MIB),
        (vec!["-O", "^block-group-tree", "--mixed"], 200 * MIB),
        (vec!["-O", bgt, "--csum", "xxhash"], 300 * MIB),
        (vec!["-O", bgt, "--csum", "sha256"], 300 * MIB),
        (vec!["-O", bgt, "--csum", "blake2"], 300 * MIB),
    ]
}

fn make(path: &Path, options: &[&str], size: u64) {
    let mut args =
        args!["mkfs", "--force", "--size", size.to_string(), "-L", "same", "-U", UUID].to_vec();
    args.extend(options.iter().map(Into::into));
    args.push(path.into());
    larder(args).ok();
}

/// With `--nodiscard` a file keeps all its disk space, whatever was in it; else it is sparse
/// afterwards.
#[test]
fn a_file_keeps_its_disk_space_if_asked() {
    use std::os::unix::fs::MetadataExt;
    if !need(&[Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let path = dir.path().join("full.img");
    let size = 300 * MIB;
    let allocated = || std::fs::metadata(&path).unwrap().blocks() * 512;
    for (options, keeps) in [(&["--nodiscard"][..], true), (&["-K", "-M"], true), (&[], false)] {
        // An old file system with bytes of its own everywhere, its superblocks among them.
        std::fs::write(&path, vec![0xa5; usize::try_from(size).unwrap()]).unwrap();
        make(&path, &["--nodiscard", "-O", "^block-group-tree"], size);
        assert!(allocated() >= size, "{} of {size} bytes are left", allocated());
        make(&path, options, size);
        if keeps {
            assert!(allocated() >= size, "{options:?}: {} of {size} bytes are left", allocated());
        } else {
            assert!(allocated() < size / 2, "{options:?}: {} bytes are allocated", allocated());
        }
        btrfs_check(&path, true).assert_clean(&format!("{options:?}"));
    }
}

/// The lines of a superblock dump that have to be equal. Not so: generations, addresses of roots,
/// random uuids, and what depends on them.
fn comparable_super(path: &Path) -> Vec<String> {
    let text = btrfs(&["inspect-internal", "dump-super", "-f", path.to_str().unwrap()]).unwrap();
    let differs = [
        "csum\t",
        "generation",
        "root\t",
        "chunk_root",
        "dev_item.uuid",
        "dev_uuid",
        "superblock:",
        "metadata_uuid",
        "backup",
        "csum_root",
        "log_root",
        // The first system group of mkfs.btrfs carries other values in fields that mean nothing.
        "io_align 4096 io_width",
        "io_align 65536 io_width",
        "sub_stripes",
    ];
    text.lines()
        .take_while(|l| !l.starts_with("backup_roots"))
        .filter(|l| !differs.iter().any(|d| l.contains(d)))
        .map(|l| l.trim().to_owned())
        .collect()
}

/// Keys of a tree's items and their sizes, addresses of tree blocks left out.
fn shape(path: &Path, tree: &str) -> BTreeSet<String> {
    let text = dump_tree(path, &["-t", tree]).unwrap();
    text.lines()
        .map(str::trim)
        .filter(|l| l.starts_with("item "))
        .filter_map(|l| {
            let key = l.split_once("key ")?.1;
            let (key, rest) = key.split_once(" itemoff ")?;
            let size = rest.split_once("itemsize ")?.1;
            Some(format!("{key} {size}"))
        })
        // mkfs.btrfs picks other blocks, and leaves records of chunks that it has removed again.
        .filter(|k| {
            !["METADATA_ITEM", "EXTENT_ITEM", "FREE_SPACE", "UUID_KEY"]
                .iter()
                .any(|w| k.contains(w))
        })
        .collect()
}

#[test]
fn the_image_is_what_mkfs_btrfs_would_have_made() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    for (options, size) in variants() {
        make(&ours, &options, size);
        let _ = std::fs::remove_file(&theirs);
        let mut args = vec!["-q", "-L", "same", "-U", UUID];
        args.extend(&options);
        mkfs_btrfs(&theirs, size, &args).unwrap();
        assert_eq!(comparable_super(&ours), comparable_super(&theirs), "{options:?}");
        for tree in ["root", "chunk", "dev", "fs", "csum", "extent", "-9"] {
            let tree = if tree == "-9" { "18446744073709551607" } else { tree };
            assert_eq!(shape(&ours, tree), shape(&theirs, tree), "{options:?}, tree {tree}");
        }
    }
}

#[test]
fn the_kernel_mounts_writes_and_leaves_a_clean_image() {
    if !need(&[Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = scratch();
    let image = dir.path().join("img");
    for (options, size) in variants() {
        make(&image, &options, size);
        let context = format!("{options:?}");
        btrfs_check(&image, true).assert_clean(&context);
        let mount = KernelMount::image(&image, "").unwrap_or_else(|e| panic!("{context}: {e}"));
        std::fs::write(mount.join("small"), b"hello").unwrap();
        std::fs::write(mount.join("large"), vec![0x5a; 3 << 20]).unwrap();
        for i in 0..200 {
            std::fs::write(mount.join(format!("many-{i}")), vec![i as u8; 3000]).unwrap();
        }
        mount.sync().unwrap();
        std::fs::remove_file(mount.join("many-7")).unwrap();
        mount.unmount_clean().unwrap_or_else(|e| panic!("{context}: {e}"));
        btrfs_check(&image, true).assert_clean(&context);
        let mount = KernelMount::image(&image, "ro").unwrap();
        assert_eq!(std::fs::read(mount.join("small")).unwrap(), b"hello");
        assert_eq!(std::fs::read(mount.join("large")).unwrap(), vec![0x5a; 3 << 20]);
        assert!(!mount.join("many-7").exists());
        mount.unmount_clean().unwrap();
    }
}
