//! A short share of `make fill`: threads that fill, empty and refill a small file system with
//! everything, and what must hold meanwhile and afterwards.

use larder_check::{Options, Severity};
use larder_fs::mkfs::{MkfsOptions, Profile, mkfs};
use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::fill::{Done, EngineDisk, Plan, run};
use larder_simtest::oracle::{
    Aspects, DeviceSet, Manifest, Need, StdTree, btrfs_check, manifest, need, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn open(path: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(path, OpenMode::Write).expect("open the image");
    let options = OpenOptions { cache_size: 32 << 20, discard: true, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device) as Arc<dyn Device>, options).expect("open")
}

fn check(path: &Path, when: &str) {
    let device: Arc<dyn Device> =
        Arc::new(FileDevice::open(path, OpenMode::Read).expect("an image"));
    let options = Options { data: true, ..Options::default() };
    let report = larder_check::check(&[device], &options, &|_| ()).expect("it can be checked");
    assert!(report.is_clean(), "{when}: {:?}", report.findings);
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(path, true).assert_clean(when);
    }
}

fn idle(fs: &Filesystem, when: &str) {
    let stats = fs.stats();
    let reserved = (stats.data_reserved, stats.metadata_reserved, stats.delayed_bytes);
    assert_eq!(reserved, (0, 0, 0), "{when}: reserved although nothing runs");
    assert_eq!(stats.read_only, None, "{when}");
}

fn fill(metadata: Profile, seed: u64) {
    let dir = scratch();
    let path = dir.path().join("fill.img");
    let device = FileDevice::create(&path, 256 << 20).expect("create");
    mkfs(&device, &MkfsOptions { metadata: Some(metadata), ..MkfsOptions::default() })
        .expect("mkfs");
    drop(device);
    fill_and_empty(&|| open(&path), &|when| check(&path, when), seed);
}

fn fill_and_empty(open: &dyn Fn() -> Arc<Filesystem>, check: &dyn Fn(&str), seed: u64) {
    let disk = EngineDisk(open());
    let before = disk.0.info().bytes_used;
    let plan = Plan { threads: 16, time: Duration::from_secs(4), seed, largest: 2 << 20 };
    let done = Done::default();
    let left = run(&disk, &plan, &done)
        .unwrap_or_else(|e| panic!("seed {seed}: {e}; {:?}", disk.0.stats()));
    let reclaim = disk.0.stats().reclaim;
    println!("{done:?} {reclaim:?}");
    assert!(
        reclaim.excess_bytes <= (1 << 20) + 8192,
        "a piece of a file more than asked for: {reclaim:?}"
    );
    assert!(done.full.load(Ordering::Relaxed) >= 16, "the disk was not full: {done:?}");
    idle(&disk.0, "full");
    disk.0.close().expect("close");
    drop(disk);
    check("full");
    let disk = EngineDisk(open());
    left.compare(&disk, &done).expect("what was accepted is there");
    left.delete(&disk).expect("deleting works");
    for _ in 0..2 {
        disk.0.sync().expect("sync");
    }
    idle(&disk.0, "emptied");
    let after = disk.0.info().bytes_used;
    assert!(
        after <= before + (1 << 20),
        "{before} bytes used at first, {after} after deleting everything"
    );
    disk.0.close().expect("close");
    drop(disk);
    check("emptied");
}

#[test]
fn single() {
    fill(Profile::Single, 1);
}

#[test]
fn dup() {
    fill(Profile::Dup, 2);
}

/// Rows hold back what is free in them, of metadata as well, and no commit runs out of space.
#[test]
fn parity() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let set = DeviceSet::make(dir.path(), &[224 << 20; 3], &["-d", "raid5", "-m", "raid5"]);
    let set = set.expect("mkfs");
    let devices = |mode| {
        let open = move |path| Arc::new(FileDevice::open(path, mode).unwrap()) as Arc<dyn Device>;
        set.images().iter().map(open).collect::<Vec<_>>()
    };
    let open = || {
        let options = OpenOptions { cache_size: 32 << 20, discard: true, ..OpenOptions::default() };
        Filesystem::open_devices(devices(OpenMode::Write), options).expect("open")
    };
    let check = |when: &str| {
        let options = Options { data: true, ..Options::default() };
        let report = larder_check::check(&devices(OpenMode::Read), &options, &|_| ()).unwrap();
        let errors = report.findings.iter().filter(|f| f.kind.severity() == Severity::Error);
        assert_eq!(errors.map(|f| format!("{f:?}")).collect::<Vec<_>>(), [""; 0], "{when}");
        assert!(set.check_by_progs(false).unwrap().is_clean(), "{when}");
        linux_reads_all_without_any_one(&set, when);
    };
    fill_and_empty(&open, &check, 3);
}

/// A full file system cannot be scrubbed, so Linux reads it by its parity.
fn linux_reads_all_without_any_one(set: &DeviceSet, when: &str) {
    let whole = shown_by_linux(set, "ro");
    for lost in 1..=set.images().len() {
        let shown = shown_by_linux(&DeviceSet::of(set.without(&[lost])), "ro,degraded");
        let differences = whole.differences(&shown, Aspects::same_image());
        assert_eq!(differences, [], "{when}, without device {lost}");
    }
}

fn shown_by_linux(set: &DeviceSet, options: &str) -> Manifest {
    let mount = set.mount(options).expect("Linux mounts it");
    let shown = manifest(&StdTree::new(mount.path())).expect("Linux reads it");
    mount.unmount().expect("it is unmounted");
    shown
}
