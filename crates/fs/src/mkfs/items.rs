//! The few items that an empty file system has, as bytes.
//!
//! Layouts are those of `docs/FORMAT.md`; values are those that mkfs.btrfs writes.

use super::plan::{GENERATION, Plan, PlannedDevice};
use larder_format::items::InodeFlags;
use larder_format::{Key, KeyType, Logical, TreeId};
use larder_volume::MappedChunk;

/// Little-endian bytes, one field behind the other.
#[derive(Default)]
pub(super) struct Bytes(Vec<u8>);

impl Bytes {
    pub(super) fn new() -> Self {
        Self::default()
    }
    pub(super) fn u8(self, v: u8) -> Self {
        self.raw(&[v])
    }
    pub(super) fn u16(self, v: u16) -> Self {
        self.raw(&v.to_le_bytes())
    }
    pub(super) fn u32(self, v: u32) -> Self {
        self.raw(&v.to_le_bytes())
    }
    pub(super) fn u64(self, v: u64) -> Self {
        self.raw(&v.to_le_bytes())
    }
    pub(super) fn raw(mut self, v: &[u8]) -> Self {
        self.0.extend_from_slice(v);
        self
    }
    pub(super) fn zeros(self, n: usize) -> Self {
        let n = self.0.len() + n;
        self.pad_to(n)
    }
    pub(super) fn pad_to(mut self, len: usize) -> Self {
        debug_assert!(self.0.len() <= len);
        self.0.resize(len, 0);
        self
    }
    fn time(self, plan: &Plan) -> Self {
        self.u64(plan.time.sec.cast_unsigned()).u32(plan.time.nsec)
    }
    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}

/// Where a tree's blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) root: Logical,
    pub(super) level: u8,
    pub(super) blocks: u64,
}

const DIRECTORY: u32 = 0o040_755;
const TREE_BLOCK: u64 = 2;
const TREE_BLOCK_REF: u8 = 176;
/// File type of a directory in an entry.
const ENTRY_DIRECTORY: u8 = 2;

/// INODE_ITEM of a root directory.
pub(super) fn directory(plan: &Plan, owner: (u32, u32)) -> Vec<u8> {
    inode(plan, 0, InodeFlags::empty(), true, owner)
}

fn inode(
    plan: &Plan,
    size: u64,
    flags: InodeFlags,
    times: bool,
    (uid, gid): (u32, u32),
) -> Vec<u8> {
    let out = Bytes::new()
        .u64(GENERATION.0)
        .u64(0) // transid
        .u64(size)
        .u64(u64::from(plan.nodesize)) // nbytes: mkfs.btrfs counts the root's node
        .u64(0) // block group
        .u32(1) // links
        .u32(uid)
        .u32(gid)
        .u32(DIRECTORY)
        .u64(0) // rdev
        .u64(flags.bits())
        .u64(0) // sequence
        .zeros(32);
    let out = if times { (0..4).fold(out, |o, _| o.time(plan)) } else { out };
    let out = out.pad_to(160).done();
    debug_assert_eq!(out.len(), 160);
    out
}

/// INODE_REF with index 0.
pub(super) fn inode_ref(name: &[u8]) -> Vec<u8> {
    let len = u16::try_from(name.len()).expect("a short name");
    Bytes::new().u64(0).u16(len).raw(name).done()
}

/// DIR_ITEM `default` of the root tree's directory.
pub(super) fn default_subvolume(id: TreeId) -> Vec<u8> {
    let name = b"default";
    Bytes::new()
        .u64(id.0)
        .u8(KeyType::ROOT_ITEM.0)
        .u64(u64::MAX)
        .u64(GENERATION.0)
        .u16(0)
        .u16(u16::try_from(name.len()).expect("a short name"))
        .u8(ENTRY_DIRECTORY)
        .raw(name)
        .done()
}

/// ROOT_ITEM. Trees with inodes have a root directory. The top-level subvolume also has a uuid and
/// times.
pub(super) fn root(plan: &Plan, tree: Placed, has_inodes: bool, top: bool) -> Vec<u8> {
    // It says that the root item's own flags have a meaning.
    let flags = if has_inodes { InodeFlags::ROOT_ITEM_INIT } else { InodeFlags::empty() };
    let embedded = inode(plan, 3, flags, false, (0, 0));
    // The inode's own generation in a root item is 1 in every image that Linux makes.
    let out = Bytes::new()
        .raw(&embedded)
        .u64(GENERATION.0)
        .u64(if has_inodes { 256 } else { 0 })
        .u64(tree.root.0)
        .u64(0) // byte limit
        .u64(tree.blocks * u64::from(plan.nodesize))
        .u64(0) // last snapshot
        .u64(0) // flags
        .u32(1) // refs
        .zeros(17) // drop progress
        .u8(0) // drop level
        .u8(tree.level)
        .u64(GENERATION.0); // generation_v2
    let out = if top {
        // uuid, then no parent, nothing received, no transactions, then change and creation time.
        out.raw(&plan.subvol_uuid).zeros(2 * 16 + 4 * 8).time(plan).time(plan)
    } else {
        out
    };
    out.pad_to(439).done()
}

/// BLOCK_GROUP_ITEM of a chunk.
pub(super) fn block_group(chunk: &MappedChunk, used: u64) -> Vec<u8> {
    Bytes::new().u64(used).u64(256).u64(chunk.kind).done()
}

/// CHUNK_ITEM.
pub(super) fn chunk(plan: &Plan, c: &MappedChunk) -> Vec<u8> {
    let stripes = u16::try_from(c.stripes.len()).expect("no more than devices");
    let head = Bytes::new()
        .u64(c.length)
        .u64(2) // owner: the extent tree
        .u64(65536) // stripe length
        .u64(c.kind)
        .u32(65536) // io alignment
        .u32(65536) // io width
        .u32(4096) // sector size
        .u16(stripes)
        .u16(c.profile().sub_stripes());
    c.stripes
        .iter()
        .fold(head, |out, s| out.u64(s.device.0).u64(s.at.0).raw(&plan.device(s.device).uuid))
        .done()
}

/// DEV_ITEM of a device; also embedded in its superblock.
pub(super) fn dev_item(plan: &Plan, device: &PlannedDevice) -> Vec<u8> {
    let out = Bytes::new()
        .u64(device.id.0)
        .u64(device.bytes)
        .u64(plan.layout.device_bytes(device.id))
        .u32(4096) // io alignment
        .u32(4096) // io width
        .u32(4096) // sector size
        .u64(0) // type
        .u64(0) // generation
        .u64(0) // start offset
        .u32(0) // group
        .u8(0) // seek speed
        .u8(0) // bandwidth
        .raw(&device.uuid)
        .raw(&plan.fsid)
        .done();
    debug_assert_eq!(out.len(), 98);
    out
}

/// DEV_EXTENT of a stripe of a chunk.
pub(super) fn dev_extent(plan: &Plan, c: &MappedChunk) -> Vec<u8> {
    Bytes::new()
        .u64(3)
        .u64(256)
        .u64(c.start.0)
        .u64(c.stripe_bytes())
        .raw(&plan.chunk_tree_uuid)
        .done()
}

/// Record of a tree block in the extent tree, with its key.
pub(super) fn tree_block(plan: &Plan, tree: TreeId, at: Logical, level: u8) -> (Key, Vec<u8>) {
    let head = Bytes::new().u64(1).u64(GENERATION.0).u64(TREE_BLOCK);
    let (key, head) = if plan.features.skinny_metadata {
        (Key::new(at, KeyType::METADATA_ITEM, u64::from(level)), head)
    } else {
        // The old form has the block's first key, which nothing reads, and its level.
        (Key::new(at, KeyType::EXTENT_ITEM, u64::from(plan.nodesize)), head.zeros(17).u8(level))
    };
    (key, head.u8(TREE_BLOCK_REF).u64(tree.0).done())
}
