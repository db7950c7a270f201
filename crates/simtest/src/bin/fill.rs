//! Fills, empties and refills a file system from many threads for some time, and checks what is
//! left: `make fill`.
//!
//! Through the engine on an image file, or with `--mounted` on a directory of a mount.

use clap::Parser;
use larder_fs::mkfs::{MkfsOptions, Profile, mkfs};
use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::fill::{Done, EngineDisk, MountedDisk, Plan, run};
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_volume::{Device, FileDevice, OpenMode};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Fill, empty and refill a file system from many threads.
#[derive(Debug, Parser)]
#[command(name = "fill")]
struct Args {
    /// Size of the image in MiB.
    #[arg(long, default_value_t = 512)]
    size: u64,
    /// Threads.
    #[arg(long, default_value_t = 16)]
    threads: usize,
    /// Seconds.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Longest file in MiB.
    #[arg(long, default_value_t = 8)]
    largest: usize,
    /// Memory of the engine in MiB.
    #[arg(long, default_value_t = 64)]
    cache: u64,
    /// Metadata in two copies.
    #[arg(long)]
    dup: bool,
    /// Do not discard what is freed.
    #[arg(long)]
    nodiscard: bool,
    /// A mounted directory instead.
    #[arg(long)]
    mounted: Option<PathBuf>,
}

fn open(path: &Path, args: &Args) -> Result<Arc<Filesystem>, String> {
    let device = FileDevice::open(path, OpenMode::Write).map_err(|e| e.to_string())?;
    let options = OpenOptions {
        cache_size: args.cache << 20,
        discard: !args.nodiscard,
        ..OpenOptions::default()
    };
    Filesystem::open(Arc::new(device) as Arc<dyn Device>, options).map_err(|e| e.to_string())
}

fn check(path: &Path, when: &str) {
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(path, true).assert_clean(when);
    }
}

/// Nothing may be reserved when nothing runs.
fn idle(fs: &Filesystem, when: &str) -> Result<(), String> {
    let stats = fs.stats();
    match (stats.data_reserved, stats.metadata_reserved, stats.delayed_bytes, &stats.read_only) {
        (0, 0, 0, None) => Ok(()),
        other => {
            Err(format!("{when}: data reserved, metadata reserved, delayed, read-only: {other:?}"))
        }
    }
}

fn fill(args: &Args) -> Result<(), String> {
    let plan = Plan {
        threads: args.threads,
        time: Duration::from_secs(args.seconds),
        seed: args.seed,
        largest: args.largest << 20,
    };
    let done = Done::default();
    if let Some(dir) = &args.mounted {
        let disk = MountedDisk(dir.clone());
        let left = run(&disk, &plan, &done)?;
        left.delete(&disk)?;
        println!("{done:?}");
        return Ok(());
    }
    let dir = scratch();
    let path = dir.path().join("fill.img");
    let device = FileDevice::create(&path, args.size << 20).map_err(|e| e.to_string())?;
    let metadata = if args.dup { Profile::Dup } else { Profile::Single };
    mkfs(&device, &MkfsOptions { metadata: Some(metadata), ..MkfsOptions::default() })
        .map_err(|e| e.to_string())?;
    drop(device);
    let fs = open(&path, args)?;
    let before = fs.info().bytes_used;
    let disk = EngineDisk(fs);
    let left = run(&disk, &plan, &done)?;
    println!("{done:?}");
    println!("{:?}", disk.0.stats());
    println!("{:?}", disk.0.space_usage());
    idle(&disk.0, "full")?;
    disk.0.close().map_err(|e| e.to_string())?;
    drop(disk);
    check(&path, "full");
    let disk = EngineDisk(open(&path, args)?);
    left.compare(&disk, &done)?;
    left.delete(&disk)?;
    for _ in 0..2 {
        disk.0.sync().map_err(|e| e.to_string())?;
    }
    idle(&disk.0, "emptied")?;
    let after = disk.0.info().bytes_used;
    if after > before + (1 << 20) {
        return Err(format!("{before} bytes used at first, {after} after deleting everything"));
    }
    disk.0.close().map_err(|e| e.to_string())?;
    drop(disk);
    check(&path, "emptied");
    Ok(())
}

fn main() -> ExitCode {
    match fill(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("fill: {e}");
            ExitCode::FAILURE
        }
    }
}
