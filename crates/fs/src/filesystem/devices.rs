//! The devices of a file system: those that its chunk tree lists, against those that are there.
//!
//! Which device is which is known before any tree is read (`larder_volume::Assembly`). Which ones
//! there should be is not, so the chunk tree is read from whatever is there, and the answer comes
//! while it is read: its items of devices stand before those of chunks. A file system that misses
//! devices is opened only if that was allowed, and only if its trees can be read all the same.

use crate::api::{LostChunk, MissingDevice, StaleDevice};
use crate::error::{Error, Place, Result};
use crate::space::device_items;
use crate::tree::Version;
use larder_format::items::{BlockGroupFlags, DevStats};
use larder_format::{DevItem, DeviceId, Generation, Key, KeyType, ObjectId, Superblock};
use larder_volume::{Assembly, ErrorCounts, Found, MappedChunk, Volume, VolumeError};
use uuid::Uuid;

/// What superblocks and devices say; the chunk tree has not been read yet.
#[derive(Debug)]
pub(super) struct Members {
    found: Vec<Found>,
    /// What the superblock counts.
    count: u64,
    /// Name in messages.
    name: String,
    stale: Vec<StaleDevice>,
    degraded: bool,
    /// The file system is being built upon seeds, and no tree knows of that yet.
    is_new: bool,
}

/// What came of the comparison with the chunk tree.
#[derive(Debug, Default)]
pub(super) struct Compared {
    pub(super) missing: Vec<MissingDevice>,
    pub(super) stale: Vec<StaleDevice>,
    /// Items of devices do not say yet that these are behind, or have left the others.
    pub(super) outdated: bool,
}

impl Members {
    pub(super) fn new(found: &Assembly, degraded: bool) -> Self {
        let stale = |f: &Found| StaleDevice {
            id: f.id,
            name: f.device.name(),
            generation: f.generation,
            newest: found.superblock.generation(),
        };
        Self {
            found: found.devices.clone(),
            count: found.superblock.num_devices(),
            name: found.first().device.name(),
            stale: found.stale().map(stale).collect(),
            degraded,
            is_new: false,
        }
    }

    /// Devices of which no tree knows yet that they belong together.
    pub(super) fn of_new(found: &Assembly) -> Self {
        Self { is_new: true, ..Self::new(found, false) }
    }

    /// Is the file system only being made?
    pub(super) fn is_new(&self) -> bool {
        self.is_new
    }

    /// Is there, or should there be, more than one device?
    pub(super) fn are_several(&self) -> bool {
        self.count > 1 || self.found.len() > 1
    }

    /// Compares the items of the chunk tree with what is there. Returns what is missing, and what
    /// is behind: by its superblock, or by the mark that commits keep until a scrub.
    ///
    /// # Errors
    /// `Volume` when devices are missing and that was not allowed, and when one does not belong to
    /// the file system any more; `Corrupt` for items that cannot be right.
    pub(super) fn compare(&self, chunks: &Version, sb: &Superblock) -> Result<Compared> {
        if self.is_new || !self.are_several() {
            return Ok(Compared::default());
        }
        let items = device_items(chunks)?;
        if items.len() as u64 != self.count {
            let what = format!(
                "the superblock counts {} devices, but the chunk tree has {}",
                self.count,
                items.len()
            );
            return Err(Error::corrupt(Place::tree(ObjectId::CHUNK_TREE), what));
        }
        for found in &self.found {
            let item = items.iter().find(|item| item.devid.get() == found.id.0);
            let item = is_member(found, item, sb)?;
            is_joined(found, item, sb)?;
        }
        let missing = self.missing_of(&items, sb);
        if missing.is_empty() || self.degraded {
            let stale = self.stale_by(&items, sb);
            let has_mark = |s: &StaleDevice| mark(&items, s.id, sb).is_some();
            let outdated = !stale.iter().all(has_mark) || !self.know_who_left(&items, sb);
            return Ok(Compared { missing, stale, outdated });
        }
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        let what = format!("{} missing", are(&names));
        Err(VolumeError::Missing { device: self.name.clone(), what }.into())
    }

    /// Devices that have an item and are not there.
    pub(super) fn missing_of(&self, items: &[DevItem], sb: &Superblock) -> Vec<MissingDevice> {
        let fsid = sb.metadata_fsid();
        let is_here = |item: &&DevItem| self.found.iter().any(|f| f.id.0 == item.devid.get());
        let missing = |item: &DevItem| MissingDevice {
            id: DeviceId(item.devid.get()),
            uuid: item.uuid,
            seed: item.is_seed_of(&fsid).then_some(item.fsid),
        };
        items.iter().filter(|item| !is_here(item)).map(missing).collect()
    }

    /// Devices that have no item, and an older superblock than others.
    pub(super) fn former(&self, items: &[DevItem], sb: &Superblock) -> Vec<DeviceId> {
        let has_item = |found: &Found| items.iter().any(|item| item.devid.get() == found.id.0);
        let is_older = |found: &Found| found.generation < sb.generation();
        let former = self.found.iter().filter(|f| f.seed.is_none() && is_older(f) && !has_item(f));
        former.map(|found| found.id).collect()
    }

    /// Do the items say of all devices that are missing, and of no other, that they left?
    fn know_who_left(&self, items: &[DevItem], sb: &Superblock) -> bool {
        let fsid = sb.metadata_fsid();
        let is_here = |item: &DevItem| self.found.iter().any(|f| f.id.0 == item.devid.get());
        let mut own = items.iter().filter(|item| !item.is_seed_of(&fsid));
        own.all(|item| is_here(item) != item.left().is_some())
    }

    /// Devices that are behind, by their superblocks or by their items.
    fn stale_by(&self, items: &[DevItem], sb: &Superblock) -> Vec<StaleDevice> {
        let mut stale = self.stale.clone();
        for found in &self.found {
            let Some(generation) = mark(items, found.id, sb) else { continue };
            match stale.iter_mut().find(|s| s.id == found.id) {
                Some(known) => known.generation = known.generation.min(generation),
                None => stale.push(StaleDevice {
                    id: found.id,
                    name: found.device.name(),
                    generation,
                    newest: sb.generation(),
                }),
            }
        }
        // One that left the others was away while they were written; of another one with the same
        // last commit that is not known.
        let has_left = |id: DeviceId| items.iter().any(|i| i.devid == id.0 && i.left().is_some());
        for one in stale.iter_mut().filter(|s| has_left(s.id)) {
            one.generation = Generation(one.generation.0.saturating_sub(1));
        }
        stale.sort_unstable_by_key(|s| s.id);
        stale
    }

    /// Refuses a file system of which metadata cannot be read because devices are missing.
    ///
    /// # Errors
    /// `Volume`, with the first such chunk and its profile.
    pub(super) fn suffice(&self, volume: &Volume) -> Result<()> {
        if !self.are_several() {
            return Ok(());
        }
        let is_metadata = |c: &MappedChunk| {
            c.flags().intersects(BlockGroupFlags::SYSTEM | BlockGroupFlags::METADATA)
        };
        let Some((chunk, missing)) = volume.first_lost(is_metadata) else { return Ok(()) };
        let names: Vec<String> = missing.iter().map(|id| format!("device {id}")).collect();
        let (kind, profile) = (chunk.flags().type_name(), chunk.profile());
        let what = format!(
            "{} missing, without which the chunk at {} ({kind}, {}) cannot be read; {} may lose {} \
                of its {} stripes",
            are(&names),
            chunk.start,
            profile.name(),
            profile.name(),
            profile.tolerated_losses(),
            chunk.stripes.len(),
        );
        Err(VolumeError::Missing { device: self.name.clone(), what }.into())
    }
}

/// The chunks that lack too many devices.
pub(super) fn lost_chunks(volume: &Volume) -> Vec<LostChunk> {
    let lost = |(chunk, devices): (MappedChunk, Vec<DeviceId>)| LostChunk {
        start: chunk.start,
        len: chunk.length,
        profile: chunk.profile().name(),
        devices,
    };
    volume.all_lost().into_iter().map(lost).collect()
}

/// Lets devices count on from where they were when the file system was closed.
///
/// # Errors
/// Reading. Counts that cannot be right are left out.
pub(super) fn go_on_counting(devices: &Version, volume: &Volume) -> Result<()> {
    let key = |id| Key::new(ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM, id);
    devices.scan(&key(0), &key(u64::MAX), |item| {
        if let Ok(kept) = DevStats::parse(item.data()) {
            let counts = ErrorCounts {
                writes: kept.write_errors.get(),
                reads: kept.read_errors.get(),
                flushes: kept.flush_errors.get(),
                corruptions: kept.corruption_errors.get(),
                generations: kept.generation_errors.get(),
            };
            volume.go_on_counting(DeviceId(item.key.offset), counts);
        }
        Ok(true)
    })
}

/// The mark of a device in the chunk tree, if it is behind.
fn mark(items: &[DevItem], id: DeviceId, sb: &Superblock) -> Option<Generation> {
    items.iter().find(|item| item.devid == id.0)?.mark(&sb.metadata_fsid())
}

/// The item of this device, if it is the one that the chunk tree means.
fn is_member<'i>(found: &Found, item: Option<&'i DevItem>, sb: &Superblock) -> Result<&'i DevItem> {
    let fsid = Uuid::from_bytes(sb.metadata_fsid());
    let what = match item {
        None if let Some(seed) = found.seed => format!(
            "it is a seed, of file system {seed}, and file system {fsid} is not built upon it"
        ),
        None => format!(
            "it says that it is device {}, which the file system does not have any more or not \
                yet (its superblock is of generation {}, the newest of {})",
            found.id,
            found.generation,
            sb.generation()
        ),
        Some(item) if item.fsid != *found.seed.unwrap_or(fsid).as_bytes() => format!(
            "it is a device of file system {}, but device {} should be one of file system {}",
            found.seed.unwrap_or(fsid),
            found.id,
            Uuid::from_bytes(item.fsid)
        ),
        Some(item) if item.uuid != *found.uuid.as_bytes() => format!(
            "it says that it is device {}, but that one has the uuid {}, and this one {}",
            found.id,
            Uuid::from_bytes(item.uuid),
            found.uuid
        ),
        Some(item) if item.total_bytes.get() > found.device.size() => format!(
            "the file system needs {} bytes of device {}, but there are only {}: is the image \
                truncated?",
            item.total_bytes,
            found.id,
            found.device.size()
        ),
        Some(item) if found.seed.is_some() && item.generation.get() != found.generation.0 => {
            format!(
                "the file system is built upon this seed as it was in generation {}, but it is of \
                    generation {} now",
                item.generation, found.generation
            )
        }
        Some(item) => return Ok(item),
    };
    Err(VolumeError::Corrupt { device: found.device.name(), what }.into())
}

/// Was this device written only together with those that have the newest superblock? It may have
/// missed commits: those after it left them, or that with which a history began.
fn is_joined(found: &Found, item: &DevItem, sb: &Superblock) -> Result<()> {
    let began = sb.history_began();
    let was_with_them = match item.left() {
        Some(left) => found.history == left && found.written <= began,
        None => found.written < began,
    };
    if found.seed.is_some() || found.history == sb.history() || was_with_them {
        return Ok(());
    }
    Err(VolumeError::apart(&*found.device, found.id, sb.device_id()).into())
}

/// A list of names, and the verb.
fn are(names: &[String]) -> String {
    match names {
        [] => "nothing is".into(),
        [one] => format!("{one} is"),
        [first @ .., last] => format!("{} and {last} are", first.join(", ")),
    }
}
