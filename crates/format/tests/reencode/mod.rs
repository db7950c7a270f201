//! Every item through its parser and back.

use larder_format::items::dir::single_entry;
use larder_format::items::free_space::check_bitmap;
use larder_format::items::{
    BalanceItem, BlockGroupItem, Chunk, DevExtent, DevReplace, DevStats, DirEntries, DirLogIndex,
    ExtRefs, ExtentItem, FileExtent, FreeSpaceInfo, InodeItem, InodeRefs, RootItem, RootRef, keys,
    parse_keyed_refs,
};
use larder_format::{DevItem, FormatResult, Key, KeyType};
use zerocopy::{FromBytes, IntoBytes};

fn empty(bytes: &[u8]) -> FormatResult<Vec<u8>> {
    if bytes.is_empty() {
        Ok(Vec::new())
    } else {
        Err(larder_format::FormatError::new("not empty"))
    }
}

/// Parses the bytes as an item of this key's type and gives the encoding of what was understood;
/// `None` for types without a parser.
pub(crate) fn reencode(key: &Key, bytes: &[u8]) -> Option<FormatResult<Vec<u8>>> {
    let fixed = |r: FormatResult<&[u8]>| r.map(<[u8]>::to_vec);
    Some(match key.kind {
        KeyType::INODE_ITEM => fixed(InodeItem::parse(bytes).map(IntoBytes::as_bytes)),
        KeyType::INODE_REF => InodeRefs::new(bytes).try_fold(Vec::new(), |mut v, e| {
            e?.append_to(&mut v);
            Ok(v)
        }),
        KeyType::INODE_EXTREF => ExtRefs::new(bytes).try_fold(Vec::new(), |mut v, e| {
            e?.append_to(&mut v);
            Ok(v)
        }),
        KeyType::DIR_ITEM | KeyType::XATTR_ITEM => {
            DirEntries::new(bytes).try_fold(Vec::new(), |mut v, e| {
                e?.append_to(&mut v);
                Ok(v)
            })
        }
        KeyType::DIR_INDEX => single_entry(bytes).map(|e| e.encode()),
        KeyType::DIR_LOG_INDEX => fixed(DirLogIndex::parse(bytes).map(IntoBytes::as_bytes)),
        KeyType::ORPHAN_ITEM | KeyType::FREE_SPACE_EXTENT => empty(bytes),
        KeyType::EXTENT_DATA => FileExtent::parse(bytes).map(|e| e.encode()),
        KeyType::ROOT_ITEM => RootItem::parse(bytes).map(|i| i.as_bytes()[..bytes.len()].to_vec()),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => RootRef::parse(bytes).map(|r| r.encode()),
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
            ExtentItem::parse(key.kind, bytes).map(|e| e.encode())
        }
        KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::SHARED_DATA_REF => parse_keyed_refs(key, bytes)
            .map(|refs| refs.iter().flat_map(|(r, count)| r.encode_keyed(*count)).collect()),
        KeyType::BLOCK_GROUP_ITEM => {
            fixed(BlockGroupItem::parse(key.offset, bytes).map(IntoBytes::as_bytes))
        }
        KeyType::FREE_SPACE_INFO => fixed(FreeSpaceInfo::parse(bytes).map(IntoBytes::as_bytes)),
        KeyType::FREE_SPACE_BITMAP => check_bitmap(key.offset, bytes).map(|()| bytes.to_vec()),
        KeyType::DEV_EXTENT => fixed(DevExtent::parse(bytes).map(IntoBytes::as_bytes)),
        KeyType::DEV_ITEM => DevItem::ref_from_bytes(bytes)
            .map(|i| i.as_bytes().to_vec())
            .map_err(|e| larder_format::FormatError::new(e.to_string())),
        KeyType::TEMPORARY_ITEM => fixed(BalanceItem::parse(bytes).map(IntoBytes::as_bytes)),
        KeyType::PERSISTENT_ITEM => DevStats::parse(bytes).map(|s| s.as_bytes().to_vec()),
        KeyType::DEV_REPLACE => fixed(DevReplace::parse(bytes).map(IntoBytes::as_bytes)),
        KeyType::CHUNK_ITEM => Chunk::parse(bytes).map(|c| c.encode()),
        KeyType::UUID_SUBVOL | KeyType::UUID_RECEIVED_SUBVOL => {
            keys::parse_uuid_item(bytes).map(|ids| keys::encode_uuid_item(&ids))
        }
        _ => return None,
    })
}
