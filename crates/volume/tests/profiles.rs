//! Every profile is read back from devices that a plain model of it has filled, in each way there
//! is, and with as many devices lost as the profile tolerates.

use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{DeviceId, Generation, HistoryId, Logical, Physical, Superblock};
use larder_volume::parity::{p_of, q_of};
use larder_volume::{Assembly, Device, ErrorKind, Found, MappedChunk, Stripe, Volume};
use proptest::prelude::*;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use zerocopy::FromZeros;

const K64: usize = 65536;
const START: Logical = Logical(1 << 20);
/// Where the stripe begins on each device.
const PLACE: u64 = 3 << 20;

/// A device in memory, which can be made to fail.
#[derive(Debug)]
struct Memory {
    bytes: Mutex<Vec<u8>>,
    fails: AtomicBool,
}

impl Device for Memory {
    fn name(&self) -> String {
        "memory".into()
    }
    fn size(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("lost"));
        }
        buf.copy_from_slice(&self.bytes.lock().unwrap()[at.0 as usize..][..buf.len()]);
        Ok(())
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("lost"));
        }
        self.bytes.lock().unwrap()[at.0 as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) { Err(io::Error::other("lost")) } else { Ok(()) }
    }
}

/// A volume with one chunk, what the chunk holds, and its devices.
struct Case {
    profile: Profile,
    volume: Volume,
    devices: Vec<Arc<Memory>>,
    data: Vec<u8>,
}

impl Case {
    fn new(profile: Profile, stripes: usize, rows: usize) -> Self {
        let columns = usize::from(profile.data_stripes(stripes as u16));
        let mut data = vec![0; rows * columns * K64];
        fastrand::Rng::with_seed(stripes as u64).fill(&mut data);
        let device = || {
            let bytes = Mutex::new(vec![0xa5; PLACE as usize + rows * K64]);
            Arc::new(Memory { bytes, fails: AtomicBool::new(false) })
        };
        let devices: Vec<Arc<Memory>> = (0..stripes).map(|_| device()).collect();
        let member =
            |(n, d): (usize, &Arc<Memory>)| (DeviceId(n as u64 + 1), d.clone() as Arc<dyn Device>);
        let volume = Volume::new(devices.iter().enumerate().map(member).collect()).unwrap();
        let stripe = |n| Stripe { device: DeviceId(n as u64 + 1), at: Physical(PLACE) };
        let chunk = MappedChunk {
            start: START,
            length: data.len() as u64,
            kind: (BlockGroupFlags::METADATA | profile.flag()).bits(),
            stripes: (0..stripes).map(stripe).collect(),
        };
        volume.add_chunk(chunk).unwrap();
        let case = Self { profile, volume, devices, data };
        for row in 0..rows {
            for (n, device) in case.devices.iter().enumerate() {
                let at = Physical(PLACE + (row * K64) as u64);
                device.write_at(at, &case.stored(row, n)).unwrap();
            }
        }
        case
    }

    /// What stripe `n` holds in a row.
    fn stored(&self, row: usize, n: usize) -> Vec<u8> {
        let element = |i: usize| &self.data[i * K64..(i + 1) * K64];
        let stripes = self.devices.len();
        let turned = (n + stripes - row % stripes) % stripes;
        let parity = |make: fn(&[&[u8]], &mut [u8]), columns: usize| {
            let all: Vec<&[u8]> = (0..columns).map(|c| element(row * columns + c)).collect();
            let mut out = vec![0; K64];
            make(&all, &mut out);
            out
        };
        match self.profile {
            Profile::Raid0 => element(row * stripes + n).to_vec(),
            Profile::Raid10 => element(row * (stripes / 2) + n / 2).to_vec(),
            Profile::Raid5 if turned == stripes - 1 => parity(p_of, stripes - 1),
            Profile::Raid5 => element(row * (stripes - 1) + turned).to_vec(),
            Profile::Raid6 if turned == stripes - 2 => parity(p_of, stripes - 2),
            Profile::Raid6 if turned == stripes - 1 => parity(q_of, stripes - 2),
            Profile::Raid6 => element(row * (stripes - 2) + turned).to_vec(),
            _ => element(row).to_vec(),
        }
    }

    /// Can every sector be read by one of the ways there are? None may read anything else.
    fn is_readable(&self) -> bool {
        let mut all = true;
        for at in (0..self.data.len()).step_by(16384) {
            let mut good = 0;
            let here = START.plus(at as u64);
            for copy in 0..self.volume.copies(here).unwrap() {
                let mut block = vec![0; 16384];
                if self.volume.read_block(here, &mut block, copy).is_ok() {
                    assert!(block == self.data[at..at + 16384], "{at} by way {copy}");
                    good += 1;
                }
            }
            all &= good > 0;
        }
        all
    }

    /// A volume of the same devices without some, of which others are stale.
    fn degraded(&self, lost: &[usize], stale: &[usize]) -> Volume {
        let mut superblock = Box::new(Superblock::new_zeroed());
        superblock.set_generation(Generation(9));
        superblock.num_devices.set(self.devices.len() as u64);
        let member = |n: usize| Found {
            id: DeviceId(n as u64 + 1),
            uuid: uuid::Uuid::from_u128(n as u128),
            generation: Generation(if stale.contains(&n) { 8 } else { 9 }),
            written: Generation(if stale.contains(&n) { 8 } else { 9 }),
            history: HistoryId::default(),
            is_stale: stale.contains(&n),
            seed: None,
            device: self.devices[n].clone(),
        };
        let here = (0..self.devices.len()).filter(|n| !lost.contains(n));
        let assembly = Assembly::new(superblock, here.map(member).collect());
        let volume = Volume::open(assembly, !lost.is_empty()).unwrap();
        volume.add_chunk(self.volume.map().chunks().remove(0)).unwrap();
        volume
    }

    /// Is the first copy of everything right?
    fn first_copies_are_right(&self, volume: &Volume) -> bool {
        let mut back = vec![0; self.data.len()];
        volume.read(START, &mut back, 0).is_ok() && back == self.data
    }

    /// Does each device hold its part of the data, and the parity that belongs to it?
    fn devices_hold_what_they_should(&self) {
        for (n, device) in self.devices.iter().enumerate() {
            let bytes = device.bytes.lock().unwrap();
            for row in 0..(bytes.len() - PLACE as usize) / K64 {
                let part = &bytes[PLACE as usize + row * K64..][..K64];
                assert!(part == self.stored(row, n), "{} {n} {row}", self.profile.name());
            }
        }
    }

    fn lose(&self, which: &[usize]) {
        for (n, device) in self.devices.iter().enumerate() {
            device.fails.store(which.contains(&n), Ordering::Relaxed);
        }
    }
}

/// Each profile with each number of stripes up to six.
fn cases() -> impl Iterator<Item = Case> {
    Profile::ALL.into_iter().flat_map(|profile| {
        (1..=6).filter(move |n| profile.fits_stripes(*n)).map(move |n| {
            let rows = if profile.parity() > 0 { usize::from(n) + 1 } else { 2 };
            Case::new(profile, n.into(), rows)
        })
    })
}

#[test]
fn every_way_reads_the_same() {
    for case in cases() {
        let (name, stripes) = (case.profile.name(), case.devices.len());
        for copy in 0..case.volume.copies(START).unwrap() {
            // Across elements, and not from the beginning of one.
            let mut back = vec![0; case.data.len() - 4096 - 512];
            case.volume.read(START.plus(512), &mut back, copy).unwrap();
            assert!(back == case.data[512..case.data.len() - 4096], "{name} of {stripes}, {copy}");
        }
        assert!(case.is_readable());
    }
}

/// Every set of numbers below `n`.
fn sets(n: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..1usize << n).map(move |bits| (0..n).filter(|n| bits >> n & 1 == 1).collect())
}

#[test]
fn as_many_devices_as_tolerated_may_be_lost() {
    for case in cases() {
        let stripes = case.devices.len();
        let tolerated = usize::from(case.profile.tolerated_losses());
        for lost in sets(stripes).filter(|lost| lost.len() <= tolerated + 1) {
            case.lose(&lost);
            let readable = case.is_readable();
            let name = case.profile.name();
            if lost.len() <= tolerated {
                assert!(readable, "{name} of {stripes} without {lost:?}");
            } else if case.profile != Profile::Raid10 && case.profile != Profile::Dup {
                assert!(!readable, "{name} of {stripes} without {lost:?}");
            }
        }
    }
}

#[test]
fn what_is_missing_is_not_asked_first() {
    for case in cases().filter(|case| case.profile != Profile::Dup) {
        let (name, stripes) = (case.profile.name(), case.devices.len());
        let tolerated = usize::from(case.profile.tolerated_losses());
        for lost in sets(stripes).filter(|lost| lost.len() < stripes) {
            let volume = case.degraded(&lost, &[]);
            let found = volume.first_lost(|_| true);
            let right = case.first_copies_are_right(&volume);
            assert_eq!(right, found.is_none(), "{name} of {stripes} without {lost:?}");
            assert!(right || lost.len() > tolerated, "{name} of {stripes} without {lost:?}");
            if let Some((_, missing)) = found {
                let missing: Vec<usize> = missing.iter().map(|id| id.0 as usize - 1).collect();
                assert_eq!(missing, lost);
            }
        }
    }
}

#[test]
fn what_is_stale_is_not_asked_first() {
    for case in cases().filter(|case| case.profile != Profile::Dup) {
        let tolerated = usize::from(case.profile.tolerated_losses());
        for stale in sets(case.devices.len()).filter(|stale| stale.len() <= tolerated) {
            let volume = case.degraded(&[], &stale);
            assert!(volume.first_lost(|_| true).is_none());
            case.lose(&stale);
            assert!(case.first_copies_are_right(&volume), "{} {stale:?}", case.profile.name());
            case.lose(&[]);
            // Its own turn comes, too.
            let copies = volume.copies(START).unwrap();
            let good = (0..copies).filter(|copy| {
                let mut back = vec![0; 4096];
                volume.read_block(START, &mut back, *copy).is_ok() && back == case.data[..4096]
            });
            assert_eq!(good.count(), copies);
        }
    }
}

/// Writes other data everywhere, in buffers that fit no element.
fn write_anew(case: &mut Case) -> Result<(), larder_volume::VolumeError> {
    fastrand::Rng::with_seed(7).fill(&mut case.data);
    let (one, two) = case.data.split_at(K64 / 2 + 512);
    let halves: Vec<io::IoSlice<'_>> = one.chunks(4096).map(io::IoSlice::new).collect();
    let rest = [io::IoSlice::new(two)];
    let at = START.plus(one.len() as u64);
    case.volume.write_batch(&[(START, &halves), (at, &rest)]).into_iter().collect()
}

#[test]
fn every_device_gets_its_part() {
    for mut case in cases() {
        write_anew(&mut case).unwrap();
        case.devices_hold_what_they_should();
        case.volume.flush().unwrap();
        assert_eq!(case.volume.failed(), []);
    }
}

#[test]
fn writing_goes_on_without_as_many_devices_as_tolerated() {
    let written = || cases().filter(|c| c.profile != Profile::Dup);
    for stripes in 1..=4 {
        for lost in sets(stripes) {
            for mut case in written().filter(|c| c.devices.len() == stripes) {
                let name = format!("{} of {stripes} without {lost:?}", case.profile.name());
                case.lose(&lost);
                let gone = |n: &usize| lost.contains(n);
                let pairs = (0..stripes / 2).any(|i| gone(&(2 * i)) && gone(&(2 * i + 1)));
                let good = match case.profile {
                    Profile::Raid10 => !pairs,
                    _ => lost.len() <= usize::from(case.profile.tolerated_losses()),
                };
                let wrote = write_anew(&mut case);
                assert_eq!(wrote.is_ok(), good, "{name}: {wrote:?}");
                assert_eq!(case.volume.flush().is_ok(), good, "{name}");
                if !good {
                    assert_eq!(case.volume.failed(), [], "{name}");
                    continue;
                }
                let failed: Vec<usize> =
                    case.volume.failed().iter().map(|id| id.0 as usize - 1).collect();
                assert_eq!(failed, lost, "{name}");
                // It answers again, with what it had before. It is not believed, and not written.
                case.lose(&[]);
                assert!(case.first_copies_are_right(&case.volume), "{name}");
                case.data.fill(1);
                case.volume.write(START, &case.data).unwrap();
                assert!(case.first_copies_are_right(&case.volume), "{name}");
                for n in &lost {
                    let mut back = vec![0; K64];
                    case.devices[*n].read_at(Physical(PLACE), &mut back).unwrap();
                    assert!(back != case.stored(0, *n), "{name}");
                }
            }
        }
    }
}

#[test]
fn what_is_written_without_devices_is_what_the_profile_may_lose() {
    for case in cases() {
        let (profile, n) = (case.profile, case.devices.len());
        case.volume.may_be_written().unwrap();
        for lost in sets(n).filter(|lost| lost.len() < n) {
            let result = case.degraded(&lost, &[]).may_be_written();
            let tolerated = lost.len() <= usize::from(profile.tolerated_losses());
            assert_eq!(result.is_ok(), tolerated, "{profile:?} without {lost:?}");
            if let Err(refused) = result {
                let said = refused.to_string();
                let named = format!("without device {}", lost[0] + 1);
                assert!(said.contains(&named) && said.contains(profile.name()), "{said}");
            }
        }
    }
}

/// Profiles with parity, with up to six stripes, and which of these are lost.
fn with_parity() -> impl Strategy<Value = (Profile, usize, Vec<usize>)> {
    prop::sample::select(vec![Profile::Raid5, Profile::Raid6])
        .prop_flat_map(|p| (Just(p), usize::from(p.min_devices())..7))
        .prop_flat_map(|(p, n)| {
            let lost = prop::collection::btree_set(0..n, 0..=usize::from(p.tolerated_losses()));
            (Just(p), Just(n), lost.prop_map(|lost| lost.into_iter().collect()))
        })
}

/// Writes of a batch, in sectors. They do not touch each other.
fn batches() -> impl Strategy<Value = Vec<(usize, usize)>> {
    prop::collection::vec((1usize..20, 1usize..60), 1..8).prop_map(|gaps| {
        let mut at = 0;
        let place = |(gap, len)| {
            let from = at + gap;
            at = from + len;
            (from, len)
        };
        gaps.into_iter().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever is written, the parity is that of what the devices hold, and nothing else in the
    /// rows has changed, or all of it is zero. The same without devices that fail meanwhile.
    #[test]
    fn parity_belongs_to_what_is_written(
        (profile, stripes, lost) in with_parity(),
        writes in batches(),
        fresh: bool,
    ) {
        let mut case = Case::new(profile, stripes, 6);
        let columns = usize::from(profile.data_stripes(stripes as u16));
        let end = case.data.len() / 4096;
        let writes: Vec<(usize, usize)> =
            writes.into_iter().filter(|(at, len)| at + len <= end).collect();
        if fresh {
            // The rows: a sector of each element of a full stripe.
            for sector in writes.iter().flat_map(|(at, len)| *at..at + len) {
                for column in 0..columns {
                    let element = sector / 16 / columns * columns + column;
                    case.data[(element * 16 + sector % 16) * 4096..][..4096].fill(0);
                }
            }
        }
        for (n, (at, len)) in writes.iter().enumerate() {
            fastrand::Rng::with_seed(n as u64).fill(&mut case.data[at * 4096..(at + len) * 4096]);
        }
        let slices: Vec<Vec<io::IoSlice<'_>>> = writes
            .iter()
            .map(|(at, len)| case.data[at * 4096..(at + len) * 4096].chunks(12288))
            .map(|chunks| chunks.map(io::IoSlice::new).collect())
            .collect();
        let batch: Vec<(Logical, &[io::IoSlice<'_>])> = writes
            .iter()
            .zip(&slices)
            .map(|((at, _), slices)| (START.plus(*at as u64 * 4096), &slices[..]))
            .collect();
        case.lose(&lost);
        let done = if fresh {
            let reads = |v: &Volume| v.stats().iter().map(|(_, s)| s.reads).sum::<u64>();
            let done = case.volume.write_fresh(&batch);
            prop_assert_eq!(reads(&case.volume), 0);
            done
        } else {
            case.volume.write_batch(&batch)
        };
        prop_assert!(done.iter().all(Result::is_ok), "{:?}", done);
        case.lose(&[]);
        if lost.is_empty() {
            case.devices_hold_what_they_should();
        }
        prop_assert!(case.first_copies_are_right(&case.volume));
    }
}

/// Of a row that holds something, nothing is discarded.
#[test]
fn what_has_a_part_in_parity_is_not_discarded() {
    for case in cases().filter(|case| case.profile.parity() > 0) {
        let stripes = case.devices.len() as u64;
        let columns = u64::from(case.profile.data_stripes(case.devices.len() as u16));
        let stripe = columns * K64 as u64;
        let discard = |at: u64, len: u64| case.volume.discard(START.plus(at), len).unwrap();
        assert_eq!(discard(4096, 2 * stripe - 8192), 0);
        assert_eq!(discard(4096, 3 * stripe - 4096), 2 * stripes * K64 as u64);
        assert_eq!(discard(stripe, stripe), stripes * K64 as u64);
    }
}

#[test]
fn what_no_checksum_covers_is_not_read_from_a_device_that_is_behind() {
    let case = Case::new(Profile::Raid1c3, 3, 1);
    let trusted = |stale: &[usize]| case.degraded(&[], stale).trusted_copies(START).unwrap();
    assert_eq!([trusted(&[]), trusted(&[1]), trusted(&[0, 2]), trusted(&[0, 1, 2])], [3, 2, 1, 3]);
    let volume = case.degraded(&[1], &[0]);
    assert_eq!(volume.trusted_copies(START).unwrap(), 1);
    assert_eq!(volume.behind(), [DeviceId(1)]);
    volume.set_current(DeviceId(1));
    assert_eq!((volume.trusted_copies(START).unwrap(), volume.behind()), (2, vec![]));
}

#[test]
fn bad_copies_count_for_their_device() {
    let case = Case::new(Profile::Raid1c3, 3, 4);
    let volume = case.degraded(&[], &[]);
    // Copies are different devices, whichever has its turn.
    for at in (0..case.data.len() as u64).step_by(K64) {
        for copy in 0..3 {
            volume.found_bad(START.plus(at), copy, ErrorKind::Corruption);
        }
    }
    for (_, errors) in volume.errors() {
        assert_eq!(errors.corruptions, case.data.len() as u64 / K64 as u64);
    }
    assert_eq!(volume.take_changed_errors().len(), 3);
    assert!(!volume.errors_have_changed());
}

/// What only a device has that is behind is not all that there was.
#[test]
fn a_device_that_is_behind_stands_in_for_no_other() {
    let case = Case::new(Profile::Raid1c3, 3, 1);
    let written = |stale: &[usize], lost: &[usize]| {
        let volume = case.degraded(&[], stale);
        case.lose(lost);
        let done = volume.write(START, &case.data).and_then(|()| volume.flush());
        case.lose(&[]);
        (done.is_ok(), volume.failed().len())
    };
    assert_eq!(written(&[0], &[1]), (true, 1));
    assert_eq!(written(&[0], &[1, 2]), (false, 0));
    assert_eq!(written(&[0, 1], &[2]), (false, 0));
    assert_eq!(written(&[0, 1], &[0]), (true, 1));
    assert_eq!(written(&[], &[0, 1]), (true, 2));
}
