//! Keys: the (object id, type, offset) that every item of every tree is sorted by.

use crate::ObjectId;
use std::fmt;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A key as it lies on disk: 17 bytes, little-endian.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DiskKey {
    pub objectid: U64,
    pub kind: u8,
    pub offset: U64,
}
const _: () = assert!(size_of::<DiskKey>() == 17);

impl fmt::Debug for DiskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Key::from(*self).fmt(f)
    }
}

/// Second field of a key. Any byte can stand on disk, hence not an enum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct KeyType(pub u8);

macro_rules! key_types {
    ($($name:ident = $value:literal),* $(,)?) => {
        #[allow(missing_docs)]
        impl KeyType {
            $(pub const $name: Self = Self($value);)*
            /// Name of the type as in the format's documentation, if it has one.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                match self.0 { $($value => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}
key_types! {
    INODE_ITEM = 1, INODE_REF = 12, INODE_EXTREF = 13, XATTR_ITEM = 24, VERITY_DESC = 36,
    VERITY_MERKLE = 37, ORPHAN_ITEM = 48, DIR_LOG_ITEM = 60, DIR_LOG_INDEX = 72, DIR_ITEM = 84,
    DIR_INDEX = 96, EXTENT_DATA = 108, EXTENT_CSUM = 128, ROOT_ITEM = 132, ROOT_BACKREF = 144,
    ROOT_REF = 156, EXTENT_ITEM = 168, METADATA_ITEM = 169, EXTENT_OWNER_REF = 172,
    TREE_BLOCK_REF = 176, EXTENT_DATA_REF = 178, SHARED_BLOCK_REF = 182, SHARED_DATA_REF = 184,
    BLOCK_GROUP_ITEM = 192, FREE_SPACE_INFO = 198, FREE_SPACE_EXTENT = 199,
    FREE_SPACE_BITMAP = 200, DEV_EXTENT = 204, DEV_ITEM = 216, CHUNK_ITEM = 228,
    RAID_STRIPE = 230, QGROUP_STATUS = 240, QGROUP_INFO = 242, QGROUP_LIMIT = 244,
    QGROUP_RELATION = 246, TEMPORARY_ITEM = 248, PERSISTENT_ITEM = 249, DEV_REPLACE = 250,
    UUID_SUBVOL = 251, UUID_RECEIVED_SUBVOL = 252,
}
impl fmt::Debug for KeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(n) => f.write_str(n),
            None => write!(f, "UNKNOWN.{}", self.0),
        }
    }
}
impl fmt::Display for KeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A key in memory. Orders as on disk: object id, then type, then offset, all unsigned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[allow(missing_docs)]
pub struct Key {
    pub objectid: ObjectId,
    pub kind: KeyType,
    pub offset: u64,
}

impl Key {
    /// The smallest key.
    pub const MIN: Self = Self { objectid: ObjectId(0), kind: KeyType(0), offset: 0 };
    /// The largest key.
    pub const MAX: Self =
        Self { objectid: ObjectId(u64::MAX), kind: KeyType(u8::MAX), offset: u64::MAX };

    /// A key from its three parts.
    #[must_use]
    pub fn new(objectid: impl Into<ObjectId>, kind: KeyType, offset: u64) -> Self {
        Self { objectid: objectid.into(), kind, offset }
    }
    /// The next larger key, or `None` after the largest.
    #[must_use]
    pub fn successor(self) -> Option<Self> {
        if self.offset < u64::MAX {
            return Some(Self { offset: self.offset + 1, ..self });
        }
        if self.kind.0 < u8::MAX {
            return Some(Self { kind: KeyType(self.kind.0 + 1), offset: 0, ..self });
        }
        (self.objectid.0 < u64::MAX).then(|| Self {
            objectid: ObjectId(self.objectid.0 + 1),
            kind: KeyType(0),
            offset: 0,
        })
    }
    /// The next smaller key, or `None` before the smallest.
    #[must_use]
    pub fn predecessor(self) -> Option<Self> {
        if self.offset > 0 {
            return Some(Self { offset: self.offset - 1, ..self });
        }
        if self.kind.0 > 0 {
            return Some(Self { kind: KeyType(self.kind.0 - 1), offset: u64::MAX, ..self });
        }
        (self.objectid.0 > 0).then(|| Self {
            objectid: ObjectId(self.objectid.0 - 1),
            kind: KeyType(u8::MAX),
            offset: u64::MAX,
        })
    }
}
impl From<u64> for ObjectId {
    fn from(v: u64) -> Self {
        Self(v)
    }
}
impl From<crate::Logical> for ObjectId {
    fn from(v: crate::Logical) -> Self {
        Self(v.0)
    }
}
impl From<DiskKey> for Key {
    fn from(k: DiskKey) -> Self {
        Self { objectid: ObjectId(k.objectid.get()), kind: KeyType(k.kind), offset: k.offset.get() }
    }
}
impl From<Key> for DiskKey {
    fn from(k: Key) -> Self {
        Self { objectid: U64::new(k.objectid.0), kind: k.kind.0, offset: U64::new(k.offset) }
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} {} {})", self.objectid, self.kind, self.offset)
    }
}
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_ids_sort_last_and_neighbours_are_inverse() {
        let a = Key::new(300, KeyType::DIR_ITEM, 5);
        let b = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, 0);
        assert!(a < b);
        for k in [a, b, Key::new(1, KeyType(0), u64::MAX), Key::new(1, KeyType(255), u64::MAX)] {
            assert_eq!(k.successor().unwrap().predecessor().unwrap(), k);
        }
        assert_eq!(Key::MAX.successor(), None);
        assert_eq!(Key::MIN.predecessor(), None);
        assert_eq!(format!("{b:?}"), "(-5 ORPHAN_ITEM 0)");
    }
}
