//! Commands on file systems that span several devices: how these are named and found, what is said
//! where one is missing, and that what is read is what Linux wrote.

mod common;

use common::{inside, is_mounted, larder};
use larder_simtest::oracle::{DeviceSet, LoopDevice, Need, enter_private_namespace, need, scratch};
use std::path::{Path, PathBuf};

const NEEDS: [Need; 2] = [Need::MkfsBtrfs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// A file system of so many devices, with a directory, a large file and a read-only snapshot.
fn made_by_linux(dir: &Path, data: &str, metadata: &str, devices: usize) -> DeviceSet {
    let sizes: Vec<u64> = vec![256 * MIB; devices];
    let set = DeviceSet::make(dir, &sizes, &["-d", data, "-m", metadata]).unwrap();
    let mount = set.mount("").unwrap();
    std::fs::create_dir(mount.join("dir")).unwrap();
    std::fs::write(mount.join("dir/small"), b"small").unwrap();
    std::fs::write(mount.join("large"), large()).unwrap();
    let (top, snapshot) = (mount.path(), mount.join("snapshot"));
    larder_simtest::oracle::btrfs(&[
        "subvolume".as_ref(),
        "snapshot".as_ref(),
        "-r".as_ref(),
        top.as_os_str(),
        snapshot.as_os_str(),
    ])
    .unwrap();
    mount.unmount_clean().unwrap();
    set
}

fn large() -> Vec<u8> {
    (0..3u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// `A,B,C`
fn list(images: &[PathBuf]) -> PathBuf {
    let names: Vec<&std::ffi::OsStr> = images.iter().map(|i| i.as_os_str()).collect();
    names.join(std::ffi::OsStr::new(",")).into()
}

/// Everything is read by each command that reads.
fn assert_readable(image: &Path, scratch: &Path) {
    assert_eq!(larder(args!["ls", inside(image, "/dir")]).ok().text(), "small\n");
    assert!(larder(args!["cat", inside(image, "/large")]).ok().out == large());
    let out = scratch.join("out");
    larder(args!["cp", "-r", inside(image, "/dir"), &out]).ok();
    assert_eq!(std::fs::read(out.join("small")).unwrap(), b"small");
    std::fs::remove_dir_all(&out).unwrap();
    larder(args!["extract", image, &out]).ok();
    assert!(std::fs::read(out.join("snapshot/large")).unwrap() == large());
    std::fs::remove_dir_all(&out).unwrap();
    larder(args!["restore", image, &out]).ok();
    assert!(std::fs::read(out.join("large")).unwrap() == large());
    std::fs::remove_dir_all(&out).unwrap();
    let chunks = larder(args!["inspect", "chunks", "--json", image]).ok().json();
    assert!(chunks.as_array().unwrap().len() >= 3);
    let stream = scratch.join("stream");
    larder(args!["send", "-f", &stream, inside(image, "/snapshot")]).ok();
    assert!(stream.metadata().unwrap().len() > 3 * MIB);
}

#[test]
fn siblings_are_found_beside_the_image_and_nowhere_else() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = made_by_linux(dir.path(), "raid0", "raid1", 3);
    let elsewhere = scratch();
    for image in set.images() {
        assert_readable(image, elsewhere.path());
    }
    // A file whose name has a comma is one image.
    let comma = dir.path().join("a,b");
    std::fs::rename(&set.images()[0], &comma).unwrap();
    larder(args!["ls", &comma]).ok();
    std::fs::rename(&comma, &set.images()[0]).unwrap();
    // Two that could be meant.
    let copy = dir.path().join("copy");
    std::fs::copy(&set.images()[1], &copy).unwrap();
    let run =
        larder(args!["ls", &set.images()[0]]).fails(2, "device 2 of the file system could be");
    assert!(run.err.contains("copy (generation ") && run.err.contains("commas"), "{}", run.err);
    assert_readable(&list(set.images()), elsewhere.path());
    let twice = list(&[set.images()[1].clone(), copy.clone()]);
    larder(args!["ls", &twice]).fails(2, "the same device twice, or a copy of it");
    // One that lies elsewhere is found only if it is named.
    let far = elsewhere.path().join("far");
    std::fs::rename(&copy, &far).unwrap();
    std::fs::remove_file(&set.images()[1]).unwrap();
    let run = larder(args!["ls", &set.images()[0]]).ok();
    assert!(run.err.contains("are not complete without device 2"), "{}", run.err);
    larder(args!["cat", inside(&set.images()[0], "/large")]).fails(1, "the device is missing");
    let run = larder(args!["rm", inside(&set.images()[0], "/large")]).fails(2, "is missing");
    assert!(run.err.contains("--degraded"), "{}", run.err);
    let run = larder(args!["--degraded", "rm", inside(&set.images()[0], "/large")])
        .fails(2, "(Data, raid0) has stripes there");
    assert!(run.err.contains("`larder restore`"), "{}", run.err);
    assert_readable(&list(&[set.images()[0].clone(), far]), elsewhere.path());
    // A stranger.
    let stranger = elsewhere.path().join("stranger");
    larder(args!["mkfs", "--size", "128M", &stranger]).ok();
    larder(args!["ls", list(&[stranger, set.images()[0].clone()])])
        .fails(2, "it belongs to file system");
    // A short one.
    let short = std::fs::File::options().write(true).open(&set.images()[2]).unwrap();
    short.set_len(200 * MIB).unwrap();
    let run = larder(args!["ls", &set.images()[0]]).fails(2, "is the image truncated");
    assert!(run.err.contains("device-3"), "{}", run.err);
}

/// Kinds of the errors that a check with all data finds. (`mkfs.btrfs` leaves warnings behind.)
fn findings(image: &Path) -> Vec<String> {
    let report = larder(args!["check", "--data", "--json", image]).json();
    let kind = |f: &serde_json::Value| f["kind"].as_str().unwrap().to_owned();
    let findings = report["findings"].as_array().unwrap().iter();
    findings.filter(|f| f["severity"] == "error").map(kind).collect()
}

#[test]
fn a_check_looks_at_every_copy_and_all_parity() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, devices, lost) in [
        ("raid0", "raid1", 3, 0),
        ("raid1c3", "raid1c3", 3, 2),
        ("raid10", "raid10", 4, 1),
        ("raid5", "raid5", 3, 1),
        ("raid6", "raid6", 5, 2),
    ] {
        let (dir, elsewhere) = (scratch(), scratch());
        let set = made_by_linux(dir.path(), data, metadata, devices);
        let [first, .., last] = set.images() else { panic!("several devices") };
        larder(args!["check", "--data"].into_iter().chain(args![first, last])).ok();
        assert_eq!(findings(first), [""; 0], "{data}");
        // Damage in one place of one device. What is not striped has it in a mirror, and parity is
        // as much of a row as the other columns.
        let whole = elsewhere.path().join("whole");
        std::fs::copy(last, &whole).unwrap();
        wound(last);
        let found = findings(first);
        assert!(!found.is_empty(), "{data}: damage is not found");
        let expected = ["data-checksum", "node-checksum", "node-address"];
        let others = found.iter().filter(|kind| !expected.contains(&kind.as_str()));
        assert_eq!(others.count(), 0, "{data}: {found:?}");
        std::fs::copy(&whole, last).unwrap();
        if lost > 0 {
            set.images()[devices - lost..].iter().for_each(|i| std::fs::remove_file(i).unwrap());
            assert_eq!(findings(first), vec!["device-missing"; lost], "{data}");
        }
    }
}

/// Overwrites whatever is not zero from the second MiB of a device on, but for superblocks: the
/// first sector of each 64 KiB.
fn wound(image: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(image).unwrap();
    let size = file.metadata().unwrap().len();
    let mut sector = [0; 4096];
    for at in (2 * MIB..size).step_by(65536).filter(|at| *at != 64 * MIB) {
        file.read_exact_at(&mut sector, at).unwrap();
        if sector != [0; 4096] {
            sector.iter_mut().for_each(|b| *b ^= 0x5a);
            file.write_all_at(&sector, at).unwrap();
        }
    }
}

#[test]
fn what_is_missing_is_said_and_done_without() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, devices, lost) in
        [("raid1", "raid1", 2, 1), ("raid5", "raid1", 3, 1), ("raid6", "raid6", 4, 2)]
    {
        let (dir, out) = (scratch(), scratch());
        let set = made_by_linux(dir.path(), data, metadata, devices);
        for n in 0..lost {
            std::fs::remove_file(&set.images()[n]).unwrap();
        }
        let rest = &set.images()[lost];
        assert_readable(rest, out.path());
        let run = larder(args!["ls", rest]).ok();
        assert!(run.err.contains("note: ") && run.err.contains("device 1 ("), "{}", run.err);
        assert!(run.err.contains("is missing; going on without it"), "{}", run.err);
        // Copies and parity that are left are right.
        assert_eq!(findings(rest), vec!["device-missing"; lost]);
    }
}

#[test]
fn every_device_is_shown() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set = made_by_linux(dir.path(), "raid5", "raid1", 3);
    let [a, b, _] = &set.images() else { panic!("three devices") };
    let picture = || larder(args!["map", a, "-o", "-"]).ok().text();
    let drawn = |svg: &str| (1..=3).filter(|n| svg.contains(&format!(">Device {n}: "))).count();
    assert_eq!(drawn(&picture()), 3);
    let supers = larder(args!["inspect", "super", "--json", a]).ok().json();
    let ids: Vec<u64> =
        supers.as_array().unwrap().iter().map(|sb| sb["devid"].as_u64().unwrap()).collect();
    assert_eq!(ids, [1, 1, 2, 2, 3, 3]);
    std::fs::remove_file(b).unwrap();
    let svg = picture();
    assert!(drawn(&svg) == 2 && svg.contains("missing: device 2"), "{}", &svg[..2000]);
}

/// Both halves of a mirror were used by themselves.
#[test]
fn halves_that_went_apart_are_told_and_each_can_be_used() {
    let dir = scratch();
    let away = dir.path().join("away");
    std::fs::create_dir(&away).unwrap();
    let (a, b) = (dir.path().join("a.img"), dir.path().join("b.img"));
    let made = args!["mkfs", "--size", "256M", "-d", "raid1", "-m", "raid1", &a, &b];
    larder(made).ok();
    std::fs::rename(&b, away.join("b.img")).unwrap();
    larder(args!["--degraded", "mkdir", inside(&a, "/one")]).ok();
    larder(args!["--degraded", "mkdir", inside(&away.join("b.img"), "/two")]).ok();
    std::fs::rename(away.join("b.img"), &b).unwrap();
    let both = list(&[a.clone(), b.clone()]);
    let run = larder(args!["ls", inside(&both, "/")]).fails(2, "written without the other");
    assert!(run.err.contains("--degraded"), "{}", run.err);
    larder(args!["mkdir", inside(&a, "/more")]).fails(2, "written without the other");
    for (half, has) in [(&a, "one\n"), (&b, "two\n")] {
        let run = larder(args!["ls", inside(half, "/")]).ok();
        assert_eq!(run.text(), has);
        assert!(run.err.contains("is left out"), "{}", run.err);
    }
    larder(args!["--degraded", "mkdir", inside(&a, "/more")]).ok();
    assert_eq!(larder(args!["ls", inside(&a, "/")]).ok().text(), "more\none\n");
}

#[test]
fn a_mount_takes_several_devices_and_does_without_one_if_told() {
    if !need(&NEEDS) || !need(&[Need::Fuse]) {
        return;
    }
    enter_private_namespace().unwrap();
    let (dir, point) = (scratch(), scratch());
    let set = made_by_linux(dir.path(), "raid5", "raid1", 3);
    let [a, b, c] = &set.images() else { panic!("three devices") };
    let point = point.path();
    let read_and_unmount = || {
        assert!(is_mounted(point));
        assert!(std::fs::read(point.join("large")).unwrap() == large());
        assert_eq!(std::fs::read(point.join("dir/small")).unwrap(), b"small");
        larder(args!["umount", point]).ok();
    };
    larder(args!["mount", "-o", "ro", a, point]).ok();
    read_and_unmount();
    larder(args!["mount", "-o", "ro", c, a, b, point]).ok();
    read_and_unmount();
    larder(args!["mount", a, point]).ok();
    std::fs::write(point.join("new"), b"written").unwrap();
    read_and_unmount();
    // Elsewhere, named in the options as in fstab.
    let elsewhere = scratch();
    let far = elsewhere.path().join("far");
    std::fs::rename(b, &far).unwrap();
    let option = format!("ro,device={}", far.display());
    larder(args!["mount", "-o", option, a, point]).ok();
    read_and_unmount();
    let run = larder(args!["mount", "-o", "ro", a, point]).fails(2, "device 2 (");
    assert!(run.err.contains("is missing") && run.err.contains("degraded"), "{}", run.err);
    larder(args!["mount", "-o", "ro,degraded", a, point]).ok();
    assert_eq!(std::fs::read(point.join("new")).unwrap(), b"written");
    read_and_unmount();
    std::fs::remove_file(c).unwrap();
    larder(args!["mount", "-o", "ro,degraded", a, point]).fails(2, "cannot be read; raid");
}

#[test]
fn block_devices_are_found_by_the_file_system() {
    if !need(&NEEDS) {
        return;
    }
    let (dir, out) = (scratch(), scratch());
    let set = made_by_linux(dir.path(), "raid10", "raid10", 4);
    let loops: Vec<LoopDevice> =
        set.images().iter().map(|image| LoopDevice::attach(image).unwrap()).collect();
    assert_readable(loops[2].path(), out.path());
}

/// `larder device … --json`, the devices by number.
fn told(what: &str, target: &Path) -> Vec<serde_json::Value> {
    let told = larder(args!["device", what, "--json", target]).ok().json();
    told.as_array().unwrap().clone()
}

/// What a person meets that has lost a disk, and has it back later.
#[test]
fn a_mount_goes_on_without_a_disk_and_tells_when_it_is_back() {
    if !need(&NEEDS) || !need(&[Need::Fuse]) {
        return;
    }
    enter_private_namespace().unwrap();
    let (dir, point, second) = (scratch(), scratch(), scratch());
    let set = made_by_linux(dir.path(), "raid1", "raid1", 2);
    let [a, b] = &set.images() else { panic!("two devices") };
    let (point, second) = (point.path(), second.path());
    let away = dir.path().join("away");
    std::fs::create_dir(&away).unwrap();
    std::fs::rename(b, away.join("b")).unwrap();
    let run = larder(args!["mount", a, point]).fails(2, "device 2 (");
    assert!(run.err.contains("mount with -o degraded"), "{}", run.err);
    larder(args!["mount", "-o", "degraded", a, point]).ok();
    std::fs::write(point.join("written"), large()).unwrap();
    let devices = told("usage", point);
    let state = |devices: &[serde_json::Value], n: usize| devices[n]["state"].clone();
    assert_eq!((state(&devices, 0), state(&devices, 1)), ("current".into(), "missing".into()));
    assert!(devices[1]["name"].is_null() && devices[1]["size"].as_u64() == Some(256 * MIB));
    assert!(larder(args!["stats", point]).ok().text().contains("device 2 is missing"));
    larder(args!["umount", point]).ok();

    std::fs::rename(away.join("b"), b).unwrap();
    let run = larder(args!["mount", b, point]).ok();
    assert!(run.err.contains("device 2 (") && run.err.contains("`larder scrub`"), "{}", run.err);
    // By the name of the other device it is the same daemon.
    larder(args!["mount", a, second]).ok();
    assert!(std::fs::read(second.join("written")).unwrap() == large());
    std::fs::write(second.join("more"), b"more").unwrap();
    assert_eq!(std::fs::read(point.join("more")).unwrap(), b"more");
    assert_eq!(state(&told("stats", second), 1), "behind");
    assert!(larder(args!["device", "stats", point]).ok().text().contains("behind"));
    larder(args!["device", "stats", "--check", point]).ok();
    larder(args!["umount", second]).ok();
    larder(args!["umount", point]).ok();
    assert_eq!(state(&told("usage", a), 1), "behind");
}

#[test]
fn damage_is_counted_for_the_device_that_has_it() {
    if !need(&NEEDS) || !need(&[Need::Fuse]) {
        return;
    }
    enter_private_namespace().unwrap();
    let (dir, point) = (scratch(), scratch());
    let set = made_by_linux(dir.path(), "raid1", "raid1", 2);
    let [a, b] = &set.images() else { panic!("two devices") };
    let point = point.path();
    wound(b);
    let mounted = || {
        larder(args!["mount", a, point]).ok();
    };
    let unmounted = || {
        larder(args!["umount", point]).ok();
    };
    let errors = |n: usize| told("stats", point)[n]["errors"]["corruption_errs"].as_u64().unwrap();
    mounted();
    assert!(std::fs::read(point.join("large")).unwrap() == large());
    let found = errors(1);
    assert!(found > 0, "no damage was counted");
    assert_eq!(errors(0), 0);
    larder(args!["device", "stats", "--check", point]).fails(1, "device 2 (");
    unmounted();
    mounted();
    assert!(errors(1) >= found, "the counts were not kept");
    larder(args!["device", "stats", "--reset", point]).ok();
    assert_eq!(errors(1), 0);
    unmounted();
    // What was read is whole again.
    mounted();
    assert!(std::fs::read(point.join("large")).unwrap() == large());
    assert_eq!(errors(1), 0);
    unmounted();
}

/// A loop device does not read what lies behind the end of its file, and a write makes that longer.
#[test]
fn a_block_device_that_fails_to_read_is_repaired() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let (a, b) = (dir.path().join("a.img"), dir.path().join("b.img"));
    let file = dir.path().join("file");
    std::fs::write(&file, large()).unwrap();
    larder(args!["mkfs", "--size", "256M", "-d", "raid1", "-m", "raid1", &a, &b]).ok();
    larder(args!["cp", &file, inside(&a, "/large")]).ok();
    let loops = [&a, &b].map(|image| LoopDevice::attach(image).unwrap());
    let (first, second) = (loops[0].path(), &b);
    std::fs::File::options().write(true).open(second).unwrap().set_len(43 * MIB).unwrap();
    let run = larder(args!["scrub", "-r", first]).fails(1, "left");
    assert!(run.text().contains("sectors that cannot be read"), "{}", run.text());
    larder(args!["scrub", first]).ok();
    assert!(larder(args!["scrub", "-r", first]).ok().text().contains("No errors"));
}
