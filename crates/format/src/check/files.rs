//! Rules for the items of subvolume, checksum and root trees: inodes, names, file extents, roots.

use super::{Before, Context, aligned, bad, size_is, u8_at, u16_at, u32_at, u64_at};
use crate::csum::name_hash;
use crate::{
    FormatResult, Key, KeyType, MAX_COMPRESSED_EXTENT, MAX_LEVEL, NAME_MAX, ObjectId, SECTOR_SIZE,
};

const SECTOR: u64 = SECTOR_SIZE as u64;

/// Ids that inodes have: those of files, the root tree's directory, and the old cache of free
/// inode numbers.
fn is_inode_id(id: ObjectId) -> bool {
    (ObjectId::FIRST_FREE..=ObjectId::LAST_FREE).contains(&id)
        || id == ObjectId::ROOT_TREE_DIR
        || id == ObjectId::FREE_INO
}

/// In subvolumes an inode's items stand behind each other, the inode item first. A leaf can begin
/// in the midst of them; log trees and the root tree have them without inode items.
fn follows_its_inode(cx: &Context, key: &Key, before: &Before) -> FormatResult<()> {
    if let Some(p) = before.key
        && p.objectid != key.objectid
        && cx.tree.is_subvolume()
    {
        bad!("follows {p}, expected an item of inode {} before it", key.objectid);
    }
    Ok(())
}

fn generation(name: &str, value: u64, cx: &Context) -> FormatResult<()> {
    if value > cx.newest {
        bad!("{name} is {value}, expected at most {}", cx.newest);
    }
    Ok(())
}

pub(super) fn inode_item(cx: &Context, key: &Key, d: &[u8]) -> FormatResult<()> {
    const KNOWN_FLAGS: u64 = 0xfff | 1 << 31 | 1 << 32;
    if !is_inode_id(key.objectid) {
        bad!("{} is no inode number", key.objectid);
    }
    if key.offset != 0 {
        bad!("key offset is {}, expected 0", key.offset);
    }
    size_is(d, 160)?;
    generation("generation", u64_at(d, 0)?, cx)?;
    generation("transid", u64_at(d, 8)?, cx)?;
    let (nlink, mode, flags) = (u32_at(d, 40)?, u32_at(d, 52)?, u64_at(d, 64)?);
    // fifo, character device, directory, block device, file, symlink, socket
    let kind_known = matches!(mode >> 12, 1 | 2 | 4 | 6 | 8 | 10 | 12);
    if !kind_known {
        bad!("mode is {mode:o}, which is no kind of file");
    }
    if mode >> 12 == 4 && nlink > 1 {
        bad!("directory has {nlink} links, expected at most 1");
    }
    if flags & !KNOWN_FLAGS != 0 {
        bad!("flags are {flags:#x}, of which {:#x} are unknown", flags & !KNOWN_FLAGS);
    }
    Ok(())
}

fn name_length(len: u16) -> FormatResult<usize> {
    let len = usize::from(len);
    if len == 0 || len > NAME_MAX {
        bad!("name has {len} bytes, expected 1 to {NAME_MAX}");
    }
    Ok(len)
}

pub(super) fn inode_ref(cx: &Context, key: &Key, d: &[u8], before: &Before) -> FormatResult<()> {
    follows_its_inode(cx, key, before)?;
    names(d, 10, 8)
}

pub(super) fn inode_extref(d: &[u8]) -> FormatResult<()> {
    names(d, 18, 16)
}

/// One or more entries that tile the item: a header with the name's length at `length_at`, a name.
fn names(d: &[u8], header: usize, length_at: usize) -> FormatResult<()> {
    let mut rest = d;
    loop {
        let end = header + name_length(u16_at(rest, length_at)?)?;
        if end >= rest.len() {
            if end > rest.len() {
                bad!("name ends {} bytes behind the item", end - rest.len());
            }
            return Ok(());
        }
        rest = &rest[end..];
    }
}

pub(super) fn root_ref(d: &[u8]) -> FormatResult<()> {
    size_is(d, 18 + name_length(u16_at(d, 16)?)?)
}

pub(super) fn dir_item(cx: &Context, key: &Key, d: &[u8], before: &Before) -> FormatResult<()> {
    const HEADER: usize = 30;
    const XATTR: u8 = 8;
    follows_its_inode(cx, key, before)?;
    let is_xattr = key.kind == KeyType::XATTR_ITEM;
    let mut rest = d;
    loop {
        let (data_len, kind) = (usize::from(u16_at(rest, 25)?), u8_at(rest, 29)?);
        let name_len = name_length(u16_at(rest, 27)?)?;
        if !(1..=XATTR).contains(&kind) || (kind == XATTR) != is_xattr {
            bad!("entry has type {kind}, expected {}", if is_xattr { "8" } else { "1 to 7" });
        }
        if data_len != 0 && !is_xattr {
            bad!("directory entry has {data_len} bytes of data, expected none");
        }
        let end = HEADER + name_len + data_len;
        let Some(name) = rest.get(HEADER..HEADER + name_len).filter(|_| end <= rest.len()) else {
            bad!("entry ends {} bytes behind the item", end - rest.len());
        };
        let filed_by_hash =
            key.kind == KeyType::XATTR_ITEM || key.kind == KeyType::DIR_ITEM && !cx.names_hidden;
        if filed_by_hash && name_hash(name) != key.offset {
            bad!("name \"{}\" has hash {}", name.escape_ascii(), name_hash(name));
        }
        location(rest, is_xattr)?;
        if end == rest.len() {
            return Ok(());
        }
        rest = &rest[end..];
    }
}

/// Checks what a directory entry points to.
fn location(entry: &[u8], is_xattr: bool) -> FormatResult<()> {
    let (id, kind, offset) =
        (ObjectId(u64_at(entry, 0)?), KeyType(u8_at(entry, 8)?), u64_at(entry, 9)?);
    let fits = if is_xattr {
        id == ObjectId(0) && kind == KeyType(0) && offset == 0
    } else if kind == KeyType::ROOT_ITEM {
        id.is_subvolume()
    } else {
        (kind == KeyType::INODE_ITEM || kind == KeyType(0)) && is_inode_id(id) && offset == 0
    };
    if !fits {
        bad!("entry points to {}, which it cannot", Key { objectid: id, kind, offset });
    }
    Ok(())
}

pub(super) fn extent_data(cx: &Context, key: &Key, d: &[u8], before: &Before) -> FormatResult<u64> {
    const INLINE: u8 = 0;
    const HEADER: usize = 21;
    follows_its_inode(cx, key, before)?;
    if !aligned(key.offset) {
        bad!("file offset is not a multiple of {SECTOR}");
    }
    let (ram_bytes, compression, encryption) = (u64_at(d, 8)?, u8_at(d, 16)?, u8_at(d, 17)?);
    let kind = u8_at(d, 20)?;
    if kind > 2 {
        bad!("extent type is {kind}, expected 0 to 2");
    }
    if compression > 3 {
        bad!("compression is {compression}, expected 0 to 3");
    }
    if encryption != 0 {
        bad!("encryption is {encryption}, expected 0");
    }
    if compression != 0 && ram_bytes > MAX_COMPRESSED_EXTENT {
        bad!("compressed extent of {ram_bytes} bytes, expected at most {MAX_COMPRESSED_EXTENT}");
    }
    let length = if kind == INLINE {
        if key.offset != 0 {
            bad!("inline extent at {}, expected at 0", key.offset);
        }
        if compression == 0 && ram_bytes != (d.len() - HEADER) as u64 {
            bad!("inline extent has {} bytes of data, expected {ram_bytes}", d.len() - HEADER);
        }
        // Bounded above by the item's size or the longest compressed extent.
        ram_bytes.next_multiple_of(SECTOR)
    } else {
        size_is(d, 53)?;
        for (name, value) in [
            ("ram_bytes", ram_bytes),
            ("disk_bytenr", u64_at(d, 21)?),
            ("disk_num_bytes", u64_at(d, 29)?),
            ("offset", u64_at(d, 37)?),
            ("num_bytes", u64_at(d, 45)?),
        ] {
            if !aligned(value) {
                bad!("{name} is {value}, expected a multiple of {SECTOR}");
            }
        }
        let num_bytes = u64_at(d, 45)?;
        if num_bytes == 0 {
            bad!("num_bytes is 0");
        }
        num_bytes
    };
    let Some(end) = key.offset.checked_add(length) else {
        bad!("{length} bytes from {} overflow", key.offset);
    };
    if let Some(previous) = before.end_of_same(key)
        && previous > key.offset
    {
        bad!("overlaps the extent before it, which ends at {previous}");
    }
    Ok(end)
}

pub(super) fn extent_csum(
    cx: &Context,
    key: &Key,
    d: &[u8],
    before: &Before,
) -> FormatResult<Option<u64>> {
    if key.objectid != ObjectId::EXTENT_CSUM {
        bad!("object id is {}, expected {}", key.objectid, ObjectId::EXTENT_CSUM);
    }
    if !aligned(key.offset) {
        bad!("address is not a multiple of {SECTOR}");
    }
    let Some(size) = cx.csum_size else {
        return Ok(None);
    };
    if d.is_empty() || !d.len().is_multiple_of(size) {
        bad!("size is {}, expected a multiple of {size}, not 0", d.len());
    }
    let length = (d.len() / size) as u64 * SECTOR;
    let Some(end) = key.offset.checked_add(length) else {
        bad!("{length} bytes from {} overflow", key.offset);
    };
    if let Some(previous) = before.end_of_same(key)
        && previous > key.offset
    {
        bad!("overlaps the checksums before it, which end at {previous}");
    }
    Ok(Some(end))
}

pub(super) fn root_item(cx: &Context, key: &Key, d: &[u8]) -> FormatResult<()> {
    const SIZE: usize = 439;
    /// Before Linux 3.6: no uuids and times.
    const OLD_SIZE: usize = 239;
    const RDONLY_AND_DEAD: u64 = 1 | 1 << 48;
    if key.objectid == ObjectId(0) {
        bad!("tree id is 0");
    }
    if key.objectid == ObjectId::TREE_RELOC {
        let of = ObjectId(key.offset);
        if !of.is_subvolume() && of != ObjectId::DATA_RELOC_TREE {
            bad!("relocation tree of {of}, which is no subvolume");
        }
    }
    if d.len() != SIZE && d.len() != OLD_SIZE {
        bad!("size is {}, expected {SIZE} or {OLD_SIZE}", d.len());
    }
    generation("generation", u64_at(d, 160)?, cx)?;
    generation("last_snapshot", u64_at(d, 200)?, cx)?;
    if d.len() == SIZE {
        generation("generation_v2", u64_at(d, 239)?, cx)?;
    }
    let bytenr = u64_at(d, 176)?;
    if !aligned(bytenr) {
        bad!("bytenr is {bytenr}, expected a multiple of {SECTOR}");
    }
    for (name, level) in [("drop_level", u8_at(d, 237)?), ("level", u8_at(d, 238)?)] {
        if level >= MAX_LEVEL {
            bad!("{name} is {level}, expected less than {MAX_LEVEL}");
        }
    }
    let flags = u64_at(d, 208)?;
    if flags & !RDONLY_AND_DEAD != 0 {
        bad!("flags are {flags:#x}, of which {:#x} are unknown", flags & !RDONLY_AND_DEAD);
    }
    Ok(())
}
