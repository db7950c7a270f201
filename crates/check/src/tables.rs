//! Chunks, block groups, device extents and devices: four views of the same space.
//!
//! Each chunk has one block group, and for each of its stripes one device extent, and the other way
//! round; what a device counts as used is the sum of its extents. The tables are small — a few
//! lines for each GiB — and are compared in memory.

use crate::chunks::Chunk;
use crate::finding::{Finding, Kind};
use crate::source::Edge;
use crate::world::World;
use larder_format::items::{BlockGroupItem, DevExtent, DevStats};
use larder_format::{
    DEVICE_RESERVED, DevItem, DeviceId, Key, KeyType, Logical, ObjectId, Physical,
};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use zerocopy::FromBytes;

/// Items of a tree.
pub(crate) type Items = [(Key, Vec<u8>)];

/// Compares block groups with chunks and with what is allocated in them.
pub(crate) fn block_groups(world: &World<'_>, tree: ObjectId, items: &Items) {
    let lost = world.lost.part_of(tree);
    let used_known = !world.lost.part_of(ObjectId::EXTENT_TREE);
    let mut seen = BTreeMap::new();
    for (key, data) in items.iter().filter(|(k, _)| k.kind == KeyType::BLOCK_GROUP_ITEM) {
        let at = Logical(key.objectid.0);
        let place = |kind, what: String| Finding::new(kind, what).tree(tree).key(*key).address(at);
        let Some(chunk) = world.chunks.starting_at(at) else {
            let what = format!("the block group at {at} (+{}) has no chunk", key.offset);
            let follows = world.lost.part_of(ObjectId::CHUNK_TREE);
            world.add(place(Kind::BlockGroupWithoutChunk, what).follow_up_if(follows));
            continue;
        };
        seen.insert(at, ());
        if key.offset != chunk.len {
            let what = format!("the block group has {} bytes, the chunk {}", key.offset, chunk.len);
            world.add(place(Kind::BlockGroupDiffers, what));
        }
        let Ok(item) = BlockGroupItem::ref_from_bytes(data) else { continue };
        if item.flags.get() != chunk.flags.bits() {
            let (is, expected) = (item.flags.get(), chunk.flags.bits());
            let what = format!("the block group has type {is:#x}, the chunk {expected:#x}");
            world.add(place(Kind::BlockGroupDiffers, what));
        }
        if let Err(e) = BlockGroupItem::parse(key.offset, data) {
            world.add(place(Kind::BlockGroupInvalid, e.to_string()));
        }
        let used = chunk.used.load(Relaxed);
        if item.used.get() != used && used_known {
            let what = format!("used is {}, but {used} bytes are allocated", item.used);
            world.add(place(Kind::BlockGroupUsed, what));
        }
    }
    for chunk in world.chunks.0.iter().filter(|c| !seen.contains_key(&c.start)) {
        let what = format!("the chunk at {} (+{}) has no block group", chunk.start, chunk.len);
        let finding = Finding::new(Kind::ChunkWithoutBlockGroup, what).tree(tree);
        world.add(finding.address(chunk.start).follow_up_if(lost));
    }
}

/// Compares the device tree and the device items with the chunks.
pub(crate) fn devices(world: &World<'_>, dev_items: &Items, dev_tree: &Items) {
    let used = device_extents(world, dev_tree);
    let chunk_tree_lost = world.lost.part_of(ObjectId::CHUNK_TREE);
    let dev_tree_lost = world.lost.part_of(ObjectId::DEV_TREE);
    let mut known = BTreeMap::new();
    let mut total = 0u64;
    for (key, data) in dev_items {
        let Ok(item) = DevItem::ref_from_bytes(data) else { continue };
        let id = DeviceId(key.offset);
        known.insert(id, ());
        total = total.saturating_add(item.total_bytes.get());
        let place = |kind, what: String| {
            Finding::new(kind, what).tree(ObjectId::CHUNK_TREE).key(*key).device(id, Physical(0))
        };
        let sum = used.get(&id).copied().unwrap_or(0);
        if item.bytes_used.get() != sum && !dev_tree_lost {
            let what =
                format!("device {id} has bytes_used {}, its extents sum to {sum}", item.bytes_used);
            world.add(place(Kind::DeviceBytesUsed, what));
        }
        if item.devid.get() != id.0 {
            let what = format!("the item of device {id} names device {}", item.devid);
            world.add(place(Kind::DeviceItemWrong, what));
        }
        if let Some(what) = foreign(world, id, item) {
            world.add(place(Kind::DeviceItemWrong, what));
        }
        match world.source.volume.device(id) {
            None => world.add(place(Kind::DeviceMissing, missing(world, id, item))),
            Some(device) if item.total_bytes.get() > device.size() => {
                let (is, expected) = (device.size(), item.total_bytes.get());
                let what = format!("device {id} has {is} bytes, the file system needs {expected}");
                world.add(place(Kind::DeviceTruncated, what));
            }
            Some(_) => {}
        }
        // That of a seed is of the time before.
        if let Some(own) = world.dev_items.get(&id).filter(|_| !world.is_rewritten()) {
            compare_device_items(world, own, item, *key);
        }
    }
    device_uuids(world, dev_items);
    for (id, _) in world.source.volume.devices().filter(|(id, _)| !known.contains_key(id)) {
        let what = format!("the chunk tree has no item for device {id}");
        world.add(Finding::new(Kind::DeviceItemMissing, what).follow_up_if(chunk_tree_lost));
    }
    let superblock = &world.superblock;
    if superblock.num_devices() != known.len() as u64 && !chunk_tree_lost {
        let what =
            format!("num_devices is {}, but there are {}", superblock.num_devices(), known.len());
        world.add(Finding::new(Kind::SuperNumDevices, what));
    }
    if superblock.total_bytes() != total && !chunk_tree_lost && !known.is_empty() {
        let what = format!("total_bytes is {}, the devices have {total}", superblock.total_bytes());
        world.add(Finding::new(Kind::SuperTotalBytes, what));
    }
}

/// What is wrong with the file system that the item of a device names. A device that is not there
/// may be a seed.
fn foreign(world: &World<'_>, id: DeviceId, item: &DevItem) -> Option<String> {
    let named = uuid::Uuid::from_bytes(item.fsid);
    let Some(seed) = world.seeds.get(&id) else {
        let is_own = !item.is_seed_of(&world.superblock.metadata_fsid());
        let is_here = world.source.volume.device(id).is_some();
        return (is_here && !is_own).then(|| format!("device {id} belongs to file system {named}"));
    };
    if item.fsid != seed.metadata_fsid() {
        let is = uuid::Uuid::from_bytes(seed.metadata_fsid());
        return Some(format!("device {id} should be a seed of file system {named}, not of {is}"));
    }
    let (built, is) = (item.generation.get(), seed.generation());
    (built != is.0).then(|| {
        format!(
            "the file system is built upon device {id} as it was in generation {built}, but it is \
                of generation {is} now"
        )
    })
}

fn missing(world: &World<'_>, id: DeviceId, item: &DevItem) -> String {
    let (uuid, fsid) = (uuid::Uuid::from_bytes(item.uuid), uuid::Uuid::from_bytes(item.fsid));
    if item.is_seed_of(&world.superblock.metadata_fsid()) {
        return format!("device {id} ({uuid}), a seed of file system {fsid}, is missing");
    }
    format!("device {id} ({uuid}) is missing")
}

/// A stripe names its device by number and by uuid; Linux takes one whose uuid it does not know for
/// missing.
fn device_uuids(world: &World<'_>, dev_items: &Items) {
    let uuids: BTreeMap<DeviceId, [u8; 16]> = dev_items
        .iter()
        .filter_map(|(key, data)| {
            Some((DeviceId(key.offset), DevItem::ref_from_bytes(data).ok()?.uuid))
        })
        .collect();
    for chunk in &world.chunks.0 {
        for stripe in &chunk.item.stripes {
            let Some(uuid) = uuids.get(&stripe.devid).filter(|uuid| **uuid != stripe.dev_uuid)
            else {
                continue;
            };
            let (named, is) =
                (uuid::Uuid::from_bytes(stripe.dev_uuid), uuid::Uuid::from_bytes(*uuid));
            let what = format!(
                "the chunk at {} lies on device {} with uuid {named}, which has {is}",
                chunk.start, stripe.devid
            );
            let finding = Finding::new(Kind::DeviceMissing, what).tree(ObjectId::CHUNK_TREE);
            world.add(finding.address(chunk.start).device(stripe.devid, stripe.offset));
        }
    }
}

/// The device as the superblock knows it and as the chunk tree does.
fn compare_device_items(world: &World<'_>, own: &DevItem, item: &DevItem, key: Key) {
    let mut differ = Vec::new();
    let mut compare = |name: &str, a: u64, b: u64| {
        if a != b {
            differ.push(format!("{name} is {a} in the superblock, {b} in the chunk tree"));
        }
    };
    compare("devid", own.devid.get(), item.devid.get());
    compare("total_bytes", own.total_bytes.get(), item.total_bytes.get());
    compare("bytes_used", own.bytes_used.get(), item.bytes_used.get());
    compare("type", own.kind.get(), item.kind.get());
    compare("io_align", own.io_align.get().into(), item.io_align.get().into());
    compare("io_width", own.io_width.get().into(), item.io_width.get().into());
    compare("sector_size", own.sector_size.get().into(), item.sector_size.get().into());
    if own.uuid != item.uuid {
        let (a, b) = (uuid::Uuid::from_bytes(own.uuid), uuid::Uuid::from_bytes(item.uuid));
        differ.push(format!("uuid is {a} in the superblock, {b} in the chunk tree"));
    }
    if !differ.is_empty() {
        let finding = Finding::new(Kind::SuperDeviceItem, differ.join("; "));
        world.add(finding.tree(ObjectId::CHUNK_TREE).key(key));
    }
}

/// Stripes of chunks by their place, as long as no device extent was seen there.
type Stripes<'a> = BTreeMap<(DeviceId, Physical), &'a Chunk>;

/// Compares device extents with the chunks' stripes; the bytes taken on each device.
fn device_extents(world: &World<'_>, dev_tree: &Items) -> BTreeMap<DeviceId, u64> {
    let lost = world.lost.part_of(ObjectId::DEV_TREE);
    let mut stripes = stripes(world);
    let mut used: BTreeMap<DeviceId, u64> = BTreeMap::new();
    let mut before: Option<(DeviceId, Physical)> = None;
    for (key, data) in dev_tree {
        if key.kind == KeyType::PERSISTENT_ITEM && key.objectid == ObjectId::DEV_STATS {
            device_errors(world, *key, data);
            continue;
        }
        if key.kind != KeyType::DEV_EXTENT {
            continue;
        }
        let Ok(extent) = DevExtent::ref_from_bytes(data) else { continue };
        let (id, at) = (DeviceId(key.objectid.0), Physical(key.offset));
        let add = |kind, what: String, follows| {
            let finding = Finding::new(kind, what).tree(ObjectId::DEV_TREE).key(*key);
            world.add(finding.device(id, at).follow_up_if(follows));
        };
        if let Err(e) = DevExtent::parse(data) {
            add(Kind::DeviceExtentInvalid, e.to_string(), false);
        }
        let len = extent.length.get();
        let sum = used.entry(id).or_default();
        *sum = sum.saturating_add(len);
        let end = at.plus(len);
        if let Some((_, last)) = before.filter(|(device, last)| *device == id && *last > at) {
            let what = format!("the device extent before this one ends at {last}");
            add(Kind::DeviceExtentOverlap, what, false);
        }
        before = Some((id, end));
        if let Some(device) = world.source.volume.device(id)
            && end.0 > device.size()
        {
            let what = format!("it ends at {end}, the device has {} bytes", device.size());
            add(Kind::DeviceExtentInvalid, what, false);
        }
        match stripes.remove(&(id, at)) {
            None => {
                let what = format!(
                    "no chunk has a stripe at {at} of device {id} (it names chunk {})",
                    extent.chunk_offset
                );
                let follows = world.lost.part_of(ObjectId::CHUNK_TREE);
                add(Kind::DeviceExtentWithoutChunk, what, follows);
            }
            Some(chunk) => {
                for what in differences(extent, chunk) {
                    add(Kind::DeviceExtentDiffers, what, false);
                }
            }
        }
    }
    for ((id, at), chunk) in stripes {
        let what = format!(
            "the chunk at {} lies at {at} of device {id}, which has no extent there",
            chunk.start
        );
        let finding = Finding::new(Kind::DeviceExtentMissing, what).tree(ObjectId::DEV_TREE);
        world.add(finding.address(chunk.start).device(id, at).follow_up_if(lost));
    }
    used
}

/// The stripes of all chunks. Those that begin where nothing may lie are reported.
fn stripes<'a>(world: &'a World<'_>) -> Stripes<'a> {
    let mut stripes = Stripes::new();
    for chunk in &world.chunks.0 {
        for stripe in &chunk.item.stripes {
            stripes.insert((stripe.devid, stripe.offset), chunk);
            if stripe.offset.0 < DEVICE_RESERVED {
                let what = format!(
                    "the chunk at {} lies at {} of device {}",
                    chunk.start, stripe.offset, stripe.devid
                );
                let finding = Finding::new(Kind::ChunkInReservedSpace, what);
                let finding = finding.tree(ObjectId::CHUNK_TREE).address(chunk.start);
                world.add(finding.device(stripe.devid, stripe.offset));
            }
        }
    }
    stripes
}

/// What a device extent says otherwise than the chunk whose stripe lies there.
fn differences(extent: &DevExtent, chunk: &Chunk) -> Vec<String> {
    let mut out = Vec::new();
    let (is, expected) = (Logical(extent.chunk_offset.get()), chunk.start);
    if is != expected {
        out.push(format!("it names chunk {is}, but chunk {expected} lies there"));
    }
    let (len, expected) = (extent.length.get(), chunk.stripe_bytes());
    if len != expected {
        out.push(format!("it has {len} bytes, the chunk's stripe {expected}"));
    }
    out
}

fn device_errors(world: &World<'_>, key: Key, data: &[u8]) {
    match DevStats::parse(data) {
        Ok(s) => {
            let counts = [
                ("writes", s.write_errors),
                ("reads", s.read_errors),
                ("flushes", s.flush_errors),
                ("corruption", s.corruption_errors),
                ("generations", s.generation_errors),
            ];
            let seen: Vec<String> = counts
                .iter()
                .filter(|(_, n)| n.get() != 0)
                .map(|(name, n)| format!("{name}: {n}"))
                .collect();
            if !seen.is_empty() {
                let what = format!("errors of device {} so far: {}", key.offset, seen.join(", "));
                world.add(Finding::new(Kind::DeviceErrors, what).tree(ObjectId::DEV_TREE).key(key));
            }
        }
        Err(e) => {
            world.add(
                Finding::new(Kind::ItemInvalid, e.to_string()).tree(ObjectId::DEV_TREE).key(key),
            );
        }
    }
}

/// Compares the superblock's sum with what is allocated.
pub(crate) fn bytes_used(world: &World<'_>, roots: &[Edge]) {
    let trusted = !world.lost.part_of(ObjectId::EXTENT_TREE)
        && roots.iter().any(|r| r.tree == ObjectId::EXTENT_TREE);
    let used: u64 =
        world.chunks.0.iter().map(|c| c.used.load(Relaxed)).fold(0, u64::saturating_add);
    if trusted && used != world.superblock.bytes_used() {
        let what = format!(
            "bytes_used is {}, but {used} bytes are allocated",
            world.superblock.bytes_used()
        );
        world.add(Finding::new(Kind::SuperBytesUsed, what));
    }
}
