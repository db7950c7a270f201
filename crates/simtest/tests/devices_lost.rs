//! File systems that go on without a device: Larder writes, Linux goes on, and the device comes
//! back.

use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
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
        let ours = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);

        let mount = DeviceSet::of(rest.clone()).mount("degraded").unwrap();
        let differences = ours.differences(&shown(&mount), Aspects::same_image());
        assert_eq!(differences, [], "{profile}");
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
