//! Power cuts of a file system on several devices, of which some are lost at the same moment.
//!
//! The decision hidden here is how the devices are cut together, at random moments of the
//! recording of a [`SimDevice`]. A write is durable on its device if a flush *of that device* that
//! began after the write had ended has itself ended. Of the other writes that had begun, each
//! device keeps a set of its own, and any of them may be torn. Then as many devices are taken away
//! as the profile tolerates.
//!
//! What is demanded of the rest is simple, so that it can be demanded of every sector: a file was
//! synced with known content and written to since. Each of its sectors must hold what was synced,
//! or what a write began to put there later.

use crate::device::{Op, OpKind, Recording, Seq, SimDevice, disk_of, is_super};
use crate::image::Image;
use larder_fs::{
    Error, Fallocate, FileKind, FilePosition, Filesystem, InodeId, NewInode, OpenOptions, Tuning,
};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

const SECTOR: usize = 4096;
/// Sectors of a file at most.
const SECTORS: usize = 40;
/// Files that are written.
const FILES: usize = 5;

/// What a write covers.
fn write_of(op: &Op) -> Option<Range<u64>> {
    match op.kind {
        OpKind::Write { at, len, .. } => Some(at..at + len),
        OpKind::Discard { .. } | OpKind::Flush { .. } => None,
    }
}

fn end_of(op: &Op) -> Seq {
    op.completed.map_or(Seq(u64::MAX), |completion| completion.at)
}

/// The moment at which some superblock was written, after the one that is given.
fn some_superblock(recording: &Recording, after: Seq, random: &mut StdRng) -> Option<Seq> {
    let is_super = |op: &&Op| write_of(op).is_some_and(|range| is_super(&range));
    let moments: Vec<Seq> =
        recording.ops.iter().filter(is_super).map(end_of).filter(|end| *end > after).collect();
    moments.choose(random).copied()
}

/// What a cut at a moment leaves of all disks.
fn cut(recording: &Recording, at: Seq, random: &mut StdRng) -> Image {
    let mut image = recording.base.clone();
    for disk in 0..image.sizes().len() {
        let is_flush = |op: &&Op| matches!(op.kind, OpKind::Flush { disk: of } if of == disk);
        let flushes = recording.ops.iter().filter(is_flush).filter(|op| end_of(op) <= at);
        let flushed = flushes.map(|op| op.submitted).max().unwrap_or_default();
        let is_begun = |op: &&Op| {
            op.submitted <= at && write_of(op).is_some_and(|range| disk_of(range.start) == disk)
        };
        let begun: Vec<&Op> = recording.ops.iter().filter(is_begun).collect();
        let open = begun.iter().filter(|op| end_of(op) >= flushed).count();
        // None, all, those up to some moment, or any.
        let (mode, upto) = (random.random_range(0..4), random.random_range(0..=open));
        let mut passed = 0;
        for op in begun {
            let durable = end_of(op) < flushed;
            passed += usize::from(!durable);
            let kept = match mode {
                0 => false,
                1 => true,
                2 => passed <= upto,
                _ => random.random_bool(0.5),
            };
            if durable || kept {
                put(&mut image, op, !durable && random.random_bool(0.1), random);
            }
        }
    }
    image
}

/// Carries a write out, all of it or torn at 512 bytes. Superblocks do not tear.
fn put(image: &mut Image, op: &Op, torn: bool, random: &mut StdRng) {
    let OpKind::Write { at, len, pieces, .. } = &op.kind else { return };
    let end = match torn && !is_super(&(*at..at + len)) {
        true => at + random.random_range(0..len / 512 + 1) * 512,
        false => at + len,
    };
    for piece in pieces.iter().filter_map(|piece| piece.clip(*at..end)) {
        image.put(&piece);
    }
}

/// What a file has been, sector by sector: versions, which count from 1, and when each began.
#[derive(Clone, Debug, Default)]
struct File {
    id: Option<InodeId>,
    now: Vec<u32>,
    begun: Vec<(Seq, usize, u32)>,
    /// What syncs promised, and when they had.
    promised: Vec<(Seq, Vec<u32>)>,
}

/// A file system that is written, and what it has to show.
struct Work<'a> {
    fs: &'a Filesystem,
    disks: &'a SimDevice,
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
        disks: &'a SimDevice,
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
            file.promised.push((Seq(0), now.clone()));
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
        let began = self.disks.mark();
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
        let now = self.disks.mark();
        let file = &mut self.files[n];
        file.promised.push((now, file.now.clone()));
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Error> {
        self.fs.sync()?;
        let now = self.disks.mark();
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
fn is_kept(n: usize, file: &File, shown: Option<&[u32]>, at: Seq) -> Result<(), String> {
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
        let begun = |(when, i, v): &(Seq, usize, u32)| {
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
    /// The disks as they were made.
    pub base: Image,
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

/// What a round left.
struct Round {
    recording: Recording,
    files: Vec<File>,
    /// When it could begin to work.
    opened: Seq,
    /// The last version that was written.
    version: u32,
}

/// Works on the disks, and closes.
fn work(plan: &Plan, base: Image, version: u32, seed: u64) -> Result<Round, String> {
    let disks = Arc::new(SimDevice::new(base));
    let tuning = Tuning { fake_clock: true, ..plan.tuning.clone() };
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(disks.devices(), options).map_err(|e| e.to_string())?;
    let mut work = Work::new(&fs, &disks, version, seed)?;
    let opened = disks.mark();
    for step in 0..plan.steps {
        work.step().map_err(|e| format!("step {step}: {e}"))?;
    }
    let (files, version) = (std::mem::take(&mut work.files), work.version);
    fs.close().map_err(|e| format!("close: {e}"))?;
    Ok(Round { recording: disks.recording(), files, opened, version })
}

/// Carries a plan out. Returns how many different states were looked at.
///
/// # Errors
/// What a state lacks.
pub fn run(plan: &Plan) -> Result<usize, String> {
    let mut random = StdRng::seed_from_u64(plan.seed);
    let (mut base, mut version, mut seen) = (plan.base.clone(), 0, BTreeSet::new());
    for n in 0..plan.rounds {
        base.freeze();
        let round = work(plan, base, version, plan.seed + n as u64)
            .map_err(|e| format!("round {n}: {e}"))?;
        version = round.version;
        let (opened, end) = (round.opened.0, round.recording.end.0);
        for _ in 0..plan.states {
            // What the round before has left shows at the beginning.
            let until = if random.random_bool(0.25) { opened + (end - opened) / 8 } else { end };
            let at = Seq(random.random_range(opened..=until));
            let image = cut(&round.recording, at, &mut random);
            look(plan, image, &round.files, at, &mut random, &mut seen)
                .map_err(|e| format!("round {n}, cut at {} of {end}: {e}", at.0))?;
        }
        let at = some_superblock(&round.recording, round.opened, &mut random)
            .filter(|_| random.random_bool(0.5))
            .unwrap_or_else(|| Seq(random.random_range(opened..end)));
        base = cut(&round.recording, at, &mut random);
    }
    Ok(seen.len())
}

/// Takes devices away, and looks at what is left.
fn look(
    plan: &Plan,
    mut image: Image,
    files: &[File],
    at: Seq,
    random: &mut StdRng,
    seen: &mut BTreeSet<u64>,
) -> Result<(), String> {
    let mut lost: Vec<usize> = (0..image.sizes().len()).collect();
    lost.shuffle(random);
    lost.truncate(plan.tolerated);
    lost.iter().for_each(|disk| image.lose(*disk));
    if !seen.insert(image.content_hash()) {
        return Ok(());
    }
    let options = OpenOptions {
        read_only: true,
        degraded: true,
        commit_interval: None,
        ..OpenOptions::default()
    };
    let without = |e: String| format!("without {lost:?}: {e}");
    let disks = Arc::new(SimDevice::new(image).unrecorded());
    let fs = Filesystem::open_devices(disks.devices(), options)
        .map_err(|e| without(format!("it does not open: {e}")))?;
    let shown = files.iter().enumerate().try_for_each(|(n, file)| {
        let shown = content(&fs, n)?;
        is_kept(n, file, shown.as_ref().map(|(_, sectors)| &sectors[..]), at)
    });
    shown.and(fs.close().map_err(|e| e.to_string())).map_err(without)
}
