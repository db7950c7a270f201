//! File data against a model of plain bytes: random writes, truncations, copies and look-ups of holes, with write-back,
//! commits and reopening in between; then `btrfs check` goes over all of it, and the kernel reads the same bytes.

use larder_fs::mkfs::{Features, MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, Seek, SetAttr};
use larder_simtest::oracle::{self, KernelMount, Need, btrfs_check, scratch};
use larder_volume::{FileDevice, OpenMode};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const FILES: usize = 6;

fn open(image: &Path, cache_size: u64) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write, false).unwrap();
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

fn torture(image: &Path, options: &MkfsOptions, seed: u64, steps: u32) -> BTreeMap<String, Vec<u8>> {
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
            13 => {
                let to = rng.random_range(0..FILES);
                let (len, to_at) = (length(&mut rng), place(&mut rng));
                let from = model[i].clone();
                let n = len.min(from.len().saturating_sub(at));
                if to == i && n > 0 && at < to_at + n && to_at < at + n {
                    let refused = fs.copy_range(id, at as u64, ids[to], to_at as u64, n as u64).unwrap_err();
                    assert!(matches!(refused, larder_fs::Error::Invalid(_)), "{refused}");
                    continue;
                }
                let done = fs.copy_range(id, at as u64, ids[to], to_at as u64, n as u64).unwrap();
                assert_eq!(done, n as u64);
                if n > 0 {
                    let len = model[to].len().max(to_at + n);
                    model[to].resize(len, 0);
                    model[to][to_at..to_at + n].copy_from_slice(&from[at..at + n]);
                }
            }
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
            assert!(std::fs::read(mount.join(name)).unwrap() == *want, "the kernel reads {name} otherwise");
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
    let options = MkfsOptions { features, csum: larder_format::CsumType::Blake2b, ..MkfsOptions::default() };
    let files = torture(&image, &options, seed() + 2000, 800);
    judge(&image, &files);
}
