//! A full disk: `NoSpace` at the call that needs the space, deletes go on, nothing acknowledged is
//! lost, and the space comes back without a remount.

use larder_fs::mkfs::{MkfsOptions, Profile, minimum_size};
use larder_fs::{Error, FileKind, Filesystem, NewInode, OpenOptions, XattrMode};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::judge::empty;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::{Config, fresh, mirrors, show};
use larder_simtest::world::Body;
use std::sync::Arc;

fn check(image: &Image, when: &str) {
    if need(&[Need::BtrfsProgs]) {
        let dir = scratch();
        let path = dir.path().join("full.img");
        image.write_sparse(&path).expect("write the image");
        btrfs_check(&path, true).assert_clean(when);
    }
}

/// Makes files with an xattr that takes most of their metadata until there is no space; returns how
/// many.
fn fill(fs: &Filesystem, from: usize) -> usize {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    let value = [b'v'; 3000];
    for i in from.. {
        let name = format!("file-{i:06}");
        let made = fs
            .create(fs.root(), name.as_bytes(), &new)
            .and_then(|a| fs.setxattr(a.id, b"user.big", &value, XattrMode::Set));
        match made {
            Ok(()) => assert!(i < 1_000_000, "the disk does not fill up"),
            Err(Error::NoSpace) => return i,
            Err(e) => panic!("{name}: {e}"),
        }
    }
    unreachable!("the range has no end")
}

#[test]
fn metadata_fill_the_disk_and_go_again() {
    let mut config = Config::new(1).expect("a new file system");
    let size = minimum_size(Profile::Single, Profile::Single, false).max(96 << 20);
    let options = MkfsOptions { metadata: Some(Profile::Single), ..MkfsOptions::default() };
    config.base = fresh(size, &options).expect("mkfs");
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let before = fs.info().bytes_used;
    let count = fill(&fs, 0);
    assert!(count > 2000, "{count} files of 3 KiB on {size} bytes");
    fs.sync().expect("a full file system can be committed");
    let full = device.mark();
    // Every file but perhaps the last is whole.
    for i in [0, 1, count / 2, count - 1] {
        let name = format!("file-{i:06}");
        let id = fs.lookup(fs.root(), name.as_bytes()).expect("lookup").id;
        assert_eq!(fs.getxattr(id, b"user.big").expect("getxattr").len(), 3000, "{name}");
    }
    // A stretch of them: of leaves that are only half emptied nothing comes back.
    for i in 0..count / 2 {
        fs.unlink(fs.root(), format!("file-{i:06}").as_bytes()).expect("a delete on a full disk");
    }
    fs.sync().expect("commit");
    check(&device.image(), "half of the files removed");
    let again = fill(&fs, count + 1) - count - 1;
    assert!(again > count / 4, "{again} of {} come back", count / 2);
    fs.sync().expect("commit");
    empty(&fs, fs.root(), 0).expect("remove everything");
    fs.sync().expect("commit");
    fs.sync().expect("commit");
    let after = fs.info().bytes_used;
    assert!(
        after <= before + (1 << 20),
        "{before} bytes used at first, {after} after removing everything"
    );
    assert!(fill(&fs, 0) > count * 9 / 10, "the space is there again, without a remount");
    fs.close().expect("close");
    mirrors(&device.image()).expect("mirrors");
    check(&device.image(), "at the end");
    // Some of the crash states after it was full: the files that were synced are there, or were
    // removed later.
    let limits = Limits { samples: 2, per_epoch: 6, exhaustive: 2, seed: 1 };
    let crashes = Crashes::of(&device.recording(), &limits);
    let late: Vec<_> = crashes.states.iter().filter(|s| s.earliest > full).collect();
    assert!(late.len() > 10, "{}", late.len());
    for state in late.iter().step_by(late.len().div_ceil(12)) {
        let world = show(&crashes.image(state), &config.options).expect("a crash state");
        for (path, _, _, ino) in world.names() {
            let node = world.node(ino).expect("named");
            assert!(matches!(node.body, Body::File(_)), "{path}");
        }
    }
}

/// A caller that finds no space has delayed data written: what it needs and at most a piece of a
/// file more, not everything that is delayed, although a request of a few KiB finds tens of MiB of
/// it.
#[test]
fn delayed_data_is_written_by_amount() {
    let size = minimum_size(Profile::Single, Profile::Single, false).max(96 << 20);
    let options = MkfsOptions { metadata: Some(Profile::Single), ..MkfsOptions::default() };
    let base = fresh(size, &options).expect("mkfs");
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let options =
        OpenOptions { commit_interval: None, cache_size: 256 << 20, ..OpenOptions::default() };
    let fs = Filesystem::open(device.clone(), options).expect("open");
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: &[],
        xattrs: &[],
    };
    // Small enough for their leaves, which is known only when they are written: their sectors are
    // reserved until then.
    let mut made = 0u32;
    let refused = loop {
        let name = format!("file-{made:06}");
        let done = fs
            .create(fs.root(), name.as_bytes(), &new)
            .and_then(|a| fs.write(a.id, 0, &made.to_le_bytes().repeat(500)));
        match done {
            Ok(()) => made += 1,
            Err(e) => break e,
        }
        assert!(made < 1_000_000, "the disk does not fill up");
    };
    assert!(matches!(refused, Error::NoSpace), "{refused}");
    let reclaim = fs.stats().reclaim;
    println!("{made} files: {reclaim:?}");
    assert!(reclaim.writes > 0 && reclaim.written_bytes + reclaim.written_runs > 0, "{reclaim:?}");
    assert!(reclaim.written_runs <= reclaim.asked_runs, "{reclaim:?}");
    let piece = (1 << 20) + 8192;
    assert!(reclaim.excess_bytes <= piece, "{reclaim:?}");
    assert!(reclaim.written_bytes <= reclaim.asked_bytes + reclaim.writes * piece, "{reclaim:?}");
    fs.sync().expect("what was accepted fits");
    for i in (0..made).step_by(97) {
        let id = fs.lookup(fs.root(), format!("file-{i:06}").as_bytes()).expect("lookup").id;
        let mut back = vec![0; 3000];
        assert_eq!(fs.read(id, 0, &mut back).expect("read"), 2000);
        assert_eq!(back[..2000], i.to_le_bytes().repeat(500), "file {i}");
    }
    let stats = fs.stats();
    assert_eq!((stats.data_reserved, stats.metadata_reserved, stats.delayed_bytes), (0, 0, 0));
    fs.close().expect("close");
    check(&device.image(), "full of small files");
}
