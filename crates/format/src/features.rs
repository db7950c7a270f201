//! Feature bits of the superblock, and the names people know them by.
//!
//! The decision hidden here is only the numbering: which bit means what, and what `mkfs.btrfs` and
//! this project's messages call it. What Larder does about a feature is decided in
//! [`crate::superblock`]. Unknown bits are kept, never dropped, so that they can be named by
//! number.

use bitflags::bitflags;

bitflags! {
    /// Features that a writer must know and a reader need not.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct CompatRo: u64 {
        /// Free space is tracked in a tree of its own.
        const FREE_SPACE_TREE = 0x1;
        /// That tree is up to date.
        const FREE_SPACE_TREE_VALID = 0x2;
        /// Some files carry verity items.
        const VERITY = 0x4;
        /// Block group items live in a tree of their own.
        const BLOCK_GROUP_TREE = 0x8;
    }
}

bitflags! {
    /// Features without which nothing may be read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Incompat: u64 {
        /// Back references as of Linux 2.6.31; always set.
        const MIXED_BACKREF = 0x1;
        /// A default subvolume was chosen.
        const DEFAULT_SUBVOL = 0x2;
        /// Data and metadata share block groups.
        const MIXED_GROUPS = 0x4;
        /// Some extents are compressed with lzo.
        const COMPRESS_LZO = 0x8;
        /// Some extents are compressed with zstd.
        const COMPRESS_ZSTD = 0x10;
        /// Nodes are larger than a page.
        const BIG_METADATA = 0x20;
        /// Inodes may have `INODE_EXTREF` items.
        const EXTENDED_IREF = 0x40;
        /// Block groups with RAID5 or RAID6 exist.
        const RAID56 = 0x80;
        /// Extent items of tree nodes are the short kind.
        const SKINNY_METADATA = 0x100;
        /// Holes need no file extent items.
        const NO_HOLES = 0x200;
        /// Nodes carry `metadata_uuid` instead of the fsid.
        const METADATA_UUID = 0x400;
        /// Block groups with three or four copies exist.
        const RAID1C34 = 0x800;
        /// Zoned device.
        const ZONED = 0x1000;
        /// Experimental second form of the extent tree.
        const EXTENT_TREE_V2 = 0x2000;
        /// Stripes are tracked in a tree.
        const RAID_STRIPE_TREE = 0x4000;
        /// Simple quotas: extents name their owner.
        const SIMPLE_QUOTA = 0x1_0000;
        /// Logical addresses are remapped by a tree.
        const REMAP_TREE = 0x2_0000;
    }
}

bitflags! {
    /// Flags of the superblock itself.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct SuperFlags: u64 {
        /// Set by mkfs; means nothing.
        const WRITTEN = 1;
        /// The file system met an error; read-only until checked.
        const ERROR = 1 << 2;
        /// Seed device: read-only, others may be put on top.
        const SEEDING = 1 << 32;
        /// Metadata-only dump.
        const METADUMP = 1 << 33;
        /// Metadata-only dump, second form.
        const METADUMP_V2 = 1 << 34;
        /// A change of the fsid was interrupted.
        const CHANGING_FSID = 1 << 35;
        /// A change of the metadata uuid was interrupted.
        const CHANGING_FSID_V2 = 1 << 36;
        /// A conversion to or from the block group tree was interrupted.
        const CHANGING_BG_TREE = 1 << 38;
        /// A change of the data checksums was interrupted.
        const CHANGING_DATA_CSUM = 1 << 39;
        /// A change of the metadata checksums was interrupted.
        const CHANGING_META_CSUM = 1 << 40;
    }
}

macro_rules! names {
    ($flags:ident { $($bit:ident = $name:literal),* $(,)? }) => {
        impl $flags {
            /// Names of the set bits as `mkfs.btrfs -O` spells them, in bit order. Bits without a
            /// name come last, as `unknown bit N`.
            #[must_use]
            pub fn names(self) -> Vec<String> {
                let mut out = Vec::new();
                $(if self.contains(Self::$bit) { out.push($name.to_owned()); })*
                out.extend(unknown_bits(self.unknown()).map(|bit| format!("unknown bit {bit}")));
                out
            }
            /// The set bits that have no name here.
            #[must_use]
            pub fn unknown(self) -> u64 {
                self.bits() & !Self::all().bits()
            }
        }
    };
}

names!(CompatRo {
    FREE_SPACE_TREE = "free-space-tree",
    FREE_SPACE_TREE_VALID = "free-space-tree-valid",
    VERITY = "verity",
    BLOCK_GROUP_TREE = "block-group-tree",
});
names!(Incompat {
    MIXED_BACKREF = "mixed-backref",
    DEFAULT_SUBVOL = "default-subvol",
    MIXED_GROUPS = "mixed-bg",
    COMPRESS_LZO = "compress-lzo",
    COMPRESS_ZSTD = "compress-zstd",
    BIG_METADATA = "big-metadata",
    EXTENDED_IREF = "extref",
    RAID56 = "raid56",
    SKINNY_METADATA = "skinny-metadata",
    NO_HOLES = "no-holes",
    METADATA_UUID = "metadata-uuid",
    RAID1C34 = "raid1c34",
    ZONED = "zoned",
    EXTENT_TREE_V2 = "extent-tree-v2",
    RAID_STRIPE_TREE = "raid-stripe-tree",
    SIMPLE_QUOTA = "simple-quota",
    REMAP_TREE = "remap-tree",
});
names!(SuperFlags {
    WRITTEN = "written",
    ERROR = "error",
    SEEDING = "seeding",
    METADUMP = "metadump",
    METADUMP_V2 = "metadump-v2",
    CHANGING_FSID = "changing-fsid",
    CHANGING_FSID_V2 = "changing-fsid-v2",
    CHANGING_BG_TREE = "changing-bg-tree",
    CHANGING_DATA_CSUM = "changing-data-csum",
    CHANGING_META_CSUM = "changing-meta-csum",
});

fn unknown_bits(bits: u64) -> impl Iterator<Item = u32> {
    (0..64).filter(move |bit| bits >> bit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_mkfs_and_unknown_bits_are_numbered() {
        // What mkfs.btrfs 6.19 sets.
        assert_eq!(
            Incompat::from_bits_retain(0x361).names(),
            ["mixed-backref", "big-metadata", "extref", "skinny-metadata", "no-holes"]
        );
        assert_eq!(
            CompatRo::from_bits_retain(0xb).names(),
            ["free-space-tree", "free-space-tree-valid", "block-group-tree"]
        );
        assert_eq!(
            Incompat::from_bits_retain(1 << 63 | 1 << 15).names(),
            ["unknown bit 15", "unknown bit 63"]
        );
        assert_eq!(SuperFlags::from_bits_retain(0x2).unknown(), 2);
        assert_eq!(Incompat::all().unknown(), 0);
    }
}
