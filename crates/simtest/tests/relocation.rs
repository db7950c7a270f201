//! Moving what is in block groups, beside writers, under power cuts, and under many snapshots.

use larder_check::{Finding, Kind, Options, Severity};
use larder_format::Logical;
use larder_format::items::BlockGroupFlags;
use larder_fs::{
    Error, Fault, FileKind, FilePosition, Filesystem, InodeId, NewInode, OpenOptions, Relocated,
    SetAttr, Tuning,
};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{Seq, SimDevice};
use larder_simtest::runner::Config;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

fn new(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] }
}

fn open(device: &Arc<SimDevice>, tuning: Tuning) -> Arc<Filesystem> {
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    Filesystem::open(device.clone(), options).unwrap()
}

fn file(fs: &Filesystem, dir: InodeId, name: &str, data: &[u8]) -> InodeId {
    try_file(fs, dir, name, data).unwrap()
}

fn try_file(
    fs: &Filesystem,
    dir: InodeId,
    name: &str,
    data: &[u8],
) -> Result<InodeId, larder_fs::Error> {
    let id = match fs.lookup(dir, name.as_bytes()) {
        Ok(found) => found.id,
        Err(_) => fs.create(dir, name.as_bytes(), &new(FileKind::Regular))?.id,
    };
    fs.write(id, 0, data)?;
    Ok(id)
}

fn content(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let mut data = vec![0; usize::try_from(fs.getattr(id).unwrap().size).unwrap()];
    assert_eq!(fs.read(id, 0, &mut data).unwrap(), data.len());
    data
}

/// Bytes that depend on a number, of some length.
fn bytes(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n * 31 + i / 7) as u8 ^ (i >> 8) as u8).collect()
}

/// What `larder check` has against the image.
fn complaints(device: Arc<SimDevice>) -> Result<(), String> {
    let options = Options { data: true, ..Options::default() };
    let report =
        larder_check::check(&[device as _], &options, &|_| ()).map_err(|e| e.to_string())?;
    // Where a cut comes between the copies of the superblock, one is older.
    let matters =
        |f: &&Finding| f.severity() != Severity::Note && f.kind != Kind::SuperMirrorGeneration;
    let first = report.findings.iter().find(matters);
    first
        .map_or(Ok(()), |f| Err(format!("check: {}: {:?} {:?}: {}", f.kind, f.tree, f.key, f.what)))
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
                    let id = try_file(fs, root, &name, &data)?;
                    if fs.fsync(id, false).is_ok() {
                        promised.lock().unwrap().push((device.mark(), name, data));
                    }
                    let other =
                        try_file(fs, sub, &format!("file {}", (n * 7 + seed) % 60), b"again")?;
                    let size = Some((n * 300) as u64);
                    let _ = fs.setattr(other, &SetAttr { size, ..SetAttr::default() });
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
