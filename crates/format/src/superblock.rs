//! The superblock: where everything starts, and whether Larder may touch it at all.
//!
//! Two decisions live here. The first is what makes 4096 bytes a superblock: [`Superblock::parse`]
//! accepts only what carries the right magic, checksum, own address and values that the rest of the
//! engine can compute with. The second is what Larder supports: [`Superblock::support`] turns the
//! feature bits and flags into read-write, read-only or refused, with a reason for people.
//! An image that cannot be supported still parses, so that tools can show what it is.
//!
//! Writers change the typed fields and then [`Superblock::seal`] a copy per location: each copy
//! names its own address and hence has a checksum of its own.

use crate::dev_item::DevItem;
use crate::features::{CompatRo, Incompat, SuperFlags};
use crate::{
    Checksum, CsumType, DeviceId, FormatError, FormatResult, Generation, Logical, MAX_LEVEL,
    Physical, SECTOR_SIZE, SUPER_SIZE,
};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What stands at offset 64 of every superblock.
pub const MAGIC: [u8; 8] = *b"_BHRfS_M";
/// Stands there while mkfs is not done yet.
const MAGIC_UNFINISHED: [u8; 8] = *b"!BHRfS_M";
/// Object id of the root tree's directory, which names the default subvolume.
pub const ROOT_DIR_OBJECTID: u64 = 6;
/// Room for system chunks, in bytes.
pub(crate) const SYS_CHUNK_ARRAY_SIZE: usize = 2048;
/// A key and a chunk item with one stripe: the least that the system chunk array can hold.
const SYS_CHUNK_MIN: usize = 97;
/// A superblock has room for so many devices that failed in its commit.
pub const MOST_FAILED: usize = 3;
/// Size of the label's field; the label itself is a byte shorter, its end being a NUL.
const LABEL_SIZE: usize = 256;

/// One of the four sets of roots kept from recent commits, 168 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
#[allow(missing_docs)]
pub struct BackupRoot {
    pub tree_root: U64,
    pub tree_root_gen: U64,
    pub chunk_root: U64,
    pub chunk_root_gen: U64,
    pub extent_root: U64,
    pub extent_root_gen: U64,
    pub fs_root: U64,
    pub fs_root_gen: U64,
    pub dev_root: U64,
    pub dev_root_gen: U64,
    pub csum_root: U64,
    pub csum_root_gen: U64,
    pub total_bytes: U64,
    pub bytes_used: U64,
    pub num_devices: U64,
    pub unused_64: [U64; 4],
    pub tree_root_level: u8,
    pub chunk_root_level: u8,
    pub extent_root_level: u8,
    pub fs_root_level: u8,
    pub dev_root_level: u8,
    pub csum_root_level: u8,
    pub unused_8: [u8; 10],
}
const _: () = assert!(size_of::<BackupRoot>() == 168);

/// A superblock as it lies on disk, 4096 bytes.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// Checksum of everything behind it.
    pub csum: Checksum,
    /// Uuid of the file system.
    pub fsid: [u8; 16],
    /// Own address on the device.
    pub bytenr: U64,
    /// See [`SuperFlags`].
    pub flags: U64,
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Last committed transaction.
    pub generation: U64,
    /// Logical address of the root tree's root.
    pub root: U64,
    /// Logical address of the chunk tree's root.
    pub chunk_root: U64,
    /// Logical address of the root of the tree of log roots; 0 for none.
    pub log_root: U64,
    /// Linux does not use it. Larder numbers the logs of a generation with it.
    pub log_root_transid: U64,
    /// Sum of the sizes of all devices.
    pub total_bytes: U64,
    /// Logical bytes used in all block groups.
    pub bytes_used: U64,
    /// [`ROOT_DIR_OBJECTID`].
    pub root_dir_objectid: U64,
    /// Number of devices.
    pub num_devices: U64,
    /// Bytes per sector.
    pub sectorsize: U32,
    /// Bytes per tree node.
    pub nodesize: U32,
    /// Equal to the node size.
    pub leafsize: U32,
    /// Equal to the sector size; unused, never 0.
    pub stripesize: U32,
    /// Used bytes of the system chunk array.
    pub sys_chunk_array_size: U32,
    /// Generation of the chunk tree's root.
    pub chunk_root_generation: U64,
    /// Features that a reader need not know.
    pub compat_flags: U64,
    /// See [`CompatRo`].
    pub compat_ro_flags: U64,
    /// See [`Incompat`].
    pub incompat_flags: U64,
    /// Number of a [`CsumType`].
    pub csum_type: U16,
    /// Level of the root tree's root.
    pub root_level: u8,
    /// Level of the chunk tree's root.
    pub chunk_root_level: u8,
    /// Level of the log root tree's root.
    pub log_root_level: u8,
    /// The device that holds this superblock.
    pub dev_item: DevItem,
    /// Name given by people, NUL-terminated; see [`Superblock::label`].
    pub label: [u8; LABEL_SIZE],
    /// Version 1 space cache is valid if this equals `generation`.
    pub cache_generation: U64,
    /// The uuid tree is complete if this equals `generation`.
    pub uuid_tree_generation: U64,
    /// Uuid that nodes carry when [`Incompat::METADATA_UUID`] is set.
    pub metadata_uuid: [u8; 16],
    /// Fields of features that Larder does not support; kept as they are.
    pub reserved: [u8; 224],
    /// Keys and items of the system chunks, packed; see [`Superblock::sys_chunk_bytes`].
    pub sys_chunk_array: [u8; SYS_CHUNK_ARRAY_SIZE],
    /// Roots of recent commits; see [`Superblock::current_backup_slot`].
    pub backup_roots: [BackupRoot; 4],
    /// Zero.
    pub padding: [u8; 517],
    /// The commit that `failed` belongs to; see [`Superblock::failed`].
    pub failed_in: U64,
    /// Ids of devices; 0 where there is none.
    pub failed: [U64; MOST_FAILED],
    /// See [`Superblock::history`]; 0 where only Linux wrote.
    pub history: U64,
    /// See [`Superblock::history_began`].
    pub history_began: U64,
}
const _: () = assert!(size_of::<Superblock>() == SUPER_SIZE);
const _: () = assert!(std::mem::offset_of!(Superblock, magic) == 0x40);
const _: () = assert!(std::mem::offset_of!(Superblock, csum_type) == 0xc4);
const _: () = assert!(std::mem::offset_of!(Superblock, label) == 0x12b);
const _: () = assert!(std::mem::offset_of!(Superblock, sys_chunk_array) == 0x32b);
const _: () = assert!(std::mem::offset_of!(Superblock, backup_roots) == 0xb2b);
const _: () = assert!(std::mem::offset_of!(Superblock, padding) == 0xdcb);
const _: () = assert!(std::mem::offset_of!(Superblock, failed_in) == 0xfd0);

impl std::fmt::Debug for Superblock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Superblock")
            .field("fsid", &uuid::Uuid::from_bytes(self.fsid))
            .field("bytenr", &self.bytenr.get())
            .field("generation", &self.generation())
            .field("root", &self.root())
            .field("chunk_root", &self.chunk_root())
            .field("log_root", &self.log_root())
            .field("incompat", &self.incompat())
            .field("compat_ro", &self.compat_ro())
            .finish_non_exhaustive()
    }
}

/// What Larder can do with an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// Everything.
    ReadWrite,
    /// Reading only.
    ReadOnly {
        /// The reason, as a sentence without its full stop.
        why: String,
    },
    /// Reading metadata only: it is a dump that has no data.
    MetadataOnly {
        /// What it is, as a sentence without its full stop.
        why: String,
    },
    /// Nothing.
    Refused {
        /// The reason, as a sentence without its full stop.
        why: String,
    },
}

/// A metadata dump that was restored to an image (`btrfs-image -r`): the form says where its nodes
/// lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataDump {
    /// Where chunks say, as in any image. They are those of the device that was dumped, or, where
    /// that was several, were rewritten for one.
    Mapped,
    /// At their logical addresses. Chunks still describe the device that was dumped.
    Flat,
}

/// Does a superblock-sized piece of a device carry the magic of btrfs? Says nothing about the rest.
#[must_use]
pub fn looks_like_btrfs(bytes: &[u8]) -> bool {
    bytes.get(0x40..0x48) == Some(&MAGIC[..])
}

impl Superblock {
    /// Parses and verifies the superblock that was read from `at`.
    ///
    /// # Errors
    /// Each field that the engine relies on has its own message; see also [`Superblock::support`],
    /// which is asked afterwards.
    pub fn parse(bytes: &[u8], at: Physical) -> FormatResult<Box<Self>> {
        let Ok((sb, _)) = Self::ref_from_prefix(bytes) else {
            return Err(FormatError::new(format!(
                "superblock at {at}: only {} bytes there, {SUPER_SIZE} needed",
                bytes.len()
            )));
        };
        sb.verify(at).map_err(|e| FormatError::new(format!("superblock at {at}: {e}")))?;
        Ok(Box::new(*sb))
    }

    fn verify(&self, at: Physical) -> FormatResult<()> {
        if self.magic != MAGIC {
            return Err(FormatError::new(if self.magic == MAGIC_UNFINISHED {
                "magic says that mkfs did not finish".to_owned()
            } else {
                format!(
                    "magic is \"{}\", expected \"{}\"",
                    self.magic.escape_ascii(),
                    MAGIC.escape_ascii()
                )
            }));
        }
        let csum = CsumType::from_disk(self.csum_type.get())?;
        let computed = csum.compute(&self.as_bytes()[32..]);
        if computed[..csum.size()] != self.csum[..csum.size()] {
            return Err(FormatError::new(format!(
                "{} checksum is {}, expected {}",
                csum.name(),
                hex(&self.csum[..csum.size()]),
                hex(&computed[..csum.size()])
            )));
        }
        require("bytenr", self.bytenr.get(), self.bytenr.get() == at.0, || format!("{at}"))?;
        self.verify_geometry()?;
        self.verify_roots()?;
        let fsid = self.metadata_fsid();
        if self.dev_item.fsid != fsid {
            return Err(FormatError::new(format!(
                "dev_item.fsid is {}, expected {}",
                uuid::Uuid::from_bytes(self.dev_item.fsid),
                uuid::Uuid::from_bytes(fsid)
            )));
        }
        Ok(())
    }

    fn verify_geometry(&self) -> FormatResult<()> {
        let (sector, node) = (self.sectorsize.get(), self.nodesize.get());
        require("sectorsize", sector, sector == SECTOR_SIZE, || {
            format!("{SECTOR_SIZE}, the only sector size that Larder supports")
        })?;
        require(
            "nodesize",
            node,
            node.is_power_of_two() && (4096..=65536).contains(&node),
            || "a power of two from 4096 to 65536".into(),
        )?;
        let leaf = self.leafsize.get();
        require("leafsize", leaf, leaf == node, || format!("{node}, the node size"))?;
        require("stripesize", self.stripesize.get(), self.stripesize.get() != 0, || {
            "not 0".into()
        })?;
        let sys = self.sys_chunk_array_size.get();
        require(
            "sys_chunk_array_size",
            sys,
            (SYS_CHUNK_MIN..=SYS_CHUNK_ARRAY_SIZE).contains(&(sys as usize)),
            || format!("{SYS_CHUNK_MIN} to {SYS_CHUNK_ARRAY_SIZE}"),
        )?;
        let devices = self.num_devices.get();
        require("num_devices", devices, devices != 0, || "at least 1".into())?;
        let used = self.bytes_used.get();
        let least = 6 * u64::from(node);
        require("bytes_used", used, used >= least, || format!("at least {least}, six nodes"))?;
        let (total, dev_total) = (self.total_bytes.get(), self.dev_item.total_bytes.get());
        // A dump of several devices is restored to one, and the superblock keeps the item of its
        // device.
        let fits = total >= dev_total || self.metadata_dump().is_some();
        require("total_bytes", total, fits, || {
            format!("at least {dev_total}, the size of this device")
        })?;
        let dev_used = self.dev_item.bytes_used.get();
        require("dev_item.bytes_used", dev_used, dev_used <= dev_total, || {
            format!("at most {dev_total}, the size of this device")
        })
    }

    fn verify_roots(&self) -> FormatResult<()> {
        for (name, address, may_be_zero) in [
            ("root", self.root.get(), false),
            ("chunk_root", self.chunk_root.get(), false),
            ("log_root", self.log_root.get(), true),
        ] {
            let sector = u64::from(SECTOR_SIZE);
            require(name, address, address.is_multiple_of(sector), || {
                format!("a multiple of {sector}")
            })?;
            require(name, address, address != 0 || may_be_zero, || "an address".into())?;
        }
        for (name, level) in [
            ("root_level", self.root_level),
            ("chunk_root_level", self.chunk_root_level),
            ("log_root_level", self.log_root_level),
        ] {
            require(name, level, level < MAX_LEVEL, || format!("less than {MAX_LEVEL}"))?;
        }
        // The engine counts on from here: a number at the end of its range would overflow.
        let generation = self.generation.get();
        require("generation", generation, (1..1 << 62).contains(&generation), || {
            "1 to 2^62".into()
        })?;
        let chunk_generation = self.chunk_root_generation.get();
        require("chunk_root_generation", chunk_generation, chunk_generation <= generation, || {
            format!("at most {generation}, the generation")
        })
    }

    /// Is it a metadata dump? Of which form?
    #[must_use]
    pub fn metadata_dump(&self) -> Option<MetadataDump> {
        let flags = self.super_flags();
        if flags.contains(SuperFlags::METADUMP) {
            Some(MetadataDump::Flat)
        } else {
            flags.contains(SuperFlags::METADUMP_V2).then_some(MetadataDump::Mapped)
        }
    }

    /// What Larder can do with this image. Refusals win over reasons to stay read-only, of which
    /// all are given.
    #[must_use]
    pub fn support(&self) -> Support {
        if let Some(why) = self.reason_to_refuse() {
            return Support::Refused { why };
        }
        if self.metadata_dump().is_some() {
            return Support::MetadataOnly { why: "it is a metadata dump without its data".into() };
        }
        let mut why = Vec::new();
        let compat_ro = self.compat_ro();
        for bit in bits(compat_ro.unknown()) {
            why.push(format!("it has the unknown read-only-compatible feature bit {bit}"));
        }
        if compat_ro.contains(CompatRo::VERITY) {
            why.push("it has verity files, which Larder cannot write".into());
        }
        let flags = self.super_flags();
        if flags.contains(SuperFlags::ERROR) {
            why.push("it is marked as having met an error".into());
        }
        if flags.contains(SuperFlags::SEEDING) {
            why.push("it is a seed device".into());
        }
        if why.is_empty() { Support::ReadWrite } else { Support::ReadOnly { why: why.join("; ") } }
    }

    fn reason_to_refuse(&self) -> Option<String> {
        let (incompat, compat_ro) = (self.incompat(), self.compat_ro());
        if let Some(bit) = bits(incompat.unknown()).next() {
            return Some(format!("it has the unknown incompatible feature bit {bit}"));
        }
        let unsupported = incompat
            & (Incompat::ZONED
                | Incompat::EXTENT_TREE_V2
                | Incompat::RAID_STRIPE_TREE
                | Incompat::SIMPLE_QUOTA
                | Incompat::REMAP_TREE);
        if !unsupported.is_empty() {
            return Some(format!(
                "it uses {}, which Larder does not support",
                unsupported.names().join(", ")
            ));
        }
        if let Some(bit) = bits(self.super_flags().unknown()).next() {
            return Some(format!("it has the unknown superblock flag bit {bit}"));
        }
        let changing = self.super_flags()
            & (SuperFlags::CHANGING_FSID
                | SuperFlags::CHANGING_FSID_V2
                | SuperFlags::CHANGING_BG_TREE
                | SuperFlags::CHANGING_DATA_CSUM
                | SuperFlags::CHANGING_META_CSUM);
        if !changing.is_empty() {
            return Some(format!(
                "an offline conversion of it was interrupted ({}) and has to be finished first",
                changing.names().join(", ")
            ));
        }
        if incompat.contains(Incompat::MIXED_GROUPS) && self.nodesize != self.sectorsize {
            return Some(format!(
                "mixed-bg needs nodes of {} bytes, but it has nodes of {}",
                self.sectorsize.get(),
                self.nodesize.get()
            ));
        }
        if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) {
            let mut missing =
                ((CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID) - compat_ro).names();
            missing.extend((Incompat::NO_HOLES - incompat).names());
            if !missing.is_empty() {
                return Some(format!(
                    "block-group-tree needs {}, which is not set",
                    missing.join(" and ")
                ));
            }
        }
        None
    }

    /// Puts the address of a copy and its checksum into the superblock, and returns the bytes to
    /// write there.
    ///
    /// # Panics
    /// If the checksum type is not one that exists: such a superblock never came out of
    /// [`Superblock::parse`].
    #[must_use]
    pub fn seal(&mut self, at: Physical) -> [u8; SUPER_SIZE] {
        self.bytenr.set(at.0);
        self.csum = self.csum_type().compute(&self.as_bytes()[32..]);
        self.as_bytes().try_into().expect("a superblock's size")
    }

    /// The used part of the system chunk array.
    #[must_use]
    pub fn sys_chunk_bytes(&self) -> &[u8] {
        let n = (self.sys_chunk_array_size.get() as usize).min(SYS_CHUNK_ARRAY_SIZE);
        &self.sys_chunk_array[..n]
    }

    /// Replaces the system chunk array.
    ///
    /// # Errors
    /// It is shorter than one chunk or longer than its field.
    pub fn set_sys_chunk_bytes(&mut self, bytes: &[u8]) -> FormatResult<()> {
        if !(SYS_CHUNK_MIN..=SYS_CHUNK_ARRAY_SIZE).contains(&bytes.len()) {
            return Err(FormatError::new(format!(
                "system chunks take {} bytes, expected {SYS_CHUNK_MIN} to {SYS_CHUNK_ARRAY_SIZE}",
                bytes.len()
            )));
        }
        self.sys_chunk_array = [0; SYS_CHUNK_ARRAY_SIZE];
        self.sys_chunk_array[..bytes.len()].copy_from_slice(bytes);
        #[allow(clippy::cast_possible_truncation)]
        self.sys_chunk_array_size.set(bytes.len() as u32);
        Ok(())
    }

    /// The label up to its NUL. Any bytes can stand there.
    #[must_use]
    pub fn label(&self) -> &[u8] {
        let end = self.label.iter().position(|b| *b == 0).unwrap_or(LABEL_SIZE);
        &self.label[..end]
    }

    /// Sets the label.
    ///
    /// # Errors
    /// It is longer than 255 bytes, or contains a NUL or a newline (tools print labels in lists).
    pub fn set_label(&mut self, label: &[u8]) -> FormatResult<()> {
        if label.len() >= LABEL_SIZE {
            return Err(FormatError::new(format!(
                "label has {} bytes, at most {} fit",
                label.len(),
                LABEL_SIZE - 1
            )));
        }
        if label.iter().any(|b| matches!(b, 0 | b'\n')) {
            return Err(FormatError::new("label contains a NUL or a newline"));
        }
        self.label = [0; LABEL_SIZE];
        self.label[..label.len()].copy_from_slice(label);
        Ok(())
    }

    /// The uuid that node headers and device items carry.
    #[must_use]
    pub fn metadata_fsid(&self) -> [u8; 16] {
        if self.incompat().contains(Incompat::METADATA_UUID) {
            self.metadata_uuid
        } else {
            self.fsid
        }
    }

    /// Checksum type of superblocks, nodes and data.
    ///
    /// # Panics
    /// If the field holds a number that [`Superblock::parse`] would have refused.
    #[must_use]
    pub fn csum_type(&self) -> CsumType {
        CsumType::from_disk(self.csum_type.get()).expect("verified when parsed")
    }

    /// Slot of the backup roots of the last commit: the one with the superblock's generation.
    #[must_use]
    pub fn current_backup_slot(&self) -> Option<usize> {
        self.backup_roots.iter().position(|b| b.tree_root_gen == self.generation)
    }

    /// Slot that the next commit writes: the one after the current, or the first. To be asked
    /// before the generation is raised.
    #[must_use]
    pub fn next_backup_slot(&self) -> usize {
        self.current_backup_slot().map_or(0, |n| (n + 1) % self.backup_roots.len())
    }
}

/// Typed views of the fields, and setters.
#[allow(missing_docs)]
impl Superblock {
    #[must_use]
    pub fn generation(&self) -> Generation {
        Generation(self.generation.get())
    }
    #[must_use]
    pub fn chunk_root_generation(&self) -> Generation {
        Generation(self.chunk_root_generation.get())
    }
    #[must_use]
    pub fn cache_generation(&self) -> Generation {
        Generation(self.cache_generation.get())
    }
    #[must_use]
    pub fn uuid_tree_generation(&self) -> Generation {
        Generation(self.uuid_tree_generation.get())
    }
    #[must_use]
    pub fn root(&self) -> Logical {
        Logical(self.root.get())
    }
    #[must_use]
    pub fn chunk_root(&self) -> Logical {
        Logical(self.chunk_root.get())
    }
    /// Root of the tree of log roots, if there is a log.
    #[must_use]
    pub fn log_root(&self) -> Option<Logical> {
        (self.log_root.get() != 0).then(|| Logical(self.log_root.get()))
    }
    /// Counts the logs of a generation, each of which replaces the one before. 0 for logs of Linux,
    /// which does not use the field.
    #[must_use]
    pub fn log_number(&self) -> u64 {
        self.log_root_transid.get()
    }
    pub fn set_log_number(&mut self, number: u64) {
        self.log_root_transid.set(number);
    }
    #[must_use]
    pub fn nodesize(&self) -> u32 {
        self.nodesize.get()
    }
    #[must_use]
    pub fn sectorsize(&self) -> u32 {
        self.sectorsize.get()
    }
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.get()
    }
    #[must_use]
    pub fn bytes_used(&self) -> u64 {
        self.bytes_used.get()
    }
    #[must_use]
    pub fn num_devices(&self) -> u64 {
        self.num_devices.get()
    }
    /// Id of the device that holds this superblock.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        DeviceId(self.dev_item.devid.get())
    }
    #[must_use]
    pub fn super_flags(&self) -> SuperFlags {
        SuperFlags::from_bits_retain(self.flags.get())
    }
    #[must_use]
    pub fn compat_ro(&self) -> CompatRo {
        CompatRo::from_bits_retain(self.compat_ro_flags.get())
    }
    #[must_use]
    pub fn incompat(&self) -> Incompat {
        Incompat::from_bits_retain(self.incompat_flags.get())
    }
    pub fn set_generation(&mut self, v: Generation) {
        self.generation.set(v.0);
    }
    pub fn set_cache_generation(&mut self, v: Generation) {
        self.cache_generation.set(v.0);
    }
    pub fn set_root(&mut self, root: Logical, level: u8) {
        self.root.set(root.0);
        self.root_level = level;
    }
    pub fn set_chunk_root(&mut self, root: Logical, level: u8, generation: Generation) {
        self.chunk_root.set(root.0);
        self.chunk_root_level = level;
        self.chunk_root_generation.set(generation.0);
    }
    /// Sets root and level of the tree of log roots; `None` drops the log.
    pub fn set_log_root(&mut self, root: Option<(Logical, u8)>) {
        let (root, level) = root.unwrap_or((Logical(0), 0));
        self.log_root.set(root.0);
        self.log_root_level = level;
    }
    pub fn set_total_bytes(&mut self, v: u64) {
        self.total_bytes.set(v);
    }
    pub fn set_bytes_used(&mut self, v: u64) {
        self.bytes_used.set(v);
    }
    pub fn set_super_flags(&mut self, v: SuperFlags) {
        self.flags.set(v.bits());
    }
    pub fn set_compat_ro(&mut self, v: CompatRo) {
        self.compat_ro_flags.set(v.bits());
    }
    pub fn set_incompat(&mut self, v: Incompat) {
        self.incompat_flags.set(v.bits());
    }
    pub fn set_csum_type(&mut self, v: CsumType) {
        self.csum_type.set(v.to_disk());
    }
}

fn require(
    field: &str,
    value: impl std::fmt::Display,
    holds: bool,
    expected: impl FnOnce() -> String,
) -> FormatResult<()> {
    if holds {
        return Ok(());
    }
    Err(FormatError::new(format!("{field} is {value}, expected {}", expected())))
}

fn bits(set: u64) -> impl Iterator<Item = u32> {
    (0..64).filter(move |bit| set >> bit & 1 == 1)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
