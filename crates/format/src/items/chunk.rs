//! CHUNK_ITEM, and the array of system chunks in the superblock.
//!
//! A chunk says which ranges of which devices stand behind a range of logical addresses. Hidden
//! here: the list of stripes behind the fixed part, the rules on them, and the packed array through
//! which the chunk tree itself is found.

use super::block_group::{BlockGroupFlags, Profile};
use super::{aligned, prefix};
use crate::superblock::SYS_CHUNK_ARRAY_SIZE;
use crate::{
    DeviceId, DiskKey, FIRST_CHUNK_OBJECTID, FormatError, FormatResult, Key, KeyType, Logical,
    ObjectId, Physical, SECTOR_SIZE, STRIPE_LEN,
};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    length: U64,
    owner: U64,
    stripe_len: U64,
    flags: U64,
    io_align: U32,
    io_width: U32,
    sector_size: U32,
    num_stripes: U16,
    sub_stripes: U16,
}
const _: () = assert!(size_of::<Head>() == HEADER_SIZE);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DiskStripe {
    devid: U64,
    offset: U64,
    dev_uuid: [u8; 16],
}
const _: () = assert!(size_of::<DiskStripe>() == STRIPE_SIZE);

/// Bytes of a chunk item before its stripes.
const HEADER_SIZE: usize = 48;
/// Bytes of each stripe.
const STRIPE_SIZE: usize = 32;
/// Chunks are shorter than this.
pub const MAX_CHUNK_LENGTH: u64 = 1 << 48;

/// A range of a device that a chunk uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stripe {
    /// The device.
    pub devid: DeviceId,
    /// Where the range begins.
    pub offset: Physical,
    /// The device's uuid.
    pub dev_uuid: [u8; 16],
}

/// A CHUNK_ITEM; its logical address is the offset of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Bytes, logical.
    pub length: u64,
    /// 2, the extent tree.
    pub owner: ObjectId,
    /// 65536.
    pub stripe_len: u64,
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Meaningless; 65536.
    pub io_align: u32,
    /// Meaningless; 65536.
    pub io_width: u32,
    /// Sector size of the file system.
    pub sector_size: u32,
    /// Copies within RAID10 (2); otherwise 1, or 0 in old images.
    pub sub_stripes: u16,
    /// The ranges on devices.
    pub stripes: Vec<Stripe>,
}

impl Chunk {
    /// Is it the same chunk? The copies within RAID10 mean nothing in other profiles, where Linux
    /// writes 1, old images have 0, and `btrfs-image` puts the one in the place of the other at
    /// times.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let alike = || *self == Self { sub_stripes: self.sub_stripes, ..other.clone() };
        self == other || !self.flags.contains(BlockGroupFlags::RAID10) && alike()
    }

    /// A chunk with the fixed fields as Linux writes them.
    #[must_use]
    pub fn new(length: u64, flags: BlockGroupFlags, stripes: Vec<Stripe>) -> Self {
        Self {
            length,
            owner: ObjectId::EXTENT_TREE,
            stripe_len: STRIPE_LEN,
            flags,
            io_align: 65536,
            io_width: 65536,
            sector_size: SECTOR_SIZE,
            sub_stripes: flags.profile().map_or(1, Profile::sub_stripes),
            stripes,
        }
    }
    /// From the item's bytes.
    ///
    /// # Errors
    /// A size other than its number of stripes needs, or a field that Linux would refuse.
    pub fn parse(bytes: &[u8]) -> FormatResult<Self> {
        let (chunk, rest) = Self::parse_prefix(bytes)?;
        if !rest.is_empty() {
            return Err(FormatError::new(format!(
                "chunk item has {} bytes, expected {} for {} stripes",
                bytes.len(),
                bytes.len() - rest.len(),
                chunk.stripes.len()
            )));
        }
        Ok(chunk)
    }
    fn parse_prefix(bytes: &[u8]) -> FormatResult<(Self, &[u8])> {
        let (head, rest) = prefix::<Head>(bytes, "chunk item")?;
        let count = usize::from(head.num_stripes.get());
        let (stripes, rest) =
            <[DiskStripe]>::ref_from_prefix_with_elems(rest, count).map_err(|_| {
                FormatError::new(format!(
                    "chunk item has {} bytes behind its head, expected {} for {count} stripes",
                    rest.len(),
                    count * STRIPE_SIZE
                ))
            })?;
        let chunk = Self {
            length: head.length.get(),
            owner: ObjectId(head.owner.get()),
            stripe_len: head.stripe_len.get(),
            flags: BlockGroupFlags::from_bits_retain(head.flags.get()),
            io_align: head.io_align.get(),
            io_width: head.io_width.get(),
            sector_size: head.sector_size.get(),
            sub_stripes: head.sub_stripes.get(),
            stripes: stripes
                .iter()
                .map(|s| Stripe {
                    devid: DeviceId(s.devid.get()),
                    offset: Physical(s.offset.get()),
                    dev_uuid: s.dev_uuid,
                })
                .collect(),
        };
        chunk.check()?;
        Ok((chunk, rest))
    }
    fn check(&self) -> FormatResult<()> {
        const WHAT: &str = "chunk";
        let fail = |why: String| Err(FormatError::new(format!("chunk has {why}")));
        let profile = self.flags.profile()?;
        let count = self.stripes.len();
        if !u16::try_from(count).is_ok_and(|n| profile.fits_stripes(n)) {
            return fail(format!("{count} stripes, which {} does not allow", profile.name()));
        }
        let sub_stripes = profile.sub_stripes();
        if sub_stripes > 1 && self.sub_stripes != sub_stripes {
            let (is, name) = (self.sub_stripes, profile.name());
            return fail(format!("sub_stripes {is}, expected {sub_stripes} for {name}"));
        }
        if self.stripe_len != STRIPE_LEN {
            return fail(format!("stripe_len {}, expected {STRIPE_LEN}", self.stripe_len));
        }
        if self.sector_size != SECTOR_SIZE {
            return fail(format!("sector_size {}, expected {SECTOR_SIZE}", self.sector_size));
        }
        if self.length == 0 || self.length >= MAX_CHUNK_LENGTH {
            return fail(format!("length {}, expected 1 to 2^48 - 1", self.length));
        }
        aligned(self.length, WHAT, "length")?;
        for stripe in &self.stripes {
            aligned(stripe.offset.0, WHAT, "stripe offset")?;
            if stripe.offset.0.checked_add(self.stripe_bytes()).is_none() {
                return fail(format!("a stripe at {}, which overflows", stripe.offset));
            }
        }
        Ok(())
    }
    /// Checks the logical address that the key gives.
    ///
    /// # Errors
    /// The address is unaligned or the chunk would reach beyond the last address.
    pub fn check_at(&self, logical: Logical) -> FormatResult<()> {
        aligned(logical.0, "chunk", "logical address")?;
        if logical.0.checked_add(self.length).is_none() {
            return Err(FormatError::new(format!(
                "chunk at {logical} has length {}, which overflows",
                self.length
            )));
        }
        Ok(())
    }
    /// The profile.
    ///
    /// # Errors
    /// The flags are impossible; never after [`Self::parse`].
    pub fn profile(&self) -> FormatResult<Profile> {
        self.flags.profile()
    }
    /// Bytes that each stripe takes on its device.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        let count = u16::try_from(self.stripes.len()).unwrap_or(u16::MAX);
        self.profile().map_or(self.length, |p| p.stripe_bytes(self.length, count))
    }
    /// Bytes of the item.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        HEADER_SIZE + STRIPE_SIZE * self.stripes.len()
    }
    /// The item's bytes.
    ///
    /// # Panics
    /// If there are more than 65535 stripes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = Head {
            length: U64::new(self.length),
            owner: U64::new(self.owner.0),
            stripe_len: U64::new(self.stripe_len),
            flags: U64::new(self.flags.bits()),
            io_align: U32::new(self.io_align),
            io_width: U32::new(self.io_width),
            sector_size: U32::new(self.sector_size),
            num_stripes: u16::try_from(self.stripes.len()).expect("few stripes").into(),
            sub_stripes: U16::new(self.sub_stripes),
        };
        let mut out = Vec::with_capacity(self.encoded_len());
        out.extend_from_slice(head.as_bytes());
        for s in &self.stripes {
            let disk = DiskStripe {
                devid: U64::new(s.devid.0),
                offset: U64::new(s.offset.0),
                dev_uuid: s.dev_uuid,
            };
            out.extend_from_slice(disk.as_bytes());
        }
        out
    }
}

/// The system chunks of a superblock's array, in its order. `bytes` is the used part of the array.
///
/// # Errors
/// Anything but keys of chunk items, each followed by a system chunk.
pub fn parse_sys_array(bytes: &[u8]) -> FormatResult<Vec<(Key, Chunk)>> {
    if bytes.len() > SYS_CHUNK_ARRAY_SIZE {
        return Err(FormatError::new(format!(
            "system chunk array has {} bytes, expected at most {SYS_CHUNK_ARRAY_SIZE}",
            bytes.len()
        )));
    }
    let mut out = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (key, tail) = prefix::<DiskKey>(rest, "key in the system chunk array")?;
        let key = Key::from(*key);
        if key.objectid != ObjectId(FIRST_CHUNK_OBJECTID) || key.kind != KeyType::CHUNK_ITEM {
            return Err(FormatError::new(format!(
                "system chunk array has key {key}, expected a chunk item of object 256"
            )));
        }
        let (chunk, tail) = Chunk::parse_prefix(tail)?;
        chunk.check_at(Logical(key.offset))?;
        if !chunk.flags.contains(BlockGroupFlags::SYSTEM) {
            return Err(FormatError::new(format!(
                "system chunk array has a chunk of type {:#x}, expected a system chunk",
                chunk.flags.bits()
            )));
        }
        out.push((key, chunk));
        rest = tail;
    }
    Ok(out)
}

/// The bytes of a superblock's system chunk array.
///
/// # Errors
/// They do not fit the superblock.
pub fn encode_sys_array<'a>(
    chunks: impl IntoIterator<Item = (Key, &'a Chunk)>,
) -> FormatResult<Vec<u8>> {
    let mut out = Vec::new();
    for (key, chunk) in chunks {
        out.extend_from_slice(DiskKey::from(key).as_bytes());
        out.extend_from_slice(&chunk.encode());
    }
    if out.len() > SYS_CHUNK_ARRAY_SIZE {
        return Err(FormatError::new(format!(
            "system chunks need {} bytes, the superblock has room for {SYS_CHUNK_ARRAY_SIZE}",
            out.len()
        )));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stripe(devid: u64) -> Stripe {
        Stripe { devid: DeviceId(devid), offset: Physical(devid << 20), dev_uuid: [7; 16] }
    }

    #[test]
    fn each_rule_has_its_message() {
        let good = Chunk::new(
            8 << 20,
            BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP,
            vec![stripe(1), stripe(1)],
        );
        assert_eq!(Chunk::parse(&good.encode()), Ok(good.clone()));
        let refused = |change: &dyn Fn(&mut Chunk)| {
            let mut bad = good.clone();
            change(&mut bad);
            Chunk::parse(&bad.encode()).unwrap_err().0
        };
        assert!(refused(&|c| c.length = 0).contains("length 0"));
        assert!(refused(&|c| c.length = 1 << 48).contains("length 281474976710656"));
        assert!(refused(&|c| c.length += 512).contains("multiple of 4096"));
        assert!(refused(&|c| c.stripe_len = 4096).contains("stripe_len 4096"));
        assert!(refused(&|c| c.sector_size = 512).contains("sector_size 512"));
        assert!(refused(&|c| c.stripes.truncate(1)).contains("1 stripes, which dup"));
        assert!(refused(&|c| c.stripes.clear()).contains("0 stripes"));
        assert!(refused(&|c| c.flags |= BlockGroupFlags::RAID1).contains("more than one profile"));
        assert!(refused(&|c| c.flags |= BlockGroupFlags::DATA).contains("none of data"));
        assert!(refused(&|c| c.stripes[0].offset.0 = u64::MAX - 4095).contains("overflows"));
        assert!(
            refused(&|c| {
                c.flags = BlockGroupFlags::DATA | BlockGroupFlags::RAID10;
                c.sub_stripes = 1;
            })
            .contains("sub_stripes 1")
        );
        assert!(good.check_at(Logical(512)).is_err());
        assert!(good.check_at(Logical(u64::MAX - 4095)).is_err());
        assert!(
            Chunk::parse(&[good.encode(), vec![0]].concat())
                .unwrap_err()
                .0
                .contains("expected 112")
        );
    }

    #[test]
    fn what_means_nothing_makes_no_other_chunk() {
        let dup = Chunk::new(
            8 << 20,
            BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP,
            vec![stripe(1), stripe(1)],
        );
        assert!(dup.is_same_as(&Chunk { sub_stripes: 0, ..dup.clone() }));
        assert!(!dup.is_same_as(&Chunk { length: 4 << 20, sub_stripes: 0, ..dup.clone() }));
        let raid10 = Chunk { flags: BlockGroupFlags::SYSTEM | BlockGroupFlags::RAID10, ..dup };
        assert!(!raid10.is_same_as(&Chunk { sub_stripes: 2, ..raid10.clone() }));
    }

    #[test]
    fn the_array_holds_system_chunks_only() {
        let key = |at| Key::new(FIRST_CHUNK_OBJECTID, KeyType::CHUNK_ITEM, at);
        let system = Chunk::new(8 << 20, BlockGroupFlags::SYSTEM, vec![stripe(1)]);
        let data = Chunk::new(8 << 20, BlockGroupFlags::DATA, vec![stripe(1)]);
        let both = vec![(key(0), system.clone()), (key(8 << 20), system.clone())];
        let bytes = encode_sys_array(both.iter().map(|(k, c)| (*k, c))).unwrap();
        assert_eq!(bytes.len(), 2 * 97);
        assert_eq!(parse_sys_array(&bytes), Ok(both));
        assert!(parse_sys_array(&bytes[..150]).is_err());
        let bytes = encode_sys_array([(key(0), &data)]).unwrap();
        assert!(parse_sys_array(&bytes).unwrap_err().0.contains("type 0x1"));
        let bytes = encode_sys_array([(Key::new(1, KeyType::DEV_ITEM, 1), &system)]).unwrap();
        assert!(parse_sys_array(&bytes).unwrap_err().0.contains("DEV_ITEM"));
        assert!(encode_sys_array((0..22).map(|i| (key(i << 23), &system))).is_err());
    }
}
