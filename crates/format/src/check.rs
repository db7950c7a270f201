//! The node checker: is this block what its parent says, and would Linux accept it?
//!
//! It runs on every node read from a device and again on every node about to be written, so that
//! damage neither spreads into the engine nor out of it. What is hidden here is what a valid node
//! is: header, layout of items, order of keys, and one rule set per kind of item (`files` for
//! what subvolumes hold, `space` for extents, chunks and devices). After it has passed, the views
//! of [`crate::node`] never come up empty, and item parsers find the sizes that they ask for.
//!
//! The rules are those of Linux's own checker, as observed from what it refuses: Linux would turn
//! read-only over a node that breaks them. Rules that need other blocks (does a reference have an
//! extent?) belong to the offline checker.
//!
//! The good path allocates nothing and computes each item's rules once, from its bytes; messages
//! are put together only for a bad node.

mod files;
mod space;

pub use space::check_chunk;

use crate::node::{BACKREF_REV, FLAG_WRITTEN, ITEM_SIZE, NodeView, leaf_capacity, max_pointers};
use crate::{
    CsumType, FormatError, FormatResult, Generation, Key, KeyType, Logical, MAX_LEVEL, ObjectId,
    SECTOR_SIZE, TreeId,
};

/// What is known of a node before it is read: what its parent says, and its file system.
#[derive(Debug, Clone)]
pub struct Expect {
    /// Node size of the file system, a power of two from 4096 to 65536.
    pub nodesize: u32,
    /// Uuid in every header: [`crate::Superblock::metadata_fsid`].
    pub fsid: [u8; 16],
    /// Address the node was read from or is written to.
    pub bytenr: Logical,
    /// Level below the parent's, or that of the root's pointer.
    pub level: Option<u8>,
    /// Generation in the parent's pointer or the root item.
    pub generation: Option<Generation>,
    /// Tree the node was reached from; `None` where that is unknown.
    pub owner: Option<TreeId>,
    /// Is it the root of its tree? Roots may be empty and must belong to their tree.
    pub is_root: bool,
    /// Key in the parent's pointer.
    pub first_key: Option<Key>,
    /// Set for bytes off a device: the checksum must match and the node must be marked written.
    pub csum: Option<CsumType>,
    /// Last generation that can be referred to is the one after this.
    pub super_generation: Generation,
    /// May names be others than those that the keys of their entries were made from? So it is in
    /// metadata dumps that were made to hide names.
    pub names_hidden: bool,
}

/// Returns a [`FormatError`] with a formatted message.
macro_rules! bad {
    ($($arg:tt)*) => { return Err($crate::FormatError::new(format!($($arg)*))) };
}
use bad;

/// Checks a node and everything in it.
///
/// # Errors
/// The first rule that it breaks, with the slot and key for rules about items.
pub fn check_node(bytes: &[u8], expect: &Expect) -> FormatResult<()> {
    check(bytes, expect, expect.csum)
}

/// As [`check_node`], for a node that is about to be written and has no checksum yet: neither it
/// nor the flag that goes with it is looked at (`expect.csum` counts as `None`), but items that
/// hold checksums of the given type are.
///
/// # Errors
/// As [`check_node`].
pub fn check_unsealed(bytes: &[u8], expect: &Expect, csum: CsumType) -> FormatResult<()> {
    if expect.csum.is_some() {
        return check(bytes, &Expect { csum: None, ..expect.clone() }, Some(csum));
    }
    check(bytes, expect, Some(csum))
}

fn check(bytes: &[u8], expect: &Expect, csum: Option<CsumType>) -> FormatResult<()> {
    if bytes.len() != expect.nodesize as usize || bytes.len() < 4096 {
        bad!("node has {} bytes, expected {}", bytes.len(), expect.nodesize);
    }
    let node = NodeView(bytes);
    check_header(node, expect)?;
    let cx = Context {
        tree: node.owner(),
        newest: expect.super_generation.0.saturating_add(1),
        nodesize: expect.nodesize,
        csum_size: csum.map(CsumType::size),
        names_hidden: expect.names_hidden,
    };
    if node.level() == 0 {
        check_leaf(node, expect, &cx)
    } else {
        check_interior(node, expect, &cx)
    }
}

fn check_header(node: NodeView<'_>, expect: &Expect) -> FormatResult<()> {
    let header = node.header();
    // Address and fsid before the checksum: they tell a block that was never written, or was
    // written elsewhere, from one whose bytes rotted.
    if node.bytenr() != expect.bytenr {
        bad!("header says block {}, expected {}", node.bytenr(), expect.bytenr);
    }
    if header.fsid != expect.fsid {
        bad!(
            "header has fsid {}, expected {}",
            uuid::Uuid::from_bytes(header.fsid),
            uuid::Uuid::from_bytes(expect.fsid)
        );
    }
    if let Some(csum) = expect.csum {
        if !node.csum_matches(csum) {
            bad!("{} checksum does not match", csum.name());
        }
        if node.flags() & FLAG_WRITTEN == 0 {
            bad!("header lacks the flag WRITTEN");
        }
    }
    let rev = (header.flags_and_rev.get() >> 56) as u8;
    if rev != BACKREF_REV {
        bad!("header has back reference revision {rev}, expected {BACKREF_REV}");
    }
    let level = node.level();
    if level >= MAX_LEVEL {
        bad!("level is {level}, expected less than {MAX_LEVEL}");
    }
    if let Some(expected) = expect.level
        && level != expected
    {
        bad!("level is {level}, expected {expected}");
    }
    let generation = node.generation();
    if let Some(expected) = expect.generation
        && generation != expected
    {
        bad!("generation is {generation}, expected {expected}");
    }
    if generation.0 > expect.super_generation.0.saturating_add(1) {
        bad!("generation is {generation}, but the superblock's is {}", expect.super_generation);
    }
    let owner = node.owner();
    if let Some(tree) = expect.owner
        && !owner_fits(owner, tree, expect.is_root)
    {
        bad!("owner is tree {owner}, which cannot have nodes in tree {tree}");
    }
    if let (Some(expected), Some(first)) = (expect.first_key, node.key(0))
        && first != expected
    {
        bad!("first key is {first}, expected {expected}");
    }
    Ok(())
}

/// May a node made by tree `owner` stand in `tree`? Snapshots share nodes below the root.
#[must_use]
pub fn owner_fits(owner: TreeId, tree: TreeId, is_root: bool) -> bool {
    if tree == ObjectId::TREE_RELOC {
        owner.holds_files()
    } else if tree.is_subvolume() && !is_root {
        owner.is_subvolume()
    } else {
        owner == tree
    }
}

/// What the item rules need to know about the node.
struct Context {
    /// Owner in the header.
    tree: TreeId,
    /// Largest generation that may be named.
    newest: u64,
    nodesize: u32,
    /// Bytes of one data checksum; without it, checksum items cannot be checked.
    csum_size: Option<usize>,
    /// Entries are filed by the hashes of names that they do not have any more.
    names_hidden: bool,
}

fn check_interior(node: NodeView<'_>, expect: &Expect, cx: &Context) -> FormatResult<()> {
    let (n, max) = (node.nritems(), max_pointers(expect.nodesize));
    if n == 0 || n > max {
        bad!("node of level {} has {n} pointers, expected 1 to {max}", node.level());
    }
    let mut previous: Option<Key> = None;
    for (slot, pointer) in node.pointers().iter().enumerate() {
        let key = Key::from(pointer.key);
        if let Some(p) = previous
            && p >= key
        {
            bad!("pointer {slot}: key {key} does not follow {p}");
        }
        previous = Some(key);
        let (child, generation) = (pointer.blockptr.get(), pointer.generation.get());
        if child == 0 || !aligned(child) {
            bad!(
                "pointer {slot} {key}: child at {child}, expected a multiple of {SECTOR_SIZE}, \
                    not 0"
            );
        }
        if generation > cx.newest {
            bad!("pointer {slot} {key}: generation {generation}, expected at most {}", cx.newest);
        }
    }
    Ok(())
}

fn check_leaf(node: NodeView<'_>, expect: &Expect, cx: &Context) -> FormatResult<()> {
    let n = node.nritems();
    let capacity = leaf_capacity(expect.nodesize);
    if n == 0 {
        return check_empty_leaf(expect, cx);
    }
    if n > capacity / ITEM_SIZE {
        bad!("leaf says {n} items, at most {} fit", capacity / ITEM_SIZE);
    }
    let headers = n * ITEM_SIZE;
    // Data grows down from the end without gaps: each item ends where the one before begins.
    let mut end = capacity;
    let mut before = Before::default();
    for (slot, item) in node.items().iter().enumerate() {
        let key = Key::from(item.key);
        if let Some(p) = before.key
            && p >= key
        {
            bad!("item {slot}: key {key} does not follow {p}");
        }
        let (offset, size) = (item.offset.get() as usize, item.size.get() as usize);
        if offset.checked_add(size) != Some(end) {
            bad!("item {slot} {key}: {size} bytes of data at {offset}, expected to end at {end}");
        }
        if offset < headers {
            bad!(
                "item {slot} {key}: data at {offset} overlaps the item headers, which end at \
                    {headers}"
            );
        }
        end = offset;
        let Some(data) = node.data(slot) else {
            bad!("item {slot} {key}: data lies outside the leaf");
        };
        match check_item(cx, &key, data, &before) {
            Ok(range_end) => before.advance(key, range_end),
            Err(e) => bad!("item {slot} {key}: {e}"),
        }
    }
    Ok(())
}

fn check_empty_leaf(expect: &Expect, cx: &Context) -> FormatResult<()> {
    const NEVER_EMPTY: [ObjectId; 6] = [
        ObjectId::ROOT_TREE,
        ObjectId::EXTENT_TREE,
        ObjectId::CHUNK_TREE,
        ObjectId::DEV_TREE,
        ObjectId::FS_TREE,
        ObjectId::DATA_RELOC_TREE,
    ];
    if !expect.is_root {
        bad!("leaf is empty, which only a root may be");
    }
    if cx.tree == ObjectId(0) || NEVER_EMPTY.contains(&cx.tree) {
        bad!("leaf is empty, which the root of tree {} never is", cx.tree);
    }
    Ok(())
}

/// What came before an item in its leaf.
#[derive(Default)]
struct Before {
    key: Option<Key>,
    /// End of the range that the item directly before covers, if its kind covers one.
    range_end: Option<u64>,
    /// End of the last extent; its keyed references stand between it and the next.
    extent_end: u64,
}

impl Before {
    fn advance(&mut self, key: Key, range_end: Option<u64>) {
        self.key = Some(key);
        self.range_end = range_end;
        if let (KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM, Some(end)) = (key.kind, range_end) {
            self.extent_end = end;
        }
    }
    /// End of the item directly before, if that is of the same object and kind as `key`.
    fn end_of_same(&self, key: &Key) -> Option<u64> {
        let same = self.key.is_some_and(|k| k.objectid == key.objectid && k.kind == key.kind);
        if same { self.range_end } else { None }
    }
}

/// Checks an item; returns the end of the range that it covers, for kinds that must not overlap.
fn check_item(cx: &Context, key: &Key, data: &[u8], before: &Before) -> FormatResult<Option<u64>> {
    match key.kind {
        KeyType::INODE_ITEM => files::inode_item(cx, key, data)?,
        KeyType::INODE_REF => files::inode_ref(cx, key, data, before)?,
        KeyType::INODE_EXTREF => files::inode_extref(data)?,
        KeyType::XATTR_ITEM | KeyType::DIR_ITEM | KeyType::DIR_INDEX => {
            files::dir_item(cx, key, data, before)?
        }
        KeyType::EXTENT_DATA => return files::extent_data(cx, key, data, before).map(Some),
        KeyType::EXTENT_CSUM => return files::extent_csum(cx, key, data, before),
        KeyType::ROOT_ITEM => files::root_item(cx, key, data)?,
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => files::root_ref(data)?,
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
            return space::extent_item(cx, key, data, before).map(Some);
        }
        KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::SHARED_DATA_REF => space::keyed_ref(key, data)?,
        KeyType::BLOCK_GROUP_ITEM => space::block_group_item(key, data)?,
        KeyType::FREE_SPACE_INFO | KeyType::FREE_SPACE_EXTENT | KeyType::FREE_SPACE_BITMAP => {
            space::free_space(key, data)?;
        }
        KeyType::DEV_EXTENT => return space::dev_extent(key, data, before).map(Some),
        KeyType::DEV_ITEM => space::dev_item(key, data)?,
        KeyType::CHUNK_ITEM => space::check_chunk(key, data, cx.nodesize)?,
        _ => {}
    }
    Ok(None)
}

fn aligned(v: u64) -> bool {
    v.is_multiple_of(u64::from(SECTOR_SIZE))
}

fn size_is(data: &[u8], expected: usize) -> FormatResult<()> {
    if data.len() != expected {
        bad!("size is {}, expected {expected}", data.len());
    }
    Ok(())
}

/// `N` bytes at an offset; an error if the item is shorter.
fn bytes_at<const N: usize>(data: &[u8], at: usize) -> FormatResult<[u8; N]> {
    match data.get(at..).and_then(<[u8]>::first_chunk) {
        Some(b) => Ok(*b),
        None => {
            Err(FormatError::new(format!("size is {}, expected at least {}", data.len(), at + N)))
        }
    }
}
fn u8_at(data: &[u8], at: usize) -> FormatResult<u8> {
    Ok(bytes_at::<1>(data, at)?[0])
}
fn u16_at(data: &[u8], at: usize) -> FormatResult<u16> {
    Ok(u16::from_le_bytes(bytes_at(data, at)?))
}
fn u32_at(data: &[u8], at: usize) -> FormatResult<u32> {
    Ok(u32::from_le_bytes(bytes_at(data, at)?))
}
fn u64_at(data: &[u8], at: usize) -> FormatResult<u64> {
    Ok(u64::from_le_bytes(bytes_at(data, at)?))
}
