//! Replacing devices of file systems that Linux made; going on where Linux stopped, and the other
//! way round.

use larder_format::DeviceId;
use larder_fs::{
    Error, FileKind, Filesystem, NewInode, OpenOptions, ReplaceControl, ReplaceOptions,
    ReplaceSource, ReplaceStatus,
};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, Fixture, KernelMount, LoopDevice, Manifest, Need, StdTree,
    btrfs, copy_image, manifest, need, populate, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode, read_superblock};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Profile of data and of metadata, and devices.
const KINDS: [(&str, &str, usize); 8] = [
    ("single", "dup", 1),
    ("single", "raid1", 2),
    ("raid0", "raid0", 2),
    ("raid1", "raid1", 3),
    ("raid1c3", "raid1c4", 4),
    ("raid10", "raid10", 4),
    ("raid5", "raid5", 3),
    ("raid6", "raid6", 4),
];

fn made_by_linux(dir: &Path, (data, metadata, devices): (&str, &str, usize)) -> DeviceSet {
    let sizes: Vec<u64> = (0..devices as u64).map(|n| (256 + 16 * n) * MIB).collect();
    let set = DeviceSet::make(dir, &sizes, &["-d", data, "-m", metadata]).unwrap();
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    set
}

fn shown_by_linux(images: &[PathBuf]) -> Manifest {
    let mount = DeviceSet::of(images.to_vec()).mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    shown
}

/// Without what these tests have written in the top directory, and the directory itself.
fn as_before(mut shown: Manifest) -> Manifest {
    for name in ["", "of-larder", "of-linux", "meanwhile"] {
        shown.entries.remove(name.as_bytes());
    }
    shown
}

fn target(dir: &Path) -> PathBuf {
    let path = dir.join("target");
    std::fs::File::create(&path).unwrap().set_len(400 * MIB).unwrap();
    path
}

fn device(image: &Path) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image, OpenMode::Write).unwrap())
}

fn open(images: &[PathBuf]) -> Arc<Filesystem> {
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let devices = images.iter().map(|image| device(image)).collect();
    Filesystem::open_devices(devices, options).unwrap()
}

fn of(source: usize) -> ReplaceOptions {
    ReplaceOptions { source: DeviceId(source as u64), read: ReplaceSource::Use }
}

fn write_some(fs: &Filesystem, name: &str) {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    let file = fs.create(fs.root(), name.as_bytes(), &new).unwrap().id;
    fs.write(file, 0, &vec![7; 300_000]).unwrap();
    fs.fsync(file, false).unwrap();
}

/// Linux checks, mounts, scrubs and writes, and checks again.
fn linux_is_content(images: &[PathBuf], name: &str) {
    let set = DeviceSet::of(images.to_vec());
    let two_stripes = name.contains("raid5") && images.len() == 2;
    let report = set.check().unwrap();
    assert!(report.is_clean() || two_stripes, "{name}: {report:?}");
    assert_eq!(set.scrub().unwrap(), [""; 0], "{name}");
    let mount = set.mount("").unwrap();
    std::fs::write(mount.join("of-linux"), vec![3; 1 << 20]).unwrap();
    mount.unmount_clean().unwrap();
    let report = set.check().unwrap();
    assert!(report.is_clean() || two_stripes, "{name}, later: {report:?}");
}

#[test]
fn linux_goes_on_with_what_larder_has_replaced() {
    if !need(&NEEDS) {
        return;
    }
    for kind in KINDS {
        let dir = scratch();
        let name = format!("{kind:?}");
        let set = made_by_linux(dir.path(), kind);
        let shown = shown_by_linux(set.images());
        let source = kind.2.div_ceil(2);
        let target = target(dir.path());
        let fs = open(set.images());
        let control = ReplaceControl::default();
        fs.replace_device(of(source), device(&target), &control).unwrap();
        assert_eq!(control.state().unreadable, 0, "{name}");
        let now = manifest(&EngineTree(&fs)).unwrap();
        let differ = shown.differences(&now, Aspects::same_image());
        assert!(differ.is_empty(), "{name}: {differ:?}");
        write_some(&fs, "of-larder");
        fs.close().unwrap();
        drop(fs);
        let mut images = set.images().to_vec();
        images[source - 1] = target;
        linux_is_content(&images, &name);
        let mount = DeviceSet::of(images).mount("ro").unwrap();
        let path = mount.path().as_os_str();
        let said = btrfs(&["replace".as_ref(), "status".as_ref(), "-1".as_ref(), path]).unwrap();
        assert!(said.contains("finished on") && said.contains("0 write errs"), "{name}: {said}");
        mount.unmount_clean().unwrap();
    }
}

#[test]
fn linux_finishes_what_larder_began() {
    if !need(&NEEDS) {
        return;
    }
    // Of a file system with one device Linux 6.18 does not look at a second one, so it refuses.
    for kind in [KINDS[1], KINDS[3], KINDS[6]] {
        let dir = scratch();
        let name = format!("{kind:?}");
        let set = made_by_linux(dir.path(), kind);
        let shown = shown_by_linux(set.images());
        let target = target(dir.path());
        let fs = open(set.images());
        let control = ReplaceControl::default();
        control.suspend();
        let ended = fs.replace_device(of(1), device(&target), &control);
        assert!(matches!(ended, Err(Error::Busy(_))), "{name}: {ended:?}");
        write_some(&fs, "of-larder");
        fs.close().unwrap();
        drop(fs);
        let mut all = set.images().to_vec();
        all.push(target.clone());
        let mount = DeviceSet::of(all).mount("").unwrap();
        wait_for_linux(&mount, &name);
        mount.unmount_clean().unwrap();
        assert!(read_superblock(&*device(&set.images()[0])).is_err(), "{name}");
        let mut images = set.images().to_vec();
        images[0] = target;
        linux_is_content(&images, &name);
        let now = shown_by_linux(&images);
        let differ = as_before(shown).differences(&as_before(now), Aspects::same_image());
        assert!(differ.is_empty(), "{name}: {differ:?}");
    }
}

fn status(mount: &KernelMount) -> String {
    let path = mount.path().as_os_str();
    btrfs(&["replace".as_ref(), "status".as_ref(), "-1".as_ref(), path]).unwrap()
}

fn wait_for_linux(mount: &KernelMount, name: &str) {
    let until = Instant::now() + PATIENCE;
    loop {
        let said = status(mount);
        if said.contains("finished on") {
            return;
        }
        assert!(Instant::now() < until, "{name}: {said}");
        std::thread::yield_now();
    }
}

/// Linux replaces a device, and is stopped in the midst of it. `None`: it was too quick.
fn stopped_on_linux(dir: &Path, source: usize) -> Option<Vec<PathBuf>> {
    let sizes = [400 * MIB, 400 * MIB];
    let set = DeviceSet::make(dir, &sizes, &["-d", "single", "-m", "raid1"]).unwrap();
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    let mut noise = vec![0; 250 << 20];
    fastrand::Rng::with_seed(3).fill(&mut noise);
    std::fs::write(mount.join("noise"), &noise).unwrap();
    mount.sync().unwrap();
    let target = target(dir);
    let on_loop = LoopDevice::attach(&target).unwrap();
    let path = mount.path().as_os_str();
    let id = source.to_string();
    let words = ["replace".as_ref(), "start".as_ref(), id.as_ref(), on_loop.path().as_os_str()];
    btrfs(&[&words[..], &[path]].concat()).unwrap();
    let until = Instant::now() + PATIENCE;
    while !status(&mount).contains('%') && Instant::now() < until {
        if status(&mount).contains("finished") {
            return None;
        }
    }
    rustix::mount::mount_remount(mount.path(), rustix::mount::MountFlags::RDONLY, c"").unwrap();
    let said = status(&mount);
    if !said.contains("suspended") {
        return None;
    }
    // As a power cut at this moment: Linux would go on with it at once.
    let mut copies = Vec::new();
    for (n, image) in set.images().iter().chain([&target]).enumerate() {
        let copy = dir.join(format!("copy-{n}"));
        copy_image(image, &copy).unwrap();
        copies.push(copy);
    }
    let _ = mount.unmount();
    // Linux would remember it as a device of the file system that the copies are.
    let words = ["device", "scan", "--forget"].map(OsStr::new);
    btrfs(&[&words[..], &[on_loop.path().as_os_str()]].concat()).unwrap();
    Some(copies)
}

#[test]
fn larder_finishes_what_linux_began() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let found = (0..5).find_map(|n| {
        let dir = dir.path().join(n.to_string());
        std::fs::create_dir(&dir).unwrap();
        stopped_on_linux(&dir, 2)
    });
    let images = found.expect("Linux was always quicker");
    // Without the target it cannot go on, and is not written.
    let some = images[..2].iter().map(|image| device(image)).collect();
    let said = Filesystem::open_devices(some, OpenOptions::default()).unwrap_err().to_string();
    assert!(said.contains("device 2 is being replaced"), "{said}");
    let fs = open(&images);
    let before = fs.replacement();
    assert_eq!((before.status, before.source), (ReplaceStatus::Suspended, Some(2)));
    let shown = manifest(&EngineTree(&fs)).unwrap();
    write_some(&fs, "meanwhile");
    let control = ReplaceControl::default();
    fs.resume_replacement(&control).unwrap();
    println!("it went on from {} and copied {}", before.cursor, control.state().copied);
    fs.close().unwrap();
    drop(fs);
    let now = [images[0].clone(), images[2].clone()];
    linux_is_content(&now, "begun by Linux");
    let later = shown_by_linux(&now);
    let differ = as_before(shown).differences(&as_before(later), Aspects::same_image());
    assert!(differ.is_empty(), "{differ:?}");
}

#[test]
fn linux_opens_what_larder_has_given_up() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = made_by_linux(dir.path(), KINDS[1]);
    let target = target(dir.path());
    let fs = open(set.images());
    let control = ReplaceControl::default();
    control.cancel();
    let ended = fs.replace_device(of(2), device(&target), &control);
    assert!(matches!(ended, Err(Error::Busy(_))), "{ended:?}");
    assert_eq!(control.state().status, ReplaceStatus::Canceled);
    fs.close().unwrap();
    drop(fs);
    assert!(read_superblock(&*device(&target)).is_err());
    linux_is_content(set.images(), "given up");
}
