//! The four checksums, and the name hashes that are built from crc32c without its inversions.
//!
//! Checksums protect superblocks, nodes and data sectors alike. The hashes for keys use crc32c
//! with other seeds whatever the file system's checksum is.

use crate::{FileOffset, FormatError, FormatResult, ObjectId, TreeId};

/// Which checksum a file system uses; stands in its superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum CsumType {
    Crc32c,
    XxHash64,
    Sha256,
    Blake2b,
}

/// A checksum value: up to 32 bytes, zero-padded as on disk.
pub type Checksum = [u8; 32];

impl CsumType {
    /// From the superblock's number.
    ///
    /// # Errors
    /// The number is none of the four that exist.
    pub fn from_disk(v: u16) -> FormatResult<Self> {
        Ok(match v {
            0 => Self::Crc32c,
            1 => Self::XxHash64,
            2 => Self::Sha256,
            3 => Self::Blake2b,
            _ => return Err(FormatError::new(format!("unknown checksum type {v}"))),
        })
    }
    /// The superblock's number.
    #[must_use]
    pub fn to_disk(self) -> u16 {
        match self {
            Self::Crc32c => 0,
            Self::XxHash64 => 1,
            Self::Sha256 => 2,
            Self::Blake2b => 3,
        }
    }
    /// Name as `mkfs.btrfs --csum` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc32c => "crc32c",
            Self::XxHash64 => "xxhash64",
            Self::Sha256 => "sha256",
            Self::Blake2b => "blake2b",
        }
    }
    /// Bytes of one checksum.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Crc32c => 4,
            Self::XxHash64 => 8,
            Self::Sha256 | Self::Blake2b => 32,
        }
    }
    /// Checksum of `data`, zero-padded to 32 bytes.
    #[must_use]
    pub fn compute(self, data: &[u8]) -> Checksum {
        let mut out = [0u8; 32];
        match self {
            Self::Crc32c => out[..4].copy_from_slice(&crc32c::crc32c(data).to_le_bytes()),
            Self::XxHash64 => {
                out[..8].copy_from_slice(&xxhash_rust::xxh64::xxh64(data, 0).to_le_bytes());
            }
            Self::Sha256 => {
                use sha2::Digest;
                out.copy_from_slice(&sha2::Sha256::digest(data));
            }
            Self::Blake2b => {
                use blake2::Digest;
                type Blake2b256 = blake2::Blake2b<blake2::digest::consts::U32>;
                out.copy_from_slice(&Blake2b256::digest(data));
            }
        }
        out
    }
}

/// crc32c with the given start value and no final inversion: the primitive of all key hashes.
#[must_use]
pub fn crc32c_raw(seed: u32, data: &[u8]) -> u32 {
    // The crate inverts on the way in and on the way out; undo both.
    !crc32c::crc32c_append(!seed, data)
}

/// Offset of a DIR_ITEM or XATTR_ITEM key: hash of the name.
#[must_use]
pub fn name_hash(name: &[u8]) -> u64 {
    u64::from(crc32c_raw(0xffff_fffe, name))
}

/// Offset of an INODE_EXTREF key: hash of the name, seeded with the parent directory.
#[must_use]
pub fn extref_hash(parent: ObjectId, name: &[u8]) -> u64 {
    #[allow(clippy::cast_possible_truncation)]
    let seed = parent.0 as u32;
    u64::from(crc32c_raw(seed, name))
}

/// Offset of an EXTENT_DATA_REF key, and the order of inline data refs.
#[must_use]
pub fn data_ref_hash(root: TreeId, inode: ObjectId, offset: FileOffset) -> u64 {
    let high = crc32c_raw(u32::MAX, &root.0.to_le_bytes());
    let low = crc32c_raw(u32::MAX, &inode.0.to_le_bytes());
    let low = crc32c_raw(low, &offset.0.to_le_bytes());
    (u64::from(high) << 31) ^ u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_keys_that_linux_wrote() {
        assert_eq!(name_hash(b"default"), 2_378_154_706);
        assert_eq!(name_hash(b"TTqGO4p"), 3_469_153_913);
        assert_eq!(name_hash(b"snNzDoq"), 3_469_153_913);
        assert_eq!(extref_hash(ObjectId(267), b"link1003_xxxxxxxxxxxxxxxxxxxx"), 12_355_913);
        let hash = data_ref_hash(ObjectId(256), ObjectId(658), FileOffset(0));
        assert_eq!(hash, 0x0dea_30de_b471_9f5d);
    }

    #[test]
    fn checksums_of_the_standard_test_vectors() {
        assert_eq!(CsumType::Crc32c.compute(b"123456789")[..4], 0xe306_9283u32.to_le_bytes());
        assert_eq!(CsumType::XxHash64.compute(b"")[..8], 0xef46_db37_51d8_e999u64.to_le_bytes());
        assert_eq!(CsumType::Sha256.compute(b"")[..4], [0xe3, 0xb0, 0xc4, 0x42]);
        assert_eq!(CsumType::Blake2b.compute(b"")[..4], [0x0e, 0x57, 0x51, 0xc0]);
        for t in [CsumType::Crc32c, CsumType::XxHash64, CsumType::Sha256, CsumType::Blake2b] {
            assert_eq!(CsumType::from_disk(t.to_disk()), Ok(t));
            assert!(t.compute(b"x")[t.size()..].iter().all(|b| *b == 0));
        }
        assert!(CsumType::from_disk(4).is_err());
    }
}
