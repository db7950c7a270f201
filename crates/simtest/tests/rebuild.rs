//! A device that was away is brought up to date in long transfers, not sector by sector, and also
//! where the others do not agree.

use larder_format::Physical;
use larder_format::items::InodeFlags;
use larder_fs::{
    FileKind, Filesystem, InodeId, NewInode, OpenOptions, ScrubControl, ScrubOptions, ScrubStatus,
    SetAttr,
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

fn new_file(fs: &Filesystem) -> InodeId {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    fs.create(fs.root(), b"file", &new).unwrap().id
}

/// Writes a file without a device. Returns what all have afterwards, that one as it was.
fn written_without(base: &Image) -> Image {
    let mut less = base.clone();
    less.lose(AWAY);
    let device = Arc::new(SimDevice::new(less).unrecorded());
    let fs = open(&device, true);
    let file = new_file(&fs);
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

/// Where a sector with these bytes lies on a disk.
fn place_of(device: &Arc<SimDevice>, disk: usize, sector: &[u8]) -> Physical {
    let disk = device.devices().remove(disk);
    let mut part = vec![0; 1 << 20];
    for at in (0..disk.size()).step_by(part.len()) {
        let len = part.len().min((disk.size() - at) as usize);
        disk.read_at(Physical(at), &mut part[..len]).unwrap();
        let found = part[..len].chunks(sector.len()).position(|bytes| bytes == sector);
        if let Some(n) = found {
            return Physical(at + (n * sector.len()) as u64);
        }
    }
    panic!("the sector is not there")
}

/// A power cut came while a file without checksums was written in place: two copies differ, and the
/// third device did not get the superblock.
#[test]
fn a_device_comes_back_although_the_others_do_not_agree() {
    for away in 0..3 {
        let base = Kind::parse("raid1c3-raid1c3-3").expect("a kind").fresh().expect("mkfs");
        let device = Arc::new(SimDevice::new(base).unrecorded());
        let fs = open(&device, false);
        let file = new_file(&fs);
        let flags = Some((InodeFlags::NODATACOW | InodeFlags::NODATASUM).bits());
        fs.setattr(file, &SetAttr { flags, ..SetAttr::default() }).unwrap();
        fs.write(file, 0, &[1; 8192]).unwrap();
        fs.sync().unwrap();
        let old = device.image();
        fs.write(file, 4096, &[2; 4096]).unwrap();
        fs.close().unwrap();
        drop(fs);
        let mut image = device.image();
        image.take_disk(away, &old);
        let torn = (away + 1) % 3;
        let device = Arc::new(SimDevice::new(image).unrecorded());
        let at = place_of(&device, torn, &[2; 4096]);
        device.devices().remove(torn).write_at(at, &[3; 4096]).unwrap();
        let fs = open(&device, false);
        assert_eq!(fs.devices_behind().len(), 1);
        let control = ScrubControl::default();
        fs.scrub(ScrubOptions { read_only: false }, &control, &|_| ()).unwrap();
        assert!(fs.devices_behind().is_empty(), "{away}: {:?}", control.state());
        // What the others disagree about is still reported.
        assert_eq!(control.state().sum().uncorrectable, 1, "{away}");
        fs.close().unwrap();
        drop(fs);
        let mut alone = device.image();
        (0..3).filter(|disk| *disk != away).take(2).for_each(|disk| alone.lose(disk));
        let device = Arc::new(SimDevice::new(alone).unrecorded());
        let fs = open(&device, true);
        let file = fs.lookup(fs.root(), b"file").unwrap().id;
        let mut data = vec![0; 8192];
        assert_eq!(fs.read(file, 0, &mut data).unwrap(), 8192);
        assert!(data[..4096] == [1; 4096] && [2, 3].contains(&data[4096]), "{away}");
    }
}
