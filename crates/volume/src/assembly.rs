//! Which devices make a file system together, and how far each of them is believed.
//!
//! Every device has a superblock of its own: the file system's, with an item that says which of its
//! devices this is. The superblock of the newest generation is the one to go by, and within a
//! generation that of the last log: an `fsync` writes superblocks, too. A device whose superblock
//! is older is **stale**. Either a power cut came between writing the one superblock and the other,
//! or the device was away while the others were written. In the first case it has all data of the
//! newest commit, in the second case it has not, and nothing tells them apart. So what a stale
//! device has is read last, and counts only where a checksum says that it is right.
//!
//! If a device failed in the newest commit, its superblock names that device
//! ([`larder_format::failed`]). All others had the commit's data before the first superblock was
//! written. So one of them that only lacks that superblock is not stale.
//!
//! Of several stale devices, those with an older superblock lack more: they certainly were away. So
//! what they have is read after what the others have.
//!
//! A device is stale as well if the item in its superblock has a **mark**
//! ([`larder_format::DevItem::mark`]). Such a device has got the newest superblock, so that the
//! others may be lost, but not yet all that the others have.
//!
//! Two devices of one generation with different trees or histories were both written without the
//! other. Neither can be brought up to date from the other, so the caller has to leave one out.
//!
//! Two kinds of devices are set apart. The **target** of a replacement has the superblock of the
//! file system, but no number of its own yet: it counts for nothing, and is only compared with the
//! others to see whether it has everything that they have. And a device may be there that another
//! one has replaced: a power cut came before its superblock was erased. Both say that they are the
//! same device then. The newer one is, if there was a replacement; that is in the trees.
//!
//! A file system may be built upon **seeds**: devices of another file system, which is marked as a
//! seed and never written again. They count as devices of this one and have numbers of it, but keep
//! the superblock of their own. A seed may be built upon seeds in turn. So of the file systems that
//! the superblocks name, the one that is no seed is meant. If all are seeds, it is the newest.
//!
//! Whether devices are missing is not decided here: which devices there are is in the chunk tree.
//! It also says which history a device left that was missing ([`larder_format::history`]).

use crate::device::Device;
use crate::error::{VolumeError, VolumeResult};
use crate::superblock::read_superblock;
use larder_format::features::SuperFlags;
use larder_format::{DeviceId, Generation, HistoryId, Superblock};
use std::collections::BTreeSet;
use std::sync::Arc;
use uuid::Uuid;

/// A device of a file system, by what its superblock says.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its number in the file system.
    pub id: DeviceId,
    /// Its own uuid.
    pub uuid: Uuid,
    /// The last commit that it has as a whole. Of two that are stale and have the same commit, one
    /// that lacks the other's log counts as a commit older.
    pub generation: Generation,
    /// The commit that its superblock is of.
    pub written: Generation,
    /// The history that its superblock belongs to.
    pub history: HistoryId,
    /// Is there a device with a newer superblock, or has it a mark?
    pub is_stale: bool,
    /// The file system that it is a device of, if it is a seed. It is what items of devices and
    /// headers of blocks name ([`Superblock::metadata_fsid`]).
    pub seed: Option<Uuid>,
    /// The device.
    pub device: Arc<dyn Device>,
}

/// Devices that belong together.
#[derive(Clone, Debug)]
pub struct Assembly {
    /// The newest superblock.
    pub superblock: Box<Superblock>,
    /// The devices, by number.
    pub devices: Vec<Found>,
    /// The target of a replacement.
    pub target: Option<Found>,
    /// Devices of which there is a newer one. If no replacement has ended, they are copies, and the
    /// caller has to refuse them ([`Found::claims_to_be`]).
    pub superseded: Vec<Found>,
}

impl Assembly {
    /// Devices that are known to belong together.
    #[must_use]
    pub fn new(superblock: Box<Superblock>, devices: Vec<Found>) -> Self {
        Self { superblock, devices, target: None, superseded: Vec::new() }
    }

    /// Reads the superblocks of these devices.
    ///
    /// # Errors
    /// Those of [`read_superblock`]; [`VolumeError::Corrupt`] when there are no devices, when they
    /// are of different file systems, when two are the same device or claim to be, and when one is
    /// shorter than its superblock says; [`VolumeError::Apart`]. Every error names the device.
    pub fn of(devices: impl IntoIterator<Item = Arc<dyn Device>>) -> VolumeResult<Self> {
        let read = |device: Arc<dyn Device>| Ok((read_superblock(&*device)?, device));
        let read = devices.into_iter().map(read).collect::<VolumeResult<Vec<_>>>()?;
        let fsid = top_of(&read)?;
        let mut parts = Parts::default();
        for (superblock, device) in read {
            let found = Found::new(&superblock, device, fsid);
            is_long_enough(&found, &superblock)?;
            parts.take(Part { found, state: State::of(&superblock), superblock })?;
        }
        parts.assembled()
    }

    /// The first device that is no seed.
    ///
    /// # Panics
    /// Never: an assembly has one, whose superblock it goes by.
    #[must_use]
    pub fn first(&self) -> &Found {
        let own = self.devices.iter().find(|f| f.seed.is_none());
        own.expect("the superblock is that of a device")
    }

    /// Devices of file systems upon which this one is built.
    pub fn seeds(&self) -> impl Iterator<Item = &Found> {
        self.devices.iter().filter(|f| f.seed.is_some())
    }

    /// Devices whose superblock is older than the newest, or has a mark.
    pub fn stale(&self) -> impl Iterator<Item = &Found> {
        self.devices.iter().filter(|f| f.is_stale)
    }
}

impl Found {
    /// A device of the file system `fsid`, or a seed of it.
    fn new(superblock: &Superblock, device: Arc<dyn Device>, fsid: [u8; 16]) -> Self {
        let own = superblock.metadata_fsid();
        let mark = superblock.dev_item.mark(&own);
        Self {
            id: superblock.device_id(),
            uuid: Uuid::from_bytes(superblock.dev_item.uuid),
            generation: mark.unwrap_or(superblock.generation()),
            written: superblock.generation(),
            history: superblock.history(),
            is_stale: mark.is_some(),
            seed: (superblock.fsid != fsid).then(|| Uuid::from_bytes(own)),
            device,
        }
    }

    /// Do both say that they are the same device?
    fn is_like(&self, other: &Self) -> bool {
        self.id == other.id || self.uuid == other.uuid
    }

    /// The error that two devices say that they are the same one.
    #[must_use]
    pub fn claims_to_be(&self, other: &Self) -> VolumeError {
        twice(self, other)
    }
}

/// A device, and how far it has come.
struct Part {
    found: Found,
    state: State,
    superblock: Box<Superblock>,
}

/// What was found so far.
#[derive(Default)]
struct Parts {
    devices: Vec<Part>,
    seeds: Vec<Found>,
    target: Option<Part>,
    superseded: Vec<Found>,
}

impl Parts {
    /// Adds a device.
    fn take(&mut self, mut part: Part) -> VolumeResult<()> {
        if let Some(seed) = self.seeds.iter().find(|seed| part.found.is_like(seed)) {
            return Err(twice(&part.found, seed));
        }
        if part.found.seed.is_some() {
            return self.take_seed(part.found);
        }
        let all = self.devices.iter_mut().chain(&mut self.target);
        if let Some(other) = all.into_iter().find(|other| part.found.is_like(&other.found)) {
            if !other.is_of_another_time(&part) {
                return Err(twice(&part.found, &other.found));
            }
            if part.is_later_than(other) {
                std::mem::swap(&mut part, other);
            }
            self.superseded.push(part.found);
            return Ok(());
        }
        if part.found.id == DeviceId::REPLACE_TARGET {
            self.target = Some(part);
            return Ok(());
        }
        for other in &self.devices {
            went_apart(&part.found, &part.state, other.found.id, &other.state)?;
        }
        self.devices.push(part);
        Ok(())
    }

    fn take_seed(&mut self, seed: Found) -> VolumeResult<()> {
        let mut all = self.devices.iter().chain(&self.target);
        if let Some(other) = all.find(|other| seed.is_like(&other.found)) {
            return Err(twice(&seed, &other.found));
        }
        self.seeds.push(seed);
        Ok(())
    }

    fn assembled(self) -> VolumeResult<Assembly> {
        let Self { mut devices, seeds, target, superseded } = self;
        devices.sort_by_key(|part| part.found.id);
        // The first of equals.
        let newest = devices.iter().rev().max_by_key(|part| part.state);
        let Some((current, mut superblock)) = newest.map(|p| (p.state, p.superblock.clone()))
        else {
            return Err(match target {
                Some(target) => corrupt(
                    target.found.device.name(),
                    "it was to take the place of another device, and has not got everything yet: \
                        name the devices of the file system, too"
                        .into(),
                ),
                None => no_devices(),
            });
        };
        superblock.dev_item = superblock.dev_item.with_arrival(false);
        let newest = Newest { state: current, failed: superblock.failed() };
        let is_stale = |part: &&Part| part.found.is_stale || part.state != current;
        let stale = devices.iter().filter(is_stale).map(|part| (part.found.id, part.state));
        let stale: Vec<(DeviceId, State)> = stale.collect();
        let judged = |mut part: Part| {
            if newest.has_all_but_superblock(&part) {
                part.found.generation = current.generation;
                return part.found;
            }
            part.found.is_stale |= part.state != current;
            if part.found.generation == part.found.written {
                let later = later_logs(&stale, part.found.id);
                part.found.generation = Generation(part.state.generation.0.saturating_sub(later));
            }
            part.found
        };
        let mut devices: Vec<Found> = devices.into_iter().map(judged).chain(seeds).collect();
        devices.sort_by_key(|found| found.id);
        Ok(Assembly { superblock, devices, target: target.map(judged), superseded })
    }
}

/// What the newest superblock says.
struct Newest {
    state: State,
    /// The devices that failed in its commit, if it names any.
    failed: Option<Vec<DeviceId>>,
}

impl Newest {
    /// Does a device lack the superblock of the newest commit, and nothing else? That of a log is
    /// written by another rule. The target of a replacement is never named.
    fn has_all_but_superblock(&self, part: &Part) -> bool {
        let Some(failed) = &self.failed else { return false };
        let (found, target) = (&part.found, DeviceId::REPLACE_TARGET);
        let may_have_failed = found.id == target || failed.contains(&found.id);
        let is_before = part.state.generation.0 + 1 == self.state.generation.0;
        is_before && !self.state.has_log && !found.is_stale && !may_have_failed
    }
}

impl Part {
    /// May both be one device, of which one is of an earlier time?
    fn is_of_another_time(&self, other: &Self) -> bool {
        let is_one = self.found.id == other.found.id && self.found.uuid == other.found.uuid;
        is_one && self.time() != other.time()
    }

    /// Of two that may be one device: is this the later one?
    fn is_later_than(&self, other: &Self) -> bool {
        (self.time(), self.state) > (other.time(), other.state)
    }

    /// The commit, and whether the device has come to its place.
    fn time(&self) -> (Generation, bool) {
        (self.state.generation, !self.superblock.dev_item.arrives())
    }
}

/// Of superblocks of different file systems that of the one that is meant: the first that is no
/// seed, or the newest if all are seeds.
#[must_use]
pub fn meant<'s>(
    superblocks: impl Iterator<Item = &'s Superblock> + Clone,
) -> Option<&'s Superblock> {
    let no_seed = superblocks.clone().find(|sb| !is_seed(sb));
    no_seed.or_else(|| superblocks.max_by_key(|sb| sb.generation()))
}

/// The fsid of the file system that is meant by these devices.
///
/// # Errors
/// [`VolumeError::Corrupt`] for devices of different file systems that are no seeds.
fn top_of(devices: &[(Box<Superblock>, Arc<dyn Device>)]) -> VolumeResult<[u8; 16]> {
    let top = meant(devices.iter().map(|(sb, _)| &**sb)).ok_or_else(no_devices)?;
    let first = devices.iter().find(|(sb, _)| sb.fsid == top.fsid).ok_or_else(no_devices)?;
    for (superblock, device) in devices.iter().filter(|(sb, _)| !is_seed(sb)) {
        same_file_system(&**device, superblock, &*first.1, top)?;
    }
    Ok(top.fsid)
}

fn is_seed(superblock: &Superblock) -> bool {
    superblock.super_flags().contains(SuperFlags::SEEDING)
}

fn no_devices() -> VolumeError {
    corrupt("file system".into(), "it has no devices".into())
}

fn corrupt(device: String, what: String) -> VolumeError {
    VolumeError::Corrupt { device, what }
}

fn same_file_system(
    device: &dyn Device,
    superblock: &Superblock,
    first: &dyn Device,
    other: &Superblock,
) -> VolumeResult<()> {
    if superblock.fsid == other.fsid {
        return Ok(());
    }
    let (is, expected) = (Uuid::from_bytes(superblock.fsid), Uuid::from_bytes(other.fsid));
    let what =
        format!("it belongs to file system {is}, but {} to file system {expected}", first.name());
    Err(corrupt(device.name(), what))
}

fn twice(one: &Found, other: &Found) -> VolumeError {
    let (id, name) = (one.id, other.device.name());
    let what = if one.id != other.id {
        format!(
            "it is device {id} and {name} is device {}, but both have the uuid {}",
            other.id, one.uuid
        )
    } else if one.uuid == other.uuid {
        format!(
            "it and {name} are both device {id} ({}): the same device twice, or a copy of it; \
            name one of them",
            one.uuid
        )
    } else {
        format!(
            "it and {name} are both device {id} of the file system, with the uuids {} and {}; \
            name the one that belongs to it",
            one.uuid, other.uuid
        )
    };
    corrupt(one.device.name(), what)
}

/// A metadata dump may be shorter: it is as long as what was put into it.
fn is_long_enough(one: &Found, superblock: &Superblock) -> VolumeResult<()> {
    let (size, needed) = (one.device.size(), superblock.dev_item.total_bytes.get());
    if needed <= size || superblock.metadata_dump().is_some() {
        return Ok(());
    }
    let what = format!(
        "the file system is {needed} bytes long but the device only {size}: is the image \
            truncated?"
    );
    Err(corrupt(one.device.name(), what))
}

/// How far a device has come, as its superblock says. In the order of time: within a generation the
/// superblock with a log is the newer one, because the commit writes it without, and each log of
/// Larder has a higher number than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    generation: Generation,
    has_log: bool,
    log_number: u64,
    /// Logs of Linux have no number, so one of them counts as the newest.
    log_root: u64,
    root: u64,
    chunk_root: u64,
    bytes_used: u64,
    history: HistoryId,
}

impl State {
    fn of(superblock: &Superblock) -> Self {
        let has_log = superblock.log_root().is_some();
        Self {
            generation: superblock.generation(),
            has_log,
            log_number: if has_log { superblock.log_number() } else { 0 },
            log_root: superblock.log_root.get(),
            root: superblock.root.get(),
            chunk_root: superblock.chunk_root.get(),
            bytes_used: superblock.bytes_used.get(),
            history: superblock.history(),
        }
    }

    /// What all devices have in common after a commit.
    fn commit(&self) -> (u64, u64, u64, HistoryId) {
        (self.root, self.chunk_root, self.bytes_used, self.history)
    }
}

/// So many logs of the same commit are later than what a device has.
fn later_logs(states: &[(DeviceId, State)], id: DeviceId) -> u64 {
    let Some((_, own)) = states.iter().find(|(other, _)| *other == id) else { return 0 };
    let is_later = |state: &State| state.generation == own.generation && state > own;
    let later = states.iter().map(|(_, state)| state).filter(|state| is_later(state));
    later.map(|state| state.log_root).collect::<BTreeSet<_>>().len() as u64
}

/// Were two devices written without each other?
fn went_apart(one: &Found, state: &State, id: DeviceId, other: &State) -> VolumeResult<()> {
    if state.generation != other.generation || state.commit() == other.commit() {
        return Ok(());
    }
    Err(VolumeError::apart(&*one.device, one.id, id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::superblock::{SuperCopies, write_superblocks};
    use larder_format::superblock::MAGIC;
    use larder_format::{CsumType, Logical, Physical};
    use std::io;
    use std::sync::Mutex;
    use zerocopy::FromZeros;

    const SIZE: u64 = 1 << 20;

    #[derive(Debug)]
    struct Memory(&'static str, Mutex<Vec<u8>>);

    impl Device for Memory {
        fn name(&self) -> String {
            self.0.into()
        }
        fn size(&self) -> u64 {
            SIZE
        }
        fn is_read_only(&self) -> bool {
            false
        }
        fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
            buf.copy_from_slice(&self.1.lock().unwrap()[at.0 as usize..][..buf.len()]);
            Ok(())
        }
        fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
            self.1.lock().unwrap()[at.0 as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn device(name: &'static str, id: u64, change: impl Fn(&mut Superblock)) -> Arc<dyn Device> {
        let mut sb = Superblock::new_zeroed();
        sb.magic = MAGIC;
        sb.fsid = [5; 16];
        sb.set_generation(Generation(7));
        sb.set_root(Logical(1 << 20), 0);
        sb.set_chunk_root(Logical(2 << 20), 0, Generation(5));
        sb.set_total_bytes(3 * SIZE);
        sb.set_bytes_used(10 * 4096);
        sb.num_devices.set(3);
        for field in [&mut sb.sectorsize, &mut sb.nodesize, &mut sb.leafsize, &mut sb.stripesize] {
            field.set(4096);
        }
        sb.set_csum_type(CsumType::Crc32c);
        sb.dev_item.devid.set(id);
        sb.dev_item.total_bytes.set(SIZE);
        sb.dev_item.uuid = [id as u8; 16];
        sb.set_sys_chunk_bytes(&[0; 97]).unwrap();
        change(&mut sb);
        sb.dev_item.fsid = sb.fsid;
        let device = Memory(name, Mutex::new(vec![0; SIZE as usize]));
        write_superblocks(&device, &sb, SuperCopies::Primary).unwrap();
        Arc::new(device)
    }

    #[test]
    fn the_newest_superblock_counts_whatever_the_order() {
        let a = device("a", 1, |sb| sb.set_generation(Generation(6)));
        let b = device("b", 2, |_| {});
        let c = device("c", 3, |sb| sb.log_root.set(4096));
        for devices in [[&a, &b, &c], [&c, &b, &a], [&b, &c, &a]] {
            let found = Assembly::of(devices.into_iter().cloned()).unwrap();
            assert_eq!(found.superblock.generation(), Generation(7));
            assert_eq!(found.superblock.log_root(), Some(Logical(4096)));
            let ids: Vec<u64> = found.devices.iter().map(|f| f.id.0).collect();
            assert_eq!(ids, [1, 2, 3]);
            let stale: Vec<String> = found.stale().map(|f| f.device.name()).collect();
            // The second lacks the log, so it lacks what was synced in it.
            assert_eq!(stale, ["a", "b"]);
        }
    }

    #[test]
    fn a_later_log_counts_more() {
        let log = |root: u64, number| {
            move |sb: &mut Superblock| {
                sb.log_root.set(root);
                sb.set_log_number(number);
            }
        };
        let a = device("a", 1, log(8192, 2));
        let b = device("b", 2, log(4096, 3));
        for devices in [[&a, &b], [&b, &a]] {
            let found = Assembly::of(devices.into_iter().cloned()).unwrap();
            assert_eq!(found.superblock.log_root(), Some(Logical(4096)));
            let stale: Vec<u64> = found.stale().map(|f| f.id.0).collect();
            assert_eq!(stale, [1]);
        }
    }

    #[test]
    fn a_stale_device_without_the_log_of_another_lacks_more() {
        let log = |generation, number| {
            move |sb: &mut Superblock| {
                sb.set_generation(Generation(generation));
                sb.log_root.set(4096 * number);
                sb.set_log_number(number);
            }
        };
        let newest = device("a", 1, log(8, 0));
        let devices = [newest, device("b", 2, log(7, 0)), device("c", 3, log(7, 5))];
        let found = Assembly::of(devices).unwrap();
        let since: Vec<(u64, u64)> = found.stale().map(|f| (f.id.0, f.generation.0)).collect();
        assert_eq!(since, [(2, 6), (3, 7)]);
    }

    #[test]
    fn of_devices_that_lack_the_newest_superblock_those_that_failed_are_stale() {
        let newest = |more: fn(&mut Superblock)| {
            device("a", 1, move |sb| {
                sb.set_generation(Generation(8));
                sb.note_failed(&[DeviceId(2)]);
                more(sb);
            })
        };
        let old = |id| device("old", id, |_| {});
        let stale = |devices: Vec<Arc<dyn Device>>| {
            let found = Assembly::of(devices).unwrap();
            found.stale().map(|f| f.id.0).collect::<Vec<_>>()
        };
        assert_eq!(stale(vec![newest(|_| {}), old(2), old(3)]), [2]);
        let older = device("older", 3, |sb| sb.set_generation(Generation(6)));
        assert_eq!(stale(vec![newest(|_| {}), old(2), older]), [2, 3]);
        let marked = device("marked", 3, |sb| {
            sb.dev_item = sb.dev_item.with_mark(Some(Generation(5)));
        });
        assert_eq!(stale(vec![newest(|_| {}), old(2), marked]), [2, 3]);
        let with_log = newest(|sb| sb.log_root.set(4096));
        assert_eq!(stale(vec![with_log, old(2), old(3)]), [2, 3]);
        let later = newest(|sb| sb.set_generation(Generation(9)));
        let eighth = device("b", 3, |sb| sb.set_generation(Generation(8)));
        assert_eq!(stale(vec![later, old(2), eighth]), [2, 3], "nothing is said of the ninth");
        let target = device("t", 0, |sb| sb.dev_item.uuid = [9; 16]);
        let found = Assembly::of([newest(|_| {}), old(2), old(3), target]).unwrap();
        assert!(found.target.unwrap().is_stale, "it is never named");
    }

    #[test]
    fn devices_of_different_histories_are_not_joined() {
        let b = device("b", 2, |sb| {
            sb.begin_history(HistoryId::from_random([3; 8]), Generation(7));
        });
        let refused = Assembly::of([device("a", 1, |_| {}), b]).unwrap_err();
        assert!(matches!(refused, VolumeError::Apart { .. }), "{refused}");
    }

    #[test]
    fn the_target_of_a_replacement_counts_for_nothing() {
        let target = |generation| {
            device("t", 0, |sb| {
                sb.set_generation(Generation(generation));
                sb.dev_item.uuid = [9; 16];
            })
        };
        for (generation, is_stale) in [(6, true), (7, false), (8, true)] {
            let devices = [target(generation), device("a", 1, |_| {})];
            let found = Assembly::of(devices).unwrap();
            assert_eq!(found.superblock.generation(), Generation(7));
            assert_eq!((found.devices.len(), found.devices[0].is_stale), (1, false));
            assert_eq!(found.target.unwrap().is_stale, is_stale);
        }
        let text = Assembly::of([target(7)]).unwrap_err().to_string();
        assert!(text.starts_with("t: it was to take the place"), "{text}");
        let text = Assembly::of([target(7), target(7)]).unwrap_err().to_string();
        assert!(text.contains("the same device twice"), "{text}");
    }

    #[test]
    fn of_one_device_at_two_times_the_later_counts() {
        let old = || device("old", 1, |sb| sb.set_generation(Generation(6)));
        let new = || device("new", 1, |_| {});
        for devices in [[old(), new()], [new(), old()]] {
            let found = Assembly::of(devices).unwrap();
            assert_eq!(found.devices[0].device.name(), "new");
            let said = found.superseded[0].claims_to_be(&found.devices[0]).to_string();
            assert!(said.starts_with("old: it and new are both device 1"), "{said}");
        }
    }

    #[test]
    fn a_device_that_has_not_come_to_its_place_does_not_count_beside_the_one_that_has_it() {
        let arriving = |generation| {
            device("new", 1, |sb| {
                sb.set_generation(Generation(generation));
                sb.dev_item = sb.dev_item.with_arrival(true);
            })
        };
        let old = || device("old", 1, |_| {});
        for devices in [[old(), arriving(7)], [arriving(7), old()]] {
            let found = Assembly::of(devices).unwrap();
            assert_eq!(found.devices[0].device.name(), "old");
        }
        let found = Assembly::of([arriving(8), old()]).unwrap();
        assert_eq!(found.devices[0].device.name(), "new");
        assert!(!found.superblock.dev_item.arrives(), "it has come by now");
        let text = Assembly::of([arriving(7), arriving(7)]).unwrap_err().to_string();
        assert!(text.contains("the same device twice"), "{text}");
    }

    #[test]
    fn devices_that_went_apart_are_not_joined() {
        let b = device("b", 2, |sb| sb.set_root(Logical(3 << 20), 0));
        let text = Assembly::of([device("a", 1, |_| {}), b]).unwrap_err().to_string();
        assert!(
            text.contains("b: it is device 2, and it and device 1 were both written"),
            "{text}"
        );
    }

    #[test]
    fn devices_that_do_not_belong_together_are_refused_by_name() {
        let a = || device("a", 1, |_| {});
        let refused = |b: Arc<dyn Device>| Assembly::of([a(), b]).unwrap_err().to_string();
        let text = refused(device("b", 2, |sb| sb.fsid = [6; 16]));
        assert!(text.starts_with("b: it belongs to file system 06060606"), "{text}");
        assert!(text.contains("but a to file system 05050505"), "{text}");
        let text = refused(a());
        assert!(text.contains("the same device twice, or a copy"), "{text}");
        let text = refused(device("b", 1, |sb| sb.dev_item.uuid = [9; 16]));
        assert!(text.contains("both device 1 of the file system"), "{text}");
        let text = refused(device("b", 2, |sb| sb.dev_item.uuid = [1; 16]));
        assert!(text.contains("both have the uuid 01010101"), "{text}");
        let text = refused(device("b", 2, |sb| sb.dev_item.total_bytes.set(SIZE + 4096)));
        assert!(text.starts_with("b: ") && text.contains("truncated"), "{text}");
        let text = Assembly::of([]).unwrap_err().to_string();
        assert!(text.contains("no devices"), "{text}");
    }
}
