//! File systems on several devices that Larder writes: Linux finds nothing wrong, and what was
//! written, and goes on.

use larder_check::Severity;
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::fragile::{Fragile, Refuses};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, Fixture, Manifest, Need, StdTree, manifest, need, populate,
    scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, and devices.
type Kind = (&'static str, &'static str, usize);

const KINDS: [Kind; 8] = [
    ("single", "raid1", 2),
    ("single", "dup", 2),
    ("raid0", "raid0", 3),
    ("raid1", "raid1", 3),
    ("raid1c3", "raid1c3", 4),
    ("raid1c4", "raid1c4", 4),
    ("raid10", "raid10", 5),
    ("raid0", "raid1c3", 3),
];

/// The same, with parity.
const WITH_PARITY: [Kind; 6] = [
    ("raid5", "raid1", 3),
    ("raid5", "raid5", 4),
    ("raid6", "raid6", 5),
    ("raid5", "raid6", 6),
    ("raid5", "raid5", 2),
    ("raid6", "raid6", 3),
];

/// `btrfs check` takes the parity of these for something else, on Linux's own images as well. The
/// kernel's scrub reads it.
const MISREAD: &str = "raid5/raid5 on 2";

fn open(set: &DeviceSet) -> Arc<Filesystem> {
    let device =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Write).unwrap()) };
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(set.images().iter().map(device).collect(), options).unwrap()
}

/// Files of many sizes, of which some are synced, some deleted, and more than one chunk can hold.
fn write_much(fs: &Filesystem, name: &str, files: usize) {
    let root = fs.root();
    let new =
        |kind| NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    let dir = fs.create(root, name.as_bytes(), &new(FileKind::Directory)).unwrap().id;
    let mut random = fastrand::Rng::with_seed(4);
    for n in 0..files {
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
    fs.snapshot(root.subvol, root, format!("kept-{name}").as_bytes(), true).unwrap();
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
    if name.starts_with(MISREAD) {
        return;
    }
    let theirs = set.check().unwrap();
    assert!(theirs.is_clean(), "{name}: {theirs:?}");
}

/// The second of two mirrors fails for good in the midst of the work. Nothing is lost, and the
/// device is recognised when it comes back.
#[test]
fn the_work_goes_on_without_a_mirror() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let sizes = [384 * MIB; 2];
    let set = DeviceSet::make(dir.path(), &sizes, &["-d", "raid1", "-m", "raid1"]).unwrap();
    let device = |path| FileDevice::open(path, OpenMode::Write).unwrap();
    let second = Fragile::open(&set.images()[1]);
    let devices: Vec<Arc<dyn Device>> =
        vec![Arc::new(device(&set.images()[0])), Arc::clone(&second) as Arc<dyn Device>];
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(devices, options).unwrap();
    let regular = FileKind::Regular;
    let new =
        NewInode { kind: regular, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    let before = fs.create(fs.root(), b"before", &new).unwrap().id;
    fs.write(before, 0, &[1; 100_000]).unwrap();
    fs.sync().unwrap();
    second.refuse(Refuses::Everything);
    write_much(&fs, "larder", 120);
    let ours = manifest(&EngineTree(&fs)).unwrap();
    fs.close().unwrap();
    drop((fs, second));

    // The first alone has everything, for Linux, too.
    let rest = DeviceSet::of(set.images()[..1].to_vec());
    let mount = rest.mount("ro,degraded").unwrap();
    let linux = manifest(&StdTree::new(mount.path())).unwrap();
    // Not "clean": the kernel warns of the missing device.
    mount.unmount().unwrap();
    assert_eq!(ours.differences(&linux, Aspects::same_image()), []);
    // With the second one, which is older, what is read is still the newest.
    let devices = set.images().iter().map(|path| Arc::new(device(path)) as Arc<dyn Device>);
    let options = OpenOptions { read_only: true, commit_interval: None, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(devices.collect(), options).unwrap();
    let stale: Vec<u64> = fs.info().stale_devices.iter().map(|s| s.id.0).collect();
    assert_eq!(stale, [2]);
    let again = manifest(&EngineTree(&fs)).unwrap();
    fs.close().unwrap();
    assert_eq!(ours.differences(&again, Aspects::same_image()), []);
}

/// What Larder shows of the devices that are left.
fn shown_without(set: &DeviceSet, lost: &[usize]) -> Manifest {
    let left = set.without(lost);
    let open =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Read).unwrap()) };
    let options = OpenOptions {
        read_only: true,
        degraded: !lost.is_empty(),
        commit_interval: None,
        ..OpenOptions::default()
    };
    let fs = Filesystem::open_devices(left.iter().map(open).collect(), options).unwrap();
    let shown = manifest(&EngineTree(&fs)).unwrap();
    fs.close().unwrap();
    shown
}

/// The kernel reads everything, and finds nothing to mend.
fn is_scrubbed(set: &DeviceSet, name: &str) {
    assert_eq!(set.scrub().unwrap(), [""; 0], "{name}");
}

fn is_the_same(one: &Manifest, other: &Manifest, name: &str) {
    assert_eq!(one.differences(other, Aspects::same_image()), [], "{name}");
}

/// Larder writes, Linux finds nothing wrong and goes on.
fn is_exchanged(set: &DeviceSet, name: &str, files: usize) {
    let fs = open(set);
    write_much(&fs, "larder", files);
    let ours = manifest(&EngineTree(&fs)).unwrap();
    fs.close().unwrap();
    drop(fs);
    is_sound(set, name);
    is_the_same(&ours, &shown_by_linux(set), name);
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.sync().unwrap();
    mount.unmount_clean().unwrap();
    is_sound(set, name);
    let fs = open(set);
    let again = manifest(&EngineTree(&fs)).unwrap();
    fs.close().unwrap();
    is_the_same(&shown_by_linux(set), &again, name);
}

fn made((data, metadata, devices): Kind, dir: &std::path::Path) -> (DeviceSet, String) {
    let sizes: Vec<u64> = (0..devices as u64).map(|n| (384 + 32 * n) * MIB).collect();
    let set = DeviceSet::make(dir, &sizes, &["-d", data, "-m", metadata]).unwrap();
    (set, format!("{data}/{metadata} on {devices}"))
}

#[test]
fn linux_goes_on_with_every_profile() {
    if !need(&NEEDS) {
        return;
    }
    for kind in KINDS {
        let dir = scratch();
        let (set, name) = made(kind, dir.path());
        is_exchanged(&set, &name, 120);
    }
}

/// Larder goes on where Linux left rows partly full. Linux's scrub finds nothing, and without a
/// device, or two, both show everything.
#[test]
fn linux_goes_on_with_parity() {
    if !need(&NEEDS) {
        return;
    }
    for kind in WITH_PARITY {
        let dir = scratch();
        let (set, name) = made(kind, dir.path());
        is_exchanged(&set, &name, 24);
        let fs = open(&set);
        write_much(&fs, "again", 24);
        let ours = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);
        is_sound(&set, &name);
        is_scrubbed(&set, &name);
        is_the_same(&ours, &shown_by_linux(&set), &name);
        let two = kind.0 == "raid6";
        let lost: &[usize] = if two { &[1, 3] } else { &[2] };
        is_the_same(&ours, &shown_without(&set, lost), &name);
        let left = DeviceSet::of(set.without(lost));
        let mount = left.mount("ro,degraded").unwrap();
        let linux = manifest(&StdTree::new(mount.path())).unwrap();
        mount.unmount().unwrap();
        is_the_same(&ours, &linux, &name);
    }
}
