//! Moving everything, beside the kernel's balance of the same image: one extent with very many
//! users, a subvolume with many snapshots, a tree of files with twenty. Afterwards `btrfs check`
//! finds nothing wrong, and nothing that was shared is there twice.
//!
//! `LARDER_SCALE=10` takes ten times as many, and `--nocapture` shows what each side took. With
//! `LARDER_TREE=DIR` the tree of files is a copy of that directory.

use larder_format::items::BlockGroupFlags;
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, OpenOptions};
use larder_simtest::by_hand::{new, put};
use larder_simtest::oracle::{
    KernelMount, LoopDevice, LoopOptions, Need, btrfs, btrfs_check, copy_image, need, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the images.
const SIZE: u64 = 4 << 30;

fn scale() -> usize {
    std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn open(image: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn file(fs: &Filesystem, dir: InodeId, name: &str, data: &[u8]) -> InodeId {
    put(fs, dir, name, data).unwrap()
}

fn bytes(n: usize, len: usize) -> Vec<u8> {
    let mut state = n as u64 | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Highest use of memory of this process since the last call, in MiB.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    let kib: u64 = line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    fs::write("/proc/self/clear_refs", "5").unwrap();
    kib >> 10
}

/// Bytes of data and of metadata that are used.
fn used(fs: &Filesystem) -> [u64; 2] {
    let groups = fs.block_groups();
    [BlockGroupFlags::DATA, BlockGroupFlags::METADATA]
        .map(|kind| groups.iter().filter(|g| g.flags.contains(kind)).map(|g| g.used).sum())
}

/// Moves all block groups. Returns how long that took, and how many batches there were.
fn relocate_all(image: &Path) -> (Duration, usize, u64) {
    let fs = open(image);
    let before = used(&fs);
    peak_memory();
    let (begin, mut batches) = (Instant::now(), 0);
    for group in fs.block_groups() {
        let mut each = |_| {
            batches += 1;
            ControlFlow::Continue(())
        };
        match fs.relocate(group.start, &mut each) {
            Ok(_) | Err(larder_fs::Error::NotFound) => {}
            Err(e) => panic!("{}: {e}", group.start),
        }
    }
    fs.sync().unwrap();
    let (took, memory) = (begin.elapsed(), peak_memory());
    let now = used(&fs);
    assert_eq!(now[0], before[0], "data");
    assert!(now[1] <= before[1] + before[1] / 8 + (1 << 20), "metadata: {before:?} {now:?}");
    fs.close().unwrap();
    (took, batches, memory)
}

/// The kernel moves all block groups of a copy.
fn balance(image: &Path) -> Duration {
    let copy = image.with_extension("kernel");
    copy_image(image, &copy).unwrap();
    let options = LoopOptions { direct_io: true, ..LoopOptions::default() };
    let device = LoopDevice::attach_with(&copy, options).unwrap();
    let mount = KernelMount::device(device, "noatime").unwrap();
    let begin = Instant::now();
    btrfs(&["balance", "start", "--full-balance", mount.path().to_str().unwrap()]).unwrap();
    mount.sync().unwrap();
    let took = begin.elapsed();
    mount.unmount_clean().unwrap();
    fs::remove_file(copy).unwrap();
    took
}

/// Both sides move an image that `fill` has filled.
fn side_by_side(what: &str, fill: impl FnOnce(&Filesystem)) {
    if !need(&[Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let image: PathBuf = dir.path().join("image");
    mkfs(&FileDevice::create(&image, SIZE).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = open(&image);
    fill(&fs);
    fs.close().unwrap();
    drop(fs);
    let kernel =
        (std::env::var_os("LARDER_ALONE").is_none()).then(|| balance(&image).as_secs_f64());
    let (took, batches, memory) = relocate_all(&image);
    println!(
        "{what}: {:.2} s here in {batches} batches, {memory} MiB; {:.2} s by Linux",
        took.as_secs_f64(),
        kernel.unwrap_or(f64::NAN)
    );
    btrfs_check(&image, true).assert_clean(what);
}

#[test]
fn clones_of_one_extent_stay_one_extent() {
    let count = 8000 * scale();
    side_by_side(&format!("{count} clones of one extent"), |fs| {
        let source = file(fs, fs.root(), "source", &bytes(1, 1 << 20));
        fs.sync().unwrap();
        for n in 0..count {
            let to = fs.create(fs.root(), format!("clone {n}").as_bytes(), &new(FileKind::Regular));
            fs.clone_range(source.at(0), to.unwrap().id.at(0), 0).unwrap();
        }
    });
}

/// A subvolume with many files, and so many snapshots of it with changes in between.
fn with_snapshots(fs: &Filesystem, count: usize, fill: impl FnOnce(InodeId)) {
    let root = fs.root();
    let sub = fs.create_subvolume(root, b"sub", &new(FileKind::Directory)).unwrap().id;
    fill(sub);
    fs.sync().unwrap();
    for n in 0..count {
        fs.snapshot(sub.subvol, root, format!("snapshot {n}").as_bytes(), n % 2 == 0).unwrap();
        for k in 0..5 {
            file(fs, sub, &format!("file {}", (n * 7 + k * 13) % 500), &bytes(n + k, 5000));
        }
    }
}

#[test]
fn a_tree_with_many_snapshots_moves_once() {
    let count = 50 * scale();
    side_by_side(&format!("{count} snapshots"), |fs| {
        with_snapshots(fs, count, |sub| {
            for n in 0..2000 {
                file(fs, sub, &format!("file {n}"), &bytes(n, n % 7 * 1500 + 100));
            }
        });
    });
}

fn copy_tree(fs: &Filesystem, from: &Path, to: InodeId) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (kind, name) = (entry.file_type().unwrap(), entry.file_name());
        let name = name.as_encoded_bytes();
        if kind.is_dir() {
            let dir = fs.create(to, name, &new(FileKind::Directory)).unwrap().id;
            copy_tree(fs, &entry.path(), dir);
        } else if kind.is_file() {
            let data = fs::read(entry.path()).unwrap();
            let id = fs.create(to, name, &new(FileKind::Regular)).unwrap().id;
            fs.write(id, 0, &data).unwrap();
        }
    }
}

#[test]
fn a_tree_of_files_with_twenty_snapshots_moves() {
    side_by_side("a tree of files with 20 snapshots", |fs| {
        with_snapshots(fs, 20, |sub| match std::env::var_os("LARDER_TREE") {
            Some(tree) => copy_tree(fs, Path::new(&tree), sub),
            None => (0..3000 * scale()).for_each(|n| {
                file(fs, sub, &format!("file {n}"), &bytes(n, n % 40 * 600));
            }),
        });
    });
}
