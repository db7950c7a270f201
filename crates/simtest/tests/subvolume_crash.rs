//! Subvolumes under power cuts: each making, snapshot, move or deletion is there as a whole or not
//! at all. A snapshot equals its source at the call. Every state that a cut leaves is sound, before
//! and after deletions were finished.

use larder_check::{Kind, Severity};
use larder_format::ids::ObjectId;
use larder_fs::{Fault, FileKind, Filesystem, InodeId, OpenOptions, RenameMode, Tuning};
use larder_simtest::by_hand::{self, new};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{Seq, SimDevice};
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::Config;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What one step does. Each ends with what makes it durable: a snapshot does so itself.
#[derive(Clone, Copy, Debug)]
enum Op {
    Create(&'static str),
    /// So many files in a directory, each with some bytes; the last number makes them different.
    Files(&'static str, usize, u8),
    Unlink(&'static str, usize),
    Snapshot(&'static str, &'static str),
    Frozen(&'static str, &'static str),
    Delete(&'static str),
    Move(&'static str, &'static str),
    /// The two names change places.
    Swap(&'static str, &'static str),
    /// A move that leaves a whiteout.
    Leave(&'static str, &'static str),
    Directory(&'static str),
    Sync,
    /// Of one inode; it has to be a commit where an entry of a subvolume is concerned.
    Fsync(&'static str),
}
use Op::{
    Create, Delete, Directory, Files, Frozen, Fsync, Leave, Move, Snapshot, Swap, Sync, Unlink,
};

/// Each in the order of its steps.
const WORKLOADS: [&[&[Op]]; 8] = [
    &[
        &[Create("a"), Files("a", 40, 1), Sync],
        &[Files("a", 20, 2), Snapshot("a", "b")],
        &[Files("b", 10, 3), Unlink("a", 15), Sync],
        &[Delete("a"), Sync],
        &[Delete("b"), Sync],
    ],
    &[
        &[Create("a"), Files("a", 60, 1), Frozen("a", "s")],
        &[Unlink("a", 60), Delete("a"), Sync],
        &[Snapshot("s", "t")],
        &[Delete("s"), Files("t", 9, 4), Sync],
    ],
    &[
        &[Create("a"), Create("a/in"), Files("a/in", 30, 1), Files("a", 5, 2), Snapshot("a", "b")],
        &[Move("a/in", "out"), Files("out", 3, 7), Sync],
        &[Delete("a"), Snapshot("out", "b/again")],
        &[Move("b/again", "x"), Delete("b"), Sync],
    ],
    &[
        // Of the top level, into itself, several times.
        &[Files("", 50, 1), Frozen("", "one")],
        &[Files("", 25, 2), Snapshot("", "two")],
        &[Files("two", 12, 3), Snapshot("two", "two/three")],
        &[Move("two/three", "three"), Delete("two"), Sync],
        &[Delete("one"), Sync],
    ],
    &[
        // Come and gone between two commits.
        &[Create("a"), Files("a", 10, 1), Delete("a"), Create("a"), Files("a", 3, 2), Sync],
        &[Create("b"), Move("b", "c"), Delete("a"), Move("c", "a"), Sync],
        &[Files("a", 8, 5), Frozen("a", "f")],
        &[Delete("f"), Delete("a"), Sync],
    ],
    &[
        // A deletion of some length, and other things meanwhile.
        &[Create("a"), Files("a", 150, 1), Snapshot("a", "b")],
        &[Unlink("b", 70), Snapshot("b", "c")],
        &[Delete("a"), Sync],
        &[Files("b", 40, 2), Sync],
        &[Delete("c"), Sync],
        &[Files("b", 20, 3), Sync],
    ],
    &[
        // Changing places: with another one in the same tree and in another, with a directory and
        // with a file.
        &[Create("a"), Create("b"), Create("b/in"), Files("a", 5, 1), Files("b/in", 3, 2), Sync],
        &[Directory("d"), Files("d", 4, 3), Files("", 6, 4), Sync],
        &[Swap("a", "b"), Sync],
        &[Swap("b", "a/in"), Fsync("a")],
        &[Swap("d", "b"), Fsync("")],
        &[Swap("a file, number 2", "d"), Fsync("d")],
        &[Files("b", 5, 5), Sync],
        &[Swap("a", "b"), Swap("b/in", "a file, number 2"), Swap("a", "b"), Sync],
        &[Delete("a/in"), Swap("a", "b"), Sync],
    ],
    &[
        // Leaving a whiteout: in the same directory, in another, in another tree, in place of a
        // directory.
        &[Create("a"), Create("b"), Directory("d"), Directory("d/e"), Files("a", 5, 1), Sync],
        &[Leave("a", "c"), Sync],
        &[Leave("c", "d/e"), Fsync("d")],
        &[Leave("d/e", "b/x"), Fsync("d")],
        &[Files("b/x", 7, 2), Sync],
        &[Leave("b/x", "b/y"), Fsync("b")],
        &[Leave("b/y", "z"), Swap("z", "a"), Delete("a"), Sync],
    ],
];

/// Everything that a tree shows: content of files; directories have none.
type Shown = BTreeMap<String, Option<Vec<u8>>>;

fn walk(fs: &Filesystem, dir: InodeId, path: &str, out: &mut Shown) -> Result<(), String> {
    let mut entries = Vec::new();
    let each = &mut |e: &larder_fs::DirEntry<'_>| {
        entries.push((String::from_utf8_lossy(e.name).into_owned(), e.id, e.kind));
        true
    };
    fs.readdir(dir, 2, each).map_err(|e| format!("listing {path:?}: {e}"))?;
    for (name, id, kind) in entries {
        let at = format!("{path}/{name}");
        let content = if kind == FileKind::Directory {
            walk(fs, id, &at, out)?;
            None
        } else if kind == FileKind::CharDevice {
            Some(b"a whiteout".to_vec())
        } else {
            let size = fs.getattr(id).map_err(|e| format!("{at}: {e}"))?.size;
            let mut data = vec![0; usize::try_from(size).map_err(|e| e.to_string())?];
            let n = fs.read(id, 0, &mut data).map_err(|e| format!("reading {at}: {e}"))?;
            if n != data.len() {
                return Err(format!("{at} is cut off"));
            }
            Some(data)
        };
        out.insert(at, content);
    }
    Ok(())
}

fn shown(fs: &Filesystem, dir: InodeId) -> Result<Shown, String> {
    let mut out = Shown::new();
    walk(fs, dir, "", &mut out)?;
    Ok(out)
}

fn find(fs: &Filesystem, path: &str) -> InodeId {
    let names = path.split('/').filter(|n| !n.is_empty());
    names.fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()).expect("it was made").id)
}

fn split<'a>(fs: &Filesystem, path: &'a str) -> (InodeId, &'a [u8]) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    (find(fs, dir), name.as_bytes())
}

/// Does it. The error is what a snapshot shows that its source did not.
fn run(fs: &Filesystem, op: Op) -> Result<(), String> {
    let text = |e: larder_fs::Error| format!("{op:?}: {e}");
    let snapshot = |from: &str, to: &str, read_only| {
        let source = find(fs, from);
        let mut before = shown(fs, source)?;
        let (dir, name) = split(fs, to);
        let made = fs.snapshot(source.subvol, dir, name, read_only).map_err(text)?;
        let top = InodeId { subvol: made, ino: ObjectId::FIRST_FREE.0 };
        let mut after = shown(fs, top)?;
        // Subvolumes inside are empty directories.
        let inside: Vec<String> = fs
            .subvolumes()
            .map_err(text)?
            .iter()
            .filter_map(|s| {
                let (parent, _, name) = s.parent.as_ref()?;
                (*parent == source.subvol).then(|| format!("/{}", String::from_utf8_lossy(name)))
            })
            .collect();
        let below =
            |path: &String| inside.iter().any(|i| path == i || path.starts_with(&format!("{i}/")));
        before.retain(|path, _| !below(path));
        after.retain(|path, _| !below(path));
        if before == after {
            Ok(())
        } else {
            Err(format!("{op:?}: the snapshot is not what its source was"))
        }
    };
    let rename = |from, to, mode| {
        let ((dir, name), (to_dir, to_name)) = (split(fs, from), split(fs, to));
        fs.rename(dir, name, to_dir, to_name, mode).map_err(text)
    };
    match op {
        Create(path) => {
            let (dir, name) = split(fs, path);
            fs.create_subvolume(dir, name, &new(FileKind::Directory)).map(drop).map_err(text)
        }
        Files(path, count, tag) => {
            let dir = find(fs, path);
            for n in 0..count {
                let name = format!("a file, number {n}");
                let id = match fs.lookup(dir, name.as_bytes()) {
                    Ok(found) => found.id,
                    Err(_) => {
                        fs.create(dir, name.as_bytes(), &new(FileKind::Regular)).map_err(text)?.id
                    }
                };
                let data = vec![tag.wrapping_add(n as u8); n * 337 % 9000];
                fs.write(id, 0, &data).map_err(text)?;
            }
            Ok(())
        }
        Unlink(path, count) => {
            let dir = find(fs, path);
            (0..count).try_for_each(|n| {
                fs.unlink(dir, format!("a file, number {n}").as_bytes()).map_err(text)
            })
        }
        Snapshot(from, to) => snapshot(from, to, false),
        Frozen(from, to) => snapshot(from, to, true),
        Delete(path) => {
            let (dir, name) = split(fs, path);
            fs.delete_subvolume(dir, name).map(drop).map_err(text)
        }
        Move(from, to) => rename(from, to, RenameMode::Replace),
        Swap(from, to) => rename(from, to, RenameMode::Exchange),
        Leave(from, to) => rename(from, to, RenameMode::Whiteout { uid: 0, gid: 0 }),
        Directory(path) => {
            let (dir, name) = split(fs, path);
            fs.create(dir, name, &new(FileKind::Directory)).map(drop).map_err(text)
        }
        Sync => fs.sync().map_err(text),
        Fsync(path) => fs.fsync(find(fs, path), false).map_err(text),
    }
}

/// What `larder check` has against the image.
fn complaints(device: Arc<SimDevice>) -> Result<(), String> {
    // Where a cut comes between the copies of the superblock, one is older.
    by_hand::complaints(&[device], |f| {
        f.severity() != Severity::Note && f.kind != Kind::SuperMirrorGeneration
    })
}

/// Runs a workload and judges every state that a power cut in it can leave. How many there were,
/// and what was wrong.
fn judge(steps: &[&[Op]], tuning: Tuning, samples: usize) -> (usize, Option<String>) {
    let config = Config::new(1).expect("a new file system");
    let broken =
        OpenOptions { tuning: Tuning { fake_clock: true, ..tuning.clone() }, ..config.options };
    let sound = OpenOptions {
        tuning: Tuning { fake_clock: true, drop_step: tuning.drop_step, ..Tuning::default() },
        ..broken.clone()
    };
    let device = Arc::new(SimDevice::new(config.base));
    let fs = Filesystem::open(device.clone(), broken).expect("open");
    let mut states = vec![shown(&fs, fs.root()).expect("an empty one")];
    let mut times: Vec<(Seq, Seq)> = Vec::new();
    for step in steps {
        let begin = device.mark();
        for op in *step {
            if let Err(e) = run(&fs, *op) {
                return (0, Some(e));
            }
        }
        times.push((begin, device.mark()));
        // Where dropping commits, it must not do so in the midst of the next step.
        if tuning.drop_step.is_some()
            && let Err(e) = fs.wait_for_drops()
        {
            return (0, Some(e.to_string()));
        }
        match shown(&fs, fs.root()) {
            Ok(all) => states.push(all),
            Err(e) => return (0, Some(e)),
        }
    }
    if let Err(e) = fs.wait_for_drops().and_then(|()| fs.close()) {
        return (0, Some(e.to_string()));
    }
    let crashes = Crashes::of(&device.recording(), &Limits { samples, ..Limits::default() });
    let dir = scratch();
    let path = dir.path().join("state.img");
    let can_check = need(&[Need::BtrfsProgs]);
    for (i, state) in crashes.states.iter().enumerate() {
        let image = crashes.image(state);
        let promised = times.iter().filter(|t| t.1 <= state.latest).count();
        let begun = times.iter().filter(|t| t.0 < state.earliest).count();
        let device = Arc::new(SimDevice::new(image.clone()).unrecorded());
        let verdict = (|| {
            complaints(device.clone())?;
            let fs = Filesystem::open(device.clone(), sound.clone()).map_err(|e| e.to_string())?;
            let now = shown(&fs, fs.root())?;
            if !states[promised..=begun].contains(&now) {
                let is = states.iter().position(|s| *s == now);
                return Err(format!("state {is:?} is shown, promised {promised}, begun {begun}"));
            }
            fs.wait_for_drops().map_err(|e| e.to_string())?;
            fs.close().map_err(|e| e.to_string())?;
            complaints(device.clone()).map_err(|e| format!("after it went on: {e}"))?;
            if can_check && i % 64 == 0 {
                for (when, image) in [("before", &image), ("after", &device.image())] {
                    image.write_sparse(&path).map_err(|e| e.to_string())?;
                    let report = btrfs_check(&path, true);
                    if !report.is_clean() {
                        return Err(format!("btrfs check {when}: {report}"));
                    }
                }
            }
            Ok::<(), String>(())
        })();
        if let Err(e) = verdict {
            return (crashes.states.len(), Some(format!("{e}\n{}", crashes.describe(state))));
        }
    }
    (crashes.states.len(), None)
}

#[test]
fn subvolumes_are_there_or_not() {
    let mut all = 0;
    for (n, steps) in WORKLOADS.iter().enumerate() {
        for drop_step in [None, Some(30)] {
            let (states, wrong) = judge(steps, Tuning { drop_step, ..Tuning::default() }, 1);
            assert_eq!(wrong, None, "workload {n}, steps of {drop_step:?}");
            println!("workload {n}, steps of {drop_step:?}: {states} states");
            all += states;
        }
    }
    assert!(all > 500, "{all}");
}

#[test]
fn broken_subvolumes_are_caught() {
    for tuning in [
        Tuning::from(Fault::SnapshotWithoutSharing),
        Tuning::from(Fault::SnapshotWithoutData),
        Tuning::from(Fault::SnapshotBeforeItems),
        Tuning {
            fault: Some(Fault::DropWithoutProgress),
            drop_step: Some(30),
            ..Tuning::default()
        },
        Tuning { fault: Some(Fault::DropProgressEarly), drop_step: Some(30), ..Tuning::default() },
        Tuning::from(Fault::NoFlushBeforeSuper),
    ] {
        let caught = WORKLOADS.iter().find_map(|steps| judge(steps, tuning.clone(), 1).1);
        println!("{}", caught.as_ref().unwrap_or_else(|| panic!("{tuning:?} went unnoticed")));
    }
}
