//! A device that was away is brought up to date in long transfers, not sector by sector.

use larder_fs::{
    FileKind, Filesystem, NewInode, OpenOptions, ScrubControl, ScrubOptions, ScrubStatus,
};
use larder_simtest::device::SimDevice;
use larder_simtest::disks::Kind;
use larder_simtest::image::Image;
use std::sync::Arc;

/// What is written while a device is away.
const LEN: usize = 8 << 20;
/// The device that is away.
const AWAY: usize = 1;

fn open(device: &Arc<SimDevice>, degraded: bool) -> Arc<Filesystem> {
    let options = OpenOptions { degraded, commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(device.devices(), options).unwrap()
}

fn content() -> Vec<u8> {
    (0..LEN as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

/// Writes a file without a device. Returns what all have afterwards, that one as it was.
fn written_without(base: &Image) -> Image {
    let mut less = base.clone();
    less.lose(AWAY);
    let device = Arc::new(SimDevice::new(less).unrecorded());
    let fs = open(&device, true);
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    let file = fs.create(fs.root(), b"file", &new).unwrap().id;
    fs.write(file, 0, &content()).unwrap();
    fs.close().unwrap();
    let mut image = device.image();
    image.take_disk(AWAY, base);
    image
}

/// Scrubs a file system with a device that was away. Returns the transfers that it took, and what
/// all devices have.
fn scrubbed(image: Image) -> (u64, Image) {
    let device = Arc::new(SimDevice::new(image).unrecorded());
    let fs = open(&device, false);
    assert_eq!(fs.devices_behind().len(), 1);
    let begin = device.counts();
    let control = ScrubControl::default();
    fs.scrub(ScrubOptions { read_only: false }, &control, &|_| ()).unwrap();
    let end = device.counts();
    let state = control.state();
    assert_eq!((state.status, state.sum().uncorrectable), (ScrubStatus::Finished, 0));
    assert!(state.sum().corrected * 4096 > LEN as u64 / 4, "{state:?}");
    assert!(fs.devices_behind().is_empty());
    fs.close().unwrap();
    (end.reads - begin.reads + end.writes - begin.writes, device.image())
}

/// The file, without a device that was there before.
fn read_without(mut image: Image, lost: usize) -> Vec<u8> {
    image.lose(lost);
    let device = Arc::new(SimDevice::new(image).unrecorded());
    let fs = open(&device, true);
    let file = fs.lookup(fs.root(), b"file").unwrap().id;
    let mut data = vec![0; LEN + 1];
    let len = fs.read(file, 0, &mut data).unwrap();
    fs.close().unwrap();
    data.truncate(len);
    data
}

#[test]
fn what_lies_side_by_side_is_repaired_together() {
    for name in ["raid1-raid1-2", "raid10-raid1-4", "raid5-raid1-4", "raid6-raid6-5"] {
        let base = Kind::parse(name).expect("a kind").fresh().expect("mkfs");
        let (transfers, image) = scrubbed(written_without(&base));
        println!("{name}: {transfers} transfers");
        // A fifth of what one transfer for each sector would be.
        assert!(transfers < LEN as u64 / 4096 / 5, "{name}: {transfers} transfers");
        assert!(read_without(image, 0) == content(), "{name}");
    }
}
