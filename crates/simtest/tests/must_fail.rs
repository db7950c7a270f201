//! The simulation itself is tested: an engine that is broken on purpose must be caught, and within
//! few states.
//!
//! Each test turns one `Fault` on, runs workloads that depend on what it breaks, and demands a
//! failure. The same workloads on the engine as it is must pass, so that the failure is the fault's
//! doing.

use larder_fs::{Fault, FileKind, Filesystem, NewInode, OpenOptions, SetAttr, Tuning};
use larder_simtest::cloning::cloning;
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{self, Access, AccessKind, SimDevice};
use larder_simtest::disks::{Kind, Plan, Refused};
use larder_simtest::faults;
use larder_simtest::image::Image;
use larder_simtest::judge::Depth;
use larder_simtest::model::{Domain, History};
use larder_simtest::ops::parse;
use larder_simtest::oracle::{KernelMount, Need, btrfs, mkfs_btrfs, need, scratch};
use larder_simtest::runner::{Config, Outcome, Run, SIZE, judge_run, perform, run, show};
use larder_simtest::workload::{Workload, prefix};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// States in which a broken engine must have been caught.
const BOUND: u64 = 4000;

const LOOK: Depth = Depth::LOOK;
const CHECK: Depth = Depth { emptied: 0.2, recovered: 0.0, ours: 0.0, checked: 0.3, kernel: 0.0 };

/// Makes and removes enough that freed blocks would be taken again at once.
const CHURN: &str = "mk A; new A/f; A/f[0,200K)=a; COMMIT; A/f[0,200K)=b; new A/g; A/g[0,100K)=c; \
    F A/g; rm A/f; new A/h; A/h[0,200K)=d; COMMIT; trunc A/h 0; A/g[0,100K)=e; F A/g; \
    A/h[0,150K)=f; F A/h; new i; i[0,300K)=g; COMMIT; rm i; new j; j[0,300K)=h; F j; rm A/g; new \
    k; k[0,100K)=i; F k";

const NAMES: &str = "mk A; new A/f; xa A/f user.k=v; F A/f; mv A/f g; F g; new A/f; COMMIT; ln g \
    A/g; F A; xa g user.k=w; F g; rm A/f; COMMIT";

fn config(base: Option<&Image>, depth: Depth, tuning: Tuning) -> Config {
    let mut config = Config::new(1).expect("a new file system");
    if let Some(base) = base {
        config.base = base.clone();
    }
    config.options =
        OpenOptions { tuning: Tuning { fake_clock: true, ..tuning }, ..config.options };
    config.limits = Limits { samples: 16, per_epoch: 120, ..config.limits };
    config.max_states = 600;
    config.max_failures = 1;
    config.depth = depth;
    config
}

fn outcome(base: Option<&Image>, depth: Depth, tuning: Tuning, texts: &[&str]) -> Outcome {
    let config = config(base, depth, tuning);
    let mut outcome = Outcome::default();
    for text in texts {
        outcome.add(run(&config, &Workload::script("must fail", text).expect("a workload")));
        if !outcome.failures.is_empty() {
            break;
        }
    }
    outcome
}

fn caught_on(base: Option<&Image>, depth: Depth, texts: &[&str], broken: Tuning) {
    if depth.checked > 0.0 && !need(&[Need::BtrfsProgs]) {
        return;
    }
    let found = outcome(base, depth, broken.clone(), texts);
    let states: u64 = found.states.values().sum();
    assert!(!found.failures.is_empty(), "{broken:?} went unnoticed: {found}");
    assert!(states <= BOUND, "{broken:?} took {states} states");
    println!("caught after {states} states: {}", found.failures[0]);
    outcome(base, depth, Tuning::default(), texts).assert_sound();
}

fn caught(depth: Depth, texts: &[&str], broken: Tuning) {
    caught_on(None, depth, texts, broken);
}

/// What the walks of [`larder_simtest::cloning`] find: those on plain data, one after the other.
fn caught_walking(broken: Tuning) {
    let walk = |tuning: &Tuning, seed: u64| {
        let mut config = config(None, LOOK, tuning.clone());
        config.max_states = 60;
        run(&config, &cloning(seed, 24))
    };
    let mut found = Outcome::default();
    for seed in (0..WALKS).map(|n| 2 * n) {
        found.add(walk(&broken, seed));
        if let Some(failure) = found.failures.first() {
            println!("caught after {} walks: {failure}", found.workloads);
            walk(&Tuning::default(), seed).assert_sound();
            return;
        }
    }
    panic!("{broken:?} went unnoticed: {found}");
}

/// Walks in which a broken engine must have been caught.
const WALKS: u64 = 100;

#[test]
fn a_log_with_a_part_of_the_checksums() {
    caught_walking(Fault::LogPartCsums.into());
}

#[test]
fn a_log_with_new_checksums_only() {
    let broken = Tuning::from(Fault::LogOlderCsums);
    // A clone has both parts at once; of a file that is written in more places than are kept apart
    // all is logged.
    let given = "new h; alloc h[0,64K); h[0,8K)=a; COMMIT; h[8K,16K)=b; copy h[4K,16K)>h@64K; F h";
    let scattered: String = (0..520).map(|n| format!("h[{}K,{}K)=b; ", 8 * n, 8 * n + 4)).collect();
    let scattered =
        format!("new h; alloc h[0,8M); h[4K,8K)=a; h[12K,16K)=a; COMMIT; {scattered}F h");
    let depth = Depth { checked: 1.0, ..LOOK };
    caught(depth, &[given], broken.clone());
    caught(depth, &[&scattered], broken);
}

#[test]
fn a_log_with_what_another_file_has_preallocated() {
    let broken = Tuning::from(Fault::LogPreallocated);
    let depth = Depth { checked: 1.0, recovered: 1.0, ..LOOK };
    let committed = "new h; alloc h[0,64K); new g; COMMIT; h[8K,16K)=b; copy h[4K,16K)>g@4K; F g";
    let logged =
        "new z; COMMIT; new h; alloc h[0,64K); F h; new g; h[8K,16K)=b; copy h[4K,16K)>g@4K; F g";
    caught(depth, &[committed], broken.clone());
    caught(depth, &[logged], broken);
}

#[test]
fn extents_of_a_log_that_grow() {
    caught_walking(Fault::LogExtentsGrow.into());
}

#[test]
fn extents_that_were_shared_and_grow() {
    caught_walking(Fault::LogSharedGrow.into());
}

#[test]
fn in_place_writes_of_what_comes_back_elsewhere() {
    caught_walking(Fault::InPlaceSharedBefore.into());
}

/// Data that is durable, data of the running transaction, and data that was written just now,
/// cloned.
const CLONES: &str = "new f; f[0,64K)=a; COMMIT; new g; copy f[0,64K)>g@0; F g; f[64K,128K)=b; \
    copy f[32K,96K)>g@64K; F g; rm f; COMMIT; new h; h[0,128K)=c; F h; copy g[4K,40K)>h@8K; rm g; \
    COMMIT; new i; i[0,64K)=d; F i";

const DEDUPES: &str = "new f; f[0,64K)=a; new g; g[0,64K)=a; COMMIT; dedupe f[0,64K)>g@0; F g; rm \
    f; COMMIT; new h; h[0,128K)=c; F h; rm g; COMMIT; new i; i[0,64K)=d; F i";

#[test]
fn a_dedupe_without_a_reference() {
    let broken = Tuning::from(Fault::CloneWithoutReference);
    caught(CHECK, &[DEDUPES], broken);
}

#[test]
fn a_clone_without_a_reference() {
    let broken = Tuning::from(Fault::CloneWithoutReference);
    caught(CHECK, &[CLONES], broken);
}

#[test]
fn a_clone_without_what_is_in_memory() {
    caught(LOOK, &[CLONES], Fault::CloneUnsettled.into());
}

#[test]
fn no_flush_before_the_superblock() {
    caught(LOOK, &[NAMES], Fault::NoFlushBeforeSuper.into());
}

#[test]
fn no_flush_after_the_superblock() {
    caught(LOOK, &[NAMES], Fault::NoFlushAfterSuper.into());
}

#[test]
fn superblock_before_the_nodes() {
    caught(LOOK, &[NAMES], Fault::SuperFirst.into());
}

/// Two threads. The first one's last operations are held at the first access that matches;
/// meanwhile the second one works until `waits` says that it is waiting for the first, or to its
/// end. Judges all crash states.
fn overlapped(
    tuning: &Tuning,
    before: &str,
    held: (&str, fn(&Access) -> bool),
    meanwhile: (&str, bool),
) -> Outcome {
    let config = config(None, LOOK, tuning.clone());
    let ops = |text: &str| parse(text).expect("a workload").remove(0);
    let world = show(&config.base, &config.options).expect("a fresh file system");
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let (first, second) = (Domain::new(prefix(0), world.clone()), Domain::new(prefix(1), world));
    let (first, _) = perform(&fs, &device, first, &ops(before)).expect(before);
    let ((held, holds), (meanwhile, waits)) = (held, meanwhile);
    let taken = AtomicBool::new(false);
    let gate = device.gate(move |a| holds(a) && !taken.swap(true, Ordering::SeqCst));
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| perform(&fs, &device, first, &ops(held)));
        assert!(gate.wait_for(1, PATIENCE), "{held} arrives at the gate");
        let other = device.gate(|a| a.is_write() && !a.is_superblock());
        let second = scope.spawn(|| perform(&fs, &device, second, &ops(meanwhile)));
        assert!(other.wait_for(1, PATIENCE), "{meanwhile} writes while {held} is held");
        other.open();
        if waits {
            gate.open();
        }
        let second = second.join().expect("no panic").expect(meanwhile);
        gate.open();
        (first.join().expect("no panic").expect(held).0, second.0)
    });
    drop(gate);
    let mut history = History { domains: vec![first, second] };
    let begin = device.mark();
    fs.close().expect("close");
    history.close(begin, device.mark());
    judge_run(&config, "overlapped", &Run { recording: device.recording(), history })
}

#[test]
fn freed_space_is_used_at_once() {
    // While the commit that frees the file is not durable, another one of its size is written. The
    // rest of the block group is full but for less than that: how much fills it is found by trying.
    let run = |filler: u64, tuning: &Tuning| {
        let before = format!(
            "new t0_f; t0_f[0,2M)=a; F t0_f; new t0_z; t0_z[0,{filler}M)=z; COMMIT; rm t0_f"
        );
        overlapped(
            tuning,
            &before,
            ("COMMIT", Access::is_superblock),
            ("new t1_g; t1_g[0,2M)=b; F t1_g", true),
        )
    };
    let broken = Tuning::from(Fault::ReusePinned);
    let filler = (5..9).find(|n| !run(*n, &broken).failures.is_empty());
    run(filler.expect("reuse is noticed"), &Tuning::default()).assert_sound();
}

#[test]
fn discards_before_the_superblock() {
    caught(LOOK, &[CHURN], Fault::DiscardEarly.into());
}

#[test]
fn extents_before_their_data() {
    // While the file's data are on their way, another file's fsync commits.
    let run = |tuning: &Tuning| {
        let data = |a: &Access| a.is_write() && !a.is_superblock();
        overlapped(
            tuning,
            "new t0_f; t0_f[0,100K)=a",
            ("F t0_f", data),
            ("new t1_g; F t1_g", false),
        )
    };
    let commits = Tuning { no_log: true, ..Tuning::default() };
    let found = run(&Tuning { fault: Some(Fault::ExtentBeforeData), ..commits.clone() });
    assert!(!found.failures.is_empty(), "early extents went unnoticed: {found}");
    run(&commits).assert_sound();
}

#[test]
fn a_log_before_the_commit_that_it_follows() {
    // While the nodes of a commit are on their way, another file is synced.
    let run = |tuning: &Tuning, waits: bool| {
        let nodes = |a: &Access| a.is_write() && !a.is_superblock();
        let before = "new t0_f; t0_f[0,64K)=a; COMMIT; new t0_g; xa t0_g user.k=v";
        overlapped(tuning, before, ("COMMIT", nodes), ("new t1_g; F t1_g", waits))
    };
    let found = run(&Fault::LogEarlySuper.into(), false);
    assert!(!found.failures.is_empty(), "an early log went unnoticed: {found}");
    run(&Tuning::default(), true).assert_sound();
}

#[test]
fn a_log_without_flushes() {
    caught(LOOK, &[NAMES], Fault::LogNoFlush.into());
}

#[test]
fn a_log_without_checksums() {
    let texts = ["new f; f[0,64K)=a; F f; f[64K,200K)=b; F f"];
    caught(LOOK, &texts, Fault::LogNoCsums.into());
}

#[test]
fn a_log_without_deletions() {
    let texts = ["mk A; new A/f; new A/g; COMMIT; rm A/f; F A; mv A/g g; F g"];
    caught(LOOK, &texts, Fault::LogNoDeletions.into());
}

#[test]
fn a_log_that_forgets_who_loses_a_name() {
    let texts = ["mk A; mk A/X; new A/X/f; A/X/f[0,9000)=a; COMMIT; mv A/X A/Y; mk A/X; F A/X"];
    caught(LOOK, &texts, Fault::LogNoConflicts.into());
}

#[test]
fn a_log_without_holes_behind_what_was_cut() {
    let texts = ["new f; f[0,16K)=a; COMMIT; trunc f 5000; F f; trunc f 32K; F f"];
    caught(LOOK, &texts, Fault::LogNoHoles.into());
}

#[test]
fn a_log_that_overwrites_itself() {
    let texts = ["new f; f[0,9000)=a; F f; new g; g[0,9000)=b; F g; new h; F h; f[0,9000)=c; F f"];
    caught(LOOK, &texts, Fault::LogOverwrites.into());
}

#[test]
fn discards_of_more_than_was_freed() {
    // Four files share a granule; some of them go.
    let text = "new e; e[0,20K)=e; new f; f[0,20K)=a; new g; g[0,20K)=b; new h; h[0,20K)=c; \
        COMMIT; rm f; COMMIT; trunc h 5000; COMMIT; rm e; COMMIT";
    caught(LOOK, &[text], Fault::DiscardBeyond.into());
}

#[test]
fn a_size_that_covers_what_is_not_there_yet() {
    // Nothing writes the appended bytes back before the other file's fsync commits.
    let text = "new f; f[0,8K)=a; new g; F f; f+20K=b; F g; f+300=c; g[0,100)=d; F g; F f";
    caught(
        LOOK,
        &[text],
        Tuning { fault: Some(Fault::SizeBeforeData), no_log: true, ..Tuning::default() },
    );
}

/// Overwrites a NODATACOW file of which there is a snapshot, and looks at the snapshot in every
/// crash state.
fn written_under_a_snapshot(tuning: &Tuning) -> Result<usize, String> {
    let config = config(None, LOOK, tuning.clone());
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let options = OpenOptions { no_data_cow: true, ..config.options };
    let fs = Filesystem::open(device.clone(), options.clone()).expect("open");
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: &[],
        xattrs: &[],
    };
    let root = fs.root();
    let file = fs.create(root, b"f", &new).expect("create").id;
    let (old, new) = (vec![b'a'; 64 << 10], vec![b'b'; 64 << 10]);
    fs.write(file, 0, &old).expect("write");
    fs.fsync(file, false).expect("fsync");
    // Where nobody shares it the same write does go in place.
    fs.write(file, 0, &old[..4096]).expect("write");
    fs.fsync(file, false).expect("fsync");
    fs.snapshot(root.subvol, root, b"snap", true).expect("snapshot");
    let begin = device.mark();
    fs.write(file, 0, &new[..30_000]).expect("write");
    fs.fsync(file, false).expect("fsync");
    fs.write(file, 30_000, &new[30_000..]).expect("write");
    fs.sync().expect("sync");
    fs.close().expect("close");
    let crashes = Crashes::of(&device.recording(), &config.limits);
    let mut seen = 0;
    for state in crashes.states.iter().filter(|s| s.earliest >= begin) {
        let device = Arc::new(SimDevice::new(crashes.image(state)));
        let fs = Filesystem::open(device, options.clone()).map_err(|e| format!("open: {e}"))?;
        let snap = fs.lookup(fs.root(), b"snap").expect("durable since the call returned").id;
        let copy = fs.lookup(snap, b"f").expect("it is in the snapshot").id;
        let mut found = vec![0; old.len()];
        fs.read(copy, 0, &mut found).map_err(|e| format!("read: {e}"))?;
        if found != old {
            return Err(format!("the snapshot has changed in state {:016x}", state.id));
        }
        seen += 1;
    }
    Ok(seen)
}

#[test]
fn in_place_writes_of_what_a_snapshot_shares() {
    let broken = Tuning::from(Fault::InPlaceShared);
    assert!(written_under_a_snapshot(&broken).is_err(), "a snapshot that changes went unnoticed");
    let seen = written_under_a_snapshot(&Tuning::default()).expect("it stays as it was");
    assert!(seen > 10, "{seen} states");
}

/// Cuts a file of many extents to nothing, in many transactions, and makes it grow again in every
/// crash state.
fn cut_and_grown(tuning: &Tuning) -> Result<usize, String> {
    const BLOCKS: u64 = 400;
    let config = config(None, LOOK, Tuning { commit_steps: true, ..tuning.clone() });
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: &[],
        xattrs: &[],
    };
    let file = fs.create(fs.root(), b"f", &new).expect("create").id;
    for n in 0..BLOCKS {
        fs.write(file, n * 8192, &[b'x'; 4096]).expect("write");
    }
    fs.sync().expect("sync");
    let begin = device.mark();
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    fs.setattr(file, &size(0)).expect("cut");
    let end = device.mark();
    fs.close().expect("close");
    let crashes = Crashes::of(&device.recording(), &config.limits);
    let mut cut = 0;
    for state in crashes.states.iter().filter(|s| s.earliest >= begin && s.latest <= end) {
        let device = Arc::new(SimDevice::new(crashes.image(state)));
        let fs =
            Filesystem::open(device, config.options.clone()).map_err(|e| format!("open: {e}"))?;
        let attr = fs.lookup(fs.root(), b"f").map_err(|e| format!("lookup: {e}"))?;
        if attr.size < (BLOCKS - 1) * 8192 {
            let len = attr.size as usize;
            fs.setattr(attr.id, &size(BLOCKS * 8192)).map_err(|e| format!("grow: {e}"))?;
            let mut found = vec![0; (BLOCKS * 8192) as usize];
            fs.read(attr.id, 0, &mut found).map_err(|e| format!("read: {e}"))?;
            if found[len..].iter().any(|b| *b != 0) {
                return Err(format!("what was cut off is there again in state {:016x}", state.id));
            }
            cut += 1;
        }
    }
    Ok(cut)
}

#[test]
fn truncations_that_leave_something_behind() {
    let broken = Tuning::from(Fault::TruncateAtOnce);
    assert!(cut_and_grown(&broken).is_err(), "half a truncation went unnoticed");
    let seen = cut_and_grown(&Tuning::default()).expect("none comes back");
    assert!(seen > 10, "{seen} states");
}

#[test]
fn growth_that_shows_what_was_cut_off() {
    let texts = ["new f; f[0,12K)=a; COMMIT; trunc f 5000; trunc f 9000; F f"];
    caught(LOOK, &texts, Fault::TailShows.into());
}

#[test]
fn reserved_space_that_becomes_data_before_it_is_written() {
    // The write fails: what the file then has there must read as zeros, or be told as lost.
    let text = "new f; alloc f[0,100K); COMMIT; f[0,60K)=a; F f; COMMIT";
    let ops = parse(text).expect("a workload").remove(0);
    let config = |early: bool| {
        let mut config = Config::new(1).expect("a new file system");
        config.max_states = 40;
        config.options.tuning.fault = early.then_some(Fault::ExtentBeforeData);
        config
    };
    let writes = faults::accesses(&config(false), &ops).expect("runs without faults").writes;
    let fails = |early: bool, n: u64| {
        faults::run(&config(early), &ops, &[device::Fault::nth(n, Access::is_write)]).is_err()
    };
    assert!(
        (0..writes).any(|n| fails(true, n)),
        "{writes} writes failed, each once, and nothing was noticed"
    );
    assert!(!(0..writes).any(|n| fails(false, n)));
}

#[test]
fn no_data_checksums() {
    caught(CHECK, &[CHURN], Fault::NoCsums.into());
}

#[test]
fn fsync_that_does_not_wait() {
    let tuning = Tuning::from(Fault::FsyncDoesNotWait);
    let config = config(None, LOOK, tuning);
    let world = show(&config.base, &config.options).expect("a fresh file system");
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    // No flush ends before the fsync has returned: an engine that waits for one would wait for
    // ever.
    let gate = device.gate(|a| a.kind == AccessKind::Flush);
    let ops = parse("new f; F f").expect("a workload").remove(0);
    let (done, ended) = mpsc::channel();
    let domain = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let result = perform(&fs, &device, Domain::new("", world), &ops);
            done.send(()).expect("the test listens");
            result
        });
        assert!(
            ended.recv_timeout(PATIENCE).is_ok() || {
                gate.open();
                false
            },
            "the fsync waits"
        );
        gate.open();
        thread.join().expect("no panic").expect("new file, fsync").0
    });
    drop(gate);
    let mut history = History { domains: vec![domain] };
    let begin = device.mark();
    fs.close().expect("close");
    history.close(begin, device.mark());
    let found = judge_run(&config, "no waiting", &Run { recording: device.recording(), history });
    assert!(!found.failures.is_empty(), "went unnoticed: {found}");
    outcome(None, LOOK, Tuning::default(), &[NAMES]).assert_sound();
}

#[test]
fn stale_free_space_tree() {
    caught(CHECK, &[CHURN], Fault::StaleFreeSpace.into());
}

#[test]
fn no_orphan_items() {
    let texts = ["new f; COMMIT; open f h; rm f; COMMIT; new g; F g; close h; COMMIT"];
    caught(CHECK, &texts, Fault::NoOrphans.into());
}

#[test]
fn no_superblock_mirrors() {
    caught(LOOK, &[NAMES], Fault::NoSuperMirrors.into());
}

/// A file system on which Linux has made files and a snapshot of them.
fn with_snapshot() -> Image {
    let dir = scratch();
    let path = dir.path().join("snapshot.img");
    mkfs_btrfs(&path, SIZE, &["-q"]).expect("mkfs.btrfs");
    let mount = KernelMount::image(&path, "").expect("the kernel mounts");
    for i in 0..300 {
        std::fs::write(mount.join(format!("file-{i:03}")), vec![b'x'; 100 + i * 20])
            .expect("write");
    }
    let top = mount.path().to_str().expect("a plain path");
    btrfs(&["subvolume", "snapshot", "-r", top, &format!("{top}/snap")]).expect("snapshot");
    mount.unmount_clean().expect("unmount");
    Image::from_file(&path).expect("read the image")
}

#[test]
fn sharing_is_ignored() {
    if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let base = with_snapshot();
    let texts = [
        "rm file-000; new n; n[0,9000)=a; F n; mode file-100 600; file-200[0,3000)=b; COMMIT; rm \
         file-299; trunc file-150 10; COMMIT; xa file-003 user.k=v; F file-003",
    ];
    let depth = Depth { emptied: 0.0, ..CHECK };
    caught_on(Some(&base), depth, &texts, Fault::IgnoreSharing.into());
}

#[test]
fn write_errors_are_ignored() {
    let ops = parse(NAMES).expect("a workload").remove(0);
    let mut config = Config::new(1).expect("a new file system");
    config.max_states = 40;
    config.options.tuning.fault = Some(Fault::IgnoreWriteErrors);
    let writes = faults::accesses(&config, &ops).expect("runs without faults").writes;
    let fails =
        |n: u64| faults::run(&config, &ops, &[device::Fault::nth(n, Access::is_write)]).is_err();
    assert!((0..writes).any(fails), "{writes} writes failed, each once, and nothing was noticed");
}

/// On two mirrors, of which one is lost, old or damaged afterwards.
fn caught_on_mirrors(broken: Tuning) {
    let kind = Kind::parse("raid1-raid1-2").expect("a kind");
    let on_mirrors = |tuning: Tuning| {
        let config = kind.config(&config(None, LOOK, tuning), 1.0).expect("mkfs");
        run(&config, &Workload::script("must fail", NAMES).expect("a workload"))
    };
    let found = on_mirrors(broken.clone());
    assert!(!found.failures.is_empty(), "{broken:?} went unnoticed: {found}");
    println!("caught: {}", found.failures[0]);
    on_mirrors(Tuning::default()).assert_sound();
}

#[test]
fn a_superblock_on_one_device_of_several() {
    caught_on_mirrors(Fault::SuperOnOneDevice.into());
}

#[test]
fn a_device_that_was_away_and_is_believed() {
    caught_on_mirrors(Fault::StaleSuperblock.into());
}

#[test]
fn a_mirror_that_refused_a_write_and_is_believed() {
    let kind = Kind::parse("raid1-raid1-2").expect("a kind");
    let text = "new f; f[0,64K)=a; COMMIT; f[0,64K)=b; COMMIT";
    let workload = Workload::script("must fail", text).expect("a workload");
    let failing = |tuning: Tuning, skip| {
        let mut config = config(None, LOOK, tuning);
        // Checksums would tell which of two mirrors is right.
        config.options.no_data_sum = true;
        config.max_states = 8;
        let (refused, effect) = (Refused::Writes, device::Effect::None);
        let plan = Plan { disk: 0, refused, skip, forever: false, effect };
        let config = kind.config(&config, 0.0).expect("mkfs");
        faults::run_plan(&config, &workload.segments[0].threads[0], plan)
    };
    let caught = (0..8).find_map(|skip| failing(Fault::MirrorErrors.into(), skip).err());
    println!("caught: {}", caught.expect("it went unnoticed"));
    for skip in 0..8 {
        failing(Tuning::default(), skip).expect("the engine as it is");
    }
}
