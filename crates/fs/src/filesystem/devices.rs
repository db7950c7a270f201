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
}

/// What came of the comparison with the chunk tree.
#[derive(Debug, Default)]
pub(super) struct Compared {
    pub(super) missing: Vec<MissingDevice>,
    pub(super) stale: Vec<StaleDevice>,
    /// Devices that are behind and have no mark.
    pub(super) unmarked: bool,
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
            name: found.devices.first().map_or_else(String::new, |f| f.device.name()),
            stale: found.stale().map(stale).collect(),
            degraded,
        }
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
        if !self.are_several() {
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
            is_member(found, item, sb)?;
        }
        let is_here = |item: &&DevItem| self.found.iter().any(|f| f.id.0 == item.devid.get());
        let missing: Vec<MissingDevice> = items
            .iter()
            .filter(|item| !is_here(item))
            .map(|item| MissingDevice { id: DeviceId(item.devid.get()), uuid: item.uuid })
            .collect();
        if missing.is_empty() || self.degraded {
            let stale = self.stale_by(&items, sb);
            let has_mark =
                |s: &StaleDevice| items.iter().any(|i| i.devid == s.id.0 && i.generation != 0);
            let unmarked = !stale.iter().all(has_mark);
            return Ok(Compared { missing, stale, unmarked });
        }
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        let what = format!("{} missing", are(&names));
        Err(VolumeError::Missing { device: self.name.clone(), what }.into())
    }

    /// Devices that are behind, by their superblocks or by their items.
    fn stale_by(&self, items: &[DevItem], sb: &Superblock) -> Vec<StaleDevice> {
        let mark = |id: DeviceId| {
            let item = items.iter().find(|item| item.devid == id.0 && item.generation != 0);
            item.map(|item| Generation(item.generation.get()))
        };
        let mut stale = self.stale.clone();
        for found in &self.found {
            let Some(generation) = mark(found.id) else { continue };
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

/// Is this device the one that the chunk tree means?
fn is_member(found: &Found, item: Option<&DevItem>, sb: &Superblock) -> Result<()> {
    let what = match item {
        None => format!(
            "it was device {}, which the file system does not have any more (its superblock is of \
                generation {}, the newest of {})",
            found.id,
            found.generation,
            sb.generation()
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
        Some(_) => return Ok(()),
    };
    Err(VolumeError::Corrupt { device: found.device.name(), what }.into())
}

/// A list of names, and the verb.
fn are(names: &[String]) -> String {
    match names {
        [] => "nothing is".into(),
        [one] => format!("{one} is"),
        [first @ .., last] => format!("{} and {last} are", first.join(", ")),
    }
}
