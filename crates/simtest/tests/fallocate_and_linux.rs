//! Reserving, punching and zeroing beside the kernel: the same random operations on a btrfs of
//! Linux and on one of the engine, then bytes, sizes, allocated blocks and the map of data and
//! holes compared. Each goes on with the other's image, and `btrfs check` finds nothing in either.

use larder_fs::mkfs::{Features, MkfsOptions, mkfs};
use larder_fs::{
    Error, Fallocate, FileKind, Filesystem, InodeId, NewInode, OpenOptions, Seek, SetAttr,
};
use larder_simtest::oracle::{self, KernelMount, Need, btrfs, btrfs_check, mkfs_btrfs, scratch};
use larder_volume::{FileDevice, OpenMode};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{FallocateFlags, SeekFrom};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FILES: usize = 4;
/// The last of the files is not copied on write.
const NOCOW: usize = FILES - 1;
/// Offsets and sizes stay below.
const LIMIT: u64 = 200_000;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, Vec<u8>),
    Truncate(u64),
    Fallocate(Fallocate, u64, u64),
    Sync,
}

fn place(rng: &mut SmallRng) -> u64 {
    match rng.random_range(0..6u32) {
        0 | 1 => rng.random_range(0..30u64) * 4096,
        2 => rng.random_range(0..5000),
        3 => (rng.random_range(1..30u64) * 4096 + rng.random_range(0..9)).saturating_sub(4),
        _ => rng.random_range(0..LIMIT / 2),
    }
}

fn op(rng: &mut SmallRng) -> Op {
    let at = place(rng);
    let len = match rng.random_range(0..4u32) {
        0 => rng.random_range(1..300),
        1 => rng.random_range(1..8u64) * 4096,
        _ => rng.random_range(1..LIMIT / 4),
    };
    let keep_size = rng.random_ratio(1, 2);
    match rng.random_range(0..20u32) {
        0..=6 => {
            let mut data = vec![0; len as usize];
            rng.fill(&mut data[..]);
            Op::Write(at, data)
        }
        7 | 8 => Op::Truncate(at),
        9..=11 => Op::Fallocate(Fallocate::Allocate { keep_size }, at, len),
        12..=14 => Op::Fallocate(Fallocate::Zero { keep_size }, at, len),
        15..=17 => Op::Fallocate(Fallocate::Punch, at, len),
        _ => Op::Sync,
    }
}

fn open(image: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
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

fn do_here(fs: &Filesystem, id: InodeId, op: &Op) {
    match op {
        Op::Write(at, data) => fs.write(id, *at, data).unwrap(),
        Op::Truncate(size) => {
            fs.setattr(id, &SetAttr { size: Some(*size), ..SetAttr::default() }).unwrap();
        }
        Op::Fallocate(how, at, len) => fs.fallocate(id.at(*at), *len, *how).unwrap(),
        Op::Sync => fs.sync().unwrap(),
    }
}

fn do_there(mount: &KernelMount, file: &File, op: &Op) {
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
        Op::Sync => mount.sync().unwrap(),
    }
}

/// Everything of a file that is compared.
struct Seen {
    bytes: Vec<u8>,
    blocks: u64,
    map: Vec<(u64, u64)>,
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, {} blocks, data {:?}", self.bytes.len(), self.blocks, self.map)
    }
}

impl Seen {
    /// Is this what Linux shows? It writes a sector of zeros where the file ends within a hole and
    /// then grows; the engine leaves a hole. Up to `spare` sectors may be data on one side, and
    /// allocated, only.
    fn is_as(&self, theirs: &Self, spare: u64) -> bool {
        let data = |s: &Self, at: usize| s.map.iter().any(|(a, b)| (*a..*b).contains(&(at as u64)));
        let sectors = (0..self.bytes.len()).step_by(4096);
        let differ: Vec<usize> =
            sectors.filter(|at| data(self, *at) != data(theirs, *at)).collect();
        let zero =
            |at: &usize| self.bytes[*at..self.bytes.len().min(at + 4096)].iter().all(|b| *b == 0);
        let count = differ.len() as u64;
        // The borders, too, not only the sectors.
        let exact = count > 0 || self.map == theirs.map;
        let blocks = self.blocks.abs_diff(theirs.blocks) <= count * 8;
        self.bytes == theirs.bytes && exact && count <= spare && differ.iter().all(zero) && blocks
    }
}

fn map(mut seek: impl FnMut(u64, Seek) -> Option<u64>) -> Vec<(u64, u64)> {
    let (mut out, mut at) = (Vec::new(), 0);
    while let Some(data) = seek(at, Seek::Data) {
        let hole = seek(data, Seek::Hole).expect("the end of the file is a hole");
        out.push((data, hole));
        at = hole;
    }
    out
}

fn seen_here(fs: &Filesystem, id: InodeId) -> Seen {
    let attr = fs.getattr(id).unwrap();
    let mut bytes = vec![0xaa; attr.size as usize];
    assert_eq!(fs.read(id, 0, &mut bytes).unwrap() as u64, attr.size);
    Seen { bytes, blocks: attr.bytes / 512, map: map(|at, what| fs.seek(id, at, what).unwrap()) }
}

fn seen_there(path: &Path) -> Seen {
    let file = File::open(path).unwrap();
    let seek = |at, what| {
        let from = match what {
            Seek::Data => SeekFrom::Data(at),
            Seek::Hole => SeekFrom::Hole(at),
        };
        rustix::fs::seek(&file, from).ok()
    };
    Seen {
        bytes: fs::read(path).unwrap(),
        blocks: file.metadata().unwrap().blocks(),
        map: map(seek),
    }
}

/// Runs one sequence of operations on both, and compares now and then.
fn run(fs: &Filesystem, mount: &KernelMount, rng: &mut SmallRng, steps: u32, spare: u64) {
    let ids: Vec<InodeId> =
        (0..FILES).map(|i| fs.lookup(fs.root(), name(i).as_bytes()).unwrap().id).collect();
    let mut done = vec![Vec::new(); FILES];
    for step in 0..steps {
        let i = rng.random_range(0..FILES);
        let op = op(rng);
        let file = fs::OpenOptions::new().read(true).write(true).open(mount.join(name(i))).unwrap();
        do_here(fs, ids[i], &op);
        do_there(mount, &file, &op);
        done[i].push(match &op {
            Op::Write(at, data) => format!("write {at}+{}", data.len()),
            other => format!("{other:?}"),
        });
        if step % 10 == 9 {
            fs.sync().unwrap();
            mount.sync().unwrap();
            for i in 0..FILES {
                let (ours, theirs) = (seen_here(fs, ids[i]), seen_there(&mount.join(name(i))));
                let same = ours.bytes == theirs.bytes;
                assert!(
                    ours.is_as(&theirs, spare + u64::from(step / 20)),
                    "step {step}, f{i}: bytes equal: {same}\nhere  {ours:?}\nthere \
                        {theirs:?}\nafter {:#?}",
                    done[i]
                );
            }
            done.iter_mut().for_each(Vec::clear);
        }
    }
}

fn seed() -> u64 {
    std::env::var("LARDER_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn copy_of(image: &Path) -> PathBuf {
    let copy = image.with_extension("copy");
    oracle::copy_image(image, &copy).unwrap();
    copy
}

fn beside_linux(options: &MkfsOptions, linux: &[&str], mount_options: &str, seed: u64, steps: u32) {
    if !oracle::need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    mkfs(&FileDevice::create(&ours, 512 << 20).unwrap(), options).unwrap();
    mkfs_btrfs(&theirs, 512 << 20, linux).unwrap();
    let mut rng = SmallRng::seed_from_u64(seed);

    let fs = open(&ours);
    let mount = KernelMount::image(&theirs, mount_options).unwrap();
    for i in 0..FILES {
        create(&fs, i);
        File::create(mount.join(name(i))).unwrap();
    }
    let there = mount.join(name(NOCOW));
    assert!(std::process::Command::new("chattr").arg("+C").arg(there).status().unwrap().success());
    run(&fs, &mount, &mut rng, steps, 2);
    fs.close().unwrap();
    drop(fs);
    mount.unmount_clean().unwrap();
    for image in [&ours, &theirs] {
        btrfs_check(image, true).assert_clean("after one half");
    }
    // Each goes on with the other's image; copies, because a loop device may be let go of a moment
    // late.
    let (ours, theirs) = (copy_of(&theirs), copy_of(&ours));
    let fs = open(&ours);
    let mount = KernelMount::image(&theirs, mount_options).unwrap();
    run(&fs, &mount, &mut rng, steps, 2 + u64::from(steps / 20));
    fs.close().unwrap();
    drop(fs);
    mount.unmount_clean().unwrap();
    for image in [&ours, &theirs] {
        btrfs_check(image, true).assert_clean("after both halves");
    }
}

#[test]
fn the_same_operations_show_the_same() {
    beside_linux(&MkfsOptions::default(), &[], "noatime", seed(), 600);
}

#[test]
fn the_same_operations_show_the_same_where_holes_have_items() {
    let features = Features { no_holes: false, block_group_tree: false, ..Features::default() };
    let options = MkfsOptions { features, ..MkfsOptions::default() };
    beside_linux(&options, &["-O", "^no-holes,^block-group-tree"], "noatime", seed() + 100, 400);
}

/// Overwriting in place must not show in a snapshot, and preallocated space may be written in place
/// by one only.
#[test]
fn what_a_snapshot_of_linux_shares_is_copied() {
    if !oracle::need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("img");
    mkfs_btrfs::<&str>(&image, 256 << 20, &[]).unwrap();
    let mount = KernelMount::image(&image, "noatime").unwrap();
    let path = mount.join("f");
    fs::write(&path, "").unwrap();
    assert!(std::process::Command::new("chattr").arg("+C").arg(&path).status().unwrap().success());
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&vec![b'a'; 64 << 10], 0).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 64 << 10, 64 << 10).unwrap();
    drop(file);
    let (from, to) = (mount.path().to_str().unwrap().to_owned(), mount.join("snap"));
    btrfs(&["subvolume", "snapshot", &from, to.to_str().unwrap()]).unwrap();
    // A clone shares one extent with a file of the same subvolume.
    fs::write(mount.join("g"), "").unwrap();
    assert!(
        std::process::Command::new("chattr")
            .arg("+C")
            .arg(mount.join("g"))
            .status()
            .unwrap()
            .success()
    );
    let clone = std::process::Command::new("cp")
        .arg("--reflink=always")
        .arg(&path)
        .arg(mount.join("g"))
        .status();
    assert!(clone.unwrap().success());
    mount.unmount_clean().unwrap();

    let image = copy_of(&image);
    let fs = open(&image);
    let id = fs.lookup(fs.root(), b"f").unwrap().id;
    fs.write(id, 4096, &[b'b'; 8192]).unwrap();
    fs.write(id, 70_000, &[b'c'; 5000]).unwrap();
    fs.sync().unwrap();
    // These extents are the file's own: now it is overwritten in place.
    fs.write(id, 5000, &[b'd'; 100]).unwrap();
    fs.close().unwrap();
    drop(fs);
    btrfs_check(&image, true).assert_clean("after writing to what was shared");
    let mount = KernelMount::image_read_only(&image, "").unwrap();
    let mut old = vec![b'a'; 64 << 10];
    old.resize(128 << 10, 0);
    assert!(fs::read(mount.join("snap/f")).unwrap() == old, "the snapshot has changed");
    assert!(fs::read(mount.join("g")).unwrap() == old, "the clone has changed");
    let mut new = old;
    new[4096..12288].fill(b'b');
    new[70_000..75_000].fill(b'c');
    new[5000..5100].fill(b'd');
    assert!(fs::read(mount.join("f")).unwrap() == new);
    mount.unmount_clean().unwrap();
}

/// Where the sectors of a file lie on the device, as `btrfs check`'s sister shows it.
fn places(image: &Path) -> Vec<String> {
    let dump = oracle::dump_tree(image, &["-t", "5"]).unwrap();
    dump.lines().filter(|l| l.contains("disk byte")).map(|l| l.trim().to_owned()).collect()
}

#[test]
fn writes_go_where_they_were_reserved_and_over_what_is_not_copied() {
    let dir = scratch();
    let image = dir.path().join("img");
    mkfs(&FileDevice::create(&image, 256 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = open(&image);
    let reserved = create(&fs, 0);
    fs.fallocate(reserved.at(0), 1 << 20, Fallocate::Allocate { keep_size: false }).unwrap();
    let plain = create(&fs, NOCOW);
    fs.write(plain, 0, &[1; 100_000]).unwrap();
    fs.sync().unwrap();
    let before = (fs.getattr(reserved).unwrap().bytes, fs.statfs().unwrap().free);
    for at in (0..1 << 20).step_by(3 << 16) {
        fs.write(reserved, at, &[2; 50_000]).unwrap();
        fs.sync().unwrap();
    }
    for at in [0, 4096, 70_000] {
        fs.write(plain, at, &[3; 10_000]).unwrap();
        fs.sync().unwrap();
    }
    let after = (fs.getattr(reserved).unwrap().bytes, fs.statfs().unwrap().free);
    assert_eq!(before, after, "no data space was taken");
    fs.close().unwrap();
    drop(fs);
    if oracle::need(&[Need::BtrfsProgs]) {
        btrfs_check(&image, true).assert_clean("after writing in place");
        let extents: std::collections::BTreeSet<String> = places(&image)
            .iter()
            .map(|l| l.split("disk byte").nth(1).unwrap().to_owned())
            .collect();
        assert_eq!(extents.len(), 2, "one extent each: {extents:?}");
    }
}

#[test]
fn reserved_space_is_there_when_the_disk_is_full() {
    let dir = scratch();
    let image = dir.path().join("img");
    mkfs(&FileDevice::create(&image, 256 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = open(&image);
    let reserved = create(&fs, 0);
    let keep_size = false;
    fs.fallocate(reserved.at(0), 8 << 20, Fallocate::Allocate { keep_size }).unwrap();
    let plain = create(&fs, NOCOW);
    fs.write(plain, 0, &[1; 1 << 20]).unwrap();
    fs.sync().unwrap();
    let filler = create(&fs, 1);
    let mut at = 0;
    let mut unit = 1 << 20;
    while unit >= 4096 {
        match fs.write(filler, at, &vec![9; unit]) {
            Ok(()) => at += unit as u64,
            Err(Error::NoSpace) => unit /= 4,
            Err(e) => panic!("{e}"),
        }
    }
    fs.sync().unwrap();
    let refused =
        fs.fallocate(filler.at(at), 8 << 20, Fallocate::Allocate { keep_size }).unwrap_err();
    assert!(matches!(refused, Error::NoSpace), "{refused}");
    assert_eq!(fs.getattr(filler).unwrap().size, at, "nothing has changed");
    for block in 0..16u64 {
        fs.write(reserved, block << 19, &[b'r'; 1 << 19]).unwrap();
    }
    fs.write(plain, 1000, &[b'p'; 500_000]).unwrap();
    fs.sync().unwrap();
    fs.close().unwrap();
    drop(fs);
    let fs = open(&image);
    let find = |i| fs.lookup(fs.root(), name(i).as_bytes()).unwrap().id;
    let mut buf = vec![0; 8 << 20];
    assert_eq!(fs.read(find(0), 0, &mut buf).unwrap(), 8 << 20);
    assert!(buf.iter().all(|b| *b == b'r'));
    assert_eq!(fs.read(find(NOCOW), 0, &mut buf).unwrap(), 1 << 20);
    assert!(buf[1000..501_000].iter().all(|b| *b == b'p') && buf[501_000] == 1);
    fs.close().unwrap();
    drop(fs);
    if oracle::need(&[Need::BtrfsProgs]) {
        btrfs_check(&image, true).assert_clean("after filling reserved space on a full disk");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let dir = scratch();
    let image = dir.path().join("img");
    mkfs(&FileDevice::create(&image, 256 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    let fs = open(&image);
    let id = create(&fs, 0);
    let grow = Fallocate::Allocate { keep_size: false };
    assert!(matches!(fs.fallocate(id.at(0), 0, grow), Err(Error::Invalid(_))));
    assert!(matches!(fs.fallocate(id.at(i64::MAX as u64), 1, grow), Err(Error::FileTooBig)));
    assert!(matches!(fs.fallocate(id.at(u64::MAX), u64::MAX, grow), Err(Error::FileTooBig)));
    assert!(matches!(fs.fallocate(id.at(0), i64::MAX as u64, grow), Err(Error::NoSpace)));
    assert!(matches!(fs.fallocate(fs.root().at(0), 1, grow), Err(Error::IsDirectory)));
    assert_eq!(fs.getattr(id).unwrap().size, 0);
    fs.fallocate(id.at(4097), i64::MAX as u64 - 5000, Fallocate::Punch).unwrap();
    let append = larder_format::items::InodeFlags::APPEND.bits();
    fs.setattr(id, &SetAttr { flags: Some(append), ..SetAttr::default() }).unwrap();
    assert!(matches!(fs.fallocate(id.at(0), 1, Fallocate::Punch), Err(Error::NotPermitted(_))));
    fs.fallocate(id.at(0), 1, Fallocate::Allocate { keep_size: true }).unwrap();
    fs.close().unwrap();
}
