//! A flush that succeeds promises what was written, also where devices refuse some of it.
//!
//! The devices here keep what they take in a cache, and a flush puts the cache on the medium. A
//! power cut leaves what is on the media. Whatever devices refuse: as long as flushes succeed, what
//! was written before them can be read from the media in some way.

use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{DeviceId, Logical, Physical};
use larder_volume::{Device, MappedChunk, Stripe, Volume};
use proptest::prelude::*;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 16384;
/// What the chunks have of a device.
const FIRST: u64 = 65536;
const SIZE: u64 = FIRST + 2 * 65536 * CHUNKS.len() as u64;

#[derive(Debug, Default)]
struct State {
    medium: Vec<u8>,
    /// What is read: the medium with the cache upon it.
    shown: Vec<u8>,
    cache: Vec<Range<usize>>,
    /// Writes to these places are refused.
    bad: Vec<Range<u64>>,
    refuses_flushes: bool,
    flushes: usize,
}

/// A device with a cache.
#[derive(Debug)]
struct Cached(Mutex<State>);

impl Cached {
    fn new(medium: Vec<u8>) -> Arc<Self> {
        let shown = medium.clone();
        Arc::new(Self(Mutex::new(State { medium, shown, ..State::default() })))
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl Device for Cached {
    fn name(&self) -> String {
        "cached".into()
    }
    fn size(&self) -> u64 {
        self.state().medium.len() as u64
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        buf.copy_from_slice(&self.state().shown[at.0 as usize..][..buf.len()]);
        Ok(())
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        if state.bad.iter().any(|bad| bad.contains(&at.0)) {
            return Err(io::Error::other("bad sector"));
        }
        let range = at.0 as usize..at.0 as usize + data.len();
        state.shown[range.clone()].copy_from_slice(data);
        state.cache.push(range);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        let state = &mut *self.state();
        state.flushes += 1;
        let cache = std::mem::take(&mut state.cache);
        if state.refuses_flushes {
            return Err(io::Error::other("not written"));
        }
        for range in cache {
            state.medium[range.clone()].copy_from_slice(&state.shown[range]);
        }
        Ok(())
    }
}

/// Chunks side by side, on four devices.
const CHUNKS: [(Profile, &[u64]); 9] = [
    (Profile::Single, &[1]),
    (Profile::Raid1, &[1, 2]),
    (Profile::Raid1, &[2, 3]),
    (Profile::Raid1c3, &[1, 2, 3]),
    (Profile::Dup, &[2, 2]),
    (Profile::Raid0, &[3, 4]),
    (Profile::Raid10, &[1, 2, 3, 4]),
    (Profile::Raid5, &[1, 2, 4]),
    (Profile::Raid6, &[4, 3, 2, 1]),
];

fn start(chunk: usize) -> Logical {
    Logical(MIB * (chunk as u64 + 1))
}

/// Where a chunk has its stripes, on each of its devices.
fn places(chunk: usize) -> Vec<Stripe> {
    let at = 2 * 65536 * chunk as u64;
    let (profile, devices) = CHUNKS[chunk];
    let second = |n: usize| if profile == Profile::Dup { 65536 * n as u64 } else { 0 };
    let place = |(n, id): (usize, &u64)| Stripe {
        device: DeviceId(*id),
        at: Physical(FIRST + at + second(n)),
    };
    devices.iter().enumerate().map(place).collect()
}

/// Each chunk is one full stripe long.
fn length(chunk: usize) -> usize {
    let (profile, devices) = CHUNKS[chunk];
    65536 * usize::from(profile.data_stripes(devices.len() as u16))
}

fn volume(devices: &[Arc<Cached>]) -> Volume {
    let member =
        |(n, d): (usize, &Arc<Cached>)| (DeviceId(n as u64 + 1), d.clone() as Arc<dyn Device>);
    let volume = Volume::new(devices.iter().enumerate().map(member).collect()).unwrap();
    for (chunk, (profile, _)) in CHUNKS.iter().enumerate() {
        let kind = (BlockGroupFlags::DATA | profile.flag()).bits();
        let (start, length) = (start(chunk), length(chunk) as u64);
        let stripes = places(chunk).into_iter().collect();
        volume.add_chunk(MappedChunk { start, length, kind, stripes }).unwrap();
    }
    volume
}

fn devices() -> Vec<Arc<Cached>> {
    (0..4).map(|_| Cached::new(vec![0; SIZE as usize])).collect()
}

/// Writes a chunk as a whole.
fn write(volume: &Volume, chunk: usize, byte: u8) -> bool {
    let data = vec![byte; length(chunk)];
    volume.write_fresh(&[(start(chunk), &[IoSlice::new(&data)])]).remove(0).is_ok()
}

/// What a power cut leaves.
fn after_a_cut(devices: &[Arc<Cached>]) -> Volume {
    let media: Vec<_> = devices.iter().map(|d| Cached::new(d.state().medium.clone())).collect();
    volume(&media)
}

/// Can the chunk be read as that in some way?
fn holds(volume: &Volume, chunk: usize, byte: u8) -> bool {
    (0..length(chunk)).step_by(BLOCK).all(|into| {
        let at = start(chunk).plus(into as u64);
        let mut block = vec![0; BLOCK];
        (0..volume.copies(at).unwrap()).any(|copy| {
            volume.read_block(at, &mut block, copy).is_ok() && block.iter().all(|b| *b == byte)
        })
    })
}

/// From now on a device refuses writes to what it has of a chunk.
fn spoil(devices: &[Arc<Cached>], device: u64, chunk: usize) {
    let mine = places(chunk).into_iter().filter(|place| place.device.0 == device);
    let bad = mine.map(|place| place.at.0..place.at.0 + 65536);
    devices[device as usize - 1].state().bad.extend(bad);
}

#[test]
fn what_only_a_failed_device_has_is_flushed() {
    for refuses in [false, true] {
        let devices = devices();
        let volume = volume(&devices);
        assert!(write(&volume, 0, 7), "on device 1 only");
        spoil(&devices, 1, 1);
        assert!(write(&volume, 1, 8), "device 2 has it as well");
        assert_eq!(volume.failed(), [DeviceId(1)]);
        devices[0].state().refuses_flushes = refuses;
        assert_eq!(volume.flush().is_ok(), !refuses);
        let left = after_a_cut(&devices);
        assert_eq!(holds(&left, 0, 7), !refuses);
        assert!(holds(&left, 1, 8));
    }
}

#[test]
fn a_failed_device_is_flushed_no_more_than_needed() {
    let devices = devices();
    let volume = volume(&devices);
    let flushes = || devices[0].state().flushes;
    assert!(write(&volume, 0, 7));
    volume.flush().unwrap();
    assert_eq!(flushes(), 1);
    spoil(&devices, 1, 1);
    assert!(write(&volume, 1, 8) && write(&volume, 3, 9));
    volume.flush().unwrap();
    assert_eq!(flushes(), 1, "the others have what was written");
    // There is no other place for it.
    assert!(write(&volume, 0, 10));
    volume.flush().unwrap();
    assert_eq!(flushes(), 2);
    assert!(holds(&after_a_cut(&devices), 0, 10));
    volume.flush().unwrap();
    assert_eq!(flushes(), 2, "nothing was written since");
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize),
    Flush,
    Spoil(u64, usize),
    RefuseFlushes(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..CHUNKS.len()).prop_map(Step::Write),
        3 => Just(Step::Flush),
        2 => (1..=4u64, 0..CHUNKS.len()).prop_map(|(device, chunk)| Step::Spoil(device, chunk)),
        1 => (1..=4u64).prop_map(Step::RefuseFlushes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_flush_that_succeeds_keeps_its_promise(
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let devices = devices();
        let volume = volume(&devices);
        // What was written, where that succeeded.
        let mut written: [Option<u8>; CHUNKS.len()] = Default::default();
        for (n, step) in (1..).zip(steps) {
            match step {
                Step::Write(chunk) => written[chunk] = write(&volume, chunk, n).then_some(n),
                Step::Spoil(device, chunk) => spoil(&devices, device, chunk),
                Step::RefuseFlushes(device) => {
                    devices[device as usize - 1].state().refuses_flushes = true;
                }
                Step::Flush => {
                    if volume.flush().is_err() {
                        break;
                    }
                    let left = after_a_cut(&devices);
                    for (chunk, byte) in written.iter().enumerate() {
                        let is_there = byte.is_none_or(|byte| holds(&left, chunk, byte));
                        prop_assert!(is_there, "{:?}", CHUNKS[chunk]);
                    }
                }
            }
        }
    }
}
