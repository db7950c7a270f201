//! Trims beside Linux: the same ranges of the same images, the same bytes, the same refusals.

use larder_fs::{Error, FileKind, Filesystem, NewInode, OpenOptions, TrimRange};
use larder_fuse::control;
use larder_simtest::oracle::{
    KernelMount, Need, btrfs_check, copy_image, dump_tree, mkfs_btrfs, need, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 1 << 30;
/// Not a whole number of anything but sectors.
const ODD: u64 = SIZE + 12 * 1024;

/// An image on which Linux has written and deleted, so that free space lies between files.
fn make(path: &Path, options: &[&str]) {
    mkfs_btrfs(path, ODD, options).expect("mkfs.btrfs");
    let mount = KernelMount::image(path, "").expect("the kernel mounts it");
    for i in 0..40u64 {
        let len = usize::try_from(4096 + i * i * 700).expect("small");
        std::fs::write(mount.join(format!("f{i}")), vec![i as u8; len]).expect("write");
        if i % 8 == 0 {
            mount.sync().expect("sync");
        }
    }
    for i in (0..40).step_by(3) {
        std::fs::remove_file(mount.join(format!("f{i}"))).expect("remove");
    }
    mount.unmount_clean().expect("unmount");
}

fn open(path: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(path, OpenMode::Write).expect("open the image");
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device) as Arc<dyn Device>, options).expect("open")
}

/// What a trim came to: bytes and shortest run, or `None` where it was refused with `EINVAL`.
type Answer = Option<(u64, u64)>;

fn linux(mount: &KernelMount, range: TrimRange) -> Answer {
    match control::trim(mount.path(), range) {
        Ok(t) => Some((t.bytes, t.min_len)),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => None,
        Err(e) => panic!("{range:?}: {e}"),
    }
}
fn ours(fs: &Filesystem, range: TrimRange) -> Answer {
    match fs.trim(range) {
        Ok(t) => Some((t.bytes, t.min_len)),
        Err(Error::Invalid(_)) => None,
        Err(e) => panic!("{range:?}: {e}"),
    }
}

/// First addresses and lengths of the chunks, as `btrfs inspect-internal` prints them.
fn chunks(path: &Path) -> Vec<(u64, u64)> {
    let text = dump_tree(path, &["-t", "chunk"]).expect("dump");
    let mut starts = Vec::new();
    let mut lengths = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some((_, rest)) = line.split_once("FIRST_CHUNK_TREE CHUNK_ITEM ") {
            starts.push(rest.split(')').next().and_then(|n| n.parse().ok()).expect("an address"));
        } else if let Some(rest) = line.strip_prefix("length ") {
            lengths.push(rest.split(' ').next().and_then(|n| n.parse().ok()).expect("a length"));
        }
    }
    starts.into_iter().zip(lengths).collect()
}

fn ranges(chunks: &[(u64, u64)]) -> Vec<(u64, u64, u64)> {
    let all = u64::MAX;
    let (first, length) = chunks[0];
    let (last, _) = *chunks.last().expect("chunks");
    vec![
        (0, all, 0),
        // None of these begins behind the end: addresses are logical.
        (ODD, all, 0),
        (1000 * ODD, all, 0),
        (1000 * ODD, MIB, 0),
        (all - 1, all, 0),
        (all, all, 0),
        (all, MIB, 0),
        // Where a range that is short is refused.
        (0, 0, 0),
        (0, 4095, 0),
        (0, 4096, 0),
        (MIB, MIB, 0),
        // In a block group, from its first address and from behind it, to its end and not.
        (first, length, 0),
        (first, length + 1, 0),
        (first, length / 2, 0),
        (first + 1, all, 0),
        (first + 4096, length / 2, 0),
        (last, all, 0),
        (1, last, 0),
        // Bounds within sectors.
        (first, 4097, 0),
        (first, length / 2 + 511, 4096),
        (first, length - 1, 0),
        // Runs that are too short.
        (0, all, 8192),
        (0, all, 65536),
        (0, all, MIB),
        (0, all, MIB + 1),
        (0, all, SIZE),
        (0, all, all),
        (first, length / 2, length / 2),
        (first, length / 2, length / 2 + 1),
    ]
}

#[test]
fn the_same_ranges_come_to_the_same() {
    if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let [image, theirs, mine] = ["image", "theirs", "mine"].map(|name| dir.path().join(name));
    for options in [&["-q"][..], &["-q", "-m", "single", "-n", "65536"], &["-q", "--mixed"]] {
        make(&image, options);
        for (start, len, min_len) in ranges(&chunks(&image)) {
            let range = TrimRange { start, len, min_len };
            copy_image(&image, &theirs).expect("copy");
            copy_image(&image, &mine).expect("copy");
            let mount = KernelMount::image(&theirs, "nodiscard").expect("mount");
            let expected = linux(&mount, range);
            mount.unmount_clean().expect("unmount");
            let fs = open(&mine);
            assert_eq!(ours(&fs, range), expected, "{options:?}: {range:?}");
            fs.close().expect("close");
        }
        btrfs_check(&mine, true).assert_clean("trimmed");
    }
}

/// Unallocated space is discarded once, and again if a chunk lay there meanwhile.
#[test]
fn unallocated_space_is_discarded_once() {
    if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let [theirs, mine] = ["theirs", "mine"].map(|name| dir.path().join(name));
    make(&theirs, &["-q"]);
    copy_image(&theirs, &mine).expect("copy");
    // A range of nothing but unallocated space; then what the block groups have, too.
    let steps = [
        TrimRange { start: MIB, len: MIB, min_len: 0 },
        TrimRange::default(),
        TrimRange::default(),
    ];
    let mount = KernelMount::image(&theirs, "nodiscard").expect("mount");
    let expected = steps.map(|range| linux(&mount, range));
    let fs = open(&mine);
    let got = steps.map(|range| ours(&fs, range));
    assert_eq!(got, expected);
    assert!(got[0] > got[1] && got[1] == got[2], "{got:?}");
    // A file that needs a chunk takes it from there; the rest stays told.
    let data = vec![7; 200 << 20];
    std::fs::write(mount.join("large"), &data).expect("write");
    mount.sync().expect("sync");
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: &[],
        xattrs: &[],
    };
    let id = fs.create(fs.root(), b"large", &new).expect("create").id;
    fs.write(id, 0, &data).expect("write");
    fs.sync().expect("sync");
    let only_unallocated = steps[0];
    assert_eq!(
        [linux(&mount, only_unallocated), ours(&fs, only_unallocated)],
        [Some((0, 4096)); 2]
    );
    mount.unmount_clean().expect("unmount");
    fs.close().expect("close");
}
