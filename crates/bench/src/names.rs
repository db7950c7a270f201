//! How long it takes to make names while other threads make large files durable.
//!
//! Sixteen threads write to files of their own, a MiB at a time with an `fsync` after each. One
//! thread creates files in a directory and renames each. If an `fsync` waits for memory or a device
//! with the lock of the directory's tree held, the longest of these calls shows it. All this runs
//! in a process of its own, which can be given little memory.

use crate::units::Mib;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the step is called.
pub(crate) const NAMES: &str = "names beside 16 fsyncs";
const WRITERS: u64 = 16;
const PIECE: usize = 1 << 20;

/// Makes names in a directory while others write.
#[derive(Args, Debug)]
pub(crate) struct Names {
    root: PathBuf,
    /// Runs for so many seconds.
    #[arg(long)]
    seconds: u64,
    /// MiB of the writers' files together. They are written again and again.
    #[arg(long)]
    mib: Mib,
}

/// What was done, as the process reports it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) seconds: f64,
    /// Files created and given another name.
    pub(crate) files: u64,
    pub(crate) fsyncs: u64,
    /// 999 of 1000 calls took no longer.
    pub(crate) p999_ms: f64,
}

impl Names {
    pub(crate) fn run(self) -> Result<()> {
        let done = make(&self.root, Duration::from_secs(self.seconds), self.mib)?;
        println!("{}", serde_json::to_string(&done)?);
        Ok(())
    }
}

/// Runs it as a process that `command`, this program, starts.
pub(crate) fn names(mut command: Command, root: &Path, time: Duration, mib: Mib) -> Result<Done> {
    let seconds = time.as_secs().to_string();
    let args = ["names", "--seconds", &seconds, "--mib", &mib.to_string()];
    let out = command.args(args).arg(root).output()?;
    ensure!(out.status.success(), "making names: {}", String::from_utf8_lossy(&out.stderr).trim());
    serde_json::from_slice(&out.stdout).context("what it says")
}

fn make(root: &Path, time: Duration, mib: Mib) -> Result<Done> {
    let dir = root.join("names");
    let pieces = (mib.0 / WRITERS).max(1);
    fs::create_dir(&dir)?;
    let (stop, fsyncs) = (AtomicBool::new(false), AtomicU64::new(0));
    let start = Instant::now();
    std::thread::scope(|threads| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|n| {
                let (stop, fsyncs) = (&stop, &fsyncs);
                let path = root.join(format!("large{n}"));
                threads.spawn(move || write(&path, pieces, n as u8, stop, fsyncs))
            })
            .collect();
        let made = create(&dir, start, time);
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().expect("a writer does not panic")?;
        }
        let (files, mut calls) = made?;
        let seconds = start.elapsed().as_secs_f64();
        calls.sort_unstable();
        let p999 = calls[calls.len() - 1 - calls.len() / 1000];
        Ok(Done {
            seconds,
            files,
            fsyncs: fsyncs.load(Ordering::Relaxed),
            p999_ms: p999.as_secs_f64() * 1e3,
        })
    })
}

fn write(path: &Path, pieces: u64, byte: u8, stop: &AtomicBool, fsyncs: &AtomicU64) -> Result<()> {
    let file = File::create(path)?;
    let piece = vec![byte; PIECE];
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        file.write_all_at(&piece, n % pieces * PIECE as u64)?;
        file.sync_all()?;
        fsyncs.fetch_add(1, Ordering::Relaxed);
        n += 1;
    }
    Ok(())
}

/// Creates and renames; how many files, and how long each call took: at least one.
fn create(dir: &Path, start: Instant, time: Duration) -> Result<(u64, Vec<Duration>)> {
    let mut calls = Vec::new();
    let mut files = 0;
    while files == 0 || start.elapsed() < time {
        let (first, second) = (dir.join(format!("a{files}")), dir.join(format!("b{files}")));
        let begin = Instant::now();
        OpenOptions::new().write(true).create_new(true).open(&first)?;
        let between = Instant::now();
        fs::rename(&first, &second)?;
        calls.extend([between - begin, between.elapsed()]);
        files += 1;
    }
    Ok((files, calls))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_was_made_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let done = make(dir.path(), Duration::ZERO, Mib(16)).unwrap();
        assert_eq!(done.files, 1);
        assert!(dir.path().join("names/b0").exists() && !dir.path().join("names/a0").exists());
        assert!(done.p999_ms > 0.0 && done.seconds > 0.0);
    }
}
