//! The smallest disks there are, filled to the brim by several threads while commits run, emptied,
//! and filled again.
//!
//! What must hold on every layout: `NoSpace` and nothing worse at the call that needs space,
//! commits that always fit, deletes that always work, reservations that are zero when nothing runs,
//! and space that comes back without a remount.

use larder_fs::mkfs::{MkfsOptions, Profile, minimum_size};
use larder_fs::{Error, FileKind, Filesystem, InodeId, NewInode, OpenOptions, no_wait};
use larder_simtest::device::{DiscardEffect, SimDevice};
use larder_simtest::image::Image;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::fresh;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn options() -> OpenOptions {
    OpenOptions {
        commit_interval: None,
        cache_size: 32 << 20,
        discard: true,
        ..OpenOptions::default()
    }
}

fn file<'a>(xattrs: &'a [(Vec<u8>, Vec<u8>)]) -> NewInode<'a> {
    NewInode { kind: FileKind::Regular, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs }
}

fn check(image: &Image, when: &str) {
    if need(&[Need::BtrfsProgs]) {
        let dir = scratch();
        let path = dir.path().join("tiny.img");
        image.write_sparse(&path).expect("write the image");
        btrfs_check(&path, true).assert_clean(when);
    }
}

fn make_dirs(fs: &Filesystem, n: usize) -> Vec<InodeId> {
    let new = NewInode { kind: FileKind::Directory, perm: 0o755, ..file(&[]) };
    (0..n)
        .map(|i| fs.create(fs.root(), format!("dir{i}").as_bytes(), &new).expect("a directory").id)
        .collect()
}

/// Every thread fills its directory until there is no space; another thread syncs all the time.
/// Returns how many files each made.
fn fill(fs: &Filesystem, dirs: &[InodeId], value: usize) -> Vec<usize> {
    let xattrs = [(b"user.big".to_vec(), vec![b'v'; value])];
    let full = AtomicBool::new(false);
    std::thread::scope(|s| {
        let syncs = s.spawn(|| {
            while !full.load(Ordering::Relaxed) {
                fs.sync().expect("a commit always fits");
            }
        });
        let fills: Vec<_> = dirs
            .iter()
            .map(|dir| {
                let xattrs = &xattrs;
                s.spawn(move || {
                    for i in 0.. {
                        match fs.create(*dir, format!("file-{i:06}").as_bytes(), &file(xattrs)) {
                            Ok(_) => assert!(i < 1_000_000, "the disk does not fill up"),
                            Err(Error::NoSpace) => return i,
                            Err(e) => panic!("file {i}: {e}"),
                        }
                    }
                    unreachable!("the range has no end")
                })
            })
            .collect();
        let made = fills.into_iter().map(|t| t.join().expect("no panic")).collect();
        full.store(true, Ordering::Relaxed);
        syncs.join().expect("no panic");
        made
    })
}

fn empty(fs: &Filesystem, dirs: &[InodeId], made: &[usize]) {
    std::thread::scope(|s| {
        for (dir, n) in dirs.iter().zip(made) {
            s.spawn(move || {
                for i in 0..*n {
                    let name = format!("file-{i:06}");
                    fs.unlink(*dir, name.as_bytes())
                        .unwrap_or_else(|e| panic!("{name} on a full disk: {e}"));
                }
            });
        }
    });
}

fn idle(fs: &Filesystem, when: &str) {
    fs.sync().unwrap_or_else(|e| panic!("{when}: {e}"));
    let stats = fs.stats();
    assert_eq!(
        (stats.data_reserved, stats.metadata_reserved),
        (0, 0),
        "{when}: reserved although nothing runs"
    );
    assert_eq!(stats.read_only, None, "{when}");
}

fn live(size: u64, mkfs: &MkfsOptions, value: usize) {
    let base = fresh(size, mkfs).expect("mkfs");
    let device = Arc::new(SimDevice::new(base).unrecorded().with_discard(DiscardEffect::Ignore));
    let fs = Filesystem::open(device.clone(), options()).expect("open");
    let dirs = make_dirs(&fs, 3);
    idle(&fs, "fresh");
    let before = fs.info().bytes_used;
    let first = fill(&fs, &dirs, value);
    idle(&fs, "full");
    let used_at_first = fs.info().bytes_used;
    check(&device.image(), "full");
    empty(&fs, &dirs, &first);
    idle(&fs, "emptied");
    fs.sync().expect("another commit");
    check(&device.image(), "emptied");
    let after = fs.info().bytes_used;
    assert!(
        after <= before + (1 << 20),
        "{before} bytes used at first, {after} after removing everything"
    );
    let second = fill(&fs, &dirs, value);
    let (a, b) = (first.iter().sum::<usize>(), second.iter().sum::<usize>());
    println!("{size} bytes: {a} files, then {b}; {:?}", fs.stats());
    idle(&fs, "full again");
    // How many files that is depends on how well threads that interleave fill their leaves.
    let used = fs.info().bytes_used;
    assert!(
        used >= used_at_first / 20 * 19,
        "{used_at_first} bytes used by {a} files at first, {used} by {b} then"
    );
    fs.close().expect("close");
    drop(fs);
    check(&device.image(), "closed");
    let fs = Filesystem::open(device.clone(), options()).expect("open a full one");
    empty(&fs, &dirs, &second);
    fs.close().expect("close");
    check(&device.image(), "emptied after opening");
}

#[test]
fn single() {
    let mkfs = MkfsOptions {
        metadata: Some(Profile::Single),
        data: Some(Profile::Single),
        ..MkfsOptions::default()
    };
    live(minimum_size(Profile::Single, Profile::Single, false), &mkfs, 3000);
}

#[test]
fn single_with_small_nodes_and_names_only() {
    let mkfs = MkfsOptions {
        metadata: Some(Profile::Single),
        data: Some(Profile::Single),
        nodesize: Some(4096),
        ..MkfsOptions::default()
    };
    live(minimum_size(Profile::Single, Profile::Single, false), &mkfs, 10);
}

#[test]
fn dup() {
    let mkfs = MkfsOptions {
        metadata: Some(Profile::Dup),
        data: Some(Profile::Single),
        ..MkfsOptions::default()
    };
    live(minimum_size(Profile::Dup, Profile::Single, false), &mkfs, 3000);
}

#[test]
fn mixed() {
    let mut mkfs = MkfsOptions {
        metadata: Some(Profile::Single),
        data: Some(Profile::Single),
        ..MkfsOptions::default()
    };
    mkfs.features.mixed = true;
    mkfs.nodesize = Some(4096);
    live(minimum_size(Profile::Single, Profile::Single, true), &mkfs, 1500);
}

#[test]
fn an_edit_that_did_not_begin_leaves_its_subvolume_alone() {
    let base = fresh(256 << 20, &MkfsOptions::default()).expect("mkfs");
    let device = Arc::new(SimDevice::new(base).unrecorded().with_discard(DiscardEffect::Ignore));
    let fs = Filesystem::open(device.clone(), options()).expect("open");
    let dir = make_dirs(&fs, 1)[0];
    for i in 0..2000 {
        fs.create(dir, format!("file-{i:06}").as_bytes(), &file(&[])).expect("create");
    }
    fs.close().expect("close");
    drop(fs);
    let mut refused = 0;
    for i in 0..20 {
        // Nothing but what opening needs is in memory: an operation that must not wait fails
        // somewhere on its way.
        let fs = Filesystem::open(device.clone(), options()).expect("open");
        let name = format!("file-{:06}", i * 97);
        fs.lookup(dir, name.as_bytes()).expect("lookup");
        match no_wait(|| fs.unlink(dir, name.as_bytes())) {
            Err(Error::WouldBlock) => refused += 1,
            other => other.expect("unlink"),
        }
        fs.set_label(name.as_bytes()).expect("label");
        fs.sync().expect("commit");
        fs.close().expect("close");
    }
    assert!(refused > 0, "everything was in memory");
    check(&device.image(), "after refusals");
}

/// Fills directories with files of `len` bytes until there is no space, each byte of a file its
/// number.
fn fill_data(fs: &Filesystem, dirs: &[InodeId], len: usize) -> Vec<usize> {
    std::thread::scope(|s| {
        let fills: Vec<_> = dirs
            .iter()
            .map(|dir| {
                s.spawn(move || {
                    for i in 0.. {
                        let name = format!("file-{i:06}");
                        let made = fs
                            .create(*dir, name.as_bytes(), &file(&[]))
                            .and_then(|a| fs.write(a.id, 0, &vec![content(i); len]));
                        match made {
                            Ok(()) if i % 50 == 49 => fs.sync().expect("a commit always fits"),
                            Ok(()) => assert!(i < 1_000_000, "the disk does not fill up"),
                            Err(Error::NoSpace) => return i,
                            Err(e) => panic!("{name}: {e}"),
                        }
                    }
                    unreachable!("the range has no end")
                })
            })
            .collect();
        fills.into_iter().map(|t| t.join().expect("no panic")).collect()
    })
}

fn content(i: usize) -> u8 {
    u8::try_from(i % 251).expect("less than 251") + 1
}

fn data(size: u64, mkfs: &MkfsOptions, len: usize) {
    let base = fresh(size, mkfs).expect("mkfs");
    let device = Arc::new(SimDevice::new(base).unrecorded().with_discard(DiscardEffect::Ignore));
    let mut fs = Filesystem::open(device.clone(), options()).expect("open");
    let dirs = make_dirs(&fs, 3);
    idle(&fs, "fresh");
    let mut counts = Vec::new();
    for round in 0..3 {
        let made = fill_data(&fs, &dirs, len);
        idle(&fs, "full of data");
        if round == 1 {
            fs.close().expect("close");
            drop(fs);
            check(&device.image(), "full of data");
            fs = Filesystem::open(device.clone(), options()).expect("open a full one");
        }
        let mut buf = vec![0; len + 1];
        for (dir, n) in dirs.iter().zip(&made) {
            for i in 0..*n {
                let id = fs.lookup(*dir, format!("file-{i:06}").as_bytes()).expect("lookup").id;
                assert_eq!(fs.read(id, 0, &mut buf).expect("read"), len, "file {i}");
                assert!(buf[..len].iter().all(|b| *b == content(i)), "file {i}");
            }
            // The one that found the disk full may be there, too.
            let last = format!("file-{n:06}");
            match fs.unlink(*dir, last.as_bytes()) {
                Ok(()) | Err(Error::NotFound) => {}
                Err(e) => panic!("{last}: {e}"),
            }
        }
        empty(&fs, &dirs, &made);
        idle(&fs, "emptied");
        fs.sync().expect("another commit");
        counts.push(made.iter().sum::<usize>());
    }
    println!("{size} bytes: {counts:?} files of {len} bytes; {:?}", fs.stats());
    fs.close().expect("close");
    check(&device.image(), "emptied");
    assert!(
        counts.iter().all(|n| *n >= counts[0] * 8 / 10),
        "space does not come back: {counts:?}"
    );
}

#[test]
fn data_single() {
    let mkfs = MkfsOptions {
        metadata: Some(Profile::Single),
        data: Some(Profile::Single),
        ..MkfsOptions::default()
    };
    data(minimum_size(Profile::Single, Profile::Single, false), &mkfs, 100_000);
}

#[test]
fn data_dup() {
    let mkfs = MkfsOptions {
        metadata: Some(Profile::Dup),
        data: Some(Profile::Single),
        ..MkfsOptions::default()
    };
    data(minimum_size(Profile::Dup, Profile::Single, false), &mkfs, 5000);
}

#[test]
fn data_mixed() {
    let mut mkfs = MkfsOptions {
        metadata: Some(Profile::Single),
        data: Some(Profile::Single),
        nodesize: Some(4096),
        ..MkfsOptions::default()
    };
    mkfs.features.mixed = true;
    data(minimum_size(Profile::Single, Profile::Single, true), &mkfs, 20_000);
}
