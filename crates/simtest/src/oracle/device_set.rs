//! File systems on several devices, as Linux makes them.
//!
//! The decision hidden here is how several image files become one mount: each is a loop device, and
//! the kernel is told of all of them in the mount's options, since nothing scans devices for a
//! test.

use super::loop_device::{LoopDevice, output};
use super::mount::KernelMount;
use super::progs::{Report, btrfs, btrfs_check};
use super::verdict::copy_image;
use super::{scratch, tool};
use anyhow::{Context, Result, ensure};
use larder_format::Incompat;
use larder_volume::superblock::read_superblock;
use larder_volume::{FileDevice, OpenMode};
use std::ffi::OsStr;
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

    /// What Linux and its tools say of the whole, the data included. Where data has parity, that
    /// is what a scrub of a copy says: `btrfs check --check-data-csum` of btrfs-progs 6.14 reads
    /// behind its buffer there and ends after a few pieces, also with files that Linux wrote
    /// (kdave/btrfs-progs#1123).
    ///
    /// # Errors
    /// There are no loop devices; a superblock cannot be read; the copy cannot be mounted.
    pub fn check(&self) -> Result<Report> {
        if !self.has_parity()? {
            return self.check_by_progs(true);
        }
        let mut report = self.check_by_progs(false)?;
        if report.is_clean() {
            let dir = scratch();
            report.complaints = self.copy_to(dir.path())?.scrub()?;
        }
        Ok(report)
    }

    /// What `btrfs check` says of the whole, with `--check-data-csum` if `data`.
    ///
    /// # Errors
    /// There are no loop devices.
    pub fn check_by_progs(&self, data: bool) -> Result<Report> {
        let loops = self.attach().context("the devices")?;
        let mut report = btrfs_check(loops[0].path(), data);
        // It scans all devices of the machine, and those of other tests go away meanwhile.
        let of_another = |line: &String| {
            let device = line.strip_prefix("ERROR: cannot scan ").and_then(|l| l.split_once(':'));
            device.is_some_and(|(name, _)| loops.iter().all(|l| l.path() != Path::new(name)))
        };
        report.complaints.retain(|line| !of_another(line));
        Ok(report)
    }

    /// May data or metadata have parity?
    ///
    /// # Errors
    /// The first superblock cannot be read.
    pub fn has_parity(&self) -> Result<bool> {
        let superblock = read_superblock(&FileDevice::open(&self.images[0], OpenMode::Read)?)?;
        Ok(superblock.incompat().contains(Incompat::RAID56))
    }

    fn copy_to(&self, dir: &Path) -> Result<Self> {
        let copy = |(n, image): (usize, &PathBuf)| {
            let to = dir.join(format!("copy-{n}"));
            copy_image(image, &to).map(|()| to)
        };
        Ok(Self { images: self.images.iter().enumerate().map(copy).collect::<Result<_>>()? })
    }

    /// Mounts the file system and has Linux scrub it. What it says of errors. A full file system
    /// with parity cannot be scrubbed: Linux has no space for that.
    ///
    /// # Errors
    /// As [`KernelMount::image`]; the scrub counts nothing.
    pub fn scrub(&self) -> Result<Vec<String>> {
        let mount = self.mount("")?;
        let words = ["scrub", "start", "-B", "-R"].map(OsStr::new);
        let said = btrfs(&[&words[..], &[mount.path().as_os_str()]].concat());
        let mut errors = mount.unmount()?;
        match said {
            Ok(said) => {
                let counts = said.lines().map(str::trim).filter(|line| line.contains("_errors:"));
                ensure!(counts.clone().count() >= 4, "the scrub counts no errors: {said}");
                errors.extend(counts.filter(|line| !line.ends_with(": 0")).map(str::to_owned));
            }
            Err(e) => errors.push(format!("{e:#}")),
        }
        Ok(errors)
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
