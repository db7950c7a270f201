//! Balances: what they free, every profile as a target, and power cuts at every moment.

use larder_check::{Finding, Kind, Severity};
use larder_format::features::Incompat;
use larder_format::items::{BlockGroupFlags, Profile};
use larder_fs::mkfs::MkfsOptions;
use larder_fs::{
    BalanceControl, BalanceStatus, BalanceWish, DataMay, Error, Exclusive, Fault, FileKind,
    Filesystem, OpenOptions, Tuning,
};
use larder_simtest::by_hand::{self, bytes, content, put};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{Seq, SimDevice};
use larder_simtest::runner::fresh_on;
use larder_volume::read_superblock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

/// Disks of these sizes with a new file system, whose data and metadata are single.
fn disks(sizes: &[u64]) -> SimDevice {
    let options = MkfsOptions {
        data: Some(Profile::Single),
        metadata: Some(Profile::Single),
        ..MkfsOptions::default()
    };
    SimDevice::new(fresh_on(sizes.to_vec(), &options).expect("a new file system"))
}

fn open(device: &Arc<SimDevice>, tuning: Tuning) -> Arc<Filesystem> {
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    Filesystem::open_devices(device.devices(), options).unwrap()
}

/// What `larder check` has against the image.
fn complaints(device: &Arc<SimDevice>) -> Result<(), String> {
    // Where a cut comes between the superblocks, one is older.
    let of_supers = [Kind::SuperMirrorGeneration, Kind::DeviceBehind];
    let matters = |f: &Finding| f.severity() != Severity::Note && !of_supers.contains(&f.kind);
    by_hand::complaints(&device.devices(), matters)
}

/// All files of the root, with their contents.
fn all(fs: &Filesystem) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut entries = Vec::new();
    let each = &mut |e: &larder_fs::DirEntry<'_>| {
        if e.kind == FileKind::Regular {
            entries.push((e.name.to_vec(), e.id));
        }
        true
    };
    fs.readdir(fs.root(), 2, each).unwrap();
    let mut all: Vec<_> = entries.into_iter().map(|(name, id)| (name, content(fs, id))).collect();
    all.sort();
    all
}

fn wish(data: &str, metadata: &str) -> BalanceWish {
    let set = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
    BalanceWish { data: set(data), metadata: set(metadata), system: set(metadata), force: true }
}

/// Balances to the end.
fn balance(fs: &Filesystem, wish: &BalanceWish) {
    let control = BalanceControl::new();
    fs.balance(wish, DataMay::KeepRedundancy, &control).unwrap();
    let state = control.state();
    assert_eq!((state.status, state.left), (BalanceStatus::Finished, 0), "{state:?}");
    assert_eq!(state.moved, state.total, "{state:?}");
}

/// Profiles of the chunks of some type.
fn profiles(fs: &Filesystem, of: BlockGroupFlags) -> Vec<Profile> {
    let groups = fs.block_groups();
    let mut all: Vec<Profile> = groups
        .iter()
        .filter(|g| g.flags.contains(of))
        .map(|g| g.flags.profile().unwrap())
        .collect();
    all.sort_by_key(|p| p.name());
    all.dedup();
    all
}

#[test]
fn what_it_says_becomes_free() {
    let device = Arc::new(disks(&[1024 * MIB]).unrecorded());
    let fs = open(&device, Tuning::default());
    let root = fs.root();
    for n in 0..300 {
        put(&fs, root, &format!("file {n}"), &bytes(n, 2 << 20)).unwrap();
    }
    fs.sync().unwrap();
    for n in (0..300).filter(|n| n % 5 > 0) {
        fs.unlink(root, format!("file {n}").as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let (before, plan) = (all(&fs), fs.balance_plan());
    assert!(plan.data.chunks >= 2, "{plan:?}");
    let (chunks, unallocated) = (fs.block_groups().len(), fs.space_usage().unallocated);
    balance(&fs, &plan.wish(false).unwrap());
    let freed = fs.space_usage().unallocated - unallocated;
    assert!(freed >= plan.frees(), "{freed} of {}", plan.frees());
    assert!(fs.block_groups().len() as u64 <= chunks as u64 - plan.data.chunks);
    assert_eq!(fs.balance_plan().data.chunks, 0);
    assert!(all(&fs) == before);
    assert_eq!(fs.unfinished_balance().unwrap(), None);
    assert_eq!(fs.exclusive_operation(), Exclusive::Free);
    fs.close().unwrap();
    complaints(&device).unwrap();
}

#[test]
fn nearly_empty_chunks_go_by_themselves() {
    let device = Arc::new(disks(&[1024 * MIB]).unrecorded());
    let interval = Some(std::time::Duration::from_millis(20));
    let options =
        OpenOptions { commit_interval: interval, reclaim: Some(30), ..OpenOptions::default() };
    let fs = Filesystem::open_devices(device.devices(), options).unwrap();
    for n in 0..300 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, 2 << 20)).unwrap();
    }
    fs.sync().unwrap();
    let (before, unallocated) = (all(&fs), fs.space_usage().unallocated);
    for n in (0..300).filter(|n| n % 5 > 0) {
        fs.unlink(fs.root(), format!("file {n}").as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let begin = std::time::Instant::now();
    while fs.space_usage().unallocated <= unallocated {
        fs.sync().unwrap();
        assert!(begin.elapsed().as_secs() < 120, "nothing was reclaimed");
    }
    fs.close().unwrap();
    complaints(&device).unwrap();
    let fs = open(&device, Tuning::default());
    let left = all(&fs);
    assert_eq!(left.len(), 60);
    assert!(left.iter().all(|file| before.contains(file)));
    fs.close().unwrap();
}

#[test]
fn every_profile_is_a_target() {
    let device = Arc::new(disks(&[512 * MIB; 4]).unrecorded());
    let fs = open(&device, Tuning::default());
    for n in 0..400 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, n * 613)).unwrap();
    }
    fs.sync().unwrap();
    let before = all(&fs);
    fs.close().unwrap();
    let turn = [Profile::Raid5, Profile::Single, Profile::Raid6, Profile::Dup, Profile::Raid1];
    for profile in turn.into_iter().chain(Profile::ALL) {
        let fs = open(&device, Tuning::default());
        let set = format!("convert={},soft", profile.name());
        balance(&fs, &wish(&set, &set));
        for of in [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM] {
            assert_eq!(profiles(&fs, of), [profile], "{of:?}");
        }
        assert!(all(&fs) == before, "{}", profile.name());
        fs.close().unwrap();
        // Features of profiles that are not in use any more are gone.
        let superblock = read_superblock(&*device.devices()[0]).unwrap();
        let of_profiles = Incompat::RAID56 | Incompat::RAID1C34;
        assert_eq!(superblock.incompat() & of_profiles, profile.needs(), "{}", profile.name());
        complaints(&device).unwrap_or_else(|e| panic!("{}: {e}", profile.name()));
        // New chunks are like those that there are.
        let fs = open(&device, Tuning::default());
        let more = put(&fs, fs.root(), "more", &bytes(1, 60 << 20)).unwrap();
        fs.sync().unwrap();
        assert_eq!(profiles(&fs, BlockGroupFlags::DATA), [profile]);
        assert_eq!(content(&fs, more), bytes(1, 60 << 20));
        fs.unlink(fs.root(), b"more").unwrap();
        fs.close().unwrap();
    }
}

#[test]
fn what_is_paused_goes_on_or_is_cancelled() {
    let device = Arc::new(disks(&[512 * MIB; 2]).unrecorded());
    let fs = open(&device, Tuning::default());
    for n in 0..200 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, n * 1613)).unwrap();
    }
    let control = BalanceControl::new();
    control.pause();
    let to_raid1 = wish("convert=raid1", "convert=raid1");
    fs.balance(&to_raid1, DataMay::KeepRedundancy, &control).unwrap();
    assert_eq!(control.state().status, BalanceStatus::Paused);
    assert_eq!(fs.exclusive_operation(), Exclusive::BalanceIsPaused);
    let another = fs.balance(&wish("", "usage=1"), DataMay::KeepRedundancy, &BalanceControl::new());
    assert!(matches!(another, Err(Error::Busy(why)) if why.contains("paused")), "{another:?}");
    assert_eq!(fs.unfinished_balance().unwrap(), Some(to_raid1.clone()));
    fs.close().unwrap();

    let fs = open(&device, Tuning::default());
    assert_eq!(fs.exclusive_operation(), Exclusive::BalanceIsPaused);
    assert_eq!(fs.unfinished_balance().unwrap(), Some(to_raid1));
    let control = BalanceControl::new();
    fs.resume_balance(&control).unwrap();
    assert_eq!(control.state().status, BalanceStatus::Finished);
    assert_eq!(profiles(&fs, BlockGroupFlags::DATA), [Profile::Raid1]);
    let none = fs.resume_balance(&BalanceControl::new());
    assert!(matches!(none, Err(Error::Invalid(_))), "{none:?}");

    let control = BalanceControl::new();
    control.pause();
    fs.balance(&wish("convert=single", ""), DataMay::KeepRedundancy, &control).unwrap();
    fs.cancel_paused_balance().unwrap();
    assert_eq!(fs.exclusive_operation(), Exclusive::Free);
    assert_eq!(fs.unfinished_balance().unwrap(), None);
    fs.close().unwrap();
    complaints(&device).unwrap();
}

/// Data goes from single to raid1 while files are written and fsynced. In every state that a cut
/// leaves, a half-done conversion is remembered, and what was fsynced is there.
fn cut_while_converting(tuning: Tuning, after: Tuning, seed: usize) -> Result<usize, String> {
    let device = Arc::new(disks(&[256 * MIB; 2]));
    let fs = open(&device, tuning);
    for n in 0..60 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, n * 1213)).unwrap();
    }
    fs.snapshot(fs.root().subvol, fs.root(), b"kept", true).unwrap();
    fs.sync().unwrap();
    let promised: Mutex<Vec<(Seq, String, Vec<u8>)>> = Mutex::default();
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for n in 0..30 {
                let (name, data) = (format!("new {n}"), bytes(seed + n, n * 997 % 12_000 + 1));
                let Ok(id) = put(&fs, fs.root(), &name, &data) else { break };
                if fs.fsync(id, false).is_ok() {
                    promised.lock().unwrap().push((device.mark(), name, data));
                }
                let _ = fs.unlink(fs.root(), format!("file {n}").as_bytes());
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        balance(&fs, &wish("convert=raid1", "convert=raid1"));
        over.store(true, Ordering::Relaxed);
    });
    fs.close().map_err(|e| e.to_string())?;
    let promised = promised.into_inner().unwrap();
    let limits = Limits { samples: 1, per_epoch: 4, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let every = crashes.states.len().div_ceil(120).max(1);
    let mut seen = 0;
    for state in crashes.states.iter().step_by(every).chain(crashes.states.last()) {
        let told = |e: String| format!("{e}\n{}", crashes.describe(state));
        let device = Arc::new(SimDevice::new(crashes.image(state)).unrecorded());
        complaints(&device).map_err(told)?;
        let promised = promised.iter().filter(|p| p.0 <= state.latest);
        after_a_cut(&device, after.clone(), promised.collect(), seen).map_err(told)?;
        complaints(&device).map_err(|e| told(format!("after it went on: {e}")))?;
        seen += 1;
    }
    Ok(seen)
}

/// What a cut leaves is remembered, goes on, and has what was promised.
fn after_a_cut(
    device: &Arc<SimDevice>,
    tuning: Tuning,
    promised: Vec<&(Seq, String, Vec<u8>)>,
    turn: usize,
) -> Result<(), String> {
    let said = |e: Error| e.to_string();
    let fs = open(device, tuning);
    for (_, name, data) in promised {
        let found = fs.lookup(fs.root(), name.as_bytes()).map_err(|e| format!("{name}: {e}"))?;
        if content(&fs, found.id) != *data {
            return Err(format!("{name} has not what was fsynced"));
        }
    }
    let (single, raid1) = (vec![Profile::Single], vec![Profile::Raid1]);
    let data = profiles(&fs, BlockGroupFlags::DATA);
    match fs.unfinished_balance().map_err(said)? {
        // It has not begun, or it is complete.
        None if data == single || data == raid1 => {}
        None => return Err(format!("a half-done conversion is forgotten: {data:?}")),
        Some(_) => {
            let before: Vec<_> = fs.block_groups().iter().map(|g| g.start).collect();
            put(&fs, fs.root(), "much", &bytes(turn, 40 << 20)).map_err(said)?;
            fs.sync().map_err(said)?;
            let groups = fs.block_groups();
            let made = groups.iter().filter(|g| !before.contains(&g.start));
            let mut made = made.filter(|g| g.flags.contains(BlockGroupFlags::DATA));
            if let Some(wrong) = made.find(|g| !g.flags.contains(BlockGroupFlags::RAID1)) {
                return Err(format!("a new chunk is not raid1: {wrong:?}"));
            }
            if turn.is_multiple_of(3) {
                fs.cancel_paused_balance().map_err(said)?;
            } else {
                fs.resume_balance(&BalanceControl::new()).map_err(said)?;
                let data = profiles(&fs, BlockGroupFlags::DATA);
                if data != raid1 {
                    return Err(format!("it went on, and data is {data:?}"));
                }
            }
        }
    }
    fs.close().map_err(said)
}

#[test]
fn a_conversion_survives_a_cut_at_any_moment() {
    let rounds = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for seed in 0..rounds {
        let states = cut_while_converting(Tuning::default(), Tuning::default(), seed);
        println!("round {seed}: {} states", states.unwrap_or_else(|e| panic!("{e}")));
    }
}

#[test]
fn broken_balances_are_caught() {
    let (ends_early, right) = (Fault::BalanceEndsEarly.into(), Tuning::default());
    let wrong = cut_while_converting(ends_early, right.clone(), 1).expect_err("it went unnoticed");
    println!("{wrong}");
    let forgets = Fault::BalanceForgetsProfiles.into();
    let wrong = cut_while_converting(right, forgets, 1).expect_err("it went unnoticed");
    println!("{wrong}");
}
