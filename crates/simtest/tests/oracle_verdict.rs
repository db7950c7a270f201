//! The kernel's verdict accepts sound images and names what is wrong with others.

use larder_simtest::oracle::{
    Aspects, DeviceSet, Fixture, KernelMount, Need, copy_image, kernel_verdict, mkfs_btrfs, need,
    populate, scratch,
};
use std::os::unix::fs::{FileExt, MetadataExt};

const MIB: u64 = 1 << 20;
const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

#[test]
fn a_sound_image_passes_and_shows_the_same_each_time() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    mkfs_btrfs(&image, 256 * MIB, &["-O", "block-group-tree"]).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();

    let copy = dir.path().join("b.img");
    copy_image(&image, &copy).unwrap();
    let (from, to) = (image.metadata().unwrap(), copy.metadata().unwrap());
    assert_eq!(from.len(), to.len());
    assert!(to.blocks() <= from.blocks() + 2048, "{} blocks became {}", from.blocks(), to.blocks());
    let first = kernel_verdict(&copy).unwrap();
    copy_image(&image, &copy).unwrap();
    let second = kernel_verdict(&copy).unwrap();
    assert_eq!(first.differences(&second, Aspects::same_image()), []);
}

#[test]
fn a_wrong_sum_that_the_kernel_mounts_is_found() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    mkfs_btrfs(&image, 128 * MIB, &[] as &[&str]).unwrap();
    kernel_verdict(&image).unwrap();
    // bytes_used of the superblock, with its checksum redone: mounts without a word.
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let mut block = [0u8; 4096];
    file.read_exact_at(&mut block, 65_536).unwrap();
    let used = u64::from_le_bytes(block[0x78..0x80].try_into().unwrap());
    block[0x78..0x80].copy_from_slice(&(used + 4096).to_le_bytes());
    let checksum = larder_format::CsumType::Crc32c.compute(&block[0x20..]);
    block[..0x20].copy_from_slice(&checksum);
    file.write_all_at(&block, 65_536).unwrap();
    drop(file);
    let mount = KernelMount::image(&image, "").expect("the kernel does not look at it");
    drop(mount);
    let error = kernel_verdict(&image).expect_err("a wrong bytes_used");
    assert!(format!("{error:#}").contains("btrfs check"), "{error:#}");
}

/// What is wrong with data that has parity is found, and what is right passes.
#[test]
fn data_with_parity_is_read_by_linux() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let set =
        DeviceSet::make(dir.path(), &[256 * MIB; 3], &["-d", "raid5", "-m", "raid1"]).unwrap();
    let mount = set.mount("").unwrap();
    let content: Vec<u8> = (0..40_000u32).flat_map(|n| (n * 7).to_le_bytes()).collect();
    std::fs::write(mount.join("file"), &content).unwrap();
    mount.unmount_clean().unwrap();
    let report = set.check().unwrap();
    assert!(report.is_clean(), "{report}");
    // A sector of the file, on the device that has it.
    let sector = &content[..4096];
    let place = set.images().iter().find_map(|image| {
        let bytes = std::fs::read(image).unwrap();
        let at = bytes.chunks_exact(4096).position(|chunk| chunk == sector)?;
        Some((image, at as u64 * 4096))
    });
    let (image, at) = place.expect("the data is somewhere");
    let file = std::fs::File::options().write(true).open(image).unwrap();
    file.write_all_at(b"something else", at).unwrap();
    drop(file);
    let report = set.check().unwrap();
    assert!(report.complaints.iter().any(|line| line.contains("csum_errors: 1")), "{report}");
}
