//! Keys of the items that have a rule for them: hashes, addresses, identities.
//!
//! Where to look for an item is as much a part of the format as its bytes. The rules that are more
//! than "object, type, 0" stand here once.

use crate::csum::{extref_hash, name_hash};
use crate::{
    FIRST_CHUNK_OBJECTID, FileOffset, FormatError, FormatResult, Key, KeyType, Logical, ObjectId,
    TreeId,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

/// An inode.
#[must_use]
pub fn inode_key(ino: ObjectId) -> Key {
    Key::new(ino, KeyType::INODE_ITEM, 0)
}
/// The names that directory `dir` has for inode `ino`.
#[must_use]
pub fn inode_ref_key(ino: ObjectId, dir: ObjectId) -> Key {
    Key::new(ino, KeyType::INODE_REF, dir.0)
}
/// A name of inode `ino` that found no room in the INODE_REF item.
#[must_use]
pub fn inode_extref_key(ino: ObjectId, dir: ObjectId, name: &[u8]) -> Key {
    Key::new(ino, KeyType::INODE_EXTREF, extref_hash(dir, name))
}
/// The entries of a directory with this name's hash.
#[must_use]
pub fn dir_item_key(dir: ObjectId, name: &[u8]) -> Key {
    Key::new(dir, KeyType::DIR_ITEM, name_hash(name))
}
/// The entry of a directory at this index.
#[must_use]
pub fn dir_index_key(dir: ObjectId, index: u64) -> Key {
    Key::new(dir, KeyType::DIR_INDEX, index)
}
/// The attributes of an inode with this name's hash.
#[must_use]
pub fn xattr_key(ino: ObjectId, name: &[u8]) -> Key {
    Key::new(ino, KeyType::XATTR_ITEM, name_hash(name))
}
/// The extent of a file that begins at this offset.
#[must_use]
pub fn extent_data_key(ino: ObjectId, at: FileOffset) -> Key {
    Key::new(ino, KeyType::EXTENT_DATA, at.0)
}
/// In a subvolume tree: this inode is to be deleted or truncated. In the root tree: this tree is to
/// be dropped.
#[must_use]
pub fn orphan_key(id: ObjectId) -> Key {
    Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, id.0)
}
/// Checksums from this address on.
#[must_use]
pub fn csum_key(at: Logical) -> Key {
    Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at.0)
}
/// The chunk at this address.
#[must_use]
pub fn chunk_key(at: Logical) -> Key {
    Key::new(FIRST_CHUNK_OBJECTID, KeyType::CHUNK_ITEM, at.0)
}
/// From a parent subvolume to one that hangs in it.
#[must_use]
pub fn root_ref_key(parent: TreeId, child: TreeId) -> Key {
    Key::new(parent, KeyType::ROOT_REF, child.0)
}
/// From a subvolume to the one that it hangs in.
#[must_use]
pub fn root_backref_key(child: TreeId, parent: TreeId) -> Key {
    Key::new(child, KeyType::ROOT_BACKREF, parent.0)
}

/// Key of a uuid in the uuid tree; `kind` is UUID_SUBVOL or UUID_RECEIVED_SUBVOL.
#[must_use]
pub fn uuid_key(uuid: &[u8; 16], kind: KeyType) -> Key {
    let (high, low) = uuid.split_at(8);
    let half = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("8 of 16 bytes"));
    Key::new(half(high), kind, half(low))
}
/// The uuid of a key of the uuid tree.
#[must_use]
pub fn uuid_of_key(key: &Key) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&key.objectid.0.to_le_bytes());
    out[8..].copy_from_slice(&key.offset.to_le_bytes());
    out
}
/// The subvolumes that an item of the uuid tree lists.
///
/// # Errors
/// The size is no positive multiple of 8.
pub fn parse_uuid_item(bytes: &[u8]) -> FormatResult<Vec<TreeId>> {
    let ids = <[U64]>::ref_from_bytes(bytes).ok().filter(|ids| !ids.is_empty());
    let ids = ids.ok_or_else(|| {
        FormatError::new(format!("uuid item has {} bytes, expected a multiple of 8", bytes.len()))
    })?;
    Ok(ids.iter().map(|id| ObjectId(id.get())).collect())
}
/// Bytes of an item of the uuid tree.
#[must_use]
pub fn encode_uuid_item(subvolumes: &[TreeId]) -> Vec<u8> {
    subvolumes.iter().flat_map(|id| id.0.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_and_their_keys_are_inverse() {
        let uuid: [u8; 16] = std::array::from_fn(|i| u8::try_from(i).unwrap());
        let key = uuid_key(&uuid, KeyType::UUID_SUBVOL);
        assert_eq!(key.objectid.0, 0x0706_0504_0302_0100);
        assert_eq!(uuid_of_key(&key), uuid);
        let ids = vec![ObjectId(5), ObjectId(256)];
        assert_eq!(parse_uuid_item(&encode_uuid_item(&ids)), Ok(ids));
        assert!(parse_uuid_item(&[]).is_err() && parse_uuid_item(&[0; 7]).is_err());
    }

    #[test]
    fn keys_with_hashes() {
        assert_eq!(dir_item_key(ObjectId(6), b"default").offset, 2_378_154_706);
        let name = b"link1003_xxxxxxxxxxxxxxxxxxxx";
        assert_eq!(inode_extref_key(ObjectId(300), ObjectId(267), name).offset, 12_355_913);
    }
}
