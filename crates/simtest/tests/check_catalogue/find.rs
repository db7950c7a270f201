//! Finds the item that a damage is planted on, by path or by property.

use anyhow::{Context, Result, ensure};
use larder_format::items::dir::DirEntries;
use larder_format::items::inode_ref::InodeRefs;
use larder_format::items::keys::{dir_item_key, inode_key};
use larder_format::items::{BlockGroupFlags, ExtentRecord, FileExtent};
use larder_format::node::NodeView;
use larder_format::{CompatRo, Incompat, Key, KeyType, Logical, ObjectId, TreeId};
use larder_simtest::damage::{Damage, ItemEdit};

pub(crate) const FS: TreeId = ObjectId::FS_TREE;
pub(crate) const ROOTS: TreeId = ObjectId::ROOT_TREE;
pub(crate) const EXTENTS: TreeId = ObjectId::EXTENT_TREE;
pub(crate) const CHUNKS: TreeId = ObjectId::CHUNK_TREE;
pub(crate) const DEVICES: TreeId = ObjectId::DEV_TREE;
pub(crate) const CSUMS: TreeId = ObjectId::CSUM_TREE;
pub(crate) const UUIDS: TreeId = ObjectId::UUID_TREE;
pub(crate) const FREE: TreeId = ObjectId::FREE_SPACE_TREE;
pub(crate) const SECTOR: u64 = 4096;

/// Inode at a path of the top-level subvolume.
pub(crate) fn ino(d: &Damage, path: &str) -> Result<ObjectId> {
    ino_in(d, FS, path)
}

/// Inode at a path of a subvolume.
pub(crate) fn ino_in(d: &Damage, tree: TreeId, path: &str) -> Result<ObjectId> {
    path.split('/').try_fold(ObjectId(256), |dir, name| {
        let item = d.get(tree, dir_item_key(dir, name.as_bytes())).context(path.to_owned())?;
        let mut entries = DirEntries::new(&item).filter_map(Result::ok);
        let entry = entries.find(|e| e.name == name.as_bytes()).with_context(|| path.to_owned())?;
        Ok(entry.location.objectid)
    })
}

/// Key of the inode item at a path.
pub(crate) fn inode(d: &Damage, path: &str) -> Result<Key> {
    Ok(inode_key(ino(d, path)?))
}

/// The inode item at a path, to be changed.
pub(crate) fn inode_item<'a>(d: &'a mut Damage, path: &str) -> Result<ItemEdit<'a>> {
    let key = inode(d, path)?;
    Ok(d.item(FS, key))
}

/// What the directory at `path` has for its entry `name`: keys of DIR_ITEM and DIR_INDEX, and the
/// inode.
pub(crate) struct Name {
    pub item: Key,
    pub index: Key,
    pub reference: Key,
}

/// The items of a name; its inode must not be a subvolume.
pub(crate) fn name(d: &Damage, path: &str) -> Result<Name> {
    let (dir, name) = path.rsplit_once('/').context("a path below the root")?;
    let (dir, child) = (ino(d, dir)?, ino(d, path)?);
    let reference = Key::new(child, KeyType::INODE_REF, dir.0);
    let refs = d.get(FS, reference)?;
    let mut entries = InodeRefs::new(&refs).filter_map(Result::ok);
    let index =
        entries.find(|r| r.name == name.as_bytes()).context("a reference with this name")?.index;
    Ok(Name {
        item: dir_item_key(dir, name.as_bytes()),
        index: Key::new(dir, KeyType::DIR_INDEX, index),
        reference,
    })
}

/// The first extent on the disk of the file at `path`: key and content of its EXTENT_DATA.
pub(crate) fn stored(d: &Damage, path: &str) -> Result<(Key, ExtentRecord)> {
    stored_in(d, FS, path)
}

/// The item of that extent, to be changed.
pub(crate) fn stored_item<'a>(d: &'a mut Damage, path: &str) -> Result<ItemEdit<'a>> {
    let (key, _) = stored(d, path)?;
    Ok(d.item(FS, key))
}

/// [`stored`] in a subvolume.
pub(crate) fn stored_in(d: &Damage, tree: TreeId, path: &str) -> Result<(Key, ExtentRecord)> {
    let ino = ino_in(d, tree, path)?;
    for (key, data) in d.items(tree)? {
        if key.objectid == ino
            && key.kind == KeyType::EXTENT_DATA
            && let FileExtent::Stored(record) = FileExtent::parse(&data)?
            && record.disk_bytenr.0 != 0
        {
            return Ok((key, record));
        }
    }
    anyhow::bail!("{path} has no extent on the disk")
}

/// Key of the EXTENT_ITEM of the first extent of the file at `path`.
pub(crate) fn extent(d: &Damage, path: &str) -> Result<Key> {
    let (_, record) = stored(d, path)?;
    Ok(Key::new(record.disk_bytenr, KeyType::EXTENT_ITEM, record.disk_num_bytes))
}

/// That EXTENT_ITEM, to be changed.
pub(crate) fn extent_item<'a>(d: &'a mut Damage, path: &str) -> Result<ItemEdit<'a>> {
    let key = extent(d, path)?;
    Ok(d.item(EXTENTS, key))
}

/// Key of the checksum item that covers `at`.
pub(crate) fn csum_of(d: &Damage, at: Logical) -> Result<Key> {
    let items = d.items(CSUMS)?;
    let before = items.into_iter().rfind(|(key, _)| key.offset <= at.0);
    Ok(before.context("checksums at or before the address")?.0)
}

/// Index of the checksum of `at` in the item at `key`.
pub(crate) fn csum_index(key: Key, at: Logical) -> usize {
    ((at.0 - key.offset) / SECTOR) as usize
}

/// Does the image have short records for nodes?
pub(crate) fn skinny(d: &Damage) -> bool {
    d.superblock().incompat().contains(Incompat::SKINNY_METADATA)
}

/// Key of the record of a node in the extent tree.
pub(crate) fn node_record(d: &Damage, at: Logical) -> Result<Key> {
    let node = d.node(at)?;
    Ok(if skinny(d) {
        Key::new(at, KeyType::METADATA_ITEM, NodeView(&node).level().into())
    } else {
        Key::new(at, KeyType::EXTENT_ITEM, d.superblock().nodesize().into())
    })
}

/// The tree that holds the block groups.
pub(crate) fn group_tree(d: &Damage) -> TreeId {
    if d.superblock().compat_ro().contains(CompatRo::BLOCK_GROUP_TREE) {
        ObjectId::BLOCK_GROUP_TREE
    } else {
        EXTENTS
    }
}

/// Key of the BLOCK_GROUP_ITEM that holds `at`.
pub(crate) fn group_of(d: &Damage, at: Logical) -> Result<Key> {
    let (key, _) = d.first(group_tree(d), |key, _| {
        key.kind == KeyType::BLOCK_GROUP_ITEM
            && (key.objectid.0..key.objectid.0 + key.offset).contains(&at.0)
    })?;
    Ok(key)
}

/// Key of the chunk item that holds `at`.
pub(crate) fn chunk_of(d: &Damage, at: Logical) -> Result<Key> {
    let chunk = d.chunks().iter().find(|c| c.start <= at && at < c.end()).context("a chunk")?;
    Ok(Key::new(256, KeyType::CHUNK_ITEM, chunk.start.0))
}

/// The DEV_EXTENT of the first stripe of the chunk that holds `at`.
pub(crate) fn dev_extent_of(d: &Damage, at: Logical) -> Result<Key> {
    let chunk = d.chunks().iter().find(|c| c.start <= at && at < c.end()).context("a chunk")?;
    Ok(Key::new(chunk.stripes[0].device.0, KeyType::DEV_EXTENT, chunk.stripes[0].at.0))
}

/// A place on the device behind the last device extent.
pub(crate) fn behind_dev_extents(d: &Damage) -> Result<u64> {
    let ends = d.items(DEVICES)?.into_iter().filter(|(k, _)| k.kind == KeyType::DEV_EXTENT).map(
        |(key, data)| {
            let length = u64::from_le_bytes(data[24..32].try_into().expect("eight bytes"));
            key.offset + length
        },
    );
    ends.max().context("device extents")
}

/// Free logical space in a group of this kind: the first sector of a free run of at least `len`
/// bytes, as the free-space tree lists it. Not at a superblock.
pub(crate) fn free_space(d: &Damage, kind: BlockGroupFlags, len: u64) -> Result<Logical> {
    for chunk in d.chunks().iter().filter(|c| c.kind & kind.bits() != 0) {
        for (key, _) in d.items(FREE)? {
            let at = Logical(key.objectid.0);
            let clear =
                |(from, bytes): &(Logical, u64)| from.0 + bytes <= at.0 || at.0 + len <= from.0;
            if key.kind == KeyType::FREE_SPACE_EXTENT
                && (chunk.start..chunk.end()).contains(&at)
                && key.offset >= len
                && chunk.superblock_ranges().iter().all(clear)
            {
                return Ok(at);
            }
        }
    }
    anyhow::bail!("no free run of {len} bytes")
}

/// Logical space that no chunk covers.
pub(crate) fn unmapped(d: &Damage) -> Logical {
    let end = d.chunks().iter().map(|c| c.end().0).max().unwrap_or(0);
    Logical(end + (1 << 30))
}

/// A leaf of the top-level subvolume that is not its first: one that holds entries of `plant/many`.
pub(crate) fn fs_leaf(d: &Damage) -> Result<Logical> {
    let many = ino(d, "plant/many")?;
    let step = d.leaf_of(FS, Key::new(many, KeyType::DIR_INDEX, 100))?;
    ensure!(d.nodes(FS, 0)?.len() > 2, "the tree of files has too few leaves");
    Ok(step.at)
}

/// The node above a leaf, and the slot of the pointer to it.
pub(crate) fn parent_of(d: &Damage, leaf: Logical) -> Result<(Logical, usize)> {
    for node in d.nodes(FS, 1)? {
        let bytes = d.node(node)?;
        let pointers = NodeView(&bytes).pointers();
        if let Some(slot) = pointers.iter().position(|p| p.blockptr.get() == leaf.0) {
            return Ok((node, slot));
        }
    }
    anyhow::bail!("nothing points to {leaf}")
}

/// Tries a damage on one item of a tree after the other, until there is room for it in the item's
/// leaf.
pub(crate) fn where_it_fits(
    d: &mut Damage,
    tree: TreeId,
    wanted: impl Fn(&Key, &[u8]) -> bool,
    plant: impl Fn(&mut Damage, Key) -> Result<()>,
) -> Result<()> {
    for (key, _) in d.items(tree)?.iter().filter(|(key, data)| wanted(key, data)) {
        let mut attempt = d.clone();
        if plant(&mut attempt, *key).is_ok() {
            *d = attempt;
            return Ok(());
        }
    }
    anyhow::bail!("no such item of tree {tree} has room in its leaf")
}
