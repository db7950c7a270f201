//! Chunks: loading them, and what the superblock's copy of the system chunks says.
//!
//! Chunks come first, for without them no address leads anywhere. They are loaded silently; whether
//! their tree is sound is checked later, with all the others. A chunk that cannot be right is
//! reported and left out: what lies in it is unmapped then.

use crate::finding::{Finding, Findings, Kind};
use crate::sets::Hashing;
use crate::source::{Edge, Source};
use crate::walk::scan;
use larder_format::check::check_chunk;
use larder_format::items::keys::chunk_key;
use larder_format::items::{self, BlockGroupFlags, parse_sys_array};
use larder_format::{DeviceId, Key, KeyType, Logical, LogicalRange, ObjectId, Superblock};
use larder_volume::{MappedChunk, VolumeError};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A chunk, and what was counted in it.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) start: Logical,
    pub(crate) len: u64,
    pub(crate) flags: BlockGroupFlags,
    pub(crate) item: items::Chunk,
    /// Where copies of the superblock lie.
    pub(crate) superblocks: Vec<LogicalRange>,
    /// Bytes that the extent tree has allocated.
    pub(crate) used: AtomicU64,
    tiles: AtomicU64,
}

impl Chunk {
    pub(crate) fn end(&self) -> Logical {
        self.start.plus(self.len)
    }
    pub(crate) fn range(&self) -> LogicalRange {
        LogicalRange::new(self.start, self.len)
    }
    /// Bytes that each stripe takes of its device.
    pub(crate) fn stripe_bytes(&self) -> u64 {
        self.item.stripe_bytes()
    }
    /// A range is accounted for, as allocated or as free.
    pub(crate) fn tile(&self, hashing: &Hashing, range: LogicalRange) {
        self.tiles.fetch_add(length_of(hashing, range), Relaxed);
    }
    /// Do the ranges tile the chunk: no gap, no overlap?
    pub(crate) fn is_tiled(&self, hashing: &Hashing) -> bool {
        self.tiles.load(Relaxed) == length_of(hashing, self.range())
    }
}

/// Of ranges that lie behind each other these add up to that of the whole, whatever its cuts.
fn length_of(hashing: &Hashing, range: LogicalRange) -> u64 {
    hashing.of(&range.end).wrapping_sub(hashing.of(&range.start))
}

/// All chunks, by address.
#[derive(Debug, Default)]
pub(crate) struct Chunks(pub(crate) Vec<Chunk>);

impl Chunks {
    /// The chunk that an address lies in.
    pub(crate) fn find(&self, at: Logical) -> Option<&Chunk> {
        let n = self.0.partition_point(|c| c.start <= at);
        self.0.get(n.checked_sub(1)?).filter(|c| at < c.end())
    }
    /// How many of these bytes lie in chunks, up to the first gap.
    pub(crate) fn covered(&self, range: LogicalRange) -> u64 {
        let mut here = range.start;
        while here < range.end
            && let Some(chunk) = self.find(here)
        {
            here = chunk.end();
        }
        LogicalRange::between(range.start, here.min(range.end)).len()
    }
    /// The chunk that begins at an address.
    pub(crate) fn starting_at(&self, at: Logical) -> Option<&Chunk> {
        self.find(at).filter(|c| c.start == at)
    }
}

/// What the chunk tree holds.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) chunks: Chunks,
    pub(crate) dev_items: Vec<(Key, Vec<u8>)>,
    /// Could part of the tree not be read?
    pub(crate) lost: bool,
}

/// Adds the system chunks of the superblock to the volume. `None` if the list is unusable, which is
/// reported.
pub(crate) fn system_chunks(
    superblock: &Superblock,
    source: &Source<'_>,
) -> Result<BTreeMap<Logical, items::Chunk>, VolumeError> {
    let mut out = BTreeMap::new();
    let list = match parse_sys_array(superblock.sys_chunk_bytes()) {
        Ok(list) => list,
        Err(e) => {
            source.findings.add(Finding::new(Kind::SuperSystemChunks, e.to_string()));
            return Ok(out);
        }
    };
    for (key, chunk) in list {
        add(source, Logical(key.offset), &chunk)?;
        out.insert(Logical(key.offset), chunk);
    }
    Ok(out)
}

/// Adds a chunk to the volume; `false` if it cannot be, which is reported.
fn add(source: &Source<'_>, start: Logical, chunk: &items::Chunk) -> Result<bool, VolumeError> {
    let error = match source.volume.add_chunk(MappedChunk::from_item(start, chunk)) {
        Ok(()) => return Ok(true),
        Err(e @ VolumeError::Unsupported { .. }) => return Err(e),
        Err(e) => e,
    };
    let devices = |id: DeviceId| source.volume.device(id);
    let beyond = chunk.stripes.iter().any(|s| {
        devices(s.devid).is_some_and(|d| s.offset.0.saturating_add(chunk.stripe_bytes()) > d.size())
    });
    let missing = chunk.stripes.iter().any(|s| devices(s.devid).is_none());
    let text = error.to_string();
    let kind = if missing {
        Kind::DeviceMissing
    } else if beyond {
        Kind::ChunkBeyondDevice
    } else if text.contains("overlap") || text.contains("shares space") {
        Kind::ChunkOverlap
    } else {
        Kind::ChunkInvalid
    };
    let key = chunk_key(start);
    source
        .findings
        .add(Finding::new(kind, text).tree(ObjectId::CHUNK_TREE).key(key).address(start));
    Ok(false)
}

/// Loads the chunk tree and completes the volume.
pub(crate) fn load(superblock: &Superblock, source: &Source<'_>) -> Result<Loaded, VolumeError> {
    let mut loaded = Loaded::default();
    let mut found = Vec::new();
    loaded.lost =
        scan(source, &Edge::chunk_tree(superblock), Key::MIN, Key::MAX, &mut |key, data| {
            match key.kind {
                KeyType::CHUNK_ITEM => found.push((key, data.to_vec())),
                KeyType::DEV_ITEM => loaded.dev_items.push((key, data.to_vec())),
                _ => {}
            }
            ControlFlow::Continue(())
        });
    for (key, data) in found {
        let parsed = check_chunk(&key, &data, superblock.nodesize())
            .and_then(|()| items::Chunk::parse(&data));
        let chunk = match parsed {
            Ok(chunk) => chunk,
            Err(e) => {
                let finding = Finding::new(Kind::ChunkInvalid, e.to_string());
                let at = Logical(key.offset);
                source.findings.add(finding.tree(ObjectId::CHUNK_TREE).key(key).address(at));
                continue;
            }
        };
        if !add(source, Logical(key.offset), &chunk)? {
            continue;
        }
        let mapped = MappedChunk::from_item(Logical(key.offset), &chunk);
        let superblocks = mapped.superblock_ranges();
        let superblocks = superblocks.iter().map(|(at, len)| LogicalRange::new(*at, *len));
        loaded.chunks.0.push(Chunk {
            start: Logical(key.offset),
            len: chunk.length,
            flags: chunk.flags,
            item: chunk,
            superblocks: superblocks.collect(),
            used: AtomicU64::new(0),
            tiles: AtomicU64::new(0),
        });
    }
    Ok(loaded)
}

/// The superblock's system chunks and those of the chunk tree must be the same.
pub(crate) fn compare_system_chunks(
    array: &BTreeMap<Logical, items::Chunk>,
    loaded: &Loaded,
    findings: &Findings,
) {
    let place = |kind, what: String, at: Logical| {
        Finding::new(kind, what).tree(ObjectId::CHUNK_TREE).key(chunk_key(at)).address(at)
    };
    for chunk in loaded.chunks.0.iter().filter(|c| c.flags.contains(BlockGroupFlags::SYSTEM)) {
        match array.get(&chunk.start) {
            None => {
                let what = format!("the system chunk at {} is not in the superblock", chunk.start);
                findings.add(place(Kind::SystemChunkMissing, what, chunk.start));
            }
            Some(other) if !other.is_same_as(&chunk.item) => {
                let what =
                    format!("the system chunk at {} is another one in the superblock", chunk.start);
                findings.add(place(Kind::SystemChunkDiffers, what, chunk.start));
            }
            Some(_) => {}
        }
    }
    for at in array.keys().filter(|at| loaded.chunks.starting_at(**at).is_none()) {
        let what = format!("the superblock has a system chunk at {at}, the chunk tree has not");
        findings.add(place(Kind::SystemChunkDiffers, what, *at).follow_up_if(loaded.lost));
    }
}
