//! File systems on several devices, as Linux makes them.
//!
//! The decision hidden here is how several image files become one mount: each is a loop device, and
//! the kernel is told of all of them in the mount's options, since nothing scans devices for a
//! test.

use super::loop_device::{LoopDevice, output};
use super::mount::KernelMount;
use super::progs::{Report, btrfs_check};
use super::tool;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Image files that are the devices of one file system.
#[derive(Clone, Debug)]
pub struct DeviceSet {
    images: Vec<PathBuf>,
}

impl DeviceSet {
    /// Makes image files of these sizes in a directory, and a file system on them with `mkfs.btrfs
    /// ARGS`.
    ///
    /// # Errors
    /// A file cannot be made, there are no loop devices, or what mkfs said.
    pub fn make(dir: &Path, sizes: &[u64], args: &[&str]) -> Result<Self> {
        let mut images = Vec::new();
        for (n, size) in sizes.iter().enumerate() {
            let path = dir.join(format!("device-{}", n + 1));
            std::fs::File::create(&path)?.set_len(*size)?;
            images.push(path);
        }
        let this = Self { images };
        let loops = this.attach()?;
        let mut mkfs = tool("mkfs.btrfs");
        mkfs.args(["-q", "-f"]).args(args).args(loops.iter().map(LoopDevice::path));
        let out = output(mkfs.stdin(Stdio::null()))?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "mkfs.btrfs {args:?}: {}", said.trim());
        Ok(this)
    }

    /// Image files of which a file system is made already.
    #[must_use]
    pub fn of(images: Vec<PathBuf>) -> Self {
        Self { images }
    }

    /// The image files, device 1 first.
    #[must_use]
    pub fn images(&self) -> &[PathBuf] {
        &self.images
    }

    /// The image files without those of these devices, which count from 1.
    #[must_use]
    pub fn without(&self, lost: &[usize]) -> Vec<PathBuf> {
        let numbered = self.images.iter().zip(1..);
        numbered.filter(|(_, n)| !lost.contains(n)).map(|(path, _)| path.clone()).collect()
    }

    fn attach(&self) -> Result<Vec<LoopDevice>> {
        self.images.iter().map(|path| LoopDevice::attach(path)).collect()
    }

    /// What `btrfs check --check-data-csum` says of the whole.
    ///
    /// # Errors
    /// There are no loop devices.
    pub fn check(&self) -> Result<Report> {
        let loops = self.attach().context("the devices")?;
        let mut report = btrfs_check(loops[0].path(), true);
        // It scans all devices of the machine, and those of other tests go away meanwhile.
        let of_another = |line: &String| {
            let device = line.strip_prefix("ERROR: cannot scan ").and_then(|l| l.split_once(':'));
            device.is_some_and(|(name, _)| loops.iter().all(|l| l.path() != Path::new(name)))
        };
        report.complaints.retain(|line| !of_another(line));
        Ok(report)
    }

    /// Mounts the file system.
    ///
    /// # Errors
    /// As [`KernelMount::image`].
    pub fn mount(&self, options: &str) -> Result<KernelMount> {
        let mut loops = self.attach().context("the devices")?;
        let first = loops.remove(0);
        KernelMount::devices(first, loops, options)
    }
}
