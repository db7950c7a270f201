//! Linux reads what was converted here, and goes on with a balance that was paused here.

use larder_format::items::Profile;
use larder_fs::{BalanceControl, BalanceStatus, BalanceWish, DataMay, Filesystem, OpenOptions};
use larder_simtest::oracle::{
    Aspects, DeviceSet, Fixture, Manifest, Need, StdTree, btrfs, manifest, need, populate, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

fn open(set: &DeviceSet) -> Arc<Filesystem> {
    let device =
        |path| -> Arc<dyn Device> { Arc::new(FileDevice::open(path, OpenMode::Write).unwrap()) };
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(set.images().iter().map(device).collect(), options).unwrap()
}

/// Four devices with files by Linux, data single and metadata dup.
fn made(dir: &Path) -> DeviceSet {
    let set = DeviceSet::make(dir, &[640 * MIB; 4], &["-d", "single", "-m", "dup"]).unwrap();
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    for n in 0..200u32 {
        let data: Vec<u8> = (0..1_500_000u32).map(|i| (i / 5 * (n + 3)) as u8).collect();
        std::fs::write(mount.join(format!("large {n}")), data).unwrap();
    }
    mount.unmount_clean().unwrap();
    set
}

fn wish(data: &str, metadata: &str) -> BalanceWish {
    let set = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
    BalanceWish { data: set(data), metadata: set(metadata), system: set(metadata), force: true }
}

fn shown_by_linux(set: &DeviceSet) -> Manifest {
    let mount = set.mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    shown
}

fn profiles(fs: &Filesystem) -> Vec<(&'static str, Profile)> {
    let groups = fs.block_groups();
    let mut all: Vec<_> =
        groups.iter().map(|g| (g.flags.type_name(), g.flags.profile().unwrap())).collect();
    all.sort_by_key(|(name, profile)| (*name, profile.name()));
    all.dedup();
    all
}

fn is_sound(set: &DeviceSet, name: &str) {
    let report = set.check().unwrap();
    assert!(report.is_clean(), "{name}: {report:?}");
}

#[test]
fn linux_reads_every_profile_that_chunks_were_converted_to() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = made(dir.path());
    for profile in Profile::ALL {
        let before = shown_by_linux(&set);
        let (fs, name) = (open(&set), profile.name());
        let to = format!("convert={name}");
        let control = BalanceControl::new();
        fs.balance(&wish(&to, &to), DataMay::KeepRedundancy, &control).unwrap();
        let state = control.state();
        assert_eq!((state.status, state.left), (BalanceStatus::Finished, 0), "{state:?}");
        let all = [("Data", profile), ("Metadata", profile), ("System", profile)];
        assert_eq!(profiles(&fs), all);
        fs.close().unwrap();
        drop(fs);
        is_sound(&set, name);
        let after = shown_by_linux(&set);
        assert_eq!(before.differences(&after, Aspects::same_image()), [], "{name}");
        let mount = set.mount("").unwrap();
        std::fs::write(mount.join("by Linux"), vec![7; 3_000_000]).unwrap();
        mount.sync().unwrap();
        std::fs::remove_file(mount.join("by Linux")).unwrap();
        mount.unmount_clean().unwrap();
        is_sound(&set, name);
    }
}

#[test]
fn linux_goes_on_with_what_was_paused_here() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = made(dir.path());
    let fs = open(&set);
    let control = BalanceControl::new();
    control.pause();
    let to = wish("convert=raid1", "convert=raid1,soft");
    fs.balance(&to, DataMay::KeepRedundancy, &control).unwrap();
    assert_eq!(control.state().status, BalanceStatus::Paused);
    fs.close().unwrap();
    drop(fs);

    let mount = set.mount("skip_balance").unwrap();
    let path = mount.path().to_str().unwrap();
    // It fails unless one is paused.
    btrfs(&["balance", "resume", path]).unwrap();
    mount.unmount_clean().unwrap();
    is_sound(&set, "resumed by Linux");
    let fs = open(&set);
    assert_eq!(fs.unfinished_balance().unwrap(), None);
    let raid1 = Profile::Raid1;
    assert_eq!(profiles(&fs), [("Data", raid1), ("Metadata", raid1), ("System", raid1)]);
    fs.close().unwrap();
}

/// Has Linux begin a conversion to RAID1, and pause it before it is done.
fn pause_on_linux(set: &DeviceSet) {
    let mount = set.mount("").unwrap();
    let path = mount.path().to_str().unwrap();
    // It may be done before it is told to pause. Then it moves everything once more.
    let paused = (0..20).any(|_| {
        let to = ["balance", "start", "-dconvert=raid1", "-mconvert=raid1", path];
        let mut running =
            Command::new("btrfs").args(to).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let running = running.as_mut().unwrap();
        let is_over = |running: &mut Child| running.try_wait().unwrap().is_some();
        let mut paused = false;
        while !paused && !is_over(running) {
            paused = btrfs(&["balance", "pause", path]).is_ok();
        }
        running.wait().unwrap();
        let mut status = Command::new("btrfs");
        let said = status.args(["balance", "status", path]).output().unwrap().stdout;
        paused && String::from_utf8_lossy(&said).contains("paused")
    });
    assert!(paused, "Linux was never told in time");
    mount.unmount_clean().unwrap();
}

#[test]
fn what_linux_has_paused_goes_on_here() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = made(dir.path());
    let before = shown_by_linux(&set);
    pause_on_linux(&set);
    let fs = open(&set);
    let unfinished = fs.unfinished_balance().unwrap().expect("the item of a paused balance");
    let data = unfinished.data.expect("filters for data").to_string();
    assert!(data.contains("convert=raid1"), "{data}");
    let control = BalanceControl::new();
    fs.resume_balance(&control).unwrap();
    let state = control.state();
    assert_eq!((state.status, state.left), (BalanceStatus::Finished, 0), "{state:?}");
    let raid1 = Profile::Raid1;
    assert_eq!(profiles(&fs), [("Data", raid1), ("Metadata", raid1), ("System", raid1)]);
    fs.close().unwrap();
    drop(fs);
    is_sound(&set, "resumed here");
    assert_eq!(before.differences(&shown_by_linux(&set), Aspects::same_image()), []);
    let mount = set.mount("").unwrap();
    let status = btrfs(&["balance", "status", mount.path().to_str().unwrap()]);
    assert!(status.unwrap().contains("No balance found"));
    std::fs::write(mount.join("by Linux"), vec![7; 3_000_000]).unwrap();
    mount.sync().unwrap();
    std::fs::remove_file(mount.join("by Linux")).unwrap();
    mount.unmount_clean().unwrap();
    is_sound(&set, "written by Linux");
}
