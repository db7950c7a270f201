//! File data in both directions: Larder reads what Linux wrote, holes included. Larder then changes
//! it (inline, compressed, preallocated and shared extents are cut to pieces), and the kernel reads
//! the same, with a clean check.

use larder_fs::{FileKind, Filesystem, InodeId, OpenOptions, SetAttr};
use larder_simtest::oracle::{
    Aspects, EngineTree, Fixture, KernelMount, Manifest, Need, StdTree, btrfs_check, kernel_images,
    manifest, need, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

fn open(image: &Path, read_only: bool) -> Arc<Filesystem> {
    let mode = if read_only { OpenMode::Read } else { OpenMode::Write };
    let device = FileDevice::open(image, mode).unwrap();
    let options = OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn files(fs: &Filesystem, dir: InodeId, out: &mut Vec<InodeId>) {
    let mut entries = Vec::new();
    fs.readdir(dir, 0, &mut |e| {
        if e.name != b"." && e.name != b".." {
            entries.push((e.id, e.kind));
        }
        true
    })
    .unwrap();
    for (id, kind) in entries {
        match kind {
            FileKind::Directory if id.subvol == dir.subvol => files(fs, id, out),
            FileKind::Regular => out.push(id),
            _ => {}
        }
    }
}

/// Fails where the two differ.
fn assert_same(what: &str, ours: &Manifest, theirs: &Manifest, aspects: Aspects) {
    let mut differences = ours.differences(theirs, aspects);
    // Linux takes a file with as many bytes allocated as it is long for one without holes, unless
    // its flags say that it was preallocated; a clone of a preallocated file lacks the flag. Its
    // unwritten part is a hole here.
    differences
        .retain(|d| d.path != b"reflink/prealloc-copy" || !d.what.starts_with("data ranges"));
    assert!(
        differences.is_empty(),
        "{what}: {} differ, first {}",
        differences.len(),
        differences[0]
    );
}

/// Changes a file in one of several ways, and checks that it reads as bytes would.
fn change(fs: &Filesystem, id: InodeId, n: usize) {
    let size = usize::try_from(fs.getattr(id).unwrap().size).unwrap();
    if size > 64 << 20 {
        // Sparse to the sky: only its edges.
        fs.write(id, 10, b"edge").unwrap();
        fs.setattr(id, &SetAttr { size: Some(size as u64 - 3), ..SetAttr::default() }).unwrap();
        return;
    }
    let mut want = vec![0; size];
    assert_eq!(fs.read(id, 0, &mut want).unwrap(), size);
    let mut write = |at: usize, len: usize| {
        let data: Vec<u8> = (0..len).map(|i| (i / 10 + n) as u8).collect();
        fs.write(id, at as u64, &data).unwrap();
        let end = want.len().max(at + len);
        want.resize(end, 0);
        want[at..at + len].copy_from_slice(&data);
    };
    match n % 5 {
        0 => write(size / 3, 5000),
        1 => write(size / 2, 1),
        2 => write(size + 9000, 100),
        3 => {
            write(0, 4096.min(size.max(1)));
            write(size, 3);
        }
        _ => {}
    }
    let cut = match n % 7 {
        0 => Some(want.len() / 2 + 1),
        1 => Some(want.len() + 5001),
        2 => Some(0),
        _ => None,
    };
    if let Some(cut) = cut {
        fs.setattr(id, &SetAttr { size: Some(cut as u64), ..SetAttr::default() }).unwrap();
        want.resize(cut, 0);
    }
    let mut back = vec![0xaa; want.len() + 1];
    assert_eq!(fs.read(id, 0, &mut back).unwrap(), want.len());
    assert!(back[..want.len()] == want, "file {} was changed in way {n}", id.ino);
}

#[test]
fn data_goes_both_ways() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    for variant in kernel_images() {
        let what = &variant.name;
        let image = dir.path().join(what);
        variant.make(&image, 256 << 20).unwrap();
        let mount = KernelMount::image(&image, &variant.mount).unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.unmount_clean().unwrap();
        let mount = KernelMount::image_read_only(&image, "noatime").unwrap();
        let theirs = manifest(&StdTree::new(mount.path())).unwrap();
        mount.unmount_clean().unwrap();

        let aspects = Aspects { inode_numbers: false, ..Aspects::same_image() };
        let fs = open(&image, true);
        let ours = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);
        assert_same(what, &ours, &theirs, aspects);

        let fs = open(&image, false);
        let mut all = Vec::new();
        files(&fs, fs.root(), &mut all);
        all.sort();
        all.dedup();
        let mut changed = 0;
        for (n, id) in all.iter().enumerate() {
            let attr = fs.getattr(*id).unwrap();
            if attr.flags & 0x60 == 0 {
                change(&fs, *id, n);
                changed += 1;
            }
            if n % 200 == 199 {
                fs.sync().unwrap();
            }
        }
        assert!(changed > 400, "{what}: {changed} files changed");
        fs.sync().unwrap();
        let ours = manifest(&EngineTree(&fs)).unwrap();
        fs.close().unwrap();
        drop(fs);
        btrfs_check(&image, true).assert_clean(what);
        let mount = KernelMount::image_read_only(&image, "noatime").unwrap();
        let theirs = manifest(&StdTree::new(mount.path())).unwrap();
        mount.unmount_clean().unwrap();
        assert_same(what, &ours, &theirs, aspects);
        std::fs::remove_file(&image).unwrap();
    }
}
