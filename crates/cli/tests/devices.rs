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
    assert!(run.err.contains("copy") && run.err.contains("with commas"), "{}", run.err);
    assert_readable(&list(set.images()), elsewhere.path());
    let twice = list(&[set.images()[1].clone(), copy.clone()]);
    larder(args!["ls", &twice]).fails(2, "the same device twice, or a copy of it");
    // One that lies elsewhere is found only if it is named.
    let far = elsewhere.path().join("far");
    std::fs::rename(&copy, &far).unwrap();
    std::fs::remove_file(&set.images()[1]).unwrap();
    let run = larder(args!["ls", &set.images()[0]]).fails(2, "device 2 is missing, without which");
    assert!(run.err.contains("(Data, raid0) cannot be read"), "{}", run.err);
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
    }
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
    let run = larder(args!["mount", a, point]).fails(2, "is raid5, which can only be read");
    assert!(run.err.contains("-o ro"), "{}", run.err);
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
