//! Power cuts while a file system is made: afterwards there is none, or a whole one — never half of
//! one, and never the old one's superblock over the new one's blocks.

use larder_format::SUPER_OFFSETS;
use larder_fs::Timestamp;
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{DiscardEffect, SimDevice};
use larder_simtest::image::Image;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::{SIZE, fresh};

fn has_superblock(image: &Image) -> bool {
    let mut magic = [0; 8];
    image.read(SUPER_OFFSETS[0].0 + 0x40, &mut magic);
    &magic == b"_BHRfS_M"
}

fn fsid(image: &Image) -> [u8; 16] {
    let mut fsid = [0; 16];
    image.read(SUPER_OFFSETS[0].0 + 0x20, &mut fsid);
    fsid
}

/// Makes a file system on `base` and looks at every crash state; returns how many had none, the
/// old, the new one.
fn crash_mkfs(base: Image, old: Option<[u8; 16]>) -> [usize; 3] {
    let device = SimDevice::new(base).with_discard(DiscardEffect::Poison);
    let options = MkfsOptions {
        uuid: Some(*b"the new one's id"),
        time: Some(Timestamp { sec: 1, nsec: 0 }),
        force: true,
        ..MkfsOptions::default()
    };
    mkfs(&device, &options).expect("mkfs");
    let limits = Limits { samples: 60, per_epoch: 300, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let dir = scratch();
    let path = dir.path().join("state.img");
    let mut seen = [0; 3];
    let mut checked = [0; 3];
    for state in &crashes.states {
        let image = crashes.image(state);
        let which = if !has_superblock(&image) {
            0
        } else if Some(fsid(&image)) == old {
            1
        } else {
            assert_eq!(&fsid(&image), b"the new one's id");
            2
        };
        seen[which] += 1;
        if which > 0 && checked[which] < 12 {
            checked[which] += 1;
            image.write_sparse(&path).expect("write the state");
            btrfs_check(&path, true).assert_clean(&crashes.describe(state));
        }
    }
    let mut end = crashes.everything();
    assert!(has_superblock(&end));
    assert_eq!(
        end.content_hash(),
        device.image().content_hash(),
        "everything survives: what the device holds"
    );
    seen
}

#[test]
fn a_crash_of_mkfs_leaves_nothing_or_all_of_it() {
    if !need(&[Need::BtrfsProgs]) {
        return;
    }
    let [none, _, new] = crash_mkfs(Image::zeroed(SIZE), None);
    assert!(none >= 30 && new >= 2, "{none} without, {new} with a file system");
}

#[test]
fn a_crash_of_mkfs_over_an_old_file_system_never_mixes_the_two() {
    if !need(&[Need::BtrfsProgs]) {
        return;
    }
    let old =
        fresh(SIZE, &MkfsOptions { uuid: Some(*b"the old one's id"), ..MkfsOptions::default() });
    let [none, old, new] = crash_mkfs(old.expect("mkfs"), Some(*b"the old one's id"));
    assert!(none >= 40 && old >= 1 && new >= 2, "none {none}, old {old}, new {new}");
}
