//! A mount whose daemon is killed after a number of acknowledgements, and what is there afterwards.
//!
//! The moment of death depends on what the daemon has acknowledged, never on time. Nothing commits
//! by itself meanwhile, so acknowledged changes are in a log, unless the log could not hold them.
//! Afterwards Linux mounts a copy of the image, and Larder the image itself. Each replays the log,
//! and both images must be sound then.

use super::{command, command_in, larder};
use crate::args;
use larder_simtest::oracle::{
    KernelMount, MemoryCgroup, Need, btrfs_check, copy_image, enter_private_namespace, need,
    scratch,
};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::CStr;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What every test with a [`Stage`] needs.
pub const NEEDS: [Need; 4] = [Need::Fuse, Need::Root, Need::KernelBtrfs, Need::BtrfsProgs];

/// The points at which daemons are killed, counted in acknowledgements.
pub struct KillPoints {
    pub first: u64,
    pub step: u64,
}

impl KillPoints {
    /// One of them, or `LARDER_SCALE` of them.
    pub fn all(self) -> impl Iterator<Item = u64> {
        let Self { first, step } = self;
        let scale = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
        // The first is in the middle; further ones are before and behind it.
        let back = move |n| if n % 2 == 1 { first / 2 } else { 0 };
        (0..scale).map(move |n| first + n * step % (3 * first) - back(n))
    }
}

/// One stage of a program at a time: programs that others start hold for a moment whatever is open
/// here, and a mount that is looked at would be busy.
static ALONE: Mutex<()> = Mutex::new(());

/// An image and a mount of it.
pub struct Stage {
    dir: tempfile::TempDir,
    /// A file system in memory of the test's own is mounted on the directory.
    in_memory: bool,
    group: Option<MemoryCgroup>,
    daemon: Option<Child>,
    /// Goes last.
    _alone: MutexGuard<'static, ()>,
}

impl Stage {
    /// A new image, mounted. [`NEEDS`] are there.
    pub fn new(size: &str) -> Self {
        enter_private_namespace().unwrap();
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stage =
            Self { _alone, dir: scratch(), in_memory: false, group: None, daemon: None };
        stage.begin(size);
        stage
    }
    /// A new image in memory. Its daemon may use so many bytes, and what is written to the image
    /// counts, too.
    pub fn with_limit(size: &str, limit: u64) -> Self {
        enter_private_namespace().unwrap();
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        // Memory that is swapped out would not count; older kernels have no such option.
        let tmpfs = |options: &CStr| {
            rustix::mount::mount(c"larder-test", dir.path(), c"tmpfs", MountFlags::empty(), options)
        };
        tmpfs(c"size=2g,noswap").or_else(|_| tmpfs(c"size=2g")).unwrap();
        let group = Some(MemoryCgroup::new(limit).unwrap());
        let mut stage = Self { _alone, dir, in_memory: true, group, daemon: None };
        stage.begin(size);
        stage
    }
    fn begin(&mut self, size: &str) {
        std::fs::create_dir(self.point()).unwrap();
        larder(args!["mkfs", "--size", size, self.image()]).ok();
        let mut start = command_in(self.group.as_ref());
        start.args(["mount", "--foreground", "--cache-size", "32M", "-o", "commit=300"]);
        start.arg(self.image()).arg(self.point()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut daemon = start.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("is mounted on"), "{line}");
        self.daemon = Some(daemon);
        // A chunk for data that the last commit has.
        std::fs::write(self.at("begin"), vec![1; 100_000]).unwrap();
        larder(args!["sync", self.point()]).ok();
    }
    pub fn image(&self) -> PathBuf {
        self.dir.path().join("img")
    }
    pub fn point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
    pub fn at(&self, name: &str) -> PathBuf {
        self.point().join(name)
    }
    /// What the daemon counts about logs.
    pub fn log_stats(&self) -> serde_json::Value {
        larder(args!["stats", "--json", self.point()]).ok().json()["engine"]["log"].clone()
    }
    /// How the daemon is killed.
    pub fn death(&self) -> impl Fn() + Sync + use<> {
        let pid = Pid::from_child(self.daemon.as_ref().expect("a daemon"));
        // It is not waited for before `bury`: the number stays its own.
        move || kill_process(pid, Signal::KILL).expect("it lives")
    }
    /// Waits for the daemon's end, which must have been by SIGKILL, and clears the mount.
    pub fn bury(&mut self) {
        let status = self.daemon.take().expect("a daemon").wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{status}");
        if let Some(group) = &self.group {
            assert!(group.kills().unwrap() > 0, "it was not the limit of memory that killed it");
        }
        larder(args!["umount", self.point()]).fails(1, "had been killed");
    }
    /// Has Linux and Larder replay the log, lets `look` see the tree of each, and checks the
    /// images.
    pub fn afterwards(&self, look: &dyn Fn(&Path)) {
        println!("{} log at the crash", if self.has_log() { "a" } else { "no" });
        let copy = self.dir.path().join("copy");
        copy_image(&self.image(), &copy).unwrap();
        let kernel = KernelMount::image(&copy, "noatime").unwrap_or_else(|e| panic!("{e:#}"));
        look(kernel.path());
        kernel.unmount_clean().unwrap();
        btrfs_check(&copy, true).assert_clean("replayed by Linux");
        std::fs::remove_file(&copy).unwrap();
        larder(args!["mount", self.image(), self.point()]).ok();
        look(&self.point());
        larder(args!["umount", self.point()]).ok();
        btrfs_check(&self.image(), true).assert_clean("replayed by Larder");
    }
    /// Does the superblock lead to a log?
    pub fn has_log(&self) -> bool {
        let mut log_root = [0; 8];
        let image = std::fs::File::open(self.image()).unwrap();
        image.read_exact_at(&mut log_root, 0x10060).unwrap();
        log_root != [0; 8]
    }
    fn is_mounted(&self) -> bool {
        super::is_mounted(&self.point())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.is_mounted() {
            let _ = command().args(["umount", "--lazy"]).arg(self.point()).output();
        }
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        if self.in_memory {
            let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH);
        }
    }
}

/// Counts what is acknowledged and does something at a number of it.
pub struct Acknowledged<'a> {
    count: AtomicU64,
    halfway: (u64, &'a (dyn Fn() + Sync)),
    end: (u64, &'a (dyn Fn() + Sync)),
    ended: AtomicBool,
}

impl<'a> Acknowledged<'a> {
    /// After `at` of them does `end`, after half as many `halfway`.
    pub fn new(at: u64, halfway: &'a (dyn Fn() + Sync), end: &'a (dyn Fn() + Sync)) -> Self {
        assert!(at >= 2);
        let (count, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { count, halfway: (at / 2, halfway), end: (at, end), ended }
    }
    /// One more.
    pub fn one(&self) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count == self.halfway.0 {
            self.halfway.1();
        }
        if count == self.end.0 {
            self.ended.store(true, Ordering::SeqCst);
            self.end.1();
        }
    }
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
    /// Repeats something until it fails, which it may only do once the end has come.
    pub fn until_the_end(&self, mut each: impl FnMut(u64) -> std::io::Result<()>) {
        for n in 0.. {
            if let Err(e) = each(n) {
                assert!(self.ended.load(Ordering::SeqCst), "number {n} failed before the end: {e}");
                return;
            }
        }
    }
}

/// Are all of [`NEEDS`] and these there?
pub fn ready(more: &[Need]) -> bool {
    need(&[&NEEDS, more].concat())
}
