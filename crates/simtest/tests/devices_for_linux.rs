//! File systems on several devices that Larder writes: Linux finds nothing wrong, and what was
//! written, and goes on.

use larder_check::Severity;
use larder_format::Physical;
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, Fixture, Manifest, Need, StdTree, manifest, need, populate,
    scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// A device that can be made to fail.
#[derive(Debug)]
struct Fragile {
    device: FileDevice,
    fails: AtomicBool,
}

impl Fragile {
    fn works(&self) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) { Err(io::Error::other("gone")) } else { Ok(()) }
    }
}

impl Device for Fragile {
    fn name(&self) -> String {
        self.device.name()
    }
    fn size(&self) -> u64 {
        self.device.size()
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.works()?;
        self.device.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.works()?;
        self.device.write_at(at, data)
    }
    fn flush(&self) -> io::Result<()> {
        self.works()?;
        self.device.flush()
    }
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
    let second =
        Arc::new(Fragile { device: device(&set.images()[1]), fails: AtomicBool::new(false) });
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
    second.fails.store(true, Ordering::Relaxed);
    write_much(&fs);
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
