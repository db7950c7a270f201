//! The trees that describe all others, and the superblock.
//!
//! The extent tree has an item for each node, its own nodes among them. Block groups count the
//! nodes, the free-space tree lists what is left, and the root tree says where all of this lies. So
//! none of these trees can be written before all are known. They are first *drawn*: laid out
//! without writing, from the picture that the last drawing gave. That is repeated until a drawing
//! gives the picture that it began with. It does after a few rounds, because more nodes to list
//! never make a tree smaller. Then the same is done once more, and written.

use crate::error::{Error, Result};
use crate::input::Subvolume;
use crate::nodes::{GENERATION, Nodes, Note, Placed, TreeWriter};
use crate::options::Plan;
use crate::sort::{RefKey, Sorted};
use crate::space::{Group, Space};
use crate::store::Sums;
use larder_format::csum::name_hash;
use larder_format::features::{CompatRo, Incompat, SuperFlags};
use larder_format::items::keys::uuid_key;
use larder_format::items::keys::{chunk_key, encode_uuid_item, root_backref_key, root_ref_key};
use larder_format::items::{
    BlockGroupItem, Chunk, Compression, DevExtent, DirEntryRef, ExtentFlags, ExtentItem, ExtentRef,
    FreeSpaceInfo, InodeFlags, InodeItem, InodeRef, RootFlags, RootItem, RootRef, Stripe,
    TreeBlockInfo, encode_sys_array,
};
use larder_format::node::leaf_capacity;
use larder_format::superblock::{BackupRoot, MAGIC, ROOT_DIR_OBJECTID, Superblock};
use larder_format::{
    DevItem, DeviceId, DiskKey, FileOffset, Generation, Key, KeyType, Logical, ObjectId, Physical,
    SECTOR_SIZE,
};
use std::collections::BTreeMap;
use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

const DEVICE: DeviceId = DeviceId(1);
const FIRST_INODE: u64 = 256;
/// `S_IFDIR`, and permissions of a directory that no source describes.
const DIRECTORY: u32 = 0o040_755;

/// What a drawing gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Picture {
    /// All nodes, by address.
    notes: Vec<Note>,
    groups: Vec<Group>,
    roots: BTreeMap<ObjectId, Placed>,
    /// Where the last chunk ends on the device.
    end: u64,
}

/// All that is known when subvolumes and checksums are written.
pub(crate) struct World<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) refs: &'a Sorted<RefKey>,
    pub(crate) subvolumes: &'a [Subvolume],
    /// Trees that are written.
    pub(crate) roots: BTreeMap<ObjectId, Placed>,
    /// Methods of compression in use.
    pub(crate) methods: Vec<Compression>,
    /// Size of the image whose last chunk ends there.
    pub(crate) size: &'a dyn Fn(u64) -> u64,
}

/// What is known when all is written.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) space: Space,
    roots: BTreeMap<ObjectId, Placed>,
    /// Nodes.
    pub(crate) nodes: u64,
}

/// Writes the checksum tree.
pub(crate) fn checksums(plan: &Plan, nodes: &mut Nodes<'_>, sums: &Sums) -> Result<Placed> {
    let size = plan.csum.size();
    // As many as Linux puts into one item.
    let most = (leaf_capacity(plan.nodesize) - 2 * 25) / size - 1;
    let mut tree = TreeWriter::new(nodes, ObjectId::CSUM_TREE);
    sums.each(most as u64, |at, bytes| {
        tree.push(nodes, Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at), bytes)
    })?;
    tree.finish(nodes)
}

/// Writes the tree that relocations use.
pub(crate) fn data_reloc(plan: &Plan, nodes: &mut Nodes<'_>) -> Result<Placed> {
    let mut tree = TreeWriter::new(nodes, ObjectId::DATA_RELOC_TREE);
    for (key, item) in top_directory(plan, FIRST_INODE) {
        tree.push(nodes, key, &item)?;
    }
    tree.finish(nodes)
}

fn top_directory(plan: &Plan, inode: u64) -> [(Key, Vec<u8>); 2] {
    let item = InodeItem {
        generation: GENERATION.0.into(),
        nbytes: u64::from(plan.nodesize).into(),
        nlink: 1.into(),
        mode: DIRECTORY.into(),
        atime: plan.time,
        ctime: plan.time,
        mtime: plan.time,
        otime: plan.time,
        ..InodeItem::default()
    };
    [
        (Key::new(inode, KeyType::INODE_ITEM, 0), item.as_bytes().to_vec()),
        (Key::new(inode, KeyType::INODE_REF, inode), reference(b"..")),
    ]
}

fn reference(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    InodeRef { index: 0, name }.append_to(&mut out);
    out
}

/// Writes the tree of the subvolumes' uuids.
pub(crate) fn uuids(
    plan: &Plan,
    nodes: &mut Nodes<'_>,
    subvolumes: &[Subvolume],
) -> Result<Placed> {
    let items: BTreeMap<Key, Vec<u8>> = subvolumes
        .iter()
        .map(|s| {
            let key = uuid_key(&plan.subvolume_uuid(s.id), KeyType::UUID_SUBVOL);
            (key, encode_uuid_item(&[ObjectId(s.id)]))
        })
        .collect();
    small_tree(nodes, ObjectId::UUID_TREE, items)
}

fn small_tree(
    nodes: &mut Nodes<'_>,
    id: ObjectId,
    items: impl IntoIterator<Item = (Key, Vec<u8>)>,
) -> Result<Placed> {
    let mut tree = TreeWriter::new(nodes, id);
    for (key, item) in items {
        tree.push(nodes, key, &item)?;
    }
    tree.finish(nodes)
}

impl World<'_> {
    /// Writes the remaining trees.
    pub(crate) fn finish(&self, mut nodes: Nodes<'_>) -> Result<Finished> {
        nodes.catch_up()?;
        let mut picture = Picture::default();
        loop {
            let mut rehearsal = nodes.rehearsal();
            let next = self.draw(&mut rehearsal, &picture)?;
            if next == picture {
                break;
            }
            picture = next;
        }
        let done = self.draw(&mut nodes, &picture)?;
        assert!(done == picture, "what is written is what was drawn");
        nodes.catch_up()?;
        Ok(Finished { space: nodes.space, roots: done.roots, nodes: done.notes.len() as u64 })
    }

    /// Gives the remaining trees their places, with the contents that the last picture asks for.
    fn draw(&self, nodes: &mut Nodes<'_>, last: &Picture) -> Result<Picture> {
        let features = self.plan.features;
        let mut roots = self.roots.clone();
        roots.insert(ObjectId::EXTENT_TREE, self.extents(nodes, last)?);
        if features.free_space_tree {
            let items = free_space(&last.groups);
            let placed = small_tree(nodes, ObjectId::FREE_SPACE_TREE, items)?;
            roots.insert(ObjectId::FREE_SPACE_TREE, placed);
        }
        if features.block_group_tree {
            let items = block_groups(&last.groups);
            let placed = small_tree(nodes, ObjectId::BLOCK_GROUP_TREE, items)?;
            roots.insert(ObjectId::BLOCK_GROUP_TREE, placed);
        }
        let items = self.device_extents(&last.groups);
        roots.insert(ObjectId::DEV_TREE, small_tree(nodes, ObjectId::DEV_TREE, items)?);
        let items = self.root_items(&roots);
        roots.insert(ObjectId::ROOT_TREE, small_tree(nodes, ObjectId::ROOT_TREE, items)?);
        let items = self.chunks(last);
        roots.insert(ObjectId::CHUNK_TREE, small_tree(nodes, ObjectId::CHUNK_TREE, items)?);
        nodes.space.close(true)?;
        let mut notes = nodes.notes.clone();
        notes.sort_unstable();
        let (groups, end) = (nodes.space.groups().to_vec(), nodes.space.end());
        Ok(Picture { notes, groups, roots, end })
    }

    /// Writes the extent tree: data, nodes and, without a tree of their own, block groups, in the
    /// order of addresses.
    fn extents(&self, nodes: &mut Nodes<'_>, last: &Picture) -> Result<Placed> {
        let mut tree = TreeWriter::new(nodes, ObjectId::EXTENT_TREE);
        let mut others = Others::new(self.plan, last);
        let mut data = DataExtents { refs: self.refs.read()? };
        while let Some(items) = data.next()? {
            for (key, item) in items {
                others.before(&mut tree, nodes, Some(&key))?;
                tree.push(nodes, key, &item)?;
            }
        }
        others.before(&mut tree, nodes, None)?;
        tree.finish(nodes)
    }

    fn device_extents(&self, groups: &[Group]) -> BTreeMap<Key, Vec<u8>> {
        let mut items = BTreeMap::new();
        items
            .insert(Key::new(ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM, DEVICE.0), vec![0; 40]);
        for g in groups {
            for s in &g.stripes {
                let item = DevExtent {
                    chunk_tree: ObjectId::CHUNK_TREE.0.into(),
                    chunk_objectid: ObjectId::FIRST_CHUNK_TREE.0.into(),
                    chunk_offset: g.start.into(),
                    length: g.length.into(),
                    chunk_tree_uuid: self.plan.chunk_tree_uuid,
                };
                let key = Key::new(DEVICE.0, KeyType::DEV_EXTENT, *s);
                items.insert(key, item.as_bytes().to_vec());
            }
        }
        items
    }

    fn chunks(&self, last: &Picture) -> BTreeMap<Key, Vec<u8>> {
        let chunk = |g: &Group| (chunk_key(Logical(g.start)), self.chunk(g).encode());
        let mut items: BTreeMap<Key, Vec<u8>> = last.groups.iter().map(chunk).collect();
        let item = self.device_item(&last.groups, (self.size)(last.end));
        let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, DEVICE.0);
        items.insert(key, item.as_bytes().to_vec());
        items
    }

    fn chunk(&self, group: &Group) -> Chunk {
        let stripes = group
            .stripes
            .iter()
            .map(|s| Stripe {
                devid: DEVICE,
                offset: Physical(*s),
                dev_uuid: self.plan.device_uuid,
            })
            .collect();
        Chunk::new(group.length, group.flags, stripes)
    }

    fn device_item(&self, groups: &[Group], total: u64) -> DevItem {
        let mut item = DevItem::new_zeroed();
        item.devid.set(DEVICE.0);
        item.total_bytes.set(total);
        item.bytes_used.set(groups.iter().map(|g| g.length * g.stripes.len() as u64).sum());
        item.io_align.set(SECTOR_SIZE);
        item.io_width.set(SECTOR_SIZE);
        item.sector_size.set(SECTOR_SIZE);
        item.uuid = self.plan.device_uuid;
        item.fsid = self.plan.fsid;
        item
    }

    fn root_items(&self, roots: &BTreeMap<ObjectId, Placed>) -> BTreeMap<Key, Vec<u8>> {
        let without = [ObjectId::ROOT_TREE, ObjectId::CHUNK_TREE];
        let mut items = BTreeMap::new();
        for (id, placed) in roots.iter().filter(|(id, _)| !without.contains(id)) {
            let subvolume = self.subvolumes.iter().find(|s| s.id == id.0);
            // As on Linux, the key of a snapshot has the transaction that made it.
            let snapshot = subvolume.is_some_and(|s| s.snapshot_of.is_some());
            let offset = if snapshot { GENERATION.0 } else { 0 };
            let item = self.root_item(*id, *placed, subvolume);
            items.insert(Key::new(*id, KeyType::ROOT_ITEM, offset), item.as_bytes().to_vec());
        }
        for s in self.subvolumes {
            let Some(hang) = &s.hang else { continue };
            let (parent, child) = (ObjectId(hang.parent), ObjectId(s.id));
            let (dirid, sequence) = (ObjectId(hang.directory), hang.index);
            let item = RootRef { dirid, sequence, name: &hang.name }.encode();
            items.insert(root_ref_key(parent, child), item.clone());
            items.insert(root_backref_key(child, parent), item);
        }
        items.extend(top_directory(self.plan, ROOT_DIR_OBJECTID));
        let key = Key::new(ObjectId::FS_TREE, KeyType::INODE_REF, ROOT_DIR_OBJECTID);
        items.insert(key, reference(b"default"));
        let name = b"default";
        let default = self.subvolumes.iter().find(|s| s.default).map_or(5, |s| s.id);
        let entry = DirEntryRef::subvolume(ObjectId(default), GENERATION, name);
        let key = Key::new(ROOT_DIR_OBJECTID, KeyType::DIR_ITEM, name_hash(name));
        items.insert(key, entry.encode());
        items
    }

    fn root_item(&self, id: ObjectId, placed: Placed, subvolume: Option<&Subvolume>) -> RootItem {
        let nodesize = u64::from(self.plan.nodesize);
        let files = id.holds_files();
        let mut item = RootItem {
            inode: InodeItem {
                generation: 1.into(),
                size: 3.into(),
                nbytes: nodesize.into(),
                nlink: 1.into(),
                mode: DIRECTORY.into(),
                ..InodeItem::default()
            },
            root_dirid: if files { FIRST_INODE } else { 0 }.into(),
            bytenr: placed.root.0.into(),
            bytes_used: (placed.nodes * nodesize).into(),
            refs: 1.into(),
            level: placed.level,
            ..RootItem::default()
        };
        item.set_generation(GENERATION);
        if files {
            item.inode.set_inode_flags(InodeFlags::ROOT_ITEM_INIT);
        }
        let Some(subvolume) = subvolume else { return item };
        item.uuid = self.plan.subvolume_uuid(subvolume.id);
        (item.ctime, item.otime) = (self.plan.time, self.plan.time);
        item.ctransid = GENERATION.0.into();
        item.otransid = GENERATION.0.into();
        if let Some(parent) = subvolume.snapshot_of {
            item.parent_uuid = self.plan.subvolume_uuid(self.subvolumes[parent as usize].id);
        }
        if subvolume.read_only {
            item.set_root_flags(RootFlags::RDONLY);
        }
        item
    }

    /// The superblock, but for its own place and checksum.
    pub(crate) fn superblock(&self, done: &Finished) -> Result<Box<Superblock>> {
        let (plan, groups) = (self.plan, done.space.groups());
        let tree = |id: ObjectId| done.roots[&id];
        let (root, chunk_root) = (tree(ObjectId::ROOT_TREE), tree(ObjectId::CHUNK_TREE));
        let total = (self.size)(done.space.end());
        let mut sb = Superblock::new_box_zeroed().expect("memory for one superblock");
        sb.set_label(&plan.label).map_err(|e| Error::Unsupported(e.to_string()))?;
        sb.magic = MAGIC;
        sb.fsid = plan.fsid;
        sb.set_super_flags(SuperFlags::WRITTEN);
        sb.set_generation(GENERATION);
        sb.set_root(root.root, root.level);
        sb.set_chunk_root(chunk_root.root, chunk_root.level, GENERATION);
        sb.set_total_bytes(total);
        sb.set_bytes_used(done.space.used_bytes());
        sb.root_dir_objectid.set(ROOT_DIR_OBJECTID);
        sb.num_devices.set(1);
        sb.sectorsize.set(SECTOR_SIZE);
        sb.nodesize.set(plan.nodesize);
        sb.leafsize.set(plan.nodesize);
        sb.stripesize.set(SECTOR_SIZE);
        sb.set_compat_ro(CompatRo::from_bits_retain(plan.features.compat_ro()));
        sb.set_incompat(self.incompat());
        sb.set_csum_type(plan.csum);
        sb.dev_item = self.device_item(groups, total);
        // Without a free-space tree, a generation that never comes says that no cache is valid.
        let no_cache = if plan.features.free_space_tree { 0 } else { u64::MAX };
        sb.set_cache_generation(Generation(no_cache));
        sb.uuid_tree_generation.set(GENERATION.0);
        let system = (chunk_key(Logical(groups[0].start)), &self.chunk(&groups[0]));
        encode_sys_array([system])
            .and_then(|bytes| sb.set_sys_chunk_bytes(&bytes))
            .expect("one chunk fits");
        sb.backup_roots[0] = self.backup(done, total);
        Ok(sb)
    }

    fn incompat(&self) -> Incompat {
        let mut bits = Incompat::from_bits_retain(self.plan.features.incompat(self.plan.nodesize));
        for method in &self.methods {
            match method {
                Compression::Lzo => bits |= Incompat::COMPRESS_LZO,
                Compression::Zstd => bits |= Incompat::COMPRESS_ZSTD,
                Compression::None | Compression::Zlib => {}
            }
        }
        if self.subvolumes.iter().any(|s| s.default && s.id != 5) {
            bits |= Incompat::DEFAULT_SUBVOL;
        }
        bits
    }

    fn backup(&self, done: &Finished, total: u64) -> BackupRoot {
        let tree = |id: ObjectId| {
            let placed = done.roots[&id];
            (U64::new(placed.root.0), U64::new(GENERATION.0), placed.level)
        };
        let mut b = BackupRoot::new_zeroed();
        (b.tree_root, b.tree_root_gen, b.tree_root_level) = tree(ObjectId::ROOT_TREE);
        (b.chunk_root, b.chunk_root_gen, b.chunk_root_level) = tree(ObjectId::CHUNK_TREE);
        (b.extent_root, b.extent_root_gen, b.extent_root_level) = tree(ObjectId::EXTENT_TREE);
        (b.fs_root, b.fs_root_gen, b.fs_root_level) = tree(ObjectId::FS_TREE);
        (b.dev_root, b.dev_root_gen, b.dev_root_level) = tree(ObjectId::DEV_TREE);
        (b.csum_root, b.csum_root_gen, b.csum_root_level) = tree(ObjectId::CSUM_TREE);
        b.total_bytes.set(total);
        b.bytes_used.set(done.space.used_bytes());
        b.num_devices.set(1);
        b
    }
}

fn block_groups(groups: &[Group]) -> impl Iterator<Item = (Key, Vec<u8>)> {
    groups.iter().map(|g| {
        let item = BlockGroupItem::new(g.used_bytes(), g.flags);
        (Key::new(g.start, KeyType::BLOCK_GROUP_ITEM, g.length), item.as_bytes().to_vec())
    })
}

fn free_space(groups: &[Group]) -> BTreeMap<Key, Vec<u8>> {
    let mut items = BTreeMap::new();
    for g in groups {
        let free = g.free();
        let count = u32::try_from(free.len()).expect("mirrors and pieces at the end of chunks");
        let info = FreeSpaceInfo::new(count, false);
        let key = Key::new(g.start, KeyType::FREE_SPACE_INFO, g.length);
        items.insert(key, info.as_bytes().to_vec());
        for r in free {
            let key = Key::new(r.start, KeyType::FREE_SPACE_EXTENT, r.end - r.start);
            items.insert(key, Vec::new());
        }
    }
    items
}

/// Items of nodes and, without a tree of their own, block groups, in the order of their keys.
struct Others<'a> {
    plan: &'a Plan,
    notes: std::iter::Peekable<std::slice::Iter<'a, Note>>,
    groups: std::iter::Peekable<std::vec::IntoIter<(Key, Vec<u8>)>>,
}

impl<'a> Others<'a> {
    fn new(plan: &'a Plan, last: &'a Picture) -> Self {
        let own_tree = plan.features.block_group_tree;
        let groups = if own_tree { Vec::new() } else { block_groups(&last.groups).collect() };
        Self { plan, notes: last.notes.iter().peekable(), groups: groups.into_iter().peekable() }
    }

    /// Writes those that come before a key; all that are left without one.
    fn before(
        &mut self,
        tree: &mut TreeWriter,
        nodes: &mut Nodes<'_>,
        end: Option<&Key>,
    ) -> Result<()> {
        loop {
            let note = self.notes.peek().map(|n| node_key(self.plan, n));
            let group = self.groups.peek().map(|(key, _)| *key);
            let next = [note, group].into_iter().flatten().min();
            let Some(next) = next.filter(|n| end.is_none_or(|e| n < e)) else { return Ok(()) };
            if note == Some(next) {
                let note = self.notes.next().expect("it was there");
                tree.push(nodes, next, &node_item(self.plan, note).encode())?;
            } else {
                let (key, item) = self.groups.next().expect("it was there");
                tree.push(nodes, key, &item)?;
            }
        }
    }
}

fn node_key(plan: &Plan, note: &Note) -> Key {
    if plan.features.skinny_metadata {
        return Key::new(note.at, KeyType::METADATA_ITEM, u64::from(note.level));
    }
    Key::new(note.at, KeyType::EXTENT_ITEM, u64::from(plan.nodesize))
}

fn node_item(plan: &Plan, note: &Note) -> ExtentItem {
    // The long form has the node's first key, which nothing reads.
    let block = (!plan.features.skinny_metadata)
        .then_some(TreeBlockInfo { key: DiskKey::from(Key::MIN), level: note.level });
    ExtentItem {
        refs: 1,
        generation: GENERATION,
        flags: ExtentFlags::TREE_BLOCK,
        block,
        inline: vec![(ExtentRef::TreeBlock { root: ObjectId(note.owner) }, 1)],
    }
}

type Items = Vec<(Key, Vec<u8>)>;

/// Items of data extents with their references.
struct DataExtents<'a> {
    refs: crate::sort::Reader<'a, RefKey>,
}

/// Inline references of one item at most, so that it takes a sixteenth of the smallest leaf that
/// matters. The others have items of their own.
const MOST_INLINE: usize = 33;

impl DataExtents<'_> {
    /// The items of the next extent.
    fn next(&mut self) -> Result<Option<Items>> {
        let Some((key, value)) = self.refs.next()? else { return Ok(None) };
        let stored = u64::from_le_bytes(value[..].try_into().expect("a length"));
        let start = key.start;
        let mut refs = vec![(data_ref(&key), 1u32)];
        while let Some(key) = self.refs.peek()?.filter(|k| k.start == start) {
            self.refs.next()?;
            let next = data_ref(&key);
            match refs.last_mut() {
                Some((last, count)) if *last == next => *count += 1,
                _ => refs.push((next, 1)),
            }
        }
        Ok(Some(extent_items(Logical(start), stored, refs)))
    }
}

fn data_ref(key: &RefKey) -> ExtentRef {
    ExtentRef::Data {
        root: ObjectId(key.root),
        objectid: ObjectId(key.inode),
        offset: FileOffset(key.offset),
    }
}

fn extent_items(start: Logical, stored: u64, mut refs: Vec<(ExtentRef, u32)>) -> Items {
    let total = refs.iter().map(|(_, count)| u64::from(*count)).sum();
    refs.sort_by_key(|(r, _)| r.inline_order());
    let keyed = refs.split_off(refs.len().min(MOST_INLINE));
    let item = ExtentItem {
        refs: total,
        generation: GENERATION,
        flags: ExtentFlags::DATA,
        block: None,
        inline: refs,
    };
    let mut items = vec![(Key::new(start, KeyType::EXTENT_ITEM, stored), item.encode())];
    let mut own = BTreeMap::new();
    for (r, count) in keyed {
        let mut key = r.keyed(start);
        while own.contains_key(&key) {
            key.offset += 1;
        }
        own.insert(key, r.encode_keyed(count));
    }
    items.extend(own);
    items
}
