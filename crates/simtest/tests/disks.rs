//! The crash simulation on several disks: each loses what is open independently of the others, some
//! are lost, old or damaged afterwards, and some fail in the midst of the work. `make torture
//! ARGS='--disks all'` does the same without end.

use larder_format::{SUPER_OFFSETS, SUPER_SIZE};
use larder_fs::{DeviceState, Fault, FileKind, Filesystem, NewInode, OpenOptions, Tuning};
use larder_simtest::by_hand::{bytes, content, put};
use larder_simtest::crash::Limits;
use larder_simtest::data::data;
use larder_simtest::device::{Effect, SimDevice};
use larder_simtest::disks::{KINDS, Kind, Plan, Refused};
use larder_simtest::faults::run_plan;
use larder_simtest::image::STRIDE;
use larder_simtest::judge::Depth;
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome, run};
use larder_simtest::workload::{Workload, random};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::sync::Arc;

const SHALLOW: Depth =
    Depth { emptied: 0.05, recovered: 0.05, ours: 0.1, checked: 0.0, kernel: 0.0 };

fn config(kind: Kind, states: usize, depth: Depth, share: f64) -> Config {
    let mut config = Config::new(1).expect("a new file system");
    config.limits = Limits { samples: 8, seed: 1, ..Limits::default() };
    config.max_states = states;
    config.depth = depth;
    kind.config(&config, share).expect("mkfs")
}

#[test]
fn every_kind_survives_every_crash_and_mishap() {
    let mut outcome = Outcome::default();
    for (n, kind) in (0..).zip(KINDS) {
        let config = config(kind, 24, SHALLOW, 0.5);
        for (workload, config) in
            [(random(100 + n, 24), config.clone()), (data(200 + n, 20), config.whole())]
        {
            let mut one = run(&config, &workload);
            for failure in &mut one.failures {
                failure.workload = format!("{}: {}", kind.name(), failure.workload);
            }
            outcome.add(one);
        }
    }
    println!("{outcome}");
    outcome.assert_sound();
    assert!(outcome.distinct.len() > 700 && outcome.done.hurt > 200, "{outcome}");
}

#[test]
fn a_disk_that_fails_in_the_midst_of_the_work_is_not_needed() {
    let (mut struck, mut states) = (0, 0);
    for (n, kind) in (0..).zip(KINDS) {
        let mut config = config(kind, 4, Depth::LOOK, 0.0);
        config.mishaps.tolerated = kind.tolerated();
        let mut rng = StdRng::seed_from_u64(n);
        for round in 0..6 {
            let workload = random(1000 * n + round, 16);
            let ops = &workload.segments[0].threads[0];
            let plan = Plan::random(&mut rng, kind.disks, 20);
            let report = run_plan(&config, ops, plan)
                .unwrap_or_else(|e| panic!("{}: {}: {e}", kind.name(), workload.text()));
            struck += u64::from(report.struck);
            states += report.states;
        }
    }
    println!("{struck} plans struck, {states} states");
    assert!(struck > 25 && states > 300, "{struck} plans struck, {states} states");
}

/// A disk fails, and the power cut leaves the newest superblock on one of the others only. The
/// third one is behind as well, but it has what was synced. No checksum tells it from the first.
#[test]
fn of_two_disks_that_are_behind_the_later_one_is_believed() {
    let kind = Kind::parse("raid5-raid1-3").expect("a kind");
    let text =
        "new f; nocow f; f[0,64K)=a; F f; f[0,30K)=b; punch f[4K,20001); F f; f[0,30K)=c; F f";
    let workload = Workload::script("behind", text).expect("a workload");
    let mut config = config(kind, 1000, Depth::LOOK, 0.0).whole();
    config.mishaps.tolerated = kind.tolerated();
    let (refused, effect) = (Refused::Everything, Effect::Half);
    for skip in 2..8 {
        let plan = Plan { disk: 0, refused, skip, forever: true, effect };
        run_plan(&config, &workload.segments[0].threads[0], plan).expect("what was synced");
    }
}

/// A disk has data of profile single that it has not flushed yet, and refuses metadata, of which
/// there is another copy. The mount goes on without the disk. It must not promise the data.
#[test]
fn what_only_a_failed_disk_has_is_not_promised() {
    let kind = Kind::parse("single-raid1-2").expect("a kind");
    let text = "new z; z[0,64K)=Z; COMMIT; new g; g[24K,36K)=d; F g; g[28K,40K)=d; F g";
    let workload = Workload::script("alone", text).expect("a workload");
    let mut config = config(kind, 100, Depth::LOOK, 0.0).whole();
    config.mishaps.tolerated = kind.tolerated();
    let mut failed = 0;
    for skip in 0..24 {
        for refused in [Refused::Writes, Refused::Everything] {
            for disk in 0..2 {
                let plan = Plan { disk, refused, skip, forever: true, effect: Effect::None };
                let report = run_plan(&config, &workload.segments[0].threads[0], plan)
                    .unwrap_or_else(|e| panic!("{plan:?}: {e}"));
                failed += usize::from(report.failed.is_some());
            }
        }
    }
    assert!(failed > 8, "{failed} plans in which somebody was told");
}

/// Data of profile single lies on the disk that fails. What is written later lies on the other one.
#[test]
fn new_data_lies_where_it_can_be_written() {
    let kind = Kind::parse("single-raid1-2").expect("a kind");
    for fails in 0..2 {
        let device = Arc::new(SimDevice::new(kind.fresh().expect("mkfs")).unrecorded());
        let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
        let fs = Filesystem::open_devices(device.devices(), options.clone()).expect("it opens");
        let early = put(&fs, fs.root(), "early", &bytes(1, 1 << 20)).expect("written");
        fs.sync().expect("synced");
        let (refused, effect) = (Refused::Writes, Effect::None);
        device.inject(Plan { disk: fails, refused, skip: 0, forever: true, effect }.fault());
        // The first may be lost, and the disk is known to have failed then.
        let _ = put(&fs, fs.root(), "lost", &bytes(2, 64 << 10));
        let _ = fs.sync();
        assert_eq!(fs.devices()[fails].state, DeviceState::Failed);
        let written: Vec<_> = (0..8)
            .map(|n| put(&fs, fs.root(), &format!("late {n}"), &bytes(n, 4 << 20)))
            .collect::<Result<_, _>>()
            .expect("there is room on the other disk");
        let synced = written.iter().try_for_each(|file| fs.fsync(*file, false));
        synced.expect("and it takes them");
        let fs = {
            drop(fs);
            let device = Arc::new(SimDevice::new(device.image()).unrecorded());
            Filesystem::open_devices(device.devices(), options).expect("it opens again")
        };
        for (n, file) in (0..).zip(written) {
            assert!(content(&fs, file) == bytes(n, 4 << 20), "disk {fails}, file {n}");
        }
        assert!(content(&fs, early) == bytes(1, 1 << 20), "disk {fails}");
        fs.close().expect("closed");
    }
}

/// A disk fails in the flush of a commit, of which the power cut leaves the superblock on one of
/// the others only. The third one has the data of the commit, and the one that failed has not. No
/// checksum tells them apart, so the superblock has to.
fn one_fails_and_one_lacks_its_superblock(
    fails: usize,
    lacks: usize,
    tuning: &Tuning,
) -> Result<(), String> {
    let kind = Kind::parse("raid5-raid1-3").expect("a kind");
    let device = Arc::new(SimDevice::new(kind.fresh().expect("mkfs")).unrecorded());
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(
        device.devices(),
        OpenOptions { no_data_cow: true, tuning: tuning.clone(), ..options.clone() },
    )
    .expect("it opens");
    let file = put(&fs, fs.root(), "file", &bytes(1, 256 << 10)).expect("written");
    fs.sync().expect("synced");
    let before = device.image();
    fs.write(file, 0, &bytes(2, 256 << 10)).expect("written");
    let (refused, effect) = (Refused::Flushes, Effect::None);
    device.inject(Plan { disk: fails, refused, skip: 0, forever: true, effect }.fault());
    fs.sync().expect("two disks are enough");
    assert_eq!(device.counts().faults, 1, "it failed in the one flush");
    let mut image = device.image();
    image.take_disk(fails, &before);
    for at in SUPER_OFFSETS.iter().map(|at| lacks as u64 * STRIDE + at.0) {
        let mut superblock = [0; SUPER_SIZE];
        before.read(at, &mut superblock);
        image.write(at, &superblock);
    }
    drop(fs);
    let device = Arc::new(SimDevice::new(image).unrecorded());
    let fs = Filesystem::open_devices(device.devices(), options).map_err(|e| e.to_string())?;
    let is_right = content(&fs, file) == bytes(2, 256 << 10);
    fs.close().map_err(|e| e.to_string())?;
    is_right.then_some(()).ok_or_else(|| "what was synced is not there".into())
}

/// The disk that fails, and the one that lacks its superblock.
const FAILS_AND_LACKS: [(usize, usize); 6] = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)];

#[test]
fn a_disk_that_fails_in_a_commit_is_told_from_one_without_its_superblock() {
    for (fails, lacks) in FAILS_AND_LACKS {
        one_fails_and_one_lacks_its_superblock(fails, lacks, &Tuning::default())
            .unwrap_or_else(|e| panic!("disk {fails} fails, disk {lacks} lacks it: {e}"));
    }
}

#[test]
fn failed_disks_that_are_not_named_are_noticed() {
    let broken = Tuning::from(Fault::FailedUnnamed);
    let mut all = FAILS_AND_LACKS.into_iter();
    let noticed = |(fails, lacks)| one_fails_and_one_lacks_its_superblock(fails, lacks, &broken);
    assert!(all.any(|pair| noticed(pair).is_err()), "it went unnoticed");
}

#[test]
fn linux_sees_the_same_in_crash_states_of_several_disks() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let depth = Depth { emptied: 0.0, recovered: 0.0, ours: 0.0, checked: 0.3, kernel: 1.0 };
    let mut outcome = Outcome::default();
    for (n, kind) in (0..).zip(KINDS) {
        let config = config(kind, 3, depth, 0.0);
        outcome.add(run(&config, &random(300 + n, 20)));
    }
    println!("{outcome}");
    outcome.assert_sound();
    assert!(outcome.done.kernel >= 30, "{outcome}");
}

/// Data that is written in place has the same address afterwards. With parity none is: its row
/// would not be whole at a power cut.
#[test]
fn nothing_is_written_in_place_where_there_is_parity() {
    let kinds = [("raid1-raid1-2", true), ("raid5-raid5-3", false), ("raid6-raid6-4", false)];
    for (name, in_place) in kinds {
        let kind = Kind::parse(name).expect("a kind");
        let device = Arc::new(SimDevice::new(kind.fresh().expect("mkfs")).unrecorded());
        let options =
            OpenOptions { no_data_cow: true, commit_interval: None, ..OpenOptions::default() };
        let fs = Filesystem::open_devices(device.devices(), options).expect("it opens");
        let kind = FileKind::Regular;
        let new = NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
        let file = fs.create(fs.root(), b"file", &new).expect("a file").id;
        let written = |byte: u8| {
            fs.write(file, 0, &[byte; 65536]).expect("written");
            fs.sync().expect("synced");
            let mut places = Vec::new();
            fs.map_extents(file, 0, &mut |extent| {
                places.push(*extent);
                true
            })
            .expect("extents");
            places
        };
        assert_eq!(written(1) == written(2), in_place, "{name}");
        fs.close().expect("closed");
    }
}

#[test]
fn a_kind_has_a_name() {
    for kind in KINDS {
        assert_eq!(Kind::parse(&kind.name()), Some(kind));
    }
    assert_eq!(Kind::parse("raid1-raid7-2"), None);
}
