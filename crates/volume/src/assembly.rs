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
//! A device is stale as well if the item in its superblock has a **mark**: a generation, which is 0
//! for all others. Such a device has got the newest superblock, so that the others may be lost, but
//! not yet all that the others have.
//!
//! Two devices of one generation with different trees were both written without the other. Neither
//! can be brought up to date from the other, so the caller has to leave one out.
//!
//! Whether devices are missing is not decided here: which devices there are is in the chunk tree.

use crate::device::Device;
use crate::error::{VolumeError, VolumeResult};
use crate::superblock::read_superblock;
use larder_format::{DeviceId, Generation, Superblock};
use std::sync::Arc;
use uuid::Uuid;

/// A device of a file system, by what its superblock says.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its number in the file system.
    pub id: DeviceId,
    /// Its own uuid.
    pub uuid: Uuid,
    /// The last commit that reached it, and from which on it has everything.
    pub generation: Generation,
    /// Is there a device with a newer superblock, or has it a mark?
    pub is_stale: bool,
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
}

impl Assembly {
    /// Reads the superblocks of these devices.
    ///
    /// # Errors
    /// Those of [`read_superblock`]; [`VolumeError::Corrupt`] when there are no devices, when they
    /// are of different file systems, when two are the same device or claim to be, and when one is
    /// shorter than its superblock says. Every error names the device.
    pub fn of(devices: impl IntoIterator<Item = Arc<dyn Device>>) -> VolumeResult<Self> {
        let mut newest: Option<Box<Superblock>> = None;
        let mut found: Vec<Found> = Vec::new();
        let mut states: Vec<(DeviceId, State)> = Vec::new();
        for device in devices {
            let superblock = read_superblock(&*device)?;
            if let (Some(other), Some(first)) = (&newest, found.first()) {
                same_file_system(&*device, &superblock, &*first.device, other)?;
            }
            let one = Found {
                id: superblock.device_id(),
                uuid: Uuid::from_bytes(superblock.dev_item.uuid),
                generation: mark_of(&superblock).unwrap_or(superblock.generation()),
                is_stale: mark_of(&superblock).is_some(),
                device,
            };
            if let Some(other) = found.iter().find(|f| f.id == one.id || f.uuid == one.uuid) {
                return Err(twice(&one, other));
            }
            is_long_enough(&one, &superblock)?;
            let state = State::of(&superblock);
            for (id, other) in &states {
                went_apart(&one, &state, *id, other)?;
            }
            states.push((one.id, state));
            if newest.as_ref().is_none_or(|other| state > State::of(other)) {
                newest = Some(superblock);
            }
            found.push(one);
        }
        found.sort_unstable_by_key(|f| f.id);
        let none = || corrupt("file system".into(), "it has no devices".into());
        let superblock = newest.ok_or_else(none)?;
        let current = State::of(&superblock);
        for one in &mut found {
            one.is_stale |= states.iter().any(|(id, state)| *id == one.id && *state != current);
        }
        Ok(Self { superblock, devices: found })
    }

    /// Devices whose superblock is older than the newest, or has a mark.
    pub fn stale(&self) -> impl Iterator<Item = &Found> {
        self.devices.iter().filter(|f| f.is_stale)
    }
}

fn mark_of(superblock: &Superblock) -> Option<Generation> {
    let mark = superblock.dev_item.generation.get();
    (mark != 0).then_some(Generation(mark))
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
        }
    }
}

/// Were two devices written without each other?
fn went_apart(one: &Found, state: &State, id: DeviceId, other: &State) -> VolumeResult<()> {
    if state.generation != other.generation || state.root == other.root {
        return Ok(());
    }
    let what = format!(
        "it is device {}, and it and device {id} were both written without the other (generation \
            {}): name only the one with what is to be kept, with -o degraded, and add the other \
            one to it anew",
        one.id, state.generation
    );
    Err(corrupt(one.device.name(), what))
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
