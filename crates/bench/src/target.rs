//! Who is measured, and how each is mounted.
//!
//! Both sides use the same file: written full of zeros before each round, so that no hole and no old content favours anybody,
//! and formatted by the same mkfs.btrfs with the same options.

use crate::Run;
use crate::daemon::Daemon;
use crate::measure::Memory;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Target {
    /// The kernel's btrfs on a loop device.
    Kernel,
    /// Larder on the file.
    Larder,
    /// The kernel's btrfs on a loop device that bypasses the page cache.
    KernelDirect,
    /// Larder on the file, bypassing the page cache.
    LarderDirect,
    /// Larder on the loop device that the kernel's btrfs used (fuseblk).
    LarderLoop,
    /// Memory behind the same transport.
    Ceiling,
}

impl Target {
    pub(crate) const ALL: [Self; 6] =
        [Self::Kernel, Self::Larder, Self::KernelDirect, Self::LarderDirect, Self::LarderLoop, Self::Ceiling];
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Larder => "Larder",
            Self::KernelDirect => "kernel, direct",
            Self::LarderDirect => "Larder, direct",
            Self::LarderLoop => "Larder on the loop device",
            Self::Ceiling => "ceiling",
        }
    }
    /// Does what was written survive an unmount?
    pub(crate) fn keeps(self) -> bool {
        self != Self::Ceiling
    }
    fn uses_loop(self) -> bool {
        matches!(self, Self::Kernel | Self::KernelDirect | Self::LarderLoop)
    }
    fn direct(self) -> bool {
        matches!(self, Self::KernelDirect | Self::LarderDirect)
    }
}

/// The file under test, formatted for one round.
#[derive(Debug)]
pub(crate) struct Image {
    target: Target,
    file: PathBuf,
    device: Option<PathBuf>,
    mountpoint: tempfile::TempDir,
}

impl Image {
    /// Makes it anew.
    pub(crate) fn make(run: &Run, target: Target) -> Result<Self> {
        let file = run.dir.join("larder-bench.img");
        let mut image = Self { target, file, device: None, mountpoint: tempfile::tempdir()? };
        if !target.keeps() {
            return Ok(image);
        }
        fill(&image.file, run.image_mib)?;
        command("mkfs.btrfs", &["-q", "-f", "-m", "single", "-d", "single"], &image.file)?;
        File::open(&image.file)?.sync_all()?;
        if target.uses_loop() {
            let direct = if target.direct() { "--direct-io=on" } else { "--direct-io=off" };
            let out = Command::new("losetup").args(["--find", "--show", direct]).arg(&image.file).output()?;
            if !out.status.success() {
                bail!("losetup: {}", String::from_utf8_lossy(&out.stderr).trim());
            }
            image.device = Some(String::from_utf8(out.stdout)?.trim().into());
        }
        Ok(image)
    }

    /// Mounts it.
    pub(crate) fn mount(&self) -> Result<Mount<'_>> {
        let path = self.mountpoint.path();
        let source = self.device.as_deref().unwrap_or(&self.file);
        let daemon = match self.target {
            Target::Kernel | Target::KernelDirect => {
                // Without `ssd` a loop device counts as rotational, which the kernel's btrfs pays for.
                let out = Command::new("mount")
                    .args(["-t", "btrfs", "-o", "ssd,noatime,commit=5"])
                    .args([source, path])
                    .output()?;
                if !out.status.success() {
                    bail!("mount: {}", String::from_utf8_lossy(&out.stderr).trim());
                }
                None
            }
            Target::Ceiling => Some(Daemon::start(path, None, false)?),
            _ => Some(Daemon::start(path, Some(source), self.target.direct())?),
        };
        Ok(Mount { path, daemon, mounted: true })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
        if self.target.keeps() {
            let _ = fs::remove_file(&self.file);
        }
    }
}

fn fill(path: &Path, mib: u64) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    let zeros = vec![0; 1 << 20];
    for _ in 0..mib {
        file.write_all(&zeros)?;
    }
    Ok(file.sync_all()?)
}

fn command(program: &str, args: &[&str], path: &Path) -> Result<()> {
    let out = Command::new(program).args(args).arg(path).output().with_context(|| program.to_owned())?;
    if out.status.success() {
        Ok(())
    } else {
        bail!("{program}: {}", String::from_utf8_lossy(&out.stderr).trim())
    }
}

/// A mount; taken away when dropped.
#[derive(Debug)]
pub(crate) struct Mount<'a> {
    path: &'a Path,
    daemon: Option<Daemon>,
    mounted: bool,
}

impl Mount<'_> {
    pub(crate) fn path(&self) -> &Path {
        self.path
    }
    pub(crate) fn memory(&self) -> Memory {
        self.daemon.as_ref().map_or(Memory::Kernel, |d| Memory::Process(d.pid()))
    }
    /// Requests served so far; `None` for the kernel.
    pub(crate) fn requests(&mut self) -> Result<Option<u64>> {
        self.daemon.as_mut().map(Daemon::requests).transpose()
    }
    /// Unmounts, and waits until everything is durable.
    pub(crate) fn unmount(mut self) -> Result<()> {
        rustix::mount::unmount(self.path, rustix::mount::UnmountFlags::empty())?;
        self.mounted = false;
        self.daemon.take().map_or(Ok(()), Daemon::wait)
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if self.mounted {
            let _ = rustix::mount::unmount(self.path, rustix::mount::UnmountFlags::DETACH);
        }
    }
}
