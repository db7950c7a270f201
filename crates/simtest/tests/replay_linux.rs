//! Logs that Linux leaves, replayed by Larder and by Linux: both must come to the same.
//!
//! Operations run on Linux's own btrfs; after each `fsync` that went to the log, the image is
//! copied beneath the mount, as a power cut would leave it. Of each copy there are two results, one
//! replayed by the kernel and one by us, and the kernel shows both. Ours must also check clean, and
//! a read-only opening must show it without writing.

use anyhow::{Context, Result, ensure};
use larder_format::{Physical, Superblock};
use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::ops::Op;
use larder_simtest::oracle::{
    EngineTree, KernelMount, Manifest, Need, PathRunner, StdTree, btrfs, btrfs_check, copy_image,
    kernel_verdict, manifest, mkfs_btrfs, need, scratch, sum_of_image,
};
use larder_simtest::scenarios;
use larder_simtest::sharing::sharing;
use larder_simtest::workload::{self, Workload};
use larder_volume::{FileDevice, OpenMode};
use rustix::fs::FallocateFlags;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SIZE: u64 = 256 << 20;
const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

fn has_log(image: &Path) -> Result<bool> {
    let mut head = vec![0; 68 << 10];
    std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::open(image)?, &mut head, 0)?;
    let sb = Superblock::parse(&head[64 << 10..], Physical(64 << 10))?;
    Ok(sb.log_root().is_some())
}

fn open(image: &Path, read_only: bool) -> Result<Arc<Filesystem>> {
    let mode = if read_only { OpenMode::Read } else { OpenMode::Write };
    let device = Arc::new(FileDevice::open(image, mode)?);
    let options = OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() };
    Ok(Filesystem::open(device, options)?)
}

/// Linux logs that a directory has lost the placeholder of a subvolume, and then refuses to replay
/// that log of its own.
fn linux_may_refuse(workload: &str) -> bool {
    workload.starts_with("V-nested:")
}

/// Replays a copy on both sides and compares.
fn judge(workload: &str, crashed: &Path, dir: &Path) -> Result<()> {
    let (linux, larder) = (dir.join("linux.img"), dir.join("larder.img"));
    copy_image(crashed, &linux)?;
    let mount = match KernelMount::image(&linux, "noatime").context("Linux replays") {
        Err(_) if linux_may_refuse(workload) => {
            // Nobody says what it should be. Looking at it changes nothing, whatever comes out.
            let before = sum_of_image(crashed)?;
            drop(open(crashed, true));
            ensure!(sum_of_image(crashed)? == before, "a read-only opening wrote");
            return Ok(());
        }
        mount => mount?,
    };
    let theirs = manifest(&StdTree::new(mount.path()))?.without_times_of_directories();
    mount.unmount_clean()?;

    let before = sum_of_image(crashed)?;
    let fs = open(crashed, true).context("read-only")?;
    ensure!(!fs.info().has_unreplayed_log, "the log counts as not replayed");
    let shown = manifest(&EngineTree(&fs))?.without_times_of_directories();
    drop(fs);
    ensure!(sum_of_image(crashed)? == before, "a read-only opening wrote");
    shown.ensure_replayed_alike(&theirs, "read-only")?;

    copy_image(crashed, &larder)?;
    let fs = open(&larder, false).context("replay")?;
    let shown = manifest(&EngineTree(&fs))?.without_times_of_directories();
    fs.close()?;
    drop(fs);
    ensure!(!has_log(&larder)?, "the log is still there");
    shown.ensure_replayed_alike(&theirs, "replayed")?;
    let device = Arc::new(FileDevice::open(&larder, OpenMode::Read)?);
    let options = larder_check::Options { data: true, threads: 1, ..Default::default() };
    let checked = larder_check::check(&[device], &options, &|_| ())?;
    ensure!(checked.is_clean(), "larder check: {:?}", checked.findings);
    let shown = kernel_verdict(&larder)?.without_times_of_directories();
    shown.ensure_replayed_alike(&theirs, "replayed, as the kernel shows it")
}

/// What runs on the kernel's mount: an operation, or one on the space of a file, which the engine's
/// notation lacks.
enum Step {
    Op(Op),
    Space { path: String, from: u64, to: u64, flags: FallocateFlags },
}

fn steps(text: &str) -> Vec<Step> {
    let space = |rest: &str, flags| {
        let (path, range) = rest.trim_end_matches(')').split_once('[').expect("a range");
        let (from, to) = range.split_once(',').expect("a range");
        let size = |t: &str| {
            let digits = t.trim_end_matches(['K', 'M']);
            digits.parse::<u64>().expect("a number")
                << if t.ends_with('K') {
                    10
                } else if t.ends_with('M') {
                    20
                } else {
                    0
                }
        };
        Step::Space { path: path.trim().into(), from: size(from), to: size(to), flags }
    };
    let keep = FallocateFlags::KEEP_SIZE;
    let kinds = [
        ("pre* ", keep),
        ("pre ", FallocateFlags::empty()),
        ("punch ", FallocateFlags::PUNCH_HOLE | keep),
        ("zero* ", FallocateFlags::ZERO_RANGE | keep),
        ("zero ", FallocateFlags::ZERO_RANGE),
    ];
    let mut out = Vec::new();
    for part in text.split(';') {
        let part = part.trim();
        match kinds.iter().find_map(|(name, flags)| Some((part.strip_prefix(name)?, *flags))) {
            Some((rest, flags)) => out.push(space(rest, flags)),
            None => out.extend(
                larder_simtest::ops::parse(part)
                    .expect("the notation")
                    .remove(0)
                    .into_iter()
                    .map(Step::Op),
            ),
        }
    }
    out
}

/// How the file system is made and mounted.
#[derive(Clone, Copy)]
struct Setup {
    mkfs: &'static [&'static str],
    mount: &'static str,
    /// May operations be refused?
    refusals: bool,
}

const PLAIN: Setup = Setup { mkfs: &["-q"], mount: "", refusals: false };
const OLD: Setup =
    Setup { mkfs: &["-q", "-O", "^no-holes", "-n", "4096"], mount: "", refusals: false };

/// Runs operations on a fresh image; calls `cut` with a copy of it after each sync that left a log.
fn cuts(
    steps: &[Step],
    setup: Setup,
    dir: &Path,
    mut cut: impl FnMut(&str, &Path) -> Result<()>,
) -> Result<usize> {
    let (live, crashed) = (dir.join("live.img"), dir.join("crashed.img"));
    mkfs_btrfs(&live, SIZE, setup.mkfs)?;
    // The first change makes a chunk, which a log could not be hung on.
    let mount = KernelMount::image(&live, "noatime")?;
    std::fs::write(mount.join(".first"), vec![1; 1 << 20])?;
    mount.sync()?;
    mount.unmount_clean()?;
    let mount = KernelMount::image(&live, &format!("noatime,commit=300{}", setup.mount))?;
    let mut runner = PathRunner::new(mount.path());
    let mut logs = 0;
    for (i, step) in steps.iter().enumerate() {
        match step {
            // Random ones try what is refused, too.
            Step::Op(op) => match runner.run(op) {
                Err(e) if !setup.refusals => return Err(e),
                _ => {}
            },
            Step::Space { path, from, to, flags } => {
                let file = std::fs::OpenOptions::new().write(true).open(mount.join(path))?;
                rustix::fs::fallocate(&file, *flags, *from, to - from)?;
            }
        }
        if let Step::Op(op) = step
            && op.is_sync()
            && has_log(&live)?
        {
            copy_image(&live, &crashed)?;
            logs += 1;
            cut(&format!("after step {} ({op})", i + 1), &crashed)?;
        }
    }
    drop(runner);
    mount.unmount_clean()?;
    Ok(logs)
}

fn all_cuts(name: &str, steps: &[Step], setup: Setup) -> usize {
    let dir = scratch();
    let keep = std::env::var_os("LARDER_KEEP").map(PathBuf::from);
    cuts(steps, setup, dir.path(), |when, crashed| {
        judge(name, crashed, dir.path()).with_context(|| {
            if let Some(keep) = &keep {
                let _ = std::fs::copy(crashed, keep);
            }
            when.to_owned()
        })
    })
    .unwrap_or_else(|e| panic!("{name}: {e:#}"))
}

/// A part of the workloads, each from its start to its first power cut.
fn share(workloads: Vec<Workload>, part: usize, parts: usize, setup: Setup) {
    let logs = logs_of(workloads, part, parts, setup);
    assert!(logs.is_none_or(|n| n > 10), "Linux did not log: {logs:?}");
}

/// How many logs there were, where the oracles are.
fn logs_of(workloads: Vec<Workload>, part: usize, parts: usize, setup: Setup) -> Option<usize> {
    if !need(&NEEDS) {
        return None;
    }
    let mut logs = 0;
    for w in workloads.into_iter().skip(part).step_by(parts) {
        let name = format!("{}: {}", w.name, w.text());
        let mut ops = w.segments.into_iter().next().expect("a segment").threads.remove(0);
        // Linux would show only that one.
        ops.retain(|op| !matches!(op, Op::DefaultSubvolume(_)));
        let steps: Vec<Step> = ops.into_iter().map(Step::Op).collect();
        logs += all_cuts(&name, &steps, setup);
    }
    println!("{logs} logs replayed");
    Some(logs)
}

#[test]
fn scenarios_one() {
    share(scenarios::all(true), 0, 2, PLAIN);
}

#[test]
fn scenarios_two() {
    share(scenarios::all(true), 1, 2, OLD);
}

#[test]
fn random_workloads() {
    let random = |seed| workload::random(seed, 40);
    share((1..=12).map(random).collect(), 0, 1, Setup { refusals: true, ..PLAIN });
}

#[test]
fn subvolumes_and_what_is_shared() {
    // Linux, too, commits where subvolumes are new or have moved.
    let mut workloads = scenarios::shared();
    workloads.extend((1..=6).map(|seed| sharing(seed, 40)));
    let logs = logs_of(workloads, 0, 1, Setup { refusals: true, ..PLAIN });
    assert!(logs.is_none_or(|n| n > 0), "Linux did not log");
}

/// The log, or the last commit, has a file whose space is preallocated, and the log another that
/// shares what was written there since; and how many logs there are.
const SHARED_PREALLOCATION: &[(&str, usize)] = &[
    ("new h; h[0,64K)=h; COMMIT; new f; pre f[0,16K); F f; f[0,8K)=x; copy f[4K,8K)>h@40K; F h", 2),
    ("new h; pre h[0,64K); h[0,8K)=a; new g; COMMIT; h[8K,16K)=b; copy h[4K,16K)>g@0; F g", 1),
    ("new z; COMMIT; new h; pre h[0,64K); F h; new g; h[8K,16K)=b; copy h[4K,16K)>g@4K; F g", 1),
];

/// Names of the scenarios of `docs/LOG.md` that are about extents.
const EXTENTS: &[(&str, &str)] = &[
    ("L-E01", "new f; f[0,16K)=a; F f; COMMIT; punch f[8000,12096); punch f[15000,15100); F f"),
    (
        "L-E02",
        "new f; f[0,128K)=a; F f; punch f[96K,128K); punch f[64K,192K); punch f[32K,128K); F f",
    ),
    (
        "L-E03",
        "new f; f[0,64K)=a; f[64K,125K)=b; COMMIT; trunc f 64K; trunc f 125K; F f; trunc f 0; \
            trunc f 253K; F f",
    ),
    (
        "L-E04",
        "new f; f[0,4202496)=a; F f; pre* f[4202496,4203520); FD f; pre* f[4202496,4206592); FD \
         f; pre f[4202496,8M); F f",
    ),
    ("L-E05", "new f; f[0,16K)=a; F f; pre* f[16K,20K); F f; zero* f[16K,24K); F f"),
    (
        "L-E06",
        "new f; f[0,16K)=a; COMMIT; pre* f[16K,64K); F f; trunc f 8K; pre* f[32K,128K); F f; pre* \
            f[128K,256K); F f",
    ),
    ("L-E07", "new f; f[0,21)=a; pre f[40,80); F f"),
    ("L-E08", "new f; f[0,1M)=a; pre* f[16M,17M); pre* f[20M,21M); COMMIT; f[0,4K)=b; F f"),
    ("L-E09", "new f; trunc f 12M; f[2M,10M)=a; COMMIT; punch f[2M,4M); punch f[8M,10M); F f"),
    (
        "L-E10",
        "new f; pre* f[0,128K); pre* f[128K,256K); F f; pre f[0,64K); F f; trunc f 256K; F f; \
            f[0,128K)=a; F f",
    ),
    (
        "L-E11",
        "new f; pre* f[4K,12K); F f; punch f[4K,8K); F f; f[0,4K)=a; F f; f[0,8K)=b; F f; trunc f \
            12K; F f",
    ),
    ("L-E13", "new f; f[80K,135K)=a; pre f[46K,91K); f[249K,250K)=b; zero* f[249K,254K); F f"),
    (
        "L-E14",
        "new f; f[0,2M)=a; pre f[2M,4M); f[4M,6M)=b; F f; f[2052K,2056K)=c; F f; f[3M,3076K)=d; F \
            f; f[2052K,2060K)=e; F f",
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
        "L-F04-back",
        "new s; s[0,1M)=a; new t; copy s[0,1M)>t@0; F t; F s; punch s[0,512K); F s; F t",
    ),
    (
        "L-F05",
        "new f; f[0,1M)=a; COMMIT; copy f[64K,128K)>f@2M; F f; copy f[0,64K)>f@3M; F f; \
            f[2064K,2080K)=b; F f; punch f[3M,3088K); F f",
    ),
    ("L-Z01", "new f; f[0,300)=a; F f; f+300=b; F f; f[0,9000)=c; F f; trunc f 100; F f"),
    (
        "L-Z02",
        "new f; f[0,256K)=p; F f; f[100K,101K)=x; F f; punch f[30K,50K); F f; trunc f 77777; F f",
    ),
    (
        "L-X03",
        "mk A; new A/f; xa A/f user.1=v; F A/f; COMMIT; new A/g; xa A/g user.2=w; xa A user.3=x; \
         F A/g; F A",
    ),
];

fn extents(setup: Setup, part: usize, parts: usize) {
    if !need(&NEEDS) {
        return;
    }
    let some = || EXTENTS.iter().skip(part).step_by(parts);
    let logs: usize = some().map(|(name, text)| all_cuts(name, &steps(text), setup)).sum();
    println!("{logs} logs replayed");
    assert!(logs > some().count(), "Linux did not log: {logs}");
}

#[test]
fn extents_without_holes() {
    extents(PLAIN, 0, 1);
}

#[test]
fn extents_with_holes() {
    extents(OLD, 0, 1);
}

#[test]
fn extents_compressed_with_each_algorithm() {
    let methods = [",compress-force=zlib", ",compress-force=lzo", ",compress-force=zstd"];
    for (part, mount) in methods.into_iter().enumerate() {
        let setup = Setup { mount, mkfs: &["-q", "--csum", "xxhash"], refusals: false };
        extents(setup, part, methods.len());
    }
}

/// Logs of files with the same inode numbers in several subvolumes, one of which is gone by then.
#[test]
fn several_subvolumes() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let (live, crashed) = (dir.path().join("live.img"), dir.path().join("crashed.img"));
    mkfs_btrfs(&live, SIZE, &["-q"]).unwrap();
    let mount = KernelMount::image(&live, "noatime,commit=300").unwrap();
    for name in ["one", "two", "three"] {
        btrfs(&["subvolume", "create", mount.join(name).to_str().unwrap()]).unwrap();
        std::fs::write(mount.join(name).join("f"), vec![1; 70_000]).unwrap();
    }
    mount.sync().unwrap();
    for (i, name) in ["one", "two", "three"].into_iter().enumerate() {
        let path = mount.join(name);
        std::fs::rename(path.join("f"), path.join("g")).unwrap();
        std::fs::write(path.join("new"), vec![2 + u8::try_from(i).unwrap(); 5000 + i]).unwrap();
        for file in ["g", "new"] {
            std::fs::File::open(path.join(file)).unwrap().sync_all().unwrap();
        }
    }
    assert!(has_log(&live).unwrap());
    copy_image(&live, &crashed).unwrap();
    mount.unmount_clean().unwrap();
    judge("a damaged log", &crashed, dir.path()).unwrap();
}

/// An image with a log, and what it holds when that is replayed.
fn crashed(text: &str, setup: Setup) -> Result<(Image, Manifest)> {
    let dir = scratch();
    let mut last = None;
    cuts(&steps(text), setup, dir.path(), |_, crashed| {
        let fs = open(crashed, true)?;
        last = Some((
            Image::from_file(crashed)?,
            manifest(&EngineTree(&fs))?.without_times_of_directories(),
        ));
        Ok(())
    })?;
    last.context("Linux did not log")
}

const MIXED: &str = "mk A; new A/f; A/f[0,200K)=a; new A/g; A/g[0,300)=g; ln A/g h; COMMIT; mv \
    A/f b; rm h; A/g+9000=h; b[64K,70K)=b; xa b user.k=v; new A/f; A/f[0,1M)=c; F A/f; F A; F b; \
    F A/g";

#[test]
fn a_crash_while_replaying_changes_nothing() {
    if !need(&NEEDS) {
        return;
    }
    let (image, expected) = crashed(MIXED, PLAIN).unwrap();
    let device = Arc::new(SimDevice::new(image));
    let options = || OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let fs = Filesystem::open(device.clone(), options()).unwrap();
    fs.close().unwrap();
    drop(fs);
    let crashes = Crashes::of(&device.recording(), &Limits { per_epoch: 200, ..Limits::default() });
    assert!(crashes.states.len() > 30, "{}", crashes.states.len());
    for state in &crashes.states {
        let device = Arc::new(SimDevice::new(crashes.image(state)).unrecorded());
        let fs = Filesystem::open(device.clone(), options())
            .unwrap_or_else(|e| panic!("{}: {e}", crashes.describe(state)));
        let shown = manifest(&EngineTree(&fs)).unwrap().without_times_of_directories();
        shown.ensure_replayed_alike(&expected, &crashes.describe(state)).unwrap();
        fs.close().unwrap();
        drop(fs);
        let checked = larder_check::check(&[device], &larder_check::Options::default(), &|_| ());
        assert!(checked.unwrap().is_clean(), "{}", crashes.describe(state));
    }
}

/// What Linux itself has written and replayed. `btrfs check` looks an extent up by the length of a
/// part, and a file's item by where the extent would begin. Such complaints elsewhere may have the
/// same cause. If another file was fsynced, Larder commits and leaves no such state (`must_fail`).
#[test]
fn btrfs_check_is_mistaken_about_preallocated_space_that_is_shared() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let mut reports = Vec::new();
    let mut look = |_: &str, crashed: &Path| {
        KernelMount::image(crashed, "noatime")?.unmount_clean()?;
        reports.push(btrfs_check(crashed, true));
        let device = Arc::new(FileDevice::open(crashed, OpenMode::Read)?);
        let options = larder_check::Options { data: true, threads: 1, ..Default::default() };
        let ours = larder_check::check(&[device], &options, &|_| ())?;
        ensure!(ours.is_clean(), "larder check: {:?}", ours.findings);
        Ok(())
    };
    for (workload, logs) in SHARED_PREALLOCATION {
        assert_eq!(cuts(&steps(workload), PLAIN, dir.path(), &mut look).unwrap(), *logs);
    }
    let mistakes = [
        "Missing extent item in extent tree for",
        "Missing file extent item for inode",
        "errors 800, odd csum item",
    ];
    let is_mistake = |line: &String| mistakes.iter().any(|m| line.contains(m));
    for report in reports.iter().filter(|r| !r.is_clean()) {
        assert!(report.complaints.iter().any(is_mistake), "{report}");
    }
}

/// Each node of the log damaged in turn: refused with where and what, and nothing is written.
#[test]
fn a_damaged_log_is_refused_and_left_alone() {
    if !need(&NEEDS) {
        return;
    }
    let (image, _) = crashed(MIXED, PLAIN).unwrap();
    let mut sb = vec![0; 4096];
    image.read(64 << 10, &mut sb);
    let sb = Superblock::parse(&sb, Physical(64 << 10)).unwrap();
    let log_root = sb.log_root().unwrap();
    // Both copies of the block, wherever its chunk lies: found by what its header says.
    let mut hurt = image.clone();
    let mut found = 0;
    let mut block = vec![0; 16384];
    for at in (0..image.size()).step_by(16384) {
        image.read(at, &mut block);
        if block[0x30..0x38] == log_root.0.to_le_bytes() && block[0x20..0x30] == sb.fsid {
            hurt.write(at + 200, b"damage");
            found += 1;
        }
    }
    assert!(found > 0);
    let device = Arc::new(SimDevice::new(hurt.clone()));
    let open = |read_only, no_log_replay| {
        let options = OpenOptions {
            read_only,
            no_log_replay,
            commit_interval: None,
            ..OpenOptions::default()
        };
        Filesystem::open(device.clone(), options)
    };
    for read_only in [false, true] {
        let e = open(read_only, false).unwrap_err().to_string();
        assert!(e.contains(&log_root.to_string()), "{e}");
    }
    assert_eq!(device.image().content_hash(), hurt.content_hash(), "something was written");
    let fs = open(true, true).unwrap();
    assert!(fs.info().has_unreplayed_log);
    assert!(fs.lookup(fs.root(), b".first").is_ok(), "the last commit");
}
