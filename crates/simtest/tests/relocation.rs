//! Moving what is in block groups, beside writers, under power cuts, and under many snapshots.

use larder_check::{Kind, Severity};
use larder_format::Logical;
use larder_format::items::{BlockGroupFlags, InodeFlags};
use larder_fs::mkfs::MkfsOptions;
use larder_fs::{
    Compress, Error, ExtentPlace, Fault, FileKind, FilePosition, Filesystem, GroupFacts, InodeId,
    OpenOptions, Packing, Relocated, SetAttr, Tuning,
};
use larder_simtest::by_hand::{self, bytes, content, new, put};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{Seq, SimDevice};
use larder_simtest::disks;
use larder_simtest::runner::{Config, fresh};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn open(device: &Arc<SimDevice>, tuning: Tuning) -> Arc<Filesystem> {
    open_with(device, OpenOptions { tuning, ..OpenOptions::default() })
}

fn open_with(device: &Arc<SimDevice>, options: OpenOptions) -> Arc<Filesystem> {
    let options = OpenOptions { commit_interval: None, ..options };
    Filesystem::open_devices(device.devices(), options).unwrap()
}

fn file(fs: &Filesystem, dir: InodeId, name: &str, data: &[u8]) -> InodeId {
    put(fs, dir, name, data).unwrap()
}

/// What `larder check` has against the image.
fn complaints(device: Arc<SimDevice>) -> Result<(), String> {
    // Where a cut comes between the copies of the superblock, one is older.
    by_hand::complaints(&device.devices(), |f| {
        f.severity() != Severity::Note && f.kind != Kind::SuperMirrorGeneration
    })
}

/// Moves what is in each block group that there is now.
fn relocate_all(fs: &Filesystem) -> Result<(), Error> {
    for group in fs.block_groups() {
        match fs.relocate(group.start, &mut |_| ControlFlow::Continue(())) {
            Ok(done) => assert_eq!(done, Relocated::Done),
            // A commit has taken it out.
            Err(Error::NotFound) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A subvolume with files of all sizes, snapshots with changes between, clones, a preallocated and
/// a hole.
fn populate(fs: &Filesystem, files: usize, snapshots: usize) {
    let root = fs.root();
    let sub = fs.create_subvolume(root, b"sub", &new(FileKind::Directory)).unwrap().id;
    for n in 0..files {
        file(fs, sub, &format!("file {n}"), &bytes(n, n % 5 * 1700 + 1));
    }
    let big = file(fs, sub, "big", &bytes(1, 300_000));
    let clone = file(fs, sub, "clone", b"");
    let at = |id| FilePosition { id, offset: 0 };
    fs.clone_range(at(big), at(clone), 0).unwrap();
    let reserved = file(fs, sub, "reserved", b"");
    fs.fallocate(at(reserved), 200_000, larder_fs::Fallocate::Allocate { keep_size: false })
        .unwrap();
    fs.write(reserved, 70_000, &bytes(3, 20_000)).unwrap();
    for n in 0..2 {
        let tail = file(fs, sub, &format!("tail {n}"), &bytes(n, 9000));
        let reserve = larder_fs::Fallocate::Allocate { keep_size: true };
        fs.fallocate(at(tail), 150_000, reserve).unwrap();
    }
    for s in 0..snapshots {
        fs.snapshot(sub.subvol, root, format!("snapshot {s}").as_bytes(), s % 2 == 0).unwrap();
        for n in 0..5 {
            file(fs, sub, &format!("file {}", (s * 7 + n * 13) % files), &bytes(s + n, 2500));
        }
        fs.write(big, (s * 4096) as u64, &bytes(s, 4096)).unwrap();
    }
    fs.sync().unwrap();
}

/// Everything that a directory shows, and what is below it.
fn shown(fs: &Filesystem, dir: InodeId, path: &str, out: &mut Vec<(String, Vec<u8>)>) {
    let mut entries = Vec::new();
    let each = &mut |e: &larder_fs::DirEntry<'_>| {
        entries.push((String::from_utf8_lossy(e.name).into_owned(), e.id, e.kind));
        true
    };
    fs.readdir(dir, 2, each).unwrap();
    for (name, id, kind) in entries {
        let path = format!("{path}/{name}");
        match kind {
            FileKind::Directory => shown(fs, id, &path, out),
            _ => out.push((path, content(fs, id))),
        }
    }
}

fn all(fs: &Filesystem) -> Vec<(String, Vec<u8>)> {
    let mut out = Vec::new();
    shown(fs, fs.root(), "", &mut out);
    out.sort();
    out
}

fn metadata(fs: &Filesystem) -> u64 {
    let groups = fs.block_groups();
    let of = groups.iter().filter(|g| g.flags.contains(BlockGroupFlags::METADATA));
    of.map(|g| g.used).sum()
}

#[test]
fn a_hundred_snapshots_stay_one_tree() {
    let mut took = Vec::new();
    for snapshots in [1, 100] {
        let base = Config::new(1).expect("a new file system").base;
        let device = Arc::new(SimDevice::new(base).unrecorded());
        let fs = open(&device, Tuning::default());
        populate(&fs, 600, snapshots);
        let (before, used) = (all(&fs), metadata(&fs));
        let facts = |fs: &Filesystem| {
            let all = fs.subvolumes().unwrap();
            all.iter().map(|s| (s.id, s.ctransid)).collect::<Vec<_>>()
        };
        let transactions = facts(&fs);
        let begin = Instant::now();
        relocate_all(&fs).unwrap();
        took.push(begin.elapsed());
        let now = metadata(&fs);
        assert!(now <= used + used / 8, "{snapshots}: {used} bytes became {now}");
        assert_eq!(transactions, facts(&fs), "a subvolume counts as changed");
        assert!(all(&fs) == before, "contents");
        fs.close().unwrap();
        complaints(device.clone()).unwrap();
        let fs = open(&device, Tuning::default());
        assert!(all(&fs) == before, "contents after the next mount");
        // What is shared is told apart: changes of one are not seen in the others.
        populate_again(&fs);
        fs.close().unwrap();
        complaints(device).unwrap();
    }
    println!("one snapshot: {:?}, a hundred: {:?}", took[0], took[1]);
}

/// Changes and deletes what was moved.
fn populate_again(fs: &Filesystem) {
    let root = fs.root();
    let sub = fs.lookup(root, b"sub").unwrap().id;
    for n in (0..600).step_by(20) {
        file(fs, sub, &format!("file {n}"), &bytes(n, 3000));
    }
    fs.delete_subvolume(root, b"snapshot 0").unwrap();
    fs.delete_subvolume(root, b"sub").unwrap();
    fs.wait_for_drops().unwrap();
    relocate_all(fs).unwrap();
    fs.sync().unwrap();
}

/// Has `fsync` log extents that may just have been moved: one that is reserved behind the end of a
/// file, and one that a file gets from another.
fn log_what_moves(fs: &Filesystem, sub: InodeId, writer: usize, n: usize) -> Result<(), Error> {
    let tail = fs.lookup(sub, format!("tail {writer}").as_bytes())?.id;
    fs.write(tail, (n % 3 * 4096) as u64, &bytes(n, 100))?;
    let _ = fs.fsync(tail, false);
    let clone = put(fs, sub, &format!("clone {writer}, {n}"), b"")?;
    let big = fs.lookup(sub, b"big")?.id;
    fs.clone_range(big.at(0), clone.at(0), 0)?;
    let _ = fs.fsync(clone, false);
    Ok(())
}

/// Writers make files and fsync them, change others and remove them, while everything moves. Every
/// state that a cut leaves is sound and has what was fsynced.
fn beside_writers(tuning: Tuning, seed: usize) -> Result<usize, String> {
    let base = Config::new(1).expect("a new file system").base;
    let device = Arc::new(SimDevice::new(base));
    let fs = open(&device, tuning);
    populate(&fs, 600, 3);
    let promised: Mutex<Vec<(Seq, String, Vec<u8>)>> = Mutex::default();
    let over = AtomicBool::new(false);
    let outcome = std::thread::scope(|threads| {
        let write = |writer: usize| {
            let (fs, device, promised, over) = (&fs, &device, &promised, &over);
            threads.spawn(move || -> Result<(), larder_fs::Error> {
                let root = fs.root();
                let sub = fs.lookup(root, b"sub").unwrap().id;
                for n in 0..40 {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let name = format!("writer {writer}, {n}");
                    let data = bytes(seed + n, n * 997 % 12_000 + 1);
                    let id = put(fs, root, &name, &data)?;
                    if fs.fsync(id, false).is_ok() {
                        promised.lock().unwrap().push((device.mark(), name, data));
                    }
                    let other = put(fs, sub, &format!("file {}", (n * 7 + seed) % 60), b"again")?;
                    let size = Some((n * 300) as u64);
                    let _ = fs.setattr(other, &SetAttr { size, ..SetAttr::default() });
                    log_what_moves(fs, sub, writer, n)?;
                }
                Ok(())
            })
        };
        let writers = [0, 1].map(write);
        let outcome = relocate_all(&fs);
        over.store(true, Ordering::Relaxed);
        writers.into_iter().fold(outcome, |all, one| {
            all.and(one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    });
    outcome.map_err(|e| e.to_string())?;
    let sub = fs.lookup(fs.root(), b"sub").unwrap().id;
    for n in 0..60 {
        file(&fs, sub, &format!("file {n}"), &bytes(n, 700));
    }
    fs.close().map_err(|e| e.to_string())?;
    let promised = promised.into_inner().unwrap();
    let limits = Limits { samples: 1, per_epoch: 4, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let every = crashes.states.len().div_ceil(150).max(1);
    let mut seen = 0;
    for state in crashes.states.iter().step_by(every).chain(crashes.states.last()) {
        let device = Arc::new(SimDevice::new(crashes.image(state)).unrecorded());
        let told = |e: String| format!("{e}\n{}", crashes.describe(state));
        complaints(device.clone()).map_err(told)?;
        let fs = open(&device, Tuning::default());
        for (_, name, data) in promised.iter().filter(|p| p.0 <= state.latest) {
            let found = fs.lookup(fs.root(), name.as_bytes()).map_err(|e| told(e.to_string()))?;
            if content(&fs, found.id) != *data {
                return Err(told(format!("{name} has not what was fsynced")));
            }
        }
        // A relocation that was interrupted can be begun anew.
        if seen % 16 == 0 {
            relocate_all(&fs).map_err(|e| told(e.to_string()))?;
        }
        fs.close().map_err(|e| told(e.to_string()))?;
        complaints(device).map_err(|e| told(format!("after it went on: {e}")))?;
        seen += 1;
    }
    Ok(seen)
}

#[test]
fn nothing_is_lost_beside_writers() {
    let rounds = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(2);
    for seed in 0..rounds {
        let states = beside_writers(Tuning::default(), seed).unwrap_or_else(|e| panic!("{e}"));
        println!("round {seed}: {states} states");
    }
}

/// Files of a snapshot, which shares all its leaves, are punched, cloned and deleted when their
/// data has been copied and is about to move.
fn edits_beside(tuning: Tuning) -> Result<(), String> {
    const LEN: usize = 40_000;
    let text = |e: Error| e.to_string();
    let base = Config::new(1).expect("a new file system").base;
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let fs = open(&device, tuning);
    let root = fs.root();
    let sub = fs.create_subvolume(root, b"sub", &new(FileKind::Directory)).unwrap().id;
    for n in 0..3 {
        file(&fs, sub, &format!("file {n}"), &bytes(n, LEN));
        // Each file has leaves of its own.
        for i in 0..12 {
            file(&fs, sub, &format!("filler {n} {i}"), &bytes(n, 2000));
        }
    }
    fs.snapshot(sub.subvol, root, b"snapshot", false).map_err(text)?;
    let copy = fs.lookup(root, b"snapshot").map_err(text)?.id;
    fs.sync().map_err(text)?;
    // No write of blocks has such a length.
    let is_data = |len: u64| len >= LEN as u64 && !len.is_multiple_of(16 << 10);
    let gate = device.gate(move |a| a.is_write() && is_data(a.len));
    let fs = &*fs;
    std::thread::scope(|threads| {
        let moved = threads.spawn(|| relocate_all(fs));
        assert!(gate.wait_for(1, PATIENCE));
        let edits = [0, 1, 2].map(|n| threads.spawn(move || edit(fs, copy, n)));
        gate.open();
        let edits = edits.map(|edit| edit.join().unwrap());
        edits.into_iter().try_for_each(|edit| edit).and(moved.join().unwrap())
    })
    .map_err(text)?;
    fs.close().map_err(text)?;
    complaints(device)
}

/// Changes the extents of a file in one of three ways.
fn edit(fs: &Filesystem, dir: InodeId, n: usize) -> Result<(), Error> {
    let name = format!("file {n}");
    let id = fs.lookup(dir, name.as_bytes())?.id;
    let at = |offset| FilePosition { id, offset };
    match n {
        0 => fs.fallocate(at(4096), 4096, larder_fs::Fallocate::Punch),
        1 => fs.clone_range(at(8192), at(0), 4096).map(drop),
        _ => fs.unlink(dir, name.as_bytes()),
    }
}

#[test]
fn places_of_data_stand_still_below_an_edit() {
    edits_beside(Tuning::default()).unwrap();
    // An edit that comes too late meets nothing.
    let wrong = (0..20).find_map(|_| edits_beside(Fault::RelocationBesideEdits.into()).err());
    println!("{}", wrong.expect("it goes unnoticed"));
}

#[test]
fn broken_relocations_are_caught() {
    for fault in [Fault::RelocationKeepsOld, Fault::RelocationUnmarked] {
        let wrong = beside_writers(fault.into(), 1).err();
        println!("{}", wrong.unwrap_or_else(|| panic!("{fault:?} went unnoticed")));
    }
}

#[test]
fn a_relocation_ends_where_it_is_told() {
    let base = Config::new(1).expect("a new file system").base;
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let fs = open(&device, Tuning::default());
    populate(&fs, 300, 2);
    let before = all(&fs);
    let data = fs
        .block_groups()
        .into_iter()
        .find(|g| g.used > 0 && g.flags.contains(BlockGroupFlags::METADATA));
    let stopped = fs.relocate(data.unwrap().start, &mut |_| ControlFlow::Break(()));
    assert_eq!(stopped.unwrap(), Relocated::Stopped);
    let none = fs.relocate(Logical(u64::MAX / 2), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(none, Err(Error::NotFound)), "{none:?}");
    assert!(all(&fs) == before);
    relocate_all(&fs).unwrap();
    assert!(all(&fs) == before);
    fs.close().unwrap();
    complaints(device).unwrap();
}

/// A disk of this size with a new file system.
fn sized(bytes: u64) -> Arc<SimDevice> {
    let image = fresh(bytes, &MkfsOptions::default()).expect("a new file system");
    Arc::new(SimDevice::new(image).unrecorded())
}

#[test]
fn an_extent_with_very_many_users_moves_in_parts() {
    let device = sized(512 << 20);
    let fs = open(&device, Tuning::default());
    let root = fs.root();
    let source = file(&fs, root, "source", &bytes(3, 200_000));
    fs.sync().unwrap();
    let clones = 15_000;
    for n in 0..clones {
        let to = fs.create(root, format!("clone {n}").as_bytes(), &new(FileKind::Regular)).unwrap();
        fs.clone_range(source.at(0), to.id.at(0), 0).unwrap();
    }
    fs.sync().unwrap();
    let group = fs
        .block_groups()
        .into_iter()
        .find(|g| g.used > 0 && g.flags.contains(BlockGroupFlags::DATA))
        .unwrap();
    let mut batches = 0;
    let mut each = |_| {
        batches += 1;
        // Some of the users go while others have got the copy already.
        for n in 0..100 {
            fs.unlink(root, format!("clone {}", batches * 3000 + n).as_bytes()).unwrap();
        }
        ControlFlow::Continue(())
    };
    assert_eq!(fs.relocate(group.start, &mut each).unwrap(), Relocated::Done);
    assert!(batches >= 2, "{batches} batches");
    let data = fs.block_groups().into_iter().filter(|g| g.flags.contains(BlockGroupFlags::DATA));
    assert_eq!(data.map(|g| g.used).sum::<u64>(), 200_704, "it is one extent");
    for n in [0, 2999, 7000, clones - 1] {
        let id = fs.lookup(root, format!("clone {n}").as_bytes()).unwrap().id;
        assert!(content(&fs, id) == bytes(3, 200_000), "clone {n}");
    }
    fs.close().unwrap();
    complaints(device).unwrap();
}

/// Where the data of a file lies.
fn places(fs: &Filesystem, id: InodeId) -> Vec<u64> {
    let mut out = Vec::new();
    fs.map_extents(id, 0, &mut |extent| {
        if let ExtentPlace::Device { at, .. } = extent.place {
            out.push(at.0);
        }
        true
    })
    .unwrap();
    out
}

/// All users of an extent that is half moved go away, and its copy with them. What lies at the
/// place of the copy then is somebody else's.
fn with_a_copy_that_loses_its_users(tuning: Tuning) -> Result<(), String> {
    let device = sized(512 << 20);
    let fs = open(&device, tuning);
    let root = fs.root();
    let source = file(&fs, root, "source", &bytes(3, 200_000));
    fs.sync().unwrap();
    let clones = 15_000;
    for n in 0..clones {
        let to = fs.create(root, format!("clone {n}").as_bytes(), &new(FileKind::Regular)).unwrap();
        fs.clone_range(source.at(0), to.id.at(0), 0).unwrap();
    }
    fs.sync().unwrap();
    let kind = BlockGroupFlags::DATA;
    let mut groups = fs.block_groups().into_iter();
    let from = groups.find(|g| g.used > 0 && g.flags.contains(kind)).unwrap();
    let mut batches = 0;
    let mut each = |_| {
        batches += 1;
        if batches == 1 {
            // Those that have the copy are the ones whose extents lie elsewhere.
            let old = from.start.0..from.start.0 + from.len;
            let moved = |id: InodeId| !places(&fs, id).iter().any(|at| old.contains(at));
            for n in 0..clones {
                let name = format!("clone {n}");
                let id = fs.lookup(root, name.as_bytes()).unwrap().id;
                if moved(id) {
                    fs.unlink(root, name.as_bytes()).unwrap();
                }
            }
            if moved(source) {
                fs.unlink(root, b"source").unwrap();
            }
            fs.sync().unwrap();
            for n in 0..200 {
                file(&fs, root, &format!("other {n}"), &bytes(n, 200_000));
            }
        }
        ControlFlow::Continue(())
    };
    fs.relocate(from.start, &mut each).map_err(|e| e.to_string())?;
    for n in 0..200 {
        let id = fs.lookup(root, format!("other {n}").as_bytes()).unwrap().id;
        if content(&fs, id) != bytes(n, 200_000) {
            return Err(format!("other {n} has other contents"));
        }
    }
    let mut seen = 0;
    for n in 0..clones {
        if let Ok(found) = fs.lookup(root, format!("clone {n}").as_bytes()) {
            seen += 1;
            if n % 97 == 0 && content(&fs, found.id) != bytes(3, 200_000) {
                return Err(format!("clone {n} has other contents"));
            }
        }
    }
    assert!((1..clones).contains(&seen), "{seen} are left");
    fs.close().map_err(|e| e.to_string())?;
    complaints(device)
}

#[test]
fn a_copy_without_users_is_not_used_again() {
    with_a_copy_that_loses_its_users(Tuning::default()).unwrap();
    let broken = || with_a_copy_that_loses_its_users(Fault::RelocationTrustsCopy.into());
    let wrong = std::panic::catch_unwind(broken);
    assert!(!matches!(wrong, Ok(Ok(()))), "it went unnoticed");
}

fn data_groups(fs: &Filesystem) -> Vec<GroupFacts> {
    let is_data = |g: &GroupFacts| g.flags.contains(BlockGroupFlags::DATA);
    fs.block_groups().into_iter().filter(is_data).collect()
}

/// A packed extent comes to lie where another one was that has been read: unpacked bytes of that
/// are still at hand.
#[test]
fn what_was_unpacked_from_a_place_before_is_forgotten() {
    let device = sized(512 << 20);
    let compress =
        Some(Compress { packing: Packing::parse("zstd").unwrap().unwrap(), force: true });
    let fs = open_with(&device, OpenOptions { compress, ..OpenOptions::default() });
    let root = fs.root();
    let noise = |n: usize| -> Vec<u8> {
        let mut rng = StdRng::seed_from_u64(n as u64);
        (0..1 << 20).map(|_| rng.random()).collect()
    };
    let packed = |n: u8| vec![n; 100_000];
    let old = file(&fs, root, "old", &packed(1));
    fs.sync().unwrap();
    let first = data_groups(&fs)[0];
    let within = |group: &GroupFacts, id: InodeId| {
        let of = group.start.0..group.start.0 + group.len;
        places(&fs, id).iter().any(|at| of.contains(at))
    };
    assert!(within(&first, old) && content(&fs, old) == packed(1));
    let mut ballast = Vec::new();
    while ballast.last().is_none_or(|id| within(&first, *id)) {
        let n = ballast.len();
        ballast.push(file(&fs, root, &format!("ballast {n}"), &noise(n)));
        fs.sync().unwrap();
    }
    let new = file(&fs, root, "new", &packed(2));
    fs.sync().unwrap();
    let second = data_groups(&fs).into_iter().find(|g| within(g, new)).unwrap();
    for (n, id) in ballast.iter().enumerate().filter(|(_, id)| within(&second, **id)) {
        assert_ne!(*id, new);
        fs.unlink(root, format!("ballast {n}").as_bytes()).unwrap();
    }
    let place = places(&fs, old);
    fs.unlink(root, b"old").unwrap();
    fs.sync().unwrap();
    fs.relocate(second.start, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(places(&fs, new), place, "it lies where the other was");
    assert!(content(&fs, new) == packed(2), "it reads as what was there before");
    fs.close().unwrap();
    complaints(device).unwrap();
}

/// Everything moves on three disks with parity. Afterwards any one of them may be lost.
#[test]
fn rows_with_parity_stay_whole() {
    for name in ["raid5-raid5-3", "raid6-raid1c3-5"] {
        let kind = disks::Kind::parse(name).unwrap();
        let base = kind.config(&Config::new(1).unwrap(), 0.0).unwrap().base;
        let device = Arc::new(SimDevice::new(base).unrecorded());
        let fs = open(&device, Tuning::default());
        populate(&fs, 400, 4);
        let before = all(&fs);
        for _ in 0..2 {
            relocate_all(&fs).unwrap();
        }
        assert!(all(&fs) == before, "{name}");
        fs.close().unwrap();
        complaints(device.clone()).unwrap();
        for lost in 0..kind.disks {
            let mut image = device.image();
            image.lose(lost);
            let device = Arc::new(SimDevice::new(image).unrecorded());
            let options =
                OpenOptions { degraded: true, commit_interval: None, ..OpenOptions::default() };
            let fs = Filesystem::open_devices(device.devices(), options).unwrap();
            assert!(all(&fs) == before, "{name} without disk {lost}");
        }
    }
}

/// Subvolumes are deleted and dropped, step by step, while what they share moves.
#[test]
fn what_is_being_dropped_may_move() {
    let device = sized(512 << 20);
    let fs = open(&device, Tuning { drop_step: Some(40), ..Tuning::default() });
    populate(&fs, 600, 12);
    let root = fs.root();
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for n in 0..9 {
                fs.delete_subvolume(root, format!("snapshot {n}").as_bytes()).unwrap();
            }
            fs.delete_subvolume(root, b"sub").unwrap();
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            relocate_all(&fs).unwrap();
        }
    });
    relocate_all(&fs).unwrap();
    fs.wait_for_drops().unwrap();
    let names: Vec<_> = all(&fs).into_iter().map(|f| f.0).collect();
    let kept = |n: &String| {
        ["/snapshot 9/", "/snapshot 10/", "/snapshot 11/"].iter().any(|s| n.starts_with(s))
    };
    assert!(names.iter().all(kept) && names.len() > 1800, "{} files", names.len());
    fs.close().unwrap();
    complaints(device).unwrap();
}

/// Nearly full: what has room elsewhere moves, and of the rest nothing is lost.
#[test]
fn a_full_disk_loses_nothing() {
    let device = sized(256 << 20);
    let fs = open(&device, Tuning::default());
    let root = fs.root();
    let mut files = 0;
    while put(&fs, root, &format!("file {files}"), &bytes(files, 500_000)).is_ok() {
        files += 1;
    }
    let _ = fs.sync();
    fs.unlink(root, format!("file {files}").as_bytes()).unwrap();
    for n in (0..files).step_by(9) {
        fs.unlink(root, format!("file {n}").as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let before = all(&fs);
    let mut refused = 0;
    for group in fs.block_groups() {
        match fs.relocate(group.start, &mut |_| ControlFlow::Continue(())) {
            Ok(_) | Err(Error::NotFound) => {}
            Err(Error::NoSpace) => refused += 1,
            Err(e) => panic!("{e}"),
        }
    }
    println!("{refused} groups found no room");
    assert!(all(&fs) == before);
    file(&fs, root, "small", b"still writable");
    fs.close().unwrap();
    complaints(device).unwrap();
}

/// A block of a file that is written in place, with its number and that of the write.
fn in_place_block(n: usize) -> Vec<u8> {
    (n as u32).to_le_bytes().repeat(1024)
}

/// A file is written in place, block by block, each with an `fsync`, while everything moves.
/// Whatever a cut leaves: no block is older than what was promised.
#[test]
fn writing_in_place_goes_on() {
    const BLOCKS: usize = 32;
    let device = Arc::new(SimDevice::new(Config::new(1).unwrap().base));
    let fs = open(&device, Tuning::default());
    let root = fs.root();
    let id = fs.create(root, b"in place", &new(FileKind::Regular)).unwrap().id;
    let flags = Some(fs.getattr(id).unwrap().flags | InodeFlags::NODATACOW.bits());
    fs.setattr(id, &SetAttr { flags, ..SetAttr::default() }).unwrap();
    fs.write(id, 0, &in_place_block(0).repeat(BLOCKS)).unwrap();
    populate(&fs, 200, 0);
    let mut promised = vec![(device.mark(), 0, 0)];
    std::thread::scope(|threads| {
        let moving = threads.spawn(|| (0..2).try_for_each(|_| relocate_all(&fs)));
        let mut n = 1;
        while !moving.is_finished() {
            let block = n * 7 % BLOCKS;
            fs.write(id, block as u64 * 4096, &in_place_block(n)).unwrap();
            if fs.fsync(id, false).is_ok() {
                promised.push((device.mark(), block, n));
            }
            n += 1;
        }
        moving.join().unwrap().unwrap();
    });
    fs.close().unwrap();
    let limits = Limits { samples: 1, per_epoch: 3, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let every = crashes.states.len().div_ceil(200).max(1);
    for state in crashes.states.iter().step_by(every).chain(crashes.states.last()) {
        let device = Arc::new(SimDevice::new(crashes.image(state)).unrecorded());
        complaints(device.clone()).unwrap_or_else(|e| panic!("{e}\n{}", crashes.describe(state)));
        let fs = open(&device, Tuning::default());
        let Ok(found) = fs.lookup(fs.root(), b"in place") else { continue };
        let data = content(&fs, found.id);
        for (block, bytes) in data.chunks(4096).enumerate() {
            let at_least = promised.iter().filter(|p| p.0 <= state.latest && p.1 == block);
            let at_least = at_least.map(|p| p.2).max().unwrap_or(0);
            for number in bytes.chunks_exact(4) {
                let number = u32::from_le_bytes(number.try_into().unwrap()) as usize;
                assert!(number >= at_least, "{number} {at_least}\n{}", crashes.describe(state));
            }
        }
    }
    println!("{} promises, {} states", promised.len(), crashes.states.len());
}
