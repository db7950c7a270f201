//! What the checker can find: every kind of finding by name, and what it means to people.
//!
//! The list of kinds is the checker's contract. A kind's name is stable: scripts match it, and the
//! catalogue of planted damage in the tests expects it. It is the variant's name, so variants are
//! added and never renamed. A kind carries what is true of all its findings: how bad it is, what it
//! means for the owner of the files, what can be done. The code that finds something only says what
//! and where.
//!
//! Damage comes in floods: one lost node of the extent tree makes thousands of extents look
//! unreferenced. Two things keep the report readable and bounded. Each kind keeps its first
//! findings and counts the rest; and whatever only follows from something that is missing is marked
//! as a follow-up, counted, and listed last.

use larder_format::{DeviceId, Key, Logical, Physical, TreeId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// The file system is damaged: data is lost, or will be when it is written to.
    Error,
    /// Not as Linux would leave it, and harmless so far.
    Warning,
    /// Worth knowing; nothing is wrong.
    Note,
}

impl Severity {
    /// `error`, `warning` or `note`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        }
    }
}

const SCRUB: &str = "another copy may be good: `larder scrub IMAGE` writes it over bad ones";
const SAVE: &str = "copy what is still readable to another disk (`larder restore` goes around the \
    damage and lists what is lost), \
                    then make a new file system";
const REPAIR: &str =
    "back up what is readable; `btrfs check --repair` may mend it, but only on a copy of the image";
const CLEAR_CACHE: &str = "mount once with Linux's `-o clear_cache`: it is built anew";
const RESCAN: &str = "`btrfs quota rescan` counts anew";
const REBUILD_FREE_SPACE: &str = "`btrfs check --clear-space-cache v2`, or mount once with Linux's \
                                  `-o clear_cache,space_cache=v2`: the tree is built anew";
const RESCUE_SUPER: &str = "`btrfs rescue super-recover` writes the good copies over the bad \
    ones; `larder restore` reads from a good copy";
const RECOVER_CHUNKS: &str =
    "`larder restore` copies the files without it; then `btrfs rescue chunk-recover` may mend it";
const FILE_COPIES: &str = "`larder inspect files-at IMAGE ADDRESS` names the files; where another \
    copy is good, `larder scrub IMAGE` writes it over the bad one; where there is none, restore \
    them from a backup";
const RESCAN_UUIDS: &str = "mount with Linux's `-o rescan_uuid_tree`";
const NEXT_COMMIT: &str = "mount it writable once: the next commit writes it anew";
const NONE: &str = "nothing needs to be done";
const DELETE_FILE: &str = "restore the file from a backup, or delete it";
const MEMORY: &str = "test this machine's memory before trusting the file system again; then copy \
    what is readable \
                      to a new one";
const DEVICE: &str = "look at the device's health and cables (`smartctl`, kernel log), then copy \
    the image elsewhere";

macro_rules! kinds {
    (@severity) => { Severity::Error };
    (@severity $severity:ident) => { Severity::$severity };
    (@remedy) => { REPAIR };
    (@remedy $remedy:expr) => { $remedy };
    ($($name:ident $meaning:literal $(($severity:ident))? $(=> $remedy:expr)?;)*) => {
        /// What sort of thing is wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $(#[doc = concat!("Means: ", $meaning, ".")] $name,)*
        }
        impl Kind {
            /// Every kind, in the order of a report.
            pub const ALL: &[Self] = &[$(Self::$name),*];
            /// Stable name: that of the variant, in kebab case.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => {
                        const LEN: usize = kebab_len(stringify!($name));
                        const NAME: [u8; LEN] = kebab(stringify!($name));
                        const {
                            match str::from_utf8(&NAME) {
                                Ok(name) => name,
                                Err(_) => panic!("letters and dashes"),
                            }
                        }
                    })*
                }
            }
            /// How bad it is.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(Self::$name => kinds!(@severity $($severity)?),)* }
            }
            /// What it means for the owner of the files: a phrase.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
            /// What can be done about it: a phrase.
            #[must_use]
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$name => kinds!(@remedy $($remedy)?),)* }
            }
        }
    };
}

/// Length of a name in kebab case.
const fn kebab_len(camel: &str) -> usize {
    let (bytes, mut len, mut i) = (camel.as_bytes(), camel.len() - 1, 0);
    while i < bytes.len() {
        len += bytes[i].is_ascii_uppercase() as usize;
        i += 1;
    }
    len
}

/// A name in kebab case.
const fn kebab<const N: usize>(camel: &str) -> [u8; N] {
    let (bytes, mut out, mut at, mut i) = (camel.as_bytes(), [b'-'; N], 0, 0);
    while i < bytes.len() {
        at += (i > 0 && bytes[i].is_ascii_uppercase()) as usize;
        out[at] = bytes[i].to_ascii_lowercase();
        (at, i) = (at + 1, i + 1);
    }
    out
}

// Errors, and what `btrfs check --repair` may mend, unless it says otherwise.
kinds! {
    // ---- superblocks
    SuperPrimary "the superblock that everything starts from cannot be used; Linux refuses to \
        mount" => RESCUE_SUPER;
    SuperMirror "a copy of the superblock cannot be used; rescue tools would miss \
        it" => NEXT_COMMIT;
    SuperMirrorDiffers "a copy of the superblock describes another state or another file \
        system" => NEXT_COMMIT;
    SuperMirrorGeneration "a copy of the superblock is of another commit, as after a crash \
        between two copies"
        (Warning) => NEXT_COMMIT;
    DumpWithoutMirror "a metadata dump has the first copy of the superblock only" (Note) => NONE;
    SuperField "a field of the superblock cannot be right";
    SuperFeature "the superblock's feature bits do not describe this file system; Linux may \
        refuse it or misread it";
    SuperErrorFlag "the file system is marked as having met an error; Linux mounts it \
        read-only" (Warning);
    SuperInterrupted "an offline conversion was interrupted" => "run the tool that was \
        interrupted again";
    SuperDeviceItem "the superblock describes its device otherwise than the chunk tree \
        does" => NEXT_COMMIT;
    SuperTotalBytes "the size in the superblock is not that of the devices; Linux may refuse to \
        mount"
        => "`btrfs rescue fix-device-size`";
    SuperBytesUsed "the sum of used space is wrong: free space is misreported";
    SuperNumDevices "the number of devices is wrong" => NEXT_COMMIT;
    SuperBackupRoot "a backup root does not say what it should: a rescue would start in the wrong \
        place"
        (Warning) => NEXT_COMMIT;
    SuperSystemChunks "the superblock's list of system chunks is damaged: the chunk tree may not \
        be found"
        => RECOVER_CHUNKS;
    SystemChunkMissing "a system chunk is not in the superblock: the next mount may not find the \
        chunk tree";
    SystemChunkDiffers "a system chunk in the superblock is not what the chunk tree has";
    // ---- devices and chunks
    DeviceTruncated "the device or image is shorter than the file system: what lay at its end is \
        gone"
        => "get the whole image again, or enlarge the file to the file system's size to reach the \
            rest";
    DeviceMissing "a device of the file system was not given" => "give all devices of the file \
        system; without one that is lost, `larder mount -o degraded` goes on";
    DeviceBehind "a device lacks what was written while it was away, or a power cut came before \
        its superblock"
        (Warning) => "`larder scrub` writes what it lacks, if the others have it";
    DeviceItemMissing "the chunk tree does not know the device; Linux refuses to mount";
    DeviceItemWrong "the chunk tree describes the device wrongly";
    DeviceBytesUsed "the space taken on the device is miscounted";
    DeviceErrors "the file system has counted errors of this device before" (Note) => DEVICE;
    ChunkInvalid "a chunk cannot be right: everything in it is out of reach" => RECOVER_CHUNKS;
    ChunkOverlap "two chunks claim the same space: writing to one destroys the other" => SAVE;
    ChunkBeyondDevice "a chunk reaches past the end of its device" => SAVE;
    ChunkInReservedSpace "a chunk lies in the first MiB of a device, which boot loaders may \
        overwrite"
        (Warning) => "run a balance with Linux";
    ChunkWithoutBlockGroup
        "a chunk has no block group: its space cannot be used, and used space in it is not \
            protected";
    BlockGroupWithoutChunk "a block group has no chunk; Linux refuses to mount";
    BlockGroupDiffers "block group and chunk disagree; Linux refuses to mount";
    BlockGroupInvalid "a block group's item cannot be right";
    BlockGroupUsed "the used space of a block group is miscounted: writing may overwrite data or \
        fail";
    DeviceExtentMissing "a chunk's place on the device is not recorded there; Linux refuses to \
        mount";
    DeviceExtentWithoutChunk "space of the device is recorded for a chunk that is not there";
    DeviceExtentDiffers "the device tree says otherwise than the chunk tree where a chunk lies; \
        Linux refuses to mount";
    DeviceExtentOverlap "two ranges recorded on a device overlap" => SAVE;
    DeviceExtentInvalid "a record of the device tree cannot be right";
    // ---- nodes
    NodeUnreadable "the device fails to read a tree node" => DEVICE;
    NodeUnmapped "a pointer leads to an address that no chunk covers" => SAVE;
    NodeChecksum "a copy of a tree node is not what was written" => SCRUB;
    NodeAddress "a tree node holds something else: it was never written, or written \
        elsewhere" => SCRUB;
    NodeFsid "a tree node belongs to another file system" => SCRUB;
    NodeChunkTreeUuid "a tree node carries another chunk tree's uuid; Linux does not \
        mind" (Warning) => NONE;
    NodeLevel "a tree node stands at the wrong height";
    NodeGeneration
        "a tree node is older or newer than its parent says: a write was lost, or the superblock \
            came before its nodes"
        => SCRUB;
    NodeFlags "a tree node's header lacks what Linux insists on";
    NodeOwner "a tree node belongs to another tree";
    NodeFirstKey "a tree node begins with another key than its parent says: look-ups miss \
        items" => MEMORY;
    NodeKeyRange "a tree node holds keys that belong into its neighbour: look-ups miss \
        items" => MEMORY;
    NodeKeyOrder "the keys of a tree node are out of order: look-ups miss items" => MEMORY;
    NodeLayout "the parts of a tree node lie where they cannot" => MEMORY;
    NodeCopiesDiffer "two valid copies of a tree node differ: which one is read is chance" => SCRUB;
    NodeWrongBlockGroup "a tree node lies in space meant for something else";
    SubtreeLost "no copy of a tree node can be used: everything below it is out of reach" => SAVE;
    // ---- items that break a rule of their own
    ItemInvalid "an item breaks a rule of the format; Linux refuses the node that it is \
        in" => MEMORY;
    ItemMisplaced "an item stands in a tree where it has no meaning";
    InodeInvalid "an inode's item breaks a rule of the format; Linux refuses the node that it is \
        in" => MEMORY;
    NameInvalid "a name's item breaks a rule of the format; Linux refuses the node that it is \
        in" => MEMORY;
    NameHash "a name does not have the hash that it is filed under: it cannot be looked \
        up" => MEMORY;
    FileExtentInvalid "a file extent breaks a rule of the format; Linux refuses the node that it \
        is in" => MEMORY;
    ChecksumItemInvalid "an item of data checksums breaks a rule of the format";
    RootItemInvalid "a tree's root item breaks a rule of the format";
    ExtentItemInvalid "an extent's item or reference breaks a rule of the format";
    FreeSpaceItemInvalid "an item of the free-space tree breaks a rule of the \
        format" => REBUILD_FREE_SPACE;
    // ---- trees and subvolumes
    TreeMissing "a tree that must exist has no root item; Linux refuses to mount";
    RootItemWrong "a root item says something about its tree that is not so";
    RootRefMissing "a subvolume is not recorded in its parent: it cannot be listed or deleted";
    RootBackrefMissing "a subvolume does not know its parent";
    RootRefDiffers "subvolume and parent disagree about its name or place";
    RootRefWithoutRoot "a reference names a subvolume that does not exist";
    RootRefWithoutEntry "a subvolume has no directory entry where it should hang";
    EntryWithoutSubvolume
        "a directory entry names a subvolume that does not hang there: it shows as an empty \
            directory";
    SubvolumeUnreachable "a subvolume hangs nowhere: its files are there but have no path"
        => "mount it with Linux's `-o subvolid=` and copy its files";
    DroppedRootWithoutOrphan "a deleted subvolume is not marked for removal: its space never \
        comes back";
    OrphanRootStale "a tree is marked for removal that is alive or not \
        there" (Warning) => NEXT_COMMIT;
    UuidMissing "a subvolume is not found by its uuid: send and receive may fail" => RESCAN_UUIDS;
    UuidStale "the uuid tree names a subvolume that has not this uuid"
        (Warning) => RESCAN_UUIDS;
    UuidItemInvalid "an item of the uuid tree cannot be read" => RESCAN_UUIDS;
    DefaultSubvolume "the default subvolume does not exist or its entry is damaged" => "`btrfs \
        subvolume set-default`";
    SubvolumeBeingDropped "a deleted subvolume is still being removed; the next writable mount \
        goes on with it"
        (Note) => NONE;
    // ---- extents
    ExtentItemMissing "something in use is not recorded as allocated: it will be overwritten";
    ExtentUnused "allocated space is used by nothing: it never comes back";
    ExtentRefMissing "a use of an extent is not recorded: it can be freed while still in use";
    ExtentRefUnused "a recorded use of an extent does not exist: its space never comes back";
    ExtentRefCount "an extent's reference count is not the sum of its references: it is freed too \
        early or never";
    ExtentLength "an extent is used with another length than it is recorded with";
    ExtentLevel "a tree node is recorded at another height than it has";
    ExtentGeneration "a tree node is recorded with another transaction than it was written in"
        (Warning) => NONE;
    ExtentType "data is recorded as a tree node, or a tree node as data";
    ExtentRefWithoutItem "references stand in the extent tree without the extent that they are for";
    ExtentOverlap "two allocated extents overlap: one has overwritten the other" => SAVE;
    ExtentOutsideBlockGroup "an extent lies outside of every chunk, or reaches over the end of \
        one" => SAVE;
    ExtentWrongBlockGroup "an extent lies in space meant for something else";
    ExtentOnSuperblock "an extent lies where a copy of the superblock is written: one overwrites \
        the other" => SAVE;
    // ---- free space
    FreeSpaceMissing "free space is not in the free-space tree: it cannot be \
        used" => REBUILD_FREE_SPACE;
    FreeSpaceAllocated "the free-space tree lists allocated space as free: writing will overwrite \
        it"
        => REBUILD_FREE_SPACE;
    FreeSpaceCount "the free-space tree's count of runs is wrong; Linux does not trust that block \
        group"
        => REBUILD_FREE_SPACE;
    FreeSpaceForm "free space of a block group stands in another form than its info item \
        says" => REBUILD_FREE_SPACE;
    FreeSpaceInfoMissing "a block group is not in the free-space tree; Linux aborts at the first \
        change there"
        => REBUILD_FREE_SPACE;
    FreeSpaceOverlap "the free-space tree lists the same space twice, or outside of its block group"
        => REBUILD_FREE_SPACE;
    FreeSpaceWithoutBlockGroup
        "the free-space tree has entries without a block group, as old versions of mkfs leave \
            them" (Note) => NONE;
    FreeSpaceNotValid "the free-space tree is marked as out of date; the next writable mount \
        builds it anew"
        (Note) => NONE;
    SpaceCacheAllocated "the version 1 space cache lists allocated space as free: writing will \
        overwrite it"
        => CLEAR_CACHE;
    SpaceCacheMissing "free space is not in the version 1 space cache: it cannot be \
        used" => CLEAR_CACHE;
    SpaceCacheInvalid "the version 1 space cache says what Linux never writes, with sums that \
        fit" => CLEAR_CACHE;
    SpaceCacheUnused "the version 1 space cache of a block group is damaged in a way that Linux \
        sees, and does without it"
        (Warning) => NONE;
    SpaceCacheStale "there is a version 1 space cache that is out of date; Linux builds it \
        anew" (Note) => NONE;
    // ---- inodes and names
    InodeMissing "something names or describes an inode that does not exist";
    InodeLinkCount "an inode's link count is not the number of its names: it is deleted too early \
        or never";
    InodeSize "an inode's size does not fit its contents" => DELETE_FILE;
    InodeBytes "the space that an inode takes is miscounted: `du` and quotas are wrong";
    InodeGeneration "an inode is from the future: its times and `send` are wrong";
    InodeFlags
        "an inode's flags contradict each other: it is to be written in place, but with \
            checksums, which a crash would \
         leave wrong" (Warning) => DELETE_FILE;
    DirectorySize "a directory's size is not twice the length of its names: it cannot be removed \
        when empty";
    DirItemMissing "a name can be listed but not looked up";
    DirIndexMissing "a name can be looked up but is not listed";
    DirEntryDiffers "the two entries of a name lead to different inodes or have different types";
    DirEntryType "a directory entry says another type of file than the inode has";
    DirEntryWithoutInode "a directory entry leads to an inode that does not exist";
    DirNameDuplicate "a directory has the same name twice";
    DirIndexInvalid "a directory entry has an index that is never used";
    DirLinks "a directory has more than one name: paths go in circles";
    InodeRefMissing "a directory entry is not recorded at its inode: unlinking the name fails";
    InodeRefWithoutEntry "an inode records a name that its directory does not have";
    InodeRefDiffers "directory entry and inode disagree about the index of a name";
    RootDirectory "a subvolume's top directory is missing or damaged; Linux may be unable to \
        enter it";
    OrphanItemMissing "a deleted file is not marked for removal: its space never comes back";
    OrphanItemStale "a file is marked for removal that is not there; the next mount tidies \
        up" (Note) => NONE;
    XattrDuplicate "an inode has the same extended attribute twice";
    // ---- file contents
    FileExtentOverlap "two extents of a file cover the same bytes: which one is read is \
        chance" => DELETE_FILE;
    FileExtentHole "a file has a gap without the item that should stand for it; Linux may fail to \
        read there";
    FileExtentBeyondEnd "a file has data behind its end, as after a crash while it was cut \
        short" (Warning) => NONE;
    FileExtentInline "data that stands in the tree stands where it may not" => DELETE_FILE;
    FileExtentMisplaced "something that is no file has file contents";
    FileExtentGeneration "a file extent is from the future";
    FileExtentRamBytes "an extent's uncompressed length does not fit it: reads may fail or return \
        zeros" => DELETE_FILE;
    FileExtentCompression "a file extent is compressed in a way that its inode or the superblock \
        excludes"
        => DELETE_FILE;
    FileExtentUnmapped "a file's data lies at an address that no data chunk covers: it is \
        lost" => DELETE_FILE;
    // ---- data and its checksums
    ChecksumMissing "file data has no checksum: Linux fails to read it" => DELETE_FILE;
    ChecksumUnexpected "data that must not have checksums has them: reads fail after the next \
        write";
    ChecksumWithoutExtent
        "checksums are kept for space that is not allocated: data written there later reads as \
            damaged";
    ChecksumOverlap "two items hold checksums for the same data";
    DataChecksum "a copy of file data is not what was written" => FILE_COPIES;
    DataUnreadable "the device fails to read file data" => DEVICE;
    DataUnpack "compressed file data cannot be unpacked: reading it fails" => DELETE_FILE;
    // ---- the rest
    LogPresent "the file system was not unmounted cleanly; the next mount replays its \
        log" (Note) => NONE;
    LogDamaged "the log cannot be replayed: Linux refuses to mount until it is dropped, which \
        loses the last fsyncs"
        => "`larder rescue zero-log` drops it, and says what is lost; `larder restore` reads the \
            last commit";
    RelocationInterrupted "a balance was interrupted; the next mount goes on with \
        it" (Note) => NONE;
    QuotaCount "a quota group's counts are wrong: its limits act too early or too late" => RESCAN;
    QuotaRelation "a quota group and its member do not both exist, or do not both say that they \
        belong together" => RESCAN;
    QuotaItemInvalid "an item of the quota tree cannot be read" => RESCAN;
    QuotasOutOfDate "the counts of quotas are marked as out of date, or are just being counted \
        anew" (Warning) => RESCAN;
    NotChecked "something could not be checked because of other damage"
        (Note) => "mend the other findings first, and check again";
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What sort of thing.
    pub kind: Kind,
    /// The tree in which it was met; a node that several subvolumes share is reported once, for one
    /// of them.
    pub tree: Option<TreeId>,
    /// Key of the item that it is about.
    pub key: Option<Key>,
    /// Logical address that it is about.
    pub address: Option<Logical>,
    /// Device and place on it, for what concerns one copy only.
    pub device: Option<(DeviceId, Physical)>,
    /// What is wrong, with what is there and what was expected: a sentence without its full stop.
    pub what: String,
    /// Does it merely follow from something else that is missing?
    pub follow_up: bool,
}

impl Finding {
    /// A finding without a place.
    pub(crate) fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            tree: None,
            key: None,
            address: None,
            device: None,
            what: what.into(),
            follow_up: false,
        }
    }
    /// In this tree.
    pub(crate) fn tree(mut self, tree: TreeId) -> Self {
        self.tree = Some(tree);
        self
    }
    /// About this item.
    pub(crate) fn key(mut self, key: Key) -> Self {
        self.key = Some(key);
        self
    }
    /// About this address.
    pub(crate) fn address(mut self, at: Logical) -> Self {
        self.address = Some(at);
        self
    }
    /// About this place on a device.
    pub(crate) fn device(mut self, id: DeviceId, at: Physical) -> Self {
        self.device = Some((id, at));
        self
    }
    /// A follow-up of something else, if `yes`.
    pub(crate) fn follow_up_if(mut self, yes: bool) -> Self {
        self.follow_up |= yes;
        self
    }
    /// How bad it is.
    #[must_use]
    pub fn severity(&self) -> Severity {
        self.kind.severity()
    }
}

/// How often a kind was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Findings of their own.
    pub found: u64,
    /// Findings that merely follow from something else.
    pub follow_ups: u64,
}

#[derive(Debug, Default)]
struct Shelf {
    count: Count,
    kept: Vec<Finding>,
    kept_follow_ups: Vec<Finding>,
}

/// Collects findings from many threads: counts all, keeps some.
#[derive(Debug)]
pub(crate) struct Findings {
    keep: usize,
    shelves: Mutex<BTreeMap<Kind, Shelf>>,
}

impl Findings {
    pub(crate) fn new(keep: usize) -> Self {
        Self { keep, shelves: Mutex::new(BTreeMap::new()) }
    }

    pub(crate) fn add(&self, finding: Finding) {
        let mut shelves = self.shelves.lock();
        let shelf = shelves.entry(finding.kind).or_default();
        let (count, kept) = if finding.follow_up {
            (&mut shelf.count.follow_ups, &mut shelf.kept_follow_ups)
        } else {
            (&mut shelf.count.found, &mut shelf.kept)
        };
        *count += 1;
        if kept.len() < self.keep {
            kept.push(finding);
        }
    }

    /// Everything: errors first, follow-ups last, otherwise by kind and place; and how many of each
    /// kind there were.
    pub(crate) fn finish(self) -> (Vec<Finding>, BTreeMap<Kind, Count>) {
        let mut all = Vec::new();
        let mut counts = BTreeMap::new();
        for (kind, shelf) in self.shelves.into_inner() {
            counts.insert(kind, shelf.count);
            all.extend(shelf.kept);
            all.extend(shelf.kept_follow_ups);
        }
        all.sort_by(|a, b| {
            let order = |f: &Finding| (f.follow_up, f.severity(), f.kind, f.tree, f.key, f.address);
            order(a).cmp(&order(b)).then_with(|| a.what.cmp(&b.what))
        });
        (all, counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_kebab_case_and_every_kind_has_advice() {
        let names: BTreeSet<&str> = Kind::ALL.iter().map(|k| k.name()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
        for kind in Kind::ALL {
            let plain = kind
                .name()
                .chars()
                .all(|c| c.is_ascii_lowercase() || c == '-' || c.is_ascii_digit());
            assert!(plain && !kind.name().starts_with('-'), "{kind}");
            assert!(!kind.meaning().is_empty() && !kind.remedy().is_empty());
        }
    }

    /// Programs match the names: this sum changes with each new kind, and must not change
    /// otherwise.
    #[test]
    fn names_are_those_that_programs_know() {
        let names: Vec<&str> = Kind::ALL.iter().map(|k| k.name()).collect();
        assert_eq!((names[0], names[names.len() - 1]), ("super-primary", "not-checked"));
        let sum = larder_format::CsumType::Crc32c.compute(names.join("\n").as_bytes());
        assert_eq!((names.len(), &sum[..4]), (154, &[0xf9, 0xbb, 0x17, 0xee][..]), "{names:#?}");
    }

    #[test]
    fn a_flood_is_counted_and_cut() {
        let findings = Findings::new(3);
        for n in (0..10).rev() {
            findings.add(Finding::new(Kind::ExtentUnused, format!("{n}")).address(Logical(n)));
        }
        findings.add(Finding::new(Kind::ExtentUnused, "because").follow_up_if(true));
        findings.add(Finding::new(Kind::LogPresent, "a log"));
        findings.add(Finding::new(Kind::SuperPrimary, "gone"));
        let (all, counts) = findings.finish();
        assert_eq!(counts[&Kind::ExtentUnused], Count { found: 10, follow_ups: 1 });
        let kinds: Vec<&str> = all.iter().map(|f| f.kind.name()).collect();
        assert_eq!(
            kinds,
            [
                "super-primary",
                "extent-unused",
                "extent-unused",
                "extent-unused",
                "log-present",
                "extent-unused"
            ]
        );
        assert_eq!(all[1].address, Some(Logical(7)));
    }
}
