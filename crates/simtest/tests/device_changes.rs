//! Devices that are added, removed, resized and shrunk beside writers, under power cuts.

use larder_check::Severity;
use larder_format::DeviceId;
use larder_fs::mkfs::{MkfsOptions, Profile, mkfs_on};
use larder_fs::{Clearing, Error, Fault, Filesystem, OpenOptions, Outcome, Tuning};
use larder_simtest::by_hand::{self, bytes, content, put};
use larder_simtest::crash::{CrashState, Crashes, Limits};
use larder_simtest::device::{Access, AccessKind, DiscardEffect, Fault as Failing, Seq, SimDevice};
use larder_simtest::image::Image;
use larder_volume::{Device, read_superblock};
use std::ops::{ControlFlow, RangeInclusive};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, and devices to begin with.
type Kind = (Profile, Profile, usize);

const KINDS: [Kind; 5] = [
    (Profile::Single, Profile::Dup, 1),
    (Profile::Raid1, Profile::Raid1, 2),
    (Profile::Raid0, Profile::Raid1, 2),
    (Profile::Raid5, Profile::Raid1, 3),
    (Profile::Raid10, Profile::Raid1c3, 4),
];

/// A new file system of a kind on all disks but the last.
fn base((data, metadata, disks): Kind) -> Image {
    let sizes = (0..=disks as u64).map(|n| (200 + 24 * n) * MIB).collect();
    let device = SimDevice::new(Image::stack(sizes)).unrecorded();
    let device = Arc::new(device.with_discard(DiscardEffect::Ignore));
    let all = device.devices();
    let members: Vec<&dyn Device> = all[..disks].iter().map(|disk| &**disk).collect();
    let options = MkfsOptions {
        data: Some(data),
        metadata: Some(metadata),
        uuid: Some(*b"larder-simulator"),
        ..MkfsOptions::default()
    };
    mkfs_on(&members, &options).unwrap();
    let mut image = device.image();
    image.freeze();
    image
}

fn options(tuning: Tuning) -> OpenOptions {
    OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() }
}

/// The devices that have a superblock.
fn members(device: &Arc<SimDevice>) -> Vec<Arc<dyn Device>> {
    device.devices().into_iter().filter(|disk| read_superblock(&**disk).is_ok()).collect()
}

/// A file system, and the devices that it was opened by.
type Opened = (Arc<Filesystem>, Vec<Arc<dyn Device>>);

/// Opens what a cut has left, by the devices that say that they belong to it. One that has just
/// left may still say so.
fn open_again(device: &Arc<SimDevice>) -> Result<Opened, Error> {
    let mut all = members(device);
    loop {
        match Filesystem::open_devices(all.clone(), options(Tuning::default())) {
            Ok(fs) => return Ok((fs, all)),
            Err(e) if e.to_string().contains("does not have any more") => {
                let text = e.to_string();
                let before = all.len();
                all.retain(|disk| !text.starts_with(&format!("{}:", disk.name())));
                assert!(all.len() < before, "{text}");
            }
            Err(e) => return Err(e),
        }
    }
}

/// What `larder check` has against the file system on these devices.
fn complaints(devices: &[Arc<dyn Device>]) -> Result<(), String> {
    by_hand::complaints(devices, |f| f.severity() == Severity::Error)
}

fn on(_: Clearing) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Adds the last disk, takes the first away, makes the last one smaller, larger, and as small as it
/// can be. Returns the stretches of time in which a change becomes durable.
fn change_all(
    fs: &Filesystem,
    device: &Arc<SimDevice>,
    disks: usize,
    may_be_full: &OnceLock<Seq>,
) -> Result<Vec<RangeInclusive<Seq>>, Error> {
    let mut marks = Vec::new();
    let mut begin = device.mark();
    let last = fs.add_device(device.devices().remove(disks))?;
    assert_eq!(last, DeviceId(disks as u64 + 1));
    marks.push(begin..=device.mark());
    put(fs, fs.root(), "between", &bytes(2, 3 << 20))?;
    let mut watch = |how: Clearing| {
        assert!(how.left <= how.total, "{how:?}");
        begin = device.mark();
        on(how)
    };
    assert_eq!(fs.remove_device(DeviceId(1), &mut watch)?, Outcome::Done);
    marks.push(begin..=device.mark());
    let size = fs.devices().last().unwrap().size;
    fs.resize_device(last, size - 20 * MIB, &mut on)?;
    fs.resize_device(last, size - 10 * MIB - 4096, &mut on)?;
    may_be_full.get_or_init(|| device.mark());
    let mut watch = |how: Clearing| {
        begin = device.mark();
        on(how)
    };
    let (small, outcome) = fs.shrink_device(last, &mut watch)?;
    assert_eq!(outcome, Outcome::Done);
    assert!(small < size - 10 * MIB - 4096, "{small} of {size}");
    marks.push(begin..=device.mark());
    Ok(marks)
}

/// What was promised: the time of the promise, the name of a file, its content.
type Promises = Mutex<Vec<(Seq, String, Vec<u8>)>>;

/// What the writers know of the changes beside them.
#[derive(Debug, Default)]
struct Beside {
    promised: Promises,
    /// Since then a device is being made as small as it can be: there may be no room for more.
    may_be_full: OnceLock<Seq>,
    over: AtomicBool,
}

/// Makes files and fsyncs them until it is over, or until the file system has been made so small
/// that no more fit.
fn write_beside(
    fs: &Filesystem,
    device: &SimDevice,
    writer: usize,
    beside: &Beside,
) -> Result<(), Error> {
    match write_files(fs, device, writer, beside) {
        Err(Error::NoSpace) if beside.may_be_full.get().is_some() => Ok(()),
        other => other,
    }
}

fn write_files(
    fs: &Filesystem,
    device: &SimDevice,
    writer: usize,
    beside: &Beside,
) -> Result<(), Error> {
    let root = fs.root();
    for n in 0..200 {
        if beside.over.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("writer {writer}, {n}");
        let data = bytes(writer + n, n * 997 % 40_000 + 1);
        let id = put(fs, root, &name, &data)?;
        if fs.fsync(id, false).is_ok() {
            beside.promised.lock().unwrap().push((device.mark(), name, data));
        }
        if n % 8 == 3 {
            let name = format!("snapshot {writer} {n}");
            fs.snapshot(root.subvol, root, name.as_bytes(), true)?;
        }
        put(fs, root, &format!("again {writer} {}", n % 5), &bytes(n, 5000))?;
    }
    Ok(())
}

/// Changes devices beside writers. Every state that a cut leaves is whole.
fn beside_writers(kind: Kind, tuning: Tuning) -> Result<usize, String> {
    let device = Arc::new(SimDevice::new(base(kind)));
    let fs =
        Filesystem::open_devices(device.devices()[..kind.2].to_vec(), options(tuning)).unwrap();
    for n in 0..60 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, n * 3000 + 1)).unwrap();
    }
    fs.sync().unwrap();
    let beside = Beside::default();
    let marks = std::thread::scope(|threads| {
        let write = |writer: usize| {
            let (fs, device, beside) = (&fs, &device, &beside);
            threads.spawn(move || write_beside(fs, device, writer, beside))
        };
        let writers = [0, 1].map(write);
        let marks = change_all(&fs, &device, kind.2, &beside.may_be_full);
        let marks = marks.map_err(|e| format!("a change: {e}"));
        beside.over.store(true, Ordering::Relaxed);
        writers.into_iter().fold(marks, |all, one| {
            let one = one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let one = one.map_err(|e| format!("a writer: {e}"));
            all.and_then(|marks| one.map(|()| marks))
        })
    });
    let marks = marks?;
    let full = *beside.may_be_full.get().unwrap();
    fs.close().map_err(|e| e.to_string())?;
    let promised = beside.promised.into_inner().unwrap();
    let limits = Limits { samples: 1, per_epoch: 4, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    let every = crashes.states.len().div_ceil(60).max(1);
    // The end of a change is looked at closely.
    let is_near = |latest: Seq| marks.iter().any(|m| m.contains(&latest));
    let states = crashes.states.iter().enumerate();
    let looked_at: Vec<&CrashState> =
        states.filter(|(n, s)| n % every == 0 || is_near(s.latest)).map(|(_, s)| s).collect();
    let judge = |state: &CrashState| {
        survives(crashes.image(state), &promised, state.latest, state.latest >= full)
            .map_err(|e| format!("{e}\n{}", crashes.describe(state)))
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let part = |first| looked_at.iter().skip(first).step_by(threads);
        let judges: Vec<_> = (0..threads)
            .map(|first| scope.spawn(move || part(first).try_for_each(|state| judge(state))))
            .collect();
        judges.into_iter().try_for_each(|judge| judge.join().unwrap())
    })?;
    Ok(looked_at.len())
}

/// A state opens, has what was promised, and goes on.
fn survives(
    image: Image,
    promised: &[(Seq, String, Vec<u8>)],
    latest: Seq,
    may_be_full: bool,
) -> Result<(), String> {
    let device = Arc::new(SimDevice::new(image).unrecorded());
    let text = |e: Error| e.to_string();
    let (fs, all) = open_again(&device).map_err(text)?;
    for (_, name, data) in promised.iter().filter(|p| p.0 <= latest) {
        let found = fs.lookup(fs.root(), name.as_bytes()).map_err(text)?;
        if content(&fs, found.id) != *data {
            return Err(format!("{name} has not what was fsynced"));
        }
    }
    match put(&fs, fs.root(), "goes on", &bytes(1, 9000)) {
        Err(Error::NoSpace) if may_be_full => {}
        done => drop(done.map_err(text)?),
    }
    fs.close().map_err(text)?;
    complaints(&all)
}

/// A commit must not count a device that cannot have a superblock.
#[test]
fn a_device_that_fails_is_not_added() {
    for kind in [AccessKind::Write, AccessKind::Flush] {
        let device = Arc::new(SimDevice::new(base(KINDS[1])).unrecorded());
        let all = device.devices();
        let fs = Filesystem::open_devices(all[..2].to_vec(), options(Tuning::default())).unwrap();
        device.inject(Failing::nth(0, move |a| a.disk() == 2 && a.kind == kind).forever());
        fs.add_device(all[2].clone()).unwrap_err();
        assert_eq!(fs.devices().len(), 2);
        fs.sync().unwrap();
        fs.close().unwrap();
        drop(fs);
        let fs = Filesystem::open_devices(all[..2].to_vec(), options(Tuning::default())).unwrap();
        fs.close().unwrap();
    }
}

/// It is behind then, like any other that fails, and not missing. Here it fails at each of its
/// operations in turn, and the power is cut after that.
#[test]
fn a_device_that_fails_in_the_commit_that_counts_it_is_not_missing() {
    let mut counted = 0;
    for n in 0.. {
        let device = Arc::new(SimDevice::new(base(KINDS[1])).unrecorded());
        let all = device.devices();
        let fs = Filesystem::open_devices(all[..2].to_vec(), options(Tuning::default())).unwrap();
        let writes = |a: &Access| a.disk() == 2 && a.kind != AccessKind::Read;
        device.inject(Failing::nth(n, writes).forever());
        let added = fs.add_device(all[2].clone());
        let (failed, image) = (device.counts().faults > 0, device.image());
        drop(fs);
        let cut = Arc::new(SimDevice::new(image).unrecorded());
        let (fs, _) = open_again(&cut).unwrap_or_else(|e| panic!("operation {n}: {e}"));
        assert_eq!(fs.devices().len(), if added.is_ok() { 3 } else { 2 }, "operation {n}");
        fs.close().unwrap();
        counted += u32::from(failed && added.is_ok());
        if !failed {
            break;
        }
    }
    assert!(counted > 0, "the device never failed in the commit that counts it");
}

#[test]
fn nothing_is_lost_when_devices_change_beside_writers() {
    let all = std::env::var_os("LARDER_SCALE").is_some();
    for (n, kind) in KINDS.into_iter().enumerate() {
        if all || [0, 1, 3].contains(&n) {
            let states = beside_writers(kind, Tuning::default());
            let states = states.unwrap_or_else(|e| panic!("{kind:?}: {e}"));
            println!("{kind:?}: {states} states");
        }
    }
}

#[test]
fn a_wrong_order_of_steps_is_caught() {
    for fault in [Fault::DeviceCountedFirst, Fault::DeviceErasedFirst] {
        let wrong = beside_writers(KINDS[0], fault.into()).err();
        let wrong = wrong.unwrap_or_else(|| panic!("{fault:?} went unnoticed"));
        // Not because something was refused on the way there.
        assert!(!wrong.contains("cannot leave"), "{wrong}");
        println!("{wrong}");
    }
}

/// A removal that is ended early leaves a member on which chunks are made again.
#[test]
fn what_is_ended_early_is_as_before() {
    let kind = KINDS[1];
    let device = Arc::new(SimDevice::new(base(kind)).unrecorded());
    let open = || Filesystem::open_devices(members(&device), options(Tuning::default())).unwrap();
    let fs = open();
    fs.add_device(device.devices().remove(kind.2)).unwrap();
    for n in 0..40 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, 500_000)).unwrap();
    }
    fs.sync().unwrap();
    let stop = &mut |_| ControlFlow::Break(());
    assert_eq!(fs.remove_device(DeviceId(1), stop).unwrap(), Outcome::Stopped);
    let size = fs.devices()[0].size;
    assert_eq!(fs.resize_device(DeviceId(1), 60 * MIB, stop).unwrap(), Outcome::Stopped);
    assert_eq!((fs.devices().len(), fs.devices()[0].size), (3, size));
    for n in 40..80 {
        put(&fs, fs.root(), &format!("file {n}"), &bytes(n, 500_000)).unwrap();
    }
    fs.close().unwrap();
    complaints(&members(&device)).unwrap();
    let fs = open();
    assert_eq!(fs.remove_device(DeviceId(1), &mut on).unwrap(), Outcome::Done);
    for n in 0..80 {
        let id = fs.lookup(fs.root(), format!("file {n}").as_bytes()).unwrap().id;
        assert!(content(&fs, id) == bytes(n, 500_000), "file {n}");
    }
    fs.close().unwrap();
    assert_eq!(members(&device).len(), 2);
    complaints(&members(&device)).unwrap();
}
