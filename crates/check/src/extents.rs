//! The extent tree: what is allocated, and which uses of it are recorded.
//!
//! Each extent is an item, perhaps with references in items of their own behind it. They must agree
//! with each other, with the extents beside them and with the block groups. The references go to
//! [`crate::refs`] as claims. The space goes into a sum for each block group, by which the
//! free-space tree is compared: every address has a random value, and each range, allocated or
//! free, adds the value of its end minus that of its beginning. Together the ranges tile the group
//! exactly if the sum is that of the group as a whole.

use crate::chunks::Chunk;
use crate::coverage::Fact;
use crate::finding::{Finding, Kind};
use crate::refs::Size;
use crate::run::{Close, Part, Run};
use crate::source::{Edge, Node};
use crate::walk::Visit;
use crate::world::Pass;
use larder_format::items::{BlockGroupFlags, ExtentFlags, ExtentItem, ExtentRef, parse_keyed_refs};
use larder_format::node::NodeView;
use larder_format::{FormatError, Incompat, Key, KeyType, Logical, LogicalRange, ObjectId};
use parking_lot::Mutex;
use std::sync::atomic::Ordering::Relaxed;

/// Walks the extent tree.
pub(crate) struct Extents<'a> {
    pub(crate) pass: &'a Pass<'a>,
    /// Block group items that stand in this tree.
    pub(crate) block_groups: Mutex<Vec<(Key, Vec<u8>)>>,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    key: Key,
    len: u64,
    size: Size,
    refs: u64,
    flags: ExtentFlags,
}

/// One extent and its references.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    at: Logical,
    item: Option<Item>,
    first_key: Key,
    /// References counted.
    seen: u64,
    /// Sum of their hashes.
    sum: u64,
    incomplete: bool,
}

impl Part for Extent {
    fn id(&self) -> u64 {
        self.at.0
    }
    fn merge(&mut self, behind: Self) {
        self.item = self.item.or(behind.item);
        self.seen = self.seen.saturating_add(behind.seen);
        self.sum = self.sum.wrapping_add(behind.sum);
        self.incomplete |= behind.incomplete;
    }
    fn set_incomplete(&mut self) {
        self.incomplete = true;
    }
}

impl Visit for Extents<'_> {
    type Piece = Run<Extent>;
    const SHARED: bool = false;

    fn empty(&self) -> Self::Piece {
        Run::empty()
    }
    fn lost(&self, edge: &Edge) -> Self::Piece {
        self.pass.lost(edge);
        Run::lost()
    }
    fn child(&self, parent: NodeView<'_>, edge: &Edge) {
        self.pass.uses_child(parent, edge);
    }
    fn join(&self, _: &Edge, left: Self::Piece, right: Self::Piece, _: bool) -> Self::Piece {
        left.join(right, &mut Closer(self.pass))
    }
    fn leaf(&self, edge: &Edge, node: &Node, _: bool) -> Self::Piece {
        let view = node.view();
        let mut run = Run::empty();
        let mut closer = Closer(self.pass);
        for slot in 0..view.items().len() {
            let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
            match key.kind {
                KeyType::EXTENT_ITEM
                | KeyType::METADATA_ITEM
                | KeyType::TREE_BLOCK_REF
                | KeyType::SHARED_BLOCK_REF
                | KeyType::EXTENT_DATA_REF
                | KeyType::SHARED_DATA_REF => run.push(self.part(edge, key, data), &mut closer),
                KeyType::BLOCK_GROUP_ITEM => {
                    if self.pass.first {
                        self.block_groups.lock().push((key, data.to_vec()));
                    }
                }
                _ => self.pass.misplaced(edge, key),
            }
        }
        run
    }
}

impl Extents<'_> {
    fn part(&self, edge: &Edge, key: Key, data: &[u8]) -> Extent {
        let at = Logical(key.objectid.0);
        let mut part =
            Extent { at, item: None, first_key: key, seen: 0, sum: 0, incomplete: false };
        let refs = if matches!(key.kind, KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM) {
            match ExtentItem::parse(key.kind, data) {
                Ok(item) => {
                    part.item = Some(self.item(key, &item));
                    Ok(item.inline)
                }
                Err(e) => Err(e),
            }
        } else {
            self.hash(edge, key, data);
            parse_keyed_refs(&key, data)
        };
        match refs {
            Ok(refs) => {
                for (by, count) in
                    refs.iter().filter(|(by, _)| !matches!(by, ExtentRef::Owner { .. }))
                {
                    part.seen = part.seen.saturating_add(u64::from(*count));
                    let sum = self.pass.refs.claim(at, *by, u64::from(*count));
                    part.sum = part.sum.wrapping_add(sum);
                }
            }
            Err(e) => {
                self.pass.invalid(Kind::ExtentItemInvalid, edge, key, &e);
                part.incomplete = true;
            }
        }
        part
    }

    /// A reference to data is filed under its hash, or behind others with the same hash.
    fn hash(&self, edge: &Edge, key: Key, data: &[u8]) {
        const COLLISIONS: u64 = 64;
        if key.kind != KeyType::EXTENT_DATA_REF {
            return;
        }
        let Ok(refs) = parse_keyed_refs(&key, data) else { return };
        if let Some((by, _)) =
            refs.iter().find(|(by, _)| key.offset.wrapping_sub(by.sequence()) > COLLISIONS)
        {
            let e = FormatError::new(format!(
                "the reference is filed under {}, its hash is {}",
                key.offset,
                by.sequence()
            ));
            self.pass.invalid(Kind::ExtentItemInvalid, edge, key, &e);
        }
    }

    fn item(&self, key: Key, item: &ExtentItem) -> Item {
        let world = self.pass.world;
        if key.kind == KeyType::METADATA_ITEM {
            world.uses(Incompat::SKINNY_METADATA);
        }
        let nodesize = u64::from(world.source.nodesize());
        let (len, size) = if item.flags.contains(ExtentFlags::DATA) {
            (key.offset, Size::Data(key.offset))
        } else {
            let level = item.block.map_or(key.offset, |b| u64::from(b.level));
            (nodesize, Size::Node(u8::try_from(level).unwrap_or(u8::MAX), item.generation))
        };
        let mapped = || world.chunks.find(Logical(key.objectid.0)).is_some();
        if item.flags.contains(ExtentFlags::FULL_BACKREF) && self.pass.first && mapped() {
            world.full_backref.insert(key.objectid.0);
        }
        Item { key, len, size, refs: item.refs, flags: item.flags }
    }
}

/// What is done with an extent when all of it is known.
pub(crate) struct Closer<'a>(pub(crate) &'a Pass<'a>);

impl Closer<'_> {
    fn finding(&self, kind: Kind, extent: &Extent, what: String) {
        let key = extent.item.map_or(extent.first_key, |i| i.key);
        let at = extent.at;
        self.0.add(|| Finding::new(kind, what).tree(ObjectId::EXTENT_TREE).key(key).address(at));
    }

    /// Is the extent where it may be? Counts it as used there.
    fn place(&self, extent: &Extent, item: &Item) {
        let world = self.0.world;
        let (at, len) = (extent.at, item.len);
        let range = LogicalRange::new(at, len);
        let chunk = world.chunks.find(at);
        let Some(chunk) = chunk.filter(|c| range.end <= c.end()) else {
            let what = match chunk {
                Some(c) => {
                    format!(
                        "{len} bytes at {at} reach over the end of the block group at {}",
                        c.start
                    )
                }
                None => format!("{len} bytes at {at} lie in no block group"),
            };
            return self.finding(Kind::ExtentOutsideBlockGroup, extent, what);
        };
        chunk.used.fetch_add(len, Relaxed);
        chunk.tile(&world.hashing, range);
        self.suits(extent, item, chunk);
        if world.is_rewritten() {
            return;
        }
        for copy in chunk.superblocks.iter().filter(|copy| copy.overlaps(range)) {
            let (from, bytes) = (copy.start, copy.len());
            let what =
                format!("{len} bytes at {at} lie on a superblock copy ({from}, {bytes} bytes)");
            self.finding(Kind::ExtentOnSuperblock, extent, what);
        }
    }

    fn suits(&self, extent: &Extent, item: &Item, chunk: &Chunk) {
        let wanted = if item.flags.contains(ExtentFlags::DATA) {
            BlockGroupFlags::DATA
        } else if chunk.flags.contains(BlockGroupFlags::SYSTEM) {
            BlockGroupFlags::SYSTEM
        } else {
            BlockGroupFlags::METADATA
        };
        if !chunk.flags.contains(wanted) {
            let what = format!(
                "{} lies in a {} block group",
                if wanted == BlockGroupFlags::DATA { "data" } else { "a node" },
                chunk.flags.type_name()
            );
            self.finding(Kind::ExtentWrongBlockGroup, extent, what);
        }
    }
}

impl Close<Extent> for Closer<'_> {
    fn close(&mut self, extent: Extent) {
        let pass = self.0;
        let Some(item) = extent.item else {
            if !extent.incomplete {
                let what = format!("there are references to {}, but no extent item", extent.at);
                self.finding(Kind::ExtentRefWithoutItem, &extent, what);
            }
            return;
        };
        pass.refs.claimed(extent.at, item.size, extent.sum);
        if let (Size::Data(len), Some(coverage)) = (item.size, pass.coverage)
            && let Some(chunk) = pass.world.chunks.find(extent.at)
        {
            let extent = LogicalRange::new(extent.at, len);
            coverage.add(Fact::Data, extent.intersection(chunk.range()));
        }
        if !pass.first {
            return;
        }
        pass.world.counts.extents.fetch_add(1, Relaxed);
        if extent.seen != item.refs && !extent.incomplete {
            let what = format!("refs is {}, but {} references are listed", item.refs, extent.seen);
            self.finding(Kind::ExtentRefCount, &extent, what);
        }
        self.place(&extent, &item);
    }

    fn meet(&mut self, left: &Extent, right: &Extent) {
        let Some(item) = left.item else { return };
        let end = left.at.plus(item.len);
        if end > right.at {
            let what = format!(
                "the extent at {} ends at {end}, behind the beginning of this one",
                left.at
            );
            self.finding(Kind::ExtentOverlap, right, what);
        }
    }
}
