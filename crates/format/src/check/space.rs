//! Rules for the items of the extent, block group, free-space, chunk and device trees.

use super::{Before, Context, aligned, bad, size_is, u8_at, u16_at, u32_at, u64_at};
use crate::csum::data_ref_hash;
use crate::items::BlockGroupFlags;
use crate::{
    FIRST_CHUNK_OBJECTID, FileOffset, FormatResult, Key, KeyType, Logical, MAX_LEVEL, ObjectId,
    Physical, SECTOR_SIZE, STRIPE_LEN,
};

const SECTOR: u64 = SECTOR_SIZE as u64;

const TYPE_DATA: u64 = 1;
const TYPE_SYSTEM: u64 = 2;
const TYPE_METADATA: u64 = 4;
const TYPE_MASK: u64 = 7;
const PROFILE_MASK: u64 = 0x7f8;

/// Where a range of some address space ends.
fn end_of(start: impl Into<u64>, length: u64) -> FormatResult<u64> {
    let start = start.into();
    match start.checked_add(length) {
        Some(end) => Ok(end),
        None => bad!("{length} bytes from {start} overflow"),
    }
}

fn multiple_of_sector(name: &str, value: u64) -> FormatResult<()> {
    if !aligned(value) {
        bad!("{name} is {value}, expected a multiple of {SECTOR}");
    }
    Ok(())
}

fn length(name: &str, value: u64) -> FormatResult<()> {
    if value == 0 {
        bad!("{name} is 0");
    }
    multiple_of_sector(name, value)
}

pub(super) fn extent_item(cx: &Context, key: &Key, d: &[u8], before: &Before) -> FormatResult<u64> {
    const FLAG_DATA: u64 = 1;
    const FLAG_TREE_BLOCK: u64 = 2;
    const FLAG_FULL_BACKREF: u64 = 0x100;
    const HEADER: usize = 24;
    /// First key and level, in extent items of nodes that are not the short kind.
    const TREE_BLOCK_INFO: usize = 18;

    let address = key.objectid.0;
    multiple_of_sector("address", address)?;
    let (refs, generation, flags) = (u64_at(d, 0)?, u64_at(d, 8)?, u64_at(d, 16)?);
    if generation > cx.newest {
        bad!("generation is {generation}, expected at most {}", cx.newest);
    }
    let mut refs_at = HEADER;
    let is_data = match flags & (FLAG_DATA | FLAG_TREE_BLOCK) {
        FLAG_DATA => true,
        FLAG_TREE_BLOCK => false,
        _ => bad!("flags are {flags:#x}, expected exactly one of DATA and TREE_BLOCK"),
    };
    let size = if is_data {
        if key.kind != KeyType::EXTENT_ITEM {
            bad!("flags say data in an item for a node");
        }
        if flags & FLAG_FULL_BACKREF != 0 {
            bad!("data extent with full back references");
        }
        length("length", key.offset)?;
        key.offset
    } else {
        let level = if key.kind == KeyType::METADATA_ITEM {
            key.offset
        } else {
            if key.offset != u64::from(cx.nodesize) {
                bad!("node of {} bytes, expected {}", key.offset, cx.nodesize);
            }
            refs_at += TREE_BLOCK_INFO;
            u64::from(u8_at(d, refs_at - 1)?)
        };
        if level >= u64::from(MAX_LEVEL) {
            bad!("level is {level}, expected less than {MAX_LEVEL}");
        }
        u64::from(cx.nodesize)
    };
    let inline = inline_refs(&d[refs_at..], is_data)?;
    if inline > refs {
        bad!("{inline} inline references, but only {refs} in all");
    }
    if before.extent_end > address {
        bad!("overlaps the extent before it, which ends at {}", before.extent_end);
    }
    end_of(Logical(address), size)
}

/// Checks the references that follow an extent's header; returns how many they stand for.
fn inline_refs(d: &[u8], is_data: bool) -> FormatResult<u64> {
    let mut total: u64 = 0;
    let mut previous: Option<(KeyType, u64)> = None;
    let mut rest = d;
    while !rest.is_empty() {
        let kind = KeyType(rest[0]);
        let body = &rest[1..];
        let (size, sequence, count) = match kind {
            KeyType::EXTENT_DATA_REF if is_data => {
                let (root, inode) = (ObjectId(u64_at(body, 0)?), ObjectId(u64_at(body, 8)?));
                let offset = u64_at(body, 16)?;
                multiple_of_sector("offset of a data reference", offset)?;
                (28, data_ref_hash(root, inode, FileOffset(offset)), u64::from(u32_at(body, 24)?))
            }
            KeyType::SHARED_DATA_REF if is_data => {
                let parent = u64_at(body, 0)?;
                multiple_of_sector("parent of a data reference", parent)?;
                (12, parent, u64::from(u32_at(body, 8)?))
            }
            KeyType::TREE_BLOCK_REF if !is_data => (8, u64_at(body, 0)?, 1),
            KeyType::SHARED_BLOCK_REF if !is_data => {
                let parent = u64_at(body, 0)?;
                multiple_of_sector("parent of a node reference", parent)?;
                (8, parent, 1)
            }
            // Names the extent's first owner for simple quotas; counts nothing.
            KeyType::EXTENT_OWNER_REF if is_data => {
                u64_at(body, 0)?;
                rest = &body[8..];
                if previous.is_some() {
                    bad!("owner reference behind other references");
                }
                previous = Some((kind, u64::MAX));
                continue;
            }
            _ => {
                bad!(
                    "inline reference of type {kind} in a {} extent",
                    if is_data { "data" } else { "tree" }
                )
            }
        };
        if count == 0 {
            bad!("inline reference of type {kind} with count 0");
        }
        if let Some((last_kind, last_sequence)) = previous
            && (last_kind > kind || (last_kind == kind && last_sequence < sequence))
        {
            bad!("inline references of types {last_kind}, {kind} are out of order");
        }
        previous = Some((kind, sequence));
        total = total.saturating_add(count);
        rest = &body[size..];
    }
    Ok(total)
}

pub(super) fn keyed_ref(key: &Key, d: &[u8]) -> FormatResult<()> {
    multiple_of_sector("address", key.objectid.0)?;
    if matches!(key.kind, KeyType::SHARED_BLOCK_REF | KeyType::SHARED_DATA_REF) {
        multiple_of_sector("parent", key.offset)?;
    }
    match key.kind {
        KeyType::SHARED_DATA_REF => size_is(d, 4),
        KeyType::EXTENT_DATA_REF => {
            if d.is_empty() || !d.len().is_multiple_of(28) {
                bad!("size is {}, expected a multiple of 28, not 0", d.len());
            }
            d.chunks_exact(28).try_for_each(|r| multiple_of_sector("offset", u64_at(r, 16)?))
        }
        _ => size_is(d, 0),
    }
}

pub(super) fn block_group_item(key: &Key, d: &[u8]) -> FormatResult<()> {
    if key.offset == 0 {
        bad!("length is 0");
    }
    end_of(Logical(key.objectid.0), key.offset)?;
    size_is(d, 24)?;
    let (used, chunk_objectid, flags) = (u64_at(d, 0)?, u64_at(d, 8)?, u64_at(d, 16)?);
    if chunk_objectid != FIRST_CHUNK_OBJECTID {
        bad!("chunk_objectid is {chunk_objectid}, expected {FIRST_CHUNK_OBJECTID}");
    }
    if used > key.offset {
        bad!("{used} bytes used of {}", key.offset);
    }
    block_group_type(flags)
}

/// At most one profile; data, metadata, system, or data and metadata together.
fn block_group_type(flags: u64) -> FormatResult<()> {
    if (flags & PROFILE_MASK).count_ones() > 1 {
        bad!("type {flags:#x} names several profiles");
    }
    const MIXED: u64 = TYPE_DATA | TYPE_METADATA;
    if !matches!(flags & TYPE_MASK, TYPE_DATA | TYPE_SYSTEM | TYPE_METADATA | MIXED) {
        bad!("type {flags:#x} is not one of data, metadata, system, data and metadata");
    }
    Ok(())
}

pub(super) fn free_space(key: &Key, d: &[u8]) -> FormatResult<()> {
    multiple_of_sector("start", key.objectid.0)?;
    length("length", key.offset)?;
    end_of(Logical(key.objectid.0), key.offset)?;
    match key.kind {
        KeyType::FREE_SPACE_INFO => size_is(d, 8),
        KeyType::FREE_SPACE_EXTENT => size_is(d, 0),
        _ => {
            let bytes = (key.offset / SECTOR).div_ceil(8);
            if d.len() as u64 != bytes {
                bad!("bitmap has {} bytes, expected {bytes}", d.len());
            }
            Ok(())
        }
    }
}

/// Checks a chunk item, in the chunk tree or in the superblock's array of system chunks.
///
/// # Errors
/// The first rule that it breaks. Whether the stripes lie on their devices is not asked.
pub fn check_chunk(key: &Key, d: &[u8], nodesize: u32) -> FormatResult<()> {
    const HEADER: usize = 48;
    const STRIPE: usize = 32;
    const LENGTH_LIMIT: u64 = 1 << 48;
    if key.objectid.0 != FIRST_CHUNK_OBJECTID || key.kind != KeyType::CHUNK_ITEM {
        bad!("key is {key}, expected ({FIRST_CHUNK_OBJECTID} CHUNK_ITEM …)");
    }
    let stripes = u16_at(d, 44)?;
    let sub_stripes = u16_at(d, 46)?;
    if stripes == 0 {
        bad!("no stripes");
    }
    size_is(d, HEADER + STRIPE * usize::from(stripes))?;
    let (bytes, stripe_len, kind) = (u64_at(d, 0)?, u64_at(d, 16)?, u64_at(d, 24)?);
    multiple_of_sector("logical address", key.offset)?;
    length("length", bytes)?;
    end_of(Logical(key.offset), bytes)?;
    if bytes >= LENGTH_LIMIT {
        bad!("length is {bytes}, expected less than {LENGTH_LIMIT}");
    }
    if stripe_len != STRIPE_LEN {
        bad!("stripe length is {stripe_len}, expected {STRIPE_LEN}");
    }
    let sector_size = u32_at(d, 40)?;
    if sector_size != SECTOR_SIZE {
        bad!("sector size is {sector_size}, expected {SECTOR_SIZE}");
    }
    if kind & !(TYPE_MASK | PROFILE_MASK) != 0 {
        bad!("type {kind:#x} has unknown bits");
    }
    block_group_type(kind)?;
    if kind & TYPE_MASK == TYPE_DATA | TYPE_METADATA && nodesize != SECTOR_SIZE {
        bad!("data and metadata mixed on a file system with nodes of {nodesize} bytes");
    }
    let profile = BlockGroupFlags::from_bits_retain(kind).profile()?;
    let nested = profile.sub_stripes();
    if !profile.fits_stripes(stripes) || nested > 1 && sub_stripes != nested {
        bad!("type {kind:#x} with {stripes} stripes and {sub_stripes} sub-stripes");
    }
    Ok(())
}

pub(super) fn dev_item(key: &Key, d: &[u8]) -> FormatResult<()> {
    if key.objectid != ObjectId::DEV_ITEMS {
        bad!("object id is {}, expected {}", key.objectid, ObjectId::DEV_ITEMS);
    }
    size_is(d, size_of::<crate::DevItem>())?;
    let (devid, total, used) = (u64_at(d, 0)?, u64_at(d, 8)?, u64_at(d, 16)?);
    if devid != key.offset {
        bad!("device id is {devid}, expected {}", key.offset);
    }
    if used > total {
        bad!("{used} bytes used of {total}");
    }
    Ok(())
}

pub(super) fn dev_extent(key: &Key, d: &[u8], before: &Before) -> FormatResult<u64> {
    size_is(d, 48)?;
    let (tree, objectid, chunk, bytes) =
        (u64_at(d, 0)?, u64_at(d, 8)?, u64_at(d, 16)?, u64_at(d, 24)?);
    if ObjectId(tree) != ObjectId::CHUNK_TREE {
        bad!("chunk tree is {tree}, expected {}", ObjectId::CHUNK_TREE);
    }
    if objectid != FIRST_CHUNK_OBJECTID {
        bad!("chunk_objectid is {objectid}, expected {FIRST_CHUNK_OBJECTID}");
    }
    multiple_of_sector("physical address", key.offset)?;
    multiple_of_sector("chunk_offset", chunk)?;
    length("length", bytes)?;
    if let Some(previous) = before.end_of_same(key)
        && previous > key.offset
    {
        bad!("overlaps the device extent before it, which ends at {previous}");
    }
    end_of(Physical(key.offset), bytes)
}
