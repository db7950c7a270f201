//! What is measured, on which image, and how it is mounted.
//!
//! All targets get the same file. It is made anew for each round and workload and written full of
//! zeros, so that no target gains by holes, by old content, or by the fragments of an earlier run.
//! The same mkfs makes the file system on it for both sides, by default mkfs.btrfs. Both sides are
//! told to discard nothing, since that would make the image sparse.
//!
//! The ceiling has no use for the file and gets it nevertheless. On many virtual machines, pages
//! that are dropped before a step go back to the hypervisor and return one by one within the step.
//! With the file, that is the same for all.

use crate::Run;
use crate::case::{self, Case, Mkfs};
use crate::daemon::{Daemon, LarderMount};
use crate::measure::Watched;
use crate::units::Mib;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use larder_format::Physical;
use larder_simtest::oracle::{
    DeviceSet, KernelMount, LoopDevice, LoopOptions, MemoryCgroup, btrfs_check,
};
use larder_simtest::recorded::RecordedDisk;
use larder_volume::{Device, FileDevice, OpenMode};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// A file system that takes part. The kernel stands at both ends of a round. So the comparison of
/// the kernel with itself includes the same changes of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Target {
    /// The kernel's btrfs on a loop device.
    Kernel,
    /// Larder on the file.
    Larder,
    /// Memory behind the same transport.
    Ceiling,
    /// Larder on the loop device that the kernel's btrfs used (fuseblk).
    LarderLoop,
    /// The kernel's btrfs on a loop device that bypasses the page cache.
    KernelDirect,
    /// Larder on the file, bypassing the page cache.
    LarderDirect,
    /// The kernel's btrfs once more: the noise.
    KernelAgain,
    /// The kernel's btrfs on a disk in memory whose flushes take two milliseconds.
    KernelSlowFlush,
    /// Larder on that disk.
    LarderSlowFlush,
    /// Larder that writes whole files back where space is short.
    LarderWholeInodes,
    /// Larder that copies leaves under their tree's lock while it logs.
    LarderLockedCopies,
    /// Larder that logs nothing while a commit is on its way.
    LarderLogWaits,
    /// Larder whose callers of fsync edit the log each by itself, and delete checksums first.
    LarderLogAlone,
    /// Larder whose daemon keeps its rights.
    LarderNoSandbox,
    /// Larder behind the kernel's cache of dirty pages (`-o writeback`).
    LarderWriteback,
    /// Memory behind that cache and the same transport.
    CeilingWriteback,
}

/// By how much a flush takes longer on a slow disk.
const SLOW_FLUSH: Duration = Duration::from_millis(2);

impl Target {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::KernelAgain => "kernel again",
            Self::Larder => "Larder",
            Self::KernelDirect => "kernel, direct",
            Self::LarderDirect => "Larder, direct",
            Self::LarderLoop => "Larder on the loop device",
            Self::Ceiling => "ceiling",
            Self::KernelSlowFlush => "kernel, slow flush",
            Self::LarderSlowFlush => "Larder, slow flush",
            Self::LarderWholeInodes => "Larder, whole files reclaimed",
            Self::LarderLockedCopies => "Larder, copies under the lock",
            Self::LarderLogWaits => "Larder, log waits for commit",
            Self::LarderLogAlone => "Larder, each logs alone",
            Self::LarderNoSandbox => "Larder, no sandbox",
            Self::LarderWriteback => "Larder, writeback",
            Self::CeilingWriteback => "ceiling, writeback",
        }
    }
    /// Does it take part by default?
    pub(crate) fn is_usual(self) -> bool {
        self.switch().is_none() && !self.is_slow() && !self.writes_back()
    }
    /// The mount option that makes it differ from Larder as it is.
    pub(crate) fn switch(self) -> Option<&'static str> {
        match self {
            Self::LarderWholeInodes => Some("tuning=whole-inodes"),
            Self::LarderLockedCopies => Some("tuning=locked-copies"),
            Self::LarderLogWaits => Some("tuning=log-waits"),
            Self::LarderLogAlone => Some("tuning=log-alone"),
            Self::LarderNoSandbox => Some("nosandbox"),
            Self::LarderWriteback => Some("writeback"),
            _ => None,
        }
    }
    fn is_slow(self) -> bool {
        matches!(self, Self::KernelSlowFlush | Self::LarderSlowFlush)
    }
    /// Does the kernel keep dirty pages in front of the transport?
    fn writes_back(self) -> bool {
        matches!(self, Self::LarderWriteback | Self::CeilingWriteback)
    }
    /// Does what was written survive an unmount?
    pub(crate) fn keeps(self) -> bool {
        !matches!(self, Self::Ceiling | Self::CeilingWriteback)
    }
    pub(crate) fn is_larder(self) -> bool {
        self.keeps()
            && !matches!(
                self,
                Self::Kernel | Self::KernelAgain | Self::KernelDirect | Self::KernelSlowFlush
            )
    }
    fn direct(self) -> bool {
        matches!(self, Self::KernelDirect | Self::LarderDirect)
    }
}

/// The file under test, formatted, for one workload in one round. Removed when dropped.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    run: &'a Run,
    target: Target,
    case: Case,
    /// A file for each device.
    files: Vec<PathBuf>,
    /// A device that was lost: its place in the list, and where its file is meanwhile.
    lost: Option<(usize, tempfile::TempDir)>,
    /// For Larder on a loop device; the kernel's mounts have their own.
    device: Option<LoopDevice>,
    /// The file once more, with slow flushes.
    slow: Option<RecordedDisk>,
    /// The memory that the programs share which work on it.
    group: Option<MemoryCgroup>,
    mountpoint: tempfile::TempDir,
}

/// A file in memory whose flushes take long.
#[derive(Debug)]
struct SlowFlush(FileDevice);

impl Device for SlowFlush {
    fn name(&self) -> String {
        self.0.name()
    }
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn is_read_only(&self) -> bool {
        self.0.is_read_only()
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.0.write_at(at, data)
    }
    fn flush(&self) -> io::Result<()> {
        // It is the time that is measured: there is no event to wait for.
        std::thread::sleep(SLOW_FLUSH);
        self.0.flush()
    }
}

impl<'a> Image<'a> {
    /// Makes it anew. `limited`: the programs that work on it share the memory that the run allows.
    pub(crate) fn make(run: &'a Run, target: Target, case: Case, limited: bool) -> Result<Self> {
        let first = if target.is_slow() {
            PathBuf::from(format!("/dev/shm/larder-bench-{}.img", std::process::id()))
        } else {
            run.dir.join("larder-bench.img")
        };
        let count = case.spread.devices();
        ensure!(
            count == 1 || !target.is_slow() && target != Target::LarderLoop,
            "{} is for one device",
            target.name()
        );
        let files = (0..count).map(|n| match n {
            0 => first.clone(),
            _ => first.with_extension(format!("{n}.img")),
        });
        let group = limited.then(|| MemoryCgroup::new(run.limit_mib.bytes())).transpose();
        let mut image = Self {
            run,
            target,
            case,
            files: files.collect(),
            lost: None,
            device: None,
            slow: None,
            group: group.context("making a group with little memory")?,
            mountpoint: tempfile::tempdir()?,
        };
        let share = run.image_mib() / count as u64;
        image.files.iter().try_for_each(|file| fill(file, share))?;
        if !target.keeps() {
            return Ok(image);
        }
        image.format()?;
        image.files.iter().try_for_each(|file| check_allocated(file, share.bytes()))?;
        if target == Target::LarderLoop {
            image.device = Some(LoopDevice::attach(image.file())?);
        }
        if target.is_slow() {
            let device = FileDevice::open(image.file(), OpenMode::Write)?;
            image.slow = Some(RecordedDisk::serve_slow(Arc::new(SlowFlush(device)))?);
        }
        Ok(image)
    }
    /// The two mkfs have the options that are used here in common.
    fn format(&self) -> Result<()> {
        let mut mkfs = match self.case.mkfs {
            Mkfs::Linux => {
                let mut mkfs = Command::new("mkfs.btrfs");
                mkfs.arg("-q");
                mkfs
            }
            Mkfs::Larder => {
                let mut larder = Command::new(self.larder()?);
                larder.arg("mkfs");
                larder
            }
        };
        // The features of a current mkfs.btrfs, since an older one has other defaults.
        let spread = self.case.spread;
        let metadata = spread.metadata().unwrap_or_else(|| self.run.metadata.name());
        let features = ["-f", "-K", "-O", "block-group-tree", "-d", spread.data(), "-m", metadata];
        mkfs.args(features).args(["--csum", &self.run.csum]);
        // mkfs.btrfs wants block devices where there are several.
        let devices = if self.files.len() > 1 { self.attach()? } else { Vec::new() };
        if devices.is_empty() {
            mkfs.arg(self.file());
        }
        quietly(mkfs.args(devices.iter().map(LoopDevice::path)))
    }
    fn attach(&self) -> Result<Vec<LoopDevice>> {
        let how = LoopOptions { read_only: false, direct_io: self.target.direct() };
        self.here().iter().map(|file| LoopDevice::attach_with(file, how)).collect()
    }
    /// The files of the devices that are not lost.
    fn here(&self) -> Vec<PathBuf> {
        let lost = self.lost.as_ref().map(|(n, _)| *n);
        let here = self.files.iter().enumerate().filter(|(n, _)| Some(*n) != lost);
        here.map(|(_, file)| file.clone()).collect()
    }
    /// Loses a device behind the first: its file moves to where nobody looks for it.
    pub(crate) fn lose(&mut self, n: usize) -> Result<()> {
        self.get_back()?;
        let dir = tempfile::tempdir_in(&self.run.dir)?;
        fs::rename(&self.files[n], dir.path().join("lost"))?;
        self.lost = Some((n, dir));
        Ok(())
    }
    /// The lost device comes back, as it was.
    pub(crate) fn get_back(&mut self) -> Result<()> {
        if let Some((n, dir)) = self.lost.take() {
            fs::rename(dir.path().join("lost"), &self.files[n])?;
        }
        Ok(())
    }
    /// Drops the machine's caches, and has the image's pages where the case wants them.
    pub(crate) fn arrange(&self) -> Result<()> {
        self.case.pages.arrange(&self.here())
    }
    /// MiB of it that the page cache holds.
    pub(crate) fn cached_mib(&self) -> Result<f64> {
        let files = self.here();
        let bytes = files.iter().map(|file| case::cached_bytes(file));
        Ok(bytes.sum::<Result<u64>>()? as f64 / f64::from(1 << 20))
    }
    /// The `larder` command.
    pub(crate) fn larder(&self) -> Result<&Path> {
        self.run.larder.as_deref().context("no larder command")
    }
    /// A command that will work on it.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.group {
            Some(group) => group.command(program),
            None => Command::new(program),
        }
    }
    /// What is mounted: the file, or the slow one in front of it.
    fn source(&self) -> PathBuf {
        self.slow.as_ref().map_or_else(|| self.word(), RecordedDisk::path)
    }

    /// Mounts it.
    pub(crate) fn mount(&self) -> Result<Mount> {
        match self.target {
            Target::Kernel
            | Target::KernelAgain
            | Target::KernelDirect
            | Target::KernelSlowFlush => self.mount_with_kernel(),
            Target::Ceiling | Target::CeilingWriteback => {
                let command = self.command(std::env::current_exe()?);
                let daemon =
                    Daemon::ceiling(command, self.mountpoint.path(), self.target.writes_back())?;
                Ok(Mount::Daemon(daemon, self.path()))
            }
            _ => {
                let mut options = String::from("commit=5,nodiscard");
                if self.target.direct() {
                    options.push_str(",direct");
                }
                options.push_str(self.degraded());
                if let Some(switch) = self.target.switch() {
                    options.push(',');
                    options.push_str(switch);
                }
                if let Some(more) = &self.run.larder_options {
                    options.push(',');
                    options.push_str(more);
                }
                let larder = self.larder()?;
                let source = self.source();
                let how = LarderMount {
                    larder,
                    source: self.device.as_ref().map_or(&source, LoopDevice::path),
                    options,
                    cache_size: self.run.cache_size.as_deref(),
                };
                let command = self.command(larder);
                Ok(Mount::Daemon(
                    Daemon::larder(command, self.mountpoint.path(), &how)?,
                    self.path(),
                ))
            }
        }
    }

    /// Mounts it with the kernel's btrfs, for any target.
    pub(crate) fn mount_with_kernel(&self) -> Result<Mount> {
        let mut devices = match &self.slow {
            Some(slow) => vec![LoopDevice::attach(&slow.path())?],
            None => self.attach()?,
        };
        devices.iter().try_for_each(|device| check_direct(device, self.target.direct()))?;
        let first = devices.remove(0);
        // `ssd`: a loop device counts as rotational, which btrfs pays for in each log commit.
        // `nodiscard`: it would otherwise punch holes into the file behind the device.
        let options = format!("ssd,noatime,nodiscard,commit=5{}", self.degraded());
        Ok(Mount::Kernel(KernelMount::devices(first, devices, &options)?))
    }

    /// The mount option that it takes, behind others.
    fn degraded(&self) -> &'static str {
        if self.lost.is_some() { ",degraded" } else { "" }
    }

    fn path(&self) -> PathBuf {
        self.mountpoint.path().to_owned()
    }

    /// The file of the first device.
    pub(crate) fn file(&self) -> &Path {
        &self.files[0]
    }

    /// All of its files, as a command of Larder's takes them.
    pub(crate) fn word(&self) -> PathBuf {
        let files = self.here();
        let words: Vec<_> = files.iter().map(|file| file.as_os_str()).collect();
        PathBuf::from(words.join(OsStr::new(",")))
    }

    /// The judge's verdict on the unmounted image. What Linux has written wrong is said, and no
    /// reason to end.
    ///
    /// # Errors
    /// There is no verdict, or Larder has written something wrong.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.target.keeps() {
            return Ok(());
        }
        let report = match self.files.len() {
            1 => btrfs_check(self.file(), false),
            _ => DeviceSet::of(self.files.clone()).check()?,
        };
        if report.is_clean() {
            return Ok(());
        }
        if self.target.is_larder() {
            bail!("btrfs check: {report}");
        }
        eprintln!("after what {} has written, btrfs check says: {report}", self.target.name());
        Ok(())
    }
}

impl Drop for Image<'_> {
    fn drop(&mut self) {
        self.device = None;
        self.slow = None;
        for file in &self.files {
            let _ = fs::remove_file(file);
        }
    }
}

/// Makes a file of zeros, all of which have a place on the disk.
pub(crate) fn fill(path: &Path, size: Mib) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    // As large pieces of the disk as there are; the zeros then make them written ones.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size.bytes())?;
    let zeros = vec![0; 1 << 20];
    for _ in 0..size.0 {
        crate::interrupt::check()?;
        file.write_all(&zeros)?;
    }
    Ok(file.sync_all()?)
}

/// Writes a file out, and looks whether all of it has a place on the disk.
fn check_allocated(path: &Path, bytes: u64) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    let found = file.metadata()?;
    let whole = found.len() == bytes && found.blocks().saturating_mul(512) >= bytes;
    if whole { Ok(()) } else { bail!("{} is not fully allocated after mkfs", path.display()) }
}

/// Does the loop device use direct I/O if that is wanted? The kernel falls back silently.
fn check_direct(device: &LoopDevice, wanted: bool) -> Result<()> {
    let path = format!("/sys/block/{}/loop/dio", device.name());
    let is = fs::read_to_string(&path).with_context(|| path.clone())?.trim() == "1";
    if is == wanted { Ok(()) } else { bail!("{}: direct I/O is {is}, not {wanted}", device.name()) }
}

/// Runs a command. What it prints is only of interest if it fails.
pub(crate) fn quietly(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let out = command.output().with_context(|| format!("running {name}"))?;
    if out.status.success() {
        Ok(())
    } else {
        bail!("{name}: {}", String::from_utf8_lossy(&out.stderr).trim())
    }
}

/// A mount; taken away when dropped.
#[derive(Debug)]
pub(crate) enum Mount {
    Kernel(KernelMount),
    Daemon(Daemon, PathBuf),
}

impl Mount {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Kernel(mount) => mount.path(),
            Self::Daemon(_, path) => path,
        }
    }
    /// The process or kernel whose memory and CPU are watched.
    pub(crate) fn watched(&self) -> Watched {
        match self {
            Self::Kernel(_) => Watched::Kernel,
            Self::Daemon(daemon, _) => Watched::Process(daemon.pid()),
        }
    }
    /// The daemon's statistics; `None` for the kernel.
    pub(crate) fn stats(&mut self) -> Result<Option<serde_json::Value>> {
        match self {
            Self::Kernel(_) => Ok(None),
            Self::Daemon(daemon, _) => daemon.stats().map(Some),
        }
    }
    /// Ends this mount and makes the next one, for a file system that does not outlive its daemon.
    pub(crate) fn remount(&mut self) -> Result<()> {
        match self {
            Self::Daemon(daemon, _) => daemon.remount(),
            Self::Kernel(_) => bail!("the kernel's mounts are made anew"),
        }
    }
    /// Unmounts, and returns when everything is durable.
    pub(crate) fn unmount(self) -> Result<()> {
        let complaints = self.unmount_damaged()?;
        ensure!(complaints.is_empty(), "the kernel: {}", complaints.join("; "));
        Ok(())
    }
    /// As [`Self::unmount`], where the kernel has reason to complain: returns what it said.
    pub(crate) fn unmount_damaged(self) -> Result<Vec<String>> {
        match self {
            Self::Daemon(daemon, _) => daemon.unmount().map(|()| Vec::new()),
            Self::Kernel(mount) => mount.unmount(),
        }
    }
}
