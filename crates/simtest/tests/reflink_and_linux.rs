//! Cloning and deduplicating beside the kernel: the same random writes, truncations, fallocates,
//! clones and dedupes on a btrfs of Linux and on one of the engine. Compared are answers, bytes,
//! sizes, and which sectors share a place on the device. Each goes on with the other's image, and
//! `btrfs check` finds nothing in either.

use larder_codec::Packing;
use larder_format::items::Compression;
use larder_fs::mkfs::{Features, MkfsOptions, mkfs};
use larder_fs::{
    Compress, Deduped, Error, Fallocate, FileKind, Filesystem, InodeId, NewInode, OpenOptions,
    SetAttr,
};
use larder_simtest::oracle::{
    self, KernelMount, Need, btrfs_check, dedupe_range, mkfs_btrfs, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::FallocateFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FILES: usize = 5;
/// The last of the files is not copied on write.
const NOCOW: usize = FILES - 1;
const SECTOR: u64 = 4096;
/// Files that have become longer than this are cut.
const LARGE: u64 = 16 << 20;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, Vec<u8>),
    Truncate(u64),
    Fallocate(Fallocate, u64, u64),
    /// Source, where there, where here, length.
    Clone(usize, u64, u64, u64),
    /// The same with bytes: so that there is something to deduplicate.
    Copy(usize, u64, u64, u64),
    Dedupe(usize, u64, u64, u64),
    Sync,
}

/// What came of it: an error number, or what the call says.
type Answer = Result<u64, i32>;

fn errno(e: &Error) -> i32 {
    match e {
        Error::Invalid(_) => libc::EINVAL,
        Error::FileTooBig => libc::EFBIG,
        Error::NotPermitted(_) => libc::EPERM,
        Error::IsDirectory => libc::EISDIR,
        other => panic!("{other}"),
    }
}

#[repr(C)]
struct CloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}
const FICLONERANGE: libc::c_ulong = 0x4020_940d;

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn clone_there(from: &File, range: Range<u64>, to: &File, at: u64) -> Answer {
    let arg = CloneRange {
        src_fd: i64::from(from.as_raw_fd()),
        src_offset: range.start,
        src_length: range.end - range.start,
        dest_offset: at,
    };
    // SAFETY: the kernel reads the structure that FICLONERANGE takes, and it outlives the call.
    match unsafe { libc::ioctl(to.as_raw_fd(), FICLONERANGE, &raw const arg) } {
        0 => Ok(0),
        _ => Err(last_errno()),
    }
}

fn dedupe_there(from: &File, range: Range<u64>, to: &File, at: u64) -> Answer {
    let same = dedupe_range(from, range, to, at).map_err(|e| e.raw_os_error().unwrap())?;
    Ok(same.unwrap_or(u64::MAX))
}

fn place(rng: &mut SmallRng) -> u64 {
    match rng.random_range(0..16u32) {
        0..=13 => rng.random_range(0..24u64) * SECTOR,
        14 => rng.random_range(0..3000),
        _ => rng.random_range(0..100_000),
    }
}

/// A copy of bytes: target, source, where there, where here, length.
type Copied = (usize, usize, u64, u64, u64);

/// An operation, and on which file.
fn op(rng: &mut SmallRng, sizes: &[u64], last: &mut Option<Copied>) -> (usize, Op) {
    let target = rng.random_range(0..FILES);
    let at = place(rng);
    // Files that are copied behind themselves double, and would fill the disk.
    if sizes[target] > LARGE {
        return (target, Op::Truncate(at));
    }
    let len = match rng.random_range(0..4u32) {
        0 => rng.random_range(1..3000),
        1 => rng.random_range(1..40_000),
        _ => rng.random_range(1..9u64) * SECTOR,
    };
    let keep_size = rng.random_ratio(1, 2);
    // What has no checksums shares with its like only; now and then others try.
    let mut from = rng.random_range(0..FILES);
    if (from == NOCOW) != (target == NOCOW) && rng.random_ratio(3, 4) {
        from = target;
    }
    // Up to the source's end, now and then.
    let from_at = place(rng).min(sizes[from].next_multiple_of(SECTOR));
    let ranged = |rng: &mut SmallRng| match rng.random_range(0..6u32) {
        0 => (0, from_at, at),
        1 => {
            (sizes[from].saturating_sub(from_at), from_at, at.max(sizes[target] / SECTOR * SECTOR))
        }
        2 => (sizes[from], 0, 0),
        // Some of what it has.
        3 if sizes[from] > from_at + len => {
            (len.next_multiple_of(SECTOR).min(sizes[from] - from_at), from_at, at)
        }
        _ => (len, from_at, at),
    };
    let op = match rng.random_range(0..28u32) {
        0..=7 => {
            let mut data = vec![0; len as usize];
            rng.fill(&mut data[..]);
            // Something that can be compressed.
            if keep_size {
                data.iter_mut().for_each(|b| *b &= 1);
            }
            Op::Write(at, data)
        }
        8 | 9 => Op::Truncate(at),
        10 => Op::Fallocate(Fallocate::Allocate { keep_size }, at, len),
        11 => Op::Fallocate(Fallocate::Zero { keep_size }, at, len),
        12 | 13 => Op::Fallocate(Fallocate::Punch, at, len),
        14..=21 => {
            let (len, from_at, at) = ranged(rng);
            Op::Clone(from, from_at, at, len)
        }
        22..=24 => {
            let (len, from_at, at) = ranged(rng);
            *last = Some((target, from, from_at, at, len));
            Op::Copy(from, from_at, at, len)
        }
        25 | 26 => {
            if let Some((target, from, from_at, at, len)) = last.take() {
                return (target, Op::Dedupe(from, from_at, at, len));
            }
            let (len, from_at, at) = ranged(rng);
            Op::Dedupe(from, from_at, at, len)
        }
        _ => Op::Sync,
    };
    (target, op)
}

fn open(image: &Path, compress: Option<Compress>) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, compress, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn name(i: usize) -> String {
    format!("f{i}")
}

fn create(fs: &Filesystem, i: usize) -> InodeId {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] };
    let id = fs.create(fs.root(), name(i).as_bytes(), &new).unwrap().id;
    if i == NOCOW {
        let nocow = larder_format::items::InodeFlags::NODATACOW.bits();
        fs.setattr(id, &SetAttr { flags: Some(nocow), ..SetAttr::default() }).unwrap();
    }
    id
}

fn read_here(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let size = fs.getattr(id).unwrap().size;
    let mut bytes = vec![0xaa; size as usize];
    assert_eq!(fs.read(id, 0, &mut bytes).unwrap() as u64, size);
    bytes
}

/// The bytes of a copy, as far as the source has them.
fn part(bytes: &[u8], range: Range<u64>) -> &[u8] {
    let within = |at: u64| bytes.len().min(at as usize);
    &bytes[within(range.start)..within(range.end)]
}

fn do_here(fs: &Filesystem, ids: &[InodeId], i: usize, op: &Op) -> Answer {
    let id = ids[i];
    let answer = |r: larder_fs::Result<()>| r.map(|()| 0).map_err(|e| errno(&e));
    match op {
        Op::Write(at, data) => answer(fs.write(id, *at, data)),
        Op::Truncate(size) => {
            answer(fs.setattr(id, &SetAttr { size: Some(*size), ..SetAttr::default() }).map(drop))
        }
        Op::Fallocate(how, at, len) => answer(fs.fallocate(id.at(*at), *len, *how)),
        Op::Clone(from, from_at, at, len) => {
            answer(fs.clone_range(ids[*from].at(*from_at), id.at(*at), *len).map(drop))
        }
        Op::Copy(from, from_at, at, len) => {
            let bytes = read_here(fs, ids[*from]);
            answer(fs.write(id, *at, part(&bytes, *from_at..*from_at + *len)))
        }
        Op::Dedupe(from, from_at, at, len) => {
            match fs.dedupe_range(ids[*from].at(*from_at), id.at(*at), *len) {
                Ok(Deduped::Same { bytes, .. }) => Ok(bytes),
                Ok(Deduped::Differs) => Ok(u64::MAX),
                Err(e) => Err(errno(&e)),
            }
        }
        Op::Sync => answer(fs.sync()),
    }
}

fn do_there(mount: &KernelMount, files: &[File], i: usize, op: &Op) -> Answer {
    let file = &files[i];
    match op {
        Op::Write(at, data) => file.write_all_at(data, *at).unwrap(),
        Op::Truncate(size) => file.set_len(*size).unwrap(),
        Op::Fallocate(how, at, len) => {
            let keep = |keep_size| {
                if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() }
            };
            let mode = match *how {
                Fallocate::Allocate { keep_size } => keep(keep_size),
                Fallocate::Zero { keep_size } => FallocateFlags::ZERO_RANGE | keep(keep_size),
                Fallocate::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            };
            rustix::fs::fallocate(file, mode, *at, *len).unwrap();
        }
        Op::Clone(from, from_at, at, len) => {
            return clone_there(&files[*from], *from_at..*from_at + *len, file, *at);
        }
        Op::Copy(from, from_at, at, len) => {
            let bytes = fs::read(mount.join(name(*from))).unwrap();
            file.write_all_at(part(&bytes, *from_at..*from_at + *len), *at).unwrap();
        }
        Op::Dedupe(from, from_at, at, len) => {
            return dedupe_there(&files[*from], *from_at..*from_at + *len, file, *at);
        }
        Op::Sync => mount.sync().unwrap(),
    }
    Ok(0)
}

/// Runs one sequence of operations on both, and compares after each.
fn run(
    fs: &Filesystem,
    mount: &KernelMount,
    rng: &mut SmallRng,
    steps: u32,
) -> BTreeMap<&'static str, u32> {
    let ids: Vec<InodeId> =
        (0..FILES).map(|i| fs.lookup(fs.root(), name(i).as_bytes()).unwrap().id).collect();
    let files: Vec<File> = (0..FILES)
        .map(|i| fs::OpenOptions::new().read(true).write(true).open(mount.join(name(i))).unwrap())
        .collect();
    let mut done = Vec::new();
    let mut count = BTreeMap::new();
    let mut last = None;
    for step in 0..steps {
        let sizes: Vec<u64> = ids.iter().map(|id| fs.getattr(*id).unwrap().size).collect();
        let (i, op) = op(rng, &sizes, &mut last);
        done.push(match &op {
            Op::Write(at, data) => format!("f{i} of {}: write {at}+{}", sizes[i], data.len()),
            other => format!("f{i} of {}: {other:?}", sizes[i]),
        });
        let history = || done[done.len().saturating_sub(12)..].join("\n");
        let times = |fs: &Filesystem| {
            let a = fs.getattr(ids[i]).unwrap();
            (a.mtime, a.ctime)
        };
        let before = times(fs);
        let (ours, theirs) = (do_here(fs, &ids, i, &op), do_there(mount, &files, i, &op));
        assert_eq!(ours, theirs, "step {step}:\n{}", history());
        *count
            .entry(match (&op, ours) {
                (Op::Clone(..), Ok(_)) => "cloned",
                (Op::Clone(..), Err(_)) => "not cloned",
                (Op::Dedupe(..), Ok(0)) => "nothing to deduplicate",
                (Op::Dedupe(..), Ok(u64::MAX)) => "differs",
                (Op::Dedupe(..), Ok(_)) => "deduplicated",
                (Op::Dedupe(..), Err(_)) => "not deduplicated",
                _ => "other",
            })
            .or_default() += 1;
        match (&op, ours) {
            (Op::Dedupe(..), _) => assert_eq!(times(fs), before, "{}", history()),
            (Op::Clone(from, from_at, _, len), Ok(_)) if *len > 0 || *from_at < sizes[*from] => {
                assert_ne!(times(fs), before, "{}", history());
            }
            _ => {}
        }
        if step % 8 == 7 || step + 1 == steps {
            for (i, id) in ids.iter().enumerate() {
                let (ours, theirs) = (read_here(fs, *id), fs::read(mount.join(name(i))).unwrap());
                let differ = ours.iter().zip(&theirs).position(|(a, b)| a != b);
                assert_eq!(
                    (ours.len(), differ),
                    (theirs.len(), None),
                    "f{i}, step {step}:\n{}",
                    history()
                );
            }
        }
    }
    count
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved2: [u32; 3],
}
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [FiemapExtent; 512],
}
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
const UNWRITTEN: u32 = 0x800;
const INLINE: u32 = 0x200;
const ENCODED: u32 = 0x8;
const SHARED: u32 = 0x2000;

fn fiemap(file: &File) -> Vec<FiemapExtent> {
    let mut map = Fiemap {
        start: 0,
        length: u64::MAX,
        flags: 1,
        mapped: 0,
        count: 512,
        reserved: 0,
        extents: [FiemapExtent::default(); 512],
    };
    // SAFETY: the structure is what FIEMAP takes, with room for as many extents as it says, and
    // outlives the call.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) }, 0);
    assert!(map.mapped < map.count);
    map.extents[..map.mapped as usize].to_vec()
}

/// A sector: file and number.
type Sector = (usize, u64);

/// What lies where in all files of an image.
#[derive(Default)]
struct Layout {
    /// Pairs of sectors that lie at one place of the device, both preallocated or neither. Extents
    /// that are compressed count by where they begin.
    pairs: BTreeSet<(Sector, Sector)>,
    /// Sectors that are in an extent of any kind.
    there: BTreeSet<Sector>,
    /// Those that were written, in a file or in its leaf, with nothing but zeros.
    zeros: BTreeSet<Sector>,
}

fn layout(mount: &Path) -> Layout {
    let mut out = Layout::default();
    let mut at: BTreeMap<(u64, bool), Vec<Sector>> = BTreeMap::new();
    for i in 0..FILES {
        let file = File::open(mount.join(name(i))).unwrap();
        for e in fiemap(&file) {
            for n in 0..e.length.div_ceil(SECTOR) {
                let sector = (i, e.logical / SECTOR + n);
                out.there.insert(sector);
                let mut bytes = [0; SECTOR as usize];
                let len = file.read_at(&mut bytes, sector.1 * SECTOR).unwrap();
                if e.flags & UNWRITTEN == 0 && bytes[..len].iter().all(|b| *b == 0) {
                    out.zeros.insert(sector);
                }
                if e.flags & INLINE == 0 {
                    let place =
                        if e.flags & ENCODED != 0 { e.physical } else { e.physical + n * SECTOR };
                    at.entry((place, e.flags & UNWRITTEN != 0)).or_default().push(sector);
                }
            }
        }
    }
    for sectors in at.values() {
        for (k, a) in sectors.iter().enumerate() {
            out.pairs.extend(sectors[k + 1..].iter().map(|b| (*a.min(b), *a.max(b))));
        }
    }
    out
}

fn layout_of(image: &Path) -> Layout {
    let mount = KernelMount::image_read_only(image, "").unwrap();
    let layout = layout(mount.path());
    mount.unmount_clean().unwrap();
    layout
}

fn seed() -> u64 {
    std::env::var("LARDER_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn copy_of(image: &Path) -> PathBuf {
    let copy = image.with_extension("copy");
    oracle::copy_image(image, &copy).unwrap();
    copy
}

struct Variant<'a> {
    options: MkfsOptions,
    linux: &'a [&'a str],
    mount: &'a str,
    compress: Option<Compress>,
}

fn beside_linux(v: &Variant<'_>, seed: u64, steps: u32) {
    if !oracle::need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let (mut ours, mut theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    mkfs(&FileDevice::create(&ours, 512 << 20).unwrap(), &v.options).unwrap();
    mkfs_btrfs(&theirs, 512 << 20, v.linux).unwrap();
    let mut rng = SmallRng::seed_from_u64(seed);
    for half in 0..2 {
        let fs = open(&ours, v.compress);
        let mount = KernelMount::image(&theirs, v.mount).unwrap();
        if half == 0 {
            for i in 0..FILES {
                create(&fs, i);
                File::create(mount.join(name(i))).unwrap();
            }
            let there = mount.join(name(NOCOW));
            assert!(
                std::process::Command::new("chattr")
                    .arg("+C")
                    .arg(there)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        let count = run(&fs, &mount, &mut rng, steps);
        println!("{count:?}");
        assert!(count.get("cloned").is_some_and(|n| *n > steps / 20), "{count:?}");
        assert!(
            count.contains_key("deduplicated") && count.contains_key("not cloned"),
            "{count:?}"
        );
        fs.close().unwrap();
        drop(fs);
        mount.unmount_clean().unwrap();
        for image in [&ours, &theirs] {
            btrfs_check(image, true).assert_clean(&format!("after half {half}"));
        }
        // What is compressed, and where pieces are cut, is up to either.
        if v.compress.is_none() {
            let (here, there) = (layout_of(&ours), layout_of(&theirs));
            // Where a file ends within a hole and grows Linux writes a sector of zeros, which
            // clones then share; here it stays a hole, and so do its clones.
            let is_hole_here = |s: &Sector| there.zeros.contains(s) && !here.there.contains(s);
            let holes = |pair: &&(Sector, Sector)| is_hole_here(&pair.0) && is_hole_here(&pair.1);
            let lost: Vec<_> =
                there.pairs.difference(&here.pairs).filter(|pair| !holes(pair)).collect();
            let more: Vec<_> = here.pairs.difference(&there.pairs).collect();
            let there = &there.pairs;
            println!(
                "{} pairs of sectors are shared; only on Linux {lost:?}, only here {more:?}",
                there.len()
            );
            // Linux writes the last sector anew when a file grows; the engine only where it has to.
            assert!(lost.is_empty(), "shared on Linux only: {lost:?} of {}", there.len());
            assert!(
                more.len() <= there.len() / 4 + 4,
                "shared here only: {more:?} of {}",
                there.len()
            );
        }
        // Each goes on with the other's image; copies, because a loop device may be let go of a
        // moment late.
        (ours, theirs) = (copy_of(&theirs), copy_of(&ours));
    }
}

#[test]
fn the_same_clones_show_the_same() {
    let plain =
        Variant { options: MkfsOptions::default(), linux: &[], mount: "noatime", compress: None };
    for n in 0..3 {
        beside_linux(&plain, seed() + n, 400);
    }
}

#[test]
fn the_same_clones_show_the_same_where_holes_have_items() {
    let features = Features { no_holes: false, block_group_tree: false, ..Features::default() };
    let variant = Variant {
        options: MkfsOptions { features, ..MkfsOptions::default() },
        linux: &["-O", "^no-holes,^block-group-tree"],
        mount: "noatime",
        compress: None,
    };
    beside_linux(&variant, seed() + 100, 400);
}

#[test]
fn the_same_clones_of_compressed_files_show_the_same() {
    let variant = Variant {
        options: MkfsOptions::default(),
        linux: &[],
        mount: "noatime,compress=zstd",
        compress: Packing::new(Compression::Zstd, None)
            .map(|packing| Compress { packing, force: false }),
    };
    beside_linux(&variant, seed() + 200, 400);
}

/// Why the comparison passes over some sectors of zeros: a file ended within a hole, and grew by a
/// clone. Where a file is cut its last sector stays shared, here as there.
#[test]
fn last_sectors_that_linux_treats_otherwise() {
    if !oracle::need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    mkfs(&FileDevice::create(&ours, 512 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    mkfs_btrfs::<&str>(&theirs, 512 << 20, &[]).unwrap();
    let bytes: Vec<u8> = (0..4 * SECTOR).map(|n| (n % 251) as u8 + 1).collect();
    let ops = [
        (0, Op::Write(0, bytes.clone())),
        (1, Op::Write(0, bytes)),
        (1, Op::Truncate(10 * SECTOR + 500)),
        (1, Op::Clone(0, 0, 12 * SECTOR, 4 * SECTOR)),
        (2, Op::Clone(1, 0, 0, 16 * SECTOR)),
        (3, Op::Clone(0, 0, 0, 4 * SECTOR)),
    ];
    let fs = open(&ours, None);
    let ids: Vec<InodeId> = (0..FILES).map(|i| create(&fs, i)).collect();
    let mount = KernelMount::image(&theirs, "noatime").unwrap();
    let files: Vec<File> =
        (0..FILES).map(|i| File::create_new(mount.join(name(i))).unwrap()).collect();
    drop(files);
    let files: Vec<File> = (0..FILES)
        .map(|i| fs::OpenOptions::new().read(true).write(true).open(mount.join(name(i))).unwrap())
        .collect();
    for (i, op) in &ops {
        assert_eq!(do_here(&fs, &ids, *i, op), Ok(0));
        assert_eq!(do_there(&mount, &files, *i, op), Ok(0));
    }
    let cut = 3 * SECTOR + 100;
    assert_eq!(do_here(&fs, &ids, 3, &Op::Truncate(cut)), Ok(0));
    files[3].set_len(cut).unwrap();
    for (i, id) in ids.iter().enumerate().take(4) {
        assert!(read_here(&fs, *id) == fs::read(mount.join(name(i))).unwrap());
    }
    drop(files);
    mount.unmount_clean().unwrap();
    fs.close().unwrap();
    drop(fs);
    let (here, there) = (layout_of(&ours), layout_of(&theirs));
    let sectors = [(1, 10), (2, 10)];
    assert!(sectors.iter().all(|s| there.zeros.contains(s) && !here.there.contains(s)));
    let pairs: Vec<_> = there.pairs.difference(&here.pairs).copied().collect();
    assert_eq!(pairs, [(sectors[0], sectors[1])]);
    let of_the_cut = [((0, 3), (3, 3)), ((1, 15), (3, 3)), ((2, 15), (3, 3))];
    assert!(of_the_cut.iter().all(|pair| here.pairs.contains(pair)));
    assert!(here.pairs.is_subset(&there.pairs) && here.pairs.len() >= 12);
}

/// From a read-only subvolume into one, within one, and out of one.
#[test]
fn read_only_subvolumes_are_deduplicated_as_on_linux() {
    if !oracle::need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    // Which subvolume and file, and into which: what may be shared and is the same; what differs;
    // what may not.
    type Name<'a> = (&'a str, &'a str);
    const ORDER: [(Name<'_>, Name<'_>); 5] = [
        (("S", "a"), ("R", "b")),
        (("R", "c"), ("S", "d")),
        (("R", "c"), ("R", "d")),
        (("R", "a"), ("R", "c")),
        (("R", "a"), ("S", "e")),
    ];
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    mkfs(&FileDevice::create(&ours, 512 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    mkfs_btrfs::<&str>(&theirs, 512 << 20, &[]).unwrap();
    let len = 16 * SECTOR;
    let bytes = |n: u8| (0..len).map(|i| (i % 249) as u8 ^ n).collect::<Vec<u8>>();
    let files =
        [("a", bytes(1)), ("b", bytes(1)), ("c", bytes(2)), ("d", bytes(2)), ("e", Vec::new())];

    let fs = open(&ours, None);
    let new =
        |kind| NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] };
    let top = fs.create_subvolume(fs.root(), b"S", &new(FileKind::Directory)).unwrap().id;
    let mount = KernelMount::image(&theirs, "noatime").unwrap();
    let subvolume = |args: &[&str]| oracle::btrfs(&[&["subvolume"], args].concat()).unwrap();
    let path = |name: &str| mount.join(name).to_str().unwrap().to_owned();
    subvolume(&["create", &path("S")]);
    for (name, data) in &files {
        let id = fs.create(top, name.as_bytes(), &new(FileKind::Regular)).unwrap().id;
        fs.write(id, 0, data).unwrap();
        fs::write(mount.join("S").join(name), data).unwrap();
    }
    fs.snapshot(top.subvol, fs.root(), b"R", true).unwrap();
    subvolume(&["snapshot", "-r", &path("S"), &path("R")]);
    let here = |(subvol, name): (&str, &str)| {
        let top = fs.lookup(fs.root(), subvol.as_bytes()).unwrap().id;
        fs.lookup(top, name.as_bytes()).unwrap().id
    };
    let there = |(subvol, name): (&str, &str)| File::open(mount.join(subvol).join(name)).unwrap();
    let times = |id| fs.getattr(id).map(|a| (a.mtime, a.ctime)).unwrap();
    for (from, to) in ORDER {
        let before = times(here(to));
        let answer = match fs.dedupe_range(here(from).at(0), here(to).at(0), len) {
            Ok(Deduped::Same { bytes, .. }) => Ok(bytes),
            Ok(Deduped::Differs) => Ok(u64::MAX),
            Err(e) => Err(errno(&e)),
        };
        assert_eq!(answer, dedupe_there(&there(from), 0..len, &there(to), 0), "{from:?} {to:?}");
        assert_eq!(times(here(to)), before);
    }
    // A clone is a change: Linux does not even open the target for that.
    assert!(matches!(
        fs.clone_range(here(("S", "a")).at(0), here(("R", "e")).at(0), 0),
        Err(Error::SubvolumeReadOnly)
    ));
    let refused = fs::OpenOptions::new().write(true).open(mount.join("R/e")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    let target = fs::OpenOptions::new().write(true).open(mount.join("S/e")).unwrap();
    assert_eq!(clone_there(&there(("R", "d")), 0..0, &target, 0), Ok(0));
    fs.clone_range(here(("R", "d")).at(0), here(("S", "e")).at(0), 0).unwrap();
    drop(target);
    mount.unmount_clean().unwrap();
    fs.close().unwrap();
    drop(fs);
    let names = files.map(|(name, _)| name);
    assert_eq!(files_that_share(&ours, &names), files_that_share(&theirs, &names));
}

/// The sets of files of `S` and `R` that have a place on the device in common.
fn files_that_share(image: &Path, names: &[&str]) -> BTreeSet<Vec<String>> {
    btrfs_check(image, true).assert_clean("after deduplicating");
    let mount = KernelMount::image_read_only(image, "").unwrap();
    let mut places: Vec<(u64, String)> = Vec::new();
    for subvol in ["S", "R"] {
        for name in names {
            let file = File::open(mount.join(subvol).join(name)).unwrap();
            places.extend(fiemap(&file).iter().map(|e| (e.physical, format!("{subvol}/{name}"))));
        }
    }
    mount.unmount_clean().unwrap();
    let with = |at: u64| places.iter().filter(|p| p.0 == at).map(|p| p.1.clone()).collect();
    places.iter().map(|p| with(p.0)).collect()
}

/// The source's extents are marked as shared in the kernel's eyes, and deleting either side leaves
/// the other.
#[test]
fn what_was_cloned_here_linux_sees_as_shared() {
    if !oracle::need(&[Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("img");
    mkfs(&FileDevice::create(&image, 512 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = open(&image, None);
    let ids: Vec<InodeId> = (0..FILES).map(|i| create(&fs, i)).collect();
    let data: Vec<u8> = (0..5_000_000u32).map(|n| (n / 7 % 251) as u8).collect();
    fs.write(ids[0], 0, &data).unwrap();
    let used = |fs: &Filesystem| fs.statfs().unwrap().free;
    fs.sync().unwrap();
    let before = used(&fs);
    // Whole, by copying: data that was synced, and data of the running transaction.
    assert_eq!(
        fs.copy_range(ids[0].at(0), ids[1].at(0), u64::MAX >> 1).unwrap(),
        data.len() as u64
    );
    // Unaligned at both ends: whole sectors in between.
    assert_eq!(fs.copy_range(ids[0].at(100), ids[2].at(4196), 999_900).unwrap(), 999_900);
    fs.sync().unwrap();
    assert!(before - used(&fs) < 64 << 10, "{}", before - used(&fs));
    fs.unlink(fs.root(), b"f0").unwrap();
    fs.close().unwrap();
    drop(fs);
    btrfs_check(&image, true).assert_clean("after cloning");
    let mount = KernelMount::image(&image, "noatime").unwrap();
    assert!(fs::read(mount.join("f1")).unwrap() == data);
    let part = fs::read(mount.join("f2")).unwrap();
    assert!(part[..4196].iter().all(|b| *b == 0) && part[4196..] == data[100..1_000_000]);
    let shared =
        |i| fiemap(&File::open(mount.join(name(i))).unwrap()).iter().any(|e| e.flags & SHARED != 0);
    assert!(shared(1) && shared(2));
    fs::remove_file(mount.join("f1")).unwrap();
    mount.sync().unwrap();
    assert!(!shared(2) && fs::read(mount.join("f2")).unwrap() == part);
    mount.unmount_clean().unwrap();
    btrfs_check(&image, true).assert_clean("after Linux deleted one side");
}
