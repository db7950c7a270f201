//! Devices that were written without each other are not joined again, and those that only missed
//! something are.

use larder_fs::mkfs::{MkfsOptions, Profile};
use larder_fs::{Error, Fault, FileKind, Filesystem, NewInode, OpenOptions, Tuning};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::runner::fresh_on;
use larder_volume::VolumeError;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

fn made(profile: Profile, disks: usize) -> Image {
    let options =
        MkfsOptions { data: Some(profile), metadata: Some(profile), ..MkfsOptions::default() };
    fresh_on(vec![256 * MIB; disks], &options).unwrap()
}

/// Opens those of the disks that are there.
fn open(image: Image, read_only: bool) -> (Arc<SimDevice>, larder_fs::Result<Arc<Filesystem>>) {
    open_tuned(image, read_only, Tuning::default())
}

fn open_tuned(
    image: Image,
    read_only: bool,
    tuning: Tuning,
) -> (Arc<SimDevice>, larder_fs::Result<Arc<Filesystem>>) {
    let device = Arc::new(SimDevice::new(image).unrecorded());
    // With this clock the same is done at the same time everywhere.
    let tuning = Tuning { fake_clock: true, ..tuning };
    let options = OpenOptions {
        read_only,
        degraded: true,
        commit_interval: None,
        tuning,
        ..OpenOptions::default()
    };
    let opened = Filesystem::open_devices(device.devices(), options);
    (device, opened)
}

/// Makes so many commits without the disks that are lost.
fn written(image: &Image, lost: &[usize], commits: u8) -> Image {
    written_tuned(image, lost, commits, Tuning::default())
}

fn written_tuned(image: &Image, lost: &[usize], commits: u8, tuning: Tuning) -> Image {
    let mut left = image.clone();
    lost.iter().for_each(|disk| left.lose(*disk));
    let (device, fs) = open_tuned(left, false, tuning);
    let fs = fs.unwrap();
    work(&fs, commits);
    fs.close().unwrap();
    drop(fs);
    let mut after = device.image();
    lost.iter().for_each(|disk| after.take_disk(*disk, image));
    after
}

/// The same every time, so that it comes to lie in the same places.
fn work(fs: &Filesystem, commits: u8) {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    for n in 0..commits {
        let root = fs.root();
        let file = match fs.lookup(root, b"file") {
            Ok(file) => file.id,
            Err(_) => fs.create(root, b"file", &new).unwrap().id,
        };
        fs.write(file, 0, &[n; 100_000]).unwrap();
        fs.sync().unwrap();
    }
}

fn is_apart(opened: &larder_fs::Result<Arc<Filesystem>>) -> bool {
    matches!(opened, Err(Error::Volume(VolumeError::Apart { .. })))
}

#[test]
fn halves_that_were_both_written_are_not_joined() {
    let image = made(Profile::Raid1, 2);
    for (first, second) in [(1, 1), (3, 3), (1, 2), (2, 1), (12, 1), (1, 12), (9, 7)] {
        let one = written(&image, &[1], first);
        let other = written(&image, &[0], second);
        let mut both = one.clone();
        both.take_disk(1, &other);
        for read_only in [true, false] {
            let (device, opened) = open(both.clone(), read_only);
            assert!(is_apart(&opened), "{first} and {second} commits: {opened:?}");
            assert_eq!(device.counts().writes, 0);
        }
        // Each by itself can be used.
        written(&both, &[0], 1);
        written(&both, &[1], 1);
    }
}

/// Both halves look the same: only their histories tell them apart.
#[test]
fn an_engine_that_begins_no_history_is_noticed() {
    let image = made(Profile::Raid1, 2);
    let broken = |lost| written_tuned(&image, &[lost], 1, Fault::OneHistory.into());
    let mut both = broken(1);
    both.take_disk(1, &broken(0));
    let (_, opened) = open(both, true);
    assert!(!is_apart(&opened));
}

#[test]
fn a_disk_that_only_missed_something_is_joined() {
    let image = made(Profile::Raid1, 2);
    for commits in [1, 2, 9] {
        let one = written(&image, &[1], commits);
        let both = written(&one, &[], 1);
        // Now the other one goes on alone, and again the first.
        let second = written(&both, &[0], commits);
        let both = written(&second, &[], 3);
        let first = written(&both, &[1], 1);
        written(&written(&first, &[1], 1), &[], 1);
    }
}

/// What a disk has seen: sessions by number.
type Seen = Vec<u32>;

fn is_line(seen: &[&Seen]) -> bool {
    let longest = seen.iter().max_by_key(|s| s.len()).unwrap();
    seen.iter().all(|s| longest.starts_with(s))
}

/// Any disks are there in each session. They are refused if, and only if, one has seen a session
/// that another one has not, and the other way round.
#[test]
fn random_losses_are_told_from_going_apart() {
    let (mut joined, mut refused) = (0, 0);
    for seed in 0..12 {
        let mut random = StdRng::seed_from_u64(seed);
        let (disks, profile) =
            if seed % 2 == 0 { (2, Profile::Raid1) } else { (3, Profile::Raid1c3) };
        let mut image = made(profile, disks);
        let mut seen: Vec<Seen> = vec![Seen::new(); disks];
        for session in 0..14 {
            let mut all: Vec<usize> = (0..disks).collect();
            all.shuffle(&mut random);
            let lost = all.split_off(random.random_range(1..=disks));
            let here: Vec<&Seen> = all.iter().map(|disk| &seen[*disk]).collect();
            if !is_line(&here) {
                let mut left = image.clone();
                lost.iter().for_each(|disk| left.lose(*disk));
                let (_, opened) = open(left, false);
                assert!(is_apart(&opened), "seed {seed}, session {session}: {all:?} of {seen:?}");
                refused += 1;
                continue;
            }
            let mut now: Seen = (*here.iter().max_by_key(|s| s.len()).unwrap()).clone();
            now.push(session);
            image = written(&image, &lost, random.random_range(1..4));
            all.iter().for_each(|disk| seen[*disk].clone_from(&now));
            joined += 1;
        }
    }
    assert!(joined > 50 && refused > 30, "{joined} joined, {refused} refused");
}
