//! Linux goes on with a crash state of a move.
//!
//! It mounts the disks as the cut left them, which makes it go on with a balance or a replacement.
//! Beside that it is compared with what Larder shows. When it is done it writes, syncs and
//! unmounts; then `btrfs check` looks, and Larder shows what was promised.

use super::Moving;
use super::judge::{MoveJudge, only};
use super::members::open;
use crate::device::{Seq, SimDevice};
use crate::image::Image;
use crate::judge::{
    KERNEL, Known, agree_on_log, check_files_but_for, has_log, is_unchecked, lock_for_processes,
    to_files,
};
use crate::oracle::{Aspects, DeviceSet, EngineTree, KernelMount, StdTree, btrfs, compare_sources};
use crate::walk::walk;
use larder_check::{Finding, Kind as What};
use larder_format::DeviceId;
use larder_fs::{Filesystem, OpenOptions};
use larder_volume::{Device, read_superblock};
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
/// How Linux 6.18 gives up when it takes a chunk out in a conversion, and the disks have no room
/// for a new system chunk.
const NO_ROOM: &str = "errno=-28 No space left";

impl MoveJudge<'_> {
    /// Has Linux judge a state. Says whether it could.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn linux(&self, image: &Image, moments: &[Seq]) -> Result<bool, String> {
        let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
        let mut options = OpenOptions { read_only: true, ..self.judge.options.clone() };
        options.tuning.fake_clock = false;
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let (fs, all) = open(&device, &options).map_err(|e| format!("read-only open: {e}"))?;
        let mut devices = device.devices();
        let names: Vec<String> =
            fs.devices().into_iter().filter_map(|d| d.name).chain(target(&fs, &all)).collect();
        devices.retain(|disk| names.contains(&disk.name()));
        let members = only(&device, &devices);
        if !self.can_linux(&members) {
            return Ok(false);
        }
        let _one = KERNEL.lock();
        let _alone = lock_for_processes()?;
        let (_dir, set) = to_files(&members)?;
        let text = |e: anyhow::Error| format!("Linux: {e:#}");
        let degraded = if image.sizes().contains(&0) { ",degraded" } else { "" };
        let words = format!("subvolid=5{degraded}");
        let mount = match set.images() {
            [image] => KernelMount::image(image, &words),
            _ => set.mount(&words),
        };
        let mount = mount.map_err(text)?;
        if self.must_not_read_beside() {
            wait_for_the_end(&mount)?;
        }
        let mut aspects = Aspects::same_image();
        aspects.replayed_since =
            has_log(image).then(|| (now.as_secs().cast_signed() - 1, now.subsec_nanos()));
        let mut compared = compare_sources(&EngineTree(&fs), &StdTree::new(mount.path()), aspects);
        if let Ok(differences) = &mut compared {
            differences.retain(|one| !is_unchecked(one, &fs));
        }
        drop(fs);
        let used = use_it(&mount);
        let complaints = mount.unmount().map_err(text)?;
        if complaints.iter().any(|line| line.contains(NO_ROOM)) {
            return Ok(false);
        }
        used?;
        let differences = compared.map_err(text)?;
        if let Some(first) = differences.first() {
            return Err(format!("Linux sees {} differences, first: {first}", differences.len()));
        }
        let strange: Vec<&String> = complaints.iter().filter(|c| !is_expected(c)).collect();
        if !strange.is_empty() {
            return Err(format!("Linux complains: {strange:?}"));
        }
        self.after_linux(&set, moments)?;
        Ok(true)
    }

    /// May Linux 6.18 come to a stop if something is read while it goes on? A read that is repaired
    /// from parity waits for the end of a replacement, and that end waits for the read
    /// (`btrfs_bio_counter_inc_blocked`, `btrfs_rm_dev_replace_blocked`).
    fn must_not_read_beside(&self) -> bool {
        let has_parity = self.scene.kind.data.parity() + self.scene.kind.metadata.parity() > 0;
        has_parity && self.replaces()
    }

    fn replaces(&self) -> bool {
        matches!(self.scene.moving, Moving::Replace | Moving::Missing | Moving::BadTarget)
    }

    /// Does Linux take such disks?
    fn can_linux(&self, members: &Image) -> bool {
        let there = members.sizes().iter().filter(|size| **size > 0).count();
        // Of one device and the target of its replacement it looks at the first one only.
        let is_alone = self.replaces() && self.scene.kind.disks == 1 && there > 1;
        !is_alone && agree_on_log(members) && !is_target_ahead(members)
    }

    /// Linux has gone on: nothing is wrong, and what was promised is there.
    fn after_linux(&self, set: &DeviceSet, moments: &[Seq]) -> Result<(), String> {
        let mut stack = Image::stack(Vec::new());
        for path in set.images() {
            let disk = Image::from_file(path).map_err(|e| format!("{}: {e}", path.display()))?;
            stack.push(&disk);
        }
        let device = Arc::new(SimDevice::new(stack).unrecorded());
        let members = super::members::members(&device);
        let left: Vec<_> = members.iter().filter_map(|d| super::members::number_of(&**d)).collect();
        let images = left.iter().map(|n| set.images()[*n].clone()).collect();
        // Unless a replacement has begun, the disk that was lost is still missing.
        let degraded = self.scene.moving == Moving::Missing;
        let options = OpenOptions { degraded, ..self.judge.options.clone() };
        let (fs, _) = open(&device, &options).map_err(|e| format!("after Linux went on: {e}"))?;
        // btrfs-progs reads no metadata by its parity.
        let is_missing_one = !fs.info().missing_devices.is_empty();
        if !is_missing_one || self.scene.kind.metadata.parity() == 0 {
            let line = &|line: &str| degraded && is_missing(line);
            let replaced = self.replaces();
            let finding = &|found: &Finding| {
                (is_missing_one && found.kind == What::DeviceMissing)
                    || (replaced && is_of_parity(found))
            };
            let known = Known { line, finding };
            check_files_but_for(&known, &DeviceSet::of(images), "after Linux went on")?;
        }
        let world = walk(&fs).map_err(|e| format!("after Linux went on: {e}"))?;
        self.judge.verify(&world, moments, "after Linux went on")?;
        is_over(&fs)
    }
}

/// The disk that a replacement under way copies to. What is opened read-only does not have it.
fn target(fs: &Filesystem, all: &[Arc<dyn Device>]) -> Option<String> {
    fs.replacement().source?;
    let is_target = |disk: &&Arc<dyn Device>| {
        let number = read_superblock(&***disk).map(|sb| DeviceId(sb.dev_item.devid.get()));
        number.is_ok_and(|number| number == DeviceId::REPLACE_TARGET)
    };
    all.iter().find(is_target).map(|disk| disk.name())
}

/// Has the target of a replacement a commit that no other disk has? Linux goes by that, Larder by
/// the others, and nobody was told that it is durable.
fn is_target_ahead(members: &Image) -> bool {
    let device = Arc::new(SimDevice::new(members.clone()).read_only().unrecorded());
    let superblocks = device.devices().into_iter().filter_map(|disk| read_superblock(&*disk).ok());
    let (targets, others): (Vec<_>, Vec<_>) =
        superblocks.partition(|sb| sb.device_id() == DeviceId::REPLACE_TARGET);
    let newest = others.iter().map(|sb| sb.generation()).max();
    targets.iter().any(|sb| Some(sb.generation()) > newest)
}

/// Nothing is left to be done.
fn is_over(fs: &Filesystem) -> Result<(), String> {
    match fs.unfinished_balance() {
        Ok(None) => Ok(()),
        left => Err(format!("Linux has left a balance: {left:?}")),
    }
}

/// Waits until Linux has gone on to the end; writes beside it and afterwards.
fn use_it(mount: &KernelMount) -> Result<(), String> {
    let text = |e: std::io::Error| format!("Linux: {e}");
    let file = mount.join("by Linux");
    std::fs::write(&file, vec![7; 300_000]).map_err(text)?;
    mount.sync().map_err(text)?;
    wait_for_the_end(mount)?;
    let found = std::fs::read(&file).map_err(text)?;
    if found != vec![7; 300_000] {
        return Err("Linux reads other bytes than it wrote".into());
    }
    std::fs::remove_file(&file).map_err(text)?;
    mount.sync().map_err(text)
}

fn wait_for_the_end(mount: &KernelMount) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    while goes_on(mount) {
        if Instant::now() > until {
            return Err("Linux does not come to an end".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Is a balance or a replacement under way?
fn goes_on(mount: &KernelMount) -> bool {
    let path = mount.path().as_os_str();
    let said = |words: &[&str]| {
        let mut all: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
        all.push(path);
        // While a balance is under way the program ends with 1.
        btrfs(&all).unwrap_or_else(|e| format!("{e:#}"))
    };
    let balances = !said(&["balance", "status"]).contains("No balance found");
    let status = said(&["replace", "status", "-1"]);
    balances || status.contains("% done")
}

/// What parity gives is wrong where Linux 6.18 has replaced a device: it does not copy what is free
/// in a row, and leaves the parity as it was. A scrub mends that.
fn is_of_parity(found: &Finding) -> bool {
    found.what.starts_with("by parity, ")
}

fn is_missing(line: &str) -> bool {
    line.contains("device ") && line.ends_with(" is missing")
}

/// What Linux warns of, although it is meant.
fn is_expected(line: &str) -> bool {
    is_missing(line) || line.contains("has lower redundancy than data profile")
}
