//! Scrubs of images that Linux made: all damage is found, and repaired from what is good. Linux's
//! own scrub finds nothing afterwards.

use larder_format::Physical;
use larder_fs::{
    Damage, FileKind, Filesystem, NewInode, OpenOptions, ScrubControl, ScrubOptions, ScrubState,
    ScrubStatus,
};
use larder_simtest::oracle::{
    Aspects, DeviceSet, Fixture, Manifest, Need, StdTree, btrfs, copy_image, manifest, need,
    populate, scratch, sum_of_image,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions as Files;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, and devices: any one device may be lost.
const REDUNDANT: [(&str, &str, usize); 6] = [
    ("dup", "dup", 1),
    ("raid1", "raid1", 3),
    ("raid1c3", "raid1c4", 4),
    ("raid10", "raid10", 5),
    ("raid5", "raid5", 4),
    ("raid6", "raid6", 5),
];

/// Makes a file system of a kind, fills it, and says what Linux shows of it.
fn made_by_linux(
    dir: &Path,
    (data, metadata, devices): (&str, &str, usize),
) -> (DeviceSet, Manifest) {
    let sizes: Vec<u64> = (0..devices as u64).map(|n| (256 + 16 * n) * MIB).collect();
    let set = DeviceSet::make(dir, &sizes, &["-d", data, "-m", metadata]).unwrap();
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    let shown = shown_by_linux(&set);
    (set, shown)
}

/// Removes data of which nobody could say which copy is right.
fn without_unsummed(set: &DeviceSet) {
    let mount = set.mount("").unwrap();
    std::fs::remove_dir_all(mount.join("nodatacow")).unwrap();
    mount.unmount_clean().unwrap();
}

fn shown_by_linux(set: &DeviceSet) -> Manifest {
    let mount = set.mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    shown
}

fn devices(images: &[PathBuf], mode: OpenMode) -> Vec<Arc<dyn Device>> {
    let open =
        |path: &PathBuf| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, mode).unwrap()) };
    images.iter().map(open).collect()
}

/// As a command does it that has no mount.
fn open_to_scrub(images: &[PathBuf], mode: OpenMode) -> Arc<Filesystem> {
    let options = OpenOptions {
        read_only: true,
        no_log_replay: true,
        commit_interval: None,
        ..OpenOptions::default()
    };
    Filesystem::open_devices(devices(images, mode), options).unwrap()
}

fn scrub(images: &[PathBuf], read_only: bool) -> ScrubState {
    let mode = if read_only { OpenMode::Read } else { OpenMode::Write };
    let fs = open_to_scrub(images, mode);
    let control = ScrubControl::default();
    fs.scrub(ScrubOptions { read_only }, &control, &|_| ()).unwrap();
    fs.close().unwrap();
    let state = control.state();
    assert_eq!(state.status, ScrubStatus::Finished);
    state
}

/// Scrubs without some devices, and only looks.
fn scrub_without(set: &DeviceSet, lost: &[usize]) -> ScrubState {
    let options = OpenOptions {
        read_only: true,
        degraded: true,
        commit_interval: None,
        ..OpenOptions::default()
    };
    let fs = Filesystem::open_devices(devices(&set.without(lost), OpenMode::Read), options);
    let (fs, control) = (fs.unwrap(), ScrubControl::default());
    fs.scrub(ScrubOptions { read_only: true }, &control, &|_| ()).unwrap();
    fs.close().unwrap();
    control.state()
}

#[test]
fn what_missing_devices_had_is_looked_for_elsewhere() {
    if !need(&NEEDS) {
        return;
    }
    let kinds: [(&str, &str, usize, &[usize]); 4] = [
        ("raid5", "raid5", 4, &[2]),
        ("raid6", "raid6", 5, &[1, 4]),
        ("raid10", "raid1c3", 4, &[3]),
        ("raid0", "raid1c3", 3, &[2]),
    ];
    for (data, metadata, devices, lost) in kinds {
        let dir = scratch();
        let (set, _) = made_by_linux(dir.path(), (data, metadata, devices));
        let state = scrub_without(&set, lost);
        assert_eq!(state.status, ScrubStatus::Finished);
        if data != "raid0" {
            assert_eq!(state.sum().errors(), 0, "{data}: {:?}", state.damage.first());
            continue;
        }
        // Every place that is lost is listed, with its files. Some have none: what was overwritten
        // of an extent that is still in use.
        let is_lost = |d: &larder_fs::ScrubDamage| d.what == Damage::Unreadable && d.device == 2;
        assert_eq!(state.damage.iter().find(|d| !is_lost(d)), None);
        assert!(state.damage.iter().any(|d| !d.files.is_empty()));
        assert!(state.sum().uncorrectable > 0);
    }
    // Garbage on a second device of a RAID5 costs what the missing one had in the same rows.
    let dir = scratch();
    let (set, _) = made_by_linux(dir.path(), ("raid5", "raid1c3", 3));
    garbage(&set.images()[0], 1);
    let state = scrub_without(&set, &[2]);
    let of = |device| state.damage.iter().filter(|d| d.device == device).count();
    assert!(of(2) > 0 && of(1) > 0, "{} and {}", of(1), of(2));
}

/// Linux scrubs, and finds nothing.
fn linux_finds_nothing(set: &DeviceSet, name: &str) {
    assert_eq!(set.scrub().unwrap(), [""; 0], "{name}");
    let report = set.check().unwrap();
    assert!(report.is_clean(), "{name}: {report:?}");
}

/// Overwrites what a device holds with garbage, from 1 MiB on: everything but its first superblock.
fn garbage(image: &Path, seed: u64) {
    let device = FileDevice::open_despite_users(image).unwrap();
    let file = Files::new().write(true).open(image).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut piece = vec![0; 256 << 10];
    let mut at = device.data_from(Physical(MIB));
    while at.0 < device.size() {
        random.fill(&mut piece);
        let len = (device.size() - at.0).min(piece.len() as u64);
        file.write_all_at(&piece[..len as usize], at.0).unwrap();
        at = device.data_from(at.plus(len));
    }
}

/// Files that Larder writes.
fn write_some(fs: &Filesystem) {
    let mut random = fastrand::Rng::with_seed(7);
    for n in 0..40usize {
        let name = format!("of-larder-{n}").into_bytes();
        let file = fs.create(fs.root(), &name, &regular()).unwrap().id;
        let mut data = vec![0; random.usize(1..300_000)];
        random.fill(&mut data);
        fs.write(file, 0, &data).unwrap();
    }
    fs.close().unwrap();
}

/// Places of blocks that lie on a device twice, the first place and the second one.
fn pairs(image: &Path, is_wanted: impl Fn(&[u8]) -> bool) -> Vec<[u64; 2]> {
    let bytes = std::fs::read(image).unwrap();
    let mut seen: BTreeMap<&[u8], Vec<u64>> = BTreeMap::new();
    for (n, sector) in bytes.chunks(4096).enumerate().filter(|(_, s)| is_wanted(s)) {
        seen.entry(sector).or_default().push(n as u64 * 4096);
    }
    // What is there more often is in several files.
    seen.into_values().filter_map(|places| <[u64; 2]>::try_from(places).ok()).collect()
}

/// Each copy of each block and of each sector of data, on one device.
#[test]
fn either_copy_on_one_device_is_repaired() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let (set, _) = made_by_linux(dir.path(), ("dup", "dup", 1));
    without_unsummed(&set);
    let shown = shown_by_linux(&set);
    let image = &set.images()[0];
    let sb = larder_volume::read_superblock(&*devices(set.images(), OpenMode::Read)[0]).unwrap();
    let fsid = sb.fsid;
    // Heads of blocks, and data that does not pack.
    let is_block = |s: &[u8]| s[32..48] == fsid && s[64..72] != *b"_BHRfS_M";
    let is_data = |s: &[u8]| s[32..48] != fsid && s.iter().collect::<BTreeSet<_>>().len() > 200;
    for (what, places) in [("blocks", pairs(image, is_block)), ("data", pairs(image, is_data))] {
        assert!(places.len() > 20, "{} pairs of {what}", places.len());
        for second in [false, true] {
            let file = Files::new().write(true).open(image).unwrap();
            for place in &places {
                file.write_all_at(&[0x5a; 64], place[usize::from(second)] + 1000).unwrap();
            }
            drop(file);
            let state = scrub(set.images(), false);
            let sum = state.sum();
            let found = if what == "blocks" { sum.verify_errors } else { sum.csum_errors };
            assert!(found > 20, "{what}, second: {second}: {sum:?}");
            assert_eq!((sum.uncorrectable, sum.corrected), (0, sum.errors()), "{what}: {sum:?}");
        }
    }
    linux_finds_nothing(&set, "dup");
    let differences = shown.differences(&shown_by_linux(&set), Aspects::same_image());
    assert_eq!(differences, []);
}

#[test]
fn nothing_is_found_where_nothing_is_wrong_and_nothing_is_written() {
    if !need(&NEEDS) {
        return;
    }
    for kind in [("single", "dup", 1), ("single", "raid1", 2), ("raid0", "raid0", 3)]
        .into_iter()
        .chain(REDUNDANT)
    {
        let dir = scratch();
        let (set, _) = made_by_linux(dir.path(), kind);
        let sums = || -> Vec<u64> {
            set.images().iter().map(|image| sum_of_image(image).unwrap()).collect()
        };
        let before = sums();
        for read_only in [true, false] {
            let state = scrub(set.images(), read_only);
            let sum = state.sum();
            assert_eq!((sum.errors(), state.damage.len()), (0, 0), "{kind:?}: {state:?}");
            assert!(sum.data_bytes > MIB && sum.tree_blocks > 10, "{kind:?}: {sum:?}");
            let done = sum.bytes();
            assert!(done >= state.total / 2, "{kind:?}: {done} of {}", state.total);
            assert_eq!(sums(), before, "{kind:?}");
        }
    }
}

#[test]
fn a_device_of_garbage_is_repaired() {
    if !need(&NEEDS) {
        return;
    }
    for kind in REDUNDANT.into_iter().filter(|kind| kind.2 > 1) {
        let dir = scratch();
        let (set, _) = made_by_linux(dir.path(), kind);
        without_unsummed(&set);
        if !kind.0.starts_with("raid5") && !kind.0.starts_with("raid6") {
            write_some(&open_to_write(set.images()));
        }
        let shown = shown_by_linux(&set);
        let n = if kind.2 > 4 { 0 } else { kind.2 - 1 };
        let name = format!("{kind:?}, device {}", n + 1);
        garbage(&set.images()[n], n as u64);
        let found = scrub(set.images(), true).sum();
        let state = scrub(set.images(), false);
        let sum = state.sum();
        assert!(sum.errors() > 100 && sum.super_errors > 0, "{name}: {sum:?}");
        assert_eq!((sum.uncorrectable, sum.corrected), (0, sum.errors()), "{name}: {state:?}");
        assert_eq!(found, sum, "{name}: what a look says");
        let again = scrub(set.images(), false).sum();
        assert_eq!(again.errors(), 0, "{name}: {again:?}");
        linux_finds_nothing(&set, &format!("{kind:?}"));
        let differences = shown.differences(&shown_by_linux(&set), Aspects::same_image());
        assert_eq!(differences, [], "{kind:?}");
    }
}

fn snapshot(set: &DeviceSet, name: &str) {
    let mount = set.mount("").unwrap();
    let path = |p: &str| mount.join(p).to_str().unwrap().to_owned();
    btrfs(&["subvolume", "snapshot", "-r", &path(""), &path(name)]).unwrap();
    mount.unmount_clean().unwrap();
}

/// What has no good copy is named with its files, in every snapshot that has them; the rest is
/// repaired all the same.
#[test]
fn lost_data_is_named_in_every_snapshot() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = DeviceSet::make(dir.path(), &[384 * MIB], &["-d", "single", "-m", "dup"]).unwrap();
    let mount = set.mount("").unwrap();
    std::fs::create_dir(mount.join("cellar")).unwrap();
    let marked: Vec<u8> = (0..20u8).flat_map(|n| [0xa0 + n; 4096]).collect();
    std::fs::write(mount.join("cellar/jam"), &marked).unwrap();
    mount.unmount_clean().unwrap();
    snapshot(&set, "monday");
    snapshot(&set, "tuesday");
    // Sectors 7 and 8 of the file.
    let image = std::fs::read(&set.images()[0]).unwrap();
    let at = image.chunks(4096).position(|c| c == [0xa7; 4096]).unwrap() as u64 * 4096;
    let file = Files::new().write(true).open(&set.images()[0]).unwrap();
    file.write_all_at(&[1; 8192], at).unwrap();
    let state = scrub(set.images(), false);
    let sum = state.sum();
    assert_eq!((sum.csum_errors, sum.uncorrectable, sum.corrected), (2, 2, 0));
    let [damage] = &state.damage[..] else { panic!("{:?}", state.damage) };
    assert_eq!((damage.what, damage.length, damage.offset), (Damage::Data, 8192, at));
    let mut files: Vec<(&str, u64)> =
        damage.files.iter().map(|f| (f.path.as_deref().unwrap(), f.offset)).collect();
    files.sort_unstable();
    let at = 7 * 4096;
    assert_eq!(files, [("cellar/jam", at), ("monday/cellar/jam", at), ("tuesday/cellar/jam", at)]);
}

/// A device was away while the other was written, and comes back.
#[test]
fn a_device_that_was_away_is_brought_up_to_date() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, count) in [("raid1", "raid1", 2), ("raid5", "raid5", 3)] {
        let dir = scratch();
        let (set, _) = made_by_linux(dir.path(), (data, metadata, count));
        let last = &set.images()[count - 1];
        let old = dir.path().join("old");
        copy_image(last, &old).unwrap();
        // Data without checksums changes in place as well.
        let mount = set.mount("").unwrap();
        std::fs::create_dir(mount.join("later")).unwrap();
        populate(&mount.join("later"), &Fixture::small()).unwrap();
        let nocow = std::fs::read_dir(mount.join("nodatacow")).unwrap().next().unwrap().unwrap();
        let file = Files::new().write(true).open(nocow.path()).unwrap();
        file.write_all_at(&[7; 8192], 4096).unwrap();
        file.sync_all().unwrap();
        drop((file, nocow));
        mount.unmount_clean().unwrap();
        let shown = shown_by_linux(&set);
        copy_image(&old, last).unwrap();
        std::fs::remove_file(&old).unwrap();

        let state = scrub(set.images(), false);
        let sum = state.sum();
        assert!(sum.errors() > 100, "{data}: {sum:?}");
        assert!(data == "raid5" || sum.differing > 0, "{data}: {sum:?}");
        assert_eq!((sum.uncorrectable, state.damage.len()), (0, 0), "{data}: {state:?}");
        assert_eq!(state.brought_up_to_date, [count as u64], "{data}");
        let again = scrub(set.images(), false);
        assert_eq!((again.sum().errors(), again.brought_up_to_date.len()), (0, 0), "{again:?}");
        linux_finds_nothing(&set, data);
        let differences = shown.differences(&shown_by_linux(&set), Aspects::same_image());
        assert_eq!(differences, [], "{data}");
    }
}

fn open_to_write(images: &[PathBuf]) -> Arc<Filesystem> {
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(devices(images, OpenMode::Write), options).unwrap()
}

fn regular() -> NewInode<'static> {
    let kind = FileKind::Regular;
    NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] }
}

/// Files come, change and go, also in place.
fn work(fs: &Filesystem, until: &AtomicBool) {
    let root = fs.root();
    let mut random = fastrand::Rng::with_seed(9);
    let mut data = vec![0; 2 << 20];
    let nocow = fs.create(root, b"in-place", &regular()).unwrap().id;
    let flags =
        larder_format::items::InodeFlags::NODATACOW | larder_format::items::InodeFlags::NODATASUM;
    let set = larder_fs::SetAttr { flags: Some(flags.bits()), ..Default::default() };
    fs.setattr(nocow, &set).unwrap();
    fs.write(nocow, 0, &data).unwrap();
    for round in 0u64.. {
        random.fill(&mut data[..4096]);
        let name = format!("file-{}", round % 50).into_bytes();
        let _ = fs.unlink(root, &name);
        let file = fs.create(root, &name, &regular()).unwrap().id;
        fs.write(file, 0, &data[..random.usize(1..data.len())]).unwrap();
        fs.write(nocow, random.u64(0..500) * 4096, &data[..4096]).unwrap();
        match round % 5 {
            0 => fs.fsync(file, false).unwrap(),
            1 => fs.fsync(nocow, false).unwrap(),
            2 => fs.sync().unwrap(),
            _ => {}
        }
        if round > 20 && until.load(Ordering::Relaxed) {
            return;
        }
    }
}

#[test]
fn a_scrub_beside_work_finds_nothing() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, count) in [("raid1", "raid1", 2), ("raid10", "raid1c3", 4)] {
        let dir = scratch();
        let sizes = vec![512 * MIB; count];
        let set = DeviceSet::make(dir.path(), &sizes, &["-d", data, "-m", metadata]).unwrap();
        let fs = open_to_write(set.images());
        let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|threads| {
            threads.spawn(|| work(&fs, &over));
            for _ in 0..8 {
                let control = ScrubControl::default();
                fs.scrub(ScrubOptions::default(), &control, &|_| ()).unwrap();
                let state = control.state();
                assert_eq!((state.sum().errors(), state.damage.len()), (0, 0), "{state:?}");
                begun.store(true, Ordering::Relaxed);
            }
            over.store(true, Ordering::Relaxed);
        });
        fs.close().unwrap();
        drop(fs);
        linux_finds_nothing(&set, data);
    }
}

/// On a file system that is written, all copies of the superblock come with a commit.
#[test]
fn damage_beside_work_is_repaired() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let (set, _) = made_by_linux(dir.path(), ("raid1", "raid1", 2));
    without_unsummed(&set);
    let fs = open_to_write(set.images());
    garbage(&set.images()[1], 5);
    let control = ScrubControl::default();
    fs.scrub(ScrubOptions::default(), &control, &|_| ()).unwrap();
    let state = control.state();
    let sum = state.sum();
    assert!(sum.errors() > 100 && sum.super_errors == 1, "{sum:?}");
    assert_eq!((sum.uncorrectable, sum.corrected), (0, sum.errors()), "{state:?}");
    fs.close().unwrap();
    drop(fs);
    assert_eq!(scrub(set.images(), true).sum().errors(), 0);
    linux_finds_nothing(&set, "beside work");
}

/// It is in a log until the scrub begins.
#[test]
fn what_was_made_durable_is_looked_at() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = DeviceSet::make(dir.path(), &[256 * MIB], &["-d", "dup", "-m", "dup"]).unwrap();
    let fs = open_to_write(set.images());
    let data: Vec<u8> = (0..16 * 4096u32).map(|n| (n % 251) as u8).collect();
    let file = fs.create(fs.root(), b"file", &regular()).unwrap().id;
    fs.write(file, 0, &data).unwrap();
    fs.fsync(file, false).unwrap();
    let image = &set.images()[0];
    let bytes = std::fs::read(image).unwrap();
    let at = bytes.chunks_exact(4096).position(|sector| sector == &data[..4096]).unwrap();
    let wound = Files::new().write(true).open(image).unwrap();
    wound.write_all_at(&[7; 4096], at as u64 * 4096).unwrap();
    let control = ScrubControl::default();
    fs.scrub(ScrubOptions::default(), &control, &|_| ()).unwrap();
    let sum = control.state().sum();
    assert_eq!((sum.csum_errors, sum.corrected), (1, 1), "{sum:?}");
    assert!(std::fs::read(image).unwrap()[at * 4096..].starts_with(&data[..4096]));
    fs.close().unwrap();
}

/// A scrub that was told to end goes on where it was, and reads nothing twice but one strip.
#[test]
fn a_scrub_goes_on_where_it_was() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let (set, _) = made_by_linux(dir.path(), ("single", "dup", 1));
    let mount = set.mount("").unwrap();
    std::fs::write(mount.join("long"), vec![3; 40 << 20]).unwrap();
    mount.unmount_clean().unwrap();
    let whole = scrub(set.images(), true).sum();
    let options = ScrubOptions { read_only: true };
    let mut kept = ScrubState { limit: 8 << 20, ..ScrubState::default() };
    let mut runs = 0;
    loop {
        let fs = open_to_scrub(set.images(), OpenMode::Read);
        let control = ScrubControl::new(kept);
        let before = control.state().sum().bytes();
        let result = std::thread::scope(|threads| {
            let running = threads.spawn(|| fs.scrub(options, &control, &|_| ()));
            while !running.is_finished() {
                if control.state().sum().bytes() > before + (10 << 20) {
                    control.cancel();
                }
                // Too slow to wait for; then any speed.
                if runs == 3 {
                    control.set_limit(0);
                }
                std::thread::yield_now();
            }
            running.join().unwrap()
        });
        fs.close().unwrap();
        kept = control.state();
        runs += 1;
        if result.is_ok() {
            break;
        }
        assert_eq!(kept.status, ScrubStatus::Canceled);
    }
    assert!(runs > 2 && kept.resumed.is_some(), "{runs} runs");
    assert_eq!((kept.status, kept.sum()), (ScrubStatus::Finished, whole));
}
