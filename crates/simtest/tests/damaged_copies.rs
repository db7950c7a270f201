//! A damaged block is read from its other copy, and mended where the file system may be written;
//! with no good copy left the call fails and nothing else does.

use larder_fs::mkfs::{MkfsOptions, Profile, mkfs};
use larder_fs::{Error, FileKind, Filesystem, InodeId, NewInode, OpenOptions};
use larder_simtest::oracle::scratch;
use larder_volume::{FileDevice, OpenMode};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const NODE: usize = 16_384;
const SECTOR: usize = 4096;

fn open(image: &Path, read_only: bool) -> Arc<Filesystem> {
    let mode = if read_only { OpenMode::Read } else { OpenMode::Write };
    let device = FileDevice::open(image, mode).unwrap();
    let options = OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn contents() -> Vec<u8> {
    (0..300_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

/// An image with both metadata and data twice, a file with data and some names.
fn make(image: &Path) {
    let device = FileDevice::create(image, 256 << 20).unwrap();
    let options = MkfsOptions {
        data: Some(Profile::Dup),
        metadata: Some(Profile::Dup),
        ..MkfsOptions::default()
    };
    mkfs(&device, &options).unwrap();
    drop(device);
    let fs = open(image, false);
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: b"",
        xattrs: &[],
    };
    for n in 0..2000 {
        fs.create(fs.root(), format!("name-{n}").as_bytes(), &new).unwrap();
    }
    let file = fs.create(fs.root(), b"file", &new).unwrap().id;
    fs.write(file, 0, &contents()).unwrap();
    fs.close().unwrap();
}

/// Offsets of all copies of each node that is there twice, and of each sector of the file.
fn copies(bytes: &[u8]) -> Vec<Vec<usize>> {
    let fsid = bytes[65_536 + 0x20..65_536 + 0x30].to_vec();
    let mut nodes: HashMap<Vec<u8>, Vec<usize>> = HashMap::new();
    for at in (1 << 20..bytes.len()).step_by(SECTOR) {
        let block = &bytes[at..(at + NODE).min(bytes.len())];
        if block.len() == NODE && block[0x20..0x30] == fsid[..] && at % (64 << 20) != 0 {
            nodes.entry(block.to_vec()).or_default().push(at);
        }
    }
    let mut sectors: HashMap<&[u8], Vec<usize>> =
        HashMap::from_iter(CONTENTS.chunks_exact(SECTOR).map(|s| (s, Vec::new())));
    for at in (1 << 20..bytes.len()).step_by(SECTOR) {
        if let Some(found) = sectors.get_mut(&bytes[at..at + SECTOR]) {
            found.push(at);
        }
    }
    let out: Vec<_> =
        nodes.into_values().chain(sectors.into_values()).filter(|c| c.len() == 2).collect();
    assert!(out.len() > 300, "{} things with two copies", out.len());
    out
}

static CONTENTS: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(contents);

fn read_everything(fs: &Filesystem) {
    let mut names: Vec<(Vec<u8>, InodeId)> = Vec::new();
    fs.readdir(fs.root(), 0, &mut |e| {
        names.push((e.name.to_vec(), e.id));
        true
    })
    .unwrap();
    assert_eq!(names.len(), 2003);
    for (_, id) in &names {
        fs.getattr(*id).unwrap();
    }
    let file = fs.lookup(fs.root(), b"file").unwrap();
    let mut buf = vec![0; CONTENTS.len()];
    assert_eq!(fs.read(file.id, 0, &mut buf).unwrap(), CONTENTS.len());
    assert!(buf == *CONTENTS);
}

#[test]
fn the_other_copy_serves_and_mends() {
    let dir = scratch();
    let image = dir.path().join("image");
    make(&image);
    let good = std::fs::read(&image).unwrap();
    for which in [0, 1] {
        let mut bad = good.clone();
        let hit: Vec<usize> = copies(&good).iter().map(|c| c[which]).collect();
        for at in &hit {
            bad[at + 1000] ^= 0x40;
        }
        std::fs::write(&image, &bad).unwrap();
        // A read-only file system reads around the damage and leaves it.
        let fs = open(&image, true);
        read_everything(&fs);
        fs.close().unwrap();
        drop(fs);
        assert!(std::fs::read(&image).unwrap() == bad, "a read-only file system writes nothing");
        // A writable one mends what it reads. The first copy is the one that is read first.
        let fs = open(&image, false);
        read_everything(&fs);
        let damaged = fs.stats().damaged_copies;
        fs.close().unwrap();
        drop(fs);
        let after = std::fs::read(&image).unwrap();
        let mended = hit.iter().filter(|at| after[**at + 1000] == good[**at + 1000]).count();
        if which == 0 {
            assert!(
                damaged > 0 && mended > 300,
                "{damaged} damaged nodes seen, {mended} of {} mended",
                hit.len()
            );
        }
    }
}

#[test]
fn without_a_good_copy_only_the_call_fails() {
    let dir = scratch();
    let image = dir.path().join("image");
    make(&image);
    let mut bytes = std::fs::read(&image).unwrap();
    // One sector of the file, in both copies.
    let victim = &CONTENTS[40 * SECTOR..41 * SECTOR];
    let hit: Vec<usize> = (1 << 20..bytes.len())
        .step_by(SECTOR)
        .filter(|at| bytes[*at..at + SECTOR] == *victim)
        .collect();
    assert_eq!(hit.len(), 2);
    for at in hit {
        bytes[at] ^= 1;
    }
    std::fs::write(&image, &bytes).unwrap();
    let fs = open(&image, false);
    let file = fs.lookup(fs.root(), b"file").unwrap().id;
    let mut buf = vec![0; SECTOR];
    let refused = fs.read(file, 40 * SECTOR as u64, &mut buf);
    assert!(matches!(refused, Err(Error::Corrupt { .. } | Error::Volume(_))), "{refused:?}");
    // Everything else goes on: the neighbours, and writing over the damage.
    assert_eq!(fs.read(file, 41 * SECTOR as u64, &mut buf).unwrap(), SECTOR);
    assert!(buf == CONTENTS[41 * SECTOR..42 * SECTOR]);
    fs.write(file, 40 * SECTOR as u64, victim).unwrap();
    fs.sync().unwrap();
    assert_eq!(fs.read(file, 40 * SECTOR as u64, &mut buf).unwrap(), SECTOR);
    assert!(buf == *victim);
    fs.close().unwrap();
}
