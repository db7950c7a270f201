//! What the checker can find: every kind of finding by name, and what it means to people.
//!
//! The list of kinds is the checker's contract. A kind's name is stable: scripts match it, and the catalogue of planted
//! damage in the tests expects it. A kind carries what is true of all its findings — how bad it is, what it means for
//! the one whose files these are, what can be done — so that the code that finds something only says what and where.
//!
//! Damage comes in floods: one lost node of the extent tree makes thousands of extents look unreferenced. Two things
//! keep the report readable and bounded. Each kind keeps its first findings and counts the rest; and whatever only
//! follows from something that is missing is marked as a follow-up, counted, and listed last.

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

const SCRUB: &str =
    "another copy may be good: mount with Linux and run `btrfs scrub`, which rewrites bad copies";
const SAVE: &str = "copy what is still readable (`larder cp -r`, `btrfs restore`) to another disk, then make a new file system";
const REPAIR: &str =
    "back up what is readable; `btrfs check --repair` may mend it, but only on a copy of the image";
const REBUILD_FREE_SPACE: &str = "`btrfs check --clear-space-cache v2`, or mount once with Linux's \
                                  `-o clear_cache,space_cache=v2`: the tree is built anew";
const RESCUE_SUPER: &str = "`btrfs rescue super-recover` writes the good copies over the bad ones";
const NEXT_COMMIT: &str = "mount it writable once: the next commit writes it anew";
const NONE: &str = "nothing needs to be done";
const DELETE_FILE: &str = "restore the file from a backup, or delete it";
const MEMORY: &str = "test this machine's memory before trusting the file system again; then copy what is readable \
                      to a new one";
const DEVICE: &str =
    "look at the device's health and cables (`smartctl`, kernel log), then copy the image elsewhere";

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $severity:ident, $meaning:expr, $remedy:expr;)*) => {
        /// What sort of thing is wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* #[doc = concat!("`", $text, "`: ", $meaning, ".")] $name,)*
        }
        impl Kind {
            /// Every kind, in the order of a report.
            pub const ALL: &[Self] = &[$(Self::$name),*];
            /// Stable name, in kebab case.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
            /// How bad it is.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity,)* }
            }
            /// What it means for the one whose files these are: a phrase.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
            /// What can be done about it: a phrase.
            #[must_use]
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy,)* }
            }
        }
    };
}

kinds! {
    // ---- superblocks
    SuperPrimary = "super-primary", Error,
        "the superblock that everything starts from cannot be used; Linux refuses to mount", RESCUE_SUPER;
    SuperMirror = "super-mirror", Error,
        "a copy of the superblock cannot be used; rescue tools would miss it", NEXT_COMMIT;
    SuperMirrorDiffers = "super-mirror-differs", Error,
        "a copy of the superblock describes another state or another file system", NEXT_COMMIT;
    SuperMirrorGeneration = "super-mirror-generation", Warning,
        "a copy of the superblock is of another commit, as after a crash between two copies", NEXT_COMMIT;
    SuperField = "super-field", Error,
        "a field of the superblock cannot be right", REPAIR;
    SuperFeature = "super-feature", Error,
        "the superblock's feature bits do not describe this file system; Linux may refuse it or misread it", REPAIR;
    SuperErrorFlag = "super-error-flag", Warning,
        "the file system is marked as having met an error; Linux mounts it read-only", REPAIR;
    SuperInterrupted = "super-interrupted", Error,
        "an offline conversion was interrupted", "run the tool that was interrupted again";
    SuperDeviceItem = "super-device-item", Error,
        "the superblock describes its device otherwise than the chunk tree does", NEXT_COMMIT;
    SuperTotalBytes = "super-total-bytes", Error,
        "the size in the superblock is not that of the devices; Linux may refuse to mount",
        "`btrfs rescue fix-device-size`";
    SuperBytesUsed = "super-bytes-used", Error,
        "the sum of used space is wrong: free space is misreported", REPAIR;
    SuperNumDevices = "super-num-devices", Error,
        "the number of devices is wrong", NEXT_COMMIT;
    SuperBackupRoot = "super-backup-root", Warning,
        "a backup root does not say what it should: a rescue would start in the wrong place", NEXT_COMMIT;
    SuperSystemChunks = "super-system-chunks", Error,
        "the superblock's list of system chunks is damaged: the chunk tree may not be found", "`btrfs rescue chunk-recover`";
    SystemChunkMissing = "system-chunk-missing", Error,
        "a system chunk is not in the superblock: the next mount may not find the chunk tree", REPAIR;
    SystemChunkDiffers = "system-chunk-differs", Error,
        "a system chunk in the superblock is not what the chunk tree has", REPAIR;
    // ---- devices and chunks
    DeviceTruncated = "device-truncated", Error,
        "the device or image is shorter than the file system: what lay at its end is gone",
        "get the whole image again, or enlarge the file to the file system's size to reach the rest";
    DeviceMissing = "device-missing", Error,
        "a device of the file system was not given", "give all devices of the file system";
    DeviceItemMissing = "device-item-missing", Error,
        "the chunk tree does not know the device; Linux refuses to mount", REPAIR;
    DeviceItemWrong = "device-item-wrong", Error,
        "the chunk tree describes the device wrongly", REPAIR;
    DeviceBytesUsed = "device-bytes-used", Error,
        "the space taken on the device is miscounted", REPAIR;
    DeviceErrors = "device-errors", Note,
        "the file system has counted errors of this device before", DEVICE;
    ChunkInvalid = "chunk-invalid", Error,
        "a chunk cannot be right: everything in it is out of reach", "`btrfs rescue chunk-recover`";
    ChunkOverlap = "chunk-overlap", Error,
        "two chunks claim the same space: writing to one destroys the other", SAVE;
    ChunkBeyondDevice = "chunk-beyond-device", Error,
        "a chunk reaches past the end of its device", SAVE;
    ChunkInReservedSpace = "chunk-in-reserved-space", Warning,
        "a chunk lies in the first MiB of a device, which boot loaders may overwrite", "run a balance with Linux";
    ChunkWithoutBlockGroup = "chunk-without-block-group", Error,
        "a chunk has no block group: its space cannot be used, and used space in it is not protected", REPAIR;
    BlockGroupWithoutChunk = "block-group-without-chunk", Error,
        "a block group has no chunk; Linux refuses to mount", REPAIR;
    BlockGroupDiffers = "block-group-differs", Error,
        "block group and chunk disagree; Linux refuses to mount", REPAIR;
    BlockGroupInvalid = "block-group-invalid", Error,
        "a block group's item cannot be right", REPAIR;
    BlockGroupUsed = "block-group-used", Error,
        "the used space of a block group is miscounted: writing may overwrite data or fail", REPAIR;
    DeviceExtentMissing = "device-extent-missing", Error,
        "a chunk's place on the device is not recorded there; Linux refuses to mount", REPAIR;
    DeviceExtentWithoutChunk = "device-extent-without-chunk", Error,
        "space of the device is recorded for a chunk that is not there", REPAIR;
    DeviceExtentDiffers = "device-extent-differs", Error,
        "the device tree says otherwise than the chunk tree where a chunk lies; Linux refuses to mount", REPAIR;
    DeviceExtentOverlap = "device-extent-overlap", Error,
        "two ranges recorded on a device overlap", SAVE;
    DeviceExtentInvalid = "device-extent-invalid", Error,
        "a record of the device tree cannot be right", REPAIR;
    // ---- nodes
    NodeUnreadable = "node-unreadable", Error,
        "the device fails to read a tree node", DEVICE;
    NodeUnmapped = "node-unmapped", Error,
        "a pointer leads to an address that no chunk covers", SAVE;
    NodeChecksum = "node-checksum", Error,
        "a copy of a tree node is not what was written", SCRUB;
    NodeAddress = "node-address", Error,
        "a tree node holds something else: it was never written, or written elsewhere", SCRUB;
    NodeFsid = "node-fsid", Error,
        "a tree node belongs to another file system", SCRUB;
    NodeChunkTreeUuid = "node-chunk-tree-uuid", Warning,
        "a tree node carries another chunk tree's uuid; Linux does not mind", NONE;
    NodeLevel = "node-level", Error,
        "a tree node stands at the wrong height", REPAIR;
    NodeGeneration = "node-generation", Error,
        "a tree node is older or newer than its parent says: a write was lost, or the superblock came before its nodes",
        SCRUB;
    NodeFlags = "node-flags", Error,
        "a tree node's header lacks what Linux insists on", REPAIR;
    NodeOwner = "node-owner", Error,
        "a tree node belongs to another tree", REPAIR;
    NodeFirstKey = "node-first-key", Error,
        "a tree node begins with another key than its parent says: look-ups miss items", MEMORY;
    NodeKeyRange = "node-key-range", Error,
        "a tree node holds keys that belong into its neighbour: look-ups miss items", MEMORY;
    NodeKeyOrder = "node-key-order", Error,
        "the keys of a tree node are out of order: look-ups miss items", MEMORY;
    NodeLayout = "node-layout", Error,
        "the parts of a tree node lie where they cannot", MEMORY;
    NodeCopiesDiffer = "node-copies-differ", Error,
        "two valid copies of a tree node differ: which one is read is chance", SCRUB;
    NodeWrongBlockGroup = "node-wrong-block-group", Error,
        "a tree node lies in space meant for something else", REPAIR;
    SubtreeLost = "subtree-lost", Error,
        "no copy of a tree node can be used: everything below it is out of reach", SAVE;
    // ---- items that break a rule of their own
    ItemInvalid = "item-invalid", Error,
        "an item breaks a rule of the format; Linux refuses the node that it is in", MEMORY;
    ItemMisplaced = "item-misplaced", Error,
        "an item stands in a tree where it has no meaning", REPAIR;
    InodeInvalid = "inode-invalid", Error,
        "an inode's item breaks a rule of the format; Linux refuses the node that it is in", MEMORY;
    NameInvalid = "name-invalid", Error,
        "a name's item breaks a rule of the format; Linux refuses the node that it is in", MEMORY;
    NameHash = "name-hash", Error,
        "a name does not have the hash that it is filed under: it cannot be looked up", MEMORY;
    FileExtentInvalid = "file-extent-invalid", Error,
        "a file extent breaks a rule of the format; Linux refuses the node that it is in", MEMORY;
    ChecksumItemInvalid = "checksum-item-invalid", Error,
        "an item of data checksums breaks a rule of the format", REPAIR;
    RootItemInvalid = "root-item-invalid", Error,
        "a tree's root item breaks a rule of the format", REPAIR;
    ExtentItemInvalid = "extent-item-invalid", Error,
        "an extent's item or reference breaks a rule of the format", REPAIR;
    FreeSpaceItemInvalid = "free-space-item-invalid", Error,
        "an item of the free-space tree breaks a rule of the format", REBUILD_FREE_SPACE;
    // ---- trees and subvolumes
    TreeMissing = "tree-missing", Error,
        "a tree that must exist has no root item; Linux refuses to mount", REPAIR;
    RootItemWrong = "root-item-wrong", Error,
        "a root item says something about its tree that is not so", REPAIR;
    RootRefMissing = "root-ref-missing", Error,
        "a subvolume is not recorded in its parent: it cannot be listed or deleted", REPAIR;
    RootBackrefMissing = "root-backref-missing", Error,
        "a subvolume does not know its parent", REPAIR;
    RootRefDiffers = "root-ref-differs", Error,
        "subvolume and parent disagree about its name or place", REPAIR;
    RootRefWithoutRoot = "root-ref-without-root", Error,
        "a reference names a subvolume that does not exist", REPAIR;
    RootRefWithoutEntry = "root-ref-without-entry", Error,
        "a subvolume has no directory entry where it should hang", REPAIR;
    EntryWithoutSubvolume = "entry-without-subvolume", Error,
        "a directory entry names a subvolume that does not hang there: it shows as an empty directory", REPAIR;
    SubvolumeUnreachable = "subvolume-unreachable", Error,
        "a subvolume hangs nowhere: its files are there but have no path",
        "mount it with Linux's `-o subvolid=` and copy its files";
    DroppedRootWithoutOrphan = "dropped-root-without-orphan", Error,
        "a deleted subvolume is not marked for removal: its space never comes back", REPAIR;
    OrphanRootStale = "orphan-root-stale", Warning,
        "a tree is marked for removal that is alive or not there", NEXT_COMMIT;
    UuidMissing = "uuid-missing", Error,
        "a subvolume is not found by its uuid: send and receive may fail", "mount with Linux's `-o rescan_uuid_tree`";
    UuidStale = "uuid-stale", Warning,
        "the uuid tree names a subvolume that has not this uuid", "mount with Linux's `-o rescan_uuid_tree`";
    UuidItemInvalid = "uuid-item-invalid", Error,
        "an item of the uuid tree cannot be read", "mount with Linux's `-o rescan_uuid_tree`";
    DefaultSubvolume = "default-subvolume", Error,
        "the default subvolume does not exist or its entry is damaged", "`btrfs subvolume set-default`";
    SubvolumeBeingDropped = "subvolume-being-dropped", Note,
        "a deleted subvolume is still being removed; the next writable mount goes on with it", NONE;
    // ---- extents
    ExtentItemMissing = "extent-item-missing", Error,
        "something in use is not recorded as allocated: it will be overwritten", REPAIR;
    ExtentUnused = "extent-unused", Error,
        "allocated space is used by nothing: it never comes back", REPAIR;
    ExtentRefMissing = "extent-ref-missing", Error,
        "a use of an extent is not recorded: it can be freed while still in use", REPAIR;
    ExtentRefUnused = "extent-ref-unused", Error,
        "a recorded use of an extent does not exist: its space never comes back", REPAIR;
    ExtentRefCount = "extent-ref-count", Error,
        "an extent's reference count is not the sum of its references: it is freed too early or never", REPAIR;
    ExtentLength = "extent-length", Error,
        "an extent is used with another length than it is recorded with", REPAIR;
    ExtentLevel = "extent-level", Error,
        "a tree node is recorded at another height than it has", REPAIR;
    ExtentType = "extent-type", Error,
        "data is recorded as a tree node, or a tree node as data", REPAIR;
    ExtentRefWithoutItem = "extent-ref-without-item", Error,
        "references stand in the extent tree without the extent that they are for", REPAIR;
    ExtentOverlap = "extent-overlap", Error,
        "two allocated extents overlap: one has overwritten the other", SAVE;
    ExtentOutsideBlockGroup = "extent-outside-block-group", Error,
        "an extent lies outside of every chunk, or reaches over the end of one", SAVE;
    ExtentWrongBlockGroup = "extent-wrong-block-group", Error,
        "an extent lies in space meant for something else", REPAIR;
    ExtentOnSuperblock = "extent-on-superblock", Error,
        "an extent lies where a copy of the superblock is written: one overwrites the other", SAVE;
    // ---- free space
    FreeSpaceMissing = "free-space-missing", Error,
        "free space is not in the free-space tree: it cannot be used", REBUILD_FREE_SPACE;
    FreeSpaceAllocated = "free-space-allocated", Error,
        "the free-space tree lists allocated space as free: writing will overwrite it", REBUILD_FREE_SPACE;
    FreeSpaceCount = "free-space-count", Error,
        "the free-space tree's count of runs is wrong; Linux does not trust that block group", REBUILD_FREE_SPACE;
    FreeSpaceForm = "free-space-form", Error,
        "free space of a block group stands in another form than its info item says", REBUILD_FREE_SPACE;
    FreeSpaceInfoMissing = "free-space-info-missing", Error,
        "a block group is not in the free-space tree; Linux aborts at the first change there", REBUILD_FREE_SPACE;
    FreeSpaceOverlap = "free-space-overlap", Error,
        "the free-space tree lists the same space twice, or outside of its block group", REBUILD_FREE_SPACE;
    FreeSpaceWithoutBlockGroup = "free-space-without-block-group", Note,
        "the free-space tree has entries without a block group, as old versions of mkfs leave them", NONE;
    FreeSpaceNotValid = "free-space-not-valid", Note,
        "the free-space tree is marked as out of date; the next writable mount builds it anew", NONE;
    SpaceCacheStale = "space-cache-stale", Note,
        "there is a version 1 space cache that is out of date; Linux builds it anew", NONE;
    // ---- inodes and names
    InodeMissing = "inode-missing", Error,
        "something names or describes an inode that does not exist", REPAIR;
    InodeLinkCount = "inode-link-count", Error,
        "an inode's link count is not the number of its names: it is deleted too early or never", REPAIR;
    InodeSize = "inode-size", Error,
        "an inode's size does not fit its contents", DELETE_FILE;
    InodeBytes = "inode-bytes", Error,
        "the space that an inode takes is miscounted: `du` and quotas are wrong", REPAIR;
    InodeGeneration = "inode-generation", Error,
        "an inode is from the future: its times and `send` are wrong", REPAIR;
    InodeFlags = "inode-flags", Warning,
        "an inode's flags contradict each other: it is to be written in place, but with checksums, which a crash would \
         leave wrong", DELETE_FILE;
    DirectorySize = "directory-size", Error,
        "a directory's size is not twice the length of its names: it cannot be removed when empty", REPAIR;
    DirItemMissing = "dir-item-missing", Error,
        "a name can be listed but not looked up", REPAIR;
    DirIndexMissing = "dir-index-missing", Error,
        "a name can be looked up but is not listed", REPAIR;
    DirEntryDiffers = "dir-entry-differs", Error,
        "the two entries of a name lead to different inodes or have different types", REPAIR;
    DirEntryType = "dir-entry-type", Error,
        "a directory entry says another type of file than the inode has", REPAIR;
    DirEntryWithoutInode = "dir-entry-without-inode", Error,
        "a directory entry leads to an inode that does not exist", REPAIR;
    DirNameDuplicate = "dir-name-duplicate", Error,
        "a directory has the same name twice", REPAIR;
    DirIndexInvalid = "dir-index-invalid", Error,
        "a directory entry has an index that is never used", REPAIR;
    DirLinks = "dir-links", Error,
        "a directory has more than one name: paths go in circles", REPAIR;
    InodeRefMissing = "inode-ref-missing", Error,
        "a directory entry is not recorded at its inode: unlinking the name fails", REPAIR;
    InodeRefWithoutEntry = "inode-ref-without-entry", Error,
        "an inode records a name that its directory does not have", REPAIR;
    InodeRefDiffers = "inode-ref-differs", Error,
        "directory entry and inode disagree about the index of a name", REPAIR;
    RootDirectory = "root-directory", Error,
        "a subvolume's top directory is missing or damaged; Linux cannot enter it", REPAIR;
    OrphanItemMissing = "orphan-item-missing", Error,
        "a deleted file is not marked for removal: its space never comes back", REPAIR;
    OrphanItemStale = "orphan-item-stale", Note,
        "a file is marked for removal that is not there; the next mount tidies up", NONE;
    XattrDuplicate = "xattr-duplicate", Error,
        "an inode has the same extended attribute twice", REPAIR;
    // ---- file contents
    FileExtentOverlap = "file-extent-overlap", Error,
        "two extents of a file cover the same bytes: which one is read is chance", DELETE_FILE;
    FileExtentHole = "file-extent-hole", Error,
        "a file has a gap without the item that should stand for it; Linux may fail to read there", REPAIR;
    FileExtentBeyondEnd = "file-extent-beyond-end", Warning,
        "a file has data behind its end, as after a crash while it was cut short", NONE;
    FileExtentInline = "file-extent-inline", Error,
        "data that stands in the tree stands where it may not", DELETE_FILE;
    FileExtentMisplaced = "file-extent-misplaced", Error,
        "something that is no file has file contents", REPAIR;
    FileExtentGeneration = "file-extent-generation", Error,
        "a file extent is from the future", REPAIR;
    FileExtentRamBytes = "file-extent-ram-bytes", Error,
        "an extent's uncompressed length does not fit it: reads may fail or return zeros", DELETE_FILE;
    FileExtentCompression = "file-extent-compression", Error,
        "a file extent is compressed in a way that its inode or the superblock excludes", DELETE_FILE;
    FileExtentUnmapped = "file-extent-unmapped", Error,
        "a file's data lies at an address that no data chunk covers: it is lost", DELETE_FILE;
    // ---- data and its checksums
    ChecksumMissing = "checksum-missing", Error,
        "file data has no checksum: Linux fails to read it", DELETE_FILE;
    ChecksumUnexpected = "checksum-unexpected", Error,
        "data that must not have checksums has them: reads fail after the next write", REPAIR;
    ChecksumWithoutExtent = "checksum-without-extent", Error,
        "checksums are kept for space that is not allocated: data written there later reads as damaged", REPAIR;
    ChecksumOverlap = "checksum-overlap", Error,
        "two items hold checksums for the same data", REPAIR;
    DataChecksum = "data-checksum", Error,
        "a copy of file data is not what was written", SCRUB;
    DataUnreadable = "data-unreadable", Error,
        "the device fails to read file data", DEVICE;
    DataUnpack = "data-unpack", Error,
        "compressed file data cannot be unpacked: reading it fails", DELETE_FILE;
    // ---- the rest
    LogPresent = "log-present", Note,
        "the file system was not unmounted cleanly; the next mount replays its log", NONE;
    LogDamaged = "log-damaged", Error,
        "the log cannot be replayed: Linux refuses to mount until it is dropped, which loses the last fsyncs",
        "`btrfs rescue zero-log` drops it";
    RelocationInterrupted = "relocation-interrupted", Note,
        "a balance was interrupted; the next mount goes on with it", NONE;
    QuotasNotChecked = "quotas-not-checked", Note,
        "quotas are on, and their counts are not checked", "`btrfs quota rescan` counts anew";
    NotChecked = "not-checked", Note,
        "something could not be checked because of other damage", "mend the other findings first, and check again";
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
    /// The tree in which it was met; a node that several subvolumes share is reported once, for one of them.
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
    #[must_use]
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, tree: None, key: None, address: None, device: None, what: what.into(), follow_up: false }
    }
    /// In this tree.
    #[must_use]
    pub fn tree(mut self, tree: TreeId) -> Self {
        self.tree = Some(tree);
        self
    }
    /// About this item.
    #[must_use]
    pub fn key(mut self, key: Key) -> Self {
        self.key = Some(key);
        self
    }
    /// About this address.
    #[must_use]
    pub fn address(mut self, at: Logical) -> Self {
        self.address = Some(at);
        self
    }
    /// About this place on a device.
    #[must_use]
    pub fn device(mut self, id: DeviceId, at: Physical) -> Self {
        self.device = Some((id, at));
        self
    }
    /// A follow-up of something else, if `yes`.
    #[must_use]
    pub fn follow_up_if(mut self, yes: bool) -> Self {
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

    /// Everything: errors first, follow-ups last, otherwise by kind and place; and how many of each kind there were.
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
            let plain = kind.name().chars().all(|c| c.is_ascii_lowercase() || c == '-' || c.is_ascii_digit());
            assert!(plain && !kind.name().starts_with('-'), "{kind}");
            assert!(!kind.meaning().is_empty() && !kind.remedy().is_empty());
        }
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
