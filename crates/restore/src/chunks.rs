//! Where addresses lie, by whatever still says so.
//!
//! In order: the system chunks of the superblock and the chunk tree they lead to; chunk trees that
//! backup roots name; chunk items in nodes that a scan finds, newest first; device extents joined
//! with block groups, which together say the same as a chunk. Where the newest chunk tree is
//! damaged all of these are asked, for an older one lacks the newest chunks. A chunk that
//! contradicts one already taken is dropped. Nodes need none of this once they are found: the scan
//! knows their places. Data does.
//!
//! Also hidden here: what is done with chunks of which only a part is there. A mirrored chunk is
//! whole on any of its devices; what reaches past the end of a truncated image is cut off. A
//! striped chunk is taken as it is, and what lies on a device that is missing cannot be read.

use crate::error::Result;
use crate::observer::Observer;
use crate::reader::{Options, Reader};
use crate::scan::{Found, Scan};
use crate::tree::{Gap, RootPointer, Tree};
use larder_format::items::{
    BlockGroupFlags, BlockGroupItem, Chunk, DevExtent, Profile, parse_sys_array,
};
use larder_format::node::NodeView;
use larder_format::{DeviceId, Generation, Key, KeyType, Logical, ObjectId, Physical};
use larder_volume::{Device, MappedChunk, Stripe, Stripes};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

impl<'o> Reader<'o> {
    /// Chooses a superblock and finds out where addresses lie, by whatever means are left.
    ///
    /// # Errors
    /// [`crate::Error::NoSuperblock`]; nothing else stops it.
    pub fn open(
        device: Arc<dyn Device>,
        options: Options,
        observer: &'o dyn Observer,
    ) -> Result<Self> {
        Self::open_devices(vec![device], options, observer)
    }

    /// The same with what is there of several devices. One that does not belong to the others is
    /// left out with a note.
    ///
    /// # Errors
    /// [`crate::Error::NoSuperblock`]; nothing else stops it.
    pub fn open_devices(
        devices: Vec<Arc<dyn Device>>,
        options: Options,
        observer: &'o dyn Observer,
    ) -> Result<Self> {
        let reader = Self::without_chunks(devices, options, observer)?;
        if let Some(found) = load(&reader) {
            reader.keep_scan(found);
        }
        Ok(reader)
    }
}

/// Fills the reader's chunk map. Returns the scan if one had to be made.
fn load(reader: &Reader<'_>) -> Option<Scan> {
    let observer = reader.observer();
    let mut why = Vec::new();
    match parse_sys_array(reader.superblock().sys_chunk_bytes()) {
        Ok(chunks) => {
            for (key, chunk) in chunks {
                if let Err(e) = add(reader, Logical(key.offset), &chunk) {
                    observer.note(&e);
                }
            }
        }
        Err(e) => observer.note(&format!("system chunks of the superblock: {e}")),
    }
    let mut tried = BTreeSet::new();
    for (what, root) in roots(reader) {
        if !tried.insert((root.at, root.generation)) {
            continue;
        }
        let gaps = tree(reader, root);
        if gaps.is_empty() {
            if why.is_empty() {
                return None;
            }
            // Of an older commit: chunks that were made since are not in it.
            observer.note(&format!(
                "chunk tree: {}; {what} is used, and what else is found",
                why.join("; ")
            ));
            return elsewhere(reader);
        }
        why.extend(gaps.into_iter().map(|g| g.why));
    }
    why.truncate(3);
    observer.note(&format!("chunk tree: {}; looking for chunks elsewhere", why.join("; ")));
    elsewhere(reader)
}

/// Adds chunks that no chunk tree is needed for. Returns the scan.
fn elsewhere(reader: &Reader<'_>) -> Option<Scan> {
    let observer = reader.observer();
    if !reader.may_scan() {
        return None;
    }
    let scan = reader.scan_everything();
    let from_nodes = from_chunk_nodes(reader, &scan);
    let from_extents = from_device_extents(reader, &scan);
    observer.note(&format!(
        "chunks: {} known, {from_nodes} of them from found nodes, {from_extents} from device \
            extents",
        reader.volume().map().len()
    ));
    Some(scan)
}

/// Roots of the chunk tree: the superblock's, then those of backup roots, newest first.
fn roots(reader: &Reader<'_>) -> Vec<(String, RootPointer)> {
    let sb = reader.superblock();
    let first = RootPointer {
        at: sb.chunk_root(),
        generation: Some(sb.chunk_root_generation()),
        level: sb.chunk_root_level,
    };
    let mut backups = Vec::new();
    for sb in std::iter::once(sb).chain(reader.other_superblocks().iter().map(|b| &**b)) {
        for b in sb.backup_roots.iter().filter(|b| b.chunk_root.get() != 0) {
            let generation = Generation(b.chunk_root_gen.get());
            let (at, level) = (Logical(b.chunk_root.get()), b.chunk_root_level);
            backups.push(RootPointer { at, generation: Some(generation), level });
        }
    }
    backups.sort_by_key(|r| std::cmp::Reverse(r.generation));
    let named = |r: RootPointer| {
        (format!("the backup of generation {}", r.generation.unwrap_or_default()), r)
    };
    std::iter::once(("the superblock's".to_owned(), first))
        .chain(backups.into_iter().map(named))
        .collect()
}

/// Adds what a chunk tree holds.
fn tree(reader: &Reader<'_>, root: RootPointer) -> Vec<Gap> {
    Tree::plain(ObjectId::CHUNK_TREE, root).walk(reader, Key::MIN, Key::MAX, &mut |item| {
        if item.key.kind == KeyType::CHUNK_ITEM {
            let added = Chunk::parse(item.data)
                .map_err(|e| format!("chunk at {}: {e}", item.key.offset))
                .and_then(|c| add(reader, Logical(item.key.offset), &c));
            if let Err(e) = added {
                reader.observer().note(&e);
            }
        }
        ControlFlow::Continue(())
    })
}

/// Adds as much of a chunk as there is of it.
fn add(reader: &Reader<'_>, at: Logical, chunk: &Chunk) -> std::result::Result<(), String> {
    let profile = chunk.profile().map_err(|e| format!("chunk at {at}: {e}"))?;
    let is_here =
        |s: &&larder_format::items::chunk::Stripe| reader.volume().device(s.devid).is_some();
    let here = chunk.stripes.iter().filter(is_here);
    let here: Stripes = here.map(|s| Stripe { device: s.devid, at: s.offset }).collect();
    if here.is_empty() {
        return Err(format!("chunk at {at} (+{}): it lies on other devices", chunk.length));
    }
    if is_striped(profile) {
        let mapped = MappedChunk::from_item(at, chunk);
        return reader.volume().add_chunk(mapped).map_err(|e| e.to_string());
    }
    map(reader, at, chunk.length, chunk.flags, here)
}

/// Does each device have a part only?
fn is_striped(profile: Profile) -> bool {
    matches!(profile, Profile::Raid0 | Profile::Raid10 | Profile::Raid5 | Profile::Raid6)
}

/// Adds a chunk of which each of these stripes holds everything, as far as its device goes.
fn map(
    reader: &Reader<'_>,
    at: Logical,
    length: u64,
    flags: BlockGroupFlags,
    stripes: Stripes,
) -> std::result::Result<(), String> {
    let end = |id| reader.volume().device(id).map_or(0, |device| device.size());
    let room = |s: &Stripe| end(s.device).saturating_sub(s.at.0).min(length) / 4096 * 4096;
    let most = stripes.iter().map(room).max().unwrap_or(0);
    let whole: Stripes = stripes.into_iter().filter(|s| room(s) == most).take(4).collect();
    // As many mirrors as are left.
    let mirrored = match whole.len() {
        0 | 1 => Profile::Single,
        2 => Profile::Dup,
        3 => Profile::Raid1c3,
        _ => Profile::Raid1c4,
    };
    let kind = (flags & BlockGroupFlags::TYPES) | mirrored.flag();
    let chunk = MappedChunk { start: at, length: most, kind: kind.bits(), stripes: whole };
    if reader.volume().map().chunk_at(at).is_some_and(|c| c == chunk) {
        return Ok(());
    }
    if most < length {
        reader.observer().note(&format!(
            "chunk at {at}: {} of {length} bytes lie past the end of the device",
            length - most
        ));
    }
    reader.volume().add_chunk(chunk).map_err(|e| e.to_string())
}

/// Found leaves of some trees, newest first.
fn leaves<'a>(scan: &'a Scan, owners: &[ObjectId]) -> Vec<&'a Found> {
    let mut all: Vec<&Found> =
        owners.iter().flat_map(|o| scan.of(*o)).filter(|f| f.level == 0).collect();
    all.sort_by_key(|f| std::cmp::Reverse(f.generation));
    all
}

/// Items of found leaves, newest first; of items with the same key only the newest.
fn newest_items(
    reader: &Reader<'_>,
    leaves: &[&Found],
    kind: KeyType,
    each: &mut dyn FnMut(Key, &[u8]),
) {
    let mut seen = BTreeSet::new();
    for leaf in leaves {
        let Some(bytes) = reader.found(leaf) else { continue };
        let view = NodeView(&bytes);
        for i in 0..view.nritems() {
            let (Some(key), Some(data)) = (view.key(i), view.data(i)) else { break };
            if key.kind == kind && seen.insert(key) {
                each(key, data);
            }
        }
    }
}

/// Chunk items of found nodes. Returns how many were new.
fn from_chunk_nodes(reader: &Reader<'_>, scan: &Scan) -> usize {
    let before = reader.volume().map().len();
    newest_items(
        reader,
        &leaves(scan, &[ObjectId::CHUNK_TREE]),
        KeyType::CHUNK_ITEM,
        &mut |key, data| {
            if let Ok(chunk) = Chunk::parse(data) {
                // What contradicts a newer chunk is left out without a word: it is old.
                let _ = add(reader, Logical(key.offset), &chunk);
            }
        },
    );
    reader.volume().map().len() - before
}

/// Chunks by the device extents that point back at them. Returns how many were new.
fn from_device_extents(reader: &Reader<'_>, scan: &Scan) -> usize {
    let before = reader.volume().map().len();
    let mut groups = BTreeMap::new();
    let group_leaves = leaves(scan, &[ObjectId::BLOCK_GROUP_TREE, ObjectId::EXTENT_TREE]);
    newest_items(reader, &group_leaves, KeyType::BLOCK_GROUP_ITEM, &mut |key, data| {
        if let Ok(group) = BlockGroupItem::parse(key.offset, data) {
            groups.entry(key.objectid.0).or_insert((key.offset, group.kind()));
        }
    });
    let mut stripes: BTreeMap<u64, (u64, Stripes)> = BTreeMap::new();
    let device_leaves = leaves(scan, &[ObjectId::DEV_TREE]);
    newest_items(reader, &device_leaves, KeyType::DEV_EXTENT, &mut |key, data| {
        let device = DeviceId(key.objectid.0);
        if let Ok(extent) = DevExtent::parse(data)
            && reader.volume().device(device).is_some()
        {
            let (length, places) = stripes
                .entry(extent.chunk_offset.get())
                .or_insert((extent.length.get(), Stripes::new()));
            if *length == extent.length.get() {
                places.push(Stripe { device, at: Physical(key.offset) });
            }
        }
    });
    for (at, (length, places)) in stripes {
        let flags = match groups.get(&at) {
            // Which stripe of a striped chunk is which, only the chunk knows.
            Some((_, flags)) if flags.profile().is_ok_and(is_striped) => continue,
            Some((l, flags)) if *l == length => *flags,
            Some(_) => continue,
            None => BlockGroupFlags::DATA | BlockGroupFlags::METADATA,
        };
        let _ = map(reader, Logical(at), length, flags, places);
    }
    reader.volume().map().len() - before
}
