//! What is done to each file system.
//!
//! A step that changes something is timed through the unmount: a plain FUSE mount never sees `sync`, and whoever leaves work for
//! later must not win by it. A step that reads begins with a fresh mount and dropped caches. The ceiling forgets everything
//! at an unmount, so it is not remounted between steps; its caches are dropped all the same.

use crate::Run;
use crate::measure::{Watch, drop_caches};
use crate::source::Archive;
use crate::target::{Image, Mount, Target};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

/// A group of steps on one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// Unpack, read, find and delete a source tree.
    Tree,
    /// Write and read one large file.
    Stream,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tree => "tree",
            Self::Stream => "stream",
        })
    }
}

/// Result of one step.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) target: Target,
    pub(crate) round: usize,
    pub(crate) step: &'static str,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) memory_mib: f64,
    /// Requests per operation: per entry of the tree, or per MiB.
    pub(crate) requests: Option<f64>,
}

/// One target in one round.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    pub(crate) run: &'a Run,
    pub(crate) target: Target,
    pub(crate) round: usize,
    pub(crate) archive: Option<&'a Archive>,
}

type Action<'a> = &'a mut dyn FnMut(&Path) -> Result<()>;

impl Bench<'_> {
    pub(crate) fn run(&self, workload: Workload) -> Result<Vec<Step>> {
        match workload {
            Workload::Tree => {
                let archive = self.archive.context("no archive")?;
                self.steps(
                    archive.entries as f64,
                    &mut [
                        ("unpack", &mut |m| unpack(&archive.tar, m)),
                        ("read back", &mut read_all),
                        ("find", &mut find),
                        ("rm -rf", &mut remove_all),
                    ],
                )
            }
            Workload::Stream => {
                let mib = self.run.stream_mib;
                self.steps(
                    mib as f64,
                    &mut [
                        ("write 1 file", &mut |m| write_file(m, mib)),
                        ("read 1 file", &mut |m| read_file(m, mib)),
                    ],
                )
            }
        }
    }

    fn steps(&self, operations: f64, steps: &mut [(&'static str, Action<'_>)]) -> Result<Vec<Step>> {
        let image = Image::make(self.run, self.target)?;
        let mut kept: Option<Mount<'_>> = None;
        let mut results = Vec::new();
        for (step, action) in steps {
            drop_caches()?;
            let mut mount = match kept.take() {
                Some(mount) => mount,
                None => image.mount()?,
            };
            let before = mount.requests()?;
            let watch = Watch::start(mount.memory())?;
            action(mount.path())?;
            let after = mount.requests()?;
            if self.target.keeps() {
                mount.unmount()?;
            } else {
                kept = Some(mount);
            }
            let cost = watch.stop()?;
            results.push(Step {
                target: self.target,
                round: self.round,
                step,
                seconds: cost.seconds,
                cpu_seconds: cost.cpu_seconds,
                memory_mib: cost.memory_mib,
                requests: before.zip(after).map(|(b, a)| (a - b) as f64 / operations),
            });
        }
        if let Some(mount) = kept {
            mount.unmount()?;
        }
        Ok(results)
    }
}

fn unpack(tar: &Path, to: &Path) -> Result<()> {
    let status = Command::new("tar").arg("xf").arg(tar).arg("-C").arg(to).status()?;
    if status.success() { Ok(()) } else { bail!("tar failed: {status}") }
}

fn read_all(root: &Path) -> Result<()> {
    let mut buffer = vec![0; 256 << 10];
    let mut files = 0;
    for entry in walkdir::WalkDir::new(root) {
        let entry = entry?;
        if entry.file_type().is_file() {
            let mut file = File::open(entry.path())?;
            while file.read(&mut buffer)? > 0 {}
            files += 1;
        }
    }
    if files == 0 { bail!("nothing to read") } else { Ok(()) }
}

fn find(root: &Path) -> Result<()> {
    let mut total = 0;
    for entry in walkdir::WalkDir::new(root) {
        total += entry?.metadata()?.len();
    }
    if total == 0 { bail!("nothing found") } else { Ok(()) }
}

fn remove_all(root: &Path) -> Result<()> {
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A megabyte that does not compress and is not zeros.
fn block() -> Vec<u8> {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    })
    .take(1 << 20)
    .collect()
}

fn write_file(root: &Path, mib: u64) -> Result<()> {
    let (block, mut file) = (block(), File::create(root.join("stream"))?);
    for _ in 0..mib {
        file.write_all(&block)?;
    }
    Ok(())
}

fn read_file(root: &Path, mib: u64) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut file = File::open(root.join("stream"))?;
    for _ in 0..mib {
        file.read_exact(&mut buffer)?;
    }
    Ok(())
}
