//! `larder dedupe`: equal blocks of files get the same extents.
//!
//! Files are read once, in blocks. The hash of a block says which others it may be equal to; bytes
//! are compared when blocks are shared, while nobody can write
//! ([`larder_fs::Filesystem::dedupe_range`]). Memory is bounded: if there are more blocks than fit,
//! their hashes are divided into classes, and the files are read once for each class. Holes,
//! reserved space, data in leaves and blocks that are shared already are left alone.

use crate::failure::{self, Advise, usage};
use crate::files::{Files, Node, regular};
use crate::image::Access;
use crate::interrupt::Interrupt;
use crate::{mount_options, print, size};
use larder_fs::ExtentPlace;
use rayon::prelude::*;
use serde_json::json;
use std::ffi::OsString;
use std::sync::Mutex;
use xxhash_rust::xxh3::xxh3_128;

/// Give equal blocks of files the same extents.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder dedupe mnt/vms
  larder dedupe --dry-run disk.img:/usr disk.img:/opt

All files at and below the PATHs are compared with each other, byte by byte
before they share anything. The content of files does not change. An extent
becomes free space once nothing uses any part of it. All PATHs are on one mount
or in one image. Interrupted (Ctrl-C), it keeps what is shared so far.")]
pub(crate) struct Args {
    /// Bytes that are compared as a whole: a power of two, 4K at least
    #[arg(long, value_name = "SIZE", default_value = "128K", value_parser = size::parse)]
    block_size: u64,
    /// Memory for what is known of blocks; with less, files are read several times
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size::parse)]
    memory: u64,
    /// Only say what would be shared
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Number of the subvolume that paths in an image start in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// IMAGE:PATH, or a path on a mount
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
}

/// Largest part that is shared at once: nobody else can write to either file meanwhile.
const PART: u64 = 16 << 20;
/// Bytes of one piece of work for a thread.
const CHUNK: u64 = 64 << 20;

/// A block: its hash, where it is in which file, and where on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Block {
    hash: u128,
    file: u32,
    number: u32,
    place: u64,
}

/// A run of blocks that have the same hashes as another run, in the same file or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Equal {
    from: u32,
    from_number: u32,
    to: u32,
    to_number: u32,
    count: u32,
}

/// The result.
#[derive(Debug, Default)]
struct Report {
    files: usize,
    read: u64,
    ranges: u64,
    shared: u64,
    /// Equal hashes, but not bytes; or files that changed, or cannot share.
    refused: u64,
    failed: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.block_size.is_power_of_two() || !(4096..=PART).contains(&args.block_size) {
        return usage("the block size is a power of two between 4K and 16M");
    }
    let Some(first) = args.paths.first() else { return usage("no paths") };
    let access = if args.dry_run { Access::Read { force: false } } else { Access::Write };
    let files = Files::open_as(first, args.subvolid, access)?;
    let interrupt = Interrupt::watch();
    let done = dedupe(args, &files, &interrupt);
    // What was shared stays shared, even if a later part failed.
    let closed = files.close();
    let report = done.and_then(|report| closed.map(|()| report))?;
    if args.json {
        return print::json(&json!({
            "files": report.files,
            "read": report.read,
            "ranges": report.ranges,
            "shared": report.shared,
            "refused": report.refused,
            "failed": report.failed,
            "dry_run": args.dry_run,
        }));
    }
    let what = if args.dry_run { "would be shared" } else { "shared" };
    print::line(&format!(
        "{}, {} read: {} in {} {what}",
        print::number(report.files as u64, "file"),
        size::human(report.read),
        size::human(report.shared),
        print::number(report.ranges, "range")
    ))?;
    if report.refused > 0 {
        print::line(&format!(
            "{} ranges had changed meanwhile, or cannot be shared",
            report.refused
        ))?;
    }
    if let Err(e) = interrupt.check() {
        return Err(e).hint("what is shared stays so; the next run goes on from there");
    }
    if report.failed > 0 {
        anyhow::bail!("{} files or ranges failed; see above", report.failed);
    }
    Ok(())
}

fn dedupe(args: &Args, files: &Files, interrupt: &Interrupt) -> anyhow::Result<Report> {
    let all = regular(files, &args.paths)?;
    let blocks: u64 = all.iter().map(|f| f.size.div_ceil(args.block_size)).sum();
    let fit = (args.memory / size_of::<Block>() as u64).max(1);
    let classes = blocks.div_ceil(fit).max(1);
    let mut report = Report { files: all.len(), ..Report::default() };
    let bar = print::progress();
    for class in 0..classes {
        let found = hash(args, files, &all, (class, classes), &mut report, &bar, interrupt);
        if interrupt.is_asked() {
            break;
        }
        let equal = equals(found);
        share(args, files, &all, &equal, &mut report, &bar, interrupt);
    }
    bar.finish_and_clear();
    Ok(report)
}

/// Hashes of all blocks of a class.
fn hash(
    args: &Args,
    files: &Files,
    all: &[Node],
    (class, classes): (u64, u64),
    report: &mut Report,
    bar: &indicatif::ProgressBar,
    interrupt: &Interrupt,
) -> Vec<Block> {
    let found = Mutex::new((Vec::new(), 0, 0));
    let chunk = CHUNK.max(args.block_size);
    let jobs = all
        .iter()
        .enumerate()
        .flat_map(|(n, f)| (0..f.size.div_ceil(chunk)).map(move |c| (n, c * chunk)));
    let jobs: Vec<(usize, u64)> = jobs.collect();
    jobs.into_par_iter().for_each(|(n, from)| {
        if interrupt.is_asked() {
            return;
        }
        let mut blocks = Vec::new();
        let to = (from + chunk).min(all[n].size);
        let outcome =
            hash_file(args.block_size, files, &all[n], (from, to), &mut |number, hash, place| {
                // The upper half chooses the class: the lower one has other work in a sort.
                if (hash >> 64) as u64 % classes == class {
                    blocks.push(Block { hash, file: n as u32, number, place });
                }
            });
        let mut found = found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        found.0.append(&mut blocks);
        match outcome {
            Ok(read) => found.1 += read,
            Err(e) => {
                bar.suspend(|| print::say(&failure::text(&e)));
                found.2 += 1;
            }
        }
        bar.inc(1);
        bar.set_message(format!("{} read", size::human(found.1)));
    });
    let (blocks, read, failed) =
        found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    report.read += read;
    report.failed += failed;
    blocks
}

/// Hashes the blocks of a part of a file that have data on the device; the bytes read.
fn hash_file(
    block: u64,
    files: &Files,
    node: &Node,
    (from, to): (u64, u64),
    each: &mut impl FnMut(u32, u128, u64),
) -> anyhow::Result<u64> {
    let mut extents = Vec::new();
    files.extents(node, &mut |e| {
        if let ExtentPlace::Device { at, offset, written: true, compressed, .. } = e.place
            && e.start < to
            && e.start + e.len > from
        {
            // The place of the first byte; for a compressed extent, one number for each window.
            let place = if compressed { at.0 ^ offset << 1 } else { at.0 + offset };
            extents.push((e.start, e.start + e.len, place));
        }
    })?;
    if extents.is_empty() {
        return Ok(0);
    }
    let file = files.file(node)?;
    let mut buf = vec![0; usize::try_from(block)?];
    let (mut read, mut at) = (0, from);
    while at < to {
        let end = (at + block).min(node.size);
        let first = extents.partition_point(|e| e.1 <= at);
        // Only blocks that are all data: a hole would become data by sharing.
        let mut covered = at;
        for e in &extents[first..] {
            if e.0 > covered || covered >= end {
                break;
            }
            covered = e.1;
        }
        if covered >= end {
            let want = usize::try_from(end - at)?;
            let n = file.read(at, &mut buf[..want])?;
            read += n as u64;
            // Fewer bytes: the file has been truncated meanwhile.
            if n == want {
                let place = extents[first].2.wrapping_add(at - extents[first].0);
                each(u32::try_from(at / block)?, xxh3_128(&buf[..n]), place);
            }
        }
        at += block;
    }
    Ok(read)
}

/// Which blocks are to share: each with the first one of the same hash. Neighbours become one run.
fn equals(mut blocks: Vec<Block>) -> Vec<Equal> {
    blocks.par_sort_unstable();
    let mut pairs = Vec::new();
    for group in blocks.chunk_by(|a, b| a.hash == b.hash) {
        let first = group[0];
        let others = group[1..].iter().filter(|b| b.place != first.place);
        pairs.extend(others.map(|b| Equal {
            from: first.file,
            from_number: first.number,
            to: b.file,
            to_number: b.number,
            count: 1,
        }));
    }
    pairs.par_sort_unstable_by_key(|p| (p.to, p.to_number));
    let mut runs: Vec<Equal> = Vec::new();
    for p in pairs {
        match runs.last_mut() {
            Some(r)
                if (r.from, r.to) == (p.from, p.to)
                    && r.from_number + r.count == p.from_number
                    && r.to_number + r.count == p.to_number =>
            {
                r.count += 1;
            }
            _ => runs.push(p),
        }
    }
    runs
}

fn share(
    args: &Args,
    files: &Files,
    all: &[Node],
    equal: &[Equal],
    report: &mut Report,
    bar: &indicatif::ProgressBar,
    interrupt: &Interrupt,
) {
    for run in equal {
        let (from, to) = (&all[run.from as usize], &all[run.to as usize]);
        let (mut at, mut there) = (
            u64::from(run.from_number) * args.block_size,
            u64::from(run.to_number) * args.block_size,
        );
        let end = (at + u64::from(run.count) * args.block_size).min(from.size);
        // Within one file a run may overlap the one that it is equal to.
        let apart = if run.from == run.to { at.abs_diff(there) } else { u64::MAX };
        while at < end {
            let len = (end - at).min(PART).min(apart).min(to.size.saturating_sub(there));
            if interrupt.is_asked() {
                return;
            }
            if len == 0 {
                break;
            }
            if args.dry_run {
                report.ranges += 1;
                report.shared += len;
            } else {
                let done =
                    files.file(from).and_then(|a| a.dedupe(at..at + len, &files.file(to)?, there));
                match done {
                    Ok(Some(shared)) => {
                        report.ranges += u64::from(shared > 0);
                        report.shared += shared;
                    }
                    Ok(None) => report.refused += 1,
                    Err(e) => {
                        bar.suspend(|| print::say(&failure::text(&e)));
                        report.failed += 1;
                    }
                }
            }
            at += len;
            there += len;
        }
        bar.set_message(format!("{} shared", size::human(report.shared)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(hash: u128, file: u32, number: u32, place: u64) -> Block {
        Block { hash, file, number, place }
    }

    #[test]
    fn runs_of_equal_blocks_go_together() {
        let blocks = vec![
            block(3, 1, 7, 70),
            block(1, 0, 0, 10),
            block(2, 0, 1, 11),
            block(3, 0, 2, 12),
            block(1, 1, 5, 50),
            block(2, 1, 6, 60),
            // Shared already.
            block(2, 2, 0, 11),
            block(9, 2, 1, 90),
        ];
        let found = equals(blocks);
        assert_eq!(found, [Equal { from: 0, from_number: 0, to: 1, to_number: 5, count: 3 }]);
        assert!(equals(Vec::new()).is_empty());
    }

    #[test]
    fn blocks_of_one_file_share_too() {
        let found = equals(vec![block(1, 0, 0, 1), block(1, 0, 1, 2), block(1, 0, 2, 3)]);
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|e| e.from_number == 0 && e.count == 1), "{found:?}");
    }
}
