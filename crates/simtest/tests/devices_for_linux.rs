//! File systems on several devices that Larder writes: Linux finds nothing wrong, and what was
//! written, and goes on.

use larder_check::Severity;
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, Fixture, Manifest, Need, StdTree, manifest, need, populate,
    scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, and devices.
const KINDS: [(&str, &str, usize); 8] = [
    ("single", "raid1", 2),
    ("single", "dup", 2),
    ("raid0", "raid0", 3),
    ("raid1", "raid1", 3),
    ("raid1c3", "raid1c3", 4),
    ("raid1c4", "raid1c4", 4),
    ("raid10", "raid10", 5),
    ("raid0", "raid1c3", 3),
];

fn open(set: &DeviceSet) -> Arc<Filesystem> {
    let device =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Write).unwrap()) };
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(set.images().iter().map(device).collect(), options).unwrap()
}

/// Files of many sizes, of which some are synced, some deleted, and more than one chunk can hold.
fn write_much(fs: &Filesystem) {
    let root = fs.root();
    let new =
        |kind| NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    let dir = fs.create(root, b"larder", &new(FileKind::Directory)).unwrap().id;
    let mut random = fastrand::Rng::with_seed(4);
    for n in 0..120usize {
        let name = format!("file-{n}").into_bytes();
        let file = fs.create(dir, &name, &new(FileKind::Regular)).unwrap().id;
        let mut data = vec![0; random.usize(0..2 << 20)];
        random.fill(&mut data);
        fs.write(file, random.u64(0..9000), &data).unwrap();
        match n % 10 {
            0 => fs.fsync(file, false).unwrap(),
            1 => fs.unlink(dir, &name).unwrap(),
            5 => fs.sync().unwrap(),
            _ => {}
        }
    }
    fs.snapshot(root.subvol, root, b"kept", true).unwrap();
    fs.write(fs.lookup(dir, b"file-2").unwrap().id, 100, &[9; 300_000]).unwrap();
}

fn shown_by_linux(set: &DeviceSet) -> Manifest {
    let mount = set.mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    shown
}

fn is_sound(set: &DeviceSet, name: &str) {
    let options = larder_check::Options { data: true, ..Default::default() };
    let open =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Read).unwrap()) };
    let devices: Vec<_> = set.images().iter().map(open).collect();
    let ours = larder_check::check(&devices, &options, &|_| {}).unwrap();
    // mkfs.btrfs leaves records of free space behind, of chunks that it has removed.
    let errors = ours.findings.iter().filter(|f| f.kind.severity() == Severity::Error);
    let errors: Vec<_> = errors.collect();
    assert!(errors.is_empty(), "{name}: {errors:?}");
    let theirs = set.check().unwrap();
    assert!(theirs.is_clean(), "{name}: {theirs:?}");
}

#[test]
fn linux_goes_on_with_every_profile() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, devices) in KINDS {
        let name = format!("{data}/{metadata} on {devices}");
        let dir = scratch();
        let sizes: Vec<u64> = (0..devices as u64).map(|n| (384 + 32 * n) * MIB).collect();
        let set = DeviceSet::make(dir.path(), &sizes, &["-d", data, "-m", metadata]).unwrap();
        let fs = open(&set);
        write_much(&fs);
        let ours = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);
        is_sound(&set, &name);
        let differences = ours.differences(&shown_by_linux(&set), Aspects::same_image());
        assert_eq!(differences, [], "{name}");
        let mount = set.mount("").unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.sync().unwrap();
        mount.unmount_clean().unwrap();
        is_sound(&set, &name);
        let fs = open(&set);
        let again = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);
        let differences = shown_by_linux(&set).differences(&again, Aspects::same_image());
        assert_eq!(differences, [], "{name}");
    }
}
