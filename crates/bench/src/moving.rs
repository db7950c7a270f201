//! Moving data: balance, replace, remove, convert, shrink, and an `fsync` beside them.
//!
//! Linux makes each file system and fills it, for both sides, so both move the same layout. Each
//! side gets its own command: `btrfs` on the kernel's mount, `larder` on ours. A step ends when the
//! command is back and the file system is synced.
//!
//! Two files serve as devices. They are written full of zeros once, and serve all targets and
//! rounds: ten GiB are too many to be written each time. After the first round all find old content
//! in them.
//!
//! `btrfs` has no command that shrinks to the minimum. So Linux balances the chunks that are not
//! full, as a person would, and tries what `min-dev-size` says. Then it halves what is between the
//! smallest size that it took and the largest that it refused, at first what is stored, until these
//! are 64 MiB apart. All of that counts.
//!
//! What writes beside a move is one thread: 16 KiB, `fsync`, again, without a pause.

use crate::Run;
use crate::case::Case;
use crate::daemon::{Daemon, LarderMount, ends_within};
use crate::fsync::Extra;
use crate::interrupt;
use crate::measure::{Cost, PageCache, Watch, percentile};
use crate::sharing::{self, By};
use crate::source::block;
use crate::target::{self, Mount};
use crate::units::Mib;
use anyhow::{Context, Result, bail, ensure};
use larder_simtest::oracle::{KernelMount, LoopDevice, btrfs_check};
use rustix::event::Timespec;
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BALANCE: &str = "full balance, 20 snapshots";
const REPLACE: &str = "replace";
const REMOVE: &str = "remove";
const CONVERT: &str = "single to raid1";
const SHRINK: &str = "shrink to the minimum";
const ALONE: &str = "fsync alone";
const BALANCE_BESIDE: &str = "full balance beside fsync";
const REPLACE_BESIDE: &str = "replace beside fsync";
const REMOVE_BESIDE: &str = "remove beside fsync";

/// What has to be so many times as fast as on the kernel.
pub(crate) const WANTED: [(&str, f64); 5] =
    [(BALANCE, 1.5), (REPLACE, 1.5), (REMOVE, 1.5), (CONVERT, 1.5), (SHRINK, 1.5)];
/// Steps beside which an `fsync` must not take longer than on the kernel.
pub(crate) const BESIDE: [&str; 3] = [BALANCE_BESIDE, REPLACE_BESIDE, REMOVE_BESIDE];

const SNAPSHOTS: usize = 20;
/// How many calls of `fsync` are measured alone.
const ENOUGH: usize = 2000;
/// How exactly Linux's smallest size is looked for.
const EXACTLY: Mib = Mib(64);

/// The files that are devices here. Removed when dropped.
#[derive(Debug)]
pub(crate) struct Files(Vec<PathBuf>);

impl Files {
    pub(crate) fn make(run: &Run) -> Result<Self> {
        let path = |n| run.dir.join(format!("larder-bench-moving.{n}.img"));
        let files = Self((0..2).map(path).collect());
        files.0.iter().try_for_each(|file| target::fill(file, run.moving_mib))?;
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for file in &self.0 {
            let _ = fs::remove_file(file);
        }
    }
}

/// A step, and what it took.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) step: Cow<'static, str>,
    pub(crate) cost: Cost,
    pub(crate) fsync: Option<Extra>,
}

/// One target in one round.
#[derive(Debug)]
pub(crate) struct Moving<'a> {
    pub(crate) run: &'a Run,
    pub(crate) files: &'a Files,
    pub(crate) case: Case,
    pub(crate) by: By<'a>,
    /// Are images looked at by `btrfs check` afterwards?
    pub(crate) check: bool,
    mountpoint: tempfile::TempDir,
    done: Vec<Done>,
}

/// What a side calls the devices, and what has to be there as long.
type Names = Vec<(PathBuf, Option<LoopDevice>)>;

/// Work on a mount: the command of this side, and where.
type Action<'x> = &'x dyn Fn(&Path) -> Result<()>;

impl<'a> Moving<'a> {
    pub(crate) fn new(
        run: &'a Run,
        files: &'a Files,
        (case, check): (Case, bool),
        by: By<'a>,
    ) -> Result<Self> {
        let mountpoint = tempfile::tempdir()?;
        Ok(Self { run, files, case, by, check, mountpoint, done: Vec::new() })
    }

    /// The five moves, and `fsync` beside three of them.
    pub(crate) fn moves(mut self, tree: &dyn Fn(&Path) -> Result<()>) -> Result<Vec<Done>> {
        self.balance(tree)?;
        self.replace()?;
        self.remove(REMOVE, false)?;
        self.remove(REMOVE_BESIDE, true)?;
        self.convert()?;
        self.shrink()?;
        Ok(self.done)
    }

    /// Balances of one extent with very many users, and of a tree with very many snapshots.
    pub(crate) fn crowds(mut self) -> Result<Vec<Done>> {
        for count in self.run.moving_clones.clone() {
            self.crowd(format!("{count} clones"), &|m| clones(m, count))?;
        }
        for count in self.run.moving_snapshots.clone() {
            self.crowd(format!("{count} snapshots"), &|m| snapshots_of_many(m, count))?;
        }
        Ok(self.done)
    }

    fn crowd(&mut self, step: String, fill: Action<'_>) -> Result<()> {
        self.format(1, "dup")?;
        self.by_linux(1, fill)?;
        let mount = self.mount(1)?;
        let limit = Duration::from_secs(self.run.moving_seconds);
        let by = self.by;
        let mut in_time = true;
        self.step(step.clone().into(), &mount, None, &mut |m| {
            in_time = by.balance_within(m, limit)?;
            Ok(())
        })?;
        if !in_time {
            eprintln!("  {step}: given up after {} s", limit.as_secs());
        }
        self.end(mount, 1)
    }

    fn balance(&mut self, tree: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        self.format(1, "dup")?;
        self.by_linux(1, &|m| tree_with_snapshots(m, tree))?;
        let (mount, by) = (self.mount(1)?, self.by);
        self.step(BALANCE.into(), &mount, None, &mut |m| by.balance(m, &["--full-balance"]))?;
        let mut foreground = Foreground::start(mount.path())?;
        let enough = foreground.enough.take();
        self.step(ALONE.into(), &mount, Some(foreground), &mut |_| {
            // It ends early if a call fails. Then `stop` has the reason.
            let _ = enough.as_ref().map(mpsc::Receiver::recv);
            Ok(())
        })?;
        let foreground = Foreground::start(mount.path())?;
        self.step(BALANCE_BESIDE.into(), &mount, Some(foreground), &mut |m| {
            by.balance(m, &["--full-balance"])
        })?;
        self.end(mount, 1)
    }

    fn replace(&mut self) -> Result<()> {
        self.format(1, "dup")?;
        self.by_linux(1, &|m| write(m, self.run.moving_data_mib))?;
        let (mount, by) = (self.mount(1)?, self.by);
        let names = self.names()?;
        self.step(REPLACE.into(), &mount, None, &mut |m| by.replace(m, &names[1].0))?;
        let foreground = Foreground::start(mount.path())?;
        let back = &names[0];
        self.step(REPLACE_BESIDE.into(), &mount, Some(foreground), &mut |m| {
            by.replace(m, &back.0)
        })?;
        self.end_with(mount, names, 1)
    }

    fn remove(&mut self, step: &'static str, beside: bool) -> Result<()> {
        self.format(2, "single")?;
        self.by_linux(2, &|m| write(m, self.run.moving_data_mib))?;
        let (mount, by) = (self.mount(2)?, self.by);
        let foreground = beside.then(|| Foreground::start(mount.path())).transpose()?;
        self.step(step.into(), &mount, foreground, &mut |m| {
            by.device(m, &["remove".as_ref(), "2".as_ref()])
        })?;
        self.end(mount, 1)
    }

    fn convert(&mut self) -> Result<()> {
        self.format(1, "single")?;
        self.by_linux(1, &|m| write(m, self.run.moving_data_mib / 2))?;
        let (mount, by) = (self.mount(1)?, self.by);
        let names = self.names()?;
        by.device(mount.path(), &["add".as_ref(), "-f".as_ref(), &names[1].0])?;
        let to = ["-dconvert=raid1", "-mconvert=raid1"];
        self.step(CONVERT.into(), &mount, None, &mut |m| by.balance(m, &to))?;
        self.end_with(mount, names, 2)
    }

    fn shrink(&mut self) -> Result<()> {
        self.format(1, "dup")?;
        self.by_linux(1, &|m| write_with_gaps(m, self.run.moving_data_mib))?;
        let (mount, by) = (self.mount(1)?, self.by);
        self.step(SHRINK.into(), &mount, None, &mut |m| by.shrink(m))?;
        eprintln!("  shrunk to {} MiB", size(mount.path())? >> 20);
        self.end(mount, 1)
    }

    /// Does something, and says what it took.
    fn step(
        &mut self,
        step: Cow<'static, str>,
        mount: &Mount,
        foreground: Option<Foreground>,
        action: &mut dyn FnMut(&Path) -> Result<()>,
    ) -> Result<()> {
        interrupt::check()?;
        let watch = Watch::start(mount.watched(), PageCache::now()?)?;
        action(mount.path())?;
        self.by.sync(mount.path())?;
        let cost = watch.stop()?;
        let fsync = foreground.map(Foreground::stop).transpose()?;
        self.done.push(Done { step, cost, fsync });
        Ok(())
    }

    /// A new file system on the first devices.
    fn format(&self, devices: usize, metadata: &str) -> Result<()> {
        let devices = self.attach(devices)?;
        let mut mkfs = Command::new("mkfs.btrfs");
        mkfs.args(["-q", "-f", "-K", "-O", "block-group-tree", "-d", "single", "-m", metadata]);
        target::quietly(mkfs.args(devices.iter().map(LoopDevice::path)))
    }

    fn attach(&self, devices: usize) -> Result<Vec<LoopDevice>> {
        self.files.0[..devices].iter().map(|file| LoopDevice::attach(file)).collect()
    }

    /// What each side calls the two devices. Of Linux's, the loop devices live as long.
    fn names(&self) -> Result<Names> {
        let files = self.files.0.iter();
        match self.by {
            By::Larder(_) => Ok(files.map(|file| (file.clone(), None)).collect()),
            By::Linux => self.attach(2).map(|devices| {
                devices.into_iter().map(|d| (d.path().to_owned(), Some(d))).collect()
            }),
        }
    }

    fn by_linux(&self, devices: usize, fill: Action<'_>) -> Result<()> {
        let mount = self.mount_with_kernel(devices)?;
        fill(mount.path())?;
        mount.unmount_clean()
    }

    fn mount_with_kernel(&self, devices: usize) -> Result<KernelMount> {
        let mut devices = self.attach(devices)?;
        let first = devices.remove(0);
        KernelMount::devices(first, devices, "ssd,noatime,nodiscard,commit=5")
    }

    fn mount(&self, devices: usize) -> Result<Mount> {
        self.case.pages.arrange(&self.files.0[..devices])?;
        let By::Larder(larder) = self.by else {
            return Ok(Mount::Kernel(self.mount_with_kernel(devices)?));
        };
        let files: Vec<_> = self.files.0[..devices].iter().map(|f| f.as_os_str()).collect();
        let source = PathBuf::from(files.join(std::ffi::OsStr::new(",")));
        let how = LarderMount {
            larder,
            source: &source,
            options: "commit=5,nodiscard".into(),
            cache_size: self.run.cache_size.as_deref(),
        };
        let daemon = Daemon::larder(Command::new(larder), self.mountpoint.path(), &how)?;
        Ok(Mount::Daemon(daemon, self.mountpoint.path().to_owned()))
    }

    fn end(&self, mount: Mount, devices: usize) -> Result<()> {
        self.end_with(mount, Vec::new(), devices)
    }

    /// Unmounts, and has the judge look at the first device, or at both.
    fn end_with(&self, mount: Mount, names: Names, devices: usize) -> Result<()> {
        mount.unmount()?;
        drop(names);
        if !self.check {
            return Ok(());
        }
        let attached = self.attach(devices)?;
        let report = btrfs_check(attached[0].path(), false);
        ensure!(report.is_clean(), "btrfs check: {report}");
        Ok(())
    }
}

impl By<'_> {
    fn program(self) -> Command {
        Command::new(match self {
            Self::Linux => Path::new("btrfs"),
            Self::Larder(larder) => larder,
        })
    }
    fn sync(self, root: &Path) -> Result<()> {
        let words: &[&str] = match self {
            Self::Linux => &["filesystem", "sync"],
            Self::Larder(_) => &["sync"],
        };
        target::quietly(self.program().args(words).arg(root))
    }
    fn start_balance(self, root: &Path, how: &[&str]) -> Command {
        let mut balance = self.program();
        balance.args(["balance", "start"]).args(how).arg(root);
        balance
    }
    fn balance(self, root: &Path, how: &[&str]) -> Result<()> {
        target::quietly(&mut self.start_balance(root, how))
    }
    /// A full balance that is cancelled after a time. Has it come to its end?
    fn balance_within(self, root: &Path, limit: Duration) -> Result<bool> {
        let mut command = self.start_balance(root, &["--full-balance"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut balance = command.spawn().context("running a balance")?;
        let limit = Timespec { tv_sec: i64::try_from(limit.as_secs())?, tv_nsec: 0 };
        if ends_within(&balance, limit) {
            let status = balance.wait()?;
            ensure!(status.success(), "{command:?}: {status}");
            return Ok(true);
        }
        target::quietly(self.program().args(["balance", "cancel"]).arg(root))?;
        balance.wait()?;
        Ok(false)
    }
    fn replace(self, root: &Path, target: &Path) -> Result<()> {
        let mut command = self.program();
        match self {
            Self::Linux => command.args(["replace", "start", "-B", "-f", "1"]),
            Self::Larder(_) => command.args(["device", "replace", "-f", "1"]),
        };
        target::quietly(command.arg(target).arg(root))
    }
    fn device(self, root: &Path, words: &[&Path]) -> Result<()> {
        let command = &mut self.program();
        target::quietly(command.arg("device").args(words).arg(root))
    }
    fn resize(self, root: &Path, size: &str) -> Result<()> {
        let mut command = self.program();
        match self {
            Self::Linux => command.args(["filesystem", "resize"]),
            Self::Larder(_) => command.arg("resize"),
        };
        target::quietly(command.arg(size).arg(root))
    }
    fn shrink(self, root: &Path) -> Result<()> {
        if let Self::Larder(_) = self {
            return self.resize(root, "min");
        }
        self.balance(root, &["-dusage=90", "-musage=90"])?;
        let said = self.program().args(["inspect-internal", "min-dev-size"]).arg(root).output()?;
        let said = String::from_utf8_lossy(&said.stdout);
        let least: u64 = said.split(' ').next().unwrap_or_default().parse().context("its size")?;
        let is = rustix::fs::statvfs(root)?;
        // What is stored has to be there.
        let mut refused = is.f_blocks.saturating_sub(is.f_bfree).saturating_mul(is.f_frsize);
        let (mut taken, mut next) = (size(root)?, least);
        while taken > refused + EXACTLY.bytes() {
            match self.resize(root, &next.to_string()) {
                Ok(()) => taken = next,
                Err(_) => refused = next,
            }
            next = u64::midpoint(refused, taken).next_multiple_of(1 << 20);
        }
        Ok(())
    }
}

/// Bytes of the file system.
fn size(root: &Path) -> Result<u64> {
    let is = rustix::fs::statvfs(root)?;
    Ok(is.f_blocks.saturating_mul(is.f_frsize))
}

/// One thread that writes and calls `fsync`.
struct Foreground {
    stop: Arc<AtomicBool>,
    /// Gets a word after [`ENOUGH`] calls.
    enough: Option<mpsc::Receiver<()>>,
    thread: JoinHandle<Result<Vec<f64>>>,
}

impl Foreground {
    fn start(root: &Path) -> Result<Self> {
        let file = File::create(root.join("foreground"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (says, enough) = mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            let (piece, mut took) = (vec![0x5a; 16 << 10], Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                // It goes round in 16 MiB.
                file.write_all_at(&piece, (took.len() as u64 % 1024) * (16 << 10))?;
                let begin = Instant::now();
                file.sync_all()?;
                took.push(begin.elapsed().as_secs_f64() * 1e3);
                if took.len() == ENOUGH {
                    // Steps beside which something moves do not wait for this.
                    let _ = says.send(());
                }
            }
            Ok(took)
        });
        Ok(Self { stop, enough: Some(enough), thread })
    }
    fn stop(self) -> Result<Extra> {
        self.stop.store(true, Ordering::Relaxed);
        let mut took = match self.thread.join() {
            Ok(took) => took?,
            Err(_) => bail!("what writes beside has panicked"),
        };
        ensure!(!took.is_empty(), "nothing was written beside");
        let latency_ms = percentile(&mut took, 0.99);
        Ok(Extra { fsyncs: took.len() as u64, latency_ms, floor_seconds: None })
    }
}

/// Random bytes, so that no two files have the same.
fn write(root: &Path, size: Mib) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(size.0);
    let mut piece = vec![0; 1 << 20];
    for n in 0..size.0.div_ceil(64) {
        let mut file = File::create(root.join(format!("file{n}")))?;
        for _ in 0..64.min(size.0 - n * 64) {
            interrupt::check()?;
            random.fill(&mut piece[..4096]);
            file.write_all(&piece)?;
        }
    }
    Ok(())
}

/// Files of 1 MiB, of which every fourth stays.
fn write_with_gaps(root: &Path, size: Mib) -> Result<()> {
    let piece = block();
    let name = |n| root.join(format!("file{n}"));
    for n in 0..size.0 {
        interrupt::check()?;
        fs::write(name(n), &piece)?;
    }
    rustix::fs::syncfs(File::open(root)?)?;
    (0..size.0).filter(|n| n % 4 != 0).try_for_each(|n| Ok(fs::remove_file(name(n))?))
}

/// A tree, and snapshots between which some of its files change.
fn tree_with_snapshots(root: &Path, fill: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    let tree = root.join("tree");
    subvolume("create", &[&tree])?;
    fill(&tree)?;
    let walk = walkdir::WalkDir::new(&tree).sort_by_file_name().into_iter();
    let files: Vec<_> = walk.filter_map(Result::ok).filter(|e| e.file_type().is_file()).collect();
    for n in 0..SNAPSHOTS {
        interrupt::check()?;
        subvolume("snapshot", &[&tree, &root.join(format!("snapshot{n}"))])?;
        for file in files.iter().skip(n).step_by(200) {
            fs::write(file.path(), format!("{n}").repeat(3000))?;
        }
    }
    Ok(())
}

fn subvolume(what: &str, paths: &[&Path]) -> Result<()> {
    target::quietly(Command::new("btrfs").args(["subvolume", what]).args(paths))
}

fn clones(root: &Path, count: usize) -> Result<()> {
    let source = root.join("source");
    fs::write(&source, block())?;
    File::open(&source)?.sync_all()?;
    for n in 0..count {
        interrupt::check()?;
        sharing::copy(&source, &root.join(n.to_string()))?;
    }
    Ok(())
}

fn snapshots_of_many(root: &Path, count: usize) -> Result<()> {
    let sub = root.join("sub");
    subvolume("create", &[&sub])?;
    let write = |n: usize| fs::write(sub.join(n.to_string()), vec![n as u8; n % 7 * 1500 + 100]);
    (0..2000).try_for_each(write)?;
    for n in 0..count {
        interrupt::check()?;
        subvolume("snapshot", &[&sub, &root.join(format!("snapshot{n}"))])?;
        (0..5).try_for_each(|k| write((n * 7 + k * 13) % 500))?;
    }
    Ok(())
}
