//! Power cuts of a file system on several devices, of which some are lost at the same moment.
//!
//! The decision hidden here is how the devices are cut together. `Disks` has one clock for all of
//! them. A write is durable on its device if a flush *of that device* that began after the write
//! had ended has itself ended. Of the other writes that had begun, each device keeps a set of its
//! own, and any of them may be torn. Then as many devices are taken away as the profile tolerates.
//!
//! What is demanded of the rest is simple, so that it can be demanded of every sector: a file was
//! synced with known content and written to since. Each of its sectors must hold what was synced,
//! or what a write began to put there later.

use crate::device::SimDevice;
use crate::image::{Image, Piece, pieces};
use larder_format::{Physical, SUPER_OFFSETS, SUPER_SIZE};
use larder_fs::{
    Error, Fallocate, FileKind, FilePosition, Filesystem, InodeId, NewInode, OpenOptions, Tuning,
};
use larder_volume::Device;
use parking_lot::{Mutex, RwLock};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

const SECTOR: usize = 4096;
/// Sectors of a file at most.
const SECTORS: usize = 40;
/// Files that are written.
const FILES: usize = 5;

/// A moment.
type Time = u64;

#[derive(Clone, Debug)]
struct Write {
    device: usize,
    at: u64,
    len: usize,
    pieces: Arc<[Piece]>,
    began: Time,
    ended: Time,
}

impl Write {
    fn is_superblock(&self) -> bool {
        self.len == SUPER_SIZE && SUPER_OFFSETS.contains(&Physical(self.at))
    }
}

#[derive(Clone, Copy, Debug)]
struct Flush {
    device: usize,
    began: Time,
    ended: Time,
}

#[derive(Debug, Default)]
struct Log {
    clock: Time,
    writes: Vec<Write>,
    flushes: Vec<Flush>,
}

impl Log {
    fn tick(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }
}

/// Devices in memory that record with one clock.
struct Disks {
    base: Vec<Image>,
    log: Arc<Mutex<Log>>,
}

struct Disk {
    number: usize,
    image: RwLock<Image>,
    log: Arc<Mutex<Log>>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Disk({})", self.number)
    }
}

impl Device for Disk {
    fn name(&self) -> String {
        format!("disk-{}", self.number + 1)
    }
    fn size(&self) -> u64 {
        self.image.read().size()
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.image.read().read(at.0, buf);
        Ok(())
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        let write = {
            let mut log = self.log.lock();
            let began = log.tick();
            let (device, pieces) = (self.number, pieces(at.0, data).into());
            let (at, len, ended) = (at.0, data.len(), Time::MAX);
            log.writes.push(Write { device, at, len, pieces, began, ended });
            log.writes.len() - 1
        };
        self.image.write().write(at.0, data);
        let mut log = self.log.lock();
        log.writes[write].ended = log.tick();
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        let began = self.log.lock().tick();
        let mut log = self.log.lock();
        let ended = log.tick();
        log.flushes.push(Flush { device: self.number, began, ended });
        Ok(())
    }
}

impl Disks {
    fn new(base: Vec<Image>) -> Self {
        Self { base, log: Arc::default() }
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let disk = |(number, image): (usize, &Image)| -> Arc<dyn Device> {
            Arc::new(Disk { number, image: RwLock::new(image.clone()), log: Arc::clone(&self.log) })
        };
        self.base.iter().enumerate().map(disk).collect()
    }
    fn now(&self) -> Time {
        self.log.lock().tick()
    }

    /// The moment at which some superblock was written, after the one that is given.
    fn some_superblock(&self, after: Time, random: &mut StdRng) -> Option<Time> {
        let log = self.log.lock();
        let moments = log.writes.iter().filter(|w| w.is_superblock() && w.ended > after);
        let moments: Vec<Time> = moments.map(|w| w.ended).collect();
        moments.choose(random).copied()
    }

    /// What a cut at a moment leaves of each device.
    fn cut(&self, at: Time, random: &mut StdRng) -> Vec<Image> {
        let log = self.log.lock();
        let device = |number: usize| {
            let flushed = log
                .flushes
                .iter()
                .filter(|f| f.device == number && f.ended <= at)
                .map(|f| f.began)
                .max()
                .unwrap_or(0);
            let begun = |w: &&Write| w.device == number && w.began <= at;
            let open = log.writes.iter().filter(begun).filter(|w| w.ended >= flushed).count();
            // None, all, those up to some moment, or any.
            let (mode, upto) = (random.random_range(0..4), random.random_range(0..=open));
            let (mut image, mut passed) = (self.base[number].clone(), 0);
            for write in log.writes.iter().filter(begun) {
                let durable = write.ended < flushed;
                passed += usize::from(!durable);
                let kept = match mode {
                    0 => false,
                    1 => true,
                    2 => passed <= upto,
                    _ => random.random_bool(0.5),
                };
                if durable || kept {
                    put(&mut image, write, !durable && random.random_bool(0.1), random);
                }
            }
            image
        };
        (0..self.base.len()).map(device).collect()
    }
}

/// Carries a write out, all of it or torn at 512 bytes. Superblocks do not tear.
fn put(image: &mut Image, write: &Write, torn: bool, random: &mut StdRng) {
    let end = if torn && !write.is_superblock() {
        write.at + random.random_range(0..write.len as u64 / 512 + 1) * 512
    } else {
        write.at + write.len as u64
    };
    for piece in write.pieces.iter().filter_map(|piece| piece.clip(write.at..end)) {
        image.put(&piece);
    }
}

/// What a file has been, sector by sector: versions, which count from 1, and when each began.
#[derive(Clone, Debug, Default)]
struct File {
    id: Option<InodeId>,
    now: Vec<u32>,
    begun: Vec<(Time, usize, u32)>,
    /// What syncs promised, and when they had.
    promised: Vec<(Time, Vec<u32>)>,
}

/// A file system that is written, and what it has to show.
struct Work<'a> {
    fs: &'a Filesystem,
    disks: &'a Disks,
    files: Vec<File>,
    version: u32,
    random: StdRng,
}

fn name(file: usize) -> Vec<u8> {
    format!("file-{file}").into_bytes()
}

fn new_file() -> NewInode<'static> {
    let kind = FileKind::Regular;
    NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] }
}

/// A sector says what it is, all over.
fn sector(file: usize, index: usize, version: u32) -> Vec<u8> {
    let word = (version << 12) | ((file as u32) << 6) | index as u32;
    word.to_le_bytes().repeat(SECTOR / 4)
}

/// The version of a sector; 0 for zeros.
fn version_of(file: usize, index: usize, bytes: &[u8]) -> Option<u32> {
    let word = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
    let version = word >> 12;
    let is_whole = bytes.iter().all(|b| *b == 0) || bytes == sector(file, index, version);
    is_whole.then_some(version)
}

impl<'a> Work<'a> {
    /// Goes on with the files that are there. What they hold now is promised.
    fn new(
        fs: &'a Filesystem,
        disks: &'a Disks,
        first_version: u32,
        seed: u64,
    ) -> Result<Self, String> {
        let files = vec![File::default(); FILES];
        let random = StdRng::seed_from_u64(seed);
        let mut this = Self { fs, disks, files, version: first_version, random };
        for n in 0..FILES {
            let Some((id, now)) = content(fs, n)? else { continue };
            let file = &mut this.files[n];
            file.id = Some(id);
            file.promised.push((0, now.clone()));
            file.now = now;
        }
        Ok(this)
    }

    fn step(&mut self) -> Result<(), Error> {
        let n = self.random.random_range(0..FILES);
        match self.random.random_range(0..12) {
            0 => self.sync()?,
            1..=4 => self.fsync(n)?,
            5 => self.churn()?,
            6 => {
                if let Some(id) = self.files[n].id {
                    let from = FilePosition { id, offset: 0 };
                    let reserve = Fallocate::Allocate { keep_size: true };
                    self.fs.fallocate(from, (SECTORS * SECTOR) as u64, reserve)?;
                }
            }
            _ => self.write(n)?,
        }
        Ok(())
    }

    fn write(&mut self, n: usize) -> Result<(), Error> {
        let id = match self.files[n].id {
            Some(id) => id,
            None => self.fs.create(self.fs.root(), &name(n), &new_file())?.id,
        };
        let end = self.files[n].now.len().max(1);
        let from = self.random.random_range(0..end.min(SECTORS - 1));
        let most = if self.random.random_bool(0.5) { 1 } else { SECTORS - from };
        let len = self.random.random_range(1..=most);
        self.version += 1;
        let version = self.version;
        let data: Vec<u8> = (from..from + len).flat_map(|i| sector(n, i, version)).collect();
        let began = self.disks.now();
        let file = &mut self.files[n];
        file.id = Some(id);
        file.now.resize(file.now.len().max(from + len), 0);
        for index in from..from + len {
            file.begun.push((began, index, version));
            file.now[index] = version;
        }
        self.fs.write(id, (from * SECTOR) as u64, &data)
    }

    fn fsync(&mut self, n: usize) -> Result<(), Error> {
        let Some(id) = self.files[n].id else { return Ok(()) };
        self.fs.fsync(id, false)?;
        let now = self.disks.now();
        let file = &mut self.files[n];
        file.promised.push((now, file.now.clone()));
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Error> {
        self.fs.sync()?;
        let now = self.disks.now();
        for file in self.files.iter_mut().filter(|file| file.id.is_some()) {
            file.promised.push((now, file.now.clone()));
        }
        Ok(())
    }

    /// Files come and go, so that space is freed in all sizes.
    fn churn(&mut self) -> Result<(), Error> {
        let root = self.fs.root();
        let name = format!("passing-{}", self.random.random_range(0..4)).into_bytes();
        match self.fs.lookup(root, &name) {
            Ok(_) => self.fs.unlink(root, &name),
            Err(_) => {
                let id = self.fs.create(root, &name, &new_file())?.id;
                let len = self.random.random_range(1..30) * SECTOR;
                self.fs.write(id, 0, &vec![0x55; len])?;
                if self.random.random_bool(0.5) { self.fs.fsync(id, false) } else { Ok(()) }
            }
        }
    }
}

/// The versions of a file's sectors.
fn content(fs: &Filesystem, n: usize) -> Result<Option<(InodeId, Vec<u32>)>, String> {
    let Ok(attr) = fs.lookup(fs.root(), &name(n)) else { return Ok(None) };
    let mut bytes = vec![0; SECTORS * SECTOR];
    let len = fs.read(attr.id, 0, &mut bytes).map_err(|e| format!("file {n}: {e}"))?;
    let sectors = bytes[..len].chunks(SECTOR).enumerate();
    let versions = sectors.map(|(index, bytes)| {
        let version = version_of(n, index, bytes);
        version.ok_or_else(|| format!("file {n}: sector {index} holds something else"))
    });
    Ok(Some((attr.id, versions.collect::<Result<_, _>>()?)))
}

/// Does a file show at least what was promised at a moment, and nothing that had not begun?
fn is_kept(n: usize, file: &File, shown: Option<&[u32]>, at: Time) -> Result<(), String> {
    let Some((_, promised)) = file.promised.iter().rfind(|(when, _)| *when <= at) else {
        return Ok(());
    };
    let shown = shown.ok_or_else(|| format!("file {n} is gone"))?;
    if shown.len() < promised.len() {
        let (is, was) = (shown.len(), promised.len());
        return Err(format!("file {n} has {is} sectors, and {was} were promised"));
    }
    for (index, version) in shown.iter().enumerate() {
        let least = promised.get(index).copied().unwrap_or(0);
        let begun = |(when, i, v): &(Time, usize, u32)| {
            *when <= at && *i == index && *v == *version && *v >= least
        };
        if *version != least && !file.begun.iter().any(begun) {
            return Err(format!(
                "file {n}: sector {index} has version {version}, and {least} was promised"
            ));
        }
    }
    Ok(())
}

/// What is tried.
#[derive(Clone)]
pub struct Plan {
    /// The devices as they were made.
    pub base: Vec<Image>,
    /// So many of them may be lost.
    pub tolerated: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Operations of each round.
    pub steps: usize,
    /// Power cuts after which the work goes on with all devices.
    pub rounds: usize,
    /// States that are looked at in each round.
    pub states: usize,
    /// How the engine behaves.
    pub tuning: Tuning,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan").field("seed", &self.seed).finish_non_exhaustive()
    }
}

/// Carries a plan out. Returns how many different states were looked at.
///
/// # Errors
/// What a state lacks.
pub fn run(plan: &Plan) -> Result<usize, String> {
    let mut random = StdRng::seed_from_u64(plan.seed);
    let (mut base, mut version, mut seen) = (plan.base.clone(), 0, BTreeMap::new());
    for round in 0..plan.rounds {
        for image in &mut base {
            image.freeze();
        }
        let disks = Disks::new(base);
        let tuning = Tuning { fake_clock: true, ..plan.tuning.clone() };
        let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
        let devices = disks.devices();
        let fs = Filesystem::open_devices(devices, options)
            .map_err(|e| format!("round {round}: {e}"))?;
        let mut work = Work::new(&fs, &disks, version, plan.seed + round as u64)?;
        let opened = disks.now();
        for step in 0..plan.steps {
            work.step().map_err(|e| format!("round {round}, step {step}: {e}"))?;
        }
        version = work.version;
        let files = std::mem::take(&mut work.files);
        drop(work);
        fs.close().map_err(|e| format!("round {round}: close: {e}"))?;
        drop(fs);
        let end = disks.now();
        for _ in 0..plan.states {
            // What the round before has left shows at the beginning.
            let until = if random.random_bool(0.25) { opened + (end - opened) / 8 } else { end };
            let at = random.random_range(opened..=until);
            let images = disks.cut(at, &mut random);
            look(plan, images, &files, at, &mut random, &mut seen)
                .map_err(|e| format!("round {round}, cut at {at} of {end}: {e}"))?;
        }
        let at = disks.some_superblock(opened, &mut random).filter(|_| random.random_bool(0.5));
        base = disks.cut(at.unwrap_or_else(|| random.random_range(opened..end)), &mut random);
    }
    Ok(seen.len())
}

/// Takes devices away, and looks at what is left.
fn look(
    plan: &Plan,
    mut images: Vec<Image>,
    files: &[File],
    at: Time,
    random: &mut StdRng,
    seen: &mut BTreeMap<(u64, Vec<usize>), ()>,
) -> Result<(), String> {
    let mut numbers: Vec<usize> = (0..images.len()).collect();
    numbers.shuffle(random);
    let mut left = numbers.split_off(plan.tolerated);
    left.sort_unstable();
    let hash = left.iter().fold(0u64, |sum, n| sum.rotate_left(9) ^ images[*n].content_hash());
    if seen.insert((hash, left.clone()), ()).is_some() {
        return Ok(());
    }
    let device = |n: &usize| -> Arc<dyn Device> {
        Arc::new(SimDevice::new(images[*n].clone()).named(format!("disk-{n}")).unrecorded())
    };
    let options = OpenOptions {
        read_only: true,
        degraded: true,
        commit_interval: None,
        ..OpenOptions::default()
    };
    let without = |e: String| format!("without {numbers:?}: {e}");
    let fs = Filesystem::open_devices(left.iter().map(device).collect(), options)
        .map_err(|e| without(format!("it does not open: {e}")))?;
    let shown = files.iter().enumerate().try_for_each(|(n, file)| {
        let shown = content(&fs, n)?;
        is_kept(n, file, shown.as_ref().map(|(_, sectors)| &sectors[..]), at)
    });
    shown.and(fs.close().map_err(|e| e.to_string())).map_err(without)
}
