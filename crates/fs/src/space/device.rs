//! What chunks take of the devices, and where the next one would lie.
//!
//! Chunks are in two trees: as stripes in the chunk tree, and as extents of devices. Both must
//! say the same, because a new chunk gets what no extent takes. Space outside of chunks has no
//! logical address, so only a trim tells the device that it is free. What a device has been told
//! is noted here ([`Told`]).
//!
//! A device of the file system may be missing, or fail. What chunks take of it stays known, and no
//! new chunk goes there. The same holds for one that is about to leave. Devices come, go and change
//! their size with a commit ([`DeviceChange`]); before one becomes smaller, new chunks keep below
//! its future end.

use crate::error::{Error, Place, Result};
use crate::space::chunks::{
    ChunkPlan, Room, Wanted, capacity, device_gaps, device_holes, plan_chunk,
};
use crate::tree::{Epoch, Roots, Version};
use larder_format::items::{BlockGroupFlags, Chunk, DevExtent, Profile, Stripe, encode_sys_array};
use larder_format::{
    DevItem, DeviceId, FormatError, Generation, Key, KeyType, Logical, ObjectId, Physical,
    STRIPE_LEN, Superblock,
};
use larder_volume::Volume;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::FromBytes;

/// What chunks take of all devices.
#[derive(Debug)]
pub(super) struct DeviceSpace {
    volume: Arc<Volume>,
    devices: BTreeMap<DeviceId, OneDevice>,
    chunks: BTreeMap<Logical, Chunk>,
}

/// What chunks take of one device.
#[derive(Debug)]
struct OneDevice {
    uuid: [u8; 16],
    size: u64,
    /// New chunks end here at the latest: at the end, or at what is going to be the end.
    limit: u64,
    /// First byte and length of every device extent.
    taken: BTreeMap<Physical, u64>,
    /// What the device was told of outside of them.
    told: Told,
}

/// A change of the devices, which a commit makes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceChange {
    /// A device comes, with this item.
    Add(DevItem),
    /// A device is a seed from now on, as it was with that commit.
    Seed(DeviceId, Generation),
    /// A device goes. No chunk lies on it.
    Remove(DeviceId),
    /// A device has so many bytes from now on. No chunk reaches beyond them.
    Resize(DeviceId, u64),
}

/// What chunks of one kind take of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AllocatedOnDevice {
    /// `Data`, `Metadata`, `System`, `Data+Metadata`.
    pub kind: &'static str,
    /// `single`, `raid1`.
    pub profile: &'static str,
    /// Bytes of the device.
    pub bytes: u64,
}

/// A device, and what chunks take of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceUsage {
    pub(crate) id: DeviceId,
    pub(crate) uuid: [u8; 16],
    pub(crate) size: u64,
    /// Where the last chunk on it ends.
    pub(crate) end: Physical,
    pub(crate) allocated: Vec<AllocatedOnDevice>,
    pub(crate) unallocated: u64,
}

fn corrupt_item(tree: ObjectId, key: Key) -> impl Fn(FormatError) -> Error {
    move |e| Error::corrupt(Place::item(tree, key), e.0)
}

/// From the first to the last item of a kind.
fn all(id: ObjectId, kind: KeyType) -> (Key, Key) {
    (Key::new(id, kind, 0), Key::new(id, kind, u64::MAX))
}

impl DeviceSpace {
    /// Reads devices, chunks and device extents. New chunks are made on the devices of `volume`
    /// that take writes.
    ///
    /// # Errors
    /// Reading; `Corrupt` where chunks and device extents do not agree.
    pub(super) fn load(
        sb: &Superblock,
        roots: &Roots,
        epoch: &Epoch,
        volume: &Arc<Volume>,
    ) -> Result<Self> {
        let (chunk_tree, dev_tree) =
            (roots.chunk.version(epoch.clone()), roots.dev.version(epoch.clone()));
        let mut devices = BTreeMap::new();
        if sb.num_devices.get() > 1 {
            for item in device_items(&chunk_tree)? {
                let id = DeviceId(item.devid.get());
                devices.insert(id, OneDevice::new(&item));
            }
        }
        // What the superblock says of its own device holds.
        let id = sb.device_id();
        devices.insert(id, OneDevice::new(&sb.dev_item));
        for (id, device) in &mut devices {
            device.taken = read_extents(&dev_tree, *id)?;
        }
        let chunks = read_chunks(&chunk_tree)?;
        let this = Self { volume: volume.clone(), devices, chunks };
        this.check()?;
        Ok(this)
    }

    /// A commit has changed the devices.
    pub(super) fn change(&mut self, change: &DeviceChange) {
        match change {
            DeviceChange::Add(item) => {
                // The first device that is built upon seeds is known before, and has chunks.
                let id = DeviceId(item.devid.get());
                self.devices.entry(id).or_insert_with(|| OneDevice::new(item));
            }
            DeviceChange::Seed(..) => {}
            DeviceChange::Remove(id) => _ = self.devices.remove(id),
            DeviceChange::Resize(id, size) => {
                if let Some(device) = self.devices.get_mut(id) {
                    device.size = *size;
                    device.limit = *size;
                    device.told.take(Physical(*size), u64::MAX - *size);
                }
            }
        }
    }
    /// From now on new chunks on a device end here at the latest. `None`: at its end.
    pub(super) fn set_limit(&mut self, id: DeviceId, limit: Option<u64>) {
        if let Some(device) = self.devices.get_mut(&id) {
            device.limit = limit.map_or(device.size, |limit| limit.min(device.size));
        }
    }
    /// Chunks of which a stripe reaches beyond a place of a device, the last on it first.
    pub(super) fn chunks_beyond(&self, id: DeviceId, at: Physical) -> Vec<Logical> {
        let end = |chunk: &Chunk| {
            let here = chunk.stripes.iter().filter(|s| s.devid == id);
            here.map(|s| s.offset.plus(chunk.stripe_bytes())).max()
        };
        let ends = self.chunks.iter().filter_map(|(start, chunk)| Some((end(chunk)?, *start)));
        let mut beyond: Vec<(Physical, Logical)> = ends.filter(|(end, _)| *end > at).collect();
        beyond.sort_unstable_by_key(|found| std::cmp::Reverse(*found));
        beyond.into_iter().map(|(_, start)| start).collect()
    }

    fn present(&self) -> impl Iterator<Item = (DeviceId, &OneDevice)> {
        let here = self.devices.iter().filter(|(id, _)| self.volume.takes_writes(**id));
        here.map(|(id, d)| (*id, d))
    }
    /// Those that new chunks may lie on.
    fn open(&self) -> impl Iterator<Item = (DeviceId, &OneDevice)> {
        self.present().filter(|(id, _)| self.volume.takes_chunks(*id))
    }
    /// All devices, also those that are missing.
    pub(super) fn usage(&self) -> Vec<DeviceUsage> {
        let of = |(id, device): (&DeviceId, &OneDevice)| DeviceUsage {
            id: *id,
            uuid: device.uuid,
            size: device.size,
            end: device.end(),
            allocated: self.allocated_on(*id),
            unallocated: device.unallocated(),
        };
        self.devices.iter().map(of).collect()
    }
    fn allocated_on(&self, id: DeviceId) -> Vec<AllocatedOnDevice> {
        let mut by_kind: BTreeMap<u64, u64> = BTreeMap::new();
        for chunk in self.chunks.values() {
            let stripes = chunk.stripes.iter().filter(|s| s.devid == id).count() as u64;
            if stripes > 0 {
                *by_kind.entry(chunk.flags.bits()).or_default() += stripes * chunk.stripe_bytes();
            }
        }
        let named = |(bits, bytes)| {
            let flags = BlockGroupFlags::from_bits_retain(bits);
            let profile = flags.profile().map_or("unknown", Profile::name);
            AllocatedOnDevice { kind: flags.type_name(), profile, bytes }
        };
        by_kind.into_iter().map(named).collect()
    }
    /// Bytes of all devices.
    pub(super) fn size(&self) -> u64 {
        self.devices.values().fold(0, |sum, d| sum.saturating_add(d.size))
    }
    /// Bytes of the devices that new chunks may lie on, as far as they may.
    pub(super) fn size_for_chunks(&self) -> u64 {
        self.open().fold(0, |sum, (_, d)| sum.saturating_add(d.limit))
    }
    /// Bytes that no chunk takes.
    pub(super) fn unallocated(&self) -> u64 {
        self.open().fold(0, |sum, (_, d)| sum.saturating_add(d.unallocated()))
    }
    /// Bytes that can still get into chunks like this, after `plan` is carried out if there is one.
    pub(super) fn capacity(&self, wanted: &Wanted, plan: Option<&ChunkPlan>) -> u64 {
        capacity(wanted, &self.rooms(plan))
    }
    /// What is free on the devices that are there, after `plan` is carried out if there is one.
    fn rooms(&self, plan: Option<&ChunkPlan>) -> Vec<Room> {
        let room = |(id, device): (DeviceId, &OneDevice)| {
            let mut taken = device.taken();
            if let Some(plan) = plan {
                let here = plan.stripes.iter().filter(|s| s.device == id);
                taken.extend(here.map(|s| (s.at, plan.stripe_len)));
                taken.sort_unstable();
            }
            Room { device: id, holes: device_holes(&taken, device.limit) }
        };
        self.open().map(room).collect()
    }
    /// Every stripe must have a device extent of its own, and every device extent a stripe: the
    /// space for a new chunk is all that no device extent takes.
    fn check(&self) -> Result<()> {
        for (id, device) in &self.devices {
            device.check(*id, &self.chunks)?;
        }
        Ok(())
    }

    /// A chunk like this, if there is room for one.
    pub(super) fn plan(&self, wanted: &Wanted) -> Option<ChunkPlan> {
        plan_chunk(wanted, &self.rooms(None))
    }
    /// Logical address for a new chunk: behind all others.
    pub(super) fn address_for(&self, plan: &ChunkPlan) -> Option<Logical> {
        let end = self.chunks.last_key_value().map_or(0, |(at, c)| at.0 + c.length);
        let start = end.checked_next_multiple_of(STRIPE_LEN)?.max(1 << 20);
        start.checked_add(plan.len).map(|_| Logical(start))
    }
    /// The chunk that a plan becomes.
    pub(super) fn chunk_of(&self, plan: &ChunkPlan, flags: BlockGroupFlags) -> Chunk {
        let stripe = |s: &larder_volume::Stripe| Stripe {
            devid: s.device,
            offset: s.at,
            dev_uuid: self.devices[&s.device].uuid,
        };
        Chunk::new(plan.len, flags, plan.stripes.iter().map(stripe).collect())
    }
    /// A chunk was made.
    pub(super) fn add(&mut self, start: Logical, chunk: Chunk) {
        let len = chunk.stripe_bytes();
        for stripe in &chunk.stripes {
            if let Some(device) = self.devices.get_mut(&stripe.devid) {
                device.taken.insert(stripe.offset, len);
                device.told.take(stripe.offset, len);
            }
        }
        self.chunks.insert(start, chunk);
    }
    /// A chunk was given back.
    pub(super) fn remove(&mut self, start: Logical, chunk: &Chunk) {
        self.chunks.remove(&start);
        for stripe in &chunk.stripes {
            if let Some(device) = self.devices.get_mut(&stripe.devid) {
                device.taken.remove(&stripe.offset);
            }
        }
    }
    /// The chunk that begins at an address.
    pub(super) fn chunk(&self, start: Logical) -> Option<&Chunk> {
        self.chunks.get(&start)
    }
    /// The superblock's array of system chunks, without those that begin at an address in `gone`.
    ///
    /// # Errors
    /// `Corrupt` when they do not fit.
    pub(super) fn system_array(&self, gone: &[Logical]) -> Result<Vec<u8>> {
        let system = self
            .chunks
            .iter()
            .filter(|(at, c)| c.flags.contains(BlockGroupFlags::SYSTEM) && !gone.contains(at));
        let key = |at: Logical| Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, at.0);
        encode_sys_array(system.map(|(at, c)| (key(*at), c)))
            .map_err(|e| Error::corrupt(Place::default(), e.0))
    }
    /// The first stretch that no chunk takes and that its device was not told of yet.
    pub(super) fn first_untold(&self) -> Option<(DeviceId, Physical, u64)> {
        let first = |(id, device): (DeviceId, &OneDevice)| {
            device.first_untold().map(|(at, len)| (id, at, len))
        };
        self.present().find_map(first)
    }
    /// A device was told of a stretch that [`Self::first_untold`] gave.
    pub(super) fn was_told(&mut self, device: DeviceId, at: Physical, len: u64) {
        if let Some(device) = self.devices.get_mut(&device) {
            device.told.add(at, len);
        }
    }
}

impl OneDevice {
    fn new(item: &DevItem) -> Self {
        Self {
            uuid: item.uuid,
            size: item.total_bytes.get(),
            limit: item.total_bytes.get(),
            taken: BTreeMap::new(),
            told: Told::default(),
        }
    }
    fn taken(&self) -> Vec<(Physical, u64)> {
        self.taken.iter().map(|(at, len)| (*at, *len)).collect()
    }
    fn unallocated(&self) -> u64 {
        let usable = self.limit.saturating_sub(larder_format::DEVICE_RESERVED);
        let taken = |(at, len): (&Physical, &u64)| (*len).min(self.limit.saturating_sub(at.0));
        usable.saturating_sub(self.taken.iter().map(taken).sum::<u64>())
    }
    fn end(&self) -> Physical {
        self.taken.last_key_value().map_or(Physical(0), |(at, len)| at.plus(*len))
    }
    fn first_untold(&self) -> Option<(Physical, u64)> {
        let mut known = self.taken();
        known.extend(self.told.stretches());
        known.sort_unstable();
        device_gaps(&known, self.size).first().copied()
    }
    fn check(&self, id: DeviceId, chunks: &BTreeMap<Logical, Chunk>) -> Result<()> {
        let wrong = |at: Physical, what: &str| {
            let key = Key::new(ObjectId(id.0), KeyType::DEV_EXTENT, at.0);
            Error::corrupt(Place::item(ObjectId::DEV_TREE, key), what)
        };
        let mut end = 0;
        for (at, len) in &self.taken {
            if at.0 < end {
                return Err(wrong(*at, "device extent overlaps the one before"));
            }
            end =
                at.0.checked_add(*len)
                    .filter(|end| *len > 0 && *end <= self.size)
                    .ok_or_else(|| wrong(*at, "device extent does not lie in the device"))?;
        }
        let mut stripes = 0;
        for chunk in chunks.values() {
            for stripe in chunk.stripes.iter().filter(|s| s.devid == id) {
                stripes += 1;
                if self.taken.get(&stripe.offset) != Some(&chunk.stripe_bytes()) {
                    let what = "chunk's stripe has no device extent of its length";
                    return Err(wrong(stripe.offset, what));
                }
            }
        }
        let first = self.taken.keys().next().copied().unwrap_or_default();
        if stripes == self.taken.len() {
            Ok(())
        } else {
            Err(wrong(first, "device extents and stripes do not pair up"))
        }
    }
}

/// The items of devices in the tree of chunks.
///
/// # Errors
/// Reading; `Corrupt` for an item of a wrong size.
pub(crate) fn device_items(chunks: &Version) -> Result<Vec<DevItem>> {
    let mut items = Vec::new();
    let (from, to) = all(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM);
    chunks.scan(&from, &to, |item| {
        let place = Place::item(ObjectId::CHUNK_TREE, item.key);
        let parsed = DevItem::read_from_bytes(item.data());
        items.push(parsed.map_err(|_| Error::corrupt(place, "a device item of a wrong size"))?);
        Ok(true)
    })?;
    Ok(items)
}

fn read_chunks(chunks: &Version) -> Result<BTreeMap<Logical, Chunk>> {
    let mut all_chunks = BTreeMap::new();
    let (from, to) = all(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM);
    chunks.scan(&from, &to, |item| {
        let chunk = Chunk::parse(item.data());
        let chunk = chunk.map_err(corrupt_item(ObjectId::CHUNK_TREE, item.key))?;
        all_chunks.insert(Logical(item.key.offset), chunk);
        Ok(true)
    })?;
    Ok(all_chunks)
}

fn read_extents(extents: &Version, device: DeviceId) -> Result<BTreeMap<Physical, u64>> {
    let mut taken = BTreeMap::new();
    let (from, to) = all(ObjectId(device.0), KeyType::DEV_EXTENT);
    extents.scan(&from, &to, |item| {
        let extent = DevExtent::parse(item.data());
        let extent = extent.map_err(corrupt_item(ObjectId::DEV_TREE, item.key))?;
        taken.insert(Physical(item.key.offset), extent.length.get());
        Ok(true)
    })?;
    Ok(taken)
}

/// Stretches of a device that belong to no chunk and that it was told of.
#[derive(Debug, Default)]
pub(crate) struct Told(BTreeMap<Physical, u64>);

impl Told {
    /// First byte and length of each.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (Physical, u64)> + '_ {
        self.0.iter().map(|(at, len)| (*at, *len))
    }
    /// The device was told of a stretch that is not recorded here yet.
    pub(crate) fn add(&mut self, at: Physical, len: u64) {
        self.0.insert(at, len);
    }
    /// A chunk takes this stretch.
    pub(crate) fn take(&mut self, at: Physical, len: u64) {
        let end = at.plus(len);
        let hit: Vec<(Physical, u64)> = self
            .0
            .range(..end)
            .rev()
            .map(|(a, l)| (*a, *l))
            .take_while(|(a, l)| a.plus(*l) > at)
            .collect();
        for (start, len) in hit {
            self.0.remove(&start);
            for (from, to) in [(start, at), (end, start.plus(len))] {
                if from < to {
                    self.0.insert(from, to.0 - from.0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_takes_what_it_covers_of_what_was_told() {
        let mut told = Told::default();
        told.add(Physical(100), 100);
        told.add(Physical(200), 50);
        told.add(Physical(300), 10);
        told.take(Physical(150), 60);
        assert_eq!(
            told.stretches().collect::<Vec<_>>(),
            [(Physical(100), 50), (Physical(210), 40), (Physical(300), 10)]
        );
        told.take(Physical(220), 10);
        told.take(Physical(0), 100);
        told.take(Physical(260), 100);
        let left = [(Physical(100), 50), (Physical(210), 10), (Physical(230), 20)];
        assert_eq!(told.stretches().collect::<Vec<_>>(), left);
    }
}
