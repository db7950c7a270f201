//! Images go both ways: the engine reads what Linux made, and Linux reads what the engine changed,
//! on every kind of single-device image.

use larder_fs::{
    Attr, Error, FileKind, Filesystem, InodeId, NewInode, OpenOptions, RenameMode, SetAttr,
    SetTime, Timestamp, XattrMode,
};
use larder_simtest::oracle::{
    Aspects, EngineTree, Fixture, ImageVariant, KernelMount, Manifest, Need, StdTree, btrfs_check,
    compare_sources, copy_image, kernel_images, kernel_verdict, manifest, need, populate, scratch,
};
use larder_volume::file::{FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

fn made_by_linux(variant: &ImageVariant, image: &Path) {
    variant.make(image, 256 << 20).unwrap();
    let mount = KernelMount::image(image, &variant.mount).expect(&variant.name);
    populate(mount.path(), &Fixture::small()).expect(&variant.name);
    mount.unmount_clean().expect(&variant.name);
}

fn open(image: &Path, read_only: bool) -> Arc<Filesystem> {
    let mode = if read_only { OpenMode::Read } else { OpenMode::Write };
    let device = FileDevice::open(image, mode).unwrap();
    let options = OpenOptions { read_only, commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options)
        .unwrap_or_else(|e| panic!("{}: {e}", image.display()))
}

fn assert_same(name: &str, a: &Manifest, b: &Manifest) {
    let differences: Vec<String> =
        a.differences(b, Aspects::same_image()).iter().map(ToString::to_string).collect();
    assert!(
        differences.is_empty(),
        "{name}: {} differences:\n{}",
        differences.len(),
        differences[..differences.len().min(20)].join("\n")
    );
}

#[test]
fn the_engine_reads_what_linux_made() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    for variant in kernel_images() {
        made_by_linux(&variant, &image);
        let fs = open(&image, true);
        let engine =
            manifest(&EngineTree(&fs)).unwrap_or_else(|e| panic!("{}: {e:#}", variant.name));
        fs.close().unwrap();
        drop(fs);
        let mount = KernelMount::image_read_only(&image, "").unwrap();
        let linux = manifest(&StdTree::new(mount.path())).unwrap();
        mount.unmount_clean().unwrap();
        assert_same(&variant.name, &linux, &engine);
    }
}

#[test]
fn linux_reads_what_the_engine_changed() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    let copy = dir.path().join("copy");
    for variant in kernel_images() {
        made_by_linux(&variant, &image);
        let name = &variant.name;
        let fs = open(&image, false);
        // In two transactions, so that blocks of the first are shared with or freed by the second.
        change(&fs, 0).unwrap_or_else(|e| panic!("{name}: {e}"));
        fs.sync().unwrap();
        change(&fs, 1).unwrap_or_else(|e| panic!("{name}: {e}"));
        fs.sync().unwrap();
        let meant = manifest(&EngineTree(&fs)).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        fs.close().unwrap();
        drop(fs);
        btrfs_check(&image, true).assert_clean(name);
        // As the engine finds it again, and as the kernel does.
        let fs = open(&image, true);
        let again = manifest(&EngineTree(&fs)).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        fs.close().unwrap();
        drop(fs);
        assert_same(&format!("{name}, opened again"), &meant, &again);
        copy_image(&image, &copy).unwrap();
        let linux = kernel_verdict(&copy).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        assert_same(&format!("{name}, kernel"), &linux, &meant);
    }
}

#[test]
fn an_image_goes_back_and_forth() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    made_by_linux(&kernel_images()[0], &image);
    for round in 0..6 {
        let fs = open(&image, false);
        change(&fs, round).unwrap();
        fs.close().unwrap();
        drop(fs);
        let mount = KernelMount::image(&image, "noatime").unwrap();
        std::fs::write(mount.join(format!("linux-{round}")), vec![round as u8; 70_000]).unwrap();
        if round > 0 {
            std::fs::remove_file(mount.join(format!("larder-{}/200000", round - 1))).unwrap();
            std::fs::remove_file(mount.join(format!("linux-{}", round - 1))).unwrap();
        }
        mount.unmount_clean().unwrap();
        btrfs_check(&image, true).assert_clean(&format!("round {round}"));
    }
    let fs = open(&image, true);
    let mount = KernelMount::image_read_only(&image, "").unwrap();
    let differences =
        compare_sources(&StdTree::new(mount.path()), &EngineTree(&fs), Aspects::same_image())
            .unwrap();
    assert_eq!(differences, []);
}

fn find(fs: &Filesystem, path: &str) -> Result<Attr, Error> {
    let mut attr = fs.getattr(fs.root())?;
    for name in path.split('/').filter(|n| !n.is_empty()) {
        attr = fs.lookup(attr.id, name.as_bytes())?;
    }
    Ok(attr)
}

fn make(fs: &Filesystem, dir: InodeId, name: &str, kind: FileKind) -> Result<InodeId, Error> {
    let target: &[u8] = if kind == FileKind::Symlink { b"where/it/leads" } else { b"" };
    let rdev = if kind == FileKind::BlockDevice { 259 << 20 | 70_000 } else { 0 };
    let perm = if kind == FileKind::Directory { 0o755 } else { 0o640 };
    let new = NewInode { kind, perm, uid: 1000, gid: 100, rdev, target, xattrs: &[] };
    Ok(fs.create(dir, name.as_bytes(), &new)?.id)
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|n| (n.wrapping_mul(seed.wrapping_mul(2) + 7) >> 3) as u8 ^ seed as u8)
        .collect()
}

/// One of everything, on new files and on those that the fixture left in every representation.
/// `round` makes repeated calls differ.
fn change(fs: &Filesystem, round: u64) -> Result<(), Error> {
    let top = make(fs, fs.root(), &format!("larder-{round}"), FileKind::Directory)?;
    make_files(fs, top, round)?;
    let file = fs.lookup(top, b"4097")?.id;
    change_names(fs, top, file)?;
    change_attributes(fs, top, file)?;
    change_data(fs, round)?;
    write_far(fs, top, round)?;
    copy(fs, top)?;
    remove_shared(fs, round)?;
    // A read-only snapshot refuses.
    let frozen = find(fs, "volumes/frozen/file1")?.id;
    assert!(matches!(fs.write(frozen, 0, b"x"), Err(Error::SubvolumeReadOnly)));
    // Opened, unlinked, still written to, let go.
    let doomed = make(fs, top, "doomed", FileKind::Regular)?;
    fs.hold(doomed);
    fs.unlink(top, b"doomed")?;
    fs.write(doomed, 0, &bytes(1, 100_000))?;
    fs.release(doomed, 1);
    Ok(())
}

fn make_files(fs: &Filesystem, top: InodeId, round: u64) -> Result<(), Error> {
    for len in [0usize, 1, 100, 2048, 2049, 4096, 4097, 200_000, 2_000_000] {
        let id = make(fs, top, &len.to_string(), FileKind::Regular)?;
        fs.write(id, 0, &bytes(round + len as u64, len))?;
    }
    for n in 0..300 {
        make(fs, top, &format!("entry-{n}"), FileKind::Regular)?;
    }
    for (name, kind) in [
        ("symlink", FileKind::Symlink),
        ("block", FileKind::BlockDevice),
        ("char", FileKind::CharDevice),
        ("fifo", FileKind::Fifo),
        ("socket", FileKind::Socket),
    ] {
        make(fs, top, name, kind)?;
    }
    Ok(())
}

/// Names are linked, moved, exchanged, replaced, removed.
fn change_names(fs: &Filesystem, top: InodeId, file: InodeId) -> Result<(), Error> {
    for n in 0..40 {
        fs.link(file, top, format!("a link with a name of some length, number {n}").as_bytes())?;
    }
    fs.rename(top, b"entry-0", top, b"renamed", RenameMode::NoReplace)?;
    fs.rename(top, b"entry-1", top, b"entry-2", RenameMode::Replace)?;
    fs.rename(top, b"entry-3", top, b"symlink", RenameMode::Exchange)?;
    fs.rename(top, b"entry-4", top, b"moved", RenameMode::Whiteout { uid: 0, gid: 0 })?;
    for n in (10..300).step_by(3) {
        fs.unlink(top, format!("entry-{n}").as_bytes())?;
    }
    let sub = make(fs, top, "sub", FileKind::Directory)?;
    make(fs, sub, "below", FileKind::Directory)?;
    fs.rmdir(sub, b"below")?;
    assert!(matches!(fs.rmdir(fs.root(), b"names"), Err(Error::NotEmpty)));
    Ok(())
}

fn change_attributes(fs: &Filesystem, top: InodeId, file: InodeId) -> Result<(), Error> {
    let when = SetTime::To(Timestamp { sec: -5, nsec: 999_999_999 });
    let changes = SetAttr {
        perm: Some(0o4711),
        uid: Some(7),
        gid: Some(8),
        mtime: Some(when),
        ..SetAttr::default()
    };
    fs.setattr(fs.lookup(top, b"100")?.id, &changes)?;
    for n in 0..30 {
        fs.setxattr(
            file,
            format!("user.attribute-{n}").as_bytes(),
            &bytes(n, 100),
            XattrMode::Set,
        )?;
    }
    fs.removexattr(file, b"user.attribute-3")?;
    Ok(())
}

/// Data in every shape of extent that the fixture has.
fn change_data(fs: &Filesystem, round: u64) -> Result<(), Error> {
    let size = |len| SetAttr { size: Some(len), ..SetAttr::default() };
    for path in [
        "inline/100",
        "inline/2048",
        "regular/65537",
        "regular/overwritten",
        "regular/large",
        "prealloc/untouched",
        "prealloc/partly-written",
        "prealloc/beyond-the-end",
        "sparse/islands",
        "sparse/huge",
        "compressed/zlib/one-extent",
        "compressed/lzo/inline",
        "compressed/zstd/mixed",
        "reflink/source",
        "reflink/pieces",
        "reflink/zstd/source",
        "nodatacow/file",
        "volumes/origin/file50",
        "volumes/copy/file50",
        "volumes/copy-of-copy/file60",
        "volumes/origin/nested/in-nested",
    ] {
        let found = find(fs, path)?;
        fs.write(found.id, 50 + round * 4096, &bytes(round + 90, 6000))?;
        fs.fsync(found.id, round.is_multiple_of(2))?;
    }
    for (path, len) in [
        ("inline/1", 5000 + round * 3000),
        ("inline/3000", 10 - round),
        ("regular/200000", 100_000 - round * 5000),
        ("sparse/punched", 77_777 + round * 30_000),
        ("compressed/lzo/odd-length", 200_001 - round * 9001),
        ("reflink/whole", 1_060_000 - round * 10_000),
        ("volumes/copy/file33", 12_345 + round),
    ] {
        fs.setattr(find(fs, path)?.id, &size(len))?;
    }
    Ok(())
}

fn write_far(fs: &Filesystem, top: InodeId, round: u64) -> Result<(), Error> {
    let far = make(fs, top, "far", FileKind::Regular)?;
    fs.write(far, (1 << 40) + 5, b"far out")?;
    fs.write(far, 10_000, &bytes(round, 20_000))?;
    Ok(())
}

fn copy(fs: &Filesystem, top: InodeId) -> Result<(), Error> {
    let source = find(fs, "regular/large")?;
    let target = make(fs, top, "copied", FileKind::Regular)?;
    let mut done = 0;
    while done < source.size {
        match fs.copy_range(source.id.at(done), target.at(done), source.size - done)? {
            0 => break,
            n => done += n,
        }
    }
    assert_eq!(done, source.size);
    Ok(())
}

/// One side of shared blocks and items is removed.
fn remove_shared(fs: &Filesystem, round: u64) -> Result<(), Error> {
    for n in (0..30).filter(|n| n % 6 == round % 6) {
        fs.unlink(find(fs, "volumes/copy")?.id, format!("new{n}").as_bytes())?;
    }
    for n in (0..450).filter(|n| n % 6 == round % 6) {
        fs.unlink(find(fs, "links")?.id, format!("{n:0>200}").as_bytes())?;
    }
    for n in (2..300).filter(|n| n % 50 > 1 && n % 6 == round % 6) {
        fs.unlink(find(fs, "many")?.id, format!("e{n}").as_bytes())?;
    }
    Ok(())
}
