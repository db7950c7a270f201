//! The engine alone: the calls that the mount makes for a workload, without a mount.
//!
//! It is made for profilers. Under `valgrind --tool=callgrind` a run has the same number of
//! instructions each time, whatever else the machine does. `perf` finds no FUSE in between. The
//! image is one that mkfs has made. It is not checked, and is of no use afterwards.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use fastrand::Rng;
use larder_fs::older::Reclaim;
use larder_fs::{
    FileKind, Filesystem, InodeId, NewInode, OpenOptions, SetAttr, SetTime, Timestamp, Tuning,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Files of a source tree, as `tar` makes them: look-up, creation, writes of 10 KiB, owner,
    /// mode, times.
    Unpack,
    /// Blocks of one file, each once, in random order.
    Random,
    /// One file from its beginning to its end.
    Stream,
}

#[derive(Args)]
pub(crate) struct Engine {
    /// An image that is formatted.
    image: PathBuf,
    what: What,
    /// Files, blocks of 4 KiB, or pieces of a MiB.
    count: u64,
    /// MiB that the engine may use.
    #[arg(long, default_value_t = 256)]
    cache_mib: u64,
    /// Where space is short, write back whole files instead of as much as is needed.
    #[arg(long)]
    whole_inodes: bool,
    /// With each file that is unpacked, also write a block of a large file, at a random place.
    #[arg(long)]
    beside: bool,
}

const BLOCK: usize = 4096;
/// What `tar` writes at once.
const TAR_PIECE: usize = 10 << 10;

impl Engine {
    pub(crate) fn run(&self) -> Result<()> {
        let device = FileDevice::open(&self.image, OpenMode::Write)?;
        let mut tuning = Tuning::default();
        if self.whole_inodes {
            tuning.reclaim = Reclaim::WholeInodes;
        }
        let options =
            OpenOptions { cache_size: self.cache_mib << 20, tuning, ..OpenOptions::default() };
        let fs = Filesystem::open(Arc::new(device) as Arc<dyn Device>, options)?;
        let start = Instant::now();
        match self.what {
            What::Unpack => unpack(&fs, self.count, self.beside)?,
            What::Random => random(&fs, self.count)?,
            What::Stream => stream(&fs, self.count)?,
        }
        let worked = start.elapsed();
        let reclaim = fs.stats().reclaim;
        fs.close().context("closing")?;
        println!(
            "{:.3} s, closed after {:.3} s",
            worked.as_secs_f64(),
            start.elapsed().as_secs_f64()
        );
        println!("{reclaim:?}");
        Ok(())
    }
}

fn inode(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, perm: 0o600, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] }
}

fn make(fs: &Filesystem, dir: InodeId, name: &str, kind: FileKind) -> Result<InodeId> {
    // The kernel asks first whether there is one.
    let found = larder_fs::no_wait(|| fs.lookup(dir, name.as_bytes()));
    anyhow::ensure!(found.is_err(), "{name} is there already");
    let id = fs.create(dir, name.as_bytes(), &inode(kind))?.id;
    fs.hold(id);
    Ok(id)
}

/// Blocks of the large file that is written beside.
const LARGE_BLOCKS: u64 = 16 << 10;

fn unpack(fs: &Filesystem, files: u64, beside: bool) -> Result<()> {
    let data = vec![0x5au8; TAR_PIECE];
    // The same in each run.
    let (mut sizes, mut places) = (Rng::with_seed(0), Rng::with_seed(1));
    let large = beside.then(|| make(fs, fs.root(), "large", FileKind::Regular)).transpose()?;
    let mut dir = fs.root();
    for n in 0..files {
        if n.is_multiple_of(20) {
            dir = make(fs, fs.root(), &format!("directory-{n}"), FileKind::Directory)?;
        }
        if let Some(large) = large {
            let block = places.u64(..LARGE_BLOCKS);
            fs.write(large, block * BLOCK as u64, &data[..BLOCK])?;
        }
        let id = make(fs, dir, &format!("source_file_{n}.c"), FileKind::Regular)?;
        // Most are small, some are not: 15 KiB in the mean.
        let size = match sizes.u8(..10) {
            0 => sizes.u64(1000..121_000),
            _ => sizes.u64(500..17_500),
        };
        let mut at = 0;
        while at < size {
            // A write that begins within a page is cut at the page's end.
            let in_page = BLOCK as u64 - at % BLOCK as u64;
            let piece = if in_page < BLOCK as u64 { in_page } else { TAR_PIECE as u64 };
            let piece = piece.min(size - at).min(TAR_PIECE as u64 - at % TAR_PIECE as u64);
            if at == 0 {
                let _ = fs.getxattr(id, b"security.capability");
            }
            fs.write(id, at, &data[..piece as usize])?;
            at += piece;
        }
        let time = SetTime::To(Timestamp { sec: 1_700_000_000, nsec: 0 });
        fs.setattr(id, &SetAttr { atime: Some(time), mtime: Some(time), ..SetAttr::default() })?;
        let _ = fs.getxattr(id, b"security.capability");
        fs.setattr(id, &SetAttr { uid: Some(0), gid: Some(0), ..SetAttr::default() })?;
        fs.setattr(id, &SetAttr { perm: Some(0o644), ..SetAttr::default() })?;
    }
    Ok(())
}

fn random(fs: &Filesystem, blocks: u64) -> Result<()> {
    let mut order: Vec<u64> = (0..blocks).collect();
    Rng::with_seed(0).shuffle(&mut order);
    let id = make(fs, fs.root(), "random", FileKind::Regular)?;
    let data = vec![0x5au8; BLOCK];
    for n in order {
        fs.write(id, n * BLOCK as u64, &data)?;
    }
    Ok(())
}

fn stream(fs: &Filesystem, mib: u64) -> Result<()> {
    let id = make(fs, fs.root(), "stream", FileKind::Regular)?;
    let data = vec![0x5au8; 1 << 20];
    for n in 0..mib {
        fs.write(id, n << 20, &data)?;
    }
    Ok(())
}
