//! Snapshots, clones and deduplication: what should cost little, because nothing is copied.
//!
//! Where both sides have the same call, both get it (`copy_file_range`). Otherwise each gets what
//! its users have: `btrfs subvolume` and `FIDEDUPERANGE` on the kernel's mount, `larder subvolume`
//! and Larder's own request on ours. On both sides a deleted snapshot is dropped in the background,
//! and counts as gone when nothing of it is left.

use crate::interrupt;
use anyhow::{Context, Result, bail, ensure};
use larder_fuse::sharing::{self, Deduped, FileAt};
use larder_simtest::oracle::dedupe_range;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How many snapshots are made.
pub(crate) const SNAPSHOTS: usize = 10;
/// Files in one directory.
const TOGETHER: u64 = 1000;
/// Most bytes that one call compares and shares; both sides accept so many.
const PIECE: u64 = 16 << 20;
/// Files up to this lie in leaves, where nothing can be shared.
const INLINE: u64 = 4096;

/// What does it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum By<'a> {
    /// `btrfs`, for the kernel.
    Linux,
    /// This `larder` command.
    Larder(&'a Path),
}

fn run(program: &Path, args: &[&Path]) -> Result<String> {
    let out =
        Command::new(program).args(args).output().with_context(|| program.display().to_string())?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{} {args:?}: {}", program.display(), said.trim());
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The file with this number in the subvolume that [`By::fill`] makes.
pub(crate) fn file(root: &Path, n: u64) -> PathBuf {
    root.join(format!("many/{}/{n}", n / TOGETHER))
}

impl By<'_> {
    fn subvolume(self, args: &[&Path]) -> Result<String> {
        let program = match self {
            Self::Linux => Path::new("btrfs"),
            Self::Larder(larder) => larder,
        };
        run(program, &[&[Path::new("subvolume")], args].concat())
    }

    /// A subvolume with so many empty files.
    pub(crate) fn fill(self, root: &Path, files: u64) -> Result<()> {
        let top = root.join("many");
        self.subvolume(&[Path::new("create"), &top])?;
        for n in 0..files {
            if n.is_multiple_of(TOGETHER) {
                interrupt::check()?;
                fs::create_dir(top.join((n / TOGETHER).to_string()))?;
            }
            File::create_new(file(root, n))?;
        }
        Ok(())
    }
    pub(crate) fn snapshot(self, root: &Path) -> Result<()> {
        for n in 0..SNAPSHOTS {
            interrupt::check()?;
            let to = root.join(format!("snapshot{n}"));
            self.subvolume(&[Path::new("snapshot"), &root.join("many"), &to])?;
        }
        Ok(())
    }
    /// Deletes some snapshots, and `also`, and waits until nothing of them is left.
    pub(crate) fn delete(
        self,
        root: &Path,
        snapshots: Range<usize>,
        also: Option<&str>,
    ) -> Result<()> {
        let names = snapshots.map(|n| format!("snapshot{n}")).chain(also.map(str::to_owned));
        for name in names {
            self.subvolume(&[Path::new("delete"), &root.join(name)])?;
        }
        // Dropping begins at the next commit: it is made now, not up to five seconds later.
        match self {
            Self::Linux => {
                run(Path::new("btrfs"), &[Path::new("filesystem"), Path::new("sync"), root])?
            }
            Self::Larder(larder) => run(larder, &[Path::new("sync"), root])?,
        };
        // Neither side has a call that returns when it ends. So both are asked again and again,
        // which takes a CPU on both.
        while self.is_dropping(root)? {
            interrupt::check()?;
            std::thread::yield_now();
        }
        Ok(())
    }
    fn is_dropping(self, root: &Path) -> Result<bool> {
        match self {
            Self::Linux => {
                Ok(!self.subvolume(&[Path::new("list"), Path::new("-d"), root])?.trim().is_empty())
            }
            Self::Larder(_) => {
                let stats: serde_json::Value =
                    serde_json::from_str(&larder_fuse::control::stats(root)?)?;
                let left =
                    stats.pointer("/engine/subvolumes_to_drop").and_then(serde_json::Value::as_u64);
                Ok(left.context("the daemon does not say what is left to be dropped")? > 0)
            }
        }
    }

    /// Lets files of two trees with the same names share their extents; the bytes that were the
    /// same.
    pub(crate) fn dedupe(self, from: &Path, to: &Path) -> Result<u64> {
        let mut same = 0;
        for entry in walkdir::WalkDir::new(from) {
            let entry = entry?;
            if !entry.file_type().is_file() {
                continue;
            }
            interrupt::check()?;
            let source = File::open(entry.path())?;
            let target = to.join(entry.path().strip_prefix(from)?);
            let target = File::options().read(true).write(true).open(target)?;
            let size = source.metadata()?.len();
            if size <= INLINE {
                continue;
            }
            let mut at = 0;
            while at < size {
                let done = self.dedupe_range(&source, &target, at..size.min(at + PIECE));
                at += done.with_context(|| entry.path().display().to_string())?;
            }
            same += size;
        }
        Ok(same)
    }
    /// One range. Returns how much of it was the same; at least a byte.
    fn dedupe_range(self, from: &File, to: &File, range: Range<u64>) -> Result<u64> {
        let (at, len) = (range.start, range.end - range.start);
        let same = match self {
            Self::Linux => dedupe_range(from, range, to, at)?,
            Self::Larder(_) => match sharing::dedupe(
                FileAt { file: from, offset: at },
                FileAt { file: to, offset: at },
                len,
            )? {
                Deduped::Same(_) => Some(len),
                Deduped::Differs => None,
            },
        };
        match same {
            Some(n) if n > 0 => Ok(n),
            _ => bail!("{len} bytes at {at} are not the same"),
        }
    }
}

/// Copies a file by the call that `cp` makes.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (File::open(from)?, File::create_new(to)?);
    loop {
        interrupt::check()?;
        let most = usize::try_from(from.metadata()?.len())?;
        if rustix::fs::copy_file_range(&from, None, &to, None, most)? == 0 {
            return Ok(());
        }
    }
}

/// Bytes of the file system that `root` is on that are in use.
pub(crate) fn used(root: &Path) -> Result<u64> {
    rustix::fs::syncfs(File::open(root)?)?;
    let is = rustix::fs::statvfs(root)?;
    Ok(is.f_blocks.saturating_sub(is.f_bfree).saturating_mul(is.f_frsize))
}

/// Files from which [`By::dedupe`] has something to share, in bytes.
pub(crate) fn shareable(root: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in walkdir::WalkDir::new(root) {
        let metadata = entry?.metadata().map_err(io::Error::from)?;
        if metadata.is_file() && metadata.size() > INLINE {
            bytes += metadata.size();
        }
    }
    Ok(bytes)
}
