//! Devices that are added, removed and resized: Linux finds nothing wrong, sees the same files, and
//! changes the devices again on top. And the other way round.

use larder_check::Severity;
use larder_format::DeviceId;
use larder_fs::{Clearing, Error, FileKind, Filesystem, NewInode, OpenOptions, Outcome};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, LoopDevice, Manifest, Need, StdTree, btrfs, manifest, need,
    scratch,
};
use larder_volume::{Device, FileDevice, OpenMode, read_superblock};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, and devices.
type Kind = (&'static str, &'static str, usize);

const KINDS: [Kind; 8] = [
    ("single", "dup", 1),
    ("single", "raid1", 2),
    ("raid0", "raid1", 3),
    ("raid1", "raid1", 3),
    ("raid1c3", "raid1c3", 4),
    ("raid10", "raid10", 5),
    ("raid5", "raid1", 4),
    ("raid6", "raid6", 5),
];

fn device(path: &Path) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(path, OpenMode::Write).unwrap())
}

fn open(set: &DeviceSet) -> Arc<Filesystem> {
    let devices = set.images().iter().map(|path| device(path)).collect();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(devices, options).unwrap()
}

fn on(_: Clearing) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Files of many sizes in a directory of this name, and a snapshot of them.
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
            _ => {}
        }
    }
    fs.snapshot(root.subvol, root, format!("kept-{name}").as_bytes(), true).unwrap();
}

fn shown(fs: &Filesystem) -> Manifest {
    manifest(&EngineTree(fs)).unwrap()
}

fn shown_by_linux(set: &DeviceSet) -> Manifest {
    let mount = set.mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    shown
}

fn closed(fs: Arc<Filesystem>) {
    fs.close().unwrap();
}

fn is_same(now: &Manifest, before: &Manifest, what: &str) {
    assert_eq!(now.differences(before, Aspects::same_image()), [], "{what}");
}

fn is_sound(set: &DeviceSet, what: &str) {
    let options = larder_check::Options { data: true, ..Default::default() };
    let open =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Read).unwrap()) };
    let devices: Vec<_> = set.images().iter().map(open).collect();
    let ours = larder_check::check(&devices, &options, &|_| {}).unwrap();
    let errors: Vec<_> =
        ours.findings.iter().filter(|f| f.kind.severity() == Severity::Error).collect();
    assert!(errors.is_empty(), "{what}: {errors:?}");
    let theirs = set.check().unwrap();
    assert!(theirs.is_clean(), "{what}: {theirs:?}");
}

fn sparse(dir: &Path, name: &str, mib: u64) -> PathBuf {
    let path = dir.join(name);
    std::fs::File::create(&path).unwrap().set_len(mib * MIB).unwrap();
    path
}

/// Adds a device, fills it, takes the first one away, and makes the last one smaller and larger
/// again. After each step both sides are content, and the files are the same.
#[test]
fn linux_goes_on_with_devices_that_were_changed_here() {
    if !need(&NEEDS) {
        return;
    }
    let all = std::env::var_os("LARDER_SCALE").is_some();
    for (n, kind) in KINDS.into_iter().enumerate() {
        if all || [0, 1, 3, 6].contains(&n) {
            changed_here(kind);
        }
    }
}

fn changed_here((data, metadata, devices): Kind) {
    let name = format!("{data}/{metadata} on {devices}");
    let scratch = scratch();
    let sizes: Vec<u64> = (0..devices as u64).map(|n| (400 + 64 * n) * MIB).collect();
    let set = DeviceSet::make(scratch.path(), &sizes, &["-d", data, "-m", metadata]).unwrap();
    let more = sparse(scratch.path(), "more", 520);

    let fs = open(&set);
    write_much(&fs, "before", 40);
    let id = fs.add_device(device(&more)).unwrap();
    assert_eq!(id, DeviceId(devices as u64 + 1));
    write_much(&fs, "after", 60);
    let before = shown(&fs);
    closed(fs);
    let images: Vec<PathBuf> = set.images().iter().cloned().chain([more.clone()]).collect();
    let set = DeviceSet::of(images);
    is_sound(&set, &format!("{name}, added"));
    is_same(&shown_by_linux(&set), &before, &name);

    let fs = open(&set);
    let mut calls = Vec::new();
    let outcome = fs.remove_device(DeviceId(1), &mut |how| {
        calls.push(how);
        ControlFlow::Continue(())
    });
    assert_eq!(outcome.unwrap_or_else(|e| panic!("{name}: {e}")), Outcome::Done);
    assert!(calls.iter().all(|c| c.total > 0) && calls.last().unwrap().left == 0, "{calls:?}");
    assert!(read_superblock(&*fs_free(&set.images()[0])).is_err(), "{name}: still a superblock");
    is_same(&shown(&fs), &before, &name);
    closed(fs);
    let set = DeviceSet::of(set.images()[1..].to_vec());
    is_sound(&set, &format!("{name}, removed"));
    is_same(&shown_by_linux(&set), &before, &name);

    let fs = open(&set);
    let size = 500 * MIB + 4096;
    assert_eq!(fs.resize_device(id, size, &mut on).unwrap(), Outcome::Done);
    closed(fs);
    is_sound(&set, &format!("{name}, smaller"));
    let fs = open(&set);
    assert_eq!(fs.devices().last().unwrap().size, size);
    fs.resize_device(id, 520 * MIB, &mut on).unwrap();
    assert_eq!(fs.devices().last().unwrap().size, 520 * MIB);
    write_much(&fs, "last", 5);
    let before = shown(&fs);
    closed(fs);
    is_sound(&set, &format!("{name}, larger"));
    is_same(&shown_by_linux(&set), &before, &name);
    on_top_by_linux(&set, &scratch.path().join("again"), &name);
}

/// The device behind a path, also while the file system has others open.
fn fs_free(path: &Path) -> Arc<dyn Device> {
    Arc::new(FileDevice::open_despite_users(path).unwrap())
}

/// Linux adds a device and removes it, and resizes another.
fn on_top_by_linux(set: &DeviceSet, more: &Path, name: &str) {
    let mount = set.mount("").unwrap();
    let dir = mount.path().to_str().unwrap().to_owned();
    std::fs::write(mount.join("by-linux"), vec![7; 3 << 20]).unwrap();
    let path = sparse(more.parent().unwrap(), "again", 600);
    let again = LoopDevice::attach(&path).unwrap();
    let node = again.path().to_str().unwrap().to_owned();
    let run = |args: &[&str]| btrfs(args).unwrap_or_else(|e| panic!("{name}: {args:?}: {e}"));
    run(&["device", "add", "-f", &node, &dir]);
    std::fs::write(mount.join("by-linux-too"), vec![8; 30 << 20]).unwrap();
    run(&["filesystem", "sync", &dir]);
    run(&["device", "remove", &node, &dir]);
    mount.unmount_clean().unwrap();
    drop(again);
    is_sound(set, &format!("{name}, changed by Linux"));
    let fs = open(set);
    assert_eq!(fs.devices().len(), set.images().len());
    closed(fs);
}

/// What Linux has added and filled leaves here, and the other way round.
#[test]
fn what_linux_added_is_removed_here() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let sizes = [400 * MIB, 450 * MIB];
    let set = DeviceSet::make(scratch.path(), &sizes, &["-d", "raid0", "-m", "raid1"]).unwrap();
    let path = sparse(scratch.path(), "more", 700);
    let mount = set.mount("").unwrap();
    let more = LoopDevice::attach(&path).unwrap();
    let dir = mount.path().to_str().unwrap().to_owned();
    btrfs(&["device", "add", more.path().to_str().unwrap(), &dir]).unwrap();
    for n in 0..40 {
        std::fs::write(mount.join(format!("file {n}")), vec![n as u8; 5 << 20]).unwrap();
    }
    btrfs(&["filesystem", "resize", "2:430M", &dir]).unwrap();
    mount.unmount_clean().unwrap();
    drop(more);
    let all = DeviceSet::of(set.images().iter().cloned().chain([path]).collect());
    let before = shown_by_linux(&all);
    let fs = open(&all);
    assert_eq!(fs.remove_device(DeviceId(3), &mut on).unwrap(), Outcome::Done);
    closed(fs);
    is_sound(&set, "removed here");
    is_same(&shown_by_linux(&set), &before, "removed here");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let sizes = [400 * MIB, 450 * MIB];
    let set = DeviceSet::make(scratch.path(), &sizes, &["-d", "single", "-m", "raid1"]).unwrap();
    let fs = open(&set);
    write_much(&fs, "some", 20);
    let no = |error: Error, words: &str| {
        let text = error.to_string();
        assert!(text.contains(words), "{text}");
    };
    let remove = |id| fs.remove_device(DeviceId(id), &mut on).unwrap_err();
    no(remove(2), "is raid1, which needs 2 devices, and 1 would be left");
    no(remove(7), "there is no device 7; the file system has these: 1, 2");
    let resize = |id, mib| fs.resize_device(DeviceId(id), mib * MIB, &mut on).unwrap_err();
    no(resize(2, 500), "it cannot have 524288000");
    no(resize(1, 3), "cannot have 3145728 bytes");
    no(fs.add_device(device(&sparse(scratch.path(), "tiny", 4))).unwrap_err(), "too few");
    // More than the other device has room for.
    let more = sparse(scratch.path(), "more", 1000);
    let id = fs.add_device(device(&more)).unwrap();
    write_much(&fs, "much", 900);
    let error = fs.remove_device(id, &mut on).unwrap_err();
    assert!(matches!(error, Error::DoesNotFit(_)), "{error}");
    no(error, "device 3 cannot leave: it has");
    // It is a member as before, and takes chunks.
    write_much(&fs, "more", 20);
    let before = shown(&fs);
    closed(fs);
    let set = DeviceSet::of(set.images().iter().cloned().chain([more]).collect());
    is_sound(&set, "refused");
    is_same(&shown_by_linux(&set), &before, "refused");
}

/// An image with gaps everywhere becomes hardly larger than what is stored, and is still a file
/// system in which both sides write and delete.
#[test]
fn a_shrunk_image_is_small_and_linux_works_in_it() {
    if !need(&NEEDS) {
        return;
    }
    let kinds: [&[&str]; 4] = [&[], &["-m", "single"], &["--mixed"], &["-n", "4096", "-d", "dup"]];
    for args in kinds {
        let what = args.join(" ");
        let scratch = scratch();
        let set = DeviceSet::make(scratch.path(), &[1 << 30], args).unwrap();
        let copies = if args.contains(&"dup") { 2 } else { 1 };
        let stored = with_gaps(&set);
        let fs = open(&set);
        let before = shown(&fs);
        let id = DeviceId(fs.devices()[0].id);
        let (size, outcome) = fs.shrink_device(id, &mut on).unwrap();
        assert_eq!(outcome, Outcome::Done);
        let least = fs.smallest_size(id).unwrap();
        println!("{what:?}: {} KiB stored, {} KiB, least {:?}", stored >> 10, size >> 10, least);
        fs.block_groups().iter().for_each(|g| println!("{:?}: {} of {}", g.flags, g.used, g.len));
        // What does not fill its chunk is lost in each copy.
        assert!(size <= least.bytes + copies * 6 * MIB, "{what}: {size} of {least:?}");
        assert!(size <= copies * stored + 48 * MIB, "{what}: {size} for {stored}");
        // Nothing is gained a second time.
        let (again, _) = fs.shrink_device(id, &mut on).unwrap();
        assert!(again <= size && again + MIB >= size, "{what}: {size}, then {again}");
        closed(fs);
        let file = std::fs::File::options().write(true).open(&set.images()[0]).unwrap();
        file.set_len(again).unwrap();
        is_sound(&set, &what);
        is_same(&shown_by_linux(&set), &before, &what);
        works_in_it(&set, &what);
    }
}

/// Linux fills an image and takes most of it away again. Returns the bytes of files that stay.
fn with_gaps(set: &DeviceSet) -> u64 {
    let mount = set.mount("").unwrap();
    let mut random = fastrand::Rng::with_seed(5);
    let mut stored = 0;
    for n in 0..400 {
        let mut data = vec![0; random.usize(4096..2 << 20)];
        random.fill(&mut data);
        std::fs::write(mount.join(format!("file {n}")), &data).unwrap();
        stored += if n % 6 == 0 { data.len() as u64 } else { 0 };
    }
    mount.sync().unwrap();
    let gone = |n: &usize| !n.is_multiple_of(6);
    (0..400)
        .filter(gone)
        .for_each(|n| std::fs::remove_file(mount.join(format!("file {n}"))).unwrap());
    mount.unmount_clean().unwrap();
    stored
}

/// Linux writes into a small image, deletes, and writes again; then it is done here.
fn works_in_it(set: &DeviceSet, what: &str) {
    let mount = set.mount("").unwrap();
    for round in 0..3u8 {
        for n in 0..10 {
            std::fs::write(mount.join(format!("new {n}")), vec![round; 30_000])
                .unwrap_or_else(|e| panic!("{what}: Linux writes: {e}"));
        }
        mount.sync().unwrap_or_else(|e| panic!("{what}: Linux syncs: {e}"));
        std::fs::remove_file(mount.join(format!("new {round}"))).unwrap();
        std::fs::remove_file(mount.join(format!("file {}", round * 6))).unwrap();
    }
    mount.unmount_clean().unwrap();
    is_sound(set, &format!("{what}, written by Linux"));
    let fs = open(set);
    write_much(&fs, "here", 1);
    closed(fs);
    is_sound(set, &format!("{what}, written here"));
}
