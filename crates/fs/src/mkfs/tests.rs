//! What can be checked without the kernel: structure, determinism, refusals. In the end-to-end
//! tests the kernel and btrfs-progs look at the same images.

use super::*;
use crate::Timestamp;
use larder_format::Physical;
use larder_format::node::NodeView;
use larder_volume::{FileDevice, OpenMode, read_all_superblocks, read_superblock};
use std::process::Command;

const MIB: u64 = 1 << 20;

fn device(dir: &tempfile::TempDir, size: u64) -> FileDevice {
    FileDevice::create(dir.path().join("img"), size).unwrap()
}

fn fixed() -> MkfsOptions {
    let time = Some(Timestamp { sec: 1_700_000_000, nsec: 0 });
    MkfsOptions {
        uuid: Some([0x42; 16]),
        time,
        label: b"pantry".to_vec(),
        ..MkfsOptions::default()
    }
}

#[test]
fn a_large_image_takes_little_disk() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let d = device(&dir, 8 << 30);
    let report = mkfs(&d, &MkfsOptions::default()).unwrap();
    assert_eq!(
        (report.total_bytes, report.bytes_used, report.nodesize),
        (8 << 30, 10 * 16384, 16384)
    );
    let blocks = std::fs::metadata(d.path()).unwrap().blocks() * 512;
    assert!(blocks <= 512 << 10, "{blocks} bytes of disk for an empty file system");
}

#[test]
fn the_superblock_and_its_mirror_are_right() {
    let dir = tempfile::tempdir().unwrap();
    let d = device(&dir, 300 * MIB + 5000);
    mkfs(&d, &fixed()).unwrap();
    let copies = read_all_superblocks(&d);
    assert_eq!(copies.len(), 2);
    for copy in copies {
        let sb = copy.content.unwrap();
        assert_eq!((sb.bytenr.get(), sb.label()), (copy.at.0, &b"pantry"[..]));
        assert_eq!((sb.total_bytes(), sb.fsid), (300 * MIB + 4096, [0x42; 16]));
        assert_eq!(sb.support(), larder_format::superblock::Support::ReadWrite);
        assert_eq!(sb.current_backup_slot(), Some(0));
    }
    assert_eq!(recognise(&d).unwrap(), "a btrfs file system labelled \"pantry\"");
}

#[test]
fn the_same_uuid_and_time_give_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut images = Vec::new();
    for old in [0u8, 0xee] {
        let d = device(&dir, 109 * MIB);
        // Nothing of what was there before must show.
        for at in [0, 65536, 8 * MIB, 64 * MIB, 109 * MIB - 4096] {
            d.write_at(Physical(at), &[old; 4096]).unwrap();
        }
        mkfs(&d, &MkfsOptions { force: true, ..fixed() }).unwrap();
        drop(d);
        images.push(std::fs::read(dir.path().join("img")).unwrap());
    }
    assert!(images[0] == images[1]);
    let d = FileDevice::open(dir.path().join("img"), OpenMode::Read).unwrap();
    let one = read_superblock(&d).unwrap();
    drop(d);
    let d = device(&dir, 109 * MIB);
    mkfs(&d, &MkfsOptions { uuid: None, force: true, ..fixed() }).unwrap();
    let two = read_superblock(&d).unwrap();
    assert!(one.fsid != two.fsid && one.dev_item.uuid != two.dev_item.uuid);
}

#[test]
fn something_there_is_refused_unless_forced() {
    let dir = tempfile::tempdir().unwrap();
    let d = device(&dir, 200 * MIB);
    mkfs(&d, &MkfsOptions::default()).unwrap();
    let before = read_superblock(&d).unwrap();
    let text = mkfs(&d, &fixed()).unwrap_err().to_string();
    assert!(text.contains("already holds a btrfs file system"), "{text}");
    assert!(*read_superblock(&d).unwrap() == *before, "a refusal changes nothing");
    mkfs(&d, &MkfsOptions { force: true, ..fixed() }).unwrap();
    assert_eq!(read_superblock(&d).unwrap().fsid, [0x42; 16]);
}

#[test]
fn impossible_options_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let d = device(&dir, 108 * MIB);
    let mixed = Features { mixed: true, ..Features::default() };
    let cases = [
        (MkfsOptions::default(), "too small"),
        (MkfsOptions { nodesize: Some(5000), ..fixed() }, "node size 5000"),
        (MkfsOptions { nodesize: Some(2048), ..fixed() }, "node size 2048"),
        (MkfsOptions { nodesize: Some(16384), features: mixed, ..fixed() }, "nodes of 4096"),
        (
            MkfsOptions {
                metadata: Some(Profile::Dup),
                data: Some(Profile::Single),
                features: mixed,
                ..fixed()
            },
            "equal profiles",
        ),
        (
            MkfsOptions { label: vec![b'x'; 256], metadata: Some(Profile::Single), ..fixed() },
            "label",
        ),
        (
            MkfsOptions { label: b"a\nb".to_vec(), metadata: Some(Profile::Single), ..fixed() },
            "label",
        ),
        (MkfsOptions { uuid: Some([0; 16]), metadata: Some(Profile::Single), ..fixed() }, "uuid"),
    ];
    for (options, want) in cases {
        let text = mkfs(&d, &options).unwrap_err().to_string();
        assert!(text.contains(want), "{want}: {text}");
    }
    assert_eq!(recognise(&d), None);
    let mut first = vec![1; MIB as usize];
    d.read_at(Physical(0), &mut first).unwrap();
    assert!(first.iter().all(|b| *b == 0));
}

#[test]
fn every_node_size_and_feature_set_packs() {
    let dir = tempfile::tempdir().unwrap();
    for nodesize in [4096, 8192, 16384, 32768, 65536] {
        for list in ["", "^bgt", "^bgt,^fst", "^bgt,^no-holes", "^skinny-metadata,^extref"] {
            let d = device(&dir, 109 * MIB);
            let mut features = Features::default();
            features.apply(list).unwrap();
            let options = MkfsOptions {
                nodesize: Some(nodesize),
                features,
                force: true,
                ..MkfsOptions::default()
            };
            mkfs(&d, &options).unwrap();
            let plan = Plan::new(&[109 * MIB], &options).unwrap();
            let image = build::build(&plan);
            // Only the root tree with 4 KiB nodes and a block-group tree needs a second level.
            let two_levels = nodesize == 4096 && features.block_group_tree;
            for (id, tree) in &image.trees {
                let level = u8::from(two_levels && *id == ObjectId::ROOT_TREE);
                assert_eq!(
                    (tree.level, tree.blocks),
                    (level, 1 + 2 * u64::from(level)),
                    "tree {id}"
                );
            }
            let mut seen = std::collections::BTreeSet::new();
            for (at, block) in &image.blocks {
                let view = NodeView(block);
                assert_eq!(view.bytenr(), *at);
                assert!(view.csum_matches(plan.csum));
                assert!(seen.insert(*at), "two blocks at {at}");
            }
        }
    }
}

/// Runs `btrfs check`, which must find nothing at all. Returns false if it is not installed.
fn checked(path: &std::path::Path) -> bool {
    let Ok(out) = Command::new("btrfs").args(["check", "--check-data-csum"]).arg(path).output()
    else {
        assert!(std::env::var_os("LARDER_REQUIRE_ORACLES").is_none(), "needs btrfs-progs");
        eprintln!("skipped: needs btrfs-progs");
        return false;
    };
    let text = [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
    let bad = text.lines().any(|l| {
        let l = l.to_lowercase();
        ["error", "warning", "wrong", "mismatch", "corrupt", "invalid", "missing"]
            .iter()
            .any(|w| l.contains(w))
            && !l.contains("no error found")
    });
    assert!(out.status.success() && !bad, "{}:\n{text}", path.display());
    true
}

#[test]
fn btrfs_check_is_content_with_every_combination() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("img");
    let profiles = [Profile::Single, Profile::Dup];
    let mut combinations = Vec::new();
    for metadata in profiles {
        for data in profiles {
            for list in ["", "^bgt", "^bgt,^fst", "^bgt,^no-holes", "^skinny-metadata", "^extref"] {
                for nodesize in [4096, 16384, 65536] {
                    combinations.push((metadata, data, list, Some(nodesize), CsumType::Crc32c));
                }
            }
        }
        for list in ["mixed-bg", "mixed-bg,^bgt", "mixed-bg,^bgt,^fst"] {
            combinations.push((metadata, metadata, list, None, CsumType::Crc32c));
        }
    }
    for csum in [CsumType::XxHash64, CsumType::Sha256, CsumType::Blake2b] {
        combinations.push((Profile::Dup, Profile::Single, "", None, csum));
    }
    for (metadata, data, list, nodesize, csum) in combinations {
        let mut features = Features::default();
        features.apply(list).unwrap();
        let size = minimum_size(metadata, data, features.mixed) + 12345;
        let options = MkfsOptions {
            metadata: Some(metadata),
            data: Some(data),
            features,
            nodesize,
            csum,
            force: true,
            ..MkfsOptions::default()
        };
        let d = FileDevice::create(&path, size).unwrap();
        mkfs(&d, &options).unwrap();
        drop(d);
        if !checked(&path) {
            return;
        }
    }
}
