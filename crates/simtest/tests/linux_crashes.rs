//! Crashes of Linux's own btrfs, replayed by Larder and by Linux.
//!
//! Workloads run on a mount of the kernel whose disk is a [`RecordedDisk`], so that all its writes
//! and flushes are known. From these follow the disks that a power cut can leave: everything that a
//! returned flush covers, and any part of the rest. The kernel and Larder replay each disk that is
//! chosen, read-only and read-write. Both results must be the same tree, keep what the syncs
//! promised, and check clean.
//!
//! Our model asks for more than Linux's log has: see [`History::verify_linux`].
//!
//! `LARDER_SCALE=10` takes ten times as many workloads and four times as many states of each.

use anyhow::{Context, Result, anyhow, ensure};
use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::crash::{CrashState, Crashes, Kind, Limits};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::model::{Domain, History};
use larder_simtest::ops::{Move, Op};
use larder_simtest::oracle::{
    EngineTree, KernelMount, Need, PathRunner, StdTree, kernel_verdict, manifest, mkfs_btrfs, need,
    scratch,
};
use larder_simtest::recorded::RecordedDisk;
use larder_simtest::runner::{Run, show};
use larder_simtest::walk::walk;
use larder_simtest::workload::{Sequences, Workload, random};
use larder_simtest::{scenarios, workload};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

const SIZE: u64 = 256 << 20;
const NEEDS: [Need; 4] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs, Need::Fuse];

fn scale() -> usize {
    std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn options(read_only: bool) -> OpenOptions {
    OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() }
}

fn first() -> String {
    workload::prefix(0) + "first"
}

/// A file system that Linux made and has changed once: the first change makes a chunk, which a log
/// could not be hung on.
fn fresh(mkfs: &'static [&'static str]) -> Result<Image> {
    let dir = scratch();
    let path = dir.path().join("fresh.img");
    mkfs_btrfs(&path, SIZE, mkfs)?;
    let mount = KernelMount::image(&path, "noatime")?;
    // A name that the first of several threads has for its own.
    std::fs::write(mount.join(first()), vec![1; 1 << 20])?;
    mount.sync()?;
    mount.unmount_clean()?;
    Ok(Image::from_file(&path)?)
}

/// Runs operations on the kernel's mount of a recorded disk, each thread's on a thread of its own.
fn run(base: &Image, threads: &[Vec<Op>], mount: &str) -> Result<Run> {
    let world = show(base, &options(true)).map_err(|e| anyhow!(e))?;
    let device = Arc::new(SimDevice::new(base.clone()));
    let disk = RecordedDisk::serve(Arc::clone(&device))?;
    let mount =
        KernelMount::image(&disk.path(), &format!("noatime,commit=300,ssd,nodiscard{mount}"))?;
    let top = mount.path();
    let domains = std::thread::scope(|scope| {
        let mut running = Vec::new();
        for (i, ops) in threads.iter().enumerate() {
            let name = if threads.len() > 1 { workload::prefix(i) } else { String::new() };
            let mut world = world.clone();
            if i > 0 {
                world.apply(&Op::Unlink(first())).map_err(|e| anyhow!("{e:?}"))?;
            }
            let (domain, device) = (Domain::new(name, world), &device);
            running.push(scope.spawn(move || perform(top, device, domain, ops)));
        }
        running.into_iter().map(|t| t.join().expect("no panic")).collect::<Result<Vec<_>>>()
    })?;
    let mut history = History { domains };
    let begin = device.mark();
    mount.unmount_clean()?;
    let end = device.mark();
    history.close(begin, end);
    disk.end()?;
    Ok(Run { recording: device.recording(), history })
}

/// Runs one thread's operations. Those that the kernel refuses the model must refuse.
fn perform(top: &Path, device: &SimDevice, mut domain: Domain, ops: &[Op]) -> Result<Domain> {
    let mut runner = PathRunner::new(top);
    for op in ops {
        let mut after = domain.now().clone();
        let expected = after.apply(op);
        let begin = device.mark();
        let result = runner.run(op);
        let end = device.mark();
        match (expected, result) {
            (Ok(touched), Ok(())) => {
                if let (Some(made), Some(real)) = (touched.made, runner.made(op)?) {
                    after.set_real(made, real);
                }
                domain.push(op, after, touched, begin, Some(end));
            }
            (Err(_), Err(_)) => {}
            (Err(reason), Ok(())) => {
                anyhow::bail!("{op}: done, but the model refuses it ({reason:?})")
            }
            (Ok(_), Err(e)) => return Err(e),
        }
    }
    Ok(domain)
}

/// Replays a state on both sides; the promise that both have not kept, because Linux's log keeps
/// less. `deep`: the kernel also reads and changes what we replayed.
fn judge(
    image: &Image,
    state: &CrashState,
    history: &History,
    deep: bool,
) -> Result<Option<String>> {
    let dir = scratch();
    let path = dir.path().join("linux.img");
    image.write_sparse(&path)?;
    let mount = KernelMount::image(&path, "noatime").context("Linux replays")?;
    let theirs = manifest(&StdTree::new(mount.path()))?.without_times_of_directories();
    mount.unmount_clean()?;

    let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
    let fs = Filesystem::open(device.clone(), options(true)).context("read-only")?;
    let shown = manifest(&EngineTree(&fs))?.without_times_of_directories();
    drop(fs);
    let counts = device.counts();
    ensure!(counts.refused + counts.writes + counts.discards == 0, "a read-only opening wrote");
    shown.ensure_replayed_alike(&theirs, "read-only")?;

    let device = Arc::new(SimDevice::new(image.clone()).unrecorded());
    let fs = Filesystem::open(device.clone(), options(false)).context("replay")?;
    let shown = manifest(&EngineTree(&fs))?.without_times_of_directories();
    let world = walk(&fs).map_err(|e| anyhow!(e))?;
    fs.close()?;
    drop(fs);
    shown.ensure_replayed_alike(&theirs, "replayed")?;
    let replayed = device.image();
    ensure!(!has_log(&replayed), "the log is still there");
    let checking = larder_check::Options { data: true, threads: 1, ..Default::default() };
    let checked = larder_check::check(&[device], &checking, &|_| ())?;
    ensure!(checked.is_clean(), "larder check: {:?}", checked.findings);
    // Both have come to the same, so this holds or fails for both.
    let mut keeps_less = None;
    for at in [state.latest, state.earliest] {
        let less = history.verify_linux(&world, at).map_err(|e| anyhow!("promised: {e}"))?;
        keeps_less = keeps_less.or(less);
    }
    if deep {
        replayed.write_sparse(&path)?;
        let shown = kernel_verdict(&path)?.without_times_of_directories();
        shown.ensure_replayed_alike(&theirs, "replayed, as the kernel shows it")?;
    }
    Ok(keeps_less)
}

fn has_log(image: &Image) -> bool {
    let mut root = [0; 8];
    image.read(larder_format::SUPER_OFFSETS[0].0 + 0x60, &mut root);
    root != [0; 8]
}

/// How the file system is made and mounted.
#[derive(Clone, Copy)]
struct Setup {
    mkfs: &'static [&'static str],
    mount: &'static str,
}

const PLAIN: Setup = Setup { mkfs: &["-q"], mount: "" };
/// A hole is an item, and leaves split soon.
const OLD: Setup = Setup { mkfs: &["-q", "-O", "^no-holes", "-n", "4096"], mount: "" };
const COMPRESSED: Setup =
    Setup { mkfs: &["-q", "--csum", "xxhash"], mount: ",compress-force=zstd" };

/// What was judged.
#[derive(Default)]
struct Tally {
    distinct: HashSet<u64>,
    with_log: usize,
    by_kind: BTreeMap<Kind, usize>,
    /// States in which Linux has kept less than our model asks for, by workload.
    keeps_less: BTreeMap<String, usize>,
    failures: Vec<String>,
}

/// Runs workloads up to their first power cut, and judges `most` states of each that come with a
/// log and `most / 4` others.
fn crash(workloads: &[Workload], setup: Setup, most: usize) -> Tally {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let base = fresh(setup.mkfs).expect("a fresh file system");
    let mut tally = Tally::default();
    for w in workloads {
        let name = format!("{}: {}", w.name, w.text());
        let threads = &w.segments[0].threads;
        let ran = match run(&base, threads, setup.mount) {
            Ok(ran) => ran,
            Err(e) => {
                tally.failures.push(format!("{name}: {e:#}"));
                continue;
            }
        };
        let limits = Limits { exhaustive: 4, samples: 4, per_epoch: 24, seed: 1 };
        let crashes = Crashes::of(&ran.recording, &limits);
        let mut order: Vec<&CrashState> = crashes.states.iter().collect();
        order.shuffle(&mut StdRng::seed_from_u64(most as u64));
        let mut left = [most / 4, most];
        for state in order {
            let image = crashes.image(state);
            let log = has_log(&image);
            if left[usize::from(log)] == 0 || tally.distinct.contains(&state.id) {
                continue;
            }
            left[usize::from(log)] -= 1;
            tally.distinct.insert(state.id);
            tally.with_log += usize::from(log);
            *tally.by_kind.entry(state.kind).or_default() += 1;
            let judged = judge(&image, state, &ran.history, state.id.is_multiple_of(8));
            if let Ok(Some(less)) = &judged {
                let first = less.lines().next().unwrap_or_default();
                *tally.keeps_less.entry(format!("{name}: {first}")).or_default() += 1;
            }
            if let Err(e) = judged {
                if let Some(dir) = std::env::var_os("LARDER_KEEP_STATES") {
                    let kept = std::path::Path::new(&dir).join(format!("{:016x}.img", state.id));
                    image.write_sparse(&kept).expect("a place to keep states");
                }
                tally.failures.push(format!("{name}\n{e:#}\n{}", crashes.describe(state)));
            }
        }
    }
    let kinds: Vec<String> = tally.by_kind.iter().map(|(k, n)| format!("{k} {n}")).collect();
    println!(
        "{} workloads, {} different disks of Linux, {} with a log; by what was open: {}",
        workloads.len(),
        tally.distinct.len(),
        tally.with_log,
        kinds.join(", ")
    );
    for (what, n) in &tally.keeps_less {
        println!("  in {n} states Linux has kept less: {what}");
    }
    tally
}

fn sound(tally: &Tally, least: usize) {
    assert!(
        tally.failures.is_empty(),
        "{} failures:\n\n{}",
        tally.failures.len(),
        tally.failures.join("\n\n")
    );
    assert!(tally.with_log >= least, "Linux left too few logs: {}", tally.with_log);
}

/// A seeded part.
fn some(mut all: Vec<Workload>, count: usize, seed: u64) -> Vec<Workload> {
    all.shuffle(&mut StdRng::seed_from_u64(seed));
    all.truncate(count);
    all
}

fn sequences(length: usize, seed: u64) -> Vec<Workload> {
    let all = Sequences::all(length);
    let mut order: Vec<usize> = (0..all.skeletons.len()).collect();
    order.shuffle(&mut StdRng::seed_from_u64(seed));
    order.truncate(12 * scale());
    order.into_iter().flat_map(|i| some(all.workloads(i), 2, seed)).collect()
}

/// Extents: what is reserved, punched, zeroed, cloned, overwritten and cut off, around `fsync`s.
const EXTENTS: &[(&str, &str)] = &[
    ("L-E01", "new f; f[0,16K)=a; F f; COMMIT; punch f[8000,12096); punch f[15000,15100); F f"),
    (
        "L-E02",
        "new f; f[0,128K)=a; F f; punch f[96K,128K); punch f[64K,192K); punch f[32K,128K); F f",
    ),
    ("L-E05", "new f; f[0,16K)=a; F f; alloc= f[16K,20K); F f; zero= f[16K,24K); F f"),
    (
        "L-E06",
        "new f; f[0,16K)=a; COMMIT; alloc= f[16K,64K); F f; trunc f 8K; alloc= f[32K,128K); F f",
    ),
    ("L-E07", "new f; f[0,21)=a; alloc f[40,80); F f"),
    ("L-E09", "new f; trunc f 12M; f[2M,10M)=a; COMMIT; punch f[2M,4M); punch f[8M,10M); F f"),
    (
        "L-E10",
        "new f; alloc= f[0,128K); alloc= f[128K,256K); F f; alloc f[0,64K); F f; trunc f 256K; F \
            f; f[0,128K)=a; F f",
    ),
    (
        "L-E14",
        "new f; f[0,2M)=a; alloc f[2M,4M); f[4M,6M)=b; F f; f[2052K,2056K)=c; F f; f[3M,3076K)=d; \
            F f",
    ),
    (
        "L-F01",
        "new f; f[0,256K)=a; F f; f[256K,512K)=b; F f; copy f[0,64K)>f@320K; F f; f[256K,320K)=c; \
            F f",
    ),
    ("L-F02", "new s; new t; s[0,2M)=a; t[0,20M)=b; COMMIT; copy s[0,2M)>t@19M; F t"),
    (
        "L-F04",
        "new s; s[0,1M)=a; new t; F s; copy s[0,1M)>t@0; F t; s[256K,512K)=b; F s; \
         t[512K,768K)=c; F t",
    ),
    (
        "L-F05",
        "new f; f[0,1M)=a; COMMIT; copy f[64K,128K)>f@2M; F f; copy f[0,64K)>f@3M; F f; punch \
            f[3M,3088K); F f",
    ),
];

/// Most states of a workload with a log.
fn most() -> usize {
    if scale() > 1 { 16 } else { 4 }
}

#[test]
fn scenarios_crashed_by_linux() {
    if !need(&NEEDS) {
        return;
    }
    let workloads = some(scenarios::all(scale() > 1), 20 * scale(), 1);
    sound(&crash(&workloads, PLAIN, most()), 20);
}

#[test]
fn extents_crashed_by_linux() {
    if !need(&NEEDS) {
        return;
    }
    let workload =
        |(name, text): &(&str, &str)| Workload::script(*name, text).expect("the notation");
    let all: Vec<Workload> = EXTENTS.iter().map(workload).collect();
    // Each is long: a few of them with each setup, all with all in the long form.
    for (i, setup) in [PLAIN, OLD, COMPRESSED].into_iter().enumerate() {
        let step = if scale() > 1 { 1 } else { 6 };
        let part: Vec<Workload> = all.iter().skip(i % step).step_by(step).cloned().collect();
        sound(&crash(&part, setup, most()), 2);
    }
}

/// Paths of the system follow symlinks and open devices, which the notation does not: without
/// those. What names them later is refused by the kernel and by the model.
fn without_special_files(mut w: Workload) -> Workload {
    let special = |op: &Op| {
        matches!(op, Op::Symlink { .. } | Op::Mknod(..) | Op::Rename { mode: Move::Whiteout, .. })
    };
    for ops in w.segments.iter_mut().flat_map(|s| &mut s.threads) {
        ops.retain(|op| !special(op));
    }
    w
}

#[test]
fn sequences_crashed_by_linux() {
    if !need(&NEEDS) {
        return;
    }
    let mut workloads = some(sequences(1, 1), 8 * scale(), 2);
    workloads.push(without_special_files(workload::threads(1, 4, 10)));
    if scale() > 1 {
        workloads.extend(some(sequences(2, 1), 10 * scale(), 3));
        workloads
            .extend((1..=2 * scale() as u64).map(|seed| without_special_files(random(seed, 30))));
        let eight = |seed| without_special_files(workload::threads(seed, 8, 12));
        workloads.extend((2..=2 * scale() as u64).map(eight));
    }
    let (plain, old): (Vec<_>, Vec<_>) =
        workloads.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    let strip =
        |numbered: Vec<(usize, Workload)>| numbered.into_iter().map(|(_, w)| w).collect::<Vec<_>>();
    let (plain, old) = (crash(&strip(plain), PLAIN, most()), crash(&strip(old), OLD, most()));
    sound(&plain, 0);
    sound(&old, 0);
    assert!(plain.with_log + old.with_log > 0, "Linux left no log");
}

#[test]
fn a_workload_is_recorded_whole() {
    if !need(&NEEDS) {
        return;
    }
    let base = fresh(&["-q"]).expect("a fresh file system");
    let text = "new f; f[0,64K)=a; F f; f[0,4K)=b; F f; COMMIT; mk A";
    let w = workload::Workload::script("record", text).expect("the notation");
    let ran = run(&base, &w.segments[0].threads, "").expect("it runs");
    let crashes = Crashes::of(&ran.recording, &Limits::default());
    // The disk with everything is the file system after the unmount, to the model as to the kernel.
    let all = crashes.everything();
    let world = show(&all, &options(true)).expect("it opens");
    ran.history.verify_now(&world).expect("it shows what was done");
    // Superblocks of logs and of commits are on their way by themselves, with what they need on the
    // disk.
    let kinds = crashes.by_kind();
    for kind in [Kind::Log, Kind::Commit] {
        assert!(kinds.contains_key(&kind), "{kinds:?}");
    }
    assert!(crashes.epoch_count() > 8, "{} epochs", crashes.epoch_count());
}
