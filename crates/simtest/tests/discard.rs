//! Freed space is given back to what the file system lies on, and never too early.

use larder_format::Physical;
use larder_fs::mkfs::{MkfsOptions, Profile, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, TrimRange, Tuning};
use larder_simtest::device::{Access, OpKind, SimDevice};
use larder_simtest::image::Image;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::{Config, fresh, mirrors, run};
use larder_simtest::workload::Workload;
use larder_volume::{Device, FileDevice, OpenMode};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn options(discard: bool) -> OpenOptions {
    OpenOptions { commit_interval: None, discard, ..OpenOptions::default() }
}

fn open(path: &Path, discard: bool) -> Arc<Filesystem> {
    let device = FileDevice::open(path, OpenMode::Write).expect("open the image");
    Filesystem::open(Arc::new(device) as Arc<dyn Device>, options(discard)).expect("open")
}

/// Bytes that the file takes on its own file system.
fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).expect("stat").blocks() * 512
}

/// Does the file system of the temporary directory make holes?
fn makes_holes(path: &Path) -> bool {
    let device = FileDevice::create(path, 2 * MIB).expect("create");
    device.write_at(Physical(0), &vec![1; 2 << 20]).expect("write");
    device.flush().expect("flush");
    let before = allocated(path);
    device.discard(Physical(0), MIB).expect("discard");
    device.can_discard() && allocated(path) < before
}

fn fresh_file(path: &Path, size: u64, metadata: Profile) {
    let device = FileDevice::create(path, size).expect("create");
    mkfs(&device, &MkfsOptions { metadata: Some(metadata), ..MkfsOptions::default() })
        .expect("mkfs");
}

fn write(fs: &Filesystem, name: &str, len: usize) -> InodeId {
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: &[],
        xattrs: &[],
    };
    let id = fs.create(fs.root(), name.as_bytes(), &new).expect("create").id;
    let data: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8 + 1).collect();
    fs.write(id, 0, &data).expect("write");
    id
}

#[test]
fn deleted_files_become_holes() {
    let dir = scratch();
    if !makes_holes(&dir.path().join("probe")) {
        println!(
            "deleted_files_become_holes: skipped: needs a temporary directory that makes holes"
        );
        return;
    }
    for (name, discard) in [("with", true), ("without", false)] {
        let path = dir.path().join(name);
        fresh_file(&path, GIB, Profile::Dup);
        let empty = allocated(&path);
        let fs = open(&path, discard);
        write(&fs, "large", 20 << 20);
        for i in 0..500 {
            write(&fs, &format!("small-{i}"), 5000);
        }
        let kept = write(&fs, "kept", 300_000);
        fs.sync().expect("sync");
        let full = allocated(&path);
        assert!(full > empty + 22 * MIB, "{empty} bytes, then {full}");
        fs.unlink(fs.root(), b"large").expect("unlink");
        // Every other one first: the small ones share granules.
        for i in (0..500).step_by(2).chain((1..500).step_by(2)) {
            fs.unlink(fs.root(), format!("small-{i}").as_bytes()).expect("unlink");
            if i == 498 {
                fs.sync().expect("sync");
            }
        }
        fs.sync().expect("sync");
        let after = allocated(&path);
        if discard {
            assert!(after < full - 22 * MIB, "{full} bytes full, {after} after deleting");
            assert!(fs.stats().device_discards < 100, "{}", fs.stats().device_discards);
        } else {
            assert!(after >= full, "{full} bytes full, {after} after deleting");
            assert_eq!(fs.stats().device_discards, 0);
            // As Linux: a request for less than a sector trims nothing.
            for (start, len) in [(0, 0), (0, 4095), (u64::MAX, u64::MAX)] {
                let range = TrimRange { start, len, min_len: 0 };
                assert!(matches!(fs.trim(range), Err(larder_fs::Error::Invalid(_))), "{range:?}");
            }
            let told = fs.trim(TrimRange::default()).expect("trim").bytes;
            assert!(told > GIB - 64 * MIB && told < GIB, "{told} bytes trimmed");
            assert!(
                allocated(&path) < full - 22 * MIB,
                "{full} bytes full, {} trimmed",
                allocated(&path)
            );
        }
        let mut back = vec![0; 300_001];
        assert_eq!(fs.read(kept, 0, &mut back).expect("read"), 300_000);
        assert!(
            (0..300_000).all(|i| back[i] == (i * 31 % 251) as u8 + 1),
            "what was kept is there"
        );
        fs.close().expect("close");
        drop(fs);
        mirrors(&Image::from_file(&path).expect("read the image")).expect("mirrors");
        if need(&[Need::BtrfsProgs]) {
            btrfs_check(&path, true).assert_clean(name);
        }
    }
}

/// Tree blocks are discarded at the end, chunks that were given back at once, of both copies.
#[test]
fn chunks_and_tree_blocks_are_given_back() {
    let base = fresh(GIB, &MkfsOptions { metadata: Some(Profile::Dup), ..MkfsOptions::default() })
        .expect("mkfs");
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let fs = Filesystem::open(device.clone(), options(true)).expect("open");
    let unallocated = fs.space_usage().unallocated;
    for i in 0..3 {
        write(&fs, &format!("large-{i}"), 100 << 20);
        fs.sync().expect("sync");
    }
    assert!(fs.space_usage().unallocated < unallocated, "chunks were made");
    for i in 0..3 {
        fs.unlink(fs.root(), format!("large-{i}").as_bytes()).expect("unlink");
    }
    fs.sync().expect("sync");
    let files = fs.stats().device_discarded_bytes;
    assert!(files >= 300 * MIB - MIB, "{files} bytes");
    // Empty groups are taken out by the next commit.
    write(&fs, "another", 10);
    fs.sync().expect("sync");
    let chunks = fs.stats().device_discarded_bytes;
    assert!(chunks >= files + 100 * MIB, "{files} bytes of files, {} of chunks", chunks - files);
    for i in 0..2000 {
        write(&fs, &format!("small-{i}"), 1000);
    }
    fs.sync().expect("sync");
    for i in 0..2000 {
        fs.unlink(fs.root(), format!("small-{i}").as_bytes()).expect("unlink");
    }
    fs.sync().expect("sync");
    let before = fs.stats().device_discarded_bytes;
    assert!(before - chunks < MIB, "tree blocks wait");
    fs.close().expect("close");
    let at_close = fs.stats().device_discarded_bytes - before;
    // 2000 inline files are at least 2 MiB of leaves, twice.
    assert!(at_close >= 4 * MIB, "{at_close} bytes at the end");
    drop(fs);
    let image = device.image();
    mirrors(&image).expect("mirrors");
    if need(&[Need::BtrfsProgs]) {
        let dir = scratch();
        let path = dir.path().join("image");
        image.write_sparse(&path).expect("write the image");
        btrfs_check(&path, true).assert_clean("closed");
    }
}

#[test]
fn everything_that_nobody_needs_can_be_trimmed_while_files_are_written() {
    let base = fresh(GIB, &MkfsOptions::default()).expect("mkfs");
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let fs = Filesystem::open(device.clone(), options(true)).expect("open");
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let trims = s.spawn(|| {
            let mut told = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                told += fs.trim(TrimRange::default()).expect("trim").bytes;
            }
            told
        });
        for i in 0..60 {
            let name = format!("file-{}", i % 7);
            let _ = fs.unlink(fs.root(), name.as_bytes());
            write(&fs, &name, 1_500_000 + i * 4096);
            fs.sync().expect("sync");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(trims.join().expect("no panic") > 0);
    });
    for i in 53..60 {
        let id = fs.lookup(fs.root(), format!("file-{}", i % 7).as_bytes()).expect("lookup").id;
        let len = 1_500_000 + i * 4096;
        let mut back = vec![0; len];
        assert_eq!(fs.read(id, 0, &mut back).expect("read"), len);
        assert!(back.iter().enumerate().all(|(i, b)| *b == (i * 31 % 251) as u8 + 1));
    }
    fs.close().expect("close");
}

#[test]
fn a_device_that_fails_to_discard_fails_nothing_else() {
    let base = fresh(256 << 20, &MkfsOptions::default()).expect("mkfs");
    let device = Arc::new(SimDevice::new(base));
    let fs = Filesystem::open(device.clone(), options(true)).expect("open");
    let discards = |a: &Access| a.kind == larder_simtest::device::AccessKind::Discard;
    device.inject(larder_simtest::device::Fault::nth(0, discards).forever());
    for i in 0..3 {
        write(&fs, "file", 1 << 20);
        fs.sync().expect("sync");
        fs.unlink(fs.root(), b"file").expect("unlink");
        fs.sync().unwrap_or_else(|e| panic!("sync {i}: {e}"));
    }
    assert_eq!(device.counts().discards, 1, "the first failure is the last try");
    assert!(fs.trim(TrimRange::default()).is_err(), "the caller gets the error");
    fs.close().expect("close");
}

/// Discarded space turns to poison at any moment from its discard on; nothing that a superblock
/// reaches may.
#[test]
fn no_crash_state_misses_what_was_discarded() {
    let text = "mk A; new A/f; A/f[0,400K)=a; COMMIT; A/f[0,400K)=b; new A/g; A/g[0,100K)=c; F \
        A/g; rm A/f; new A/h; A/h[0,200K)=d; COMMIT; trunc A/h 0; F A/h; new i; i[0,600K)=e; F i; \
        rm i; COMMIT; rm A/g; COMMIT; new j; j[0,300K)=f; F j";
    for everything in [false, true] {
        let mut config = Config::new(1).expect("a new file system");
        config.options.tuning.discard_everything = everything;
        let workload = Workload::script("discards", text).expect("a workload");
        let outcome = run(&config, &workload);
        outcome.assert_sound();
        println!("{outcome}");
        // Was anything discarded at all?
        let device = Arc::new(SimDevice::new(config.base.clone()));
        let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
        write(&fs, "f", 400 << 10);
        fs.sync().expect("sync");
        fs.unlink(fs.root(), b"f").expect("unlink");
        fs.sync().expect("sync");
        let discards: Vec<u64> = device
            .recording()
            .ops
            .iter()
            .filter_map(|op| match op.kind {
                OpKind::Discard { len, .. } => Some(len),
                _ => None,
            })
            .collect();
        assert!(discards.iter().sum::<u64>() >= 384 << 10, "{discards:?}");
        assert_eq!(discards.iter().any(|len| *len < 64 << 10), everything, "{discards:?}");
        fs.close().expect("close");
    }
}

#[test]
fn nothing_is_discarded_unless_asked() {
    let tuning = Tuning { discard_everything: true, ..Tuning::default() };
    let device = Arc::new(SimDevice::new(fresh(256 << 20, &MkfsOptions::default()).expect("mkfs")));
    let fs =
        Filesystem::open(device.clone(), OpenOptions { tuning, ..options(false) }).expect("open");
    write(&fs, "f", 4 << 20);
    fs.sync().expect("sync");
    fs.unlink(fs.root(), b"f").expect("unlink");
    fs.sync().expect("sync");
    fs.close().expect("close");
    assert_eq!(device.counts().discards, 0);
}
