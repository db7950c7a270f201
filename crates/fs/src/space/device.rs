//! What chunks take of the device, and where the next one would lie.
//!
//! Chunks are in two trees: as stripes in the chunk tree, and as extents of the device. Both must
//! say the same, because a new chunk gets what no extent takes. Space outside of chunks has no
//! logical address, so only a trim tells the device that it is free. What the device has been told
//! is noted here ([`Told`]).

use crate::error::{Error, Place, Result};
use crate::space::SpaceKind;
use crate::space::chunks::{ChunkPlan, MIN_STRIPE, device_gaps, device_holes, plan_chunk};
use crate::tree::{Epoch, Roots};
use larder_format::items::{BlockGroupFlags, Chunk, DevExtent, Stripe, encode_sys_array};
use larder_format::{
    DEVICE_RESERVED, DevItem, DeviceId, FormatError, Key, KeyType, Logical, ObjectId, Physical,
    STRIPE_LEN, Superblock,
};
use std::collections::BTreeMap;
use zerocopy::FromBytes;

/// What chunks take of the device.
#[derive(Debug)]
pub(super) struct DeviceSpace {
    pub(super) id: DeviceId,
    uuid: [u8; 16],
    pub(super) size: u64,
    /// Bytes of the other devices of the file system, and those that no chunk takes of them.
    /// Nothing is allocated there, so they do not change.
    pub(super) others: (u64, u64),
    /// First byte and length of every device extent.
    taken: BTreeMap<Physical, u64>,
    /// What the device was told of outside of them.
    pub(super) told: Told,
    chunks: BTreeMap<Logical, Chunk>,
}

fn corrupt_item(tree: ObjectId, key: Key) -> impl Fn(FormatError) -> Error {
    move |e| Error::corrupt(Place::item(tree, key), e.0)
}

/// Bytes of all devices but one, and those that no chunk takes.
fn others(this: DeviceId, roots: &Roots, epoch: &Epoch) -> Result<(u64, u64)> {
    let key = |id| Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, id);
    let (mut sizes, mut free) = (0u64, 0u64);
    roots.chunk.version(epoch.clone()).scan(&key(0), &key(u64::MAX), |item| {
        let other = DevItem::read_from_bytes(item.data());
        if let Some(other) = other.ok().filter(|other| other.devid.get() != this.0) {
            let size = other.total_bytes.get();
            let taken = other.bytes_used.get().saturating_add(DEVICE_RESERVED);
            sizes = sizes.saturating_add(size);
            free = free.saturating_add(size.saturating_sub(taken));
        }
        Ok(true)
    })?;
    Ok((sizes, free))
}

impl DeviceSpace {
    /// Reads chunks and device extents.
    ///
    /// # Errors
    /// Reading; `Corrupt` where the two do not agree.
    pub(super) fn load(sb: &Superblock, roots: &Roots, epoch: &Epoch) -> Result<Self> {
        let id = DeviceId(sb.dev_item.devid.get());
        let mut device = Self {
            id,
            uuid: sb.dev_item.uuid,
            size: sb.dev_item.total_bytes.get(),
            others: (0, 0),
            taken: BTreeMap::new(),
            told: Told::default(),
            chunks: BTreeMap::new(),
        };
        let all = |id: ObjectId, kind| (Key::new(id, kind, 0), Key::new(id, kind, u64::MAX));
        let (from, to) = all(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM);
        roots.chunk.version(epoch.clone()).scan(&from, &to, |item| {
            let chunk =
                Chunk::parse(item.data()).map_err(corrupt_item(ObjectId::CHUNK_TREE, item.key))?;
            device.chunks.insert(Logical(item.key.offset), chunk);
            Ok(true)
        })?;
        if sb.num_devices() > 1 {
            device.others = others(id, roots, epoch)?;
        }
        let (from, to) = all(ObjectId(id.0), KeyType::DEV_EXTENT);
        roots.dev.version(epoch.clone()).scan(&from, &to, |item| {
            let extent = DevExtent::parse(item.data())
                .map_err(corrupt_item(ObjectId::DEV_TREE, item.key))?;
            device.taken.insert(Physical(item.key.offset), extent.length.get());
            Ok(true)
        })?;
        device.check()?;
        Ok(device)
    }
    /// Bytes of all devices that no chunk takes.
    pub(super) fn unallocated(&self) -> u64 {
        let usable = self.size.saturating_sub(DEVICE_RESERVED);
        usable.saturating_sub(self.taken.values().sum()).saturating_add(self.others.1)
    }
    /// Bytes of all devices.
    pub(super) fn all_bytes(&self) -> u64 {
        self.size.saturating_add(self.others.0)
    }
    /// Bytes that can still become chunks, after `plan` is carried out if there is one. Space
    /// between chunks that is too short for a stripe does not count.
    pub(super) fn usable(&self, plan: Option<&ChunkPlan>) -> u64 {
        let mut taken = self.taken();
        if let Some(plan) = plan {
            taken.extend(plan.stripes.iter().map(|at| (*at, plan.len)));
            taken.sort_unstable();
        }
        let holes = device_holes(&taken, self.size);
        holes.iter().map(|h| h.1).filter(|len| *len >= MIN_STRIPE).sum()
    }
    /// Every stripe must have a device extent of its own, and every device extent a stripe: the
    /// space for a new chunk is all that no device extent takes.
    fn check(&self) -> Result<()> {
        let wrong = |at: Physical, what: &str| {
            let key = Key::new(ObjectId(self.id.0), KeyType::DEV_EXTENT, at.0);
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
        for chunk in self.chunks.values() {
            for stripe in chunk.stripes.iter().filter(|s| s.devid == self.id) {
                stripes += 1;
                if self.taken.get(&stripe.offset) != Some(&chunk.stripe_bytes()) {
                    return Err(wrong(
                        stripe.offset,
                        "chunk's stripe has no device extent of its length",
                    ));
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
    fn taken(&self) -> Vec<(Physical, u64)> {
        self.taken.iter().map(|(at, len)| (*at, *len)).collect()
    }

    /// A chunk with `copies` copies, if there is room for one on this device of a file system of
    /// `total` bytes.
    pub(super) fn plan(&self, kind: SpaceKind, copies: usize, total: u64) -> Option<ChunkPlan> {
        plan_chunk(kind, copies, total, &self.taken(), self.size)
    }
    /// Logical address for a new chunk: behind all others.
    pub(super) fn address_for(&self, plan: &ChunkPlan) -> Option<Logical> {
        let end = self.chunks.last_key_value().map_or(0, |(at, c)| at.0 + c.length);
        let start = end.checked_next_multiple_of(STRIPE_LEN)?.max(1 << 20);
        start.checked_add(plan.len).map(|_| Logical(start))
    }
    /// The chunk that a plan becomes.
    pub(super) fn chunk_of(&self, plan: &ChunkPlan, flags: BlockGroupFlags) -> Chunk {
        let stripe = |at: &Physical| Stripe { devid: self.id, offset: *at, dev_uuid: self.uuid };
        Chunk::new(plan.len, flags, plan.stripes.iter().map(stripe).collect())
    }
    /// A chunk was made.
    pub(super) fn add(&mut self, start: Logical, chunk: Chunk) {
        for stripe in &chunk.stripes {
            self.taken.insert(stripe.offset, chunk.stripe_bytes());
            self.told.take(stripe.offset, chunk.stripe_bytes());
        }
        self.chunks.insert(start, chunk);
    }
    /// A chunk was given back.
    pub(super) fn remove(&mut self, start: Logical, chunk: &Chunk) {
        self.chunks.remove(&start);
        for stripe in &chunk.stripes {
            self.taken.remove(&stripe.offset);
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
    /// The first stretch that no chunk takes and that the device was not told of yet.
    pub(super) fn first_untold(&self) -> Option<(Physical, u64)> {
        let mut known = self.taken();
        known.extend(self.told.stretches());
        known.sort_unstable();
        device_gaps(&known, self.size).first().copied()
    }
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
