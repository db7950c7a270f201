//! File systems that go on without a device: Larder writes, Linux goes on, and the device comes
//! back.

use larder_format::DeviceId;
use larder_fs::{DeviceState, FileKind, Filesystem, InodeId, NewInode, OpenOptions};
use larder_simtest::fragile::{Fragile, Refuses};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, KernelMount, Manifest, Need, StdTree, btrfs, manifest, need,
    scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::path::PathBuf;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

fn devices(images: &[PathBuf]) -> Vec<Arc<dyn Device>> {
    let open =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Write).unwrap()) };
    images.iter().map(open).collect()
}

fn try_open(images: &[PathBuf], degraded: bool) -> larder_fs::Result<Arc<Filesystem>> {
    let options = OpenOptions { degraded, commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(devices(images), options)
}

/// Makes files in a new directory, of which some are synced and some are deleted again.
fn write_files(fs: &Filesystem, dir: &str, bytes: usize) {
    let new =
        |kind| NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    let dir = fs.create(fs.root(), dir.as_bytes(), &new(FileKind::Directory)).unwrap().id;
    let mut random = fastrand::Rng::with_seed(5);
    let mut left = bytes;
    for n in 0.. {
        let name = format!("file-{n}").into_bytes();
        let file = fs.create(dir, &name, &new(FileKind::Regular)).unwrap().id;
        let mut data = vec![0; random.usize(0..4 << 20).min(left)];
        random.fill(&mut data);
        fs.write(file, 0, &data).unwrap();
        match n % 7 {
            0 => fs.fsync(file, false).unwrap(),
            1 => fs.unlink(dir, &name).unwrap(),
            5 => fs.sync().unwrap(),
            _ => {}
        }
        left -= data.len();
        if left == 0 {
            return;
        }
    }
}

fn shown(mount: &KernelMount) -> Manifest {
    manifest(&StdTree::new(mount.path())).unwrap()
}

/// What `btrfs scrub` says of its errors.
fn scrub(mount: &KernelMount) -> String {
    let words = ["scrub", "start", "-B"].map(std::ffi::OsStr::new);
    let args = [&words[..], &[mount.path().as_os_str()]].concat();
    // It fails where something could not be corrected.
    btrfs(&args).unwrap()
}

/// Opens two devices of which one or both can be made to fail.
fn open_fragile(images: &[PathBuf]) -> (Arc<Filesystem>, Vec<Arc<Fragile>>) {
    let fragile: Vec<Arc<Fragile>> = images.iter().map(|path| Fragile::open(path)).collect();
    let devices = fragile.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    (Filesystem::open_devices(devices, options).unwrap(), fragile)
}

fn new_file(fs: &Filesystem, name: &str) -> InodeId {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    fs.create(fs.root(), name.as_bytes(), &new).unwrap().id
}

fn close(fs: Arc<Filesystem>) {
    fs.close().unwrap();
}

/// The errors of each device, as `btrfs device stats` shows them: write, read, flush, corruption,
/// generation.
fn stats_of_linux(mount: &KernelMount) -> Vec<[u64; 5]> {
    let words = ["device", "stats"].map(std::ffi::OsStr::new);
    let said = btrfs(&[&words[..], &[mount.path().as_os_str()]].concat()).unwrap();
    let numbers: Vec<u64> =
        said.lines().map(|l| l.split_whitespace().last().unwrap().parse().unwrap()).collect();
    numbers.as_chunks().0.to_vec()
}

fn stats_of_larder(fs: &Filesystem) -> Vec<[u64; 5]> {
    let of = |d: larder_fs::DeviceFigures| {
        let e = d.errors;
        [e.write_io_errs, e.read_io_errs, e.flush_io_errs, e.corruption_errs, e.generation_errs]
    };
    fs.devices().into_iter().map(of).collect()
}

fn behind(fs: &Filesystem) -> Vec<u64> {
    fs.devices_behind().iter().map(|d| d.id.0).collect()
}

/// Profile of data and metadata, devices, and those that are lost for a while.
const LOST: [(&str, usize, &[usize]); 3] =
    [("raid1", 2, &[2]), ("raid1c3", 3, &[1]), ("raid10", 4, &[3])];

#[test]
fn a_lost_device_does_not_stop_writing_and_comes_back() {
    if !need(&NEEDS) {
        return;
    }
    for (profile, count, lost) in LOST {
        let dir = scratch();
        let sizes = vec![384 * MIB; count];
        let set = DeviceSet::make(dir.path(), &sizes, &["-d", profile, "-m", profile]).unwrap();
        let fs = try_open(set.images(), false).unwrap();
        write_files(&fs, "whole", 10 << 20);
        fs.close().unwrap();
        drop(fs);
        let rest = set.without(lost);
        let refused = try_open(&rest, false).unwrap_err().to_string();
        assert!(refused.contains("missing"), "{refused}");

        // Enough for new chunks.
        let fs = try_open(&rest, true).unwrap();
        let missing: Vec<u64> = fs.info().missing_devices.iter().map(|m| m.id.0).collect();
        assert_eq!(missing, [lost[0] as u64]);
        write_files(&fs, "degraded", 150 << 20);
        let size = fs.statfs().unwrap().total;
        let ours = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);

        let mount = DeviceSet::of(rest.clone()).mount("degraded").unwrap();
        let differences = ours.differences(&shown(&mount), Aspects::same_image());
        assert_eq!(differences, [], "{profile}");
        let stat = rustix::fs::statvfs(mount.path()).unwrap();
        assert_eq!(size, stat.f_blocks * stat.f_frsize, "{profile}");
        std::fs::write(mount.join("of-linux"), [7; 300_000]).unwrap();
        let theirs = shown(&mount);
        mount.unmount().unwrap();
        let fs = try_open(&rest, true).unwrap();
        let again = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);
        assert_eq!(theirs.differences(&again, Aspects::same_image()), [], "{profile}");

        // Linux brings the device up to date, and finds nothing more to do then.
        let mount = set.mount("").unwrap();
        scrub(&mount);
        let second = scrub(&mount);
        assert!(second.contains("no errors found"), "{profile}: {second}");
        assert_eq!(again.differences(&shown(&mount), Aspects::same_image()), [], "{profile}");
        mount.unmount().unwrap();
        let report = set.check().unwrap();
        assert!(report.is_clean(), "{profile}: {report:?}");
    }
}

#[test]
fn too_much_lost_is_refused_by_name() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let args = ["-d", "single", "-m", "raid1"];
    let set = DeviceSet::make(dir.path(), &[256 * MIB; 2], &args).unwrap();
    let fs = try_open(set.images(), false).unwrap();
    write_files(&fs, "dir", 100 << 20);
    fs.close().unwrap();
    drop(fs);
    for lost in [1, 2] {
        let refused = try_open(&set.without(&[lost]), true).unwrap_err().to_string();
        assert!(refused.contains("(Data, single)"), "{refused}");
    }
}

/// A superblock of the newest generation does not make a device that was away as good as the
/// others: a mark remains until it was brought up to date.
#[test]
fn a_device_that_was_away_is_read_last_until_it_is_up_to_date() {
    if !need(&NEEDS) {
        return;
    }
    const LEN: usize = 4 << 20;
    let dir = scratch();
    let args = ["-d", "raid1", "-m", "raid1"];
    let set = DeviceSet::make(dir.path(), &[384 * MIB; 2], &args).unwrap();
    let in_place = |images: &[PathBuf]| {
        let options = OpenOptions {
            degraded: true,
            no_data_cow: true,
            commit_interval: None,
            ..OpenOptions::default()
        };
        Filesystem::open_devices(devices(images), options).unwrap()
    };
    // No checksum tells the old contents of this file from the new.
    let fs = in_place(set.images());
    let file = new_file(&fs, "in-place");
    fs.write(file, 0, &[1; LEN]).unwrap();
    close(fs);
    let fs = in_place(&set.without(&[2]));
    let file = fs.lookup(fs.root(), b"in-place").unwrap().id;
    fs.write(file, 0, &[2; LEN]).unwrap();
    write_files(&fs, "meanwhile", 5 << 20);
    close(fs);

    let is_new = |fs: &Filesystem| {
        let file = fs.lookup(fs.root(), b"in-place").unwrap().id;
        let mut back = vec![0; LEN];
        assert_eq!(fs.read(file, 0, &mut back).unwrap(), LEN);
        assert!(back.iter().all(|b| *b == 2), "what it had before it went away is shown");
    };
    for round in 0..3 {
        let fs = try_open(set.images(), false).unwrap();
        assert_eq!(behind(&fs), [2], "round {round}");
        assert_eq!(fs.devices()[1].state, DeviceState::Behind);
        is_new(&fs);
        write_files(&fs, &format!("again-{round}"), 3 << 20);
        close(fs);
    }
    // Not even when the other device cannot be read.
    let (fs, fragile) = open_fragile(set.images());
    let file = fs.lookup(fs.root(), b"in-place").unwrap().id;
    fragile[0].refuse(Refuses::Reads);
    fs.read(file, 0, &mut [0; 4096]).unwrap_err();
    fragile[0].refuse(Refuses::Nothing);
    is_new(&fs);
    close(fs);
    drop(fragile);

    // Linux does not mind the mark, keeps it, and counts what it repairs.
    let mount = set.mount("").unwrap();
    scrub(&mount);
    assert!(scrub(&mount).contains("no errors found"));
    let theirs = stats_of_linux(&mount);
    mount.unmount().unwrap();
    let report = set.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    let fs = try_open(set.images(), false).unwrap();
    assert_eq!(behind(&fs), [2]);
    assert_eq!(stats_of_larder(&fs), theirs);
    fs.device_is_current(DeviceId(2)).unwrap();
    assert_eq!(behind(&fs), [0; 0]);
    close(fs);
    let fs = try_open(set.images(), false).unwrap();
    assert_eq!(behind(&fs), [0; 0]);
    close(fs);
    let report = set.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// Within a generation only the logs tell which device has what was synced last.
#[test]
fn a_device_that_lacks_only_a_log_is_recognised() {
    if !need(&NEEDS) {
        return;
    }
    for logs_before in 0..2 {
        let dir = scratch();
        let args = ["-d", "raid1", "-m", "raid1"];
        let set = DeviceSet::make(dir.path(), &[256 * MIB; 2], &args).unwrap();
        let (fs, fragile) = open_fragile(set.images());
        let file = new_file(&fs, "file");
        fs.write(file, 0, &[1; 100_000]).unwrap();
        fs.sync().unwrap();
        for n in 0..logs_before {
            fs.write(file, n, &[2; 10_000]).unwrap();
            fs.fsync(file, false).unwrap();
        }
        fragile[1].refuse(Refuses::Everything);
        fs.write(file, 0, &[3; 100_000]).unwrap();
        fs.fsync(file, false).unwrap();
        let generation = fs.info().generation;
        // As if the power had failed.
        drop(fs);
        drop(fragile);
        for turned in [false, true] {
            let mut images = set.images().to_vec();
            if turned {
                images.reverse();
            }
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let fs = Filesystem::open_devices(devices(&images), options).unwrap();
            assert_eq!((behind(&fs), fs.info().generation), (vec![2], generation));
            let mut back = vec![0; 100_000];
            let file = fs.lookup(fs.root(), b"file").unwrap().id;
            fs.read(file, 0, &mut back).unwrap();
            assert!(back.iter().all(|b| *b == 3), "an fsync is lost");
            close(fs);
        }
    }
}

#[test]
fn errors_of_devices_are_kept_as_linux_keeps_them() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let args = ["-d", "raid1", "-m", "raid1"];
    let set = DeviceSet::make(dir.path(), &[256 * MIB; 2], &args).unwrap();
    let (fs, fragile) = open_fragile(set.images());
    let file = new_file(&fs, "file");
    fs.write(file, 0, &[1; 1 << 20]).unwrap();
    fs.sync().unwrap();
    assert_eq!(stats_of_larder(&fs), [[0; 5]; 2]);
    fragile[1].refuse(Refuses::Everything);
    fs.write(file, 0, &[2; 1 << 20]).unwrap();
    fs.sync().unwrap();
    let counted = stats_of_larder(&fs);
    assert!(counted[0] == [0; 5] && counted[1][0] > 0, "{counted:?}");
    assert_eq!(fs.devices()[1].state, DeviceState::Failed);
    close(fs);
    drop(fragile);
    let fs = try_open(set.images(), false).unwrap();
    assert_eq!(stats_of_larder(&fs), counted);
    close(fs);
    let mount = set.mount("").unwrap();
    assert_eq!(stats_of_linux(&mount), counted);
    mount.unmount().unwrap();
    let fs = try_open(set.images(), false).unwrap();
    fs.reset_device_errors().unwrap();
    close(fs);
    let fs = try_open(set.images(), false).unwrap();
    assert_eq!(stats_of_larder(&fs), [[0; 5]; 2]);
    close(fs);
}

#[test]
fn what_is_not_lost_can_be_read() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let args = ["-d", "single", "-m", "raid1"];
    let set = DeviceSet::make(dir.path(), &[256 * MIB; 2], &args).unwrap();
    let fs = try_open(set.images(), false).unwrap();
    let files: Vec<InodeId> = (0..24)
        .map(|n| {
            let file = new_file(&fs, &format!("file-{n}"));
            fs.write(file, 0, &vec![n; 8 << 20]).unwrap();
            fs.sync().unwrap();
            file
        })
        .collect();
    close(fs);
    let options = OpenOptions { read_only: true, degraded: true, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(devices(&set.without(&[2])), options).unwrap();
    let lost = fs.info().lost_chunks;
    assert!(lost.iter().all(|c| c.devices == [DeviceId(2)] && c.profile == "single"), "{lost:?}");
    assert!(!lost.is_empty());
    let (mut good, mut bad) = (0, 0);
    for (n, file) in files.iter().enumerate() {
        let mut back = vec![0; 8 << 20];
        match fs.read(*file, 0, &mut back) {
            Ok(len) => {
                assert!(len == back.len() && back.iter().all(|b| usize::from(*b) == n));
                good += 1;
            }
            Err(e) => {
                let text = e.to_string();
                assert!(text.starts_with("device 2: read of"), "{text}");
                assert!(text.ends_with("the device is missing"), "{text}");
                bad += 1;
            }
        }
    }
    assert!(good > 0 && bad > 0, "{good} read, {bad} lost");
    close(fs);
}
