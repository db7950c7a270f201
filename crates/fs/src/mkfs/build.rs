//! Turns the trees of an empty file system into blocks.
//!
//! The trees of a new file system describe each other: the root tree says where the others lie, the
//! extent tree has an item for every block, the block groups count them, the free-space tree lists
//! what is left. So no tree can be written before all are known. For all of that it only matters
//! how many blocks each tree takes. So a guess (one block each) is laid out, packed, and corrected
//! until it is right. It is right at once, except with 4 KiB nodes, where the root tree needs two
//! leaves, and with many devices.
//!
//! Blocks of a tree lie behind each other, its root first; trees lie behind each other from the
//! start of their chunk.

use super::items::{self, Bytes, Placed};
use super::plan::{GENERATION, Plan};
use larder_format::csum::name_hash;
use larder_format::items::keys::{encode_uuid_item, uuid_key};
use larder_format::node::{FLAG_WRITTEN, HEADER_SIZE, Header, ITEM_SIZE, ItemHeader, KeyPointer};
use larder_format::node::{leaf_capacity, max_pointers};
use larder_format::{DiskKey, Key, KeyType, Logical, ObjectId, TreeId};
use larder_volume::MappedChunk;
use std::collections::BTreeMap;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Object ID of all chunk items.
const CHUNKS: ObjectId = ObjectId::FIRST_CHUNK_TREE;
/// The root directory of a tree with files.
const FIRST_INODE: ObjectId = ObjectId::FIRST_FREE;

type Items = BTreeMap<Key, Vec<u8>>;
/// Items of one leaf.
type Leaf = Vec<(Key, Vec<u8>)>;

/// All blocks of the new file system.
pub(super) struct Image {
    /// Address and bytes, checksums included.
    pub(super) blocks: Vec<(Logical, Vec<u8>)>,
    /// By tree id.
    pub(super) trees: BTreeMap<TreeId, Placed>,
    /// Logical bytes in use.
    pub(super) bytes_used: u64,
}

/// Trees of the file system that is planned. The chunk tree comes first, because it lies elsewhere.
fn tree_ids(plan: &Plan) -> Vec<TreeId> {
    let mut ids = vec![
        ObjectId::CHUNK_TREE,
        ObjectId::ROOT_TREE,
        ObjectId::EXTENT_TREE,
        ObjectId::DEV_TREE,
        ObjectId::FS_TREE,
        ObjectId::CSUM_TREE,
        ObjectId::UUID_TREE,
    ];
    if plan.features.free_space_tree {
        ids.push(ObjectId::FREE_SPACE_TREE);
    }
    if plan.features.block_group_tree {
        ids.push(ObjectId::BLOCK_GROUP_TREE);
    }
    ids.push(ObjectId::DATA_RELOC_TREE);
    ids
}

/// Builds every block.
pub(super) fn build(plan: &Plan) -> Image {
    let node = u64::from(plan.nodesize);
    let ids = tree_ids(plan);
    // How many leaves each tree has.
    let mut sizes: BTreeMap<TreeId, usize> = ids.iter().map(|id| (*id, 1)).collect();
    loop {
        let mut next = (plan.layout.system.start, plan.layout.metadata.start);
        let trees: BTreeMap<TreeId, Placed> = ids
            .iter()
            .map(|id| {
                let leaves = sizes[id];
                let blocks = leaves as u64 + u64::from(leaves > 1);
                let at = if *id == ObjectId::CHUNK_TREE { &mut next.0 } else { &mut next.1 };
                let placed = Placed { root: *at, level: u8::from(leaves > 1), blocks };
                *at = at.plus(blocks * node);
                (*id, placed)
            })
            .collect();
        let used = |chunk: &MappedChunk| match chunk.start {
            at if at == plan.layout.system.start => next.0.0 - at.0,
            at if at == plan.layout.metadata.start => next.1.0 - at.0,
            _ => 0,
        };
        let content: Vec<(TreeId, Items)> =
            ids.iter().map(|id| (*id, items_of(*id, plan, &trees, &used))).collect();
        let leaves: Vec<(TreeId, Vec<Leaf>)> =
            content.into_iter().map(|(id, items)| (id, pack(items, plan.nodesize))).collect();
        let packed: BTreeMap<TreeId, usize> = leaves.iter().map(|(id, l)| (*id, l.len())).collect();
        if packed == sizes {
            let bytes_used = trees.values().map(|t| t.blocks * node).sum();
            let blocks =
                leaves.iter().flat_map(|(id, l)| encode_tree(plan, *id, trees[id], l)).collect();
            return Image { blocks, trees, bytes_used };
        }
        sizes = packed;
    }
}

/// The items of a tree, once it is known where all trees are and how much of each chunk they use.
fn items_of(
    id: TreeId,
    plan: &Plan,
    trees: &BTreeMap<TreeId, Placed>,
    used: &dyn Fn(&MappedChunk) -> u64,
) -> Items {
    match id {
        ObjectId::ROOT_TREE => root_tree(plan, trees),
        ObjectId::CHUNK_TREE => chunk_tree(plan),
        ObjectId::DEV_TREE => dev_tree(plan),
        ObjectId::EXTENT_TREE => extent_tree(plan, trees, used),
        ObjectId::BLOCK_GROUP_TREE => block_groups(plan, used),
        ObjectId::FREE_SPACE_TREE => free_space_tree(plan, used),
        ObjectId::UUID_TREE => uuid_tree(plan),
        ObjectId::FS_TREE | ObjectId::DATA_RELOC_TREE => root_directory(plan),
        _ => Items::new(),
    }
}

fn chunk_tree(plan: &Plan) -> Items {
    let chunks = plan.layout.chunks().into_iter();
    let mut items: Items = chunks
        .map(|c| (Key::new(CHUNKS, KeyType::CHUNK_ITEM, c.start.0), items::chunk(plan, c)))
        .collect();
    for device in &plan.devices {
        let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, device.id.0);
        items.insert(key, items::dev_item(plan, device));
    }
    items
}

fn dev_tree(plan: &Plan) -> Items {
    let mut items = Items::new();
    for device in &plan.devices {
        let key = Key::new(ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM, device.id.0);
        items.insert(key, vec![0; 40]);
    }
    for c in plan.layout.chunks() {
        for s in &c.stripes {
            let key = Key::new(ObjectId(s.device.0), KeyType::DEV_EXTENT, s.at.0);
            items.insert(key, items::dev_extent(plan, c));
        }
    }
    items
}

/// An item for every block of every tree.
fn extent_tree(
    plan: &Plan,
    trees: &BTreeMap<TreeId, Placed>,
    used: &dyn Fn(&MappedChunk) -> u64,
) -> Items {
    let mut items: Items = trees
        .iter()
        .flat_map(|(id, t)| (0..t.blocks).map(move |i| (*id, t, i)))
        .map(|(id, t, i)| {
            let at = t.root.plus(i * u64::from(plan.nodesize));
            let level = if i == 0 { t.level } else { 0 };
            items::tree_block(plan, id, at, level)
        })
        .collect();
    if !plan.features.block_group_tree {
        items.extend(block_groups(plan, used));
    }
    items
}

fn block_groups(plan: &Plan, used: &dyn Fn(&MappedChunk) -> u64) -> Items {
    let key = |c: &MappedChunk| Key::new(c.start, KeyType::BLOCK_GROUP_ITEM, c.length);
    let chunks = plan.layout.chunks().into_iter();
    chunks.map(|c| (key(c), items::block_group(c, used(c)))).collect()
}

/// The trees lie at the start of their chunk. So there is one free range behind them, and it
/// includes superblock copies.
fn free_space_tree(plan: &Plan, used: &dyn Fn(&MappedChunk) -> u64) -> Items {
    let chunks = plan.layout.chunks().into_iter();
    chunks
        .flat_map(|c| {
            let used = used(c);
            let info = Key::new(c.start, KeyType::FREE_SPACE_INFO, c.length);
            let free = Key::new(c.start.plus(used), KeyType::FREE_SPACE_EXTENT, c.length - used);
            [(info, Bytes::new().u32(1).u32(0).done()), (free, Vec::new())]
        })
        .collect()
}

fn uuid_tree(plan: &Plan) -> Items {
    let key = uuid_key(&plan.subvol_uuid, KeyType::UUID_SUBVOL);
    [(key, encode_uuid_item(&[ObjectId::FS_TREE]))].into()
}

/// The items of a tree that has nothing but its root directory.
fn root_directory(plan: &Plan) -> Items {
    let inode = Key::new(FIRST_INODE, KeyType::INODE_ITEM, 0);
    let name = Key::new(FIRST_INODE, KeyType::INODE_REF, FIRST_INODE.0);
    [(inode, items::directory(plan, plan.root_owner)), (name, items::inode_ref(b".."))].into()
}

fn root_tree(plan: &Plan, trees: &BTreeMap<TreeId, Placed>) -> Items {
    let mut items: Items = trees
        .iter()
        .filter(|(id, _)| ![ObjectId::ROOT_TREE, ObjectId::CHUNK_TREE].contains(id))
        .map(|(id, t)| {
            let subvolume = [ObjectId::FS_TREE, ObjectId::DATA_RELOC_TREE].contains(id);
            (
                Key::new(*id, KeyType::ROOT_ITEM, 0),
                items::root(plan, *t, subvolume, *id == ObjectId::FS_TREE),
            )
        })
        .collect();
    let dir = ObjectId::ROOT_TREE_DIR;
    let name = Key::new(ObjectId::FS_TREE, KeyType::INODE_REF, dir.0);
    items.insert(name, items::inode_ref(b"default"));
    items.insert(Key::new(dir, KeyType::INODE_ITEM, 0), items::directory(plan, (0, 0)));
    items.insert(Key::new(dir, KeyType::INODE_REF, dir.0), items::inode_ref(b".."));
    let entry = Key::new(dir, KeyType::DIR_ITEM, name_hash(b"default"));
    items.insert(entry, items::default_subvolume(ObjectId::FS_TREE));
    items
}

/// Splits items over leaves, each as full as it gets.
fn pack(items: Items, nodesize: u32) -> Vec<Leaf> {
    let mut leaves = vec![Vec::new()];
    let mut room = leaf_capacity(nodesize);
    for (key, data) in items {
        let need = ITEM_SIZE + data.len();
        if need > room {
            leaves.push(Vec::new());
            room = leaf_capacity(nodesize);
        }
        room -= need;
        leaves.last_mut().expect("there is always one").push((key, data));
    }
    leaves
}

fn encode_tree(
    plan: &Plan,
    id: TreeId,
    placed: Placed,
    leaves: &[Leaf],
) -> Vec<(Logical, Vec<u8>)> {
    let node = u64::from(plan.nodesize);
    if let [only] = leaves {
        return vec![(placed.root, encode_leaf(plan, id, placed.root, only))];
    }
    assert!(
        leaves.len() <= max_pointers(plan.nodesize),
        "a new file system's tree has two levels at most"
    );
    let leaf_at = |i: usize| placed.root.plus(node * (i as u64 + 1));
    let mut root = new_node(plan, id, placed.root, 1, leaves.len());
    for (i, leaf) in leaves.iter().enumerate() {
        let pointer = KeyPointer {
            key: DiskKey::from(leaf[0].0),
            blockptr: U64::new(leaf_at(i).0),
            generation: U64::new(GENERATION.0),
        };
        let at = HEADER_SIZE + i * size_of::<KeyPointer>();
        root[at..at + size_of::<KeyPointer>()].copy_from_slice(pointer.as_bytes());
    }
    seal(plan, &mut root);
    let mut blocks = vec![(placed.root, root)];
    blocks.extend(
        leaves.iter().enumerate().map(|(i, l)| (leaf_at(i), encode_leaf(plan, id, leaf_at(i), l))),
    );
    blocks
}

fn encode_leaf(plan: &Plan, id: TreeId, at: Logical, items: &[(Key, Vec<u8>)]) -> Vec<u8> {
    let mut block = new_node(plan, id, at, 0, items.len());
    let mut end = block.len();
    for (i, (key, data)) in items.iter().enumerate() {
        end -= data.len();
        block[end..end + data.len()].copy_from_slice(data);
        let offset = u32::try_from(end - HEADER_SIZE).expect("within a node");
        let size = u32::try_from(data.len()).expect("within a node");
        let header =
            ItemHeader { key: DiskKey::from(*key), offset: U32::new(offset), size: U32::new(size) };
        let at = HEADER_SIZE + i * ITEM_SIZE;
        assert!(at + ITEM_SIZE <= end, "packed to fit");
        block[at..at + ITEM_SIZE].copy_from_slice(header.as_bytes());
    }
    seal(plan, &mut block);
    block
}

fn new_node(plan: &Plan, owner: TreeId, at: Logical, level: u8, nritems: usize) -> Vec<u8> {
    let mut block = vec![0; plan.nodesize as usize];
    let mut header = Header {
        csum: [0; 32],
        fsid: plan.fsid,
        bytenr: U64::new(at.0),
        flags_and_rev: U64::new(0),
        chunk_tree_uuid: plan.chunk_tree_uuid,
        generation: U64::new(GENERATION.0),
        owner: U64::new(owner.0),
        nritems: U32::new(u32::try_from(nritems).expect("few items")),
        level,
    };
    header.set_flags(FLAG_WRITTEN);
    block[..HEADER_SIZE].copy_from_slice(header.as_bytes());
    block
}

fn seal(plan: &Plan, block: &mut [u8]) {
    let csum = plan.csum.compute(&block[32..]);
    block[..32].copy_from_slice(&csum);
}
