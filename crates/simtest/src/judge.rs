//! Looks at one crash state from all sides.
//!
//! Every state is opened read-only, which must write nothing, and read-write, and must show each
//! time what the model allows. Shares of the states go further; they are chosen by hash, so that a
//! rerun chooses the same ones. New files are made and fsynced, and everything is removed down to
//! an empty root. The power is cut again while the recovery runs. `btrfs check` looks at the image
//! before and after. The kernel mounts it and must see the same tree. Of several disks as many as
//! the profiles can do without are lost, are as they were before everything, or hold garbage.

use crate::crash::{Crashes, Limits};
use crate::device::{Seq, SimDevice};
use crate::disks::{Mishap, Mishaps};
use crate::image::{Image, STRIDE};
use crate::model::{History, Mode};
use crate::oracle::{
    Aspects, DeviceSet, Difference, EngineTree, KernelMount, StdTree, btrfs_check, compare_sources,
};
use crate::walk::{Handles, resolve, walk};
use crate::world::{Body, Top, World};
use larder_format::items::InodeFlags;
use larder_fs::{Error, FileKind, Filesystem, InodeId, NewInode, OpenOptions};
use larder_volume::{Device, FileDevice, OpenMode};
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

/// How much of what is done to each state. Shares are between 0 and 1.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    /// Made use of, then emptied.
    pub emptied: f64,
    /// Crashed again while it recovers.
    pub recovered: f64,
    /// Given to `larder check`.
    pub ours: f64,
    /// Given to `btrfs check`.
    pub checked: f64,
    /// Given to the kernel.
    pub kernel: f64,
}

impl Depth {
    /// Nothing but opening and looking.
    pub const LOOK: Self =
        Self { emptied: 0.0, recovered: 0.0, ours: 0.0, checked: 0.0, kernel: 0.0 };
}

/// What is the same for all states of a run.
#[derive(Debug)]
pub struct Judge<'a> {
    /// What was done.
    pub history: &'a History,
    /// What promises mean.
    pub mode: Mode,
    /// How to open: switches that break the engine stay on while it recovers.
    pub options: OpenOptions,
    /// How deep to look.
    pub depth: Depth,
    /// Chooses the shares.
    pub seed: u64,
    /// What was there before the history began: what a disk holds that was away meanwhile.
    pub before: &'a Image,
    /// What happens to disks while the power is off.
    pub mishaps: Mishaps,
    /// A disk has failed meanwhile. With a disk that is behind, a file system may refuse to be
    /// written.
    pub may_be_behind: bool,
    /// Different stacks of disks after mishaps.
    pub hurt: Mutex<HashSet<u64>>,
}

/// What was done with a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Done {
    pub emptied: u64,
    /// States of crashes during recovery.
    pub recovered: u64,
    /// States that `larder check` read.
    pub ours: u64,
    pub checked: u64,
    pub kernel: u64,
    /// States with disks that were lost, old or damaged.
    pub hurt: u64,
    /// Moves that went on to their end.
    pub resumed: u64,
    /// Moves that were given up.
    pub given_up: u64,
}

impl Done {
    /// Adds what was done with others.
    pub fn add(&mut self, other: Self) {
        self.emptied += other.emptied;
        self.recovered += other.recovered;
        self.ours += other.ours;
        self.checked += other.checked;
        self.kernel += other.kernel;
        self.hurt += other.hurt;
        self.resumed += other.resumed;
        self.given_up += other.given_up;
    }
}

/// Two images with one file system's id must not be mounted at the same time: not by threads, not
/// by processes.
pub(crate) static KERNEL: Mutex<()> = Mutex::new(());

pub(crate) fn lock_for_processes() -> Result<std::fs::File, String> {
    crate::oracle::lock_for_processes("larder-simulation.lock").map_err(|e| format!("{e:#}"))
}

impl Judge<'_> {
    /// Does this state belong to a share?
    pub(crate) fn chosen(&self, id: u64, share: f64, purpose: u64) -> bool {
        let x = xxhash_rust::xxh64::xxh64(&id.to_le_bytes(), self.seed ^ purpose);
        ((x >> 11) as f64) < share * (1u64 << 53) as f64
    }

    /// Judges a disk that a cut somewhere in `[earliest, latest]` can have left.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn state(
        &self,
        id: u64,
        image: &Image,
        earliest: Seq,
        latest: Seq,
    ) -> Result<Done, String> {
        let mut done = Done::default();
        let moments = if earliest == latest { vec![latest] } else { vec![latest, earliest] };
        self.read_only(image, &moments)?;
        let by_us = self.chosen(id, self.depth.ours, 6);
        if by_us {
            let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
            check_ourselves(&device.devices(), "as the crash left it")?;
            done.ours += 1;
        }
        if self.chosen(id, self.depth.checked, 1) {
            check(image, "as the crash left it")?;
            done.checked += 1;
        }
        if self.chosen(id, self.mishaps.share, 5) {
            for (mishap, disks) in self.mishaps.chosen(id ^ self.seed, image.sizes().len()) {
                self.mishap(image, mishap, &disks, &moments)?;
                done.hurt += 1;
            }
        }
        if self.chosen(id, self.depth.kernel, 4) && agree_on_log(image) {
            self.kernel(image)?;
            done.kernel += 1;
        }
        let device = Arc::new(SimDevice::new(image.clone()));
        let Some(fs) = self.open_unless_behind(&device, self.may_be_behind)? else {
            return Ok(done);
        };
        let world = walk(&fs).map_err(|e| format!("read-write: {e}"))?;
        self.verify(&world, &moments, "read-write")?;
        if self.chosen(id, self.depth.emptied, 2) {
            done.emptied += 1;
            use_and_empty(&fs, &world)?;
            fs.close().map_err(|e| format!("close after emptying: {e}"))?;
            drop(fs);
            crate::runner::mirrors(&device.image())?;
            let empty = self.look(&device.image(), "after emptying")?;
            if !crate::workload::is_empty(&empty) {
                let left: Vec<String> = empty.names().into_iter().map(|n| n.0).collect();
                return Err(format!("removed, but there again after a mount: {left:?}"));
            }
        } else {
            fs.close().map_err(|e| format!("close: {e}"))?;
            drop(fs);
            let again = self.look(&device.image(), "after recovery and close")?;
            self.verify(&again, &moments, "after recovery and close")?;
        }
        if by_us {
            check_ourselves(&device.devices(), "after recovery, use and close")?;
        }
        if self.chosen(id, self.depth.checked, 1) {
            check(&device.image(), "after recovery, use and close")?;
        }
        if self.chosen(id, self.depth.recovered, 3) && !self.chosen(id, self.depth.emptied, 2) {
            done.recovered += self.crash_again(id, &device, &moments)?;
        }
        Ok(done)
    }

    /// Judges a disk or several after something happened to some of them.
    ///
    /// # Errors
    /// What is wrong.
    pub fn mishap(
        &self,
        image: &Image,
        mishap: Mishap,
        disks: &[usize],
        moments: &[Seq],
    ) -> Result<(), String> {
        if mishap != Mishap::Lost && self.has_unchecked_data() {
            return Ok(());
        }
        let what = |e| format!("{mishap:?} disks {disks:?}: {e}");
        let mut hurt = mishap.befall(image, disks, self.before);
        self.hurt.lock().insert(hurt.content_hash());
        self.read_only(&hurt, moments).map_err(what)?;
        let device = Arc::new(SimDevice::new(hurt));
        let may_refuse = mishap != Mishap::Damaged || self.may_be_behind;
        let Some(fs) = self.open_unless_behind(&device, may_refuse).map_err(what)? else {
            return Ok(());
        };
        let world = walk(&fs).map_err(|e| what(format!("read-write: {e}")))?;
        self.verify(&world, moments, "read-write").map_err(what)?;
        fs.close().map_err(|e| what(format!("close: {e}")))?;
        drop(fs);
        let mut after = device.image();
        self.read_only(&after, moments).map_err(|e| what(format!("closed again: {e}")))?;
        if mishap == Mishap::Lost {
            disks.iter().for_each(|disk| after.take_disk(*disk, image));
            self.come_back(&after, has_more(image, disks), moments)
                .map_err(|e| what(format!("they are back: {e}")))?;
        }
        Ok(())
    }

    /// Judges disks of which some were lost while the others were written. `apart`: those had a
    /// commit that none of the others had, so that both sides may have gone on by themselves.
    fn come_back(&self, image: &Image, apart: bool, moments: &[Seq]) -> Result<(), String> {
        match self.read_only(image, moments) {
            Err(e) if apart && e.contains(WENT_APART) => Ok(()),
            judged => judged,
        }
    }

    /// Is there data that no checksum covers? Nothing tells its copies apart.
    fn has_unchecked_data(&self) -> bool {
        let now = self.history.domains.iter().map(|domain| domain.now());
        self.options.no_data_sum
            || self.options.no_data_cow
            || now.flat_map(World::nodes).any(|(_, node)| node.nocow)
    }

    pub(crate) fn verify(&self, world: &World, moments: &[Seq], how: &str) -> Result<(), String> {
        moments.iter().try_for_each(|at| {
            self.history.verify(world, *at, self.mode).map_err(|e| format!("{how}: {e}"))
        })
    }

    fn open(&self, device: &Arc<SimDevice>) -> Result<Arc<Filesystem>, String> {
        let opened = self.open_unless_behind(device, false)?;
        opened.ok_or_else(|| "read-write open: refused".to_owned())
    }

    /// Opens for writing. `None`: it can only be read, since a disk is missing or behind.
    fn open_unless_behind(
        &self,
        device: &Arc<SimDevice>,
        may_refuse: bool,
    ) -> Result<Option<Arc<Filesystem>>, String> {
        let disks = device.devices();
        let degraded = disks.len() < device.image().sizes().len();
        let options = OpenOptions { degraded, ..self.options.clone() };
        match Filesystem::open_devices(disks, options) {
            Ok(fs) => Ok(Some(fs)),
            Err(Error::Unsupported(why)) if may_refuse && why.ends_with(READ_ONLY) => Ok(None),
            Err(e) => Err(format!("read-write open: {e}")),
        }
    }

    /// Opens read-only, reads everything, and makes sure that nothing was written.
    fn look(&self, image: &Image, how: &str) -> Result<World, String> {
        let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
        let degraded = image.sizes().contains(&0);
        let options = OpenOptions { read_only: true, degraded, ..self.options.clone() };
        let fs = Filesystem::open_devices(device.devices(), options)
            .map_err(|e| format!("{how}: read-only open: {e}"))?;
        let world = walk(&fs).map_err(|e| format!("{how}, read-only: {e}"))?;
        fs.close().map_err(|e| format!("{how}: read-only close: {e}"))?;
        let counts = device.counts();
        if counts.refused + counts.writes + counts.discards > 0 {
            return Err(format!("{how}: a read-only mount wrote: {counts:?}"));
        }
        Ok(world)
    }

    fn read_only(&self, image: &Image, moments: &[Seq]) -> Result<(), String> {
        let world = self.look(image, "read-only")?;
        self.verify(&world, moments, "read-only")
    }

    /// The power goes again at points of the recovery that `device` has recorded.
    fn crash_again(&self, id: u64, device: &SimDevice, moments: &[Seq]) -> Result<u64, String> {
        let limits = Limits { exhaustive: 3, samples: 2, per_epoch: 6, seed: self.seed ^ id };
        let crashes = Crashes::of(&device.recording(), &limits);
        let mut count = 0;
        for state in crashes.states.iter().filter(|s| s.id != id) {
            let image = crashes.image(state);
            let again = |e| {
                format!("after a second crash, during recovery: {e}\n{}", crashes.describe(state))
            };
            self.read_only(&image, moments).map_err(again)?;
            let fs = self.open(&Arc::new(SimDevice::new(image).unrecorded())).map_err(again)?;
            let world = walk(&fs).map_err(again)?;
            self.verify(&world, moments, "read-write").map_err(again)?;
            fs.close().map_err(|e| again(format!("close: {e}")))?;
            count += 1;
        }
        Ok(count)
    }

    /// The kernel mounts the crash state itself and must see what the engine sees.
    fn kernel(&self, image: &Image) -> Result<(), String> {
        let _one = KERNEL.lock();
        let _alone = lock_for_processes()?;
        let (_dir, set) = to_files(image)?;
        let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
        let mut options = OpenOptions { read_only: true, ..self.options.clone() };
        // So that the time of a replay is known to be that; Linux's clock for times goes by ticks,
        // and is behind.
        options.tuning.fake_clock = false;
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let fs = Filesystem::open_devices(device.devices(), options)
            .map_err(|e| format!("read-only open: {e}"))?;
        let mount = mount(&set).map_err(|e| format!("the kernel: {e:#}"))?;
        let mut aspects = Aspects::same_image();
        aspects.replayed_since =
            has_log(image).then(|| (now.as_secs().cast_signed() - 1, now.subsec_nanos()));
        let mut compared = compare_sources(&EngineTree(&fs), &StdTree::new(mount.path()), aspects);
        if let Ok(differences) = &mut compared
            && set.images().len() > 1
        {
            differences.retain(|one| !is_unchecked(one, &fs));
        }
        let complaints = mount.unmount().map_err(|e| format!("the kernel: {e:#}"))?;
        if !complaints.is_empty() {
            return Err(format!("the kernel complains: {}", complaints.join("; ")));
        }
        let differences = compared.map_err(|e| format!("comparing with the kernel: {e:#}"))?;
        if let Some(first) = differences.first() {
            return Err(format!(
                "{} differences from what the kernel sees, first: {first}",
                differences.len()
            ));
        }
        check_files(&set, "after the kernel's mount")
    }
}

fn mount(set: &DeviceSet) -> anyhow::Result<KernelMount> {
    match set.images() {
        [image] => KernelMount::image(image, "subvolid=5"),
        _ => set.mount("subvolid=5"),
    }
}

/// Do these disks have a commit that none of the others has?
fn has_more(image: &Image, disks: &[usize]) -> bool {
    let generation = |disk: usize| {
        let mut bytes = [0; 8];
        let at = disk as u64 * STRIDE + larder_format::SUPER_OFFSETS[0].0 + GENERATION;
        image.read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    let newest = |of: bool| {
        let those = (0..image.sizes().len()).filter(|disk| disks.contains(disk) == of);
        those.map(generation).max()
    };
    newest(true) > newest(false)
}

/// Where a superblock says of which commit it is.
const GENERATION: u64 = 0x48;

/// What a refusal says of disks that were both written without the other.
const WENT_APART: &str = "written without the other";

/// How a refusal ends of what can only be read.
pub(crate) const READ_ONLY: &str = "it can be opened read-only (-o ro)";

/// Is it the content of a file that is written in place? Copies of a write that a cut has met
/// differ, no checksum tells them apart, and each side may read another one.
pub(crate) fn is_unchecked(one: &Difference, fs: &Filesystem) -> bool {
    let path = str::from_utf8(&one.path).ok();
    let file = path.and_then(|path| resolve(fs, &Handles::new(), path).ok());
    let attr = file.and_then(|file| fs.getattr(file).ok());
    one.what.starts_with("contents differ")
        && attr.is_some_and(|attr| attr.flags & InodeFlags::NODATACOW.bits() != 0)
}

/// Where a superblock says where its log is.
const LOG_ROOT: u64 = 0x60;

/// Is there a log to be replayed?
pub(crate) fn has_log(image: &Image) -> bool {
    (0..image.sizes().len() as u64).any(|disk| {
        let mut log_root = [0; 8];
        let first = disk * STRIDE;
        image.read(first + larder_format::SUPER_OFFSETS[0].0 + LOG_ROOT, &mut log_root);
        log_root != [0; 8]
    })
}

/// Have all disks of the newest commit the same log? If a power cut came while a log was attached,
/// Linux goes by the disk that it reads first, and Larder by the newest log. Nobody was told that
/// this log is durable, so both are right.
pub(crate) fn agree_on_log(image: &Image) -> bool {
    let field = |disk: u64, at: u64| {
        let mut bytes = [0; 8];
        image.read(disk * STRIDE + larder_format::SUPER_OFFSETS[0].0 + at, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    let disks = 0..image.sizes().len() as u64;
    let newest = disks.clone().map(|disk| field(disk, GENERATION)).max();
    let mut logs = disks.filter(|d| Some(field(*d, GENERATION)) == newest);
    let first = logs.next().map(|disk| field(disk, LOG_ROOT));
    logs.all(|disk| Some(field(disk, LOG_ROOT)) == first)
}

pub(crate) fn to_files(image: &Image) -> Result<(tempfile::TempDir, DeviceSet), String> {
    let dir = crate::oracle::scratch();
    let file = |number| {
        let path = dir.path().join(format!("state-{}.img", number + 1));
        let written = image.disk(number).write_sparse(&path);
        written.map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        Ok(path)
    };
    let there = (0..image.sizes().len()).filter(|n| image.sizes()[*n] > 0);
    let images = there.map(file).collect::<Result<Vec<PathBuf>, String>>()?;
    Ok((dir, DeviceSet::of(images)))
}

pub(crate) fn check(image: &Image, when: &str) -> Result<(), String> {
    let (_dir, set) = to_files(image)?;
    // With several devices it looks for them by the file system's id, which all states have.
    let several = set.images().len() > 1;
    let _one = several.then(|| KERNEL.lock());
    let _alone = several.then(lock_for_processes).transpose()?;
    check_files(&set, when)
}

/// `larder check --data` shares no code with the engine.
pub(crate) fn check_ourselves(devices: &[Arc<dyn Device>], when: &str) -> Result<(), String> {
    check_but_for(&|_| false, devices, when)
}

/// The same, where some findings are to be expected.
pub(crate) fn check_but_for(
    expected: &dyn Fn(&larder_check::Finding) -> bool,
    devices: &[Arc<dyn Device>],
    when: &str,
) -> Result<(), String> {
    let options = larder_check::Options { data: true, threads: 1, keep: 3 };
    let report = larder_check::check(devices, &options, &|_| {})
        .map_err(|e| format!("larder check {when}: {e}"))?;
    let is_error =
        |f: &&larder_check::Finding| f.severity() == larder_check::Severity::Error && !expected(f);
    let errors = report.findings.iter().filter(is_error);
    match errors.clone().next() {
        None => Ok(()),
        Some(first) => Err(format!(
            "larder check {when}: {} kinds of errors, first: {first:?}",
            errors.map(|f| f.kind).collect::<BTreeSet<_>>().len()
        )),
    }
}

pub(crate) fn check_files(set: &DeviceSet, when: &str) -> Result<(), String> {
    check_files_but_for(&Known { line: &|_| false, finding: &|_| false }, set, when)
}

/// What is to be expected: lines of `btrfs check`, and findings of `larder check`.
pub(crate) struct Known<'k> {
    pub(crate) line: &'k dyn Fn(&str) -> bool,
    pub(crate) finding: &'k dyn Fn(&larder_check::Finding) -> bool,
}

/// The same, where something is to be expected.
pub(crate) fn check_files_but_for(
    known: &Known<'_>,
    set: &DeviceSet,
    when: &str,
) -> Result<(), String> {
    let text = |e: anyhow::Error| format!("btrfs check {when}: {e:#}");
    // It cannot check data that has parity ([`DeviceSet::check`]), so Larder's own check does.
    let has_parity = set.images().len() > 1 && set.has_parity().map_err(text)?;
    let mut report = match set.images() {
        [image] => btrfs_check(image, true),
        _ => set.check_by_progs(!has_parity).map_err(text)?,
    };
    // A power cut may come between the superblocks of two disks.
    let of_two_commits =
        |line: &String| line.contains("adding device") && line.contains("found an existing device");
    // It looks at all loop devices of the machine, of which some go away meanwhile.
    let of_others = |line: &String| line.starts_with("ERROR: cannot scan /dev/loop");
    report
        .complaints
        .retain(|line| !of_two_commits(line) && !of_others(line) && !(known.line)(line));
    if !report.is_clean() {
        return Err(format!("btrfs check {when}: {report}"));
    }
    if !has_parity {
        return Ok(());
    }
    let open = |path: &PathBuf| -> Result<Arc<dyn Device>, String> {
        Ok(Arc::new(FileDevice::open(path, OpenMode::Read).map_err(|e| e.to_string())?))
    };
    let devices = set.images().iter().map(open).collect::<Result<Vec<_>, _>>()?;
    check_but_for(known.finding, &devices, when)
}

/// New files can be made, written and fsynced, get numbers of their own, and then everything can be
/// removed.
fn use_and_empty(fs: &Filesystem, world: &World) -> Result<(), String> {
    let fail =
        |what: &str, e: larder_fs::Error| format!("{what} on the recovered file system: {e}");
    fs.set_default_subvolume(fs.root().subvol)
        .map_err(|e| fail("setting the default subvolume", e))?;
    let taken: BTreeSet<u64> = world.nodes().map(|(_, n)| n.real).collect();
    for (i, dir) in directories(fs, world)?.into_iter().enumerate().take(4) {
        let kind = FileKind::Regular;
        let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
        let name = format!("after-the-crash-{i}");
        let attr = fs.create(dir, name.as_bytes(), &new).map_err(|e| fail("create", e))?;
        if taken.contains(&crate::walk::real(attr.id)) {
            return Err(format!("inode number {} is given out twice", attr.id.ino));
        }
        let data: Vec<u8> = (0..9000u32).map(|b| (b % 249) as u8).collect();
        fs.write(attr.id, 0, &data).map_err(|e| fail("write", e))?;
        fs.fsync(attr.id, false).map_err(|e| fail("fsync", e))?;
        let mut back = vec![0; 9001];
        let n = fs.read(attr.id, 0, &mut back).map_err(|e| fail("read", e))?;
        if back[..n] != data {
            return Err("a file that was just written reads back otherwise".into());
        }
    }
    // What was there before still reads the same: the new data took the place of no other.
    let now = walk(fs)?;
    for (path, _, _, ino) in world.names() {
        let node = world.node(ino).expect("named");
        let found = now.resolve(&path).ok().and_then(|i| now.node(i));
        if let (Body::File(a), Some(Body::File(b))) = (&node.body, found.map(|n| &n.body))
            && a != b
        {
            return Err(format!("{path} changed when new files were written"));
        }
        if found.is_none() {
            return Err(format!("{path} vanished when new files were written"));
        }
    }
    empty(fs, fs.root(), 0)?;
    let left = walk(fs)?;
    if crate::workload::is_empty(&left) {
        Ok(())
    } else {
        Err("the root is not empty after removing everything".into())
    }
}

/// Directories in which files can be made.
fn directories(fs: &Filesystem, world: &World) -> Result<Vec<InodeId>, String> {
    let mut out = vec![fs.root()];
    for (path, _, _, ino) in world.names() {
        let node = world.node(ino).expect("named");
        let is_fixed = world.node(node.home).is_some_and(|top| top.top == Top::ReadOnly);
        if matches!(node.body, Body::Dir(_)) && !is_fixed && !node.placeholder {
            let id = crate::walk::resolve(fs, &crate::walk::Handles::new(), &path);
            out.push(id.map_err(|e| format!("lookup of {path}: {e}"))?);
        }
    }
    Ok(out)
}

/// Removes everything below a directory, subvolumes included; those that are read-only are deleted
/// as they are.
///
/// # Errors
/// What cannot be removed, and why.
pub fn empty(fs: &Filesystem, dir: InodeId, depth: u32) -> Result<(), String> {
    let mut entries = Vec::new();
    fs.readdir(dir, 0, &mut |e| {
        if e.name != b"." && e.name != b".." {
            entries.push((e.name.to_vec(), e.id, e.kind));
        }
        true
    })
    .map_err(|e| format!("readdir while removing: {e}"))?;
    for (name, id, kind) in entries {
        let shown = name.escape_ascii().to_string();
        if kind == FileKind::Directory {
            if depth > 60 {
                return Err("directories are nested too deep".into());
            }
            if id.subvol == dir.subvol {
                empty(fs, id, depth + 1)?;
                fs.rmdir(dir, &name).map_err(|e| format!("rmdir {shown}: {e}"))?;
                continue;
            }
            let info = fs.subvolume(id.subvol).map_err(|e| format!("subvolume {shown}: {e}"))?;
            if !info.read_only {
                empty(fs, id, depth + 1)?;
            }
            fs.delete_subvolume(dir, &name)
                .map_err(|e| format!("deleting subvolume {shown}: {e}"))?;
        } else {
            fs.unlink(dir, &name).map_err(|e| format!("unlink {shown}: {e}"))?;
        }
    }
    Ok(())
}
