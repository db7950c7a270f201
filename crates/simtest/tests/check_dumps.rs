//! `larder check` of metadata dumps: it checks everything that they have, and says what it cannot
//! judge.
//!
//! A sound image's dump has nothing wrong, in every form in which btrfs-image restores one; what is
//! wrong with an image is found in its dump as well. `btrfs check` looks at the same dumps.

use anyhow::Result;
use larder_check::{Kind, Options, Report, Severity};
use larder_format::items::keys::{dir_index_key, inode_key};
use larder_format::{KeyType, MetadataDump, ObjectId};
use larder_simtest::damage::Damage;
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::oracle::{
    Fixture, KernelMount, LoopDevice, Need, btrfs, btrfs_check, flat_dump, metadata_dump,
    mkfs_btrfs, need, populate, scratch,
};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

const FS: ObjectId = ObjectId::FS_TREE;

fn needs_linux() -> bool {
    need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::BtrfsProgs])
}

fn check(image: Image) -> Report {
    let device = Arc::new(SimDevice::new(image).unrecorded());
    larder_check::check(&[device], &Options { data: true, ..Options::default() }, &|_| ())
        .expect("it can be checked")
}

fn errors(report: &Report) -> Vec<String> {
    let bad = report.findings.iter().filter(|f| f.severity() != Severity::Note);
    bad.map(|f| format!("{}: {:?} {:?}: {}", f.kind, f.tree, f.key, f.what)).collect()
}

/// Nothing wrong, and everything looked at but data.
#[track_caller]
fn assert_sound(report: &Report, form: MetadataDump, what: &str) {
    assert_eq!(errors(report), <[String; 0]>::default(), "{what}");
    let dump = report.dump.unwrap_or_else(|| panic!("{what}: not recognised"));
    assert!(what == "two devices" || !dump.rewritten, "{what}");
    assert_eq!(dump.form, form, "{what}");
    assert!(dump.not_judged()[0].contains("file data"), "{what}: {:?}", dump.not_judged());
    assert_eq!(report.stats.data_bytes, 0, "{what}");
    assert!(report.stats.inodes > 100, "{what}: {:?}", report.stats);
}

/// An image that the kernel filled; a log is left in it if that is wanted.
fn make(path: &Path, args: &[&str], options: &str, with_log: bool) -> Result<Image> {
    mkfs_btrfs(path, 256 << 20, args)?;
    let mount = KernelMount::image(path, &format!("commit=300,{options}"))?;
    populate(
        mount.path(),
        &Fixture { entries: 40, large_file: 1 << 20, fragments: 300, links: 30 },
    )?;
    let (tree, nested) = (mount.join("tree"), mount.join("tree/nested"));
    for subvolume in [&tree, &nested] {
        btrfs(&["subvolume".as_ref(), "create".as_ref(), subvolume.as_os_str()])?;
    }
    btrfs(&[
        "subvolume".as_ref(),
        "snapshot".as_ref(),
        tree.as_os_str(),
        mount.join("copy").as_os_str(),
    ])?;
    mount.sync()?;
    if with_log {
        for name in ["one", "two"] {
            std::fs::write(mount.join(name), vec![b'x'; 10_000])?;
            File::open(mount.join(name))?.sync_all()?;
        }
        return Ok(Image::from_file(path)?);
    }
    mount.unmount_clean()?;
    Ok(Image::from_file(path)?)
}

#[test]
fn dumps_of_sound_images_are_sound() {
    if !needs_linux() {
        return;
    }
    let kinds: [(&str, &[&str], &str, bool); 4] = [
        ("today's", &["-O", "block-group-tree"], "compress=zstd", false),
        ("with a log", &["-O", "^block-group-tree", "-m", "single"], "", true),
        ("mixed", &["--mixed", "-n", "4096", "-O", "mixed-bg,^block-group-tree"], "", false),
        (
            "old",
            &["-O", "^no-holes,^block-group-tree,^free-space-tree,^skinny-metadata,^extref"],
            "space_cache=v1",
            false,
        ),
    ];
    for (name, args, options, with_log) in kinds {
        let dir = scratch();
        let path = dir.path().join("image");
        let image = make(&path, args, options, with_log).unwrap();
        image.write_sparse(&path).unwrap();
        for args in [&["-c9"][..], &["-w"]] {
            let what = format!("{name}, {args:?}");
            let restored = metadata_dump(&path, args).unwrap();
            btrfs_check(&restored, false).assert_clean(&what);
            let report = check(Image::from_file(&restored).unwrap());
            assert_sound(&report, MetadataDump::Mapped, &what);
            assert_eq!(report.found(Kind::LogPresent), with_log, "{what}");
            assert!(report.found(Kind::DumpWithoutMirror), "{what}: {:?}", report.counts);
            assert!(!report.dump.unwrap().names_hidden, "{what}");
        }
        let what = format!("{name}, flat");
        let report = check(flat_dump(&image).unwrap());
        assert_sound(&report, MetadataDump::Flat, &what);
        assert_eq!(report.found(Kind::LogPresent), with_log, "{what}");
    }
}

/// Names that were replaced by others of their length are no damage; a lost entry still is.
#[test]
fn hidden_names_are_not_judged() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let path = dir.path().join("image");
    let image = make(&path, &[], "", false).unwrap();
    for args in ["-s", "-ss"] {
        let restored = metadata_dump(&path, &[args]).unwrap();
        let restored = Image::from_file(&restored).unwrap();
        let report = check(restored.clone());
        assert_sound(&report, MetadataDump::Mapped, args);
        let dump = report.dump.unwrap();
        assert!(
            dump.names_hidden && dump.not_judged().iter().any(|n| n.starts_with("names")),
            "{args}"
        );

        let mut d = Damage::on(&restored).unwrap();
        let (entry, _) = d.first(FS, |key, _| key.kind == KeyType::DIR_INDEX).unwrap();
        d.item(FS, entry).delete().unwrap();
        let report = check(d.into_image());
        assert!(report.found(Kind::InodeRefWithoutEntry), "{args}: {:?}", report.counts);
    }
    // One top directory with a wrong name is damage.
    let mut d = Damage::on(&image).unwrap();
    d.item(FS, larder_format::items::keys::inode_ref_key(ObjectId(256), ObjectId(256)))
        .set(10, b"xx")
        .unwrap();
    d.edit_super(|sb| {
        sb.set_super_flags(sb.super_flags() | larder_format::SuperFlags::METADUMP_V2)
    })
    .unwrap();
    assert!(check(d.into_image()).found(Kind::RootDirectory));
}

/// What is wrong with an image is wrong in its dump, and found there.
#[test]
fn damage_is_found_in_dumps() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let path = dir.path().join("image");
    let image = make(&path, &["-O", "^block-group-tree"], "", false).unwrap();
    let plant = |plant: &dyn Fn(&mut Damage) -> Result<()>| {
        let mut d = Damage::on(&image).unwrap();
        plant(&mut d).unwrap();
        d.into_image()
    };
    type Plant = dyn Fn(&mut Damage) -> Result<()>;
    let plants: [(Kind, &Plant); 4] = [
        (Kind::InodeLinkCount, &|d| d.item(FS, inode_key(ObjectId(257))).set_u32(40, 7)),
        (Kind::DirIndexMissing, &|d| d.item(FS, dir_index_key(ObjectId(256), 2)).delete()),
        (Kind::ChecksumMissing, &|d| {
            let (key, _) = d.first(ObjectId::CSUM_TREE, |_, _| true)?;
            d.item(ObjectId::CSUM_TREE, key).delete()
        }),
        (Kind::ExtentItemMissing, &|d| {
            let (key, _) =
                d.first(ObjectId::EXTENT_TREE, |key, _| key.kind == KeyType::EXTENT_ITEM)?;
            d.item(ObjectId::EXTENT_TREE, key).delete()
        }),
    ];
    for (kind, how) in plants {
        let damaged = plant(how);
        damaged.write_sparse(&path).unwrap();
        let mapped = check(Image::from_file(&metadata_dump(&path, &[]).unwrap()).unwrap());
        assert!(mapped.found(kind), "{kind}: {:?}", mapped.counts);
        let flat = check(flat_dump(&damaged).unwrap());
        assert!(flat.found(kind), "{kind}: {:?}", flat.counts);
        let itself: Vec<_> = check(damaged).counts.into_keys().collect();
        for dump in [&mapped, &flat] {
            let kinds = dump.counts.keys().filter(|k| **k != Kind::DumpWithoutMirror);
            assert!(
                kinds.clone().eq(&itself),
                "{kind}: {:?}, in the image {itself:?}",
                dump.counts
            );
        }
    }
}

/// A dump of several devices is restored to one: its chunks are made anew.
#[test]
fn a_dump_of_two_devices_is_sound() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    File::create(&second).unwrap().set_len(256 << 20).unwrap();
    let second = LoopDevice::attach(&second).unwrap();
    let other = second.path().display().to_string();
    mkfs_btrfs(&first, 256 << 20, &["-f", "-m", "single", "-d", "single", &other]).unwrap();
    let mount = KernelMount::image(&first, &format!("device={other}")).unwrap();
    populate(
        mount.path(),
        &Fixture { entries: 40, large_file: 1 << 20, fragments: 300, links: 30 },
    )
    .unwrap();
    mount.unmount_clean().unwrap();
    let device = LoopDevice::attach(&first).unwrap();
    let node = dir.path().join("node");
    std::os::unix::fs::symlink(device.path(), &node).unwrap();
    let restored = metadata_dump(&node, &[]).unwrap();
    btrfs_check(&restored, false).assert_clean("two devices");
    let report = check(Image::from_file(&restored).unwrap());
    assert_sound(&report, MetadataDump::Mapped, "two devices");
    let dump = report.dump.unwrap();
    assert!(dump.rewritten && dump.not_judged().iter().any(|n| n.contains("several devices")));
}
