//! Moves of data beside writers: a share of what `make torture ARGS='--move all'` does without end,
//! and what must be noticed by it.

use larder_format::items::BlockGroupFlags;
use larder_fs::mkfs::Profile;
use larder_fs::{
    Fault, FileKind, Filesystem, GroupFacts, InodeId, NewInode, OpenOptions, Relocated, Tuning,
};
use larder_simtest::device::SimDevice;
use larder_simtest::disks::Kind;
use larder_simtest::judge::Depth;
use larder_simtest::moving::{Moves, Moving, Scene, run};
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

fn config(seed: u64, states: usize, depth: Depth) -> Config {
    let mut config = Config::new(seed).expect("a new file system");
    config.max_states = states;
    config.depth = depth;
    config
}

const SHALLOW: Depth = Depth { emptied: 0.0, recovered: 0.0, ours: 0.1, checked: 0.0, kernel: 0.0 };

#[test]
fn every_move_survives_every_crash() {
    let mut outcome = Outcome::default();
    for (n, (moving, _)) in (0..).zip(Moving::ALL.into_iter().cycle().take(24)) {
        let scene = Scene::choose(&mut StdRng::seed_from_u64(n), &[moving], None);
        let moves = Moves { seed: n, lost: 0.2, failing: 0.3 };
        let config = config(n, 40, SHALLOW);
        let config = if n % 2 == 0 { config.whole() } else { config };
        outcome.add(run(&config, &moves, scene));
    }
    println!("{outcome}");
    outcome.assert_sound();
    assert!(outcome.distinct.len() > 700, "{outcome}");
    assert!(outcome.done.resumed > 40 && outcome.done.given_up > 20, "{outcome}");
}

#[test]
fn linux_goes_on_with_what_a_cut_left() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let depth = Depth { checked: 0.3, kernel: 1.0, ..SHALLOW };
    let mut outcome = Outcome::default();
    for (n, (moving, _)) in (100..).zip(Moving::ALL) {
        let scene = Scene::choose(&mut StdRng::seed_from_u64(n), &[moving], None);
        let moves = Moves { seed: n, lost: 0.0, failing: 0.0 };
        outcome.add(run(&config(n, 6, depth), &moves, scene));
    }
    println!("{outcome}");
    outcome.assert_sound();
    assert!(outcome.done.kernel >= 20, "{outcome}");
}

fn scene(name: &str, moving: Moving, to: Profile) -> Scene {
    Scene { kind: Kind::parse(name).expect("a kind"), moving, to: (to, to) }
}

/// What is wrong is noticed in one of a few runs, and nothing is without it.
fn caught(fault: Fault, scene: Scene) {
    let found = (0..12).find_map(|seed| {
        let mut config = config(seed, 150, Depth::LOOK);
        config.options.tuning.fault = Some(fault);
        let moves = Moves { seed, lost: 0.5, failing: 0.0 };
        run(&config, &moves, scene).failures.into_iter().next()
    });
    println!("{fault:?}: {}", found.unwrap_or_else(|| panic!("{fault:?} went unnoticed")));
}

#[test]
fn a_balance_that_is_noted_late_or_forgotten_is_caught() {
    let to_raid1 = scene("single-single-2", Moving::Convert, Profile::Raid1);
    for fault in [Fault::BalanceNotedLate, Fault::BalanceEndsEarly] {
        caught(fault, to_raid1);
    }
}

#[test]
fn a_device_that_is_counted_or_erased_too_early_is_caught() {
    let removal = scene("single-dup-2", Moving::Remove, Profile::Single);
    for fault in [Fault::DeviceCountedFirst, Fault::DeviceErasedFirst] {
        caught(fault, removal);
    }
}

#[test]
fn a_replacement_that_does_not_mirror_is_caught() {
    caught(Fault::ReplaceUnmirrored, scene("single-raid1-2", Moving::Replace, Profile::Single));
}

#[test]
fn a_relocation_that_breaks_references_is_caught() {
    for fault in [Fault::RelocationKeepsOld, Fault::RelocationUnmarked] {
        caught(fault, scene("single-single-1", Moving::Relocate, Profile::Single));
    }
}

#[test]
fn rows_that_are_broken_while_data_moves_to_parity_are_caught() {
    for fault in [Fault::RowsShared, Fault::NoParity] {
        caught(fault, scene("raid1-raid1-3", Moving::Convert, Profile::Raid5));
    }
}

fn new(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] }
}

fn file(fs: &Filesystem, name: &str, data: &[u8]) -> InodeId {
    let id = fs.create(fs.root(), name.as_bytes(), &new(FileKind::Regular)).unwrap().id;
    fs.write(id, 0, data).unwrap();
    id
}

fn data_groups(fs: &Filesystem) -> Vec<GroupFacts> {
    let is_data = |g: &GroupFacts| g.flags.contains(BlockGroupFlags::DATA) && g.used > 0;
    fs.block_groups().into_iter().filter(is_data).collect()
}

/// A file is cloned while the copy of its extent is written. How often is the extent there
/// afterwards?
fn copies_of_what_is_cloned_meanwhile(tuning: Tuning) -> u64 {
    const LEN: usize = 300_000;
    let base = Config::new(1).expect("a new file system").base;
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(device.devices(), options).unwrap();
    let source = file(&fs, "source", &vec![7; LEN]);
    fs.sync().unwrap();
    let from = data_groups(&fs)[0];
    let gate = device.gate(|a| a.is_write() && a.len >= LEN as u64);
    std::thread::scope(|threads| {
        let moved =
            threads.spawn(|| fs.relocate(from.start, &mut |_| ControlFlow::Continue(())).unwrap());
        assert!(gate.wait_for(1, PATIENCE));
        let clone = file(&fs, "clone", b"");
        fs.clone_range(source.at(0), clone.at(0), 0).unwrap();
        fs.sync().unwrap();
        gate.open();
        assert_eq!(moved.join().unwrap(), Relocated::Done);
    });
    let used: u64 = data_groups(&fs).iter().map(|g| g.used).sum();
    fs.close().unwrap();
    used / LEN as u64
}

#[test]
fn what_is_cloned_while_it_is_copied_stays_shared() {
    assert_eq!(copies_of_what_is_cloned_meanwhile(Tuning::default()), 1);
    let fault = Fault::RelocationOldUsers;
    assert_eq!(copies_of_what_is_cloned_meanwhile(fault.into()), 2, "it went unnoticed");
}
