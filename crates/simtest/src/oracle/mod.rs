//! The kernel and btrfs-progs as judges of what Larder reads and writes.
//!
//! The decision hidden here is how a test gets at Linux's own btrfs without owning the machine:
//! which of the things it needs are there ([`need`]), how images become mounts that vanish with the
//! test whatever kills it ([`LoopDevice`], [`KernelMount`]), what `btrfs check` really said
//! ([`btrfs_check`]), when two trees are the same ([`Manifest`], [`tree_compare`]), and which
//! images are worth looking at ([`populate`], [`kernel_images`]).
//!
//! # Missing oracles
//!
//! A test names what it needs and returns where that is absent:
//!
//! ```
//! use larder_simtest::oracle::{Need, need};
//! fn test() {
//!     if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs]) {
//!         return; // `skipped: needs …` has been printed
//!     }
//! }
//! # test()
//! ```
//!
//! With `LARDER_REQUIRE_ORACLES=1` in the environment, as in CI, a missing oracle panics instead:
//! there nothing may pass by not having run. With `LARDER_SKIP_LOG=FILE` each skipped test is also
//! written to FILE, which is how `make test` lists them at its end.

mod dedupe;
mod device_set;
mod dump;
mod engine_tree;
mod fixture;
mod images;
mod loop_device;
mod manifest;
mod memory_cgroup;
mod mount;
mod path_runner;
mod progs;
mod std_tree;
mod tree;
mod verdict;

pub use dedupe::dedupe_range;
pub use device_set::DeviceSet;
pub use dump::{flat_dump, metadata_dump};
pub use engine_tree::EngineTree;
pub use fixture::{Fixture, colliding_names, populate};
pub use images::{ImageVariant, kernel_images};
pub use loop_device::{LoopDevice, LoopOptions};
pub use manifest::{
    Aspects, Content, Difference, Entry, Manifest, compare_sources, manifest, tree_compare,
};
pub use memory_cgroup::MemoryCgroup;
pub(crate) use mount::lock_for_processes;
pub use mount::{KernelMount, KernelMountError, enter_private_namespace};
pub use path_runner::PathRunner;
pub use progs::{
    Report, btrfs, btrfs_check, btrfs_check_within, dump_tree, mkfs_btrfs, received_again,
};
pub use std_tree::StdTree;
pub use tree::{Facts, Kind, Time, TreeSource};
pub use verdict::{copy_image, kernel_verdict, sum_of_image};

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Something outside of Larder that a test needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// `mkfs.btrfs` that knows the block-group tree.
    MkfsBtrfs,
    /// `btrfs check` and `btrfs inspect-internal`.
    BtrfsProgs,
    /// Loop devices that this process may attach.
    LoopDevices,
    /// The kernel's btrfs, with the right to mount it (implies loop devices and a private mount
    /// namespace).
    KernelBtrfs,
    /// A FUSE mount: `/dev/fuse`, and root or `fusermount3`.
    Fuse,
    /// An effective user id of 0.
    Root,
    /// Groups of processes with a limit of memory.
    MemoryCgroup,
    /// The command `sqlite3`, and `stdbuf` to see at once what it says.
    Sqlite,
    /// `fio` and `dbench`.
    FsyncPrograms,
    /// Renderers of SVG: a browser and `rsvg-convert`.
    Renderers,
    /// `umoci`, which unpacks container images.
    Umoci,
    /// `bsdtar`, libarchive's tar.
    Bsdtar,
}

impl Need {
    /// What is missing, as a phrase; `None` where it is there. Looked up once per process.
    fn missing(self) -> Option<&'static str> {
        static ANSWERS: [OnceLock<Option<&'static str>>; 12] = [const { OnceLock::new() }; 12];
        *ANSWERS[self as usize].get_or_init(|| match self {
            Self::MkfsBtrfs => {
                let features = output("mkfs.btrfs", &["-O", "list-all"]);
                match features {
                    None => Some("mkfs.btrfs"),
                    Some(text) if text.contains("block-group-tree") => None,
                    Some(_) => {
                        Some("a mkfs.btrfs that knows the block-group tree (btrfs-progs 6.14 does)")
                    }
                }
            }
            Self::BtrfsProgs => output("btrfs", &["--version"]).is_none().then_some("btrfs-progs"),
            Self::LoopDevices => {
                let control =
                    std::fs::File::options().read(true).write(true).open("/dev/loop-control");
                control.is_err().then_some("loop devices (root, and /dev/loop-control)")
            }
            Self::KernelBtrfs => {
                if Self::LoopDevices.missing().is_some() {
                    Some("the kernel's btrfs (root and loop devices)")
                } else if !kernel_has_btrfs() {
                    Some("a kernel with btrfs")
                } else if !mount::may_mount() {
                    Some("the right to mount (CAP_SYS_ADMIN)")
                } else {
                    None
                }
            }
            Self::Fuse => {
                let device = std::fs::File::options().read(true).write(true).open("/dev/fuse");
                if device.is_err() {
                    Some("FUSE (/dev/fuse, read-write)")
                } else if !rustix::process::geteuid().is_root()
                    && output("fusermount3", &["--version"]).is_none()
                {
                    Some("fusermount3 (package fuse3)")
                } else {
                    None
                }
            }
            Self::Root => (!rustix::process::geteuid().is_root()).then_some("root"),
            Self::MemoryCgroup => {
                (!MemoryCgroup::is_possible()).then_some("memory cgroups (root, and a controller)")
            }
            Self::Sqlite => (output("sqlite3", &["--version"]).is_none()
                || output("stdbuf", &["--version"]).is_none())
            .then_some("sqlite3 (and stdbuf of coreutils)"),
            // dbench has no option that only says something.
            Self::FsyncPrograms => (output("fio", &["--version"]).is_none()
                || output("which", &["dbench"]).is_none())
            .then_some("fio and dbench"),
            Self::Renderers => (output("chromium", &["--version"]).is_none()
                || output("rsvg-convert", &["--version"]).is_none())
            .then_some("chromium and rsvg-convert (package librsvg2-bin)"),
            Self::Umoci => output("umoci", &["--version"]).is_none().then_some("umoci"),
            Self::Bsdtar => output("bsdtar", &["--version"])
                .is_none()
                .then_some("bsdtar (package libarchive-tools)"),
        })
    }
}

/// Are all of these oracles there? If not, says `skipped: needs …` (past the test harness's
/// capture) and returns false: the caller returns.
///
/// # Panics
/// One is missing and `LARDER_REQUIRE_ORACLES=1` is set.
#[must_use = "a test whose oracle is missing has to return"]
pub fn need(needs: &[Need]) -> bool {
    let missing: Vec<&str> = needs.iter().filter_map(|n| n.missing()).collect();
    if missing.is_empty() {
        return true;
    }
    let thread = std::thread::current();
    let line = format!("{}: skipped: needs {}", thread.name().unwrap_or("?"), missing.join(", "));
    assert!(!required(), "{line}, and LARDER_REQUIRE_ORACLES is set");
    // Not a print macro: the harness swallows those of tests that pass.
    let _ = writeln!(std::io::stderr(), "{line}");
    if let Some(log) = std::env::var_os("LARDER_SKIP_LOG")
        && let Ok(mut file) = std::fs::File::options().create(true).append(true).open(log)
    {
        let _ = writeln!(file, "{line}");
    }
    false
}

/// Is a missing oracle a failure (`LARDER_REQUIRE_ORACLES` set to anything but empty or `0`)?
#[must_use]
pub fn required() -> bool {
    std::env::var("LARDER_REQUIRE_ORACLES").is_ok_and(|v| !v.is_empty() && v != "0")
}

/// A temporary directory for images: on the RAM-backed `/dev/shm` where that has room, in the usual
/// place otherwise.
///
/// # Panics
/// No temporary directory can be made at all.
#[must_use]
pub fn scratch() -> tempfile::TempDir {
    const ROOM: u64 = 2 << 30;
    let shm = PathBuf::from("/dev/shm");
    let roomy =
        rustix::fs::statvfs(&shm).is_ok_and(|s| s.f_bavail.saturating_mul(s.f_frsize) >= ROOM);
    let builder = || {
        let mut b = tempfile::Builder::new();
        b.prefix("larder-");
        b
    };
    if roomy && let Ok(dir) = builder().tempdir_in(&shm) {
        return dir;
    }
    builder().tempdir().expect("a temporary directory")
}

/// Standard output and error of a program; `None` where it cannot be started or fails.
fn output(program: &str, args: &[&str]) -> Option<String> {
    let out = loop_device::output(tool(program).args(args).stdin(Stdio::null())).ok()?;
    let text = [out.stdout, out.stderr].concat();
    out.status.success().then(|| String::from_utf8_lossy(&text).into_owned())
}

/// A command that is also found where administrators' programs live, in English.
///
/// It is looked up here: a command that gets a `PATH` to be looked up in is started by a fork,
/// which copies the page tables of all the memory that tests have, and takes longer than what it
/// starts.
fn tool(program: &str) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{path}:/usr/local/sbin:/usr/sbin:/sbin");
    let found =
        std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file());
    let mut command = Command::new(found.unwrap_or_else(|| program.into()));
    command.env("PATH", path).env("LC_ALL", "C");
    command
}

fn kernel_has_btrfs() -> bool {
    let listed = || {
        std::fs::read_to_string("/proc/filesystems")
            .is_ok_and(|s| s.lines().any(|l| l.split_whitespace().next_back() == Some("btrfs")))
    };
    // A module that is merely not loaded yet counts as there.
    listed() || (output("modprobe", &["btrfs"]).is_some() && listed())
}
