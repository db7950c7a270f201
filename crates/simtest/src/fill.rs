//! Filling, emptying and refilling a file system from many threads: what `make fill` does for
//! minutes and tests do for seconds.
//!
//! Each thread has a directory of its own and knows the content of each of its files. It makes
//! files until there is no space: inline, of some sectors, of some MiB, compressible or not, with
//! attributes that take most of their metadata. Then it compares everything, deletes some or all of
//! it, and goes on. What must hold:
//!
//! - no operation fails with anything but "no space", and none that gives space back fails at all;
//! - what was accepted is there, and as it was written: at once, after a sync, and after opening
//!   again;
//! - reservations are zero when nothing runs, and the space of what was deleted is there again.
//!
//! The same workload runs on the engine ([`EngineDisk`]) and on a mounted directory
//! ([`MountedDisk`]).

use larder_fs::{Error, FileKind, Filesystem, InodeId, NewInode, XattrMode};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Why an operation did not work.
#[derive(Debug)]
pub enum Refusal {
    /// There is no space for it.
    NoSpace,
    /// It is not there.
    NotFound,
    /// Anything else, which must not be.
    Other(String),
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Self {
        match e {
            Error::NoSpace => Self::NoSpace,
            Error::NotFound => Self::NotFound,
            e => Self::Other(e.to_string()),
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::StorageFull => Self::NoSpace,
            io::ErrorKind::NotFound => Self::NotFound,
            _ => Self::Other(e.to_string()),
        }
    }
}

/// What is filled. Directories are numbers, files are names in them.
pub trait Disk: Sync {
    /// Makes the directory of a thread.
    ///
    /// # Errors
    /// As all of these: no space, or what should not happen.
    fn make_dir(&self, dir: usize) -> Result<(), Refusal>;
    /// Makes an empty file, with an attribute of that many bytes unless it is 0.
    ///
    /// # Errors
    /// See above.
    fn create(&self, dir: usize, name: &str, attribute: usize) -> Result<(), Refusal>;
    /// Writes all of `data`.
    ///
    /// # Errors
    /// See above.
    fn write(&self, dir: usize, name: &str, at: u64, data: &[u8]) -> Result<(), Refusal>;
    /// The whole content.
    ///
    /// # Errors
    /// See above.
    fn read(&self, dir: usize, name: &str) -> Result<Vec<u8>, Refusal>;
    /// Makes one file durable.
    ///
    /// # Errors
    /// See above.
    fn fsync(&self, dir: usize, name: &str) -> Result<(), Refusal>;
    /// Deletes a file.
    ///
    /// # Errors
    /// See above.
    fn remove(&self, dir: usize, name: &str) -> Result<(), Refusal>;
    /// Makes everything durable.
    ///
    /// # Errors
    /// See above.
    fn sync(&self) -> Result<(), Refusal>;
}

/// An open file system.
#[derive(Debug)]
pub struct EngineDisk(pub Arc<Filesystem>);

impl EngineDisk {
    fn dir(&self, dir: usize) -> Result<InodeId, Refusal> {
        Ok(self.0.lookup(self.0.root(), format!("dir-{dir}").as_bytes())?.id)
    }
    fn file(&self, dir: usize, name: &str) -> Result<InodeId, Refusal> {
        Ok(self.0.lookup(self.dir(dir)?, name.as_bytes())?.id)
    }
}

fn new(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] }
}

impl Disk for EngineDisk {
    fn make_dir(&self, dir: usize) -> Result<(), Refusal> {
        let name = format!("dir-{dir}");
        self.0.create(self.0.root(), name.as_bytes(), &new(FileKind::Directory))?;
        Ok(())
    }
    fn create(&self, dir: usize, name: &str, attribute: usize) -> Result<(), Refusal> {
        let id = self.0.create(self.dir(dir)?, name.as_bytes(), &new(FileKind::Regular))?.id;
        if attribute > 0 {
            self.0.setxattr(id, b"user.fill", &vec![b'x'; attribute], XattrMode::Set)?;
        }
        Ok(())
    }
    fn write(&self, dir: usize, name: &str, at: u64, data: &[u8]) -> Result<(), Refusal> {
        Ok(self.0.write(self.file(dir, name)?, at, data)?)
    }
    fn read(&self, dir: usize, name: &str) -> Result<Vec<u8>, Refusal> {
        let id = self.file(dir, name)?;
        let size = self.0.getattr(id)?.size;
        let mut data = vec![0; usize::try_from(size).expect("files of some MiB")];
        let n = self.0.read(id, 0, &mut data)?;
        data.truncate(n);
        Ok(data)
    }
    fn fsync(&self, dir: usize, name: &str) -> Result<(), Refusal> {
        Ok(self.0.fsync(self.file(dir, name)?, false)?)
    }
    fn remove(&self, dir: usize, name: &str) -> Result<(), Refusal> {
        Ok(self.0.unlink(self.dir(dir)?, name.as_bytes())?)
    }
    fn sync(&self) -> Result<(), Refusal> {
        Ok(self.0.sync()?)
    }
}

/// A directory of a mounted file system.
#[derive(Debug)]
pub struct MountedDisk(pub PathBuf);

impl MountedDisk {
    fn path(&self, dir: usize, name: &str) -> PathBuf {
        self.0.join(format!("dir-{dir}")).join(name)
    }
}

impl Disk for MountedDisk {
    fn make_dir(&self, dir: usize) -> Result<(), Refusal> {
        Ok(std::fs::create_dir(self.0.join(format!("dir-{dir}")))?)
    }
    fn create(&self, dir: usize, name: &str, attribute: usize) -> Result<(), Refusal> {
        let file = std::fs::File::create_new(self.path(dir, name))?;
        if attribute > 0 {
            let value = vec![b'x'; attribute];
            let done =
                rustix::fs::fsetxattr(&file, "user.fill", &value, rustix::fs::XattrFlags::empty());
            done.map_err(io::Error::from)?;
        }
        Ok(())
    }
    fn write(&self, dir: usize, name: &str, at: u64, data: &[u8]) -> Result<(), Refusal> {
        let file = std::fs::File::options().write(true).open(self.path(dir, name))?;
        Ok(file.write_all_at(data, at)?)
    }
    fn read(&self, dir: usize, name: &str) -> Result<Vec<u8>, Refusal> {
        Ok(std::fs::read(self.path(dir, name))?)
    }
    fn fsync(&self, dir: usize, name: &str) -> Result<(), Refusal> {
        Ok(std::fs::File::open(self.path(dir, name))?.sync_all()?)
    }
    fn remove(&self, dir: usize, name: &str) -> Result<(), Refusal> {
        Ok(std::fs::remove_file(self.path(dir, name))?)
    }
    fn sync(&self) -> Result<(), Refusal> {
        let top = std::fs::File::open(&self.0)?;
        rustix::fs::syncfs(&top).map_err(io::Error::from)?;
        Ok(())
    }
}

/// How long and how hard.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Threads.
    pub threads: usize,
    /// Time after which no thread begins another round; each finishes one at least.
    pub time: Duration,
    /// Seed of everything random.
    pub seed: u64,
    /// Longest file.
    pub largest: usize,
}

/// What was done.
#[derive(Debug, Default)]
pub struct Done {
    /// Times that a thread found the disk full.
    pub full: AtomicU64,
    /// Files made.
    pub files: AtomicU64,
    /// Files deleted.
    pub deleted: AtomicU64,
    /// Files compared.
    pub compared: AtomicU64,
    /// Bytes written.
    pub bytes: AtomicU64,
}

/// A file that a thread has made.
#[derive(Debug)]
struct File {
    name: String,
    data: Vec<(u64, usize, u64)>,
}

/// Bytes from a seed; every other seed makes some that compress well.
fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    if seed.is_multiple_of(2) {
        let phrase = seed.to_le_bytes();
        data.iter_mut().enumerate().for_each(|(i, b)| *b = phrase[i % 8] ^ (i >> 12) as u8);
    } else {
        StdRng::seed_from_u64(seed).fill_bytes(&mut data);
    }
    data
}

impl File {
    fn expected(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (at, len, seed) in &self.data {
            let at = usize::try_from(*at).expect("files of some MiB");
            if all.len() < at + len {
                all.resize(at + len, 0);
            }
            all[at..at + len].copy_from_slice(&content(*seed, *len));
        }
        all
    }
}

struct Worker<'a, D> {
    disk: &'a D,
    dir: usize,
    rng: StdRng,
    next: usize,
    files: Vec<File>,
    plan: Plan,
    done: &'a Done,
}

fn unexpected(what: &str, refusal: &Refusal) -> String {
    format!("{what}: {refusal:?}")
}

impl<D: Disk> Worker<'_, D> {
    fn length(&mut self) -> usize {
        match self.rng.random_range(0..20) {
            0..6 => self.rng.random_range(0..2048),
            6..15 => self.rng.random_range(1..64 << 10),
            15..18 => self.rng.random_range(64 << 10..1 << 20),
            _ => self.rng.random_range(1..self.plan.largest),
        }
    }

    /// One more file, or one more write into one. `Ok(false)`: no space.
    fn add(&mut self) -> Result<bool, String> {
        if !self.files.is_empty() && self.rng.random_ratio(1, 5) {
            let which = self.rng.random_range(0..self.files.len());
            let end = self.files[which]
                .data
                .iter()
                .map(|(at, len, _)| at + *len as u64)
                .max()
                .unwrap_or(0);
            let at = self.rng.random_range(0..=end);
            return self.write(which, at);
        }
        let name = format!("file-{:06}", self.next);
        self.next += 1;
        let attribute =
            if self.rng.random_ratio(1, 4) { self.rng.random_range(1..3000) } else { 0 };
        match self.disk.create(self.dir, &name, attribute) {
            Ok(()) => {}
            Err(Refusal::NoSpace) => {
                // The file may be there without its attribute.
                return match self.disk.remove(self.dir, &name) {
                    Ok(()) | Err(Refusal::NotFound) => Ok(false),
                    Err(e) => Err(unexpected("removing what was not made", &e)),
                };
            }
            Err(e) => return Err(unexpected("create", &e)),
        }
        self.done.files.fetch_add(1, Ordering::Relaxed);
        self.files.push(File { name, data: Vec::new() });
        self.write(self.files.len() - 1, 0)
    }

    fn write(&mut self, which: usize, at: u64) -> Result<bool, String> {
        let (len, seed) = (self.length(), self.rng.random());
        match self.disk.write(self.dir, &self.files[which].name, at, &content(seed, len)) {
            Ok(()) => {
                self.done.bytes.fetch_add(len as u64, Ordering::Relaxed);
                self.files[which].data.push((at, len, seed));
            }
            Err(Refusal::NoSpace) => {
                // Part of it may have been accepted: what the file holds is not known.
                self.remove(which)?;
                return Ok(false);
            }
            Err(e) => return Err(unexpected("write", &e)),
        }
        if self.rng.random_ratio(1, 60) {
            match self.disk.fsync(self.dir, &self.files[which].name) {
                Ok(()) => {}
                Err(e) => return Err(unexpected("fsync", &e)),
            }
        }
        Ok(true)
    }

    fn remove(&mut self, which: usize) -> Result<(), String> {
        let file = self.files.swap_remove(which);
        self.done.deleted.fetch_add(1, Ordering::Relaxed);
        self.disk.remove(self.dir, &file.name).map_err(|e| unexpected("delete", &e))
    }

    fn compare(&self, which: usize) -> Result<(), String> {
        let file = &self.files[which];
        let data = self.disk.read(self.dir, &file.name).map_err(|e| unexpected("read", &e))?;
        let expected = file.expected();
        self.done.compared.fetch_add(1, Ordering::Relaxed);
        if data == expected {
            return Ok(());
        }
        let first = data.iter().zip(&expected).position(|(a, b)| a != b);
        Err(format!(
            "dir-{}/{} has {} bytes instead of {}, and differs at {first:?}",
            self.dir,
            file.name,
            data.len(),
            expected.len()
        ))
    }

    fn round(&mut self, stop: &AtomicBool) -> Result<(), String> {
        let mut full = 0;
        // A large file may find no space where a small one does.
        while full < 3 && !stop.load(Ordering::Relaxed) {
            full += u32::from(!self.add()?);
        }
        self.done.full.fetch_add(u64::from(full > 0), Ordering::Relaxed);
        for _ in 0..self.files.len().min(20) {
            let which = self.rng.random_range(0..self.files.len());
            self.compare(which)?;
        }
        let keep = match self.rng.random_range(0..4) {
            0 => 0,
            1 => self.files.len() * 9 / 10,
            _ => self.rng.random_range(0..=self.files.len()),
        };
        while self.files.len() > keep {
            let which = self.rng.random_range(0..self.files.len());
            self.remove(which)?;
        }
        Ok(())
    }
}

/// What is on the disk when a run is over.
#[derive(Debug)]
pub struct Left {
    dirs: Vec<(usize, Vec<File>)>,
}

impl Left {
    /// Compares all of it with what is there.
    ///
    /// # Errors
    /// What differs.
    pub fn compare(&self, disk: &impl Disk, done: &Done) -> Result<(), String> {
        let plan = Plan { threads: 0, time: Duration::ZERO, seed: 0, largest: 1 };
        for (dir, files) in &self.dirs {
            for file in files {
                let files = vec![File { name: file.name.clone(), data: file.data.clone() }];
                let rng = StdRng::seed_from_u64(0);
                Worker { disk, dir: *dir, rng, next: 0, files, plan, done }.compare(0)?;
            }
        }
        Ok(())
    }
    /// Deletes all of it.
    ///
    /// # Errors
    /// What could not be deleted.
    pub fn delete(self, disk: &impl Disk) -> Result<(), String> {
        for (dir, files) in self.dirs {
            for file in files {
                disk.remove(dir, &file.name).map_err(|e| unexpected("delete", &e))?;
            }
        }
        Ok(())
    }
}

/// Fills, empties and refills. At the end everything is synced and half full or so.
///
/// # Errors
/// The first thing that must not be.
pub fn run(disk: &impl Disk, plan: &Plan, done: &Done) -> Result<Left, String> {
    for dir in 0..plan.threads {
        disk.make_dir(dir).map_err(|e| unexpected("mkdir", &e))?;
    }
    let (until, failed, over) =
        (Instant::now() + plan.time, AtomicBool::new(false), AtomicBool::new(false));
    let dirs: Result<Vec<_>, String> = std::thread::scope(|s| {
        let syncs = s.spawn(|| {
            let mut count = 0u64;
            while !over.load(Ordering::Relaxed) {
                disk.sync().map_err(|e| unexpected("sync", &e))?;
                count += 1;
                std::thread::yield_now();
            }
            Ok::<_, String>(count)
        });
        let workers: Vec<_> = (0..plan.threads)
            .map(|dir| {
                let (failed, plan) = (&failed, *plan);
                s.spawn(move || {
                    let rng = StdRng::seed_from_u64(plan.seed << 8 | dir as u64);
                    let mut worker =
                        Worker { disk, dir, rng, next: 0, files: Vec::new(), plan, done };
                    loop {
                        if let Err(e) = worker.round(failed) {
                            failed.store(true, Ordering::Relaxed);
                            return Err(e);
                        }
                        if Instant::now() >= until || failed.load(Ordering::Relaxed) {
                            return Ok((dir, worker.files));
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = workers.into_iter().map(|w| w.join().expect("no panic")).collect();
        over.store(true, Ordering::Relaxed);
        let synced = syncs.join().expect("no panic");
        let dirs = ended.into_iter().collect::<Result<Vec<_>, _>>()?;
        synced.map(|_| dirs)
    });
    let left = Left { dirs: dirs? };
    disk.sync().map_err(|e| unexpected("sync", &e))?;
    left.compare(disk, done)?;
    Ok(left)
}
