//! What is free on several devices: statfs(2) of Larder beside that of Linux, for every profile. Of
//! mirrors on more devices than there are copies, Linux promises less than can be written. What
//! Larder promises is tried.

use larder_fs::{Fallocate, FileKind, Filesystem, InodeId, NewInode, OpenOptions};
use larder_simtest::oracle::{DeviceSet, Need, need, scratch};
use larder_volume::{Device, FileDevice, OpenMode};
use std::sync::Arc;

const NEEDS: [Need; 2] = [Need::MkfsBtrfs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, and MiB of each device.
const KINDS: [(&str, &str, &[u64]); 14] = [
    ("single", "raid1", &[400, 900]),
    ("dup", "dup", &[400, 900]),
    ("raid0", "raid1", &[400, 900]),
    ("raid0", "raid1", &[400, 600, 1200]),
    ("raid1", "raid1", &[400, 900]),
    ("raid1", "raid1", &[400, 600, 1200]),
    ("raid1", "raid1", &[500, 500, 500]),
    ("raid1c3", "raid1c3", &[400, 600, 800, 1200]),
    ("raid1c4", "raid1c4", &[400, 600, 800, 900, 1200]),
    ("raid10", "raid10", &[400, 600, 800, 1200]),
    ("raid5", "raid1", &[400, 600, 1200]),
    ("raid5", "raid5", &[400, 600, 800, 1200]),
    ("raid6", "raid1c3", &[400, 600, 800]),
    ("raid6", "raid6", &[400, 600, 800, 1200]),
];

/// Bytes in all, and bytes that can be written.
#[derive(Clone, Copy, Debug)]
struct Figures {
    total: u64,
    available: u64,
}

fn of_linux(set: &DeviceSet) -> Figures {
    let mount = set.mount("").unwrap();
    std::fs::write(mount.join("file"), vec![7; 30 << 20]).unwrap();
    mount.sync().unwrap();
    let stat = rustix::fs::statvfs(mount.path()).unwrap();
    mount.unmount().unwrap();
    Figures { total: stat.f_blocks * stat.f_frsize, available: stat.f_bavail * stat.f_frsize }
}

fn open(set: &DeviceSet, mode: OpenMode) -> Arc<Filesystem> {
    let device = |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, mode).unwrap()) };
    let read_only = mode == OpenMode::Read;
    let options = OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(set.images().iter().map(device).collect(), options).unwrap()
}

fn of_larder(set: &DeviceSet) -> Figures {
    let fs = open(set, OpenMode::Read);
    let stat = fs.statfs().unwrap();
    fs.close().unwrap();
    Figures { total: stat.total, available: stat.available }
}

/// Takes pieces of a file, from an offset on, until there is no space. Returns where that was.
fn fill(from: u64, piece: usize, take: impl Fn(u64, u64) -> bool) -> u64 {
    (from..).step_by(piece).find(|at| !take(*at, piece as u64)).unwrap()
}

/// Bytes that files can have until there is no space. All but the first 100 MiB are preallocated,
/// which takes the same space and writes nothing.
fn filled(set: &DeviceSet) -> u64 {
    let fs = open(set, OpenMode::Write);
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    let file: InodeId = fs.create(fs.root(), b"all", &new).unwrap().id;
    let bytes = vec![3; 4 << 20];
    let write = |at, len: u64| at < 100 * MIB && fs.write(file, at, &bytes[..len as usize]).is_ok();
    let how = Fallocate::Allocate { keep_size: false };
    let allocate = |at, len| fs.fallocate(file.at(at), len, how).is_ok();
    let written = fill(0, 4 << 20, write);
    let done = fill(fill(written, 4 << 20, allocate), 64 << 10, allocate);
    fs.sync().unwrap();
    fs.close().unwrap();
    done
}

/// Can as much be written as was promised, but for a twentieth?
fn try_promise(set: &DeviceSet, promised: u64, what: &str) {
    let done = filled(set);
    println!("{what}: {} MiB promised, {} MiB fit", promised / MIB, done / MIB);
    assert!(done.abs_diff(promised) <= promised / 20, "{what}: {done} of {promised}");
}

/// Are two numbers of bytes the same but for a chunk's rounding and what is kept in reserve?
fn are_about_the_same(both: [u64; 2], of: Figures) -> bool {
    both[0].abs_diff(both[1]) <= of.total / 20 + 64 * MIB
}

#[test]
fn linux_says_the_same_of_unequal_devices() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, sizes) in KINDS {
        let dir = scratch();
        let bytes: Vec<u64> = sizes.iter().map(|mib| mib * MIB).collect();
        let set = DeviceSet::make(dir.path(), &bytes, &["-d", data, "-m", metadata]).unwrap();
        let (linux, larder) = (of_linux(&set), of_larder(&set));
        let mib = |f: Figures| (f.total / MIB, f.available / MIB);
        let line = format!(
            "{data}/{metadata} {sizes:?}: Linux {:?}, Larder {:?}",
            mib(linux),
            mib(larder)
        );
        println!("{line}");
        assert!(are_about_the_same([linux.total, larder.total], linux), "{line}");
        let is_mirrored_or_raid10 = matches!(data, "raid1" | "raid1c3" | "raid1c4" | "raid10");
        let available = [linux.available, larder.available];
        assert!(are_about_the_same(available, linux) || is_mirrored_or_raid10, "{line}");
        try_promise(&set, larder.available, &format!("{data}/{metadata} {sizes:?}"));
    }
}

/// MiB of devices, of which so many are taken as there are to be.
const SIZES: [[u64; 5]; 3] = [[500; 5], [300, 500, 700, 900, 1300], [1300, 400, 400, 400, 400]];
const PROFILES: [(&str, usize); 8] = [
    ("single", 2),
    ("raid0", 2),
    ("raid1", 2),
    ("raid10", 2),
    ("raid5", 2),
    ("raid6", 3),
    ("raid1c3", 3),
    ("raid1c4", 4),
];

#[test]
fn what_is_promised_fits() {
    if !need(&NEEDS) {
        return;
    }
    for count in 2..=5 {
        for sizes in SIZES.iter().map(|sizes| &sizes[..count]) {
            let fits = |(_, least): &&(&str, usize)| *least <= count;
            for (profile, _) in PROFILES.iter().filter(fits) {
                let dir = scratch();
                let bytes: Vec<u64> = sizes.iter().map(|mib| mib * MIB).collect();
                let args = ["-d", profile, "-m", "raid1"];
                let set = DeviceSet::make(dir.path(), &bytes, &args).unwrap();
                let promised = of_larder(&set).available;
                try_promise(&set, promised, &format!("{profile} {sizes:?}"));
            }
        }
    }
}
