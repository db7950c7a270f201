//! File data against a model of plain bytes: random writes, truncations, copies and look-ups of
//! holes, with write-back, commits and reopening in between; then `btrfs check` goes over all of
//! it, and the kernel reads the same bytes.

use larder_format::Physical;
use larder_fs::mkfs::{Features, MkfsOptions, mkfs};
use larder_fs::{
    Fallocate, FileKind, Filesystem, InodeId, MappedExtent, NewInode, OpenOptions, Seek, SetAttr,
};
use larder_simtest::oracle::{self, KernelMount, Need, btrfs_check, scratch};
use larder_volume::{Device, FileDevice, OpenMode};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const FILES: usize = 6;

fn open(image: &Path, cache_size: u64) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, cache_size, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn make(image: &Path, size: u64, options: &MkfsOptions) {
    mkfs(&FileDevice::create(image, size).unwrap(), options).unwrap();
}

fn create(fs: &Filesystem, name: &str) -> InodeId {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] };
    fs.create(fs.root(), name.as_bytes(), &new).unwrap().id
}

fn find(fs: &Filesystem, name: &str) -> InodeId {
    fs.lookup(fs.root(), name.as_bytes()).unwrap().id
}

fn read_all(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let size = fs.getattr(id).unwrap().size;
    let mut buf = vec![0xaa; usize::try_from(size).unwrap() + 100];
    let n = fs.read(id, 0, &mut buf).unwrap();
    assert_eq!(n as u64, size);
    buf.truncate(n);
    buf
}

/// A size or offset: small ones, sector borders, window borders and large ones.
fn place(rng: &mut SmallRng) -> usize {
    let near = |rng: &mut SmallRng, at: usize| (at + rng.random_range(0..20)).saturating_sub(10);
    match rng.random_range(0..10u32) {
        0..=2 => rng.random_range(0..3000),
        3..=5 => {
            let sector = rng.random_range(0..40usize) * 4096;
            near(rng, sector)
        }
        6 => near(rng, 1 << 20),
        7 => near(rng, 2048),
        _ => rng.random_range(0..3 << 20),
    }
}

fn length(rng: &mut SmallRng) -> usize {
    match rng.random_range(0..10u32) {
        0..=3 => rng.random_range(1..200),
        4..=6 => rng.random_range(1..20_000),
        7 => 4096 * rng.random_range(1..20usize),
        _ => rng.random_range(1..700_000),
    }
}

fn set_size(fs: &Filesystem, id: InodeId, size: u64) {
    fs.setattr(id, &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
}

/// Every byte that is not zero lies in data, and data and holes alternate up to the end.
fn check_holes(fs: &Filesystem, id: InodeId, want: &[u8]) {
    let mut at = 0u64;
    while at < want.len() as u64 {
        let data = fs.seek(id, at, Seek::Data).unwrap();
        let from = data.unwrap_or(want.len() as u64);
        assert!(want[at as usize..from as usize].iter().all(|b| *b == 0), "a hole has bytes");
        let Some(data) = data else { break };
        let hole = fs.seek(id, data, Seek::Hole).unwrap().expect("the end of the file is a hole");
        assert!(hole > data);
        at = hole;
    }
    assert_eq!(fs.seek(id, want.len() as u64, Seek::Data).unwrap(), None);
}

/// Copies a part of file `i` from `at` on to a random place; a copy onto itself is refused.
fn copy_part(
    rng: &mut SmallRng,
    fs: &Filesystem,
    ids: &[InodeId],
    (i, at): (usize, usize),
    model: &mut [Vec<u8>],
) {
    let to = rng.random_range(0..FILES);
    let (len, to_at) = (length(rng), place(rng));
    let from = model[i].clone();
    let n = len.min(from.len().saturating_sub(at));
    let done = fs.copy_range(ids[i].at(at as u64), ids[to].at(to_at as u64), n as u64);
    if to == i && n > 0 && at < to_at + n && to_at < at + n {
        let refused = done.unwrap_err();
        assert!(matches!(refused, larder_fs::Error::Invalid(_)), "{refused}");
        return;
    }
    assert_eq!(done.unwrap(), n as u64);
    if n > 0 {
        let len = model[to].len().max(to_at + n);
        model[to].resize(len, 0);
        model[to][to_at..to_at + n].copy_from_slice(&from[at..at + n]);
    }
}

fn torture(
    image: &Path,
    options: &MkfsOptions,
    seed: u64,
    steps: u32,
) -> BTreeMap<String, Vec<u8>> {
    make(image, 1 << 30, options);
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut fs = open(image, 16 << 20);
    let names: Vec<String> = (0..FILES).map(|i| format!("f{i}")).collect();
    let mut ids: Vec<InodeId> = names.iter().map(|n| create(&fs, n)).collect();
    let mut model = vec![Vec::<u8>::new(); FILES];
    for step in 0..steps {
        let i = rng.random_range(0..FILES);
        let (id, want) = (ids[i], &mut model[i]);
        let at = place(&mut rng);
        match rng.random_range(0..20u32) {
            0..=8 => {
                let mut data = vec![0; length(&mut rng)];
                rng.fill(&mut data[..]);
                fs.write(id, at as u64, &data).unwrap();
                want.resize(want.len().max(at + data.len()), 0);
                want[at..at + data.len()].copy_from_slice(&data);
            }
            9..=11 => {
                set_size(&fs, id, at as u64);
                want.resize(at, 0);
            }
            12 => {
                set_size(&fs, id, 0);
                want.clear();
            }
            13 => copy_part(&mut rng, &fs, &ids, (i, at), &mut model),
            14 => fs.fsync(id, true).unwrap(),
            15 if rng.random_ratio(1, 3) => fs.sync().unwrap(),
            16 if rng.random_ratio(1, 6) => {
                fs.close().unwrap();
                drop(fs);
                fs = open(image, 16 << 20);
                ids = names.iter().map(|n| find(&fs, n)).collect();
            }
            17 => check_holes(&fs, id, want),
            _ => {
                let mut buf = vec![0xaa; length(&mut rng)];
                let n = fs.read(id, at as u64, &mut buf).unwrap();
                assert_eq!(n, buf.len().min(want.len().saturating_sub(at)), "step {step}");
                assert!(
                    n == 0 || buf[..n] == want[at..at + n],
                    "step {step}: file {i} reads wrong at {at}+{n}"
                );
            }
        }
        assert_eq!(fs.getattr(ids[i]).unwrap().size, model[i].len() as u64, "step {step}");
    }
    for (id, want) in ids.iter().zip(&model) {
        assert!(read_all(&fs, *id) == *want);
    }
    fs.close().unwrap();
    drop(fs);
    let fs = open(image, 16 << 20);
    for (name, want) in names.iter().zip(&model) {
        assert!(read_all(&fs, find(&fs, name)) == *want, "{name} after reopening");
    }
    fs.close().unwrap();
    names.into_iter().zip(model).collect()
}

fn judge(image: &Path, files: &BTreeMap<String, Vec<u8>>) {
    if oracle::need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean("after random changes");
    }
    if oracle::need(&[Need::KernelBtrfs]) {
        let mount = KernelMount::image_read_only(image, "").unwrap();
        for (name, want) in files {
            assert!(
                std::fs::read(mount.join(name)).unwrap() == *want,
                "the kernel reads {name} otherwise"
            );
        }
        mount.unmount_clean().unwrap();
    }
}

fn seed() -> u64 {
    std::env::var("LARDER_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

#[test]
fn bytes_match_a_model() {
    let dir = scratch();
    let image = dir.path().join("img");
    let files = torture(&image, &MkfsOptions::default(), seed(), 1500);
    judge(&image, &files);
}

#[test]
fn bytes_match_a_model_where_holes_have_items() {
    let dir = scratch();
    let image = dir.path().join("img");
    let features = Features { no_holes: false, block_group_tree: false, ..Features::default() };
    let options = MkfsOptions { features, ..MkfsOptions::default() };
    let files = torture(&image, &options, seed() + 1000, 800);
    judge(&image, &files);
}

#[test]
fn bytes_match_a_model_in_mixed_groups_and_small_nodes() {
    let dir = scratch();
    let image = dir.path().join("img");
    let features = Features { mixed: true, ..Features::default() };
    let options =
        MkfsOptions { features, csum: larder_format::CsumType::Blake2b, ..MkfsOptions::default() };
    let files = torture(&image, &options, seed() + 2000, 800);
    judge(&image, &files);
}

/// What byte `at` of a block says that was written by thread `who` in its round `round`.
fn stamp(who: usize, round: usize, block: usize) -> u8 {
    (who * 67 + round * 13 + block * 7) as u8 | 1
}

#[test]
fn threads_write_one_file_and_their_own_while_others_sync() {
    const THREADS: usize = 6;
    const BLOCK: usize = 10_000;
    const BLOCKS: usize = 40;
    let dir = scratch();
    let image = dir.path().join("img");
    make(&image, 1 << 30, &MkfsOptions::default());
    let fs = open(&image, 8 << 20);
    let shared = create(&fs, "shared");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let writers: Vec<_> = (0..THREADS)
            .map(|who| {
                let fs = &fs;
                s.spawn(move || {
                    let own = create(fs, &format!("own{who}"));
                    let mut rng = SmallRng::seed_from_u64(who as u64);
                    let mut last = [0u8; BLOCKS];
                    for round in 0..12 {
                        for block in 0..BLOCKS {
                            let value = stamp(who, round, block);
                            let data = vec![value; BLOCK];
                            let at = ((block * THREADS + who) * BLOCK) as u64;
                            fs.write(shared, at, &data).unwrap();
                            last[block] = value;
                            fs.write(own, (block * BLOCK) as u64, &data).unwrap();
                            let check = rng.random_range(0..=block);
                            let mut back = vec![0; BLOCK];
                            let at = ((check * THREADS + who) * BLOCK) as u64;
                            assert_eq!(fs.read(shared, at, &mut back).unwrap(), BLOCK);
                            assert!(
                                back.iter().all(|b| *b == last[check]),
                                "block {check} of {who}"
                            );
                            if rng.random_ratio(1, 60) {
                                fs.fsync(if round % 2 == 0 { own } else { shared }, false).unwrap();
                            }
                        }
                        if round % 4 == 3 {
                            set_size(fs, own, (BLOCK * BLOCKS / 2 + 77) as u64);
                        }
                    }
                })
            })
            .collect();
        let syncer = s.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                fs.sync().unwrap();
            }
        });
        for w in writers {
            w.join().unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        syncer.join().unwrap();
    });
    let mut files = BTreeMap::new();
    let mut want = Vec::new();
    for block in 0..BLOCKS {
        for who in 0..THREADS {
            want.extend(vec![stamp(who, 11, block); BLOCK]);
        }
    }
    files.insert("shared".to_owned(), want);
    for who in 0..THREADS {
        let mut own: Vec<u8> = (0..BLOCKS).flat_map(|b| vec![stamp(who, 11, b); BLOCK]).collect();
        own.truncate(BLOCK * BLOCKS / 2 + 77);
        files.insert(format!("own{who}"), own);
    }
    for (name, want) in &files {
        assert!(read_all(&fs, find(&fs, name)) == *want, "{name}");
    }
    fs.close().unwrap();
    drop(fs);
    judge(&image, &files);
}

#[test]
fn the_smallest_to_the_largest_offsets_work() {
    let dir = scratch();
    let image = dir.path().join("img");
    make(&image, 1 << 30, &MkfsOptions::default());
    let fs = open(&image, 8 << 20);
    let last = i64::MAX as u64;
    let id = create(&fs, "far");
    fs.write(id, last - 5, b"12345").unwrap();
    fs.write(id, 3, b"near").unwrap();
    assert!(matches!(fs.write(id, last - 4, b"12345"), Err(larder_fs::Error::FileTooBig)));
    assert!(matches!(fs.write(id, u64::MAX, b"1"), Err(larder_fs::Error::FileTooBig)));
    let too_long = SetAttr { size: Some(last + 1), ..SetAttr::default() };
    assert!(matches!(fs.setattr(id, &too_long), Err(larder_fs::Error::FileTooBig)));
    fs.close().unwrap();
    drop(fs);
    let fs = open(&image, 8 << 20);
    let id = find(&fs, "far");
    assert_eq!(fs.getattr(id).unwrap().size, last);
    let mut buf = [9; 10];
    assert_eq!(fs.read(id, last - 8, &mut buf).unwrap(), 8);
    assert_eq!(buf, *b"\0\0\x0012345\x09\x09");
    assert_eq!(fs.read(id, 0, &mut buf).unwrap(), 10);
    assert_eq!(buf, *b"\0\0\0near\0\0\0");
    assert_eq!(fs.seek(id, 4096, Seek::Data).unwrap(), Some((last - 5) / 4096 * 4096));
    set_size(&fs, id, 5);
    assert_eq!(read_all(&fs, id), b"\0\0\0ne");
    fs.close().unwrap();
    drop(fs);
    judge(&image, &BTreeMap::from([("far".to_owned(), b"\0\0\0ne".to_vec())]));
}

#[test]
fn a_cut_writes_nothing_and_what_it_cut_off_never_shows() {
    let dir = scratch();
    let image = dir.path().join("img");
    make(&image, 1 << 30, &MkfsOptions::default());
    let fs = open(&image, 8 << 20);
    let extents = |id| {
        let mut out: Vec<MappedExtent> = Vec::new();
        let each = &mut |e: &MappedExtent| {
            out.push(*e);
            true
        };
        fs.map_extents(id, 0, each).unwrap();
        out
    };
    let source = create(&fs, "source");
    fs.write(source, 0, &[b's'; 8192]).unwrap();
    type Grow<'a> = &'a dyn Fn(InodeId);
    let ways: [(&str, &[u8], Grow<'_>); 6] = [
        ("by its size", b"", &|id| set_size(&fs, id, 9000)),
        ("behind a gap", b"end", &|id| fs.write(id, 8997, b"end").unwrap()),
        ("reserved", b"", &|id| {
            fs.fallocate(id.at(0), 9000, Fallocate::Allocate { keep_size: false }).unwrap();
        }),
        ("zeroed", b"", &|id| {
            fs.fallocate(id.at(8995), 5, Fallocate::Zero { keep_size: false }).unwrap()
        }),
        ("little by little", b"", &|id| {
            (fs.getattr(id).unwrap().size..=9000)
                .step_by(31)
                .for_each(|size| set_size(&fs, id, size));
        }),
        ("by a clone", &[b's'; 8192], &|id| {
            fs.clone_range(source.at(0), id.at(8192), 8192).unwrap();
        }),
    ];
    let mut files = BTreeMap::from([("source".to_owned(), vec![b's'; 8192])]);
    // Within what a leaf could hold, too; and where something of it is delayed, which may go to a
    // leaf at any time.
    let cuts = [(5000, false), (5000, true), (1000, false), (1000, true)];
    for ((way, end, grow), (cut, delayed)) in ways.into_iter().flat_map(|w| cuts.map(|c| (w, c))) {
        let name = format!("{way} from {cut}{}", if delayed { ", delayed" } else { "" });
        let id = create(&fs, &name);
        fs.write(id, 0, &[b'a'; 12_288]).unwrap();
        fs.sync().unwrap();
        let before = extents(id);
        set_size(&fs, id, cut);
        fs.sync().unwrap();
        assert_eq!(
            extents(id),
            [MappedExtent { len: cut.next_multiple_of(4096), ..before[0] }],
            "{name}"
        );
        let mut want = vec![b'a'; cut as usize];
        if delayed {
            fs.write(id, 500, b"new").unwrap();
            want[500..503].copy_from_slice(b"new");
        }
        grow(id);
        let size = fs.getattr(id).unwrap().size as usize;
        want.resize(size - end.len(), 0);
        want.extend(end);
        assert!(read_all(&fs, id) == want, "{name}");
        files.insert(name, want);
    }
    fs.close().unwrap();
    judge(&image, &files);
}

#[test]
fn a_file_of_many_extents_goes_in_steps() {
    let dir = scratch();
    let image = dir.path().join("img");
    make(&image, 1 << 30, &MkfsOptions::default());
    let fs = open(&image, 64 << 20);
    let id = create(&fs, "holes");
    let block = vec![7; 4096];
    for i in 0..3000u64 {
        fs.write(id, i * 12_288, &block).unwrap();
    }
    fs.sync().unwrap();
    let before = fs.getattr(id).unwrap();
    assert_eq!(before.bytes, 3000 * 4096);
    // One extent over very many others: replaced in steps, one item in the end.
    let all = vec![8; 3000 * 12_288];
    fs.write(id, 4096, &all).unwrap();
    fs.sync().unwrap();
    assert_eq!(fs.getattr(id).unwrap().bytes, 4096 + all.len() as u64);
    for i in 0..3000u64 {
        fs.write(id, i * 12_288 + 8192, &block).unwrap();
    }
    set_size(&fs, id, 5000);
    fs.sync().unwrap();
    assert_eq!(fs.getattr(id).unwrap().bytes, 8192);
    let mut want = vec![7; 4096];
    want.resize(5000, 8);
    assert!(read_all(&fs, id) == want);
    fs.close().unwrap();
    drop(fs);
    judge(&image, &BTreeMap::from([("holes".to_owned(), want)]));
}

#[test]
fn a_full_disk_says_so_at_the_write_and_loses_nothing() {
    let dir = scratch();
    let image = dir.path().join("img");
    make(&image, 256 << 20, &MkfsOptions::default());
    let fs = open(&image, 32 << 20);
    let mut files = BTreeMap::new();
    let mut full = false;
    for i in 0..400 {
        let name = format!("f{i}");
        let id = create(&fs, &name);
        let data: Vec<u8> = (0..1_000_000u32).map(|n| (n / 100 + i) as u8).collect();
        match fs.write(id, 0, &data) {
            Ok(()) => {
                files.insert(name, data);
            }
            Err(larder_fs::Error::NoSpace) => {
                full = true;
                fs.unlink(fs.root(), name.as_bytes()).unwrap();
                break;
            }
            Err(e) => panic!("{e}"),
        }
    }
    assert!(full && files.len() > 100, "{} files", files.len());
    fs.sync().unwrap();
    for (name, want) in &files {
        assert!(read_all(&fs, find(&fs, name)) == *want, "{name}");
    }
    // Space comes back after deletes, without a remount.
    let gone: Vec<String> = files.keys().step_by(2).cloned().collect();
    for name in &gone {
        fs.unlink(fs.root(), name.as_bytes()).unwrap();
        files.remove(name);
    }
    for i in 0..gone.len() - 5 {
        let name = format!("again{i}");
        let id = create(&fs, &name);
        let data = vec![i as u8 | 1; 1_000_000];
        fs.write(id, 0, &data).unwrap();
        files.insert(name, data);
    }
    fs.close().unwrap();
    drop(fs);
    judge(&image, &files);
}

/// A device that fails writes with a mark in them.
#[derive(Debug)]
struct Flaky(FileDevice);

const MARK: &[u8] = b"this cannot be written";

impl Device for Flaky {
    fn name(&self) -> String {
        self.0.name()
    }
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> std::io::Result<()> {
        // At the start of a sector, where the test puts it.
        if data.chunks(4096).any(|sector| sector.starts_with(MARK)) {
            return Err(std::io::Error::other("bad sector"));
        }
        self.0.write_at(at, data)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn lost_data_is_told_until_it_is_rewritten() {
    let dir = scratch();
    let image = dir.path().join("img");
    make(&image, 256 << 20, &MkfsOptions::default());
    let device = Flaky(FileDevice::open(&image, OpenMode::Write).unwrap());
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let fs = Filesystem::open(Arc::new(device), options).unwrap();
    let (bad, good) = (create(&fs, "bad"), create(&fs, "good"));
    let old: Vec<u8> = (0..50_000u32).map(|i| (i / 50) as u8).collect();
    fs.write(bad, 0, &old).unwrap();
    fs.fsync(bad, false).unwrap();
    let mut marked = vec![1; 9000];
    marked[..MARK.len()].copy_from_slice(MARK);
    fs.write(bad, 8192, &marked).unwrap();
    fs.write(good, 0, &old).unwrap();
    let mut both = old.clone();
    both[8192..17_192].copy_from_slice(&marked);
    assert!(read_all(&fs, bad) == both, "delayed data reads until it is lost");
    for _ in 0..2 {
        assert!(matches!(fs.fsync(bad, false), Err(larder_fs::Error::DataLost)));
        assert!(read_all(&fs, bad) == old, "what was lost reads as before");
    }
    fs.fsync(good, false).unwrap();
    // Elsewhere in the file, writing helps nothing; a part of the range is not all of it.
    for (at, len) in [(30_000, 100), (8192, 4096)] {
        fs.write(bad, at, &vec![2; len]).unwrap();
        assert!(matches!(fs.fsync(bad, false), Err(larder_fs::Error::DataLost)));
    }
    fs.write(bad, 12_288, &[3; 5000]).unwrap();
    fs.fsync(bad, false).unwrap();
    // Lost and then cut off: nothing is missing any more.
    fs.write(bad, 40_960, &marked).unwrap();
    assert!(matches!(fs.fsync(bad, false), Err(larder_fs::Error::DataLost)));
    set_size(&fs, bad, 40_960);
    fs.fsync(bad, false).unwrap();
    let mut want = old.clone();
    want.truncate(40_960);
    want[30_000..30_100].fill(2);
    want[8192..12_288].fill(2);
    want[12_288..17_288].fill(3);
    assert!(read_all(&fs, bad) == want);
    fs.close().unwrap();
    drop(fs);
    judge(&image, &BTreeMap::from([("bad".to_owned(), want), ("good".to_owned(), old)]));
}

/// Single blocks, many times more than fit into the memory for delayed data, each place several
/// times: write-back goes round the file again and again, past extents and holes.
#[test]
fn blocks_at_random_places_are_all_there() {
    const BLOCKS: u64 = 3000;
    let dir = scratch();
    let image = dir.path().join("image");
    make(&image, 256 << 20, &MkfsOptions::default());
    let fs = open(&image, 8 << 20);
    let id = create(&fs, "file");
    let mut rng = SmallRng::seed_from_u64(4096);
    let mut model = vec![0u32; BLOCKS as usize];
    for n in 1..=12_000u32 {
        let block = rng.random_range(0..BLOCKS);
        fs.write(id, block * 4096, &n.to_le_bytes().repeat(1024)).unwrap();
        model[block as usize] = n;
        if n % 5000 == 0 {
            fs.sync().unwrap();
        }
    }
    let last = model.iter().rposition(|n| *n > 0).unwrap();
    let want: Vec<u8> = model[..=last].iter().flat_map(|n| n.to_le_bytes().repeat(1024)).collect();
    assert!(read_all(&fs, id) == want, "as it was written");
    fs.close().unwrap();
    drop(fs);
    let fs = open(&image, 8 << 20);
    assert!(read_all(&fs, find(&fs, "file")) == want, "after opening it again");
    fs.close().unwrap();
    drop(fs);
    if oracle::need(&[Need::BtrfsProgs]) {
        btrfs_check(&image, true).assert_clean("after blocks at random places");
    }
}
