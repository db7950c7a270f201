//! Replacing a device: every profile, from bad and missing devices, beside writers, and under power
//! cuts, after which it goes on or is given up.

use larder_check::{Kind as What, Severity};
use larder_format::items::InodeFlags;
use larder_format::{DeviceId, Physical, SUPER_OFFSETS, Superblock};
use larder_fs::mkfs::{MkfsOptions, Profile, mkfs_on};
use larder_fs::{
    Error, Fault, FileKind, Filesystem, InodeId, OpenOptions, ReplaceControl, ReplaceOptions,
    ReplaceSource, ReplaceStatus, ScrubControl, ScrubOptions, SetAttr, Timestamp, Tuning,
};
use larder_simtest::by_hand::{self, new};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{
    Access, AccessKind, DiscardEffect, Effect, Fault as Failing, Op, OpKind, Seq, SimDevice,
};
use larder_simtest::disks::{Plan, Refused};
use larder_simtest::image::{Image, STRIDE};
use larder_volume::{Device, read_superblock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Profiles of data and metadata, devices, and how many of them may be lost.
type Kind = (Profile, Profile, usize, usize);

const KINDS: [Kind; 8] = [
    (Profile::Single, Profile::Single, 1, 0),
    (Profile::Dup, Profile::Dup, 1, 0),
    (Profile::Single, Profile::Raid1, 2, 0),
    (Profile::Raid0, Profile::Raid1, 2, 0),
    (Profile::Raid1c3, Profile::Raid1c3, 3, 2),
    (Profile::Raid10, Profile::Raid10, 4, 1),
    (Profile::Raid5, Profile::Raid5, 3, 1),
    (Profile::Raid6, Profile::Raid6, 4, 2),
];

/// A fresh file system, and a disk behind its own that is going to be a target.
fn base((data, metadata, disks, _): Kind) -> Image {
    let mut sizes: Vec<u64> = (0..disks as u64).map(|n| (256 + 16 * n) * MIB).collect();
    sizes.push(400 * MIB);
    let device = SimDevice::new(Image::stack(sizes)).unrecorded();
    let device = Arc::new(device.with_discard(DiscardEffect::Ignore));
    let options = MkfsOptions {
        data: Some(data),
        metadata: Some(metadata),
        uuid: Some(*b"larder-simulator"),
        time: Some(Timestamp { sec: 1_700_000_000, nsec: 0 }),
        ..MkfsOptions::default()
    };
    let all = device.devices();
    mkfs_on(&all[..disks].iter().map(|disk| &**disk).collect::<Vec<_>>(), &options).unwrap();
    device.image()
}

fn options(tuning: Tuning) -> OpenOptions {
    OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() }
}

fn open(devices: Vec<Arc<dyn Device>>) -> Arc<Filesystem> {
    Filesystem::open_devices(devices, options(Tuning::default())).unwrap()
}

fn of(source: u64) -> ReplaceOptions {
    ReplaceOptions { source: DeviceId(source), read: ReplaceSource::Use }
}

fn file(fs: &Filesystem, name: &str, data: &[u8]) -> Result<InodeId, Error> {
    let (root, name) = (fs.root(), name.as_bytes());
    let id = match fs.lookup(root, name) {
        Ok(found) => found.id,
        Err(_) => fs.create(root, name, &new(FileKind::Regular))?.id,
    };
    fs.write(id, 0, data)?;
    Ok(id)
}

/// A file that is written in place.
fn in_place(fs: &Filesystem, name: &str, data: &[u8]) -> Result<InodeId, Error> {
    let id = fs.create(fs.root(), name.as_bytes(), &new(FileKind::Regular))?.id;
    let flags = Some((InodeFlags::NODATACOW | InodeFlags::NODATASUM).bits());
    fs.setattr(id, &SetAttr { flags, ..SetAttr::default() })?;
    fs.write(id, 0, data)?;
    Ok(id)
}

/// Bytes that depend on a number, and do not shrink.
fn bytes(n: usize, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    fastrand::Rng::with_seed(n as u64).fill(&mut data);
    data
}

fn content(fs: &Filesystem, name: &str) -> Vec<u8> {
    let id = fs.lookup(fs.root(), name.as_bytes()).unwrap().id;
    let mut data = vec![0; usize::try_from(fs.getattr(id).unwrap().size).unwrap()];
    assert_eq!(fs.read(id, 0, &mut data).unwrap(), data.len());
    data
}

const FILES: usize = 60;

fn populate(fs: &Filesystem) {
    for n in 0..FILES {
        file(fs, &format!("file {n}"), &bytes(n, n * 7001 + 1)).unwrap();
    }
    in_place(fs, "in place", &bytes(1000, 300_000)).unwrap();
    fs.sync().unwrap();
}

fn is_populated(fs: &Filesystem) {
    has_its_files(fs);
    assert!(content(fs, "in place") == bytes(1000, 300_000));
}

/// Of those that have checksums.
fn has_its_files(fs: &Filesystem) {
    for n in 0..FILES {
        assert!(content(fs, &format!("file {n}")) == bytes(n, n * 7001 + 1), "file {n}");
    }
}

/// The devices that make up the file system: no target, and of two that are the same the later.
fn real(devices: &[Arc<dyn Device>]) -> Vec<Arc<dyn Device>> {
    let mut real: Vec<(u64, u64, Arc<dyn Device>)> = Vec::new();
    for device in devices {
        let Ok(superblock) = read_superblock(&**device) else { continue };
        let (id, generation) = (superblock.device_id().0, superblock.generation().0);
        match real.iter_mut().find(|(other, ..)| *other == id) {
            _ if id == 0 => {}
            Some(other) if other.1 < generation => *other = (id, generation, device.clone()),
            Some(_) => {}
            None => real.push((id, generation, device.clone())),
        }
    }
    real.into_iter().map(|(.., device)| device).collect()
}

/// What is found where a cut comes between superblocks: some are older.
const OF_A_CUT: [What; 2] = [What::SuperMirrorGeneration, What::DeviceBehind];

/// What `larder check` has against the file system on these devices.
fn complaints(devices: &[Arc<dyn Device>]) -> Result<(), String> {
    by_hand::complaints(&real(devices), |f| {
        f.severity() != Severity::Note && !OF_A_CUT.contains(&f.kind)
    })
}

/// Bad sectors that a scrub finds without writing anything.
fn errors_of_a_scrub(fs: &Filesystem) -> u64 {
    let control = ScrubControl::default();
    fs.scrub(ScrubOptions { read_only: true }, &control, &|_| ()).unwrap();
    let state = control.state();
    let sum = state.sum();
    if sum.errors() > sum.differing {
        println!("{:?} {:?}", state.devices, state.damage);
    }
    // A power cut leaves copies of what is written in place different.
    sum.errors() - sum.differing
}

#[test]
fn every_profile_is_replaced() {
    for kind in KINDS {
        let (.., disks, tolerated) = kind;
        for source in [1, disks] {
            let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
            let all = device.devices();
            let fs = open(all[..disks].to_vec());
            populate(&fs);
            let control = ReplaceControl::default();
            fs.replace_device(of(source as u64), all[disks].clone(), &control).unwrap();
            let state = control.state();
            assert_eq!(state.status, ReplaceStatus::Finished, "{kind:?}: {state:?}");
            assert!(state.copied > 0 && state.copied <= state.total * 2, "{kind:?}: {state:?}");
            assert_eq!((state.unreadable, state.corrected), (0, 0));
            is_populated(&fs);
            file(&fs, "later", b"later").unwrap();
            fs.close().unwrap();
            drop(fs);
            assert!(read_superblock(&*all[source - 1]).is_err(), "the old one has a superblock");
            let mut now = all.clone();
            now.remove(source - 1);
            complaints(&now).unwrap_or_else(|e| panic!("{kind:?}, device {source}: {e}"));
            let fs = open(now.clone());
            is_populated(&fs);
            assert_eq!(content(&fs, "later"), b"later");
            assert_eq!(errors_of_a_scrub(&fs), 0, "{kind:?}, device {source}");
            assert_eq!(fs.replacement().status, ReplaceStatus::Finished);
            fs.close().unwrap();
            drop(fs);
            // The target alone stands in for the others.
            if tolerated > 0 {
                let left = now.split_off(tolerated.min(disks - 1));
                let degraded = OpenOptions { degraded: true, ..options(Tuning::default()) };
                let fs = Filesystem::open_devices(left, degraded).unwrap();
                is_populated(&fs);
            }
        }
    }
}

#[test]
fn what_the_source_lacks_comes_from_the_others() {
    for (kind, avoid) in [(KINDS[4], false), (KINDS[6], false), (KINDS[7], true), (KINDS[5], true)]
    {
        let (.., disks, _) = kind;
        let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
        let all = device.devices();
        let fs = open(all[..disks].to_vec());
        populate(&fs);
        fs.close().unwrap();
        drop(fs);
        // Half of what the first disk holds is garbage. Its superblocks are not.
        for at in (MIB..250 * MIB).step_by(256 << 10).filter(|at| at / MIB != 64) {
            all[0].write_at(Physical(at), &vec![0x5a; 128 << 10]).unwrap();
        }
        let fs = open(all[..disks].to_vec());
        content(&fs, "file 59");
        fs.sync().unwrap();
        assert!(fs.devices()[0].errors.any(), "{kind:?}: it was read from the others");
        let control = ReplaceControl::default();
        let read = if avoid { ReplaceSource::Avoid } else { ReplaceSource::Use };
        let how = ReplaceOptions { read, ..of(1) };
        fs.replace_device(how, all[disks].clone(), &control).unwrap();
        let state = control.state();
        assert_eq!(state.corrected > 0, !avoid, "{kind:?}: {state:?}");
        fs.close().unwrap();
        drop(fs);
        let fs = open(all[1..].to_vec());
        assert!(!fs.devices()[0].errors.any(), "{kind:?}: errors of the old device");
        has_its_files(&fs);
        fs.close().unwrap();
    }
}

/// While a device cannot be written, its chunks with one copy are left. They are used again when
/// another device has taken its place.
#[test]
fn chunks_of_a_failed_device_are_used_again() {
    let kind = KINDS[2];
    let mut left = 0;
    for fails in 0..2 {
        let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
        let all = device.devices();
        let fs = open(all[..2].to_vec());
        populate(&fs);
        let has_data = fs.devices()[fails].allocated.iter().any(|of| of.kind == "Data");
        left += usize::from(has_data);
        let (refused, effect) = (Refused::Writes, Effect::None);
        device.inject(Plan { disk: fails, refused, skip: 0, forever: true, effect }.fault());
        // The first may be lost.
        let _ = file(&fs, "lost", &bytes(1, 70_000)).and_then(|_| fs.sync());
        for n in 0..4 {
            let written = file(&fs, &format!("later {n}"), &bytes(n, 5 << 20)).unwrap();
            fs.fsync(written, false).unwrap();
        }
        // Places of superblocks do not count.
        let is_left = |fs: &Filesystem| fs.space_usage().data.unusable > MIB;
        assert_eq!(is_left(&fs), has_data, "disk {fails}");
        let control = ReplaceControl::default();
        fs.replace_device(of(fails as u64 + 1), all[2].clone(), &control).unwrap();
        assert!(!is_left(&fs), "disk {fails}");
        is_populated(&fs);
        for n in 0..4 {
            assert!(content(&fs, &format!("later {n}")) == bytes(n, 5 << 20));
        }
        fs.close().unwrap();
        drop(fs);
        let mut now = all.clone();
        now.remove(fails);
        complaints(&now).unwrap_or_else(|e| panic!("disk {fails}: {e}"));
    }
    assert!(left > 0);
}

#[test]
fn a_missing_device_is_replaced() {
    for kind in KINDS.into_iter().filter(|kind| kind.3 > 0) {
        let (.., disks, _) = kind;
        let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
        let all = device.devices();
        let fs = open(all[..disks].to_vec());
        populate(&fs);
        fs.close().unwrap();
        drop(fs);
        let degraded = OpenOptions { degraded: true, ..options(Tuning::default()) };
        let fs = Filesystem::open_devices(all[1..disks].to_vec(), degraded).unwrap();
        file(&fs, "without it", b"without it").unwrap();
        fs.replace_device(of(1), all[disks].clone(), &ReplaceControl::default()).unwrap();
        assert!(fs.info().missing_devices.is_empty());
        is_populated(&fs);
        fs.close().unwrap();
        drop(fs);
        let now = all[1..].to_vec();
        complaints(&now).unwrap_or_else(|e| panic!("{kind:?}: {e}"));
        let fs = open(now);
        assert_eq!(errors_of_a_scrub(&fs), 0, "{kind:?}");
        is_populated(&fs);
        fs.close().unwrap();
    }
}

/// As many devices are missing as the profile tolerates. Which of the rest has what one lacked is
/// different in each row, also where neighbours on the device have neighbouring addresses.
#[test]
fn one_of_two_missing_devices_is_replaced() {
    let kind = (Profile::Raid6, Profile::Raid1c3, 4, 2);
    for (source, other) in [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)] {
        let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
        let all = device.devices();
        let fs = open(all[..4].to_vec());
        populate(&fs);
        fs.close().unwrap();
        drop(fs);
        let degraded = OpenOptions { degraded: true, ..options(Tuning::default()) };
        let left = |but: &[usize]| -> Vec<Arc<dyn Device>> {
            (1..5).filter(|n| !but.contains(n)).map(|n| all[n - 1].clone()).collect()
        };
        let two = left(&[source, other]);
        let fs = Filesystem::open_devices(two.clone(), degraded.clone()).unwrap();
        let control = ReplaceControl::default();
        fs.replace_device(of(source as u64), all[4].clone(), &control).unwrap();
        assert_eq!(control.state().unreadable, 0, "{source} and {other}");
        fs.close().unwrap();
        drop(fs);
        // The target alone has what both had.
        let last = [two[1].clone(), all[4].clone()].to_vec();
        let fs = Filesystem::open_devices(last, degraded).unwrap();
        is_populated(&fs);
        fs.close().unwrap();
    }
}

#[test]
fn targets_that_will_not_do_are_refused() {
    let device = Arc::new(SimDevice::new(base(KINDS[2])).unrecorded());
    let all = device.devices();
    let fs = open(all[..2].to_vec());
    populate(&fs);
    let control = ReplaceControl::default();
    let small: Arc<dyn Device> = Arc::new(SimDevice::new(Image::zeroed(200 * MIB)));
    let said = fs.replace_device(of(1), small, &control).unwrap_err().to_string();
    assert!(said.contains("at least as large"), "{said}");
    let said = fs.replace_device(of(7), all[2].clone(), &control);
    assert!(matches!(said, Err(Error::NotFound)), "{said:?}");
    // One that fails in the midst of it: everything is as before.
    let writes = |a: &larder_simtest::device::Access| a.disk() == 2 && a.is_write();
    device.inject(Failing::nth(9, writes).forever());
    fs.replace_device(of(1), all[2].clone(), &control).unwrap_err();
    device.heal();
    assert_eq!(fs.replacement().status, ReplaceStatus::Canceled);
    file(&fs, "later", b"later").unwrap();
    fs.close().unwrap();
    drop(fs);
    complaints(&all[..2]).unwrap();
    let fs = open(all[..2].to_vec());
    is_populated(&fs);
    // The same disk, once it works.
    fs.replace_device(of(1), all[2].clone(), &ReplaceControl::default()).unwrap();
    fs.close().unwrap();
}

#[test]
fn it_is_suspended_and_goes_on_or_is_given_up() {
    for gives_up in [false, true] {
        let device = Arc::new(SimDevice::new(base(KINDS[2])).unrecorded());
        let all = device.devices();
        let fs = open(all[..2].to_vec());
        populate(&fs);
        let control = ReplaceControl::default();
        control.suspend();
        fs.replace_device(of(2), all[2].clone(), &control).unwrap_err();
        assert_eq!(control.state().status, ReplaceStatus::Suspended);
        file(&fs, "meanwhile", &bytes(7, 70_000)).unwrap();
        fs.close().unwrap();
        drop(fs);
        // Without its target it is opened on request only.
        let said = Filesystem::open_devices(all[..2].to_vec(), options(Tuning::default()));
        let said = said.unwrap_err().to_string();
        assert!(said.contains("device 2 is being replaced"), "{said}");
        let fs = open(all.clone());
        let state = fs.replacement();
        assert_eq!((state.status, state.source), (ReplaceStatus::Suspended, Some(2)));
        if gives_up {
            fs.cancel_replacement().unwrap();
            assert!(matches!(fs.cancel_replacement(), Err(Error::NotFound)));
        } else {
            fs.resume_replacement(&ReplaceControl::default()).unwrap();
        }
        is_populated(&fs);
        fs.close().unwrap();
        drop(fs);
        let now = if gives_up { all[..2].to_vec() } else { vec![all[0].clone(), all[2].clone()] };
        complaints(&now).unwrap();
        let fs = open(now);
        is_populated(&fs);
        assert!(content(&fs, "meanwhile") == bytes(7, 70_000));
        assert_eq!(errors_of_a_scrub(&fs), 0);
        fs.close().unwrap();
    }
}

/// The ids that the superblocks of a disk had, in the order of writing; `None` for no superblock.
fn ids_of(device: &SimDevice, disk: usize) -> Vec<Option<u64>> {
    let first = SUPER_OFFSETS[0];
    let id = |op: &Op| match &op.kind {
        OpKind::Write { at, pieces, .. } if *at == disk as u64 * STRIDE + first.0 => {
            let superblock = Superblock::parse(pieces[0].data.bytes(), first);
            Some(superblock.ok().map(|superblock| superblock.device_id().0))
        }
        _ => None,
    };
    device.recording().ops.iter().filter_map(id).collect()
}

/// A commit that was sealed before a target became the device may have its superblocks written when
/// the next replacement has begun. They are not for the next target, which holds nothing yet.
#[test]
fn a_late_commit_does_not_take_a_target_for_the_one_before() {
    let device = Arc::new(SimDevice::new(base(KINDS[1])));
    let all = device.devices();
    let fs = open(all[..1].to_vec());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for n in 0..2 {
            let (fs, over) = (&fs, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    file(fs, &format!("beside {n}"), &bytes(n, 5_000)).unwrap();
                    fs.sync().unwrap();
                }
            });
        }
        for round in 1..=40 {
            let target = all[round % 2].clone();
            fs.replace_device(of(1), target, &ReplaceControl::default()).unwrap();
        }
        over.store(true, Ordering::Relaxed);
    });
    fs.close().unwrap();
    complaints(&all).unwrap();
    for disk in 0..2 {
        let ids = ids_of(&device, disk);
        let became = ids.windows(2).filter(|ids| ids[0].is_none()).map(|ids| ids[1]);
        assert!(became.clone().count() > 10, "disk {disk}: {ids:?}");
        assert!(became.flatten().all(|id| id == 0), "disk {disk}: {ids:?}");
    }
}

/// Linux goes by the newest superblock, that of the target included. One that no other device has
/// does not stay while what it needs is written over.
#[test]
fn a_target_that_is_ahead_is_taken_back_first() {
    for kind in [KINDS[0], KINDS[2]] {
        let disks = kind.2;
        let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
        let all = device.devices();
        let fs = open(all[..disks].to_vec());
        populate(&fs);
        let control = ReplaceControl::default();
        control.suspend();
        fs.replace_device(of(disks as u64), all[disks].clone(), &control).unwrap_err();
        fs.sync().unwrap();
        let mut image = device.image();
        file(&fs, "ahead", &bytes(7, 70_000)).unwrap();
        fs.sync().unwrap();
        image.take_disk(disks, &device.image());
        fs.close().unwrap();
        let device = Arc::new(SimDevice::new(image).unrecorded());
        let mut all = device.devices();
        let of = |disk: &Arc<dyn Device>| read_superblock(&**disk).unwrap().generation();
        assert!(of(&all[disks]) > of(&all[0]));
        let fs = open(all.clone());
        assert_eq!(of(&all[disks]), of(&all[0]));
        is_populated(&fs);
        fs.resume_replacement(&ReplaceControl::default()).unwrap();
        fs.close().unwrap();
        all.remove(disks - 1);
        complaints(&all).unwrap();
    }
}

/// A write that is on its way to the source when the replacement begins, and arrives only when the
/// copy has passed its place.
fn with_a_write_on_its_way(tuning: Tuning) -> bool {
    let device = Arc::new(SimDevice::new(base(KINDS[0])).unrecorded());
    let all = device.devices();
    let fs = Filesystem::open_devices(all[..1].to_vec(), options(tuning)).unwrap();
    populate(&fs);
    let late = bytes(5, 3 << 20);
    file(&fs, "late", &late).unwrap();
    let gate = device.gate(|a| a.disk() == 0 && a.is_write() && a.len >= MIB);
    std::thread::scope(|threads| {
        let written = threads.spawn(|| fs.sync());
        assert!(gate.wait_for(1, PATIENCE));
        let (say, said) = mpsc::channel();
        let replaced = {
            let (fs, all) = (&fs, &all);
            threads.spawn(move || {
                let control = ReplaceControl::default();
                let done = fs.replace_device(of(1), all[1].clone(), &control);
                let _ = say.send(());
                done
            })
        };
        // As long as the write is held back, a replacement that waits for it does not end. One that
        // does not wait has copied everything by then.
        let _ = said.recv_timeout(Duration::from_secs(3));
        gate.open();
        written.join().unwrap().unwrap();
        replaced.join().unwrap().unwrap();
    });
    fs.close().unwrap();
    drop(fs);
    let fs = open(vec![all[1].clone()]);
    let id = fs.lookup(fs.root(), b"late").unwrap().id;
    let mut found = vec![0; late.len()];
    fs.read(id, 0, &mut found).is_ok() && found == late
}

#[test]
fn a_write_that_is_on_its_way_arrives_at_the_target() {
    assert!(with_a_write_on_its_way(Tuning::default()));
}

#[test]
fn a_replacement_without_the_flush_is_caught() {
    assert!(!with_a_write_on_its_way(Fault::ReplaceWithoutFlush.into()), "it went unnoticed");
}

/// What an `fsync` promised: since when, of which file, which content.
type Promises = Mutex<Vec<(Seq, String, Vec<u8>)>>;

/// Writes files and fsyncs them, in place as well, and makes snapshots.
fn write(
    fs: &Filesystem,
    device: &SimDevice,
    writer: usize,
    over: &AtomicBool,
    promised: &Promises,
) -> Result<(), Error> {
    let name = format!("in place {writer}");
    let mine = in_place(fs, &name, &bytes(writer, 200_000))?;
    fs.sync()?;
    for n in 0..60 {
        if over.load(Ordering::Relaxed) && n > 8 {
            break;
        }
        let data = bytes(writer * 100 + n, n * 1997 % 40_000 + 1);
        let name = format!("writer {writer}, {n}");
        let id = file(fs, &name, &data)?;
        fs.fsync(id, false)?;
        promised.lock().unwrap().push((device.mark(), name, data.clone()));
        fs.write(mine, (n * 3000) as u64, &data)?;
        if n % 4 == 0 {
            fs.fsync(mine, false)?;
        }
        if n % 16 == 3 {
            fs.snapshot(fs.root().subvol, fs.root(), format!("s {writer} {n}").as_bytes(), true)?;
        }
        file(fs, &format!("file {}", (n * 7) % FILES), &data)?;
    }
    Ok(())
}

/// The file system as a cut left it: sound and with what was promised; it goes on, or is given up,
/// and is all of that again.
fn judge(
    image: Image,
    disks: usize,
    gives_up: bool,
    promised: &[&(Seq, String, Vec<u8>)],
) -> Result<(), String> {
    let device = Arc::new(SimDevice::new(image).unrecorded());
    let all = device.devices();
    let text = |e: Error| e.to_string();
    if disks == 1 {
        // Where there are more, a cut leaves some of them a commit behind.
        complaints(&all)?;
    }
    let is_here = |fs: &Filesystem| {
        for (_, name, data) in promised {
            let id = fs.lookup(fs.root(), name.as_bytes()).map_err(|e| format!("{name}: {e}"))?.id;
            let mut found = vec![0; data.len()];
            fs.read(id, 0, &mut found).map_err(|e| format!("{name}: {e}"))?;
            if found != *data {
                return Err(format!("{name} has not what was fsynced"));
            }
        }
        Ok(())
    };
    // As a person would: what has no superblock belongs to nothing.
    let here: Vec<_> = all.iter().filter(|d| read_superblock(&***d).is_ok()).cloned().collect();
    let try_open = |devices: Vec<Arc<dyn Device>>| {
        Filesystem::open_devices(devices, options(Tuning::default())).map_err(text)
    };
    let fs = try_open(here)?;
    is_here(&fs)?;
    if fs.replacement().status == ReplaceStatus::Suspended {
        if gives_up {
            fs.cancel_replacement().map_err(text)?;
        } else {
            fs.resume_replacement(&ReplaceControl::default()).map_err(text)?;
        }
        is_here(&fs)?;
    }
    file(&fs, "afterwards", b"afterwards").map_err(text)?;
    let ended = fs.replacement().status;
    fs.close().map_err(text)?;
    drop(fs);
    let mut now = all.clone();
    now.remove(if ended == ReplaceStatus::Finished { 0 } else { disks });
    complaints(&now).map_err(|e| format!("afterwards, {ended:?}: {e}"))?;
    let fs = try_open(now)?;
    is_here(&fs)?;
    match errors_of_a_scrub(&fs) {
        0 => fs.close().map_err(text),
        n => Err(format!("afterwards, {ended:?}: a scrub finds {n} errors")),
    }
}

/// Replaces a disk beside writers, and cuts the power everywhere.
fn beside_writers(kind: Kind, tuning: Tuning, most: usize, fails: bool) -> Result<usize, String> {
    let (.., disks, _) = kind;
    let device = Arc::new(SimDevice::new(base(kind)));
    let all = device.devices();
    let fs = Filesystem::open_devices(all[..disks].to_vec(), options(tuning)).unwrap();
    populate(&fs);
    let (promised, over) = (Promises::default(), AtomicBool::new(false));
    if fails {
        let reads = |a: &larder_simtest::device::Access| {
            a.disk() == 0 && (a.is_write() || a.kind == AccessKind::Read)
        };
        device.inject(Failing::nth(150, reads).forever());
    }
    let outcome = std::thread::scope(|threads| {
        let writers = [1, 2].map(|writer| {
            let (fs, device, over, promised) = (&fs, &device, &over, &promised);
            threads.spawn(move || write(fs, device, writer, over, promised))
        });
        let control = ReplaceControl::default();
        let outcome = fs.replace_device(of(1), all[disks].clone(), &control);
        over.store(true, Ordering::Relaxed);
        writers.into_iter().fold(outcome, |all, one| {
            all.and(one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    });
    outcome.map_err(|e| e.to_string())?;
    fs.close().map_err(|e| e.to_string())?;
    drop(fs);
    let promised = promised.into_inner().unwrap();
    let limits = Limits { samples: 1, per_epoch: 4, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let every = crashes.states.len().div_ceil(most).max(1);
    let mut seen = 0;
    for state in crashes.states.iter().step_by(every).chain(crashes.states.last()) {
        let kept: Vec<_> = promised.iter().filter(|p| p.0 <= state.latest).collect();
        judge(crashes.image(state), disks, !fails && seen % 4 == 3, &kept)
            .map_err(|e| format!("{e}\n{}", crashes.describe(state)))?;
        seen += 1;
    }
    Ok(seen)
}

/// What cuts of the power leave of a recording, opened as a person would.
fn opened_after_cuts(device: &SimDevice) -> Vec<Result<Arc<Filesystem>, Error>> {
    let limits = Limits { samples: 1, per_epoch: 4, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let open = |image: Image| {
        let mut devices = Arc::new(SimDevice::new(image).unrecorded()).devices();
        devices.retain(|disk| read_superblock(&**disk).is_ok());
        Filesystem::open_devices(devices, options(Tuning::default()))
    };
    crashes.states.iter().map(|state| open(crashes.image(state))).collect()
}

/// Nothing was copied to it then, and nothing depends on it. Here it fails at each of its first
/// operations in turn.
#[test]
fn a_target_that_fails_as_it_begins_is_not_missing() {
    let mut begun = 0;
    for n in 0..14 {
        let device = Arc::new(SimDevice::new(base(KINDS[2])));
        let all = device.devices();
        let fs = open(all[..2].to_vec());
        file(&fs, "file", &bytes(1, 70_000)).unwrap();
        let written = move |a: &Access| a.disk() == 2 && a.kind != AccessKind::Read;
        device.inject(Failing::nth(n, written).forever());
        let control = ReplaceControl::default();
        fs.replace_device(of(2), all[2].clone(), &control).unwrap_err();
        drop(fs);
        for fs in opened_after_cuts(&device) {
            let fs = fs.unwrap_or_else(|e| panic!("operation {n}: {e}"));
            let is_under_way = fs.replacement().status == ReplaceStatus::Suspended;
            begun += u32::from(is_under_way && fs.replacement().target.is_none());
            if is_under_way {
                fs.cancel_replacement().unwrap();
            }
            fs.close().unwrap();
        }
    }
    assert!(begun > 0, "the target never failed in the commit that began");
}

/// Replaces the second of two disks. The target fails for good at the operation `fails` of those
/// that write. Returns how many there were, and whether it took the place.
fn replaced_by_one_that_fails(device: &Arc<SimDevice>, fails: Option<u64>) -> (u64, bool) {
    let all = device.devices();
    let fs = open(all[..2].to_vec());
    file(&fs, "file", &bytes(1, 70_000)).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let is_meant = move |a: &Access| {
        let is_written = a.disk() == 2 && a.kind != AccessKind::Read;
        let before = if is_written { counted.fetch_add(1, Ordering::Relaxed) } else { 0 };
        is_written && fails.is_some_and(|n| before >= n)
    };
    device.inject(Failing::nth(0, is_meant).forever());
    let ended = fs.replace_device(of(2), all[2].clone(), &ReplaceControl::default());
    let operations = count.load(Ordering::Relaxed);
    // Whatever came of it, the file system goes on.
    file(&fs, "later", b"later").unwrap();
    fs.sync().unwrap();
    (operations, ended.is_ok())
}

/// Here it fails at each of its last operations in turn, the commit that ends the replacement among
/// them. The device that it was to replace stays, and power cuts do no harm.
#[test]
fn a_target_that_fails_as_it_takes_the_place_is_given_up() {
    let new = || Arc::new(SimDevice::new(base(KINDS[2])));
    let (operations, is_there) = replaced_by_one_that_fails(&new(), None);
    assert!(is_there);
    let mut given_up = 0;
    for n in operations.saturating_sub(16)..operations {
        let device = new();
        let (_, is_there) = replaced_by_one_that_fails(&device, Some(n));
        given_up += u32::from(!is_there);
        for (cut, fs) in opened_after_cuts(&device).into_iter().enumerate() {
            let fs = fs.unwrap_or_else(|e| panic!("operation {n}, cut {cut}: {e}"));
            if fs.lookup(fs.root(), b"later").is_ok() {
                assert!(content(&fs, "file") == bytes(1, 70_000), "operation {n}, cut {cut}");
            }
            fs.close().unwrap();
        }
    }
    assert!(given_up > 2, "{given_up}");
}

/// A disk that fails is replaced, cannot be erased any more, and is taken for another target.
fn an_old_device_is_taken_again(tuning: Tuning) -> Result<(), String> {
    let device = Arc::new(SimDevice::new(base(KINDS[2])));
    let all = device.devices();
    let fs = Filesystem::open_devices(all[..2].to_vec(), options(tuning)).unwrap();
    file(&fs, "file", &bytes(1, 70_000)).unwrap();
    fs.sync().unwrap();
    device.inject(Failing::nth(0, |a| a.disk() == 1 && a.kind == AccessKind::Flush).forever());
    fs.replace_device(of(2), all[2].clone(), &ReplaceControl::default()).unwrap();
    fs.replace_device(of(2), all[1].clone(), &ReplaceControl::default()).unwrap_err();
    drop(fs);
    for fs in opened_after_cuts(&device) {
        fs.map_err(|e| e.to_string())?.close().map_err(|e| e.to_string())?;
    }
    Ok(())
}

#[test]
fn a_device_that_was_replaced_and_has_its_superblock_still_does_no_harm() {
    an_old_device_is_taken_again(Tuning::default()).unwrap();
    an_old_device_is_taken_again(Fault::ReplaceUnerased.into()).unwrap_err();
}

fn states() -> usize {
    let scale = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse::<usize>().ok());
    scale.unwrap_or(1) * 60
}

#[test]
fn nothing_is_lost_beside_writers() {
    for kind in [KINDS[0], KINDS[2], KINDS[6]] {
        let seen = beside_writers(kind, Tuning::default(), states(), false);
        println!("{kind:?}: {} states", seen.unwrap_or_else(|e| panic!("{kind:?}: {e}")));
    }
}

#[test]
fn nothing_is_lost_when_the_source_fails_meanwhile() {
    for kind in [KINDS[4], KINDS[7]] {
        let seen = beside_writers(kind, Tuning::default(), states(), true);
        println!("{kind:?}: {} states", seen.unwrap_or_else(|e| panic!("{kind:?}: {e}")));
    }
}

#[test]
fn a_replacement_that_does_not_mirror_is_caught() {
    let wrong = beside_writers(KINDS[2], Fault::ReplaceUnmirrored.into(), 60, false).err();
    println!("{}", wrong.expect("it went unnoticed"));
}
