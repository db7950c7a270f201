//! Bodies for everything that turns bytes into types: for any bytes, the result is a value or an
//! error.
//!
//! If a parser accepts, more must hold: encoding the value must give the same bytes, and what the
//! node checker has passed must be parsed as far as the checker promises.

use super::choices::Choices;
use larder_codec::{Packer, Packing};
use larder_format::check::{Expect, check_chunk, check_node, check_unsealed};
use larder_format::items::keys::parse_uuid_item;
use larder_format::items::{
    BlockGroupItem, Chunk, Compression, DevExtent, DevReplace, DevStats, DirEntries, DirLogIndex,
    ExtRefs, ExtentItem, FileExtent, FreeSpaceInfo, InodeItem, InodeRefs, RootItem, RootRef,
    encode_sys_array, free_space, inode_ref, parse_keyed_refs, parse_sys_array,
};
use larder_format::node::{FLAG_WRITTEN, HEADER_SIZE, Header, NodeView};
use larder_format::{
    CsumType, DevItem, Generation, Key, KeyType, Logical, ObjectId, SUPER_OFFSETS, SUPER_SIZE,
    Superblock,
};
use std::cell::RefCell;
use zerocopy::{FromBytes, IntoBytes};

const CSUMS: [CsumType; 4] =
    [CsumType::Crc32c, CsumType::XxHash64, CsumType::Sha256, CsumType::Blake2b];

/// A superblock: as it is, and with magic, address and checksum put right.
pub fn superblock(bytes: &[u8]) {
    let mut block = bytes.to_vec();
    block.resize(SUPER_SIZE, 0);
    for at in SUPER_OFFSETS {
        let _ = Superblock::parse(bytes, at);
        let Ok(sb) = Superblock::mut_from_bytes(&mut block) else { continue };
        sb.magic = larder_format::superblock::MAGIC;
        sb.csum_type.set(sb.csum_type.get() % 4);
        sb.bytenr.set(at.0);
        // Fields for which most values end it, and one would do.
        sb.sectorsize.set(4096);
        sb.leafsize = sb.nodesize;
        sb.dev_item.fsid = sb.metadata_fsid();
        let sealed = sb.seal(at);
        let Ok(sb) = Superblock::parse(&sealed, at) else { continue };
        let _ = (
            sb.support(),
            format!("{sb:?}"),
            sb.label(),
            sb.current_backup_slot(),
            sb.next_backup_slot(),
        );
        let _ = (sb.incompat().names(), sb.compat_ro().names(), sb.super_flags().names());
        sys_chunks(sb.sys_chunk_bytes());
    }
}

/// The superblock's array of system chunks.
///
/// # Panics
/// If what was parsed encodes to other bytes.
pub fn sys_chunks(bytes: &[u8]) {
    let Ok(chunks) = parse_sys_array(bytes) else { return };
    for (key, chunk) in &chunks {
        let _ = (chunk.profile(), check_chunk(key, &chunk.encode(), 16384));
    }
    let again = encode_sys_array(chunks.iter().map(|(k, c)| (*k, c)));
    assert_eq!(again.as_deref(), Ok(bytes), "system chunks");
}

/// A node: choices about its file system, then its bytes.
pub fn node(bytes: &[u8]) {
    let mut c = Choices::new(bytes);
    let shape = c.byte();
    let (nodesize, csum) =
        ([4096u32, 16384][usize::from(shape & 1)], CSUMS[usize::from(shape >> 1 & 3)]);
    let mut block = c.rest().to_vec();
    block.resize(nodesize as usize, 0);
    let (raw_header, _) = Header::read_from_prefix(&block).expect("longer than a header");
    let expect = Expect {
        nodesize,
        fsid: raw_header.fsid,
        bytenr: Logical(raw_header.bytenr.get()),
        level: None,
        generation: None,
        owner: None,
        is_root: shape & 8 != 0,
        first_key: None,
        csum: Some(csum),
        super_generation: Generation(1 << 40),
        names_hidden: false,
    };
    let _ = check_node(&block, &expect);
    let (header, _) = Header::mut_from_prefix(&mut block).expect("longer than a header");
    header.set_flags(FLAG_WRITTEN);
    header.level &= 7;
    let sum = csum.compute(&block[32..]);
    block[..32].copy_from_slice(&sum);
    let believed = check_node(&block, &expect).is_ok();
    let unsealed = check_unsealed(&block, &expect, csum).is_ok();
    assert!(!believed || unsealed, "a node that passes with its checksum passes without it");
    views(NodeView(&block), believed);
}

/// Every accessor of a node and every parser of its items; `believed` if the node checker had no
/// objection.
fn views(node: NodeView<'_>, believed: bool) {
    let _ = (format!("{node:?}"), node.leaf_free(), node.search(&Key::MIN), node.search(&Key::MAX));
    for slot in 0..node.nritems().min(node.0.len()) {
        let key = node.key(slot);
        if believed {
            assert_eq!(node.search(&key.expect("a key in each slot")), Ok(slot));
        }
        if node.level() == 0 {
            let data = node.data(slot);
            assert!(!believed || data.is_some(), "data in each slot");
            if let (Some(key), Some(data)) = (key, data) {
                item(&key, data);
            }
        }
    }
    let _ =
        (node.pointers().len(), node.items().len(), node.key(usize::MAX), node.data(usize::MAX));
}

/// One item: the bytes of its key, then its data.
pub fn any_item(bytes: &[u8]) {
    let mut c = Choices::new(bytes);
    let kind = KeyType(c.byte());
    let key = Key { objectid: ObjectId(c.long()), kind, offset: c.long() };
    item(&key, c.rest());
    // And as the checker meets it: alone in a leaf.
    let data = c.rest();
    let mut block = vec![0; 4096];
    if data.len() > larder_format::node::max_item_size(4096) {
        return;
    }
    let offset = 4096 - data.len();
    block[offset..].copy_from_slice(data);
    let (header, body) = Header::mut_from_prefix(&mut block).expect("longer than a header");
    header.set_flags(FLAG_WRITTEN);
    header.nritems.set(1);
    header.owner.set(5);
    let (first, _) =
        larder_format::node::ItemHeader::mut_from_prefix(body).expect("longer than an item header");
    first.key = key.into();
    first.offset.set((offset - HEADER_SIZE) as u32);
    first.size.set(data.len() as u32);
    let expect = Expect {
        nodesize: 4096,
        fsid: [0; 16],
        bytenr: Logical(0),
        level: None,
        generation: None,
        owner: None,
        is_root: true,
        first_key: None,
        csum: None,
        super_generation: Generation(1 << 40),
        names_hidden: false,
    };
    let believed = check_unsealed(&block, &expect, CsumType::Crc32c).is_ok();
    views(NodeView(&block), believed);
}

/// Every parser that an item of this type can meet.
fn item(key: &Key, data: &[u8]) {
    match key.kind {
        KeyType::INODE_ITEM => {
            if let Ok(i) = InodeItem::parse(data) {
                let _ = (i.created(), i.inode_flags(), i.file_type(), i.is_dir());
            }
        }
        KeyType::INODE_REF => inode_refs(data),
        KeyType::INODE_EXTREF => extended_refs(data),
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => entries(data),
        KeyType::DIR_LOG_INDEX | KeyType::DIR_LOG_ITEM => drop(DirLogIndex::parse(data).copied()),
        KeyType::EXTENT_DATA => file_extent(key, data),
        KeyType::ROOT_ITEM => {
            if let Ok(r) = RootItem::parse(data) {
                let _ = (r.root(), r.root_generation(), r.root_flags());
            }
        }
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => {
            if let Ok(r) = RootRef::parse(data) {
                assert_eq!(r.encode(), data, "root references encode as they were");
            }
        }
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extent_item(key, data),
        KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::SHARED_DATA_REF => {
            for (r, count) in parse_keyed_refs(key, data).into_iter().flatten() {
                let _ = (r.keyed(Logical(key.objectid.0)), r.encode_keyed(count));
            }
        }
        KeyType::BLOCK_GROUP_ITEM => {
            if let Ok(g) = BlockGroupItem::parse(key.offset, data) {
                let _ = (g.kind().profile(), g.kind().type_name());
            }
        }
        KeyType::FREE_SPACE_INFO => {
            drop(FreeSpaceInfo::parse(data).map(FreeSpaceInfo::uses_bitmaps))
        }
        KeyType::FREE_SPACE_BITMAP => drop(free_space::check_bitmap(key.offset, data)),
        KeyType::DEV_EXTENT => drop(DevExtent::parse(data).map(|_| ())),
        KeyType::DEV_ITEM => drop(DevItem::read_from_bytes(data).map(|d| d.as_bytes().len())),
        KeyType::CHUNK_ITEM => {
            let _ = check_chunk(key, data, 16384);
            if let Ok(c) = Chunk::parse(data) {
                assert_eq!(c.encode(), data, "chunks encode as they were");
                let _ = (c.profile(), c.check_at(Logical(key.offset)));
            }
        }
        KeyType::PERSISTENT_ITEM => drop(DevStats::parse(data)),
        KeyType::DEV_REPLACE => drop(DevReplace::parse(data).map(DevReplace::state)),
        KeyType::UUID_SUBVOL | KeyType::UUID_RECEIVED_SUBVOL => drop(parse_uuid_item(data)),
        _ => {}
    }
}

fn inode_refs(data: &[u8]) {
    let mut again = Vec::new();
    let refs: Result<Vec<_>, _> = InodeRefs::new(data).collect();
    for r in refs.into_iter().flatten() {
        r.append_to(&mut again);
        let _ = inode_ref::find_ref(data, r.name);
        let mut cut = data.to_vec();
        let _ = inode_ref::remove_ref(&mut cut, r.name);
    }
    assert!(again.is_empty() || again == data, "inode references encode as they were");
}

fn extended_refs(data: &[u8]) {
    let mut again = Vec::new();
    let refs: Result<Vec<_>, _> = ExtRefs::new(data).collect();
    for r in refs.into_iter().flatten() {
        r.append_to(&mut again);
        let _ = inode_ref::find_extref(data, r.parent, r.name);
        let mut cut = data.to_vec();
        let _ = inode_ref::remove_extref(&mut cut, r.parent, r.name);
    }
    assert!(again.is_empty() || again == data, "extended references encode as they were");
}

fn entries(data: &[u8]) {
    let mut again = Vec::new();
    let entries: Result<Vec<_>, _> = DirEntries::new(data).collect();
    let _ = larder_format::items::dir::single_entry(data);
    for e in entries.into_iter().flatten() {
        e.append_to(&mut again);
        let mut cut = data.to_vec();
        let _ = larder_format::items::dir::remove_entry(&mut cut, e.name);
        let _ = larder_format::items::dir::is_plain_name(e.name);
    }
    assert!(again.is_empty() || again == data, "directory entries encode as they were");
}

fn file_extent(key: &Key, data: &[u8]) {
    let Ok(e) = FileExtent::parse(data) else { return };
    let _ = (e.generation(), e.len(), e.is_empty());
    assert_eq!(e.encode(), data, "file extents encode as they were");
    if let FileExtent::Stored(r) = e {
        let (skip, len) = (key.objectid.0, key.offset);
        if let Some(end) = skip.checked_add(len)
            && len > 0
            && end <= r.num_bytes
        {
            let _ = r.part(skip..end);
        }
    }
}

fn extent_item(key: &Key, data: &[u8]) {
    let Ok(e) = ExtentItem::parse(key.kind, data) else { return };
    assert_eq!(e.encoded_len(), data.len());
    assert_eq!(e.encode(), data, "extent items encode as they were");
    for (r, _) in &e.inline {
        let keyed = r.keyed(Logical(key.objectid.0));
        let _ = (e.inline_count(r), r.sequence(), r.inline_order(), keyed);
    }
}

/// A compressed extent: the method, the length it claims, then the stream. And the same bytes as
/// data to be packed.
///
/// # Panics
/// If it unpacks to different bytes when there is less room, or what was packed does not unpack to
/// what it was.
pub fn compressed(bytes: &[u8]) {
    let mut c = Choices::new(bytes);
    let method = [Compression::Zlib, Compression::Lzo, Compression::Zstd][c.below(3)];
    let len = [4096, 131_072, 1, usize::from(c.word()), 131_071][c.below(5)];
    let mut out = vec![0xee; len];
    if larder_codec::decompress(method, c.rest(), &mut out).is_ok() && len > 1 {
        let mut less = vec![0x11; len / 2];
        if larder_codec::decompress(method, c.rest(), &mut less).is_ok() {
            assert!(out.starts_with(&less), "the same stream, other bytes");
        }
    }
    let (level, data) = (i32::from(c.byte()) - 20, c.rest());
    let Some(packing) = Packing::new(method, Some(level)).filter(|_| !data.is_empty()) else {
        return;
    };
    // Often enough to see that what a packer keeps does not matter.
    thread_local!(static PACKER: RefCell<Packer> = RefCell::default());
    let data = data.repeat(1 + (level.unsigned_abs() & 7) as usize);
    let packed = PACKER.with_borrow_mut(|p| p.pack(packing, &data, data.len()).map(<[u8]>::to_vec));
    if let Some(packed) = packed {
        assert!(packed.len() <= data.len(), "more than there was room for");
        let mut again = vec![0x77; data.len()];
        assert_eq!(larder_codec::decompress(method, &packed, &mut again), Ok(()));
        assert!(again == data, "packed by {packing}, other bytes");
    }
}
