//! ROOT_ITEM, ROOT_REF and ROOT_BACKREF: trees, and where subvolumes hang.
//!
//! Hidden here: that a ROOT_ITEM has grown once. The part behind `generation_v2` was added later;
//! it counts only if `generation_v2` equals `generation`, because a kernel that does not know it
//! leaves it stale. A parsed item has it either true or zero.

use super::inode::{InodeItem, Timespec};
use super::{aligned, name_len, name_len_to_disk, prefix};
use crate::{DiskKey, FormatError, FormatResult, Generation, Logical, MAX_LEVEL, ObjectId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Flags of a root item.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct RootFlags: u64 {
        /// A read-only subvolume.
        const RDONLY = 1;
        /// Deleted; being dropped in the background.
        const DEAD = 1 << 48;
    }
}

/// ROOT_ITEM, 439 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RootItem {
    /// A relic; Linux fills it in all the same.
    pub inode: InodeItem,
    /// Generation of the root node. Use [`Self::set_generation`].
    pub generation: U64,
    /// 256 for subvolumes, otherwise 0.
    pub root_dirid: U64,
    /// Logical address of the root node.
    pub bytenr: U64,
    /// Unused, 0.
    pub byte_limit: U64,
    /// Bytes of the tree's nodes.
    pub bytes_used: U64,
    /// Transaction of the last snapshot taken of this tree, or of its making as one.
    pub last_snapshot: U64,
    /// [`RootFlags`].
    pub flags: U64,
    /// 1 alive, 0 deleted.
    pub refs: U32,
    /// Where the drop of a deleted tree goes on.
    pub drop_progress: DiskKey,
    /// Level of `drop_progress`.
    pub drop_level: u8,
    /// Level of the root node.
    pub level: u8,
    /// Equal to `generation`, or nothing below counts.
    pub generation_v2: U64,
    /// Identity of the subvolume.
    pub uuid: [u8; 16],
    /// Subvolume that this was made from.
    pub parent_uuid: [u8; 16],
    /// What a received subvolume was sent from.
    pub received_uuid: [u8; 16],
    /// Transaction of the last change.
    pub ctransid: U64,
    /// Transaction of creation.
    pub otransid: U64,
    /// Transaction when sent.
    pub stransid: U64,
    /// Transaction when received.
    pub rtransid: U64,
    /// Time of the last change.
    pub ctime: Timespec,
    /// Time of creation.
    pub otime: Timespec,
    /// Time when sent.
    pub stime: Timespec,
    /// Time when received.
    pub rtime: Timespec,
    /// Zero.
    pub reserved: [U64; 8],
}
const _: () = assert!(size_of::<RootItem>() == 439);
const _: () = assert!(std::mem::offset_of!(RootItem, generation_v2) == OLD_SIZE);
const _: () = assert!(std::mem::offset_of!(RootItem, drop_progress) == 220);
const _: () = assert!(std::mem::offset_of!(RootItem, ctransid) == 295);
const _: () = assert!(std::mem::offset_of!(RootItem, ctime) == 327);

/// Bytes of the old form, which ends before `generation_v2`.
pub const OLD_SIZE: usize = 239;

impl Default for RootItem {
    fn default() -> Self {
        Self::read_from_bytes(&[0; size_of::<Self>()]).expect("the size of the structure")
    }
}

impl RootItem {
    /// From the item's bytes, in the old form or the new.
    ///
    /// # Errors
    /// Another size, unknown flags, an unaligned address, or a level above 7.
    pub fn parse(bytes: &[u8]) -> FormatResult<Self> {
        const WHAT: &str = "root item";
        if bytes.len() != size_of::<Self>() && bytes.len() != OLD_SIZE {
            return Err(FormatError::new(format!(
                "root item has {} bytes, expected 439 or {OLD_SIZE}",
                bytes.len()
            )));
        }
        let mut item = Self::default();
        item.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        if item.generation_v2 != item.generation {
            item.as_mut_bytes()[OLD_SIZE..].fill(0);
        }
        if !RootFlags::all().contains(item.root_flags()) {
            return Err(FormatError::new(format!("root item has unknown flags {:#x}", item.flags)));
        }
        aligned(item.bytenr.get(), WHAT, "bytenr")?;
        for (field, level) in [("level", item.level), ("drop_level", item.drop_level)] {
            if level >= MAX_LEVEL {
                return Err(FormatError::new(format!(
                    "root item has {field} {level}, expected at most 7"
                )));
            }
        }
        Ok(item)
    }
    /// Address of the root node.
    #[must_use]
    pub fn root(&self) -> Logical {
        Logical(self.bytenr.get())
    }
    /// Generation of the root node.
    #[must_use]
    pub fn root_generation(&self) -> Generation {
        Generation(self.generation.get())
    }
    /// Sets both generations.
    pub fn set_generation(&mut self, generation: Generation) {
        self.generation = U64::new(generation.0);
        self.generation_v2 = self.generation;
    }
    /// The flags.
    #[must_use]
    pub fn root_flags(&self) -> RootFlags {
        RootFlags::from_bits_retain(self.flags.get())
    }
    /// Sets the flags.
    pub fn set_root_flags(&mut self, flags: RootFlags) {
        self.flags = U64::new(flags.bits());
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RefHeader {
    dirid: U64,
    sequence: U64,
    name_len: U16,
}
const _: () = assert!(size_of::<RefHeader>() == 18);

/// ROOT_REF and ROOT_BACKREF: where in its parent a subvolume hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootRef<'a> {
    /// Directory in the parent.
    pub dirid: ObjectId,
    /// Offset of the DIR_INDEX key of the entry.
    pub sequence: u64,
    /// 1 to 255 bytes.
    pub name: &'a [u8],
}

impl<'a> RootRef<'a> {
    /// From the item's bytes.
    ///
    /// # Errors
    /// A size that does not fit the name, or a name of an impossible length.
    pub fn parse(bytes: &'a [u8]) -> FormatResult<Self> {
        let (head, name) = prefix::<RefHeader>(bytes, "root ref")?;
        let len = name_len(head.name_len.get(), "root ref")?;
        if name.len() != len {
            return Err(FormatError::new(format!(
                "root ref has {} bytes, expected {} for a name of {len}",
                bytes.len(),
                size_of::<RefHeader>() + len
            )));
        }
        Ok(Self { dirid: ObjectId(head.dirid.get()), sequence: head.sequence.get(), name })
    }
    /// The item's bytes.
    ///
    /// # Panics
    /// If the name has not 1 to 255 bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = RefHeader {
            dirid: U64::new(self.dirid.0),
            sequence: U64::new(self.sequence),
            name_len: name_len_to_disk(self.name).into(),
        };
        [head.as_bytes(), self.name].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_old_kernel_wrote_has_no_second_part() {
        let mut item = RootItem { bytenr: 65536.into(), uuid: [1; 16], ..RootItem::default() };
        item.set_generation(Generation(7));
        assert_eq!(RootItem::parse(item.as_bytes()), Ok(item));

        let old = RootItem::parse(&item.as_bytes()[..OLD_SIZE]).unwrap();
        assert_eq!(
            (old.root_generation(), old.generation_v2.get(), old.uuid),
            (Generation(7), 0, [0; 16])
        );

        item.generation = 8.into();
        assert_eq!(RootItem::parse(item.as_bytes()).unwrap().uuid, [0; 16]);
        assert!(RootItem::parse(&item.as_bytes()[..438]).unwrap_err().0.contains("438 bytes"));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let refused = |change: &dyn Fn(&mut RootItem)| {
            let mut item = RootItem::default();
            change(&mut item);
            RootItem::parse(item.as_bytes()).unwrap_err().0
        };
        assert!(refused(&|i| i.flags = 2.into()).contains("flags 0x2"));
        assert!(refused(&|i| i.bytenr = 100.into()).contains("bytenr 100"));
        assert!(refused(&|i| i.level = 8).contains("level 8"));
        assert!(refused(&|i| i.drop_level = 9).contains("drop_level 9"));
    }
}
