//! Images that Larder must refuse, each with a message that says why, and devices that are full.

mod common;

use common::{inside, larder};
use larder_format::superblock::Superblock;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_volume::superblock::{SuperCopies, write_superblocks};
use larder_volume::{Device, FileDevice, OpenMode, read_superblock};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn image(dir: &Path) -> PathBuf {
    let path = dir.join("a.img");
    larder(args!["mkfs", "--force", "--size", "128M", &path]).ok();
    path
}

type Change = fn(&mut Superblock);

/// Changes the superblock, checksums redone.
fn with_super(image: &Path, change: impl FnOnce(&mut Superblock)) {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let mut sb = read_superblock(&device).unwrap();
    change(&mut sb);
    write_superblocks(&device, &sb, SuperCopies::All).unwrap();
    device.flush().unwrap();
}

#[test]
fn features_that_larder_has_not_are_named() {
    let dir = scratch();
    let cases: [(&str, Change); 6] = [
        ("zoned", |sb| sb.incompat_flags.set(sb.incompat_flags.get() | 0x1000)),
        ("extent-tree-v2", |sb| sb.incompat_flags.set(sb.incompat_flags.get() | 0x2000)),
        ("bit 40", |sb| sb.incompat_flags.set(sb.incompat_flags.get() | 1 << 40)),
        ("2 devices", |sb| sb.num_devices.set(2)),
        ("sector", |sb| sb.sectorsize.set(8192)),
        ("node", |sb| sb.nodesize.set(8191)),
    ];
    for (name, change) in cases {
        let img = image(dir.path());
        with_super(&img, change);
        larder(args!["ls", &img]).fails(2, name);
        larder(args!["mkdir", inside(&img, "/d")]).fails(2, name);
    }
    // Unknown features that only matter to writers: readers are let in.
    let img = image(dir.path());
    with_super(&img, |sb| sb.compat_ro_flags.set(sb.compat_ro_flags.get() | 1 << 40));
    larder(args!["ls", &img]).ok();
    larder(args!["mkdir", inside(&img, "/d")]).fails(2, "bit 40");
    let shown = larder(args!["inspect", "super", "--json", &img]).ok().json();
    assert!(shown[0]["larder"].as_str().unwrap().starts_with("read-only"));
    let backup = &shown[0]["backup_roots"]
        [usize::try_from(shown[0]["current_backup_slot"].as_u64().unwrap()).unwrap()];
    assert_eq!(
        (&backup["generation"], &backup["root"]),
        (&shown[0]["generation"], &shown[0]["root"])
    );
}

#[test]
fn damage_is_refused_with_its_place() {
    let dir = scratch();
    // Truncated.
    let img = image(dir.path());
    std::fs::OpenOptions::new().write(true).open(&img).unwrap().set_len(100 << 20).unwrap();
    larder(args!["ls", &img]).fails(2, "truncated");
    // A superblock with a wrong checksum.
    let img = image(dir.path());
    let file = std::fs::OpenOptions::new().write(true).open(&img).unwrap();
    file.write_all_at(b"?", 65536 + 0x70).unwrap();
    larder(args!["ls", &img]).fails(2, "checksum");
    // Both copies of the root tree gone.
    let img = image(dir.path());
    let root =
        larder(args!["inspect", "tree", "--json", &img]).ok().json()[0]["bytenr"].as_u64().unwrap();
    let chunks = larder(args!["inspect", "chunks", "--json", &img]).ok().json();
    let file = std::fs::OpenOptions::new().write(true).open(&img).unwrap();
    for stripe in chunks[2]["stripes"].as_array().unwrap() {
        let at = stripe["offset"].as_u64().unwrap() + root - chunks[2]["logical"].as_u64().unwrap();
        file.write_all_at(&[0; 4096], at).unwrap();
    }
    let run = larder(args!["ls", &img]);
    assert_eq!(run.code, 2, "{}", run.err);
    assert!(run.err.contains(&root.to_string()), "{}", run.err);
    assert!(
        run.err.contains("hint: `larder check`") && run.err.contains("`larder restore`"),
        "{}",
        run.err
    );
    // One copy gone: read from the other, and written.
    let img = image(dir.path());
    let file = std::fs::OpenOptions::new().write(true).open(&img).unwrap();
    let at = chunks[2]["stripes"][0]["offset"].as_u64().unwrap();
    file.write_all_at(&vec![0x55; 10 * 16384], at).unwrap();
    larder(args!["mkdir", inside(&img, "/still")]).ok();
    assert_eq!(larder(args!["ls", &img]).ok().text(), "still\n");
}

#[test]
fn several_devices_and_raid_are_named() {
    if !need(&[Need::MkfsBtrfs]) {
        return;
    }
    let dir = scratch();
    let (a, b) = (dir.path().join("one"), dir.path().join("two"));
    for path in [&a, &b] {
        std::fs::File::create(path).unwrap().set_len(256 << 20).unwrap();
    }
    let made = Command::new("mkfs.btrfs")
        .args(["-q", "-f", "-d", "raid1", "-m", "raid1"])
        .args([&a, &b])
        .output();
    assert!(made.unwrap().status.success());
    larder(args!["ls", &a]).ok();
    larder(args!["mkdir", inside(&a, "/d")]).ok();
    std::fs::remove_file(&b).unwrap();
    larder(args!["mkdir", inside(&a, "/e")]).fails(2, "missing");
}

#[test]
fn a_full_image_says_so_and_can_be_emptied() {
    let dir = scratch();
    let img = image(dir.path());
    let (big, tree) = (dir.path().join("big"), dir.path().join("tree"));
    let noise: Vec<u8> =
        (0..70u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::create_dir(&tree).unwrap();
    for (n, part) in noise.chunks(1 << 20).enumerate() {
        std::fs::write(tree.join(format!("{n:02}")), part).unwrap();
    }
    larder(args!["cp", "-r", &tree, inside(&img, "/one")]).fails(1, "no space");
    // What has arrived is whole.
    let whole = larder(args!["ls", "--json", inside(&img, "/one")]).ok().json();
    let sizes: Vec<u64> =
        whole.as_array().unwrap().iter().map(|e| e["size"].as_u64().unwrap()).collect();
    assert!(!sizes.is_empty() && sizes.iter().all(|size| *size == 1 << 20), "{sizes:?}");
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(&img, true).assert_clean("full");
    }
    larder(args!["rm", "-r", inside(&img, "/one")]).ok();
    assert_eq!(larder(args!["ls", &img]).ok().text(), "");
    std::fs::write(&big, vec![7; 5 << 20]).unwrap();
    larder(args!["cp", &big, inside(&img, "/two")]).ok();
    assert!(larder(args!["cat", inside(&img, "/two")]).ok().out == vec![7; 5 << 20]);
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(&img, true).assert_clean("emptied");
    }
}
